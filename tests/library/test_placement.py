"""Each device gets the examples and states of its own clients, and none is lost."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_inv import devices
from fedjax_inv.devices import ClientShards, Layout, SharedExamples
from fedjax_inv.types import Examples

RUNS = 3
NUM_EXAMPLES = 60


def shards(kind: Any, sizes: list[list[int]]) -> Any:
    """Return shards of the examples, in another order in each run, amid rows of no shard."""
    rng = np.random.default_rng(0)
    size = np.array(sizes)
    start = 2 + np.cumsum(size + 1, axis=1) - size - 1
    length = int((start + size).max()) + 3
    order = np.stack([rng.choice(NUM_EXAMPLES, length) for _ in sizes])
    return kind(*(jnp.asarray(leaf, jnp.int32) for leaf in (order, start, size)))


def rows(of: Any, run: int, shard: int, begin: int = 0, size: int | None = None) -> np.ndarray:
    order, start, sizes = (np.asarray(leaf)[run] for leaf in of)
    first = start[shard] + begin
    return order[first : first + (sizes[shard] if size is None else size)]


@pytest.mark.parametrize(("k_r", "k_c"), [(1, 2), (1, 3), (2, 2)])
def test_each_device_gets_the_examples_of_its_own_clients(k_r: int, k_c: int) -> None:
    x = {"image": np.arange(NUM_EXAMPLES * 2.0).reshape(-1, 2), "id": np.arange(NUM_EXAMPLES)}
    data = Examples(x, np.arange(NUM_EXAMPLES) % 7)
    train = shards(ClientShards, [[4, 0, 1, 7, 5], [1, 1, 0, 9, 0], [0, 3, 3, 3, 3]])
    test = shards(SharedExamples, [[6, 2], [3, 0], [1, 9]])
    inputs = {"train": train, "test": test, "seed": jnp.arange(RUNS)}
    layout = Layout(devices.mesh((k_r, k_c), jax.devices()), own=True, num_runs=RUNS)
    placed, mine = layout.place(data, inputs)
    runs, count = -(-RUNS // k_r), 0
    for number in range(k_r * k_c):
        local = np.asarray(placed.x["id"][number])
        (shard,) = (
            each
            for each in placed.x["id"].addressable_shards
            if each.device == jax.devices()[number]
        )
        np.testing.assert_array_equal(shard.data[0], local)
        np.testing.assert_array_equal(placed.x["image"][number][:, 0] / 2, local)
        np.testing.assert_array_equal(placed.y[number], local % 7)
        block, device = divmod(number, k_c)
        needed = {0}  # and row 0, which fills up
        for run in range(block * runs, min((block + 1) * runs, RUNS)):
            here = {
                name: of._replace(order=of.order[device], start=of.start[device])
                for name, of in mine.items()
                if devices.is_shards(of)
            }
            for client in np.flatnonzero(devices.owner(np.arange(5), 5, k_c) == device):
                expected = rows(train, run, client)
                np.testing.assert_array_equal(local[rows(here["train"], run, client)], expected)
                needed |= {*expected.tolist()}
            for index in range(2):
                begin, size = devices.part(int(test.size[run, index]), device, k_c)
                expected = rows(test, run, index, begin, size)
                found = local[rows(here["test"], run, index, 0, size)]
                np.testing.assert_array_equal(found, expected)
                needed |= {*expected.tolist()}
                count += size
        if k_r == 1:
            assert {*local.tolist()} <= needed
    assert count == int(test.size.sum())
    np.testing.assert_array_equal(mine["seed"][:RUNS], inputs["seed"])


@pytest.mark.parametrize("num_clients", [4, 5])
def test_states_come_back_from_devices_as_they_were(num_clients: int) -> None:
    layout = Layout(devices.mesh((1, 4), jax.devices()), own=True)
    states = {"own": jnp.arange(RUNS * num_clients * 3.0).reshape(RUNS, num_clients, 3)}
    placed = layout.place_clients(states)
    assert placed["own"].addressable_shards[0].data.shape == (RUNS, -(-num_clients // 4), 3)
    back = layout.gather_clients(placed, num_clients)
    np.testing.assert_array_equal(back["own"], states["own"])


@pytest.mark.parametrize(
    ("runs", "slots", "count", "expected"),
    [
        (3, 4, 2, (2, 1)),
        (1, 2, 2, (1, 2)),
        (12, 5, 8, (8, 1)),
        (5, 100, 16, (5, 3)),
        (1, 5, 8, (1, 5)),
        (1, 1, 8, (1, 1)),
    ],
)
def test_the_busiest_device_trains_as_few_clients_as_possible(
    runs: int, slots: int, count: int, expected: tuple[int, int]
) -> None:
    assert devices.shape_of_mesh(runs, slots, count) == expected


def test_processes_all_take_part_in_a_mesh() -> None:
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
