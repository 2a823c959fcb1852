"""The same federated work in other simulators and in ours, round by round in turns.

benchmarks/peers/make_venvs.sh FOLDER
python -m benchmarks.peers --venvs=FOLDER

The work is FedAvg on noise with the shapes of workloads.WORKLOADS: plain SGD, weights by size, no
evaluation. The benchmark checks that the numbers of local steps are equal. Peers are a loop of
plain PyTorch (pytorch), PyTorch with all clients at once (pytorch_vmapped, pytorch_compiled), pfl,
FedLab and Flower, each in its own environment. Rounds of one peer and of our engine take turns, so
that a machine whose speed drifts is fair to both. The ratio is our median of client-steps per
second over the peer's; its spread is over pairs of neighbouring rounds. If a peer fails, the table
says why.
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
from benchmarks.frame import flag
from fedjax_inv.checks import UsageError

# Name -> environment, and the runner with its words
PEERS = {
    "pytorch": ("pytorch", "run_pytorch.py"),
    "pytorch_vmapped": ("pytorch", "run_vmapped.py"),
    "pytorch_compiled": ("pytorch", "run_vmapped.py", "compiled"),
    "pfl": ("pfl", "run_pfl.py"),
    "fedlab": ("fedlab", "run_fedlab.py"),
    "flower": ("flower", "run_flower.py"),
}
RUNNERS = Path(__file__).parent / "peers"


@dataclasses.dataclass(frozen=True)
class Options:
    """The flags of this benchmark."""

    workloads: tuple[str, ...] = flag(
        tuple(workloads.WORKLOADS), "Workloads of workloads.py.", choices=workloads.WORKLOADS
    )
    peers: tuple[str, ...] = flag(tuple(PEERS), "Simulators to run beside ours.", choices=PEERS)
    venvs: str = flag("", "The folder that make_venvs.sh filled; none: this environment.")
    rounds: int = flag(5, "Timed rounds of each.")
    warmup: int = flag(2, "Rounds before them, not timed.")
    threads: int = flag(0, "CPU cores for each; 0: all.")
    device: str = flag("auto", "auto: the one that JAX finds.", choices=("auto", "cpu", "cuda"))
    at_once: int = flag(-1, "Clients that ours trains at once; 0: all; -1: as train does.")
    timeout: float = flag(600.0, "Seconds that a peer may take to start, or for a round.")


class PeerError(Exception):
    """A peer that does not run, or does other work."""


def words(options: Options, name: str, workload: workloads.Workload, threads: int) -> list[str]:
    """The command line of a peer."""
    job = workload._asdict() | {
        "num_rounds": options.warmup + options.rounds,
        "threads": threads,
        "device": "cuda" if jax.default_backend() == "gpu" else "cpu",
    }
    del job["shape"]
    venv, runner, *more = PEERS[name]
    there = str(Path(options.venvs).absolute() / venv / "bin/python")
    python = there if options.venvs else sys.executable
    return [python, str(RUNNERS / runner), json.dumps(job), *more]


class Peer:
    """A peer that has started."""

    def __init__(self, process: subprocess.Popen[str], log: IO[str], timeout: float) -> None:
        self._process, self._log, self._timeout = process, log, timeout
        hello = self._answer()
        self.num_parameters: int = hello["parameters"]
        self.versions: dict[str, str] = hello["versions"]

    def round(self) -> workloads.Round:
        assert self._process.stdin is not None
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
def started(command: Sequence[str], threads: int, timeout: float) -> Iterator[Peer]:
    """Starts a peer, and ends it afterwards with all processes that it started."""
    environment = os.environ | {
        "OMP_NUM_THREADS": str(threads),
        # A benchmark sends no telemetry.
        "FLWR_TELEMETRY_ENABLED": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    environment.pop("PYTHONPATH", None)
    with tempfile.TemporaryFile("w+") as log:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                text=True,
                start_new_session=True,
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


def figures(who: str, seconds: Sequence[float], client_steps: int) -> dict[str, Any]:
    """The columns of one party."""
    return {
        f"{who} median s": frame.median(seconds),
        f"{who} min s": min(seconds),
        f"{who} steps/s": client_steps / frame.median(seconds),
    }


def row_of(
    options: Options,
    name: str,
    workload: workloads.Workload,
    engine: workloads.Engine,
    threads: int,
) -> dict[str, Any]:
    """The row of one peer, with the reason if it failed."""
    row: dict[str, Any] = {"peer": name}
    try:
        command_line = words(options, name, workload, threads)
        with started(command_line, threads, options.timeout) as peer:
            row["version"] = peer.versions.get(name, peer.versions["torch"])
            if peer.num_parameters != engine.num_parameters:
                raise PeerError(
                    f"{peer.num_parameters} parameters, must be {engine.num_parameters}"
                )
            parties = {"peer": peer.round, "ours": engine.round}
            found = frame.in_turns(parties, options.rounds, options.warmup)
        steps = {one.client_steps for each in found.values() for one in each}
        if steps != {workload.client_steps}:
            raise PeerError(f"{steps} local steps a round, must be {workload.client_steps}")
    except PeerError as error:
        return row | {"failed": str(error)}
    times = {who: [one.seconds for one in each] for who, each in found.items()}
    for who, seconds in times.items():
        row |= figures(who, seconds, workload.client_steps)
    single = [theirs / ours for theirs, ours in zip(*times.values(), strict=True)]
    return row | {
        "ratio": frame.median(times["peer"]) / frame.median(times["ours"]),
        "spread": f"{min(single):.2f}-{max(single):.2f}",
    }


def pin(options: Options) -> int:
    """Limits this process and its children to --threads cores, and returns their number."""
    allowed = sorted(os.sched_getaffinity(0))[: options.threads or None]
    os.sched_setaffinity(0, allowed)
    if options.device == "cpu":
        jax.config.update("jax_platforms", "cpu")
    # Leaves memory on a GPU for the peers.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    return len(allowed)


def tables(options: Options) -> Iterator[frame.Table]:
    threads = pin(options)  # before JAX starts
    if options.device == "cuda" and jax.default_backend() != "gpu":
        raise UsageError("--device=cuda", ..., "must be auto or cpu: JAX finds no GPU")
    for name in options.workloads:
        workload = workloads.WORKLOADS[name]
        job = workloads.Job(workload, at_once=options.at_once, dtype=np.float32)
        engine = workloads.Engine(job)
        rows = [row_of(options, peer, workload, engine, threads) for peer in options.peers]
        device = jax.devices()[0].device_kind
        yield frame.Table(f"({name}) {workload.title}; {device}, {threads} threads", rows)


if __name__ == "__main__":
    frame.main(tables, Options, __doc__)
