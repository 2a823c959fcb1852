"""The clients that take part in a round, and which of their updates arrive."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_inv import devices, missing, platforms, program, schedules
from fedjax_inv.checks import UsageError
from fedjax_inv.schedules import Reports
from fedjax_inv.types import Algorithm, Array, Cohort
from fedjax_inv_experiments.flags.flag import (
    FINITE,
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
from fedjax_inv_experiments.parts.training import Clients, examples_in_a_round


def _is_probability(text: str) -> bool:
    return is_real(text, PROBABILITY.holds)


def _is_delay(text: str) -> bool:
    kind, _, value = text.partition(":")
    return is_whole(text) or (kind == "geometric" and is_real(value, PART.holds))


def _is_online(text: str) -> bool:
    return text in ("always", "diurnal") or text.endswith(".npy")


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
    online: str = flag(
        "always",
        "Which clients can be drawn in a round: all (always), more at noon than at midnight "
        "(diurnal), or those that a record says, an .npy file of true/false [rounds, devices], "
        "which repeats itself.",
        Range(_is_online, "always, diurnal or the path of an .npy file"),
    )
    day: int = flag(24, "Rounds of a day of --online=diurnal.", at_least(1))
    online_least: float = flag(
        0.1, "The part of the clients that is online at midnight, with --online=diurnal.", FRACTION
    )
    online_most: float = flag(0.4, "The part that is online at noon.", PART)
    time_zones: float = flag(
        0.0,
        "Over which part of a day the clients' midnights are spread, in the order of their "
        "numbers; 0: all at once.",
        PROBABILITY,
    )
    extra: int = flag(
        0,
        "Clients that are asked in a round beyond those of --cohort; the first to report count, "
        "and the updates of the others are dropped.",
        at_least(0),
    )
    deadline: float = flag(
        0.0, "Simulated seconds after which a round ends in any case; 0: none.", FINITE
    )
    seconds_per_example: float = flag(
        0.0,
        "Simulated seconds that the median client takes for an example of local training; 0 and "
        "--seconds_per_megabyte=0: no time is simulated.",
        FINITE,
    )
    seconds_per_megabyte: float = flag(
        0.0, "Simulated seconds of the median client for a megabyte down or up.", FINITE
    )
    speed_spread: float = flag(
        1.0, "Standard deviation between clients of the logarithm of both speeds.", FINITE
    )
    round_spread: float = flag(0.0, "The same between the rounds of a client.", FINITE)

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
    def simulates_time(self) -> bool:
        """Whether the clients' reports take simulated time."""
        return self.seconds_per_example > 0 or self.seconds_per_megabyte > 0

    @property
    def record(self) -> Path | None:
        """The file of --online, which says who is online; None if there is none."""
        is_file = self.online not in ("always", "diurnal")
        return Path(self.online).expanduser() if is_file else None

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
    _check_reports(chosen)
    for name, entries in _per_client(chosen).items():
        clients = [int(entry.rpartition(":")[0] or -1) for entry in entries]  # -1: all
        if len(set(clients)) < len(clients):
            raise flag_error(name, entries, "must have one value for each client")


def _check_reports(chosen: Participation) -> None:
    """Raises UsageError for flags of online clients and of their reports that do not fit."""
    if chosen.online == "diurnal" and chosen.online_least > chosen.online_most:
        text = f"must be at most --online_most={chosen.online_most:g}"
        raise flag_error("online_least", chosen.online_least, text)
    if chosen.first_all and chosen.online != "always":
        raise flag_error("first_all", True, "must be left out with --online, which says who can")
    for name in ("extra", "deadline"):
        value = getattr(chosen, name)
        if not value:
            continue
        if not chosen.simulates_time:
            text = "needs --seconds_per_example or --seconds_per_megabyte, or nobody is late"
            raise flag_error(name, value, text)
        if chosen.late == "stale":
            raise flag_error(name, value, "must be left out with --late=stale")
        if chosen.first_all:
            raise flag_error(name, value, "must be left out with --first_all")


