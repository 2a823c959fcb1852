"""Fish inside of clients: the gradients of a client's domains point the same way.

    v_0 = w,  v_k = v_{k-1} - inner_rate g_k,  g_k = grad R_{d_k}(v_{k-1}),  k = 1..n
    w <- w - rate meta_rate sum_k g_k

d_1..d_n are the domains of the minibatch in random order (in DomainBed always the same: 4% of a
move). With inner_rate = rate the step is w <- w + meta_rate (v_n - w), which also raises the inner
products of the domains' gradients.

Shi et al. 2021, "Gradient Matching for Domain Generalization" (arXiv 2104.09937), Algorithm 1, here
in the local steps of FedAvg: a local minibatch holds the domains' minibatches, the inner steps are
plain SGD, and the client's optimizer takes the sum as its gradient. The authors' code and DomainBed
have Adam in the inner loop, whose state they keep from update to update. A step costs as many
gradients of the whole batch as the data have domains.
"""

import jax
import jax.numpy as jnp
import optax

from fedjax_inv import averaging, checks, domains, objectives, types
from fedjax_inv.aggregators import Weight
from fedjax_inv.checks import UsageError
from fedjax_inv.types import Array, Tree

FACTS = types.Facts(needs_domains=True)


def fish(
    model: types.Model,
    work: types.Work,
    *,
    num_domains: int,
    meta_rate: float | Array = 0.5,
    inner_rate: float | Array | None = None,
    loss: types.Loss = objectives.cross_entropy,
    server_optimizer: optax.GradientTransformation = optax.sgd(1.0),
    weighting: str | Weight = "size",
) -> types.Algorithm:
    """Return Fish inside of clients (Shi et al. 2021).

    It is FedAvg for minibatches of one domain and a meta_rate of 1.

    Args:
      meta_rate: how far the network moves to the end of the inner loop. The default is DomainBed's.
      inner_rate: the learning rate of the inner loop; None: that of the local training.
    """
    checks.real("meta_rate", meta_rate)
    checks.integer("num_domains", num_domains)
    rate = work.learning_rate if inner_rate is None else inner_rate
    if rate is None:
        raise UsageError("inner_rate", None, "must be given, as the work has no learning rate")
    checks.real("inner_rate", rate)
    risk_gradient = averaging.gradient(model, loss)

    def grad_fn(variables: types.Variables, batch: types.Batch, key: Array) -> types.Step:
        members = domains.members_of(batch, num_domains)
        order_key, key = jax.random.split(key)

        def inner(state: tuple[types.Variables, types.Halves], which: Array) -> tuple[Tree, Array]:
            """Step along the gradient of a domain; without members nothing changes."""
            (params, stats), total = state
            mask = members[which]
            is_present = members[which].any()
            # A gradient needs an example.
            real = batch._replace(mask=jnp.where(is_present, mask, batch.mask))
            step = risk_gradient(
                types.Variables(params, stats), real, jax.random.fold_in(key, which)
            )
            grads = optax.tree.where(is_present, step.grads, optax.tree.zeros_like(step.grads))
            moved = optax.tree.add_scale(params, -rate, grads)
            stats = optax.tree.where(is_present, step.stats, stats)
            risk = jnp.where(is_present, step.metrics["loss"], 0)
            return (types.Variables(moved, stats), optax.tree.add(total, grads)), risk

        start = variables, optax.tree.zeros_like(variables.params)
        order = jax.random.permutation(order_key, num_domains)
        ((_, stats), total), risks = jax.lax.scan(inner, start, order)
        risk = risks.sum() / members.any(1).sum()
        return types.Step(optax.tree.scale(meta_rate, total), stats, {"loss": risk})

    return averaging.averaging(
        model, work, lambda visit: grad_fn, server_optimizer=server_optimizer, weighting=weighting
    )
