"""A flag: a field of a record, with its default, its meaning and the values that it takes."""

import dataclasses
import difflib
import math
import os
import re
import tempfile
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fedjax_inv import checks
from fedjax_inv.checks import UsageError


class Range(NamedTuple):
    """The values that a flag takes, or that each element of a list takes."""

    holds: Callable[[Any], bool]
    text: str


# float32 distinguishes these from 0 and from infinity.
_LEAST, _MOST = 1e-38, 1e38
MOST_INT = 2**31  # the first integer beyond int32

ANY = Range(lambda value: True, "")
POSITIVE = Range(lambda value: _LEAST <= value <= _MOST, "above 0, from 1e-38 to 1e38")
FINITE = Range(lambda value: 0 <= value <= _MOST, "at least 0 and at most 1e38")
PROBABILITY = Range(lambda value: 0 <= value <= 1, "between 0 and 1")
FRACTION = Range(lambda value: 0 <= value < 1, "at least 0 and below 1")
INSIDE = Range(lambda value: 0 < value < 1, "above 0 and below 1")
PART = Range(lambda value: 0 < value <= 1, "above 0 and at most 1")


def at_least(lowest: int) -> Range:
    """The whole numbers from `lowest` on."""
    return Range(lambda value: lowest <= value < MOST_INT, f"at least {lowest} and below 2^31")


SEED = at_least(0)


# Numbers on a command line have the digits 0 to 9, no spaces and no underscores.
_NUMBERS = {
    int: re.compile(r"[+-]?[0-9]+"),
    float: re.compile(
        r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]+)?|[+-]?inf(?:inity)?|nan", re.IGNORECASE
    ),
}


def value_in(text: str, kind: type[Any]) -> Any:
    """The value of a text, int, float or str by `kind`; raises ValueError if there is none.

    Every number on a command line is read here.
    """
    if kind in _NUMBERS and not _NUMBERS[kind].fullmatch(text):
        raise ValueError(f"{text!r} is no number")
    return kind(text)


def is_whole(text: str, lowest: int = 0) -> bool:
    """Whether text is a whole number without a sign, of at least `lowest`."""
    # int raises an error for thousands of digits.
    is_number = text.isascii() and text.isdecimal() and len(text) <= 10
    return is_number and lowest <= int(text) < MOST_INT


def is_real(text: str, holds: Callable[[float], bool] = math.isfinite) -> bool:
    """Whether text is a number with a property."""
    try:
        return holds(value_in(text, float))
    except ValueError:
        return False


def is_lost(value: Any) -> bool:
    """Whether a number is not 0, but too near to 0 for float32, in which programs compute."""
    return isinstance(value, float) and 0 < abs(value) < _LEAST


LOST = "must be 0 or at least 1e-38 in size, as it is 0 in float32"


def number_or(*words: str, lowest: int = 0) -> Range:
    """Texts that are a whole number of at least `lowest`, or one of the words."""
    return Range(
        lambda value: value in words or is_whole(value, lowest),
        f"{', '.join(words)} or a number of at least {lowest} and below 2^31",
    )


def pair(holds: Callable[[str], bool], text: str) -> Range:
    """Texts "client:value", with a client's number and a value for it."""

    def both_hold(entry: str) -> bool:
        client, colon, value = entry.partition(":")
        return is_whole(client) and bool(colon) and holds(value)

    return Range(both_hold, f"client:value, a client's number and {text}")


def flag(
    default: Any,
    text: str,
    allowed: Range = ANY,
    *,
    choices: Collection[str] = (),
    kind: type | None = None,
    name: str = "",
    repeats: bool = False,
) -> Any:
    """A field that is a flag.

    default: its value unless it is set; a tuple is a comma-separated list of values of one kind.
    text: its meaning, for --help.
    allowed: the range of its value, or of each element of a list.
    choices: all names that it takes, if they are few.
    kind: the type of its value, or of each element of a list; by default that of `default`.
    name: the flag's name, if it is not the field's.
    repeats: whether the flag can be repeated, each time with another name=value.
    """
    if kind is None:
        kind = type(default[0] if isinstance(default, tuple) else default)
    metadata = {
        "help": text,
        "allowed": allowed,
        "choices": list(choices),
        "kind": kind,
        "name": name,
        "repeats": repeats,
    }
    return dataclasses.field(default=default, metadata=metadata)


def flags_of(record: Any) -> list[dataclasses.Field[Any]]:
    """The flags of a record or of its class, in order."""
    return [field for field in dataclasses.fields(record) if "help" in field.metadata]


def name_of(field: dataclasses.Field[Any]) -> str:
    """The name of a flag on a command line."""
    return field.metadata["name"] or field.name


def flag_names(*records: Any) -> dict[str, str]:
    """The flag of each field of the records, by the field's name, for `in_flags`."""
    return {field.name: name_of(field) for record in records for field in flags_of(record)}


def shown(value: Any) -> str:
    """A value as it is written on a command line."""
    if isinstance(value, tuple | list):
        return ",".join(map(shown, value))
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        short = f"{value:g}"
        return short if float(short) == value else str(value)
    return checks.shown(value) if getattr(value, "ndim", 0) > 0 else str(value)


