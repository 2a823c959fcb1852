"""The clients that take part in a round, and which of their updates arrive."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_inv import missing, program, schedules
from fedjax_inv.checks import UsageError
from fedjax_inv.types import Algorithm, Array, Cohort

from ..config import Config
from ..errors import flag_error, in_flags


def slots(chosen: Config, num_clients: int) -> int:
    """The number of clients drawn in a round.

    A single client always takes part, as it may hold the pooled examples of all.
    """
    if chosen.cohort or chosen.sampling_rate == 1 or num_clients == 1:
        return min(chosen.cohort or num_clients, num_clients)
    try:
        return schedules.cohort_size(num_clients, chosen.sampling_rate)
    except UsageError as error:
        names = {"rate": "sampling_rate", "num_clients": "clients"}
        raise in_flags(error, "", names) from None


def history(chosen: Config) -> int:
    """The number of broadcasts that a run keeps."""
    if chosen.late == "stale":
        return 1 + chosen.longest_delay
    return max([1, *(int(entry.partition(":")[2]) for entry in chosen.slow)])


def _per_client(chosen: Config) -> dict[str, tuple[str, ...]]:
    """The flags with entries client:value."""
    return {"slow": chosen.slow, "lossy": chosen.lossy}


def check_clients(chosen: Config, num_clients: int) -> None:
    """Raises UsageError for flags that do not fit the number of clients."""
    if chosen.cohort > num_clients:
        raise flag_error("cohort", chosen.cohort, f"must be at most the {num_clients} clients")
    for name, entries in _per_client(chosen).items():
        for entry in entries:
            if int(entry.partition(":")[0]) >= num_clients:
                raise flag_error(name, entry, f"must be of clients 0..{num_clients - 1}")
    if chosen.frequency < 1 and num_clients > 1 and round(chosen.sparse * num_clients) == 0:
        text = f"selects none of the {num_clients} clients, must be above {0.5 / num_clients:.3g}"
        raise flag_error("sparse", chosen.sparse, text)
    needed = -(-num_clients // slots(chosen, num_clients))
    if chosen.first_all and needed > chosen.rounds:
        raise flag_error("first_all", True, f"needs {needed} rounds, --rounds={chosen.rounds}")


def with_rule(chosen: Config, name: str, algorithm: Algorithm) -> Algorithm:
    """The algorithm with the rule of --missing. Raises UsageError if it does not fit."""
    try:
        return missing.with_rule(algorithm, chosen.missing)
    except UsageError as error:
        raise in_flags(
            error, f"--missing={chosen.missing} --algorithm={name}", {"algorithm": ""}
        ) from None


class Schedule:
    """(random key, number of clients, number of rounds) -> the cohorts [T, S], for `fit`."""

    def __init__(self, chosen: Config) -> None:
        self._chosen = chosen
        self.history = history(chosen)  # how many broadcasts a run keeps, whatever is drawn

    def __call__(self, key: Array, num_clients: int, num_rounds: int) -> Cohort:
        chosen = self._chosen
        drawn = slots(chosen, num_clients)
        if drawn < num_clients:
            cohort = schedules.sampled(key, num_clients, drawn, num_rounds)
        else:
            cohort = schedules.everyone(num_clients, num_rounds)
        if chosen.slow:
            cohort = schedules.slow(cohort, jnp.asarray(_of_clients(chosen.slow, num_clients, 1)))
        arrives = _of_clients(chosen.lossy, num_clients, 1.0) * (1 - chosen.dropout)
        fails = jnp.asarray(1 - arrives)
        if chosen.frequency < 1:
            sparse, rare = chosen.sparse, chosen.frequency
            often = _upload_probabilities(key, num_clients, sparse, rare)
            fails = 1 - jnp.asarray(arrives) * often
        if chosen.lossy or chosen.dropout or chosen.frequency < 1:
            draw_key = jax.random.fold_in(key, 1)
            if chosen.late == "stale":
                longest = chosen.longest_delay
                cohort = schedules.stale(cohort, draw_key, fails, num_clients, longest=longest)
            else:
                cohort = schedules.dropout(cohort, draw_key, fails)
        return schedules.first_all(cohort, num_clients) if chosen.first_all else cohort


def _upload_probabilities(key: Array, num_clients: int, sparse: float, frequency: float) -> Array:
    """The probability [C] that each client's upload arrives. key: the key of the schedule."""
    draw_key = jax.random.fold_in(key, 2)
    return schedules.upload_probabilities(draw_key, num_clients, sparse=sparse, frequency=frequency)


def is_sparse(chosen: Config, num_clients: int, seed: int) -> np.ndarray:
    """[C] bool: which clients of a run are sparse, so that --frequency applies to them."""
    key = program.schedule_key(seed)
    return np.asarray(_upload_probabilities(key, num_clients, chosen.sparse, 0.5)) < 1


def _of_clients(entries: Sequence[str], num_clients: int, default: float) -> np.ndarray:
    """The values [C] of entries client:value, with a default for the other clients."""
    values = np.full(num_clients, default)
    for entry in entries:
        client, _, value = entry.partition(":")
        values[int(client)] = float(value)  # cast to the default's type
    return values
