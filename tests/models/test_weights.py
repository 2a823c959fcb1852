"""Weights in torchvision's names: written naively, loaded, and run against its formula."""

import logging
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

import slow
from federations import assert_close, assert_equal
from fedjax_inv import models
from fedjax_inv.checks import UsageError
from fedjax_inv.models import weights
from fedjax_inv.types import Array, Model, Tree, Variables
from formulas import convolved, normed, pooled, randomised

KEY = jax.random.key(0)
NUM_CLASSES = 3
WIDTHS = (2, 3, 3, 4)
X = np.zeros((1, 8, 8, 1), np.float32)
Arrays = dict[str, np.ndarray]
BASIC, BOTTLENECK = (2, 2, 2, 2), (3, 4, 6, 3)  # the blocks of resnet18 and resnet50


def torchvision(
    window: int = 3, classes: int = NUM_CLASSES, channels: int = 1, depths: tuple[int, ...] = BASIC
) -> Arrays:
    """All that torchvision's resnet18 or resnet50 would save, were it this narrow."""
    rng = np.random.default_rng(0)
    arrays: Arrays = {}

    def conv(name: str, into: int, out: int, window: int) -> None:
        scale = (2 / (into * window**2)) ** 0.5
        kernel = scale * rng.normal(size=(out, into, window, window))
        arrays[f"{name}.weight"] = kernel.astype(np.float32)

    def norm(name: str, width: int) -> None:
        arrays[f"{name}.weight"] = rng.uniform(0.5, 1.5, width).astype(np.float32)
        arrays[f"{name}.bias"] = rng.normal(size=width).astype(np.float32)
        arrays[f"{name}.running_mean"] = rng.normal(size=width).astype(np.float32)
        arrays[f"{name}.running_var"] = rng.uniform(0.5, 1.5, width).astype(np.float32)
        arrays[f"{name}.num_batches_tracked"] = np.array(7)

    def layer(prefix: str, number: int, into: int, out: int, window: int) -> None:
        conv(f"{prefix}conv{number}", into, out, window)
        norm(f"{prefix}bn{number}", out)

    layer("", 1, channels, WIDTHS[0], window)
    into = WIDTHS[0]
    for stage, (width, depth) in enumerate(zip(WIDTHS, depths, strict=True), 1):
        for block in range(depth):
            prefix = f"layer{stage}.{block}."
            sizes = [(width, 1), (width, 3), (4 * width, 1)]
            if depths == BASIC:
                sizes = [(width, 3), (width, 3)]
            before = into
            for i, (out, size) in enumerate(sizes, 1):
                layer(prefix, i, into, out, size)
                into = out
            if block == 0 and (stage > 1 or before != into):
                conv(f"{prefix}downsample.0", before, into, 1)
                norm(f"{prefix}downsample.1", into)
    arrays["fc.weight"] = rng.normal(size=(classes, into)).astype(np.float32)
    arrays["fc.bias"] = rng.normal(size=classes).astype(np.float32)
    return arrays


def forward(arrays: Arrays, x: np.ndarray, stride: int, pool: bool) -> np.ndarray:
    """torchvision's network in evaluation mode: logits [B, K] of x [B, height, width, C].

    A resnet50 strides in its 3x3 convolutions.
    """
    of = {name: np.float64(array) for name, array in arrays.items()}

    def conv(x: np.ndarray, name: str, norm: str, stride: int = 1) -> np.ndarray:
        out = convolved(x, of[f"{name}.weight"].transpose(2, 3, 1, 0), stride=stride)
        parts = ("weight", "bias", "running_mean", "running_var")
        return normed(out, *(of[f"{norm}.{part}"] for part in parts))

    x = np.maximum(conv(x, "conv1", "bn1", stride), 0)
    x = pooled(x, 3, 2, 1) if pool else x
    is_bottleneck = "layer1.0.conv3.weight" in of
    for stage, depth in enumerate(BOTTLENECK if is_bottleneck else BASIC, 1):
        for block in range(depth):
            prefix = f"layer{stage}.{block}"
            stride = 2 if stage > 1 and block == 0 else 1
            hidden = x
            for i, step in enumerate((1, stride, 1) if is_bottleneck else (stride, 1), 1):
                hidden = np.maximum(hidden, 0) if i > 1 else hidden
                hidden = conv(hidden, f"{prefix}.conv{i}", f"{prefix}.bn{i}", step)
            if f"{prefix}.downsample.0.weight" in of:
                x = conv(x, f"{prefix}.downsample.0", f"{prefix}.downsample.1", stride)
            x = np.maximum(x + hidden, 0)
    return x.mean((1, 2)) @ of["fc.weight"].T + of["fc.bias"]


def tiny(**arguments) -> Model:
    return models.resnet18(**{"num_classes": NUM_CLASSES, "widths": WIDTHS} | arguments)


