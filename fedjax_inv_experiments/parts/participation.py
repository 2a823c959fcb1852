"""The clients that take part in a round, and which of their updates arrive."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_inv import missing, program, schedules
from fedjax_inv.checks import UsageError
from fedjax_inv.types import Algorithm, Array, Cohort
from fedjax_inv_experiments.flags.flag import (
    FRACTION,
    PROBABILITY,
    Range,
    at_least,
    flag,
    flag_error,
    flags_of,
    in_flags,
    is_real,
    is_whole,
    pair,
)
from fedjax_inv_experiments.parts.optimizers import PART


def _is_probability(text: str) -> bool:
    return is_real(text, PROBABILITY.holds)


def _is_delay(text: str) -> bool:
    kind, _, value = text.partition(":")
    return is_whole(text) or (kind == "geometric" and is_real(value, PART.holds))


def _is_period(text: str) -> bool:
    client, colon, period = text.rpartition(":")
    return is_whole(period, 1) and (not colon or is_whole(client))


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
    delay: str = flag(
        "0",
        "The age in rounds of the network that an update is computed from: a number; or "
        "geometric:p, drawn for each update, d with probability p (1 - p)^d, at most "
        "--longest_delay.",
        Range(_is_delay, "a number of rounds, or geometric:p with p above 0 and at most 1"),
    )
    upload_every: tuple[str, ...] = flag(
        (),
        "Clients take part only in every n-th round, from the first on: a number for all, or "
        "client:rounds for some.",
        Range(_is_period, "a number of rounds above 0, or client:rounds"),
        kind=str,
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
        10,
        "Rounds after which a client of --late=stale begins anew, and the most that "
        "--delay=geometric:p draws.",
        at_least(1),
    )
    missing: str = flag(
        "skip",
        "The substitute for an update that does not arrive: none (skip), or the client's last one.",
        choices=missing.RULES,
    )
    first_all: bool = flag(False, "Whether all clients take part once at the beginning.")

    def slots(self, num_clients: int) -> int:
        """The number of clients drawn in a round.

        A single client always takes part, as it may hold the pooled examples of all.
        """
        if self.cohort or self.sampling_rate == 1 or num_clients == 1:
            return min(self.cohort or num_clients, num_clients)
        try:
            return schedules.cohort_size(num_clients, self.sampling_rate)
        except UsageError as error:
            names = {"rate": "sampling_rate", "num_clients": "clients"}
            raise in_flags(error, "", names) from None

    @property
    def history(self) -> int:
        """The number of broadcasts that a run keeps."""
        if self.late == "stale" or ":" in self.delay:
            return 1 + self.longest_delay
        if int(self.delay):
            return 1 + int(self.delay)
        return max([1, *(int(entry.partition(":")[2]) for entry in self.slow)])

    @property
    def history_flag(self) -> str:
        """The name of the flag that determines `history`."""
        if self.late == "stale" or ":" in self.delay:
            return "longest_delay"
        return "delay" if int(self.delay) else "slow"


def check(chosen: Participation, num_clients: int) -> None:
    """Raises UsageError for flags that contradict each other. num_clients: --clients."""
    if num_clients and chosen.cohort > num_clients:
        raise flag_error("cohort", chosen.cohort, f"must be at most --clients={num_clients}")
    delay, slow = chosen.delay, ",".join(chosen.slow)
    is_delayed = ":" in delay or int(delay) > 0
    if chosen.late == "stale":
        text = "must be left out with --late=stale, which sets all delays"
        if slow:
            raise flag_error("slow", slow, text)
        if is_delayed:
            raise flag_error("delay", delay, text)
    if slow:
        text = f"must be left out with --slow={slow}, which says when and how late clients upload"
        if is_delayed:
            raise flag_error("delay", delay, text)
        if chosen.upload_every:
            raise flag_error("upload_every", chosen.upload_every, text)
    for name, entries in _per_client(chosen).items():
        clients = [int(entry.rpartition(":")[0] or -1) for entry in entries]  # -1: all
        if len(set(clients)) < len(clients):
            raise flag_error(name, entries, "must have one value for each client")


def _per_client(chosen: Participation) -> dict[str, tuple[str, ...]]:
    """The flags with entries client:value."""
    return {"slow": chosen.slow, "lossy": chosen.lossy, "upload_every": chosen.upload_every}


def check_clients(chosen: Participation, num_clients: int, num_rounds: int) -> None:
    """Raises UsageError for flags that do not fit the numbers of clients and rounds."""
    if chosen.cohort > num_clients:
        raise flag_error("cohort", chosen.cohort, f"must be at most the {num_clients} clients")
    for name, entries in _per_client(chosen).items():
        for entry in entries:
            if ":" in entry and int(entry.partition(":")[0]) >= num_clients:
                raise flag_error(name, entry, f"must be of clients 0..{num_clients - 1}")
    if chosen.frequency < 1 and num_clients > 1 and round(chosen.sparse * num_clients) == 0:
        text = f"selects none of the {num_clients} clients, must be above {0.5 / num_clients:.3g}"
        raise flag_error("sparse", chosen.sparse, text)
    needed = -(-num_clients // chosen.slots(num_clients))
    if chosen.first_all and needed > num_rounds:
        raise flag_error("first_all", True, f"needs {needed} rounds, --rounds={num_rounds}")


def _all_arrive(chosen: Participation, num_clients: int) -> bool:
    """Whether every client's update arrives in every round. num_clients: --clients."""
    is_whole_cohort = chosen.cohort in (0, num_clients) and chosen.sampling_rate == 1
    fails = chosen.lossy or chosen.dropout or chosen.frequency < 1
    return is_whole_cohort and not (fails or chosen.slow or chosen.upload_every)


