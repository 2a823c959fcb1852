"""--hold=stream: the figures of a run on the device, from examples and states on the host."""

import errno
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from fedjax_inv.checks import UsageError
from fedjax_inv.devices import loops
from fedjax_inv_experiments import evaluate, export, train
from fedjax_inv_experiments.experiment import assemble, config
from fedjax_inv_experiments.parts import machine
from fedjax_inv_experiments.running import states as states_file
from runs import Ran, go_on, halved, metrics, no_figures, parsed, ran, states

FLAGS: dict[str, Any] = dict(
    algorithm=("scaffold",),  # whose clients keep something
    angles=(0.0, 30.0),
    widths=(8,),
    rounds=4,
    eval_every=2,
    clients=7,
    cohort=3,
    partition="iid",
    batch_size=64,
    devices="1",
)


@pytest.fixture(scope="module", autouse=True)
def rounded_in_one_way() -> Iterator[None]:
    """Without optimisation XLA may round the same operations in two ways."""
    with pytest.MonkeyPatch.context() as patch:
        options = loops._OPTIONS | {"xla_backend_optimization_level": 1}
        patch.setattr(loops, "_OPTIONS", options)
        yield


@pytest.fixture(scope="module")
def streamed(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    folder = tmp_path_factory.mktemp("stream") / "run"
    return ran(config.of(run_dir=str(folder), hold="stream", **FLAGS))


@pytest.fixture(scope="module")
def resident(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    folder = tmp_path_factory.mktemp("resident") / "run"
    return ran(config.of(run_dir=str(folder), **FLAGS))


def test_a_streamed_run_has_the_figures_of_one_on_the_device(streamed: Ran, resident: Ran) -> None:
    assert metrics(streamed.folder) == metrics(resident.folder)
    one, other = (states(each.folder, 4)["state"] for each in (streamed, resident))
    places = one["clients"]
    for name, leaf in _flat(one["server"]).items():
        np.testing.assert_array_equal(leaf, _flat(other["server"])[name])
    attended = places["record"][0] > 0
    assert 3 <= attended.sum() <= 7
    assert (streamed.folder / states_file.NAME).stat().st_size > 0


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {prefix: tree}
    return {k: v for key, each in tree.items() for k, v in _flat(each, f"{prefix}/{key}").items()}


def test_a_stopped_run_goes_on_bit_for_bit(streamed: Ran, tmp_path: Path) -> None:
    folder = halved(streamed.job, tmp_path / "run")
    assert (folder / "checkpoints" / "2").is_dir()
    go_on(streamed.job, folder)
    assert metrics(folder) == metrics(streamed.folder)
    found, expected = (states(each, 4)["state"] for each in (folder, streamed.folder))
    for name, leaf in _flat(expected["server"]).items():
        np.testing.assert_array_equal(_flat(found["server"])[name], leaf)


def test_a_full_disk_loses_nothing(
    streamed: Ran, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = halved(streamed.job, tmp_path / "run")
    pwrite, path = os.pwrite, folder / states_file.NAME

    def full(file: int, content: Any, at: int) -> int:
        if os.fstat(file).st_ino == path.stat().st_ino:
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(file, content, at)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left on device") as caught:
        go_on(streamed.job, folder)
    assert caught.value.filename == str(path)
    monkeypatch.undo()
    go_on(streamed.job, folder)
    assert metrics(folder) == metrics(streamed.folder)


def test_states_of_another_run_are_refused(streamed: Ran, tmp_path: Path) -> None:
    folder, other = (halved(streamed.job, tmp_path / name) for name in ("run", "other"))
    shutil.copy(other / states_file.NAME, folder / states_file.NAME)
    with pytest.raises(UsageError, match="is of another run than the checkpoint"):
        go_on(streamed.job, folder)
    (folder / states_file.NAME).unlink()
    with pytest.raises(UsageError, match="is gone, and the checkpoints refer to it"):
        go_on(streamed.job, folder)


def test_a_run_keeps_its_way_of_holding_states(
    streamed: Ran, resident: Ran, tmp_path: Path
) -> None:
    for ran_so, flags, line in (
        (streamed, {"hold": "auto"}, "--hold=auto: the run in .* began with --hold=stream"),
        (resident, {"hold": "stream"}, "--hold=stream: the run in .* began without"),
    ):
        folder = tmp_path / flags["hold"]
        shutil.copytree(ran_so.folder, folder)
        longer = FLAGS | flags | {"rounds": 6}
        with pytest.raises(UsageError, match=line):
            train.train(config.of(run_dir=str(folder), resume=True, **longer))


def test_what_does_not_fit_into_memory_is_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    def streams(**flags: Any) -> bool:
        assembled = assemble.assemble(config.of(**(FLAGS | flags)))
        return assembled.layout(assembled.cells[0]).streams

    assert not streams()
    assert streams(hold="stream")
    # The digits take 122 kB, a state of SCAFFOLD 2.4 kB; 0.7 of the memory may be taken.
    monkeypatch.setattr(machine, "memory", lambda: 250_000)
    assert not streams()
    assert streams(clients=100)
    monkeypatch.setattr(machine, "memory", lambda: 150_000)
    assert streams()
    with pytest.raises(UsageError, match="--watch_examples=9: must be left out as the data or"):
        streams(watch_examples=9)


def test_a_round_must_fit_into_the_memory_for_it(tmp_path: Path) -> None:
    flags = FLAGS | {"hold": "stream", "stream_memory": 1e-5}
    with pytest.raises(UsageError, match="--stream_memory=1e-05: a round of scaffold needs"):
        train.train(config.of(run_dir=str(tmp_path / "run"), **flags))


@pytest.mark.slow
def test_personal_networks_are_read_from_the_states(tmp_path: Path) -> None:
    scores, arrays = [], []
    for hold in ("auto", "stream"):
        folder = tmp_path / hold
        flags = FLAGS | {"algorithm": ("ditto",), "select": "last", "hold": hold}
        done = ran(config.of(run_dir=str(folder), **flags))
        with no_figures():
            evaluate.run(parsed(evaluate.BINARY, f"--run={folder}"))
        export.run(parsed(export.BINARY, f"--run={folder}"))
        found = json.loads((folder / "evaluation-best.json").read_text())
        scores.append((found["runs"], metrics(done.folder)))
        (place,) = (folder / "export").glob("*/clients.safetensors")
        arrays.append(load_file(place))
    assert scores[0] == scores[1]
    assert arrays[0].keys() == arrays[1].keys()
    for name, array in arrays[0].items():
        np.testing.assert_array_equal(arrays[1][name], array)
