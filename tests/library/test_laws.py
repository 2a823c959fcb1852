"""Laws for algorithms of others: a sound one obeys them, and a small bug is named by its law."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import slow
from examples.fednova import fednova
from fedjax_inv import averaging, laws, local, models
from fedjax_inv.algorithms import fedavg
from fedjax_inv.checks import UsageError
from fedjax_inv.data.federation import examples
from fedjax_inv.types import Algorithm, Array, Cohort, GradFn, Model, Step, Tree, Visit, Work

# The smallest network; the laws of batch normalisation are those of test_protocol.
LINEAR = models.from_function(
    lambda key, x: {"w": 0.1 * jax.random.normal(key, (x[0].size, 3))},
    lambda params, x: x.reshape(len(x), -1) @ params["w"],
)
TRACED = list(laws.LAWS)[:5]  # laws that compile next to nothing
OF_DEVICES = "devices_chunks_and_empty_slots_do_not_matter"


@pytest.mark.slow
def test_an_outside_algorithm_obeys_all_laws(capsys: pytest.CaptureFixture[str]) -> None:
    report = laws.check(fednova)
    report.raise_if_broken()
    results = {outcome.law: outcome.result for outcome in report.outcomes}
    assert list(results) == list(laws.LAWS)
    assert {law for law, result in results.items() if result != "held"} == {"a_blank_upload_fits"}
    assert capsys.readouterr().out.splitlines() == str(report).splitlines()


# Planted bugs.


def built(
    model: Model, work: Work, gradient_from: Callable[[Visit], GradFn] | None = None, **hooks: Any
) -> Algorithm:
    """FedAvg with hooks of `averaging`."""
    gradient = averaging.gradient(model)
    options = {"server_optimizer": optax.sgd(1.0), "weighting": "size", **hooks}
    return averaging.averaging(model, work, gradient_from or (lambda visit: gradient), **options)


def stepping(change: Callable[[Step], Step]) -> Callable[[Model, Work], Algorithm]:
    """FedAvg with another result of a local step."""

    def factory(model: Model, work: Work) -> Algorithm:
        gradient = averaging.gradient(model)
        return built(model, work, lambda visit: lambda *arguments: change(gradient(*arguments)))

    return factory


def asks_for_the_round_in_python(model: Model, work: Work) -> Algorithm:
    gradient = averaging.gradient(model)

    def step(*arguments: Any) -> Step:
        return gradient(*arguments)

    return built(model, work, lambda visit: gradient if visit.round < 3 else step)


def changes_the_message(model: Model, work: Work) -> Algorithm:
    def init(setup: Any) -> Tree:
        setup.variables.params.head["more"] = jnp.zeros(())
        return ()

    return built(model, work, side=averaging.NOTHING._replace(init=init))


def compares_its_default(model: Model, work: Work, *, penalty: float = 0.5) -> Algorithm:
    return built(model, work) if penalty > 0 else fedavg.fedavg(model, work)


COUNT, RNG = itertools.count(1), np.random.default_rng(0)
counts_in_python = stepping(
    lambda step: step._replace(grads=optax.tree.scale(1 / next(COUNT), step.grads))
)
# The text of a program does not show what was drawn.
draws_with_numpy = stepping(
    lambda step: step._replace(
        grads=jax.tree.map(lambda leaf: leaf + RNG.normal(size=leaf.shape), step.grads)
    )
)
reports_a_vector = stepping(lambda step: step._replace(metrics={"loss": jnp.zeros(1)}))


@pytest.mark.parametrize(
    ("factory", "law"),
    [
        (lambda model: None, "the_factory_returns_an_algorithm"),
        (lambda model, work: 3, "the_factory_returns_an_algorithm"),
        (asks_for_the_round_in_python, "a_round_can_be_traced"),
        (reports_a_vector, "a_round_can_be_traced"),
        (changes_the_message, "no_argument_is_changed_in_place"),
        (counts_in_python, "tracing_again_gives_the_same_program"),
        (draws_with_numpy, "tracing_again_gives_the_same_program"),
        (compares_its_default, "numbers_may_be_traced"),
    ],
)
def test_a_bug_is_named_by_the_law_of_traces(factory: Callable[..., Algorithm], law: str) -> None:
    lines: list[str] = []
    report = laws.check(factory, model=LINEAR, laws=TRACED, tell=lines.append)
    (broken,) = report.broken
    assert broken.law == law
    # Laws that meet the same error name the cause.
    words, others = law.replace("_", " "), (each for each in report.outcomes if each != broken)
    assert all(each.result == "held" or words in each.why for each in others)
    assert len(lines) == len(TRACED) + 1
    assert not any("\n" in line for line in lines)
    with pytest.raises(AssertionError, match=words):
        report.raise_if_broken()


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


def weighs_by_the_number_of_slots(model: Model, work: Work) -> Algorithm:
    return built(model, work, weighting=lambda slots: slots.size + 1.0 * len(slots.size))


def sees_all_examples(model: Model, work: Work) -> Algorithm:
    def scale_delta(visit: Visit, trained: Any) -> Array:
        return jnp.where(visit.shard.data.x.mean() > 1, 0.5, 1.0) + 0 * visit.shard.data.x.mean()

    return built(model, work, scale_delta=scale_delta)


def divides_by_examples_less_one(model: Model, work: Work) -> Algorithm:
    return built(model, work, scale_delta=lambda visit, trained: 1 / (visit.shard.size - 1))


def hears_the_newest_message(model: Model, work: Work) -> Algorithm:
    algorithm = built(model, work)
    (exchange,) = algorithm.exchanges

    def client(visit: Visit) -> Any:
        return exchange.client(visit._replace(message=visit.undelayed_message))

    changed = exchange._replace(broadcast_undelayed=exchange.broadcast, client=client)
    return algorithm._replace(exchanges=(changed,))


def ignores_the_rate(model: Model, work: Work) -> Algorithm:
    return built(model, laws.epochs(0.1))


def counts_clients(model: Model, work: Work, weight: Callable[[Cohort], Any]) -> Algorithm:
    """The server counts how often each client was there."""
    algorithm = built(model, work)
    (exchange,) = algorithm.exchanges

    def init(setup: Any) -> Tree:
        return algorithm.init_server(setup)._replace(side=jnp.zeros(setup.num_clients))

    def update(server: Tree, mean: Tree, cohort: Cohort) -> Tree:
        seen = server.side.at[cohort.who].add(weight(cohort))
        return exchange.update(server, mean, cohort)._replace(side=seen)

    changed = exchange._replace(update=update)
    return algorithm._replace(init_server=init, exchanges=(changed,))


def counts_absent_clients(model: Model, work: Work) -> Algorithm:
    return counts_clients(model, work, lambda cohort: 1.0)


def counts_present_clients(model: Model, work: Work) -> Algorithm:
    return counts_clients(model, work, lambda cohort: jnp.where(cohort.present, 1.0, 0.0))


def predicts_by_the_batch(model: Model, work: Work) -> Algorithm:
    """Predictions are centred over the batch, as if in training mode."""
    algorithm = built(model, work)

    def predict(server: Tree, own: Tree, x: Tree) -> Array:
        outputs = algorithm.predict(server, own, x)
        return outputs - outputs.mean(0)

    return algorithm._replace(predict=predict)


@pytest.mark.parametrize(
    ("factory", "broken"),
    slow.after(
        1,
        [
            (forgets_the_mask, {"what_fills_a_batch_does_not_matter"}),
            (folds_without_the_mask, {"what_fills_a_batch_does_not_matter"}),
            (weighs_by_slot, {"the_order_of_slots_does_not_matter"}),
            (ignores_the_rate, {"seeds_and_numbers_matter"}),
            (weighs_by_the_number_of_slots, {OF_DEVICES}),
            (
                sees_all_examples,
                {
                    "a_client_that_uploads_nan_is_reported_and_treated_as_absent",
                    "other_rows_and_their_order_do_not_matter",
                },
            ),
            (
                divides_by_examples_less_one,
                {
                    "a_client_of_one_example_gives_no_nan",
                    "clients_take_part_if_scheduled_with_examples_and_attending",
                },
            ),
            (hears_the_newest_message, {"delays_matter"}),
            (counts_absent_clients, {"absent_clients_change_nothing"}),
            (counts_present_clients, set()),
            (
                predicts_by_the_batch,
                {"each_output_is_of_one_example", "the_network_gives_the_outputs_for_a_new_client"},
            ),
        ],
    ),
)
def test_a_bug_is_named_by_the_law_of_runs(
    factory: Callable[..., Algorithm], broken: set[str]
) -> None:
    # The law of devices compiles a program of its own, and meets some of these bugs, too.
    names = [law for law in laws.LAWS if law != OF_DEVICES or law in broken]
    report = laws.check(factory, model=LINEAR, laws=names, tell=None)
    assert {outcome.law for outcome in report.broken} == broken
    assert all(outcome.why and "\n" not in outcome.why for outcome in report.broken)


def test_data_may_be_of_any_task() -> None:
    """Two numbers an example, and inputs of another shape."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(30, 4)), rng.normal(size=(30, 2))
    model = models.from_function(
        lambda key, x: jax.random.normal(key, (4, 2)), lambda kernel, x: x @ kernel
    )

    def squared(outputs: Array, y: Array, mask: Array) -> Array:
        errors = ((outputs - y) ** 2).mean(1)
        return jnp.where(mask, errors, 0).sum() / jnp.maximum(mask.sum(), 1)

    report = laws.check(
        fedavg.fedavg,
        hyperparameters={"loss": squared},
        model=model,
        data=examples(x.astype(np.float32), y.astype(np.float32)),
        tell=None,
    )
    assert {outcome.result for outcome in report.outcomes} == {"held"}


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(UsageError, match="gravity"):
        laws.check(fednova, laws=["gravity"])
    with pytest.raises(UsageError, match="data"):
        laws.check(fednova, data=examples(np.zeros((9, 2)), np.zeros(9)))


