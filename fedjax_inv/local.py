"""Local training: minibatch loops over one client's examples.

The number of steps is the client's own, so padding never acts: there is no batch without a real
example, and under `vmap` a client that has finished waits unchanged for the longest one.
"""

import jax
import jax.numpy as jnp
import optax

from fedjax_inv import tree
from fedjax_inv.types import (
    Array,
    Batch,
    GradFn,
    Halves,
    Local,
    Metrics,
    Shard,
    Tree,
    Variables,
    Work,
)


def take_batch(shard: Shard, positions: Array, mask: Array) -> Batch:
    """The examples at `positions` [B] of the shard's rows; `mask` [B] says which are real.

    The others repeat a real one: a NaN that padding points at would reach gradients as 0 x NaN.
    """
    positions = jnp.where(mask, positions, positions[jnp.argmax(mask)])
    examples = tree.take(shard.data, shard.rows[positions])
    return Batch(examples.x, examples.y, mask)


def shuffled(mask: Array, key: Array) -> Array:
    """Positions [N] with the real ones first, in an order drawn uniformly.

    Each example's draw is keyed by its rank among the real ones: padding anywhere changes nothing.
    """
    rank = jnp.cumsum(mask) - 1
    draws = jax.vmap(lambda r: jax.random.bits(jax.random.fold_in(key, r)))(rank)
    return jnp.lexsort((draws, ~mask))


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
        real_first = jnp.argsort(~shard.mask, stable=True)

        def batch_at(step: Array) -> Batch:
            step_key = jax.random.fold_in(key, step)
            draws = jax.random.randint(step_key, (batch_size,), 0, jnp.maximum(count, 1))
            return take_batch(shard, real_first[draws], jnp.ones(batch_size, bool))

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
    grad_fn: GradFn,
    variables: Variables,
    shard: Shard,
    key: Array,
    *,
    batch_size: int,
    all_batches: bool,
) -> tuple[Halves, Halves, Metrics]:
    """What `grad_fn` returns, without a step: its mean over all local batches, or one batch's.

    Batches are those of a pass over the client's examples in a new order, and count the same.
    """
    _check("batch_size", batch_size)
    order_key, batch_key = jax.random.split(key)
    order = shuffled(shard.mask, order_key)
    num_batches = -(-shard.mask.sum() // batch_size)
    if not all_batches:
        num_batches = jnp.minimum(num_batches, 1)

    def one(batch: Array) -> tuple[Halves, Halves, Metrics]:
        examples = _batch_of_pass(shard, order, batch, batch_size)
        return grad_fn(variables, examples, jax.random.fold_in(batch_key, batch))

    shapes = jax.eval_shape(one, jnp.int32(0))
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    sums = jax.lax.fori_loop(
        0, num_batches, lambda batch, sums: jax.tree.map(jnp.add, sums, one(batch)), zeros
    )
    return jax.tree.map(lambda leaf: leaf / jnp.maximum(num_batches, 1), sums)


def _check(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name}={value}: must be at least 1")
