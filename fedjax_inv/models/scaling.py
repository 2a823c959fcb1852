"""Networks that shift and scale their inputs by statistics, which are saved with them."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_inv import checks
from fedjax_inv.checks import UsageError
from fedjax_inv.models.wrappers import like_inputs, unit_range
from fedjax_inv.types import Array, Halves, Model, Tree, Variables


class Scaling(NamedTuple):
    """The shift and scale of each of D features: a network sees (x - shift) * scale."""

    shift: Any  # [D] float32
    scale: Any  # [D] float32; 0 for a feature that is left out


class Scaled(NamedTuple):
    """The statistics of the body of a model of `scaled`."""

    inputs: Scaling
    network: Tree  # those of the model inside


def scaled(model: Model) -> Model:
    """Return the model on (x - shift) * scale, where shift and scale are statistics of its body.

    Local training does not change them, and a round by the rounding of a mean. They are 0 and 1
    until `with_scaling` sets them. `computed_in` belongs inside, `scaled(computed_in(model))`:
    outside, it would round the inputs to 16 bits before the shift.

    Args:
      model: a model on one array of inputs [B, ..., D].

    Returns:
      The model; 8-bit images are scaled to [0, 1] first.

    Raises:
      UsageError: for another type, and at initialisation for inputs that are not one such array.
    """
    checks.record("model", model, Model)

    def view(x: Array, inputs: Scaling) -> Array:
        features = unit_range(x)
        return like_inputs((features - inputs.shift) * inputs.scale, features)

    def init(key: Array, x: Array) -> Variables:
        if not hasattr(x, "ndim") or x.ndim < 2:
            raise UsageError("x", x, "must be one array [B, ..., D]")
        variables = model.init(key, unit_range(x))
        inputs = Scaling(jnp.zeros(x.shape[-1]), jnp.ones(x.shape[-1]))
        body = Scaled(inputs, variables.stats.body)
        return variables._replace(stats=Halves(body, variables.stats.head))

    def encode(
        params: Tree, stats: Tree, x: Array, mask: Array, train: bool, key: Array | None = None, /
    ) -> tuple[Tree, Tree]:
        inputs = jax.lax.stop_gradient(stats.inputs)
        outputs, after = model.encode(params, stats.network, view(x, inputs), mask, train, key)
        return outputs, Scaled(stats.inputs, after)

    return model._replace(init=init, encode=encode)


def with_scaling(variables: Variables, scaling: Scaling) -> Variables:
    """Return the variables of a model of `scaled` with another shift and scale.

    Args:
      variables: the variables.
      scaling: the shift and scale, each [D].

    Raises:
      UsageError: for variables of another model, for other numbers of features, and for anything
        but finite numbers.
    """
    checks.record("variables", variables, Variables)
    checks.record("scaling", scaling, Scaling)
    body = variables.stats.body
    if not isinstance(body, Scaled):
        raise UsageError("variables", ..., "must be those of a model of `scaled`")
    for name, value, like in zip(Scaling._fields, scaling, body.inputs, strict=True):
        if np.shape(value) != np.shape(like) or not _is_finite(value):
            allowed = f"must be finite numbers {list(np.shape(like))}, one for each feature"
            raise UsageError(f"scaling.{name}", value, allowed)
    inputs = Scaling(*(jnp.asarray(value, jnp.float32) for value in scaling))
    return variables._replace(stats=variables.stats._replace(body=body._replace(inputs=inputs)))


def _is_finite(value: Any) -> bool:
    """Return whether an array holds finite numbers; those of a tracer are not known."""
    if not checks.is_concrete(value):
        return True
    array = np.asarray(value)
    return jnp.issubdtype(array.dtype, jnp.number) and bool(np.isfinite(array).all())
