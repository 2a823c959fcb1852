"""Scores and losses of each client, also of clients never seen, and their means by group."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_inv import checks, devices, local, objectives, rounds, tree
from fedjax_inv.checks import UsageError
from fedjax_inv.rounds import State
from fedjax_inv.types import (
    Algorithm,
    Array,
    Batch,
    Examples,
    Federation,
    Loss,
    Shard,
    Tree,
)

_PERSONAL_BATCH = 128  # the largest batch of a personal model, which predicts for one client


class Scores(NamedTuple):
    """The score and the loss of each client of a federation."""

    score: Array  # [C] mean score, by default accuracy in 0..1; 0 for a client without examples
    loss: Array  # [C] mean loss, by default cross-entropy in nats
    size: Array  # [C] int32, examples


def evaluate(
    algorithm: Algorithm,
    state: State,
    federation: Federation,
    *,
    axis: devices.Axis | None = None,
    seen: bool = True,
    batch_size: int = 512,
    needed: Array | bool = True,
    loss: Loss = objectives.cross_entropy,
    score: Loss = objectives.accuracy,
) -> Scores:
    """Return every client's mean score and loss on its own examples.

    If all clients share a model, it predicts the examples of all clients in common batches, one
    batch after the other. A personal algorithm predicts each client's examples with its own state.

    Args:
      algorithm: the algorithm of the run.
      state: the state to evaluate.
      federation: the clients and the examples to predict.
      axis: how the work is laid over memory and devices, as in `rounds.step`; by default one client
        after the other.
      seen: whether the federation's clients are those of the run, in the same order. Otherwise each
        is a client never seen, with the state that `init_client` gives.
      batch_size: B; a personal algorithm's batches have at most 128 examples.
      needed: [] bool; if false, nothing is predicted and the scores mean nothing.
      loss: the mean loss of a batch of outputs.
      score: the mean score of a batch of outputs.

    Returns:
      The scores, each [C]; of a compact federation [c].

    Raises:
      UsageError: if batch_size is below 1, if a client's rows are not rows of the examples, if the
        algorithm is personal and the federation has not as many clients as the state although they
        are seen, and for arguments of other types.
    """
    checks.record("algorithm", algorithm, Algorithm)
    checks.record("state", state, State)
    checks.integer("batch_size", batch_size)
    checks.federation(federation)
    checks.boolean("seen", seen)
    checks.function("loss", loss)
    checks.function("score", score)
    axis = devices.chunked(1) if axis is None else axis
    checks.record("axis", axis, devices.Axis)
    if algorithm.personal and seen:
        rounds.check_num_clients(state, federation, axis)
    (scores,) = evaluate_each(
        algorithm,
        state,
        [(federation, seen)],
        axis=axis,
        batch_size=batch_size,
        needed=needed,
        loss=loss,
        score=score,
    )
    return scores


def evaluate_each(
    algorithm: Algorithm,
    state: State,
    federations: Sequence[tuple[Federation, bool]],
    *,
    axis: devices.Axis,
    batch_size: int,
    needed: Array | bool,
    loss: Loss,
    score: Loss,
) -> list[Scores]:
    """Return the scores of several federations of the same examples, each as `evaluate` does.

    If all clients share a model, one loop goes over the batches of all federations, so that they
    compile in the time of one.

    Args:
      algorithm: the algorithm of the run.
      state: the state to evaluate.
      federations: each with whether its clients are those of the run (`seen` of `evaluate`).
      axis: how the work is laid over memory and devices.
      batch_size: B, as in `evaluate`.
      needed: [] bool, as in `evaluate`.
      loss: the mean loss of a batch of outputs.
      score: the mean score of a batch of outputs.
    """
    state, federations = tree.on_device((state, federations))
    if algorithm.personal:
        sums_of = _of_client(algorithm, state.server, batch_size, score, loss)
        return [
            _personal(algorithm, state, federation, seen, sums_of, axis, needed)
            for federation, seen in federations
        ]
    shards = [_numbered(federation)[1] for federation, _ in federations]
    sizes = [each.size for each in shards]
    plan = _together([_plan(jnp.where(needed, size, 0), axis, batch_size) for size in sizes])
    order = jnp.concatenate([each.order for each in shards])
    ends = np.cumsum([len(each.order) for each in shards])
    begins = [0, *ends[:-1].tolist()]
    start = jnp.concatenate([each.start + at for each, at in zip(shards, begins, strict=True)])

    def rows(who: Array, number: Array) -> Array:
        return order[start[who] + number - plan.first[who]]

    each = _of_examples(algorithm, state.server, score, loss)
    zeros = jnp.zeros(len(start)), jnp.zeros(len(start))
    everything = 0, plan.batch_end[-1]
    sums = _add(zeros, shards[0].data, rows, each, plan, everything)
    sums = axis.selected(sums, plan.is_mine)
    last = np.cumsum([len(size) for size in sizes])[:-1]
    apart = zip(*(jnp.split(total, last) for total in sums), strict=True)
    return [_means(axis, of_one, size) for of_one, size in zip(apart, sizes, strict=True)]


def _personal(
    algorithm: Algorithm,
    state: State,
    federation: Federation,
    seen: bool,
    sums_of: Callable[[Shard, Tree], tuple[Array, Array]],
    axis: devices.Axis,
    needed: Array | bool,
) -> Scores:
    """Return the scores of clients of which each has its own model.

    sums_of: as `_of_client` returns it. The other arguments: as in `evaluate`.
    """
    numbers, federation = _numbered(federation)
    size = federation.size
    data, order, start, size_needed, _ = federation._replace(size=jnp.where(needed, size, 0))

    def client(at: Array, local_index: Array) -> tuple[Array, Array]:
        """Return the sums of a client's scores and losses; its state lies at `local_index`."""
        who = at if numbers is None else numbers[at]
        if seen:
            own = tree.take(state.clients, local_index)
        else:
            own = algorithm.init_client(state.server, who)
        return sums_of(Shard(data, order, start[at], size_needed[at], who), own)

    return _means(axis, _by_client(federation, client, axis), size)


