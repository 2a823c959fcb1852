"""Rows of a table: labels with flags of `train`, as a TOML file has them.

    preset = "first_look_rotated"
    select = ["validation", "oracle"]   # rules of selection, the first is --select
    baseline = "FedAvg"                 # of differences; by default the first row
    numbers = "paper.csv"               # beside ours: source,row,data,column,value

    [flags]                             # of all rows
    seeds = [0, 1, 2]

    [rows.FedAvg]
    algorithm = "fedavg"

    [rows."FedIPG, large"]              # its own flags, which replace those of all rows
    algorithm = "fedipg"
    set = { penalty = [1.0, 100.0] }    # settings of the algorithm
    learning_rate = 0.05

A list is a grid, as values with commas are on a command line. A file with several data sets has
`[data.NAME]` for each, with `preset`, `flags` and `rows` that are added there. Like a --flagfile,
it comes from the command line, and so it may name code.
"""

import csv
import difflib
import functools
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from fedjax_inv.checks import UsageError

from ..assembly import grid
from ..config import NAMES
from ..errors import near
from ..folder.selection import RULES

_SETTINGS = ("set", "optimizer_set")  # flags that hold tables
_OF_ALL = ("run_dir", "resume", "select")  # not of a row, but of the command or of the file


class Row(NamedTuple):
    """A row of a table."""

    label: str
    flags: tuple[str, ...]  # of `train`; those of the command line replace them
    series: str = ""  # the line in a figure on which the row is a point
    x: str = ""  # the x of that point
    start: str = ""  # the folder of its initial network: a row's folder / a cell's folder
    own: tuple[str, ...] = ()  # flags that those of the command line do not replace

    @property
    def folder(self) -> str:
        """The name of the folder with its runs, where no other row's is the same."""
        return grid.folder_name(self.label)


class Number(NamedTuple):
    """A number that a paper prints."""

    source: str  # its table or figure
    row: str
    data: str
    column: str
    value: str  # as printed


class _OfData(msgspec.Struct, forbid_unknown_fields=True):
    """What a file says of one data set."""

    preset: str = ""
    flags: dict[str, Any] = {}
    rows: dict[str, dict[str, Any]] = {}


class _Content(_OfData, forbid_unknown_fields=True):
    """What a file says."""

    data: dict[str, _OfData] = {}
    select: list[str] = []
    baseline: str = ""
    caption: str = ""
    numbers: str = ""


class RowsFile(NamedTuple):
    """A file of rows."""

    path: Path
    rows: Mapping[str, Sequence[Row]]  # by data set; by "" if the file names none
    select: Sequence[str]  # rules of selection
    baseline: str
    caption: str
    numbers: Sequence[Number]

    def numbers_of(self, data: str) -> dict[str, dict[str, str]]:
        """The numbers for a data set: "paper: COLUMN" -> label -> number."""
        found: dict[str, dict[str, str]] = {}
        for number in self.numbers:
            if number.data in ("", data):
                found.setdefault(f"paper: {number.column}", {})[number.row] = number.value
        return found


def read(path: Path) -> RowsFile:
    """Reads a file of rows. Raises UsageError with the file, the row and the key of a mistake."""
    try:
        content = msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), _Content)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: {error}") from None
    for rule in content.select:
        _check_known(f"{path}: select", rule, RULES)
    rows = {name: _rows(path, content, more) for name, more in content.data.items()}
    rows = rows or {"": _rows(path, content, _OfData())}
    labels = [row.label for of_data in rows.values() for row in of_data]
    if content.baseline:
        _check_known(f"{path}: baseline", content.baseline, labels)
    numbers = read_numbers(path.parent / content.numbers) if content.numbers else []
    return RowsFile(path, rows, content.select, content.baseline, content.caption, numbers)


def _rows(path: Path, content: _Content, more: _OfData) -> list[Row]:
    """The rows of a data set, of which the file says more."""
    presets = [f"--preset={each.preset}" for each in (content, more) if each.preset]
    rules = [f"--select={content.select[0]}"] if content.select else []
    rules += ["--leave_one_out"] if "leave_one_out" in content.select else []
    common = [word for each in (content, more) for word in _words(f"{path}, [flags]", each.flags)]
    labels = dict.fromkeys([*content.rows, *more.rows])
    if not labels:
        raise UsageError(str(path), ..., 'must have rows, such as [rows."FedAvg"]')
    return [
        Row(
            label,
            (*presets, *rules, *common),
            own=tuple(
                word
                for each in (content, more)
                for word in _words(f'{path}, row "{label}"', each.rows.get(label, {}))
            ),
        )
        for label in labels
    ]


def _words(where: str, flags: Mapping[str, Any]) -> list[str]:
    """Flags as words of a command line. where: what an error names."""
    words = []
    for name, value in flags.items():
        if name in _OF_ALL:
            raise UsageError(f"{where}: {name}", ..., "is of all rows, so it must not stand here")
        at = f"{where}: {name}"
        if name not in ("preset", *NAMES):
            meant = difflib.get_close_matches(name, NAMES, 1)
            raise UsageError(at, ..., f"is no flag{'; is it ' if meant else ''}{''.join(meant)}")
        if name not in _SETTINGS:
            words.append(f"--{name}={_text(at, value)}")
        elif isinstance(value, dict):
            words += [f"--{name}={key}={_text(f'{at}.{key}', of)}" for key, of in value.items()]
        else:
            raise UsageError(at, ..., "must be a table, such as { penalty = [1.0, 10.0] }")
    return words


def _text(where: str, value: Any) -> str:
    """A value as it stands on a command line."""
    if isinstance(value, list) and not any(isinstance(each, list) for each in value):
        return ",".join(_text(where, each) for each in value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | int | float):
        return str(value)
    raise UsageError(where, ..., "must be a text, a number, true, false, or a list of them")


def _check_known(where: str, name: str, known: Sequence[str] | Mapping[str, Any]) -> None:
    if name not in known:
        raise UsageError(f"{where}: {name}", ..., f"unknown; {near(name, known)}")


@functools.cache
def read_numbers(path: Path) -> list[Number]:
    """A paper's numbers, from a csv file with the columns of `Number`; # begins a comment."""
    try:
        lines = [x for x in path.read_text(encoding="utf-8").splitlines() if not x.startswith("#")]
        return [Number(**line) for line in csv.DictReader(lines)]
    except (OSError, TypeError, UnicodeDecodeError):
        text = f"must be a csv file with the columns {','.join(Number._fields)}"
        raise UsageError(str(path), ..., text) from None
