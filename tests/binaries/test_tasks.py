"""Regression and labels: runs on such data, their scores, metrics, predictions and exports."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

import runs
import slow
from fedjax_inv import models, objectives
from fedjax_inv.checks import UsageError
from fedjax_inv.data import sources
from fedjax_inv.models import saved
from fedjax_inv_experiments import config, evaluation, finished, predictions
from fedjax_inv_experiments.assembly import experiment, metrics, objective
from fedjax_inv_experiments.assembly.metrics import Measure, Predictions
from fedjax_inv_experiments.report import figures
from runs import no_figures

RNG = np.random.default_rng(0)
X = RNG.normal(size=(90, 4)).astype(np.float32)
DOMAIN = np.arange(90) % 3
TARGETS = {
    "values": (X @ np.array([1.0, -2.0, 0.5, 0.0]) + DOMAIN).astype(np.float32),
    "labels": np.stack([X[:, 0] > 0, X[:, 1] > 0.5, X[:, 2] > 5], 1),
}
METRICS = {"values": ("mae", "r2"), "labels": ("f1", "auroc")}


class Ran(NamedTuple):
    """A finished run."""

    kind: str
    folder: Path
    printed: str


@pytest.fixture(scope="module", params=slow.after(1, ["values", "labels"]))
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ran]:
    kind = request.param
    folder = tmp_path_factory.mktemp(kind)
    np.savez(folder / "data.npz", x=X, y=TARGETS[kind], domain=DOMAIN)
    chosen = config.of(
        dataset=str(folder / "data.npz"),
        widths=(3,),
        rounds=2,
        eval_every=1,
        chunk=("0",),
        learning_rate=(0.05,),
        run_dir=str(folder / "run"),
        metrics=METRICS[kind],
    )
    with no_figures():
        yield Ran(kind, folder / "run", runs.train(chosen))


def test_the_tables_show_the_score_of_the_task(ran: Ran) -> None:
    name = {"values": "absolute error", "labels": "label accuracy, %"}[ran.kind]
    assert f"| held-out {name}" in ran.printed
    result = json.loads((ran.folder / "result.json").read_text())
    assert result["score"]["name"] == name.removesuffix(", %")
    (run,) = result["runs"]
    lines = [json.loads(text) for text in (ran.folder / "metrics.jsonl").read_text().splitlines()]
    best = max if ran.kind == "labels" else min
    picked = best(lines[1:], key=lambda line: line["validation_score"])
    assert run["by_rule"]["validation"]["validation_score"] == picked["validation_score"]
    worst = min if ran.kind == "labels" else max
    for line in lines:
        assert line["worst_score"] == worst(d["score"] for d in line["domains"].values())
    measured = pd.read_csv(ran.folder / "metrics.csv", dtype={"name": str})
    domains = measured[measured["by"] == "domain"].set_index("split")
    # The table of --metrics: on the test, and on the worst domain.
    table = (ran.folder / "table.md").read_text().partition("metrics where selected")[2]
    shown = [cell.strip() for cell in table.splitlines()[2].split("|")[3:-1]]
    expected = []
    for name in METRICS[ran.kind]:
        worst = max if name in metrics.LOWER_IS_BETTER else min
        expected += [f"{domains[name]['test']:.4g}", f"{worst(domains[name].dropna()):.4g}"]
    assert shown == expected
    names = {by: set(part["name"]) for by, part in measured.groupby("by")}
    assert (names["domain"], names["client"]) == ({"0", "1", "2"}, {"0", "1"})


def test_a_run_finds_its_data_from_another_folder(
    ran: Ran, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(ran.folder, tmp_path / "run")
    record = json.loads((ran.folder / "config.json").read_text())
    place = Path(record["flags"]["dataset"])
    record["flags"]["dataset"], record["start"]["folder"] = place.name, str(place.parent)
    (tmp_path / "run" / "config.json").write_text(json.dumps(record))
    monkeypatch.chdir(tmp_path)
    assert finished.open("run", Path("run"), "last").data.dataset.task == ran.kind


def test_an_evaluation_agrees_with_its_predictions(ran: Ran, tmp_path: Path) -> None:
    out, asked = tmp_path / "it.png", METRICS[ran.kind]
    written = tmp_path / "predictions.csv"
    options = evaluation.EvaluationOptions(
        str(ran.folder), out=str(out), metrics=asked, predictions=str(written)
    )
    text = evaluation.run(options)
    assert str(written) in text
    told = pd.read_csv(out.with_suffix(".csv"), dtype={"name": str})
    of_domains = told[told["by"] == "domain"].set_index("name")
    line = json.loads((ran.folder / "result.json").read_text())["runs"][0]["by_rule"]["validation"]
    for name, domain in line["domains"].items():
        for key in ("score", "loss"):
            assert of_domains.loc[name, key] == pytest.approx(domain[key], 1e-4)
    names = {"values": ["target"], "labels": ["0", "1", "2"]}[ran.kind]
    of_columns = told[told["by"] == {"values": "value", "labels": "label"}[ran.kind]]
    assert of_columns["name"].tolist() == names
    assert of_columns["score"].mean() == pytest.approx(line["test_score"], 1e-4)
    assert ("| label " in text) == (ran.kind == "labels")
    columns = pd.read_csv(written)
    assert len(columns) == of_domains["examples"].sum()
    assert {row.split(",")[5] for row in written.read_text().splitlines()[1:]} == {"", "0", "1"}
    index = columns["source"].to_numpy()
    assert DOMAIN[index].tolist() == columns["domain"].tolist()
    test = (columns["split"] == "test").to_numpy()
    if ran.kind == "values":
        target = columns["target"].astype(np.float32)
        np.testing.assert_array_equal(target, TARGETS["values"][index])
        error = abs(columns["target"] - columns["prediction"])[test]
        assert error.mean() == pytest.approx(line["test_score"], 1e-4)
        assert of_domains.loc["2", "mae"] == pytest.approx(error.mean(), 1e-6)
    else:
        truth, predicted, probability = (
            np.array([columns[f"{kind}_{name}"] for name in "012"])
            for kind in ("target", "prediction", "probability")
        )
        np.testing.assert_array_equal(truth.T, TARGETS["labels"][index])
        np.testing.assert_array_equal(predicted, probability > 0.5)
        assert (truth == predicted)[:, test].mean() == pytest.approx(line["test_score"])


def test_each_row_of_the_data_knows_its_row_in_the_source() -> None:
    """Also where each seed draws other examples, and where some are copied with wrong labels."""
    chosen = config.of(
        environment="stained",
        training_domains=2,
        domain_size=30,
        test_fraction=0.1,
        max_examples=500,
        seeds=(0, 1),
        wrong_labels=0.5,
    )
    made, whole = experiment.make(chosen), sources.load("digits")
    number = len(made.source)
    assert len(made.origin) == number
    np.testing.assert_array_equal(made.data.x.image[:number] > 0, whole.x[made.origin] > 0)
    assert made.origin.max() > 500


def test_an_exported_network_says_what_its_outputs_mean(ran: Ran, tmp_path: Path) -> None:
    with no_figures():
        evaluation.run(evaluation.EvaluationOptions(str(ran.folder), export=str(tmp_path)))
    (folder,) = tmp_path.iterdir()
    about = saved.about(folder / "model.safetensors")
    assert json.loads(about["task"]) == ran.kind
    names = json.loads(about["classes"])
    assert names == (["target"] if ran.kind == "values" else ["0", "1", "2"])
    record = json.loads((folder / "model.json").read_text())
    assert record["network"]["task"] == ran.kind
    # The network with these arrays has the score of the run.
    model = models.mlp(len(names), widths=(3,))
    model = models.in_units(model) if ran.kind == "values" else model
    like = jax.eval_shape(model.init, jax.random.key(0), X[:1])
    outputs = models.predict(model, saved.load(folder / "model.safetensors", like), X[DOMAIN == 2])
    y = jnp.asarray(TARGETS[ran.kind][DOMAIN == 2])
    score = objectives.DEFAULTS[ran.kind][1].function(outputs, y, jnp.ones(len(y), bool))
    assert float(score) == pytest.approx(record["score"]["test"], 1e-4)


def test_a_network_may_return_one_value_without_an_axis() -> None:
    fitted = SimpleNamespace(
        predict=lambda x, index, client, unseen: x[:, 0],
        algorithm=lambda index: SimpleNamespace(personal=False),
    )
    line = SimpleNamespace(played=1, seed=0)
    plan = SimpleNamespace(own_rule="")
    runs: Any = SimpleNamespace(fitted=fitted, line=lambda index: line, plan=plan)
    parts = [predictions.Slice("a", "test", -1, np.arange(len(X)), X, X[:, 0])]
    found = predictions.predicted(runs, 0, parts)
    np.testing.assert_array_equal(found.outputs, X[:, :1])


def test_classes_with_more_outputs_than_classes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have neither accuracies of classes nor confusions."""
    parts = [predictions.Slice("a", "test", -1, np.arange(3), X[:3], np.array([0, 1, 0]))]
    outputs = np.eye(3, 4, 1, np.float32)
    of = predictions.RunPredictions(0, 1, *predictions.joined(parts), outputs)
    task = objective.make("auto", "auto", "classes")
    dataset = SimpleNamespace(classes=("cat", "dog"))
    runs: Any = SimpleNamespace(data=SimpleNamespace(objective=task, dataset=dataset))
    found = evaluation.scored(runs, [of])
    text = evaluation.printed(found)
    assert "| a " in text
    assert "cat" not in text
    drawn = []
    monkeypatch.setattr(figures, "save", lambda figure, path, **others: drawn.append(figure))
    evaluation.draw(tmp_path / "it.png", found, "")
    assert len(drawn[0].axes) == 1


