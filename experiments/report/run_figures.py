"""The figures of finished cells, as wide as a column or a page of a paper."""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter

from fedjax_inv.data.federation import UNSEEN

from ..assembly.metrics import Measure
from ..folder import files, log, selection
from ..folder.records import Line
from ..folder.selection import Chosen
from . import differences, figures, tables
from .differences import ScoreColumn
from .tables import TableCell

_COLUMN = 3.17
_PAGE = 6.48  # inches, as those of tables
_TEXT = 8  # points
_SPREAD = 10  # the ratio of the largest error to the smallest from which an axis is logarithmic
# Of the lines in curves of examples that no client holds, besides the test.
_PALE: dict[str, dict[str, Any]] = {
    "unseen domain": {"lw": 1.0, "alpha": 0.4},
    "clients never seen (white markers)": {"lw": 1.0, "alpha": 0.4, "mfc": "white"},
    "test of known domains (dotted)": {"lw": 1.0, "alpha": 0.4, "ls": ":"},
}
MOST_DOTS = 120  # the most domains or clients, over all methods, that get a dot each


class Drawn(NamedTuple):
    """What the figures of cells show."""

    cells: Sequence[tuple[Chosen, Sequence[Line]]]  # with the lines of their logs
    names: Mapping[str, str]  # by the labels of all methods, also of those without a cell
    title: str

    @property
    def labels(self) -> list[str]:
        """The labels of all methods."""
        return [*self.names]

    @property
    def held_out(self) -> list[str]:
        """The held-out domains."""
        return [*dict.fromkeys(one.held_out for one, _ in self.cells)]

    @property
    def measure(self) -> Measure:
        """How to read the scores."""
        return self.cells[0][0].measure

    @property
    def over_seeds(self) -> str:
        """The caption of means over seeds."""
        return figures.over_seeds(len(self.cells[0][0].runs))


Parts = dict[str, float]  # a run's score, by domain or client


def write(folder: Path, cells: Sequence[TableCell], title: str) -> None:
    """Writes curves.png and, if the runs have the numbers for them, domains.png and clients.png.

    Figures that the runs have no numbers for are deleted: all, if every cell diverged. A cell of
    which its rule picks nothing is shown as --select=last shows it.
    """
    shown = []
    for cell in cells:
        last = selection.choose(cell.label, cell.result, "last")
        if one := cell.chosen or last:
            shown.append((one, log.read(cell.folder, one.runs[0].last.round)))
    drawn = Drawn(shown, tables.names_of(cells), title)
    paints: dict[str, Callable[[Drawn], Figure]] = {}
    if shown:
        paints["curves"] = _curves
        first = shown[0][0].selected[0]
        splits = [domain.split for domain in first.domains.values()]
        if splits.count("validation") > 1:
            paints["domains"] = _by_domain
        if first.score_by_client is not None:
            paints["clients"] = _by_client
    for name in ("curves", "domains", "clients"):
        if name in paints:
            figures.draw(folder / f"{name}.png", paints[name], drawn, dpi=200)
        else:
            files.remove(folder / f"{name}.png")
            files.remove(folder / f"{name}.pdf")


def _small(paint: Callable[..., Figure]) -> Callable[..., Figure]:
    """Draws with the text size of a paper."""

    @functools.wraps(paint)
    def painted(*shown: Any) -> Figure:
        sizes: list[Any] = ["font.size", "axes.titlesize", "axes.labelsize", "legend.fontsize"]
        sizes += ["xtick.labelsize", "ytick.labelsize"]
        with matplotlib.rc_context(dict.fromkeys(sizes, _TEXT)):
            return paint(*shown)

    return painted


def _in_a_row(count: int) -> int:
    """How many of so many panels stand side by side: all of four, else so that few are missing."""
    return count if count <= 4 else min((4, 5, 3), key=lambda columns: -count % columns)


def _panels(drawn: Drawn, x_label: str, width: float) -> tuple[Figure, dict[str, Axes]]:
    """A figure, and its panels by held-out domain. width: of the figure, in inches."""
    names = drawn.held_out
    count = len(names)
    columns = _in_a_row(len(names))
    size = ((width - 0.6) / columns, 2.1 if columns < 3 else 1.9)
    heading = drawn.measure.heading()
    figure, axes = figures.panels(count, size, x_label=x_label, y_label=heading, columns=columns)
    for axis, name in zip(axes, names, strict=True):
        axis.set_title(figures.wrapped(f"held out: {name}", size[0], _TEXT))
        axis.xaxis.set_tick_params(labelbottom=True)
    return figure, dict(zip(names, axes, strict=True))


def _finish(figure: Figure, drawn: Drawn, about: str, **more: Any) -> Figure:
    """Adds the title and a legend of all methods. more: what differs from their `styles`."""
    figures.entitle(figure, f"{drawn.title}\n{about}", _TEXT)
    there = {one.label for one, _ in drawn.cells}
    styles = figures.styles(drawn.labels)
    lines = [Line2D([], [], **styles[label] | more) for label in drawn.labels]
    texts = [name if label in there else f"{name}: diverged" for label, name in drawn.names.items()]
    figures.legend(figure, lines, texts, _TEXT)
    return figure


