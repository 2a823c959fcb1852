"""Weights in torchvision's names: written naively, loaded, and run against torchvision's formula in
NumPy, in its layouts, its order of operations and its symmetric padding.
"""

import json
import logging
import re
import struct
import sys
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import slow
from federations import assert_close, assert_equal, plain
from fedjax_inv import models
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


def safetensors(arrays: Arrays) -> bytes:
    """The format by hand: the header's length, the header in JSON, the bytes."""
    header, body = {}, b""
    for name, array in arrays.items():
        kind = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64"}
        data = np.ascontiguousarray(array).tobytes()
        header[name] = {
            "dtype": kind[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [len(body), len(body) + len(data)],
        }
        body += data
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def write(path: Path, arrays: Arrays) -> Path:
    if path.suffix == ".npz":
        np.savez(path, **arrays)
    else:
        path.write_bytes(safetensors(arrays))
    return path


def tiny(**arguments) -> Model:
    return models.resnet18(**{"num_classes": NUM_CLASSES, "widths": WIDTHS} | arguments)


@cache
def shapes() -> Variables:
    """Of the network that most files here are for."""
    return shapes_of(tiny())


@pytest.mark.slow
def test_a_loaded_resnet50_is_the_formula_of_torchvision(tmp_path: Path) -> None:
    arrays = torchvision(depths=BOTTLENECK, channels=2)
    assert len(arrays) == 320  # as torchvision's, and timm's
    path = write(tmp_path / "resnet50.npz", arrays)
    model = models.resnet50(NUM_CLASSES, widths=WIDTHS, image_size=32)
    x = np.random.default_rng(1).normal(size=(2, 9, 12, 2))
    variables, report = weights.load(path, shapes_of(model, 2))
    assert (report.missing, report.misshaped) == ({}, {})
    with jax.enable_x64(True):
        doubled = jax.tree.map(lambda a: np.asarray(a, np.float64), variables)
        logits = jax.jit(lambda v, x: models.predict(model, v, x))(doubled, x)
    expected = forward(arrays, x.transpose(0, 3, 1, 2), 1, False)
    assert np.abs(expected[0] - expected[1]).max() > 1e-2
    assert_close(logits, expected, rtol=1e-9, atol=1e-9)


def test_all_that_does_not_fit_is_told_at_once(tmp_path: Path) -> None:
    arrays = without("bn1.weight") | {"neck.weight": np.ones(2, np.float32)}
    for name in ("layer1.0.conv1.weight", "layer2.0.bn1.bias"):
        arrays[name] = arrays[name][:1]
    path = write(tmp_path / "mixed.npz", arrays)
    report = weights.report(path, shapes())
    counters = {name for name in arrays if name.endswith("num_batches_tracked")}
    assert report.missing == {"bn1.weight": (2,)}
    assert report.left == dict.fromkeys(counters, ()) | {"neck.weight": (2,)}
    assert report.misshaped == {
        "layer1.0.conv1.weight": ((1, 2, 3, 3), (2, 2, 3, 3)),
        "layer2.0.bn1.bias": ((1,), (3,)),
    }
    assert len(report.taken) == len(arrays) - len(counters) - 3
    message = (
        f"path={path}: must hold bn1.weight [2], as the network does; holds neck.weight [2], which "
        "the network does not; layer1.0.conv1.weight is [1, 2, 3, 3], must be [2, 2, 3, 3], and 1 "
        "more"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        weights.load(path, shapes())


def shapes_of(model: Model, channels: int = 1) -> Variables:
    return jax.eval_shape(model.init, KEY, np.zeros((1, 8, 8, channels), np.float32))


@pytest.mark.parametrize(
    ("image_size", "norm", "cut", "image", "suffix"),
    slow.after(
        1,
        [
            (224, "batch", 0, (35, 38, 2), ".safetensors"),
            (32, "batch", None, (9, 8, 1), ".npz"),
            (64, "frozen", 2, (21, 34, 3), ".safetensors"),
        ],
    ),
)
def test_a_loaded_network_is_the_formula_of_torchvision(
    tmp_path: Path, image_size: int, norm: str, cut: int | None, image: tuple, suffix: str
) -> None:
    """In float64: padding that is off by one side would be off in the first digit."""
    window, stride, pool = {32: (3, 1, False), 64: (7, 2, False), 224: (7, 2, True)}[image_size]
    arrays = torchvision(window, channels=image[-1])
    path = write(tmp_path / f"resnet18{suffix}", arrays)
    model = tiny(image_size=image_size, norm=norm, cut=cut)
    x = np.random.default_rng(1).normal(size=(2, *image))
    shapes = shapes_of(model, image[-1])
    variables, report = weights.load(path, shapes)
    assert jax.tree.map(lambda a: (a.shape, a.dtype), variables) == jax.tree.map(
        lambda a: (a.shape, a.dtype), shapes
    )
    expected = forward(arrays, x.transpose(0, 3, 1, 2), stride, pool)
    with jax.enable_x64(True):
        doubled = jax.tree.map(lambda a: np.asarray(a, np.float64), variables)
        logits = jax.jit(lambda v, x: models.predict(model, v, x))(doubled, x)
        assert logits.dtype == np.float64
    assert np.abs(expected[0] - expected[1]).max() > 1e-2
    assert_close(logits, expected, rtol=1e-9, atol=1e-9)
    counters = {name for name in arrays if name.endswith("num_batches_tracked")}
    assert report.taken == {k: a.shape for k, a in arrays.items() if k not in counters}
    assert report.left == dict.fromkeys(counters, ())
    assert report.missing == {}
    assert len(arrays) == 122  # as torchvision's


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
    path = write(tmp_path / "other.npz", arrays)
    with caplog.at_level(logging.WARNING, "fedjax_inv"):
        loaded, report = weights.load(path, drawn)
    assert_equal(loaded.params.head, drawn.params.head)
    before, after = leaves_by_path(drawn), leaves_by_path(loaded)
    changed = {path for path in before if (before[path] != after[path]).any()}
    assert changed == {path for path in before if "fc" not in path}
    fc = {"fc.weight": (NUM_CLASSES, WIDTHS[-1]), "fc.bias": (NUM_CLASSES,)}
    assert report.missing == fc
    theirs = {name: shape for name, shape in report.left.items() if name in fc}
    assert theirs == ({} if classes is None else {"fc.weight": (5, 4), "fc.bias": (5,)})
    assert not set(report.taken) & set(fc)
    (line,) = caplog.messages
    shape = "not there" if classes is None else "[5, 4]"
    assert line == (
        f"{path}: its fc.weight is {shape}, so the classifier [3, 4] stays as it was drawn"
    )


@pytest.mark.slow
def test_a_pretrained_model_starts_from_the_file(tmp_path: Path, drawn: Variables) -> None:
    """Also under jit and vmap, and after the file is gone."""
    path = write(tmp_path / "mine.safetensors", torchvision(classes=5))
    expected, _ = weights.load(path, drawn)
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


@pytest.mark.parametrize("dtype", [np.float16, jnp.bfloat16])
def test_half_precision_is_widened(tmp_path: Path, drawn: Variables, dtype) -> None:
    arrays = {
        name: array.astype(dtype) if array.dtype == np.float32 else array
        for name, array in torchvision().items()
    }
    loaded, _ = weights.load(write(tmp_path / "half.safetensors", arrays), drawn)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(loaded)} == {"float32"}
    scale = loaded.params.body["blocks_0"]["norm1"]["scale"]
    assert_equal(np.asarray(scale), np.float32(arrays["bn1.weight"]))


def without(name: str) -> Arrays:
    return {key: array for key, array in torchvision().items() if key != name}


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (without("bn1.weight"), "must hold bn1.weight [2], as the network does"),
        (
            {k: a for k, a in torchvision().items() if "layer4.1" not in k},
            "must hold layer4.1.conv1.weight [4, 4, 3, 3] and 9 more, as the network does",
        ),
        (without("fc.bias"), "must hold fc.bias [3], as the network does"),
        (
            torchvision() | {"layer5.0.conv1.weight": np.ones((2, 2), np.float32)},
            "holds layer5.0.conv1.weight [2, 2], which the network does not",
        ),
        (torchvision(window=7), "conv1.weight is [2, 1, 7, 7], must be [2, 1, 3, 3]"),
        (torchvision(channels=3), "conv1.weight is [2, 3, 3, 3], must be [2, 1, 3, 3]"),
        (
            torchvision() | {"fc.weight": np.ones((5, 7), np.float32)},
            "fc.weight is [5, 7], must be [3, 4]",
        ),
        (
            torchvision() | {"fc.weight": np.ones((5, 4), np.float32)},  # whose bias is of 3
            "fc.weight is [5, 4], must be [3, 4]",
        ),
        (
            torchvision() | {"fc.weight": np.ones((), np.float32)},
            "fc.weight is [], must be [3, 4]",
        ),
        (
            torchvision() | {"fc.bias": np.array([0, np.nan, 0], np.float32)},
            "fc.bias must be finite floating-point numbers",
        ),
        (
            torchvision() | {"fc.bias": np.array([0, 1, 0])},
            "fc.bias must be finite floating-point numbers",
        ),
    ],
)
@pytest.mark.parametrize("suffix", slow.after(1, [".npz", ".safetensors"]))
def test_what_does_not_fit_is_told_in_one_line(
    tmp_path: Path, arrays: Arrays, message: str, suffix: str
) -> None:
    path = write(tmp_path / f"bad{suffix}", arrays)
    with pytest.raises(ValueError, match=f"^path={re.escape(f'{path}: {message}')}$"):
        weights.load(path, shapes())


