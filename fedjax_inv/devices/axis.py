"""The client axis: how the slots of a cohort are laid over time, memory and devices.

An axis assigns the slots to devices, computes `fn` of each slot and folds the uploads. The rest of
the package does not depend on how.

Sums of floating-point numbers depend on their order. With `lanes` the order does not depend on the
devices: the slots are cut into L lanes of consecutive slots (`ownership`), the uploads of a lane
are added one chunk after the other, and the sums of the lanes are added in their order. A device
computes whole lanes. Axis letters: l lanes of one device, s slots of one device.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from fedjax_inv import checks
from fedjax_inv.devices import loops
from fedjax_inv.devices.ownership import clients_per_device, first_client, lane_size
from fedjax_inv.types import Array, Tree

Fn = Callable[[Tree], tuple[Tree, Tree]]  # one slot -> (upload, result)

_WHOLE = PartitionSpec()


class Sums(NamedTuple):
    """What the uploads are folded into. Sums of disjoint sets of slots combine by addition."""

    ordered: Tree  # the bits depend on the order of the additions
    exact: Tree = ()  # each entry gets the upload of one slot, so the order does not matter


Add = Callable[[Sums, Tree, Tree], Sums]  # (sums, uploads [c, ...], slots [c, ...]) -> sums


class Assignment(NamedTuple):
    """The slots that one device works on."""

    slots: Tree  # [s, ...] of the S slots, lane after lane; zeros where the device has fewer
    local_index: Array  # [s] where the client of each slot lies among the clients on the device
    gather: Callable[[Tree], Tree]  # [s, ...] -> [S, ...], the same on every device
    lanes: int  # l, how many lanes the device has room for
    here: Array | int  # [] how many it has
    total: int  # how many all devices have


class Axis(NamedTuple):
    """How slots are laid over memory and devices."""

    at_once: int = 0  # how many slots of a lane are computed at once; 0: all
    lanes: int = 0  # L; 0: one for each device, and sums depend on the number of devices
    name: str | None = None  # the mesh axis of the devices; None: there is one
    replicated: bool = True  # whether the examples and states of all clients are on every device

    @property
    def num_devices(self) -> int:
        """k, how many devices share the slots."""
        return 1 if self.name is None else jax.lax.axis_size(self.name)

    def _device(self) -> Array | int:
        return 0 if self.name is None else jax.lax.axis_index(self.name)

    def _room(self, number: int) -> int:
        """Return how many of `number` clients a device has room for."""
        return clients_per_device(number, self.num_devices, self.lanes)

    def lane_size(self, number: int) -> int:
        """Return how many of `number` clients are in a lane."""
        return lane_size(number, self.num_devices, self.lanes)

    def block(self, number: int) -> tuple[Array | int, int]:
        """Return (the first of `number` clients on this device, how many it has room for)."""
        room = self._room(number)
        device: Any = self._device()
        return first_client(device, number, self.num_devices, self.lanes), room

    def local_clients(self, num_clients: int) -> Array:
        """Return the clients on this device, consecutive; numbers of C or more are no clients."""
        if self.replicated:
            return _everyone(num_clients)
        first, room = self.block(num_clients)
        return first + _everyone(room)

    def __call__(
        self, fn: Fn, add: Callable[[Tree, Tree, Tree], Tree], init: Tree, slots: Tree
    ) -> tuple[Tree, Tree]:
        """Compute and fold the slots of the clients 0..S-1.

        Args:
          fn: slot -> (upload, result).
          add: (accumulator, uploads, slots) -> accumulator.
          init: the first accumulator.
          slots: a tree with leading S.

        Returns:
          (accumulator, results [S, ...]).
        """

        def ordered(sums: Sums, uploads: Tree, slots: Tree) -> Sums:
            return Sums(add(sums.ordered, uploads, slots))

        length = _length(slots)
        mine = self.assign(slots, _everyone(length), jnp.ones(length, bool), length)
        sums, results = self.fold(fn, ordered, Sums(init), mine, mine.slots)
        return sums.ordered, mine.gather(results)

    def assign(self, slots: Tree, who: Array, present: Array, num_clients: int) -> Assignment:
        """Return the slots of this device.

        Args:
          slots: a tree with leading S.
          who: [S] int32, the client of each slot.
          present: [S] bool, which slots count.
          num_clients: C.
        """
        if self.replicated:
            return self._by_position(slots, who)
        return self._by_client(slots, who, present, num_clients)

    def _by_position(self, slots: Tree, who: Array) -> Assignment:
        length = _length(slots)
        first, share = self.block(length)
        lane = self.lane_size(length)
        lanes, total = share // lane, -(-length // lane)
        if self.name is None:
            my_slots, my_who = _pad((slots, who), share)

            def alone(results: Tree) -> Tree:
                return jax.tree.map(lambda leaf: leaf[:length], results)

            return Assignment(my_slots, my_who, alone, lanes, total, total)
        place = jnp.arange(length) - first
        gather = self._gather(jnp.clip(place, 0, share - 1), (place >= 0) & (place < share))

        def mine(a: Array) -> Array:
            return jax.lax.dynamic_slice_in_dim(a, first, share)

        padded = _pad((slots, who), share * self.num_devices)
        my_slots, my_who = jax.tree.map(mine, padded)
        count = jnp.clip(total - self._device() * lanes, 0, lanes)
        return Assignment(my_slots, my_who, gather, lanes, count, total)

    def _by_client(self, slots: Tree, who: Array, present: Array, num_clients: int) -> Assignment:
        length, (first, count) = _length(slots), self.block(num_clients)
        clients = self.lane_size(num_clients)  # of a lane
        lanes, room = count // clients, min(length, clients)
        start = first + jnp.arange(lanes)[:, None] * clients
        in_lane = present & (start <= who) & (who < start + clients)  # [l, S]
        place = jnp.cumsum(in_lane, axis=1)  # [l, S], from 1
        # The index of the j-th slot of a lane, or of the padding slot. A search, not a scatter:
        # XLA's CPU compiler gets some scatters wrong under vmap.
        wanted = jnp.arange(1, room + 1)
        index = jax.vmap(
            lambda of_lane: jnp.searchsorted(of_lane, wanted, side="left", method="scan_unrolled")
        )(place).reshape(-1)
        my_slots, my_who = jax.tree.map(lambda a: a[index], _pad((slots, who), length + 1))
        lane = jnp.clip((who - first) // clients, 0, lanes - 1)
        at = lane * room + place[lane, jnp.arange(length)] - 1
        gather = self._gather(jnp.maximum(at, 0), in_lane.any(0))
        total = -(-num_clients // clients)
        here = jnp.clip(total - self._device() * lanes, 0, lanes)
        local_index = jnp.clip(my_who - first, 0, count - 1)
        return Assignment(my_slots, local_index, gather, lanes, here, total)

    def _gather(self, place: Array, is_mine: Array) -> Callable[[Tree], Tree]:
        """Return the function that gathers [S, ...] from the [s, ...] of each device.

        Args:
          place: [S] int32, where each slot lies on this device.
          is_mine: [S] bool, whether it lies there.
        """

        def gather(results: Tree) -> Tree:
            # Not a write into a slice, which vmap turns into a scatter.
            return self.selected(jax.tree.map(lambda leaf: leaf[place], results), is_mine)

        return gather

    def selected(self, values: Tree, is_mine: Array) -> Tree:
        """Return values [N, ...], each entry from the device where `is_mine` [N] is true.

        Bit for bit. An entry that is on no device is 0.
        """

        def here(leaf: Array) -> Array:
            mine = is_mine.reshape(-1, *[1] * (leaf.ndim - 1))
            return jnp.where(mine, leaf, jnp.zeros_like(leaf))

        mine = jax.tree.map(here, values)
        return mine if self.name is None else self._exact_total(mine)

    def _exact_total(self, tree: Tree) -> Tree:
        """Sum a tree over devices, of which at most one has an entry that is not zero."""
        name = self.name
        assert name is not None
        if not self.lanes:
            return _total(tree, name)
        # As integers, since the sum of -0.0 and 0.0 is 0.0.
        numbers = jax.tree.map(lambda leaf: jax.lax.psum(_bits(leaf), name), tree)

        def floats(numbers: Tree) -> Tree:
            return jax.tree.map(lambda bits, leaf: _of_bits(bits, leaf.dtype), numbers, tree)

        return loops.isolated(floats, numbers)

    def isolated(self, fn: Callable[..., Tree], *arguments: Tree) -> Tree:
        """Return fn(*arguments); with lanes, computed so that its rounding is always the same.

        Args:
          fn: a function of whatever follows or precedes a fold.
          *arguments: its arguments.
        """
        return loops.isolated(fn, *arguments) if self.lanes else fn(*arguments)

    def fold(
        self,
        fn: Fn,
        add: Add,
        init: Sums,
        mine: Assignment,
        turns: Tree,
        shapes: tuple[Tree, Tree] | None = None,
    ) -> tuple[Sums, Tree]:
        """Compute the slots of this device, and fold the uploads of all devices.

        Args:
          fn: an entry of `turns` -> (upload, result).
          add: (sums, uploads [c, ...], turns [c, ...]) -> sums.
          init: the first sums, all zeros.
          mine: the slots of this device.
          turns: a tree with leading s; an absent slot is all zeros.
          shapes: the shapes of (upload, result), if they are known.

        Returns:
          (the sums over all devices, the results [s, ...] of this one).
        """
        if not self.lanes:
            sums, results = _in_chunks(fn, add, init, turns, self.at_once)
            return (sums if self.name is None else _total(sums, self.name)), results
        by_lane = jax.tree.map(lambda a: a.reshape(mine.lanes, -1, *a.shape[1:]), turns)
        if shapes is None:
            shapes = jax.eval_shape(fn, jax.tree.map(lambda a: a[0], turns))
        result = shapes[1]

        def lane(index: Array, exact: Tree) -> tuple[Sums, Tree]:
            of_lane = jax.tree.map(lambda leaf: leaf[index], by_lane)
            return _in_loop(fn, add, init._replace(exact=exact), of_lane, self.at_once, result)

        def alone(index: Array, carry: tuple[Sums, Tree]) -> tuple[Sums, Tree]:
            (total, exact), results = carry
            sums, of_lane = lane(index, exact)

            def added(total: Array, of_lane: Array) -> Array:
                return jnp.where(index == 0, of_lane, _plus(total, of_lane))

            total = jax.tree.map(added, total, sums.ordered)
            return Sums(total, sums.exact), loops.written(results, index, of_lane)

        def shared(index: Array, carry: tuple[Sums, Tree]) -> tuple[Sums, Tree]:
            (ordered, exact), results = carry
            sums, of_lane = lane(index, exact)
            ordered = loops.written(ordered, index, sums.ordered)
            return Sums(ordered, sums.exact), loops.written(results, index, of_lane)

        room = jax.tree.leaves(by_lane)[0].shape[1]
        results = loops.room(loops.room(result, room), mine.lanes)
        is_alone = self.name is None
        first = init.ordered if is_alone else loops.room(init.ordered, mine.lanes)
        (ordered, exact), results = jax.lax.fori_loop(
            0,
            loops.turns(mine.here),
            alone if is_alone else shared,
            (Sums(first, init.exact), results),
        )
        if self.name is not None:
            ordered = _in_order(ordered, mine.total, self.num_devices, self.name)
            exact = self._exact_total(exact)
        results = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), results)
        return Sums(ordered, exact), results


def vmapped(*, lanes: int = 0) -> Axis:
    """Return an axis that computes all slots of a lane at once.

    Args:
      lanes: L, as in `chunked`. Without lanes it needs memory for the whole cohort.
    """
    checks.integer("lanes", lanes, 0)
    return Axis(0, lanes)


def chunked(size: int, *, lanes: int = 0) -> Axis:
    """Return an axis that computes `size` slots at a time, under one scan.

    It needs memory for `size` clients. Size 1 computes a client without vmap: on a CPU that keeps
    the parameters of one client in the cache.

    Args:
      size: how many slots are computed at a time, at least 1.
      lanes: L. The order of sums depends on L and not on the number of devices; on several devices
        each has memory for the sums of its lanes. 0: on one device the order is that of the slots,
        and on several it depends on their number.

    Raises:
      UsageError: if size is no integer or below 1, or if lanes is none or negative.
    """
    checks.integer("size", size)
    checks.integer("lanes", lanes, 0)
    return Axis(size, lanes)


def _checked(name: str, inner: Axis | None) -> Axis:
    """Return the inner axis; arguments of other types raise UsageError."""
    checks.record("name", name, str)
    if inner is None:
        return vmapped()
    checks.record("inner", inner, Axis)
    return inner


def sharded(name: str, inner: Axis | None = None) -> Axis:
    """Return an axis that splits the slots evenly over devices; all clients are on every device.

    It is for use inside `over(mesh, ...)`.

    Args:
      name: the mesh axis of the devices.
      inner: the axis by which each device folds its slots; by default `vmapped()`.

    Raises:
      UsageError: for arguments of other types.
    """
    return _checked(name, inner)._replace(name=name)


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
    return _checked(name, inner)._replace(name=name, replicated=False)


def _length(slots: Tree) -> int:
    return jax.tree.leaves(slots)[0].shape[0]


def _pad(slots: Tree, length: int) -> Tree:
    """Append absent slots to `slots` up to `length`."""

    def leaf(a: Array) -> Array:
        return jnp.pad(a, [(0, length - a.shape[0])] + [(0, 0)] * (a.ndim - 1))

    return slots if _length(slots) == length else jax.tree.map(leaf, slots)


def _everyone(num_clients: int) -> Array:
    return jnp.arange(num_clients, dtype=jnp.int32)


def _computed(fn: Fn, chunk: Tree, at_once: int) -> tuple[Tree, Tree]:
    """Return (uploads, results), each [c, ...], of a chunk of c = `at_once` slots."""
    if at_once > 1:
        return jax.vmap(fn)(chunk)
    return jax.tree.map(lambda a: a[None], fn(jax.tree.map(lambda a: a[0], chunk)))


def _chunks(slots: Tree, at_once: int) -> Tree:
    """Cut slots [s, ...] into chunks [n, at_once, ...], of which the last is padded."""
    padded = _pad(slots, -(-_length(slots) // at_once) * at_once)
    return jax.tree.map(lambda a: a.reshape(-1, at_once, *a.shape[1:]), padded)


def _joined(chunks: Tree, length: int) -> Tree:
    """Return the results [length, ...] of chunks [n, c, ...]."""
    return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:])[:length], chunks)


def _in_chunks(fn: Fn, add: Add, init: Sums, slots: Tree, at_once: int) -> tuple[Sums, Tree]:
    """Compute and fold slots chunk by chunk; return (sums, results [s, ...])."""
    length = _length(slots)
    if not at_once or 1 < length <= at_once:
        uploads, results = jax.vmap(fn)(slots)
        return add(init, uploads, slots), results
    at_once = min(at_once, length)

    def body(sums: Sums, chunk: Tree) -> tuple[Sums, Tree]:
        uploads, results = _computed(fn, chunk, at_once)
        return add(sums, uploads, chunk), results

    sums, results = jax.lax.scan(body, init, _chunks(slots, at_once))
    return sums, _joined(results, length)


def _in_loop(
    fn: Fn, add: Add, init: Sums, slots: Tree, at_once: int, result: Tree
) -> tuple[Sums, Tree]:
    """Compute and fold slots as `_in_chunks` does, in a loop that stays one (`loops`).

    result: the shapes of a slot's result.
    """
    length = _length(slots)
    at_once = min(at_once or length, length)
    chunks = _chunks(slots, at_once)
    number = _length(chunks)

    def turn(index: Array, carry: tuple[Sums, Tree]) -> tuple[Sums, Tree]:
        sums, results = carry
        chunk = jax.tree.map(lambda leaf: leaf[index], chunks)
        uploads, of_chunk = _computed(fn, chunk, at_once)
        return add(sums, uploads, chunk), loops.written(results, index, of_chunk)

    results = loops.room(loops.room(result, at_once), number)
    sums, results = jax.lax.fori_loop(0, loops.turns(number), turn, (init, results))
    return sums, _joined(results, length)


def _plus(first: Array, second: Array) -> Array:
    """Return the sum of two arrays; of booleans, whether any is true."""
    return first | second if first.dtype == bool else first + second


def _total(tree: Tree, name: str) -> Tree:
    """Sum a tree over devices; of booleans, return whether any device has a true one."""
    return jax.tree.map(lambda leaf: jax.lax.psum(leaf, name).astype(leaf.dtype), tree)


def _bits(array: Array) -> Array:
    """Return an array as integers of the same bits, of at least 32 bits."""
    if jnp.issubdtype(array.dtype, jnp.floating):
        width = jnp.finfo(array.dtype).bits
        array = jax.lax.bitcast_convert_type(array, jnp.dtype(f"uint{width}"))
    return array.astype(jnp.uint32) if array.dtype.itemsize < 4 else array


def _of_bits(bits: Array, dtype: np.dtype) -> Array:
    """Return the array of `_bits`."""
    if jnp.issubdtype(dtype, jnp.floating):
        bits = bits.astype(jnp.dtype(f"uint{jnp.finfo(dtype).bits}"))
        return jax.lax.bitcast_convert_type(bits, dtype)
    return bits.astype(dtype)


def _in_order(lanes: Tree, total: int, num_devices: int, name: str) -> Tree:
    """Return the sum of all lanes, added in their order, from the lanes [l, ...] of each device.

    Each device adds up one part of the numbers of all lanes, and the parts are gathered. With one
    lane on each device that sends as many bytes as a sum in any order.

    Args:
      lanes: the sums of this device's lanes.
      total: how many lanes all devices have; the last device may have fewer than the others.
      num_devices: k.
      name: the mesh axis of the devices.
    """
    leaves, structure = jax.tree.flatten(lanes)
    by_type: dict[np.dtype, list[int]] = {}
    for at, leaf in enumerate(leaves):
        by_type.setdefault(jnp.promote_types(leaf.dtype, jnp.int8), []).append(at)
    summed = []
    for dtype, places in by_type.items():
        parts = [leaves[at].reshape(len(leaves[at]), -1).astype(dtype) for at in places]
        flat = jnp.concatenate(parts, axis=1)
        length = flat.shape[1]
        padded = jnp.pad(flat, [(0, 0), (0, -length % num_devices)])
        blocks = padded.reshape(len(flat), num_devices, -1)
        # [k, l, p]: the p numbers of all lanes that this device adds.
        mine = jax.lax.all_to_all(blocks, name, split_axis=1, concat_axis=0)
        mine = mine.reshape(-1, mine.shape[-1])
        part = jax.lax.fori_loop(
            1, loops.turns(total), lambda i, sum_, mine=mine: sum_ + mine[i], mine[0]
        )
        summed.append(jax.lax.all_gather(part, name, tiled=True))

    def cut(summed: list[Array]) -> list[Array]:
        results: list[Array] = [jnp.zeros(0)] * len(leaves)
        for places, whole in zip(by_type.values(), summed, strict=True):
            first = 0
            for at in places:
                leaf = leaves[at]
                size = leaf[0].size
                values = whole[first : first + size].reshape(leaf.shape[1:])
                results[at], first = values.astype(leaf.dtype), first + size
        return results

    return jax.tree.unflatten(structure, loops.isolated(cut, summed))


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
