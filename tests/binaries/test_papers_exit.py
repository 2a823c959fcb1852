"""The studies of the exit strategy: rows, table, and the positions of points in figures."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from absl import flags
from matplotlib.figure import Figure

from fedjax_inv.algorithms.exit_strategy import Outcome
from fedjax_inv_experiments.experiment import command_line
from fedjax_inv_experiments.reporting import figures
from fedjax_inv_experiments.studies import drawings, exit_strategy, fedipg, study
from fedjax_inv_experiments.studies.study import RowResult
from runs import states

SMALL = (
    *("--rounds=4", "--eval_every=2", "--checkpoint_every=4", "--seeds=0,1", "--widths=8"),
    *("--watch_examples=200", "--client_chunk=1", "--run_chunk=1", "--clients=8"),
)
ROWS = ("without-rotated", "rotated-150-FedAvg-exit", "slow-5-FedAvg")


def parsed(*arguments: str) -> study.Options:
    """The options of a command line."""
    values = flags.FlagValues()
    fedipg.BINARY.define(values)
    return fedipg.BINARY.read(["", *arguments], values)


@pytest.mark.parametrize("data", ["digits", "mnist", "cifar10"])
def test_one_client_is_aberrant_in_every_row(data: str) -> None:
    rows = exit_strategy.leaving(data)
    kinds = {kind for row in rows for kind in exit_strategy._kinds(row)}
    assert kinds == {"slow", "lossy"} | ({"rotated"} if data != "cifar10" else set())
    for row in rows:
        chosen = command_line.of_arguments(row.flags)
        assert chosen.clients == 20
        angles = chosen.odd_angles if chosen.environment_name == "rotated" else ()
        if row.label.startswith("without"):
            assert chosen.lossy == ("0:0",)
            assert not chosen.first_all  # or it would come once
            assert len(angles) == (row.label == "without-rotated")
            continue
        (kind,) = exit_strategy._kinds(row)
        assert chosen.slow == ((f"0:{row.x}",) if kind == "slow" else ())
        assert chosen.lossy == ((f"0:{row.x}",) if kind == "lossy" else ())
        assert angles == ((float(row.x),) if kind == "rotated" else ())
        assert chosen.first_all == (kind != "rotated")
        assert row.label.startswith(f"{kind}-{row.x}-")
        if row.label.endswith("exit"):
            # What the rule takes for the step is what the clients do.
            rate, settings = chosen.learning_rate[0], chosen.settings
            assert f"step_size={rate * chosen.local_steps:g}" in settings


def test_a_row_of_other_data_has_the_low_loss_of_its_study() -> None:
    (row,) = study.labelled(exit_strategy.leaving("mnist"), ["slow-2-FedAvg"])
    chosen = command_line.of_arguments(["--dataset=mine.npz"], row.flags)
    domains = {"all": {"score": 0.5, "loss": 0.9, "split": "validation", "examples": 9}}
    line = {"round": 20, "domains": domains, "train_by_round": [0.5]}
    cell = study.CellResult("test", [{}], [[line]], {})
    cells = exit_strategy.exit_columns(RowResult(row, chosen, [cell]))
    assert cells["rounds to loss 1.0"] == "20.0"
    assert cells["all clients, %"] == "50.0"


@pytest.fixture(scope="module")
def study_output(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A part of the study on eight clients, and what it printed."""
    folder = tmp_path_factory.mktemp("study")
    options = parsed(
        *SMALL,
        *("--study=exit", "--data=digits", f"--rows={','.join(ROWS)}"),
        f"--run_dir={folder}",
    )
    return folder / "digits", study.run_all(fedipg.PAPER, options)


