"""Frozen bodies: their features computed once, and the heads that train on them."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from federations import assert_close, normed_body
from fedjax_inv import fit, freezing, models, types
from fedjax_inv.algorithms import fedavg
from fedjax_inv.checks import UsageError
from fedjax_inv.types import Array, Tree
from formulas import randomised

KEY = jax.random.key(0)
RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (37, 6, 6, 1), np.uint8)
LABELS = RNG.integers(0, 3, 37)
CLASSES = ("dog", "elephant", "giraffe")


def with_body(model: types.Model, body: types.Halves) -> types.Model:
    """The model whose body is the same for all keys, as one of a file."""

    def init(key: Array, x: Tree) -> types.Variables:
        drawn = model.init(key, x)
        params = drawn.params._replace(body=body.body)
        return types.Variables(params, drawn.stats._replace(body=body.head))

    return model._replace(init=init)


@pytest.mark.parametrize("devices", [1, 3])
def test_features_are_the_body_s_outputs_in_batches(devices: int) -> None:
    """Also of the last rows, which fill no batch."""
    model = models.lenet(3, widths=(3, 2, 5, 4), norm="batch")
    variables = randomised(model, IMAGES)
    encode = models.encoder(model, variables, devices=jax.devices()[:devices], batch_size=8)
    params, stats = variables
    mask = np.ones(len(IMAGES), bool)
    expected = model.encode(params.body, stats.body, IMAGES, mask, False)[0]
    assert_close(encode(IMAGES), expected)
    assert encode(IMAGES[:5]).shape == (5, *expected.shape[1:])


def test_a_head_on_features_trains_as_through_its_frozen_body() -> None:
    """With statistics in the body, which a frozen one keeps; two seeds, ragged clients."""
    whole = normed_body()
    drawn = randomised(whole, IMAGES)
    whole = with_body(whole, types.Halves(drawn.params.body, drawn.stats.body))
    features = models.encoder(whole, drawn, batch_size=8)(IMAGES)
    ends = [(0, 9), (9, 14), (14, 37)]
    clients = [[(x[a:b], LABELS[a:b]) for a, b in ends] for x in (IMAGES, features)]

    def head_alone(model: types.Model, work: types.Work) -> types.Algorithm:
        return freezing.train_only(lambda inner: fedavg.fedavg(inner, work), model, ("head",))

    settings: Any = {"rounds": 2, "batch_size": 4, "grid": {"seed": [1, 2]}}
    fitted = [
        fit(head_alone, whole, clients[0], **settings),
        fit(fedavg.fedavg, models.without_body(whole, IMAGES), clients[1], **settings),
    ]
    for run in (0, 1):
        heads = [each.network(run).params.head for each in fitted]
        assert_close(*heads, rtol=1e-5, atol=1e-5)
        initial = whole.init(KEY, IMAGES).params.head
        moved = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), heads[0], initial)
        assert min(jax.tree.leaves(moved)) > 1e-3


def test_heads_are_their_formulas() -> None:
    x = RNG.normal(size=(5, 8)).astype(np.float32)
    linear, cosine = models.linear(3), models.cosine(3, logit_scale=7.0)
    adapter = models.adapter(3, widths=(2,), ratio=0.3, logit_scale=7.0)

    def outputs(model: types.Model, x: np.ndarray) -> tuple[Any, list[np.ndarray]]:
        variables = randomised(model, x)
        leaves = [np.float64(leaf) for leaf in jax.tree.leaves(variables.params)]
        return models.predict(model, variables, x), leaves

    def cosines(x: np.ndarray, vectors: np.ndarray) -> np.ndarray:
        lengths = [np.linalg.norm(each, axis=1, keepdims=True) for each in (x, vectors)]
        return (x / lengths[0]) @ (vectors / lengths[1]).T

    got, (bias, kernel) = outputs(linear, x.reshape(5, 2, 4))
    assert_close(got, x @ kernel + bias)
    got, (vectors,) = outputs(cosine, x)
    assert_close(got, 7 * cosines(x, vectors))
    got, (down, up, vectors) = outputs(adapter, x)
    added = np.maximum(np.maximum(x @ down, 0) @ up, 0)
    assert np.abs(added).max() > 0.1
    assert_close(got, 7 * cosines(0.7 * x + 0.3 * added, vectors))


def test_an_mlp_without_hidden_layers_is_a_linear_classifier_of_images_too() -> None:
    logits = jax.eval_shape(models.mlp(3, widths=()).init, KEY, IMAGES)
    assert [leaf.shape for leaf in jax.tree.leaves(logits.params)] == [(3,), (36, 3)]


def test_a_head_starts_from_vectors_by_the_names_of_classes(tmp_path: Path) -> None:
    path, vectors = tmp_path / "classes.npz", RNG.normal(size=(3, 8))
    np.savez(path, names=np.array(CLASSES[::-1]), vectors=vectors[::-1])
    model = models.from_vectors(models.cosine(3), path, CLASSES)
    x = 5 * vectors.astype(np.float32)
    logits = models.predict(model, model.init(KEY, x), x)
    assert_close(np.diag(logits), np.full(3, 100.0))
    assert (np.argmax(logits, 1) == np.arange(3)).all()


@pytest.mark.parametrize(
    ("names", "shape", "message"),
    [
        (("dog", "elephant", "cat"), (3, 8), "giraffe.*cat"),
        (CLASSES, (3, 5), "5 numbers, must be 8"),
        (CLASSES, (2, 8), "vectors"),
        (None, (3, 8), "names"),
    ],
)
def test_vectors_that_do_not_fit_are_refused(
    tmp_path: Path, names: tuple[str, ...] | None, shape: tuple[int, ...], message: str
) -> None:
    path = tmp_path / "classes.npz"
    arrays: dict[str, Any] = {} if names is None else {"names": np.array(names)}
    np.savez(path, vectors=np.ones(shape), **arrays)
    x = np.zeros((1, 8), np.float32)
    with pytest.raises(UsageError, match=message):
        models.from_vectors(models.cosine(3), path, CLASSES).init(KEY, x)


@pytest.mark.slow
def test_a_published_network_has_as_many_parameters_as_timm_s() -> None:
    x = np.zeros((1, 224, 224, 3), np.float32)
    shapes = jax.eval_shape(models.BODIES["vit_b16"].make(1000).init, KEY, x)
    # timm's, whose class token has a position of its own
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes.params)) == 86_567_656 - 768
