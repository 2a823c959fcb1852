"""One device or several, one process or several: where arrays live and who writes files.

Every process runs the same program on the same flags; the clients are split over all their
devices, with their examples and states where all of them attend, and all else is whole on each.
"""

import os

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh

from experiments.experiment.groups import Config, Running
from fedjax_inv import checks
from fedjax_inv.checks import UsageError
from fedjax_inv.devices import Layout


def prepare(run: Running) -> None:
    """Makes a device of each of the CPU cores that --devices asks for.

    Convolutions on a CPU gain little from a second core, a second client gains all of it. This must
    come before JAX starts, and means nothing to GPUs.
    """
    if run.devices > 1:
        cores = len(os.sched_getaffinity(0))
        jax.config.update("jax_num_cpu_devices", min(run.devices, cores))


def connect(run: Running) -> None:
    """Joins the other processes of --num_processes, if there are any."""
    if run.num_processes > 1:
        # On CPUs the collectives between processes need an implementation of their own.
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(run.coordinator_address, run.num_processes, run.process_id)


def mesh(run: Running) -> Mesh | None:
    """The devices that share the clients; None if there is one. Raises UsageError for too many."""
    available = len(jax.devices())
    count = available if run.num_processes > 1 else run.devices
    if count > available:
        raise UsageError(f"--devices={count}: must be at most {available}, all there are here")
    return jax.make_mesh((count,), ("clients",), (AxisType.Auto,)) if count > 1 else None


def layout(config: Config, num_clients: int) -> Layout | None:
    """The devices that share the clients, and what each of them holds; None if there is one."""
    over = mesh(config.run)
    return None if over is None else Layout(over, holds_own(config, num_clients))


def holds_own(config: Config, num_clients: int) -> bool:
    """Whether each of several devices holds its own clients alone."""
    # Where few attend, those of one device may be more than those of another, which then waits.
    all_attend = config.participation.slots(num_clients) == num_clients > 1
    return {"auto": all_attend, "own": True, "all": False}[config.run.hold]


def memory() -> int:
    """Bytes of this process's first device; of the machine where that has none of its own."""
    stats = jax.local_devices()[0].memory_stats()
    return (stats or {}).get("bytes_limit", 0) or checks.machine_bytes()


def leads() -> bool:
    """Whether this process is the one that writes files and talks."""
    return jax.process_index() == 0


def agree(value: int) -> int:
    """The largest `value` of all processes, which wait for each other here."""
    if jax.process_count() == 1:
        return value
    return int(np.max(multihost_utils.process_allgather(np.asarray(value))))
