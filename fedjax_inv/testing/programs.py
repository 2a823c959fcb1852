"""Laws of the programs: what JAX needs to trace, compile and run an algorithm."""

import jax

from fedjax_inv import tree
from fedjax_inv.testing import inputs
from fedjax_inv.testing.case import Case


def the_factory_returns_an_algorithm(case: Case) -> None:
    """factory(model, work, ...) returns an `Algorithm`."""
    assert case.algorithm


def a_round_can_be_traced(case: Case) -> None:
    """A round is a function of arrays: no Python `if` depends on a value or on the round.

    The server and the clients' states keep their shapes and types; metrics are scalars.
    """
    assert case.traced


def tracing_again_gives_the_same_program(case: Case) -> None:
    """No state hides in Python: no counter, no random generator outside of `visit.key`."""
    program, again = case.traced.program, case.trace().program
    for first, second in zip(program.splitlines(), again.splitlines(), strict=False):
        assert first == second, f"a second trace has {second.strip()!r} for {first.strip()!r}"
    assert again == program, "a second trace has another number of operations"


def no_argument_is_changed_in_place(case: Case) -> None:
    """No dict or list of an argument is changed: the caller still needs it."""
    changed = case.traced.changed
    if not changed and case.traceable_numbers:
        changed = case.traced_with_numbers.changed  # which calls the factory, too
    assert not changed, f"{changed} changed in place"


def numbers_may_be_traced(case: Case) -> None:
    """The learning rate and all float arguments may be tracers, so that runs share a program.

    So may those that are floats by default and are not given.
    """
    assert case.traced_with_numbers


def one_program_serves_all_rounds(case: Case) -> None:
    """No round is compiled again, by itself or in a run."""
    assert case.steps
    assert case.results


def a_state_can_be_donated(case: Case) -> None:
    """The program of a round may overwrite the state that it gets."""
    start = case.restored(case.start)
    case.step(start, tree.take(case.schedule, 0), inputs.compact(case.federation))
    leaves = jax.tree.leaves(start.server)
    assert any(leaf.is_deleted() for leaf in leaves), "no leaf of the server was overwritten"
