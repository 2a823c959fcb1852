"""The loss of training, and the score of evaluations."""

from typing import NamedTuple

import msgspec

from fedjax_inv import objectives
from fedjax_inv.checks import UsageError
from fedjax_inv.objectives import Score
from fedjax_inv.types import Loss

from .. import factories
from ..config import Config
from ..errors import flag_error
from ..factories import imported, is_outside

# Loss -> the kinds of targets that it fits; the first loss of a kind is its default.
_LOSSES = {
    "cross_entropy": ("classes",),
    "binary_cross_entropy": ("labels",),
    "squared_error": ("values",),
    "focal": ("classes", "labels"),
    "huber": ("values",),
}


class Measure(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """How to read a score; the default is accuracy."""

    name: str = "accuracy"
    higher_is_better: bool = True
    is_share: bool = True  # whether it is a part of 1, shown in percent

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

    def rank(self, value: float) -> float:
        """A number that is higher, the better the value is."""
        return value if self.higher_is_better else -value


ACCURACY = Measure()


class Task(NamedTuple):
    """The kind of the data's targets, and the loss and the score for it."""

    kind: str  # classes, labels or values
    loss: Loss  # of evaluations, and of algorithms that take a loss
    # the same against means of targets [B, K]; None: there is none
    loss_of_means: Loss | None
    is_default: bool  # whether algorithms keep the loss that they have by default
    score: Score

    @property
    def measure(self) -> Measure:
        """How to read the score."""
        score = self.score
        found = Measure(score.name, score.higher_is_better, score.is_share)
        return ACCURACY if found == ACCURACY else found


def check(chosen: Config) -> None:
    """Raises UsageError for an unknown loss or score."""
    if chosen.loss != "auto":
        factories.check_factory("loss", chosen.loss, ["auto", *_LOSSES])
    if is_outside(chosen.score):
        score_of(chosen.score)
    elif chosen.score != "auto":
        factories.check_factory("score", chosen.score, ["auto", *objectives.SCORES])


def score_of(name: str) -> Score:
    """A listed score, or one outside of this project; raises UsageError for something else."""
    if not is_outside(name):
        return objectives.SCORES[name]
    found = imported("score", name)
    if isinstance(found, Score):
        return found
    if not callable(found):
        raise flag_error("score", name, "must be a function or a Score")
    return Score(name.partition(":")[2], found)


def task(chosen: Config, kind: str) -> Task:
    """The task of data with this kind of targets.

    Raises UsageError for a loss or a score of another kind.
    """
    loss, score = objectives.DEFAULTS[kind]
    if chosen.score != "auto":
        score = score_of(chosen.score)
        if kind not in score.tasks:
            fits = [name for name, each in objectives.SCORES.items() if kind in each.tasks]
            raise _of_others("score", chosen.score, score.tasks, kind, fits)
    name = chosen.loss
    if name == "auto":
        name = next(each for each, kinds in _LOSSES.items() if kind in kinds)
    elif not is_outside(name) and kind not in _LOSSES[name]:
        fits = [each for each, kinds in _LOSSES.items() if kind in kinds]
        raise _of_others("loss", name, _LOSSES[name], kind, fits)
    is_default = chosen.loss == "auto" and kind == "classes"
    of_means: Loss | None = None
    if is_outside(name):
        loss = imported("loss", name)
    elif name == "focal":
        loss = objectives.focal(2)
    elif name == "huber":
        loss = objectives.huber(1)
    elif name == "cross_entropy":
        of_means = objectives.soft_cross_entropy
    if kind != "classes":
        of_means = loss
    return Task(kind, loss, of_means, is_default, score)


def _of_others(
    flag_name: str, name: str, kinds: tuple[str, ...], kind: str, fits: list[str]
) -> UsageError:
    text = f"is for {' and '.join(kinds)}, the data have {kind}; must be one of {', '.join(fits)}"
    return flag_error(flag_name, name, text)
