"""Examples that stay on the host, of which some rows at a time are read.

Files are read and not mapped: a file that has become shorter is an error in one line, and what has
been read counts as the system's cache and not as memory of the process.
"""

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from fedjax_inv import checks
from fedjax_inv.checks import UsageError
from fedjax_inv.types import Examples, Tree


class Take(Protocol):
    """Reads some examples."""

    def __call__(self, rows: np.ndarray, /) -> Examples:
        """Return the examples of some rows, on the host.

        Args:
          rows: [n] integers in 0..M-1, in any order, with repetitions.
        """


class Stored(NamedTuple):
    """M examples on the host."""

    shapes: Examples  # the shapes of all of them, [M, ...]
    take: Take

    @property
    def num_examples(self) -> int:
        """M."""
        return jax.tree.leaves(self.shapes)[0].shape[0]

    @property
    def row_bytes(self) -> int:
        """The bytes of an example."""
        leaves = jax.tree.leaves(self.shapes)
        return sum(int(np.prod(leaf.shape[1:])) * leaf.dtype.itemsize for leaf in leaves)


def of_arrays(x: Tree, y: Tree) -> Stored:
    """Return examples that are arrays in memory, or `np.memmap`s of files.

    A `np.memmap` is read from its file row by row, and never mapped, unless its mode is "c".

    Args:
      x: inputs, [M, ...].
      y: targets, [M, ...].

    Raises:
      UsageError: if x and y have different lengths, or no example.
    """
    data = Examples(x, y)
    lengths = {np.shape(leaf)[0] if np.ndim(leaf) else 0 for leaf in jax.tree.leaves(data)}
    if len(lengths) != 1 or 0 in lengths:
        found = f"must be as long as x, above 0; their lengths are {sorted(lengths)}"
        raise UsageError("y", ..., found)
    readers = jax.tree.map(_reader, data)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), data)

    def take(rows: np.ndarray) -> Examples:
        return jax.tree.map(lambda read: read(rows), readers)

    return Stored(shapes, take)


def _reader(leaf: Any) -> Callable[[np.ndarray], np.ndarray]:
    """Return (rows -> the entries of an array)."""
    mapped, base = None, leaf  # the map of the file is the last of the bases
    while isinstance(base, np.ndarray):
        mapped, base = base, base.base
    if not (
        isinstance(mapped, np.memmap)
        and mapped.filename
        and mapped.mode != "c"  # copy-on-write: what is written is not in the file
        and leaf.flags.c_contiguous
    ):
        array = np.asarray(leaf)
        return lambda rows: array[rows]
    first = leaf.__array_interface__["data"][0] - mapped.__array_interface__["data"][0]
    return _FileRows(str(mapped.filename), mapped.offset + first, leaf.shape, leaf.dtype)


class _FileRows:
    """Reads rows of an array in a file."""

    def __init__(
        self, path: str, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> None:
        self._path, self._offset, self._shape, self._dtype = path, offset, shape, dtype
        self._row = int(np.prod(shape[1:])) * dtype.itemsize
        self._file = os.open(path, os.O_RDONLY)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # at exit os may be gone
        if hasattr(self, "_file"):
            close(self._file)

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        found = np.empty((len(rows), *self._shape[1:]), self._dtype)
        if len(rows) == 0:
            return found
        bytes_of = found.reshape(len(rows), -1).view(np.uint8)
        follows = np.diff(rows) == 1
        begins = np.flatnonzero(np.concatenate([[True], ~follows]))
        ends = np.append(begins[1:], len(rows))
        for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
            self._read(int(rows[begin]), bytes_of[begin:end])
        return found

    def _read(self, row: int, into: np.ndarray) -> None:
        """Read consecutive rows from `row` on."""
        view, at = into.reshape(-1).data, self._offset + row * self._row
        while view:
            count = os.preadv(self._file, [view], at)
            if count == 0:
                text = f"ends before row {row} of {self._shape[0]}; it has become shorter"
                raise UsageError(self._path, ..., text)
            view, at = view[count:], at + count


def of_records(
    source: Sequence[Any],
    *,
    inputs: Callable[[Any], Tree],
    targets: Callable[[Any], Tree],
    cache_bytes: int = 2**28,
) -> Stored:
    """Return examples that are read and decoded one by one, such as TFDS's `data_source`.

    With `sources.image_of` the records of a list of (file, target) are images in a folder:

        of_records(pairs, inputs=lambda pair: image_of(pair[0], (64, 64)), targets=itemgetter(1))

    Args:
      source: M records, such as `tfds.data_source("mnist", split="train")`. Its method
        `__getitems__` reads several at once, if it has one.
      inputs: a record -> one x; such as `operator.itemgetter("image")`.
      targets: a record -> one y.
      cache_bytes: the size of a cache of decoded examples; the longest unused leave it.

    Raises:
      UsageError: for no record, and for arguments of other types.
    """
    checks.function("inputs", inputs)
    checks.function("targets", targets)
    checks.integer("cache_bytes", cache_bytes, 0)
    if not len(source):
        raise UsageError("source", ..., "must have at least one record")

    def decoded(record: Any) -> Examples:
        return jax.tree.map(np.asarray, Examples(inputs(record), targets(record)))

    first = decoded(source[0])
    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((len(source), *leaf.shape), leaf.dtype), first
    )
    row_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(first))
    most = cache_bytes // max(row_bytes, 1)
    cache: OrderedDict[int, Examples] = OrderedDict()
    lock = threading.Lock()

    def read(rows: list[int]) -> Mapping[int, Examples]:
        several = getattr(source, "__getitems__", None)
        records = several(rows) if several and rows else [source[row] for row in rows]
        found = {}
        for row, record in zip(rows, records, strict=True):
            found[row] = decoded(record)
            kinds, needed = (
                jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), each)
                for each in (found[row], first)
            )
            if kinds != needed:
                raise UsageError(f"source[{row}]", ..., "has another shape than source[0]")
        return found

    def take(rows: np.ndarray) -> Examples:
        wanted = np.unique(rows).tolist()
        with lock:
            known = {row: cache[row] for row in wanted if row in cache}
        known |= read([row for row in wanted if row not in known])
        with lock:
            for row in wanted:
                cache[row] = known[row]
                cache.move_to_end(row)
            while len(cache) > most:
                cache.popitem(last=False)
        chosen = [known[row] for row in rows.tolist()]
        if not chosen:
            return jax.tree.map(lambda leaf: np.empty((0, *leaf.shape[1:]), leaf.dtype), shapes)
        return jax.tree.map(lambda *leaves: np.stack(leaves), *chosen)

    return Stored(shapes, take)
