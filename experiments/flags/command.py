"""The way in which every binary and benchmark declares its flags, reads them and starts.

A binary's file has a frozen dataclass whose fields are flags (`flag.flag`), a function that does
the work, and a `Binary` that combines the two:

    @dataclasses.dataclass(frozen=True)
    class Options:
        run: str = flag("", "The folder of a finished run.")

    def evaluate(options: Options) -> str: ...

    BINARY = command.of(evaluate, Options, __doc__)

    if __name__ == "__main__":
        command.main(BINARY)

For binaries that also take the flags of an experiment, see `experiment.command_line.binary`.
"""

import difflib
import gc
import os
import re
import sys
import textwrap
import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import Field
from typing import Any, NamedTuple

import jax
from absl import app, flags, logging

from fedjax_inv.checks import UsageError

from ..flags import errors
from ..flags.flag import check, flag_error, flags_of, name_of, shown, value_in
from ..flags.standins import asks_for_help

_LOST = re.compile("Gloo|NCCL|heartbeat")  # in JAX's errors when another process has gone
_SECONDS = 15  # for the other processes to end as well


class Binary(NamedTuple):
    """A program that starts from a command line."""

    run: Callable[[Any], str]  # options -> the text to print
    define: Callable[[flags.FlagValues], None]
    # (argv, values) -> the options; raises UsageError for a bad command line
    read: Callable[[Sequence[str], flags.FlagValues], Any]
    # (argv, values) -> the text that --help or --describe asks for, None without either
    answer: Callable[[Sequence[str], flags.FlagValues], str | None]


def of(run: Callable[[Any], str], record: type[Any], about: str | None) -> Binary:
    """The binary that calls `run` with a record of flags.

    about: the first paragraphs of --help, the docstring of the binary's file.
    """
    fields = flags_of(record)

    def read(argv: Sequence[str], values: flags.FlagValues) -> Any:
        parse(argv, values)
        options = record(**{field.name: value_of(field, values) for field in fields})
        check(options)
        return options

    def answer(argv: Sequence[str], values: flags.FlagValues) -> str | None:
        if not asks_for_help(argv):
            return None
        lines = [help_line(field, values) for field in sorted(fields, key=name_of)]
        return "\n\n".join([(about or "").strip(), "\n".join(["FLAGS", *lines])])

    return Binary(run, lambda values: define(fields, values), read, answer)


def main(binary: Binary) -> None:
    """Runs a binary on this process's command line: prints its text, and errors in one line."""
    # Compiled programs are stored on the disk, so that a second start does not compile again.
    cache = os.environ.get("JAX_COMPILATION_CACHE_DIR", "~/.cache/fedjax_inv")
    jax.config.update("jax_compilation_cache_dir", os.path.expanduser(cache))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    # Tracing makes many objects that stay. With Python's default of 700, a first look spends 3 of
    # its 70 seconds of processor time looking through them for cycles.
    gc.set_threshold(50_000)
    warnings.showwarning = errors.show_warning
    binary.define(flags.FLAGS)
    options: list[Any] = []

    def run(argv: list[str]) -> None:
        del argv
        # Orbax logs every file and every failure; we report failures ourselves.
        logging.set_verbosity(logging.FATAL)
        try:
            with errors.in_one_line():
                print(errors.printable(_run(binary, options[0])))
        except SystemExit as ended:
            if isinstance(ended.code, int):
                if jax.distributed.is_initialized() and ended.code != errors.LOST:
                    _await_others()
                # Orbax's threads wait for minutes for a file that they cannot write, and others
                # for a program that nobody needs any more.
                sys.stdout.flush()
                os._exit(ended.code)
            raise

    def read(argv: list[str]) -> list[str]:
        # JAX_ENABLE_X64 would compute other numbers, which the run's flags would not tell.
        jax.config.update("jax_enable_x64", False)
        with errors.in_one_line():
            text = binary.answer(argv, flags.FLAGS)
            if text is not None:
                print(text)
                sys.exit(0)
            options.append(binary.read(argv, flags.FLAGS))
        return argv

    app.run(run, flags_parser=read)


def _run(binary: Binary, options: Any) -> str:
    """The text of a binary.

    Raises `errors.Lost` if another process has ended meanwhile, and UsageError if JAX_PLATFORMS
    names a platform without devices here, of which JAX tells only when a device is needed.
    """
    try:
        return binary.run(options)
    except (RuntimeError, AssertionError) as error:
        platforms = jax.config.values["jax_platforms"]
        if platforms and not _has_devices():
            allowed = "has no device here; unset it, or install JAX for that platform"
            raise UsageError("JAX_PLATFORMS", platforms, allowed) from None
        if jax.distributed.is_initialized() and _LOST.search(str(error)):
            text = "another process has ended, and says why; --resume continues the run"
            raise errors.Lost(text) from None
        raise


