"""Layers and networks in NumPy, in float64: images are [B, height, width, C]."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from fedjax_inv.types import Halves, Model, Tree, Variables

Layer = dict[str, dict[str, np.ndarray]]


def images(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, shape, np.uint8)


def randomised(model: Model, x: Tree, scale: float = 0.5) -> Variables:
    """Variables of no symmetry, and with biases, which start at zero; variances are above 0."""
    rng = np.random.default_rng(0)
    params, stats = jax.eval_shape(model.init, jax.random.key(0), x)
    return Variables(
        jax.tree.map(lambda a: scale * rng.normal(size=a.shape).astype(np.float32), params),
        jax.tree.map(lambda a: 0.5 + rng.random(a.shape, np.float32), stats),
    )


def windows(x: np.ndarray, size: int, stride: int, padding: int, fill: float) -> np.ndarray:
    """[B, rows, columns, C, size, size] of images that are padded alike on every side."""
    sides = (padding, padding)
    x = np.pad(x, [(0, 0), sides, sides, (0, 0)], constant_values=fill)
    of_all = np.lib.stride_tricks.sliding_window_view(x, (size, size), (1, 2))
    return of_all[:, ::stride, ::stride]


def convolved(x: np.ndarray, kernel: np.ndarray, bias: Any = 0.0, stride: int = 1) -> np.ndarray:
    """With half of the window as padding."""
    size = len(kernel)
    return np.einsum("brcdij,ijdo->brco", windows(x, size, stride, size // 2, 0.0), kernel) + bias


def pooled(x: np.ndarray, size: int = 2, stride: int = 2, padding: int = 0) -> np.ndarray:
    """Rows and columns at the end that fill no window are left out."""
    return windows(x, size, stride, padding, -np.inf).max((4, 5))


def normed(
    x: np.ndarray, scale: Any, bias: Any, mean: Any, var: Any, epsilon: float = 1e-5
) -> np.ndarray:
    return (x - mean) / np.sqrt(var + epsilon) * scale + bias


def group_normed(
    x: np.ndarray, groups: int, scale: Any, bias: Any, epsilon: float = 1e-6
) -> np.ndarray:
    """Each example by itself."""
    parts = x.reshape(*x.shape[:3], groups, -1)
    mean, var = (of(parts, axis=(1, 2, 4), keepdims=True) for of in (np.mean, np.var))
    return normed(parts, 1.0, 0.0, mean, var, epsilon).reshape(x.shape) * scale + bias


def blocks(tree: Halves) -> list[Any]:
    """The blocks of both halves in their order."""
    return [half.get(f"blocks_{i}", {}) for half in tree for i in range(len(half))]


def recut(tree: Halves, cut: int) -> Halves:
    """The blocks of both halves, dealt to the halves of another cut."""
    halves = blocks(tree)[:cut], blocks(tree)[cut:]
    return Halves(*({f"blocks_{i}": block for i, block in enumerate(half)} for half in halves))


def network(
    variables: Variables,
    x: np.ndarray,
    train: bool,
    strides: Sequence[int] = (),
    pools: Sequence[bool] = (),
    activation: Any = lambda x: np.maximum(x, 0),
) -> np.ndarray:
    """Logits [B, K] of blocks of a convolution or a dense layer, a norm, activation and pooling.

    All examples are real. The last block is linear, and takes the mean of images.
    """
    params, stats = jax.tree.map(np.float64, variables)
    *hidden, last = blocks(params)
    running = blocks(stats) or [{}] * len(hidden)
    for i, (layer, now) in enumerate(zip(hidden, running, strict=False)):
        if "Conv_0" in layer:
            x = convolved(x, **layer["Conv_0"], stride=strides[i] if strides else 1)
        else:
            x = x.reshape(len(x), -1) @ layer["Dense_0"]["kernel"] + layer["Dense_0"].get("bias", 0)
        if "BatchNorm_0" in layer:
            assert "bias" not in layer.get("Conv_0", layer.get("Dense_0", {}))
            axes = tuple(range(x.ndim - 1))
            of = {"mean": x.mean(axes), "var": x.var(axes)} if train else now["BatchNorm_0"]
            x = normed(x, **layer["BatchNorm_0"], **of)
        x = activation(x)
        if "GroupNorm_0" in layer:
            x = group_normed(x, 8, **layer["GroupNorm_0"])
        x = pooled(x) if pools[i : i + 1] == (True,) else x
    x = x.mean((1, 2)) if x.ndim == 4 else x
    return x @ last["Dense_0"]["kernel"] + last["Dense_0"]["bias"]
