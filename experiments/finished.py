"""Finished runs: a folder opened as `Fitted`, with its data and the evaluations of its runs."""

import dataclasses
import functools
import os
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from fedjax_inv import rounds
from fedjax_inv.checks import UsageError
from fedjax_inv.data import sources
from fedjax_inv.fitted import Fitted
from fedjax_inv.one_run import Training
from fedjax_inv.plan import Plan
from fedjax_inv.types import Algorithm

from .assembly import experiment, factories, method, network
from .assembly.experiment import Assembly
from .assembly.grid import Cell
from .config import Config
from .errors import flag_error, shown
from .folder import checkpoints, divergence, log, provenance, run_folder, selected, selection
from .folder.records import Line, Provenance, Result

STATES = ("best", "last")


@dataclasses.dataclass(frozen=True, eq=False)
class Runs:
    """The finished runs of a cell, in one of STATES or after the round of a checkpoint."""

    where: str  # the flag that names the folder, with its value
    path: Path
    state: str
    config: Config  # on one device of one process
    cell: Cell
    start: Provenance
    result: Result
    read: Callable[[], Assembly]  # the data, divided among clients as in training

    @property
    def data(self) -> Assembly:
        """The data of the runs, divided among clients as in training."""
        return self.read()

    @property
    def round(self) -> int:
        """The round of the checkpoint that holds the state."""
        newest = self.rounds()[-1]
        return newest if self.state in STATES else int(self.state)

    def rounds(self) -> list[int]:
        """The rounds of the checkpoints that are there."""
        return checkpoints.rounds(self.path / "checkpoints")

    @functools.cached_property
    def plan(self) -> Plan:
        """How the runs are trained."""
        return replace(self.data, config=self.config).plan(self.cell)

    @functools.cached_property
    def fitted(self) -> Fitted:
        """The runs as `fit` returns them, with what predictions need of their states.

        `line` tells whether a run has the state; what stands for a lacking one has no meaning.
        """
        return self._fitted(self.plan)

    @functools.cached_property
    def fitted_to_images(self) -> Fitted:
        """The same for inputs that are rendered already, as images in [0, 1]."""
        dataset = self.data.dataset
        plan = self.plan
        if dataset.render is None:
            return self.fitted
        data = dataset._replace(render=None)
        own_loss = factories.is_outside(self.config.method.loss)
        model = network.make(self.data.config.network, data, own_loss=own_loss)
        factory = self.data.factory(self.cell)
        training = self.config.training

        def algorithm(hyper: Mapping[str, Any]) -> Algorithm:
            return method.of_any_size(factory, training, model, hyper)

        sample = plan.sample._replace(x=jax.eval_shape(dataset.render, plan.sample.x))
        changed = replace(plan.experiment, algorithm=algorithm, model=model)
        return self._fitted(replace(plan, experiment=changed, sample=sample))

    def _fitted(self, plan: Plan) -> Fitted:
        server, clients, done = self._states
        none: Any = ()  # what training alone needs
        fitted = Fitted(plan)
        fitted.restore(Training(rounds.State(server, clients, (), done, none), none), self.round)
        return fitted

    @functools.cached_property
    def _states(self) -> selected.ServingState:
        """What predictions need of the states of all runs, on the host."""
        plan = self.plan
        folder = self.path / "checkpoints"
        shapes = plan.program.shapes(plan.data, plan.inputs)
        personal = plan.build(plan.runs[0].hyper).personal
        if self.state == "best":
            return checkpoints.selected(folder, self.round, selected.of(shapes, personal))
        states = checkpoints.restore(folder, self.round, shapes)
        on_host: selected.ServingState = jax.device_get(selected.of(states, personal))
        return on_host

    def line(self, index: int) -> Line:
        """The evaluation of a run in the state; raises UsageError if the run has no such state."""
        run = self.result.runs[index]
        rule = self.config.evaluation.select
        line: Line | None
        if self.state == "best":
            line = selection.picked(run, rule)
        elif self.round == run.last.round:
            line = run.last
        else:
            lines = log.read(self.path, self.round)
            line = next((x for x in lines if (x.round, x.run) == (self.round, index)), None)
        if line is None or line.diverged:
            why = "had diverged by then"
            if not run.diverged:
                why = f"has nothing that --select={rule} selects; --state=last has its last state"
            raise UsageError(self.where, ..., f"its run {self.name(index)} {why}")
        if self.state == "best" and self._states.round[index] != line.round:
            why = "--select was another rule when it was trained"
            if self.round < line.round:
                why = f"the newest checkpoint is that of round {self.round}"
            text = f"of its run {self.name(index)} the network of round {line.round} is not there, "
            raise UsageError(self.where, ..., f"{text}because {why}; --state=last has the last one")
        return line

    def name(self, index: int) -> str:
        """The name of a run: its seed, and the values in which the runs of the folder differ."""
        run = self.cell.runs[index]
        names = divergence.varied([run.hyper for run in self.cell.runs])
        values = [f"{name}={shown(run.hyper[name])}" for name in names]
        return " ".join([f"seed={run.seed}", *values])


