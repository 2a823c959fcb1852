"""The weight of a penalty, round by round."""

import jax.numpy as jnp
import optax

from fedjax_inv import checks
from fedjax_inv.types import Array


def schedule(
    penalty: float | Array | optax.Schedule,
    warmup_rounds: float | Array,
    warmup_penalty: float | Array,
) -> optax.Schedule:
    """Return the function round [] -> penalty [], as `fedipg` and domain methods have it.

    A negative value of a schedule becomes NaN, which a run reports.
    """
    checks.real("warmup_rounds", warmup_rounds)
    checks.real("warmup_penalty", warmup_penalty)
    after = penalty if callable(penalty) else lambda round: penalty
    checks.real("penalty", after(0))

    def at(round: Array) -> Array:
        now = jnp.where(round < warmup_rounds, warmup_penalty, after(round))
        return jnp.where(now >= 0, now, jnp.nan)

    return at