def test_statistics_do_not_fit_a_network_without(tmp_path: Path) -> None:
    path = write(tmp_path / "batch.npz", torchvision())
    model = models.resnet18(NUM_CLASSES, widths=WIDTHS[:1] * 4, norm="group")
    with pytest.raises(ValueError, match=r": holds bn1\.running_mean \[2\] and 39 more, which"):
        weights.load(path, shapes_of(model))


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_files_that_are_none_are_told_in_one_line(tmp_path: Path, suffix: str) -> None:
    whole = write(tmp_path / f"whole{suffix}", torchvision()).read_bytes()
    damaged = {
        "empty": b"",
        "text": b"hello",
        "half": whole[: len(whole) // 2],
        "noise": 99 * b"\xff",
    }
    for name, content in damaged.items():
        path = tmp_path / f"{name}{suffix}"
        path.write_bytes(content)
        with pytest.raises(ValueError, match=f"^path={path}: must be a whole file of ") as told:
            weights.pretrained(tiny(), path)
        assert "\n" not in str(told.value)
    with pytest.raises(ValueError, match=r"none\.\w+: must be a file, there is none$"):
        weights.pretrained(tiny(), tmp_path / f"none{suffix}")
    with pytest.raises(ValueError, match=r": must be a \.safetensors or an \.npz file$"):
        weights.pretrained(tiny(), tmp_path / "resnet18.pth")


def test_a_damaged_compressed_file_is_told_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "packed.npz"
    np.savez_compressed(path, **torchvision())
    content = bytearray(path.read_bytes())
    for at in range(100, 140):  # inside of the first array
        content[at] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(ValueError, match=": must be a whole file of plain arrays: "):
        weights.load(path, shapes())


def test_pickled_objects_are_not_loaded(tmp_path: Path) -> None:
    path = tmp_path / "objects.npz"
    np.savez(path, x=np.array([{}], object))
    with pytest.raises(ValueError, match=": must be a whole file of plain arrays: "):
        weights.load(path, shapes())


def test_other_networks_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "whole.npz", torchvision())
    with pytest.raises(
        ValueError, match=r"^variables: must be those of models\.resnet18 or resnet50, they"
    ):
        weights.load(path, shapes_of(models.mlp(3)))


def test_a_missing_package_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "whole.safetensors", torchvision())
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match=r"pip install 'fedjax_inv\[experiments\]'$"):
        weights.load(path, shapes())
