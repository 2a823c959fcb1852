"""Bad input gets one line that names flag, value and what is allowed, before any compute."""

import itertools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np
import pytest

from fedjax_inv import algorithms, models
from fedjax_inv.algorithms import fedavg
from fedjax_inv.checks import UsageError
from fedjax_inv.data import environments, federation, sources
from fedjax_inv.types import Algorithm, Model, Work
from fedjax_inv_experiments import sweep, train
from fedjax_inv_experiments.experiment import assemble, command_line, config, grid
from fedjax_inv_experiments.flags import errors
from fedjax_inv_experiments.flags import names as registry
from fedjax_inv_experiments.parts import method
from fedjax_inv_experiments.running import folder as folders
from fedjax_inv_experiments.running import launch, log, loop
from fedjax_inv_experiments.running.records import Start

ROOT = Path(__file__).parents[2]
Refusal = Callable[..., str]


@pytest.fixture(autouse=True)
def no_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> NoReturn:
        raise AssertionError("computed before the input was checked")

    monkeypatch.setattr(loop, "run_cell", refuse)
    monkeypatch.setattr(jax, "jit", refuse)


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]) -> Refusal:
    """(work, its arguments) -> the line with which it ends, with status 2."""

    def of(work: Callable[..., Any], *arguments: Any, **flags: Any) -> str:
        with pytest.raises(SystemExit) as ended, errors.in_one_line():
            work(*arguments, **flags)
        assert ended.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ")
        return line.removeprefix("error: ")

    return of


def unchecked(model: Model, work: Work, *, decay: float = 0.0) -> Algorithm:
    """An algorithm that does not check its setting."""
    del decay
    return fedavg.fedavg(model, work)


