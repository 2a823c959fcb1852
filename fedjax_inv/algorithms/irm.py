"""IRM inside of clients: one classifier should be optimal in each domain of a client.

    minimise  R(w) + penalty mean_d s_d(w)^2,      s_d(w) = d/dv R_d(v f_w) at v = 1
    over w, with f_w the outputs and R_d the risk of domain d in the minibatch

IRMv1 of Arjovsky et al. 2019, "Invariant Risk Minimization" (arXiv 1907.02893), here in each local
step of FedAvg. The paper leaves open how s_d^2 is taken from a minibatch: its code squares s_d of
all examples, DomainBed multiplies the s_d of two halves. Both have a penalty of 1 in a warm-up, 0
here, and then a fresh Adam, where a server's optimizer here goes on; the authors' code later
divides the objective by the penalty, DomainBed never does (`scale_loss`). They add the risks of all
domains with equal weights; R is the whole batch's here, so that the warm-up is FedAvg. With one
domain it is FedIPG on a linear classifier.
"""

import jax
import optax

from fedjax_inv import averaging, checks, domains, objectives, types
from fedjax_inv.aggregators import Weight
from fedjax_inv.algorithms.fedipg import half_masks
from fedjax_inv.types import Array

FACTS = types.Facts(precision="highest", needs_domains=True)  # s_d is a sum of terms that cancel


def slopes(loss: types.Loss, outputs: Array, batch: types.Batch, members: Array) -> Array:
    """Return s_d, the derivative of each domain's risk by the scale of the outputs, [D]."""

    def risks(outputs: Array) -> Array:
        return domains.risks_of(loss, outputs, batch, members)

    return jax.jvp(risks, (outputs,), (outputs,))[1]


def irm(
    model: types.Model,
    work: types.Work,
    *,
    num_domains: int,
    penalty: float | Array = 1.0,
    warmup_rounds: float | Array = 0.0,
    estimator: str = "square",
    scale_loss: bool = True,
    loss: types.Loss = objectives.cross_entropy,
    server_optimizer: optax.GradientTransformation = optax.sgd(1.0),
    weighting: str | Weight = "size",
) -> types.Algorithm:
    """Return IRM inside of clients (IRMv1); it reports the mean of s_d^2 as "penalty".

    Args:
      penalty: weight of the penalty; 0 is FedAvg. DomainBed has 100, after a tenth of the steps.
      warmup_rounds: rounds before the penalty starts.
      estimator: "square", or "halves", the product of s_d on every other example of a domain and on
        the rest.
      scale_loss: whether the objective is divided by max(1, penalty).
    """
    checks.one_of("estimator", estimator, ("square", "halves"))

    def penalty_of(features: Array, outputs: Array, batch: types.Batch, members: Array) -> Array:
        del features
        parts = (members, members) if estimator == "square" else jax.vmap(half_masks)(members)
        first, second = (slopes(loss, outputs, batch, each) for each in parts)
        return objectives.masked_mean(first * second, members.any(1))

    gradient_from = domains.penalised(
        model, loss, penalty_of, penalty, warmup_rounds, num_domains, scale_loss=scale_loss
    )
    return averaging.averaging(
        model, work, gradient_from, server_optimizer=server_optimizer, weighting=weighting
    )
