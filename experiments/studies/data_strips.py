"""A figure of kinds of shift: what clients and the test see, and the methods' accuracies below."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes

from fedjax_inv.data import federation

from ..assembly import experiment
from ..config import Config
from ..report import figures
from ..report.data_figures import rendered, to_rgb
from . import drawings

_IMAGES = 8  # of a line
# Colours that most colour-blind people tell apart (Okabe and Ito).
_CUES = np.array([[0.34, 0.71, 0.91], [0.90, 0.62, 0.0]])


class StripPanel(NamedTuple):
    """A kind of shift."""

    title: str
    strip: Mapping[str, np.ndarray]  # who sees the images -> [n, height, width, 3] in [0, 1]
    bars: Mapping[str, Sequence[float]]  # method -> test accuracy of each seed, in percent
    chance: float  # the accuracy of guessing


def strip(config: Config) -> dict[str, np.ndarray]:
    """Images of the first seed in the order of their labels: of two clients, and of the test."""
    assembled = experiment.make(config, config.training.seeds[:1])
    ((splits),) = assembled.splits.values()
    split = splits[config.training.seeds[0]]
    clients, (test,) = federation.parts_of(split.train), federation.parts_of(split.test)
    shown = {"client 1": clients[0], f"client {len(clients)}": clients[-1], "test": test}
    y = assembled.dataset.y
    first = {
        name: of[:_IMAGES][np.argsort(y[of[:_IMAGES]], kind="stable")] for name, of in shown.items()
    }
    return {name: colours(rendered(assembled.dataset, rows)) for name, rows in first.items()}


def colours(images: np.ndarray) -> np.ndarray:
    """Images as RGB; those of two channels in colours that colour-blind people tell apart."""
    return (images @ _CUES).clip(0, 1) if images.shape[-1] == 2 else to_rgb(images)


def draw(path: Path, panels: Sequence[StripPanel], methods: Sequence[str]) -> str:
    """Draws the panels side by side, and returns the line to print about the picture.

    methods: the names of the bars, from above.
    """
    if not panels:
        return drawings.NOTHING
    strips = 3 * max(len(panel.strip) for panel in panels) / _IMAGES
    bars = 0.36 * len(methods) + 0.3
    figure = figures.new(3 * len(panels) + 1, strips + bars + 0.8)
    grid = figure.subplots(2, len(panels), squeeze=False, height_ratios=(strips, bars))
    for panel, (above, below) in zip(panels, grid.T, strict=True):
        _draw_strip(above, panel)
        _draw_bars(below, panel, methods)
    figures.save(figure, path)
    return f"Figure: {path}."


def _draw_strip(axis: Axes, panel: StripPanel) -> None:
    axis.set_title(figures.literal(panel.title), fontweight="bold")
    for line, images in enumerate(panel.strip.values()):
        for column, image in enumerate(images):
            place = (column, column + 0.95, line + 0.95, line)
            axis.imshow(image, extent=place, interpolation="nearest")
    count = len(panel.strip)
    axis.set(xlim=(0, _IMAGES), ylim=(count, 0), aspect="equal", xticks=[])
    axis.set_yticks([line + 0.48 for line in range(count)], [*panel.strip])
    axis.tick_params(length=0)
    axis.set_frame_on(False)


def _draw_bars(axis: Axes, panel: StripPanel, methods: Sequence[str]) -> None:
    """Draws mean, standard deviation and a dot per seed; an empty bar would look like 0%."""
    styles = figures.styles(methods)
    for place, name in enumerate(methods):
        values = panel.bars.get(name, ())
        if not len(values):
            axis.text(2, place, "no value", va="center", color="0.4")
            continue
        mean = float(np.mean(values))
        std = float(np.std(values, ddof=len(values) > 1))
        color = styles[name]["color"]
        axis.barh(place, mean, xerr=std, height=0.7, color=color, alpha=0.75, capsize=3)
        axis.plot(values, [place] * len(values), "o", mfc="white", mec="black", ms=3.5)
        axis.text(max([mean + std, *values]) + 2, place, f"{mean:.0f}", va="center")
    axis.axvline(panel.chance, color="black", lw=1, ls=":")
    axis.text(panel.chance, -0.55, "chance", ha="center", va="bottom")
    axis.set(xlim=(0, 112), ylim=(len(methods) - 0.5, -0.5), xlabel="test accuracy, %")
    axis.set_yticks(range(len(methods)), methods)
