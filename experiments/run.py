"""Runs an experiment in its folder: skips what is finished, compiles ahead, trains and writes.

While a cell runs, the programs of the next ones compile in threads (`ahead`).
"""

import contextlib
import dataclasses
import functools
import gc
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
from fedjax_inv.data.federation import parts_of
from fedjax_inv.data.uses import Uses
from fedjax_inv.fit import local_sizes
from fedjax_inv.plan import Plan
from fedjax_inv.streaming import Streamed
from fedjax_inv.types import Examples, Variables

from .assembly import experiment, factories, grid, idle, machine, method
from .assembly.experiment import Assembly
from .assembly.grid import Cell
from .config import Config
from .errors import check_run_dir
from .folder import checkpoints, events, files, initial, provenance, records, run_folder
from .folder.interrupt import Interrupt
from .folder.recorder import Job, Recorder
from .start import printable

_INPUTS = "inputs.json"  # the shift and scale of the network's inputs
_AGAIN = "the same command continues"
_BLIND = (
    "of two training domains each run without one has a single domain, in which a penalty between "
    "domains is 0; the rule cannot compare its weights"
)


class FinishedCell(NamedTuple):
    """A cell that has been run."""

    label: str  # the algorithm, with the settings in which the cells differ
    folder: Path
    result: records.Result


# (experiment, its folder, its cells in order) -> the text to print; writes tables and figures
WriteReport = Callable[[Assembly, Path, Sequence[FinishedCell]], str]
# The most programs that are kept. Linux allows a process 65,530 memory maps, of which a program has
# 500: a study of more than a hundred rows would end.
_MOST_PROGRAMS = 28


