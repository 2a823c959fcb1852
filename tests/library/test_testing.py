"""Laws for algorithms of others: a sound one obeys them, and a small bug is named by its law."""

import itertools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import slow
from examples.fednova import fednova
from fedjax_inv import averaging, local, models, testing
from fedjax_inv.algorithms import fedavg, fedprox, qfedavg
from fedjax_inv.checks import UsageError
from fedjax_inv.data.federation import examples
from fedjax_inv.testing import __main__ as command
from fedjax_inv.testing import report as reports
from fedjax_inv.types import Algorithm, Array, Cohort, GradFn, Model, Step, Tree, Visit, Work

# The smallest network; the laws of batch normalisation are those of test_protocol.
LINEAR = models.from_function(
    lambda key, x: {"w": 0.1 * jax.random.normal(key, (x[0].size, 3))},
    lambda params, x: x.reshape(len(x), -1) @ params["w"],
)
TRACED = list(testing.LAWS)[:7]  # laws that compile nothing


@pytest.mark.slow
def test_an_outside_algorithm_obeys_all_laws(capsys: pytest.CaptureFixture[str]) -> None:
    report = testing.check(fednova)
    report.raise_if_broken()
    results = {outcome.law: outcome.result for outcome in report.outcomes}
    assert list(results) == list(testing.LAWS)
    assert {law for law, result in results.items() if result != "held"} == {"a_blank_upload_fits"}
    lines = capsys.readouterr().out.splitlines()
    assert lines == str(report).splitlines()
    laws = len(testing.LAWS)
    assert lines[-1].startswith(f"examples.fednova.fednova: {laws} laws in ")
    assert lines[-1].endswith(f" s: {laws - 1} held, 1 not applicable")


# Planted bugs.

State = dict[str, Any]


def built(
    model: Model, work: Work, gradient_from: Callable[[Visit], GradFn] | None = None, **hooks: Any
) -> Algorithm:
    """FedAvg with hooks of `averaging`."""
    gradient = averaging.gradient(model)
    options: State = {"server_optimizer": optax.sgd(1.0), "weighting": "size", **hooks}
    return averaging.averaging(model, work, gradient_from or (lambda visit: gradient), **options)


def forgets_the_mask(model: Model, work: Work) -> Algorithm:
    gradient = averaging.gradient(model)

    def grad_fn(variables: Tree, batch: Any, key: Array) -> Step:
        return gradient(variables, batch._replace(mask=jnp.ones_like(batch.mask)), key)

    return built(model, work, lambda visit: grad_fn)


def folds_without_the_mask(model: Model, work: Work) -> Algorithm:
    """Each upload is scaled by a sum over the client's examples, filled batches included."""

    def scale_delta(visit: Visit, trained: Any) -> Array:
        return local.fold(visit.shard, lambda batch: batch.x.mean(), batch_size=4)

    return built(model, work, scale_delta=scale_delta)


def weighs_by_slot(model: Model, work: Work) -> Algorithm:
    return built(model, work, weighting=lambda slots: slots.position + 1.0)


def asks_for_the_round_in_python(model: Model, work: Work) -> Algorithm:
    gradient = averaging.gradient(model)

    def gradient_from(visit: Visit) -> GradFn:
        if visit.round < 3:
            return gradient
        return lambda *arguments: gradient(*arguments)

    return built(model, work, gradient_from)


def with_server_state(
    algorithm: Algorithm, first: Callable[[Any], Tree], then: Callable[[Tree, Cohort], Tree]
) -> Algorithm:
    """The algorithm with a state beside the network on the server: then(state, cohort) is next."""
    (exchange,) = algorithm.exchanges

    def init(setup: Any) -> Tree:
        return algorithm.init_server(setup)._replace(side=first(setup))

    def update(server: Tree, mean: Tree, cohort: Cohort) -> Tree:
        return exchange.update(server, mean, cohort)._replace(side=then(server.side, cohort))

    changed = exchange._replace(update=update)
    return algorithm._replace(init_server=init, exchanges=(changed,))


