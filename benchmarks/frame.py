"""The parts that benchmarks share: timing, tables, flags and the start."""

import argparse
import dataclasses
import os
import statistics
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import jax
from tabulate import tabulate

from experiments import start

Row = dict[str, Any]  # heading -> value

median = statistics.median

# Before JAX starts: what a benchmark calls needs memory of the device, too.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
jax.config.update("jax_enable_compilation_cache", False)  # compiling is measured, too


def table(rows: Sequence[Row]) -> str:
    """The rows in Markdown."""
    return tabulate(rows, "keys", tablefmt="github", floatfmt=".3g")


def line(error: Exception) -> str:
    """The beginning of an error."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"


def flag(default: Any, text: str, choices: Iterable[str] = ()) -> Any:
    """A field that is a flag: a text, a number, False, or a list of texts."""
    return dataclasses.field(default=default, metadata={"help": text, "choices": [*choices]})


def options(record: type[Any], about: str | None) -> Any:
    """The record of a benchmark's flags, from its command line. about: the head of --help."""
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for field in dataclasses.fields(record):
        default: Any = field.default
        read = partial(_read, default, field.metadata["choices"])
        how: Any = {"type": read, "default": default}
        if default is False:
            how = {"action": "store_true"}
        text = f"{field.metadata['help']} Default: {default}."
        parser.add_argument(f"--{field.name}", help=text, **how)
    return record(**vars(parser.parse_args()))


def _read(default: Any, choices: Sequence[str], text: str) -> Any:
    """The value of a flag, of its default's type."""
    values = text.split(",") if isinstance(default, tuple) else [text]
    if choices and not {*values} <= {*choices}:
        raise argparse.ArgumentTypeError(f"must be of {', '.join(choices)}")
    return type(default)(values if isinstance(default, tuple) else text)


def main(rows: Callable[[Any], Iterable[Row]], record: type[Any], about: str | None) -> None:
    """Starts a benchmark, and prints its table, also of what is there when it fails."""
    chosen, found = options(record, about), list[Row]()
    with start.in_one_line():
        try:
            found.extend(rows(chosen))
        finally:
            print(f"JAX {jax.__version__}\n\n{table(found)}")
