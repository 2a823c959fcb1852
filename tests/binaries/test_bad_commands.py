"""Bad command lines: one line that names the flag, with status 2, and nothing is left behind."""

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

from fedjax_inv.plan import Plan
from fedjax_inv_experiments import command_line, config, evaluate, paper, show_data, start, train
from fedjax_inv_experiments import map as map_binary
from fedjax_inv_experiments.assembly import experiment, grid, method
from fedjax_inv_experiments.command_line import PRESETS
from runs import parsed

ROOT = Path(__file__).parents[2]
BINARIES = {
    "train": train,
    "show_data": show_data,
    "evaluate": evaluate,
    "paper": paper,
    "map": map_binary,
}


def run(command: str) -> None:
    """Runs a command line in this process, as `python -m` does."""
    name, *words = shlex.split(command)
    command = BINARIES[name]
    with start.in_one_line(), parsed(*words, most=name == "paper", command=command) as others:
        print(command.main.__wrapped__(others))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of data sets, most of which are no good."""
    folder = tmp_path_factory.mktemp("data")
    vectors, y = np.random.default_rng(0).normal(size=(60, 5)), np.arange(60) % 3
    np.savez(folder / "vectors.npz", x=vectors, y=y)
    np.savez(folder / "values.npz", x=vectors, y=y + 0.5)
    np.savez(folder / "nan.npz", x=vectors * np.nan, y=y)
    np.savez(folder / "no_y.npz", x=vectors)
    (folder / "table.csv").write_text("x,city,target\n1,Rome,0.5\n2,Oslo,1.5\n3,Rome,2.5\n")
    (folder / "text_image" / "a" / "x").mkdir(parents=True)
    (folder / "text_image" / "a" / "x" / "1.png").write_text("hello")
    return folder


# A command line, and the flag or the name that its line has; {data} is the folder above.
COMMANDS = [
    # Names.
    ("train --algorithm=fedpig", "--algorithm=fedpig"),
    ("train --algorithm=fedavg,nowhere", "--algorithm=nowhere"),
    ("train --algorithm=nowhere:mine", "--algorithm=nowhere:mine"),
    ("train --algorithm=math:pi", "--algorithm=math:pi"),
    ("train --model=mpl", "--model=mpl"),
    ("train --environment=rotate", "--environment=rotate"),
    ("train --partition=domains", "--partition=domains"),
    ("train --optimizer=sdg", "--optimizer=sdg"),
    ("train --score=precision", "--score=precision"),
    ("train --preset=nowhere", "--preset=nowhere"),
    ("train --fluffy=1", "fluffy"),
    ("train --lr=0.1", "--learning_rate="),
    ("train --algorithm=fedipg --penalty=0.1", "--set=penalty="),
    ("train rounds=3", "rounds=3"),
    # Numbers and their ranges.
    ("train --rounds", "--rounds"),
    ("train --rounds=0", "--rounds=0"),
    ("train --rounds=many", "--rounds=many"),
    ("train --learning_rate=nan", "--learning_rate="),
    ("train --momentum=1.5", "--momentum=1.5"),
    ("train --seeds=1,1", "--seeds="),
    ("train --partition=dirichlet --alpha=0", "--alpha=0"),
    ("train --widths=0", "--widths=0"),
    ("train --cut=9", "--cut=9"),
    ("train --warm_start=soon", "--warm_start=soon"),
    ("train --lossy=0:2", "--lossy="),
    ("train --lossy=" + ",".join(f"{client}:0" for client in range(5)), "--lossy="),
    ("train --seeds=1-3", "comma-separated list"),
    ("train --aggregate=krum:2", "--aggregate=krum:2"),
    ("train --aggregate=krum:1.5", "--aggregate=krum:1.5"),
    ("train --aggregate=clipped_mean:0", "--aggregate=clipped_mean:0: clip=0"),
    ("train --aggregate=trimmed_mean:0.7", "--aggregate=trimmed_mean:0.7"),
    ("train --aggregate=median:1", "--aggregate=median:1"),
    ("train --aggregate=mean:3", "--aggregate=mean:3"),
    ("train --aggregate=multi_krum:1:9", "--aggregate=multi_krum:1:9"),
    ("train --aggregate=median --algorithm=scaffold", "--aggregate=median"),
    ("train --attack=sign_flip", "--attackers="),
    ("train --attack=sign_flip --attackers=9", "--attackers=9"),
    ("train --attack=scaled_noise:-1 --attackers=0", "--attack=scaled_noise:-1"),
    ("train --attack=sign_flip --attackers=0 --algorithm=scaffold", "--attack=sign_flip"),
    ("train --rare_domain=0:2", "--rare_domain=0:2"),
    ("train --rare_domain=1:0.1", "--rare_domain=1"),
    ("train --rare_domain=0:0.9", "--rare_domain="),
    ("train --epsilon=1", "--private_clip=0"),
    ("train --private_clip=1 --epsilon=1e9", "--epsilon=1e9"),
    ("train --private_clip=1 --noise_multiplier=1 --delta=0.5", "--delta=0.5"),
    ("train --private_clip=1 --epsilon=1 --noise_multiplier=1", "--epsilon=1"),
    ("train --private_clip=1 --noise_multiplier=1 --first_all", "--first_all="),
    ("train --private_clip=1 --noise_multiplier=1 --algorithm=exit_strategy", "--private_clip=1"),
    ("train --private_clip=1 --epsilon=8 --cohort=2", "--sampling=poisson"),
    ("train --sampling=poisson --sampling_rate=0.5 --slow=0:3", "--slow=0:3"),
    ("train --processes=localhost:80,2,2", "--processes="),
    ("train --hold=stream --processes=auto", "hold=stream"),
    ("train --hold=stream --pooled", "--pooled"),
    ("train --devices=64", "--devices=64"),
    # Settings of algorithms.
    ("train --algorithm=fedipg --set=penalty", "--set="),
    ("train --algorithm=fedipg --set=penalti=1", "--set=penalti=1"),
    ("train --algorithm=fedipg --set=penalty=-1", "--set=penalty=-1"),
    ("train --algorithm=fl_games --set=memory=2.5", "--set=memory=2.5"),
    ("train --algorithm=fedbn", "--norm"),
    ("train --optimizer_set=momentum=0.9", "--optimizer_set=momentum=0.9"),
    # What does not fit together.
    ("train --slow=5:2", "--slow=5:2"),
    ("train --late=stale --slow=0:2", "slow"),
    ("train --missing=reuse --cohort=2 --algorithm=scaffold", "--missing=reuse"),
    ("train --first_all --cohort=2 --rounds=2", "--first_all"),
    ("train --schedule=cosine --warmup_rounds=50", "warmup_rounds=50"),
    ("train --algorithm=cafe", "--optimizer"),
    ("train --algorithm=fednova --momentum=0.9 --weight_decay=0.1", "--optimizer"),
    ("train --partition=shards --clients=500 --classes_per_client=9", "--classes_per_client"),
    ("train --partition=quantity --clients=90 --alpha=0.001", "--alpha=0.001"),
    ("train --weights=nowhere.safetensors --model=resnet18", "--weights="),
    ("train --model=alexnet --stride=2", "--model=alexnet"),
    ("train --augment", "--augment"),
    ("train --select=agreement --partition=iid", "--select=agreement"),
    ("train --select=leave_one_out --angles=0,30 --held_out=30", "--leave_one_out"),
    ("train --learning_rate=", "learning_rate="),
    ("train --draws=3 --learning_rate=0.1,0.2", "learning_rate="),
    ("train --draws=3 --algorithm=fedprox --set=proximal=0.1,1", "--draws=3"),
    ("train --clients=3", "--clients=3"),
    ("train --cohort=9", "--cohort=9"),
    ("train --held_out=90", "--held_out=90"),
    ("train --validation=1", "--validation=1"),
    ("train --validation=0", "--validation"),
    ("train --loss=squared_error", "--loss=squared_error"),
    ("train --watch_examples=9 --stop_below=2", "--stop_below=2"),
    ("train --dataset={data}/vectors.npz --model=cnn", "--model=cnn"),
    ("train --dataset={data}/values.npz --partition=dirichlet", "--partition=dirichlet"),
    # Data.
    ("train --dataset=minst", "--dataset=minst"),
    *((f"train --dataset={{data}}/{n}.npz", "--dataset") for n in ("nan", "no_y", "nowhere")),
    ("train --dataset={data}/text_image", "--dataset"),
    ("train --dataset={data}/table.csv --target_column=y", "--target_column=y"),
    # Folders and the other binaries.
    ("train --run_dir={data}/table.csv", "--run_dir"),
    ("train --run_dir={data}", "--run_dir"),
    ("evaluate --run={data}", "--run="),
    ("show_data --images=0", "--images=0"),
    ("show_data --out=picture.jpg", "--out=picture.jpg"),
    ("paper cafe --data=digits --rows=nowhere", "--rows=nowhere"),
    ("paper fedipg --study=nowhere", "--study=nowhere"),
    ("map --columns=nowhere", "--columns=nowhere"),
    ("paper nowhere", "nowhere"),
    ("paper fedipg --algorithm=fedavg", "--algorithm"),
    ("evaluate --run={data} --rounds=3", "--rounds=3"),
    ("train --out=x.png", "--out=x.png"),
    ("show_data --rows=fedavg", "--rows=fedavg"),
    # What absl says in Python's words, or not at all.
    ("train --standardise=maybe", "true"),
    ("train --nostandardise=1", "--nostandardise=1"),
    ("train --rounds=1.5", "positive integer"),
    ("train --processes=a", "--processes=a:"),
]


@pytest.mark.parametrize(("command", "name"), COMMANDS)
def test_a_bad_command_is_one_line_and_leaves_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    data: Path,
    capsys: pytest.CaptureFixture[str],
    command: str,
    name: str,
) -> None:
    def refuse(*arguments: Any) -> NoReturn:
        raise AssertionError("trained before the input was checked")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Plan, "train", refuse)
    before = sorted(data.rglob("*"))
    with pytest.raises(SystemExit) as ended:
        run(command.replace("{data}", str(data)))
    out, err = capsys.readouterr()
    assert ended.value.code == 2
    (line,) = err.splitlines()
    assert line.startswith("error: ")
    assert name in line
    assert not out
    assert not list(tmp_path.iterdir())
    assert sorted(data.rglob("*")) == before


@pytest.mark.slow
def test_a_platform_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "experiments.train", f"--run_dir={tmp_path / 'run'}"],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "abacus"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "JAX_PLATFORMS" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["--cohort=2", "--algorithm=erm,fedavg"],
        # What a preset says and a later flag overrules.
        ["--preset=rotated_digits", "--environment=colored"],
        ["--preset=rotated_digits", "--local_steps=3"],
        ["--environment=colored", "--flips=0.2,0.1", "--held_out=0.9", "--test_fraction=0.3"],
        ["--held_out=none", "--test_fraction=0.3"],
    ],
)
def test_flags_that_fit_together_pass(arguments: list[str]) -> None:
    assert experiment.make(command_line.of_arguments(arguments)).cells


OWN = """
from collections.abc import Callable

