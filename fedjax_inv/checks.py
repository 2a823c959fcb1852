"""Checks of arguments: a wrong one raises `UsageError`, whose message is one line.

Values inside a compiled program are tracers and cannot be checked, so `jit` comes after the checks.
"""

import functools
import inspect
import math
import numbers
import os
import types
import typing
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
      argument: the name of the wrong argument, or a path.
      value: its value; ... (Ellipsis) if the message shows none.
      allowed: which values are allowed. Names in braces stand for entries of `others`, if there
        are any.
      others: by the names in `allowed`, other arguments that the message names, as
        (argument, value).
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
        """Return the message with arguments written by `assigned`.

        A binary passes a function that writes its flags in place of the arguments.

        Args:
          assigned: (argument, value) -> text such as "name=value"; a value of ... is not shown.

        Returns:
          One line.
        """
        if not self.allowed:  # a whole sentence
            return self.argument
        others = {name: assigned(*other) for name, other in self.others.items()}
        allowed = self.allowed.format(**others) if others else self.allowed
        return f"{assigned(self.argument, self.value)}: {allowed}"


def _assigned(argument: str, value: Any) -> str:
    return argument if value is ... else f"{argument}={shown(value)}"


def is_concrete(tree: Tree) -> bool:
    """Return whether no leaf is a tracer, so that all values are known."""
    return not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))


def is_known_zero(number: Any) -> bool:
    """Return whether a number is 0, and no tracer."""
    return is_concrete(number) and float(number) == 0


_BLOCK = 2**20  # numbers that are checked at once


