"""A comparison of runs that are killed at random moments and resumed with undisturbed runs.

python -m benchmarks.kills --kills=40 --seed=0

The commands are train with every algorithm, a sweep and a study of a paper, all tiny. Each first
runs without a kill. Then it starts anew in an empty folder, is killed by SIGKILL and resumed as
often as its share of --kills, and runs to its end. Results, logs, records and checkpoints of both
runs must be the same bit for bit, except for seconds. If files differ, the table names them and the
exit status is 1.
"""

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks import frame
from experiments.flags import command
from experiments.flags.flag import SEED, at_least, flag
from experiments.running import checkpoints
from experiments.running import folder as folders
from fedjax_inv.algorithms import LISTED

_ROOT = Path(__file__).parents[1]
_HEADINGS = ("command", "kills", "files compared", "that differ")
_MOMENT = 0.05  # seconds from a step of progress to a kill, on average
_TINY = ("--resume", "--widths=4,4", "--local_steps=1", "--batch_size=16", "--eval_every=1")
_TRAIN = (*_TINY, "--angles=0,40,80", "--rounds=8", "--seeds=0,1")
_OF_ALGORITHM = {
    "cafe": ("--momentum=0.9",),
    "exit_strategy": ("--set=pretraining_rounds=3",),
    "fedbn": ("--norm=batch",),
    "fedcfa": ("--set=top_k=2",),
    "fl_games": ("--optimizer=adam",),
}


@dataclasses.dataclass(frozen=True)
class Options:
    """The flags of this benchmark."""

    kills: int = flag(40, "Kills in all, shared out to the commands in turn.", at_least(0))
    only: tuple[str, ...] = flag(
        (), "Which commands, by their names in the table; all if none.", kind=str
    )
    seed: int = flag(0, "Seed of the moments of the kills.", SEED)


class Command(NamedTuple):
    """A command line without its folder."""

    name: str
    words: tuple[str, ...]


class Outcome(NamedTuple):
    """The result of a command that was killed."""

    kills: int
    files: int
    differ: list[str]


def commands() -> list[Command]:
    """A command for each algorithm, a sweep, and a study with a row that starts from another."""
    train = [
        Command(
            f"train {name}",
            ("experiments.train", f"--algorithm={name}", *_TRAIN, *_OF_ALGORITHM.get(name, ())),
        )
        for name in LISTED
    ]
    grid = ("--algorithm=fedavg,scaffold", "--held_out=0,80", "--learning_rate=0.1,0.3")
    study = (
        *("--study=simpson", "--data=digits", "--rows=simpson-pretrained,simpson-FedAvg"),
        *("--stop_above=0.1", "--watch_examples=500", "--rounds=6", "--checkpoint_every=1"),
        *("--seeds=0", "--widths=4,4", "--local_steps=1"),
    )
    return [
        *train,
        Command("sweep", ("experiments.sweep", *_TRAIN, *grid, "--rounds=4")),
        Command("study", ("experiments.papers.fedcfa", *study)),
    ]


def started(one: Command, folder: Path) -> subprocess.Popen[bytes]:
    """A process of the command, in its own process group."""
    words = [sys.executable, "-m", *one.words, f"--run_dir={folder}"]
    return subprocess.Popen(
        words, cwd=_ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
    )


def finish(one: Command, folder: Path) -> None:
    """Runs the command to its end."""
    process = started(one, folder)
    _, errors = process.communicate()
    if process.returncode:
        sys.exit(f"{one.name}: status {process.returncode}: {errors.decode()[-2000:]}")


def progress(folder: Path) -> int:
    """The progress of a command: the number of files, folders and log lines in its folder."""
    count = 0
    for place, below, files in os.walk(folder):
        below[:] = [name for name in below if name != "checkpoints"]  # they come and go
        count += len(below) + len(files)
        if "metrics.jsonl" in files:
            count += (Path(place) / "metrics.jsonl").read_bytes().count(b"\n")
    return count


