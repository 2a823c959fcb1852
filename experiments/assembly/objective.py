"""From values to what runs are scored by: the loss, the score, and when they are evaluated.

Functions raise UsageError for values that do not fit.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fedjax_inv import objectives
from fedjax_inv.data import federation
from fedjax_inv.data.federation import Split
from fedjax_inv.objectives import Score
from fedjax_inv.plan import Evaluations
from fedjax_inv.types import Loss

from ..config import Evaluation
from ..errors import flag_error
from . import factories, metrics
from .factories import is_outside
from .metrics import ACCURACY, Measure

# Loss -> the kinds of targets that it fits; the first loss of a kind is its default.
LOSSES = {
    "cross_entropy": ("classes",),
    "binary_cross_entropy": ("labels",),
    "squared_error": ("values",),
    "focal": ("classes", "labels"),
    "huber": ("values",),
}


@dataclass(frozen=True, eq=False)
class Objective:
    """The kind of the data's targets, and the loss and the score for it."""

    kind: str  # classes, labels or values
    loss: Loss  # of evaluations, and of algorithms that take a loss
    # the same against means of targets [B, K]; None: there is none
    loss_of_means: Loss | None
    is_default: bool  # whether algorithms keep the loss that they have by default
    score: Score
    num_domains: int  # of the data, for algorithms that need it

    @property
    def measure(self) -> Measure:
        """How to read the score."""
        score = self.score
        found = Measure(score.name, score.higher_is_better, score.is_share, score.is_worst)
        return ACCURACY if found == ACCURACY else found


def _score(name: str, kind: str) -> Score:
    if name == "auto":
        return objectives.DEFAULTS[kind][1]
    known = dict(objectives.SCORES)
    if is_outside(name):
        found = factories.imported("score", name)
        if not isinstance(found, Score) and not callable(found):
            raise flag_error("score", name, "must be a function or a Score")
        known[name] = found if isinstance(found, Score) else Score(name.partition(":")[2], found)
    _check_kind("score", name, {named: kind_of.tasks for named, kind_of in known.items()}, kind)
    return known[name]


def _check_kind(flag: str, name: str, kinds: Mapping[str, Sequence[str]], kind: str) -> None:
    """Checks that a loss or a score fits targets of a kind. kinds: those that each one fits."""
    if kind not in kinds[name]:
        fits = ", ".join(named for named, fitting in kinds.items() if kind in fitting)
        raise flag_error(flag, name, f"does not fit {kind}, which the data have; must be of {fits}")


def make(loss_name: str, score: str, kind: str, num_domains: int = 1) -> Objective:
    """The loss and the score by their names, for data with this kind of targets."""
    loss = objectives.DEFAULTS[kind][0]
    name = loss_name
    if name == "auto":
        name = next(known for known, kinds in LOSSES.items() if kind in kinds)
    elif not is_outside(name):
        _check_kind("loss", name, LOSSES, kind)
    if is_outside(name):
        loss = factories.imported("loss", name)
    elif name in ("focal", "huber"):
        loss = objectives.focal(2) if name == "focal" else objectives.huber(1)
    of_means = loss if kind != "classes" else None
    if name == "cross_entropy":
        of_means = objectives.soft_cross_entropy
    is_default = loss_name == "auto" and kind == "classes"
    return Objective(kind, loss, of_means, is_default, _score(score, kind), num_domains)


def evaluations(
    watched: Evaluation, batch_size: int, score: Score, *, by_client: bool
) -> Evaluations:
    """When runs are evaluated and what stops them, as `fit` takes it."""
    return Evaluations(
        watched.eval_every,
        watched.eval_start,
        score,
        nonfinite=watched.nonfinite,
        by_class=watched.watch_classes,
        by_client=by_client,
        watched=watched.watch_examples,
        warm_start=lambda sizes: warm_start(watched, batch_size, sizes),
        thresholds=watched.thresholds,
        stop_above=bool(watched.stop_above),
        end_at_stop=watched.after_stop == "end" and bool(watched.thresholds),
        unseen_norms=watched.unseen_norms,
    )


def warm_start(watched: Evaluation, batch_size: int, sizes: np.ndarray) -> int:
    """The number of rounds before a stop.

    batch_size: 0 if a batch has all of a client's examples.
    sizes: [C] the training clients' numbers of examples.
    """
    if watched.stop_above:
        return 0
    if watched.warm_start == "clients":
        return len(sizes)
    if watched.warm_start == "batches":
        largest = int(sizes.max())
        return -(-largest // (batch_size or largest))
    return int(watched.warm_start)


def check(
    watched: Evaluation,
    objective: Objective,
    num_groups: int,
    splits: Sequence[Split],
    *,
    compares_settings: bool,
) -> None:
    """Checks flags of evaluations against targets, score and examples.

    num_groups: of validation, a domain or several. compares_settings: whether a rule selects
        hyperparameters, too.
    """
    metrics.check(watched.metrics, objective.kind)
    if watched.watch_classes and objective.kind != "classes":
        text = f"needs data with classes, these have {objective.kind}"
        raise flag_error("watch_classes", True, text)
    are_unseen = all("unseen_domain" in split.unseen for split in splits)
    if watched.select == "unseen_domain" and not are_unseen:
        text = "needs the domain, --validate=DOMAIN or =next"
        raise flag_error("select", watched.select, text)
    by_validation = _BY_VALIDATION | ({"last"} if compares_settings else set())
    are_validated = all(np.asarray(split.valid.size).any() for split in splits)
    if watched.select in by_validation and not are_validated:
        text = "needs validation examples: --validation above 0 and several examples, or groups, "
        text += "of a client"
        text += "; --select=unseen_domain has some" if are_unseen else ""
        text += "" if compares_settings else "; --select=last looks at none"
        raise flag_error("select", watched.select, text)
    if watched.compares_domains:
        if objective.measure != ACCURACY:
            text = f"compares accuracies of classes, the score is the {objective.score.name}"
            raise flag_error("select", watched.select, text)
        if num_groups < 2:
            text = "needs several training domains, each with clients of its own"
            raise flag_error("select", watched.select, text)
    for threshold in watched.thresholds if objective.score.is_share else ():
        if not 0 < threshold < 1:
            name = "stop_below" if watched.stop_below else "stop_above"
            raise flag_error(name, threshold, "must be above 0 and below 1")


# The rules of selection that look at validation examples in every case.
_BY_VALIDATION = {"validation", "agreement", "last_if_agreed"}


def check_classes(classes: Sequence[str], y: np.ndarray, splits: Iterable[Split]) -> None:
    """Checks for --watch_classes that the test has each class that a client has.

    classes: the names of the classes. y: the labels of the examples that the splits index.
    """
    for split in splits:
        of_clients, of_test = (
            np.unique(y[np.concatenate(federation.parts_of(shards))])
            for shards in (split.train, split.test)
        )
        lacking = np.setdiff1d(of_clients, of_test)
        if len(lacking):
            text = f"the test has no example of class {classes[lacking[0]]}, which clients have"
            raise flag_error("watch_classes", True, text)
