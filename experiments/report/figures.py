"""Figures: literal texts, styles of lines, panels, legends and files."""

import hashlib
import importlib.metadata
import io
import itertools
import math
import pickle
import textwrap
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import hsv_to_rgb, to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from PIL import Image

from ..folder import files
from .names import METHODS, named

_LINES = ("-", "--", ":", "-.", (0, (8, 2)))
_MARKERS = "osv^D<>PX*d"  # 11 markers and 5 lines share no factor: 55 pairs
_PLAIN = ["".join(filter(str.isalnum, name)).lower() for name in METHODS.values()]
# Of the first methods: colours that most colour-blind people tell apart (Okabe and Ito).
FIRST = ("#777777", "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9")
_NEAR = 0.35  # the distance in RGB, below which colours look alike
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


def styles(labels: Collection[str]) -> dict[str, dict[str, Any]]:
    """The colour, dashes and marker of the line of each label.

    A method has the same colour in every figure, and its variants are lighter. Of two neighbours in
    the legend that look alike, the less known one is darker or lighter. Lines differ in grey print,
    too.
    """
    colors = []
    ranks = []
    seen: Counter[int] = Counter()
    for index, label in enumerate(labels):
        plain = "".join(filter(str.isalnum, named(label))).lower()
        methods = [at for at, each in enumerate(_PLAIN) if each in plain]
        at = max(methods, key=lambda at: len(_PLAIN[at])) if methods else len(_PLAIN) + index
        # Hues that are a golden section apart are far apart for neighbours.
        hue = np.array(hsv_to_rgb((0.618 * at % 1, 0.75, 0.9 - 0.15 * (at % 3))))
        color = np.array(to_rgb(FIRST[at])) if at < len(FIRST) else hue
        colors.append((2 * color + seen[at]) / (2 + seen[at]))
        ranks.append((seen[at], at))
        seen[at] += 1
    for one, other in itertools.pairwise(range(len(colors))):
        if np.linalg.norm(colors[one] - colors[other]) < _NEAR:
            fixed, free = sorted((one, other), key=ranks.__getitem__)
            shades = colors[free] / 2, (colors[free] + 1) / 2
            colors[free] = max(shades, key=lambda shade: np.linalg.norm(shade - colors[fixed]))
    return {
        label: {
            "color": tuple(color.tolist()),
            "ms": 4,
            "ls": _LINES[index % len(_LINES)],
            "marker": _MARKERS[index % len(_MARKERS)],
        }
        for index, (label, color) in enumerate(zip(labels, colors, strict=True))
    }


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


def entitle(figure: Figure, text: str, size: float = 10) -> None:
    """Adds a title no wider than the figure; the figure grows by the title's height."""
    width, height = figure.get_size_inches()
    lines = wrapped(text, width - 0.2, size)
    figure.suptitle(lines, fontsize=size)
    figure.set_size_inches(width, height + _LINE * size / 72 * (lines.count("\n") + 1))


def legend(
    figure: Figure, handles: Sequence[Artist], names: Sequence[str], size: float = 9
) -> None:
    """Adds a legend under the panels, in as many columns as fit into the figure's width.

    The figure grows by the height of the legend.
    """
    if not names:
        return
    width, height = figure.get_size_inches()
    texts = [wrapped(name, width - 1, size) for name in names]
    are_lines = any(getattr(handle, "get_linestyle", str)() != "None" for handle in handles)
    length = 4 if are_lines else 1  # long enough for the longest dashes
    how: dict[str, Any] = dict(loc="outside lower center", frameon=False, fontsize=size)
    for columns in range(min(len(texts), 8), 0, -1):
        drawn = figure.legend(handles, texts, ncols=columns, handlelength=length, **how)
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


def save(figure: Figure, path: Path, dpi: float = 120, digest: str = "", creator: str = "") -> None:
    """Writes a figure as PNG and as PDF; the same figure gives the same bytes.

    digest: a text to store in the PNG. creator: a text to store in both, by which a command knows
    its files.
    """
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # both files have the places that are computed by now
    fonts = matplotlib.rc_context({"pdf.fonttype": 42})  # which publishers ask for
    about = {"CreationDate": None, **({"Creator": creator} if creator else {})}
    with fonts, files.replacing(path.with_suffix(".pdf")) as file:
        figure.savefig(file, format="pdf", metadata=about)
    # The PNG is last, because its digest says that both are there.
    with files.replacing(path) as file:
        dpi = min(dpi, _MOST_PIXELS / max(figure.get_size_inches()))
        metadata = {_DIGEST: digest} if digest else {}
        metadata |= {"Software": creator} if creator else {}
        figure.savefig(file, format="png", dpi=dpi, metadata=metadata)


def draw_mean(axis: Axes, x: Any, values: np.ndarray, shade: float, **how: Any) -> None:
    """Draws the mean of values [seeds, points] and a band of their standard deviation."""
    mean = values.mean(0)
    std = values.std(0, ddof=len(values) > 1)
    axis.plot(x, mean, **how)
    if shade:
        axis.fill_between(x, mean - std, mean + std, color=how["color"], alpha=shade, lw=0)
