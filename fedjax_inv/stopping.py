"""When to stop a run: as soon as its training accuracy falls below a threshold, or reaches it.

The best responses of a game make its accuracy oscillate. FL Games (Gupta et al. 2022, Section D.2)
and IRM Games (Ahuja et al. 2020) stop in the low state, where the players' ensemble does not follow
what is spurious, and do not roll back. The rule looks at training examples only, so it may run
inside a compiled program, for several thresholds at once.

A network that is to be trained up to an accuracy, and no further, stops when it reaches it.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_inv.types import Array, Tree


class Stops(NamedTuple):
    """Where each of K thresholds stopped, or would have stopped, a run."""

    round: Array  # [K] int32, rounds played by then; 0 while the threshold has not been met
    scores: Tree  # [K, ...] what was measured there; zeros until then


def init(num_thresholds: int, scores: Tree) -> Stops:
    """No threshold has been met. scores: shapes of what `update` will measure."""
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
    """The stops after a round.

    accuracy: [], pooled training accuracy after it; NaN stops nothing. thresholds: [K]; one is met
    in the first round after which accuracy < threshold. num_rounds: [] int32, how many have
    been played. warm_start: so many rounds must have been played before a stop. measure: (whether
    a threshold is met []) -> scores of this round; called in every round, it should take no time
    where none is. above: a threshold is met where accuracy >= threshold instead.
    """
    # Not a loop of no turn or one around `measure`: XLA moves what does not change out of loops.
    is_met = accuracy >= thresholds if above else accuracy < thresholds
    now = (stops.round == 0) & is_met & (num_rounds >= warm_start)
    scores = measure(now.any())

    def put(old: Array, new: Array) -> Array:
        return jnp.where(now.reshape(-1, *(1,) * new.ndim), new, old)

    return Stops(jnp.where(now, num_rounds, stops.round), jax.tree.map(put, stops.scores, scores))


def all_met(stops: Stops) -> Array:
    """[] bool, whether there is nothing left to wait for; false without thresholds."""
    return (stops.round > 0).all() & (stops.round.size > 0)
