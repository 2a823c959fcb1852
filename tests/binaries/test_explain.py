"""LIME masks: what the explainer sees is what the network sees, and it finds what decides."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_inv.data import federation
from fedjax_inv.types import Array, Tree
from fedjax_inv_experiments import explain, sweep
from fedjax_inv_experiments.experiment import config
from runs import no_figures

TINY = config.of(
    environment="colored",
    rounds=4,
    eval_every=2,
    widths=(8,),
    cut=0,
    batch_size=64,
    seeds=(0, 1),
    client_chunk="1",
    run_chunk="1",
)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where masks go if they are drawn although they should not be."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def fedavg(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep of two learning rates, of which the run folder is that of its one cell."""
    folder = tmp_path_factory.mktemp("fedavg")
    with no_figures():
        sweep.sweep(config.changed(TINY, run_dir=str(folder), learning_rate=(0.1, 0.3)))
    return folder / "fedavg-0.9"


def options(*folders: Path, **changes: Any) -> explain.Options:
    return explain.Options(tuple(map(str, folders)), **changes)


@pytest.mark.parametrize("channels", [1, 2, 3])
def test_rgb_holds_all_of_an_input(channels: int) -> None:
    x = np.random.default_rng(0).normal(size=(4, 5, 6, channels)).astype(np.float32)
    rgb = explain.to_rgb(x)
    assert rgb.shape == (4, 5, 6, 3)
    np.testing.assert_array_equal(explain.from_rgb(rgb, channels), x)
    # Red, green, blue; grey is as much of each; two colours are red and green.
    expected = {1: [x, x, x], 2: [x[..., :1], x[..., 1:], 0 * x[..., :1]], 3: [x]}[channels]
    np.testing.assert_array_equal(rgb, np.concatenate(expected, axis=-1))


@pytest.mark.slow
def test_the_classifier_is_the_run_that_was_asked_for(fedavg: Path) -> None:
    folder, seed, run = fedavg, 0, 1
    one = explain.find(folder, options(folder, seed=seed, run=run))
    made = one.runs.data
    dataset, domain, held_out = made.dataset, explain.test_domain(one), one.runs.cell.held_out
    assert held_out is not None
    rows = np.sort(federation.parts_of(made.splits[held_out][seed].test)[0])
    np.testing.assert_array_equal(domain.y, made.data.y[rows])
    images = explain.seen_images(domain, dataset.render, range(len(rows)))
    np.testing.assert_array_equal(images.y, domain.y)
    algorithm, server = one.algorithm(rendered=True), one.served().server
    classify = explain.classifier(algorithm, server, images.x.shape[-1])
    probabilities = classify(explain.to_rgb(images.x))
    # However many there are, as LIME's last batch may be short.
    np.testing.assert_allclose(classify(explain.to_rgb(images.x[:3])), probabilities[:3], atol=1e-6)

    # On the stored test examples, by the network that renders them.
    algorithm = one.algorithm()

    @jax.jit
    def stored(server: Tree, x: Tree) -> Array:
        own = algorithm.init_client(server, jnp.int32(0))
        return jax.nn.softmax(algorithm.predict(server, own, x))

    x = jax.tree.map(lambda leaf: leaf[rows], made.data.x)
    np.testing.assert_allclose(probabilities, stored(server, x), atol=1e-6)

    # By the loss that training itself has told of this run at its end.
    result = json.loads((folder / "result.json").read_text())
    (told,) = [
        each["last"]["domains"][held_out]
        for each in result["runs"]
        if each["seed"] == seed and each["hyper"] == one.run.hyper
    ]
    loss = -np.log(probabilities[np.arange(len(rows)), images.y]).mean()
    np.testing.assert_allclose(loss, told["loss"], rtol=1e-4)
    losses = [each["last"]["domains"][held_out]["loss"] for each in result["runs"]]
    assert len({round(each, 3) for each in losses}) == len(losses)


def test_squares_are_numbered_without_a_gap() -> None:
    segments = explain.squares(5, 7, 2)
    assert segments.shape == (5, 7)
    assert sorted(set(segments.flat)) == list(range(3 * 4))
    np.testing.assert_array_equal(segments[:2, :2], 0)
    np.testing.assert_array_equal(segments[2:4, 4:6], 6)
    np.testing.assert_array_equal(segments[4:, 6:], 11)


@pytest.mark.parametrize(("target", "sign"), [(0, 1), (7, 1), (7, -1), (15, -1)])
def test_the_square_that_decides_has_the_largest_weight(target: int, sign: int) -> None:
    rng = np.random.default_rng(0)
    segments = explain.squares(8, 8, 2)
    looked_at = (segments == target)[..., None]

    def classify(rgb: np.ndarray) -> np.ndarray:
        logit = sign * (rgb * looked_at).mean((1, 2, 3)) * 20
        return np.stack([1 / (1 + np.exp(logit)), 1 / (1 + np.exp(-logit))], axis=1)

    rgb = rng.uniform(0.5, 1, (8, 8, 3)).astype(np.float32)
    weights = explain.explain(rgb, classify, segments, 1, samples=300, seed=0)
    others = np.abs(weights[segments != target])
    assert len(np.unique(weights[segments == target])) == 1
    assert sign * weights[segments == target][0] > 10 * others.max()
    against = explain.explain(rgb, classify, segments, 0, samples=300, seed=0)
    np.testing.assert_allclose(against, -weights, atol=1e-6)


@pytest.mark.filterwarnings("error")
def test_shares_count_the_weight_on_the_figure() -> None:
    x = np.zeros((1, 2, 2, 2), np.float32)
    x[0, 0, 0, 1] = x[0, 1, 1, 0] = 0.5
    images = explain.Images(x, np.zeros(1, np.int32), ("a", "b"))
    weights = np.array([[[[3, -1], [0, -2]], [[0, 1], [-1, 0]], [[0, 0], [0, 0]]]])
    masks = explain.Masks(weights, np.zeros((1, 3), int), np.ones((1, 3)))
    *_, one, two, three, pixels = explain.shares(images, masks, ["one", "two", "three"]).split("\n")
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in (one, two, three, pixels)]
    assert cells[0] == ["one", "5", "1", "83.3"]
    assert cells[1] == ["two", "0", "2", "0.0"]
    assert cells[2] == ["three", "0", "0", "nan"]
    assert cells[3] == ["pixels", "2", "2", "50.0"]


@pytest.mark.slow
def test_masks_of_a_run(fedavg: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "masks.png"
    asked = options(fedavg, images=(5, 0), seed=1, run=0, samples=60, segment=3, out=str(out))
    text = explain.run(asked)
    assert out.read_bytes().startswith(b"\x89PNG")
    with np.load(out.with_suffix(".weights.npz")) as arrays:
        weights = arrays["weights"]
        assert weights.shape == (2, 1, 8, 8)
        assert set(arrays["images"]) == {5, 0}
        assert (arrays["probability"] >= 0.5).all()
    assert np.isfinite(weights).all()
    assert (np.ptp(weights, axis=(2, 3)) > 0).all()
    np.testing.assert_array_equal(
        weights[:, :, :3, 3:6], weights[:, :, :1, 3:4].repeat(3, 2).repeat(3, 3)
    )
    assert str(out) in text
    # The same seed draws the same masks, whatever else is explained.
    explain.run(dataclasses.replace(asked, images=(0,)))
    with np.load(out.with_suffix(".weights.npz")) as arrays:
        np.testing.assert_array_equal(arrays["weights"][0], weights[1])
