"""Averages over rounds, against means of the networks of plain training in NumPy."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import federations
import linear_networks as linear
from federations import assert_close, assert_equal, assert_same_bits
from fedjax_inv import devices, freezing, late_uploads, laws, rounds, weight_averages
from fedjax_inv.algorithms.exit_strategy import exit_strategy, server_in
from fedjax_inv.algorithms.fedavg import fedavg
from fedjax_inv.algorithms.fedbn import fedbn
from fedjax_inv.types import Algorithm, Model, Work

FEDERATION = federations.federation()


@pytest.mark.parametrize(("decay", "first"), [(0.7, 0), (1.0, 1), (0.4, 2), (0.6, 4)])
def test_the_average_is_the_weighted_mean_of_the_networks_of_the_rounds(
    decay: float, first: int
) -> None:
    with jax.enable_x64(True):
        held, plain = linear.held(), fedavg(linear.MODEL, linear.work())
        # Nobody attends the first round and the fifth.
        attend = ((), *linear.ATTEND, (), (0, 2))
        alone = linear.run(plain, held, attend)
        averaged = weight_averages.averaged(plain, decay=decay, first=first)
        states = linear.run(averaged, held, attend)
        assert averaged.network
        network, x = averaged.network, held.data.x
        counted: list[int] = []
        for t, state in enumerate(states):
            assert_same_bits(state.server.training, alone[t].server)
            counted += [t] if t > first and (t == 0 or attend[t - 1]) else []
            weights = [decay ** (len(counted) - 1 - i) for i in range(len(counted))]
            networks = [linear.weights_of(alone[s]) for s in counted or [t]]
            expected = linear.mean(networks, weights or [1])
            for got, wanted in zip(network(state.server).params, expected, strict=True):
                np.testing.assert_allclose(got, wanted, rtol=1e-8, atol=1e-11)
            outputs = averaged.predict(state.server, (), x)
            wanted = np.asarray(x) @ expected[0] @ expected[1]
            np.testing.assert_allclose(outputs, wanted, rtol=1e-7, atol=1e-10)


def last(algorithm: Algorithm, model: Model) -> rounds.State:
    @jax.jit
    def play() -> rounds.State:
        variables = federations.initial(model, jax.random.key(0))
        state = rounds.init(algorithm, variables, FEDERATION, jax.random.key(1))
        axis, cohorts = devices.chunked(2), federations.schedule()
        return rounds.run(algorithm, state, cohorts, FEDERATION, axis=axis)[0]

    return play()


def test_without_decay_or_from_the_last_round_on_it_is_the_network() -> None:
    model, num_rounds = federations.normed(), len(federations.schedule().who)
    plain = fedavg(model, federations.epochs(0.1))
    alone = last(plain, model).server
    for settings in ({"decay": 0.0}, {"first": num_rounds - 1}):
        assert_same_bits(
            last(weight_averages.averaged(plain, **settings), model).server.wrapped, alone
        )
    mean = last(weight_averages.averaged(plain), model).server.wrapped.variables
    for new, old in zip(mean, alone.variables, strict=True):  # parameters, and statistics
        assert laws.largest_difference(new, old) > 1e-3


def test_a_personal_algorithm_serves_its_clients_own_state_with_the_average() -> None:
    model = federations.normed()
    plain = fedbn(model, federations.epochs(0.1))
    averaged = weight_averages.averaged(plain, decay=0.5)
    alone, state = last(plain, model), last(averaged, model)
    assert_same_bits(state.clients, alone.clients)
    own = jax.tree.map(lambda leaf: leaf[3], state.clients)
    x = FEDERATION.data.x
    got = averaged.predict(state.server, own, x)
    assert_equal(got, plain.predict(state.server.wrapped, own, x))
    assert np.abs(got - plain.predict(alone.server, own, x)).max() > 1e-3


def test_it_stands_inside_other_wrappers_and_around_them() -> None:
    model, work = federations.small_normed(), federations.steps(0.1)

    def make(model: Model) -> Algorithm:
        return weight_averages.averaged(fedavg(model, work), decay=0.5)

    inside = last(late_uploads.reuse(freezing.train_only(make, model, ("head",))), model).server
    frozen = freezing.train_only(partial(fedavg, work=work), model, ("head",))
    around = last(weight_averages.averaged(late_uploads.reuse(frozen), decay=0.5), model).server
    assert_close(inside.wrapped.wrapped.wrapped, around.wrapped.wrapped.wrapped)
    before = federations.initial(model, jax.random.key(0)).params.body
    assert_same_bits(around.wrapped.wrapped.frozen.params.body, before)
    moved = around.training.wrapped.wrapped.variables, around.wrapped.wrapped.wrapped.variables
    assert laws.largest_difference(*moved) > 1e-3
    # Of an exit strategy the networks are averaged, not what it has measured.
    exits = last(weight_averages.averaged(exit_strategy(model, work), decay=0.5), model).server
    assert_same_bits(server_in(exits.wrapped).assessment, exits.training.assessment)


def averaged_fedavg(model: Model, work: Work, *, decay: float = 0.5, **settings: Any) -> Algorithm:
    return weight_averages.averaged(
        fedavg(model, work, **settings), decay=decay, first=jnp.int32(1)
    )


def test_it_obeys_the_laws() -> None:
    laws.check(
        averaged_fedavg,
        model=federations.softmax_regression(),
        laws=[
            "numbers_may_be_traced",
            "a_round_without_examples_changes_nothing",
            "stop_and_resume_is_bit_identical",
            "outputs_are_of_one_example_and_of_the_network",
        ],
    )
