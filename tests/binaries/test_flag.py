"""What is said of flags: in their own words, whoever finds the fault."""

from typing import Any

import numpy as np
import pytest

from fedjax_inv.checks import UsageError
from fedjax_inv_experiments.flags.flag import (
    flag_error,
    in_flags,
    shown,
    value_in,
)

NAMES = {"flips": "flips", "num_clients": "clients", "held_out": "held_out", "play": "set=play"}


def error(argument: str, value: Any = ..., **others: tuple[str, Any]) -> UsageError:
    return UsageError(
        argument, value, "must be" + "".join(f" {{{name}}}" for name in others), **others
    )


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (error("flips[1]", np.nan), "--flips=nan: must be, with --kind=a"),
        (error("flips", [0.2, 0.1]), "--flips=0.2,0.1: must be, with --kind=a"),
        (error("flips"), "--flips: must be, with --kind=a"),
        (error("play", "turns"), "--set=play=turns: must be, with --kind=a"),
        (error("x", 1, n=("num_clients", 5)), "--kind=a: x=1: must be --clients=5"),
        (error("x", "y"), "--kind=a: x='y': must be"),
        (error("--flips=1"), "--flips=1: must be, with --kind=a"),
        (UsageError("must be another"), "--kind=a: must be another"),
        (ValueError("flips=1"), "--kind=a: flips=1"),
    ],
)
def test_arguments_are_called_as_the_flags_that_set_them(error: Exception, expected: str) -> None:
    assert str(in_flags(error, "--kind=a", NAMES)) == expected
    if not expected.removeprefix("--kind=a").startswith(("--", ": x=1")):
        assert str(in_flags(error, "--kind=a", {})) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (True, "true"),
        (None, "none"),
        (0.1, "0.1"),
        (2.0, "2"),
        (0.1 + 0.2, "0.30000000000000004"),
        (np.nan, "nan"),
        (("a", "b"), "a,b"),
        ((1, 0.5), "1,0.5"),
        ("", ""),
    ],
)
def test_values_are_shown_as_a_command_line_has_them(value: Any, expected: str) -> None:
    assert shown(value) == expected
    assert str(flag_error("x", value, "must be y")) == f"--x={expected}: must be y"


def test_a_number_has_the_digits_0_to_9() -> None:
    whole, real = ("0", "-3", "+3", "007"), ("3.", ".5", "1e3", "-1.5E-3", "inf", "-Infinity")
    assert [value_in(text, int) for text in whole] == [0, -3, 3, 7]
    assert [value_in(text, float) for text in (*whole, *real)] == list(map(float, (*whole, *real)))
    assert np.isnan(value_in("nan", float))
    for text in ("", "1_0", "٣", "²", " 1", "1 ", "0x1", "1e", "e1", ".", "--1", "1.0.0", "1\n"):
        for kind in (int, float):
            with pytest.raises(ValueError, match="is no number"):
                value_in(text, kind)