@pytest.mark.slow
def test_the_table_shows_the_regular_clients_and_which_clients_left(
    study_output: tuple[Path, str],
) -> None:
    folder, text = study_output
    lines = (folder / "exit_some.md").read_text().split("\n\n")[0].splitlines()
    assert "\n".join(lines) in text
    heads, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    by_label = {row[0]: dict(zip(heads, row, strict=True)) for row in rows}
    assert set(by_label) == set(ROWS)
    for label, odd in zip(ROWS, ("180", "150", None), strict=True):
        (path,) = (folder / label).glob("*/result.json")
        runs = json.loads(path.read_text())["runs"]
        regular, own = [], []
        for run in runs:
            domains = run["last"]["domains"]
            valid = {k: d["score"] for k, d in domains.items() if d["split"] == "validation"}
            own.append(100 * valid.pop(odd, np.nan))
            assert set(valid) == ({"0", "15", "30", "45", "60", "75"} if odd else {"all"})
            regular.append(100 * np.mean(list(valid.values())))
        row = by_label[label]
        spread = "{:.1f} ± {:.1f}"
        mine, other = ("regular", "all") if odd else ("all", "regular")
        assert row[f"{mine} clients, %"] == spread.format(np.mean(regular), np.std(regular, ddof=1))
        assert row[f"{other} clients, %"] == ""
        shown = spread.format(np.mean(own), np.std(own, ddof=1)) if odd else ""
        assert row["client 0's angle, %"] == shown
        train = [100 * run["last"]["train_by_round"][-1] for run in runs]
        expected = spread.format(np.mean(train), np.std(train, ddof=1))
        assert row["training examples watched, %"] == expected
    assert by_label["without-rotated"]["client 0 left"] == ""
    assert by_label["rotated-150-FedAvg-exit"]["client 0 left"].endswith("of 2 seeds")
    assert by_label["rotated-150-FedAvg-exit"]["others that left"].endswith("of 7")
    for kind in ("slow", "rotated"):
        picture = folder / f"exit_some_{kind}.png"
        assert str(picture) in text
        assert picture.read_bytes().startswith(b"\x89PNG")
    assert not (folder / "exit_some_lossy.png").exists()
    assert (folder / "exit_some_contributions.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_contributions_are_those_of_the_checkpoint(study_output: tuple[Path, str]) -> None:
    folder, text = study_output
    (row,) = study.labelled(exit_strategy.leaving("digits"), ["rotated-150-FedAvg-exit"])
    (place,) = (path.parent for path in (folder / row.label).glob("*/result.json"))
    chosen = command_line.of_arguments(SMALL, row.flags)
    cell = study.CellResult("test", [{}], [], {}, place)
    found = exit_strategy.phase(RowResult(row, chosen, [cell]))
    assert found is not None
    told = states(place, 4)["state"]["server"]["assessment"]
    linear, quadratic, measured = (told[name] for name in ("linear", "quadratic", "measured"))
    table = linear - told["smoothness"][:, None, None] * quadratic
    outcome = found.outcome
    np.testing.assert_allclose(outcome.contributions, np.where(measured, table, np.nan), 1e-6)
    # At the smoothness where the mean is 0, it is.
    rest = linear - found.critical[:, None] * quadratic
    np.testing.assert_allclose(rest.sum(1), 0, atol=1e-6 * np.abs(linear).max())
    told_row = exit_strategy.contributions({row.label: found})
    assert told_row.splitlines()[-1] in text
    own = told_row.splitlines()[-1].split("|")[2].strip()
    assert own == "{:.3g} to {:.3g}".format(*sorted(outcome.mean[:, 0]))


def test_a_client_that_leaves_is_marked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(2, 6, 3))
    values[:, 1:5, 1] = np.nan
    stays = np.array([[False, False, True], [True, False, True]])
    mean = np.nanmean(values, axis=1)
    phase = exit_strategy.Phase(Outcome(values, mean, stays, ~stays, np.ones(2)), mean)
    seen: list[Figure] = []
    monkeypatch.setattr(figures, "save", lambda figure, path: seen.append(figure))
    monkeypatch.setattr(exit_strategy, "phase", lambda result: phase)
    row = RowResult(study.Row("a row", ()), command_line.of_arguments([]), [])
    exit_strategy.draw_contributions(tmp_path / "x.png", "digits", [row])
    (axis,) = seen[0].axes
    points = {
        (x, y)
        for line in axis.lines
        if line.get_marker() == "x"
        for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True)
    }
    assert points == {(6, values[0, 5, 0]), (6, values[0, 5, 1]), (6, values[1, 5, 1])}
    lines = [line.get_ydata() for line in axis.lines if line.get_marker() == "."]
    expected = [values[run, :, client] for client in (2, 1, 0) for run in (1, 0)]
    for line, each in zip(lines, expected, strict=True):
        np.testing.assert_array_equal(line, each[np.isfinite(each)])


def test_the_loss_is_low_from_its_first_evaluation_on() -> None:
    lines = [{"round": 2, "loss": 0.9}, {"round": 4, "loss": 0.4}, {"round": 6, "loss": 0.6}]
    assert exit_strategy._rounds_to(lines, 0.5) == 4
    assert np.isnan(exit_strategy._rounds_to(lines, 0.4))


def test_the_benchmark_goes_through_all_degrees(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    drawn: dict[str, Any] = {}
    monkeypatch.setattr(
        drawings, "against", lambda path, title, label, points: drawn.update({path.stem: points})
    )
    evaluation = {
        "round": 5,
        "domains": {
            "0": {"score": 0.5, "loss": 0.3, "split": "validation", "examples": 9},
            "15": {"score": 0.7, "loss": 0.5, "split": "validation", "examples": 9},
            "150": {"score": 0.0, "loss": 9.0, "split": "validation", "examples": 9},
            "75": {"score": 0.0, "loss": 0.0, "split": "validation", "examples": 0},
            "test": {"score": 0.0, "loss": 9.0, "split": "test", "examples": 9},
        },
    }
    chosen = command_line.of_arguments(["--odd_angles=150"])
    rows = exit_strategy.leaving("digits")
    cells = [study.CellResult("test", [{}], [[evaluation]], {})]
    done = [RowResult(row, chosen, cells) for row in rows]
    exit_strategy.draw_exit(tmp_path / "exit.png", "digits", done)
    assert set(drawn) == {"exit_slow", "exit_lossy", "exit_rotated"}
    for kind, (degrees, _) in exit_strategy._ABERRANT.items():
        accuracy, rounds = drawn[f"exit_{kind}"].values()
        assert set(accuracy) == {"without it", "FedAvg", "FedAvg-exit", "FedIPG-exit"}
        for quantity, expected in ((accuracy, 60), (rounds, 5)):
            for line in quantity.values():
                assert [x for x, _ in line] == list(degrees)
                np.testing.assert_allclose([each for _, each in line], expected)
