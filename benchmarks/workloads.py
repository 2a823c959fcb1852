"""The workloads that benchmarks share, and our engine on them."""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import numpy as np
import optax

from benchmarks import frame
from fedjax_inv import local, models, rounds, schedules
from fedjax_inv.algorithms import fedavg
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


class _LeNet(nn.Module):
    """The MNIST network of McMahan et al. 2017."""

    conv: lowerings.Conv

    @nn.compact
    def __call__(self, x: Array, mask: Array, train: bool) -> Array:
        for features in (32, 64):
            conv = nn.Conv(features, (5, 5), conv_general_dilated=self.conv)
            x = lowerings.max_pool(nn.relu(conv(x)), 2)
        return nn.Dense(10)(nn.relu(nn.Dense(512)(x.reshape(x.shape[0], -1))))


def model_of(workload: Workload) -> Model:
    """The network of a workload."""
    if workload.network == "mlp":
        return models.mlp(10)
    module = {"pfl_cifar": _PflCifar, "lenet": _LeNet}[workload.network]
    return models.from_blocks([module(lowerings.lowering("auto"))], 0)


def noise(workload: Workload) -> Federation:
    """Examples in float32, as other simulators hold them."""
    generator = np.random.default_rng(0)
    num_examples = workload.num_clients * workload.num_examples
    x = generator.random((num_examples, *workload.shape), np.float32)
    y = generator.integers(0, 10, num_examples, np.int32)
    parts = np.split(np.arange(num_examples), workload.num_clients)
    return federation.of_parts(federation.examples(x, y), parts)


class Round(NamedTuple):
    """A timed round."""

    seconds: float
    client_steps: int


class Engine:
    """Our engine on a workload.

    at_once: clients that train at once; 0: all; -1: as `train` does, one on CPUs, all elsewhere.
    """

    def __init__(self, workload: Workload, data: Federation, at_once: int = -1) -> None:
        self._setting, self._data, self._num_rounds = workload, data, 0
        model = model_of(workload)
        work = local.epochs(
            optax.sgd(workload.learning_rate),
            batch_size=workload.batch_size,
            num_epochs=workload.num_epochs,
        )
        algorithm = fedavg.fedavg(model, work)
        if at_once < 0:
            at_once = 1 if jax.default_backend() == "cpu" else 0
        axis = chunked(at_once or workload.cohort)

        def advance(state: rounds.State, cohort: Cohort, data: Federation) -> Any:
            return rounds.run(algorithm, state, cohort, data, axis=axis)

        self._advance = jax.jit(advance, donate_argnums=0)
        variables = model.init(jax.random.key(0), data.data.x[:1])
        self.num_parameters = sum(leaf.size for leaf in jax.tree.leaves(variables.params))
        self._state = rounds.init(algorithm, variables, data, jax.random.key(1))
        self._schedule = schedules.sampled(
            jax.random.key(2), workload.num_clients, workload.cohort, 100
        )

    def round(self) -> Round:
        """Runs one more round; the first one compiles."""
        now = self._num_rounds % self._schedule.who.shape[0]
        cohort = jax.block_until_ready(jax.tree.map(lambda a: a[now : now + 1], self._schedule))
        reports: list[rounds.Report] = []

        def advance() -> rounds.State:
            self._state, (report,) = self._advance(self._state, cohort, self._data)
            reports.append(report)
            return self._state

        seconds = frame.seconds(advance)
        self._num_rounds += 1
        sizes = np.asarray(reports[0].size * reports[0].present)
        batches = -(-sizes // self._setting.batch_size)
        return Round(seconds, int(batches.sum()) * self._setting.num_epochs)