def test_other_data_must_have_the_same_targets(ran: Ran, tmp_path: Path) -> None:
    other = {"values": "labels", "labels": "values"}[ran.kind]
    for y in (TARGETS[other], np.stack([TARGETS[ran.kind].reshape(90, -1)[:, 0]] * 2, 1)):
        np.savez(tmp_path / "new.npz", x=X, y=y)
        with pytest.raises(UsageError, match="--dataset="), no_figures():
            evaluation.run(
                evaluation.EvaluationOptions(str(ran.folder), dataset=str(tmp_path / "new.npz"))
            )


OWN = """
import jax.numpy as jnp
from fedjax_inv import objectives

def loss(outputs, y, mask):
    return objectives.masked_mean((outputs[:, 0] - y) ** 4, mask)

def near(outputs, y, mask):
    return objectives.masked_mean(jnp.exp(-abs(outputs[:, 0] - y)), mask)

worst = objectives.Score("largest", near, higher_is_better=False)
"""


def test_a_loss_and_a_score_from_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_objective.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    named = config.of(loss="own_objective:loss", score="own_objective:near")
    task = objective.make(named.method.loss, named.evaluation.score, "values")
    outputs, y, mask = jnp.array([[1.0], [3.0]]), jnp.array([1.0, 1.0]), jnp.ones(2, bool)
    assert task.loss(outputs, y, mask) == 8
    assert task.measure == Measure("near", higher_is_better=True, is_share=False)
    assert not task.is_default
    assert objective.make("auto", "own_objective:worst", "values").measure.rank(2) == -2
    values = {"loss": "own_objective:loss", "score": "own_objective:near"}
    assert set(config.of(**values).outside) == set(values.values())


