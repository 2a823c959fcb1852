"""From values to a method: its settings, optimizers, local training and cohorts.

Functions raise UsageError for values that do not fit.
"""

import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax

from fedjax_inv import checks, freezing, keys, late_uploads, schedules, weight_averages
from fedjax_inv.algorithms import LISTED
from fedjax_inv.checks import UsageError
from fedjax_inv.fit import LOCAL, LocalTraining
from fedjax_inv.inputs import schedule_key
from fedjax_inv.types import Algorithm, Array, Cohort, Facts, Model, Work

from ..config import Config, Method, Participation, Training
from ..errors import check_known, flag_error, in_flags, near
from . import aggregation, factories
from .objective import Objective

_STALE = 10  # rounds after which a client of --late=stale begins anew
_SPARSE = 0.5  # the part of clients that --frequency is for, as in CAFE


def check_algorithm(name: str) -> None:
    """Raises UsageError if there is no algorithm of this name."""
    factories.check_factory("algorithm", name, LISTED)


def check_optimizers(training: Training) -> None:
    """Raises UsageError for optimizers that are unknown or take other arguments."""
    for flag in _OWN_FLAGS:
        optimizer_arguments(training, flag)


def check_fits(method: Method, objective: Objective) -> None:
    """Raises UsageError if an algorithm does not fit the data's targets or the loss."""
    for name in method.algorithm:
        facts = factories.facts(name)
        if facts.needs_classes and objective.kind != "classes":
            text = f"needs data with classes, these have {objective.kind}"
            raise flag_error("algorithm", name, text)
        if method.loss != "auto" and not factories.takes(factories.algorithm(name), "loss"):
            raise flag_error("algorithm", name, "has a loss of its own, must stand without --loss")
        if facts.means_of_targets and not (objective.is_default or objective.loss_of_means):
            text = "needs a loss that takes means of classes, such as cross_entropy"
            raise flag_error("algorithm", name, text)


def facts(config: Config, name: str) -> Facts:
    """The facts of an algorithm; with --pooled it trains on all examples at once."""
    known = factories.facts(name)
    return known._replace(pooled=known.pooled or config.partition.pooled)


def weighting(config: Config, name: str, settings: Mapping[str, Any]) -> str:
    """How clients weigh in an algorithm's mean: "size", "uniform", or "own", a rule of its own."""
    if facts(config, name).pooled:
        return "size"
    of_factory = factories.signature(factories.algorithm(name)).parameters.get("weighting")
    chosen = settings.get("weighting", of_factory and of_factory.default)
    return chosen if chosen in ("size", "uniform") else "own"


def is_pooled(config: Config) -> bool:
    """Whether all algorithms train on all examples at once."""
    return all(facts(config, name).pooled for name in config.method.algorithm)


def settings(method: Method) -> dict[str, dict[str, tuple[Any, ...]]]:
    """The --set flags of each algorithm: name -> values, in the type of the factory's argument.

    A setting applies to every algorithm that has its name; at least one algorithm must have it.
    """
    known = {name: factories.hyperparameters(name) for name in method.algorithm}
    result: dict[str, dict[str, tuple[Any, ...]]] = {name: {} for name in method.algorithm}
    for entry in method.set:
        name, _, text = entry.partition("=")
        owners = [algorithm for algorithm, kinds in known.items() if name in kinds]
        if not owners:
            # A text cannot set an argument without types.
            every = itertools.chain.from_iterable(kinds.items() for kinds in known.values())
            others = sorted({setting for setting, kinds in every if {*kinds} - {type(None)}})
            have = near(name, others) if others else "there are no settings"
            raise flag_error("set", entry, f"{', '.join(known)} has no {name}; {have}")
        for algorithm in owners:
            kinds = known[algorithm][name]
            values = tuple(factories.parsed("set", entry, word, kinds) for word in text.split(","))
            may_be_infinite = name in factories.facts(algorithm).infinite
            if not (may_be_infinite or all(map(checks.is_finite, values))):
                raise flag_error("set", entry, "must be a finite number")
            if len({*values}) < len(values):
                raise flag_error("set", entry, "must be one or several different values")
            result[algorithm][name] = values
    return result


def setting_flags(name: str) -> dict[str, str]:
    """The flag of each argument of an algorithm's factory, for `errors.in_flags`."""
    return {argument: f"set={argument}" for argument in factories.hyperparameters(name)}


