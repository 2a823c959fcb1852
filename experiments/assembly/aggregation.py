"""From values to wrappers of an algorithm: attackers, robust rules, and privacy with its budget."""

import functools
import importlib.util
import math
from collections.abc import Callable, Mapping

from fedjax_inv import attackers, private, robust
from fedjax_inv.checks import UsageError
from fedjax_inv.types import Aggregator, Algorithm

from ..config import Aggregation, Config
from ..errors import flag_error, in_flags

_ATTACKS = {"sign_flip": attackers.sign_flip, "scaled_noise": attackers.scaled_noise}


def wrapped(config: Config, name: str, algorithm: Algorithm) -> Algorithm:
    """The algorithm with what the flags ask for. name: the algorithm's."""
    asked = config.aggregation
    rule = _rule(asked) if asked.aggregate != "mean" else None
    try:
        if asked.attack != "none":
            attack, *factor = asked.attack.split(":")
            how = {"factor": float(factor[0])} if factor else {}
            algorithm = _ATTACKS[attack](algorithm, asked.attackers, **how)
        if rule:
            return robust.aggregated(algorithm, rule)
        if asked.private_clip:
            return private.private(
                algorithm,
                clip=asked.private_clip,
                noise_multiplier=noise_multiplier(config),
                sampling_rate=config.participation.sampling_rate,
            )
    except UsageError as error:
        flag = next(
            flag for flag in ("private_clip", "aggregate", "attack") if _is_set(asked, flag)
        )
        where = f"--{flag}={getattr(asked, flag)} --algorithm={name}"
        raise in_flags(error, where, {"algorithm": "", "model": "norm"}) from None
    return algorithm


def _is_set(asked: Aggregation, flag: str) -> bool:
    return bool(getattr(asked, flag) != getattr(Aggregation(), flag))


def _number(text: str) -> float:
    number = float(text)
    return int(number) if number.is_integer() else number


# By name of --aggregate, a function of the numbers behind its colons.
_RULES: Mapping[str, Callable[..., Aggregator]] = {
    "median": robust.median,
    "trimmed_mean": robust.trimmed_mean,
    "geometric_median": lambda: robust.geometric_median(),
    "krum": lambda num_wrong=1: robust.krum(num_wrong),
    "multi_krum": lambda num_wrong=1, num_chosen=3: robust.krum(num_wrong, num_chosen=num_chosen),
    "clipped_mean": robust.clipped_mean,
}


def _rule(asked: Aggregation) -> Aggregator:
    """The rule of --aggregate."""
    name, *texts = asked.aggregate.split(":")
    try:
        return _RULES[name](*map(_number, texts))
    except (TypeError, KeyError):  # the mean, too, has no numbers
        text = f"has {len(texts)} numbers, must have as many as --help shows"
        raise flag_error("aggregate", asked.aggregate, text) from None
    except UsageError as error:
        raise in_flags(error, f"--aggregate={asked.aggregate}", {"clip": ""}) from None


def check_clients(asked: Aggregation, num_slots: int, num_clients: int) -> None:
    """Checks the flags against the number of clients, and of those that are drawn in a round."""
    for client in asked.attackers:
        if client >= num_clients:
            raise flag_error("attackers", asked.attackers, f"must be of 0..{num_clients - 1}")
    if asked.private_clip and asked.delta * num_clients >= 1:
        text = f"must be below 1 / {num_clients}: else a client may be published as it is"
        raise flag_error("delta", asked.delta, text)
    name, *texts = asked.aggregate.split(":")
    if name in ("krum", "multi_krum"):
        least = 2 * int(float(texts[0]) if texts else 1) + 3
        if num_slots < least:
            text = f"needs {least} clients a round, there are {num_slots}"
            raise flag_error("aggregate", asked.aggregate, text)
        if len(texts) > 1 and int(float(texts[1])) > num_slots:
            text = f"takes {texts[1]} updates of a round, which has {num_slots}"
            raise flag_error("aggregate", asked.aggregate, text)


def noise_multiplier(config: Config) -> float:
    """The deviation of the noise in units of the clip, given or of --epsilon."""
    asked = config.aggregation
    if not asked.epsilon:
        return asked.noise_multiplier
    return _noise_of(
        asked.epsilon, config.participation.sampling_rate, config.training.rounds, asked.delta
    )


@functools.cache
def _noise_of(epsilon: float, sampling_rate: float, num_rounds: int, delta: float) -> float:
    return private.noise_multiplier_for(
        epsilon=epsilon, sampling_rate=sampling_rate, num_rounds=num_rounds, delta=delta
    )


def budget(config: Config) -> str:
    """A paragraph about the privacy of a run, for below its table; "" without privacy."""
    asked = config.aggregation
    clients = config.participation
    if not asked.private_clip:
        return ""
    multiplier = noise_multiplier(config)
    rate = clients.sampling_rate
    noise = f"clip {asked.private_clip:g}, noise multiplier {multiplier:.3g}"
    if clients.cohort or (clients.sampling == "fixed" and rate < 1):
        return f"Private: {noise}; no epsilon is known for cohorts of a fixed size."
    if multiplier and importlib.util.find_spec("dp_accounting") is None:
        return f"Private: {noise}; pip install 'fedjax_inv[privacy]' gives the epsilon."
    spent = private.epsilon(
        noise_multiplier=multiplier,
        sampling_rate=rate,
        num_rounds=config.training.rounds,
        delta=asked.delta,
    )
    shown = "infinite" if math.isinf(spent) else f"{spent:.3g}"
    return (
        f"Private: epsilon is {shown} at delta {asked.delta:g} for adding or removing a client, "
        f"with {noise}, each client in a round with probability {rate:g}, {config.training.rounds} "
        "rounds. It is that of one run: a choice among settings or seeds by results spends more, "
        "and metrics, validation scores and numbers of examples have no protection."
    )
