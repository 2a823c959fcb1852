"""The picture of an experiment's data: it shows what the clients hold, and the table counts it."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from fedjax_inv.data import stains
from fedjax_inv.data.dataset import Dataset
from fedjax_inv.data.environments import Colored
from fedjax_inv.data.federation import parts_of
from fedjax_inv_experiments import config
from fedjax_inv_experiments.assembly import experiment
from fedjax_inv_experiments.config import Config
from fedjax_inv_experiments.report import data_figures, data_report, figures
from fedjax_inv_experiments.report.data_figures import Holders

Chosen = tuple[Config, str, int]


def options(tmp_path: Path, *, images: int = 10, **values: Any) -> Chosen:
    return config.of(**values), str(tmp_path / "new" / "data.png"), images


def cells(table: str) -> list[list[str]]:
    """The cells of the lines of a table, without its rule and that of uses."""
    parts = [part for part in table.split("\n\n") if "domain: examples for" not in part]
    lines = [line for part in parts for line in part.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [rows[0], *rows[2:]]


def shown(monkeypatch: pytest.MonkeyPatch, chosen: Chosen) -> tuple[str, Figure]:
    """What is printed, and the figure that is not written."""
    seen: list[Figure] = []
    monkeypatch.setattr(figures, "save", lambda figure, path, **other: seen.append(figure))
    text = data_report.show(*chosen)
    (figure,) = seen
    return text, figure


def test_the_picture_is_there_and_the_table_is_right(tmp_path: Path) -> None:
    chosen = options(tmp_path, environment="stained", stain="both", clients=7, seeds=(3, 4))
    text = data_report.show(*chosen)
    out = chosen[1]
    assert Path(out).read_bytes().startswith(b"\x89PNG")
    assert text.strip().startswith("digits, stained domains, held out: test, seed 3\n")
    assert text.endswith(f"Picture: {out}.")
    made = experiment.make(chosen[0], (3,))
    dataset, split = made.dataset, made.splits["test"][3]
    train, valid, (test,) = map(parts_of, (split.train, split.valid, split.test))
    held = [*(np.concatenate(pair) for pair in zip(train, valid, strict=True)), test]
    head, *rows = cells(text)
    assert head[:4] == ["client: domain", "training", "validation", "test"]
    assert [row[0] for row in rows[:7]] == [
        f"{client}: {dataset.domains[domain]}" for client, domain in enumerate(split.domain)
    ]
    assert [row[1:4] for row in rows] == [
        *([str(len(t)), str(len(v)), ""] for t, v in zip(train, valid, strict=True)),
        ["", "", "359"],
        [str(sum(map(len, train))), str(sum(map(len, valid))), "359"],
    ]
    seen = np.concatenate(held[:7])
    for column, name in ((4, "stroke"), (5, "ground")):
        assert head[column] == f"right by {name} alone, %"
        cue, y = getattr(dataset.x, name), dataset.y
        # The commonest label of each colour, the first of several.
        guess = [np.bincount(y[seen[cue[seen] == color]]).argmax() for color in range(10)]
        for row, mine in zip(rows, held, strict=False):
            right = np.mean([guess[cue[example]] == y[example] for example in mine])
            assert row[column] == f"{100 * right:.1f}"


def test_a_cue_is_judged_by_what_it_means_in_training() -> None:
    cue = np.array([0, 0, 1, 1, 0, 0, 0, 1, 1, 1])
    y = np.array([0, 0, 1, 1, 1, 1, 1, 0, 0, 0])
    grey = np.zeros((10, 1, 1, 1), np.uint8)
    dataset = Dataset(
        Colored(grey, cue), y, ("a", "b"), np.arange(10) // 4, ("d", "e", "f"), y > 1, np.asarray
    )
    rows = [np.array([0, 2]), np.array([1, 3]), np.arange(4, 10)]
    sizes = [(1, 1, 0), (2, 0, 0), (0, 0, 6)]
    holdings = Holders(["0: d", "1: d", "test"], rows, sizes)
    printed = cells(data_report.table(dataset, holdings))
    assert printed[0][4] == "right by color alone, %"
    assert [row[1:] for row in printed[1:]] == [
        ["1", "1", "", "100.0"],
        ["2", "", "", "100.0"],
        ["", "", "6", "0.0"],
        ["3", "1", "6", ""],
    ]


def test_the_figure_shows_labels_images_and_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = options(tmp_path, environment="combinations", clients=9, images=5)
    text, figure = shown(monkeypatch, chosen)
    assert "held out: 9" in text
    dataset = experiment.make(chosen[0]).dataset
    images, by_class, by_color = figure.axes
    assert [tick.get_text() for tick in images.get_yticklabels()] == list("0123456789")
    assert [t.get_text() for t in images.texts if len(t.get_text()) == 1] == list("01234" * 10)
    drawn = [np.asarray(image.get_array()) for image in images.get_images()]
    for domain in range(10):
        *pictures, joint = drawn[6 * domain : 6 * domain + 6]  # and a class by colour
        rows = data_figures.in_turn(dataset, domain, 5)
        for label, (row, picture) in enumerate(zip(rows, pictures, strict=True)):
            assert (dataset.y[row], dataset.domain[row]) == (label, domain)
            bright = dataset.x.image[row, ..., 0] == 255
            color = stains.STROKES[(label + domain) % 10] / 255
            np.testing.assert_allclose(picture[bright], color[None].repeat(bright.sum(), 0))
        here = dataset.domain == domain
        pairs = zip(dataset.y[here], dataset.x.stroke[here], strict=True)
        expected = Counter((int(y), int(color)) for y, color in pairs)
        assert {at: n for at, n in np.ndenumerate(joint) if n} == expected
    sizes = [int(row[1]) + int(row[2]) for row in cells(text)[1:10]] + [(dataset.domain == 9).sum()]
    for axis, names in ((by_class, list("0123456789")), (by_color, list(stains.COLORS))):
        assert [tick.get_text() for tick in axis.get_xticklabels()] == names
        counts = np.reshape([int(t.get_text() or 0) for t in axis.texts], (10, len(names)))
        np.testing.assert_array_equal(counts.sum(1), sizes)


def test_wrong_labels_are_counted_and_red(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = dict(clients=4, wrong_labels=0.5, wrong_clients=0.5, angles=(0.0, 45.0, 75.0))
    text, figure = shown(monkeypatch, options(tmp_path, **values))
    rows = {row[0]: row[1:] for row in cells(text)[1:]}
    assert cells(text)[0][4:] == ["wrong labels"]
    sizes = {name: int(row[0]) + int(row[1]) for name, row in rows.items() if name[0] in "0123"}
    wrong = {name: int(rows[name][3]) for name in sizes if name.endswith(", wrong labels")}
    assert len(wrong) == 2
    assert all(rows[name][3] == "" for name in sizes.keys() - wrong.keys())
    assert rows["held out: 75"][3] == ""
    assert int(rows["in all"][3]) == sum(wrong.values())
    for name, number in wrong.items():
        assert abs(number / sizes[name] - 0.5) < 5 * np.sqrt(0.25 / sizes[name])
    images, by_class = figure.axes
    assert images.get_title() == "domains, with labels, wrong ones in red"
    names = [tick.get_text() for tick in by_class.get_yticklabels()]
    assert names == [name for name in rows if name != "in all"]
    written = [t for t in images.texts if len(t.get_text()) == 1]
    red = [t.get_color() == "firebrick" for t in written]
    # The pictures of the test are in the last line.
    assert any(red)
    assert not any(red[-10:])


def test_rgb() -> None:
    x = np.random.default_rng(0).uniform(size=(2, 3, 4, 5)).astype(np.float32)
    two = data_figures.to_rgb(x[..., :2])
    np.testing.assert_allclose(two, np.pad(x[..., :2], [(0, 0)] * 3 + [(0, 1)]))
    assert data_figures.to_rgb(x).max() <= 1
    # An image in one channel has that channel's hue, and hues differ.
    hues = data_figures.to_rgb(np.eye(5)[:, None, None])
    assert len(np.unique(hues.round(3), axis=0)) == 5


def test_labels_come_in_turn() -> None:
    y = np.array([2, 2, 0, 0, 0, 1, 1, 0])
    domain = np.array([0, 0, 0, 0, 0, 0, 1, 0])
    data = Dataset(y[:, None], y, ("a", "b", "c"), domain, ("d", "e", "f"), domain > 5)
    assert data_figures.in_turn(data, 0, 5).tolist() == [2, 5, 0, 3, 1]
    assert data_figures.in_turn(data, 1, 5).tolist() == [6]
    assert data_figures.in_turn(data, 2, 5).tolist() == []


def test_data_that_are_no_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of vectors the range of each feature is printed and drawn; of texts, counts alone."""
    drawn: list[Path] = []
    monkeypatch.setattr(figures, "save", lambda figure, path, **other: drawn.append(path))
    table, texts = tmp_path / "vectors.npz", tmp_path / "texts.csv"
    x = np.arange(80.0).reshape(40, 2) * [1, 1000]
    np.savez(table, x=x, y=np.arange(40) % 2)
    texts.write_text("".join(f'"{4 * (i % 2)}","{i}","d","q","u","word{i}"\n' for i in range(40)))
    of_table, of_texts = (
        data_report.show(*options(tmp_path, dataset=str(path), model=model))
        for path, model in ((table, "mlp"), (f"sentiment140:{texts}", "lstm"))
    )
    assert [line for line in cells(of_table) if line[0] in "01"] == [
        ["0", "39", "23.1", "0", "78"],
        ["1", "4e+04", "2.31e+04", "1e+03", "7.9e+04"],
    ]
    for text in (of_table, of_texts):
        assert "| in all" in text
    out = tmp_path / "new" / "data.png"
    assert drawn == [out, out]
    warning = f"Warning: --dataset={table}: its features differ in scale by a factor of 1e+03 ("
    assert warning in of_table
    assert {*tmp_path.iterdir()} == {table, texts, out.parent}


def test_values_are_counted_by_tenths() -> None:
    y = np.arange(40.0, dtype=np.float32)
    data = Dataset(y[:, None], y, ("y",), np.zeros(40, int), ("all",), y < 0)
    parts = [np.arange(4), np.arange(4, 40)]
    names, counts = data_figures.target_counts(data, parts)
    assert len(names) == 10
    np.testing.assert_array_equal(counts, [[4, *[0] * 9], [0, *[4] * 9]])
    names, counts = data_figures.target_counts(data._replace(y=y * 0), parts)
    np.testing.assert_array_equal(counts, [[4], [36]])