def without_effect(
    chosen: Participation, algorithms: Sequence[str], *, is_pooled: bool, num_clients: int
) -> dict[str, str]:
    """The flags of this group that have no effect, and why.

    is_pooled: whether all algorithms train on all examples at once. num_clients: --clients.
    """
    idle = {}
    if _all_arrive(chosen, num_clients):
        reason = "has no effect, as all updates arrive in every round without"
        idle["missing"] = f"{reason} --cohort or another flag of participation"
        if chosen.delay == "0":
            idle["first_all"] = f"{reason} --cohort, --delay or another flag of participation"
    if is_pooled:
        names = ",".join(algorithms)
        reason = f"has no effect with --algorithm={names}, which trains on all examples at once"
        idle |= {field.name: reason for field in flags_of(Participation)}
    if chosen.cohort:
        idle["sampling_rate"] = f"has no effect beside --cohort={chosen.cohort}"
    if chosen.frequency == 1:
        idle["sparse"] = "has no effect without --frequency below 1"
        if not chosen.lossy and not chosen.dropout:
            idle["late"] = "has no effect without --frequency below 1 or --lossy or --dropout"
    if chosen.late == "drop" and ":" not in chosen.delay:
        reason = "has no effect with --late=drop, unless with --delay=geometric:p"
        idle["longest_delay"] = reason
    return idle


def with_rule(chosen: Participation, algorithm: Algorithm) -> Algorithm:
    """The algorithm with the rule of --missing. Raises UsageError if it does not fit."""
    try:
        return missing.with_rule(algorithm, chosen.missing)
    except UsageError as error:
        raise in_flags(error, f"--missing={chosen.missing}", {}) from None


def cohorts(
    chosen: Participation, inputs: program.Inputs, num_rounds: int, last_round: int
) -> Cohort:
    """The cohorts [R, T, S] of T = num_rounds rounds; from round `last_round` on they are empty."""
    num_clients = inputs.train.size.shape[1]
    slots = chosen.slots(num_clients)
    rounds_per_update = _of_clients(chosen.slow, num_clients, 1)
    several = num_clients > 1  # a single client may hold the pooled examples of all
    drops = several and chosen.dropout > 0
    arrives = _of_clients(chosen.lossy, num_clients, 1.0) * (1 - chosen.dropout * drops)
    is_rare = several and chosen.frequency < 1
    upload_every = _upload_every(chosen.upload_every, num_clients) if several else np.ones(1, int)

    def schedule(key: Array) -> Cohort:
        if slots < num_clients:
            cohort = schedules.sampled(key, num_clients, slots, num_rounds)
        else:
            cohort = schedules.everyone(num_clients, num_rounds)
        if chosen.slow:
            cohort = schedules.slow(cohort, jnp.asarray(rounds_per_update))
        if (upload_every > 1).any():
            cohort = schedules.every(cohort, jnp.asarray(upload_every))
        if several:
            cohort = _delayed(cohort, key, chosen)
        fails = jnp.asarray(1 - arrives)
        if is_rare:
            rare = _upload_probabilities(key, num_clients, chosen.sparse, chosen.frequency)
            fails = 1 - jnp.asarray(arrives) * rare
        if chosen.lossy or drops or is_rare:
            draw_key = jax.random.fold_in(key, 1)
            if chosen.late == "stale":
                longest = chosen.longest_delay
                cohort = schedules.stale(cohort, draw_key, fails, num_clients, longest=longest)
            else:
                cohort = schedules.dropout(cohort, draw_key, fails)
        if chosen.first_all:
            cohort = schedules.first_all(cohort, num_clients)
        is_before_end = np.arange(num_rounds)[:, None] < last_round
        return cohort._replace(present=cohort.present & is_before_end)

    return program.cohorts(schedule, inputs)


def _upload_probabilities(key: Array, num_clients: int, sparse: float, frequency: float) -> Array:
    """The probability [C] that each client's upload arrives. key: the key of the schedule."""
    draw_key = jax.random.fold_in(key, 2)
    return schedules.upload_probabilities(draw_key, num_clients, sparse=sparse, frequency=frequency)


def is_sparse(chosen: Participation, num_clients: int, seed: int) -> np.ndarray:
    """[C] bool: which clients of a run are sparse, so that --frequency applies to them."""
    key = program.schedule_key(seed)
    return np.asarray(_upload_probabilities(key, num_clients, chosen.sparse, 0.5)) < 1


def _of_clients(entries: Sequence[str], num_clients: int, default: float) -> np.ndarray:
    """The values [C] of entries client:value, with a default for the other clients."""
    values = np.full(num_clients, default)
    for entry in entries:
        client, _, value = entry.partition(":")
        if num_clients > 1 and int(client) < num_clients:  # a single client may hold all examples
            values[int(client)] = float(value)  # cast to the default's type
    return values


def _upload_every(entries: Sequence[str], num_clients: int) -> np.ndarray:
    """The rounds [C] from an upload of each client to its next one."""
    of_all = [int(entry) for entry in entries if ":" not in entry]
    return _of_clients([e for e in entries if ":" in e], num_clients, max([1, *of_all]))


def _delayed(cohort: Cohort, key: Array, chosen: Participation) -> Cohort:
    """The cohort with the delays of --delay. key: the key of the schedule."""
    kind, _, value = chosen.delay.rpartition(":")
    if kind:
        longest, draw_key = chosen.longest_delay, jax.random.fold_in(key, 3)
        return schedules.randomly_delayed(cohort, draw_key, float(value), longest=longest)
    return schedules.delayed(cohort, int(value)) if int(value) else cohort
