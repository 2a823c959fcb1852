"""metrics.jsonl: a line per evaluation and run, kept in step with the checkpoints.

The first evaluation is of round 0, before any training; logs of earlier versions have none.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from experiments.parts import machine
from experiments.running import folder as folders
from experiments.running import records
from fedjax_inv.checks import UsageError

_NAME = "metrics.jsonl"


def read(folder: Path, done: int | None = None) -> list[dict[str, Any]]:
    """The lines of a run folder up to round `done`, or all of them.

    Raises UsageError, with the number of the line, if one is damaged or missing before that; but a
    last line that a machine wrote as it went down does not count.
    """
    path = folder / _NAME
    config, cell = folders.read(folder)
    lines: list[dict[str, Any]] = []
    texts = path.read_text(errors="replace").splitlines() if path.exists() else []
    first = _parsed(texts[0]) if texts else None
    begins_at = 0 if first is None or first["round"] == 0 else config.watching.eval_every
    expected = _evaluations(
        begins_at, config.run.rounds, config.watching.eval_every, len(cell.runs)
    )
    for number, text in enumerate(texts, 1):
        at = next(expected, None)
        if done is not None and (at is None or at[0] > done):
            break
        line = _parsed(text)
        if line is None or (line["round"], line["run"]) != at:
            if number == len(texts) and done is None:
                break
            raise UsageError(_damaged(path, number, at or (0, 0)))
        lines.append(line)
    at = next(expected, None) if len(lines) == len(texts) else None
    if done is not None and at is not None and at[0] <= done:
        raise UsageError(_damaged(path, len(texts) + 1, at))
    return lines


def _parsed(text: str) -> dict[str, Any] | None:
    """The record of a line; None if it is none."""
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return line if records.is_of(line, records.LINE) else None


def _damaged(path: Path, number: int, at: tuple[int, int]) -> str:
    return (
        f"{path}: line {number} is damaged or missing, must be of round {at[0]} and run {at[1]}; "
        f"put a copy in its place, or delete {path.parent} to begin anew"
    )


def _evaluations(
    begins_at: int, rounds: int, every: int, num_runs: int
) -> Iterator[tuple[int, int]]:
    """The (round, run) of each line."""
    for done in range(begins_at, rounds + every, every):
        for run in range(num_runs):
            yield min(done, rounds), run


class Log:
    """The lines of a run that is going on."""

    def __init__(self, folder: Path, done: int) -> None:
        """Keeps the lines up to round `done`; what was written after the checkpoint goes."""
        self._path = folder / _NAME
        self.lines = read(folder, done) if done else []
        self.seconds = self.lines[-1]["seconds"] if self.lines else 0.0
        folders.write(self._path, "".join(json.dumps(line) + "\n" for line in self.lines))

    def append(self, lines: list[dict[str, Any]]) -> None:
        """Adds the lines of one evaluation, with what is counted from the beginning."""
        before = {line["run"]: line for line in self.lines[-len(lines) :]}
        for line in lines:
            last = before.get(line["run"], {})
            line["bytes"] = last.get("bytes", 0) + line.pop("segment_bytes")
            line["diverged"] |= last.get("diverged", False)
            if "dropped" in line:
                line["dropped"] += last.get("dropped", 0)
        self.lines += lines
        if machine.leads():
            with self._path.open("a") as file:
                file.writelines(json.dumps(line) + "\n" for line in lines)

    def flush(self) -> None:
        """Waits until the lines are on the disk, so that no checkpoint is without its lines."""
        if machine.leads():
            with self._path.open("a") as file:
                folders.flushed(file)
