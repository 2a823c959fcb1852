"""Run folders: which run they hold, and their lock."""

import contextlib
import errno
import fcntl
import re
import sys
import zlib
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, NoReturn

import fedjax_inv
from fedjax_inv.checks import UsageError
from fedjax_inv.data.uses import Uses

from .. import config, sheet
from ..assembly import factories, grid, machine
from ..assembly.grid import Cell
from ..config import NAMES, Config
from ..errors import shown
from . import checkpoints, files, provenance, records
from .records import Flag, FolderRecord, Provenance, Result

_LOCK = ".lock"
# The errors of a file system that cannot lock a file.
_NO_LOCKS = (errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)

_LONGEST = 60  # the most characters of flags in a default folder's name

# The flags for where, how and how long a run is computed; they do not define the run.
_HOW = {
    "rounds",
    "run_dir",
    "resume",
    "checkpoint_every",
    "chunk",
    "devices",
    "hold",
    "processes",
    "paper",
    "nonfinite",
    "select",
    "metrics",
    "tensorboard",
    "keep_checkpoints",
}
# These and the flags that the cell contains.
_NOT_COMPARED = {
    *_HOW,
    "algorithm",
    "set",
    "held_out",
    "validate",
    "learning_rate",
    "server_learning_rate",
    "seeds",
}


def path_of(chosen: Config) -> Path:
    """The run folder: --run_dir, or a default one."""
    data = chosen.data
    algorithms = chosen.method.algorithm
    if chosen.output.run_dir:
        return Path(chosen.output.run_dir)
    if chosen.is_grid:
        return default(chosen, f"grid-{data.stem}-{'-'.join(algorithms)}", ("algorithm",))
    name = f"{algorithms[0]}-{data.stem}-{data.held_out or 'default'}"
    return default(chosen, name, ("algorithm", "held_out"))


