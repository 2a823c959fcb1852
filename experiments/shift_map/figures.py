"""The figures of the map: differences from FedAvg as colours, and accuracy by severity."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..reporting import figures as drawing
from ..shift_map import verdicts
from ..shift_map.cells import Cell, heading, place_of
from ..shift_map.columns import LISTED as SHIFTS
from ..shift_map.methods import FEDAVG
from ..studies import drawings

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = "PuOr_r"  # purple and orange differ for all kinds of colour vision
_STRONGEST = 10.0  # the difference in points from which on the colour stays the same
_MARKS = {verdicts.BETTER: "▲", verdicts.WORSE: "▼"}


def heat_map(path: Path, data: str, cells: Sequence[Cell]) -> str:
    """Draws the differences from FedAvg, a row per method and a column per kind of shift."""
    if all(np.isnan(cell.test) for cell in cells):
        return drawings.NOTHING
    drawing.draw(path, _heat_map, data, cells, dpi=150)
    return f"Figure: {path}."


def _heat_map(data: str, cells: Sequence[Cell]) -> Figure:
    methods = list(dict.fromkeys(cell.method for cell in cells))
    places = list(dict.fromkeys(map(place_of, cells)))
    found = {(cell.method, place_of(cell)): cell for cell in cells}
    values = np.full((len(methods), len(places)), np.nan)
    for (i, method), (j, place) in (
        (row, column) for row in enumerate(methods) for column in enumerate(places)
    ):
        cell = found.get((method, place))
        if cell is not None and method != FEDAVG:
            values[i, j] = cell.difference
    figure = drawing.new(1.15 * len(places) + 2.6, 0.3 * len(methods) + 1.9)
    axis = figure.subplots()
    axis.set_facecolor("0.93")
    picture = axis.imshow(values, cmap=_COLOURS, vmin=-_STRONGEST, vmax=_STRONGEST, aspect="auto")
    for i, method in enumerate(methods):
        for j, place in enumerate(places):
            _write(axis, i, j, found.get((method, place)))
    axis.set_yticks(range(len(methods)), [drawing.literal(name) for name in methods], fontsize=9)
    titles = [drawing.wrapped(heading(place), 1.1, 9) for place in places]
    axis.set_xticks(range(len(places)), titles, fontsize=9)
    axis.xaxis.tick_top()
    axis.tick_params(length=0)
    for edge in np.arange(0.5, len(methods) - 1):
        axis.axhline(edge, color="white", lw=1)
    for edge in np.arange(0.5, len(places) - 1):
        axis.axvline(edge, color="white", lw=1)
    bar = figure.colorbar(picture, ax=axis, fraction=0.03, pad=0.01, extend="both")
    bar.set_label("points above or below FedAvg", fontsize=9)
    seeds = max(cell.seeds for cell in cells)
    caption = drawing.over_seeds(1)
    if seeds > 1:
        caption = (
            "▲ better, ▼ worse than FedAvg; no mark: no difference shown (paired t test over "
            f"{seeds} seeds, Holm's correction for all cells)"
        )
    shown = "test accuracy in points above or below FedAvg, whose row shows percent"
    drawing.entitle(figure, f"{data}: {shown}\n{caption}")
    return figure


def _write(axis: Axes, i: int, j: int, cell: Cell | None) -> None:
    """Writes the number of a cell."""
    color = "black"
    if cell is None:
        text = "not run"
    elif np.isnan(cell.test):
        text = "diverged"
    elif cell.method == FEDAVG:
        text = f"{cell.test:.1f}"
    elif np.isnan(cell.difference):
        text = "no FedAvg"  # to subtract: it diverged, or was not run
    else:
        text = f"{cell.difference:+z.1f}"
        color = "white" if abs(cell.difference) > 0.7 * _STRONGEST else "black"
    mark = _MARKS.get(cell.word, "") if cell else ""
    weight = "bold" if mark else "normal"
    size = 6.5 if text[0].isalpha() else 9
    axis.text(
        j,
        i,
        f"{text} {mark}".strip(),
        ha="center",
        va="center",
        color=color,
        weight=weight,
        fontsize=size,
    )


def by_severity(path: Path, data: str, cells: Sequence[Cell]) -> str:
    """Draws test accuracy against severity, a panel per kind of shift."""
    panels = []
    for column in dict.fromkeys(cell.shift for cell in cells):
        shift = SHIFTS[column]
        of_column = [cell for cell in cells if cell.shift == column]
        places = sorted({cell.severity for cell in of_column})
        lines = {}
        for method in dict.fromkeys(cell.method for cell in of_column):
            of = {cell.severity: cell for cell in of_column if cell.method == method}
            of = {at: cell for at, cell in of.items() if not np.isnan(cell.test)}
            if of:
                x = np.array([places.index(at) for at in sorted(of)])
                tests = np.array([of[at].tests for at in sorted(of)]).T
                lines[method] = drawings.Line(x, tests)
        names = [f"{at:g}" for at in places]
        panels.append(
            drawings.Panel(lines, shift.title, "severity", "test accuracy, %", x_names=names)
        )
    return drawings.lines(
        path,
        f"{data}: accuracy by severity of the shift",
        panels,
        (3.6, 3.0),
        spread=drawings.DEVIATION,
    )
