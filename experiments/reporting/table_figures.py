"""A figure of a table: targets and features by domain or client, and what each client holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fedjax_inv.data.dataset import Dataset

from ..reporting import data_figures, figures

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_PANELS = 12  # features that are drawn, the first ones
_MOST_TARGETS = 4
_MOST_GROUPS = 8  # colours that a reader can distinguish
_MOST_CATEGORIES = 12  # of a panel, the most frequent ones
_LONGEST = 24  # characters of a panel's name
_BINS = 30
_PANEL = (2.5, 1.9)  # inches
_SKEWED = 50  # the ratio of the largest values to the median from which an axis is logarithmic
_TAIL = 0.005  # the part of the values at either end that may lie in the outer bins


class Group(NamedTuple):
    """Rows of a table that are drawn in one colour."""

    name: str
    rows: np.ndarray
    is_test: bool


def groups_of(
    dataset: Dataset, names: Sequence[str], rows: Sequence[np.ndarray]
) -> tuple[str, list[Group]]:
    """(what a colour stands for, the rows of each): domains, clients, or training and test.

    names, rows: of the clients and, last, of the test.
    """
    test = np.zeros(len(dataset.y), bool)
    test[rows[-1]] = True
    held = np.unique(np.concatenate(rows))
    if 1 < len(dataset.domains) <= _MOST_GROUPS:
        mine = [held[dataset.domain[held] == index] for index in range(len(dataset.domains))]
        groups = [
            Group(f"{name} (test)" if test[each].all() else name, each, bool(test[each].all()))
            for name, each in zip(dataset.domains, mine, strict=True)
            if len(each)
        ]
        what = "domain"
    elif len(rows) <= _MOST_GROUPS:
        last = len(rows) - 1
        groups = [
            Group(name, each, number == last)
            for number, (name, each) in enumerate(zip(names, rows, strict=True))
        ]
        what = "client"
    else:
        training = Group("training and validation", np.concatenate(rows[:-1]), False)
        groups, what = [training, Group(names[-1], rows[-1], True)], "split"
    return what, [group for group in groups if len(group.rows)]


def table(
    dataset: Dataset,
    names: Sequence[str],
    rows: Sequence[np.ndarray],
    sizes: Sequence[tuple[int, int, int]],
    title: str,
) -> Figure:
    """The figure of a data set whose x are vectors [M, D].

    names, rows: of the clients and, last, of the test. sizes: how many of their examples are for
    training, validation and test.
    """
    what, groups = groups_of(dataset, names, rows)
    panels = [*_targets(dataset), *_features(dataset)]
    columns = 3 if len(panels) in (1, 2, 3, 5, 6, 9) else 4
    lines = -(-len(panels) // columns)
    holders_width = 2.8 if dataset.task == "values" else 2.2 + 0.3 * min(len(dataset.classes), 20)
    width = columns * _PANEL[0] + holders_width
    height = max(lines * _PANEL[1], min(12.0, 0.2 * len(names) + 0.8), 2.6)
    figure = figures.new(width, height)
    whole = figure.add_gridspec(1, 2, width_ratios=(holders_width, columns * _PANEL[0]))
    _draw_holders(figure.add_subplot(whole[0, 0]), dataset, names, rows, sizes, height - 0.8)
    grid = whole[0, 1].subgridspec(lines, columns)
    for number, panel in enumerate(panels):
        _draw_panel(figure.add_subplot(grid[divmod(number, columns)]), panel, groups)
    axes = figure.axes[1:]
    handles, labels = axes[0].get_legend_handles_labels()
    figures.legend(figure, handles, labels)
    count = len(dataset.columns) or np.shape(dataset.x)[1]
    shown = f", the first {_MOST_PANELS} of {count} features" if count > _MOST_PANELS else ""
    figures.entitle(figure, f"{title}\nshares of the examples of each {what}{shown}")
    return figure


class _Panel(NamedTuple):
    """A target or a feature of all M examples."""

    name: str
    values: np.ndarray  # [M] numbers; of categories their numbers
    categories: tuple[str, ...] | None
    is_target: bool = False


def _targets(dataset: Dataset) -> list[_Panel]:
    y = np.asarray(dataset.y)
    if dataset.task == "classes":
        return [_Panel("class", y, dataset.classes, True)]
    y = y.reshape(len(y), -1)
    labels = ("false", "true") if dataset.task == "labels" else None
    return [
        _Panel(name, y[:, index].astype(np.float64), labels, True)
        for index, name in enumerate(dataset.classes[:_MOST_TARGETS])
    ]


def _features(dataset: Dataset) -> list[_Panel]:
    x, panels, first = np.asarray(dataset.x), [], 0
    if not dataset.columns:
        numbers = range(min(x.shape[1], _MOST_PANELS))
        return [_Panel(f"feature {index}", x[:, index], None) for index in numbers]
    for column in dataset.columns[:_MOST_PANELS]:
        block = x[:, first : first + len(column.features)]
        first += len(column.features)
        values = block[:, 0] if column.categories is None else block.argmax(1)
        panels.append(_Panel(column.name, values, column.categories))
    return panels


def _draw_panel(axis: Axes, panel: _Panel, groups: Sequence[Group]) -> None:
    if panel.categories is None:
        _draw_numbers(axis, panel.values, groups)
    else:
        _draw_categories(axis, panel.values.astype(int), panel.categories, groups)
    name = panel.name if len(panel.name) <= _LONGEST else f"{panel.name[: _LONGEST - 1]}…"
    weight = "bold" if panel.is_target else "normal"
    text = f"target: {name}" if panel.is_target and panel.name != "target" else name
    axis.set_title(figures.literal(text), fontsize=9, fontweight=weight)
    axis.tick_params(labelsize=7)
    axis.locator_params(axis="y", nbins=3)
    axis.spines[["top", "right"]].set_visible(False)


def _color(number: int, group: Group) -> str:
    return "black" if group.is_test else f"C{number % 10}"


def _draw_numbers(axis: Axes, values: np.ndarray, groups: Sequence[Group]) -> None:
    """Draws a histogram of each group, of equal areas."""
    drawn = values[np.concatenate([group.rows for group in groups])].astype(np.float64)
    edges = _edges(drawn)
    for number, group in enumerate(groups):
        inside = np.clip(values[group.rows], edges[0], edges[-1])
        share = np.histogram(inside, edges)[0] / len(group.rows)
        color, style = _color(number, group), "--" if group.is_test else "-"
        axis.stairs(share, edges, color=color, ls=style, lw=1.2, label=figures.literal(group.name))
        if not group.is_test:
            axis.stairs(share, edges, color=color, fill=True, alpha=0.12)
    axis.set_ylim(bottom=0)
    if _is_skewed(drawn):
        axis.set_xscale("log")
        return
    axis.locator_params(axis="x", nbins=4)
    axis.ticklabel_format(axis="x", scilimits=(-3, 5))
    axis.xaxis.get_offset_text().set_fontsize(7)


def _is_skewed(values: np.ndarray) -> bool:
    """Whether values above 0 are so far apart that only a logarithmic axis shows them."""
    return bool(values.min() > 0 and np.quantile(values, 1 - _TAIL) > _SKEWED * np.median(values))


def _edges(values: np.ndarray) -> np.ndarray:
    """The edges of bins: one for each whole number if there are few, else of equal widths.

    Values far beyond the others are counted in the outer bins.
    """
    low, high = values.min(), values.max()
    digit = np.spacing(max(abs(low), abs(high)))
    if digit > max(high - low, 1) / _BINS:  # numbers so large that edges would be equal
        return np.array([low - 4 * digit, high + 4 * digit])
    if high - low < _BINS and (values == np.rint(values)).all():
        return np.arange(low - 0.5, high + 1)
    if _is_skewed(values):
        return np.geomspace(low, high * (1 + 1e-6), _BINS + 1)
    inner = np.quantile(values, (_TAIL, 1 - _TAIL))
    if inner[1] > inner[0] and high - low > 2 * (inner[1] - inner[0]):
        low, high = inner
    if high <= low:
        low, high = low - 0.5, low + 0.5
    return np.linspace(low, high, _BINS + 1)


def _draw_categories(
    axis: Axes, values: np.ndarray, categories: Sequence[str], groups: Sequence[Group]
) -> None:
    """Draws bars, one for each group, at each of the most frequent categories."""
    counts = np.bincount(values, minlength=len(categories))
    most = np.argsort(-counts, kind="stable")[:_MOST_CATEGORIES]
    kept = np.sort(most)
    width = 0.8 / len(groups)
    for number, group in enumerate(groups):
        of_group = np.bincount(values[group.rows], minlength=len(categories))
        places = np.arange(len(kept)) + (number - (len(groups) - 1) / 2) * width
        axis.bar(
            places,
            of_group[kept] / len(group.rows),
            width,
            color="white" if group.is_test else _color(number, group),
            edgecolor=_color(number, group),
            ls="--" if group.is_test else "-",
            lw=0.8,
            label=figures.literal(group.name),
        )
    figures.name_x(axis, [categories[index] for index in kept], _PANEL[0] - 0.5, 7)
    if len(categories) > len(kept):
        axis.set_xlabel(f"the {len(kept)} most frequent of {len(categories)}", fontsize=7)


def _draw_holders(
    axis: Axes,
    dataset: Dataset,
    names: Sequence[str],
    rows: Sequence[np.ndarray],
    sizes: Sequence[tuple[int, int, int]],
    height: float,
) -> None:
    """Draws how many examples each client holds; of classes and labels, how many of each."""
    if dataset.task == "values":
        starts = np.zeros(len(names))
        for part, color in zip(range(3), ("C0", "C9", "0.4"), strict=True):
            counts = np.array([size[part] for size in sizes])
            label = ("training", "validation", "test")[part]
            axis.barh(range(len(names)), counts, 0.7, left=starts, color=color, label=label)
            starts = starts + counts
        axis.set_ylim(len(names) - 0.5, -0.5)
        below = (0.4, -0.35 / height)
        axis.legend(
            loc="upper center",
            bbox_to_anchor=below,
            ncols=2,
            fontsize=7,
            frameon=False,
            handlelength=1,
        )
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(axis="x", labelsize=7)
        axis.locator_params(axis="x", nbins=3)
        axis.set_title("examples", fontsize=9)
    else:
        y = np.asarray(dataset.y)
        each = np.eye(len(dataset.classes), dtype=int)[y] if dataset.task == "classes" else y
        counts = np.stack([each[mine].sum(0) for mine in rows])
        figures.counts(axis, counts, height, sums=[len(mine) for mine in rows])
        inches = max(1.0, 0.3 * min(len(dataset.classes), 20))
        figures.name_x(axis, dataset.classes, inches, 7)
        what = "class" if dataset.task == "classes" else "label"
        axis.set_title(f"examples by {what}{data_figures.HELD}", fontsize=9)
    axis.set_ylabel("client: domain", fontsize=8)
    figures.name_y(axis, names, height, 7)
