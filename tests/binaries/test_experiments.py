"""The binaries' parts on the embedded digits: run folders, resuming, the grid, divergence.

Compiling takes nearly all of the time, so a few runs are shared, and a job that was run once is run
again with other inputs.
"""

import dataclasses
import json
import shutil
import traceback
from pathlib import Path
from typing import Any, NoReturn

import chex
import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

import runs
import slow
from fedjax_inv import models, program, rounds
from fedjax_inv.data.federation import parts_of
from fedjax_inv.plan import Plan
from fedjax_inv_experiments import config
from fedjax_inv_experiments import train as train_binary
from fedjax_inv_experiments.assembly import experiment, grid, objective
from fedjax_inv_experiments.assembly.grid import Cell
from fedjax_inv_experiments.config import NAMES, Config, Evaluation
from fedjax_inv_experiments.folder import log, records, selection
from fedjax_inv_experiments.folder import run_folder as folders
from fedjax_inv_experiments.folder.recorder import Job, Recorder
from fedjax_inv_experiments.folder.records import Domain, Result, RunResult
from fedjax_inv_experiments.report import forms, run_figures, tables
from fedjax_inv_experiments.start import Divergence
from runs import (
    Ran,
    changed,
    go_on,
    halved,
    jobs,
    metrics,
    no_figures,
    ran,
    start_of,
    states,
    with_flags,
)
from runs import line as line_of

TINY = config.of(
    angles=(0.0, 40.0, 80.0),
    rounds=6,
    eval_every=3,
    widths=(8,),
    batch_size=16,
    seeds=(0, 1),
    chunk=("0", "0"),
)

# A game on coloured digits that oscillates, so that seeds stop in different rounds. Every example
# is watched.
GAME: dict[str, Any] = dict(
    algorithm=("fl_games",),
    environment="colored",
    data_seed="0",
    optimizer="adam",
    learning_rate=(0.1,),
    local_steps=1,
    batch_size=64,
    widths=(32,),
    cut=0,
    rounds=38,
    seeds=(0, 1, 2),
    watch_examples=10_000,
    warm_start="4",
)


def flags(folder: Path, **changes: Any) -> Config:
    return with_flags(TINY, run_dir=str(folder), **changes)


def with_rate(job: Job, rate: float) -> Job:
    """The job with another learning rate, which is an input of its program."""
    inputs = job.plan.inputs
    rates = jnp.full_like(inputs.hyper["learning_rate"], rate)
    return with_inputs(job, hyper=inputs.hyper | {"learning_rate": rates})


