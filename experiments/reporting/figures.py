"""The parts that figures share: literal texts, styles of lines, panels, legends and files.

matplotlib is imported by the first figure that is drawn, as its import takes a second.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import inspect
import io
import math
import pickle
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

from ..running import files

_LINES = ("-", "--", ":", "-.", (0, (8, 2)))
_MARKERS = "osv^D<>PX*d"  # 11 markers and 5 lines share no factor: 55 pairs
_CHARACTER = 0.62  # the width of most characters, as a part of the font size
_LINE = 1.5  # the height of a line of text, as a part of the font size
_LONGEST = 24  # characters of a name at an axis
_MOST_WRITTEN = 20  # the most columns of a picture of counts that shows the numbers
DIGEST = "Data-SHA256"  # the entry of a PNG with the digest of what it shows
_TITLE = "Title"  # the entry with its title


def new(width: float, height: float) -> Figure:
    """An empty figure, in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def literal(text: str) -> str:
    """A text that matplotlib draws literally: it would typeset text between two dollar signs."""
    return text.replace("$", r"\$")


def wrapped(text: str, inches: float, size: float = 10) -> str:
    """A literal text in lines that are at most so many inches wide."""
    characters = max(8, int(inches * 72 / (_CHARACTER * size)))
    lines = [textwrap.wrap(line, characters) or [""] for line in text.splitlines()]
    return literal("\n".join(line for part in lines for line in part))


def style(index: int) -> dict[str, Any]:
    """The colour, dashes and marker of line number `index`; lines differ in grey print, too."""
    return {
        "color": f"C{index % 10}",
        "ls": _LINES[index % len(_LINES)],
        "marker": _MARKERS[index % len(_MARKERS)],
        "ms": 4,
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
    from matplotlib.ticker import MaxNLocator

    axis.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))


def logarithmic(axis: Axes) -> None:
    """Makes a y axis logarithmic, with plain numbers."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axis.set_yscale("log")
    low, high = axis.get_ylim()
    # Of many decades, more numbers would overlap.
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 1e4 * low else (1,)))
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter(NullFormatter())


def panels(
    count: int, size: tuple[float, float], *, x_label: str = "", y_label: str = "", columns: int = 3
) -> tuple[Figure, list[Axes]]:
    """A figure of `count` panels with common axes. size: width and height of a panel, in inches.

    Each column of panels has the label of the x axis, and each line of panels that of the y axis.
    """
    columns = min(columns, count)
    lines = -(-count // columns)
    figure = new(size[0] * columns + 0.6, size[1] * lines)
    axes = list(figure.subplots(lines, columns, squeeze=False, sharex=True, sharey=True).flat)
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


def legend(figure: Figure, handles: Sequence[Artist], names: Sequence[str]) -> None:
    """Adds a legend under the panels, in as many columns as fit into the figure's width.

    The figure grows by the height of the legend.
    """
    if not names:
        return
    width, height = figure.get_size_inches()
    texts = [wrapped(name, width - 1, 9) for name in names]
    for columns in range(min(len(texts), 8), 0, -1):
        drawn = figure.legend(
            handles,
            texts,
            loc="outside lower center",
            ncols=columns,
            frameon=False,
            fontsize=9,
            handlelength=4,  # enough for the longest dashes
        )
        box = drawn.get_window_extent()
        if box.width <= 0.98 * figure.bbox.width or columns == 1:
            break
        drawn.remove()
    figure.set_size_inches(width, height + box.height / figure.dpi)


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


def counts(
    axis: Axes, counts: np.ndarray, height: float, sums: Sequence[int] | None = None
) -> None:
    """Draws counts [N, values] of N - 1 clients and the test, shaded by their share of the client.

    height: in inches. sums: the examples of each, if they are not the sums of the counts.
    """
    num_holders, num_values = counts.shape
    whole = counts.sum(1) if sums is None else np.asarray(sums)
    share = counts / np.maximum(whole[:, None], 1)
    most = max(share.max(), min(1.0, 3 / num_values))  # even shares have a light shade
    axis.imshow(share, aspect="auto", cmap="Blues", vmin=0, vmax=most)
    axis.set_xticks([])
    axis.tick_params(length=0)
    axis.axhline(len(counts) - 1.5, color="black", lw=0.8)  # above the test
    if num_values <= _MOST_WRITTEN and height / num_holders > 0.1:
        for (row, column), number in np.ndenumerate(counts):
            color = "white" if share[row, column] > 0.6 * most else "black"
            axis.text(
                column, row, number or "", fontsize=5.5, color=color, ha="center", va="center"
            )


def draw(
    path: Path, paint: Callable[..., Figure], *shown: Any, dpi: int = 120, title: str = ""
) -> None:
    """Writes the figure `paint(*shown)`, unless the files there show the same already.

    paint: a function of a module; a change of its module draws anew, too.
    shown: all that the figure shows; it must have a pickle.
    title: a text for `title_in`; it must be among what is shown.
    """
    digest = _digest(paint, shown, dpi)
    if path.with_suffix(".pdf").exists() and digest_in(path) == digest:
        path.touch()  # its time says when it was right
    else:
        save(paint(*shown), path, dpi=dpi, digest=digest, title=title)


def _digest(paint: Callable[..., Figure], *shown: Any) -> str:
    """The SHA-256 of what a figure shows, and of the code and the library that draw it."""
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer)
    pickler.fast = True  # equal data have the same bytes, whether or not they share objects
    pickler.dump((paint.__qualname__, importlib.metadata.version("matplotlib"), shown))
    sha = hashlib.sha256(buffer.getbuffer())
    for module in (inspect.getmodule(paint), sys.modules[__name__]):
        assert module is not None
        sha.update(inspect.getsource(module).encode())
    return sha.hexdigest()


def digest_in(path: Path) -> str | None:
    """The digest in a PNG of `save`; None if there is no whole PNG, or none with a digest."""
    return _entry_in(path, DIGEST)


def title_in(path: Path) -> str | None:
    """The title in a PNG of `save`; None if there is no whole PNG, or none with a title."""
    return _entry_in(path, _TITLE)


def _entry_in(path: Path, name: str) -> str | None:
    if not path.is_file():  # a pipe would be read forever
        return None
    try:
        with Image.open(path) as image:
            image.verify()
            return image.info.get(name)
    except Exception:  # pillow raises many kinds, for one reason: the file is damaged
        return None


def save(figure: Figure, path: Path, dpi: float = 120, digest: str = "", title: str = "") -> None:
    """Writes a figure as PNG and as PDF; the same figure gives the same bytes.

    digest, title: texts to store in the PNG.
    """
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # both files have the places that are computed by now
    with files.replacing(path.with_suffix(".pdf")) as file:
        figure.savefig(file, format="pdf", metadata={"CreationDate": None})
    # The PNG is last, because its digest says that both are there.
    with files.replacing(path) as file:
        entries = {DIGEST: digest, _TITLE: title}
        metadata = {name: text for name, text in entries.items() if text}
        figure.savefig(file, format="png", dpi=dpi, metadata=metadata)
