"""Figures of the data: images of every domain, and the examples of each client."""

from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from matplotlib.figure import Figure

from experiments.reporting import figures
from fedjax_inv.data import federation, partitions
from fedjax_inv.data.dataset import Dataset
from fedjax_inv.data.federation import Split
from fedjax_inv.models.blocks import unit_range

_IMAGES = 6  # images of each domain, beside the counts


def client_names(split: Split) -> list[str]:
    """The names of the clients: number and domain."""
    domains = [split.domains[domain] if domain >= 0 else "mixed" for domain in split.domain]
    return [f"{client}: {domain}" for client, domain in enumerate(domains)]


def rendered(dataset: Dataset, rows: np.ndarray) -> np.ndarray:
    """Examples as a network sees them, float32; images are [n, height, width, channels]."""
    x = jax.tree.map(lambda leaf: jnp.asarray(leaf[rows]), dataset.x)
    return np.asarray((dataset.render or unit_range)(x), np.float32)


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


def draw_partition(path: Path, dataset: Dataset, split: Split) -> None:
    """Draws the class counts of each client, and examples of every domain."""
    rows = federation.parts_of(split.train)
    counts = partitions.class_counts(dataset.y, rows, len(dataset.classes))
    examples, domains = _examples(dataset)
    height = max(2.6, min(9.0, 0.22 * len(rows) + 1.6), min(9.0, 0.5 * len(domains) + 1.6))
    figure = Figure(figsize=(11, height), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    picture = left.imshow(counts, aspect="auto", cmap="Blues", vmin=0, interpolation="nearest")
    figure.colorbar(picture, ax=left, label="training examples", fraction=0.05)
    left.set(xlabel="class", ylabel="client", title="What each client trains on")
    figures.name_x(left, dataset.classes, 4.2)
    figures.name_y(left, client_names(split), height - 1.4)
    right.set(xticks=[], yticks=[])
    right.set_frame_on(False)
    if examples is not None:
        lines = len(domains)
        right.imshow(examples, extent=(0, _IMAGES, lines - 0.5, -0.5))
        right.set_aspect(examples.shape[0] / examples.shape[1] * _IMAGES / lines)
        figures.name_y(right, domains, height - 1.4)
        right.tick_params(length=0)
        right.set_title("Examples of every domain", fontsize=10)
    figures.save(figure, path, dpi=110)


def _examples(dataset: Dataset) -> tuple[np.ndarray | None, list[str]]:
    """A picture with a line of images for each domain that has enough, and these domains.

    The picture is None if the data are not images, or no domain has enough.
    """
    lines, names = [], []
    for domain, name in enumerate(dataset.domains):
        images = rendered(dataset, np.flatnonzero(dataset.domain == domain)[:_IMAGES])
        if images.ndim != 4:
            return None, []
        if len(images) == _IMAGES:
            lines.append(np.concatenate(list(to_rgb(images)), axis=1))
            names.append(name)
    return (np.concatenate(lines), names) if lines else (None, [])
