"""Finished runs, by their folder: what all binaries share that look at what was trained."""

import contextlib
import os
from pathlib import Path
from typing import Any, NamedTuple

import jax
from absl import flags

from experiments.experiment import assemble, config
from experiments.experiment.assemble import Assembled
from experiments.experiment.config import Config
from experiments.experiment.grid import Cell
from experiments.parts import data as data_flags
from experiments.parts import selection, training
from experiments.running import checkpoints, kept, provenance
from experiments.running import folder as folders
from experiments.running.checkpoints import Checkpoints
from experiments.running.kept import Served
from fedjax_inv import program
from fedjax_inv.checks import UsageError
from fedjax_inv.types import Algorithm

# Which states of a run there are: the one that --select selects, and that of its end.
STATES = ("best", "last")
STATE_HELP = "best: the state that the run's --select selects; last: that of its end."


class Finished(NamedTuple):
    """A finished run folder."""

    where: str  # the flag that names it, with the folder
    folder: Path
    config: Config  # on one device of one process
    cell: Cell
    result: dict[str, Any]  # what result.json says
    starts: list[dict[str, Any]]  # what config.json says of each; none in an earlier version's

    def told(self, which: int, state: str) -> dict[str, Any] | None:
        """The evaluation of a run in a state; None where there is no such, or it diverged."""
        run = self.result["runs"][which]
        if state == "best":
            return selection.picked(run, self.config.watching.select)
        return None if run["diverged"] else run["last"]

    def varied(self, which: int) -> list[str]:
        """The hyperparameters of a run that others of its folder have otherwise."""
        return [
            f"{name}={value:g}"
            for name, value in self.cell.runs[which].hyper.items()
            if any(other.hyper[name] != value for other in self.cell.runs)
        ]

    def name(self, which: int) -> str:
        """What a run is called among those of its folder."""
        return " ".join([f"seed={self.cell.runs[which].seed}", *self.varied(which)])


def find(flag: str, folder: Path, data_dir: str = "", dataset: str = "") -> Finished:
    """The finished run of a folder. flag: the one that names it. data_dir: another than it had.
    dataset: other data that are asked for.

    Raises UsageError, in one line, if it is no run, or an unfinished one.
    """
    where = f"--{flag}={folder}"
    try:
        chosen, cell = folders.read(folder)
        starts = folders.starts(folder)
        result = folders.result(folder, cell.record())
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None
    except OSError:
        result = None
    # Where a run goes on with more rounds, its checkpoints are past its result.
    if result is None or folders.goes_on(result):
        raise UsageError(f"{where}: must be the folder of a finished run{_why(folder)}")
    return Finished(where, folder, alone(chosen, data_dir, dataset), cell, result, starts)


def alone(chosen: Config, data_dir: str = "", dataset: str = "") -> Config:
    """A run's flags on one device of one process: how it was spread does not matter to its state.

    data_dir, dataset: as of `find`. Raises UsageError where data_dir was set and nothing is looked
    for there.
    """
    data_flags.check_data_dir(data_dir, chosen.data.dataset, dataset)
    one: dict[str, Any] = {"devices": 1, "hold": "auto", "num_processes": 1, "process_id": 0}
    one |= {"coordinator_address": "", "data_dir": data_dir or chosen.data.data_dir}
    return config.changed(chosen, **one)


def _why(folder: Path) -> str:
    """What a folder is that holds no result of a run."""
    if not os.path.isdir(folder):  # it may have no name that a path can have
        return ""
    if (folder / "config.json").is_file():
        return "; this one is unfinished, --resume goes on with it"
    cells = sorted(place.parent.name for place in folder.glob("*/config.json"))
    return f"; of a sweep, that of one algorithm: {', '.join(cells)}" if cells else ""


def define(values: flags.FlagValues) -> None:
    """Defines the flags that say which state of which run."""
    for name, default, text in (
        ("run", "", "The folder of a finished run; of a sweep, that of one algorithm."),
        ("state", "best", STATE_HELP),
        ("data_dir", "", "The TFDS folder; default: $TFDS_DATA_DIR, or TFDS's own."),
    ):
        flags.DEFINE_string(name, default, text, values)


def check_state(state: str) -> None:
    """Raises UsageError for a --state that there is not."""
    if state not in STATES:
        raise UsageError(f"--state={state}: must be one of {', '.join(STATES)}")


def assembled(chosen: Config, cell: Cell) -> Assembled:
    """The data of a run's flags, dealt as they were."""
    return assemble.assemble(config.changed(chosen, held_out=cell.held_out or "none", init_from=""))


def check_data(one: Finished, made: Assembled) -> None:
    """Raises UsageError unless a run's data are still those that it was trained on."""
    if one.starts and one.starts[-1].get("data") not in (None, provenance.fingerprint(made.data)):
        raise UsageError(
            f"{one.where}: was trained on other data than --dataset={one.config.data.dataset} has "
            "by now; must have those, to the last bit"
        )


def algorithm(one: Finished, made: Assembled, which: int) -> Algorithm:
    """The algorithm of a run; its local work is another, which does not matter to how it serves."""
    return assemble.algorithm(
        one.config, one.cell, made.model, one.cell.runs[which].hyper, training.Sizes()
    )


def served(one: Finished, made: Assembled, state: str) -> Served:
    """What all runs of a folder serve by in a state, on the host; `Finished.told` of what that is.

    Raises UsageError if it cannot be read, or the checkpoint is another run's. Of a run whose best
    state was not kept the round is another than is told.
    """
    place = one.folder / "checkpoints"
    if not checkpoints.rounds(place):
        raise UsageError(f"{one.where}: has no checkpoint any more; must have one")
    ready = made.prepare(one.cell)
    like = jax.eval_shape(program.make(ready.experiment).init, made.data, ready.inputs)
    personal = algorithm(one, made, 0).personal
    with contextlib.closing(Checkpoints(place, one.config, one.cell, reads=True)) as reader:
        done = reader.latest()
        if state == "best":
            return reader.kept(done, kept.of(like, personal))
        return jax.device_get(kept.of(reader.restore(done, like), personal))


def check_told(one: Finished, which: int, state: str) -> None:
    """Raises UsageError if a run has no such state: it diverged, or nothing of it was selected."""
    if one.told(which, state) is None:
        why = "has diverged"
        if not one.result["runs"][which]["diverged"]:
            why = f"has nothing that --select={one.config.watching.select} selects"
        raise UsageError(f"{one.where}: its run {one.name(which)} {why}")


def check_kept(one: Finished, held: Served, which: int, state: str) -> None:
    """Raises UsageError if what is held of a run is not what is told of it."""
    check_told(one, which, state)
    told = one.told(which, state)
    if state == "best" and told and held.round[which] != told["round"]:
        raise UsageError(
            f"{one.where}: its run {one.name(which)} was not kept as it was after round "
            f"{told['round']}, by an earlier version or another --select; --state=last was"
        )
