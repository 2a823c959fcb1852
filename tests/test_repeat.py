"""A repetition of a table's first rounds finds each number that differs, and marks equal tables."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fedjax_inv.checks import UsageError
from fedjax_inv_experiments.experiment import config, grid
from fedjax_inv_experiments.running import files, records, sources
from fedjax_inv_experiments.running import folder as folders
from fedjax_inv_experiments.running.records import Line, Origin, Start
from runs import line
from tools import repeat, results

CODE = sources.of_files([results.ROOT / "fedjax_inv/tree.py"])
RECORD = Origin(
    command="fedjax-inv paper cafe --study=methods --data=digits --rounds=50 --seeds=3,4 --resume",
    seeds=[3, 4],
    commit="0123456789" * 4,
    versions={"fedjax_inv": "0.9.0"},
    code={"fedjax_inv/gone.py": "0" * 32},
)


def test_a_command_is_shortened() -> None:
    words = "paper cafe --study=methods --data=digits --rounds=2 --eval_every=1 --seeds=3"
    assert repeat.shortened(RECORD, 2) == [*words.split(), "--devices=1"]
    own = msgspec.structs.replace(RECORD, command="fedjax-inv paper cafe --dataset=a.csv")
    assert "--dataset=/data/a.csv" in repeat.shortened(own, 2, ["/data/b.csv", "/data/a.csv"])
    other = msgspec.structs.replace(RECORD, command="fedjax-inv explain --runs=a")
    with pytest.raises(UsageError, match=r"^fedjax-inv explain --runs=a: is no command of a study"):
        repeat.shortened(other, 2)


@pytest.mark.parametrize(
    ("words", "paths", "rows"),
    [
        ("map --data=digits", ["fedjax_inv/algorithms/fedcfa.py"], ["fedcfa"]),
        (
            "map --data=digits --rows=fedavg,erm,fedcfa",
            ["fedjax_inv/algorithms/erm.py", "fedjax_inv/algorithms/fedcfa.py"],
            ["erm", "fedcfa"],
        ),
        ("paper cafe --data=digits", ["fedjax_inv/algorithms/cafe.py"], ["CAFE"]),
        # a file of the study; rows that start from the networks of others
        (
            "paper cafe --data=digits",
            ["fedjax_inv/algorithms/cafe.py", "fedjax_inv_experiments/papers/cafe.py"],
            None,
        ),
        (
            "paper fedcfa --study=simpson --data=mnist",
            ["fedjax_inv/algorithms/fedcfa.py"],
            None,
        ),
    ],
)
def test_rows_whose_code_changed_are_repeated(words: str, paths: list[str], rows: Any) -> None:
    assert repeat.rows_of(words.split(), paths, {}) == rows


def test_a_file_of_the_study_changes_rows_by_their_flags() -> None:
    words = ["paper", "cafe", "--study=methods", "--data=digits"]
    before = repeat._flags_of_rows(words, repeat.ROOT)
    assert {"FedAvg", "CAFE"} < before.keys()
    study_file, algorithm = "fedjax_inv_experiments/papers/cafe.py", "fedjax_inv/algorithms/cafe.py"
    assert repeat.rows_of(words, [study_file], before) == []
    assert repeat.rows_of(words, [study_file, algorithm], before) == ["CAFE"]
    changed = before | {"FedAvg": [*before["FedAvg"], "--rounds=1"]}
    assert repeat.rows_of(words, [study_file], changed) == ["FedAvg"]


def cell(folder: Path, *lines: Line) -> None:
    """A finished cell of one run with these evaluations."""
    chosen = config.of(rounds=len(lines) - 1, eval_every=1, seeds=(3,))
    (of_run,) = grid.cells(chosen, ["75"])
    folders.begin(folder, chosen, of_run, Start("2026-01-01", None, {}, "0" * 64))
    text = "".join(msgspec.json.encode(each).decode() + "\n" for each in lines)
    (folder / "metrics.jsonl").write_text(text)


@pytest.mark.parametrize(
    ("now", "found"),
    [
        ([line(0), line(1, seconds=9.0, worst_score=0.50001)], ""),
        ([line(0), line(1, 0.50001)], "CAFE, cell 1, round 1: domains is "),
        ([line(0), line(1, bytes=8)], "CAFE, cell 1, round 1: bytes is 0 then, 8 now"),
        ([line(0), line(1, dropped=2)], ""),  # a field that the old code did not write
        ([line(0), line(1), line(2)], "CAFE, cell 1 has 2 lines then, 3 now"),
        (None, "has not the same cells: CAFE, cell 1"),
    ],
)
def test_a_difference_is_found(tmp_path: Path, now: Sequence[Line] | None, found: str) -> None:
    cell(tmp_path / "old/CAFE/cafe", line(0), line(1))
    if now is not None:
        cell(tmp_path / "new/CAFE/cafe-of-another-default", *now)
    text, _ = repeat.difference(repeat.lines(tmp_path / "old"), repeat.lines(tmp_path / "new"))
    assert text.startswith(found)
    assert bool(text) == bool(found)
    assert repeat.difference({}, {})[0] == "has not the same cells: none at all"


def test_rounding_is_no_difference_but_told() -> None:
    before, after = ({"CAFE": [line(1, train_loss=loss)]} for loss in (0.5, 0.5000001))
    assert repeat.difference(before, after) == ("", pytest.approx(2e-7))
    for number, other, apart in (
        ({"a": [1.0, 2.0]}, {"a": [1.0, 4.0]}, 0.5),
        ({"a": 1.0}, {"b": 1.0}, float("inf")),
        ([1.0], [1.0, 2.0], float("inf")),
        ("x", "y", float("inf")),
        ([None, 0.0, -1.0], [None, 0.0, -1.0], 0.0),
        (0.0, 1e-9, 1.0),
        (float("nan"), float("nan"), 0.0),
        (float("nan"), 1.0, float("inf")),
        ("1", 1.0, float("inf")),
    ):
        assert repeat._apart(number, other) == apart
    for number, told in ((1.4e-7, 2e-7), (9.2e-8, 1e-7), (3e-7, 3e-7), (0.0, 0.0)):
        assert repeat._rounded_up(number) == told


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository with two published files of one command."""
    run = tmp_path / "runs/digits"
    run.mkdir(parents=True)
    (run / "methods.md").write_text("| a |\n|---|\n| 1 |\n")
    (run / "methods_by_round.png").write_bytes(b"picture")
    (run / "methods.json").write_bytes(msgspec.json.encode(RECORD))
    (tmp_path / results.TABLES).mkdir(parents=True)
    for name in ("methods.md", "methods_by_round.png"):
        results.publish(run / name, "", tmp_path)
    return tmp_path