IPG: dict[str, Any] = dict(algorithm=("fedipg",))
GAMES: dict[str, Any] = dict(algorithm=("fl_games",))
CASES: list[tuple[dict[str, Any], str]] = [
    (dict(algorithm=("fedpig",)), "--algorithm=fedpig: .*fedipg"),
    (dict(model="mpl"), "--model=mpl: .*mlp"),
    (dict(dataset="minst"), "--dataset=minst: .*mnist"),
    (dict(conv="im2row"), "--conv=im2row: .*im2col"),
    (dict(environment="rotate"), "--environment=rotate: .*rotated"),
    (dict(optimizer="sdg"), "--optimizer=sdg: .*sgd"),
    (dict(server_optimizer="yogy"), "--server_optimizer=yogy: .*yogi"),
    (dict(partition="domains"), "--partition=domains: .*domain"),
    (IPG | dict(settings=("penalti=1",)), "--set=penalti=1: fedipg has no .*did you mean penalty"),
    (IPG | dict(settings=("colour=1",)), "--set=colour=1: fedipg has no .*must be one of der"),
    (IPG | dict(settings=("penalty",)), "--set=penalty: must be name=value"),
    (IPG | dict(settings=("penalty=",)), "--set=penalty=: must be name=value"),
    (IPG | dict(settings=("penalty=x",)), "--set=penalty=x: must be a number$"),
    (IPG | dict(settings=("penalty=none",)), "--set=penalty=none: must be a number$"),
    (
        IPG | dict(settings=("penalty=-1",)),
        "--set=penalty=-1: .*at least 0, with --algorithm=fedipg",
    ),
    *(
        (IPG | dict(settings=(f"penalty={value}",)), f"--set=penalty={value}: must be a finite nu")
        for value in ("nan", "inf", "0.1,-inf", "1e300")
    ),
    (
        dict(algorithm=(f"{__name__}:unchecked",), settings=("decay=nan",)),
        "--set=decay=nan: must be a finite number$",
    ),
    (
        IPG | dict(settings=("derivative=forward",)),
        "--set=derivative=forward: must be one of forward_over_reverse",
    ),
    (IPG | dict(settings=("server_optimizer=adam",)), "fedipg has no server_optimizer; must be"),
    (
        dict(settings=("weighting=sizes",)),
        "--set=weighting=sizes: must be one of size, uniform",
    ),
    (dict(algorithm=("erm",), settings=("penalty=1",)), "--set=penalty=1: erm takes no settings"),
    (GAMES | dict(settings=("memory=2.5",)), "--set=memory=2.5: must be a whole number$"),
    (GAMES | dict(settings=("memory=-1",)), "--set=memory=-1: .*at least 0"),
    (GAMES | dict(settings=("learned=1",)), "--set=learned=1: must be true or false$"),
    (
        GAMES | dict(settings=("play=turns",)),
        "--set=play=turns: must be one of parallel, sequential",
    ),
    (GAMES | dict(settings=("loss=hinge",)), "--set=loss=hinge: can be set in Python only"),
    (
        GAMES | dict(settings=("body_optimizer=sgd",)),
        "--set=body_optimizer=sgd: can be set in Python only",
    ),
    (dict(algorithm=("nowhere:mine",)), "--algorithm=nowhere:mine: .*No module named 'nowhere'"),
    (dict(algorithm=("math:mine",)), "--algorithm=math:mine: .*no attribute 'mine'"),
    (dict(algorithm=("math.pi",)), "--algorithm=math.pi: unknown; did you mean math:pi[?]"),
    (dict(algorithm=("fedavg.py",)), "--algorithm=fedavg.py: unknown; did you mean fedavg or"),
    (
        dict(algorithm=("math.py:pi",)),
        "--algorithm=math.py:pi: cannot be imported .*; did you mean math:pi[?]",
    ),
    (dict(algorithm=("math:pi",)), "--algorithm=math:pi: must be a function"),
    (dict(algorithm=(".tree:take",)), "--algorithm=.tree:take: must be package.module:function"),
    (dict(algorithm=("math:",)), "--algorithm=math:: must be package.module:function"),
    (
        dict(algorithm=("os.path:basename",)),
        "--algorithm=os.path:basename: takes other arguments .*too many",
    ),
    (dict(model="nowhere:mine"), "--model=nowhere:mine: .*No module named 'nowhere'"),
    (dict(model="fedjax_inv.models:blocks"), "--model=fedjax_inv.models:blocks: must be a func"),
    (dict(model="math:gcd", widths=(8,)), "--widths=.*: --model=math:gcd has no widths"),
    (dict(model="fedjax_inv.tree:take"), "--model=fedjax_inv.tree:take: takes other arguments"),
    (dict(model="math:factorial"), "--model=math:factorial: returns int, must return Model"),
    (dict(rounds=0, eval_every=1), "--rounds=0: must be at least 1"),
    (dict(eval_every=51), "--eval_every=51: must be at most --rounds=50"),
    (
        dict(checkpoint_every=7, eval_every=5),
        "--checkpoint_every=7: must be a multiple of",
    ),
    (dict(learning_rate=(0.0,)), "--learning_rate=0: must be above 0"),
    (dict(learning_rate=(float("nan"),)), "--learning_rate=nan: must be above 0"),
    (dict(learning_rate=()), "--learning_rate=: must be one or several"),
    (dict(seeds=(1, 1)), "--seeds=1,1: must be one or several different"),
    (dict(momentum=1.0), "--momentum=1: must be at least 0 and below 1"),
    (dict(batch_size=-1), "--batch_size=-1: must be at least 0"),
    (dict(alpha=0.0), "--alpha=0: must be above 0"),
    (dict(held_out="75,75"), "--held_out=75,75: must be one or several different"),
    (dict(widths=(0,)), "--widths=0: must be at least 1"),
    (dict(widths=(8, 8), cut=3), "--cut=3: must be an integer in 0..2, with --model=mlp"),
    (dict(model="cnn", widths=(12,)), "--widths=12: .*multiples of 8, with --model=cnn"),
    (dict(devices="64"), "--devices=64: must be at most"),
    (dict(process_id=1), "--process_id=1: must be below --num_processes=1"),
    (dict(coordinator_address="a:1"), "--coordinator_address=a:1: has no effect without --num_pro"),
    (dict(num_processes=2), "--coordinator_address=: must be host:port"),
    (
        dict(num_processes=2, coordinator_address="localhost:1", run_chunk="measure"),
        "--run_chunk=measure: must be a number or auto with several processes",
    ),
    (
        dict(distributed=True, num_processes=2),
        "--num_processes=2: must be left out with --distributed",
    ),
    (dict(devices="0"), "--devices=0: must be auto or a number of at least 1"),
    (dict(client_chunk="some"), "--client_chunk=some: must be auto, measure or a number of at"),
    (dict(held_out="90"), "--held_out=90: .*75"),
    (dict(held_out="none,75"), "--held_out=none: unknown; must be one of 0, 15"),
    (dict(held_out="75,all"), "--held_out=all: unknown; must be one of 0, 15"),
    (
        dict(environment="none", held_out="all"),
        "--held_out=all: must be none, as there is one domain",
    ),
    (dict(cohort=6, clients=5), "--cohort=6: must be at most --clients=5"),
    (dict(cohort=6), "--cohort=6: must be at most the 5 clients"),
    (dict(clients=3), "--clients=3: .*domains"),
    (dict(clients=5000), "--clients=5000: .*examples"),
    (dict(clients=5000, partition="iid"), "--clients=5000: .*examples"),
    (dict(angles=(0.0, 0.0)), "--angles=0,0: must all differ"),
    (dict(paper=("94.3",)), "--paper=94.3: must be algorithm=number"),
    (dict(watch_examples=-1), "--watch_examples=-1: must be at least 0"),
    (dict(watch_examples=9, stop_below=(1.0,)), "--stop_below=1: must be above 0 and below 1"),
    (dict(watch_examples=9, stop_below=(0.5, 0.5)), "--stop_below=0.5,0.5: .*different"),
    (dict(stop_below=(0.6,)), "--stop_below=0.6: needs --watch_examples above 0"),
    (dict(stop_above=(0.6,)), "--stop_above=0.6: needs --watch_examples above 0"),
    (
        dict(watch_examples=9, stop_above=(0.6,), stop_below=(0.5,)),
        "--stop_above=0.6: must not stand beside --stop_below=0.5",
    ),
    (
        dict(watch_examples=9, stop_above=(0.6,), warm_start="3"),
        "--warm_start=3: has no effect without --stop_below",
    ),
    (
        dict(after_stop="end"),
        "--after_stop=end: has no effect without --stop_below or --stop_above",
    ),
    (
        dict(stop_within=0.1),
        "--stop_within=0.1: has no effect without --stop_below or --stop_above",
    ),
    (dict(stop_centred=True), "--stop_centred=true: has no effect without --stop_below"),
    (dict(init_from="/nowhere"), "--init_from=/nowhere: must be the folder of a run, or a check"),
    (dict(warm_start="-2"), "--warm_start=-2: must be clients, batches or a number"),
    (dict(algorithm=("fedbn",)), "--algorithm=fedbn: needs --norm=batch"),
    (dict(norm="layer"), "--norm=layer: .*batch"),
    (dict(norm="batch", model="cnn"), "--norm=batch: --model=cnn has no norm"),
    (dict(environment="colored", flips=(0.2, 1.5)), "--flips=1.5: must be between 0 and 1"),
    (dict(test_fraction=0.0), "--test_fraction=0: must be above 0"),
    (dict(dataset="dsprites", num_images=10**6), "--num_images=1000000: must"),
    (dict(data_dir="/nowhere", dataset="cifar100"), "python -m fedjax_inv.data.prepare cifar100"),
    (dict(dataset="/nowhere/x.npz"), "--dataset=/nowhere/x.npz: must be a file"),
]


