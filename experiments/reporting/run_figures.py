"""Figures of finished cells."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import selection, tables
from ..parts.objective import Measure
from ..reporting import figures
from ..running import files, log
from ..running.records import Line, Result
from ..selection import Chosen

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SPREAD = 10  # the ratio of the largest error to the smallest from which an axis is logarithmic
MOST_DOTS = 120  # the most domains or clients, over all algorithms, that get a dot each

Drawn = Sequence[tuple[Chosen, Sequence[Line]]]  # cells, with the lines of their logs
Parts = dict[str, float]  # a run's score, by domain or client


def write(
    folder: Path,
    results: Iterable[tuple[str, Path, Result]],
    *,
    title: str,
    rule: str = "validation",
) -> None:
    """Writes curves.png and, if the runs have the numbers for them, the other figures.

    The others are domains.png and clients.png. Figures that are there and show the same are not
    drawn again. Those that the runs have no numbers for are deleted: all, if every cell diverged.

    A cell of which the rule picks nothing is shown as --select=last shows it.

    results: (label, cell's folder, result) of each cell. rule: the rule of selection.
    """
    picked = [
        (selection.choose(label, result, rule) or selection.choose(label, result, "last"), path)
        for label, path, result in results
    ]
    drawn = [
        (one, log.read(path, one.runs[0].last.round)) for one, path in picked if one is not None
    ]
    paints: dict[str, tuple[Any, ...]] = {}
    if drawn:
        paints["curves"] = _curves, drawn, title
        first = drawn[0][0].selected[0]
        splits = [domain.split for domain in first.domains.values()]
        if splits.count("validation") > 1:
            paints["domains"] = _parts, drawn, title, by_domain, "domain"
        if first.score_by_client is not None:
            paints["clients"] = _parts, drawn, title, by_client, "client"
    for name in ("curves", "domains", "clients"):
        if name in paints:
            figures.draw(folder / f"{name}.png", *paints[name])
        else:
            files.remove(folder / f"{name}.png")
            files.remove(folder / f"{name}.pdf")


def mean_and_band(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The mean over seeds, the first axis, and the values one standard deviation around it."""
    mean, std = values.mean(0), values.std(0, ddof=len(values) > 1)
    return mean, mean - std, mean + std


def _panels(
    drawn: Drawn, x_label: str, width: float = 0.0
) -> tuple[Figure, dict[str, Axes], list[str]]:
    """A figure, its panels by held-out domain, and the labels of the cells."""
    held_outs = list(dict.fromkeys(one.held_out for one, _ in drawn))
    labels = list(dict.fromkeys(one.label for one, _ in drawn))
    width = max(width, 6.0 if len(held_outs) == 1 else 4.2)
    name = drawn[0][0].measure.heading()
    figure, axes = figures.panels(len(held_outs), (width, 3.2), x_label=x_label, y_label=name)
    for axis, name in zip(axes, held_outs, strict=True):
        axis.set_title(figures.wrapped(f"held out: {name}", width - 0.6), fontsize=10)
    return figure, dict(zip(held_outs, axes, strict=True)), labels


def _curves(drawn: Drawn, title: str) -> Figure:
    """Draws the score by round: a panel per held-out domain, two lines per algorithm."""
    figure, axes, labels = _panels(drawn, "round")
    for one, lines in drawn:
        number = labels.index(one.label)
        rounds = [line.round for line in lines if line.run == one.indices[0]]
        style = figures.style(number) | {"markevery": figures.spaced(len(rounds), number)}
        for key, how in (("test", {"lw": 1.8}), ("validation", {"lw": 0.7, "mfc": "white"})):
            of_seeds = [
                [getattr(line, f"{key}_score") for line in lines if line.run == index]
                for index in one.indices
            ]
            mean, low, high = mean_and_band(one.measure.factor * np.array(of_seeds))
            axis = axes[one.held_out]
            axis.plot(rounds, mean, **style, **how)
            if key == "test":
                shade = min(0.15, 0.5 / len(labels))
                axis.fill_between(rounds, low, high, color=style["color"], alpha=shade, lw=0)
        figures.whole_numbers(axis)
    _spread_out(list(axes.values()), drawn[0][0].measure)
    kinds = f"held out: {figures.over_seeds(len(drawn[0][0].runs))}; thin: validation"
    figures.entitle(figure, f"{title}\n{kinds}")
    _legend(figure, [figures.style(number) for number in range(len(labels))], labels)
    return figure


def _spread_out(axes: Sequence[Axes], measure: Measure) -> None:
    """Makes the y axes of errors logarithmic if the untrained network's would hide the others."""
    if measure.higher_is_better or measure.is_share:
        return
    heights = [np.asarray(line.get_ydata(), float) for axis in axes for line in axis.lines]
    values = np.concatenate(heights)
    positive = values[values > 0]
    if positive.size and positive.max() > _SPREAD * positive.min():
        for axis in axes:
            figures.logarithmic(axis)


def _legend(figure: Figure, styles: Iterable[dict[str, Any]], labels: Sequence[str]) -> None:
    from matplotlib.lines import Line2D

    figures.legend(figure, [Line2D([], [], **style) for style in styles], labels)


def by_domain(line: Line) -> Parts:
    """The score on each domain; NaN without examples."""
    return {name: tables.score_on(domain) for name, domain in line.domains.items()}


def by_client(line: Line) -> Parts:
    """The test score in each client's proportions of classes.

    It is NaN for a client without examples.
    """
    return {
        str(client): np.nan if score is None else score
        for client, score in enumerate(line.score_by_client or [])
    }


def _parts(drawn: Drawn, title: str, parts_of: Callable[[Line], Parts], what: str) -> Figure:
    """Draws the scores of the selected evaluations, in a panel per held-out domain.

    A panel has a marker per algorithm and part, or for many parts a line per algorithm.
    """
    by_cell = [[parts_of(line) for line in one.selected] for one, _ in drawn]
    held_outs = list(dict.fromkeys(one.held_out for one, _ in drawn))
    # The same names in all panels.
    every = dict.fromkeys(name for runs in by_cell for parts in runs for name in parts)
    first = [name for name in held_outs if name in every and len(held_outs) > 1]
    names = list(dict.fromkeys([*first, *every]))
    num_labels = len({one.label for one, _ in drawn})
    is_few = len(names) * num_labels <= MOST_DOTS
    columns = min(3, len(held_outs))
    width = min(12 / columns, 1 + 0.1 * len(names) * (num_labels + 1)) if is_few else 0
    measure = drawn[0][0].measure
    first_part = "worst" if measure.higher_is_better else "best"
    x_label = what if is_few else f"{what}s, the {first_part} first, %"
    figure, axes, labels = _panels(drawn, x_label, width)
    for (one, _), runs in zip(drawn, by_cell, strict=True):
        number, axis = labels.index(one.label), axes[one.held_out]
        parts = [[run.get(name, np.nan) for name in names] for run in runs]
        values = measure.factor * np.array(parts)
        if is_few:
            draw_dots(axis, values, number, len(labels))
        else:
            draw_quantiles(axis, values, number)
    for held_out, axis in axes.items():
        if measure.is_share:
            axis.set_ylim(-2, 102)
        if is_few:
            figures.name_x(axis, names, figure.get_size_inches()[0] / columns - 0.9)
            axis.set_xlim(-0.5, len(names) - 0.5)
        if is_few and held_out in names:
            at = names.index(held_out)
            axis.axvspan(at - 0.5, at + 0.5, color="0.93", lw=0, zorder=0)
    rules = {one.rule for one, _ in drawn}
    when = "at the last round" if rules == {"last"} else "where selected"
    when += ", else at the last round" if len(rules) > 1 else ""
    quantity = f"{measure.name} {when}"
    if parts_of is by_client:
        quantity += ", on the test in each client's proportions of classes"
    kinds = f"{quantity}; {figures.over_seeds(len(drawn[0][0].runs))}"
    figures.entitle(figure, f"{title}\n{kinds}")
    _legend(figure, [_dot(number, is_few) for number in range(len(labels))], labels)
    return figure


def _dot(number: int, is_few: bool) -> dict[str, Any]:
    return figures.style(number) | ({"ls": ""} if is_few else {})


def draw_dots(axis: Axes, values: np.ndarray, number: int, count: int) -> None:
    """Draws means and standard deviations over seeds at 0, 1, ..., for line `number` of `count`.

    values: [seeds, parts], NaN where there is none.
    """
    shift = (number - (count - 1) / 2) / (count + 1)
    for place, of in enumerate(values.T):
        known = of[np.isfinite(of)]
        if known.size:
            std = known.std(ddof=known.size > 1)
            axis.errorbar(place + shift, known.mean(), std, **_dot(number, True), lw=1)


def draw_quantiles(axis: Axes, values: np.ndarray, number: int) -> None:
    """Draws the quantiles of the parts, as a mean over seeds with a band.

    values: [seeds, parts], NaN where there is none.
    """
    part = np.linspace(0, 1, 101)
    mean, low, high = mean_and_band(np.array([np.nanquantile(of, part) for of in values]))
    style = figures.style(number)
    axis.plot(100 * part, mean, **style, markevery=figures.spaced(101, 3 * number))
    axis.fill_between(100 * part, low, high, color=style["color"], alpha=0.08, lw=0)
