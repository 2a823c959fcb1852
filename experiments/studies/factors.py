"""t-SNE of the factors of clients' examples, a panel per row of a study (FedCFA, Fig. III).

A factor is a unit of the body's outputs, or the mean of a channel over its positions. A dot is an
example. Each colour is one of the clients with most examples; grey dots are examples of all
clients. The picture shows the factors that the method trains on: FedMix mixes each example with the
mean of all, and FedCFA builds positive counterfactuals, which take some factors from an average of
examples. The networks are those of the newest checkpoints.
"""

from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_inv import averaging
from fedjax_inv.algorithms import fedcfa
from fedjax_inv.data.federation import parts_of
from fedjax_inv.models.blocks import unit_range
from fedjax_inv.types import Array, Model, Tree, Variables

from .. import finished
from ..assembly.grid import Cell
from ..folder import selection
from ..report import figures
from . import drawings
from .row_runs import RowResult

_CHUNK = 128  # the most examples in the average of a client
_CLIENTS = 3  # that are drawn
_EXAMPLES = 150  # of each of them, and of all, at most


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
    cell: Cell, index: int, variables: Variables, model: Model, x: Array, y: Array, average: Array
) -> Array:
    """The factors [N, F] that the method of a run of a cell trains on.

    x: [N, ...] inputs, y: [N] labels, average: [A, ...] mean inputs.
    """
    if cell.algorithm == "fedmix":
        ratio = cell.runs[index].hyper.get("ratio", 0.05)
        mixed = (1 - ratio) * x + ratio * average.mean(0)
        return averaging.embedding(encoded(model, variables, mixed))
    factors = encoded(model, variables, x)
    if cell.algorithm != "fedcfa":
        return averaging.embedding(factors)
    mask = jnp.ones(len(x), bool)

    def true_logit(factors: Array) -> Array:
        params, stats = variables
        logits, _ = model.decode(params.head, stats.head, factors, mask, False)
        return jnp.take_along_axis(logits, y[:, None], 1)[:, 0]

    scores = fedcfa.factor_scores(true_logit, factors)
    num_factors = scores.shape[1]
    top_k = cell.settings.get("top_k")
    top_k = fedcfa.default_top_k(num_factors) if top_k is None else top_k
    low, _ = fedcfa.split_factors(scores, min(top_k, num_factors))
    others = encoded(model, variables, average)[jnp.arange(len(x)) % len(average)]
    return averaging.embedding(fedcfa.replaced(factors, others, low))


def panel(
    result: RowResult, clients: int = _CLIENTS, examples: int = _EXAMPLES
) -> tuple[np.ndarray, np.ndarray]:
    """(the factors [N, F] that a row trains on, the clients of the examples [N] as `chosen_rows`).

    They are those of its first seed, with the selected hyperparameters.
    """
    picked = selection.choose(result.row.label, result.only.result, result.config.evaluation.select)
    assert picked is not None, "a complete row has selected runs"
    runs = finished.open("run_dir", result.only.folder, "last", named=result.config.outside)
    made = runs.data
    index = picked.indices[0]
    seed = runs.line(index).seed
    variables = runs.fitted.network(index)
    parts = parts_of(made.splits[runs.cell.held_out][seed].train)
    rows, client = chosen_rows(parts, clients, examples, seed)

    def inputs(rows: np.ndarray) -> Array:
        return unit_range(jnp.asarray(made.data.x[rows]))

    average = jnp.stack([inputs(part[:_CHUNK]).mean(0) for part in parts if len(part)])
    y = jnp.asarray(made.data.y[rows])
    factors = np.asarray(
        trained_on(runs.cell, index, variables, made.model, inputs(rows), y, average)
    )
    return factors, client


def draw(path: Path, data: str, results: Sequence[RowResult]) -> str:
    """Draws the t-SNE of each row, fitted to that row alone."""
    from sklearn.manifold import TSNE  # its import takes a second

    panels = {result.row.label: panel(result) for result in results if result.is_complete}
    if not panels:
        return drawings.NOTHING
    figure = figures.new(4.4 * len(panels), 4.4)
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, (label, (factors, client)) in zip(axes, panels.items(), strict=True):
        perplexity = min(30, (len(factors) - 1) / 3)
        placed = TSNE(perplexity=perplexity, init="pca", random_state=0).fit_transform(factors)
        for index, who in enumerate(dict.fromkeys(client)):
            name = "all clients" if who < 0 else f"client {who}"
            color = "0.8" if who < 0 else f"C{index - 1}"
            axis.plot(*placed[client == who].T, "o", ms=3, color=color, label=name)
        axis.set_title(figures.wrapped(label, 4.0), fontsize=10)
        axis.set(xticks=[], yticks=[])
        axis.legend(fontsize=7, frameon=False)
    return drawings.saved(figure, path, data)