def default(chosen: Config, name: str, named: Collection[str]) -> Path:
    """The folder of a run without --run_dir: its name, and the flags that differ from the defaults.

    The same flags give the same folder, so that a run can be continued there. A checksum replaces a
    long text.

    named: the flags that are in `name` already.
    """
    left_out = {*_HOW, *named}
    if chosen.data.dataset == chosen.data.stem:
        left_out.add("dataset")  # its stem is in every name
    usual = sheet.flat(config.defaults())
    if chosen.evaluation.eval_every == config.fitting(usual["eval_every"], chosen):
        left_out.add("eval_every")  # or a run of few rounds would not go on with more
    changed = {
        flag: value if isinstance(value, tuple) else (value,)
        for flag, value in sheet.flat(chosen).items()
        if flag not in left_out and value != usual[flag]
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

    The kernel holds the lock of the file .lock, so it ends with its process. If several processes
    run one program, the leading one locks the folder for all.
    """
    with contextlib.ExitStack() as opened:
        refused = False
        if machine.leads():
            folder.mkdir(parents=True, exist_ok=True)
            file = opened.enter_context(open(folder / _LOCK, "ab"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                refused = True
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                text = "its file system has no locks; start no second process there"
                print(f"{folder}: {text}", file=sys.stderr)
        if machine.agree(int(refused)):
            raise UsageError("--run_dir", folder, "another process is at work there; wait for it")
        files.remove_leftovers(folder)
        yield


def check_sweep(folder: Path) -> None:
    """Raises UsageError if a folder holds a run of its own, or files but no sweep."""
    if (folder / "config.json").exists():
        raise UsageError("--run_dir", folder, "holds a run of its own; choose another")
    is_sweep = (folder / "result.json").exists() or any(folder.glob("*/config.json"))
    if not (is_sweep or _is_empty(folder)):
        raise UsageError("--run_dir", folder, "is neither empty nor a sweep; choose another")


def check_rows(folder: Path) -> None:
    """Raises UsageError if a folder holds runs of `train`, or files but no rows."""
    if (folder / "config.json").exists() or (folder / "result.json").exists():
        raise UsageError("--run_dir", folder, "holds runs of train; choose another")
    has_rows = any(folder.glob("*/row.json")) or any(folder.glob("*/*/config.json"))
    if not (has_rows or _is_empty(folder)):
        raise UsageError("--run_dir", folder, "is neither empty nor of compare; choose another")


def _is_empty(path: Path) -> bool:
    """Whether nothing is there but what a process leaves that dies before its run begins."""
    if path.is_dir():
        return all(map(_is_empty, path.iterdir()))
    return not path.exists() or path.name == _LOCK or path.suffix == ".tmp"


def finished(
    chosen: Config, cell: Cell, folder: Path, start: Callable[[], Provenance]
) -> Result | None:
    """The result in the folder; None if the cell must be run or continued.

    start: the record of a start now.

    Raises UsageError if the folder holds another run or one on other data, or an unfinished run
    without --resume.
    """
    if _is_empty(folder):
        return None
    if not (folder / "config.json").exists():
        raise UsageError("--run_dir", folder, "is neither empty nor a run; choose another")
    there = record_of(folder)
    _check_flags(folder, there.flags, chosen)
    _check_cell(folder, there.cell, records.CellRecord.of(cell))
    _check_start(folder, there.start, start())
    before = there.flags["rounds"]
    _check_rounds(folder, before, chosen)
    if before == chosen.training.rounds and (folder / "result.json").exists():
        return result(folder)
    if not chosen.output.resume:
        state = "an unfinished run"
        if before != chosen.training.rounds:
            state = f"a run whose rounds is {before} and not {chosen.training.rounds}"
        text = f"holds {state}; add --resume to go on with it, or choose another"
        raise UsageError("--run_dir", folder, text)
    return None


def _check_flags(folder: Path, flags: dict[str, Flag], chosen: Config) -> None:
    """Raises UsageError unless a run has the flags of the command, except how it is computed."""
    now = records_of(chosen)
    usual = sheet.flat(config.defaults())
    before = {name: flags.get(name, _recorded(usual[name])) for name in now}
    # A run with "stop" has dropped and marked nothing so far, so it may continue with another rule.
    free = _NOT_COMPARED - ({"nonfinite"} if before["nonfinite"] != "stop" else set())
    if before["rounds"] != now["rounds"]:
        free = free | {"eval_every"}  # which a run of fewer rounds has lowered
    names = [name for name in now if before[name] != now[name] and name not in free]
    if names:
        its, ours = (
            " ".join(f"--{name}={shown(each[name])}" for name in names) for each in (before, now)
        )
        _refuse(folder, f"of {its} and not {ours}")


def _check_cell(folder: Path, there: records.CellRecord, now: records.CellRecord) -> None:
    """Raises UsageError unless a folder holds these runs."""
    for name in ("algorithm", "settings", "held_out", "validate"):
        if there[name] != now[name]:
            _refuse(folder, f"whose {name} is {there[name]} and not {now[name]}")
    lacking = [run for run in now.runs if run not in there.runs]
    others = [run for run in there.runs if run not in now.runs]
    for what, runs in (("without", lacking), ("with", others)):
        for run in runs:
            hyper = [f"{name}={shown(value)}" for name, value in run.hyper.items()]
            _refuse(folder, f"{what} seed={run.seed} {' '.join(hyper)}")
    if there.runs != now.runs:
        _refuse(folder, "in another order of its seeds and hyperparameters")


def _refuse(folder: Path, which: str) -> NoReturn:
    text = f"holds another run, {which}; choose another --run_dir, or its flags"
    raise UsageError("--run_dir", folder, text)


def _check_start(folder: Path, before: Provenance, now: Provenance) -> None:
    """Raises UsageError if a run began on other data, with other code, or from other networks."""
    versions = [start.versions.get("fedjax_inv") for start in (before, now)]
    modules = provenance.changed_code(before, now)
    for changed, what in (
        (versions[0] != versions[1], f"with version {versions[0]} of fedjax_inv"),
        (before.data != now.data, "on other data than --dataset has by now"),
        (modules != "", f"with other code of one's own in {modules} than there is by now"),
        (now.weights and before.weights != now.weights, "from other --weights or --head_from"),
        # The run of --init_from may be gone when this one goes on.
        (now.networks and before.networks != now.networks, "from other networks than --init_from"),
    ):
        if changed:
            text = f"has begun {what}; put that in its place, or choose another --run_dir"
            raise UsageError("--run_dir", folder, text)


def _check_rounds(folder: Path, before: Any, chosen: Config) -> None:
    """Raises UsageError if a run cannot continue with --rounds instead of `before` rounds."""
    asked = chosen.training.rounds
    every = chosen.evaluation.eval_every
    if asked == before:
        return
    done = max(checkpoints.rounds(folder / "checkpoints"), default=0)
    text = ""
    if asked < done:
        text = f"has done {done}; must be at least as many"
    elif chosen.training.schedule == "cosine":
        text = f"has a cosine schedule over its --rounds={before}; must be as many"
    elif chosen.aggregation.epsilon:
        text = f"has the noise of an --epsilon over its --rounds={before}; must be as many"
    elif chosen.machine.hold == "stream" and done % every and asked > done:
        text = f"streams, and ended after {done}, between two evaluations of --eval_every={every}"
    if text:
        raise UsageError("--rounds", asked, f"the run in {folder} {text}, or another --run_dir")


def result(folder: Path) -> Result:
    """The result of a cell; raises UsageError if result.json is damaged."""
    # A resumed run computes it again from the log and a checkpoint.
    return records.read(folder / "result.json", Result, "delete it and add --resume")


def records_of(chosen: Config) -> dict[str, Flag]:
    """All flags as records store them."""
    return {name: _recorded(value) for name, value in config.to_record(chosen).items()}


def _recorded(value: Any) -> Flag:
    return [*value] if isinstance(value, tuple) else value


def begin(
    folder: Path,
    chosen: Config,
    cell: Cell,
    start: Provenance,
    uses: Uses | None = None,
    weighting: str = "",
    served: str | None = None,
) -> None:
    """Writes config.json: the flags, the cell, where the run comes from, and its examples."""
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / "config.json").exists():
        start = provenance.merged([record_of(folder).start, start])
    files.remove(folder / "result.json")  # of fewer rounds
    used = records.UsesRecord.of(uses) if uses else None
    of_cell = records.CellRecord.of(cell)
    record = FolderRecord(records_of(chosen), of_cell, start, used, weighting, served)
    files.write_json(folder / "config.json", record)


def read(folder: Path, named: Collection[str] = ()) -> tuple[Config, Cell]:
    """The flags and the cell of a run.

    named: the code of one's own that the command names, which alone may be imported.

    Raises UsageError if config.json is damaged, was written by another version, or names other
    code.
    """
    record = record_of(folder)
    factories.check_named(record.flags, named)
    chosen = flags_of(folder)
    if record.cell.algorithm not in chosen.method.algorithm:
        raise _unreadable(folder)
    return chosen, record.cell.restored()


def flags_of(folder: Path) -> Config:
    """The flags of a run; no code that they name is imported.

    Raises UsageError if config.json is damaged, or was written by another version.
    """
    try:
        return config.from_record(record_of(folder).flags)
    except (TypeError, ValueError):
        raise _unreadable(folder) from None


def record_of(folder: Path) -> FolderRecord:
    """The record in config.json; raises UsageError if it is damaged, or of another version."""
    record = records.decoded((folder / "config.json").read_bytes(), FolderRecord)
    if record is None or not record.flags.keys() <= set(NAMES):
        raise _unreadable(folder)
    return record


def _unreadable(folder: Path) -> UsageError:
    path = folder / "config.json"
    versions = re.findall(r'"fedjax_inv": "([^"]+)"', path.read_text(errors="replace"))
    text = f"is damaged; delete {folder} to begin anew"
    if versions and versions[-1] != fedjax_inv.__version__:
        text = f"was written by version {versions[-1]}, which reads it"
    return UsageError(str(path), ..., text)
