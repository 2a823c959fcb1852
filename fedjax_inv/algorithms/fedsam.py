"""FedSAM: FedAvg whose clients step along the gradient of the worst network nearby.

    minimise  max_{||e|| <= rho} R_i(w + e)

    w <- w - rate grad R_i(w + rho g / ||g||),   g = grad R_i(w)   of the same batch

Qu et al. 2022, "Generalized Federated Learning via Sharpness Aware Minimization" (arXiv
2206.02618), Algorithm 1; Caldarola et al. 2022, "Improving Generalization in Federated Learning by
Seeking Flat Minima" (arXiv 2203.11834). The norm is that of all parameters together; where g is 0,
nothing is ascended.

The papers leave statistics (BatchNorm) and dropout open: the first pass, at w, moves the
statistics, as they are those of the network that is kept (in the authors' code both passes do), and
both passes drop the same units.
"""

import chex
import jax
import jax.numpy as jnp
import optax

from fedjax_inv import averaging, checks, objectives, types
from fedjax_inv.aggregators import Weight
from fedjax_inv.types import Array, Tree


def ascended(params: Tree, grads: Tree, rho: float | Array) -> Tree:
    """Return params + rho grads / ||grads||, of trees of the same shapes; params where grads is 0.

    ||.|| is the Euclidean norm of all leaves together.
    """
    chex.assert_trees_all_equal_shapes(params, grads)
    norm = optax.tree.norm(grads)
    factor = rho / jnp.where(norm > 0, norm, 1)
    return jax.tree.map(lambda w, g: w + (factor * g).astype(w.dtype), params, grads)


def at_ascended(risk_gradient: types.GradFn, rho: float | Array) -> types.GradFn:
    """Return the gradient at the ascended parameters; all else is of the step at the received."""

    def grad_fn(variables: types.Variables, batch: types.Batch, key: Array) -> types.Step:
        step = risk_gradient(variables, batch, key)
        worst = variables._replace(params=ascended(variables.params, step.grads, rho))
        return step._replace(grads=risk_gradient(worst, batch, key).grads)

    return grad_fn


def fedsam(
    model: types.Model,
    work: types.Work,
    *,
    rho: float | Array = 0.05,
    loss: types.Loss = objectives.cross_entropy,
    server_optimizer: optax.GradientTransformation = optax.sgd(1.0),
    weighting: str | Weight = "size",
) -> types.Algorithm:
    """Return FedSAM (Qu et al. 2022, Algorithm 1).

    Args:
      rho: the distance to the network whose gradient is taken; 0 is FedAvg.
    """
    checks.real("rho", rho)
    grad_fn = at_ascended(averaging.gradient(model, loss), rho)
    return averaging.averaging(
        model, work, lambda visit: grad_fn, server_optimizer=server_optimizer, weighting=weighting
    )
