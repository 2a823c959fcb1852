"""Rounds on a federation on disk, against rounds on one in memory with the same sampled clients.

python -m benchmarks.streaming --folder=federation

It makes a file of random images, 20 for each client (of 28x28 pixels, 15.7 GB for a million
clients), and plays rounds of FedAvg with an MLP. Memory is the largest resident memory of the
process, without files in the system's cache. The run in memory comes second, on a federation of the
clients that are sampled. The two run one after the other, so the machine must be idle.
"""

import dataclasses
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from benchmarks import frame
from benchmarks.frame import Row, flag
from fedjax_inv import local, models, program, schedules, streaming
from fedjax_inv.algorithms import fedavg
from fedjax_inv.checks import UsageError
from fedjax_inv.data import stored
from fedjax_inv.devices import ClientShards, SharedExamples
from fedjax_inv.inputs import Inputs
from fedjax_inv.one_run import Experiment
from fedjax_inv.types import Cohort, Tree

_SIZE = 20  # examples of a client
_EVERY, _SEGMENTS = 2, 4  # rounds of a segment, and timed segments


@dataclasses.dataclass(frozen=True)
class Options:
    """The flags of this benchmark."""

    folder: str = flag("", "The folder of the federation; it is made if it is not there.")
    clients: int = flag(1_000_000, "Clients.")
    cohort: int = flag(1000, "Clients of a round.")
    side: int = flag(28, "Pixels of an image's side.")


def made(path: Path, num_clients: int, high: int, dtype: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Random numbers for all examples, in a file that is mapped into memory."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        rng = np.random.default_rng(0)
        with open(path, "wb") as file:  # a map's pages would count as memory of this process
            for _ in range(num_clients):
                file.write(rng.integers(0, high, (_SIZE, *shape), dtype).tobytes())
    return np.memmap(path, dtype, "r", shape=(num_clients * _SIZE, *shape))


def inputs(num_clients: int) -> Inputs:
    """The inputs of a run whose clients' rows follow each other; nothing is evaluated."""
    order: Any = np.arange(num_clients * _SIZE, dtype=np.int32)[None]
    start: Any = np.arange(num_clients, dtype=np.int32)[None] * _SIZE
    size: Any = np.full_like(start, _SIZE)
    none: Any = np.zeros_like(start)
    valid = ClientShards(order, none, none)
    test = SharedExamples(order, none[:, :1], none[:, :1])
    seed: Any = np.zeros(1, np.int32)
    return Inputs({}, seed, ClientShards(order, start, size), valid, test, none)


def rate(
    made: program.Program | streaming.Streamed, data: Any, given: Inputs, cohorts: Cohort
) -> float:
    """Rounds a second, by the median segment; the first one compiles."""
    training, times = made.init(data, given), []
    for first in range(0, cohorts.who.shape[1], _EVERY):
        part: Tree = jax.tree.map(lambda leaf, at=first: leaf[:, at : at + _EVERY], cohorts)
        began = time.perf_counter()
        training, outcome = made.segment(data, given, training, part)
        jax.block_until_ready((training, outcome))
        times.append(time.perf_counter() - began)
    return _EVERY / frame.median(times[1:])


def rows(options: Options) -> Iterator[Row]:
    if not options.folder:
        raise UsageError("--folder", "", "must be a folder with room for the federation")
    size = f"{options.clients}-{options.side}"
    pixels = options.side, options.side, 1
    x = made(Path(options.folder, f"x-{size}"), options.clients, 256, np.uint8, pixels)
    y = made(Path(options.folder, f"y-{size}"), options.clients, 10, np.int32, ())
    num_rounds = _EVERY * (1 + _SEGMENTS)
    drawn = schedules.sampled(jax.random.key(0), options.clients, options.cohort, num_rounds)
    cohorts: Cohort = jax.tree.map(lambda leaf: np.asarray(leaf)[None], drawn)
    given, source = inputs(options.clients), stored.of_arrays(x, y)
    model = models.mlp(10)
    work = local.epochs(optax.sgd(0.1), batch_size=10)
    resident = program.Program(Experiment(model, lambda hyper: fedavg.fedavg(model, work)))
    streamed = streaming.Streamed(resident, source, given, cohorts, every=_EVERY)
    speed = rate(streamed, None, given, cohorts)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    sampled, who = np.unique(cohorts.who, return_inverse=True)
    data = jax.device_put(source.take((sampled[:, None] * _SIZE + np.arange(_SIZE)).reshape(-1)))
    named: Any = who.reshape(cohorts.who.shape).astype(np.int32)
    other = rate(resident, data, inputs(len(sampled)), cohorts._replace(who=named))
    yield {
        "clients": options.clients,
        "of a round": options.cohort,
        "peak GB": memory,
        "rounds per s": speed,
        "in memory": other,
        "share": speed / other,
    }


if __name__ == "__main__":
    frame.main(rows, Options, __doc__)
