"""Which pixels decide: LIME masks of finished runs, side by side (FL Games, Fig. 1a).

python -m experiments.explain --runs=runs/fedavg,runs/games --images=0,3,8 --out=masks.png

A run is explained as it is at its end, or (--state=best) where it was selected. The state that a
game is judged by is the one at its stop: train it with --stop_below=0.6 --watch_examples=500
--after_stop=end.

LIME (Ribeiro et al. 2016) blackens random squares of an image and fits a linear model to the
probability of the class that the run predicts; a square's weight says how much it speaks for it.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from lime.lime_image import LimeImageExplainer
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.experiment import assemble, config, grid
from experiments.experiment.assemble import Assembled
from experiments.experiment.config import Config
from experiments.flags.flag import check_picture
from experiments.parts import network as networks
from experiments.parts import training
from experiments.reporting import figures
from experiments.reporting import finished as trained
from experiments.reporting.finished import Finished
from experiments.reporting.tables import tabulate
from experiments.running import launch
from fedjax_inv import program
from fedjax_inv.checks import UsageError
from fedjax_inv.data.federation import parts_of
from fedjax_inv.models.blocks import unit_range
from fedjax_inv.types import Algorithm, Tree

_CHANNELS = (1, 2, 3)  # that make a picture: grey, red and green, red, green and blue
_BATCH = 100  # perturbed images per call of the network
_SQUARES = 14  # along the side of an image, where --segment=0

NOTE = (
    "A square that is black already stays as it is when it is hidden: weight on the background is "
    "noise of the fit, less with more --samples, or of squares that hold both."
)

# [B, H, W, 3] -> probabilities [B, K]
Classifier = Callable[[np.ndarray], np.ndarray]


class Options(NamedTuple):
    """The flags of this binary."""

    runs: tuple[str, ...]
    images: tuple[int, ...] = (0,)
    seed: int = 0
    run: int = 0
    samples: int = 1000
    segment: int = 0
    out: str = "masks.png"
    data_dir: str = ""
    state: str = "last"


class Trained(NamedTuple):
    """A run of a finished run folder."""

    finished: Finished
    which: int  # of the cell's runs
    state: str  # which of its states is explained

    @property
    def folder(self) -> Path:
        """Where it lies."""
        return self.finished.folder

    @property
    def config(self) -> Config:
        """Its flags."""
        return self.finished.config

    @property
    def cell(self) -> grid.Cell:
        """Its cell."""
        return self.finished.cell

    @property
    def run(self) -> program.Run:
        """The run itself."""
        return self.cell.runs[self.which]

    @property
    def label(self) -> str:
        """The algorithm, its settings and what varies of its hyperparameters; folder and state."""
        names = [self.cell.label, *self.finished.varied(self.which)]
        return f"{' '.join(names)} ({self.folder.name}, {self._when()})"

    def _when(self) -> str:
        """Of when the state is."""
        run = self.finished.result["runs"][self.which]
        stops = [stop["round"] for stop in run.get("stops", [])]
        ends = self.config.watching.after_stop == "end" and stops and all(stops)
        if self.state == "last" and ends:
            return f"at its stop in round {max(stops)}"
        told = self.finished.told(self.which, self.state)
        assert told is not None  # by `find`
        return f"after round {told['round']}"


class Domain(NamedTuple):
    """What the test client of a run holds, M examples."""

    x: Tree  # [M, ...], as the data set stores it
    y: np.ndarray  # [M] int32
    classes: tuple[str, ...]  # K names


class Images(NamedTuple):
    """Images of it as the networks see them, I in all."""

    x: np.ndarray  # [I, H, W, channels] float32
    y: np.ndarray  # [I] int32
    classes: tuple[str, ...]


class Masks(NamedTuple):
    """What LIME says about I images and R runs."""

    weights: np.ndarray  # [I, R, H, W], of the square that the pixel is in
    predicted: np.ndarray  # [I, R] int, the class that the weights speak for
    probability: np.ndarray  # [I, R], of that class


def find(folder: Path, options: Options) -> Trained:
    """The run of a finished folder that the options ask for.

    Raises UsageError if there is none, or it has no such state, as one that diverged.
    """
    trained.check_state(options.state)
    one = trained.find("runs", folder, options.data_dir)
    seeds = one.config.run.seeds
    if options.seed not in seeds:
        told = ", ".join(map(str, seeds))
        raise UsageError(f"--seed={options.seed}: must be one of {told}, those of {folder}")
    indices = [index for index, each in enumerate(one.cell.runs) if each.seed == options.seed]
    if not 0 <= options.run < len(indices):
        raise UsageError(
            f"--run={options.run}: must be in 0..{len(indices) - 1}, the runs of "
            f"--seed={options.seed} in {folder}"
        )
    which = indices[options.run]
    trained.check_told(one, which, options.state)
    return Trained(one, which, options.state)


def held_out(one: Trained, made: Assembled) -> Domain:
    """What the test client of a run holds, in the order of the data set."""
    split = made.splits[one.cell.held_out][one.run.seed]
    rows = np.sort(parts_of(split.test)[0])
    x = jax.tree.map(lambda leaf: np.asarray(leaf)[rows], made.data.x)
    return Domain(x, np.asarray(made.data.y)[rows], made.dataset.classes)


def seen_images(
    domain: Domain, render: Callable[[Tree], jax.Array] | None, indices: Sequence[int]
) -> Images:
    """Images of the domain. Raises UsageError for an index out of range, or if there are none."""
    for index in indices:
        if not 0 <= index < len(domain.y):
            raise UsageError(
                f"--images={index}: must be in 0..{len(domain.y) - 1}, those of the test domain"
            )
    x = jax.tree.map(lambda leaf: jnp.asarray(leaf[list(indices)]), domain.x)
    seen = np.asarray((render or unit_range)(x), np.float32)
    if seen.ndim != 4 or seen.shape[3] not in _CHANNELS:
        raise UsageError(
            f"--runs: must be on images of 1, 2 or 3 channels, not on inputs {seen.shape[1:]}"
        )
    return Images(seen, domain.y[list(indices)], domain.classes)


def to_rgb(x: np.ndarray) -> np.ndarray:
    """Images [..., C] as RGB [..., 3]: C = 1 grey, 2 red and green, 3 as they are."""
    if x.shape[-1] == 2:
        return np.concatenate([x, np.zeros_like(x[..., :1])], axis=-1)
    return np.broadcast_to(x, (*x.shape[:-1], 3))


def from_rgb(rgb: np.ndarray, channels: int) -> np.ndarray:
    """The images [..., channels] that `to_rgb` made RGB [..., 3] of."""
    return rgb[..., :channels]


def restore(one: Trained, made: Assembled) -> tuple[Algorithm, Tree]:
    """A run's algorithm, on rendered inputs, and its server in the state that is asked for.

    Raises UsageError if it was not kept, or the checkpoint is not one of this run.
    """
    held = trained.served(one.finished, made, one.state)
    trained.check_kept(one.finished, held, one.which, one.state)
    server = jax.tree.map(lambda leaf: leaf[one.which], held.server)
    # LIME changes what the network sees, so this one takes inputs as they are after rendering.
    network = networks.make(one.config.model, made.dataset._replace(render=None))
    algorithm = assemble.algorithm(one.config, one.cell, network, one.run.hyper, training.Sizes())
    return algorithm, server


def classifier(algorithm: Algorithm, server: Tree, channels: int) -> Classifier:
    """What a client never seen predicts from RGB images, whose inputs have `channels`."""

    @jax.jit
    def probabilities(server: Tree, x: jax.Array) -> jax.Array:
        own = algorithm.init_client(server, jnp.int32(0))
        return jax.nn.softmax(algorithm.predict(server, own, x))

    def classify(rgb: np.ndarray) -> np.ndarray:
        x = from_rgb(rgb, channels)
        # Whole batches, so that it is compiled once.
        padded = np.resize(x, (-(-len(x) // _BATCH) * _BATCH, *x.shape[1:]))
        batches = np.split(padded, len(padded) // _BATCH)
        return np.concatenate([probabilities(server, batch) for batch in batches])[: len(x)]

    return classify


def assembled(one: Trained) -> Assembled:
    """The data of a run, dealt as they were; raises UsageError if they are others by now."""
    made = trained.assembled(one.config, one.cell)
    trained.check_data(one.finished, made)
    return made


def check_same(runs: Sequence[Trained], domains: Sequence[Domain]) -> None:
    """Raises UsageError if the test domains of two runs differ. domains: one per run."""

    leaves = jax.tree.leaves(domains[0])
    for one, domain in zip(runs, domains, strict=True):
        others = jax.tree.leaves(domain)
        if len(others) != len(leaves) or not all(map(np.array_equal, others, leaves)):
            old, new = ({**config.to_record(t.config), **t.cell._asdict()} for t in (runs[0], one))
            differ = ", ".join(name for name in old if old[name] != new[name])
            raise UsageError(
                f"--runs={runs[0].folder},{one.folder}: must have the same test images; these "
                f"runs differ in {differ}"
            )


def squares(height: int, width: int, side: int) -> np.ndarray:
    """[height, width] int: which square of side x side pixels a pixel is in, numbered by rows.

    LIME's own segmentation, quickshift, groups pixels of like colour within some ten pixels: it
    leaves one or two segments of an image of 8x8 or 28x28, and none of them is a stroke.
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
    """LIME's weights [H, W] for the probability of `label`; the pixels of a segment share one.

    rgb: [H, W, 3]. segments: [H, W] int, 0 to their number - 1. samples: perturbed images.
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
    """The masks of all images and runs. The runs see the same perturbations of an image."""
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
    """[..., H, W] bool: the pixels of images [..., H, W, channels] that are not black."""
    return np.any(x > 0, axis=-1)


def shares(images: Images, masks: Masks, labels: Sequence[str]) -> str:
    """A table: how much absolute weight lies on the figures of all images, how much elsewhere."""
    figure = figure_of(images.x)[:, None]
    size = np.abs(masks.weights)
    on, off = ((size * where).sum((0, 2, 3)) for where in (figure, ~figure))
    with np.errstate(invalid="ignore"):  # a run that no square matters to
        percent = 100 * on / (on + off)
    rows = list(zip(labels, on, off, percent, strict=True))
    rows.append(("pixels", figure.sum(), (~figure).sum(), 100 * figure.mean()))
    headers = ["absolute weight", "on the figure", "on the background", "on the figure, %"]
    return tabulate(rows, headers, tablefmt="github", floatfmt=("", ".4g", ".4g", ".1f"))


def draw(
    path: Path,
    images: Images,
    masks: Masks,
    *,
    title: str,
    labels: Sequence[str],
    indices: Sequence[int],
) -> None:
    """A line per image: the image, then the mask of each run.

    labels: of the runs. indices: what the images are called.
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
    """A heat map of the weights [H, W], and a line around the figure [H, W]."""
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
    """Writes the masks, and returns the table and where they are.

    Raises UsageError for an option out of its range.
    """
    for name in ("runs", "images"):
        if not getattr(options, name):
            raise UsageError(f"--{name}=: must be one or several")
    if options.samples < 2:
        raise UsageError(f"--samples={options.samples}: must be at least 2")
    out = check_picture("out", options.out)
    runs = [find(Path(folder), options) for folder in options.runs]
    sources = [assembled(one) for one in runs]
    domains = [held_out(one, made) for one, made in zip(runs, sources, strict=True)]
    check_same(runs, domains)
    images = seen_images(domains[0], sources[0].dataset.render, options.images)
    largest = min(images.x.shape[1:3])
    side = options.segment or max(1, largest // _SQUARES)
    if not 1 <= side <= largest:
        raise UsageError(f"--segment={side}: must be in 0..{largest}, the side of the images")
    channels = images.x.shape[-1]
    classifiers = [
        classifier(*restore(one, each), channels) for one, each in zip(runs, sources, strict=True)
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
    arrays = out.with_suffix(".weights.npz")  # not the name of somebody's data
    np.savez(arrays, **masks._asdict(), images=options.images, runs=options.runs)
    return f"\n{shares(images, masks, labels)}\n\n{NOTE}\nMasks: {out}. Weights: {arrays}."


def _title(one: Trained) -> str:
    return (
        f"{one.config.data.stem}, {one.config.environment.name} domains, held out: "
        f"{one.cell.held_out or 'test split'}\n"
        "LIME weights: orange speaks for the predicted class, purple against it"
    )


def define(values: flags.FlagValues = flags.FLAGS) -> None:
    """Defines the flags."""
    flags.DEFINE_list("runs", [], "Folders of finished runs, on the same data.", values)
    flags.DEFINE_list("images", ["0"], "Which images of the test domain, counted from 0.", values)
    of_segment = "Side in pixels of the squares that LIME hides; 0: so that some 14 make a side."
    for name, text in (
        ("seed", "Which seed's run; it also seeds LIME."),
        ("run", "Which run of that seed, where hyperparameters vary."),
        ("samples", "Perturbed images per mask."),
        ("segment", of_segment),
    ):
        default = Options._field_defaults[name]
        flags.DEFINE_integer(name, default, text, flag_values=values)
    for name, text in (
        ("out", "The picture; the weights go beside it, as .weights.npz."),
        ("data_dir", "The TFDS folder; default: $TFDS_DATA_DIR, or TFDS's own."),
        ("state", trained.STATE_HELP),
    ):
        flags.DEFINE_string(name, Options._field_defaults[name], text, values)


def options(values: flags.FlagValues = flags.FLAGS) -> Options:
    """The parsed flags; raises UsageError, in one line, for images that are no numbers."""
    parsed = values.flag_values_dict()
    try:
        images = tuple(map(int, parsed["images"]))
    except ValueError:
        text = ",".join(parsed["images"])
        raise UsageError(f"--images={text}: must be whole numbers") from None
    given = {name: parsed[name] for name in Options._fields}
    return Options(**(given | {"runs": tuple(parsed["runs"]), "images": images}))


if __name__ == "__main__":
    define()
    launch.main(run, __doc__, lambda given: options())
