"""Ditto against a loop over clients in NumPy, in float64."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax

import linear_networks as linear
from fedjax_inv import evaluation, rounds
from fedjax_inv.algorithms.ditto import ditto
from fedjax_inv.algorithms.fedavg import fedavg

PROXIMAL = 0.8
SERVER_OPTIMIZER = optax.sgd(1.0, 0.6)


@cache
def states() -> list[rounds.State]:
    work = linear.work()
    algorithm = ditto(linear.MODEL, work, proximal=PROXIMAL, server_optimizer=SERVER_OPTIMIZER)
    return linear.run(algorithm, linear.held())


def own_weights(state: rounds.State, client: int) -> linear.Weights:
    return [np.asarray(half)[client] for half in state.clients.variables.params]


def test_own_networks_are_a_loop_over_clients() -> None:
    """The global networks, to which they are pulled, are those of FedAvg with a simple mean."""
    with jax.enable_x64(True):
        alone = fedavg(
            linear.MODEL,
            linear.work(),
            server_optimizer=SERVER_OPTIMIZER,
            weighting="uniform",
        )
        for got, expected in zip(states(), linear.run(alone, linear.held()), strict=True):
            linear.assert_weights(got, linear.weights_of(expected))
        own = [linear.weights_of(states()[0]) for _ in linear.SIZES]
        examples = linear.examples_of(linear.held())
        for cohort, before, after in zip(linear.ATTEND, states(), states()[1:], strict=False):
            change = linear.pulled(PROXIMAL, to=linear.weights_of(before))
            for i in linear.present(cohort):
                moved = linear.trained(own[i], examples[i], change=change)
                own[i] = [a + d for a, d in zip(own[i], moved, strict=True)]
            for client, expected in enumerate(own):
                for got, wanted in zip(own_weights(after, client), expected, strict=True):
                    np.testing.assert_allclose(got, wanted, rtol=1e-8, atol=1e-11)


def test_a_client_is_served_with_its_own_network_and_a_new_one_with_the_global() -> None:
    with jax.enable_x64(True):
        held, end = linear.held(), states()[-1]
        algorithm = ditto(linear.MODEL, linear.work())
        seen, new = (
            evaluation.evaluate(algorithm, end, held, seen=seen).loss for seen in (True, False)
        )
        shared = linear.weights_of(end)
        for client, examples in enumerate(linear.examples_of(held)):
            if len(examples[1]):
                own = own_weights(end, client)
                np.testing.assert_allclose(seen[client], linear.risk(own, examples), rtol=1e-6)
                np.testing.assert_allclose(new[client], linear.risk(shared, examples), rtol=1e-6)
        assert algorithm.personal
        start = algorithm.init_client(end.server, jnp.int32(0)).variables.params
        for got, wanted in zip(start, shared, strict=True):
            np.testing.assert_array_equal(got, wanted)
