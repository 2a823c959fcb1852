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

import slow
from fedjax_inv import averaging, models, rounds
from fedjax_inv.checks import UsageError
from fedjax_inv.data.federation import parts_of
from fedjax_inv.models import saved
from fedjax_inv.program import Training
from fedjax_inv.types import Algorithm
from fedjax_inv_experiments import evaluate, train
from fedjax_inv_experiments.experiment import config
from fedjax_inv_experiments.parts import objective
from fedjax_inv_experiments.reporting import export, finished, predictions
from fedjax_inv_experiments.running import cell as cells
from fedjax_inv_experiments.running import checkpoints, selected
from fedjax_inv_experiments.running import folder as folders
from fedjax_inv_experiments.running.selected import SelectedStates, Served
from fedjax_inv_experiments.selection import RULES
from runs import Ran, go_on, halved, line, metrics, no_figures, ran, selecting, states


def after(round: int, num_runs: int) -> Training:
    """States that tell their round and run, with an axis more in the clients'."""
    value = np.float32(10 * round) + np.arange(num_runs, dtype=np.float32)
    everyone = np.repeat(value[:, None], 4, axis=1)
    done = np.full(num_runs, round + 5, np.int32)  # with rounds that filled up segments
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
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Ran, dict[int, Served]]]:
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
    seen: dict[int, Served] = {}
    look = SelectedStates.look

    def look_and_tell(self: SelectedStates, lines: Any, states: Callable[[], Training]) -> None:
        seen[lines[0].round] = jax.device_get(selected.of(states(), True))
        look(self, lines, states)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SelectedStates, "look", look_and_tell)
        yield ran(chosen), seen


def served(run: Ran, folder: Path, done: int) -> Served:
    """The selected states in a folder's checkpoint."""
    like = jax.eval_shape(run.job.plan.program.init, run.job.plan.data, run.job.plan.inputs)
    like = selected.of(like, run.job.plan.build(run.job.plan.runs[0].hyper).personal)
    return checkpoints.selected(folder / "checkpoints", done, like)


def test_a_finished_run_holds_its_last_and_its_selected_state(
    whole: tuple[Ran, dict[int, Served]],
) -> None:
    run, seen = whole
    assert [path.name for path in (run.folder / "checkpoints").iterdir()] == ["6"]
    got = served(run, run.folder, 6)
    picked = [told["by_rule"]["validation"]["round"] for told in run.runs]
    assert picked != [6, 6]
    np.testing.assert_array_equal(got.round, picked)
    for index, round in enumerate(picked):
        one, expected = (jax.tree.map(lambda a, i=index: a[i], s) for s in (got, seen[round]))
        chex.assert_trees_all_equal(one, expected)
        assert jax.tree.leaves(one.clients)
    last = states(run.folder, 6)["state"]
    leaves = jax.tree.leaves((last["server"], last["clients"]))
    assert len(leaves) == len(jax.tree.leaves(seen[6]._replace(round=())))


@pytest.mark.slow
def test_it_is_the_same_however_often_the_run_is_stopped(
    whole: tuple[Ran, dict[int, Served]], tmp_path: Path
) -> None:
    run, _ = whole
    folder = halved(run.job, tmp_path / "run")
    for _ in range(2):
        halved(run.job, folder)
    assert max(line["round"] for line in metrics(folder)) == 3
    go_on(run.job, folder)
    chex.assert_trees_all_equal(served(run, folder, 6), served(run, run.folder, 6))


def keeping(job: cells.Job, count: str) -> cells.Job:
    return job._replace(config=config.changed(job.config, keep_checkpoints=count))


def kept_rounds(folder: Path) -> list[int]:
    return checkpoints.rounds(folder / "checkpoints")


@pytest.fixture(scope="module")
def kept(
    whole: tuple[Ran, dict[int, Served]], tmp_path_factory: pytest.TempPathFactory
) -> finished.Runs:
    """The same runs with all their checkpoints, stopped after the first round."""
    job = keeping(whole[0].job, "all")
    folder = halved(job, tmp_path_factory.mktemp("kept") / "run")
    return finished.open("run", go_on(job, folder))


