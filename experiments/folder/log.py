"""metrics.jsonl: a line per evaluation and run, consistent with the checkpoints.

The first evaluation is of round 0, before any training, unless --noeval_start leaves it out.
"""

import json
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from fedjax_inv.callbacks import Callback
from fedjax_inv.checks import UsageError
from fedjax_inv.fitted import Fitted

from ..assembly import machine
from ..assembly.grid import Cell
from ..assembly.metrics import Measure
from . import files, records, summary
from .records import Line

_NAME = "metrics.jsonl"


def read(folder: Path, done: int | None = None, num_runs: int = 0) -> list[Line]:
    """The lines of a run folder up to round `done`, or all of them.

    A damaged last line does not count: the machine may have crashed while writing it.

    done: a round with an evaluation. num_runs: of the cell; 0 for as many as there are lines of.

    Raises UsageError, with the number of the line, if another line is damaged, and if lines up to
    round `done` are gone.
    """
    path = folder / _NAME
    texts = path.read_bytes().splitlines() if path.exists() else []
    lines = []
    for number, text in enumerate(texts, 1):
        line = records.decoded(text, Line)
        if line is None:
            if number == len(texts):
                break
            raise UsageError(
                str(path),
                ...,
                f"line {number} is damaged, or of another version; put a copy in its place, or "
                f"delete {folder} to begin anew",
            )
        if done is None or line.round <= done:
            lines.append(line)
    if done:
        _check_whole(path, lines, done, num_runs)
    return lines


def _check_whole(path: Path, lines: Sequence[Line], done: int, num_runs: int) -> None:
    """Raises UsageError unless each evaluation has a line of each run, the last of round `done`."""
    count = num_runs or max((line.run + 1 for line in lines), default=0)
    of_rounds: dict[int, list[int]] = {done: []}
    for line in lines:
        of_rounds.setdefault(line.round, []).append(line.run)
    for number, runs in of_rounds.items():
        if not runs or runs != [*range(count)]:
            text = f"lacks lines of round {number}; put a copy in its place"
            raise UsageError(str(path), ..., f"{text}, or delete {path.parent} to begin anew")


class Log(Callback):
    """The log of a cell that is running; `new` are the lines of the last evaluation."""

    def __init__(self, folder: Path, cell: Cell, measure: Measure) -> None:
        """folder: the cell's. measure: how to read the scores."""
        self._path = folder / _NAME
        self._cell = cell
        self._measure = measure
        self.new: list[Line] = []

    def begin(self, fitted: Fitted) -> None:
        """Keeps the lines up to the checkpoint's round, and deletes later ones.

        Raises UsageError if the log does not reach that round.
        """
        done = fitted.round
        self.lines = read(self._path.parent, done, len(fitted.runs)) if done else []
        self._start = time.monotonic() - (self.lines[-1].seconds if self.lines else 0.0)
        files.write(self._path, _texts(self.lines))

    def evaluated(self, fitted: Fitted) -> None:
        """Adds the lines of an evaluation, with totals over all rounds."""
        assert fitted.outcome is not None
        evaluations = fitted.plan.evaluations
        new = summary.lines(
            self._cell,
            fitted.plan.groups,
            fitted.outcome,
            fitted.outcome.traffic,
            done=fitted.round,
            seconds=time.monotonic() - self._start,
            drops=evaluations.nonfinite == "drop",
            measure=self._measure,
            end_at_stop=evaluations.end_at_stop,
        )
        self.append(new)

    def append(self, lines: Sequence[Line]) -> None:
        """Adds lines, one per run, whose `bytes`, `dropped` and `diverged` are of a segment."""
        before = {line.run: line for line in self.lines[-len(lines) :]}
        self.new = [_added(line, before.get(line.run)) for line in lines]
        self.lines += self.new
        if machine.leads():
            with open(self._path, "a") as file:
                file.write(_texts(self.new))

    def flush(self) -> None:
        """Waits until the lines are on the disk, so that no checkpoint lacks its lines."""
        if machine.leads():
            with open(self._path, "a") as file:
                os.fsync(file.fileno())


def _added(line: Line, last: Line | None) -> Line:
    """A line plus the totals of the same run's line before it."""
    if last is None:
        return line
    dropped = None if line.dropped is None else line.dropped + (last.dropped or 0)
    return msgspec.structs.replace(
        line,
        bytes=last.bytes + line.bytes,
        diverged=last.diverged or line.diverged,
        dropped=dropped,
    )


def _texts(lines: Iterable[Line]) -> str:
    return "".join(json.dumps(line, default=msgspec.to_builtins) + "\n" for line in lines)
