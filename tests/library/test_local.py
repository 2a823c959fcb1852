import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import federations
from federations import assert_close, assert_equal
from fedjax_inv import local, platforms
from fedjax_inv.data import federation
from fedjax_inv.types import (
    Array,
    Batch,
    Examples,
    Federation,
    GradFn,
    Halves,
    Shard,
    Step,
    Trained,
    Tree,
    Variables,
    Work,
)

# Client s holds s examples.
SIZES = np.arange(71)
# Of the default level, far below what a broken shuffle gives: one sound one in 10^9 fails.
STANDARD_DEVIATIONS = 6


def everybody() -> Federation:
    """Client s holds s examples, whose x is their row; a NaN lies before and behind each client."""
    total = int(SIZES.sum())
    x = np.arange(total + 1, dtype=np.float32)
    x[total] = np.nan
    rows = np.random.default_rng(0).permutation(total)
    order, start = [], []
    for part in np.split(rows, np.cumsum(SIZES)[:-1]):
        order += [total, *part]
        start += [len(order) - len(part)]
    held = (jnp.asarray(array, jnp.int32) for array in ([*order, total], start, SIZES))
    return Federation(Examples(jnp.asarray(x), jnp.zeros(total + 1, jnp.int32)), *held)


FEDERATION = everybody()
rows_of = federation.parts_of(FEDERATION).__getitem__


def shards(sizes: np.ndarray) -> Shard:
    """The clients of those sizes, stacked."""
    data, order, start, size = FEDERATION[:4]
    return Shard(data, order, start[sizes], size[sizes], jnp.asarray(sizes))


# Of a stack of clients: the examples are shared.
LANES = Shard(None, None, 0, 0, 0)


def logging(batch_size: int) -> GradFn:
    """A gradient that writes the examples of each step, -1 for padding, into the statistics."""

    def grad_fn(variables: Variables, batch: Batch, key: Array) -> Step:
        count, log, keys = variables.stats.body
        seen = jnp.where(batch.mask, batch.x, -1)
        assert seen.shape == (batch_size,)
        body = count + 1, log.at[count].set(seen), keys.at[count].set(jax.random.bits(key))
        grads = jax.tree.map(jnp.ones_like, variables.params)
        number = count.astype(jnp.float32)
        largest = seen.max() + 0 * batch.x.sum()  # padding holds no NaN
        average = {"square": number**2, "seen": jnp.stack([number, largest])}
        return Step(grads, Halves(body, ()), {"step": number}, average)

    return grad_fn


# Every size, then many clients of three examples, for what is counted over clients.
EVERYBODY = np.concatenate([SIZES, np.full(2000, 3)])


@functools.cache
def program(
    make: Callable[..., Work], batch_size: int, most_steps: int, /, **arguments: int
) -> Callable[[Shard, Array], Trained]:
    """A jitted run of a stack of clients, each with a key, at `make(optimizer, **arguments)`."""
    work = make(optax.adam(0.1), **arguments)
    body = jnp.int32(0), jnp.zeros((most_steps, batch_size)), jnp.zeros(most_steps, jnp.uint32)
    start = work.init(Variables(Halves(jnp.zeros(2), jnp.zeros(())), Halves(body, ())))

    def run(shard: Shard, key: Array) -> Trained:
        return work.run(logging(batch_size), start, shard, key)

    return jax.jit(jax.vmap(run, (LANES, 0)))


def trained_with(run: Callable[[Shard, Array], Trained], sizes: np.ndarray) -> Trained:
    trained = run(shards(sizes), jax.random.split(jax.random.key(0), len(sizes)))
    return federations.plain(trained)


def logs_of(run: Callable[[Shard, Array], Trained], sizes: np.ndarray) -> list[np.ndarray]:
    """Of each client, the examples [steps, B] that its steps saw."""
    trained = trained_with(run, sizes)
    count, logs, keys = trained.local.variables.stats.body
    assert_equal(trained.num_steps, count)
    assert_equal(trained.local.opt_state[0].count, count)
    # Every step of every client has a key of its own.
    drawn = keys[np.arange(keys.shape[1]) < count[:, None]]
    assert len(np.unique(drawn)) > 0.999 * len(drawn)  # some of the 32 bits are equal by chance
    # What is told is the mean over the steps that were taken.
    logs = [log[:n] for n, log in zip(count, logs, strict=True)]
    numbers = [np.arange(max(1, n), dtype=np.float32) for n in count]
    mean = np.array([n.mean() for n in numbers])
    largest = [log.max(1).mean() if len(log) else 0 for log in logs]
    square = np.array([(n**2).mean() for n in numbers])
    assert_close(trained.metrics, {"step": mean})
    assert_close(
        trained.average, {"square": square, "seen": np.stack([mean, largest], 1, dtype=np.float32)}
    )
    return logs


