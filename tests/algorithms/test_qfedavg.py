"""q-FedAvg against the paper's Algorithm 2 in NumPy, in float64, on a linear body and head."""

from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import federations
from federations import assert_close
from fedjax_inv import devices, local, objectives, rounds
from fedjax_inv.algorithms import fedavg, qfedavg
from fedjax_inv.data import federation as federations_of
from fedjax_inv.types import Algorithm, Array, Cohort, Federation, Halves, Work
from test_fediir import MODEL, SIZES, held, softmax

ATTEND = ((0, 2, 3), (1, 2, 4), (0, 1, 3, 4))
RATE, MOMENTUM, NUM_STEPS, STEP_SIZE, SERVER_RATE = 0.2, 0.9, 3, 0.3, 1.3
SLOTS = [3, 0, 4, 2, 1]
Weights = list[np.ndarray]  # body [4, 3], head [3, 3]


def reference(w: Weights, federation: Federation, q: float) -> list[Weights]:
    """The weights after each round."""
    parts, found = federations_of.parts_of(federation), []
    for cohort in ATTEND:
        delta, h = [np.zeros((4, 3)), np.zeros((3, 3))], 0.0
        for client in (client for client in cohort if SIZES[client]):
            x, y = (np.asarray(leaf)[parts[client]] for leaf in federation.data)
            loss = -np.log(softmax(x @ w[0] @ w[1])[np.arange(len(y)), y]).mean()
            mine, velocity = w, [0.0, 0.0]
            for _ in range(NUM_STEPS):
                error = (softmax(x @ mine[0] @ mine[1]) - np.eye(3)[y]) / len(y)
                grads = x.T @ error @ mine[1].T, (x @ mine[0]).T @ error
                velocity = [MOMENTUM * v + g for v, g in zip(velocity, grads, strict=True)]
                mine = [a - RATE * v for a, v in zip(mine, velocity, strict=True)]
            change = [(a - b) / STEP_SIZE for a, b in zip(w, mine, strict=True)]
            delta = [d + loss**q * g for d, g in zip(delta, change, strict=True)]
            square = sum((g**2).sum() for g in change)
            h += q * loss ** (q - 1) * square + loss**q / STEP_SIZE
        w = [a - SERVER_RATE * d / h for a, d in zip(w, delta, strict=True)]
        found.append(w)
    return found


def test_qfedavg_is_the_papers() -> None:
    """For several q, which is traced."""
    with jax.enable_x64(True):
        federation, key = held(), jax.random.key(0)
        optimizer = optax.sgd(RATE, MOMENTUM)

        def algorithm(q: Array) -> Algorithm:
            return qfedavg.qfedavg(
                MODEL,
                local.full_batch(optimizer, capacity=8, num_steps=NUM_STEPS),
                q=q,
                step_size=STEP_SIZE,
                loss_batch_size=3,  # 4, 7 and 5 leave a smaller one
                server_optimizer=optax.sgd(SERVER_RATE),
            )

        @jax.jit
        def step(q: Array, state: rounds.State, present: Array) -> rounds.State:
            cohort = federations.cohort(SLOTS)._replace(present=present)
            axis = devices.chunked(2)
            return rounds.step(algorithm(q), state, cohort, federation, axis=axis)[0]

        variables = jax.jit(MODEL.init)(key, federation.data.x)
        w = [np.asarray(half) for half in variables.params]
        ends = []
        for q in (0.0, 0.5, 1.0, 3.0):
            state = rounds.init(algorithm(q), variables, federation, key)
            for cohort, expected in zip(ATTEND, reference(w, federation, q), strict=True):
                state = step(q, state, np.isin(SLOTS, cohort))
                for got, wanted in zip(state.server.variables.params, expected, strict=True):
                    np.testing.assert_allclose(got, wanted, rtol=1e-9, atol=1e-12)
            ends.append(expected[0])
        gaps = [np.abs(a - b).max() for a, b in pairwise(ends)]
        assert min(gaps) > 1e-3


