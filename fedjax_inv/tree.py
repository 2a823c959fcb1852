"""What `optax.tree` lacks: the leading axis of all leaves, and a test for NaN."""

import jax
import jax.numpy as jnp

from fedjax_inv.types import Array, Tree


def take(tree: Tree, index: Array | int) -> Tree:
    """The entries `index` of the leading axis of every leaf."""
    return jax.tree.map(lambda leaf: leaf[index], tree)


def put(tree: Tree, index: Array, values: Tree) -> Tree:
    """`tree` with `values` at `index` of the leading axis; an index beyond it writes nothing."""
    return jax.tree.map(lambda leaf, value: leaf.at[index].set(value, mode="drop"), tree, values)


def weighted_sum(tree: Tree, weights: Array) -> Tree:
    """The sum over the leading axis of every leaf, weighted by `weights` [S]."""

    def leaf(values: Array) -> Array:
        # At the default precision a GPU may round deltas to the ten bits of TF32.
        return jnp.tensordot(weights.astype(values.dtype), values, 1, precision="highest")

    return jax.tree.map(leaf, tree)


def all_finite(tree: Tree) -> Array:
    """Whether no leaf holds a NaN or an infinity; [] bool."""
    checks = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]
    return jnp.all(jnp.stack(checks)) if checks else jnp.bool_(True)
