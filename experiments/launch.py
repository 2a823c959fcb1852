"""What both binaries do: flags -> build -> run -> write."""

import contextlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jax
from absl import app, logging

from experiments import build, config, devices, loop, report, tune
from fedjax_inv import program
from fedjax_inv.data import federation
from fedjax_inv.data.dataset import Dataset
from fedjax_inv.data.federation import Split
from fedjax_inv.types import Examples, Model


def settings() -> config.Config:
    """The flags of train and sweep, with the devices that they ask for."""
    parsed = config.read()
    devices.prepare(parsed)
    return parsed


def main(binary: Callable[[Any], str], read: Callable[[], Any] = settings) -> None:
    """Prints what binary(read()) returns: presets expanded, errors told in one line."""
    # Compiled programs outlive the process, so that a second start does not compile again.
    cache = os.environ.get("JAX_COMPILATION_CACHE_DIR", "~/.cache/fedjax_inv")
    jax.config.update("jax_compilation_cache_dir", os.path.expanduser(cache))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)

    def run(argv: list[str]) -> None:
        del argv
        logging.set_verbosity(logging.WARNING)  # orbax tells of every file it writes
        with errors_in_one_line():
            print(binary(read()))

    def parse(argv: list[str]) -> list[str]:
        with errors_in_one_line():
            config.parse(argv)
        return argv

    app.run(run, flags_parser=parse)


@contextlib.contextmanager
def errors_in_one_line() -> Iterator[None]:
    """Ends the process with a line on stderr: bad input with status 2, a run that diverged with 3.

    A ValueError from elsewhere is a defect, which needs its traceback.
    """
    try:
        yield
    except ValueError as error:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        # The package, as the binary's own module is called __main__.
        package = (frame.f_globals["__package__"] or "").split(".")[0]
        if package not in ("fedjax_inv", "experiments"):
            raise
        _fail(str(error), 2)
    except loop.Diverged as error:
        _fail(str(error), 3)


def _fail(message: str, status: int) -> NoReturn:
    print(f"error: {' '.join(message.splitlines())}", file=sys.stderr)
    sys.exit(status)


def run(
    settings: config.Config,
    folder: Path,
    cells: Callable[[Dataset], list[build.Cell]],
    place: Callable[[build.Cell], Path],
) -> str:
    """Runs the cells that are not finished, writes the report, and returns what to print of it.

    cells: dataset -> the cells. place: the run folder of a cell. Raises ValueError, before any
    compute, where the flags do not fit the data or the folders.
    """
    devices.connect(settings)
    dataset = build.dataset(settings)
    network = build.model(settings, dataset)
    todo = cells(dataset)
    results = {cell.name: loop.finished(settings, cell, place(cell)) for cell in todo}
    mesh = devices.mesh(settings)
    for cell in todo:  # an impossible hyperparameter shows here, at no cost
        for run in cell.runs:
            build.algorithm(settings, cell, network, run.hyper, capacity=1)
    data, splits = deal(settings, dataset, [cell.held_out for cell in todo])
    data = devices.replicated(data, mesh)
    programs = _Programs(settings, data)
    devices.agree(0)  # nobody writes before all have looked
    with loop.Stop() as stop:
        for cell in todo:
            if results[cell.name] is not None:
                continue
            ready = prepare(settings, cell, network, splits[cell.held_out])
            ready = ready._replace(inputs=devices.replicated(ready.inputs, mesh))
            made = programs.of(cell, ready, place(cell))
            try:
                job = loop.Job(settings, cell, made, data, ready.inputs, ready.groups)
                results[cell.name] = loop.run_cell(job, place(cell), stop)
            except loop.Stopped as stopped:
                print(f"{place(cell)}: {stopped}; add --resume to continue", file=sys.stderr)
                sys.exit(128 + stop.signal)
    if not devices.leads():
        return ""
    done = [results[cell.name] or {} for cell in todo]
    first = splits[todo[0].held_out][settings.seeds[0]]
    return _report(settings, folder, dataset, first, todo, place, done)


