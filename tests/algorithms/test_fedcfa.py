"""FedCFA: its kernels against closed forms, its rounds against the paper's in NumPy, in float64."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import federations
import slow
from fedjax_inv import communication, devices, local, platforms, rounds
from fedjax_inv.algorithms import fedavg, fedcfa
from fedjax_inv.averages import Averages
from fedjax_inv.averaging import Message
from fedjax_inv.data import federation as federations_of
from fedjax_inv.types import (
    Algorithm,
    Array,
    Batch,
    Cohort,
    Federation,
    GradFn,
    Halves,
    Local,
    Model,
    Shard,
    Step,
    Trained,
    Tree,
    Variables,
    Visit,
    Work,
)

# Which factors are replaced.


def rows_of_scores() -> np.ndarray:
    scores = np.random.default_rng(0).normal(size=(6, 7)).astype(np.float32)
    scores[1] = 0  # all are tied
    scores[2, 2:] = scores[2, 0]
    scores[3, :4], scores[3, 4:] = -0.0, 0.0
    return scores


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("top_k", [0, 2, 5, 7])
def test_masks_have_exactly_top_k_true_entries_a_row(top_k: int, platform: str) -> None:
    scores = rows_of_scores()
    with platforms.traced_for(platform):
        masks = fedcfa.split_factors(jnp.asarray(scores), top_k)
    low, high = map(np.asarray, masks)
    for mask in (low, high):
        assert mask.dtype == bool
        np.testing.assert_array_equal(mask.sum(1), top_k)
    for row, is_low, is_high in zip(scores, low, high, strict=True):
        np.testing.assert_array_equal(np.sort(row[is_low]), np.sort(row)[:top_k])
        np.testing.assert_array_equal(np.sort(row[is_high]), np.sort(row)[7 - top_k :])
    assert (low & high).any() == (2 * top_k > 7)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
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


def test_scores_are_mean_gradients_of_the_true_logit() -> None:
    with jax.enable_x64(True):
        rng = np.random.default_rng(1)
        factors, weights = rng.normal(size=(4, 2, 3, 5)), 0.1 * rng.normal(size=(2, 3, 5))

        def decode(factors: Array) -> Array:
            return jnp.tanh((factors * weights).sum((1, 2, 3)))

        logit = np.tanh((factors * weights).sum((1, 2, 3)))
        # d tanh(a) = 1 - tanh(a)^2, and positions move together.
        expected = (1 - logit**2)[:, None] * weights.mean((0, 1))
        got = fedcfa.factor_scores(decode, jnp.asarray(factors))
        np.testing.assert_allclose(got, expected, rtol=1e-9)
        assert (expected < 0).any()
        # By finite differences: moving a channel at all of its 6 positions moves the logit by 6.
        for channel in range(5):
            moved = factors.copy()
            moved[..., channel] += 1e-6
            slope = (np.asarray(decode(moved)) - np.asarray(decode(factors))) / 1e-6 / 6
            np.testing.assert_allclose(got[:, channel], slope, rtol=1e-4, atol=1e-7)


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
    got = fedcfa.counterfactual_labels(labels, average_y, 2, 6)
    np.testing.assert_allclose(got, average_y / 3 + 2 * labels / 3, rtol=1e-6)
    np.testing.assert_allclose(got.sum(1), 1, rtol=1e-6)


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

SIZES = (4, 0, 2, 7, 1)
CAPACITY = max(SIZES)
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


def held() -> Federation:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(sum(SIZES), 4)), rng.integers(0, 3, sum(SIZES))
    parts = np.split(rng.permutation(sum(SIZES)), np.cumsum(SIZES)[:-1])
    return federations_of.of_parts(federations_of.examples(x, y), parts)


def factors_of(body: np.ndarray, x: np.ndarray) -> np.ndarray:
    return np.tanh(x @ body).reshape(-1, POSITIONS, CHANNELS)


def logits_of(head: Weights, factors: np.ndarray) -> np.ndarray:
    return np.tanh(factors.reshape(len(factors), -1) @ head[0]) @ head[1]


def entropy(logits: np.ndarray, labels: np.ndarray) -> float:
    return -(labels * (logits - np.log(np.exp(logits).sum(1, keepdims=True)))).sum(1).mean()


def counterfactuals(
    w: Weights, received: Weights, x: np.ndarray, y: np.ndarray, average_x: np.ndarray
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
        ascending = np.argsort(scores)
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
) -> float:
    """Eq. 12 at w; now: where the step is taken from, at which constants are constant."""
    factors, labels = factors_of(w[0], x), np.eye(3)[y]
    total = entropy(logits_of(w[1:], factors), labels)
    if len(y) >= 3:
        total += DECORRELATION * by_numpy(factors.mean(1))
    if average is not None:
        at = now if detach else w
        positive, negative = counterfactuals(at, received, x, y, average[0])
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


def reference(w: Weights, held: Federation, attend: Any, detach: bool) -> list[Written]:
    """The states after each round; all averages are one row."""
    examples = [
        (np.asarray(held.data.x)[rows], np.asarray(held.data.y)[rows])
        for rows in federations_of.parts_of(held)
    ]
    average, found = None, []
    for cohort in attend:
        moved, sizes, means = [], [], []
        for x, y in (examples[client] for client in cohort if SIZES[client]):
            now = w
            for _ in range(NUM_STEPS):
                told = {"now": now, "received": w, "x": x, "y": y, "average": average}
                at = partial(objective, **told, detach=detach)
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
    ("combining", "detach", "attend"),
    slow.after(
        1,
        [
            # The mean of means is the only row.
            ("paper", True, ((0, 2), (1, 3, 4), (0, 2))),
            # Of a single client, so that there is a single row.
            ("pool", False, ((3,), (0,), (1, 2))),
        ],
    ),
)
def test_a_run_is_the_papers(combining: str, detach: bool, attend: Any) -> None:
    with jax.enable_x64(True):
        examples = held()
        work = local.full_batch(optax.sgd(RATE), capacity=CAPACITY, num_steps=NUM_STEPS)
        algorithm = fedcfa.fedcfa(
            MODEL, work, top_k=TOP_K, detach=detach, combining=combining, rows=1, **WEIGHTS
        )
        variables = init(jax.random.key(0), examples.data.x)
        state = rounds.init(algorithm, variables, examples, jax.random.key(0))

        @jax.jit
        def step(state: rounds.State, present: Array) -> rounds.State:
            who = jnp.arange(len(SIZES), dtype=jnp.int32)
            cohort = Cohort(who, present, jnp.zeros_like(who))
            return rounds.step(algorithm, state, cohort, examples, axis=devices.chunked(1))[0]

        start = tuple(np.asarray(leaf) for leaf in jax.tree.leaves(variables.params))
        wanted = reference(start, examples, attend, detach)
        for cohort, expected in zip(attend, wanted, strict=True):
            state = step(state, np.isin(np.arange(len(SIZES)), cohort))
            got = state.server.side.averages
            np.testing.assert_allclose(got.x[0], expected.average[0], rtol=1e-9)
            np.testing.assert_allclose(got.y[0], expected.average[1], rtol=1e-9)
            leaves = jax.tree.leaves(state.server.variables.params)
            for leaf, weights in zip(leaves, expected.weights, strict=True):
                np.testing.assert_allclose(leaf, weights, rtol=1e-5, atol=1e-7)


# A step.

NUM = 8


def captured(
    make: Callable[[Work], Algorithm], variables: Variables, batch: Batch, side: Tree
) -> Step:
    """The local step of an algorithm on a batch, from the network received."""
    steps = []

    def run(grad_fn: GradFn, local: Local, shard: Shard, key: Array) -> Trained:
        steps.append(grad_fn(local.variables, batch, key))
        return Trained(local, jnp.int32(1), {}, ())

    algorithm = make(Work(lambda variables: Local(variables, ()), run))
    shard = federations.shard_of(federations.federation(), 0)
    zero = jnp.int32(0)
    message = Message(variables, side)
    algorithm.exchanges[0].client(Visit(message, (), shard, zero, zero, jax.random.key(1)))
    return steps[0]


def batch_of(mask: np.ndarray | None = None) -> Batch:
    data = federations.federation().data
    real = np.ones(NUM, bool) if mask is None else mask
    return Batch(data.x[:NUM], data.y[:NUM], jnp.asarray(real))


def pool_of(num: int, num_real: int) -> Averages:
    data = federations.federation().data
    x = data.x[NUM : NUM + num] / jnp.float32(255)
    y = jax.nn.softmax(jax.random.normal(jax.random.key(0), (num, 3)))
    real = jnp.arange(num) < num_real
    return jax.tree.map(
        lambda leaf: leaf * real.reshape(-1, *(1,) * (leaf.ndim - 1)), Averages(x, y, real)
    )


@cache
def normed_start() -> Variables:
    return jax.jit(lambda key: federations.initial(federations.small_normed(), key))(
        jax.random.key(5)
    )


@cache
def program(detach: bool, statistics: str = "examples", **off: int) -> Callable[..., Step]:
    """off: weights that are 0 for good; the others may be traced."""
    start = normed_start()

    def step(weights: dict[str, Array], batch: Batch, pool: Averages) -> Step:
        def make(work: Work) -> Algorithm:
            given = {"top_k": 1, "detach": detach, "statistics": statistics, **weights, **off}
            return fedcfa.fedcfa(federations.small_normed(), work, **given)

        return captured(make, start, batch, pool)

    return jax.jit(step)


def normed_step(
    weights: dict[str, float],
    *,
    batch: Batch | None = None,
    pool: Averages | None = None,
    detach: bool = True,
) -> Step:
    given = {**dict.fromkeys(WEIGHTS, 0.0), **weights}
    return program(detach)(given, batch or batch_of(), pool or pool_of(4, 3))


@cache
def fedavg_step() -> Step:
    def make(work: Work) -> Algorithm:
        return fedavg.fedavg(federations.small_normed(), work)

    start = normed_start()
    return jax.jit(lambda batch: captured(make, start, batch, ()))(batch_of())


@pytest.mark.slow
def test_what_detaches_trains_the_head_alone_and_leaves_statistics() -> None:
    weights = {"positive_weight": 2.0, "negative_weight": 3.0}
    plain, detached = fedavg_step(), normed_step(weights)
    attached = normed_step(weights, detach=False)
    federations.assert_close(detached.grads.body, plain.grads.body, rtol=1e-5, atol=1e-7)
    federations.assert_close(attached.grads.head, detached.grads.head, rtol=1e-5, atol=1e-7)
    for got in (detached, attached):
        assert optax.tree.norm(optax.tree.sub(got.grads.head, plain.grads.head)) > 0.1
        federations.assert_close(got.stats, plain.stats, rtol=1e-6, atol=1e-7)
    assert optax.tree.norm(optax.tree.sub(attached.grads.body, plain.grads.body)) > 0.1


@pytest.mark.parametrize("num_real", [0, 1])
def test_statistics_as_in_the_release_are_those_of_four_passes(num_real: int) -> None:
    """Of one row of averages, and of all factors replaced, the passes are known."""
    model, batch, pool = federations.small_normed(), batch_of(), pool_of(4, num_real)
    start = normed_start()
    weights = {"positive_weight": 2.0, "negative_weight": 3.0, "decorrelation_weight": 0.0}

    @jax.jit
    def passes() -> tuple[Halves, int]:
        params, (body, head) = start
        factors, body = model.encode(params.body, body, batch.x, batch.mask, True)
        _, head = model.decode(params.head, head, factors, batch.mask, True)
        if num_real:
            x = jnp.repeat(pool.x[:1], NUM, 0)
            factors, body = model.encode(params.body, body, x, batch.mask, True)
            for _ in range(2):
                _, head = model.decode(params.head, head, factors, batch.mask, True)
        return Halves(body, head), factors.shape[-1]

    expected, num_factors = passes()
    got = program(True, "all", top_k=int(num_factors))(weights, batch, pool).stats
    federations.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    assert optax.tree.norm(optax.tree.sub(got.head, start.stats.head)) > 0.01


def test_the_gradient_is_the_sum_of_its_terms() -> None:
    plain, whole = fedavg_step(), normed_step(WEIGHTS)
    moved = [
        optax.tree.sub(normed_step({name: weight}).grads, plain.grads)
        for name, weight in WEIGHTS.items()
    ]
    for part in moved:
        assert optax.tree.norm(part) > 1e-2
    total = optax.tree.add(plain.grads, optax.tree.add(moved[0], optax.tree.add(*moved[1:])))
    federations.assert_close(whole.grads, total, rtol=1e-4, atol=1e-6)
    # Correlation trains the body alone.
    assert optax.tree.norm(moved[2].head) < 1e-6


def test_without_averages_only_correlation_counts() -> None:
    got = normed_step(WEIGHTS, pool=pool_of(4, 0))
    expected = normed_step({"decorrelation_weight": DECORRELATION})
    federations.assert_close(got.grads, expected.grads, rtol=1e-5, atol=1e-7)
    assert got.metrics["positive_loss"] == got.metrics["negative_loss"] == 0
    assert got.metrics["correlation"] > 0


def test_scores_are_those_of_the_network_that_was_received() -> None:
    """Of a linear head the class's column, whatever local steps have made of the head."""
    model, batch, pool = federations.mlp(), batch_of(), pool_of(4, 1)

    @jax.jit
    def of(key: Array, sign: Array) -> tuple[Variables, Array, Array, Array]:
        variables = federations.initial(model, key)
        head = jax.tree.map(lambda leaf: sign * leaf, variables.params.head)
        step = captured_at(model, variables, head, batch, pool)
        both = (batch.x / jnp.float32(255), pool.x[jnp.zeros(NUM, jnp.int32)])
        body = variables.params.body
        factors, average = (model.encode(body, {}, x, batch.mask, True)[0] for x in both)
        return variables, factors, average, step.metrics["positive_loss"]

    for sign in (1.0, -1.0):
        variables, factors, average, got = of(jax.random.key(0), sign)
        dense = jax.tree.leaves(variables.params.head)
        kernel, bias = (np.asarray(next(d for d in dense if d.ndim == axes)) for axes in (2, 1))
        swapped = np.array(factors)
        for i, label in enumerate(np.asarray(batch.y)):
            lowest = np.argsort(kernel[:, label])[:2]
            swapped[i, lowest] = average[i, lowest]
        expected = entropy(sign * (swapped @ kernel + bias), np.eye(3)[np.asarray(batch.y)])
        np.testing.assert_allclose(got, expected, rtol=1e-4)


