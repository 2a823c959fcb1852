"""Agnostic federated learning: weights of clients that rise where the loss is large.

    q <- project(q + step_size R(w))         onto the simplex
    w <- w + sum q_i (w_i - w) / sum q_i     over the cohort, with q_i as the client received it

q has an entry for each client and starts uniform over those with examples. R(w) has the mean loss
of each client's examples at the received network, less the mean over the cohort, and 0 for clients
that do not attend. (The projection ignores a number that all losses have in common; without the
mean taken away, clients would lose their weight by being absent.)

Mohri et al. 2019, "Agnostic Federated Learning" (arXiv 1902.00146): descent on w and ascent on q
for the worst mixture of domains. The paper takes one gradient step on w; we train as in FedAvg, so
that one full-batch step is the paper's. Its mixture is over domains, here over clients: the two are
the same where each client has a domain. The authors' code evaluates the mean of the networks of all
rounds; we serve the last.
"""

from typing import NamedTuple

import chex
import jax.numpy as jnp
import optax

from fedjax_inv import aggregators, averaging, checks, objectives, servers, tree, types
from fedjax_inv.types import Array, Tree

_SMALLEST = 1e-6  # a smaller weight, over the mean weight, is rounding


class Upload(NamedTuple):
    """The upload of a client."""

    delta: Tree  # q_i x (the change of parameters, statistics)
    weight: Tree  # [] q_i, as the client received it
    loss: Tree  # [] mean over the client's examples, at the received network


def ascend(mixture: Array, losses: Array, step_size: float | Array) -> Array:
    """Return the point [C] of the simplex nearest to mixture + step_size losses, each [C].

    Entries below 1e-6 / C become 0, as most of them are rounding.
    """
    chex.assert_rank(mixture, 1)
    chex.assert_equal_shape([mixture, losses])
    nearest = optax.projections.projection_simplex(mixture + step_size * losses)
    # Rounding leaves about 1e-8 in place of 0. The next step gives back what is cut off here.
    return jnp.where(nearest < _SMALLEST / len(mixture), 0, nearest)


def afl(
    model: types.Model,
    work: types.Work,
    *,
    step_size: float | Array = 0.01,
    loss_batch_size: int = 64,
    loss: types.Loss = objectives.cross_entropy,
    server_optimizer: optax.GradientTransformation = optax.sgd(1.0),
) -> types.Algorithm:
    """Return agnostic federated learning (Mohri et al. 2019).

    Args:
      step_size: the step of the mixture; 0 is FedAvg with weighting="uniform".
      loss: the objective of local training, and R.
      loss_batch_size: the examples on which R is computed at once.
    """
    checks.real("step_size", step_size)
    checks.integer("loss_batch_size", loss_batch_size)
    grad_fn = averaging.gradient(model, loss)

    def client(visit: types.Visit) -> types.Reply:
        received, mixture = visit.message
        value = averaging.mean_loss(model, loss, received, visit.shard, batch_size=loss_batch_size)
        trained = work.run(grad_fn, work.init(received), visit.shard, visit.key)
        delta = servers.upload_of(trained.local.variables, received)
        weight = mixture[visit.shard.who]
        upload = Upload(tree.scaled(weight, delta), weight, value)
        return types.Reply(visit.own, upload, trained.metrics)

    def update(server: servers.Server, total: Upload, cohort: types.Cohort) -> servers.Server:
        del cohort
        mixture, losses = server.side, total.loss
        # If the cohort has no weight at all, the delta is 0.
        weight = jnp.where(total.weight > 0, total.weight, 1)
        mean = tree.scaled(1 / weight, total.delta)
        delta = servers.delta_of(server, mean, total.weight)
        present = losses.present
        mean_loss = losses.values.sum() / jnp.maximum(present.sum(), 1)  # absent ones are 0
        above = jnp.where(present, losses.values - mean_loss, 0)
        risks = jnp.zeros_like(mixture).at[losses.who].add(above)
        server = servers.update(server_optimizer, server, delta)
        return server._replace(side=ascend(mixture, risks, step_size))

    exchange = types.Exchange(
        lambda server: averaging.Message(server.variables, server.side),
        client,
        aggregators.combine(
            Upload(aggregators.total(), aggregators.total(), aggregators.stacked())
        ),
        update,
    )
    return averaging.serving_the_server(
        model,
        server_optimizer,
        (exchange,),
        side=lambda setup: averaging.uniform_over(setup.has_examples),
    )
