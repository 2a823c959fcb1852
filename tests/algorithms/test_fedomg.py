"""FedOMG against its equations in NumPy, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import optimize

import linear_networks as linear
from fedjax_inv.algorithms import fedavg, fedomg

KAPPA = 0.5


def softmax(logits: np.ndarray) -> np.ndarray:
    return np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()


def value(logits: np.ndarray, changes: np.ndarray) -> float:
    mean, mixed = changes.mean(0), softmax(logits) @ changes
    return float(mixed @ mean + KAPPA * np.linalg.norm(mean) * np.linalg.norm(mixed))


def weights(changes: np.ndarray) -> np.ndarray:
    """The best of 21 steps of SGD, with central differences as gradients."""
    changes = changes / np.linalg.norm(changes, axis=1).mean()
    logits = velocity = np.zeros(len(changes))
    tried = []
    for _ in range(21):
        tried.append((value(logits, changes), softmax(logits)))
        steps = 1e-5 * np.eye(len(changes))
        slope = [(value(logits + s, changes) - value(logits - s, changes)) / 2e-5 for s in steps]
        velocity = 0.5 * velocity + np.array(slope)
        logits = logits - 25 * velocity
    return min(tried, key=lambda pair: pair[0])[1]


def step(changes: np.ndarray, *, rescale: bool) -> np.ndarray:
    mean, mixed = changes.mean(0), weights(changes) @ changes
    moved = mean + KAPPA * np.linalg.norm(mean) / np.linalg.norm(mixed) * mixed
    return moved / (1 + KAPPA**2) if rescale else moved


@pytest.mark.parametrize("rescale", [False, True])
def test_fedomg_is_the_papers(rescale: bool) -> None:
    with jax.enable_x64(True):
        held = linear.held()
        algorithm = fedomg.fedomg(linear.MODEL, linear.work(), kappa=KAPPA, rescale=rescale)
        states = linear.run(algorithm, held)
        w, examples = linear.weights_of(states[0]), linear.examples_of(held)
        for cohort, state in zip(linear.ATTEND, states[1:], strict=True):
            moved = [linear.trained(w, examples[i]) for i in linear.present(cohort)]
            flat = np.stack([np.concatenate([part.ravel() for part in d]) for d in moved])
            move = step(flat, rescale=rescale)
            parts = np.split(move, [w[0].size])
            w = [a + part.reshape(a.shape) for a, part in zip(w, parts, strict=True)]
            for got, wanted in zip(linear.weights_of(state), w, strict=True):
                np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-7)


def test_the_weights_are_near_the_least_objective_of_the_simplex() -> None:
    with jax.enable_x64(True):
        changes = np.random.default_rng(2).normal(size=(4, 6)) + 0.5
        gram, present = jnp.asarray(changes @ changes.T), jnp.ones(4, bool)
        found = np.asarray(fedomg.matching_weights(gram, present, kappa=KAPPA))
    np.testing.assert_allclose(found.sum(), 1, rtol=1e-9)
    scaled = changes / np.linalg.norm(changes, axis=1).mean()
    least = min(
        optimize.minimize(value, start, args=(scaled,), method="Nelder-Mead").fun
        for start in np.random.default_rng(0).normal(size=(4, 4))
    )
    with np.errstate(divide="ignore"):
        assert least - 1e-6 <= value(np.log(found), scaled) < least + 0.01
    assert value(np.zeros(4), scaled) > least + 0.02


def test_without_kappa_it_is_fedavg_and_absent_clients_have_no_weight() -> None:
    with jax.enable_x64(True):
        held = linear.held()
        plain = fedavg.fedavg(linear.MODEL, linear.work(), weighting="uniform")
        without = fedomg.fedomg(linear.MODEL, linear.work(), kappa=0.0)
        for got, wanted in zip(linear.run(without, held), linear.run(plain, held), strict=True):
            linear.assert_weights(got, linear.weights_of(wanted))
    changes = jnp.asarray(np.random.default_rng(0).normal(size=(3, 5)), jnp.float32)
    with_absent = jnp.insert(changes, 1, 0.0, axis=0)
    present = jnp.array([True, False, True, True])
    got = fedomg.matched(with_absent, present)
    np.testing.assert_allclose(got, fedomg.matched(changes, jnp.ones(3, bool)), rtol=1e-4)


def test_equal_changes_are_a_longer_step_and_none_is_none() -> None:
    same = jnp.ones((3, 4))
    np.testing.assert_allclose(fedomg.matched(same, jnp.ones(3, bool)), 1 + KAPPA, rtol=1e-6)
    np.testing.assert_array_equal(fedomg.matched(0 * same, jnp.ones(3, bool)), 0)
