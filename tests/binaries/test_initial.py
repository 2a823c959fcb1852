"""--init_from: where a run starts, what it may start from, and Simpson's paradox end to end."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chex
import jax
import numpy as np
import pytest

import runs
from fedjax_inv import program
from fedjax_inv.checks import UsageError
from fedjax_inv.types import Variables
from fedjax_inv_experiments import config
from fedjax_inv_experiments.assembly import experiment, objective
from fedjax_inv_experiments.assembly.experiment import Assembly
from fedjax_inv_experiments.config import Config
from fedjax_inv_experiments.folder import checkpoints
from fedjax_inv_experiments.run import start_of
from runs import Ran, halved, jobs, metrics, no_figures, ran, states, with_flags

pytestmark = pytest.mark.slow  # most need trained runs

SIMPSON = config.of(
    environment="simpson",
    clients=3,
    rounds=2,
    eval_every=1,
    widths=(6,),
    seeds=(0, 1),
    chunk=("0", "0"),
)
# What it is to reach is near, but not at once.
BEFORE: dict[str, Any] = dict(
    algorithm=("erm",),
    shading="random",
    local_steps=2,
    rounds=30,
    eval_every=1,  # so that there is more than one checkpoint
    watch_examples=10_000,
    stop_above=(0.9,),
    after_stop="end",
)


launch = runs.train


def assembled(chosen: Config) -> Assembly:
    return experiment.make(chosen, start=start_of(chosen))


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """A network for each of two seeds, trained until it is right nine times in ten."""
    folder = tmp_path_factory.mktemp("runs") / "before"
    return ran(with_flags(SIMPSON, run_dir=str(folder), **BEFORE))


@pytest.fixture(scope="module")
def after(before: Ran, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    folder = tmp_path_factory.mktemp("runs") / "after"
    return ran(following(before, run_dir=str(folder)))


def following(before: Ran, **changes: Any) -> Config:
    return with_flags(SIMPSON, **({"init_from": str(before.folder)} | changes))


def network(folder: Path, run: int) -> Any:
    """Of the newest checkpoint, as orbax reads it."""
    done = max(int(place.name) for place in (folder / "checkpoints").iterdir())
    variables = states(folder, done)["state"]["server"]["variables"]
    return jax.tree.map(lambda leaf: np.asarray(leaf)[run], variables["params"])


def as_dicts(variables: Variables) -> Any:
    return {name: getattr(variables.params, name) for name in ("body", "head")}


def test_a_run_ends_as_soon_as_it_is_good_enough(before: Ran) -> None:
    for index, run in enumerate(before.runs):
        mine = [line for line in metrics(before.folder) if line["run"] == index]
        curve = [accuracy for line in mine for accuracy in line["train_by_round"]]
        (stop,) = run["stops"]
        first = next(n for n, accuracy in enumerate(curve, 1) if accuracy >= 0.9)
        assert stop["round"] == first
        assert stop["train_score"] == pytest.approx(curve[first - 1], abs=1e-4)
        assert set(curve[first:]) <= {curve[first - 1]}
        assert run["last"]["domains"] == stop["domains"]
    assert max(run["stops"][0]["round"] for run in before.runs) > 1


def test_what_is_good_enough_at_once_ends_at_once() -> None:
    """Only games have to be played for some rounds before a threshold counts."""
    sizes = np.array([5, 7, 2])
    chosen = with_flags(SIMPSON, **BEFORE)
    assert objective.warm_start(chosen.evaluation, 32, sizes) == 0
    game = with_flags(chosen, stop_above=(), stop_below=(0.9,))
    assert objective.warm_start(game.evaluation, 32, sizes) == 3


def test_every_run_starts_from_the_network_of_its_seed(before: Ran) -> None:
    """And where that is not there, from the first."""
    for seeds, rows in (((1, 0), (1, 0)), ((1, 5), (1, 0))):
        setup = assembled(following(before, seeds=seeds, learning_rate=(0.1, 0.2)))
        (cell,) = setup.cells
        ready = setup.plan(cell)

        got = program.Program(ready.experiment, run_chunk=2).init(setup.data, ready.inputs)
        for index, run in enumerate(cell.runs):
            row = rows[seeds.index(run.seed)]
            server = jax.tree.map(lambda leaf, at=index: leaf[at], got.state.server.variables)
            chex.assert_trees_all_equal(as_dicts(server), network(before.folder, row))


def test_a_network_that_is_not_there_is_told(before: Ran, tmp_path: Path) -> None:
    chosen = following(before, init_from=str(tmp_path / "later"))
    with pytest.raises(UsageError, match=r"later: must be the folder of a run, or a checkpoint"):
        launch(chosen, tmp_path / "run", in_folders=False)
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_of_a_run_may_be_named(before: Ran, tmp_path: Path) -> None:
    """And newer ones are not looked at."""
    folder = tmp_path / "run"
    shutil.copytree(before.folder, folder)
    (only,) = (folder / "checkpoints").iterdir()
    (folder / "checkpoints" / "999").mkdir()
    setup = assembled(following(before, init_from=str(only)))
    assert setup.variables is not None
    network = states(before.folder, int(only.name))["state"]["server"]["variables"]["params"]
    for seed in (0, 1):
        expected = jax.tree.map(lambda leaf, at=seed: np.asarray(leaf)[at], network)
        chex.assert_trees_all_equal(as_dicts(setup.variables[seed]), expected)


def test_what_has_started_from_a_run_is_not_mixed_with_what_starts_from_another(
    before: Ran, tmp_path: Path
) -> None:
    """Where the run at --init_from has gone on, or is another one of the same name by now."""
    source, folder = tmp_path / "source", tmp_path / "sweep"
    shutil.copytree(before.folder, source)
    earlier = halved(before.job, tmp_path / "earlier")
    chosen = following(before, init_from=str(source))
    with jobs() as seen, no_figures():
        text = launch(chosen, folder, in_folders=True)
        assert launch(chosen, folder, in_folders=True) == text
        shutil.rmtree(source / "checkpoints")
        shutil.copytree(earlier / "checkpoints", source / "checkpoints")
        with pytest.raises(UsageError, match="from other networks than --init_from"):
            launch(with_flags(chosen, resume=True), folder, in_folders=True)
    assert len(seen) == 1


@pytest.mark.parametrize("changes", [dict(widths=(5,)), dict(norm="batch"), dict(activation="elu")])
def test_another_network_is_refused(before: Ran, changes: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"^--init_from={before.folder}: "):
        assembled(following(before, **changes))


def damaged(folder: Path, before: Ran, how: str) -> Path:
    """A copy of the run in which something is not as it should be, and what is to be named."""
    shutil.copytree(before.folder, folder)
    record = json.loads((folder / "config.json").read_text())
    places = sorted((folder / "checkpoints").iterdir(), key=lambda place: int(place.name))
    if how == "nothing":
        shutil.rmtree(folder / "checkpoints")
    elif how == "seeds":
        record["cell"]["runs"][1]["seed"] = 0
    elif how == "config":
        (folder / "config.json").write_text("{")
        return folder
    elif how == "checkpoint":
        for file in places[-1].rglob("*"):
            if file.is_file():
                file.write_text("?")
    elif how == "round":
        return folder / "checkpoints" / "999"
    elif how == "sweep":
        return folder.parent
    (folder / "config.json").write_text(json.dumps(record))
    return folder


@pytest.mark.parametrize("how", ["nothing", "seeds", "config", "checkpoint", "round", "sweep"])
def test_what_is_no_run_to_start_from_is_refused(before: Ran, tmp_path: Path, how: str) -> None:
    path = damaged(tmp_path / "copy", before, how)
    with pytest.raises(UsageError, match=f"^--init_from={path}: "):
        assembled(following(before, init_from=str(path)))


def test_servers_of_other_kinds(before: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = checkpoints.plain

    def changed(change: Callable[[dict[str, Any]], Any]) -> None:
        def read(*arguments: Any) -> Any:
            return {"state": {"server": change(plain(*arguments)["state"]["server"])}}

        monkeypatch.setattr(checkpoints, "plain", read)

    chosen = following(before)
    expected = assembled(chosen).variables
    changed(lambda server: {"wrapped": server})
    chex.assert_trees_all_equal(assembled(chosen).variables, expected)
    changed(lambda server: {"wrapped": server, "frozen": {}})
    with pytest.raises(UsageError, match=r"trained a part of its network \(--train_only\), must"):
        assembled(chosen)
    changed(lambda server: {"players": server})
    with pytest.raises(UsageError, match="--algorithm=erm, which has no single network"):
        assembled(chosen)
    changed(lambda server: jax.tree.map(lambda leaf: leaf * np.nan, server))
    with pytest.raises(UsageError, match=r"has a network whose params/body/.* is not finite$"):
        assembled(chosen)
