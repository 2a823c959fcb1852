"""The length of a run, and the machine: devices, processes, and the process that writes files.

Every process runs the same program on the same flags. The runs of a cell and their clients are
divided among all devices of the processes (`Layout.of`). If several devices share the
clients of a run and all clients attend every round, each device holds only the examples and states
of its own clients; otherwise every device holds all of them (--hold).
"""

import dataclasses
import os

import jax
import numpy as np
from jax.experimental import multihost_utils

from fedjax_inv import platforms
from fedjax_inv.checks import UsageError
from fedjax_inv.devices import Devices

from ..flags.configuration import Config
from ..flags.flag import (
    SEED,
    at_least,
    check_different,
    flag,
    flag_error,
    in_flags,
    is_whole,
    number_or,
)

_DETERMINISTIC = "--xla_gpu_deterministic_ops"
_CHUNK = number_or("auto")

# Whether a device holds only its own clients; None: where all attend.
_OWN = {"auto": None, "own": True, "all": False, "stream": False}


@dataclasses.dataclass(frozen=True)
class Running:
    """The length, seeds, folder and machine of a run."""

    rounds: int = flag(
        50, "Communication rounds; with --resume a run may be given more of them.", at_least(1)
    )
    seeds: tuple[int, ...] = flag(
        (0,),
        "Each number seeds one run: its network, environments, partition, cohorts and minibatches.",
        SEED,
    )
    run_dir: str = flag(
        "",
        "The folder of the results; default: runs/, the run's name, and the flags that differ from "
        "the defaults; of a study or map: runs/ and its name.",
    )
    resume: bool = flag(
        False, "Continue the run in --run_dir, bit for bit; if there is none, a new one starts."
    )
    checkpoint_every: int = flag(
        0, "Rounds between checkpoints, a multiple of eval_every; 0: eval_every.", at_least(0)
    )
    keep_checkpoints: str = flag(
        "1",
        "How many checkpoints stay at the end of a run: the newest ones, or all; --state=ROUND of "
        "evaluate reads any of them.",
        number_or("all", lowest=1),
    )
    nonfinite: str = flag(
        "stop",
        "When a client's loss or update becomes NaN or infinite: stop the program; drop what the "
        "client sends in that round; or mark the run as diverged, never to be selected, and let "
        "the others go on.",
        choices=("stop", "drop", "mark"),
    )
    client_chunk: str = flag(
        "auto",
        "Clients trained at once on a device; 0: all; auto: 1 on a CPU, else all. Fewer need less "
        "memory.",
        _CHUNK,
    )
    run_chunk: str = flag(
        "auto",
        "Runs (seeds x hyperparameters) trained at once on a device, likewise.",
        _CHUNK,
    )
    devices: str = flag(
        "auto",
        "Devices that share the runs and their clients; on a CPU, cores; with several processes on "
        "CPUs, those of each; auto: all that help and fit into memory.",
        number_or("auto", lowest=1),
    )
    hold: str = flag(
        "auto",
        "Whose examples and states each device holds. own: those of its own clients, which it "
        "alone trains; all: those of all, for less waiting if few attend; stream: the states of "
        "all, and the examples that the next rounds need, while the others stay on the host, with "
        "one process; auto: stream if the examples do not fit into memory and there is one "
        "process, else own if several devices share the clients of a run and all attend each "
        "round, else all.",
        choices=("auto", "own", "all", "stream"),
    )
    precision: str = flag(
        "auto",
        "Precision of float32 products and convolutions on GPUs and TPUs: default (TF32; on TPUs "
        "bfloat16), high (TF32; on TPUs three products of bfloat16) or highest (float32; on TPUs "
        "six products); auto: what the algorithm needs. CPUs always compute float32.",
        choices=("auto", *platforms.PRECISIONS),
    )
    compile: str = flag(
        "full",
        "How programs are compiled for a CPU: full; quick, in less time, to code that runs longer, "
        "which is faster in all if a run takes seconds.",
        choices=("full", "quick"),
    )
    deterministic: bool = flag(
        False,
        "On GPUs, use only operations that give the same bits each time (XLA's "
        f"{_DETERMINISTIC}); without it, a GPU may round sums differently from run to run.",
    )
    distributed: bool = flag(
        False, "Find the other processes as SLURM, a TPU pod, Open MPI or Kubernetes name them."
    )
    coordinator_address: str = flag("", "host:port of process 0, if there are several.")
    num_processes: int = flag(
        1,
        "Processes, on one machine or many, whose devices share the runs and their clients.",
        at_least(1),
    )
    process_id: int = flag(0, "The number of this process; process 0 writes.", at_least(0))


