"""A run folder, a checkpoint and a data file are data: only the command names code to import."""

import contextlib
import importlib
import importlib.machinery
import json
import pickle
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from fedjax_inv.checks import UsageError
from fedjax_inv.data import sources
from fedjax_inv_experiments import config, evaluate, show_data, start, train
from fedjax_inv_experiments.assembly import factories, grid
from fedjax_inv_experiments.report import forms
from runs import Ran, no_figures, ran, run

OWN = """
from fedjax_inv import models
from fedjax_inv.algorithms import fedavg

def network(num_classes):
    return models.mlp(num_classes, widths=(4,))

def algorithm(model, work, *, server_optimizer):
    return fedavg.fedavg(model, work, server_optimizer=server_optimizer)
"""
ALGORITHM, NETWORK = "own_code:algorithm", "own_code:network"
NAMED = (f"--algorithm={ALGORITHM}", f"--model={NETWORK}")


class Place(NamedTuple):
    """A working directory with code of one's own and a copy of a run of it."""

    root: Path
    folder: Path
    own: Path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ran]:
    """A run of an algorithm and of a network of one's own."""
    place = tmp_path_factory.mktemp("own")
    (place / "own_code.py").write_text(OWN)
    flags = dict(algorithm=(ALGORITHM,), model=NETWORK, rounds=1, eval_every=1, local_steps=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(place)
        yield ran(config.of(run_dir=str(place / "run"), **flags))


@pytest.fixture
def place(made: Ran, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "run"
    shutil.copytree(made.folder, folder)
    return Place(tmp_path, folder, made.folder.parent / "own_code.py")


def read(binary: Any, *arguments: str) -> str:
    with no_figures():
        return run(binary, *arguments)


@pytest.mark.parametrize("flag", ["algorithm", "model", "loss", "score", "cell"])
def test_no_command_imports_what_only_a_folder_names(place: Place, flag: str) -> None:
    marker = place.root / "marker"
    (place.root / "planted.py").write_text(f"open({str(marker)!r}, 'w').close()\n{OWN}")
    path = place.folder / "config.json"
    record = json.loads(path.read_text())
    name = "planted:algorithm"
    if flag == "cell":
        record["cell"]["algorithm"] = name
    else:
        record["flags"][flag] = [name] if flag == "algorithm" else name
    path.write_text(json.dumps(record))
    where = f"--run={place.folder}"
    with pytest.raises(UsageError) as error:
        read(evaluate, where, *NAMED)
    assert (f"--{flag}={name}" in str(error.value)) == (flag != "cell")
    for binary, arguments in (
        (train, (f"--run_dir={place.folder}", *NAMED, "--rounds=1", "--local_steps=1")),
        (show_data, (f"--init_from={place.folder}",)),
    ):
        with contextlib.suppress(UsageError):
            read(binary, *arguments)
    assert not marker.exists()
    assert "planted" not in sys.modules


def test_a_command_that_names_the_code_reads_the_run(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match=f"add {' '.join(NAMED)}"):
        read(evaluate, f"--run={place.folder}")
    with pytest.raises(UsageError, match=f"add {NAMED[1]}"):
        read(evaluate, f"--run={place.folder}", NAMED[0])
    assert "accuracy" in read(evaluate, f"--run={place.folder}", *NAMED)
    # A run of other code can start from its network, which is arrays alone.
    new = (f"--model={NETWORK}", f"--init_from={place.folder}")
    assert "rotated" in read(show_data, *new)
    # What has changed since is told.
    before = place.own.read_text()
    place.own.write_text(f"{before}\n# changed\n")
    monkeypatch.setattr(factories, "_digests", {})  # as in a new process
    try:
        with pytest.warns(UserWarning, match="has changed since"):
            read(evaluate, f"--run={place.folder}", *NAMED)
    finally:
        place.own.write_text(before)


class Planted:
    """What a pickle runs."""

    def __reduce__(self) -> Any:
        return (exec, ("raise AssertionError('run')",))


def test_data_files_run_nothing(tmp_path: Path) -> None:
    y = np.arange(4) % 2
    np.savez(tmp_path / "x.npz", x=np.array([Planted()] * 4, dtype=object), y=y)
    (tmp_path / "y.npz").write_bytes(pickle.dumps(Planted()))
    folder = tmp_path / "photos" / "here"
    for name in ("cat", "dog"):
        (folder / name).mkdir(parents=True)
        # Ghostscript, another program, would draw this format.
        Image.new("RGB", (8, 8)).save(folder / name / "1.png", "EPS")
    for path in (tmp_path / "x.npz", tmp_path / "y.npz", tmp_path / "photos"):
        with pytest.raises(UsageError):
            sources.load(str(path))


def test_names_from_data_are_safe_in_files_tables_and_terminals() -> None:
    cells = [grid.Cell("fedavg", {}, name, ()) for name in ("../../x", "a|b", "A|b")]
    names = [*grid.folder_names(cells).values()]
    assert len({name.casefold() for name in names}) == 3
    assert not any(set(name) & set("/|\\ ") for name in names)
    name = "a|b$\\input{x}"
    assert "a\\|b" in forms.markdown(pd.DataFrame({"name": [name]}))
    assert forms.latex(name) == "a|b\\$\\textbackslash{}input\\{x\\}"
    assert start.printable("a\x9b\u202eb\n±c") == "a\\x9b\\u202eb\n±c"


def test_code_in_the_current_folder_comes_after_all_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "code_of_this_folder.py").write_text("network = 3")
    (tmp_path / "numpy.py").write_text("raise AssertionError('imported')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    before = [*sys.path]
    assert factories.imported("model", "code_of_this_folder:network") == 3
    assert sys.path == [*before, str(tmp_path)]
    importlib.invalidate_caches()
    found = importlib.machinery.PathFinder.find_spec("numpy")
    assert found is not None
    assert found.origin == np.__file__
