"""A run that trains the classifier alone, and exports of outputs of their own."""

from pathlib import Path
from typing import Any

import jax
import pytest

from federations import assert_same_bits
from fedjax_inv import freezing, rounds
from fedjax_inv_experiments import config, export, finished
from runs import Ran, ran

pytestmark = pytest.mark.slow  # most need trained runs


def trained(folder: Path, **flags: Any) -> Ran:
    angles = (0.0, 40.0, 80.0)
    common = dict(weight_decay=0.1, angles=angles, rounds=2, eval_every=2, widths=(4,), seeds=(0,))
    return ran(config.of(run_dir=str(folder), **common, **flags))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return trained(tmp_path_factory.mktemp("runs") / "head", train_only=("head",))


@pytest.fixture(scope="module")
def every(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """A run that trains all parameters."""
    return trained(tmp_path_factory.mktemp("runs") / "every")


def test_only_the_head_moves_and_is_uploaded(whole: Ran) -> None:
    runs = finished.open("run", whole.folder, "last")
    program, job = whole.job.plan.program, whole.job
    start = program.init(job.plan.data, job.plan.inputs).state
    before, after = start.server, runs.fitted.state().server
    algorithm = runs.fitted.algorithm()
    assert isinstance(after, freezing.Server)
    assert algorithm.network is not None
    own = jax.tree.map(lambda leaf: leaf[0], before)
    first, last = algorithm.network(own).params, algorithm.network(after).params
    assert_same_bits(first.body, last.body)
    assert any(
        (a != b).any() for a, b in zip(*map(jax.tree.leaves, (first.head, last.head)), strict=True)
    )
    state = jax.tree.map(lambda leaf: leaf[0], start)
    split = runs.data.splits[runs.cell.held_out][0]
    (traffic,) = rounds.traffic(algorithm, state, split.train._replace(data=runs.plan.data))
    assert traffic.up == 4 * sum(leaf.size for leaf in jax.tree.leaves(last.head))
    assert traffic.down > 4 * traffic.up


def test_an_export_tells_outputs_of_its_own(every: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = finished.open("run", every.folder, "last")
    assert export.meaning(runs)["outputs"].endswith("their softmax are probabilities")
    own = runs.fitted.algorithm()._replace(own_outputs=True)
    monkeypatch.setattr(runs.fitted, "algorithm", lambda: own)
    assert "; fedavg computes them in a way of its own" in export.meaning(runs)["outputs"]
