"""Participation as data: who attends which round, and how stale it is.

A schedule is a `Cohort` with leading T: what the world decides (sampling, dropout, delay); what an
algorithm decides is its exchanges' `attends`. Draws are keyed by (round, client), so a longer
schedule starts with the shorter one and the order of slots does not matter.
"""

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_inv import checks, permutation
from fedjax_inv.checks import UsageError
from fedjax_inv.types import Array, Cohort, Tree


def _schedule(who: Array) -> Cohort:
    return Cohort(who.astype(jnp.int32), jnp.ones(who.shape, bool), jnp.zeros(who.shape, jnp.int32))


def everyone(num_clients: int, num_rounds: int) -> Cohort:
    """All C clients in every round; [T, C]. Raises ValueError for counts below 1."""
    checks.integer("num_clients", num_clients)
    checks.integer("num_rounds", num_rounds)
    return _schedule(jnp.tile(jnp.arange(num_clients), (num_rounds, 1)))


def sampled(key: Array, num_clients: int, cohort: int, num_rounds: int) -> Cohort:
    """`cohort` clients a round, uniformly without replacement; [T, cohort].

    Raises ValueError unless 1 <= cohort <= num_clients.
    """
    checks.integer("num_clients", num_clients)
    checks.integer("num_rounds", num_rounds)
    checks.integer("cohort", cohort, 1, num_clients, ", the clients")

    def draw(round_index: Array) -> Array:
        # The first of a permutation of all, without the rest of it.
        drawn = permutation.draw(jax.random.fold_in(key, round_index))
        return permutation.at(drawn, jnp.arange(cohort, dtype=jnp.int32), jnp.int32(num_clients))

    return _schedule(jax.vmap(draw)(jnp.arange(num_rounds)))


def cohort_size(num_clients: int, rate: float) -> int:
    """How many of C clients a sampling rate selects: rate C, rounded.

    Raises ValueError for a rate outside (0, 1], or one that selects nobody.
    """
    checks.integer("num_clients", num_clients)
    checks.number("rate", rate, "above 0 and at most 1", lambda rate: 0 < rate <= 1)
    cohort = round(rate * num_clients)
    if cohort < 1:
        raise UsageError(f"rate={rate}: selects none of num_clients={num_clients}, must be higher")
    return cohort


def upload_probabilities(key: Array, num_clients: int, *, sparse: float, frequency: float) -> Array:
    """[C] with which probability an upload of each client arrives: `frequency` for a part of the
    clients, 1 for the others.

    sparse: how large that part is; drawn uniformly, rounded to whole clients. Raises ValueError for
    a sparse outside [0, 1] or a frequency outside (0, 1].
    """
    checks.integer("num_clients", num_clients)
    checks.probability("sparse", sparse)
    checks.number("frequency", frequency, "above 0 and at most 1", lambda f: 0 < f <= 1)
    is_sparse = jax.random.permutation(key, num_clients) < round(sparse * num_clients)
    return jnp.where(is_sparse, frequency, 1.0)


def dropout(schedule: Cohort, key: Array, probability: float | Array) -> Cohort:
    """Each client of each round is absent with a probability; a scalar, or one per client [C].

    Where an upload arrives with probability p, that of being absent is 1 - p.
    Raises ValueError for a probability outside [0, 1], or not one for every client named.
    """
    return schedule._replace(present=schedule.present & ~_failed(schedule, key, probability))


def stale(
    schedule: Cohort, key: Array, probability: float | Array, num_clients: int, *, longest: int
) -> Cohort:
    """Those whom `dropout` would make absent deliver later what they have begun.

    A client begins in the first round that it is in after its last delivery, on that round's
    broadcast, and delivers in the first one, of those that it is in, in which it does not fail.
    What is more than `longest` rounds old is thrown away: it begins anew. Delays that the schedule
    had are forgotten.

    probability: of failing in a round; a scalar, or one per client [C]. With the same key, those
    fail whom `dropout` drops. The run must keep 1 + longest broadcasts. Raises ValueError as
    `dropout` does, and for a longest below 1.
    """
    checks.integer("num_clients", num_clients)
    checks.integer("longest", longest)
    nothing = -1

    def turn(begun: Array, now: tuple[Array, Array, Array, Array]) -> tuple[Array, Tree]:
        """begun: [C] the round in which each client began what it is at."""
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
    """[T, S] bool, drawn for each client of each round with a probability."""
    probability = jnp.asarray(probability)
    lowest, highest = _range(probability)
    if not (lowest >= 0 and highest <= 1):
        raise UsageError(f"probability={probability}: must be between 0 and 1")
    _check_per_client("probability", probability, schedule)

    def fails(round_index: Array, who: Array) -> Array:
        draw = jax.random.uniform(jax.random.fold_in(jax.random.fold_in(key, round_index), who))
        return draw < (probability[who] if probability.ndim else probability)

    rounds = jnp.arange(schedule.who.shape[0])
    return jax.vmap(jax.vmap(fails, (None, 0)))(rounds, schedule.who)


