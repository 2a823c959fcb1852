"""The command line: flags defined and read, presets, and what --help and --describe tell."""

import difflib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from absl import flags
from tabulate import tabulate

from experiments import papers
from experiments.experiment import config, groups
from experiments.experiment.groups import Config
from experiments.flags import names as registry
from experiments.flags.flag import check_known, flags_of, name_of, shown
from experiments.parts import environments
from fedjax_inv.algorithms import LISTED
from fedjax_inv.checks import UsageError

PRESETS = Path(__file__).parent / "presets"

# Given flags, by their fields' names.
Given = frozenset[str]

_FIELDS = {name_of(field): name for name, field in groups.FLAGS.items()}

# Flags that are repeated, each time for another setting name=value.
_SETTINGS = ("set", "optimizer_set", "server_optimizer_set")


def define(values: flags.FlagValues = flags.FLAGS, **defaults: Any) -> None:
    """Defines the flags, with other defaults for some."""
    for name, field in groups.FLAGS.items():
        default, kind = defaults.get(name, field.default), field.metadata["kind"]
        flag, text = name_of(field), _help(field)
        if flag in _SETTINGS:
            flags.DEFINE_multi_string(flag, [], text, values)
        elif isinstance(default, tuple):
            flags.DEFINE_list(flag, list(map(shown, default)), text, values)
        elif kind is bool:
            flags.DEFINE_bool(flag, default, text, values)
        elif kind is int:
            flags.DEFINE_integer(flag, default, text, flag_values=values)
        elif kind is float:
            flags.DEFINE_float(flag, default, text, flag_values=values)
        else:
            flags.DEFINE_string(flag, default, text, values)


def _help(field: Any) -> str:
    choices = field.metadata["choices"]
    return field.metadata["help"] + (f" One of: {', '.join(choices)}." if choices else "")


def parse(
    argv: Sequence[str], values: flags.FlagValues = flags.FLAGS, base: Sequence[str] = ()
) -> Given:
    """Sets flags as a command line has them, after its first word, with presets expanded.

    base: flags before those, which may set again what they set, as if they were a preset's. Returns
    the flags that were given outside of presets. Raises UsageError, in one line, for what is no
    flag, and for a setting that is given twice outside of presets.
    """
    # Not every binary has them.
    merged: dict[str, dict[str, _Setting]] = {flag: {} for flag in _SETTINGS if flag in values}
    parts = [(words, True) for words, _ in _with_presets(base)] + [*_with_presets(argv[1:])]
    for words, is_preset in parts:
        before = {flag: len(_entries(values, flag)) for flag in merged}
        try:
            _, *others = values([argv[0], *words])
        except (flags.Error, ValueError) as error:
            raise UsageError(_told(error, values)) from None
        if others:
            raise UsageError(f"{others[0]}: not a flag; flags are --name=value")
        for flag, count in before.items():
            for entry in _entries(values, flag)[count:]:
                _merge(flag, merged[flag], _Setting(entry, is_preset))
    for flag, kept in merged.items():
        values[flag].value = [setting.entry for setting in kept.values()]
    words = [word for word in (*base, *argv[1:]) if word.startswith("-")]
    names = (word.lstrip("-").partition("=")[0] for word in words)
    names = (name.removeprefix("no") if name not in _FIELDS else name for name in names)
    return frozenset(_FIELDS[name] for name in names if name in _FIELDS)


def _entries(values: flags.FlagValues, flag: str) -> list[str]:
    return values[flag].value or []


class _Setting(NamedTuple):
    entry: str  # name=value; without a value it takes the name back, and without a name all
    is_preset: bool

    @property
    def is_value(self) -> bool:
        _, equals, value = self.entry.partition("=")
        return bool(value or (self.entry and not equals))


def _merge(flag: str, kept: dict[str, _Setting], new: _Setting) -> None:
    """Adds a setting to those before it, by their names. What is taken back stays known to be, as
    there may be others before all of them."""
    name = new.entry.partition("=")[0]
    old = kept.get(name)
    if not new.entry:
        kept.clear()
    elif old and old.is_value and new.is_value and not (old.is_preset or new.is_preset):
        raise UsageError(
            f"--{flag}={new.entry}: stands beside --{flag}={old.entry}; must be given once"
        )
    kept[name] = new


_KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false"}


def _told(error: Exception, values: flags.FlagValues) -> str:
    """What is told of a command line that absl does not take."""
    if isinstance(error, flags.UnrecognizedFlagError):
        near = difflib.get_close_matches(error.flagname, values, 3, 0.6)
        hint = f"did you mean {' or '.join(f'--{name}' for name in near)}? " if near else ""
        return f"--{error.flagname}: unknown; {hint}--help tells all flags"
    if isinstance(error, flags.IllegalFlagValueError):
        entry = str(error).removeprefix("flag ").removesuffix(f": {error.__context__}")
        name = entry.removeprefix("--").partition("=")[0]
        kind = values[name].flag_type() if name in values else ""
        return f"{entry}: must be {_KINDS.get(kind, 'another value')}"
    text = re.sub(r"^Missing value for flag (\S+)$", r"\1: must have a value", str(error))
    return text.replace("ERROR:: Unable to open flagfile: ", "--flagfile: cannot be read: ")


def read(
    values: flags.FlagValues = flags.FLAGS,
    given: Given = frozenset(),
    *,
    may_be_idle: bool = False,
) -> Config:
    """The parsed flags; raises UsageError, in one line, as `config.of` does."""
    parsed = values.flag_values_dict()
    told = {name: parsed[flag] for flag, name in _FIELDS.items()}
    for flag in _SETTINGS:
        entries = (_Setting(entry, True) for entry in parsed[flag])
        told[_FIELDS[flag]] = [setting.entry for setting in entries if setting.is_value]
    typed = {
        name: _items(name, value) if isinstance(value, list) else value
        for name, value in told.items()
    }
    return config.of(given=given, may_be_idle=may_be_idle, **typed)


def of_arguments(
    arguments: Sequence[str],
    base: Sequence[str] = (),
    *,
    may_be_idle: bool = False,
    **defaults: Any,
) -> Config:
    """The flags of a command line without its first word; raises UsageError, in one line.

    base: flags before those, which may set again what they set.
    """
    values = flags.FlagValues()
    define(values, **defaults)
    given = parse(["", *arguments], values, base)
    return read(values, given, may_be_idle=may_be_idle)


def _items(name: str, texts: list[str]) -> tuple[Any, ...]:
    kind = groups.FLAGS[name].metadata["kind"]
    try:
        return tuple(kind(text) for text in texts)
    except ValueError:
        what = "whole numbers" if kind is int else "numbers"
        raise UsageError(f"--{name}={','.join(texts)}: must be {what}") from None


def presets() -> dict[str, str]:
    """The presets, by name, and the first line of each, which tells what it is."""
    files = sorted(PRESETS.glob("*.flags"))
    return {path.stem: path.read_text().splitlines()[0].lstrip("# ") for path in files}


def _with_presets(words: Sequence[str]) -> Iterator[tuple[list[str], bool]]:
    """The words in order, --preset=NAME,NAME replaced by the flag files of those names; later ones
    win. In parts, each with whether it is a preset's."""
    plain: list[str] = []
    for word in words:
        flag, _, names = word.lstrip("-").partition("=")
        if not (word.startswith("-") and flag == "preset"):
            plain.append(word)
            continue
        yield plain, False
        plain = []
        for name in names.split(","):
            check_known("preset", name, presets())
            yield [f"--flagfile={PRESETS / name}.flags"], True
    yield plain, False


_ASK_FOR_HELP = {"help", "helpfull", "helpshort", "h", "?"}


def answer(argv: Sequence[str], about: str, values: flags.FlagValues = flags.FLAGS) -> str | None:
    """What --help or --describe=ALGORITHM asks for, None if there is neither.

    about: what the binary says of itself. Raises UsageError for an unknown algorithm.
    """
    for word in argv[1:]:
        flag, _, value = word.lstrip("-").partition("=")
        if word.startswith("-") and flag == "describe":
            return describe(value)
        if word.startswith("-") and flag in _ASK_FOR_HELP:
            return _help_text(about, values)
    return None


