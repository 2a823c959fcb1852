"""runs.csv: all evaluations of finished cells, of which every table is a pivot."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pandas as pd

from ..folder import files, log, selection
from ..folder.selection import RULES
from .tables import TableCell

_NAMED = ("run", "seed", "round", "hyper", "domains")  # fields of a line with columns of their own


def write(path: Path, cells: Sequence[TableCell]) -> None:
    """Writes a line for each domain of each evaluation of cells, by their logs.

    The columns are those of the run, of its hyperparameters, and of the evaluation. `picked_by`
    names the rules that pick the evaluation among those of its run, `selected_by` those that also
    select the run's setting; `selected` is whether the cell's own rule is among these.
    """
    rows = [row for cell in cells for row in _rows(cell)]
    run, settings, numbers = (
        pd.DataFrame([row[part] for row in rows], dtype=object) for part in range(3)
    )
    taken = {*run, *numbers}
    settings = settings.rename(columns=lambda name: f"set.{name}" if name in taken else name)
    frame = pd.concat([run, settings, numbers], axis=1)
    # As R and pandas read it.
    frame = frame.map(lambda value: str(value).lower() if isinstance(value, bool) else value)
    files.write(path, frame.infer_objects().to_csv(index=False, lineterminator="\n"))


def _rows(cell: TableCell) -> Iterator[tuple[dict[str, Any], ...]]:
    """The run, its hyperparameters, and the numbers of each domain of each evaluation."""
    result = cell.result
    selected = {rule: _selected(cell, rule) for rule in RULES}
    run_of_cell = {
        "method": cell.label,
        "algorithm": result.cell.algorithm,
        "held_out": cell.held_out,
    }
    for line in log.read(cell.folder, result.runs[0].last.round):
        by_rule = {} if line.left_out else result.runs[line.run].by_rule
        picked_by = [k for k, at in by_rule.items() if at and at.round == line.round]
        selected_by = [k for k, rounds in selected.items() if rounds.get(line.run) == line.round]
        numbers = {
            "rule": cell.rule,
            "selected": cell.rule in selected_by,
            "picked_by": " ".join(picked_by),
            "selected_by": " ".join(selected_by),
        }
        fields = {k: v for k, v in msgspec.to_builtins(line).items() if k not in _NAMED}
        for name, value in fields.items():
            if isinstance(value, dict):
                numbers |= {f"{name}.{inner}": number for inner, number in value.items()}
            elif not isinstance(value, list):
                numbers[name] = value
        for name, domain in line.domains.items():
            of_domain = {"round": line.round, "domain": name, **msgspec.to_builtins(domain)}
            run = {**run_of_cell, "run": line.run, "seed": line.seed}
            yield run, {**result.cell.settings, **line.hyper}, of_domain | numbers


def _selected(cell: TableCell, rule: str) -> dict[int, int]:
    """The round that a rule selects, by the runs with the setting that it selects."""
    one = selection.choose(cell.label, cell.result, rule)
    rounds = [line.round for line in one.selected] if one else []
    return dict(zip(one.indices, rounds, strict=True)) if one else {}
