"""Clipped uploads, noise and the budget, against NumPy in float64 and dp-accounting's values."""

import sys
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import federations
import linear_networks as linear
from fedjax_inv import fit, laws, private, schedules, tree
from fedjax_inv.algorithms import fedavg, fedipg, fedmix, fedprox, scaffold
from fedjax_inv.checks import UsageError
from fedjax_inv.types import Algorithm, Cohort, Model, Tree, Work

EVERYONE = tuple(range(len(linear.SIZES)))
QUIET: dict[str, float] = {"noise_multiplier": 0.0}


def norm(weights: linear.Weights) -> float:
    return float(np.sqrt(sum((part**2).sum() for part in weights)))


def test_a_round_is_the_sum_of_clipped_changes_over_a_fixed_number() -> None:
    with jax.enable_x64(True):
        held, rate = linear.held(), 0.7
        inner = fedavg.fedavg(linear.MODEL, linear.work())
        now, examples = linear.weights_of(linear.run(inner, held)[0]), linear.examples_of(held)
        norms = [norm(linear.trained(now, examples[c])) for c in linear.present(EVERYONE)]
        clip = float(np.mean(norms))
        algorithm = private.private(inner, clip=clip, sampling_rate=rate, **QUIET)
        states = linear.run(algorithm, held)
        are_clipped = set()
        for state, cohort in zip(states[1:], linear.ATTEND, strict=True):
            changes = [linear.trained(now, examples[c]) for c in linear.present(cohort)]
            factors = [min(1.0, clip / norm(change)) for change in changes]
            are_clipped |= {factor < 1 for factor in factors}
            divisor = rate * len(linear.SIZES)
            for part in range(2):
                total = sum(f * c[part] for f, c in zip(factors, changes, strict=True))
                now = [*now[:part], now[part] + total / divisor, *now[part + 1 :]]
            wrapped = state._replace(server=state.server.wrapped)
            linear.assert_weights(wrapped, now)
        assert are_clipped == {True, False}


def test_without_noise_and_clip_it_is_the_method_with_equal_weights() -> None:
    with jax.enable_x64(True):
        held = linear.held()
        plain = fedavg.fedavg(linear.MODEL, linear.work(), weighting="uniform")
        number = len(linear.present(EVERYONE))
        same = private.private(plain, clip=1e6, divisor=number, **QUIET)
        wanted = linear.run(plain, held, (EVERYONE, EVERYONE))[-1]
        got = linear.run(same, held, (EVERYONE, EVERYONE))[-1]
        linear.assert_weights(got._replace(server=got.server.wrapped), linear.weights_of(wanted))


numbers = st.floats(width=32, allow_subnormal=False) | st.sampled_from([np.nan, np.inf, 1e30])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(numbers, numbers, numbers), min_size=1, max_size=5), st.data())
def test_one_client_more_or_less_moves_the_sum_by_at_most_the_clip(
    rows: list[tuple[float, ...]], data: st.DataObject
) -> None:
    clip = data.draw(st.sampled_from([1e-3, 1.0, 50.0]))
    drawn = np.array(rows, np.float32)
    uploads = {"a": jnp.asarray(drawn[:, :1]), "b": jnp.asarray(drawn[:, 1:])}
    clipped = jax.vmap(partial(tree.clipped, clip=clip))(uploads)
    parts = np.concatenate(jax.tree.leaves(clipped), axis=1).astype(np.float64)
    assert np.isfinite(parts).all()
    assert (np.linalg.norm(parts, axis=1) <= clip * (1 + 1e-6)).all()
    with np.errstate(over="ignore", invalid="ignore"):
        short = np.linalg.norm(drawn.astype(float), axis=1) < clip * (1 - 1e-6)
    np.testing.assert_allclose(parts[short], drawn[short], rtol=1e-6, atol=1e-37)


