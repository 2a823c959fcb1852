"""The door of the library: a wrong argument is one clear line, wherever it is concrete.

Inside a compiled program values are tracers and pass; so whoever traces checks first.
"""

import numbers
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_inv.types import Cohort, Federation, Tree


def is_concrete(tree: Tree) -> bool:
    """Whether no leaf is a tracer, so that its values can be looked at."""
    return not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))


def whole(name: str, value: Any, lowest: int = 1) -> None:
    """Raises ValueError unless `value` is a whole number and at least `lowest`."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < lowest:
        raise ValueError(f"{name}={value}: must be a whole number, at least {lowest}")


def real(name: str, value: Any, lowest: float = 0.0, highest: float = np.inf) -> None:
    """Raises ValueError unless `value` is a finite number in [lowest, highest], or traced."""
    if not is_concrete(value):
        return
    low, high = (_shown(bound) for bound in (lowest, highest))
    allowed = f"at least {low}" if highest == np.inf else f"in [{low}, {high}]"
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = np.nan
    if isinstance(value, bool | str) or not (np.isfinite(number) and lowest <= number <= highest):
        raise ValueError(f"{name}={value}: must be a finite number, {allowed}")


def _shown(bound: float) -> str:
    """A bound in as few digits as tell it: 1 must not stand for the number below it."""
    short = f"{bound:g}"
    return short if float(short) == bound else repr(float(bound))


def one_of(name: str, value: Any, allowed: Collection[str]) -> None:
    """Raises ValueError unless `value` is one of `allowed`."""
    if value not in allowed:
        raise ValueError(f"{name}={value!r}: must be one of {', '.join(allowed)}")


def federation(federation: Federation) -> None:
    """Raises ValueError unless every client's rows are rows of the examples."""
    data, order, start, size = federation
    lengths = {leaf.shape[0] for leaf in jax.tree.leaves(data)}
    if len(lengths) != 1:
        raise ValueError(f"data: x and y must be of one length, not {sorted(lengths)}")
    if order.ndim != 1:
        raise ValueError(f"order {order.shape}: must be [L]")
    if start.ndim != 1 or start.shape != size.shape:
        raise ValueError(f"start {start.shape} and size {size.shape}: must both be [C]")
    if not is_concrete((order, start, size)):
        return
    rows, first, count = (np.asarray(array) for array in (order, start, size))
    (num_examples,) = lengths
    if rows.size and not (rows.min() >= 0 and rows.max() < num_examples):
        raise ValueError(
            f"order: holds {rows.min()}..{rows.max()}, must be rows in 0..{num_examples - 1}"
        )
    end = first.astype(np.int64) + count
    wrong = np.flatnonzero((first < 0) | (count < 0) | (end > len(rows)))
    if len(wrong):
        who = wrong[0]
        raise ValueError(
            f"start={first[who]} and size={count[who]} of client {who}: must lie in the "
            f"{len(rows)} rows of order"
        )


def schedule(schedule: Cohort, num_clients: int, history: int) -> None:
    """Raises ValueError unless the schedule fits a run of C clients that keeps H broadcasts.

    Who is present must be a client, once in a round, with a delay in 0..H - 1.
    """
    if not is_concrete(schedule):
        return
    who, present, delay = (np.asarray(array) for array in schedule)
    if who.ndim != 2 or not who.shape == present.shape == delay.shape:
        raise ValueError(
            f"schedule: who {who.shape}, present {present.shape} and delay {delay.shape}: "
            "must all be [T, S]"
        )
    outside = present & ((who < 0) | (who >= num_clients))
    if outside.any():
        raise ValueError(
            f"schedule: round {np.argwhere(outside)[0][0]} names client {who[outside][0]}: "
            f"must be in 0..{num_clients - 1}"
        )
    # Absent slots name nobody, each another one.
    named = np.sort(np.where(present, who, -1 - np.arange(who.shape[1])), axis=1)
    twice = (np.diff(named, axis=1) == 0).any(1)
    if twice.any():
        raise ValueError(
            f"schedule: round {np.flatnonzero(twice)[0]} names a client twice: must be once"
        )
    late = present & ((delay < 0) | (delay >= history))
    if late.any():
        raise ValueError(
            f"schedule: a delay of {delay[late][0]}: must be in 0..{history - 1}, as the run "
            f"keeps history={history} broadcasts"
        )


def same_shapes(**trees: Tree) -> None:
    """Raises ValueError unless all the named trees have the structure and shapes of the first."""
    (first, expected), *others = (
        (name, jax.tree.map(jnp.shape, tree)) for name, tree in trees.items()
    )
    for name, shapes in others:
        if shapes != expected:
            raise ValueError(f"{name}: has shapes {shapes}, must have those of {first}, {expected}")
