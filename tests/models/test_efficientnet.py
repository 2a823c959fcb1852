"""EfficientNet-Lite0 beside PyTorch, where its weights lie, and its depthwise convolution."""

from pathlib import Path

import jax
import numpy as np
import pytest

from federations import assert_close
from fedjax_inv import models, platforms
from fedjax_inv.models import lowerings
from fedjax_inv.types import Array, Tree, Variables

KEY = jax.random.key(0)
FOLDER = Path("~/tensorflow_datasets/efficientnet_lite0").expanduser()


@pytest.mark.parametrize(("window", "stride"), [(3, 1), (3, 2), (5, 2), (2, 3)])
def test_a_depthwise_convolution_is_xla_s_grouped_one(window: int, stride: int) -> None:
    """On a CPU, where it is a sum; also its gradient."""
    rng = np.random.default_rng(0)
    x, kernel = rng.normal(size=(2, 7, 6, 3)), rng.normal(size=(window, window, 1, 3))

    def outputs(platform: str) -> Tree:
        def squares(x: Array, kernel: Array) -> tuple[Array, Array]:
            filtered = lowerings.depthwise(x, kernel, stride)
            return (filtered**2).sum(), filtered

        with platforms.traced_for(platform):
            return jax.jit(jax.value_and_grad(squares, (0, 1), has_aux=True))(x, kernel)

    assert_close(outputs("cpu"), outputs("gpu"), rtol=1e-4, atol=1e-4)


def test_has_as_many_parameters_as_timm_s() -> None:
    shapes = jax.eval_shape(models.efficientnet_lite0(1000).init, KEY, np.zeros((1, 32, 32, 3)))
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes.params)) == 4_652_008


@pytest.mark.slow
@pytest.mark.skipif(not FOLDER.is_dir(), reason="its weights are not here")
@pytest.mark.parametrize("side", [96, 65])
def test_equals_pytorch(side: int) -> None:
    """Features and logits of the same images, at an even and an odd size."""
    check = np.load(FOLDER / "check.npz")
    path, x = FOLDER / "tf_efficientnet_lite0.safetensors", check[f"x_{side}"]
    plain = models.weights.pretrained(models.efficientnet_lite0(1000), path)
    model = models.normalised(plain, [0.5] * 3, [0.5] * 3)

    @jax.jit
    def outputs(variables: Variables) -> tuple[Array, Array]:
        params, stats = variables
        features = model.encode(params.body, stats.body, x, np.ones(len(x), bool), False)[0]
        return features, models.predict(model, variables, x)

    got = outputs(model.init(KEY, x[:1]))
    expected = check[f"features_{side}"], check[f"logits_{side}"]
    assert_close(got, expected, rtol=0, atol=1e-4)
