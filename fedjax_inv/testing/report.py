"""The check of an algorithm: its laws one after the other, and a report."""

import inspect
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax

from fedjax_inv import checks, platforms
from fedjax_inv.checks import UsageError
from fedjax_inv.testing import inputs, layout, participation, programs, serving
from fedjax_inv.testing.case import Case, NotApplicable
from fedjax_inv.types import Algorithm, Examples, Model, Work

Law = Callable[[Case], None]

HELD, BROKEN, EXPECTED = "held", "broken", "broken, as expected"
NOT_APPLICABLE, NOT_CHECKED = "not applicable", "not checked"

# By name, in the order in which they are checked: an error in one explains those of later ones.
LAWS: Mapping[str, Law] = MappingProxyType(
    {
        law.__name__: law
        for law in (
            programs.the_factory_returns_an_algorithm,
            programs.a_round_can_be_traced,
            programs.no_argument_is_changed_in_place,
            programs.numbers_may_be_traced,
            programs.tracing_again_gives_the_same_program,
            serving.bytes_follow_from_shapes,
            layout.a_run_moves_everything_and_stays_finite,
            participation.clients_take_part_if_scheduled_with_examples_and_attending,
            participation.a_round_without_clients_changes_nothing,
            participation.a_round_without_examples_changes_nothing,
            participation.a_client_of_one_example_gives_no_nan,
            participation.a_client_that_uploads_nan_is_reported_and_treated_as_absent,
            programs.a_state_can_be_donated,
            serving.a_blank_upload_fits,
            serving.an_evaluation_is_the_mean_over_examples,
            serving.the_network_gives_the_outputs_for_a_new_client,
            layout.a_run_in_chunks_is_a_loop_of_rounds,
            participation.absent_clients_change_nothing,
            participation.what_fills_a_batch_does_not_matter,
            layout.clients_outside_of_the_cohorts_need_not_be_there,
            layout.the_order_of_slots_does_not_matter,
            layout.delays_matter,
            layout.seeds_and_numbers_matter,
            layout.other_rows_and_their_order_do_not_matter,
            layout.runs_do_not_affect_each_other,
            layout.stop_and_resume_is_bit_identical,
            programs.one_program_serves_all_rounds,
            layout.devices_and_empty_slots_do_not_matter,
        )
    }
)


class Outcome(NamedTuple):
    """What the check of one law found."""

    law: str
    result: str  # "held", "broken", "broken, as expected", "not applicable" or "not checked"
    why: str = ""  # one line; "" if the law held
    seconds: float = 0.0
    error: Exception | None = None

    def __str__(self) -> str:
        why = f": {self.why}" if self.why else ""
        return f"{self.result:<14} {self.seconds:5.1f} s  {_words(self.law)}{why}"


class Report(NamedTuple):
    """What the check of an algorithm found; as text a table with a line for each law."""

    name: str
    outcomes: tuple[Outcome, ...]

    @property
    def broken(self) -> tuple[Outcome, ...]:
        """The laws that are broken and were not expected to be."""
        return tuple(outcome for outcome in self.outcomes if outcome.result == BROKEN)

    def of(self, law: str) -> Outcome:
        """Return the outcome of a law. Raises UsageError if it was not checked."""
        checks.one_of("law", law, [outcome.law for outcome in self.outcomes])
        return next(outcome for outcome in self.outcomes if outcome.law == law)

    def __str__(self) -> str:
        return "\n".join([*map(str, self.outcomes), self.summary])

    @property
    def summary(self) -> str:
        """The number of laws with each result, in one line."""
        results = [outcome.result for outcome in self.outcomes]
        counts = ", ".join(f"{results.count(each)} {each}" for each in dict.fromkeys(results))
        seconds = sum(outcome.seconds for outcome in self.outcomes)
        return f"{self.name}: {_count(results)} in {seconds:.0f} s: {counts}"

    def raise_if_broken(self) -> None:
        """Raise an AssertionError that names each broken law and why, a line each."""
        if self.broken:
            lines = [f"{_words(outcome.law)}: {outcome.why}" for outcome in self.broken]
            raise AssertionError("\n".join([f"{self.name} breaks {_count(lines)}", *lines]))


