"""Checks of arguments: a wrong one raises `UsageError`, whose message is one line; tracers pass."""

import numbers
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedjax_inv import types
from fedjax_inv.types import Tree


class UsageError(ValueError):
    """A request that cannot be met; the message says in one line what the caller must change.

        UsageError("alpha", -1.0, "must be above 0")
        UsageError("alpha", 0.1, "must be higher, or {clients} lower", clients=("num_clients", 50))

    Args:
      argument: the name of the wrong argument, or a path; or the message, if nothing else is given.
      value: its value; ... if the message shows none.
      allowed: which values are allowed, with names in braces for others, each (argument, value).
    """

    def __init__(
        self, argument: str, value: Any = ..., allowed: str = "", **others: tuple[str, Any]
    ) -> None:
        super().__init__(argument, value, allowed)
        self.argument = argument
        self.value = value
        self.allowed = allowed
        self.others = others

    def __str__(self) -> str:
        return self.line(_assigned)

    def line(self, assigned: Callable[[str, Any], str]) -> str:
        """Return the message; `assigned(argument, value)` writes an argument, or its flag."""
        if not self.allowed:
            return self.argument
        others = {name: assigned(*other) for name, other in self.others.items()}
        allowed = self.allowed.format(**others) if others else self.allowed
        return f"{assigned(self.argument, self.value)}: {allowed}"


def _assigned(argument: str, value: Any) -> str:
    return argument if value is ... else f"{argument}={shown(value)}"


def shown(value: Any) -> str:
    """Return a value as text of one line: an array as dtype and shape, a string in quotes."""
    if getattr(value, "ndim", 0) > 0:
        return f"{value.dtype} {value.shape}"
    return repr(value) if isinstance(value, str) else " ".join(str(value).split())


def one_line(error: Exception) -> str:
    """Return an error's message in one line of 400 characters, or its type if it has none."""
    text = " ".join(str(error).split())
    return (text if len(text) <= 400 else f"{text[:400]} ...") or type(error).__name__


def is_concrete(tree: Tree) -> bool:
    """Return whether no leaf is a tracer, so that all values are known."""
    return not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))


def is_known_zero(number: Any) -> bool:
    """Return whether a number is 0, and no tracer."""
    return is_concrete(number) and float(number) == 0


def is_finite(value: Any) -> bool:
    """Return whether a number is finite in float32; tracers, and what is no number, count as so."""
    is_one = isinstance(value, float) or getattr(value, "shape", None) == ()
    if not is_one or not is_concrete(value):
        return True
    return abs(float(value)) <= float(np.finfo(np.float32).max)


def record(name: str, value: Any, kind: type, such_as: str = "") -> None:
    """Check that a value is of a type, such as `Model`."""
    if not isinstance(value, kind):
        text = f"is of type {type(value).__name__}, must be a {kind.__name__}{such_as}"
        raise UsageError(name, ..., text)


def regular(path: str | Path) -> Path:
    """Return the path of a file; ValueError for others, as a pipe waits for its writer."""
    path = Path(path).expanduser()
    if not path.is_file():
        raise ValueError(f"{path} is no file")
    return path


def function(name: str, value: Any) -> None:
    """Check that a value can be called."""
    if not callable(value):
        raise UsageError(name, ..., f"is of type {type(value).__name__}, must be a function")


def truth(name: str, value: Any) -> None:
    """Check that a value is True or False."""
    if not isinstance(value, bool | np.bool_):
        raise UsageError(name, value, "must be True or False")


def integer(
    name: str, value: Any, low: int = 1, high: int | None = None, meaning: str = ""
) -> None:
    """Check that a value is an integer from `low` to `high`, which `meaning` explains."""
    is_integer = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not is_integer or value < low or value > (2**63 - 1 if high is None else high):
        allowed = f"of at least {low}" if high is None else f"in {low}..{high}"
        raise UsageError(name, value, f"must be an integer {allowed}{meaning}")


def integers(name: str, values: Any, low: int, high: int) -> np.ndarray:
    """Return values as an array; raise UsageError unless they are integers from `low` to `high`."""
    array = np.asarray(values)
    if array.size and array.dtype.kind not in "iu":
        raise UsageError(name, array, "must be integers")
    inside = (array >= low) & (array <= high)
    if not inside.all():
        raise UsageError(name, array[~inside][0], f"must be in {low}..{high}")
    return array


def real(name: str, value: Any, lowest: float = 0.0, highest: float = np.inf) -> None:
    """Check that a value is a finite number in [lowest, highest], and no bool."""
    if not is_concrete(value):
        return
    try:
        fits = is_finite(float(value)) and lowest <= float(value) <= highest
    except (TypeError, ValueError, OverflowError):
        fits = False
    if not fits or isinstance(value, bool | str):
        raise UsageError(name, value, f"must be a finite number in [{lowest:g}, {highest:g}]")
    if float(value) != 0 == np.float32(value):
        raise UsageError(name, value, "must not be 0 in float32, as smaller numbers than 1e-45 are")


def positive(name: str, value: Any) -> None:
    """Check that a value is a finite number above 0."""
    real(name, value)
    if is_known_zero(value):
        raise UsageError(name, value, "must be above 0")


def one_of(name: str, value: Any, allowed: Collection[str]) -> None:
    """Check that a value is one of the allowed names."""
    if not isinstance(value, str) or value not in allowed:
        raise UsageError(name, value, f"must be one of {', '.join(allowed)}")


def federation(federation: types.Federation) -> None:
    """Check that every client's rows are rows of the examples."""
    data, order, start, size = federation
    if not is_concrete((order, start, size)):
        return
    num_examples = len(jax.tree.leaves(data)[0])
    rows = np.asarray(order)
    first = np.asarray(start, np.int64)
    count = np.asarray(size)
    if rows.size and not (rows.min() >= 0 and rows.max() < num_examples):
        text = f"holds {rows.min()}..{rows.max()}, must be rows in 0..{num_examples - 1}"
        raise UsageError("order", ..., text)
    for client in np.flatnonzero((first < 0) | (count < 0) | (first + count > len(rows)))[:1]:
        text = f"must lie, with size {count[client]}, in the {len(rows)} rows of order"
        raise UsageError(f"start[{client}]", first[client], text)
