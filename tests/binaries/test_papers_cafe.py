"""The studies of CAFE: rows, tables, and the positions of points in figures."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
from matplotlib.figure import Figure

from fedjax_inv_experiments import command_line
from fedjax_inv_experiments.assembly import grid, method
from fedjax_inv_experiments.folder.records import (
    CellRecord,
    Domain,
    Line,
    Result,
    RunRecord,
    RunResult,
)
from fedjax_inv_experiments.report import figures
from fedjax_inv_experiments.studies import cafe, row_runs, study
from fedjax_inv_experiments.studies.row_runs import RowResult
from fedjax_inv_experiments.studies.rows import Row
from fedjax_inv_experiments.studies.study import Cells
from runs import line


def test_a_label_is_one_run_in_all_studies() -> None:
    rows = [row for each in cafe.PAPER.studies.values() for row in each.rows("digits")]
    of_labels = {row.label: row.flags for row in rows}
    assert all(of_labels[row.label] == row.flags for row in rows)
    chosen = {label: command_line.of_arguments(of) for label, of in of_labels.items()}
    for label, one in chosen.items():
        parts = label.split("-")
        expected = {name: parts[parts.index(name) + 1] for name in ("CF", "IF") if name in parts}
        assert one.participation.frequency == float(expected.get("CF", 0.1))
        assert one.partition.imbalance == float(expected.get("IF", 1))
    for name, value in (("frequency", "CF"), ("groups", "CF")):
        for row in cafe.PAPER.studies[name].rows("digits"):
            assert f"{value} {row.x}," in cafe.where(chosen[row.label])


def test_parts_of_cafe_are_switched_off() -> None:
    off = {}
    for row in cafe.ablation("digits"):
        chosen = command_line.of_arguments(row.flags)
        (cell,) = grid.cells(chosen, [None])
        off[row.label.removeprefix("CAFE-without-")] = cell.settings
        is_off = row.label.endswith("without-SM")
        assert chosen.training.server_momentum == (0 if is_off else 0.9)
    fc, pc, ha = "feature_calibration", "parameter_calibration", "history_average"
    assert off == {
        **{"FedAvg": {}, "CAFE": {}, "FC": {fc: False}, "PC": {pc: False}, "HA": {ha: False}},
        "FC+HA": {fc: False, ha: False},
        **{"SM": {}, "FedAvg-without-SM": {}},
    }


def evaluation(number: int, test: float, seed: int = 0) -> Line:
    """A line of a log of four clients and four classes, the last client without test examples."""
    return line(
        number,
        seed=seed,
        test_score=test,
        balanced_score=test,
        client_score=test,
        score_by_class=[test + 0.2, test + 0.1, test - 0.1, test - 0.2],
        score_by_client=[test, test + 0.1, test - 0.1, None],
        domains={"test": Domain(test, 1 - test, 4, "test")},
        bytes=10**6 * number,
    )


def made_up(row: Row, seeds: Sequence[Sequence[float]], *more: str) -> RowResult:
    """A row whose seeds had these test accuracies in rounds 10, 20, ..., the last selected."""
    logs = [
        [evaluation(10 * (i + 1), test, seed) for i, test in enumerate(tests)]
        for seed, tests in enumerate(seeds)
    ]
    rates = {"learning_rate": 0.01}, {"learning_rate": 0.03}
    runs, worse = (
        [
            RunResult(x[-1].seed, rate, bool(bad), {"validation": x[-1]}, x[-1], selected=x[-1])
            for x in logs
        ]
        for bad, rate in enumerate(rates)
    )
    result = Result(CellRecord("cafe", {}, None, [RunRecord(0, {})]), [*runs, *worse])
    cell = row_runs.CellResult("test", runs, logs, result)
    return RowResult(row, command_line.of_arguments([*row.flags, *more]), [cell])


def named(rows: list[Row], label: str) -> Row:
    (row,) = row_runs.with_labels(rows, [label])
    return row


def test_groups_are_those_that_upload_rarely_and_halves_of_a_tail() -> None:
    row = named(cafe.methods("digits"), "CAFE")
    for seed in range(4):
        made = evaluation(10, 0.5, seed)
        plain = command_line.of_arguments(row.flags)
        rare = method.is_sparse(4, seed)
        assert rare.sum() == 2
        groups = cafe.by_group(plain, made)
        for name, mask in (("sparse clients", rare), ("frequent clients", ~rare)):
            expected = np.mean([v for v, of in zip((0.5, 0.6, 0.4), mask[:3], strict=True) if of])
            assert groups.pop(name) == pytest.approx(expected)
        assert not groups  # without a tail no class is in a minority
        tail = command_line.of_arguments([*row.flags, "--imbalance=10"])
        groups = cafe.by_group(tail, made)
        assert (groups["majority classes"], groups["minority classes"]) == pytest.approx(
            (0.65, 0.35)
        )


def line_of(result: RowResult, name: str = "frequency") -> Cells:
    """A line of the table of a study."""
    return study.line(cafe.PAPER, cafe.PAPER.studies[name], "fashion_mnist", result)


def test_a_table_has_groups_and_the_papers_numbers() -> None:
    rows = {row.label: row for row in cafe.frequency("fashion_mnist")}
    cells = line_of(made_up(rows["CAFE"], [[0.4, 0.5], [0.3, 0.6]]))
    assert cells["federation"] == "Dir 0.1, CF 0.1, IF 1, 10 of 100 clients, 5 epochs"
    assert cells["selected"] == "learning_rate=0.01"
    assert cells["test, %"] == cells["balanced, %"] == "55.0 ± 7.1"
    assert {"frequent clients, %", "sparse clients, %"} < set(cells)
    assert not {"majority classes, %", "minority classes, %"} & set(cells)
    assert (cells["paper: Table I"], cells["paper: Table II"]) == ("89.44", "89.44")
    often = line_of(made_up(rows["FedAvg-CF-0.5"], [[0.5]]))
    assert [often.get(f"paper: Table {number}") for number in ("I", "II")] == [None, "87.92"]
    wide = line_of(made_up(rows["MOON"], [[0.5]], "--alpha=0.5"))
    assert [wide.get(f"paper: Table {number}") for number in ("I", "II")] == ["90.40", None]
    # Of another federation, of a tail and of a variant there are no numbers.
    others = ("--partition=iid --alpha=0.1", "--frequency=0.3", "--late=stale", "--dropout=0.1")
    for more in (*others, "--sampling_rate=0.3", "--imbalance=10"):
        chosen = command_line.of_arguments([*rows["CAFE"].flags, *more.split()])
        cells = line_of(made_up(rows["CAFE"], [[0.5]])._replace(config=chosen))
        assert not any("paper" in name for name in cells), more
        assert cells["federation"].startswith("iid, CF" if "iid" in more else "Dir 0.1, CF")
    assert cells["majority classes, %"] == "65.0"
    variant = named(cafe.ablation("fashion_mnist"), "CAFE-without-PC")
    assert not any("paper" in name for name in line_of(made_up(variant, [[0.5]])))
    done = made_up(rows["CAFE"], [[0.5]])
    nothing = done._replace(cells=[done.only._replace(runs=[])])
    assert line_of(nothing)["test, %"] == "none"  # the rate of 0.01 did not diverge
    lost = [msgspec.structs.replace(run, diverged=True) for run in done.only.result.runs]
    gone = done.only._replace(runs=[], result=msgspec.structs.replace(done.only.result, runs=lost))
    assert line_of(done._replace(cells=[gone]))["test, %"] == "diverged"


def test_figures_show_accuracy_and_loss_by_round_and_groups_by_frequency(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr(figures, "save", lambda figure, *a, **k: drawn.append(figure))
    done = [made_up(row, [[0.2, 0.5], [0.4, 0.7]]) for row in cafe.ablation("digits")]
    cafe.draw_by_round(tmp_path / "rounds.png", "digits", done)
    accuracy, loss = drawn[0].axes
    for axis, expected in ((accuracy, [30, 60]), (loss, [0.7, 0.4])):
        lines = axis.get_lines()
        assert [line.get_label() for line in lines] == [one.row.label for one in done]
        np.testing.assert_allclose(lines[0].get_xydata(), np.c_[[10, 20], expected])
    done = [made_up(row, [[0.5 + 0.05 * i]]) for i, row in enumerate(cafe.groups("digits"))]
    done[1] = done[1]._replace(cells=[done[1].only._replace(runs=[])])  # FedAvg at 0.5
    cafe.draw_frequency(tmp_path / "groups.png", "digits", done)
    panels = {axis.get_ylabel(): axis for axis in drawn[1].axes}
    assert len(panels) == 5
    fedavg, method = (bars[0] for bars in panels["majority classes, %"].containers)
    # The majority is 15 points above the test.
    np.testing.assert_allclose(fedavg.get_ydata().astype(float), [65, 75])
    np.testing.assert_allclose(method.get_ydata().astype(float), [80, 85, 90])
    assert [*method.get_xdata()] == ["0.1", "0.5", "1"]
