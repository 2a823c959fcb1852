"""Flags, flat as users and run folders have them, made into checked groups and back.

`of` sorts flags into the records of `groups`, `flat` is its inverse. Nothing here knows of command
lines (`command_line`).
"""

import dataclasses
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from experiments.experiment.effects import idle
from experiments.experiment.groups import FLAGS, GROUPS, Config, Environment, Participation, Running
from experiments.flags import names as registry
from experiments.flags.flag import (
    check,
    check_different,
    check_known,
    flags_of,
    is_whole,
    name_of,
    shown,
)
from experiments.parts import environments, optimizers
from fedjax_inv.algorithms import LISTED
from fedjax_inv.checks import UsageError
from fedjax_inv.data import sources


def of(*, given: Collection[str] = (), may_be_idle: bool = False, **values: Any) -> Config:
    """The configuration of flags by their fields' names; what is left out has its default.

    given: those whose default was asked for in so many words. Raises UsageError, in one line, for a
    bad value, and unless may_be_idle for a flag that was set and has no effect (`idle`).
    """
    for name in values:
        if name not in FLAGS:
            raise TypeError(f"{name} is no flag")

    def record(kind: type[Any], **more: Any) -> Any:
        own = [field.name for field in flags_of(kind)]
        made = kind(**{name: values[name] for name in own if name in values}, **more)
        check(made)
        return made

    groups = {name: record(kind) for name, kind in GROUPS.items() if name != "environment"}
    asked = record(Environment)
    name = asked.environment
    if name == "auto":
        name = "none" if _is_own(groups["data"].dataset) else "rotated"
    records = tuple(record(kind) for kind in environments.LISTED[name].records)
    domains = dataclasses.replace(asked, name=name, records=records)
    config = Config(**groups, environment=domains)
    _check(config)
    _check_paper(config, "paper" in given)
    if not may_be_idle:
        for name, reason in idle(config, values, given).items():
            raise UsageError(f"--{name_of(FLAGS[name])}={shown(values[name])}: {reason}")
    return config


def flat(config: Config) -> dict[str, Any]:
    """The flags by their fields' names: what `of` takes."""
    groups = [getattr(config, group) for group in GROUPS]
    values = {
        field.name: getattr(record, field.name)
        for record in (*groups, *config.environment.records)
        for field in flags_of(record)
    }
    return {name: values.get(name, field.default) for name, field in FLAGS.items()}


def changed(config: Config, **values: Any) -> Config:
    """The configuration with other values of some flags."""
    return of(may_be_idle=True, **(flat(config) | values))


def to_record(config: Config) -> dict[str, Any]:
    """The flags as a run folder holds them; auto is told by what it stood for."""
    return flat(config) | {"environment": config.environment.name}


def from_record(record: Mapping[str, Any]) -> Config:
    """The configuration that a run folder holds; flags that came later have their defaults.

    Raises UsageError for a flag that is no more.
    """
    unknown = set(record) - set(FLAGS)
    if unknown:
        raise UsageError(f"was written by another version, with {', '.join(sorted(unknown))}")

    def value(name: str, told: Any) -> Any:
        kind = FLAGS[name].metadata["kind"]
        if isinstance(told, list):  # json knows no tuples
            return tuple(map(kind, told))
        return kind(told)

    return of(may_be_idle=True, **{name: value(name, told) for name, told in record.items()})


def _is_own(dataset: str) -> bool:
    """Whether a data set is a path: a file or a folder."""
    path = Path(dataset).expanduser()
    return path.suffix in (".npz", ".csv", ".json") or (
        dataset not in sources.NEEDS_NO_FILE and os.path.isdir(path)
    )


