"""The state that is judged is the state that is kept."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chex
import jax
import numpy as np
import pytest

from experiments import config
from experiments.running import kept
from experiments.running.checkpoints import Checkpoints
from experiments.running.kept import Kept, Served
from experiments.selection import RULES
from fedjax_inv import rounds
from fedjax_inv.program import Training
from runs import Ran, go_on, halved, metrics, ran, states


def told(round: int, run: int, accuracy: float, diverged: bool = False) -> dict[str, Any]:
    scores = {"validation_accuracy": accuracy, "test_accuracy": 1 - accuracy}
    return {"round": round, "run": run, "diverged": diverged, **scores}


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
    [told(round, run, accuracy, round >= DIVERGES[run]) for run, accuracy in enumerate(of_round)]
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
    keeper = Kept(RULES[rule], [], kept.none(kept.of(after(0, 4), personal=True)))
    for done, lines in enumerate(LINES):
        if done == resumed_at:
            before = [line for of_round in LINES[:done] for line in of_round]
            keeper = Kept(RULES[rule], before, keeper.served)
        keeper.look(lines, after(done + 1, 4), personal=True)
    np.testing.assert_array_equal(keeper.served.round, expected)
    value = np.where(np.array(expected) > 0, 10 * np.array(expected) + np.arange(4), 0)
    np.testing.assert_array_equal(keeper.served.server["w"], value)
    np.testing.assert_array_equal(keeper.served.clients, np.repeat(value[:, None], 4, axis=1))


def test_what_is_kept_is_never_changed_in_place() -> None:
    """It may still be on its way to the disk."""
    keeper = Kept(RULES["last"], [], kept.none(kept.of(after(0, 4), personal=False)))
    keeper.look(LINES[0], after(1, 4), personal=False)
    first = keeper.served
    copy = jax.tree.map(np.copy, first)
    keeper.look(LINES[1], after(2, 4), personal=False)
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
    look = Kept.look

    def look_and_tell(self: Kept, lines: Any, states: Training, personal: bool) -> None:
        assert personal
        seen[lines[0]["round"]] = jax.device_get(kept.of(states, personal))
        look(self, lines, states, personal)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Kept, "look", look_and_tell)
        yield ran(chosen), seen


def served(run: Ran, folder: Path, done: int) -> Served:
    """What a folder's checkpoint says was kept."""
    like = jax.eval_shape(run.job.program.init, run.job.data, run.job.inputs)
    checkpoints = Checkpoints(folder / "checkpoints")
    try:
        return checkpoints.kept(done, kept.of(like, run.job.personal))
    finally:
        checkpoints.close()


def test_a_finished_run_holds_its_last_and_its_selected_state(
    whole: tuple[Ran, dict[int, Served]],
) -> None:
    run, seen = whole
    assert [path.name for path in (run.folder / "checkpoints").iterdir()] == ["6"]
    got = served(run, run.folder, 6)
    picked = [told["selected"]["round"] for told in run.runs]
    assert picked != [6, 6]
    np.testing.assert_array_equal(got.round, picked)
    for index, round in enumerate(picked):
        one, expected = (jax.tree.map(lambda a, i=index: a[i], s) for s in (got, seen[round]))
        chex.assert_trees_all_equal(one, expected)
        assert jax.tree.leaves(one.clients)
    last = states(run.folder, 6)["state"]
    leaves = jax.tree.leaves((last["server"], last["clients"]))
    assert len(leaves) == len(jax.tree.leaves(seen[6]._replace(round=())))


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


def test_a_checkpoint_of_before_goes_on(
    whole: tuple[Ran, dict[int, Served]], tmp_path: Path
) -> None:
    """It has nothing kept; what is picked from there on is."""
    run, _ = whole
    folder = halved(run.job, tmp_path / "run")
    (folder / "checkpoints" / "1" / "kept").rename(tmp_path / "kept")
    np.testing.assert_array_equal(served(run, folder, 1).round, [0, 0])
    go_on(run.job, folder)
    assert metrics(folder) == metrics(run.folder)
    picked = [told["selected"]["round"] for told in run.runs]
    expected = [round if round > 1 else 0 for round in picked]
    np.testing.assert_array_equal(served(run, folder, 6).round, expected)
