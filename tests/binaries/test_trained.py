"""Finished runs: the selected state is the one that is saved, exported and evaluated."""

import json
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import chex
import jax
import numpy as np
import pandas as pd
import pytest

import runs
import slow
from fedjax_inv import averaging, models, rounds
from fedjax_inv.checks import UsageError
from fedjax_inv.data.dataset import Dataset
from fedjax_inv.data.federation import parts_of
from fedjax_inv.models import saved
from fedjax_inv.one_run import Training
from fedjax_inv.types import Algorithm
from fedjax_inv_experiments import config, evaluation, export, finished, predictions
from fedjax_inv_experiments.assembly import objective
from fedjax_inv_experiments.folder import checkpoints, selected
from fedjax_inv_experiments.folder import run_folder as folders
from fedjax_inv_experiments.folder.selected import SelectedStates, ServingState
from fedjax_inv_experiments.folder.selection import RULES
from fedjax_inv_experiments.report.data_figures import rendered
from runs import Ran, go_on, line, metrics, no_figures, ran, selecting, with_flags


def after(round: int, num_runs: int) -> Training:
    """States that tell their round and run, with an axis more in the clients'."""
    value = np.float32(10 * round) + np.arange(num_runs, dtype=np.float32)
    everyone = np.repeat(value[:, None], 4, axis=1)
    done = np.full(num_runs, round + 5, np.int32)  # as if it were another round
    return Training(rounds.State({"w": value}, everyone, (), done, np.zeros(num_runs)), ())


# Round by round, of each run; the third diverges in round 2, the fourth at once.
ACCURACIES = [
    (0.5, 0.5, 0.4, 0.9),
    (0.6, 0.4, 0.9, 0.9),
    (0.6, 0.4, 0.9, 0.9),
    (0.1, 0.4, 0.9, 0.9),
]
DIVERGES = (9, 9, 2, 1)
LINES = [
    [
        line(
            round,
            accuracy,
            run=run,
            test_score=1 - accuracy,
            diverged=round >= DIVERGES[run],
        )
        for run, accuracy in enumerate(of_round)
    ]
    for round, of_round in enumerate(ACCURACIES, 1)
]


@pytest.mark.parametrize("resumed_at", range(5))
@pytest.mark.parametrize(
    ("rule", "expected"),
    [("validation", [3, 1, 1, 0]), ("oracle", [4, 4, 1, 0]), ("last", [4, 4, 1, 0])],
)
def test_of_each_run_the_state_that_the_rule_picks(
    rule: str, expected: list[int], resumed_at: int
) -> None:
    best = selecting(RULES[rule], [], after(0, 4), personal=True)
    for done, lines in enumerate(LINES):
        if done == resumed_at:
            before = [line for of_round in LINES[:done] for line in of_round]
            served, best = best.served, selecting(RULES[rule], before, after(0, 4), personal=True)
            best.served = served
        best.look(lines, partial(after, done + 1, 4))
    np.testing.assert_array_equal(best.served.round, expected)
    value = np.where(np.array(expected) > 0, 10 * np.array(expected) + np.arange(4), 0)
    np.testing.assert_array_equal(best.served.server["w"], value)
    np.testing.assert_array_equal(best.served.clients, np.repeat(value[:, None], 4, axis=1))


def test_selected_states_are_never_changed_in_place() -> None:
    """Orbax may still be writing them."""
    best = selecting(RULES["last"], [], after(0, 4), personal=False)
    best.look(LINES[0], partial(after, 1, 4))
    first = best.served
    copy = jax.tree.map(np.copy, first)
    best.look(LINES[1], partial(after, 2, 4))
    chex.assert_trees_all_equal(first, copy)
    assert first.clients == ()


@pytest.fixture(scope="module")
def whole(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Ran, dict[int, ServingState]]]:
    """A personal algorithm whose accuracy goes up and down; and what it served by, by round."""
    chosen = config.of(
        run_dir=str(tmp_path_factory.mktemp("runs") / "fedbn"),
        algorithm=("fedbn",),
        norm="batch",
        angles=(0.0, 40.0, 80.0),
        rounds=6,
        eval_every=1,
        learning_rate=(2.0,),
        local_steps=2,
        widths=(4,),
        seeds=(0, 1),
    )
    seen: dict[int, ServingState] = {}
    look = SelectedStates.look

    def look_and_tell(self: SelectedStates, lines: Any, states: Callable[[], Training]) -> None:
        seen[lines[0].round] = jax.device_get(selected.of(states(), True))
        look(self, lines, states)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SelectedStates, "look", look_and_tell)
        yield ran(chosen), seen


