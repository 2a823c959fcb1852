"""What clients' factors look like: t-SNE of finished runs, a panel each (FedCFA, Fig. III).

python -m experiments.factors --runs=runs/fedavg,runs/fedmix,runs/fedcfa --hook=1 --out=factors.png

A factor is a unit of the body's outputs, or a channel as the mean over its positions; a dot is an
example. A colour is a client, those with most examples, and grey are examples of all clients. They
are as the method trains on them: of FedMix mixed with the mean of all, of FedCFA positive
counterfactuals, of which some factors are an average's. A run is told as in its newest checkpoint.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from matplotlib.figure import Figure
from sklearn.manifold import TSNE

from experiments import explain
from experiments.experiment import config
from experiments.experiment.assemble import Assembled
from experiments.explain import Trained
from experiments.flags.flag import check_picture
from experiments.parts import network as networks
from experiments.reporting import figures
from experiments.reporting.tables import tabulate
from experiments.running import launch
from fedjax_inv import averaging
from fedjax_inv.algorithms import fedcfa
from fedjax_inv.checks import UsageError
from fedjax_inv.data.federation import parts_of
from fedjax_inv.models.blocks import unit_range
from fedjax_inv.types import Array, Halves, Model, Tree, Variables

_CHUNK = 128  # examples in the average of a client, at most
_MOST_BLOCKS = 20  # that a network is looked through for its cut

NOTE = (
    "shift: how far the clients' mean factors are from the mean of all, in standard deviations, of "
    "images as they are and as the method trains on them; |r|: the mean absolute "
    "correlation of two factors over images of all clients as they are."
)


class Options(NamedTuple):
    """The flags of this binary."""

    runs: tuple[str, ...]
    hook: int = -1
    clients: int = 3
    examples: int = 150
    seed: int = 0
    run: int = 0
    out: str = "factors.png"
    data_dir: str = ""


class Panel(NamedTuple):
    """What is drawn of a run: N examples with F factors."""

    label: str
    factors: np.ndarray  # [N, F] as the method trains on them
    client: np.ndarray  # [N] int, -1 for those of all
    correlation: float
    shift_of_images: float
    shift: float


def recut(variables: Variables, old: int, new: int) -> Variables:
    """The variables of a network of blocks with `new` in its body, where there were `old`."""

    def moved(halves: Halves) -> Halves:
        stems = {name.rpartition("_")[0] for half in halves for name in half}
        blocks = {
            start + int(name.rpartition("_")[2]): tree
            for start, half in ((0, halves.body), (old, halves.head))
            for name, tree in half.items()
        }
        stem = stems.pop() if stems else ""
        body = {f"{stem}_{i}": tree for i, tree in blocks.items() if i < new}
        head = {f"{stem}_{i - new}": tree for i, tree in blocks.items() if i >= new}
        return Halves(body, head)

    return Variables(moved(variables.params), moved(variables.stats))


def shift(factors: np.ndarray, client: np.ndarray) -> float:
    """How far clients' mean factors are from the mean of all, over the standard deviation of all.

    factors: [N, F]. client: [N] int, -1 for examples of all. Distances are Euclidean, over all
    factors at once, and a root mean square over clients; where clients are alike, about one over
    the root of a client's examples.
    """
    everyone = factors[client < 0]
    means = np.stack([factors[client == who].mean(0) for who in np.unique(client[client >= 0])])
    distances = ((means - everyone.mean(0)) ** 2).sum(1)
    return float(np.sqrt(distances.mean() / everyone.var(0).sum()))


def correlation(factors: np.ndarray) -> float:
    """The mean |Pearson's r| over pairs of factors [N, F]; a constant one has none with another."""
    return float(fedcfa.factor_decorrelation(jnp.asarray(factors), jnp.ones(len(factors), bool)))


