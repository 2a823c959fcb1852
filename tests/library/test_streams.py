"""Runs whose examples lie on the host are those of runs with all examples on the devices."""

import dataclasses
import functools
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import federations
from federations import assert_close, assert_same_bits, plain
from fedjax_inv import schedules, streaming
from fedjax_inv.algorithms import fedbn, scaffold
from fedjax_inv.callbacks import Callback
from fedjax_inv.data import images, stored
from fedjax_inv.devices import Devices
from fedjax_inv.fit import plan
from fedjax_inv.fitted import Fitted
from fedjax_inv.plan import Evaluations, Plan
from fedjax_inv.types import Array, Cohort

FACTORIES: dict[str, Any] = {"scaffold": scaffold.scaffold, "fedbn": fedbn.fedbn}
STREAMED = Devices(1, stream=True)


def clients() -> list[tuple[np.ndarray, np.ndarray]]:
    """Eleven clients of other sizes, one of which has no examples."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, federations.NUM_CLASSES, 150)
    x = rng.integers(0, 200, (150, *federations.IMAGE)) + 20 * y[:, None, None, None]
    cuts = [*np.sort(rng.integers(0, 150, 9)), 150]
    return [*zip(np.split(x.astype(np.uint8), cuts), np.split(y, cuts), strict=True)]


def schedule(key: Array, num_clients: int, num_rounds: int) -> Cohort:
    few = schedules.dropout(schedules.sampled(key, num_clients, 3, num_rounds), key, 0.3)
    return few._replace(present=few.present.at[4].set(False))


def made(name: str, used: Devices) -> Plan:
    return plan(
        FACTORIES[name],
        federations.small_normed(),
        clients(),
        rounds=6,
        grid={"seed": [0, 1]},
        test=clients()[0],
        validation=0.3,
        batch_size=4,
        learning_rate=0.1,
        schedule=schedule,
        evaluations=Evaluations(3, start=True),
        devices=used,
    )


@functools.cache
def resident(name: str) -> Fitted:
    return made(name, Devices(1)).train()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "part_bytes", "number"),
    [
        ("scaffold", 5000, 1),  # a round in a part
        ("scaffold", 2**30, 4),
        ("fedbn", 5000, 2),
    ],
)
def test_a_streamed_run_is_the_run_with_all_examples_on_the_devices(
    name: str, part_bytes: int, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(streaming.Streamed.__init__.__kwdefaults__, "part_bytes", part_bytes)
    found, expected = made(name, Devices(number, stream=True)).train(), resident(name)
    assert_close(found.history.values, expected.history.values, rtol=0, atol=1e-5)
    assert_close(found.stored(), expected.stored(), rtol=0, atol=1e-5)


@pytest.mark.slow
def test_a_run_goes_on_from_what_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(streaming.Streamed.__init__.__kwdefaults__, "part_bytes", 5000)
    seen = []

    class Stopping(Callback):
        def evaluated(self, fitted: Fitted) -> str:
            seen.append(jax.tree.map(jnp.copy, fitted.stored()))
            return ""

    class Continued(Callback):
        def begin(self, fitted: Fitted) -> None:
            fitted.restore(seen[1], 3)

    whole = made("scaffold", STREAMED).train([Stopping()])
    again = made("scaffold", STREAMED).train([Continued()])
    assert_same_bits(plain(again.stored()), plain(whole.stored()))


def test_a_reader_that_fails_in_the_thread_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(streaming.Streamed.__init__.__kwdefaults__, "part_bytes", 1)
    of_arrays, reads = stored.of_arrays, []

    def failing(*arrays: Any) -> stored.Stored:
        source = of_arrays(*arrays)

        def take(rows: np.ndarray) -> Any:
            reads.append(threading.current_thread())
            if reads[-1] is not threading.main_thread():
                raise OSError("unplugged")
            return source.take(rows)

        return source._replace(take=take)

    monkeypatch.setattr(stored, "of_arrays", failing)
    with pytest.raises(OSError, match="unplugged"):
        dataclasses.replace(made("scaffold", STREAMED), evaluations=Evaluations(3)).train()
    assert reads[0] is not reads[-1]


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
        inputs=lambda pair: images.image_of(pair[0], (3, 4), "L"),
        targets=lambda pair: np.int32(pair[1]),
    )
    found = each.take(np.array([1, 0]))
    assert found.x.shape == (2, 4, 3, 1)
    np.testing.assert_array_equal(found.x[:, 0, 0, 0], [200, 10])
    np.testing.assert_array_equal(found.y, [2, 0])
