"""The networks of two convolutions against their formula in NumPy."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import slow
from fedjax_inv import models
from fedjax_inv.types import Tree

WIDTHS = (3, 2, 5, 4)


def convolved(x: np.ndarray, kernel: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """Of the size of x [B, H, W, C], by a loop over the window's pixels."""
    padded = np.pad(x, ((0, 0), (2, 2), (2, 2), (0, 0)))
    height, width = x.shape[1:3]
    out = np.zeros((*x.shape[:3], kernel.shape[3]))
    for i in range(5):
        for j in range(5):
            out += padded[:, i : i + height, j : j + width] @ kernel[i, j]
    return out + bias


def pooled(x: np.ndarray) -> np.ndarray:
    """Odd rows and columns at the end are left out."""
    height, width = (side // 2 for side in x.shape[1:3])
    cut = x[:, : 2 * height, : 2 * width]
    return cut.reshape(len(x), height, 2, width, 2, -1).max((2, 4))


def reference(params: Tree, x: np.ndarray) -> np.ndarray:
    """params: of the blocks in order."""
    for block in params[:2]:
        x = pooled(np.maximum(convolved(x, **block["Conv_0"]), 0))
    x = x.reshape(len(x), -1)
    for block in params[2:]:
        x = x @ block["Dense_0"]["kernel"] + block["Dense_0"]["bias"]
        x = np.maximum(x, 0) if block is not params[-1] else x
    return x


@pytest.mark.parametrize(
    ("make", "widths"), [(models.lenet, WIDTHS), (models.leaf_cnn, WIDTHS[:3])]
)
@pytest.mark.parametrize("cut", slow.after(1, [1, None]))
def test_is_its_formula(make: Any, widths: tuple[int, ...], cut: int | None) -> None:
    model = make(3, widths=widths, cut=cut)
    x = np.random.default_rng(0).integers(0, 256, (2, 9, 6, 2), np.uint8)
    variables = jax.jit(model.init)(jax.random.key(0), x)
    body, head = variables.params
    blocks = [half[f"blocks_{i}"] for half in (body, head) for i in range(len(half))]
    assert len(body) == (len(widths) if cut is None else cut)
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64) + 0.1, blocks)  # and biases
    shifted = jax.tree.map(lambda leaf: leaf + 0.1, variables)
    got = jax.jit(lambda v: models.predict(model, v, x))(shifted)
    np.testing.assert_allclose(got, reference(params, x / 255), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("train", slow.after(1, [True, False]))
def test_with_batch_norm_is_its_formula(train: bool) -> None:
    """Each hidden layer without a bias, the norm over the real examples, ReLU, then pooling."""
    model = models.lenet(3, widths=WIDTHS, norm="batch")
    x = np.random.default_rng(0).random((4, 9, 6, 2), np.float32)
    mask = np.array([True, False, True, True])
    variables = jax.jit(model.init)(jax.random.key(0), x)
    shifted = jax.tree.map(lambda leaf: leaf + 0.1, variables)
    got, _ = jax.jit(lambda v: models.apply(model, v, x, mask, train))(shifted)

    params, stats = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), shifted)
    hidden = x.astype(np.float64)
    for i in range(4):
        layer, running = params.body[f"blocks_{i}"], stats.body[f"blocks_{i}"]["BatchNorm_0"]
        if i < 2:
            hidden = convolved(hidden, layer["Conv_0"]["kernel"], np.zeros(()))
        else:
            hidden = hidden.reshape(4, -1) @ layer["Dense_0"]["kernel"]
        axes = tuple(range(hidden.ndim - 1))
        mean = hidden[mask].mean(axes) if train else running["mean"]
        var = hidden[mask].var(axes) if train else running["var"]
        norm = layer["BatchNorm_0"]
        hidden = (hidden - mean) / np.sqrt(var + 1e-5) * norm["scale"] + norm["bias"]
        hidden = np.maximum(hidden, 0)
        hidden = pooled(hidden) if i < 2 else hidden
    last = params.head["blocks_0"]["Dense_0"]
    expected = hidden @ last["kernel"] + last["bias"]
    np.testing.assert_allclose(got[mask], expected[mask], rtol=1e-4, atol=1e-4)


def test_has_the_parameters_of_its_layers() -> None:
    model = models.lenet(10)
    variables = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 28, 28, 1)))
    sizes = (25 * 32 + 32, 25 * 32 * 32 + 32, 49 * 32 * 512 + 512, 512 * 384 + 384)
    sizes += (384 * 192 + 192, 192 * 10 + 10)
    leaves = jax.tree.leaves(variables.params)
    assert sum(leaf.size for leaf in leaves) == sum(sizes)
