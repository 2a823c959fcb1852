"""Records of evaluations: the lines of the log, the stops and the results of runs."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import msgspec
import numpy as np

from fedjax_inv import evaluation, stopping
from fedjax_inv.communication import Traffic
from fedjax_inv.data.federation import UNSEEN
from fedjax_inv.evaluation import Scores
from fedjax_inv.one_run import Outcome

from ..assembly.data import KNOWN, NEVER_SEEN
from ..assembly.grid import Cell
from ..assembly.metrics import ACCURACY, Measure
from . import selection
from .records import Domain, Line, RunResult, StopRecord


def lines(
    cell: Cell,
    groups: list[str],
    outcome: Outcome,
    traffic: Sequence[Traffic],
    *,
    done: int,
    seconds: float,
    drops: bool,
    measure: Measure = ACCURACY,
    end_at_stop: bool = False,
) -> list[Line]:
    """The lines of the log after a segment, or before the first: one per run.

    Their `bytes`, `dropped` and `diverged` are of this segment; `Log.append` adds them up.

    groups: the names of the validation groups.
    traffic: of a client in each exchange.
    done: the number of rounds since the beginning.
    drops: whether a client that is not finite is dropped, so that its run does not diverge. A run
        whose evaluation is not finite diverges in any case.
    measure: how to read the scores.
    end_at_stop: whether a run ends once it has met all thresholds.
    """
    records = []
    for index, run in enumerate(cell.runs):
        metrics = {k: np.asarray(v)[index] for k, v in outcome.metrics.items()}
        # A round in which no client took part has none.
        known = {name: values[np.isfinite(values)] for name, values in metrics.items()}
        loss = metrics.pop("loss", np.zeros(0))
        last = known.pop("loss", np.zeros(0))[-1:]
        watched: dict[str, Any] = {
            f"{name}_by_round": [round(float(value), 5) for value in values[index]]
            for name, values in outcome.watched.items()
        }
        held_out = outcome.valid, outcome.test, outcome.unseen
        valid, test, unseen = jax.tree.map(lambda a, i=index: a[i], held_out)
        broken = (outcome.broken[index] >= 0).sum()
        stops = np.asarray(outcome.stops.round)[index] if end_at_stop else np.zeros(0)
        attended = np.asarray(outcome.attended)[index]
        every = (valid, test, *unseen.values())
        finite = all((np.isfinite(of.loss) | (of.size == 0)).all() for of in every)
        records.append(
            Line(
                round=done,
                run=index,
                seed=run.seed,
                hyper=run.hyper,
                left_out=run.left_out,
                train_loss=next(map(_number, loss[-1:] if broken else last), None),
                train_metrics={k: _number(v.mean()) if v.size else None for k, v in known.items()}
                or None,
                **watched,
                **_by_domain(cell, measure, groups, valid, test, unseen, run.left_out),
                **_by_class_and_client(outcome, index),
                diverged=bool(not finite or (broken and not drops)),
                ended=int(stops.max()) if stops.size and stops.all() else None,
                dropped=int(broken) if drops else None,
                seconds=round(seconds, 3),
                bytes=int(attended.sum(0) @ np.array([each.down + each.up for each in traffic])),
            )
        )
    return _with_left_out(records, measure)


def _with_left_out(lines: list[Line], measure: Measure) -> list[Line]:
    """The lines of an evaluation with `left_out_score`, NaN if a run without a domain diverged."""
    scores: dict[str, list[float]] = {}
    for line in lines:
        if line.left_out and line.domains[line.left_out].examples:
            known = math.nan if line.diverged else line.test_score
            scores.setdefault(f"{line.seed} {line.hyper}", []).append(known)
    means = {key: measure.over_domains(of) for key, of in scores.items()}
    return [
        line
        if line.left_out
        else msgspec.structs.replace(line, left_out_score=means.get(f"{line.seed} {line.hyper}"))
        for line in lines
    ]


def _by_class_and_client(outcome: Outcome, run: int) -> dict[str, Any]:
    """The fields of --watch_classes of a run.

    They are the score on each class and on each client's test examples, None where there are no
    examples, and the means of both over the others.
    """
    fields: dict[str, Any] = {}
    names = (("balanced", "class"), ("client", "client"))
    for (mean, what), scores in zip(names, outcome.detailed or (), strict=False):
        fields[f"{mean}_score"] = float(np.asarray(evaluation.balanced(scores))[run])
        both = zip(scores.score[run], scores.size[run], strict=True)
        fields[f"score_by_{what}"] = [
            round(float(score), 5) if size else None for score, size in both
        ]
    return fields


def _number(value: Any) -> float | None:
    return float(value) if math.isfinite(value) else None  # json has no NaN


def test_name(cell: Cell, groups: list[str]) -> str:
    """The name of the test examples: the held-out domain, or a name of the test split."""
    if cell.held_out is not None:
        return cell.held_out
    taken = {*groups, cell.validate}
    more = (f"test split {number}" for number in range(2, 2 + len(taken)))
    names = ("test", "test split", *more)
    return next(name for name in names if name not in taken)


_OF_VALIDATION = "validation of unseen domains"


def unseen_name(cell: Cell, kind: str) -> str:
    """The name of the examples of one of `data.federation.UNSEEN`."""
    if kind == "unseen_domain":
        return cell.validate or _OF_VALIDATION
    return KNOWN if kind == "known_domains" else NEVER_SEEN


def _by_domain(
    cell: Cell,
    measure: Measure,
    groups: list[str],
    valid: Scores,
    test: Scores,
    unseen: Mapping[str, Scores],
    left_out: str = "",
) -> dict[str, Any]:
    """The scores of an evaluation. valid: arrays [groups or more]. test, unseen: arrays [1].

    left_out: the domain that is the test of a run that trains without it.
    """
    scores = [(name, "validation", valid, index) for index, name in enumerate(groups)]
    scores = [each for each in scores if each[0] != left_out]
    groups = [name for name, *_ in scores]
    # Not in the order of a dict that was in JAX, which sorts it.
    kinds = [kind for kind in UNSEEN if kind in unseen]
    scores += [(unseen_name(cell, kind), kind, unseen[kind], 0) for kind in kinds]
    scores.append((left_out or test_name(cell, groups), "test", test, 0))
    domains = {
        name: Domain(float(of.score[index]), _number(of.loss[index]), int(of.size[index]), split)
        for name, split, of, index in scores
    }
    # A domain without examples has no score. Without any validation example all count as 0.
    known = [name for name in groups if domains[name].examples] or groups
    worst = min(
        [name for name, domain in domains.items() if domain.examples] or domains,
        # A score of NaN is the worst, in any order of the domains.
        key=lambda name: (not np.isnan(domains[name].score), measure.rank(domains[name].score)),
    )
    return {
        "domains": domains,
        "validation_score": measure.over_domains([domains[name].score for name in known]),
        "test_score": float(test.score[0]),
        "worst_domain": worst,
        "worst_score": domains[worst].score,
    }


def stops(
    cell: Cell,
    groups: list[str],
    thresholds: tuple[float, ...],
    stops: stopping.Stops,
    run: int,
    measure: Measure = ACCURACY,
) -> list[StopRecord]:
    """The stops of a run, one per threshold; the round is None if it has not stopped."""
    records = []
    for index, threshold in enumerate(thresholds):
        train, *held_out = jax.tree.map(lambda a, i=index: a[run, i], stops.scores)
        at = int(stops.round[run, index])
        if not at:
            records.append(StopRecord(threshold, None))
            continue
        scores = _by_domain(cell, measure, groups, *held_out)
        records.append(StopRecord(threshold, at, float(train.score[0]), **scores))
    return records


def summarise(cell: Cell, lines: list[Line], measure: Measure = ACCURACY) -> list[RunResult]:
    """The results of the runs: the evaluation that each rule picks, and the last one.

    Evaluations after a divergence do not count.
    """
    results = []
    rules = selection.rules(measure)
    for index, run in enumerate(cell.runs):
        if run.left_out:
            continue
        mine = [line for line in lines if line.run == index]
        good = selection.candidates(mine)
        picked = {name: rule.pick(good) if good else None for name, rule in rules.items()}
        results.append(
            RunResult(
                seed=run.seed,
                hyper=run.hyper,
                diverged=any(line.diverged for line in mine),
                by_rule=picked,
                last=mine[-1],
            )
        )
    return results
