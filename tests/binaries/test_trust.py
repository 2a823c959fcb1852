"""A run folder is data: a binary runs code that it names only if the command names it, too."""

import importlib
import importlib.machinery
import json
import os
import py_compile
import shutil
import sys
import types
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from absl import flags

from fedjax_inv import checks
from fedjax_inv.checks import UsageError
from fedjax_inv_experiments import (
    contributions,
    evaluate,
    explain,
    export,
    factors,
    show_data,
    sweep,
    train,
)
from fedjax_inv_experiments.experiment import assemble, config, grid
from fedjax_inv_experiments.flags import errors, outside
from fedjax_inv_experiments.papers import cafe, fedcfa, fedipg, fl_games, study
from fedjax_inv_experiments.papers.study import Paper
from fedjax_inv_experiments.reporting import figures
from fedjax_inv_experiments.running import checkpoints, launch, loop, provenance, records
from fedjax_inv_experiments.running import folder as folders
from runs import Ran, no_figures, ran

OWN = """
from fedjax_inv import models
from fedjax_inv.algorithms import fedavg

def network(num_classes):
    return models.mlp(num_classes, widths=(4,))

def algorithm(model, work, *, server_optimizer):
    return fedavg.fedavg(model, work, server_optimizer=server_optimizer)
"""
ALGORITHM, NETWORK = "own_code:algorithm", "own_code:network"
# It says that it was imported.
PLANTED = f"open({{marker!r}}, 'w').close()\n{OWN}"

READERS = {
    "evaluate": (evaluate.BINARY, "run"),
    "export": (export.BINARY, "run"),
    "explain": (explain.BINARY, "runs"),
    "contributions": (contributions.BINARY, "runs"),
    "factors": (factors.BINARY, "runs"),
    "train": (train.BINARY, "init_from"),
    "sweep": (sweep.BINARY, "init_from"),
    "show_data": (show_data.BINARY, "init_from"),
}
TRAINERS = {"train": train, "sweep": sweep}


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The file of a module outside of this project."""
    file = tmp_path_factory.mktemp("own") / "own_code.py"
    file.write_text(OWN)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(file.parent)
        yield file


@pytest.fixture(scope="module")
def finished(own: Path, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """A run of an algorithm and of a network outside of this project."""
    chosen = config.of(
        run_dir=str(tmp_path_factory.mktemp("runs") / "real"),
        algorithm=(ALGORITHM,),
        model=NETWORK,
        environment="colored",
        rounds=1,
        eval_every=1,
        batch_size=0,
        local_steps=1,
    )
    return ran(chosen)


class Place(NamedTuple):
    """A working directory, the copy of the run in it, and the file that planted code writes."""

    root: Path
    folder: Path
    marker: Path

    def named(self, *names: str, cell: bool = True) -> None:
        """Lets the copy name another algorithm and, if it is given, another network."""
        path = self.folder / "config.json"
        record = json.loads(path.read_text())
        algorithm, *network = names
        record["flags"] |= {"algorithm": [algorithm]} | ({"model": network[0]} if network else {})
        record["cell"] |= {"algorithm": algorithm} if cell else {}
        path.write_text(json.dumps(record))

    def plant(self, name: str) -> Path:
        """Writes a module that says that it was imported. name: its path in the directory."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(PLANTED.format(marker=str(self.marker)))
        return path