# (network, local training) -> the algorithm with hyperparameters of a run, as `fit` takes it
Factory = Callable[..., Algorithm]


def factory(
    config: Config, name: str, settings: Mapping[str, Any], objective: Objective
) -> Factory:
    """The factory of an algorithm with settings: (model, work, **hyperparameters).

    It raises UsageError for a value out of range.
    """
    participation = config.participation
    training = config.training
    trained = config.network.train_only

    def algorithm(model: Model, work: Work, **hyper: Any) -> Algorithm:
        arguments = {**settings, **hyper}
        # Of classes the algorithm's own loss is that of the data.
        own = objective
        loss = arguments.pop("loss", None)
        if objective.kind == "values" and loss is not None:  # of standardised targets
            own = dataclasses.replace(objective, loss=loss, loss_of_means=loss)
        server_rate = arguments.pop("server_learning_rate", None)
        if server_rate is not None:
            server_optimizer = optimizer(training, "server_optimizer", server_rate)
            arguments["server_optimizer"] = server_optimizer

        def of_network(model: Model) -> Algorithm:
            return _called(name, model, work, own, arguments)

        plain = freezing.train_only(of_network, model, trained) if trained else of_network(model)
        plain = aggregation.wrapped(config, name, plain)
        if training.average:
            first = training.average_from - 1
            plain = weight_averages.averaged(plain, decay=training.average, first=first)
        return with_rule(participation, name, plain)

    algorithm.FACTS = facts(config, name)  # type: ignore[attr-defined]
    return algorithm


def _called(
    name: str, model: Model, work: Work, objective: Objective, arguments: Mapping[str, Any]
) -> Algorithm:
    """What an algorithm's factory returns for these arguments and those that the data decide."""
    make = factories.algorithm(name)
    arguments = dict(arguments)
    if not objective.is_default and factories.takes(make, "loss"):
        means = factories.facts(name).means_of_targets
        arguments["loss"] = objective.loss_of_means if means else objective.loss
    if model.mixable is not None and factories.takes(make, "mixable"):
        arguments["mixable"] = model.mixable
    if factories.facts(name).needs_domains:
        arguments["num_domains"] = objective.num_domains
    flags = setting_flags(name)
    return factories.called("algorithm", name, flags, Algorithm, make, model, work, **arguments)


def of_any_size(
    make: Factory, training: Training, model: Model, hyper: Mapping[str, float]
) -> Algorithm:
    """The algorithm of a run, whose local training fits clients of any size.

    Raises UsageError for a value out of range.
    """
    own = {name: value for name, value in hyper.items() if name not in LOCAL}
    local = {name: value for name, value in hyper.items() if name in LOCAL}
    work = LocalTraining(**local_steps(training)).work(local_values(training) | local)
    return make(model, work, **own)


# lbfgs needs values of the loss, noisy_sgd draws the same noise for all clients, and
# optimistic_adam is deprecated.
_WITHOUT = ("lbfgs", "noisy_sgd", "optimistic_adam")


def _is_optimizer(name: str, make: Any) -> bool:
    if name.startswith(("_", "scale_by_")) or name in _WITHOUT or not inspect.isfunction(make):
        return False
    parameters = [*inspect.signature(make).parameters.values()]
    is_of_a_rate = bool(parameters) and parameters[0].name == "learning_rate"
    return is_of_a_rate and all(p.default is not p.empty for p in parameters[1:])


# Those of optax that need only a learning rate and a gradient.
OPTIMIZERS = sorted(name for name, make in vars(optax).items() if _is_optimizer(name, make))

# Arguments with their own flag: flag that names the optimizer -> optimizer -> argument -> flag.
_OWN_FLAGS: Mapping[str, Mapping[str, Mapping[str, str]]] = {
    "optimizer": {"sgd": {"momentum": "momentum"}},
    "server_optimizer": {
        "sgd": {"momentum": "server_momentum"},
        "adam": {"eps": "server_epsilon"},
        "yogi": {"eps": "server_epsilon"},
    },
}


