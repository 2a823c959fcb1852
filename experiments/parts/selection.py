"""Rules that select an evaluation of a run, and the hyperparameters of several runs.

A rule picks an evaluation of each run, and scores it to compare hyperparameters. Among equally good
evaluations it picks the last. Only `oracle` looks at the test. Round 0, the initial network of a
run, is evaluated but never picked.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ..parts.objective import ACCURACY, Measure

# An evaluation of a run: a `running.records.Line`.
Line = Any
# The evaluation that is picked from one or more of a run; None: none.
Pick = Callable[[Sequence[Line]], Line | None]


class Rule(NamedTuple):
    """A rule of selection."""

    text: str  # names the evaluation that it picks
    pick: Pick  # from one or more `candidates` of a run
    # its mean over seeds compares hyperparameters; higher is better
    score: Callable[[Line], float]
    compares_domains: bool = False  # accuracies of classes, so it needs several training domains


def trained(lines: Sequence[Line]) -> list[Line]:
    """All evaluations except that of round 0."""
    return [line for line in lines if line["round"] > 0]


def candidates(lines: Sequence[Line]) -> list[Line]:
    """The evaluations that a rule may pick: after round 0, and before the run diverged."""
    return [line for line in trained(lines) if not line["diverged"]]


def differ_by_chance(domains: Sequence[Any]) -> bool:
    """Whether the domains' accuracies differ no more than by chance.

    The criterion: the statistic of the chi-square test of homogeneity is at most its expectation,
    the number of domains minus one.
    """
    scores = [(domain["score"], domain["examples"]) for domain in domains if domain["examples"]]
    total = sum(count for _, count in scores)
    if len(scores) < 2:
        return False
    common = sum(accuracy * count for accuracy, count in scores) / total
    squares = sum(count * (accuracy - common) ** 2 for accuracy, count in scores)
    return squares <= (len(scores) - 1) * common * (1 - common)


def _best(score: Callable[[Line], float]) -> Callable[[Sequence[Line]], Line]:
    """A function that picks the evaluation with the highest score; among equal ones the last.

    A score of NaN is the lowest.
    """

    def key(line: Line) -> float:
        return -math.inf if math.isnan(score(line)) else score(line)

    return lambda lines: max(reversed(lines), key=key)


def agrees(line: Line) -> bool:
    """Whether the training domains of an evaluation differ no more than by chance."""
    return differ_by_chance(
        [each for each in line["domains"].values() if each["split"] == "validation"]
    )


def after_difference(lines: Sequence[Line]) -> Sequence[Line]:
    """The evaluations from the first on at which the training domains differ by more than chance.

    Before, the network is untrained, and equally bad in all domains.
    """
    first = next((index for index, line in enumerate(lines) if not agrees(line)), len(lines))
    return lines[first:]


def _agreeing(lines: Sequence[Line]) -> Line | None:
    """The first evaluation at which the domains agree after a difference; None if there is none.

    It is the first and not the best, because luck or a cue may have raised the best accuracy.
    """
    return next(filter(agrees, after_difference(lines)), None)


def _last_if_agreed(lines: Sequence[Line]) -> Line | None:
    """The last evaluation if the domains agree at any after a difference; None otherwise.

    Agreement says that the method acts. Where it does, more rounds weaken a cue further.
    """
    return None if _agreeing(lines) is None else lines[-1]


def rules(measure: Measure) -> dict[str, Rule]:
    """All rules, for evaluations with this score."""

    def validation(line: Line) -> float:
        return measure.rank(line["validation_score"])

    def test(line: Line) -> float:
        return measure.rank(line["test_score"])

    def accuracies(pick: Pick) -> Pick:
        return pick if measure == ACCURACY else lambda lines: None

    return {
        "validation": Rule(
            "the best validation score on the training domains", _best(validation), validation
        ),
        "agreement": Rule(
            "the first evaluation at which the training domains, which had differed, differ no "
            "more than by chance",
            accuracies(_agreeing),
            validation,
            compares_domains=True,
        ),
        "last_if_agreed": Rule(
            "the last evaluation, if there is one that agreement picks",
            accuracies(_last_if_agreed),
            validation,
            compares_domains=True,
        ),
        "last": Rule("the last evaluation", lambda lines: lines[-1], validation),
        "oracle": Rule("the best test score, for comparison only", _best(test), test),
    }


RULES = rules(ACCURACY)


def picked(run: Any, rule: str) -> Line | None:
    """The evaluation in the result of a run that a rule picked; None if it picked none."""
    return run["by_rule"].get(rule)


def picked_or_last(run: Any, rule: str) -> Line:
    """The evaluation in the result of a run that a rule picked, or else the last one."""
    line = picked(run, rule)
    return run["last"] if line is None else line
