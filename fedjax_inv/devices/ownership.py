"""Which device owns a client: of k devices and C clients, device d owns the d-th block of clients.

Each block has ceil(C / k) clients; only the last ones may have fewer or none.
"""

from typing import TypeVar

import numpy as np

from fedjax_inv import checks
from fedjax_inv.types import Array

T = TypeVar("T", int, Array, np.ndarray)


def clients_per_device(num_clients: int, num_devices: int) -> int:
    """Return the size of a block, ceil(C / k).

    Args:
      num_clients: C, at least 1.
      num_devices: k, at least 1.

    Raises:
      UsageError: if a count is below 1.
    """
    checks.integer("num_clients", num_clients)
    checks.integer("num_devices", num_devices)
    return -(-num_clients // num_devices)


def first_client(device: T, num_clients: int, num_devices: int) -> T:
    """Return the first client of a device's block; C or more if the block is empty.

    Args:
      device: the number of the device, or an array of numbers.
      num_clients: C, at least 1.
      num_devices: k, at least 1.

    Raises:
      UsageError: if a count is below 1.
    """
    return device * clients_per_device(num_clients, num_devices)


def owner(client: T, num_clients: int, num_devices: int) -> T:
    """Return the device that owns a client.

    Args:
      client: the number of the client, or an array of numbers.
      num_clients: C, at least 1.
      num_devices: k, at least 1.

    Raises:
      UsageError: if a count is below 1.
    """
    return client // clients_per_device(num_clients, num_devices)
