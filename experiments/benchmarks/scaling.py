"""Time and memory against the number of clients, and against the number of seeds.

python -m experiments.benchmarks.scaling

Memory is XLA's own account of the compiled round, besides its arguments (the examples, what each
client holds, the state). Each size is measured alone, smallest first.
"""

import dataclasses
import functools
import time
from typing import Any

import jax
import numpy as np
from absl import app, flags

from experiments import build, launch, program, tune
from experiments.benchmarks import workloads
from experiments.config import Config
from fedjax_inv.data.dataset import Dataset

FLAGS = flags.FLAGS


def measure(config: Config, dataset: Dataset) -> dict[str, Any]:
    """One program on a data set of noise: its memory, and seconds of a round of all runs."""
    (cell,) = build.cells(config, [None])
    data, splits = launch.deal(config, dataset, [None])
    inputs = program.inputs(config, cell, splits[None])
    inputs = tune.without_evaluation(inputs)
    chunks = program.Chunks(int(config.client_chunk), len(config.seeds))
    made = program.make(config, cell, build.model(config, dataset), 1, chunks)
    cohort = program.schedule(config, cell, inputs, 1)
    needed = tune.needed_bytes(tune.compiled(made, data, inputs, cohort))
    states = made.init(data, inputs)
    seconds = []
    for _ in range(1 + FLAGS.rounds):
        start = time.perf_counter()
        states, _ = jax.block_until_ready(made.segment(data, inputs, states, cohort))
        seconds.append(time.perf_counter() - start)
    arguments = sum(leaf.nbytes for leaf in jax.tree.leaves((data, inputs)))
    return {
        "clients": config.clients,
        "seeds": len(config.seeds),
        "data and clients MB": arguments / 1e6,
        "round MB": needed / 1e6,
    } | workloads.figures(seconds[1:], int(inputs.train.mask.sum()) // config.batch_size)


def main(argv: list[str]) -> None:
    del argv
    most = max(map(int, FLAGS.clients))
    generator = np.random.default_rng(0)
    num_examples = round(most * FLAGS.examples / 0.7)  # a fifth is the test's, a tenth validation
    dataset = Dataset(
        generator.integers(0, 256, (num_examples, 28, 28, 1), np.uint8),
        generator.integers(0, 10, num_examples, np.int32),
        tuple(map(str, range(10))),
        np.zeros(num_examples, np.int32),
        ("all",),
        np.zeros(num_examples, bool),
    )
    base = Config(
        environment="none",
        partition="iid",
        batch_size=FLAGS.batch_size,
        client_chunk=str(FLAGS.client_chunk),
        run_chunk="0",
    )

    @functools.cache
    def fewer(num_clients: int) -> Dataset:
        rows = slice(round(num_clients * FLAGS.examples / 0.7))
        return dataset._replace(
            x=dataset.x[rows],
            y=dataset.y[rows],
            domain=dataset.domain[rows],
            test=dataset.test[rows],
        )

    rows = [
        measure(dataclasses.replace(base, clients=count), fewer(count))
        for count in map(int, FLAGS.clients)
    ]
    workloads.show(f"clients, {FLAGS.client_chunk} at once", rows)
    of_seeds = [
        measure(dataclasses.replace(base, clients=10, seeds=tuple(range(count))), fewer(10))
        for count in map(int, FLAGS.seeds)
    ]
    workloads.show("seeds in one program, 10 clients", of_seeds)
    workloads.save(FLAGS.json, rows + of_seeds)


if __name__ == "__main__":
    flags.DEFINE_list("clients", ["10", "100", "1000", "10000"], "Numbers of clients.")
    flags.DEFINE_list("seeds", ["1", "2", "4", "8", "16"], "Numbers of seeds.")
    flags.DEFINE_integer("client_chunk", 10, "Clients at once.", lower_bound=1)
    flags.DEFINE_integer("examples", 20, "Training examples of a client.", lower_bound=2)
    flags.DEFINE_integer("batch_size", 10, "Examples per step.", lower_bound=1)
    flags.DEFINE_integer("rounds", 5, "Timed rounds of each.", lower_bound=1)
    flags.DEFINE_string("json", "", "File for the figures.")
    app.run(main)
