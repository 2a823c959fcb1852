"""Runs whose examples lie on the host are those of runs with all examples on the devices."""

import functools
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

import federations
from federations import assert_same_bits, plain
from fedjax_inv import devices, local, program, schedules, streaming
from fedjax_inv.algorithms.fedbn import fedbn
from fedjax_inv.algorithms.scaffold import scaffold
from fedjax_inv.checks import UsageError
from fedjax_inv.data import federation, sources, stored
from fedjax_inv.data.dataset import Dataset
from fedjax_inv.devices import Layout
from fedjax_inv.types import Array, Cohort, Tree

C, T, EVERY = 11, 6, 3
RUNS = program.grid((0, 1), learning_rate=(0.1,))
ALGORITHMS: dict[str, Any] = {"scaffold": scaffold, "fedbn": fedbn}


@functools.cache
def dataset() -> Dataset:
    rng = np.random.default_rng(0)
    y = rng.integers(0, federations.NUM_CLASSES, 150).astype(np.int32)
    x = rng.integers(0, 200, (150, *federations.IMAGE)) + 20 * y[:, None, None, None]
    return Dataset(x.astype(np.uint8), y, tuple("abc"), np.zeros(150, np.int32), ("all",), y < 0)


@functools.cache
def given() -> tuple[Any, program.Inputs, Cohort]:
    """Return the examples, clients of different sizes, one of them with none, and cohorts."""
    whole = dataset()
    data = federation.examples(whole.x, whole.y)

    def partition(rows: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
        cuts = np.sort(rng.integers(0, len(rows), C - 2))
        return [*np.split(rng.permutation(rows), cuts), rows[:0]]

    def schedule(key: Array) -> Cohort:
        few = schedules.dropout(schedules.sampled(key, C, 3, T), key, 0.3)
        return few._replace(present=few.present.at[4].set(False))

    splits = {
        run.seed: federation.split(
            whole, data, partition, held_out=None, seed=run.seed, validation=0.3
        )
        for run in RUNS
    }
    inputs = program.inputs(RUNS, splits, num_classes=federations.NUM_CLASSES)
    return data, inputs, jax.device_get(program.cohorts(schedule, inputs))


def made(name: str, layout: Layout) -> program.Program:
    model = federations.small_normed()

    def algorithm(hyper: Any) -> Any:
        work = local.epochs(optax.sgd(hyper["learning_rate"]), batch_size=4)
        return ALGORITHMS[name](model, work)

    return program.make(program.Experiment(model, algorithm), run_chunk=1, layout=layout)


def streamed(
    name: str, part_bytes: int, layout: Layout, source: stored.Stored | None = None
) -> program.Program:
    _, inputs, cohorts = given()
    source = stored.of_arrays(dataset().x, dataset().y) if source is None else source
    return streaming.streamed(
        made(name, layout), source, inputs, cohorts, layout, every=EVERY, part_bytes=part_bytes
    )


def segment(compiled: program.Program, data: Any, training: Any, first: int) -> tuple[Any, Tree]:
    _, inputs, cohorts = given()
    part = jax.tree.map(lambda leaf: leaf[:, first : first + EVERY], cohorts)
    training, outcome = compiled.segment(data, inputs, training, part)
    return training, compiled.gathered(outcome)


def result(compiled: program.Program, data: Any, inputs: program.Inputs) -> Tree:
    """Return the outcomes before the rounds and after each segment, and the last training."""
    training = compiled.init(data, inputs)
    outcomes = [compiled.gathered(compiled.evaluate(data, inputs, training))]
    for first in range(0, T, EVERY):
        training, outcome = segment(compiled, data, training, first)
        outcomes.append(outcome)
    return plain((outcomes, compiled.stored(given()[1], training)))


@functools.cache
def resident(name: str) -> Tree:
    return result(made(name, Layout()), *given()[:2])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "part_bytes", "shape"),
    [
        ("scaffold", 5000, (1, 1)),  # a round in a part
        ("scaffold", 2**30, (2, 2)),
        ("fedbn", 5000, (1, 2)),
    ],
)
def test_a_streamed_run_is_the_run_with_all_examples_on_the_devices(
    name: str, part_bytes: int, shape: tuple[int, int]
) -> None:
    layout = Layout(devices.mesh(shape, jax.devices()), num_runs=len(RUNS))
    found = result(streamed(name, part_bytes, layout), None, given()[1])
    for one, other in zip(*map(jax.tree.leaves, (found, resident(name))), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_a_run_goes_on_from_what_is_stored() -> None:
    _, inputs, _ = given()
    compiled = streamed("scaffold", 5000, Layout())
    training, _ = segment(compiled, None, compiled.init(None, inputs), 0)
    begun = compiled.placed(plain(compiled.stored(inputs, training)))
    expected = segment(compiled, None, training, EVERY)
    assert_same_bits(segment(compiled, None, begun, EVERY), expected)


def test_a_reader_that_fails_in_the_thread_ends_the_run() -> None:
    _, inputs, _ = given()
    source, reads = stored.of_arrays(dataset().x, dataset().y), []

    def fails(rows: np.ndarray) -> Any:
        reads.append(len(rows))
        if len(reads) > 2:
            raise OSError("unplugged")
        return source.take(rows)

    compiled = streamed("scaffold", 1, Layout(), source._replace(take=fails))
    with pytest.raises(OSError, match="unplugged"):
        segment(compiled, None, compiled.init(None, inputs), 0)


def test_what_cannot_be_streamed_is_refused() -> None:
    _, inputs, cohorts = given()
    source = stored.of_arrays(dataset().x, dataset().y)
    watched: Any = ()
    for given_inputs, layout in (
        (inputs, Layout(own=True)),
        (inputs._replace(watched=watched), Layout()),
    ):
        with pytest.raises(UsageError):
            streaming.streamed(
                made("scaffold", layout), source, given_inputs, cohorts, layout, every=EVERY
            )


def test_rows_of_mapped_files_and_of_records(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(50, 3, 2)).astype(np.float32), np.arange(50, dtype=np.int32)
    np.save(tmp_path / "x.npy", x)

    class Source(list[int]):
        """Records that are read several at once, as TFDS's."""

        def __getitems__(self, rows: list[int]) -> list[int]:
            return [self[row] for row in rows]

    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    for each in (
        stored.of_arrays({"a": mapped}, y),
        stored.of_records([*range(50)], inputs=lambda row: {"a": x[row]}, targets=y.__getitem__),
        stored.of_records(Source(range(50)), inputs=lambda r: {"a": x[r]}, targets=y.__getitem__),
    ):
        assert each.row_bytes == 28
        assert each.shapes.x["a"].shape == (50, 3, 2)
        rows = np.array([3, 4, 49, 0, 0, 17])
        found = each.take(rows)
        np.testing.assert_array_equal(found.x["a"], x[rows])
        np.testing.assert_array_equal(found.y, y[rows])


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
