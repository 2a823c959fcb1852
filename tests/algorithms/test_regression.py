"""Regression and labels: linear networks against NumPy in float64; every algorithm that takes them.

The networks have a full batch and one local step, so that a round is a step along a gradient.
"""

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import federations
from fedjax_inv import algorithms, devices, evaluation, local, models, objectives, rounds
from fedjax_inv.algorithms import fedavg, fedipg, fedmix
from fedjax_inv.data import federation as data
from fedjax_inv.types import Algorithm, Facts, Federation

RATE = 0.1
SIZES = (3, 7, 5)
RNG = np.random.default_rng(0)
X = RNG.normal(size=(15, 4))
Y = RNG.normal(size=15)
PARTS = np.split(np.arange(15), np.cumsum(SIZES)[:-1])
WEIGHTS = np.array(SIZES) / 15
MODEL = models.mlp(1, widths=())
WORK = local.full_batch(optax.sgd(RATE), capacity=8, num_steps=1, momentum=0.0)._replace(
    learning_rate=RATE
)
COHORT = federations.cohort([0, 1, 2])


def federation(y: np.ndarray = Y) -> Federation:
    y = y.astype(np.float32) if y.dtype == np.float64 else y
    return data.of_parts(data.examples(X.astype(np.float32), y), PARTS)


def vector(params: Any) -> np.ndarray:
    """The weights and then the bias, [D + 1]."""
    kernel, bias = sorted(jax.tree.leaves(params), key=lambda leaf: -leaf.ndim)
    return np.concatenate([np.ravel(kernel), bias]).astype(np.float64)


def one_round(algorithm: Algorithm) -> tuple[np.ndarray, np.ndarray, rounds.State]:
    """The parameters before and after a round of all clients, and the state after it."""
    variables = MODEL.init(jax.random.key(0), jnp.zeros((1, 4)))
    clients = federation()
    state = rounds.init(algorithm, variables, clients, jax.random.key(1))
    play = jax.jit(lambda *a: rounds.step(algorithm, *a, axis=devices.chunked(1))[0])
    state = play(state, COHORT, clients)
    assert algorithm.network is not None
    return vector(variables.params), vector(algorithm.network(state.server).params), state


def risk(w: np.ndarray, rows: np.ndarray, y: np.ndarray = Y, x: np.ndarray = X) -> float:
    return float(((x[rows] @ w[:-1] + w[-1] - y[rows]) ** 2).mean())


def gradient(w: np.ndarray, rows: np.ndarray) -> np.ndarray:
    design = np.column_stack([X[rows], np.ones(len(rows))])
    return 2 * design.T @ (design @ w - Y[rows]) / len(rows)


def slope(function: Callable[[np.ndarray], float], w: np.ndarray) -> np.ndarray:
    """The gradient by central differences."""
    steps = 1e-5 * np.eye(len(w))
    return np.array([(function(w + step) - function(w - step)) / 2e-5 for step in steps])


def test_fedavg_takes_a_step_of_least_squares() -> None:
    """With weights by size it is the step of all examples together."""
    w, after, state = one_round(fedavg.fedavg(MODEL, WORK, loss=objectives.squared_error))
    np.testing.assert_allclose(after, w - RATE * gradient(w, np.arange(15)), rtol=1e-5)
    scores = evaluation.evaluate(
        fedavg.fedavg(MODEL, WORK),
        state,
        federation(),
        loss=objectives.squared_error,
        score=objectives.absolute_error,
    )
    errors = [abs(X[rows] @ after[:-1] + after[-1] - Y[rows]).mean() for rows in PARTS]
    np.testing.assert_allclose(scores.score, errors, rtol=1e-5)
    np.testing.assert_allclose(scores.loss, [risk(after, rows) for rows in PARTS], rtol=1e-5)