# Metrics, against naive loops.


def _probabilities(outputs: np.ndarray, kind: str) -> np.ndarray:
    powers = np.exp(outputs.astype(np.float64))
    return powers / powers.sum(1, keepdims=True) if kind == "classes" else powers / (1 + powers)


def _naive_calibration(confidence: np.ndarray, right: np.ndarray) -> float:
    total = 0.0
    for number in range(15):
        low, high = number / 15, (number + 1) / 15
        inside = [(c, r) for c, r in zip(confidence, right, strict=True) if low < c <= high]
        if inside:
            of_bin = np.array(inside, float)
            total += abs(of_bin[:, 1].mean() - of_bin[:, 0].mean()) * len(inside)
    return total / len(confidence)


def _naive_auroc(truth: np.ndarray, values: np.ndarray) -> float:
    pairs = [(p > n) + (p == n) / 2 for p in values[truth] for n in values[~truth]]
    return float(np.mean(pairs))


def _examples(kind: str, num: int = 60) -> Predictions:
    rng = np.random.default_rng(3)
    outputs = rng.normal(size=(num, 3)).astype(np.float32) * 2
    y: Any = rng.integers(0, 3, num)
    if kind == "labels":
        y = rng.random((num, 3)) < 0.4
    elif kind == "values":
        y = rng.normal(size=(num, 3)).astype(np.float32)
    return Predictions(kind, y, outputs)


@pytest.mark.parametrize("kind", ["classes", "labels"])
def test_metrics_of_probabilities_follow_naive_loops(kind: str) -> None:
    of = _examples(kind)
    p = _probabilities(of.outputs, kind)
    np.testing.assert_allclose(of.probabilities, p, rtol=1e-6)
    asked = ("f1", "auroc", "calibration_error", "brier", "average_precision")
    found = metrics.values(asked, of)
    truth = of.y if kind == "labels" else np.eye(3, dtype=bool)[of.y]
    aurocs = [_naive_auroc(truth[:, k], p[:, k]) for k in range(3)]
    assert found["auroc"] == pytest.approx(np.mean(aurocs))
    if kind == "classes":
        predicted = np.eye(3, dtype=bool)[p.argmax(1)]
        confidence, right = p.max(1), p.argmax(1) == of.y
        assert found["brier"] == pytest.approx(((p - truth) ** 2).sum(1).mean())
        recall = [right[of.y == k].mean() for k in range(3)]
        balanced = metrics.values(["balanced_accuracy"], of)["balanced_accuracy"]
        assert balanced == pytest.approx(np.mean(recall))
    else:
        predicted = p > 0.5
        confidence = np.maximum(p, 1 - p).ravel()
        right = (predicted == truth).ravel()
        assert found["brier"] == pytest.approx(((p - truth) ** 2).mean())
    assert found["calibration_error"] == pytest.approx(_naive_calibration(confidence, right))
    f1 = 2 * (predicted & truth).sum(0) / (predicted.sum(0) + truth.sum(0))
    assert found["f1"] == pytest.approx(f1.mean())
    precisions = []
    for k in range(3):
        hits = truth[np.argsort(-p[:, k]), k]
        precisions.append((hits.cumsum() / np.arange(1, len(hits) + 1))[hits].mean())
    assert found["average_precision"] == pytest.approx(np.mean(precisions))


