"""Whether older tables would come out the same today: their first rounds, by old and present code.

python -m tools.repeat
python -m tools.repeat --tables=cafe_digits_methods.md,fedipg_mnist_exit.md --rounds=3

`make results` lists the tables whose code has changed since. Most changes of code change no number.
For each listed table this command trains a few rounds of the rows whose code or flags have changed,
with the first of its seeds, once by the commit of the table and once by the present code. It
evaluates each round and compares all numbers of metrics.jsonl, such as the training loss and every
domain's score and loss. Where none differs by more than 1e-5 of itself, the table's record says how
far they are apart, and `make results` lists the table again only after another change of code. What
this does not test: later rounds, rules that select or stop in them, and how a study's table is made
from its runs.
"""

import concurrent.futures
import contextlib
import dataclasses
import decimal
import itertools
import json
import math
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

import fedjax_inv
from fedjax_inv.checks import UsageError
from fedjax_inv_experiments.flags import command
from fedjax_inv_experiments.flags.flag import at_least, flag, flag_error
from fedjax_inv_experiments.papers import study
from fedjax_inv_experiments.running import files, log, records, sources
from fedjax_inv_experiments.running.records import Line, Origin, Repeated
from tools import rows as study_rows
from tools.results import ROOT, TABLES, age, changed, published, record_of


@dataclasses.dataclass(frozen=True)
class Options:
    """The flags of this command."""

    tables: tuple[str, ...] = flag(
        (), "Files of docs/results/tables; default: all that are older than their code.", kind=str
    )
    rounds: int = flag(2, "The number of rounds.", at_least(1))
    places: tuple[str, ...] = flag(
        (), "Files or folders of data that commands name without their place.", kind=str
    )
    jobs: int = flag(os.cpu_count() or 1, "The number of commands at once.", at_least(1))


# Of float32 in a few rounds and in sums over a test set, relative. One more right answer among less
# than 100,000 is above it.
ROUNDING = 1e-5
_STUDIES = ("fedjax_inv_experiments/papers/", "fedjax_inv_experiments/shift_map/")
_REPLACED = (
    *("rounds", "eval_every", "checkpoint_every", "seeds", "run_dir", "resume", "devices"),
    "beside",  # another run's numbers, which are only shown
)
# What follows from the domains is rounded in other ways by some versions.
_FOLLOWS = ("validation_score", "test_score", "worst_domain", "worst_score")
_COMPARED = [name for name in Line.__struct_fields__ if name not in ("seconds", *_FOLLOWS)]


def shortened(record: Origin, rounds: int, places: Sequence[str] = ()) -> list[str]:
    """A table's command for a few rounds of its first seed, each evaluated, without a run folder.

    places: the data of --dataset that the command names without their place.

    Raises UsageError if the command is no study's.
    """
    full = {
        f"--dataset={Path(place).name}": f"--dataset={Path(place).absolute()}" for place in places
    }
    words = shlex.split(record.command)[1:]
    if words[0] not in ("paper", "map") or not record.seeds:
        raise UsageError(record.command, ..., "is no command of a study with seeds")
    kept = [
        full.get(word, word)
        for word in words
        if word.partition("=")[0].lstrip("-") not in _REPLACED
    ]
    own = (f"--rounds={rounds}", "--eval_every=1", f"--seeds={record.seeds[0]}", "--devices=1")
    return [*kept, *own]


def rows_of(
    words: Sequence[str], paths: Collection[str], before: Mapping[str, list[str]]
) -> list[str] | None:
    """The values of --rows for those rows of a study that changed files may change.

    They are None, for all rows, if a file may change any row, as a preset does, or if rows start
    from the networks of others.

    Args:
      words: the command.
      paths: the files that have changed.
      before: the flags of each row by its label in the older code; {} if that cannot tell.
    """
    paper, options, rows = study_rows.of(words)
    configs = study.configs(paper, rows, options.folder, options.overrides)
    code = [sources.of_run(chosen).keys() for chosen in configs]
    # A study's file trains its rows by their flags alone.
    of_runs = {path for path in paths if not (before and path.startswith(_STUDIES))}
    if of_runs - set().union(*code):
        return None
    own = [
        row
        for row, of_row in zip(rows, code, strict=True)
        if of_row & of_runs or (before and before.get(row.label) != [*row.flags])
    ]
    if own and any(row.start for row in rows):
        return None
    # A row of the map is a method, which has a label for each kind of shift.
    return [*dict.fromkeys(row.series if words[0] == "map" else row.label for row in own)]


