"""The run folder: whose it is, what it holds, and files that are written whole or not at all."""

import contextlib
import fcntl
import json
import os
import zlib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from experiments.experiment import config, grid
from experiments.experiment.config import Config
from experiments.experiment.grid import Cell
from experiments.flags.flag import name_of, shown
from experiments.parts import machine
from experiments.running import records
from fedjax_inv.checks import UsageError

_LOCK = ".lock"
_GONE_ON = "gone_on"  # in result.json: the run has been continued since, with more rounds
_FIGURES = ("curves", "domains", "clients", "gradients", "partition")
_OF_SWEEP = (
    "result.json",
    "table.md",
    *(f"{n}{e}" for n in _FIGURES for e in (".png", ".pdf") if n != "partition"),
)
# What a process leaves that dies before it has begun.
_LEFT_OVER = (_LOCK, "start.json", "chunks.json", "partition.png", "partition.pdf")

_LONGEST = 60  # of what a default folder's name tells of flags

# Flags that say where, how and how long, not what.
_HOW = {
    *("rounds", "run_dir", "data_dir", "resume", "checkpoint_every", "client_chunk", "run_chunk"),
    *(
        "devices",
        "hold",
        "coordinator_address",
        "num_processes",
        "process_id",
        "paper",
        "nonfinite",
        "select",
        "tensorboard",
    ),
}
# And those that the cell stands for.
_NOT_COMPARED = {
    *_HOW,
    *("algorithm", "settings", "held_out", "learning_rate", "server_learning_rate", "seeds"),
}


def default(chosen: Config, name: str, told: Collection[str]) -> Path:
    """Where a run goes that is told no folder: its name, and what differs from the defaults.

    The same for the same flags, so that a run can go on there; what is long is told by a checksum.
    told: flags that the name tells.
    """
    left_out = {*_HOW, *told}
    if chosen.data.dataset == chosen.data.stem:
        left_out.add("dataset")  # whose stem is in every name
    changed = {
        name_of(config.FLAGS[flag]): value if isinstance(value, tuple) else (value,)
        for flag, value in config.flat(chosen).items()
        if flag not in left_out and value != config.FLAGS[flag].default
    }
    text = "-".join(f"{flag}={'-'.join(map(str, value))}" for flag, value in changed.items())
    if len(text) > _LONGEST or text != grid.folder_name(text):
        text = f"{zlib.crc32(repr(changed).encode()):08x}"
    place = grid.folder_name(name)
    if len(place) > 2 * _LONGEST:  # more than a folder may be called
        place = f"{place[:_LONGEST]}-{zlib.crc32(name.encode()):08x}"
    return Path("runs", "-".join([place, *filter(None, [text])]))


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """While entered, no other process can enter. Raises UsageError if one has.

    The kernel holds the lock, so that it goes with its process, however that ends. Where several
    processes are one program, the leading one asks for all.
    """
    file, refused = None, False
    if machine.leads():
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / _LOCK).open("w")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            refused = True
    try:
        if machine.agree(int(refused)):
            raise UsageError(f"--run_dir={folder}: another process is at work there; wait for it")
        yield
    finally:
        if file is not None:
            file.close()


def check_sweep(folder: Path) -> None:
    """Raises UsageError if a folder holds anything but the cells and the report of a sweep."""
    where = f"--run_dir={folder}"
    if (folder / "config.json").exists():
        raise UsageError(f"{where}: holds a run of its own; choose another")
    there = [path for path in _listed(folder) if not _is_left_over(path)]
    ours = [p for p in there if p.name in _OF_SWEEP or (p / "config.json").exists()]
    begun = [path for path in there if path.is_file() or not all(map(_is_left_over, _listed(path)))]
    if begun and not ours:
        raise UsageError(f"{where}: is neither empty nor a sweep; choose another")


