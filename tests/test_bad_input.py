"""Bad input gets one line that names flag, value and what is allowed, before any compute."""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from experiments import build, config, launch, loop, sweep, train

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def no_compute(monkeypatch):
    def refuse(*arguments):
        raise AssertionError("computed before the input was checked")

    monkeypatch.setattr(loop, "run_cell", refuse)
    monkeypatch.setattr(jax, "jit", refuse)


CASES = [
    (dict(algorithm=("fedpig",)), "--algorithm=fedpig: .*fedipg"),
    (dict(model="mpl"), "--model=mpl: .*mlp"),
    (dict(dataset="minst"), "minst.*mnist"),
    (dict(conv="im2row"), "--conv=im2row: .*im2col"),
    (dict(environment="rotate"), "--environment=rotate: .*rotated"),
    (dict(optimizer="sdg"), "--optimizer=sdg: .*sgd"),
    (dict(server_optimizer="yogy"), "--server_optimizer=yogy: .*yogi"),
    (dict(partition="domains"), "--partition=domains: .*domain"),
    (dict(algorithm=("fedipg",), settings=("penalti=1",)), "--set=penalti=1: .*nearest is penalty"),
    (dict(algorithm=("fedipg",), settings=("penalty",)), "--set=penalty: must be name=value"),
    (dict(algorithm=("fedipg",), settings=("penalty=x",)), "--set=penalty=x: must be float"),
    (dict(algorithm=("fedipg",), settings=("penalty=-1",)), "fedipg: penalty=-1.0: .*at least 0"),
    (dict(algorithm=("fedipg",), settings=("penalty=nan",)), "fedipg: penalty=nan: .*finite"),
    (
        dict(algorithm=("fedipg",), settings=("derivative=forward",)),
        "derivative='forward': must be one of",
    ),
    (dict(settings=("weighting=sizes",)), "weighting='sizes': must be 'size' or 'uniform'"),
    (dict(algorithm=("erm",), settings=("penalty=1",)), "--set=penalty=1: erm takes no settings"),
    (dict(rounds=0, eval_every=1), "--rounds=0: must be at least 1"),
    (dict(eval_every=51), "--eval_every=51: must be at most --rounds=50"),
    (dict(checkpoint_every=7), "--checkpoint_every=7: must be a multiple of --eval_every=5"),
    (dict(learning_rate=(0.0,)), "--learning_rate=0.0: must be above 0"),
    (dict(learning_rate=(float("nan"),)), "--learning_rate=nan: must be above 0"),
    (dict(learning_rate=()), "--learning_rate=: must be one or several"),
    (dict(seeds=(1, 1)), "--seeds=1,1: must be one or several different"),
    (dict(momentum=1.0), "--momentum=1.0: must be at least 0 and below 1"),
    (dict(batch_size=-1), "--batch_size=-1: must be at least 0"),
    (dict(alpha=0.0), "--alpha=0.0: must be above 0"),
    (dict(widths=(0,)), "--widths=0: must be at least 1"),
    (dict(widths=(8, 8), cut=3), "--model=mlp: cut=3: must be between 0 and 2"),
    (dict(model="cnn", widths=(12,)), "--model=cnn: widths=.*multiple of 8"),
    (dict(devices=64), "--devices=64: must be at most"),
    (dict(process_id=1), "--process_id=1: must be below --num_processes=1"),
    (dict(num_processes=2), "--coordinator_address=: must be host:port"),
    (dict(num_processes=2, coordinator_address="localhost:1"), "--client_chunk.*must be numbers"),
    (dict(client_chunk="some"), "--client_chunk=some: must be auto or at least 0"),
    (dict(held_out="90"), "--held_out=90: .*75"),
    (
        dict(environment="none", held_out="all"),
        "--held_out=all: must be none, as there is one domain",
    ),
    (dict(cohort=6, clients=5), "--cohort=6: must be at most --clients=5"),
    (dict(cohort=6), "--cohort=6: must be at most the 5 clients"),
    (dict(clients=3), "--clients=3: .*domains"),
    (dict(clients=5000), "--clients=5000: .*examples"),
    (dict(clients=5000, partition="iid"), "--clients=5000: .*examples"),
    (dict(angles=(0.0, 0.0)), "angles"),
    (dict(paper=("94.3",)), "--paper=94.3: must be algorithm=number"),
    (dict(watch_examples=-1), "--watch_examples=-1: must be at least 0"),
    (dict(watch_examples=9, stop_below=(1.0,)), "--stop_below=1.0: must be above 0 and below 1"),
    (dict(watch_examples=9, stop_below=(0.5, 0.5)), "--stop_below=0.5,0.5: .*different"),
    (dict(stop_below=(0.6,)), "--stop_below=0.6: needs --watch_examples above 0"),
    (dict(after_stop="end"), "--after_stop=end: needs --stop_below"),
    (dict(warm_start="-2"), "--warm_start=-2: must be clients, batches or a number"),
    (dict(algorithm=("fedbn",)), "--algorithm=fedbn: needs --norm=batch"),
    (dict(norm="layer"), "--norm=layer: .*batch"),
    (dict(norm="batch", model="cnn"), "--norm=batch: --model=cnn has no norms"),
    (dict(flips=(0.2, 1.5)), "--flips=1.5: must be between 0 and 1"),
    (
        dict(algorithm=("fl_games",), settings=("memory=-1",)),
        "--algorithm=fl_games: memory=-1: must be .*at least 0",
    ),
    (dict(environment="colored", flips=(0.2, 0.1), clients=5), "--clients=5: .*--flips=0.2,0.1"),
    (dict(test_fraction=0.0), "--test_fraction=0.0: must be above 0"),
    (dict(dataset="dsprites", num_images=10**6), "count=1000000 must be in"),
    (dict(data_dir="/nowhere", dataset="cifar100"), "python -m fedjax_inv.data.prepare cifar100"),
    (dict(dataset="/nowhere/x.npz"), "/nowhere/x.npz"),
    (
        dict(algorithm=("fl_games",), settings=("loss=hinge",)),
        "--set=loss=hinge: can be set in Python only",
    ),
    (dict(algorithm=("fl_games",), settings=("learned=1",)), "--set=learned=1: must be true or false"),
    (dict(algorithm=("fedipg",), settings=("server_optimizer=adam",)), "fedipg has no server_opt"),
    (dict(algorithm=("nowhere:mine",)), "--algorithm=nowhere:mine: .*No module named 'nowhere'"),
    (dict(algorithm=("fedjax_inv.tree:mine",)), "--algorithm=fedjax_inv.tree:mine: .*'mine'"),
    (dict(algorithm=("math:pi",)), "--algorithm=math:pi: must be a function"),
    (dict(algorithm=(".tree:take",)), "--algorithm=.tree:take: must be package.module:function"),
    (dict(algorithm=("fedjax_inv.tree:",)), "tree:: must be package.module:function"),
    (dict(algorithm=("os.path:basename",)), "os.path:basename: takes other arguments"),
    (dict(algorithm=("os.path:join",)), "--algorithm=os.path:join: .*"),
    (dict(model="nowhere:mine"), "--model=nowhere:mine: .*No module named 'nowhere'"),
    (dict(model="fedjax_inv.models:blocks"), "--model=fedjax_inv.models:blocks: must be a function"),
    (dict(model="fedjax_inv.tree:take"), "--model=fedjax_inv.tree:take: takes other arguments"),
    (dict(model="builtins:range"), "--model=builtins:range: .*"),
    (dict(model="fedjax_inv.models:mlp", widths=(0,)), "--widths=0: must be at least 1"),
    (dict(model="examples:x"), "x"),
]


