"""Rounds and client-steps per second, and their share of the machine's peak arithmetic.

python -m benchmarks.round_speed --workloads=a,b

The achieved FLOP/s count only gradient steps, by XLA's account of a single step. The peak is the
speed of a large float32 matrix product in the same process.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import frame, workloads
from experiments.flags import command
from experiments.flags.flag import at_least, flag
from fedjax_inv import averaging
from fedjax_inv.types import Batch


@dataclasses.dataclass(frozen=True)
class Options:
    """The flags of this benchmark."""

    workloads: tuple[str, ...] = workloads.workloads_flag()
    rounds: int = flag(5, "Timed rounds.", at_least(1))


def step_flops(workload: workloads.Workload) -> float:
    """The floating-point operations of one gradient step with XLA's own convolutions."""
    model = workloads.model_of(workload, "lax")
    x = jnp.zeros((workload.batch_size, *workload.shape))
    batch = Batch(x, jnp.zeros(len(x), jnp.int32), jnp.ones(len(x), bool))
    variables = model.init(jax.random.key(0), x)
    step = jax.jit(lambda v: averaging.gradient(model)(v, batch, jax.random.key(0)).grads)
    analysis = step.lower(variables).compile().cost_analysis() or {}
    return analysis.get("flops", float("nan"))


def peak_flops(size: int = 2048) -> float:
    """The floating-point operations per second in the fastest of five float32 products."""
    a = jax.random.normal(jax.random.key(0), (size, size))
    product = jax.jit(lambda a: a @ a)
    return 2 * size**3 / min(frame.timed_in_turns({"": lambda: product(a)}, 5)[""])


def tables(options: Options) -> Iterator[frame.Table]:
    peak = peak_flops()
    rows: list[dict[str, Any]] = []
    for name in options.workloads:
        workload = workloads.WORKLOADS[name]
        engine = workloads.Engine(workload, workloads.noise(workload))
        parties = {"": engine.round}
        seconds = workloads.in_turns(parties, 1, options.rounds, workload.client_steps)[""]
        speed = step_flops(workload) * workload.client_steps / frame.median(seconds)
        rows.append(
            {"workload": name}
            | workloads.figures(seconds, workload.client_steps)
            | {"GFLOP/s": speed / 1e9, "of matmul peak": speed / peak}
        )
    device = jax.devices()[0].device_kind
    yield frame.Table(f"FedAvg, {device}, peak {peak / 1e9:.0f} GFLOP/s", rows)


BINARY = frame.binary(tables, Options, __doc__)

if __name__ == "__main__":
    command.main(BINARY)
