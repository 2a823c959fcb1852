"""Finished runs: their folder, their data and their states."""

import dataclasses
import functools
import os
import warnings
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp

from fedjax_inv import platforms
from fedjax_inv.checks import UsageError
from fedjax_inv.data import sources
from fedjax_inv.inputs import Run
from fedjax_inv.one_run import Training
from fedjax_inv.plan import Plan
from fedjax_inv.types import Algorithm, Array, Tree

from .assembly import experiment, factories, method, network
from .assembly.experiment import Setup
from .assembly.grid import Cell
from .config import Config
from .errors import flag_error, shown
from .folder import checkpoints, divergence, log, provenance, run_folder, selected, selection
from .folder.records import Line, Provenance, Result
from .folder.selected import ServingState

STATES = ("best", "last")


@dataclasses.dataclass(frozen=True, eq=False)
class Runs:
    """The runs in a folder: a cell that `train` or `sweep` has run."""

    where: str  # the flag that names the folder, with its value
    path: Path
    config: Config  # on one device of one process
    cell: Cell
    start: Provenance
    result: Result
    known_data: Setup | None = None  # None: to be read
    states_read: dict[str, ServingState] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def data(self) -> Setup:
        """The data of the runs, divided among clients as in training."""
        if self.known_data is not None:
            return self.known_data
        chosen, cell = self.config, self.cell
        held_out, validate = cell.held_out or "none", cell.validate or ""
        chosen = replace(chosen, data=replace(chosen.data, held_out=held_out, validate=validate))
        if not (chosen.network.train_only and chosen.network.weights):  # of a frozen body
            # The networks come from the folder, and need no file of --weights any more.
            from_here = replace(chosen.network, init_from=str(self.path))
            chosen = replace(chosen, network=from_here)
        try:
            found = experiment.make(chosen)
        except UsageError as error:
            raise UsageError(self.where, ..., f"needs the data of its training: {error}") from None
        if self.start.data != provenance.of_data(found.loaded):
            text = f"was trained on other data than --dataset={chosen.data.dataset} has by now"
            raise UsageError(self.where, ..., f"{text}; must have those, to the last bit")
        return found

    def run(self, index: int, state: str) -> "OneRun":
        """A run by its number in the cell, in one of STATES or after the round of a checkpoint."""
        return OneRun(self, index, state)

    def select(self, seed: int, number: int, state: str) -> "OneRun":
        """The run with this number among the runs of a seed."""
        indices = [index for index, run in enumerate(self.cell.runs) if run.seed == seed]
        return self.run(indices[number], state)

    def algorithm(self, index: int = 0, *, rendered: bool = False) -> Algorithm:
        """The algorithm of a run, for predictions; its local training is not the run's.

        rendered: whether inputs are rendered already.
        """
        model = self.data.model
        if rendered and not self.data.frozen:
            data = self.data.dataset._replace(render=None)
            own_loss = factories.is_outside(self.config.method.loss)
            model = network.make(self.config.network, data, own_loss=own_loss)
        factory, hyper = self.data.factory(self.cell), self.cell.runs[index].hyper
        plain = method.of_any_size(factory, self.config.training, model, hyper)
        precision = self.plan.experiment.precision

        def predict(server: Tree, own: Tree, x: Tree) -> Array:
            with platforms.products_at(precision):
                return plain.predict(server, own, x)

        return plain._replace(predict=predict)

    @functools.cached_property
    def shapes(self) -> Training:
        """The shapes of the states of all runs."""
        return self.plan.program.shapes(self.plan.data, self.plan.inputs)

    @functools.cached_property
    def plan(self) -> Plan:
        """How the runs are trained."""
        return self.data.plan(self.cell)

    def states(self, state: str) -> ServingState:
        """The states of all runs, in one of STATES or after the round of a checkpoint."""
        if state not in self.states_read:
            folder, there = self.path / "checkpoints", self.rounds()
            if not there:
                raise UsageError(self.where, ..., "has no checkpoint any more; must have one")
            if state == "best":
                shapes = selected.of(self.shapes, self.algorithm().personal)
                found = checkpoints.selected(folder, there[-1], shapes)
            else:
                done = there[-1] if state == "last" else self.check_round(int(state))
                states = checkpoints.restore(folder, done, self.shapes)
                found = jax.device_get(selected.of(states, self.algorithm().personal))
            self.states_read[state] = found
        return self.states_read[state]

    def rounds(self) -> list[int]:
        """The rounds of the checkpoints that are there."""
        return checkpoints.rounds(self.path / "checkpoints")

    def check_round(self, done: int) -> int:
        """The round of a checkpoint; raises UsageError if there is none."""
        if done not in self.rounds():
            allowed = ", ".join([*STATES, *map(str, self.rounds())])
            raise flag_error("state", done, f"must be one of {allowed}, those in {self.path}")
        return done