def _means(axis: devices.Axis, sums: tuple[Array, Array], size: Array) -> Scores:
    def means(sums: tuple[Array, Array], size: Array) -> Scores:
        score_mean, loss_mean = (total / jnp.maximum(size, 1) for total in sums)
        return Scores(score_mean, loss_mean, size.astype(jnp.int32))

    return axis.isolated(means, sums, size)


def _numbered(federation: Federation) -> tuple[Array | None, Federation]:
    """Return the numbers of a compact federation's clients, and a federation of them alone."""
    data, order, start, size, who = federation
    if who is None:
        return None, federation
    sizes = jnp.where(who < len(size), size[jnp.minimum(who, len(size) - 1)], 0)
    return who, Federation(data, order, start, sizes)


def _of_examples(
    algorithm: Algorithm, server: Tree, score: Loss, loss: Loss
) -> Callable[[Batch], tuple[Array, Array]]:
    """Return (batch -> the score and the loss of each example [B]) for a model that all share."""

    def each(batch: Batch) -> tuple[Array, Array]:
        outputs = algorithm.predict(server, (), batch.x)

        def alone(one: Tree) -> tuple[Array, Array]:
            arguments = jax.tree.map(lambda leaf: leaf[None], one)
            return score(*arguments), loss(*arguments)

        return jax.vmap(alone)((outputs, batch.y, batch.mask))

    return each


def _of_client(
    algorithm: Algorithm, server: Tree, batch_size: int, score: Loss, loss: Loss
) -> Callable[[Shard, Tree], tuple[Array, Array]]:
    """Return (a client's shard and state -> the sums of its scores and losses)."""

    def sums_of(shard: Shard, own: Tree) -> tuple[Array, Array]:
        def sums(batch: Batch) -> tuple[Array, Array]:
            outputs = algorithm.predict(server, own, batch.x)
            arguments, count = (outputs, batch.y, batch.mask), batch.mask.sum()
            return score(*arguments) * count, loss(*arguments) * count

        return local.fold(shard, sums, batch_size=min(batch_size, _PERSONAL_BATCH))

    return sums_of