def test_f1_is_of_the_classes_that_occur_or_are_predicted() -> None:
    of = Predictions("classes", np.array([0, 0, 1]), np.eye(4, dtype=np.float32)[[0, 2, 1]])
    assert metrics.values(["f1"], of)["f1"] == pytest.approx((2 / 3 + 1 + 0) / 3)


def test_of_two_classes_the_second_is_the_positive_one() -> None:
    of = _examples("classes")
    two = Predictions("classes", (of.y > 0).astype(int), of.outputs[:, :2])
    found = metrics.values(("auroc", "average_precision"), two)
    probability, truth = two.probabilities[:, 1], two.y == 1
    assert found["auroc"] == pytest.approx(_naive_auroc(truth, probability))
    hits = truth[np.argsort(-probability)]
    precision = (hits.cumsum() / np.arange(1, len(hits) + 1))[hits].mean()
    assert found["average_precision"] == pytest.approx(precision)


def test_ranks_do_not_see_how_probabilities_round() -> None:
    k = np.arange(200)
    for outputs in (np.stack([0 * k, 50.0 + k], 1), np.stack([0 * k, 50.0 + k, 0 * k - 5], 1)):
        classes = Predictions("classes", k // 100, outputs)
        found = metrics.values(("auroc", "average_precision"), classes)
        assert found["average_precision"] == found["auroc"] == 1
    labels = Predictions("labels", (k >= 100)[:, None], 50.0 + k[:, None])
    assert metrics.values(["auroc"], labels) == {"auroc": 1}


def test_metrics_of_values_follow_their_formulas() -> None:
    of = _examples("values")
    found = metrics.values(("mae", "rmse", "r2"), of)
    error = of.outputs.astype(np.float64) - of.y
    assert found["mae"] == pytest.approx(abs(error).mean())
    assert found["rmse"] == pytest.approx((error**2).mean() ** 0.5)
    explained = 1 - (error**2).sum(0) / ((of.y - of.y.mean(0)) ** 2).sum(0)
    assert found["r2"] == pytest.approx(explained.mean(), rel=1e-4)


def test_what_is_not_defined_is_none() -> None:
    of = _examples("classes")
    one = Predictions("classes", of.y * 0, of.outputs)
    found = metrics.values(("auroc", "average_precision", "balanced_accuracy"), one)
    assert found["auroc"] is found["average_precision"] is None
    assert found["balanced_accuracy"] == (of.predicted == 0).mean()
    constant = Predictions("values", np.ones(5, np.float32), np.zeros((5, 1), np.float32))
    assert metrics.values(("r2",), constant) == {"r2": None}


def test_f1_leaves_out_labels_without_a_positive() -> None:
    """In truth and prediction, as a class that does not occur is left out."""
    y = np.array([[True, False], [False, False]])
    right = Predictions("labels", y, np.where(y, 5.0, -5.0))
    assert metrics.values(["f1"], right) == {"f1": 1.0}
    wrong = Predictions("labels", y, np.array([[5.0, 5.0], [-5.0, -5.0]]))
    assert metrics.values(["f1"], wrong) == {"f1": 0.5}
    none = Predictions("labels", y & False, np.full((2, 2), -5.0))
    assert metrics.values(["f1"], none) == {"f1": None}


def test_metrics_of_large_values_keep_their_digits() -> None:
    y = np.array([1e8, 1e8 + 8, 1e8 + 16], np.float32)
    found = metrics.values(["r2", "mae"], Predictions("values", y, (y + 8)[:, None]))
    assert found == {"r2": -0.5, "mae": 8.0}


@pytest.mark.parametrize("kind", ["classes", "labels", "values"])
def test_metrics_of_outputs_that_are_not_finite_are_none(kind: str) -> None:
    y = {"classes": np.array([0, 1]), "labels": np.eye(2) > 0, "values": np.eye(2)}[kind]
    names = [name for name, metric in metrics.METRICS.items() if kind in metric.kinds]
    for value in (np.nan, np.inf):
        found = metrics.values(names, Predictions(kind, y, np.array([[value, 0.0], [0.0, 1.0]])))
        assert found == dict.fromkeys(names)
    if kind != "classes":
        found = metrics.values(names, Predictions(kind, y, np.zeros((2, 4))))
        assert found == dict.fromkeys(names)
