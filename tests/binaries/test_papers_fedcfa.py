"""The studies of FedCFA: rows, tables, and the positions of points in figures."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from fedjax_inv.models.blocks import unit_range
from fedjax_inv_experiments import command_line, config, finished
from fedjax_inv_experiments.assembly import grid
from fedjax_inv_experiments.folder.records import CellRecord, Line, Result, RunRecord, RunResult
from fedjax_inv_experiments.report import figures
from fedjax_inv_experiments.studies import factors, fedcfa, row_runs, study
from fedjax_inv_experiments.studies.row_runs import RowResult
from fedjax_inv_experiments.studies.rows import Row
from fedjax_inv_experiments.studies.study import Cells
from runs import line, no_figures, with_flags


@pytest.mark.parametrize("data", ["fashion_mnist", "cifar10_resnet"])
def test_partitions_are_what_they_are_called(data: str) -> None:
    rows = fedcfa.partitions(data)
    assert len(rows) == 18
    for row in rows:
        chosen = command_line.of_arguments(row.flags)
        assert fedcfa.partition_name(chosen) == row.x
        assert chosen.participation.cohort * 5 == chosen.partition.clients  # a fifth of them
    # The runs of one of them are those of `methods`.
    shared = {row.label: row.flags for row in rows if row.x == "Dir60(0.6)"}
    methods = {row.label: row.flags for row in fedcfa.methods(data)}
    assert shared.items() <= methods.items()
    for name in ("femnist", "sent140"):
        rows = fedcfa.partitions(name)
        chosen = [command_line.of_arguments(row.flags) for row in rows]
        assert [fedcfa.partition_name(one) for one in chosen] == [row.x for row in rows]
        # Whatever the local copy is called.
        renamed = with_flags(chosen[0], dataset="copy.json")
        assert fedcfa.paper_data(renamed) == name


@pytest.mark.parametrize("data", fedcfa.PAPER.data)
def test_columns_are_all_that_a_row_compares(data: str) -> None:
    for name in ("ablation", "correlation", "loss_grid"):
        for row in fedcfa.PAPER.studies[name].rows(data):
            (cell,) = grid.cells(command_line.of_arguments(row.flags), [None])
            columns = fedcfa._COLUMNS[row.series].values()
            for run in cell.runs:
                matching = [hyper for hyper in columns if hyper.items() <= run.hyper.items()]
                assert len(matching) == 1
            rates = {run.hyper["learning_rate"] for run in cell.runs}
            seeds = {run.seed for run in cell.runs}
            assert len(cell.runs) == len(columns) * len(rates) * len(seeds)
    for row in fedcfa.hooks(data):
        chosen = command_line.of_arguments(row.flags)
        assert row.label == f"hook-{chosen.network.cut}-top_k-{row.x}"
        assert f"top_k={row.x}" in chosen.method.set
        # At most half of the factors where the hook is, so that no factor is in both masks.
        default = {"resnet18": (64, 64, 128, 256), "leaf_cnn": (32, 64), "lstm": (256,)}
        widths = chosen.network.widths or default[chosen.network.model]
        assert 2 * int(row.x) <= widths[chosen.network.cut - 1]


CELL = CellRecord("fedcfa", {}, "test", [RunRecord(0, {})])


def evaluation(number: int, test: float, validation: float = 0.5) -> Line:
    """A line of a log."""
    metrics = {"correlation": 0.1}
    return line(number, validation, test_score=test, train_metrics=metrics, bytes=10**6 * number)


def made_up(row: Row, seeds: list[list[float]], *more: str) -> RowResult:
    """A row whose runs had these test accuracies in rounds 10, 20, ..., the last of them chosen."""
    logs = [[evaluation(10 * (i + 1), test) for i, test in enumerate(each)] for each in seeds]
    runs = [RunResult(0, {}, False, {"validation": x[-1]}, x[-1], selected=x[-1]) for x in logs]
    cell = row_runs.CellResult("test", runs, logs, Result(CELL, runs))
    return RowResult(row, command_line.of_arguments([*row.flags, *more]), [cell])


def columns(row: Row, tests: dict[str, float], *more: str) -> RowResult:
    """A row whose columns had these test accuracies, NaN for one that diverged."""
    runs = []
    for name, test in tests.items():
        for rate in (0.01, 0.03):
            # The better one by validation is the worse one by test.
            last = evaluation(10, test - (rate == 0.03), validation=0.5 + (rate == 0.01) / 4)
            hyper = fedcfa._COLUMNS[row.series][name] | {"learning_rate": rate}
            has_diverged = bool(np.isnan(test))
            runs.append(
                RunResult(0, hyper, has_diverged, {"validation": last}, last, selected=last)
            )
    cell = row_runs.CellResult("test", runs, [], Result(CELL, runs))
    return RowResult(row, command_line.of_arguments([*row.flags, *more]), [cell])


def line_of(result: RowResult) -> Cells:
    """The line of a row in the table of its study, or of the study of methods."""
    own = fedcfa.PAPER.studies.get(result.row.series, fedcfa.PAPER.studies["methods"])
    return study.line(fedcfa.PAPER, own, "cifar10_resnet", result)


def test_simpsons_paradox_is_shown_by_round() -> None:
    before, *others = fedcfa.simpson("mnist")
    first, compared = (
        made_up(row, [[0.7, 0.8, 0.9], [0.9, 0.6, 0.5]])._replace(config=config.of(rounds=30))
        for row in (before, others[0])
    )
    ends = {"test at the last, %": "70.0 ± 28.3", "rounds": "30.0 ± 0.0"}
    assert {name: text for name, text in fedcfa._in_rounds(compared).items() if text} == {
        "test in round 10, %": "80.0 ± 14.1",
        "test in round 20, %": "70.0 ± 14.1",
        **ends,
    }
    # The network from which the others start has other rounds.
    assert {name: text for name, text in fedcfa._in_rounds(first).items() if text} == ends
    assert fedcfa._in_rounds(first).keys() == fedcfa._in_rounds(compared).keys()
    short = compared._replace(config=config.of(rounds=10))
    assert "test in round 20, %" not in fedcfa._in_rounds(short)


def test_rounds_to_a_target_are_shown_as_in_the_paper() -> None:
    rows = {row.label: row for row in fedcfa.methods("cifar10_resnet")}
    reached = made_up(rows["FedCFA"], [[0.7, 0.8, 0.79], [0.81, 0.9, 0.85]])
    cells = line_of(reached)
    assert cells["partition"] == "Dir60(0.6)"
    assert cells["rounds to 80%"] == "15.0 ± 7.1"
    assert cells["test, %"] == "82.0 ± 4.2"
    assert cells["paper, %"] == "82.43±0.08"
    assert cells["paper: rounds, %"] == "(468,80.01)"
    # Of seeds of which one did not reach it, the best of each.
    short = made_up(rows["FedAvg"], [[0.7, 0.74, 0.7], [0.8, 0.81, 0.7]], "--alpha=0.2")
    assert line_of(short)["rounds to 75.5%"] == "> 500, best 77.5 ± 4.9"
    assert line_of(short)["paper, %"] == "65.88±0.32"
    # Of a partition that is not in the paper there are neither its numbers nor its target.
    other = made_up(rows["FedAvg"], [[0.7], [0.8]], "--alpha=3")
    assert not any("rounds" in name or "paper" in name for name in line_of(other))
    nothing = reached._replace(cells=[reached.only._replace(runs=[])])
    assert line_of(nothing)["test, %"] == "none"  # no run diverged, so the rule picked none


def test_numbers_of_the_paper_stand_beside_its_setting_alone() -> None:
    rows = {row.label: row for row in fedcfa.methods("cifar10_resnet")}
    assert line_of(made_up(rows["FedCFA"], [[0.7]], "--clients=100", "--cohort=20"))["paper, %"]
    others = ("--imbalance=10", "--dropout=0.1", "--frequency=0.5", "--cohort=6")
    for more in (*others, "--clients=100", "--dropout=0.1 --late=stale"):
        cells = line_of(made_up(rows["FedCFA"], [[0.7]], *more.split()))
        assert not any("paper" in name for name in cells), more
    # Table 5 is of a ResNet-18; a hook of LeNet has the same name.
    for data, has_number in (("cifar10_resnet", True), ("cifar10", False)):
        row = next(row for row in fedcfa.hooks(data) if row.label.startswith("hook-2-top_k-8"))
        assert ("paper, %" in line_of(made_up(row, [[0.7]]))) == has_number


def test_columns_choose_their_learning_rate_by_validation() -> None:
    without, with_it, *_ = fedcfa.ablation("cifar10_resnet")
    tests = dict(zip(fedcfa._COLUMNS["ablation"], (0.7, 0.6, np.nan, 0.8), strict=True))
    cells = line_of(columns(without, tests))
    assert [cells[f"{name}, %"] for name in tests] == ["70.0", "60.0", "diverged", "80.0"]
    assert cells["paper: Cls.+Neg."] == "78.87"
    assert not any("paper" in name for name in line_of(columns(with_it, tests)))
    assert not any("paper" in name for name in line_of(columns(without, tests, "--alpha=0.2")))


def test_figures_show_the_grid_the_curves_and_the_seeds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr(figures, "save", lambda figure, *a, **k: drawn.append(figure))
    values = {
        name: (10 * hyper["positive_weight"] + hyper["negative_weight"]) / 200
        for name, hyper in fedcfa._COLUMNS["loss_grid"].items()
    }
    done = [columns(row, values | {"10/10": np.nan}) for row in fedcfa.loss_grid("digits")]
    text = fedcfa.draw_grid(tmp_path / "grid.png", "digits", done)
    assert text == f"Figure: {tmp_path / 'grid.png'}."
    left, right = drawn[0].axes[:2]
    assert [axis.get_title() for axis in (left, right)] == ["grid-without-FDC", "grid-with-FDC"]
    texts = {text.get_position(): text.get_text() for text in left.texts}
    assert len(texts) == 36
    # Positives from left to right.
    assert texts[4, 0] == f"{100 * values['5/0.1']:.1f}"
    assert texts[0, 4] == f"{100 * values['0.1/5']:.1f}"
    assert texts[5, 5] == "none"
    cells = line_of(done[0])
    assert (cells["positive/negative"], cells["without a selection"]) == ("10/5", "1 of 36")

    rows = [row for row in fedcfa.partitions("fashion_mnist") if row.x.startswith("Dir60")]
    done = [made_up(row, [[0.1 * i, 0.5], [0.1 * i, 0.7]]) for i, row in enumerate(rows, start=1)]
    done[0] = done[0]._replace(cells=[done[0].only._replace(runs=[])])  # diverged
    fedcfa.draw_by_round(tmp_path / "rounds.png", "fashion_mnist", done)
    fedcfa.draw_by_seed(tmp_path / "seeds.png", "fashion_mnist", done)
    rounds, seeds = drawn[1:]
    titles = {axis.get_title(): axis for axis in rounds.axes}
    for name, count in (("Dir60(0.2)", 2), ("Dir60(0.6)", 3)):
        lines, of = titles[name].get_lines(), [one for one in done if one.row.x == name][-count:]
        for curve, one in zip(lines, of, strict=True):
            assert curve.get_label() == one.row.series
            first = 100 * one.only.logs[0][0].test_score
            np.testing.assert_allclose(curve.get_xydata(), [[10, first], [20, 60]])
    places = [axis.get_ylabel().partition(",")[0] for axis in seeds.axes]
    assert places == ["Dir60(0.2)", "Dir60(0.6)"]
    lines = [line for line in seeds.axes[1].get_lines() if line.get_mfc() == "white"]
    dots = [line.get_ydata() for line in lines]
    np.testing.assert_allclose(dots, [[50, 70]] * 3)


@pytest.mark.slow
def test_factors_of_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = (
        *("--rounds=2", "--eval_every=1", "--clients=4", "--cohort=2", "--widths=8,6"),
        *("--set=top_k=3", "--learning_rate=0.1", "--chunk=1,1"),
    )
    row = fedcfa.clients_factors("digits")[-1]
    drawn: list[Figure] = []
    monkeypatch.setattr(figures, "save", lambda figure, *a, **k: drawn.append(figure))
    monkeypatch.setattr("sklearn.manifold.TSNE.fit_transform", lambda self, x: x[:, :2])
    with no_figures():
        (result,) = row_runs.run([row], row_runs.configs([row], tmp_path, small))
    found, client = factors.panel(result, 2, 20)
    factors.draw(tmp_path / "factors.png", "digits", [result])
    assert [len(axis.lines) for axis in drawn[-1].axes] == [4]  # three clients and all
    assert found.shape == (60, 8)
    assert len(set(client)) == 3
    trained = finished.open("run", result.only.folder, "last")
    made = trained.data
    # Counterfactuals have three factors of a mean image, and the other five are the image's.
    x = unit_range(made.data.x[:5])
    model, variables = made.model, trained.fitted.network()
    average = x[:1] * 0 + 0.5
    y = made.data.y[:5]
    told_factors = factors.trained_on(trained.cell, 0, variables, model, x, y, average)
    plain, of_average = (np.asarray(factors.encoded(model, variables, v)) for v in (x, average))
    kept = np.asarray(told_factors) == plain
    assert (kept.sum(1) >= 5).all()
    replaced = np.where(kept, plain, np.broadcast_to(of_average, plain.shape))
    np.testing.assert_allclose(told_factors, replaced, rtol=1e-6)


def test_factors_are_of_the_largest_clients() -> None:
    parts = [np.arange(3), np.arange(3, 13), np.arange(13, 17)]
    rows, whose = factors.chosen_rows(parts, 2, 6, 0)
    # Each with no more than it holds.
    assert [int((whose == who).sum()) for who in (-1, 1, 2, 0)] == [6, 6, 4, 0]
    assert set(rows[whose == 1]) < set(parts[1])
    assert set(rows[whose == 2]) == set(parts[2])


def test_methods_start_from_the_row_before(tmp_path: Path) -> None:
    rows = fedcfa.simpson("mnist")
    first, *others = row_runs.configs(rows, tmp_path)
    (cell,) = grid.cells(first, ["test"])
    start = tmp_path / rows[0].folder / grid.folder_name(cell.name)
    assert [one.network.init_from for one in (first, *others)] == ["", *[str(start)] * len(others)]
    # Colours mislead clients only.
    assert [one.environment.shading for one in (first, *others)] == [
        "random",
        *["paradox"] * len(others),
    ]
    assert first.evaluation.stop_above == (0.95,)
    assert len({(one.network.widths, one.network.cut) for one in (first, *others)}) == 1