class Prepared(NamedTuple):
    """A cell that is ready to be compiled."""

    experiment: program.Experiment
    inputs: program.Inputs
    groups: list[str]  # names of the validation groups
    capacity: int  # the most examples that a client has, about


def prepare(
    settings: config.Config, cell: build.Cell, network: Model, splits: Mapping[int, Split]
) -> Prepared:
    """What a cell's runs work on, and what they have in common. splits: by seed."""
    inputs = build.inputs(settings, cell, splits)
    groups = program.group_names(splits[cell.runs[0].seed])
    capacity = build.capacity(inputs)
    experiment = build.experiment(settings, cell, network, len(groups), capacity)
    return Prepared(experiment, inputs, groups, capacity)


class _Programs:
    """The programs of the cells: cells that differ in the held-out domain share one."""

    def __init__(self, settings: config.Config, data: Examples) -> None:
        self._settings, self._data = settings, data
        self._chosen: dict[str, tune.Chunks] = {}
        self._made: dict[tuple[str, int, tune.Chunks], program.Program] = {}

    def of(self, cell: build.Cell, ready: Prepared, folder: Path) -> program.Program:
        """The program of a cell, whose chunks are those that its folder's run began with."""
        mesh = devices.mesh(self._settings)

        def make(chunks: tune.Chunks) -> program.Program:
            return program.make(
                ready.experiment, client_chunk=chunks.clients, run_chunk=chunks.runs, mesh=mesh
            )

        path = folder / "chunks.json"
        if self._settings.resume and path.exists():
            chunks = tune.Chunks(**json.loads(path.read_text()))
        else:
            if cell.label not in self._chosen:
                machine = tune.Machine(make, self._data)
                self._chosen[cell.label] = tune.choose(
                    self._settings, cell, ready.experiment, ready.inputs, machine
                )
            chunks = self._chosen[cell.label]
            loop.write_json(path, chunks._asdict())
        key = (cell.label, ready.capacity, chunks)
        if key not in self._made:
            self._made[key] = make(chunks)
        return self._made[key]


def _report(
    settings: config.Config,
    folder: Path,
    dataset: Dataset,
    split: Split,
    cells: list[build.Cell],
    place: Callable[[build.Cell], Path],
    results: list[dict[str, Any]],
) -> str:
    report.draw_partition(folder / "partition.png", dataset, split)
    title = (
        f"{settings.dataset}, {settings.environment} domains, {settings.model}, "
        f"{settings.rounds} rounds, {len(settings.seeds)} seeds"
    )
    done = list(zip(build.short_labels(cells), map(place, cells), results, strict=True))
    paper = dict(entry.split("=", 1) for entry in settings.paper)
    text = report.write(folder, done, title=title, paper=paper)
    if place(cells[0]) != folder:  # a cell of its own has written its result already
        loop.write_json(folder / "result.json", {"title": title, "cells": results})
    where = f"Table: {folder / 'table.md'}. Curves: {folder / 'curves.png'}."
    return f"\n{title}\n\n{text}\n\n{report.RULE}\n{where}"


def deal(
    settings: config.Config, dataset: Dataset, held_out: Sequence[str | None]
) -> tuple[Examples, dict[str | None, dict[int, Split]]]:
    """The examples on the device, and for each held-out domain the splits by seed."""
    data = federation.examples(dataset.x, dataset.y)
    splits = {}
    for domain in dict.fromkeys(held_out):
        num_clients = settings.clients or len(dataset.domains) - (domain is not None)
        if settings.cohort > num_clients:
            raise ValueError(
                f"--cohort={settings.cohort}: must be at most the {num_clients} clients"
            )
        partition = federation.partitioner(
            settings.partition, dataset, num_clients, alpha=settings.alpha
        )
        try:
            splits[domain] = {
                seed: federation.split(
                    dataset,
                    data,
                    partition,
                    held_out=domain,
                    seed=seed,
                    test_fraction=settings.test_fraction,
                )
                for seed in settings.seeds
            }
        except ValueError as error:
            raise ValueError(
                f"--partition={settings.partition} --clients={num_clients}: {error}"
            ) from None
    return data, splits
