"""Which cases of a test are left to `make test-all`."""

from collections.abc import Iterable
from typing import Any

import pytest


def after(number: int, cases: Iterable[Any]) -> list[Any]:
    """The cases of `parametrize`, those after the first `number` marked slow.

    A tuple holds a value for each argument; other values are of one argument.
    """
    marked = []
    for place, case in enumerate(cases):
        values = case if isinstance(case, tuple) else (case,)
        marked.append(pytest.param(*values, marks=[pytest.mark.slow] if place >= number else []))
    return marked
