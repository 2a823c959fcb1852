"""Local training: minibatch loops over one client's examples.

The number of steps is the client's own, so padding never acts: there is no batch without a real
example, and under `vmap` a client that has finished waits unchanged for the longest one.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from fedjax_inv import tree
from fedjax_inv.types import (
    Array,
    Batch,
    GradFn,
    Local,
    Metrics,
    Shard,
    Tree,
    Variables,
    Work,
)

_BATCHES_AT_ONCE = 4


def take_batch(shard: Shard, positions: Array, mask: Array) -> Batch:
    """The examples at `positions` [B] of the shard's rows; `mask` [B] says which are real.

    The others repeat a real one: a NaN that padding points at would reach gradients as 0 x NaN.
    """
    positions = jnp.where(mask, positions, positions[jnp.argmax(mask)])
    examples = tree.take(shard.data, shard.rows[positions])
    return Batch(examples.x, examples.y, mask)


def real_positions(mask: Array) -> Callable[[Array], Array]:
    """index [B] -> the positions [B] of the real examples that are so numbered.

    Numbers of none, in a batch's padding or of an empty client, get some position.
    """
    up_to = jnp.cumsum(mask)  # the search is in it: a sort by mask takes 20 times as long

    def positions(index: Array) -> Array:
        found = jnp.searchsorted(up_to, index + 1, method="scan_unrolled")
        return jnp.minimum(found, mask.shape[0] - 1)

    return positions


def shuffled(mask: Array, key: Array) -> Array:
    """Positions [N] with the real ones first, in an order drawn uniformly.

    Each example's draw is keyed by its rank among the real ones: padding anywhere changes nothing.
    """
    return jnp.argsort(-_draws(mask, key))


def _first_shuffled(mask: Array, key: Array, count: int) -> Array:
    """The first `count` of `shuffled`, without a sort."""
    return jax.lax.top_k(_draws(mask, key), count)[1]


def _draws(mask: Array, key: Array) -> Array:
    """[N], below all others for what is not real."""
    rank = jnp.cumsum(mask) - 1
    bits = jax.vmap(lambda r: jax.random.bits(jax.random.fold_in(key, r)))(rank)
    # As floats, which hold 24 bits: top_k of integers takes XLA on a CPU 20 times as long.
    return jnp.where(mask, (bits >> 8).astype(jnp.float32), -1)


def _batch_of_pass(shard: Shard, order: Array, batch: Array, batch_size: int) -> Batch:
    """The batch numbered `batch` of a pass over the real examples in `order` [N]."""
    index = batch * batch_size + jnp.arange(batch_size)
    positions = order[jnp.minimum(index, len(order) - 1)]
    return take_batch(shard, positions, index < shard.mask.sum())


def _step(
    optimizer: optax.GradientTransformation,
    grad_fn: GradFn,
    local: Local,
    batch: Batch,
    key: Array,
) -> tuple[Local, Metrics]:
    variables, opt_state = local
    grads, stats, metrics = grad_fn(variables, batch, key)
    updates, opt_state = optimizer.update(grads, opt_state, variables.params)
    params = optax.apply_updates(variables.params, updates)
    return Local(Variables(params, stats), opt_state), metrics


def _work(optimizer: optax.GradientTransformation, loop: Tree) -> Work:
    """The work of `loop(shard, key)` -> (number of steps [], batch_at(step) -> Batch)."""

    def init(variables: Variables) -> Local:
        return Local(variables, optimizer.init(variables.params))

    def run(grad_fn: GradFn, local: Local, shard: Shard, key: Array) -> tuple[Local, Metrics]:
        plan_key, steps_key = jax.random.split(key)
        num_steps, batch_at = loop(shard, plan_key)

        def one(step: Array, local: Local) -> tuple[Local, Metrics]:
            step_key = jax.random.fold_in(steps_key, step)
            return _step(optimizer, grad_fn, local, batch_at(step), step_key)

        def body(step: Array, carry: tuple[Local, Metrics]) -> tuple[Local, Metrics]:
            local, sums = carry
            local, metrics = one(step, local)
            return local, jax.tree.map(jnp.add, sums, metrics)

        shapes = jax.eval_shape(lambda: one(jnp.int32(0), local)[1])
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        local, sums = jax.lax.fori_loop(0, num_steps, body, (local, zeros))
        steps = jnp.maximum(num_steps, 1)
        return local, jax.tree.map(lambda leaf: leaf / steps, sums)

    return Work(init, run)


def epochs(
    optimizer: optax.GradientTransformation, *, batch_size: int, num_epochs: int = 1
) -> Work:
    """Passes over the client's examples in a new order each, the last batch of a pass smaller."""
    _check("batch_size", batch_size)
    _check("num_epochs", num_epochs)

    def loop(shard: Shard, key: Array) -> Tree:
        batches = -(-shard.mask.sum() // batch_size)  # of one epoch
        # All orders at once: a sort inside the loop would run at every step under vmap.
        orders = jax.vmap(lambda epoch: shuffled(shard.mask, jax.random.fold_in(key, epoch)))(
            jnp.arange(num_epochs)
        )

        def batch_at(step: Array) -> Batch:
            epoch, batch = step // jnp.maximum(batches, 1), step % jnp.maximum(batches, 1)
            return _batch_of_pass(shard, orders[epoch], batch, batch_size)

        return num_epochs * batches, batch_at

    return _work(optimizer, loop)


def steps(optimizer: optax.GradientTransformation, *, batch_size: int, num_steps: int) -> Work:
    """The same number of steps for every client, each on a batch drawn with replacement."""
    _check("batch_size", batch_size)
    _check("num_steps", num_steps)

    def loop(shard: Shard, key: Array) -> Tree:
        count = shard.mask.sum()
        position = real_positions(shard.mask)

        def batch_at(step: Array) -> Batch:
            step_key = jax.random.fold_in(key, step)
            draws = jax.random.randint(step_key, (batch_size,), 0, jnp.maximum(count, 1))
            return take_batch(shard, position(draws), jnp.ones(batch_size, bool))

        return jnp.where(count > 0, num_steps, 0), batch_at

    return _work(optimizer, loop)


def full_batch(optimizer: optax.GradientTransformation, *, num_steps: int = 1) -> Work:
    """Steps on all of the client's examples at once; one step of it is FedSGD's client."""
    _check("num_steps", num_steps)

    def loop(shard: Shard, key: Array) -> Tree:
        del key
        batch = take_batch(shard, jnp.arange(shard.rows.shape[0]), shard.mask)
        return jnp.where(shard.mask.any(), num_steps, 0), lambda step: batch

    return _work(optimizer, loop)


def mean_gradient(
    risk: Callable[[Tree, Batch], tuple[Array, Tree]],
    params: Tree,
    shard: Shard,
    key: Array,
    *,
    batch_size: int,
    all_batches: bool,
) -> tuple[Tree, Tree]:
    """The gradient of a client's risk without a step, and what else `risk` returns.

    risk: (params, batch) -> (loss [], aux); both results are the means over the batches of a pass
    in a new order, or those of one batch drawn without replacement. Every batch counts the same.
    """
    _check("batch_size", batch_size)
    num_rows = shard.rows.shape[0]
    num_batches = -(-shard.mask.sum() // batch_size)
    if all_batches:
        order = shuffled(shard.mask, key)
    else:
        order = _first_shuffled(shard.mask, key, min(batch_size, num_rows))
        num_batches = jnp.minimum(num_batches, 1)
    # Several at a time, so that gradients of the size of params are added less often.
    width = min(_BATCHES_AT_ONCE, -(-num_rows // batch_size)) if all_batches else 1

    def some(turn: Array, params: Tree) -> tuple[Array, Tree]:
        numbers = turn * width + jnp.arange(width)
        real = numbers < num_batches
        # Beyond the last stands the first: a batch of nothing could be one of NaNs.
        batches = jax.vmap(lambda batch: _batch_of_pass(shard, order, batch, batch_size))(
            jnp.where(real, numbers, 0)
        )
        losses, aux = jax.vmap(risk, in_axes=(None, 0))(params, batches)

        def total(leaf: Array) -> Array:
            return jnp.where(real.reshape(-1, *(1,) * (leaf.ndim - 1)), leaf, 0).sum(0)

        return total(losses), jax.tree.map(total, aux)

    def one(turn: Array) -> tuple[Tree, Tree]:
        (_, aux), grads = jax.value_and_grad(lambda p: some(turn, p), has_aux=True)(params)
        return grads, aux

    shapes = jax.eval_shape(one, jnp.int32(0))
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    sums = jax.lax.fori_loop(
        0,
        -(-num_batches // width),
        lambda turn, sums: jax.tree.map(jnp.add, sums, one(turn)),
        zeros,
    )
    return jax.tree.map(lambda leaf: leaf / jnp.maximum(num_batches, 1), sums)


def _check(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name}={value}: must be at least 1")
