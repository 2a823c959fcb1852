"""Kernels and losses compute in float32 where features or outputs have 16 bits."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_inv import objectives
from fedjax_inv.algorithms import cafe, fedcfa, fedproto, moon


def test_prototypes_of_bfloat16_count_beyond_256() -> None:
    features, y = jnp.ones((600, 2), jnp.bfloat16), jnp.zeros(600, jnp.int32)
    sums: Any = fedproto.prototypes(features, y, jnp.ones(600, bool), 2)
    assert jax.tree.map(np.ndarray.tolist, jax.tree.map(np.asarray, sums)) == (
        [[600, 600], [0, 0]],
        [600, 0],
    )


LARGE, MASK = np.full((4, 3), 300.0), np.ones(4, bool)
SOME = np.array([[0.5, 1.0, 7.0], [1.5, 1.0, 3.0], [-2.0, 1.0, 5.0], [0.25, 1.0, 0.5]])
CERTAIN = np.array([[20.0, -20.0, 0.0]] * 4)


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (lambda x: fedcfa.factor_decorrelation(x, MASK), SOME),  # one factor is constant
        (lambda x: moon.contrastive(x, x, x, temperature=0.5).sum(), 0 * SOME),
        (lambda x: moon.contrastive(x, 2 * x, -x, temperature=0.5).sum(), LARGE),
        (lambda x: cafe.logits(x, jnp.eye(3), scale=16.0)[:, 0].sum(), 0 * SOME),
        (lambda x: cafe.logits(x, jnp.eye(3), scale=16.0)[:, 0].sum(), LARGE),
        (lambda x: cafe.rows_over_norms(x, 0.0).sum(), 0 * SOME),
        (lambda x: objectives.squared_error(x, 0 * x, MASK), LARGE),
        (lambda x: objectives.masked_mean(200 * x[:, 0], MASK), LARGE),
        (lambda x: objectives.focal(0.5)(x, jnp.zeros(4, int), MASK), CERTAIN),
    ],
)
def test_numbers_of_16_bits_have_values_and_slopes_of_32(function: Any, arguments: Any) -> None:
    both = jax.jit(jax.value_and_grad(function))
    value, slope = both(jnp.asarray(arguments, jnp.float16))
    expected, its_slope = both(jnp.asarray(arguments, jnp.float32))
    np.testing.assert_allclose(value, expected, rtol=2e-3, atol=1e-3)
    held = abs(its_slope) < np.finfo(np.float16).max  # what float16 can hold
    np.testing.assert_allclose(slope[held], its_slope[held], rtol=2e-2, atol=2e-3)
    assert not np.isnan(slope).any()
