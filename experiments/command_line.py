"""Command lines: flags, presets, and the configuration that they ask for.

This file imports no package that takes seconds to import, so that --help takes none.
"""

import difflib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags

from . import config, sheet, start
from .config import ALGORITHMS, NAMES, SOURCES, Config

FLAGS = flags.FLAGS
PRESETS = Path(__file__).parent / "presets"
_HELP = ("--help", "-help", "-h", "-?", "--helpshort", "--helpfull")

sheet.define(Config)

# Flags that some commands take; each of these commands declares its own.
_OF_SOME = ("study", "rows", "data", "out")
OF_TRAINING = (*NAMES, "preset")

flags.DEFINE_string("study", "", "Of a paper or the map: what to compare; default: the first.")
sheet.define_list(
    "rows",
    [],
    "Which rows of the study, by their labels; of the map methods by name, "
    "all, or package.module:factory, beside FedAvg; all if none.",
    differ=True,
)
sheet.define_list(
    "data", [], "Data sets, each with a table; default: one of the study.", differ=True
)
flags.DEFINE_string(
    "preset",
    "",
    "--preset=NAME,NAME is --flagfile=presets/NAME.flags of each; later flags win. "
    + ", ".join(sorted(path.stem for path in PRESETS.glob("*.flags")))
    + ".",
)
flags.DEFINE_string(
    "out",
    "",
    "The picture, a .png file; a .pdf goes beside it. Default: data.png; of evaluate a file of the "
    "run's folder. Of features their file, a new .npz, or a new folder.",
)


def chosen() -> Config:
    """The configuration of this process's command line.

    Raises UsageError if flags contradict each other: only after presets, as a row of a study adds
    its own to those of the command line.
    """
    return config.read(FLAGS)


def of_arguments(arguments: Sequence[str]) -> Config:
    """The configuration of a command line without the program; raises UsageError for a bad one."""
    values = config.default_flags()
    try:
        _read(values, ["", *arguments])
    except flags.Error as error:
        raise config.usage_error(error) from None
    return config.read(values)


def given(values: flags.FlagValues = FLAGS) -> list[str]:
    """The flags of an experiment that a command line or a preset sets, as on a command line."""
    texts = [values[name].serialize() for name in NAMES if values[name].present]
    return [line for text in texts for line in text.splitlines()]


def parse(argv: Sequence[str], words: int = 0, command: str = "__main__") -> list[str]:
    """Reads this process's command line, for `app.run`: a bad one ends it with status 2.

    words: how many words that are no flags the command takes. command: its module.
    """
    start.keep_printing()
    module = sys.modules[command]
    taken = {flag.name: flag for flag in FLAGS.get_key_flags_for_module(module)}
    if {*_HELP} & {*argv[1:]}:
        print(_help(str(module.__doc__), taken))
        sys.exit(0)
    try:
        read = _read(FLAGS, argv)
        if len(read) > 1 + words:
            raise flags.Error(f"{read[1 + words]}: not a flag; flags are --name=value")
        for name in (*NAMES, *_OF_SOME):
            if FLAGS[name].present and name not in taken:
                raise flags.Error(f"{FLAGS[name].serialize()}: is no flag of this command")
    except flags.Error as error:
        print(f"error: {str(error).replace(chr(10), '; ')}", file=sys.stderr)
        sys.exit(2)
    return read


def _help(about: str, taken: Mapping[str, flags.Flag[Any]]) -> str:
    """What the command does, and the flags that it takes, those of an experiment by groups."""
    own = dict(taken)
    sections = []
    for group in sheet.groups(Config).values():
        mine = [own.pop(name) for name in sheet.names(group) if name in own]
        if mine:
            sections.append((str(group.__doc__), mine))
    lines = [about]
    for heading, mine in [("This command alone.", [*own.values()]), *sections]:
        lines += [f"{heading}\n", *map(_described, mine), ""]
    return "\n".join(lines)


def _described(flag: flags.Flag[Any]) -> str:
    """The lines of a flag: its values, what it is for, and its default."""
    name = f"--[no]{flag.name}" if flag.boolean else f"--{flag.name}"
    default = "" if flag.default in (None, "", [], ()) else f" Default: {flag.default_as_str}."
    shown = f"{name}: {flag.help}{default}"
    if flag.flag_type() != "string" and not flag.boolean:
        shown += f" ({sheet.allowed(flag.parser)})"
    return flags.text_wrap(shown, indent="      ", firstline_indent="  ")


def _read(values: flags.FlagValues, argv: Sequence[str]) -> list[str]:
    try:
        return values([argv[0], *_with_presets(argv[1:])])
    except flags.UnrecognizedFlagError as error:
        raise flags.Error(f"{error}{_meant(error.flagname)}") from None
    except flags.IllegalFlagValueError as error:
        raise flags.Error(_in_words(error, values)) from None
    except UnicodeDecodeError as error:
        raise flags.Error(f"--flagfile: {error}") from None
    except ValueError as error:  # a value for --noNAME
        raise flags.Error(str(error)) from None


def _in_words(error: flags.Error, values: flags.FlagValues) -> str:
    """The error of a flag's value, with what it must be: absl tells that of Python's types."""
    parts = re.match("flag --([^=]+)=(.*?): (.*)", str(error), re.DOTALL)
    if parts is None:
        return str(error)
    name, value, reason = parts.groups()
    if not reason.startswith(("must be", "unknown")):
        reason = f"must be {sheet.allowed(values[name].parser)}"
    elif name != "preset":  # of a validator
        value = config.shown(values[name].value)
    return f"flag --{name}={value}: {reason}"


def _meant(name: str) -> str:
    """The flag of a name that is none: by the initials of a flag, or as an algorithm's setting."""
    near = [flag for flag in NAMES if name == "".join(word[0] for word in flag.split("_"))]
    argument = re.compile(rf"^    {re.escape(name)}: ", re.MULTILINE)
    if any(argument.search((SOURCES / f"{file}.py").read_text()) for file in ALGORITHMS):
        near = [f"set={name}"]
    return f". Did you mean --{near[0]}=...?" if near else ""


def _with_presets(words: Sequence[str]) -> Iterator[str]:
    """The words, with --flagfile in place of --preset."""
    rest = iter(words)
    for word in rest:
        name, equals, value = word.partition("=")
        if name.lstrip("-") != "preset" or not name.startswith("-"):
            yield word
            continue
        for preset in (value if equals else next(rest, "")).split(","):
            yield f"--flagfile={preset_file(preset)}"


def preset_file(name: str) -> Path:
    """The flag file of a preset; raises flags.Error if there is none."""
    path = PRESETS / f"{name}.flags"
    if not path.is_file():
        names = sorted(path.stem for path in PRESETS.glob("*.flags"))
        near = difflib.get_close_matches(name, names) or names
        raise flags.IllegalFlagValueError(f"flag --preset={name}: unknown; is it {near[0]}?")
    return path