def _help_text(about: str, values: flags.FlagValues) -> str:
    own = [name for name in values if name not in _FIELDS and _is_ours(values, name)]
    parts = [about.strip()]
    if own:
        lines = [_line(name, values[name].default, values[name].help) for name in sorted(own)]
        parts.append("\n".join(["THIS BINARY", *lines]))
    if set(_FIELDS) <= set(values):
        for group in groups.GROUPS:
            head = f"{group.upper()}: {(groups.GROUPS[group].__doc__ or '').splitlines()[0]}"
            lines = [
                _line(name_of(field), values[name_of(field)].default, _help(field))
                for field in groups.fields(group)
            ]
            parts.append(
                "\n".join([head, *lines, *(_environments() if group == "environment" else ())])
            )
        lines = [_entry(name, text) for name, text in presets().items()]
        parts.append("\n".join(["PRESETS: --preset=NAME,NAME; later flags win", *lines]))
        lines = [_entry(name, _summary(registry.factory(name))) for name in LISTED]
        parts.append("\n".join(["ALGORITHMS: --describe=NAME tells the settings", *lines]))
        names = ", ".join(papers.LISTED)
        parts.append(f"TABLES OF PAPERS: python -m experiments.papers.NAME, of {names}")
    return "\n\n".join(parts)


def _environments() -> list[str]:
    """A line for each environment, with its flags."""
    lines = []
    for name, kind in environments.LISTED.items():
        own = [f"--{field.name}" for record in kind.records for field in flags_of(record)]
        flags_too = f": {', '.join(own)}" if own else ""
        lines.append(_entry(f"  {name}", f"{kind.text}{flags_too}"))
    return lines


def _is_ours(values: flags.FlagValues, name: str) -> bool:
    module = values.find_module_defining_flag(name) or ""
    return not module.startswith("absl") and (
        "experiments" in module or module.endswith(".py") or module == "__main__"
    )


def _line(name: str, default: Any, text: str) -> str:
    return _entry(f"--{name}={'' if default is None else shown(default)}", text)


def _entry(name: str, text: str) -> str:
    """A name, and what it is beside or below it."""
    if len(name) > 28:
        return f"  {name}\n" + textwrap.indent(textwrap.fill(text, 68), " " * 32)
    lines = textwrap.wrap(text, 68) or [""]
    return "\n".join([f"  {name:<30}{lines[0]}", *(" " * 32 + line for line in lines[1:])])


def describe(algorithm: str) -> str:
    """An algorithm's settings: names, defaults and meanings; raises UsageError for an unknown."""
    registry.check_factory("describe", algorithm, LISTED)
    factory = registry.factory(algorithm)
    parameters = inspect.signature(factory).parameters
    told = meanings(factory)
    rows = [
        [f"--set={name}", shown(parameters[name].default), told.get(name, "")]
        for name, kinds in registry.hyperparameters(algorithm).items()
        if set(kinds) - {type(None)}  # others can be set in Python only
    ]
    if registry.takes(factory, "server_optimizer"):
        text = "the server's optimizer, with --server_learning_rate and --server_momentum"
        rows.append(["--server_optimizer", "sgd", text])
    table = tabulate(
        rows,
        ["setting", "default", "meaning"],
        disable_numparse=True,
        maxcolwidths=[None, None, 60],
    )
    return f"{algorithm}: {_summary(factory)}\n\n{table if rows else 'It has no settings.'}"


def _summary(function: Callable[..., Any]) -> str:
    return (inspect.getdoc(function) or "").partition("\n")[0]


def meanings(factory: Callable[..., Any]) -> dict[str, str]:
    """What a factory's docstring says of its arguments, in sentences "name, name: meaning."."""
    words = " ".join((inspect.getdoc(factory) or "").split())
    names = "|".join(inspect.signature(factory).parameters)
    head = rf"(?:(?<=[.;] )|^)((?:(?:{names}), )*(?:{names})): "
    pieces = re.split(head, words)[1:]  # names, text, names, text, ...
    told = {}
    for heads, text in zip(pieces[::2], pieces[1::2], strict=True):
        for name in heads.split(", "):
            told[name] = re.split(r"(?<=\.) (?:Raises|Reports|Returns) ", text)[0].rstrip(" .;")
    return told
