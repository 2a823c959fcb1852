"""A run that trains the classifier alone, and its evaluation with each client's own network."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from federations import assert_same_bits
from fedjax_inv import communication, evaluation, freezing
from fedjax_inv.rounds import State
from fedjax_inv.types import Algorithm
from fedjax_inv_experiments import evaluate, export
from fedjax_inv_experiments.experiment import config
from fedjax_inv_experiments.reporting import fine_tuned, finished
from runs import Ran, no_figures, ran

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


@pytest.fixture(scope="module")
def one(whole: Ran) -> finished.OneRun:
    return finished.open("run", whole.folder).run(0, "last")


def test_only_the_head_moves_and_is_uploaded(whole: Ran, one: finished.OneRun) -> None:
    program, job = whole.job.program, whole.job
    start = program.init(job.data, job.inputs).state
    before, after = start.server, one.served().server
    algorithm = one.algorithm()
    assert isinstance(after, freezing.Server)
    assert algorithm.network is not None
    own = jax.tree.map(lambda leaf: leaf[0], before)
    first, last = algorithm.network(own).params, algorithm.network(after).params
    assert_same_bits(first.body, last.body)
    assert any(
        (a != b).any() for a, b in zip(*map(jax.tree.leaves, (first.head, last.head)), strict=True)
    )
    state = jax.tree.map(lambda leaf: leaf[0], start)
    split = one.runs.data.splits[one.runs.cell.held_out][0]
    (traffic,) = communication.traffic(algorithm, state, split.train._replace(data=job.data))
    assert traffic.up == 4 * sum(leaf.size for leaf in jax.tree.leaves(last.head))
    assert traffic.down > 4 * traffic.up


def test_each_client_is_scored_with_its_fine_tuned_network(every: Ran) -> None:
    """The file's name tells it, so that it does not take the place of another evaluation."""
    one = finished.open("run", every.folder).run(0, "last")
    with no_figures():
        text = evaluate.run(evaluate.Options(str(every.folder), "last", fine_tune=2))
    scored = every.folder / "evaluation-last-fine_tune=2.json"
    found = json.loads(scored.read_text())["runs"][0]
    personal, networks = fine_tuned.networks(one, one.algorithm(), 2)
    split = one.runs.data.splits[one.runs.cell.held_out][0]
    valid = split.valid._replace(data=one.runs.data.data)
    state = State(one.served().server, networks, (), np.int32(0), jax.random.key(0))
    own = evaluation.evaluate(personal, state, valid)
    shared = evaluation.evaluate(one.algorithm(), state, valid)
    for name, scores in (("clients", shared), ("fine_tuned", own)):
        assert [each["client"] for each in found[name]] == [0, 1]
        for each in found[name]:
            assert each["score"] == pytest.approx(float(scores.score[each["client"]]))
            assert each["loss"] == pytest.approx(float(scores.loss[each["client"]]), rel=1e-4)
    assert found["clients"] != found["fine_tuned"]
    lowest = 100 * min(each["score"] for each in found["fine_tuned"])
    (line,) = (line for line in text.splitlines() if line.startswith("| own, fine-tuned"))
    assert line.split("|")[3].strip() == f"{lowest:.1f}"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"personal": True}, "--algorithm=fedavg serves each client with its own network already"),
        ({"network": None}, "--algorithm=fedavg has no global network"),
        ({"own_outputs": True}, "--algorithm=fedavg computes outputs in a way of its own"),
    ],
)
def test_what_has_no_plain_global_network_is_not_fine_tuned(
    every: Ran, change: dict[str, Any], message: str
) -> None:
    one = finished.open("run", every.folder).run(0, "last")
    algorithm: Algorithm = one.algorithm()._replace(**change)
    with pytest.raises(ValueError, match=f"^--fine_tune=2: {message}$"):
        fine_tuned.check(one.runs, algorithm, 2)


def test_an_export_tells_outputs_of_its_own(every: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    one = finished.open("run", every.folder).run(0, "last")
    assert export.meaning(one)["outputs"].endswith("their softmax are probabilities")
    own = one.algorithm()._replace(own_outputs=True)
    monkeypatch.setattr(finished.OneRun, "algorithm", lambda self: own)
    assert "; fedavg computes them in a way of its own" in export.meaning(one)["outputs"]


def test_a_run_that_trains_some_parameters_is_not_fine_tuned(one: finished.OneRun) -> None:
    with pytest.raises(ValueError, match=r"^--fine_tune=2: .* with --train_only=head$"):
        fine_tuned.check(one.runs, one.algorithm(), 2)
