"""What all binaries do: flags -> parts -> run -> write, errors told in one line."""

import contextlib
import dataclasses
import errno
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax
from absl import app, logging

from experiments.experiment import build, command_line, grid, memory
from experiments.experiment.command_line import Given
from experiments.experiment.groups import Config
from experiments.flags.errors import Diverged
from experiments.flags.flag import check_place
from experiments.parts import devices
from experiments.reporting import data_figures, report, run_figures
from experiments.running import checkpoints, chunks, events, initial, log, loop, provenance, records
from experiments.running import folder as folders
from experiments.running.signals import Stop, Stopped
from fedjax_inv import program
from fedjax_inv.checks import UsageError
from fedjax_inv.types import Examples

_LONGEST = 2000  # characters of a line


def flags(given: Given) -> Config:
    """The flags of train and sweep, with the devices that they ask for."""
    config = command_line.read(given=given)
    devices.prepare(config.run)
    return config


def main(binary: Callable[[Any], str], about: str, read: Callable[[Given], Any] = flags) -> None:
    """Prints what binary(read(given)) returns: presets expanded, errors told in one line.

    about: what --help tells first. given: the flags that were given outside of presets.
    """
    # Compiled programs outlive the process, so that a second start does not compile again.
    cache = os.environ.get("JAX_COMPILATION_CACHE_DIR", "~/.cache/fedjax_inv")
    jax.config.update("jax_compilation_cache_dir", os.path.expanduser(cache))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    given: list[Given] = []

    def run(argv: list[str]) -> None:
        del argv
        # Orbax tells of every file it writes, and of what it cannot write, which is told here.
        logging.set_verbosity(logging.FATAL)
        try:
            with errors_in_one_line():
                print(binary(read(*given)))
        except SystemExit as ended:
            if ended.code in (2, 3) and not jax.distributed.is_initialized():
                # Not after orbax's threads, which wait for minutes for what could not be written.
                sys.stdout.flush()
                os._exit(ended.code)
            raise

    def parse(argv: list[str]) -> list[str]:
        with errors_in_one_line():
            answer = command_line.answer(argv, about)
            if answer is not None:
                print(answer)
                sys.exit(0)
            given.append(command_line.parse(argv))
        return argv

    app.run(run, flags_parser=parse)


@contextlib.contextmanager
def errors_in_one_line() -> Iterator[None]:
    """Ends the process with a line on stderr: bad input with status 2, a run that diverged with 3.

    What the system refuses, as a full disk does, is bad input. Any other error is a defect, which
    needs its traceback.
    """
    try:
        yield
    except UsageError as error:
        _fail(str(error), 2)
    except OSError as error:
        if error.errno is None:  # not of the system
            raise
        where = f"{error.filename}: " if error.filename else ""
        remedy = _REMEDIES.get(error.errno, "mend that and start again")
        _fail(f"{where}{error.strerror}; {remedy}, what was done until then is kept", 2)
    except Diverged as error:
        _fail(str(error), 3)


_REMEDIES = {
    errno.ENOSPC: "make room on the disk and add --resume",
    errno.EDQUOT: "make room on the disk and add --resume",
    errno.ENAMETOOLONG: "choose a shorter name",
}


def _fail(message: str, status: int) -> NoReturn:
    line = " ".join(message.splitlines())
    if len(line) > _LONGEST:  # of a list of thousands, both ends tell enough
        line = f"{line[: _LONGEST // 2]} ... {line[-_LONGEST // 4 :]}"
    print(f"error: {line}", file=sys.stderr)
    sys.exit(status)


