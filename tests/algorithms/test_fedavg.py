"""FedAvg against a loop over clients in NumPy, in float64."""

import jax
import numpy as np
import optax
import pytest

import federations
import linear_networks as linear
from federations import assert_close
from fedjax_inv import devices, local, rounds
from fedjax_inv.algorithms.fedavg import fedavg
from fedjax_inv.types import Variables

SERVER_MOMENTUM = 0.6


@pytest.mark.parametrize("weighting", ["size", "uniform"])
def test_fedavg_is_a_loop_over_clients(weighting: str) -> None:
    with jax.enable_x64(True):
        held, server_optimizer = linear.held(), optax.sgd(1.0, SERVER_MOMENTUM)
        algorithm = fedavg(
            linear.MODEL, linear.work(), server_optimizer=server_optimizer, weighting=weighting
        )
        states = linear.run(algorithm, held)
        w, examples = linear.weights_of(states[0]), linear.examples_of(held)
        velocity = [np.zeros_like(part) for part in w]
        for cohort, state in zip(linear.ATTEND, states[1:], strict=True):
            clients = linear.present(cohort)
            moved = [linear.trained(w, examples[i]) for i in clients]
            counts = [linear.SIZES[i] if weighting == "size" else 1 for i in clients]
            mean = linear.mean(moved, counts)
            velocity = [SERVER_MOMENTUM * v + d for v, d in zip(velocity, mean, strict=True)]
            w = [a + v for a, v in zip(w, velocity, strict=True)]
            linear.assert_weights(state, w)
        x = held.data.x
        got = algorithm.predict(states[-1].server, (), x)
        np.testing.assert_allclose(got, np.asarray(x) @ w[0] @ w[1], rtol=1e-8)


def test_fedsgd_is_gradient_descent_on_the_pooled_examples() -> None:
    with jax.enable_x64(True):
        held, everyone = linear.held(), range(len(linear.SIZES))
        start, *states = linear.run(fedavg(linear.MODEL, linear.work(1)), held, [everyone] * 3)
        pooled = np.asarray(held.data.x), np.asarray(held.data.y)
        w = linear.weights_of(start)
        for state in states:
            grads = linear.gradient(w, pooled)
            w = [a - linear.RATE * g for a, g in zip(w, grads, strict=True)]
            linear.assert_weights(state, w)


def test_statistics_are_averaged_like_parameters() -> None:
    model, federation = federations.normed(), federations.federation()
    variables = federations.initial(model, jax.random.key(0))
    work = local.full_batch(optax.sgd(0.0), capacity=max(federations.SIZES))
    algorithm = fedavg(model, work, server_optimizer=optax.adam(1.0))

    @jax.jit
    def step(variables: Variables) -> rounds.State:
        state = rounds.init(algorithm, variables, federation, jax.random.key(0))
        cohort = federations.cohort([3, 0, 4])
        return rounds.step(algorithm, state, cohort, federation, axis=devices.vmapped())[0]

    state = step(variables)
    # A learning rate of zero: the running mean moves a tenth of the way to each client's mean.
    kernel = np.asarray(variables.params.body["blocks_0"]["Dense_0"]["kernel"], np.float64)
    x = np.asarray(federation.data.x, np.float64).reshape(len(federation.data.y), -1) / 255
    means = [(x[federations.rows_of(federation, who)] @ kernel).mean(0) for who in (3, 0, 4)]
    expected = 0.1 * np.average(means, 0, weights=[7, 4, 5])
    got = state.server.variables.stats.body["blocks_0"]["BatchNorm_0"]["mean"]
    assert_close(got, expected)
    assert_close(state.server.variables.params, variables.params)
