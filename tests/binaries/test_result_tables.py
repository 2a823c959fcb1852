"""Tables: what is bold, what differs, and the files of a sweep or study."""

import math
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np
import pandas as pd
import pytest
from scipy import stats

from fedjax_inv_experiments import config
from fedjax_inv_experiments.assembly.metrics import Measure
from fedjax_inv_experiments.folder import records, selection
from fedjax_inv_experiments.folder.records import (
    Domain,
    Line,
    Result,
    RunRecord,
    RunResult,
    StopRecord,
)
from fedjax_inv_experiments.folder.selection import RULES
from fedjax_inv_experiments.report import differences, forms, report, runs_csv, tables
from fedjax_inv_experiments.report.tables import TableCell
from fedjax_inv_experiments.studies import fl_games, row_runs, study
from fedjax_inv_experiments.studies.rows import Row
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
        runs.append(RunResult(*of, stops=[StopRecord(0.6, None)]))
    settings = {"split": True} if method == "fedipg" else {}
    cell = records.CellRecord(
        method, settings, held_out, [RunRecord(one.seed, one.hyper) for one in runs]
    )
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
    cells = [
        TableCell(name, finished(name, rates, "45_%"), name={"fedipg": "FedIPG"}.get(name, ""))
        for name, rates in GRID.items()
    ]
    main = tables.main_table(cells)
    text = tables.write(folder / "table", cells, main, title="100% of $x$")
    return folder, text


