"""The record that every source returns, and that environments, partitions and federations take."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_inv import checks
from fedjax_inv.checks import UsageError
from fedjax_inv.types import Array, Tree

TASKS = ("classes", "labels", "values")
_NUMBERS = ("x", "y", "domain", "test", "user", "original", "valid", "known")  # [M, ...]


class Column(NamedTuple):
    """A column of a table."""

    name: str
    categories: tuple[str, ...] | None = None  # None: numbers

    @property
    def features(self) -> tuple[str, ...]:
        """The names of its features: its own, or one for each category."""
        if self.categories is None:
            return (self.name,)
        return tuple(f"{self.name}={category}" for category in self.categories)


class Dataset(NamedTuple):
    """Examples and their targets on the host, with the domain of each."""

    # [M, ...] uint8 or float32: images [M, height, width, channels]; or int32: words of texts
    # [M, T]; or a tree that `render` takes
    x: Tree
    # [M] int32 in 0..K-1: classes; [M, K] bool: labels, of which several may be true; [M, K]
    # float32, or [M] for K = 1: values
    y: np.ndarray
    classes: tuple[str, ...]  # K names, of classes, labels or values
    domain: np.ndarray  # [M] int32 into domains
    domains: tuple[str, ...]  # ("all",) if the source has none
    test: np.ndarray  # [M] bool, true in the source's official test split
    # x [B, ...] -> images for a network, [B, height, width, channels] in [0, 1]; None: x itself
    render: Callable[[Tree], Array] | None = None
    user: np.ndarray | None = None  # [M] int32, the user of each example, if known
    # [M] int32, the original of each example if some are copies of one, or its group; no split or
    # domain may separate copies, and a copy has the user of its original
    original: np.ndarray | None = None
    words: tuple[str, ...] = ()  # V words, 0 is padding; () if x is not text
    columns: tuple[Column, ...] = ()  # of a table, whose features are x [M, D]; () for other data
    valid: np.ndarray | None = None  # [M] bool, for validation; None: a part that is drawn
    # [M] bool, which examples of the test and for validation are of domains that train, beside
    # others of unseen domains (WILDS's id_test and id_val); None: the data do not tell
    known: np.ndarray | None = None
    # [M] where each example comes from: its file, or the number of its row in the source; None: the
    # rows of the source in order
    source: np.ndarray | None = None

    @property
    def features(self) -> tuple[str, ...]:
        """D names of the features of a table, () for other data."""
        return tuple(name for column in self.columns for name in column.features)

    @property
    def task(self) -> str:
        """What the targets are, one of TASKS: "classes", "labels" or "values"."""
        kind = np.asarray(self.y).dtype.kind
        return {"b": "labels", "f": "values"}.get(kind, "classes")

    def take(self, rows: np.ndarray) -> "Dataset":
        """Return the examples in some rows, [n] integers or [M] bool."""
        of_examples = {name: getattr(self, name) for name in (*_NUMBERS, "source")}
        return self._replace(**jax.tree.map(lambda leaf: leaf[rows], of_examples))


def check_dataset(dataset: Dataset) -> None:
    """Raise UsageError unless the fields of a user's own data set fit each other."""
    for name, names in (("classes", dataset.classes), ("domains", dataset.domains)):
        if not names or len({*names}) < len(names):
            raise UsageError(f"dataset.{name}", names, "must be different names, at least one")
    num_names = len(dataset.classes)
    num_examples = len(dataset.y)
    ends = {"domain": len(dataset.domains), "user": 2**31, "original": 2**31}
    ends |= {"y": num_names} if dataset.task == "classes" else {}
    for name, end in ends.items():
        if getattr(dataset, name) is not None:
            checks.integers(f"dataset.{name}", getattr(dataset, name), 0, end - 1)
    if dataset.task != "classes" and dataset.y.size != num_names * num_examples:
        text = f"must have a column for each of {num_names} names in classes"
        raise UsageError("dataset.y", dataset.y, text)
    for name in ("test", "valid", "known"):
        if (field := getattr(dataset, name)) is not None and np.asarray(field).dtype != bool:
            raise UsageError(f"dataset.{name}", field, "must be bool")
    of_examples = {name: getattr(dataset, name) for name in _NUMBERS}
    for (field, *rest), leaf in jax.tree_util.tree_leaves_with_path(of_examples):
        if np.shape(leaf)[:1] != (num_examples,) or not num_examples or not holds_finite(leaf):
            name = f"dataset.{field.key}{jax.tree_util.keystr((*rest,))}"
            raise UsageError(name, leaf, f"must be finite numbers [{num_examples}, ...]")


