"""Figures: what they show, in which size and colour, and that no text leaves the canvas."""

import itertools
from pathlib import Path

import msgspec
import numpy as np
import pandas as pd
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from fedjax_inv import algorithms
from fedjax_inv.data.dataset import Dataset
from fedjax_inv_experiments import evaluation
from fedjax_inv_experiments.assembly.metrics import ACCURACY, Measure
from fedjax_inv_experiments.folder import records
from fedjax_inv_experiments.folder.records import Domain, Line, Result, RunRecord, RunResult
from fedjax_inv_experiments.report import data_figures, figures, names, run_figures
from fedjax_inv_experiments.report.data_figures import Holders
from fedjax_inv_experiments.report.differences import ScoreColumn
from fedjax_inv_experiments.report.tables import TableCell
from fedjax_inv_experiments.studies import drawings
from runs import line


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> dict[str, Figure]:
    """The figures that are drawn, by their files' names, and not written."""
    seen: dict[str, Figure] = {}
    monkeypatch.setattr(figures, "save", lambda f, path, **k: seen.update({path.name: f}))
    return seen


def check(figure: Figure) -> None:
    """All text is on the canvas, and the legend is on no panel."""
    FigureCanvasAgg(figure).draw()
    bounds = figure.bbox.padded(1.0)
    texts = [*figure.legends, *figure.texts]
    texts += [text for axis in figure.axes for text in (axis.title, axis.xaxis.label)]
    boxes = [text.get_window_extent() for text in texts if text.get_visible()]
    for box in (box for box in boxes if box.width):
        assert bounds.x0 <= box.x0 <= box.x1 <= bounds.x1
        assert bounds.y0 <= box.y0 <= box.y1 <= bounds.y1
    for legend, axis in itertools.product(figure.legends, figure.axes):
        assert not legend.get_window_extent().overlaps(axis.get_window_extent())


def cells(
    monkeypatch: pytest.MonkeyPatch, labels: list[str], held_outs: list[str], clients: int = 3
) -> list[TableCell]:
    """Finished cells; an accuracy follows from its domain, round and seed, in percent."""
    logs: dict[Path, list[Line]] = {}
    domains = [*held_outs, "last"]

    def evaluated(held_out: str, round: int, seed: int) -> Line:
        scores = {name: (10 * at + round + seed) / 100 for at, name in enumerate(domains)}
        splits = {name: "test" if name == held_out else "validation" for name in domains}
        return line(
            round,
            run=seed,
            seed=seed,
            domains={name: Domain(scores[name], None, 100, splits[name]) for name in domains},
            test_score=scores[held_out],
            score_by_client=[None, *((k % 90 + seed) / 100 for k in range(1, clients))],
        )

    found = []
    for label, held_out in itertools.product(labels, held_outs):
        place = Path(f"{label}/{held_out}")
        logs[place] = [evaluated(held_out, round, seed) for round in (0, 5, 10) for seed in (0, 1)]
        runs = [
            RunResult(seed, {}, False, {"validation": logs[place][2 + seed]}, logs[place][4 + seed])
            for seed in (0, 1)
        ]
        cell = records.CellRecord("fedavg", {}, held_out, [RunRecord(seed, {}) for seed in (0, 1)])
        found.append(TableCell(label, Result(cell, runs), folder=place))
    monkeypatch.setattr(run_figures.log, "read", lambda folder, done: logs[folder])
    return found


LONG = [f"an algorithm with a_long_setting=of_some_value and cost=$a${i}" for i in range(8)]


@pytest.mark.parametrize(("labels", "clients"), [(LONG, 6), (["fedavg"], 200)])
def test_curves_domains_and_clients(
    saved: dict[str, Figure], monkeypatch: pytest.MonkeyPatch, labels: list[str], clients: int
) -> None:
    made = cells(monkeypatch, labels, ["a"], clients)
    run_figures.write(Path("x"), made, "my $data$ and its title: " + "long words " * 15)
    for figure in saved.values():
        check(figure)
        (legend,) = figure.legends
        drawn = [text.get_text().replace("\n", " ") for text in legend.get_texts()]
        assert drawn == [figures.literal(label) for label in labels]
    expected = "client" if clients <= 6 else "clients, the worst first, %"
    assert saved["clients.png"].axes[0].get_xlabel() == expected
    (axis,) = saved["curves.png"].axes
    np.testing.assert_allclose(axis.lines[0].get_xydata(), [[0, 0.5], [5, 5.5], [10, 10.5]])
    np.testing.assert_allclose(axis.lines[1].get_ydata(), 50)
    assert len({(each.get_linestyle(), each.get_marker()) for each in axis.lines}) == len(labels)


