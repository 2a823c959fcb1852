"""The shift and scale of a network's inputs, from the clients' training examples."""

from typing import Any

import jax
import numpy as np

from fedjax_inv.data.dataset import Dataset
from fedjax_inv.data.federation import Split, parts_of
from fedjax_inv.models import Scaling
from fedjax_inv.types import Tree

_BLOCK = 1024  # examples that are rendered at once
_APART = 100  # scales that differ by a larger factor are worth a warning


def of_clients(dataset: Dataset, x: Tree, split: Split) -> Any:
    """A StandardScaler of scikit-learn that has seen the training examples of all clients.

    x: the inputs on the host, to whose rows the split refers. Validation and test do not enter.
    """
    from sklearn.preprocessing import StandardScaler  # a second

    render = jax.jit(dataset.render) if dataset.render else lambda x: x
    scaler = StandardScaler()
    for rows in parts_of(split.train):
        for first in range(0, len(rows), _BLOCK):
            some = rows[first : first + _BLOCK]
            filled = np.resize(some, _BLOCK)  # of one shape, for which rendering is compiled once
            seen = np.asarray(render(jax.tree.map(lambda leaf, at=filled: leaf[at], x)))[
                : len(some)
            ]
            seen = seen.astype(np.float32) / 255 if seen.dtype == np.uint8 else seen
            scaler.partial_fit(seen.reshape(-1, seen.shape[-1]).astype(np.float64))
    return scaler


def of_scaler(dataset: Dataset, scaler: Any, standardise: bool) -> Scaling:
    """The shift and scale of each feature, from what `of_clients` returns.

    With `standardise` features get the mean 0 and the deviation 1; constant ones become 0.
    Categories stay 0 and 1, but those that do not occur become 0.
    """
    is_category = _is_category(dataset, len(scaler.mean_))
    changes = ~is_category & standardise
    shift = np.where(changes, scaler.mean_, 0)
    scale = np.where(changes, 1 / scaler.scale_, 1)
    scale[is_category & (scaler.mean_ == 0)] = 0
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


def warning(dataset: Dataset, scaler: Any) -> str:
    """A line about features whose deviations differ by more than a factor of 100, or ""."""
    is_constant = scaler.scale_ != np.sqrt(scaler.var_)  # then the scale is 1
    ignored = is_constant | _is_category(dataset, len(is_constant))
    if (~ignored).sum() < 2:
        return ""
    deviation = np.where(ignored, np.nan, scaler.scale_)
    low, high = int(np.nanargmin(deviation)), int(np.nanargmax(deviation))
    factor = deviation[high] / deviation[low]
    if factor <= _APART:
        return ""
    names = feature_names(dataset, len(deviation))
    few = f"{names[low]} by {deviation[low]:.3g}, {names[high]} by {deviation[high]:.3g}"
    text = f"its features differ in scale by a factor of {factor:.2g} ({few})"
    return f"{text}; --standardise gives all of them the deviation 1"
