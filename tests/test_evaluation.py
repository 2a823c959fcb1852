import jax
import jax.numpy as jnp
import numpy as np
import pytest

import federations
from fedjax_inv import evaluation, rounds
from fedjax_inv.types import Algorithm, Array, Federation, Tree

SIZES = federations.SIZES


def logits(x: np.ndarray, own: float) -> np.ndarray:
    """A constant, a pixel against what the client has, and the brightness."""
    x = x.reshape(len(x), 36).astype(np.float64) / 255
    return np.stack([np.full(len(x), 0.8), own - x[:, 0], x.mean(1) * 3], 1)


def algorithm() -> Algorithm:
    """A client that took part has its number as its own state; one never seen has 0.5."""

    def predict(server: Tree, own: Array, x: Array) -> Array:
        flat = x.reshape(len(x), -1).astype(jnp.float32) / 255
        constant = jnp.full(len(x), server["constant"])
        return jnp.stack([constant, own - flat[:, 0], flat.mean(1) * 3], 1)

    return Algorithm(lambda v, key: v, lambda server, who: server["unseen"], (), predict)


@pytest.fixture(scope="module")
def state() -> rounds.State:
    server = {"constant": jnp.float32(0.8), "unseen": jnp.float32(0.5)}
    state = rounds.init(algorithm(), server, jax.random.key(0), len(SIZES))
    return state._replace(clients=jnp.arange(len(SIZES)) * 0.3)


def expected(federation: Federation, own: np.ndarray) -> tuple[list[float], list[float]]:
    accuracy, loss = [], []
    for rows, mask, mine in zip(federation.rows, federation.mask, own, strict=True):
        rows = np.asarray(rows)[np.asarray(mask)]
        scores = logits(np.asarray(federation.data.x)[rows], mine)
        labels = np.asarray(federation.data.y)[rows]
        losses = np.log(np.exp(scores).sum(1)) - scores[np.arange(len(rows)), labels]
        accuracy.append(np.mean(scores.argmax(1) == labels) if len(rows) else 0)
        loss.append(losses.mean() if len(rows) else 0)
    return accuracy, loss


@pytest.mark.parametrize("batch_size", [1, 3, 512])
@pytest.mark.parametrize("seen", [True, False])
def test_evaluate_follows_numpy(state: rounds.State, batch_size: int, seen: bool) -> None:
    federation = federations.federation(width=9)
    scores = evaluation.evaluate(algorithm(), state, federation, seen=seen, batch_size=batch_size)
    own = np.arange(len(SIZES)) * 0.3 if seen else np.full(len(SIZES), 0.5)
    accuracy, loss = expected(federation, own)
    assert len({round(a, 3) for a in accuracy}) > 2
    np.testing.assert_allclose(scores.accuracy, accuracy, rtol=1e-5)
    np.testing.assert_allclose(scores.loss, loss, rtol=1e-5)
    np.testing.assert_array_equal(scores.size, SIZES)


def test_padding_does_not_matter(state: rounds.State) -> None:
    federation = federations.federation()
    garbage = federations.padded(federation, 3, garbage=True)
    garbage = garbage._replace(data=garbage.data._replace(x=garbage.data.x * 255))
    scores = [
        evaluation.evaluate(algorithm(), state, each, batch_size=4)
        for each in (federation, garbage)
    ]
    for first, second in zip(*scores, strict=True):
        np.testing.assert_allclose(first, second, rtol=1e-5)


def test_clients_never_seen_may_be_more_than_the_run_had(state: rounds.State) -> None:
    federation = federations.federation((2, 3, 1, 0, 2, 4, 5))
    scores = evaluation.evaluate(algorithm(), state, federation, seen=False)
    np.testing.assert_allclose(scores.accuracy, expected(federation, np.full(7, 0.5))[0])


SCORES = evaluation.Scores(
    jnp.array([0.5, 0.0, 1.0, 0.25]), jnp.array([1.0, 0.0, 0.2, 2.0]), jnp.array([4, 0, 1, 8])
)


def test_mean_and_worst() -> None:
    accuracy, loss = evaluation.mean(SCORES)
    np.testing.assert_allclose(accuracy, (4 * 0.5 + 1 + 8 * 0.25) / 13, rtol=1e-6)
    np.testing.assert_allclose(loss, (4 + 0.2 + 16) / 13, rtol=1e-6)
    # Not the 0 of the client without examples.
    assert evaluation.worst(SCORES) == 0.25


def test_by_group_pools_examples_and_leaves_out_negatives() -> None:
    scores = evaluation.by_group(SCORES, jnp.array([2, 0, 2, -1]), 3)
    np.testing.assert_allclose(scores.accuracy, [0, 0, 3 / 5], rtol=1e-6)
    np.testing.assert_allclose(scores.loss, [0, 0, 4.2 / 5], rtol=1e-6)
    np.testing.assert_array_equal(scores.size, [0, 0, 5])
    together = evaluation.by_group(SCORES, jnp.zeros(4, jnp.int32), 1)
    np.testing.assert_allclose(together.accuracy[0], evaluation.mean(SCORES)[0], rtol=1e-6)


def test_by_group_of_several_runs_in_one_program() -> None:
    # XLA's CPU compiler drops terms of a vmapped segment sum of as many runs as clients.
    def pooled(scores: evaluation.Scores) -> evaluation.Scores:
        return evaluation.by_group(scores, jnp.zeros_like(scores.size), 1)

    runs = jax.tree.map(lambda a: jnp.stack([a, a[::-1], a, a]), SCORES)
    together = jax.jit(jax.vmap(pooled))(runs)
    np.testing.assert_array_equal(together.size, np.full((4, 1), 13))
    mean = evaluation.mean(SCORES)[0]
    np.testing.assert_allclose(together.accuracy, np.full((4, 1), mean), rtol=1e-6)


def test_an_infinite_loss_stays_in_its_group() -> None:
    scores = SCORES._replace(loss=SCORES.loss.at[0].set(jnp.inf))
    loss = evaluation.by_group(scores, jnp.array([0, 1, 1, 2]), 3).loss
    np.testing.assert_allclose(loss, [np.inf, 0.2, 2.0], rtol=1e-6)
    loss = evaluation.by_group(scores, jnp.array([-1, 1, 1, 2]), 3).loss
    np.testing.assert_allclose(loss, [0, 0.2, 2.0], rtol=1e-6)


def test_what_is_not_needed_predicts_nothing(state: rounds.State) -> None:
    looked = []

    def predict(server: Tree, own: Tree, x: Tree) -> Array:
        jax.debug.callback(lambda: looked.append(1))
        return algorithm().predict(server, own, x)

    watched = algorithm()._replace(predict=predict)
    federation = federations.federation((2, 3, 1, 0, 2))
    scores = [
        evaluation.evaluate(watched, state, federation, seen=False, needed=needed)
        for needed in (False, True)
    ]
    jax.effects_barrier()
    assert len(looked) == 4
    np.testing.assert_array_equal(scores[0].accuracy, 0)
