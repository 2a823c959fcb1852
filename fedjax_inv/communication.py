"""Communication: the bytes that a client downloads and uploads, from shapes."""

import dataclasses
import math

import jax

from fedjax_inv.types import Tree


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Traffic:
    """The bytes that one client downloads and uploads in one exchange."""

    down: int
    up: int


def size(shapes: Tree) -> int:
    """Return the size in bytes of a tree of arrays or shapes."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))