def counts_absent_clients(model: Model, work: Work, *arguments: Any, **hooks: Any) -> Algorithm:
    """Whoever is in a slot counts as seen, present or not."""
    return with_server_state(
        built(model, work, *arguments, **hooks),
        lambda setup: jnp.zeros(setup.num_clients),
        lambda seen, cohort: seen.at[cohort.who].add(1.0),
    )


def counts_present_clients(model: Model, work: Work) -> Algorithm:
    """The same for those who are present alone, which breaks no law."""
    return with_server_state(
        built(model, work),
        lambda setup: jnp.zeros(setup.num_clients),
        lambda seen, cohort: seen.at[cohort.who].add(jnp.where(cohort.present, 1.0, 0.0)),
    )


def becomes_a_float(model: Model, work: Work) -> Algorithm:
    """A counter that starts as an integer, so that the second round would be compiled again."""
    return with_server_state(
        built(model, work), lambda setup: jnp.int32(0), lambda count, cohort: count + 0.5
    )


def counts_in_python(model: Model, work: Work) -> Algorithm:
    gradient, calls = averaging.gradient(model), itertools.count(1)

    def grad_fn(variables: Tree, batch: Any, key: Array) -> Step:
        step = gradient(variables, batch, key)
        return step._replace(grads=optax.tree.scale(1 / next(calls), step.grads))

    return built(model, work, lambda visit: grad_fn)


def draws_with_numpy(model: Model, work: Work) -> Algorithm:
    gradient, rng = averaging.gradient(model), np.random.default_rng(0)

    def grad_fn(variables: Tree, batch: Any, key: Array) -> Step:
        step = gradient(variables, batch, key)
        return step._replace(grads=optax.tree.scale(rng.normal(), step.grads))

    return built(model, work, lambda visit: grad_fn)


def draws_an_array_with_numpy(model: Model, work: Work) -> Algorithm:
    """The text of a program does not show what was drawn."""
    gradient, rng = averaging.gradient(model), np.random.default_rng(0)

    def grad_fn(variables: Tree, batch: Any, key: Array) -> Step:
        step = gradient(variables, batch, key)
        noise = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape), step.grads)
        return step._replace(grads=optax.tree.add(step.grads, noise))

    return built(model, work, lambda visit: grad_fn)


def fills_in_a_default(model: Model, work: Work, *, options: dict[str, float]) -> Algorithm:
    """A second call of the factory changes nothing any more."""
    options.setdefault("rate", 1.0)
    return built(model, work)


def reports_a_vector(model: Model, work: Work) -> Algorithm:
    gradient = averaging.gradient(model)

    def grad_fn(variables: Tree, batch: Any, key: Array) -> Step:
        step = gradient(variables, batch, key)
        return step._replace(metrics={"loss": step.metrics["loss"][None]})

    return built(model, work, lambda visit: grad_fn)


def compares_its_number(model: Model, work: Work, *, penalty: float) -> Algorithm:
    return built(model, work) if penalty > 0 else fedavg.fedavg(model, work)


def compares_its_default(model: Model, work: Work, *, penalty: float = 0.5) -> Algorithm:
    return compares_its_number(model, work, penalty=penalty)


def changes_the_message(model: Model, work: Work) -> Algorithm:
    def init(setup: Any) -> Tree:
        setup.variables.params.head["more"] = jnp.zeros(())
        return ()

    return built(model, work, side=averaging.NOTHING._replace(init=init))


def predicts_by_the_batch(
    model: Model, work: Work, algorithm: Algorithm | None = None
) -> Algorithm:
    """Predictions are centred over the batch, as if in training mode."""
    algorithm = algorithm or built(model, work)

    def predict(server: Tree, own: Tree, x: Tree) -> Array:
        outputs = algorithm.predict(server, own, x)
        return outputs - outputs.mean(0)

    return algorithm._replace(predict=predict)


