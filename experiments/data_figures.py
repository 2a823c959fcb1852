"""The figure of a data set: images of every domain or histograms, and what each client holds."""

from collections.abc import Mapping, Sequence
from pathlib import Path
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


def title_of(data: str, held_out: str | None, seed: int) -> str:
    """The title of a figure of a data set. held_out: None for its test split."""
    return f"{data}, held out: {held_out or 'test split'}, seed {seed}"


class Holders(NamedTuple):
    """Who holds the examples: the clients and, last, the test."""

    names: list[str]  # with their domains
    rows: list[np.ndarray]  # rows of the data set: training and validation, or test
    sizes: list[tuple[int, int, int]]  # training, validation, test


def holders_of(split: Split, is_wrong: np.ndarray) -> Holders:
    """The holders of a split. is_wrong: [M] which rows have wrong labels."""
    train, valid = parts_of(split.train), parts_of(split.valid)
    (test,) = parts_of(split.test)
    rows = [np.concatenate(pair) for pair in zip(train, valid, strict=True)]
    names = []
    for client, (domain, mine) in enumerate(zip(split.domain, rows, strict=True)):
        wrong = ", wrong labels" if is_wrong[mine].any() else ""
        names.append(f"{client}: {split.domains[domain] if domain >= 0 else 'mixed'}{wrong}")
    domain = split.test_domain[0]
    names.append("test split" if domain < 0 else f"held out: {split.domains[domain]}")
    sizes = [(len(t), len(v), 0) for t, v in zip(train, valid, strict=True)]
    return Holders(names, [*rows, test], [*sizes, (0, 0, len(test))])


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
    turn = np.zeros(len(rows), int)  # how many rows of the same label come before
    for label in np.unique(labels):
        turn[labels == label] = np.arange((labels == label).sum())
    return rows[np.lexsort((labels, turn))][:count]


def are_vectors(dataset: Dataset) -> bool:
    """Whether the inputs are vectors [M, D], such as those of a table."""
    return dataset.render is None and not dataset.words and getattr(dataset.x, "ndim", 0) == 2


Counts = tuple[Sequence[str], np.ndarray]  # N names, and how many examples have each, [holders, N]


def target_counts(dataset: Dataset, parts: Sequence[np.ndarray]) -> Counts:
    """The counts of classes, of labels, or of tenths of the data set by the first value.

    parts: rows by holder.
    """
    if dataset.task == "classes":
        counts = partitions.class_counts(dataset.y, parts, len(dataset.classes))
        return dataset.classes, counts
    if dataset.task == "labels":
        return dataset.classes, np.stack([dataset.y[rows].sum(0) for rows in parts])
    tenths = pd.qcut(dataset.y.reshape(len(dataset.y), -1)[:, 0], 10, duplicates="drop")
    names = [*map(str, tenths.categories)]
    return names, np.stack(
        [np.bincount(tenths.codes[mine], minlength=len(names)) for mine in parts]
    )


class Group(NamedTuple):
    """Examples that are drawn in one colour."""

    name: str
    rows: np.ndarray
    is_test: bool


def groups_of(dataset: Dataset, holders: Holders) -> tuple[str, list[Group]]:
    """(what a colour stands for, the groups): domains, clients, or training and test."""
    *rows, test = holders.rows
    if 1 < len(dataset.domains) <= _MOST_GROUPS:
        held, groups = np.unique(np.concatenate(holders.rows)), []
        for index, name in enumerate(dataset.domains):
            mine = held[dataset.domain[held] == index]
            is_test = bool(np.isin(mine, test).all())
            groups.append(Group(f"{name} (test)" if is_test else name, mine, is_test))
        return "domain", [group for group in groups if len(group.rows)]
    if len(holders.rows) <= _MOST_GROUPS:
        pairs = zip(holders.names, holders.rows, strict=True)
        return "client", [Group(name, mine, mine is test) for name, mine in pairs if len(mine)]
    training = Group("training and validation", np.concatenate(rows), False)
    return "split", [training, Group(holders.names[-1], test, True)]


class Panel(NamedTuple):
    """A target or a feature: for each group, the part of its examples in each bin or category."""

    name: str
    bins: Any  # edges [n + 1], or the names of n categories
    shares: np.ndarray  # [groups, n]
    is_logarithmic: bool = False
    note: str = ""


