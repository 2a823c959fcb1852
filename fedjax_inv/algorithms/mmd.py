"""MMD inside of clients: the features of a client's domains have one distribution.

    minimise  R(w) + penalty mean_{d < e} MMD^2(d, e)
    MMD^2(d, e) = mean k(x, x') + mean k(y, y') - 2 mean k(x, y)
    k(x, y) = sum_g exp(-g ||x - y||^2),      g = 0.001, 0.01, 0.1, 1, 10, 100, 1000

x and y are the body's outputs for the examples of domains d and e in the minibatch; the means are
over all pairs, also of an example with itself.

Li et al. 2018, "Domain Generalization with Adversarial Feature Learning" (CVPR), without its
adversary and autoencoder, as in DomainBed, whose kernels these are; here in each local step of
FedAvg. R is over the minibatch, DomainBed's is the mean over domains. Positions of an image are
averaged first.
"""

import jax.numpy as jnp
import optax

from fedjax_inv import averaging, domains, objectives, types
from fedjax_inv.aggregators import Weight
from fedjax_inv.types import Array

FACTS = types.Facts(precision="highest", needs_domains=True)  # the differences of means are small
BANDWIDTHS = (0.001, 0.01, 0.1, 1.0, 10.0, 100.0, 1000.0)


def distance(features: Array, members: Array) -> Array:
    """Return the mean over pairs of domains of MMD^2, []; 0 without two domains.

    features [B, F] belong to domains as members [D, B] say.
    """
    squares = ((features[:, None] - features) ** 2).sum(-1)  # which XLA computes in one loop
    kernel = sum(jnp.exp(-each * squares) for each in BANDWIDTHS)
    shares = domains.shares_of(members)
    present = members.any(1)
    means = shares @ kernel @ shares.T
    within = jnp.diagonal(means)
    each = within[:, None] + within - 2 * means
    # Of a domain and itself it is 0.
    total = jnp.where(present[:, None] & present, each, 0).sum()
    number = present.sum()
    return total / jnp.maximum(number * (number - 1), 1)


def mmd(
    model: types.Model,
    work: types.Work,
    *,
    num_domains: int,
    penalty: float | Array = 1.0,
    warmup_rounds: float | Array = 0.0,
    loss: types.Loss = objectives.cross_entropy,
    server_optimizer: optax.GradientTransformation = optax.sgd(1.0),
    weighting: str | Weight = "size",
) -> types.Algorithm:
    """Return MMD inside of clients; it reports the mean of MMD^2 as "penalty".

    Args:
      penalty: weight of the distance; 0 is FedAvg. The default is DomainBed's.
      warmup_rounds: rounds before the penalty starts.
    """

    def penalty_of(features: Array, outputs: Array, batch: types.Batch, members: Array) -> Array:
        del outputs, batch
        return distance(averaging.embedding(features), members)

    gradient_from = domains.penalised(model, loss, penalty_of, penalty, warmup_rounds, num_domains)
    return averaging.averaging(
        model, work, gradient_from, server_optimizer=server_optimizer, weighting=weighting
    )
