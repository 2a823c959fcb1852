"""The launch of an experiment: from flags to folders with results."""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from jax.sharding import Mesh

from experiments.experiment import assemble, grid, memory
from experiments.experiment.assemble import Assembled, Prepared
from experiments.experiment.config import Config
from experiments.experiment.grid import Cell
from experiments.flags.flag import check_place, flag_error
from experiments.parts import machine
from experiments.parts.training import Sizes
from experiments.running import checkpoints, chunks, events, initial, log, loop, provenance, records
from experiments.running import folder as folders
from experiments.running.signals import Stop, Stopped
from fedjax_inv import program
from fedjax_inv.checks import UsageError
from fedjax_inv.types import Examples, Variables


class FinishedCell(NamedTuple):
    """A cell that has been run."""

    label: str  # the algorithm, with the settings in which the cells differ
    folder: Path
    result: records.Result


# (experiment, its folder, its cells in order) -> the text to print; writes tables and figures
Report = Callable[[Assembled, Path, Sequence[FinishedCell]], str]


def run(config: Config, folder: Path, *, in_folders: bool, report: Report) -> str:
    """Runs the cells that are not finished, and returns the text of the report.

    in_folders: whether each cell has its own folder in the run folder. If not, there must be one
        cell with one run per seed, and its results lie in the run folder itself.
    report: writes tables and figures.

    Raises UsageError, before any compute, if the flags do not fit the data or the folders.
    """
    events.check(config.watching.tensorboard)
    check_place("run_dir", folder, is_folder=True)
    machine.connect(config.run)
    is_gone = initial.is_gone(config.model)
    assembled = assemble.assemble(config, start=None if is_gone else start_of(config))
    memory.check(assembled)
    places = _places(assembled, folder, in_folders)
    if is_gone:
        _check_started(config, places.values())
    _finished(assembled, places)  # before the lock, whose file must not lie in another run's folder
    with folders.locked(folder):
        results = _finished(assembled, places)
        programs = _Programs(config, assembled.data)
        for name, result in results.items():
            if result is None:
                folders.check_data(places[name], programs.start.data)
        machine.agree(0)  # no process writes before all have checked
        with Stop() as stop:
            for cell in assembled.cells:
                place = places[cell.name]
                if results[cell.name] is None:
                    prepared = programs.placed(assembled.prepare(cell))
                    results[cell.name] = _run_cell(assembled, programs, cell, prepared, place, stop)
                elif config.watching.tensorboard:  # the finished run may lack events
                    events.Events(place, cell, log.read(place), True).close()
        if not machine.leads():
            return ""
        labels = zip(grid.short_labels(assembled.cells), assembled.cells, strict=True)
        finished = []
        for label, cell in labels:
            result = results[cell.name]
            assert result is not None  # by now
            finished.append(FinishedCell(label, places[cell.name], result))
        return report(assembled, folder, finished)


def check(config: Config, folder: Path, *, in_folders: bool) -> None:
    """Raises the UsageErrors of `run`, without any compute.

    It does not look for the network of --init_from, because an earlier row may still have to write
    it.
    """
    events.check(config.watching.tensorboard)
    check_place("run_dir", folder, is_folder=True)
    assembled = assemble.assemble(config, config.run.seeds[:1])
    memory.check(assembled)
    _finished(assembled, _places(assembled, folder, in_folders))


def start_of(config: Config) -> assemble.Start:
    """A function that reads the networks of --init_from."""

    def start(shapes: Variables, seeds: Sequence[int]) -> Mapping[int, Variables]:
        return initial.variables(config.model, shapes, seeds)

    return start


def _check_started(config: Config, places: Iterable[Path]) -> None:
    """Raises UsageError if --init_from is gone and a run has not started from its network yet."""
    for place in places:
        has_begun = config.run.resume and checkpoints.rounds(place / "checkpoints")
        if not (has_begun or (place / "result.json").exists()):
            assemble.assemble(config, start=start_of(config))  # raises the error


def _places(assembled: Assembled, folder: Path, in_folders: bool) -> dict[str, Path]:
    """The folder of each cell, by the cell's name."""
    cells = assembled.cells
    if in_folders:
        folders.check_sweep(folder)
        return {name: folder / place for name, place in grid.folder_names(cells).items()}
    if len(cells) > 1 or len(cells[0].runs) > len(assembled.config.run.seeds):
        raise UsageError(
            "train runs one algorithm, held-out domain and value of each hyperparameter; "
            "for several: python -m experiments.sweep, with the same flags"
        )
    return {cells[0].name: folder}


