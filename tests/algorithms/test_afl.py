"""Agnostic federated learning against descent and ascent in NumPy, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import scipy.optimize

import linear_networks as linear
from fedjax_inv.algorithms import afl

STEP = 0.2


def nearest(point: np.ndarray) -> np.ndarray:
    """The nearest point of the simplex: max(point - t, 0), with the t that makes it sum to 1."""

    def excess(t: float) -> float:
        return float(np.maximum(point - t, 0).sum() - 1)

    t = scipy.optimize.brentq(excess, point.min() - 1, point.max(), xtol=1e-14)
    return np.maximum(point - t, 0)


def test_afl_is_descent_and_ascent() -> None:
    with jax.enable_x64(True):
        held = linear.held()
        algorithm = afl.afl(linear.MODEL, linear.work(), step_size=STEP, loss_batch_size=3)
        states = linear.run(algorithm, held)
        w, examples = linear.weights_of(states[0]), linear.examples_of(held)
        q = np.array(linear.SIZES, bool) / np.count_nonzero(linear.SIZES)
        for cohort, state in zip(linear.ATTEND, states[1:], strict=True):
            clients = linear.present(cohort)
            moved = [linear.trained(w, examples[i]) for i in clients]
            risks = np.zeros(len(q))
            found = np.array([linear.risk(w, examples[i]) for i in clients])
            risks[clients] = found - found.mean()
            w = [a + d for a, d in zip(w, linear.mean(moved, q[clients]), strict=True)]
            q = nearest(q + STEP * risks)
            linear.assert_weights(state, w)
            np.testing.assert_allclose(state.server.side, q, rtol=1e-6, atol=1e-9)
        assert q.min() == 0
        assert np.unique(q).size > 2


def test_a_delayed_client_counts_by_the_weight_that_it_received() -> None:
    """Alone in its round it moves the network by its whole change, whatever its weight is now."""
    with jax.enable_x64(True):
        held = linear.held()
        algorithm = afl.afl(linear.MODEL, linear.work(), step_size=STEP)
        states = linear.run(algorithm, held, ((0, 2, 3, 4), (3,)), delays=(0, 1))
        first, second, third = map(linear.weights_of, states)
        delta = linear.trained(first, linear.examples_of(held)[3])
        assert abs(states[1].server.side[3] - states[0].server.side[3]) > 1e-2
        linear.assert_weights(states[2], [a + d for a, d in zip(second, delta, strict=True)])
        assert np.abs(third[0] - second[0]).max() > 1e-2


def test_clients_without_a_weight_alone_in_a_round_leave_the_network_as_it_is() -> None:
    with jax.enable_x64(True):
        algorithm = afl.afl(linear.MODEL, linear.work(), step_size=50.0)
        linear.assert_no_weight_moves_nothing(algorithm, lambda state: state.server.side)


def test_the_mixture_stays_on_the_simplex() -> None:
    rng = np.random.default_rng(0)
    for _ in range(5):
        q = rng.dirichlet(np.ones(6))
        found = np.asarray(afl.ascend(jnp.asarray(q), jnp.asarray(rng.normal(size=6)), 0.7))
        assert found.min() >= 0
        np.testing.assert_allclose(found.sum(), 1, rtol=1e-5)


def test_rounding_gives_no_client_a_weight() -> None:
    """Of many steps in float32, in which clients 0 and 1 have no loss above the mean."""
    rng = np.random.default_rng(0)
    q = jnp.asarray([0.0, 0.0, *[1 / 8] * 8], jnp.float32)
    ascend = jax.jit(afl.ascend)
    for _ in range(60):
        losses = rng.normal(size=8)
        above = [0.0, 0.0, *(losses - losses.mean())]
        q = ascend(q, jnp.asarray(above, jnp.float32), 0.1)
        assert not q[:2].any()
        np.testing.assert_allclose(q.sum(), 1, rtol=1e-5)
