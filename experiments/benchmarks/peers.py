"""The same federated work in simulators that people use and in ours, in turns.

experiments/benchmarks/peers/make_venvs.sh FOLDER
python -m experiments.benchmarks.peers --venvs=FOLDER

FedAvg on noise of the shapes named in SETTINGS: plain SGD, size weights, no evaluation, the same
number of local steps, which is checked. Peers: a loop of plain PyTorch (pytorch), pfl, FedLab and
Flower, each in an environment of its own. One peer at a time runs beside our engine, a round of the
peer and a round of ours in turns, so that a machine whose speed drifts is fair to both. The ratio
is of medians, ours over the peer's in client-steps per second; its spread is that of the pairs of
neighbouring rounds. A peer that fails is told in the table.

--ours=all compares our own choices (clients at once x convolution lowering) with what `auto` picks.
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
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tabulate import tabulate

from experiments import build, devices, program, tune
from experiments.benchmarks import lowerings
from experiments.config import Config
from fedjax_inv import clients, local, models, rounds, schedules
from fedjax_inv.algorithms import fedavg
from fedjax_inv.data import federation
from fedjax_inv.types import Cohort, Examples, Federation, Model

FLAGS = flags.FLAGS

PEERS = ("pytorch", "pfl", "fedlab", "flower")
RUNNERS = Path(__file__).parent / "peers"


class Setting(NamedTuple):
    """The work of a round."""

    network: str
    shape: tuple[int, ...]
    num_clients: int
    num_examples: int  # of each client
    cohort: int
    batch_size: int
    num_epochs: int
    learning_rate: float

    @property
    def client_steps(self) -> int:
        """Local steps of a round, of all its clients."""
        return self.cohort * self.num_epochs * -(-self.num_examples // self.batch_size)


SETTINGS = {
    # CIFAR-10 as in pfl's benchmarks (Granqvist et al. 2024).
    "a": Setting("pfl_cifar", (32, 32, 3), 1000, 50, 50, 10, 1, 0.1),
    "b": Setting("mlp", (28, 28, 1), 60, 500, 60, 32, 1, 0.1),
    "c": Setting("lenet", (28, 28, 1), 10, 300, 10, 32, 1, 0.1),
}


def shrunk(setting: Setting, divisor: int) -> Setting:
    """Fewer clients, otherwise the same."""
    return setting._replace(
        num_clients=max(1, setting.num_clients // divisor),
        cohort=max(1, setting.cohort // divisor),
    )


class Choice(NamedTuple):
    """How our engine does the work."""

    chunk: int  # clients at once, 0: all
    conv: str  # one of models.LOWERINGS

    @property
    def label(self) -> str:
        """As --ours takes it."""
        return f"{self.chunk or 'all'}/{self.conv}"


class Round(NamedTuple):
    """A timed round."""

    seconds: float
    client_steps: int


class PeerError(Exception):
    """A peer does not run, or does other work."""


def model_of(setting: Setting, conv: str) -> Model:
    if setting.network == "mlp":
        return models.mlp(10)
    return lowerings.NETWORKS[setting.network].model(conv)


def noise(setting: Setting) -> Federation:
    """Examples in float32, as the peers hold them."""
    generator = np.random.default_rng(0)
    num_examples = setting.num_clients * setting.num_examples
    x = generator.random((num_examples, *setting.shape), np.float32)
    y = generator.integers(0, 10, num_examples, np.int32)
    parts = np.split(np.arange(num_examples), setting.num_clients)
    return Federation(Examples(jnp.asarray(x), jnp.asarray(y)), *federation.rows_and_mask(parts))


class Ours:
    """Our engine on a setting's work; the devices of the mesh share the clients."""

    def __init__(
        self, setting: Setting, choice: Choice, data: Federation, mesh: Mesh | None = None
    ) -> None:
        self._setting = setting
        model = model_of(setting, choice.conv)
        work = local.epochs(
            optax.sgd(setting.learning_rate),
            batch_size=setting.batch_size,
            num_epochs=setting.num_epochs,
        )
        algorithm = fedavg.fedavg(model, work)
        axis = clients.chunked(choice.chunk or setting.cohort)
        if mesh is not None:
            axis = clients.sharded(mesh.axis_names[0], axis)

        def advance(
            state: rounds.State, cohort: Cohort, data: Federation
        ) -> tuple[rounds.State, tuple[rounds.Report, ...]]:
            return rounds.run(algorithm, state, cohort, data, axis=axis)

        on_all = advance if mesh is None else clients.over(mesh, advance)
        self._advance = jax.jit(on_all, donate_argnums=0)
        variables = model.init(jax.random.key(0), data.data.x[:1])
        self.num_parameters = sum(leaf.size for leaf in jax.tree.leaves(variables.params))
        state = rounds.init(algorithm, variables, jax.random.key(1), setting.num_clients)
        schedule = schedules.sampled(jax.random.key(2), setting.num_clients, setting.cohort, 100)
        if mesh is not None:
            whole = NamedSharding(mesh, PartitionSpec())
            state, schedule, data = jax.device_put((state, schedule, data), whole)
        self._state, self._schedule, self._data = state, schedule, data
        self._num_rounds = 0

    def round(self) -> Round:
        """One more round; the first one compiles."""
        now = self._num_rounds % self._schedule.who.shape[0]
        cohort = jax.block_until_ready(jax.tree.map(lambda a: a[now : now + 1], self._schedule))
        began = time.perf_counter()
        self._state, (report,) = jax.block_until_ready(
            self._advance(self._state, cohort, self._data)
        )
        seconds = time.perf_counter() - began
        self._num_rounds += 1
        batches = -(-np.asarray(report.size * report.present) // self._setting.batch_size)
        return Round(seconds, int(batches.sum()) * self._setting.num_epochs)


def config_of(setting: Setting) -> Config:
    """The setting as flags of train and sweep."""
    return Config(
        devices=FLAGS.devices,
        clients=setting.num_clients,
        cohort=setting.cohort,
        batch_size=setting.batch_size,
        local_epochs=setting.num_epochs,
    )


def auto(setting: Setting, data: Federation) -> Choice:
    """What train and sweep choose by default."""
    config = config_of(setting)
    hyper = {"learning_rate": setting.learning_rate, "server_learning_rate": 1.0}
    cell = build.Cell("fedavg", {}, None, (build.Run(0, hyper),))
    held = program.Holdings(data.rows[None], data.mask[None])
    inputs = program.Inputs(
        {name: jnp.array([value]) for name, value in hyper.items()},
        jnp.zeros(1, jnp.int32),
        *(held, held, held),
        jnp.zeros((1, setting.num_clients), jnp.int32),
    )
    make = partial(program.make, config, cell, model_of(setting, "auto"), 1)
    inputs, examples = devices.everywhere((inputs, data.data), devices.mesh(config))
    chunk = tune.choose(config, cell, make, examples, inputs).clients
    return Choice(0 if chunk >= setting.cohort else chunk, "auto")


def command(name: str, setting: Setting, threads: int) -> list[str]:
    """What starts a peer."""
    job = setting._asdict() | {
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

    def round(self) -> Round:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the answer, or none, says why
            print("go", file=self._process.stdin, flush=True)
        told = self._answer()
        if not np.isfinite(told["norm"]):
            raise PeerError("its network holds a NaN or an infinity")
        return Round(told["seconds"], told["steps"])

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


def in_turns(
    parties: dict[str, Any], warmup: int, num_rounds: int, client_steps: int
) -> dict[str, list[float]]:
    """Seconds of every round after the warm-up, a round of each party in turns."""
    seconds: dict[str, list[float]] = {name: [] for name in parties}
    for index in range(warmup + num_rounds):
        for name, party in parties.items():
            timed = party.round()
            if timed.client_steps != client_steps:
                raise PeerError(
                    f"{name}: {timed.client_steps} local steps a round, must be {client_steps}"
                )
            if index >= warmup:
                seconds[name].append(timed.seconds)
    return seconds


def ratio_of(theirs: Sequence[float], ours: Sequence[float]) -> dict[str, Any]:
    """Our client-steps per second over theirs, and between which ratios single rounds lie."""
    single = [their / our for their, our in zip(theirs, ours, strict=True)]
    return {
        "ratio": statistics.median(theirs) / statistics.median(ours),
        "spread": f"{min(single):.2f}-{max(single):.2f}",
    }


def figures_of(who: str, seconds: Sequence[float], client_steps: int) -> dict[str, Any]:
    """Columns of one party."""
    return {
        f"{who} median s": statistics.median(seconds),
        f"{who} min s": min(seconds),
        f"{who} steps/s": client_steps / statistics.median(seconds),
    }


def beside(name: str, setting: Setting, engine: Ours, threads: int) -> dict[str, Any]:
    """The row of one peer; says why where there is none."""
    row: dict[str, Any] = {"peer": name}
    try:
        with started(command(name, setting, threads), threads, FLAGS.timeout) as peer:
            row["versions"] = peer.versions
            if peer.num_parameters != engine.num_parameters:
                raise PeerError(
                    f"{peer.num_parameters} parameters, must be {engine.num_parameters}"
                )
            parties = {name: peer, "ours": engine}
            seconds = in_turns(parties, FLAGS.warmup, FLAGS.rounds, setting.client_steps)
    except PeerError as error:
        return row | {"failed": str(error)}
    theirs, ours = seconds.values()
    return (
        row
        | figures_of("peer", theirs, setting.client_steps)
        | figures_of("ours", ours, setting.client_steps)
        | ratio_of(theirs, ours)
        | {"load": os.getloadavg()[0], "seconds": {"peer": theirs, "ours": ours}}
    )


def choices(setting: Setting) -> list[Choice]:
    """Every fixed choice of --chunks and --convs that differs from the others."""
    chunks = sorted({0 if size >= setting.cohort else size for size in map(int, FLAGS.chunks)})
    convs = ["auto"] if setting.network == "mlp" else FLAGS.convs
    return [Choice(chunk, conv) for conv in convs for chunk in chunks]


def our_choices(
    setting: Setting, data: Federation, chosen: Choice, mesh: Mesh | None
) -> list[dict[str, Any]]:
    """Rows of the fixed choices and of the chosen one."""
    engines = {choice.label: Ours(setting, choice, data, mesh) for choice in choices(setting)}
    engines[f"auto ({chosen.label})"] = Ours(setting, chosen, data, mesh)
    seconds = in_turns(engines, FLAGS.warmup, FLAGS.rounds, setting.client_steps)
    fastest = min(statistics.median(times) for label, times in seconds.items())
    return [
        {"clients at once/conv": label}
        | figures_of("ours", times, setting.client_steps)
        | {"over fastest": statistics.median(times) / fastest, "seconds": times}
        for label, times in seconds.items()
    ]


def parse(text: str) -> Choice:
    """A choice of --ours."""
    chunk, slash, conv = text.partition("/")
    if not slash or not (chunk == "all" or chunk.isdecimal()) or conv not in models.LOWERINGS:
        raise ValueError(
            f"--ours={text}: must be auto, all, or clients at once and lowering, as 5/im2col"
        )
    return Choice(0 if chunk == "all" else int(chunk), conv)


def show(title: str, rows: list[dict[str, Any]]) -> None:
    told = [{k: v for k, v in row.items() if not isinstance(v, dict | list)} for row in rows]
    print(f"\n{title}")
    print(tabulate(told, headers="keys", tablefmt="github", floatfmt=".3g"), flush=True)


def machine(threads: int) -> dict[str, Any]:
    return {
        "device": jax.devices()[0].device_kind,
        "machine": platform.machine(),
        "threads": threads,
        "devices": FLAGS.devices,
        "rounds": FLAGS.rounds,
        "shrink": FLAGS.shrink,
        "jax": jax.__version__,
        "data": "noise of the settings' shapes",
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
    for flag, known in (("settings", SETTINGS), ("peers", PEERS), ("convs", models.LOWERINGS)):
        for value in getattr(FLAGS, flag):
            build.check_known(flag, value, known)
    threads = pin(FLAGS.threads, FLAGS.device)
    if FLAGS.device == "cuda" and jax.default_backend() != "gpu":
        raise ValueError("--device=cuda: JAX finds no GPU")
    fixed = None if FLAGS.ours in ("auto", "all") else parse(FLAGS.ours)
    report: dict[str, Any] = {"run": machine(threads), "peers": [], "ours": []}
    print(", ".join(f"{k}: {v}" for k, v in report["run"].items()))
    for name in FLAGS.settings:
        setting = shrunk(SETTINGS[name], FLAGS.shrink)
        data, mesh = noise(setting), devices.mesh(config_of(setting))
        chosen = fixed or auto(setting, data)
        title = (
            f"({name}) {setting.network}: {setting.cohort} of {setting.num_clients} clients a "
            f"round, {setting.num_examples} examples each, batch {setting.batch_size}, "
            f"{setting.client_steps} client-steps"
        )
        if FLAGS.ours == "all":
            rows = our_choices(setting, data, chosen, mesh)
            report["ours"] += [{"setting": name} | row for row in rows]
            show(f"{title}; our choices", rows)
        rows = []
        engine = Ours(setting, chosen, data, mesh)
        for peer in FLAGS.peers:
            rows.append(beside(peer, setting, engine, threads))
            report["peers"].append({"setting": name, "choice": chosen.label} | rows[-1])
            if FLAGS.json:
                Path(FLAGS.json).write_text(json.dumps(report, indent=1) + "\n")
        if rows:
            show(f"{title}; ours is {chosen.label}", rows)
    if FLAGS.json:
        Path(FLAGS.json).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    flags.DEFINE_list("settings", list(SETTINGS), "Settings.")
    flags.DEFINE_list("peers", list(PEERS), "Simulators to run beside ours; empty: none.")
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
        "How ours works: auto, as train and sweep choose; clients at once and lowering of "
        "convolutions, as 5/im2col or all/lax; all: auto, and a table of it beside all of "
        "--chunks x --convs.",
    )
    flags.DEFINE_list("chunks", ["1", "5", "0"], "Clients at once that --ours=all tries; 0: all.")
    flags.DEFINE_list(
        "convs", ["im2col", "canonical"], "Lowerings that --ours=all tries; lax: slow on a CPU."
    )
    flags.DEFINE_integer("shrink", 1, "Divides the clients, to try things out.", lower_bound=1)
    flags.DEFINE_float("timeout", 600, "Seconds that a peer may take to start, or for a round.")
    flags.DEFINE_string("json", "", "File for the figures.")
    app.run(main)
