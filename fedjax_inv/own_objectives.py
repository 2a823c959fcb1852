"""A check of losses and scores that a user has written."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_inv.checks import UsageError
from fedjax_inv.types import Array, Loss, Tree

_REMEDY = "as objectives.masked_mean does"
_MOST_SHIFTS = 1000  # of outputs


def _joined(one: Tree, other: Tree) -> Tree:
    """Return examples after others."""
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b]), one, other)


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
        values = np.sin(1 + np.arange(np.prod(leaf.shape, dtype=int)))
        return jnp.asarray(values.reshape(leaf.shape), leaf.dtype)

    first = jax.tree.map(made_up, outputs)
    # Other outputs, among them some that are right if the first are wrong, as for an accuracy.
    widths = [leaf.shape[-1] for leaf in jax.tree.leaves(outputs)]
    shifts = jnp.arange(min(max(widths), _MOST_SHIFTS))

    def values(first: Tree, y: Tree) -> list[Array]:
        two = _joined(y, y)

        def with_others(kept: list[bool]) -> Array:
            def one(shift: Array) -> Array:
                other = jax.tree.map(lambda leaf: 2 * jnp.roll(leaf, shift, -1) + 0.5, first)
                return function(_joined(first, other), two, jnp.array(kept))

            return jax.vmap(one)(shifts)

        return [
            function(first, y, jnp.array([True])),
            with_others([True, False]),
            with_others([False, False]),
            function(_joined(first, first), two, jnp.array([True, True])),
        ]

    found = jax.jit(values)(first, y)
    one, padded, none, twice = (np.asarray(each, np.float64) for each in found)
    if not np.isfinite(one):
        return
    if not np.allclose(padded, one, rtol=1e-3, atol=1e-5):
        text = f"must leave out examples whose mask is false, {_REMEDY}"
        raise UsageError(name, ..., text)
    if none.any():
        text = f"returns {none[none != 0][0]:.4g} where the mask is false for all examples"
        raise UsageError(name, ..., f"{text}, must return 0, {_REMEDY}")
    if one and np.isclose(twice, 2 * one, rtol=1e-5, atol=0):
        raise UsageError(
            name, ..., f"returns the sum over examples, must return the mean, {_REMEDY}"
        )
