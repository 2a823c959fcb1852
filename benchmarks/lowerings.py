"""The time of a gradient step with each convolution lowering.

python -m benchmarks.lowerings --network=pfl_cifar --lowering=im2col

A step is measured in four places: compiled alone and called from Python ("outside"), in a scan,
vmapped over clients in a scan, and with FedIPG's penalty in a scan. The ratio of "scan" is relative
to "outside", and the last two ratios to "scan". Variants take turns, so that a machine whose speed
drifts is fair to all; medians count. Processor time is the sum over all threads; on a shared CPU it
is more reliable than wall time. XLA's own lowering takes minutes on a CPU.
"""

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks import frame
from fedjax_inv import models
from fedjax_inv.algorithms import fedipg
from fedjax_inv.models import lowerings
from fedjax_inv.types import Array, Model, Tree, Variables
from fedjax_inv_experiments.flags import command
from fedjax_inv_experiments.flags.flag import at_least, flag

# place -> the place to which its ratio is relative
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
    """A network and its batches."""

    model: Callable[[str], Model]  # (name of a lowering) -> model
    batch_size: int
    shape: tuple[int, ...]


def whole(module: Callable[[lowerings.Conv], nn.Module]) -> Callable[[str], Model]:
    return lambda conv: models.from_blocks([module(lowerings.lowering(conv))], 0)


NETWORKS = {
    "mnist_cnn": Network(lambda conv: models.cnn(10, conv=conv), 64, (28, 28, 1)),
    "pfl_cifar": Network(whole(_PflCifar), 10, (32, 32, 3)),
    "lenet": Network(whole(_LeNet), 32, (28, 28, 1)),
}


_NAMES = [name for name in lowerings.LOWERINGS if name != "auto"]


@dataclasses.dataclass(frozen=True)
class Options:
    """The flags of this benchmark."""

    network: tuple[str, ...] = flag(
        (), "Networks; repeatable, default: all.", choices=NETWORKS, kind=str, repeats=True
    )
    lowering: tuple[str, ...] = flag(
        (), "Lowerings; repeatable, default: all.", choices=_NAMES, kind=str, repeats=True
    )
    place: tuple[str, ...] = flag(
        (), "Places; repeatable, default: all.", choices=BASES, kind=str, repeats=True
    )
    clients: int = flag(5, "Clients under vmap.", at_least(1))
    num_steps: int = flag(3, "Steps per timed call.", at_least(2))
    repeats: int = flag(7, "Timed calls of each variant.", at_least(1))
    json: str = flag("", "File for the figures.")


class Timed(NamedTuple):
    """A compiled gradient descent."""

    run: Callable[[], Any]
    client_steps: int


def descent(options: Options, network: Network, conv: str, place: str) -> Timed:
    """The steps of one place on noise, for one client or for all."""
    model, num_steps = network.model(conv), options.num_steps
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (options.clients, network.batch_size, *network.shape))
    x = jnp.asarray(images, jnp.uint8)
    y = jnp.asarray(generator.integers(0, 10, x.shape[:2]), jnp.int32)
    variables = model.init(jax.random.key(0), x[0])
    start = jax.tree.map(lambda leaf: jnp.stack([leaf] * options.clients), variables)
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

        def outside() -> Variables:
            v = variables
            for _ in range(num_steps):
                v = one(v, *client[1:])
            return v

        return Timed(outside, num_steps)

    def scan(v: Variables, x: Array, y: Array) -> Variables:
        body = jax.vmap(step) if place == "vmapped" else step
        return jax.lax.scan(lambda v, _: (body(v, x, y), None), v, None, length=num_steps)[0]

    arguments = clients if place == "vmapped" else client
    program = compiled(scan, arguments)
    client_steps = num_steps * (options.clients if place == "vmapped" else 1)
    return Timed(lambda: program(*arguments), client_steps)


def rows_of(options: Options, name: str) -> list[dict[str, Any]]:
    descents = {
        (conv, place): descent(options, NETWORKS[name], conv, place)
        for conv in options.lowering or _NAMES
        for place in BASES
        if place in (options.place or BASES)
    }
    calls = {key: partial(frame.timed, timed.run) for key, timed in descents.items()}
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for (conv, place), turns in frame.in_turns(calls, options.repeats).items():
        scale = 1e3 / descents[conv, place].client_steps
        wall = [scale * each.wall for each in turns]
        rows[conv, place] = row = {
            "network": name,
            "lowering": conv,
            "place": place,
            "median ms": frame.median(wall),
            "minimum ms": min(wall),
            "processor ms": frame.median(scale * each.processor for each in turns),
        }
        base = rows.get((conv, BASES[place]))
        if base is not None:
            row["ratio"] = row["median ms"] / base["median ms"]
            row["processor ratio"] = row["processor ms"] / base["processor ms"]
    return list(rows.values())


def tables(options: Options) -> Iterator[frame.Table]:
    for name in options.network or NETWORKS:
        title = f"{name}, {options.clients} clients, {jax.devices()[0].device_kind}"
        yield frame.Table(title, rows_of(options, name), ".2f")


BINARY = frame.binary(tables, Options, __doc__)

if __name__ == "__main__":
    command.main(BINARY)