@pytest.mark.parametrize(("count", "in_a_row"), [(1, 1), (3, 3), (4, 4), (6, 3), (7, 4), (10, 5)])
def test_figures_are_as_wide_as_a_column_or_a_page(
    saved: dict[str, Figure], monkeypatch: pytest.MonkeyPatch, count: int, in_a_row: int
) -> None:
    """All panels name all domains; few lines of panels have an empty place."""
    held_outs = [f"{15 * index}" for index in range(count)]
    run_figures.write(Path("x"), cells(monkeypatch, ["fedavg", "fedprox"], held_outs), "digits")
    for name in ("curves", *(["domains"] if count > 1 else [])):
        figure = saved[f"{name}.png"]
        check(figure)
        assert figure.get_size_inches()[0] == pytest.approx(3.17 if count == 1 else 6.48, abs=0.01)
        lefts = {round(axis.get_position().x0, 2) for axis in figure.axes}
        assert len(lefts) == in_a_row
        if name == "domains":
            for axis in figure.axes:
                labels = [text.get_text() for text in axis.get_xticklabels()]
                assert labels == [*held_outs, "last"][:: 1 + (count > 7)]
                assert all(text.get_visible() for text in axis.get_xticklabels())


def test_a_method_that_diverged_everywhere_is_in_the_legend(
    saved: dict[str, Figure], monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = cells(monkeypatch, ["fedavg", "fedprox"], ["0"])
    runs = [msgspec.structs.replace(run, diverged=True) for run in bad.result.runs]
    bad = bad._replace(result=msgspec.structs.replace(bad.result, runs=runs))
    run_figures.write(Path("x"), [good, bad], "digits")
    (legend,) = saved["curves.png"].legends
    assert [text.get_text() for text in legend.get_texts()] == ["fedavg", "fedprox: diverged"]


def test_a_method_has_its_colour_in_every_figure_and_neighbours_differ() -> None:
    few = figures.styles(["fedprox", "fedavg"])
    many = figures.styles(["my own", "FedAvg", "FedProx-epochs", "fedprox proximal=1.0", "other"])
    assert few["fedavg"]["color"] == many["FedAvg"]["color"]
    assert few["fedprox"]["color"] == many["FedProx-epochs"]["color"]
    assert names.named("fedprox proximal=1.0") == "FedProx proximal=1.0"
    assert {*names.METHODS} == {*algorithms.LISTED}
    for pair in itertools.permutations([*names.METHODS, "fedavg momentum", "fedipg large"], 2):
        one, other = (np.array(style["color"]) for style in figures.styles(pair).values())
        assert np.linalg.norm(one - other) > 0.2, pair


def test_methods_by_their_mean_and_its_interval(tmp_path: Path) -> None:
    scores = pd.DataFrame({"a": [0.1, 0.2, 0.3], "b": [0.4, 0.4, 0.7], "c": [np.nan] * 3})
    drawn = run_figures.methods([ScoreColumn("validation", scores)], "digits", {"a": "My method"})
    check(drawn)
    (axis,) = drawn.axes
    assert [text.get_text() for text in axis.get_yticklabels()] == ["My method", "b", "c"]
    assert [text.get_text() for text in axis.texts] == ["no value"]
    means, ends = [], []
    for bars in axis.containers:
        means.append(float(bars.lines[0].get_xdata()[0]))
        ends.append(bars.lines[2][0].get_segments()[0][:, 0])
    np.testing.assert_allclose(means, [20, 50])
    half = 4.302653 / np.sqrt(3)  # Student's t with two degrees of freedom
    np.testing.assert_allclose(ends[0], [20 - 10 * half, 20 + 10 * half], rtol=1e-5)


def test_the_axis_of_methods_ends_where_a_share_does() -> None:
    scores = pd.DataFrame({"a": [0.5, 0.7], "b": [0.9, 0.92]})  # a's interval is 60 +- 127
    (axis,) = run_figures.methods([ScoreColumn("validation", scores)], "two seeds", {}).axes
    low, high = axis.get_xlim()
    assert -5 < low < high < 105


@pytest.mark.parametrize("factor", [1.0, 100.0])
def test_curves_of_errors_that_fall_far_are_logarithmic(
    saved: dict[str, Figure], monkeypatch: pytest.MonkeyPatch, factor: float
) -> None:
    """Else the untrained network sets the axis, and all other errors lie on one line."""
    error = Measure("absolute error", higher_is_better=False, is_share=False)
    (cell,) = cells(monkeypatch, ["fedavg"], ["a"])
    cell = cell._replace(result=msgspec.structs.replace(cell.result, score=error))
    read = run_figures.log.read

    def scaled(folder: Path, done: int) -> list[Line]:
        """Round 0 alone is worse by the factor."""
        lines = read(folder, done)
        return [x | {"test_score": 0.1 if x.round else 0.1 * factor} for x in lines]

    monkeypatch.setattr(run_figures.log, "read", scaled)
    run_figures.write(Path("x"), [cell], "digits")
    (axis,) = saved["curves.png"].axes
    assert axis.get_yscale() == ("log" if factor > 1 else "linear")
    assert axis.get_ylabel() == "absolute error, lower is better"


@pytest.mark.parametrize("text", ["a $x$", "1$ and 2$", r"\$a$"])
def test_a_text_is_drawn_as_it_is(text: str) -> None:
    drawn = Figure().text(0, 0, figures.literal(text))
    assert drawn._preprocess_math(drawn.get_text()) == (text, False)


def test_fonts_are_embedded_as_publishers_ask(tmp_path: Path) -> None:
    figure = figures.new(2, 1)
    figure.text(0.5, 0.5, "x")
    figures.save(figure, tmp_path / "x.png", dpi=30)
    text = (tmp_path / "x.pdf").read_bytes()
    assert b"CIDFontType2" in text
    assert b"/Type3" not in text


def test_an_evaluation(saved: dict[str, Figure]) -> None:
    rows = [
        {"seed": seed, "by": by, "name": name, "score": score}
        for seed in (0, 1)
        for by, scores in {
            "domain": {"a": 0.5, "a name that is $long$ enough": 1.0},
            "class": {"0": 1.0, "1": 1.0},
            "client": {str(k): (k % 50 + seed) / 100 for k in range(1000)},
        }.items()
        for name, score in scores.items()
    ]
    counts = np.eye(2, dtype=int)
    evaluated = evaluation.CellScores("classes", ("0", "1"), ACCURACY, pd.DataFrame(rows), counts)
    evaluation.draw(Path("e.png"), evaluated, "fedavg, held out: $a$")
    check(saved["e.png"])
    np.testing.assert_allclose(saved["e.png"].axes[2].lines[0].get_ydata()[[0, -1]], [0.5, 49.5])


painted: list[str] = []


def paint(title: str) -> Figure:
    painted.append(title)
    figure, (axis,) = figures.panels(1, (2, 1))
    axis.plot([0, 1])
    figures.entitle(figure, title)
    return figure


def test_the_same_figure_has_the_same_bytes_and_is_not_drawn_again(tmp_path: Path) -> None:
    def written(name: str, title: str) -> list[bytes]:
        figures.draw(tmp_path / f"{name}.v1.png", paint, title, dpi=30)
        return [(tmp_path / f"{name}.v1{ending}").read_bytes() for ending in (".png", ".pdf")]

    first = written("a", "x")
    assert written("b", "x") == first == written("a", "x")
    assert painted == ["x", "x"]
    assert written("a", "y") != first
    (tmp_path / "b.v1.pdf").unlink()
    assert written("b", "x") == first


@pytest.mark.parametrize("kind", ["images", "values", "labels"])
@pytest.mark.parametrize("clients", [2, 1000])
def test_the_data(kind: str, clients: int) -> None:
    size, domains = max(2 * clients, 200), ("photograph", "a name of a domain that is $long$")
    rows, x = np.arange(size), np.random.default_rng(0).exponential(size=(size, 16)) ** 9
    classes = tuple(f"class number {index}" for index in range(10))
    y: np.ndarray = rows % 10
    if kind == "values":
        y, classes = x[:, :2].astype(np.float32), classes[:2]
    if kind == "labels":
        y = rows[:, None] % 10 == np.arange(10)
    inputs = np.zeros((size, 4, 4, 1), np.uint8) if kind == "images" else x
    dataset = Dataset(inputs, y, classes, rows % 2, domains, rows < 0)
    held = np.array_split(rows[:-20], clients)
    people = [f"{client}: {domains[client % 2]}" for client in range(clients)]
    sizes = [(len(mine), 0, 0) for mine in held]
    holders = Holders([*people, "test split"], [*held, rows[-20:]], [*sizes, (0, 0, 20)])
    figure = data_figures.paint(dataset, holders, rows < 0, f"digits, held out: {domains[-1]}")
    check(figure)
    counts = figure.axes[1 if kind == "images" else 0]
    shares = np.asarray(counts.get_images()[0].get_array())
    assert shares.shape == (clients + 1, 10)
    np.testing.assert_allclose(shares.sum(1), 1)
    if kind == "values":  # each histogram counts every example
        panel = figure.axes[1].patches[0].get_data()
        assert panel.values.sum() == pytest.approx(1)


def test_series_of_the_same_methods_stand_side_by_side(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr(drawings, "saved", lambda figure, *others: drawn.append(figure) or "")
    methods = [f"method-{number}-at-once" for number in range(11)]
    series = {name: [(method, [20.0, 30.0]) for method in methods] for name in "abcde"}
    drawings.against(tmp_path / "x.png", "", "", {"accuracy, %": series}, is_joined=False)
    (axis,) = drawn[0].axes
    assert [text.get_text() for text in axis.get_xticklabels()] == methods
    places = {x for each in axis.lines for x in np.asarray(each.get_xdata(), float).tolist()}
    assert len(places) == len(methods) * len(series)


def test_a_long_curve_is_drawn_with_its_swings_as_a_band() -> None:
    y = np.array([[0.0, 1.0] * 125, [1.0, 0.0] * 125])
    x, values = drawings._thinned(drawings.Curve(np.arange(250), y))
    np.testing.assert_allclose(x, np.arange(1, 250, 3)[:83])
    assert values.shape == (6, 83)
    assert {*values.ravel().tolist()} == {0.0, 1.0}
    np.testing.assert_allclose(values.mean(0), 0.5)
    np.testing.assert_allclose(drawings._thinned(drawings.Curve(np.arange(250), y[:1]))[1], y[:1])
