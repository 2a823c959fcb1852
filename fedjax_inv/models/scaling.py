"""Networks that shift and scale their inputs by statistics, which are saved with them."""

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from fedjax_inv import types
from fedjax_inv.models.wrappers import like_inputs, unit_range
from fedjax_inv.types import Array, Tree


class Scaling(NamedTuple):
    """The shift and scale of each of D features: a network sees (x - shift) * scale."""

    shift: Any  # [D] float32
    scale: Any  # [D] float32; 0 for a feature that is left out


class Scaled(NamedTuple):
    """The statistics of the body of a model of `scaled`."""

    inputs: Scaling
    network: Tree  # those of the model inside


def scaled(model: types.Model) -> types.Model:
    """Return the model on (x - shift) * scale, where shift and scale are statistics of its body.

    Its inputs are an array [B, ..., D]; 8-bit images are scaled to [0, 1] first. Local training
    does not change the statistics, and a round by the rounding of a mean. They are 0 and 1 until
    `with_scaling` sets them. `computed_in` belongs inside, `scaled(computed_in(model))`: outside,
    it would round the inputs to 16 bits before the shift.
    """

    def init(key: Array, x: Array) -> types.Variables:
        variables = model.init(key, unit_range(x))
        inputs = Scaling(jnp.zeros(x.shape[-1]), jnp.ones(x.shape[-1]))
        body = Scaled(inputs, variables.stats.body)
        return variables._replace(stats=types.Halves(body, variables.stats.head))

    def encode(params: Tree, stats: Tree, x: Array, *others: Any) -> tuple[Tree, Tree]:
        shift, scale = jax.lax.stop_gradient(stats.inputs)
        features = unit_range(x)
        seen = like_inputs((features - shift) * scale, features)
        outputs, after = model.encode(params, stats.network, seen, *others)
        return outputs, Scaled(stats.inputs, after)

    return model._replace(init=init, encode=encode)


def with_scaling(variables: types.Variables, scaling: Scaling) -> types.Variables:
    """Return the variables of a model of `scaled` with another shift and scale, each [D]."""
    body = variables.stats.body
    inputs = Scaling(*(jnp.asarray(value, jnp.float32) for value in scaling))
    chex.assert_trees_all_equal_shapes(inputs, body.inputs)
    return variables._replace(stats=variables.stats._replace(body=body._replace(inputs=inputs)))
