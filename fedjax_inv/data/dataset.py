"""The record that every source makes and that environments, partitions and federations take."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np

from fedjax_inv import checks
from fedjax_inv.checks import UsageError
from fedjax_inv.types import Array, Tree


class Dataset(NamedTuple):
    """Labelled examples on the host, and the domain that each comes from."""

    # [M, ...] uint8 or float32; images are [M, height, width, channels], texts int32 words [M, T];
    # a tree if there is render
    x: Tree
    y: np.ndarray  # [M] int32 in 0..K-1
    classes: tuple[str, ...]  # K names
    domain: np.ndarray  # [M] int32 into domains
    domains: tuple[str, ...]  # ("all",) if the source has none
    test: np.ndarray  # [M] bool, true in the source's official test split
    # x [B, ...] -> what a network sees: [B, height, width, channels] in [0, 1]; None: x itself
    render: Callable[[Tree], Array] | None = None
    user: np.ndarray | None = None  # [M] int32, whose each example is; None if the source has none
    words: tuple[str, ...] = ()  # V words that x counts from 0 (padding) on; () if x is no text


def check_dataset(dataset: Dataset) -> None:
    """Looks whether the fields of a data set fit each other; x may hold any numbers, NaN as well.

    Raises ValueError if there is no example, a field has not one entry for each label, a label, a
    domain or a word is outside of its names, two names are equal, or one array is to be rendered:
    that is what rendered images are told by.
    """
    for name, names in (("classes", dataset.classes), ("domains", dataset.domains)):
        if not names or len(set(names)) < len(names):
            raise UsageError(f"dataset.{name}={names}: must be different names, at least one")
    checks.integers("dataset.y", dataset.y, 0, len(dataset.classes) - 1)
    checks.integers("dataset.domain", dataset.domain, 0, len(dataset.domains) - 1)
    num_examples = len(dataset.y)
    if dataset.user is not None:
        checks.integers("dataset.user", dataset.user, 0)
    for name, field in (("domain", dataset.domain), ("user", dataset.user)):
        if field is not None and len(field) != num_examples:
            raise UsageError(
                f"dataset.{name}={checks.shown(field)}: must be integers [{num_examples}], one "
                "for each label"
            )
    test = np.asarray(dataset.test)
    if test.dtype != bool or test.shape != (num_examples,):
        raise UsageError(
            f"dataset.test={checks.shown(test)}: must be bool [{num_examples}], one for each label"
        )
    if dataset.words:
        checks.integers("dataset.x", dataset.x, 0, len(dataset.words) - 1, ndim=2)
    if dataset.render is not None and jax.tree_util.all_leaves([dataset.x]):
        raise UsageError("dataset.x: must be a tree of arrays, as there is render; is one array")
    leaves = jax.tree_util.tree_leaves_with_path(dataset.x)
    if not leaves:
        raise UsageError(f"dataset.x={dataset.x}: must hold an array [{num_examples}, ...]")
    for path, leaf in leaves:
        array = leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)
        shape = array.shape
        if shape[:1] != (num_examples,) or 0 in shape or array.dtype.kind not in "biuf":
            raise UsageError(
                f"dataset.x{jax.tree_util.keystr(path)}={array.dtype} {shape}: must be numbers "
                f"[{num_examples}, ...] without an empty axis, one entry for each label"
            )
