"""When to stop a run: as soon as its training accuracy falls below a threshold, or reaches it.

The best responses of a game make its accuracy oscillate. FL Games (Gupta et al. 2022, Section D.2)
and IRM Games (Ahuja et al. 2020) stop in the low state, where the players' ensemble does not follow
spurious features, and do not roll back. The rule looks at training examples only. It can run inside
a compiled program, for several thresholds at once.

With `above`, a run stops as soon as it reaches an accuracy.
"""

from collections.abc import Callable
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from fedjax_inv.types import Array, Tree


class Stops(NamedTuple):
    """The round in which each of K thresholds stopped, or would have stopped, a run."""

    round: Array  # [K] int32, rounds played until the threshold was met; 0 before it is
    scores: Tree  # [K, ...] measured in that round; zeros before it


def init(num_thresholds: int, scores: Tree) -> Stops:
    """Return the stops before any of K thresholds is met, with scores of the shapes of `update`."""
    zeros = jax.tree.map(lambda s: jnp.zeros((num_thresholds, *s.shape), s.dtype), scores)
    return Stops(jnp.zeros(num_thresholds, jnp.int32), zeros)


def update(
    stops: Stops,
    accuracy: Array,
    *,
    thresholds: Array,
    num_rounds: Array,
    warm_start: int | Array,
    measure: Callable[[Array], Tree],
    above: bool = False,
) -> Stops:
    """Return the stops after a round, of which `num_rounds` [] int32 have been played.

    A threshold of [K] is met in the first round after which accuracy [], pooled over training
    examples, is below it, or with `above` at least it. NaN stops nothing, and nothing stops before
    `warm_start` rounds. `measure` returns the scores of this round, given whether a threshold is
    met []; it is called in every round, and should take no time if none is.
    """
    chex.assert_shape([accuracy, thresholds], [(), stops.round.shape])
    # In float32 outside of a trace, too.
    accuracy = jnp.asarray(accuracy)
    thresholds = jnp.asarray(thresholds)
    # Not a loop of 0 or 1 turns around `measure`: XLA moves loop-invariant code out of loops.
    is_met = accuracy >= thresholds if above else accuracy < thresholds
    now = (stops.round == 0) & is_met & (num_rounds >= warm_start)
    scores = measure(now.any())

    def put(old: Array, new: Array) -> Array:
        return jnp.where(now.reshape(-1, *(1,) * new.ndim), new, old)

    return Stops(jnp.where(now, num_rounds, stops.round), jax.tree.map(put, stops.scores, scores))


def all_met(stops: Stops) -> Array:
    """Return whether all thresholds have been met, [] bool; false without thresholds."""
    return (stops.round > 0).all() & (stops.round.size > 0)
