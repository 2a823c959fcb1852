"""Figures: nothing leaves the canvas or lies on something else, as matplotlib measures it."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

from fedjax_inv import algorithms
from fedjax_inv.data.dataset import Dataset
from fedjax_inv_experiments import data_figures, evaluation, figures, names
from fedjax_inv_experiments.data_figures import Holders
from fedjax_inv_experiments.metrics import ACCURACY, Measure
from fedjax_inv_experiments.running.records import (
    Cell,
    Domain,
    Line,
    Result,
    Run,
    RunResult,
)
from fedjax_inv_experiments.studies import drawings
from runs import line


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> dict[str, Figure]:
    """The figures that are drawn, by their files' names, and not written."""
    seen: dict[str, Figure] = {}
    monkeypatch.setattr(figures, "save", lambda f, path, **k: seen.update({path.name: f}))
    return seen


def laid_out(figure: Figure) -> Bbox:
    """The bounds of a figure, whose places are known then."""
    FigureCanvasAgg(figure).draw()
    return figure.bbox.padded(1.0)


def texts(figure: Figure) -> Iterator[Any]:
    """The legends, titles and labels."""
    yield from figure.legends
    yield from figure.texts
    for axis in figure.axes:
        yield from (axis.title, axis.xaxis.label, axis.yaxis.label)
        yield from ticks(axis, "x") + ticks(axis, "y")


def ticks(axis: Axes, side: str) -> list[Any]:
    """The labels of an axis that are seen."""
    of = axis.xaxis if side == "x" else axis.yaxis
    low, high = sorted(of.get_view_interval())
    return [
        text
        for place, text in zip(of.get_ticklocs(), of.get_ticklabels(), strict=False)
        if text.get_text() and text.get_visible() and low <= place <= high
    ]


def check(figure: Figure) -> None:
    """All text is on the canvas, and no two labels of an axis overlap, nor a legend a panel."""
    bounds = laid_out(figure)
    for text in texts(figure):
        box = text.get_window_extent()
        if box.width and text.get_visible():
            assert bounds.x0 <= box.x0 <= box.x1 <= bounds.x1, text
            assert bounds.y0 <= box.y0 <= box.y1 <= bounds.y1, text
    for axis, side in itertools.product(figure.axes, "xy"):
        boxes = [text.get_window_extent() for text in ticks(axis, side)]
        for one, other in itertools.pairwise(boxes):
            assert not one.overlaps(other), (side, one, other)
    for legend, axis in itertools.product(figure.legends, figure.axes):
        assert not legend.get_window_extent().overlaps(axis.get_window_extent())


def cells(
    monkeypatch: pytest.MonkeyPatch,
    labels: list[str],
    domains: list[str],
    held_outs: list[str],
    clients: int,
) -> list[tuple[str, Path, Result]]:
    """Finished cells; an accuracy follows from its domain, round and seed, in percent."""
    logs: dict[Path, list[Line]] = {}

    def evaluated(held_out: str, round: int, seed: int) -> Line:
        scores = {name: (10 * at + round + seed) / 100 for at, name in enumerate(domains)}
        splits = {name: "test" if name == held_out else "validation" for name in domains}
        # As a run has them: what is held out comes last.
        order = sorted(domains, key=lambda name: name == held_out)
        return line(
            round,
            run=seed,
            seed=seed,
            domains={name: Domain(scores[name], None, 100, splits[name]) for name in order},
            test_score=scores[held_out],
            score_by_client=[None, *((k % 90 + seed) / 100 for k in range(1, clients))],
        )

    found = []
    for label, held_out in itertools.product(labels, held_outs):
        place = Path(f"{label}/{held_out}")
        lines = [evaluated(held_out, round, seed) for round in (0, 5, 10) for seed in (0, 1)]
        runs = [
            RunResult(seed, {}, False, {"validation": lines[2 + seed]}, lines[4 + seed])
            for seed in (0, 1)
        ]
        cell = Cell("fedavg", {}, held_out, [Run(seed, {}) for seed in (0, 1)])
        logs[place] = lines
        found.append((label, place, Result(cell, runs)))
    monkeypatch.setattr(figures.log, "read", lambda folder, done: logs[folder])
    return found


