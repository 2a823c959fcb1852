"""The checks of arguments: which federations and schedules pass."""

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fedjax_inv import checks, schedules
from fedjax_inv.types import Cohort, Examples, Federation


def passes(check: Any, *arguments: Any) -> bool:
    """Whether a check lets its arguments pass."""
    try:
        check(*arguments)
    except ValueError:
        return False
    return True


@given(
    rows=st.lists(st.integers(-2, 5), max_size=6),
    clients=st.lists(st.tuples(st.integers(-1, 7), st.integers(-1, 7)), min_size=1, max_size=3),
)
def test_a_federation_passes_iff_its_rows_are_rows_of_examples(rows, clients) -> None:
    data = Examples(np.zeros((5, 2)), np.zeros(5))
    start, size = np.array(clients).T
    fits = all(
        min(begin, count) >= 0 and begin + count <= len(rows) for begin, count in clients
    ) and all(0 <= row < 5 for row in rows)
    federation = Federation(data, np.array(rows, np.int32), start, size)
    assert passes(checks.federation, federation) == fits


def naive(who: np.ndarray, present: np.ndarray, delay: np.ndarray, clients: int, kept: int) -> bool:
    """Whether a schedule fits, by a loop; somebody must be there in some round."""
    if not present.any():
        return False
    for round_ in zip(who, present, delay, strict=True):
        named = [(client, late) for client, here, late in zip(*round_, strict=True) if here]
        if len({client for client, _ in named}) < len(named):
            return False
        if any(not (0 <= client < clients and 0 <= late < kept) for client, late in named):
            return False
    return True


CELL = st.tuples(st.sampled_from([-1, 0, 1, 2, 2, 3, 4]), st.booleans(), st.integers(-1, 2))


@given(
    table=st.lists(st.lists(CELL, min_size=3, max_size=3), min_size=1, max_size=2),
    kept=st.integers(1, 2),
)
def test_a_schedule_passes_iff_who_is_present_fits(table: list, kept: int) -> None:
    who, present, delay = np.moveaxis(np.array(table, int), -1, 0)
    cohort = Cohort(who, present.astype(bool), delay)
    assert passes(schedules.check, cohort, 4, kept) == naive(*cohort, 4, kept)
