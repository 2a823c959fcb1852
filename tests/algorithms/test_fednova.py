"""FedNova against normalised averaging in NumPy, in float64."""

import jax
import numpy as np
import optax
import pytest

import linear_networks as linear
import slow
from fedjax_inv import local
from fedjax_inv.algorithms import fednova

PROXIMAL = 0.4


def counts(num_steps: int, *, proximal: float) -> float:
    """The sum of the factors of the gradients, each followed alone through the local steps."""
    total = 0.0
    for first in range(num_steps):
        velocity = moved = 0.0
        for turn in range(num_steps):
            direction = (turn == first) - linear.RATE * proximal * moved
            velocity = linear.MOMENTUM * velocity + direction
            moved += velocity
        total += moved
    return total


@pytest.mark.parametrize("proximal", slow.after(1, [PROXIMAL, 3.5 / linear.RATE]))
def test_fednova_is_the_papers(proximal: float) -> None:
    """Clients take one step for each batch of three examples, here all of the same example.

    With the largest proximal term some counts of steps are negative.
    """
    with jax.enable_x64(True):
        held = linear.alike()
        optimizer = optax.sgd(linear.RATE, linear.MOMENTUM)
        work = local.epochs(optimizer, batch_size=3, num_epochs=2, momentum=linear.MOMENTUM)
        work = work._replace(learning_rate=linear.RATE)
        states = linear.run(fednova.fednova(linear.MODEL, work, proximal=proximal), held)
        w, examples = linear.weights_of(states[0]), linear.examples_of(held)
        for cohort, state in zip(linear.ATTEND, states[1:], strict=True):
            clients = linear.present(cohort)
            steps = [2 * -(-linear.SIZES[i] // 3) for i in clients]
            assert len(set(steps)) > 1
            a = [counts(k, proximal=proximal) for k in steps]
            change = linear.pulled(proximal, to=w)
            moved = [
                [
                    part / count
                    for part in linear.trained(w, examples[i], num_steps=k, change=change)
                ]
                for i, k, count in zip(clients, steps, a, strict=True)
            ]
            p = np.array([linear.SIZES[i] for i in clients]) / sum(linear.SIZES[i] for i in clients)
            w = [b + p @ a * d for b, d in zip(w, linear.mean(moved, p), strict=True)]
            linear.assert_weights(state, w)


def test_the_number_of_steps_has_a_closed_form() -> None:
    k, rho, shrinkage = 7, 0.9, 0.3
    assert float(fednova.effective_steps(k)) == k
    assert float(fednova.effective_steps(np.uint8(k))) == k
    assert float(fednova.effective_steps(0, rho)) == 0
    with_momentum = (k - rho * (1 - rho**k) / (1 - rho)) / (1 - rho)
    np.testing.assert_allclose(fednova.effective_steps(k, rho), with_momentum, rtol=1e-5)
    with_proximal = (1 - (1 - shrinkage) ** k) / shrinkage
    found = fednova.effective_steps(k, shrinkage=shrinkage)
    np.testing.assert_allclose(found, with_proximal, rtol=1e-5)