def _check(config: Config) -> None:
    """Raises UsageError for flags that do not fit each other."""
    method, clients, watching, run = config.method, config.clients, config.watching, config.run
    check_different("algorithm", method.algorithm)
    check_different("learning_rate", clients.learning_rate)
    check_different("server_learning_rate", config.server.server_learning_rate)
    check_different("seeds", run.seeds)
    for name in ("stop_below", "stop_above"):
        thresholds = getattr(watching, name)
        check_different(name, thresholds, may_be_empty=True)
        if thresholds and not watching.watch_examples:
            raise UsageError(f"--{name}={shown(thresholds)}: needs --watch_examples above 0")
    if watching.stop_below and watching.stop_above:
        raise UsageError(
            f"--stop_above={shown(watching.stop_above)}: must not stand beside "
            f"--stop_below={shown(watching.stop_below)}"
        )
    check_different("held_out", config.data.held_out.split(","))
    named = [entry.partition("=")[0] for entry in method.paper]
    if len(set(named)) < len(named):
        raise UsageError(f"--paper={shown(method.paper)}: must not name one twice")
    cohort, num_clients = config.participation.cohort, config.partition.clients
    if num_clients and cohort > num_clients:
        raise UsageError(f"--cohort={cohort}: must be at most --clients={num_clients}")
    _check_participation(config.participation)
    _check_rates(config)
    if watching.eval_every > run.rounds:
        raise UsageError(
            f"--eval_every={watching.eval_every}: must be at most --rounds={run.rounds}"
        )
    if run.checkpoint_every % watching.eval_every:
        raise UsageError(
            f"--checkpoint_every={run.checkpoint_every}: must be a multiple of "
            f"--eval_every={watching.eval_every}"
        )
    registry.check_factory("model", config.model.model, registry.MODELS)
    for name in method.algorithm:
        registry.check_factory("algorithm", name, LISTED)
        is_bare = config.model.norm == "none" and config.model.model in registry.WITHOUT_NORM
        if registry.facts(name).needs_norm and is_bare:
            raise UsageError(f"--algorithm={name}: needs --norm=batch, to be what it is")
    _check_processes(run)


def _check_participation(chosen: Participation) -> None:
    delay, slow = chosen.delay, ",".join(chosen.slow)
    is_delayed = ":" in delay or int(delay) > 0
    if chosen.late == "stale":
        told = "must be left out with --late=stale, which sets all delays"
        if slow:
            raise UsageError(f"--slow={slow}: {told}")
        if is_delayed:
            raise UsageError(f"--delay={delay}: {told}")
    if slow:
        told = f"must be left out with --slow={slow}, which says when and how late clients upload"
        if is_delayed:
            raise UsageError(f"--delay={delay}: {told}")
        if chosen.upload_every:
            raise UsageError(f"--upload_every={','.join(chosen.upload_every)}: {told}")
    for name in ("slow", "lossy", "upload_every"):
        entries = getattr(chosen, name)
        who = [entry.rpartition(":")[0] for entry in entries]
        if len(set(who)) < len(who):
            raise UsageError(f"--{name}={','.join(entries)}: must tell each client one value")


def _check_rates(config: Config) -> None:
    clients, server, end = config.clients, config.server, config.schedules_end
    optimizers.arguments(clients, "optimizer")
    optimizers.arguments(server, "server_optimizer")
    for flag, kind, rounds in (
        ("warmup_rounds", clients.schedule, clients.warmup_rounds),
        ("server_warmup_rounds", server.server_schedule, server.server_warmup_rounds),
    ):
        if kind == "cosine" and rounds >= end:
            of = "schedule_rounds" if clients.schedule_rounds else "rounds"
            raise UsageError(f"--{flag}={rounds}: must be below --{of}={end}, the cosine's end")


def _check_processes(run: Running) -> None:
    if run.process_id >= run.num_processes:
        raise UsageError(
            f"--process_id={run.process_id}: must be below --num_processes={run.num_processes}"
        )
    if run.num_processes == 1:
        return
    address = run.coordinator_address
    host, _, port = address.rpartition(":")
    if not (host and is_whole(port, 1) and int(port) < 2**16) or " " in address:
        raise UsageError(f"--coordinator_address={address}: must be host:port of process 0")
    for name in ("client_chunk", "run_chunk"):
        if not getattr(run, name).isdecimal():
            raise UsageError(
                f"--{name}={getattr(run, name)}: must be a number with --num_processes="
                f"{run.num_processes}, as processes may disagree"
            )


def _check_paper(config: Config, is_given: bool) -> None:
    """Raises UsageError for a number of an algorithm that is not run; a preset's may be of any."""
    for entry in config.method.paper:
        allowed = config.method.algorithm if is_given else (*config.method.algorithm, *LISTED)
        name = entry.partition("=")[0]
        if name not in allowed:
            check_known("paper", name, allowed)
