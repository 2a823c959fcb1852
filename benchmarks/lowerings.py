"""What a gradient step costs with each convolution lowering.

python -m benchmarks.lowerings --network=pfl_cifar --lowering=im2col

Places: a compiled step called from Python ("outside"), inside a scan, vmapped over clients inside a
scan, and with FedIPG's penalty inside a scan. The ratio of "scan" is to "outside", those of the two
others are to "scan". Variants take turns, so that a machine whose speed drifts is fair to all;
medians count. Processor time is that of all threads: on a shared CPU it tells more than the wall.
XLA's own lowering takes minutes on a CPU.
"""

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags
from tabulate import tabulate

from fedjax_inv import models
from fedjax_inv.algorithms import fedipg
from fedjax_inv.models import lowerings
from fedjax_inv.types import Array, Model, Tree, Variables

FLAGS = flags.FLAGS

BASES = {"outside": "outside", "scan": "outside", "vmapped": "scan", "penalised": "scan"}


class _PflCifar(nn.Module):
    """The CIFAR-10 network of pfl's benchmarks (Granqvist et al. 2024)."""

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


class Network(NamedTuple):
    """A network and the batches that it is timed on."""

    model: Callable[[str], Model]  # by the lowering's name
    batch_size: int
    shape: tuple[int, ...]


def whole(module: Callable[[lowerings.Conv], nn.Module]) -> Callable[[str], Model]:
    return lambda conv: models.from_blocks([module(lowerings.lowering(conv))], 0)


NETWORKS = {
    "mnist_cnn": Network(lambda conv: models.cnn(10, conv=conv), 64, (28, 28, 1)),
    "pfl_cifar": Network(whole(_PflCifar), 10, (32, 32, 3)),
    "lenet": Network(whole(_LeNet), 32, (28, 28, 1)),
}


class Timed(NamedTuple):
    """A compiled descent."""

    run: Callable[[], Any]
    client_steps: int


def descent(network: Network, conv: str, place: str) -> Timed:
    """The steps of one place on noise, one client's or those of all clients."""
    model, num_steps = network.model(conv), FLAGS.num_steps
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (FLAGS.clients, network.batch_size, *network.shape))
    x = jnp.asarray(images, jnp.uint8)
    y = jnp.asarray(generator.integers(0, 10, x.shape[:2]), jnp.int32)
    variables = model.init(jax.random.key(0), x[0])
    start = jax.tree.map(lambda leaf: jnp.stack([leaf] * FLAGS.clients), variables)
    clients = start, x, y
    client = variables, x[0], y[0]

    def gradient(v: Variables, x: Array, y: Array) -> Variables:
        def risk(v: Variables) -> Array:
            logits = models.predict(model, v, x)
            return optax.losses.softmax_cross_entropy_with_integer_labels(logits, y).mean()

        if place == "penalised":
            return fedipg.penalised_value_and_grad(risk, 1e-3)(v)[1]
        return jax.grad(risk)(v)

    def step(v: Variables, x: Array, y: Array) -> Variables:
        return jax.tree.map(lambda v, g: v - 0.01 * g, v, gradient(v, x, y))

    def compiled(fn: Callable[..., Variables], arguments: Tree) -> Callable[..., Variables]:
        return jax.jit(fn).lower(*arguments).compile()

    if place == "outside":
        one = compiled(step, client)

        def outside() -> None:
            v = variables
            for _ in range(num_steps):
                v = one(v, *client[1:])
            jax.block_until_ready(v)

        return Timed(outside, num_steps)

    def scan(v: Variables, x: Array, y: Array) -> Variables:
        body = jax.vmap(step) if place == "vmapped" else step
        return jax.lax.scan(lambda v, _: (body(v, x, y), None), v, None, length=num_steps)[0]

    arguments = clients if place == "vmapped" else client
    program = compiled(scan, arguments)
    client_steps = num_steps * (FLAGS.clients if place == "vmapped" else 1)
    return Timed(lambda: jax.block_until_ready(program(*arguments)), client_steps)


def turn(timed: Timed) -> tuple[float, float]:
    """Milliseconds of wall and of processor time of one client step."""
    wall, processor = time.perf_counter(), time.process_time()
    timed.run()
    elapsed = time.perf_counter() - wall, time.process_time() - processor
    return 1e3 * elapsed[0] / timed.client_steps, 1e3 * elapsed[1] / timed.client_steps


def rows_of(name: str) -> list[dict[str, Any]]:
    places = [place for place in BASES if place in FLAGS.place]
    descents = {
        (conv, place): descent(NETWORKS[name], conv, place)
        for conv in FLAGS.lowering
        for place in places
    }
    for timed in descents.values():
        timed.run()
    turns: dict[tuple[str, str], list[tuple[float, float]]] = {key: [] for key in descents}
    for _ in range(FLAGS.repeats):
        for key, timed in descents.items():
            turns[key].append(turn(timed))
    rows = []
    for (conv, place), times in turns.items():
        wall, processor = zip(*times, strict=True)
        row = {
            "network": name,
            "lowering": conv,
            "place": place,
            "median ms": statistics.median(wall),
            "minimum ms": min(wall),
            "processor ms": statistics.median(processor),
        }
        base = turns.get((conv, BASES[place]))
        if base is not None:
            base_wall, base_processor = zip(*base, strict=True)
            row["ratio"] = row["median ms"] / statistics.median(base_wall)
            row["processor ratio"] = row["processor ms"] / statistics.median(base_processor)
        rows.append(row)
    return rows


def main(argv: list[str]) -> None:
    del argv
    rows = []
    for name in FLAGS.network:
        of_network = rows_of(name)
        rows += of_network
        print(f"{name}, {FLAGS.clients} clients, {jax.devices()[0].device_kind}")
        print(tabulate(of_network, headers="keys", tablefmt="github", floatfmt=".2f"), flush=True)
    if FLAGS.json:
        Path(FLAGS.json).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    names = [name for name in lowerings.LOWERINGS if name != "auto"]
    flags.DEFINE_multi_enum("network", list(NETWORKS), list(NETWORKS), "Networks; repeatable.")
    flags.DEFINE_multi_enum("lowering", names, names, "Lowerings; repeatable.")
    flags.DEFINE_multi_enum("place", list(BASES), list(BASES), "Places; repeatable.")
    flags.DEFINE_integer("clients", 5, "Clients under vmap.", lower_bound=1)
    flags.DEFINE_integer("num_steps", 3, "Steps per timed call.", lower_bound=2)
    flags.DEFINE_integer("repeats", 7, "Timed calls of each variant.", lower_bound=1)
    flags.DEFINE_string("json", "", "File for the figures.")
    app.run(main)
