"""Runs whose examples and states lie on the host give the bits of runs on the devices."""

import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import pytest

import federations
from federations import assert_close, assert_same_bits, plain
from fedjax_inv import local, program, schedules
from fedjax_inv.algorithms.fedavg import fedavg
from fedjax_inv.algorithms.fedbn import fedbn
from fedjax_inv.algorithms.scaffold import scaffold
from fedjax_inv.checks import UsageError
from fedjax_inv.data import federation, sources, stored
from fedjax_inv.data.dataset import Dataset
from fedjax_inv.devices import Layout, loops, ownership, placement
from fedjax_inv.program import parts, streams
from fedjax_inv.program.kept import Kept
from fedjax_inv.types import Array, Cohort, Tree

C, T, EVERY, LANES = 11, 6, 3, 8
RUNS = program.grid((0, 1), learning_rate=(0.1,))
ALGORITHMS = {"fedavg": fedavg, "scaffold": scaffold, "fedbn": fedbn}


@pytest.fixture(scope="module", autouse=True)
def rounded_in_one_way() -> Iterator[None]:
    """Without optimisation XLA may round the same operations in two ways."""
    with pytest.MonkeyPatch.context() as patch:
        options = loops._OPTIONS | {"xla_backend_optimization_level": 1}
        patch.setattr(loops, "_OPTIONS", options)
        yield


@functools.cache
def dataset() -> Dataset:
    rng = np.random.default_rng(0)
    y = rng.integers(0, federations.NUM_CLASSES, 150).astype(np.int32)
    x = rng.integers(0, 200, (150, *federations.IMAGE)) + 20 * y[:, None, None, None]
    return Dataset(x.astype(np.uint8), y, tuple("abc"), np.zeros(150, np.int32), ("all",), y < 0)


