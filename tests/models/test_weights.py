"""Weights in torchvision's names: written naively, loaded, and run against torchvision's formula in
NumPy, in its layouts, its order of operations and its symmetric padding.
"""

import logging
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

import slow
from federations import assert_close, assert_equal, plain
from fedjax_inv import models
from fedjax_inv.checks import UsageError
from fedjax_inv.models import weights
from fedjax_inv.types import Array, Model, Tree, Variables

KEY = jax.random.key(0)
NUM_CLASSES = 3
WIDTHS = (2, 3, 3, 4)
Arrays = dict[str, np.ndarray]


BASIC, BOTTLENECK = (2, 2, 2, 2), (3, 4, 6, 3)  # the blocks of resnet18 and resnet50


def torchvision(
    window: int = 3,
    classes: int = NUM_CLASSES,
    channels: int = 1,
    depths: tuple[int, ...] = BASIC,
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

    conv("conv1", channels, WIDTHS[0], window)
    norm("bn1", WIDTHS[0])
    into = WIDTHS[0]
    for stage, (width, depth) in enumerate(zip(WIDTHS, depths, strict=True), 1):
        for block in range(depth):
            prefix = f"layer{stage}.{block}"
            outputs = 4 * width if depths == BOTTLENECK else width
            conv(f"{prefix}.conv1", into, width, 1 if depths == BOTTLENECK else 3)
            norm(f"{prefix}.bn1", width)
            conv(f"{prefix}.conv2", width, width, 3)
            norm(f"{prefix}.bn2", width)
            if depths == BOTTLENECK:
                conv(f"{prefix}.conv3", width, outputs, 1)
                norm(f"{prefix}.bn3", outputs)
            if block == 0 and (stage > 1 or into != outputs):
                conv(f"{prefix}.downsample.0", into, outputs, 1)
                norm(f"{prefix}.downsample.1", outputs)
            into = outputs
    arrays["fc.weight"] = rng.normal(size=(classes, into)).astype(np.float32)
    arrays["fc.bias"] = rng.normal(size=classes).astype(np.float32)
    return arrays


def windows(x: np.ndarray, size: int, stride: int, padding: int, fill: float) -> np.ndarray:
    """[B, C, rows, columns, size, size] of x [B, C, height, width], padded alike on every side."""
    sides = (padding, padding)
    x = np.pad(x, [(0, 0), (0, 0), sides, sides], constant_values=fill)
    rows, columns = ((n - size) // stride + 1 for n in x.shape[2:])
    out = np.empty((*x.shape[:2], rows, columns, size, size))
    for i, j in np.ndindex(rows, columns):
        top, left = i * stride, j * stride
        out[:, :, i, j] = x[:, :, top : top + size, left : left + size]
    return out


def convolved(x: np.ndarray, kernel: np.ndarray, stride: int = 1) -> np.ndarray:
    size = kernel.shape[-1]
    return np.einsum("bcijkl,ockl->boij", windows(x, size, stride, size // 2, 0.0), kernel)


def forward(arrays: Arrays, x: np.ndarray, stride: int, pool: bool) -> np.ndarray:
    """torchvision's network in evaluation mode: logits [B, K] of x [B, C, height, width].

    A resnet50 strides in its 3x3 convolutions.
    """
    of = {name: np.float64(array) for name, array in arrays.items()}

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        weight, bias, mean, var = (
            of[f"{name}.{part}"][:, None, None]
            for part in ("weight", "bias", "running_mean", "running_var")
        )
        return (x - mean) / np.sqrt(var + 1e-5) * weight + bias

    x = np.maximum(norm(convolved(x, of["conv1.weight"], stride), "bn1"), 0)
    if pool:
        x = windows(x, 3, 2, 1, -np.inf).max((4, 5))
    is_bottleneck = "layer1.0.conv3.weight" in of
    for stage, depth in enumerate(BOTTLENECK if is_bottleneck else BASIC, 1):
        for block in range(depth):
            prefix = f"layer{stage}.{block}"
            stride = 2 if stage > 1 and block == 0 else 1
            strides = (1, stride, 1) if is_bottleneck else (stride, 1)
            hidden = x
            for i, step in enumerate(strides, 1):
                hidden = np.maximum(hidden, 0) if i > 1 else hidden
                hidden = convolved(hidden, of[f"{prefix}.conv{i}.weight"], step)
                hidden = norm(hidden, f"{prefix}.bn{i}")
            if f"{prefix}.downsample.0.weight" in of:
                x = convolved(x, of[f"{prefix}.downsample.0.weight"], stride)
                x = norm(x, f"{prefix}.downsample.1")
            x = np.maximum(x + hidden, 0)
    return x.mean((2, 3)) @ of["fc.weight"].T + of["fc.bias"]


def write(path: Path, arrays: Arrays) -> Path:
    save_file(arrays, path)
    return path


def tiny(**arguments) -> Model:
    return models.resnet18(**{"num_classes": NUM_CLASSES, "widths": WIDTHS} | arguments)


@pytest.mark.parametrize(
    "changes",
    [
        {"bn1.weight": None},
        {"fc.bias": None},  # half a classifier
        {"neck.weight": np.ones(2, np.float32)},
        {"layer2.0.bn1.bias": np.ones(1, np.float32)},
    ],
)
def test_what_does_not_fit_is_told(tmp_path: Path, changes: dict[str, np.ndarray | None]) -> None:
    arrays = {key: a for key, a in (torchvision() | changes).items() if a is not None}
    path = write(tmp_path / "other.safetensors", arrays)
    with pytest.raises(UsageError, match=next(iter(changes))):
        weights.load(path, shapes_of(tiny()))


def test_a_torch_file_is_refused_with_the_line_that_converts_it(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"save_file\(torch\.load"):
        weights.pretrained(tiny(), tmp_path / "resnet18.pth")


def test_an_npz_is_refused_with_the_line_that_converts_it(tmp_path: Path) -> None:
    np.savez(tmp_path / "resnet18.npz", **torchvision())
    with pytest.raises(UsageError) as refused:
        weights.pretrained(tiny(), tmp_path / "resnet18.npz")
    exec(str(refused.value).split('"')[-2])
    weights.load(tmp_path / "resnet18.safetensors", shapes_of(tiny()))


def shapes_of(model: Model, channels: int = 1) -> Variables:
    return jax.eval_shape(model.init, KEY, np.zeros((1, 8, 8, channels), np.float32))


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
    path = write(tmp_path / "resnet.safetensors", arrays)
    model = make(NUM_CLASSES, widths=WIDTHS, image_size=image_size, norm=norm, cut=cut)
    x = np.random.default_rng(1).normal(size=(2, *image))
    variables = weights.load(path, shapes_of(model, image[-1]))
    with jax.enable_x64(True):
        doubled = jax.tree.map(lambda a: np.asarray(a, np.float64), variables)
        logits = jax.jit(lambda v, x: models.predict(model, v, x))(doubled, x)
    expected = forward(arrays, x.transpose(0, 3, 1, 2), stride, pool)
    assert np.abs(expected[0] - expected[1]).max() > 1e-2
    assert_close(logits, expected, rtol=1e-9, atol=1e-9)


def leaves_by_path(tree: Tree) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


@pytest.fixture(scope="module")
def drawn() -> Variables:
    """Of a network of NUM_CLASSES classes, cut by default."""
    model = tiny()
    return plain(jax.jit(model.init)(KEY, np.zeros((1, 8, 8, 1), np.float32)))


@pytest.mark.slow
@pytest.mark.parametrize("classes", slow.after(1, [5, None]))
def test_a_classifier_that_does_not_fit_stays_as_drawn(
    tmp_path: Path, drawn: Variables, classes: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    arrays = torchvision(classes=classes or 1)
    if classes is None:  # a file without one
        arrays = {name: array for name, array in arrays.items() if not name.startswith("fc")}
    path = write(tmp_path / "other.safetensors", arrays)
    with caplog.at_level(logging.WARNING, "fedjax_inv"):
        loaded = weights.load(path, drawn)
    assert_equal(loaded.params.head, drawn.params.head)
    before, after = leaves_by_path(drawn), leaves_by_path(loaded)
    changed = {path for path in before if (before[path] != after[path]).any()}
    assert changed == {path for path in before if "fc" not in path}
    assert [path.name in line for line in caplog.messages] == [True]


@pytest.mark.slow
def test_a_pretrained_model_starts_from_the_file(tmp_path: Path, drawn: Variables) -> None:
    """Also under jit and vmap, and after the file is gone."""
    path = write(tmp_path / "mine.safetensors", torchvision(classes=5))
    expected = weights.load(path, drawn)
    model = weights.pretrained(tiny(), path)
    path.unlink()
    x = np.zeros((1, 8, 8, 1), np.float32)
    assert_equal(jax.jit(model.init)(KEY, x), expected)
    keys = jnp.stack([KEY, jax.random.key(1)])
    both = jax.jit(jax.vmap(model.init, (0, None)))(keys, x)
    assert_equal(jax.tree.map(lambda a: a[0], both), expected)
    one, two = both.params.head["blocks_0"]["fc"]["kernel"]
    assert (one != two).all()
    bodies: list[Array] = jax.tree.leaves((both.params.body, both.stats))
    for leaf in bodies:
        assert_equal(leaf[0], leaf[1])
