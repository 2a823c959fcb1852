"""The devices that `fit` uses, by the rules of the binaries."""

import contextlib

import jax

from fedjax_inv import devices, platforms
from fedjax_inv.checks import UsageError
from fedjax_inv.devices import Layout
from fedjax_inv.types import Variables


def make_cores_devices(number: int | None) -> None:
    """Make each core of a CPU a device, or `number` of them, if JAX has not started yet."""
    wanted = min(number or platforms.cores(), platforms.cores())
    if wanted > 1 and getattr(jax.config, "jax_num_cpu_devices", 0) < 1:
        with contextlib.suppress(RuntimeError):  # JAX has started
            jax.config.update("jax_num_cpu_devices", wanted)


def layout(
    number: int | None, num_runs: int, slots: int, num_clients: int, network: Variables
) -> Layout:
    """Return the layout of runs and clients on devices.

    Args:
      number: the number of devices; None for all that help.
      num_runs: R.
      slots: S, the clients that attend a round.
      num_clients: C.
      network: the shapes of a network.

    Raises:
      UsageError: if there are fewer devices.
    """
    there = jax.local_devices()
    if number is not None and number > len(there):
        text = f"must be at most {len(there)}, the devices that JAX has"
        if jax.default_backend() == "cpu":
            text += "; `fit` makes a device of each core only if nothing uses JAX before"
        raise UsageError("devices", number, text)
    is_cpu = jax.default_backend() == "cpu"
    there = there[: platforms.cores() if number is None and is_cpu else number]
    num_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(network))
    lanes = devices.number_of_lanes(num_bytes) if is_cpu else 0
    shape = devices.shape_of_mesh(num_runs, slots, len(there), most=lanes)
    # Where few clients attend, a device may own more of them than another, which then waits.
    own = slots == num_clients > 1 and shape[1] > 1
    return Layout(devices.mesh(shape, there), own, lanes, num_runs)
