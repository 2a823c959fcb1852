"""The length of a run, and the machine: devices, processes, and the process that writes files.

Every process runs the same program on the same flags. The runs of a cell and their clients are
divided among all devices of the processes (`Layout.of`). If several devices share the
clients of a run and all clients attend every round, each device holds only the examples and states
of its own clients; otherwise every device holds all of them (--hold).
"""

import jax
import numpy as np
from jax.experimental import multihost_utils

from fedjax_inv import platforms
from fedjax_inv.checks import UsageError
from fedjax_inv.devices import Devices

from .. import start
from ..config import Machine
from ..errors import flag_error, in_flags

_HERE = ("localhost", "127.0.0.1", "[::1]")  # hosts that are this machine
# Whether a device holds only its own clients; None: where all attend.
_OWN = {"auto": None, "own": True, "all": False, "stream": False}


def prepare(machine: Machine) -> None:
    """Makes the devices that --devices asks for.

    Each CPU core becomes a JAX device: a second core makes a convolution little faster, but it
    trains a second client at full speed. Call this before JAX starts. GPUs have no use for that.
    JAX_NUM_CPU_DEVICES comes before.
    """
    number = platforms.cores()
    if machine.devices != "auto":
        number = int(machine.devices)
    elif not machine.is_alone and machine.processes[0].rpartition(":")[0] in _HERE:
        # Processes on one machine share its cores, unless their affinities say more.
        number = max(1, number // int(machine.processes[2]))
    platforms.make_devices(number)


def devices(machine: Machine, precision: str = "auto") -> Devices:
    """The devices that runs may use, as `fit` takes them. precision: --precision."""

    def number(text: str) -> int | None:
        return None if text == "auto" else int(text)

    client_chunk, run_chunk = (*machine.chunk, "auto")[:2]
    return Devices(
        number(machine.devices),
        own=_OWN[machine.hold],
        stream={"auto": None, "stream": True}.get(machine.hold, False),
        client_chunk=number(client_chunk),
        run_chunk=number(run_chunk),
        precision=None if precision in ("auto", "bfloat16") else precision,
        quick_to_compile=machine.compile == "quick",
    )


def connect(machine: Machine) -> None:
    """Connects the processes of --processes, if there are several.

    Raises UsageError if auto finds none, or if process 0 cannot be reached.
    """
    if machine.is_alone or jax.distributed.is_initialized():  # by an earlier row of a study
        return
    # On CPUs, collectives between processes need gloo.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    start.expect_aborts()
    try:
        if machine.processes == ("auto",):
            jax.distributed.initialize()
        else:
            address, number, count = machine.processes
            jax.distributed.initialize(address, int(count), int(number))
    except (ValueError, RuntimeError) as error:
        text = f"cannot be used ({str(error).splitlines()[0]}); must name host:port of process 0, "
        text += "or be auto in processes that srun or the like has started"
        raise flag_error("processes", machine.processes, text) from None


def devices_of(machine: Machine) -> list[jax.Device]:
    """The devices that cells may use. Raises UsageError if there are too few."""
    try:
        return platforms.devices(None if machine.devices == "auto" else int(machine.devices))
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