# Flags that were ignored once.
IDLE: list[tuple[list[str], str]] = [
    (["--flips=0.3"], "--flips=0.3: has no effect with --environment=rotated"),
    (["--flips=0.2,0.1"], "--flips=0.2,0.1: has no effect with --environment=rotated"),
    (["--nobinarise", "--environment=patched"], "--binarise=false: has no effect with --env"),
    (["--angles=0,5", "--environment=colored"], "--angles=0,5: has no effect with --env"),
    (["--data_seed=3", "--environment=none"], "--data_seed=3: has no effect with --environment"),
    (["--alpha=0.1"], "--alpha=0.1: has no effect with --partition=domain"),
    (["--min_size=1"], "--min_size=1: has no effect with --partition=domain"),
    (["--activation=elu", "--model=cnn"], "--activation=elu: --model=cnn has no activation"),
    (["--conv=im2col"], "--conv=im2col: --model=mlp has no conv"),
    (["--momentum=0.5", "--optimizer=adam"], "--momentum=0.5: has no effect with --optimizer=adam"),
    *(
        (
            ["--server_momentum=0.5", f"--server_optimizer={name}"],
            f"--server_momentum=0.5: has no effect with --server_optimizer={name}",
        )
        for name in ("adam", "yogi")
    ),
    (["--server_optimizer=adam", "--algorithm=erm"], "--server_optimizer=adam: has no effect with"),
    (["--cohort=2", "--algorithm=erm"], "--cohort=2: has no effect with --algorithm=erm"),
    (["--sampling_rate=0.4", "--cohort=2"], "--sampling_rate=0.4: has no effect beside --cohort=2"),
    (["--sparse=0.3"], "--sparse=0.3: has no effect without --frequency below 1"),
    (["--late=stale"], "--late=stale: has no effect without --frequency below 1 or --lossy"),
    (["--longest_delay=3", "--frequency=0.5"], "--longest_delay=3: has no effect with --late=drop"),
    (["--local_epochs=2", "--local_steps=5"], "--local_epochs=2: has no effect beside --local_st"),
    (["--local_epochs=1", "--local_steps=5"], "--local_epochs=1: has no effect beside --local_st"),
    (["--warm_start=clients"], "--warm_start=clients: has no effect without --stop_below"),
    (["--test_fraction=0.3"], "--test_fraction=0.3: has no effect, as the test is on"),
    (["--data_dir=/data"], "--data_dir=/data: has no effect with --dataset=digits"),
    (["--data_dir=x", "--dataset=/x.npz"], "--data_dir=x: has no effect with --dataset=/x.npz"),
    (["--paper=fedipg=90"], "--paper=fedipg: unknown; .*fedavg"),
    (["--paper=fedprix=90", "--algorithm=fedprox"], "--paper=fedprix: .*did you mean fedprox"),
    (["--image_size=8"], "--image_size=8: must be left out for .*, with --dataset=digits"),
    (["--num_images=8"], "--num_images=8: must be left out for .*, with --dataset=digits"),
]


