"""FedIPG: federated learning with an invariance penalty for generalization.

    minimise  f_i(w) = R_i(w) + penalty * s(w)^2,        s(w) = <grad R_i(w), P w>        (9)
    grad f_i = grad R_i + 2 penalty s (P grad R_i + H_i P w)                              (30, 36)

Hao et al. 2025, "Invariant Federated Learning for Edge Intelligence", arXiv 2503.06158. P projects
on all parameters, or on the classifier's alone (`penalty_on`); for a linear classifier the penalty
is IRMv1's (Arjovsky et al. 2019, arXiv 1907.02893), whose code is the source of the warm-up and the
scaled loss. The paper leaves open, and we chose: R_i is the minibatch's risk, as in training, whose
s^2 exceeds the client's s^2 by a variance on average, unless `estimator` takes s from two halves; w
is all trainable parameters; the server is FedAvg's.

The penalty has an effect if it starts after a warm-up with 1e2 to 1e4, the loss is scaled, and the
server's optimizer is adaptive (Adam); an adaptive client optimizer hides the clients' disagreement.
The paper's 1e-2 changes little.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax

from fedjax_inv import averaging, checks, models, objectives, penalties, types
from fedjax_inv.aggregators import Weight
from fedjax_inv.cse import eliminate_common_subexpressions
from fedjax_inv.parts import EVERYTHING, PARTS, Part, needing_head
from fedjax_inv.types import Array, Tree

# The penalty multiplies s(w)^2, a sum of terms that cancel, by up to 1e4.
FACTS = types.Facts(precision="highest")


class _Risks(NamedTuple):
    """The risks of a batch; s(w)^2 is estimated by the s of `first` times the s of `second`."""

    whole: Array  # [] R(w)
    first: Array  # [] R(w), or the risk of half of the examples
    second: Array  # [] R(w), or the risk of the other half


Risk = Callable[[Tree], tuple[_Risks, Tree]]  # params -> (risks, aux)


class _Parts(NamedTuple):
    risk: Array  # [] R(w)
    invariance: Array  # [] s(w)
    aux: Tree


def invariance(risk: Callable[[Tree], Array], params: Tree) -> Array:
    """Return s(w) = <grad R(w), w>, the slope of the risk as the parameters grow (Eq. 9), [].

    It takes one Jacobian-vector product.

    Args:
      risk: params -> a scalar.
      params: w.
    """
    value, slope = jax.jvp(risk, (params,), (params,))
    chex.assert_rank(value, 0)
    return slope


def penalised_value_and_grad(
    risk: Callable[[Tree], Any],
    penalty: float | Array,
    *,
    has_aux: bool = False,
) -> Callable[[Tree], tuple[Any, Tree]]:
    """Return the function params -> (f, grad f), with f = R + penalty <grad R, w>^2 (Eq. 9, 30).

    Args:
      risk: params -> a scalar; with has_aux params -> (scalar, aux).
      penalty: the weight of the penalty.
      has_aux: whether the risk returns a pair. Then the function returns ((f, aux), grad f), like
        `jax.value_and_grad`.
    """

    def value_and_grad(params: Tree) -> tuple[Any, Tree]:
        def risks(params: Tree) -> tuple[_Risks, Tree]:
            value, aux = risk(params) if has_aux else (risk(params), ())
            chex.assert_rank(value, 0)
            return _Risks(value, value, value), aux

        parts, grads = _penalised_grad(risks, penalty, params, EVERYTHING)
        value = parts.risk + penalty * parts.invariance**2
        return ((value, parts.aux) if has_aux else value), grads

    return value_and_grad


def _penalised_grad(
    risk: Risk, penalty: float | Array, params: Tree, chosen: Part
) -> tuple[_Parts, Tree]:
    """Differentiate R + penalty s^2; the work that s and R have in common is done once."""

    def pushed(params: Tree) -> tuple[_Risks, _Risks, Tree]:
        part = chosen.get(params)
        return jax.jvp(lambda part: risk(chosen.put(params, part)), (part,), (part,), has_aux=True)

    def objective(params: Tree) -> tuple[Array, _Parts]:
        # A layer's product with its parameters is also a part of its derivative along them.
        risks, s, aux = eliminate_common_subexpressions(pushed)(params)
        return risks.whole + penalty * s.first * s.second, _Parts(risks.whole, s.whole, aux)

    grads, parts = jax.grad(objective, has_aux=True)(params)
    return parts, grads


def half_masks(mask: Array) -> tuple[Array, Array]:
    """Return two masks [B] bool that take the real examples of `mask` [B] in turn."""
    chex.assert_rank(mask, 1)
    is_even = jnp.cumsum(mask) % 2 == 1
    return mask & is_even, mask & ~is_even


def fedipg(
    model: types.Model,
    work: types.Work,
    *,
    penalty: float | Array | optax.Schedule = 1e-3,
    warmup_rounds: float | Array = 0.0,
    warmup_penalty: float | Array = 0.0,
    penalty_on: str = "all",
    estimator: str = "square",
    scale_loss: bool = False,
    loss: types.Loss = objectives.cross_entropy,
    server_optimizer: optax.GradientTransformation = optax.sgd(1.0),
    weighting: str | Weight = "size",
) -> types.Algorithm:
    """Return FedIPG (Algorithm 1 without the exit strategy).

    It reports R as "loss" and s as "invariance", of whole batches, averaged over local steps.

    Args:
      penalty: weight of the penalty, the paper's lambda; 0 is FedAvg. In Python also a schedule of
        the round, counted from the first one of the run.
      warmup_rounds: rounds before the penalty starts.
      warmup_penalty: the penalty in these rounds.
      penalty_on: parameters that are penalised, "all" or the "classifier" (the model's head).
      estimator: estimator of s^2 from a minibatch: "square", or "halves", the product of s on its
        two `half_masks`. For independent examples, and without normalisation across examples,
        "halves" is unbiased for the client's s^2, but may be negative without a lower bound: clip
        local gradients. It leaves a batch with one real example without a penalty.
      scale_loss: whether f is divided by max(1, penalty).
    """
    penalty_at = penalties.schedule(penalty, warmup_rounds, warmup_penalty)
    checks.one_of("penalty_on", penalty_on, PARTS)
    checks.one_of("estimator", estimator, ("square", "halves"))

    def gradient_from(visit: types.Visit) -> types.GradFn:
        now = penalty_at(visit.round)

        def grad_fn(variables: types.Variables, batch: types.Batch, key: Array) -> types.Step:
            def risks(params: types.Halves) -> tuple[_Risks, types.Halves]:
                at = types.Variables(params, variables.stats)
                outputs, stats = models.apply(model, at, batch.x, batch.mask, True, key)
                whole = loss(outputs, batch.y, batch.mask)
                if estimator == "square":
                    return _Risks(whole, whole, whole), stats
                halves = (loss(outputs, batch.y, mask) for mask in half_masks(batch.mask))
                return _Risks(whole, *halves), stats

            part = PARTS[penalty_on]
            parts, grads = _penalised_grad(risks, now, variables.params, part)
            if scale_loss:
                grads = optax.tree.scale(1 / jnp.maximum(1, now), grads)
            return types.Step(
                grads, parts.aux, {"loss": parts.risk, "invariance": parts.invariance}
            )

        return grad_fn

    training = averaging.averaging(
        model, work, gradient_from, server_optimizer=server_optimizer, weighting=weighting
    )
    return needing_head(training) if penalty_on == "classifier" else training
