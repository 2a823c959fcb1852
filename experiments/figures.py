"""Figures: literal texts, styles of lines, panels, legends and files; and the figures of a run."""

import hashlib
import importlib.metadata
import io
import math
import pickle
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import hsv_to_rgb, to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter
from PIL import Image

from fedjax_inv.data.federation import UNSEEN

from . import selection, tables
from .metrics import Measure
from .names import METHODS, named
from .running import files, log
from .running.records import Line, Result
from .selection import Chosen

_LINES = ("-", "--", ":", "-.", (0, (8, 2)))
_MARKERS = "osv^D<>PX*d"  # 11 markers and 5 lines share no factor: 55 pairs
_PLAIN = ["".join(filter(str.isalnum, name)).lower() for name in METHODS.values()]
# Of the first methods: colours that most colour-blind people tell apart (Okabe and Ito).
_FIRST = ("#777777", "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9")
_CHARACTER = 0.62  # the width of most characters, as a part of the font size
_LINE = 1.5  # the height of a line of text, as a part of the font size
_LONGEST = 24  # characters of a name at an axis
_MOST_PIXELS = 60_000  # a side of the largest PNG that matplotlib can write
_DIGEST = "Data-SHA256"  # the entry of a PNG with the digest of what it shows


def new(width: float, height: float) -> Figure:
    """An empty figure, in inches."""
    return Figure(figsize=(width, height), layout="constrained")


def literal(text: str) -> str:
    """A text that matplotlib draws literally: it would typeset text between two dollar signs."""
    return text.replace("$", r"\$")


def wrapped(text: str, inches: float, size: float = 10) -> str:
    """A literal text in lines that are at most so many inches wide."""
    characters = max(8, int(inches * 72 / (_CHARACTER * size)))
    lines = [textwrap.wrap(line, characters) or [""] for line in text.splitlines()]
    return literal("\n".join(line for part in lines for line in part))


def styles(labels: Iterable[str]) -> dict[str, dict[str, Any]]:
    """The colour, dashes and marker of the line of each label.

    A method has the same colour in every figure, and its variants are lighter. Lines differ in grey
    print, too.
    """
    found: dict[str, dict[str, Any]] = {}
    seen: Counter[int] = Counter()
    for index, label in enumerate(labels):
        plain = "".join(filter(str.isalnum, named(label))).lower()
        methods = [at for at, each in enumerate(_PLAIN) if each in plain]
        at = max(methods, key=lambda at: len(_PLAIN[at])) if methods else len(_PLAIN) + index
        # Hues that are a golden section apart are far apart for neighbours.
        hue = np.array(hsv_to_rgb((0.618 * at % 1, 0.75, 0.9 - 0.15 * (at % 3))))
        color = np.array(to_rgb(_FIRST[at])) if at < len(_FIRST) else hue
        color, seen[at] = (2 * color + seen[at]) / (2 + seen[at]), seen[at] + 1
        marks = {"ls": _LINES[index % len(_LINES)], "marker": _MARKERS[index % len(_MARKERS)]}
        found[label] = {"color": tuple(color.tolist()), "ms": 4, **marks}
    return found


def over_seeds(count: int) -> str:
    """The caption of a mean over seeds with bars or a band."""
    return "one seed" if count == 1 else f"mean and standard deviation over {count} seeds"


def spaced(count: int, index: int = 0) -> tuple[int, int]:
    """`markevery` of a line of `count` points: few markers, at other points than other lines."""
    step = max(1, count // 8)
    return (index % step, step)


def whole_numbers(axis: Axes) -> None:
    """Sets ticks at whole numbers on an x axis."""
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))