@pytest.mark.parametrize(("arguments", "message"), IDLE)
def test_a_flag_without_effect_is_told_in_one_line(
    tmp_path: Path, refusal: Refusal, arguments: list[str], message: str
) -> None:
    folder = tmp_path / "run"

    def work() -> None:
        sweep.sweep(command_line.of_arguments([*arguments, f"--run_dir={folder}"]))

    assert re.match(message, refusal(work))
    assert not folder.exists()


@pytest.mark.parametrize(
    "arguments",
    [
        # What means "off", and what another algorithm takes.
        ["--momentum=0", "--optimizer=adam"],
        ["--local_steps=0", "--local_epochs=2"],
        ["--cohort=2", "--algorithm=erm,fedavg"],
        ["--server_optimizer=adam", "--algorithm=erm,fedavg"],
        # What a preset says and a later flag overrules.
        ["--preset=rotated_mnist_5", "--momentum=0", "--optimizer=adam"],
        ["--preset=rotated_digits", "--environment=colored"],
        ["--preset=rotated_digits", "--local_steps=3"],
        ["--preset=rotated_mnist_5", "--algorithm=fedavg"],
        ["--environment=colored", "--flips=0.2,0.1", "--held_out=0.9", "--test_fraction=0.3"],
        ["--environment=colored", "--clients=5"],
        ["--held_out=none", "--test_fraction=0.3"],
    ],
)
def test_flags_that_have_an_effect_pass(arguments: list[str]) -> None:
    chosen = command_line.of_arguments(arguments)
    if chosen.data.dataset == "digits":
        assert assemble.assemble(chosen).cells


