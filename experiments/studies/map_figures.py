"""The figures of the map: differences from FedAvg as colours, and accuracy by severity."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from ..report import differences
from ..report import figures as drawing
from ..report.names import named
from . import drawings
from .map_cells import MapCell, heading, place_of
from .map_columns import LISTED as SHIFTS
from .map_methods import FEDAVG

_COLOURS = "PuOr_r"  # purple and orange differ for all kinds of colour vision
# The difference in points from which on the colour stays the same.
_STRONGEST = 10.0
_STRONGEST_BY_RULE = 30.0
# The rules of the figure that compares them; "" is that of --select, by default validation.
RULES = {
    "": "validation",
    "leave_one_out": "a domain left out",
    "last_if_agreed": "last, if domains agreed",
    "oracle": "oracle: LOOKS AT THE TEST",
}
_MARKS = {differences.BETTER: "▲", differences.WORSE: "▼"}


def heat_map(path: Path, data: str, cells: Sequence[MapCell]) -> str:
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
        cell = found.get((method, place))
        _write(axis, i, j, cell, _text(cell), _STRONGEST)
    axis.set_yticks(range(len(methods)), [*map(named, methods)], fontsize=9)
    titles = [drawing.wrapped(heading(place), 1.1, 9) for place in places]
    axis.set_xticks(range(len(places)), titles, fontsize=9)
    axis.xaxis.tick_top()
    axis.tick_params(length=0)
    bar = figure.colorbar(picture, ax=axis, fraction=0.03, pad=0.01, extend="both")
    bar.set_label("points above or below FedAvg", fontsize=9)
    shown = "test accuracy in points above or below FedAvg, whose row shows percent"
    return drawings.saved(figure, path, f"{data}: {shown}\n{_caption(cells)}", dpi=150)


def _caption(cells: Sequence[MapCell], by: str = "") -> str:
    """What the marks mean. by: the rule that selects FedAvg, if there are several."""
    seeds = max(cell.seeds for cell in cells)
    one = "; ° a network that always answers one class" * any(cell.is_constant for cell in cells)
    if seeds == 1:
        return f"one seed{one}"
    return (
        f"▲ better, ▼ worse than FedAvg{by}; no mark: no difference shown{one}\n"
        f"(paired t test over {seeds} seeds, Holm's correction for all cells)"
    )


def rules(path: Path, data: str, by_rule: Mapping[str, Sequence[MapCell]]) -> str:
    """Draws test accuracies by rule of selection, a panel per kind of shift, a row per method."""
    found = {(c.method, place_of(c), rule): c for rule, of in by_rule.items() for c in of}
    methods, places = ([*dict.fromkeys(at)] for at in list(zip(*found, strict=True))[:2])
    figure = drawing.new(0.75 * len(RULES) * len(places) + 2, 0.27 * len(methods) + 2.6)
    axes = figure.subplots(1, len(places), sharey=True, squeeze=False)[0]
    for axis, place in zip(axes, places, strict=True):
        cells = [[found.get((method, place, rule)) for rule in RULES] for method in methods]
        values = [[cell.difference if cell else np.nan for cell in of] for of in cells]
        axis.set_facecolor("0.93")
        strong = _STRONGEST_BY_RULE
        picture = axis.imshow(values, cmap=_COLOURS, vmin=-strong, vmax=strong, aspect="auto")
        for (i, of), j in itertools.product(enumerate(cells), range(len(RULES))):
            cell = of[j]
            text = ("none" if np.isnan(cell.test) else f"{cell.test:.0f}") if cell else ""
            _write(axis, i, j, cell, text, strong)
        axis.axvline(len(RULES) - 1.5, color="black", lw=1.5)  # before the oracle
        titles = [drawing.wrapped(title, 0.8, 8) for title in RULES.values()]
        axis.set_xticks(range(len(RULES)), titles, fontsize=8)
        axis.set_title(heading(place), fontweight="bold", fontsize=10)
        axis.set_xlabel(SHIFTS[place.partition("=")[0]].note, fontsize=8)
        axis.xaxis.tick_top()
        axis.tick_params(length=0)
    axes[0].set_yticks(range(len(methods)), [*map(named, methods)], fontsize=9)
    bar = figure.colorbar(picture, ax=list(axes), fraction=0.03, pad=0.01, extend="both")
    bar.set_label("points above or below FedAvg by the same rule", fontsize=9)
    every = [cell for of in by_rule.values() for cell in of]
    title = (
        f"{data}: test accuracy in percent, by the rule that selects setting and round\n"
        "none: the rule picks nothing, as the training domains never agreed after a difference\n"
        f"{_caption(every, ' by the same rule, or by validation where it has none')}"
    )
    return drawings.saved(figure, path, title, dpi=150)


def _write(axis: Axes, i: int, j: int, cell: MapCell | None, text: str, strongest: float) -> None:
    """Writes the text of a cell, with marks for a difference from FedAvg and for one class."""
    text += "°" * (cell is not None and cell.is_constant)
    mark = _MARKS.get(cell.word, "") if cell else ""
    is_dark = cell is not None and abs(cell.difference) > 0.7 * strongest
    drawn = axis.text(j, i, f"{text} {mark}".strip(), ha="center", va="center")
    drawn.set_color("white" if is_dark else "black")
    drawn.set_fontweight("bold" if mark else "normal")
    drawn.set_fontsize(6.5 if text[:1].isalpha() else 9)


def _text(cell: MapCell | None) -> str:
    """The difference from FedAvg, of FedAvg the accuracy, or why there is none."""
    if cell is None:
        return "not run"
    if np.isnan(cell.test):
        return "diverged"
    if cell.method == FEDAVG:
        text = f"{cell.test:.1f}"
    elif np.isnan(cell.difference):
        return "no FedAvg"  # to subtract: it diverged, or was not run
    else:
        text = f"{cell.difference:+z.1f}"
    return text


def by_severity(path: Path, data: str, cells: Sequence[MapCell]) -> str:
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
                lines[method] = drawings.Curve(x, np.array([of[severity] for severity in at]).T)
        names = [f"{at:g}" for at in places]
        title = SHIFTS[column].title
        panels.append(drawings.Panel(lines, title, "severity", "test accuracy, %", x_names=names))
    title = f"{data}: accuracy by severity of the shift"
    return drawings.lines(path, title, panels, (3.6, 3.0))
