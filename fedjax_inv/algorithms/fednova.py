"""FedNova: FedAvg whose clients' changes are divided by their effective number of local steps.

    w <- w + (sum_i p_i a_i) sum_i p_i (w_i - w) / a_i

p_i is the client's weight. a_i is the sum of the factors with which its local gradients count in
(w - w_i) / rate: their number for plain SGD, more with momentum, fewer with a proximal term. (The
paper sums their sizes, which is the same while no factor is negative. With a proximal term the
release has the mean number of steps in place of sum p_i a_i, and with momentum, too, counts each
step twice.) Where all clients take equally many steps it is FedAvg.

Wang et al. 2020, "Tackling the Objective Inconsistency Problem in Heterogeneous Federated
Optimization" (arXiv 2007.07481). The paper has no statistics (BatchNorm); we average them without
the factors, so that a variance stays positive.
"""

import chex
import jax
import jax.numpy as jnp
import optax

from fedjax_inv import aggregators, averaging, checks, objectives, tree, types
from fedjax_inv.aggregators import Weight
from fedjax_inv.algorithms import fedprox
from fedjax_inv.checks import UsageError
from fedjax_inv.types import Array


def effective_steps(
    num_steps: int | Array, momentum: float | Array = 0.0, shrinkage: float | Array = 0.0
) -> Array:
    """Return the sum [] of the factors of K local gradients, the paper's ||a_i||_1.

    It is the distance that local training moves at a learning rate of 1 if each gradient is 1. For
    momentum rho it equals (K - rho (1 - rho^K) / (1 - rho)) / (1 - rho), for a proximal term alone
    (1 - (1 - shrinkage)^K) / shrinkage.

    Args:
      num_steps: K, an integer [] of at least 0.
      momentum: that of the local SGD, in [0, 1].
      shrinkage: learning rate x weight of the proximal term.
    """
    chex.assert_rank(num_steps, 0)

    def step(turn: int, state: tuple[Array, Array]) -> tuple[Array, Array]:
        del turn
        velocity, moved = state
        velocity = momentum * velocity + 1 - shrinkage * moved
        return velocity, moved + velocity

    return jax.lax.fori_loop(0, jnp.int32(num_steps), step, (jnp.zeros(()), jnp.zeros(())))[1]


def fednova(
    model: types.Model,
    work: types.Work,
    *,
    proximal: float | Array = 0.0,
    step_size: float | Array | None = None,
    loss: types.Loss = objectives.cross_entropy,
    server_optimizer: optax.GradientTransformation = optax.sgd(1.0),
    weighting: str | Weight = "size",
) -> types.Algorithm:
    """Return FedNova (Wang et al. 2020).

    Args:
      work: local training by SGD that records its momentum: `local.epochs(..., momentum=0.9)`; 0
        for plain SGD.
      proximal: weight of FedProx's proximal term, the paper's mu.
      step_size: the clients' learning rate, on which a_i depends if there is a proximal term;
        None: `work.learning_rate`. A schedule inside of the optimizer is not followed.
      server_optimizer: the server's optimizer, on the normalised mean delta.
    """
    checks.real("proximal", proximal)
    rate = work.learning_rate if step_size is None else step_size
    if rate is None and checks.is_known_zero(proximal):
        rate = 0.0
    checks.real("step_size", rate)
    assert rate is not None
    momentum = work.momentum
    if momentum is None:
        text = "must be sgd without Nesterov momentum and weight decay: `work` records `momentum`"
        raise UsageError("optimizer", ..., text)

    def steps(visit: types.Visit, trained: types.Trained) -> Array:
        """a_i."""
        del visit
        return effective_steps(trained.num_steps, momentum, rate * proximal)

    def inverse(visit: types.Visit, trained: types.Trained) -> Array:
        count = steps(visit, trained)
        return 1 / jnp.where(count == 0, 1, count)

    return averaging.averaging(
        model,
        work,
        fedprox.proximal_gradients(averaging.gradient(model, loss), proximal),
        server_optimizer=server_optimizer,
        weighting=weighting,
        scale_delta=inverse,
        server_delta=lambda side, delta, mean: delta._replace(
            params=tree.scaled(mean, delta.params)
        ),
        side=averaging.SideState(
            upload=steps, aggregate=aggregators.mean(aggregators.weight_of(weighting))
        ),
    )