def flag_error(name: str, value: Any, allowed: str) -> UsageError:
    """The error for a value of a flag.

    name: the flag's name, without dashes. allowed: the rest of the line, "must be ...".
    """
    return UsageError(f"--{name}={shown(value)}", ..., allowed)


def check(record: Any) -> None:
    """Raises UsageError unless each flag of a record is in its range."""
    for field in flags_of(record):
        check_range(field, getattr(record, field.name))


def check_range(field: dataclasses.Field[Any], value: Any) -> None:
    """Raises UsageError unless the value of a flag is in its range."""
    allowed = field.metadata["allowed"]
    for item in value if isinstance(value, tuple) else (value,):
        if field.metadata["choices"]:
            check_known(name_of(field), item, field.metadata["choices"])
        if not allowed.holds(item):
            raise flag_error(name_of(field), item, f"must be {allowed.text}")
        if is_lost(item):
            raise flag_error(name_of(field), item, LOST)


def check_known(name: str, value: str, allowed: Collection[str]) -> None:
    """Raises UsageError, with the nearest names, unless `value` is one of `allowed`."""
    if value not in allowed:
        near = difflib.get_close_matches(value, allowed, 3, 0.4)
        hint = f"did you mean {' or '.join(near)}? All: " if near else "must be one of "
        raise flag_error(name, value, f"unknown; {hint}{', '.join(allowed)}")


def check_different(name: str, values: Collection[Any], *, may_be_empty: bool = False) -> None:
    """Raises UsageError if there are no values, or if two of them are equal."""
    if (len(values) == 0 and not may_be_empty) or len(set(values)) < len(values):
        raise flag_error(name, [*values], "must be one or several different values")


def in_flags(error: Exception, where: str, names: Mapping[str, str]) -> UsageError:
    """A function's error about its arguments, expressed by the flags that set them.

    where: the flag that selected the function, with its value; empty if there is none.
    names: the flag of each argument, without dashes; "set=penalty" for a setting.
    """

    def flag_of(argument: str) -> str | None:
        return names.get(argument.partition("[")[0])  # "widths[1]" is an element of widths

    def assigned(argument: str, value: Any) -> str:
        name = flag_of(argument)
        if name is None:
            return argument if value is ... else f"{argument}={checks.shown(value)}"
        return f"--{name}" if value is ... else f"--{name}={shown(value)}"

    line = error.line(assigned) if isinstance(error, UsageError) else str(error)
    if where and not line.startswith("--"):
        return UsageError(where, ..., line)
    return UsageError(line if where in line else f"{line}, with {where}")


def check_place(name: str, path: Path, *, is_folder: bool = False) -> None:
    """Raises UsageError if a path cannot be written. Writes nothing.

    name: the flag that holds the path. is_folder: whether the path is a folder for files.
    """
    try:
        for link in (path, *path.parents):
            if link.is_symlink() and not link.exists():
                text = "a link to nothing; mend the link or choose another"
                raise flag_error(name, path, f"is {text}" if link == path else f"{link} is {text}")
        if path.exists() and path.is_dir() != is_folder:
            is_now, needed = ("a file", "a folder") if is_folder else ("a folder", "a file")
            raise flag_error(name, path, f"is {is_now}, must be {needed}")
        folder = (path if is_folder else path.parent).absolute()
        nearest = next(each for each in (folder, *folder.parents) if each.exists())
        tempfile.TemporaryFile(dir=nearest).close()
    except OSError as error:
        text = f"cannot be written ({error.strerror}); choose another"
        raise flag_error(name, path, text) from None


def check_run_dir(path: Path) -> None:
    """Raises UsageError if runs in this folder could not write checkpoints, which orbax does.

    Orbax takes brackets for a pattern, a backslash for a slash, and names with :// for a cloud's.
    """
    check_place("run_dir", path, is_folder=True)
    if re.match(r"\w+:/", str(path)):
        raise flag_error("run_dir", path, "must be a folder of this machine")
    whole = str(path.absolute())
    for wrong in "[]\\":
        if wrong in whole:
            text = f"must be a folder whose path has no {wrong}, with which checkpoints fail"
            raise flag_error("run_dir", whole, text)
    try:
        whole.encode()
    except UnicodeEncodeError:
        raise flag_error("run_dir", path, "must be a folder whose path is UTF-8") from None


_OF_RUNS = ("config", "inputs", "metrics", "result")  # their .json files


def check_picture(name: str, text: str) -> Path:
    """The path of a picture, beside which a .pdf and perhaps a .json are written.

    Raises UsageError if it is not a .png, if it would replace a file of a run, or if it cannot be
    written.
    """
    path = Path(os.path.expanduser(text))
    if path.suffix != ".png":
        raise flag_error(name, text, "must end in .png")
    if path.stem in _OF_RUNS:
        raise flag_error(name, text, f"must not be named as a run's file: {', '.join(_OF_RUNS)}")
    check_place(name, path)
    check_place(name, path.with_suffix(".pdf"))
    return path
