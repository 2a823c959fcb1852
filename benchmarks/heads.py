"""Linear heads on frozen features, seeds x settings in one program, beside PyTorch in turns.

python -m benchmarks.heads --python=FOLDER/pytorch/bin/python

A round of FedAvg is a pass over the examples of three clients, in batches of 32. Peers are a loop
over runs, clients and batches in plain PyTorch, and PyTorch with all runs at once by torch.func, in
an environment of make_venvs.sh. Rounds of all take turns on the cores of this process (`taskset`).
"""

import dataclasses
import json
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from benchmarks import frame, peers, workloads
from benchmarks.frame import Row, flag
from fedjax_inv import models, platforms
from fedjax_inv.algorithms import fedavg
from fedjax_inv.fit import plan
from fedjax_inv.program import Program

SIZES, FEATURES, CLASSES, BATCH = (2000, 2100, 2300), 1280, 7, 32


@dataclasses.dataclass(frozen=True)
class Options:
    """The flags of this benchmark."""

    settings: int = flag(24, "Learning rates.")
    seeds: int = flag(2, "Seeds.")
    python: str = flag(sys.executable, "The interpreter of an environment with torch.")
    peers: tuple[str, ...] = flag(("loop", "vmapped"), "Peers.", ("loop", "vmapped"))
    rounds: int = flag(5, "Timed rounds of each.")


class Engine:
    """Our engine, compiled."""

    def __init__(self, options: Options) -> None:
        rng = np.random.default_rng(0)
        clients = [
            (rng.random((size, FEATURES), np.float32), rng.integers(0, CLASSES, size))
            for size in SIZES
        ]
        grid: dict[str, Any] = {
            "learning_rate": np.linspace(0.01, 0.1, options.settings),
            "seed": range(options.seeds),
        }
        model, most = models.mlp(CLASSES, widths=()), 2 + options.rounds * len(options.peers)
        whole = plan(fedavg.fedavg, model, clients, rounds=most, grid=grid)
        self._plan, self._number = whole.compile(), 0
        assert isinstance(self._plan.program, Program)
        self._program = self._plan.program
        self._training = self._program.init(self._plan.data, self._plan.inputs)
        self.round()

    def round(self) -> float:
        """Play a round, and return the seconds that it took."""
        part, arguments = self._plan.part(self._number), (self._plan.data, self._plan.inputs)
        began = time.perf_counter()
        made = self._program.rounds(*arguments, self._training, part)
        self._training, _ = jax.block_until_ready(made)
        self._number += 1
        return time.perf_counter() - began


def rows(options: Options) -> Iterator[Row]:
    """A row for each peer."""
    engine, number = Engine(options), options.settings * options.seeds
    steps = number * sum(-(-size // BATCH) for size in SIZES)
    job = {
        "sizes": SIZES,
        "features": FEATURES,
        "classes": CLASSES,
        "batch_size": BATCH,
        "num_seeds": options.seeds,
        "rates": np.linspace(0.01, 0.1, options.settings).tolist(),
        "threads": platforms.cores(),
        "num_rounds": 1 + options.rounds,
        "device": "cpu",
    }
    for peer in options.peers:
        command = [options.python, str(peers.RUNNERS / "run_heads.py"), json.dumps(job), peer]
        with peers.started(command, 600) as other:
            first = other.round()
            assert first == workloads.Round(first.seconds, steps), first
            turns = [(other.round().seconds, engine.round()) for _ in range(options.rounds)]
        theirs, ours = 1e6 / steps * np.median(turns, 0)
        yield {
            "runs": f"{options.settings} x {options.seeds}",
            "peer": peer,
            "peer, us a client-step": theirs,
            "ours, us a client-step": ours,
            "ratio": theirs / ours,
        }


if __name__ == "__main__":
    platforms.make_devices(platforms.cores())
    frame.main(rows, Options, __doc__)
