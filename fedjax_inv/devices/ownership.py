"""Which device has which clients: a device has whole lanes, and a lane has consecutive clients.

N clients (or slots of a cohort, or parts of a shared shard) are cut into lanes of s = ceil(N / L)
consecutive clients, of which only the last may have fewer. The lanes are dealt to k devices in
blocks of ceil(number of lanes / k). L does not depend on the devices, and so neither do the lanes.
With L = 0 there is one lane for each device.
"""

from typing import TypeVar

import numpy as np

from fedjax_inv import checks
from fedjax_inv.types import Array

T = TypeVar("T", int, Array, np.ndarray)

_MOST_LANES, _FEWEST_LANES, _BYTES_OF_LANES = 64, 8, 2**28


def number_of_lanes(num_bytes: int) -> int:
    """Return the number L of lanes for networks of so many bytes.

    It is 64, and less, down to 8, where the sums of 64 lanes need more than 256 MiB.
    """
    lanes = _MOST_LANES
    while lanes > _FEWEST_LANES and lanes * num_bytes > _BYTES_OF_LANES:
        lanes //= 2
    return lanes


def lane_size(num_clients: int, num_devices: int, lanes: int = 0) -> int:
    """Return the size of a lane, ceil(N / L).

    Args:
      num_clients: N, at least 1.
      num_devices: k, at least 1.
      lanes: L; 0 for one on each device.

    Raises:
      UsageError: if a count is too small.
    """
    checks.integer("num_clients", num_clients)
    checks.integer("num_devices", num_devices)
    checks.integer("lanes", lanes, 0)
    return -(-num_clients // (lanes or num_devices))


def lanes_per_device(num_clients: int, num_devices: int, lanes: int = 0) -> int:
    """Return how many lanes a device has room for; the arguments are those of `lane_size`."""
    size = lane_size(num_clients, num_devices, lanes)
    count = -(-num_clients // size)
    return -(-count // num_devices)


def clients_per_device(num_clients: int, num_devices: int, lanes: int = 0) -> int:
    """Return how many clients a device has room for; the arguments are those of `lane_size`."""
    size = lane_size(num_clients, num_devices, lanes)
    return lanes_per_device(num_clients, num_devices, lanes) * size


def first_client(device: T, num_clients: int, num_devices: int, lanes: int = 0) -> T:
    """Return the first client of a device; N or more if it has none.

    Args:
      device: the number of the device, or an array of numbers.
      num_clients: N, at least 1.
      num_devices: k, at least 1.
      lanes: L, as in `lane_size`.

    Raises:
      UsageError: if a count is too small.
    """
    return device * clients_per_device(num_clients, num_devices, lanes)


def owner(client: T, num_clients: int, num_devices: int, lanes: int = 0) -> T:
    """Return the device that owns a client.

    Args:
      client: the number of the client, or an array of numbers.
      num_clients: N, at least 1.
      num_devices: k, at least 1.
      lanes: L, as in `lane_size`.

    Raises:
      UsageError: if a count is too small.
    """
    return client // clients_per_device(num_clients, num_devices, lanes)
