"""The launch of an experiment: from flags to folders with results.

While a cell runs, the programs of the next ones compile in threads (`ahead`).
"""

import dataclasses
import functools
import operator
import os
import sys
import threading
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from fedjax_inv import program
from fedjax_inv.ahead import DEPTH, Ahead
from fedjax_inv.fit import local_sizes
from fedjax_inv.plan import Plan
from fedjax_inv.streaming import Streamed
from fedjax_inv.types import Examples, Variables

from .. import assemble, factories, grid, machine
from ..assemble import Assembled
from ..config import Config
from ..errors import check_run_dir
from ..grid import Cell
from ..start import printable
from . import cell as cells
from . import checkpoints, events, files, initial, provenance, records
from . import folder as folders
from .signals import Stop

_INPUTS = "inputs.json"  # the shift and scale of the network's inputs
_AGAIN = "the same command continues"


class FinishedCell(NamedTuple):
    """A cell that has been run."""

    label: str  # the algorithm, with the settings in which the cells differ
    folder: Path
    result: records.Result


# A cell -> the record of a start of it now
Begun = Callable[[Cell], records.Start]
# (experiment, its folder, its cells in order) -> the text to print; writes tables and figures
Report = Callable[[Assembled, Path, Sequence[FinishedCell]], str]


def run(config: Config, folder: Path, *, in_folders: bool, report: Report) -> str:
    """Runs the cells that are not finished, and returns the text of the report.

    in_folders: whether each cell has its own folder in the run folder. If not, there must be one
        cell with one run per seed, and its results lie in the run folder itself.
    report: writes tables and figures.

    Raises UsageError, before any compute, if the flags do not fit the data or the folders.
    """
    place = Path(os.path.expanduser(folder))
    with Ahead() as ahead:
        return prepared(config, place, in_folders=in_folders).run(report, ahead)


# The most programs that are kept. Linux limits the memory maps of a process, of which a program has
# several hundred.
_MOST_PROGRAMS = 28