def finished(config: Config, cell: Cell, folder: Path) -> dict[str, Any] | None:
    """The result that the folder holds, None if the cell is still to be run or continued.

    Raises UsageError if the folder holds something else, or an unfinished run without --resume.
    """
    if all(map(_is_left_over, _listed(folder))):
        return None
    where = f"--run_dir={folder}"
    if not (folder / "config.json").exists():
        raise UsageError(f"{where}: is neither empty nor a run; choose another")
    there = _record(folder)
    before = _check_same(where, there, config, cell).run.rounds
    _check_rounds(folder, before, config)
    if (folder / "result.json").exists():
        told = result(folder, there["cell"])
        if before == config.run.rounds and not goes_on(told):
            return told
    if before != config.run.rounds and not config.run.resume:
        raise UsageError(
            f"{where}: holds a run whose rounds is {before} and not {config.run.rounds}; add "
            "--resume to go on with it, or choose another"
        )
    if not config.run.resume:
        raise UsageError(f"{where}: holds an unfinished run; add --resume to continue it")
    return None


def _check_rounds(folder: Path, before: int, chosen: Config) -> None:
    """Raises UsageError where a run cannot go on with another --rounds than `before`."""
    asked, every = chosen.run.rounds, chosen.watching.eval_every
    if asked == before:
        return
    names = [path.name for path in _listed(folder / "checkpoints")]
    done = max([0, *(int(name) for name in names if name.isdecimal())])
    told = f"--rounds={asked}: the run in {folder}"
    if asked < done:
        raise UsageError(f"{told} has done {done}; must be at least as many, or another --run_dir")
    if chosen.schedules_end and not chosen.clients.schedule_rounds:
        raise UsageError(
            f"{told} has a cosine schedule over its --rounds={before}; must be as many, as it had "
            "no --schedule_rounds of its own"
        )
    if done % every and asked > done:
        raise UsageError(
            f"{told} ended after {done}, between two evaluations of --eval_every={every}; must be "
            "as many, or another --run_dir"
        )


def result(folder: Path, cell: dict[str, Any]) -> dict[str, Any]:
    """What result.json says of a cell; raises UsageError if it is damaged, or another cell's."""
    path, again = folder / "result.json", "delete it and add --resume"
    # A log and a checkpoint say what it said.
    told = records.read(path, records.RESULT, again)
    if told["cell"] != cell or len(told["runs"]) != len(cell["runs"]):
        raise UsageError(f"{path}: is another run's; put a copy of this one's in place, or {again}")
    return told


def goes_on(told: dict[str, Any]) -> bool:
    """Whether a result is that of fewer rounds than its run has been continued to."""
    return _GONE_ON in told


def _listed(folder: Path) -> list[Path]:
    """What a folder holds; nothing if there is none."""
    return list(folder.iterdir()) if folder.exists() else []


def _is_left_over(path: Path) -> bool:
    if path.name == "checkpoints" and path.is_dir():
        return not _listed(path)
    return path.name in _LEFT_OVER or path.suffix == ".tmp"


def description(chosen: Config, cell: Cell) -> dict[str, Any]:
    """All flags and the cell, as json holds them."""
    return json.loads(json.dumps({"flags": config.to_record(chosen)})) | {"cell": cell.record()}


def begin(folder: Path, chosen: Config, cell: Cell, start: dict[str, Any]) -> None:
    """Writes config.json: the flags, the cell, and what is told of each start, of this one last.

    A result that is there already stays until there is another, marked as that of fewer rounds.
    """
    before = starts(folder)
    if (folder / "result.json").exists():
        there = result(folder, _record(folder)["cell"])
        write_json(folder / "result.json", there | {_GONE_ON: True})
    told = description(chosen, cell) | {"starts": [*before, start]}
    write_json(folder / "config.json", told)


def starts(folder: Path) -> list[dict[str, Any]]:
    """What config.json says of each start; nothing of a run that has not begun, or of one by an
    earlier version. Raises UsageError if it is damaged."""
    return _record(folder).get("starts", []) if (folder / "config.json").exists() else []


