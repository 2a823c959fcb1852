"""FedProx: FedAvg whose clients stay near the network that they received.

    minimise  R_i(w) + (proximal / 2) ||w - w_received||^2

Li et al. 2020, "Federated Optimization in Heterogeneous Networks", Eq. 2.
"""

from collections.abc import Callable

import chex
import jax
import optax

from fedjax_inv import averaging, checks, objectives, types
from fedjax_inv.aggregators import Weight
from fedjax_inv.types import Array, Tree


def proximal_gradient(grads: Tree, params: Tree, received: Tree, proximal: float | Array) -> Tree:
    """Return grads + proximal (params - received), leaf by leaf, of trees of the same shapes.

    `received` are the parameters of the received network, `proximal` is the paper's mu.
    """
    chex.assert_trees_all_equal_shapes(grads, params, received)
    return jax.tree.map(lambda g, w, r: g + proximal * (w - r), grads, params, received)


def proximal_gradients(
    risk_gradient: types.GradFn, proximal: float | Array
) -> Callable[[types.Visit], types.GradFn]:
    """Return visit -> the gradient of local steps: that of the risk and of the proximal term."""

    def gradient_from(visit: types.Visit) -> types.GradFn:
        received = visit.message.variables.params

        def grad_fn(variables: types.Variables, batch: types.Batch, key: Array) -> types.Step:
            step = risk_gradient(variables, batch, key)
            grads = proximal_gradient(step.grads, variables.params, received, proximal)
            return step._replace(grads=grads)

        return grad_fn

    return gradient_from


def fedprox(
    model: types.Model,
    work: types.Work,
    *,
    proximal: float | Array = 0.01,
    loss: types.Loss = objectives.cross_entropy,
    server_optimizer: optax.GradientTransformation = optax.sgd(1.0),
    weighting: str | Weight = "size",
) -> types.Algorithm:
    """Return FedProx (Li et al. 2020, Algorithm 2).

    Args:
      proximal: weight of the proximal term, the paper's mu; 0 is FedAvg.
    """
    checks.real("proximal", proximal)
    gradient_from = proximal_gradients(averaging.gradient(model, loss), proximal)
    return averaging.averaging(
        model, work, gradient_from, server_optimizer=server_optimizer, weighting=weighting
    )