def _has_devices() -> bool:
    try:
        return bool(jax.devices())
    except (RuntimeError, AssertionError):  # the second from JAX's second search for devices
        return False


def _await_others() -> None:
    """Waits until the other processes end as well, for seconds: one that runs on would never."""
    ending = threading.Thread(target=jax.distributed.shutdown, daemon=True)
    ending.start()
    ending.join(_SECONDS)


def define(fields: Iterable[Field[Any]], values: flags.FlagValues, **defaults: Any) -> None:
    """Defines absl flags for the fields of records. defaults: other defaults, by field name."""
    for field in fields:
        default, kind = defaults.get(field.name, field.default), field.metadata["kind"]
        name, text = name_of(field), help_text(field)
        if field.metadata["repeats"]:
            flags.DEFINE_multi_string(name, [], text, values)
        elif isinstance(default, tuple):
            flags.DEFINE_list(name, list(map(shown, default)), text, values)
        elif kind is bool:
            flags.DEFINE_bool(name, default, text, values)
        elif kind in (int, float):
            parser: Any = _Number(kind)
            flags.DEFINE(parser, name, default, text, values, flags.ArgumentSerializer())
        else:
            flags.DEFINE_string(name, default, text, values)


class _Number(NamedTuple):
    """A parser of numbers for absl, whose own also takes other digits, underscores and 0x10."""

    kind: type[int] | type[float]
    syntactic_help: str = ""

    def parse(self, argument: Any) -> Any:
        """The number; a default is one already."""
        return value_in(argument, self.kind) if isinstance(argument, str) else argument

    def flag_type(self) -> str:
        """The name of the type."""
        return self.kind.__name__


def parse(argv: Sequence[str], values: flags.FlagValues) -> None:
    """Sets flags from a command line; raises UsageError for a bad one."""
    try:
        _, *others = values(list(argv))
    except (flags.Error, ValueError) as error:
        raise _refused(error, values) from None
    if others:
        raise UsageError(others[0], ..., "not a flag; flags are --name=value")


_KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false"}


def _refused(error: Exception, values: flags.FlagValues) -> UsageError:
    """The error for a command line that absl refuses."""
    if isinstance(error, flags.UnrecognizedFlagError):
        near = difflib.get_close_matches(error.flagname, values, 3, 0.6)
        hint = f"did you mean {' or '.join(f'--{name}' for name in near)}? " if near else ""
        return UsageError(f"--{error.flagname}", ..., f"unknown; {hint}--help lists all flags")
    if isinstance(error, flags.IllegalFlagValueError):
        entry = str(error).removeprefix("flag ").removesuffix(f": {error.__context__}")
        name = entry.removeprefix("--").partition("=")[0]
        kind = values[name].flag_type() if name in values else ""
        return UsageError(entry, ..., f"must be {_KINDS.get(kind, 'another value')}")
    text, missing, unread = str(error), "Missing value for flag ", "Unable to open flagfile: "
    if text.startswith(missing):
        return UsageError(text.removeprefix(missing), ..., "must have a value")
    if unread in text:
        return UsageError("--flagfile", ..., f"cannot be read: {text.partition(unread)[2]}")
    return UsageError(text)


def value_of(field: Field[Any], values: flags.FlagValues) -> Any:
    """The parsed value of a field's flag, in the field's type."""
    value = values[name_of(field)].value
    if not isinstance(value, list):
        return value
    kind = field.metadata["kind"]
    try:
        return tuple(value_in(text, kind) for text in value)
    except ValueError:
        numbers = "whole numbers" if kind is int else "numbers"
        raise flag_error(name_of(field), value, f"must be {numbers}") from None


def help_text(field: Field[Any]) -> str:
    """A flag's meaning, with its choices."""
    choices = field.metadata["choices"]
    return field.metadata["help"] + (f" One of: {', '.join(choices)}." if choices else "")


def help_line(field: Field[Any], values: flags.FlagValues) -> str:
    """A flag with its default and its meaning."""
    default = values[name_of(field)].default
    return entry(
        f"--{name_of(field)}={'' if default is None else shown(default)}", help_text(field)
    )


def entry(name: str, text: str) -> str:
    """A name, with a text of several lines beside it or below it."""
    if len(name) > 28:
        return f"  {name}\n" + textwrap.indent(textwrap.fill(text, 68), " " * 32)
    lines = textwrap.wrap(text, 68) or [""]
    return "\n".join([f"  {name:<30}{lines[0]}", *(" " * 32 + line for line in lines[1:])])
