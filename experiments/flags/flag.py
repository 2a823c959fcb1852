"""What a flag is: a field of a record, with its default, its meaning and what it may be."""

import dataclasses
import difflib
import math
import re
import tempfile
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fedjax_inv.checks import UsageError


class Range(NamedTuple):
    """The values that a flag takes, each of them where it takes several."""

    holds: Callable[[Any], bool]
    text: str


# What float32 can tell from 0 and from infinity.
_LEAST, _MOST = 1e-38, 1e38
MOST_INT = 2**31  # not in int32 any more

ANY = Range(lambda value: True, "")
POSITIVE = Range(lambda value: _LEAST <= value <= _MOST, "above 0, from 1e-38 to 1e38")
FINITE = Range(lambda value: 0 <= value <= _MOST, "at least 0 and at most 1e38")
PROBABILITY = Range(lambda value: 0 <= value <= 1, "between 0 and 1")
FRACTION = Range(lambda value: 0 <= value < 1, "at least 0 and below 1")
INSIDE = Range(lambda value: 0 < value < 1, "above 0 and below 1")


def at_least(lowest: int) -> Range:
    """Whole numbers from `lowest` on."""
    return Range(lambda value: lowest <= value < MOST_INT, f"at least {lowest} and below 2^31")


SEED = at_least(0)


def is_whole(text: str, lowest: int = 0) -> bool:
    """Whether text is a whole number from `lowest` on, in the digits 0 to 9."""
    # Not thousands of digits, which int refuses.
    is_number = text.isascii() and text.isdecimal() and len(text) <= 10
    return is_number and lowest <= int(text) < MOST_INT


def is_real(text: str) -> bool:
    """Whether text is a finite number."""
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def number_or(*words: str, lowest: int = 0) -> Range:
    """A whole number from `lowest` on, as text, or one of the words."""
    return Range(
        lambda value: value in words or is_whole(value, lowest),
        f"{', '.join(words)} or a number of at least {lowest} and below 2^31",
    )


def pair(holds: Callable[[str], bool], text: str) -> Range:
    """A client's number and a value of it, as text "client:value"."""

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

    A tuple is a comma-separated list of values of one `kind`. choices: the names that it takes, if
    they are few. name: the flag's name, where it is not the field's. repeats: whether the flag is
    repeated, each time with another name=value.
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
    """What users call a flag."""
    return field.metadata["name"] or field.name


def shown(value: Any) -> str:
    """A value as a command line has it."""
    if isinstance(value, tuple | list):
        return ",".join(map(shown, value))
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def check(record: Any) -> None:
    """Raises UsageError unless each flag of a record is in its range."""
    for field in flags_of(record):
        value, allowed = getattr(record, field.name), field.metadata["allowed"]
        for item in value if isinstance(value, tuple) else (value,):
            if field.metadata["choices"]:
                check_known(name_of(field), item, field.metadata["choices"])
            if not allowed.holds(item):
                raise UsageError(f"--{name_of(field)}={item}: must be {allowed.text}")


def check_known(name: str, value: str, allowed: Collection[str]) -> None:
    """Raises UsageError, with the nearest names, unless `value` is one of `allowed`."""
    if value not in allowed:
        near = difflib.get_close_matches(value, allowed, 3, 0.4)
        hint = f"did you mean {' or '.join(near)}? All: " if near else "must be one of "
        raise UsageError(f"--{name}={value}: unknown; {hint}{', '.join(allowed)}")


def check_different(name: str, values: Collection[Any], *, may_be_empty: bool = False) -> None:
    """Raises UsageError unless the values are one or several different ones."""
    if (len(values) == 0 and not may_be_empty) or len(set(values)) < len(values):
        text = ",".join(map(str, values))
        raise UsageError(f"--{name}={text}: must be one or several different values")


def in_flags(error: Exception, where: str, names: Mapping[str, str]) -> UsageError:
    """What the library says of its arguments, said of the flags that set them.

    where: the flag of what was called. names: of the arguments -> of their flags.
    """

    def of_flag(match: re.Match[str]) -> str:
        value = (match["value"] or "").strip("'")
        if value.startswith(("(", "[")):
            value = value[1:-1].replace(", ", ",").rstrip(",")
        if value == "None":
            value = "none"
        return f"--{names[match['name']]}={value}"

    value = r"None|'[^']*'|\[[^\]]*\]|\([^)]*\)"
    pattern = rf"(?<![\w.=/-])(?P<name>{'|'.join(names)})(?:\[\d+\])?=(?P<value>{value})?"
    text = re.sub(pattern, of_flag, str(error)) if names else str(error)
    if text.startswith("--"):
        return UsageError(text if where in text else f"{text}, with {where}")
    return UsageError(f"{where}: {text}")


def check_place(name: str, path: Path, *, is_folder: bool = False) -> None:
    """Raises UsageError where a file, or files in a folder, cannot be written; nothing is left.

    name: of the flag that tells it.
    """
    where = f"--{name}={path}"
    try:
        if path.exists() and path.is_dir() != is_folder:
            is_now, needed = ("a file", "a folder") if is_folder else ("a folder", "a file")
            raise UsageError(f"{where}: is {is_now}, must be {needed}")
        folder = (path if is_folder else path.parent).absolute()
        there = next(each for each in (folder, *folder.parents) if each.exists())
        tempfile.TemporaryFile(dir=there).close()
    except OSError as error:
        raise UsageError(f"{where}: cannot be written ({error.strerror}); choose another") from None


def check_picture(name: str, text: str) -> Path:
    """The path of a picture; raises UsageError where it can be none."""
    path = Path(text)
    if path.suffix != ".png":
        raise UsageError(f"--{name}={text}: must end in .png")
    check_place(name, path)
    return path
