"""Run folders: an error names damaged, foreign and unwritable files in one line. No result is lost.

A tiny run, finished and stopped half-way, is copied and spoiled; its program is compiled once.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import chex
import jax
import pytest

import fedjax_inv
import slow
from fedjax_inv import plan as plans
from fedjax_inv.ahead import Ahead
from fedjax_inv.checks import UsageError
from fedjax_inv.plan import Plan
from fedjax_inv_experiments import config, evaluation, start
from fedjax_inv_experiments.assembly import factories, grid, machine
from fedjax_inv_experiments.config import Config
from fedjax_inv_experiments.folder import checkpoints, files, selected
from fedjax_inv_experiments.folder import run_folder as folders
from fedjax_inv_experiments.folder.interrupt import Interrupt
from fedjax_inv_experiments.folder.recorder import Recorder
from fedjax_inv_experiments.run import Programs, prepare
from runs import (
    Ran,
    changed,
    go_on,
    halved,
    metrics,
    no_figures,
    ran,
    start_of,
    states,
    train,
    train_job,
    with_flags,
)

ROOT = Path(__file__).parents[2]
TINY = config.of(
    angles=(0.0, 80.0),
    rounds=3,
    eval_every=1,
    widths=(4,),
    local_steps=1,
    seeds=(0, 1),
    chunk=("1", "1"),
    resume=True,
)


class Runs(NamedTuple):
    """A run that is finished, and the same after two of its three rounds."""

    whole: Ran
    half: Path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    place = tmp_path_factory.mktemp("runs")
    whole = ran(with_flags(TINY, run_dir=str(place / "whole")))
    half = halved(whole.job, halved(whole.job, place / "half"))
    assert checkpoints.rounds(half / "checkpoints") == [1, 2]
    return Runs(whole, half)


@pytest.fixture
def compiled(made: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is run has the program of the run that is there."""
    monkeypatch.setattr(plans, "Program", lambda *given, **named: made.whole.job.plan.program)


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Work that must end with one line and status 2 -> the line."""

    def line_of(work: Callable[[], Any]) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended, start.in_one_line(), no_figures():
            work()
        assert ended.value.code == 2
        told = capsys.readouterr().err
        assert "Traceback" not in told
        (line,) = [line for line in told.splitlines() if line.startswith("error: ")]
        return line.removeprefix("error: ")

    return line_of


def copied(folder: Path, to: Path) -> Path:
    shutil.copytree(folder, to)
    return to


def resume(folder: Path, **changes: Any) -> None:
    with no_figures():
        train(with_flags(TINY, run_dir=str(folder), **changes))


def evaluated(folder: Path, networks: Path | str = "") -> None:
    out = str(folder.parent / "x.png")
    with no_figures():
        evaluation.run(evaluation.EvaluationOptions(run=str(folder), out=out, export=str(networks)))


def same_end(folder: Path, whole: Ran, done: int = 3) -> None:
    """The run has gone on to where the other is, bit for bit."""
    assert metrics(folder) == metrics(whole.folder)
    for item in checkpoints.ITEMS:
        chex.assert_trees_all_equal(states(folder, done, item), states(whole.folder, done, item))


# --- damage


@pytest.mark.parametrize("name", ["config.json", "result.json"])
@pytest.mark.parametrize("text", ["", "{", "{}", '{"flags": 5}', "\x00"])
def test_a_damaged_record_is_one_line(
    made: Runs, refused: Callable[..., str], tmp_path: Path, name: str, text: str
) -> None:
    folder = copied(made.whole.folder, tmp_path / "run")
    (folder / name).write_text(text)
    for look in (resume, evaluated):
        line = refused(partial(look, folder))
        assert f"{folder / name}: is damaged" in line
        assert "delete" in line
        assert (folder / name).read_text() == text


def test_a_folder_of_another_version_names_it(
    made: Runs, refused: Callable[..., str], tmp_path: Path
) -> None:
    folder = copied(made.whole.folder, tmp_path / "run")
    path = folder / "config.json"
    record = json.loads(path.read_text())
    record["start"]["versions"]["fedjax_inv"] = "0.1.2"
    path.write_text(json.dumps(record))
    evaluated(folder)  # the form is the same
    for change in ({"fluffy": 1}, {"rounds": [3]}):
        path.write_text(json.dumps(record | {"flags": record["flags"] | change}))
        assert "was written by version 0.1.2, which reads it" in refused(partial(evaluated, folder))
    path.write_text(json.dumps(record | {"starts": [record.pop("start")]}))
    for look in (resume, evaluated):
        assert "was written by version 0.1.2, which reads it" in refused(partial(look, folder))


# orbax leaves futures behind that nobody asks for their error.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("item", checkpoints.ITEMS)
def test_a_broken_checkpoint_is_told_and_the_one_before_goes_on(
    made: Runs, refused: Callable[..., str], tmp_path: Path, item: str
) -> None:
    folder = copied(made.half, tmp_path / "run")
    place = folder / "checkpoints" / "2"
    for path in (place / item).rglob("*"):
        if path.is_file() and path.stat().st_size > 100:
            path.write_bytes(path.read_bytes()[:50])
    line = refused(lambda: go_on(made.whole.job, folder))
    assert line.startswith(f"{place}: corrupt")
    shutil.rmtree(place)
    same_end(go_on(made.whole.job, folder), made.whole)


def test_a_checkpoint_of_another_network_is_told(made: Runs) -> None:
    job, place = made.whole.job, made.half / "checkpoints"
    plan = job.plan
    shapes = plan.program.shapes(plan.data, plan.inputs)
    like = selected.of(shapes, plan.build(plan.runs[0].hyper).personal)
    wider = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((*leaf.shape, 2), leaf.dtype), like)
    assert checkpoints.selected(place, 2, like).round.shape == (2,)
    with pytest.raises(UsageError, match=f"^{place / '2'}: .*must be"):
        checkpoints.selected(place, 2, wider)


@pytest.mark.parametrize("ending", ["", ".orbax-checkpoint-tmp"])
def test_a_half_of_a_checkpoint_is_passed_over(made: Runs, tmp_path: Path, ending: str) -> None:
    folder = copied(made.half, tmp_path / "run")
    place = folder / "checkpoints" / "2"
    shutil.rmtree(place / "kept")
    place.rename(f"{place}{ending}")
    assert checkpoints.rounds(place.parent) == [1]
    # Lines after the checkpoint, and half of one, are written anew.
    with (folder / "metrics.jsonl").open("a") as log:
        log.write('{"round": 3, "ru')
    same_end(go_on(made.whole.job, folder), made.whole)


def test_a_log_that_lacks_the_round_of_its_checkpoint_is_told(
    made: Runs, refused: Callable[..., str], tmp_path: Path
) -> None:
    folder = copied(made.half, tmp_path / "run")
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    for kept in (lines[:-1], [], [*lines[:2], "?\n", *lines[3:]]):
        path.write_text("".join(kept))
        assert str(path) in refused(lambda: go_on(made.whole.job, folder))
        assert path.read_text() == "".join(kept)


@pytest.mark.parametrize("names", [[".lock"], ["checkpoints/", "config.json.tmp"]])
def test_what_a_process_leaves_that_dies_before_it_begins(tmp_path: Path, names: list[str]) -> None:
    (cell,) = grid.cells(TINY, ["80"])
    for folder in (tmp_path / "run", tmp_path / "sweep" / "cell"):
        folder.mkdir(parents=True)
        for name in names:
            (folder / name).mkdir() if name.endswith("/") else (folder / name).touch()
        assert folders.finished(TINY, cell, folder, pytest.fail) is None
    folders.check_sweep(tmp_path / "sweep")
    (tmp_path / "sweep" / "cell" / "notes").touch()
    with pytest.raises(UsageError):
        folders.finished(TINY, cell, tmp_path / "sweep" / "cell", pytest.fail)
    with pytest.raises(UsageError):
        folders.check_sweep(tmp_path / "sweep")
    (tmp_path / "sweep" / "cell" / "config.json").touch()
    folders.check_sweep(tmp_path / "sweep")


def test_a_folder_is_enough(made: Runs, compiled: None, tmp_path: Path) -> None:
    """Another place, and the first is gone."""
    whole = copied(made.whole.folder, tmp_path / "whole")
    evaluated(whole, tmp_path / "export")
    assert (tmp_path / "export" / "seed=0" / "model.safetensors").is_file()
    half = copied(made.half, tmp_path / "half")
    resume(half)
    same_end(half, made.whole)


# --- other data and code, and other processes

NET = """
import flax.linen as nn
from fedjax_inv import models

