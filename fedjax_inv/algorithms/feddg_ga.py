"""FedDG-GA: weights of clients that rise where averaging harms a client's own loss.

    gap_i = R_i(averaged network) - R_i(own network after its training)
    a_i <- a_i + step (gap_i - mean gap) / max_j |gap_j - mean gap|,   then max(a_i, 0), sum 1
    step = step_size (1 - round / num_rounds), at least 0; rounds without clients do not count

a has an entry for each client and starts uniform; R_i is the mean loss of the client's training
examples in evaluation mode. A round has two exchanges: clients train and are averaged by a, then
they measure their gaps at the averaged network, which the next round sends again.

Zhang et al. 2023, "Federated Domain Generalization with Generalization Adjustment" (CVPR). The
paper has all clients in each round. We chose: only clients that attend change their weight, a late
client measures its gap at the newest average, a cohort is averaged by its own weights, divided by
their sum, and gaps that differ by rounding alone are equal. The authors' code divides the
step by 3, measures gaps by the accuracy on validation examples, and does not subtract their mean;
its step in round i is 1 - (i - 1) / num_rounds, it plays one round more, and its clients keep their
momentum.
"""

from typing import NamedTuple

import chex
import jax.numpy as jnp
import optax

from fedjax_inv import aggregators, averaging, checks, objectives, servers, tree, types
from fedjax_inv.types import Array, Tree

FACTS = types.Facts(precision="highest")  # the differences of losses are small
_ROUNDING = 1e-6  # of a mean of float32 numbers, relative
_OF_A_WEIGHT = 0.6  # the paper's first step, 0.2, over its first weights, 1/3


class Gap(NamedTuple):
    """The upload of the second exchange."""

    gap: Tree  # []
    is_new: Tree  # [] bool, whether the client's training of this round counted
    risk: Tree  # [] R_i of the averaged network


class Weights(NamedTuple):
    """The server's own state."""

    of_clients: Array  # [C] a, on the simplex
    round: Array  # [] float32, rounds in which a client attended
    num_clients: Array  # [] float32, those with examples


class Upload(NamedTuple):
    """The upload of the first exchange."""

    delta: Tree  # a_i x (the change of parameters, statistics)
    weight: Tree  # [] a_i


def adjusted(
    weights: Array,
    gaps: Array,
    attends: Array,
    step: float | Array,
    *,
    tolerance: float | Array = 0.0,
) -> Array:
    """Return the weights [C], on the simplex, after a step along the gaps [C].

    Only the gaps of those that attend, [C] bool, count; the weights of others only change by the
    division by the sum. Gaps that differ from their mean by no more than the tolerance are equal.
    """
    chex.assert_rank(weights, 1)
    chex.assert_equal_shape([weights, gaps, attends])
    mean = jnp.where(attends, gaps, 0).sum() / jnp.maximum(attends.sum(), 1)
    apart = jnp.where(attends, gaps - mean, 0)
    largest = jnp.abs(apart).max()
    # Equal gaps differ from their mean by rounding.
    rounding = _ROUNDING * jnp.abs(jnp.where(attends, gaps, 0)).max()
    differs = largest > jnp.maximum(rounding, tolerance)
    direction = jnp.where(differs, apart / jnp.where(differs, largest, 1), 0)
    moved = jnp.maximum(weights + step * direction, 0)
    total = moved.sum()
    return jnp.where(total > 0, moved / jnp.where(total > 0, total, 1), weights)


def _adjust(
    old: Weights, found: aggregators.Stack, step_size: float | Array | None, num_rounds: int
) -> Weights:
    """The weights after the gaps of a round."""
    weights, round, num_clients = old
    counts = found.present & found.values.is_new
    gaps = jnp.zeros_like(weights).at[found.who].add(jnp.where(counts, found.values.gap, 0))
    attends = jnp.zeros(weights.shape, int).at[found.who].add(counts) > 0
    rounding = _ROUNDING * jnp.where(counts, found.values.risk, 0).max()
    first = _OF_A_WEIGHT / num_clients if step_size is None else step_size
    step = first * jnp.maximum(1 - round / num_rounds, 0)
    new = adjusted(weights, gaps, attends, step, tolerance=rounding)
    return Weights(new, round + 1, num_clients)


def feddg_ga(
    model: types.Model,
    work: types.Work,
    *,
    step_size: float | Array | None = None,
    num_rounds: int = 100,
    loss_batch_size: int = 64,
    loss: types.Loss = objectives.cross_entropy,
    server_optimizer: optax.GradientTransformation = optax.sgd(1.0),
) -> types.Algorithm:
    """Return FedAvg with generalisation adjustment (Zhang et al. 2023).

    Args:
      step_size: the first step of the weights, the paper's d; 0 is FedAvg with
        weighting="uniform"; None for 0.6 / number of clients, the paper's 0.2 for its three.
      num_rounds: rounds until the step is 0, normally all rounds of the run.
      loss: the objective of local training, and R.
      loss_batch_size: the examples on which R is computed at once.
    """
    if step_size is not None:
        checks.real("step_size", step_size)
    checks.integer("num_rounds", num_rounds)
    checks.integer("loss_batch_size", loss_batch_size)
    grad_fn = averaging.gradient(model, loss)

    def risk(variables: types.Variables, visit: types.Visit) -> Array:
        return averaging.mean_loss(model, loss, variables, visit.shard, batch_size=loss_batch_size)

    def start(setup: types.Setup) -> Weights:
        number = setup.has_examples.sum().astype(float)
        return Weights(averaging.uniform_over(setup.has_examples), jnp.zeros(()), number)

    def train(visit: types.Visit) -> types.Reply:
        received, weights = visit.message
        trained = work.run(grad_fn, work.init(received), visit.shard, visit.key)
        weight = weights[visit.shard.who]
        own = trained.local.variables
        delta = tree.scaled(weight, servers.upload_of(own, received))
        measured = averaging.MeasuredRisk(jnp.asarray(risk(own, visit), float), visit.round)
        return types.Reply(measured, Upload(delta, weight), trained.metrics)

    def average(server: servers.Server, total: Upload, cohort: types.Cohort) -> servers.Server:
        del cohort
        weight = jnp.where(total.weight > 0, total.weight, 1)
        mean = tree.scaled(1 / weight, total.delta)
        delta = servers.delta_of(server, mean, total.weight)
        return servers.update(server_optimizer, server, delta)

    def measure(visit: types.Visit) -> types.Reply:
        # An update that was dropped, for example because it held NaN, left an older state.
        averaged = risk(visit.undelayed_message, visit)
        own = visit.own
        return types.Reply(own, Gap(averaged - own.risk, own.round == visit.round, averaged), {})

    def adjust(
        server: servers.Server, found: aggregators.Stack, cohort: types.Cohort
    ) -> servers.Server:
        del cohort
        return server._replace(side=_adjust(server.side, found, step_size, num_rounds))

    training = types.Exchange(
        lambda server: averaging.Message(server.variables, server.side.of_clients),
        train,
        aggregators.total(),
        average,
    )
    measuring = types.Exchange(
        lambda server: (),
        measure,
        aggregators.stacked(),
        adjust,
        broadcast_undelayed=lambda server: server.variables,
    )
    return averaging.serving_the_server(
        model,
        server_optimizer,
        (training, measuring),
        init_client=lambda server, who: averaging.MeasuredRisk(jnp.zeros(()), jnp.int32(-1)),
        side=start,
    )
