"""Runs that leave a training domain out: their scores, their inputs, and how they go on."""

import numpy as np
import pandas as pd
import pytest

from fedjax_inv.data import federation
from fedjax_inv_experiments import config, finished
from fedjax_inv_experiments.assembly import experiment
from fedjax_inv_experiments.folder import log, selection
from fedjax_inv_experiments.folder import run_folder as folders
from fedjax_inv_experiments.report import tables
from runs import Ran, ran

DOMAINS = ("0", "30")  # beside the one that is held out


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    place = tmp_path_factory.mktemp("left_out") / "run"
    flags = {"angles": (0, 30, 60), "max_examples": 240, "widths": (8,), "compile": "quick"}
    chosen = config.of(
        **flags,
        rounds=4,
        eval_every=2,
        seeds=(0, 3),
        select="leave_one_out",
        partition="mixed",
        standardise=True,
        wrong_labels=0.3,
        run_dir=str(place),
    )
    return ran(chosen)


def test_the_rule_sees_the_mean_score_on_the_domains_left_out(done: Ran) -> None:
    lines = log.read(done.folder)
    assert {(line.run, line.seed, line.left_out) for line in lines} == {
        *((0, 0, ""), (1, 3, ""), (2, 0, "0"), (3, 3, "0"), (4, 0, "30"), (5, 3, "30"))
    }
    for line in (line for line in lines if not line.left_out):
        others = [
            each.domains[each.left_out].score
            for each in lines
            if each.left_out and (each.seed, each.round) == (line.seed, line.round)
        ]
        assert len(others) == len(DOMAINS)
        assert line.left_out_score == pytest.approx(np.mean(others))
    result = folders.result(done.folder)
    picked = selection.choose("fedavg", result, "leave_one_out")
    assert picked is not None
    assert [run.seed for run in picked.runs] == [0, 3]
    best = tables.winners_table([picked])
    assert best["domains left out, %"].str.contains("±").all()
    # The network that is kept is that of the run on all domains.
    runs = finished.open("run", done.folder, "best")
    for index, line in enumerate(picked.selected):
        assert int(runs.fitted.state(index).round) == line.round
    table = pd.read_csv(done.folder / "runs.csv")
    assert {*table[table.selected].run} == {0, 1}
    assert {*table[table.picked_by.notna()].run} == {0, 1}


def test_nothing_of_the_domain_enters_the_training(done: Ran) -> None:
    made, inputs = experiment.make(done.job.config), done.job.plan.inputs
    scaling = inputs.scaling
    assert scaling is not None
    x = np.asarray(made.data.x, np.float64).reshape(len(made.data.y), -1, 1)
    for index, run in enumerate(done.job.cell.runs):
        split = made.splits["60"][run.seed]
        rows = np.concatenate(federation.parts_of(split.train))
        if run.left_out:
            left_out = np.asarray(made.data.domain)[rows] == made.dataset.domains.index(
                run.left_out
            )
            assert 0 < left_out.sum() < len(rows)
            rows = rows[~left_out]
        assert int(inputs.train.size[index].sum()) == len(rows)
        np.testing.assert_allclose(scaling.shift[index], x[rows].mean() / 255, rtol=1e-4)


def test_scores_by_class_are_of_the_same_test_for_all_runs() -> None:
    flags = {"angles": (0, 30, 60), "held_out": "60", "imbalance": 1000.0, "max_examples": 400}
    chosen = config.of(**flags, leave_one_out=True, watch_classes=True, widths=(8,))
    made = experiment.make(chosen)
    split = made.splits["60"][0]
    tests = (split.test, *(federation.without(split, out).test for out in DOMAINS))
    expected, *others = (
        np.bincount(np.asarray(made.data.y)[federation.parts_of(test)[0]], minlength=10)
        for test in tests
    )
    assert any(0 in counts for counts in others)  # a domain that is left out lacks a class
    inputs = made.plan(made.cells[0]).inputs
    assert inputs.detailed is not None
    np.testing.assert_array_equal(inputs.detailed.by_class.size, [expected] * 3)
