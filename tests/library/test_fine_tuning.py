"""Fine-tuning of the global network by each client, against a loop in float64."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import federations
from federations import assert_close, assert_equal
from fedjax_inv import evaluation, fine_tuning, freezing, missing, rounds
from fedjax_inv.algorithms import ditto, fedavg, fl_games
from fedjax_inv.checks import UsageError
from fedjax_inv.data import federation as federations_of
from test_fedavg import FEDERATION, MODEL, examples, risk_gradient, start, weights, work

KEY = jax.random.key(5)
ALGORITHM = fedavg.fedavg(MODEL, work())


@pytest.fixture(scope="module")
def state() -> rounds.State:
    return rounds.init(ALGORITHM, start(), FEDERATION, KEY)


def tuned(state: rounds.State, algorithm: Any = ALGORITHM, **arguments: Any) -> Any:
    arguments = {"model": MODEL, "work": work(3, 0.4), "key": KEY, **arguments}
    return fine_tuning.fine_tuned(algorithm, state, FEDERATION, **arguments)


def test_each_client_trains_the_global_network_on_its_own_examples(state: rounds.State) -> None:
    personal, after = tuned(state)
    everyone = [weights(jax.tree.map(lambda a, c=c: a[c], after.clients)) for c in range(5)]
    for client, own in enumerate(everyone):
        x, y = examples(FEDERATION, client)
        expected = weights(start())
        for _ in range(3 if len(y) else 0):
            grads = risk_gradient(expected, x, y)
            expected = tuple(w - 0.4 * g for w, g in zip(expected, grads, strict=True))
        assert_close(own, expected)
    scores = evaluation.evaluate(personal, after, FEDERATION)
    for client, (kernel, bias) in enumerate(everyone):
        x, y = examples(FEDERATION, client)
        if len(y):
            assert_close(scores.score[client], ((x @ kernel + bias).argmax(1) == y).mean())
    # A client that was never seen gets the global network, which itself has not moved.
    shared = evaluation.evaluate(ALGORITHM, state, FEDERATION)
    assert_close(evaluation.evaluate(personal, after, FEDERATION, seen=False), shared)
    assert_equal(after.server, state.server)
    trains = np.asarray(FEDERATION.size) > 0
    assert (scores.loss[trains] < shared.loss[trains]).all()


@pytest.mark.slow
def test_chunks_and_runs_change_nothing(state: rounds.State) -> None:
    """In a `vmap` over runs, each with a key, and with minibatches and dropped-out draws."""
    keys, minibatches = jax.random.split(KEY, 2), federations.epochs(0.2)

    def clients(key: Any, chunk: int) -> Any:
        return tuned(state, work=minibatches, key=key, client_chunk=chunk)[1].clients

    together = jax.jit(jax.vmap(lambda key: clients(key, 1)))(keys)
    alone = jax.jit(lambda key: clients(key, 9))
    for run in range(2):
        assert_close(jax.tree.map(lambda a, r=run: a[r], together), alone(keys[run]))
    first, second = (jax.tree.map(lambda a, r=r: a[r], together) for r in range(2))
    assert max(jax.tree.leaves(jax.tree.map(lambda a, b: jnp.abs(a - b).max(), first, second))) > 0


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        (
            fl_games.fl_games(federations.normed_head(), federations.steps(0.1)),
            "algorithm: has no global network to fine-tune, must have one",
        ),
        (
            ditto.ditto(MODEL, work()),
            "algorithm: is personal already, must serve all clients alike",
        ),
        (
            fedavg.fedavg(MODEL, work())._replace(own_outputs=True),
            "algorithm: computes outputs in a way of its own, must not",
        ),
    ],
)
def test_what_cannot_be_fine_tuned_is_refused(
    state: rounds.State, algorithm: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        tuned(state, algorithm)


def test_a_network_of_which_a_part_is_frozen_is_refused(state: rounds.State) -> None:
    """Nested or not; its other parameters would train, too."""
    frozen = freezing.Server(state.server, state.server.variables)
    for server in (frozen, missing.Server(frozen, ())):
        with pytest.raises(UsageError, match=r"^state: is of `freezing.train_only`, must train"):
            tuned(state._replace(server=server), ALGORITHM)


def test_a_compact_federation_is_refused(state: rounds.State) -> None:
    """Its clients' numbers are no indices into it."""
    few = federations_of.compact(FEDERATION, np.array([0, 2]))
    with pytest.raises(ValueError, match=r"^federation: is compact, must have all its clients$"):
        fine_tuning.fine_tuned(ALGORITHM, state, few, model=MODEL, work=work(3, 0.4), key=KEY)
