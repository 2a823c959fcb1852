"""The workloads that benchmarks share, and our engine on them."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import numpy as np
import optax

from experiments.assembly import factories
from fedjax_inv import local, models, platforms, rounds, schedules
from fedjax_inv.algorithms import LISTED
from fedjax_inv.data import federation
from fedjax_inv.devices import chunked
from fedjax_inv.models import lowerings
from fedjax_inv.types import Array, Cohort, Federation, Model


class Workload(NamedTuple):
    """The work of a round: FedAvg with plain SGD and weights by size, on noise of some shape."""

    network: str
    shape: tuple[int, ...]
    num_clients: int
    num_examples: int  # of each client
    cohort: int
    batch_size: int
    num_epochs: int
    learning_rate: float

    @property
    def client_steps(self) -> int:
        """The local steps of all clients in a round."""
        return self.cohort * self.num_epochs * -(-self.num_examples // self.batch_size)

    @property
    def title(self) -> str:
        """The workload in words."""
        clients = f"{self.cohort} of {self.num_clients} clients"
        return f"{self.network}, {clients}, {self.num_examples} examples, batch {self.batch_size}"


WORKLOADS = {
    # CIFAR-10 as in pfl's benchmarks (Granqvist et al. 2024).
    "a": Workload("pfl_cifar", (32, 32, 3), 1000, 50, 50, 10, 1, 0.1),
    "b": Workload("mlp", (28, 28, 1), 60, 500, 60, 32, 1, 0.1),
    "c": Workload("lenet", (28, 28, 1), 10, 300, 10, 32, 1, 0.1),
}


_RATES = {"fish": "inner_rate", "qfedavg": "step_size"}  # arguments that are learning rates
_CALLS = 40  # different calls of an engine, which it repeats


class _PflCifar(nn.Module):
    """The CIFAR-10 network of pfl's benchmarks."""

    conv: lowerings.Conv

    @nn.compact
    def __call__(self, x: Array, mask: Array, train: bool) -> Array:
        for features in (32, 64):
            conv = nn.Conv(features, (3, 3), padding="VALID", conv_general_dilated=self.conv)
            x = nn.relu(conv(x))
        x = lowerings.max_pool(x, 2).reshape(x.shape[0], -1)
        return nn.Dense(10)(nn.relu(nn.Dense(128)(x)))


def model_of(network: str, whole: bool = False) -> Model:
    """A network by its name; whole: without a body, as a player of FL Games owns it."""
    if network == "pfl_cifar":
        return models.from_blocks([_PflCifar(lowerings.lowering("auto"))], 0)
    if network == "lenet":  # of McMahan et al. 2017 on MNIST
        return models.leaf_cnn(10, widths=(32, 64, 512))
    # mlp, or mlp_64 with one layer of 64 units
    widths = [int(width) for width in network.split("_")[1:]] or [390, 390]
    return models.mlp(10, widths=widths, cut=0 if whole else None)


class Job(NamedTuple):
    """The training of some seeds by an algorithm on a workload."""

    workload: Workload
    algorithm: str = "fedavg"
    arguments: dict[str, Any] = {}  # noqa: RUF012, never changed
    num_steps: int = 0  # local steps of a round; 0: passes over the examples
    momentum: float | None = None  # a momentum of 0 would keep a buffer, too
    precision: str = ""  # of products; "": the algorithm's own
    num_seeds: int = 1
    at_once: int = -1  # clients that train at once; 0: all; -1: as in `train`
    num_rounds: int = 1  # of a call
    known: bool = True  # whether an accelerator knows the number of steps when it compiles
    quick: bool = False  # whether it compiles sooner, to code that runs longer
    floats: bool = False  # whether examples are float32, as other simulators hold them


def noise(job: Job) -> Federation:
    """Examples without a pattern, with two domains for a method that needs them."""
    generator, workload = np.random.default_rng(0), job.workload
    num_examples = workload.num_clients * workload.num_examples
    shape = num_examples, *workload.shape
    x = generator.integers(0, 256, shape, np.uint8)
    if job.floats:
        x = x / np.float32(255)
    y = generator.integers(0, 10, num_examples, np.int32)
    domain = y % 2 if factories.facts(job.algorithm).needs_domains else None
    parts = np.split(np.arange(num_examples), workload.num_clients)
    return federation.of_parts(federation.examples(x, y, domain), parts)


def _of_method(algorithm: str, num_clients: int = 32, **arguments: Any) -> Job:
    momentum = 0.9 if algorithm == "cafe" else None  # which it needs
    workload = Workload("mlp", (28, 28, 1), num_clients, 256, num_clients, 64, 1, 0.05)
    return Job(workload, algorithm, arguments, 10, momentum, num_rounds=2)