def optimizer_arguments(training: Training, flag: str) -> dict[str, Any]:
    """The arguments of an optimizer besides the learning rate.

    flag: the flag that names the optimizer, "optimizer" or "server_optimizer".
    """
    name = getattr(training, flag)
    check_known(flag, name, OPTIMIZERS)
    own = _OWN_FLAGS[flag].get(name, {})
    found = {argument: getattr(training, other) or None for argument, other in own.items()}
    if flag == "server_optimizer":  # b2: Reddi et al. 2021, Section 5, not optax's default
        return found | ({"b2": 0.99} if name in ("adam", "yogi") else {})
    kinds = {
        p.name: (float, type(None)) if p.default is None else (type(p.default),)
        for p in inspect.signature(getattr(optax, name)).parameters.values()
        if not (p.default is p.empty or p.name in own or "mask" in p.name or "dtype" in p.name)
    }
    for entry in training.optimizer_set:
        argument, _, text = entry.partition("=")
        if argument not in kinds:
            text = f"{name} has no {argument} to be set here; {near(argument, kinds)}"
            raise flag_error("optimizer_set", entry, text)
        value = factories.parsed("optimizer_set", entry, text, kinds[argument])
        if not np.isfinite(value or 0):
            raise flag_error("optimizer_set", entry, "must be finite")
        found[argument] = value
    return found


def optimizer(training: Training, flag: str, rate: float | Array) -> optax.GradientTransformation:
    """The optimizer that a flag names, as in `optimizer_arguments`."""
    make = getattr(optax, getattr(training, flag))
    return make(rate, **optimizer_arguments(training, flag))


def local_steps(training: Training) -> dict[str, Any]:
    """Which steps a client takes in a round, as arguments of `fit`."""
    make = getattr(optax, training.optimizer)
    own = optimizer_arguments(training, "optimizer")
    own.pop("momentum", None)  # is a value of local training
    return {
        "optimizer": functools.partial(make, **own) if own else make,
        "batch_size": training.batch_size or None,
        "epochs": training.local_epochs,
        "steps": training.local_steps or None,
    }


def local_values(training: Training) -> dict[str, float]:
    """The values of local training besides the learning rate, as arguments of `fit`."""
    momentum = training.momentum if training.optimizer == "sgd" else 0.0
    return {"momentum": momentum, "weight_decay": training.weight_decay, "clip": training.clip}


def local_training(training: Training) -> dict[str, Any]:
    """Both, and the schedule of the learning rate."""
    factor = rate_schedule(training)
    more = {} if factor is None else {"learning_rate_schedule": factor}
    return local_steps(training) | local_values(training) | more


def rate_schedule(training: Training) -> optax.Schedule | None:
    """The factor of the learning rate in round t = 0, 1, ...; None if it is always 1.

    In a warm-up of w rounds it is (t + 1) / (w + 1). After it, with s = t - w, that of a constant
    schedule is 1, and that of a cosine (1 + cos(pi min(s / (rounds - w), 1))) / 2.
    """
    warmup = training.warmup_rounds
    is_cosine = training.schedule == "cosine"
    rest = optax.constant_schedule(1.0)
    if is_cosine:
        rest = optax.cosine_decay_schedule(1.0, training.rounds - warmup)
    if not warmup:
        return rest if is_cosine else None
    rising = optax.linear_schedule(1 / (warmup + 1), 1.0, warmup)
    return optax.join_schedules([rising, rest], [warmup])


# The clients that take part in a round, and which of their updates arrive.


def slots(participation: Participation, num_clients: int) -> int:
    """The number of clients drawn in a round.

    A single client always takes part, as it may hold the pooled examples of all.
    """
    cohort = participation.cohort
    rate = participation.sampling_rate
    if participation.sampling == "poisson":
        return num_clients
    if cohort or rate == 1 or num_clients == 1:
        return min(cohort or num_clients, num_clients)
    try:
        return schedules.cohort_size(num_clients, rate)
    except UsageError as error:
        raise in_flags(error, "", {"rate": "sampling_rate", "num_clients": "clients"}) from None