class Programs:
    """The programs of cells, of one or several launches of this process.

    Cells that differ only in data of the same shapes share one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # one thread at a time places
        self.printed: set[tuple[str, ...]] = set()  # lines on the uses of examples
        self._programs: dict[Hashable, program.Program | Streamed] = {}  # the last used is last
        # The last examples that lie whole on each device of a mesh, and what they were.
        self._examples: tuple[Examples, Mesh, Examples] | None = None

    def plan(self, setup: Assembly, cell: Cell) -> Plan:
        """The plan of a cell, with its data and inputs on the devices or read from the host."""
        with self._lock:
            plan = setup.plan(cell)
            key = depends_on(setup, cell, plan)
            is_old = key in self._programs
            self._programs[key] = self._programs.pop(key, plan.program)
            if len(self._programs) > _MOST_PROGRAMS:
                del self._programs[next(iter(self._programs))]
                gc.collect()  # a program refers to itself, so that it stays until then
            plan = dataclasses.replace(plan, program=self._programs[key], is_compiled=is_old)
            if plan.streams or plan.layout.own or plan.layout.mesh is None:
                return plan.placed()
            source = plan.data
            mesh = plan.layout.mesh
            last = self._examples
            is_last = last and all(map(operator.is_, last[0], source))
            if last and is_last and last[1] == mesh:
                plan = dataclasses.replace(plan, data=last[2])
            plan = plan.placed()
            self._examples = source, mesh, plan.data
            return plan


def depends_on(setup: Assembly, cell: Cell, plan: Plan) -> tuple[Hashable, ...]:
    """What a cell's program depends on, by the groups of the configuration.

    Data, environments, partitions, the schedule of clients, seeds and the held-out domain change
    nothing but its inputs, whose shapes are part of it.
    """
    config = setup.config
    dataset = setup.dataset
    groups = (
        config.network,
        config.method.loss,
        dataclasses.replace(config.training, seeds=()),
        config.participation.missing,
        config.aggregation,
        # The noise and the divisor of a private sum are numbers of the program.
        config.aggregation.private_clip > 0 and config.participation.sampling_rate,
        config.evaluation,
        config.machine,
        # Methods of domains keep something for each of them.
        method.facts(config, cell.algorithm).needs_domains and setup.objective.num_domains,
    )
    # A network that paints its inputs depends on more than their shapes.
    of_data = id(setup.model) if dataset.render else config.data.dataset
    leaves, structure = jax.tree.flatten((plan.data, plan.inputs))
    return (
        cell.label,
        groups,
        (plan.experiment.history, plan.cohorts.who.shape[2], plan.experiment.num_groups),
        (of_data, dataset.task, tuple(dataset.classes), dataset.words),
        local_sizes(config.training.batch_size or None, np.asarray(plan.inputs.train.size)),
        plan.layout,
        structure,
        tuple((leaf.shape, leaf.dtype) for leaf in leaves),
    )


def prepare(
    config: Config,
    folder: Path,
    *,
    in_folders: bool,
    shared: Programs | None = None,
    label: str = "",
) -> "Launch":
    """Returns the experiment, ready to run in its folder.

    in_folders: whether each cell has its own folder in the run folder. If not, there must be one
        cell with one run per seed, and its results lie in the run folder itself.
    shared: the programs of other launches of this process; this one uses and extends them.
    label: what lines of progress name this launch; "": the label of each cell.

    Raises UsageError, before any compute, if the flags do not fit the data or the folders.
    """
    folder = Path(os.path.expanduser(folder))
    events.check(config.output.tensorboard)
    check_run_dir(folder)
    machine.connect(config.machine)
    is_row = shared is not None  # of a study
    programs = Programs() if shared is None else shared
    if (folder / "result.json").exists() and not config.network.init_from:
        # If nothing is left to run, the report needs the first seed's data alone.
        first = experiment.make(config, config.training.seeds[:1])
        done = Launch(first, folder, _folders(first, folder, in_folders), programs, label, is_row)
        if None not in done.results().values():
            return done
    setup = experiment.make(config, start=start_of(config))
    setup.check_fit()
    launch = Launch(setup, folder, _folders(setup, folder, in_folders), programs, label, is_row)
    launch.results()  # before the lock, whose file must not lie in another run's folder
    launch.warn()
    return launch


@dataclasses.dataclass(frozen=True, eq=False)
class Launch:
    """An experiment that is ready to run in its folder."""

    setup: Assembly
    folder: Path
    folders: Mapping[str, Path]  # of the cells, by their names
    programs: Programs
    label: str  # what lines of progress name
    is_row: bool  # of a study, whose rows are resumed without the flag
    # The uses of examples by held-out domain, once they have been printed.
    used: dict[str | None, Uses] = dataclasses.field(default_factory=dict)

    def run(self, report: WriteReport, ahead: Ahead) -> str:
        """Runs the cells that are not finished, and returns the text of the report.

        report: writes tables and figures.
        """
        with run_folder.locked(self.folder), Interrupt() as interrupt:
            results = self.results()
            todo = [cell for cell in self.setup.cells if results[cell.name] is None]
            machine.agree(0)  # no process writes before all have checked
            for number, cell in enumerate(todo, 1):
                left = todo[number:]
                with self._locked(cell):
                    # Another process may have run it since the start of this one.
                    results[cell.name] = self._result(cell)
                    if results[cell.name] is None:
                        recorder = self._begin(cell, ahead, interrupt)
                        # After its own program, which others may share.
                        self._compile(left[:DEPTH], ahead)
                        with recorder.in_words():
                            fitted = recorder.job.plan.train(recorder.callbacks)
                        results[cell.name] = recorder.finish(fitted)
                if results[cell.name] is None:
                    self._end(cell, interrupt, fitted.round)
                if left or self.is_row:  # other rows, or the table of all, may be left
                    self._end_if_asked(cell, interrupt)
            return self._report(report, results) if machine.leads() else ""

    def compile_ahead(self, ahead: Ahead) -> None:
        """Compiles the first program that `run` needs, in a thread."""
        results = self.results()
        todo = [cell for cell in self.setup.cells if results[cell.name] is None]
        self._compile(todo[:1], ahead)

    def results(self) -> dict[str, records.Result | None]:
        """The results of finished cells, None for the others, by the cells' names.

        Raises UsageError if a cell's folder holds another run, or one on other data.
        """
        return {cell.name: self._result(cell) for cell in self.setup.cells}

    def warn(self) -> None:
        """Tells what a user may not expect."""
        config = self.setup.config
        if not machine.leads():
            return
        are_there = any((folder / "config.json").exists() for folder in self.folders.values())
        if config.output.resume and not self.is_row and not are_there:
            print(f"--resume: {self.folder} holds no run; a new one starts", file=sys.stderr)
        for text in idle.settings(self.setup):
            print(printable(f"warning: {text}"), file=sys.stderr)
        if warning := self.setup.scale_warning:
            text = f"warning: --dataset={config.data.dataset}: {warning}"
            print(printable(text), file=sys.stderr)
        if self.setup.leaves_one:
            print(f"warning: --leave_one_out: {_BLIND}", file=sys.stderr)

    def _result(self, cell: Cell) -> records.Result | None:
        """The result of a cell, None if it is not finished."""
        provenance_of = functools.partial(self._provenance, cell)
        return run_folder.finished(self.setup.config, cell, self.folders[cell.name], provenance_of)

    def _provenance(self, cell: Cell) -> records.Provenance:
        """The record of a start of a cell now."""
        code = factories.digests(self.setup.config.outside_of(cell.algorithm))
        return self._provenance_of_all | {"code": code}

    @functools.cached_property
    def _provenance_of_all(self) -> records.Provenance:  # it reads all data
        return provenance.record(self.setup.loaded, self.setup.config.network, self.setup.variables)

    def _compile(self, cells: Iterable[Cell], ahead: Ahead) -> None:
        """Compiles the programs of cells in threads."""
        if jax.process_count() > 1:  # processes must compile in the same order
            return
        for cell in cells:
            ahead.begin(self._key(cell), functools.partial(self._compiled, cell))

    def _key(self, cell: Cell) -> Hashable:
        return self.folder, cell.name

    def _compiled(self, cell: Cell) -> Plan:
        """The plan of a cell whose program is compiled, here or for an earlier cell."""
        plan = self.programs.plan(self.setup, cell)
        # A run that continues needs neither a start nor a first evaluation.
        if plan.is_compiled or checkpoints.rounds(self.folders[cell.name] / "checkpoints"):
            return plan
        return plan.compile()

    def _locked(self, cell: Cell) -> contextlib.AbstractContextManager[None]:
        """No other process works in a cell's folder meanwhile; that of all cells is locked."""
        folder = self.folders[cell.name]
        return contextlib.nullcontext() if folder == self.folder else run_folder.locked(folder)

    def _begin(self, cell: Cell, ahead: Ahead, interrupt: Interrupt) -> Recorder:
        """Prepares a cell's folder. The errors of its plan leave the folder as it is."""
        setup = self.setup
        folder = self.folders[cell.name]
        make_plan = functools.partial(self.programs.plan, setup, cell)
        plan = ahead.take(self._key(cell), make_plan)
        if setup.config.outside and not plan.is_compiled:
            plan.trace()
        used = self._uses(cell.held_out)
        run_folder.begin(
            folder,
            setup.config,
            cell,
            self._provenance(cell),
            used,
            self._weighting(cell),
            setup.served(cell.held_out),
        )
        if setup.is_scaled:
            files.write_json(folder / _INPUTS, setup.scalers.record(cell.held_out))
        job = Job(setup.config, cell, plan, setup.objective.measure, self._title(cell))
        return Recorder(job, folder, interrupt)

    def _uses(self, held_out: str | None) -> Uses:
        """What the examples are used for; tells it once in this process."""
        setup = self.setup
        if held_out not in self.used:
            self.used[held_out] = setup.uses(held_out)
            where = f"held out {held_out}: " if len(setup.splits) > 1 else ""
            lines = tuple(printable(where + line) for line in self.used[held_out].lines())
            if machine.leads() and lines not in self.programs.printed:
                self.programs.printed.add(lines)
                print(*lines, sep="\n", file=sys.stderr)
        return self.used[held_out]

    def _weighting(self, cell: Cell) -> str:
        """How clients weigh whose sizes differ by more than a tenth; "" without such clients."""
        for split in self.setup.splits[cell.held_out].values():
            sizes = [len(rows) for rows in parts_of(split.train)]
            if sizes and max(sizes) > 1.1 * min(sizes):
                return method.weighting(self.setup.config, cell.algorithm, cell.settings)
        return ""

    def _title(self, cell: Cell) -> str:
        """What lines of progress name a cell."""
        labels = {other.label for other in self.setup.cells}
        parts = [self.label] if self.label else []
        parts += [cell.label] if len(labels) > 1 or not parts else []
        return f"{', '.join(parts)}, held out {cell.held_out or 'test split'}"

    def _end(self, cell: Cell, interrupt: Interrupt, done: int) -> None:
        """Ends the process, as a signal has ended the training of a cell after a round."""
        at = f"stopped after round {done} of {self.setup.config.training.rounds}"
        how = _AGAIN if self.is_row else "add --resume to continue"
        print(f"{self.folders[cell.name]}: {at}; {how}", file=sys.stderr)
        sys.exit(128 + interrupt.signal)

    def _end_if_asked(self, cell: Cell, interrupt: Interrupt) -> None:
        """Ends the process if a signal came in the last segment of a cell, whose result is kept."""
        if number := machine.agree(interrupt.signal):
            text = f"finished, and stopped before the rest; {_AGAIN}"
            print(f"{self.folders[cell.name]}: {text}", file=sys.stderr)
            sys.exit(128 + number)

    def _report(self, report: WriteReport, results: Mapping[str, records.Result | None]) -> str:
        """The text of the report on all cells."""
        cells = self.setup.cells
        finished = []
        for label, cell in zip(grid.short_labels(cells), cells, strict=True):
            result = results[cell.name]
            assert result is not None  # by now
            finished.append(FinishedCell(label, self.folders[cell.name], result))
        return report(self.setup, self.folder, finished)


def start_of(config: Config) -> experiment.InitialNetworks:
    """A function that reads the networks of --init_from."""

    def start(shapes: Variables, seeds: Sequence[int]) -> Mapping[int, Variables]:
        return initial.variables(config.network, shapes, seeds)

    return start


def _folders(setup: Assembly, folder: Path, in_folders: bool) -> dict[str, Path]:
    """The folder of each cell, by the cell's name."""
    if not in_folders:
        (cell,) = setup.cells
        return {cell.name: folder}
    run_folder.check_sweep(folder)
    names = grid.folder_names(setup.cells)
    return {name: folder / cell_folder for name, cell_folder in names.items()}
