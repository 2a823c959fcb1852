"""Rounds and client-steps per second, and how much of the machine's arithmetic they use.

python -m benchmarks.round_speed --workloads=a,b

Achieved FLOP/s count the gradient steps alone (XLA's own count of one step outside of a loop); the
peak is a large float32 matrix product, measured beside them.
"""

import time
from typing import Any

import jax
import jax.numpy as jnp
from absl import app, flags

from benchmarks import workloads
from experiments.flags.flag import check_known
from fedjax_inv import averaging
from fedjax_inv.types import Batch

FLAGS = flags.FLAGS


def step_flops(workload: workloads.Workload) -> float:
    """Floating-point operations of one gradient step, with XLA's own convolutions."""
    model = workloads.model_of(workload, "lax")
    x = jnp.zeros((workload.batch_size, *workload.shape))
    batch = Batch(x, jnp.zeros(len(x), jnp.int32), jnp.ones(len(x), bool))
    variables = model.init(jax.random.key(0), x)
    step = jax.jit(lambda v: averaging.gradient(model)(v, batch, jax.random.key(0)).grads)
    analysis = step.lower(variables).compile().cost_analysis() or {}
    return analysis.get("flops", float("nan"))


def peak_flops(size: int = 2048) -> float:
    """Of the fastest of a few float32 matrix products."""
    a = jax.random.normal(jax.random.key(0), (size, size))
    product = jax.jit(lambda a: a @ a)
    jax.block_until_ready(product(a))
    times = []
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready(product(a))
        times.append(time.perf_counter() - start)
    return 2 * size**3 / min(times)


def main(argv: list[str]) -> None:
    del argv
    peak = peak_flops()
    rows: list[dict[str, Any]] = []
    for name in FLAGS.workloads:
        check_known("workloads", name, workloads.WORKLOADS)
        workload = workloads.WORKLOADS[name]
        data = workloads.noise(workload)
        choice = workloads.auto(workload, data)
        engine = workloads.Engine(workload, choice, data)
        seconds = workloads.in_turns({"": engine}, 1, FLAGS.rounds, workload.client_steps)[""]
        flops = step_flops(workload) * workload.client_steps
        rows.append(
            {"workload": name, "clients at once/conv": choice.label}
            | workloads.figures(seconds, workload.client_steps)
            | {
                "rounds/s": len(seconds) / sum(seconds),
                "GFLOP/s": flops / workloads.median(seconds) / 1e9,
                "of matmul peak": flops / workloads.median(seconds) / peak,
            }
        )
    workloads.show(f"FedAvg, {jax.devices()[0].device_kind}, peak {peak / 1e9:.0f} GFLOP/s", rows)
    workloads.save(FLAGS.json, rows)


if __name__ == "__main__":
    flags.DEFINE_list("workloads", list(workloads.WORKLOADS), "Workloads of workloads.py.")
    flags.DEFINE_integer("rounds", 5, "Timed rounds.", lower_bound=1)
    flags.DEFINE_string("json", "", "File for the figures.")
    app.run(main)
