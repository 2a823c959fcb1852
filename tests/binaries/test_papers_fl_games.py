"""The studies of FL Games: their rows are valid runs, and tables agree with the results of runs."""

import contextlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import pytest
from absl import flags

from fedjax_inv_experiments import tables
from fedjax_inv_experiments.experiment import command_line, config
from fedjax_inv_experiments.running import loop
from fedjax_inv_experiments.studies import fl_games, study
from fedjax_inv_experiments.studies.study import Row
from runs import no_figures

SMALL = (
    *("--rounds=4", "--eval_every=2", "--seeds=0,1", "--widths=8", "--cut=0", "--batch_size=32"),
    *("--watch_examples=200", "--client_chunk=1", "--run_chunk=1"),
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
            assert settings.algorithm != ("fl_games",)
            assert settings.stop_below == ()
            # Every baseline takes as many steps as a player.
            assert settings.rounds * settings.local_steps == 400
        else:
            names = {setting.split("=")[0] for setting in settings.settings}
            assert settings.algorithm == ("fl_games",)
            assert ("learned" in names) == label.startswith("V")
            assert ("memory" in names) == ("SMOOTH" in label)
            assert ("fast" in names) == ("FAST" in label)
            assert f"play={label.split('-')[1]}" in settings.settings
            assert len(settings.widths) == 2 + label.startswith("V")
            assert settings.learning_rate == ((9e-4,) if label.startswith("V") else (9.5e-4,))


def test_thresholds_follow_the_classes_and_the_clients() -> None:
    def first(rows_of: Callable[[str], list[Row]]) -> dict[str, float]:
        return {
            row.label: command_line.of_arguments(row.flags).stop_below[0]
            for row in rows_of("colored_mnist")
        }

    # The paper's training accuracy at the stop is near 80% with five and ten classes.
    thresholds = first(fl_games.classes)
    for label, threshold in thresholds.items():
        assert threshold == (0.6 if "-2-" in label else 0.8), label
    assert len(thresholds) == 6
    for label, threshold in first(fl_games.clients).items():
        assert threshold == (0.75 if label.endswith("-10-clients") else 0.6), label


class StudyOutput(NamedTuple):
    """A study's options, what it printed, and the lines of its progress."""

    options: study.Options
    text: str
    progress: list[str]


@pytest.fixture(scope="module")
def study_output(tmp_path_factory: pytest.TempPathFactory) -> StudyOutput:
    """A part of a study, by its flags: a game that stops and a baseline."""
    folder = tmp_path_factory.mktemp("study")
    options = parsed(
        *SMALL,
        *("--study=methods", "--data=colored_digits", "--rows=FedAvg,F-parallel-SMOOTH"),
        f"--run_dir={folder}",
    )
    with contextlib.redirect_stderr(io.StringIO()) as progress:
        text = study.run_all(fl_games.PAPER, options)
    return StudyOutput(options, text, progress.getvalue().splitlines())


def parsed(*arguments: str) -> study.Options:
    """The options of a command line."""
    values = flags.FlagValues()
    fl_games.BINARY.define(values)
    return fl_games.BINARY.read(["", *arguments], values)


def finished(study_output: StudyOutput) -> list[study.RowResult]:
    """The baseline and the game, which are not run again."""
    (data,), folder = study_output.options.data, study_output.options.folder
    rows = study.labelled(fl_games.methods(data), study_output.options.rows)

    def refuse(*arguments: Any) -> NoReturn:
        raise AssertionError("ran what was finished")

    with pytest.MonkeyPatch.context() as patch, no_figures():
        patch.setattr(loop, "run_cell", refuse)
        chosen = study.configs(fl_games.PAPER, rows, folder / data, SMALL)
        return [study.run(row, each) for row, each in zip(rows, chosen, strict=True)]


@pytest.mark.slow
def test_a_study_shows_the_stop_and_the_end(
    study_output: StudyOutput,
) -> None:
    options, text_of_all, _ = study_output
    folder = options.folder / "colored_digits"
    text = (folder / "methods_some.md").read_text().split("\n\n")[0]
    assert text in text_of_all
    baseline, game, optimal = entries(text)
    (path,) = (folder / "F-parallel-SMOOTH").glob("*/result.json")
    runs = json.loads(path.read_text())["runs"]
    tests = [100 * run["stops"][0]["test_score"] for run in runs]
    assert game[:3] == ["F-parallel-SMOOTH", "2/2 below 0.99", "3.0 ± 0.0"]
    assert game[4] == f"{np.mean(tests):.1f} ± {np.std(tests, ddof=1):.1f}"
    (path,) = (folder / "FedAvg").glob("*/result.json")
    runs = json.loads(path.read_text())["runs"]
    tests = [100 * run["last"]["test_score"] for run in runs]
    assert baseline[:3] == ["FedAvg", "2/2 below 0.99", "3.0 ± 0.0"]
    assert optimal[0] == "optimal"
    assert (folder / "methods_some_by_round.png").read_bytes().startswith(b"\x89PNG")
    # The flags that are given go to all rows.
    for path in folder.glob("*/*/config.json"):
        record = json.loads(path.read_text())["flags"]
        assert (record["rounds"], record["seeds"], record["widths"]) == (4, [0, 1], [8])


@pytest.mark.slow
def test_rows_that_did_not_stop_and_rows_without_a_stop(
    study_output: StudyOutput, tmp_path: Path
) -> None:
    baseline, game = finished(study_output)
    methods = fl_games.PAPER.studies["methods"]
    assert [game.row.label, baseline.row.label] == ["F-parallel-SMOOTH", "FedAvg"]
    for one in (game, baseline):
        for run, lines in zip(one.only.runs, one.only.logs, strict=True):
            assert [line["round"] for line in lines] == [0, 2, 4]
            assert {line["seed"] for line in lines} == {run["seed"]}

    def of(one: study.RowResult, runs: list[Any]) -> study.RowResult:
        return one._replace(cells=[one.only._replace(runs=runs)])

    # As if the second threshold, which nothing falls below, were the first and only one.
    runs = [run | {"stops": run["stops"][1:]} for run in game.only.runs]
    assert [run["stops"][0]["round"] for run in runs] == [None, None]
    without = config.changed(baseline.config, stop_below=(), warm_start="clients")
    done = [of(game, runs), baseline._replace(config=without), of(game, [])]
    text = tables.text(study.table(fl_games.PAPER, methods, "colored_digits", done))
    first, second, third, _ = entries(text)
    last = [100 * run["last"]["test_score"] for run in game.only.runs]
    assert first[1:6] == ["0/2 below 0.001", "> 4", "", "", ""]
    assert first[6] == f"{np.mean(last):.1f} ± {np.std(last, ddof=1):.1f}"
    last = [100 * run["last"]["test_score"] for run in baseline.only.runs]
    assert second[1:3] == ["at the end", "4.0 ± 0.0"]
    assert second[4] == second[6] == f"{np.mean(last):.1f} ± {np.std(last, ddof=1):.1f}"
    assert third[1] == "none"  # no run diverged, so the rule picked none
    # The paper's numbers stand under their headings, whatever a row has of its own.
    cifar = study.table(fl_games.PAPER, methods, "spurious_cifar10", done)
    assert cifar["paper: test"][0] == "54.71±2.13"
    assert cifar["paper: rounds"][2] == "217.6"


@pytest.mark.parametrize("study_name", ["classes", "clients", "steps"])
def test_rows_of_figures_know_their_place(study_name: str) -> None:
    rows = fl_games.PAPER.studies[study_name].rows("colored_mnist")
    assert len({(row.series, row.x) for row in rows}) == len(rows)
    for row in rows:
        assert row.label == f"{row.series}-{row.x}-{study_name}"
        flips = command_line.of_arguments(row.flags).flips
        if study_name == "clients":
            assert str(len(flips)) == row.x.removesuffix("_uneven")


def test_rows_are_chosen_by_their_labels() -> None:
    rows = fl_games.methods("colored_digits")
    assert study.labelled(rows, []) == rows
    # In the order of the study.
    chosen = study.labelled(rows, ["V-parallel", "FedAvg"])
    assert [row.label for row in chosen] == ["FedAvg", "V-parallel"]
    with pytest.raises(ValueError, match="--rows"):
        study.labelled(rows, ["FedAvg", "V-Parallel"])
