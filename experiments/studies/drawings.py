"""The drawings that studies share: lines, points with bars, and heat maps.

Each function writes a picture and returns the line to print about it.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..report import figures
from ..report.names import named

_MOST = 100  # points of a curve
NOTHING = "No figure: nothing was selected in any row."

# series -> (x, a value per seed) of each point
Series = Mapping[str, Sequence[tuple[str, Sequence[float]]]]
Points = Mapping[str, Series]  # by quantity


class Curve(NamedTuple):
    """A line of a panel."""

    x: np.ndarray  # [points], or [seeds, points]
    y: np.ndarray  # [seeds, points]
    dots: Sequence[tuple[float, float]] = ()  # large dots at (x, y)


class Panel(NamedTuple):
    """A panel of lines."""

    lines: Mapping[str, Curve]  # by label
    title: str
    x_label: str
    y_label: str
    x_scale: str = "linear"
    y_scale: str = "linear"
    levels: Mapping[str, float] = {}  # label -> y of a horizontal line
    moments: Mapping[str, float] = {}  # label -> x of a vertical line
    x_names: Sequence[str] = ()  # names at x = 0, 1, ...


def lines(
    path: Path,
    title: str,
    panels: Sequence[Panel],
    size: tuple[float, float],
    *,
    columns: int = 4,
    percent: bool = False,
) -> str:
    """Draws lines in panels; a label has the same style in all panels.

    Args:
      size: width and height of a panel, in inches.
      columns: how many panels stand side by side.
      percent: whether the y axes go from 0 to 100.
    """
    labels = list(dict.fromkeys(label for panel in panels for label in panel.lines))
    if not labels:
        return NOTHING
    styles = figures.styles(labels)
    figure, axes = figures.panels(len(panels), size, columns=columns, share=False)
    for axis, panel in zip(axes, panels, strict=True):
        for label, line in panel.lines.items():
            x, y = _thinned(line)
            every = figures.spaced(y.shape[1], labels.index(label))
            how = styles[label] | {"markevery": every, "lw": 1.4}
            figures.draw_mean(axis, x, y, 0.15, **how, label=named(label))
            for at in line.dots:
                axis.plot(*at, "o", color=how["color"], mec="white", mew=0.5, ms=6)
        _set_up(axis, panel, size[0])
        if percent:
            axis.set_ylim(0, 100)
    num_seeds = max(len(line.y) for panel in panels for line in panel.lines.values())
    figures.legend_of(figure, axes)
    return saved(figure, path, f"{title}\n{figures.over_seeds(num_seeds)}")


def _thinned(line: Curve) -> tuple[np.ndarray, np.ndarray]:
    """x [points] and y [values, points] of a line.

    Of a long line of several seeds a point has some rounds, so that a swing between them is in its
    band.
    """
    y = np.asarray(line.y)
    x = np.broadcast_to(line.x, y.shape).mean(0)
    step = -(-len(x) // _MOST) if len(y) > 1 else 1
    count = len(x) // step
    blocks = y[:, : count * step].reshape(-1, count, step).swapaxes(1, 2)
    return x[: count * step].reshape(count, step).mean(1), blocks.reshape(-1, count)


def _set_up(axis: Axes, panel: Panel, inches: float) -> None:
    """Draws the title, labels, scales, ticks and straight lines of a panel."""
    axis.set_title(figures.wrapped(panel.title, inches), fontsize=10)
    axis.set(xlabel=panel.x_label, ylabel=panel.y_label, yscale=panel.y_scale)
    for label, y in panel.levels.items():
        axis.axhline(y, color="0.6", lw=0.8, ls=":", label=label)
    for label, x in panel.moments.items():
        axis.axvline(x, color="C3", lw=1, ls="-.", label=label)
    if panel.x_names:
        axis.set_xticks(range(len(panel.x_names)), panel.x_names)
        axis.set_xlim(-0.25, len(panel.x_names) - 0.75)
        axis.grid(axis="y", color="0.92")
    elif panel.x_scale == "linear":
        figures.whole_numbers(axis)
    else:
        axis.set_xscale(panel.x_scale)


def against(path: Path, title: str, x_label: str, points: Points, *, is_joined: bool = True) -> str:
    """Draws mean, deviation and seeds against x: a panel per quantity, a line per series.

    The axis of a quantity in "%" goes from 0 to 100. is_joined: whether lines join the points;
    otherwise those of one x stand side by side.
    """
    if not points:
        return NOTHING
    in_a_row = min(3, len(points))
    rows = -(-len(points) // in_a_row)
    width = 5.0 if is_joined else _width_side_by_side(points, 12 / in_a_row)
    figure = figures.new(width * in_a_row, 3.6 * rows)
    for number, (quantity, series) in enumerate(points.items(), start=1):
        axis = figure.add_subplot(rows, in_a_row, number)
        if is_joined:
            _join(axis, series)
        else:
            _stand_side_by_side(axis, series, width)
        axis.set(xlabel=x_label, ylabel=quantity)
        if quantity.endswith("%"):
            axis.set_ylim(0, 100)
    figures.legend_of(figure, figure.axes)
    seeds = [len(values) for of in points.values() for line in of.values() for _, values in line]
    return saved(figure, path, f"{title}\n{figures.over_seeds(max(seeds, default=0))}")


def _names(series: Series) -> list[str]:
    """The names along x, in order."""
    return [*dict.fromkeys(name for line in series.values() for name, _ in line)]


def _width_side_by_side(points: Points, most: float) -> float:
    """The width of a panel in which the points of a name stand side by side, in inches."""
    dots = max(len(_names(series)) * (len(series) + 1) for series in points.values())
    return max(5.0, min(1 + 0.12 * dots, most))


def _join(axis: Axes, series: Series) -> None:
    """Draws a line per series."""
    for name, style in figures.styles(series).items():
        places = [figures.literal(place) for place, _ in series[name]]
        _draw_points(axis, name, places, [values for _, values in series[name]], style)


def _stand_side_by_side(axis: Axes, series: Series, width: float) -> None:
    """Draws the points of a name side by side, one per series. width: of the panel, in inches."""
    names = _names(series)
    for number, (name, style) in enumerate(figures.styles(series).items()):
        shift = (number - (len(series) - 1) / 2) / (len(series) + 1)
        places = [names.index(place) + shift for place, _ in series[name]]
        values = [of for _, of in series[name]]
        _draw_points(axis, name, places, values, style | {"ls": ""})
    figures.name_x(axis, names, width - 0.9)
    axis.set_xlim(-0.5, len(names) - 0.5)


def _draw_points(
    axis: Axes,
    name: str,
    places: Sequence[Any],
    values: Sequence[Sequence[float]],
    style: Mapping[str, Any],
) -> None:
    """Draws the mean and deviation of each point, and its seeds."""
    known = [of or [np.nan] for of in map(list, values)]
    means = [np.mean(of) for of in known]
    deviations = [np.std(of, ddof=len(of) > 1) for of in known]
    axis.errorbar(places, means, deviations, label=named(name), capsize=3, **style)
    seeds = {"mfc": "white", "mec": style["color"], "ms": 3, "mew": 0.7, "zorder": 3}
    for place, of in zip(places, known, strict=True):
        axis.plot([place] * len(of), of, "o", **seeds)


def maps(
    path: Path,
    title: str,
    panels: Mapping[str, np.ndarray],
    names: Sequence[str],
    labels: tuple[str, str],
) -> str:
    """Draws heat maps of test accuracies in percent, with the numbers in the cells.

    Args:
      panels: title -> accuracies [n, n], NaN for a missing one.
      names: of the n rows, and of the columns.
      labels: of the x and y axes.
    """
    if not panels:
        return NOTHING
    every = np.stack([*panels.values()])
    low = np.nanmin(every)
    high = np.nanmax(every)
    figure = figures.new(4 * len(panels) + 0.8, 4.0)
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, (name, values) in zip(axes, panels.items(), strict=True):
        picture = axis.imshow(values, cmap="viridis", vmin=low, vmax=high, aspect="auto")
        for (i, j), value in np.ndenumerate(values):
            text = "none" if np.isnan(value) else f"{value:.1f}"
            color = "white" if value < (low + high) / 2 else "black"
            axis.text(j, i, text, ha="center", va="center", fontsize=7, color=color)
        axis.set_xticks(range(len(names)), names)
        axis.set_yticks(range(len(names)), names)
        axis.set(title=name, xlabel=labels[0], ylabel=labels[1])
    figure.colorbar(picture, ax=list(axes), label="test accuracy, %")
    return saved(figure, path, title)


def saved(figure: Figure, path: Path, title: str, dpi: float = 120) -> str:
    """Writes a figure with a title, and returns the line to print about it."""
    figures.entitle(figure, title)
    figures.save(figure, path, dpi)
    return f"Figure: {path}."
