"""The studies of FL Games: their rows are valid runs, and tables agree with the results of runs."""

import contextlib
import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import pytest
from absl import flags

from fedjax_inv.checks import UsageError
from fedjax_inv_experiments.experiment import command_line, config
from fedjax_inv_experiments.papers import drawings, fl_games, study
from fedjax_inv_experiments.papers.study import Row
from fedjax_inv_experiments.running import loop
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


@pytest.mark.parametrize("data", fl_games.DATA[3:])
def test_two_classes_are_not_varied(data: str) -> None:
    with pytest.raises(UsageError, match=f"--data={data}: has two classes"):
        fl_games.classes(data)


def test_rows_of_the_methods_are_what_they_are_called() -> None:
    chosen = {
        row.label: command_line.of_arguments(row.flags)
        for row in fl_games.methods("colored_dsprites")
    }
    assert len(chosen) == 12
    for label, settings in chosen.items():
        if label.startswith("Fed"):
            assert settings.method.algorithm != ("fl_games",)
            assert settings.watching.stop_below == ()
            # Every baseline takes as many steps as a player.
            assert settings.run.rounds * settings.clients.local_steps == 400
        else:
            names = {setting.split("=")[0] for setting in settings.method.settings}
            assert settings.method.algorithm == ("fl_games",)
            assert ("learned" in names) == label.startswith("V")
            assert ("memory" in names) == ("SMOOTH" in label)
            assert ("fast" in names) == ("FAST" in label)
            assert f"play={label.split('-')[1]}" in settings.method.settings
            assert len(settings.model.widths) == 2 + label.startswith("V")
            assert settings.clients.learning_rate == (
                (9e-4,) if label.startswith("V") else (9.5e-4,)
            )


def test_runs_of_one_label_in_two_studies_have_two_folders() -> None:
    methods, stops = (
        {row.label: row for row in rows("colored_mnist")}
        for rows in (fl_games.methods, fl_games.stop_rules)
    )
    for label in methods.keys() & stops.keys():
        assert methods[label].flags != stops[label].flags
        assert methods[label].folder != stops[label].folder
    assert {"F-sequential", "F-parallel"} <= methods.keys() & stops.keys()


def test_thresholds_follow_the_classes_and_the_clients() -> None:
    def first(rows_of: Callable[[str], list[Row]]) -> dict[str, float]:
        return {
            row.label: command_line.of_arguments(row.flags).watching.stop_below[0]
            for row in rows_of("colored_mnist")
        }

    # The paper's training accuracy at the stop is near 80% with five and ten classes.
    thresholds = first(fl_games.classes)
    for label, threshold in thresholds.items():
        assert threshold == (0.6 if "-2-" in label else 0.8), label
    assert len(thresholds) == 6
    for label, threshold in first(fl_games.clients).items():
        assert threshold == (0.75 if label.endswith("-10-clients") else 0.6), label


def test_numbers_of_the_paper() -> None:
    numbers: dict[tuple[str, str], dict[str, str]] = {}
    for one in fl_games.NUMBERS:
        numbers.setdefault((one.row, one.data), {})[one.column] = one.value
    mnist = numbers["F-parallel", "colored_mnist"]
    assert mnist == {"train": "58.03±6.22", "test": "67.14±2.95"}
    cifar = numbers["V-parallel-SMOOTH+FAST", "spurious_cifar10"]
    assert cifar == {"train": "45.83±2.44", "test": "49.89±5.66", "rounds": "102.4"}
    # The paper's Table 2 says 68.40 here, which is Fashion's.
    assert numbers["F-sequential-2-classes", "colored_mnist"]["test"] == "66.56±1.58"
    assert numbers["F-parallel-10-classes", "colored_fashion"]["test"] == "70.39±2.28"
    assert numbers["F-parallel-10-clients", "spurious_cifar10"]["test"] == "53.50±0.84"
    labels = {
        row.label
        for study in fl_games.PAPER.studies.values()
        for row in study.rows("colored_fashion")
    }
    assert {label for label, _ in numbers} <= labels


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
def test_progress_names_the_row(study_output: StudyOutput) -> None:
    ends = [line.partition(",")[0] for line in study_output.progress if "round 4 of 4" in line]
    assert ends == ["FedAvg (1 of 2)", "F-parallel-SMOOTH (2 of 2)"]


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
    text = study.table(fl_games.PAPER, methods, "colored_digits", done)
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
    heads = [head.strip() for head in cifar.splitlines()[0].strip("|").split("|")]
    assert entries(cifar)[0][heads.index("paper: test")] == "54.71±2.13"
    assert entries(cifar)[2][heads.index("paper: rounds")] == "217.6"


