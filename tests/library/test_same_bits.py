"""Devices change no bit, in every configuration of `federations.TABLE`, compiled as by users."""

import pytest

import federations
from federations import TABLE, assert_close
from fedjax_inv import testing

USERS = {"xla_backend_optimization_level": 3, "xla_cpu_use_fusion_emitters": True}  # XLA's defaults
# On several devices XLA turns a quotient of the counterfactual terms' gradient, weights / examples,
# into a product with the reciprocal. No other configuration was seen to differ.
INEXACT = {("fedcfa", 0)}
CASES = [(name, index) for name, configs in TABLE.items() for index in range(len(configs))]


@pytest.mark.slow
@pytest.mark.parametrize("which", CASES, ids=str)
def test_devices_change_no_bit(which: tuple[str, int]) -> None:
    name, index = which
    case = federations.case(name, TABLE[name][index])
    one, *several = (
        case.steps_on(number, case.schedule, case.federation, USERS) for number in (1, 2, 4)
    )
    same = assert_close if which in INEXACT else testing.assert_same_bits
    for each in several:
        same(each, one)
