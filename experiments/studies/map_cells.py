"""The cells of the map: a method under a kind of shift, compared with FedAvg."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..assembly import method
from ..config import Config, Participation
from ..folder import divergence, selection
from ..folder.selection import Chosen
from ..report import differences, tables
from ..report.differences import Difference, Scores
from . import study
from .map_columns import LISTED as SHIFTS
from .map_methods import FEDAVG
from .row_runs import RowResult


class MapCell(NamedTuple):
    """A line of map.csv: a method under a kind of shift. Accuracies are in percent."""

    method: str
    shift: str
    severity: float
    rule: str  # of selection
    seeds: int
    picked: int  # of these seeds, for how many the rule picks an evaluation; else it is the last
    test: float  # the mean over seeds; NaN if nothing could be selected
    tests: tuple[float, ...]  # of each seed
    difference: float = np.nan  # this and the next three: the test accuracy less FedAvg's, by seed
    low: float = np.nan  # the ends of the 95% interval
    high: float = np.nan
    p: float = np.nan  # corrected for all cells of the map
    word: str = ""
    oracle: float = np.nan  # the test accuracy if the test itself selected setting and round
    training_domains: float = np.nan
    worst_domain: float = np.nan  # of the validation domains and the test
    worst_tenth: float = np.nan  # of the clients, by test examples in their shares of the classes
    megabytes: float = np.nan  # sent until the selected round
    steps: float = np.nan  # expected, of all clients until then; NaN where flags do not tell
    at_round: float = np.nan
    setting: str = ""
    runs_diverged: str = ""
    is_constant: bool = False  # whether each seed's accuracy is that of always answering one class


def _cell(
    result: RowResult, one: Chosen | None, rule: str, difference: Difference, p: float
) -> MapCell:
    """A cell. difference: from FedAvg. p: its p-value, corrected."""
    oracle = selection.choose(result.row.series, result.only.result, "oracle")
    column, _, severity = result.row.x.partition("=")
    runs = one.runs if one else []
    lines = [run.choice for run in runs]

    def mean(value: Callable[[Any], float]) -> float:
        return float(np.mean([value(line) for line in lines])) if lines else np.nan

    return MapCell(
        method=result.row.series,
        shift=column,
        severity=float(severity),
        rule=rule,
        seeds=len(lines),
        picked=one.rank[0] if one else 0,
        test=mean(lambda line: 100 * line.test_score),
        tests=tuple(study.percents(lines)),
        difference=100 * difference.mean,
        low=100 * difference.low,
        high=100 * difference.high,
        p=p,
        word=differences.word(difference, p),
        oracle=float(np.mean(study.percents(oracle.selected))) if oracle else np.nan,
        training_domains=mean(lambda line: 100 * line.validation_score),
        worst_domain=mean(lambda line: 100 * line.worst_score),
        worst_tenth=mean(lambda line: 100 * worst_tenth(line.score_by_client or [])),
        megabytes=mean(lambda line: line.bytes / 1e6),
        steps=mean(lambda line: line.played * _steps(result.config)),
        at_round=mean(lambda line: line.played),
        setting=one.setting if one else "",
        runs_diverged=divergence.count(result.only.result.runs),
        is_constant=tables.is_constant(result.only.constant, _scores(runs).items()),
    )


def worst_tenth(scores: Sequence[float | None]) -> float:
    """The mean of the lowest tenth of the clients' scores, one client at least; None: no score."""
    known = sorted(score for score in scores if score is not None)
    return float(np.mean(known[: max(1, len(known) // 10)])) if known else np.nan


# The flags of participation of which the expected number of steps is known.
_COUNTED = ("cohort", "sampling_rate", "frequency", "dropout")


def _steps(config: Config) -> float:
    """The expected local steps of a round in all, of clients whose updates arrive.

    It is NaN for passes over the data, where the data say how many clients there are, and where the
    run decides which clients take part: an exit strategy, or other flags of participation than
    those of the cohort, --frequency and --dropout.
    """
    steps = config.training.local_steps or np.nan
    if method.is_pooled(config):
        return steps
    clients = config.partition.clients
    counted = {name: getattr(config.participation, name) for name in _COUNTED}
    is_other = config.participation != Participation(**counted)
    if not clients or config.method.algorithm == ("exit_strategy",) or is_other:
        return np.nan
    participation = config.participation
    rare = method.num_sparse(clients) / clients * (1 - participation.frequency)
    played = method.slots(participation, clients) * (1 - rare) * (1 - participation.dropout)
    return played * steps


def cells_of(results: Sequence[RowResult], rule: str = "") -> list[MapCell]:
    """The cells of a map by a rule of selection, compared with FedAvg by the same rule.

    Where the rule picks nothing for FedAvg, they are compared with FedAvg by the rule of --select.

    rule: "" for that of --select, with a last row for the answer that is always the same.
    """
    places = [(result.row.series, result.row.x) for result in results]
    chosen = {
        at: selection.choose(at[0], result.only.result, rule or result.config.evaluation.select)
        for at, result in zip(places, results, strict=True)
    }
    scores = {at: _scores(one.runs if one else []) for at, one in chosen.items()}
    selected = {r.row.x: _scores(r.only.runs) for r in results if r.row.series == FEDAVG}
    found, p_values = compared(scores, selected)
    cells = [
        _cell(result, chosen[at], rule or result.config.evaluation.select, found[at], p_values[at])
        for at, result in zip(places, results, strict=True)
    ]
    return cells if rule else [*cells, *_constants(results, cells)]


def compared(
    scores: Mapping[tuple[str, str], Scores], selected: Mapping[str, Scores]
) -> tuple[dict[tuple[str, str], Difference], dict[tuple[str, str], float]]:
    """The differences from FedAvg under the same shift, and their p-values, corrected for all.

    scores: by method and shift, by one rule. selected: those of FedAvg by the rule of --select, for
    shifts for which it has none.
    """
    found = {
        (name, shift): differences.paired(
            of, {} if name == FEDAVG else scores.get((FEDAVG, shift)) or selected.get(shift, {})
        )
        for (name, shift), of in scores.items()
    }
    corrected = differences.holm([difference.p for difference in found.values()])
    return found, dict(zip(found, corrected, strict=True))


def _scores(runs: Sequence[Any]) -> dict[int, float]:
    """The selected test accuracy of each seed."""
    return {run.seed: run.choice.test_score for run in runs}


def _constants(results: Sequence[RowResult], cells: Sequence[MapCell]) -> Iterator[MapCell]:
    """Cells of the answer that is always the most frequent class, beside those of FedAvg."""
    for result, cell in zip(results, cells, strict=True):
        if cell.method == FEDAVG and result.only.constant:
            tests = tuple(100 * one for one, _ in result.only.constant.values())
            mean = float(np.mean(tests))
            at = tables.CONSTANT, cell.shift, cell.severity, cell.rule
            yield MapCell(*at, len(tests), len(tests), mean, tests, mean - cell.test)


def place_of(cell: MapCell) -> str:
    """The kind of shift and the severity of a cell."""
    return f"{cell.shift}={cell.severity:g}"


def heading(place: str) -> str:
    """The title of a kind of shift, with its severity."""
    name, _, severity = place.partition("=")
    return f"{SHIFTS[name].title} ({severity})"
