"""Robust rules against loops in NumPy and SciPy, and clients that attack."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import optimize, stats

import federations
import linear_networks as linear
from fedjax_inv import attackers, fit, laws, robust
from fedjax_inv.algorithms import fedavg, fedipg, fedprox, scaffold
from fedjax_inv.checks import UsageError
from fedjax_inv.types import Aggregator, Algorithm, Model, Slots, Work

RULES: dict[str, Callable[[], Aggregator]] = {
    "median": robust.median,
    "trimmed_mean": lambda: robust.trimmed_mean(0.2),
    "geometric_median": robust.geometric_median,
    "krum": lambda: robust.krum(2),
    "multi_krum": lambda: robust.krum(1, num_chosen=3),
    "clipped_mean": lambda: robust.clipped_mean(2.0),
}
NUM_SLOTS = 9
every_rule = pytest.mark.parametrize("name", RULES)


def points(seed: int = 0, number: int = NUM_SLOTS) -> np.ndarray:
    """[S, 5] float64, one of them far away."""
    drawn = np.random.default_rng(seed).normal(size=(number, 5))
    drawn[number // 2] += 30
    return drawn


def applied(
    name: str | Aggregator, rows: np.ndarray, present: np.ndarray | None = None, chunk: int = 4
) -> np.ndarray:
    """The rule on uploads of two leaves, chunk by chunk."""
    rule = RULES[name]() if isinstance(name, str) else name
    present = np.ones(len(rows), bool) if present is None else present
    rows = np.where(present[:, None], rows, 0)  # as the engine gives them

    def upload(part: np.ndarray) -> Any:
        return {"a": jnp.asarray(part[..., :2].reshape(*part.shape[:-1], 2, 1)), "b": part[..., 2:]}

    total = rule.init(jax.tree.map(jnp.asarray, upload(rows[0])), len(rows))
    for start in range(0, len(rows), chunk):
        here = np.arange(start, min(start + chunk, len(rows)))
        ones = jnp.ones(len(here), jnp.int32)
        slots = Slots(jnp.asarray(here), jnp.asarray(here), jnp.asarray(present[here]), ones, ones)
        total = rule.add(total, jax.tree.map(jnp.asarray, upload(rows[here])), slots)
    found = rule.finish(total)
    return np.concatenate([np.asarray(found["a"]).ravel(), np.asarray(found["b"])])


def krum_loop(rows: np.ndarray, num_wrong: int, num_chosen: int) -> np.ndarray:
    scores = []
    for i, row in enumerate(rows):
        distances = sorted(((row - other) ** 2).sum() for j, other in enumerate(rows) if j != i)
        scores.append(sum(distances[: len(rows) - num_wrong - 2]))
    return np.asarray(rows[np.argsort(scores)[:num_chosen]].mean(0))


def clipped_loop(rows: np.ndarray, clip: float) -> np.ndarray:
    return np.asarray(np.mean([row * min(1, clip / np.linalg.norm(row)) for row in rows], axis=0))


EXPECTED: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "median": lambda rows: np.median(rows, axis=0),
    "trimmed_mean": lambda rows: stats.trim_mean(rows, 0.2, axis=0),
    "krum": lambda rows: krum_loop(rows, 2, 1),
    "multi_krum": lambda rows: krum_loop(rows, 1, 3),
    "clipped_mean": lambda rows: clipped_loop(rows, 2.0),
}


@pytest.mark.parametrize("name", EXPECTED)
@pytest.mark.parametrize("absent", [(), (0,), (2, 8)])
def test_a_rule_is_its_definition_over_those_who_came(name: str, absent: tuple[int, ...]) -> None:
    with jax.enable_x64(True):
        rows = points(number=NUM_SLOTS + len(absent))
        present = ~np.isin(np.arange(len(rows)), absent)
        got = applied(name, rows, present)
        np.testing.assert_allclose(got, EXPECTED[name](rows[present]), rtol=1e-9)
        assert np.abs(got - rows[present].mean(0)).max() > 0.1


@pytest.mark.parametrize("number", [5, 6, 10, 30])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.3, 0.49])
def test_the_trimmed_mean_leaves_out_what_scipy_leaves_out(number: int, share: float) -> None:
    rows = points(number=number).astype(np.float32)
    got = applied(robust.trimmed_mean(share), rows)
    np.testing.assert_allclose(got, stats.trim_mean(rows, share, axis=0), rtol=1e-5, atol=1e-6)


def test_the_geometric_median_has_the_least_total_distance() -> None:
    def total(point: np.ndarray) -> float:
        return float(np.linalg.norm(rows - point, axis=1).sum())

    with jax.enable_x64(True):
        rows = points()
        best = optimize.minimize(total, rows.mean(0), method="Nelder-Mead", tol=1e-10).x
        steps = [applied(robust.geometric_median(num_steps=n), rows) for n in (1, 2, 4, 200)]
        totals = [total(step) for step in steps]
        assert totals == sorted(totals, reverse=True)
        np.testing.assert_allclose(steps[-1], best, atol=1e-5)
        np.testing.assert_allclose(steps[0], rows.mean(0), atol=5)


@every_rule
def test_the_order_of_slots_and_empty_slots_change_nothing(name: str) -> None:
    rows, order = points().astype(np.float32), np.random.default_rng(1).permutation(NUM_SLOTS)
    plain = applied(name, rows)
    np.testing.assert_allclose(applied(name, rows[order], chunk=9), plain, rtol=1e-5, atol=1e-6)
    with_empty = np.insert(rows, [0, 4, 9], 7.0, axis=0)
    present = ~np.isin(np.arange(12), [0, 5, 11])
    np.testing.assert_allclose(applied(name, with_empty, present), plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", [name for name in RULES if name != "clipped_mean"])
def test_a_rule_moves_with_all_uploads(name: str) -> None:
    rows, by = points().astype(np.float32), np.float32([1, -2, 3, 0.5, 4])
    np.testing.assert_allclose(applied(name, rows + by), applied(name, rows) + by, atol=1e-4)


@every_rule
def test_equal_uploads_are_what_they_are(name: str) -> None:
    rows = np.tile(np.float32([0.1, 0, -0.2, 0.3, 0]), (NUM_SLOTS, 1))
    np.testing.assert_allclose(applied(name, rows), rows[0], rtol=1e-6)
    np.testing.assert_array_equal(applied(name, 0 * rows), 0)


@pytest.mark.parametrize("name", ["median", "trimmed_mean", "geometric_median", "krum"])
def test_one_upload_far_away_hardly_counts(name: str) -> None:
    rows = points().astype(np.float32)
    rows[4] = 1e6
    assert np.abs(applied(name, rows)).max() < 10


def test_krum_needs_more_clients_than_wrong_ones_can_outvote() -> None:
    applied(robust.krum(1), points(number=5))
    with pytest.raises(UsageError, match="at least 5"):
        applied(robust.krum(1), points(number=4))


# Around an algorithm.


def with_rule(rule: Aggregator) -> Callable[..., Algorithm]:
    def make(model: Model, work: Work, **hyper: Any) -> Algorithm:
        return robust.aggregated(fedavg.fedavg(model, work, **hyper), rule)

    return make


def test_a_round_is_the_rule_over_the_changes_of_clients() -> None:
    with jax.enable_x64(True):
        held = linear.held()
        algorithm = with_rule(robust.median())(linear.MODEL, linear.work())
        states = linear.run(algorithm, held)
        now, examples = linear.weights_of(states[0]), linear.examples_of(held)
        for state, cohort in zip(states[1:], linear.ATTEND, strict=True):
            changes = [linear.trained(now, examples[c]) for c in linear.present(cohort)]
            medians = [np.median(np.stack(parts), axis=0) for parts in zip(*changes, strict=True)]
            now = [part + move for part, move in zip(now, medians, strict=True)]
            linear.assert_weights(state, now)


def test_another_upload_is_refused() -> None:
    algorithm = scaffold.scaffold(federations.softmax_regression(), federations.epochs(0.1))
    with pytest.raises(UsageError, match="algorithm"):
        robust.aggregated(algorithm, robust.median())


@pytest.mark.parametrize(
    ("factory", "name"),
    [
        (fedavg.fedavg, "median"),
        pytest.param(fedprox.fedprox, "geometric_median", marks=pytest.mark.slow),
        pytest.param(fedipg.fedipg, "krum_1", marks=pytest.mark.slow),
    ],
)
def test_it_obeys_the_laws(factory: Any, name: str) -> None:
    rule = robust.krum(1) if name == "krum_1" else RULES[name]()

    def make(model: Model, work: Work, **hyper: Any) -> Algorithm:
        return robust.aggregated(factory(model, work, **hyper), rule)

    laws.check(make, model=federations.softmax_regression())


def clipped(algorithm: Algorithm, who: Any) -> Algorithm:
    return robust.aggregated(algorithm, robust.clipped_mean(1e-3))


@pytest.mark.parametrize("attack", [attackers.sign_flip, attackers.scaled_noise, clipped])
def test_attackers_and_clipping_leave_statistics_as_they_are(attack: Any) -> None:
    model = federations.small_normed()
    clients = [(np.random.default_rng(0).normal(size=(8, 6, 6, 1)), np.arange(8) % 2)] * 3

    def make(*parts: Any, **hyper: Any) -> Algorithm:
        return attack(fedavg.fedavg(*parts, **hyper), [1])

    plain, attacked = (fit(one, model, clients, rounds=1) for one in (fedavg.fedavg, make))
    jax.tree.map(
        lambda wanted, got: np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-7),
        plain.network().stats,
        attacked.network().stats,
    )


def test_an_attacker_must_be_a_client() -> None:
    def make(*parts: Any, **hyper: Any) -> Algorithm:
        return attackers.sign_flip(fedavg.fedavg(*parts, **hyper), [0, 3])

    clients = [(np.zeros((2, 3), np.float32), np.arange(2))] * 3
    with pytest.raises(UsageError, match="who=3"):
        fit(make, federations.softmax_regression(), clients, rounds=1)


@pytest.mark.parametrize("attack", [attackers.sign_flip, attackers.scaled_noise])
def test_only_attackers_upload_something_else(attack: Any) -> None:
    with jax.enable_x64(True):
        held = linear.held()
        plain = fedavg.fedavg(linear.MODEL, linear.work())
        attacked = attack(plain, [3], factor=2.0)
        for cohort, is_attacked in (((0, 2), False), ((3,), True)):
            before, after = linear.run(plain, held, (cohort,))
            bad = linear.run(attacked, held, (cohort,))[1]
            pairs = list(zip(*map(linear.weights_of, (before, after, bad)), strict=True))
            good = np.concatenate([(new - old).ravel() for old, new, _ in pairs])
            wrong = np.concatenate([(new - old).ravel() for old, _, new in pairs])
            if not is_attacked:
                np.testing.assert_array_equal(wrong, good)
                continue
            np.testing.assert_allclose(np.linalg.norm(wrong), 2 * np.linalg.norm(good), rtol=1e-6)
            if attack is attackers.sign_flip:
                np.testing.assert_allclose(wrong, -2 * good, rtol=1e-9)