def panels(
    count: int,
    size: tuple[float, float],
    *,
    x_label: str = "",
    y_label: str = "",
    columns: int = 3,
    share: bool = True,
) -> tuple[Figure, list[Axes]]:
    """A figure of `count` panels. size: width and height of a panel, in inches.

    Each column of panels has the label of the x axis, and each line of panels that of the y axis.
    share: whether the panels have common axes.
    """
    columns = min(columns, count)
    lines = -(-count // columns)
    figure = new(size[0] * columns + 0.6, size[1] * lines)
    axes = list(figure.subplots(lines, columns, squeeze=False, sharex=share, sharey=share).flat)
    for unused in axes[count:]:
        unused.remove()
    axes = axes[:count]
    for axis in axes[-columns:]:  # the lowest in each column
        axis.set_xlabel(x_label)
        axis.xaxis.set_tick_params(labelbottom=True)
    for axis in axes[::columns]:
        axis.set_ylabel(y_label)
    return figure, axes


def entitle(figure: Figure, text: str) -> None:
    """Adds a title no wider than the figure; the figure grows by the title's height."""
    width, height = figure.get_size_inches()
    lines = wrapped(text, width - 0.2)
    figure.suptitle(lines, fontsize=10)
    figure.set_size_inches(width, height + _LINE * 10 / 72 * (lines.count("\n") + 1))


def legend(figure: Figure, handles: Sequence[Artist], names: Sequence[str]) -> None:
    """Adds a legend under the panels, in as many columns as fit into the figure's width.

    The figure grows by the height of the legend.
    """
    if not names:
        return
    width, height = figure.get_size_inches()
    texts = [wrapped(name, width - 1, 9) for name in names]
    how: dict[str, Any] = dict(loc="outside lower center", frameon=False, fontsize=9)
    for columns in range(min(len(texts), 8), 0, -1):
        # The handles are long enough for the longest dashes.
        drawn = figure.legend(handles, texts, ncols=columns, handlelength=4, **how)
        box = drawn.get_window_extent()
        if box.width <= 0.98 * figure.bbox.width or columns == 1:
            figure.set_size_inches(width, height + box.height / figure.dpi)
            return
        drawn.remove()


def legend_of(figure: Figure, axes: Sequence[Axes]) -> None:
    """Adds a legend of everything with a name in any panel."""
    by_name: dict[str, Artist] = {}
    for axis in axes:
        for handle, name in zip(*axis.get_legend_handles_labels(), strict=True):
            by_name.setdefault(name, handle)
    legend(figure, list(by_name.values()), list(by_name))


def legend_of_methods(figure: Figure, labels: Sequence[str], **more: Any) -> None:
    """Adds a legend of lines by their labels. more: what differs from their `style`."""
    lines = [Line2D([], [], **style | more) for style in styles(labels).values()]
    legend(figure, lines, [*map(named, labels)])


def name_x(axis: Axes, names: Sequence[str], inches: float, size: float = 8) -> None:
    """Puts names at 0, 1, ... of an x axis so many inches long; upright if they would overlap."""
    high = _LINE * size / 72
    wide = _CHARACTER * size / 72 * max(map(len, _cut(names)), default=0) + high / 2
    fits = wide * len(names) <= inches
    places, texts = _thinned(names, wide if fits else high, inches)
    axis.set_xticks(places, texts, fontsize=size, rotation=0 if fits else 90)


def name_y(axis: Axes, names: Sequence[str], inches: float, size: float = 8) -> None:
    """Puts names at 0, 1, ... of a y axis so many inches long."""
    places, texts = _thinned(names, _LINE * size / 72, inches)
    axis.set_yticks(places, texts, fontsize=size)


def _cut(names: Sequence[str]) -> list[str]:
    return [name if len(name) <= _LONGEST else name[: _LONGEST - 1] + "…" for name in names]


def _thinned(names: Sequence[str], each: float, inches: float) -> tuple[range, list[str]]:
    """The places and texts of as many evenly spaced names as fit; long names are cut."""
    step = max(1, math.ceil(each * len(names) / inches))
    return range(0, len(names), step), [literal(name) for name in _cut(names)[::step]]


def draw(
    path: Path, paint: Callable[..., Figure], *shown: Any, dpi: float = 120, key: Any = None
) -> None:
    """Writes the figure `paint(*shown)`, unless the files there show the same already.

    shown: all that the figure shows. key: what that depends on, or else `shown`; it must have a
    pickle.
    """
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer)
    pickler.fast = True  # equal data have the same bytes, whether or not they share objects
    versions = [importlib.metadata.version(name) for name in ("fedjax_inv", "matplotlib")]
    pickler.dump((paint.__qualname__, versions, dpi, key or shown))
    digest = hashlib.sha256(buffer.getbuffer()).hexdigest()
    if not path.with_suffix(".pdf").exists() or _digest_in(path) != digest:
        save(paint(*shown), path, dpi=dpi, digest=digest)


