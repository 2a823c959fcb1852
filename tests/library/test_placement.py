"""Each device gets the examples and states of its own clients, and none is lost."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec

import federations
import slow
from benchmarks import hlo
from fedjax_inv import communication, devices, local, models, rounds, schedules
from fedjax_inv.algorithms import scaffold
from fedjax_inv.devices import ClientShards, Layout, SharedExamples, owner
from fedjax_inv.types import Examples, Federation

RUNS = 2


def mesh(num_devices: int) -> jax.sharding.Mesh:
    return jax.make_mesh((num_devices,), ("clients",), axis_types=(AxisType.Auto,))


def shards(kind: Any, sizes: list[list[int]], num_examples: int) -> Any:
    """Return shards of the examples, in another order in each run, amid rows of no shard."""
    rng = np.random.default_rng(0)
    size = np.array(sizes)
    start = 2 + np.cumsum(size + 1, axis=1) - size - 1
    length = int((start + size).max()) + 3
    order = np.stack([rng.choice(num_examples, length) for _ in sizes])
    return kind(*(jnp.asarray(leaf, jnp.int32) for leaf in (order, start, size)))


def rows(of: Any, run: int, client: int) -> np.ndarray:
    order, start, size = (np.asarray(leaf)[run] for leaf in of)
    return order[start[client] : start[client] + size[client]]


@pytest.mark.parametrize(("num_devices", "lanes"), slow.after(2, [(3, 2), (4, 64), (2, 0), (3, 0)]))
def test_each_device_gets_the_examples_of_its_own_clients(num_devices: int, lanes: int) -> None:
    num_examples = 60
    x = {"image": np.arange(num_examples * 2.0).reshape(-1, 2), "id": np.arange(num_examples)}
    data = Examples(jax.tree.map(jnp.asarray, x), jnp.arange(num_examples) % 7)
    train = shards(ClientShards, [[4, 0, 1, 7, 5], [1, 1, 0, 9, 0]], num_examples)
    test = shards(SharedExamples, [[6], [3]], num_examples)
    classes = shards(SharedExamples, [[2, 5], [0, 9]], num_examples)
    inputs = {"train": train, "test": test, "classes": classes, "seed": jnp.arange(RUNS)}
    layout, count = Layout(mesh(num_devices), own=True, lanes=lanes), 0
    placed, mine = layout.place(data, inputs)
    for device in range(num_devices):
        (local,) = (
            shard.data[0]
            for shard in placed.x["id"].addressable_shards
            if shard.device == mesh(num_devices).devices[device]
        )
        for leaf in (placed.x["image"][device][:, 0] / 2, placed.x["id"][device]):
            np.testing.assert_array_equal(leaf, local)
        np.testing.assert_array_equal(placed.y[device], local % 7)

        def ids(name: str, run: int, client: int, device: int = device, local: Any = local) -> Any:
            of_device = mine[name]._replace(order=mine[name].order[device])
            return np.asarray(local)[rows(of_device, run, client)]

        needed = set()
        for run in range(RUNS):
            for client in np.flatnonzero(owner(np.arange(5), 5, num_devices, lanes) == device):
                np.testing.assert_array_equal(ids("train", run, client), rows(train, run, client))
                needed |= {*rows(train, run, client).tolist()}
            for name, shared in (("test", test), ("classes", classes)):
                number = shared.size.shape[1]
                for client in range(number):
                    whole = rows(shared, run, client)
                    for part in range(layout.num_parts):
                        at = part * number + client
                        if owner(at, number * layout.num_parts, num_devices, lanes) != device:
                            continue
                        cut = (len(whole) * p // layout.num_parts for p in (part, part + 1))
                        got = ids(name, run, at)
                        np.testing.assert_array_equal(got, whole[slice(*cut)])
                        needed |= {*got.tolist()}
                        count += len(got)
        # Other rows only fill up.
        assert {*np.asarray(local).tolist()} <= needed | {0}
    assert count == int(test.size.sum() + classes.size.sum())
    np.testing.assert_array_equal(mine["seed"], inputs["seed"])


def test_all_examples_lie_on_every_device() -> None:
    data = Examples(jnp.arange(6.0), jnp.arange(6))
    inputs = {"train": shards(ClientShards, [[2, 3]], 6)}
    placed, mine = Layout(mesh(4), own=False).place(data, inputs)
    assert len(placed.x.sharding.device_set) == 4
    assert all(shard.data.shape == (6,) for shard in placed.x.addressable_shards)
    np.testing.assert_array_equal(mine["train"].order, inputs["train"].order)


@pytest.mark.parametrize("num_clients", [4, 5])
def test_states_come_back_from_devices_as_they_were(num_clients: int) -> None:
    layout = Layout(mesh(4), own=True)
    states = {"own": jnp.arange(RUNS * num_clients * 3.0).reshape(RUNS, num_clients, 3)}
    placed = layout.place_clients(states)
    assert placed["own"].addressable_shards[0].data.shape == (RUNS, -(-num_clients // 4), 3)
    back = layout.gather_clients(placed, num_clients)
    np.testing.assert_array_equal(back["own"], states["own"])
    shapes = layout.gather_clients(jax.eval_shape(lambda: placed), num_clients)
    assert shapes["own"].shape == states["own"].shape


@pytest.mark.slow
def test_devices_exchange_the_upload_once_and_no_clients_state() -> None:
    """Each client of SCAFFOLD has a network as its state; 8 of 8 attend."""
    federation = federations.federation((8,) * 8)
    model = models.mlp(federations.NUM_CLASSES, widths=(64,))
    algorithm = scaffold.scaffold(model, local.epochs(optax.sgd(0.1), batch_size=8))
    variables = federations.initial(model, jax.random.key(0))
    state = rounds.init(algorithm, variables, federation, jax.random.key(1))
    whole: Any = PartitionSpec()
    lies = rounds.State(whole, PartitionSpec("clients"), whole, whole, whole)

    def run(*arguments: Any) -> Any:
        return rounds.run(algorithm, *arguments, axis=devices.owned("clients"))

    on_all = jax.jit(devices.over(mesh(4), run, (lies, whole, whole), (lies, whole)))
    compiled = on_all.lower(state, schedules.everyone(8, 2), federation).compile()
    read = hlo.Program(compiled.as_text() or "")
    (sent,) = communication.traffic(algorithm, state, Federation(*federation))
    exchanged = hlo.collectives(read)
    assert {each.opcode for each in exchanged} == {"all-reduce"}
    reports = 100 * 8  # a few numbers of each slot, no network
    assert sent.up <= sum(each.num_bytes for each in exchanged) <= sent.up + reports


@pytest.mark.parametrize(
    ("runs", "slots", "count", "expected"),
    [
        (3, 4, 2, (2, 1)),
        (3, 2, 2, (2, 1)),
        (1, 2, 2, (1, 2)),
        (12, 5, 8, (8, 1)),
        (1, 100, 8, (1, 8)),
        (5, 100, 16, (5, 3)),
        (64, 10, 8, (8, 1)),
        (2, 6, 2, (2, 1)),
        (1, 5, 8, (1, 5)),
        (1, 1, 8, (1, 1)),
    ],
)
def test_the_busiest_device_trains_as_few_clients_as_possible(
    runs: int, slots: int, count: int, expected: tuple[int, int]
) -> None:
    found = devices.shape_of_mesh(runs, slots, count)
    assert found == expected

    def cost(of_runs: int, of_clients: int) -> float:
        waiting = 1.5 if of_clients > 1 else 1
        return waiting * -(-runs // of_runs) * -(-slots // of_clients)

    for of_runs in range(1, count + 1):
        for of_clients in range(1, count // of_runs + 1):
            assert cost(of_runs, of_clients) >= cost(*found)


def test_processes_all_take_part_in_a_mesh() -> None:
    assert devices.shape_of_mesh(1, 1, 4, multiple=2) in {(2, 1), (1, 2)}
    assert devices.shape_of_mesh(1, 100, 16, most=8) == (1, 8)


@pytest.mark.parametrize(
    ("num_bytes", "lanes"), [(1, 64), (2**22, 64), (2**22 + 1, 32), (2**25, 8), (2**40, 8)]
)
def test_the_sums_of_lanes_are_bounded_by_memory(num_bytes: int, lanes: int) -> None:
    assert devices.number_of_lanes(num_bytes) == lanes


def test_a_mesh_takes_the_first_devices() -> None:
    assert devices.mesh((1, 1), jax.devices()) is None
    over = devices.mesh((1, 2), jax.devices())
    assert over is not None
    assert over.axis_names == (devices.RUNS, devices.CLIENTS)
    assert over.devices.tolist() == [jax.devices()[:2]]
