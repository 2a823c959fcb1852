"""Participation as data: which clients attend each round, and how stale their broadcast is.

A schedule is a `Cohort` with leading T. It describes the world: sampling, dropout and delay. An
algorithm decides by `attends` of its exchanges. Draws are keyed by (round, client), so a longer
schedule starts with the shorter one, and the order of slots does not matter. Functions that get the
same key draw the same numbers, so give each a key of its own.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_inv import checks, permutation
from fedjax_inv.checks import UsageError
from fedjax_inv.types import Array, Cohort, Tree

# (round [], clients [B]) -> [B] bool, which of the clients are online in the round
Online = Callable[[Array, Array], Array]


class Reports(NamedTuple):
    """What the rounds of a schedule cost beyond the updates that count."""

    lost: Array  # [T] int32, clients that were asked, but whose update does not count
    seconds: Array  # [T] float32, the simulated length of each round


def _schedule(who: Array) -> Cohort:
    return Cohort(who.astype(jnp.int32), jnp.ones(who.shape, bool), jnp.zeros(who.shape, jnp.int32))


def _check_size(slots: int, num_rounds: int) -> None:
    each = 9  # bytes of who, present and delay
    checks.memory("num_rounds", num_rounds, each * int(slots) * int(num_rounds))


def everyone(num_clients: int, num_rounds: int) -> Cohort:
    """Return a schedule in which all clients attend every round.

    Args:
      num_clients: C, at least 1.
      num_rounds: T, at least 1.

    Returns:
      The schedule, [T, C].

    Raises:
      UsageError: if a count is below 1, and if the schedule does not fit into memory.
    """
    checks.integer("num_clients", num_clients)
    checks.integer("num_rounds", num_rounds)
    _check_size(num_clients, num_rounds)
    return _schedule(jnp.tile(jnp.arange(num_clients), (num_rounds, 1)))


def sampled(
    key: Array, num_clients: int, cohort: int, num_rounds: int, *, online: Online | None = None
) -> Cohort:
    """Return a schedule of clients drawn uniformly without replacement in each round.

    Args:
      key: a random key.
      num_clients: C, at least 1.
      cohort: S, how many clients attend a round, in 1..C.
      num_rounds: T, at least 1.
      online: which clients can be drawn in a round, such as `diurnal(...)` or `trace(...)`; by
        default all. If fewer than S are online, the other slots are empty.

    Returns:
      The schedule, [T, S].

    Raises:
      UsageError: if a count is out of its bounds, and if the schedule does not fit into memory.
    """
    checks.key("key", key)
    checks.integer("num_clients", num_clients)
    checks.integer("num_rounds", num_rounds)
    checks.integer("cohort", cohort, 1, num_clients, ", the clients")
    checks.memory("num_clients", num_clients, 4 * num_clients)
    _check_size(cohort, num_rounds)
    if online is not None:
        checks.function("online", online)

    def draw(round_index: Array) -> Array:
        # The first S of a permutation of all clients; the rest is not computed.
        drawn = permutation.draw(jax.random.fold_in(key, round_index))
        return permutation.at(drawn, jnp.arange(cohort, dtype=jnp.int32), jnp.int32(num_clients))

    rounds = jnp.arange(num_rounds)
    if online is None:
        return _schedule(jax.vmap(draw)(rounds))
    who, count = jax.lax.map(lambda t: _drawn_online(key, t, online, num_clients, cohort), rounds)
    return _schedule(who)._replace(present=jnp.arange(cohort) < count[:, None])


def _drawn_online(
    key: Array, round_index: Array, online: Online, num_clients: int, cohort: int
) -> tuple[Array, Array]:
    """Return (the first clients online of a permutation of all [S], how many there are [])."""
    drawn = permutation.draw(jax.random.fold_in(key, round_index))
    # Blocks of the permutation are computed until the cohort is full.
    block = min(num_clients, max(2 * cohort, 256))

    def is_short(now: tuple[Array, Array, Array]) -> Array:
        first, found, _ = now
        return (found < cohort) & (first < num_clients)

    def look_on(now: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        first, found, who = now
        position = first + jnp.arange(block, dtype=jnp.int32)
        clients = permutation.at(drawn, position, jnp.int32(num_clients))
        can_come = online(round_index, clients)
        kind = getattr(can_come, "dtype", None), getattr(can_come, "shape", None)
        if kind != (jnp.dtype(bool), clients.shape):
            text = f"must be one bool for each of {clients.shape[0]} clients"
            raise UsageError("the result of online", can_come, text)
        can_come &= position < num_clients
        slot = found + jnp.cumsum(can_come, dtype=jnp.int32) - 1
        who = who.at[jnp.where(can_come, slot, cohort)].set(clients, mode="drop")
        return first + block, found + can_come.sum(dtype=jnp.int32), who

    start = jnp.int32(0), jnp.int32(0), jnp.zeros(cohort, jnp.int32)
    _, found, who = jax.lax.while_loop(is_short, look_on, start)
    return who, jnp.minimum(found, cohort)


def diurnal(
    key: Array, num_clients: int, *, day: int, least: float, most: float, time_zones: float = 0.0
) -> Online:
    """Return which clients are online if that depends on the time of day.

    In round t, client c is online with probability

        p = least + (most - least) (1 - cos(2 pi (t / day - time_zones c / C))) / 2,

    namely if p is above a number that is drawn uniformly for each client and day. So a client is
    online in one stretch of its day, around noon. Bonawitz et al. 2019, "Towards Federated Learning
    at Scale", section 9, report four times as many devices at the best hour as at the worst.

    Args:
      key: a random key.
      num_clients: C, at least 1.
      day: the rounds of a day, at least 1.
      least: the part of the clients that is online at midnight, between 0 and 1.
      most: the part that is online at noon, between `least` and 1.
      time_zones: over which part of a day the clients' midnights are spread, in the order of the
        clients' numbers, between 0 and 1.

    Raises:
      UsageError: if an argument is out of its bounds.
    """
    checks.key("key", key)
    checks.integer("num_clients", num_clients)
    checks.integer("day", day)
    for name, value in (("least", least), ("most", most), ("time_zones", time_zones)):
        checks.probability(name, value)
    if least > most:
        raise UsageError("least", least, "must be at most {most}", most=("most", most))

    def online(round_index: Array, who: Array) -> Array:
        # Days are counted from 1, as the first round may lie on the day before a client's first.
        now = 1 + round_index / day - time_zones * (who / num_clients)
        share = least + (most - least) * (1 - jnp.cos(2 * jnp.pi * now)) / 2

        def drawn(date: Array, client: Array) -> Array:
            return jax.random.uniform(jax.random.fold_in(jax.random.fold_in(key, date), client))

        return jax.vmap(drawn)(jnp.floor(now).astype(jnp.int32), who) < share

    return online


def trace(recorded: Array) -> Online:
    """Return which clients are online according to a record.

    Round t is row t mod P of the record, and client c is column c mod N, so a short record repeats
    itself and a narrow one serves several clients (as in FedScale, Lai et al. 2022).

    Args:
      recorded: [P, N] bool, P rounds and N devices.

    Raises:
      UsageError: if it is not [P, N] bool with at least one element.
    """
    checks.array("recorded", recorded)
    if recorded.ndim != 2 or recorded.dtype != bool or not recorded.size:
        found = f"is {recorded.dtype} {recorded.shape}"
        raise UsageError("recorded", ..., f"{found}, must be bool [rounds, devices]")
    length, devices = recorded.shape
    recorded = jnp.asarray(recorded)
    return lambda round_index, who: recorded[round_index % length, who % devices]


def report_seconds(
    schedule: Cohort,
    key: Array,
    typical: float | Array,
    *,
    spread: float,
    round_spread: float = 0.0,
) -> Array:
    """Draw after how many seconds each client of each round reports.

    Client c reports in round t after typical[c] exp(spread a + round_spread b) seconds, where a is
    a standard normal number of the client and b one of the client and round. So times are
    log-normal, and typical[c] is their median.

    Args:
      schedule: [T, S].
      key: a random key.
      typical: the seconds of a client of median speed that has this client's work, a scalar or
        one per client [C].
      spread: the standard deviation of the logarithm between clients, at least 0.
      round_spread: the same between the rounds of a client.

    Returns:
      The seconds, [T, S] float32.

    Raises:
      UsageError: if a number is negative, or if a client of the schedule has none.
    """
    _check_schedule(schedule)
    checks.key("key", key)
    typical = _numbers("typical", typical)
    _check("typical", typical, "must be at least 0", lambda seconds: seconds >= 0)
    _check_per_client("typical", typical, schedule)
    checks.real("spread", spread)
    checks.real("round_spread", round_spread)
    of_client, of_round = jax.random.fold_in(key, 0), jax.random.fold_in(key, 1)

    def seconds(round_index: Array, who: Array) -> Array:
        own = jax.random.normal(jax.random.fold_in(of_client, who))
        now = jax.random.normal(jax.random.fold_in(jax.random.fold_in(of_round, round_index), who))
        median = typical[who] if typical.ndim else typical
        return median * jnp.exp(spread * own + round_spread * now)

    # A loop over rounds: on a CPU, vectorised exponentials of more rounds round differently.
    rounds = jnp.arange(schedule.who.shape[0])
    of_round_slots = jax.vmap(seconds, (None, 0))
    return jax.lax.map(lambda now: of_round_slots(*now), (rounds, schedule.who))


def first_reports(
    schedule: Cohort, seconds: Array, count: int, *, deadline: float | None = None
) -> tuple[Cohort, Reports]:
    """Return a schedule of the first clients that report in each round.

    All clients of a round of the given schedule are asked. The round ends with report number
    `count`, or when all that were asked have reported; at the latest at the deadline. Whoever has
    not reported by then has downloaded the message, stops, and uploads nothing. Without a
    deadline, a round with too few reports ends with the last one. This is the selection of more
    clients than are needed of Bonawitz et al. 2019, section 2.2 and 9, who ask 130%.

    Args:
      schedule: [T, N], all clients that are asked.
      seconds: [T, N], when each of them reports; infinity for one that never does.
      count: S, how many reports end a round, in 1..N.
      deadline: the most seconds of a round, above 0; None: any.

    Returns:
      (the schedule of the updates that count [T, S], the cost of its rounds).

    Raises:
      UsageError: if an argument is out of its bounds.
    """
    _check_schedule(schedule)
    checks.array("seconds", seconds)
    if seconds.shape != schedule.who.shape:
        found = f"has shape {seconds.shape}"
        raise UsageError("seconds", ..., f"{found}, must have the schedule's, {schedule.who.shape}")
    _check("seconds", seconds, "must be at least 0", lambda known: known >= 0)
    checks.integer("count", count, 1, schedule.who.shape[1], ", the slots of the schedule")
    if deadline is not None:
        checks.number("deadline", deadline, "above 0", lambda d: d > 0)
    arrives = schedule.present & jnp.isfinite(seconds)
    if deadline is not None:
        arrives &= seconds <= deadline
    at = jnp.where(arrives, seconds, jnp.inf)
    # Clients with the same time come in the order of their numbers, whatever their slots.
    place = jnp.argsort(jnp.lexsort((schedule.who, at), axis=1), axis=1)
    counts = arrives & (place < count)
    asked, counted = schedule.present.sum(1), counts.sum(1)
    length = jnp.where(counts, at, 0).max(1)
    if deadline is not None:
        length = jnp.where(counted == jnp.minimum(asked, count), length, deadline)
    cost = Reports((asked - counted).astype(jnp.int32), length.astype(jnp.float32))
    schedule = schedule._replace(present=counts)
    if count < schedule.who.shape[1]:  # else all stay in their slots, so that no sum changes
        kept = jnp.argsort(~counts, axis=1, stable=True)[:, :count]
        schedule = jax.tree.map(lambda leaf: jnp.take_along_axis(leaf, kept, axis=1), schedule)
    return schedule, cost


def cohort_size(num_clients: int, rate: float) -> int:
    """Return how many of C clients a sampling rate selects: rate * C, rounded.

    Args:
      num_clients: C, at least 1.
      rate: the part of the clients that attend a round, above 0 and at most 1.

    Raises:
      UsageError: if an argument is out of its bounds, or if the rate selects no client.
    """
    checks.integer("num_clients", num_clients)
    checks.number("rate", rate, "above 0 and at most 1", lambda rate: 0 < rate <= 1)
    cohort = round(rate * num_clients)
    if cohort < 1:
        raise UsageError(
            "rate",
            rate,
            "selects none of {num_clients}, must be higher",
            num_clients=("num_clients", num_clients),
        )
    return cohort


def upload_probabilities(key: Array, num_clients: int, *, sparse: float, frequency: float) -> Array:
    """Return the probability with which an upload of each client arrives.

    Args:
      key: a random key, which draws the sparse clients uniformly.
      num_clients: C, at least 1.
      sparse: the part of the clients that are sparse, between 0 and 1; rounded to whole clients.
      frequency: the probability of sparse clients, above 0 and at most 1; that of others is 1.

    Returns:
      The probabilities, [C].

    Raises:
      UsageError: if an argument is out of its bounds.
    """
    checks.key("key", key)
    checks.integer("num_clients", num_clients)
    checks.memory("num_clients", num_clients, 4 * int(num_clients))
    checks.probability("sparse", sparse)
    checks.number("frequency", frequency, "above 0 and at most 1", lambda f: 0 < f <= 1)
    is_sparse = jax.random.permutation(key, num_clients) < round(sparse * num_clients)
    return jnp.where(is_sparse, float(frequency), 1.0)


def dropout(schedule: Cohort, key: Array, probability: float | Array) -> Cohort:
    """Return a schedule from which each client of each round is dropped with a probability.

    Args:
      schedule: [T, S].
      key: a random key.
      probability: the probability of being absent, a scalar or one per client [C], between 0 and
        1. If uploads arrive with probability p, it is 1 - p.

    Raises:
      UsageError: if a probability is out of its bounds, or if a client of the schedule has none.
    """
    failed = _failed(schedule, key, probability)
    return schedule._replace(present=schedule.present & ~failed)


def stale(
    schedule: Cohort, key: Array, probability: float | Array, num_clients: int, *, longest: int
) -> Cohort:
    """Return a schedule in which clients that `dropout` would drop deliver their update later.

    A client begins an update in its first scheduled round after its last delivery, on the broadcast
    of that round. It delivers the update in the first of its scheduled rounds in which it does not
    fail. If the update is more than `longest` rounds old by then, the client discards it and begins
    a new one. Delays of the schedule are overwritten. The run must keep 1 + longest broadcasts.

    Args:
      schedule: [T, S].
      key: a random key. With the same key, the clients fail that `dropout` drops.
      probability: the probability of failing in a round, a scalar or one per client [C], between 0
        and 1.
      num_clients: C, at least 1.
      longest: the age in rounds of the oldest update that is delivered, at least 1.

    Raises:
      UsageError: if an argument is out of its bounds, or if the schedule has a client of
        num_clients or more, or one without a probability.
    """
    _check_schedule(schedule)
    checks.integer("num_clients", num_clients)
    checks.integer("longest", longest)
    _check_num_clients(num_clients, schedule)
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
    return Cohort(schedule.who, delivers, delay)


def _failed(schedule: Cohort, key: Array, probability: float | Array) -> Array:
    """Draw whether each client of each round fails, [T, S] bool."""
    _check_schedule(schedule)
    checks.key("key", key)
    probability = _numbers("probability", probability)
    _check("probability", probability, "must be between 0 and 1", lambda p: (p >= 0) & (p <= 1))
    _check_per_client("probability", probability, schedule)

    def fails(round_index: Array, who: Array) -> Array:
        draw = jax.random.uniform(jax.random.fold_in(jax.random.fold_in(key, round_index), who))
        return draw < (probability[who] if probability.ndim else probability)

    rounds = jnp.arange(schedule.who.shape[0])
    return jax.vmap(jax.vmap(fails, (None, 0)))(rounds, schedule.who)


def delayed(schedule: Cohort, delay: int | Array) -> Cohort:
    """Return a schedule in which clients work on the broadcast of some rounds ago.

    In the first rounds they work on the first broadcast. The run must keep 1 + max(delay)
    broadcasts (`rounds.init(history=...)`).

    Args:
      schedule: [T, S].
      delay: the delay in rounds, a scalar or one per client [C], integers of at least 0.

    Raises:
      UsageError: if a delay is negative or no integer, or if a client of the schedule has none.
    """
    _check_schedule(schedule)
    delay = _integers("delay", delay)
    _check("delay", delay, "must be at least 0", lambda d: d >= 0)
    _check_per_client("delay", delay, schedule)
    per_slot = delay[schedule.who] if delay.ndim else jnp.full(schedule.who.shape, delay)
    return schedule._replace(delay=per_slot)


def randomly_delayed(
    schedule: Cohort, key: Array, probability: float | Array, *, longest: int
) -> Cohort:
    """Return a schedule with delays drawn for each client of each round.

    A delay is d rounds with probability p (1 - p)^d; delays above `longest` become `longest`. The
    run must keep 1 + longest broadcasts.

    Args:
      schedule: [T, S].
      key: a random key.
      probability: p, a scalar or one per client [C], above 0 and at most 1; the mean of d is
        1 / p - 1.
      longest: the longest delay in rounds, at least 1.

    Raises:
      UsageError: if probability or longest is out of its bounds, or if a client of the schedule
        has no probability.
    """
    _check_schedule(schedule)
    checks.key("key", key)
    checks.integer("longest", longest)
    probability = _numbers("probability", probability)
    bounds = "must be above 0 and at most 1"
    _check("probability", probability, bounds, lambda p: (p > 0) & (p <= 1))
    _check_per_client("probability", probability, schedule)

    def draw(round_index: Array, who: Array) -> Array:
        of_client = jax.random.fold_in(jax.random.fold_in(key, round_index), who)
        success = probability[who] if probability.ndim else probability
        trials = jax.random.geometric(of_client, success, dtype=jnp.int32)
        return jnp.minimum(trials - 1, longest)

    rounds = jnp.arange(schedule.who.shape[0])
    return schedule._replace(delay=jax.vmap(jax.vmap(draw, (None, 0)))(rounds, schedule.who))


def every(schedule: Cohort, period: int | Array) -> Cohort:
    """Return a schedule in which client c attends only the rounds t with t mod period[c] = 0.

    Args:
      schedule: [T, S].
      period: the period in rounds, a scalar or one per client [C], integers of at least 1.

    Raises:
      UsageError: if a period is below 1 or no integer, or if a client of the schedule has none.
    """
    _check_schedule(schedule)
    period = _integers("period", period)
    _check("period", period, "must be at least 1", lambda p: p >= 1)
    _check_per_client("period", period, schedule)
    rounds = jnp.arange(schedule.who.shape[0])[:, None]
    due = rounds % (period[schedule.who] if period.ndim else period) == 0
    return schedule._replace(present=schedule.present & due)


def slow(schedule: Cohort, rounds_per_update: int | Array) -> Cohort:
    """Return a schedule in which clients need m rounds for an update.

    A client starts an update in round s, on its broadcast w_s, and delivers it in round s + m - 1,
    whose result is w_{s + m}: so the update that leads to w_t was computed from w_{t - m}. In round
    0 all clients attend without delay; later a client attends every m-th round. The run must keep
    max(m) broadcasts.

    Args:
      schedule: [T, S].
      rounds_per_update: m, a scalar or one per client [C], integers of at least 1; 1 for a regular
        client.

    Raises:
      UsageError: if an m is below 1 or no integer, or if a client of the schedule has none.
    """
    _check_schedule(schedule)
    rounds_per_update = _integers("rounds_per_update", rounds_per_update)
    _check("rounds_per_update", rounds_per_update, "must be at least 1", lambda m: m >= 1)
    _check_per_client("rounds_per_update", rounds_per_update, schedule)
    return delayed(every(schedule, rounds_per_update), rounds_per_update - 1)


def first_all(schedule: Cohort, num_clients: int) -> Cohort:
    """Return a schedule in which each client attends once at the beginning, without delay.

    The first ceil(C / S) rounds are replaced: all clients attend round 0 if there are C slots or
    more. Apply it last, after functions that make clients absent.

    Args:
      schedule: [T, S].
      num_clients: C, at least 1.

    Raises:
      UsageError: if num_clients is below 1, or if the schedule has a client of num_clients or more,
        no slot, or fewer than ceil(C / S) rounds.
    """
    _check_schedule(schedule)
    checks.integer("num_clients", num_clients)
    _check_num_clients(num_clients, schedule)
    num_rounds, num_slots = schedule.who.shape
    if num_slots == 0:
        raise UsageError("schedule", ..., "has no slots, must have at least one")
    needed = -(-num_clients // num_slots)
    if num_rounds < needed:
        raise UsageError(
            "schedule",
            ...,
            f"has {num_rounds} rounds of {num_slots} slots, must have at least {needed}, "
            "so that each of {num_clients} attends once",
            num_clients=("num_clients", num_clients),
        )
    who = jnp.arange(needed * num_slots, dtype=jnp.int32).reshape(needed, num_slots)
    first = Cohort(who, who < num_clients, jnp.zeros_like(who))
    return jax.tree.map(lambda leaf, new: leaf.at[:needed].set(new), schedule, first)


def _numbers(name: str, values: float | Array) -> Array:
    """Return numbers as an array; anything else raises UsageError."""
    if not checks.is_concrete(values):
        return jnp.asarray(values)
    try:
        known = np.asarray(values)
    except (TypeError, ValueError):  # keys, lists of different lengths
        raise UsageError(name, values, "must be numbers") from None
    if known.dtype.kind not in "iuf":
        raise UsageError(name, values, "must be numbers")
    if not known.size:
        raise UsageError(name, known, "must be at least one number")
    if known.dtype.kind in "iu":
        _check(name, known, "must fit into 32 bits", lambda known: np.abs(known * 1.0) < 2**31)
    return jnp.asarray(values)


def _integers(name: str, values: int | Array) -> Array:
    """Return whole numbers as int32; a number with a fraction raises UsageError."""
    whole = _numbers(name, values)
    _check(name, whole, "must be an integer", lambda known: known == np.rint(known))
    return whole.astype(jnp.int32)


def _check_schedule(schedule: Cohort) -> None:
    checks.cohort("schedule", schedule)
    if schedule.who.ndim != 2 or len({field.shape for field in schedule}) > 1:
        raise UsageError("schedule", ..., "who, present and delay must all be [T, S]")


def _check_num_clients(num_clients: int, schedule: Cohort) -> None:
    """Raise UsageError if the schedule has a client that is not in 0..num_clients - 1."""
    if not checks.is_concrete(schedule):
        return
    present = np.asarray(schedule.present)
    if np.min(np.asarray(schedule.who), initial=0, where=present) < 0:
        raise UsageError("schedule", ..., "who must be at least 0 where a client is present")
    most = _last_client(schedule)
    if most >= num_clients:
        raise UsageError(
            "num_clients", num_clients, f"must be above {most}, the last client of the schedule"
        )


def _last_client(schedule: Cohort) -> int:
    return int(np.max(np.asarray(schedule.who), initial=0, where=np.asarray(schedule.present)))


def _check(
    name: str,
    values: Array | np.ndarray,
    allowed: str,
    is_allowed: Callable[[np.ndarray], np.ndarray],
) -> None:
    """Raise UsageError for the first value that is not allowed, unless values are traced."""
    if not checks.is_concrete(values):
        return
    known = np.asarray(values)  # in NumPy: inside a program, jnp operations are traced
    wrong = np.argwhere(~is_allowed(known))
    if len(wrong):
        place = str(wrong[0].tolist()) if known.ndim else ""
        raise UsageError(f"{name}{place}", known[tuple(wrong[0])], allowed)


def _check_per_client(name: str, values: Array, schedule: Cohort) -> None:
    """Raise UsageError unless values are a scalar, or one for each client of the schedule."""
    if values.ndim > 1:
        raise UsageError(name, ..., f"has shape {values.shape}, must be a scalar or one per client")
    if not values.ndim or not checks.is_concrete(schedule):
        return
    most = _last_client(schedule)
    if len(values) <= most:
        raise UsageError(
            name, ..., f"has {len(values)} values, must have one for client {most} too"
        )
