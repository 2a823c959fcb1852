"""The same federated work in simulators that people use and in ours, in turns.

benchmarks/peers/make_venvs.sh FOLDER
python -m benchmarks.peers --venvs=FOLDER

FedAvg on noise of the shapes of workloads.WORKLOADS: plain SGD, size weights, no evaluation, the
same number of local steps, which is checked. Peers: a loop of plain PyTorch (pytorch), pfl, FedLab
and Flower, each in an environment of its own. One peer at a time runs beside our engine, a round of
the peer and a round of ours in turns, so that a machine whose speed drifts is fair to both. The
ratio is of medians, ours over the peer's in client-steps per second; its spread is that of the
pairs of neighbouring rounds. A peer that fails is told in the table.
"""

import contextlib
import json
import os
import platform
import select
import signal
import statistics
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import jax
import numpy as np
from absl import app, flags

from benchmarks import workloads
from experiments.flags.flag import check_known
from experiments.parts import machine as machines
from fedjax_inv import models

FLAGS = flags.FLAGS

PEERS = ("pytorch", "pfl", "fedlab", "flower")
RUNNERS = Path(__file__).parent / "peers"


class PeerError(Exception):
    """A peer does not run."""


def command(name: str, workload: workloads.Workload, threads: int) -> list[str]:
    """What starts a peer."""
    job = workload._asdict() | {
        "num_rounds": FLAGS.warmup + FLAGS.rounds,
        "threads": threads,
        "device": "cuda" if jax.default_backend() == "gpu" else "cpu",
    }
    del job["shape"]
    python = Path(FLAGS.venvs).absolute() / name / "bin/python"
    return [str(python), str(RUNNERS / f"run_{name}.py"), json.dumps(job)]


class Peer:
    """A peer that has said hello."""

    def __init__(self, process: subprocess.Popen[str], log: IO[str], timeout: float) -> None:
        self._process, self._log, self._timeout = process, log, timeout
        hello = self._answer()
        self.num_parameters: int = hello["parameters"]
        self.versions: dict[str, str] = hello["versions"]

    def round(self) -> workloads.Round:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the answer, or none, says why
            print("go", file=self._process.stdin, flush=True)
        told = self._answer()
        if not np.isfinite(told["norm"]):
            raise PeerError("its network holds a NaN or an infinity")
        return workloads.Round(told["seconds"], told["steps"])

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], self._timeout)[0]:
            raise PeerError(f"no answer in {self._timeout:g} s")
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            said = self._log.read().strip().splitlines() or ["no error message"]
            raise PeerError(f"ended: {said[-1].strip()}")
        return json.loads(line)


