"""Run folders: which run they hold, their records, and their lock."""

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import sys
import zlib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from fedjax_inv.checks import UsageError
from fedjax_inv_experiments.experiment import config, grid
from fedjax_inv_experiments.experiment.config import Config
from fedjax_inv_experiments.experiment.grid import Cell
from fedjax_inv_experiments.flags import names, outside
from fedjax_inv_experiments.flags.flag import name_of, shown
from fedjax_inv_experiments.parts import machine, watching
from fedjax_inv_experiments.parts.watching import Watching
from fedjax_inv_experiments.running import files, records
from fedjax_inv_experiments.running.records import Begun, Flag, Result, Start

_LOCK = ".lock"
# The errors of a file system that cannot lock a file or, as NFS, a folder.
_NO_LOCKS = (errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
# The files of a process that died before its run began.
_LEFT_OVER = (_LOCK, "start.json", "partition.png", "partition.pdf")

_LONGEST = 60  # the most characters of flags in a default folder's name

# The flags for where, how and how long a run is computed; they do not define the run.
_HOW = {
    *("rounds", "run_dir", "data_dir", "resume", "checkpoint_every", "client_chunk", "run_chunk"),
    *(
        "devices",
        "hold",
        "stream_memory",
        "deterministic",
        "distributed",
        "coordinator_address",
        "num_processes",
        "process_id",
        "paper",
        "nonfinite",
        "select",
        "metrics",
        "tensorboard",
        "trust_code",
        "keep_checkpoints",
    ),
}
# These and the flags that the cell contains.
_NOT_COMPARED = {
    *_HOW,
    *("algorithm", "settings", "held_out", "learning_rate", "server_learning_rate", "seeds"),
}


def default(chosen: Config, name: str, named: Collection[str]) -> Path:
    """The folder of a run without --run_dir: its name, and the flags that differ from the defaults.

    The same flags give the same folder, so that a run can be continued there. A checksum replaces a
    long text.

    named: the flags that are in `name` already.
    """
    left_out = {*_HOW, *named}
    if chosen.watching == watching.following(
        dataclasses.replace(chosen.watching, eval_every=Watching.eval_every),
        chosen.run.rounds,
        chosen.run.checkpoint_every,
    ):
        left_out.add("eval_every")  # or a run of few rounds would not go on with more
    if chosen.data.dataset == chosen.data.stem:
        left_out.add("dataset")  # its stem is in every name
    changed = {
        name_of(config.FLAGS[flag]): value if isinstance(value, tuple) else (value,)
        for flag, value in config.flat(chosen).items()
        if flag not in left_out and value != config.FLAGS[flag].default
    }
    text = "-".join(f"{flag}={'-'.join(map(str, value))}" for flag, value in changed.items())
    if len(text) > _LONGEST or text != grid.folder_name(text):
        text = f"{zlib.crc32(repr(changed).encode()):08x}"
    place = grid.folder_name(name)
    if len(place) > 2 * _LONGEST:  # longer than the name of a folder may be
        place = f"{place[:_LONGEST]}-{zlib.crc32(name.encode()):08x}"
    return Path("runs", "-".join([place, *filter(None, [text])]))


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Locks a folder against other processes. Raises UsageError if one has locked it.

    The kernel holds the lock, so it ends with its process. If several processes run one program,
    the leading one locks the folder for all.

    The folder itself is locked, so that a second process is refused even if .lock was deleted or
    replaced. A file .lock is locked, too, because network file systems may lock only files. If the
    file system locks neither, a line on stderr says so.
    """
    with contextlib.ExitStack() as opened:
        refused = False
        if machine.leads():
            files.make_folder(folder)
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            opened.callback(os.close, handle)
            file = opened.enter_context(files.opened(folder / _LOCK, "ab"))
            held = [_lock(handle), _lock(file.fileno())]
            refused = False in held
            if held == [None, None]:
                text = "its file system has no locks; start no second process there"
                print(f"{folder}: {text}", file=sys.stderr)
        if machine.agree(int(refused)):
            raise UsageError("--run_dir", folder, "another process is at work there; wait for it")
        yield


def _lock(handle: int) -> bool | None:
    """Whether an open file is locked now; None if its file system cannot lock it."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return None
        raise
    return True


def check_sweep(folder: Path) -> None:
    """Raises UsageError if a folder holds files, but neither a cell nor the result of a sweep.

    The name of a file does not tell whose it is: the report of a sweep would replace a table.tex of
    the user's own.
    """
    if (folder / "config.json").exists():
        raise UsageError("--run_dir", folder, "holds a run of its own; choose another")
    there = [path for path in _listed(folder) if not _is_left_over(path)]
    is_ours = any((p / "config.json").exists() for p in there) or _holds_report(folder)
    begun = [path for path in there if path.is_file() or not all(map(_is_left_over, _listed(path)))]
    if begun and not is_ours:
        raise UsageError("--run_dir", folder, "is neither empty nor a sweep; choose another")


def _holds_report(folder: Path) -> bool:
    """Whether a folder holds the result of a sweep."""
    path = folder / "result.json"
    return path.is_file() and records.decoded(path.read_bytes(), records.Sweep) is not None


def finished(config: Config, cell: Cell, folder: Path) -> Result | None:
    """The result in the folder; None if the cell must be run or continued.

    Raises UsageError if the folder holds something else, or an unfinished run without --resume.
    """
    if all(map(_is_left_over, _listed(folder))):
        return None
    if not (folder / "config.json").exists():
        raise UsageError("--run_dir", folder, "is neither empty nor a run; choose another")
    there = begun(folder)
    before = _check_same(folder, there, config, cell).run.rounds
    _check_rounds(folder, before, config)
    if (folder / "result.json").exists():
        done = result(folder, there.cell)
        if before == config.run.rounds and not done.gone_on:
            return done
    if before != config.run.rounds and not config.run.resume:
        raise UsageError(
            "--run_dir",
            folder,
            f"holds a run whose rounds is {before} and not {config.run.rounds}; add --resume to go "
            "on with it, or choose another",
        )
    if not config.run.resume:
        raise UsageError(
            "--run_dir", folder, "holds an unfinished run; add --resume to continue it"
        )
    return None


def _check_rounds(folder: Path, before: int, chosen: Config) -> None:
    """Raises UsageError if a run cannot continue with --rounds instead of `before` rounds."""
    asked, every = chosen.run.rounds, chosen.watching.eval_every
    if asked == before:
        return
    names = [path.name for path in _listed(folder / "checkpoints")]
    done = max([0, *(int(name) for name in names if name.isdecimal())])
    if asked < done:
        text = (
            f"the run in {folder} has done {done}; must be at least as many, or another --run_dir"
        )
        raise UsageError("--rounds", asked, text)
    if chosen.schedules_end and not chosen.clients.schedule_rounds:
        raise UsageError(
            "--rounds",
            asked,
            f"the run in {folder} has a cosine schedule over its --rounds={before}; must be as "
            "many, as it had no --schedule_rounds of its own",
        )
    if done % every and asked > done:
        raise UsageError(
            "--rounds",
            asked,
            f"the run in {folder} ended after {done}, between two evaluations of "
            f"--eval_every={every}; must be as many, or another --run_dir",
        )


def result(folder: Path, cell: records.Cell) -> Result:
    """The result of a cell; raises UsageError if result.json is damaged, or another cell's."""
    path, again = folder / "result.json", "delete it and add --resume"
    # A resumed run computes it again from the log and a checkpoint.
    there = records.read(path, Result, again)
    if there.cell != cell or len(there.runs) != len(cell.runs):
        text = f"is another run's; put a copy of this one's in place, or {again}"
        raise UsageError(str(path), ..., text)
    return there


def _listed(folder: Path) -> list[Path]:
    """The paths in a folder; none if it does not exist."""
    return list(folder.iterdir()) if folder.exists() else []


def _is_left_over(path: Path) -> bool:
    if path.name == "checkpoints" and path.is_dir():
        return not _listed(path)
    return path.name in _LEFT_OVER or path.suffix == ".tmp"


def description(chosen: Config, cell: Cell) -> tuple[dict[str, Flag], records.Cell]:
    """All flags and the cell, as records store them."""
    flags = msgspec.convert(config.to_record(chosen), dict[str, Flag])
    return flags, records.Cell.of(cell)


def begin(folder: Path, chosen: Config, cell: Cell, start: Start) -> None:
    """Writes config.json: the flags, the cell, and all starts, this one last.

    An earlier result stays until a new one replaces it, and is marked as that of fewer rounds.
    """
    files.make_folder(folder)
    before = starts(folder)
    if (folder / "result.json").exists():
        there = result(folder, begun(folder).cell)
        done = msgspec.structs.replace(there, gone_on=True)
        files.write_json(folder / "result.json", done)
    files.write_json(folder / "config.json", Begun(*description(chosen, cell), [*before, start]))


def starts(folder: Path) -> list[Start]:
    """The starts of a run so far; raises UsageError if config.json is damaged."""
    return begun(folder).starts if (folder / "config.json").exists() else []


def check_data(folder: Path, now: records.Start) -> None:
    """Raises UsageError if the run in a folder began on other data."""
    before = starts(folder)
    if before and before[-1].data != now.data:
        raise UsageError(
            "--run_dir",
            folder,
            "has begun on other data than --dataset has by now; put those in their place, or "
            "choose another --run_dir",
        )


def read(folder: Path, trusted: Collection[str] = ()) -> tuple[Config, Cell]:
    """The flags and the cell of a run.

    trusted: the factories outside of this project that may be imported.

    Raises UsageError if config.json is damaged or was written by another version, and, before any
    import, if it names a factory that is not trusted.
    """
    record = begun(folder)
    try:
        chosen = config.from_record(record.flags, trusted)
        fits = _fits(record.cell, chosen)
    except UsageError:
        raise
    except (TypeError, ValueError):
        fits = False
    if not fits:
        raise records.damaged(folder / "config.json")
    return chosen, record.cell.restored()


def _fits(cell: records.Cell, chosen: Config) -> bool:
    """Whether flags ask for a cell's algorithm and seeds, and the algorithm takes its settings."""
    if cell.algorithm not in chosen.method.algorithm:
        return False
    kinds = names.hyperparameters(cell.algorithm)
    rates = {"learning_rate", "server_learning_rate"}
    allowed = {*rates, *(name for name, types in kinds.items() if float in types)}
    return all(
        run.seed in chosen.run.seeds and {"learning_rate"} <= {*run.hyper} <= allowed
        for run in cell.runs
    ) and all(type(value) in kinds.get(name, ()) for name, value in cell.settings.items())


def begun(folder: Path) -> Begun:
    """The record in config.json; raises UsageError if it is damaged. Imports nothing."""
    path = folder / "config.json"
    record = records.read(path, Begun)
    try:  # `read` refuses flags of another version
        config.typed({k: v for k, v in record.flags.items() if k in config.FLAGS})
    except (TypeError, ValueError):
        raise records.damaged(path) from None
    return record


def _check_same(folder: Path, there: Begun, chosen: Config, cell: Cell) -> Config:
    """The flags of the run in a folder; raises UsageError if it is another run."""
    try:
        differs = difference(there.flags, there.cell, chosen, cell)
    except UsageError as error:
        raise UsageError("--run_dir", folder, f"{error}; choose another --run_dir") from None
    if differs is not None:
        raise UsageError(
            "--run_dir",
            folder,
            f"holds another run, whose {differs.what}; choose another --run_dir{differs.remedy}",
        )
    return config.from_record(there.flags, chosen.trusted)


class Difference(NamedTuple):
    """The differences between two runs."""

    what: str
    remedy: str = ""  # how to choose the first run's values


def difference(
    flags: dict[str, Flag], there: records.Cell, chosen: Config, cell: Cell
) -> Difference | None:
    """The differences between an existing run and the requested one; None without one.

    These are all flags with other values, or else the first other difference.

    flags, there: the existing run's flags and cell. Raises UsageError for flags of another version.
    """
    found = outside.untrusted(config.factories(flags), chosen.trusted)
    for each in found.values():
        return Difference(
            f"flags have {each.what}", f", or {outside.remedy(found, chosen.trusted)}"
        )
    before = config.from_record(flags, chosen.trusted)
    old, new = config.to_record(before), config.to_record(chosen)
    compared = set(new) - _NOT_COMPARED
    what: list[str] = []
    remedy: list[str] = []
    for name in new:
        if name in compared and old[name] != new[name]:
            flag = name_of(config.FLAGS[name])
            text = _differs(flag, old[name], new[name])
            if name == "eval_every":  # unless set, it follows from --rounds and --checkpoint_every
                text += " (unless set, it is at most --rounds and divides --checkpoint_every)"
            what.append(text)
            remedy.append(f"--{flag}={shown(old[name])}")
    if what:
        return Difference(", ".join(what), f", or {' '.join(remedy)}")
    theirs, ours = _parts(there.restored()), _parts(cell)
    for name in {**ours, **theirs}:
        one, other = theirs.get(name), ours.get(name)
        if one != other:
            return Difference(_differs(name, one, other))
    # A run with "stop" has dropped and marked nothing so far, so it may continue with another rule.
    if before.run.nonfinite not in ("stop", chosen.run.nonfinite):
        return Difference(f"nonfinite is {before.run.nonfinite} and not {chosen.run.nonfinite}")
    return None


def _parts(cell: Cell) -> dict[str, Any]:
    """A cell by the names that users set, each with its values in the cell's runs."""
    record = cell.record()
    runs = record["runs"]
    values = {"seeds": [run["seed"] for run in runs]}
    for name in dict.fromkeys(name for run in runs for name in run["hyper"]):
        values[name] = [run["hyper"].get(name) for run in runs]
    different = {name: list(dict.fromkeys(of_runs)) for name, of_runs in values.items()}
    alone = {name: each[0] if len(each) == 1 else each for name, each in different.items()}
    # The runs come last, for those that differ in nothing else but their order.
    return {name: record[name] for name in record if name != "runs"} | alone | {"runs": runs}


def _differs(name: str, old: Any, new: Any) -> str:
    is_several = name == "seeds" or isinstance(old, list | tuple) or isinstance(new, list | tuple)
    return f"{name} {'are' if is_several else 'is'} {_short(old)} and not {_short(new)}"


def _short(value: Any) -> str:
    """A value as text; a list as a flag has it, unless it is of records."""
    if isinstance(value, list | tuple) and not any(isinstance(each, dict) for each in value):
        text = shown(value) or "none"
    else:
        text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