def with_inputs(job: Job, **others: Any) -> Job:
    """The job with other inputs of its program."""
    return job._replace(
        plan=dataclasses.replace(job.plan, inputs=job.plan.inputs._replace(**others))
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """FedIPG, run after run and client after client; with its figures."""
    folder = tmp_path_factory.mktemp("runs") / "fedipg"
    chosen = flags(
        folder,
        algorithm=("fedipg",),
        set=("penalty=0.01",),
        learning_rate=(0.3,),
        chunk=("1", "1"),
    )
    with jobs() as seen:
        runs.train(chosen)
    return Ran(folder, *seen)


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Job], int]:
    """A grid of FedIPG whose runs all train at once, the trained one and diverging ones among them;
    its last segments are shorter. The folder, the jobs, and how often a round was traced."""
    folder, traced, step = tmp_path_factory.mktemp("grid"), [], rounds.step

    def traced_step(*arguments: Any, **options: Any) -> Any:
        traced.append(1)
        return step(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch, jobs() as seen, no_figures():
        patch.setattr(rounds, "step", traced_step)
        runs.train(
            flags(
                folder,
                algorithm=("fedipg",),
                set=("penalty=0,0.01",),
                learning_rate=(0.1, 0.3, 1e30),
                held_out="all",
                eval_every=4,
                nonfinite="mark",
            )
        )
    return folder, seen, len(traced)


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """FedAdam with a client a round, which leaves diverging clients out."""
    chosen = flags(
        tmp_path_factory.mktemp("runs") / "fedadam",
        cohort=1,
        momentum=0.5,
        server_optimizer="adam",
        nonfinite="drop",
        watch_classes=True,
    )
    return ran(chosen)


@pytest.fixture(scope="module")
def game(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """A game that goes on after its stops, evaluated in every round."""
    chosen = GAME | dict(eval_every=1, checkpoint_every=38, stop_below=(0.99, 0.7, 0.61, 0.01))
    return ran(flags(tmp_path_factory.mktemp("runs") / "game", **chosen))


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """The same game, which ends at its stops; two of its three runs at once."""
    chosen = GAME | dict(eval_every=4, chunk=("0", "2"), stop_below=(0.7, 0.61), after_stop="end")
    return ran(flags(tmp_path_factory.mktemp("runs") / "ended", **chosen))


@pytest.fixture(scope="module")
def in_turns(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Players with a memory, who take turns with their representation."""
    chosen = GAME | dict(cut=1, rounds=14, eval_every=7, stop_below=(0.99,), warm_start="batches")
    chosen |= dict(set=("learned=true", "play=sequential", "memory=2"), seeds=(0,))
    return ran(flags(tmp_path_factory.mktemp("runs") / "turns", **chosen))


def test_a_run_folder_is_complete(trained: Ran) -> None:
    assert {path.name for path in trained.folder.iterdir()} == {
        *("config.json", "metrics.jsonl", "result.json", "checkpoints", ".lock"),
        *("table.md", "table.tex", "runs.csv"),
        *(
            f"{name}{ending}"
            for name in ("curves", "domains", "partition")
            for ending in (".png", ".pdf")
        ),
    }
    told = json.loads((trained.folder / "config.json").read_text())["flags"]
    assert set(told) == set(NAMES)
    lines = metrics(trained.folder)
    expected = [(round, seed) for round in (0, 3, 6) for seed in (0, 1)]
    assert [(line["round"], line["seed"]) for line in lines] == expected
    for line in lines:
        assert set(line["domains"]) == {"0", "40", "80"}
        assert line["domains"]["80"]["split"] == "test"
        assert line["worst_score"] == min(d["score"] for d in line["domains"].values())
        assert line["domains"][line["worst_domain"]]["score"] == line["worst_score"]
        assert line["test_score"] == line["domains"]["80"]["score"]
        if line["round"]:
            assert line["train_loss"] > 0
            assert "invariance" in line["train_metrics"]
    for image in ("curves.png", "partition.png"):
        assert (trained.folder / image).read_bytes().startswith(b"\x89PNG")


def test_a_run_without_round_0_is_the_same_otherwise(trained: Ran, tmp_path: Path) -> None:
    folder = go_on(changed(trained.job, eval_start=False), tmp_path / "run")
    assert metrics(folder) == [line for line in metrics(trained.folder) if line["round"]]


def test_bytes_are_parameters_times_clients_times_rounds(trained: Ran) -> None:
    parameters = 64 * 8 + 8 + 8 * 10 + 10
    for line in metrics(trained.folder):
        assert line["bytes"] == 2 * 4 * parameters * 2 * line["round"]


def test_evaluations_tell_classes_and_clients_alike(sampled: Ran) -> None:
    lines = metrics(sampled.folder)
    for mean, of, count in (("balanced", "class", 10), ("client", "client", 2)):
        for line in lines:
            parts = line[f"score_by_{of}"]
            assert len(parts) == count
            assert all(0 <= accuracy <= 1 for accuracy in parts)
            assert line[f"{mean}_score"] == pytest.approx(np.mean(parts), abs=1e-5)
        assert len({line[f"{mean}_score"] for line in lines}) > 1


@pytest.mark.parametrize("name", slow.after(2, ["trained", "sampled", "game"]))
def test_round_0_is_of_the_network_that_training_starts_from(
    request: pytest.FixtureRequest, name: str
) -> None:
    own: Ran = request.getfixturevalue(name)
    is_game = name == "game"
    config, (data, inputs) = own.job.config, (own.job.plan.data, own.job.plan.inputs)
    made = experiment.make(config)
    for line in metrics(own.folder)[: len(own.job.cell.runs)]:
        assert line["round"] == line["bytes"] == line.get("dropped", 0) == 0
        assert line["train_loss"] is None
        assert "train_metrics" not in line
        assert not line["diverged"]
        assert all(line[f"{kind}_by_round"] == [] for kind in ("train", "test") if is_game)
        assert ("score_by_client" in line) == config.evaluation.watch_classes
        if is_game:
            continue  # its players are several networks
        key = jax.random.fold_in(jax.random.key(line["seed"]), 0)
        network = made.model.init(key, data.x[:1])
        order, start, size = (np.asarray(leaf[line["run"]]) for leaf in inputs.test)
        rows = order[start[0] : start[0] + size[0]]
        outputs = models.predict(made.model, network, data.x[rows])
        accuracy = float((np.asarray(outputs).argmax(1) == np.asarray(data.y)[rows]).mean())
        assert line["test_score"] == pytest.approx(accuracy, abs=1e-6)


def test_the_table_holds_the_selected_evaluation(trained: Ran) -> None:
    for index, run in enumerate(trained.runs):
        mine = [each for each in log.read(trained.folder) if each.run == index]
        best = max(each.validation_score for each in mine)
        *_, latest = (each for each in mine if each.validation_score == best)
        assert run["by_rule"]["validation"] == msgspec.to_builtins(latest)
        assert run["last"] == msgspec.to_builtins(mine[-1])
    tests = [100 * run["by_rule"]["validation"]["test_score"] for run in trained.runs]
    expected = f"{np.mean(tests):.1f} ± {np.std(tests, ddof=1):.1f}"
    assert expected in (trained.folder / "table.md").read_text()


def test_training_learns(trained: Ran) -> None:
    for index in range(2):
        start, first, last = (line for line in metrics(trained.folder) if line["run"] == index)
        assert last["train_loss"] < first["train_loss"]
        for name, domain in start["domains"].items():
            if domain["split"] == "validation":
                assert last["domains"][name]["loss"] < domain["loss"]
        assert last["validation_score"] > 0.5


def test_a_finished_run_goes_on_with_more_rounds_bit_for_bit(sampled: Ran, tmp_path: Path) -> None:
    whole = sampled
    chosen = with_flags(whole.job.config, resume=True)
    half = chosen.evaluation.eval_every
    folder = go_on(changed(whole.job, rounds=half), tmp_path / "run")
    before = Ran(folder, whole.job).runs
    assert {run["last"]["round"] for run in before} == {half}
    assert folders.finished(chosen, whole.job.cell, folder, lambda: start_of(whole.job)) is None
    go_on(whole.job, folder)
    assert metrics(folder) == metrics(whole.folder)
    last = chosen.training.rounds
    for item in ("default", "kept"):
        chex.assert_trees_all_equal(states(folder, last, item), states(whole.folder, last, item))
    after = Ran(folder, whole.job).runs
    assert [run["last"]["round"] for run in after] == [run["last"]["round"] for run in whole.runs]
    assert folders.finished(chosen, whole.job.cell, folder, lambda: start_of(whole.job))


def test_a_trace_of_each_length_serves_all_segments_and_held_out_domains(
    swept: tuple[Path, list[Job], int],
) -> None:
    folder, seen, traced = swept
    assert traced == 2  # of 4 rounds, and of 2
    assert [job.cell.held_out for job in seen] == ["0", "40", "80"]
    for job in seen:
        lines = metrics(folder / grid.folder_name(job.cell.name))
        assert [line["round"] for line in lines[::12]] == [0, 4, 6]


def test_every_seed_deals_anew(swept: tuple[Path, list[Job], int]) -> None:
    for job in swept[1]:
        held = job.plan.inputs.train
        for run, each in enumerate(job.cell.runs):
            same = np.array_equal(held.order[run], held.order[0])
            assert same == (each.seed == job.cell.runs[0].seed)


def test_runs_of_a_grid_are_what_they_are_alone(
    swept: tuple[Path, list[Job], int], trained: Ran
) -> None:
    folder = swept[0] / "fedipg-80"
    lines = [line for line in metrics(folder) if line["round"] == 6]
    assert len(lines) == 12
    for alone in metrics(trained.folder)[-2:]:
        (same,) = [
            line for line in lines if all(line[key] == alone[key] for key in ("seed", "hyper"))
        ]
        assert same["bytes"] == alone["bytes"]
        np.testing.assert_allclose(same["train_loss"], alone["train_loss"], rtol=1e-4)
        for name, domain in alone["domains"].items():
            np.testing.assert_allclose(same["domains"][name]["loss"], domain["loss"], rtol=1e-4)
        servers = (
            jax.tree.map(lambda leaf, at=line["run"]: leaf[at], states(where, 6)["state"]["server"])
            for where, line in ((folder, same), (trained.folder, alone))
        )
        chex.assert_trees_all_close(*servers, rtol=1e-3, atol=1e-5)


def test_a_marked_run_is_never_selected(swept: tuple[Path, list[Job], int], tmp_path: Path) -> None:
    folder, *_ = swept
    result = records.read(folder / "fedipg-80" / "result.json", Result)
    diverged = [run.diverged for run in result.runs]
    assert diverged == [run.hyper["learning_rate"] > 1 for run in result.runs]
    chosen = selection.choose("fedipg", result)
    assert chosen is not None
    assert chosen.hyper["learning_rate"] in (0.1, 0.3)
    result |= {"runs": [run for run in result.runs if run.diverged]}
    cells = [tables.TableCell("fedipg", result)]
    told = tables.write(tmp_path / "table", cells, tables.main_table(cells))
    assert "every run diverged" in told
    assert "every run diverged" in (tmp_path / "table.md").read_text()
    # A figure of an earlier selection is none of these runs.
    for stale in ("curves.png", "domains.pdf"):
        (tmp_path / stale).touch()
    run_figures.write(tmp_path, [cells[0]._replace(folder=folder / "fedipg-80")], "")
    assert {path.name for path in tmp_path.iterdir()} == {"table.md", "grid.md"}


def test_a_sweep_keeps_finished_cells(
    swept: tuple[Path, list[Job], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, seen, _ = swept
    folder = tmp_path / "run"
    shutil.copytree(before, folder)
    table = (folder / "table.md").read_text()
    # A sweep of fewer cells in the same folder leaves the others out, and says so.
    with no_figures():
        narrower = with_flags(seen[0].config, run_dir=str(folder), held_out="40,0")
        told = runs.train(narrower)
    assert told.endswith(f"Of the runs in {folder}, these tables leave out fedipg-80.")
    assert "80" not in (folder / "table.md").read_text()
    shutil.rmtree(folder / "fedipg-40")
    again = []

    def finish(self: Recorder, fitted: None) -> Result:
        """Finishes a cell without computing."""
        name = grid.folder_name(self.job.cell.name)
        again.append(name)
        shutil.copytree(before / name, folder / name, dirs_exist_ok=True)
        return records.read(folder / name / "result.json", Result)

    monkeypatch.setattr(Plan, "train", lambda plan, callbacks: None)
    monkeypatch.setattr(Recorder, "finish", finish)
    with no_figures():
        told = runs.train(with_flags(seen[0].config, run_dir=str(folder)))
    assert "leave out" not in told
    assert again == ["fedipg-40"]
    summary = json.loads((folder / "result.json").read_text())
    assert [cell["cell"]["held_out"] for cell in summary["cells"]] == ["0", "40", "80"]
    assert (folder / "table.md").read_text() == table


def test_a_diverging_run_stops_with_round_and_client_and_keeps_the_checkpoint(
    trained: Ran, tmp_path: Path
) -> None:
    folder = halved(trained.job, tmp_path / "run")
    before = states(folder, 3)
    told = r"^round 4, client \d \(fedipg, seed=0, learning_rate=.*nonfinite=drop"
    with pytest.raises(Divergence, match=told) as error:
        go_on(with_rate(trained.job, 1e30), folder)
    assert "\n" not in str(error.value)
    assert not (folder / "result.json").exists()
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["3"]
    chex.assert_trees_all_equal(states(folder, 3), before)
    # From there a healthy run goes on.
    go_on(trained.job, folder)
    assert metrics(folder) == metrics(trained.folder)


def test_dropping_a_diverging_client_leaves_the_network_finite(
    sampled: Ran, tmp_path: Path
) -> None:
    folder = go_on(with_rate(sampled.job, 1e30), tmp_path / "run")
    # The client was left out, so the run is what it was, and is told as any other.
    for line in metrics(folder):
        assert not line["diverged"]
        assert line["dropped"] == line["round"]
    run = Ran(folder, sampled.job).runs[0]
    assert not run["diverged"]
    assert (
        run["by_rule"]["validation"]["round"] == 6
    )  # nothing changed, and of equals the last is selected
    chex.assert_tree_all_finite(states(folder, 6)["state"]["server"])


def cell_of(held_out: str) -> records.CellRecord:
    return records.CellRecord("fedavg", {}, held_out, [records.RunRecord(0, {})])


def test_selection_goes_by_validation_and_never_by_test() -> None:
    def run(rate: float, seed: int, validation: float, test: float) -> RunResult:
        picked = line_of(5, validation, test_score=test)
        hyper = {"learning_rate": rate}
        return RunResult(seed, hyper, False, {"validation": picked}, picked)

    runs = [run(0.1, 0, 0.8, 0.1), run(0.1, 1, 0.7, 0.2), run(0.2, 0, 0.9, 0.9)]
    runs.append(run(0.2, 1, 0.5, 0.9))
    chosen = selection.choose("fedavg", Result(cell_of("80"), runs))
    assert chosen is not None
    assert chosen.hyper == {"learning_rate": 0.1}
    assert [line.test_score for line in chosen.selected] == [0.1, 0.2]
    assert forms.percent([0.1, 0.2]) == "15.0 ± 7.1"
    assert forms.percent([0.1]) == "10.0"


def test_labels_name_only_what_differs() -> None:
    def cell(algorithm: str, **options: str) -> Cell:
        return Cell(algorithm, options, "0", ())

    both = [cell("fedipg", weighting="size", penalty_on=on) for on in ("all", "classifier")]
    cells = [cell("fedavg", weighting="size"), *both]
    expected = ["fedavg", "fedipg penalty_on=all", "fedipg penalty_on=classifier"]
    assert grid.short_labels(cells) == expected
    assert len({each.name for each in cells}) == 3


def test_what_diverged_altogether_has_its_place_in_the_table(tmp_path: Path) -> None:
    """Neither a row nor a column goes, and no mean is over fewer domains than it says."""

    def result(domain: str, diverged: bool) -> Result:
        domains = {
            name: Domain(0.3, None, 4, "test" if name == domain else "validation")
            for name in ("0", "80")
        }
        picked = line_of(2, 0.3, domains=domains)
        run = RunResult(0, {}, diverged, {"validation": picked}, picked)
        return Result(cell_of(domain), [run])

    def rows(*cells: tuple[str, str, bool]) -> list[list[str]]:
        made = [tables.TableCell(label, result(domain, gone)) for label, domain, gone in cells]
        text, *_ = tables.write(tmp_path / "table", made, tables.main_table(made)).split("\n\n")
        lines = [line.strip("|").split("|") for line in text.splitlines()]
        return [[each.strip() for each in line] for line in lines if len(line) > 1]

    head, _, good, bad = rows(("a", "0", False), ("b", "0", True))
    assert head[1:] == ["0", "at the last round"]
    assert good == ["a", "30.0", "30.0"]
    assert bad == ["b", "diverged", ""]
    head, _, row = rows(("a", "0", False), ("a", "80", True))
    assert head[1:] == ["0", "80", "mean", "worst", "at the last round"]
    assert row == ["a", "30.0", "diverged", "", "", ""]


@pytest.mark.slow
def test_memory_of_a_round_does_not_grow_with_the_cohort(tmp_path: Path) -> None:
    def temporary_bytes(clients: int) -> int:
        chosen = flags(tmp_path, angles=(0.0, 40.0), clients=clients, seeds=(0,))
        assembled = experiment.make(with_flags(chosen, held_out="40"))
        (cell,) = assembled.cells
        plan = assembled.plan(cell)
        made = program.Program(plan.experiment, client_chunk=10, run_chunk=1)
        arguments = plan.data, plan.inputs
        training = jax.eval_shape(made.jitted.init, *arguments)
        lowered = made.jitted.rounds.lower(*arguments, training, plan.part(0))
        analysis = lowered.compile().memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    assert temporary_bytes(400) < 1.5 * temporary_bytes(40)


def stop_by_hand(lines: list[dict[str, Any]], threshold: float, warm_start: int) -> int | None:
    """The first round from `warm_start` on whose watched training accuracy is below."""
    curve = [accuracy for line in lines for accuracy in line["train_by_round"]]
    below = (n for n, accuracy in enumerate(curve, 1) if n >= warm_start and accuracy < threshold)
    return next(below, None)


def flat(domains: dict[str, dict[str, Any]]) -> dict[str, float]:
    """The numbers of domains in one level, as `pytest.approx` compares them."""
    keys = ("score", "loss", "examples")
    return {f"{name} {key}": of[key] for name, of in domains.items() for key in keys}


@pytest.mark.slow
@pytest.mark.parametrize("warm_start", [4, 9])
def test_a_stop_tells_what_there_was_in_its_round(
    game: Ran, tmp_path: Path, warm_start: int
) -> None:
    inputs = game.job.plan.inputs
    assert inputs.watched is not None
    assert {*inputs.watched.warm_start.tolist()} == {4}
    folder = game.folder
    if warm_start != 4:
        later = inputs.watched._replace(
            warm_start=jnp.full_like(inputs.watched.warm_start, warm_start)
        )
        job = with_inputs(game.job, watched=later)
        folder = go_on(job, tmp_path / "run")
    for index, run in enumerate(Ran(folder, game.job).runs):
        mine = [line for line in metrics(folder) if line["run"] == index]
        assert [stop["threshold"] for stop in run["stops"]] == [0.99, 0.7, 0.61, 0.01]
        assert run["stops"][0]["round"] == warm_start
        assert run["stops"][3] == {"threshold": 0.01, "round": None}
        for stop in run["stops"][:3]:
            assert stop["round"] == stop_by_hand(mine, stop["threshold"], warm_start)
            line = mine[stop["round"]]
            assert flat(stop["domains"]) == pytest.approx(flat(line["domains"]), rel=1e-5)
            for key in ("validation_score", "test_score", "worst_score"):
                assert stop[key] == pytest.approx(line[key], rel=1e-5)
            for kind in ("train", "test"):
                watched = line[f"{kind}_by_round"][0]
                np.testing.assert_allclose(stop[f"{kind}_score"], watched, atol=1e-5)
    assert "| at the stop" in (game.folder / "table.md").read_text()


def test_warm_starts() -> None:
    sizes = np.array([5, 129, 64])
    for flag, expected in (("clients", 3), ("batches", 3), ("7", 7), ("0", 0)):
        assert objective.warm_start(Evaluation(warm_start=flag), 64, sizes) == expected
    assert objective.warm_start(Evaluation(warm_start="batches"), 0, sizes) == 1


@pytest.mark.slow
def test_the_warm_start_of_players_in_turns(in_turns: Ran) -> None:
    # 647 training examples of a client in batches of 64.
    assert [run["stops"][0]["round"] for run in in_turns.runs] == [11]


@pytest.mark.slow
def test_a_run_that_ends_at_its_stop_keeps_that_state(game: Ran, ended: Ran) -> None:
    """However many rounds a segment has, and runs train at once."""
    stopped = [[stop["round"] for stop in run["stops"]] for run in ended.runs]
    assert len(set(map(tuple, stopped))) > 1
    assert min(map(min, stopped)) > 4
    for index, (run, other) in enumerate(zip(ended.runs, game.runs, strict=True)):
        for one, two in zip(run["stops"], other["stops"][1:3], strict=True):
            assert one["round"] == two["round"]
            # Not equal, as the two programs may be fused differently.
            for key in ("train_score", "validation_score", "test_score"):
                assert one[key] == pytest.approx(two[key], abs=1e-3)
        assert run["last"]["round"] < 38
        at_stop = flat(run["stops"][-1]["domains"])
        assert flat(run["last"]["domains"]) == pytest.approx(at_stop, rel=1e-5)
        # The curves agree until the last stop; there the one that ends stays.
        curves = [
            [
                accuracy
                for line in metrics(folder)
                if line["run"] == index
                for accuracy in line["train_by_round"]
            ]
            for folder in (ended.folder, game.folder)
        ]
        last = max(stop["round"] for stop in run["stops"])
        for line in log.read(ended.folder):
            if line.run == index:
                assert line.ended == (last if line.round >= last else None)
                assert line.played == min(line.round, last)
        np.testing.assert_allclose(curves[0][:last], curves[1][:last], atol=1e-3)
        assert set(curves[0][last:]) <= {curves[0][last - 1]}


@pytest.mark.slow
def test_vectors_of_ones_own_with_domains_of_ones_own(tmp_path: Path) -> None:
    """Their domains are kept, one that is called as the test split is, too."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(90, 5))
    np.savez(
        tmp_path / "mine.npz",
        x=x,
        y=(x[:, 0] > 0).astype(int),
        domain=np.array(["test", "a"])[np.arange(90) % 2],
        test=np.arange(90) % 5 == 0,
    )
    chosen = config.of(
        dataset=str(tmp_path / "mine.npz"),
        held_out="none",
        run_dir=str(tmp_path / "run"),
        rounds=2,
        eval_every=1,
        widths=(4,),
    )
    own = ran(chosen)
    told = json.loads((own.folder / "config.json").read_text())["flags"]
    assert told["environment"] == "none"
    assert told["angles"] == [0.0, 15.0, 30.0, 45.0, 60.0, 75.0]  # as if nobody had asked
    for line in metrics(own.folder):
        assert list(line["domains"]) == ["a", "test", "test split"]
        splits = [domain["split"] for domain in line["domains"].values()]
        assert splits == ["validation", "validation", "test"]
    assert (own.folder / "partition.png").parent.exists()
    assert "test split (held out)" in (own.folder / "table.md").read_text()


def test_domains_that_would_share_a_folder_do_not(tmp_path: Path) -> None:
    def names(*domains: str) -> list[str]:
        cells = [Cell("fedavg", {}, domain, ()) for domain in domains]
        return list(grid.folder_names(cells).values())

    assert names("75", "art") == ["fedavg-75", "fedavg-art"]
    for one, two in (("a b", "a-b"), ("a/b", "a:b"), ("sketch", "Sketch")):
        first, second, third = names(one, two, "c")
        assert third == "fedavg-c"
        assert first.casefold() != second.casefold()
        # Whatever else there is in the grid.
        assert names("d", two, one)[1:] == [second, first]


@pytest.mark.parametrize("data_seed", ["each", "0"])
def test_a_test_that_is_drawn_is_not_an_environment(data_seed: str) -> None:
    """Its seed is another one than that of the environments, whatever the flags say."""
    changes: dict[str, Any] = {"environment": "colored", "held_out": "none", "seeds": (0,)}
    made = experiment.make(with_flags(TINY, data_seed=data_seed, **changes))
    (of_seeds,) = made.splits.values()
    (rows,) = parts_of(of_seeds[0].test)
    shares = np.bincount(made.dataset.domain[rows]) / len(rows)
    assert len(shares) == 3
    assert shares.max() < 0.5


def test_every_seed_draws_its_environments(tmp_path: Path) -> None:
    def dealt(**changes: Any) -> dict[int, list[np.ndarray]]:
        chosen = with_flags(TINY, environment="colored", **changes)
        made = experiment.make(chosen)
        (of_seeds,) = made.splits.values()
        rows = {seed: np.sort(parts_of(split.test)[0]) for seed, split in of_seeds.items()}
        x, y = made.data.x, np.asarray(made.data.y)
        return {seed: [np.asarray(x.color)[at], y[at]] for seed, at in rows.items()}

    each, fixed, alone = dealt(), dealt(data_seed="0"), dealt(seeds=(1,))
    assert not all(map(np.array_equal, each[0], each[1]))
    assert all(map(np.array_equal, fixed[0], fixed[1]))
    assert all(map(np.array_equal, each[0], fixed[0]))
    # A run is what it is alone.
    assert all(map(np.array_equal, each[1], alone[1]))
    source = experiment.make(with_flags(TINY, environment="none")).source
    assert len(source) == 1797  # not copied where nothing is drawn


def test_a_command_reaches_the_training_in_few_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before them are the module and `start.binary`: four in all."""
    seen: list[traceback.FrameSummary] = []

    class Reached(Exception):
        pass

    def train(plan: Plan, callbacks: Any) -> NoReturn:
        seen.extend(traceback.extract_stack())
        raise Reached

    monkeypatch.setattr(Plan, "train", train)
    folder = f"--run_dir={tmp_path / 'run'}"
    with runs.parsed(folder), pytest.raises(Reached):
        train_binary.main.__wrapped__([])
    here = str(Path(train_binary.__file__).parent)
    names = [frame.name for frame in seen if frame.filename.startswith(here)]
    assert names == ["main", "run"]
