"""Random keys: a key is used for one thing.

A run's key is `jax.random.key(seed)`; `rounds` derives a key for each round, exchange and client.
`split(key, n)[i]` is `fold_in(key, i)`, so whoever derives from a key that others split takes a
`stream` of it.
"""

import zlib

import jax

from fedjax_inv.types import Array


def stream(key: Array, name: str) -> Array:
    """Return the key of a named stream of random numbers, none of those of `split`."""
    return jax.random.fold_in(key, zlib.crc32(name.encode()))
