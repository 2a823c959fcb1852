"""FedMix: mixup with the mean examples of other clients.

    (1 - l) R(u, y) + l R(u, y_bar) + l (1 - l) <grad_u R(u, y), x_bar>,        u = (1 - l) x

replaces the risk R(x, y) of a minibatch. It is the risk of mixup,
(1 - l) R(u + l x_bar, y) + l R(u + l x_bar, y_bar), to first order in l. One mean example
(x_bar, y_bar) is drawn for each minibatch and is the same for all of its examples: R is a mean over
the minibatch, and so is the inner product. Yoon et al. 2021, "FedMix: Approximation of Mixup under
Mean Augmented Federated Learning" (arXiv 2107.00233), Algorithm 2. Public code divides the last
term by the size of the minibatch once more.

The paper exchanges means before training. Here each client sends its means once, in the first round
that it attends, in an exchange before that round's training; the server keeps them. Without any
mean a client trains as in FedAvg. Preprocessed inputs are mixed: 8-bit images in [0, 1], and
rendered images.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import optax

from fedjax_inv import (
    aggregators,
    averaging,
    checks,
    keys,
    mean_examples,
    models,
    objectives,
    servers,
    tree,
    types,
)
from fedjax_inv.mean_examples import MeanExamples
from fedjax_inv.types import Array, Tree

FACTS = types.Facts(means_of_targets=True)
_BATCH_SIZE = 64  # of the pass for a client's means; it changes only time


def mixed_loss(
    loss_fn: Callable[[Array, Array], Any],
    x: Array,
    y: Array,
    mean_x: Array,
    mean_y: Array,
    *,
    ratio: float | Array,
    has_aux: bool = False,
) -> Any:
    """Return the loss of mixup with a mean example, to first order in `ratio`.

    Args:
      loss_fn: (x [B, ...], y [B, K]) -> the mean loss over a batch, []; with has_aux (loss, aux),
        where aux must not depend on y. It is called once.
      x: inputs [B, ...].
      y: targets [B, K], such as one-hot labels.
      mean_x: the input of one mean example [...].
      mean_y: its target [K].
      ratio: l, in [0, 1].
      has_aux: whether loss_fn and this function return a pair.
    """
    chex.assert_type(x, float)
    chex.assert_shape([mean_x, mean_y], [x.shape[1:], y.shape[1:]])
    targets = jnp.stack([y, jnp.broadcast_to(mean_y, y.shape)])

    def losses(mixed: Array) -> tuple[Any, Tree]:
        """The losses for both targets [2]; the network runs once."""
        if has_aux:
            return jax.vmap(lambda y: loss_fn(mixed, y), out_axes=(0, None))(targets)
        return jax.vmap(lambda y: loss_fn(mixed, y))(targets), ()

    (own, other), (slope, _), aux = jax.jvp(
        losses,
        (tree.scaled(1 - ratio, x),),
        (jnp.broadcast_to(mean_x, x.shape).astype(x.dtype),),
        has_aux=True,
    )
    chex.assert_rank(own, 0)
    value = (1 - ratio) * own + ratio * other + ratio * (1 - ratio) * slope
    return (value, aux) if has_aux else value


def _collection(mixed_inputs: Callable[[Tree], Array], rows: int) -> types.Exchange:
    """The first exchange: clients that have not sent their means yet send them."""

    def client(visit: types.Visit) -> types.Reply:
        means = mean_examples.of_shard(
            visit.shard,
            visit.key,
            num_classes=visit.message.shape[0],
            rows=rows,
            length=-(-visit.shard.size // rows),
            batch_size=_BATCH_SIZE,
            mixable=mixed_inputs,
        )
        return types.Reply(visit.own, means, {})

    def update(server: servers.Server, sent: aggregators.Stack, cohort: types.Cohort) -> Tree:
        del cohort
        who = jnp.where(sent.present, sent.who, server.side.real.shape[0])
        return server._replace(side=tree.put(server.side, who, sent.values))

    return types.Exchange(
        lambda server: jnp.zeros_like(server.side.y[0, 0]),  # [K], for its length
        client,
        aggregators.stacked(),
        update,
        attends=lambda server, who, round: ~server.side.real[who].any(),
    )


def _all_rows(means: MeanExamples) -> MeanExamples:
    """The rows of all clients [C * rows], the real ones first."""
    flat = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), means)
    return tree.compact(flat, flat.real, len(flat.real))


def _gradient(
    model: types.Model,
    mixed_inputs: Callable[[Tree], Array],
    loss: types.Loss,
    ratio: float | Array,
    visit: types.Visit,
) -> types.GradFn:
    """The gradient of a client's local steps."""
    means = visit.message.side
    num_columns = means.y.shape[1]
    share = jnp.where(means.real.any(), ratio, 0)

    def grad_fn(variables: types.Variables, batch: types.Batch, key: Array) -> types.Step:
        mean_x, mean_y = tree.take(
            mean_examples.draw(means, keys.stream(key, "mean example"), 1), 0
        )
        y = mean_examples.columns(batch.y, num_columns)
        if jnp.issubdtype(batch.y.dtype, jnp.integer):
            # The loss of a label that is no class is NaN, as elsewhere.
            is_class = (batch.y >= 0) & (batch.y < num_columns)
            y = jnp.where(is_class[:, None], y, jnp.nan)

        def objective(params: types.Halves) -> tuple[Array, types.Halves]:
            def risk(x: Array, y: Array) -> tuple[Array, types.Halves]:
                now = types.Variables(params, variables.stats)
                outputs, stats = models.apply(model, now, x, batch.mask, True, key)
                return loss(outputs, y, batch.mask), stats

            x = mixed_inputs(batch.x)
            return mixed_loss(risk, x, y, mean_x, mean_y, ratio=share, has_aux=True)

        (value, stats), grads = jax.value_and_grad(objective, has_aux=True)(variables.params)
        return types.Step(grads, stats, {"loss": value})

    return grad_fn