def chosen_rows(
    parts: Sequence[np.ndarray], clients: int, examples: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """(rows, whose they are): at most so many of all, as of -1, and of each of the largest."""
    rng = np.random.default_rng(seed)
    largest = np.argsort([-len(part) for part in parts], kind="stable")[:clients]
    groups = {-1: np.concatenate(parts)} | {int(who): parts[who] for who in largest}
    rows = [rng.permutation(held)[:examples] for held in groups.values()]
    return np.concatenate(rows), np.repeat(list(groups), [len(each) for each in rows])


def encoded(model: Model, variables: Variables, x: Tree) -> Array:
    """What the body puts out, in evaluation mode: [N, ..., F]."""
    mask = jnp.ones(len(jax.tree.leaves(x)[0]), bool)
    return model.encode(variables.params.body, variables.stats.body, x, mask, False)[0]


def trained_on(
    one: Trained, model: Model, variables: Variables, x: Array, y: Array, average: Array
) -> Array:
    """Factors [N, F] of images as the run's method trains on them.

    x: [N, ...] images, y: [N] labels, average: [A, ...] mean images.
    """
    if one.cell.algorithm == "fedmix":
        ratio = one.run.hyper.get("ratio", 0.05)
        return averaging.embedding(
            encoded(model, variables, (1 - ratio) * x + ratio * average.mean(0))
        )
    factors = encoded(model, variables, x)
    if one.cell.algorithm != "fedcfa":
        return averaging.embedding(factors)
    mask = jnp.ones(len(x), bool)

    def true_logit(factors: Array) -> Array:
        params, stats = variables
        logits, _ = model.decode(params.head, stats.head, factors, mask, False)
        return jnp.take_along_axis(logits, y[:, None], 1)[:, 0]

    scores = fedcfa.factor_scores(true_logit, factors)
    low, _ = fedcfa.split_factors(scores, min(one.cell.settings.get("top_k", 24), scores.shape[1]))
    others = encoded(model, variables, average)[jnp.arange(len(x)) % len(average)]
    return averaging.embedding(fedcfa.replaced(factors, others, low))


def network(one: Trained, made: Assembled, hook: int) -> tuple[Model, Variables]:
    """A run's network, cut where its factors are to be; hook: -1 for where it was in training.

    Raises UsageError where it cannot be cut there, and for what is not one network on images.
    """
    where = f"--runs={one.folder}"
    is_stored = made.dataset.render is None and isinstance(made.data.x, jax.Array)
    if not is_stored or made.dataset.words:
        raise UsageError(f"{where}: must be on images that are stored as such")
    _, server = explain.restore(one, made)
    if not hasattr(server, "variables"):
        raise UsageError(f"{where}: is of --algorithm={one.cell.algorithm}, has no single network")
    if hook < 0:
        return made.model, server.variables
    model = networks.make(config.changed(one.config, cut=hook).model, made.dataset)
    key = jax.eval_shape(lambda: jax.random.key(0))
    like = jax.eval_shape(model.init, key, made.data.x[:1])
    for old in range(_MOST_BLOCKS):
        variables = recut(server.variables, old, hook)
        if jax.tree.map(jnp.shape, variables) == jax.tree.map(jnp.shape, like):
            return model, variables
    raise UsageError(f"--hook={hook}: --model={one.config.model.model} cannot be cut there")


def panel(one: Trained, options: Options) -> Panel:
    """What is drawn of a run; raises UsageError, in one line, where it has no such factors."""
    made = explain.assembled(one)
    model, variables = network(one, made, options.hook)
    parts = parts_of(made.splits[one.cell.held_out][one.run.seed].train)
    rows, client = chosen_rows(parts, options.clients, options.examples, options.seed)

    def images(rows: np.ndarray) -> Array:
        return unit_range(made.data.x[rows])

    average = jnp.stack([images(part[:_CHUNK]).mean(0) for part in parts])
    plain = np.asarray(averaging.embedding(encoded(model, variables, images(rows))))
    factors = trained_on(one, model, variables, images(rows), made.data.y[rows], average)
    return Panel(
        one.label,
        np.asarray(factors),
        client,
        correlation(plain[client < 0]),
        shift(plain, client),
        shift(np.asarray(factors), client),
    )


def draw(path: Path, panels: Sequence[Panel], seed: int) -> None:
    """t-SNE of each panel by itself."""
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(4.4 * columns, 4.2 * lines + 0.4), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False)
    for axis, one in zip(axes.flat, panels, strict=False):
        perplexity = min(30, (len(one.factors) - 1) / 3)
        placed = TSNE(perplexity=perplexity, init="pca", random_state=seed).fit_transform(
            one.factors
        )
        for index, who in enumerate(dict.fromkeys(one.client)):
            name = "all clients" if who < 0 else f"client {who}"
            color = "0.8" if who < 0 else f"C{index - 1}"
            axis.plot(*placed[one.client == who].T, "o", ms=3, color=color, label=name)
        title = f"{one.label}\nmean |r| {one.correlation:.2f}, shift {one.shift:.2f}"
        axis.set_title(figures.wrapped(title, 4.0, 8), fontsize=8)
        axis.set(xticks=[], yticks=[])
        axis.legend(fontsize=7, frameon=False)
    for unused in axes.flat[len(panels) :]:
        unused.set_visible(False)
    figures.save(figure, path)


def run(options: Options) -> str:
    """Draws the picture, and returns a table and where it is.

    Raises UsageError for an option out of its range.
    """
    if not options.runs:
        raise UsageError("--runs=: must be one or several folders")
    for name, least in (("clients", 1), ("examples", 3), ("hook", -1)):
        if getattr(options, name) < least:
            raise UsageError(f"--{name}={getattr(options, name)}: must be at least {least}")
    out = check_picture("out", options.out)
    of_run = explain.Options((), seed=options.seed, run=options.run, data_dir=options.data_dir)
    panels = [panel(explain.find(Path(folder), of_run), options) for folder in options.runs]
    out.parent.mkdir(parents=True, exist_ok=True)
    draw(out, panels, options.seed)
    rows = [
        (one.label, *(f"{n:.3f}" for n in (one.correlation, one.shift_of_images, one.shift)))
        for one in panels
    ]
    headers = ["run", "mean |r|", "shift, images as they are", "shift, as trained on"]
    table = tabulate(rows, headers, tablefmt="github", disable_numparse=True)
    return f"\n{table}\n\n{NOTE}\nPicture: {out}."


def define(values: flags.FlagValues = flags.FLAGS) -> None:
    """Defines the flags."""
    flags.DEFINE_list("runs", [], "Folders of finished runs on images.", values)
    for name, text in (
        ("hook", "Layers, or stages, before the factors; -1: the run's own body."),
        ("clients", "How many clients are drawn, those with most examples."),
        ("examples", "Examples of each of them, and of all, at most."),
        ("seed", "Which seed's run; it also draws examples and seeds t-SNE."),
        ("run", "Which run of that seed, where hyperparameters vary."),
    ):
        default = Options._field_defaults[name]
        flags.DEFINE_integer(name, default, text, flag_values=values)
    for name, text in (
        ("out", "The picture, a .png file."),
        ("data_dir", "The TFDS folder; default: $TFDS_DATA_DIR, or TFDS's own."),
    ):
        flags.DEFINE_string(name, Options._field_defaults[name], text, values)


def options(values: flags.FlagValues = flags.FLAGS) -> Options:
    """The parsed flags."""
    parsed = values.flag_values_dict()
    given = {name: parsed[name] for name in Options._fields}
    return Options(**(given | {"runs": tuple(parsed["runs"])}))


if __name__ == "__main__":
    define()
    launch.main(run, __doc__, lambda given: options())
