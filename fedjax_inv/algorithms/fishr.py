"""Fishr inside of clients: the gradients of a client's domains have equal variances.

    minimise  R(w) + penalty mean_d mean_k (v_dk - mean_e v_ek)^2
    v_d = Var_d(g) + ema / (1 - ema) a_d,      a_d <- ema a_d + (1 - ema) Var_d(g)

g has an entry k for each parameter of the classifier (the model's head): the gradient of one
example's loss. Var_d is over the examples of domain d in the minibatch, and a_d is a constant, from
the client's steps before, 0 at first.

Rame et al. 2021, "Fishr: Invariant Gradient Variances for Out-of-Distribution Generalization"
(arXiv 2109.02934), here in each local step of FedAvg, with the mean over parameters and the moving
average of the authors' code; the paper has the squared norm. The code starts the penalty after a
warm-up, with a fresh Adam; a server's optimizer here goes on. A domain with one example in the
batch has no variance and is left out.
"""

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree

from fedjax_inv import averaging, checks, domains, local, objectives, penalties, types
from fedjax_inv.aggregators import Weight
from fedjax_inv.parts import needing_head
from fedjax_inv.types import Array, Tree

FACTS = types.Facts(
    precision="highest", needs_domains=True
)  # the differences of variances are small


def head_gradients(
    model: types.Model,
    loss: types.Loss,
    params: types.Halves,
    stats: types.Halves,
    features: Array,
    y: Tree,
) -> Array:
    """Return the gradient of each example's loss by the head's parameters, [B, P].

    The head is in evaluation mode, in which examples do not depend on each other.
    """

    def of(feature: Array, target: Tree) -> Array:
        def risk(head: Tree) -> Array:
            real = jnp.ones(1, bool)
            outputs, _ = model.decode(head, stats.head, feature[None], real, False)
            return loss(outputs, jax.tree.map(lambda leaf: leaf[None], target), real)

        return ravel_pytree(jax.grad(risk)(params.head))[0]

    return jax.vmap(of)(features, y)


def variances(grads: Array, members: Array) -> Array:
    """Return the variance of gradients [B, P] in each domain of members [D, B], [D, P]."""
    return domains.shares_of(members) @ domains.centred(grads, members) ** 2


def fishr(
    model: types.Model,
    work: types.Work,
    *,
    num_domains: int,
    penalty: float | Array = 1000.0,
    ema: float | Array = 0.95,
    warmup_rounds: float | Array = 0.0,
    loss: types.Loss = objectives.cross_entropy,
    server_optimizer: optax.GradientTransformation = optax.sgd(1.0),
    weighting: str | Weight = "size",
) -> types.Algorithm:
    """Return Fishr inside of clients (Rame et al. 2021); it reports its term as "penalty".

    Args:
      penalty: weight of the distance of variances; 0 is FedAvg. The default is DomainBed's.
      ema: how much of the average of variances a step keeps, below 1; 0 has no average.
      warmup_rounds: rounds before the penalty starts.
    """
    penalty_at = penalties.schedule(penalty, warmup_rounds, 0.0)
    checks.real("ema", ema, 0, 0.999)
    checks.integer("num_domains", num_domains)

    def gradient_from(visit: types.Visit) -> types.LocalGradFn:
        now = penalty_at(visit.round)

        def grad_fn(local: types.Local, batch: types.Batch, key: Array) -> types.Step:
            params, stats = local.variables
            members = domains.members_of(batch, num_domains)
            present = members.sum(1) > 1

            def objective(
                params: types.Halves,
            ) -> tuple[Array, tuple[types.Halves, Array, Array, Array]]:
                features, outputs, after = domains.forward(model, params, stats, batch, key)
                grads = head_gradients(model, loss, params, stats, features, batch.y)
                found = variances(grads, members)
                average = ema * local.carry + (1 - ema) * found
                # Divided, so that its derivative does not depend on the average's.
                smooth = found + ema / (1 - ema) * local.carry
                value = domains.spread(smooth, present) / found.shape[1]
                risk = loss(outputs, batch.y, batch.mask)
                return risk + now * value, (after, risk, value, average)

            grads, (after, risk, value, average) = jax.grad(objective, has_aux=True)(params)
            carry = jnp.where(present[:, None], jax.lax.stop_gradient(average), local.carry)
            return types.Step(grads, after, {"loss": risk, "penalty": value}, carry=carry)

        return grad_fn

    training = averaging.averaging(
        model,
        local.seeing_local(work),
        gradient_from,
        server_optimizer=server_optimizer,
        weighting=weighting,
        init_client=lambda server, who: jnp.zeros(
            (num_domains, ravel_pytree(server.variables.params.head)[0].size)
        ),
        start=lambda visit: work.init(visit.message.variables)._replace(carry=visit.own),
        remember=lambda visit, trained: trained.local.carry,
    )
    return needing_head(training)