def _by_client(
    federation: Federation, sums_of: Callable[[Array, Array], Tree], axis: devices.Axis
) -> Tree:
    """Return sums_of(client, index of its state on the device) of all clients, each [C]."""

    def client(turn: tuple[Array, Array]) -> tuple[Tree, Tree]:
        return (), sums_of(*turn)

    def nothing(sums: devices.Sums, uploads: Tree, slots: Tree) -> devices.Sums:
        del uploads, slots
        return sums

    number = federation.num_clients
    everyone = jnp.arange(number, dtype=jnp.int32)
    mine = axis.assign(everyone, everyone, jnp.ones(number, bool), number)
    turns = mine.slots, mine.local_index
    return mine.gather(axis.fold(client, nothing, devices.Sums(()), mine, turns)[1])


class _Plan(NamedTuple):
    """The common batches of a device.

    The examples of its clients are numbered one client after the other. A batch has consecutive
    examples of one lane of clients, and a device takes all batches of its lanes.
    """

    is_mine: Array  # [C] bool, the clients of this device
    first: Array  # [C] the number of each client's first example
    end: Array  # [C]
    lane_first: Array  # [lanes] likewise of each lane
    lane_end: Array
    num_batches: Array  # [lanes]
    batch_end: Array  # [lanes] the batches up to the end of each lane
    batch_size: int


def _is_mine(number: int, axis: devices.Axis) -> Array:
    (local, room), everyone = axis.block(number), jnp.arange(number)
    return (local <= everyone) & (everyone < local + room)


