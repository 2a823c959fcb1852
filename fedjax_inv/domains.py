"""The domains inside a client's batch, and the gradient of a penalty on how they differ.

    minimise  R(w) + penalty P(w)

R is the risk of the whole batch, so that a penalty of 0 is FedAvg; for equally many examples it is
the mean over domains, as in the papers. P leaves out a domain without a real example in the batch.

Axis letters: D domains, B batch, F numbers of an example.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from fedjax_inv import checks, objectives, penalties, tree, types
from fedjax_inv.checks import UsageError
from fedjax_inv.types import Array

# (features of the body [B, ...], outputs [B, ...], batch, members [D, B]) -> P, []
Penalty = Callable[[Array, Array, types.Batch, Array], Array]


def members_of(batch: types.Batch, num_domains: int) -> Array:
    """Return which examples are real ones of each domain, [D, B] bool."""
    if batch.domain is None:
        text = "needs domains; a factory around it has FACTS = Facts(needs_domains=True), too"
        raise UsageError("algorithm", ..., text)
    return batch.mask & (batch.domain == jnp.arange(num_domains)[:, None])


def risks_of(loss: types.Loss, outputs: Array, batch: types.Batch, members: Array) -> Array:
    """Return the mean loss of each domain [D], 0 where it has no member."""
    return jax.vmap(lambda mask: loss(outputs, batch.y, mask))(members)


def shares_of(members: Array) -> Array:
    """Return the weights [D, B] whose sums over examples are the domains' means."""
    return members / jnp.maximum(members.sum(1, keepdims=True), 1)


def centred(values: Array, members: Array) -> Array:
    """Return values [B, F] less the mean of their domain."""
    return values - members.T @ (shares_of(members) @ values)


def spread(values: Array, present: Array) -> Array:
    """Return the mean squared distance of present domains' values [D, F] to their mean, []."""
    kept = jnp.where(present[:, None], values, 0)
    mean = kept.sum(0) / jnp.maximum(present.sum(), 1)
    return objectives.masked_mean(((kept - mean) ** 2).sum(1), present)


def forward(
    model: types.Model, params: types.Halves, stats: types.Halves, batch: types.Batch, key: Array
) -> tuple[Array, Array, types.Halves]:
    """Return (features of the body, outputs, new statistics) in training mode."""
    body_key, head_key = jax.random.split(key)  # as in `models.apply`
    features, body = model.encode(params.body, stats.body, batch.x, batch.mask, True, body_key)
    outputs, head = model.decode(params.head, stats.head, features, batch.mask, True, head_key)
    return features, outputs, types.Halves(body, head)


def penalised(
    model: types.Model,
    loss: types.Loss,
    penalty_of: Penalty,
    penalty: float | Array,
    warmup_rounds: float | Array,
    num_domains: int,
    *,
    scale_loss: bool = False,
) -> Callable[[types.Visit], types.GradFn]:
    """Return visit -> the gradient of R + penalty P; a step reports R as "loss", P as "penalty".

    The penalty starts after `warmup_rounds`; `scale_loss` divides by max(1, penalty).
    """
    penalty_at = penalties.schedule(penalty, warmup_rounds, 0.0)
    checks.integer("num_domains", num_domains)

    def gradient_from(visit: types.Visit) -> types.GradFn:
        now = penalty_at(visit.round)

        def grad_fn(variables: types.Variables, batch: types.Batch, key: Array) -> types.Step:
            members = members_of(batch, num_domains)

            def objective(params: types.Halves) -> tuple[Array, tuple[types.Halves, Array, Array]]:
                features, outputs, stats = forward(model, params, variables.stats, batch, key)
                risk = loss(outputs, batch.y, batch.mask)
                value = penalty_of(tree.wide(features), outputs, batch, members)
                return risk + now * value, (stats, risk, value)

            grads, (stats, risk, value) = jax.grad(objective, has_aux=True)(variables.params)
            if scale_loss:
                grads = optax.tree.scale(1 / jnp.maximum(1, now), grads)
            return types.Step(grads, stats, {"loss": risk, "penalty": value})

        return grad_fn

    return gradient_from