def check_classes(dataset: Dataset) -> None:
    """Raise UsageError unless the targets are classes."""
    if dataset.task != "classes":
        raise UsageError("dataset.y", ..., f"holds {dataset.task}, must hold classes")


class Originals(NamedTuple):
    """The originals of M examples, of which each example may be a copy."""

    rows: np.ndarray  # [N] the first example of each original, in increasing order
    of: np.ndarray  # [M] the original of each example, in 0..N-1

    def copies(self, rows: np.ndarray) -> np.ndarray:
        """Return all examples that have the originals of some rows [n], ordered by these rows."""
        if len(self.rows) == len(self.of):
            return rows
        by_original = np.argsort(self.of, kind="stable")
        count = np.bincount(self.of)
        start = np.cumsum(count) - count
        parts = [by_original[start[i] : start[i] + count[i]] for i in self.of[rows]]
        return np.concatenate([np.zeros(0, by_original.dtype), *parts])


def originals(dataset: Dataset) -> Originals:
    """Return the originals of a data set; without `Dataset.original` each example is its own."""
    if dataset.original is None:
        every = np.arange(len(dataset.y))
        return Originals(every, every)
    _, rows, of = np.unique(dataset.original, return_index=True, return_inverse=True)
    order = np.argsort(rows)
    return Originals(rows[order], np.argsort(order)[of])


def holds_finite(array: Any) -> bool:
    """Return whether an array's numbers are finite in the type in which JAX keeps them."""
    kept: Any = jax.dtypes.canonicalize_dtype(array.dtype)
    rows = np.atleast_1d(array)
    # In blocks, as the examples may be mapped from a file that is larger than memory.
    step = max(1, 2**20 // max(1, rows[:1].size))
    with np.errstate(over="ignore"):  # too large numbers become infinite
        blocks = (rows[at : at + step].astype(kept) for at in range(0, len(rows), step))
        return not jnp.issubdtype(kept, jnp.floating) or all(np.isfinite(b).all() for b in blocks)


def suspicions(name: str, x: Tree, y: Tree) -> list[str]:
    """Return why arrays may not be what is meant: images [M, channels, H, W], and one-hot values.

    `name` stands before x and y in the texts.
    """
    found = []
    shape = () if isinstance(x, tuple | list | dict) else np.shape(x)
    if len(shape) == 4 and shape[1] in (1, 3) and shape[3] > 4:
        text = f"{name}x has {shape[3]} channels, as the last axis counts them; images of PyTorch "
        found.append(f"{text}[M, channels, height, width] must be x.transpose(0, 2, 3, 1)")
    values = np.zeros(0) if isinstance(y, tuple | list | dict) else np.asarray(y)
    is_matrix = values.ndim == 2 and values.shape[1] > 1 and values.dtype.kind == "f"
    if is_matrix and ((values != 0).sum(1) == 1).all() and (values.max(1) == 1).all():
        text = f"{name}y are one-hot rows in floating point, which train as values"
        found.append(f"{text}; classes are y.argmax(1)")
    return found


def for_texts(name: str, value: Any) -> str:
    """Return the end of a message that refuses an array: how texts become integers, else ""."""
    try:
        holds_texts = np.asarray(value).dtype.kind in "OSU"
    except (TypeError, ValueError):  # lists of different lengths
        holds_texts = False
    return f"; for texts: np.unique({name}, return_inverse=True)[1]" if holds_texts else ""
