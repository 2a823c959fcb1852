"""FedDG-GA against its two exchanges in NumPy, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import linear_networks as linear
from fedjax_inv.algorithms import feddg_ga
from fedjax_inv.data import federation as federations_of

STEP, NUM_ROUNDS = 0.9, 4


def test_feddg_ga_is_the_papers() -> None:
    """Who is late has an older network and an older weight, and measures at the newest."""
    with jax.enable_x64(True):
        held = linear.held()
        algorithm = feddg_ga.feddg_ga(
            linear.MODEL,
            linear.work(),
            step_size=STEP,
            num_rounds=NUM_ROUNDS,
            loss_batch_size=3,
        )
        delays = [turn % 2 for turn in range(len(linear.ATTEND))]
        states = linear.run(algorithm, held, delays=delays)
        w, examples = linear.weights_of(states[0]), linear.examples_of(held)
        a = np.array(linear.SIZES, bool) / np.count_nonzero(linear.SIZES)
        before = w, a.copy()
        for turn, cohort in enumerate(linear.ATTEND):
            clients = linear.present(cohort)
            received, weights = before if delays[turn] else (w, a)
            before = w, a.copy()
            moved = [linear.trained(received, examples[i]) for i in clients]
            own = [
                linear.risk([b + d for b, d in zip(received, delta, strict=True)], examples[i])
                for i, delta in zip(clients, moved, strict=True)
            ]
            mean = linear.mean(moved, weights[clients])
            w = [b + d for b, d in zip(w, mean, strict=True)]
            gaps = np.array([linear.risk(w, examples[i]) for i in clients]) - own
            apart = gaps - gaps.mean()
            a[clients] += STEP * (1 - turn / NUM_ROUNDS) * apart / np.abs(apart).max()
            a = np.maximum(a, 0) / np.maximum(a, 0).sum()
            linear.assert_weights(states[turn + 1], w)
            np.testing.assert_allclose(
                states[turn + 1].server.side.of_clients, a, rtol=1e-6, atol=1e-9
            )
        assert a.min() == 0


@pytest.mark.slow
def test_a_client_whose_update_is_dropped_has_no_gap() -> None:
    """Its training overflows, its loss at the averaged network does not."""
    with jax.enable_x64(True):
        held = linear.held()
        huge = np.asarray(held.data.x).copy()
        huge[federations_of.parts_of(held)[3]] *= 1e160
        held = held._replace(data=held.data._replace(x=jnp.asarray(huge)))
        algorithm = feddg_ga.feddg_ga(linear.MODEL, linear.work(), step_size=STEP)
        with_it, without = (
            linear.run(algorithm, held, attend, drop_nonfinite=True)[-1].server
            for attend in (((0, 2, 3, 4),), ((0, 2, 4),))
        )
        assert np.isfinite(without.side.of_clients).all()
        np.testing.assert_allclose(with_it.side.of_clients, without.side.of_clients, rtol=1e-12)
        assert np.ptp(without.side.of_clients) > 0.1


@pytest.mark.parametrize("gaps", [[0.11, 0.11, 0.11, 9.0], [0.1, -0.4, 0.2, 9.0]])
def test_weights_stay_on_the_simplex(gaps: list[float]) -> None:
    """Equal gaps change nothing, and the last client does not attend."""
    weights, attends = jnp.array([0.1, 0.2, 0.3, 0.4]), jnp.array([True, True, True, False])
    found = np.asarray(feddg_ga.adjusted(weights, jnp.array(gaps), attends, 0.2))
    assert found.min() >= 0
    np.testing.assert_allclose(found.sum(), 1, rtol=1e-6)
    if gaps[0] == gaps[1]:
        np.testing.assert_allclose(found, weights, rtol=1e-6)
    else:
        assert found[2] > 0.3
        assert found[1] == 0
