"""FedProto's prototypes against a loop, its rounds against NumPy's sums and `jax.grad`."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import linear_networks as linear
import slow
from fedjax_inv import local
from fedjax_inv.algorithms import fedproto

NUM_STEPS, PENALTY = 3, 2.0


def test_classes_without_a_prototype_are_at_no_distance() -> None:
    known = fedproto.Prototypes(jnp.ones((3, 2)), jnp.array([True, False, True]))
    features, y = jnp.array([[1.0, 3.0], [9.0, 9.0], [0.0, 1.0]]), jnp.array([0, 1, 2])
    np.testing.assert_allclose(fedproto.distances(features, y, known), [2, 0, 0.5])
    no_class = jnp.array([-1, 3, 0])
    np.testing.assert_allclose(fedproto.distances(features, no_class, known), [0, 0, 0.5])


def risk(params: Any, mean: Any, known: Any, x: Any, y: Any) -> Any:
    features = x @ params[0]
    log_p = jax.nn.log_softmax(features @ params[1])
    squares = jnp.where(known[y][:, None], (features - mean[y]) ** 2, 0)
    return -log_p[jnp.arange(len(y)), y].mean() + PENALTY * squares.mean()


@pytest.mark.parametrize("share", slow.after(1, [False, True]))
def test_fedproto_is_its_formula(share: bool) -> None:
    """Batches are as large as the largest client, in passes: each step is one on all examples."""
    work = local.epochs(optax.sgd(linear.RATE), batch_size=7, num_epochs=NUM_STEPS)
    algorithm = fedproto.fedproto(linear.MODEL, work, penalty=PENALTY, share_weights=share)
    with jax.enable_x64(True):
        held, gradient = linear.held(), jax.jit(jax.grad(risk))
        first, *states = linear.run(algorithm, held)
        params = [np.asarray(half) for half in algorithm.network(first.server).params]
        own, examples = [params] * len(linear.SIZES), linear.examples_of(held)
        mean, known = np.zeros((3, 3)), np.zeros(3, bool)
        for cohort, state in zip(linear.ATTEND, states, strict=True):
            clients, sent = linear.present(cohort), [[] for _ in range(3)]
            for who in clients:
                (x, y), now = examples[who], params if share else own[who]
                for _ in range(NUM_STEPS):  # passes, of which the last one's features count
                    features = x @ now[0]
                    grads = gradient(now, mean, known, x, y)
                    now = [w - linear.RATE * np.asarray(g) for w, g in zip(now, grads, strict=True)]
                own[who] = now
                for k in set(y):
                    sent[k].append(features[y == k].mean(0))
            for k in range(3):
                if sent[k]:
                    mean[k], known[k] = np.mean(sent[k], 0), True
            if share:
                params = linear.mean([own[i] for i in clients], [linear.SIZES[i] for i in clients])
                linear.assert_weights(state, params)
            np.testing.assert_allclose(state.server.side.prototypes.mean, mean, rtol=1e-8)
            np.testing.assert_array_equal(state.server.side.prototypes.known, known)
        if not share:
            assert not jax.tree.leaves(states[-1].server.variables)
            for half, expected in zip(
                states[-1].clients.params, zip(*own, strict=True), strict=True
            ):
                np.testing.assert_allclose(half, np.stack(expected), rtol=1e-8)
            start = algorithm.init_client(states[-1].server, jnp.int32(9)).params
            chex.assert_trees_all_equal(start, first.server.side.initial.params)


def test_prototypes_are_of_the_last_pass_in_several_batches() -> None:
    """A frozen network: the means of a client's classes, each example once."""
    work = local.epochs(optax.sgd(0.0), batch_size=3, num_epochs=2)
    with jax.enable_x64(True):
        held = linear.held()
        first, last = linear.run(fedproto.fedproto(linear.MODEL, work), held, ((3,),))
        x, y = linear.examples_of(held)[3]
        found, features = last.server.side.prototypes, x @ linear.weights_of(first)[0]
        assert set(np.flatnonzero(found.known)) == set(y)
        for k in set(y):
            np.testing.assert_allclose(found.mean[k], features[y == k].mean(0), rtol=1e-8)
