"""The studies of the exit strategy: rows, table, and the positions of points in figures."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from fedjax_inv.algorithms.exit_strategy import Outcome
from fedjax_inv_experiments import command_line
from fedjax_inv_experiments.assembly import method
from fedjax_inv_experiments.folder.records import (
    CellRecord,
    Domain,
    Line,
    Result,
    RunRecord,
    RunResult,
)
from fedjax_inv_experiments.report import figures
from fedjax_inv_experiments.studies import drawings, exit_strategy, fedipg, row_runs, study
from fedjax_inv_experiments.studies.row_runs import RowResult
from fedjax_inv_experiments.studies.rows import Row
from runs import line, options, states

RUN = RunResult(0, {}, False, {}, line(1))
RESULT = Result(CellRecord("fedavg", {}, "test", [RunRecord(0, {})]), [RUN])
OF_EXIT = CellRecord("exit_strategy", {"displaced": False}, "test", [RunRecord(0, {})])
EXIT = row_runs.CellResult("test", [RUN], [], Result(OF_EXIT, [RUN]))
# The lines of each figure.
AVERAGES = [
    f"{name}{rule}" for name in exit_strategy._AVERAGED for rule in ("", ", exit by Eq. 13")
]
NAMES = {"slow": AVERAGES, "lossy": AVERAGES, "rotated": ["all", "all, exit by Eq. 13"]}
SMALL = (
    *("--rounds=4", "--eval_every=2", "--checkpoint_every=4", "--seeds=0,1", "--widths=8"),
    *("--watch_examples=200", "--chunk=1,1", "--clients=8"),
)


@pytest.mark.parametrize("data", exit_strategy.DATA)
def test_one_client_is_aberrant_in_every_row(data: str) -> None:
    for row in exit_strategy.leaving(data):
        chosen = command_line.of_arguments(row.flags)
        assert chosen.partition.clients == 20
        angles = chosen.environment.odd_angles
        if row.label.startswith("without"):
            assert chosen.participation.lossy == ("0:0",)
            assert not chosen.participation.first_all  # or it would come once
            assert len(angles) == (row.label == "without rotated")
            continue
        kind = row.label.split(" ")[0]
        assert chosen.participation.slow == ((f"0:{row.x}",) if kind == "slow" else ())
        assert chosen.participation.lossy == ((f"0:{row.x}",) if kind == "lossy" else ())
        assert angles == ((float(row.x),) if kind == "rotated" else ())
        assert chosen.participation.first_all == (kind in ("slow", "lossy"))
        is_averaged = row.label.endswith("by parameters")
        assert chosen.participation.missing == ("parameters" if is_averaged else "skip")
        # What the rule takes for the step is what the clients do.
        step = chosen.training.learning_rate[0] * chosen.training.local_steps
        assert f"step_size={step:g}" in chosen.method.set
        # A client that is late by the slowest delay is measured after it.
        if kind == "slow":
            settings = method.settings(chosen.method)["exit_strategy"]
            assert settings["pretraining_rounds"][0] > int(row.x)


def test_a_row_of_other_data_has_the_low_loss_of_its_study() -> None:
    (row,) = row_runs.with_labels(exit_strategy.leaving("mnist"), ["without"])
    chosen = command_line.of_arguments([*row.flags, "--dataset=mine.npz"])
    domains = {"all": Domain(0.5, 0.9, 9, "validation")}
    last = line(20, domains=domains, train_by_round=[0.5])
    cell = row_runs.CellResult("test", [RUN], [[last]], RESULT)
    cells = exit_strategy.exit_columns(RowResult(row, chosen, [cell]))
    assert cells["rounds to loss 1.0"] == "20.0"
    assert cells["accuracy, %"] == "50.0"


@pytest.mark.slow
def test_a_small_study_from_its_flags_to_its_files(tmp_path: Path) -> None:
    rows = "without rotated,rotated 135,slow 2 by parameters"
    words = (*SMALL, "--study=exit", "--data=digits", f"--rows={rows}", f"--run_dir={tmp_path}")
    text = study.run_all(fedipg.PAPER, options(fedipg.PAPER, *words))
    folder = tmp_path / "digits"
    lines = (folder / "exit_some.md").read_text().split("\n\n")[0].splitlines()
    assert "\n".join(lines) in text
    heads, _, *found = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    by_label = {row[0]: dict(zip(heads, row, strict=True)) for row in found}
    without, rotated = by_label["without rotated"], by_label["rotated 135"]
    for row, angle in ((without, "180"), (rotated, "135")):
        name = "without-rotated" if row is without else "rotated-135"
        (path,) = (folder / name).glob("fedavg*/result.json")
        regular, own = [], []
        for run in json.loads(path.read_text())["runs"]:
            domains = run["last"]["domains"].items()
            valid = {name: of["score"] for name, of in domains if of["split"] == "validation"}
            own.append(100 * valid.pop(angle))
            assert set(valid) == {"0", "15", "30", "45", "60", "75"}
            regular.append(100 * np.mean(list(valid.values())))
        spread = "{:.1f} ± {:.1f}"
        shown = spread.format(np.mean(regular), np.std(regular, ddof=1))
        assert row["accuracy, %"] == shown
        shown = spread.format(np.mean(own), np.std(own, ddof=1))
        assert row["client 0's angle, %"] == shown
    assert without["Eq. 13: client 0 leaves"] == ""
    assert rotated["Eq. 13: others that leave"].endswith("of 7")
    assert rotated["displaced: client 0 leaves"] == ""
    assert by_label["slow 2 by parameters"]["displaced: client 0 leaves"].endswith("of 2 seeds")
    for ending in ("_slow", "_rotated", "_contributions"):
        assert (folder / f"exit_some{ending}.png").read_bytes().startswith(b"\x89PNG")

    # Contributions are those of the checkpoint.
    (path,) = (folder / "rotated-135").glob("exit_strategy*/result.json")
    (row,) = row_runs.with_labels(exit_strategy.leaving("digits"), ["rotated 135"])
    place = path.parent
    cell = row_runs.CellResult("test", [RUN], [], RESULT, place)
    chosen = command_line.of_arguments([*row.flags, *SMALL])
    phase = exit_strategy.phase(RowResult(row, chosen, [cell]), cell)
    told = states(place, 4)["state"]["server"]["assessment"]
    linear, quadratic, measured = (told[name] for name in ("linear", "quadratic", "measured"))
    table = np.where(measured, linear - told["smoothness"][:, None, None] * quadratic, np.nan)
    np.testing.assert_allclose(phase.contributions, table, 1e-6)


def test_a_client_that_leaves_is_marked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(2, 6, 3))
    values[:, 1:5, 1] = np.nan
    stays = np.array([[False, False, True], [True, False, True]])
    mean = np.nanmean(values, axis=1)
    phase = Outcome(values, mean, stays, ~stays, np.ones(2))
    seen: list[Figure] = []
    monkeypatch.setattr(figures, "save", lambda figure, *_: seen.append(figure))
    monkeypatch.setattr(exit_strategy, "phase", lambda result, cell: phase)
    row = RowResult(Row("a row", ()), command_line.of_arguments([]), [EXIT])
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
    for curve, each in zip(lines, expected, strict=True):
        np.testing.assert_array_equal(curve, each[np.isfinite(each)])


def test_the_figures_go_through_all_degrees(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    drawn: dict[str, Any] = {}

    def against(path: Path, title: str, label: str, points: Any) -> str:
        drawn[path.stem] = points
        return title

    monkeypatch.setattr(drawings, "against", against)

    def evaluation(number: int, loss: float) -> Line:
        domains = {
            "0": Domain(0.5, loss, 9, "validation"),
            "15": Domain(0.7, loss + 0.2, 9, "validation"),
            "150": Domain(0.0, 9.0, 9, "validation"),
            "75": Domain(0.0, 0.0, 0, "validation"),
            "test": Domain(0.0, 9.0, 9, "test"),
        }
        return line(number, domains=domains)

    chosen = command_line.of_arguments(["--odd_angles=150"])
    # The loss is low from its first evaluation below the bound on.
    log = [evaluation(4, 3.0), evaluation(5, 0.3), evaluation(6, 3.0)]
    cells = [row_runs.CellResult("test", [RUN], [log], RESULT)]
    cells.append(EXIT._replace(logs=[log]))
    done = [
        RowResult(row, chosen, cells[:1] if "without" in row.label else cells)
        for row in exit_strategy.leaving("digits")
    ]
    exit_strategy.draw_exit(tmp_path / "exit.png", "digits", done)
    assert set(drawn) == {"exit_slow", "exit_lossy", "exit_rotated"}
    for kind, (degrees, _) in exit_strategy._ABERRANT.items():
        accuracy, rounds = drawn[f"exit_{kind}"].values()
        assert set(accuracy) == {"without it", *NAMES[kind]}
        for quantity, expected in ((accuracy, 60), (rounds, 5)):
            for curve in quantity.values():
                assert [x for x, _ in curve] == list(degrees)
                np.testing.assert_allclose([each for _, each in curve], expected)
