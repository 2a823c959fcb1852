"""The client axis: how the slots of a cohort are laid over time, memory and devices.

An axis assigns the slots to devices, computes `fn` of each slot and folds the uploads. The rest of
the package does not depend on how. Axis letter: s slots of one device.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from fedjax_inv import checks
from fedjax_inv.devices.ownership import clients_per_device, first_client
from fedjax_inv.types import Array, Tree

Fn = Callable[[Tree], tuple[Tree, Tree]]  # one slot -> (upload, result)
Add = Callable[[Tree, Tree, Tree], Tree]  # (accumulator, uploads [c, ...], slots [c, ...]) -> same

# (fn, add, init, slots) -> (accumulator, results): slots and results are trees with a leading s;
# an absent slot is all zeros.
Fold = Callable[[Fn, Add, Tree, Tree], tuple[Tree, Tree]]

_WHOLE = PartitionSpec()


class Assignment(NamedTuple):
    """The slots that one device works on."""

    slots: Tree  # [s, ...] of the S slots; zeros where the device has fewer
    local_index: Array  # [s] where the client of each slot lies among the clients on the device
    gather: Callable[[Tree], Tree]  # [s, ...] -> [S, ...], the same on every device


# (slots [S, ...], who [S], present [S], num_clients) -> the slots of this device
Assign = Callable[[Tree, Array, Array, int], Assignment]


class Axis(NamedTuple):
    """How slots are laid over memory and devices."""

    fold: Fold  # computes and folds the slots of one device
    assign: Assign
    total: Callable[[Tree], Tree]  # sums over devices
    local_clients: Callable[[int], Array]  # num_clients -> the clients on this device, consecutive
    replicated: bool = True  # whether all clients are on every device
    # () -> (index, count): this device takes part `index` of `count` of work that is not split by
    # slots
    part: Callable[[], tuple[Array | int, int]] = lambda: (0, 1)

    def __call__(self, fn: Fn, add: Add, init: Tree, slots: Tree) -> tuple[Tree, Tree]:
        """Compute and fold the slots of the clients 0..S-1.

        Args:
          fn: slot -> (upload, result).
          add: (accumulator, uploads, slots) -> accumulator.
          init: the first accumulator.
          slots: a tree with leading S.

        Returns:
          (accumulator, results [S, ...]).
        """
        length = _length(slots)
        mine = self.assign(slots, _everyone(length), jnp.ones(length, bool), length)
        accumulator, results = self.fold(fn, add, init, mine.slots)
        return self.total(accumulator), mine.gather(results)


def _length(slots: Tree) -> int:
    return jax.tree.leaves(slots)[0].shape[0]


def _pad(slots: Tree, length: int) -> Tree:
    """Append absent slots to `slots` up to `length`."""

    def leaf(a: Array) -> Array:
        return jnp.pad(a, [(0, length - a.shape[0])] + [(0, 0)] * (a.ndim - 1))

    return slots if _length(slots) == length else jax.tree.map(leaf, slots)


def _everyone(num_clients: int) -> Array:
    return jnp.arange(num_clients, dtype=jnp.int32)


def _on_one(fold: Fold) -> Axis:
    """Return the axis of a single device."""

    def assign(slots: Tree, who: Array, present: Array, num_clients: int) -> Assignment:
        del present, num_clients
        return Assignment(slots, who, lambda results: results)

    return Axis(fold, assign, lambda tree: tree, _everyone)


def vmapped() -> Axis:
    """Return an axis that computes all slots at once; it needs memory for the whole cohort."""
    return _on_one(_at_once)


def _at_once(fn: Fn, add: Add, init: Tree, slots: Tree) -> tuple[Tree, Tree]:
    uploads, results = jax.vmap(fn)(slots)
    return add(init, uploads, slots), results


def chunked(size: int) -> Axis:
    """Return an axis that computes `size` slots at a time, under one scan.

    It needs memory for `size` clients. Size 1 computes a client without vmap: on a CPU that keeps
    the parameters of one client in the cache.

    Args:
      size: how many slots are computed at a time, at least 1.

    Raises:
      UsageError: if size is no integer or below 1.
    """
    checks.integer("size", size)

    def fold(fn: Fn, add: Add, init: Tree, slots: Tree) -> tuple[Tree, Tree]:
        length = _length(slots)
        at_once = min(size, length)
        if at_once == length > 1:
            return _at_once(fn, add, init, slots)
        padded = _pad(slots, -(-length // at_once) * at_once)
        chunks = jax.tree.map(lambda a: a.reshape(-1, at_once, *a.shape[1:]), padded)

        def body(accumulator: Tree, chunk: Tree) -> tuple[Tree, Tree]:
            if at_once == 1:
                one = fn(jax.tree.map(lambda a: a[0], chunk))
                uploads, results = jax.tree.map(lambda a: a[None], one)
            else:
                uploads, results = jax.vmap(fn)(chunk)
            return add(accumulator, uploads, chunk), results

        accumulator, results = jax.lax.scan(body, init, chunks)
        return accumulator, jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:])[:length], results)

    return _on_one(fold)


def _checked(name: str, inner: Axis | None) -> Axis:
    """Return the inner axis; arguments of other types raise UsageError."""
    checks.record("name", name, str)
    if inner is None:
        return vmapped()
    checks.record("inner", inner, Axis)
    return inner


def sharded(name: str, inner: Axis | None = None) -> Axis:
    """Return an axis that splits the slots evenly over devices; all clients are on every device.

    It is for use inside `over(mesh, ...)`. The accumulators are summed over the devices, which is
    right because accumulators of an `Aggregator` combine by addition.

    Args:
      name: the mesh axis of the devices.
      inner: the axis by which each device folds its slots; by default `vmapped()`.

    Raises:
      UsageError: for arguments of other types.
    """
    inner = _checked(name, inner)

    def assign(slots: Tree, who: Array, present: Array, num_clients: int) -> Assignment:
        del present, num_clients
        length, num_devices = _length(slots), jax.lax.axis_size(name)
        share = -(-length // num_devices)
        first = jax.lax.axis_index(name) * share

        def mine(a: Array) -> Array:
            return jax.lax.dynamic_slice_in_dim(a, first, share)

        place = jnp.arange(length) - first
        gather = _gather(jnp.clip(place, 0, share - 1), (place >= 0) & (place < share), name)
        my_slots, my_who = jax.tree.map(mine, _pad((slots, who), share * num_devices))
        return Assignment(my_slots, my_who, gather)

    fold = inner.fold
    return Axis(
        fold,
        assign,
        lambda tree: _total(tree, name),
        _everyone,
        part=lambda: (jax.lax.axis_index(name), jax.lax.axis_size(name)),
    )


def owned(name: str, inner: Axis | None = None) -> Axis:
    """Return an axis that gives each slot to the device that owns its client.

    Only the examples and states of its own clients need to be on a device (`ownership` says which
    clients it owns). It is for use inside `over(mesh, ...)`, like `sharded`. Each device has room
    for as many slots as it may get, so with few clients in the cohort it also computes absent
    slots.

    Args:
      name: the mesh axis of the devices.
      inner: the axis by which each device folds its slots; by default `vmapped()`.

    Raises:
      UsageError: for arguments of other types.
    """
    inner = _checked(name, inner)

    def block(num_clients: int) -> tuple[Array, int]:
        """Return (the first client of this device, how many it has room for)."""
        num_devices = jax.lax.axis_size(name)
        first = first_client(jax.lax.axis_index(name), num_clients, num_devices)
        return first, clients_per_device(num_clients, num_devices)

    def assign(slots: Tree, who: Array, present: Array, num_clients: int) -> Assignment:
        length, (first, count) = _length(slots), block(num_clients)
        is_mine = present & (first <= who) & (who < first + count)
        num_mine = jnp.cumsum(is_mine)
        # The index of this device's j-th slot, or of the padding slot. A search, not a scatter:
        # XLA's CPU compiler gets some scatters wrong under vmap.
        wanted = jnp.arange(1, min(length, count) + 1)
        index = jnp.searchsorted(num_mine, wanted, side="left", method="scan_unrolled")
        my_slots, my_who = jax.tree.map(lambda a: a[index], _pad((slots, who), length + 1))
        gather = _gather(jnp.maximum(num_mine - 1, 0), is_mine, name)
        return Assignment(my_slots, jnp.clip(my_who - first, 0, count - 1), gather)

    def local_clients(num_clients: int) -> Array:
        first, count = block(num_clients)
        return first + _everyone(count)

    fold = inner.fold
    return Axis(fold, assign, lambda tree: _total(tree, name), local_clients, replicated=False)


def _gather(place: Array, is_mine: Array, name: str) -> Callable[[Tree], Tree]:
    """Return the function that gathers [S, ...] from the [s, ...] of each device.

    Args:
      place: [S] int32, where each slot lies on this device.
      is_mine: [S] bool, whether it lies there.
      name: the mesh axis of the devices.
    """

    def leaf(local: Array) -> Array:
        # Not a write into a slice, which vmap turns into a scatter.
        values = local[place]
        here = is_mine.reshape(-1, *[1] * (local.ndim - 1))
        return jnp.where(here, values, jnp.zeros_like(values))

    return lambda results: _total(jax.tree.map(leaf, results), name)


def _total(tree: Tree, name: str) -> Tree:
    """Sum a tree over devices; of booleans, return whether any device has a true one."""
    return jax.tree.map(lambda leaf: jax.lax.psum(leaf, name).astype(leaf.dtype), tree)


def over(
    mesh: Mesh,
    fn: Callable[..., Tree],
    in_specs: Tree = _WHOLE,
    out_specs: Tree = _WHOLE,
) -> Callable[..., Tree]:
    """Return `fn` run on every device of a mesh.

    The devices share the work of the axes `sharded` and `owned` inside `fn`, and each of them
    repeats everything else.

    Args:
      mesh: the devices.
      fn: any function of arrays.
      in_specs: where the arguments lie, as in `jax.shard_map`; by default whole on every device.
      out_specs: where the results lie; by default whole on every device.

    Raises:
      UsageError: for arguments of other types.
    """
    checks.record("mesh", mesh, Mesh)
    checks.function("fn", fn)
    return jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
