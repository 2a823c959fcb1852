"""The run folder: whose it is, what it holds, and files that are written whole or not at all."""

import contextlib
import fcntl
import json
import os
import zlib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from experiments import config, devices, effects, grid, groups
from experiments.flag import name_of, shown
from experiments.grid import Cell
from experiments.groups import Config
from experiments.running import checkpoints
from fedjax_inv.checks import UsageError

_LOCK = ".lock"
_GONE_ON = "gone_on"  # in result.json: the run has been continued since, with more rounds
_FIGURES = ("curves", "domains", "clients", "gradients", "partition")
_OF_SWEEP = (
    _LOCK,
    "result.json",
    "table.md",
    *(f"{n}{e}" for n in _FIGURES for e in (".png", ".pdf")),
)

_LONGEST = 60  # of what a default folder's name tells of flags

# Flags that say where, how and how long, not what.
_HOW = {
    *("rounds", "run_dir", "data_dir", "resume", "checkpoint_every", "client_chunk", "run_chunk"),
    *(
        "devices",
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
        name_of(groups.FLAGS[flag]): value if isinstance(value, tuple) else (value,)
        for flag, value in config.flat(chosen).items()
        if flag not in left_out and value != groups.FLAGS[flag].default
    }
    text = "-".join(f"{flag}={'-'.join(map(str, value))}" for flag, value in changed.items())
    if len(text) > _LONGEST or text != grid.folder_name(text):
        text = f"{zlib.crc32(repr(changed).encode()):08x}"
    return Path("runs", "-".join([grid.folder_name(name), *filter(None, [text])]))


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """While entered, no other process can enter. Raises UsageError if one has.

    The kernel holds the lock, so that it goes with its process, however that ends. Where several
    processes are one program, the leading one asks for all.
    """
    file, refused = None, False
    if devices.leads():
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / _LOCK).open("w")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            refused = True
    try:
        if devices.agree(int(refused)):
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
    there = list(folder.iterdir()) if folder.exists() else []
    strange = [p for p in there if p.name not in _OF_SWEEP and not (p / "config.json").exists()]
    if strange and len(strange) == len([path for path in there if path.name != _LOCK]):
        raise UsageError(f"{where}: is neither empty nor a sweep; choose another")


def finished(config: Config, cell: Cell, folder: Path) -> dict[str, Any] | None:
    """The result that the folder holds, None if the cell is still to be run or continued.

    Raises UsageError if the folder holds something else, or an unfinished run without --resume.
    """
    if not folder.exists() or all(path.name == _LOCK for path in folder.iterdir()):
        return None
    where = f"--run_dir={folder}"
    if not (folder / "config.json").exists():
        raise UsageError(f"{where}: is neither empty nor a run; choose another")
    there = read_record(folder / "config.json", "flags", "cell")
    before = _check_same(where, there, config, cell).run.rounds
    _check_rounds(folder, before, config)
    if (folder / "result.json").exists():
        again = "delete it and add --resume"  # a log and a checkpoint say what it said
        result = read_record(folder / "result.json", "cell", "runs", remedy=again)
        if before == config.run.rounds and _GONE_ON not in result:
            return result
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
    done = max(checkpoints.rounds(folder / "checkpoints"), default=0)
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


def read_record(path: Path, *names: str, remedy: str = "") -> dict[str, Any]:
    """The record that a file holds, with these names; raises UsageError if it holds none."""
    try:
        record = json.loads(path.read_text())
    except ValueError:
        record = None
    if not (isinstance(record, dict) and set(names) <= set(record)):
        remedy = remedy or f"delete {path.parent} to begin anew"
        raise UsageError(f"{path}: is damaged; put a copy in its place, or {remedy}")
    return record


def description(chosen: Config, cell: Cell) -> dict[str, Any]:
    """All flags and the cell, as json holds them."""
    return json.loads(json.dumps({"flags": config.to_record(chosen)})) | {"cell": cell.record()}


def begin(folder: Path, chosen: Config, cell: Cell, start: dict[str, Any]) -> None:
    """Writes config.json: the flags, the cell, and what is told of each start, of this one last.

    A result that is there already stays until there is another, marked as that of fewer rounds.
    """
    path, result = folder / "config.json", folder / "result.json"
    before = read_record(path, "flags", "cell").get("starts", []) if path.exists() else []
    if result.exists():
        write_json(result, read_record(result, "cell", "runs") | {_GONE_ON: True})
    write_json(path, description(chosen, cell) | {"starts": [*before, start]})


def read(folder: Path) -> tuple[Config, Cell]:
    """What config.json says. Raises UsageError if it is damaged, or another version's."""
    record = read_record(folder / "config.json", "flags", "cell")
    return config.from_record(record["flags"]), grid.of_record(record["cell"])


def _check_same(where: str, there: dict[str, Any], chosen: Config, cell: Cell) -> Config:
    """The flags that a folder's run was begun with; raises UsageError if they are of another."""
    try:
        before = config.from_record(there["flags"])
    except UsageError as error:
        raise UsageError(f"{where}: {error}; choose another --run_dir") from None
    old, new = config.to_record(before), config.to_record(chosen)
    # What has no effect makes no other run; it could not be given again either.
    compared = set(new) - _NOT_COMPARED - set(effects.without_effect(chosen))
    for name in new:
        if name in compared and old[name] != new[name]:
            flag = name_of(groups.FLAGS[name])
            raise UsageError(
                f"{where}: holds another run, whose {flag} is {_short(old[name])} and not "
                f"{_short(new[name])}; choose another --run_dir, or --{flag}={shown(old[name])}"
            )
    for name, value in cell.record().items():
        if there["cell"].get(name) != value:
            raise UsageError(
                f"{where}: holds another run, whose {name} is {_short(there['cell'].get(name))} "
                f"and not {_short(value)}; choose another --run_dir"
            )
    # What did not stop a run until now did not happen, so it may be treated otherwise from here on.
    if before.run.nonfinite not in ("stop", chosen.run.nonfinite):
        raise UsageError(
            f"{where}: holds another run, whose nonfinite is {before.run.nonfinite} and not "
            f"{chosen.run.nonfinite}; choose another --run_dir"
        )
    return before


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def write(path: Path, text: str) -> None:
    """Writes a file whole or not at all; only the leading process does."""
    if not devices.leads():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(path.suffix + ".tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


def write_json(path: Path, value: Any) -> None:
    """Writes a json file whole or not at all; only the leading process does."""
    write(path, json.dumps(value, indent=1) + "\n")
