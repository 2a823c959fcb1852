"""All flags of an experiment, as checked groups. `command_line` reads command lines.

`of` makes a `Config` from flags by name; `flat` is its inverse. Each group is a record in parts/.
"""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from ..flags.configuration import Config
from ..flags.flag import check_range, flag_error, flags_of
from ..parts import (
    data,
    environment,
    machine,
    method,
    network,
    objective,
    participation,
    server,
    training,
    watching,
)
from ..parts.data import Data
from ..parts.environment import Environment
from ..parts.machine import Running
from ..parts.method import Method
from ..parts.network import Network
from ..parts.objective import Objective
from ..parts.participation import Participation
from ..parts.partition import Partition
from ..parts.server import Server
from ..parts.training import Clients
from ..parts.watching import Watching

# The records that declare the flags, in the order of --help.
GROUPS: dict[str, type[Any]] = {
    "method": Method,
    "objective": Objective,
    "data": Data,
    "environment": Environment,
    "partition": Partition,
    "clients": Clients,
    "server": Server,
    "model": Network,
    "participation": Participation,
    "watching": Watching,
    "run": Running,
}


def fields(group: str) -> list[dataclasses.Field[Any]]:
    """The flags of a group; the flags of all environments belong to "environment"."""
    records = [GROUPS[group], *(environment.RECORDS if group == "environment" else ())]
    return [field for record in records for field in flags_of(record)]


# All flags, by their fields' names.
FLAGS = {field.name: field for group in GROUPS for field in fields(group)}


def names_of(group: str) -> list[str]:
    """The fields' names of a group's flags."""
    return [field.name for field in fields(group)]


def of(*, given: Collection[str] | None = None, **values: Any) -> Config:
    """The configuration with these values of flags, by their fields' names, and defaults otherwise.

    given: the flags that a person set, even to their default; by default those of `values`. Others
        never contradict these: --eval_every follows --rounds.

    Raises UsageError for a bad value.
    """
    for name in values:
        if name not in FLAGS:
            raise TypeError(f"{name} is no flag")
    config = Config(**{name: values.get(name, field.default) for name, field in FLAGS.items()})
    for name, field in FLAGS.items():
        check_range(field, getattr(config, name))
    if "eval_every" not in (values if given is None else given):
        config = config.unchecked(eval_every=watching.following(config))
    _check(config)
    method.check_paper(config, is_given="paper" in (given or ()))
    return config


def flat(config: Config) -> dict[str, Any]:
    """The flags by their fields' names: the arguments of `of`."""
    return dict(vars(config))


def changed(config: Config, **values: Any) -> Config:
    """The configuration with other values of some flags."""
    return of(**(flat(config) | values))


def to_record(config: Config) -> dict[str, Any]:
    """The flags as a run folder stores them; the environment is never "auto"."""
    return flat(config) | {"environment": config.environment_name}


def from_record(record: Mapping[str, Any]) -> Config:
    """The configuration that a run folder stores; missing flags have their defaults.

    Raises KeyError, TypeError or ValueError for what is no flag, or a value of another type.
    """
    values = {}
    for name, value in record.items():
        field = FLAGS[name]
        is_list, kind = isinstance(field.default, tuple), field.metadata["kind"]
        if isinstance(value, list) != is_list:
            raise TypeError(f"{name} is {value!r}")
        values[name] = tuple(map(kind, value)) if is_list else kind(value)
    return of(**values)


def _check(config: Config) -> None:
    """Raises UsageError for flags that contradict each other."""
    for part in (watching, data, participation, training, server):
        part.check(config)
    _check_warmup(config)
    for part in (machine, network, objective, method):
        part.check(config)


def _check_warmup(config: Config) -> None:
    """Raises UsageError for a warm-up that does not end before its cosine schedule."""
    rounds, end = config.warmup_rounds, config.schedule_end
    if end and rounds >= end:
        name = "schedule_rounds" if config.schedule_rounds else "rounds"
        raise flag_error("warmup_rounds", rounds, f"must be below --{name}={end}, the cosine's end")
