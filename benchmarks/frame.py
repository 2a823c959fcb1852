"""The parts that benchmarks share: timing in turns, tables, a json file, and the start."""

import json
import platform
import statistics
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
from tabulate import tabulate

from fedjax_inv_experiments.flags import command
from fedjax_inv_experiments.flags.command import Binary

median = statistics.median

_Key = TypeVar("_Key", bound=Hashable)
_Result = TypeVar("_Result")
_INSTRUCTIONS = ("avx512f", "avx2", "avx", "asimd")  # vector instructions, the widest first


class Seconds(NamedTuple):
    """The time of a call."""

    wall: float
    processor: float  # of all threads


def timed(call: Callable[[], Any]) -> Seconds:
    """The time that a call takes until its results are there."""
    wall, processor = time.perf_counter(), time.process_time()
    jax.block_until_ready(call())
    return Seconds(time.perf_counter() - wall, time.process_time() - processor)


def in_turns(
    calls: Mapping[_Key, Callable[[], _Result]], repeats: int, warmup: int = 1
) -> dict[_Key, list[_Result]]:
    """The results of `repeats` calls of each function.

    The functions take turns, so that a machine whose speed drifts is fair to all.

    The first `warmup` calls of each, which compile, are left out.
    """
    results: dict[_Key, list[_Result]] = {key: [] for key in calls}
    for turn in range(warmup + repeats):
        for key, call in calls.items():
            result = call()
            if turn >= warmup:
                results[key].append(result)
    return results


def machine() -> dict[str, str]:
    """The processor, its widest vector instructions, the JAX version and the device."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    entries = {key.strip(): value.strip() for key, _, value in (x.partition(":") for x in lines)}
    known = entries.get("flags", entries.get("Features", "")).split()
    return {
        "device": jax.devices()[0].device_kind,
        "processor": entries.get("model name", "unknown"),
        "machine": platform.machine(),
        "instructions": next((name for name in _INSTRUCTIONS if name in known), "unknown"),
        "jax": jax.__version__,
    }


class Table(NamedTuple):
    """A table of a benchmark."""

    title: str
    rows: Sequence[Mapping[str, Any]]  # heading -> value; only the json file has nested values
    floatfmt: str = ".3g"


def show(table: Table) -> None:
    """Prints a table."""
    flat = [{k: v for k, v in row.items() if not isinstance(v, dict | list)} for row in table.rows]
    text = tabulate(flat, headers="keys", tablefmt="github", floatfmt=table.floatfmt)
    print(f"\n{table.title}\n{text}", flush=True)


def save(path: str, figures: Any) -> None:
    """Writes a json file, if a path is given."""
    if path:
        Path(path).write_text(json.dumps(figures, indent=1) + "\n")


def fresh() -> None:
    """Makes this process compile all programs anew, because compiling is measured, too."""
    jax.config.update("jax_enable_compilation_cache", False)


def binary(
    tables: Callable[[Any], Iterable[Table]], record: type[Any], about: str | None
) -> Binary:
    """The binary of a benchmark, which prints the machine and each table as soon as it is ready.

    record: its flags; one of them, --json, names the file for all rows.
    """

    def run(options: Any) -> str:
        fresh()
        print(", ".join(f"{name}: {value}" for name, value in machine().items()), flush=True)
        rows: list[Mapping[str, Any]] = []
        for table in tables(options):
            show(table)
            rows += table.rows
            save(options.json, rows)
        return ""

    return command.of(run, record, about)