LONG = [f"an algorithm with a_long_setting=of_some_value and cost=$a${i}" for i in range(8)]


@pytest.mark.parametrize(("labels", "num_domains", "clients"), [(LONG, 6, 6), (["fedavg"], 2, 200)])
def test_one_panel(
    saved: dict[str, Figure],
    monkeypatch: pytest.MonkeyPatch,
    labels: list[str],
    num_domains: int,
    clients: int,
) -> None:
    domains = [f"d{index}" for index in range(num_domains)]
    made = cells(monkeypatch, labels, domains, domains[-1:], clients)
    figures.write(Path("x"), made, title="my $data$ and its title: " + "long words " * 15)
    assert ("domains.png" in saved) == (num_domains > 2)
    for figure in saved.values():
        check(figure)
        (legend,) = figure.legends
        drawn = [text.get_text().replace("\n", " ") for text in legend.get_texts()]
        assert drawn == [figures.literal(names.named(label)) for label in labels]
    expected = "client" if clients <= 6 else "clients, the worst first, %"
    assert saved["clients.png"].axes[0].get_xlabel() == expected
    (axis,) = saved["curves.png"].axes
    held_out, validation = axis.lines[:2]
    heights = [(num_domains - 1) * 10 + round + 0.5 for round in (0, 5, 10)]
    np.testing.assert_allclose(held_out.get_xydata(), np.transpose([[0, 5, 10], heights]))
    np.testing.assert_allclose(validation.get_ydata(), 50)
    assert len({(line.get_linestyle(), line.get_marker()) for line in axis.lines}) == len(labels)


def test_a_method_has_its_colour_in_every_figure() -> None:
    few = figures.styles(["fedprox", "fedavg"])
    many = figures.styles(["my own", "FedAvg", "FedProx-epochs", "fedprox proximal=1.0", "other"])
    assert few["fedavg"]["color"] == many["FedAvg"]["color"]
    assert few["fedprox"]["color"] == many["FedProx-epochs"]["color"]
    assert len({style["color"] for style in many.values()}) == len(many)
    assert names.named("fedprox proximal=1.0") == "FedProx proximal=1.0"
    assert {*names.METHODS} == {*algorithms.LISTED}


