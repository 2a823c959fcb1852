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
from fedjax_inv import averaging, domains, laws, models
from fedjax_inv.algorithms import coral, fedavg
from fedjax_inv.data.federation import examples
from fedjax_inv.types import Algorithm, Array, Cohort, Model, Step, Tree, Visit, Work

# The smallest network; the laws of batch normalisation are those of test_protocol.
LINEAR = models.from_function(
    lambda key, x: {"w": 0.1 * jax.random.normal(key, (x[0].size, 3))},
    lambda params, x: x.reshape(len(x), -1) @ params["w"],
)
TRACED = list(laws.LAWS)[:3]  # laws that compile next to nothing
OF_DEVICES = "devices_chunks_and_empty_slots_do_not_matter"
OF_BYTES = "inputs_of_8_bits_are_those_in_floats"
Factory = Callable[..., Algorithm]


def broken(factory: Factory, **settings: Any) -> dict[str, str]:
    """The broken laws by name, and why, in one line each."""
    try:
        laws.check(factory, **settings)
    except AssertionError as error:
        lines = [line.split(": ", 1) for line in str(error).splitlines()[1:]]
        return {words.replace(" ", "_"): why for words, why in lines}
    return {}


@pytest.mark.slow
def test_an_outside_algorithm_obeys_all_laws(capsys: pytest.CaptureFixture[str]) -> None:
    assert not broken(fednova)
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"{law.replace('_', ' ')}: held" for law in laws.LAWS]


# Planted bugs.


def built(model: Model, work: Work, gradient_from: Any = None, **hooks: Any) -> Algorithm:
    """FedAvg with hooks of `averaging`."""
    gradient = averaging.gradient(model)
    options = {"server_optimizer": optax.sgd(1.0), "weighting": "size", **hooks}
    return averaging.averaging(model, work, gradient_from or (lambda visit: gradient), **options)


def hooked(**hooks: Any) -> Factory:
    return lambda model, work: built(model, work, **hooks)


def stepping(change: Callable[[Step], Step]) -> Factory:
    """FedAvg with another result of a local step."""

    def factory(model: Model, work: Work) -> Algorithm:
        gradient = averaging.gradient(model)
        return built(model, work, lambda visit: lambda *arguments: change(gradient(*arguments)))

    return factory


def changes_the_message(setup: Any) -> Tree:
    setup.variables.params.head["more"] = jnp.zeros(())
    return ()


def compares_its_default(model: Model, work: Work, *, penalty: float = 0.5) -> Algorithm:
    return built(model, work) if penalty > 0 else fedavg.fedavg(model, work)


COUNT, RNG = itertools.count(1), np.random.default_rng(0)
BUGS_OF_TRACES: dict[str, tuple[Any, str]] = {
    "returns a number": (lambda model, work: 3, "a_round_can_be_traced"),
    "a client's number becomes an integer": (
        hooked(
            init_client=lambda server, who: jnp.zeros(()),
            remember=lambda visit, trained: trained.num_steps,
        ),
        "a_round_can_be_traced",
    ),
    "changes the message in place": (
        hooked(side=averaging.SideState(init=changes_the_message)),
        "a_round_can_be_traced",
    ),
    "counts in Python": (
        stepping(lambda step: step._replace(grads=optax.tree.scale(1 / next(COUNT), step.grads))),
        "tracing_again_gives_the_same_program",
    ),
    # The text of a program does not show what was drawn.
    "draws with NumPy": (
        stepping(
            lambda step: step._replace(
                grads=jax.tree.map(lambda leaf: leaf + RNG.normal(size=leaf.shape), step.grads)
            )
        ),
        "tracing_again_gives_the_same_program",
    ),
    "compares its default": (compares_its_default, "numbers_may_be_traced"),
}


