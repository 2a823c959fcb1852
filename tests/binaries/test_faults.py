"""Run folders survive everything: what is damaged, missing, another's or unwritable is told in one
line, and nothing that is done is lost.

A tiny run, finished and stopped half-way, is copied and spoiled; its program is compiled once.
"""

import builtins
import contextlib
import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple, NoReturn

import chex
import jax
import msgspec
import pytest
from absl import flags
from matplotlib.figure import Figure

import slow
from fedjax_inv import program
from fedjax_inv.checks import UsageError
from fedjax_inv_experiments import contributions, evaluate, explain, export, factors, show_data
from fedjax_inv_experiments.experiment import assemble, config, grid
from fedjax_inv_experiments.experiment.config import Config
from fedjax_inv_experiments.flags import errors, flag
from fedjax_inv_experiments.papers import fedcfa, study
from fedjax_inv_experiments.parts import machine
from fedjax_inv_experiments.reporting import figures, finished
from fedjax_inv_experiments.running import (
    checkpoints,
    files,
    launch,
    loop,
    provenance,
    selected,
)
from fedjax_inv_experiments.running import folder as folders
from fedjax_inv_experiments.running import log as logs
from fedjax_inv_experiments.running.checkpoints import Checkpoints
from fedjax_inv_experiments.running.events import Events
from fedjax_inv_experiments.running.signals import Stop, Stopped
from fedjax_inv_experiments.sweep import sweep
from fedjax_inv_experiments.train import train
from runs import Ran, StopAfterOne, go_on, halved, metrics, no_figures, ran, start_of, states

ROOT = Path(__file__).parents[2]
TINY = config.of(
    angles=(0.0, 80.0),
    rounds=3,
    eval_every=1,
    widths=(4,),
    local_steps=1,
    seeds=(0, 1),
    client_chunk="1",
    run_chunk="1",
    resume=True,
)


class Runs(NamedTuple):
    """A run that is finished, and the same after two of its three rounds."""

    whole: Ran
    half: Path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    place = tmp_path_factory.mktemp("runs")
    whole = ran(config.changed(TINY, run_dir=str(place / "whole")))
    half = place / "half"
    shutil.copytree(whole.folder, half)
    shutil.rmtree(half / "checkpoints")
    for name in ("result.json", "metrics.jsonl", "table.md"):
        (half / name).unlink()
    halved(whole.job, halved(whole.job, half))
    assert checkpoints.rounds(half / "checkpoints") == [1, 2]
    return Runs(whole, half)


