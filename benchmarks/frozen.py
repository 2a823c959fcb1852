"""FedAvg's linear head on frozen features: accuracy and time by fit, a PyTorch loop, and Flower.

benchmarks/peers/make_venvs.sh FOLDER flower
python -m benchmarks.frozen --dataset=pacs.npz --python=FOLDER/flower/bin/python

Each domain of --held_out is the test in turn, and each other domain a client. All get the same
features, standardised by the training rows, weigh clients by their size, and have equal passes,
batches and rates, and first heads of one distribution; draws are their own. Seconds are those of
all seeds: by the clock, and of processors (of Flower those of its server and clients, without Ray's
own). A start is compiling (fit), or Flower's own with its first round, in which processes import;
it then has a round fewer in the other columns. The loop has one thread.
"""

import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import frame, peers
from benchmarks.frame import Row, flag
from fedjax_inv import models, platforms
from fedjax_inv.algorithms import fedavg
from fedjax_inv.data import sources
from fedjax_inv.fit import plan


@dataclasses.dataclass(frozen=True)
class Options:
    """The flags of this benchmark."""

    dataset: str = flag("pacs.npz", "Features with domains, as fedjax-inv features writes them.")
    held_out: tuple[str, ...] = flag(("art_painting", "cartoon", "sketch"), "Domains.")
    python: str = flag(sys.executable, "The interpreter of an environment with torch and flwr.")
    peers: tuple[str, ...] = flag(("pytorch", "flower"), "Peers.", ("pytorch", "flower"))
    seeds: int = flag(3, "Seeds.")
    rounds: int = flag(20, "Rounds, each a pass over the examples.")
    batch_size: int = flag(32, "Examples in a batch.")
    learning_rate: float = flag(0.01, "The clients' rate.")


def by_fit(options: Options, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    """The accuracy of each seed, the seconds before and in the rounds, those of processors."""
    *clients, test = [(arrays[f"x{at}"], arrays[f"y{at}"]) for at in range(len(arrays) // 2)]
    began = time.perf_counter()
    made = plan(
        fedavg.fedavg,
        models.linear(int(test[1].max()) + 1),
        clients,
        test=test,
        rounds=options.rounds,
        evaluations=options.rounds,
        batch_size=options.batch_size,
        learning_rate=options.learning_rate,
        grid={"seed": range(options.seeds)},
    ).compile()
    compiled = time.perf_counter(), time.process_time()
    scores = made.train(callbacks=()).history["test_score"][:, -1]
    seconds, processor = time.perf_counter() - compiled[0], time.process_time() - compiled[1]
    start = compiled[0] - began
    return {"scores": scores.tolist(), "start": start, "seconds": seconds, "processor": processor}


def rows(options: Options) -> Iterator[Row]:
    """A row for each domain and library, then one for each library over all domains."""
    dataset = sources.load(options.dataset)
    names = ("seeds", "rounds", "batch_size", "learning_rate")
    job = {name: getattr(options, name) for name in names} | {"threads": platforms.cores()}
    found: dict[str, list[dict[str, Any]]] = {}
    for held_out in options.held_out:
        is_test = dataset.domain == dataset.domains.index(held_out)
        x = (dataset.x - dataset.x[~is_test].mean(0)) / np.maximum(dataset.x[~is_test].std(0), 1e-6)
        parts = [*(dataset.domain == at for at in np.unique(dataset.domain[~is_test])), is_test]
        arrays = {f"x{at}": x[part] for at, part in enumerate(parts)}
        arrays |= {f"y{at}": dataset.y[part] for at, part in enumerate(parts)}
        results = {"fit": by_fit(options, arrays)}
        with tempfile.TemporaryDirectory() as folder:
            np.savez(Path(folder) / "arrays.npz", **arrays)
            for peer in options.peers:
                words = [f"{folder}/arrays.npz", json.dumps(job), peer]
                command = [options.python, str(peers.RUNNERS / "run_frozen.py"), *words]
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
                results[peer] = json.loads(done.stdout.splitlines()[-1])
        for library, result in results.items():
            found.setdefault(library, []).append(result)
            yield _row(library, held_out, [result])
    for library, of_domains in found.items():
        yield _row(library, "mean, or in all", of_domains)


def _row(library: str, held_out: str, results: list[dict[str, Any]]) -> Row:
    scores = 100 * np.mean([result["scores"] for result in results], 0)
    columns = {"s of the rounds": "seconds", "s of processors": "processor", "s to start": "start"}
    return {
        "held out": held_out,
        "library": library,
        "accuracy, %": f"{scores.mean():.1f} ± {scores.std(ddof=min(1, len(scores) - 1)):.1f}",
        **{head: sum(result[name] for result in results) for head, name in columns.items()},
    }


if __name__ == "__main__":
    platforms.make_devices(platforms.cores())
    frame.main(rows, Options, __doc__)
