"""What is said of flags: in their own words, whoever finds the fault."""

import pytest

from experiments.flags.flag import in_flags, is_whole
from fedjax_inv.checks import UsageError

NAMES = {"flips": "flips", "num_clients": "clients", "held_out": "held_out", "play": "set=play"}


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ("flips[1]=nan: must be", "--flips=nan: must be, with --kind=a"),
        ("flips=[0.2, 0.1]: must all differ", "--flips=0.2,0.1: must all differ, with --kind=a"),
        ("flips=(8,): must be two", "--flips=8: must be two, with --kind=a"),
        ("play='turns': must be", "--set=play=turns: must be, with --kind=a"),
        ("held_out=None: leaves nothing", "--held_out=none: leaves nothing, with --kind=a"),
        ("x=1: or num_clients=5 lower", "--kind=a: x=1: or --clients=5 lower"),
        ("test_flips=1: must be", "--kind=a: test_flips=1: must be"),
        ("--flips=1: must be", "--flips=1: must be, with --kind=a"),
        ("--kind=a: must be", "--kind=a: must be"),
        ("must be another", "--kind=a: must be another"),
    ],
)
def test_arguments_are_called_as_the_flags_that_set_them(told: str, expected: str) -> None:
    assert str(in_flags(UsageError(told), "--kind=a", NAMES)) == expected
    if told == "must be another":
        assert str(in_flags(UsageError(told), "--kind=a", {})) == expected


def test_whole_numbers_are_of_the_digits_0_to_9_and_below_2_to_the_31() -> None:
    good = ("0", "7", "007", str(2**31 - 1))
    bad = ("", "-1", "1.0", " 1", "1_0", "²", "٣", str(2**31), "9" * 5000)
    assert [text for text in (*good, *bad) if is_whole(text)] == [*good]
    assert not is_whole("1", lowest=2)
