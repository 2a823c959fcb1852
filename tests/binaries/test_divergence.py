"""Diverged runs are shown by setting: in progress, in all tables and in errors; they never win."""

import io
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedjax_inv_experiments import config
from fedjax_inv_experiments.folder import divergence, selection
from fedjax_inv_experiments.folder.progress import ProgressLines
from fedjax_inv_experiments.folder.records import (
    CellRecord,
    Domain,
    Line,
    Result,
    RunRecord,
    RunResult,
    StopRecord,
)
from fedjax_inv_experiments.report import forms, tables
from fedjax_inv_experiments.studies import fedipg, row_runs, study
from fedjax_inv_experiments.studies.rows import Row
from runs import line

# Learning rate -> the seeds that diverged, and the validation accuracy of all seeds.
Rates = dict[float, tuple[set[int], float]]
RATES: Rates = {
    0.01: (set(), 0.6),
    0.1: ({1}, 0.8),
    1.0: ({0, 1, 2}, 0.9),
}
ALL: Rates = {0.1: ({0, 1, 2}, 0.9), 1.0: ({0, 1, 2}, 0.9)}
RULE = "A setting with a diverged seed is never selected. Remedy: lower --learning_rate, clip the "


def lines(rates: Rates) -> list[Line]:
    """The evaluation of all runs, which differ in learning rate and seed."""
    return [
        line(
            5,
            accuracy,
            run=run,
            seed=seed,
            hyper={"learning_rate": rate, "proximal": 0.0},
            train_loss=None if seed in gone else 2.0,
            diverged=seed in gone,
            domains={
                "0": Domain(accuracy, None, 4, "validation"),
                "80": Domain(accuracy, None, 4, "test"),
            },
        )
        for run, (rate, seed, gone, accuracy) in enumerate(
            (rate, seed, *of) for rate, of in rates.items() for seed in range(3)
        )
    ]


def result(rates: Rates, stops: list[StopRecord] | None = None) -> Result:
    """A cell with these runs, each with all its evaluations selected."""
    runs = [
        RunResult(one.seed, one.hyper, one.diverged, {"validation": one, "last": one}, one, stops)
        for one in lines(rates)
    ]
    return Result(
        CellRecord("fedavg", {}, "80", [RunRecord(run.seed, run.hyper) for run in runs]), runs
    )


def test_the_text_names_the_settings() -> None:
    printed = (
        "4 of 9 runs diverged: learning_rate=0.1 (1 of 3 seeds), learning_rate=1 (3 of 3 seeds)"
    )
    assert divergence.text(result(RATES).runs) == printed
    assert divergence.text(lines({0.1: (set(), 0.5)})) == ""
    assert divergence.text(lines({0.1: ({2}, 0.5)})) == "1 of 3 runs diverged"
    many = {float(rate): ({0}, 0.5) for rate in range(1, 10)}
    printed = divergence.text(lines(many))
    assert printed.endswith("learning_rate=6 (1 of 3 seeds), 3 more settings")


@pytest.mark.parametrize("is_terminal", [False, True])
def test_progress_is_of_the_runs_that_have_not_diverged(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: is_terminal)
    monkeypatch.setattr(sys, "stderr", screen)
    seen: Any = SimpleNamespace(new=[])
    fitted: Any = SimpleNamespace(
        round=0, is_over=False, plan=SimpleNamespace(rounds=20, is_compiled=True)
    )
    progress = ProgressLines("fedavg", seen)
    progress.begin(fitted)
    first = lines({0.01: (set(), 0.6), 0.1: (set(), 0.9), 1.0: (set(), 0.9)})
    for fitted.round, seen.new in (
        (0, first),
        *((done, lines(RATES)) for done in (5, 10)),
        *((done, lines(ALL)) for done in (15, 20)),
    ):
        progress.evaluated(fitted)
    progress.end(fitted)
    text = screen.getvalue()
    settings = divergence.text(lines(RATES))
    assert text.count(f"fedavg: round 5: {settings}; the numbers below are of the others\n") == 1
    assert "round 10:" not in text  # nothing has changed
    assert f"fedavg: round 15: {divergence.text(lines(ALL))}; {divergence.REMEDY}\n" in text
    if is_terminal:
        assert "valid=0.680" in text  # (3 x 0.6 + 2 x 0.8) / 5
        assert "diverged=4 of 9" in text
    else:
        printed = "valid 0.680, test 0.680, loss 2.000, mean of 5 runs, 4 of 9 runs diverged, 1.0 s"
        assert f"fedavg: round 10 of 20, {printed}" in text
        assert "fedavg: round 20 of 20, 6 of 6 runs diverged, 1.0 s\n" in text


