from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import federations
from federations import assert_close
from fedjax_inv import schedules
from fedjax_inv.algorithms.fedprox import fedprox, proximal_gradient
from fedjax_inv.types import Halves
from test_fedavg import MODEL, reference, result, start, weights, work


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


def test_a_larger_proximal_term_keeps_clients_nearer() -> None:
    schedule = schedules.everyone(5, 1)
    ends = [
        result(fedprox(MODEL, work(8, 0.3), proximal=proximal), schedule).server.variables
        for proximal in (0.0, 0.5, 2.0)
    ]
    moved = [np.linalg.norm(weights(end)[0] - weights(start())[0]) for end in ends]
    assert moved[0] > 1.1 * moved[1] > 1.2 * moved[2]


@pytest.mark.parametrize("which", range(3))
def test_proximal_gradient_refuses_trees_of_other_shapes(which: int) -> None:
    whole = {"a": jnp.ones((3, 2)), "b": jnp.ones(2)}
    # Each would broadcast, or lose a leaf.
    for other in ({**whole, "a": jnp.ones(2)}, {**whole, "b": jnp.ones(1)}, {"a": whole["a"]}):
        trees = [whole, whole, whole]
        trees[which] = other
        with pytest.raises(ValueError, match=r"has shapes .*, must have those of grads"):
            proximal_gradient(*trees, 0.7)


@pytest.mark.parametrize("proximal", [-0.1, np.nan, np.inf, "0.1"])
def test_a_proximal_term_that_is_none_is_refused(proximal: Any) -> None:
    message = f"^proximal={proximal!r}: must be a finite number, at least 0$"
    with pytest.raises(ValueError, match=message):
        fedprox(MODEL, work(), proximal=proximal)
