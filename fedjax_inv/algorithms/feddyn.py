"""FedDyn: a regulariser of each client, moved every round, makes local and global optima agree.

    minimise  R_i(w) - <g_i, w> + (alpha / 2) ||w - w_received||^2
    g_i <- g_i - alpha (w_i - w_received)
    h   <- h - (alpha / N) sum over the cohort of (w_i - w_received)
    w   <- mean over the cohort of w_i  -  h / alpha

All g_i and h start at 0. N counts the clients with examples, and all have the same weight. Acar et
al. 2021, "Federated Learning Based on Dynamic Regularization" (arXiv 2111.04263), Algorithm 1. The
server keeps -h / alpha. The paper has no statistics (BatchNorm); we average them. The paper
minimises the mean over clients. The release divides alpha and g_i by n_i / mean n in the client's
objective, and so minimises the mean over examples: `weighting="size"`.
"""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax

from fedjax_inv import aggregators, averaging, checks, objectives, tree, types
from fedjax_inv.types import Array, Tree


class Drift(NamedTuple):
    """The server's own state."""

    mean: types.Halves  # -h / alpha: the sum over rounds of (1 / N) sum (w_i - w_received)
    num_clients: Array  # [] N
    mean_size: Array  # [] mean n


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
    model: types.Model,
    work: types.Work,
    *,
    alpha: float | Array = 0.01,
    weighting: str = "uniform",
    loss: types.Loss = objectives.cross_entropy,
    server_optimizer: optax.GradientTransformation = optax.sgd(1.0),
) -> types.Algorithm:
    """Return FedDyn (Acar et al. 2021, Algorithm 1).

    Args:
      alpha: weight of the quadratic term, above 0.
      weighting: weights of clients in what is minimised, "uniform" (as in the paper) or "size" (as
        in its release, and for FedAvg).
      server_optimizer: the server's optimizer, on the mean delta less h / alpha.
    """
    checks.positive("alpha", alpha)
    checks.one_of("weighting", weighting, ("uniform", "size"))
    by_size = weighting == "size"
    risk_gradient = averaging.gradient(model, loss)

    def gradient_from(visit: types.Visit) -> types.GradFn:
        received = visit.message.variables.params
        factor = visit.message.side / jnp.maximum(visit.shard.size, 1) if by_size else 1.0
        own = tree.scaled(factor, visit.own) if by_size else visit.own

        def grad_fn(variables: types.Variables, batch: types.Batch, key: Array) -> types.Step:
            step = risk_gradient(variables, batch, key)
            grads = dynamic_gradient(step.grads, own, variables.params, received, factor * alpha)
            return step._replace(grads=grads)

        return grad_fn

    def remember(visit: types.Visit, trained: types.Trained) -> types.Halves:
        moved = optax.tree.sub(trained.local.variables.params, visit.message.variables.params)
        return optax.tree.add_scale(visit.own, -alpha, moved)

    def init(setup: types.Setup) -> Drift:
        zeros = optax.tree.zeros_like(setup.variables.params)
        number = setup.has_examples.sum().astype(float)
        return Drift(zeros, number, jnp.asarray(setup.mean_size, float))

    def update(drift: Drift, present: Array, delta: types.Variables) -> Drift:
        share = present / drift.num_clients
        change = tree.scaled(share, delta.params)
        return drift._replace(mean=optax.tree.add(drift.mean, change))

    def server_delta(drift: Drift, delta: types.Variables, present: Array) -> types.Variables:
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
        side=averaging.SideState(
            init=init,
            send=lambda drift: drift.mean_size if by_size else (),
            aggregate=aggregators.count(),
            update=update,
        ),
        server_delta=server_delta,
    )
