"""FedDyn: a regulariser of each client, moved every round, makes local and global optima agree.

    minimise  R_i(w) - <g_i, w> + (alpha / 2) ||w - w_received||^2
    g_i <- g_i - alpha (w_i - w_received)
    h   <- h - (alpha / N) sum over the cohort of (w_i - w_received)
    w   <- mean over the cohort of w_i  -  h / alpha

All g_i and h start at 0. N counts the clients with examples, and all have the same weight. Acar et
al. 2021, "Federated Learning Based on Dynamic Regularization" (arXiv 2111.04263), Algorithm 1. The
server keeps -h / alpha. The paper has no statistics (BatchNorm); we average them. The release
divides alpha by n_i / mean n, and so minimises the mean over examples; the paper and we minimise
that over clients.
"""

from typing import NamedTuple

import chex
import jax
import optax

from fedjax_inv import aggregators, averaging, checks, objectives, tree
from fedjax_inv.types import (
    Algorithm,
    Array,
    Batch,
    GradFn,
    Halves,
    Loss,
    Model,
    Setup,
    Step,
    Trained,
    Tree,
    Variables,
    Visit,
    Work,
)


class Drift(NamedTuple):
    """The server's own state."""

    mean: Halves  # -h / alpha: the sum over rounds of (1 / N) sum (w_i - w_received)
    num_clients: Array  # [] N


def dynamic_gradient(
    grads: Tree, own: Tree, params: Tree, received: Tree, alpha: float | Array
) -> Tree:
    """Return grads - own + alpha (params - received), leaf by leaf, of trees of the same shapes.

    `own` is g_i, `received` the parameters of the received network.
    """
    chex.assert_trees_all_equal_shapes(grads, own, params, received)
    return jax.tree.map(
        lambda g, mine, w, r: g - mine + alpha * (w - r), grads, own, params, received
    )


def feddyn(
    model: Model,
    work: Work,
    *,
    alpha: float | Array = 0.01,
    loss: Loss = objectives.cross_entropy,
    server_optimizer: optax.GradientTransformation = optax.sgd(1.0),
) -> Algorithm:
    """Return FedDyn (Acar et al. 2021, Algorithm 1).

    Args:
      alpha: weight of the quadratic term, above 0.
      server_optimizer: the server's optimizer, on the mean delta less h / alpha.
    """
    checks.positive("alpha", alpha)
    risk_gradient = averaging.gradient(model, loss)

    def gradient_from(visit: Visit) -> GradFn:
        received = visit.message.variables.params

        def grad_fn(variables: Variables, batch: Batch, key: Array) -> Step:
            step = risk_gradient(variables, batch, key)
            grads = dynamic_gradient(step.grads, visit.own, variables.params, received, alpha)
            return step._replace(grads=grads)

        return grad_fn

    def remember(visit: Visit, trained: Trained) -> Halves:
        moved = optax.tree.sub(trained.local.variables.params, visit.message.variables.params)
        return optax.tree.add_scale(visit.own, -alpha, moved)

    def init(setup: Setup) -> Drift:
        zeros = optax.tree.zeros_like(setup.variables.params)
        return Drift(zeros, setup.has_examples.sum().astype(jax.numpy.float32))

    def update(drift: Drift, present: Array, delta: Variables) -> Drift:
        share = present / drift.num_clients
        change = tree.scaled(share, delta.params)
        return drift._replace(mean=optax.tree.add(drift.mean, change))

    def server_delta(drift: Drift, delta: Variables, present: Array) -> Variables:
        del present
        return delta._replace(params=optax.tree.add(delta.params, drift.mean))

    return averaging.averaging(
        model,
        work,
        gradient_from,
        server_optimizer=server_optimizer,
        weighting="uniform",
        init_client=lambda server, who: optax.tree.zeros_like(server.side.mean),
        remember=remember,
        side=averaging.SideState(init=init, aggregate=aggregators.count(), update=update),
        server_delta=server_delta,
    )
