"""LIME masks of finished runs, side by side: the pixels that decide (FL Games, Fig. 1a).

fedjax-inv explain --runs=runs/fedavg,runs/games --images=0,3,8 --out=masks.png

The masks explain the last state of a run, or with --state=best the selected one. A game is judged
by its state at the stop: train it with --stop_below=0.6 --watch_examples=500 --after_stop=end.

LIME (Ribeiro et al. 2016) blackens random squares of an image and fits a linear model to the
probability of the class that the run predicts; the weight of a square says how much it speaks for
this class.
"""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from lime.lime_image import LimeImageExplainer
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedjax_inv.checks import UsageError
from fedjax_inv.data.federation import parts_of
from fedjax_inv.models.blocks import unit_range
from fedjax_inv.types import Algorithm, Tree
from fedjax_inv_experiments.experiment import config
from fedjax_inv_experiments.flags import command
from fedjax_inv_experiments.flags.flag import (
    at_least,
    check_different,
    check_picture,
    flag,
    flags_of,
)
from fedjax_inv_experiments.flags.outside import Named
from fedjax_inv_experiments.reporting import figures, finished, origin
from fedjax_inv_experiments.reporting.finished import OneRun
from fedjax_inv_experiments.reporting.tables import table
from fedjax_inv_experiments.running import files
from fedjax_inv_experiments.running.records import Origin

_CHANNELS = (1, 2, 3)  # grey; red and green; red, green and blue
_BATCH = 100  # perturbed images per call of the network
_OF_DATA = ("data", "environment", "partition")  # groups of flags that choose the test images
_SQUARES = 14  # along the side of an image, with --segment=0

NOTE = (
    "A square that is black already stays as it is when it is hidden: weight on the background is "
    "noise of the fit, less with more --samples, or of squares that hold both."
)