def lines(folder: Path) -> dict[str, list[Line]]:
    """The evaluations of each cell below a folder, by its row and its number in the row.

    The names of cells contain the settings that are no defaults, and versions change defaults.
    """
    found = {}
    cells = sorted(path.parent for path in folder.rglob("metrics.jsonl"))
    for row, of_row in itertools.groupby(cells, lambda cell: cell.parent):
        for number, cell in enumerate(of_row, 1):
            found[f"{row.relative_to(folder).as_posix()}, cell {number}"] = log.read(cell)
    return found


def difference(
    old: Mapping[str, Sequence[Line]], new: Mapping[str, Sequence[Line]]
) -> tuple[str, float]:
    """The first difference beyond rounding of the evaluations of two folders, "" without one.

    Time does not count, nor a field that only one of them has, as later versions write more.

    Returns (the difference, the largest relative difference of two numbers).
    """
    if not old or old.keys() != new.keys():
        either = sorted(old.keys() ^ new.keys())
        return f"has not the same cells: {', '.join(either) or 'none at all'}", math.inf
    largest = 0.0
    for cell, before in old.items():
        if len(before) != len(new[cell]):
            return f"{cell} has {len(before)} lines then, {len(new[cell])} now", math.inf
        for one, other in zip(before, new[cell], strict=True):
            for name in _COMPARED:
                pair = [msgspec.to_builtins(each.get(name)) for each in (one, other)]
                apart = 0.0 if None in pair else _apart(*pair)
                largest = max(largest, apart)
                if apart > ROUNDING:
                    text = f"{cell}, round {one.round}: {name} is {pair[0]} then, {pair[1]} now"
                    return text, apart
    return "", largest


def _apart(one: Any, other: Any) -> float:
    """The largest relative difference of the numbers in two values; infinite if others differ."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return max((_apart(one[name], other[name]) for name in one), default=0.0)
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return max(map(_apart, one, other), default=0.0)
    if not all(type(each) in (int, float) for each in (one, other)):
        return 0.0 if one == other else math.inf
    if one == other or (math.isnan(one) and math.isnan(other)):
        return 0.0
    apart = abs(one - other) / max(abs(one), abs(other))
    return apart if math.isfinite(apart) else math.inf


@contextlib.contextmanager
def checked_out(commits: Sequence[str]) -> Iterator[dict[str, Path]]:
    """Folders with the files of commits, which are deleted in the end."""
    with tempfile.TemporaryDirectory() as name:
        found = {commit: Path(name) / commit for commit in commits}
        try:
            for commit, folder in found.items():
                _git("worktree", "add", "--detach", str(folder), commit)
            yield found
        finally:
            for folder in found.values():
                if folder.exists():
                    _git("worktree", "remove", "--force", str(folder))


def _git(*words: str) -> None:
    done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True)
    if done.returncode:
        raise UsageError(" ".join(words[:2]), ..., done.stderr.strip().splitlines()[-1])


def _rounded_up(number: float) -> float:
    """The number with one digit, rounded up, so that no difference is above the printed one."""
    exact = decimal.Decimal(str(number))
    return float(exact.quantize(decimal.Decimal(1).scaleb(exact.adjusted()), decimal.ROUND_CEILING))


def _train(words: Sequence[str], code: Path, folder: Path) -> None:
    """Runs a command of fedjax-inv by the code in a folder. Raises UsageError if it fails."""
    full = [sys.executable, "-m", "fedjax_inv_experiments", *words, f"--run_dir={folder}"]
    environment = os.environ | {"PYTHONPATH": str(code)}
    done = subprocess.run(full, cwd=code, env=environment, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip() or "no message").splitlines()[-1]
        raise UsageError(shlex.join(words), ..., f"failed at {code.name}: {last}")


def _flags_of_rows(words: Sequence[str], code: Path) -> dict[str, list[str]]:
    """The flags of a study's rows by the code in a folder; {} if it has another protocol."""
    full = [sys.executable, "-P", str(ROOT / "tools/rows.py"), *words]
    environment = os.environ | {"PYTHONPATH": str(code)}
    done = subprocess.run(full, cwd=code, env=environment, capture_output=True, text=True)
    return {} if done.returncode else json.loads(done.stdout)


