"""The clients that take part in a round, and which of their updates arrive."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_inv import missing, program, schedules
from fedjax_inv.checks import UsageError
from fedjax_inv.types import Algorithm, Array, Cohort

from ..flags.configuration import Config
from ..flags.flag import (
    FRACTION,
    PART,
    PROBABILITY,
    at_least,
    flag,
    flag_error,
    in_flags,
    is_real,
    is_whole,
    pair,
)


def _is_probability(text: str) -> bool:
    return is_real(text, PROBABILITY.holds)


@dataclasses.dataclass(frozen=True)
class Participation:
    """The clients that take part in a round."""

    cohort: int = flag(0, "Clients drawn each round; 0: all.", at_least(0))
    sampling_rate: float = flag(
        1.0, "The part of the clients that is drawn each round, instead of --cohort.", PART
    )
    slow: tuple[str, ...] = flag(
        (),
        "Clients that need several rounds for an update, as client:rounds; the update is computed "
        "from the network of that many rounds ago.",
        pair(lambda value: is_whole(value, 1), "a number of rounds above 0"),
        kind=str,
    )
    lossy: tuple[str, ...] = flag(
        (),
        "Clients whose updates arrive with a probability, as client:probability.",
        pair(_is_probability, "a probability"),
        kind=str,
    )
    dropout: float = flag(
        0.0,
        "The probability that the update of a drawn client does not arrive.",
        FRACTION,
    )
    frequency: float = flag(
        1.0, "The probability that an update of a --sparse client arrives in a round.", PART
    )
    sparse: float = flag(
        0.5, "The part of the clients, drawn with the seed, that --frequency is for.", PROBABILITY
    )
    late: str = flag(
        "drop",
        "What happens to updates that do not arrive in their round: they are dropped; or, stale, "
        "they arrive when their client is next drawn and does not fail.",
        choices=("drop", "stale"),
    )
    longest_delay: int = flag(
        10, "Rounds after which a client of --late=stale begins anew.", at_least(1)
    )
    missing: str = flag(
        "skip",
        "The substitute for an update that does not arrive: none (skip), or the client's last one.",
        choices=missing.RULES,
    )
    first_all: bool = flag(False, "Whether all clients take part once at the beginning.")


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


def check(chosen: Config) -> None:
    """Raises UsageError for flags that contradict each other."""
    if chosen.clients and chosen.cohort > chosen.clients:
        raise flag_error("cohort", chosen.cohort, f"must be at most --clients={chosen.clients}")
    if chosen.late == "stale" and chosen.slow:
        text = "must be left out with --late=stale, which sets all delays"
        raise flag_error("slow", chosen.slow, text)
    for name, entries in _per_client(chosen).items():
        clients = [entry.partition(":")[0] for entry in entries]
        if len({*map(int, clients)}) < len(clients):
            raise flag_error(name, entries, "must have one value for each client")


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
        raise in_flags(error, f"--missing={chosen.missing} --algorithm={name}", {}) from None


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
