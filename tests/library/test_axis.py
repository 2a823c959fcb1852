from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from federations import assert_close
from fedjax_inv import devices
from fedjax_inv.types import Array, Tree


def fn(slot: Tree) -> tuple[Tree, Tree]:
    """An absent slot, all zeros, uploads something too: `add` must be told that it is absent."""
    upload = {"square": slot["x"] ** 2, "one": jnp.float32(1)}
    return upload, (slot["x"] + 1, slot["position"])


def add(accumulator: Tree, uploads: Tree, slots: Tree) -> Tree:
    real = slots["present"]
    return {
        "sum": accumulator["sum"] + (uploads["square"] * real[:, None]).sum(0),
        "count": accumulator["count"] + (uploads["one"] * real).sum(),
        "any": accumulator["any"].at[slots["position"]].max(real),
    }


def slots_of(num_slots: int) -> tuple[Tree, Tree]:
    """Slots, the last of them absent when there are several, and an empty accumulator."""
    rng = np.random.default_rng(num_slots)
    slots = {
        "x": jnp.asarray(rng.normal(size=(num_slots, 2)), jnp.float32),
        "position": jnp.arange(num_slots),
        "present": jnp.arange(num_slots) < max(1, num_slots - 1),
    }
    init = {"sum": jnp.zeros(2), "count": jnp.zeros(()), "any": jnp.zeros(num_slots, bool)}
    return slots, init


def check(axis: devices.Axis, num_slots: int) -> None:
    slots, init = slots_of(num_slots)
    accumulator, kept = jax.jit(lambda slots, init: axis(fn, add, init, slots))(slots, init)
    x, present = np.asarray(slots["x"], np.float64), np.asarray(slots["present"])
    expected = {"sum": (x[present] ** 2).sum(0), "count": present.sum(), "any": present}
    assert_close(accumulator, expected)
    assert accumulator["any"].dtype == bool
    assert_close(kept, (x + 1, np.arange(num_slots)))


@pytest.mark.parametrize(
    ("num_slots", "size"), [(1, 1), (1, 2**31), (4, 1), (4, 2), (7, 3), (7, 7), (7, 8)]
)
def test_chunked_is_a_loop(num_slots: int, size: int) -> None:
    check(devices.chunked(size), num_slots)


def on_four_devices(inner: devices.Axis | None) -> devices.Axis:
    """The sharded axis, with the `over` that it needs around it."""
    mesh = jax.make_mesh((4,), ("anything",), axis_types=(AxisType.Auto,))

    def axis(fn: devices.Fn, add: devices.Add, init: Tree, slots: Tree) -> tuple[Tree, Tree]:
        return devices.over(mesh, partial(devices.sharded("anything", inner), fn, add))(init, slots)

    return axis


@pytest.mark.parametrize("num_slots", [1, 4, 7])
def test_vmapped_and_sharded_are_a_loop(num_slots: int) -> None:
    check(devices.vmapped(), num_slots)
    check(on_four_devices(None), num_slots)
    check(on_four_devices(devices.chunked(2)), num_slots)


def test_sharded_computes_a_slot_on_each_device() -> None:
    slots, init = slots_of(4)

    def device(slot: Tree) -> tuple[Tree, Tree]:
        return fn(slot)[0], jax.lax.axis_index("anything")

    _, kept = jax.jit(lambda: on_four_devices(None)(device, add, init, slots))()
    np.testing.assert_array_equal(kept, np.arange(4))


def test_chunks_of_one_are_not_vmapped() -> None:
    """A branch stays a branch: vmapped, both sides would be computed and one be selected."""

    def branching(slot: Tree) -> tuple[Tree, Tree]:
        x: Array = jax.lax.cond(slot["present"], jnp.sin, jnp.cos, slot["x"])
        return fn(slot | {"x": x})

    slots, init = slots_of(4)
    for axis, branches in (
        (devices.chunked(1), True),
        (devices.chunked(2), False),
        (devices.vmapped(), False),
    ):
        program = str(jax.make_jaxpr(partial(axis, branching, add))(init, slots))
        assert (" cond[" in program) == branches


def test_chunked_refuses_no_client() -> None:
    with pytest.raises(ValueError, match="client_chunk=0: must be at least 1"):
        devices.chunked(0)
