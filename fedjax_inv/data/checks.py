"""What wrong arguments raise: one line with the argument's name, its value and what is allowed."""

import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


def shown(value: Any) -> str:
    """A value in one line: dtype and shape of an array, strings in quotes."""
    if getattr(value, "ndim", 0) > 0:
        return f"{value.dtype} {value.shape}"
    return repr(value) if isinstance(value, str) else str(value)


def integer(name: str, value: Any, low: int, high: int | None = None, meaning: str = "") -> None:
    """A whole number that is at least low and, unless it is None, at most high; a bool is none.

    meaning: what the bounds are, in words that go after them. Raises ValueError for another value.
    """
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not whole or value < low or (high is not None and value > high):
        allowed = f"of at least {low}" if high is None else f"in {low}..{high}"
        raise ValueError(f"{name}={shown(value)}: must be an integer {allowed}{meaning}")


def number(name: str, value: Any, allowed: str, is_allowed: Callable[[Any], bool]) -> None:
    """A finite number for which is_allowed holds, said in words by allowed; a bool is none.

    Raises ValueError for another value.
    """
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not real or not math.isfinite(value) or not is_allowed(value):
        raise ValueError(f"{name}={shown(value)}: must be a number {allowed}")


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
        raise ValueError(f"{name}={shown(values)}: must be a list of numbers, at least one")
    for index, value in enumerate(values):
        check(f"{name}[{index}]", value)


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
    if array.dtype.kind not in "iu" or ndim not in (None, array.ndim):
        axes = "" if ndim is None else f" with ndim={ndim}"
        raise ValueError(f"{name}={array.dtype} {array.shape}: must be integers{axes}")
    if array.size == 0 and not may_be_empty:
        raise ValueError(f"{name}={array.dtype} {array.shape}: must hold at least one integer")
    outside = np.zeros(array.shape, bool)
    if low is not None:
        outside |= array < low
    if high is not None:
        outside |= array > high
    if outside.any():
        first = tuple(np.argwhere(outside)[0].tolist())
        place = str(list(first)) if first else ""
        allowed = f"at least {low}" if high is None else f"in {low}..{high}"
        raise ValueError(f"{name}{place}={array[first]}: must be {allowed}")
    return array.astype(np.int64, copy=False)
