"""Files that commands write: none is lost that is not theirs."""

import sys
from pathlib import Path

import pytest

from fedjax_inv.checks import UsageError
from fedjax_inv_experiments import evaluation, finished, show_data, train
from runs import no_figures, run

ROWS = "".join(f"{row % 7},{'nse'[row % 3]},{row % 2}\n" for row in range(60))
TABLE = f"a,domain,target\n{ROWS}"
SMALL = ("--rounds=1", "--widths=2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a table, and a run on it."""
    folder = tmp_path_factory.mktemp("outputs")
    (folder / "old.csv").write_text(TABLE)
    with no_figures():
        run(train, f"--dataset={folder / 'old.csv'}", *SMALL, f"--run_dir={folder / 'run'}")
    return folder


def evaluated(folder: Path, **places: str) -> str:
    paths = {name: str(folder / place) for name, place in places.items()}
    return evaluation.run(evaluation.EvaluationOptions(str(folder / "run"), **paths))


@pytest.mark.parametrize(
    ("places", "flag"),
    [
        ({"dataset": "new.csv", "out": "new.png"}, "out"),  # whose numbers are new.csv
        ({"out": "old.png"}, "out"),  # beside the table of the training
        ({"dataset": "new.csv", "predictions": "new.csv"}, "predictions"),
        ({"dataset": "new.csv", "predictions": "link.csv"}, "predictions"),
        ({"out": "x.png", "predictions": "x.csv"}, "predictions"),
        ({"out": "own.png"}, "out"),  # own.pdf is there
        ({"predictions": "own.csv"}, "predictions"),
        ({"predictions": "run/metrics.jsonl"}, "predictions"),
        ({"export": "networks"}, "export"),
        ({"out": "images/a.png", "dataset": "images"}, "out"),
    ],
)
def test_no_file_of_another_origin_is_replaced(
    folder: Path, tmp_path: Path, places: dict[str, str], flag: str
) -> None:
    for name in ("own.csv", "own.pdf", "networks/seed=0/model.json", "images/a/b/c.png"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("one's own")
    (folder / "new.csv").write_text(TABLE)
    if not (folder / "link.csv").exists():
        (folder / "link.csv").symlink_to(folder / "new.csv")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(UsageError, match=f"^--{flag}="):
        evaluated(folder, **places)
    after = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert after == before


def test_a_command_replaces_what_it_has_written(folder: Path, tmp_path: Path) -> None:
    places = {"out": "again.png", "predictions": "again_p.csv", "export": "again"}
    assert evaluated(folder, **places) == evaluated(folder, **places)
    picture = f"--out={folder / 'again.png'}"
    data = f"--dataset={folder / 'old.csv'}"
    with pytest.raises(UsageError, match=r"^--out="):  # of evaluate
        run(show_data, data, picture)
    picture = f"--out={folder / 'data.png'}"
    assert run(show_data, data, picture) == run(show_data, data, picture)
    (folder / "data.pdf").write_text("one's own")
    with pytest.raises(UsageError, match=r"^--out="):
        run(show_data, data, picture)


def test_code_of_the_working_folder_is_found(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "from fedjax_inv.algorithms import fedavg\n\n\ndef factory(model, work):\n"
    (tmp_path / "own_of_folder.py").write_text(code + "    return fedavg.fedavg(model, work)\n")
    monkeypatch.chdir(tmp_path)
    own = "--algorithm=own_of_folder:factory"
    with no_figures():
        run(train, f"--dataset={folder / 'old.csv'}", *SMALL, own, "--run_dir=run")
    monkeypatch.delitem(sys.modules, "own_of_folder")
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place != str(tmp_path)])
    runs = finished.open("run", Path("run"), "last", named=["own_of_folder:factory"])
    assert runs.cell.algorithm == "own_of_folder:factory"