def _finished(assembled: Assembled, places: Mapping[str, Path]) -> dict[str, records.Result | None]:
    """The results of finished cells, None for the others, by the cells' names."""
    results = {
        cell.name: folders.finished(assembled.config, cell, places[cell.name])
        for cell in assembled.cells
    }
    if assembled.variables is not None:
        for place in places.values():
            initial.check_same(assembled.config.model, place, assembled.variables)
    return results


class _Programs:
    """The programs of the cells. Cells that differ only in the held-out domain share one."""

    def __init__(self, config: Config, data: Examples) -> None:
        self.config, self.data = config, data
        self.start = provenance.record(data)
        self._chunks: dict[str, chunks.Chunks] = {}
        self._placed: dict[Mesh, Examples] = {}
        self._programs: dict[tuple[str, Sizes, chunks.Chunks], program.Program] = {}

    def placed(self, prepared: Prepared) -> Prepared:
        """A cell with its data and inputs on the devices."""
        layout = prepared.layout
        if layout.mesh is None:
            return prepared
        # Cells whose data lie on the same devices use the same.
        there = None if layout.own else self._placed.get(layout.mesh)
        data, inputs = layout.place(there or self.data, prepared.inputs)
        if not layout.own:
            self._placed = {layout.mesh: data}
        return prepared._replace(data=data, inputs=inputs)

    def of(self, cell: Cell, prepared: Prepared, folder: Path) -> tuple[program.Program, bool]:
        """The program of a placed cell, and whether it existed before.

        A resumed run keeps the chunks with which it began.
        """

        def make(chosen: chunks.Chunks) -> program.Program:
            return program.make(
                prepared.experiment,
                client_chunk=chosen.clients,
                run_chunk=chosen.runs,
                layout=prepared.layout,
            )

        chosen = self._begun(cell, prepared, folder)
        if chosen is None:
            if cell.label not in self._chunks:
                machine = chunks.Machine(make, prepared.data, prepared.layout)
                self._chunks[cell.label] = chunks.choose(
                    self.config, cell, prepared.experiment, prepared.inputs, machine
                )
            chosen = self._chunks[cell.label]
            folders.write_json(folder / "chunks.json", chosen._asdict())
        key = (cell.label, prepared.sizes, chosen)
        is_old = key in self._programs
        if not is_old:
            self._programs[key] = make(chosen)
        return self._programs[key], is_old

    def _begun(self, cell: Cell, prepared: Prepared, folder: Path) -> chunks.Chunks | None:
        """The chunks that the run in a folder began with; None for a new run.

        Raises UsageError if the flags ask for others.
        """
        path = folder / "chunks.json"
        if not (self.config.run.resume and path.exists()):
            return None
        record = records.read(path, records.Chunks, "delete it to have them chosen anew")
        begun = chunks.Chunks(record.clients, record.runs)
        flags = ("client_chunk", "run_chunk")
        asked = chunks.asked(self.config, len(cell.runs), prepared.inputs)
        for flag, wanted, there in zip(flags, asked, begun, strict=True):
            if wanted not in (None, there):
                raise flag_error(
                    flag,
                    getattr(self.config.run, flag),
                    f"the run in {folder} began with {there}, and goes on bit for bit with it "
                    "only; leave the flag out",
                )
        return begun


def _run_cell(
    assembled: Assembled,
    programs: _Programs,
    cell: Cell,
    prepared: Prepared,
    folder: Path,
    stop: Stop,
) -> records.Result:
    """Runs a placed cell and returns its result; ends the process if a signal stops it."""
    config = assembled.config
    # Before anything else, so that the folder belongs to this run from the start.
    folders.begin(folder, config, cell, programs.start)
    if assembled.variables is not None:
        initial.record(folder, assembled.variables)
    compiled, is_old = programs.of(cell, prepared, folder)
    model, hyper = prepared.experiment.model, cell.runs[0].hyper
    personal = assemble.algorithm(config, cell, model, hyper, prepared.sizes).personal
    data, inputs, groups = prepared.data, prepared.inputs, prepared.groups
    job = loop.Job(config, cell, compiled, data, inputs, groups, personal, is_old)
    try:
        return loop.run_cell(job, folder, stop)
    except Stopped as stopped:
        print(f"{folder}: {stopped}; add --resume to continue", file=sys.stderr)
        sys.exit(128 + stop.signal)