@pytest.mark.parametrize(
    ("factory", "hyperparameters", "law", "why"),
    slow.after(
        7,
        [
            (
                asks_for_the_round_in_python,
                {},
                "a_round_can_be_traced",
                r"^TracerBoolConversionError: Attempted boolean .* \(test_testing.py:\d+\)$",
            ),
            (
                becomes_a_float,
                {},
                "a_round_can_be_traced",
                r"exchanges\[0\]\.update: returns float32\[\] at \.side, must return int32",
            ),
            (
                reports_a_vector,
                {},
                "a_round_can_be_traced",
                "metric 'loss' of shape .*, must be a scalar",
            ),
            (counts_in_python, {}, "tracing_again_gives_the_same_program", "a second trace has "),
            (draws_with_numpy, {}, "tracing_again_gives_the_same_program", "a second trace has "),
            (
                compares_its_number,
                {"penalty": 0.5},
                "numbers_may_be_traced",
                r"^TracerBoolConversionError: .* \(test_testing.py:\d+\)$",
            ),
            (
                compares_its_default,
                {},
                "numbers_may_be_traced",
                r"^TracerBoolConversionError: .* \(test_testing.py:\d+\)$",
            ),
            (
                changes_the_message,
                {},
                "no_argument_is_changed_in_place",
                "^variables changed in place",
            ),
            (
                draws_an_array_with_numpy,
                {},
                "tracing_again_gives_the_same_program",
                "a second trace has 'constant ",
            ),
            (
                fills_in_a_default,
                {"options": {"penalty": 0.1}},
                "no_argument_is_changed_in_place",
                "^hyperparameters changed in place",
            ),
        ],
    ),
)
def test_a_bug_is_named_by_the_law_of_traces(
    factory: Callable[..., Algorithm], hyperparameters: dict[str, Any], law: str, why: str
) -> None:
    report = testing.check(
        factory, hyperparameters=hyperparameters, model=LINEAR, laws=TRACED, tell=None
    )
    (broken,) = report.broken
    assert broken.law == law
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(broken.why)
    first = f"^test_testing.{factory.__name__} breaks 1 law\n{law.replace('_', ' ')}: "
    with pytest.raises(AssertionError, match=first):
        report.raise_if_broken()


def has_four_bugs(model: Model, work: Work) -> Algorithm:
    gradient = averaging.gradient(model)

    def grad_fn(variables: Tree, batch: Any, key: Array) -> Step:
        return gradient(variables, batch._replace(mask=jnp.ones_like(batch.mask)), key)

    return predicts_by_the_batch(
        model,
        work,
        counts_absent_clients(
            model, work, lambda visit: grad_fn, weighting=lambda slots: slots.position + 1.0
        ),
    )


NEED_A_RUN = [
    "an_evaluation_is_the_mean_over_examples",
    "the_network_gives_the_outputs_for_a_new_client",
    "a_run_in_chunks_is_a_loop_of_rounds",
    "absent_clients_change_nothing",
    "what_fills_a_batch_does_not_matter",
    "the_order_of_slots_does_not_matter",
    "runs_do_not_affect_each_other",
    "stop_and_resume_is_bit_identical",
]
BUGS = [
    (predicts_by_the_batch, [0, 1]),
    (counts_absent_clients, [3]),
    (forgets_the_mask, [4]),
    (folds_without_the_mask, [4]),
    (weighs_by_slot, [5]),
    (counts_present_clients, []),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("factory", "laws"), [(has_four_bugs, [0, 1, 3, 4, 5]), *slow.after(0, BUGS)]
)
def test_a_bug_is_named_by_the_law_of_runs(
    factory: Callable[..., Algorithm], laws: list[int]
) -> None:
    report = testing.check(factory, model=LINEAR, laws=NEED_A_RUN, tell=None)
    assert [outcome.law for outcome in report.broken] == [NEED_A_RUN[law] for law in laws]


# Sound algorithms.


def asks_those_with_examples(model: Model, work: Work) -> Algorithm:
    """The server remembers who has examples, and asks nobody else."""
    algorithm = with_server_state(
        fedavg.fedavg(model, work), lambda setup: setup.has_examples, lambda has, cohort: has
    )
    (exchange,) = algorithm.exchanges
    asks = exchange._replace(attends=lambda server, who, round: server.side[who])
    return algorithm._replace(exchanges=(asks,))


