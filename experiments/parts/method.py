"""The algorithms to compare, and their settings."""

import itertools
from collections.abc import Mapping
from typing import Any

from fedjax_inv import checks
from fedjax_inv.algorithms import LISTED
from fedjax_inv.types import Algorithm, Model, Work

from .. import factories
from ..config import Config
from ..errors import check_known, flag_error, near
from ..parts import network
from ..parts.objective import Task


def is_pooled(chosen: Config) -> bool:
    """Whether all algorithms train on all examples at once."""
    return all(factories.facts(name).pooled for name in chosen.algorithm)


def check(chosen: Config) -> None:
    """Raises UsageError for algorithms that are unknown or do not fit the network."""
    for entry in chosen.paper:
        check_known("paper", entry.partition("=")[0], {*chosen.algorithm, *LISTED})
    for name in chosen.algorithm:
        factories.check_factory("algorithm", name, LISTED)
        if factories.facts(name).needs_norm and not network.has_norm(chosen):
            raise flag_error(
                "algorithm", name, "needs --norm=batch, as the network has no normalisation layers"
            )


def check_task(chosen: Config, task: Task) -> None:
    """Raises UsageError for an algorithm that does not fit the targets or the loss."""
    for name in chosen.algorithm:
        facts, takes_loss = (
            factories.facts(name),
            factories.takes(factories.algorithm(name), "loss"),
        )
        if facts.needs_classes and task.kind != "classes":
            text = f"needs data with classes, these have {task.kind}"
            raise flag_error("algorithm", name, text)
        if chosen.loss != "auto" and not takes_loss:
            text = "has a loss of its own, must stand without --loss"
            raise flag_error("algorithm", name, text)
        if facts.means_of_targets and not (task.is_default or task.loss_of_means):
            text = "needs a loss that takes means of classes, such as cross_entropy"
            raise flag_error("algorithm", name, text)


def settings(chosen: Config) -> dict[str, dict[str, tuple[Any, ...]]]:
    """The --set flags of each algorithm: name -> values, in the type of the factory's argument.

    A setting applies to every algorithm that has its name; at least one algorithm must have it.
    """
    known = {name: factories.hyperparameters(name) for name in chosen.algorithm}
    result: dict[str, dict[str, tuple[Any, ...]]] = {name: {} for name in chosen.algorithm}
    for entry in chosen.set:
        name, equals, text = entry.partition("=")
        if not (name and equals and text):
            raise flag_error("set", entry, "must be name=value, or name=value,value")
        if not any(name in kinds_of for kinds_of in known.values()):
            every = itertools.chain.from_iterable(kinds_of.items() for kinds_of in known.values())
            # A text cannot set an argument without types.
            others = sorted({each for each, kinds in every if set(kinds) - {type(None)}})
            if not others:
                raise flag_error("set", entry, f"{', '.join(known)} takes no settings")
            raise flag_error(
                "set", entry, f"{', '.join(known)} has no {name}; {near(name, others)}"
            )
        for algorithm, kinds_of in known.items():
            if name in kinds_of:
                kinds = kinds_of[name]
                values = tuple(
                    factories.parsed("set", entry, value, kinds) for value in text.split(",")
                )
                may_be_infinite = name in factories.facts(algorithm).infinite
                if not may_be_infinite and not all(map(checks.is_finite, values)):
                    raise flag_error("set", entry, "must be a finite number")
                if len(set(values)) < len(values):
                    raise flag_error("set", entry, "must be one or several different values")
                result[algorithm][name] = values
    return result


def setting_flags(name: str) -> dict[str, str]:
    """The flag of each argument of an algorithm's factory, for `flag.in_flags`."""
    return {argument: f"set={argument}" for argument in factories.hyperparameters(name)}


def algorithm(
    name: str, model: Model, work: Work, task: Task, arguments: Mapping[str, Any]
) -> Algorithm:
    """An algorithm. arguments: of its factory, by name. Raises UsageError if they are refused."""
    factory, arguments = factories.algorithm(name), dict(arguments)
    if not task.is_default and factories.takes(factory, "loss"):
        means = factories.facts(name).means_of_targets
        arguments["loss"] = task.loss_of_means if means else task.loss
    if model.mixable is not None and factories.takes(factory, "mixable"):
        arguments["mixable"] = model.mixable
    flags = {"optimizer": "optimizer"} | setting_flags(name)
    return factories.called("algorithm", name, flags, Algorithm, factory, model, work, **arguments)