@pytest.fixture
def place(finished: Ran, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    shutil.copytree(finished.folder, tmp_path / "kept" / "real")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    before = {*sys.modules}
    importlib.invalidate_caches()
    yield Place(tmp_path, tmp_path / "kept" / "real", tmp_path / "marker")
    for name in {*sys.modules} - before:
        if name.partition(".")[0] in ("kept", "planted", "linked", "zipped"):
            del sys.modules[name]


@pytest.fixture
def line(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """(binary, its arguments) -> the one line with which it ends, with status 2."""

    def of(binary: Any, *arguments: str) -> str:
        values = flags.FlagValues()
        binary.define(values)
        with pytest.raises(SystemExit) as ended, errors.in_one_line():
            binary.run(binary.read(["", *arguments], values))
        assert ended.value.code == 2
        (error,) = capsys.readouterr().err.splitlines()
        assert error.startswith("error: ")
        return error.removeprefix("error: ")

    return of


@pytest.fixture
def no_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> None:
        raise AssertionError("computed before the code was trusted")

    monkeypatch.setattr(loop, "run_cell", refuse)


# What a command calls or imports; each is refused, and the marker is not written.
ATTACKS = {
    "a module in the folder": ("kept.real.planted:algorithm", "kept.real.planted:network"),
    "a network in the folder": ("fedavg", "kept.real.planted:network"),
    "a module elsewhere": ("planted.evil:algorithm",),
    "the end of the process": ("sys:exit", "sys:exit"),
    "an input": ("fedavg", "builtins:input"),
    "a shell": ("fedavg", "subprocess:getoutput"),
    "a name of this project": ("fedjax_inv.algorithms.fedavg:fedavg",),
}


@pytest.mark.parametrize("names", ATTACKS.values(), ids=ATTACKS)
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.usefixtures("no_compute")
def test_no_binary_imports_code_that_a_folder_names(
    reader: str, names: tuple[str, ...], place: Place, line: Callable[..., str]
) -> None:
    place.plant("kept/real/planted.py")
    place.plant("planted/evil.py")
    place.named(*names)
    binary, flag = READERS[reader]
    loaded = {*sys.modules}
    extra = ["--run_dir=new", "--environment=colored"] if flag == "init_from" else []
    error = line(binary, f"--{flag}={place.folder}", *extra)
    assert error.startswith(f"--{flag}={place.folder}: ")
    first = next(name for name in (*names, NETWORK) if ":" in name)
    assert f"={first}" in error
    if "kept" in first:
        assert f"lies in the run folder {place.folder}" in error
        assert "--trust_code" not in error
    else:
        assert f"add --trust_code={first}" in error
    assert not place.marker.exists()
    assert not {name for name in {*sys.modules} - loaded if name.startswith(("kept", "planted"))}
    assert not Path("new").exists()


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.usefixtures("no_compute")
def test_a_run_to_go_on_with_is_not_imported_either(
    trainer: str, place: Place, line: Callable[..., str]
) -> None:
    place.plant("planted/evil.py")
    place.named("planted.evil:algorithm", NETWORK)
    (place.folder / "result.json").unlink()
    run_dir = place.folder
    if trainer == "sweep":
        run_dir = place.root / "sweep"
        run_dir.mkdir()
        place.folder.rename(run_dir / "fedavg-0.9")
    flags = ("--environment=colored", "--rounds=1", "--eval_every=1", "--resume", "--batch_size=0")
    error = line(TRAINERS[trainer].BINARY, f"--run_dir={run_dir}", *flags, "--local_steps=1")
    assert error.startswith(f"--run_dir={run_dir}")
    assert "add --trust_code=planted.evil:algorithm" in error
    assert not place.marker.exists()


@pytest.mark.parametrize(
    ("paper", "data"),
    [
        (fedipg.PAPER, "colored_digits"),
        (fl_games.PAPER, "colored_digits"),
        (fedcfa.PAPER, "digits"),
        (cafe.PAPER, "digits"),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
@pytest.mark.usefixtures("no_compute")
def test_studies_of_papers_import_no_code_of_their_folders(
    paper: Paper, data: str, place: Place, line: Callable[..., str]
) -> None:
    place.plant("planted/evil.py")
    name = next(iter(paper.studies))
    row = paper.studies[name].rows(data)[0]
    runs = place.root / "paper"
    (chosen,) = study.configs(paper, [row], runs / data, ())
    cell = assemble.assemble(chosen, chosen.run.seeds[:1]).cells[0]
    cell = grid.cells(chosen, [cell.held_out])[0]
    there = runs / data / row.folder / grid.folder_names([cell])[cell.name]
    folders.begin(there, chosen, cell, records.Start("2026-01-01", None, {}, "0" * 64))
    Place(place.root, there, place.marker).named("planted.evil:algorithm")
    arguments = (f"--study={name}", f"--data={data}", f"--rows={row.label}", f"--run_dir={runs}")
    error = line(study.binary(paper, ""), *arguments)
    assert error.startswith(f"{row.label}: --run_dir={there}: ")
    assert "add --trust_code=planted.evil:algorithm" in error
    assert not place.marker.exists()


def _symbolic_link(place: Place) -> str:
    place.plant("kept/real/planted.py")
    (place.root / "linked.py").symlink_to(place.folder / "planted.py")
    return "linked"


def _linked_folder(place: Place) -> str:
    place.plant("kept/real/planted.py")
    (place.root / "linked").symlink_to(place.folder)
    return "linked.planted"


def _link_from_the_folder(place: Place) -> str:
    (place.folder / "planted.py").symlink_to(place.plant("planted.py"))
    return "kept.real.planted"


def _link_in_a_linked_folder(place: Place) -> str:
    _link_from_the_folder(place)
    (place.root / "linked").symlink_to(place.folder)
    return "linked.planted"


def _package(place: Place) -> str:
    place.plant("kept/real/__init__.py")
    return "kept.real"


def _parent(place: Place) -> str:
    place.plant("kept/real/deep/__init__.py")
    place.plant("kept/real/deep/planted.py")
    return "kept.real.deep.planted"


def _bytecode(place: Place) -> str:
    source = place.plant("kept/real/planted.py")
    py_compile.compile(str(source), cfile=str(source.with_suffix(".pyc")))
    source.unlink()
    return "kept.real.planted"


def _archive(place: Place) -> str:
    source = place.plant("zipped.py")
    with zipfile.ZipFile(place.folder / "data.zip", "w") as archive:
        archive.write(source, "zipped.py")
    source.unlink()
    sys.path.insert(0, str(place.folder / "data.zip"))
    return "zipped"


def _beside_the_cells_of_a_sweep(place: Place) -> str:
    sweep_of = '{"cells": [], "num_runs": 0}'
    (place.root / "kept" / "result.json").write_text(sweep_of)
    place.plant("kept/planted.py")
    return "kept.planted"


INSIDE = (
    *(_symbolic_link, _linked_folder, _link_from_the_folder, _link_in_a_linked_folder),
    *(_package, _parent, _bytecode, _archive, _beside_the_cells_of_a_sweep),
)


@pytest.mark.parametrize("plant", INSIDE)
def test_code_inside_a_run_folder_is_never_imported(
    plant: Callable[[Place], str],
    place: Place,
    line: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Even if the command names it, or trusts it."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    name = f"{plant(place)}:algorithm"
    importlib.invalidate_caches()
    place.named(name)
    for flags_too in (f"--trust_code={name}", f"--trust_code={name},{NETWORK}"):
        error = line(evaluate.BINARY, f"--run={place.folder}", flags_too)
        assert error.startswith(f"--run={place.folder}: --algorithm={name}: its file ")
        assert "lies in the run folder " in error
    for argument in (f"--algorithm={name}", f"--model={name}"):
        error = line(train.BINARY, argument, "--run_dir=new")
        assert error.startswith(f"{argument}: its file ")
    assert "lies in the run folder" in line(train.BINARY, f"--model={name}", "--run_dir=new")
    with pytest.raises(ValueError, match="lies in the run folder"):
        train.BINARY.answer(["", f"--describe={name}"], flags.FlagValues())
    assert not place.marker.exists()


def test_a_config_of_others_makes_no_run_folder(tmp_path: Path) -> None:
    for text in ("{}", "[1]", "damaged", '{"flags": {}}'):
        (tmp_path / "config.json").write_text(text)
        assert outside.run_folder(tmp_path / "code.py") is None
    os.mkfifo(tmp_path / "result.json")  # nobody will ever write to it
    assert outside.run_folder(tmp_path / "code.py") is None
    (tmp_path / "config.json").write_text('{"flags": {}, "cell": {}}')
    assert outside.run_folder(tmp_path / "a" / "code.py") == tmp_path


def test_a_pipe_is_not_read_forever(place: Place, line: Callable[..., str]) -> None:
    path = place.folder / "config.json"
    path.unlink()
    os.mkfifo(path)
    assert f"{path}: is damaged" in line(evaluate.BINARY, f"--run={place.folder}")


@pytest.mark.parametrize("name", ["_CHECKPOINT_METADATA", "default/pipe"])
def test_a_pipe_in_a_checkpoint_is_not_read_forever(
    finished: Ran, tmp_path: Path, name: str
) -> None:
    folder = tmp_path / "checkpoints"
    shutil.copytree(finished.folder / "checkpoints", folder)
    (newest,) = folder.glob("[0-9]*")
    (newest / name).unlink(missing_ok=True)
    os.mkfifo(newest / name)
    job = finished.job
    with pytest.raises(UsageError, match=f"{name}: is no file; delete it"):
        checkpoints.Checkpoints(folder, job.config, job.cell, reads=True)
    with pytest.raises(UsageError, match="is no file; delete it"):
        checkpoints.plain(folder, int(newest.name), job.config, job.cell)


def test_a_pipe_in_place_of_a_lock_or_a_figure_is_not_opened(tmp_path: Path) -> None:
    for name in (".lock", "curves.png"):
        os.mkfifo(tmp_path / name)
    with pytest.raises(UsageError, match="lock: is no file"), folders.locked(tmp_path):
        pass
    (tmp_path / "curves.pdf").touch()
    figures.draw(tmp_path / "curves.png", figures.new, 1.0, 1.0)
    assert (tmp_path / "curves.png").is_file()


def test_a_checkpoint_larger_than_the_memory_is_not_read(
    finished: Ran, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few bytes may stand for arrays of any size."""
    job = finished.job
    checkpoints.plain(finished.folder / "checkpoints", 1, job.config, job.cell)
    monkeypatch.setattr(checks, "machine_bytes", lambda: 100)
    with pytest.raises(ValueError, match="must fit into"):
        checkpoints.plain(finished.folder / "checkpoints", 1, job.config, job.cell)


def test_a_checkpoint_imports_nothing(place: Place, line: Callable[..., str]) -> None:
    """Its note has flags of its own, which may differ from those of config.json."""
    place.plant("planted/evil.py")
    (note,) = place.folder.glob("checkpoints/*/about/metadata")
    about = json.loads(note.read_text())
    about["flags"]["algorithm"] = ["planted.evil:algorithm"]
    note.write_text(json.dumps(about))
    error = line(evaluate.BINARY, f"--run={place.folder}", f"--trust_code={ALGORITHM},{NETWORK}")
    assert "not a checkpoint of this run" in error
    assert not place.marker.exists()


@pytest.mark.parametrize("algorithm", ["planted.evil:algorithm", "os", "fedavg", "..evil"])
def test_a_cell_has_an_algorithm_of_its_flags(
    algorithm: str, place: Place, line: Callable[..., str]
) -> None:
    place.plant("planted/evil.py")
    path = place.folder / "config.json"
    record = json.loads(path.read_text())
    record["cell"]["algorithm"] = algorithm
    path.write_text(json.dumps(record))
    error = line(evaluate.BINARY, f"--run={place.folder}", f"--trust_code={ALGORITHM},{NETWORK}")
    assert error.startswith(f"--run={place.folder}: {path}: is damaged")
    assert not place.marker.exists()


def test_a_cell_has_seeds_of_its_flags_and_settings_of_its_algorithm(
    place: Place, line: Callable[..., str]
) -> None:
    path = place.folder / "config.json"
    record = json.loads(path.read_text())
    hyper = {"learning_rate": 0.1}
    for damage in (
        {"settings": {"model": "x"}},
        {"settings": {"server_optimizer": 1}},
        {"runs": [{"seed": 99, "hyper": hyper}]},
        {"runs": [{"seed": 0, "hyper": {}}]},
        {"runs": [{"seed": 0, "hyper": hyper | {"server_optimizer": 1.0}}]},
    ):
        damaged = record | {"cell": record["cell"] | damage}
        path.write_text(json.dumps(damaged))
        trust = f"--trust_code={ALGORITHM},{NETWORK}"
        assert "is damaged" in line(evaluate.BINARY, f"--run={place.folder}", trust)


def test_a_folder_cannot_trust_itself(place: Place, line: Callable[..., str]) -> None:
    path = place.folder / "config.json"
    record = json.loads(path.read_text())
    assert "trust_code" not in record["flags"]
    record["flags"]["trust_code"] = [ALGORITHM, NETWORK]
    path.write_text(json.dumps(record))
    error = line(evaluate.BINARY, f"--run={place.folder}")
    assert "was written by another version, with trust_code" in error


def test_all_that_must_be_trusted_stands_in_one_line(
    place: Place, line: Callable[..., str]
) -> None:
    error = line(evaluate.BINARY, f"--run={place.folder}")
    assert error == (
        f"--run={place.folder}: names --algorithm={ALGORITHM}, which is not this project's code "
        f"and --model={NETWORK}, which is not this project's code; add "
        f"--trust_code={ALGORITHM},{NETWORK} to import and run them, if you trust them"
    )
    error = line(evaluate.BINARY, f"--run={place.folder}", f"--trust_code={NETWORK}")
    assert f"add --trust_code={NETWORK},{ALGORITHM} to import and run it" in error
    assert line(evaluate.BINARY, "--run=x", "--trust_code=all").startswith("--trust_code=all: must")


def test_names_in_files_do_not_command_the_terminal(place: Place, line: Callable[..., str]) -> None:
    place.named("fed\x1b]0;avg", "mlp")
    assert "--algorithm=fed\\x1b]0;avg" in line(evaluate.BINARY, f"--run={place.folder}")
    assert errors.printable("a\x9b\u202eb\n±c") == "a\\x9b\\u202eb\n±c"


def test_a_warning_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(errors, "_showwarning", lambda *each: print(*each[:4]))
    errors.show_warning(UserWarning("a\nb\x9b"), UserWarning, "file.py", 3)
    assert capsys.readouterr().err == "warning: a b\\x9b\n"
    monkeypatch.setattr(errors, "_LACKING", set())
    for glyph in (26481, 20140):
        text = f"Glyph {glyph} (\\N{{...}}) missing from font(s) DejaVu Sans."
        errors.show_warning(UserWarning(text), UserWarning, "file.py", 3)
    (text,) = capsys.readouterr().err.splitlines()
    words = f"the font DejaVu Sans lacks some characters, such as {chr(26481)}; figures show boxes"
    assert text == f"warning: {words}"
    errors.show_warning("a", FutureWarning, "file.py", 3)
    assert capsys.readouterr().out == f"a {FutureWarning} file.py 3\n"


def test_what_a_factory_returns_is_checked(
    place: Place, line: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builtins.input", lambda prompt: "")
    new = ("--run_dir=new", "--rounds=5")
    assert line(train.BINARY, "--model=sys:exit", *new) == (
        "--model=sys:exit: ends the process, must return Model"
    )
    own = "def network(n):\n    return 3\ndef algorithm(m, w):\n    return 4\nFACTS = 5\n"
    (place.root / "planted.py").write_text(own)
    for name, text in (
        ("model=planted:network", "returns int, must return Model"),
        ("algorithm=planted:algorithm", "FACTS of its module is int, must be Facts"),
    ):
        assert line(train.BINARY, f"--{name}", *new) == f"--{name}: {text}"


def _read(binary: Any, *arguments: str) -> str:
    values = flags.FlagValues()
    binary.define(values)
    with no_figures():
        return binary.run(binary.read(["", *arguments], values))


def test_code_that_the_command_names_is_imported_and_its_change_is_reported(
    place: Place, own: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trust = f"--trust_code={ALGORITHM},{NETWORK}"
    start = folders.begun(place.folder).starts[-1]
    assert {*start.code} == {ALGORITHM, NETWORK}
    assert start.code[NETWORK] == records.Module("own_code", outside.digest(NETWORK))
    assert "accuracy" in _read(evaluate.BINARY, f"--run={place.folder}", trust)
    assert "warning" not in capsys.readouterr().err
    old = outside.digest(NETWORK)
    with monkeypatch.context() as patch:
        # An edited copy comes before the file of the run.
        (place.root / "own_code.py").write_text(f"{OWN}\n# changed\n")
        importlib.invalidate_caches()
        patch.setattr(sys, "path", [str(place.root), *sys.path])
        new = outside.digest(NETWORK)
        assert new != old
        _read(export.BINARY, f"--run={place.folder}", trust)
        (warning,) = [x for x in capsys.readouterr().err.splitlines() if x.startswith("warning")]
        assert warning == (
            f"warning: --run={place.folder}: own_code has changed since the run: SHA-256 {old} "
            f"then, {new} now"
        )
        (model,) = place.folder.glob("export/*/model.json")
        described = json.loads(model.read_text())
        assert described["trained"][-1]["code"][NETWORK]["sha256"] == old
        assert described["exported"]["code"][NETWORK]["sha256"] == new


def test_a_resumed_run_reports_changed_code_and_records_it(
    finished: Ran, place: Place, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    old = outside.digest(NETWORK)
    (place.root / "own_code.py").write_text(f"{OWN}\n# changed\n")
    importlib.invalidate_caches()
    new = outside.digest(NETWORK)
    monkeypatch.setattr(loop, "run_cell", lambda *_: folders.result(place.folder, _cell(place)))
    chosen = config.changed(
        finished.job.config, run_dir=str(place.folder), rounds=2, eval_every=1, resume=True
    )
    launch.run(chosen, place.folder, in_folders=False, report=lambda *_: "")
    (warning,) = [x for x in capsys.readouterr().err.splitlines() if x.startswith("warning")]
    assert f"--run_dir={place.folder}: own_code has changed" in warning
    assert f"{old} then, {new} now" in warning
    codes = [start.code[ALGORITHM].sha256 for start in folders.begun(place.folder).starts]
    assert codes == [old, new]


def _cell(place: Place) -> records.Cell:
    return folders.begun(place.folder).cell


def test_a_start_from_the_network_of_ones_own_code(
    place: Place, line: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """--model trusts the network; the algorithm of the other run needs the flag."""
    new = (f"--model={NETWORK}", "--environment=colored", f"--init_from={place.folder}")
    error = line(show_data.BINARY, *new)
    assert error.startswith(f"--init_from={place.folder}: names --algorithm={ALGORITHM}, ")
    assert "--model" not in error.partition("names")[2]
    monkeypatch.chdir(place.root)
    with no_figures():
        text = _read(show_data.BINARY, *new, f"--trust_code={ALGORITHM}", "--out=data.png")
    assert "colored" in text


def test_the_record_names_the_distribution_of_a_package() -> None:
    found = provenance.code(["msgspec.json:decode", "sys:exit"])
    assert found["msgspec.json:decode"].versions == {"msgspec": msgspec.__version__}
    assert found["sys:exit"] == records.Module("sys", None)


def test_code_in_the_current_folder_comes_after_all_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "code_of_this_folder.py").write_text("network = 3")
    (tmp_path / "numpy.py").write_text("raise AssertionError('imported')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    before = [*sys.path]
    assert outside.imported("model", "code_of_this_folder:network") == 3
    assert outside.digest("numpy:array") == outside.digest("numpy:zeros") is not None
    assert sys.path == [*before, str(tmp_path)]
    found = importlib.machinery.PathFinder.find_spec("numpy")
    assert found is not None
    assert str(found.origin) == np.__file__
    assert outside.imported("model", "numpy:array") is np.array


def test_python_p_hides_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    safe = types.SimpleNamespace(flags=types.SimpleNamespace(safe_path=True), path=["elsewhere"])
    monkeypatch.setattr(outside, "sys", safe)
    outside._add_current_folder()
    assert safe.path == ["elsewhere"]