def holds_finite(array: Any) -> bool:
    """Return whether an array's numbers are finite in the type in which JAX keeps them."""
    if not jnp.issubdtype(array.dtype, jnp.floating):
        return True
    if isinstance(array, jax.Array):
        return bool(jnp.isfinite(array).all())
    kept: Any = jax.dtypes.canonicalize_dtype(array.dtype)
    rows = np.atleast_1d(array)
    # In blocks, as the examples may be mapped from a file that is larger than memory.
    step = max(1, _BLOCK // max(1, rows[:1].size))
    blocks = (rows[start : start + step] for start in range(0, len(rows), step))
    with np.errstate(over="ignore"):  # too large numbers become infinite
        return all(np.isfinite(block.astype(kept, copy=False)).all() for block in blocks)


def shown(value: Any) -> str:
    """Return a value as text of one line: an array as dtype and shape, a string in quotes."""
    if getattr(value, "ndim", 0) > 0:
        return f"{value.dtype} {value.shape}"
    return repr(value) if isinstance(value, str) else " ".join(str(value).split())


_LONGEST = 400  # the most characters of another library's message


def one_line(error: Exception) -> str:
    """Return an error's message in one line, or the error's type if it has no message."""
    text = " ".join(str(error).split())
    if len(text) > _LONGEST:
        text = f"{text[:_LONGEST].rpartition(' ')[0]} ..."
    return text or type(error).__name__


def _wrong_type(name: str, value: Any, allowed: str) -> UsageError:
    """Return the error for a wrong type, which shows plain values, and the types of others."""
    if value is None or isinstance(value, bool | str | numbers.Number):
        return UsageError(name, value, allowed)
    return UsageError(name, ..., f"is of type {type(value).__name__}, {allowed}")


def record(name: str, value: Any, kind: type) -> None:
    """Check that a value is of a type, such as `Model` or `Work`.

    The fields of a record of `types` that must be functions or records are checked, too.

    Args:
      name: the argument's name.
      value: the value to check.
      kind: the type.

    Raises:
      UsageError: for a value of another type.
    """
    if not isinstance(value, kind):
        article = "an" if kind.__name__[0] in "AEIO" else "a"
        raise _wrong_type(name, value, f"must be {article} {kind.__name__}")
    for field, inner, may_be_none in _checked_fields(kind):
        part = getattr(value, field)
        if inner is None and not (part is None and may_be_none):
            function(f"{name}.{field}", part)
        elif inner is not None and hasattr(inner, "_fields"):
            record(f"{name}.{field}", part, inner)
        elif inner is not None:
            record(f"{name}.{field}", part, tuple)
            for index, each in enumerate(part):
                record(f"{name}.{field}[{index}]", each, typing.get_args(inner)[0])


@functools.cache
def _checked_fields(kind: type) -> list[tuple[str, Any, bool]]:
    """Return (name, type, whether it may be None) of the fields of a named tuple to check.

    The type is that of a named tuple, tuple[a named tuple, ...], or None for a function.
    """
    fields: list[tuple[str, Any, bool]] = []
    of_protocol = hasattr(kind, "_fields") and kind.__module__ == Cohort.__module__
    hints = typing.get_type_hints(kind) if of_protocol else {}
    for field, hint in hints.items():
        is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
        options = typing.get_args(hint) if is_union else (hint,)
        of = typing.get_args(hint)[0] if typing.get_origin(hint) is tuple else hint
        if hasattr(of, "_fields"):
            fields.append((field, hint, False))
        elif any(map(_is_function, options)):
            fields.append((field, None, type(None) in options))
    return fields


def _is_function(hint: Any) -> bool:
    return typing.get_origin(hint) is Callable or getattr(hint, "_is_protocol", False)


def function(name: str, value: Any, *takes: str, form: str = "") -> None:
    """Check that a value can be called.

    Args:
      name: the argument's name.
      value: the value to check.
      *takes: the names of the arguments that it gets, by position; without names any will do.
      form: text appended to the message, such as " params -> a scalar".

    Raises:
      UsageError: for a value that is no function, or takes other arguments.
    """
    if not callable(value):
        raise _wrong_type(name, value, f"must be a function{form}")
    if not takes:
        return
    try:
        signature = inspect.signature(value)
    except ValueError:  # as of some functions of C
        return
    try:
        signature.bind(*takes)
    except TypeError as error:
        raise UsageError(name, ..., f"must take {' and '.join(takes)} ({error})") from None


def boolean(name: str, value: Any) -> None:
    """Check that a value is True or False, else raise UsageError; 0 and 1 are neither."""
    if not isinstance(value, bool | np.bool_):
        raise _wrong_type(name, value, "must be True or False")


def optimizer(name: str, value: Any) -> None:
    """Check that a value is an optax optimizer, else raise UsageError."""
    if not all(callable(getattr(value, part, None)) for part in ("init", "update")):
        raise _wrong_type(name, value, "must be an optax optimizer, such as optax.sgd(0.1)")


def array(name: str, value: Any) -> None:
    """Check that a value is a real array, its shape or a tracer, else raise UsageError."""
    if not (hasattr(value, "shape") and hasattr(value, "dtype")):
        raise _wrong_type(name, value, "must be an array")
    if isinstance(value.dtype, np.dtype) and value.dtype.kind in "cOSUMm":
        raise UsageError(name, value, "must be an array of real numbers")


def for_texts(name: str, value: Any) -> str:
    """Return the end of a message that refuses an array: how texts become integers, else ""."""
    try:
        holds_texts = np.asarray(value).dtype.kind in "OSU"
    except (TypeError, ValueError):  # a tracer, lists of different lengths
        holds_texts = False
    if not holds_texts:
        return ""
    return f"; for texts: np.unique({name}, return_inverse=True)[1]"


def whole(name: str, value: Any) -> None:
    """Check that a value is one integer: an int, an array [] or a tracer, else raise UsageError."""
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return
    is_array = hasattr(value, "shape") and hasattr(value, "dtype") and value.shape == ()
    if not is_array or not jax.dtypes.issubdtype(value.dtype, np.integer):
        raise _wrong_type(name, value, "must be an integer")


def key(name: str, value: Any) -> None:
    """Check that a value is one random key of JAX, of the new or of the old kind.

    Args:
      name: the argument's name.
      value: the value to check; it may be a tracer.

    Raises:
      UsageError: for any other value.
    """
    allowed = "must be one random key, such as jax.random.key(0)"
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is None or dtype is None:
        raise _wrong_type(name, value, allowed)
    is_new = jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)
    if shape != () if is_new else (len(shape) != 1 or dtype != np.uint32):
        raise UsageError(name, ..., f"is {dtype} {tuple(shape)}, {allowed}")


