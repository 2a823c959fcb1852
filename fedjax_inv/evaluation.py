"""Accuracy and loss: per client, on average, for the worst client, for clients never seen."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_inv import tree
from fedjax_inv.local import real_positions, take_batch
from fedjax_inv.objectives import accuracy, cross_entropy
from fedjax_inv.rounds import State
from fedjax_inv.types import Algorithm, Array, Federation, Shard, Tree


class Scores(NamedTuple):
    """How each client of a federation is served."""

    accuracy: Array  # [C], 0..1; 0 for a client without examples
    loss: Array  # [C] mean cross-entropy, nats
    size: Array  # [C] int32, examples


def evaluate(
    algorithm: Algorithm,
    state: State,
    federation: Federation,
    *,
    seen: bool = True,
    batch_size: int = 512,
    needed: Array | bool = True,
) -> Scores:
    """Every client's accuracy and loss on its own rows.

    seen: the federation's clients are the run's own, in the same order; otherwise each is a client
    never seen and predicts with `init_client`'s state. needed: [] where false, nothing is predicted
    and the scores mean nothing.
    """
    num_rows = federation.rows.shape[1]
    batch_size = max(1, min(batch_size, num_rows))

    def client(who: Array) -> tuple[Array, Array, Array]:
        own = tree.take(state.clients, who) if seen else algorithm.init_client(state.server, who)
        shard = Shard(federation.data, federation.rows[who], federation.mask[who], who)
        return _client(algorithm, state.server, own, shard, batch_size, needed)

    return Scores(*jax.lax.map(client, jnp.arange(federation.rows.shape[0], dtype=jnp.int32)))


def _client(
    algorithm: Algorithm,
    server: Tree,
    own: Tree,
    shard: Shard,
    batch_size: int,
    needed: Array | bool,
) -> tuple[Array, Array, Array]:
    count = shard.mask.sum()
    position = real_positions(shard.mask)

    def body(i: Array, sums: Array) -> Array:
        index = i * batch_size + jnp.arange(batch_size)
        batch = take_batch(shard, position(index), index < count)
        logits = algorithm.predict(server, own, batch.x)
        means = jnp.stack([f(logits, batch.y, batch.mask) for f in (accuracy, cross_entropy)])
        return sums + means * batch.mask.sum()

    num_batches = jnp.where(needed, -(-count // batch_size), 0)
    sums = jax.lax.fori_loop(0, num_batches, body, jnp.zeros(2))
    means = sums / jnp.maximum(count, 1)
    return means[0], means[1], count.astype(jnp.int32)


def mean(scores: Scores) -> tuple[Array, Array]:
    """(accuracy, loss) over all examples: clients weighted by size."""
    weights = scores.size / jnp.maximum(scores.size.sum(), 1)
    return (scores.accuracy * weights).sum(), (scores.loss * weights).sum()


def worst(scores: Scores) -> Array:
    """The lowest accuracy of a client that has examples."""
    return jnp.where(scores.size > 0, scores.accuracy, jnp.inf).min()


def by_group(scores: Scores, group: Array, num_groups: int) -> Scores:
    """Scores of groups of clients (domains), clients weighted by size.

    group: [C] int32, the group of each client; a negative one is left out.
    """
    # Not segment_sum: XLA's CPU compiler gets some of its vmapped scatters wrong (BUILD_NOTES.md).
    member = group == jnp.arange(num_groups)[:, None]  # [G, C]
    size = (member * scores.size).sum(1)

    def pooled(values: Array) -> Array:
        # `where`, not a product: an infinite loss stays in its own group.
        return jnp.where(member, scores.size * values, 0).sum(1) / jnp.maximum(size, 1)

    return Scores(pooled(scores.accuracy), pooled(scores.loss), size)
