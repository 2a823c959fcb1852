"""V-REx inside of clients: FedAvg that also reduces the variance of a batch's risks over domains.

    minimise  R(w) + penalty mean_d (R_d(w) - mean_e R_e(w))^2

Krueger et al. 2021, "Out-of-Distribution Generalization via Risk Extrapolation" (arXiv 2003.00688),
here in each local step of FedAvg; `vrex` has the clients' risks in place of the domains'. The paper
adds the risks of all domains, DomainBed takes their mean; R is the whole batch's here, so that a
penalty of 0 is FedAvg. Both have a penalty of 1 in a warm-up, here 0, and then a fresh Adam, where
a server's optimizer here goes on; the authors' code later divides by the penalty, as we do,
DomainBed never does (`scale_loss`).
"""

import optax

from fedjax_inv import averaging, domains, objectives, types
from fedjax_inv.aggregators import Weight
from fedjax_inv.types import Array

FACTS = types.Facts(precision="highest", needs_domains=True)  # the differences of risks are small


def vrex_domains(
    model: types.Model,
    work: types.Work,
    *,
    num_domains: int,
    penalty: float | Array = 10.0,
    warmup_rounds: float | Array = 0.0,
    scale_loss: bool = True,
    loss: types.Loss = objectives.cross_entropy,
    server_optimizer: optax.GradientTransformation = optax.sgd(1.0),
    weighting: str | Weight = "size",
) -> types.Algorithm:
    """Return V-REx inside of clients; it reports the variance as "penalty".

    Args:
      penalty: weight of the variance; 0 is FedAvg. The default is DomainBed's.
      warmup_rounds: rounds before the penalty starts.
      scale_loss: whether the objective is divided by max(1, penalty).
    """

    def penalty_of(features: Array, outputs: Array, batch: types.Batch, members: Array) -> Array:
        del features
        risks = domains.risks_of(loss, outputs, batch, members)
        return domains.spread(risks[:, None], members.any(1))

    gradient_from = domains.penalised(
        model, loss, penalty_of, penalty, warmup_rounds, num_domains, scale_loss=scale_loss
    )
    return averaging.averaging(
        model, work, gradient_from, server_optimizer=server_optimizer, weighting=weighting
    )
