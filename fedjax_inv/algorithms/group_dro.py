"""Group DRO inside of clients: the domains of a client with a large loss count more.

    q_d <- q_d exp(step_size R_d(w)) / sum       for each domain d of the minibatch
    w <- w - rate sum_d q_d grad R_d(w) / sum_d q_d    over the domains of the minibatch

A client's q has an entry for each domain, starts uniform, and is kept from step to step and from
round to round.

Sagawa et al. 2020, "Distributionally Robust Neural Networks for Group Shifts" (arXiv 1911.08731),
Algorithm 1, here in the local steps of FedAvg; one q over clients is `afl`. The authors' code does
not divide by the weight of the domains in the minibatch, so that a step without a domain is
shorter; with all of them in it, as in DomainBed, both are the same.
"""

import jax
import jax.numpy as jnp
import optax

from fedjax_inv import averaging, checks, domains, local, objectives, types
from fedjax_inv.aggregators import Weight
from fedjax_inv.types import Array

FACTS = types.Facts(needs_domains=True)


def group_dro(
    model: types.Model,
    work: types.Work,
    *,
    num_domains: int,
    step_size: float | Array = 0.01,
    loss: types.Loss = objectives.cross_entropy,
    server_optimizer: optax.GradientTransformation = optax.sgd(1.0),
    weighting: str | Weight = "size",
) -> types.Algorithm:
    """Return group DRO inside of clients; it reports the batch's risk and its largest weight.

    Args:
      step_size: the step of the weights; with 0 all domains of a batch count the same, which is
        FedAvg where they are equally large.
    """
    checks.real("step_size", step_size)
    checks.integer("num_domains", num_domains)

    def grad_fn(local: types.Local, batch: types.Batch, key: Array) -> types.Step:
        params, stats = local.variables
        members = domains.members_of(batch, num_domains)

        def objective(
            params: types.Halves,
        ) -> tuple[Array, tuple[types.Halves, Array, Array, Array]]:
            _, outputs, after = domains.forward(model, params, stats, batch, key)
            risks = domains.risks_of(loss, outputs, batch, members)
            logits = local.carry + step_size * jax.lax.stop_gradient(risks)  # log q
            weights = jax.nn.softmax(jnp.where(members.any(1), logits, -jnp.inf))
            risk = loss(outputs, batch.y, batch.mask)
            return weights @ risks, (after, logits - logits.max(), weights, risk)

        grads, (after, logits, weights, risk) = jax.grad(objective, has_aux=True)(params)
        metrics = {"loss": risk, "largest_weight": weights.max()}
        return types.Step(grads, after, metrics, carry=logits)

    return averaging.averaging(
        model,
        local.seeing_local(work),
        lambda visit: grad_fn,
        server_optimizer=server_optimizer,
        weighting=weighting,
        init_client=lambda server, who: jnp.zeros(num_domains),
        start=lambda visit: work.init(visit.message.variables)._replace(carry=visit.own),
        remember=lambda visit, trained: trained.local.carry,
    )
