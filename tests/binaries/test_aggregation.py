"""Attackers, robust rules and privacy by flags."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from fedjax_inv.checks import UsageError
from fedjax_inv_experiments import config
from fedjax_inv_experiments.assembly import aggregation, method
from runs import metrics, ran, with_flags

SMALL: dict[str, Any] = {
    "rounds": 3,
    "widths": (16,),
    "angles": (0.0, 40.0),
    "clients": 6,
    "batch_size": 64,
}


def losses(folder: Path, **flags: Any) -> list[float]:
    run = ran(config.of(run_dir=str(folder), **SMALL | flags))
    return [line["train_loss"] for line in metrics(run.folder) if line["train_loss"] is not None]


def test_a_median_stands_an_attack_that_the_mean_does_not(tmp_path: Path) -> None:
    flags = {"learning_rate": (0.5,), "rounds": 10}
    attack = flags | {"attack": "scaled_noise", "attackers": (1,)}
    honest = losses(tmp_path / "a", **flags)[-1]
    attacked = losses(tmp_path / "b", **attack)[-1]
    robust = losses(tmp_path / "c", aggregate="median", **attack)[-1]
    assert attacked > honest + 0.1
    assert robust < attacked - 0.1


def test_a_budget_stands_below_the_table(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting")
    flags = {"sampling": "poisson", "sampling_rate": 0.5, "private_clip": 0.5, "epsilon": 4.0}
    chosen = config.of(run_dir=str(tmp_path / "run"), **SMALL, **flags)
    run = ran(chosen)
    assert aggregation.budget(chosen) in (run.folder / "table.md").read_text()
    assert 0.3 < aggregation.noise_multiplier(chosen) < 3
    # The noise was found for these rounds.
    with pytest.raises(UsageError, match="--rounds=4"):
        ran(with_flags(chosen, rounds=4, resume=True))


def test_poisson_cohorts_have_as_many_slots_as_the_largest_needs() -> None:
    chosen = config.of(sampling="poisson", sampling_rate=0.2, **SMALL)
    schedule = method.Cohorts(chosen.participation)
    assert schedule.has_empty_slots
    cohort = schedule(np.random.default_rng(0).integers(0, 9, 2).astype(np.uint32), 50, 40)
    assert 0.1 < np.asarray(cohort.present).mean() < 0.3


def test_metrics_tell_the_test_of_each_domain(tmp_path: Path) -> None:
    flags = {"held_out": "none", "rare_domain": "40:0.25", "metrics": ("balanced_accuracy",)}
    run = ran(config.of(run_dir=str(tmp_path / "run"), **SMALL | flags))
    frame = pd.read_csv(run.folder / "metrics.csv")
    tests = frame[(frame["by"] == "domain") & (frame["split"] == "test")]
    assert sorted(tests["name"]) == ["test, 0", "test, 40"]
    (chosen,) = [line for line in metrics(run.folder) if line["round"] == tests["round"].iloc[0]]
    assert tests["examples"].sum() == chosen["domains"]["test"]["examples"]
    mean = np.average(tests["score"], weights=tests["examples"])
    np.testing.assert_allclose(mean, chosen["test_score"], rtol=1e-5)
