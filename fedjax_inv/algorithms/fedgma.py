"""FedGMA: FedAvg that damps parameters on whose direction the clients disagree.

    A = |sum_i p_i sign(w_i - w)|                       per parameter; p_i sum to 1
    w <- w + m * sum_i p_i (w_i - w),   m = 1 where A >= agreement, else A

Tenison et al. 2022, "Gradient Masked Averaging for Federated Learning" (arXiv 2201.11986),
Algorithm 1. The paper has no statistics (BatchNorm); we average them without a mask.
"""

import jax
import jax.numpy as jnp
import optax

from fedjax_inv import aggregators, averaging, checks, objectives, servers, types
from fedjax_inv.aggregators import Weight
from fedjax_inv.types import Array, Tree


def mask(mean_sign: Array, agreement: float | Array) -> Array:
    """Return 1 where |mean_sign| >= agreement, the paper's tau, else |mean_sign|; any shape.

    `mean_sign` is the weighted mean of the signs of the clients' changes.
    """
    found = jnp.abs(mean_sign)
    return jnp.where(found >= agreement, 1, found)


def mean_and_sign(weight: Weight) -> types.Aggregator:
    """Return an aggregator for (mean of the `Variables`, mean of the signs of the parameters)."""
    mean = aggregators.mean(weight)

    def init(upload: types.Variables, num_slots: int) -> Tree:
        return mean.init((upload, upload.params), num_slots)

    def add(total: Tree, uploads: types.Variables, slots: types.Slots) -> Tree:
        return mean.add(total, (uploads, jax.tree.map(jnp.sign, uploads.params)), slots)

    return types.Aggregator(init, add, mean.finish)


def fedgma(
    model: types.Model,
    work: types.Work,
    *,
    agreement: float | Array = 0.4,
    loss: types.Loss = objectives.cross_entropy,
    server_optimizer: optax.GradientTransformation = optax.sgd(1.0),
    weighting: str | Weight = "size",
) -> types.Algorithm:
    """Return gradient masked averaging (Tenison et al. 2022, Algorithm 1).

    Args:
      agreement: agreement of signs from which a parameter moves by the whole mean; 0 is FedAvg.
      server_optimizer: the server's optimizer, on the masked mean delta.
    """
    checks.real("agreement", agreement, 0, 1)
    weight = aggregators.weight_of(weighting)
    grad_fn = averaging.gradient(model, loss)

    def client(visit: types.Visit) -> types.Reply:
        trained = work.run(grad_fn, work.init(visit.message), visit.shard, visit.key)
        delta = servers.upload_of(trained.local.variables, visit.message)
        return types.Reply(visit.own, (delta, ()), trained.metrics)

    def update(server: servers.Server, aggregated: Tree, cohort: types.Cohort) -> servers.Server:
        del cohort
        (mean, signs), total = aggregated
        delta = servers.delta_of(server, mean, total)
        params = jax.tree.map(lambda d, sign: d * mask(sign, agreement), delta.params, signs)
        return servers.update(server_optimizer, server, delta._replace(params=params))

    aggregate = aggregators.combine((mean_and_sign(weight), aggregators.weight_sum(weight)))
    exchange = types.Exchange(lambda server: server.variables, client, aggregate, update)
    return averaging.serving_the_server(model, server_optimizer, (exchange,))
