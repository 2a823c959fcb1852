"""q-FedAvg against the paper's Algorithm 2 in NumPy, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import linear_networks as linear
from fedjax_inv.algorithms import qfedavg

STEP_SIZE, SERVER_RATE = 0.3, 1.3


def paper(
    w: linear.Weights, examples: list[linear.Examples], q: float, *, of_trained: bool = False
) -> list[linear.Weights]:
    """The weights after each round; of_trained: F is the loss after local training, a mistake."""
    after = []
    for cohort in linear.ATTEND:
        delta, h = [np.zeros_like(part) for part in w], 0.0
        for client in linear.present(cohort):
            moved = linear.trained(w, examples[client])
            at = [a + d for a, d in zip(w, moved, strict=True)] if of_trained else w
            loss = linear.risk(at, examples[client])
            change = [-part / STEP_SIZE for part in moved]
            delta = [d + loss**q * g for d, g in zip(delta, change, strict=True)]
            square = sum((g**2).sum() for g in change)
            h += q * loss ** (q - 1) * square + loss**q / STEP_SIZE
        w = [a - SERVER_RATE * d / h for a, d in zip(w, delta, strict=True)]
        after.append(w)
    return after


@pytest.mark.parametrize("q", [0.5, 3.0])
def test_qfedavg_is_the_papers(q: float) -> None:
    with jax.enable_x64(True):
        held = linear.held()
        algorithm = qfedavg.qfedavg(
            linear.MODEL,
            linear.work(),
            q=q,
            step_size=STEP_SIZE,
            loss_batch_size=3,  # 4, 7 and 5 leave a smaller one
            server_optimizer=optax.sgd(SERVER_RATE),
        )
        states = linear.run(algorithm, held)
        first, examples = linear.weights_of(states[0]), linear.examples_of(held)
        for state, w in zip(states[1:], paper(first, examples, q), strict=True):
            linear.assert_weights(state, w)
        mistaken = paper(first, examples, q, of_trained=True)[0]
        assert np.abs(mistaken[0] - linear.weights_of(states[1])[0]).max() > 1e-3


@pytest.mark.parametrize("q", [0.0, 0.5, 1.0, 2.0])
def test_a_loss_of_zero_is_finite_and_a_negative_one_is_nan(q: float) -> None:
    for loss, is_finite in ((0.0, True), (-0.1, False)):
        delta, h = qfedavg.scaled_update(jnp.ones(3), jnp.float32(loss), q=q, step_size=0.1)
        assert bool(jnp.isfinite(delta).all() & jnp.isfinite(h)) == is_finite
