"""What a flag is: a field of a record, with its default, its meaning and what it may be."""

import dataclasses
import difflib
import math
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from fedjax_inv.checks import UsageError


class Range(NamedTuple):
    """The values that a flag takes, each of them where it takes several."""

    holds: Callable[[Any], bool]
    text: str


ANY = Range(lambda value: True, "")
POSITIVE = Range(lambda value: 0 < value < math.inf, "above 0")
PROBABILITY = Range(lambda value: 0 <= value <= 1, "between 0 and 1")
FRACTION = Range(lambda value: 0 <= value < 1, "at least 0 and below 1")
INSIDE = Range(lambda value: 0 < value < 1, "above 0 and below 1")
SEED = Range(lambda value: 0 <= value < 2**31, "at least 0 and below 2^31")


def at_least(lowest: int) -> Range:
    """Numbers from `lowest` on."""
    return Range(lambda value: value >= lowest, f"at least {lowest}")


def number_or(*words: str, lowest: int = 0) -> Range:
    """A whole number from `lowest` on, as text, or one of the words."""
    return Range(
        lambda value: value in words or (value.isdecimal() and lowest <= int(value) < 2**31),
        f"{', '.join(words)} or a number of at least {lowest}",
    )


def pair(holds: Callable[[str], bool], text: str) -> Range:
    """A client's number and a value of it, as text "client:value"."""

    def both_hold(entry: str) -> bool:
        client, colon, value = entry.partition(":")
        return client.isdecimal() and bool(colon) and holds(value)

    return Range(both_hold, f"client:value, a client's number and {text}")


def flag(
    default: Any,
    text: str,
    allowed: Range = ANY,
    *,
    choices: Collection[str] = (),
    kind: type | None = None,
    name: str = "",
) -> Any:
    """A field that is a flag.

    A tuple is a comma-separated list of values of one `kind`. choices: the names that it takes, if
    they are few. name: what users call it, where that is not the field's name.
    """
    if kind is None:
        kind = type(default[0] if isinstance(default, tuple) else default)
    metadata = {"help": text, "allowed": allowed, "choices": list(choices), "kind": kind}
    return dataclasses.field(default=default, metadata={**metadata, "name": name})


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
