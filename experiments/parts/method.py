"""The algorithms to compare, and their settings."""

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

from fedjax_inv import checks
from fedjax_inv.algorithms import LISTED
from fedjax_inv.types import Algorithm, Model, Work

from ..flags import names
from ..flags.configuration import Config
from ..flags.flag import (
    MOST_INT,
    Range,
    check_different,
    check_known,
    flag,
    flag_error,
    is_real,
)
from ..parts import network
from ..parts.objective import Task

_PAPER = Range(lambda value: is_real(value.partition("=")[2]), "algorithm=number")


@dataclasses.dataclass(frozen=True)
class Method:
    """The algorithms to compare."""

    algorithm: tuple[str, ...] = flag(
        ("fedavg",), f"Algorithms: {', '.join(LISTED)}, or package.module:factory."
    )
    settings: tuple[str, ...] = flag(
        (),
        "A setting of the algorithm, name=value or (sweep) name=value,value; repeat the flag for "
        "several. --describe=ALGORITHM lists the names. A later value replaces that of a preset; "
        "--set=name= takes it back, and --set= takes back all before it.",
        kind=str,
        name="set",
        repeats=True,
    )
    paper: tuple[str, ...] = flag(
        (), "Numbers to print beside ours: algorithm=number.", _PAPER, kind=str
    )


def is_pooled(chosen: Config) -> bool:
    """Whether all algorithms train on all examples at once."""
    return all(names.facts(name).pooled for name in chosen.algorithm)


def check(chosen: Config) -> None:
    """Raises UsageError for algorithms that are unknown or do not fit the network."""
    check_different("algorithm", chosen.algorithm)
    papers = [entry.partition("=")[0] for entry in chosen.paper]
    if len(set(papers)) < len(papers):
        raise flag_error("paper", chosen.paper, "must not name one twice")
    for name in chosen.algorithm:
        names.check_factory("algorithm", name, LISTED)
        if names.facts(name).needs_norm and not network.has_norm(chosen):
            raise flag_error(
                "algorithm", name, "needs --norm=batch, as the network has no normalisation layers"
            )


def check_task(chosen: Config, task: Task) -> None:
    """Raises UsageError for an algorithm that does not fit the targets or the loss."""
    for name in chosen.algorithm:
        facts, takes_loss = names.facts(name), names.takes(names.factory(name), "loss")
        if facts.needs_classes and task.kind != "classes":
            text = f"needs data with classes, these have {task.kind}"
            raise flag_error("algorithm", name, text)
        is_asked = chosen.loss != "auto" or (task.kind == "classes" and not task.is_default)
        if is_asked and not takes_loss:
            text = "has a loss of its own, must stand without --loss and --label_smoothing"
            raise flag_error("algorithm", name, text)
        if facts.means_of_targets and not (task.is_default or task.loss_of_means):
            text = "needs a loss that takes means of classes, such as cross_entropy"
            raise flag_error("algorithm", name, text)


def check_paper(chosen: Config, *, is_given: bool) -> None:
    """Raises UsageError if --paper has a number for an algorithm that is not run.

    is_given: whether --paper is set outside of presets; a preset may name any listed algorithm.
    """
    allowed = chosen.algorithm if is_given else (*chosen.algorithm, *LISTED)
    for entry in chosen.paper:
        name = entry.partition("=")[0]
        if name not in allowed:
            check_known("paper", name, allowed)


def settings(chosen: Config) -> dict[str, dict[str, tuple[Any, ...]]]:
    """The --set flags of each algorithm: name -> values, in the type of the factory's argument.

    A setting applies to every algorithm that has its name; at least one algorithm must have it.
    """
    known = {name: names.hyperparameters(name) for name in chosen.algorithm}
    result: dict[str, dict[str, tuple[Any, ...]]] = {name: {} for name in chosen.algorithm}
    for entry in chosen.settings:
        name, equals, text = entry.partition("=")
        if not (name and equals and text):
            raise flag_error("set", entry, "must be name=value, or name=value,value")
        if not any(name in kinds_of for kinds_of in known.values()):
            every = itertools.chain.from_iterable(kinds_of.items() for kinds_of in known.values())
            # A text cannot set an argument without types.
            others = sorted({each for each, kinds in every if set(kinds) - {type(None)}})
            raise flag_error("set", entry, names.unknown_setting([*known], name, others))
        for algorithm, kinds_of in known.items():
            if name in kinds_of:
                kinds = kinds_of[name]
                values = tuple(
                    names.parsed("set", entry, value, kinds) for value in text.split(",")
                )
                may_be_infinite = name in names.facts(algorithm).infinite
                if not may_be_infinite and not all(map(checks.is_finite, values)):
                    raise flag_error("set", entry, "must be a finite number")
                if len(set(values)) < len(values):
                    raise flag_error("set", entry, "must be one or several different values")
                result[algorithm][name] = values
    return result


def check_settings(chosen: Mapping[str, Any]) -> None:
    """Raises UsageError for an integer beyond int32."""
    for name, value in chosen.items():
        if isinstance(value, int) and abs(value) >= MOST_INT:
            raise flag_error("set", f"{name}={value}", "must be below 2^31")


def setting_flags(name: str) -> dict[str, str]:
    """The flag of each argument of an algorithm's factory, for `flag.in_flags`."""
    return {argument: f"set={argument}" for argument in names.hyperparameters(name)}


def algorithm(
    name: str, model: Model, work: Work, task: Task, arguments: Mapping[str, Any]
) -> Algorithm:
    """An algorithm. arguments: of its factory, by name. Raises UsageError if they are refused."""
    factory, arguments = names.factory(name), dict(arguments)
    if not task.is_default and names.takes(factory, "loss"):
        means = names.facts(name).means_of_targets
        arguments["loss"] = task.loss_of_means if means else task.loss
    if model.mixable is not None and names.takes(factory, "mixable"):
        arguments["mixable"] = model.mixable
    flags = {"optimizer": "optimizer"} | setting_flags(name)
    return names.called("algorithm", name, flags, Algorithm, factory, model, work, **arguments)