def integer(
    name: str, value: Any, low: int = 1, high: int | None = None, meaning: str = ""
) -> None:
    """Check that a value is an integer between two bounds; a bool is not one.

    Args:
      name: the argument's name.
      value: the value to check.
      low: the smallest allowed value.
      high: the largest allowed value; None for no bound.
      meaning: text appended to the bounds in the message.

    Raises:
      UsageError: for any other value.
    """
    is_integer = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not is_integer or value < low or (high is not None and value > high):
        allowed = f"of at least {low}" if high is None else f"in {low}..{high}"
        raise UsageError(name, value, f"must be an integer {allowed}{meaning}")
    if value >= 2**63:
        raise UsageError(name, value, "must be an integer below 2**63")


def real(name: str, value: Any, lowest: float = 0.0, highest: float = np.inf) -> None:
    """Check that a value is a finite number in [lowest, highest]; tracers pass.

    Args:
      name: the argument's name.
      value: the value to check: a number or an array [] of one.
      lowest: the smallest allowed value.
      highest: the largest allowed value.

    Raises:
      UsageError: for any other value, and for a bool.
    """
    if not is_concrete(value):
        return
    allowed = f", at least {lowest:g}" if highest == np.inf else f", in [{lowest:g}, {highest:g}]"
    if lowest == -highest == -np.inf:
        allowed = ""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = np.nan
    if isinstance(value, bool | str) or not (is_finite(number) and lowest <= number <= highest):
        raise UsageError(name, value, f"must be a finite number{allowed}")


def positive(name: str, value: Any) -> None:
    """Check that a value is a finite number above 0, else raise UsageError; tracers pass."""
    real(name, value)
    if is_known_zero(value):
        raise UsageError(name, value, "must be above 0")


def is_finite(value: Any) -> bool:
    """Return whether a number is finite in float32, in which programs compute.

    Args:
      value: a number, or an array [] of one; tracers and whatever is no number count as finite.
    """
    is_array = hasattr(value, "dtype") and getattr(value, "shape", None) == ()
    of_floats = is_array and jax.dtypes.issubdtype(value.dtype, np.floating)
    if not (isinstance(value, float) or of_floats) or not is_concrete(value):
        return True
    return abs(float(value)) <= float(np.finfo(np.float32).max)


def number(name: str, value: Any, allowed: str, is_allowed: Callable[[Any], bool]) -> None:
    """Check that a value is a finite number with a property; a bool is not a number.

    Args:
      name: the argument's name.
      value: the value to check.
      allowed: the property in words, such as "above 0"; the message puts "must be a number" before.
      is_allowed: whether a number has the property.

    Raises:
      UsageError: for any other value.
    """
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not is_allowed(value):
        raise UsageError(name, value, f"must be a number {allowed}")


def probability(name: str, value: Any) -> None:
    """Check that a value is a number from 0 to 1, else raise UsageError."""
    number(name, value, "between 0 and 1", lambda p: 0 <= p <= 1)


def fraction(name: str, value: Any) -> None:
    """Check that a value is a number above 0 and below 1, else raise UsageError."""
    number(name, value, "above 0 and below 1", lambda p: 0 < p < 1)


def each(name: str, values: Any, check: Callable[[str, Any], None]) -> None:
    """Check each element of a list, a tuple or an array [n] with n >= 1.

    Args:
      name: the argument's name.
      values: the values to check.
      check: called as check(name, value), with a name such as "values[0]".

    Raises:
      UsageError: for anything that is not such a list, and as `check` does.
    """
    is_list = isinstance(values, Sequence) and not isinstance(values, bytes)
    if not (is_list or getattr(values, "ndim", 0) == 1) or len(values) == 0:
        raise UsageError(name, values, "must be a list of numbers, at least one")
    for index, value in enumerate(values):
        check(f"{name}[{index}]", value)


def one_of(name: str, value: Any, allowed: Collection[str]) -> None:
    """Check that a value is one of the allowed names, else raise UsageError."""
    if not isinstance(value, str) or value not in allowed:
        raise UsageError(name, value, f"must be one of {', '.join(allowed)}")


