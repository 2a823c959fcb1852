import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from federations import assert_close, assert_equal
from fedjax_inv import local
from fedjax_inv.types import Array, Batch, Examples, Halves, Local, Metrics, Shard, Variables, Work

MAX_STEPS = 40
WIDTH = 8


def shard(mask: np.ndarray) -> Shard:
    """A client whose real examples are 0, 1, ...; an example's x is its number."""
    num_real, width = int(mask.sum()), len(mask)
    rows = np.full(width, 99)
    rows[mask] = np.arange(num_real)
    x = jnp.arange(100, dtype=jnp.float32)
    return Shard(Examples(x, jnp.zeros(100, jnp.int32)), jnp.asarray(rows), jnp.asarray(mask), 0)


def logging(size: int) -> Callable[[Variables, Batch, Array], tuple[Halves, Halves, Metrics]]:
    """A gradient that writes the examples of each step, -1 for padding, into the statistics."""

    def grad_fn(variables: Variables, batch: Batch, key: Array) -> tuple[Halves, Halves, Metrics]:
        count, log, keys = variables.stats.body
        seen = jnp.where(batch.mask, batch.x, -1)
        key_bits = jax.random.bits(key)
        body = count + 1, log.at[count].set(seen), keys.at[count].set(key_bits)
        assert seen.shape == (size,)
        grads = jax.tree.map(jnp.ones_like, variables.params)
        return grads, Halves(body, ()), {"step": count.astype(jnp.float32)}

    return grad_fn


@functools.cache
def program(make: Callable[..., Work], size: int, **arguments: int) -> Callable[..., Any]:
    """A jitted run of `make(optimizer, **arguments)`, whose batches hold `size` examples."""
    work = make(optax.adam(0.1), **arguments)
    body = jnp.int32(0), jnp.zeros((MAX_STEPS, size)), jnp.zeros(MAX_STEPS, jnp.uint32)
    start = work.init(Variables(Halves(jnp.zeros(2), jnp.zeros(())), Halves(body, ())))
    return jax.jit(lambda shard, key: work.run(logging(size), start, shard, key))


def log_of(
    make: Callable[..., Work], shard: Shard, size: int, *, seed: int = 0, **arguments: int
) -> np.ndarray:
    """The examples [steps, B] that the steps saw."""
    end, metrics = program(make, size, **arguments)(shard, jax.random.key(seed))
    count, log, keys = end.variables.stats.body
    (adam, *_), num_steps = end.opt_state, int(count)
    assert int(adam.count) == num_steps
    # Every step has a key of its own; the metric is averaged over the steps that were taken.
    assert len(set(keys[:num_steps].tolist())) == num_steps
    np.testing.assert_allclose(metrics["step"], max(0, (num_steps - 1) / 2))
    return np.asarray(log[:num_steps])


masks = st.lists(st.booleans(), min_size=WIDTH, max_size=WIDTH).map(np.array)


