"""Clients online, late reports and simulated time: schedules, logs, tables, figures."""

import json
import shutil
from pathlib import Path
from typing import Any

import chex
import jax
import numpy as np
import pytest

from fedjax_inv import schedules
from fedjax_inv.checks import UsageError
from fedjax_inv.communication import Traffic
from fedjax_inv.schedules import Reports
from fedjax_inv.types import Cohort
from fedjax_inv_experiments import train
from fedjax_inv_experiments.experiment import assemble, config
from fedjax_inv_experiments.experiment.config import Config
from fedjax_inv_experiments.running import launch, summary
from runs import Ran, go_on, halved, jobs, metrics, states

pytestmark = pytest.mark.slow  # most need trained runs

ONLINE = np.random.default_rng(0).random((4, 9)) < 0.7
CLIENTS: dict[str, Any] = dict(partition="iid", clients=9, environment="none")
# Three clients count of up to five that are asked.
LATE: dict[str, Any] = dict(
    cohort=3, extra=2, deadline=3.0, seconds_per_example=0.01, speed_spread=0.7, round_spread=0.4
)


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("online") / "online.npy"
    np.save(path, ONLINE)
    return path


@pytest.fixture(scope="module")
def timed(tmp_path_factory: pytest.TempPathFactory, record: Path) -> Ran:
    """A run of two segments with a record of who is online and with late reports; with figures."""
    folder = tmp_path_factory.mktemp("runs") / "timed"
    chosen = config.of(
        run_dir=str(folder),
        rounds=6,
        eval_every=3,
        widths=(8,),
        seeds=(0, 1),
        client_chunk="0",
        run_chunk="0",
        online=str(record),
        dropout=0.2,
        seconds_per_megabyte=5.0,
        **CLIENTS,
        **LATE,
    )
    with jobs() as seen:
        train.train(chosen)
    return Ran(folder, *seen)


def drawn(chosen: Config, rounds: int, megabytes: float = 0.0) -> tuple[Cohort, Reports | None]:
    """The cohorts and costs of the first run."""
    assembled = assemble.assemble(chosen)
    inputs = assembled.prepare(assembled.cells[0]).inputs
    traffic = [Traffic(int(megabytes * 1e6), 0)]
    both = assemble.cohorts_and_costs(chosen, inputs, rounds, traffic)
    return jax.tree.map(lambda leaf: np.asarray(leaf)[0], both)


def test_lines_count_simulated_time_and_the_downloads_of_lost_updates(timed: Ran) -> None:
    job = timed.job
    (traffic,) = job.program.traffic(job.data, job.inputs)
    cohorts, reports = assemble.cohorts_and_costs(job.config, job.inputs, 6, [traffic])
    assert reports is not None
    assert np.asarray(reports.lost).any()
    for line in metrics(timed.folder):
        run, done = line["run"], line["round"]
        present = np.asarray(cohorts.present)[run, :done]
        lost = int(np.asarray(reports.lost)[run, :done].sum())
        assert line.get("bytes_lost", 0) == lost * traffic.down
        assert line["bytes"] == present.sum() * (traffic.down + traffic.up) + lost * traffic.down
        seconds = np.asarray(reports.seconds)[run, :done].sum()
        np.testing.assert_allclose(line.get("seconds_simulated", 0), seconds, atol=2e-3)
    assert seconds > 0


def test_a_cohort_is_of_clients_online_and_three_of_them_count(timed: Ran) -> None:
    cohorts = jax.device_get(assemble.cohorts(timed.job.config, timed.job.inputs, 6))
    assert cohorts.who.shape == (2, 6, 3)
    rounds = np.arange(6)[:, None]
    assert ONLINE[rounds % 4, cohorts.who][cohorts.present].all()
    assert cohorts.present.any()


def test_tables_and_figures_have_simulated_time(timed: Ran) -> None:
    assert (timed.folder / "curves_by_time.png").exists()
    table = (timed.folder / "table.md").read_text()
    assert "simulated hours in all" in table
    assert "MB of these lost" in table
    first, *rows = (timed.folder / "runs.csv").read_text().splitlines()
    assert {"seconds_simulated", "bytes_lost"} <= set(first.split(","))
    assert len(rows) == 6


def test_it_resumes_bit_for_bit(timed: Ran, tmp_path: Path) -> None:
    # The costs are drawn anew, as after a restart.
    folder = halved(timed.job, tmp_path / "run")
    go_on(timed.job._replace(cohorts=None, reports=None), folder)
    assert metrics(folder) == metrics(timed.folder)
    for item in ("default", "kept"):
        chex.assert_trees_all_equal(states(folder, 6, item), states(timed.folder, 6, item))