@pytest.mark.parametrize(("changes", "message"), CASES)
def test_a_bad_value_is_told_in_one_line(
    tmp_path: Path, refusal: Refusal, changes: dict[str, Any], message: str
) -> None:
    folder = tmp_path / "run"
    line = refusal(lambda: train.train(config.of(run_dir=str(folder), **changes)))
    assert re.search(message, line)
    assert not folder.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rounds=many"], "--rounds=many"),
        (["--fluffy=1"], "fluffy"),
        (["--preset=rotated_digit"], "--preset=rotated_digit: .*rotated_digits"),
        (["--learning_rate=fast"], "--learning_rate=fast: must be numbers"),
        (["--seeds=0,1.5"], "--seeds=0,1.5: must be whole numbers"),
        (["--rounds=9", "rounds=3"], "rounds=3: not a flag; flags are --name=value"),
    ],
)
def test_a_bad_flag_is_told_in_one_line(
    refusal: Refusal, arguments: list[str], message: str
) -> None:
    assert re.search(message, refusal(command_line.of_arguments, arguments))


def test_what_is_no_input_is_not_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A defect needs its traceback, wherever it is: of a flag's part, too."""
    # No other test has these angles, so that their data are drawn here.
    chosen = config.of(run_dir=str(tmp_path / "run"), angles=(0.0, 8.0, 24.0))

    def defect(*arguments: Any, **others: Any) -> NoReturn:
        tuple(zip((1, 2), (1,), strict=True))
        raise AssertionError

    for module, name in (
        (sources, "load"),
        (environments, "rotated"),
        (models, "mlp"),
        (fedavg, "fedavg"),
        (federation, "split"),
        (grid, "folder_names"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, defect)
            patch.setattr(registry, "MODELS", {"mlp": models.mlp})
            with pytest.raises(ValueError, match=r"zip\(\)") as error, errors.in_one_line():
                sweep.sweep(chosen)
            assert not isinstance(error.value, UsageError)


def test_a_run_that_diverged_is_told_in_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended, errors.in_one_line():
        raise errors.Diverged("round 3:\nits loss")
    assert ended.value.code == 3
    assert capsys.readouterr().err == "error: round 3: its loss\n"


OWN = """
from collections.abc import Callable
from fedjax_inv.types import Facts

FACTS = Facts(needs_norm=True)

def mine(
    model, work, *,
    rate: float | None = None,
    depth: int | None = None,
    name: str | None = None,
    mixed: bool | float = False,
    untyped=0.5,
    untold=None,
    hook: Callable[[int], int] | None = None,
):
    raise ValueError("mine takes nothing")

def refuses(num_classes):
    raise ValueError(f"num_classes={num_classes}: must be 2")
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An algorithm of one's own."""
    (tmp_path / "elsewhere.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "elsewhere", raising=False)
    return "elsewhere:mine"


@pytest.mark.parametrize(
    ("entry", "values"),
    [
        ("rate=none,-0.5,3", (None, -0.5, 3.0)),
        ("depth=None,-2", (None, -2)),
        ("name=none,fast,-1", (None, "fast", "-1")),
        ("mixed=True,2,false", (True, 2.0, False)),
        ("untyped=-1e-3", (-1e-3,)),
        ("hook=none", (None,)),
        ("untold=none", (None,)),
    ],
)
def test_settings_take_the_types_of_the_factory(own: str, entry: str, values: Any) -> None:
    chosen = config.of(algorithm=(own,), norm="batch", settings=(entry,))
    parsed = method.settings(chosen.method)[own][entry.partition("=")[0]]
    assert parsed == values
    assert list(map(type, parsed)) == list(map(type, values))


def test_what_an_own_module_says_of_itself_counts(
    own: str, refusal: Refusal, tmp_path: Path
) -> None:
    def work(**changes: Any) -> None:
        train.train(config.of(algorithm=(own,), run_dir=str(tmp_path / "run"), **changes))

    assert (
        refusal(work)
        == f"--algorithm={own}: needs --norm=batch, as the network has no normalisation layers"
    )
    assert refusal(work, norm="batch") == f"--algorithm={own}: mine takes nothing"
    # Whether a network of one's own has norms is one's own affair.
    line = refusal(work, model="elsewhere:refuses")
    assert line == "--model=elsewhere:refuses: num_classes=10: must be 2"
    for entry in ("hook=abs", "untold=1"):
        line = refusal(work, norm="batch", settings=(entry,))
        assert line.startswith(f"--set={entry}: can be set in Python only")
    assert not (tmp_path / "run").exists()


def test_a_helper_beside_the_algorithms_is_no_choice(
    tmp_path: Path, refusal: Refusal, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "helper.py").write_text("def helper(model, work):\n    pass\n")
    monkeypatch.setattr(algorithms, "__path__", [*algorithms.__path__, str(tmp_path)])
    line = refusal(config.of, algorithm=("helper",))
    assert line.startswith("--algorithm=helper: unknown; ")


def test_train_refuses_a_grid(tmp_path: Path, refusal: Refusal) -> None:
    grids: list[dict[str, Any]] = [
        dict(algorithm=("fedavg", "fedipg")),
        dict(held_out="all"),
        dict(learning_rate=(0.1, 0.2)),
    ]
    for changes in grids:
        chosen = config.of(run_dir=str(tmp_path / "run"), **changes)
        assert "fedjax-inv sweep" in refusal(train.train, chosen)


def test_bad_npz_files(tmp_path: Path, refusal: Refusal) -> None:
    x, y = np.zeros((6, 4), np.float32), np.arange(6) % 2
    cases: dict[str, dict[str, Any]] = {
        "x": {"y": y},
        "y": {"x": x},
        "NaN": {"x": x * np.nan, "y": y},
        "6 and 5": {"x": x, "y": y[:5]},
    }
    for name, arrays in cases.items():
        path = tmp_path / "mine.npz"
        np.savez(path, **arrays)
        chosen = config.of(dataset=str(path), environment="none")
        line = refusal(train.train, chosen)
        assert line.startswith(f"--dataset={path}: ")
        assert name in line.removeprefix(f"--dataset={path}: ")


def test_a_folder_that_is_not_this_run(tmp_path: Path, refusal: Refusal) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    chosen = config.of(run_dir=str(tmp_path), seeds=(0, 1))
    assert "neither empty nor a run" in refusal(train.train, chosen)
    (cell,) = grid.cells(chosen, ["75"])
    folders.begin(tmp_path, chosen, cell, Start("2026-01-01", None, {}, "0" * 64))
    assert "unfinished run; add --resume" in refusal(train.train, chosen)
    others: list[tuple[dict[str, Any], str]] = [
        (dict(rounds=60), "rounds is 50 and not 60"),
        (dict(held_out="60"), 'held_out is "75" and not "60"'),
        (
            dict(momentum=0.5, widths=(8,)),
            "whose momentum is 0.0 and not 0.5, widths are none and not 8; choose another "
            "--run_dir, or --momentum=0 --widths=",
        ),
        (dict(seeds=(0, 2)), "whose seeds are 0,1 and not 0,2"),
        (dict(seeds=(0,)), "whose seeds are 0,1 and not 0; "),
        (dict(learning_rate=(0.5,)), "whose learning_rate is 0.1 and not 0.5"),
        (dict(algorithm=("fedprox",)), 'algorithm is "fedavg" and not "fedprox"'),
    ]
    for changes, message in others:
        line = refusal(train.train, config.changed(chosen, **changes))
        assert line.startswith(f"--run_dir={tmp_path}: ")
        assert message in line


def test_resuming_where_no_run_is_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder's name may have been mistyped, and a script may have made the folder."""
    (tmp_path / "made").mkdir()
    for resume, name in itertools.product((True, False), ("tpyo", "made")):
        launch.prepared(config.of(resume=resume), tmp_path / name, in_folders=False)
        line = f"--resume: {tmp_path / name} holds no run; a new one starts\n"
        assert capsys.readouterr().err == line * resume


def test_a_sweep_does_not_replace_a_run(tmp_path: Path, refusal: Refusal) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "result.json").write_text("of the run")
    line = refusal(sweep.sweep, config.of(run_dir=str(tmp_path)))
    assert line == f"--run_dir={tmp_path}: holds a run of its own; choose another"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    line = refusal(sweep.sweep, config.of(run_dir=str(tmp_path / "mine")))
    assert line == f"--run_dir={tmp_path / 'mine'}: is neither empty nor a sweep; choose another"
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes.txt"]


def test_every_preset_parses() -> None:
    presets = sorted(path.stem for path in command_line.PRESETS.glob("*.flags"))
    assert {"rotated_digits", "rotated_mnist_5", "rotated_mnist_50"} <= set(presets)
    for preset in presets:
        # Ways of playing go with data.
        variant = "v" if preset.endswith("fast") else "f"
        names = f"colored_mnist_{variant},{preset}" if preset.startswith("games_") else preset
        if names.endswith("smooth") or names.endswith("fast"):
            names = names.replace(",", ",games_parallel,")
        if names.endswith("_v"):
            names += ",games_parallel"
        assert grid.cells(command_line.of_arguments([f"--preset={names}"]), ["0", "75"])


def test_sweep_and_train_share_their_checks(tmp_path: Path, refusal: Refusal) -> None:
    folder = tmp_path / "run"
    cases: list[tuple[dict[str, Any], str]] = [
        (dict(held_out="90"), "--held_out=90: "),
        (IPG | dict(settings=("penalty=0,-1",)), "--set=penalty=-1: "),
    ]
    for changes, message in cases:
        chosen = config.of(run_dir=str(folder), **changes)
        assert refusal(sweep.sweep, chosen).startswith(message)
    assert not folder.exists()


@pytest.mark.slow
def test_the_command_line_ends_with_one_line_and_status_2(tmp_path: Path) -> None:
    flags = ["--preset=rotated_digits", "--cohort=9", f"--run_dir={tmp_path / 'run'}"]
    command = [sys.executable, "-m", "experiments.sweep", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: --cohort=9: ")
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_platform_that_is_not_there_is_told_in_one_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "experiments.train", "--rounds=1", f"--run_dir={tmp_path / 'run'}"],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "abacus"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: JAX_PLATFORMS='abacus': has no device")
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_signal_writes_a_checkpoint_and_the_run_can_go_on(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    arguments = [
        *("--widths=8", "--rounds=2000", "--eval_every=1", "--client_chunk=1", "--run_chunk=1"),
        *(f"--run_dir={folder}", "--resume"),
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "experiments.train", *arguments],
        cwd=ROOT,
        env={**os.environ, "JAX_ENABLE_COMPILATION_CACHE": "false"},
        stderr=subprocess.PIPE,
        text=True,
    )
    lines = folder / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (lines.exists() and lines.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT
    assert "Traceback" not in err
    assert "--resume" in err
    last = log.read(folder)[-1].round
    assert (folder / "checkpoints" / str(last)).is_dir()
    assert not (folder / "result.json").exists()
