"""The first look: what its rows have in common, its table, its strips of data and its figure."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
from matplotlib.figure import Figure

from fedjax_inv_experiments.assembly import experiment
from fedjax_inv_experiments.config import NAMES, Config
from fedjax_inv_experiments.folder.records import (
    CellRecord,
    Result,
    RunRecord,
    RunResult,
    StopRecord,
)
from fedjax_inv_experiments.report import figures
from fedjax_inv_experiments.studies import data_strips, drawings, first_look, row_runs, study
from fedjax_inv_experiments.studies.row_runs import CellResult, RowResult
from runs import line, others

ROWS = first_look.rows("digits")
CONFIGS = row_runs.configs(ROWS, Path("runs"))


def test_methods_have_the_same_data_network_and_budget() -> None:
    own = {"run_dir", "watch_examples", "stop_below", "after_stop", "cut", "algorithm", "set"}
    own |= {"optimizer", "learning_rate", "momentum"}
    own |= {name for name in NAMES if name.startswith("server_")}
    by_shift: dict[str, list[Config]] = {}
    for row, chosen in zip(ROWS, CONFIGS, strict=True):
        by_shift.setdefault(row.series, []).append(chosen)
    for of in by_shift.values():
        assert len(of) == 5
        assert len({str(others(one, own)) for one in of}) == 1
        assert (of[0].evaluation.select, of[0].training.seeds) == ("last", (0, 1, 2))


def line_of(chosen: Config, stops: list[int | None] | None) -> study.Cells:
    """The line of a row of which some seeds stopped, with 0.9 at the stop and 0.2 at the last."""

    last = line(400, test_score=0.2, worst_score=0.1, bytes=3_000_000)
    runs = []
    for seed in range(3):
        made = RunResult(seed, {}, False, {}, last, selected=last)
        if stops:
            stop = StopRecord(0.6, stops[seed], 0.5, {}, 0.5, 0.9, "test", 0.1)
            made = msgspec.structs.replace(made, stops=[stop])
        runs.append(made)
    result = Result(CellRecord("fl_games", {}, "0.9", [RunRecord(0, {})]), runs)
    row = RowResult(ROWS[0], chosen, [CellResult("0.9", runs, [], result)])
    return study.line(first_look.PAPER, first_look.PAPER.studies["shifts"], "digits", row)


def test_the_table_serves_the_stop_and_else_the_last_round() -> None:
    plain = line_of(CONFIGS[0], None)
    assert (plain["test, %"], plain["selected by"]) == ("20.0 ± 0.0", "last round")
    game = line_of(CONFIGS[2], [50, None, 60])
    assert (game["test, %"], game["selected by"]) == ("66.7 ± 40.4", "stop, 2 of 3")
    assert game["at round"] == "170 ± 199"


def test_a_strip_has_images_of_clients_and_of_the_test() -> None:
    shown = data_strips.strip(CONFIGS[5])
    assert list(shown) == ["client 1", "client 10", "test"]
    assert all(images.shape == (8, 8, 8, 3) for images in shown.values())
    # The images of the test are in its domain, and in the order of their labels.
    data = experiment.make(CONFIGS[5], CONFIGS[5].training.seeds[:1]).dataset
    known = {(x[..., 0] / 255).astype(np.float32).tobytes(): row for row, x in enumerate(data.x)}
    rows = [known[image[..., 0].astype(np.float32).tobytes()] for image in shown["test"]]
    assert {data.domains[data.domain[row]] for row in rows} == {"75"}
    assert data.y[rows].tolist() == sorted(data.y[rows])
    # Two colours are not red and green, which many tell apart badly.
    one, other = data_strips.colours(np.eye(2)[:, None, None])[:, 0, 0]
    assert min(one[1], other[1]) > 0.5


def test_the_figure_has_bars_with_their_seeds_and_is_not_drawn_without_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr(figures, "save", lambda figure, *a, **k: drawn.append(figure))
    strip = {"client 1": np.ones((8, 4, 4, 3)), "test": np.zeros((8, 4, 4, 3))}
    bars = {"FedAvg": [10.0, 20.0, 30.0], "CAFE": [50.0, 52.0, 54.0]}
    panels = [data_strips.StripPanel(f"shift {n}", strip, bars, 10.0 * n) for n in (1, 2)]
    data_strips.draw(tmp_path / "x.png", panels, ["FedAvg", "diverged", "CAFE"])
    above, below = drawn[0].axes[0], drawn[0].axes[2]
    assert len(above.images) == 16
    assert [bar.get_width() for bar in below.patches] == [20, 52]
    assert [text.get_text() for text in below.texts] == ["20", "no value", "52", "chance"]
    dots = [line.get_xdata() for line in below.lines if line.get_marker() == "o"]
    np.testing.assert_array_equal(dots, [*bars.values()])
    assert data_strips.draw(tmp_path / "x.png", [], ["FedAvg"]) == drawings.NOTHING
