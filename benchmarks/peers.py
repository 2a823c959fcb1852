"""The same federated work in other simulators and in ours, round by round in turns.

benchmarks/peers/make_venvs.sh FOLDER
python -m benchmarks.peers --venvs=FOLDER

The work is FedAvg on noise with the shapes of workloads.WORKLOADS: plain SGD, weights by size, no
evaluation. The benchmark checks that the numbers of local steps are equal. Peers are a loop of
plain PyTorch (pytorch), PyTorch with all clients at once (pytorch_vmapped, pytorch_compiled), pfl
and Flower, each in its own environment. Rounds of one peer and of our engine take turns, so
that a machine whose speed drifts is fair to both, on the cores of this process (`taskset`) or the
device that JAX finds (`JAX_PLATFORMS`). The ratio is the peer's median time of a round over ours;
its spread is over pairs of neighbouring rounds. If a peer fails, the table says why.
"""

import contextlib
import dataclasses
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import jax
import numpy as np

from benchmarks import frame, workloads
from benchmarks.frame import Row, flag
from fedjax_inv import platforms

# Name -> environment, and the runner with its words
PEERS = {
    "pytorch": ("pytorch", "run_pytorch.py", "loop"),
    "pytorch_vmapped": ("pytorch", "run_pytorch.py", "vmapped"),
    "pytorch_compiled": ("pytorch", "run_pytorch.py", "compiled"),
    "pfl": ("pfl", "run_pfl.py"),
    "flower": ("flower", "run_flower.py"),
}
RUNNERS = Path(__file__).parent / "peers"


@dataclasses.dataclass(frozen=True)
class Options:
    """The flags of this benchmark."""

    workloads: tuple[str, ...] = flag(
        tuple(workloads.WORKLOADS), "Workloads of workloads.py.", workloads.WORKLOADS
    )
    peers: tuple[str, ...] = flag(tuple(PEERS), "Simulators to run beside ours.", PEERS)
    venvs: str = flag("", "The folder that make_venvs.sh filled; none: this environment.")
    rounds: int = flag(5, "Timed rounds of each.")
    warmup: int = flag(2, "Rounds before them, not timed.")
    timeout: float = flag(600.0, "Seconds that a peer may take to start, or for a round.")


class PeerError(Exception):
    """A peer that does not run, or does other work."""


class Peer:
    """A peer that has started."""

    def __init__(self, process: subprocess.Popen[str], log: IO[str], timeout: float) -> None:
        self._process, self._log, self._timeout = process, log, timeout
        hello = self._answer()
        self.num_parameters: int = hello["parameters"]
        self.versions: dict[str, str] = hello["versions"]

    def round(self) -> workloads.Round:
        with contextlib.suppress(BrokenPipeError):  # _answer reports why
            print("go", file=self._process.stdin, flush=True)
        answer = self._answer()
        if not np.isfinite(answer["norm"]):
            raise PeerError("its network holds a NaN or an infinity")
        return workloads.Round(answer["seconds"], answer["steps"])

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], self._timeout)[0]:
            raise PeerError(f"no answer in {self._timeout:g} s")
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            messages = self._log.read().strip().splitlines() or ["no error message"]
            raise PeerError(f"ended: {messages[-1].strip()}")
        return json.loads(line)


@contextlib.contextmanager
def started(command: Sequence[str], timeout: float) -> Iterator[Peer]:
    """Starts a peer, and ends it afterwards with all processes that it started."""
    environment = os.environ | {"OMP_NUM_THREADS": str(platforms.cores())}
    # A benchmark sends no telemetry.
    environment |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    environment.pop("PYTHONPATH", None)
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with tempfile.TemporaryFile("w+") as log:
        try:
            process = subprocess.Popen(
                command, **pipes, stderr=log, env=environment, start_new_session=True
            )
        except OSError as error:
            raise PeerError(f"no {error.filename}; see make_venvs.sh") from None
        try:
            yield Peer(process, log, timeout)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=60)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def row_of(
    options: Options, name: str, workload: workloads.Workload, engine: workloads.Engine
) -> Row:
    """The row of one peer, with the reason if it failed."""
    row: Row = {"work": workload.title, "peer": name}
    venv, runner, *more = PEERS[name]
    python = sys.executable
    if options.venvs:
        python = str(Path(options.venvs).absolute() / venv / "bin/python")
    job = workload._asdict() | {
        "num_rounds": options.warmup + options.rounds,
        "threads": platforms.cores(),
        "device": "cuda" if jax.default_backend() == "gpu" else "cpu",
    }
    del job["shape"]
    command = [python, str(RUNNERS / runner), json.dumps(job), *more]
    try:
        with started(command, options.timeout) as peer:
            row["version"] = peer.versions.get(name, peer.versions["torch"])
            network = jax.tree.leaves(engine.state.server.variables.params)
            found, needed = peer.num_parameters, sum(leaf.size for leaf in network)
            if found != needed:
                raise PeerError(f"{found} parameters, must be {needed}")
            turns = [(peer.round(), engine.round()) for _ in range(options.warmup + options.rounds)]
        steps = {one.client_steps for turn in turns for one in turn}
        if steps != {workload.client_steps}:
            raise PeerError(f"{steps} local steps a round, must be {workload.client_steps}")
    except PeerError as error:
        return row | {"failed": str(error)}
    times = np.array([[one.seconds for one in turn] for turn in turns[options.warmup :]])
    theirs, ours = 1e3 * np.median(times, 0)
    ratios = times[:, 0] / times[:, 1]
    return row | {
        "peer, ms a round": theirs,
        "ours, ms a round": ours,
        "ratio": theirs / ours,
        "spread": f"{min(ratios):.2f}-{max(ratios):.2f}",
    }


def rows(options: Options) -> Iterator[Row]:
    for name in options.workloads:
        workload = workloads.WORKLOADS[name]
        engine = workloads.Engine(workloads.Job(workload, floats=True))
        for peer in options.peers:
            yield row_of(options, peer, workload, engine)


if __name__ == "__main__":
    frame.main(rows, Options, __doc__)