def shapes_of(model: Model, channels: int = 1) -> Variables:
    return jax.eval_shape(model.init, KEY, np.zeros((1, 8, 8, channels), np.float32))


def test_what_does_not_fit_is_told(tmp_path: Path) -> None:
    path, shapes = tmp_path / "other.safetensors", shapes_of(tiny())
    for name, array in {
        "bn1.weight": None,
        "fc.bias": None,  # half a classifier
        "neck.weight": np.ones(2, np.float32),
        "layer2.0.bn1.bias": np.ones(1, np.float32),
    }.items():
        arrays = {key: a for key, a in (torchvision() | {name: array}).items() if a is not None}
        save_file(arrays, path)
        with pytest.raises(UsageError, match=name):
            weights.load(path, shapes)


def test_files_of_other_kinds_are_refused_with_the_line_that_converts_them(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="save_file"):
        weights.pretrained(tiny(), tmp_path / "resnet18.pth")
    np.savez(tmp_path / "resnet18.npz", **torchvision())
    with pytest.raises(UsageError) as refused:
        weights.pretrained(tiny(), tmp_path / "resnet18.npz")
    exec(str(refused.value).split('"')[-2])
    weights.load(tmp_path / "resnet18.safetensors", shapes_of(tiny()))


@pytest.mark.parametrize(
    ("make", "image_size", "norm", "cut", "image"),
    slow.after(
        1,
        [
            (models.resnet18, 224, "batch", 0, (35, 38, 2)),
            (models.resnet18, 32, "batch", None, (9, 8, 1)),
            (models.resnet18, 64, "frozen", 2, (21, 34, 3)),
            (models.resnet50, 32, "batch", None, (9, 12, 2)),
        ],
    ),
)
def test_a_loaded_network_is_the_formula_of_torchvision(
    tmp_path: Path, make: Any, image_size: int, norm: str, cut: int, image: tuple
) -> None:
    """In float64: padding that is off by one side would be off in the first digit."""
    window, stride, pool = {32: (3, 1, False), 64: (7, 2, False), 224: (7, 2, True)}[image_size]
    depths = BASIC if make is models.resnet18 else BOTTLENECK
    arrays = torchvision(window, channels=image[-1], depths=depths)
    assert len(arrays) == (122 if depths == BASIC else 320)  # as torchvision's
    path = tmp_path / "resnet.safetensors"
    save_file(arrays, path)
    model = make(NUM_CLASSES, widths=WIDTHS, image_size=image_size, norm=norm, cut=cut)
    x = np.random.default_rng(1).normal(size=(2, *image))
    variables = weights.load(path, shapes_of(model, image[-1]))
    with jax.enable_x64(True):
        doubled = jax.tree.map(lambda a: np.asarray(a, np.float64), variables)
        logits = jax.jit(lambda v, x: models.predict(model, v, x))(doubled, x)
    expected = forward(arrays, x, stride, pool)
    assert np.abs(expected[0] - expected[1]).max() > 1e-2
    assert_close(logits, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("classes", [5, None])
def test_a_classifier_that_does_not_fit_stays_as_drawn(
    tmp_path: Path, classes: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    arrays = torchvision(classes=classes or 1)
    if classes is None:  # a file without one
        arrays = {name: array for name, array in arrays.items() if not name.startswith("fc")}
    path, drawn = tmp_path / "other.safetensors", randomised(tiny(), X)
    save_file(arrays, path)
    with caplog.at_level(logging.WARNING, "fedjax_inv"):
        loaded = weights.load(path, drawn)
    assert_equal(loaded.params.head, drawn.params.head)
    bodies = [(each.params.body, each.stats) for each in (drawn, loaded)]
    for before, after in zip(*map(jax.tree.leaves, bodies), strict=True):
        assert (before != after).any()
    assert [path.name in line for line in caplog.messages] == [True]


def test_a_pretrained_model_starts_from_the_file(tmp_path: Path) -> None:
    """Under jit and vmap, and after the file is gone; keys draw the classifier alone."""
    path, keys = tmp_path / "mine.safetensors", jax.random.split(KEY, 2)
    save_file(torchvision(classes=5), path)
    expected, model = weights.load(path, randomised(tiny(), X)), weights.pretrained(tiny(), path)
    path.unlink()

    @jax.jit
    @jax.vmap
    def started(key: Array) -> tuple[Variables, Tree]:
        return model.init(key, X), tiny().init(key, X).params.head

    both, heads = started(keys)
    assert_equal(both.params.head, heads)
    one, two = heads["blocks_0"]["fc"]["kernel"]
    assert (one != two).all()
    for i in range(2):
        body = jax.tree.map(lambda a, i=i: a[i], (both.params.body, both.stats))
        assert_equal(body, (expected.params.body, expected.stats))
