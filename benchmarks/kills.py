"""A comparison of runs that are killed at random moments and resumed with undisturbed runs.

python -m benchmarks.kills --kills=40 --seed=0

The commands are train with every algorithm, on two devices, in two processes and with the clients'
states in a file, two sweeps and two studies of papers, all tiny. Each first runs without a kill.
Then it starts anew in an empty folder, is killed and resumed as often as its share of --kills, and
runs to its end. Most kills are by SIGKILL; every sixth is by SIGTERM and every sixth by SIGINT,
after which a run stops by itself. Of two processes one is killed, and the other a moment later.
Results, logs, records, checkpoints and the states in a file must be the same bit for bit in both
runs, except for seconds, and the checksums of the logs must be right. If files differ, the table
names them and the exit status is 1.

All processes are forked from one that has imported everything. JAX_COMPILATION_CACHE_DIR names a
folder of compiled programs that outlives this benchmark.
"""

import contextlib
import dataclasses
import importlib
import json
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, NamedTuple

import jax
import msgspec
import numpy as np

from benchmarks import frame
from fedjax_inv.algorithms import LISTED
from fedjax_inv_experiments.experiment.config import Config
from fedjax_inv_experiments.experiment.grid import Cell
from fedjax_inv_experiments.flags import command
from fedjax_inv_experiments.flags.flag import SEED, at_least, flag
from fedjax_inv_experiments.reporting import finished
from fedjax_inv_experiments.running import checkpoints, log, states
from fedjax_inv_experiments.running import folder as folders

# Modules that take long to import and that every command imports sooner or later.
_SLOW = (
    *("sklearn.datasets", "fedjax_inv_experiments.reporting.figures"),
    *("matplotlib.backends.backend_agg", "matplotlib.backends.backend_pdf"),
)
_HEADINGS = ("command", "kills", "files compared", "that differ")
_MOMENT = 0.05  # seconds from a step of progress to a kill, on average
_PATIENCE = 60.0  # seconds in which a process must end after SIGTERM or SIGINT
_SIGNALS = (*(signal.SIGKILL,) * 4, signal.SIGTERM, signal.SIGINT)  # drawn with equal chances
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
    processes: int = 1


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
    grid = (*_TRAIN, "--held_out=0,80", "--learning_rate=0.1,0.3", "--rounds=4")
    simpson = (
        *("--study=simpson", "--data=digits", "--rows=simpson-pretrained,simpson-FedAvg"),
        *("--stop_above=0.1", "--watch_examples=500", "--rounds=6", "--checkpoint_every=1"),
        *("--seeds=0", "--widths=4,4", "--local_steps=1"),
    )
    games = (
        *("--study=methods", "--data=colored_digits", "--rows=FedAvg,F-parallel-SMOOTH"),
        *("--rounds=4", "--eval_every=1", "--seeds=0", "--widths=4"),
    )
    several = ("experiments.train", *_TRAIN, "--client_chunk=1", "--run_chunk=1")
    streamed = (
        *(*several, "--algorithm=fedbn", "--norm=batch"),
        *("--hold=stream", "--clients=6", "--cohort=2"),
    )
    return [
        *train,
        Command("sweep", ("experiments.sweep", *grid, "--algorithm=fedavg,scaffold")),
        Command("sweep on two devices", ("experiments.sweep", *grid, "--devices=2")),
        Command("study of FedCFA", ("experiments.papers.fedcfa", *simpson)),
        Command("study of FL Games", ("experiments.papers.fl_games", *games)),
        Command("own clients", (*several, "--algorithm=scaffold", "--devices=2", "--hold=own")),
        Command(
            "all clients",
            (*several, "--algorithm=fedbn", "--norm=batch", "--devices=2", "--hold=all"),
        ),
        Command("two processes", (*several, "--algorithm=scaffold"), 2),
        Command("streamed", streamed),
        Command("streamed by two processes", streamed, 2),
    ]


def _main(words: tuple[str, ...], errors: Path) -> None:
    """The process of a command. errors: the file of its stderr."""
    os.setsid()
    with open(errors, "ab") as file, open(os.devnull, "wb") as null:
        os.dup2(file.fileno(), 2)
        os.dup2(null.fileno(), 1)
    sys.argv = list(words)
    command.main(importlib.import_module(words[0]).BINARY)


