"""Every row of the data is accounted for, where commands train and where they show data."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedjax_inv.checks import UsageError
from fedjax_inv_experiments import config
from fedjax_inv_experiments import run as launching
from fedjax_inv_experiments.config import Config
from fedjax_inv_experiments.folder import records, run_folder, selection
from fedjax_inv_experiments.report import data_report, figures
from runs import no_figures, train

QUICK: dict[str, Any] = {"rounds": 2, "eval_every": 2, "widths": (4,), "compile": "quick"}
RNG = np.random.default_rng(0)


def table(path: Path, *columns: str, rows: list[tuple[Any, ...]]) -> str:
    """Writes a table; returns its path."""
    path.write_text("\n".join(",".join(map(str, row)) for row in [columns, *rows]) + "\n")
    return str(path)


def of_table(dataset: str, **values: Any) -> Config:
    run_dir = str(Path(dataset).with_suffix(""))
    return config.of(**QUICK | {"dataset": dataset, "run_dir": run_dir} | values)


@pytest.fixture
def odd_table(tmp_path: Path) -> str:
    """Of domains n, e, s (of which s is for the test alone), 40 rows in training and in test."""
    x = RNG.normal(size=(60, 2)).round(3)
    rows: list[tuple[Any, ...]] = [
        (*x[i], "ne"[i % 2], "train", "ny"[i // 2 % 2]) for i in range(40)
    ]
    rows += [(*x[i], "n", "test", "ny"[i // 2 % 2]) for i in range(30)]
    rows += [(*x[i], "s", "test", "y.") for i in range(40, 50)]
    return table(tmp_path / "odd.csv", "a", "b", "domain", "split", "target", rows=rows)


def test_train_tells_every_row_and_records_it(
    odd_table: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with no_figures():
        train(of_table(odd_table, held_out="none"))
    told = [line for line in capsys.readouterr().err.splitlines() if "compil" not in line]
    assert "80 examples: 36 training, 4 validation, 40 test" in told[0]
    assert "s (test)" in told[1]
    assert "classes that only the test has: y. (10)" in told[2]
    found = json.loads((Path(odd_table).with_suffix("") / "config.json").read_text())["uses"]
    assert found["counts"] == {"training": 36, "validation": 4, "test": 40}
    assert 0 < found["repeated"] <= 30
    assert f"{found['repeated']} of 40 test examples" in told[2]
    assert found["new_classes"] == {"y.": 10}


def test_rows_that_a_held_out_domain_leaves_unused_are_named(
    odd_table: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "save", lambda figure, path, **other: None)
    chosen = of_table(odd_table, held_out="s")
    text = data_report.show(chosen, str(Path(odd_table).with_suffix(".png")), 1)
    lines = [line.strip("| ").split("|") for line in text.splitlines() if line.startswith("|")]
    start = next(i for i, line in enumerate(lines) if "examples for" in line[0])
    rows = {
        line[0].strip(): [int(cell) for cell in line[1:]] for line in lines[start + 2 : start + 6]
    }
    assert rows == {
        "e": [18, 2, 0, 0],
        "n": [18, 2, 0, 30],
        "s": [0, 0, 10, 0],
        "in all": [36, 4, 10, 30],
    }
    assert "y. (10)" in text


def of_one_row(tmp_path: Path) -> str:
    """Of 40 users with a row each in training, so that none is left for validation."""
    x = RNG.normal(size=(60, 2)).round(3)
    rows = [(*x[i], i, ["false", "true"][i >= 40], "ny"[int(x[i, 0] > 0)]) for i in range(60)]
    return table(tmp_path / "users.csv", "a", "b", "client", "test", "target", rows=rows)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"select": "last", "learning_rate": (0.1, 1.0)},
        {"select": "agreement", "score": "accuracy"},
    ],
)
def test_no_rule_selects_without_validation(tmp_path: Path, values: dict[str, Any]) -> None:
    chosen = of_table(of_one_row(tmp_path), partition="user", **values)
    with pytest.raises(UsageError, match=f"--select={re.escape(chosen.evaluation.select)}"):
        train(chosen)
    assert not Path(chosen.output.run_dir).exists()


def test_the_last_evaluation_needs_no_validation(tmp_path: Path) -> None:
    chosen = of_table(of_one_row(tmp_path), partition="user", select="last")
    with no_figures():
        train(chosen)
    result = run_folder.result(Path(chosen.output.run_dir))
    (run,) = result.runs
    assert run.by_rule["validation"] is None
    assert run.by_rule["last"] == run.last
    assert not selection.is_validated(run.last)


def test_rows_of_validation_in_a_domain_that_nobody_trains_select(tmp_path: Path) -> None:
    x = RNG.normal(size=(80, 2)).round(3)
    parts = ["train"] * 50 + ["val"] * 20 + ["test"] * 10
    rows = [(*x[i], "v" if p == "val" else "n", p, "ny"[i % 2]) for i, p in enumerate(parts)]
    path = table(tmp_path / "v.csv", "a", "b", "domain", "split", "target", rows=rows)
    values = {"rounds": 6, "eval_every": 1, "learning_rate": (0.1, 3.0), "held_out": "none"}
    chosen = of_table(path, select="unseen_domain", **values)
    with no_figures():
        train(chosen)
    result = records.read(Path(chosen.output.run_dir) / "result.json", records.Sweep).cells[0]
    lines = [run.by_rule["unseen_domain"] for run in result.runs]
    scores = [selection.score_on(line, "unseen_domain") for line in lines if line]
    assert len(scores) == 2
    picked = selection.choose("fedavg", result, "unseen_domain")
    assert picked is not None
    assert selection.score_on(picked.selected[0], "unseen_domain") == max(map(float, scores))
    (domain,) = (d for d in picked.selected[0].domains.values() if d.split == "unseen_domain")
    assert domain.examples == 20


def test_an_unseen_domain_has_the_statistics_that_the_table_names(tmp_path: Path) -> None:
    """Its inputs are shifted, and its labels follow their order, as in the other domains."""
    x = RNG.normal(size=(180, 2)).round(3)
    shift = 8 * (np.arange(180) % 3 == 2)
    rows = [(*(x[i] + shift[i]), "abc"[i % 3], "ny"[int(x[i, 0] > 0)]) for i in range(180)]
    path = table(tmp_path / "shifted.csv", "a", "b", "domain", "target", rows=rows)
    values = {"held_out": "c", "norm": "batch", "rounds": 20, "standardise": False, "seeds": (0,)}
    scores = {}
    for rule in ("mean", "estimated"):
        run_dir = str(tmp_path / rule)
        with no_figures():
            text = train(of_table(path, unseen_norms=rule, **values | {"run_dir": run_dir}))
        line = next(line for line in text.splitlines() if line.startswith("BatchNorm on unseen"))
        assert ("--unseen_norms=estimated" in line) == (rule == "estimated")
        scores[rule] = run_folder.result(Path(run_dir)).runs[0].last.test_score
    assert scores["estimated"] > scores["mean"] + 0.2


@pytest.mark.parametrize(
    "values",
    [
        {"held_out": "e"},
        {"held_out": "none", "norm": "batch"},
        {"algorithm": ("fl_games",), "norm": "batch"},
    ],
)
def test_statistics_that_no_network_has_are_refused(odd_table: str, values: dict[str, Any]) -> None:
    chosen = of_table(odd_table, **{"held_out": "e", "unseen_norms": "batch"} | values)
    with pytest.raises(UsageError, match="--unseen_norms=batch"):
        train(chosen)
    assert not Path(chosen.output.run_dir).exists()


@pytest.mark.parametrize("domains", ["pqs", "pqrs"])
def test_leaving_one_of_two_domains_out_is_said_to_be_blind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], domains: str
) -> None:
    rows = [
        (*RNG.normal(size=2).round(3), domains[i % len(domains)], "ny"[i % 2]) for i in range(120)
    ]
    path = table(tmp_path / "left.csv", "a", "b", "domain", "target", rows=rows)
    chosen = of_table(path, held_out="s", select="leave_one_out")
    launching.prepare(chosen, tmp_path / "run", in_folders=False)
    told = [line for line in capsys.readouterr().err.splitlines() if "--leave_one_out" in line]
    assert len(told) == (domains == "pqs")