def _panels(dataset: Dataset, groups: Sequence[Group]) -> list[Panel]:
    """The panels of a data set whose x are vectors: its targets, and its first features."""
    x, y = np.asarray(dataset.x), np.asarray(dataset.y)
    if dataset.task == "classes":
        named: list[tuple[str, np.ndarray, Any]] = [("target: class", y, dataset.classes)]
    else:
        categories = ("false", "true") if dataset.task == "labels" else None
        values = y.reshape(len(y), -1).T[:_MOST_TARGETS]
        pairs = zip(dataset.classes, values, strict=False)
        named = [
            (name if name == "target" else f"target: {name}", each, categories)
            for name, each in pairs
        ]
    first = 0
    for column in dataset.columns[:_MOST_PANELS]:
        block = x[:, first : first + len(column.features)]
        first += len(column.features)
        is_number = column.categories is None
        named.append(
            (column.name, block[:, 0] if is_number else block.argmax(1), column.categories)
        )
    if not dataset.columns:
        numbers = range(min(x.shape[1], _MOST_PANELS))
        named += [(f"feature {index}", x[:, index], None) for index in numbers]
    return [
        _of_numbers(name, values.astype(np.float64), groups)
        if categories is None
        else _of_categories(name, values.astype(int), categories, groups)
        for name, values, categories in named
    ]


def _of_categories(
    name: str, values: np.ndarray, categories: Sequence[str], groups: Sequence[Group]
) -> Panel:
    """The most frequent categories."""
    counts = np.stack([np.bincount(values[of.rows], minlength=len(categories)) for of in groups])
    most = np.sort(np.argsort(-counts.sum(0), kind="stable")[:_MOST_CATEGORIES])
    is_all = len(most) == len(categories)
    note = "" if is_all else f"the {len(most)} most frequent of {len(categories)}"
    shares = counts[:, most] / counts.sum(1, keepdims=True)
    return Panel(name, [categories[index] for index in most], shares, note=note)


def _of_numbers(name: str, values: np.ndarray, groups: Sequence[Group]) -> Panel:
    """A histogram. Values far beyond the others are counted in the outer bins."""
    drawn = values[np.concatenate([group.rows for group in groups])]
    low, high = drawn.min(), drawn.max()
    far = np.quantile(drawn, 1 - _TAIL) > _SKEWED * np.median(drawn)
    is_logarithmic = bool(low > 0 and far)
    if is_logarithmic:
        edges = np.geomspace(low, high * (1 + 1e-6), _BINS + 1)
    elif high - low < _BINS and (drawn == np.rint(drawn)).all():
        edges = np.arange(low - 0.5, high + 1)  # a bin for each whole number
    else:
        inner = np.quantile(drawn, (_TAIL, 1 - _TAIL))
        if high - low > 2 * np.ptp(inner) > 0:
            low, high = inner
        width = max(high - low, 4 * np.spacing(max(abs(low), abs(high))))  # also of equal values
        edges = np.linspace(low, low + width, _BINS + 1)
    inside = [np.clip(values[group.rows], edges[0], edges[-1]) for group in groups]
    shares = np.stack([np.histogram(of, edges)[0] / len(of) for of in inside])
    return Panel(name, edges, shares, is_logarithmic)


class Content(NamedTuple):
    """What the figure of a data set with D domains shows."""

    title: str
    domains: Sequence[str]
    images: Sequence[np.ndarray]  # of each domain [n, height, width, 3]; [] if there are none
    labels: Sequence[Sequence[str]]  # of these images
    is_wrong: Sequence[np.ndarray]  # [n] of each domain: which of these labels are wrong
    joint: Mapping[str, np.ndarray]  # cue -> counts [D, classes, values]
    holders: Sequence[str]
    sizes: Sequence[int]  # examples of each holder
    counts: Mapping[str, Counts]  # by what they are of: the target, each cue
    groups: Sequence[tuple[str, bool]]  # of the panels: their names, and whether they are tests
    panels: Sequence[Panel]  # of vectors


