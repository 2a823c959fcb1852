"""FedOMG: FedAvg whose server adds the clients' changes weighed by how well their gradients match.

    Gamma minimises  Gamma D . d + kappa ||d|| ||Gamma D||      over the simplex
    w <- w + d + kappa ||d|| / ||Gamma D|| Gamma D

D: the changes of the clients [U, P]. d: their mean.

Nguyen et al. 2025, "Federated Domain Generalization with Data-free On-server Matching Gradient"
(ICLR; arXiv 2501.14653), the dual of CAGrad (Liu et al. 2021, arXiv 2110.14048). A step is up to
1 + kappa times as long as FedAvg's, so beside it belongs FedAvg with a longer step. The released
code divides the step by 1 + kappa^2, which the paper's equation does not (`rescale`). Both solve
for the logits of Gamma by 21 steps of SGD with momentum 0.5 and rate 25 on the products of changes,
divided by the square of their mean norm, and keep the best. The paper's server rate under domain
shift is 0.05. Clients count alike. It has no statistics (BatchNorm); we take their mean.
"""

import jax
import jax.numpy as jnp
import optax

from fedjax_inv import aggregators, checks, objectives, robust, tree, types
from fedjax_inv.algorithms import fedavg
from fedjax_inv.types import Array, Tree

_NUM_STEPS, _RATE, _MOMENTUM = 21, 25.0, 0.5
_EPSILON = 1e-12  # added to a square under a root


def products(changes: Tree) -> Array:
    """Return the products [U, U] of U changes, of leaves [U, ...], with each other."""

    def of_leaf(leaf: Array) -> Array:
        rows = tree.wide(leaf.reshape(leaf.shape[0], -1))
        return jnp.matmul(rows, rows.T, precision="highest")

    return jnp.stack([of_leaf(leaf) for leaf in jax.tree.leaves(changes)]).sum(0)


def objective(gamma: Array, gram: Array, mean: Array, *, kappa: float | Array) -> Array:
    """Return Gamma D . d + kappa ||d|| ||Gamma D||, [].

    Args:
      gamma: weights [U].
      gram: `products` [U, U].
      mean: the weights of d, [U].
      kappa: how far the step may be from d, in units of its length.
    """

    def norm(weights: Array) -> Array:
        return jnp.sqrt(jnp.maximum(weights @ gram @ weights, 0) + _EPSILON)

    return gamma @ gram @ mean + kappa * norm(mean) * norm(gamma)


def matching_weights(gram: Array, present: Array, *, kappa: float | Array) -> Array:
    """Return Gamma [U], the best of the steps of SGD from equal weights; 0 for who is absent.

    Args:
      gram: `products` [U, U].
      present: [U] bool, of which at least one is true.
      kappa: as in `objective`.
    """
    mean = present / present.sum()
    scale = jnp.where(present, jnp.sqrt(jnp.diag(gram)), 0).sum() / present.sum()
    gram = gram / jnp.where(scale > 0, scale, 1) ** 2
    optimizer = optax.sgd(_RATE, _MOMENTUM)

    def value(logits: Array) -> tuple[Array, Array]:
        gamma = jax.nn.softmax(jnp.where(present, logits, -jnp.inf))
        return objective(gamma, gram, mean, kappa=kappa), gamma

    def step(state: Tree, _: None) -> tuple[Tree, tuple[Array, Array]]:
        logits, opt_state = state
        (loss, gamma), grads = jax.value_and_grad(value, has_aux=True)(logits)
        updates, opt_state = optimizer.update(grads, opt_state)
        return (optax.apply_updates(logits, updates), opt_state), (loss, gamma)

    start = jnp.zeros(len(gram), gram.dtype)
    _, (losses, gammas) = jax.lax.scan(step, (start, optimizer.init(start)), length=_NUM_STEPS)
    best: Array = gammas[jnp.argmin(losses)]
    return best


def matched(
    changes: Tree, present: Array, *, kappa: float | Array = 0.5, rescale: bool = False
) -> Tree:
    """Return the server's step from the changes of clients, each leaf [U, ...].

    Args:
      changes: those of absent clients are zeros.
      present: [U] bool, of which at least one is true.
      kappa: weight of the matched direction; 0 is the mean.
      rescale: whether the step is divided by 1 + kappa^2, as in the released code.
    """
    gram = products(changes)
    mean = present / present.sum()
    gamma = matching_weights(gram, present, kappa=kappa)
    square = jnp.maximum(gamma @ gram @ gamma, 0)
    # Changes that cancel have no direction to add.
    ratio = jnp.sqrt(jnp.maximum(mean @ gram @ mean, 0) / jnp.where(square > 0, square, 1))
    weights = mean + kappa * jnp.where(square > 0, ratio, 0) * gamma
    return tree.weighted_sum(changes, weights / (1 + kappa**2) if rescale else weights)


def fedomg(
    model: types.Model,
    work: types.Work,
    *,
    kappa: float | Array = 0.5,
    rescale: bool = False,
    loss: types.Loss = objectives.cross_entropy,
    server_optimizer: optax.GradientTransformation = optax.sgd(1.0),
) -> types.Algorithm:
    """Return FedOMG; the server keeps all changes of a round.

    Args:
      kappa: as of `matched`; with 0 it is FedAvg in which clients count alike.
      rescale: as of `matched`.
    """
    checks.real("kappa", kappa)

    def combine(uploads: types.Variables, present: Array) -> types.Variables:
        params = matched(uploads.params, present, kappa=kappa, rescale=rescale)
        return types.Variables(params, tree.weighted_sum(uploads.stats, present / present.sum()))

    plain = fedavg.fedavg(model, work, loss=loss, server_optimizer=server_optimizer)
    return robust.aggregated(plain, aggregators.of_all(combine))
