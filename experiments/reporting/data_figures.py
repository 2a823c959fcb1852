"""Figures of the data: images of every domain, and the examples of each client."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import numpy as np

from fedjax_inv.data import federation, partitions
from fedjax_inv.data.dataset import Dataset
from fedjax_inv.data.federation import Split

from ..flags.flag import shown
from ..reporting import figures

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_IMAGES = 6  # images of each domain, beside the counts
_GAP = 0.08  # between images, as a part of their sides
# The end of the title of a picture that counts the examples of clients for training and validation.
HELD = ",\nwith those for validation"


def title_of(data: str, held_out: str | None, seed: int) -> str:
    """The title of a figure of a data set. held_out: None for its test split."""
    return f"{data}, held out: {held_out or 'test split'}, seed {seed}"


def client_names(split: Split, is_wrong: np.ndarray | None = None) -> list[str]:
    """The names of the clients: number and domain, and whether labels are wrong.

    is_wrong: [M] bool, whether a row has a wrong label; None: all are right.
    """
    domains = [split.domains[domain] if domain >= 0 else "mixed" for domain in split.domain]
    names = [f"{client}: {domain}" for client, domain in enumerate(domains)]
    if is_wrong is None or not is_wrong.any():
        return names
    pairs = zip(*map(federation.parts_of, (split.train, split.valid)), strict=True)
    wrong = [is_wrong[np.concatenate(pair)].any() for pair in pairs]
    return [f"{name}, wrong labels" if w else name for name, w in zip(names, wrong, strict=True)]


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
    import matplotlib

    hues = matplotlib.colormaps["hsv"](np.arange(channels) / channels)[:, :3]
    hues = np.eye(3)[:2] if channels == 2 else hues
    return (x @ hues).clip(0, 1)


def draw_partition(
    path: Path,
    dataset: Dataset,
    split: Split,
    is_wrong: np.ndarray | None = None,
    *,
    title: str,
) -> None:
    """Draws what each client trains on, and examples of every domain.

    is_wrong: as in `client_names`. title: from `title_of`; `figures.title_in` reads it again.

    Files that are there and show the same are not drawn again.
    """
    rows = federation.parts_of(split.train)
    names, counts = target_counts(dataset, rows)
    firsts = [np.flatnonzero(dataset.domain == k)[:_IMAGES] for k in range(len(dataset.domains))]
    full = [k for k, first in enumerate(firsts) if len(first) == _IMAGES]
    few = np.concatenate([firsts[k] for k in full]) if full else np.zeros(0, int)
    # Only the examples that are drawn: a digest is taken of all that the figure shows.
    some = dataset._replace(
        x=jax.tree.map(lambda leaf: np.asarray(leaf[few]), dataset.x),
        y=dataset.y[few],
        domain=dataset.domain[few],
        domains=tuple(dataset.domains[k] for k in full),
        test=dataset.test[few],
        user=None,
        original=None,
    )
    everything = counts, names, some, client_names(split, is_wrong), title
    figures.draw(path, _partition, *everything, dpi=110, title=title)


def target_counts(
    dataset: Dataset, parts: Sequence[np.ndarray]
) -> tuple[Sequence[str], np.ndarray]:
    """(names [N], how many examples of each client have each, [C, N]). parts: rows by client.

    The names are those of classes, of labels, or of tenths of the data set by the first value.
    """
    if dataset.task == "classes":
        counts = partitions.class_counts(dataset.y, parts, len(dataset.classes))
        return dataset.classes, counts
    if dataset.task == "labels":
        return dataset.classes, np.stack([dataset.y[rows].sum(0) for rows in parts])
    values = dataset.y.reshape(len(dataset.y), -1)[:, 0]
    edges = np.unique(np.quantile(values, np.linspace(0.1, 0.9, 9)))
    tenth = np.searchsorted(edges, values, side="right")
    texts = _short(edges)
    names = [f"below {texts[0]}", *(f"from {text}" for text in texts)]
    counted = [np.bincount(tenth[rows], minlength=len(names)) for rows in parts]
    return names, np.stack(counted)


def _short(numbers: np.ndarray) -> list[str]:
    """Different numbers as texts that differ, of three digits if these are enough."""
    for digits in range(3, 18):
        texts = [shown(float(f"{number:.{digits}g}")) for number in numbers]
        if len(set(texts)) == len(texts):
            break
    return texts


def _partition(
    counts: np.ndarray, names: Sequence[str], some: Dataset, clients: Sequence[str], title: str
) -> Figure:
    """The figure of the counts [C, N] and their names.

    some: the data set with the examples to draw alone.
    """
    examples = _examples(some)
    domains = () if examples is None else some.domains
    height = max(2.6, min(9.0, 0.22 * len(counts) + 1.6), min(9.0, 0.5 * len(domains) + 1.6))
    figure = figures.new(11 if domains else 6.6, height)
    left, *others = figure.subplots(1, 2, width_ratios=(3, 2)) if domains else [figure.subplots()]
    picture = left.imshow(counts, aspect="auto", cmap="Blues", vmin=0, interpolation="nearest")
    figure.colorbar(picture, ax=left, label="training examples", fraction=0.05)
    what = {"classes": "class", "labels": "label", "values": some.classes[0]}[some.task]
    left.set(xlabel=figures.literal(what), ylabel="client")
    left.set_title("What each client trains on, without validation", fontsize=10)
    figures.name_x(left, names, 4.2)
    figures.name_y(left, clients, height - 1.4)
    for right in others:
        assert examples is not None
        lines = len(domains)
        right.set(xticks=[], yticks=[])
        right.set_frame_on(False)
        right.imshow(examples, extent=(0, _IMAGES, lines - 0.5, -0.5))
        right.set_aspect(examples.shape[0] / examples.shape[1] * _IMAGES / lines)
        figures.name_y(right, domains, height - 1.4)
        right.tick_params(length=0)
        right.set_title("Examples of every domain", fontsize=10)
    figures.entitle(figure, title)
    return figure


def _examples(some: Dataset) -> np.ndarray | None:
    """A picture with a line of images for each domain, with white gaps; None without images."""
    if not some.domains:
        return None
    images = rendered(some, np.arange(len(some.y)))
    if images.ndim != 4:
        return None
    lines = to_rgb(images).reshape(len(some.domains), _IMAGES, *images.shape[1:3], 3)
    high, wide = (max(1, round(_GAP * side)) for side in images.shape[1:3])
    around = (0, 0), (0, 0), (0, high), (0, wide), (0, 0)
    lines = np.pad(lines, around, constant_values=1.0)
    return np.concatenate([np.concatenate(list(line), axis=1) for line in lines])