# RGB images [B, H, W, 3] -> probabilities [B, K]
Classifier = Callable[[np.ndarray], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Options(Named):
    """The flags of this binary."""

    runs: tuple[str, ...] = finished.runs_flag("Folders of finished runs, on the same data.")
    images: tuple[int, ...] = flag((0,), "Which images of the test domain, counted from 0.")
    seed: int = flag(0, "Which seed's run; it also seeds LIME.")
    run: int = flag(0, "Which run of that seed, where hyperparameters vary.")
    samples: int = flag(1000, "Perturbed images per mask.", at_least(2))
    segment: int = flag(
        0, "Side in pixels of the squares that LIME hides; 0: so that some 14 make a side."
    )
    out: str = flag(
        "masks.png",
        "The picture; beside it are the weights, .weights.npz, and a record, .png.json.",
    )
    data_dir: str = finished.data_dir_flag()
    state: str = finished.state_flag("last")


class Domain(NamedTuple):
    """The M examples of the test client of a run."""

    x: Tree  # [M, ...], as the data set stores it
    y: np.ndarray  # [M] int32
    classes: tuple[str, ...]  # K names


class Images(NamedTuple):
    """I images of a domain, as the network sees them."""

    x: np.ndarray  # [I, H, W, channels] float32
    y: np.ndarray  # [I] int32
    classes: tuple[str, ...]


class Masks(NamedTuple):
    """The masks of I images and R runs."""

    weights: np.ndarray  # [I, R, H, W], the weight of the pixel's square
    predicted: np.ndarray  # [I, R] int, the class that the weights speak for
    probability: np.ndarray  # [I, R], of that class


def find(folder: Path, options: Options) -> OneRun:
    """The run of a folder that the options ask for.

    Raises UsageError if there is none, or if it has no such state, for example because it diverged.
    """
    runs = finished.open("runs", folder, named=options.outside, data_dir=options.data_dir)
    return runs.select(options.seed, options.run, options.state)


def test_domain(one: OneRun) -> Domain:
    """The examples of the test client of a run, in the order of the data set."""
    assembled = one.runs.data
    split = assembled.splits[one.runs.cell.held_out][one.run.seed]
    rows = np.sort(parts_of(split.test)[0])
    x = jax.tree.map(lambda leaf: np.asarray(leaf)[rows], assembled.data.x)
    return Domain(x, np.asarray(assembled.data.y)[rows], assembled.dataset.classes)


def seen_images(
    domain: Domain, render: Callable[[Tree], jax.Array] | None, indices: Sequence[int]
) -> Images:
    """Images of the domain. Raises UsageError for an index out of range, or if there are none."""
    for index in indices:
        if not 0 <= index < len(domain.y):
            text = f"must be in 0..{len(domain.y) - 1}, those of the test domain"
            raise UsageError("--images", index, text)
    x = jax.tree.map(lambda leaf: jnp.asarray(leaf[list(indices)]), domain.x)
    seen = np.asarray((render or unit_range)(x), np.float32)
    if seen.ndim != 4 or seen.shape[3] not in _CHANNELS:
        text = f"must be on images of 1, 2 or 3 channels, not on inputs {seen.shape[1:]}"
        raise UsageError("--runs", ..., text)
    return Images(seen, domain.y[list(indices)], domain.classes)


def to_rgb(x: np.ndarray) -> np.ndarray:
    """Images [..., C] as RGB [..., 3]: grey for C = 1, red and green for 2, unchanged for 3."""
    if x.shape[-1] == 2:
        return np.concatenate([x, np.zeros_like(x[..., :1])], axis=-1)
    return np.broadcast_to(x, (*x.shape[:-1], 3))


def from_rgb(rgb: np.ndarray, channels: int) -> np.ndarray:
    """Images [..., channels] from RGB [..., 3], the inverse of `to_rgb`."""
    return rgb[..., :channels]


def classifier(algorithm: Algorithm, server: Tree, channels: int) -> Classifier:
    """A function from RGB images to the probabilities that a new client predicts.

    channels: the number of channels of the network's inputs.
    """

    @jax.jit
    def probabilities(server: Tree, x: jax.Array) -> jax.Array:
        own = algorithm.init_client(server, jnp.int32(0))
        return jax.nn.softmax(algorithm.predict(server, own, x))

    def classify(rgb: np.ndarray) -> np.ndarray:
        x = from_rgb(rgb, channels)
        # Whole batches, so that the function is compiled once.
        padded = np.resize(x, (-(-len(x) // _BATCH) * _BATCH, *x.shape[1:]))
        batches = np.split(padded, len(padded) // _BATCH)
        return np.concatenate([probabilities(server, batch) for batch in batches])[: len(x)]

    return classify


def check_same(runs: Sequence[OneRun], domains: Sequence[Domain]) -> None:
    """Raises UsageError if the runs have different test domains. domains: one per run."""
    leaves = jax.tree.leaves(domains[0])
    for one, domain in zip(runs, domains, strict=True):
        others = jax.tree.leaves(domain)
        if len(others) != len(leaves) or not all(map(np.array_equal, others, leaves)):
            first, other = runs[0].runs, one.runs
            old, new = (
                {**config.to_record(each.config), **each.cell._asdict()} for each in (first, other)
            )
            of_data = [each.name for group in _OF_DATA for each in config.fields(group)]
            every = [name for name in old if old[name] != new[name]]
            differ = ", ".join([name for name in every if name in of_data] or every)
            raise UsageError(
                f"--runs={first.path},{other.path}",
                ...,
                f"must have the same test images; these runs differ in {differ}",
            )


def squares(height: int, width: int, side: int) -> np.ndarray:
    """[height, width] int: for each pixel the number of its square of side x side pixels.

    LIME's own segmentation, quickshift, groups pixels of similar colour within some ten pixels. In
    an image of 8x8 or 28x28 it finds one or two segments, and none of them is a stroke.
    """
    rows, columns = np.arange(height) // side, np.arange(width) // side
    return rows[:, None] * (columns[-1] + 1) + columns


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
    return weights[segments]


def explain_all(
    images: Images, classifiers: Sequence[Classifier], *, side: int, samples: int, seed: int
) -> Masks:
    """The masks of all images and runs. All runs see the same perturbations of an image."""
    num_images, height, width, _ = images.x.shape
    segments = squares(height, width, side)
    weights = np.zeros((num_images, len(classifiers), height, width))
    pictures = to_rgb(images.x)
    probabilities = np.stack([classify(pictures) for classify in classifiers], axis=1)
    predicted = probabilities.argmax(-1)
    for i, run in np.ndindex(predicted.shape):
        weights[i, run] = explain(
            pictures[i],
            classifiers[run],
            segments,
            predicted[i, run],
            samples=samples,
            seed=seed,
        )
    return Masks(weights, predicted, probabilities.max(-1))


def figure_of(x: np.ndarray) -> np.ndarray:
    """[..., H, W] bool: which pixels of images [..., H, W, channels] are not black."""
    return np.any(x > 0, axis=-1)


def shares(images: Images, masks: Masks, labels: Sequence[str]) -> str:
    """A table of the absolute weight on figure and background over all images, a line per run."""
    figure = figure_of(images.x)[:, None]
    size = np.abs(masks.weights)
    on, off = ((size * where).sum((0, 2, 3)) for where in (figure, ~figure))
    with np.errstate(invalid="ignore"):  # 0 / 0 of a run for which no square matters
        percent = 100 * on / (on + off)
    rows = list(zip(labels, on, off, percent, strict=True))
    rows.append(("pixels", figure.sum(), (~figure).sum(), 100 * figure.mean()))
    columns = {
        "absolute weight": lambda row: row[0],
        "on the figure": lambda row: f"{row[1]:.4g}",
        "on the background": lambda row: f"{row[2]:.4g}",
        "on the figure, %": lambda row: f"{row[3]:.1f}",
    }
    return table(rows, columns, align="decimal")


def draw(
    path: Path,
    images: Images,
    masks: Masks,
    *,
    title: str,
    labels: Sequence[str],
    indices: Sequence[int],
) -> None:
    """Draws a line per image: the image, then the mask of each run.

    labels: the names of the runs. indices: the numbers of the images.
    """
    lines, columns = masks.predicted.shape
    drawing = Figure(figsize=(2.2 + 2.7 * columns, 1.1 + 2.4 * lines), layout="constrained")
    axes = drawing.subplots(lines, columns + 1, squeeze=False)
    figures.entitle(drawing, title, 10)
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[])
    for axis, head in zip(axes[0], ("test image", *labels), strict=True):
        axis.annotate(
            figures.wrapped(head, 2.4, 9),
            (0.5, 1),
            xytext=(0, 24),
            xycoords="axes fraction",
            textcoords="offset points",
            ha="center",
            fontsize=9,
            fontweight="bold",
        )
    for i in range(lines):
        axes[i, 0].imshow(to_rgb(images.x[i]).clip(0, 1))
        axes[i, 0].set_title(
            figures.literal(f"{indices[i]}: label {images.classes[images.y[i]]}"), fontsize=9
        )
        for run in range(columns):
            axis, label = axes[i, run + 1], masks.predicted[i, run]
            _draw_mask(axis, masks.weights[i, run], figure_of(images.x[i]))
            axis.set_title(
                figures.literal(
                    f"predicts {images.classes[label]}, p = {masks.probability[i, run]:.2f}"
                ),
                fontsize=9,
                color="C2" if label == images.y[i] else "C3",
            )
    figures.save(drawing, path, dpi=150)


def _draw_mask(axis: Axes, weights: np.ndarray, figure: np.ndarray) -> None:
    """Draws a heat map of the weights [H, W], and a line around the figure [H, W]."""
    limit = np.abs(weights).max() or 1.0
    picture = axis.imshow(weights, cmap="PuOr_r", vmin=-limit, vmax=limit)
    bar = axis.figure.colorbar(picture, ax=axis, shrink=0.85, pad=0.03)
    bar.ax.tick_params(labelsize=7)
    if figure.any() and not figure.all():
        # Along the edges of the pixels, not through their centres.
        extent = (-0.5, figure.shape[1] - 0.5, -0.5, figure.shape[0] - 0.5)
        fine = np.kron(figure, np.ones((16, 16)))
        axis.contour(fine, [0.5], extent=extent, colors="black", linewidths=0.7, alpha=0.6)


def run(options: Options) -> str:
    """Writes the masks, and returns the table and the paths.

    Raises UsageError for an option out of its range.
    """
    finished.check_runs(options.runs)
    check_different("images", options.images)
    out = check_picture("out", options.out)
    runs = [find(Path(folder), options) for folder in options.runs]
    for one in runs:
        one.runs.check_classes()
    domains = [test_domain(one) for one in runs]
    check_same(runs, domains)
    images = seen_images(domains[0], runs[0].runs.data.dataset.render, options.images)
    largest = min(images.x.shape[1:3])
    side = options.segment or max(1, largest // _SQUARES)
    if not 1 <= side <= largest:
        raise UsageError("--segment", side, f"must be in 0..{largest}, the side of the images")
    channels = images.x.shape[-1]
    # LIME changes images after they are rendered.
    classifiers = [
        classifier(one.algorithm(rendered=True), one.served().server, channels) for one in runs
    ]
    masks = explain_all(
        images,
        classifiers,
        side=side,
        samples=options.samples,
        seed=options.seed,
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    labels = [one.label for one in runs]
    draw(out, images, masks, title=_title(runs[0]), labels=labels, indices=options.images)
    files.write_json(out.with_name(f"{out.name}.json"), _origin(options, runs))
    arrays = out.with_suffix(".weights.npz")  # .npz alone may be the name of a data set
    with files.replacing(arrays) as file:
        np.savez(file, **masks._asdict(), images=options.images, runs=options.runs)
    return f"\n{shares(images, masks, labels)}\n\n{NOTE}\nMasks: {out}. Weights: {arrays}."


def _origin(options: Options, runs: Sequence[OneRun]) -> Origin:
    """The record of the picture: the command without places, and the provenance of its runs."""
    words = ["explain"]
    for field in flags_of(options):
        value = getattr(options, field.name)
        if field.name not in ("out", "data_dir") and value != field.default:
            text = ",".join(map(str, value)) if isinstance(value, tuple) else value
            words.append(f"--{field.name}={text}")
    cells = [(one.runs.path, one.runs.result) for one in runs]
    record = origin.of(words, cells)
    return msgspec.structs.replace(record, seeds=[options.seed])


def _title(one: OneRun) -> str:
    chosen, held_out = one.runs.config, one.runs.cell.held_out
    return (
        f"{chosen.data.stem}, {chosen.environment.name} domains, held out: "
        f"{held_out or 'test split'}\n"
        "LIME weights: orange speaks for the predicted class, purple against it"
    )


BINARY = command.of(run, Options, __doc__)

if __name__ == "__main__":
    command.main(BINARY)
