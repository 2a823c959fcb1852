"""The binaries' parts on the embedded digits: run folders, resuming, the grid, divergence."""

import dataclasses
import json
import shutil
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from experiments import build, config, launch, loop, program, report, sweep, train, tune
from fedjax_inv import rounds

TINY = config.Config(
    angles=(0.0, 40.0, 80.0),
    rounds=4,
    eval_every=2,
    widths=(8,),
    batch_size=64,
    seeds=(0, 1),
    client_chunk="0",
    run_chunk="0",
)


# A game on coloured digits, of which every example is watched.
GAME = dict(
    algorithm=("fl_games",),
    environment="colored",
    optimizer="adam",
    learning_rate=(0.01,),
    local_steps=2,
    momentum=0.0,
    cut=0,
    watch_examples=10_000,
)


def settings(folder: Path, **changes) -> config.Config:
    return dataclasses.replace(TINY, run_dir=str(folder), **changes)


def metrics(folder: Path) -> list[dict]:
    lines = loop.Log.read(folder / "metrics.jsonl")
    return [{k: v for k, v in line.items() if k != "seconds"} for line in lines]


def states(folder: Path, step: int) -> dict:
    with ocp.CheckpointManager((folder / "checkpoints").absolute()) as manager:
        return manager.restore(step, args=ocp.args.StandardRestore())


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished run of FedIPG."""
    folder = tmp_path_factory.mktemp("runs") / "fedipg"
    train.train(settings(folder, algorithm=("fedipg",), settings=("penalty=0.01",)))
    return folder


def test_a_run_folder_is_complete(trained):
    assert {path.name for path in trained.iterdir()} == {
        *("config.json", "chunks.json", "metrics.jsonl", "result.json", "checkpoints"),
        *("table.md", "curves.png", "partition.png"),
    }
    flags = json.loads((trained / "config.json").read_text())["flags"]
    assert set(flags) == {field.name for field in dataclasses.fields(config.Config)}
    lines = loop.Log.read(trained / "metrics.jsonl")
    assert [(line["round"], line["seed"]) for line in lines] == [(2, 0), (2, 1), (4, 0), (4, 1)]
    for line in lines:
        assert set(line["domains"]) == {"0", "40", "80"}
        assert line["domains"]["80"]["split"] == "test"
        assert line["worst_accuracy"] == min(d["accuracy"] for d in line["domains"].values())
        assert line["domains"][line["worst_domain"]]["accuracy"] == line["worst_accuracy"]
        assert line["test_accuracy"] == line["domains"]["80"]["accuracy"]
        assert line["train_loss"] > 0
        assert "invariance" in line["train_metrics"]
    for image in ("curves.png", "partition.png"):
        assert (trained / image).read_bytes().startswith(b"\x89PNG")


def test_bytes_are_parameters_times_clients_times_rounds(trained):
    parameters = 64 * 8 + 8 + 8 * 10 + 10
    for line in loop.Log.read(trained / "metrics.jsonl"):
        assert line["bytes"] == 2 * 4 * parameters * 2 * line["round"]


def test_the_table_holds_the_selected_evaluation(trained):
    result = json.loads((trained / "result.json").read_text())
    for index, run in enumerate(result["runs"]):
        mine = [m for m in loop.Log.read(trained / "metrics.jsonl") if m["run"] == index]
        best = max(line["validation_accuracy"] for line in mine)
        first = next(line for line in mine if line["validation_accuracy"] == best)
        assert run["selected"] == first
        assert run["last"] == mine[-1]
    tests = [100 * run["selected"]["test_accuracy"] for run in result["runs"]]
    expected = f"{np.mean(tests):.1f} ± {np.std(tests, ddof=1):.1f}"
    assert expected in (trained / "table.md").read_text()


def test_training_learns(tmp_path):
    train.train(settings(tmp_path / "run", rounds=30, eval_every=10, batch_size=16, seeds=(3,)))
    lines = loop.Log.read(tmp_path / "run" / "metrics.jsonl")
    assert lines[-1]["train_loss"] < lines[0]["train_loss"]
    assert lines[-1]["validation_accuracy"] > 0.5


class StopAfter(loop.Stop):
    """Asks for a stop when the first segment is over."""

    def __enter__(self):
        super().__enter__()
        self.signal = 15
        return self


@pytest.mark.parametrize("algorithm", ["fedavg", "erm", "fl_games"])
def test_a_stopped_run_resumes_bit_for_bit(tmp_path, monkeypatch, algorithm):
    changes = dict(
        algorithm=(algorithm,), rounds=6, momentum=0.5, cohort=1, server_optimizer="adam"
    )
    if algorithm == "fl_games":
        changes |= GAME | dict(stop_below=(0.99, 0.01), settings=("memory=2",), cohort=0)
    whole, halved = tmp_path / "whole", tmp_path / "halved"
    train.train(settings(whole, **changes))
    with monkeypatch.context() as patch:
        patch.setattr(loop, "Stop", StopAfter)
        with pytest.raises(SystemExit) as stopped:
            train.train(settings(halved, **changes))
    assert stopped.value.code == 128 + 15
    assert [line["round"] for line in metrics(halved)] == [2, 2]
    # What was written after the last checkpoint, by a process that then died, does not count.
    with (halved / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({**metrics(halved)[0], "round": 4, "seconds": 0}) + '\n{"round": 4')
    with pytest.raises(ValueError, match="--resume"):
        train.train(settings(halved, **changes))
    train.train(settings(halved, **changes, resume=True))
    assert metrics(halved) == metrics(whole)
    chex.assert_trees_all_equal(states(halved, 6), states(whole, 6))
    results = [json.loads((folder / "result.json").read_text()) for folder in (halved, whole)]
    stops = [[run.get("stops") for run in result["runs"]] for result in results]
    assert stops[0] == stops[1]


def test_one_trace_serves_all_segments_and_held_out_domains(tmp_path, monkeypatch):
    traced = []
    step = rounds.step
    monkeypatch.setattr(rounds, "step", lambda *a, **k: traced.append(1) or step(*a, **k))
    # 5 rounds are no whole number of segments: the last one is filled up.
    sweep.sweep(settings(tmp_path / "run", rounds=5, held_out="all"))
    assert len(traced) == 1
    for domain in ("0", "40", "80"):
        lines = metrics(tmp_path / "run" / f"fedavg-{domain}")
        assert [line["round"] for line in lines[::2]] == [2, 4, 5]


def test_filled_up_rounds_change_nothing(tmp_path):
    train.train(settings(tmp_path / "a", rounds=3, eval_every=2))
    train.train(settings(tmp_path / "b", rounds=3, eval_every=3))
    a, b = states(tmp_path / "a", 3), states(tmp_path / "b", 3)
    chex.assert_trees_all_close(a["state"]["server"], b["state"]["server"], rtol=1e-6)
    assert metrics(tmp_path / "a")[-1]["bytes"] == metrics(tmp_path / "b")[-1]["bytes"]


def test_runs_of_a_cell_are_what_they_are_alone(tmp_path):
    grid = dict(algorithm=("fedipg",), settings=("penalty=0,0.5",), learning_rate=(0.1, 0.3))
    for run_chunk in ("0", "3"):
        folder = tmp_path / f"grid{run_chunk}"
        sweep.sweep(settings(folder, **grid, run_chunk=run_chunk))
        lines = metrics(folder / "fedipg-80")
        assert len(lines) == 2 * 8
        alone = tmp_path / f"alone{run_chunk}"
        one = dict(algorithm=("fedipg",), settings=("penalty=0.5",), learning_rate=(0.3,))
        train.train(settings(alone, **one, seeds=(1,)))
        (last,) = [line for line in metrics(alone) if line["round"] == 4]
        (same,) = [
            line
            for line in lines
            if line["round"] == 4
            and line["seed"] == 1
            and line["hyper"]["penalty"] == 0.5
            and line["hyper"]["learning_rate"] == 0.3
        ]
        np.testing.assert_allclose(same["train_loss"], last["train_loss"], rtol=1e-4)
        np.testing.assert_allclose(
            same["domains"]["80"]["loss"], last["domains"]["80"]["loss"], rtol=1e-4
        )


def test_a_sweep_keeps_finished_cells(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    sweep.sweep(settings(folder, held_out="80"))
    before = (folder / "fedavg-80" / "metrics.jsonl").read_bytes()
    ran = []
    run_cell = loop.run_cell
    monkeypatch.setattr(
        loop, "run_cell", lambda job, *a: ran.append(job.cell.name) or run_cell(job, *a)
    )
    both = settings(folder, held_out="80", algorithm=("fedavg", "fedprox"))
    sweep.sweep(both)
    assert ran == ["fedprox-80"]
    assert (folder / "fedavg-80" / "metrics.jsonl").read_bytes() == before
    table = (folder / "table.md").read_text()
    assert "fedavg" in table
    assert "fedprox" in table
    summary = json.loads((folder / "result.json").read_text())
    assert [cell["cell"]["algorithm"] for cell in summary["cells"]] == ["fedavg", "fedprox"]


def test_a_diverging_run_stops_with_round_and_client_and_keeps_the_checkpoint(tmp_path):
    folder = tmp_path / "run"
    # The first segment is healthy, then the folder's last checkpoint is poisoned.
    changes = dict(learning_rate=(1e30,), optimizer="sgd", seeds=(5,))
    with pytest.raises(loop.Diverged, match=r"^round 1, client \d .*seed=5.*nonfinite=drop") as e:
        train.train(settings(folder, **changes))
    assert "\n" not in str(e.value)
    assert not (folder / "result.json").exists()


def test_dropping_a_diverging_client_leaves_the_network_finite(tmp_path):
    folder = tmp_path / "run"
    train.train(settings(folder, learning_rate=(1e30,), nonfinite="drop", seeds=(5,)))
    chex.assert_tree_all_finite(states(folder, 4)["state"]["server"])


def test_a_marked_run_is_never_selected(tmp_path):
    folder = tmp_path / "run"
    sweep.sweep(settings(folder, learning_rate=(1e30, 0.1), nonfinite="mark", held_out="80"))
    result = json.loads((folder / "fedavg-80" / "result.json").read_text())
    diverged = [run["diverged"] for run in result["runs"]]
    assert diverged == [run["hyper"]["learning_rate"] > 1 for run in result["runs"]]
    chosen = report.choose("fedavg", result)
    assert chosen is not None
    assert chosen.hyper == {"learning_rate": 0.1}
    assert chosen.diverged == "2 of 4"
    sweep.sweep(settings(tmp_path / "all", learning_rate=(1e30,), nonfinite="mark"))
    assert "diverged" in (tmp_path / "all" / "table.md").read_text()


def test_selection_goes_by_validation_and_never_by_test():
    def run(rate, seed, validation, test):
        evaluation = {"validation_accuracy": validation, "test_accuracy": test}
        return {
            "seed": seed,
            "hyper": {"learning_rate": rate},
            "diverged": False,
            "selected": evaluation,
        }

    runs = [run(0.1, 0, 0.8, 0.1), run(0.1, 1, 0.7, 0.2), run(0.2, 0, 0.9, 0.9)]
    runs.append(run(0.2, 1, 0.5, 0.9))
    chosen = report.choose("fedavg", {"cell": {"held_out": "80"}, "runs": runs})
    assert chosen is not None
    assert chosen.hyper == {"learning_rate": 0.1}
    assert chosen.over_seeds(lambda e: e["test_accuracy"]) == [0.1, 0.2]
    assert report.percent([0.1, 0.2]) == "15.0 ± 7.1"
    assert report.percent([0.1]) == "10.0"


def test_labels_name_only_what_differs():
    def cell(algorithm, **options):
        return build.Cell(algorithm, options, "0", ())

    both = [cell("fedipg", weighting="size", penalty_on=on) for on in ("all", "classifier")]
    cells = [cell("fedavg", weighting="size"), *both]
    expected = ["fedavg", "fedipg penalty_on=all", "fedipg penalty_on=classifier"]
    assert build.short_labels(cells) == expected
    assert len({each.name for each in cells}) == 3


def test_leave_one_out_table_has_mean_and_worst_over_domains():
    def cell(domain, accuracies):
        runs = [{"selected": {"test_accuracy": a}} for a in accuracies]
        return report.Chosen("fedavg", domain, {}, runs, [0, 1], "0 of 2")

    table = report.table([cell("0", [0.1, 0.6]), cell("80", [0.3, 0.2])], {"fedavg": "94.3"})
    *_, row = table.splitlines()
    entries = [entry.strip() for entry in row.strip("|").split("|")]
    # Seeds: mean (0.2, 0.4), worst (0.1, 0.2).
    assert entries[3:] == ["30.0 ± 14.1", "15.0 ± 7.1", "94.3"]


# orbax leaves futures behind that nobody asks for their error.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("damage", ["truncated", "foreign"])
def test_a_bad_checkpoint_is_told_in_one_line(tmp_path, monkeypatch, damage):
    folder, other = tmp_path / "run", tmp_path / "other"
    with monkeypatch.context() as patch:
        patch.setattr(loop, "Stop", StopAfter)
        for path, widths in ((folder, (8,)), (other, (9,))):
            with pytest.raises(SystemExit):
                train.train(settings(path, widths=widths))
    if damage == "truncated":
        for path in (folder / "checkpoints" / "2").rglob("*"):
            if path.is_file() and path.stat().st_size > 100:
                path.write_bytes(path.read_bytes()[:50])
    else:
        shutil.rmtree(folder / "checkpoints")
        shutil.copytree(other / "checkpoints", folder / "checkpoints")
    with pytest.raises(ValueError, match="corrupt, or not a checkpoint of this run") as error:
        train.train(settings(folder, resume=True))
    assert "\n" not in str(error.value)
    assert str(folder / "checkpoints" / "2") in str(error.value)


def test_pooled_and_federated_training_agree_for_one_client(tmp_path):
    changes = dict(angles=(0.0, 40.0), partition="domain", seeds=(0,))
    for name in ("fedavg", "erm"):
        train.train(settings(tmp_path / name, algorithm=(name,), **changes))
    losses = [
        [line["train_loss"] for line in metrics(tmp_path / name)] for name in ("fedavg", "erm")
    ]
    np.testing.assert_allclose(*losses, rtol=1e-5)


def test_auto_picks_the_fastest_chunk_that_fits(tmp_path, monkeypatch, capsys):
    chosen = settings(
        tmp_path, angles=(0.0, 40.0), clients=20, client_chunk="auto", run_chunk="auto"
    )
    dataset = build.dataset(chosen)
    (cell,) = build.cells(chosen, ["40"])
    data, split = launch.deal(chosen, dataset, ["40"])
    inputs = program.inputs(chosen, cell, split["40"])
    made = []

    def make(chunks):
        made.append(chunks)
        return chunks

    # Bytes by chunk: 100 for each client of each run at once. Seconds: quickest at 4 clients.
    monkeypatch.setattr(tune, "compiled", lambda chunks, *a: chunks)
    monkeypatch.setattr(tune, "needed_bytes", lambda chunks: 100 * chunks.clients * chunks.runs)
    times = {1: 3.0, 4: 1.0, 16: 1.1, 20: 2.0}
    alone = 0.99  # of the time of all runs at once

    def seconds(candidates, chunks, light, cohort):
        held = [light.train.mask.sum(-1), light.valid.mask.sum(-1), light.test.mask.sum(-1)]
        assert held[0].max() == tune._STEPS * chosen.batch_size or held[0].max() < 128
        assert held[1].max() == held[2].max() == 0
        time = times[chunks.clients] * cohort.who[0].size
        return time * (alone if chunks.runs == 1 else 1)

    monkeypatch.setattr(tune._Candidates, "seconds", seconds)
    monkeypatch.setattr(tune.jax, "default_backend", lambda: "cpu")
    monkeypatch.setattr(tune, "available_bytes", lambda: 10**6)
    assert tune.choose(chosen, cell, make, data, inputs) == program.Chunks(4, 1)
    assert "client_chunk=4, run_chunk=1" in capsys.readouterr().err
    monkeypatch.setattr(tune.jax, "default_backend", lambda: "gpu")
    assert tune.choose(chosen, cell, make, data, inputs) == program.Chunks(4, 2)
    assert "4/1" not in capsys.readouterr().err
    monkeypatch.setattr(tune.jax, "default_backend", lambda: "cpu")
    alone = 1.2
    assert tune.choose(chosen, cell, make, data, inputs) == program.Chunks(4, 2)
    assert "1/2: 1.5e+03, 4/2: 500, 16/2: 550, 20/2" in capsys.readouterr().err
    monkeypatch.setattr(tune, "available_bytes", lambda: 250)
    assert tune.choose(chosen, cell, make, data, inputs) == program.Chunks(1, 2)
    monkeypatch.setattr(tune, "available_bytes", lambda: 150)
    assert tune.choose(chosen, cell, make, data, inputs) == program.Chunks(1, 1)
    made.clear()
    for flag, runs in (("0", 2), ("1", 1)):
        fixed = dataclasses.replace(chosen, client_chunk="7", run_chunk=flag)
        assert tune.choose(fixed, cell, make, data, inputs) == program.Chunks(7, runs)
    assert made == []


def test_auto_measures_the_real_step(tmp_path):
    folder = tmp_path / "run"
    train.train(settings(folder, client_chunk="auto", run_chunk="auto"))
    chunks = program.Chunks(**json.loads((folder / "chunks.json").read_text()))
    assert chunks.clients in (1, 2)
    assert chunks.runs in (1, 2)


def test_memory_of_a_round_does_not_grow_with_the_cohort(tmp_path):
    def temporary_bytes(clients):
        chosen = settings(tmp_path, angles=(0.0, 40.0), clients=clients, seeds=(0,))
        dataset = build.dataset(chosen)
        (cell,) = build.cells(chosen, ["40"])
        network = build.model(chosen, dataset)
        data, split = launch.deal(chosen, dataset, ["40"])
        made = program.make(chosen, cell, network, 1, program.Chunks(10, 1))
        inputs = program.inputs(chosen, cell, split["40"])
        states = jax.eval_shape(made.init, data, inputs)
        cohorts = program.schedule(chosen, cell, inputs, 2)
        compiled = made.segment.lower(data, inputs, states, cohorts).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary_bytes(400) < 1.5 * temporary_bytes(40)


def stops_by_hand(lines: list[dict], threshold: float, warm_start: int) -> int | None:
    """The first round from `warm_start` on whose watched training accuracy is below."""
    curve = [accuracy for line in lines for accuracy in line["train_by_round"]]
    for round_, accuracy in enumerate(curve, 1):
        if round_ >= warm_start and accuracy < threshold:
            return round_
    return None


@pytest.mark.parametrize(
    ("changes", "warm_start"),
    [
        (dict(), 2),
        (dict(warm_start=5), 5),
        # 647 training examples of a client in batches of 64.
        (dict(settings=("learned=true",), cut=1, rounds=14), 11),
        (dict(settings=("learned=true",), cut=1, rounds=14, play="sequential"), 11),
    ],
)
def test_a_stop_tells_what_there_was_in_its_round(tmp_path, changes, warm_start):
    thresholds = (0.99, 0.8, 0.01)
    chosen = GAME | dict(rounds=9, eval_every=1, stop_below=thresholds) | changes
    train.train(settings(tmp_path, **chosen))
    runs = json.loads((tmp_path / "result.json").read_text())["runs"]
    lines = metrics(tmp_path)
    for index, run in enumerate(runs):
        mine = [line for line in lines if line["run"] == index]
        assert [stop["threshold"] for stop in run["stops"]] == list(thresholds)
        assert run["stops"][0]["round"] == warm_start
        assert run["stops"][2] == {"threshold": 0.01, "round": None}
        for stop in run["stops"][:2]:
            assert stop["round"] == stops_by_hand(mine, stop["threshold"], warm_start)
            if stop["round"]:
                line = mine[stop["round"] - 1]
                for key in ("domains", "validation_accuracy", "test_accuracy", "worst_accuracy"):
                    assert stop[key] == line[key]
                for kind in ("train", "test"):
                    watched = line[f"{kind}_by_round"][0]
                    np.testing.assert_allclose(stop[f"{kind}_accuracy"], watched, atol=1e-5)
    assert "| at the stop" in (tmp_path / "table.md").read_text()


def test_a_run_that_ends_at_its_stop_keeps_that_state(tmp_path):
    # Runs in chunks: without a memory, the state holds arrays without elements.
    chosen = GAME | dict(rounds=40, eval_every=4, seeds=(0, 1, 2), run_chunk="2")
    # A game that oscillates, so that seeds stop in different rounds.
    chosen |= dict(local_steps=1, learning_rate=(0.1,), widths=(32,), warm_start=4)
    chosen |= dict(stop_below=(0.7, 0.61))
    train.train(settings(tmp_path / "end", **chosen, after_stop="end"))
    train.train(settings(tmp_path / "on", **chosen))
    ended, went_on = (
        json.loads((tmp_path / name / "result.json").read_text())["runs"] for name in ("end", "on")
    )
    stopped = [[stop["round"] for stop in run["stops"]] for run in ended]
    assert len(set(map(tuple, stopped))) > 1
    assert min(map(min, stopped)) > 4
    for run, other in zip(ended, went_on, strict=True):
        for one, two in zip(run["stops"], other["stops"], strict=True):
            assert one["round"] == two["round"]
            # Not equal, as the two programs may be fused differently.
            for key in ("train_accuracy", "validation_accuracy", "test_accuracy"):
                assert one[key] == pytest.approx(two[key], abs=1e-3)
        assert run["last"]["round"] < 40
        assert run["last"]["domains"] == run["stops"][-1]["domains"]
        # The curves agree until the last stop; there the one that ends stays.
        curves = [
            [
                accuracy
                for line in metrics(tmp_path / name)
                if line["run"] == ended.index(run)
                for accuracy in line["train_by_round"]
            ]
            for name in ("end", "on")
        ]
        last = max(stop["round"] for stop in run["stops"])
        np.testing.assert_allclose(curves[0][:last], curves[1][:last], atol=1e-3)
        assert set(curves[0][last:]) <= {curves[0][last - 1]}
    # A run that is over stays so when it is killed before it says so.
    before = metrics(tmp_path / "end")
    (tmp_path / "end" / "result.json").unlink()
    train.train(settings(tmp_path / "end", **chosen, after_stop="end", resume=True))
    assert metrics(tmp_path / "end") == before
    again = json.loads((tmp_path / "end" / "result.json").read_text())["runs"]
    assert again == ended


def test_the_rounds_that_fill_up_a_segment_stop_nothing(tmp_path):
    chosen = GAME | dict(rounds=5, eval_every=4, stop_below=(0.99,), warm_start=6)
    train.train(settings(tmp_path, **chosen))
    runs = json.loads((tmp_path / "result.json").read_text())["runs"]
    assert [run["stops"][0]["round"] for run in runs] == [None, None]


@pytest.mark.parametrize("count", [0, 1, 7, 30, 1000])
def test_watched_examples_are_spread_over_all_clients(count):
    sizes = np.array([[12, 0, 5], [3, 9, 20]])
    mask = jnp.arange(20) < sizes[..., None]
    rows = jnp.where(mask, jnp.arange(120).reshape(2, 3, 20), -1)
    some = program._some(program.Holdings(rows, mask), count)
    for run in range(2):
        for client, size in enumerate(sizes[run]):
            kept = np.asarray(some.rows)[run, client][np.asarray(some.mask)[run, client]]
            mine = np.asarray(rows)[run, client, :size]
            assert len(kept) == len(set(kept.tolist()))
            assert set(kept.tolist()) <= set(mine.tolist())
            share = min(1, count / sizes[run].sum())
            assert share * size <= len(kept) < share * size + 1 + 1e-5
            if len(kept) > 1:
                assert np.ptp(np.diff(kept)) <= 1


def test_flags_as_a_list_are_those_of_a_command_line():
    assert config.of([]) == config.Config()
    chosen = config.of(["--preset=colored_mnist_v,games_sequential,games_smooth", "--rounds=77"])
    assert (chosen.dataset, chosen.play, chosen.cut, chosen.rounds) == (
        "mnist",
        "sequential",
        1,
        77,
    )
    assert set(chosen.settings) == {"learned=true", "body_learning_rate=0.000025", "memory=5"}
    assert config.of([], nonfinite="mark").nonfinite == "mark"
    for flags, words in (("--rounds=x", "rounds"), ("--preset=colored_mnis_f", "colored_mnist_f")):
        with pytest.raises(ValueError, match=words):
            config.of([flags])
