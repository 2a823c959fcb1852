"""How an evaluation of a run is selected, and the hyperparameters of several runs.

Each rule picks an evaluation of each run, and scores it to compare hyperparameters. Of evaluations
that are equally good the later one is picked. Only `oracle` looks at the test. What a run starts
from is evaluated, as round 0, but it is never picked: `trained`.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

# An evaluation of a run: a `running.records.Line`, or a plain dict of the same entries.
Line = Any


class Rule(NamedTuple):
    """A way to select."""

    text: str  # what it takes
    pick: Callable[[Sequence[Line]], Line | None]  # of a run's `candidates`, at least one
    score: Callable[[Line], float]  # by which hyperparameters are compared, over seeds


def trained(lines: Sequence[Line]) -> list[Line]:
    """The evaluations after some rounds: all but that of round 0."""
    return [line for line in lines if line["round"] > 0]


def candidates(lines: Sequence[Line]) -> list[Line]:
    """Those that a rule may pick of a run: after some rounds, and before it diverged."""
    return [line for line in trained(lines) if not line["diverged"]]


def differ_by_chance(domains: Sequence[Any]) -> bool:
    """Whether accuracies, each on so many examples, differ no more than one accuracy's would.

    The statistic of the chi-square test of homogeneity is at most its expectation, one less than
    there are domains.
    """
    told = [(domain["accuracy"], domain["examples"]) for domain in domains if domain["examples"]]
    total = sum(count for _, count in told)
    if len(told) < 2:
        return False
    common = sum(accuracy * count for accuracy, count in told) / total
    squares = sum(count * (accuracy - common) ** 2 for accuracy, count in told)
    return squares <= (len(told) - 1) * common * (1 - common)


def _validation(line: Line) -> float:
    return line["validation_accuracy"]


def _test(line: Line) -> float:
    return line["test_accuracy"]


def _best(score: Callable[[Line], float]) -> Callable[[Sequence[Line]], Line]:
    """Picks the highest score, of equal ones the last."""
    return lambda lines: max(reversed(lines), key=score)


def _agreeing(lines: Sequence[Line]) -> Line | None:
    """Not the best of them: among several, that is the one that luck, or a cue, has lifted most."""
    have_differed = False
    for line in lines:
        domains = [each for each in line["domains"].values() if each["split"] == "validation"]
        if not differ_by_chance(domains):
            have_differed = True
        elif have_differed:  # unlike an untrained network, which serves all equally badly
            return line
    return None


RULES = {
    "validation": Rule(
        "the best validation accuracy on the training domains",
        _best(_validation),
        _validation,
    ),
    "agreement": Rule(
        "the first evaluation at which the training domains, which had differed, differ no more "
        "than by chance",
        _agreeing,
        _validation,
    ),
    "last": Rule("the last evaluation", lambda lines: lines[-1], _validation),
    "oracle": Rule("the best test accuracy, for comparison only", _best(_test), _test),
}


def picked(run: Line, rule: str) -> Line | None:
    """The evaluation that a rule has picked in the result of a run; None if it picked none."""
    return run["by_rule"].get(rule)
