"""The training of a cell: the callbacks of `fit` that write log and checkpoints, and the result.

A run folder holds config.json, metrics.jsonl, checkpoints/ and, when it is finished,
result.json. A finished run keeps its last checkpoint, which also holds the selected states.
"""

import contextlib
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from fedjax_inv.algorithms import exit_strategy
from fedjax_inv.callbacks import Callback
from fedjax_inv.checks import UsageError
from fedjax_inv.fitted import Diverged, Fitted, NonfiniteWarning
from fedjax_inv.plan import Plan
from fedjax_inv.types import Tree

from .. import start
from ..assembly import machine
from ..assembly.grid import Cell
from ..assembly.metrics import ACCURACY, Measure
from ..config import Config
from . import checkpoints, divergence, events, files, records, selection, summary
from .interrupt import Interrupt
from .log import Log
from .progress import ProgressLines
from .records import Result
from .selected import SelectedStates


class Job(NamedTuple):
    """A cell that is ready to be trained."""

    config: Config
    cell: Cell
    plan: Plan
    measure: Measure = ACCURACY  # how to read the scores
    title: str = ""  # what lines of progress name the cell


class Recorder:
    """What the training of a cell writes into its folder: the callbacks, and the result."""

    def __init__(self, job: Job, folder: Path, interrupt: Interrupt) -> None:
        """folder: a folder that `run_folder.begin` has prepared."""
        self.job = job
        self._folder = folder
        config = job.config
        measure = job.measure
        self._place = folder / "checkpoints"
        self._log = log = Log(folder, job.cell, measure)
        best = SelectedStates(selection.rules(measure)[config.evaluation.select], log)
        every = config.output.checkpoint_every or config.evaluation.eval_every
        keep = config.output.keep_checkpoints
        self.callbacks: list[Callback] = [checkpoints.Resume(self._place, best), log]
        if config.output.tensorboard:
            self.callbacks.append(events.Events(folder, job.cell, log, measure.name))
        self.callbacks += [best, ProgressLines(job.title, log), interrupt]
        self.callbacks.append(checkpoints.Checkpoints(self._place, keep, every, log, best))

    @contextlib.contextmanager
    def in_words(self) -> Iterator[None]:
        """Turns an update that is not finite into start.Divergence, which says more.

        With --nonfinite=stop it ends the training; the last good checkpoint stays.
        """
        try:
            # The log marks runs that are not finite, so nothing warns of them here.
            with warnings.catch_warnings(action="ignore", category=NonfiniteWarning):
                yield
        except Diverged as error:
            saved = max(checkpoints.rounds(self._place), default=0)
            raise _diverged(error, self.job.cell, saved) from None

    def finish(self, fitted: Fitted) -> Result | None:
        """Writes the result of a cell and returns it; None if a signal has ended it early."""
        if not fitted.is_over:
            return None
        assert fitted.training is not None
        _tell_who_left(self._folder, fitted.plan, fitted.training.state.server)
        result = _result(fitted, self.job.cell, self._log, self.job.measure)
        files.write_json(self._folder / "result.json", result)
        return result


def _result(fitted: Fitted, cell: Cell, log: Log, measure: Measure) -> Result:
    """The result of a cell whose rounds are over."""
    assert fitted.training is not None
    runs = summary.summarise(cell, log.lines, measure)
    thresholds = fitted.plan.evaluations.thresholds
    groups = fitted.plan.groups
    if thresholds:
        stops = fitted.plan.program.gathered(fitted.training.stops)
        runs = [
            msgspec.structs.replace(
                run, stops=summary.stops(cell, groups, thresholds, stops, index, measure)
            )
            for index, run in enumerate(runs)
        ]
    return Result(records.CellRecord.of(cell), runs, score=measure)


def _diverged(error: Diverged, cell: Cell, saved: int) -> start.Divergence:
    """The line about a client whose loss or update is not finite.

    saved: the round of the newest checkpoint; 0 if there is none.
    """
    kept = f"the checkpoint of round {saved} is kept" if saved else "there is no checkpoint yet"
    run = cell.runs[error.index]
    parts = [f"seed={run.seed}", *(f"{k}={v}" for k, v in run.hyper.items())]
    setting = ", ".join(parts + [f"without {run.left_out}"] * bool(run.left_out))
    return start.Divergence(
        f"round {error.round}, client {error.client} ({cell.label}, {setting}): its loss or its "
        f"update is NaN or infinite; {kept}. Remedy: {divergence.REMEDY}; or --resume "
        "--nonfinite=drop to leave such a client out of its round from there on"
    )


def _tell_who_left(folder: Path, plan: Plan, server: Tree) -> None:
    """Says on stderr if an exit strategy has left a run without clients, or could not act yet.

    server: of all runs.
    """
    assessed = exit_strategy.server_in(server)
    if assessed is None:
        return
    phase = assessed.assessment.measured.shape[-2]
    if plan.rounds < phase:
        text = f"no client has left, as the run ends before, after --rounds={plan.rounds}"
        if machine.leads():
            print(f"{folder}: --set=pretraining_rounds={phase}: {text}", file=sys.stderr)
        return
    # Not the networks, which may be large.
    few = assessed.assessment._replace(gradient=(), direction=())
    try:
        exit_strategy.check_someone_stays(plan.program.gathered(exit_strategy.Server((), few)))
    except UsageError as error:
        if machine.leads():
            print(f"{folder}: {error}", file=sys.stderr)
