"""The number of clients and of runs to train at once: by a rule, or by a stopwatch.

The rule trains one client and one run after the other on a CPU. Elsewhere it trains all at once, or
as many as fit into memory. It depends only on the machine, so a command always computes the same
sums.
"""

import math
import sys
import time
from collections.abc import Callable, Hashable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_inv import program
from fedjax_inv.devices import Layout
from fedjax_inv.types import Examples, Tree, always
from fedjax_inv_experiments.experiment import assemble
from fedjax_inv_experiments.experiment.config import Config
from fedjax_inv_experiments.experiment.grid import Cell
from fedjax_inv_experiments.parts import machine as machines
from fedjax_inv_experiments.parts import training

_SECONDS = 0.2  # for measuring a candidate
_ROUNDS = 2  # in a measured segment
_MOST_ROUNDS = 12  # in a measured segment at most, for algorithms whose clients take turns
_STEPS = 2  # local steps of a measured client
_SLOTS = 8  # the fewest clients in a measured round
_GROWTH = 4  # the ratio of one measured number of clients to the one before
USABLE_MEMORY = 0.7  # the part of a machine's or a device's memory that a program may take
_WORSE = 1.2  # a time above the best by this factor ends the search for more clients
_AS_FAST = 1.05  # a time above the best by less is as good, so the smaller number is taken


class Chunks(NamedTuple):
    """The numbers of clients and of runs that train at once."""

    clients: int
    runs: int


Make = Callable[[Chunks], program.Program]


def asked(config: Config, num_runs: int, inputs: program.Inputs) -> tuple[int | None, int | None]:
    """The numbers of clients and of runs in the flags, None for auto and measure."""
    num_slots = _num_slots(config, inputs)
    named = ((config.run.client_chunk, num_slots), (config.run.run_chunk, num_runs))
    clients, runs = ((int(f) or most) if f.isdecimal() else None for f, most in named)
    return clients, runs


def _num_slots(config: Config, inputs: program.Inputs) -> int:
    num_clients = inputs.train.size.shape[1]
    return config.participation.slots(num_clients)


def choose(
    config: Config,
    cell: Cell,
    experiment: program.Experiment,
    inputs: program.Inputs,
    machine: "Machine",
) -> Chunks:
    """The chunks by the flags: a number, the rule (auto) or a stopwatch (measure)."""
    num_slots = _num_slots(config, inputs)
    clients, runs = asked(config, len(cell.runs), inputs)
    most = Chunks(
        clients or (1 if machine.is_cpu else num_slots),
        runs or (1 if machine.is_cpu else machine.runs_per_device(len(cell.runs))),
    )
    if clients and runs:
        return most
    flags = (config.run.client_chunk, config.run.run_chunk)
    if "measure" not in flags and machine.is_cpu:
        return most
    if "measure" in flags:
        few = assemble.cohorts(config, inputs, _num_rounds(experiment, inputs))
        return _measured(config, cell, inputs, few, machine)
    # The programs of the run itself, so that they need not be compiled again.
    cohort = assemble.cohorts(config, inputs, config.watching.eval_every)
    fitting = halved(
        most,
        lambda chosen: machine.fits(chosen, inputs, cohort),
        clients=clients is None,
        runs=runs is None,
    )
    return _smallest(fitting)


def _smallest(chosen: Chunks) -> Chunks:
    """The smallest chunks of all processes, which may have different memory."""
    return Chunks(*(-machines.agree(-number) for number in chosen))


def streamed(
    config: Config,
    inputs: program.Inputs,
    layout: Layout,
    compile: Callable[[Chunks], jax.stages.Compiled],
) -> Chunks:
    """The chunks of a run whose examples come from the host, by number or rule.

    compile: chunks -> the compiled rounds.
    """
    is_cpu, num_runs = jax.default_backend() == "cpu", len(inputs.seed)
    clients, runs = asked(config, num_runs, inputs)
    most = Chunks(
        clients or (1 if is_cpu else _num_slots(config, inputs)),
        runs or (1 if is_cpu else layout.runs_per_device(num_runs)),
    )
    if is_cpu or (clients and runs):
        return most

    def fit(chosen: Chunks) -> bool:
        return fits(lambda: compile(chosen), available_bytes())

    return _smallest(halved(most, fit, clients=clients is None, runs=runs is None))