@pytest.mark.slow
def test_all_checkpoints_stay_and_change_nothing(
    whole: tuple[Ran, dict[int, Served]], kept: finished.Runs
) -> None:
    run, seen = whole
    assert kept_rounds(kept.path) == [1, 2, 3, 4, 5, 6]
    assert metrics(kept.path) == metrics(run.folder)
    chex.assert_trees_all_equal(states(kept.path, 6), states(run.folder, 6))
    for done in (1, 4, 6):
        for index in (0, 1):
            one = kept.run(index, str(done))
            assert (one.line().round, one.line().run) == (done, index)
            expected = jax.tree.map(lambda a, i=index: a[i], seen[done])
            chex.assert_trees_all_equal(one.served(), expected)
    for state in ("7", "99999"):
        with pytest.raises(UsageError, match=f"^--state={state}: .* 1, 2, 3, 4, 5, 6, "):
            kept.run(0, state).line()
    diverged = [each | {"diverged": each.round > 3} for each in kept.lines]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(kept.__dict__, "lines", diverged)
        assert kept.run(0, "3").line().round == 3
        with pytest.raises(UsageError, match=r"its run seed=0 had diverged by round 4$"):
            kept.run(0, "4").line()


def test_the_state_after_a_round_is_evaluated_and_exported(
    whole: tuple[Ran, dict[int, Served]], kept: finished.Runs, tmp_path: Path
) -> None:
    picked = [told["by_rule"]["validation"]["round"] for told in whole[0].runs]
    done = next(round for round in range(1, 6) if round not in picked)
    with no_figures():
        evaluate.run(evaluate.Options(str(kept.path), str(done)))
    scored = pd.read_csv(kept.path / f"evaluation-{done}.csv", dtype={"name": str})
    scored = scored[scored["name"] == "80"]
    accuracies = [each.test_score for each in kept.lines if each.round == done]
    assert (scored["round"] == done).all()
    np.testing.assert_allclose(scored["score"], accuracies, atol=1e-6)
    for state in (str(done), str(picked[0])):
        with no_figures():
            evaluate.run(evaluate.Options(str(kept.path), state, export=str(tmp_path)))
        about = json.loads((tmp_path / "seed=0" / "model.json").read_text())
        assert about["run"] == {"folder": str(kept.path), "state": state, "round": int(state)}


@pytest.fixture(scope="module")
def held_out_images(whole: tuple[Ran, dict[int, Served]]) -> list[tuple[np.ndarray, np.ndarray]]:
    """The images and the labels of the held-out domain, which each seed draws anew."""
    data = whole[0].job.plan.data
    made = finished.open("run", whole[0].folder).data
    rows = [parts_of(made.splits["80"][seed].test)[0] for seed in (0, 1)]
    return [(np.asarray(data.x)[each], np.asarray(data.y)[each]) for each in rows]


@pytest.mark.parametrize("state", slow.after(1, ["best", "last"]))
def test_a_network_that_was_taken_along_does_as_it_did(
    whole: tuple[Ran, dict[int, Served]],
    held_out_images: list[tuple[np.ndarray, np.ndarray]],
    tmp_path: Path,
    state: str,
) -> None:
    run, seen = whole
    with no_figures():
        text = evaluate.run(evaluate.Options(str(run.folder), state, export=str(tmp_path)))
    for index, (seed, told) in enumerate(zip((0, 1), run.runs, strict=True)):
        (x, y), place = held_out_images[index], tmp_path / f"seed={seed}"
        assert str(place) in text
        about = json.loads((place / "model.json").read_text())
        line = told["by_rule"]["validation" if state == "best" else "last"]
        assert about["run"]["round"] == line["round"]
        assert about["score"]["test"] == line["test_score"]
        assert about["holds"] == "network"
        network = about["network"]
        model = getattr(models, network["model"])(**network["arguments"])
        like = jax.eval_shape(model.init, jax.random.key(0), x[:1])
        variables = saved.load(place / "model.safetensors", like)
        outputs = np.asarray(models.predict(model, variables, x))
        assert (outputs.argmax(1) == y).mean() == pytest.approx(line["test_score"], abs=1e-6)
        # And what its clients keep.
        mine = jax.tree.map(lambda a, i=index: a[i], seen[line["round"]].clients.variables)
        chex.assert_trees_all_equal(saved.load(place / "clients.safetensors", mine), mine)


def test_a_client_without_a_turn_is_exported_as_a_new_one() -> None:
    """As it is served; what it stores is the network that the run began with."""
    own = averaging.Own({"w": np.arange(6.0).reshape(3, 2)}, np.array([True, False, True]))
    unseen = averaging.Own({"w": np.full(2, 9.0)}, np.bool_(False))
    found = export._of_clients(own, unseen)
    np.testing.assert_array_equal(found["w"], [[0, 1], [9, 9], [4, 5]])
    assert export._of_clients({"w": 1}, {"w": 2}) == {"w": 1}


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


