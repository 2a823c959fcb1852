"""The protocol's laws for any algorithm: `check(factory)` checks them and returns a report.

A law is a function of a `Case`, which raises an AssertionError if the algorithm breaks it. Equal
means bit for bit if the same program runs on the same numbers. Otherwise sums are in another order,
and `assert_close` allows the rounding errors of float32: its docstring says how large they are, and
how to distinguish them from a broken law.

    from fedjax_inv import testing

    report = testing.check(my_factory, hyperparameters={"penalty": 0.1})
    report.raise_if_broken()
"""

from fedjax_inv.testing.case import Case as Case
from fedjax_inv.testing.case import NotApplicable as NotApplicable
from fedjax_inv.testing.comparing import assert_close as assert_close
from fedjax_inv.testing.comparing import assert_equal as assert_equal
from fedjax_inv.testing.comparing import assert_same_bits as assert_same_bits
from fedjax_inv.testing.report import LAWS as LAWS
from fedjax_inv.testing.report import Law as Law
from fedjax_inv.testing.report import Outcome as Outcome
from fedjax_inv.testing.report import Report as Report
from fedjax_inv.testing.report import check as check
