"""The data of an experiment: images of every domain, and the examples of each client.

fedjax-inv show-data --environment=stained --stain=both --clients=20 --out=data.png

It takes the flags of train, and shows the data of the first seed. It trains nothing. Of vectors,
such as those of a table, it draws histograms of targets and features, and prints the range of each
feature. Texts have no picture.
"""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedjax_inv.checks import UsageError
from fedjax_inv.data import partitions, stains
from fedjax_inv.data.dataset import Dataset
from fedjax_inv.data.federation import Split, parts_of

from . import tables
from .experiment import assemble, command_line, scaling
from .experiment.config import Config
from .flags import command
from .flags.flag import Range, check_picture, flag
from .reporting import data_figures, figures, table_figures
from .reporting.data_figures import rendered, to_rgb
from .running import launch

# The names of a cue's values; the values of other cues are numbers.
_NAMES = {"stroke": stains.COLORS, "ground": stains.COLORS}
_STEP = 1.3  # from one line of images to the next; an image is 1 high
_LONGEST = 12.0  # inches, the longest side of a picture of counts
_FEATURES = 30  # the most features in their table
_MOST_IMAGES = 500  # images in a line
_MOST_PIXELS = 60_000  # a side of the largest .png that matplotlib can write


@dataclasses.dataclass(frozen=True)
class Options:
    """The flags of this binary, besides the flags of train."""

    images: int = flag(
        10,
        "Images of each domain, their labels in turn.",
        Range(lambda value: 1 <= value <= _MOST_IMAGES, f"in 1..{_MOST_IMAGES}"),
    )
    out: str = flag("data.png", "The picture, a .png file; a .pdf goes beside it.")


class ClientShards(NamedTuple):
    """The examples of N = C + 1 holders: the clients and, last, the test."""

    names: list[str]  # of the holders, with their domains
    rows: list[np.ndarray]  # rows of the data set: training and validation, or test
    sizes: list[tuple[int, int, int]]  # training, validation, test


def holdings_of(split: Split, is_wrong: np.ndarray | None = None) -> ClientShards:
    """The holders of a split. is_wrong: [M] which rows have wrong labels; None: none."""
    train, valid = parts_of(split.train), parts_of(split.valid)
    (test,) = parts_of(split.test)
    domain = split.test_domain[0]
    test_name = "test split" if domain < 0 else f"held out: {split.domains[domain]}"
    return ClientShards(
        [*data_figures.client_names(split, is_wrong), test_name],
        [*(np.concatenate(pair) for pair in zip(train, valid, strict=True)), test],
        [*((len(t), len(v), 0) for t, v in zip(train, valid, strict=True)), (0, 0, len(test))],
    )


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


