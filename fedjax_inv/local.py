"""Local training: minibatch loops over one client's examples.

Each client takes its own number of steps: every batch has a real example, and under `vmap` a client
that has finished waits unchanged for the others. If all take the same number, it is known when the
program is traced. Then an accelerator need not check after each step whether another one follows,
nor keep the state of waiting clients.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax

from fedjax_inv import checks, permutation, platforms, tree, types
from fedjax_inv.checks import UsageError
from fedjax_inv.types import Array, Tree


def take_batch(shard: types.Shard, positions: Array, mask: Array) -> types.Batch:
    """Return the client's examples at positions [B], which are real where the mask [B] is true.

    Elsewhere they repeat a real example (`Shard.rows`).
    """
    examples = tree.take(shard.data, shard.rows(positions, mask))
    return types.Batch(examples.x, examples.y, mask, examples.domain)


def _batch_of_pass(
    shard: types.Shard, order: permutation.Permutation, number: Array, batch_size: int
) -> types.Batch:
    """Return batch `number`, from 0, of a pass over the client's examples in an order."""
    index = number * batch_size + jnp.arange(batch_size, dtype=jnp.int32)
    return take_batch(shard, permutation.at(order, index, shard.size), index < shard.size)


def fold(shard: types.Shard, fn: Callable[[types.Batch], Tree], *, batch_size: int) -> Tree:
    """Return the sum of fn(batch) over the client's examples, in stored order; 0 without any.

    `fn(batch)` is a tree of sums over the real examples of a batch; the last batch may be smaller.
    """
    shard = tree.on_device(shard)  # which a traced index may index

    def of(turn: Array) -> Tree:
        index = turn * batch_size + jnp.arange(batch_size, dtype=jnp.int32)
        return fn(take_batch(shard, index, index < shard.size))

    return _sum(of, -(-shard.size // batch_size))


def fold_sample(
    shard: types.Shard, key: Array, fn: Callable[[types.Batch], Tree], *, batch_size: int
) -> Tree:
    """Return fn(batch) on one batch drawn without replacement; 0 without examples.

    `fn` is as in `fold`; a client of fewer examples than `batch_size` uses all of them.
    """
    shard = tree.on_device(shard)
    order = permutation.draw(key)
    # The batch depends on the turn, or XLA would move the work out of a loop that may run 0 times.
    return _sum(
        lambda turn: fn(_batch_of_pass(shard, order, turn, batch_size)), jnp.minimum(shard.size, 1)
    )


def _sum(of: Callable[[Array], Tree], num_turns: Array) -> Tree:
    """Return the sum of of(turn) over the turns 0..num_turns - 1."""
    terms = jax.eval_shape(of, jnp.int32(0))
    sums = jax.lax.fori_loop(
        0, num_turns, lambda turn, sums: jax.tree.map(jnp.add, sums, of(turn)), _zeros(terms)
    )
    return _as_floats_of(terms, sums)


def _zeros(shapes: Tree) -> Tree:
    """Return sums before the first term, of at least 32 bits: bfloat16 cannot count to 300."""

    def zeros(leaf: jax.ShapeDtypeStruct) -> Array:
        wide = jnp.float32 if jnp.issubdtype(leaf.dtype, jnp.inexact) else jnp.int32
        return jnp.zeros(leaf.shape, jnp.promote_types(leaf.dtype, wide))

    return jax.tree.map(zeros, shapes)


def _as_floats_of(terms: Tree, sums: Tree) -> Tree:
    """Return sums, or means, of terms: of floats in their own dtype."""

    def leaf(term: jax.ShapeDtypeStruct, value: Array) -> Array:
        return value.astype(term.dtype) if jnp.issubdtype(term.dtype, jnp.inexact) else value

    return jax.tree.map(leaf, terms, sums)


class _Steps(NamedTuple):
    """The steps of a client's turn."""

    num_steps: Array  # []
    batch_at: Callable[[Array], types.Batch]  # number of a step [] -> its batch
    known: int | None = None  # steps of each client with examples; None: they differ
    fits: Array | None = None  # [] bool, false: the client gets NaN results; None: all fit


_Batches = Callable[[types.Shard, Array], _Steps]


# (state after a step, state before it) -> the one that the client keeps
_Keep = Callable[[Tree, Tree], Tree]
# (number of a step [], state, keep) -> (state after it, values to average over the steps)
_Advance = Callable[[Array, types.Local, _Keep], tuple[types.Local, Tree]]
# (state after all steps, sums of the values to average, their shapes)
_Walked = tuple[types.Local, Tree, Tree]


def _each_its_own(advance: _Advance, local: types.Local, num_steps: Array) -> _Walked:
    """Take a client's steps in a loop of its own, which ends with its last step."""

    # Traced once for its shapes and for the loop; inlined, the program is the same.
    @partial(jax.jit, inline=True)
    def one(index: Array, local: types.Local) -> tuple[types.Local, Tree]:
        return advance(index, local, lambda after, before: after)

    def body(index: Array, state: tuple[types.Local, Tree]) -> tuple[types.Local, Tree]:
        local, averaged = one(index, state[0])
        return local, jax.tree.map(jnp.add, state[1], averaged)

    terms = jax.eval_shape(one, jnp.int32(0), local)[1]
    return *jax.lax.fori_loop(0, num_steps, body, (local, _zeros(terms))), terms


def _in_step(advance: _Advance, local: types.Local, num_steps: Array, known: int | None) -> _Walked:
    """Take the steps of all clients together: one that has finished waits unchanged."""

    @partial(jax.jit, inline=True)
    def one(index: Array, local: types.Local, goes_on: Array) -> tuple[types.Local, Tree]:
        # After the loop alone, a mask would keep a copy of the initial state alive.
        return advance(index, local, lambda *states: optax.tree.where(goes_on, *states))

    def body(
        index: Array, state: tuple[types.Local, Tree, Array]
    ) -> tuple[types.Local, Tree, Array]:
        local, averaged = one(index, state[0], state[2])
        # Part of the loop's state, as XLA fuses no comparison into a matmul.
        goes_on = index + 1 < num_steps if known is None else state[2]
        return local, jax.tree.map(jnp.add, state[1], averaged), goes_on

    has_steps = num_steps > 0
    turns = _most(num_steps) if known is None else known
    terms = jax.eval_shape(one, jnp.int32(0), local, has_steps)[1]
    # Or XLA would copy the start for whoever subtracts it from the result.
    local = jax.lax.optimization_barrier(local)
    local, sums, _ = jax.lax.fori_loop(0, turns, body, (local, _zeros(terms), has_steps))
    return local, sums, terms


def _work(
    optimizer: optax.GradientTransformation,
    plan: _Batches,
    num_steps: Callable[[Array], Array] | None = None,
    momentum: float | Array | None = None,
) -> types.Work:
    """Return local training on the batches of a plan; num_steps and momentum as in `Work`."""

    def init(variables: types.Variables) -> types.Local:
        return types.Local(variables, optimizer.init(variables.params))

    def run_local(
        grad_fn: types.LocalGradFn, local: types.Local, shard: types.Shard, key: Array
    ) -> types.Trained:
        plan_key, steps_key = jax.random.split(key)
        num_steps, batch_at, known, fits = plan(shard, plan_key)

        def advance(index: Array, local: types.Local, keep: _Keep) -> tuple[types.Local, Tree]:
            """Return (the state after a step, the values to average over the steps)."""
            step = grad_fn(local, batch_at(index), jax.random.fold_in(steps_key, index))
            params, stats = local.variables
            _assert_fits(step, local)
            updates, opt_state = optimizer.update(step.grads, local.opt_state, params)
            # A zero update, not the old parameters: XLA then fuses the add into the matmul.
            moved = updates, (step.metrics, step.average)
            updates, averaged = keep(moved, optax.tree.zeros_like(moved))
            stats, opt_state, carry = keep(
                (step.stats, opt_state, step.carry), (stats, local.opt_state, local.carry)
            )
            variables = types.Variables(optax.apply_updates(params, updates), stats)
            return types.Local(variables, opt_state, carry), averaged

        with jax.named_scope("local_steps"):
            if platforms.on_cpu():
                local, sums, terms = _each_its_own(advance, local, num_steps)
            else:
                local, sums, terms = _in_step(advance, local, num_steps, known)
        count = jnp.maximum(num_steps, 1).astype(jnp.float32)
        metrics, average = jax.tree.map(lambda leaf: leaf / count, sums)
        average = _as_floats_of(terms[1], average)
        trained = types.Trained(local, jnp.asarray(num_steps, jnp.int32), metrics, average)
        return trained if fits is None else _nan_unless(fits, trained)

    def run(
        grad_fn: types.GradFn, local: types.Local, shard: types.Shard, key: Array
    ) -> types.Trained:
        def of_variables(local: types.Local, batch: types.Batch, key: Array) -> types.Step:
            return grad_fn(local.variables, batch, key)

        return run_local(of_variables, local, shard, key)

    def with_optimizer(change: types.ChangeOptimizer) -> types.Work:
        return _work(change(optimizer), plan)

    return types.Work(init, run, with_optimizer, run_local, momentum, num_steps=num_steps)


def _assert_fits(step: types.Step, local: types.Local) -> None:
    """Assert that a step has the shapes of the state, or its gradient would be broadcast."""
    chex.assert_trees_all_equal_shapes(
        types.Step(step.grads, step.stats, {}, carry=step.carry),
        types.Step(*local.variables, {}, carry=local.carry),
    )


@jax.custom_batching.custom_vmap
def _most(num_steps: Array) -> Array:
    """Return the steps of a client, under `vmap` the most of all clients.

    So all clients share the turns of their loops. If their number differed, `vmap` would select the
    whole state of each client after each step, which reads and writes the parameters once more.
    """
    return num_steps


@_most.def_vmap
def _most_of_all(size: int, batched: list[bool], num_steps: Array) -> tuple[Array, bool]:
    del size, batched
    return _most(num_steps.max()), False


def _nan_unless(fits: Array, tree: Tree) -> Tree:
    """Return the tree if `fits` [] is true, else NaN in its floats."""

    def leaf(values: Array) -> Array:
        is_float = jnp.issubdtype(values.dtype, jnp.inexact)
        return jnp.where(fits, values, jnp.nan) if is_float else values

    return jax.tree.map(leaf, tree)


def seeing_local(work: types.Work) -> types.Work:
    """Return the same work for gradients that see the whole state, each a `LocalGradFn`."""
    if work.run_local is None:
        raise UsageError("work", ..., "must be one of fedjax_inv.local's, which has a `run_local`")
    return work._replace(run=work.run_local)


def epochs(
    optimizer: optax.GradientTransformation,
    *,
    batch_size: int,
    num_epochs: int = 1,
    num_batches: int | None = None,
    momentum: float | Array | None = None,
) -> types.Work:
    """Return local training in passes over the client's examples, each in a new random order.

    Args:
      optimizer: the local optimizer.
      batch_size: examples in a batch; the last batch of a pass may be smaller.
      num_epochs: passes.
      num_batches: batches in a pass, if the number is the same for all clients with examples; None
        if it may differ. A client with another number gets NaN results, which every run reports.
      momentum: the optimizer's momentum, if that is SGD (0: without), for methods that need it
        (`Work.momentum`); it is recorded and changes nothing. None: unknown.
    """
    checks.integer("batch_size", batch_size)
    checks.integer("num_epochs", num_epochs)

    def orders(key: Array) -> permutation.Permutation:
        keys = jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(num_epochs))
        return jax.vmap(permutation.draw)(keys)

    def num_steps(size: Array) -> Array:
        return num_epochs * -(-size // batch_size)

    def plan(shard: types.Shard, key: Array) -> _Steps:
        batches = -(-shard.size // batch_size)
        drawn = orders(key)

        def batch_at(step: Array) -> types.Batch:
            epoch = step // jnp.maximum(batches, 1)
            number = step % jnp.maximum(batches, 1)
            return _batch_of_pass(shard, tree.take(drawn, epoch), number, batch_size)

        return _Steps(num_epochs * batches, batch_at)

    def plan_of(batches: int, shard: types.Shard, key: Array) -> _Steps:
        index = jnp.arange(batches * batch_size, dtype=jnp.int32)
        known = num_epochs * batches
        # All orders at once, before the first step.
        drawn = jax.vmap(lambda order: permutation.at(order, index, shard.size))(orders(key))
        positions = drawn.reshape(known, batch_size)
        in_batch = index[:batch_size]

        def batch_at(step: Array) -> types.Batch:
            first = step % batches * batch_size
            return take_batch(shard, positions[step], first + in_batch < shard.size)

        fits = (-(-shard.size // batch_size) == batches) | (shard.size == 0)
        return _Steps(jnp.where(shard.size > 0, known, 0), batch_at, known, fits)

    chosen = plan if num_batches is None else partial(plan_of, num_batches)
    return _work(optimizer, chosen, num_steps, momentum)


def _constant(num_steps: int, size: Array) -> Array:
    return jnp.where(size > 0, num_steps, 0)


def steps(
    optimizer: optax.GradientTransformation,
    *,
    batch_size: int,
    num_steps: int,
    momentum: float | Array | None = None,
) -> types.Work:
    """Return local training with the same number of steps for every client.

    Each of the `batch_size` examples of a batch is drawn with replacement. A client without
    examples takes no step. The other arguments are those of `epochs`.
    """
    checks.integer("batch_size", batch_size)
    checks.integer("num_steps", num_steps)

    def plan(shard: types.Shard, key: Array) -> _Steps:
        def positions_of(step: Array) -> Array:
            step_key = jax.random.fold_in(key, step)
            return jax.random.randint(step_key, (batch_size,), 0, jnp.maximum(shard.size, 1))

        # All draws at once, before the first step.
        positions = jax.vmap(positions_of)(jnp.arange(num_steps))

        def batch_at(step: Array) -> types.Batch:
            return take_batch(shard, positions[step], jnp.ones(batch_size, bool))

        return _Steps(_constant(num_steps, shard.size), batch_at, num_steps)

    return _work(optimizer, plan, partial(_constant, num_steps), momentum)


def full_batch(
    optimizer: optax.GradientTransformation,
    *,
    capacity: int,
    num_steps: int = 1,
    momentum: float | Array | None = None,
) -> types.Work:
    """Return local training whose steps take all of the client's examples at once.

    With one step this is FedSGD's client. `capacity` is the length of the batch, at least the
    examples of the largest client (`int(federation.size.max())`): a larger client gets NaN results,
    which every run reports. The other arguments are those of `steps`.
    """
    checks.integer("capacity", capacity)
    checks.integer("num_steps", num_steps)

    def plan(shard: types.Shard, key: Array) -> _Steps:
        del key
        index = jnp.arange(capacity, dtype=jnp.int32)
        batch = take_batch(shard, index, index < shard.size)
        known = _constant(num_steps, shard.size)
        return _Steps(known, lambda step: batch, num_steps, shard.size <= capacity)

    return _work(optimizer, plan, partial(_constant, num_steps), momentum)
