"""What the data of an experiment look like: images of every domain, and what each client holds.

python -m experiments.show_data --environment=stained --stain=both --clients=20 --out=data.png

It takes the flags of train, and shows the data as its first seed deals them. Nothing is trained.
"""

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from absl import flags
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.experiment import assemble, command_line
from experiments.experiment.config import Config
from experiments.flags.flag import check_picture
from experiments.reporting import figures
from experiments.reporting.tables import tabulate
from experiments.running import launch
from fedjax_inv.checks import UsageError
from fedjax_inv.data import partitions, stains
from fedjax_inv.data.dataset import Dataset
from fedjax_inv.data.federation import Split, parts_of
from fedjax_inv.models.blocks import unit_range

# What the values of a cue are called, where they are not just numbers.
_NAMES = {"stroke": stains.COLORS, "ground": stains.COLORS}
_STEP = 1.3  # between the lines of images, of which each is 1 high
_LONGEST = 12.0  # inches of a picture of counts
_MOST_IMAGES = 500  # in a line
_MOST_PIXELS = 60_000  # along a side, which a .png of matplotlib can have
_MOST_WRITTEN = 20  # columns of a picture of counts in which each count is written


class Options(NamedTuple):
    """The flags of this binary."""

    config: Config  # those of train
    images: int = 10
    out: str = "data.png"


class Held(NamedTuple):
    """What each client holds, and last the test; N = C + 1 holders of M examples."""

    names: list[str]  # of the holders and their domains
    rows: list[np.ndarray]  # of the data set, for training and validation, or for the test
    sizes: list[tuple[int, int, int]]  # for training, for validation, for the test


def held(split: Split) -> Held:
    """What the clients of a split hold, and its test."""
    train, valid = parts_of(split.train), parts_of(split.valid)
    (test,) = parts_of(split.test)
    domains = [split.domains[domain] if domain >= 0 else "mixed" for domain in split.domain]
    tested = split.test_domain[0]
    return Held(
        [
            *(f"{client}: {domain}" for client, domain in enumerate(domains)),
            "test split" if tested < 0 else f"held out: {split.domains[tested]}",
        ],
        [*(np.concatenate(pair) for pair in zip(train, valid, strict=True)), test],
        [*((len(t), len(v), 0) for t, v in zip(train, valid, strict=True)), (0, 0, len(test))],
    )


def cues(dataset: Dataset) -> dict[str, np.ndarray]:
    """What an environment has drawn for each image, by name: [M] integers, of several values."""
    if dataset.render is None or not hasattr(dataset.x, "_asdict"):
        return {}
    drawn = {name: np.asarray(leaf) for name, leaf in dataset.x._asdict().items()}
    return {
        name: leaf
        for name, leaf in drawn.items()
        if leaf.ndim == 1 and leaf.dtype.kind in "iu" and leaf.min() < leaf.max()
    }


