"""FedDyn against the paper's Algorithm 1 in NumPy, in float64."""

from typing import Any

import jax
import numpy as np
import pytest

import linear_networks as linear
from fedjax_inv.algorithms import feddyn

ALPHA = 0.3


@pytest.mark.parametrize("weighting", ["uniform", "size"])
def test_feddyn_is_the_papers(weighting: str) -> None:
    """With h as the paper has it, and an own g of each client; by size as in the release."""
    with jax.enable_x64(True):
        held = linear.held()
        made = feddyn.feddyn(linear.MODEL, linear.work(), alpha=ALPHA, weighting=weighting)
        states = linear.run(made, held)
        sizes = np.array(linear.SIZES)
        share = np.maximum(sizes, 1) / sizes[sizes > 0].mean()
        factors = 1 / share if weighting == "size" else np.ones(len(sizes))
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
                    factor: float = factors[i],
                ) -> linear.Weights:
                    parts = zip(grads, mine, now, received, strict=True)
                    return [g + factor * (ALPHA * (b - c) - a) for g, a, b, c in parts]

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
