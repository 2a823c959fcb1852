"""The length of a run, and the machine: devices, processes, and the process that writes files.

Every process runs the same program on the same flags. The clients are divided among all devices of
the processes. If all clients attend every round, each device holds only the examples and states of
its own clients; otherwise every device holds all of them (--hold).
"""

import dataclasses
import os

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh

from experiments.flags.flag import (
    SEED,
    at_least,
    check_different,
    flag,
    flag_error,
    is_whole,
    number_or,
)
from experiments.flags.outside import trust_flag
from fedjax_inv import checks, platforms
from fedjax_inv.devices import Layout

_DETERMINISTIC = "--xla_gpu_deterministic_ops"
_CHUNK = number_or("auto", "measure")


@dataclasses.dataclass(frozen=True)
class Running:
    """The length, seeds, folder and machine of a run."""

    rounds: int = flag(
        50, "Communication rounds; with --resume a run may be given more of them.", at_least(1)
    )
    seeds: tuple[int, ...] = flag(
        (0,), "Each seeds network, environments, partition, cohorts and minibatches.", SEED
    )
    run_dir: str = flag(
        "",
        "The folder of the results; default: runs/, the run's name, and the flags that differ from "
        "the defaults.",
    )
    resume: bool = flag(False, "Continue the run in --run_dir, bit for bit.")
    trust_code: tuple[str, ...] = trust_flag()
    checkpoint_every: int = flag(
        0, "Rounds between checkpoints, a multiple of eval_every; 0: eval_every.", at_least(0)
    )
    nonfinite: str = flag(
        "stop",
        "When a client's loss becomes NaN or infinite: stop the program; drop the client from that "
        "round; or mark the run as diverged, never to be selected, and let the others go on.",
        choices=("stop", "drop", "mark"),
    )
    client_chunk: str = flag(
        "auto",
        "Clients trained at once on a device; 0: all; auto: 1 on a CPU, else as many as fit; "
        "measure: the fastest by a stopwatch.",
        _CHUNK,
    )
    run_chunk: str = flag(
        "auto",
        "Runs (seeds x hyperparameters) at once; 0: all; auto: 1 on a CPU, else as many as fit; "
        "measure: the fastest by a stopwatch.",
        _CHUNK,
    )
    devices: int = flag(1, "Devices that share the clients; on a CPU, cores.", at_least(1))
    hold: str = flag(
        "auto",
        "Whose examples and states each of several devices holds: those of its own clients, which "
        "it alone trains; or of all, for less waiting if few attend; auto: own if all clients "
        "attend each round.",
        choices=("auto", "own", "all"),
    )
    precision: str = flag(
        "auto",
        "Precision of float32 products and convolutions on GPUs and TPUs: default (TF32; on TPUs "
        "bfloat16), high (TF32; on TPUs three products of bfloat16) or highest (float32; on TPUs "
        "six products); auto: what the algorithm needs. CPUs always compute float32.",
        choices=("auto", *platforms.PRECISIONS),
    )
    deterministic: bool = flag(
        False,
        "On GPUs, use only operations that give the same bits each time (XLA's "
        f"{_DETERMINISTIC}); without it, a GPU may round sums differently from run to run.",
    )
    coordinator_address: str = flag("", "host:port of process 0, if there are several.")
    num_processes: int = flag(
        1, "Processes, on one machine or many, whose devices share the clients.", at_least(1)
    )
    process_id: int = flag(0, "The number of this process; process 0 writes.", at_least(0))


def check(chosen: Running, eval_every: int) -> None:
    """Raises UsageError for flags that do not fit each other."""
    check_different("seeds", chosen.seeds)
    if chosen.checkpoint_every % eval_every:
        text = f"must be a multiple of --eval_every={eval_every}"
        raise flag_error("checkpoint_every", chosen.checkpoint_every, text)
    if chosen.process_id >= chosen.num_processes:
        text = f"must be below --num_processes={chosen.num_processes}"
        raise flag_error("process_id", chosen.process_id, text)
    if chosen.num_processes == 1:
        return
    address = chosen.coordinator_address
    host, _, port = address.rpartition(":")
    if not (host and is_whole(port, 1) and int(port) < 2**16) or " " in address:
        raise flag_error("coordinator_address", address, "must be host:port of process 0")
    for name, chunk in (("client_chunk", chosen.client_chunk), ("run_chunk", chosen.run_chunk)):
        if not chunk.isdecimal():
            text = f"must be a number with --num_processes={chosen.num_processes}"
            raise flag_error(name, chunk, f"{text}, as processes may disagree")


def without_effect(chosen: Running) -> dict[str, str]:
    """The flags of this group that have no effect, and why."""
    idle = {}
    if chosen.num_processes == 1 and chosen.devices == 1:
        idle["hold"] = "has no effect without --devices or --num_processes above 1"
    if chosen.num_processes == 1:
        idle["coordinator_address"] = "has no effect without --num_processes above 1"
    return idle


def prepare(chosen: Running) -> None:
    """Sets what --devices and --deterministic ask of XLA.

    Each CPU core becomes a JAX device: a second core makes a convolution little faster, but it
    trains a second client at full speed. Call this before JAX starts.
    """
    if chosen.deterministic:
        known = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{known} {_DETERMINISTIC}=true".strip()
    if chosen.devices > 1:
        cores = len(os.sched_getaffinity(0))
        jax.config.update("jax_num_cpu_devices", min(chosen.devices, cores))


def precision(chosen: Running, needed: str) -> str:
    """The precision of products. needed: the algorithm's, for --precision=auto."""
    return needed if chosen.precision == "auto" else chosen.precision


def connect(chosen: Running) -> None:
    """Connects the processes of --num_processes, if there are several."""
    if chosen.num_processes > 1:
        # On CPUs, collectives between processes need gloo.
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(
            chosen.coordinator_address, chosen.num_processes, chosen.process_id
        )


def mesh(chosen: Running) -> Mesh | None:
    """The devices that share the clients; None for one. Raises UsageError if there are too few."""
    available = len(jax.devices())
    count = available if chosen.num_processes > 1 else chosen.devices
    if count > available:
        raise flag_error(
            "devices", count, f"must be at most {available}, the devices of this machine"
        )
    return jax.make_mesh((count,), ("clients",), (AxisType.Auto,)) if count > 1 else None


def layout(chosen: Running, num_clients: int, slots: int) -> Layout | None:
    """The layout of the clients on several devices; None if there is one device.

    slots: the number of clients that attend a round.
    """
    over = mesh(chosen)
    return None if over is None else Layout(over, holds_own(chosen, num_clients, slots))


def holds_own(chosen: Running, num_clients: int, slots: int) -> bool:
    """Whether each of several devices holds only the examples and states of its own clients."""
    # If few clients attend, one device may have more of them than another, which then waits.
    all_attend = slots == num_clients > 1
    return {"auto": all_attend, "own": True, "all": False}[chosen.hold]


def memory() -> int:
    """The memory in bytes of this process's first device, or of the machine if that is unknown."""
    stats = jax.local_devices()[0].memory_stats()
    return (stats or {}).get("bytes_limit", 0) or checks.machine_bytes()


def leads() -> bool:
    """Whether this process writes files and prints: one process does, for all."""
    return jax.process_index() == 0


def agree(value: int) -> int:
    """The largest `value` over all processes, which wait for each other here."""
    if jax.process_count() == 1:
        return value
    return int(np.max(multihost_utils.process_allgather(np.asarray(value))))
