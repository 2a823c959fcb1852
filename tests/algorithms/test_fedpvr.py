"""FedPVR against its two update rules written in NumPy, in float64."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import linear_networks as linear
from fedjax_inv import local
from fedjax_inv.algorithms import fedpvr
from fedjax_inv.parts import CLASSIFIER
from fedjax_inv.types import Halves, Work

DECAY, SERVER_RATE = 0.01, 1.3


def work(momentum: float, decay: float = 0.0) -> Work:
    optimizer = optax.chain(optax.add_decayed_weights(decay), optax.sgd(linear.RATE, momentum))
    return local.full_batch(optimizer, capacity=8, num_steps=linear.NUM_STEPS)


def test_fedpvr_is_the_papers() -> None:
    """With option II as printed, of the head alone, whose steps have no momentum."""
    with jax.enable_x64(True):
        held = linear.held()
        algorithm = fedpvr.fedpvr(
            linear.MODEL, work(linear.MOMENTUM), server_optimizer=optax.sgd(SERVER_RATE)
        )
        states = linear.run(algorithm, held)
        (body, head), examples = linear.weights_of(states[0]), linear.examples_of(held)
        c, own = np.zeros((3, 3)), np.zeros((len(linear.SIZES), 3, 3))
        number = np.count_nonzero(linear.SIZES)
        for cohort, state in zip(linear.ATTEND, states[1:], strict=True):
            moved, old = [], own.copy()
            for i in linear.present(cohort):
                b, h, velocity = body, head, 0.0
                for _ in range(linear.NUM_STEPS):
                    of_body, of_head = linear.gradient([b, h], examples[i])
                    velocity = linear.MOMENTUM * velocity + of_body
                    b, h = b - linear.RATE * velocity, h - linear.RATE * (of_head - old[i] + c)
                own[i] = old[i] - c + (head - h) / (linear.NUM_STEPS * linear.RATE)
                moved.append([b - body, h - head])
            body, head = (
                at + SERVER_RATE * mean
                for at, mean in zip(
                    (body, head), linear.mean(moved, np.ones(len(moved))), strict=True
                )
            )
            c = c + (own - old).sum(0) / number
            got = (*state.server.variables.params, state.server.side.variate, state.clients)
            for leaf, wanted in zip(got, (body, head, c, own), strict=True):
                # The number of clients is a float32.
                np.testing.assert_allclose(leaf, wanted, rtol=1e-6, atol=1e-8)
            # At all times, as all start at 0.
            np.testing.assert_allclose(own.sum(0), number * c, atol=1e-12)
        assert np.abs(c).max() > 1e-2
        assert np.abs(own - c).max() > 1e-2


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.sgd(0.1, 0.9, nesterov=True),
        optax.adagrad(0.1),  # which does not start at 0
        optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.1, 0.9)),
    ],
    ids=["nesterov", "adagrad", "decay"],
)
def test_of_a_part_every_step_is_the_first(optimizer: optax.GradientTransformation) -> None:
    """And of the rest it is the optimizer's own."""
    rng = np.random.default_rng(0)

    def drawn() -> Halves:
        return Halves({"a": jnp.asarray(rng.normal(size=(2, 3)))}, jnp.asarray(rng.normal(size=4)))

    params = drawn()
    forgetful = fedpvr.without_memory(optimizer, CLASSIFIER)
    state, kept = forgetful.init(params), optimizer.init(params)
    for _ in range(3):
        grads = drawn()
        first, _ = optimizer.update(grads, optimizer.init(params), params)
        got, state = forgetful.update(grads, state, params)
        expected, kept = optimizer.update(grads, kept, params)
        chex.assert_trees_all_close(got, Halves(expected.body, first.head), rtol=1e-6)
    assert not np.allclose(expected.head, first.head, rtol=1e-2)
