"""ResNets: sizes that are known, and norms. test_weights.py has their formula at some cuts."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from federations import assert_close, assert_equal
from fedjax_inv import models, platforms
from fedjax_inv.algorithms import fedipg
from fedjax_inv.models import FrozenBatchNorm, GroupNorm
from fedjax_inv.types import Array, Halves, Model, Tree, Variables
from formulas import group_normed

KEY = jax.random.key(0)
WIDTHS = (2, 4, 4, 6)
tiny = partial(models.resnet18, 3, widths=WIDTHS)


def noise(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def num_parameters(model: Model, image: tuple[int, ...]) -> int:
    params = jax.eval_shape(model.init, KEY, np.zeros((1, *image), np.float32)).params
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def test_as_many_parameters_as_elsewhere() -> None:
    def count(model: Model) -> int:
        return num_parameters(model, (8, 8, 3))

    assert count(models.resnet18(1000, image_size=224)) == 11_689_512  # torchvision's
    # Scale and bias of 4,800 channels are no parameters.
    frozen = models.resnet18(1000, image_size=64, norm="frozen")
    assert count(frozen) == 11_689_512 - 2 * 4_800
    assert count(models.resnet50(1000)) == 25_557_032  # torchvision's, timm's


def test_a_frozen_norm_is_its_formula() -> None:
    x, mask = noise(0, 4, 2, 3), np.array([True, False, False, True])
    fresh = jax.jit(FrozenBatchNorm().init, static_argnums=3)(KEY, x, mask, True)
    zeros, ones = np.zeros(3, np.float32), np.ones(3, np.float32)
    stats = {"mean": zeros, "var": ones, "scale": ones, "bias": zeros}
    assert_equal(fresh, {"batch_stats": stats})
    stats = {name: 0.5 + np.abs(noise(1 + i, 3)) for i, name in enumerate(stats)}
    mean, var, scale, bias = map(np.float64, stats.values())
    apply = jax.jit(FrozenBatchNorm().apply, static_argnums=3)
    outputs = apply({"batch_stats": stats}, x, mask, True)
    assert_close(outputs, (x - mean) / np.sqrt(var + 1e-5) * scale + bias)
    assert_equal(apply({"batch_stats": stats}, x, mask, False), outputs)


def test_a_frozen_norm_computes_in_the_type_of_its_inputs() -> None:
    """Or all layers behind it would compute in float32, whatever `computed_in` says."""

    def called(x: Array) -> tuple[Tree, Array]:
        stats = FrozenBatchNorm().init(KEY, x, x[:, 0] > 0, False)
        return stats, FrozenBatchNorm().apply(stats, x, x[:, 0] > 0, False)

    stats, outputs = jax.eval_shape(called, jnp.ones((2, 3), jnp.bfloat16))
    assert {(leaf.dtype, leaf.weak_type) for leaf in jax.tree.leaves(stats)} == {
        (jnp.dtype("float32"), False)
    }
    assert outputs.dtype == jnp.bfloat16


def test_a_group_norm_is_its_formula() -> None:
    x, mask = noise(0, 3, 4, 5, 6), np.ones(3, bool)
    params = {"scale": noise(1, 6), "bias": noise(2, 6)}
    fresh = jax.eval_shape(partial(GroupNorm().init, train=True), KEY, x, mask)
    assert jax.tree.map(np.shape, fresh) == {"params": jax.tree.map(np.shape, params)}

    @jax.jit
    def all_groups() -> list[Array]:
        return [GroupNorm(n).apply({"params": params}, x, mask, True) for n in (1, 2, 3)]

    for groups, got in enumerate(all_groups(), 1):
        assert_close(got, group_normed(np.float64(x), groups, **params, epsilon=1e-5))


@pytest.mark.slow
def test_a_penalised_step_of_more_clients_is_no_longer_a_program() -> None:
    """Compilers take seconds for each convolution: clients must share them, as layers do not."""
    model, x = tiny(norm="frozen"), np.zeros((2, 8, 8, 3), np.float32)

    def risk(params: Halves, stats: Halves, x: Array) -> Array:
        variables = Variables(params, stats)
        return models.apply(model, variables, x, np.ones(2, bool), True)[0].sum()

    def step(params: Halves, stats: Halves, x: Array) -> Tree:
        return fedipg.penalised_value_and_grad(lambda params: risk(params, stats, x), 0.1)(params)

    def convolutions(num_clients: int) -> int:
        arguments = *jax.eval_shape(model.init, KEY, x), x
        several = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((num_clients, *leaf.shape), leaf.dtype), arguments
        )
        with platforms.traced_for("tpu"):
            lowered = jax.jit(jax.vmap(step)).trace(*several).lower(lowering_platforms=("tpu",))
        return lowered.as_text().count("stablehlo.convolution")

    few, many = convolutions(2), convolutions(5)
    # 20 layers: FedAvg's step has 59, and a Hessian-vector product without shared terms 175.
    assert 59 < few == many <= 120