@_small
def _curves(drawn: Drawn) -> Figure:
    """Draws the score by round: a panel per held-out domain, two lines or more per method."""
    is_narrow = len(drawn.held_out) == 1 and len(drawn.labels) <= 6
    figure, axes = _panels(drawn, "round", _COLUMN if is_narrow else _PAGE)
    kinds: dict[str, str] = {}
    for one, lines in drawn.cells:
        axis = axes[one.held_out]
        of_runs = [[line for line in lines if line.run == index] for index in one.indices]
        rounds = [line.round for line in of_runs[0]]
        number = drawn.labels.index(one.label)
        how = figures.styles(drawn.labels)[one.label]
        how |= {"markevery": figures.spaced(len(rounds), number), "ms": 3}
        splits = {domain.split for domain in of_runs[0][0].domains.values()}
        for kind, (name, pale) in zip(UNSEEN, _PALE.items(), strict=True):
            if kind in splits:
                unseen = np.array([[selection.score_on(x, kind) for x in run] for run in of_runs])
                values = one.measure.factor * unseen
                figures.draw_mean(axis, rounds, values, 0, **how | pale)
                kinds[kind] = f"; pale: {name}"
        for name, more in (("test", {"lw": 1.4}), ("validation", {"lw": 0.6, "mfc": "white"})):
            scores = [[line[f"{name}_score"] for line in of_run] for of_run in of_runs]
            shade = min(0.15, 0.5 / len(drawn.labels)) * (name == "test")
            values = one.measure.factor * np.array(scores)
            figures.draw_mean(axis, rounds, values, shade, **how | more)
        figures.whole_numbers(axis)
    _spread_out([*axes.values()], drawn.measure)
    about = f"held out: {drawn.over_seeds}; thin: validation{''.join(kinds.values())}"
    return _finish(figure, drawn, about)


def _spread_out(axes: Sequence[Axes], measure: Measure) -> None:
    """Makes the y axes of errors logarithmic if the untrained network's would hide the others."""
    if measure.higher_is_better or measure.is_share:
        return
    values = np.concatenate([line.get_ydata() for axis in axes for line in axis.lines])
    positive = values[values > 0]
    if not positive.size or positive.max() <= _SPREAD * positive.min():
        return
    for axis in axes:
        axis.set_yscale("log")
        low, high = axis.get_ylim()
        # Of many decades, more numbers would overlap.
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 1e4 * low else (1,)))
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter(NullFormatter())


@_small
def _by_domain(drawn: Drawn) -> Figure:
    """Draws the score on each domain where selected, a panel per held-out domain."""
    cells = [
        [{name: tables.score_on(of) for name, of in line.domains.items()} for line in one.selected]
        for one, _ in drawn.cells
    ]
    return _parts(drawn, cells, "domain")


@_small
def _by_client(drawn: Drawn) -> Figure:
    """Draws the test score in each client's proportions of classes, as `_by_domain`."""
    cells = [[_of_clients(line) for line in one.selected] for one, _ in drawn.cells]
    return _parts(drawn, cells, "client", ", on the test in each client's proportions of classes")


def _of_clients(line: Line) -> Parts:
    """The score by client; NaN without test examples."""
    scores = enumerate(line.score_by_client or [])
    return {str(client): np.nan if score is None else score for client, score in scores}


def _parts(drawn: Drawn, cells: Sequence[Sequence[Parts]], what: str, how: str = "") -> Figure:
    """Draws scores by part: a dot per method and part, or of many parts a line per method.

    cells: the parts of each seed, of each of the cells that are drawn.
    """
    names = _names(drawn, cells)
    num_dots = len(names) * len(drawn.labels)
    is_narrow = len(drawn.held_out) == 1 and num_dots <= 24
    width = _COLUMN if is_narrow else _PAGE
    first = "worst" if drawn.measure.higher_is_better else "best"
    are_few = num_dots <= MOST_DOTS
    x_label = what if are_few else f"{what}s, the {first} first, %"
    figure, axes = _panels(drawn, x_label, width)
    for (one, _), parts in zip(drawn.cells, cells, strict=True):
        rows = [[of_seed.get(name, np.nan) for name in names] for of_seed in parts]
        scores = drawn.measure.factor * np.array(rows)
        paint = draw_dots if are_few else draw_quantiles
        paint(axes[one.held_out], scores, drawn.labels, drawn.labels.index(one.label))
    for held_out, axis in axes.items():
        if drawn.measure.is_share:
            axis.set_ylim(-2, 102)
        if are_few:
            _name_parts(axis, names, held_out, (width - 0.6) / _in_a_row(len(axes)) - 0.3)
    rules = {one.rule for one, _ in drawn.cells}
    when = "at the last round" if rules == {"last"} else "where selected"
    when += ", else at the last round" if len(rules) > 1 else ""
    about = f"{drawn.measure.name} {when}{how}; {drawn.over_seeds}"
    return _finish(figure, drawn, about, **({"ls": ""} if are_few else {}))