class Programs:
    """The programs of cells, of one or several launches of this process.

    Cells that differ only in data of the same shapes share one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # one thread at a time places
        self._programs: dict[Hashable, program.Program | Streamed] = {}  # the last used is last
        # The last examples that lie whole on each device of a mesh, and what they were.
        self._examples: tuple[Examples, Mesh, Examples] | None = None

    def plan(self, assembled: Assembled, cell: Cell) -> Plan:
        """The plan of a cell, with its data and inputs on the devices or read from the host."""
        with self._lock:
            plan = assembled.plan(cell)
            key = depends_on(assembled, cell, plan)
            is_old = key in self._programs
            self._programs[key] = self._programs.pop(key, plan.program)
            for oldest in [*self._programs][:-_MOST_PROGRAMS]:
                del self._programs[oldest]
            plan = dataclasses.replace(plan, program=self._programs[key], is_compiled=is_old)
            if plan.streams or plan.layout.own or plan.layout.mesh is None:
                return plan.placed()
            source, mesh, last = plan.data, plan.layout.mesh, self._examples
            is_last = last and all(map(operator.is_, last[0], source))
            if last and is_last and last[1] == mesh:
                plan = dataclasses.replace(plan, data=last[2])
            plan = plan.placed()
            self._examples = source, mesh, plan.data
            return plan


def prepared(
    config: Config,
    folder: Path,
    *,
    in_folders: bool,
    shared: Programs | None = None,
    label: str = "",
) -> "Launch":
    """The launch of an experiment; arguments and errors as those of `run`.

    shared: the programs of other launches of this process; this one uses and extends them.
    label: what lines of progress name this launch; "": the label of each cell.
    """
    events.check(config.output.tensorboard)
    check_run_dir(folder)
    machine.connect(config)
    if (folder / "result.json").exists() and not config.network.init_from:
        # If nothing is left to run, the report needs the first seed's data alone.
        first = assemble.assemble(config, config.training.seeds[:1])
        places, begun = _places(first, folder, in_folders), _begun(first)
        if None not in _finished(first, places, begun).values():
            return Launch(first, folder, places, begun, shared, label)
    assembled = assemble.assemble(config, start=start_of(config))
    assembled.check_fit()
    places, begun = _places(assembled, folder, in_folders), _begun(assembled)
    # Before the lock, whose file must not lie in another run's folder.
    _finished(assembled, places, begun)
    if shared is None:  # the rows of a study are resumed without the flag
        there = any((place / "config.json").exists() for place in places.values())
        if config.output.resume and machine.leads() and not there:
            print(f"--resume: {folder} holds no run; a new one starts", file=sys.stderr)
    warning = assembled.scale_warning()
    if warning and machine.leads():
        where = f"--dataset={config.data.dataset}"
        print(printable(f"warning: {where}: {warning}"), file=sys.stderr)
    return Launch(assembled, folder, places, begun, shared, label)


class Launch:
    """An experiment that is ready to run, with the folder of each cell by the cell's name."""

    def __init__(
        self,
        assembled: Assembled,
        folder: Path,
        places: Mapping[str, Path],
        begun: Begun,
        shared: Programs | None = None,
        label: str = "",
    ) -> None:
        self._assembled, self._folder, self._places = assembled, folder, places
        self._begun, self._label = begun, label
        self._programs = Programs() if shared is None else shared
        self._is_row = shared is not None  # of a study
        # The rows of a study are resumed without the flag.
        self._how = _AGAIN if self._is_row else "add --resume to continue"

    def run(self, report: Report, ahead: Ahead) -> str:
        """Runs the cells that are not finished, and returns the text of the report."""
        assembled, places = self._assembled, self._places
        with folders.locked(self._folder):
            results = _finished(assembled, places, self._begun)
            todo = [cell for cell in assembled.cells if results[cell.name] is None]
            machine.agree(0)  # no process writes before all have checked
            with Stop() as stop:
                for cell in assembled.cells:
                    place = places[cell.name]
                    if results[cell.name] is None:
                        left = todo[todo.index(cell) + 1 :]
                        self._begin(left[:DEPTH], ahead)
                        results[cell.name] = self._alone(cell, ahead, stop)
                        if left or self._is_row:  # other rows, or the table of all, may be left
                            _end_if_asked(stop, place)
            if not machine.leads():
                return ""
            labels = zip(grid.short_labels(assembled.cells), assembled.cells, strict=True)
            finished = []
            for label, cell in labels:
                result = results[cell.name]
                assert result is not None  # by now
                finished.append(FinishedCell(label, places[cell.name], result))
            return report(assembled, self._folder, finished)

    def compile_ahead(self, ahead: Ahead) -> None:
        """Compiles the first program that `run` needs, in a thread."""
        results = _finished(self._assembled, self._places, self._begun)
        self._begin(
            [cell for cell in self._assembled.cells if results[cell.name] is None][:1], ahead
        )

    def _begin(self, cells: Iterable[Cell], ahead: Ahead) -> None:
        if jax.process_count() > 1:  # processes must compile in the same order
            return
        for cell in cells:
            ahead.begin(self._key(cell), functools.partial(self._compiled, cell))

    def _key(self, cell: Cell) -> Hashable:
        return self._folder, cell.name

    def _compiled(self, cell: Cell) -> Plan:
        """The plan of a cell whose program is compiled, here or for an earlier cell."""
        plan = self._programs.plan(self._assembled, cell)
        # A run that continues needs neither a start nor a first evaluation.
        if plan.is_compiled or checkpoints.rounds(self._places[cell.name] / "checkpoints"):
            return plan
        return plan.compile()

    def _title(self, cell: Cell) -> str:
        """What lines of progress name a cell."""
        labels = {each.label for each in self._assembled.cells}
        parts = [self._label] if self._label else []
        parts += [cell.label] if len(labels) > 1 or not parts else []
        return f"{', '.join(parts)}, held out {cell.held_out or 'test split'}"

    def _alone(self, cell: Cell, ahead: Ahead, stop: Stop) -> records.Result:
        """Runs a cell while no other process works in its folder, and returns its result."""
        place = self._places[cell.name]
        if place == self._folder:
            return self._run(cell, ahead, stop)
        with folders.locked(place):
            # Another process may have run it since the start of this one.
            begun = functools.partial(self._begun, cell)
            done = folders.finished(self._assembled.config, cell, place, begun)
            return self._run(cell, ahead, stop) if done is None else done

    def _run(self, cell: Cell, ahead: Ahead, stop: Stop) -> records.Result:
        """Runs a cell and returns its result; ends the process if a signal stops it."""
        place = self._places[cell.name]
        assembled, config = self._assembled, self._assembled.config
        # Its errors leave the folder as it is.
        plan = ahead.take(self._key(cell), lambda: self._programs.plan(assembled, cell))
        if config.outside and not plan.is_compiled:
            plan.trace()
        folders.begin(place, config, cell, self._begun(cell))
        scaling = assembled.scaling_record(cell.held_out)
        if scaling is not None:
            files.write_json(place / _INPUTS, scaling)
        job = cells.Job(config, cell, plan, assembled.task.measure, self._title(cell))
        fitted, result = cells.train(job, place, stop)
        if result is None:
            at = f"stopped after round {fitted.round} of {config.training.rounds}"
            print(f"{place}: {at}; {self._how}", file=sys.stderr)
            sys.exit(128 + stop.signal)
        return result


