"""The client axis: how a cohort's slots are laid over time, memory and devices.

An axis computes `fn` on every slot and folds the uploads; nothing else in the package knows how.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from fedjax_inv.checks import UsageError
from fedjax_inv.types import Tree

Fn = Callable[[Tree], tuple[Tree, Tree]]  # one slot -> (upload, kept)
Add = Callable[[Tree, Tree, Tree], Tree]  # (accumulator, uploads [c, ...], slots [c, ...]) -> same

# (fn, add, init, slots) -> (accumulator, kept): slots is a tree with leading S, where zeros are an
# absent slot; kept comes back with leading S.
Axis = Callable[[Fn, Add, Tree, Tree], tuple[Tree, Tree]]


def _length(slots: Tree) -> int:
    return jax.tree.leaves(slots)[0].shape[0]


def _pad(slots: Tree, length: int) -> Tree:
    """`slots` with absent slots appended up to `length`."""

    def leaf(a: jax.Array) -> jax.Array:
        return jnp.pad(a, [(0, length - a.shape[0])] + [(0, 0)] * (a.ndim - 1))

    return slots if _length(slots) == length else jax.tree.map(leaf, slots)


def vmapped() -> Axis:
    """All slots at once; memory for the whole cohort."""

    def axis(fn: Fn, add: Add, init: Tree, slots: Tree) -> tuple[Tree, Tree]:
        uploads, kept = jax.vmap(fn)(slots)
        return add(init, uploads, slots), kept

    return axis


def chunked(size: int) -> Axis:
    """`size` slots at a time under one scan; memory for `size` clients.

    Size 1 runs the client without vmap: on a CPU that keeps one client's parameters in cache.
    """
    if size < 1:
        raise UsageError(f"client_chunk={size}: must be at least 1")

    def axis(fn: Fn, add: Add, init: Tree, slots: Tree) -> tuple[Tree, Tree]:
        length = _length(slots)
        at_once = min(size, length)
        if at_once == length > 1:
            return vmapped()(fn, add, init, slots)
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

    return axis


def sharded(name: str, inner: Axis | None = None) -> Axis:
    """Slots split over the devices of the mesh axis `name`, each folding its own by `inner`
    (vmapped).

    For use inside `over(mesh, ...)`. The accumulators are summed over the devices, as the law of
    `Aggregator` allows.
    """
    fold = inner or vmapped()

    def axis(fn: Fn, add: Add, init: Tree, slots: Tree) -> tuple[Tree, Tree]:
        length, devices = _length(slots), jax.lax.axis_size(name)
        share = -(-length // devices)
        padded = _pad(slots, share * devices)
        first = jax.lax.axis_index(name) * share
        mine = jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, first, share), padded)

        def spread(kept: jax.Array) -> jax.Array:
            whole = jnp.zeros((share * devices, *kept.shape[1:]), kept.dtype)
            return jax.lax.dynamic_update_slice_in_dim(whole, kept, first, 0)

        def total(leaf: jax.Array) -> jax.Array:
            return jax.lax.psum(leaf, name).astype(leaf.dtype)  # booleans are summed as counts

        accumulator, kept = fold(fn, add, init, mine)
        accumulator, kept = jax.tree.map(total, (accumulator, jax.tree.map(spread, kept)))
        return accumulator, jax.tree.map(lambda a: a[:length], kept)

    return axis


def over(mesh: Mesh, fn: Callable[..., Tree]) -> Callable[..., Tree]:
    """`fn` run on every device of the mesh, its arguments and results whole on each.

    What `sharded` finds inside of it is shared between the devices; all else each of them repeats.
    """
    whole = PartitionSpec()
    return jax.shard_map(fn, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
