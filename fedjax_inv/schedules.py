"""Participation as data: who attends which round, and how stale it is.

A schedule is a `Cohort` with leading T. Draws are keyed by (round, client), so a longer schedule
starts with the shorter one and the order of slots does not matter.
"""

import jax
import jax.numpy as jnp

from fedjax_inv.types import Array, Cohort


def _schedule(who: Array) -> Cohort:
    return Cohort(who.astype(jnp.int32), jnp.ones(who.shape, bool), jnp.zeros(who.shape, jnp.int32))


def everyone(num_clients: int, num_rounds: int) -> Cohort:
    """All C clients in every round; [T, C]."""
    return _schedule(jnp.tile(jnp.arange(num_clients), (num_rounds, 1)))


def sampled(key: Array, num_clients: int, cohort: int, num_rounds: int) -> Cohort:
    """`cohort` clients a round, uniformly without replacement; [T, cohort].

    Raises ValueError unless 1 <= cohort <= num_clients.
    """
    if not 1 <= cohort <= num_clients:
        raise ValueError(f"cohort={cohort}: must be between 1 and the {num_clients} clients")

    def draw(round_index: Array) -> Array:
        key_of_round = jax.random.fold_in(key, round_index)
        return jax.random.permutation(key_of_round, num_clients)[:cohort]

    # lax.map: one round's permutation in memory, whatever the number of rounds.
    return _schedule(jax.lax.map(draw, jnp.arange(num_rounds)))


def turns(num_clients: int, num_rounds: int, *, together: bool = False) -> Cohort:
    """One client a round, in order; [T, 1]. Sequential play of a game.

    together: before each cycle of turns comes a round that everyone attends; [T, C].
    """
    rounds = jnp.arange(num_rounds)[:, None]
    if not together:
        return _schedule(rounds % num_clients)
    schedule, turn = everyone(num_clients, num_rounds), rounds % (num_clients + 1)
    return schedule._replace(present=(turn == 0) | (schedule.who == turn - 1))


def dropout(schedule: Cohort, key: Array, probability: float | Array) -> Cohort:
    """Each client of each round is absent with a probability; a scalar, or one per client [C]."""
    probability = jnp.asarray(probability)
    if not isinstance(probability, jax.core.Tracer) and not bool(
        jnp.all((probability >= 0) & (probability <= 1))
    ):
        raise ValueError(f"dropout probability={probability}: must be between 0 and 1")

    def lost(round_index: Array, who: Array) -> Array:
        draw = jax.random.uniform(jax.random.fold_in(jax.random.fold_in(key, round_index), who))
        return draw < (probability[who] if probability.ndim else probability)

    rounds = jnp.arange(schedule.who.shape[0])
    absent = jax.vmap(jax.vmap(lost, (None, 0)))(rounds, schedule.who)
    return schedule._replace(present=schedule.present & ~absent)


def delayed(schedule: Cohort, delay: Array) -> Cohort:
    """Clients that work on the broadcast of `delay` [C] rounds ago (in the first rounds: the
    first broadcast). The run must keep 1 + max(delay) broadcasts (`rounds.init(history=...)`).
    """
    return schedule._replace(delay=jnp.asarray(delay, jnp.int32)[schedule.who])


def every(schedule: Cohort, period: Array) -> Cohort:
    """Client c attends only the rounds t with t mod period[c] = 0; all attend the first."""
    rounds = jnp.arange(schedule.who.shape[0])[:, None]
    due = rounds % jnp.asarray(period, jnp.int32)[schedule.who] == 0
    return schedule._replace(present=schedule.present & due)