def _digest_in(path: Path) -> str | None:
    """The digest in a PNG of `save`; None if there is no whole PNG, or none with a digest."""
    if not path.is_file():
        return None
    try:
        with Image.open(path) as image:
            image.verify()
            return image.info.get(_DIGEST)
    except Exception:  # pillow raises many kinds, for one reason: the file is damaged
        return None


def save(figure: Figure, path: Path, dpi: float = 120, digest: str = "") -> None:
    """Writes a figure as PNG and as PDF; the same figure gives the same bytes.

    digest: a text to store in the PNG.
    """
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # both files have the places that are computed by now
    with files.replacing(path.with_suffix(".pdf")) as file:
        figure.savefig(file, format="pdf", metadata={"CreationDate": None})
    # The PNG is last, because its digest says that both are there.
    with files.replacing(path) as file:
        dpi = min(dpi, _MOST_PIXELS / max(figure.get_size_inches()))
        metadata = {_DIGEST: digest} if digest else {}
        figure.savefig(file, format="png", dpi=dpi, metadata=metadata)


# The figures of a run or a sweep.

_SPREAD = 10  # the ratio of the largest error to the smallest from which an axis is logarithmic
# Of the lines in curves of examples that no client holds, besides the test.
_PALE: dict[str, dict[str, Any]] = {
    "unseen domain": {"lw": 1.2, "alpha": 0.4},
    "clients never seen (white markers)": {"lw": 1.2, "alpha": 0.4, "mfc": "white"},
}
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
    """Writes curves.png and, if the runs have the numbers for them, domains.png and clients.png.

    Figures that the runs have no numbers for are deleted: all, if every cell diverged. A cell of
    which the rule picks nothing is shown as --select=last shows it.

    results: (label, cell's folder, result) of each cell. rule: the rule of selection.
    """
    drawn = []
    for label, path, result in results:
        choices = (selection.choose(label, result, each) for each in (rule, "last"))
        if one := next(filter(None, choices), None):
            drawn.append((one, log.read(path, one.runs[0].last.round)))
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
            draw(folder / f"{name}.png", *paints[name])
        else:
            files.remove(folder / f"{name}.png")
            files.remove(folder / f"{name}.pdf")


def by_domain(line: Line) -> Parts:
    """The score on each domain; NaN without examples."""
    return {name: tables.score_on(domain) for name, domain in line.domains.items()}


def by_client(line: Line) -> Parts:
    """The test score in each client's proportions of classes; NaN without examples."""
    scores = enumerate(line.score_by_client or [])
    return {str(client): np.nan if score is None else score for client, score in scores}


def _panels(
    drawn: Drawn, x_label: str, width: float = 0.0
) -> tuple[Figure, dict[str, Axes], list[str]]:
    """A figure, its panels by held-out domain, and the labels of the cells."""
    held_outs = list(dict.fromkeys(one.held_out for one, _ in drawn))
    labels = list(dict.fromkeys(one.label for one, _ in drawn))
    width = max(width, 6.0 if len(held_outs) == 1 else 4.2)
    name = drawn[0][0].measure.heading()
    figure, axes = panels(len(held_outs), (width, 3.2), x_label=x_label, y_label=name)
    for axis, name in zip(axes, held_outs, strict=True):
        axis.set_title(wrapped(f"held out: {name}", width - 0.6), fontsize=10)
    return figure, dict(zip(held_outs, axes, strict=True)), labels


