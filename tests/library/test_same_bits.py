"""Devices and clients that are not there change no bit, compiled as by users.

In every configuration of `federations.TABLE`.
"""

from functools import partial

import jax
import numpy as np
import pytest

import federations
from federations import TABLE, assert_close
from fedjax_inv import testing, tree
from fedjax_inv.testing.case import ALONE

USERS = {"xla_backend_optimization_level": 3, "xla_cpu_use_fusion_emitters": True}  # XLA's defaults
# On several devices XLA turns a quotient of the counterfactual terms' gradient, weights / examples,
# into a product with the reciprocal. Three others differ on some processors: q-FedAvg on an AMD
# EPYC with AVX2, FedBN and FedNova with statistics on one with AVX-512. No other configuration was
# seen to differ.
INEXACT = {("fedcfa", 0), ("qfedavg", 0), ("fedbn", 0), ("fednova", 0)}
CASES = [(name, index) for name, configs in TABLE.items() for index in range(len(configs))]


@pytest.mark.slow
@pytest.mark.parametrize("which", CASES, ids=str)
def test_devices_and_clients_that_are_not_there_change_no_bit(which: tuple[str, int]) -> None:
    name, index = which
    case = federations.case(name, TABLE[name][index])
    one, four = (case.steps_on(number, case.schedule, case.federation, USERS) for number in (1, 4))
    same = assert_close if which in INEXACT else testing.assert_same_bits
    same(four, one)

    compact = case.once(partial(case.round, axis=ALONE), "a compact round", USERS, donate_argnums=0)
    state, several = case.start, []
    for t in range(len(case.schedule.who)):
        cohort = tree.take(case.schedule, t)
        who = [c for c in sorted(cohort.who[cohort.present].tolist()) if federations.SIZES[c]]
        state, report = case.one_step_of(state, cohort, who, compact)
        several.append(report)
    together = jax.tree.map(lambda *leaves: np.stack(leaves), *several)
    testing.assert_same_bits((state, together), one)