def mine(
    model, work, *,
    rate: float | None = None,
    depth: int | None = None,
    name: str | None = None,
    mixed: bool | float = False,
    untyped=0.5,
    hook: Callable[[int], int] | None = None,
):
    raise NotImplementedError
"""


@pytest.mark.parametrize(
    ("entry", "values"),
    [
        ("rate=none,-0.5,3", (None, -0.5, 3.0)),
        ("depth=None,-2", (None, -2)),
        ("name=none,fast,-1", (None, "fast", "-1")),
        ("mixed=True,2,false", (True, 2.0, False)),
        ("untyped=-1e-3", (-1e-3,)),
        ("hook=none", (None,)),
    ],
)
def test_settings_take_the_types_of_the_factory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entry: str, values: Any
) -> None:
    (tmp_path / "elsewhere.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "elsewhere", raising=False)
    chosen = config.of(algorithm=("elsewhere:mine",), set=(entry,))
    parsed = method.settings(chosen.method)["elsewhere:mine"][entry.partition("=")[0]]
    assert parsed == values
    assert list(map(type, parsed)) == list(map(type, values))


def test_every_preset_parses() -> None:
    presets = sorted(path.stem for path in PRESETS.glob("*.flags"))
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


# What a shell may do with the outputs of a command.
PRINTING = "import sys; print('北' * 9**6); print('x', file=sys.stderr, flush=True)"


@pytest.mark.parametrize("end", ["2>&1 | true", ">&- 2>&-", "| head -c 1", "2< /dev/null"])
def test_no_output_ends_a_command_without_its_results(tmp_path: Path, end: str) -> None:
    first = "import os; from fedjax_inv_experiments import start; start.keep_printing()"
    last = "open('result', 'w').close()"
    command = shlex.join([sys.executable, "-c", f"{first}; {PRINTING}; {last}"])
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command} {end}"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "result").exists()


def test_the_librarys_warnings_reach_a_commands_user() -> None:
    code = "import logging; from fedjax_inv_experiments import start; start._prepare(); "
    code += "logging.getLogger('fedjax_inv.cse').warning('slower')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr == "warning: slower\n"
