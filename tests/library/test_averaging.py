"""What methods say to the averaging family, and what their authors get wrong.

The tests of algorithms compare each hook with a loop over clients.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import federations
import linear_networks as linear
from examples import fednova
from federations import Config, assert_close
from fedjax_inv import averaging, devices, local, rounds
from fedjax_inv.algorithms import fednova as library_fednova
from fedjax_inv.types import Algorithm, Array, Cohort, Halves, Step, Variables


def test_the_example_of_a_page_is_the_fednova_of_the_library() -> None:
    work = local.epochs(optax.sgd(linear.RATE), batch_size=3, num_epochs=2, momentum=0.0)
    work = work._replace(learning_rate=linear.RATE)
    states = [
        linear.run(make(linear.MODEL, work), linear.held())[-1]
        for make in (fednova.fednova, library_fednova.fednova)
    ]
    assert_close(*map(linear.weights_of, states))


def test_a_factor_of_the_delta_leaves_statistics_alone() -> None:
    """With a factor of 0 parameters stay, and statistics are those of FedAvg."""
    model, work = federations.small_normed(), federations.steps(0.1)
    federation, key = federations.federation(), jax.random.key(0)
    variables = federations.initial(model, key)

    def after(scale_delta: Any) -> Variables:
        algorithm = averaging.averaging(
            model,
            work,
            lambda visit: averaging.gradient(model),
            server_optimizer=optax.sgd(1.0),
            weighting="size",
            scale_delta=scale_delta,
        )
        state = rounds.init(algorithm, variables, federation, key, history=federations.HISTORY)
        axis, schedule = devices.chunked(1), federations.schedule()
        one = jax.tree.map(lambda leaf: leaf[:1], schedule)
        return rounds.run(algorithm, state, one, federation, axis=axis)[0].server.variables

    stays, moves = jax.jit(lambda: (after(lambda visit, trained: jnp.zeros(())), after(None)))()
    assert_close(stays.stats, moves.stats)
    assert_close(stays.params, variables.params)
    with pytest.raises(AssertionError):
        assert_close(moves.stats, variables.stats)


def one_client_a_round(who: list[int], present: list[int], delay: list[int]) -> Cohort:
    columns = (jnp.array(leaf)[:, None] for leaf in (who, np.array(present, bool), delay))
    return Cohort(*columns)


# One of `averaging`, and those with uploads of their own.
@pytest.mark.parametrize("name", ["fedavg", "afl"])
def test_statistics_do_not_depend_on_the_network_that_a_late_client_did_not_see(name: str) -> None:
    """A change of a variance, added to that of another network, could be below 0."""
    model, federation = federations.small_normed(), federations.federation()
    algorithm = federations.build(name, Config(lambda: model, federations.full_batch))

    @jax.jit
    def after(cohorts: Cohort) -> Halves:
        key = jax.random.key(0)
        start = federations.initial(model, key)
        state = rounds.init(algorithm, start, federation, key, history=federations.HISTORY)
        state, _ = rounds.run(algorithm, state, cohorts, federation, axis=devices.chunked(1))
        return state.server.variables.stats

    late = after(one_client_a_round([0, 3], [1, 1], [0, 1]))
    alone = after(one_client_a_round([0, 3], [0, 1], [0, 0]))
    assert_close(late, alone)
    with pytest.raises(AssertionError):
        assert_close(after(one_client_a_round([0, 3], [1, 0], [0, 0])), alone)


# What a method's author gets wrong: the error names the leaf, or the exchange.


def with_step(**changed: Any) -> Algorithm:
    gradient = averaging.gradient(linear.NAMED)

    def grad_fn(variables: Variables, batch: Any, key: Array) -> Step:
        return gradient(variables, batch, key)._replace(**changed)

    return family(lambda visit: grad_fn)


def family(gradient_from: Any = None, **hooks: Any) -> Algorithm:
    gradient = gradient_from or (lambda visit: averaging.gradient(linear.NAMED))
    given = {"server_optimizer": optax.sgd(1.0), "weighting": "size", **hooks}
    return averaging.averaging(linear.NAMED, linear.work(), gradient, **given)


WRONG = {
    "grads/head/w": lambda: with_step(grads=Halves(jnp.zeros((4, 3)), {"w": jnp.zeros(())})),
    "loss": lambda: with_step(metrics={"loss": jnp.zeros(3)}),
    "client": lambda: family(init_client=lambda server, who: 0, remember=lambda visit, _: 0.5),
    "update": lambda: family(side=averaging.SideState(update=lambda state, upload, delta: delta)),
}


@pytest.mark.parametrize("place", WRONG)
def test_a_wrong_shape_or_type_is_named_by_its_place(place: str) -> None:
    with pytest.raises(AssertionError, match=place):
        linear.run(WRONG[place](), linear.held(), model=linear.NAMED)
