"""What a local step of each algorithm costs, over FedAvg's.

python -m benchmarks.step_cost --model=mlp --batch_size=256

The algorithms take turns, so that a machine whose speed drifts is fair to all; medians count.
"""

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags
from tabulate import tabulate

from experiments.flags import names as registry
from fedjax_inv import local, rounds
from fedjax_inv.algorithms import LISTED
from fedjax_inv.data import federation
from fedjax_inv.types import Exchange, Shard, Visit

FLAGS = flags.FLAGS


_NUM_BATCHES = 4  # that a client holds


class Timed(NamedTuple):
    """A compiled call, and how many steps it is worth."""

    call: Callable[[], Any]
    num_steps: int


def client_of(
    name: str, arguments: dict[str, Any], work: Any, network: Any, measures: bool = False
) -> Timed:
    """One client's local training on MNIST-shaped noise, a step at a time.

    measures: instead, what an exit strategy measures of a client in a round, batch by batch.
    """
    num_examples = _NUM_BATCHES * FLAGS.batch_size
    generator = np.random.default_rng(0)
    data = federation.examples(
        generator.integers(0, 256, (num_examples, 28, 28, 1), np.uint8),
        generator.integers(0, 10, num_examples, np.int32),
    )
    # A game has two players; the second has no examples.
    parts = [np.arange(num_examples), np.arange(0)]
    clients = federation.of_parts(data, parts[: 2 if name == "fl_games" else 1])
    shard = Shard(data, clients.order, clients.start[0], clients.size[0], jnp.int32(0))
    algorithm = registry.factory(name)(network, work, **arguments)
    variables = network.init(jax.random.key(0), data.x[:1])
    state = rounds.init(algorithm, variables, clients, jax.random.key(1))
    own = jax.tree.map(lambda leaf: leaf[0], state.clients)
    zero = jnp.int32(0)

    def visit_of(exchange: Exchange) -> Visit:
        message = exchange.broadcast(state.server)
        undelayed = exchange.broadcast_undelayed(state.server)
        return Visit(message, own, shard, zero, zero, jax.random.key(2), undelayed)

    visits = [(exchange.client, visit_of(exchange)) for exchange in algorithm.exchanges]
    # What trains tells its loss.
    trains = ["loss" in jax.eval_shape(client, visit).metrics for client, visit in visits]
    chosen = [pair for pair, does in zip(visits, trains, strict=True) if does != measures]
    calls = [(jax.jit(client), visit) for client, visit in chosen]
    return Timed(
        lambda: jax.block_until_ready([client(visit) for client, visit in calls]),
        _NUM_BATCHES if measures else FLAGS.num_steps,
    )


def main(argv: list[str]) -> None:
    del argv
    network, whole = registry.MODELS[FLAGS.model](10), registry.MODELS[FLAGS.model](10, cut=0)
    # With the momentum that CAFE needs.
    work = local.steps(optax.sgd(0.01, 0.9), batch_size=FLAGS.batch_size, num_steps=FLAGS.num_steps)
    variants: dict[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in LISTED}
    variants["fl_games, memory 5"] = ("fl_games", {"memory": 5})
    del variants["fedipg"]
    for derivative in ("forward_over_reverse", "reverse_over_forward"):
        for penalty_on in ("all", "classifier"):
            arguments = {"derivative": derivative, "penalty_on": penalty_on}
            variants[f"fedipg {derivative} {penalty_on}"] = ("fedipg", arguments)
    variants["fedipg halves all"] = ("fedipg", {"estimator": "halves"})
    if FLAGS.algorithms:
        wanted = ("fedavg", *FLAGS.algorithms)
        variants = {label: each for label, each in variants.items() if each[0] in wanted}
    clients = {
        # A player of FL Games owns the whole network.
        label: client_of(name, arguments, work, whole if name == "fl_games" else network)
        for label, (name, arguments) in variants.items()
    }
    if "exit_strategy" in variants:
        clients["exit_strategy, a gradient and what it measures"] = client_of(
            "exit_strategy", {}, work, network, measures=True
        )
    for client in clients.values():
        client.call()
    seconds: dict[str, list[float]] = {label: [] for label in clients}
    for _ in range(FLAGS.repeats):
        for label, client in clients.items():
            start = time.perf_counter()
            client.call()
            seconds[label].append((time.perf_counter() - start) / client.num_steps)
    base = statistics.median(seconds["fedavg"])
    rows = [
        {
            "algorithm": label,
            "median ms": 1e3 * statistics.median(times),
            "minimum ms": 1e3 * min(times),
            "over fedavg": statistics.median(times) / base,
        }
        for label, times in seconds.items()
    ]
    print(f"{FLAGS.model}, batch {FLAGS.batch_size}, {jax.devices()[0].device_kind}")
    print(tabulate(rows, headers="keys", tablefmt="github", floatfmt=".2f"))
    if FLAGS.json:
        Path(FLAGS.json).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    flags.DEFINE_enum("model", "mlp", list(registry.MODELS), "The network.")
    flags.DEFINE_integer("batch_size", 256, "Examples per step.", lower_bound=1)
    flags.DEFINE_integer("num_steps", 10, "Steps per timed call.", lower_bound=1)
    flags.DEFINE_integer("repeats", 15, "Timed calls of each algorithm.", lower_bound=1)
    flags.DEFINE_list("algorithms", [], "Those to compare with fedavg; default: all.")
    flags.DEFINE_string("json", "", "File for the figures.")
    app.run(main)
