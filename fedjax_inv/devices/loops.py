"""Loops whose bodies compile to the same code in every program, so that they round in one way.

XLA fuses operations that stand side by side, and rounds a product and a sum once where it fuses
them and twice where it does not. Nothing is fused across the edge of a loop. So the body of a loop
gives the same bits in every program, as long as XLA cannot dissolve the loop: a loop of a single
turn, for example. The number of turns of the loops here is hidden from XLA.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_inv import platforms
from fedjax_inv.types import Array, Tree

# Several threads of a device would cut sums by their number. A small loop may become a part of what
# stands around it. XLA eliminates common subexpressions once more in programs of several devices,
# before it simplifies; which simplification applies depends on whether operations are shared.
_OPTIONS = {
    "xla_cpu_multi_thread_eigen": False,
    "xla_disable_hlo_passes": "small-while-loop-hoisting,cse",
}


def compiler_options() -> dict[str, Any]:
    """Return the `compiler_options` of `jax.jit` with which these loops keep their bits."""
    return _OPTIONS if platforms.on_cpu() else {}


def turns(number: Array | int) -> Array:
    """Return a number of turns [] int32 that XLA cannot see."""
    return jax.lax.optimization_barrier(jnp.asarray(number, jnp.int32))


def mapped(fn: Callable[[Tree], Tree], trees: Tree) -> Tree:
    """Return `fn` of each entry of the leading axis, like `jax.lax.map`, in one loop.

    Args:
      fn: leaves [...] -> leaves.
      trees: leaves [N, ...], N at least 1.

    Returns:
      The results, each with a leading N.
    """
    length = jax.tree.leaves(trees)[0].shape[0]

    def entry(index: Array) -> Tree:
        return fn(jax.tree.map(lambda leaf: leaf[index], trees))

    def turn(index: Array, results: Tree) -> Tree:
        return written(results, index, entry(index))

    shapes = jax.eval_shape(entry, jax.ShapeDtypeStruct((), jnp.int32))
    return jax.lax.fori_loop(0, turns(length), turn, room(shapes, length))


def isolated(fn: Callable[..., Tree], *arguments: Tree) -> Tree:
    """Return fn(*arguments), computed so that nothing before or after it changes its rounding."""
    shapes = jax.eval_shape(fn, *arguments)

    def turn(index: Array, _: Tree) -> Tree:
        # XLA moves out of a loop what it knows to be the same in each turn.
        return fn(*jax.tree.map(lambda a: jnp.where(index < 1, a, jnp.zeros_like(a)), arguments))

    empty = jax.tree.map(lambda leaf: jnp.empty(leaf.shape, leaf.dtype), shapes)
    return jax.lax.fori_loop(0, turns(1), turn, empty)


def room(entry: Tree, length: int) -> Tree:
    """Return arrays with room for `length` entries of these shapes."""
    # `empty` makes random keys, too; all of it is overwritten.
    return jax.tree.map(lambda leaf: jnp.empty((length, *leaf.shape), leaf.dtype), entry)


def written(results: Tree, index: Array, entry: Tree) -> Tree:
    """Return results with another entry at an index of the leading axis."""
    return jax.tree.map(
        lambda of_all, one: jax.lax.dynamic_update_index_in_dim(of_all, one, index, 0),
        results,
        entry,
    )