@functools.cache
def world() -> tuple[Any, dict[int, federation.Split]]:
    """Return the examples, and clients of different sizes, one of them with none, by seed."""
    whole = dataset()
    data = federation.examples(whole.x, whole.y)

    def partition(rows: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
        cuts = np.sort(rng.integers(0, len(rows), C - 2))
        return [*np.split(rng.permutation(rows), cuts), rows[:0]]

    return data, {
        run.seed: federation.split(
            whole, data, partition, held_out=None, seed=run.seed, validation=0.3
        )
        for run in RUNS
    }


def schedule(key: Array) -> Cohort:
    """Three clients a round, some of which drop out; at the end, all."""
    few = schedules.dropout(schedules.sampled(key, C, 3, T), key, 0.3)
    return few._replace(present=few.present.at[4].set(False))


class Ran(NamedTuple):
    """The outcomes and the states of a run."""

    outcomes: list[Tree]
    training: Any  # as stored, after each segment
    clients: Tree  # [R, C, ...] in the end


def experiment(name: str) -> program.Experiment:
    model = federations.small_normed()

    def algorithm(hyper: Any) -> Any:
        work = local.epochs(optax.sgd(hyper["learning_rate"]), batch_size=4)
        return ALGORITHMS[name](model, work)

    return program.Experiment(model, algorithm)


@functools.cache
def given(name: str) -> tuple[Any, program.Inputs, Cohort]:
    data, splits = world()
    inputs = program.inputs(RUNS, splits, num_classes=federations.NUM_CLASSES)
    return data, inputs, jax.device_get(program.cohorts(schedule, inputs))


def advanced(compiled: program.Program, training: Any, name: str, first: int = 0) -> Ran:
    data, inputs, cohorts = given(name)
    outcomes, trainings = [], []
    if training is None:
        training = compiled.init(data, inputs)
        outcomes.append(compiled.gathered(compiled.evaluate(data, inputs, training)))
    for at in range(first, T, EVERY):
        part = jax.tree.map(lambda leaf, at=at: leaf[:, at : at + EVERY], cohorts)
        training, outcome = compiled.segment(data, inputs, training, part)
        outcomes.append(compiled.gathered(outcome))
        trainings.append(plain(compiled.stored(inputs, training)))
    return Ran(outcomes, trainings, None)


@functools.cache
def resident(name: str) -> Ran:
    made = program.make(experiment(name), run_chunk=1, layout=Layout(lanes=LANES))
    found = advanced(made, None, name)
    return found._replace(clients=found.training[-1].state.clients)


def stream(name: str, folder: Path, layout: Layout, most_bytes: int = 1) -> streams.Stream:
    _, inputs, cohorts = given(name)
    source = stored.of_arrays(dataset().x, dataset().y)
    plan = streams.plan(
        source, inputs, cohorts, layout, every=EVERY, most_bytes=most_bytes, state_bytes=100
    )

    def opened(like: Tree) -> Kept:
        return empty(folder / "states", like, (len(RUNS), C), reuses=2)

    made = streams.Stream(
        experiment(name),
        source,
        inputs,
        cohorts,
        plan,
        run_chunk=1,
        layout=layout,
        most_bytes=most_bytes,
    )
    made.open_kept = opened
    return made


def clients_of(made: streams.Stream) -> Tree:
    """The states of all clients."""
    everyone = np.tile(np.arange(C), (len(RUNS), 1))
    made._drained()
    return made._states(everyone, np.full(len(RUNS), C), np.zeros(everyone.shape, bool))


def streamed(made: streams.Stream, name: str) -> Ran:
    found = advanced(made.program, None, name)
    clients = clients_of(made) if name != "fedavg" else ()
    made.close()
    return found._replace(clients=clients)


def without_clients(training: Any) -> Any:
    return training._replace(state=training.state._replace(clients=()))


def assert_same_run(
    found: Ran, expected: Ran, same: Callable[[Tree, Tree], None] = assert_same_bits
) -> None:
    for one, other in zip(found.outcomes, expected.outcomes, strict=True):
        same(one, other)
    for one, other in zip(found.training, expected.training, strict=True):
        same(without_clients(one), without_clients(other))
    same(found.clients, expected.clients)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "most_bytes"),
    [
        ("scaffold", 1),  # a round in a part, a batch in a part of an evaluation
        ("fedbn", 1),
        ("fedavg", 2**20),
    ],
)
def test_a_streamed_run_has_the_bits_of_one_on_the_device(
    name: str, most_bytes: int, tmp_path: Path
) -> None:
    layout = Layout(lanes=LANES, streams=True)
    made = stream(name, tmp_path, layout, most_bytes)
    assert made.plan.num_rounds == (1 if most_bytes == 1 else EVERY)
    assert made.plan.room.clients < C
    assert_same_run(streamed(made, name), resident(name))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shape", "most_bytes", "same"),
    [
        ("scaffold", (2, 2), 1, assert_same_bits),
        ("fedbn", (1, 2), 1, assert_close),  # 2e-9 apart in the bias of a norm
        ("fedbn", (1, 3), 2**20, assert_close),  # all clients in one part
    ],
)
def test_devices_get_the_rows_of_their_slots(
    name: str,
    shape: tuple[int, int],
    most_bytes: int,
    same: Callable[[Tree, Tree], None],
    tmp_path: Path,
) -> None:
    mesh = placement.mesh(shape, jax.devices())
    layout = Layout(mesh, lanes=LANES, num_runs=len(RUNS), streams=True)
    made = stream(name, tmp_path, layout, most_bytes)
    one = stream(name, tmp_path, Layout(lanes=LANES, streams=True), most_bytes)
    assert made.plan.room.on_device < one.plan.room.on_device
    assert_same_run(streamed(made, name), resident(name), same)