def run(config: Config, folder: Path, *, in_folders: bool) -> str:
    """Runs the cells that are not finished, writes the report, and returns what to print of it.

    in_folders: whether each cell has a folder in the run folder; else there must be one cell, of
    one run per seed, which has the run folder. Raises UsageError, before any compute, where the
    flags do not fit the data or the folders.
    """
    events.check(config.watching.tensorboard)
    check_place("run_dir", folder, is_folder=True)
    devices.connect(config.run)
    is_gone = initial.is_gone(config.model)
    made = _without_start(config, config.run.seeds) if is_gone else build.assemble(config)
    memory.check(made)
    places = _places(made, folder, in_folders)
    if is_gone:
        _check_started(config, places.values())
    devices.mesh(config.run)  # refuses more devices than there are
    _finished(made, places)  # before a lock is left in what is not this run's
    with folders.locked(folder):
        results = _finished(made, places)
        programs = _Programs(config, made.data)
        for name, result in results.items():
            if result is None:
                folders.check_data(places[name], programs.start.data)
        devices.agree(0)  # nobody writes before all have looked
        with Stop() as stop:
            for cell in made.cells:
                place = places[cell.name]
                if results[cell.name] is None:
                    ready = programs.dealt(made.prepare(cell))
                    results[cell.name] = _run_cell(made, programs, cell, ready, place, stop)
                elif config.watching.tensorboard:  # which may be asked for only now
                    events.Events(place, cell, log.read(place), True).close()
        return _report(made, folder, places, results) if devices.leads() else ""


def check(config: Config, folder: Path, *, in_folders: bool) -> None:
    """Raises UsageError, without any compute, where `run` would.

    But for --init_from: what it names may be made by a run that comes before.
    """
    events.check(config.watching.tensorboard)
    check_place("run_dir", folder, is_folder=True)
    made = _without_start(config, config.run.seeds[:1])
    memory.check(made)
    devices.mesh(config.run)
    _finished(made, _places(made, folder, in_folders))


def _without_start(config: Config, seeds: Sequence[int]) -> build.Assembled:
    """What does not need what --init_from names: all but the networks that runs start from."""
    drawn = dataclasses.replace(config, model=dataclasses.replace(config.model, init_from=""))
    return build.assemble(drawn, seeds)._replace(config=config)


def _check_started(config: Config, places: Iterable[Path]) -> None:
    """Raises UsageError unless runs whose start is gone are all past it."""
    for place in places:
        is_past = config.run.resume and checkpoints.rounds(place / "checkpoints")
        if not (is_past or (place / "result.json").exists()):
            build.assemble(config)  # which tells what is missing


def _places(made: build.Assembled, folder: Path, in_folders: bool) -> dict[str, Path]:
    """The folder of each cell, by its name."""
    cells = made.cells
    if in_folders:
        folders.check_sweep(folder)
        return {name: folder / place for name, place in grid.folder_names(cells).items()}
    if len(cells) > 1 or len(cells[0].runs) > len(made.config.run.seeds):
        raise UsageError(
            "train runs one algorithm, held-out domain and value of each hyperparameter; "
            "for several: python -m experiments.sweep, with the same flags"
        )
    return {cells[0].name: folder}


def _finished(made: build.Assembled, places: Mapping[str, Path]) -> dict[str, Any]:
    """The results that are there already, None for the others; by the cells' names."""
    results = {
        cell.name: folders.finished(made.config, cell, places[cell.name]) for cell in made.cells
    }
    if made.variables is not None:
        for place in places.values():
            initial.check_same(made.config.model, place, made.variables)
    return results


