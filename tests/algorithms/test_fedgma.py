"""FedGMA against its mask in NumPy, in float64."""

import jax
import jax.numpy as jnp
import numpy as np

import linear_networks as linear
from fedjax_inv.algorithms import fedgma

AGREEMENT = 0.6


def test_fedgma_is_the_papers() -> None:
    with jax.enable_x64(True):
        held = linear.held()
        algorithm = fedgma.fedgma(linear.MODEL, linear.work(), agreement=AGREEMENT)
        states = linear.run(algorithm, held)
        w, examples = linear.weights_of(states[0]), linear.examples_of(held)
        masks = []
        for cohort, state in zip(linear.ATTEND, states[1:], strict=True):
            clients = linear.present(cohort)
            moved = [linear.trained(w, examples[i]) for i in clients]
            sizes = [linear.SIZES[i] for i in clients]
            signs = linear.mean([[np.sign(part) for part in delta] for delta in moved], sizes)
            agreed = [np.abs(sign) for sign in signs]
            masks += [np.where(a >= AGREEMENT, 1, a) for a in agreed]
            parts = zip(w, linear.mean(moved, sizes), masks[-2:], strict=True)
            w = [a + mask * d for a, d, mask in parts]
            linear.assert_weights(state, w)
        drawn = np.concatenate([mask.ravel() for mask in masks])
        assert (drawn == 1).any()
        assert (drawn < 1).any()


def test_a_mask_is_one_from_the_agreement_on() -> None:
    found = fedgma.mask(jnp.array([-1.0, -0.5, -0.2, 0.0, 0.4, 0.5]), 0.5)
    np.testing.assert_allclose(found, [1, 1, 0.2, 0, 0.4, 1], rtol=1e-6)