def draw(
    path: Path,
    dataset: Dataset,
    holders: Holders,
    is_wrong: np.ndarray,
    *,
    title: str,
    images: int = 6,
) -> None:
    """Draws images or histograms, and beside them the counts of each client.

    Files that are there and show the same are not drawn again.

    is_wrong: [M] which rows have wrong labels, to be written in red. images: of each domain.
    """
    what = {"classes": "class", "labels": "label", "values": dataset.classes[0]}[dataset.task]
    counts, joint = {what: target_counts(dataset, holders.rows)}, {}
    for name, cue in cues(dataset).items():
        known = _NAMES.get(name, tuple(map(str, range(cue.max() + 1))))[: cue.max() + 1]
        counts[name] = known, partitions.class_counts(cue, holders.rows, len(known))
        joint[name] = np.zeros((len(dataset.domains), len(dataset.classes), len(known)))
        np.add.at(joint[name], (dataset.domain, dataset.y, cue), 1)
    rows = [in_turn(dataset, domain, images) for domain in range(len(dataset.domains))]
    pictures = rendered(dataset, np.concatenate(rows))
    are_images, are_classes = pictures.ndim == 4, dataset.task == "classes"
    ends = np.cumsum([len(some) for some in rows])[:-1]
    groups, panels = [], []
    if are_vectors(dataset):
        of, groups = groups_of(dataset, holders)
        panels = _panels(dataset, groups)
        number = len(dataset.columns) or np.shape(dataset.x)[1]
        more = f", the first {_MOST_PANELS} of {number} features" if number > _MOST_PANELS else ""
        title += f"\nshares of the examples of each {of}{more}"
    content = Content(
        title,
        dataset.domains,
        np.split(to_rgb(pictures), ends) if are_images else [],
        [[dataset.classes[y] if are_classes else "" for y in dataset.y[some]] for some in rows],
        [is_wrong[some] for some in rows],
        joint,
        holders.names,
        [len(mine) for mine in holders.rows],  # an example may have several labels
        counts,
        [(group.name, group.is_test) for group in groups],
        panels,
    )
    figures.draw(path, _paint, content, images, dpi=130)