def test_fedipg_penalises_the_slope_of_the_squared_error() -> None:
    penalty = 0.01

    def objective(w: np.ndarray) -> float:
        """The mean of R + penalty <grad R, w>^2 over the clients."""
        values = [risk(w, rows) + penalty * (gradient(w, rows) @ w) ** 2 for rows in PARTS]
        return float(WEIGHTS @ values)

    algorithm = fedipg.fedipg(MODEL, WORK, penalty=penalty, loss=objectives.squared_error)
    w, after, _ = one_round(algorithm)
    np.testing.assert_allclose(after, w - RATE * slope(objective, w), rtol=2e-4, atol=1e-6)


def test_fedmix_mixes_mean_values() -> None:
    """The gradient of FedMix's risk; each client draws the mean example of one of the clients."""
    ratio = 0.2
    means = [(X[rows].mean(0), Y[rows].mean()) for rows in PARTS]

    def mixed(w: np.ndarray, rows: np.ndarray, mean: tuple[np.ndarray, float]) -> float:
        mean_x, mean_y = mean
        x = (1 - ratio) * X[rows]
        outputs = x @ w[:-1] + w[-1]
        own, other = ((outputs - y) ** 2 for y in (Y[rows], mean_y))
        along = 2 * (outputs - Y[rows]) * (w[:-1] @ mean_x)
        values = (1 - ratio) * own + ratio * other + ratio * (1 - ratio) * along
        return float(values.mean())

    algorithm = fedmix.fedmix(MODEL, WORK, ratio=ratio, loss=objectives.squared_error)
    w, after, _ = one_round(algorithm)
    steps = [[slope(partial(mixed, rows=rows, mean=mean), w) for mean in means] for rows in PARTS]
    # All combinations of the means that the three clients may have drawn.
    possible = [
        WEIGHTS @ np.array([steps[0][i], steps[1][j], steps[2][k]])
        for i in range(3)
        for j in range(3)
        for k in range(3)
    ]
    distance = min(np.abs(after - (w - RATE * each)).max() for each in possible)
    assert distance < 1e-5
    assert np.abs(after - (w - RATE * gradient(w, np.arange(15)))).max() > 1e-3


def _facts(name: str) -> Facts:
    module = importlib.import_module(f"{algorithms.__name__}.{name}")
    return getattr(module, "FACTS", Facts())


OTHERS = [name for name in algorithms.LISTED if not _facts(name).needs_classes]


def test_four_algorithms_need_classes() -> None:
    assert set(algorithms.LISTED) - set(OTHERS) == {"cafe", "fedcfa", "fedproto", "fedsr"}


@pytest.mark.parametrize("name", OTHERS)
def test_a_round_takes_values(name: str) -> None:
    """By shapes alone: nothing is compiled."""
    y = np.stack([Y, -Y], 1)
    model = models.mlp(2, widths=(3,), norm="batch")
    module = importlib.import_module(f"{algorithms.__name__}.{name}")
    work = local.steps(optax.sgd(RATE), batch_size=2, num_steps=2, momentum=0.0)._replace(
        learning_rate=RATE
    )
    loss, score = objectives.DEFAULTS["values"]
    algorithm = getattr(module, name)(model, work, loss=loss)
    variables = model.init(jax.random.key(0), jnp.zeros((1, 4)))
    clients = federation(y)
    if _facts(name).pooled:
        clients = data.pooled(clients)
    cohort = federations.cohort(list(range(clients.num_clients)))
    state = jax.eval_shape(lambda: rounds.init(algorithm, variables, clients, jax.random.key(1)))

    def play(state: rounds.State) -> Any:
        state, reports = rounds.step(algorithm, state, cohort, clients, axis=devices.chunked(1))
        of = evaluation.evaluate(algorithm, state, clients, loss=loss, score=score.function)
        return state, reports, of

    after, reports, scores = jax.eval_shape(play, state)
    assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, state)
    assert scores.score.shape == (clients.num_clients,)
    assert all(leaf.dtype == jnp.float32 for each in reports for leaf in each.metrics.values())
