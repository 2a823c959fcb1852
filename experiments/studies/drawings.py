"""The kinds of figures that papers share: lines, points with bars, dots by seed and heat maps.

Each function writes a picture, unless it is there already, and returns the line to print about it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..reporting import figures

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NOTHING = "No figure: nothing was selected in any row."
RANGE = "mean over seeds, and from the worst of them to the best"
DEVIATION = "mean over seeds, bands of one standard deviation"

# quantity -> series -> (x, a value per seed) of each point
Points = Mapping[str, Mapping[str, Sequence[tuple[str, Sequence[float]]]]]


class Line(NamedTuple):
    """A line of a panel."""

    x: np.ndarray  # [points], or [seeds, points]
    y: np.ndarray  # [seeds, points]
    dots: Sequence[tuple[float, float]] = ()  # large dots at (x, y)


class Panel(NamedTuple):
    """A panel of lines."""

    lines: Mapping[str, Line]  # by label
    title: str
    x_label: str
    y_label: str
    log_x: bool = False
    log_y: bool = False
    levels: Mapping[str, float] = {}  # label -> y of a horizontal line
    moments: Mapping[str, float] = {}  # label -> x of a vertical line
    x_names: Sequence[str] = ()  # names at x = 0, 1, ...


class Map(NamedTuple):
    """A heat map."""

    title: str
    values: np.ndarray  # [rows, columns]; NaN for a missing one
    row_names: Sequence[str]


def lines(
    path: Path,
    title: str,
    panels: Sequence[Panel],
    size: tuple[float, float],
    *,
    columns: int = 4,
    spread: str = RANGE,
    percent: bool = False,
) -> str:
    """Draws lines in panels; a label has the same style in all panels.

    Args:
      size: width and height of a panel, in inches.
      columns: how many panels stand side by side.
      spread: RANGE or DEVIATION for the mean over seeds with a band; "" for a line per seed.
      percent: whether the y axes go from 0 to 100.
    """
    if not any(panel.lines for panel in panels):
        return NOTHING
    return _drawn(path, _lines, title, panels, size, columns, spread, percent)


def _lines(
    title: str,
    panels: Sequence[Panel],
    size: tuple[float, float],
    columns: int,
    spread: str,
    percent: bool,
) -> Figure:
    labels = list(dict.fromkeys(label for panel in panels for label in panel.lines))
    columns = min(columns, len(panels))
    height = -(-len(panels) // columns)
    share_x = len({(panel.x_label, *panel.x_names) for panel in panels}) == 1
    share_y = len({panel.y_label for panel in panels}) == 1
    figure = figures.new(size[0] * columns + 0.6, size[1] * height)
    grid = figure.subplots(height, columns, squeeze=False, sharex=share_x, sharey=share_y)
    axes = list(grid.flat)[: len(panels)]
    for unused in list(grid.flat)[len(panels) :]:
        unused.remove()
    for index, (axis, panel) in enumerate(zip(axes, panels, strict=True)):
        for label, line in panel.lines.items():
            _draw_line(axis, line, label, labels.index(label), spread)
        _set_up(axis, panel, size[0])
        if index >= len(panels) - columns:  # the lowest in its column
            axis.set_xlabel(panel.x_label)
            axis.xaxis.set_tick_params(labelbottom=True)
        if index % columns == 0 or not share_y:
            axis.set_ylabel(panel.y_label)
        if percent:
            axis.set_ylim(0, 100)
    one_seed = all(len(line.y) == 1 for panel in panels for line in panel.lines.values())
    caption = figures.over_seeds(1) if spread and one_seed else spread
    figures.entitle(figure, f"{title}\n{caption}".strip())
    figures.legend_of(figure, axes)
    return figure


def _draw_line(axis: Axes, line: Line, label: str, index: int, spread: str) -> None:
    y = np.asarray(line.y)
    style = figures.style(index) | {"markevery": figures.spaced(y.shape[1], index)}
    if spread:
        x, mean = np.asarray(line.x), y.mean(0)
        std = y.std(0, ddof=len(y) > 1)
        low, high = (mean - std, mean + std) if spread == DEVIATION else (y.min(0), y.max(0))
        axis.plot(x, mean, **style, lw=1.4, label=label)
        axis.fill_between(x, low, high, color=style["color"], alpha=0.15, lw=0)
        return
    # Long, swinging curves would cover each other.
    width, alpha = (0.5, 0.35) if len(y) > 1 and y.shape[1] > 100 else (1.2, 0.8)
    for x, values in zip(np.broadcast_to(line.x, y.shape), y, strict=True):
        axis.plot(x, values, **style, lw=width, alpha=alpha, label=label)
    for at in line.dots:
        axis.plot(*at, "o", color=style["color"], ms=7)


def _set_up(axis: Axes, panel: Panel, inches: float) -> None:
    """Draws the title, scales, ticks and straight lines of a panel."""
    axis.set_title(figures.wrapped(panel.title, inches), fontsize=10)
    for label, y in panel.levels.items():
        axis.axhline(y, color="0.6", lw=0.8, ls=":", label=label)
    for label, x in panel.moments.items():
        axis.axvline(x, color="C3", lw=1, ls="-.", label=label)
    if panel.log_x:
        axis.set_xscale("log")
    elif panel.x_names:
        axis.set_xticks(range(len(panel.x_names)), panel.x_names)
        axis.set_xlim(-0.25, len(panel.x_names) - 0.75)
        axis.grid(axis="y", color="0.92")
    else:
        figures.whole_numbers(axis)
    if panel.log_y:
        axis.set_yscale("log")


def against(path: Path, title: str, x_label: str, points: Points) -> str:
    """Draws means and standard deviations against x: a panel per quantity, a line per series.

    The axis of a quantity in "%" goes from 0 to 100.
    """
    return _drawn(path, _against, title, x_label, points)


def _against(title: str, x_label: str, points: Points) -> Figure:
    figure = figures.new(5 * len(points), 3.6)
    axes = figure.subplots(1, len(points), squeeze=False)[0]
    for axis, (quantity, series) in zip(axes, points.items(), strict=True):
        for index, (name, line) in enumerate(series.items()):
            places = [figures.literal(x) for x, _ in line]
            _bars(axis, places, [values for _, values in line], name, index)
        axis.set(xlabel=x_label, ylabel=quantity)
        if quantity.endswith("%"):
            axis.set_ylim(0, 100)
    every = [line for series in points.values() for line in series.values()]
    num_seeds = max((len(values) for line in every for _, values in line), default=0)
    figures.entitle(figure, f"{title}\n{figures.over_seeds(num_seeds)}")
    figures.legend_of(figure, axes)
    return figure


def dots(
    path: Path, title: str, y_label: str, points: Mapping[str, Mapping[str, Sequence[float]]]
) -> str:
    """Draws mean, standard deviation and a dot per seed, with series side by side at each place.

    Args:
      points: series -> place -> a value per seed. If there is one place, x shows the series.
    """
    if not any(points.values()):
        return NOTHING
    return _drawn(path, _dots, title, y_label, points)


def _dots(title: str, y_label: str, points: Mapping[str, Mapping[str, Sequence[float]]]) -> Figure:
    places = list(dict.fromkeys(place for series in points.values() for place in series))
    several = len(places) > 1
    ticks = places if several else list(points)
    figure = figures.new(max(6.0, 1.3 * len(ticks)), 3.8)
    axis = figure.subplots()
    for index, (name, series) in enumerate(points.items()):
        shift = (index - (len(points) - 1) / 2) / (len(points) + 1)
        style = figures.style(index)
        for place, values in series.items():
            x = places.index(place) + shift if several else float(index)
            _bars(axis, [x], [values], name, index)
            beside = [x + 0.08] * len(values)
            axis.plot(beside, values, style["marker"], color=style["color"], ms=2, alpha=0.6)
    axis.set_xticks(range(len(ticks)), ticks)
    axis.set_ylabel(y_label)
    figures.entitle(figure, title)
    if several:
        figures.legend_of(figure, [axis])
    return figure


def _bars(
    axis: Axes,
    x: Sequence[str] | Sequence[float],
    values: Sequence[Sequence[float]],
    label: str,
    index: int,
) -> None:
    """Draws mean and standard deviation of the values at each x, if there are any."""
    by_seed = [list(each) or [np.nan] for each in values]
    means = [np.mean(each) for each in by_seed]
    stds = [np.std(each, ddof=len(each) > 1) for each in by_seed]
    axis.errorbar(x, means, stds, label=label, capsize=3, **figures.style(index))


def maps(
    path: Path,
    title: str,
    panels: Sequence[Map],
    column_names: Sequence[str],
    labels: tuple[str, str],
    *,
    limits: tuple[float, float] | None = None,
    decimals: int = 1,
    missing: str = "none",
) -> str:
    """Draws heat maps of test accuracies in percent, with the numbers in the cells.

    Args:
      labels: of the x and y axes.
      limits: the accuracies at the ends of the colour scale; by default the lowest and highest.
      missing: the text of a cell without an accuracy.
    """
    every = [value for panel in panels for value in panel.values.flat if not np.isnan(value)]
    if not every:
        return NOTHING
    ends = limits or (min(every), max(every))
    return _drawn(path, _maps, title, panels, column_names, labels, ends, decimals, missing)


def _maps(
    title: str,
    panels: Sequence[Map],
    column_names: Sequence[str],
    labels: tuple[str, str],
    ends: tuple[float, float],
    decimals: int,
    missing: str,
) -> Figure:
    low, high = ends
    figure = figures.new(4 * len(panels) + 0.8, 4.0)
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, panel in zip(axes, panels, strict=True):
        picture = axis.imshow(panel.values, cmap="viridis", vmin=low, vmax=high, aspect="auto")
        for (i, j), value in np.ndenumerate(panel.values):
            text = missing if np.isnan(value) else f"{value:.{decimals}f}"
            color = "white" if value < (low + high) / 2 else "black"
            axis.text(j, i, text, ha="center", va="center", fontsize=7, color=color)
        axis.set_xticks(range(len(column_names)), column_names)
        axis.set_yticks(range(len(panel.row_names)), panel.row_names)
        axis.set(title=panel.title, xlabel=labels[0], ylabel=labels[1] if axis is axes[0] else "")
    figure.colorbar(picture, ax=list(axes), label="test accuracy, %")
    figures.entitle(figure, title)
    return figure


def _drawn(path: Path, paint: Callable[..., Figure], *shown: Any) -> str:
    figures.draw(path, paint, *shown)
    return f"Figure: {path}."