@pytest.mark.slow
def test_points_lie_where_their_rows_say(
    study_output: StudyOutput, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, game = finished(study_output)
    points = [
        game._replace(row=Row(f"{series}-{x}-steps", (), series, x))
        for series in ("F-parallel", "other")
        for x in ("1", "10")
    ]
    drawn: list[Any] = []
    draw = drawings.against
    monkeypatch.setattr(drawings, "against", lambda *a: (drawn.append(a), draw(*a)))
    picture = tmp_path / "scaling.png"
    fl_games.draw_scaling("local steps", picture, "colored_digits", points)
    ((*_, quantities),) = drawn
    stops = [run["stops"][0] for run in game.only.runs]
    rounds = [stop["round"] for stop in stops]
    tests = [100 * stop["test_score"] for stop in stops]
    for quantity, values in zip(quantities.values(), (rounds, tests), strict=True):
        assert quantity == {
            name: [("1", values), ("10", values)] for name in ("F-parallel", "other")
        }
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("study_name", ["classes", "clients", "steps"])
def test_rows_of_figures_know_their_place(study_name: str) -> None:
    rows = fl_games.PAPER.studies[study_name].rows("colored_mnist")
    assert len({(row.series, row.x) for row in rows}) == len(rows)
    for row in rows:
        assert row.label == f"{row.series}-{row.x}-{study_name}"
        flips = command_line.of_arguments(row.flags).environment.records[0].flips
        if study_name == "clients":
            assert str(len(flips)) == row.x.removesuffix("_uneven")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("--set=memory=3,5", "several cells"),
        ("--held_out=all", "several cells"),
        ("--num_processes=2", "num_processes=2"),
        ("--stop_below=", "^F-parallel-SMOOTH: --stop_below=: must name a threshold"),
        ("--watch_examples=0", "--watch_examples"),
        ("--eval_every=500", "--eval_every=500: must be at most --rounds=400"),
    ],
)
def test_a_flag_that_does_not_fit_a_row_is_refused_before_any_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, override: str, message: str
) -> None:
    def refuse(*arguments: Any) -> NoReturn:
        raise AssertionError("ran before all rows were looked at")

    monkeypatch.setattr(loop, "run_cell", refuse)
    flags = ("--coordinator_address=localhost:1",) if "processes" in override else ()
    chunks = ("--client_chunk=1", "--run_chunk=1")
    labels = ("F-parallel-SMOOTH",)
    options = study.Options(
        "methods", labels, ("colored_digits",), tmp_path / "run", (*flags, *chunks, override)
    )
    with pytest.raises(UsageError, match=message) as error:
        study.run_all(fl_games.PAPER, options)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_all_rows_are_looked_at_before_the_first_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any) -> NoReturn:
        raise AssertionError("ran before all rows were looked at")

    monkeypatch.setattr(loop, "run_cell", refuse)
    foreign = tmp_path / "colored_digits" / "V-parallel"
    foreign.mkdir(parents=True)
    (foreign / "fl_games-learned=True-play=parallel-0.9").mkdir()
    (foreign / "fl_games-learned=True-play=parallel-0.9" / "notes.txt").write_text("mine")
    options = parsed("--data=colored_digits", f"--run_dir={tmp_path}", "--seeds=0")
    with pytest.raises(UsageError, match=r"^V-parallel: --run_dir=.*neither empty nor a sweep"):
        study.run_all(fl_games.PAPER, options)


def test_rows_are_chosen_by_their_labels() -> None:
    rows = fl_games.methods("colored_digits")
    assert study.labelled(rows, []) == rows
    # In the order of the study.
    chosen = study.labelled(rows, ["V-parallel", "FedAvg"])
    assert [row.label for row in chosen] == ["FedAvg", "V-parallel"]
    with pytest.raises(ValueError, match=r"--rows=V-Parallel: .*V-parallel") as error:
        study.labelled(rows, ["FedAvg", "V-Parallel"])
    assert "\n" not in str(error.value)


def test_the_flags(tmp_path: Path) -> None:
    assert parsed() == study.Options("methods", (), ("colored_mnist",), Path("runs/fl_games"), ())
    several = parsed(
        *("--study=mixes", "--data=colored_mnist,colored_digits", "--rows=a,b"),
        *(f"--run_dir={tmp_path}", "--seeds=0,1", "--set=memory=3", "--set=fast=true"),
    )
    assert several[:4] == ("mixes", ("a", "b"), ("colored_mnist", "colored_digits"), tmp_path)
    of_sweep = command_line.of_arguments(several.overrides)
    assert of_sweep.run.seeds == (0, 1)
    assert of_sweep.method.settings == ("memory=3", "fast=true")
    assert of_sweep.run.run_dir == ""
    with pytest.raises(ValueError, match="--data=mnist: unknown; did you mean colored_mnist"):
        parsed("--data=mnist")
    for data in ("", "colored_digits,colored_digits"):
        with pytest.raises(UsageError, match=f"^--data={data}: must be one or several different"):
            parsed(f"--data={data}")


@pytest.mark.slow
def test_the_binary_ends_with_one_line_and_status_2() -> None:
    arguments = ["--data=colored_digits", "--rows=F-parallel", "--rounds=0"]
    done = subprocess.run(
        [sys.executable, "-m", "experiments.papers.fl_games", *arguments],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("error: "))
    assert line == "error: F-parallel: --rounds=0: must be at least 1 and below 2^31"
