"""metrics.jsonl: a line per evaluation and run, consistent with the checkpoints.

The first evaluation is of round 0, before any training, unless --noeval_start leaves it out.
"""

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from fedjax_inv.checks import UsageError

from ..parts import machine
from ..running import files, records
from ..running.records import Line

_NAME = "metrics.jsonl"


def read(folder: Path, done: int | None = None) -> list[Line]:
    """The lines of a run folder up to round `done`, or all of them.

    A damaged last line does not count: the machine may have crashed while writing it. Raises
    UsageError, with the number of the line, if another line is damaged.
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
    return lines


class Log:
    """The log of a cell that is running."""

    def __init__(self, folder: Path, done: int, num_runs: int) -> None:
        """Keeps the lines up to round `done`, the checkpoint's, and deletes later ones.

        Raises UsageError if the log does not reach that round.
        """
        self._path = folder / _NAME
        self.lines = read(folder, done) if done else []
        last = [line.run for line in self.lines if line.round == done]
        if done and last != [*range(num_runs)]:
            text = f"lacks lines of round {done}, which has a checkpoint; put a copy in its place"
            raise UsageError(str(self._path), ..., f"{text}, or delete {folder} to begin anew")
        self.seconds = self.lines[-1].seconds if self.lines else 0.0
        files.write(self._path, _texts(self.lines))

    def append(self, lines: Sequence[Line]) -> list[Line]:
        """Adds the lines of one evaluation, and returns them with totals over all rounds.

        lines: one per run; their `bytes`, `dropped` and `diverged` are of the last segment alone.
        """
        before = {line.run: line for line in self.lines[-len(lines) :]}
        added = [_added(line, before.get(line.run)) for line in lines]
        self.lines += added
        if machine.leads():
            with open(self._path, "a") as file:
                file.write(_texts(added))
        return added

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