@pytest.mark.parametrize("lanes", [0, 3, LANES])
@pytest.mark.parametrize("most_clients", [1, 4, 8, C])
def test_devices_evaluate_the_clients_whose_rows_they_have(
    lanes: int, most_clients: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    number = 3
    layout = Layout(
        placement.mesh((1, number), jax.devices()), lanes=lanes, num_runs=len(RUNS), streams=True
    )
    made = stream("fedbn", tmp_path, layout, 2**30)
    monkeypatch.setattr(streams, "_MOST_CLIENTS", most_clients)
    shards = made._evaluated["valid"].shards
    # In one run the middle and the last client have no examples, in the other the first.
    size = np.array(shards.size) + 1
    size[0, [4, 5, C - 1]] = size[1, 0] = 0
    shards = parts.Shards(
        np.tile(np.arange(size.sum(1).max()), (2, 1)), size.cumsum(1) - size, size
    )
    monkeypatch.setattr(parts, "on_host", lambda *arguments: shards)
    each = made._evaluation(given("fedbn")[1].valid)
    assert len(each.chunks) == -(-C // most_clients)
    found: list[list[int]] = [[] for _ in RUNS]
    for chunk in each.chunks:
        cohort = streams._cohort_of(shards, chunk, each.slots)
        part = parts.needed(shards, cohort, layout, each.room)
        room = ownership.clients_per_device(each.room.clients, number, lanes)
        for run, count in enumerate(part.num_clients):
            for place, client in enumerate(part.shards.who[run][:count]):
                device = place // room  # as `evaluation` shares the clients of a part
                begin = part.shards.start[run][place]
                places = part.shards.order[device][run][begin : begin + size[run, client]]
                rows = part.rows[device][places] - shards.start[run, client]
                assert rows.tolist() == [*range(size[run, client])]
                found[run].append(client)
    assert found == [np.flatnonzero(of_run).tolist() for of_run in size]


def test_states_count_as_memory_of_an_evaluation(tmp_path: Path) -> None:
    made = stream("fedbn", tmp_path, Layout(lanes=LANES, streams=True), 2**20)
    inputs = given("fedbn")[1]
    made._state_bytes = 2**20 // (2 * len(RUNS)) - 2**13  # two clients, and their examples
    assert made._evaluation(inputs.valid).slots == 2
    # New clients have no states on the host.
    assert len(made._evaluation(inputs.test).chunks) == 1


def test_a_reader_that_fails_in_the_thread_ends_the_run(tmp_path: Path) -> None:
    made = stream("scaffold", tmp_path, Layout(lanes=LANES, streams=True))
    calls = []

    def fails(rows: np.ndarray) -> Any:
        calls.append(rows)
        raise UsageError("the reader", ..., "is broken")

    made._source = made._source._replace(take=fails)
    with pytest.raises(UsageError, match="the reader: is broken"):
        made.program.init(*given("scaffold")[:2])
    assert len(calls) == 1
    made.close()  # does not hang


def few(x: np.ndarray, y: np.ndarray, folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """The arrays as mapped files."""
    np.save(folder / "x.npy", x)
    np.save(folder / "y.npy", y)
    return tuple(np.load(folder / f"{name}.npy", mmap_mode="r") for name in "xy")


def test_rows_are_read_from_files(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(50, 3, 2)).astype(np.float32), np.arange(50, dtype=np.int32)
    rows = np.array([3, 4, 5, 49, 0, 0, 17, 18, 20])
    mapped_x, mapped_y = few(x, y, tmp_path)
    for each in (
        stored.of_arrays({"a": x}, y),
        stored.of_arrays({"a": mapped_x}, mapped_y),
        stored.of_arrays({"a": mapped_x[0:]}, mapped_y[:]),
    ):
        found = each.take(rows)
        np.testing.assert_array_equal(found.x["a"], x[rows])
        np.testing.assert_array_equal(found.y, y[rows])
        assert each.take(rows[:0]).x["a"].shape == (0, 3, 2)
    # What is written to a map that copies on writing is not in the file.
    changed = np.load(tmp_path / "x.npy", mmap_mode="c")
    changed += 1
    np.testing.assert_array_equal(stored.of_arrays(changed, y).take(rows).x, x[rows] + 1)
    later = stored.of_arrays(mapped_x[10:30], mapped_y[10:30])
    np.testing.assert_array_equal(later.take(np.array([1, 2, 19])).x, x[[11, 12, 29]])


def test_a_file_that_becomes_shorter_is_named(tmp_path: Path) -> None:
    x, y = np.ones((50, 30), np.float32), np.arange(50, dtype=np.int32)
    each = stored.of_arrays(*few(x, y, tmp_path))
    each.take(np.array([49]))
    with open(tmp_path / "x.npy", "r+b") as file:
        file.truncate(3000)
    with pytest.raises(UsageError, match=r"x\.npy: ends before row 49 of 50"):
        each.take(np.array([3, 49]))


def test_records_are_decoded_once_while_they_are_in_the_cache() -> None:
    was_read: list[int] = []

    class Source(list[int]):
        """Records that are read several at once, as TFDS's."""

        def __getitems__(self, rows: list[int]) -> list[int]:
            was_read.extend(rows)
            return [self[row] for row in rows]

    source = Source(range(100, 130))
    each = stored.of_records(
        source,
        inputs=lambda record: np.full((4, 4), record, np.uint8),
        targets=lambda record: np.int32(record % 3),
        cache_bytes=3 * 20,
    )
    assert each.shapes.x.shape == (30, 4, 4)
    found = each.take(np.array([5, 2, 5]))
    np.testing.assert_array_equal(found.x[:, 0, 0], [105, 102, 105])
    np.testing.assert_array_equal(found.y, [0, 0, 0])
    each.take(np.array([5, 7, 8]))  # of which 5 is known, and 2 leaves
    each.take(np.array([2]))
    assert was_read == [2, 5, 7, 8, 2]


def test_records_have_the_shapes_and_names_of_the_first() -> None:
    inputs = [{"a": np.zeros(3)}, {"b": np.zeros(3)}, {"a": np.zeros(2)}, {"a": np.zeros(3)}]
    each = stored.of_records(inputs, inputs=lambda x: x, targets=lambda x: np.int32(0))
    assert each.take(np.array([0, 3])).x["a"].shape == (2, 3)
    for row in (1, 2):
        with pytest.raises(
            UsageError, match=rf"^source\[{row}\]: has another shape than source\[0"
        ):
            each.take(np.array([row]))


def test_images_of_a_folder_are_records(tmp_path: Path) -> None:
    from PIL import Image

    pairs = []
    for shade in (10, 200):
        path = tmp_path / f"{shade}.png"
        Image.fromarray(np.full((8, 6), shade, np.uint8)).save(path)
        pairs.append((path, shade // 100))
    each = stored.of_records(
        pairs,
        inputs=lambda pair: sources.image_of(pair[0], (3, 4), "L"),
        targets=lambda pair: np.int32(pair[1]),
    )
    found = each.take(np.array([1, 0]))
    assert found.x.shape == (2, 4, 3, 1)
    np.testing.assert_array_equal(found.x[:, 0, 0, 0], [200, 10])
    np.testing.assert_array_equal(found.y, [2, 0])
    pairs[1][0].write_bytes(b"no image")
    with pytest.raises(UsageError, match="must be an image"):
        stored.of_records(pairs[1:], inputs=lambda p: sources.image_of(p[0], (3, 4)), targets=len)
    with pytest.raises(UsageError, match="mode='HSV': must be one of RGB, L"):
        sources.image_of(pairs[0][0], (3, 4), "HSV")


def empty(path: Path, like: Tree, shape: tuple[int, int], **options: Any) -> Kept:
    path.touch()
    return Kept(open(path, "r+b"), like, shape, **options)


def states_in(path: Path, **options: Any) -> Kept:
    like = {"a": jax.ShapeDtypeStruct((3,), np.float32), "b": jax.ShapeDtypeStruct((), np.int32)}
    return empty(path, like, (2, 5), **options)


def tree_of(*values: int) -> Tree:
    numbers = np.array(values)
    return {"a": np.tile(numbers[:, None], 3).astype(np.float32), "b": numbers.astype(np.int32)}


def read(kept: Kept, run: int, *who: int) -> list[int]:
    into = tree_of(*[0] * len(who))
    kept.read(run, np.array(who), into, np.arange(len(who)))
    np.testing.assert_array_equal(into["a"], np.tile(into["b"][:, None], 3))
    return into["b"].tolist()


def test_states_that_a_checkpoint_names_are_not_written_over(tmp_path: Path) -> None:
    path = tmp_path / "states"
    kept = states_in(path, reuses=1)
    kept.write(0, np.array([1, 3]), tree_of(10, 30))
    kept.write(1, np.array([1]), tree_of(11))
    first = kept.places()
    kept.saved(first)
    kept.write(0, np.array([1]), tree_of(20))  # into a record of its own
    kept.write(0, np.array([1]), tree_of(21))  # into the same
    assert read(kept, 0, 1, 3) == [21, 30]
    assert read(kept, 1, 1) == [11]
    assert kept.known(0, np.arange(5)).tolist() == [False, True, False, True, False]
    size = path.stat().st_size
    again = states_in(path, before=[first])
    again.begin(first)  # as after a kill
    assert read(again, 0, 1, 3) == [10, 30]
    again.close()
    for value in range(5):  # two checkpoints are kept, and the records of older ones used again
        kept.saved(kept.places())
        kept.write(0, np.array([1]), tree_of(value))
    assert path.stat().st_size <= size + 2 * (16 + 12)
    assert read(kept, 0, 1) == [4]
    kept.close()


def test_states_of_many_leaves_that_the_system_moves_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    shapes = [(2, 3), (), (0, 4), (5,)] * 300  # more than one call takes
    states = [rng.normal(size=(3, *shape)).astype(np.float32) for shape in shapes]
    states[1] = rng.integers(0, 2, 3).astype(bool)
    like = [jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype) for leaf in states]
    kept = empty(tmp_path / "states", like, (1, 9))
    for name in ("preadv", "pwritev"):
        whole = getattr(os, name)

        def at_most(file: int, parts: list[Any], at: int, whole: Any = whole) -> int:
            assert len(parts) <= 1024  # as many as Linux takes
            few = [memoryview(part)[:7] for part in parts[:3]]  # ends within a number
            lengths = [len(part) for part in parts]
            until = next((i + 1 for i, n in enumerate(lengths) if n > 7), len(parts))
            return int(whole(file, few[:until], at))

        monkeypatch.setattr(os, name, at_most)
    kept.write(0, np.array([4, 8, 2]), states)
    found = [np.zeros_like(leaf) for leaf in states]
    kept.read(0, np.array([2, 4, 8]), found, np.array([2, 0, 1]))
    assert_same_bits(found, states)
    kept.close()


def test_a_damaged_file_of_states_and_one_of_another_run_are_refused(tmp_path: Path) -> None:
    kept, other = states_in(tmp_path / "one"), states_in(tmp_path / "other")
    kept.write(0, np.array([2]), tree_of(5))
    with pytest.raises(UsageError, match="is of another run than the checkpoint"):
        other.begin(kept.places())
    # The places of a run without a selected state are 0.
    first = kept.places()
    kept.begin(first._replace(file=np.stack([0 * first.file[0], first.file[1]])))
    with pytest.raises(UsageError, match="is of another run than the checkpoint"):
        kept.begin(first._replace(file=np.stack([first.file[0], first.file[1] + 1])))
    content = bytearray((tmp_path / "one").read_bytes())
    with open(tmp_path / "one", "r+b") as file:
        file.seek(len(content) - 20)
        file.write(bytes([content[-20] ^ 1]))
    with pytest.raises(UsageError, match="the state of client 2 is not there"):
        read(kept, 0, 2)
    places = kept.places()
    with open(tmp_path / "one", "r+b") as file:
        file.truncate(len(content) - 1)
    with pytest.raises(UsageError, match="bytes, must have"):
        kept.begin(places)
    with open(tmp_path / "one", "r+b") as file:
        file.truncate(len(content) - len(tree_of(5)["a"].tobytes()) - 16)  # without the record
    cut = states_in(tmp_path / "one", before=[places])
    with pytest.raises(UsageError, match="bytes, must have"):
        cut.begin(places)
    (tmp_path / "no").write_bytes(b"nothing of this kind " * 9)
    with pytest.raises(UsageError, match="holds no states of this run"):
        states_in(tmp_path / "no")
