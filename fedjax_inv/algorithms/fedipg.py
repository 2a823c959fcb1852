"""FedIPG: federated learning with an invariance penalty for generalization.

    minimise  f_i(w) = R_i(w) + penalty * s(w)^2,        s(w) = <grad R_i(w), w>          (9)
    grad f_i = grad R_i + 2 penalty s (P grad R_i + H_i P w)                              (30, 36)

Hao et al. 2025, "Invariant Federated Learning for Edge Intelligence", arXiv 2503.06158. P keeps all
parameters, or the classifier's only (`penalty_on`). The paper leaves open, and we chose: R_i is the
minibatch's risk, as in training; w is every trainable parameter; the server is FedAvg's.
"""

from collections.abc import Callable, Collection
from typing import NamedTuple

import jax
import optax

from fedjax_inv.algorithms import fedavg
from fedjax_inv.types import (
    Algorithm,
    Array,
    Batch,
    Halves,
    Metrics,
    Model,
    Tree,
    Variables,
    Work,
)


class _Parts(NamedTuple):
    risk: Array  # [] R(w)
    invariance: Array  # [] s(w)
    aux: Tree


def invariance(risk: Callable[[Tree], Array], params: Tree) -> Array:
    """s(w) = <grad R(w), w>: how fast the risk changes as the parameters grow; [].

    One Jacobian-vector product, Eq. 9. risk: params -> scalar.
    """
    return jax.jvp(risk, (params,), (params,))[1]


def penalised_value_and_grad(
    risk: Callable[[Tree], Array],
    penalty: float | Array,
    *,
    derivative: str = "reverse_over_forward",
) -> Callable[[Tree], tuple[Array, Tree]]:
    """The function params -> (f, grad f) of f = R + penalty <grad R, w>^2, Eq. 9 and 30.

    risk: params -> scalar. derivative: "forward_over_reverse" pushes w through the gradient of R,
    which gives grad R and H w together; "reverse_over_forward" differentiates s. They give the same
    numbers. Raises ValueError for another derivative.
    """
    parts_and_grad = _ROUTES[_known(derivative, "derivative", _ROUTES)]

    def value_and_grad(params: Tree) -> tuple[Array, Tree]:
        parts, grads = parts_and_grad(lambda w: (risk(w), ()), penalty, params, _EVERYTHING)
        return parts.risk + penalty * parts.invariance**2, grads

    return value_and_grad


Risk = Callable[[Tree], tuple[Array, Tree]]  # params -> (scalar, aux)


class _Part(NamedTuple):
    """P: the parameters that the penalty looks at."""

    get: Callable[[Tree], Tree]  # params -> the part
    put: Callable[[Tree, Tree], Tree]  # (params, part) -> params


_EVERYTHING = _Part(lambda params: params, lambda params, part: part)
_CLASSIFIER = _Part(lambda params: params.head, lambda params, part: params._replace(head=part))


def _forward_over_reverse(
    risk: Risk, penalty: float | Array, params: Tree, kept: _Part
) -> tuple[_Parts, Tree]:
    def value_and_grad(part: Tree) -> tuple[tuple[Array, Tree], Tree]:
        (value, aux), grads = jax.value_and_grad(risk, has_aux=True)(kept.put(params, part))
        return (value, grads), aux

    part = kept.get(params)
    (value, grads), (s, products), aux = jax.jvp(value_and_grad, (part,), (part,), has_aux=True)
    scale = 2 * penalty * s
    penalised = jax.tree.map(lambda g, hw: g + scale * hw, grads, products)
    direct = jax.tree.map(lambda f, g: f + scale * g, kept.get(penalised), kept.get(grads))
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
_PENALTY_ON = {"all": _EVERYTHING, "classifier": _CLASSIFIER}


def _known(value: str, argument: str, allowed: Collection[str]) -> str:
    if value not in allowed:
        raise ValueError(f"{argument}={value!r}: must be one of {', '.join(allowed)}")
    return value


def fedipg(
    model: Model,
    work: Work,
    *,
    penalty: float | Array = 1e-3,
    penalty_on: str = "all",
    derivative: str = "reverse_over_forward",
    server_optimizer: optax.GradientTransformation = optax.sgd(1.0),
    weighting: str = "size",
) -> Algorithm:
    """FedIPG (Algorithm 1 without the exit strategy); penalty is the paper's lambda, 0 is FedAvg.

    penalty_on: "all" parameters or the "classifier" (the model's head). derivative: the route of
    `penalised_value_and_grad`. Reports s(w), averaged over local steps, as "invariance".
    """
    parts_and_grad = _ROUTES[_known(derivative, "derivative", _ROUTES)]
    kept = _PENALTY_ON[_known(penalty_on, "penalty_on", _PENALTY_ON)]

    def grad_fn(variables: Variables, batch: Batch, key: Array) -> tuple[Halves, Halves, Metrics]:
        del key

        def risk(params: Halves) -> tuple[Array, Halves]:
            return fedavg.risk(model, params, variables.stats, batch)

        parts, grads = parts_and_grad(risk, penalty, variables.params, kept)
        return grads, parts.aux, {"loss": parts.risk, "invariance": parts.invariance}

    return fedavg.with_gradient(
        model,
        work,
        lambda received: grad_fn,
        server_optimizer=server_optimizer,
        weighting=weighting,
    )
