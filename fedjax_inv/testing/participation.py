"""Laws of participation: who takes part in a round, and what the others change: nothing."""

import contextlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_inv import rounds, tree
from fedjax_inv.testing import inputs
from fedjax_inv.testing.case import Case, NeverAttends, NotApplicable, Result
from fedjax_inv.testing.comparing import (
    assert_close,
    assert_equal,
    assert_finite,
)
from fedjax_inv.testing.inputs import NO_EXAMPLE, NUM_CLIENTS, ONE_EXAMPLE, POISONED
from fedjax_inv.types import Array, Cohort, Tree


def per_client(schedule: Cohort, reports: tuple[rounds.Report, ...]) -> list[Tree]:
    """Return reports [T, S] as [T, C], whatever the slots of clients; zeros if absent.

    Args:
      schedule: who is in which slot.
      reports: of each exchange.

    Raises:
      AssertionError: if a client is reported in a slot that the schedule leaves empty.
    """
    rounds_, slots = np.nonzero(schedule.present)
    who = np.asarray(schedule.who)[rounds_, slots]
    shape = (len(schedule.who), NUM_CLIENTS)

    def scattered(values: np.ndarray) -> np.ndarray:
        by_client = np.zeros(shape, values.dtype)
        by_client[rounds_, who] = values[rounds_, slots]
        return by_client

    for report in reports:
        empty = ~np.asarray(schedule.present)
        assert not (report.present & empty).any(), "an empty slot is reported as present"
        assert report.finite[empty].all(), "an empty slot is reported as not finite"
    found = []
    for report in reports:
        metrics: Any = {k: np.where(report.present, v, 0) for k, v in report.metrics.items()}
        found.append(jax.tree.map(scattered, report._replace(metrics=metrics)))
    return found


def assert_same_run(
    case: Case, result: Result, schedule: Cohort | None = None, *, expected: Result | None = None
) -> None:
    """Assert that a result is that of the case.

    Args:
      case: the case.
      result: a result.
      schedule: the schedule of the result, whose clients may be in other slots.
      expected: the result of the case; by default that of its rounds.

    Raises:
      AssertionError: if they differ.
    """
    state, reports = expected or case.result
    schedule = case.schedule if schedule is None else schedule
    assert_close(result[0], state)
    assert_close(per_client(schedule, result[1]), per_client(case.schedule, reports))


def clients_take_part_if_scheduled_with_examples_and_attending(case: Case) -> None:
    """Those clients that are scheduled, have examples and attend are reported as present."""
    _, reports = case.result
    attending = [
        # By the server before the round: no first exchange decides who attends the second.
        case.attending(stop.server, t)
        for t, stop in enumerate(case.stops[:-1])
    ]
    who, present, _ = (np.asarray(leaf) for leaf in case.schedule)
    for index, report in enumerate(reports):
        attends = np.stack([turn[index] for turn in attending])
        expected = present & (who != NO_EXAMPLE) & np.take_along_axis(attends, who, 1)
        assert expected.any(), f"nobody attends exchange {index}"
        assert_equal(report.present, expected)
        assert_equal(report.size, np.array(inputs.SIZES, np.int32)[who])


def absent_clients_change_nothing(case: Case) -> None:
    """An absent client keeps its state, and the server never sees who is absent, nor its delay."""
    for t, (before, (after, reports)) in enumerate(zip(case.stops, case.steps, strict=False)):
        took_part = {int(who) for each in reports for who in case.schedule.who[t][each.present]}
        absent: Any = sorted({*range(NUM_CLIENTS)} - took_part)
        assert_equal(tree.take(after.clients, absent), tree.take(before.clients, absent))
    schedule = case.lanes["others absent"].schedule
    assert_same_run(case, case.results["others absent"], schedule)


def _assert_identity(case: Case, present: Sequence[int], attending: Sequence[int]) -> None:
    """Assert that a round changes nothing.

    Args:
      case: the algorithm.
      present: the clients of the round.
      attending: the round is one in which the first possible of these attends the exchange; an
        exchange that none of them ever attends is left out.

    Raises:
      NotApplicable: if no exchange is left.
    """
    who = [4, 3, 1, 2, 0]
    cohort = inputs.cohort(who, [client in present for client in who])
    befores = [
        _turn_of_first(case, index, attending) for index in range(len(case.algorithm.exchanges))
    ]
    if not any(befores):
        raise NotApplicable("no such client ever attends an exchange")
    for before in filter(None, befores):
        after, reports = case.one_step(before, cohort)
        assert_equal((after.server, after.clients), (before.server, before.clients))
        assert_equal(after.round, before.round + 1)
        for report in reports:
            assert not report.present.any(), "a client is reported as present"


def _turn_of_first(case: Case, exchange: int, clients: Sequence[int]) -> rounds.State | None:
    for who in clients:
        with contextlib.suppress(NeverAttends):
            return case.turn(exchange, who)
    return None


def a_round_without_clients_changes_nothing(case: Case) -> None:
    """If all slots are empty, the server and all clients stay as they are."""
    _assert_identity(case, [], range(NUM_CLIENTS))


def a_round_without_examples_changes_nothing(case: Case) -> None:
    """If no client of a round has an example, the server and all clients stay as they are."""
    # In a round that the client attends, so that its lack of examples is the reason.
    _assert_identity(case, [NO_EXAMPLE], [NO_EXAMPLE])


def a_client_of_one_example_gives_no_nan(case: Case) -> None:
    """A round of a single client with a single example changes the server and gives no NaN."""
    who = [0, NO_EXAMPLE, ONE_EXAMPLE, 3, 4]
    cohort = inputs.cohort(who, [client in (NO_EXAMPLE, ONE_EXAMPLE) for client in who])
    for index in range(len(case.algorithm.exchanges)):
        before = case.turn(index, ONE_EXAMPLE)
        state, reports = case.one_step(before, cohort)
        assert_equal(reports[index].present, np.array(who) == ONE_EXAMPLE)
        assert case.moved(before.server, state.server) > 0, "the server stays as it is"
        assert_finite(state)


def a_client_that_uploads_nan_is_reported_and_treated_as_absent(case: Case) -> None:
    """NaN in a client's examples reach its report and nobody else."""
    who = np.array([4, POISONED, 0, 2, 1], np.int32)
    is_poisoned = who == POISONED
    rows = inputs.rows_of(case.federation, POISONED)
    leaves = jax.tree.leaves(case.federation.data.x)
    if not all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves):
        raise NotApplicable("not all inputs are floating-point numbers, which can be NaN")

    def spoilt(leaf: Array) -> Array:
        changed = np.array(leaf)
        changed[rows] = np.nan
        return jnp.asarray(changed)

    x = jax.tree.map(spoilt, case.federation.data.x)
    poisoned = case.federation._replace(data=case.federation.data._replace(x=x))
    for index in range(len(case.algorithm.exchanges)):
        before = case.turn(index, POISONED)
        got, reports = case.one_step(before, inputs.cohort(who), poisoned)
        absent = inputs.cohort(who, ~is_poisoned)
        expected, expected_reports = case.one_step(before, absent)
        assert_equal(got, expected)
        assert_finite(got)
        assert_equal(reports[index].finite, ~is_poisoned)
        for report, other in zip(reports, expected_reports, strict=True):
            assert_equal(report.present, other.present)


def what_fills_a_batch_does_not_matter(case: Case) -> None:
    """Only examples under a batch's mask count: others repeat an example to fill the batch."""
    assert_same_run(case, case.results["filled otherwise"])
