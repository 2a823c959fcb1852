import jax.numpy as jnp
import numpy as np
import pytest

import federations
from federations import assert_close
from fedjax_inv.algorithms.fedprox import fedprox, proximal_gradient
from fedjax_inv.types import Halves
from test_fedavg import MODEL, reference, result, weights, work


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


@pytest.mark.parametrize("weighting", ["size", "uniform"])
def test_fedprox_is_a_loop_over_clients(weighting: str) -> None:
    schedule = federations.schedule()._replace(delay=jnp.zeros((6, 5), jnp.int32))
    algorithm = fedprox(MODEL, work(3), proximal=0.8, weighting=weighting)
    expected = reference(
        schedule,
        num_steps=3,
        learning_rate=0.5,
        by_size=weighting == "size",
        extra=lambda w, received: 0.8 * (w - received),
    )
    assert_close(weights(result(algorithm, schedule).server.variables), expected)
