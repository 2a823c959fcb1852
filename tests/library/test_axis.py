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


def check(axis: devices.Axis, num_slots: int) -> None:
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


def on_four_devices(inner: devices.Axis | None) -> devices.Axis:
    """Return the sharded axis on four devices."""
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

    _, results = jax.jit(lambda: on_four_devices(None)(device, add, init, slots))()
    np.testing.assert_array_equal(results, np.arange(4))


@pytest.mark.parametrize("num_clients", [1, 4, 5, 9, 11])
def test_owned_computes_a_slot_on_the_device_that_owns_its_client(num_clients: int) -> None:
    """Some slots are absent; their client is computed nowhere, and its result is 0."""
    mesh = jax.make_mesh((4,), ("anything",), axis_types=(AxisType.Auto,))
    rng = np.random.default_rng(num_clients)
    who = jnp.asarray(rng.permutation(num_clients), jnp.int32)
    present = jnp.asarray(rng.random(num_clients) < 0.7)

    def run(who: Array, present: Array) -> tuple[Tree, Tree]:
        axis = devices.owned("anything")
        mine = axis.assign(who, who, present, num_clients)
        first = axis.local_clients(num_clients)[0]

        def client(turn: tuple[Array, Array]) -> tuple[Tree, Tree]:
            slot, local_index = turn
            return (), (slot, first + local_index, jax.lax.axis_index("anything"))

        turns = mine.slots, mine.local_index
        return mine.gather(axis.fold(client, lambda *rest: (), (), turns)[1])

    slot, client, device = jax.jit(devices.over(mesh, run))(who, present)
    owner = devices.owner(np.asarray(who), num_clients, 4)
    for got, expected in ((slot, who), (client, who), (device, owner)):
        np.testing.assert_array_equal(got, np.where(present, expected, 0))


@pytest.mark.parametrize("num_devices", [1, 2, 3, 4])
def test_devices_own_blocks_of_clients_in_order(num_devices: int) -> None:
    for num_clients in range(1, 12):
        size = devices.clients_per_device(num_clients, num_devices)
        assert num_clients <= size * num_devices < num_clients + num_devices
        blocks = []
        for device in range(num_devices):
            first = devices.first_client(device, num_clients, num_devices)
            block = range(first, min(first + size, num_clients))
            assert {devices.owner(who, num_clients, num_devices) for who in block} <= {device}
            blocks += block
        assert blocks == list(range(num_clients))


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