def _plan(size: Array, axis: devices.Axis, batch_size: int) -> _Plan:
    """Return the common batches of a device. size: [C], the examples of all clients."""
    number = len(size)
    is_mine = _is_mine(number, axis)
    size = jnp.where(is_mine, size, 0)
    end = jnp.cumsum(size)
    first = end - size
    in_lane = axis.lane_size(number)
    lane_end = end[in_lane - 1 :: in_lane]
    if number % in_lane:
        lane_end = jnp.concatenate([lane_end, end[-1:]])
    lane_first = jnp.concatenate([jnp.zeros_like(end[:1]), lane_end[:-1]])
    num_batches = -(-(lane_end - lane_first) // batch_size)
    batch_end = jnp.cumsum(num_batches)
    return _Plan(is_mine, first, end, lane_first, lane_end, num_batches, batch_end, batch_size)


def _together(plans: Sequence[_Plan]) -> _Plan:
    """Return the plan of the batches of all plans, one plan after the other."""
    after: Array = jnp.zeros((), jnp.int32)  # the examples of the plans before
    moved: list[_Plan] = []
    for plan in plans:
        moved.append(
            plan._replace(
                first=plan.first + after,
                end=plan.end + after,
                lane_first=plan.lane_first + after,
                lane_end=plan.lane_end + after,
            )
        )
        after = moved[-1].end[-1]
    is_mine, first, end, lane_first, lane_end, num_batches = (
        jnp.concatenate(of_plans) for of_plans in zip(*(plan[:6] for plan in moved), strict=True)
    )
    batch_end, batch_size = jnp.cumsum(num_batches), plans[0].batch_size
    return _Plan(is_mine, first, end, lane_first, lane_end, num_batches, batch_end, batch_size)


def _add(
    sums: tuple[Array, Array],
    data: Examples,
    rows: Callable[[Array, Array], Array],
    each: Callable[[Batch], tuple[Array, Array]],
    plan: _Plan,
    batches: tuple[Array | int, Array],
) -> tuple[Array, Array]:
    """Add to the sums over each client's examples of the two numbers from `each`, each [C].

    rows: (clients [B], numbers of examples [B]) -> where they lie in `data`. batches: the first of
    the plan, and the one after the last.
    """
    _, _, end, lane_first, lane_end, num_batches, batch_end, batch_size = plan

    def add_batch(batch: Array, sums: tuple[Array, Array]) -> tuple[Array, Array]:
        lane = jnp.searchsorted(batch_end, batch, side="right", method="scan_unrolled")
        before = batch - (batch_end[lane] - num_batches[lane])
        index = lane_first[lane] + before * batch_size + jnp.arange(batch_size, dtype=jnp.int32)
        real = index < lane_end[lane]
        index = jnp.where(real, index, index[0])
        who = jnp.searchsorted(end, index, side="right", method="scan_unrolled")
        examples = tree.take(data, rows(who, index))
        scores, losses = each(Batch(examples.x, examples.y, real))
        return _scattered(sums[0], who, scores), _scattered(sums[1], who, losses)

    return jax.lax.fori_loop(*batches, add_batch, sums)


def _scattered(totals: Array, who: Array, values: Array) -> Array:
    """Add values [B] to the entries `who` [B] of `totals` [C]."""
    # One entry more: XLA's CPU compiler gets some scatters to a single entry wrong under vmap.
    of_batch = jnp.zeros(len(totals) + 1, totals.dtype).at[who].add(values)[:-1]
    # The batch's sum first, or each small number would lose its last digits in a large total; the
    # barrier keeps XLA from adding the numbers one by one again.
    return totals + jax.lax.optimization_barrier(of_batch)


def mean(scores: Scores) -> tuple[Array, Array]:
    """Return (score, loss), each [], over all examples: clients weighted by size.

    Of several runs, scores [R, C], it returns one of each run, [R].
    """
    _check_scores(scores)
    weights = scores.size / jnp.maximum(scores.size.sum(-1, keepdims=True), 1)
    return (scores.score * weights).sum(-1), (scores.loss * weights).sum(-1)


def balanced(scores: Scores) -> Array:
    """Return the unweighted mean score [] over clients that have examples; 0 if none has.

    Of several runs, scores [R, C], it returns one of each run, [R].

    If each "client" is a class (`data.federation.by_class`) and the score is accuracy, this is the
    class-balanced accuracy, the mean of the classes' recalls.
    """
    _check_scores(scores)
    counts = scores.size > 0
    return jnp.where(counts, scores.score, 0).sum(-1) / jnp.maximum(counts.sum(-1), 1)


def by_group(scores: Scores, group: Array, num_groups: int) -> Scores:
    """Return the scores of groups of clients (domains), clients weighted by size.

    Args:
      scores: the scores of the clients, each [C], or [R, C] of several runs.
      group: [C] int32, the group of each client; a client with a negative one is left out.
      num_groups: G, at least 1.

    Returns:
      The scores of the groups, each [G] or [R, G]; 0 for a group without examples.

    Raises:
      UsageError: for another number of groups than of clients, for groups that are not integers,
        and for a group of G or more unless groups are traced.
    """
    _check_scores(scores)
    checks.integer("num_groups", num_groups)
    checks.memory("num_groups", num_groups, num_groups * scores.size.size)
    checks.array("group", group)
    clients = scores.size.shape[-1:]
    if group.shape != clients or not jnp.issubdtype(group.dtype, jnp.integer):
        allowed = f"must be integers of shape {clients}, one for each client"
        raise UsageError("group", group, allowed)
    if checks.is_concrete(group):
        checks.integers("group", group, None, num_groups - 1, ndim=None, may_be_empty=True)
    # Not segment_sum: XLA's CPU compiler gets some of its vmapped scatters wrong (BUILD_NOTES.md).
    member = group == jnp.arange(num_groups)[:, None]  # [G, C]
    size = (member * scores.size[..., None, :]).sum(-1)

    def pooled(values: Array) -> Array:
        # `where`, not a product: an infinite loss stays in its own group.
        weighted = (scores.size * values)[..., None, :]
        return jnp.where(member, weighted, 0).sum(-1) / jnp.maximum(size, 1)

    return Scores(pooled(scores.score), pooled(scores.loss), size)


def _check_scores(scores: Scores) -> None:
    checks.record("scores", scores, Scores)
    for name, field in zip(Scores._fields, scores, strict=True):
        checks.array(f"scores.{name}", field)
    shapes = [field.shape for field in scores]
    if len({*shapes}) > 1:
        raise UsageError("scores", ..., f"score, loss and size have shapes {shapes}, must be equal")
    if 0 in scores.size.shape:
        raise UsageError("scores", ..., "are of no client, must be of at least one")
    if checks.is_concrete(scores.size) and (np.asarray(scores.size) < 0).any():
        raise UsageError("scores.size", scores.size, "must be at least 0")
