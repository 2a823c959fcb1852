"""A check of losses and scores that a user has written."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_inv.checks import UsageError
from fedjax_inv.types import Array, Loss, Tree

_REMEDY = "as objectives.masked_mean does"


def check_mean(name: str, function: Loss, outputs: Tree, y: Tree) -> None:
    """Check that a loss or a score is the mean over the examples that the mask keeps.

    Batches are filled up with examples whose mask is false, and evaluations add the means of single
    examples. So any other function gives wrong numbers without an error. The function is called
    with made-up outputs; where it is NaN or infinite for them, nothing is checked.

    Args:
      name: of the argument or the flag, for the error.
      function: (outputs [B, ...], y [B, ...], mask [B]) -> a real number [].
      outputs: the shapes of an example's outputs, [1, ...].
      y: the targets of an example [1, ...].

    Raises:
      UsageError: if the value changes with an example whose mask is false, if it is not 0 where all
        masks are false, and if it doubles when an example is there twice.
    """

    def made_up(leaf: Any) -> Array:
        values = np.sin(1 + np.arange(2 * np.prod(leaf.shape, dtype=int)))
        return jnp.asarray(values.reshape(2, *leaf.shape[1:]), leaf.dtype)

    def values(outputs: Tree, y: Tree) -> list[Array]:
        first = jax.tree.map(lambda leaf: leaf[:1], outputs)
        same, two = jax.tree.map(lambda leaf: jnp.concatenate([leaf, leaf]), (first, y))
        return [
            function(first, y, jnp.array([True])),
            function(outputs, two, jnp.array([True, False])),
            function(outputs, two, jnp.array([False, False])),
            function(same, two, jnp.array([True, True])),
        ]

    of_shapes = jax.tree.map(made_up, outputs)
    one, padded, none, twice = np.asarray(jax.jit(values)(of_shapes, y), np.float64)
    if not np.isfinite(one):
        return
    if not np.isclose(padded, one, rtol=1e-2, atol=1e-5):
        text = f"must leave out examples whose mask is false, {_REMEDY}"
        raise UsageError(name, ..., text)
    if none != 0:
        text = f"returns {none:.4g} where the mask is false for all examples, must return 0"
        raise UsageError(name, ..., f"{text}, {_REMEDY}")
    if one and np.isclose(twice, 2 * one, rtol=1e-5, atol=0):
        raise UsageError(
            name, ..., f"returns the sum over examples, must return the mean, {_REMEDY}"
        )
