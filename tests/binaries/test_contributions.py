"""Contributions: the table says what a run's checkpoint holds, and the picture who leaves."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from fedjax_inv.algorithms.exit_strategy import Outcome
from fedjax_inv_experiments import contributions
from fedjax_inv_experiments.contributions import Options
from fedjax_inv_experiments.experiment import config
from fedjax_inv_experiments.reporting import figures
from fedjax_inv_experiments.reporting import phases as phases_of
from fedjax_inv_experiments.reporting.phases import Phase
from runs import Ran, parsed, ran, states

TINY = config.of(
    environment="rotated",
    angles=(0.0, 30.0),
    odd_angles=(135.0,),
    odd_share=0.2,
    held_out="none",
    clients=5,
    algorithm=("exit_strategy",),
    settings=("pretraining_rounds=3", "step_size=0.1"),
    slow=("2:2",),
    lossy=("1:0", "2:1"),
    rounds=4,
    eval_every=2,
    widths=(8,),
    local_steps=1,
    batch_size=64,
    seeds=(0, 3),
    client_chunk="1",
    run_chunk="1",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return ran(config.changed(TINY, run_dir=str(tmp_path_factory.mktemp("runs") / "tiny")))


def entries(table: str) -> list[list[str]]:
    """The cells of a table's rows, without headers."""
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]
    ]


@pytest.mark.slow
def test_the_table_tells_what_the_checkpoint_holds(run: Ran) -> None:
    (phase,) = phases_of.find(run.folder)
    told = states(run.folder, 4)["state"]["server"]["assessment"]
    linear, quadratic, measured = (told[name] for name in ("linear", "quadratic", "measured"))
    table = linear - told["smoothness"][:, None, None] * quadratic
    assert phase.seeds == (0, 3)
    assert phase.title == "tiny, 3 rounds of pre-training"
    assert phase.domains == ("135", "0", "0", "30", "30")
    assert phase.aberrant == ("", "arrives with p = 0", "2 rounds an update, arrives with p = 1",
                              "", "")  # fmt: skip
    np.testing.assert_allclose(
        phase.outcome.contributions, np.where(measured, table, np.nan), rtol=1e-6
    )
    rows = entries(contributions.table(phase))
    assert [row[3] for row in rows] == ["3 of 3", "0 of 3", "2 of 3", "3 of 3", "3 of 3"]
    for client in (0, 2, 3, 4):
        number = measured[:, :, client].sum(1)
        means = table[:, :, client].sum(1) / number
        assert rows[client][4:6] == [f"{value:.1e}" for value in means]
        assert rows[client][7] == f"{told['stays'][:, client].sum()}/2"
        # At the smoothness where the mean is 0, it is.
        at = phase.critical[:, client, None]
        rest = linear[:, :, client] - at * quadratic[:, :, client]
        np.testing.assert_allclose(rest.sum(1), 0, atol=1e-6 * np.abs(linear).max())
        assert rows[client][6] == f"{at.min():.3g} to {at.max():.3g}"
    assert rows[1][4:] == ["", "", "", "2/2"]  # nothing is known of it, so it stays
    first, second = told["smoothness"]
    assert contributions.smoothness(phase) == f"L: {first:.3g} (seed 0), {second:.3g} (seed 3)"


def phase(contributions_of: np.ndarray, stays: np.ndarray) -> Phase:
    mean = np.nanmean(contributions_of, axis=-2)
    num_runs, num_clients = mean.shape
    return Phase(
        "a title",
        tuple(range(num_runs)),
        ("135", *["0"] * (num_clients - 1)),
        ("", "3 rounds an update", *[""] * (num_clients - 2)),
        Outcome(contributions_of, mean, stays, ~stays, np.ones(num_runs)),
        np.ones_like(mean),
    )


def drawn(monkeypatch: pytest.MonkeyPatch, path: Path, *phases: Phase) -> Figure:
    seen: list[Figure] = []
    save = figures.save
    monkeypatch.setattr(figures, "save", lambda f, *a, **k: (seen.append(f), save(f, *a, **k)))
    contributions.draw(path, phases)
    assert path.read_bytes().startswith(b"\x89PNG")
    (figure,) = seen
    return figure


def test_the_picture_marks_who_leaves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(2, 6, 3))
    values[:, 1:5, 1] = np.nan
    stays = np.array([[False, False, True], [True, False, True]])
    figure = drawn(monkeypatch, tmp_path / "x.png", phase(values, stays))
    (axis,) = figure.axes
    legend = [text.get_text() for text in axis.get_legend().get_texts()]
    assert legend == [
        "client 0 (135) leaves in 1 of 2 seeds",
        "client 1 (0, 3 rounds an update) leaves in 2 of 2 seeds",
        "client 2 (0) stays",
    ]
    points = {
        (x, y)
        for line in axis.lines
        if line.get_marker() == "x"
        for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True)
    }
    assert points == {(6, values[0, 5, 0]), (6, values[0, 5, 1]), (6, values[1, 5, 1])}
    lines = [line for line in axis.lines if len(np.atleast_1d(line.get_xdata())) > 1]
    expected = [values[run, :, client] for run in range(2) for client in range(3)]
    for line, each in zip(lines, expected, strict=False):
        np.testing.assert_array_equal(line.get_ydata(), each[np.isfinite(each)])


@pytest.mark.slow
def test_the_binary(run: Ran, tmp_path: Path) -> None:
    out = tmp_path / "new" / "mine.png"
    text = contributions.run(Options((str(run.folder),), str(out)))
    assert "tiny, 3 rounds of pre-training\n\n| client   | domain" in text
    assert text.endswith(f"Picture: {out}.")
    assert out.read_bytes().startswith(b"\x89PNG")
    assert parsed(contributions.BINARY, "--runs=a,b", "--out=c.png") == Options(("a", "b"), "c.png")
