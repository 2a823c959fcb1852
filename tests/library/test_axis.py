from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import slow
from federations import assert_close
from fedjax_inv import devices
from fedjax_inv.types import Array, Tree


def fn(slot: Tree) -> tuple[Tree, Tree]:
    """Upload something for an absent slot (all zeros) too, which `add` must ignore."""
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
    """Return slots, of which the last is absent if there are several, and an accumulator."""
    rng = np.random.default_rng(num_slots)
    slots = {
        "x": jnp.asarray(rng.normal(size=(num_slots, 2)), jnp.float32),
        "position": jnp.arange(num_slots),
        "present": jnp.arange(num_slots) < max(1, num_slots - 1),
    }
    init = {"sum": jnp.zeros(2), "count": jnp.zeros(()), "any": jnp.zeros(num_slots, bool)}
    return slots, init


def check(axis: Callable[..., tuple[Tree, Tree]], num_slots: int) -> None:
    slots, init = slots_of(num_slots)
    accumulator, results = jax.jit(lambda slots, init: axis(fn, add, init, slots))(slots, init)
    x, present = np.asarray(slots["x"], np.float64), np.asarray(slots["present"])
    expected = {"sum": (x[present] ** 2).sum(0), "count": present.sum(), "any": present}
    assert_close(accumulator, expected)
    assert accumulator["any"].dtype == bool
    assert_close(results, (x + 1, np.arange(num_slots)))


@pytest.mark.parametrize(
    ("num_slots", "size"), [(1, 1), (1, 2**31), (4, 1), (4, 2), (7, 3), (7, 7), (7, 8)]
)
def test_chunked_is_a_loop(num_slots: int, size: int) -> None:
    check(devices.chunked(size), num_slots)


def on_devices(inner: devices.Axis | None, number: int = 4) -> Callable[..., tuple[Tree, Tree]]:
    """Return the sharded axis on some devices."""
    mesh = jax.make_mesh((number,), ("anything",), axis_types=(AxisType.Auto,))

    def axis(fn: devices.Fn, add: Any, init: Tree, slots: Tree) -> tuple[Tree, Tree]:
        return devices.over(mesh, partial(devices.sharded("anything", inner), fn, add))(init, slots)

    return axis


@pytest.mark.parametrize("num_slots", [1, 4, 7])
def test_vmapped_and_sharded_are_a_loop(num_slots: int) -> None:
    check(devices.vmapped(), num_slots)
    check(on_devices(None), num_slots)
    check(on_devices(devices.chunked(2)), num_slots)


def test_sharded_computes_a_slot_on_each_device() -> None:
    slots, init = slots_of(4)

    def device(slot: Tree) -> tuple[Tree, Tree]:
        return fn(slot)[0], jax.lax.axis_index("anything")

    _, results = jax.jit(lambda: on_devices(None)(device, add, init, slots))()
    np.testing.assert_array_equal(results, np.arange(4))


@pytest.mark.parametrize("num_clients", [1, 4, 5, 9, 11])
@pytest.mark.parametrize("lanes", [0, 8, 3])
def test_owned_computes_a_slot_on_the_device_that_owns_its_client(
    num_clients: int, lanes: int
) -> None:
    """Some slots are absent; their client is computed nowhere, and its result is 0."""
    nothing = devices.Sums(())
    mesh = jax.make_mesh((4,), ("anything",), axis_types=(AxisType.Auto,))
    rng = np.random.default_rng(num_clients)
    who = jnp.asarray(rng.permutation(num_clients), jnp.int32)
    present = jnp.asarray(rng.random(num_clients) < 0.7)

    def run(who: Array, present: Array) -> tuple[Tree, Tree]:
        axis = devices.owned("anything", devices.vmapped(lanes=lanes))
        mine = axis.assign(who, who, present, num_clients)
        first = axis.local_clients(num_clients)[0]

        def client(turn: tuple[Array, Array]) -> tuple[Tree, Tree]:
            slot, local_index = turn
            return (), (slot, first + local_index, jax.lax.axis_index("anything"))

        turns = mine.slots, mine.local_index
        return mine.gather(axis.fold(client, lambda *rest: nothing, nothing, mine, turns)[1])

    slot, client, device = jax.jit(devices.over(mesh, run))(who, present)
    owner = devices.owner(np.asarray(who), num_clients, 4, lanes)
    for got, expected in ((slot, who), (client, who), (device, owner)):
        np.testing.assert_array_equal(got, np.where(present, expected, 0))


@pytest.mark.parametrize("num_devices", [1, 2, 3, 4])
@pytest.mark.parametrize("lanes", [0, 64, 5])
def test_devices_own_blocks_of_clients_in_order(num_devices: int, lanes: int) -> None:
    for num_clients in range(1, 12):
        given = num_clients, num_devices, lanes
        lane, size = devices.lane_size(*given), devices.clients_per_device(*given)
        assert size % lane == 0
        # No device has more than an even share, but for whole lanes.
        assert num_clients <= size * num_devices < num_clients + lane * num_devices
        blocks = []
        for device in range(num_devices):
            first = devices.first_client(device, *given)
            block = range(first, min(first + size, num_clients))
            assert {devices.owner(who, *given) for who in block} <= {device}
            blocks += block
        assert blocks == list(range(num_clients))
        if lanes:
            assert {devices.lane_size(num_clients, k, lanes) for k in (1, 2, 9)} == {lane}


def rounded(slot: Tree) -> tuple[Tree, Tree]:
    """Upload numbers whose products and sums round, some of them -0.0."""
    upload = {"x": slot["x"] * jnp.float32(1 / 3), "zero": -jnp.abs(0 * slot["x"])}
    return upload, (jnp.sin(slot["x"]), -jnp.abs(0 * slot["x"]))


def weighted(accumulator: Tree, uploads: Tree, slots: Tree) -> Tree:
    weights = slots["weight"][:, None]
    return jax.tree.map(lambda a, leaf: a + (leaf * weights).sum(0), accumulator, uploads)


@pytest.mark.parametrize(("num_slots", "lanes"), slow.after(1, [(13, 8), (1, 8), (3, 8), (13, 64)]))
def test_the_bits_of_sums_do_not_depend_on_the_devices(num_slots: int, lanes: int) -> None:
    rng = np.random.default_rng(num_slots)
    slots = {
        "x": jnp.asarray(rng.normal(size=(num_slots, 7)), jnp.float32),
        "weight": jnp.asarray(rng.normal(size=num_slots), jnp.float32),
    }
    init = {"x": jnp.zeros(7), "zero": jnp.zeros(7)}

    def of(axis: Callable[..., tuple[Tree, Tree]]) -> list[bytes]:
        # A product before and a sum after, which XLA could fuse with the axis.
        def run(slots: Tree) -> Tree:
            scaled = slots | {"x": slots["x"] * slots["weight"][:, None]}
            accumulator, results = axis(rounded, weighted, init, scaled)
            return jax.tree.map(lambda a: a * 0.7 + 0.1, accumulator), results

        return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(jax.jit(run)(slots))]

    inner = devices.chunked(1, lanes=lanes)
    expected = of(inner)
    for number in (1, 2, 3, 4):
        assert of(on_devices(inner, number)) == expected
    if num_slots > 1:  # in another order the bits differ, so that this test can fail
        assert of(on_devices(devices.chunked(1), 4)) != expected


def test_chunks_of_one_are_not_vmapped() -> None:
    """A branch stays a branch; under vmap both sides would be computed and one selected."""

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
    with pytest.raises(ValueError, match="size=0: must be an integer of at least 1"):
        devices.chunked(0)