# Ten local steps of each algorithm but ERM, whose steps are FedAvg's; players of a game are few.
METHODS = {
    "fedavg": _of_method("fedavg"),
    "fedavg_of_4": _of_method("fedavg", 4),
    **{name: _of_method(name) for name in LISTED if name not in ("erm", "fedavg", "fl_games")},
    "fedipg_classifier": _of_method("fedipg", penalty_on="classifier"),
    "fedipg_halves": _of_method("fedipg", estimator="halves"),
    "fl_games": _of_method("fl_games", 4),
    "fl_games_memory_5": _of_method("fl_games", 4, memory=5),
}
ROUNDS = {name: Job(workload, num_rounds=4) for name, workload in WORKLOADS.items()}
UNEQUAL = {f"{name}_unequal": job._replace(known=False) for name, job in ROUNDS.items()}
JOBS = ROUNDS | UNEQUAL | METHODS


def parts(job: Job) -> tuple[Callable[..., rounds.State], Callable[..., Any]]:
    """The functions of a job, to be traced for the platform that is current.

    The first makes the state, from (the seeds' keys, the federation); the second plays rounds and
    reports, from (state, cohorts, federation).
    """
    workload, algorithm = job.workload, job.algorithm
    model = model_of(workload.network, whole=algorithm == "fl_games")
    optimizer = optax.sgd(workload.learning_rate, job.momentum)
    momentum = job.momentum or 0.0
    if job.num_steps:
        work = local.steps(
            optimizer, batch_size=workload.batch_size, num_steps=job.num_steps, momentum=momentum
        )
    else:
        batches = -(-workload.num_examples // workload.batch_size)
        work = local.epochs(
            optimizer,
            batch_size=workload.batch_size,
            num_epochs=workload.num_epochs,
            num_batches=batches if job.known and not platforms.on_cpu() else None,
            momentum=momentum,
        )
    facts = factories.facts(algorithm)
    needed: dict[str, Any] = {"num_domains": 2} if facts.needs_domains else {}
    if algorithm in _RATES:
        needed[_RATES[algorithm]] = workload.learning_rate
    made = factories.algorithm(algorithm)(model, work, **needed, **job.arguments)
    precision = job.precision or facts.precision
    at_once = job.at_once
    if at_once < 0:
        at_once = 1 if platforms.on_cpu() else 0
    axis = chunked(at_once or workload.cohort)

    def start(key: Array, data: Federation) -> rounds.State:
        with platforms.products_at(precision):
            variables = model.init(key, data.data.x[:1])
            return rounds.init(made, variables, data, key)

    def advance(state: rounds.State, cohort: Cohort, data: Federation) -> Any:
        with platforms.products_at(precision):
            return rounds.run(made, state, cohort, data, axis=axis)

    if job.num_seeds > 1:
        return jax.vmap(start, (0, None)), jax.vmap(advance, (0, None, None))
    return lambda keys, data: start(keys[0], data), advance


def cohorts(job: Job, num_rounds: int) -> Cohort:
    """The cohorts of rounds."""
    draw, num_clients = schedules.attending(job.workload.cohort), job.workload.num_clients
    drawn = jax.jit(lambda key: draw(key, num_clients, num_rounds))
    return jax.device_get(drawn(jax.random.key(2)))


class Round(NamedTuple):
    """A timed call."""

    seconds: float
    client_steps: int


class Engine:
    """Our engine on a job, compiled."""

    def __init__(self, job: Job) -> None:
        self._job, self._num_calls = job, 0
        start, advance = parts(job)
        self._data = noise(job)
        keys = jax.random.split(jax.random.key(1), job.num_seeds)
        quick = platforms.quickest_to_compile()
        self.state = jax.jit(start, compiler_options=quick)(keys, self._data)
        self._schedule = cohorts(job, _CALLS * job.num_rounds)
        began = time.perf_counter()
        program = jax.jit(advance, donate_argnums=0, compiler_options=quick if job.quick else None)
        self._compiled = program.lower(self.state, self._cohort(), self._data).compile()
        self.compile_seconds = time.perf_counter() - began
        memory = self._compiled.memory_analysis()
        self.temporary_bytes: int = memory.temp_size_in_bytes if memory else 0

    def _cohort(self) -> Cohort:
        first = self._num_calls % _CALLS * self._job.num_rounds
        last = first + self._job.num_rounds
        return jax.device_put(jax.tree.map(lambda a: a[first:last], self._schedule))

    def round(self) -> Round:
        """Calls the program once more."""
        cohort = jax.block_until_ready(self._cohort())
        began = time.perf_counter()
        made = self._compiled(self.state, cohort, self._data)
        self.state, (*_, report) = jax.block_until_ready(made)
        seconds = time.perf_counter() - began
        self._num_calls += 1
        job, here = self._job, np.asarray(report.present)
        batches = -(-np.asarray(report.size) // job.workload.batch_size)
        steps = here * (job.num_steps or batches * job.workload.num_epochs)
        return Round(seconds, int(steps.sum()))