@given(mask=masks, size=st.sampled_from([(1, 1), (3, 2), (8, 2)]))
@example(mask=np.zeros(WIDTH, bool), size=(3, 2))
@example(mask=np.ones(WIDTH, bool), size=(3, 2))
def test_epochs_visit_each_real_example_once(mask: np.ndarray, size: tuple[int, int]) -> None:
    num_real, (batch_size, num_epochs) = int(mask.sum()), size
    log = log_of(
        local.epochs, shard(mask), batch_size, batch_size=batch_size, num_epochs=num_epochs
    )
    num_batches = -(-num_real // batch_size)
    assert len(log) == num_epochs * num_batches
    for epoch in log.reshape(num_epochs, num_batches * batch_size):
        # All batches are full but the last, which holds what is left.
        assert sorted(epoch[:num_real]) == list(range(num_real))
        assert (epoch[num_real:] == -1).all()


def test_epochs_differ_in_order_and_follow_the_key() -> None:
    orders = [tuple(range(30))]
    for seed in range(2):
        full = shard(np.ones(30, bool))
        orders += map(tuple, log_of(local.epochs, full, 30, seed=seed, batch_size=30, num_epochs=2))
    assert len(set(orders)) == 5


@given(mask=masks, size=st.sampled_from([(1, 5), (4, 2)]))
@example(mask=np.zeros(WIDTH, bool), size=(4, 2))
def test_steps_draw_real_examples_the_exact_number_of_times(
    mask: np.ndarray, size: tuple[int, int]
) -> None:
    num_real, (batch_size, num_steps) = int(mask.sum()), size
    log = log_of(local.steps, shard(mask), batch_size, batch_size=batch_size, num_steps=num_steps)
    assert len(log) == (num_steps if num_real else 0)
    assert ((log >= 0) & (log < num_real)).all()


def test_steps_draw_uniformly() -> None:
    size = 500
    some = shard(np.array([True, False, True, True, False, True]))
    log = log_of(local.steps, some, size, batch_size=size, num_steps=MAX_STEPS)
    share = np.bincount(log.ravel().astype(int), minlength=4) / log.size
    np.testing.assert_allclose(share, 0.25, atol=6 * np.sqrt(3 / 16 / log.size))
    assert len(np.unique(log, axis=0)) == MAX_STEPS


@given(mask=masks, num_steps=st.sampled_from([1, 3]))
@example(mask=np.zeros(WIDTH, bool), num_steps=3)
def test_full_batch_holds_everything_at_each_step(mask: np.ndarray, num_steps: int) -> None:
    num_real = int(mask.sum())
    log = log_of(local.full_batch, shard(mask), WIDTH, num_steps=num_steps)
    assert len(log) == (num_steps if num_real else 0)
    for step in log:
        assert sorted(step[step >= 0]) == list(range(num_real))


WORKS = [
    lambda optimizer: local.epochs(optimizer, batch_size=2),
    lambda optimizer: local.steps(optimizer, batch_size=2, num_steps=3),
    local.full_batch,
]


@pytest.mark.parametrize("make", WORKS)
def test_without_examples_there_is_no_step(make: Callable[..., Work]) -> None:
    """Under vmap beside a client that works; nor is a NaN in the padding ever touched."""
    work = make(optax.adam(0.1))
    nan = Examples(jnp.full(3, jnp.nan), jnp.zeros(3, jnp.int32))
    shards = Shard(
        nan._replace(x=nan.x.at[1].set(2.0)),
        jnp.array([[0, 1, 2], [0, 0, 2], [0, 2, 1]]),
        jnp.array([[False, True, False], [False] * 3, [False, False, True]]),
        jnp.arange(3),
    )

    def grad_fn(variables: Variables, batch: Batch, key: Array) -> tuple[Halves, Halves, Metrics]:
        def loss(params: Halves) -> Array:
            return jnp.where(batch.mask, params.body * batch.x, 0).sum() / batch.mask.sum()

        value, grads = jax.value_and_grad(loss)(variables.params)
        return grads, variables.stats, {"loss": value}

    start = work.init(Variables(Halves(jnp.float32(3), ()), Halves((), ())))

    def run(state: Local, who: int | Array) -> tuple[Local, Metrics]:
        client = Shard(shards.data, shards.rows[who], shards.mask[who], who)
        return work.run(grad_fn, state, client, jax.random.key(0))

    # The optimizer's state is warm: a step that does nothing would still change it.
    warm, _ = run(start, 0)
    ends, metrics = jax.vmap(run, (None, 0))(warm, jnp.arange(3))
    idle, *working = (jax.tree.map(lambda a, i=i: a[i], ends) for i in (1, 0, 2))
    assert_equal(idle, warm)
    assert metrics["loss"][1] == 0
    assert working[0].variables.params.body < warm.variables.params.body
    assert_close(working[0], working[1])


def test_full_batch_steps_along_the_exact_mean() -> None:
    mask = np.array([False, True, True, False, True])
    work = local.full_batch(optax.sgd(0.5), num_steps=2)

    def grad_fn(variables: Variables, batch: Batch, key: Array) -> tuple[Halves, Halves, Metrics]:
        error = jnp.where(batch.mask, variables.params.body - batch.x, 0).sum() / batch.mask.sum()
        return Halves(error, ()), variables.stats, {}

    start = work.init(Variables(Halves(jnp.float32(5), ()), Halves((), ())))
    end, _ = work.run(grad_fn, start, shard(mask), jax.random.key(0))
    expected = 5.0
    for _ in range(2):
        expected -= 0.5 * np.mean([expected - example for example in range(3)])
    np.testing.assert_allclose(end.variables.params.body, expected, rtol=1e-6)


@given(mask=masks, seed=st.integers(0, 99))
def test_shuffled_puts_the_real_first_whatever_the_padding(mask: np.ndarray, seed: int) -> None:
    num_real, key = int(mask.sum()), jax.random.key(seed)
    order = np.asarray(local.shuffled(jnp.asarray(mask), key))
    assert sorted(order) == list(range(WIDTH))
    assert mask[order[:num_real]].all()
    rank = np.cumsum(mask) - 1
    padded_behind = local.shuffled(jnp.arange(WIDTH) < num_real, key)
    np.testing.assert_array_equal(rank[order[:num_real]], padded_behind[:num_real])


@given(mask=masks)
def test_real_positions_number_the_real_examples(mask: np.ndarray) -> None:
    (real,) = np.nonzero(mask)
    # Also beyond the last: there it need only be a position.
    found = np.asarray(local.real_positions(jnp.asarray(mask))(jnp.arange(WIDTH + 2)))
    assert found[: len(real)].tolist() == real.tolist()
    assert ((found >= 0) & (found < WIDTH)).all()


def squared(p: Array, batch: Batch) -> tuple[Array, Any]:
    """The mean of (p - x)^2; and a one, the sum of what was seen, which is real, what was seen."""
    seen = jnp.where(batch.mask, batch.x, 0)
    # NaN for a batch of nothing: such a batch must not be asked for.
    loss = jnp.where(batch.mask, (p - seen) ** 2, 0).sum() / batch.mask.sum()
    return loss, (jnp.float32(1), seen.sum(), batch.mask.astype(jnp.float32), seen)


@functools.partial(jax.jit, static_argnames=("batch_size", "all_batches"))
def mean_gradient(shard: Shard, key: Array, *, batch_size: int, all_batches: bool) -> Any:
    start = jnp.float32(0.5)
    return local.mean_gradient(
        squared, start, shard, key, batch_size=batch_size, all_batches=all_batches
    )


@pytest.mark.parametrize("num_real", [0, 1, 5, 9, 19])
@pytest.mark.parametrize("batch_size", [1, 2, 7])
def test_mean_gradient_counts_every_batch_of_a_pass_once(num_real: int, batch_size: int) -> None:
    # More batches than are taken at a time, and fewer; padding before, between and behind.
    mask = np.zeros(19, bool)
    mask[np.random.default_rng(num_real).permutation(19)[:num_real]] = True
    grad, (one, total, *_) = mean_gradient(
        shard(mask), jax.random.key(0), batch_size=batch_size, all_batches=True
    )
    num_batches = -(-num_real // batch_size)
    if not num_real:
        assert float(grad) == float(total) == float(one) == 0
        return
    np.testing.assert_allclose(one, 1, rtol=1e-6)
    # Each example was seen once ...
    np.testing.assert_allclose(total * num_batches, sum(range(num_real)), rtol=1e-5)
    # ... in the batches of the order that the key gives.
    order = np.asarray(local.shuffled(jnp.asarray(mask), jax.random.key(0)))[:num_real]
    numbers = (np.cumsum(mask) - 1)[order].astype(np.float64)
    batches = np.split(numbers, range(batch_size, num_real, batch_size))
    naive = np.mean([np.mean(2 * (0.5 - batch)) for batch in batches])
    np.testing.assert_allclose(grad, naive, rtol=1e-5)


@pytest.mark.parametrize("batch_size", [1, 3, 8, 20])
def test_mean_gradient_of_one_batch_is_the_first_of_a_pass(batch_size: int) -> None:
    mask = np.array([1, 0, 1, 1, 1, 0, 1, 1, 0], bool)
    grad, (*_, real, seen) = mean_gradient(
        shard(mask), jax.random.key(3), batch_size=batch_size, all_batches=False
    )
    order = np.asarray(local.shuffled(jnp.asarray(mask), jax.random.key(3)))
    numbers = (np.cumsum(mask) - 1)[order][: min(batch_size, 6)]
    assert seen[real > 0].tolist() == numbers.tolist()
    np.testing.assert_allclose(grad, np.mean(2 * (0.5 - numbers)), rtol=1e-5)


def test_shuffled_is_uniform() -> None:
    keys = jax.random.split(jax.random.key(0), 3000)
    orders = jax.vmap(lambda key: local.shuffled(jnp.ones(3, bool), key))(keys)
    _, counts = np.unique(orders, axis=0, return_counts=True)
    np.testing.assert_allclose(counts / 3000, np.full(6, 1 / 6), atol=6 * np.sqrt(5 / 36 / 3000))


def test_take_batch_repeats_a_real_example_where_there_is_none() -> None:
    mask = jnp.array([False, True, True, False])
    batch = local.take_batch(shard(np.ones(9, bool)), jnp.array([8, 3, 5, 7]), mask)
    np.testing.assert_array_equal(batch.x, [3, 3, 5, 3])
    np.testing.assert_array_equal(batch.mask, mask)


@pytest.mark.parametrize(
    ("make", "argument"),
    [
        (lambda: local.epochs(optax.sgd(1.0), batch_size=0), "batch_size=0"),
        (lambda: local.epochs(optax.sgd(1.0), batch_size=1, num_epochs=0), "num_epochs=0"),
        (lambda: local.steps(optax.sgd(1.0), batch_size=0, num_steps=1), "batch_size=0"),
        (lambda: local.steps(optax.sgd(1.0), batch_size=1, num_steps=-1), "num_steps=-1"),
        (lambda: local.full_batch(optax.sgd(1.0), num_steps=0), "num_steps=0"),
    ],
)
def test_counts_must_be_positive(make: Callable[[], Work], argument: str) -> None:
    with pytest.raises(ValueError, match=f"{argument}: must be at least 1"):
        make()
