"""Errors of flags: one line each, with the flag and its value."""

import difflib
import re
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from fedjax_inv import checks
from fedjax_inv.checks import UsageError

from .config import NAMES


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


def check_known(name: str, value: str, allowed: Collection[str]) -> None:
    """Raises UsageError, with the nearest names, unless `value` is one of `allowed`."""
    if value not in allowed:
        raise flag_error(name, value, f"unknown; {near(value, allowed)}")


def near(value: str, allowed: Collection[str]) -> str:
    """The end of an error: the names that a person may have meant."""
    found = difflib.get_close_matches(value, allowed, 3, 0.4)
    hint = f"did you mean {' or '.join(found)}? All: " if found else "must be one of "
    return f"{hint}{', '.join(allowed)}"


def in_flags(error: Exception, where: str, names: Mapping[str, str]) -> UsageError:
    """A function's error about its arguments, expressed by the flags that set them.

    where: the flag that selected the function, with its value; empty if there is none.
    names: the flag of each argument, without dashes, where it is not the argument's name.
    """

    def assigned(argument: str, value: Any) -> str:
        plain = argument.partition("[")[0]  # "widths[1]" is an element of widths
        name = names.get(plain, plain if plain in NAMES else "")
        if not name:
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
    if re.search(r"^\w+:/|[\[\]\\]", str(path.absolute())) or re.match(r"\w+:/", str(path)):
        text = "must be a folder of this machine whose path has none of [, ] and \\"
        raise flag_error("run_dir", path, text)