class _Programs:
    """The programs of the cells: cells that differ in the held-out domain share one."""

    def __init__(self, config: Config, data: Examples) -> None:
        self.config, self.data = config, data
        self.start = provenance.record(data)
        self._chosen: dict[str, chunks.Chunks] = {}
        self._made: dict[tuple[str, build.Sizes, chunks.Chunks], program.Program] = {}

    def dealt(self, ready: build.Prepared) -> build.Prepared:
        """A cell with its data and inputs where the devices want them."""
        layout = devices.layout(self.config, ready.inputs.train.size.shape[1])
        if layout is None:
            return ready
        data, inputs = layout.place(self.data, ready.inputs)
        if not layout.own:  # the next cell's, too
            self.data = data
        return ready._replace(data=data, inputs=inputs, layout=layout)

    def of(
        self, cell: grid.Cell, ready: build.Prepared, folder: Path
    ) -> tuple[program.Program, bool]:
        """The program of a cell that is dealt, and whether it has been asked for before.

        Its chunks are those that its folder's run began with.
        """

        def make(chosen: chunks.Chunks) -> program.Program:
            return program.make(
                ready.experiment,
                client_chunk=chosen.clients,
                run_chunk=chosen.runs,
                layout=ready.layout,
            )

        chosen = self._begun(ready, folder)
        if chosen is None:
            if cell.label not in self._chosen:
                machine = chunks.Machine(make, ready.data)
                self._chosen[cell.label] = chunks.choose(
                    self.config, cell, ready.experiment, ready.inputs, machine
                )
            chosen = self._chosen[cell.label]
            folders.write_json(folder / "chunks.json", chosen._asdict())
        key = (cell.label, ready.sizes, chosen)
        is_old = key in self._made
        if not is_old:
            self._made[key] = make(chosen)
        return self._made[key], is_old

    def _begun(self, ready: build.Prepared, folder: Path) -> chunks.Chunks | None:
        """The chunks that a folder's run began with; raises UsageError if others are asked for."""
        path = folder / "chunks.json"
        if not (self.config.run.resume and path.exists()):
            return None
        record = records.read(path, records.Chunks, "delete it to have them chosen anew")
        begun = chunks.Chunks(record.clients, record.runs)
        flags = ("client_chunk", "run_chunk")
        asked = chunks.asked(self.config, ready.inputs)
        for flag, wanted, there in zip(flags, asked, begun, strict=True):
            if wanted not in (None, there):
                raise UsageError(
                    f"--{flag}={getattr(self.config.run, flag)}: the run in {folder} began with "
                    f"{there}, and goes on bit for bit with it only; leave the flag out"
                )
        return begun


def _run_cell(
    made: build.Assembled,
    programs: _Programs,
    cell: grid.Cell,
    ready: build.Prepared,
    folder: Path,
    stop: Stop,
) -> records.Result:
    # First of all, so that whatever is in the folder is known to be this run's.
    folders.begin(folder, made.config, cell, programs.start)
    if made.variables is not None:
        initial.record(folder, made.variables)
    made_of, is_old = programs.of(cell, ready, folder)
    network, hyper = ready.experiment.model, cell.runs[0].hyper
    personal = build.algorithm(made.config, cell, network, hyper, ready.sizes).personal
    job = loop.Job(
        made.config, cell, made_of, ready.data, ready.inputs, ready.groups, personal, is_old
    )
    try:
        return loop.run_cell(job, folder, stop)
    except Stopped as stopped:
        print(f"{folder}: {stopped}; add --resume to continue", file=sys.stderr)
        sys.exit(128 + stop.signal)


def _report(
    made: build.Assembled, folder: Path, places: Mapping[str, Path], results: Mapping[str, Any]
) -> str:
    config, cells = made.config, made.cells
    split = made.splits[cells[0].held_out][config.run.seeds[0]]
    data_figures.draw_partition(folder / "partition.png", made.dataset, split)
    count = len(config.run.seeds)
    title = (
        f"{config.title}, {config.model.model}, {config.run.rounds} rounds, "
        f"{'one seed' if count == 1 else f'{count} seeds'}"
    )
    done = [
        (label, places[cell.name], results[cell.name])
        for label, cell in zip(grid.short_labels(cells), cells, strict=True)
    ]
    paper = dict(entry.split("=", 1) for entry in config.method.paper)
    rule = config.watching.select
    told = [(label, result) for label, _, result in done]
    text = report.write(folder, told, title=title, paper=paper, rule=rule)
    run_figures.write(folder, done, title=title, rule=rule)
    if places[cells[0].name] != folder:  # a cell of its own has written its result already
        of_cells = [result for _, _, result in done]
        folders.write_json(folder / "result.json", {"title": title, "cells": of_cells})
    where = f"Table: {folder / 'table.md'}. Curves: {folder / 'curves.png'}."
    return f"\n{title}\n\n{text}\n\n{report.explained(rule)}\n{where}"