@pytest.mark.parametrize("name", BUGS_OF_TRACES)
def test_a_bug_is_named_by_the_law_of_traces(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    factory, law = BUGS_OF_TRACES[name]
    assert [*broken(factory, model=LINEAR, laws=TRACED)] == [law]
    # Laws that meet the same error name the cause.
    lines, words = capsys.readouterr().out.splitlines(), law.replace("_", " ")
    assert len(lines) == len(TRACED)
    assert all(line.endswith(": held") or words in line for line in lines)


def forgets_the_mask(model: Model, work: Work) -> Algorithm:
    gradient = averaging.gradient(model)

    def grad_fn(variables: Tree, batch: Any, key: Array) -> Step:
        return gradient(variables, batch._replace(mask=jnp.ones_like(batch.mask)), key)

    return built(model, work, lambda visit: grad_fn)


def darkens_stored_images(model: Model, work: Work) -> Algorithm:
    gradient = averaging.gradient(model)

    def grad_fn(variables: Tree, batch: Any, key: Array) -> Step:
        return gradient(variables, batch._replace(x=0.7 * batch.x), key)

    return built(model, work, lambda visit: grad_fn)


def sees_all_examples(visit: Visit, trained: Any) -> Array:
    mean = visit.shard.data.x.mean()
    return jnp.where(mean > 1, 0.5, 1.0) + 0 * mean


def counts_clients(weight: Callable[[Cohort], Any]) -> Factory:
    """The server counts how often each client was there."""

    def factory(model: Model, work: Work) -> Algorithm:
        algorithm = built(model, work)
        (exchange,) = algorithm.exchanges

        def init(setup: Any) -> Tree:
            return algorithm.init_server(setup)._replace(side=jnp.zeros(setup.num_clients))

        def update(server: Tree, mean: Tree, cohort: Cohort) -> Tree:
            seen = server.side.at[cohort.who].add(weight(cohort))
            return exchange.update(server, mean, cohort)._replace(side=seen)

        changed = exchange._replace(update=update)
        return algorithm._replace(init_server=init, exchanges=(changed,))

    return factory


def predicts_by_the_batch(model: Model, work: Work) -> Algorithm:
    """Predictions are centred over the batch, as if in training mode."""
    algorithm = built(model, work)

    def predict(server: Tree, own: Tree, x: Tree) -> Array:
        outputs = algorithm.predict(server, own, x)
        return outputs - outputs.mean(0)

    return algorithm._replace(predict=predict)


BUGS_OF_RUNS: dict[str, tuple[Factory, set[str]]] = {
    "forgets the mask": (forgets_the_mask, {"what_fills_a_batch_does_not_matter"}),
    "darkens stored images": (darkens_stored_images, {OF_BYTES}),
    "weighs by the number of slots": (
        hooked(weighting=lambda slots: slots.size + 1.0 * len(slots.size)),
        {OF_DEVICES},
    ),
    "ignores the rate": (
        lambda model, work: built(model, laws.epochs(0.1)),
        {"delays_seeds_and_numbers_matter"},
    ),
    "sees all examples": (
        hooked(scale_delta=sees_all_examples),
        {
            "a_client_that_uploads_nan_is_reported_and_treated_as_absent",
            "a_round_needs_the_examples_of_its_clients_alone",
        },
    ),
    "divides by the examples less one": (
        hooked(scale_delta=lambda visit, trained: 1 / (visit.shard.size - 1)),
        {
            "a_client_of_one_example_gives_no_nan",
            "clients_take_part_if_scheduled_with_examples_and_attending",
        },
    ),
    "counts absent clients": (
        counts_clients(lambda cohort: 1.0),
        {"absent_clients_change_nothing"},
    ),
    "no bug": (counts_clients(lambda cohort: jnp.where(cohort.present, 1.0, 0.0)), set()),
    "predicts by the batch": (
        predicts_by_the_batch,
        {"outputs_are_of_one_example_and_of_the_network"},
    ),
}


@pytest.mark.parametrize("name", slow.after(1, BUGS_OF_RUNS))
def test_a_bug_is_named_by_the_law_of_runs(name: str) -> None:
    factory, names = BUGS_OF_RUNS[name]
    # These laws compile programs of their own, and meet some of the bugs, too.
    checked = [law for law in laws.LAWS if law not in (OF_DEVICES, OF_BYTES) or law in names]
    assert {*broken(factory, model=LINEAR, laws=checked)} == names


def test_terms_of_domains_are_at_work_where_they_are_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By default, batches of methods of domains hold two examples of two domains, and padding."""
    law = "what_fills_a_batch_does_not_matter"
    monkeypatch.setattr(
        domains, "members_of", lambda batch, number: batch.domain == jnp.arange(number)[:, None]
    )
    assert [*broken(coral.coral, laws=[law])] == [law]


def test_a_term_that_is_always_0_is_named() -> None:
    """Of four examples in batches of three there are never two domains of two."""
    settings = {"work": laws.epochs, "laws": ["delays_seeds_and_numbers_matter"]}
    (why,) = broken(coral.coral, hyperparameters={}, **settings).values()
    assert "half the penalty" in why


def test_data_may_be_of_any_task() -> None:
    """Two numbers an example, and inputs of another shape."""
    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=(30, width)).astype(np.float32) for width in (4, 2))
    model = models.from_function(
        lambda key, x: jax.random.normal(key, (4, 2)), lambda kernel, x: x @ kernel
    )

    def squared(outputs: Array, y: Array, mask: Array) -> Array:
        errors = ((outputs - y) ** 2).mean(1)
        return jnp.where(mask, errors, 0).sum() / jnp.maximum(mask.sum(), 1)

    laws.check(fedavg.fedavg, {"loss": squared}, model=model, data=examples(x, y))


def test_the_difference_that_is_named_is_the_largest() -> None:
    first = {"a": np.zeros(3), "b": np.array([1.0, 2.0, np.nan])}
    laws.assert_close(first, {"a": np.full(3, 1e-5), "b": first["b"]})
    laws.assert_equal(first, {"a": -first["a"], "b": first["b"]})
    other = {"a": np.array([0, 0.5, 0]), "b": np.array([1.0, 4.0, np.nan])}
    with pytest.raises(AssertionError, match=r"\['b'\].* 2: 2 and 4"):
        laws.assert_equal(first, other)
    for wrong in ({**first, "a": np.zeros(2)}, {"a": first["a"]}, {**first, "a": np.full(3, 1e-5)}):
        with pytest.raises(AssertionError):
            laws.assert_equal(first, wrong)
