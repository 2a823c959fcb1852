"""Scores and losses of each client, also of clients never seen, and their means by group."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from fedjax_inv import devices, local, objectives, tree, types
from fedjax_inv.rounds import State
from fedjax_inv.types import Array, Tree

_PERSONAL_BATCH = 128  # the largest batch of a personal model, which predicts for one client


@functools.partial(jax.tree_util.register_dataclass, data_fields=["values"], meta_fields=["finish"])
@dataclasses.dataclass(frozen=True)
class Sums:
    """The sums of which a score of `objectives.Counts` is made."""

    values: Array  # [C, n]
    finish: Callable[[Array], Array]

    @property
    def score(self) -> Array:
        """The scores, [C]."""
        return self.finish(self.values)

    @property
    def pooled(self) -> Array:
        """The score of all clients together, []."""
        return self.finish(self.values.sum(-2))


class Scores(NamedTuple):
    """The score and the loss of each client of a federation."""

    score: Array  # [C] mean score, by default accuracy in 0..1; 0 for a client without examples
    loss: Array  # [C] mean loss, by default cross-entropy in nats
    size: Array  # [C] int32, examples
    sums: Sums | None = None  # of a score of counts: those of clients add, their scores do not


def evaluate(
    algorithm: types.Algorithm,
    state: State,
    federation: types.Federation,
    *,
    axis: devices.Axis | None = None,
    seen: bool = True,
    batch_size: int = 512,
    needed: Array | bool = True,
    loss: types.Loss = objectives.cross_entropy,
    score: types.Loss = objectives.accuracy,
) -> Scores:
    """Return every client's mean score and loss on its own examples, each [C].

    A personal algorithm predicts each client's examples with the client's own state, in batches of
    at most 128. `axis` says how the work is laid over memory and devices, as in `rounds.step`; by
    default one client follows the other. `seen` is whether the federation's clients are those of
    the run, in the same order; otherwise each is a client never seen, with the state that
    `init_client` gives. If `needed` [] is false, nothing is predicted and the scores mean nothing.
    `loss` and `score` are means of a batch of outputs, or the score is `objectives.Counts`.
    """
    axis = devices.chunked(1) if axis is None else axis
    if algorithm.personal and seen:
        here = axis.local_clients(federation.num_clients)
        chex.assert_tree_shape_prefix(state.clients, here.shape)
    (scores,) = evaluate_each(
        algorithm,
        state,
        [Set(federation, seen)],
        axis=axis,
        batch_size=batch_size,
        needed=needed,
        loss=loss,
        score=score,
    )
    return scores


class Set(NamedTuple):
    """Shards to evaluate."""

    shards: types.Federation  # those of all sets of an evaluation have the same examples
    seen: bool = False  # as in `evaluate`
    # whether each device has a part of each shard (`devices.SharedExamples`), and not the shards of
    # the clients that it owns
    shared: bool = False


def evaluate_each(
    algorithm: types.Algorithm,
    state: State,
    sets: Sequence[Set],
    *,
    axis: devices.Axis,
    batch_size: int,
    needed: Array | bool,
    loss: types.Loss,
    score: types.Loss,
) -> list[Scores]:
    """Return the scores of several sets of shards, each as `evaluate` does.

    If all clients share a model, one loop goes over the examples of all sets, in common batches, so
    that they compile in the time of one.
    """
    state, sets = tree.on_device((state, sets))
    own = [here(each, axis, needed) for each in sets]
    if algorithm.personal:
        batch_size = min(batch_size, _PERSONAL_BATCH)
        sums = [
            _by_client(algorithm, state, each._replace(shards=mine), axis, batch_size, score, loss)
            for each, mine in zip(sets, own, strict=True)
        ]
    else:
        sums = axis.total(_by_example(algorithm, state.server, own, batch_size, score, loss))
    scores = []
    for each, totals in zip(sets, sums, strict=True):
        scores.append(scores_of(score, *totals, each.shards.size))
    return scores


def scores_of(score: types.Loss, score_total: Array, loss_total: Array, size: Array) -> Scores:
    """Return the scores of C shards of sizes [C] from their sums, as `measured` returns them."""
    counted = Sums(score_total, score.finish) if isinstance(score, objectives.Counts) else None
    score_mean = counted.score if counted else score_total / jnp.maximum(size, 1)
    loss_mean = loss_total / jnp.maximum(size, 1)
    return Scores(score_mean, loss_mean, size.astype(jnp.int32), counted)


def measured(
    score: types.Loss, loss: types.Loss, outputs: Array, batch: types.Batch
) -> tuple[Array, Array]:
    """Return the sums of the score and of the loss over a batch; of `Counts`, its sums."""
    arguments, count = (outputs, batch.y, batch.mask), batch.mask.sum()
    if isinstance(score, objectives.Counts):
        return score.add(*arguments, batch.domain), loss(*arguments) * count
    return score(*arguments) * count, loss(*arguments) * count


def here(each: Set, axis: devices.Axis, needed: Array | bool) -> types.Federation:
    """Return the part of shards that this device evaluates; of others it has no example."""
    _, _, start, size = each.shards
    if not each.shared:
        size = jnp.where(axis.is_mine(len(size)), size, 0)
    elif axis.name is not None:
        begin, size = devices.part(size, axis.device, axis.num_devices)
        if axis.replicated:  # else the device has this part alone
            start = start + begin
    return each.shards._replace(start=start, size=jnp.where(needed, size, 0))


def _by_example(
    algorithm: types.Algorithm,
    server: Tree,
    sets: Sequence[types.Federation],
    batch_size: int,
    score: types.Loss,
    loss: types.Loss,
) -> list[tuple[Array, Array]]:
    """Return the sums of the scores and of the losses of each shard, for a model that all share.

    The examples of all shards of all sets are numbered one shard after the other. A batch has
    consecutive examples. The sums of a score of counts are [C, n].
    """
    order = jnp.concatenate([each.order for each in sets])
    begins = np.cumsum([0, *(len(each.order) for each in sets)])
    start = jnp.concatenate([each.start + int(at) for each, at in zip(sets, begins, strict=False)])
    size = jnp.concatenate([each.size for each in sets])
    end = jnp.cumsum(size)
    move = start - (end - size)  # from an example's number to its place in `order`

    def alone(one: Tree) -> tuple[Array, Array]:
        outputs, y, mask, domain = jax.tree.map(lambda leaf: leaf[None], one)
        if isinstance(score, objectives.Counts):
            return score.add(outputs, y, mask, domain), loss(outputs, y, mask)
        return score(outputs, y, mask), loss(outputs, y, mask)

    def of_batch(batch: Array) -> tuple[Array, tuple[Array, Array]]:
        """Return the shard of each example of a batch [B], and its score and its loss."""
        index = batch * batch_size + jnp.arange(batch_size, dtype=jnp.int32)
        real = index < end[-1]
        index = jnp.where(real, index, index[0])
        who = jnp.searchsorted(end, index, side="right", method="scan_unrolled")
        examples = tree.take(sets[0].data, order[move[who] + index])
        outputs = algorithm.predict(server, (), examples.x)
        return who, jax.vmap(alone)((outputs, examples.y, real, examples.domain))

    def add_batch(batch: Array, sums: tuple[Array, Array]) -> tuple[Array, Array]:
        who, values = of_batch(batch)
        return jax.tree.map(lambda total, value: _scattered(total, who, value), sums, values)

    shape: tuple[int, ...] = ()
    if isinstance(score, objectives.Counts):
        shape = jax.eval_shape(of_batch, jnp.int32(0))[1][0].shape[1:]
    zeros = jnp.zeros((len(size), *shape)), jnp.zeros(len(size))
    sums = jax.lax.fori_loop(0, -(-end[-1] // batch_size), add_batch, zeros)
    last = np.cumsum([len(each.size) for each in sets])[:-1]
    return list(zip(*(jnp.split(total, last) for total in sums), strict=True))


def _scattered(totals: Array, who: Array, values: Array) -> Array:
    """Add values [B, ...] to the entries `who` [B] of `totals` [C, ...]."""
    # One entry more: XLA's CPU compiler gets some scatters to a single entry wrong under vmap.
    of_batch = (
        jnp.zeros((len(totals) + 1, *totals.shape[1:]), totals.dtype).at[who].add(values)[:-1]
    )
    # The batch's sum first, or each small number would lose its last digits in a large total; the
    # barrier keeps XLA from adding the numbers one by one again.
    return totals + jax.lax.optimization_barrier(of_batch)


def _by_client(
    algorithm: types.Algorithm,
    state: State,
    each: Set,
    axis: devices.Axis,
    batch_size: int,
    score: types.Loss,
    loss: types.Loss,
) -> tuple[Array, Array]:
    """Return the sums of the scores and of the losses of each client, which has its own model.

    `each` has the shards with the examples that this device evaluates.
    """
    data, order, start, size = each.shards

    def client(turn: tuple[Array, Array]) -> tuple[Tree, tuple[Array, Array]]:
        who, local_index = turn
        if each.seen:
            own = tree.take(state.clients, local_index)
        else:
            own = algorithm.init_client(state.server, who)

        def sums(batch: types.Batch) -> tuple[Array, Array]:
            outputs = algorithm.predict(state.server, own, batch.x)
            return measured(score, loss, outputs, batch)

        shard = types.Shard(data, order, start[who], size[who], who)
        return (), local.fold(shard, sums, batch_size=batch_size)

    everyone = jnp.arange(len(size), dtype=jnp.int32)
    alone = axis._replace(name=None) if each.shared else axis  # it has a part of each shard
    mine = alone.assign(everyone, everyone, jnp.ones(len(size), bool), len(size))
    turns = mine.slots, mine.local_index
    _, sums = alone.fold(client, lambda nothing, uploads, slots: nothing, (), turns)
    return axis.total(sums) if each.shared else mine.gather(sums)


def mean(scores: Scores) -> tuple[Array, Array]:
    """Return (score, loss), each [], over all examples: clients weighted by size, or their sums.

    Of several runs, scores [R, C], it returns one of each run, [R].
    """
    weights = scores.size / jnp.maximum(scores.size.sum(-1, keepdims=True), 1)
    loss = (scores.loss * weights).sum(-1)
    return (scores.score * weights).sum(-1) if scores.sums is None else scores.sums.pooled, loss


def balanced(scores: Scores) -> Array:
    """Return the unweighted mean score [] over clients that have examples; 0 if none has.

    Of several runs, scores [R, C], it returns one of each run, [R].

    If each "client" is a class (`data.federation.by_class`) and the score is accuracy, this is the
    class-balanced accuracy, the mean of the classes' recalls.
    """
    counts = scores.size > 0
    return jnp.where(counts, scores.score, 0).sum(-1) / jnp.maximum(counts.sum(-1), 1)


def of_clients_and_others(own: Scores, others: Scores, *, equally: bool) -> Scores:
    """Return the scores of a test, each [R, 1], from those of clients' own examples and of others.

    The scores `own` are [R, C], `others` [R, 1]. All examples count alike, or with `equally` all
    clients (and the others, if there are any). A score of sums is that of all examples together.
    """
    both = jax.tree.map(lambda *leaves: jnp.concatenate(leaves, 1), own, others)
    counted = both._replace(size=(both.size > 0).astype(jnp.int32)) if equally else both
    found = by_group(counted, jnp.zeros(both.size.shape[1], jnp.int32), 1)
    return found._replace(size=both.size.sum(1, keepdims=True))


def by_group(scores: Scores, group: Array, num_groups: int) -> Scores:
    """Return the scores of groups of clients (domains), clients weighted by size, or their sums.

    The scores of clients are each [C], or [R, C] of several runs; those of G groups [G] or [R, G],
    0 for a group without examples. `group` [C] int32 is that of each client; one with a negative
    group is left out.
    """
    # Not segment_sum: XLA's CPU compiler gets some of its vmapped scatters wrong (BUILD_NOTES.md).
    member = group == jnp.arange(num_groups)[:, None]  # [G, C]
    size = (member * scores.size[..., None, :]).sum(-1)

    def pooled(values: Array) -> Array:
        # `where`, not a product: an infinite loss stays in its own group.
        weighted = (scores.size * values)[..., None, :]
        return jnp.where(member, weighted, 0).sum(-1) / jnp.maximum(size, 1)

    if scores.sums is None:
        return Scores(pooled(scores.score), pooled(scores.loss), size)
    values = jnp.where(member[..., None], scores.sums.values[..., None, :, :], 0).sum(-2)
    sums = dataclasses.replace(scores.sums, values=values)
    return Scores(sums.score, pooled(scores.loss), size, sums)