@functools.cache
def two_epochs() -> list[np.ndarray]:
    """In batches of 8."""
    most = 2 * -(-int(SIZES.max()) // 8)
    return logs_of(program(local.epochs, 8, most, batch_size=8, num_epochs=2), EVERYBODY)


def test_epochs_visit_each_example_once_for_every_size() -> None:
    batch_size, num_epochs, orders = 8, 2, []
    for size, log in zip(SIZES, two_epochs()[: len(SIZES)], strict=True):
        mine, num_batches = rows_of(size), -(-size // batch_size)
        assert len(log) == num_epochs * num_batches
        place = {row: number for number, row in enumerate(mine)}
        for epoch in log.reshape(num_epochs, num_batches * batch_size):
            # All batches are full but the last, which holds what is left.
            assert sorted(epoch[:size]) == sorted(mine)
            assert (epoch[size:] == -1).all()
            orders.append(tuple(place[row] for row in epoch[:size]))
    # No epoch has the order in which the examples lie, or that of another one.
    long = [order for order in [*orders, *map(tuple, map(range, SIZES))] if len(order) >= 30]
    assert len(set(long)) == len(long)


def assert_uniform(outcomes: np.ndarray, possible: int) -> None:
    """Each of the possible outcomes, the rows, is as frequent as any other."""
    _, counts = np.unique(outcomes, axis=0, return_counts=True)
    expected = len(outcomes) / possible
    assert expected > 20
    assert len(counts) == possible
    statistic, freedom = ((counts - expected) ** 2 / expected).sum(), possible - 1
    assert statistic < freedom + STANDARD_DEVIATIONS * np.sqrt(2 * freedom)


def test_orders_of_epochs_and_clients_are_independent() -> None:
    """All pairs of orders of three examples: of two epochs, of two clients with other keys."""
    orders = np.stack(two_epochs()[len(SIZES) :])[:, :, :3]  # [clients, epochs, examples]
    assert_uniform(orders.reshape(-1, 6), 36)
    assert_uniform(orders[:, 0].reshape(-1, 6), 36)


def test_steps_draw_uniformly_and_with_replacement_the_exact_number_of_times() -> None:
    batch_size, num_steps = 4, 5
    arguments = {"batch_size": batch_size, "num_steps": num_steps}
    logs = logs_of(program(local.steps, batch_size, num_steps, **arguments), EVERYBODY)
    for size, log in zip(EVERYBODY, logs, strict=True):
        assert len(log) == (num_steps if size else 0)
        assert set(log.ravel()) <= set(rows_of(size))
        assert size < 2 or len(np.unique(log)) > 1
    steps = np.stack(logs[len(SIZES) :])  # [clients, steps, examples]
    assert_uniform(steps.reshape(-1, 2), 9)  # pairs within a batch
    assert_uniform(steps[:, :2, 0], 9)  # and of two steps


def test_full_batch_holds_everything_at_each_step_or_nothing_is_finite() -> None:
    capacity, num_steps = 8, 3
    run = program(local.full_batch, capacity, num_steps, capacity=capacity, num_steps=num_steps)
    sizes = np.arange(capacity + 1)
    for size, log in zip(sizes, logs_of(run, sizes), strict=True):
        assert len(log) == (num_steps if size else 0)
        for step in log:
            assert sorted(step[step >= 0]) == sorted(rows_of(size))
    larger = np.array([8, 9, 10, 16, 17, 70, 1, 0, 8])  # as many, for the same program
    for leaf in jax.tree.leaves(trained_with(run, larger)):
        if leaf.dtype.kind == "f":
            flat = leaf.reshape(len(larger), -1)
            assert (np.isnan(flat) == (larger > capacity)[:, None]).all()


FOLDED = 4  # examples of a batch


@functools.cache
def folded() -> Callable[[Shard], Tree]:
    """Sums over a client's examples, of several shapes and types, of a stack of clients."""

    def sums(batch: Batch) -> Tree:
        x = jnp.where(batch.mask, batch.x, 0)
        return {
            "moments": jnp.stack([x.sum(), (x**2).sum()]),
            "count": batch.mask.sum(),
            "batches": jnp.int32(1),
            # What lies where, as a number.
            "order": (x * jnp.arange(1, FOLDED + 1)).sum(),
        }

    return jax.jit(jax.vmap(lambda shard: local.fold(shard, sums, batch_size=FOLDED), (LANES,)))


def test_fold_is_a_loop_over_batches_as_they_lie() -> None:
    b = FOLDED
    sizes = np.array([0, 1, b - 1, b, b + 1, 2 * b, 3 * b + 2, 70])
    got = folded()(shards(sizes))
    assert got["count"].dtype == got["batches"].dtype == jnp.int32
    for index, size in enumerate(sizes):
        x = rows_of(size).astype(np.float64)
        assert got["count"][index] == size
        assert got["batches"][index] == -(-size // b)
        np.testing.assert_allclose(got["moments"][index], [x.sum(), (x**2).sum()], rtol=1e-6)
        order = (x * (1 + np.arange(size) % b)).sum()
        np.testing.assert_allclose(got["order"][index], order, rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_sums_and_means_of_many_small_floats_do_not_stop_growing(dtype: Any) -> None:
    """256 + 1 is 256 in bfloat16."""
    num_steps = 3000

    def grad_fn(variables: Variables, batch: Batch, key: Array) -> Step:
        del batch, key
        one = jnp.ones((), dtype)
        metrics = {"loss": 0.75 * one, "is": jnp.bool_(True), "whole": jnp.uint8(200)}
        return Step(optax.tree.zeros_like(variables.params), variables.stats, metrics, one)

    @jax.jit
    def trained(shard: Shard) -> tuple[Tree, Tree, Array]:
        work = local.steps(optax.sgd(0.1), batch_size=1, num_steps=num_steps)
        empty = Halves({}, {})
        start = work.init(Variables(Halves(jnp.zeros(()), {}), empty))
        after = work.run(grad_fn, start, shard, jax.random.key(0))
        counted = local.fold(shard, lambda batch: jnp.ones((), dtype), batch_size=1)
        return after.metrics, after.average, counted

    zeros = np.zeros(600, np.int32)
    one = federation.of_parts(federation.examples(zeros, zeros), [np.arange(600)])
    metrics, average, counted = trained(federations.shard_of(one, 0))
    assert jax.tree.map(float, metrics) == {"loss": 0.75, "is": 1, "whole": 200}
    assert (average, average.dtype) == (1, dtype)
    assert (counted, counted.dtype) == (600, dtype)


@functools.cache
def sampled(batch_size: int) -> Callable[[Shard, Array], tuple[Array, Array, Array]]:
    """(x, mask, how many batches there were), summed as they are."""

    def seen(batch: Batch) -> tuple[Array, Array, Array]:
        return batch.x, batch.mask.astype(jnp.int32), jnp.ones(())

    def of_client(shard: Shard, key: Array) -> tuple[Array, Array, Array]:
        return local.fold_sample(shard, key, seen, batch_size=batch_size)

    return jax.jit(jax.vmap(of_client, (LANES, 0)))


def test_fold_sample_is_without_replacement_and_of_everything_of_a_small_client() -> None:
    batch_size, sizes = 5, np.arange(71)
    keys = jax.random.split(jax.random.key(0), len(sizes))
    xs, masks, batches = map(np.asarray, sampled(batch_size)(shards(sizes), keys))
    np.testing.assert_array_equal(batches, sizes > 0)
    assert not xs[0].any()
    assert not masks[0].any()
    for size, x, mask in zip(sizes[1:], xs[1:], masks[1:], strict=True):
        np.testing.assert_array_equal(mask, np.arange(batch_size) < size)
        assert len(set(x[mask > 0])) == min(batch_size, size)
        # Where nothing is real, something real is repeated.
        assert set(x) <= set(rows_of(size))


def test_a_client_of_more_or_fewer_batches_than_all_are_said_to_have_trains_to_nan() -> None:
    run = program(functools.partial(local.epochs, num_batches=2), 2, 4, batch_size=2)
    params = trained_with(run, np.array([4, 3, 0, 5, 2])).local.variables.params
    assert np.isfinite(params.body).all(1).tolist() == [True, True, True, False, False]


@pytest.mark.parametrize("make", [local.epochs, local.steps, local.full_batch])
def test_on_an_accelerator_a_loop_of_known_length_leaves_what_one_of_unknown_length_does(
    make: Callable[..., Work],
) -> None:
    arguments = {
        local.epochs: dict(num_batches=2, batch_size=4),
        local.steps: dict(num_steps=3, batch_size=4),
        local.full_batch: dict(capacity=7, num_steps=2),
    }[make]
    work = make(optax.sgd(0.1, 0.9), **arguments)
    start = work.init(Variables(Halves(jnp.ones(3), ()), Halves((), ())))

    def grad_fn(variables: Variables, batch: Batch, key: Array) -> Step:
        grads = variables.params.body * jnp.where(batch.mask, batch.x, 0).mean()
        return Step(Halves(grads, ()), variables.stats, {"sum": batch.mask.sum().astype(float)})

    def run(shard: Shard, key: Array) -> Trained:
        return work.run(grad_fn, start, shard, key)

    def loops(platform: str) -> tuple[Trained, str]:
        fresh = jax.jit(jax.vmap(lambda *both: run(*both), (LANES, 0)))
        with platforms.traced_for(platform):
            arguments = shards(np.array([6, 0, 6])), jax.random.split(jax.random.key(0), 3)
            return federations.plain(fresh(*arguments)), str(jax.make_jaxpr(fresh)(*arguments))

    (trained, known), (expected, unknown) = loops("gpu"), loops("cpu")
    assert_close(trained, expected)
    assert expected.num_steps[1] == 0
    assert unknown.count("while[") == known.count("while[") + 1  # the other one is a scan