def delayed(schedule: Cohort, delay: int | Array) -> Cohort:
    """Clients that work on the broadcast of `delay` rounds ago; a scalar, or one per client [C].

    In the first rounds: on the first broadcast. The run must keep 1 + max(delay) broadcasts
    (`rounds.init(history=...)`). Raises ValueError for a negative delay, or not one for every
    client named.
    """
    delay = jnp.asarray(delay, jnp.int32)
    if _range(delay)[0] < 0:
        raise UsageError(f"delay={delay}: must be at least 0")
    _check_per_client("delay", delay, schedule)
    per_slot = delay[schedule.who] if delay.ndim else jnp.full(schedule.who.shape, delay)
    return schedule._replace(delay=per_slot)


def randomly_delayed(
    schedule: Cohort, key: Array, probability: float | Array, *, longest: int
) -> Cohort:
    """`delayed` by d rounds with probability p (1 - p)^d, drawn for each client of each round.

    What is above `longest` is `longest`. probability: p, so that 1 / p - 1 is the mean of what is
    drawn. The run must keep 1 + longest broadcasts. Raises ValueError for a probability outside
    (0, 1], and for a longest below 1.
    """
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
    """Client c attends only the rounds t with t mod period[c] = 0; all attend the first.

    period: a scalar, or one per client [C]. Raises ValueError for a period below 1, or not one for
    every client named.
    """
    period = jnp.asarray(period, jnp.int32)
    if _range(period)[0] < 1:
        raise UsageError(f"period={period}: must be at least 1")
    _check_per_client("period", period, schedule)
    rounds = jnp.arange(schedule.who.shape[0])[:, None]
    due = rounds % (period[schedule.who] if period.ndim else period) == 0
    return schedule._replace(present=schedule.present & due)


def slow(schedule: Cohort, rounds_per_update: Array) -> Cohort:
    """Clients that need m rounds for an update; a scalar, or one per client [C]; 1 is regular.

    An update started in round s, on its broadcast w_s, arrives in round s + m - 1, which makes
    w_{s + m}: so what makes w_t was computed from w_{t - m}. Round 0 sees all of them, without
    delay; from round 1 on, every m-th round does. The run must keep max(m) broadcasts. Raises
    ValueError for m below 1, or not one for every client named.
    """
    rounds_per_update = jnp.asarray(rounds_per_update, jnp.int32)
    if _range(rounds_per_update)[0] < 1:
        raise UsageError(f"rounds_per_update={rounds_per_update}: must be at least 1")
    _check_per_client("rounds_per_update", rounds_per_update, schedule)
    return delayed(every(schedule, rounds_per_update), rounds_per_update - 1)


def first_all(schedule: Cohort, num_clients: int) -> Cohort:
    """Each of the C clients attends once at the beginning, on the newest broadcast.

    The first ceil(C / S) rounds are replaced: all attend round 0 where there is a slot for each.
    Comes last, after what makes clients absent. Raises ValueError for a schedule that is shorter.
    """
    checks.integer("num_clients", num_clients)
    num_rounds, num_slots = schedule.who.shape
    needed = -(-num_clients // num_slots)
    if num_rounds < needed:
        raise UsageError(
            f"schedule: has {num_rounds} rounds of {num_slots} slots, must have at least {needed}, "
            f"so that each of num_clients={num_clients} attends once"
        )
    who = jnp.arange(needed * num_slots, dtype=jnp.int32).reshape(needed, num_slots)
    first = Cohort(who, who < num_clients, jnp.zeros_like(who))
    return jax.tree.map(lambda leaf, new: leaf.at[:needed].set(new), schedule, first)


def _range(values: Array) -> tuple[float, float]:
    """The lowest and the highest of some values; 1, which is always allowed, of traced ones."""
    # In numpy: inside of a program, a jnp operation is traced whatever it is on.
    known = np.asarray(values) if checks.is_concrete(values) else np.ones(1)
    return known.min(), known.max()


def _check_per_client(name: str, values: Array, schedule: Cohort) -> None:
    if values.ndim > 1:
        raise UsageError(f"{name}: has shape {values.shape}, must be a scalar or one per client")
    if not values.ndim or not checks.is_concrete(schedule):
        return
    most = int(np.max(np.asarray(schedule.who), initial=0, where=np.asarray(schedule.present)))
    if len(values) <= most:
        raise UsageError(f"{name}: has {len(values)} values, must have one for client {most} too")