def test_a_finished_run_holds_its_last_and_its_selected_state(
    whole: tuple[Ran, dict[int, ServingState]],
) -> None:
    run, seen = whole
    assert [path.name for path in (run.folder / "checkpoints").iterdir()] == ["6"]
    picked = [told["by_rule"]["validation"]["round"] for told in run.runs]
    assert picked != [6, 6]
    for state, rounds_of in (("best", picked), ("last", [6, 6])):
        runs = finished.open("run", run.folder, state)
        for index, done in enumerate(rounds_of):
            expected = jax.tree.map(lambda a, i=index: a[i], seen[done])
            found = runs.fitted.state(index)
            assert runs.line(index).round == done
            chex.assert_trees_all_equal(found.server, expected.server)
            chex.assert_trees_all_equal(found.clients, expected.clients)
            assert jax.tree.leaves(found.clients)


@pytest.fixture(scope="module")
def kept(
    whole: tuple[Ran, dict[int, ServingState]], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The folder of the same runs with all their checkpoints."""
    job = whole[0].job
    job = job._replace(config=with_flags(job.config, keep_checkpoints="all"))
    return go_on(job, tmp_path_factory.mktemp("kept") / "run")


def test_all_checkpoints_stay_and_serve(
    whole: tuple[Ran, dict[int, ServingState]], kept: Path, tmp_path: Path
) -> None:
    assert checkpoints.rounds(kept / "checkpoints") == [1, 2, 3, 4, 5, 6]
    for done, index in ((1, 0), (4, 1)):
        runs = finished.open("run", kept, str(done))
        assert (runs.line(index).round, runs.line(index).run) == (done, index)
        expected = jax.tree.map(lambda a, i=index: a[i], whole[1][done])
        chex.assert_trees_all_equal(runs.fitted.state(index).server, expected.server)
        chex.assert_trees_all_equal(runs.fitted.state(index).clients, expected.clients)
    with pytest.raises(UsageError, match=r"^--state=7: "):
        finished.open("run", kept, "7")
    with no_figures():
        evaluation.run(
            evaluation.EvaluationOptions(str(kept), "4", export=str(tmp_path / "export"))
        )
    scored = pd.read_csv(kept / "evaluation-4.csv", dtype={"name": str})
    runs = finished.open("run", kept, "4")
    accuracies = [runs.line(index).test_score for index in (0, 1)]
    np.testing.assert_allclose(scored.loc[scored["name"] == "80", "score"], accuracies, atol=1e-6)
    about = json.loads((tmp_path / "export" / "seed=0" / "model.json").read_text())
    assert about["run"] == {"folder": str(kept), "state": "4", "round": 4}


@pytest.fixture(scope="module")
def held_out_images(
    whole: tuple[Ran, dict[int, ServingState]],
) -> list[tuple[np.ndarray, np.ndarray]]:
    """The images and the labels of the held-out domain, which each seed draws anew."""
    data = whole[0].job.plan.data
    made = finished.open("run", whole[0].folder, "last").data
    rows = [parts_of(made.splits["80"][seed].test)[0] for seed in (0, 1)]
    return [(np.asarray(data.x)[each], np.asarray(data.y)[each]) for each in rows]


@pytest.mark.parametrize("state", slow.after(1, ["best", "last"]))
def test_an_evaluation_and_an_export_tell_what_training_told(
    whole: tuple[Ran, dict[int, ServingState]],
    held_out_images: list[tuple[np.ndarray, np.ndarray]],
    tmp_path: Path,
    state: str,
) -> None:
    run, seen = whole
    out = tmp_path / "there" / "it.png"
    options = evaluation.EvaluationOptions(
        str(run.folder), state, out=str(out), export=str(tmp_path)
    )
    text = evaluation.run(options)
    assert out.read_bytes().startswith(b"\x89PNG")
    scores = pd.read_csv(out.with_suffix(".csv"), dtype={"name": str, "domain": str})
    for index, told in enumerate(run.runs):
        line = told["by_rule"]["validation"] if state == "best" else told["last"]
        got = scores[scores["seed"] == index]
        assert (got["round"] == line["round"]).all()
        domains = got[got["by"] == "domain"].set_index("name")
        assert set(domains.index) == set(line["domains"])
        for name, domain in domains.iterrows():
            expected = line["domains"][name]
            assert domain["split"] == expected["split"]
            for key in ("score", "loss", "examples"):
                assert domain[key] == pytest.approx(expected[key], 1e-4)
        # A client for each training domain, served by its own network.
        clients = got[got["by"] == "client"]
        assert len(clients) == 2
        assert clients["score"].tolist() == domains.loc[clients["domain"], "score"].tolist()
        # The network does as it did, and so do the arrays of the clients.
        (x, y), place = held_out_images[index], tmp_path / f"seed={index}"
        assert str(place) in text
        about = json.loads((place / "model.json").read_text())
        assert about["run"]["round"] == line["round"]
        assert about["score"]["test"] == line["test_score"]
        network = about["network"]
        model = getattr(models, network["model"])(**network["arguments"])
        like = jax.eval_shape(model.init, jax.random.key(0), x[:1])
        outputs = models.predict(model, saved.load(place / "model.safetensors", like), x)
        right = np.asarray(outputs).argmax(1) == y
        assert right.mean() == pytest.approx(line["test_score"], abs=1e-6)
        mine = jax.tree.map(lambda a, i=index: a[i], seen[line["round"]].clients.variables)
        chex.assert_trees_all_equal(saved.load(place / "clients.safetensors", mine), mine)


def test_an_evaluation_on_other_data(
    whole: tuple[Ran, dict[int, ServingState]],
    held_out_images: list[tuple[np.ndarray, np.ndarray]],
    tmp_path: Path,
) -> None:
    run, _ = whole
    x, y = held_out_images[0]
    some = y > 4  # classes are known by their names
    domain = np.where(np.arange(some.sum()) < 9, "a", "b")
    new, out = tmp_path / "new.npz", tmp_path / "new.png"
    for arrays in ({"x": x[:, :4], "y": y}, {"x": x, "y": y + 5}):
        np.savez(new, **arrays)
        with pytest.raises(UsageError, match=r"^--dataset="), no_figures():
            evaluation.run(evaluation.EvaluationOptions(str(run.folder), dataset=str(new)))
    np.savez(new, x=x[some], y=y[some], domain=domain)
    with no_figures():
        text = evaluation.run(
            evaluation.EvaluationOptions(str(run.folder), "last", str(new), str(out))
        )
    assert "| a " in text
    scores = pd.read_csv(tmp_path / "new.csv")
    fitted = finished.open("run", run.folder, "last").fitted
    for index, (_, got) in enumerate(scores.groupby("seed")):
        algorithm, server = fitted.algorithm(index), fitted.state(index).server
        unseen = algorithm.init_client(server, jax.numpy.int32(0))
        right = np.asarray(algorithm.predict(server, unseen, x[some])).argmax(1) == y[some]
        by = {name: each.set_index("name") for name, each in got.groupby("by")}
        for name in "ab":
            assert by["domain"].loc[name, "score"] == pytest.approx(right[domain == name].mean())
        assert by["class"]["examples"].tolist() == np.bincount(y[some]).tolist()
        # Each client's own network, on all of it.
        assert by["client"]["examples"].tolist() == [len(right)] * 2


def test_scores_of_logits_by_hand() -> None:
    outputs = np.array([[1.0, 3.0, 0.0], [500.0, 0.0, -500.0], [0.0, 0.0, 0.0]], np.float32)
    y = np.array([1, 1, 2])
    scores = predictions.scorer(objective.make("auto", "auto", "classes"))(outputs, y)
    assert scores["score"].tolist() == [1, 0, 0]
    losses = [np.log(np.exp([-2, 0, -3]).sum()), 500.0, np.log(3)]
    np.testing.assert_allclose(scores["loss"], losses, rtol=1e-6)
    of_classes = predictions.of_columns("classes", outputs[[0, 0, 1, 2]], y[[0, 0, 1, 2]])
    np.testing.assert_allclose(of_classes, [np.nan, 2 / 3, 0])


def test_new_images_may_be_grey_where_those_of_the_run_are_not() -> None:
    y, test = np.array([0, 1, 1], np.int32), np.zeros(3, bool)
    grey = np.arange(12, dtype=np.uint8).reshape(3, 2, 2, 1)
    new = Dataset(grey, y, ("a", "b"), y, ("p", "q"), test)
    parts = predictions.new_parts("here", new, new._replace(x=grey.repeat(3, -1)))
    for part, rows in zip(parts, ([0], [1, 2]), strict=True):
        assert part.x.shape == (len(rows), 2, 2, 3)
        assert (part.x == grey[rows]).all()
    (same, _) = predictions.new_parts("here", new, new)
    np.testing.assert_array_equal(same.x, grey[:1])
    colour, table = grey.repeat(3, -1), np.zeros((3, 3), np.uint8)
    for x, old in ((grey[:, :1], colour), (colour[..., :2], colour), (table[:, :1], table)):
        with pytest.raises(UsageError, match="here"):
            predictions.new_parts("here", new._replace(x=x), new._replace(x=old))


def test_a_client_without_a_turn_is_exported_as_a_new_one() -> None:
    """As it is served; what it stores is the network that the run began with."""
    own = averaging.Own({"w": np.arange(6.0).reshape(3, 2)}, np.array([True, False, True]))
    unseen = averaging.Own({"w": np.full(2, 9.0)}, np.bool_(False))
    found = export._of_clients(own, unseen)
    np.testing.assert_array_equal(found["w"], [[0, 1], [9, 9], [4, 5]])


class Wrapper(NamedTuple):
    wrapped: Any


def test_the_exported_arrays_of_a_server() -> None:
    """The network if there is one, with a client's own state in place, else the inner server."""

    def of(network: Any) -> Algorithm:
        unused: Any = None
        return Algorithm(unused, unused, (), unused, network=network)

    served, server = of(lambda server: server.wrapped), Wrapper({"a": 1, "b": 2})
    assert export.arrays(served, server, ()) == {"a": 1, "b": 2}
    assert export.arrays(served, server, {"b": 3, "c": 4}) == {"a": 1, "b": 3, "c": 4}
    players = Wrapper(Wrapper({"players": {"w": 1}, "moves": 2}))
    assert export.arrays(of(None), players, ()) == {"players/w": 1, "moves": 2}


@pytest.mark.parametrize("gone", ["", "result.json", "checkpoints"])
def test_a_folder_that_lacks_something_is_refused(
    whole: tuple[Ran, dict[int, ServingState]], tmp_path: Path, gone: str
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(whole[0].folder, folder)
    (folder / gone).rename(tmp_path / "gone")
    with pytest.raises(UsageError, match=f"^--run={folder}: "), no_figures():
        evaluation.run(evaluation.EvaluationOptions(str(folder)))


@pytest.mark.parametrize("picked", [None, {"round": 99}])
def test_a_seed_without_its_state_is_left_out(
    whole: tuple[Ran, dict[int, ServingState]], tmp_path: Path, picked: dict[str, Any] | None
) -> None:
    """The rule picks nothing, or what another rule did not keep; tables of metrics name the seed.

    Where the rule picks nothing, they have its last round.
    """
    folder = tmp_path / "copy"
    shutil.copytree(whole[0].folder, folder)
    told = json.loads((folder / "result.json").read_text())
    by_rule = told["runs"][0]["by_rule"]
    by_rule["validation"] = picked and by_rule["validation"] | picked
    (folder / "result.json").write_text(json.dumps(told))
    with no_figures():
        text = evaluation.run(
            evaluation.EvaluationOptions(str(folder), export=str(tmp_path / "export"))
        )
        before, _ = folders.read(folder)
        table = runs.train(with_flags(before, run_dir=str(folder), metrics=("f1",)))
    assert "Not evaluated: " in text
    assert set(pd.read_csv(folder / "evaluation-best.csv")["seed"]) == {1}
    assert [path.name for path in (tmp_path / "export").iterdir()] == ["seed=1"]
    measured = pd.read_csv(folder / "metrics.csv")
    assert set(measured["seed"]) == ({1} if picked else {0, 1})
    assert ("\n\nThe metrics leave out seed 0: " in table) == bool(picked)
    assert picked or set(measured.loc[measured["seed"] == 0, "round"]) == {6}


def test_a_last_state_that_is_gone_is_told(kept: Path, tmp_path: Path) -> None:
    """The newest checkpoint that is there counts, with its own round and scores."""
    folder = tmp_path / "run"
    shutil.copytree(kept, folder)
    shutil.rmtree(folder / "checkpoints" / "6")
    with pytest.warns(UserWarning, match="round 6 is gone, the last state is that of round 5"):
        runs = finished.open("run", folder, "last")
    (line,) = [each for each in metrics(folder) if (each["round"], each["run"]) == (5, 1)]
    assert (runs.line(1).round, runs.line(1).test_score) == (5, line["test_score"])
    with no_figures(), pytest.warns(UserWarning, match="is gone"):
        assert "after round 5" in evaluation.run(evaluation.EvaluationOptions(str(folder), "last"))
    assert set(pd.read_csv(folder / "evaluation-last.csv")["round"]) == {5}


def test_the_cells_of_a_folder_give_one_table(
    whole: tuple[Ran, dict[int, ServingState]], tmp_path: Path
) -> None:
    """One is not finished, and one has no checkpoint of the round."""
    run, _ = whole
    for name in ("a", "b", "unfinished"):
        shutil.copytree(run.folder, tmp_path / "sweep" / name)
    (tmp_path / "sweep" / "unfinished" / "result.json").unlink()
    written = {"export": str(tmp_path / "export"), "predictions": str(tmp_path / "p.csv")}
    text = evaluation.run(evaluation.EvaluationOptions(str(tmp_path / "sweep"), "6", **written))
    alone = finished.open("run", run.folder, "last")
    scores = pd.read_csv(tmp_path / "sweep" / "evaluation-6.csv", dtype={"name": str})
    tests = scores[(scores["by"] == "domain") & (scores["split"] == "test")]
    assert tests["run"].tolist() == ["a", "a", "b", "b"]
    assert set(tests["round"]) == {6}
    expected = [alone.line(index).test_score for index in (0, 1)]
    np.testing.assert_allclose(tests["score"], 2 * expected, atol=1e-6)
    lines = [line for line in text.splitlines() if line.startswith(("| a ", "| b "))]
    mean = f"{100 * np.mean(expected):.1f} ± "
    assert all("| 80 " in line and "| 6 " in line and mean in line for line in lines)
    assert len(lines) == 2
    assert f"Not evaluated: --run={tmp_path / 'sweep' / 'unfinished'}: " in text
    assert (tmp_path / "export" / "b" / "seed=1" / "model.json").is_file()
    assert pd.read_csv(tmp_path / "p.csv").groupby(["run", "seed"]).ngroups == 4


def test_an_evaluation_on_images_of_a_run_that_colours_its_own(tmp_path: Path) -> None:
    """The images of the run's test as they are seen, in bytes."""
    chosen = config.of(
        run_dir=str(tmp_path / "run"),
        environment="combinations",
        angles=(0.0,),
        rounds=1,
        eval_every=1,
        widths=(4,),
    )
    folder = ran(chosen).folder
    runs = finished.open("run", folder, "last")
    rows = np.sort(parts_of(runs.data.splits["9"][0].test)[0])
    x = np.rint(255 * rendered(runs.data.dataset, rows)).astype(np.uint8)
    np.savez(tmp_path / "new.npz", x=x, y=runs.data.dataset.y[rows])
    with no_figures():
        evaluation.run(evaluation.EvaluationOptions(str(folder), "last", str(tmp_path / "new.npz")))
    scores = pd.read_csv(folder / "evaluation-last-new.csv")
    assert scores["score"][0] == pytest.approx(runs.line(0).test_score, abs=1e-6)
