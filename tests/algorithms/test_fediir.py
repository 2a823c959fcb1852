"""FedIIR against its two exchanges written in NumPy, in float64, on a linear body and head."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import federations
import slow
from federations import assert_close
from fedjax_inv import communication, devices, local, rounds
from fedjax_inv.algorithms import fediir
from fedjax_inv.data import federation as federations_of
from fedjax_inv.types import Array, Federation, Halves, Model, Tree, Variables

SIZES = (4, 0, 1, 7, 5)
BATCH = 3  # of the mean gradient; 4, 7 and 5 leave a smaller one
ATTEND = ((0, 2, 3), (1, 2, 4), (0, 1, 3, 4))
RATE, MOMENTUM, NUM_STEPS, SERVER_RATE = 0.2, 0.9, 3, 1.3
PENALTY, DECAY = 0.8, 0.7
Weights = tuple[np.ndarray, np.ndarray]  # body [4, 3], head [3, 3]


def half(params: Tree, stats: Tree, x: Array, mask: Array, train: bool, key: Any = None, /) -> Any:
    return x @ params, stats


def init(key: Array, x: Array) -> Variables:
    draws = jax.random.split(key)
    params = jax.random.normal(draws[0], (4, 3)), jax.random.normal(draws[1], (3, 3))
    return Variables(Halves(*params), Halves((), ()))


MODEL = Model(init, half, half)


def held() -> Federation:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(sum(SIZES), 4)), rng.integers(0, 3, sum(SIZES))
    # Rows of other clients, not padding, lie behind those of a client.
    parts = np.split(rng.permutation(sum(SIZES)), np.cumsum(SIZES)[:-1])
    return federations_of.of_parts(federations_of.examples(x, y), parts)


def softmax(logits: np.ndarray) -> np.ndarray:
    return np.exp(logits) / np.exp(logits).sum(1, keepdims=True)


def head_gradient(w: Weights, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    error = softmax(x @ w[0] @ w[1]) - np.eye(3)[y]
    return (x @ w[0]).T @ error / len(y)


def gradient(w: Weights, mean: np.ndarray, x: np.ndarray, y: np.ndarray) -> Weights:
    """Of R + penalty ||features' error - mean||^2, the chain rule by hand."""
    features = x @ w[0]
    p = softmax(features @ w[1])
    error = (p - np.eye(3)[y]) / len(y)
    apart = 2 * PENALTY * (features.T @ error - mean)  # how the penalty grows with the gradient
    along = features @ apart
    by_logits = error + (p * along - p * (p * along).sum(1, keepdims=True)) / len(y)
    by_features = by_logits @ w[1].T + error @ apart.T
    return x.T @ by_features, features.T @ by_logits


class Written(NamedTuple):
    weights: Weights
    mean: np.ndarray  # G


def reference(w: Weights, held: Federation, by_size: bool) -> list[Written]:
    """The states after each round."""
    examples = [
        (np.asarray(held.data.x)[rows], np.asarray(held.data.y)[rows])
        for rows in federations_of.parts_of(held)
    ]
    mean, found = np.zeros((3, 3)), []
    for cohort in ATTEND:
        grads = []
        for x, y in (examples[client] for client in cohort):
            for at in range(0, len(y), BATCH):
                grads.append(head_gradient(w, x[at : at + BATCH], y[at : at + BATCH]))
        mean = DECAY * mean + (1 - DECAY) * np.mean(grads, 0)
        deltas, counts = [], []
        for x, y in (examples[client] for client in cohort if SIZES[client]):
            local_w, velocity = list(w), [0.0, 0.0]
            for _ in range(NUM_STEPS):
                for i, g in enumerate(gradient(tuple(local_w), mean, x, y)):
                    velocity[i] = MOMENTUM * velocity[i] + g
                local_w = [a - RATE * v for a, v in zip(local_w, velocity, strict=True)]
            deltas.append([a - b for a, b in zip(local_w, w, strict=True)])
            counts.append(len(y) if by_size else 1)
        body, head = (np.average(moves, 0, counts) for moves in zip(*deltas, strict=True))
        w = w[0] + SERVER_RATE * body, w[1] + SERVER_RATE * head
        found.append(Written(w, mean))
    return found


