"""FedProto's prototypes against a loop, its rounds against NumPy's sums and `jax.grad`."""

from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings

import federations
import slow
from federations import assert_close
from fedjax_inv import devices, local, rounds
from fedjax_inv.algorithms import fedproto
from fedjax_inv.types import Tree, Variables

RATE, NUM_STEPS, PENALTY = 0.2, 3, 2.0
ATTEND = ((0, 3), (3, 4, 2), (2, 0))
K = federations.NUM_CLASSES


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 999), size=st.integers(1, 9))
def test_prototypes_are_sums_by_class_of_real_examples(seed: int, size: int) -> None:
    rng = np.random.default_rng(seed)
    features, y, mask = rng.normal(size=(9, 4)), rng.integers(0, 5, 9), np.arange(9) < size
    features[~mask] = np.nan
    sums, counts = fedproto.prototypes(*map(jnp.asarray, (features, y, mask)), 5)
    for k in range(5):
        mine = features[:size][y[:size] == k]
        assert counts[k] == len(mine)
        np.testing.assert_allclose(sums[k], mine.sum(0), rtol=1e-5, atol=1e-6)


def test_classes_without_a_prototype_are_at_no_distance() -> None:
    known = fedproto.Prototypes(jnp.ones((3, 2)), jnp.array([True, False, True]))
    features, y = jnp.array([[1.0, 3.0], [9.0, 9.0], [0.0, 1.0]]), jnp.array([0, 1, 2])
    assert_close(fedproto.distances(features, y, known), np.array([2.0, 0.0, 0.5], np.float32))
    no_class = jnp.array([-1, 3, 0])
    assert_close(
        fedproto.distances(features, no_class, known), np.array([0.0, 0.0, 0.5], np.float32)
    )


def named(variables: Variables) -> Tree:
    hidden = variables.params.body["blocks_0"]["Dense_0"]
    last = variables.params.head["blocks_0"]["Dense_0"]
    leaves = {"w": hidden["kernel"], "a": hidden["bias"], "c": last["kernel"], "b": last["bias"]}
    return jax.tree.map(np.asarray, leaves)


def features_of(params: Tree, x: Any) -> Any:
    hidden = x @ params["w"] + params["a"]
    return hidden * (hidden > 0)


def risk(params: Tree, mean: Any, known: Any, x: Any, y: Any) -> Any:
    hidden = features_of(params, x)
    log_p = jax.nn.log_softmax(hidden @ params["c"] + params["b"])
    squares = jnp.where(known[y][:, None], (hidden - mean[y]) ** 2, 0)
    return -log_p[jnp.arange(len(y)), y].mean() + PENALTY * squares.mean()


def reference(params: Tree, federation: Any, share: bool) -> tuple[Tree, list[Tree], Any, Any]:
    """(the server's network, the clients', the prototypes, which classes have one)."""
    gradient = jax.jit(jax.grad(risk))
    mean, known = np.zeros((K, params["a"].size)), np.zeros(K, bool)
    own = [params] * federations.NUM_CLIENTS
    for cohort in ATTEND:
        sizes, sent = [], [[] for _ in range(K)]
        for who in cohort:
            rows = federations.rows_of(federation, who)
            x = np.asarray(federation.data.x, np.float64)[rows].reshape(len(rows), -1)
            y = np.asarray(federation.data.y)[rows]
            now = params if share else own[who]
            for _ in range(NUM_STEPS):  # passes, of which the last one's features count
                features = np.asarray(features_of(now, x))
                grads = gradient(now, mean, known, x, y)
                now = jax.tree.map(lambda w, g: w - RATE * np.asarray(g), now, grads)
            own[who] = now
            sizes.append(len(rows))
            for k in set(y):
                sent[k].append(features[y == k].mean(0))
        for k in range(K):
            if sent[k]:
                mean[k], known[k] = np.mean(sent[k], 0), True
        if share:
            params = jax.tree.map(
                lambda *leaves, sizes=sizes: np.average(leaves, 0, sizes),
                *(own[who] for who in cohort),
            )
    return params, own, mean, known


@pytest.mark.parametrize("share", slow.after(1, [False, True]))
def test_fedproto_is_its_formula(share: bool) -> None:
    federation = federations.in_floats(federations.federation())
    # Batches as large as the largest client, in passes: each step is one on all examples.
    work = local.epochs(optax.sgd(RATE), batch_size=7, num_epochs=NUM_STEPS)
    algorithm = fedproto.fedproto(
        federations.mlp(), work, penalty=PENALTY, share_weights=share, weighting="size"
    )
    variables = federations.initial(federations.mlp(), jax.random.key(0))
    state = rounds.init(algorithm, variables, federation, jax.random.key(1))
    with jax.enable_x64(True):
        expected = reference(named(variables), federation, share)

    @jax.jit
    def step(state: rounds.State, present: Any) -> Any:
        cohort = federations.cohort([3, 0, 4, 2, 1])._replace(present=present)
        return rounds.step(algorithm, state, cohort, federation, axis=devices.chunked(1))

    for cohort in ATTEND:
        state, reports = step(state, np.isin([3, 0, 4, 2, 1], cohort))
        assert set(reports[0].metrics) == {"loss", "distance"}
    params, own, mean, known = jax.tree.map(np.float32, expected)
    assert_close(state.server.side.prototypes.mean, mean)
    assert_close(state.server.side.prototypes.known, known.astype(bool))
    x = federation.data.x
    flat = np.asarray(x).reshape(len(x), -1)
    predict = jax.jit(algorithm.predict)
    for who in range(federations.NUM_CLIENTS):
        network = params if share else own[who]
        logits = features_of(network, flat) @ network["c"] + network["b"]
        kept = jax.tree.map(lambda leaf, who=who: leaf[who], state.clients)
        assert_close(predict(state.server, kept, x), np.asarray(logits))
    if not share:
        assert not jax.tree.leaves(state.server.variables)
        assert_close(algorithm.init_client(state.server, jnp.int32(9)), variables)


def test_prototypes_are_of_the_last_pass_in_several_batches() -> None:
    """A frozen network: the means of a client's classes, each example once."""
    federation = federations.in_floats(federations.federation())
    work = local.epochs(optax.sgd(0.0), batch_size=3, num_epochs=2)
    algorithm = fedproto.fedproto(federations.mlp(), work)
    variables = federations.initial(federations.mlp(), jax.random.key(0))
    state = rounds.init(algorithm, variables, federation, jax.random.key(1))
    cohort = federations.cohort([3])
    step = jax.jit(
        lambda state: rounds.step(algorithm, state, cohort, federation, axis=devices.chunked(1))
    )
    found = step(state)[0].server.side.prototypes
    rows = federations.rows_of(federation, 3)
    x, y = (np.asarray(leaf)[rows] for leaf in federation.data)
    features = np.asarray(features_of(named(variables), x.reshape(len(x), -1)))
    assert set(np.flatnonzero(found.known)) == set(y)
    for k in set(y):
        assert_close(found.mean[k], features[y == k].mean(0))
