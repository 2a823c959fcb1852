"""The command line of binaries that take all flags of an experiment, with presets and help."""

import functools
import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import docstring_parser
from absl import flags
from tabulate import tabulate

from fedjax_inv.algorithms import LISTED
from fedjax_inv.checks import UsageError

from ..experiment import config
from ..experiment.config import FLAGS, GROUPS, Config
from ..flags import command, names
from ..flags.command import Binary
from ..flags.flag import check as check_ranges
from ..flags.flag import check_known, flag_error, flags_of, name_of, shown
from ..flags.standins import asks_for_help
from ..parts import environments, machine

PRESETS = Path(__file__).parents[1] / "presets"
PAPERS = ("cafe", "fedcfa", "fedipg", "first_look", "fl_games")  # files of studies/ with a table

# The flags that are set outside of presets, by their fields' names.
Given = frozenset[str]

_FIELDS = {name_of(field): name for name, field in FLAGS.items()}

# The flags that can be repeated, each time with another setting name=value.
_SETTINGS = [name for name, field in _FIELDS.items() if FLAGS[field].metadata["repeats"]]


def binary(
    run: Callable[..., str], about: str | None, record: type[Any] | None = None, **defaults: Any
) -> Binary:
    """A binary that takes all flags of an experiment.

    run: returns the text to print, from a config, or with a record from a config and its options.
    about: the first paragraphs of --help, the docstring of the binary's file.
    record: the class of the binary's own flags, if it has any.
    defaults: defaults of experiment flags that differ from the usual ones, by field name.
    """
    own = flags_of(record) if record else []

    def define_all(values: flags.FlagValues) -> None:
        define(values, **defaults)
        command.define(own, values)

    def read_all(argv: Sequence[str], values: flags.FlagValues) -> tuple[Any, ...]:
        given = parse(argv, values)
        chosen = read(values, given)
        if record is None:
            return (chosen,)
        options = record(**{field.name: command.value_of(field, values) for field in own})
        check_ranges(options)
        return chosen, options

    def start(arguments: tuple[Any, ...]) -> str:
        machine.prepare(arguments[0])
        return run(*arguments)

    return Binary(
        start, define_all, read_all, lambda argv, values: answer(argv, about or "", values)
    )


def define(values: flags.FlagValues = flags.FLAGS, **defaults: Any) -> None:
    """Defines the flags of an experiment. defaults: defaults to change, by field name."""
    command.define(FLAGS.values(), values, **defaults)


def parse(
    argv: Sequence[str], values: flags.FlagValues = flags.FLAGS, base: Sequence[str] = ()
) -> Given:
    """Sets flags from a command line, expanding presets; returns the flags set outside of presets.

    argv: the program, and then flags.
    base: flags that come before those of argv; argv may replace them like a preset's.

    Raises UsageError for a bad flag, for a flag before a preset that sets it, too, and for a
    setting that occurs twice outside of presets.
    """
    _check_order(argv[1:])
    # A binary may lack some of these flags.
    merged: dict[str, dict[str, _Setting]] = {flag: {} for flag in _SETTINGS if flag in values}
    parts = [(words, True) for words, _ in _with_presets(base)] + [*_with_presets(argv[1:])]
    for words, is_preset in parts:
        before = {flag: len(_entries(values, flag)) for flag in merged}
        command.parse([argv[0], *words], values)
        for flag, count in before.items():
            for entry in _entries(values, flag)[count:]:
                _merge(flag, merged[flag], _Setting(entry, is_preset))
    for flag, settings in merged.items():
        values[flag].value = [setting.entry for setting in settings.values()]
    return frozenset(_FIELDS[name] for name in flags_in(argv[1:]) if name in _FIELDS)


def flags_in(words: Sequence[str]) -> dict[str, str]:
    """The words of a command line that are flags, by the flags' names."""
    found = {}
    for word in words:
        if word.startswith("-"):
            name = word.lstrip("-").partition("=")[0]
            found[name if name in _FIELDS else name.removeprefix("no")] = word
    return found


