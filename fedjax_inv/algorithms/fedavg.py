"""FedAvg: clients train from the global network, the server averages their changes of it.

    minimise  sum_i (n_i / n) R_i(w)

McMahan et al. 2017, Algorithm 1; the server optimizers are those of Reddi et al. 2021. With a full
batch and a single local step it is FedSGD; with a server momentum, Adam or Yogi it is FedAvgM,
FedAdam or FedYogi. Statistics (BatchNorm) are averaged like parameters.
"""

import optax

from fedjax_inv import averaging, objectives, types
from fedjax_inv.aggregators import Weight


def fedavg(
    model: types.Model,
    work: types.Work,
    *,
    loss: types.Loss = objectives.cross_entropy,
    server_optimizer: optax.GradientTransformation = optax.sgd(1.0),
    weighting: str | Weight = "size",
) -> types.Algorithm:
    """Return FedAvg (McMahan et al. 2017, Algorithm 1).

    Args:
      weighting: weights of clients, "size" (n_i / n) or "uniform" over the clients that attend; in
        Python also a function of `Slots`.
    """
    grad_fn = averaging.gradient(model, loss)
    return averaging.averaging(
        model, work, lambda visit: grad_fn, server_optimizer=server_optimizer, weighting=weighting
    )
