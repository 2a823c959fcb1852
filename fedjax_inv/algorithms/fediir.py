"""FedIIR: FedAvg whose clients align their classifier's gradient with the mean gradient.

    minimise  R_i(w) + penalty ||grad_head R_i(w) - G||^2
    G <- decay G + (1 - decay) mean of grad_head R_b(w) over all batches b of the round's clients

Guo et al. 2023, "Out-of-Distribution Generalization of Federated Learning via Implicit Invariant
Relationships" (ICML), as in its official release: G starts at 0 without a correction for it; R_i is
the minibatch's risk; all clients have the same weight in the mean of networks, and all batches have
the same weight in the mean of gradients, even the smaller last batch of a client.

A round has two exchanges. As clients keep no state, both send the network. In the first one the
classifier's gradient is uploaded; in the second one G is sent beside the network, and the delta is
uploaded.
"""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import optax

from fedjax_inv import aggregators, averaging, checks, local, objectives, servers, types
from fedjax_inv.parts import needing_head
from fedjax_inv.types import Array, Tree

# The penalty compares gradients, whose differences are small.
FACTS = types.Facts(precision="highest")


def alignment(classifier_grads: Tree, mean_grads: Tree) -> Array:
    """Return ||classifier_grads - mean_grads||^2 over all entries of two trees of a shape, []."""
    chex.assert_trees_all_equal_shapes(classifier_grads, mean_grads)
    return optax.tree.norm(optax.tree.sub(classifier_grads, mean_grads), squared=True)


def _with_classifier_grads(
    model: types.Model,
    loss: types.Loss,
    params: types.Halves,
    stats: types.Halves,
    batch: types.Batch,
    key: Array,
) -> tuple[Array, types.Halves, Tree]:
    """Return (R, changed stats, the gradient of R by the head) on a batch."""

    def risk(head: Tree) -> tuple[Array, types.Halves]:
        return averaging.risk(model, loss, params._replace(head=head), stats, batch, key)

    (value, stats), grads = jax.value_and_grad(risk, has_aux=True)(params.head)
    return value, stats, grads


def _mean_gradient(
    model: types.Model, loss: types.Loss, decay: float | Array, batch_size: int
) -> types.Exchange:
    """The first exchange: G moves towards the mean gradient at the network."""

    def num_batches(size: Array) -> Array:
        return (-(-size // batch_size)).astype(jnp.float32)

    def client(visit: types.Visit) -> types.Reply:
        params, stats = visit.message

        def of_batch(batch: types.Batch) -> Tree:
            # One key for all batches, as a fold does not number them.
            return _with_classifier_grads(model, loss, params, stats, batch, visit.key)[2]

        total = local.fold(visit.shard, of_batch, batch_size=batch_size)
        count = jnp.maximum(num_batches(visit.shard.size), 1)
        mean = jax.tree.map(lambda leaf: leaf / count.astype(leaf.dtype), total)
        return types.Reply(visit.own, mean, {})

    def update(server: servers.Server, mean: Tree, cohort: types.Cohort) -> servers.Server:
        del cohort
        moved = jax.tree.map(lambda g, now: decay * g + (1 - decay) * now, server.side, mean)
        return server._replace(side=moved)

    by_batches = aggregators.mean(lambda slots: num_batches(slots.size))
    return types.Exchange(lambda server: server.variables, client, by_batches, update)


def _gradient(
    model: types.Model, loss: types.Loss, penalty: float | Array, visit: types.Visit
) -> types.GradFn:
    """The gradient of a client's local steps."""

    def grad_fn(variables: types.Variables, batch: types.Batch, key: Array) -> types.Step:
        stats = variables.stats

        def objective(params: types.Halves) -> tuple[Array, tuple[Array, types.Halves, Array]]:
            value, after, grads = _with_classifier_grads(model, loss, params, stats, batch, key)
            distance = alignment(grads, visit.message.side)
            return value + penalty * distance, (value, after, distance)

        grads, (value, after, distance) = jax.grad(objective, has_aux=True)(variables.params)
        return types.Step(grads, after, {"loss": value, "alignment": distance})

    return grad_fn


def fediir(
    model: types.Model,
    work: types.Work,
    *,
    penalty: float | Array = 1e-2,
    decay: float | Array = 0.95,
    gradient_batch_size: int = 64,
    loss: types.Loss = objectives.cross_entropy,
    server_optimizer: optax.GradientTransformation = optax.sgd(1.0),
    weighting: str | aggregators.Weight = "uniform",
) -> types.Algorithm:
    """Return FedIIR; the classifier is the model's head.

    It reports R as "loss" and the squared distance as "alignment", averaged over local steps.

    Args:
      penalty: weight of the alignment, the paper's gamma; 0 is FedAvg.
      decay: decay of G from round to round, in [0, 1].
      gradient_batch_size: examples in a batch of the pass for G; the release takes the batches of
        training.
      weighting: weights of clients in the mean of networks, "uniform" (as in the release) or
        "size"; in Python also a function of `Slots`.
    """
    checks.real("penalty", penalty)
    checks.real("decay", decay, 0, 1)
    checks.integer("gradient_batch_size", gradient_batch_size)

    training = averaging.averaging(
        model,
        work,
        partial(_gradient, model, loss, penalty),
        server_optimizer=server_optimizer,
        weighting=weighting,
        side=averaging.SideState(
            init=lambda setup: optax.tree.zeros_like(setup.variables.params.head),
            send=lambda mean_grads: mean_grads,
            update=lambda mean_grads, nothing, delta: mean_grads,
        ),
    )
    first = _mean_gradient(model, loss, decay, gradient_batch_size)
    return needing_head(training)._replace(exchanges=(first, *training.exchanges))