def test_panels_of_a_last_line_that_is_not_full(
    saved: dict[str, Figure], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each column has its label; all panels have the domains in the same places."""
    domains = [str(15 * index) for index in range(7)]
    made = cells(monkeypatch, ["fedavg", "fedprox"], domains, domains, 5)
    figures.write(Path("x"), made, title="digits")
    figure = saved["domains.png"]
    check(figure)
    assert [axis.get_xlabel() for axis in figure.axes] == [""] * 4 + ["domain"] * 3
    for axis in figure.axes:
        fedavg = [line.get_xydata()[0] for line in axis.lines][: len(domains)]
        # Where the round is 5, and the mean seed 0.5.
        np.testing.assert_allclose([y for _, y in fedavg], [10 * at + 5.5 for at in range(7)])


@pytest.mark.parametrize(("num_classes", "clients"), [(2, 1), (120, 1000)])
def test_an_evaluation(saved: dict[str, Figure], num_classes: int, clients: int) -> None:
    classes = tuple(f"class {k}" for k in range(num_classes))
    rows = [
        {"seed": seed, "by": by, "name": name, "score": score}
        for seed in (0, 1)
        for by, scores in {
            "domain": {"a": 0.5, "a name that is $long$ enough": 1.0},
            "class": dict.fromkeys(classes, 1.0),
            "client": {str(k): (k % 50 + seed) / 100 for k in range(clients)},
        }.items()
        for name, score in scores.items()
    ]
    counts = np.eye(num_classes, dtype=int)
    evaluated = evaluation.Evaluated("classes", classes, ACCURACY, pd.DataFrame(rows), counts)
    evaluation.draw(Path("e.png"), evaluated, "fedavg, held out: $a$")
    figure = saved["e.png"]
    check(figure)
    # As many numbers would be too small to be read.
    assert bool(figure.axes[3].texts) == (num_classes == 2)
    if clients > 1:
        np.testing.assert_allclose(figure.axes[2].lines[0].get_ydata()[[0, -1]], [0.5, 49.5])


@pytest.mark.parametrize("factor", [1.0, 100.0])
def test_curves_of_errors_that_fall_far_are_logarithmic(
    saved: dict[str, Figure], monkeypatch: pytest.MonkeyPatch, factor: float
) -> None:
    """Else the untrained network sets the axis, and all other errors lie on one line."""
    error = Measure("absolute error", higher_is_better=False, is_share=False)
    made = cells(monkeypatch, ["fedavg"], ["0", "1", "2"], ["2"], 3)
    made = [(*of, msgspec.structs.replace(result, score=error)) for *of, result in made]
    read = figures.log.read

    def scaled(folder: Path, done: int) -> list[Line]:
        """Round 0 alone is worse by the factor."""
        lines = read(folder, done)
        return [x if x.round else x | {"test_score": factor * x.test_score} for x in lines]

    monkeypatch.setattr(figures.log, "read", scaled)
    figures.write(Path("x"), made, title="digits")
    check(saved["curves.png"])
    (axis,) = saved["curves.png"].axes
    assert axis.get_yscale() == ("log" if factor > 1 else "linear")
    assert axis.get_ylabel() == "absolute error, lower is better"


@pytest.mark.parametrize("text", ["a $x$", "1$ and 2$", r"\$a$"])
def test_a_text_is_drawn_as_it_is(text: str) -> None:
    drawn = Figure().text(0, 0, figures.literal(text))
    assert drawn._preprocess_math(drawn.get_text()) == (text, False)


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
    names = tuple(f"class number {index}" for index in range(10))
    y: np.ndarray = rows % 10
    if kind == "values":
        y, names = x[:, :2].astype(np.float32), names[:2]
    if kind == "labels":
        y = rows[:, None] % 10 == np.arange(10)
    inputs = np.zeros((size, 4, 4, 1), np.uint8) if kind == "images" else x
    dataset = Dataset(inputs, y, names, rows % 2, domains, rows < 0)
    held = np.array_split(rows[:-20], clients)
    people = [f"{client}: {domains[client % 2]}" for client in range(clients)]
    sizes = [(len(mine), 0, 0) for mine in held]
    holders = Holders([*people, "test split"], [*held, rows[-20:]], [*sizes, (0, 0, 20)])
    title = f"digits, held out: {domains[-1]}, seed 3"
    figure = data_figures.paint(dataset, holders, rows < 0, title)
    check(figure)
    assert figure.get_suptitle().replace("\n", " ").startswith(figures.literal(title)[:40])
    counts = figure.axes[1 if kind == "images" else 0]
    shares = np.asarray(counts.get_images()[0].get_array())
    assert shares.shape == (clients + 1, 10)
    np.testing.assert_allclose(shares.sum(1), 1)
    assert len(ticks(counts, "y")) >= min(clients, 5)
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
    (figure,) = drawn
    check(figure)
    (axis,) = figure.axes
    assert [text.get_text() for text in ticks(axis, "x")] == methods
    places = {x for line in axis.lines for x in np.asarray(line.get_xdata(), float).tolist()}
    assert len(places) == len(methods) * len(series)


def test_a_long_curve_is_drawn_with_its_swings_as_a_band() -> None:
    y = np.array([[0.0, 1.0] * 125, [1.0, 0.0] * 125])
    x, values = drawings._thinned(drawings.Line(np.arange(250), y))
    np.testing.assert_allclose(x, np.arange(1, 250, 3)[:83])
    assert values.shape == (6, 83)
    assert {*values.ravel().tolist()} == {0.0, 1.0}
    np.testing.assert_allclose(values.mean(0), 0.5)
    np.testing.assert_allclose(drawings._thinned(drawings.Line(np.arange(250), y[:1]))[1], y[:1])
