"""The workloads that benchmarks share, our engine on them, and the timing of rounds."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks import frame, lowerings
from fedjax_inv import devices, local, models, rounds, schedules
from fedjax_inv.algorithms import fedavg
from fedjax_inv.data import federation
from fedjax_inv.devices import Layout, chunked, over
from fedjax_inv.types import Cohort, Federation, Model
from fedjax_inv_experiments.experiment import config
from fedjax_inv_experiments.experiment.config import Config
from fedjax_inv_experiments.flags.flag import flag
from fedjax_inv_experiments.parts import machine as machines


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
        return (
            f"{self.network}: {self.cohort} of {self.num_clients} clients a round, "
            f"{self.num_examples} examples each, batch {self.batch_size}, "
            f"{self.client_steps} client-steps"
        )


WORKLOADS = {
    # CIFAR-10 as in pfl's benchmarks (Granqvist et al. 2024).
    "a": Workload("pfl_cifar", (32, 32, 3), 1000, 50, 50, 10, 1, 0.1),
    "b": Workload("mlp", (28, 28, 1), 60, 500, 60, 32, 1, 0.1),
    "c": Workload("lenet", (28, 28, 1), 10, 300, 10, 32, 1, 0.1),
}


def workloads_flag() -> Any:
    """The flag --workloads of benchmarks."""
    return flag(tuple(WORKLOADS), "Workloads of workloads.py.", choices=WORKLOADS)


def shrunk(workload: Workload, divisor: int) -> Workload:
    """Fewer clients, otherwise the same."""
    return workload._replace(
        num_clients=max(1, workload.num_clients // divisor),
        cohort=max(1, workload.cohort // divisor),
    )


class Choice(NamedTuple):
    """Settings of our engine."""

    chunk: int  # clients at once, 0: all
    conv: str  # one of models.LOWERINGS

    @property
    def label(self) -> str:
        """The choice as text."""
        return f"{self.chunk or 'all'}/{self.conv}"


class Round(NamedTuple):
    """A timed round."""

    seconds: float
    client_steps: int


class Party(Protocol):
    """A simulator that runs rounds of a workload."""

    def round(self) -> Round: ...


class WrongWork(Exception):
    """A party that runs a wrong number of local steps."""


def model_of(workload: Workload, conv: str) -> Model:
    """The network of a workload."""
    if workload.network == "mlp":
        return models.mlp(10)
    return lowerings.NETWORKS[workload.network].model(conv)


def noise(workload: Workload) -> Federation:
    """Examples in float32, as other simulators hold them."""
    generator = np.random.default_rng(0)
    num_examples = workload.num_clients * workload.num_examples
    x = generator.random((num_examples, *workload.shape), np.float32)
    y = generator.integers(0, 10, num_examples, np.int32)
    parts = np.split(np.arange(num_examples), workload.num_clients)
    return federation.of_parts(federation.examples(x, y), parts)


class Engine:
    """Our engine on a workload; the devices of a layout share the clients."""

    def __init__(
        self, workload: Workload, choice: Choice, data: Federation, layout: Layout | None = None
    ) -> None:
        self._setting = workload
        model = model_of(workload, choice.conv)
        work = local.epochs(
            optax.sgd(workload.learning_rate),
            batch_size=workload.batch_size,
            num_epochs=workload.num_epochs,
        )
        algorithm = fedavg.fedavg(model, work)
        layout = (layout or Layout())._replace(own=False)
        axis, mesh = layout.axis(chunked(choice.chunk or workload.cohort)), layout.mesh

        def advance(
            state: rounds.State, cohort: Cohort, data: Federation
        ) -> tuple[rounds.State, tuple[rounds.Report, ...]]:
            return rounds.run(algorithm, state, cohort, data, axis=axis)

        on_all = advance if mesh is None else over(mesh, advance)
        options = devices.compiler_options() if layout.lanes else None
        self._advance = jax.jit(on_all, donate_argnums=0, compiler_options=options)
        variables = model.init(jax.random.key(0), data.data.x[:1])
        self.num_parameters = sum(leaf.size for leaf in jax.tree.leaves(variables.params))
        state = rounds.init(algorithm, variables, data, jax.random.key(1))
        schedule = schedules.sampled(jax.random.key(2), workload.num_clients, workload.cohort, 100)
        if mesh is not None:
            whole = NamedSharding(mesh, PartitionSpec())
            state, schedule, data = jax.device_put((state, schedule, data), whole)
        self._state, self._schedule, self._data = state, schedule, data
        self._num_rounds = 0

    def round(self) -> Round:
        """Runs one more round; the first one compiles."""
        now = self._num_rounds % self._schedule.who.shape[0]
        cohort = jax.block_until_ready(jax.tree.map(lambda a: a[now : now + 1], self._schedule))
        began = time.perf_counter()
        self._state, (report,) = jax.block_until_ready(
            self._advance(self._state, cohort, self._data)
        )
        seconds = time.perf_counter() - began
        self._num_rounds += 1
        batches = -(-np.asarray(report.size * report.present) // self._setting.batch_size)
        return Round(seconds, int(batches.sum()) * self._setting.num_epochs)


def config_of(workload: Workload, num_devices: int) -> Config:
    """The workload as flags of train and sweep."""
    return config.of(
        run_chunk="1",
        devices=str(num_devices),
        clients=workload.num_clients,
        cohort=workload.cohort,
        batch_size=workload.batch_size,
        local_epochs=workload.num_epochs,
    )


def layout_of(workload: Workload, num_devices: int) -> Layout:
    """The layout of train and sweep on some devices, which share the clients."""
    flags = config_of(workload, num_devices)
    num_examples = workload.num_clients * workload.num_examples
    data = 4 * num_examples * (int(np.prod(workload.shape)) + 1)
    x = jax.ShapeDtypeStruct((1, *workload.shape), jnp.float32)
    model = model_of(workload, "auto")
    network = jax.eval_shape(model.init, jax.eval_shape(lambda: jax.random.key(0)), x)
    num_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(network))
    load = machines.Load(1, workload.num_clients, workload.cohort, data, num_bytes)
    return machines.layout(flags.run, load)


def auto(workload: Workload) -> Choice:
    """The choice that train and sweep make."""
    chunk = machines.at_once("auto")
    return Choice(0 if chunk >= workload.cohort else chunk, "auto")


def in_turns(
    parties: Mapping[str, Party], warmup: int, num_rounds: int, client_steps: int
) -> dict[str, list[float]]:
    """The seconds of each party's rounds after the warm-up; the parties take turns."""

    def turn_of(name: str) -> Callable[[], float]:
        def turn() -> float:
            timed = parties[name].round()
            if timed.client_steps != client_steps:
                raise WrongWork(
                    f"{name}: {timed.client_steps} local steps a round, must be {client_steps}"
                )
            return timed.seconds

        return turn

    return frame.in_turns({name: turn_of(name) for name in parties}, num_rounds, warmup)


def figures(seconds: Sequence[float], client_steps: int, who: str = "") -> dict[str, Any]:
    """The columns of one party."""
    return {
        f"{who}median s": frame.median(seconds),
        f"{who}min s": min(seconds),
        f"{who}steps/s": client_steps / frame.median(seconds),
    }
