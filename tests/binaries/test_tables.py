"""Tables: what is bold, what differs, and the files of a sweep or study."""

import math
import re
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pandas as pd
import pytest
from scipy import stats

from fedjax_inv_experiments import config, differences, report, selection, tables
from fedjax_inv_experiments.metrics import Measure
from fedjax_inv_experiments.running.records import Cell, Domain, Line, Result, Run, RunResult, Stop
from fedjax_inv_experiments.selection import RULES
from fedjax_inv_experiments.studies import fl_games, study
from runs import line

NAN = math.nan

# Method -> learning rate -> the accuracies of the seeds, NaN where a run diverged.
Grid = Mapping[str, Mapping[float, list[float]]]
GRID: Grid = {
    "fed_avg|x": {0.1: [0.50, 0.60, 0.70], 0.2: [0.40, 0.50, 0.60]},
    "fedipg": {0.1: [0.71, 0.80, 0.89], 0.2: [0.99, NAN, 0.99]},
    "moon": {0.1: [NAN, 0.30, 0.20]},
}


def log_of(rates: Mapping[float, list[float]], held_out: str) -> list[Line]:
    """Two evaluations of each run; the test accuracy is 10 points below that of validation."""
    runs = [(rate, seed, of[seed]) for rate, of in rates.items() for seed in range(len(of))]
    return [
        line(
            round,
            0.5 if math.isnan(accuracy) else accuracy - 0.05 * (round == 5),
            run=run,
            seed=seed,
            hyper={"learning_rate": rate},
            diverged=math.isnan(accuracy),
            test_score=(0.5 if math.isnan(accuracy) else accuracy - 0.05 * (round == 5)) - 0.1,
            domains={
                name: Domain(0.25, None, 4, "test" if name == held_out else "validation")
                for name in ("0", "45_%")
            },
            train_metrics={"invariance": 0.5},
            train_by_round=[0.1, 0.2],
            bytes=10 * round,
        )
        for round in (5, 10)
        for run, (rate, seed, accuracy) in enumerate(runs)
    ]


