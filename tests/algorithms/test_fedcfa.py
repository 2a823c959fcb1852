"""FedCFA: its kernels against closed forms, its rounds against the paper's in NumPy, in float64."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import federations
import linear_networks as linear
import slow
from fedjax_inv import communication, local, platforms, rounds
from fedjax_inv.algorithms import fedcfa
from fedjax_inv.averaging import Message
from fedjax_inv.mean_examples import MeanExamples
from fedjax_inv.types import (
    Array,
    Batch,
    Federation,
    GradFn,
    Halves,
    Local,
    Model,
    Shard,
    Trained,
    Tree,
    Variables,
    Visit,
    Work,
)

# Which factors are replaced.


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_of_equal_scores_the_left_one_is_the_lower(platform: str) -> None:
    rng = np.random.default_rng(4)
    numbers = [-np.inf, -1e30, -2.0, -1.0, -0.0, 0.0, 1.0, 2.0, 1e30, np.inf]
    with platforms.traced_for(platform):
        scores = jnp.asarray(rng.choice(numbers, size=(9, 13)), jnp.float32)
        order = np.argsort(np.asarray(scores, np.float64), axis=1, kind="stable")
        for top_k in (0, 1, 6, 13):
            low, high = map(np.asarray, fedcfa.split_factors(scores, top_k))
            for row in range(9):
                assert set(np.flatnonzero(low[row])) == set(order[row, :top_k])
                assert set(np.flatnonzero(high[row])) == set(order[row, 13 - top_k :])


def test_positions_of_a_channel_are_replaced_together() -> None:
    rng = np.random.default_rng(2)
    factors, average = (jnp.asarray(rng.normal(size=(3, 2, 4, 5))) for _ in range(2))
    scores = jnp.asarray(rng.normal(size=(3, 5)))
    low, _ = fedcfa.split_factors(scores, 2)
    got = fedcfa.replaced(factors, average, low)
    for i in range(3):
        for j in range(5):
            source = average if low[i, j] else factors
            np.testing.assert_array_equal(got[i, ..., j], source[i, ..., j])


def test_no_factor_and_every_factor_replaced() -> None:
    shape = 4, 3, 6
    rng = np.random.default_rng(3)
    factors, average = (jnp.asarray(rng.normal(size=shape)) for _ in range(2))
    labels = jnp.eye(3)[jnp.asarray([0, 2, 1, 0])]
    average_y = jnp.asarray(rng.dirichlet(np.ones(3), 4))
    for top_k, expected, expected_y in ((0, factors, labels), (6, average, average_y)):
        for which in fedcfa.split_factors(jnp.asarray(rng.normal(size=(4, 6))), top_k):
            np.testing.assert_array_equal(fedcfa.replaced(factors, average, which), expected)
        got = fedcfa.counterfactual_labels(labels, average_y, top_k, 6)
        np.testing.assert_allclose(got, expected_y, rtol=1e-6)


# The correlation of factors.

decorrelation = jax.jit(fedcfa.factor_decorrelation)
slope_of_decorrelation = jax.jit(jax.grad(fedcfa.factor_decorrelation))


def correlated(num: int, num_factors: int) -> np.ndarray:
    rng = np.random.default_rng(num)
    mix = np.eye(num_factors) + 0.6 * rng.normal(size=(num_factors, num_factors))
    return (rng.normal(size=(num, num_factors)) @ mix).astype(np.float32)


def by_numpy(factors: np.ndarray) -> float:
    correlation = np.abs(np.corrcoef(factors, rowvar=False))
    return correlation[~np.eye(len(correlation), dtype=bool)].mean()


@pytest.mark.parametrize(("num", "num_factors"), [(3, 4), (9, 2), (20, 7)])
def test_decorrelation_is_numpys_mean_absolute_correlation(num: int, num_factors: int) -> None:
    factors = correlated(num, num_factors)
    expected = by_numpy(factors)
    assert abs(decorrelation(factors, np.ones(num, bool)) - expected) < 1e-5
    # Padding counts nothing, whatever it holds.
    real = np.random.default_rng(0).permutation(np.arange(num + 4) < num)
    for garbage in (1e6, np.nan, np.inf):
        padded = np.full((num + 4, num_factors), garbage, np.float32)
        padded[real] = factors
        assert abs(decorrelation(padded, real) - expected) < 1e-5
        slope = slope_of_decorrelation(padded, real)
        assert np.isfinite(slope).all()
        assert not slope[~real].any()


def test_decorrelation_of_proportional_factors_and_of_shifted_ones() -> None:
    real = np.ones(9, bool)
    factor = correlated(9, 2)[:, :1]
    for scale in (2.0, -0.3):
        assert abs(decorrelation(np.hstack([factor, scale * factor]), real) - 1) < 1e-5
    factors = correlated(9, 4)
    expected = decorrelation(factors, real)
    scale, shift = np.float32([-3, 0.1, 20, 1]), np.float32([5, -2, 0, 9])
    assert abs(decorrelation(scale * factors + shift, real) - expected) < 1e-5


def test_a_constant_factor_correlates_with_none() -> None:
    factors, real = correlated(8, 3), np.ones(8, bool)
    with_constant = np.hstack([factors, np.full((8, 1), 0.3, np.float32)])
    got = decorrelation(with_constant, real)
    assert abs(got - by_numpy(factors) * 3 / 6) < 1e-5
    assert np.isfinite(slope_of_decorrelation(with_constant, real)).all()
    assert decorrelation(np.zeros((8, 3), np.float32), real) == 0
    assert decorrelation(factors[:, :1], real) == 0  # a single factor has no pair


@pytest.mark.parametrize("num_real", range(3))
def test_fewer_than_three_examples_correlate_not(num_real: int) -> None:
    real = np.arange(5) < num_real
    factors = correlated(5, 3)
    assert decorrelation(factors, real) == 0
    assert not slope_of_decorrelation(factors, real).any()


def test_the_slope_of_decorrelation_is_that_of_finite_differences() -> None:
    with jax.enable_x64(True):
        factors = correlated(6, 4).astype(float)
        real = np.array([1, 1, 0, 1, 1, 1], bool)
        got = slope_of_decorrelation(factors, real)
        for place in np.ndindex(factors.shape):
            step = np.zeros_like(factors)
            step[place] = 1e-6
            up, down = (by_numpy((factors + sign * step)[real]) for sign in (1, -1))
            np.testing.assert_allclose(got[place], (up - down) / 2e-6, rtol=1e-5, atol=1e-7)


# A round.

POSITIONS, CHANNELS = 2, 3
RATE, NUM_STEPS = 0.3, 2
TOP_K, POSITIVE, NEGATIVE, DECORRELATION = 1, 1.5, 0.7, 0.9
WEIGHTS = {
    "positive_weight": POSITIVE,
    "negative_weight": NEGATIVE,
    "decorrelation_weight": DECORRELATION,
}
Weights = tuple[np.ndarray, ...]  # [4, 6] of the body; [6, 4] and [4, 3] of the head


def encode(
    params: Tree, stats: Tree, x: Array, mask: Array, train: bool, key: Any = None, /
) -> Any:
    return jnp.tanh(x @ params).reshape(-1, POSITIONS, CHANNELS), stats


def decode(
    params: Tree, stats: Tree, factors: Array, mask: Array, train: bool, key: Any = None, /
) -> Any:
    return jnp.tanh(factors.reshape(len(factors), -1) @ params[0]) @ params[1], stats


def init(key: Array, x: Array) -> Variables:
    body, first, second = (
        jax.random.normal(k, shape)
        for k, shape in zip(jax.random.split(key, 3), ((4, 6), (6, 4), (4, 3)), strict=True)
    )
    return Variables(Halves(body, (first, second)), Halves((), ()))


MODEL = Model(init, encode, decode)


def factors_of(body: np.ndarray, x: np.ndarray) -> np.ndarray:
    return np.tanh(x @ body).reshape(-1, POSITIONS, CHANNELS)


def logits_of(head: Weights, factors: np.ndarray) -> np.ndarray:
    return np.tanh(factors.reshape(len(factors), -1) @ head[0]) @ head[1]


def entropy(logits: np.ndarray, labels: np.ndarray) -> float:
    return -(labels * (logits - np.log(np.exp(logits).sum(1, keepdims=True)))).sum(1).mean()


def counterfactuals(
    w: Weights,
    received: Weights,
    x: np.ndarray,
    y: np.ndarray,
    average_x: np.ndarray,
    scores_by: str,
) -> tuple[np.ndarray, np.ndarray]:
    """Sample by sample: F with the lowest, and with the highest, factors replaced."""
    positive, negative = factors_of(w[0], x), factors_of(w[0], x)
    other = factors_of(w[0], average_x[None])[0]
    for i, factors in enumerate(factors_of(w[0], x)):
        scores = []
        for j in range(CHANNELS):
            slopes = []
            for position in range(POSITIONS):
                step = np.zeros_like(factors)
                step[position, j] = 1e-5
                up, down = (
                    logits_of(received[1:], (factors + sign * step)[None])[0, y[i]]
                    for sign in (1, -1)
                )
                slopes.append((up - down) / 2e-5)
            scores.append(np.mean(slopes))
        ascending = np.argsort(np.abs(scores) if scores_by == "magnitude" else scores)
        positive[i][:, ascending[:TOP_K]] = other[:, ascending[:TOP_K]]
        negative[i][:, ascending[-TOP_K:]] = other[:, ascending[-TOP_K:]]
    return positive, negative


def objective(
    w: Weights,
    now: Weights,
    received: Weights,
    x: np.ndarray,
    y: np.ndarray,
    average: tuple[np.ndarray, np.ndarray] | None,
    detach: bool,
    scores: str,
) -> float:
    """Eq. 12 at w; now: where the step is taken from, at which constants are constant."""
    factors, labels = factors_of(w[0], x), np.eye(3)[y]
    total = entropy(logits_of(w[1:], factors), labels)
    if len(y) >= 3:
        total += DECORRELATION * by_numpy(factors.mean(1))
    if average is not None:
        at = now if detach else w
        positive, negative = counterfactuals(at, received, x, y, average[0], scores)
        share = TOP_K / CHANNELS
        total += POSITIVE * entropy(logits_of(w[1:], positive), labels)
        soft = share * average[1] + (1 - share) * labels
        total += NEGATIVE * entropy(logits_of(w[1:], negative), soft)
    return total


def slopes(fn: Callable[[Weights], float], w: Weights) -> list[np.ndarray]:
    """The gradient by central differences."""
    found = [np.zeros_like(leaf) for leaf in w]
    for index, leaf in enumerate(w):
        for place in np.ndindex(leaf.shape):
            values = []
            for sign in (1, -1):
                moved = [other.copy() for other in w]
                moved[index][place] += sign * 1e-5
                values.append(fn(tuple(moved)))
            found[index][place] = (values[0] - values[1]) / 2e-5
    return found


class Written(NamedTuple):
    weights: Weights
    average: tuple[np.ndarray, np.ndarray] | None  # the one row of the averages


def reference(
    w: Weights, held: Federation, attend: Any, detach: bool, scores: str
) -> list[Written]:
    """The states after each round; all averages are one row."""
    examples, average, found = linear.examples_of(held), None, []
    for cohort in attend:
        moved, sizes, means = [], [], []
        for x, y in (examples[client] for client in linear.present(cohort)):
            now = w
            for _ in range(NUM_STEPS):
                told = {"now": now, "received": w, "x": x, "y": y, "average": average}
                at = partial(objective, **told, detach=detach, scores=scores)
                now = tuple(a - RATE * g for a, g in zip(now, slopes(at, now), strict=True))
            moved.append([a - b for a, b in zip(now, w, strict=True)])
            sizes.append(len(y))
            means.append((x.mean(0), np.eye(3)[y].mean(0)))
        w = tuple(
            a + sum(n / sum(sizes) * delta[i] for n, delta in zip(sizes, moved, strict=True))
            for i, a in enumerate(w)
        )
        average = tuple(np.mean(leaves, 0) for leaves in zip(*means, strict=True))
        found.append(Written(w, average))
    return found


@pytest.mark.parametrize(
    ("combining", "detach", "scores", "attend"),
    slow.after(
        1,
        [
            # The mean of means is the only row.
            ("paper", True, "magnitude", ((0, 2), (1, 3, 4), (0, 2))),
            # Of a single client, so that there is a single row.
            ("pool", False, "signed", ((3,), (0,), (1, 2))),
        ],
    ),
)
def test_a_run_is_the_papers(combining: str, detach: bool, scores: str, attend: Any) -> None:
    with jax.enable_x64(True):
        held = linear.held()
        work = local.full_batch(optax.sgd(RATE), capacity=8, num_steps=NUM_STEPS)
        algorithm = fedcfa.fedcfa(
            MODEL,
            work,
            top_k=TOP_K,
            scores=scores,
            detach=detach,
            combining=combining,
            rows=1,
            **WEIGHTS,
        )
        first, *states = linear.run(algorithm, held, attend, model=MODEL)
        start = tuple(np.asarray(leaf) for leaf in jax.tree.leaves(first.server.variables.params))
        wanted = reference(start, held, attend, detach, scores)
        for state, expected in zip(states, wanted, strict=True):
            got = state.server.side.averages
            np.testing.assert_allclose(got.x[0], expected.average[0], rtol=1e-9)
            np.testing.assert_allclose(got.y[0], expected.average[1], rtol=1e-9)
            leaves = jax.tree.leaves(state.server.variables.params)
            for leaf, weights in zip(leaves, expected.weights, strict=True):
                np.testing.assert_allclose(leaf, weights, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("has_averages", [False, True])
def test_statistics_as_in_the_release_are_those_of_four_passes(has_averages: bool) -> None:
    """Of one row of averages, and of all factors replaced, the passes are known."""
    model, data = federations.small_normed(), federations.federation().data
    batch = Batch(data.x[:8], data.y[:8], jnp.ones(8, bool))
    x, y = data.x[8:9] / jnp.float32(255), jnp.ones((1, 3)) / 3
    pool = MeanExamples(x * has_averages, y * has_averages, jnp.array([has_averages]))

    @jax.jit
    def both() -> tuple[Variables, Halves, Halves]:
        start = federations.initial(model, jax.random.key(5))
        params, (body, head) = start
        factors, body = model.encode(params.body, body, batch.x, batch.mask, True)
        _, head = model.decode(params.head, head, factors, batch.mask, True)
        if has_averages:
            repeated = jnp.repeat(pool.x, 8, 0)
            factors, body = model.encode(params.body, body, repeated, batch.mask, True)
            for _ in range(2):
                _, head = model.decode(params.head, head, factors, batch.mask, True)
        steps = []

        def run(grad_fn: GradFn, local: Local, shard: Shard, key: Array) -> Trained:
            steps.append(grad_fn(local.variables, batch, key))
            return Trained(local, jnp.int32(1), {}, ())

        work = Work(lambda variables: Local(variables, ()), run)
        arguments = {"top_k": int(factors.shape[-1]), "statistics": "all"}
        algorithm = fedcfa.fedcfa(model, work, **arguments)
        shard, zero = federations.shard_of(federations.federation(), 0), jnp.int32(0)
        visit = Visit(Message(start, pool), (), shard, zero, zero, jax.random.key(1))
        algorithm.exchanges[0].client(visit)
        return start, Halves(body, head), steps[0].stats

    start, expected, got = both()
    federations.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    assert optax.tree.norm(optax.tree.sub(got.head, start.stats.head)) > 0.01


def test_averages_travel_beside_the_network_only_if_they_are_used() -> None:
    federation, model = federations.federation(), federations.mlp()

    def traffic(**arguments: Any) -> communication.Traffic:
        algorithm = fedcfa.fedcfa(model, federations.steps(0.1), top_k=2, rows=2, **arguments)

        def start(key: Array) -> rounds.State:
            return rounds.init(algorithm, federations.initial(model, key), federation, key)

        state = jax.eval_shape(start, jax.random.key(0))
        (told,) = rounds.traffic(algorithm, state, federation)
        return told

    row = 4 * 36 + 4 * 3 + 1
    network = 4 * ((36 + 1) * 7 + (7 + 1) * 3)
    averages = 2 * row
    expected = communication.Traffic(network + 5 * averages, network + averages)
    assert traffic() == expected
    assert traffic(combining="paper") == dataclasses.replace(expected, down=network + averages)
    assert traffic(positive_weight=0.0, negative_weight=0) == communication.Traffic(
        network, network
    )


def test_by_default_three_eighths_of_the_factors_are_replaced() -> None:
    assert [fedcfa.default_top_k(number) for number in (1, 2, 7, 32, 64)] == [1, 1, 2, 12, 24]


@pytest.mark.parametrize("detach", [True, False])
def test_the_local_loss_is_the_papers_objective(detach: bool) -> None:
    with jax.enable_x64(True):
        rng = np.random.default_rng(3)
        x, y = rng.normal(size=(5, 4)), rng.integers(0, 3, 5)
        average = rng.normal(size=4), rng.dirichlet(np.ones(3))
        drawn = [jax.tree.leaves(init(jax.random.key(seed), x).params) for seed in (1, 2)]
        received, w = [[*map(np.asarray, leaves)] for leaves in drawn]

        def loss(w: Any) -> Array:
            factors, others = (
                encode(w[0], (), jnp.asarray(of), None, True)[0]
                for of in (x, np.tile(average[0], (5, 1)))
            )

            def true_logit(factors: Array) -> Array:
                return decode(received[1:], (), factors, None, False)[0][jnp.arange(5), y]

            return fedcfa.local_loss(
                lambda factors: decode(w[1:], (), factors, None, True)[0],
                factors,
                jnp.asarray(y),
                jnp.ones(5, bool),
                others,
                jnp.tile(average[1], (5, 1)),
                fedcfa.factor_scores(true_logit, jax.lax.stop_gradient(factors)),
                top_k=TOP_K,
                detach=detach,
                **WEIGHTS,
            )

        told = {"now": w, "received": received, "x": x, "y": y, "average": average}
        at = partial(objective, **told, detach=detach, scores="signed")
        np.testing.assert_allclose(loss(w), at(w), rtol=1e-7)
        for got, wanted in zip(jax.grad(loss)(w), slopes(at, tuple(w)), strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-7)
