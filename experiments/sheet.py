"""Sheets of values: frozen dataclasses whose fields define absl's flags.

A sheet is a dataclass of groups, and each group a dataclass whose fields `flag` makes. The name of
a field is that of its flag, so the values of a sheet are also a flat dict.

This file imports no package that takes seconds to import, so that --help takes none.
"""

import dataclasses
import functools
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar, cast

from absl import flags

# A flag belongs to the module that calls `define`, not to this one.
flags.disclaim_key_flags()
T = TypeVar("T")
_SMALLEST = 1e-38
_LARGEST = 1e38  # between which float32 distinguishes numbers from 0 and infinity


@dataclasses.dataclass(frozen=True)
class _Flag:
    """What a field says about its flag besides name, type and default."""

    help: str
    least: float | None
    most: float | None
    choices: Sequence[str]
    words: Sequence[str]  # besides whole numbers
    repeated: bool
    differ: bool
    must: tuple[str, Callable[[Any], bool]] | None


def flag(
    default: T,
    text: str,
    *,
    least: float | None = None,
    most: float | None = None,
    above: float | None = None,
    below: float | None = None,
    choices: Sequence[str] = (),
    words: Sequence[str] = (),
    repeated: bool = False,
    differ: bool = False,
    must: tuple[str, Callable[[Any], bool]] | None = None,
) -> T:
    """A field with a flag of its name; an annotation `Literal` lists the texts that it takes.

    text: of --help.
    least, most, above, below: the bounds of the number, or of each number of a tuple. Above and
        below exclude their number: the next one that is allowed differs by 1e-6, from 0 by 1e-38.
    choices: the texts that a tuple may have.
    words: what a text may be besides a whole number of at least `least`.
    repeated: whether each flag adds an entry name=value to a tuple, in place of commas.
    differ: whether the values of a tuple must differ.
    must: (what a value must be, whether it is).
    """
    if above is not None:
        least = above + (_SMALLEST if above == 0 else 1e-6)
    if below is not None:
        most = below - 1e-6
    about = _Flag(text, least, most, choices, words, repeated, differ, must)
    field: Any = dataclasses.field(default=default, metadata={"flag": about})
    return cast(T, field)


def allowed(parser: flags.ArgumentParser[Any]) -> str:
    """What a parser takes, in words."""
    if isinstance(parser, flags.BooleanParser):
        return "true or false"
    if texts := getattr(parser, "enum_values", ()):
        return f"one of {', '.join(texts)}"
    text = parser.syntactic_help.replace(f"[{_SMALLEST},", "(0,")
    text = text.replace(f"number >= {_SMALLEST}", "a positive number")
    return re.sub(r"^(number|integer) >=", r"\1 of at least", text) or "a text"


class _List(flags.ArgumentParser[Any]):
    """A comma-separated list of values, a tuple."""

    def __init__(self, item: flags.ArgumentParser[Any]) -> None:
        self._item = item
        self.syntactic_help = f"a comma-separated list, each {allowed(item)}"

    def parse(self, argument: Any) -> Any:
        items = argument.split(",") if isinstance(argument, str) else argument
        return tuple(self._item.parse(item) for item in items if item != "" or len(items) > 1)

    def flag_type(self) -> str:
        return f"comma-separated {self._item.flag_type()}s"


class _Commas(flags.ArgumentSerializer[Any]):
    def serialize(self, value: Any) -> str:
        return ",".join(map(str, value))


def define_list(
    name: str,
    default: Sequence[Any],
    text: str,
    item: flags.ArgumentParser[Any] | None = None,
    *,
    differ: bool = False,
    values: flags.FlagValues = flags.FLAGS,
) -> None:
    """Defines a flag whose value is a tuple. differ: whether its values must differ."""
    parser = _List(item or flags.ArgumentParser())
    flags.DEFINE(parser, name, tuple(default), text, flag_values=values, serializer=_Commas())
    if differ:
        _must(values, name, "different values", lambda items: len({*items}) == len(items))