def _paint(of: Content, images: int) -> Figure:
    """The figure: images, if there are any, then counts, then panels, if there are any."""
    columns = min(4, len(of.panels)) if len(of.panels) != 6 else 3
    lines = -(-len(of.panels) // columns) if of.panels else 0
    height = max(_INCHES * _STEP * len(of.domains) if of.images else 0, lines * _PANEL[1], 2)
    height = max(height, min(_LONGEST, 0.2 * len(of.holders)))
    lengths = [min(_LONGEST, max(1.6, 0.3 * len(names))) for names, _ in of.counts.values()]
    widths = [_INCHES * (images + 1.6 * len(of.joint)) + 1] if of.images else []
    widths += [length + 0.2 for length in lengths]
    widths += [columns * _PANEL[0]] if of.panels else []
    figure = figures.new(sum(widths) + 1, height + 1.3)
    grid = figure.add_gridspec(1, len(widths), width_ratios=widths)
    start = 1 if of.images else 0
    if of.images:
        _paint_images(figure.add_subplot(grid[0, 0]), of, images)
    for at, (name, (names, counts)) in enumerate(of.counts.items()):
        axis = figure.add_subplot(grid[0, start + at])
        _paint_counts(axis, counts, height, of.sizes)
        figures.name_x(axis, names, lengths[at], 7)
        axis.set_title(f"examples by {figures.literal(name)},\nwith validation", fontsize=9)
        if at == 0:
            axis.set_ylabel("client: domain", fontsize=8)
            figures.name_y(axis, of.holders, height, 7)
    if of.panels:
        inner = grid[0, -1].subgridspec(lines, columns)
        axes = [figure.add_subplot(inner[divmod(at, columns)]) for at in range(len(of.panels))]
        for axis, panel in zip(axes, of.panels, strict=True):
            _paint_panel(axis, panel, of.groups)
        figures.legend_of(figure, axes)
    figures.entitle(figure, of.title)
    return figure


def _paint_counts(axis: Axes, counts: np.ndarray, height: float, sizes: Sequence[int]) -> None:
    """Draws counts [N, values] of N - 1 clients and the test, shaded by their share of the client.

    height: in inches.
    """
    num_holders, num_values = counts.shape
    share = counts / np.maximum(sizes, 1)[:, None]
    most = max(share.max(), min(1.0, 3 / num_values))  # even shares have a light shade
    axis.imshow(share, aspect="auto", cmap="Blues", vmin=0, vmax=most)
    axis.set(xticks=[], yticks=[])
    axis.tick_params(length=0)
    axis.axhline(num_holders - 1.5, color="black", lw=0.8)  # above the test
    if num_values <= _MOST_WRITTEN and height / num_holders > 0.1:
        style: dict[str, Any] = dict(fontsize=5.5, ha="center", va="center")
        for (row, column), number in np.ndenumerate(counts):
            color = "white" if share[row, column] > 0.6 * most else "black"
            axis.text(column, row, number or "", color=color, **style)


def _paint_images(axis: Axes, of: Content, count: int) -> None:
    """Draws images with labels, and beside them how often each class of a domain has each cue."""
    for line, images in enumerate(of.images):
        top = _STEP * line
        for column, picture in enumerate(images):
            place = (column, column + 0.94, top + 0.94, top)
            axis.imshow(picture, extent=place, interpolation="nearest")
            color = "firebrick" if of.is_wrong[line][column] else "black"
            style: dict[str, Any] = dict(fontsize=7, ha="center", va="bottom", color=color)
            text = figures.literal(of.labels[line][column][:9])
            axis.text(column + 0.47, top - 0.04, text, **style)
        for index, (name, joint) in enumerate(of.joint.items()):
            start = count + 0.5 + 1.6 * index
            place = (start, start + 1, top + 0.94, top)
            axis.imshow(joint[line], cmap="Blues", vmin=0, extent=place)
            axis.add_patch(Rectangle((start, top), 1, 0.94, fill=False, lw=0.4))
            if line == 0:
                text = f"class (down)\nby {name}"
                axis.text(start + 0.5, top - 0.08, text, fontsize=6, ha="center", va="bottom")
    axis.set(xlim=(-0.05, count + 0.1 + 1.6 * len(of.joint)), aspect="equal", xticks=[])
    axis.set_ylim(_STEP * len(of.domains) - 0.2, -0.55)
    middles = [_STEP * line + 0.47 for line in range(len(of.domains))]
    axis.set_yticks(middles, [*map(figures.literal, of.domains)], fontsize=8)
    axis.tick_params(length=0)
    axis.set_frame_on(False)
    title = "domains, with labels" if any(map(any, of.labels)) else "domains"
    title += ", wrong ones in red" if np.concatenate(of.is_wrong).any() else ""
    axis.set_title(title, fontsize=9)


def _paint_panel(axis: Axes, panel: Panel, groups: Sequence[tuple[str, bool]]) -> None:
    """Draws a histogram of each group, or bars, one for each group, at each category."""
    is_histogram = len(panel.bins) > panel.shares.shape[1]
    width = 0.8 / len(groups)
    for number, ((name, is_test), share) in enumerate(zip(groups, panel.shares, strict=True)):
        color = "black" if is_test else f"C{number % 10}"
        how: dict[str, Any] = {"ls": "--" if is_test else "-", "label": figures.literal(name)}
        if is_histogram:
            axis.stairs(share, panel.bins, color=color, lw=1.2, **how)
        else:
            places = np.arange(len(share)) + (number - (len(groups) - 1) / 2) * width
            fill = "white" if is_test else color
            axis.bar(places, share, width, color=fill, edgecolor=color, lw=0.8, **how)
    axis.tick_params(labelsize=7)
    axis.spines[["top", "right"]].set_visible(False)
    axis.locator_params(axis="y", nbins=3)
    axis.set_ylim(bottom=0)
    if not is_histogram:
        figures.name_x(axis, panel.bins, _PANEL[0] - 0.5, 7)
    elif panel.is_logarithmic:
        axis.set_xscale("log")
    else:
        axis.locator_params(axis="x", nbins=4)
        axis.ticklabel_format(axis="x", scilimits=(-3, 5))
        axis.xaxis.get_offset_text().set_fontsize(7)
    axis.set_xlabel(panel.note, fontsize=7)
    is_target = panel.name.startswith("target")
    name = figures.wrapped(panel.name[:_LONGEST_NAME], 2 * _PANEL[0])
    axis.set_title(name, fontsize=9, fontweight="bold" if is_target else "normal")
