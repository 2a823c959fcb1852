"""FedProx: FedAvg whose clients are held near the network that they received.

    minimise  R_i(w) + (proximal / 2) ||w - w_received||^2

Li et al. 2020, "Federated Optimization in Heterogeneous Networks", Eq. 2.
"""

import jax
import optax

from fedjax_inv.algorithms import fedavg
from fedjax_inv.types import (
    Algorithm,
    Array,
    Batch,
    GradFn,
    Halves,
    Metrics,
    Model,
    Variables,
    Work,
)


def proximal_gradient(grads: Halves, params: Halves, received: Halves, proximal: float) -> Halves:
    """`grads` + proximal (params - received), leaf by leaf."""
    return jax.tree.map(lambda g, w, r: g + proximal * (w - r), grads, params, received)


def fedprox(
    model: Model,
    work: Work,
    *,
    proximal: float = 0.01,
    server_optimizer: optax.GradientTransformation = optax.sgd(1.0),
    weighting: str = "size",
) -> Algorithm:
    """FedProx (Li et al. 2020, Algorithm 2); proximal is the paper's mu, 0 is FedAvg."""
    risk_gradient = fedavg.gradient(model)

    def gradient_from(received: Variables) -> GradFn:
        def grad_fn(
            variables: Variables, batch: Batch, key: Array
        ) -> tuple[Halves, Halves, Metrics]:
            grads, stats, metrics = risk_gradient(variables, batch, key)
            grads = proximal_gradient(grads, variables.params, received.params, proximal)
            return grads, stats, metrics

        return grad_fn

    return fedavg.with_gradient(
        model, work, gradient_from, server_optimizer=server_optimizer, weighting=weighting
    )