def test_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    called: dict[str, Any] = {}

    def check(factory: Any, hyperparameters: Any) -> laws.Report:
        called.update(hyperparameters, factory=factory)
        return laws.Report("", (laws.Outcome("gravity", "broken"),))

    monkeypatch.setattr(laws, "check", check)
    assert laws.main(["examples.fednova:fednova", "proximal=0.5", "weighting=size"]) == 1
    assert called == {"factory": fednova, "proximal": 0.5, "weighting": "size"}


def test_the_difference_that_is_named_is_the_largest() -> None:
    first = {"a": np.zeros(3), "b": np.array([1.0, 2.0, np.nan])}
    laws.assert_close(first, {"a": np.full(3, 1e-5), "b": first["b"]})
    laws.assert_equal(first, {"a": -first["a"], "b": first["b"]})
    other = {"a": np.array([0, 0.5, 0]), "b": np.array([1.0, 4.0, np.nan])}
    with pytest.raises(AssertionError, match=r"^\['b'\] differs by 2 in 1 of 3 numbers: 2 and 4$"):
        laws.assert_equal(first, other)
    for wrong in (
        {"a": np.full(3, 1e-5), "b": first["b"]},
        {"a": first["a"], "b": np.array([1.0, 2.0, 3.0])},
        {"a": np.zeros(2), "b": first["b"]},
        {"a": first["a"]},
    ):
        with pytest.raises(AssertionError):
            laws.assert_equal(first, wrong)
