"""States keep their types where inputs, parameters or features have others."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import federations
import slow
from federations import Config
from fedjax_inv import devices, models, objectives, rounds
from fedjax_inv.algorithms import cafe, fedcfa, fedproto, moon
from fedjax_inv.types import Algorithm, Array, Tree


def played(algorithm: Algorithm, variables: Tree) -> rounds.State:
    """The shapes and types of the state after a round; nothing runs."""
    held = federations.federation()

    def one() -> rounds.State:
        state = rounds.init(algorithm, variables, held, jax.random.key(1))
        everyone = federations.cohort([0, 1, 2, 3, 4])
        return rounds.step(algorithm, state, everyone, held, axis=devices.vmapped())[0]

    return jax.eval_shape(one)


@pytest.mark.parametrize(
    "name", slow.after(2, sorted(federations.TABLE, key=lambda name: name != "fedproto"))
)
def test_a_network_of_float32_trains_where_other_numbers_have_64_bits(name: str) -> None:
    with jax.enable_x64(True):
        config = federations.TABLE[name][-1]
        variables = federations.initial(config.model(), jax.random.key(0))
        assert {leaf.dtype.name for leaf in jax.tree.leaves(variables)} <= {"float32"}
        state = played(federations.build(name, config), variables)
        leaves = jax.tree_util.tree_leaves_with_path(state)
        params = [leaf for path, leaf in leaves if ".params" in jax.tree_util.keystr(path)]
        assert {leaf.dtype.name for leaf in params} == {"float32"}


class Half(nn.Module):
    """A layer that computes in bfloat16; its parameters are float32."""

    width: int

    @nn.compact
    def __call__(self, x: Array, mask: Array, train: bool) -> Array:
        del mask, train
        return nn.Dense(self.width, dtype=jnp.bfloat16)(x.reshape(x.shape[0], -1))


@pytest.mark.parametrize("name", ["fedproto", "fedsr"])
def test_what_is_learned_of_features_of_bfloat16_is_float32(name: str) -> None:
    model = models.from_blocks([Half(4), Half(federations.NUM_CLASSES)], 1)
    algorithm = federations.build(name, Config(lambda: model, federations.steps))
    state = played(algorithm, federations.initial(model, jax.random.key(0)))
    floats = [
        leaf.dtype for leaf in jax.tree.leaves(state.server) if jnp.issubdtype(leaf, jnp.floating)
    ]
    assert {*floats} == {np.dtype("float32")}


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