@functools.cache
def groups(sheet: Any) -> Mapping[str, type]:
    """The types of a sheet's groups, by their names."""
    return typing.get_type_hints(sheet)


@functools.cache
def names(*group_types: Any) -> tuple[str, ...]:
    """The names of the flags of some groups, in order."""
    return tuple(f.name for group in group_types for f in dataclasses.fields(group))


def define(sheet: type, values: flags.FlagValues = flags.FLAGS) -> None:
    """Defines the flags of a sheet."""
    for group in groups(sheet).values():
        hints = typing.get_type_hints(group)
        for field in dataclasses.fields(group):
            about: _Flag = field.metadata["flag"]
            _define(field.name, hints[field.name], field.default, about, values)


def _define(name: str, kind: Any, default: Any, about: _Flag, values: flags.FlagValues) -> None:
    if kind is bool:
        flags.DEFINE_bool(name, default, about.help, flag_values=values)
    elif about.repeated:
        flags.DEFINE_multi_string(name, default, about.help, flag_values=values)
        _must(values, name, "name=value", lambda entries: all("=" in e or not e for e in entries))
    elif typing.get_origin(kind) is tuple:
        item = _parser(typing.get_args(kind)[0], about)
        define_list(name, default, about.help, item, differ=about.differ, values=values)
    else:
        parser = _parser(kind, about)
        serializer: flags.ArgumentSerializer[Any] = flags.ArgumentSerializer()
        flags.DEFINE(parser, name, default, about.help, flag_values=values, serializer=serializer)
    if about.words:
        must_be_number_or(name, *about.words, lowest=int(about.least or 0), values=values)
    if about.must:
        _must(values, name, *about.must)
    _must(values, name, "a number that float32 or int32 holds", _fits)


def _parser(kind: Any, about: _Flag) -> flags.ArgumentParser[Any]:
    """The parser of a value, or of each value of a tuple."""
    if choices := _choices(kind) or about.choices:
        return flags.EnumParser([*choices])
    if kind is int:
        least = None if about.least is None else int(about.least)
        return flags.IntegerParser(lower_bound=least)
    if kind is float:
        return flags.FloatParser(lower_bound=about.least, upper_bound=about.most)
    return flags.ArgumentParser()


def _choices(kind: Any) -> tuple[str, ...]:
    """The texts of an annotation `Literal`; () for another one."""
    return typing.get_args(kind) if typing.get_origin(kind) is Literal else ()


def _must(values: flags.FlagValues, name: str, text: str, holds: Callable[[Any], bool]) -> None:
    flags.register_validator(name, holds, f"must be {text}", flag_values=values)


def must_be_number_or(
    name: str, *words: str, lowest: int = 0, values: flags.FlagValues = flags.FLAGS
) -> None:
    """Requires one of the words or a whole number of at least `lowest`."""

    def holds(text: str) -> bool:
        return text in words or (text.isdecimal() and lowest <= int(text) < 2**31)

    _must(values, name, f"{', '.join(words)} or a whole number of at least {lowest}", holds)


def _fits(value: Any) -> bool:
    """Whether the numbers are 0, or neither 0 nor infinite in float32, and below 2^31 in int32."""
    numbers = [number for number in (value if isinstance(value, tuple) else [value]) if number]
    reals = [abs(number) for number in numbers if isinstance(number, float)]
    wholes = [abs(number) for number in numbers if isinstance(number, int)]
    fits = all(_SMALLEST <= real <= _LARGEST for real in reals)
    return fits and max(wholes, default=0) < 2**31


def filled(sheet: Callable[..., T], flat: Mapping[str, Any]) -> T:
    """The sheet with these values, by the names of their flags; all must be there."""
    return sheet(
        **{
            name: group(**{flag: flat[flag] for flag in names(group)})
            for name, group in groups(sheet).items()
        }
    )


def flat(sheet: Any) -> dict[str, Any]:
    """The values of a sheet by the names of their flags."""
    return {
        flag: getattr(getattr(sheet, name), flag)
        for name, group in groups(sheet.__class__).items()
        for flag in names(group)
    }