class Net(nn.Module):
    outputs: int

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.outputs)(nn.relu(nn.Dense(1)(x)))

def net(outputs):
    return models.from_flax(Net(outputs))
"""


def sweep(chosen: Config) -> str:
    """A grid with a folder for each cell, also if there is one only."""
    return train(chosen, in_folders=True)


def test_a_table_joins_no_cells_on_other_data_or_of_other_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, code, folder = tmp_path / "t.csv", tmp_path / "own_net.py", tmp_path / "sweep"
    rows = [f"{i % 7},{-i % 5},{'nse'[i % 3]},{'ny'[i % 2]}" for i in range(60)]
    data.write_text("\n".join(["a,b,domain,target", *rows, ""]))
    code.write_text(NET)
    monkeypatch.syspath_prepend(tmp_path)
    chosen = config.of(
        dataset=str(data), model="own_net:net", rounds=1, eval_every=1, run_dir=str(folder)
    )
    more = with_flags(chosen, algorithm=("fedavg", "fedprox"))
    with no_figures():
        first = sweep(chosen)
        result = (folder / "fedavg-s" / "metrics.jsonl").read_bytes()
        version = f'"{fedjax_inv.__version__}"'
        for path, old, new, words in (
            (data, "6,", "7,", "on other data"),
            (code, "class", "# new\nclass", "with other code"),
            (folder / "fedavg-s" / "config.json", version, '"0.1.2"', "with version 0.1.2"),
        ):
            before = path.read_text()
            path.write_text(before.replace(old, new))
            monkeypatch.setattr(factories, "_digests", {})  # as in a new process
            for again in (chosen, more, with_flags(more, resume=True)):
                with pytest.raises(UsageError, match=f"^--run_dir={folder}/fedavg-s: .*{words}"):
                    sweep(again)
            assert not (folder / "fedprox-s").exists()
            path.write_text(before)
        monkeypatch.setattr(factories, "_digests", {})
        assert sweep(chosen) == first
        # Code of other cells is no code of this one.
        (tmp_path / "own_method.py").write_text("from fedjax_inv.algorithms.fedavg import fedavg")
        beside = with_flags(chosen, algorithm=("fedavg", "own_method:fedavg"))
        prepare(beside, folder, in_folders=True)
    assert (folder / "fedavg-s" / "metrics.jsonl").read_bytes() == result


def test_the_same_command_again_gives_the_same_table(compiled: None, tmp_path: Path) -> None:
    """Though it reads the data of the first seed alone."""
    folder = tmp_path / "run"
    chosen = with_flags(TINY, run_dir=str(folder))
    with no_figures():
        train(chosen)
        table = (folder / "table.md").read_text()
        assert re.search(r"most frequent class.* ± ", table)
        train(chosen)
    assert (folder / "table.md").read_text() == table


def test_no_second_process_trains_a_cell_of_a_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "sweep"
    cell = folder / "fedavg-80"
    begun: list[Path] = []

    def enter(plan: Plan, callbacks: Any) -> NoReturn:
        begun.append(cell)
        with folders.locked(cell):
            raise AssertionError("entered")

    monkeypatch.setattr(Plan, "train", enter)
    chosen = with_flags(TINY, run_dir=str(folder), resume=True)
    with pytest.raises(UsageError, match=f"^--run_dir={cell}: another process"):
        sweep(chosen)
    assert begun == [cell]
    with folders.locked(cell), pytest.raises(UsageError, match=f"^--run_dir={cell}: another"):
        sweep(chosen)
    assert begun == [cell]


# --- disks


@pytest.mark.parametrize("how", ["a file", "the kernel's", "long"])
def test_a_run_dir_that_cannot_be_written(
    refused: Callable[..., str], tmp_path: Path, how: str
) -> None:
    (tmp_path / "file").touch()
    long = tmp_path / ("long" * 100)
    folder = {"a file": tmp_path / "file", "the kernel's": Path("/proc/run"), "long": long}[how]
    assert refused(lambda: resume(folder)).startswith(f"--run_dir={folder}: ")


def test_a_full_disk_is_told_and_the_run_goes_on_when_there_is_room(
    made: Runs, refused: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copied(made.half, tmp_path / "run")

    def full(*given: Any, **named: Any) -> Any:
        return open("/dev/full", "wb")

    def unsaved(*given: Any, **named: Any) -> NoReturn:
        raise ValueError("RESOURCE_EXHAUSTED: no space\nand more")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints.ocp.CheckpointManager, "save", unsaved)
        line = refused(lambda: go_on(made.whole.job, folder))
    assert line.startswith(f"{folder / 'checkpoints'}: a checkpoint could not be written")
    before = {path: path.read_bytes() for path in folder.glob("*.json*")}
    with monkeypatch.context() as patch:
        patch.setattr(files, "open", full, raising=False)
        line = refused(lambda: go_on(made.whole.job, folder))
    assert line.startswith(f"{folder / 'config.json'}: No space left on device; make room")
    assert {path: path.read_bytes() for path in folder.glob("*.json*")} == before
    same_end(go_on(made.whole.job, folder), made.whole)


# --- signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_the_first_signal_asks_and_a_second_one_ends_it(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though nothing comes back to Python meanwhile: here nobody runs the handlers."""
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    # The shell may ignore SIGHUP, as nohup does.
    outside, before = signal.signal(number, signal.default_int_handler), signal.getsignal(number)

    def wait(done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not done() and time.monotonic() < deadline:
            time.sleep(0.001)

    with Interrupt() as stop:
        assert stop.signal == 0
        signal.raise_signal(number)
        wait(lambda: stop.signal == number)
        assert (stop.signal, ended) == (number, [])
        signal.raise_signal(number)
        wait(lambda: bool(ended))
    assert ended == [128 + number]
    assert signal.signal(number, outside) == before
    assert signal.set_wakeup_fd(-1) == -1


def test_a_closed_terminal_asks_for_nothing_under_nohup() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupt() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        assert stop.signal == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_signal_while_processes_agree_stops_the_next_segment(
    made: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, folder = made.whole.job, tmp_path / "run"
    with Interrupt() as stop:
        agreed: list[int] = []

        def agree(value: int) -> int:
            agreed.append(value)
            stop.signal = signal.SIGTERM  # when this process has told the others that it has none
            return value

        monkeypatch.setattr(machine, "agree", agree)
        folders.begin(folder, job.config, job.cell, start_of(job))
        fitted, result = train_job(job, folder, stop)
    assert (fitted.round, result) == (2, None)
    assert agreed == [0, signal.SIGTERM]


@pytest.mark.parametrize("is_row", [False, True])
def test_a_signal_in_the_last_segment_of_a_cell_ends_it_before_the_next(
    is_row: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []

    def finish(self: Recorder, fitted: None) -> str:
        begun.append(self.job.cell.algorithm)
        (interrupt,) = (each for each in self.callbacks if isinstance(each, Interrupt))
        interrupt.signal = signal.SIGTERM
        return "a result"

    monkeypatch.setattr(Plan, "train", lambda plan, callbacks: None)
    monkeypatch.setattr(Recorder, "finish", finish)
    algorithms = ("fedavg",) if is_row else ("fedavg", "fedprox")
    chosen = with_flags(TINY, algorithm=algorithms)
    shared = Programs() if is_row else None
    ready = prepare(chosen, tmp_path / "run", in_folders=True, shared=shared)
    with pytest.raises(SystemExit) as ended, Ahead() as ahead:
        ready.run(lambda *finished: "", ahead)
    assert ended.value.code == 128 + signal.SIGTERM
    assert begun == ["fedavg"]


@pytest.mark.parametrize("number", slow.after(1, [signal.SIGKILL, signal.SIGINT]))
def test_a_stopped_command_goes_on_bit_for_bit(made: Runs, tmp_path: Path, number: int) -> None:
    """Ctrl-C lets it write a checkpoint; a kill does not, wherever it comes."""
    folder, job = tmp_path / "run", made.whole.job
    words = ["--angles=0,80", "--rounds=1000", "--eval_every=1", "--widths=4", "--local_steps=1"]
    words += ["--seeds=0,1", "--chunk=1,1", "--devices=1"]
    command = [sys.executable, "-m", "experiments.train", *words, f"--run_dir={folder}"]
    process = subprocess.Popen(command, cwd=ROOT)
    while process.poll() is None and not checkpoints.rounds(folder / "checkpoints"):
        time.sleep(0.01)
    process.send_signal(number)
    assert process.wait() == (-number if number == signal.SIGKILL else 128 + number)
    longer = checkpoints.rounds(folder / "checkpoints")[-1] + 2
    job = changed(job, rounds=longer)
    whole = go_on(job, tmp_path / "whole")
    same_end(go_on(job, folder), Ran(whole, job), longer)


def test_an_interrupt_while_importing_is_one_line(tmp_path: Path) -> None:
    """It comes where JAX is imported, in a process whose shell may ignore interrupts."""
    lines = [
        "import builtins, signal",
        "signal.signal(signal.SIGINT, signal.default_int_handler)",
        "real = builtins.__import__",
        "def interrupted(name, *others, **more):",
        "    if name == 'jax':",
        "        builtins.__import__ = real",
        "        signal.raise_signal(signal.SIGINT)",
        "    return real(name, *others, **more)",
        "builtins.__import__ = interrupted",
    ]
    (tmp_path / "sitecustomize.py").write_text("\n".join(lines))
    done = subprocess.run(
        [sys.executable, "-m", "experiments.train", "--rounds=1"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert (done.stdout, done.stderr) == ("", "\ninterrupted\n")
    assert done.returncode == 130
