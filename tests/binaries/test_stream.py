"""--hold=stream: the figures of a run on the device, from examples and states on the host."""

import errno
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from fedjax_inv.checks import UsageError
from fedjax_inv.devices import loops
from fedjax_inv.program import kept
from fedjax_inv_experiments import evaluate, export, train
from fedjax_inv_experiments.experiment import assemble, config
from fedjax_inv_experiments.flags import errors
from fedjax_inv_experiments.parts import machine
from fedjax_inv_experiments.running import states as states_file
from runs import Ran, go_on, halved, metrics, no_figures, parsed, ran, states

pytestmark = pytest.mark.slow  # most need trained runs

ROOT = Path(__file__).parents[2]
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
    pwritev, path = os.pwritev, folder / states_file.NAME

    def full(file: int, content: Any, at: int) -> int:
        if os.fstat(file).st_ino == path.stat().st_ino:
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwritev(file, content, at)

    monkeypatch.setattr(os, "pwritev", full)
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


# A command that also writes how many rows of examples it has read to the file of its first word.
_COUNTING = """
import atexit, pathlib, runpy, sys
from fedjax_inv.data import stored

file, number, of_arrays = pathlib.Path(sys.argv.pop(1)), [0], stored.of_arrays

def counted(*arrays):
    source = of_arrays(*arrays)

    def take(rows):
        number[0] += len(rows)
        return source.take(rows)

    return source._replace(take=take)

stored.of_arrays = counted
atexit.register(lambda: file.write_text(str(number[0])))
runpy.run_module("experiments.sweep", run_name="__main__", alter_sys=True)
"""


def begun(
    folder: Path, flags: list[str], number: int, fault: str = ""
) -> list[subprocess.Popen[str]]:
    """The processes of a sweep on two devices, which share them. fault: code to run before."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        address = f"localhost:{probe.getsockname()[1]}"
    environment = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(folder.parent / "cache"),
        "XLA_FLAGS": "",  # not those of the tests, which round in another way
    }

    def started(index: int) -> subprocess.Popen[str]:
        several = [f"--coordinator_address={address}", f"--num_processes={number}"]
        words = [*flags, f"--run_dir={folder}", f"--devices={2 // number}"]
        words += [*several, f"--process_id={index}"] if number > 1 else []
        return subprocess.Popen(
            [
                sys.executable,
                "-c",
                f"import sys\n{fault}{_COUNTING}",
                str(rows_of(folder, index)),
                *words,
            ],
            cwd=ROOT,
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )

    return [started(index) for index in range(number)]


def rows_of(folder: Path, process: int) -> Path:
    return folder.with_name(f"{folder.name}-{process}")


def finished(processes: list[subprocess.Popen[str]]) -> None:
    errors = [process.communicate(timeout=600)[1] for process in processes]
    assert not any(process.returncode for process in processes), errors


def kept_states(folder: Path, record: np.ndarray) -> dict[tuple[int, int], bytes]:
    """The records of the clients that have attended, by run and client. record: their places."""
    content = (folder / states_file.NAME).read_bytes()
    begins = len(kept._MAGIC) + kept.ID_BYTES + 8
    (length,) = struct.unpack("<Q", content[begins - 8 : begins])
    offset = begins + (record - 1) * length
    return {
        (int(run), int(client)): content[offset[run, client] :][:length]
        for run, client in np.argwhere(record)
    }


# Adds a fault to the command: process 1 cannot read after its first parts.
_FAILING = """
import errno
from fedjax_inv.data import stored

def failing(*arrays, of_arrays=stored.of_arrays, calls=[0]):
    source = of_arrays(*arrays)

    def take(rows):
        calls[0] += 1
        if calls[0] > 9:
            raise OSError(errno.EIO, "Input/output error", "x.npy")
        return source.take(rows)

    return source._replace(take=take)

if "--process_id=1" in sys.argv:
    stored.of_arrays = failing
"""


def test_a_process_whose_reader_fails_ends_the_others(tmp_path: Path) -> None:
    flags = ["--algorithm=scaffold", "--environment=none", "--widths=8", "--clients=14"]
    flags += ["--cohort=4", "--rounds=2000", "--batch_size=64", "--hold=stream"]
    processes = begun(tmp_path / "run", flags, 2, _FAILING)
    (_, first), (_, second) = (process.communicate(timeout=300) for process in processes)
    lines = "error: x.npy: Input/output error; mend that and start again", "error: another process"
    for text, line in zip((second, first), lines, strict=True):
        assert line in text, text
        assert "Traceback" not in text
    assert [process.returncode for process in processes] == [errors.LOST, 2]


@pytest.mark.parametrize(
    ("names", "seeds", "is_killed"),
    [
        ("fedavg,scaffold", "0", True),  # the processes share the clients of a run
        ("ditto", "0,1", False),  # each has a run; the states are also read in evaluations
    ],
)
def test_two_processes_give_the_bits_of_one(
    names: str, seeds: str, is_killed: bool, tmp_path: Path
) -> None:
    flags = [f"--algorithm={names}", f"--seeds={seeds}", "--environment=none", "--widths=8"]
    flags += ["--clients=14", "--cohort=4", "--rounds=12", "--eval_every=2", "--batch_size=64"]
    flags += ["--hold=stream"]
    two, one, last = tmp_path / "two", tmp_path / "one", names.split(",")[-1]
    processes = begun(two, flags, 2)
    if is_killed:
        while not (two / f"{last}-test/checkpoints/2").exists():
            assert all(process.poll() is None for process in processes)
            time.sleep(0.02)
        for process in processes:
            process.kill()
            process.communicate()
        assert not (two / f"{last}-test/result.json").exists()
        processes = begun(two, [*flags, "--resume"], 2)
    finished(processes)
    finished(begun(one, flags, 1))
    if not is_killed:
        read = [int(rows_of(*each).read_text()) for each in ((one, 0), (two, 0), (two, 1))]
        assert read[0] == 2 * read[1] == 2 * read[2]
    for name in names.split(","):
        first, second = one / f"{name}-test", two / f"{name}-test"
        assert metrics(first) == metrics(second)
        expected, found = (states(each, 12)["state"] for each in (first, second))
        for path, leaf in _flat(expected["server"]).items():
            np.testing.assert_array_equal(_flat(found["server"])[path], leaf)
        if name != "fedavg":
            places = [each["clients"]["record"] for each in (expected, found)]
            assert kept_states(first, places[0]) == kept_states(second, places[1]) != {}
