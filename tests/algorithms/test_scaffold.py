"""SCAFFOLD against the paper's Algorithm 1 in NumPy, in float64."""

import jax
import numpy as np
import optax
import pytest

import linear_networks as linear
from fedjax_inv import local
from fedjax_inv.algorithms import scaffold
from fedjax_inv.types import Work

SERVER_RATE = 1.7
NUMBER = np.count_nonzero(linear.SIZES)


def epochs(momentum: float = 0.0) -> Work:
    return local.epochs(optax.sgd(linear.RATE, momentum), batch_size=3, num_epochs=2)


@pytest.mark.parametrize("has_epochs", [False, True], ids=["steps", "epochs"])
def test_scaffold_is_the_papers(has_epochs: bool) -> None:
    """With option II as printed, (x - y) / (K rate); in epochs clients take different K."""
    with jax.enable_x64(True):
        held = linear.alike() if has_epochs else linear.held()
        full = local.full_batch(optax.sgd(linear.RATE), capacity=8, num_steps=3)
        algorithm = scaffold.scaffold(
            linear.MODEL,
            epochs() if has_epochs else full,
            server_optimizer=optax.sgd(SERVER_RATE),
        )
        states = linear.run(algorithm, held)
        x, examples = linear.weights_of(states[0]), linear.examples_of(held)
        c = [np.zeros_like(part) for part in x]
        own = [np.zeros((len(linear.SIZES), *part.shape)) for part in x]
        for cohort, state in zip(linear.ATTEND, states[1:], strict=True):
            moved, old = [], [part.copy() for part in own]
            for i in linear.present(cohort):
                num_steps, y = 2 * -(-linear.SIZES[i] // 3) if has_epochs else 3, x
                for _ in range(num_steps):
                    grads = linear.gradient(y, examples[i])
                    parts = zip(y, grads, old, c, strict=True)
                    y = [a - linear.RATE * (g - mine[i] + b) for a, g, mine, b in parts]
                for half, before in enumerate(old):
                    change = (x[half] - y[half]) / (num_steps * linear.RATE)
                    own[half][i] = before[i] - c[half] + change
                moved.append([a - b for a, b in zip(y, x, strict=True)])
            mean = linear.mean(moved, np.ones(len(moved)))
            x = [a + SERVER_RATE * d for a, d in zip(x, mean, strict=True)]
            c = [a + (b - d).sum(0) / NUMBER for a, b, d in zip(c, own, old, strict=True)]
            linear.assert_weights(state, x)
            for half in range(2):
                got = state.server.side.variate[half], state.clients[half]
                for leaf, wanted in zip(got, (c[half], own[half]), strict=True):
                    np.testing.assert_allclose(leaf, wanted, rtol=1e-6, atol=1e-9)
        assert np.abs(c[0]).max() > 1e-2
        assert np.abs(own[0] - c[0]).max() > 1e-2


def test_variates_of_clients_sum_to_n_times_the_servers() -> None:
    """Of clients whose steps are no plain gradient descent, weighted by their sizes."""
    with jax.enable_x64(True):
        algorithm = scaffold.scaffold(linear.MODEL, epochs(linear.MOMENTUM), weighting="size")
        for state in linear.run(algorithm, linear.held())[1:]:
            c, own = np.asarray(state.server.side.variate.head), np.asarray(state.clients.head)
            np.testing.assert_allclose(own.sum(0), NUMBER * c, rtol=1e-6, atol=1e-9)
            assert np.abs(c).max() > 1e-2


def test_a_variate_is_a_mean_of_gradients_whatever_the_local_optimizer() -> None:
    """At a rate of 0 all of a client's gradients are those at x."""
    with jax.enable_x64(True):
        held, (cohort, *_) = linear.held(), linear.ATTEND
        work = local.full_batch(optax.adam(0.0), capacity=8, num_steps=2)
        start, end = linear.run(scaffold.scaffold(linear.MODEL, work), held, (cohort,))
        for client, examples in enumerate(linear.examples_of(held)):
            own = [np.asarray(half)[client] for half in end.clients]
            if client in cohort:
                expected = linear.gradient(linear.weights_of(start), examples)
            else:
                expected = [np.zeros_like(part) for part in own]
            for got, wanted in zip(own, expected, strict=True):
                np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-9)
