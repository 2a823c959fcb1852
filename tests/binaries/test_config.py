"""Configurations: of flags by name, of command lines with presets, and of records."""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fedjax_inv import late_uploads, models
from fedjax_inv.algorithms import LISTED
from fedjax_inv.checks import UsageError
from fedjax_inv.data import dataset, simpson, stains
from fedjax_inv.models import resnet
from fedjax_inv.models.mlp import ACTIVATIONS, NORMS
from fedjax_inv.platforms import PRECISIONS
from fedjax_inv_experiments import command_line, config, sheet
from fedjax_inv_experiments.assembly import factories, metrics
from fedjax_inv_experiments.folder import run_folder, selection
from runs import with_flags

PRESET = "--preset=rotated_digits"  # says --set=penalty=0.001,0.01


def test_a_configuration_is_flat_and_does_not_change() -> None:
    chosen = config.of(environment="colored", flips=(0.3,), widths=[4, 5], rounds=9)
    assert (chosen.training.rounds, chosen.network.widths, chosen.partition.alpha) == (
        9,
        (4, 5),
        0.5,
    )
    assert config.of(**sheet.flat(chosen)) == chosen
    assert config.from_record(json.loads(json.dumps(config.to_record(chosen)))) == chosen
    assert with_flags(chosen, rounds=7).training.rounds == 7
    assert len({chosen, with_flags(chosen), config.defaults()}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        chosen.training.rounds = 3
    with pytest.raises(TypeError):
        config.of(round=3)
    for wrong in (dict(rounds=0), dict(rounds="many"), dict(seeds=(1, 1)), dict(select="best")):
        with pytest.raises(UsageError, match=f"--{next(iter(wrong))}="):
            config.of(**wrong)


def test_presets_are_flag_files_of_which_later_ones_win() -> None:
    chosen = command_line.of_arguments(
        ["--preset=colored_mnist_v,games_sequential,games_smooth", "--rounds=77"]
    )
    assert (chosen.data.dataset, chosen.network.cut, chosen.training.rounds) == ("mnist", 1, 77)
    assert {"learned=true", "play=sequential", "memory=5"} < {*chosen.method.set}
    assert command_line.of_arguments(["--preset", "games_smooth"]).method.set == ("memory=5",)


@pytest.mark.parametrize(
    ("arguments", "settings"),
    [
        ([PRESET], ("penalty=0.001,0.01",)),
        ([PRESET, "--set", "penalty=3"], ("penalty=3",)),
        ([PRESET, "--set=weighting=uniform"], ("penalty=0.001,0.01", "weighting=uniform")),
        ([PRESET, "--set=penalty="], ()),
        (["--set=penalty=3", PRESET], ("penalty=0.001,0.01",)),
    ],
)
def test_a_later_setting_replaces_or_takes_back(
    arguments: list[str], settings: tuple[str, ...]
) -> None:
    assert command_line.of_arguments(arguments).method.set == settings


def test_the_environment_of_a_path_is_its_own() -> None:
    for name, expected in (("mnist", "rotated"), ("here/mine.npz", "none"), (".", "none")):
        chosen = config.of(dataset=name)
        assert chosen.environment_name == config.to_record(chosen)["environment"] == expected
    assert config.of(dataset="mine.npz", environment="colored").environment_name == "colored"


def test_the_choices_of_flags_are_those_of_the_library() -> None:
    assert tuple(config.ALGORITHMS) == LISTED
    assert {*config.METRICS} == {*metrics.METRICS}
    assert {*config.PUBLISHED} == {*models.BODIES}
    for name, known in (
        ("select", selection.RULES),
        ("activation", ACTIVATIONS),
        ("norm", {*NORMS, *resnet.NORMS}),
        ("stain", stains.STAINS),
        ("shading", simpson.SHADINGS),
        ("missing", late_uploads.RULES),
        ("task", {"auto", *dataset.TASKS}),
        ("precision", {"auto", "bfloat16", *PRECISIONS}),
    ):
        assert {*command_line.FLAGS[name].parser.enum_values} == {*known}, name
    assert all(callable(factories.network(name)) for name in config.MODELS)
    for name, rule in selection.RULES.items():
        compares = config.of(select=name).evaluation.compares_domains
        assert compares == rule.compares_domains, name


def folder(*arguments: str) -> str:
    """Where `train` goes by default."""
    return run_folder.path_of(command_line.of_arguments(arguments)).as_posix()


def test_a_default_folder_tells_what_differs() -> None:
    assert folder() == "runs/fedavg-digits-default"
    assert folder("--held_out=75", "--clip=0.2") == "runs/fedavg-digits-75-clip=0.2"
    assert folder("--seeds=0,1") == "runs/fedavg-digits-default-seeds=0-1"
    # What is long, and what a file system may not take, is named by a checksum.
    for arguments in (["--preset=rotated_digits_small"], ["--dataset=a/b.npz"]):
        assert re.fullmatch(r"runs/\w+-\w+-[\d-]*\w*-[\da-f]{8}", folder(*arguments)), arguments
    assert re.fullmatch(r"runs/grid-digits-fedavg-fedipg-[\da-f]{8}", folder(PRESET))


def test_a_default_folder_is_that_of_the_run() -> None:
    """The same for the same run, and another for another."""
    some = ["--learning_rate=0.2", "--clients=7"]
    assert folder(*some) == folder(*reversed(some))
    for more in ("--rounds=60", "--resume", "--devices=1", "--nonfinite=drop", "--select=last"):
        assert folder(*some, more) == folder(*some)
    data = [folder(f"--dataset={place}/mine.npz") for place in ("a", "b")]
    rates = [folder("--learning_rate=0.1000001"), folder("--learning_rate=0.1000002")]
    every = [*data, *rates, folder("--preset=stained_mnist"), folder(*some)]
    assert len(set(every)) == len(every)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), 5),
        (("--rounds=3",), 3),
        (("--checkpoint_every=12",), 4),
        (("--rounds=4", "--checkpoint_every=6"), 3),
        (("--preset=cafe_paper,digits_cafe",), 4),
        (("--preset=rotated_digits_domains", "--rounds=2"), 2),
        (("--rounds=3", "--eval_every=2"), 2),
    ],
)
def test_evaluations_fit_rounds_and_checkpoints(arguments: tuple[str, ...], expected: int) -> None:
    assert command_line.of_arguments(arguments).evaluation.eval_every == expected


def test_a_grid_marks_what_diverges_and_a_run_stops() -> None:
    for word in ("--learning_rate=0.1,0.2", "--algorithm=fedavg,fedipg", "--held_out=all", PRESET):
        assert command_line.of_arguments([word]).is_grid
        assert command_line.of_arguments([word]).evaluation.nonfinite == "mark"
    assert not command_line.of_arguments(["--seeds=0,1"]).is_grid
    assert command_line.of_arguments(["--seeds=0,1"]).evaluation.nonfinite == "stop"


@pytest.mark.slow
def test_mypy_refuses_a_misspelt_field_and_a_wrong_type() -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "mypy", "--no-error-summary", "tests/misspelt.py"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    refused = re.findall(r"^tests/misspelt\.py:(\d+): error", done.stdout, re.MULTILINE)
    assert [int(line) for line in refused] == [9, 13, 18, 18], done.stdout
