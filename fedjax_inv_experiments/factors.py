"""t-SNE of the factors of clients' examples, a panel per finished run (FedCFA, Fig. III).

fedjax-inv factors --runs=runs/fedavg,runs/fedmix,runs/fedcfa --hook=1 --out=factors.png

A factor is a unit of the body's outputs, or the mean of a channel over its positions. A dot is an
example. Each colour is one of the clients with most examples; grey dots are examples of all
clients. The picture shows the factors that the method trains on: FedMix mixes each example with the
mean of all, and FedCFA builds positive counterfactuals, which take some factors from an average of
examples. The networks are those of the newest checkpoints.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure
from sklearn.manifold import TSNE

from fedjax_inv import averaging
from fedjax_inv.algorithms import fedcfa
from fedjax_inv.checks import UsageError
from fedjax_inv.data.federation import parts_of
from fedjax_inv.models.blocks import unit_range
from fedjax_inv.models.scaling import Scaled
from fedjax_inv.types import Array, Halves, Model, Tree, Variables
from fedjax_inv_experiments.experiment import config
from fedjax_inv_experiments.flags import command
from fedjax_inv_experiments.flags.flag import at_least, check_picture, flag
from fedjax_inv_experiments.flags.outside import Named
from fedjax_inv_experiments.parts import network as networks
from fedjax_inv_experiments.reporting import figures, finished
from fedjax_inv_experiments.reporting.finished import OneRun
from fedjax_inv_experiments.reporting.tables import table

_CHUNK = 128  # the most examples in the average of a client
_FEWEST_FACTORS = 2  # the axes of the picture
_MOST_BLOCKS = 20  # the highest cut that is tried

NOTE = (
    "shift: how far the clients' mean factors are from the mean of all, in standard deviations, of "
    "examples as they are and as the method trains on them; |r|: the mean absolute "
    "correlation of two factors over examples of all clients as they are."
)


@dataclasses.dataclass(frozen=True)
class Options(Named):
    """The flags of this binary."""

    runs: tuple[str, ...] = finished.runs_flag("Folders of finished runs.")
    hook: int = flag(
        -1, "Layers, or stages, before the factors; -1: the run's own body.", at_least(-1)
    )
    clients: int = flag(3, "How many clients are drawn, those with most examples.", at_least(1))
    examples: int = flag(150, "Examples of each of them, and of all, at most.", at_least(3))
    seed: int = flag(0, "Which seed's run; it also draws examples and seeds t-SNE.")
    run: int = flag(0, "Which run of that seed, where hyperparameters vary.")
    out: str = flag("factors.png", "The picture, a .png file; a .pdf goes beside it.")
    data_dir: str = finished.data_dir_flag()


class Panel(NamedTuple):
    """The panel of a run: N examples with F factors."""

    label: str
    factors: np.ndarray  # [N, F] that the method trains on
    client: np.ndarray  # [N] int, -1 for examples of all clients
    correlation: float
    plain_shift: float
    shift: float


def recut(variables: Variables, old: int, new: int) -> Variables:
    """The variables of a network of blocks with `new` blocks in its body instead of `old`."""
    body = variables.stats.body
    if isinstance(body, Scaled):  # around the network, whatever its cut
        stats = variables.stats._replace(body=body.network)
        inner = recut(variables._replace(stats=stats), old, new)
        around = body._replace(network=inner.stats.body)
        return inner._replace(stats=inner.stats._replace(body=around))

    def cut(halves: Halves) -> Halves:
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

    return Variables(cut(variables.params), cut(variables.stats))


def shift(factors: np.ndarray, client: np.ndarray) -> float:
    """The distance of clients' mean factors from the mean of all, in standard deviations of all.

    Distances are Euclidean over all factors; the result is their root mean square over clients.
    Where clients are alike, it is about one over the root of a client's number of examples.

    factors: [N, F]. client: [N] int, -1 for examples of all clients.
    """
    everyone = factors[client < 0]
    means = np.stack([factors[client == who].mean(0) for who in np.unique(client[client >= 0])])
    distances = ((means - everyone.mean(0)) ** 2).sum(1)
    return float(np.sqrt(distances.mean() / everyone.var(0).sum()))


def correlation(factors: np.ndarray) -> float:
    """The mean |Pearson's r| over pairs of factors [N, F]; a constant factor counts as 0."""
    return float(fedcfa.factor_decorrelation(jnp.asarray(factors), jnp.ones(len(factors), bool)))