def entries(text: str) -> list[list[str]]:
    """The rows of a table in Markdown, with its headings."""
    rows = [row.strip("|").split("|") for row in text.splitlines() if row.startswith("|")]
    return [[entry.strip() for entry in row] for row in rows if not row[0].startswith("--")]


def test_a_diverged_run_never_wins() -> None:
    """Nor does a setting of which some seeds diverged, although its accuracy is the best."""
    for rule in ("validation", "last"):
        chosen = selection.choose("fedavg", result(RATES), rule)
        assert chosen is not None
        assert chosen.hyper == {"learning_rate": 0.01}
        assert not any(run.diverged for run in chosen.runs)
    assert selection.choose("fedavg", result({0.1: ({1}, 0.8)})) is None


def test_each_table_has_a_row_for_what_diverged(tmp_path: Path) -> None:
    stops = [StopRecord(0.6, None)]
    cells = [
        tables.TableCell("good", result(RATES, stops)),
        tables.TableCell("bad", result(ALL, stops)),
    ]
    printed = tables.write(tmp_path / "table", cells, tables.main_table(cells))
    text = (tmp_path / "table.md").read_text()
    by_heading = {
        rows[0][0]: {row[0]: dict(zip(rows[0], row, strict=True)) for row in rows[1:]}
        for rows in map(entries, text.split("\n\n"))
        if rows and "setting" not in rows[0]
    }
    names = [
        *("held-out accuracy, %", "held-out accuracy, % by rule of selection"),
        *("accuracy by domain, %", "at the stop", "method"),
    ]
    assert list(by_heading) == names
    assert all(list(rows) == ["good", "bad"] for rows in by_heading.values())
    first, rules, domains, at_stop, choices = (by_heading[name] for name in names)
    assert choices["good"]["runs diverged"] == "4 of 9"
    assert choices["bad"]["runs diverged"] == "6 of 6"
    assert (
        first["bad"]["80"]
        == rules["bad"]["validation"]
        == domains["bad"]["0"]
        == at_stop["bad"]["stopped"]
        == "diverged"
    )
    assert (choices["good"]["selected"], choices["bad"]["selected"]) == (
        "learning_rate=0.01",
        "diverged",
    )
    for written in (text, printed):
        assert f"good, held out 80: {divergence.text(lines(RATES))}.\n" in written
        assert f"bad, held out 80: {divergence.text(lines(ALL))}.\n{RULE}" in written


def test_a_domain_without_an_example_has_an_empty_column() -> None:
    found = {"0": Domain(0.0, None, 0, "validation"), "80": Domain(0.5, None, 4, "test")}
    picked = line(5, 0.5, domains=found, worst_score=0.5)
    good = result({0.1: (set(), 0.5)})
    good |= {"runs": [good.runs[0] | {"by_rule": {"validation": picked}}]}
    rows = tables.selected([tables.TableCell("good", good), tables.TableCell("bad", result(ALL))])
    assert tables.domains_table(rows).to_numpy().tolist() == [
        ["good", "", "50.0", "50.0"],
        ["bad", "diverged", "diverged", ""],
    ]


def test_the_tables_of_papers_count_what_diverged() -> None:
    def finished(rates: Rates, label: str = "x") -> row_runs.RowResult:
        of = result(rates)
        picked = selection.choose("x", of)
        runs = picked.runs if picked else []
        cell = row_runs.CellResult("80", runs, [[] for _ in runs], of)
        return row_runs.RowResult(Row(label, ()), config.of(), [cell])

    def row(rates: Rates) -> dict[str, Any]:
        return study.line(fedipg.PAPER, of_study, "digits", finished(rates))

    rows = [finished(ALL, "bad"), finished(RATES, "good")]
    of_study = fedipg.PAPER.studies["colours"]
    shown = study.table(fedipg.PAPER, of_study, "digits", rows).table
    headings, bad, good = entries(forms.markdown(shown))
    order = ["digits", "selected by", "training domains, %", "test, %"]
    assert [name for name in headings if name in order] == order
    assert (bad[-1], good[-1]) == ("6 of 6", "4 of 9")

    assert row(RATES)["runs diverged"] == "4 of 9"
    assert row(ALL)["runs diverged"] == "6 of 6"
    assert row(ALL)["test, %"] == "diverged"
    assert "runs diverged" not in row({0.1: (set(), 0.5)})
