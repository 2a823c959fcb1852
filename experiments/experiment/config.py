"""All flags of an experiment, as checked groups. `command_line` reads command lines.

`of` makes a `Config` from flags by name; `flat` is its inverse. Each group is a record in parts/.
"""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from ..flags import outside
from ..flags.flag import check as check_ranges
from ..flags.flag import flag_error, flags_of
from ..parts import (
    data,
    environment,
    environments,
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


@dataclasses.dataclass(frozen=True)
class Config:
    """All flags of an experiment. Call `of` to make one."""

    method: Method
    objective: Objective
    data: Data
    environment: Environment
    partition: Partition
    clients: Clients
    server: Server
    model: Network
    participation: Participation
    watching: Watching
    run: Running

    @property
    def title(self) -> str:
        """The name of the data and of their domains, for figures and tables."""
        domains = f", {self.environment.name} domains" if self.environment.is_drawn else ""
        return f"{self.data.stem}{domains}"

    @property
    def schedule_end(self) -> int:
        """The round in which a cosine schedule of the learning rate ends; 0 without one."""
        is_cosine = self.clients.schedule == "cosine"
        return (self.clients.schedule_rounds or self.run.rounds) if is_cosine else 0

    @property
    def outside(self) -> tuple[str, ...]:
        """The algorithms, the network, the loss and the score from outside of this project."""
        return self.outside_of(*self.method.algorithm)

    def outside_of(self, *algorithms: str) -> tuple[str, ...]:
        """Those of them that runs of some algorithms have."""
        named = (*algorithms, self.model.model, self.objective.loss, self.objective.score)
        return tuple(filter(outside.is_outside, named))


# The record of each field of Config.
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


def of(*, given: Collection[str] | None = None, **values: Any) -> Config:
    """The configuration with these values of flags, by their fields' names, and defaults otherwise.

    given: the flags that a person set, even to their default; by default those of `values`. Others
        never contradict these: --eval_every follows --rounds.

    Raises UsageError for a bad value.
    """
    for name in values:
        if name not in FLAGS:
            raise TypeError(f"{name} is no flag")

    def record(kind: type[Any], **others: Any) -> Any:
        own = [field.name for field in flags_of(kind)]
        result = kind(**{name: values[name] for name in own if name in values}, **others)
        check_ranges(result)
        return result

    groups = {name: record(kind) for name, kind in GROUPS.items() if name != "environment"}
    asked = record(Environment).environment
    kind = environment.name_of(asked, is_path=groups["data"].is_path)
    records = tuple(record(each) for each in environments.LISTED[kind].records)
    groups["environment"] = record(Environment, name=kind, records=records)
    if "eval_every" not in (values if given is None else given):
        run = groups["run"]
        groups["watching"] = watching.following(
            groups["watching"], run.rounds, run.checkpoint_every
        )
    config = Config(**groups)
    _check(config)
    method.check_paper(config.method, is_given="paper" in (given or ()))
    return config


def flat(config: Config) -> dict[str, Any]:
    """The flags by their fields' names: the arguments of `of`."""
    groups = [getattr(config, group) for group in GROUPS]
    values = {
        field.name: getattr(record, field.name)
        for record in (*groups, *config.environment.records)
        for field in flags_of(record)
    }
    return {name: values.get(name, field.default) for name, field in FLAGS.items()}


def changed(config: Config, **values: Any) -> Config:
    """The configuration with other values of some flags."""
    return of(**(flat(config) | values))


def to_record(config: Config) -> dict[str, Any]:
    """The flags as a run folder stores them; the environment is never "auto"."""
    return flat(config) | {"environment": config.environment.name}


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
    watching.check(config.watching, config.run.rounds)
    data.check(config.data)
    participation.check(config.participation, config.partition.clients)
    training.check(config.clients)
    server.check(config.server)
    _check_warmup(config)
    machine.check(config.run, config.watching.eval_every)
    network.check(config.model)
    objective.check(config.objective)
    method.check(config.method, has_norm=config.model.has_norm)


def _check_warmup(config: Config) -> None:
    """Raises UsageError for a warm-up that does not end before its cosine schedule."""
    rounds, end = config.clients.warmup_rounds, config.schedule_end
    if end and rounds >= end:
        name = "schedule_rounds" if config.clients.schedule_rounds else "rounds"
        raise flag_error("warmup_rounds", rounds, f"must be below --{name}={end}, the cosine's end")