def test_each_round_has_noise_of_its_own_even_if_nobody_attends() -> None:
    held, clip, multiplier, number = linear.held(), 0.5, 3.0, 4.0
    wide = linear.MODEL._replace(init=_wide_init)
    inner = fedavg.fedavg(wide, linear.work())
    algorithm = private.private(inner, clip=clip, noise_multiplier=multiplier, divisor=number)
    silent = ((), (), ())
    states = linear.run(algorithm, held, silent, model=wide)
    again = linear.run(algorithm, held, silent, model=wide)
    moves = []
    for before, after, repeated in zip(states[:-1], states[1:], again[1:], strict=True):
        assert_equal_servers(after.server.wrapped, repeated.server.wrapped)
        pairs = zip(_weights(after), _weights(before), strict=True)
        moves.append(np.concatenate([(a - b).ravel() for a, b in pairs]))
    deviation = multiplier * clip / number
    for move in moves:
        assert move.size > 10_000
        # Five standard errors of a mean and of a deviation.
        assert abs(move.mean()) < 5 * deviation / np.sqrt(move.size)
        assert abs(move.std() / deviation - 1) < 5 / np.sqrt(2 * move.size)
    correlation = np.corrcoef(moves)
    assert np.abs(correlation - np.eye(3)).max() < 5 / np.sqrt(moves[0].size)


def _wide_init(key: Any, x: Any) -> Any:
    variables = linear.MODEL.init(key, x)
    shapes = jnp.zeros((4, 3000)), jnp.zeros((3000, 3))
    return variables._replace(params=type(variables.params)(*shapes))


def _weights(state: Any) -> list[np.ndarray]:
    return [np.asarray(half) for half in state.server.wrapped.variables.params]


def assert_equal_servers(first: Tree, second: Tree) -> None:
    jax.tree.map(np.testing.assert_array_equal, first, second)


def test_a_client_that_diverged_counts_as_zero() -> None:
    held = linear.held()
    diverging = linear.MODEL._replace(
        encode=lambda params, stats, x, *rest: (x @ params * jnp.where(x[0, 0] > 1, jnp.inf, 1), ())
    )
    algorithm = private.private(fedavg.fedavg(diverging, linear.work()), clip=1.0, **QUIET)
    for state in linear.run(algorithm, held, (EVERYONE,), model=diverging):
        assert all(np.isfinite(part).all() for part in _weights(state))


@pytest.mark.parametrize("factory", [scaffold.scaffold, fedmix.fedmix])
def test_another_upload_is_refused(factory: Any) -> None:
    algorithm = factory(federations.softmax_regression(), federations.epochs(0.1))
    with pytest.raises(UsageError, match="algorithm"):
        private.private(algorithm, clip=1.0, noise_multiplier=1.0)


def test_statistics_are_refused() -> None:
    with pytest.raises(UsageError, match="statistics"):
        fit(
            lambda *parts, **hyper: private.private(
                fedavg.fedavg(*parts, **hyper), clip=1.0, noise_multiplier=1.0
            ),
            federations.small_normed(),
            [(np.zeros((4, 6, 6, 1), np.float32), np.arange(4) % 2)],
            rounds=1,
        )


def wrapped(factory: Any) -> Any:
    def make(model: Model, work: Work, *, clip: float = 0.05, **hyper: Any) -> Algorithm:
        return private.private(factory(model, work, **hyper), clip=clip, noise_multiplier=0.01)

    return make


@pytest.mark.parametrize(
    "factory",
    [
        fedavg.fedavg,
        pytest.param(partial(fedprox.fedprox, proximal=0.1), marks=pytest.mark.slow),
        pytest.param(partial(fedipg.fedipg, penalty=0.1), marks=pytest.mark.slow),
    ],
)
def test_it_obeys_the_laws_but_that_of_the_round_without_clients(factory: Any) -> None:
    names = [law for law in laws.LAWS if "a_round_without_examples" not in law]
    laws.check(wrapped(factory), model=federations.softmax_regression(), laws=names)


# Who attends.


def test_poisson_sampling_draws_each_client_for_itself() -> None:
    rate, num_clients, num_rounds = 0.3, 40, 500
    drawn = schedules.poisson(rate)(jax.random.key(1), num_clients, num_rounds)
    present = np.asarray(drawn.present)
    error = np.sqrt(rate * (1 - rate) / present.size)
    assert abs(present.mean() - rate) < 5 * error
    sizes = present.sum(1)
    binomial = num_clients * rate * (1 - rate)
    assert abs(sizes.var() / binomial - 1) < 5 * np.sqrt(2 / num_rounds)


