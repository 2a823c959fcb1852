"""Robust rules and privacy where few clients have a domain: equal terms, and the table."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fedjax_inv_experiments.assembly import grid
from fedjax_inv_experiments.studies import private_robust, row_runs, study
from runs import no_figures, options, others

STUDIES = [
    *(("robust", data) for data in private_robust.ROBUST),
    *(("private", data) for data in private_robust.PRIVATE),
]


@pytest.mark.parametrize(("name", "data"), STUDIES)
def test_rows_differ_in_nothing_but_rule_attack_budget_and_rare_clients(
    name: str, data: str, tmp_path: Path
) -> None:
    own = {"run_dir", "aggregate", "attack", "attackers", "wrong_labels", "wrong_clients"}
    own |= {"rare_domain", "epsilon"}
    rows = private_robust.PAPER.studies[name].rows(data)
    configs = row_runs.configs(rows, tmp_path)
    assert len({str(others(one, own)) for one in configs}) == 1
    for one in configs:
        (cell,) = grid.cells(one, [None])
        assert len(cell.runs) == 2 * len(one.training.seeds)
    methods = {row.series for row in rows}
    columns = {row.x for row in rows}
    assert len(rows) == len(methods) * len(columns)


@pytest.mark.slow
def test_the_table_has_the_means_of_its_seeds(tmp_path: Path) -> None:
    labels = "no-attack-FedAvg-1", "no-attack-median-1"
    chosen = options(
        private_robust.PAPER,
        f"--rows={','.join(labels)}",
        f"--run_dir={tmp_path}",
        "--rounds=2",
        "--seeds=0,1",
    )
    with no_figures():
        text = study.run_all(private_robust.PAPER, chosen)
    frame = pd.read_csv(tmp_path / "rotated_digits" / "robust_some.csv")
    assert frame.groupby("method")["seed"].apply(list).to_dict() == {
        "FedAvg": [0, 1],
        "median": [0, 1],
    }
    for method, mean in frame.groupby("method")["differs"].mean().items():
        assert f"{100 * mean:.1f} ±" in next(
            line for line in text.splitlines() if line.startswith(f"| {method} ")
        )
    place = tmp_path / "rotated_digits" / labels[0]
    metrics = pd.read_csv(place / "metrics.csv")
    tests = metrics[(metrics["by"] == "domain") & (metrics["split"] == "test")]
    for seed, of_seed in tests.groupby("seed"):
        row = frame[(frame["method"] == "FedAvg") & (frame["seed"] == seed)].iloc[0]
        mean = np.average(of_seed["score"], weights=of_seed["examples"])
        np.testing.assert_allclose(row["all"], mean, rtol=1e-4)
