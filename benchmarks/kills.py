"""Runs that are killed at random moments, and resumed, against the same runs left alone.

python -m benchmarks.kills --kills=40 --seed=0

Each command (train with every algorithm, a sweep, a study of a paper; all tiny) runs once without a
kill. Then it begins anew in an empty folder, its processes are killed by SIGKILL once for each of
its shares of the kills, and it is resumed until it is finished. Every file that matters must be the
same, bit for bit but for the seconds that it took: what differs is told, and the status is 1.
"""

import contextlib
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
from absl import app, flags, logging
from tabulate import tabulate

from experiments.running import checkpoints
from experiments.running import folder as folders
from fedjax_inv.algorithms import LISTED

FLAGS = flags.FLAGS
flags.DEFINE_integer("kills", 40, "Kills in all, dealt to the commands in turn.", lower_bound=0)
flags.DEFINE_list("only", [], "Which commands, as the table calls them; all if none.")
flags.DEFINE_integer("seed", 0, "Of the moments at which they come.")

_ROOT = Path(__file__).parents[1]
_MOMENT = 0.05  # seconds
_TINY = ("--resume", "--widths=4,4", "--local_steps=1", "--batch_size=16", "--eval_every=1")
_TRAIN = (*_TINY, "--angles=0,40,80", "--rounds=8", "--seeds=0,1")
_OF_ALGORITHM = {
    "cafe": ("--momentum=0.9",),
    "exit_strategy": ("--set=pretraining_rounds=3",),
    "fedbn": ("--norm=batch",),
    "fedcfa": ("--set=top_k=2",),
    "fl_games": ("--optimizer=adam",),
}


class Command(NamedTuple):
    """What is run, without its folder."""

    name: str
    words: tuple[str, ...]


class Outcome(NamedTuple):
    """What became of a command that was killed."""

    kills: int
    files: int
    differ: list[str]


def commands() -> list[Command]:
    """A command for each algorithm, a sweep, and a study whose second row starts from its first."""
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


def started(command: Command, folder: Path) -> subprocess.Popen[bytes]:
    """A process of the command, with those that it starts in a group of their own."""
    words = [sys.executable, "-m", *command.words, f"--run_dir={folder}"]
    return subprocess.Popen(
        words, cwd=_ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
    )


def finish(command: Command, folder: Path) -> None:
    """Runs the command to its end."""
    process = started(command, folder)
    _, told = process.communicate()
    if process.returncode:
        sys.exit(f"{command.name}: status {process.returncode}: {told.decode()[-2000:]}")


def progress(folder: Path) -> int:
    """How far a command has come: what it has written, by files and by lines of logs."""
    count = 0
    for place, below, files in os.walk(folder):
        below[:] = [name for name in below if name != "checkpoints"]  # which come and go
        count += len(below) + len(files)
        if "metrics.jsonl" in files:
            count += (Path(place) / "metrics.jsonl").read_bytes().count(b"\n")
    return count


def kill(command: Command, folder: Path, most: int, rng: np.random.Generator) -> bool:
    """Goes on with the command, and kills it somewhere on its way; False if it was over by then.

    most: its progress at the end. By progress, as machines are not equally fast; and a moment
    later, so that it may be anywhere between two of those steps.
    """
    # One that was killed may have left a file that is not there in the end.
    begun = min(progress(folder), most - 1)
    target, delay = rng.integers(begun, most), rng.exponential(_MOMENT)
    process = started(command, folder)
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


def held(folder: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The files that matter, by name, and how to read each so that it can be compared."""
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.name in ("result.json", "chunks.json", "start.json") or path.suffix == ".md":
            yield name, partial(_told, path)
        elif path.name == "metrics.jsonl":
            yield name, partial(_lines, path)
        elif path.name == "config.json":
            yield name, partial(folders.read, path.parent)
        elif path.parent.name == "checkpoints":
            yield name, partial(_bits, path)


def _told(path: Path) -> Any:
    text = path.read_text()
    return _untimed(json.loads(text)) if path.suffix == ".json" else text


def _lines(path: Path) -> list[Any]:
    return [_untimed(json.loads(line)) for line in path.open()]


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
    """How many files were compared, and the names of those that differ or that one lacks."""
    ours, theirs = dict(held(whole)), dict(held(resumed))
    lacking = sorted(set(ours) ^ set(theirs))
    return len(ours), [
        *lacking,
        *(name for name in ours if name in theirs and ours[name]() != theirs[name]()),
    ]


def tried(command: Command, folder: Path, kills: int, rng: np.random.Generator) -> Outcome:
    """What becomes of a command that is killed so often, or until it is finished."""
    run, whole = folder / "run", folder / "whole"  # the same place, which is told in the files
    finish(command, run)
    run.rename(whole)
    most, done = progress(whole), 0
    while done < kills:
        if kill(command, run, most, rng):
            done += 1
        else:
            shutil.rmtree(run)  # finished before it was killed: once more from the start
    finish(command, run)
    return Outcome(done, *differences(whole, run))


def main(argv: list[str]) -> None:
    """Prints a line for each command, and ends with status 1 if anything differs."""
    del argv
    logging.set_verbosity(logging.FATAL)  # orbax tells of every file it reads
    rng = np.random.default_rng(FLAGS.seed)
    chosen = [command for command in commands() if not FLAGS.only or command.name in FLAGS.only]
    rows, total, differ = [], 0, 0
    with tempfile.TemporaryDirectory() as place:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(Path(place) / "cache")
        for index, command in enumerate(chosen):
            share = len(range(index, FLAGS.kills, len(chosen)))
            folder = Path(place) / str(index)
            told = tried(command, folder, share, rng)
            total, differ = total + told.kills, differ + len(told.differ)
            rows.append([command.name, told.kills, told.files, ", ".join(told.differ) or "none"])
            print(*rows[-1], sep="\t", flush=True)
            shutil.rmtree(folder)
    headers = ["command", "kills", "files compared", "that differ"]
    print(f"\n{tabulate(rows, headers, tablefmt='github')}\n")
    print(f"{total} kills, {differ} files that differ.")
    sys.exit(int(differ > 0))


if __name__ == "__main__":
    app.run(main)
