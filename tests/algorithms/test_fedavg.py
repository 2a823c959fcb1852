"""FedAvg against a loop over clients in NumPy, on softmax regression, in float64."""

from collections.abc import Callable
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import federations
from federations import assert_close
from fedjax_inv import devices, local, models, rounds, schedules
from fedjax_inv.algorithms.fedavg import fedavg
from fedjax_inv.types import Algorithm, Cohort, Federation, Variables, Work

Weights = tuple[np.ndarray, np.ndarray]  # kernel [36, 3], bias [3]
FEDERATION = federations.federation()
MODEL = federations.softmax_regression()


@cache
def start() -> Variables:
    return jax.jit(partial(federations.initial, MODEL))(jax.random.key(0))


def weights(variables: Variables) -> Weights:
    dense = variables.params.head["blocks_0"]["Dense_0"]
    return np.asarray(dense["kernel"], np.float64), np.asarray(dense["bias"], np.float64)


def examples(federation: Federation, client: int) -> tuple[np.ndarray, np.ndarray]:
    rows = federations.rows_of(federation, client)
    x = np.asarray(federation.data.x, np.float64)[rows].reshape(len(rows), 36) / 255
    return x, np.asarray(federation.data.y)[rows]


def risk_gradient(at: Weights, x: np.ndarray, y: np.ndarray) -> Weights:
    logits = x @ at[0] + at[1]
    probability = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    error = (probability - np.eye(3)[y]) / len(y)
    return x.T @ error, error.sum(0)


def reference(
    schedule: Cohort,
    *,
    num_steps: int,
    learning_rate: float,
    by_size: bool,
    server_momentum: float = 0.0,
    extra: Callable[[np.ndarray, np.ndarray], np.ndarray] = lambda w, received: 0 * w,
) -> Weights:
    """The global weights after a schedule. extra: added to the gradient, (w, received) -> same."""
    server = weights(start())
    velocity = [np.zeros_like(w) for w in server]
    for who, present in zip(np.asarray(schedule.who), np.asarray(schedule.present), strict=True):
        deltas, sizes = [], []
        for client in who[present]:
            x, y = examples(FEDERATION, client)
            if len(y) == 0:
                continue
            w = server
            for _ in range(num_steps):
                grads = risk_gradient(w, x, y)
                grads = [g + extra(a, b) for g, a, b in zip(grads, w, server, strict=True)]
                w = tuple(a - learning_rate * g for a, g in zip(w, grads, strict=True))
            deltas.append([a - b for a, b in zip(w, server, strict=True)])
            sizes.append(len(y) if by_size else 1)
        if deltas:
            share = np.array(sizes) / np.sum(sizes)
            mean = [sum(s * d[i] for s, d in zip(share, deltas, strict=True)) for i in range(2)]
            velocity = [server_momentum * v + m for v, m in zip(velocity, mean, strict=True)]
            server = tuple(w + v for w, v in zip(server, velocity, strict=True))
    return server


def result(
    algorithm: Algorithm, schedule: Cohort, federation: Federation = FEDERATION
) -> rounds.State:
    @jax.jit
    def run(variables: Variables) -> rounds.State:
        state = rounds.init(algorithm, variables, federation, jax.random.key(0))
        return rounds.run(algorithm, state, schedule, federation, axis=devices.chunked(1))[0]

    return run(start())


def work(num_steps: int = 1, learning_rate: float = 0.5) -> Work:
    """Steps on all of a client's examples, as those of `reference` are."""
    optimizer = optax.sgd(learning_rate)
    return local.full_batch(optimizer, capacity=max(federations.SIZES), num_steps=num_steps)


@pytest.mark.parametrize(
    ("num_steps", "weighting", "momentum"),
    [(1, "size", 0.0), (3, "size", 0.6), (3, "uniform", 0.6)],
)
def test_fedavg_is_a_loop_over_clients(num_steps: int, weighting: str, momentum: float) -> None:
    schedule = federations.schedule()._replace(delay=jnp.zeros((6, 5), jnp.int32))
    server_optimizer = optax.sgd(1.0, momentum=momentum)
    algorithm = fedavg(
        MODEL, work(num_steps), server_optimizer=server_optimizer, weighting=weighting
    )
    expected = reference(
        schedule,
        num_steps=num_steps,
        learning_rate=0.5,
        by_size=weighting == "size",
        server_momentum=momentum,
    )
    assert_close(weights(result(algorithm, schedule).server.variables), expected)


def test_fedsgd_is_gradient_descent_on_the_pooled_examples() -> None:
    algorithm = fedavg(MODEL, work())
    schedule = schedules.everyone(federations.NUM_CLIENTS, 5)
    pooled = [
        np.concatenate(part)
        for part in zip(
            *(examples(FEDERATION, client) for client in range(federations.NUM_CLIENTS)),
            strict=True,
        )
    ]
    expected = weights(start())
    for _ in range(5):
        grads = risk_gradient(expected, *pooled)
        expected = tuple(w - 0.5 * g for w, g in zip(expected, grads, strict=True))
    assert_close(weights(result(algorithm, schedule).server.variables), expected)
    uniform = fedavg(MODEL, work(), weighting="uniform")
    got = weights(result(uniform, schedule).server.variables)
    assert np.abs(got[0] - expected[0]).max() > 1e-3


def test_predicts_with_the_global_network() -> None:
    algorithm = fedavg(MODEL, work())
    server = result(algorithm, schedules.everyone(5, 1)).server
    x = FEDERATION.data.x
    assert_close(algorithm.predict(server, (), x), models.predict(MODEL, server.variables, x))


def test_statistics_are_averaged_like_parameters() -> None:
    model = federations.normed()
    variables = federations.initial(model, jax.random.key(0))
    algorithm = fedavg(model, work(learning_rate=0.0), server_optimizer=optax.adam(1.0))

    @jax.jit
    def step(variables: Variables) -> rounds.State:
        state = rounds.init(algorithm, variables, FEDERATION, jax.random.key(0))
        cohort = federations.cohort([3, 0, 4])
        return rounds.step(algorithm, state, cohort, FEDERATION, axis=devices.vmapped())[0]

    state = step(variables)
    # A learning rate of zero: the running mean moves a tenth of the way to each client's mean.
    kernel = np.asarray(variables.params.body["blocks_0"]["Dense_0"]["kernel"], np.float64)
    means = [(examples(FEDERATION, client)[0] @ kernel).mean(0) for client in (3, 0, 4)]
    expected = 0.1 * np.average(means, 0, weights=[7, 4, 5])
    got = state.server.variables.stats.body["blocks_0"]["BatchNorm_0"]["mean"]
    assert_close(got, expected)
    assert_close(state.server.variables.params, variables.params)