def open(
    flag: str,
    folder: Path,
    state: str,
    *,
    named: Collection[str] = (),
) -> Runs:
    """The runs of a folder, in one of STATES or after the round of a checkpoint.

    A warning tells of code of one's own that has changed since, and of a last state that is gone.

    flag: the flag that names the folder.
    named: the code of one's own that the command names.
    """
    folder = Path(os.path.expanduser(folder))
    where = f"--{flag}={folder}"
    try:
        chosen, cell = run_folder.read(folder, named)
        start = run_folder.record_of(folder).start
        result = run_folder.result(folder)
    except UsageError as error:
        raise UsageError(where, ..., str(error)) from None
    except OSError:
        text = "must be the folder of a run, or of several; the run must be finished, --resume "
        raise UsageError(where, ..., f"{text}goes on with it") from None
    experiment.check_names(chosen)  # which imports the code that the command names
    now = start | {"code": factories.digests(chosen.outside_of(cell.algorithm))}
    if modules := provenance.changed_code(start, now):
        text = f"code of one's own has changed since the training, in {modules}"
        warnings.warn(f"{where}: {text}", stacklevel=2)
    there = checkpoints.rounds(folder / "checkpoints")
    last = result.runs[0].last.round
    if not there:
        raise UsageError(where, ..., "has no checkpoint any more; must have one")
    if state not in STATES and int(state) not in there:
        allowed = ", ".join([*STATES, *map(str, there)])
        raise flag_error("state", state, f"must be one of {allowed}, those in {folder}")
    if state == "last" and there[-1] != last:
        text = f"the checkpoint of round {last} is gone, the last state is that of round"
        warnings.warn(f"{where}: {text} {there[-1]}", stacklevel=2)
    chosen = _alone(chosen, start.folder)
    read = functools.cache(functools.partial(_data, where, chosen, start.data))
    return Runs(where, folder, state, chosen, cell, start, result, read)


def open_cells(
    flag: str, folder: Path, state: str, *, named: Collection[str] = ()
) -> tuple[list[Runs], list[UsageError]]:
    """The runs in a folder, that of a cell or of several; and the errors about other cells in it.

    Cells stand in the order in which they were started, those of one command by method, and share
    data that are the same. Arguments are as in `open`, whose errors are raised if no cell can be
    opened.
    """
    there = [*folder.glob("*/config.json"), *folder.glob("*/*/config.json")]
    if not there or (folder / "config.json").exists():
        return [open(flag, folder, state, named=named)], []
    cells: list[Runs] = []
    errors = []
    for path in sorted(there):
        try:
            runs = open(flag, path.parent, state, named=named)
        except UsageError as error:
            errors.append(error)
            continue
        for other in cells:
            if (other.config, other.start.data) == (runs.config, runs.start.data):
                runs = replace(runs, read=other.read)
        cells.append(runs)
    if not cells:
        raise errors[0]

    def place(runs: Runs) -> tuple[str, int]:
        return runs.start.date, runs.config.method.algorithm.index(runs.cell.algorithm)

    return sorted(cells, key=place), errors


def _data(where: str, chosen: Config, digest: str) -> Assembly:
    """The data of runs. digest: of the data set in training."""
    if not (chosen.network.train_only and chosen.network.weights):  # of a frozen body
        # The networks come from the folder, and need no file of --weights any more.
        from_here = replace(chosen.network, init_from=where)
        chosen = replace(chosen, network=from_here)
    try:
        found = experiment.make(chosen)
    except UsageError as error:
        raise UsageError(where, ..., f"needs the data of its training: {error}") from None
    if digest != provenance.of_data(found.loaded):
        text = f"was trained on other data than --dataset={chosen.data.dataset} has by now"
        raise UsageError(where, ..., f"{text}; must have those, to the last bit")
    return found


def _alone(chosen: Config, place: str) -> Config:
    """A run's flags, changed to one device of one process, which does not influence its states.

    place: the working directory of the training, where the data lie if they are not in this one.
    """
    data = chosen.data
    path = sources.path_of(data.dataset)
    if not path.exists() and Path(place, path).exists():
        before = sources.TWEETS if data.dataset.startswith(sources.TWEETS) else ""
        data = replace(data, dataset=f"{before}{Path(place, path)}")
    one = replace(
        chosen.machine,
        devices="1",
        processes=(),
        hold="stream" if chosen.machine.hold == "stream" else "auto",
    )
    return replace(chosen, data=data, machine=one)


def of_folder(folder: Path, state: str, assembled: Assembly) -> Runs:
    """The finished runs of a cell in its folder.

    assembled: the experiment, whose data are not read again if they are of all seeds.
    """
    chosen = assembled.config
    runs = open("run_dir", folder, state, named=chosen.outside)
    # The rule of this command may differ from that in training.
    evaluation = replace(runs.config.evaluation, select=chosen.evaluation.select)
    runs = replace(runs, config=replace(runs.config, evaluation=evaluation))
    if set(chosen.training.seeds) <= set(assembled.splits.get(runs.cell.held_out, ())):
        return replace(runs, read=lambda: assembled)
    return runs


def chosen(runs: Runs) -> list[int]:
    """The runs with the selected hyperparameters, one of each seed.

    Where --select finds none, they are selected by validation.
    """
    for rule in (runs.config.evaluation.select, "validation"):
        if picked := selection.choose("", runs.result, rule):
            return picked.indices
    text = f"{divergence.text(runs.result.runs)}; a setting with a diverged seed is not chosen"
    raise UsageError(runs.where, ..., text)
