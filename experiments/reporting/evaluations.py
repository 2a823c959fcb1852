"""runs.csv: a line for each domain of each evaluation, for plots and statistics elsewhere."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pandas as pd

from ..reporting import report
from ..running import files, log
from ..running.records import Result

_NAMED = ("run", "seed", "round", "hyper", "domains")  # fields of a line with columns of their own


class Cell(NamedTuple):
    """A finished cell."""

    label: str
    rule: str  # of selection
    folder: Path  # with its log
    result: Result


def write(path: Path, cells: Sequence[Cell]) -> None:
    """Writes the evaluations of cells as a csv file."""
    frame = to_dataframe(cells)
    for name, values in frame.items():
        is_bool = values.map(lambda value: isinstance(value, bool)).astype(bool)
        if is_bool.any():  # as R and pandas read it
            frame[name] = values.astype(object).mask(is_bool, values.astype(str).str.lower())
    files.write(path, frame.to_csv(index=False, lineterminator="\n"))


def to_dataframe(cells: Sequence[Cell]) -> pd.DataFrame:
    """The evaluations of cells, by their logs; a number that a row lacks is NaN.

    The columns are those of the run, of its hyperparameters, and of the evaluation.
    """
    rows = [row for cell in cells for row in _rows(cell)]
    run, settings, numbers = (
        pd.DataFrame([row[part] for row in rows], dtype=object).infer_objects() for part in range(3)
    )
    taken = {*run, *numbers}
    settings = settings.rename(columns=lambda name: f"set.{name}" if name in taken else name)
    return pd.concat([run, settings, numbers], axis=1)


def _rows(cell: Cell) -> Iterator[tuple[dict[str, Any], ...]]:
    """The run, its hyperparameters, and the numbers of each domain of each evaluation."""
    result = cell.result
    one = report.choose(cell.label, result, cell.rule)
    rounds = [line.round for line in one.selected] if one else []
    selected = dict(zip(one.indices, rounds, strict=True)) if one else {}
    for line in log.read(cell.folder, result.runs[0].last.round):
        run = {
            "method": cell.label,
            "algorithm": result.cell.algorithm,
            "held_out": report.held_out_of(result),
            "run": line.run,
            "seed": line.seed,
        }
        by_rule = result.runs[line.run].by_rule
        picked = [name for name, at in by_rule.items() if at and at.round == line.round]
        numbers = {
            "rule": cell.rule,
            "selected": selected.get(line.run) == line.round,
            "picked_by": " ".join(picked),
        }
        numbers |= _flat({k: v for k, v in msgspec.to_builtins(line).items() if k not in _NAMED})
        for name, domain in line.domains.items():
            of_domain = {"round": line.round, "domain": name, **msgspec.to_builtins(domain)}
            yield run, {**result.cell.settings, **line.hyper}, of_domain | numbers


def _flat(record: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """The numbers and texts in nested records, by their path; lists are left out."""
    flat: dict[str, Any] = {}
    for name, value in record.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        elif not isinstance(value, list):
            flat[prefix + name] = value
    return flat
