"""q-FedAvg: FedAvg that gives a client more weight, the larger its loss.

    minimise  sum_i F_i(w)^(q + 1) / (q + 1)
    g_i = (w - w_i) / step_size
    w <- w - sum_i F_i^q g_i / sum_i (q F_i^(q - 1) ||g_i||^2 + F_i^q / step_size)

over the cohort; w is the network that the client received, F_i the loss of all of its examples at
w, and w_i the network after local training. Li et al. 2020, "Fair Resource Allocation in Federated
Learning" (arXiv 1905.10497), Algorithm 2. In the paper client i has a weight p_i in the sum, by the
number of its examples, and is sampled with that probability; here all have the same weight. The
paper has no statistics (BatchNorm); we average them.
"""

from typing import NamedTuple

import chex
import jax.numpy as jnp
import optax

from fedjax_inv import aggregators, averaging, checks, objectives, servers, types
from fedjax_inv.types import Array, Tree

_SMALLEST_LOSS = 1e-10  # in place of 0, whose negative powers are infinite


class Upload(NamedTuple):
    """The upload of a client; the server's step is the ratio of the first two sums."""

    delta: Tree  # of the parameters' shapes
    curvature: Tree  # [], the paper's h
    stats: Tree  # after local training
    num_clients: Tree = ()  # nothing; the server counts clients


def scaled_update(
    delta: Tree, loss: Array, *, q: float | Array, step_size: float | Array
) -> tuple[Tree, Array]:
    """Return (F^q delta / step_size, h = q F^(q - 1) ||delta / step_size||^2 + F^q / step_size).

    The paper's Delta is minus the first value; h [] bounds the curvature of F^(q + 1) / (q + 1).
    Both overflow if F^q does: scale losses far above 1, or take a smaller q.

    Args:
      delta: w_i - w, the change of the parameters by local training.
      loss: F, [], at least 0; for a negative loss h is NaN.
      q: the exponent.
      step_size: the learning rate of local training, the paper's 1 / L.
    """
    chex.assert_rank(loss, 0)
    loss = jnp.where(loss < 0, jnp.nan, jnp.maximum(loss, _SMALLEST_LOSS))
    gradient = optax.tree.scale(1 / step_size, delta)
    square = optax.tree.norm(gradient, squared=True)
    curvature = q * loss ** (q - 1) * square + loss**q / step_size
    return optax.tree.scale(loss**q, gradient), curvature


def qfedavg(
    model: types.Model,
    work: types.Work,
    *,
    q: float | Array = 0.1,
    step_size: float | Array | None = None,
    loss_batch_size: int = 64,
    loss: types.Loss = objectives.cross_entropy,
    server_optimizer: optax.GradientTransformation = optax.sgd(1.0),
) -> types.Algorithm:
    """Return q-FedAvg (Li et al. 2020, Algorithm 2); clients are weighted by their losses alone.

    Long local steps, such as many steps with momentum, make h large for q > 0, and so the server's
    step small.

    Args:
      q: the exponent of the loss; 0 is FedAvg with weighting="uniform".
      step_size: the paper's 1 / L; None: the clients' learning rate (`work.learning_rate`). A
        larger one damps less.
      server_optimizer: the server's optimizer, on the step of q-FedAvg.
      loss_batch_size: the examples on which a client's loss is computed at once.
    """
    rate = work.learning_rate if step_size is None else step_size
    checks.real("q", q)
    checks.positive("step_size", rate)
    assert rate is not None
    checks.integer("loss_batch_size", loss_batch_size)
    grad_fn = averaging.gradient(model, loss)

    def client(visit: types.Visit) -> types.Reply:
        received = visit.message
        trained = work.run(grad_fn, work.init(received), visit.shard, visit.key)
        moved = servers.upload_of(trained.local.variables, received)
        value = averaging.mean_loss(model, loss, received, visit.shard, batch_size=loss_batch_size)
        delta, curvature = scaled_update(moved.params, value, q=q, step_size=rate)
        return types.Reply(visit.own, Upload(delta, curvature, moved.stats), trained.metrics)

    def update(server: servers.Server, total: Upload, cohort: types.Cohort) -> servers.Server:
        del cohort
        # If q is so large that all powers of small losses are 0, nothing moves.
        curvature = jnp.where(total.curvature <= 0, 1, total.curvature)  # NaN stays
        step = optax.tree.scale(1 / curvature, total.delta)
        delta = servers.delta_of(server, types.Variables(step, total.stats), total.num_clients)
        return servers.update(server_optimizer, server, delta)

    exchange = types.Exchange(
        lambda server: server.variables,
        client,
        aggregators.combine(
            Upload(
                aggregators.total(),
                aggregators.total(),
                aggregators.mean(aggregators.uniform),
                aggregators.count(),
            )
        ),
        update,
    )
    return averaging.serving_the_server(model, server_optimizer, (exchange,))
