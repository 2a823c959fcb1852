"""The record that every source returns, and that environments, partitions and federations take."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from fedjax_inv import checks
from fedjax_inv.checks import UsageError
from fedjax_inv.types import Array, Tree

TASKS = ("classes", "labels", "values")


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
    # [M] int32, the original of each example if some are copies of one; no split or domain may
    # separate copies, and a copy has the user of its original
    original: np.ndarray | None = None
    words: tuple[str, ...] = ()  # V words, 0 is padding; () if x is not text
    columns: tuple[Column, ...] = ()  # of a table, whose features are x [M, D]; () for other data

    @property
    def features(self) -> tuple[str, ...]:
        """D names of the features of a table, () for other data."""
        return tuple(name for column in self.columns for name in column.features)

    @property
    def task(self) -> str:
        """What the targets are, one of TASKS: "classes", "labels" or "values"."""
        kind = np.asarray(self.y).dtype.kind
        return {"b": "labels", "f": "values"}.get(kind, "classes")


def check_dataset(dataset: Dataset, task: str | None = None) -> None:
    """Check that the fields of a data set fit each other.

    Args:
      dataset: a data set of M examples.
      task: the task that the data set must have; None for any.

    Raises:
      UsageError: if there is no example; if a field has not one entry for each target; if a target,
        a domain or a word is out of range; if two names are equal; if x or y holds NaN or infinity;
        if the task is another one; if x is not of the columns; or if x is one array although there
        is a `render` (`models.painted` takes one array for images that are rendered already).
    """
    checks.record("dataset", dataset, Dataset)
    for name, names in (("classes", dataset.classes), ("domains", dataset.domains)):
        is_list = isinstance(names, Sequence) and not isinstance(names, str)
        if not is_list or not names or len(set(names)) < len(names):
            raise UsageError(f"dataset.{name}", names, "must be different names, at least one")
        if not all(isinstance(each, str) for each in names):
            raise UsageError(f"dataset.{name}", names, "must be names, which are strings")
    _check_targets(dataset.y, dataset.task, len(dataset.classes))
    if task not in (None, dataset.task):
        allowed = f"holds {dataset.task}, must hold {task}"
        raise UsageError("dataset.y", dataset.y, allowed)
    checks.integers("dataset.domain", dataset.domain, 0, len(dataset.domains) - 1)
    num_examples = len(dataset.y)
    others = (("user", dataset.user), ("original", dataset.original))
    for name, field in others:
        if field is not None:
            checks.integers(f"dataset.{name}", field, 0)
    for name, field in (("domain", dataset.domain), *others):
        if field is not None and len(field) != num_examples:
            raise UsageError(
                f"dataset.{name}", field, f"must be integers [{num_examples}], one for each target"
            )
    test = np.asarray(dataset.test)
    if test.dtype != bool or test.shape != (num_examples,):
        raise UsageError(
            "dataset.test", test, f"must be bool [{num_examples}], one for each target"
        )
    if dataset.words:
        checks.integers("dataset.x", dataset.x, 0, len(dataset.words) - 1, ndim=2)
    if dataset.render is not None and jax.tree_util.all_leaves([dataset.x]):
        raise UsageError(
            "dataset.x", ..., "is one array, must be a tree of arrays, as `render` takes a tree"
        )
    leaves = jax.tree_util.tree_leaves_with_path(dataset.x)
    if not leaves:
        raise UsageError("dataset.x", dataset.x, f"must hold an array [{num_examples}, ...]")
    for path, leaf in leaves:
        array = leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)
        shape = array.shape
        if shape[:1] != (num_examples,) or 0 in shape or array.dtype.kind not in "biuf":
            raise UsageError(
                f"dataset.x{jax.tree_util.keystr(path)}",
                array,
                f"must be numbers [{num_examples}, ...] without an empty axis, one entry for each "
                "target",
            )
        if not checks.holds_finite(array):
            name = f"dataset.x{jax.tree_util.keystr(path)}"
            raise UsageError(name, array, "must be finite in float32")
    checks.record("dataset.columns", dataset.columns, tuple)
    for column in dataset.columns:
        checks.record("dataset.columns", column, Column)
    if dataset.columns and np.shape(dataset.x) != (num_examples, len(dataset.features)):
        needed = f"[{num_examples}, {len(dataset.features)}]"
        allowed = f"must be {needed}, with the features of {{columns}}"
        raise UsageError("dataset.x", dataset.x, allowed, columns=("dataset.columns", ...))


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
    """Return the originals of a data set; without `Dataset.original` each example is its own.

    Args:
      dataset: a data set of M examples.

    Raises:
      UsageError: for another type.
    """
    checks.record("dataset", dataset, Dataset)
    if dataset.original is None:
        every = np.arange(len(dataset.y))
        return Originals(every, every)
    _, rows, of = np.unique(dataset.original, return_index=True, return_inverse=True)
    order = np.argsort(rows)
    return Originals(rows[order], np.argsort(order)[of])


def _check_targets(y: np.ndarray, task: str, num_names: int) -> None:
    """Raise UsageError unless y are targets of the task, a column for each name."""
    if task == "classes":
        checks.integers("dataset.y", y, 0, num_names - 1)
        return
    y = np.asarray(y)
    shapes = [(), (1,)] if task == "values" and num_names == 1 else [(num_names,)]
    dtype = "bool" if task == "labels" else "float32"
    if y.dtype != dtype or y.ndim == 0 or y.shape[1:] not in shapes or len(y) == 0:
        columns = f"[M, {num_names}]"
        raise UsageError(
            "dataset.y",
            y,
            f"must be integers [M] (classes), bool {columns} (labels) or float32 {columns} "
            f"(values), with a column for each name in dataset.classes",
        )
    if not np.isfinite(y).all():
        raise UsageError("dataset.y", y, "must be finite, holds NaN or infinity")
