"""FedProx against a loop over clients in NumPy, in float64."""

import jax
import jax.numpy as jnp
import numpy as np

import linear_networks as linear
from federations import assert_close
from fedjax_inv.algorithms.fedprox import fedprox, proximal_gradient
from fedjax_inv.types import Halves

PROXIMAL = 0.8


def test_proximal_gradient_is_that_of_the_square() -> None:
    rng = np.random.default_rng(0)
    grads, params, received = (
        Halves({"a": jnp.asarray(rng.normal(size=3))}, jnp.asarray(rng.normal(size=(2, 2))))
        for _ in range(3)
    )
    got = proximal_gradient(grads, params, received, 0.7)
    for g, w, r, out in (
        (grads.body["a"], params.body["a"], received.body["a"], got.body["a"]),
        (grads.head, params.head, received.head, got.head),
    ):
        assert_close(out, np.asarray(g) + 0.7 * (np.asarray(w) - np.asarray(r)))


def test_fedprox_is_a_loop_over_clients() -> None:
    with jax.enable_x64(True):
        held = linear.held()
        states = linear.run(fedprox(linear.MODEL, linear.work(), proximal=PROXIMAL), held)
        w, examples = linear.weights_of(states[0]), linear.examples_of(held)
        for cohort, state in zip(linear.ATTEND, states[1:], strict=True):
            clients = linear.present(cohort)
            moved = [
                linear.trained(w, examples[i], change=linear.pulled(PROXIMAL, to=w))
                for i in clients
            ]
            mean = linear.mean(moved, [linear.SIZES[i] for i in clients])
            w = [a + d for a, d in zip(w, mean, strict=True)]
            linear.assert_weights(state, w)
