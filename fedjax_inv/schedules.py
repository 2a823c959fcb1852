"""Participation as data: which clients attend each round, and how stale their broadcast is.

A schedule is a `Cohort` with leading T. It describes the world: sampling, dropout and delay. An
algorithm decides by `attends` of its exchanges. Draws are keyed by (round, client), so a longer
schedule starts with the shorter one, and the order of slots does not matter. Functions that get the
same key draw the same numbers, so give each a key of its own. Values "one per client" are in the
order of the clients' numbers.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_inv import checks, keys, permutation, types
from fedjax_inv.checks import UsageError
from fedjax_inv.types import Array, Tree


def check(schedule: types.Cohort, num_clients: int, history: int) -> None:
    """Check that a schedule [T, S] on the host fits a run: a client may be present once in a round.

    The run has C clients and keeps H broadcasts, `history`; a delay is in 0..H - 1.
    """
    who, present, delay = map(np.asarray, schedule)
    if who.ndim != 2 or not who.size or not who.shape == present.shape == delay.shape:
        shapes = f"who {who.shape}, present {present.shape} and delay {delay.shape}"
        raise UsageError("schedule", ..., f"{shapes}: must all be [T, S]")
    if who.dtype.kind not in "iu" or present.dtype != bool or delay.dtype.kind not in "iu":
        raise UsageError("schedule", ..., "must hold integers, present True or False")
    if not present.any():
        raise UsageError("schedule", ..., "lets no update arrive in any round")
    for outside in np.argwhere(present & ((who < 0) | (who >= num_clients)))[:1]:
        found = f"round {outside[0]} names client {who[tuple(outside)]}"
        raise UsageError("schedule", ..., f"{found}: must be in 0..{num_clients - 1}")
    # Absent slots name no client: each gets a negative number of its own.
    named = np.sort(np.where(present, who, -1 - np.arange(who.shape[1])), axis=1)
    for twice in np.flatnonzero((np.diff(named, axis=1) == 0).any(1))[:1]:
        raise UsageError("schedule", ..., f"round {twice} names a client twice: must be once")
    for late in delay[present & ((delay < 0) | (delay >= history))][:1]:
        raise UsageError("schedule", ..., f"a delay of {late}: must be in 0..{history - 1}")


def everyone(num_clients: int, num_rounds: int) -> types.Cohort:
    """Return a schedule [T, C] in which all C clients attend each of T rounds."""
    return _schedule(jnp.tile(jnp.arange(num_clients), (num_rounds, 1)))


def sampled(key: Array, num_clients: int, cohort: int, num_rounds: int) -> types.Cohort:
    """Return a schedule [T, S] of clients drawn uniformly without replacement in each round.

    `cohort` is S, how many of the C clients attend a round, in 1..C.
    """
    checks.integer("cohort", cohort, 1, num_clients, ", the clients")

    def draw(round_index: Array) -> Array:
        # The first S of a permutation of all clients; the rest is not computed.
        drawn = permutation.draw(jax.random.fold_in(key, round_index))
        return permutation.at(drawn, jnp.arange(cohort, dtype=jnp.int32), jnp.int32(num_clients))

    return _schedule(jax.vmap(draw)(jnp.arange(num_rounds)))


class Poisson(NamedTuple):
    """(random key, C clients, T rounds) -> a schedule [T, C], as `poisson` makes it."""

    rate: float
    has_empty_slots: bool = True  # `fit` keeps as many slots as its largest cohort needs

    def __call__(self, key: Array, num_clients: int, num_rounds: int) -> types.Cohort:
        """Draw who attends."""
        return dropout(everyone(num_clients, num_rounds), key, 1 - self.rate)


def poisson(rate: float) -> Poisson:
    """Return (random key, C clients, T rounds) -> a schedule [T, C], for `fit`.

    Each client attends each round with probability `rate`, in (0, 1], independently of all others,
    as `private.epsilon` supposes.
    """
    checks.positive("rate", rate)
    checks.real("rate", rate, 0, 1)
    return Poisson(rate)


def without_empty_slots(schedule: types.Cohort) -> types.Cohort:
    """Return schedules [..., T, S] on the host with as many slots as the largest cohort needs.

    In each round the slots of present clients come first, in their order.
    """
    present = np.asarray(schedule.present)
    largest = max(1, present.sum(-1).max())
    first = np.argsort(~present, axis=-1, kind="stable")[..., :largest]
    return jax.tree.map(lambda leaf: np.take_along_axis(leaf, first, -1), schedule)


def _schedule(who: Array) -> types.Cohort:
    return types.Cohort(
        who.astype(jnp.int32), jnp.ones(who.shape, bool), jnp.zeros(who.shape, jnp.int32)
    )


def cohort_size(num_clients: int, rate: float) -> int:
    """Return how many of C clients a sampling rate in (0, 1] selects: rate * C, rounded."""
    checks.real("rate", rate, 0, 1)
    cohort = round(rate * num_clients)
    if cohort < 1:
        raise UsageError("rate", rate, f"selects none of {num_clients} clients, must be higher")
    return cohort


def upload_probabilities(key: Array, num_clients: int, *, sparse: float, frequency: float) -> Array:
    """Return the probability with which an upload of each client arrives, [C].

    It is `frequency`, in (0, 1], for the part `sparse` of the clients, rounded to whole clients and
    drawn uniformly by the key, and 1 for the others.
    """
    is_sparse = jax.random.permutation(key, num_clients) < round(sparse * num_clients)
    return jnp.where(is_sparse, float(frequency), 1.0)


def dropout(schedule: types.Cohort, key: Array, probability: float | Array) -> types.Cohort:
    """Return a schedule from which each client of each round is dropped with a probability.

    The probability of being absent is a scalar or one per client [C]. If uploads arrive with
    probability p, it is 1 - p.
    """
    failed = _failed(schedule, key, probability)
    return schedule._replace(present=schedule.present & ~failed)


def stale(
    schedule: types.Cohort,
    key: Array,
    probability: float | Array,
    num_clients: int,
    *,
    longest: int,
) -> types.Cohort:
    """Return a schedule in which clients that `dropout` would drop deliver their update later.

    A client begins an update in its first scheduled round after its last delivery, on the broadcast
    of that round. It delivers the update in the first of its scheduled rounds in which it does not
    fail. If the update is more than `longest` rounds old by then, at least 1, the client discards
    it and begins a new one. Delays of the schedule are overwritten. The run must keep 1 + longest
    broadcasts. With the same key, the clients fail that `dropout` drops; the probability is a
    scalar or one per client [C].
    """
    nothing = -1

    def turn(begun: Array, now: tuple[Array, Array, Array, Array]) -> tuple[Array, Tree]:
        """Play a round. begun: [C] the round in which each client began its current update."""
        round_index, who, present, fails = now
        since = begun[who]
        begins = (since == nothing) | (round_index - since > longest)
        since = jnp.where(begins, round_index, since)
        delivers = present & ~fails
        index = jnp.where(present, who, num_clients)
        begun = begun.at[index].set(jnp.where(delivers, nothing, since), mode="drop")
        return begun, (delivers, round_index - since)

    rounds = jnp.arange(schedule.who.shape[0], dtype=jnp.int32)
    fails = _failed(schedule, key, probability)
    start = jnp.full(num_clients, nothing, jnp.int32)
    _, (delivers, delay) = jax.lax.scan(
        turn, start, (rounds, schedule.who, schedule.present, fails)
    )
    return types.Cohort(schedule.who, delivers, delay)


def _failed(schedule: types.Cohort, key: Array, probability: float | Array) -> Array:
    """Draw whether each client of each round fails, [T, S] bool."""
    of_slots = _of_slots(schedule, jnp.asarray(probability))

    def fails(round_index: Array, who: Array, probability: Array) -> Array:
        draw_key = jax.random.fold_in(jax.random.fold_in(key, round_index), who)
        return jax.random.uniform(draw_key) < probability

    rounds = jnp.arange(schedule.who.shape[0])
    return jax.vmap(jax.vmap(fails, (None, 0, 0)))(rounds, schedule.who, of_slots)


def delayed(schedule: types.Cohort, delay: int | Array) -> types.Cohort:
    """Return a schedule in which clients work on the broadcast of some rounds ago.

    The delay in rounds is a scalar or one per client [C]. In the first rounds clients work on the
    first broadcast. The run must keep 1 + max(delay) broadcasts (`rounds.init(history=...)`).
    """
    return schedule._replace(delay=_of_slots(schedule, jnp.asarray(delay, jnp.int32)))


def every(schedule: types.Cohort, period: int | Array) -> types.Cohort:
    """Return a schedule in which client c attends only the rounds t with t mod period[c] = 0.

    The period is a scalar or one per client [C].
    """
    rounds = jnp.arange(schedule.who.shape[0])[:, None]
    due = rounds % _of_slots(schedule, jnp.asarray(period, jnp.int32)) == 0
    return schedule._replace(present=schedule.present & due)


def slow(schedule: types.Cohort, rounds_per_update: int | Array) -> types.Cohort:
    """Return a schedule in which clients need m rounds for an update.

    m is a scalar or one per client [C]; 1 for a regular client. A client starts an update in round
    s, on its broadcast w_s, and delivers it in round s + m - 1, whose result is w_{s + m}: so the
    update that leads to w_t was computed from w_{t - m}. In round 0 all clients attend without
    delay; later a client attends every m-th round. The run must keep max(m) broadcasts.
    """
    return delayed(every(schedule, rounds_per_update), jnp.asarray(rounds_per_update) - 1)


def _of_slots(schedule: types.Cohort, values: Array) -> Array:
    """Return a scalar, or values by client [C], by slot [T, S]."""
    who = schedule.who
    return values[who] if values.ndim else jnp.broadcast_to(values, who.shape)


def first_all(schedule: types.Cohort, num_clients: int) -> types.Cohort:
    """Return a schedule in which each client attends once at the beginning, without delay.

    The first ceil(C / S) rounds are replaced: all clients attend round 0 if there are C slots or
    more. Apply it last, after functions that make clients absent.
    """
    slots = schedule.who.shape[1]
    needed = -(-num_clients // slots)
    who = jnp.arange(needed * slots, dtype=jnp.int32).reshape(needed, slots)
    first = types.Cohort(who, who < num_clients, jnp.zeros_like(who))
    return jax.tree.map(lambda leaf, new: leaf.at[:needed].set(new), schedule, first)


_dropout, _slow = dropout, slow  # `attending` has arguments of these names


def attending(
    cohort: int | None = None, dropout: float | Sequence[float] = 0.0, slow: int | Sequence[int] = 1
) -> Callable[[Array, int, int], types.Cohort]:
    """Return (random key, number of clients, number of rounds) -> the schedule, for `fit`.

    Args:
      cohort: how many clients are drawn in each round; None: all attend.
      dropout: the probability that a client's update does not arrive, one for all or one per
        client [C].
      slow: how many rounds a client needs for an update (`slow`), one for all or one per client
        [C].

    Its result raises UsageError for an argument that is out of range, or not of C clients.
    """

    def draw(key: Array, num_clients: int, num_rounds: int) -> types.Cohort:
        ranges = (("dropout", dropout, 0, 1, "iuf"), ("slow", slow, 1, 2**31 - 1, "iu"))
        for name, values, least, most, kinds in ranges:
            found = np.asarray(values)
            is_right = found.dtype.kind in kinds and ((found >= least) & (found <= most)).all()
            if found.shape not in ((), (num_clients,)) or not is_right:
                what = "numbers" if "f" in kinds else "integers"
                text = f"must be {what} from {least} to {most}, for all or for each of "
                raise UsageError(name, values, f"{text}{num_clients} clients")
        if cohort in (None, num_clients):
            drawn = everyone(num_clients, num_rounds)
        else:
            drawn = sampled(key, num_clients, cohort, num_rounds)
        if np.any(np.asarray(slow) > 1):
            drawn = _slow(drawn, jnp.asarray(slow))
        if np.any(dropout):
            drawn = _dropout(drawn, keys.stream(key, "dropout"), jnp.asarray(dropout))
        return drawn

    return draw


def buffered(
    buffer: int,
    concurrency: int | None = None,
    seconds: float | Sequence[float] | np.ndarray = 1.0,
    *,
    longest: int | None = None,
) -> Callable[[Array, int, int], types.Cohort]:
    """Return (random key, C clients, T rounds) -> the schedule [T, buffer] of FedBuff, for `fit`.

    Nguyen et al. 2022, "Federated Learning with Buffered Asynchronous Aggregation" (arXiv
    2106.06639). Clients train at the same time, each as long as it needs. The server updates its
    network when `buffer` updates have arrived: a round is what leads from one version to the next,
    and a delay is the age of an update, in versions. Whoever has delivered is replaced by a client
    that is drawn among the idle ones and starts from the newest version. A client is in a buffer
    once: it rests until the next version. Of updates that arrive together the order is drawn, and
    clients are replaced when all of them have arrived or filled the buffer.

    With clients that are equally fast, and as many at a time as the buffer holds, it is `sampled`.
    `aggregators.by_age` is FedBuff's weight. The run keeps 1 + `longest` broadcasts.

    Args:
      buffer: the updates of a round, in 1..C.
      concurrency: how many clients train at a time, in 1..C; None: all.
      seconds: the time that a client needs for an update, one for all or one per client [C].
      longest: the largest delay; a client that is older at a new version gives up, and never
        delivers if it always is. None: `oldest`, so that nobody gives up.
    """

    def draw(key: Array, num_clients: int, num_rounds: int) -> types.Cohort:
        at_once = num_clients if concurrency is None else concurrency
        for name, number in (("buffer", buffer), ("concurrency", at_once)):
            checks.integer(name, number, 1, num_clients, ", the clients")
        needs = np.asarray(seconds, np.float32)
        if needs.shape not in ((), (num_clients,)) or not ((needs > 0) & np.isfinite(needs)).all():
            text = f"must be finite and above 0, for all or for each of {num_clients} clients"
            raise UsageError("seconds", seconds, text)
        if longest is not None:
            checks.integer("longest", longest, 0)
        most = min(oldest(buffer, at_once, needs) if longest is None else longest, num_rounds)
        return _buffered(key, num_rounds, buffer, at_once, jnp.full(num_clients, needs), most)

    return draw


def oldest(buffer: int, concurrency: int, seconds: np.ndarray) -> int:
    """Return a bound of the delays of `buffered`, from seconds [C] or []: what others deliver."""
    turns = int(seconds.max() // seconds.min()) + 1  # of one place while the slowest client trains
    return ((concurrency - 1) * turns + buffer - 1) // buffer


class _Queue(NamedTuple):
    """The clients that train."""

    left: Array  # [C] seconds until the client delivers; infinity if it is idle
    begun: Array  # [C] int32, the version that it started from


def _buffered(
    key: Array, num_rounds: int, buffer: int, at_once: int, seconds: Array, longest: int
) -> types.Cohort:
    num_clients = len(seconds)
    everybody = jnp.arange(len(seconds), dtype=jnp.int32)

    def version(queue: _Queue, now: Array) -> tuple[_Queue, tuple[Array, Array]]:
        drawn = permutation.draw(jax.random.fold_in(key, now))
        order = permutation.at(drawn, everybody, jnp.int32(num_clients))
        rank = jnp.zeros_like(order).at[order].set(everybody)  # of each client in this version

        def filled(queue: _Queue, rests: Array) -> _Queue:
            """Start idle clients that do not rest [C], by rank, until `at_once` train."""
            idle = (jnp.isinf(queue.left) & ~rests)[order]
            number = at_once - jnp.isfinite(queue.left).sum()
            starts = (idle & (jnp.cumsum(idle) <= number))[rank]
            return _Queue(
                jnp.where(starts, seconds, queue.left), jnp.where(starts, now, queue.begun)
            )

        def arrival(state: tuple[_Queue, Array], place: Array) -> tuple[Tree, tuple[Array, Array]]:
            (left, begun), rests = state
            first = left.min()
            who = jnp.argmin(jnp.where(left == first, rank, num_clients)).astype(jnp.int32)
            queue = _Queue((left - first).at[who].set(jnp.inf), begun)
            rests = rests.at[who].set(True)
            # Others may arrive now, too; and after the last place a new version begins.
            is_between = (queue.left.min() > 0) & (place < buffer - 1)
            queue = optax.tree.where(is_between, filled(queue, rests), queue)
            return (queue, rests), (who, now - begun[who])

        nobody = jnp.full(num_clients, False)
        left = jnp.where(now - queue.begun > longest, jnp.inf, queue.left)
        queue = filled(queue._replace(left=left), nobody)
        (queue, _), arrived = jax.lax.scan(arrival, (queue, nobody), jnp.arange(buffer))
        return queue, arrived

    idle = _Queue(jnp.full(num_clients, jnp.inf), jnp.zeros(num_clients, jnp.int32))
    _, (who, delay) = jax.lax.scan(version, idle, jnp.arange(num_rounds, dtype=jnp.int32))
    return types.Cohort(who, jnp.ones(who.shape, bool), delay)
