"""Several devices and several processes give what one device gives, with less work on each."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import slow
from fedjax_inv.platforms import cores as machine_of_cores
from fedjax_inv_experiments import config, evaluation, start
from fedjax_inv_experiments.assembly import experiment
from runs import Ran, go_on, halved, metrics, ran

ROOT = Path(__file__).parents[2]
# Neither seven clients nor six of them are shared evenly.
FLAGS: dict[str, Any] = dict(
    algorithm=("scaffold",),  # whose clients keep something
    angles=(0.0, 30.0, 60.0, 90.0),
    widths=(8,),
    rounds=4,
    eval_every=2,
    clients=7,
    cohort=6,
    seeds=(0, 1),
    chunk=("2", "0"),
    watch_examples=300,
    stop_below=(0.99, 0.01),
    warm_start="3",
)


def assert_same_run(one: Path, other: Path, rtol: float = 1e-5) -> None:
    for a, b in zip(metrics(one), metrics(other), strict=True):
        losses = np.array([each["train_loss"] for each in (a, b)], float)  # round 0 has none
        np.testing.assert_allclose(*losses, rtol=rtol)
        for name, scores in a["domains"].items():
            np.testing.assert_allclose(scores["loss"], b["domains"][name]["loss"], rtol=rtol)
        assert a["bytes"] == b["bytes"]


@pytest.fixture(scope="module")
def on_one(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """A run on one device."""
    return ran(config.of(run_dir=str(tmp_path_factory.mktemp("one") / "run"), **FLAGS))


@pytest.fixture(scope="module")
def on_four(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """The same on four, each of which holds its own clients."""
    folder = tmp_path_factory.mktemp("four") / "run"
    return ran(config.of(run_dir=str(folder), devices="4", hold="own", **FLAGS))


# What two devices share: clients, each its own; the clients of a cohort; the runs of a grid.
COMMANDS: list[dict[str, Any]] = [{}, {"cohort": 4}, {"seeds": (0, 1)}]


@pytest.mark.parametrize("more", slow.after(1, COMMANDS), ids=["all", "cohort", "grid"])
def test_commands_on_the_cores_of_a_machine_give_what_one_gives(
    more: dict[str, Any], tmp_path: Path
) -> None:
    """Trained, with metrics of the finished runs, and evaluated."""
    small = {"seeds": (0,), "widths": (4,), "local_steps": 1, "rounds": 2, "eval_every": 1}
    tables = []
    for name, number in (("auto", 2), ("1", 1)):
        folder = tmp_path / name
        flags = {**small, **more, "metrics": ("f1",), "devices": name}
        done = ran(config.of(run_dir=str(folder), **flags))
        assert len(done.job.plan.placed().data.y.sharding.device_set) == number
        predictions, out = str(folder / "predictions.csv"), str(folder / "scores.png")
        evaluation.run(evaluation.EvaluationOptions(str(folder), out=out, predictions=predictions))
        tables += [pd.read_csv(folder / f"{what}.csv") for what in ("metrics", "predictions")]
    assert_same_run(tmp_path / "auto", tmp_path / "1")
    of_two, of_one = tables[:2], tables[2:]
    for two, one in zip(of_two, of_one, strict=True):
        assert len(one)
        pd.testing.assert_frame_equal(two, one, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_four_devices_give_what_one_gives(on_one: Ran, on_four: Ran) -> None:
    x = on_four.job.plan.data.x
    assert len(x.sharding.device_set) == 4
    # Two seeds deal the examples to other clients each.
    on_a_device = [shard.data.shape[1] for shard in x.addressable_shards]
    assert max(on_a_device) < 0.55 * len(on_one.job.plan.data.y)
    assert_same_run(on_one.folder, on_four.folder)
    for one, four in zip(on_one.runs, on_four.runs, strict=True):
        (met, unmet), (same, also_unmet) = one["stops"], four["stops"]
        assert unmet == also_unmet == {"threshold": 0.01, "round": None}
        assert met["round"] == same["round"] == 3
        for key in ("train_score", "validation_score", "test_score"):
            assert met[key] == pytest.approx(same[key], abs=1e-3)


@pytest.mark.slow
def test_a_run_resumes_on_another_number_of_devices(
    on_one: Ran, on_four: Ran, tmp_path: Path
) -> None:
    folder = go_on(on_four.job, halved(on_one.job, tmp_path / "run"))
    assert_same_run(folder, on_one.folder)


def test_the_flag_says_what_devices_hold() -> None:
    """By default their own clients if all attend."""

    def own(hold: str = "auto", cohort: int = 0) -> bool:
        flags = FLAGS | {"cohort": cohort, "devices": "2", "seeds": (0,), "hold": hold}
        assembled = experiment.make(config.of(**flags))
        # No device holds all of them beside.
        assert isinstance(assembled.data.y, np.ndarray)
        found = assembled.plan(assembled.cells[0]).layout
        assert (found.run_devices, found.client_devices) == (1, 2)
        return found.own

    assert [own(), own(cohort=6), own("all"), own("own", cohort=6)] == [True, False, False, True]


def two_processes(folder: Path, **changed: Any) -> list[subprocess.Popen[str]]:
    """The command `train` in two processes, each of which holds its own clients."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        address = f"localhost:{probe.getsockname()[1]}"
    flags = FLAGS | changed
    values = {k: v if isinstance(v, tuple) else (v,) for k, v in flags.items()}
    arguments = [f"--{name}={','.join(map(str, value))}" for name, value in values.items()]
    environment = {**os.environ, "JAX_ENABLE_COMPILATION_CACHE": "false"}
    return [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "experiments.train", *arguments),
                *(f"--run_dir={folder}", f"--processes={address},{i},2", "--hold=own"),
            ],
            cwd=ROOT,
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]


