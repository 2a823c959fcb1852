"""A layout of runs and clients on devices, and states that come back from them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_inv import devices
from fedjax_inv.devices import Layout

RUNS = 3


@pytest.mark.parametrize("num_clients", [4, 5])
def test_states_come_back_from_devices_as_they_were(num_clients: int) -> None:
    layout = Layout(devices.mesh((1, 4), jax.devices()), own=True)
    states = {"own": jnp.arange(RUNS * num_clients * 3.0).reshape(RUNS, num_clients, 3)}
    placed = layout.place_clients(states)
    assert placed["own"].addressable_shards[0].data.shape == (RUNS, -(-num_clients // 4), 3)
    back = layout.gather_clients(placed, num_clients)
    np.testing.assert_array_equal(back["own"], states["own"])


def test_the_busiest_device_trains_as_few_clients_as_possible() -> None:
    for runs, slots, count, expected in (
        *((3, 4, 2, (2, 1)), (1, 2, 2, (1, 2)), (12, 5, 8, (8, 1))),
        *((5, 100, 16, (5, 3)), (1, 5, 8, (1, 5)), (1, 1, 8, (1, 1))),
    ):
        assert devices.shape_of_mesh(runs, slots, count) == expected
    # Processes all take part.
    assert devices.shape_of_mesh(1, 1, 4, multiple=2) in {(2, 1), (1, 2)}


def test_devices_hold_their_own_clients_where_all_attend() -> None:
    there = jax.devices()
    assert Layout.of(there[:1], 6, 4, 4).mesh is None
    shared = Layout.of(there[:2], 6, 4, 4)  # runs send each other nothing
    assert (shared.run_devices, shared.client_devices, shared.own) == (2, 1, False)
    alone = Layout.of(there, 1, 8, 8)
    assert (alone.run_devices, alone.client_devices, alone.own) == (1, 4, True)
    assert not Layout.of(there, 1, 8, 9).own
    assert not Layout.of(there, 1, 8, 8, own=False).own
