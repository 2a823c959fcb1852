"""Rounds on a federation on disk, against rounds on one in memory with the same sampled clients.

python -m benchmarks.streaming --folder=federation

It makes a file of random images, 20 for each client (of 28x28 pixels, 15.7 GB for a million
clients), and plays rounds of which each samples some clients. Memory is the largest resident memory
of the process, without files in the system's cache. The run in memory comes second, on a federation
of the clients that are sampled. The two run one after the other, so the machine must be idle.
"""

import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from benchmarks import frame
from benchmarks.frame import flag
from fedjax_inv import local, models, program, schedules, streaming
from fedjax_inv.algorithms import fedavg, scaffold
from fedjax_inv.checks import UsageError
from fedjax_inv.data import stored
from fedjax_inv.devices import ClientShards, Layout, SharedExamples
from fedjax_inv.types import Cohort, Tree

_SIZE = 20  # examples of a client
_BLOCK = 10_000  # clients that are made at once
_MODELS: dict[str, Any] = {"mlp": models.mlp, "cnn": models.cnn}
_ALGORITHMS = {"fedavg": fedavg.fedavg, "scaffold": scaffold.scaffold}


@dataclasses.dataclass(frozen=True)
class Options:
    """The flags of this benchmark."""

    folder: str = flag("", "The folder of the federation; it is made if it is not there.")
    clients: int = flag(1_000_000, "Clients.")
    cohort: int = flag(1000, "Clients of a round.")
    side: int = flag(28, "Pixels of an image's side.")
    model: str = flag("mlp", "The network.", choices=tuple(_MODELS))
    widths: tuple[int, ...] = flag((), "The layers' widths; none: the network's own.", kind=int)
    algorithm: str = flag("fedavg", "The algorithm.", choices=tuple(_ALGORITHMS))
    batch_size: int = flag(10, "Examples per step.")
    every: int = flag(2, "Rounds of a segment.")
    segments: int = flag(4, "Timed segments.")


def made(folder: Path, num_clients: int, side: int) -> tuple[np.ndarray, np.ndarray]:
    """The images and labels in a folder, mapped into memory."""
    folder.mkdir(parents=True, exist_ok=True)
    rng, rows, arrays = np.random.default_rng(0), num_clients * _SIZE, []
    for name, dtype, high, shape in (
        ("x", np.uint8, 256, (side, side, 1)),
        ("y", np.int32, 10, ()),
    ):
        path = folder / f"{name}-{num_clients}-{side}"
        if not path.exists():
            with open(path, "wb") as file:  # a map's pages would count as memory of this process
                for first in range(0, rows, _BLOCK * _SIZE):
                    count = min(_BLOCK * _SIZE, rows - first)
                    file.write(rng.integers(0, high, (count, *shape), dtype).tobytes())
        arrays.append(np.memmap(path, dtype, "r", shape=(rows, *shape)))
    return arrays[0], arrays[1]


def experiment(options: Options) -> program.Experiment:
    widths = {"widths": options.widths} if options.widths else {}
    model = _MODELS[options.model](10, **widths)

    def algorithm(hyper: Any) -> Any:
        work = local.epochs(optax.sgd(0.1), batch_size=options.batch_size)
        return _ALGORITHMS[options.algorithm](model, work)

    return program.Experiment(model, algorithm)


def inputs(num_clients: int) -> program.Inputs:
    """The inputs of a run whose clients' rows follow each other; nothing is evaluated."""
    order: Any = np.arange(num_clients * _SIZE, dtype=np.int32)[None]
    start: Any = np.arange(num_clients, dtype=np.int32)[None] * _SIZE
    size: Any = np.full_like(start, _SIZE)
    none: Any = np.zeros_like(start)
    valid = ClientShards(order, none, none)
    test = SharedExamples(order, none[:, :1], none[:, :1])
    seed: Any = np.zeros(1, np.int32)
    return program.Inputs({}, seed, ClientShards(order, start, size), valid, test, none)


def peak() -> float:
    """The largest resident memory so far in GB, with the pages of mapped files that were read."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmHWM"].split()[0]) / 1e6


def seconds(
    options: Options, made: program.Program, data: Any, given: program.Inputs, cohorts: Cohort
) -> list[float]:
    """The time of each segment but the first, which compiles."""
    training, times = made.init(data, given), []
    for first in range(0, cohorts.who.shape[1], options.every):
        part: Tree = jax.tree.map(lambda leaf, at=first: leaf[:, at : at + options.every], cohorts)
        began = time.perf_counter()
        training, outcome = made.segment(data, given, training, part)
        jax.block_until_ready((training, outcome))
        times.append(time.perf_counter() - began)
    return times[1:]


def tables(options: Options) -> Iterator[frame.Table]:
    if not options.folder:
        raise UsageError("--folder", "", "must be a folder with room for the federation")
    folder = Path(options.folder)
    x, y = made(folder, options.clients, options.side)
    num_rounds = options.every * (1 + options.segments)
    drawn = schedules.sampled(jax.random.key(0), options.clients, options.cohort, num_rounds)
    cohorts: Cohort = jax.tree.map(lambda leaf: np.asarray(leaf)[None], drawn)
    given, source = inputs(options.clients), stored.of_arrays(x, y)
    sampled, who = np.unique(cohorts.who, return_inverse=True)
    few, resident = inputs(len(sampled)), program.make(experiment(options))
    layout = Layout()
    streamed = streaming.streamed(
        program.make(experiment(options)), source, given, cohorts, layout, every=options.every
    )
    times = seconds(options, streamed, None, given, cohorts)
    memory = peak()
    rows = (sampled[:, None] * _SIZE + np.arange(_SIZE)).reshape(-1)
    data = jax.device_put(source.take(rows))
    named: Any = who.reshape(cohorts.who.shape).astype(np.int32)
    other = seconds(options, resident, data, few, cohorts._replace(who=named))
    speeds = [options.every / frame.median(each) for each in (times, other)]
    yield frame.Table(
        f"{options.cohort} of {options.clients} clients a round, {_SIZE} images each",
        [
            {
                "algorithm": options.algorithm,
                "model": options.model,
                "peak GB": memory,
                "rounds per s": speeds[0],
                "in memory": speeds[1],
                "share": speeds[0] / speeds[1],
            }
        ],
    )


if __name__ == "__main__":
    frame.main(tables, Options, __doc__)