def machine_bytes() -> int:
    """Return the size of this machine's memory in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def memory(name: str, value: Any, needed: int, there: int | None = None, what: str = "") -> None:
    """Check that arrays fit into memory.

    Args:
      name: the argument that decides how large the arrays are.
      value: its value; ... if the message shows none.
      needed: the size of the arrays in bytes.
      there: the size of the memory in bytes, by default this machine's.
      what: text appended to the needed size in the message, such as " for images".

    Raises:
      UsageError: if more is needed than there is.
    """
    there = machine_bytes() if there is None else there
    if needed > there:
        raise UsageError(
            name,
            value,
            f"needs {_gigabytes(needed)}{what}, must fit into {_gigabytes(there)} of memory",
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
    """Check that values are integers between two bounds.

    Args:
      name: the argument's name.
      values: the values to check: an array, or nested lists.
      low: the smallest allowed value; None for no bound.
      high: the largest allowed value; None for no bound.
      ndim: the number of axes; None for any.
      may_be_empty: whether there may be no value.

    Returns:
      The values as an int64 array.

    Raises:
      UsageError: for any other values.
    """
    try:
        array = np.asarray(values)
    except (TypeError, ValueError):
        if not is_concrete(values):
            raise
        raise _wrong_type(name, values, "must be integers") from None
    if array.size == 0 and not may_be_empty:
        raise UsageError(name, array, "must hold at least one integer")
    if (array.size and array.dtype.kind not in "iu") or ndim not in (None, array.ndim):
        axes = "" if ndim is None else f" with ndim={ndim}"
        raise UsageError(name, array, f"must be integers{axes}")
    is_low = array.size and low is not None and array.min() < low
    is_high = array.size and high is not None and array.max() > high
    if is_low or is_high:
        inside = (low is None or array >= low) & (high is None or array <= high)
        first = tuple(np.argwhere(~inside)[0].tolist())
        place = str(list(first)) if first else ""
        allowed = f"at least {low}" if high is None else f"in {low}..{high}"
        allowed = f"at most {high}" if low is None else allowed
        raise UsageError(f"{name}{place}", array[first], f"must be {allowed}")
    return array.astype(np.int64, copy=False)


def federation(federation: Federation) -> None:
    """Check that every client's rows are rows of the examples.

    The values of tracers are not checked.

    Args:
      federation: the federation: M examples, order [L], start [C] and size [C].

    Raises:
      UsageError: if a client's row does not exist, or if arrays have other shapes.
    """
    record("federation", federation, Federation)
    data, order, start, size = federation
    for name, leaf in {"order": order, "start": start, "size": size}.items():
        array(name, leaf)
        if leaf.dtype not in (np.int32, np.int64):
            raise UsageError(name, leaf, "must be int32 or int64")
    for leaf in jax.tree.leaves(data):
        array("data", leaf)
    lengths = {leaf.shape[0] if leaf.shape else 0 for leaf in jax.tree.leaves(data)}
    if len(lengths) != 1:
        raise UsageError("data", ..., f"x and y must be of one length, not {sorted(lengths)}")
    if order.ndim != 1:
        raise UsageError("order", order, "must be [L]")
    if start.ndim != 1 or start.shape != size.shape:
        raise UsageError("start", start, "must be [C], and so must {size}", size=("size", size))
    is_shape = any(isinstance(each, jax.ShapeDtypeStruct) for each in (order, start, size))
    if is_shape or not is_concrete((order, start, size)):
        return
    rows, first, count = (np.asarray(array) for array in (order, start, size))
    (num_examples,) = lengths
    if rows.size and not (rows.min() >= 0 and rows.max() < num_examples):
        found = f"holds {rows.min()}..{rows.max()}"
        raise UsageError("order", ..., f"{found}, must be rows in 0..{num_examples - 1}")
    end = first.astype(np.int64) + count
    wrong = np.flatnonzero((first < 0) | (count < 0) | (end > len(rows)))
    if len(wrong):
        client = wrong[0]
        raise UsageError(
            f"start[{client}]",
            first[client],
            f"must lie, with {{size}}, in the {len(rows)} rows of order",
            size=(f"size[{client}]", count[client]),
        )


def cohort(name: str, cohort: Cohort) -> None:
    """Check that a cohort or a schedule holds arrays of the right types, else raise UsageError."""
    record(name, cohort, Cohort)
    for field, leaf, kind in zip(
        Cohort._fields, cohort, (np.integer, np.bool_, np.integer), strict=True
    ):
        array(f"{name}.{field}", leaf)
        if not jax.dtypes.issubdtype(leaf.dtype, kind):
            allowed = "True or False" if kind is np.bool_ else "integers"
            raise UsageError(f"{name}.{field}", leaf, f"must be {allowed}")


def schedule(schedule: Cohort, num_clients: int, history: int) -> None:
    """Check that a schedule fits a run.

    A client may be present once in a round, with a delay in 0..H - 1. The values of tracers are not
    checked.

    Args:
      schedule: who, present and delay, each [T, S].
      num_clients: C, the number of clients.
      history: H, the number of broadcasts that the run keeps.

    Raises:
      UsageError: for a schedule that does not fit.
    """
    cohort("schedule", schedule)
    if schedule.who.shape[-1:] == (0,):
        raise UsageError("schedule", ..., "has no slots, must have at least one")
    if not is_concrete(schedule):
        return
    who, present, delay = (np.asarray(array) for array in schedule)
    if who.ndim != 2 or not who.shape == present.shape == delay.shape:
        shapes = f"who {who.shape}, present {present.shape} and delay {delay.shape}"
        raise UsageError("schedule", ..., f"{shapes}: must all be [T, S]")
    outside = present & ((who < 0) | (who >= num_clients))
    if outside.any():
        found = f"round {np.argwhere(outside)[0][0]} names client {who[outside][0]}"
        raise UsageError("schedule", ..., f"{found}: must be in 0..{num_clients - 1}")
    # Absent slots name no client: each gets a negative number of its own.
    named = np.sort(np.where(present, who, -1 - np.arange(who.shape[1])), axis=1)
    twice = (np.diff(named, axis=1) == 0).any(1)
    if twice.any():
        found = f"round {np.flatnonzero(twice)[0]} names a client twice"
        raise UsageError("schedule", ..., f"{found}: must be once")
    late = present & ((delay < 0) | (delay >= history))
    if late.any():
        raise UsageError(
            "schedule",
            ...,
            f"a delay of {delay[late][0]}: must be in 0..{history - 1}, as the run keeps "
            "{history} broadcasts",
            history=("history", history),
        )


def same_shapes(**trees: Tree) -> None:
    """Check that trees have the structure and the shapes of the first one.

    Args:
      **trees: the trees by their names.

    Raises:
      UsageError: for the first tree that differs.
    """
    (first, expected), *others = (
        (name, jax.tree.map(jnp.shape, tree)) for name, tree in trees.items()
    )
    for name, shapes in others:
        if shapes != expected:
            raise UsageError(
                name, ..., f"has shapes {shapes}, must have those of {first}, {expected}"
            )


def same_leaves(name: str, found: Tree, expected: Tree, source: str) -> None:
    """Check that a tree has the structure of another, and leaves of the same shapes and dtypes.

    Args:
      name: the function that returned the tree.
      found: the tree, of arrays or of what `jax.eval_shape` returns for them.
      expected: the other tree.
      source: where the other tree is from, such as "as init_server does".

    Raises:
      UsageError: for the first leaf that differs.
    """
    # JAX's own types: a NumPy leaf of float64 is float32 in a program, unless x64 is on.
    found, expected = jax.eval_shape(lambda: (found, expected))
    leaves, others = (
        {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(t)}
        for t in (found, expected)
    )
    for at in dict.fromkeys([*others, *leaves]):
        now, before = (_typed(tree[at]) if at in tree else "nothing" for tree in (leaves, others))
        if now != before:
            place = at and f" at {at}"
            text = f"returns {now}{place}, must return {before}, {source}"
            raise UsageError(name, ..., text)
    structure, wanted = (str(jax.tree.structure(each)) for each in (found, expected))
    if structure != wanted:
        text = f"returns {structure}, must return {wanted}, {source}"
        raise UsageError(name, ..., text)


def _typed(leaf: jax.ShapeDtypeStruct) -> str:
    """A leaf's dtype and shape as JAX writes them, such as float32[3,4]."""
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"
