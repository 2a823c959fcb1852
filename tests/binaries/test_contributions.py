"""Contributions: the table says what a run's checkpoint holds, and the picture who leaves."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from fedjax_inv.algorithms.exit_strategy import Outcome
from fedjax_inv.checks import UsageError
from fedjax_inv_experiments import contributions, sweep
from fedjax_inv_experiments.contributions import Options
from fedjax_inv_experiments.experiment import assemble, config
from fedjax_inv_experiments.reporting import figures
from fedjax_inv_experiments.reporting import phases as phases_of
from fedjax_inv_experiments.reporting.phases import Phase
from fedjax_inv_experiments.running import folder as folders
from fedjax_inv_experiments.running import provenance
from runs import Ran, halved, jobs, no_figures, parsed, ran, states

pytestmark = pytest.mark.slow  # most need trained runs

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


def test_a_run_that_goes_on_is_told_as_far_as_it_is(run: Ran, tmp_path: Path) -> None:
    (phase,) = phases_of.find(halved(run.job, tmp_path / "half"))
    (whole,) = phases_of.find(run.folder)
    assert phase.title == "half, 2 of 3 rounds of pre-training"
    known = np.isfinite(phase.outcome.contributions)
    assert not known[:, 2].any()
    np.testing.assert_array_equal(known[:, :2], np.isfinite(whole.outcome.contributions)[:, :2])


def test_each_setting_of_a_sweep_has_its_phase(tmp_path: Path) -> None:
    chosen = config.changed(
        TINY,
        run_dir=str(tmp_path / "sweep"),
        settings=("pretraining_rounds=1", "step_size=0.1,0.5", "threshold=-9.0"),
        rounds=1,
        eval_every=1,
        slow=(),
        missing="reuse",  # which goes around the exit strategy
    )
    with no_figures(), jobs() as seen:
        sweep.sweep(chosen)
    folder = Path(chosen.run.run_dir)
    (cell,) = (path.parent for path in folder.glob("*/config.json"))
    phases = phases_of.find(cell)
    assert [phase.seeds for phase in phases] == [(0, 3), (0, 3)]
    assert [phase.title.rsplit(",")[0].rsplit(" ")[-1] for phase in phases] == [
        *("step_size=0.1", "step_size=0.5"),
    ]
    assert len(seen[0].cell.runs) == 4
    # C_i is eta (a - L eta b), which is 0 at L = a / (eta b).
    np.testing.assert_allclose(phases[0].critical, 5 * phases[1].critical, rtol=1e-4)
    for phase in phases:
        assert phase.outcome.mean.shape == (2, 5)
        known = np.isfinite(phase.outcome.mean)
        above = phase.critical > phase.outcome.smoothness[:, None]
        np.testing.assert_array_equal((phase.outcome.mean > 0)[known], above[known])


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


def test_a_client_that_was_never_measured_has_no_contribution() -> None:
    values = np.array([[[0.5, np.nan], [1.5, np.nan]]])
    with np.errstate(all="ignore"), pytest.warns(RuntimeWarning, match="Mean of empty slice"):
        unmeasured = phase(values, np.ones((1, 2), bool))
    rows = entries(contributions.table(unmeasured))
    assert [row[4] for row in rows] == ["1.0e+00", ""]


def test_a_run_whose_clients_have_all_left_says_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nothing changes from then on, which the table of its last round does not tell."""
    settings = (*TINY.method.settings, "threshold=9.0")
    ran(config.changed(TINY, settings=settings, rounds=5, run_dir=str(tmp_path / "run")))
    told = f"{tmp_path / 'run'}: threshold: no client that was measured stays; must be at most"
    assert told in capfd.readouterr().err


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


def test_the_picture_of_one_seed_counts_no_seeds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    values, stays = np.ones((1, 6, 3)), np.array([[False, True, True]])
    (axis,) = drawn(monkeypatch, tmp_path / "x.png", phase(values, stays)).axes
    legend = [text.get_text() for text in axis.get_legend().get_texts()]
    assert legend[:2] == ["client 0 (135) leaves", "client 1 (0, 3 rounds an update) stays"]


def test_the_picture_of_many_exits_and_of_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    values = np.ones((1, 2, 12))
    all_leave, none = np.zeros((1, 12), bool), np.ones((1, 12), bool)
    figure = drawn(
        monkeypatch, tmp_path / "x.png", phase(values, all_leave), phase(values[:, :1], none)
    )
    many, nobody = (
        [text.get_text() for text in axis.get_legend().get_texts()] for axis in figure.axes
    )
    assert many[-2:] == ["and 2 others", "a client that stays"]
    assert nobody == ["a client that stays"]


def test_the_binary(run: Ran, tmp_path: Path) -> None:
    out = tmp_path / "new" / "mine.png"
    text = contributions.run(Options((str(run.folder),), str(out)))
    assert "tiny, 3 rounds of pre-training\n\n| client   | domain" in text
    assert text.endswith(f"Picture: {out}.")
    assert out.read_bytes().startswith(b"\x89PNG")
    assert parsed(contributions.BINARY, "--runs=a,b", "--out=c.png") == Options(("a", "b"), "c.png")


def test_other_data_are_told(run: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "fingerprint", lambda data: "0" * 64)
    with pytest.raises(UsageError, match="was trained on other data than --dataset=digits has by"):
        contributions.run(Options((str(run.folder),)))


def test_a_folder_that_is_no_such_run_is_told_in_one_line(run: Ran, tmp_path: Path) -> None:
    other = tmp_path / "avg"
    chosen = config.of(widths=(4,), run_dir=str(other))
    made = assemble.assemble(chosen)
    folders.begin(other, chosen, made.cells[0], provenance.record(made.data))
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_bytes((run.folder / "config.json").read_bytes())
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{")
    for options, message in (
        (Options(()), "^--runs=: must be one or several"),
        (Options(("a",), "x.pdf"), "^--out=x.pdf: must end in .png"),
        (Options(("nowhere",)), "^--runs=nowhere: must be the folder of a run"),
        (Options((str(broken),)), "^--runs=.*broken: .* is damaged"),
        (Options((str(bare),)), "^--runs=.*bare: has no checkpoint yet"),
        (Options((str(other),)), "^--runs=.*avg: is of --algorithm=fedavg, must be of exit_"),
    ):
        with pytest.raises(UsageError, match=message) as error:
            contributions.run(options)
        assert "\n" not in str(error.value)
    assert {path.name for path in bare.iterdir()} == {"config.json"}


def test_the_binary_ends_with_one_line_and_status_2() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "experiments.contributions", "--runs=nowhere"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: --runs=nowhere: must be the folder of a run")
