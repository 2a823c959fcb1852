"""FedAvg's relatives in NumPy, in float64: full-batch steps of a network of two matrices."""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import federations
from fedjax_inv import devices, local, rounds
from fedjax_inv.data import federation as federations_of
from fedjax_inv.types import Algorithm, Array, Federation, Halves, Model, Tree, Variables, Work

SIZES = (4, 0, 1, 7, 5)  # a client without examples
ATTEND = ((0, 2, 3), (1, 2, 4), (0, 1, 3, 4))
SLOTS = [3, 0, 4, 2, 1]
RATE, MOMENTUM, NUM_STEPS = 0.2, 0.9, 3
Weights = list[np.ndarray]  # body [4, 3], head [3, 3]
Examples = tuple[np.ndarray, np.ndarray]  # x [n, 4], y [n]


def _half(params: Tree, stats: Tree, x: Array, mask: Array, train: bool, key: Any = None, /) -> Any:
    return x @ params, stats


def _init(key: Array, x: Array) -> Variables:
    draws = jax.random.split(key)
    params = jax.random.normal(draws[0], (4, 3)), jax.random.normal(draws[1], (3, 3))
    return Variables(Halves(*params), Halves((), ()))


MODEL = Model(_init, _half, _half)


def _init_named(key: Array, x: Array) -> Variables:
    body, head = _init(key, x).params
    return Variables(Halves(body, {"w": head}), Halves((), ()))


# Of the same numbers, with room beside the head.
NAMED = Model(_init_named, _half, lambda params, *others: _half(params["w"], *others))


def held() -> Federation:
    """A ragged federation; rows of other clients, not padding, lie behind those of a client."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(sum(SIZES), 4)), rng.integers(0, 3, sum(SIZES))
    parts = np.split(rng.permutation(sum(SIZES)), np.cumsum(SIZES)[:-1])
    return federations_of.of_parts(federations_of.examples(x, y), parts)


def alike() -> Federation:
    """`held`, of whose clients each repeats its first example, so that no order matters."""
    federation = held()
    order = np.asarray(federation.order)
    first = order[np.minimum(np.asarray(federation.start), len(order) - 1)]
    return federation._replace(order=np.repeat(first, SIZES))


def work(num_steps: int = NUM_STEPS) -> Work:
    """Full-batch steps with momentum."""
    optimizer = optax.sgd(RATE, MOMENTUM)
    return local.full_batch(optimizer, capacity=8, num_steps=num_steps, momentum=MOMENTUM)


def examples_of(federation: Federation) -> list[Examples]:
    """The examples of each client."""
    x, y = (np.asarray(leaf) for leaf in federation.data[:2])
    return [(x[rows], y[rows]) for rows in federations_of.parts_of(federation)]


def _softmax(logits: np.ndarray) -> np.ndarray:
    return np.exp(logits) / np.exp(logits).sum(1, keepdims=True)


def risk(w: Weights, examples: Examples) -> float:
    """The mean cross-entropy."""
    x, y = examples
    return float(-np.log(_softmax(x @ w[0] @ w[1])[np.arange(len(y)), y]).mean())


def gradient(w: Weights, examples: Examples) -> Weights:
    """Of the mean cross-entropy."""
    x, y = examples
    error = (_softmax(x @ w[0] @ w[1]) - np.eye(3)[y]) / len(y)
    return [x.T @ error @ w[1].T, (x @ w[0]).T @ error]


def trained(
    w: Weights,
    examples: Examples,
    *,
    num_steps: int = NUM_STEPS,
    change: Callable[[Weights, Weights], Iterable[np.ndarray]] = lambda grads, now: grads,
) -> Weights:
    """The change of the weights by local training. change: (gradient, weights) -> direction."""
    now, velocity = w, [np.zeros_like(part) for part in w]
    for _ in range(num_steps):
        direction = change(gradient(now, examples), now)
        velocity = [MOMENTUM * v + d for v, d in zip(velocity, direction, strict=True)]
        now = [a - RATE * v for a, v in zip(now, velocity, strict=True)]
    return [a - b for a, b in zip(now, w, strict=True)]


def pulled(factor: float, to: Weights) -> Callable[[Weights, Weights], Weights]:
    """The change of gradients by a proximal term."""

    def change(grads: Weights, now: Weights) -> Weights:
        return [g + factor * (a - b) for g, a, b in zip(grads, now, to, strict=True)]

    return change


def present(cohort: tuple[int, ...]) -> list[int]:
    """The clients of a cohort that have examples."""
    return [client for client in cohort if SIZES[client]]


def mean(deltas: list[Weights], weights: Iterable[float]) -> Weights:
    """The weighted mean of changes; the weights need not sum to 1."""
    factors = np.asarray(list(weights), float)
    pairs = zip(*deltas, strict=True)
    return [np.tensordot(factors / factors.sum(), np.stack(parts), 1) for parts in pairs]


def run(
    algorithm: Algorithm,
    federation: Federation,
    attend: Any = ATTEND,
    *,
    model: Model = MODEL,
    delays: Any = (),
    drop_nonfinite: bool = False,
) -> list[rounds.State]:
    """The state before the first round and after each, two clients at once.

    model: the network that is drawn. delays: of all clients of a round, by default 0.
    """
    axis, key = devices.chunked(2), jax.random.key(0)

    @jax.jit
    def start() -> rounds.State:
        variables = model.init(key, federation.data.x)
        return rounds.init(algorithm, variables, federation, key, history=2)

    @jax.jit
    def step(state: rounds.State, is_present: Array, delay: Array) -> rounds.State:
        cohort = federations.cohort(SLOTS)._replace(present=is_present)
        cohort = cohort._replace(delay=jnp.full_like(cohort.delay, delay))
        return rounds.step(
            algorithm, state, cohort, federation, axis=axis, drop_nonfinite=drop_nonfinite
        )[0]

    found = [start()]
    for cohort, delay in zip(attend, delays or [0] * len(attend), strict=True):
        found.append(step(found[-1], jnp.asarray(np.isin(SLOTS, cohort)), jnp.int32(delay)))
    return found


def weights_of(state: rounds.State) -> Weights:
    """The server's network."""
    return [np.asarray(half) for half in state.server.variables.params]


def assert_weights(state: rounds.State, expected: Weights) -> None:
    """The server's network is the expected one, to float64's rounding."""
    for got, wanted in zip(weights_of(state), expected, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-8, atol=1e-11)


def assert_no_weight_moves_nothing(
    algorithm: Algorithm, mixture: Callable[[rounds.State], Array]
) -> None:
    """A round whose clients have a weight of 0, after one with all clients, changes nothing.

    mixture: the state -> the weights of the clients.
    """
    everyone, federation = tuple(range(len(SIZES))), held()
    first, after = run(algorithm, federation, (everyone,))
    without = tuple(np.flatnonzero(np.asarray(mixture(after)) == 0).tolist())
    assert present(without)
    *_, before, last = run(algorithm, federation, (everyone, without))
    assert_weights(last, weights_of(before))
    assert np.abs(weights_of(before)[0] - weights_of(first)[0]).max() > 1e-3
