"""The studies of FL Games: their rows are valid runs, and tables agree with the results of runs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pandas as pd
import pytest

from fedjax_inv.plan import Plan
from fedjax_inv_experiments import command_line
from fedjax_inv_experiments.report import forms
from fedjax_inv_experiments.studies import fl_games, row_runs, study
from fedjax_inv_experiments.studies.rows import Row
from runs import no_figures, with_flags
from runs import options as options_of

SMALL = (
    *("--rounds=4", "--eval_every=2", "--seeds=0,1", "--widths=8", "--cut=0", "--batch_size=32"),
    *("--watch_examples=200", "--chunk=1,1"),
    *("--stop_below=0.99,0.001", "--warm_start=3"),
)


def entries(table: str) -> list[list[str]]:
    """The cells of a table's rows, without headers and bold marks."""
    return [
        [cell.strip(" *") for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]
    ]


def test_rows_of_the_methods_are_what_they_are_called() -> None:
    chosen = {
        row.label: command_line.of_arguments(row.flags)
        for row in fl_games.methods("colored_dsprites")
    }
    assert len(chosen) == 12
    for label, settings in chosen.items():
        if label.startswith("Fed"):
            assert settings.method.algorithm != ("fl_games",)
            assert settings.evaluation.stop_below == ()
            # Every baseline takes as many steps as a player.
            assert settings.training.rounds * settings.training.local_steps == 400
        else:
            names = {setting.split("=")[0] for setting in settings.method.set}
            assert settings.method.algorithm == ("fl_games",)
            assert ("learned" in names) == label.startswith("V")
            assert ("memory" in names) == ("SMOOTH" in label)
            assert ("fast" in names) == ("FAST" in label)
            assert f"play={label.split('-')[1]}" in settings.method.set
            assert len(settings.network.widths) == 2 + label.startswith("V")
            assert settings.training.learning_rate == (
                (9e-4,) if label.startswith("V") else (9.5e-4,)
            )


def test_thresholds_follow_the_classes_and_the_clients() -> None:
    def first(rows_of: Callable[[str], list[Row]]) -> dict[str, float]:
        return {
            row.label: command_line.of_arguments(row.flags).evaluation.stop_below[0]
            for row in rows_of("colored_mnist")
        }

    # The paper's training accuracy at the stop is near 80% with five and ten classes.
    thresholds = first(fl_games.classes)
    for label, threshold in thresholds.items():
        assert threshold == (0.6 if "-2-" in label else 0.8), label
    assert len(thresholds) == 6
    for label, threshold in first(fl_games.clients).items():
        assert threshold == (0.75 if label.endswith("-10-clients") else 0.6), label


@pytest.mark.slow
def test_a_small_study_is_run_once_and_shows_the_stop_and_the_end(tmp_path: Path) -> None:
    words = ("--study=methods", "--data=colored_digits", "--rows=FedAvg,F-parallel-SMOOTH")
    options = options_of(fl_games.PAPER, *SMALL, *words, f"--run_dir={tmp_path}")
    printed = study.run_all(fl_games.PAPER, options)
    folder = tmp_path / "colored_digits"
    text = (folder / "methods_some.md").read_text().split("\n\n")[0]
    assert text in printed
    *shown, constant, optimal = entries(text)
    assert (constant[0], optimal[0]) == ("most frequent class", "optimal")
    assert 40 < float(constant[4].split()[0]) < 60
    for row, label in zip(shown, ("FedAvg", "F-parallel-SMOOTH"), strict=True):
        (path,) = (folder / label).glob("*/result.json")
        tests = [
            100 * run["stops"][0]["test_score"] for run in json.loads(path.read_text())["runs"]
        ]
        assert row[:3] == [label, "2/2 below 0.99", "3.0 ± 0.0"]
        assert row[4] == f"{np.mean(tests):.1f} ± {np.std(tests, ddof=1):.1f}"
    assert (folder / "methods_some_by_round.png").read_bytes().startswith(b"\x89PNG")
    record = json.loads((folder / "methods_some.json").read_text())
    assert record["command"].startswith("fedjax-inv paper fl_games --study=methods")
    assert record["seeds"] == [0, 1]

    # The same command again reads what is there.
    with pytest.MonkeyPatch.context() as patch, no_figures():
        patch.setattr(Plan, "train", None)
        assert study.run_all(fl_games.PAPER, options) == printed
        rows = study.rows_of(fl_games.PAPER, "colored_digits", options)
        chosen = row_runs.configs(rows, folder, options.overrides)
        baseline, game = (
            row_runs.result_of(row, one, Path(one.output.run_dir))
            for row, one in zip(rows, chosen, strict=True)
        )
    for one in (baseline, game):
        for run, lines in zip(one.only.runs, one.only.logs, strict=True):
            assert [line.round for line in lines] == [0, 2, 4]
            assert {line.seed for line in lines} == {run.seed}

    def of(one: row_runs.RowResult, runs: list[Any]) -> row_runs.RowResult:
        return one._replace(cells=[one.only._replace(runs=runs)])

    # As if the second threshold, which nothing falls below, were the first and only one.
    runs = [msgspec.structs.replace(run, stops=run.stops[1:]) for run in game.only.runs]
    without = with_flags(baseline.config, stop_below=(), warm_start="clients")
    done = [of(game, runs), baseline._replace(config=without)]

    def table_of(data: str, rows: list[row_runs.RowResult]) -> pd.DataFrame:
        return study.table(fl_games.PAPER, fl_games.PAPER.studies["methods"], data, rows).table

    first, second, *_ = entries(forms.markdown(table_of("colored_digits", done)))
    third, *_ = entries(forms.markdown(table_of("colored_digits", [of(game, [])])))
    assert first[1:6] == ["0/2 below 0.001", "> 4", "", "", ""]
    assert second[1:3] == ["at the end", "4.0 ± 0.0"]
    for row, one in ((first, game), (second, baseline)):
        last = study.percents(one.last)
        assert row[6] == f"{np.mean(last):.1f} ± {np.std(last, ddof=1):.1f}"
    assert second[4] == second[6]
    assert third[1] == "none"  # no run diverged, so the rule picked none
    # The paper's numbers stand under their headings, whatever a row has of its own.
    assert table_of("spurious_cifar10", done)["paper: test"][0] == "54.71±2.13"
    assert table_of("spurious_cifar10", [of(game, [])])["paper: rounds"][0] == "217.6"


@pytest.mark.parametrize("study_name", ["classes", "clients", "steps"])
def test_rows_of_figures_know_their_place(study_name: str) -> None:
    rows = fl_games.PAPER.studies[study_name].rows("colored_mnist")
    assert len({(row.series, row.x) for row in rows}) == len(rows)
    for row in rows:
        assert row.label == f"{row.series}-{row.x}-{study_name}"
        flips = command_line.of_arguments(row.flags).environment.flips
        if study_name == "clients":
            assert str(len(flips)) == row.x.removesuffix("_uneven")
