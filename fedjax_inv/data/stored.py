"""Examples that stay on the host, of which some rows at a time are read."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_inv.types import Examples, Tree


class Stored(NamedTuple):
    """M examples on the host."""

    shapes: Examples  # the shapes of all of them, [M, ...]
    take: Callable[[np.ndarray], Examples]  # rows [n] -> their examples, on the host

    @property
    def row_bytes(self) -> int:
        """The bytes of an example."""
        leaves = jax.tree.leaves(self.shapes)
        return sum(int(np.prod(leaf.shape[1:])) * leaf.dtype.itemsize for leaf in leaves)


def of_arrays(x: Tree, y: Tree, domain: Any = None) -> Stored:
    """Return examples [M, ...] in memory, or in files (`np.load(..., mmap_mode="r")`)."""
    data = jax.tree.map(np.asarray, Examples(x, y, domain))
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), data)
    return Stored(shapes, lambda rows: jax.tree.map(lambda leaf: leaf[rows], data))


def of_records(
    source: Sequence[Any], *, inputs: Callable[[Any], Tree], targets: Callable[[Any], Tree]
) -> Stored:
    """Return examples that are decoded when they are read, such as TFDS's `data_source`.

    The source are M records of one shape, such as `tfds.data_source("mnist", split="train")`; its
    method `__getitems__` reads several at once, if it has one. `inputs` makes one x of a record,
    such as `operator.itemgetter("image")`, and `targets` one y. Of a list of (file, target),
    `images.image_of` reads images: inputs=lambda pair: image_of(pair[0], (64, 64)).
    """

    def decoded(record: Any) -> Examples:
        return jax.tree.map(np.asarray, Examples(inputs(record), targets(record)))

    def take(rows: np.ndarray) -> Examples:
        wanted, places = np.unique(rows, return_inverse=True)
        several = getattr(source, "__getitems__", None)
        numbers = wanted.tolist()
        records = several(numbers) if several else (source[number] for number in numbers)
        each = [decoded(record) for record in records]
        return jax.tree.map(lambda *leaves: np.stack(leaves)[places], *each)

    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((len(source), *leaf.shape), leaf.dtype),
        decoded(source[0]),
    )
    return Stored(shapes, take)