def started(one: Command, folder: Path) -> list[ForkServerProcess]:
    """The processes of the command, each in its own process group."""
    words = (*one.words, f"--run_dir={folder}")
    if one.processes > 1:
        with socket.socket() as probe:
            probe.bind(("localhost", 0))
            address = f"localhost:{probe.getsockname()[1]}"
        words += (f"--num_processes={one.processes}", f"--coordinator_address={address}")
    context = multiprocessing.get_context("forkserver")
    processes = []
    for index in range(one.processes):
        more = (f"--process_id={index}",) if one.processes > 1 else ()
        process = context.Process(target=_main, args=((*words, *more), _errors(folder)))
        process.start()
        processes.append(process)
    return processes


def _errors(folder: Path) -> Path:
    """The file of a command's stderr."""
    return folder.with_name(f"{folder.name}.stderr")


def finish(one: Command, folder: Path) -> None:
    """Runs the command to its end."""
    processes = started(one, folder)
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        codes = [process.exitcode for process in processes]
        sys.exit(f"{one.name}: status {codes}: {_errors(folder).read_text()[-2000:]}")


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
    number, victim = _SIGNALS[rng.integers(len(_SIGNALS))], rng.integers(one.processes)
    processes = started(one, folder)
    try:
        while any(map(ForkServerProcess.is_alive, processes)) and progress(folder) < target:
            time.sleep(0.02)
        processes[victim].join(delay)
        if not processes[victim].is_alive():
            return False
        os.kill(processes[victim].pid or 0, number)
        if number != signal.SIGKILL:
            processes[victim].join(_PATIENCE)
            return processes[victim].exitcode != 0  # it had finished
        return True
    finally:
        time.sleep(rng.exponential(_MOMENT))
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid or 0, signal.SIGKILL)
            process.join()


def contents(folder: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The names of the files to compare, each with a function that reads its content."""
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.name in ("result.json", "start.json") or path.suffix == ".md":
            yield name, partial(_document, path)
        elif path.name == "metrics.jsonl":
            yield name, partial(_lines, path)
        elif path.name == "config.json":
            yield name, partial(_config, path.parent)
        elif path.name == states.NAME:
            yield name, partial(_states, path.parent)
        elif path.parent.name == "checkpoints":
            yield name, partial(_bits, path)


def _document(path: Path) -> Any:
    text = path.read_text()
    return _untimed(json.loads(text)) if path.suffix == ".json" else text


def _config(folder: Path) -> tuple[Config, Cell]:
    """The flags and the cell of a run, without the address, whose port is new at each start."""
    config, cell = folders.read(folder)
    run = dataclasses.replace(config.run, coordinator_address="")
    return dataclasses.replace(config, run=run), cell


def _lines(path: Path) -> list[Any]:
    # The checksums, which cover the seconds, are checked as the log is read.
    return [_untimed(msgspec.to_builtins(line)) for line in log.read(path.parent)]


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
    if (place.parent.parent / states.NAME).exists():
        # The checkpoint has their places in the file, which depend on the kills.
        for tree in trees.values():
            tree.get("state", tree).pop("clients")
    return _by_name(trees)


def _states(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """The last states of all clients of each run, by name."""
    runs = finished.open("run_dir", folder)
    return _by_name([runs.clients(runs.last, index) for index in range(len(runs.cell.runs))])


def _by_name(tree: Any) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Type, shape and bits of each array of a tree, by its path in the tree."""
    return {
        jax.tree_util.keystr(path): (str(leaf.dtype), np.shape(leaf), np.asarray(leaf).tobytes())
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
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
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(place) / "cache"))
        context = multiprocessing.get_context("forkserver")
        modules = {one.words[0] for one in chosen}
        context.set_forkserver_preload([*modules, *_SLOW])
        for index, one in enumerate(chosen):
            share = len(range(index, options.kills, len(chosen)))
            folder = Path(place) / str(index)
            folder.mkdir()
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