@contextlib.contextmanager
def started(command: Sequence[str], threads: int, timeout: float) -> Iterator[Peer]:
    """A peer's process, ended afterwards with all that it started."""
    environment = os.environ | {
        "OMP_NUM_THREADS": str(threads),
        # Nothing of a benchmark is worth telling their makers.
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


def ratio_of(theirs: Sequence[float], ours: Sequence[float]) -> dict[str, Any]:
    """Our client-steps per second over theirs, and between which ratios single rounds lie."""
    single = [their / our for their, our in zip(theirs, ours, strict=True)]
    return {
        "ratio": statistics.median(theirs) / statistics.median(ours),
        "spread": f"{min(single):.2f}-{max(single):.2f}",
    }


def side(
    name: str, workload: workloads.Workload, engine: workloads.Engine, threads: int
) -> dict[str, Any]:
    """The row of one peer; says why where there is none."""
    row: dict[str, Any] = {"peer": name}
    try:
        with started(command(name, workload, threads), threads, FLAGS.timeout) as peer:
            row["versions"] = peer.versions
            if peer.num_parameters != engine.num_parameters:
                raise PeerError(
                    f"{peer.num_parameters} parameters, must be {engine.num_parameters}"
                )
            parties: dict[str, workloads.Party] = {name: peer, "ours": engine}
            seconds = workloads.in_turns(parties, FLAGS.warmup, FLAGS.rounds, workload.client_steps)
    except (PeerError, workloads.WrongWork) as error:
        return row | {"failed": str(error)}
    theirs, ours = seconds.values()
    return (
        row
        | workloads.figures(theirs, workload.client_steps, "peer ")
        | workloads.figures(ours, workload.client_steps, "ours ")
        | ratio_of(theirs, ours)
        | {"load": os.getloadavg()[0], "seconds": {"peer": theirs, "ours": ours}}
    )


def parse(text: str) -> workloads.Choice:
    """A choice of --ours."""
    chunk, slash, conv = text.partition("/")
    if not slash or not (chunk == "all" or chunk.isdecimal()) or conv not in models.LOWERINGS:
        raise ValueError(
            f"--ours={text}: must be auto, or clients at once and lowering, as 5/im2col"
        )
    return workloads.Choice(0 if chunk == "all" else int(chunk), conv)


def machine(threads: int) -> dict[str, Any]:
    return {
        "device": jax.devices()[0].device_kind,
        "machine": platform.machine(),
        "threads": threads,
        "devices": FLAGS.devices,
        "rounds": FLAGS.rounds,
        "shrink": FLAGS.shrink,
        "jax": jax.__version__,
        "data": "noise of the workloads' shapes",
        "load before": os.getloadavg()[0],
    }


def pin(threads: int, device: str) -> int:
    """Lets this process and all that it starts use `threads` cores, 0: all it may; how many."""
    allowed = sorted(os.sched_getaffinity(0))
    if threads > len(allowed):
        raise ValueError(f"--threads={threads}: must be at most {len(allowed)}, all there are here")
    os.sched_setaffinity(0, allowed[: threads or len(allowed)])
    if device == "cpu":
        jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", FLAGS.devices)
    # Leaves memory of a GPU to the peers.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    return threads or len(allowed)


def main(argv: list[str]) -> None:
    del argv
    for flag, known in (("workloads", workloads.WORKLOADS), ("peers", PEERS)):
        for value in getattr(FLAGS, flag):
            check_known(flag, value, known)
    threads = pin(FLAGS.threads, FLAGS.device)
    if FLAGS.device == "cuda" and jax.default_backend() != "gpu":
        raise ValueError("--device=cuda: JAX finds no GPU")
    fixed = None if FLAGS.ours == "auto" else parse(FLAGS.ours)
    report: dict[str, Any] = {"run": machine(threads), "peers": []}
    print(", ".join(f"{k}: {v}" for k, v in report["run"].items()))
    for name in FLAGS.workloads:
        workload = workloads.shrunk(workloads.WORKLOADS[name], FLAGS.shrink)
        data = workloads.noise(workload)
        mesh = machines.mesh(workloads.config_of(workload, FLAGS.devices).run)
        chosen = fixed or workloads.auto(workload, data, FLAGS.devices)
        engine = workloads.Engine(workload, chosen, data, mesh)
        rows = []
        for peer in FLAGS.peers:
            rows.append(side(peer, workload, engine, threads))
            report["peers"].append({"workload": name, "choice": chosen.label} | rows[-1])
            workloads.save(FLAGS.json, report)
        workloads.show(f"({name}) {workload.title}; ours is {chosen.label}", rows)


if __name__ == "__main__":
    flags.DEFINE_list("workloads", list(workloads.WORKLOADS), "Workloads.")
    flags.DEFINE_list("peers", list(PEERS), "Simulators to run beside ours.")
    flags.DEFINE_string("venvs", "", "The folder that make_venvs.sh filled.")
    flags.DEFINE_integer("rounds", 5, "Timed rounds of each.", lower_bound=1)
    flags.DEFINE_integer("warmup", 2, "Rounds before them, not timed.", lower_bound=1)
    flags.DEFINE_integer("threads", 0, "CPU cores for each; 0: all.", lower_bound=0)
    flags.DEFINE_integer(
        "devices", 1, "Devices that share our clients; a CPU makes as many as asked.", lower_bound=1
    )
    flags.DEFINE_enum("device", "auto", ["auto", "cpu", "cuda"], "auto: what JAX finds.")
    flags.DEFINE_string(
        "ours",
        "auto",
        "How ours works: auto, as train and sweep choose, or clients at once and lowering of "
        "convolutions, as 5/im2col or all/lax. client_axis.py compares them.",
    )
    flags.DEFINE_integer("shrink", 1, "Divides the clients, to try things out.", lower_bound=1)
    flags.DEFINE_float("timeout", 600, "Seconds that a peer may take to start, or for a round.")
    flags.DEFINE_string("json", "", "File for the figures.")
    app.run(main)