@pytest.mark.slow
def test_who_has_no_examples_need_not_attend() -> None:
    laws = ["a_round_without_clients_changes_nothing", "a_round_without_examples_changes_nothing"]
    report = testing.check(asks_those_with_examples, model=LINEAR, laws=laws, tell=None)
    assert [outcome.result for outcome in report.outcomes] == ["held", "not applicable"]
    with pytest.raises(UsageError, match=r"^law='a_round': must be one of"):
        report.of("a_round")


@pytest.mark.slow
def test_zero_has_no_half() -> None:
    laws = ["seeds_and_numbers_matter"]
    report = testing.check(
        fedprox.fedprox, hyperparameters={"proximal": 0.0}, model=LINEAR, laws=laws, tell=None
    )
    assert report.of("seeds_and_numbers_matter").result == "held"


# What cannot be checked, and what is said about it.


def raises(model: Model, work: Work) -> Algorithm:
    raise RuntimeError("no such thing\nand more")


def returns_a_number(model: Model, work: Work) -> Any:
    return 3


@pytest.mark.parametrize(
    ("factory", "why"),
    [
        (raises, r"^RuntimeError: no such thing and more \(test_testing.py:\d+\)$"),
        (returns_a_number, "^UsageError: the result of the factory=3: must be an Algorithm$"),
        (lambda: None, r"^TypeError: .*takes 0 positional arguments but 2 were given"),
    ],
)
def test_a_factory_that_gives_no_algorithm_breaks_the_first_law(
    factory: Callable[..., Any], why: str
) -> None:
    lines: list[str] = []
    report = testing.check(factory, tell=lines.append)
    (broken,) = report.broken
    assert broken.law == "the_factory_returns_an_algorithm"
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(broken.why)
    others = {(outcome.result, outcome.why) for outcome in report.outcomes[1:]}
    assert others == {("not checked", "as the factory returns an algorithm is broken")}
    assert len(lines) == len(testing.LAWS) + 1
    assert all("\n" not in line for line in lines)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"factory": 3}, "^factory=3: must be a function$"),
        ({"laws": ["gravity"]}, "^laws='gravity': must be one of the_factory"),
        ({"breaks": {"gravity": "we fly"}}, "^breaks='gravity': must be one of the_factory"),
        ({"learning_rate": 0}, "^learning_rate=0: must be a number above 0$"),
        ({"work": None}, "^work=None: must be a function$"),
        ({"model": 3}, "^model=3: must be a Model$"),
        ({"data": examples(np.zeros((9, 2)), np.zeros(9))}, "^data: must hold at least 21 exam"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], line: str) -> None:
    with pytest.raises(UsageError, match=line):
        testing.check(**{"factory": fednova, "tell": None, **arguments})


def test_a_factory_may_read_the_learning_rate_of_its_work() -> None:
    report = testing.check(qfedavg.qfedavg, laws=["the_factory_returns_an_algorithm"], tell=None)
    assert report.outcomes[0].result == "held"


def test_a_law_may_be_broken_on_purpose() -> None:
    report = testing.check(
        counts_in_python,
        model=LINEAR,
        laws=TRACED,
        breaks={"tracing_again_gives_the_same_program": "it counts"},
        tell=None,
    )
    report.raise_if_broken()
    outcome = report.of("tracing_again_gives_the_same_program")
    assert outcome.result == "broken, as expected"
    assert outcome.why.startswith("it counts (a second trace has ")
    assert report.summary.endswith("6 held, 1 broken, as expected")