@pytest.mark.parametrize(
    "arguments", slow.after(1, [{}, {"weighting": "size"}]), ids=["uniform", "size"]
)
def test_fediir_is_its_two_exchanges(arguments: dict[str, Any]) -> None:
    with jax.enable_x64(True):
        federation = held()
        algorithm = fediir.fediir(
            MODEL,
            local.full_batch(optax.sgd(RATE, MOMENTUM), capacity=8, num_steps=NUM_STEPS),
            penalty=PENALTY,
            decay=DECAY,
            gradient_batch_size=BATCH,
            server_optimizer=optax.sgd(SERVER_RATE),
            **arguments,
        )
        key = jax.random.key(0)
        variables = jax.jit(MODEL.init)(key, federation.data.x)
        state = rounds.init(algorithm, variables, federation, key)

        @jax.jit
        def step(state: rounds.State, present: Array) -> tuple[rounds.State, Tree]:
            cohort = federations.cohort([3, 0, 4, 2, 1])._replace(present=present)
            axis = devices.chunked(2)
            return rounds.step(algorithm, state, cohort, federation, axis=axis)

        w = np.asarray(variables.params.body), np.asarray(variables.params.head)
        for expected, cohort in zip(reference(w, federation, bool(arguments)), ATTEND, strict=True):
            state, reports = step(state, np.isin([3, 0, 4, 2, 1], cohort))
            params, mean = state.server.variables.params, state.server.side
            np.testing.assert_allclose(mean, expected.mean, rtol=1e-9, atol=1e-12)
            for got, wanted in zip(params, expected.weights, strict=True):
                np.testing.assert_allclose(got, wanted, rtol=1e-9, atol=1e-12)
            assert set(reports[0].metrics) == set()
            assert set(reports[1].metrics) == {"loss", "alignment"}
        assert np.abs(expected.mean).max() > 1e-2


def test_alignment_is_the_sum_of_squared_differences() -> None:
    rng = np.random.default_rng(0)
    grads, means = ({"a": rng.normal(size=(2, 3)), "b": [rng.normal(size=4)]} for _ in range(2))
    expected = ((grads["a"] - means["a"]) ** 2).sum() + ((grads["b"][0] - means["b"][0]) ** 2).sum()
    got = fediir.alignment(*jax.tree.map(jnp.asarray, (grads, means)))
    assert got.shape == ()
    assert_close(got, np.float32(expected))


@pytest.mark.parametrize("mean", [{"a": jnp.ones(2)}, {"a": jnp.ones((1, 2))}, jnp.ones((3, 2))])
def test_alignment_refuses_trees_of_other_shapes(mean: Tree) -> None:
    with pytest.raises(ValueError, match=r"^mean_grads: has shapes .*, must have those of classi"):
        fediir.alignment({"a": jnp.ones((3, 2))}, mean)


def test_what_travels() -> None:
    """The network down twice, as clients keep nothing; beside it the mean gradient, once."""
    algorithm = federations.build(
        "fediir", federations.Config(federations.normed, federations.steps)
    )
    federation = federations.federation()

    def start() -> tuple[Variables, rounds.State]:
        key = jax.random.key(0)
        variables = federations.initial(federations.normed(), key)
        return variables, rounds.init(algorithm, variables, federation, key)

    variables, state = jax.eval_shape(start)
    network, head = communication.size(variables), communication.size(variables.params.head)
    assert 0 < head < communication.size(variables.params) < network
    assert jax.tree.leaves(state.clients) == []
    assert communication.traffic(algorithm, state, federation) == (
        communication.Traffic(down=network, up=head),
        communication.Traffic(down=network + head, up=network),
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"penalty": -1.0}, "penalty=-1.0: must be a finite number, at least 0"),
        ({"decay": 1.5}, r"decay=1.5: must be a finite number, in \[0, 1\]"),
        ({"gradient_batch_size": 0}, "gradient_batch_size=0: must be an integer of at least 1"),
        ({"weighting": "n"}, "weighting='n': must be one of size, uniform"),
    ],
)
def test_a_wrong_argument_is_refused_in_one_line(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        fediir.fediir(MODEL, federations.steps(0.1), **arguments)
