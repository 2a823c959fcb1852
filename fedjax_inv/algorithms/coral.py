"""CORAL inside of clients: the features of a client's domains have equal means and covariances.

    minimise  R(w) + penalty mean_{d < e} (mean_k (m_dk - m_ek)^2 + mean_kl (C_dkl - C_ekl)^2)

m_d and C_d are the mean and the unbiased covariance of the body's outputs for the examples of
domain d in the minibatch.

Sun and Saenko 2016, "Deep CORAL" (arXiv 1607.01719), here in each local step of FedAvg, in the form
of DomainBed: the paper aligns the covariances of two domains alone, and divides by four times the
squared width. R is over the minibatch, DomainBed's is the mean over domains (1e-2 of a step with
domains of 5, 9 and 12 examples). A domain with one example in the batch has no covariance and is
left out. Positions of an image are averaged first.
"""

import jax.numpy as jnp
import optax

from fedjax_inv import averaging, domains, objectives, types
from fedjax_inv.aggregators import Weight
from fedjax_inv.types import Array

FACTS = types.Facts(precision="highest", needs_domains=True)  # the differences of moments are small


def distance(features: Array, members: Array) -> Array:
    """Return the mean over pairs of domains of the distance of their moments, [].

    features [B, F] belong to domains as members [D, B] say; without two domains it is 0.
    """
    size, width = members.sum(1), features.shape[-1]
    present = size > 1
    means = domains.shares_of(members) @ features
    apart = domains.centred(features, members)
    weights = members / jnp.maximum(size - 1, 1)[:, None]
    covariances = jnp.einsum("db,bi,bj->dij", weights, apart, apart).reshape(len(size), -1)
    spreads = domains.spread(means, present) / width
    spreads += domains.spread(covariances, present) / width**2
    # The squared distances of n points in all n (n - 1) / 2 pairs add up to n^2 their spread.
    number = present.sum()
    return spreads * 2 * number / jnp.maximum(number - 1, 1)


def coral(
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
    """Return CORAL inside of clients; it reports the distance of moments as "penalty".

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
