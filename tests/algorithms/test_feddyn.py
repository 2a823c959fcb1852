"""FedDyn against the paper's Algorithm 1 in NumPy, in float64."""

from typing import Any

import jax
import numpy as np
import pytest

import linear_networks as linear
from fedjax_inv.algorithms import fedavg, feddyn

ALPHA = 0.3


def test_feddyn_is_the_papers() -> None:
    """With h as the paper has it, and an own g of each client."""
    with jax.enable_x64(True):
        held = linear.held()
        states = linear.run(feddyn.feddyn(linear.MODEL, linear.work(), alpha=ALPHA), held)
        w, examples = linear.weights_of(states[0]), linear.examples_of(held)
        own = [[np.zeros_like(part) for part in w] for _ in linear.SIZES]
        h = [np.zeros_like(part) for part in w]
        for cohort, state in zip(linear.ATTEND, states[1:], strict=True):
            clients = linear.present(cohort)
            moved = []
            for i in clients:

                def change(
                    grads: linear.Weights,
                    now: linear.Weights,
                    mine: Any = own[i],
                    received: Any = w,
                ) -> linear.Weights:
                    parts = zip(grads, mine, now, received, strict=True)
                    return [g - a + ALPHA * (b - c) for g, a, b, c in parts]

                moved.append(linear.trained(w, examples[i], change=change))
            for i, delta in zip(clients, moved, strict=True):
                own[i] = [mine - ALPHA * d for mine, d in zip(own[i], delta, strict=True)]
            total = [np.sum(parts, 0) for parts in zip(*moved, strict=True)]
            h = [
                a - ALPHA / np.count_nonzero(linear.SIZES) * d
                for a, d in zip(h, total, strict=True)
            ]
            parts = zip(w, total, h, strict=True)
            w = [b + d / len(clients) - a / ALPHA for b, d, a in parts]
            linear.assert_weights(state, w)
            for got, wanted in zip(state.clients, zip(*own, strict=True), strict=True):
                np.testing.assert_allclose(got, np.stack(wanted), rtol=1e-8, atol=1e-11)
        assert max(np.abs(part).max() for part in h) > 1e-2


@pytest.mark.slow
def test_the_first_single_step_is_that_of_uniform_fedavg_and_a_share() -> None:
    """In the first round g and h are 0: the mean, and a share of it, is added."""
    with jax.enable_x64(True):
        held, everyone = linear.held(), [range(len(linear.SIZES))]
        start, end = linear.run(
            feddyn.feddyn(linear.MODEL, linear.work(1), alpha=ALPHA), held, everyone
        )
        _, plain = linear.run(
            fedavg.fedavg(linear.MODEL, linear.work(1), weighting="uniform"), held, everyone
        )
        share = 1 + len(linear.present(everyone[0])) / np.count_nonzero(linear.SIZES)
        pairs = zip(*map(linear.weights_of, (start, plain)), strict=True)
        # After one step the quadratic term has had no effect.
        linear.assert_weights(end, [a + share * (b - a) for a, b in pairs])


@pytest.mark.parametrize(
    ("alpha", "message"),
    [
        (0.0, "alpha=0.0: must be above 0, as h is divided by it"),
        (-1.0, "alpha=-1.0: must be a finite number, at least 0"),
    ],
)
def test_a_wrong_argument_is_refused_in_one_line(alpha: float, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        feddyn.feddyn(linear.MODEL, linear.work(), alpha=alpha)
