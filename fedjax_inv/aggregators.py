"""How a server combines uploads: monoids that fold a cohort chunk by chunk.

`add` gets zeros as the upload of an absent client.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from fedjax_inv import checks, tree, types
from fedjax_inv.checks import UsageError
from fedjax_inv.types import Array, Tree

Weight = Callable[[types.Slots], Array]  # slots -> [S], how much each counts if it is present


class _Sum(NamedTuple):
    values: Tree  # sum of weight x upload
    weight: Array  # [] sum of the weights


class Stack(NamedTuple):
    """The result of `stacked`: every upload, in the order of the slots."""

    values: Tree  # [S, ...]; zeros where absent
    present: Array  # [S] bool
    who: Array  # [S] int32
    size: Array  # [S] int32, examples of the client


def by_size(slots: types.Slots) -> Array:
    """Return the weight of each client [S]: its number of examples, as in FedAvg."""
    return slots.size.astype(jnp.float32)


def uniform(slots: types.Slots) -> Array:
    """Return the weight of each client [S]: 1."""
    return jnp.ones(slots.size.shape)


def by_age(slots: types.Slots) -> Array:
    """Return the weight of each client [S]: 1 / sqrt(1 + the rounds since it heard the server).

    Nguyen et al. 2022 (FedBuff). The sum is divided by that of the weights, in the paper by the
    number of clients, which also shortens the step.
    """
    return jax.lax.rsqrt(1.0 + slots.delay)


_WEIGHTS: dict[str, Weight] = {"size": by_size, "uniform": uniform, "age": by_age}


def weight_of(weighting: str | Weight) -> Weight:
    """Return the weight function named so in `_WEIGHTS`; a function is returned unchanged."""
    if callable(weighting):
        return weighting
    checks.one_of("weighting", weighting, _WEIGHTS)
    return _WEIGHTS[weighting]


def _weights(weight: Weight, slots: types.Slots) -> Array:
    """Return the weights of slots [S], 0 for absent ones."""
    weights = weight(slots)
    chex.assert_equal_shape([weights, slots.size])
    return jnp.where(slots.present, weights, 0)


def _zeros(upload: Tree, *leading: int) -> Tree:
    return jax.tree.map(lambda leaf: jnp.zeros((*leading, *leaf.shape), leaf.dtype), upload)


def mean(weight: Weight = by_size) -> types.Aggregator:
    """Return an aggregator for the weighted mean over present clients; 0 if all weights are 0."""

    def init(upload: Tree, num_slots: int) -> _Sum:
        del num_slots
        none = tree.weighted_sum(_zeros(upload, 0), jnp.zeros(0))  # its dtypes
        return _Sum(none, jnp.zeros(()))

    def add(total: _Sum, uploads: Tree, slots: types.Slots) -> _Sum:
        weights = _weights(weight, slots)
        return _Sum(
            jax.tree.map(jnp.add, total.values, tree.weighted_sum(uploads, weights)),
            total.weight + weights.sum(),
        )

    def finish(total: _Sum) -> Tree:
        divisor = jnp.where(total.weight > 0, total.weight, 1.0)
        return jax.tree.map(lambda leaf: leaf / divisor.astype(leaf.dtype), total.values)

    return types.Aggregator(init, add, finish)


def total() -> types.Aggregator:
    """Return an aggregator for the sum over present clients."""

    def add(accumulator: Tree, uploads: Tree, slots: types.Slots) -> Tree:
        del slots
        return jax.tree.map(lambda a, leaf: a + leaf.sum(0), accumulator, uploads)

    def init(upload: Tree, num_slots: int) -> Tree:
        del num_slots
        return jax.tree.map(lambda leaf: leaf.sum(0), _zeros(upload, 0))  # its dtypes

    return types.Aggregator(init, add, lambda accumulator: accumulator)


def count() -> types.Aggregator:
    """Return an aggregator for the number of present clients []; their uploads may be empty."""
    return weight_sum(uniform)


def weight_sum(weight: Weight = by_size) -> types.Aggregator:
    """Return an aggregator for the sum of weights of present clients []; uploads may be empty."""

    def add(accumulator: Array, uploads: Tree, slots: types.Slots) -> Array:
        del uploads
        return accumulator + _weights(weight, slots).sum()

    return types.Aggregator(
        lambda upload, num_slots: jnp.zeros(()), add, lambda accumulator: accumulator
    )


def stacked() -> types.Aggregator:
    """Return an aggregator for all uploads as a `Stack`; it needs memory for the whole cohort."""

    def init(upload: Tree, num_slots: int) -> Stack:
        return Stack(
            _zeros(upload, num_slots),
            jnp.zeros(num_slots, bool),
            jnp.zeros(num_slots, jnp.int32),
            jnp.zeros(num_slots, jnp.int32),
        )

    def add(stack: Stack, uploads: Tree, slots: types.Slots) -> Stack:
        # An absent slot writes nothing, so that a padding slot cannot overwrite a real one.
        index = jnp.where(slots.present, slots.position, stack.present.shape[0])
        new = Stack(uploads, slots.present, slots.who, slots.size)
        return tree.put(stack, index, new)

    return types.Aggregator(init, add, lambda stack: stack)


# (uploads [S, ...], present [S] bool, of which at least one is true) -> the aggregated upload
Combine = Callable[[Tree, Array], Tree]


def of_all(combine: Combine, least: int = 1) -> types.Aggregator:
    """Return an aggregator for a function of all uploads at once, in the order of the clients.

    Raises UsageError for a cohort of fewer than `least` slots.
    """
    plain = stacked()

    def init(upload: Tree, num_slots: int) -> Stack:
        if num_slots < least:
            text = f"must have at least {least} clients a round, has {num_slots}"
            raise UsageError("schedule", ..., text)
        stack: Stack = plain.init(upload, num_slots)
        return stack

    def finish(stack: Stack) -> Tree:
        order = jnp.argsort(stack.who)  # so that neither ties nor rounding depend on the slots
        return combine(tree.take(stack.values, order), stack.present[order])

    return types.Aggregator(init, plain.add, finish)


def combine(of_parts: Tree) -> types.Aggregator:
    """Return one aggregator for uploads with several parts.

        aggregators.combine((aggregators.mean(), aggregators.total()))  # of uploads (a, b)

    Args:
      of_parts: an aggregator for each part, in a record, tuple or dict like that of the upload.
    """
    structure: Any
    each, structure = jax.tree.flatten(
        of_parts, is_leaf=lambda node: isinstance(node, types.Aggregator)
    )

    def init(upload: Tree, num_slots: int) -> list[Tree]:
        parts = structure.flatten_up_to(upload)
        return [a.init(part, num_slots) for a, part in zip(each, parts, strict=True)]

    def add(total: list[Tree], uploads: Tree, slots: types.Slots) -> list[Tree]:
        parts = zip(each, total, structure.flatten_up_to(uploads), strict=True)
        return [a.add(accumulator, part, slots) for a, accumulator, part in parts]

    def finish(total: list[Tree]) -> Tree:
        pairs = zip(each, total, strict=True)
        return structure.unflatten([a.finish(accumulator) for a, accumulator in pairs])

    return types.Aggregator(init, add, finish)
