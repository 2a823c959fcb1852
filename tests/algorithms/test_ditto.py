"""Ditto against a loop over clients in float64; its two networks; its limits."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax

import federations
from federations import assert_close, assert_equal, plain
from fedjax_inv import evaluation, models, rounds
from fedjax_inv.algorithms.ditto import ditto
from fedjax_inv.algorithms.fedavg import fedavg
from test_fedavg import (
    FEDERATION,
    MODEL,
    Weights,
    examples,
    reference,
    result,
    risk_gradient,
    start,
    weights,
    work,
)

SCHEDULE = plain(federations.schedule())._replace(delay=np.zeros((6, 5), np.int32))
RATE, STEPS, MOMENTUM = 0.3, 3, 0.6


@cache
def trained(proximal: float) -> rounds.State:
    """The state after six rounds."""
    server_optimizer = optax.sgd(1.0, momentum=MOMENTUM)
    algorithm = ditto(
        MODEL, work(STEPS, RATE), proximal=proximal, server_optimizer=server_optimizer
    )
    return result(algorithm, SCHEDULE)


def own_weights(state: rounds.State, client: int) -> Weights:
    return weights(jax.tree.map(lambda leaf: leaf[client], plain(state.clients.variables)))


def personal(client: int, proximal: float) -> Weights:
    """A client's own network after six rounds; the global networks are those of FedAvg's loop."""
    x, y = examples(FEDERATION, client)
    own = weights(start())
    for t, (who, present) in enumerate(zip(SCHEDULE.who, SCHEDULE.present, strict=True)):
        if client not in who[present] or len(y) == 0:
            continue
        before = jax.tree.map(lambda leaf, t=t: leaf[:t], SCHEDULE)
        received = reference(
            before,
            num_steps=STEPS,
            learning_rate=RATE,
            by_size=True,
            server_momentum=MOMENTUM,
        )
        for _ in range(STEPS):
            grads = risk_gradient(own, x, y)
            own = tuple(
                v - RATE * (g + proximal * (v - w))
                for v, g, w in zip(own, grads, received, strict=True)
            )
    return own


def test_own_networks_are_a_loop_over_clients() -> None:
    state = trained(0.8)
    for client in range(federations.NUM_CLIENTS):
        assert_close(own_weights(state, client), personal(client, 0.8))
    assert_equal(own_weights(state, 1), weights(start()))  # it has no examples


def test_the_global_network_is_that_of_fedavg_bit_for_bit() -> None:
    server_optimizer = optax.sgd(1.0, momentum=MOMENTUM)
    alone = result(fedavg(MODEL, work(STEPS, RATE), server_optimizer=server_optimizer), SCHEDULE)
    assert_equal(trained(0.8).server, alone.server)


def test_a_client_is_served_with_its_own_network_and_a_new_one_with_the_global() -> None:
    state, algorithm = trained(0.8), ditto(MODEL, work())
    seen = evaluation.evaluate(algorithm, state, FEDERATION)
    new = evaluation.evaluate(algorithm, state, FEDERATION, seen=False)
    for client in (0, 3, 4):
        x, y = examples(FEDERATION, client)
        for network, scores in ((own_weights(state, client), seen), (None, new)):
            kernel, bias = network or weights(state.server.variables)
            logits = x @ kernel + bias
            highest = logits.max(1)
            total = highest + np.log(np.exp(logits - highest[:, None]).sum(1))
            assert_close(scores.loss[client], (total - logits[np.arange(len(y)), y]).mean())
    assert algorithm.personal
    assert algorithm.network is not None
    assert_equal(
        models.predict(MODEL, algorithm.network(state.server), FEDERATION.data.x[:2]),
        algorithm.predict(
            state.server,
            algorithm.init_client(state.server._replace(variables=start()), jnp.int32(0)),
            FEDERATION.data.x[:2],
        ),
    )
