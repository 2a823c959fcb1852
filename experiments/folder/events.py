"""TensorBoard events, through tensorboardX: a folder in tensorboard/ for each run.

Each start writes the events anew from metrics.jsonl. So a resumed run has every step exactly once,
even if it began without --tensorboard.
"""

import importlib.util
import math
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from fedjax_inv.callbacks import Callback
from fedjax_inv.checks import UsageError
from fedjax_inv.fitted import Fitted

from ..assembly import machine
from ..assembly.grid import Cell
from . import divergence
from .log import Log
from .records import Line

_NAME = "tensorboard"


def check(asked: bool) -> None:
    """Raises UsageError if events are asked for and their package is not installed."""
    if asked and importlib.util.find_spec("tensorboardX") is None:
        raise UsageError(
            "--tensorboard=true", ..., "needs a package: pip install 'fedjax_inv[tensorboard]'"
        )


class Events(Callback):
    """The events of a cell's runs."""

    def __init__(self, folder: Path, cell: Cell, log: Log, score: str) -> None:
        """folder: the cell's. log: of the cell; its callback comes before this one.

        score: the name of the score.
        """
        self._folder = folder / _NAME
        self._cell = cell
        self._log = log
        self._score = score
        self._writers: list[Any] = []

    def begin(self, fitted: Fitted) -> None:
        """Writes the events of the log so far."""
        if not machine.leads():
            return
        import tensorboardX  # slow, and optional

        shutil.rmtree(self._folder, ignore_errors=True)
        places = (str(self._folder / name) for name in run_names(self._cell))
        self._writers = [tensorboardX.SummaryWriter(place) for place in places]
        self._add(self._log.lines)

    def evaluated(self, fitted: Fitted) -> None:
        """Writes the events of an evaluation."""
        self._add(self._log.new)

    def end(self, fitted: Fitted) -> None:
        """Closes the files."""
        for writer in self._writers:
            writer.close()

    def _add(self, lines: Sequence[Line]) -> None:
        for line in lines if self._writers else ():
            for name, value in scalars(line, self._score):
                self._writers[line.run].add_scalar(name, value, line.round)
        for writer in self._writers:
            writer.flush()


def run_names(cell: Cell) -> list[str]:
    """The names of the runs: the seed, and the hyperparameters in which the runs differ."""
    varied = divergence.varied([run.hyper for run in cell.runs])
    return [
        " ".join(
            [f"seed={run.seed}", *(f"{name}={run.hyper[name]}" for name in varied)]
            + [f"without {run.left_out}"] * bool(run.left_out)
        )
        for run in cell.runs
    ]


def _tags(names: Iterable[str]) -> list[str]:
    """Different names of characters that TensorBoard allows."""
    found: list[str] = []
    for name in names:
        tag = re.sub(r"[^-/\w.]", "_", name)
        while tag in found:
            tag += "_"
        found.append(tag)
    return found


def scalars(line: Line, score: str = "accuracy") -> Iterator[tuple[str, float]]:
    """The (name, value) pairs of a line of the log; values that are not finite are left out.

    score: the name of the score.
    """
    score = score.replace(" ", "_")
    values = {
        "training/loss": line.train_loss,
        f"{score}/validation": line.validation_score,
        f"{score}/test": line.test_score,
        f"{score}/worst_domain": line.worst_score,
        "megabytes_sent": line.bytes / 1e6,
    }
    for tag, domain in zip(_tags(line.domains), line.domains.values(), strict=True):
        if not domain.examples:  # it has no score
            continue
        values[f"{score}_by_domain/{tag}"] = domain.score
        values[f"loss_by_domain/{tag}"] = domain.loss
    yield from (
        (name, value)
        for name, value in values.items()
        if value is not None and math.isfinite(value)
    )
