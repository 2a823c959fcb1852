"""Checks of what the factories are given, each with an error of one line."""

from collections.abc import Collection, Sequence
from numbers import Integral
from typing import Any


def _is_integer(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_integer(name: str, value: Any, low: int, high: int | None = None) -> None:
    """Raises ValueError unless `value` is an integer from `low` to `high`."""
    if not _is_integer(value) or value < low or (high is not None and value > high):
        allowed = f"at least {low}" if high is None else f"between {low} and {high}"
        raise ValueError(f"{name}={value!r}: must be {allowed}, an integer")


def check_widths(widths: Any, divisor: int = 1) -> None:
    """Raises ValueError unless `widths` are positive integers that `divisor` divides."""
    several = isinstance(widths, Sequence) and len(widths) > 0
    if not several or any(not _is_integer(w) or w < 1 or w % divisor for w in widths):
        kind = "positive integer" + (f" multiple of {divisor}" if divisor > 1 else "")
        raise ValueError(f"widths={widths!r}: must be one or several, each a {kind}")


def check_name(argument: str, name: Any, allowed: Collection[str]) -> None:
    """Raises ValueError unless `name` is one of the allowed ones."""
    if not isinstance(name, str) or name not in allowed:
        raise ValueError(f"{argument}={name!r}: must be one of {', '.join(allowed)}")