def check_clients(participation: Participation, rounds: int, num_clients: int) -> None:
    """Checks flags of participation against the number of rounds and of clients."""
    for name, count in (("cohort", participation.cohort), ("buffer", participation.buffer)):
        if count > num_clients:
            raise flag_error(name, count, f"must be at most the {num_clients} clients")
    for name, entries in (("slow", participation.slow), ("lossy", participation.lossy)):
        for entry in entries:
            if int(entry.partition(":")[0]) >= num_clients:
                raise flag_error(name, entry, f"must be of clients 0..{num_clients - 1}")
    if not _of_clients(participation.lossy, num_clients, 1.0).any():
        text = "lets no client's upload arrive; must be above 0 for one"
        raise flag_error("lossy", participation.lossy, text)
    needed = -(-num_clients // (participation.buffer or slots(participation, num_clients)))
    if participation.first_all and needed > rounds:
        raise flag_error("first_all", True, f"needs {needed} rounds, --rounds={rounds}")


def with_rule(participation: Participation, name: str, algorithm: Algorithm) -> Algorithm:
    """The algorithm with the rule of --missing. name: the algorithm's."""
    try:
        return late_uploads.with_rule(algorithm, participation.missing)
    except UsageError as error:
        where = f"--missing={participation.missing} --algorithm={name}"
        raise in_flags(error, where, {"algorithm": ""}) from None


class Cohorts:
    """(random key, number of clients, number of rounds) -> the cohorts [T, S], for `fit`."""

    def __init__(self, participation: Participation) -> None:
        self._participation = participation
        delays = [int(entry.partition(":")[2]) for entry in participation.slow]
        # How many broadcasts a run keeps, whatever is drawn.
        self.history = 1 + _STALE if participation.late == "stale" else max([1, *delays])
        self.has_empty_slots = participation.sampling == "poisson"

    def __call__(self, key: Array, num_clients: int, num_rounds: int) -> Cohort:
        participation = self._participation
        drawn = slots(participation, num_clients)
        seconds = _of_clients(participation.slow, num_clients, 1)
        if participation.buffer:
            draw = schedules.buffered(participation.buffer, drawn, seconds)
            cohort = draw(key, num_clients, num_rounds)
            # `fit` reads it after this call, as it depends on the number of clients.
            self.history = 1 + schedules.oldest(participation.buffer, drawn, seconds)
        elif participation.sampling == "poisson":
            cohort = schedules.poisson(participation.sampling_rate)(key, num_clients, num_rounds)
        elif drawn < num_clients:
            cohort = schedules.sampled(key, num_clients, drawn, num_rounds)
        else:
            cohort = schedules.everyone(num_clients, num_rounds)
        if participation.slow and not participation.buffer:
            cohort = schedules.slow(cohort, jnp.asarray(seconds))
        cohort = self._arriving(cohort, key, num_clients)
        return schedules.first_all(cohort, num_clients) if participation.first_all else cohort

    def _arriving(self, cohort: Cohort, key: Array, num_clients: int) -> Cohort:
        """The cohorts without the clients whose updates do not arrive in their round."""
        participation = self._participation
        frequency = self._participation.frequency
        if not (participation.lossy or participation.dropout or frequency < 1):
            return cohort
        arrives = _of_clients(participation.lossy, num_clients, 1.0) * (1 - participation.dropout)
        fails = jnp.asarray(1 - arrives)
        if frequency < 1:
            fails = 1 - jnp.asarray(arrives) * _arrival(key, num_clients, frequency)
        draw_key = keys.stream(key, "dropout")
        if participation.late == "stale":
            return schedules.stale(cohort, draw_key, fails, num_clients, longest=_STALE)
        return schedules.dropout(cohort, draw_key, fails)


def num_sparse(num_clients: int) -> int:
    """How many clients --frequency is for."""
    return round(_SPARSE * num_clients)


def is_sparse(num_clients: int, seed: int) -> np.ndarray:
    """[C] bool: which clients of a run are sparse, so that --frequency applies to them."""
    return np.asarray(_arrival(schedule_key(seed), num_clients, 0.5)) < 1


def _arrival(key: Array, num_clients: int, frequency: float) -> Array:
    """The probability [C] that each client's upload arrives. key: the key of the schedule."""
    draw_key = keys.stream(key, "sparse")
    return schedules.upload_probabilities(
        draw_key, num_clients, sparse=_SPARSE, frequency=frequency
    )


def _of_clients(entries: Sequence[str], num_clients: int, default: float) -> np.ndarray:
    """The values [C] of entries client:value, with a default for the other clients."""
    values = np.full(num_clients, default)
    for entry in entries:
        client, _, value = entry.partition(":")
        values[int(client)] = float(value)  # cast to the default's type
    return values
