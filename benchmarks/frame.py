"""The parts that benchmarks share: timing in turns, tables, and the start."""

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
from tabulate import tabulate

from experiments import start

median = statistics.median

_Key = TypeVar("_Key", bound=Hashable)
_Result = TypeVar("_Result")


def seconds(call: Callable[[], Any]) -> float:
    """The time that a call takes until its results are there."""
    began = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - began


def in_turns(
    calls: Mapping[_Key, Callable[[], _Result]], repeats: int, warmup: int = 1
) -> dict[_Key, list[_Result]]:
    """The results of `repeats` calls of each function, after `warmup` calls that compile.

    The functions take turns, so that a machine whose speed drifts is fair to all.
    """
    results: dict[_Key, list[_Result]] = {key: [] for key in calls}
    for turn in range(warmup + repeats):
        for key, call in calls.items():
            result = call()
            if turn >= warmup:
                results[key].append(result)
    return results


def timed_in_turns(
    calls: Mapping[_Key, Callable[[], Any]], repeats: int
) -> dict[_Key, list[float]]:
    """The seconds of the calls."""
    return in_turns({key: partial(seconds, call) for key, call in calls.items()}, repeats)


class Table(NamedTuple):
    """A table of a benchmark."""

    title: str
    rows: Sequence[Mapping[str, Any]]  # heading -> value
    floatfmt: str = ".3g"

    @property
    def text(self) -> str:
        """The rows in Markdown."""
        return tabulate(self.rows, "keys", tablefmt="github", floatfmt=self.floatfmt)


def flag(default: Any, text: str, *, choices: Iterable[str] = (), kind: type | None = None) -> Any:
    """A field that is a flag. kind: of the elements of a list, where the default has none."""
    about = {"help": text, "choices": [*choices] or None, "kind": kind}
    return dataclasses.field(default=default, metadata=about)


def options(record: type[Any], about: str | None, words: Sequence[str] | None = None) -> Any:
    """The record of a benchmark's flags, from its command line. about: the head of --help."""
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for field in dataclasses.fields(record):
        default: Any = field.default
        if isinstance(default, bool):
            parser.add_argument(f"--{field.name}", action="store_true", help=field.metadata["help"])
            continue
        choices = field.metadata["choices"]
        is_list = isinstance(default, tuple)
        first = (default or (None,))[0] if is_list else default
        kind = field.metadata["kind"] or type(first)
        read = partial(_listed, kind, choices) if is_list else kind
        text = f"{field.metadata['help']} Default: {default}."
        parser.add_argument(
            f"--{field.name}",
            default=default,
            help=text,
            type=read,
            choices=None if is_list else choices,
        )
    return record(**vars(parser.parse_args(words)))


def _listed(kind: type, choices: Sequence[str] | None, text: str) -> tuple[Any, ...]:
    values = tuple(map(kind, text.split(",")))
    if choices and not {*values} <= {*choices}:
        raise argparse.ArgumentTypeError(f"must be of {', '.join(choices)}")
    return values


def main(tables: Callable[[Any], Iterable[Table]], record: type[Any], about: str | None) -> None:
    """Starts a benchmark, which prints each table as soon as it is ready. record: its flags."""
    chosen = options(record, about)
    with start.in_one_line():
        jax.config.update("jax_enable_compilation_cache", False)  # compiling is measured, too
        for each in tables(chosen):
            print(f"\n{each.title}, JAX {jax.__version__}\n{each.text}", flush=True)
