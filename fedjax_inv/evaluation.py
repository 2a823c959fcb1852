"""Score and loss: per client, on average, for the worst client, for clients never seen."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_inv import checks, clients, local, objectives, tree
from fedjax_inv.rounds import State
from fedjax_inv.types import Algorithm, Array, Batch, Federation, Loss, Shard, Tree

_SHARES = 16  # of everybody's batches: what devices, and lanes of a device, take part by part
_PERSONAL_BATCH = 128  # at most, as a personal model sees one client's examples only


class Scores(NamedTuple):
    """How each client of a federation is served."""

    score: Array  # [C] mean score, by default accuracy in 0..1; 0 for a client without examples
    loss: Array  # [C] mean loss, by default cross-entropy in nats
    size: Array  # [C] int32, examples


def evaluate(
    algorithm: Algorithm,
    state: State,
    federation: Federation,
    *,
    axis: clients.Axis | None = None,
    seen: bool = True,
    batch_size: int = 512,
    needed: Array | bool = True,
    loss: Loss = objectives.cross_entropy,
    score: Loss = objectives.accuracy,
) -> Scores:
    """Every client's mean score and loss on its own examples.

    axis: how the work is laid over memory and devices, as in `rounds.step`; by default one part
    after the other. Where all clients share a model, everybody's examples go through it in common
    batches of batch_size; a personal algorithm's clients go through their own. seen: the
    federation's clients are the run's own, in the same order; otherwise each is a client never seen
    and predicts with `init_client`'s state. needed: [] where false, nothing is predicted and the
    scores mean nothing. Raises ValueError for a batch_size below 1, and for rows that are none.
    """
    checks.integer("batch_size", batch_size)
    checks.federation(federation)
    axis = axis or clients.chunked(1)
    size = federation.size
    federation = federation._replace(size=jnp.where(needed, size, 0))

    def unseen(who: Array) -> Tree:
        return algorithm.init_client(state.server, who)

    def personal(who: Array, place: Array) -> tuple[Array, Array]:
        """The sums of a client's scores and losses. place: where its state lies, if it is seen."""
        own = tree.take(state.clients, place) if seen else unseen(who)
        data, order, start, size = federation
        shard = Shard(data, order, start[who], size[who], who)

        def sums(batch: Batch) -> tuple[Array, Array]:
            outputs = algorithm.predict(state.server, own, batch.x)
            arguments, count = (outputs, batch.y, batch.mask), batch.mask.sum()
            return score(*arguments) * count, loss(*arguments) * count

        return local.fold(shard, sums, batch_size=min(batch_size, _PERSONAL_BATCH))

    def each(batch: Batch) -> tuple[Array, Array]:
        """The score and the loss of each example [B], under a model that all clients share."""
        outputs = algorithm.predict(state.server, (), batch.x)

        def alone(one: Tree) -> tuple[Array, Array]:
            arguments = jax.tree.map(lambda leaf: leaf[None], one)
            return score(*arguments), loss(*arguments)

        return jax.vmap(alone)((outputs, batch.y, batch.mask))

    sums = (
        _by_client(federation, personal, axis)
        if algorithm.personal
        else _in_common(federation, each, axis, batch_size)
    )
    score_mean, loss_mean = (total / jnp.maximum(size, 1) for total in sums)
    return Scores(score_mean, loss_mean, size.astype(jnp.int32))


def _by_client(
    federation: Federation, sums_of: Callable[[Array, Array], Tree], axis: clients.Axis
) -> Tree:
    """sums_of(client, its place) of all clients, each [C]."""

    def client(turn: tuple[Array, Array]) -> tuple[Tree, Tree]:
        return (), sums_of(*turn)

    number = federation.num_clients
    everyone = jnp.arange(number, dtype=jnp.int32)
    dealt = axis.deal(everyone, everyone, jnp.ones(number, bool), number)
    turns = dealt.slots, dealt.place
    return dealt.whole(axis.fold(client, lambda nothing, uploads, slots: (), (), turns)[1])


def _in_common(
    federation: Federation,
    each: Callable[[Batch], tuple[Array, Array]],
    axis: clients.Axis,
    batch_size: int,
) -> tuple[Array, Array]:
    """The sums over every client's examples of what `each` tells of an example; each [C].

    The examples of all clients are numbered one client after the other. Batch b belongs to share
    b mod _SHARES, and the shares are what the axis lays out; a device that holds some clients alone
    takes all shares of theirs.
    """
    data, order, start, size = federation
    if not axis.is_alike:
        held, everyone = axis.holds(len(size)), jnp.arange(len(size))
        size = jnp.where((held[0] <= everyone) & (everyone <= held[-1]), size, 0)
    end = jnp.cumsum(size)
    first, total = end - size, end[-1]
    num_batches = -(-total // batch_size)
    num_clients = federation.num_clients

    def add_batch(number: Array, sums: tuple[Array, Array]) -> tuple[Array, Array]:
        index = number * batch_size + jnp.arange(batch_size, dtype=jnp.int32)
        real = index < total
        index = jnp.where(real, index, index[0])
        who = jnp.searchsorted(end, index, side="right", method="scan_unrolled")
        examples = tree.take(data, order[start[who] + index - first[who]])
        scores, losses = each(Batch(examples.x, examples.y, real))
        return _scattered(sums[0], who, scores), _scattered(sums[1], who, losses)

    def share(slot: Array) -> tuple[tuple[Array, Array], Tree]:
        """The sums of a share, numbered from 1 as the axis may append slots of zeros."""
        mine = jnp.where(slot > 0, (num_batches - slot + _SHARES) // _SHARES, 0)
        zeros = jnp.zeros(num_clients), jnp.zeros(num_clients)

        def turn(index: Array, sums: tuple[Array, Array]) -> tuple[Array, Array]:
            return add_batch(slot - 1 + index * _SHARES, sums)

        return jax.lax.fori_loop(0, mine, turn, zeros), ()

    def add(sums: Tree, uploads: Tree, slots: Array) -> Tree:
        del slots
        return jax.tree.map(lambda total, parts: total + parts.sum(0), sums, uploads)

    zeros = jnp.zeros(num_clients), jnp.zeros(num_clients)
    shares = jnp.arange(1, _SHARES + 1, dtype=jnp.int32)
    if axis.is_alike:
        return axis(share, add, zeros, shares)[0]
    return axis.total(axis.fold(share, add, zeros, shares)[0])


def _scattered(totals: Array, who: Array, values: Array) -> Array:
    """`totals` [C] with values [B] added where they belong."""
    if len(totals) == 1:  # not a scatter: XLA's CPU compiler gets some of these wrong under vmap
        return totals + values.sum()
    return totals.at[who].add(values)


def mean(scores: Scores) -> tuple[Array, Array]:
    """(score, loss) over all examples: clients weighted by size."""
    weights = scores.size / jnp.maximum(scores.size.sum(), 1)
    return (scores.score * weights).sum(), (scores.loss * weights).sum()


def balanced(scores: Scores) -> Array:
    """The mean score over clients that have examples, whatever their sizes; 0 without any.

    Where each "client" is a class (`data.federation.by_class`) and the score is accuracy, this is
    the class-balanced accuracy, the mean of the classes' recalls.
    """
    counts = scores.size > 0
    return jnp.where(counts, scores.score, 0).sum(-1) / jnp.maximum(counts.sum(-1), 1)


def worst(scores: Scores) -> Array:
    """The lowest score of a client that has examples."""
    return jnp.where(scores.size > 0, scores.score, jnp.inf).min()


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

    return Scores(pooled(scores.score), pooled(scores.loss), size)
