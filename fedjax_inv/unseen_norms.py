"""Batch normalisation of a domain that no client has: by the domain's own statistics.

A network of an unseen domain has the mean of the clients' running statistics, by default. Instead
its layers may use those of the domain's inputs, without labels: of each batch (Nado et al. 2020,
"Evaluating Prediction-Time Batch Normalization for Robustness under Covariate Shift",
arXiv 2006.10963), or of all its inputs (Li et al. 2016, "Revisiting Batch Normalization For
Practical Domain Adaptation", arXiv 1603.04779). A batch's statistics are those of training mode, in
which dropout and augmentation act, too.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedjax_inv import evaluation, local, models, tree, types
from fedjax_inv.axis import Axis
from fedjax_inv.checks import UsageError
from fedjax_inv.types import Array, Tree

RULES = ("mean", "batch", "estimated")
BATCH = 128  # the examples of a batch


def running(stats: types.Halves) -> tuple[Tree, Tree]:
    """Return (running means and variances, other statistics) of a network, as `tree.partition`.

    They are those of layers that have a mean and a variance alone; raises UsageError without any.
    """
    paths = [tree.names(path) for path, _ in jax.tree_util.tree_leaves_with_path(stats)]
    leaves: dict[tuple[str, ...], set[str]] = {}
    for path in paths:
        leaves.setdefault(path[:-1], set()).add(path[-1])
    parts = tree.partition(stats, lambda path: leaves[path[:-1]] == {"mean", "var"})
    if not jax.tree.leaves(parts[0]):
        text = "needs a network with running means and variances (BatchNorm)"
        raise UsageError("evaluations.unseen_norms", ..., text)
    return parts


def of_batch(model: types.Model, variables: types.Variables, batch: types.Batch) -> Tree:
    """Return the means and biased variances of a batch, in place of the running ones.

    Each layer's are of its inputs where the layers before it normalise by theirs.
    """
    old, others = running(variables.stats)

    def after(old: Tree) -> Tree:
        given = variables._replace(stats=tree.combine(old, others))
        key = jax.random.key(0)
        return running(models.apply(model, given, batch.x, batch.mask, True, key)[1])[0]

    # A running statistic moves to momentum x old + (1 - momentum) x the batch's, which in training
    # mode depends on no running statistic. So from 0 and from 1 it moves momentum apart.
    of_zeros = after(jax.tree.map(jnp.zeros_like, old))
    of_ones = after(jax.tree.map(jnp.ones_like, old))
    return jax.tree.map(lambda zero, one: zero / (1 - (one - zero)), of_zeros, of_ones)


def _estimated(
    model: types.Model, variables: types.Variables, shard: types.Shard, axis: Axis
) -> Tree:
    """Return the means and variances of a shard, each batch normalised by itself."""

    structure = jax.tree.structure(running(variables.stats)[0])

    def moments(batch: types.Batch) -> tuple[list[Array], list[Array], Array]:
        """Return the sums of the first and of the second moments, and the number of examples."""
        leaves, number = jax.tree.leaves(of_batch(model, variables, batch)), batch.mask.sum()
        pairs = [*zip(leaves[::2], leaves[1::2], strict=True)]  # "mean" is before "var"
        return [number * m for m, _ in pairs], [number * (v + m**2) for m, v in pairs], number

    *sums, number = axis.total(local.fold(shard, moments, batch_size=BATCH))
    leaves = []
    for first, second in zip(*sums, strict=True):
        mean = first / jnp.maximum(number, 1)
        leaves += [mean, jnp.maximum(second / jnp.maximum(number, 1) - mean**2, 0)]
    return jax.tree.unflatten(structure, leaves)


def _outputs(
    rule: str, model: types.Model, variables: types.Variables, shard: types.Shard, axis: Axis
) -> Callable[[types.Batch], Tree]:
    """Return a function from a batch of a shard to the outputs of a network."""
    others = running(variables.stats)[1]
    fixed = _estimated(model, variables, shard, axis) if rule == "estimated" else None

    def outputs(batch: types.Batch) -> Tree:
        own = of_batch(model, variables, batch) if fixed is None else fixed
        return models.predict(model, variables._replace(stats=tree.combine(own, others)), batch.x)

    return outputs


def predict(rule: str, model: types.Model, variables: types.Variables, x: Tree) -> Tree:
    """Return the outputs [M, ...] for all inputs x [M, ...] of an unseen domain.

    `rule` is "batch" or "estimated"; batches are those of `evaluate` on one device.
    """
    number = len(jax.tree.leaves(x)[0])
    rows = jnp.arange(number, dtype=jnp.int32)
    data = types.Examples(x, jnp.zeros(number))
    shard = types.Shard(data, rows, jnp.int32(0), jnp.int32(number), jnp.int32(0))
    outputs = _outputs(rule, model, variables, shard, Axis())
    places = jnp.arange(-(-number // BATCH) * BATCH).reshape(-1, BATCH)
    of_batches = jax.lax.map(
        lambda some: outputs(local.take_batch(shard, some, some < number)), places
    )
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:])[:number], of_batches)


def evaluate(
    rule: str,
    model: types.Model,
    variables: types.Variables,
    shards: types.Federation,
    *,
    axis: Axis,
    loss: types.Loss,
    score: types.Loss,
) -> evaluation.Scores:
    """Return the scores, each [1], of a network on a shard of an unseen domain.

    `rule` is "batch" or "estimated"; the other arguments are as in `evaluation.evaluate`. Of the
    shard this device has a part.
    """
    data, order, start, size = shards
    shard = types.Shard(data, order, start[0], size[0], jnp.int32(0))
    outputs = _outputs(rule, model, variables, shard, axis)

    def sums(batch: types.Batch) -> tuple[Array, Array, Array]:
        return *evaluation.measured(score, loss, outputs(batch), batch), batch.mask.sum()

    totals = axis.total(local.fold(shard, sums, batch_size=BATCH))
    return evaluation.scores_of(score, *(leaf[None] for leaf in totals))
