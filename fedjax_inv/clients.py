"""The client axis: how a cohort's slots are laid over time, memory and devices.

An axis deals the slots to devices, computes `fn` on each and folds the uploads; nothing else in the
package knows how.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from fedjax_inv.checks import UsageError
from fedjax_inv.types import Array, Tree

Fn = Callable[[Tree], tuple[Tree, Tree]]  # one slot -> (upload, kept)
Add = Callable[[Tree, Tree, Tree], Tree]  # (accumulator, uploads [c, ...], slots [c, ...]) -> same

# (fn, add, init, slots) -> (accumulator, kept): slots is a tree with leading s, where zeros are an
# absent slot; kept comes back with leading s.
Fold = Callable[[Fn, Add, Tree, Tree], tuple[Tree, Tree]]

_WHOLE = PartitionSpec()


class Dealt(NamedTuple):
    """The slots that this device works on."""

    slots: Tree  # [s, ...] of the S; zeros where it has fewer
    place: Array  # [s] where the client of each lies among those that the device holds
    whole: Callable[[Tree], Tree]  # [s, ...] -> [S, ...], the same on every device


# (slots [S, ...], who [S], present [S], num_clients) -> this device's
Deal = Callable[[Tree, Array, Array, int], Dealt]


class Axis(NamedTuple):
    """How slots are laid over memory and devices."""

    fold: Fold  # of the slots of a device
    deal: Deal
    total: Callable[[Tree], Tree]  # sums over devices
    holds: Callable[[int], Array]  # num_clients -> those that the device holds, [H] consecutive
    is_alike: bool = True  # whether each device holds all clients
    # (which, of how many): the part that this device takes of work on all that it holds
    part: Callable[[], tuple[Array | int, int]] = lambda: (0, 1)

    def __call__(self, fn: Fn, add: Add, init: Tree, slots: Tree) -> tuple[Tree, Tree]:
        """(accumulator, kept [S, ...]) of the slots of clients 0..S-1."""
        length = _length(slots)
        dealt = self.deal(slots, _everyone(length), jnp.ones(length, bool), length)
        accumulator, kept = self.fold(fn, add, init, dealt.slots)
        return self.total(accumulator), dealt.whole(kept)


def _length(slots: Tree) -> int:
    return jax.tree.leaves(slots)[0].shape[0]


def _pad(slots: Tree, length: int) -> Tree:
    """`slots` with absent slots appended up to `length`."""

    def leaf(a: Array) -> Array:
        return jnp.pad(a, [(0, length - a.shape[0])] + [(0, 0)] * (a.ndim - 1))

    return slots if _length(slots) == length else jax.tree.map(leaf, slots)


def _everyone(num_clients: int) -> Array:
    return jnp.arange(num_clients, dtype=jnp.int32)


def _on_one(fold: Fold) -> Axis:
    """The axis of a single device."""

    def deal(slots: Tree, who: Array, present: Array, num_clients: int) -> Dealt:
        del present, num_clients
        return Dealt(slots, who, lambda kept: kept)

    return Axis(fold, deal, lambda tree: tree, _everyone)


def vmapped() -> Axis:
    """All slots at once; memory for the whole cohort."""
    return _on_one(_at_once)


def _at_once(fn: Fn, add: Add, init: Tree, slots: Tree) -> tuple[Tree, Tree]:
    uploads, kept = jax.vmap(fn)(slots)
    return add(init, uploads, slots), kept


def chunked(size: int) -> Axis:
    """`size` slots at a time under one scan; memory for `size` clients.

    Size 1 runs the client without vmap: on a CPU that keeps one client's parameters in cache.
    """
    if size < 1:
        raise UsageError(f"client_chunk={size}: must be at least 1")

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
                uploads, kept = jax.tree.map(lambda a: a[None], one)
            else:
                uploads, kept = jax.vmap(fn)(chunk)
            return add(accumulator, uploads, chunk), kept

        accumulator, kept = jax.lax.scan(body, init, chunks)
        return accumulator, jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:])[:length], kept)

    return _on_one(fold)


def sharded(name: str, inner: Axis | None = None) -> Axis:
    """Slots split evenly over the devices of the mesh axis `name`, each of which holds all clients
    and folds its slots by `inner` (vmapped).

    For use inside `over(mesh, ...)`. The accumulators are summed over the devices, as the law of
    `Aggregator` allows.
    """

    def deal(slots: Tree, who: Array, present: Array, num_clients: int) -> Dealt:
        del present, num_clients
        length, devices = _length(slots), jax.lax.axis_size(name)
        share = -(-length // devices)
        first = jax.lax.axis_index(name) * share

        def mine(a: Array) -> Array:
            return jax.lax.dynamic_slice_in_dim(a, first, share)

        place = jnp.arange(length) - first
        whole = _spread(jnp.clip(place, 0, share - 1), (place >= 0) & (place < share), name)
        mine_of, who_of = jax.tree.map(mine, _pad((slots, who), share * devices))
        return Dealt(mine_of, who_of, whole)

    fold = (inner or vmapped()).fold
    return Axis(
        fold,
        deal,
        lambda tree: _total(tree, name),
        _everyone,
        part=lambda: (jax.lax.axis_index(name), jax.lax.axis_size(name)),
    )


def owned(name: str, inner: Axis | None = None) -> Axis:
    """Slots dealt to the device of the mesh axis `name` that holds their client: of k devices and C
    clients, device d holds the ceil(C / k) from d ceil(C / k) on, their examples and states alone.

    As `sharded`, but that each device has room for as many slots as it may get: with a cohort of
    few of the clients it works on some that are absent.
    """

    def share(num_clients: int) -> int:
        return -(-num_clients // jax.lax.axis_size(name))

    def deal(slots: Tree, who: Array, present: Array, num_clients: int) -> Dealt:
        length, held = _length(slots), share(num_clients)
        first = jax.lax.axis_index(name) * held
        is_mine = present & (first <= who) & (who < first + held)
        count = jnp.cumsum(is_mine)
        # The j-th of mine, the appended slot where there are fewer. A search, not a scatter: XLA's
        # CPU compiler gets some of those wrong under vmap.
        wanted = jnp.arange(1, min(length, held) + 1)
        index = jnp.searchsorted(count, wanted, side="left", method="scan_unrolled")
        mine_of, who_of = jax.tree.map(lambda a: a[index], _pad((slots, who), length + 1))
        whole = _spread(jnp.maximum(count - 1, 0), is_mine, name)
        return Dealt(mine_of, jnp.clip(who_of - first, 0, held - 1), whole)

    def holds(num_clients: int) -> Array:
        held = share(num_clients)
        return jax.lax.axis_index(name) * held + _everyone(held)

    fold = (inner or vmapped()).fold
    return Axis(fold, deal, lambda tree: _total(tree, name), holds, is_alike=False)


def _spread(place: Array, is_mine: Array, name: str) -> Callable[[Tree], Tree]:
    """What makes [S, ...] of what this device has, [s, ...]. place, is_mine: of the S slots, where
    each lies here, and whether it does."""

    def leaf(kept: Array) -> Array:
        # Not a slice that is written, which vmap makes a scatter.
        values = kept[place]
        here = is_mine.reshape(-1, *[1] * (kept.ndim - 1))
        return jnp.where(here, values, jnp.zeros_like(values))

    return lambda kept: _total(jax.tree.map(leaf, kept), name)


def _total(tree: Tree, name: str) -> Tree:
    """The sum over devices; of booleans, whether it holds on any."""
    return jax.tree.map(lambda leaf: jax.lax.psum(leaf, name).astype(leaf.dtype), tree)


def over(
    mesh: Mesh,
    fn: Callable[..., Tree],
    in_specs: Tree = _WHOLE,
    out_specs: Tree = _WHOLE,
) -> Callable[..., Tree]:
    """`fn` run on every device of the mesh, its arguments and results whole on each unless their
    specs say otherwise.

    What `sharded` or `owned` find inside of it is shared between the devices; all else each of them
    repeats.
    """
    return jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