def online_record(chosen: Participation) -> np.ndarray | None:
    """The record of --online, [P, N] bool; None if there is none.

    Raises UsageError if the file is not one.
    """
    path = chosen.record
    if path is None:
        return None
    try:
        if not path.is_file():
            raise flag_error("online", chosen.online, "must be a file, there is none")
        recorded = np.load(path, allow_pickle=False)
        schedules.trace(recorded)
    except UsageError as error:
        raise in_flags(error, f"--online={chosen.online}", {}) from None
    except (OSError, ValueError, EOFError, SyntaxError):
        raise flag_error("online", chosen.online, "must be an .npy file, whole") from None
    return recorded


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
    most = num_clients - chosen.slots(num_clients)
    if chosen.extra > most and num_clients > 1:
        text = f"must be at most {most}, the clients of {num_clients} that a round does not draw"
        raise flag_error("extra", chosen.extra, text)
    needed = -(-num_clients // chosen.slots(num_clients))
    if chosen.first_all and needed > num_rounds:
        raise flag_error("first_all", True, f"needs {needed} rounds, --rounds={num_rounds}")


def _all_arrive(chosen: Participation, num_clients: int) -> bool:
    """Whether every client's update arrives in every round. num_clients: --clients."""
    is_whole_cohort = chosen.cohort in (0, num_clients) and chosen.sampling_rate == 1
    fails = chosen.lossy or chosen.dropout or chosen.frequency < 1 or chosen.deadline
    is_away = chosen.slow or chosen.upload_every or chosen.online != "always"
    return is_whole_cohort and not (fails or is_away)


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
    if chosen.online != "diurnal":
        of_days = ("day", "online_least", "online_most", "time_zones")
        idle |= dict.fromkeys(of_days, "has no effect without --online=diurnal")
    if not chosen.simulates_time:
        reason = "has no effect without --seconds_per_example or --seconds_per_megabyte"
        idle |= dict.fromkeys(("speed_spread", "round_spread"), reason)
    return idle


def with_rule(chosen: Participation, name: str, algorithm: Algorithm) -> Algorithm:
    """The algorithm with the rule of --missing. Raises UsageError if it does not fit."""
    try:
        return missing.with_rule(algorithm, chosen.missing)
    except UsageError as error:
        raise in_flags(error, f"--missing={chosen.missing} --algorithm={name}", {}) from None


def cohorts(
    chosen: Participation,
    clients: Clients,
    inputs: program.Inputs,
    num_rounds: int,
    last_round: int,
    megabytes: float = 0.0,
) -> tuple[Cohort, Reports | None]:
    """The cohorts [R, T, S] of T = num_rounds rounds, and the cost of the rounds [R, T].

    From round `last_round` on the cohorts are empty. Without simulated time there is no cost.

    clients: their local training. megabytes: what a client downloads and uploads in a round.
    """
    num_clients = inputs.train.size.shape[1]
    slots = chosen.slots(num_clients)
    rounds_per_update = _of_clients(chosen.slow, num_clients, 1)
    several = num_clients > 1  # a single client may hold the pooled examples of all
    extra, is_timed = chosen.extra * several, chosen.simulates_time and several
    drops = several and chosen.dropout > 0
    arrives = _of_clients(chosen.lossy, num_clients, 1.0) * (1 - chosen.dropout * drops)
    is_rare = several and chosen.frequency < 1
    upload_every = _upload_every(chosen.upload_every, num_clients) if several else np.ones(1, int)
    recorded = online_record(chosen) if several else None

    def schedule(key: Array, size: Array, recorded: Array | None) -> tuple[Cohort, Reports | None]:
        online = _online(chosen, key, num_clients, recorded) if several else None
        if slots < num_clients or online is not None:
            cohort = schedules.sampled(key, num_clients, slots + extra, num_rounds, online=online)
        else:
            cohort = schedules.everyone(num_clients, num_rounds)
        if chosen.slow:
            cohort = schedules.slow(cohort, jnp.asarray(rounds_per_update))
        if (upload_every > 1).any():
            cohort = schedules.every(cohort, jnp.asarray(upload_every))
        if several:
            cohort = _delayed(cohort, key, chosen)
        asked = cohort
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
            cohort = asked = schedules.first_all(cohort, num_clients)
        reports = None
        if is_timed:
            # Nobody asks a client without examples.
            asked = cohort._replace(present=asked.present & (size[cohort.who] > 0))
            seconds = _seconds(chosen, clients, key, asked, size, megabytes)
            seconds = jnp.where(cohort.present, seconds, jnp.inf)  # of a loss, no report comes
            deadline = chosen.deadline or None
            cohort, reports = schedules.first_reports(asked, seconds, slots, deadline=deadline)
        is_before_end = np.arange(num_rounds)[:, None] < last_round
        return cohort._replace(present=cohort.present & is_before_end), reports

    def of_run(seed: Array, size: Array, recorded: Array | None) -> tuple[Cohort, Reports | None]:
        return schedule(program.schedule_key(seed), size, recorded)

    of_runs = [devices.on_host(leaf) for leaf in (inputs.seed, inputs.train.size)]
    options = platforms.quick_to_compile()
    every = jax.jit(jax.vmap(of_run, (0, 0, None)), compiler_options=options)
    return every(*of_runs, recorded)


def _online(
    chosen: Participation, key: Array, num_clients: int, recorded: Array | None
) -> schedules.Online | None:
    """Who is online; None if all are. key: the key of the schedule. recorded: of --online=FILE."""
    if recorded is not None:
        return schedules.trace(recorded)
    if chosen.online == "always":
        return None
    return schedules.diurnal(
        jax.random.fold_in(key, 4),
        num_clients,
        day=chosen.day,
        least=chosen.online_least,
        most=chosen.online_most,
        time_zones=chosen.time_zones,
    )


def _seconds(
    chosen: Participation,
    clients: Clients,
    key: Array,
    asked: Cohort,
    size: Array,
    megabytes: float,
) -> Array:
    """After how many simulated seconds each client would report, [T, S].

    key: the key of the schedule. size: [C], the clients' examples.
    """
    of_training = examples_in_a_round(clients, size) * chosen.seconds_per_example

    def drawn(number: int, typical: float | Array) -> Array:
        spreads = {"spread": chosen.speed_spread, "round_spread": chosen.round_spread}
        draw_key = jax.random.fold_in(key, number)
        return schedules.report_seconds(asked, draw_key, typical, **spreads)

    return drawn(5, of_training) + drawn(6, megabytes * chosen.seconds_per_megabyte)


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
