"""The door of the library: a wrong argument is one clear line, wherever it is concrete.

Inside a compiled program values are tracers and pass; so whoever traces checks first.
"""

import math
import numbers
import os
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_inv.types import Cohort, Federation, Tree


class UsageError(ValueError):
    """A request that cannot be met; the message says in one line what the caller must change.

    Any other ValueError is a defect. The line is "argument=value: allowed", without "=value" where
    there is no value to show:

        UsageError("alpha", -1.0, "must be above 0")
        UsageError("alpha", 0.1, "must be higher, or {clients} lower", clients=("num_clients", 50))

    Attributes:
      argument: the name of the argument at fault, or a path.
      value: its value; ... (Ellipsis) where none is shown.
      allowed: what it must be. Braces name entries of `others` if there are any.
      others: other arguments that the text speaks of, as (argument, value) by their names in it.
    """

    def __init__(
        self,
        argument: str,
        value: Any = ...,
        allowed: str = "",
        **others: tuple[str, Any],
    ) -> None:
        super().__init__(argument, value, allowed)
        self.argument, self.value, self.allowed, self.others = argument, value, allowed, others

    def __str__(self) -> str:
        return self.line(_assigned)

    def line(self, assigned: Callable[[str, Any], str]) -> str:
        """The message, with arguments written by `assigned`: (argument, value) -> "name=value".

        This is how a binary tells the message in terms of its flags.
        """
        if not self.allowed:  # a whole sentence
            return self.argument
        told = {name: assigned(*other) for name, other in self.others.items()}
        allowed = self.allowed.format(**told) if told else self.allowed
        return f"{assigned(self.argument, self.value)}: {allowed}"


def _assigned(argument: str, value: Any) -> str:
    return argument if value is ... else f"{argument}={shown(value)}"


def is_concrete(tree: Tree) -> bool:
    """Whether no leaf is a tracer, so that its values can be looked at."""
    return not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))


def shown(value: Any) -> str:
    """A value in one line: dtype and shape of an array, strings in quotes."""
    if getattr(value, "ndim", 0) > 0:
        return f"{value.dtype} {value.shape}"
    return repr(value) if isinstance(value, str) else str(value)


def integer(
    name: str, value: Any, low: int = 1, high: int | None = None, meaning: str = ""
) -> None:
    """A whole number that is at least low and, unless it is None, at most high; a bool is none.

    meaning: what the bounds are, in words that go after them. Raises ValueError for another value.
    """
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not whole or value < low or (high is not None and value > high):
        allowed = f"of at least {low}" if high is None else f"in {low}..{high}"
        raise UsageError(f"{name}={shown(value)}: must be an integer {allowed}{meaning}")


def real(name: str, value: Any, lowest: float = 0.0, highest: float = np.inf) -> None:
    """Raises ValueError unless `value` is a finite number in [lowest, highest], or traced."""
    if not is_concrete(value):
        return
    allowed = f"at least {lowest:g}" if highest == np.inf else f"in [{lowest:g}, {highest:g}]"
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = np.nan
    is_finite = abs(number) <= float(np.finfo(np.float32).max)  # in which all is computed
    if isinstance(value, bool | str) or not (is_finite and lowest <= number <= highest):
        raise UsageError(f"{name}={value}: must be a finite number, {allowed}")


def number(name: str, value: Any, allowed: str, is_allowed: Callable[[Any], bool]) -> None:
    """A finite number for which is_allowed holds, said in words by allowed; a bool is none.

    Raises ValueError for another value.
    """
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not real or not math.isfinite(value) or not is_allowed(value):
        raise UsageError(f"{name}={shown(value)}: must be a number {allowed}")


def probability(name: str, value: Any) -> None:
    """A number between 0 and 1. Raises ValueError for another value."""
    number(name, value, "between 0 and 1", lambda p: 0 <= p <= 1)


def fraction(name: str, value: Any) -> None:
    """A number above 0 and below 1. Raises ValueError for another value."""
    number(name, value, "above 0 and below 1", lambda p: 0 < p < 1)


def each(name: str, values: Any, check: Callable[[str, Any], None]) -> None:
    """A list, tuple or array [n], n >= 1, of which each element passes check(name, value).

    Raises ValueError for another value.
    """
    if not (isinstance(values, Sequence) or np.ndim(values) == 1) or len(values) == 0:
        raise UsageError(f"{name}={shown(values)}: must be a list of numbers, at least one")
    for index, value in enumerate(values):
        check(f"{name}[{index}]", value)


