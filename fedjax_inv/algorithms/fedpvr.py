"""FedPVR: SCAFFOLD on the classifier, where clients differ most, and FedAvg on the layers below.

    body:       y <- y - rate m,   m <- momentum m + grad R_i(y)
    classifier: y <- y - rate (grad R_i(y) - c_i + c)

Li et al. 2023, "On the Effectiveness of Partial Variance Reduction in Federated Learning with
Heterogeneous Data" (CVPR), Algorithm 1; c_i and c, of the classifier alone, are as in `scaffold`
(option II). The clients' optimizer has the momentum; for the classifier it is switched off.
"""

import jax
import optax

from fedjax_inv import objectives, types
from fedjax_inv.aggregators import Weight
from fedjax_inv.algorithms import scaffold
from fedjax_inv.parts import CLASSIFIER, Part, needing_head
from fedjax_inv.types import Tree


def without_memory(
    optimizer: optax.GradientTransformation, part: Part
) -> optax.GradientTransformation:
    """Return the optimizer with its state reset before each step, for a part of the parameters.

    An SGD with momentum, but not with Nesterov's, becomes plain SGD for the part. State that is not
    per parameter, such as a count of steps, stays. The update needs the parameters.
    """

    def update(grads: Tree, state: Tree, params: Tree | None = None) -> tuple[Tree, Tree]:
        nowhere = jax.tree.map(lambda leaf: False, params)
        everywhere = jax.tree.map(lambda leaf: True, params)
        resets = optax.tree.map_params(
            optimizer,
            lambda leaf, is_reset: is_reset,
            state,
            part.put(nowhere, part.get(everywhere)),
            transform_non_params=lambda leaf: False,
        )
        partly_reset = jax.tree.map(
            lambda is_reset, first, now: first if is_reset else now,
            resets,
            optimizer.init(params),
            state,
        )
        return optimizer.update(grads, partly_reset, params)

    return optax.GradientTransformation(optimizer.init, update)


def fedpvr(
    model: types.Model,
    work: types.Work,
    *,
    loss: types.Loss = objectives.cross_entropy,
    server_optimizer: optax.GradientTransformation = optax.sgd(1.0),
    weighting: str | Weight = "uniform",
) -> types.Algorithm:
    """Return FedPVR (Li et al. 2023, Algorithm 1); the classifier is the model's head.

    A client's own state is its control variate. The paper's clients train by SGD with momentum 0.9.

    Args:
      weighting: weights of clients, "uniform" or "size", for the networks alone; in Python also a
        function of `Slots`.
    """
    assert work.with_optimizer, "a method's own loop has no optimizer to change"
    training = scaffold.scaffold(
        model,
        work.with_optimizer(lambda optimizer: without_memory(optimizer, CLASSIFIER)),
        part=CLASSIFIER,
        loss=loss,
        server_optimizer=server_optimizer,
        weighting=weighting,
    )
    return needing_head(training)
