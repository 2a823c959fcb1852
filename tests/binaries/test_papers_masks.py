"""LIME masks: what the explainer sees is what the network sees, and it finds what decides."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

import runs
from fedjax_inv.data import federation
from fedjax_inv_experiments import config, finished
from fedjax_inv_experiments.report.data_figures import to_rgb
from fedjax_inv_experiments.studies import masks
from fedjax_inv_experiments.studies.row_runs import CellResult, RowResult
from fedjax_inv_experiments.studies.rows import Row
from runs import no_figures, with_flags

TINY = config.of(
    environment="colored",
    rounds=4,
    eval_every=2,
    widths=(8,),
    cut=0,
    batch_size=64,
    seeds=(0, 1),
    chunk=("1", "1"),
)


@pytest.fixture(scope="module")
def fedavg(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep of two learning rates, of which the run folder is that of its one cell."""
    folder = tmp_path_factory.mktemp("fedavg")
    with no_figures():
        runs.train(with_flags(TINY, run_dir=str(folder), learning_rate=(0.1, 0.3)))
    return folder / "fedavg-0.9"


@pytest.mark.slow
def test_the_classifier_is_the_run_that_was_asked_for(fedavg: Path) -> None:
    runs = finished.open("run_dir", fedavg, "last")
    made, held_out = runs.data, runs.cell.held_out
    index = [index for index, run in enumerate(runs.cell.runs) if run.seed == 0][1]
    rows = np.sort(federation.parts_of(made.splits[held_out][0].test)[0])
    images, y = masks.seen_images(runs, 0, range(len(rows)))
    np.testing.assert_array_equal(y, made.data.y[rows])
    classify = masks.classifier(runs, index, images.shape[-1])
    probabilities = classify(to_rgb(images))
    # However many there are, as LIME's last batch may be short.
    np.testing.assert_allclose(classify(to_rgb(images[:3])), probabilities[:3], atol=1e-6)

    # On the stored test examples, by the network that renders them.
    x = jax.tree.map(lambda leaf: leaf[rows], made.data.x)
    stored = jax.nn.softmax(runs.fitted.predict(x, index))
    np.testing.assert_allclose(probabilities, stored, atol=1e-6)

    # The loss of this run's last evaluation.
    result = json.loads((fedavg / "result.json").read_text())
    (told,) = [
        each["last"]["domains"][held_out]
        for each in result["runs"]
        if each["seed"] == 0 and each["hyper"] == runs.cell.runs[index].hyper
    ]
    loss = -np.log(probabilities[np.arange(len(rows)), y]).mean()
    np.testing.assert_allclose(loss, told["loss"], rtol=1e-4)


def test_squares_are_numbered_without_a_gap() -> None:
    segments = masks.squares(5, 7, 2)
    assert segments.shape == (5, 7)
    assert sorted(set(segments.flat)) == list(range(3 * 4))
    np.testing.assert_array_equal(segments[:2, :2], 0)
    np.testing.assert_array_equal(segments[2:4, 4:6], 6)
    np.testing.assert_array_equal(segments[4:, 6:], 11)


@pytest.mark.parametrize(("target", "sign"), [(0, 1), (7, -1)])
def test_the_square_that_decides_has_the_largest_weight(target: int, sign: int) -> None:
    rng = np.random.default_rng(0)
    segments = masks.squares(8, 8, 2)
    looked_at = (segments == target)[..., None]

    def classify(rgb: np.ndarray) -> np.ndarray:
        logit = sign * (rgb * looked_at).mean((1, 2, 3)) * 20
        return np.stack([1 / (1 + np.exp(logit)), 1 / (1 + np.exp(-logit))], axis=1)

    rgb = rng.uniform(0.5, 1, (8, 8, 3)).astype(np.float32)
    weights = masks.explain(rgb, classify, segments, 1, samples=300, seed=0)
    others = np.abs(weights[segments != target])
    assert len(np.unique(weights[segments == target])) == 1
    assert sign * weights[segments == target][0] > 10 * others.max()
    against = masks.explain(rgb, classify, segments, 0, samples=300, seed=0)
    np.testing.assert_allclose(against, -weights, atol=1e-6)


@pytest.mark.slow
def test_masks_of_a_row(fedavg: Path, tmp_path: Path) -> None:
    row = Row("FedAvg", ())
    result = RowResult(row, TINY, [CellResult("0.9", [{}], [], {}, fedavg)])
    found = masks.masks(result, (5, 0), samples=60)
    assert found.weights.shape == (2, 8, 8)
    assert (found.probability >= 0.5).all()
    assert (np.ptp(found.weights, axis=(1, 2)) > 0).all()
    # The same seed draws the same masks, whatever else is explained.
    alone = masks.masks(result, (0,), samples=60)
    np.testing.assert_array_equal(alone.weights[0], found.weights[1])
    masks.paint(tmp_path / "masks.png", "digits", [found])
    assert (tmp_path / "masks.png").read_bytes().startswith(b"\x89PNG")
