"""Scores of counts select, stop and are logged as scikit-learn has them of the predictions."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import accuracy_score, f1_score, recall_score

import runs
import slow
from fedjax_inv_experiments import config, evaluation
from runs import metrics, no_figures

RNG = np.random.default_rng(0)
NUM = 240
Y = RNG.choice(3, NUM, p=[0.5, 0.3, 0.2])
DOMAIN = RNG.integers(0, 3, NUM)
X = (np.eye(3)[Y] + (0.3 + 0.2 * DOMAIN)[:, None] * RNG.normal(size=(NUM, 3))).astype(np.float32)


def by_sklearn(name: str, of: pd.DataFrame) -> float:
    pair, labels = (of["target"], of["prediction"]), of["target"].unique()
    if name == "worst_group":
        by_group = of.groupby([of["target"], DOMAIN[of["source"]]])
        return min(accuracy_score(each["target"], each["prediction"]) for _, each in by_group)
    if name == "balanced_accuracy":
        return float(recall_score(*pair, labels=labels, average="macro"))
    return float(f1_score(*pair, average="macro"))


MIXED: dict[str, Any] = {"partition": "mixed", "held_out": "none", "clients": 3}
CASES = [("macro_f1", {}), ("worst_group", MIXED), ("worst_group", {}), ("balanced_accuracy", {})]


@pytest.mark.parametrize(
    ("name", "more"), slow.after(2, CASES), ids=["f1", "mixed", "worst", "balanced"]
)
def test_the_log_has_what_sklearn_says_of_the_predictions(
    name: str, more: dict[str, Any], tmp_path: Path
) -> None:
    np.savez(tmp_path / "data.npz", x=X, y=Y, domain=DOMAIN)
    flags: dict[str, Any] = {"dataset": str(tmp_path / "data.npz"), "score": name, "widths": (16,)}
    flags |= {"rounds": 4, "eval_every": 1, "chunk": ("0",), "learning_rate": (0.5,)}
    flags |= {"watch_examples": NUM, "stop_above": (0.5,), "metrics": ("f1",)}
    with no_figures():
        printed = runs.train(config.of(run_dir=str(tmp_path / "run"), **flags, **more))
        written, out = tmp_path / "predictions.csv", tmp_path / "it.png"
        run = str(tmp_path / "run")
        evaluation.run(evaluation.EvaluationOptions(run, out=str(out), predictions=str(written)))
    assert f"{name.replace('_', ' ').replace('f1', 'F1')}" in printed
    of, told = pd.read_csv(written), pd.read_csv(out.with_suffix(".csv"), dtype={"name": str})
    result = json.loads((tmp_path / "run" / "result.json").read_text())["runs"][0]
    line = result["by_rule"]["validation"]
    lines = metrics(tmp_path / "run")
    assert line["validation_score"] == max(each["validation_score"] for each in lines[1:])
    of_domains = told[told["by"] == "domain"].set_index("name")["score"]
    validation = []
    for domain, logged in line["domains"].items():
        # A test of several domains is "test, NAME" for each.
        mine = of[of["domain"].astype(str).str.partition(", ")[0] == domain]
        assert logged["examples"] == len(mine)
        expected = by_sklearn(name, mine)
        assert logged["score"] == pytest.approx(expected, 1e-5)
        validation += [expected] * (logged["split"] == "validation")
    for domain, score in of_domains.items():
        mine = of[of["domain"].astype(str) == domain]
        assert score == pytest.approx(by_sklearn(name, mine), 1e-5)
    over_domains = np.min if name == "worst_group" else np.mean
    assert line["validation_score"] == pytest.approx(over_domains(validation), 1e-5)
    of_clients = told[told["by"] == "client"]
    for client, score in zip(of_clients["name"], of_clients["score"], strict=True):
        mine = of[of["client"] == int(client)]
        assert score == pytest.approx(by_sklearn(name, mine), 1e-5)
    # All examples of the test are watched, and the stop has the scores of its round.
    for each in lines[1:]:
        assert each["test_by_round"] == [pytest.approx(each["test_score"], abs=1e-5)]
    (stop,) = result["stops"]
    first = next(each for each in lines[1:] if each["train_by_round"][0] >= 0.5)
    assert stop["round"] == first["round"]
    assert stop["train_score"] == pytest.approx(first["train_by_round"][0], abs=1e-5)
    scores = [{k: d["score"] for k, d in each["domains"].items()} for each in (stop, first)]
    assert scores[0] == pytest.approx(scores[1])