def one_of(name: str, value: Any, allowed: Collection[str]) -> None:
    """Raises ValueError unless `value` is one of `allowed`."""
    if value not in allowed:
        raise UsageError(f"{name}={value!r}: must be one of {', '.join(allowed)}")


def machine_bytes() -> int:
    """The memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def memory(name: str, value: Any, needed: int, there: int | None = None, what: str = "") -> None:
    """Raises ValueError if `needed` bytes are more than `there`, by default in this machine.

    what: needs them, in words, if that is not plain.
    """
    there = machine_bytes() if there is None else there
    if needed > there:
        raise UsageError(
            f"{name}={value}: needs {_gigabytes(needed)}{what}, must fit into "
            f"{_gigabytes(there)} of memory"
        )


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:,.1f} GB"


def integers(
    name: str,
    values: Any,
    low: int | None = None,
    high: int | None = None,
    *,
    ndim: int | None = 1,
    may_be_empty: bool = False,
) -> np.ndarray:
    """Integers in low..high, of `ndim` axes, as a NumPy array of int64; None is no bound.

    Raises ValueError for other values.
    """
    array = np.asarray(values)
    if array.size == 0 and not may_be_empty:
        raise UsageError(f"{name}={array.dtype} {array.shape}: must hold at least one integer")
    if (array.size and array.dtype.kind not in "iu") or ndim not in (None, array.ndim):
        axes = "" if ndim is None else f" with ndim={ndim}"
        raise UsageError(f"{name}={array.dtype} {array.shape}: must be integers{axes}")
    outside = np.zeros(array.shape, bool)
    if low is not None:
        outside |= array < low
    if high is not None:
        outside |= array > high
    if outside.any():
        first = tuple(np.argwhere(outside)[0].tolist())
        place = str(list(first)) if first else ""
        allowed = f"at least {low}" if high is None else f"in {low}..{high}"
        raise UsageError(f"{name}{place}={array[first]}: must be {allowed}")
    return array.astype(np.int64, copy=False)


def federation(federation: Federation) -> None:
    """Raises ValueError unless every client's rows are rows of the examples."""
    data, order, start, size = federation
    lengths = {leaf.shape[0] for leaf in jax.tree.leaves(data)}
    if len(lengths) != 1:
        raise UsageError(f"data: x and y must be of one length, not {sorted(lengths)}")
    if order.ndim != 1:
        raise UsageError(f"order {order.shape}: must be [L]")
    if start.ndim != 1 or start.shape != size.shape:
        raise UsageError(f"start {start.shape} and size {size.shape}: must both be [C]")
    if not is_concrete((order, start, size)):
        return
    rows, first, count = (np.asarray(array) for array in (order, start, size))
    (num_examples,) = lengths
    if rows.size and not (rows.min() >= 0 and rows.max() < num_examples):
        raise UsageError(
            f"order: holds {rows.min()}..{rows.max()}, must be rows in 0..{num_examples - 1}"
        )
    end = first.astype(np.int64) + count
    wrong = np.flatnonzero((first < 0) | (count < 0) | (end > len(rows)))
    if len(wrong):
        who = wrong[0]
        raise UsageError(
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
        raise UsageError(
            f"schedule: who {who.shape}, present {present.shape} and delay {delay.shape}: "
            "must all be [T, S]"
        )
    outside = present & ((who < 0) | (who >= num_clients))
    if outside.any():
        raise UsageError(
            f"schedule: round {np.argwhere(outside)[0][0]} names client {who[outside][0]}: "
            f"must be in 0..{num_clients - 1}"
        )
    # Absent slots name nobody, each another one.
    named = np.sort(np.where(present, who, -1 - np.arange(who.shape[1])), axis=1)
    twice = (np.diff(named, axis=1) == 0).any(1)
    if twice.any():
        raise UsageError(
            f"schedule: round {np.flatnonzero(twice)[0]} names a client twice: must be once"
        )
    late = present & ((delay < 0) | (delay >= history))
    if late.any():
        raise UsageError(
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
            raise UsageError(f"{name}: has shapes {shapes}, must have those of {first}, {expected}")