def _curves(drawn: Drawn, title: str) -> Figure:
    """Draws the score by round: a panel per held-out domain, two lines or more per algorithm."""
    figure, axes, labels = _panels(drawn, "round")
    kinds: dict[str, str] = {}
    for one, lines in drawn:
        number, axis = labels.index(one.label), axes[one.held_out]
        of_runs = [[line for line in lines if line.run == index] for index in one.indices]
        rounds = [line.round for line in of_runs[0]]
        how = styles(labels)[one.label] | {"markevery": spaced(len(rounds), number)}
        splits = {domain.split for domain in of_runs[0][0].domains.values()}
        for kind, (name, pale) in zip(UNSEEN, _PALE.items(), strict=True):
            if kind in splits:
                unseen = np.array([[selection.score_on(x, kind) for x in run] for run in of_runs])
                draw_mean(axis, rounds, one.measure.factor * unseen, 0, **how | pale)
                kinds[kind] = f"; pale: {name}"
        for name, more in (("test", {"lw": 1.8}), ("validation", {"lw": 0.7, "mfc": "white"})):
            scores = [[line[f"{name}_score"] for line in of_run] for of_run in of_runs]
            shade = min(0.15, 0.5 / len(labels)) * (name == "test")
            draw_mean(axis, rounds, one.measure.factor * np.array(scores), shade, **how, **more)
        whole_numbers(axis)
    _spread_out(list(axes.values()), drawn[0][0].measure)
    about = f"held out: {over_seeds(len(drawn[0][0].runs))}; thin: validation"
    entitle(figure, f"{title}\n{about}{''.join(kinds.values())}")
    legend_of_methods(figure, labels)
    return figure


def draw_mean(axis: Axes, x: Any, values: np.ndarray, shade: float, **how: Any) -> None:
    """Draws the mean of values [seeds, points] and a band of their standard deviation."""
    mean, std = values.mean(0), values.std(0, ddof=len(values) > 1)
    axis.plot(x, mean, **how)
    if shade:
        axis.fill_between(x, mean - std, mean + std, color=how["color"], alpha=shade, lw=0)


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
        scores = measure.factor * np.array(
            [[run.get(name, np.nan) for name in names] for run in runs]
        )
        paint = draw_dots if is_few else draw_quantiles
        paint(axes[one.held_out], scores, labels, labels.index(one.label))
    for held_out, axis in axes.items():
        if measure.is_share:
            axis.set_ylim(-2, 102)
        if is_few:
            name_x(axis, names, figure.get_size_inches()[0] / columns - 0.9)
            axis.set_xlim(-0.5, len(names) - 0.5)
        if is_few and held_out in names:
            at = names.index(held_out)
            axis.axvspan(at - 0.5, at + 0.5, color="0.93", lw=0, zorder=0)
    rules = {one.rule for one, _ in drawn}
    when = "at the last round" if rules == {"last"} else "where selected"
    when += ", else at the last round" if len(rules) > 1 else ""
    if parts_of is by_client:
        when += ", on the test in each client's proportions of classes"
    entitle(figure, f"{title}\n{measure.name} {when}; {over_seeds(len(drawn[0][0].runs))}")
    legend_of_methods(figure, labels, **({"ls": ""} if is_few else {}))
    return figure


def draw_dots(axis: Axes, values: np.ndarray, labels: Sequence[str], number: int) -> None:
    """Draws means and standard deviations over seeds at 0, 1, ..., for the label of this number.

    values: [seeds, parts], NaN where there is none.
    """
    count, how = len(labels), styles(labels)[labels[number]] | {"ls": ""}
    shift = (number - (count - 1) / 2) / (count + 1)
    for place, of in enumerate(values.T):
        known = of[np.isfinite(of)]
        if known.size:
            std = known.std(ddof=known.size > 1)
            axis.errorbar(place + shift, known.mean(), std, **how, lw=1)


def draw_quantiles(axis: Axes, values: np.ndarray, labels: Sequence[str], number: int) -> None:
    """Draws the quantiles of the parts, as a mean over seeds with a band; as `draw_dots`."""
    quantiles = np.nanquantile(values, np.linspace(0, 1, 101), axis=1).T
    how = styles(labels)[labels[number]] | {"markevery": spaced(101, 3 * number)}
    draw_mean(axis, np.arange(101), quantiles, 0.08, **how)
