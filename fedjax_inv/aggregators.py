"""How a server combines uploads: monoids that fold a cohort chunk by chunk.

An upload of an absent client reaches `add` as zeros.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_inv import tree
from fedjax_inv.types import Aggregator, Array, Slots, Tree


class _Sum(NamedTuple):
    values: Tree  # sum of weight x upload
    weight: Array  # [] sum of the weights


class Stack(NamedTuple):
    """What `stacked` hands to the server: every upload, in slot order."""

    values: Tree  # [S, ...]; zeros where absent
    present: Array  # [S] bool
    who: Array  # [S] int32
    size: Array  # [S] int32, examples of the client


def _zeros(upload: Tree, *leading: int) -> Tree:
    return jax.tree.map(lambda leaf: jnp.zeros((*leading, *leaf.shape), leaf.dtype), upload)


def _mean(by_size: bool) -> Aggregator:
    def init(upload: Tree, num_slots: int) -> _Sum:
        del num_slots
        return _Sum(_zeros(upload), jnp.zeros(()))

    def add(total: _Sum, uploads: Tree, slots: Slots) -> _Sum:
        weights = slots.present * (slots.size if by_size else 1.0)
        return _Sum(
            jax.tree.map(jnp.add, total.values, tree.weighted_sum(uploads, weights)),
            total.weight + weights.sum(),
        )

    def finish(total: _Sum) -> Tree:
        weight = jnp.where(total.weight > 0, total.weight, 1.0)
        return jax.tree.map(lambda leaf: leaf / weight.astype(leaf.dtype), total.values)

    return Aggregator(init, add, finish)


def weighted_mean() -> Aggregator:
    """The mean over present clients, weighted by their number of examples (FedAvg)."""
    return _mean(by_size=True)


def mean() -> Aggregator:
    """The mean over present clients, each counting the same."""
    return _mean(by_size=False)


def total() -> Aggregator:
    """The sum over present clients."""

    def add(accumulator: Tree, uploads: Tree, slots: Slots) -> Tree:
        del slots
        return jax.tree.map(lambda a, leaf: a + leaf.sum(0), accumulator, uploads)

    return Aggregator(
        lambda upload, num_slots: _zeros(upload), add, lambda accumulator: accumulator
    )


def stacked() -> Aggregator:
    """All uploads as a `Stack`; needs memory for the whole cohort."""

    def init(upload: Tree, num_slots: int) -> Stack:
        return Stack(
            _zeros(upload, num_slots),
            jnp.zeros(num_slots, bool),
            jnp.zeros(num_slots, jnp.int32),
            jnp.zeros(num_slots, jnp.int32),
        )

    def add(stack: Stack, uploads: Tree, slots: Slots) -> Stack:
        # An absent slot writes nothing, so that padding slots cannot land on a real one.
        index = jnp.where(slots.present, slots.position, stack.present.shape[0])
        new = Stack(uploads, slots.present, slots.who, slots.size)
        return tree.put(stack, index, new)

    return Aggregator(init, add, lambda stack: stack)


def combine(aggregators: Tree) -> Aggregator:
    """One aggregator out of a tree of them that is a prefix of the upload."""

    def each(fn: Callable[..., Tree], *trees: Tree) -> Tree:
        return jax.tree.map(fn, aggregators, *trees, is_leaf=lambda a: isinstance(a, Aggregator))

    def init(upload: Tree, num_slots: int) -> Tree:
        return each(lambda a, part: a.init(part, num_slots), upload)

    def add(accumulators: Tree, uploads: Tree, slots: Slots) -> Tree:
        return each(lambda a, acc, part: a.add(acc, part, slots), accumulators, uploads)

    def finish(accumulators: Tree) -> Tree:
        return each(lambda a, acc: a.finish(acc), accumulators)

    return Aggregator(init, add, finish)
