"""One device or several, one process or several: where arrays live and who writes files.

Every process runs the same program on the same flags; the clients are split over all their
devices, and everything else is kept whole on each.
"""

import os
from typing import TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from experiments.groups import Running
from fedjax_inv import checks
from fedjax_inv.checks import UsageError

T = TypeVar("T")


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


def replicated(tree: T, over: Mesh | None) -> T:
    """A tree of equal arrays on each process, as arrays that are whole on every device."""
    if over is None:
        return tree
    whole = NamedSharding(over, PartitionSpec())

    def put(leaf: jax.Array) -> jax.Array:
        if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(put(jax.random.key_data(leaf)))
        return jax.device_put(np.asarray(leaf), whole)

    return jax.tree.map(put, tree)


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
