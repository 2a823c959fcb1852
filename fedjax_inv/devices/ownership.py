"""Which device has which clients (or slots of a cohort): blocks of consecutive ones, evenly."""

from typing import TypeVar

import numpy as np

from fedjax_inv.types import Array

T = TypeVar("T", int, Array, np.ndarray)


def clients_per_device(num_clients: int, num_devices: int) -> int:
    """Return how many clients a device has room for.

    Args:
      num_clients: N, at least 1.
      num_devices: k, at least 1.
    """
    return -(-num_clients // num_devices)


def owner(client: T, num_clients: int, num_devices: int) -> T:
    """Return the device that owns a client.

    Args:
      client: the number of the client, or an array of numbers.
      num_clients: N, at least 1.
      num_devices: k, at least 1.
    """
    return client // clients_per_device(num_clients, num_devices)
