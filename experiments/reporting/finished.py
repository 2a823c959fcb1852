"""Access to finished runs: their folder, their data and their states."""

import dataclasses
import functools
import os
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_inv import platforms
from fedjax_inv.checks import UsageError
from fedjax_inv.fit import Plan
from fedjax_inv.program import Run, Training
from fedjax_inv.types import Algorithm, Array, Tree

from .. import selection
from ..experiment import assemble, config
from ..experiment.assemble import Assembled
from ..experiment.config import Config
from ..experiment.grid import Cell
from ..flags import outside
from ..flags.flag import (
    flag_error,
    shown,
)
from ..parts import network as networks
from ..running import (
    checkpoints,
    divergence,
    log,
    provenance,
    selected,
)
from ..running import folder as folders
from ..running.records import Line, Result, Start
from ..running.selected import Served

STATES = ("best", "last")


@dataclasses.dataclass(frozen=True, eq=False)
class Runs:
    """The runs in a folder: a cell that `train` or `sweep` has run."""

    where: str  # the flag that names the folder, with its value
    path: Path
    config: Config  # on one device of one process
    cell: Cell
    start: Start
    result: Result
    known_data: Assembled | None = None  # None: to be read

    @functools.cached_property
    def data(self) -> Assembled:
        """The data of the runs, divided among clients as in training.

        Raises UsageError if the data are not those that the runs were trained on.
        """
        if self.known_data is not None:
            return self.known_data
        chosen = config.changed(self.config, held_out=self.cell.held_out or "none", init_from="")
        try:
            found = assemble.assemble(chosen)
        except UsageError as error:
            raise UsageError(self.where, ..., f"needs the data of its training: {error}") from None
        if self.start.data != provenance.of_data(found.loaded):
            text = f"was trained on other data than --dataset={chosen.dataset} has by now"
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
        dataset = self.data.dataset
        model = (
            networks.make(self.config, dataset._replace(render=None))
            if rendered
            else self.data.model
        )
        hyper = self.cell.runs[index].hyper
        plain = assemble.algorithm(self.config, self.cell, model, self.data.task, hyper)
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

    @functools.cached_property
    def lines(self) -> list[Line]:
        """All evaluations of the runs."""
        return log.read(self.path)

    def states(self, state: str) -> Served:
        """The states of all runs, in one of STATES or after the round of a checkpoint.

        Raises UsageError if there is no such checkpoint, or if it cannot be read.
        """
        if state not in self._read:
            done, personal = self._done(), self.algorithm().personal
            if state == "best":
                shapes = selected.of(self.shapes, personal)
                self._read[state] = checkpoints.selected(self._folder, done, shapes)
            else:
                done = done if state == "last" else self.check_round(int(state))
                states = checkpoints.restore(self._folder, done, self.shapes)
                self._read[state] = jax.device_get(selected.of(states, personal))
        return self._read[state]

    @functools.cached_property
    def _read(self) -> dict[str, Served]:
        """The states that `states` has read."""
        return {}

    def check_round(self, done: int) -> int:
        """The round of a checkpoint; raises UsageError if there is none."""
        there = checkpoints.rounds(self._folder)
        if done not in there:
            allowed = ", ".join([*STATES, *map(str, there)])
            raise flag_error("state", done, f"must be one of {allowed}, those in {self.path}")
        return done

    @property
    def _folder(self) -> Path:
        return self.path / "checkpoints"

    def _done(self) -> int:
        """The round of the newest checkpoint."""
        rounds = checkpoints.rounds(self._folder)
        if not rounds:
            raise UsageError(self.where, ..., "has no checkpoint any more; must have one")
        return rounds[-1]


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
    def varied(self) -> list[str]:
        """Its values of the hyperparameters in which runs of the folder differ."""
        return varied(self.runs.cell, self.index)

    @property
    def name(self) -> str:
        """Its name among the runs of the folder."""
        return " ".join([f"seed={self.run.seed}", *self.varied])

    def line(self) -> Line:
        """The evaluation of the state; raises UsageError if the run has no such state."""
        result, rule = self.runs.result.runs[self.index], self.runs.config.select
        if self.state not in STATES:
            return self._line_after(int(self.state))
        best = self.state == "best"
        line = selection.picked(result, rule) if best else result.last
        if line is None or (result.diverged and not best):
            why = "has diverged"
            if not result.diverged:
                why = f"has nothing that --select={rule} selects; --state=last has its last state"
            raise UsageError(self.runs.where, ..., f"its run {self.name} {why}")
        return line

    def _line_after(self, done: int) -> Line:
        """The evaluation after the round of a checkpoint."""
        self.runs.check_round(done)
        mine = (line for line in self.runs.lines if line.run == self.index)
        line = next((line for line in mine if line.round == done), None)
        if line is None or line.diverged:
            text = f"its run {self.name} had diverged by round {done}"
            raise UsageError(self.runs.where, ..., text)
        return line

    def served(self) -> Served:
        """The state: server [...], clients [C, ...] and round [], on the host.

        Raises UsageError if the run has no such state, or if it cannot be read.
        """
        found = self.runs.states(self.state)
        mine = jax.tree.map(lambda leaf: leaf[self.index], found)
        at = self.line().round
        if self.state == "best" and mine.round != at:
            raise NotSaved(self, at)
        return mine

    def algorithm(self, *, rendered: bool = False) -> Algorithm:
        """Its algorithm, as in `Runs.algorithm`."""
        return self.runs.algorithm(self.index, rendered=rendered)