def _end_if_asked(stop: Stop, place: Path) -> None:
    """Ends the process if a signal came in the last segment of a cell, whose result is kept."""
    number = machine.agree(stop.signal)
    if number:
        print(f"{place}: finished, and stopped before the rest; {_AGAIN}", file=sys.stderr)
        sys.exit(128 + number)


def start_of(config: Config) -> assemble.Start:
    """A function that reads the networks of --init_from."""

    def start(shapes: Variables, seeds: Sequence[int]) -> Mapping[int, Variables]:
        return initial.variables(config, shapes, seeds)

    return start


def _places(assembled: Assembled, folder: Path, in_folders: bool) -> dict[str, Path]:
    """The folder of each cell, by the cell's name."""
    if not in_folders:
        (cell,) = assembled.cells
        return {cell.name: folder}
    folders.check_sweep(folder)
    return {name: folder / place for name, place in grid.folder_names(assembled.cells).items()}


def _begun(assembled: Assembled) -> Begun:
    @functools.cache  # it reads all data
    def of_all() -> records.Start:
        return provenance.record(assembled.loaded, assembled.variables)

    def of_cell(cell: Cell) -> records.Start:
        return of_all() | {"code": factories.digest(assembled.config.outside_of(cell.algorithm))}

    return of_cell


def _finished(
    assembled: Assembled, places: Mapping[str, Path], begun: Begun
) -> dict[str, records.Result | None]:
    """The results of finished cells, None for the others, by the cells' names.

    Raises UsageError if a cell's folder holds another run, or one on other data.
    """
    return {
        cell.name: folders.finished(
            assembled.config, cell, places[cell.name], functools.partial(begun, cell)
        )
        for cell in assembled.cells
    }


def depends_on(assembled: Assembled, cell: Cell, plan: Plan) -> tuple[Hashable, ...]:
    """What a cell's program depends on.

    Environments, partitions, the schedule of clients, seeds and the held-out domain change nothing
    but its inputs.
    """
    config = assembled.config
    # A network that paints its inputs depends on more than their shapes.
    of_data = id(assembled.model) if assembled.dataset.render else config.data.dataset
    leaves, structure = jax.tree.flatten((plan.data, plan.inputs))
    shapes = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
    names = tuple(assembled.dataset.classes), assembled.dataset.words
    return (
        cell.label,
        *(config.network, config.method.loss, config.evaluation, config.machine),
        dataclasses.replace(config.training, seeds=()),
        *(plan.experiment.history, config.participation.missing, plan.cohorts.who.shape[2]),
        plan.experiment.num_groups,
        assembled.dataset.task,
        of_data,
        names,
        local_sizes(config.training.batch_size or None, np.asarray(plan.inputs.train.size)),
        plan.layout,
        structure,
        shapes,
    )