def kill(one: Command, folder: Path, most: int, rng: np.random.Generator) -> bool:
    """Continues the command and kills it at a random moment; False if it finished before.

    The moment is a short random time after a random progress. Progress does not depend on a
    machine's speed; the time lets the kill fall anywhere between two steps of progress.

    Args:
      most: the progress of the finished command.
    """
    # A killed command may have left a file that the finished one does not have.
    begun = min(progress(folder), most - 1)
    target, delay = rng.integers(begun, most), rng.exponential(_MOMENT)
    process = started(one, folder)
    try:
        while process.poll() is None and progress(folder) < target:
            time.sleep(0.01)
        process.communicate(timeout=delay)
        return False
    except subprocess.TimeoutExpired:
        return True
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def contents(folder: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The names of the files to compare, each with a function that reads its content."""
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.name in ("result.json", "chunks.json", "start.json") or path.suffix == ".md":
            yield name, partial(_document, path)
        elif path.name == "metrics.jsonl":
            yield name, partial(_lines, path)
        elif path.name == "config.json":
            yield name, partial(folders.read, path.parent)
        elif path.parent.name == "checkpoints":
            yield name, partial(_bits, path)


def _document(path: Path) -> Any:
    text = path.read_text()
    return _untimed(json.loads(text)) if path.suffix == ".json" else text


def _lines(path: Path) -> list[Any]:
    # The checksums cover the seconds, too.
    lines = map(json.loads, path.open())
    return [_untimed({k: v for k, v in line.items() if k != "sha256"}) for line in lines]


def _untimed(value: Any) -> Any:
    """A value of json without seconds."""
    if isinstance(value, dict):
        return {name: _untimed(each) for name, each in value.items() if name != "seconds"}
    return list(map(_untimed, value)) if isinstance(value, list) else value


def _bits(place: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """All arrays of a checkpoint, by name."""
    config, cell = folders.read(place.parent.parent)
    trees = {
        item: checkpoints.plain(place.parent, int(place.name), config, cell, item)
        for item in checkpoints.ITEMS
    }
    return {
        jax.tree_util.keystr(path): (str(leaf.dtype), np.shape(leaf), np.asarray(leaf).tobytes())
        for path, leaf in jax.tree_util.tree_leaves_with_path(trees)
    }


def differences(whole: Path, resumed: Path) -> tuple[int, list[str]]:
    """The number of compared files, and the names of files that differ or are missing in one."""
    ours, theirs = dict(contents(whole)), dict(contents(resumed))
    lacking = sorted(set(ours) ^ set(theirs))
    return len(ours), [
        *lacking,
        *(name for name in ours if name in theirs and ours[name]() != theirs[name]()),
    ]


def tried(one: Command, folder: Path, kills: int, rng: np.random.Generator) -> Outcome:
    """Runs a command without kills, and with this many; compares the results."""
    run, whole = folder / "run", folder / "whole"  # both run in the same folder, as files name it
    finish(one, run)
    run.rename(whole)
    most, done = progress(whole), 0
    while done < kills:
        if kill(one, run, most, rng):
            done += 1
        else:
            shutil.rmtree(run)  # it finished before the kill, so it starts anew
    finish(one, run)
    return Outcome(done, *differences(whole, run))


def run(options: Options) -> str:
    """A line per command; ends with status 1 if a file differs."""
    rng = np.random.default_rng(options.seed)
    chosen = [one for one in commands() if not options.only or one.name in options.only]
    rows, total, differ = [], 0, 0
    with tempfile.TemporaryDirectory() as place:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(Path(place) / "cache")
        for index, one in enumerate(chosen):
            share = len(range(index, options.kills, len(chosen)))
            folder = Path(place) / str(index)
            outcome = tried(one, folder, share, rng)
            total, differ = total + outcome.kills, differ + len(outcome.differ)
            names = ", ".join(outcome.differ) or "none"
            row = (one.name, outcome.kills, outcome.files, names)
            rows.append(dict(zip(_HEADINGS, row, strict=True)))
            print(*row, sep="\t", flush=True)
            shutil.rmtree(folder)
    frame.show(frame.Table("", rows))
    print(f"\n{total} kills, {differ} files that differ.")
    sys.exit(int(differ > 0))


BINARY = command.of(run, Options, __doc__)

if __name__ == "__main__":
    command.main(BINARY)
