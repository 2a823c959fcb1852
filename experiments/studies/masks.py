"""LIME masks: the pixels that decide, side by side for the rows of a study (FL Games, Fig. 1a).

LIME (Ribeiro et al. 2016) blackens random squares of an image and fits a linear model to the
probability of the class that a network predicts; the weight of a square says how much it speaks for
this class.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from scipy import special

from fedjax_inv.data.federation import parts_of

from .. import finished
from ..finished import Runs
from ..report import figures
from ..report.data_figures import rendered, to_rgb
from . import drawings
from .row_runs import RowResult

IMAGES = (0, 11)  # of the test domain
SAMPLES = 1000  # perturbed images per mask
_BATCH = 100  # perturbed images per call of the network
_SQUARES = 14  # along the side of an image

# RGB images [B, H, W, 3] -> probabilities [B, K]
Classifier = Callable[[np.ndarray], np.ndarray]


class Masks(NamedTuple):
    """The masks of I images and a run."""

    label: str
    images: np.ndarray  # [I, H, W, channels] as the network sees them
    y: np.ndarray  # [I] int32
    classes: tuple[str, ...]
    weights: np.ndarray  # [I, H, W], the weight of the pixel's square
    predicted: np.ndarray  # [I] int, the class that the weights speak for
    probability: np.ndarray  # [I], of that class


def seen_images(runs: Runs, seed: int, indices: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """(images as the network sees them, labels) of the test domain of a seed.

    indices: which, in the order of the data set.
    """
    made = runs.data
    test = made.splits[runs.cell.held_out][seed].test
    rows = np.sort(parts_of(test)[0])[list(indices)]
    return rendered(made.dataset, rows), np.asarray(made.data.y)[rows]


def classifier(runs: Runs, index: int, channels: int) -> Classifier:
    """A function from RGB images to the probabilities that a new client of a run predicts.

    channels: the number of channels of the network's inputs, which `to_rgb` lets stand first.
    """

    def classify(rgb: np.ndarray) -> np.ndarray:
        logits = runs.fitted_to_images.predict(rgb[..., :channels], index)
        return np.asarray(special.softmax(logits, -1))

    return classify


def squares(height: int, width: int, side: int) -> np.ndarray:
    """[height, width] int: for each pixel the number of its square of side x side pixels.

    LIME's own segmentation, quickshift, groups pixels of similar colour within some ten pixels. In
    an image of 8x8 or 28x28 it finds one or two segments, and none of them is a stroke.
    """
    rows = np.arange(height) // side
    columns = np.arange(width) // side
    return np.asarray(rows[:, None] * (columns[-1] + 1) + columns)


def explain(
    rgb: np.ndarray,
    classify: Classifier,
    segments: np.ndarray,
    label: int,
    *,
    samples: int,
    seed: int,
) -> np.ndarray:
    """LIME's weights [H, W] for the probability of `label`, equal within each segment.

    rgb: [H, W, 3]. segments: [H, W] int, numbered from 0. samples: the number of perturbed images.
    """
    from lime.lime_image import LimeImageExplainer  # its import takes a second

    explanation = LimeImageExplainer(random_state=seed).explain_instance(
        rgb,
        classify,
        labels=(label,),
        top_labels=None,
        hide_color=0,
        num_samples=samples,
        batch_size=_BATCH,
        segmentation_fn=lambda image: segments,
    )
    weights = np.zeros(segments.max() + 1)
    for segment, weight in explanation.local_exp[label]:
        weights[segment] = weight
    return np.asarray(weights[segments])


def masks(result: RowResult, indices: Sequence[int] = IMAGES, samples: int = SAMPLES) -> Masks:
    """The masks of a row's first seed, by the last state: of a game, that of its stop.

    Every row sees the same perturbations of an image.
    """
    seed = result.config.training.seeds[0]
    runs = finished.open("run_dir", result.only.folder, "last", named=result.config.outside)
    index = next(index for index, run in enumerate(runs.cell.runs) if run.seed == seed)
    images, y = seen_images(runs, seed, indices)
    classify = classifier(runs, index, images.shape[-1])
    pictures = to_rgb(images)
    probabilities = classify(pictures)
    predicted = probabilities.argmax(-1)
    height, width = images.shape[1:3]
    segments = squares(height, width, max(1, min(height, width) // _SQUARES))
    weights = [
        explain(picture, classify, segments, label, samples=samples, seed=seed)
        for picture, label in zip(pictures, predicted, strict=True)
    ]
    label = f"{result.row.label}, round {runs.line(index).played}"
    classes = runs.data.dataset.classes
    return Masks(label, images, y, classes, np.stack(weights), predicted, probabilities.max(-1))


def draw(path: Path, data: str, results: Sequence[RowResult]) -> str:
    """Draws a line per image: the image, then the mask of each row."""
    rows = [masks(result) for result in results if result.is_complete]
    return paint(path, data, rows) if rows else drawings.NOTHING


def paint(path: Path, data: str, rows: Sequence[Masks]) -> str:
    """Draws the masks, and returns the line to print about the figure."""
    first = rows[0]
    count = len(first.images)
    drawing = figures.new(2.2 + 2.7 * len(rows), 1.1 + 2.4 * count)
    axes = drawing.subplots(count, len(rows) + 1, squeeze=False)
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[])
    for i, (image, label) in enumerate(zip(first.images, first.y, strict=True)):
        axes[i, 0].imshow(to_rgb(image))
        axes[i, 0].set_title(figures.literal(f"label {first.classes[label]}"), fontsize=9)
        for axis, row in zip(axes[i, 1:], rows, strict=True):
            _draw_mask(axis, row.weights[i], np.any(image > 0, axis=-1))
            predicts = f"predicts {row.classes[row.predicted[i]]}, p = {row.probability[i]:.2f}"
            title = figures.wrapped(f"{row.label}\n{predicts}", 2.4, 9)
            color = "C2" if row.predicted[i] == label else "C3"
            axis.set_title(title, fontsize=9, color=color)
    about = "LIME weights: orange speaks for the predicted class, purple against it"
    return drawings.saved(drawing, path, f"{data}\n{about}", dpi=150)


def _draw_mask(axis: Axes, weights: np.ndarray, figure: np.ndarray) -> None:
    """Draws a heat map of the weights [H, W], and a line around the figure [H, W]."""
    limit = np.abs(weights).max() or 1.0
    picture = axis.imshow(weights, cmap="PuOr_r", vmin=-limit, vmax=limit)
    axis.figure.colorbar(picture, ax=axis, shrink=0.85, pad=0.03)
    if figure.any() and not figure.all():
        # Along the edges of the pixels, not through their centres.
        extent = (-0.5, figure.shape[1] - 0.5, -0.5, figure.shape[0] - 0.5)
        fine = np.kron(figure, np.ones((16, 16)))
        axis.contour(fine, [0.5], extent=extent, colors="black", linewidths=0.7, alpha=0.6)
