"""Participation as data: which clients attend each round, and how stale their broadcast is.

A schedule is a `Cohort` with leading T. It describes the world: sampling, dropout and delay. An
algorithm decides by `attends` of its exchanges. Draws are keyed by (round, client), so a longer
schedule starts with the shorter one, and the order of slots does not matter.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_inv import checks, permutation
from fedjax_inv.checks import UsageError
from fedjax_inv.types import Array, Cohort, Tree


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


def sampled(key: Array, num_clients: int, cohort: int, num_rounds: int) -> Cohort:
    """Return a schedule of clients drawn uniformly without replacement in each round.

    Args:
      key: a random key.
      num_clients: C, at least 1.
      cohort: S, how many clients attend a round, in 1..C.
      num_rounds: T, at least 1.

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

    def draw(round_index: Array) -> Array:
        # The first S of a permutation of all clients; the rest is not computed.
        drawn = permutation.draw(jax.random.fold_in(key, round_index))
        return permutation.at(drawn, jnp.arange(cohort, dtype=jnp.int32), jnp.int32(num_clients))

    return _schedule(jax.vmap(draw)(jnp.arange(num_rounds)))


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
      probability: p, above 0 and at most 1; the mean of d is 1 / p - 1.
      longest: the longest delay in rounds, at least 1.

    Raises:
      UsageError: if probability or longest is out of its bounds.
    """
    _check_schedule(schedule)
    checks.key("key", key)
    checks.integer("longest", longest)
    if checks.is_concrete(probability):
        checks.number("probability", probability, "above 0 and at most 1", lambda p: 0 < p <= 1)

    def draw(round_index: Array, who: Array) -> Array:
        of_client = jax.random.fold_in(jax.random.fold_in(key, round_index), who)
        trials = jax.random.geometric(of_client, probability, dtype=jnp.int32)
        return jnp.minimum(trials - 1, longest)

    rounds = jnp.arange(schedule.who.shape[0])
    return schedule._replace(delay=jax.vmap(jax.vmap(draw, (None, 0)))(rounds, schedule.who))


def every(schedule: Cohort, period: Array) -> Cohort:
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


def slow(schedule: Cohort, rounds_per_update: Array) -> Cohort:
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
