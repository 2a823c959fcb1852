"""Metrics of predictions, by name: --metrics.

A metric that is not defined on some examples, such as the AUROC of a single class, is None there.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from scipy import special

from ..errors import flag_error

_BINS = 15  # of the calibration error


class Measure(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """How to read a score; the default is accuracy."""

    name: str = "accuracy"
    higher_is_better: bool = True
    is_share: bool = True  # whether it is a part of 1, shown in percent
    is_worst: bool = False  # whether that of several domains is the lowest, not the mean

    @property
    def percent(self) -> str:
        """The end of a heading after its name."""
        return ", %" if self.is_share else ""

    def heading(self, rest: str = "") -> str:
        """The heading of its values, with what is better. rest: what follows its name."""
        better = "" if self.higher_is_better else ", lower is better"
        return f"{self.name}{rest}{self.percent}{better}"

    @property
    def unit(self) -> str:
        """The end of a heading that does not name it."""
        return self.percent or f", {self.name}"

    @property
    def factor(self) -> int:
        """The number by which values are multiplied to be shown."""
        return 100 if self.is_share else 1

    def over_domains(self, values: Sequence[float]) -> float:
        """The score of several domains from that of each."""
        return float(np.min(values) if self.is_worst else np.mean(values))

    def rank(self, value: float) -> float:
        """A number that is higher, the better the value is."""
        return value if self.higher_is_better else -value


ACCURACY = Measure()


class Predictions(NamedTuple):
    """A network's outputs for M examples, M above 0, and their targets."""

    kind: str  # of the targets: classes, labels or values
    y: np.ndarray  # [M] or [M, K], as `Dataset.y`
    outputs: np.ndarray  # [M, K]

    @property
    def probabilities(self) -> np.ndarray:
        """[M, K] of classes or labels, in float64."""
        outputs = self.outputs.astype(np.float64)
        of_classes = self.kind == "classes"
        return np.asarray(special.softmax(outputs, 1) if of_classes else special.expit(outputs))

    def log_odds(self, k: int) -> np.ndarray:
        """[M], of class or label k: they rank examples whose probabilities round to 1."""
        outputs = self.outputs.astype(np.float64)
        if self.kind == "labels":
            return outputs[:, k]
        return np.asarray(outputs[:, k] - special.logsumexp(np.delete(outputs, k, axis=1), axis=1))

    @property
    def predicted(self) -> np.ndarray:
        """The most likely class [M], labels [M, K] or values [M, K]."""
        if self.kind == "classes":
            return np.asarray(self.outputs.argmax(1))
        return self.outputs > 0 if self.kind == "labels" else self.outputs

    @property
    def truth(self) -> np.ndarray:
        """[M, K]: whether a class or a label is true, or the values."""
        if self.kind == "classes":
            return np.asarray(np.arange(self.outputs.shape[1]) == self.y[:, None])
        return self.y.reshape(self.outputs.shape)


class Metric(NamedTuple):
    """A metric of predictions."""

    kinds: tuple[str, ...]  # of targets, that it fits
    of: Callable[[Predictions], float | None]


def _sklearn() -> Any:
    from sklearn import metrics  # takes a second

    return metrics


def _f1(of: Predictions) -> float | None:
    """The mean over the classes or labels that are true or predicted for some examples."""
    scores = _sklearn().f1_score
    if of.kind == "classes":
        return float(scores(of.y, of.predicted, average="macro"))
    pairs = zip(of.truth.T, of.predicted.T, strict=True)
    values = [scores(*pair) for pair in pairs if np.any(pair)]
    return float(np.mean(values)) if values else None


def _over_columns(name: str, of: Predictions) -> float | None:
    """The mean of a score over the classes or labels that are true for some examples, not for all.

    name: of a function of scikit-learn of (whether it is true [M], a number that ranks it [M]).
    """
    truth = of.truth
    known = np.logical_and(truth.any(0), ~truth.all(0))
    if of.kind == "classes" and len(known) == 2:
        known[0] = False  # the second of two classes is the positive one
    score = getattr(_sklearn(), name)
    values = [score(truth[:, k], of.log_odds(k)) for k in np.flatnonzero(known).tolist()]
    return float(np.mean(values)) if values else None


def _calibration_error(of: Predictions) -> float:
    """The expected calibration error (Guo et al. 2017, Eq. 3)."""
    confidence = of.probabilities.max(1)
    right = of.predicted == of.y
    if of.kind == "labels":
        confidence = np.maximum(of.probabilities, 1 - of.probabilities).ravel()
        right = (of.predicted == of.truth).ravel()
    place = np.clip(np.ceil(confidence * _BINS).astype(int) - 1, 0, _BINS - 1)
    return float(abs(np.bincount(place, right - confidence, _BINS)).sum() / len(confidence))


def _brier(of: Predictions) -> float:
    squares = (of.probabilities - of.truth) ** 2
    return float((squares.sum(1) if of.kind == "classes" else squares.mean(1)).mean())


def _r2(of: Predictions) -> float | None:
    varies = np.ptp(of.truth, axis=0) > 0
    if not varies.any():
        return None
    return float(_sklearn().r2_score(of.truth[:, varies], of.outputs[:, varies]))


_PREDICTED = ("classes", "labels")
_VALUES = ("values",)
# By the names of --metrics, whose help explains them.
METRICS = {
    "balanced_accuracy": Metric(
        ("classes",),
        lambda of: _sklearn().recall_score(
            of.y, of.predicted, labels=np.unique(of.y), average="macro"
        ),
    ),
    "f1": Metric(_PREDICTED, _f1),
    "auroc": Metric(_PREDICTED, lambda of: _over_columns("roc_auc_score", of)),
    "average_precision": Metric(
        _PREDICTED, lambda of: _over_columns("average_precision_score", of)
    ),
    "calibration_error": Metric(_PREDICTED, _calibration_error),
    "brier": Metric(_PREDICTED, _brier),
    "mae": Metric(_VALUES, lambda of: _sklearn().mean_absolute_error(of.truth, of.outputs)),
    "rmse": Metric(_VALUES, lambda of: _sklearn().mean_squared_error(of.truth, of.outputs) ** 0.5),
    "r2": Metric(_VALUES, _r2),
}

LOWER_IS_BETTER = ("calibration_error", "brier", "mae", "rmse")


def check(chosen: Collection[str], kind: str) -> None:
    """Raises UsageError for a metric of other targets. kind: of the data's targets."""
    for name in chosen:
        kinds = METRICS[name].kinds
        if kind not in kinds:
            fits = ", ".join(other for other, each in METRICS.items() if kind in each.kinds)
            text = f"is for {' and '.join(kinds)}, the data have {kind}; must be of {fits}"
            raise flag_error("metrics", name, text)


def values(chosen: Collection[str], of: Predictions) -> dict[str, float | None]:
    """The metrics by name, computed in float64; None where one is not defined.

    None is defined for outputs that are not finite, or of which a target has several.
    """
    is_wide = of.kind != "classes" and of.outputs.size != of.y.size
    if is_wide or not np.isfinite(of.outputs).all():
        return dict.fromkeys(chosen)
    y = of.y.astype(np.float64) if of.kind == "values" else of.y
    of = of._replace(y=y, outputs=of.outputs.astype(np.float64))
    found = {name: METRICS[name].of(of) for name in chosen}
    return {name: None if value is None else float(value) for name, value in found.items()}
