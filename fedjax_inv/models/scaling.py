"""Networks that shift and scale inputs or outputs by statistics, which are saved with them."""

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from fedjax_inv import types
from fedjax_inv.models.blocks import predict
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


class InUnits(NamedTuple):
    """The statistics of the head of a model of `in_units`."""

    targets: Scaling  # of K values
    network: Tree  # those of the model inside


def in_units(model: types.Model) -> types.Model:
    """Return the model whose outputs [B, K] or [B] are values in the units of the targets.

    The model inside computes them with the mean 0 and the deviation 1. `fit` sets both to those of
    the targets of a run's training examples, and trains with the loss of standardised outputs and
    targets (`on_standard`). They are statistics of the head, which training does not change.
    """

    def init(key: Array, x: Tree) -> types.Variables:
        variables = model.init(key, x)
        sample = jax.eval_shape(lambda x: predict(model, variables, x), x)
        number = sample.shape[1] if len(sample.shape) > 1 else 1
        targets = Scaling(jnp.zeros(number), jnp.ones(number))
        head = InUnits(targets, variables.stats.head)
        return variables._replace(stats=variables.stats._replace(head=head))

    def decode(params: Tree, stats: Tree, features: Tree, *others: Any) -> tuple[Tree, Tree]:
        outputs, after = model.decode(params, stats.network, features, *others)
        shift, scale = (_columns(each, outputs) for each in jax.lax.stop_gradient(stats.targets))
        return outputs / scale + shift, InUnits(stats.targets, after)

    return model._replace(init=init, decode=decode)


def with_targets(variables: types.Variables, targets: Scaling) -> types.Variables:
    """Return the variables of a model of `in_units` with another shift and scale, each [K]."""
    head = variables.stats.head
    chex.assert_trees_all_equal_shapes(targets, head.targets)
    return variables._replace(stats=variables.stats._replace(head=head._replace(targets=targets)))


def on_standard(loss: types.Loss, targets: Scaling) -> types.Loss:
    """Return the loss of outputs and targets that are shifted and scaled first."""

    def of_standard(outputs: Array, y: Array, mask: Array) -> Array:
        outputs, y = (
            (each - _columns(targets.shift, each)) * _columns(targets.scale, each)
            for each in (outputs, y)
        )
        return loss(outputs, y, mask)

    return of_standard


def _columns(values: Array, of: Array) -> Array:
    """Return one value for each column of arrays [B, K], or the only one for those of [B]."""
    return values if of.ndim > 1 else values[0]
