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
from fedjax_inv import devices, models, rounds
from fedjax_inv.algorithms import fedproto
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