class NotSaved(UsageError):
    """The network of a run's selected round was not saved.

    Attributes:
      why: what was not saved and why, without the run.
    """

    def __init__(self, one: OneRun, done: int) -> None:
        self.why = (
            f"network of round {done} was not saved, because --select was another rule when it was "
            "trained"
        )
        text = f"the {self.why}; --state=last has its last network"
        super().__init__(one.runs.where, ..., f"of its run {one.name} {text}")


def unseen(algorithm: Algorithm, server: Tree) -> Tree:
    """The state of a new client; () unless the algorithm is personal."""
    return algorithm.init_client(server, jnp.int32(0)) if algorithm.personal else ()


def varied(cell: Cell, index: int) -> list[str]:
    """A run's values of the hyperparameters in which the runs of its cell differ."""
    names = divergence.varied([run.hyper for run in cell.runs])
    return [f"{name}={shown(cell.runs[index].hyper[name])}" for name in names]


def open(
    flag: str,
    folder: Path,
    *,
    named: Collection[str] = (),
    data_dir: str = "",
) -> Runs:
    """The runs of a folder. A warning tells of code of one's own that has changed since.

    flag: the flag that names the folder.
    named: the code of one's own that the command names.
    data_dir: the TFDS folder, if it differs from that in training.

    Raises UsageError if the folder holds no finished runs, and if it names other code.
    """
    folder = Path(os.path.expanduser(folder))
    where = f"--{flag}={folder}"
    try:
        chosen, cell = folders.read(folder, named)
        start = folders.begun(folder).start
        result = folders.result(folder)
    except UsageError as error:
        raise UsageError(where, ..., str(error)) from None
    except OSError:
        text = (
            "must be the folder of a run; of a sweep, that of one cell; the run must be finished, "
            "--resume goes on with it"
        )
        raise UsageError(where, ..., text) from None
    if start.code != outside.digest(chosen.outside_of(cell.algorithm)):
        warnings.warn(f"{where}: code of one's own has changed since the training", stacklevel=2)
    return Runs(where, folder, _alone(chosen, data_dir), cell, start, result)


def _alone(chosen: Config, data_dir: str) -> Config:
    """A run's flags, changed to one device of one process, which does not influence its states."""
    hold = "stream" if chosen.hold == "stream" else "auto"
    one: dict[str, Any] = {"devices": "1", "hold": hold, "num_processes": 1, "process_id": 0}
    one["distributed"] = False
    one |= {"coordinator_address": "", "data_dir": data_dir or chosen.data_dir}
    return config.changed(chosen, **one)
