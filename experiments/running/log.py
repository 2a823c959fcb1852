"""metrics.jsonl: a line per evaluation and run, consistent with the checkpoints.

The first evaluation is of round 0, before any training.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from experiments.experiment import config
from experiments.parts import machine
from experiments.parts.machine import Running
from experiments.parts.watching import Watching
from experiments.running import folder as folders
from experiments.running import records
from experiments.running.records import Line
from fedjax_inv.checks import UsageError

_NAME = "metrics.jsonl"


def read(folder: Path, done: int | None = None) -> list[Line]:
    """The lines of a run folder up to round `done`, or all of them.

    Without `done`, a damaged last line does not count: the machine may have crashed while writing
    it. Raises UsageError, with the number of the line, if another line is damaged or missing.
    """
    path = folder / _NAME
    begun = folders.begun(folder)
    defaults = {"rounds": Running.rounds, "eval_every": Watching.eval_every}
    asked = {name: value for name, value in begun.flags.items() if name in defaults}
    flags = defaults | config.typed(asked)
    lines: list[Line] = []
    texts = path.read_bytes().splitlines() if path.is_file() else []
    expected = _evaluations(flags["rounds"], flags["eval_every"], len(begun.cell.runs))
    for number, text in enumerate(texts, 1):
        at = next(expected, None)
        if done is not None and (at is None or at[0] > done):
            break
        line = records.decoded(text, Line)
        if line is None or (line.round, line.run) != at:
            if number == len(texts) and done is None:
                break
            raise _damaged(path, number, at or (0, 0))
        lines.append(line)
    at = next(expected, None) if len(lines) == len(texts) else None
    if done is not None and at is not None and at[0] <= done:
        raise _damaged(path, len(texts) + 1, at)
    return lines


def _damaged(path: Path, number: int, at: tuple[int, int]) -> UsageError:
    return UsageError(
        str(path),
        ...,
        f"line {number} is damaged or missing, must be of round {at[0]} and run {at[1]}; "
        f"put a copy in its place, or delete {path.parent} to begin anew",
    )


def _evaluations(rounds: int, every: int, num_runs: int) -> Iterator[tuple[int, int]]:
    """The (round, run) of each line."""
    for done in range(0, rounds + every, every):
        for run in range(num_runs):
            yield min(done, rounds), run


class Log:
    """The log of a cell that is running."""

    def __init__(self, folder: Path, done: int) -> None:
        """Keeps the lines up to round `done`, the checkpoint's, and deletes later ones."""
        self._path = folder / _NAME
        self.lines = read(folder, done) if done else []
        self.seconds = self.lines[-1].seconds if self.lines else 0.0
        folders.write(self._path, "".join(map(_text, self.lines)))

    def append(self, lines: Sequence[Line]) -> list[Line]:
        """Adds the lines of one evaluation, and returns them with totals over all rounds.

        lines: one per run; their `bytes`, `dropped` and `diverged` are of the last segment alone.
        """
        before = {line.run: line for line in self.lines[-len(lines) :]}
        added = [_added(line, before.get(line.run)) for line in lines]
        self.lines += added
        if machine.leads():
            with self._path.open("a") as file:
                file.writelines(map(_text, added))
        return added

    def flush(self) -> None:
        """Waits until the lines are on the disk, so that no checkpoint lacks its lines."""
        if machine.leads():
            with self._path.open("a") as file:
                folders.flushed(file)


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


def _text(line: Line) -> str:
    return json.dumps(line, default=msgspec.to_builtins) + "\n"
