"""Functions of trees that `optax.tree` lacks, for the leading axis of leaves, parts, and NaN."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_inv import platforms
from fedjax_inv.types import Array, Tree


def on_device(tree: Tree) -> Tree:
    """Return a tree with NumPy's arrays as JAX's, which a traced index may index."""
    return jax.tree.map(
        lambda leaf: jnp.asarray(leaf) if isinstance(leaf, np.ndarray) else leaf, tree
    )


def take(tree: Tree, index: Array | int) -> Tree:
    """Return the entries `index`, [S] or [] int, of the leading axis of leaves [C, ...]."""
    return jax.tree.map(lambda leaf: leaf[index], tree)


def put(tree: Tree, index: Array, values: Tree) -> Tree:
    """Return leaves [C, ...] with values [S, ...] or [...] at `index`, [S] or [] int32.

    An index of C or more writes nothing.
    """
    length = min((leaf.shape[0] for leaf in jax.tree.leaves(tree)), default=0)
    if platforms.on_cpu() or jnp.ndim(index) != 1 or index.shape[0] < length:
        return jax.tree.map(
            lambda leaf, value: leaf.at[index].set(value, mode="drop"), tree, values
        )
    # If all entries may be written, each looks for its value: on an accelerator a scatter is a
    # kernel of its own for each leaf, and a copy if the old leaf is used again.
    is_here = index == jnp.arange(length)[:, None]
    source = jnp.argmax(is_here, 1)
    is_written = is_here.any(1)

    def found(leaf: Array, value: Array) -> Array:
        return jnp.where(is_written.reshape(-1, *[1] * (leaf.ndim - 1)), value[source], leaf)

    return jax.tree.map(found, tree, values)


def compact(tree: Tree, real: Array, size: int) -> Tree:
    """Return leaves [size, ...] of the real rows of leaves [A, ...], in their order, then zeros.

    The places of the rows, of which real [A] bool tells, are found by counting, as a sort is slow
    on accelerators.
    """
    place = jnp.where(real, jnp.cumsum(real) - 1, size)
    zeros = jax.tree.map(lambda leaf: jnp.zeros((size, *leaf.shape[1:]), leaf.dtype), tree)
    return put(zeros, place, tree)


def scaled(factor: float | Array, tree: Tree) -> Tree:
    """Return factor [] x each leaf of floats, in the leaf's dtype, whatever the factor's is."""
    return jax.tree.map(lambda leaf: (factor * leaf).astype(leaf.dtype), tree)


def clipped(tree: Tree, clip: float | Array) -> Tree:
    """Return the nearest tree of an L2 norm of at most `clip`; zeros if one is not finite."""
    short = optax.projections.projection_l2_ball(tree, clip)
    return optax.tree.where(all_finite(tree), short, optax.tree.zeros_like(tree))


def weighted_sum(tree: Tree, weights: Array) -> Tree:
    """Return the sum of leaves [S, ...] over the leading axis, weighted by weights [S].

    Floats keep their dtypes; others become float32.
    """

    def leaf(values: Array) -> Array:
        values = values if jnp.issubdtype(values.dtype, jnp.inexact) else jnp.float32(values)
        # At the default precision a GPU may round values to the ten bits of TF32.
        return jnp.tensordot(weights.astype(values.dtype), values, 1, precision="highest")

    return jax.tree.map(leaf, tree)


def wide(numbers: Array) -> Array:
    """Return numbers of at least 32 bits, for sums and squares: float16 ends at 65,504."""
    return numbers.astype(jnp.promote_types(numbers.dtype, jnp.float32))


def all_finite(tree: Tree) -> Array:
    """Return whether no leaf holds a NaN or an infinity, [] bool."""
    of_shape: dict[tuple[int, ...], Array] = {}
    for leaf in jax.tree.leaves(tree):
        # One reduction for all leaves of a shape, such as a network's and its optimizer's.
        shape = jnp.shape(leaf)
        of_shape[shape] = of_shape.get(shape, jnp.bool_(True)) & jnp.isfinite(leaf)
    checks = [jnp.all(leaf) for leaf in of_shape.values()]
    return jnp.all(jnp.stack(checks)) if checks else jnp.bool_(True)


def names(path: tuple) -> tuple[str, ...]:
    """Return a path of JAX as names."""
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in path)


def replacing(select: Callable[[Tree], Tree], tree: Tree) -> Callable[[Tree], Tree]:
    """Return the function part -> `tree` with that part in place of `select(tree)`.

    `select` picks leaves of a tree, whatever they are.
    """
    structure: Any
    leaves, structure = jax.tree.flatten(tree)
    places = jax.tree.leaves(select(structure.unflatten(range(len(leaves)))))

    def replaced(part: Tree) -> Tree:
        new = dict(zip(places, jax.tree.leaves(part), strict=True))
        return structure.unflatten(new.get(at, leaf) for at, leaf in enumerate(leaves))

    return replaced


def partition(tree: Tree, is_chosen: Callable[[tuple[str, ...]], bool]) -> tuple[Tree, Tree]:
    """Return (chosen, others): `tree` twice, with None for the leaves of the other part.

    `is_chosen` tells from the path of a leaf, such as ("params", "body", "blocks_0", "BatchNorm_0",
    "scale"), whether it is chosen.
    """

    def part(chosen: bool) -> Tree:
        def keep(path: tuple, leaf: Array) -> Array | None:
            return leaf if is_chosen(names(path)) == chosen else None

        return jax.tree_util.tree_map_with_path(keep, tree)

    return part(True), part(False)


def combine(chosen: Tree, others: Tree) -> Tree:
    """Return the tree of two parts, the inverse of `partition`."""
    return jax.tree.map(
        lambda ours, theirs: theirs if ours is None else ours,
        chosen,
        others,
        is_leaf=lambda leaf: leaf is None,
    )