@dataclasses.dataclass(frozen=True)
class OneRun:
    """A run of a folder, in one of STATES or after the round of a checkpoint."""

    runs: Runs
    index: int  # in the cell
    state: str

    @property
    def run(self) -> Run:
        """Its seed and hyperparameters."""
        return self.runs.cell.runs[self.index]

    @property
    def name(self) -> str:
        """Its name among the runs of the folder: its seed, and the values in which they differ."""
        names = divergence.varied([run.hyper for run in self.runs.cell.runs])
        values = [f"{name}={shown(self.run.hyper[name])}" for name in names]
        return " ".join([f"seed={self.run.seed}", *values])

    def line(self) -> Line:
        """The evaluation of the state; raises UsageError if the run has no such state."""
        result, rule = self.runs.result.runs[self.index], self.runs.config.evaluation.select
        if self.state in STATES:
            line = selection.picked(result, rule) if self.state == "best" else result.last
        else:
            done = self.runs.check_round(int(self.state))
            at = (line for line in log.read(self.runs.path, done) if line.round == done)
            line = next((line for line in at if line.run == self.index), None)
        if line is None or line.diverged:
            why = "had diverged by then"
            if not result.diverged:
                why = f"has nothing that --select={rule} selects; --state=last has its last state"
            raise UsageError(self.runs.where, ..., f"its run {self.name} {why}")
        return line

    def served(self) -> ServingState:
        """The state: server [...], clients [C, ...] and round [], on the host."""
        mine = jax.tree.map(lambda leaf: leaf[self.index], self.runs.states(self.state))
        at = self.line().round
        if self.state == "best" and mine.round != at:
            text = (
                f"of its run {self.name} the network of round {at} was not saved, because --select "
                "was another rule when it was trained; --state=last has its last network"
            )
            raise UsageError(self.runs.where, ..., text)
        return mine

    def algorithm(self, *, rendered: bool = False) -> Algorithm:
        """Its algorithm, as in `Runs.algorithm`."""
        return self.runs.algorithm(self.index, rendered=rendered)


def unseen(algorithm: Algorithm, server: Tree) -> Tree:
    """The state of a new client; () unless the algorithm is personal."""
    return algorithm.init_client(server, jnp.int32(0)) if algorithm.personal else ()


def open(flag: str, folder: Path, *, named: Collection[str] = ()) -> Runs:
    """The runs of a folder. A warning tells of code of one's own that has changed since.

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
        text = (
            "must be the folder of a run; of a sweep, that of one cell; the run must be finished, "
            "--resume goes on with it"
        )
        raise UsageError(where, ..., text) from None
    if start.code != factories.digest(chosen.outside_of(cell.algorithm)):
        warnings.warn(f"{where}: code of one's own has changed since the training", stacklevel=2)
    return Runs(where, folder, _alone(chosen, start.folder), cell, start, result)


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


def of_folder(folder: Path, assembled: Setup) -> Runs:
    """The finished runs of a cell in its folder.

    assembled: the experiment, whose data are not read again if they are of all seeds.
    """
    chosen = assembled.config
    runs = open("run_dir", folder, named=chosen.outside)
    # The rule of this command may differ from that in training.
    evaluation = replace(runs.config.evaluation, select=chosen.evaluation.select)
    runs = replace(runs, config=replace(runs.config, evaluation=evaluation))
    if set(chosen.training.seeds) <= set(assembled.splits.get(runs.cell.held_out, ())):
        # Its plan is for one device, as the states are read.
        return replace(runs, known_data=replace(assembled, config=runs.config))
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
