"""FedIPG: federated learning with an invariance penalty for generalization.

    minimise  f_i(w) = R_i(w) + penalty * s(w)^2,        s(w) = <grad R_i(w), w>          (9)
    grad f_i = grad R_i + 2 penalty s (P grad R_i + H_i P w)                              (30, 36)

Hao et al. 2025, "Invariant Federated Learning for Edge Intelligence", arXiv 2503.06158. P keeps all
parameters, or the classifier's only (`penalty_on`); of a linear classifier the penalty is IRMv1's
(Arjovsky et al. 2019, arXiv 1907.02893), whose code also gave us the warm-up and the scaled loss.
The paper leaves open, and we chose: R_i is the minibatch's risk, as in training, whose s^2 exceeds
the client's by a variance on average, unless `estimator` takes s from two halves; w is every
trainable parameter; the server is FedAvg's.

The penalty acts when it sets in after a warm-up at 1e2 to 1e4, with the loss scaled, and the
server adapts (Adam); a client that adapts hides its disagreement. The paper's 1e-2 changes little.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_inv import averaging, checks, models, objectives
from fedjax_inv.aggregators import Weight
from fedjax_inv.checks import UsageError
from fedjax_inv.cse import eliminate_common_subexpressions
from fedjax_inv.parts import EVERYTHING, PARTS, Part
from fedjax_inv.types import (
    Algorithm,
    Array,
    Batch,
    GradFn,
    Halves,
    Loss,
    Model,
    Step,
    Tree,
    Variables,
    Visit,
    Work,
)

ESTIMATORS = ("square", "halves")


class _Risks(NamedTuple):
    """What the penalty is made of: s(w)^2 is the product of the second's s and the third's."""

    whole: Array  # [] R(w)
    first: Array  # [] R(w), or that of half of the examples
    second: Array  # [] R(w), or that of the others


Risk = Callable[[Tree], tuple[_Risks, Tree]]  # params -> (risks, aux)


class _Parts(NamedTuple):
    risk: Array  # [] R(w)
    invariance: Array  # [] s(w)
    aux: Tree


def invariance(risk: Callable[[Tree], Array], params: Tree) -> Array:
    """s(w) = <grad R(w), w>: how fast the risk changes as the parameters grow; [].

    One Jacobian-vector product, Eq. 9. risk: params -> scalar. Raises ValueError for another risk.
    """
    _check_scalar(risk, params, has_aux=False)
    return jax.jvp(risk, (params,), (params,))[1]


def penalised_value_and_grad(
    risk: Callable[[Tree], Any],
    penalty: float | Array,
    *,
    derivative: str = "reverse_over_forward",
    has_aux: bool = False,
) -> Callable[[Tree], tuple[Any, Tree]]:
    """The function params -> (f, grad f) of f = R + penalty <grad R, w>^2, Eq. 9 and 30.

    risk: params -> scalar; with has_aux params -> (scalar, aux), and the function gives
    ((f, aux), grad f), as `jax.value_and_grad` does. derivative: "forward_over_reverse" pushes w
    through the gradient of R, which gives grad R and H w together; "reverse_over_forward"
    differentiates s, which has work in common with R that is done, and transposed, once. They give
    the same numbers. Raises ValueError for another derivative or risk,
    and a negative penalty.
    """
    checks.real("penalty", penalty)
    checks.one_of("derivative", derivative, _ROUTES)

    def value_and_grad(params: Tree) -> tuple[Any, Tree]:
        _check_scalar(risk, params, has_aux)

        def risks(params: Tree) -> tuple[_Risks, Tree]:
            value, aux = risk(params) if has_aux else (risk(params), ())
            return _Risks(value, value, value), aux

        parts, grads = _ROUTES[derivative](risks, penalty, params, EVERYTHING)
        value = parts.risk + penalty * parts.invariance**2
        return ((value, parts.aux) if has_aux else value), grads

    return value_and_grad


def _check_scalar(risk: Callable[[Tree], Any], params: Tree, has_aux: bool) -> None:
    told = jax.eval_shape(risk, params)
    is_pair = isinstance(told, tuple) and len(told) == 2
    value: Any = told if not has_aux else told[0] if is_pair else None
    if jax.tree.leaves(value) != [value] or value.shape or not jnp.issubdtype(value, jnp.floating):
        needed = "(a real scalar, aux)" if has_aux else "a real scalar; with aux, take has_aux=True"
        raise UsageError(f"risk: returns {told}, must return {needed}")


def _forward_over_reverse(
    risk: Risk, penalty: float | Array, params: Tree, kept: Part
) -> tuple[_Parts, Tree]:
    def whole(params: Tree) -> tuple[Array, Tree]:
        risks, aux = risk(params)
        return risks.whole, aux

    def value_and_grad(part: Tree) -> tuple[tuple[Array, Tree], Tree]:
        (value, aux), grads = jax.value_and_grad(whole, has_aux=True)(kept.put(params, part))
        return (value, grads), aux

    part = kept.get(params)
    (value, grads), (s, products), aux = jax.jvp(value_and_grad, (part,), (part,), has_aux=True)
    scale = 2 * penalty * s
    penalised = optax.tree.add_scale(grads, scale, products)
    direct = optax.tree.add_scale(kept.get(penalised), scale, kept.get(grads))
    return _Parts(value, s, aux), kept.put(penalised, direct)


def _reverse_over_forward(
    risk: Risk, penalty: float | Array, params: Tree, kept: Part
) -> tuple[_Parts, Tree]:
    def pushed(params: Tree) -> tuple[_Risks, _Risks, Tree]:
        part = kept.get(params)
        return jax.jvp(lambda part: risk(kept.put(params, part)), (part,), (part,), has_aux=True)

    def objective(params: Tree) -> tuple[Array, _Parts]:
        # A layer's product with its parameters is a part of its derivative along them.
        risks, s, aux = eliminate_common_subexpressions(pushed)(params)
        return risks.whole + penalty * s.first * s.second, _Parts(risks.whole, s.whole, aux)

    grads, parts = jax.grad(objective, has_aux=True)(params)
    return parts, grads


_ROUTES = {
    "forward_over_reverse": _forward_over_reverse,
    "reverse_over_forward": _reverse_over_forward,
}


def penalty_schedule(
    penalty: float | Array | optax.Schedule,
    *,
    warmup_rounds: int = 0,
    warmup_penalty: float | Array = 0.0,
) -> optax.Schedule:
    """The function round [] -> penalty []: `warmup_penalty` at first, after that `penalty`.

    penalty: a number, or a schedule of the round, counted from the first of the run. Raises
    ValueError for values out of range, of a schedule for its first; a negative one that is found
    later is NaN, which a run reports.
    """
    checks.integer("warmup_rounds", warmup_rounds, 0)
    checks.real("warmup_penalty", warmup_penalty)
    after = penalty if callable(penalty) else lambda round: penalty
    checks.real("penalty(0)" if callable(penalty) else "penalty", after(0))

    def at(round: Array) -> Array:
        now = jnp.where(round < warmup_rounds, warmup_penalty, after(round))
        return jnp.where(now >= 0, now, jnp.nan)

    return at


def half_masks(mask: Array) -> tuple[Array, Array]:
    """Two masks [B]: of the real examples under `mask` [B], every other one, and the rest.

    Their numbers differ by one at most; of a single example the second half is empty.
    """
    is_even = jnp.cumsum(mask) % 2 == 1
    return mask & is_even, mask & ~is_even


def fedipg(
    model: Model,
    work: Work,
    *,
    penalty: float | Array | optax.Schedule = 1e-3,
    warmup_rounds: int = 0,
    warmup_penalty: float | Array = 0.0,
    penalty_on: str = "all",
    estimator: str = "square",
    scale_loss: bool = False,
    derivative: str = "reverse_over_forward",
    loss: Loss = objectives.cross_entropy,
    server_optimizer: optax.GradientTransformation = optax.sgd(1.0),
    weighting: str | Weight = "size",
) -> Algorithm:
    """FedIPG (Algorithm 1 without the exit strategy).

    penalty: the paper's lambda, 0 is FedAvg; in Python also a schedule of the round.
    warmup_rounds: rounds before it sets in. warmup_penalty: what there is before. penalty_on: "all"
    parameters or the "classifier" (the model's head). scale_loss: whether f is divided by max(1,
    penalty). derivative: the route of `penalised_value_and_grad`, "reverse_over_forward" or
    "forward_over_reverse". weighting: of clients, as in FedAvg ("size" or "uniform").

    estimator: of s^2, from a minibatch; "square", or "halves", the product of s on both of its
    `half_masks`. Where examples are drawn independently, and no norm mixes them, that is unbiased
    for s^2 of the client, but may be negative, without a lower bound: clip local gradients. A batch
    of one real example is not penalised. For "reverse_over_forward" alone.

    Reports R as "loss" and s as "invariance", of whole batches, averaged over local steps. Raises
    ValueError for values out of range.
    """
    penalty_at = penalty_schedule(
        penalty, warmup_rounds=warmup_rounds, warmup_penalty=warmup_penalty
    )
    checks.one_of("derivative", derivative, _ROUTES)
    checks.one_of("penalty_on", penalty_on, PARTS)
    checks.one_of("estimator", estimator, ESTIMATORS)
    if estimator == "halves" and derivative != "reverse_over_forward":
        raise UsageError(f"{derivative=}: must be reverse_over_forward for estimator='halves'")

    def gradient_from(visit: Visit) -> GradFn:
        now = penalty_at(visit.round)

        def grad_fn(variables: Variables, batch: Batch, key: Array) -> Step:
            def risks(params: Halves) -> tuple[_Risks, Halves]:
                given = Variables(params, variables.stats)
                outputs, stats = models.apply(model, given, batch.x, batch.mask, True, key)
                whole = loss(outputs, batch.y, batch.mask)
                if estimator == "square":
                    return _Risks(whole, whole, whole), stats
                halves = (loss(outputs, batch.y, mask) for mask in half_masks(batch.mask))
                return _Risks(whole, *halves), stats

            parts, grads = _ROUTES[derivative](risks, now, variables.params, PARTS[penalty_on])
            if scale_loss:
                grads = optax.tree.scale(1 / jnp.maximum(1, now), grads)
            return Step(grads, parts.aux, {"loss": parts.risk, "invariance": parts.invariance})

        return grad_fn

    return averaging.averaging(
        model, work, gradient_from, server_optimizer=server_optimizer, weighting=weighting
    )