def test_a_run_refuses_another_record(timed: Ran, record: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(timed.folder, folder)
    (folder / "result.json").unlink()
    chosen = config.changed(timed.job.config, run_dir=str(folder), resume=True)
    kept = record.read_bytes()
    try:
        np.save(record, ~ONLINE)
        with pytest.raises(UsageError, match="has begun with another record of --online; put"):
            launch.run(chosen, folder, in_folders=False, report=lambda *results: "")
    finally:
        record.write_bytes(kept)
    (start,) = json.loads((folder / "config.json").read_text())["starts"]
    assert len(start["online"]) == 64


def test_more_devices_and_more_rounds_draw_the_same(timed: Ran) -> None:
    job = timed.job
    both = job.config, config.changed(job.config, devices="2", rounds=9)
    results = []
    for chosen in both:
        assembled = assemble.assemble(chosen)
        ready = assembled.prepare(assembled.cells[0])
        inputs = ready.inputs
        if ready.layout.mesh is not None:
            _, inputs = ready.layout.place(ready.data, inputs)
        rounds = chosen.run.rounds
        drawn = assemble.cohorts_and_costs(chosen, inputs, rounds, [Traffic(10**5, 0)])
        results.append(jax.tree.map(lambda leaf: np.asarray(leaf)[:, :6], drawn))
    chex.assert_trees_all_equal(*results)


def test_time_alone_changes_no_cohort() -> None:
    flags = config.of(rounds=8, eval_every=1, cohort=4, dropout=0.3, **CLIENTS)
    plain, none = drawn(flags, 8)
    assert none is None
    timed = config.changed(flags, seconds_per_example=0.5, speed_spread=0.0, local_epochs=2)
    cohort, reports = drawn(timed, 8)
    chex.assert_trees_all_equal(cohort, plain)
    # Everybody needs the time of two passes; and with a slow network, of the messages too.
    sizes = np.asarray(assemble.assemble(flags).splits[None][0].train.size)
    assert reports is not None
    worked = np.where(plain.present, sizes[plain.who], 0)
    np.testing.assert_allclose(reports.seconds, worked.max(1) * 2 * 0.5, rtol=1e-6)
    np.testing.assert_array_equal(reports.lost, (~plain.present).sum(1))
    _, sent = drawn(config.changed(timed, seconds_per_megabyte=3.0), 8, megabytes=7.0)
    assert sent is not None
    np.testing.assert_allclose(sent.seconds, reports.seconds + 21, rtol=1e-6)


def test_clients_without_examples_are_not_asked() -> None:
    """Of 30 clients of a long tail, some have no examples; asked they would report at once."""
    flags = config.of(
        rounds=20, eval_every=1, partition="quantity", alpha=0.05, min_size=0, clients=30, cohort=4,
        extra=4, seconds_per_example=0.1, environment="none",
    )  # fmt: skip
    sizes = np.asarray(assemble.assemble(flags).splits[None][0].train.size)
    assert (sizes == 0).any()
    cohort, reports = drawn(flags, 20)
    assert (sizes[cohort.who[cohort.present]] > 0).all()
    assert reports is not None
    assert (cohort.present.sum(1) + reports.lost < 8).any()


def test_the_work_of_a_round_is_in_examples() -> None:
    from fedjax_inv_experiments.parts.training import Clients, examples_in_a_round

    sizes = np.array([0, 3, 50])
    for chosen, expected in (
        (Clients(local_epochs=2), [0, 6, 100]),
        (Clients(local_steps=4, batch_size=8), [0, 32, 32]),
        (Clients(local_steps=4, batch_size=0), [0, 12, 200]),
        (Clients(batch_size=0), [0, 3, 50]),
    ):
        np.testing.assert_array_equal(examples_in_a_round(chosen, sizes), expected)


def test_time_ends_at_the_stop_of_a_run() -> None:
    reports = Reports(np.array([[1, 2, 3, 4]]), np.array([[1.5, 1, 1, 1]]))
    attended = np.array([[0, 2], [1, 1], [0, 0], [0, 0]])
    traffic = [Traffic(100, 7), Traffic(10, 7)]
    # In the first round only the second exchange takes place; in the last two, nobody reports.
    all_rounds = summary._lost(reports, 0, attended, traffic, 5, np.inf)
    assert all_rounds == {"bytes_lost": 10 + 200 + 700, "seconds_simulated": 4.5}
    until_6 = summary._lost(reports, 0, attended, traffic, 5, 6)
    assert until_6 == {"bytes_lost": 210, "seconds_simulated": 2.5}


def test_clients_are_online_by_day() -> None:
    flags = config.of(
        rounds=40, eval_every=1, online="diurnal", day=10, online_least=0.0, online_most=1.0,
        time_zones=0.5, cohort=3, **CLIENTS,
    )  # fmt: skip
    cohort, _ = drawn(flags, 40)
    online = schedules.diurnal(
        jax.random.fold_in(jax.random.fold_in(jax.random.key(0), 2), 4),
        9, day=10, least=0.0, most=1.0, time_zones=0.5,
    )  # fmt: skip
    rounds = np.arange(40)
    asked = np.asarray(jax.vmap(online)(rounds, cohort.who))
    assert asked[cohort.present].all()
    everybody = np.asarray(jax.vmap(online, (0, None))(rounds, np.arange(9)))
    np.testing.assert_array_equal(cohort.present.sum(1), np.minimum(everybody.sum(1), 3))