@pytest.mark.parametrize("laws", slow.after(1, [TRACED, list(testing.LAWS)]), ids=["traces", "all"])
def test_data_may_be_of_any_task(laws: list[str]) -> None:
    """Two numbers an example, and inputs of another shape."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(30, 4)), rng.normal(size=(30, 2))
    model = models.from_function(
        lambda key, x: jax.random.normal(key, (4, 2)), lambda kernel, x: x @ kernel
    )

    def squared(outputs: Array, y: Array, mask: Array) -> Array:
        errors = ((outputs - y) ** 2).mean(1)
        return jnp.where(mask, errors, 0).sum() / jnp.maximum(mask.sum(), 1)

    report = testing.check(
        fedavg.fedavg,
        hyperparameters={"loss": squared},
        model=model,
        data=examples(x.astype(np.float32), y.astype(np.float32)),
        laws=laws,
        tell=None,
    )
    report.raise_if_broken()
    assert {outcome.result for outcome in report.outcomes} == {"held"}


def test_a_counter_of_the_server_is_no_move_of_its_network() -> None:
    start, end = ({"network": 1.0, "rounds": rounds} for rounds in (0.0, 6.0))

    def counting(personal: bool) -> Callable[..., Algorithm]:
        def factory(model: Model, work: Work) -> Algorithm:
            return built(model, work)._replace(
                network=operator.itemgetter("network"), personal=personal
            )

        return factory

    for personal, moved in ((False, 0.0), (True, 6.0)):
        assert testing.Case(counting(personal), model=LINEAR).moved(start, end) == moved


def test_the_command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(reports, "LAWS", {name: testing.LAWS[name] for name in TRACED[:2]})
    assert command.main(["examples.fednova:fednova"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("2 held")
    fedprox = "fedjax_inv.algorithms.fedprox:fedprox"
    assert command.main([fedprox, "proximal=-1", "weighting=size"]) == 1
    told = capsys.readouterr().out
    assert "UsageError: proximal=-1: must be a finite number, at least 0" in told
    for arguments, line in (
        ([], "usage: python -m fedjax_inv.testing package.module:factory [name=value ...]"),
        ([fedprox, "proximal"], "usage: "),
        (["examples.fednova:none"], "examples.fednova:none: cannot be imported ("),
        ([".fednova:fednova"], ".fednova:fednova: cannot be imported ("),
        (["math:pi"], "math:pi: factory=3.14159"),
        ([fedprox, "nope=1"], f"{fedprox}: hyperparameters='nope': must be one of proximal, "),
    ):
        assert command.main(arguments) == 2
        (told,) = capsys.readouterr().out.splitlines()
        assert told.startswith(line)
    assert command.main(["--help"]) == 0
    assert "package.module:factory" in capsys.readouterr().out


def test_the_difference_that_is_named_is_the_largest() -> None:
    first = {"a": np.zeros(3), "b": np.array([1.0, 2.0, np.nan])}
    testing.assert_close(first, {"a": np.full(3, 1e-5), "b": first["b"]})
    testing.assert_equal(first, {"a": -first["a"], "b": first["b"]})
    second = {"a": np.array([0, 0.5, 0]), "b": np.array([1.0, 4.0, np.nan])}
    with pytest.raises(AssertionError, match=r"^\['b'\] differs by 2 in 1 of 3 numbers: 2 and 4$"):
        testing.assert_equal(first, second)
    with pytest.raises(AssertionError, match=r"^\['a'\] differs by 1e-05 in 3 of 3 numbers"):
        testing.assert_equal(first, {"a": np.full(3, 1e-5), "b": first["b"]})
    with pytest.raises(AssertionError, match=r"^\['b'\] differs by inf in 1 of 3 numbers: nan and"):
        testing.assert_close(first, {"a": first["a"], "b": np.array([1.0, 2.0, 3.0])})
    with pytest.raises(AssertionError, match=r"^\['a'\] has shapes \(3,\) and \(2,\)$"):
        testing.assert_close(first, {"a": np.zeros(2), "b": first["b"]})
    with pytest.raises(AssertionError, match=r"^the trees differ: "):
        testing.assert_close(first, {"a": first["a"]})
    with pytest.raises(AssertionError, match="differs by 128 in 1 of 24"):
        testing.assert_same_bits({"a": np.zeros(3)}, {"a": np.array([0, 0, -0.0])})