def check(
    factory: Callable[..., Algorithm],
    *,
    hyperparameters: Mapping[str, Any] | None = None,
    model: Model | None = None,
    work: Callable[[Any], Work] = inputs.epochs,
    learning_rate: float = 0.1,
    data: Examples | None = None,
    laws: Sequence[str] | None = None,
    breaks: Mapping[str, str] | None = None,
    tell: Callable[[str], None] | None = print,
) -> Report:
    """Check the laws of the protocol for an algorithm, called as factory(model, work, ...).

    All runs are on the CPU, with five clients of 0 to 7 examples, two of which are always or often
    absent, and six rounds. Nearly all of the time is that of compiling.

    Args:
      factory: the algorithm's.
      hyperparameters: further arguments of the factory; floats among them are also traced and
        halved. Those that are floats by default are also traced.
      model: the network; by default a small one with batch normalisation for images [6, 6, 1] of
        three classes.
      work: learning rate -> local training; by default two epochs of SGD in batches of three.
      learning_rate: the learning rate, large enough that six rounds move the network.
      data: at least 21 examples, of which the first are taken; by default images [6, 6, 1] of
        three classes.
      laws: the names of the laws to check; by default all of `LAWS`.
      breaks: laws that the algorithm breaks on purpose, by name, with the reason.
      tell: called with a line for each law as soon as it is checked; None for no lines.

    Returns:
      The report. A law whose check meets the error of an earlier law is not checked.

    Raises:
      UsageError: for an unknown law, arguments of other types, and hyperparameters that the factory
        does not take.
    """
    if laws is not None:
        checks.record("laws", laws, Sequence)
    if breaks is not None:
        checks.record("breaks", breaks, Mapping)
    if tell is not None:
        checks.function("tell", tell)
    names = list(LAWS if laws is None else laws)
    expected = {} if breaks is None else dict(breaks)
    for name in names:
        checks.one_of("laws", name, LAWS)
    for name in expected:
        checks.one_of("breaks", name, LAWS)
    _check_hyperparameters(factory, hyperparameters or {})
    cpu = jax.devices("cpu")[0]
    with jax.default_device(cpu), platforms.traced_for("cpu"):
        case = Case(
            factory,
            hyperparameters=hyperparameters,
            model=model,
            work=work,
            learning_rate=learning_rate,
            data=data,
            options=_QUICKLY,
        )
        outcomes: list[Outcome] = []
        for name in names:
            outcome = _outcome(case, name, outcomes)
            if outcome.result == BROKEN and name in expected:
                why = f"{expected[name]} ({outcome.why})"
                outcome = outcome._replace(result=EXPECTED, why=why)
            outcomes.append(outcome)
            if tell:
                tell(str(outcome))
    report = Report(case.name, tuple(outcomes))
    if tell:
        tell(report.summary)
    return report


def _check_hyperparameters(factory: Callable[..., Algorithm], given: Mapping[str, Any]) -> None:
    checks.function("factory", factory)
    parameters = inspect.signature(factory).parameters.values()
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return
    own = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]
    for name in given:
        if name not in own:
            text = f"must be one of {', '.join(own)}" if own else "the factory takes none"
            raise UsageError("hyperparameters", name, text)


# Compiling takes nearly all of the time, so compile quickly rather than well.
_QUICKLY = {"xla_backend_optimization_level": 0}


def _outcome(case: Case, name: str, earlier: Sequence[Outcome]) -> Outcome:
    start = time.perf_counter()
    result, why, error = HELD, "", None
    try:
        LAWS[name](case)
    except NotApplicable as reason:
        result, why = NOT_APPLICABLE, str(reason)
    except Exception as raised:
        error = raised
        cause = next((each for each in earlier if each.error is raised), None)
        if cause:
            result, why = NOT_CHECKED, f"as {_words(cause.law)} is broken"
        else:
            result, why = BROKEN, _line(raised)
    return Outcome(name, result, why, time.perf_counter() - start, error)


def _count(laws: Sequence[Any]) -> str:
    return "1 law" if len(laws) == 1 else f"{len(laws)} laws"


def _words(law: str) -> str:
    return law.replace("_", " ")


def _line(error: Exception) -> str:
    """Return an error in one line, with the last place outside of this package and JAX."""
    if isinstance(error, AssertionError) and str(error).strip():
        return str(error).strip().splitlines()[0]
    text = checks.one_line(error)
    own = Path(__file__).parents[1]
    places = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if own not in Path(frame.filename).parents and "site-packages" not in frame.filename
    ]
    place = f" ({Path(places[-1].filename).name}:{places[-1].lineno})" if places else ""
    return f"{type(error).__name__}: {text}{place}"
