"""Several devices and several processes give what one device gives, with less work on each."""

import dataclasses
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import federations
from experiments import config, loop, train
from federations import NUM_CLASSES
from fedjax_inv import clients, local, models, rounds, schedules
from fedjax_inv.algorithms import fedavg

ROOT = Path(__file__).parent.parent
FLAGS = dict(
    algorithm=("fedipg",),
    angles=(0.0, 30.0, 60.0, 90.0),
    widths=(8,),
    rounds=4,
    eval_every=2,
    clients=7,
    cohort=6,
    seeds=(0, 1),
    client_chunk="2",
    run_chunk="0",
)


def assert_same_run(one: Path, other: Path, rtol: float = 1e-5) -> None:
    for a, b in zip(*(loop.Log.read(f / "metrics.jsonl") for f in (one, other)), strict=True):
        np.testing.assert_allclose(a["train_loss"], b["train_loss"], rtol=rtol)
        for name, scores in a["domains"].items():
            np.testing.assert_allclose(scores["loss"], b["domains"][name]["loss"], rtol=rtol)
        assert a["bytes"] == b["bytes"]


@pytest.fixture(scope="module")
def on_one_device(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one") / "run"
    train.train(config.Config(run_dir=str(folder), **FLAGS))
    return folder


def test_four_devices_give_what_one_gives(tmp_path, on_one_device):
    train.train(config.Config(run_dir=str(tmp_path / "run"), devices=4, **FLAGS))
    assert_same_run(on_one_device, tmp_path / "run")


def test_a_game_on_two_devices_stops_where_it_stops_on_one(tmp_path):
    game = dict(
        algorithm=("fl_games",),
        environment="colored",
        flips=(0.3, 0.2, 0.1),
        optimizer="adam",
        learning_rate=(0.1,),
        local_steps=1,
        **dict(cut=0, widths=(32,), rounds=12, eval_every=6, seeds=(0, 1), warm_start=4),
        **dict(watch_examples=300, stop_below=(0.72, 0.1), client_chunk="1", run_chunk="0"),
    )
    stops = []
    for devices in (1, 2):
        folder = tmp_path / str(devices)
        train.train(config.Config(run_dir=str(folder), devices=devices, **game))
        runs = json.loads((folder / "result.json").read_text())["runs"]
        stops.append([stop for run in runs for stop in run["stops"]])
    assert_same_run(tmp_path / "1", tmp_path / "2", rtol=1e-3)  # games amplify rounding
    for one, two in zip(*stops, strict=True):
        assert one["round"] == two["round"]
        if one["round"]:
            assert one["test_accuracy"] == pytest.approx(two["test_accuracy"], abs=1e-3)
    met = {stop["round"] for stop in stops[0]} - {None}
    assert len(met) > 1, stops[0]  # thresholds that say something: met, and not all at once


class StopAtOnce(loop.Stop):
    """Asks for a stop when the first segment is over."""

    def __enter__(self):
        super().__enter__()
        self.signal = 15
        return self


def test_a_run_on_four_devices_resumes(tmp_path, monkeypatch, on_one_device):
    chosen = config.Config(run_dir=str(tmp_path / "run"), devices=4, **FLAGS)
    with monkeypatch.context() as patch:
        patch.setattr(loop, "Stop", StopAtOnce)
        with pytest.raises(SystemExit):
            train.train(chosen)
    train.train(dataclasses.replace(chosen, resume=True))
    assert_same_run(on_one_device, tmp_path / "run")


def test_two_processes_give_what_one_gives(tmp_path, on_one_device):
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        address = f"localhost:{probe.getsockname()[1]}"
    values = {k: v if isinstance(v, tuple) else (v,) for k, v in FLAGS.items()}
    arguments = [f"--{name}={','.join(map(str, value))}" for name, value in values.items()]
    environment = {**os.environ, "XLA_FLAGS": "", "JAX_NUM_CPU_DEVICES": "1"}
    processes = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "experiments.train", *arguments),
                *(f"--run_dir={tmp_path / 'run'}", f"--coordinator_address={address}"),
                *("--num_processes=2", f"--process_id={i}"),
            ],
            cwd=ROOT,
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    told = [process.communicate(timeout=300)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], told
    assert_same_run(on_one_device, tmp_path / "run")


def compiled_round(num_devices: int) -> jax.stages.Compiled:
    """A FedAvg round of 8 clients of a dense network, over some devices."""
    mesh = jax.make_mesh((num_devices,), ("clients",), (AxisType.Auto,))
    whole = NamedSharding(mesh, PartitionSpec())
    federation = federations.federation((8,) * 8)
    model = models.mlp(NUM_CLASSES, widths=(128, 128))
    work = local.epochs(federations.optax.sgd(0.1), batch_size=8)
    algorithm = fedavg.fedavg(model, work)
    variables = federations.initial(model, jax.random.key(0))
    state = rounds.init(algorithm, variables, jax.random.key(1), 8)
    schedule = schedules.everyone(8, 2)
    state, schedule, federation = jax.device_put((state, schedule, federation), whole)
    axis = clients.sharded("clients")
    run = clients.over(mesh, lambda *a: rounds.run(algorithm, *a, axis=axis))
    return jax.jit(run).lower(state, schedule, federation).compile()


def test_devices_share_the_work_and_gather_nothing():
    one, four = compiled_round(1), compiled_round(4)
    assert "all-gather" not in four.as_text()
    assert "all-reduce" in four.as_text()
    ratio = four.cost_analysis()["flops"] / one.cost_analysis()["flops"]
    assert 0.2 < ratio < 0.3
