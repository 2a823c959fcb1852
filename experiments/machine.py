"""The length of a run, and the machine: devices, processes, and the process that writes files.

Every process runs the same program on the same flags. The runs of a cell and their clients are
divided among all devices of the processes (`Layout.of`). If several devices share the
clients of a run and all clients attend every round, each device holds only the examples and states
of its own clients; otherwise every device holds all of them (--hold).
"""

import os

import jax
import numpy as np
from jax.experimental import multihost_utils

from fedjax_inv import platforms
from fedjax_inv.checks import UsageError
from fedjax_inv.devices import Devices

from .config import Config
from .errors import flag_error, in_flags

_DETERMINISTIC = "--xla_gpu_deterministic_ops"
# Whether a device holds only its own clients; None: where all attend.
_OWN = {"auto": None, "own": True, "all": False, "stream": False}


def prepare(chosen: Config) -> None:
    """Sets what --devices and --deterministic ask of XLA.

    Each CPU core becomes a JAX device: a second core makes a convolution little faster, but it
    trains a second client at full speed. Call this before JAX starts. GPUs have no use for that.
    JAX_NUM_CPU_DEVICES comes before.
    """
    if chosen.machine.deterministic:
        known = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{known} {_DETERMINISTIC}=true".strip()
    number = platforms.cores()
    if chosen.machine.devices != "auto":
        number = int(chosen.machine.devices)
    elif chosen.machine.coordinator_address.rpartition(":")[0] in (
        "localhost",
        "127.0.0.1",
        "[::1]",
    ):
        # Processes on one machine share its cores, unless their affinities say more.
        number = max(1, number // chosen.machine.num_processes)
    platforms.make_devices(number)


def devices(chosen: Config) -> Devices:
    """The devices that runs may use, as `fit` takes them."""

    def number(text: str) -> int | None:
        return None if text == "auto" else int(text)

    return Devices(
        number(chosen.machine.devices),
        own=_OWN[chosen.machine.hold],
        stream={"auto": None, "stream": True}.get(chosen.machine.hold, False),
        client_chunk=number(chosen.machine.client_chunk),
        run_chunk=number(chosen.machine.run_chunk),
        precision=None if chosen.machine.precision == "auto" else chosen.machine.precision,
        quick_to_compile=chosen.machine.compile == "quick",
    )


def connect(chosen: Config) -> None:
    """Connects the processes of --num_processes or --distributed, if there are several.

    Raises UsageError if --distributed finds none, or if process 0 cannot be reached.
    """
    is_alone = not (chosen.machine.distributed or chosen.machine.num_processes > 1)
    if is_alone or jax.distributed.is_initialized():  # by an earlier row of a study
        return
    # On CPUs, collectives between processes need gloo.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if not chosen.machine.distributed:
        address = chosen.machine.coordinator_address
        try:
            jax.distributed.initialize(
                address, chosen.machine.num_processes, chosen.machine.process_id
            )
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
        return platforms.devices(
            None if chosen.machine.devices == "auto" else int(chosen.machine.devices)
        )
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