def _names(drawn: Drawn, cells: Sequence[Sequence[Parts]]) -> list[str]:
    """The parts, the same in all panels; of several held-out domains, these come first."""
    every = dict.fromkeys(name for runs in cells for parts in runs for name in parts)
    first = [name for name in drawn.held_out if name in every and len(drawn.held_out) > 1]
    return [*dict.fromkeys([*first, *every])]


def _name_parts(axis: Axes, names: Sequence[str], held_out: str, inches: float) -> None:
    """Names the parts at the x axis, and shades the held-out domain."""
    figures.name_x(axis, names, inches, _TEXT - 1)
    axis.set_xlim(-0.5, len(names) - 0.5)
    if held_out in names:
        at = names.index(held_out)
        axis.axvspan(at - 0.5, at + 0.5, color="0.93", lw=0, zorder=0)


def draw_dots(axis: Axes, values: np.ndarray, labels: Sequence[str], number: int) -> None:
    """Draws means and standard deviations over seeds at 0, 1, ..., for the label of this number.

    values: [seeds, parts], NaN where there is none.
    """
    count = len(labels)
    how = figures.styles(labels)[labels[number]] | {"ls": "", "ms": 3}
    shift = (number - (count - 1) / 2) / (count + 1)
    for place, of_part in enumerate(values.T):
        known = of_part[np.isfinite(of_part)]
        if known.size:
            std = known.std(ddof=known.size > 1)
            axis.errorbar(place + shift, known.mean(), std, **how, lw=1)


def draw_quantiles(axis: Axes, values: np.ndarray, labels: Sequence[str], number: int) -> None:
    """Draws the quantiles of the parts, as a mean over seeds with a band; as `draw_dots`."""
    quantiles = np.nanquantile(values, np.linspace(0, 1, 101), axis=1).T
    how = figures.styles(labels)[labels[number]] | {"markevery": figures.spaced(101, 3 * number)}
    figures.draw_mean(axis, np.arange(101), quantiles, 0.08, **how)


@_small
def methods(columns: Sequence[ScoreColumn], title: str, names: Mapping[str, str]) -> Figure:
    """Draws each method's mean test score with its 95% interval over seeds, a line per method.

    columns: the scores by each rule of selection, as `tables.by_rule`; several have a colour each.
    names: label -> how the figure calls it.
    """
    labels = [*columns[0].scores]
    several = min(0.11 * len(columns), max(0.3, 4 / len(labels)))  # inches of a method
    figure = figures.new(_COLUMN, max(0.22, several) * len(labels) + 0.5)
    axis = figure.add_subplot()
    of_method = figures.styles(labels)
    of_rule = _styles_of_rules([column.heading for column in columns])
    for number, column in enumerate(columns):
        shift = (number - (len(columns) - 1) / 2) / (len(columns) + 1)
        for place, label in enumerate(labels):
            style = of_method[label] if len(columns) == 1 else of_rule[column.heading]
            _draw_interval(axis, place + shift, column, label, style | {"ls": ""})
    for place, label in enumerate(labels):
        axis.axhline(place + 0.5, color="0.92", lw=0.8, zorder=0)
        if all(column.scores[label].isna().all() for column in columns):
            axis.text(0.5, place, "no value", transform=axis.get_yaxis_transform(), va="center")
    shown = [figures.wrapped(names.get(label, label), 1.3, _TEXT) for label in labels]
    axis.set_yticks(range(len(labels)), shown)
    axis.set_ylim(len(labels) - 0.5, -0.5)
    axis.grid(axis="x", color="0.92")
    axis.set_axisbelow(True)
    axis.set_xlabel(f"test {columns[0].measure.heading()}")
    if columns[0].measure.is_share:  # an interval of two seeds may leave what a share can be
        low, high = axis.get_xlim()
        axis.set_xlim(max(low, -2), min(high, 102))
    seeds = max(int(column.scores.notna().sum().max()) for column in columns)
    about = "one seed" if seeds == 1 else f"mean and its 95% interval over {seeds} seeds"
    figures.entitle(figure, f"{title}\n{about}", _TEXT)
    if len(columns) > 1:
        lines = [Line2D([], [], **style | {"ls": ""}) for style in of_rule.values()]
        figures.legend(figure, lines, [*of_rule], _TEXT)
    return figure


def _styles_of_rules(headings: Sequence[str]) -> dict[str, dict[str, Any]]:
    """A style for each rule, in the colours that most people tell apart."""
    styles = figures.styles(headings)
    colors = itertools.cycle(figures.FIRST)
    return {name: style | {"color": next(colors)} for name, style in styles.items()}


def _draw_interval(
    axis: Axes, place: float, column: ScoreColumn, label: str, style: Mapping[str, Any]
) -> None:
    """Draws the mean of a method's scores and its 95% interval; nothing without a score."""
    values = column.measure.factor * column.scores[label].dropna().to_numpy(float)
    half = None
    if len(values) > 1:
        mean, low, _ = differences.interval(values.tolist())
        half = mean - low
    if len(values):
        axis.errorbar(values.mean(), place, xerr=half, capsize=2, lw=1, **style)