def best_guess(cue: np.ndarray, y: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """What the cue alone makes one guess: [values of the cue], the commonest label of each.

    cue, y: [M]. seen: the rows that are looked at.
    """
    counts = np.zeros((cue.max() + 1, y.max() + 1), int)
    np.add.at(counts, (cue[seen], y[seen]), 1)
    return counts.argmax(1)


def table(dataset: Dataset, holdings: Held) -> str:
    """Sizes, and how often each cue alone would tell the label: a row for each holder."""
    seen = np.concatenate(holdings.rows[:-1])
    guesses = [best_guess(cue, dataset.y, seen)[cue] == dataset.y for cue in cues(dataset).values()]
    rows: list[list[Any]] = [
        [name, *(size or "" for size in sizes), *(_percent(right[rows]) for right in guesses)]
        for name, rows, sizes in zip(*holdings, strict=True)
    ]
    total = [sum(column) for column in zip(*holdings.sizes, strict=True)]
    rows.append(["in all", *total, *([""] * len(guesses))])
    headers = ["client: domain", "training", "validation", "test"]
    headers += [f"right by {name} alone, %" for name in cues(dataset)]
    right = ["left"] + ["right"] * (len(headers) - 1)
    return tabulate(rows, headers, tablefmt="github", disable_numparse=True, colalign=right)


def _percent(right: np.ndarray) -> str:
    return f"{100 * right.mean():.1f}" if len(right) else ""


def chosen(dataset: Dataset, domain: int, count: int) -> np.ndarray:
    """The first `count` rows of a domain, its labels in turn: 0, 1, 2, 0, 1, 2, 0."""
    rows = np.flatnonzero(dataset.domain == domain)
    labels = dataset.y[rows]
    turn = np.zeros(len(rows), int)  # how many of its label come before
    for label in np.unique(labels):
        turn[labels == label] = np.arange((labels == label).sum())
    return rows[np.lexsort((labels, turn))][:count]


def rendered(dataset: Dataset, rows: np.ndarray) -> np.ndarray:
    """Examples as a network sees them, float32; images are [n, height, width, channels]."""
    x = jax.tree.map(lambda leaf: jnp.asarray(leaf[rows]), dataset.x)
    return np.asarray((dataset.render or unit_range)(x), np.float32)


def to_rgb(x: np.ndarray) -> np.ndarray:
    """Images [..., channels] as RGB [..., 3] in [0, 1].

    One channel is grey, two are red and green, three as they are; of more, each has its own hue.
    """
    channels = x.shape[-1]
    if channels in (1, 3):
        return np.broadcast_to(x, (*x.shape[:-1], 3)).clip(0, 1)
    hues = matplotlib.colormaps["hsv"](np.arange(channels) / channels)[:, :3]
    hues = np.eye(3)[:2] if channels == 2 else hues
    return (x @ hues).clip(0, 1)


def draw(path: Path, dataset: Dataset, holdings: Held, *, title: str, count: int) -> None:
    """A line of `count` images for each domain; beside them what each client holds."""
    num_lines, num_holders = len(dataset.domains), len(holdings.names)
    drawn = cues(dataset)
    counts = {"class": (dataset.y, dataset.classes)}
    for name, cue in drawn.items():
        counts[name] = (cue, _NAMES.get(name, tuple(map(str, range(cue.max() + 1)))))
    counts = {name: (value, names[: value.max() + 1]) for name, (value, names) in counts.items()}
    widths = [0.62 * (count + 1.6 * len(drawn)) + 1]
    lengths = [min(_LONGEST, max(1.6, 0.3 * len(names))) for _, names in counts.values()]
    widths += [length + 0.2 for length in lengths]
    height = max(0.62 * _STEP * num_lines, min(_LONGEST, 0.2 * num_holders), 2)
    figure = Figure(figsize=(sum(widths) + 1, height + 1.3), layout="constrained")
    left, *others = figure.subplots(1, len(widths), width_ratios=widths)
    _draw_images(left, dataset, drawn, count)
    for axis, (name, (value, names)), length in zip(others, counts.items(), lengths, strict=True):
        _draw_counts(axis, partitions.class_counts(value, holdings.rows, len(names)), height)
        figures.name_x(axis, names, length, 7)
        axis.set_title(f"examples by {name}", fontsize=9)
        axis.set_yticks([])
    others[0].set_ylabel("client: domain", fontsize=8)
    figures.name_y(others[0], holdings.names, height, 7)
    figures.entitle(figure, title, 10)
    figures.save(figure, path, dpi=min(130, _MOST_PIXELS / max(figure.get_size_inches())))


def _draw_images(axis: Axes, dataset: Dataset, drawn: dict[str, np.ndarray], count: int) -> None:
    """Images with their labels, and beside them which cue each class of the domain has."""
    for line in range(len(dataset.domains)):
        rows, top = chosen(dataset, line, count), _STEP * line
        images = to_rgb(rendered(dataset, rows)) if len(rows) else ()
        for column, (row, picture) in enumerate(zip(rows, images, strict=True)):
            place = (column, column + 0.94, top + 0.94, top)
            axis.imshow(picture, extent=place, interpolation="nearest")
            label = dataset.classes[dataset.y[row]]
            text = figures.literal(label[:9])
            axis.text(column + 0.47, top - 0.04, text, fontsize=7, ha="center", va="bottom")
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
    axis.set_title("domains, with labels", fontsize=9)


def _draw_counts(axis: Axes, counts: np.ndarray, height: float) -> None:
    """Counts [N, values], shaded by their share of the holder's examples, so many inches high."""
    num_holders, num_values = counts.shape
    share = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    most = max(share.max(), min(1.0, 3 / num_values))  # even shares are of a light shade
    axis.imshow(share, aspect="auto", cmap="Blues", vmin=0, vmax=most)
    axis.tick_params(length=0)
    axis.axhline(len(counts) - 1.5, color="black", lw=0.8)  # below it, the test
    if num_values <= _MOST_WRITTEN and height / num_holders > 0.1:
        for (row, column), number in np.ndenumerate(counts):
            color = "white" if share[row, column] > 0.6 * most else "black"
            axis.text(
                column, row, number or "", fontsize=5.5, color=color, ha="center", va="center"
            )


def show(options: Options) -> str:
    """Draws the picture, and returns the table and where the picture is.

    Raises UsageError for flags that do not fit the data, and for data that are no images.
    """
    out, config = check_picture("out", options.out), options.config
    if not 1 <= options.images <= _MOST_IMAGES:
        raise UsageError(f"--images={options.images}: must be in 1..{_MOST_IMAGES}")
    made = assemble.assemble(config, config.run.seeds[:1], launch.start_of(config))
    if len(made.splits) > 1:
        raise UsageError(f"--held_out={config.data.held_out}: must be one domain to be shown")
    shape = rendered(made.dataset, np.arange(1)).shape[1:]
    if len(shape) != 3:
        raise UsageError(
            f"--dataset={config.data.dataset}: must hold images [height, width, channels], its "
            f"examples are {list(shape)}"
        )
    ((held_out, splits),) = made.splits.items()
    holdings = held(splits[config.run.seeds[0]])
    title = f"{config.title}, held out: {held_out or 'test split'}, seed {config.run.seeds[0]}"
    out.parent.mkdir(parents=True, exist_ok=True)
    draw(out, made.dataset, holdings, title=title, count=options.images)
    return f"\n{title}\n\n{table(made.dataset, holdings)}\n\nPicture: {out}."


def define(values: flags.FlagValues = flags.FLAGS) -> None:
    """Defines the flags of train, and those of this binary."""
    command_line.define(values)
    default = Options._field_defaults
    text = "Images of each domain, their labels in turn."
    flags.DEFINE_integer("images", default["images"], text, flag_values=values)
    flags.DEFINE_string("out", default["out"], "The picture, a .png file.", values)


def read(given: command_line.Given, values: flags.FlagValues = flags.FLAGS) -> Options:
    """The parsed flags; raises UsageError, in one line, as train does."""
    told = values.flag_values_dict()
    return Options(command_line.read(values, given), told["images"], told["out"])


if __name__ == "__main__":
    define()
    launch.main(show, __doc__, read)
