"""The shift and scale of a network's inputs, from sums over the clients' training examples."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from fedjax_inv.data.dataset import Dataset
from fedjax_inv.data.federation import Split, parts_of
from fedjax_inv.data.moments import Moments, joined, moments
from fedjax_inv.models import Scaling
from fedjax_inv.types import Tree

_BLOCK = 1024  # examples that are rendered at once
_LEAST = 1e-35  # deviations below it count as 0, as their inverse does not fit into float32
_APART = 100  # scales that differ by a larger factor are worth a warning


def of_clients(dataset: Dataset, x: Tree, split: Split) -> Moments:
    """The sums of the training examples of all clients.

    x: the inputs on the host, to whose rows the split refers. Validation and test do not enter.
    """
    view = _view(dataset)
    return joined(
        joined(moments(block) for block in _blocks(view, x, rows))
        for rows in parts_of(split.train)
        if len(rows)
    )


def _view(dataset: Dataset) -> Callable[[Tree], np.ndarray]:
    """A function from inputs to what a network without statistics sees."""
    render = jax.jit(dataset.render) if dataset.render else lambda x: x

    def view(x: Tree) -> np.ndarray:
        seen = np.asarray(render(x))
        return seen.astype(np.float32) / 255 if seen.dtype == np.uint8 else seen

    return view


def _blocks(view: Callable[[Tree], np.ndarray], x: Tree, rows: np.ndarray) -> Iterator[np.ndarray]:
    """The inputs in some rows as a network sees them, block by block."""
    for first in range(0, len(rows), _BLOCK):
        some = rows[first : first + _BLOCK]
        filled = np.resize(some, _BLOCK)  # of one shape, for which rendering is compiled once
        yield view(jax.tree.map(lambda leaf, at=filled: leaf[at], x))[: len(some)]


def of_moments(dataset: Dataset, found: Moments, standardise: bool) -> Scaling:
    """The shift and scale of each feature.

    Categories stay 0 and 1, but those that do not occur become 0. Constant features stay as they
    are, and all others unless `standardise`.
    """
    deviation = np.where(found.deviation > _LEAST, found.deviation, 0)
    changes = (deviation > 0) & ~_is_category(dataset, len(deviation)) & standardise
    shift = np.where(changes, found.mean, 0)
    scale = np.where(changes, 1 / np.where(deviation > 0, deviation, 1), 1)
    scale[_is_category(dataset, len(deviation)) & (found.mean == 0)] = 0
    return Scaling(shift.astype(np.float32), scale.astype(np.float32))


def _is_category(dataset: Dataset, num_features: int) -> np.ndarray:
    """Whether each feature is a category, [D] bool."""
    if not dataset.columns:
        return np.zeros(num_features, bool)
    return np.concatenate(
        [np.full(len(each.features), each.categories is not None) for each in dataset.columns]
    )


def record(dataset: Dataset, scaling: Scaling) -> dict[str, Any]:
    """The shift and scale of a run as values of JSON, and the categories that are left out."""
    names = feature_names(dataset, len(scaling.scale))
    return {
        "shift": scaling.shift.tolist(),
        "scale": scaling.scale.tolist(),
        "left_out": [name for name, scale in zip(names, scaling.scale, strict=True) if not scale],
    }


def feature_names(dataset: Dataset, num_features: int) -> list[str]:
    """The names of the features; their numbers for data that are no table."""
    return list(dataset.features) or [*map(str, range(num_features))]


def warning(dataset: Dataset, found: Moments) -> str:
    """A line about features whose deviations differ by more than a factor of 100, or ""."""
    changes = (found.deviation > 0) & ~_is_category(dataset, len(found.mean))
    if changes.sum() < 2:
        return ""
    deviation = np.where(changes, found.deviation, np.nan)
    low, high = int(np.nanargmin(deviation)), int(np.nanargmax(deviation))
    factor = deviation[high] / deviation[low]
    if factor <= _APART:
        return ""
    names = feature_names(dataset, len(deviation))
    few = f"{names[low]} by {deviation[low]:.3g}, {names[high]} by {deviation[high]:.3g}"
    text = f"its features differ in scale by a factor of {factor:.2g} ({few})"
    return f"{text}; --standardise gives all of them the deviation 1"
