"""The client axis: how the slots of a cohort are laid over time, memory and devices.

An axis assigns the slots to devices, computes `fn` of each slot and sums the uploads. The rest of
the package does not depend on how. Axis letter: s slots of one device.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from fedjax_inv import checks
from fedjax_inv.types import Array, Tree

Fn = Callable[[Tree], tuple[Tree, Tree]]  # one slot -> (upload, result)
Add = Callable[[Tree, Tree, Tree], Tree]  # (sums, uploads [c, ...], slots [c, ...]) -> sums

_WHOLE = PartitionSpec()


class Assignment(NamedTuple):
    """The slots that one device works on."""

    slots: Tree  # [s, ...] of the S slots; zeros where the device has fewer
    local_index: Array  # [s] where the client of each slot lies among the clients on the device
    gather: Callable[[Tree], Tree]  # [s, ...] -> [S, ...], the same on every device


class Axis(NamedTuple):
    """How slots are laid over memory and devices."""

    at_once: int = 0  # how many slots of a device are computed at once; 0: all
    name: str | None = None  # the mesh axis of the devices; None: there is one
    replicated: bool = True  # whether the examples and states of all clients are on every device

    @property
    def num_devices(self) -> int:
        """k, how many devices share the slots."""
        return 1 if self.name is None else jax.lax.axis_size(self.name)

    @property
    def device(self) -> Array | int:
        """The number of this device."""
        return 0 if self.name is None else jax.lax.axis_index(self.name)

    def is_mine(self, number: int) -> Array:
        """Return which of `number` clients this device owns, [number] bool."""
        return owner(_everyone(number), number, self.num_devices) == self.device

    def local_clients(self, num_clients: int) -> Array:
        """Return the clients on this device, consecutive; numbers of C or more are no clients."""
        if self.replicated:
            return _everyone(num_clients)
        room = clients_per_device(num_clients, self.num_devices)
        return self.device * room + _everyone(room)

    def assign(self, slots: Tree, who: Array, present: Array, num_clients: int) -> Assignment:
        """Return the slots of this device.

        If all of C clients are on every device, the slots are shared evenly, in their order.
        Otherwise the device that owns a slot's client has it. `slots` have a leading S; who [S]
        int32 are their clients, and present [S] bool says which count.
        """
        if self.name is None:
            return Assignment(slots, who, lambda results: results)
        length, k = _length(slots), self.num_devices
        if self.replicated:
            is_mine = self.is_mine(length)
            room = clients_per_device(length, k)
        else:
            is_mine = present & (owner(who, num_clients, k) == self.device)
            room = min(length, clients_per_device(num_clients, k))
        place = jnp.cumsum(is_mine)  # from 1
        # The j-th slot of this device, or the padding slot. A search, not a scatter: XLA's CPU
        # compiler gets some scatters wrong under vmap.
        index = jnp.searchsorted(
            place, jnp.arange(1, room + 1), side="left", method="scan_unrolled"
        )
        my_slots, local_index = jax.tree.map(lambda a: a[index], _pad((slots, who), length + 1))
        if not self.replicated:
            share = clients_per_device(num_clients, k)
            local_index = jnp.clip(local_index - self.device * share, 0, share - 1)

        def gather(results: Tree) -> Tree:
            # Not a write into a slice, which vmap turns into a scatter.
            return self.total(_where(is_mine, jax.tree.map(lambda a: a[place - 1], results)))

        return Assignment(my_slots, local_index, gather)

    def total(self, tree: Tree) -> Tree:
        """Sum a tree over devices; of booleans, return whether any device has a true one."""
        name = self.name
        if name is None:
            return tree
        return jax.tree.map(lambda leaf: jax.lax.psum(leaf, name).astype(leaf.dtype), tree)

    def fold(self, fn: Fn, add: Add, init: Tree, slots: Tree) -> tuple[Tree, Tree]:
        """Compute fn of the slots of this device, [s, ...], and fold the uploads of all devices.

        An absent slot is all zeros, and so are the first sums, `init`. It returns (the sums over
        all devices, the results [s, ...] of this one).
        """
        sums, results = _in_chunks(fn, add, init, slots, self.at_once)
        return self.total(sums), results


def vmapped() -> Axis:
    """Return an axis that computes all slots of a device at once, with memory for all of them."""
    return Axis()


def chunked(size: int) -> Axis:
    """Return an axis that computes `size` slots at a time, at least 1, under one scan.

    It needs memory for `size` clients. Size 1 computes a client without vmap: on a CPU that keeps
    the parameters of one client in the cache.
    """
    checks.integer("size", size)
    return Axis(size)


def sharded(name: str, inner: Axis | None = None) -> Axis:
    """Return an axis that splits the slots evenly over devices; all clients are on every device.

    It is for use inside `over(mesh, ...)`, whose axis of devices has the name. A device folds its
    slots by the inner axis, by default `vmapped()`.
    """
    return (inner or vmapped())._replace(name=name)


def owned(name: str, inner: Axis | None = None) -> Axis:
    """Return an axis that gives each slot to the device that owns its client.

    Only the examples and states of its own clients need to be on a device (`owner` says which
    clients it owns). All else is as in `sharded`. Each device has room for as many slots as it may
    get, so with few clients in the cohort it also computes absent slots.
    """
    return (inner or vmapped())._replace(name=name, replicated=False)


def over(
    mesh: Mesh, fn: Callable[..., Tree], in_specs: Tree = _WHOLE, out_specs: Tree = _WHOLE
) -> Callable[..., Tree]:
    """Return `fn` of arrays run on every device of a mesh.

    The devices share the work of the axes `sharded` and `owned` inside `fn`, and each of them
    repeats everything else. The specs say where arguments and results lie, as in `jax.shard_map`;
    by default whole on every device.
    """
    return jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def _length(slots: Tree) -> int:
    return jax.tree.leaves(slots)[0].shape[0]


def _everyone(number: int) -> Array:
    return jnp.arange(number, dtype=jnp.int32)


def _pad(slots: Tree, length: int) -> Tree:
    """Append absent slots to `slots` up to `length`."""

    def leaf(a: Array) -> Array:
        return jnp.pad(a, [(0, length - a.shape[0])] + [(0, 0)] * (a.ndim - 1))

    return slots if _length(slots) == length else jax.tree.map(leaf, slots)


def _where(is_kept: Array, tree: Tree) -> Tree:
    """Return the entries [S, ...] that are kept, and zeros in place of the others."""

    def leaf(a: Array) -> Array:
        return jnp.where(is_kept.reshape(-1, *[1] * (a.ndim - 1)), a, jnp.zeros_like(a))

    return jax.tree.map(leaf, tree)


def _in_chunks(fn: Fn, add: Add, init: Tree, slots: Tree, at_once: int) -> tuple[Tree, Tree]:
    """Compute and fold slots chunk by chunk; return (sums, results [s, ...])."""
    length = _length(slots)
    if not at_once or 1 < length <= at_once:
        uploads, results = jax.vmap(fn)(slots)
        return add(init, uploads, slots), results
    at_once = min(at_once, length)
    padded = _pad(slots, -(-length // at_once) * at_once)
    chunks = jax.tree.map(lambda a: a.reshape(-1, at_once, *a.shape[1:]), padded)

    def body(sums: Tree, chunk: Tree) -> tuple[Tree, Tree]:
        if at_once > 1:
            uploads, results = jax.vmap(fn)(chunk)
        else:
            alone = fn(jax.tree.map(lambda a: a[0], chunk))
            uploads, results = jax.tree.map(lambda a: a[None], alone)
        return add(sums, uploads, chunk), results

    sums, results = jax.lax.scan(body, init, chunks)
    # Not -1, which no reshape finds for arrays without elements.
    whole = jax.tree.map(lambda a: a.reshape(a.shape[0] * at_once, *a.shape[2:]), results)
    return sums, jax.tree.map(lambda a: a[:length], whole)


def clients_per_device(num_clients: int, num_devices: int) -> int:
    """Return for how many of N clients a device of k has room."""
    return -(-num_clients // num_devices)


def owner(client: Any, num_clients: int, num_devices: int) -> Any:
    """Return the device of k that owns a client of N, or each client of an array."""
    return client // clients_per_device(num_clients, num_devices)
