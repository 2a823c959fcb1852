"""The figure of a data set: images of every domain or histograms, and what each client holds."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from fedjax_inv.data import partitions, stains
from fedjax_inv.data.dataset import Dataset
from fedjax_inv.data.federation import Split, parts_of

from ..assembly.experiment import Assembly
from ..assembly.grid import Cell
from ..folder import summary
from . import figures

# The names of a cue's values; the values of other cues are numbers.
_NAMES = {"stroke": stains.COLORS, "ground": stains.COLORS}
_STEP = 1.3  # from one line of images to the next; an image is 1 high
_INCHES = 0.62  # the side of an image
_LONGEST = 12.0  # inches, the longest side of a picture of counts
_MOST_WRITTEN = 20  # the most columns of a picture of counts that shows the numbers

_LONGEST_NAME = 30  # characters of a panel's name
_MOST_TARGETS = 4
_MOST_PANELS = 12  # features that are drawn, the first ones
_MOST_GROUPS = 8  # colours that a reader can distinguish
_MOST_CATEGORIES = 12  # of a panel, the most frequent ones
_BINS = 30
_PANEL = (2.5, 1.9)  # inches
_SKEWED = 50  # the ratio of the largest values to the median from which an axis is logarithmic
_TAIL = 0.005  # the part of the values at either end that may lie in the outer bins


class Holders(NamedTuple):
    """Who holds the examples: the clients, the unseen, and, last, the test."""

    names: list[str]  # with their domains
    rows: list[np.ndarray]  # rows of the data set: training and validation, or test
    sizes: list[tuple[int, int, int]]  # training, validation, test (or unseen)


def holders_of(cell: Cell, split: Split, is_wrong: np.ndarray) -> Holders:
    """The holders of a split of a cell. is_wrong: [M] which rows have wrong labels."""
    train = parts_of(split.train)
    valid = parts_of(split.valid)
    others = [parts_of(each)[0] for each in (*split.unseen.values(), split.test)]
    rows = [np.concatenate(pair) for pair in zip(train, valid, strict=True)]
    names = []
    for client, (domain, mine) in enumerate(zip(split.domain, rows, strict=True)):
        wrong = ", wrong labels" if is_wrong[mine].any() else ""
        names.append(f"{client}: {split.domains[domain] if domain >= 0 else 'mixed'}{wrong}")
    domain = split.test_domain[0]
    for kind in split.unseen:
        about = "unseen domain: " if kind == "unseen_domain" else ""
        names.append(about + summary.unseen_name(cell, kind))
    names.append("test split" if domain < 0 else f"held out: {split.domains[domain]}")
    sizes = [(len(t), len(v), 0) for t, v in zip(train, valid, strict=True)]
    return Holders(names, [*rows, *others], [*sizes, *((0, 0, len(each)) for each in others)])


def shown(assembled: Assembly, held_out: str | None) -> tuple[Dataset, Holders, np.ndarray, str]:
    """(data of the first seed, their holders, which rows have wrong labels, a title), for `paint`.

    held_out: None for the test split.
    """
    seed = assembled.config.training.seeds[0]
    dataset, split = assembled.as_seen(held_out, seed)
    is_wrong = (dataset.y != assembled.dataset.y).reshape(len(dataset.y), -1).any(1)
    title = f"{assembled.config.title}, held out: {held_out or 'test split'}, seed {seed}"
    cell = next(each for each in assembled.cells if each.held_out == held_out)
    return dataset, holders_of(cell, split, is_wrong), is_wrong, title


def cues(dataset: Dataset) -> dict[str, np.ndarray]:
    """The cues of the images by name, each [M] integers that are not all equal."""
    if dataset.task != "classes" or dataset.render is None or not hasattr(dataset.x, "_asdict"):
        return {}
    drawn = {name: np.asarray(leaf) for name, leaf in dataset.x._asdict().items()}
    return {
        name: leaf
        for name, leaf in drawn.items()
        if leaf.ndim == 1 and leaf.dtype.kind in "iu" and leaf.min() < leaf.max()
    }


def rendered(dataset: Dataset, rows: np.ndarray) -> np.ndarray:
    """Examples as a network sees them, float32; images are [n, height, width, channels].

    Inputs of several arrays have no picture: [n, 0].
    """
    x = jax.tree.map(lambda leaf: np.asarray(leaf[rows]), dataset.x)
    if dataset.render is not None:
        return np.asarray(jax.jit(dataset.render)(x), np.float32)  # one program, not one a step
    if not hasattr(x, "dtype"):
        return np.zeros((len(rows), 0), np.float32)
    return np.asarray(x, np.float32) / (255 if x.dtype == np.uint8 else 1)


def to_rgb(x: np.ndarray) -> np.ndarray:
    """Images [..., channels] as RGB [..., 3] in [0, 1].

    One channel is grey, two are red and green, three are RGB already, and more have a hue each.
    """
    channels = x.shape[-1]
    if channels in (1, 3):
        return np.broadcast_to(x, (*x.shape[:-1], 3)).clip(0, 1)
    hues = matplotlib.colormaps["hsv"](np.arange(channels) / channels)[:, :3]
    hues = np.eye(3)[:2] if channels == 2 else hues
    return (x @ hues).clip(0, 1)


def in_turn(dataset: Dataset, domain: int, count: int) -> np.ndarray:
    """The first `count` rows of a domain, with the classes taking turns: 0, 1, 2, 0, 1, 2, 0."""
    rows = np.flatnonzero(dataset.domain == domain)
    if dataset.task != "classes":
        return rows[:count]
    labels = dataset.y[rows]
    turn = pd.Series(labels).groupby(labels).cumcount()  # of the same label that come before
    return rows[np.lexsort((labels, turn))][:count]


def are_vectors(dataset: Dataset) -> bool:
    """Whether the inputs are vectors [M, D], such as those of a table."""
    return dataset.render is None and not dataset.words and getattr(dataset.x, "ndim", 0) == 2


CueCounts = tuple[
    Sequence[str], np.ndarray
]  # N names, and how many examples have each, [holders, N]


def target_counts(dataset: Dataset, parts: Sequence[np.ndarray]) -> CueCounts:
    """The counts of classes, of labels, or of tenths of the data set by the first value.

    parts: rows by holder.
    """
    if dataset.task == "classes":
        counts = partitions.class_counts(dataset.y, parts, len(dataset.classes))
        return dataset.classes, counts
    if dataset.task == "labels":
        return dataset.classes, np.stack([dataset.y[rows].sum(0) for rows in parts])
    values = dataset.y.reshape(len(dataset.y), -1)[:, 0]
    if values.min() == values.max():
        return [f"{values[0]:g}"], np.array([[len(rows)] for rows in parts])
    tenths = pd.qcut(values, 10, duplicates="drop")
    names = [*map(str, tenths.categories)]
    each = [np.bincount(tenths.codes[rows], minlength=len(names)) for rows in parts]
    return names, np.stack(each)


def paint(
    dataset: Dataset, holders: Holders, is_wrong: np.ndarray, title: str, images: int = 6
) -> Figure:
    """The figure: images or histograms of features, and beside them the counts of each client.

    is_wrong: [M] which rows have wrong labels, to be written in red. images: of each domain.
    """
    what = {"classes": "class", "labels": "label", "values": dataset.classes[0]}[dataset.task]
    counts = {what: target_counts(dataset, holders.rows)}
    found = cues(dataset)
    for name, cue in found.items():
        known = _NAMES.get(name, tuple(map(str, range(cue.max() + 1))))[: cue.max() + 1]
        counts[name] = known, partitions.class_counts(cue, holders.rows, len(known))
    are_images = rendered(dataset, np.arange(1)).ndim == 4
    panels = _features(dataset) if are_vectors(dataset) else []
    columns = min(4, len(panels)) if len(panels) != 6 else 3
    lines = -(-len(panels) // columns) if panels else 0
    height = max(_INCHES * _STEP * len(dataset.domains) * are_images, lines * _PANEL[1], 2)
    height = max(height, min(_LONGEST, 0.2 * len(holders.names)))
    lengths = [min(_LONGEST, max(1.6, 0.3 * len(names))) for names, _ in counts.values()]
    widths = [_INCHES * (images + 1.6 * len(found)) + 1] if are_images else []
    widths += [length + 0.2 for length in lengths]
    widths += [columns * _PANEL[0]] if panels else []
    figure = figures.new(sum(widths) + 1, height + 1.3)
    grid = figure.add_gridspec(1, len(widths), width_ratios=widths)
    if are_images:
        _paint_images(figure.add_subplot(grid[0, 0]), dataset, is_wrong, images)
    for at, (name, (names, of)) in enumerate(counts.items()):
        axis = figure.add_subplot(grid[0, at + are_images])
        _paint_counts(axis, of, height, [len(rows) for rows in holders.rows])
        figures.name_x(axis, names, lengths[at], 7)
        axis.set_title(f"examples by {figures.literal(name)},\nwith validation", fontsize=9)
        if at == 0:
            axis.set_ylabel("client: domain", fontsize=8)
            figures.name_y(axis, holders.names, height, 7)
    if panels:
        groups = _groups(dataset, holders)
        inner = grid[0, -1].subgridspec(lines, columns)
        axes = [figure.add_subplot(inner[divmod(at, columns)]) for at in range(len(panels))]
        for axis, panel in zip(axes, panels, strict=True):
            _paint_panel(axis, *panel, groups)
        figures.legend_of(figure, axes)
        title += f"\nshares of the examples of each colour, at most {_MOST_PANELS} features"
    figures.entitle(figure, title)
    return figure


def _paint_counts(axis: Axes, counts: np.ndarray, height: float, sizes: Sequence[int]) -> None:
    """Draws counts [N, values] of N - 1 clients and the test, shaded by their share of the client.

    height: in inches. sizes: examples of each, which may have several labels.
    """
    num_holders, num_values = counts.shape
    share = counts / np.maximum(sizes, 1)[:, None]
    most = max(share.max(), min(1.0, 3 / num_values))  # even shares have a light shade
    axis.imshow(share, aspect="auto", cmap="Blues", vmin=0, vmax=most)
    axis.set(xticks=[], yticks=[])
    axis.tick_params(length=0)
    axis.axhline(num_holders - 1.5, color="black", lw=0.8)  # above the test
    if num_values <= _MOST_WRITTEN and height / num_holders > 0.1:
        size = min(7.5, 50 * height / num_holders)
        style: dict[str, Any] = dict(fontsize=size, ha="center", va="center")
        for (row, column), number in np.ndenumerate(counts):
            color = "white" if share[row, column] > 0.6 * most else "black"
            axis.text(column, row, number or "", color=color, **style)


def _paint_images(axis: Axes, dataset: Dataset, is_wrong: np.ndarray, count: int) -> None:
    """Draws images with labels, and beside them how often each class of a domain has each cue."""
    domains = range(len(dataset.domains))
    found = cues(dataset)
    rows = [in_turn(dataset, domain, count) for domain in domains]
    pictures = iter(to_rgb(rendered(dataset, np.concatenate(rows))))
    for line in domains:
        top = _STEP * line
        for column, row in enumerate(rows[line]):
            place = (column, column + 0.94, top + 0.94, top)
            axis.imshow(next(pictures), extent=place, interpolation="nearest")
            if dataset.task == "classes":
                color = "firebrick" if is_wrong[row] else "black"
                style: dict[str, Any] = dict(fontsize=7, ha="center", va="bottom", color=color)
                text = figures.literal(dataset.classes[dataset.y[row]][:9])
                axis.text(column + 0.47, top - 0.04, text, **style)
        here = dataset.domain == line
        for index, (name, cue) in enumerate(found.items()):
            start = count + 0.5 + 1.6 * index
            joint = np.zeros((len(dataset.classes), cue.max() + 1))
            np.add.at(joint, (dataset.y[here], cue[here]), 1)
            where = (start, start + 1, top + 0.94, top)
            axis.imshow(joint, cmap="Blues", vmin=0, extent=where)
            axis.add_patch(Rectangle((start, top), 1, 0.94, fill=False, lw=0.4))
            if line == 0:
                text = f"class (down)\nby {name}"
                axis.text(start + 0.5, top - 0.08, text, fontsize=6, ha="center", va="bottom")
    axis.set(xlim=(-0.05, count + 0.1 + 1.6 * len(found)), aspect="equal", xticks=[])
    axis.set_ylim(_STEP * len(domains) - 0.2, -0.55)
    middles = [_STEP * line + 0.47 for line in domains]
    axis.set_yticks(middles, [*map(figures.literal, dataset.domains)], fontsize=8)
    axis.tick_params(length=0)
    axis.set_frame_on(False)
    title = "domains, with labels" if dataset.task == "classes" else "domains"
    axis.set_title(title + ", wrong ones in red" * bool(is_wrong.any()), fontsize=9)


# A group of examples that are drawn in one colour: its name, its rows, whether it is a test
_Group = tuple[str, np.ndarray, bool]
# A target or a feature: its name, its values [M], and their names if they are categories
_Feature = tuple[str, np.ndarray, Sequence[str] | None]


def _groups(dataset: Dataset, holders: Holders) -> list[_Group]:
    """Domains, clients, or training and test."""
    *rows, test = holders.rows
    groups: list[_Group] = []
    if 1 < len(dataset.domains) <= _MOST_GROUPS:
        held = np.unique(np.concatenate(holders.rows))
        for index, name in enumerate(dataset.domains):
            mine = held[dataset.domain[held] == index]
            is_test = bool(np.isin(mine, test).all())
            groups.append((name + " (test)" * is_test, mine, is_test))
    elif len(rows) < _MOST_GROUPS:
        groups = [(*pair, False) for pair in zip(holders.names, rows, strict=False)]
    else:
        groups = [("training and validation", np.concatenate(rows), False)]
    if len(dataset.domains) == 1 or len(dataset.domains) > _MOST_GROUPS:
        groups.append((holders.names[-1], test, True))
    return [group for group in groups if len(group[1])]


def _features(dataset: Dataset) -> list[_Feature]:
    """The targets and the first features of a data set whose x are vectors."""
    x = np.asarray(dataset.x)
    y = np.asarray(dataset.y)
    if dataset.task == "classes":
        found: list[_Feature] = [("target: class", y, dataset.classes)]
    else:
        categories = ("false", "true") if dataset.task == "labels" else None
        values = y.reshape(len(y), -1).T[:_MOST_TARGETS]
        names = [name if name == "target" else f"target: {name}" for name in dataset.classes]
        found = [(*pair, categories) for pair in zip(names, values, strict=False)]
    first = 0
    for column in dataset.columns[:_MOST_PANELS]:
        block = x[:, first : first + len(column.features)]
        first += len(column.features)
        values = block[:, 0] if column.categories is None else block.argmax(1)
        found.append((column.name, values, column.categories))
    if not dataset.columns:
        found += [(f"feature {at}", of, None) for at, of in enumerate(x.T[:_MOST_PANELS])]
    return found


def _paint_panel(
    axis: Axes,
    name: str,
    values: np.ndarray,
    categories: Sequence[str] | None,
    groups: Sequence[_Group],
) -> None:
    """Draws a histogram of each group, or bars, one for each group, at each frequent category."""
    drawn = values[np.concatenate([rows for _, rows, _ in groups])]
    is_logarithmic = False
    note = ""
    if categories is None:
        edges, is_logarithmic = _edges(drawn.astype(np.float64))
    else:
        counts = np.bincount(drawn.astype(int), minlength=len(categories))
        most = np.sort(np.argsort(-counts, kind="stable")[:_MOST_CATEGORIES])
        if len(most) < len(categories):
            note = f"the {len(most)} most frequent of {len(categories)}"
    for number, (group, rows, is_test) in enumerate(groups):
        color = "black" if is_test else f"C{number % 10}"
        how: dict[str, Any] = {"ls": "--" if is_test else "-", "label": figures.literal(group)}
        if categories is None:
            inside = np.clip(values[rows], edges[0], edges[-1])
            share = np.histogram(inside, edges)[0] / len(rows)
            axis.stairs(share, edges, color=color, lw=1.2, **how)
        else:
            share = np.bincount(values[rows].astype(int), minlength=len(categories)) / len(rows)
            width = 0.8 / len(groups)
            places = np.arange(len(most)) + (number - (len(groups) - 1) / 2) * width
            fill = "white" if is_test else color
            axis.bar(places, share[most], width, color=fill, edgecolor=color, lw=0.8, **how)
    axis.tick_params(labelsize=7)
    axis.spines[["top", "right"]].set_visible(False)
    axis.locator_params(axis="y", nbins=3)
    axis.set_ylim(bottom=0)
    if categories is not None:
        figures.name_x(axis, [categories[index] for index in most], _PANEL[0] - 0.5, 7)
    elif is_logarithmic:
        axis.set_xscale("log")
    else:
        axis.locator_params(axis="x", nbins=4)
        axis.ticklabel_format(axis="x", scilimits=(-3, 5))
        axis.xaxis.get_offset_text().set_fontsize(7)
    axis.set_xlabel(note, fontsize=7)
    weight = "bold" if name.startswith("target") else "normal"
    axis.set_title(figures.literal(name[:_LONGEST_NAME]), fontsize=9, fontweight=weight)


def _edges(values: np.ndarray) -> tuple[np.ndarray, bool]:
    """The edges of a histogram's bins, and whether they are logarithmic.

    Values far beyond the others are counted in the outer bins.
    """
    low = values.min()
    high = values.max()
    if low > 0 and np.quantile(values, 1 - _TAIL) > _SKEWED * np.median(values):
        return np.geomspace(low, high * (1 + 1e-6), _BINS + 1), True
    if high - low < _BINS and (values == np.rint(values)).all():
        return np.arange(low - 0.5, high + 1), False  # a bin for each whole number
    inner = np.quantile(values, (_TAIL, 1 - _TAIL))
    if high - low > 2 * np.ptp(inner) > 0:
        low, high = inner
    width = max(high - low, 4 * np.spacing(max(abs(low), abs(high))))  # also of equal values
    return np.linspace(low, low + width, _BINS + 1), False
