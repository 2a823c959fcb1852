"""FedAvg: clients train from the global network, the server averages how far they moved.

    minimise  sum_i (n_i / n) R_i(w)

McMahan et al. 2017, Algorithm 1; the server optimizers are those of Reddi et al. 2021. With a full
batch and a single local step it is FedSGD; with a server momentum, Adam or Yogi it is FedAvgM,
FedAdam or FedYogi. Statistics (BatchNorm) are averaged like parameters.
"""

from collections.abc import Callable

import jax
import optax

from fedjax_inv import aggregators, models, objectives, servers
from fedjax_inv.types import (
    Aggregator,
    Algorithm,
    Array,
    Batch,
    Cohort,
    Exchange,
    GradFn,
    Halves,
    Metrics,
    Model,
    Shard,
    Tree,
    Variables,
    Work,
)


def risk(model: Model, params: Halves, stats: Halves, batch: Batch) -> tuple[Array, Halves]:
    """(mean cross-entropy over the batch's real examples, changed stats), in training mode."""
    logits, stats = models.apply(model, Variables(params, stats), batch.x, batch.mask, True)
    return objectives.cross_entropy(logits, batch.y, batch.mask), stats


def gradient(model: Model) -> GradFn:
    """The gradient of `risk`."""

    def grad_fn(variables: Variables, batch: Batch, key: Array) -> tuple[Halves, Halves, Metrics]:
        del key

        def loss(params: Halves) -> tuple[Array, Halves]:
            return risk(model, params, variables.stats, batch)

        (value, stats), grads = jax.value_and_grad(loss, has_aux=True)(variables.params)
        return grads, stats, {"loss": value}

    return grad_fn


def weighting_of(name: str) -> Aggregator:
    """The aggregator called "size" (n_i / n) or "uniform"."""
    if name not in ("size", "uniform"):
        raise ValueError(f"weighting={name!r}: must be 'size' or 'uniform'")
    return aggregators.weighted_mean() if name == "size" else aggregators.mean()


def with_gradient(
    model: Model,
    work: Work,
    gradient_from: Callable[[Variables], GradFn],
    *,
    server_optimizer: optax.GradientTransformation,
    weighting: str,
) -> Algorithm:
    """FedAvg whose local training follows `gradient_from(received variables)`."""
    aggregate = weighting_of(weighting)

    def init_server(variables: Variables, key: Array) -> servers.Server:
        del key
        return servers.init(server_optimizer, variables)

    def broadcast(server: servers.Server) -> Variables:
        return server.variables

    def client(
        received: Variables, own: Tree, shard: Shard, key: Array
    ) -> tuple[Tree, Variables, Metrics]:
        local, metrics = work.run(gradient_from(received), work.init(received), shard, key)
        return own, servers.delta(local.variables, received), metrics

    def update(server: servers.Server, mean_delta: Variables, cohort: Cohort) -> servers.Server:
        del cohort
        return servers.update(server_optimizer, server, mean_delta)

    def predict(server: servers.Server, own: Tree, x: Tree) -> Array:
        del own
        return models.predict(model, server.variables, x)

    exchange = Exchange(broadcast, client, aggregate, update)
    return Algorithm(init_server, lambda server, who: (), (exchange,), predict)


def fedavg(
    model: Model,
    work: Work,
    *,
    server_optimizer: optax.GradientTransformation = optax.sgd(1.0),
    weighting: str = "size",
) -> Algorithm:
    """FedAvg (McMahan et al. 2017, Algorithm 1).

    weighting: "size" (n_i / n) or "uniform" over the clients that attend.
    """
    return with_gradient(
        model,
        work,
        lambda received: gradient(model),
        server_optimizer=server_optimizer,
        weighting=weighting,
    )
