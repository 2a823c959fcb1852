"""FedIPG: federated learning with an invariance penalty for generalization.

    minimise  f_i(w) = R_i(w) + penalty * s(w)^2,        s(w) = <grad R_i(w), w>          (9)
    grad f_i = grad R_i + 2 penalty s (P grad R_i + H_i P w)                              (30, 36)

Hao et al. 2025, "Invariant Federated Learning for Edge Intelligence", arXiv 2503.06158. P keeps all
parameters, or the classifier's only (`penalty_on`). The paper leaves open, and we chose: R_i is the
minibatch's risk, as in training; w is every trainable parameter; the server is FedAvg's.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_inv import averaging, checks, objectives
from fedjax_inv.aggregators import Weight
from fedjax_inv.checks import UsageError
from fedjax_inv.types import (
    Algorithm,
    Array,
    Batch,
    Halves,
    Loss,
    Model,
    Step,
    Tree,
    Variables,
    Work,
)

Risk = Callable[[Tree], tuple[Array, Tree]]  # params -> (scalar, aux)


class _Parts(NamedTuple):
    risk: Array  # [] R(w)
    invariance: Array  # [] s(w)
    aux: Tree


class _Part(NamedTuple):
    """P: the parameters that the penalty looks at."""

    get: Callable[[Tree], Tree]  # params -> the part
    put: Callable[[Tree, Tree], Tree]  # (params, part) -> params


_EVERYTHING = _Part(lambda params: params, lambda params, part: part)
_CLASSIFIER = _Part(lambda params: params.head, lambda params, part: params._replace(head=part))
_PENALTY_ON = {"all": _EVERYTHING, "classifier": _CLASSIFIER}


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
    differentiates s. They give the same numbers. Raises ValueError for another derivative or risk,
    and a negative penalty.
    """
    checks.real("penalty", penalty)
    checks.one_of("derivative", derivative, _ROUTES)

    def value_and_grad(params: Tree) -> tuple[Any, Tree]:
        _check_scalar(risk, params, has_aux)
        with_aux: Risk = risk if has_aux else (lambda w: (risk(w), ()))
        parts, grads = _ROUTES[derivative](with_aux, penalty, params, _EVERYTHING)
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
    risk: Risk, penalty: float | Array, params: Tree, kept: _Part
) -> tuple[_Parts, Tree]:
    def value_and_grad(part: Tree) -> tuple[tuple[Array, Tree], Tree]:
        (value, aux), grads = jax.value_and_grad(risk, has_aux=True)(kept.put(params, part))
        return (value, grads), aux

    part = kept.get(params)
    (value, grads), (s, products), aux = jax.jvp(value_and_grad, (part,), (part,), has_aux=True)
    scale = 2 * penalty * s
    penalised = optax.tree.add_scale(grads, scale, products)
    direct = optax.tree.add_scale(kept.get(penalised), scale, kept.get(grads))
    return _Parts(value, s, aux), kept.put(penalised, direct)


def _reverse_over_forward(
    risk: Risk, penalty: float | Array, params: Tree, kept: _Part
) -> tuple[_Parts, Tree]:
    def objective(params: Tree) -> tuple[Array, _Parts]:
        part = kept.get(params)
        value, s, aux = jax.jvp(
            lambda part: risk(kept.put(params, part)), (part,), (part,), has_aux=True
        )
        return value + penalty * s**2, _Parts(value, s, aux)

    grads, parts = jax.grad(objective, has_aux=True)(params)
    return parts, grads


_ROUTES = {
    "forward_over_reverse": _forward_over_reverse,
    "reverse_over_forward": _reverse_over_forward,
}


def fedipg(
    model: Model,
    work: Work,
    *,
    penalty: float | Array = 1e-3,
    penalty_on: str = "all",
    derivative: str = "reverse_over_forward",
    loss: Loss = objectives.cross_entropy,
    server_optimizer: optax.GradientTransformation = optax.sgd(1.0),
    weighting: str | Weight = "size",
) -> Algorithm:
    """FedIPG (Algorithm 1 without the exit strategy).

    penalty: the paper's lambda, 0 is FedAvg. penalty_on: "all" parameters or the "classifier" (the
    model's head). derivative: the route of `penalised_value_and_grad`. weighting: of clients, as in
    FedAvg ("size" or "uniform"). Reports s(w), averaged over local steps, as "invariance". Raises
    ValueError for values out of range.
    """
    checks.real("penalty", penalty)
    checks.one_of("derivative", derivative, _ROUTES)
    checks.one_of("penalty_on", penalty_on, _PENALTY_ON)

    def grad_fn(variables: Variables, batch: Batch, key: Array) -> Step:
        def risk(params: Halves) -> tuple[Array, Halves]:
            return averaging.risk(model, loss, params, variables.stats, batch, key)

        parts, grads = _ROUTES[derivative](risk, penalty, variables.params, _PENALTY_ON[penalty_on])
        return Step(grads, parts.aux, {"loss": parts.risk, "invariance": parts.invariance})

    return averaging.averaging(
        model,
        work,
        lambda visit: grad_fn,
        server_optimizer=server_optimizer,
        weighting=weighting,
    )