def captured_at(
    model: Model, received: Variables, head: Tree, batch: Batch, pool: Averages
) -> Step:
    """A step from another head than that which was received."""

    def make(work: Work) -> Algorithm:
        local_variables = received._replace(params=received.params._replace(head=head))
        started = work._replace(init=lambda variables: Local(local_variables, ()))
        return fedcfa.fedcfa(model, started, top_k=2, negative_weight=0)

    return captured(make, received, batch, pool)


def test_averages_travel_beside_the_network_only_if_they_are_used() -> None:
    federation, model = federations.federation(), federations.mlp()

    def traffic(**arguments: Any) -> communication.Traffic:
        algorithm = fedcfa.fedcfa(model, federations.steps(0.1), top_k=2, rows=2, **arguments)

        def start(key: Array) -> rounds.State:
            return rounds.init(algorithm, federations.initial(model, key), federation, key)

        state = jax.eval_shape(start, jax.random.key(0))
        (told,) = communication.traffic(algorithm, state, federation)
        return told

    row = 4 * 36 + 4 * 3 + 1
    network = 4 * ((36 + 1) * 7 + (7 + 1) * 3)
    assert traffic() == (network + 5 * 2 * row, network + 2 * row)
    assert traffic(combining="paper") == (network + 2 * row, network + 2 * row)
    assert traffic(positive_weight=0.0, negative_weight=0) == (network, network)


@pytest.mark.parametrize(("num_factors", "number"), [(1, 1), (2, 1), (7, 2), (32, 12), (64, 24)])
def test_by_default_three_eighths_of_the_factors_are_replaced(
    num_factors: int, number: int
) -> None:
    assert fedcfa.default_top_k(num_factors) == number