def repeated(record: Origin, before: Path, options: Options) -> tuple[str, Repeated | None]:
    """Compares a table's first rounds; before: the folder with the table's commit.

    Returns what differs, or "" with the note for the table's record.
    """
    words = shortened(record, options.rounds, options.places)
    paths, last = changed(record), record.repeated
    own = rows_of(words, paths, _flags_of_rows(words, before)) if paths else None
    rounds, rounding = options.rounds, 0.0
    if own is not None and last is not None:  # for the rows that do not train
        rounds, rounding = min(rounds, last.rounds), last.rounding
    known = last.code if last else record.code
    code = sources.of_files(ROOT / name for name in known if (ROOT / name).exists())
    if own is not None:
        words = [
            *(word for word in words if not word.startswith("--rows=")),
            f"--rows={','.join(own)}",
        ]
    if own != []:
        with tempfile.TemporaryDirectory() as name:
            old, new = Path(name) / "old", Path(name) / "new"
            _train(words, before, old)
            _train(words, ROOT, new)
            found, largest = difference(lines(old), lines(new))
            origins = [records.decoded(path.read_bytes(), Origin) for path in new.rglob("*.json")]
        if found:
            return found, None
        rounding = max(rounding, _rounded_up(largest))
        code |= next((each.code for each in origins if each is not None and each.code), {})
    today, version = str(datetime.now(UTC).date()), fedjax_inv.__version__
    return "", Repeated(rounds, today, version, code, rounding)


def run(options: Options, root: Path = ROOT) -> str:
    """Compares tables, prints a line for each, and writes the records of those that are equal."""
    every = {path.name: path for path in published(root)}
    for name in options.tables:
        if name not in every:
            raise flag_error("tables", name, f"is no file of {TABLES}")
    each = {name: record_of(path) for name, path in every.items()}
    chosen = options.tables or [name for name, record in each.items() if age(record)[1]]
    alike: dict[tuple[str, str | None], list[str]] = {}
    for name, record in each.items():
        alike.setdefault((record.command, record.commit), []).append(name)
    groups = [names for names in alike.values() if set(names) & set(chosen)]
    firsts = [each[names[0]] for names in groups]
    commits = {record.commit for record in firsts if _is_commit(record)}

    def one(record: Origin, names: list[str]) -> bool:
        try:
            if not _is_commit(record):
                raise UsageError(record.command, ..., f"is of commit {record.commit}")
            found, note = repeated(record, folders[str(record.commit)], options)
        except UsageError as error:
            found, note = f"cannot be compared: {error}", None
        for name in names if note else []:
            record = msgspec.structs.replace(each[name], repeated=note)
            files.write_json(every[name].with_name(f"{name}.json"), record)
        same = f"the same to {note.rounding:g}" if note and note.rounding else "the same"
        print(f"{', '.join(names)}: {found or same}", flush=True)
        return note is not None

    with (
        checked_out(sorted(str(commit) for commit in commits)) as folders,
        concurrent.futures.ThreadPoolExecutor(options.jobs) as pool,
    ):
        same = sum(pool.map(one, firsts, groups))
    return f"{same} of {len(groups)} commands gave the same first {options.rounds} rounds."


def _is_commit(record: Origin) -> bool:
    return bool(record.commit) and len(str(record.commit)) == 40


BINARY = command.of(run, Options, __doc__)

if __name__ == "__main__":
    command.main(BINARY)