def _check_order(words: Sequence[str]) -> None:
    """Raises UsageError for a flag before a preset that would take its effect away."""
    typed: dict[str, str] = {}
    for part, is_preset in _with_presets(words):
        if not is_preset:
            typed |= flags_in(part)
            continue
        file = Path(part[0].partition("=")[2])
        for name in flags_in(file.read_text().splitlines()):
            if name in typed and name not in _SETTINGS:  # which are merged by their names
                text = f"must follow --preset={file.stem}, which sets it, too"
                raise UsageError(typed[name], ..., text)


def _entries(values: flags.FlagValues, flag: str) -> list[str]:
    return values[flag].value or []


class _Setting(NamedTuple):
    """A value of --set, --optimizer_set or --server_optimizer_set."""

    entry: str  # name=value; "name=" removes the setting, and "" removes all settings
    is_preset: bool

    @property
    def is_value(self) -> bool:
        _, equals, value = self.entry.partition("=")
        return bool(value or (self.entry and not equals))


def _merge(flag: str, settings: dict[str, _Setting], new: _Setting) -> None:
    """Adds a setting to the earlier ones, by name.

    An entry that removes a setting is stored, too, because flags of `base` may be merged before it.
    """
    name = new.entry.partition("=")[0]
    old = settings.get(name)
    if not new.entry:
        settings.clear()
    elif old and old.is_value and new.is_value and not (old.is_preset or new.is_preset):
        text = f"stands beside --{flag}={old.entry}; must be given once"
        raise flag_error(flag, new.entry, text)
    settings[name] = new


def read(values: flags.FlagValues = flags.FLAGS, given: Given = frozenset()) -> Config:
    """The configuration of the parsed flags. given, errors: as in `config.of`."""
    typed = {name: command.value_of(field, values) for name, field in FLAGS.items()}
    for flag in _SETTINGS:
        entries = (_Setting(entry, True) for entry in typed[_FIELDS[flag]])
        typed[_FIELDS[flag]] = tuple(setting.entry for setting in entries if setting.is_value)
    return config.of(given=given, **typed)


def of_arguments(arguments: Sequence[str], base: Sequence[str] = (), **defaults: Any) -> Config:
    """The configuration of a command line without the program; raises UsageError for a bad one.

    base: flags that come before the arguments, which may replace them.
    """
    values = flags.FlagValues()
    define(values, **defaults)
    given = parse(["", *arguments], values, base)
    return read(values, given)


@functools.cache  # a study reads the flags of hundreds of rows
def presets() -> dict[str, str]:
    """The first line of each preset, its description, by name."""
    files = sorted(PRESETS.glob("*.flags"))
    return {path.stem: path.read_text().splitlines()[0].lstrip("# ") for path in files}


def _with_presets(words: Sequence[str]) -> Iterator[tuple[list[str], bool]]:
    """Parts of the words, in order, each with whether it is a preset's.

    A flag --preset=NAME,NAME becomes a part for each name, with its flag file; later ones win.
    """
    plain: list[str] = []
    rest = iter(words)
    for word in rest:
        flag, equals, value = word.lstrip("-").partition("=")
        if not (word.startswith("-") and flag == "preset"):
            plain.append(word)
            continue
        value = value if equals else next(rest, "")
        yield plain, False
        plain = []
        for name in value.split(","):
            check_known("preset", name, presets())
            yield [f"--flagfile={preset_file(name)}"], True
    yield plain, False


def preset_file(name: str) -> Path:
    """The flag file of a preset."""
    return PRESETS / f"{name}.flags"


def presets_in(words: Sequence[str]) -> list[str]:
    """The names of the presets in the words of a command line."""
    pairs = (word.lstrip("-").partition("=") for word in words if word.startswith("-"))
    return [name for flag, _, value in pairs if flag == "preset" for name in value.split(",")]


def answer(
    argv: Sequence[str],
    about: str,
    values: flags.FlagValues = flags.FLAGS,
    refused: Collection[str] = (),
) -> str | None:
    """The text for --help or --describe=ALGORITHM; None without either flag.

    about: the first paragraphs of --help. refused: the flags of `config` that the binary does not
    take; --help leaves them out. Raises UsageError for an unknown algorithm.
    """
    rest = iter(argv[1:])
    for word in rest:
        flag, equals, value = word.lstrip("-").partition("=")
        if word.startswith("-") and flag == "describe":
            return describe(value if equals else next(rest, ""))
    return _help_text(about, values, refused) if asks_for_help(argv) else None


