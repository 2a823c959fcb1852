"""SCAFFOLD against the paper's Algorithm 1 in NumPy, in float64, on softmax regression."""

from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_inv import devices, local, models, rounds
from fedjax_inv.algorithms import scaffold
from fedjax_inv.data import federation as federations
from fedjax_inv.types import Algorithm, Array, Cohort, Federation, Tree, Work

Weights = np.ndarray  # [5, 3], the last row the bias
SIZES = (4, 1, 7, 5, 3)
NUM_CLIENTS = len(SIZES)
RATE, SERVER_RATE = 0.5, 1.7
ATTEND = ((0, 2, 3), (1, 2), (0, 1, 3, 4))
MODEL = models.from_function(
    lambda key, x: {"w": jax.random.normal(key, (x.shape[1] + 1, 3))},
    lambda params, x: x @ params["w"][:-1] + params["w"][-1],
)


def federation(*, distinct: bool, sizes: tuple[int, ...] = SIZES) -> Federation:
    """distinct: whether a client's examples differ from each other."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(sum(sizes), 4)), rng.integers(0, 3, sum(sizes))
    parts = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    held = parts if distinct else [np.full_like(part, part[0]) for part in parts]
    return federations.of_parts(federations.examples(x, y), held)


def gradient(w: Weights, held: Federation, client: int) -> Weights:
    rows = federations.parts_of(held)[client]
    x = np.hstack([np.asarray(held.data.x)[rows], np.ones((len(rows), 1))])
    probability = np.exp(x @ w) / np.exp(x @ w).sum(1, keepdims=True)
    return x.T @ (probability - np.eye(3)[np.asarray(held.data.y)[rows]]) / len(rows)


class Written(NamedTuple):
    """The algorithm's state, as the paper has it."""

    x: Weights
    c: Weights
    own: np.ndarray  # [C, 5, 3] c_i


def reference(
    start: Weights, held: Federation, num_steps: tuple[int, ...], attend: Any = ATTEND
) -> list[Written]:
    """The states after each round; num_steps: K of each client, each on all of its examples."""
    x, c = start, np.zeros_like(start)
    own = np.zeros((len(num_steps), *start.shape))
    found = []
    for cohort in attend:
        moved, changed = [], []
        for i in cohort:
            y = x
            for _ in range(num_steps[i]):
                y = y - RATE * (gradient(y, held, i) - own[i] + c)
            option_two = own[i] - c + (x - y) / (num_steps[i] * RATE)
            moved.append(y - x)
            changed.append(option_two - own[i])
            own = np.concatenate([own[:i], option_two[None], own[i + 1 :]])
        x = x + SERVER_RATE * np.mean(moved, 0)
        c = c + len(cohort) / len(own) * np.mean(changed, 0)
        found.append(Written(x, c, own))
    return found


def run(algorithm: Algorithm, held: Federation, attend: Any = ATTEND) -> tuple[Weights, list]:
    """(the first weights, the states after each round)."""

    @jax.jit
    def start() -> rounds.State:
        variables = MODEL.init(jax.random.key(0), held.data.x)
        return rounds.init(algorithm, variables, held, jax.random.key(0))

    @jax.jit
    def step(state: rounds.State, present: Array) -> rounds.State:
        who = jnp.arange(held.num_clients, dtype=jnp.int32)
        cohort = Cohort(who, present, jnp.zeros_like(who))
        return rounds.step(algorithm, state, cohort, held, axis=devices.chunked(1))[0]

    state, found = start(), []
    first = weights(state.server.variables.params)
    for present in attend:
        state = step(state, np.isin(np.arange(held.num_clients), present))
        found.append(state)
    return first, found


def weights(params: Tree) -> np.ndarray:
    return np.asarray(params.head["w"])


def written(state: rounds.State) -> Written:
    server = state.server
    everything = (server.variables.params, server.side.variate, state.clients)
    return Written(*(weights(params) for params in everything))


def full_batch(num_steps: int) -> Work:
    return local.full_batch(optax.sgd(RATE), capacity=max(SIZES), num_steps=num_steps)


def epochs() -> Work:
    return local.epochs(optax.sgd(RATE), batch_size=3, num_epochs=2)


@pytest.mark.parametrize("distinct", [True, False], ids=["steps", "epochs"])
def test_scaffold_is_the_papers(distinct: bool) -> None:
    """With option II as printed, (x - y) / (K rate), and clients that take different K."""
    with jax.enable_x64(True):
        # In an epoch, who meets which example when does not matter where all are the same.
        held = federation(distinct=distinct)
        work = full_batch(3) if distinct else epochs()
        num_steps = (3,) * NUM_CLIENTS if distinct else tuple(2 * -(-n // 3) for n in SIZES)
        algorithm = scaffold.scaffold(MODEL, work, server_optimizer=optax.sgd(SERVER_RATE))
        start, found = run(algorithm, held)
        for state, expected in zip(found, reference(start, held, num_steps), strict=True):
            for got, wanted in zip(written(state), expected, strict=True):
                np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-9)
        assert np.abs(expected.c).max() > 1e-2
        assert np.abs(expected.own - expected.c).max() > 1e-2


def test_one_client_is_gradient_descent() -> None:
    with jax.enable_x64(True):
        held = federation(distinct=True, sizes=(6,))
        w, found = run(scaffold.scaffold(MODEL, full_batch(2)), held, [(0,)] * 3)
        for state in found:
            for _ in range(2):
                w = w - RATE * gradient(w, held, 0)
            np.testing.assert_allclose(written(state).x, w, rtol=1e-6)


@cache
def with_momentum() -> Algorithm:
    """Clients whose steps are no plain gradient descent, weighted by their sizes."""
    work = local.epochs(optax.sgd(RATE, momentum=0.9), batch_size=3)
    return scaffold.scaffold(MODEL, work, weighting="size")


def test_variates_of_clients_sum_to_n_times_the_servers() -> None:
    with jax.enable_x64(True):
        _, found = run(with_momentum(), federation(distinct=True))
        for state in found:
            _, c, own = written(state)
            np.testing.assert_allclose(own.sum(0), NUM_CLIENTS * c, rtol=1e-6, atol=1e-9)
            assert np.abs(c).max() > 1e-2


def test_a_variate_is_a_mean_of_gradients_whatever_the_local_optimizer() -> None:
    """At a rate of 0 all of a client's gradients are those at x."""
    with jax.enable_x64(True):
        held = federation(distinct=True)
        work = local.full_batch(optax.adam(0.0), capacity=max(SIZES), num_steps=2)
        start, (state,) = run(scaffold.scaffold(MODEL, work), held, ATTEND[:1])
        for client in range(NUM_CLIENTS):
            expected = gradient(start, held, client) if client in ATTEND[0] else 0 * start
            np.testing.assert_allclose(written(state).own[client], expected, rtol=1e-6, atol=1e-9)
