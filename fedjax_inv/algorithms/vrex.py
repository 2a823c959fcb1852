"""V-REx across clients: FedAvg that also reduces the variance of the clients' losses.

    minimise  mean_i R_i(w) + beta Var_i R_i(w)

whose gradient is the mean over clients of (1 + 2 beta (R_i - mean R)) grad R_i. A round has two
exchanges. In the first one the clients upload R_i(w), their mean loss at the received network; in
the second one the server sends the network again with the cohort's mean of R, and a client
multiplies all of its local gradients by its factor, which may be negative.

Krueger et al. 2021, "Out-of-Distribution Generalization via Risk Extrapolation" (arXiv 2003.00688):
there over domains, in every gradient step, with the sum of the losses; here over clients, all with
the same weight, with their mean, and with a factor that holds for a round. One full-batch step of
m clients is the paper's with m times beta and 1 / m of the rate. The authors' code for two domains
has (R_1 - R_2)^2, which is four times the variance, with a beta of 1 in a warm-up, here 0, and then
divides by beta.
"""

import jax.numpy as jnp
import optax

from fedjax_inv import aggregators, averaging, checks, objectives, servers, types
from fedjax_inv.types import Array

FACTS = types.Facts(precision="highest")  # the differences of losses are small


def factor(risk: Array, mean_risk: Array, beta: float | Array) -> Array:
    """Return 1 + 2 beta (R_i - mean R), the factor of a client's gradient, of R_i's shape."""
    return 1 + 2 * beta * (risk - mean_risk)


def vrex(
    model: types.Model,
    work: types.Work,
    *,
    beta: float | Array = 1.0,
    warmup_rounds: float | Array = 0.0,
    scale_loss: bool = False,
    loss_batch_size: int = 64,
    loss: types.Loss = objectives.cross_entropy,
    server_optimizer: optax.GradientTransformation = optax.sgd(1.0),
) -> types.Algorithm:
    """Return V-REx across clients (Krueger et al. 2021); it reports a client's "factor".

    Args:
      beta: weight of the variance; 0 is FedAvg with weighting="uniform".
      warmup_rounds: rounds before the variance counts.
      scale_loss: whether the objective is divided by max(1, beta).
      loss: the objective of local training, and R.
      loss_batch_size: the examples on which R is computed at once.
    """
    checks.real("beta", beta)
    checks.real("warmup_rounds", warmup_rounds)
    checks.integer("loss_batch_size", loss_batch_size)
    risk_gradient = averaging.gradient(model, loss)

    def measure(visit: types.Visit) -> types.Reply:
        received = visit.message
        risk = averaging.mean_loss(model, loss, received, visit.shard, batch_size=loss_batch_size)
        risk = jnp.asarray(risk, float)
        return types.Reply(averaging.MeasuredRisk(risk, visit.round), risk, {})

    def with_mean(server: servers.Server, mean: Array, cohort: types.Cohort) -> servers.Server:
        del cohort
        return server._replace(side=mean)

    def gradient_from(visit: types.Visit) -> types.GradFn:
        now = jnp.where(visit.round < warmup_rounds, 0, beta)
        weight = factor(visit.own.risk, visit.message.side, now)
        # A loss that was dropped, for example because it was NaN, left an older state.
        weight = jnp.where(visit.own.round == visit.round, weight, 1)
        weight /= jnp.maximum(1, now) if scale_loss else 1

        def grad_fn(variables: types.Variables, batch: types.Batch, key: Array) -> types.Step:
            step = risk_gradient(variables, batch, key)
            grads = optax.tree.scale(weight, step.grads)
            return step._replace(grads=grads, metrics={**step.metrics, "factor": weight})

        return grad_fn

    training = averaging.averaging(
        model,
        work,
        gradient_from,
        server_optimizer=server_optimizer,
        weighting="uniform",
        init_client=lambda server, who: averaging.MeasuredRisk(jnp.zeros(()), jnp.int32(-1)),
        side=averaging.SideState(
            init=lambda setup: jnp.zeros(()),
            send=lambda mean: mean,
            update=lambda mean, nothing, delta: mean,
        ),
    )
    uniform = aggregators.mean(aggregators.uniform)
    risks = types.Exchange(lambda server: server.variables, measure, uniform, with_mean)
    return training._replace(exchanges=(risks, *training.exchanges))