@pytest.fixture
def compiled(made: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is run has the program of the run that is there."""
    monkeypatch.setattr(program, "make", lambda *given, **named: made.whole.job.program)


class Refused:
    """Work that must end with one line and status 2, and leave a folder as it was."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, work: Callable[[], Any], folder: Path | None = None) -> str:
        """What is told."""
        before = held(folder)
        self._capsys.readouterr()
        with pytest.raises(SystemExit) as ended, errors.in_one_line(), no_figures():
            work()
        assert ended.value.code == 2
        told = self._capsys.readouterr().err
        assert "Traceback" not in told
        (line,) = [line for line in told.splitlines() if line.startswith("error: ")]
        assert held(folder) == before
        return line.removeprefix("error: ")


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refused:
    return Refused(capsys)


def held(folder: Path | None) -> dict[Path, bytes]:
    paths = folder.rglob("*") if folder and folder.is_dir() else ()
    return {path: path.read_bytes() for path in paths if path.is_file() and path.name != ".lock"}


def copied(folder: Path, to: Path) -> Path:
    shutil.copytree(folder, to, symlinks=True)
    return to


def resume(folder: Path, **changes: Any) -> None:
    with no_figures():
        train(config.changed(TINY, run_dir=str(folder), **changes))


def explained(folder: Path, name: str = "x.png") -> None:
    one = explain.find(folder, explain.Options())
    one.runs.check_data()
    one.served()


def evaluated(folder: Path, name: str = "x.png") -> None:
    out = str(folder.parent / name)
    with no_figures():
        evaluate.run(evaluate.Options(str(folder), out=out))


def exported(folder: Path) -> None:
    export.run(export.Options(str(folder), out=str(folder.parent / "export")))


def started_from(config: Config) -> assemble.Assembled:
    """The experiment whose runs start from the network of --init_from."""
    return assemble.assemble(config, start=launch.start_of(config))


LOOKS: dict[str, Callable[[Path], Any]] = {
    "evaluate": evaluated,
    "explain": explained,
    "export": exported,
    "contributions": lambda folder: contributions.run(contributions.Options((str(folder),))),
    "factors": lambda folder: factors.run(factors.Options((str(folder),))),
    "init_from": lambda folder: started_from(config.changed(TINY, init_from=str(folder))),
}


def same_end(folder: Path, whole: Ran) -> None:
    """The run has gone on to where the other is, bit for bit."""
    assert metrics(folder) == metrics(whole.folder)
    for item in checkpoints.ITEMS:
        chex.assert_trees_all_equal(states(folder, 3, item), states(whole.folder, 3, item))


# --- records


def changed(**changes: Any) -> Callable[[Any], Any]:
    return lambda told: told | changes


def deep(*path: Any, to: Any) -> Callable[[Any], Any]:
    """What json holds with another value somewhere."""

    def change(told: Any) -> Any:
        at = told
        for name in path[:-1]:
            at = at[name]
        at[path[-1]] = to
        return told

    return change


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda text: b"",
    "cut": lambda text: text[: len(text) // 2],
    "bytes": lambda text: b"\x00\xff\xfe" + text,
    "nested": lambda text: b"[" * 100_000,
    **{other: lambda text, other=other: other.encode() for other in ("[]", "{}", "5", "null")},
}
TYPES: dict[str, list[Callable[[Any], Any]]] = {
    "config.json": [
        changed(flags=5, cell=[]),
        changed(starts=5),
        changed(starts=[{"data": 5}]),
        changed(starts=[]),
        deep("flags", "rounds", to="many"),
        deep("flags", "rounds", to=[3]),
        deep("flags", "rounds", to=None),
        deep("flags", "seeds", to=5),
        deep("flags", "seeds", to=["a"]),
        deep("cell", "runs", to=[]),
        deep("cell", "runs", to=7),
        deep("cell", "runs", 0, "seed", to="0"),
        deep("cell", "runs", 0, "more", to=1),
        deep("starts", 0, "versions", to=[]),
        deep("cell", "settings", to=[]),
    ],
    "result.json": [
        changed(runs=5),
        changed(runs=[]),
        changed(cell={}),
        deep("runs", 0, "last", to=None),
        deep("runs", 0, "selected", to=[]),
        deep("runs", 0, "selected", "test_score", to="high"),
        deep("runs", 0, "by_rule", "last", to=7),
        deep("runs", 0, "last", "domains", to={"0": {}}),
        deep("runs", 0, "seed", to=True),
        deep("runs", 0, "more", to=1),
        deep("runs", 0, "stops", to=[{}]),
    ],
}
SPOILED = [(name, how) for name in TYPES for how in DAMAGES]
SPOILED += [(name, str(number)) for name in TYPES for number in range(len(TYPES[name]))]
SOME, OTHERS = SPOILED[::3], [*SPOILED[1::3], *SPOILED[2::3]]


def spoil(path: Path, how: str) -> None:
    if how in DAMAGES:
        path.write_bytes(DAMAGES[how](path.read_bytes()))
    else:
        change = TYPES[path.name][int(how)]
        path.write_text(json.dumps(change(json.loads(path.read_text()))))


@pytest.mark.parametrize(("name", "how"), slow.after(len(SOME), SOME + OTHERS))
def test_a_spoiled_record_is_told_by_all_who_read_it(
    made: Runs, refused: Refused, tmp_path: Path, name: str, how: str
) -> None:
    looks: dict[str, Callable[[Path], Any]] = {"train": resume}
    whole = made.whole.folder
    if name == "config.json":
        looks |= LOOKS
    if name == "result.json":
        looks |= {look: LOOKS[look] for look in ("evaluate", "explain", "export", "factors")}
    folder = copied(whole, tmp_path / "run")
    spoil(folder / name, how)
    for look in looks.values():
        line = refused(partial(look, folder), folder)
        assert f"{name}: is " in line
        assert "put a copy" in line
        assert "delete" in line


@pytest.mark.parametrize("how", DAMAGES)
def test_a_log_that_lacks_what_the_checkpoint_is_after_is_told(
    made: Runs, refused: Refused, compiled: None, tmp_path: Path, how: str
) -> None:
    for name, source in (("half", made.half), ("whole", made.whole.folder)):
        folder = copied(source, tmp_path / name)
        spoil(folder / "metrics.jsonl", how)
        if name == "half":
            before = held(folder / "checkpoints")
            line = refused(partial(resume, folder))
            assert held(folder / "checkpoints") == before
        else:  # the curves cannot be drawn
            line = refused(partial(resume, folder), folder)
        assert "metrics.jsonl: line " in line
        assert "is damaged or missing" in line


def test_what_a_study_starts_from_is_read_through_the_same_door(
    refused: Refused, tmp_path: Path
) -> None:
    row = fedcfa.simpson("digits")[1]
    (tmp_path / row.start).mkdir(parents=True)
    for text in ("", "[]", '{"runs": 5}', '{"runs": [{"seed": 0, "stops": [{"round": "3"}]}]}'):
        (tmp_path / row.start / "result.json").write_text(text)
        line = refused(lambda: study._check_reached(row, tmp_path), tmp_path)
        assert "result.json: is damaged" in line


# --- checkpoints


def flipped(path: Path, at: float = 0.5) -> None:
    """Changes a bit in a file, or in each below a folder; at: which part of it is before that."""
    for file in path.rglob("*") if path.is_dir() else [path]:
        if file.is_file() and file.stat().st_size:
            data = bytearray(file.read_bytes())
            data[int(at * len(data))] ^= 1
            file.write_bytes(data)


def emptied(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()


def replaced(path: Path) -> None:
    shutil.rmtree(path)
    path.write_text("not a folder")


def relabelled(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def write(place: Path) -> None:
        path = place / "about" / "metadata"
        path.write_text(json.dumps(change(json.loads(path.read_text()))))

    return write


BROKEN: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "bits of the states": ("", lambda place: flipped(place / "default")),
    "checksum": ("checksum", relabelled(deep("sha256", "default", to="0" * 64))),
    "owner": ("about/metadata is damaged", lambda place: spoil(place / "about/metadata", "cut")),
    "seed": ("whose seeds are", relabelled(deep("cell", "runs", 1, "seed", to=7))),
    "flag": ("whose batch_size is 9", relabelled(deep("flags", "batch_size", to=9))),
    "round": ("is of round 1", relabelled(changed(round=1))),
    "nothing in it": ("", emptied),
    "bits of what is kept": ("", lambda place: flipped(place / "kept")),
    "algorithm": ("whose algorithm is", relabelled(deep("cell", "algorithm", to="fedprox"))),
    "half of it": ("", lambda place: shutil.rmtree(place / "default")),
    "the other half": ("", lambda place: shutil.rmtree(place / "kept")),
}


# orbax leaves futures behind that nobody asks for their error.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("how", slow.after(4, BROKEN))
def test_a_broken_checkpoint_is_told_and_the_one_before_goes_on(
    made: Runs, refused: Refused, tmp_path: Path, how: str
) -> None:
    words, change = BROKEN[how]
    folder = copied(made.half, tmp_path / "run")
    place = folder / "checkpoints" / "2"
    change(place)
    before = held(folder / "checkpoints")
    line = refused(lambda: go_on(made.whole.job, folder))
    assert line.startswith(f"{place}: ")
    assert words in line
    assert line.endswith("; delete it to continue from the one before")
    assert held(folder / "checkpoints") == before
    shutil.rmtree(place)
    same_end(go_on(made.whole.job, folder), made.whole)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_no_bit_of_a_checkpoint_changes_unseen(made: Runs, tmp_path: Path) -> None:
    """Whatever file it is in, it is told, or changes nothing."""
    job, source = made.whole.job, made.half / "checkpoints"
    like = jax.eval_shape(job.program.init, job.data, job.inputs)

    def read(place: Path) -> Any:
        with contextlib.closing(Checkpoints(place, job.config, job.cell, reads=True)) as reader:
            served = reader.selected(2, selected.of(like, job.personal))
            return jax.tree.leaves((reader.restore(2, like).state.server, served))

    whole = read(source)
    told = set()
    files = [path.relative_to(source) for path in (source / "2").rglob("*") if path.is_file()]
    for number, name in enumerate(files):
        place = copied(source, tmp_path / str(number))
        flipped(place / name, number / len(files))
        try:
            chex.assert_trees_all_equal(read(place), whole)
        except UsageError:
            told.add(name.parts[1])
    assert told >= {"default", "kept"}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("how", slow.after(1, ["seed", "bits of the states", "checksum"]))
def test_who_looks_at_a_broken_checkpoint_is_told(
    made: Runs, refused: Refused, tmp_path: Path, how: str
) -> None:
    folder = copied(made.whole.folder, tmp_path / "run")
    BROKEN[how][1](folder / "checkpoints" / "3")
    for name in ("explain", "init_from"):
        line = refused(partial(LOOKS[name], folder), folder)
        assert f"{folder / 'checkpoints' / '3'}: corrupt" in line


def test_a_checkpoint_of_another_round_is_none_of_this_run(
    made: Runs, refused: Refused, tmp_path: Path
) -> None:
    folder = copied(made.half, tmp_path / "run")
    place = folder / "checkpoints"
    (place / "2").rename(place / "9")
    line = refused(lambda: go_on(made.whole.job, folder))
    assert line.startswith(f"{place / '9'}: is of a round beyond --rounds=3; delete it")


@pytest.mark.parametrize("what", ["2", ""])
def test_a_file_where_checkpoints_should_be(
    made: Runs, refused: Refused, tmp_path: Path, what: str
) -> None:
    folder = copied(made.half, tmp_path / "run")
    replaced(folder / "checkpoints" / what)
    line = refused(lambda: go_on(made.whole.job, folder), folder / "checkpoints")
    assert line.startswith(f"{folder / 'checkpoints'}")


def test_a_place_for_checkpoints_that_cannot_be_written(
    made: Runs, refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told before there is anything to write."""
    folder = tmp_path / "run"

    def fail(**named: Any) -> NoReturn:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(flag.tempfile, "TemporaryFile", fail)
    line = refused(lambda: go_on(made.whole.job, folder))
    assert line.startswith(f"--run_dir={folder / 'checkpoints'}: cannot be written (")
    assert not (folder / "metrics.jsonl").exists()


def test_a_log_without_its_checkpoints_is_not_thrown_away(
    made: Runs, refused: Refused, tmp_path: Path
) -> None:
    """But one may be ahead of the first, as they are written in the background."""
    folder = copied(made.whole.folder, tmp_path / "run")
    (folder / "result.json").unlink()
    shutil.rmtree(folder / "checkpoints")
    log = folder / "metrics.jsonl"
    before = log.read_bytes()
    line = refused(lambda: go_on(made.whole.job, folder))
    assert "has a log up to round 3, but no checkpoint any more" in line
    assert log.read_bytes() == before
    log.write_bytes(b"".join(before.splitlines(keepends=True)[:4]))
    same_end(go_on(made.whole.job, folder), made.whole)


def test_lines_after_the_checkpoint_are_written_anew(made: Runs, tmp_path: Path) -> None:
    folder = copied(made.half, tmp_path / "run")
    shutil.copy(made.whole.folder / "metrics.jsonl", folder)
    same_end(go_on(made.whole.job, folder), made.whole)


# --- data


def test_other_data_are_told(
    made: Runs, refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = copied(made.half, tmp_path / "half")
    whole = copied(made.whole.folder, tmp_path / "whole")
    (half / "config.json").write_bytes((whole / "config.json").read_bytes())
    monkeypatch.setattr(provenance, "fingerprint", lambda data: "0" * 64)
    line = refused(lambda: resume(half), half)
    assert line.startswith(f"--run_dir={half}: has begun on other data than --dataset has by now; ")
    for name in ("evaluate", "explain", "export", "factors"):
        line = refused(partial(LOOKS[name], whole), whole)
        assert "was trained on other data than --dataset=digits has by now; must have" in line


# --- set-up


@pytest.mark.parametrize(
    "names",
    [
        [".lock"],
        ["checkpoints/"],
        ["partition.png"],
        ["config.json.tmp"],
        ["start.json", "start.json.tmp", "checkpoints/"],
    ],
)
def test_what_a_process_leaves_that_dies_before_it_begins(tmp_path: Path, names: list[str]) -> None:
    (cell,) = grid.cells(TINY, ["80"])
    for folder in (tmp_path / "run", tmp_path / "sweep" / "cell"):
        folder.mkdir(parents=True)
        for name in names:
            (folder / name).mkdir() if name.endswith("/") else (folder / name).touch()
        assert folders.finished(TINY, cell, folder) is None
    folders.check_sweep(tmp_path / "run")
    folders.check_sweep(tmp_path / "sweep")
    (tmp_path / "sweep" / "cell" / "notes").touch()
    with pytest.raises(ValueError, match="is neither empty nor a run"):
        folders.finished(TINY, cell, tmp_path / "sweep" / "cell")
    with pytest.raises(ValueError, match="is neither empty nor a sweep"):
        folders.check_sweep(tmp_path / "sweep")


def test_files_that_are_named_as_a_report_do_not_make_a_sweep(tmp_path: Path) -> None:
    for name in ("table.tex", "result.json", "metrics.json", "main.tex"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(UsageError, match="is neither empty nor a sweep"):
        folders.check_sweep(tmp_path)
    (tmp_path / "result.json").write_text('{"title": "", "cells": []}')
    folders.check_sweep(tmp_path)
    (tmp_path / "result.json").unlink()
    (tmp_path / "cell").mkdir()
    (tmp_path / "cell" / "config.json").touch()
    folders.check_sweep(tmp_path)


# --- places that cannot be written


def unwritable(place: Path) -> dict[str, tuple[Path, str]]:
    """Where nothing can be written, not even by root, and what is told."""
    (place / "file").touch()
    return {
        "a file": (place / "file", "is a file, must be a folder"),
        "under a file": (place / "file" / "run", "cannot be written (Not a directory)"),
        "the kernel's": (Path("/proc/run"), "cannot be written (No such file or directory)"),
        "long": (place / ("long" * 100), "cannot be written (File name too long)"),
    }


@pytest.mark.parametrize("how", ["a file", "under a file", "the kernel's", "long"])
def test_a_run_dir_that_cannot_be_written(
    refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(assemble, "assemble", unasked)
    folder, words = unwritable(tmp_path)[how]
    assert refused(lambda: resume(folder), tmp_path).startswith(f"--run_dir={folder}: {words}")


def unasked(*given: Any, **named: Any) -> NoReturn:
    raise AssertionError("worked before it looked at where to write")


OUTS: dict[str, Callable[[Path, str], Any]] = {
    "evaluate": lambda run, out: evaluate.run(evaluate.Options(str(run), out=out)),
    "explain": lambda run, out: explain.run(explain.Options((str(run),), out=out)),
    "export": lambda run, out: export.run(export.Options(str(run), out=out)),
    "contributions": lambda run, out: contributions.run(contributions.Options((str(run),), out)),
    "factors": lambda run, out: factors.run(factors.Options((str(run),), out=out)),
    "show_data": lambda run, out: show_data.show(TINY, show_data.Options(out=out)),
}


@pytest.mark.parametrize("binary", OUTS)
def test_an_out_that_cannot_be_written(
    made: Runs, refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, binary: str
) -> None:
    monkeypatch.setattr(assemble, "assemble", unasked)
    for place in ("/proc/out.png", str(tmp_path / ("long" * 100 + ".png"))):
        line = refused(partial(OUTS[binary], made.whole.folder, place))
        assert line.startswith(f"--out={place}: cannot be written (")
    folder = tmp_path / "out.png"
    folder.touch() if binary == "export" else folder.mkdir()
    line = refused(lambda: OUTS[binary](made.whole.folder, str(folder)))
    assert line.startswith(f"--out={folder}: is a ")


@pytest.mark.parametrize("binary", LOOKS)
def test_what_is_only_read_is_not_made(refused: Refused, tmp_path: Path, binary: str) -> None:
    line = refused(lambda: LOOKS[binary](tmp_path / "typo"))
    assert str(tmp_path / "typo") in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", slow.after(1, ["result.json", "metrics.jsonl", "config.json"]))
def test_a_full_disk_is_told_and_the_run_goes_on_when_there_is_room(
    made: Runs, refused: Refused, compiled: None, tmp_path: Path, name: str
) -> None:
    folder = copied(made.half, tmp_path / "run")
    replacing = files.replacing

    def full(*given: Any, **named: Any) -> IO[Any]:
        return builtins.open("/dev/full", "wb")

    @contextlib.contextmanager
    def on_a_full_disk(path: Path) -> Iterator[IO[bytes]]:
        with pytest.MonkeyPatch.context() as patch:
            if path.name == name:
                patch.setattr(files, "open", full, raising=False)
            with replacing(path) as file:
                yield file

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "replacing", on_a_full_disk)
        line = refused(lambda: resume(folder))
    told = "No space left on device; make room on the disk, then run the same command "
    assert line.startswith(f"{folder / name}: {told}")
    resume(folder)
    same_end(folder, made.whole)


@pytest.mark.parametrize("at", slow.after(1, [2, 1, 3]))
def test_a_disk_that_fills_up_under_the_log(
    made: Runs, refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    folder = tmp_path / "run"
    writes: list[int] = []

    def fail(path: Path, mode: str = "r", *given: Any, **named: Any) -> Any:
        writes.extend([1] if mode == "a" else [])
        if len(writes) == at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return builtins.open(path, mode, *given, **named)

    with monkeypatch.context() as patch:
        patch.setattr(files, "open", fail, raising=False)
        line = refused(lambda: go_on(made.whole.job, folder))
    assert line.startswith(f"{folder / 'metrics.jsonl'}: No space left on device; make room")
    same_end(go_on(made.whole.job, folder), made.whole)


def test_a_disk_that_is_full_for_a_checkpoint(
    made: Runs, refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copied(made.half, tmp_path / "run")

    def fail(*given: Any, **named: Any) -> NoReturn:
        raise ValueError("RESOURCE_EXHAUSTED: no space\nand more")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints.ocp.CheckpointManager, "save", fail)
        line = refused(lambda: go_on(made.whole.job, folder))
    told = "a checkpoint could not be written (RESOURCE_EXHAUSTED: no space); "
    assert line.startswith(f"{folder / 'checkpoints'}: {told}")
    assert "--resume" in line
    same_end(go_on(made.whole.job, folder), made.whole)


@pytest.mark.parametrize("error", [UsageError("a full disk"), None])
def test_tracebacks_of_threads_are_told_unless_one_line_tells_more(
    capsys: pytest.CaptureFixture[str], error: UsageError | None
) -> None:
    def work() -> None:
        with errors.in_one_line():
            thread = threading.Thread(target=lambda: 1 / 0)
            thread.start()
            thread.join()
            if error:
                raise error

    if error:
        with pytest.raises(SystemExit):
            work()
        assert capsys.readouterr().err == "error: a full disk\n"
    else:
        work()
        assert capsys.readouterr().err.endswith("ZeroDivisionError: division by zero\n")


def test_a_defect_is_no_line(refused: Refused) -> None:
    """It has a traceback; an error of the system has an errno."""
    for error in (ValueError("x"), OSError("not of the system")):
        with pytest.raises(type(error)), errors.in_one_line():
            raise error


# --- signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_the_first_signal_asks_and_a_second_one_ends_it(
    number: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
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

    with Stop() as stop:
        assert stop.signal == 0
        signal.raise_signal(number)
        wait(lambda: stop.signal == number)
        assert (stop.signal, ended) == (number, [])
        signal.raise_signal(number)
        wait(lambda: bool(ended))
    assert ended == [128 + number]
    out, err = capfd.readouterr()
    first, second, *_ = filter(None, err.splitlines())  # here it goes on after that
    assert first.startswith("stopping after the next rounds, when they are evaluated and saved; ")
    assert second.startswith("stopped at once; run the same command ")
    assert not out  # which is for results
    assert signal.signal(number, outside) == before
    assert signal.set_wakeup_fd(-1) == -1


def test_a_closed_terminal_asks_for_nothing_under_nohup() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Stop() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        assert stop.signal == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_signal_while_processes_agree_stops_the_next_segment(
    made: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, folder = made.whole.job, tmp_path / "run"
    with Stop() as stop:
        agreed: list[int] = []

        def agree(value: int) -> int:
            agreed.append(value)
            stop.signal = signal.SIGTERM  # when this process has told the others that it has none
            return value

        monkeypatch.setattr(machine, "agree", agree)
        folders.begin(folder, job.config, job.cell, start_of(job))
        with pytest.raises(Stopped, match=r"^stopped after round 2 of 3$"):
            loop.run_cell(job, folder, stop)
    assert agreed == [0, signal.SIGTERM]


@pytest.mark.parametrize("is_row", [False, True])
def test_a_signal_in_the_last_segment_of_a_cell_ends_it_before_the_next(
    is_row: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    begun: list[str] = []

    def finish(self: launch.Launch, cell: grid.Cell, ahead: Any, stop: Stop) -> Any:
        begun.append(cell.algorithm)
        stop.signal = signal.SIGTERM

    monkeypatch.setattr(launch.Launch, "_run", finish)
    monkeypatch.setattr(launch.Launch, "_begin", lambda self, cells, ahead: None)
    algorithms = ("fedavg",) if is_row else ("fedavg", "fedprox")
    chosen = config.changed(TINY, algorithm=algorithms)
    shared = launch.Shared() if is_row else None
    ready = launch.prepared(chosen, tmp_path / "run", in_folders=True, shared=shared)
    with pytest.raises(SystemExit) as ended, launch.Ahead() as ahead:
        ready.run(lambda *finished: "", ahead)
    assert ended.value.code == 128 + signal.SIGTERM
    assert begun == ["fedavg"]
    *_, told = capsys.readouterr().err.splitlines()
    assert told.endswith(": finished, and stopped before the rest; the same command continues")


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


# --- flags


@pytest.mark.parametrize(
    "address",
    ["x", "x:", ":1", "x:y", "x:0", "x:65536", "x:-1", pytest.param("x:" + "9" * 5000, id="long")],
)
def test_a_coordinator_without_a_port(address: str) -> None:
    with pytest.raises(ValueError, match=f"^--coordinator_address={address}: must be host:port"):
        config.of(num_processes=2, coordinator_address=address, client_chunk="1", run_chunk="1")


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("--data=", "--data=: must be one or several"),
        ("--data=digits,digits", "--data=digits,digits: must be one or several different"),
        ("--data=digit", "--data=digit: unknown; did you mean digits"),
        ("--study=", "--study=: unknown; must be one of methods"),
        ("--rows=nobody", "--rows=nobody: unknown; "),
        ("--rows=", ""),
    ],
)
def test_what_a_paper_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str, told: str
) -> None:
    values = flags.FlagValues()
    fedcfa.BINARY.define(values)
    words = ["", "--data=digits", word, f"--run_dir={tmp_path}"]
    if not told:
        assert fedcfa.BINARY.read(words, values).rows == ()  # as by default: all
        return
    with pytest.raises(ValueError, match=f"^{told}"):
        fedcfa.BINARY.run(fedcfa.BINARY.read(words, values))
    assert list(tmp_path.iterdir()) == []


# --- elsewhere


def test_a_folder_is_enough(made: Runs, compiled: None, tmp_path: Path) -> None:
    """Another place, and the first is gone."""
    place = tmp_path / "elsewhere"
    place.mkdir()
    for name, source in (("whole", made.whole.folder), ("half", made.half)):
        copied(copied(source, tmp_path / name), place / name)
        shutil.rmtree(tmp_path / name)
    evaluated(place / "whole", "moved.png")
    told = json.loads((place / "moved.json").read_text())
    for got, run in zip(told["runs"], made.whole.runs, strict=True):
        assert got["domains"].keys() == run["by_rule"]["validation"]["domains"].keys()
        assert got["round"] == run["by_rule"]["validation"]["round"]
    explained(place / "whole")
    exported(place / "whole")
    assert (place / "export" / "seed=0" / "model.safetensors").is_file()
    resume(place / "half")
    same_end(place / "half", made.whole)


@pytest.fixture(scope="module")
def child(
    made: Runs, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, Path, Config]]:
    """A run that started from another, finished and after its first round; the other is gone."""
    place = tmp_path_factory.mktemp("child")
    source = copied(made.whole.folder, place / "source")
    chosen = config.changed(TINY, init_from=str(source), run_dir=str(place / "whole"))
    whole = ran(chosen)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, "make", lambda *given, **named: whole.job.program)
        with pytest.MonkeyPatch.context() as more, no_figures():
            more.setattr(launch, "Stop", StopAfterOne)
            with pytest.raises(SystemExit):
                train(config.changed(chosen, run_dir=str(place / "half")))
        shutil.rmtree(source)
        yield place / "whole", place / "half", chosen


@pytest.mark.slow
def test_a_run_whose_start_is_gone_goes_on(
    child: tuple[Path, Path, Config], refused: Refused, tmp_path: Path
) -> None:
    whole, half, chosen = child
    for look in (explained, evaluated, exported):
        look(copied(whole, tmp_path / look.__name__))
    folder = copied(half, tmp_path / "run")
    again = config.changed(chosen, run_dir=str(folder))
    with no_figures():
        train(again)
    assert metrics(folder) == metrics(whole)
    chex.assert_trees_all_equal(states(folder, 3), states(whole, 3))
    with no_figures():
        train(again)  # which tells it once more
    # One that is to start there cannot.
    shutil.rmtree(folder)
    line = refused(lambda: train(again))
    assert line.startswith(f"--init_from={chosen.model.init_from}: must be the folder of a run")
    assert not folder.exists()


@pytest.mark.parametrize("text", slow.after(2, ['{"networks": 5}', "{", "", "[]"]))
def test_a_spoiled_note_of_the_start_is_told(
    child: tuple[Path, Path, Config], made: Runs, refused: Refused, tmp_path: Path, text: str
) -> None:
    _, half, chosen = child
    folder = copied(half, tmp_path / "run")
    (folder / "start.json").write_text(text)
    source = Path(chosen.model.init_from)
    copied(made.whole.folder, source)
    try:
        line = refused(lambda: train(config.changed(chosen, run_dir=str(folder))), folder)
    finally:
        shutil.rmtree(source)
    assert line.startswith(f"{folder / 'start.json'}: is damaged; put a copy in its place, or ")


def test_that_a_run_is_finished_is_told_where_it_lies(made: Runs) -> None:
    one = finished.open("run", made.whole.folder)
    assert msgspec.to_builtins(one.result.runs) == made.whole.runs


# --- links in a run folder


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Path]:
    """A file that lies elsewhere, in a folder, and must stay as it is."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "file").write_text("mine")
    yield folder / "file"
    assert [path.name for path in folder.iterdir()] == ["file"]
    assert (folder / "file").read_text() == "mine"


def planted(folder: Path, names: Iterable[str], victim: Path) -> None:
    """Puts links to another file in the places of files."""
    for name in names:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(victim)


def test_files_of_a_run_replace_links(
    made: Runs, compiled: None, tmp_path: Path, victim: Path
) -> None:
    folder = copied(made.half, tmp_path / "run")
    names = ["table.md", "result.json.tmp", "config.json.tmp"]
    for name in ("curves", "partition"):
        names += [f"{name}.png", f"{name}.pdf"]
    planted(folder, names, victim)
    (folder / "result.json").symlink_to(victim.parent / "new")
    log = tmp_path / "metrics.jsonl"  # is read first
    shutil.move(folder / "metrics.jsonl", log)
    before = log.read_bytes()
    (folder / "metrics.jsonl").symlink_to(log)
    # The folder that the user names may be a link.
    (tmp_path / "named").symlink_to(folder)
    train(config.changed(TINY, run_dir=str(tmp_path / "named")))
    assert log.read_bytes() == before
    same_end(folder, made.whole)
    assert [path.name for path in sorted(folder.iterdir()) if path.is_symlink()] == names[2:0:-1]
    assert (folder / "curves.pdf").read_bytes().startswith(b"%PDF")
    assert not list(folder.glob(".*.tmp"))


def test_files_of_an_analysis_replace_links(made: Runs, tmp_path: Path, victim: Path) -> None:
    folder = copied(made.whole.folder, tmp_path / "run")
    name = "evaluation-best"
    (folder / "export" / "seed=0").mkdir(parents=True)
    names = [f"{name}{end}" for end in (".png", ".pdf", ".json")]
    names += [f"export/seed=0/{of}" for of in ("model.safetensors", "model.json")]
    planted(folder, [*names, f"{name}.json.tmp"], victim)
    evaluate.run(evaluate.Options(str(folder)))
    export.run(export.Options(str(folder)))
    figures.save(Figure(), folder / f"{name}.png")
    assert not any((folder / name).is_symlink() for name in names)
    assert len(json.loads((folder / f"{name}.json").read_text())["runs"]) == 2


FOLDERS: dict[str, tuple[str, Callable[[Path, Any], Any]]] = {
    ".lock": ("file", lambda folder, job: resume(folder)),
    "checkpoints": ("folder", lambda folder, job: go_on(job, folder)),
    "checkpoints/3": ("folder", lambda folder, job: go_on(job, folder)),
    "checkpoints/2/default/array": ("file", lambda folder, job: go_on(job, folder)),
    "tensorboard": ("folder", lambda folder, job: Events(folder, job.cell, [], True)),
    "export": ("folder", lambda folder, job: export.run(export.Options(str(folder)))),
    "export/seed=1": ("folder", lambda folder, job: export.run(export.Options(str(folder)))),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_link_in_the_place_of_a_folder_is_told(
    made: Runs, refused: Refused, compiled: None, tmp_path: Path, victim: Path, name: str
) -> None:
    kind, work = FOLDERS[name]
    source = made.whole.folder if "export" in name else made.half
    folder = copied(source, tmp_path / "run")
    link = folder / name
    if link.is_dir():
        shutil.rmtree(link)
    link.unlink(missing_ok=True)
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(victim.parent if kind == "folder" else victim)
    line = refused(lambda: work(folder, made.whole.job))
    assert line.startswith(f"{link}: is a link to {link.readlink()}, which is not followed; delete")


def test_a_link_in_the_place_of_a_cell_is_told(
    refused: Refused, tmp_path: Path, victim: Path
) -> None:
    (cell,) = grid.cells(TINY, ["80"])
    (place,) = grid.folder_names([cell]).values()
    folder = tmp_path / "sweep"
    folder.mkdir()
    (folder / "result.json").write_text('{"title": "", "cells": []}')  # or it would be no sweep
    (folder / place).symlink_to(victim.parent)
    line = refused(lambda: sweep(config.changed(TINY, run_dir=str(folder))))
    assert line.startswith(f"{folder / place}: is a link to {victim.parent}")
    (tmp_path / "digits").symlink_to(victim.parent)
    options = study.Options("methods", ("FedAvg",), ("digits",), tmp_path, ())
    line = refused(lambda: study.run_all(fedcfa.PAPER, options))
    assert line.startswith(f"{tmp_path / 'digits'}: is a link to {victim.parent}")


# --- edits of a log


def edited(folder: Path, change: Callable[[list[bytes]], list[bytes]]) -> Path:
    path = folder / "metrics.jsonl"
    path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))
    return folder


def better(lines: list[bytes]) -> list[bytes]:
    """The log with another accuracy in line 3."""
    text, count = re.subn(rb'("test_score": 0\.\d)', rb"\g<1>9", lines[2])
    assert count == 1
    return [*lines[:2], text, *lines[3:]]


@pytest.mark.parametrize("look", ["train", "half", *LOOKS])
def test_an_edited_log_is_told_by_all_who_read_it(
    made: Runs, refused: Refused, compiled: None, tmp_path: Path, look: str
) -> None:
    if look == "init_from":
        return  # which reads checkpoints only
    source = made.half if look == "half" else made.whole.folder
    folder = edited(copied(source, tmp_path / "run"), better)
    work = LOOKS.get(look, resume)
    line = refused(partial(work, folder), None if look == "half" else folder)
    told = f"{folder / 'metrics.jsonl'}: line 3 is not as it was written, its checksum differs; put"
    assert told in line


def test_a_log_without_checksums_goes_on_and_gets_them(made: Runs, tmp_path: Path) -> None:
    """As version 0.7 wrote it."""

    def bare(lines: list[bytes]) -> list[bytes]:
        return [re.sub(rb', "sha256": "\w{64}"', b"", line) for line in lines]

    folder = edited(copied(made.half, tmp_path / "run"), bare)
    same_end(go_on(made.whole.job, folder), made.whole)
    for change in (better, lambda lines: [lines[0], *bare(lines[1:])]):
        told = edited(copied(folder, tmp_path / change.__name__), change)
        with pytest.raises(UsageError, match=r"line [23] is not as it was written"):
            logs.read(told)
