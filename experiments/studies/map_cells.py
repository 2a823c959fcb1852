"""The cells of the map: a method under a kind of shift, compared with FedAvg."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from .. import build, selection
from ..config import Config, defaults
from ..flags import PARTICIPATION
from ..running import divergence
from ..studies import study, verdicts
from ..studies.map_columns import LISTED as SHIFTS
from ..studies.map_methods import FEDAVG
from ..studies.study import RowResult
from ..studies.verdicts import Verdict


class Cell(NamedTuple):
    """A line of map.csv: a method under a kind of shift. Accuracies are in percent."""

    method: str
    shift: str
    severity: float
    seeds: int
    test: float  # the mean over seeds; NaN if nothing could be selected
    tests: tuple[float, ...]  # of each seed
    difference: float  # this and the next three: the test accuracy less FedAvg's, by seed
    low: float  # the ends of the 95% interval
    high: float
    p: float  # corrected for all cells of the map
    word: str
    oracle: float  # the test accuracy if the test itself selected setting and round
    training_domains: float
    worst_domain: float  # of the validation domains and the test
    worst_tenth: float  # of the clients, by test examples in the proportions of their classes
    megabytes: float  # sent until the selected round
    steps: float  # expected local steps of all clients until then; NaN where flags do not tell
    at_round: float
    setting: str
    runs_diverged: str


def _cell(result: RowResult, verdict: Verdict | None) -> Cell:
    one = selection.choose(result.row.series, result.only.result, result.config.select)
    oracle = selection.choose(result.row.series, result.only.result, "oracle")
    column, _, severity = result.row.x.partition("=")
    shown = verdict or Verdict(len(result.selected))

    def mean(value: Callable[[Any], float]) -> float:
        values = [value(line) for line in result.selected]
        return float(np.mean(values)) if values else np.nan

    return Cell(
        method=result.row.series,
        shift=column,
        severity=float(severity),
        seeds=len(result.selected),
        test=mean(lambda line: 100 * line["test_score"]),
        tests=tuple(study.percents(result.selected)),
        difference=100 * shown.mean,
        low=100 * shown.low,
        high=100 * shown.high,
        p=shown.p,
        word=shown.word,
        oracle=float(np.mean(study.percents(oracle.selected))) if oracle else np.nan,
        training_domains=mean(lambda line: 100 * line["validation_score"]),
        worst_domain=mean(lambda line: 100 * line["worst_score"]),
        worst_tenth=mean(lambda line: 100 * worst_tenth(line["score_by_client"] or [])),
        megabytes=mean(lambda line: line["bytes"] / 1e6),
        steps=mean(lambda line: line["played"] * _steps(result.config)),
        at_round=mean(lambda line: line["played"]),
        setting=one.setting if one else "",
        runs_diverged=divergence.count(result.only.result.runs),
    )


def worst_tenth(scores: Sequence[float | None]) -> float:
    """The mean of the lowest tenth of the clients' scores, one client at least; None: no score."""
    known = sorted(score for score in scores if score is not None)
    return float(np.mean(known[: max(1, len(known) // 10)])) if known else np.nan


# The flags of participation of which the expected number of steps is known.
_COUNTED = ("cohort", "sampling_rate", "frequency", "sparse", "dropout")


def _steps(config: Config) -> float:
    """The expected local steps of a round in all, of clients whose updates arrive.

    It is NaN for passes over the data, where the data say how many clients there are, and where the
    run decides which clients take part: an exit strategy, or other flags of participation than
    those of the cohort, --frequency and --dropout.
    """
    steps = config.local_steps or np.nan
    if build.is_pooled(config):
        return steps
    clients, others = config.clients, {*PARTICIPATION} - {*_COUNTED}
    is_other = any(getattr(config, name) != getattr(defaults(), name) for name in others)
    if not clients or config.algorithm == ("exit_strategy",) or is_other:
        return np.nan
    rare = round(config.sparse * clients) / clients * (1 - config.frequency)
    return build.slots(config, clients) * (1 - rare) * (1 - config.dropout) * steps


def cells_of(results: Sequence[RowResult]) -> list[Cell]:
    """The cells of a map, compared with FedAvg."""
    scores = {
        (result.row.series, result.row.x): {
            run["seed"]: run["selected"]["test_score"] for run in result.only.runs
        }
        for result in results
    }
    others = {at: of for at, of in scores.items() if at[0] != FEDAVG}
    reference = {(name, x): scores.get((FEDAVG, x), {}) for name, x in others}
    found = verdicts.compared(others, reference)
    return [_cell(result, found.get((result.row.series, result.row.x))) for result in results]


def place_of(cell: Cell) -> str:
    """The kind of shift and the severity of a cell."""
    return f"{cell.shift}={cell.severity:g}"


def heading(place: str) -> str:
    """The title of a kind of shift, with its severity."""
    name, _, severity = place.partition("=")
    return f"{SHIFTS[name].title} ({severity})"