@pytest.mark.parametrize("state", slow.after(1, ["last", "best"]))
def test_an_evaluation_on_its_own_data_tells_what_training_told(
    whole: tuple[Ran, dict[int, Served]], tmp_path: Path, state: str
) -> None:
    run, _ = whole
    out = tmp_path / "there" / "it.png"
    text = evaluate.run(evaluate.Options(str(run.folder), state, out=str(out)))
    if state == "last":  # the same of both seeds
        assert ", held out: 80, after round 6\n" in text
    assert out.read_bytes().startswith(b"\x89PNG")
    told = pd.read_csv(out.with_suffix(".csv"), dtype={"name": str, "domain": str})
    for (_, got), expected in zip(told.groupby("seed"), run.runs, strict=True):
        line = expected["by_rule"]["validation" if state == "best" else "last"]
        assert (got["round"] == line["round"]).all()
        domains = got[got["by"] == "domain"].set_index("name")
        assert set(domains.index) == set(line["domains"])
        for name, domain in domains.iterrows():
            for key in ("score", "loss", "examples", "split"):
                told_of = line["domains"][name][key]
                assert domain[key] == (told_of if key == "split" else pytest.approx(told_of, 1e-4))
        # A client for each training domain, served by what it keeps.
        clients = got[got["by"] == "client"]
        assert len(clients) == 2
        for _, each in clients.iterrows():
            assert each["score"] == domains.loc[each["domain"], "score"]


def test_an_evaluation_on_other_data(
    whole: tuple[Ran, dict[int, Served]],
    held_out_images: list[tuple[np.ndarray, np.ndarray]],
    tmp_path: Path,
) -> None:
    run, _ = whole
    x, y = held_out_images[0]
    some = y > 4  # classes are known by their names
    domain = np.where(np.arange(some.sum()) < 9, "a", "b")

    def refused(words: str, **arrays: Any) -> None:
        np.savez(tmp_path / "new.npz", **arrays)
        with pytest.raises(ValueError, match=words) as error, no_figures():
            evaluate.run(evaluate.Options(str(run.folder), dataset=str(tmp_path / "new.npz")))
        assert "\n" not in str(error.value)

    refused(r"new.npz: has inputs \[4, 8, 1\], must have \[8, 8, 1\]", x=x[:, :4], y=y)
    refused("new.npz: has the class 10, must have those of the run, 0, 1", x=x, y=y + 5)
    np.savez(tmp_path / "new.npz", x=x[some], y=y[some], domain=domain)
    with no_figures():
        new, out = str(tmp_path / "new.npz"), str(tmp_path / "new.png")
        text = evaluate.run(evaluate.Options(str(run.folder), "last", new, out))
    told = pd.read_csv(tmp_path / "new.csv")
    assert "| a " in text
    runs = finished.open("run", run.folder)
    algorithm = runs.algorithm()
    for index, (_, got) in enumerate(told.groupby("seed")):
        server = runs.run(index, "last").served().server
        outputs = algorithm.predict(server, algorithm.init_client(server, 0), x[some])
        right = np.asarray(outputs).argmax(1) == y[some]
        by = {name: part.set_index("name") for name, part in got.groupby("by")}
        assert by["domain"].loc[["a", "b"], "examples"].tolist() == [9, len(right) - 9]
        expected = [right[:9].mean(), right[9:].mean()]
        np.testing.assert_allclose(by["domain"].loc[["a", "b"], "score"], expected)
        found = by["class"]["score"].isna().tolist()
        assert found == [True] * 5 + [False] * 5
        assert by["class"]["examples"].tolist() == np.bincount(y[some]).tolist()
        # Each client's own network, on all of it.
        assert by["client"].index.tolist() == ["0", "1"]
        assert set(by["client"]["examples"]) == {len(right)}


def test_what_is_told_of_logits_by_hand() -> None:
    outputs = np.array([[1.0, 3.0, 0.0], [500.0, 0.0, -500.0], [0.0, 0.0, 0.0]], np.float32)
    y = np.array([1, 1, 2])
    told = predictions.scorer(objective.task(config.of(), "classes"))(outputs, y)
    losses = [np.log(np.exp([-2, 0, -3]).sum()), 500.0, np.log(3)]
    assert told == pytest.approx((3, 1 / 3, np.mean(losses)))
    counts = evaluate.confusion(outputs.argmax(1), y, 3)
    np.testing.assert_array_equal(counts, [[0, 0, 0], [1, 1, 0], [1, 0, 0]])
    of_classes = predictions.of_columns("classes", outputs[[0, 0, 1, 2]], y[[0, 0, 1, 2]])
    np.testing.assert_allclose(of_classes, [np.nan, 2 / 3, 0])