def fedmix(
    model: types.Model,
    work: types.Work,
    *,
    ratio: float | Array = 0.05,
    rows: int = 1,
    mixable: Callable[[Tree], Tree] = mean_examples.as_numbers,
    loss: types.Loss = objectives.soft_cross_entropy,
    server_optimizer: optax.GradientTransformation = optax.sgd(1.0),
    weighting: str | aggregators.Weight = "size",
) -> types.Algorithm:
    """Return FedMix (Yoon et al. 2021, Algorithm 2).

    It reports the mixed loss as "loss".

    Args:
      ratio: share of the mean example in the mixture, the paper's lambda, in [0, 1]; 0 is FedAvg.
      rows: the most means of a client, each over ceil(n / rows) of its n examples, the last one
        over the rest; 1 is one mean over all.
      mixable: preprocessed inputs -> the inputs to average and mix, one array, which the model must
        accept; needed for inputs that are neither 8-bit images nor in floating point.
      loss: the objective R, of outputs and targets [B, K], which are one-hot for classes; it must
        take means of targets, too.
    """
    checks.real("ratio", ratio, 0, 1)
    checks.integer("rows", rows)

    def mixed_inputs(x: Tree) -> Array:
        return mixable(model.preprocess(x))

    def init(setup: types.Setup) -> MeanExamples:
        """Return empty means, each leaf [C, rows, ...]."""
        x = jax.eval_shape(mixed_inputs, setup.sample)
        _, outputs = averaging.output_shapes(model, setup)
        leading = (setup.num_clients, rows)
        return MeanExamples(
            jnp.zeros((*leading, *x.shape[1:]), x.dtype),
            jnp.zeros((*leading, outputs.shape[-1])),
            jnp.zeros(leading, bool),
        )

    training = averaging.averaging(
        model,
        work,
        partial(_gradient, model, mixed_inputs, loss, ratio),
        server_optimizer=server_optimizer,
        weighting=weighting,
        side=averaging.SideState(
            init=init, send=_all_rows, update=lambda means, nothing, delta: means
        ),
    )
    return training._replace(exchanges=(_collection(mixed_inputs, rows), *training.exchanges))
