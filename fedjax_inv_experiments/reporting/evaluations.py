"""runs.csv: a line for each evaluation of each run, for plots and statistics elsewhere."""

import csv
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from fedjax_inv_experiments.reporting import report
from fedjax_inv_experiments.running import files, log
from fedjax_inv_experiments.running.records import Line, Result

_NAMED = ("run", "seed", "round", "hyper")  # fields of a line that have columns of another name


class Cell(NamedTuple):
    """A finished cell."""

    label: str
    rule: str  # of selection
    folder: Path  # with its log
    result: Result


def write(path: Path, cells: Sequence[Cell]) -> None:
    """Writes the evaluations of cells as a csv file."""
    rows = [row for cell in cells for row in _rows(cell, log.read(cell.folder, _rounds(cell)))]
    files.write(path, text(rows))


def _rounds(cell: Cell) -> int:
    return cell.result.runs[0].last.round


class Row(NamedTuple):
    """An evaluation of a run, by the names of its columns."""

    about: dict[str, Any]  # the run, and whether the evaluation is selected
    settings: dict[str, Any]  # of the run's algorithm
    scores: dict[str, Any]


def _rows(cell: Cell, lines: Sequence[Line]) -> Iterator[Row]:
    result = cell.result
    one = report.choose(cell.label, result, cell.rule)
    selected = {}
    if one is not None:
        rounds = [line.round for line in one.selected]
        selected = dict(zip(one.indices, rounds, strict=True))
    for line in lines:
        by_rule = result.runs[line.run].by_rule
        picked = [name for name, at in by_rule.items() if at and at.round == line.round]
        about = {
            "method": cell.label,
            "algorithm": result.cell.algorithm,
            "held_out": report.held_out_of(result),
            "run": line.run,
            "seed": line.seed,
            "round": line.round,
            "rule": cell.rule,
            "selected": selected.get(line.run) == line.round,
            "picked_by": " ".join(picked),
        }
        scores = {k: v for k, v in msgspec.to_builtins(line).items() if k not in _NAMED}
        yield Row(about, {**result.cell.settings, **line.hyper}, _flat(scores))


def _flat(record: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """The numbers and texts in nested records, by their path; lists are left out."""
    flat: dict[str, Any] = {}
    for name, value in record.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        elif not isinstance(value, list):
            flat[prefix + name] = value
    return flat


def text(rows: Sequence[Row]) -> str:
    """Rows as the text of a csv file; a column that a row lacks is empty there."""
    about, settings, scores = (
        list(dict.fromkeys(name for row in rows for name in row[part])) for part in range(3)
    )
    taken = {*about, *scores}
    names = [f"set.{name}" if name in taken else name for name in settings]
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([*about, *names, *scores])
    for row in rows:
        cells = zip((about, settings, scores), row, strict=True)
        writer.writerow([_cell(of.get(name)) for heads, of in cells for name in heads])
    return file.getvalue()


def _cell(value: Any) -> Any:
    return str(value).lower() if isinstance(value, bool) else value  # as R and pandas read it