def test_slots_are_as_many_as_the_largest_cohort_and_nobody_is_cut_off() -> None:
    drawn = schedules.poisson(0.4)(jax.random.key(0), 9, 6)
    host = jax.tree.map(np.asarray, drawn)
    short = schedules.without_empty_slots(host)
    assert short.who.shape == (6, host.present.sum(1).max())
    for before, after in zip(_rounds(host), _rounds(short), strict=True):
        assert before == after


def _rounds(schedule: Cohort) -> list[list[int]]:
    return [w[p].tolist() for w, p in zip(schedule.who, schedule.present, strict=True)]


def test_fit_trains_on_poisson_cohorts_that_some_rounds_lack() -> None:
    rng = np.random.default_rng(0)
    clients = [(rng.normal(size=(4, 3)).astype(np.float32), np.arange(4) % 2) for _ in range(6)]

    def make(model: Model, work: Work, **hyper: Any) -> Algorithm:
        inner = fedavg.fedavg(model, work, **hyper)
        return private.private(inner, clip=1.0, noise_multiplier=1.0, sampling_rate=0.2)

    fitted = fit(
        make,
        federations.softmax_regression(),
        clients,
        rounds=12,
        grid={"seed": [0, 1]},
        schedule=schedules.poisson(0.2),
    )
    attended = fitted.plan.cohorts.present.sum(-1)
    assert (attended == 0).any()
    assert attended.max() < len(clients)
    outputs = [fitted.predict(clients[0][0], run=run) for run in range(2)]
    assert np.isfinite(outputs).all()
    assert np.abs(outputs[0] - outputs[1]).max() > 1e-3


# The budget.


def test_epsilon_is_that_of_privacy_loss_distributions() -> None:
    pytest.importorskip("dp_accounting")
    budget = {"sampling_rate": 0.01, "num_rounds": 10_000, "delta": 1e-5}
    assert private.epsilon(noise_multiplier=4.0, **budget) == pytest.approx(0.947, abs=2e-3)
    assert private.epsilon(noise_multiplier=0.0, **budget) == np.inf
    # One Gaussian mechanism, against its own closed form (Balle and Wang 2018, Theorem 8).
    single = {"sampling_rate": 1.0, "num_rounds": 1, "delta": 1e-5}
    for multiplier in (2.0, 0.1):
        epsilon = private.epsilon(noise_multiplier=multiplier, **single)
        assert _gaussian_delta(epsilon, multiplier) == pytest.approx(1e-5, rel=2e-2)


def _gaussian_delta(epsilon: float, deviation: float) -> float:
    from scipy.stats import norm as normal

    first = normal.cdf(1 / (2 * deviation) - epsilon * deviation)
    second = normal.cdf(-1 / (2 * deviation) - epsilon * deviation)
    return float(first - np.exp(epsilon) * second)


def test_without_noise_nothing_bounds_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether or not the package of the accountant is there."""
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    run = {"sampling_rate": 0.5, "num_rounds": 3, "delta": 1e-5}
    assert private.epsilon(noise_multiplier=0.0, **run) == np.inf


def test_hardly_any_noise_and_a_huge_budget_need_no_memory() -> None:
    pytest.importorskip("dp_accounting")
    run = {"sampling_rate": 0.5, "num_rounds": 10, "delta": 1e-5}
    assert private.epsilon(noise_multiplier=0.01, **run) > 10_000
    assert private.epsilon(noise_multiplier=1e-9, **run) == np.inf
    multiplier = private.noise_multiplier_for(epsilon=1000.0, **run)
    assert 900 < private.epsilon(noise_multiplier=multiplier, **run) <= 1000
    with pytest.raises(UsageError, match="epsilon"):
        private.noise_multiplier_for(epsilon=1e9, **run)


def test_the_noise_of_a_budget_spends_it() -> None:
    pytest.importorskip("dp_accounting")
    budget = {"sampling_rate": 0.1, "num_rounds": 100, "delta": 1e-5}
    multiplier = private.noise_multiplier_for(epsilon=8.0, **budget)
    assert multiplier == pytest.approx(0.936, abs=0.1)
    spent = private.epsilon(noise_multiplier=multiplier, **budget)
    assert 7.9 < spent <= 8.0
