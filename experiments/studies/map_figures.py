"""The figures of the map: differences from FedAvg as colours, and accuracy by severity."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from .. import figures as drawing
from ..studies import drawings, verdicts
from ..studies.map_cells import Cell, heading, place_of
from ..studies.map_columns import LISTED as SHIFTS
from ..studies.map_methods import FEDAVG

_COLOURS = "PuOr_r"  # purple and orange differ for all kinds of colour vision
_STRONGEST = 10.0  # the difference in points from which on the colour stays the same
_MARKS = {verdicts.BETTER: "▲", verdicts.WORSE: "▼"}


def heat_map(path: Path, data: str, cells: Sequence[Cell]) -> str:
    """Draws the differences from FedAvg, a row per method and a column per kind of shift."""
    methods = list(dict.fromkeys(cell.method for cell in cells))
    places = list(dict.fromkeys(map(place_of, cells)))
    found = {(cell.method, place_of(cell)): cell for cell in cells}
    # FedAvg's own differences are NaN.
    values = [
        [found[m, p].difference if (m, p) in found else np.nan for p in places] for m in methods
    ]
    figure = drawing.new(1.15 * len(places) + 2.6, 0.3 * len(methods) + 1.9)
    axis = figure.subplots()
    axis.set_facecolor("0.93")
    picture = axis.imshow(values, cmap=_COLOURS, vmin=-_STRONGEST, vmax=_STRONGEST, aspect="auto")
    for (i, method), (j, place) in itertools.product(enumerate(methods), enumerate(places)):
        _write(axis, i, j, found.get((method, place)))
    axis.set_yticks(range(len(methods)), [drawing.literal(name) for name in methods], fontsize=9)
    titles = [drawing.wrapped(heading(place), 1.1, 9) for place in places]
    axis.set_xticks(range(len(places)), titles, fontsize=9)
    axis.xaxis.tick_top()
    axis.tick_params(length=0)
    bar = figure.colorbar(picture, ax=axis, fraction=0.03, pad=0.01, extend="both")
    bar.set_label("points above or below FedAvg", fontsize=9)
    seeds = max(cell.seeds for cell in cells)
    caption = (
        "▲ better, ▼ worse than FedAvg; no mark: no difference shown (paired t test over "
        f"{seeds} seeds, Holm's correction for all cells)"
    )
    shown = "test accuracy in points above or below FedAvg, whose row shows percent"
    title = f"{data}: {shown}\n{caption if seeds > 1 else 'one seed'}"
    return drawings.saved(figure, path, title, dpi=150)


def _write(axis: Axes, i: int, j: int, cell: Cell | None) -> None:
    """Writes the number of a cell."""
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
    mark = _MARKS.get(cell.word, "") if cell else ""
    is_dark = cell is not None and abs(cell.difference) > 0.7 * _STRONGEST
    drawn = axis.text(j, i, f"{text} {mark}".strip(), ha="center", va="center")
    drawn.set_color("white" if is_dark else "black")
    drawn.set_fontweight("bold" if mark else "normal")
    drawn.set_fontsize(6.5 if text[0].isalpha() else 9)


def by_severity(path: Path, data: str, cells: Sequence[Cell]) -> str:
    """Draws accuracy against severity, a panel per kind of shift and a line per method."""
    panels = []
    for column in dict.fromkeys(cell.shift for cell in cells):
        of_column = [cell for cell in cells if cell.shift == column]
        places = sorted({cell.severity for cell in of_column})
        lines = {}
        for method in dict.fromkeys(cell.method for cell in of_column):
            of = {cell.severity: cell.tests for cell in of_column if cell.method == method}
            at = [severity for severity in places if of.get(severity)]
            if at:
                x = np.array([places.index(severity) for severity in at])
                lines[method] = drawings.Line(x, np.array([of[severity] for severity in at]).T)
        names = [f"{at:g}" for at in places]
        title = SHIFTS[column].title
        panels.append(drawings.Panel(lines, title, "severity", "test accuracy, %", x_names=names))
    title = f"{data}: accuracy by severity of the shift"
    return drawings.lines(path, title, panels, (3.6, 3.0))
