"""How many clients and how many runs to train at once: what fits, and what is fastest."""

import os
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from experiments import program
from experiments.build import Cell
from experiments.config import Config
from fedjax_inv.types import Examples, Tree

_SECONDS = 0.2  # of repeats per candidate
_STEPS = 2  # of local training per client while measuring
_SLOTS = 8  # clients measured at least

Make = Callable[[program.Chunks], program.Program]


def choose(
    config: Config, cell: Cell, make: Make, data: Examples, inputs: program.Inputs
) -> program.Chunks:
    """The chunks that the flags ask for; for auto, the fastest that fit into memory.

    Runs: all at once, or as many as fit. Clients: 1, 4, 16, ... or all, whatever takes the least
    time on a few steps of the first clients. What was measured is told on stderr.
    """
    cohort = program.schedule(config, cell, inputs, 1)
    num_runs, _, num_slots = cohort.who.shape
    if config.client_chunk != "auto":
        sizes = [int(config.client_chunk) or num_slots]
    else:
        sizes = [4**i for i in range(20) if 4**i < num_slots] + [num_slots]
    runs = num_runs if config.run_chunk == "auto" else int(config.run_chunk) or num_runs
    if config.run_chunk == "auto":
        while runs > 1 and not _fits(make(program.Chunks(sizes[0], runs)), data, inputs, cohort):
            runs = -(-runs // 2)
    if len(sizes) == 1:
        return program.Chunks(sizes[0], runs)
    measured = {}
    for size in sizes:
        chunks = program.Chunks(size, runs)
        part = _light(inputs, config, cohort, max(_SLOTS, size))
        if not _fits(make(chunks), data, *part):
            break
        measured[size] = _seconds(make(chunks), data, *part) / part[1].who.shape[-1]
        if measured[size] > 1.2 * min(measured.values()):
            break
    # Of equally fast sizes the smallest, which takes the least memory.
    fastest = min(measured.values(), default=0.0)
    best = next((size for size, seconds in measured.items() if seconds <= 1.05 * fastest), sizes[0])
    steps = config.local_steps or _STEPS * config.local_epochs
    told = ", ".join(f"{size}: {1e3 * seconds / steps:.3g}" for size, seconds in measured.items())
    print(
        f"{cell.label}: client_chunk={best}, run_chunk={runs} (ms per client-step of all runs: "
        f"{told})",
        file=sys.stderr,
    )
    return program.Chunks(best, runs)


def available_bytes() -> int:
    """Memory that a program may take: the device's, or most of what the machine has free."""
    stats = jax.devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats["bytes_in_use"]
    return int(0.8 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES"))


def needed_bytes(made: program.Program, *arguments: Tree) -> int:
    """What the compiled segment allocates besides the data that are there already."""
    data, inputs, cohort = arguments
    states = jax.eval_shape(made.init, data, inputs)
    analysis = made.segment.lower(data, inputs, states, cohort).compile().memory_analysis()
    # A backend that cannot tell is taken to fit.
    return analysis.temp_size_in_bytes + analysis.output_size_in_bytes if analysis else 0


def _fits(made: program.Program, *arguments: Tree) -> bool:
    return needed_bytes(made, *arguments) <= available_bytes()


def _light(
    inputs: program.Inputs, config: Config, cohort: Tree, num_slots: int
) -> tuple[program.Inputs, Tree]:
    """The inputs with a few examples per client and nothing to evaluate, and a smaller cohort."""

    count = _STEPS * (config.batch_size or inputs.train.mask.shape[-1])
    first = inputs.train.mask & (jnp.cumsum(inputs.train.mask, axis=-1) <= count)
    light = without_evaluation(inputs._replace(train=inputs.train._replace(mask=first)))
    return light, jax.tree.map(lambda leaf: leaf[..., :num_slots], cohort)


def without_evaluation(inputs: program.Inputs) -> program.Inputs:
    """The same inputs with nothing to evaluate, so that a segment takes the time of its rounds."""
    names = ("valid", "test", "watched", "watched_test")
    empty = {name: getattr(inputs, name).mask & False for name in names}
    return inputs._replace(
        **{name: getattr(inputs, name)._replace(mask=mask) for name, mask in empty.items()}
    )


def _seconds(made: program.Program, data: Examples, inputs: program.Inputs, cohort: Tree) -> float:
    """The fastest of a few rounds, the first of which compiles."""
    states = made.init(data, inputs)
    fastest, start = float("inf"), float("inf")
    while time.perf_counter() - start < _SECONDS or fastest == float("inf"):
        began = time.perf_counter()
        states, _ = jax.block_until_ready(made.segment(data, inputs, states, cohort))
        if start == float("inf"):
            start = time.perf_counter()
        else:
            fastest = min(fastest, time.perf_counter() - began)
    return fastest