@pytest.mark.parametrize(("changes", "message"), CASES)
def test_a_bad_value_is_told_in_one_line(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message) as error:
        train.train(config.Config(run_dir=str(tmp_path / "run"), **changes))
    assert "\n" not in str(error.value)
    assert launch._raised_here(error.value)
    assert not (tmp_path / "run").exists()


def test_train_refuses_a_grid(tmp_path):
    for changes in (
        dict(algorithm=("fedavg", "fedipg")),
        dict(held_out="all"),
        dict(learning_rate=(0.1, 0.2)),
    ):
        with pytest.raises(ValueError, match=r"experiments\.sweep"):
            train.train(config.Config(run_dir=str(tmp_path / "run"), **changes))


def test_bad_npz_files(tmp_path):
    x, y = np.zeros((6, 4), np.float32), np.arange(6) % 2
    for name, arrays in {
        "x": {"y": y},
        "y": {"x": x},
        "NaN": {"x": x * np.nan, "y": y},
        "length": {"x": x, "y": y[:5]},
    }.items():
        path = tmp_path / f"{name}.npz"
        np.savez(path, **arrays)
        with pytest.raises(ValueError, match=name) as error:
            train.train(config.Config(dataset=str(path), environment="none"))
        assert str(path) in str(error.value)
        assert "\n" not in str(error.value)