@pytest.mark.parametrize(("score", "apart"), [(0.5, ""), (0.50000005, " to 1e-07"), (0.6, None)])
def test_equal_tables_are_no_longer_listed(
    root: Path,
    score: float,
    apart: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def train(words: Sequence[str], code: Path, folder: Path) -> None:
        assert words == repeat.shortened(RECORD, 2)
        is_old = code.name == RECORD.commit
        cell(folder / "digits/CAFE/cafe", line(0), line(1), line(2, 0.5 if is_old else score))
        files.write_json(folder / "digits/methods.json", msgspec.structs.replace(RECORD, code=CODE))

    asked: list[Any] = []
    monkeypatch.setattr(repeat, "_git", lambda *words: asked.append(words))
    monkeypatch.setattr(repeat, "_flags_of_rows", lambda words, code: {})
    monkeypatch.setattr(repeat, "_train", train)
    text = repeat.run(repeat.Options(jobs=1), root)
    assert len(asked) == 1  # one commit, whose folder the test does not make
    names = "cafe_digits_methods.md, cafe_digits_methods_by_round.png"
    record = results.record_of(root / results.TABLES / "cafe_digits_methods.md")
    shown = capsys.readouterr().out
    assert text == f"{int(apart is not None)} of 1 commands gave the same first 2 rounds."
    if apart is None:
        assert shown.startswith(f"{names}: digits/CAFE, cell 1, round 2: domains is")
        assert record.repeated is None
        return
    assert shown == f"{names}: the same{apart}\n"
    assert record.repeated is not None
    assert results.age(record) == (2, "")
    version = record.repeated.version
    told = f"; the first 2 rounds are the same{apart} with version {version}"
    assert results.caption(record).endswith(told)
    assert results.report_old(root) == "No table or figure is older than the code."


def test_what_cannot_be_compared_is_said(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(words: Sequence[str], code: Path, folder: Path) -> None:
        raise UsageError("a", ..., "failed")

    monkeypatch.setattr(repeat, "_git", lambda *words: None)
    monkeypatch.setattr(repeat, "_flags_of_rows", lambda words, code: {})
    monkeypatch.setattr(repeat, "_train", fail)
    repeat.run(repeat.Options(tables=("cafe_digits_methods.md",), jobs=1), root)
    assert ": cannot be compared: a: failed\n" in capsys.readouterr().out
    path = root / results.TABLES / "cafe_digits_methods.md.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | {"commit": "several"}))
    repeat.run(repeat.Options(tables=("cafe_digits_methods.md",), jobs=1), root)
    assert "is of commit several" in capsys.readouterr().out
    with pytest.raises(UsageError, match=r"^--tables=none.md: is no file of docs/results/tables"):
        repeat.run(repeat.Options(tables=("none.md",), jobs=1), root)
    assert records.read(path, Origin).repeated is None