def _help_text(about: str, values: flags.FlagValues, refused: Collection[str]) -> str:
    own = [name for name in values if name not in _FIELDS and _is_ours(values, name)]
    parts = [about.strip()]
    if own:
        lines = [_line(name, values[name].default, values[name].help) for name in sorted(own)]
        parts.append("\n".join(["THIS BINARY", *lines]))
    if set(_FIELDS) <= set(values):
        for group, record in GROUPS.items():
            head = f"{group.upper()}: {(record.__doc__ or '').splitlines()[0]}"
            taken = [field for field in config.fields(group) if name_of(field) not in refused]
            lines = [command.help_line(field, values) for field in taken]
            kinds = _environments() if group == "environment" else []
            parts.append("\n".join([head, *lines, *kinds]))
        lines = [command.entry(name, text) for name, text in presets().items()]
        parts.append("\n".join(["PRESETS: --preset=NAME,NAME; later flags win", *lines]))
        lines = [command.entry(name, _summary(names.factory(name))) for name in LISTED]
        parts.append("\n".join(["ALGORITHMS: --describe=NAME lists the settings", *lines]))
        listed = ", ".join(PAPERS)
        parts.append(f"TABLES OF PAPERS: fedjax-inv paper NAME, of {listed}")
    return "\n\n".join(parts)


def _environments() -> list[str]:
    """A line for each environment, with its flags."""
    lines = []
    for name, kind in environments.LISTED.items():
        own = [f"--{field.name}" for record in kind.records for field in flags_of(record)]
        flags_too = f": {', '.join(own)}" if own else ""
        lines.append(command.entry(f"  {name}", f"{kind.text}{flags_too}"))
    return lines


def _is_ours(values: flags.FlagValues, name: str) -> bool:
    """Whether a flag was defined by this package, and not by absl or another one."""
    module = values.find_module_defining_flag(name) or ""
    return not module.startswith("absl") and (
        "experiments" in module or module.endswith(".py") or module == "__main__"
    )


def _line(name: str, default: Any, text: str) -> str:
    return command.entry(f"--{name}={'' if default is None else shown(default)}", text)


def describe(algorithm: str) -> str:
    """An algorithm's settings, with defaults and meanings; raises UsageError for an unknown one."""
    names.check_factory("describe", algorithm, LISTED)
    factory = names.factory(algorithm)
    parameters, texts = inspect.signature(factory).parameters, meanings(factory)
    rows = [
        [f"--set={name}", _default(parameters[name]), texts.get(name, "")]
        for name, kinds in names.hyperparameters(algorithm).items()
        if set(kinds) - {type(None)}  # other arguments can be set in Python only
    ]
    if names.takes(factory, "server_optimizer"):
        text = "the server's optimizer, with --server_learning_rate and --server_momentum"
        rows.append(["--server_optimizer", "sgd", text])
    table = tabulate(
        rows,
        ["setting", "default", "meaning"],
        disable_numparse=True,
        maxcolwidths=[None, None, 60],
    )
    return f"{algorithm}: {_summary(factory)}\n\n{table if rows else 'It has no settings.'}"


def _default(setting: inspect.Parameter) -> str:
    has_none = setting.default is inspect.Parameter.empty
    return "must be set" if has_none else shown(setting.default)


def _summary(function: Callable[..., Any]) -> str:
    """The first line of a docstring, without the Return with which a factory's begins."""
    line = (inspect.getdoc(function) or "").partition("\n")[0].removeprefix("Return ")
    return line[:1].upper() + line[1:]


def meanings(function: Callable[..., Any]) -> dict[str, str]:
    """The meaning of each argument, from a Google-style docstring, in one line."""
    parsed = docstring_parser.google.parse(inspect.getdoc(function) or "")
    return {
        argument: " ".join((param.description or "").split()).rstrip(".")
        for param in parsed.params
        for argument in param.arg_name.split(", ")
    }