def test_a_folder_that_is_not_this_run(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="neither empty nor a run"):
        train.train(config.Config(run_dir=str(tmp_path)))
    chosen = config.Config(run_dir=str(tmp_path), seeds=(0, 1))
    (cell,) = build.cells(chosen, ["75"])
    loop.write_json(tmp_path / "config.json", loop.description(chosen, cell))
    with pytest.raises(ValueError, match="unfinished run; add --resume"):
        train.train(chosen)
    for changes, message in (
        (dict(rounds=60), "rounds is 50 and not 60"),
        (dict(held_out="60"), 'held_out is "75" and not "60"'),
        (dict(seeds=(0, 2)), "whose runs is"),
        (dict(algorithm=("fedprox",)), 'algorithm is "fedavg" and not "fedprox"'),
    ):
        with pytest.raises(ValueError, match=message):
            train.train(dataclasses.replace(chosen, **changes))


def test_every_preset_parses():
    presets = sorted(path.stem for path in config.PRESETS.glob("*.flags"))
    assert {"rotated_digits", "rotated_mnist_5", "rotated_mnist_50"} <= set(presets)
    for preset in presets:
        # Ways of playing go with data.
        names = f"colored_mnist_f,{preset}" if preset.startswith("games_") else preset
        if names.endswith("smooth") or names.endswith("fast"):
            names = names.replace(",", ",games_parallel,")
        if names.endswith("_v"):
            names += ",games_parallel"
        assert build.cells(config.of([f"--preset={names}"]), ["0", "75"])


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "experiments.train", *arguments]


def test_the_command_line_ends_with_one_line_and_status_2(tmp_path):
    for arguments in (
        ("--rounds=many",),
        ("--fluffy=1",),
        ("--preset=rotated_digit",),
        ("--learning_rate=fast",),
        ("rounds=3",),
        ("--held_out=all",),
    ):
        done = subprocess.run(
            command(*arguments), cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 2
        told = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        assert len(told) == 1
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_writes_a_checkpoint_and_the_run_can_go_on(tmp_path, number):
    folder = tmp_path / "run"
    arguments = command(
        *(f"--run_dir={folder}", "--widths=8", "--rounds=2000", "--eval_every=1", "--resume")
    )
    environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache")}
    process = subprocess.Popen(
        arguments, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True
    )
    lines = folder / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (lines.exists() and lines.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(number)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert "Traceback" not in told
    assert "--resume" in told
    last = loop.Log.read(lines)[-1]["round"]
    assert (folder / "checkpoints" / str(last)).is_dir()
    assert not (folder / "result.json").exists()


def test_sweep_and_train_share_their_checks(tmp_path):
    with pytest.raises(ValueError, match="--held_out=90"):
        sweep.sweep(config.Config(run_dir=str(tmp_path / "run"), held_out="90"))
