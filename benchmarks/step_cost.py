"""The time of a local step of each algorithm, relative to FedAvg's.

python -m benchmarks.step_cost --model=mlp --batch_size=256

The algorithms take turns, so that a machine whose speed drifts is fair to all; medians count.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks import frame
from benchmarks.frame import flag
from experiments import factories
from experiments.flags import MODELS
from fedjax_inv import local, rounds
from fedjax_inv.algorithms import LISTED
from fedjax_inv.data import federation
from fedjax_inv.types import Exchange, Shard, Visit

_NUM_BATCHES = 4  # batches of a client


@dataclasses.dataclass(frozen=True)
class Options:
    """The flags of this benchmark."""

    model: str = flag("mlp", "The network.", choices=MODELS)
    batch_size: int = flag(256, "Examples per step.")
    num_steps: int = flag(10, "Steps per timed call.")
    repeats: int = flag(15, "Timed calls of each algorithm.")
    algorithms: tuple[str, ...] = flag(
        (), "Algorithms to compare with fedavg; default: all.", kind=str
    )


def training_of(
    options: Options, name: str, arguments: dict[str, Any], work: Any, network: Any
) -> Callable[[], Any]:
    """One client's local training on MNIST-shaped noise, a step at a time."""
    num_examples = _NUM_BATCHES * options.batch_size
    generator = np.random.default_rng(0)
    data = federation.examples(
        generator.integers(0, 256, (num_examples, 28, 28, 1), np.uint8),
        generator.integers(0, 10, num_examples, np.int32),
    )
    # A game has two players; the second has no examples.
    parts = [np.arange(num_examples), np.arange(0)]
    clients = federation.of_parts(data, parts[: 2 if name == "fl_games" else 1])
    shard = Shard(data, clients.order, clients.start[0], clients.size[0], jnp.int32(0))
    algorithm = factories.algorithm(name)(network, work, **arguments)
    variables = network.init(jax.random.key(0), data.x[:1])
    state = rounds.init(algorithm, variables, clients, jax.random.key(1))
    own = jax.tree.map(lambda leaf: leaf[0], state.clients)
    zero = jnp.int32(0)

    def visit_of(exchange: Exchange) -> Visit:
        message = exchange.broadcast(state.server)
        undelayed = exchange.broadcast_undelayed(state.server)
        return Visit(message, own, shard, zero, zero, jax.random.key(2), undelayed)

    visits = [(exchange.client, visit_of(exchange)) for exchange in algorithm.exchanges]
    # An exchange that trains reports its loss.
    calls = [
        (jax.jit(client), visit)
        for client, visit in visits
        if "loss" in jax.eval_shape(client, visit).metrics
    ]
    return lambda: [client(visit) for client, visit in calls]


def tables(options: Options) -> Iterator[frame.Table]:
    make = factories.network(options.model)
    network, whole = make(10), make(10, cut=0)
    # With the momentum that CAFE needs.
    work = local.steps(
        optax.sgd(0.01, 0.9),
        batch_size=options.batch_size,
        num_steps=options.num_steps,
        momentum=0.9,
    )
    variants: dict[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in LISTED}
    variants["fl_games, memory 5"] = ("fl_games", {"memory": 5})
    del variants["fedipg"]
    for derivative in ("forward_over_reverse", "reverse_over_forward"):
        for penalty_on in ("all", "classifier"):
            arguments = {"derivative": derivative, "penalty_on": penalty_on}
            variants[f"fedipg {derivative} {penalty_on}"] = ("fedipg", arguments)
    variants["fedipg halves all"] = ("fedipg", {"estimator": "halves"})
    if options.algorithms:
        wanted = ("fedavg", *options.algorithms)
        variants = {label: each for label, each in variants.items() if each[0] in wanted}
    calls = {
        # A player of FL Games owns the whole network.
        label: training_of(options, name, arguments, work, whole if name == "fl_games" else network)
        for label, (name, arguments) in variants.items()
    }
    seconds = {
        label: [each / options.num_steps for each in times]
        for label, times in frame.timed_in_turns(calls, options.repeats).items()
    }
    base = frame.median(seconds["fedavg"])
    rows = [
        {
            "algorithm": label,
            "median ms": 1e3 * frame.median(times),
            "minimum ms": 1e3 * min(times),
            "over fedavg": frame.median(times) / base,
        }
        for label, times in seconds.items()
    ]
    device = jax.devices()[0].device_kind
    yield frame.Table(f"{options.model}, batch {options.batch_size}, {device}", rows, ".2f")


if __name__ == "__main__":
    frame.main(tables, Options, __doc__)
