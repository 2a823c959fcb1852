"""The evaluations of a run, the thresholds at which it stops, and its rule of selection."""

from collections.abc import Iterable, Sequence

import numpy as np

from fedjax_inv.checks import UsageError
from fedjax_inv.data import federation
from fedjax_inv.data.federation import Split
from fedjax_inv.objectives import Score
from fedjax_inv.plan import Evaluations

from .. import metrics
from ..config import Config
from ..errors import flag_error
from ..parts.objective import ACCURACY, Task
from ..selection import RULES


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
