"""metrics.jsonl: a line per evaluation and run, consistent with the checkpoints.

The first evaluation is of round 0, before any training, unless --noeval_start leaves it out.

Each line ends with the SHA-256 of the log up to and including this line. So an edited line is found
as well as one that is missing or moved. This finds accidents and edits, but not the forgery of
somebody who computes the checksums anew. Logs of version 0.7 and before have no checksums; they get
them when their run continues.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from fedjax_inv.checks import UsageError
from fedjax_inv_experiments.experiment import config
from fedjax_inv_experiments.parts import machine
from fedjax_inv_experiments.parts.machine import Running
from fedjax_inv_experiments.parts.watching import Watching
from fedjax_inv_experiments.running import files, records
from fedjax_inv_experiments.running import folder as folders
from fedjax_inv_experiments.running.records import Line

_NAME = "metrics.jsonl"
_WITH_SUM = re.compile(rb'(\{.*), "sha256": "([0-9a-f]{64})"\}')


def read(folder: Path, done: int | None = None) -> list[Line]:
    """The lines of a run folder up to round `done`, or all of them.

    Without `done`, a damaged last line does not count: the machine may have crashed while writing
    it. Raises UsageError, with the number of the line, if another line is damaged or missing, or if
    a line has been edited since it was written.
    """
    return [line for line, _ in _read(folder, done)]


def _read(folder: Path, done: int | None) -> list[tuple[Line, bytes]]:
    """The lines as in `read`, each with its text without a checksum."""
    path = folder / _NAME
    begun = folders.begun(folder)
    defaults = {
        "rounds": Running.rounds,
        "eval_every": Watching.eval_every,
        "eval_start": Watching.eval_start,
    }
    asked = {name: value for name, value in begun.flags.items() if name in defaults}
    flags = defaults | config.typed(asked)
    lines: list[tuple[Line, bytes]] = []
    texts = path.read_bytes().splitlines() if path.is_file() else []
    expected = _evaluations(num_runs=len(begun.cell.runs), **flags)
    sums, has_sums = hashlib.sha256(), False
    for number, text in enumerate(texts, 1):
        at = next(expected, None)
        if done is not None and (at is None or at[0] > done):
            break
        body, stored = _divided(text)
        line = records.decoded(body, Line)
        if line is None or (line.round, line.run) != at:
            if number == len(texts) and done is None:
                break
            raise _damaged(path, number, at or (0, 0))
        sums.update(body)
        has_sums = has_sums or stored is not None
        if has_sums and stored != sums.hexdigest():
            raise _edited(path, number)
        lines.append((line, body))
    at = next(expected, None) if len(lines) == len(texts) else None
    if done is not None and at is not None and at[0] <= done:
        raise _damaged(path, len(texts) + 1, at)
    return lines


def _divided(text: bytes) -> tuple[bytes, str | None]:
    """A line of the file as its record and its checksum, None if it has none."""
    match = _WITH_SUM.fullmatch(text)
    return (match[1] + b"}", match[2].decode()) if match else (text, None)


def _with_sum(body: bytes, checksum: str) -> bytes:
    """A line of the file from its record and its checksum."""
    return body[:-1] + f', "sha256": "{checksum}"}}\n'.encode()


def _damaged(path: Path, number: int, at: tuple[int, int]) -> UsageError:
    return UsageError(
        str(path),
        ...,
        f"line {number} is damaged or missing, must be of round {at[0]} and run {at[1]}; "
        f"put a copy in its place, or delete {path.parent} to begin anew",
    )


def _edited(path: Path, number: int) -> UsageError:
    return UsageError(
        str(path),
        ...,
        f"line {number} is not as it was written, its checksum differs; "
        f"put a copy in its place, or delete {path.parent} to begin anew",
    )


def _evaluations(
    *, rounds: int, eval_every: int, eval_start: bool, num_runs: int
) -> Iterator[tuple[int, int]]:
    """The (round, run) of each line."""
    for done in range(0 if eval_start else eval_every, rounds + eval_every, eval_every):
        for run in range(num_runs):
            yield min(done, rounds), run


class Log:
    """The log of a cell that is running."""

    def __init__(self, folder: Path, done: int) -> None:
        """Keeps the lines up to round `done`, the checkpoint's, and deletes later ones."""
        self._path, self._sums = folder / _NAME, hashlib.sha256()
        kept = _read(folder, done) if done else []
        self.lines = [line for line, _ in kept]
        self.seconds = self.lines[-1].seconds if self.lines else 0.0
        files.write(self._path, self._texts(body for _, body in kept))

    def append(self, lines: Sequence[Line]) -> list[Line]:
        """Adds the lines of one evaluation, and returns them with totals over all rounds.

        lines: one per run; their `bytes`, `dropped` and `diverged` are of the last segment alone.
        """
        before = {line.run: line for line in self.lines[-len(lines) :]}
        added = [_added(line, before.get(line.run)) for line in lines]
        self.lines += added
        texts = self._texts(map(_text, added))
        if machine.leads():
            with files.opened(self._path, "a") as file:
                file.write(texts)
        return added

    def flush(self) -> None:
        """Waits until the lines are on the disk, so that no checkpoint lacks its lines."""
        if machine.leads():
            with files.opened(self._path, "a") as file:
                files.flush(file)

    def _texts(self, bodies: Iterable[bytes]) -> str:
        """The next lines of the file, with their checksums."""
        texts = []
        for body in bodies:
            self._sums.update(body)
            texts.append(_with_sum(body, self._sums.hexdigest()))
        return b"".join(texts).decode()


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


def _text(line: Line) -> bytes:
    return json.dumps(line, default=msgspec.to_builtins).encode()
