"""Laws of layout: time, memory, devices and the order of clients do not change a run."""

import jax

from fedjax_inv import tree
from fedjax_inv.testing import inputs
from fedjax_inv.testing.case import SEGMENT, Case, NotApplicable
from fedjax_inv.testing.comparing import (
    assert_close,
    assert_equal,
    assert_finite,
    assert_same_bits,
    largest_difference,
    plain,
)
from fedjax_inv.testing.participation import assert_same_run, per_client
from fedjax_inv.types import Tree


def a_run_moves_everything_and_stays_finite(case: Case) -> None:
    """Six rounds change the server's network and the clients' states, and all numbers are finite.

    Else no other law could be broken. Without a single network for all clients, some number of the
    server must change.
    """
    state, reports = case.result
    start = case.start
    assert case.moved(start.server, state.server) > 1e-2, "the server hardly moves"
    if jax.tree.leaves(start.clients):
        moved = largest_difference(start.clients, state.clients)
        assert moved > 1e-3, "the clients' states hardly move"
    assert_finite((state, [report.metrics for report in reports]))


def delays_matter(case: Case) -> None:
    """Delayed clients work on older messages, so that without delays the run is another one."""
    moved = largest_difference(case.results["undelayed"][0].server, case.result[0].server)
    assert moved > 1e-3, "the run without delays is the same"


def seeds_and_numbers_matter(case: Case) -> None:
    """Another seed, half the learning rate or half of any other float gives another run."""

    def seen(name: str) -> Tree:
        state = case.results[name][0]
        # The numbers of a personal algorithm may act on the clients alone.
        return (state.server, state.clients) if case.algorithm.personal else state.server

    # 0 has no half.
    for name in ("other seed", *(name for name in case.traceable_numbers if name in case.results)):
        moved = largest_difference(seen(name), seen("as it is"))
        what = name if name == "other seed" else f"half the {name}"
        assert moved > 1e-4, f"{what} gives the same run"


def a_run_in_chunks_is_a_loop_of_rounds(case: Case) -> None:
    """A run, three clients at a time, equals rounds played one by one, client by client."""
    assert_same_run(case, case.results["as it is"])


def devices_and_empty_slots_do_not_matter(case: Case) -> None:
    """Devices that own the clients give the same run, also with empty slots and 8-bit inputs.

    Each device has the states of its own clients alone, which it does not share evenly.
    """
    schedule = inputs.with_empty_slots(case.schedule)
    all_devices = case.steps_on(case.num_devices, schedule, case.bytes)
    assert_same_run(case, all_devices, schedule)
    if case.num_devices == 1:
        raise NotApplicable("there is one device; jax_num_cpu_devices=4 makes several of a CPU")
    if not case.is_exact:
        return
    expected = case.result[0], per_client(case.schedule, case.result[1])
    two = case.steps_on(2, case.schedule, case.federation)
    assert_same_bits((two[0], per_client(case.schedule, two[1])), expected)
    assert_same_bits((all_devices[0], per_client(schedule, all_devices[1])), expected)


def clients_outside_of_the_cohorts_need_not_be_there(case: Case) -> None:
    """A round needs the examples and states of the clients alone that its cohort names.

    The others have no examples and no state on the device, and keep theirs on the host.
    """
    state = case.start
    for t, (expected, reports) in enumerate(case.steps):
        cohort = tree.take(case.schedule, t)
        who = [c for c in sorted(cohort.who[cohort.present].tolist()) if inputs.SIZES[c]]
        got, found = case.one_step_of(state, cohort, who)
        assert_equal((got, found), (expected, reports))
        state = got


def the_order_of_slots_does_not_matter(case: Case) -> None:
    """A round is the same, whichever slots its clients are in."""
    schedule = case.lanes["other order"].schedule
    assert_same_run(case, case.results["other order"], schedule)


def other_rows_and_their_order_do_not_matter(case: Case) -> None:
    """A client sees its own examples alone: the others may lie elsewhere, or be NaN."""
    relaid = inputs.relaid(case.bytes)
    assert (relaid.start != case.federation.start).any()
    assert_equal(case.run(list(case.lanes), federation=relaid), case.results)


def runs_do_not_affect_each_other(case: Case) -> None:
    """Runs of other seeds and numbers share a program, and each is as if alone."""
    names = list(case.lanes)
    # Each run on the lane of another run, so that its changes are on another lane.
    turned = case.run(names[1:] + names[:1])
    for name, lane in case.lanes.items():
        result, expected = turned[name], case.results[name]
        assert_close(result[0], expected[0])
        reports = (per_client(lane.schedule, each[1]) for each in (result, expected))
        assert_close(*reports)


def stop_and_resume_is_bit_identical(case: Case) -> None:
    """All that a run carries is in its state: one that goes on from a checkpoint is the same."""
    resumed = case.run(list(case.lanes), carry=lambda state: case.restored(plain(state)))
    assert_equal(resumed, case.results)
    assert_equal(case.steps_from(case.stops[SEGMENT], SEGMENT), case.steps[SEGMENT:])
