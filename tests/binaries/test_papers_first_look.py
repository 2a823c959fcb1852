"""The first look: what its rows have in common, its table, its strips of data and its figure."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedjax_inv_experiments.experiment import assemble, config
from fedjax_inv_experiments.experiment.config import Config
from fedjax_inv_experiments.studies import data_strips, drawings, first_look, study
from fedjax_inv_experiments.studies.study import CellResult, RowResult

ROWS = first_look.rows("digits")


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> list[Config]:
    return study.configs(first_look.PAPER, ROWS, tmp_path_factory.mktemp("runs"), [])


def test_methods_have_the_same_data_network_and_budget(configs: list[Config]) -> None:
    same = ("data", "environment", "partition", "participation", "run", "watching")
    by_shift: dict[str, list[Config]] = {}
    for row, chosen in zip(ROWS, configs, strict=True):
        by_shift.setdefault(row.series, []).append(chosen)
    assert {len(of) for of in by_shift.values()} == {5}
    for of in by_shift.values():
        for group in same:
            differs = {"run_dir", "watch_examples", "stop_below", "after_stop"}
            flat = [config.flat(one) for one in of]
            names = {field.name for field in config.fields(group)} - differs
            assert all(each[name] == flat[0][name] for each in flat for name in names)
        for name in ("model", "widths", "activation", "batch_size", "local_steps", "local_epochs"):
            assert len({str(config.flat(one)[name]) for one in of}) == 1, name
        assert {one.select for one in of} == {"last"}
        assert {one.seeds for one in of} == {(0, 1, 2)}


def evaluation(test: float, round: int | None, worst: float = 0.1) -> dict[str, Any]:
    scores = {"test_score": test, "worst_score": worst, "validation_score": 0.5}
    return scores | {"round": round, "bytes": 3e6}


def result_of(chosen: Config, stops: list[int | None] | None) -> RowResult:
    """A row of which some seeds stopped, with 0.9 at the stop and 0.2 at the last round."""
    runs: list[Any] = []
    for seed in range(3):
        last = evaluation(0.2, 400)
        run = {"seed": seed, "selected": last, "last": last, "stops": None}
        runs.append(run | ({"stops": [evaluation(0.9, stops[seed])]} if stops else {}))
    result: Any = {"runs": [run | {"diverged": False} for run in runs]}
    row = ROWS[2 if stops else 0]
    return RowResult(row, chosen, [CellResult("0.9", runs, [], result)])


def test_the_table_serves_the_stop_and_else_the_last_round(configs: list[Config]) -> None:
    plain = study.line(first_look.PAPER, _study(), "digits", result_of(configs[0], None))
    assert plain["digits"] == "colour-FedAvg"
    assert (plain["test, %"], plain["selected by"]) == ("20.0 ± 0.0", "last round")
    assert configs[2].stop_below
    game = study.line(first_look.PAPER, _study(), "digits", result_of(configs[2], [50, None, 60]))
    assert (game["test, %"], game["selected by"]) == ("66.7 ± 40.4", "stop, 2 of 3")
    assert game["at round"] == "170 ± 199"


def _study() -> study.Study:
    (only,) = first_look.PAPER.studies.values()
    return only


def test_a_strip_has_images_of_clients_and_of_the_test(
    configs: list[Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    of_angles = configs[5]
    shown = data_strips.strip(of_angles)
    assert list(shown) == ["client 1", "client 10", "test"]
    assert all(images.shape == (8, 8, 8, 3) for images in shown.values())
    # The images of the test are in its domain, and in the order of their labels.
    assembled = assemble.assemble(of_angles, of_angles.seeds[:1])
    data = assembled.dataset
    known = {(x[..., 0] / 255).astype(np.float32).tobytes(): row for row, x in enumerate(data.x)}
    rows = [known[image[..., 0].astype(np.float32).tobytes()] for image in shown["test"]]
    assert {data.domains[data.domain[row]] for row in rows} == {"75"}
    assert data.y[rows].tolist() == sorted(data.y[rows])


def test_two_colours_are_not_red_and_green() -> None:
    images = np.zeros((2, 3, 3, 2))
    images[0, ..., 0] = images[1, ..., 1] = 1
    one, other = data_strips.colours(images)[:, 0, 0]
    assert abs(one - other).max() > 0.5
    assert min(one[1], other[1]) > 0.5  # green in both: they differ in blue and red


def test_the_figure_has_bars_with_their_seeds_and_is_not_drawn_without_any(tmp_path: Path) -> None:
    strip = {"client 1": np.ones((8, 4, 4, 3)), "test": np.zeros((8, 4, 4, 3))}
    bars = {"FedAvg": [10.0, 20.0, 30.0], "CAFE": [50.0, 52.0, 54.0]}
    panels = [data_strips.Panel(f"shift {n}", strip, bars, 10.0 * n) for n in (1, 2)]
    figure = data_strips._paint(panels, ["FedAvg", "diverged", "CAFE"])
    above, below = figure.axes[0], figure.axes[2]
    assert len(above.images) == 16
    assert [bar.get_width() for bar in below.patches] == [20, 52]
    assert [text.get_text() for text in below.texts] == ["20", "no value", "52", "chance"]
    dots = [line.get_xdata() for line in below.lines if line.get_marker() == "o"]
    np.testing.assert_array_equal(dots, [*bars.values()])
    assert [text.get_text() for text in below.get_yticklabels()] == ["FedAvg", "diverged", "CAFE"]
    empty = [panel._replace(bars={}) for panel in panels]
    assert data_strips.draw(tmp_path / "none.png", empty, ["FedAvg"]) == drawings.NOTHING
    assert not list(tmp_path.iterdir())
