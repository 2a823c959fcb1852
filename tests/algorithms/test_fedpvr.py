"""FedPVR against its two update rules written in NumPy, in float64, on a linear body and head."""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import federations
from fedjax_inv import devices, local, rounds
from fedjax_inv.algorithms import fedpvr, scaffold
from fedjax_inv.data import federation as federations_of
from fedjax_inv.parts import CLASSIFIER
from fedjax_inv.types import Algorithm, Array, Federation, Halves, Work
from test_fediir import MODEL, SIZES, held, softmax

ATTEND = ((0, 2, 3), (1, 2, 4), (0, 1, 3, 4))
RATE, MOMENTUM, DECAY, NUM_STEPS, SERVER_RATE = 0.2, 0.9, 0.01, 3, 1.3
SLOTS = [3, 0, 4, 2, 1]


class Written(NamedTuple):
    """The algorithm's state, as the paper has it."""

    body: np.ndarray  # [4, 3]
    head: np.ndarray  # [3, 3]
    c: np.ndarray  # [3, 3], of the head
    own: np.ndarray  # [C, 3, 3] c_i


def reference(w: tuple[np.ndarray, np.ndarray], federation: Federation) -> list[Written]:
    """The states after each round, with option II as printed."""
    body, head = w
    c, own, found = np.zeros((3, 3)), np.zeros((len(SIZES), 3, 3)), []
    parts = federations_of.parts_of(federation)
    for cohort in ATTEND:
        moved, changed, old = [], [], own.copy()
        for i in (client for client in cohort if SIZES[client]):
            x, y = (np.asarray(leaf)[parts[i]] for leaf in federation.data)
            b, h, velocity = body, head, 0.0
            for _ in range(NUM_STEPS):
                error = (softmax(x @ b @ h) - np.eye(3)[y]) / len(y)
                of_body, of_head = x.T @ error @ h.T, (x @ b).T @ error
                velocity = MOMENTUM * velocity + of_body
                b, h = b - RATE * velocity, h - RATE * (of_head - old[i] + c)
            own[i] = old[i] - c + (head - h) / (NUM_STEPS * RATE)
            moved.append((b - body, h - head))
            changed.append(own[i] - old[i])
        body, head = (
            at + SERVER_RATE * np.mean(moves, 0)
            for at, moves in zip((body, head), zip(*moved, strict=True), strict=True)
        )
        c = c + np.sum(changed, 0) / np.count_nonzero(SIZES)
        found.append(Written(body, head, c, own.copy()))
    return found


def work(momentum: float, decay: float = 0.0) -> Work:
    optimizer = optax.chain(optax.add_decayed_weights(decay), optax.sgd(RATE, momentum))
    return local.full_batch(optimizer, capacity=8, num_steps=NUM_STEPS)


def run(algorithm: Algorithm, federation: Federation) -> list[rounds.State]:
    """The states before the first round and after each."""
    key = jax.random.key(0)
    variables = jax.jit(MODEL.init)(key, federation.data.x)

    @jax.jit
    def step(state: rounds.State, present: Array) -> rounds.State:
        cohort = federations.cohort(SLOTS)._replace(present=present)
        return rounds.step(algorithm, state, cohort, federation, axis=devices.chunked(2))[0]

    states = [rounds.init(algorithm, variables, federation, key)]
    for cohort in ATTEND:
        states.append(step(states[-1], np.isin(SLOTS, cohort)))
    return states


def test_fedpvr_is_the_papers() -> None:
    with jax.enable_x64(True):
        federation = held()
        algorithm = fedpvr.fedpvr(MODEL, work(MOMENTUM), server_optimizer=optax.sgd(SERVER_RATE))
        start, *states = run(algorithm, federation)
        w = start.server.variables.params
        expected = reference((np.asarray(w.body), np.asarray(w.head)), federation)
        for state, wanted in zip(states, expected, strict=True):
            server = state.server
            got = (*server.variables.params, server.side.variate, state.clients)
            for leaf, other in zip(got, wanted, strict=True):
                # The number of clients is a float32.
                np.testing.assert_allclose(leaf, other, rtol=1e-6, atol=1e-8)
            # At all times, as all start at 0.
            np.testing.assert_allclose(
                wanted.own.sum(0), np.count_nonzero(SIZES) * wanted.c, atol=1e-12
            )
        assert np.abs(wanted.c).max() > 1e-2
        assert np.abs(wanted.own - wanted.c).max() > 1e-2


def test_correcting_everything_is_scaffold_without_a_momentum() -> None:
    """Weights decay in both."""
    with jax.enable_x64(True):
        federation = held()
        ours = fedpvr.fedpvr(MODEL, work(MOMENTUM, DECAY), corrected="all")
        theirs = scaffold.scaffold(MODEL, work(0.0, DECAY))
        for got, expected in zip(run(ours, federation), run(theirs, federation), strict=True):
            states = (state._replace(key=()) for state in (got, expected))
            chex.assert_trees_all_close(*states, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.sgd(0.1, 0.9, nesterov=True),
        optax.adagrad(0.1),  # which does not start at 0
        optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.1, 0.9)),
    ],
    ids=["nesterov", "adagrad", "decay"],
)
def test_of_a_part_every_step_is_the_first(optimizer: optax.GradientTransformation) -> None:
    """And of the rest it is the optimizer's own."""
    rng = np.random.default_rng(0)

    def drawn() -> Halves:
        return Halves({"a": jnp.asarray(rng.normal(size=(2, 3)))}, jnp.asarray(rng.normal(size=4)))

    params = drawn()
    forgetful = fedpvr.without_memory(optimizer, CLASSIFIER)
    state, kept = forgetful.init(params), optimizer.init(params)
    for _ in range(3):
        grads = drawn()
        first, _ = optimizer.update(grads, optimizer.init(params), params)
        got, state = forgetful.update(grads, state, params)
        expected, kept = optimizer.update(grads, kept, params)
        chex.assert_trees_all_close(got, Halves(expected.body, first.head), rtol=1e-6)
    assert not np.allclose(expected.head, first.head, rtol=1e-2)


def test_a_wrong_argument_is_refused_in_one_line() -> None:
    message = "^corrected='body': must be one of all, classifier$"
    with pytest.raises(ValueError, match=message):
        fedpvr.fedpvr(MODEL, work(0.9), corrected="body")
    with pytest.raises(ValueError, match=r"^work: its optimizer cannot be changed"):
        fedpvr.fedpvr(MODEL, work(0.9)._replace(with_optimizer=None))
    optimizer = fedpvr.without_memory(optax.sgd(0.1, 0.9), CLASSIFIER)
    grads = Halves(jnp.ones(2), jnp.ones(2))
    with pytest.raises(ValueError, match=r"^params=None: must be given"):
        optimizer.update(grads, optimizer.init(grads))
