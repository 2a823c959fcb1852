"""The parts that benchmarks share: timing in turns, tables, and the start."""

import statistics
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
from tabulate import tabulate

from experiments.flags import command
from experiments.flags.command import Binary

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


def binary(
    tables: Callable[[Any], Iterable[Table]], record: type[Any], about: str | None
) -> Binary:
    """The binary of a benchmark, which prints each table as soon as it is ready.

    record: its flags.
    """

    def run(options: Any) -> str:
        jax.config.update("jax_enable_compilation_cache", False)  # compiling is measured, too
        for each in tables(options):
            text = tabulate(each.rows, "keys", tablefmt="github", floatfmt=each.floatfmt)
            print(f"\n{each.title}, JAX {jax.__version__}\n{text}", flush=True)
        return ""

    return command.of(run, record, about)
