"""A layout of runs and clients on devices, and states that come back from them."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

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


@given(st.integers(1, 5), st.integers(1, 5), st.sampled_from([1, 2, 4]), st.randoms())
def test_runs_that_share_their_batches_lie_together(
    num_seeds: int, num_settings: int, number: int, random: random.Random
) -> None:
    """In any order of the runs, each has a place, and devices have equally many places."""
    numbers = [*range(num_seeds * num_settings)]
    random.shuffle(numbers)
    table = np.array(numbers).reshape(num_seeds, num_settings)
    plain = Layout(devices.mesh((number, 1), jax.devices()), num_runs=table.size)
    layout = plain.sharing(table)
    assert layout.settings > 1 or layout == plain
    runs = jax.device_put(np.arange(table.size) + 10)
    placed = np.asarray(layout.place_runs(runs))
    assert len(placed) <= 1.25 * -(-table.size // number) * number
    assert len(placed) % (number * layout.settings) == 0
    row_of = {run + 10: row for row, runs in enumerate(table) for run in runs}
    together = [row_of[run] for run in placed.tolist()]
    if layout.settings > 1:
        assert (np.reshape(together, (-1, layout.settings)).std(1) == 0).all()
    np.testing.assert_array_equal(layout.gather_runs(placed), runs)


def test_devices_share_seeds_before_settings() -> None:
    two = Layout(devices.mesh((2, 1), jax.devices()), num_runs=12)
    assert two.sharing(np.arange(12).reshape(6, 2).T).settings == 6
    one_seed = two.sharing(np.arange(12)[None])
    assert (one_seed.settings, one_seed.order) == (6, ())