def chosen_rows(
    parts: Sequence[np.ndarray], clients: int, examples: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """(rows, their clients): at most `examples` rows of each group.

    The groups are all clients together, as client -1, and each of the `clients` largest ones.
    """
    rng = np.random.default_rng(seed)
    largest = np.argsort([-len(part) for part in parts], kind="stable")[:clients]
    groups = {-1: np.concatenate(parts)} | {int(who): parts[who] for who in largest}
    rows = [rng.permutation(part)[:examples] for part in groups.values()]
    return np.concatenate(rows), np.repeat(list(groups), [len(each) for each in rows])


def encoded(model: Model, variables: Variables, x: Tree) -> Array:
    """The outputs of the body, in evaluation mode: [N, ..., F]."""
    mask = jnp.ones(len(jax.tree.leaves(x)[0]), bool)
    return model.encode(variables.params.body, variables.stats.body, x, mask, False)[0]


def trained_on(
    one: OneRun, model: Model, variables: Variables, x: Array, y: Array, average: Array
) -> Array:
    """The factors [N, F] that the run's method trains on.

    x: [N, ...] inputs, y: [N] labels, average: [A, ...] mean inputs.
    """
    if one.runs.cell.algorithm == "fedmix":
        ratio = one.run.hyper.get("ratio", 0.05)
        return averaging.embedding(
            encoded(model, variables, (1 - ratio) * x + ratio * average.mean(0))
        )
    factors = encoded(model, variables, x)
    if one.runs.cell.algorithm != "fedcfa":
        return averaging.embedding(factors)
    mask = jnp.ones(len(x), bool)

    def true_logit(factors: Array) -> Array:
        params, stats = variables
        logits, _ = model.decode(params.head, stats.head, factors, mask, False)
        return jnp.take_along_axis(logits, y[:, None], 1)[:, 0]

    scores = fedcfa.factor_scores(true_logit, factors)
    num_factors = scores.shape[1]
    top_k = one.runs.cell.settings.get("top_k")
    top_k = fedcfa.default_top_k(num_factors) if top_k is None else top_k
    low, _ = fedcfa.split_factors(scores, min(top_k, num_factors))
    others = encoded(model, variables, average)[jnp.arange(len(x)) % len(average)]
    return averaging.embedding(fedcfa.replaced(factors, others, low))


def network(one: OneRun, hook: int) -> tuple[Model, Variables]:
    """A run's network, cut at its factors. hook: the place of the cut, -1 for that of its training.

    Raises UsageError if the network cannot be cut there, if the run has no single network, or if
    its examples are not stored as the network sees them.
    """
    runs = one.runs
    assembled = runs.data
    is_stored = assembled.dataset.render is None and jax.tree_util.all_leaves([assembled.data.x])
    if not is_stored or assembled.dataset.words:
        text = "must be on examples that are one array, as the network sees them, and no texts"
        raise UsageError(f"--runs={runs.path}", ..., text)
    algorithm, server = one.algorithm(), one.served().server
    if algorithm.network is None:
        text = f"is of --algorithm={runs.cell.algorithm}, has no single network"
        raise UsageError(f"--runs={runs.path}", ..., text)
    variables = algorithm.network(server)
    if hook < 0:
        return assembled.model, variables
    recut_config = config.changed(runs.config, cut=hook).model
    try:
        model = networks.make(recut_config, assembled.dataset)
    except UsageError as error:
        if not str(error).startswith("--cut="):
            raise
        raise UsageError("--hook", hook, str(error).partition(": ")[2]) from None
    key = jax.eval_shape(lambda: jax.random.key(0))
    like = jax.eval_shape(model.init, key, assembled.data.x[:1])
    for old in range(_MOST_BLOCKS):
        cut = recut(variables, old, hook)
        if jax.tree.map(jnp.shape, cut) == jax.tree.map(jnp.shape, like):
            return model, cut
    raise UsageError("--hook", hook, f"--model={runs.config.model.model} cannot be cut there")


def panel(one: OneRun, options: Options) -> Panel:
    """The panel of a run; raises UsageError if it has no such factors."""
    assembled = one.runs.data
    model, variables = network(one, options.hook)
    parts = parts_of(assembled.splits[one.runs.cell.held_out][one.run.seed].train)
    rows, client = chosen_rows(parts, options.clients, options.examples, options.seed)

    def examples(rows: np.ndarray) -> Array:
        return unit_range(jnp.asarray(assembled.data.x[rows]))

    average = jnp.stack([examples(part[:_CHUNK]).mean(0) for part in parts if len(part)])
    plain = np.asarray(averaging.embedding(encoded(model, variables, examples(rows))))
    if plain.shape[1] < _FEWEST_FACTORS:
        text = f"gives {plain.shape[1]} factor of --runs={one.runs.path}, must give two or more"
        raise UsageError("--hook", options.hook, text)
    y = jnp.asarray(assembled.data.y[rows])
    factors = trained_on(one, model, variables, examples(rows), y, average)
    return Panel(
        one.label,
        np.asarray(factors),
        client,
        correlation(plain[client < 0]),
        shift(plain, client),
        shift(np.asarray(factors), client),
    )


def draw(path: Path, panels: Sequence[Panel], seed: int) -> None:
    """Draws the t-SNE of each panel, fitted to that panel alone."""
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
    """Draws the picture, and returns a table and the path of the picture.

    Raises UsageError for an option out of its range.
    """
    finished.check_runs(options.runs)
    out = check_picture("out", options.out)
    chosen = []
    for folder in options.runs:
        runs = finished.open("runs", Path(folder), named=options.outside, data_dir=options.data_dir)
        runs.check_classes()
        chosen.append(runs.select(options.seed, options.run, "last"))
    panels = [panel(one, options) for one in chosen]
    out.parent.mkdir(parents=True, exist_ok=True)
    draw(out, panels, options.seed)
    columns = {
        "run": lambda one: one.label,
        "mean |r|": lambda one: f"{one.correlation:.3f}",
        "shift, examples as they are": lambda one: f"{one.plain_shift:.3f}",
        "shift, as trained on": lambda one: f"{one.shift:.3f}",
    }
    return f"\n{table(panels, columns)}\n\n{NOTE}\nPicture: {out}."


BINARY = command.of(run, Options, __doc__)

if __name__ == "__main__":
    command.main(BINARY)