@pytest.mark.slow
def test_without_fairness_it_is_uniform_fedavg() -> None:
    """Statistics of norms included, whatever the step size."""
    model, federation = federations.small_normed(), federations.federation()
    work, key = federations.epochs(0.1), jax.random.key(0)

    def end(algorithm: Algorithm, schedule: Cohort) -> rounds.State:
        variables = federations.initial(model, key)
        state = rounds.init(algorithm, variables, federation, key, history=federations.HISTORY)
        return rounds.run(algorithm, state, schedule, federation, axis=devices.chunked(1))[0]

    @jax.jit
    def ends(schedule: Cohort) -> list[rounds.State]:
        algorithms = (
            qfedavg.qfedavg(model, work, q=0.0, step_size=0.3),
            *(fedavg.fedavg(model, work, weighting=by) for by in ("uniform", "size")),
        )
        return [end(algorithm, schedule) for algorithm in algorithms]

    got, expected, other = (state.server.variables for state in ends(federations.schedule()))
    assert_close(got, expected)
    with pytest.raises(AssertionError):
        assert_close(other, expected)


def test_an_update_is_scaled_by_the_loss() -> None:
    rng = np.random.default_rng(0)
    body, head = rng.normal(size=(2, 3)), rng.normal(size=4)
    delta, h = qfedavg.scaled_update(
        Halves(jnp.asarray(body), jnp.asarray(head)), jnp.float32(0.7), q=1.6, step_size=0.2
    )
    assert h.shape == ()
    assert_close(delta, Halves(*(np.float32(0.7**1.6 * part / 0.2) for part in (body, head))))
    square = ((body / 0.2) ** 2).sum() + ((head / 0.2) ** 2).sum()
    assert_close(h, np.float32(1.6 * 0.7**0.6 * square + 0.7**1.6 / 0.2))


@pytest.mark.parametrize("q", [0.0, 0.5, 1.0, 2.0])
def test_a_loss_of_zero_is_finite_and_a_negative_one_is_told(q: float) -> None:
    for loss, is_finite in ((0.0, True), (-0.1, False)):
        delta, h = qfedavg.scaled_update(jnp.ones(3), jnp.float32(loss), q=q, step_size=0.1)
        assert bool(jnp.isfinite(delta).all() & jnp.isfinite(h)) == is_finite


def test_a_negative_loss_makes_the_network_nan() -> None:
    def negative(outputs: Array, y: Array, mask: Array) -> Array:
        return objectives.cross_entropy(outputs, y, mask) - 10

    algorithm = qfedavg.qfedavg(MODEL, federations.steps(0.1), q=0.0, step_size=0.1, loss=negative)
    federation, key = held(), jax.random.key(0)

    @jax.jit
    def step() -> rounds.State:
        state = rounds.init(algorithm, federations.initial(MODEL, key), federation, key)
        cohort = federations.cohort(SLOTS)
        return rounds.step(algorithm, state, cohort, federation, axis=devices.chunked(1))[0]

    assert np.isnan(optax.tree.norm(step().server.variables.params))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"q": -1.0}, "q=-1.0: must be a finite number, at least 0"),
        ({"step_size": 0.0}, "step_size=0.0: must be above 0, as updates are divided by it"),
        ({"step_size": -0.1}, "step_size=-0.1: must be a finite number, at least 0"),
        ({"loss_batch_size": 0}, "loss_batch_size=0: must be an integer of at least 1"),
        (
            {"step_size": None},
            "step_size=None: must be a number, or `work` must record .*",
        ),
    ],
)
def test_a_wrong_argument_is_refused_in_one_line(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        qfedavg.qfedavg(MODEL, federations.steps(0.1), **{"step_size": 0.1, **arguments})


def test_the_step_size_is_that_of_the_clients_by_default() -> None:
    model, work, data = federations.mlp(), federations.steps(0.1), federations.federation()

    def program_of(work: Work, **arguments: Any) -> str:
        algorithm = qfedavg.qfedavg(model, work, **arguments)

        def one(key: Array) -> rounds.State:
            state = rounds.init(algorithm, federations.initial(model, key), data, key)
            cohort = federations.cohort([0])
            return rounds.step(algorithm, state, cohort, data, axis=devices.vmapped())[0]

        return str(jax.make_jaxpr(one)(jax.random.key(0)))

    by_default = program_of(work._replace(learning_rate=0.3))
    assert by_default == program_of(work, step_size=0.3) != program_of(work, step_size=0.2)
