"""The shift and scale of a network's inputs, from the clients' training examples."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from fedjax_inv.data import federation
from fedjax_inv.data.dataset import Dataset
from fedjax_inv.data.federation import Split, parts_of
from fedjax_inv.inputs import Run
from fedjax_inv.models import Scaling
from fedjax_inv.types import Tree

_BLOCK = 1024  # examples that are rendered at once
_APART = 100  # scales that differ by a larger factor are worth a warning


class Scalers:
    """The shifts and scales of the inputs of runs, by held-out domain, seed and domain left out."""

    def __init__(
        self,
        dataset: Dataset,
        x: Tree,
        splits: Mapping[str | None, Mapping[int, Split]],
        standardise: bool,
    ) -> None:
        """x: the inputs, to whose rows the splits refer."""
        self._dataset = dataset
        self._x = x
        self._splits = splits
        self._standardise = standardise
        self._made: dict[tuple[str | None, int, str], Any] = {}

    def of_runs(
        self, held_out: str | None, runs: Sequence[Run]
    ) -> Mapping[tuple[int, str], Scaling]:
        """The shift and scale of each seed and domain left out."""
        keys = dict.fromkeys((run.seed, run.left_out) for run in runs)
        return {key: self.scaling(held_out, *key) for key in keys}

    def record(self, held_out: str | None) -> dict[str, Any]:
        """The shift and scale of each seed as values of JSON, with the names of the features."""
        of_seed = {seed: self.scaling(held_out, seed) for seed in self._splits[held_out]}
        count = len(next(iter(of_seed.values())).scale)
        by_seed = {str(seed): record(self._dataset, one) for seed, one in of_seed.items()}
        return {"features": feature_names(self._dataset, count), "seeds": by_seed}

    def warning(self) -> str:
        """A line about features of very different scales; "" with --standardise or no vectors."""
        dataset = self._dataset
        is_vector = dataset.render is None and not dataset.words and np.ndim(dataset.x) == 2
        if self._standardise or not is_vector:
            return ""
        held_out, of_seed = next(iter(self._splits.items()))
        return warning(dataset, self._scaler(held_out, next(iter(of_seed))))

    def scaling(self, held_out: str | None, seed: int, left_out: str = "") -> Scaling:
        """The shift and scale of a run."""
        scaler = self._scaler(held_out, seed, left_out)
        return of_scaler(self._dataset, scaler, self._standardise)

    def _scaler(self, held_out: str | None, seed: int, left_out: str = "") -> Any:
        """The scaler that has seen the training examples of a run."""
        key = held_out, seed, left_out
        if key not in self._made:
            split = federation.without(self._splits[held_out][seed], left_out)
            x = jax.tree.map(np.asarray, self._x)
            self._made[key] = of_clients(self._dataset, x, split)
        return self._made[key]


def of_clients(dataset: Dataset, x: Tree, split: Split) -> Any:
    """A StandardScaler of scikit-learn that has seen the training examples of all clients.

    x: the inputs on the host, to whose rows the split refers. Validation and test do not enter.
    """
    from sklearn.preprocessing import StandardScaler  # a second

    render: Callable[[Tree], Any] = jax.jit(dataset.render) if dataset.render else lambda x: x
    scaler = StandardScaler()
    for rows in parts_of(split.train):
        for first in range(0, len(rows), _BLOCK):
            some = rows[first : first + _BLOCK]
            filled = np.resize(some, _BLOCK)  # of one shape, for which rendering is compiled once
            inputs = jax.tree.map(lambda leaf, at=filled: leaf[at], x)
            seen = np.asarray(render(inputs))[: len(some)]
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
    low = int(np.nanargmin(deviation))
    high = int(np.nanargmax(deviation))
    factor = deviation[high] / deviation[low]
    if factor <= _APART:
        return ""
    names = feature_names(dataset, len(deviation))
    few = f"{names[low]} by {deviation[low]:.3g}, {names[high]} by {deviation[high]:.3g}"
    text = f"its features differ in scale by a factor of {factor:.2g} ({few})"
    return f"{text}; --standardise gives all of them the deviation 1"