def best_guess(cue: np.ndarray, y: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """The most frequent label of each value of a cue: the best guess from the cue alone.

    cue, y: [M]. seen: the rows that count. Returns the labels [values of the cue].
    """
    counts = np.zeros((cue.max() + 1, y.max() + 1), int)
    np.add.at(counts, (cue[seen], y[seen]), 1)
    return counts.argmax(1)


def table(dataset: Dataset, holdings: ClientShards, is_wrong: np.ndarray | None = None) -> str:
    """A row for each holder: its sizes, and how often the guess from each cue alone is right.

    is_wrong: [M] which rows have wrong labels, to be counted; None: they are not counted.
    """
    seen = np.concatenate(holdings.rows[:-1])
    counts = pd.DataFrame(holdings.sizes, columns=["training", "validation", "test"])
    total = counts.sum()
    if is_wrong is not None:
        counts["wrong labels"] = [is_wrong[rows].sum() for rows in holdings.rows]
        total["wrong labels"] = is_wrong[seen].sum()
    lines = counts.astype(object).where(counts > 0, "")  # the line of sums also shows zeros
    for name, cue in cues(dataset).items():
        is_right = best_guess(cue, dataset.y, seen)[cue] == dataset.y
        shares = [_percent(is_right[rows]) for rows in holdings.rows]
        lines[f"right by {name} alone, %"] = shares
    lines = pd.concat([lines, total.to_frame().T.astype(object)])
    lines.insert(0, "client: domain", [*holdings.names, "in all"])
    return tables.text(lines, align="right")


def features(dataset: Dataset) -> str:
    """A row for each of the first features of vectors [M, D]; "" for other data."""
    if not _are_vectors(dataset):
        return ""
    num_features = dataset.x.shape[1]
    x = np.asarray(dataset.x)[:, :_FEATURES].astype(np.float64)
    lines = pd.DataFrame({"mean": x.mean(0), "standard deviation": x.std(0)})
    lines = lines.assign(smallest=x.min(0), largest=x.max(0)).map("{:.3g}".format)
    names = scaling.feature_names(dataset, num_features)[:_FEATURES]
    lines.insert(0, f"feature of {num_features}", names)
    return f"{tables.text(lines, align='right')}\n\n"


def _are_vectors(dataset: Dataset) -> bool:
    return dataset.render is None and not dataset.words and getattr(dataset.x, "ndim", 0) == 2


def _percent(right: np.ndarray) -> str:
    return f"{100 * right.mean():.1f}" if len(right) else ""


def chosen(dataset: Dataset, domain: int, count: int) -> np.ndarray:
    """The first `count` rows of a domain, with the classes taking turns: 0, 1, 2, 0, 1, 2, 0."""
    rows = np.flatnonzero(dataset.domain == domain)
    if dataset.task != "classes":
        return rows[:count]
    labels = dataset.y[rows]
    turn = np.zeros(len(rows), int)  # how many rows of the same label come before
    for label in np.unique(labels):
        turn[labels == label] = np.arange((labels == label).sum())
    return rows[np.lexsort((labels, turn))][:count]


def draw(
    path: Path,
    dataset: Dataset,
    holdings: ClientShards,
    is_wrong: np.ndarray,
    *,
    title: str,
    count: int,
) -> None:
    """Draws a line of `count` images for each domain, and beside them the counts of each client.

    is_wrong: [M] which rows have wrong labels, to be written in red.
    """
    num_lines, num_holders = len(dataset.domains), len(holdings.names)
    drawn = cues(dataset)
    what = {"classes": "class", "labels": "label", "values": dataset.classes[0]}[dataset.task]
    counts = {what: data_figures.target_counts(dataset, holdings.rows)}
    for name, cue in drawn.items():
        known = _NAMES.get(name, tuple(map(str, range(cue.max() + 1))))[: cue.max() + 1]
        counts[name] = (known, partitions.class_counts(cue, holdings.rows, len(known)))
    widths = [0.62 * (count + 1.6 * len(drawn)) + 1]
    lengths = [min(_LONGEST, max(1.6, 0.3 * len(names))) for names, _ in counts.values()]
    widths += [length + 0.2 for length in lengths]
    height = max(0.62 * _STEP * num_lines, min(_LONGEST, 0.2 * num_holders), 2)
    figure = Figure(figsize=(sum(widths) + 1, height + 1.3), layout="constrained")
    left, *others = figure.subplots(1, len(widths), width_ratios=widths)
    _draw_images(left, dataset, is_wrong, drawn, count)
    sums = [len(rows) for rows in holdings.rows]  # an example may have several labels
    for axis, (name, (names, of)), length in zip(others, counts.items(), lengths, strict=True):
        figures.counts(axis, of, height, sums)
        figures.name_x(axis, names, length, 7)
        axis.set_title(f"examples by {figures.literal(name)}{data_figures.HELD}", fontsize=9)
        axis.set_yticks([])
    others[0].set_ylabel("client: domain", fontsize=8)
    figures.name_y(others[0], holdings.names, height, 7)
    figures.entitle(figure, title, 10)
    figures.save(figure, path, dpi=min(130, _MOST_PIXELS / max(figure.get_size_inches())))


def _draw_images(
    axis: Axes,
    dataset: Dataset,
    is_wrong: np.ndarray,
    drawn: dict[str, np.ndarray],
    count: int,
) -> None:
    """Draws images with labels, and beside them how often each class of a domain has each cue."""
    for line in range(len(dataset.domains)):
        rows, top = chosen(dataset, line, count), _STEP * line
        images = to_rgb(rendered(dataset, rows)) if len(rows) else ()
        for column, (row, picture) in enumerate(zip(rows, images, strict=True)):
            place = (column, column + 0.94, top + 0.94, top)
            axis.imshow(picture, extent=place, interpolation="nearest")
            if dataset.task == "classes":
                text = figures.literal(dataset.classes[dataset.y[row]][:9])
                color = "firebrick" if is_wrong[row] else "black"
                style: dict[str, Any] = dict(fontsize=7, ha="center", va="bottom", color=color)
                axis.text(column + 0.47, top - 0.04, text, **style)
        here = dataset.domain == line
        for index, (name, cue) in enumerate(drawn.items()):
            joint = np.zeros((len(dataset.classes), cue.max() + 1))
            np.add.at(joint, (dataset.y[here], cue[here]), 1)
            start = count + 0.5 + 1.6 * index
            axis.imshow(joint, cmap="Blues", vmin=0, extent=(start, start + 1, top + 0.94, top))
            edge = matplotlib.patches.Rectangle((start, top), 1, 0.94, fill=False, lw=0.4)
            axis.add_patch(edge)
            if line == 0:
                text = f"class (down)\nby {name}"
                axis.text(start + 0.5, top - 0.08, text, fontsize=6, ha="center", va="bottom")
    axis.set(xlim=(-0.05, count + 0.1 + 1.6 * len(drawn)), aspect="equal", xticks=[])
    axis.set_ylim(_STEP * len(dataset.domains) - 0.2, -0.55)
    middles = [_STEP * line + 0.47 for line in range(len(dataset.domains))]
    axis.set_yticks(middles, [*map(figures.literal, dataset.domains)], fontsize=8)
    axis.tick_params(length=0)
    axis.set_frame_on(False)
    title = "domains, with labels" if dataset.task == "classes" else "domains"
    title += ", wrong ones in red" if is_wrong.any() else ""
    axis.set_title(title, fontsize=9)


def show(config: Config, options: Options) -> str:
    """Draws the picture, and returns the table and the path of the picture.

    Texts have no picture. Raises UsageError for flags that do not fit the data.
    """
    out = check_picture("out", options.out)
    assembled = assemble.assemble(config, config.seeds[:1], launch.start_of(config))
    if len(assembled.splits) > 1:
        text = "must be one domain to be shown"
        raise UsageError(f"--held_out={config.held_out}", ..., text)
    (held_out,) = assembled.splits
    dataset, split = assembled.as_seen(held_out, config.seeds[0])
    is_wrong = np.asarray(dataset.y != assembled.dataset.y)
    holdings = holdings_of(split, is_wrong)
    counted = is_wrong if config.wrong_labels else None
    title = data_figures.title_of(config.title, held_out, config.seeds[0])
    text = f"\n{title}\n\n{table(dataset, holdings, counted)}\n\n"
    text += features(dataset)
    if warning := assembled.scale_warning():
        text += f"Warning: --dataset={config.dataset}: {warning}.\n\n"
    is_image = len(rendered(dataset, np.arange(1)).shape) == 4
    if not is_image and not _are_vectors(dataset):
        return f"{text}No picture: the data are neither images nor vectors."
    out.parent.mkdir(parents=True, exist_ok=True)
    if is_image:
        draw(out, dataset, holdings, is_wrong, title=title, count=options.images)
    else:
        figures.save(table_figures.table(dataset, *holdings, title), out, dpi=130)
    return f"{text}Picture: {out}."


BINARY = command_line.binary(show, __doc__, Options)

if __name__ == "__main__":
    command.main(BINARY)