def check_data(folder: Path, fingerprint: str) -> None:
    """Raises UsageError where a run has begun on other data than those of a fingerprint."""
    before = [start["data"] for start in starts(folder) if "data" in start]
    if before and before[-1] != fingerprint:
        raise UsageError(
            f"--run_dir={folder}: has begun on other data than --dataset has by now; put those in "
            "their place, or choose another --run_dir"
        )


def read(folder: Path) -> tuple[Config, Cell]:
    """What config.json says. Raises UsageError if it is damaged, or another version's."""
    record = _record(folder)
    return config.from_record(record["flags"]), grid.of_record(record["cell"])


def _record(folder: Path) -> dict[str, Any]:
    """What config.json holds; raises UsageError if it is damaged."""
    path = folder / "config.json"
    record = records.read(path, records.CONFIG)
    flags = {name: value for name, value in record["flags"].items() if name in config.FLAGS}
    are_lists = {name: isinstance(config.FLAGS[name].default, tuple) for name in flags}
    fits = all(isinstance(flags[name], list) == is_list for name, is_list in are_lists.items())
    try:
        config.from_record(record["flags"] if fits else {})
        grid.of_record(record["cell"])
    except UsageError:
        pass  # another version's, which is told where it matters
    except (TypeError, ValueError):
        fits = False
    if not (fits and record["cell"]["runs"]):
        raise records.damaged(path)
    return record


def _check_same(where: str, there: dict[str, Any], chosen: Config, cell: Cell) -> Config:
    """The flags that a folder's run was begun with; raises UsageError if they are of another."""
    try:
        differs = difference(there, chosen, cell)
    except UsageError as error:
        raise UsageError(f"{where}: {error}; choose another --run_dir") from None
    if differs is not None:
        raise UsageError(
            f"{where}: holds another run, whose {differs.what}; choose another --run_dir"
            f"{differs.remedy}"
        )
    return config.from_record(there["flags"])


class Difference(NamedTuple):
    """In what two runs differ."""

    what: str
    remedy: str = ""  # how to ask for the first


def difference(there: dict[str, Any], chosen: Config, cell: Cell) -> Difference | None:
    """In what a run differs from the one that is asked for; None if they are the same.

    there: flags and cell as `description` has them. Raises UsageError for those of another version.
    """
    before = config.from_record(there["flags"])
    old, new = config.to_record(before), config.to_record(chosen)
    # What has no effect makes no other run; it could not be given again either.
    compared = set(new) - _NOT_COMPARED - set(config.without_effect(chosen))
    for name in new:
        if name in compared and old[name] != new[name]:
            flag = name_of(config.FLAGS[name])
            what = f"{flag} is {_short(old[name])} and not {_short(new[name])}"
            return Difference(what, f", or --{flag}={shown(old[name])}")
    for name, value in cell.record().items():
        if there["cell"].get(name) != value:
            was = _short(there["cell"].get(name))
            return Difference(f"{name} is {was} and not {_short(value)}")
    # What did not stop a run until now did not happen, so it may be treated otherwise from here on.
    if before.run.nonfinite not in ("stop", chosen.run.nonfinite):
        return Difference(f"nonfinite is {before.run.nonfinite} and not {chosen.run.nonfinite}")
    return None


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def write(path: Path, text: str) -> None:
    """Writes a file whole or not at all; only the leading process does."""
    if not machine.leads():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(path.suffix + ".tmp")
    with temporary.open("w") as file:
        file.write(text)
        flushed(file)
    os.replace(temporary, path)


def flushed(file: IO[str]) -> None:
    """Waits until what was written is on the disk, where a machine that goes down leaves it."""
    file.flush()
    os.fsync(file.fileno())


def write_json(path: Path, value: Any) -> None:
    """Writes a json file whole or not at all; only the leading process does."""
    write(path, json.dumps(value, indent=1) + "\n")