def test_a_sweep_says_what_is_best(swept: tuple[Path, str]) -> None:
    folder, text = swept
    test, differ, rules, winner = rows_of(text)
    name = "fed_avg\\|x"
    assert test == [
        ["held-out accuracy, %", "45_%", "at the last round"],
        [name, "50.0 ± 10.0", "50.0 ± 10.0"],
        ["fedipg", "**70.0 ± 9.0**", "**70.0 ± 9.0**"],
        ["moon", "diverged", ""],
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


def test_a_table_for_a_paper(swept: tuple[Path, str]) -> None:
    """It has no rounds, the methods' own names, and special characters are escaped."""
    text = (swept[0] / "table.tex").read_text()
    assert r"100\% of \$x\$" in text
    for row in (
        r"method & 45\_\% \\",
        r"fed\_avg|x & 50.0 $\pm$ 10.0 \\",
        r"FedIPG & \textbf{70.0 $\pm$ 9.0} \\",
        r"moon & diverged \\",
    ):
        assert row in text.splitlines()


def numbered(count: int, width: int = 11) -> pd.DataFrame:
    """A table of a name and some columns of scores."""
    scores = {
        f"domain {at}": [forms.BOLD.format("70.0 ± 9.0"), "61.5 ± 10.2"] for at in range(count)
    }
    return pd.DataFrame({"method": ["FedAvg", "V-REx inside"[:width]], **scores})


@pytest.mark.parametrize(
    ("count", "shown", "kind"),
    [(1, 1, "table"), (3, 3, "table"), (7, 7, "table*"), (20, 2, "table")],
)
def test_a_table_fits_into_a_column_or_a_page(
    tmp_path: Path, count: int, shown: int, kind: str
) -> None:
    forms.write_latex(tmp_path / "x.tex", [numbered(count), numbered(2)], "About it.")
    text = (tmp_path / "x.tex").read_text()
    assert rf"\begin{{{kind}}}[t]" in text
    assert text.count("domain ") == shown
    # Of the last table, the columns that fit.
    forms.write_latex(tmp_path / "x.tex", [numbered(count)], "About it.")
    assert 1 <= (tmp_path / "x.tex").read_text().count("domain ") <= count


@pytest.mark.skipif(not shutil.which("pdflatex"), reason="needs pdflatex")
@pytest.mark.parametrize("count", [1, 3, 4, 5, 7, 9])
def test_tables_are_as_narrow_as_they_say(tmp_path: Path, count: int) -> None:
    """LaTeX compiles them without a box that is too wide."""
    forms.write_latex(tmp_path / "x.tex", [numbered(count)], "50% of $x$ ± ~1 & more")
    page = [
        r"\documentclass[twocolumn]{article}",
        r"\usepackage{booktabs}",
        r"\setlength{\textwidth}{469pt}\setlength{\columnsep}{10pt}",
        r"\begin{document}\input{x.tex}\ref{tab:" + tmp_path.name.lower().replace("_", "-") + "-x}",
        r"\end{document}",
    ]
    (tmp_path / "page.tex").write_text("\n".join(page))
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "page.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]
    assert "Overfull" not in done.stdout


def test_several_held_out_domains_have_a_mean_and_a_worst(tmp_path: Path) -> None:
    """Both are of each seed."""
    of_domains = {
        "fed_avg|x": {"0": [0.50, 0.60, 0.70], "45_%": [0.40, 0.50, 0.60]},
        "fedipg": {"0": [0.71, 0.80, 0.89], "45_%": [0.79, 0.70, 0.61]},
    }
    cells = [
        TableCell(name, finished(name, {0.1: of}, held_out))
        for name, by_domain in of_domains.items()
        for held_out, of in by_domain.items()
    ]
    numbers = {"paper: mean": {"fedipg": "94.3"}, "paper": {"fedipg": "90"}}
    main = tables.main_table(cells, numbers=numbers)
    assert main is not None
    test, differ, _, winners = rows_of(tables.write(tmp_path / "table", cells, main))
    ends = ["worst", "at the last round", "paper"]
    assert test[0][1:] == ["0", "45_%", "mean", "paper: mean", *ends]
    tests = ["**70.0 ± 9.0**", "**60.0 ± 9.0**", "**65.0 ± 0.0**", "94.3", "**57.3 ± 5.5**"]
    assert test[2][1:] == [*tests, "**65.0 ± 0.0**", "90"]
    assert differ[0][1:] == ["0", "45_%", "mean", "worst", "at the last round"]
    # A table for a paper, and a narrower one.
    headings = [[*each.columns][1:] for each in main.latex]
    means = ["mean", "paper: mean", "worst", "paper"]
    assert headings == [["0", "45_%", *means], ["0", "45_%", *means], means]
    # Each further rule has a column; with one domain, the first one names its column.
    main = tables.main_table(cells, rules=["validation", "oracle"])
    assert main is not None
    assert [*main.table][5:] == ["mean by oracle", "at the last round"]
    main = tables.main_table(cells[::2], rules=["validation", "oracle"])
    assert main is not None
    headings = ["training domains", "oracle (looks at the test)", "at the last round"]
    assert [*main.table][1:] == headings
    assert [row[:2] for row in winners[1:]] == [["0", "fedipg"], ["45_%", "fedipg"]]
    # A domain may have the name of a column.
    named = tables.selected(cells).replace({"held out": {"0": "mean"}})
    assert [each.heading for each in tables.scores(named)][:3] == ["mean", "45_%", "mean"]
    error = Measure("absolute error", higher_is_better=False, is_share=False)
    errors = [
        cell._replace(result=msgspec.structs.replace(cell.result, score=error)) for cell in cells
    ]
    text = tables.write(tmp_path / "table", errors, tables.main_table(errors))
    assert "| held-out absolute error, lower is better " in text
    assert "percentage" not in text
    assert rows_of(text)[0][1][3:5] == ["**0.45 ± 0.1**", "**0.5 ± 0.1**"]


def test_networks_of_one_class_are_marked(tmp_path: Path) -> None:
    accuracies = {"fedavg": [0.5, 0.6, 0.7], "fedprox": [0.5, 0.6, 0.8]}
    results = {name: finished(name, {0.1: of}, "0") for name, of in accuracies.items()}
    tests = {str(run.seed): run.last.test_score for run in results["fedavg"].runs}
    constant = {seed: (0.25, (0.3, of)) for seed, of in tests.items()}
    cells = [TableCell(name, result, constant=constant) for name, result in results.items()]
    text = tables.write(tmp_path / "table", cells, tables.main_table(cells))
    _, one, other, always = rows_of(text)[0]
    assert [row[1].endswith("(one class)") for row in (one, other)] == [True, False]
    assert always[1] == "25.0 ± 0.0"
    (tex,) = re.findall(r"\\begin\{table\}.*", (tmp_path / "table.tex").read_text(), re.DOTALL)
    assert tex.count(r"\begin{tabular}") == 1
    assert tables.ABOUT_ONE in tex[tex.index(r"\caption") : tex.index(r"\begin{tabular}")]


def test_a_method_with_other_test_examples_has_empty_differences(tmp_path: Path) -> None:
    accuracies = {"a": [0.5, 0.6, 0.7], "b": [0.5, 0.7, 0.8], "c": [0.6, 0.65, 0.7]}
    cells = [
        TableCell(name, finished(name, {0.1: of}, "0"), tests=(("angles", name == "b"),))
        for name, of in accuracies.items()
    ]
    text = tables.write(tmp_path / "table", cells, tables.main_table(cells), baseline="c")
    _, differ, *_ = rows_of(text)
    assert [(row[0], bool(row[1])) for row in differ[1:]] == [("a", True), ("b", False)]
    assert differ[0][0] == "difference from c"
    assert "b is not compared with c" in text
    assert "--angles" in text
    (best,) = [table for table in rows_of(text) if table[0][0].startswith("best over methods")]
    assert best[1][1] == "c"  # not b, whose validation is best


def test_all_evaluations_are_in_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = {name: finished(name, rates, "45_%") for name, rates in GRID.items()}
    monkeypatch.setattr(
        runs_csv.log, "read", lambda folder, done: log_of(GRID[folder.name], "45_%")
    )
    cells = [
        TableCell(f"{name} !", result, folder=tmp_path / name) for name, result in results.items()
    ]
    runs_csv.write(tmp_path / "runs.csv", cells)
    rows = pd.read_csv(
        tmp_path / "runs.csv", float_precision="round_trip"
    )  # the default of pandas 3
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
    # Every table is a pivot of this file: the test scores of each rule's choice.
    test = rows[rows["split"] == "test"]
    for column in tables.by_rule(cells):
        rule = column.heading.split()[0]
        chosen = test[test["selected_by"].fillna("").str.contains(rf"\b{rule}\b")]
        scores = chosen.pivot(index="seed", columns="method", values="test_score")
        expected = column.scores.dropna(axis=1, how="all")
        assert sorted(scores) == sorted(expected)
        for name in expected:
            np.testing.assert_allclose(scores[name], expected[name])


def test_a_study_writes_the_same_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its columns are those of the paper, here at the stop, which some seeds do not reach."""
    results = {
        name: finished(name, {0.1: GRID[name][0.1]}, "45_%") for name in ("fed_avg|x", "fedipg")
    }
    monkeypatch.setattr(runs_csv.log, "read", lambda folder, done: [])
    chosen = config.of(watch_examples=10, rounds=10)
    rows = []
    for name, result in results.items():
        picked = selection.choose(name, result)
        assert picked is not None
        logs = [[run.last] for run in picked.runs]
        cell = row_runs.CellResult("45_%", picked.runs, logs, result, tmp_path / name)
        rows.append(row_runs.RowResult(Row(name, ()), chosen, [cell]))
    paper = fl_games.PAPER
    text = study.write_tables(tmp_path / "methods", paper, paper.studies["methods"], "digits", rows)
    test, differ, *_ = rows_of(text)
    place = test[0].index("test, %")
    assert [row[place] for row in test[1:]] == ["50.0 ± 10.0", "**70.0 ± 9.0**", "75"]
    assert differ[0][:3] == ["difference from fed_avg\\|x", "test, %", "worst domain, %"]
    endings = [".md", ".tex", "_differences.csv", "_grid.md", "_runs.csv"]
    assert {path.name for path in tmp_path.iterdir()} == {f"methods{name}" for name in endings}
    # A row in which a seed diverged, in a study of methods and in one of other rows.
    moon = finished("moon", GRID["moon"], "45_%")
    rows.append(
        row_runs.RowResult(Row("moon", ()), chosen, [row_runs.CellResult("45_%", [], [], moon)])
    )
    found = differences.table(study.columns_of(paper.studies["methods"], rows))
    of_moon = found.query("method == 'moon' and other == 'fed_avg|x'")
    assert [*zip(of_moon.seeds, of_moon.seeds_left_out, strict=True)] == [(2, 1), (2, 1)]
    assert study.columns_of(paper.studies["classes"], rows) == []


ROWS = [("a,b", 1.5, None), ("50% of $x_1$", "diverged", "")]


def test_tables_in_all_forms() -> None:
    frame = pd.DataFrame(ROWS, columns=["run", "test, %", "paper"])
    assert forms.markdown(frame).splitlines() == [
        "| run          | test, %   | paper   |",
        "|--------------|-----------|---------|",
        "| a,b          | 1.5       |         |",
        "| 50% of $x_1$ | diverged  |         |",
    ]
    assert forms.markdown(frame, align="right").splitlines()[2:] == [
        "| a,b          |       1.5 |         |",
        "| 50% of $x_1$ |  diverged |         |",
    ]


def test_a_bar_of_a_name_is_no_border() -> None:
    frame = pd.DataFrame({"x|y": ["a|b", "c"], "n": [1, 2.5]})
    head, _, line = forms.markdown(frame).splitlines()[:3]
    assert head.startswith("| x\\|y ")
    assert line.startswith("| a\\|b ")
    assert line.replace("\\|", "").count("|") == 3


@pytest.mark.parametrize(
    ("word", "shown"),
    [
        ("--seeds=0,1", "--seeds=0,1"),
        ("--dataset=/data/mine/x.npz", "--dataset=x.npz"),
        ("--dataset=~/x.csv", "--dataset=x.csv"),
        ("--dataset=../x.csv", "--dataset=x.csv"),
        ("--set=penalty=0.1", "--set=penalty=0.1"),
        ("--resume", None),
    ],
)
def test_a_command_names_no_place(word: str, shown: str | None) -> None:
    expected = ["fedjax-inv paper cafe", *([shown] if shown else [])]
    assert report.command(["paper", "cafe", word]) == " ".join(expected)