def check(chosen: Config) -> None:
    """Raises UsageError for flags that do not fit each other."""
    check_different("seeds", chosen.seeds)
    if chosen.checkpoint_every % chosen.eval_every:
        text = f"must be a multiple of --eval_every={chosen.eval_every}"
        raise flag_error("checkpoint_every", chosen.checkpoint_every, text)
    if chosen.process_id >= chosen.num_processes:
        text = f"must be below --num_processes={chosen.num_processes}"
        raise flag_error("process_id", chosen.process_id, text)
    several = chosen.num_processes > 1
    if chosen.hold == "stream" and (several or chosen.distributed):
        raise flag_error("hold", chosen.hold, "must be another with several processes")
    if chosen.distributed and several:
        text = "must be left out with --distributed, which finds the processes"
        raise flag_error("num_processes", chosen.num_processes, text)
    address = chosen.coordinator_address
    host, _, port = address.rpartition(":")
    if several and (not (host and is_whole(port, 1) and int(port) < 2**16) or " " in address):
        text = f"must be host:port of process 0, with --num_processes={chosen.num_processes}"
        raise flag_error("coordinator_address", address, text)


def prepare(chosen: Config) -> None:
    """Sets what --devices and --deterministic ask of XLA.

    Each CPU core becomes a JAX device: a second core makes a convolution little faster, but it
    trains a second client at full speed. Call this before JAX starts. GPUs have no use for that.
    JAX_NUM_CPU_DEVICES comes before.
    """
    if chosen.deterministic:
        known = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{known} {_DETERMINISTIC}=true".strip()
    number = platforms.cores()
    if chosen.devices != "auto":
        number = int(chosen.devices)
    elif chosen.coordinator_address.rpartition(":")[0] in ("localhost", "127.0.0.1", "[::1]"):
        # Processes on one machine share its cores, unless their affinities say more.
        number = max(1, number // chosen.num_processes)
    platforms.make_devices(number)


def devices(chosen: Config) -> Devices:
    """The devices that runs may use, as `fit` takes them."""

    def number(text: str) -> int | None:
        return None if text == "auto" else int(text)

    return Devices(
        number(chosen.devices),
        own=_OWN[chosen.hold],
        stream={"auto": None, "stream": True}.get(chosen.hold, False),
        client_chunk=number(chosen.client_chunk),
        run_chunk=number(chosen.run_chunk),
        precision=None if chosen.precision == "auto" else chosen.precision,
        quick_to_compile=chosen.compile == "quick",
    )


def connect(chosen: Config) -> None:
    """Connects the processes of --num_processes or --distributed, if there are several.

    Raises UsageError if --distributed finds none, or if process 0 cannot be reached.
    """
    if not (chosen.distributed or chosen.num_processes > 1):
        return
    # On CPUs, collectives between processes need gloo.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if not chosen.distributed:
        address = chosen.coordinator_address
        try:
            jax.distributed.initialize(address, chosen.num_processes, chosen.process_id)
        except (ValueError, RuntimeError) as error:
            text = f"cannot be used ({str(error).splitlines()[0]}); must be host:port of process 0"
            raise flag_error("coordinator_address", address, text) from None
        return
    try:
        jax.distributed.initialize()
    except (ValueError, RuntimeError) as error:
        text = f"found no processes ({str(error).splitlines()[0]}); must be started by srun or the "
        text += "like, or be replaced by --coordinator_address, --num_processes and --process_id"
        raise flag_error("distributed", True, text) from None


def devices_of(chosen: Config) -> list[jax.Device]:
    """The devices that cells may use. Raises UsageError if there are too few."""
    try:
        return platforms.devices(None if chosen.devices == "auto" else int(chosen.devices))
    except UsageError as error:
        raise in_flags(error, "", {"devices": "devices"}) from None


def leads() -> bool:
    """Whether this process writes files and prints: one process does, for all."""
    return jax.process_index() == 0


def agree(value: int) -> int:
    """The largest `value` over all processes, which wait for each other here."""
    if jax.process_count() == 1:
        return value
    return int(np.max(multihost_utils.process_allgather(np.asarray(value))))