def finished(method: str, rates: Mapping[float, list[float]], held_out: str) -> Result:
    """A cell whose runs have the log of `log_of`."""
    lines = log_of(rates, held_out)
    runs = []
    for run, last in enumerate(lines[len(lines) // 2 :]):
        mine = [one for one in lines if one.run == run]
        picked = {
            name: None if last.diverged else rule.pick(mine)
            for name, rule in RULES.items()
            if name != "agreement"
        }
        of = (last.seed, last.hyper, last.diverged, picked, last)
        runs.append(RunResult(*of, stops=[Stop(0.6, None)]))
    settings = {"split": True} if method == "fedipg" else {}
    cell = Cell(method, settings, held_out, [Run(one.seed, one.hyper) for one in runs])
    return Result(cell, runs)


def rows_of(text: str) -> list[list[list[str]]]:
    """The tables of a Markdown text, as rows of cells."""
    parts = [part for part in text.split("\n\n") if part.startswith("|")]
    return [
        [
            [cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]]
            for row in part.splitlines()
            if not row.startswith("|--")
        ]
        for part in parts
    ]


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a sweep with one held-out domain, and what is printed."""
    folder = tmp_path_factory.mktemp("swept")
    results = [(name, finished(name, rates, "45_%")) for name, rates in GRID.items()]
    text = tables.write(folder, results, title="100% of $x$", paper={})
    return folder, text


def test_a_sweep_says_what_is_best(swept: tuple[Path, str]) -> None:
    folder, text = swept
    test, differ, rules, winner = rows_of(text)
    name = "fed_avg\\|x"
    assert test == [
        ["held-out accuracy, %", "45_%", "at round", "at the last round", "runs diverged"],
        [name, "50.0 ± 10.0", "10.0 ± 0.0", "50.0 ± 10.0", "0 of 6"],
        ["fedipg", "**70.0 ± 9.0**", "10.0 ± 0.0", "**70.0 ± 9.0**", "1 of 6"],
        ["moon", "diverged", "", "", "1 of 3"],
    ]
    assert tables.ABOUT_BEST in text
    assert [rules[0][at] for at in (1, -1)] == ["validation", "number of settings"]
    assert [row[1] for row in rules[1:]] == [row[1] for row in test[1:]]
    low, high = stats.ttest_rel([71, 80, 89], [50, 60, 70]).confidence_interval(0.95)
    of_fedipg = f"+20.0* [{low:+.1f}, {high:+.1f}], n=3"
    low, high = stats.ttest_rel([30, 20], [60, 70]).confidence_interval(0.95)
    of_moon = f"-40.0 [{low:+.1f}, {high:+.1f}], n=2"
    headings = ["45_%", "worst domain", "at the last round", "seeds left out"]
    assert differ[0] == [f"difference from {name}", *headings]
    assert [row[:2] for row in differ[1:]] == [["fedipg", of_fedipg], ["moon", of_moon]]
    assert [row[3:] for row in differ[1:]] == [[of_fedipg, ""], [of_moon, "1"]]
    assert winner[1:] == [
        ["45_%", "fedipg", "learning_rate=0.1", "10.0 ± 0.0", "80.0 ± 9.0", "70.0 ± 9.0"]
    ]
    written = (folder / "table.md").read_text()
    assert written.startswith("# 100% of $x$\n\n")
    assert rows_of(written)[:4] == [test, differ, rules, winner]
    found = pd.read_csv(folder / "differences.csv")
    assert found.query("method == 'fedipg'")["p_holm"].max() < 0.05
    pairs = [*zip(found["method"], found["other"], strict=True)]
    assert pairs[::3] == [("fedipg", "fed_avg|x"), ("moon", "fed_avg|x"), ("moon", "fedipg")]
    assert found["mean"][0] == pytest.approx(0.2)
    assert found.iloc[-1][["seeds", "seeds_left_out"]].tolist() == [2, 1]


def test_the_grid_has_all_settings(swept: tuple[Path, str]) -> None:
    ((head, *rows),) = rows_of((swept[0] / "grid.md").read_text())
    assert [row[:5] for row in rows] == [
        ["fed_avg\\|x", "45_%", "learning_rate=0.1", "yes", "0 of 3"],
        ["fed_avg\\|x", "45_%", "learning_rate=0.2", "", "0 of 3"],
        ["fedipg", "45_%", "learning_rate=0.1", "yes", "0 of 3"],
        ["fedipg", "45_%", "learning_rate=0.2", "", "1 of 3"],
        ["moon", "45_%", "", "", "1 of 3"],
    ]
    at = head.index("validation of the others, %")
    assert [row[at] for row in rows][3:] == ["99.0 ± 0.0", "25.0 ± 7.1"]


@pytest.mark.parametrize("name", ["table", "grid"])
def test_tables_in_latex(swept: tuple[Path, str], name: str) -> None:
    """Each table has rows of as many cells as columns, and special characters are escaped."""
    text = (swept[0] / f"{name}.tex").read_text()
    assert r"100\% of \$x\$" in text
    assert r"fed\_avg|x" in text
    assert (r"\textbf{70.0 $\pm$ 9.0}" in text) == (name == "table")
    plain = re.sub(r"\\([&%$#_{}]|\^\{\})|^%.*$", "", text, flags=re.MULTILINE)
    assert plain.count("{") == plain.count("}")
    assert not set("%#_~^±") & set(plain)
    places = re.findall(r"\\begin\{tabular\}\{(l+)\}(.*?)\\end\{tabular\}", plain, re.DOTALL)
    assert places
    for columns, inside in places:
        rows = [row for row in inside.split(r"\\") if "&" in row]
        assert {row.count("&") + 1 for row in rows} == {len(columns)}


def test_several_held_out_domains_have_a_mean_and_a_worst(tmp_path: Path) -> None:
    """Both are of each seed."""
    of_domains = {
        "fed_avg|x": {"0": [0.50, 0.60, 0.70], "45_%": [0.40, 0.50, 0.60]},
        "fedipg": {"0": [0.71, 0.80, 0.89], "45_%": [0.79, 0.70, 0.61]},
    }
    results = [
        (name, finished(name, {0.1: of}, held_out))
        for name, by_domain in of_domains.items()
        for held_out, of in by_domain.items()
    ]
    text = tables.write(tmp_path, results, title="", paper={"fedipg": "94.3"})
    test, differ, _, winners = rows_of(text)
    ends = ["at round", "at the last round", "paper"]
    assert test[0][1:] == ["0", "45_%", "mean", "worst domain", *ends]
    tests = ["**70.0 ± 9.0**", "**60.0 ± 9.0**", "**65.0 ± 0.0**", "**57.3 ± 5.5**"]
    assert test[2][1:] == [*tests, "10.0 ± 0.0", "**65.0 ± 0.0**", "94.3"]
    assert differ[0][1:] == [*test[0][1:5], "at the last round"]
    assert [row[:2] for row in winners[1:]] == [["0", "fedipg"], ["45_%", "fedipg"]]
    # A domain may have the name of a column.
    named = tables.selected(results).replace({"held out": {"0": "mean"}})
    assert [each.heading for each in tables.scores(named)][:3] == ["mean", "45_%", "mean"]
    error = Measure("absolute error", higher_is_better=False, is_share=False)
    errors = [(name, msgspec.structs.replace(result, score=error)) for name, result in results]
    text = tables.write(tmp_path, errors, title="", paper={})
    assert "| held-out absolute error, lower is better " in text
    assert "percentage" not in text
    assert rows_of(text)[0][1][3:5] == ["**0.45 ± 0.1**", "**0.5 ± 0.1**"]


def test_networks_of_one_class_are_marked(tmp_path: Path) -> None:
    accuracies = {"fedavg": [0.5, 0.6, 0.7], "fedprox": [0.5, 0.6, 0.8]}
    results = [(name, finished(name, {0.1: of}, "0")) for name, of in accuracies.items()]
    constants = {str(run["seed"]): run["last"]["test_score"] for run in results[0][1].runs}
    constants = {"0": {seed: (0.25, (0.3, of)) for seed, of in constants.items()}}
    text = tables.write(tmp_path, results, title="", paper={}, constants=constants)
    _, one, other, always = rows_of(text)[0]
    assert [row[1].endswith("(one class)") for row in (one, other)] == [True, False]
    assert always[1] == "25.0 ± 0.0"
    (tex,) = re.findall(r"\\begin\{table\}.*", (tmp_path / "table.tex").read_text(), re.DOTALL)
    assert tex.count(r"\begin{tabular}") == 1
    assert tables.ABOUT_ONE in tex[tex.index(r"\caption") : tex.index(r"\begin{tabular}")]


def test_all_evaluations_are_in_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = {name: finished(name, rates, "45_%") for name, rates in GRID.items()}
    monkeypatch.setattr(report.log, "read", lambda folder, done: log_of(GRID[folder.name], "45_%"))
    cells = [
        report.Cell(f"{name} !", "validation", tmp_path / name, result)
        for name, result in results.items()
    ]
    report.write_runs(tmp_path / "runs.csv", cells)
    rows = pd.read_csv(tmp_path / "runs.csv")
    expected = [
        (f"{name} !", name, one.run, one.seed, one.round, domain)
        for name, rates in GRID.items()
        for one in log_of(rates, "45_%")
        for domain in ("0", "45_%")
    ]
    names = ["method", "algorithm", "run", "seed", "round", "domain"]
    assert [*rows[names].itertuples(index=False, name=None)] == expected
    lines = [one for rates in GRID.values() for one in log_of(rates, "45_%") for _ in range(2)]
    for name in ("test_score", "validation_score", "bytes", "seconds", "diverged"):
        assert rows[name].tolist() == [one[name] for one in lines]
    assert rows["learning_rate"].tolist() == [one.hyper["learning_rate"] for one in lines]
    # A setting with the name of another column.
    assert rows["set.split"].notna().equals(rows["algorithm"] == "fedipg")
    assert (rows["split"] == "test").equals(rows["domain"] == "45_%")
    assert set(rows["score"]) == {0.25}
    assert set(rows["train_metrics.invariance"]) == {0.5}
    is_best = (rows.algorithm != "moon") & (rows.learning_rate == 0.1) & (rows["round"] == 10)
    assert (rows["selected"]).equals(is_best)
    picked = rows["picked_by"] == "validation last oracle"
    assert picked.equals((rows["round"] == 10) & ~rows["diverged"])
    assert not any("by_round" in name or name == "hyper" for name in rows)


def test_a_study_writes_the_same_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its columns are those of the paper, here at the stop, which some seeds do not reach."""
    results = {
        name: finished(name, {0.1: GRID[name][0.1]}, "45_%") for name in ("fed_avg|x", "fedipg")
    }
    monkeypatch.setattr(report.log, "read", lambda folder, done: [])
    chosen = config.of(watch_examples=10, rounds=10)
    rows = []
    for name, result in results.items():
        picked = selection.choose(name, result)
        assert picked is not None
        logs = [[run.last] for run in picked.runs]
        cell = study.CellResult("45_%", picked.runs, logs, result, tmp_path / name)
        rows.append(study.RowResult(study.Row(name, ()), chosen, [cell]))
    paper = fl_games.PAPER
    text = study.write_tables(tmp_path / "methods", paper, paper.studies["methods"], "digits", rows)
    test, differ, winners = rows_of(text)
    place = test[0].index("test, %")
    assert [row[place] for row in test[1:]] == ["50.0 ± 10.0", "**70.0 ± 9.0**", "75"]
    assert differ[0][:3] == ["difference from fed_avg\\|x", "test, %", "worst domain, %"]
    assert winners[1][:2] == ["45_%", "fedipg"]
    endings = [".md", ".tex", "_differences.csv", "_grid.md", "_grid.tex", "_runs.csv"]
    assert {path.name for path in tmp_path.iterdir()} == {f"methods{name}" for name in endings}
    # A row in which a seed diverged, in a study of methods and in one of other rows.
    moon = finished("moon", GRID["moon"], "45_%")
    rows.append(
        study.RowResult(study.Row("moon", ()), chosen, [study.CellResult("45_%", [], [], moon)])
    )
    found = differences.table(study.scores_of(paper.studies["methods"], rows))
    of_moon = found.query("method == 'moon' and other == 'fed_avg|x'")
    assert [*zip(of_moon.seeds, of_moon.seeds_left_out, strict=True)] == [(2, 1), (2, 1)]
    assert study.scores_of(paper.studies["classes"], rows) == []
