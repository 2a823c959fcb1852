"""Rules that select an evaluation of a run, and the hyperparameters of several runs.

A rule picks an evaluation of each run, and scores it to compare hyperparameters. Among equally good
evaluations it picks the last. Only `oracle` looks at the test. Round 0, the initial network of a
run, is evaluated but never picked.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from ..assembly.metrics import ACCURACY, Measure
from ..errors import shown
from . import divergence
from .records import Domain, Line, Result, RunResult

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
    return [line for line in lines if line.round > 0]


def candidates(lines: Sequence[Line]) -> list[Line]:
    """The evaluations that a rule may pick: after round 0, and before the run diverged."""
    return [line for line in trained(lines) if not line.diverged]


def score_on(line: Line, kind: str) -> float | None:
    """The score of an evaluation on the examples of one of `data.federation.UNSEEN`, or None."""
    domains = line.domains.values()
    return next((domain.score for domain in domains if domain.split == kind), None)


def is_validated(line: Line) -> bool:
    """Whether an evaluation has validation examples."""
    return any(each.examples for each in line.domains.values() if each.split == "validation")


def differ_by_chance(domains: Sequence[Domain]) -> bool:
    """Whether the domains' accuracies differ no more than by chance.

    The criterion: the statistic of the chi-square test of homogeneity is at most its expectation,
    the number of domains minus one.
    """
    scores = [(domain.score, domain.examples) for domain in domains if domain.examples]
    if len(scores) < 2:
        return False
    accuracy, count = np.array(scores).T
    common = np.average(accuracy, weights=count)
    squares = (count * (accuracy - common) ** 2).sum()
    return bool(squares <= (len(scores) - 1) * common * (1 - common))


def agrees(line: Line) -> bool:
    """Whether the training domains of an evaluation differ no more than by chance."""
    domains = line.domains.values()
    return differ_by_chance([domain for domain in domains if domain.split == "validation"])


def after_difference(lines: Sequence[Line]) -> Sequence[Line]:
    """The evaluations from the first on at which the training domains differ by more than chance.

    Before, the network is untrained, and equally bad in all domains.
    """
    return lines[next((at for at, line in enumerate(lines) if not agrees(line)), len(lines)) :]


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


def _best(rank: Callable[[Line], float]) -> Pick:
    """Picks the highest rank, of equal ones the last; NaN is the lowest."""

    def key(line: Line) -> float:
        return -math.inf if math.isnan(rank(line)) else rank(line)

    return lambda lines: max(reversed(lines), key=key)


def _if_validated(pick: Pick) -> Pick:
    """Picks nothing without validation examples."""
    return lambda lines: pick(lines) if is_validated(lines[0]) else None


def _if_left_out(pick: Pick) -> Pick:
    """Picks nothing unless runs without each training domain were evaluated, too."""
    return lambda lines: pick(lines) if lines[0].left_out_score is not None else None


def _if_unseen(pick: Pick) -> Pick:
    """Picks nothing unless there is a domain that no client has and that is not the test."""
    return lambda lines: None if score_on(lines[0], "unseen_domain") is None else pick(lines)


def rules(measure: Measure) -> dict[str, Rule]:
    """All rules, for evaluations with this score."""

    def validation(line: Line) -> float:
        return measure.rank(line.validation_score) if is_validated(line) else math.nan

    def left_out(line: Line) -> float:
        return math.nan if line.left_out_score is None else measure.rank(line.left_out_score)

    def unseen(line: Line) -> float:
        score = score_on(line, "unseen_domain")
        return math.nan if score is None else measure.rank(score)

    def test(line: Line) -> float:
        return measure.rank(line.test_score)

    def of_accuracies(pick: Pick) -> Pick:
        """Picks nothing by another score, whose deviation by chance is not known."""
        return pick if measure == ACCURACY else lambda lines: None

    return {
        "validation": Rule(
            "the best validation score on the training domains",
            _if_validated(_best(validation)),
            validation,
        ),
        "leave_one_out": Rule(
            "the best mean score on training domains, each measured by a run without it",
            _if_left_out(_best(left_out)),
            left_out,
        ),
        "agreement": Rule(
            "the first evaluation at which the training domains, which had differed, differ no "
            "more than by chance",
            of_accuracies(_agreeing),
            validation,
            compares_domains=True,
        ),
        "last_if_agreed": Rule(
            "the last evaluation, if there is one that agreement picks",
            of_accuracies(_last_if_agreed),
            validation,
            compares_domains=True,
        ),
        "last": Rule("the last evaluation", lambda lines: lines[-1], validation),
        "unseen_domain": Rule(
            "the best score on a domain that no client has and that is not the test",
            _if_unseen(_best(unseen)),
            unseen,
        ),
        "oracle": Rule("the best test score, for comparison only", _best(test), test),
    }


RULES = rules(ACCURACY)


def explained(rule: str) -> str:
    """A rule of selection in words."""
    scored = {"oracle": "test score", "unseen_domain": "score on that domain"}
    scored["leave_one_out"] = "score on the domains left out"
    return (
        f"Model selection by {rule}. Each seed shows {RULES[rule].text}. The hyperparameters are "
        f"those whose mean {scored.get(rule, 'validation score')} in these evaluations is best. "
        f"The held-out domain is {'' if rule == 'oracle' else 'never '}looked at."
    )


def picked(run: RunResult, rule: str) -> Line | None:
    """The evaluation in the result of a run that a rule picked; None if it picked none."""
    return run.by_rule.get(rule)


def picked_or_last(run: RunResult, rule: str) -> Line:
    """The evaluation in the result of a run that a rule picked, or else the last one."""
    return picked(run, rule) or run.last


class Chosen(NamedTuple):
    """The runs of a cell with the selected hyperparameters, one per seed."""

    label: str
    held_out: str
    hyper: dict[str, float]  # the selected values of hyperparameters with several values
    runs: list[RunResult]  # their `selected` is what the rule picks, or the last evaluation
    indices: list[int]  # of the runs in the cell
    rule: str = "validation"
    left_out: tuple[int, ...] = ()  # the seeds that diverged, if `choose` took the surviving ones
    measure: Measure = ACCURACY  # how to read the scores

    @property
    def selected(self) -> list[Line]:
        """The selected evaluation of each seed."""
        return [run.choice for run in self.runs]

    @property
    def setting(self) -> str:
        """The selected hyperparameters in words."""
        return ", ".join(f"{name}={shown(value)}" for name, value in self.hyper.items())

    @property
    def rank(self) -> tuple[int, float]:
        """What settings are compared by: seeds with an evaluation, and their mean score."""
        score = rules(self.measure)[self.rule].score
        scores = [score(line) for run in self.runs if (line := picked(run, self.rule))]
        mean = float(np.mean(scores))
        return len(scores), -np.inf if np.isnan(mean) else mean


def choose(
    label: str, result: Result, rule: str = "validation", *, surviving: bool = False
) -> Chosen | None:
    """Selects a cell's hyperparameters, and an evaluation of each seed.

    Settings in which any seed diverged, or in which the rule picks no evaluation, are excluded. The
    result is None if all are, or if there is no score to choose one of several by. Settings in
    which the rule picks evaluations for more seeds win.

    surviving: whether, if all are excluded, the result has the seeds that did not diverge. It
        serves the comparison of methods seed by seed.
    """
    runs = result.runs
    settings = divergence.settings(runs)
    whole = [setting for setting in settings if not setting.num_diverged]
    for allowed in (whole, settings)[: 1 + surviving]:
        found = []
        for hyper, indices, _ in allowed:
            left_out = tuple(runs[at].seed for at in indices if runs[at].diverged)
            of = [at for at in indices if not runs[at].diverged]
            if any(picked(runs[at], rule) for at in of):
                own = [
                    msgspec.structs.replace(runs[at], selected=picked_or_last(runs[at], rule))
                    for at in of
                ]
                about = rule, left_out, result.score
                found.append(Chosen(label, held_out_of(result), hyper, own, of, *about))
        best = max(found, key=lambda one: one.rank, default=None)
        # Several settings without a score to compare them by, as without validation examples.
        is_unknown = best is not None and len(found) > 1 and best.rank[1] == -np.inf
        if best and not is_unknown:
            return best
    return None


def held_out_of(result: Result) -> str:
    """The held-out domain, or the name of the test split in the evaluations of a result."""
    if result.cell.held_out is not None:
        return result.cell.held_out
    domains = result.runs[0].last.domains
    return next(name for name, domain in domains.items() if domain.split == "test")


def why_none(result: Result) -> str:
    """The table's text for a cell in which nothing could be chosen."""
    settings = divergence.settings(result.runs)
    return "diverged" if all(setting.num_diverged for setting in settings) else "none"
