"""The evaluations of a run, the thresholds at which it stops, and its rule of selection."""

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from fedjax_inv.checks import UsageError
from fedjax_inv.data import federation
from fedjax_inv.data.federation import Split
from fedjax_inv.objectives import Score
from fedjax_inv.plan import Evaluations

from ..flags.configuration import Config
from ..flags.flag import (
    FINITE,
    Range,
    at_least,
    check_different,
    flag,
    flag_error,
    number_or,
    shown,
)
from ..parts import metrics
from ..parts.objective import ACCURACY, Task
from ..selection import RULES

_REAL = Range(lambda value: abs(value) <= 1e38, "a number, at most 1e38 in size")


@dataclasses.dataclass(frozen=True)
class Watching:
    """When a run is evaluated, and when it stops."""

    eval_every: int = flag(
        5,
        "Rounds between evaluations. If you leave it out, it is lowered to fit --rounds and "
        "--checkpoint_every: at most --rounds, and a divisor of --checkpoint_every.",
        at_least(1),
    )
    eval_start: bool = flag(
        True, "Whether the untrained network is evaluated, too, as round 0 of the log."
    )
    watch_examples: int = flag(
        0,
        "Training (of all clients) and test examples on which the score is measured in every "
        "round; 0: in no round.",
        at_least(0),
    )
    watch_classes: bool = flag(
        False,
        "Whether evaluations report the test score of each class, that of test examples in the "
        "proportions of each client's classes, and the means of both.",
    )
    stop_below: tuple[float, ...] = flag(
        (),
        "Thresholds: report the state in which the watched training score first fell below one of "
        "these numbers (of an accuracy: between 0 and 1).",
        _REAL,
        kind=float,
    )
    stop_above: tuple[float, ...] = flag(
        (),
        "Thresholds: report the state in which that score first reached one of these numbers (of "
        "an accuracy: between 0 and 1); instead of --stop_below, and without --warm_start.",
        _REAL,
        kind=float,
    )
    stop_within: float = flag(
        0.0,
        "How far beyond its threshold that score may lie at a stop; 0: at any distance. Ours, for "
        "games, whose accuracy may fall by 40 points in one round.",
        FINITE,
    )
    stop_centred: bool = flag(
        False,
        "Whether the watched scores and those of stops are of centred outputs: minus their mean "
        "over the watched training examples, so that classes are predicted about equally often. "
        "For classes of about equal frequency; the stored networks stay as they are.",
    )
    warm_start: str = flag(
        "clients",
        "Rounds before a stop: a number, clients (one for each) or batches (one for each batch of "
        "the client with most examples).",
        number_or("clients", "batches"),
    )
    after_stop: str = flag(
        "continue",
        "Whether training goes on when all of --stop_below (or --stop_above) have been met, or "
        "ends with that state.",
        choices=("continue", "end"),
    )
    tensorboard: bool = flag(
        False,
        "Whether evaluations are also written as TensorBoard events, to tensorboard/ in the folder "
        "of a run; needs the package tensorboardX.",
    )
    metrics: tuple[str, ...] = metrics.metrics_flag("the selected states' predictions")
    select: str = flag(
        "validation",
        "How an evaluation of each run is selected, and then hyperparameters by the mean over "
        "seeds: " + "; ".join(f"{name}, {rule.text}" for name, rule in RULES.items()) + ".",
        choices=RULES,
    )


def following(chosen: Config) -> int:
    """The largest --eval_every, up to its own, that fits the other flags."""
    largest = min(chosen.eval_every, chosen.rounds)
    return next(n for n in range(largest, 0, -1) if chosen.checkpoint_every % n == 0)


def check(chosen: Config) -> None:
    """Raises UsageError for flags that contradict each other."""
    for name, thresholds in (
        ("stop_below", chosen.stop_below),
        ("stop_above", chosen.stop_above),
    ):
        check_different(name, thresholds, may_be_empty=True)
        if thresholds and not chosen.watch_examples:
            raise flag_error(name, thresholds, "needs --watch_examples above 0")
    if chosen.stop_below and chosen.stop_above:
        text = f"must not stand beside --stop_below={shown(chosen.stop_below)}"
        raise flag_error("stop_above", chosen.stop_above, text)
    if chosen.eval_every > chosen.rounds:
        text = f"must be at most --rounds={chosen.rounds}"
        raise flag_error("eval_every", chosen.eval_every, text)


def check_task(chosen: Config, task: Task) -> None:
    """Raises UsageError for flags that do not fit the targets or the score."""
    metrics.check(chosen.metrics, task.kind)
    if chosen.watch_classes and task.kind != "classes":
        raise flag_error("watch_classes", True, f"needs data with classes, these have {task.kind}")
    if chosen.stop_centred and task.kind != "classes":
        raise flag_error("stop_centred", True, f"needs data with classes, these have {task.kind}")
    if RULES[chosen.select].compares_domains and task.measure != ACCURACY:
        text = f"compares accuracies of classes, the score is the {task.score.name}"
        raise flag_error("select", chosen.select, text)
    if not task.score.is_share:
        return
    for name, thresholds in (("stop_below", chosen.stop_below), ("stop_above", chosen.stop_above)):
        for threshold in thresholds:
            if not 0 < threshold < 1:
                raise flag_error(name, threshold, "must be above 0 and below 1")


def check_rule(chosen: Config, num_groups: int) -> None:
    """Raises UsageError if --select compares training domains and there is only one.

    num_groups: the number of validation groups.
    """
    if RULES[chosen.select].compares_domains and num_groups < 2:
        raise UsageError(
            f"--select={chosen.select}",
            ...,
            "needs several training domains, each with clients of its own",
        )


def check_classes(classes: Sequence[str], y: np.ndarray, splits: Iterable[Split]) -> None:
    """Raises UsageError for --watch_classes if a client has a class that the test lacks.

    classes: the names of the classes. y: the labels of the examples that the splits index.
    """
    for split in splits:
        of_clients, of_test = (
            np.unique(y[np.concatenate(federation.parts_of(shards))])
            for shards in (split.train, split.test)
        )
        lacking = np.setdiff1d(of_clients, of_test)
        if len(lacking):
            raise flag_error(
                "watch_classes",
                True,
                f"the test has no example of class {classes[lacking[0]]}, must have one of "
                "each class that clients have",
            )


def warm_start(chosen: Config, sizes: np.ndarray) -> int:
    """The number of rounds before a stop. sizes [C]: the training clients' numbers of examples."""
    if chosen.stop_above:
        return 0
    if chosen.warm_start == "clients":
        return len(sizes)
    if chosen.warm_start == "batches":
        largest = int(sizes.max())
        return -(-largest // (chosen.batch_size or largest))
    return int(chosen.warm_start)


def evaluations(chosen: Config, score: Score) -> Evaluations:
    """When runs are evaluated and what stops them, as `fit` takes it."""
    return Evaluations(
        chosen.eval_every,
        chosen.eval_start,
        score,
        nonfinite=chosen.nonfinite,
        by_class=chosen.watch_classes,
        watched=chosen.watch_examples,
        warm_start=lambda sizes: warm_start(chosen, sizes),
        thresholds=chosen.thresholds,
        stop_above=bool(chosen.stop_above),
        stop_within=chosen.stop_within or None,
        stop_centred=chosen.stop_centred,
        end_at_stop=chosen.after_stop == "end",
    )