def halved(
    most: Chunks, fits: Callable[[Chunks], bool], *, clients: bool = True, runs: bool = True
) -> Chunks:
    """The rule off CPUs: `most`, halved until it fits. clients, runs: whether they may be."""
    # Runs are halved first, as fewer clients at once make narrower matrix products.
    while runs and most.runs > 1 and not fits(most):
        most = most._replace(runs=-(-most.runs // 2))
    while clients and most.clients > 1 and not fits(most):
        most = most._replace(clients=-(-most.clients // 2))
    return most


def _num_rounds(experiment: program.Experiment, inputs: program.Inputs) -> int:
    """The number of rounds to measure: a few, or a cycle where the clients take turns."""
    algorithm = experiment.algorithm({k: values[0] for k, values in inputs.hyper.items()})
    if any(exchange.attends is not always for exchange in algorithm.exchanges):
        return min(inputs.train.size.shape[1] + 1, _MOST_ROUNDS)
    return _ROUNDS


def _measured(
    config: Config, cell: Cell, inputs: program.Inputs, cohort: Tree, machine: "Machine"
) -> Chunks:
    """The fastest chunks that fit into memory; prints the times on stderr.

    The numbers of clients are 1, 4, 16, ... and all; they are timed on a few steps of the first
    clients. All runs train at once, or as many as fit; on a CPU one by one, if that is not slower.
    """
    num_slots = _num_slots(config, inputs)
    clients, fixed_runs = asked(config, len(cell.runs), inputs)
    runs = fixed_runs or machine.runs_per_device(len(cell.runs))
    if clients:
        sizes = [clients]
    elif config.run.client_chunk == "auto":
        sizes = [1 if machine.is_cpu else num_slots]
    else:
        sizes = [n for n in (_GROWTH**i for i in range(20)) if n < num_slots] + [num_slots]
    if config.run.run_chunk == "auto" and machine.is_cpu:
        runs = 1
    while not fixed_runs and runs > 1 and not machine.fits(Chunks(sizes[0], runs), inputs, cohort):
        runs = -(-runs // 2)
    one_by_one = config.run.run_chunk == "measure" and runs > 1 and machine.is_cpu
    if len(sizes) == 1 and not one_by_one:
        return Chunks(sizes[0], runs)

    def seconds(chunks: Chunks) -> float:
        """The seconds per client and round; infinite if the chunks do not fit into memory."""
        part = _light(inputs, config, cohort, max(_SLOTS, chunks.clients))
        if not machine.fits(chunks, *part):
            return math.inf
        return machine.seconds(chunks, *part) / (cohort.who.shape[1] * part[1].who.shape[-1])

    measured: dict[Chunks, float] = {}
    for size in sizes:
        chunks = Chunks(size, runs)
        measured[chunks] = seconds(chunks)
        if measured[chunks] == math.inf or measured[chunks] > _WORSE * min(measured.values()):
            break
    # The first of equally fast sizes needs the least memory.
    best = _first_fast(measured)
    if one_by_one:
        alone = Chunks(best.clients, 1)
        measured = {alone: seconds(alone), **measured}
        best = _first_fast({chunks: measured[chunks] for chunks in (alone, best)})
    steps = _num_steps(config, inputs)
    times = ", ".join(
        f"{chunks.clients}/{chunks.runs}: {1e3 * seconds / steps:.3g}"
        for chunks, seconds in measured.items()
        if seconds < math.inf
    )
    print(
        f"{cell.label}: client_chunk={best.clients}, run_chunk={best.runs} (ms per client-step of "
        f"all runs, by client_chunk/run_chunk: {times})",
        file=sys.stderr,
    )
    return best


def _first_fast(measured: dict[Chunks, float]) -> Chunks:
    fastest = min(measured.values())
    return next(chunks for chunks, seconds in measured.items() if seconds <= _AS_FAST * fastest)


class Machine:
    """Measures the memory and the time of a cell's chunks; compiles each program once."""

    def __init__(self, make: Make, data: Examples, layout: Layout | None = None) -> None:
        """layout: of the data and inputs; by default on one device."""
        self._make, self._data = make, data
        self.runs_per_device = (layout or Layout()).runs_per_device
        self._compiled: dict[Hashable, jax.stages.Compiled] = {}
        self._evaluations: dict[Chunks, jax.stages.Compiled] = {}
        self._init: dict[int, Callable[..., Tree]] = {}  # by the number of runs alone

    @property
    def is_cpu(self) -> bool:
        """Whether programs run on a CPU."""
        return jax.default_backend() == "cpu"

    def fits(self, chunks: Chunks, inputs: program.Inputs, cohort: Tree) -> bool:
        """Whether a segment fits into memory: its rounds, and the evaluation after them."""
        programs = (
            lambda: self._of(chunks, inputs, cohort),
            lambda: self._evaluation(chunks, inputs),
        )
        return all(fits(compile, available_bytes()) for compile in programs)

    def seconds(self, chunks: Chunks, inputs: program.Inputs, cohort: Tree) -> float:
        """The time of a segment's rounds."""
        compiled = self._of(chunks, inputs, cohort)
        states = self._init[chunks.runs](self._data, inputs)
        return _seconds(lambda states: compiled(self._data, inputs, states, cohort)[0], states)

    def _of(self, chunks: Chunks, inputs: program.Inputs, cohort: Tree) -> jax.stages.Compiled:
        key = chunks, cohort.who.shape[-1], inputs.watched is None
        if key not in self._compiled:
            program = self._make(chunks)
            self._init.setdefault(chunks.runs, program.init)
            self._compiled[key] = compiled(program, self._data, inputs, cohort)
        return self._compiled[key]

    def _evaluation(self, chunks: Chunks, inputs: program.Inputs) -> jax.stages.Compiled:
        if chunks not in self._evaluations:
            program = self._make(chunks)
            states = jax.eval_shape(program.init, self._data, inputs)
            lowered = program.evaluate.lower(self._data, inputs, states)
            self._evaluations[chunks] = lowered.compile()
        return self._evaluations[chunks]


def available_bytes() -> int:
    """The memory that a program may take: most of the device's or of the machine's."""
    # The memory that happens to be free would change the choice from time to time.
    return int(USABLE_MEMORY * machines.memory())


def compiled(program: program.Program, *arguments: Tree) -> jax.stages.Compiled:
    """The compiled rounds of a program for (data, inputs, cohort)."""
    data, inputs, cohort = arguments
    states = jax.eval_shape(program.init, data, inputs)
    return program.rounds.lower(data, inputs, states, cohort).compile()


def fits(compile: Callable[[], jax.stages.Compiled], available: int) -> bool:
    """Whether a program fits into memory. compile: a function that returns the program."""
    try:
        return needed_bytes(compile()) <= available
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return False  # a TPU's compiler refuses what its device cannot hold


def needed_bytes(program: jax.stages.Compiled) -> int:
    """The memory that a compiled program needs, with its arguments and results."""
    memory = program.memory_analysis()
    if memory is None:
        return 0  # the backend does not say, so assume that it fits
    of_results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return memory.argument_size_in_bytes + memory.temp_size_in_bytes + of_results


def _light(
    inputs: program.Inputs, config: Config, cohort: Tree, num_slots: int
) -> tuple[program.Inputs, Tree]:
    """Inputs with a few examples per client and nothing to watch, and a smaller cohort.

    All examples stay if the program has a fixed number of batches, since fewer would save no time.
    """
    light = inputs._replace(watched=None)
    if _known_batches(config, inputs) is None:
        most = _STEPS * (config.clients.batch_size or int(inputs.train.size.max()))
        few = inputs.train._replace(size=jnp.minimum(inputs.train.size, most))
        light = light._replace(train=few)
    return light, jax.tree.map(lambda leaf: leaf[..., :num_slots], cohort)


def _known_batches(config: Config, inputs: program.Inputs) -> int | None:
    return training.sizes(config.clients, np.asarray(inputs.train.size)).num_batches


def _num_steps(config: Config, inputs: program.Inputs) -> int:
    """The local steps of a client with enough examples in a measured round."""
    clients = config.clients
    if clients.local_steps or not clients.batch_size:
        return clients.local_steps or clients.local_epochs
    return clients.local_epochs * (_known_batches(config, inputs) or _STEPS)


def _seconds(advance: Callable[[Tree], Tree], states: Tree) -> float:
    """The seconds of the fastest of a few calls of advance: states -> states."""
    states = jax.block_until_ready(advance(states))  # the first call is slower
    fastest, start = math.inf, time.perf_counter()
    while time.perf_counter() - start < _SECONDS or fastest == math.inf:
        began = time.perf_counter()
        states = jax.block_until_ready(advance(states))
        fastest = min(fastest, time.perf_counter() - began)
    return fastest