def edited(change: Callable[[Path], Any]) -> Callable[[Path, Path], Path]:
    """A copy of a run in which something is not as it should be."""

    def copy(folder: Path, to: Path) -> Path:
        shutil.copytree(folder, to)
        return change(to) or to

    return copy


def result(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """Changes what result.json says."""

    def write(folder: Path) -> None:
        told = json.loads((folder / "result.json").read_text())
        change(told)
        (folder / "result.json").write_text(json.dumps(told))

    return write


def never_agreed(folder: Path) -> None:
    """Changes a run into one whose rule selects nothing."""
    begun = json.loads((folder / "config.json").read_text())
    begun["flags"]["select"] = "agreement"
    (folder / "config.json").write_text(json.dumps(begun))
    result(lambda told: [run["by_rule"].update(agreement=None) for run in told["runs"]])(folder)


BAD: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "nowhere": ("must be the folder of a run", lambda to: to / "nowhere"),
    "sweep": ("of a sweep, that of one cell", lambda to: to.parent),
    "no states": ("no checkpoint any more", lambda to: shutil.rmtree(to / "checkpoints")),
    "unfinished": ("must be finished", lambda to: (to / "result.json").unlink()),
    "nothing": (
        "its run seed=0 has nothing that --select=agreement selects; --state=last has its last",
        never_agreed,
    ),
}


PASSED_BY = result(lambda told: told["runs"][0]["by_rule"]["validation"].update(round=99))


@pytest.mark.parametrize("how", BAD)
def test_what_cannot_be_looked_at_is_told_in_one_line(
    whole: tuple[Ran, dict[int, Served]], tmp_path: Path, how: str
) -> None:
    words, change = BAD[how]
    folder = edited(change)(whole[0].folder, tmp_path / "copy")
    with pytest.raises(UsageError, match=f"^--run={folder}: .*{words}"), no_figures():
        evaluate.run(evaluate.Options(str(folder)))


def test_what_was_not_kept_is_not_taken_along(
    whole: tuple[Ran, dict[int, Served]], tmp_path: Path
) -> None:
    """But the others are."""
    folder = edited(PASSED_BY)(whole[0].folder, tmp_path / "copy")
    with no_figures():
        text = evaluate.run(evaluate.Options(str(folder), export=str(tmp_path / "export")))
    assert "Not evaluated: " in text
    assert [path.name for path in (tmp_path / "export").iterdir()] == ["seed=1"]


def test_a_seed_for_which_the_rule_selects_nothing(
    whole: tuple[Ran, dict[int, Served]], tmp_path: Path
) -> None:
    """Tables show its last round, those of metrics, too; `evaluate` leaves it out and says so."""
    folder = tmp_path / "copy"
    nothing = result(lambda told: told["runs"][0]["by_rule"].update(validation=None))
    edited(nothing)(whole[0].folder, folder)
    with no_figures():
        text = evaluate.run(evaluate.Options(str(folder)))
        before, _ = folders.read(folder)
        train.train(config.changed(before, run_dir=str(folder), metrics=("f1",)))
    assert "Not evaluated: " in text
    assert "seed=0 has nothing that --select=validation selects; --state=last has" in text
    assert set(pd.read_csv(folder / "evaluation-best.csv")["seed"]) == {1}
    measured = pd.read_csv(folder / "metrics.csv")
    assert set(measured["seed"]) == {0, 1}
    assert set(measured.loc[measured["seed"] == 0, "round"]) == {6}


def test_metrics_name_the_seeds_that_they_leave_out(
    whole: tuple[Ran, dict[int, Served]], tmp_path: Path
) -> None:
    """With another rule than in training, whose networks were not all saved."""
    folder = tmp_path / "copy"
    edited(PASSED_BY)(whole[0].folder, folder)
    before, _ = folders.read(folder)
    with no_figures():
        text = train.train(config.changed(before, run_dir=str(folder), metrics=("f1",)))
    assert (
        "\n\nThe metrics leave out seed 0: its network of round 99 was not saved, because --select "
        "was another rule when it was trained.\n"
    ) in text
    assert set(pd.read_csv(folder / "metrics.csv")["seed"]) == {1}


def test_predictions_do_not_replace_the_data(
    whole: tuple[Ran, dict[int, Served]], tmp_path: Path
) -> None:
    data, link = tmp_path / "new.csv", tmp_path / "link.csv"
    data.write_text("target,a\n1,2\n")
    link.symlink_to(data)
    for place in (data, link):
        chosen = evaluate.Options(str(whole[0].folder), dataset=str(data), predictions=str(place))
        with pytest.raises(UsageError, match=f"^--predictions={place}: "):
            evaluate.run(chosen)