@pytest.mark.slow
def test_two_processes_give_what_one_gives(tmp_path: Path, on_one: Ran) -> None:
    processes = two_processes(tmp_path / "run")
    errors = [process.communicate(timeout=300)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], errors
    assert_same_run(on_one.folder, tmp_path / "run")


@pytest.mark.slow
def test_a_process_ends_in_one_line_when_the_first_is_killed(tmp_path: Path) -> None:
    first, second = two_processes(tmp_path / "run", rounds=100_000)
    while not (tmp_path / "run" / "metrics.jsonl").exists():
        assert first.poll() is None
        time.sleep(0.1)
    first.kill()
    _, errors = second.communicate(timeout=300)
    assert second.returncode == start.LOST, errors
    assert errors.splitlines()[-1].startswith("error: ")
    assert "Traceback" not in errors
    assert "Fatal" not in errors
    first.communicate()


@pytest.mark.slow
def test_two_tasks_of_slurm_are_started_by_the_script_of_examples(tmp_path: Path) -> None:
    """With a stand-in for srun. The tasks share the clients."""
    command = tmp_path / ".venv/bin/fedjax-inv"
    command.parent.mkdir(parents=True)
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m fedjax_inv_experiments "$@"\n')
    command.chmod(0o755)
    environment = os.environ | {
        "PATH": f"{Path(__file__).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "SLURM_CPUS_PER_TASK": "1",
        "SLURM_JOB_ID": str(_job_with_a_free_port()),
        "JAX_ENABLE_COMPILATION_CACHE": "false",
    }
    flags = ["--algorithm=scaffold", "--seeds=0", "--environment=none", "--clients=4"]
    flags += ["--widths=8", "--rounds=4", "--eval_every=2", "--batch_size=64"]

    def run(folder: Path, *words: str | Path) -> Path:
        done = subprocess.run(
            [*words, *flags, f"--run_dir={folder}"],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stderr
        return folder

    together = run(tmp_path / "two", "sh", ROOT / "examples/slurm.sh")
    alone = run(tmp_path / "one", command, "train", "--devices=1")
    assert_same_run(together, alone)


def _job_with_a_free_port() -> int:
    """The number of a job for which JAX chooses a port that nobody uses."""
    first = 2**16 - 2**12
    for port in range(first, 2**16):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("localhost", port))
            return port - first
    raise AssertionError("no port is free")


def test_cores_are_those_of_the_affinity_and_of_a_containers_quota(tmp_path: Path) -> None:
    allowed = len(os.sched_getaffinity(0))
    assert machine_of_cores(tmp_path) == allowed
    quota = tmp_path / "sys/fs/cgroup/cpu.max"
    quota.parent.mkdir(parents=True)
    for text, cores in (("max 100000", allowed), ("170000 100000", 1), ("9000 100000", 1)):
        quota.write_text(f"{text}\n")
        assert machine_of_cores(tmp_path) == cores


def test_cores_are_at_most_those_of_a_task_of_slurm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(6)))
    for value, cores in (("4", 4), ("9", 6), ("", 6), ("all", 6), ("0", 6)):
        monkeypatch.setenv("SLURM_CPUS_PER_TASK", value)
        assert machine_of_cores(tmp_path) == cores
