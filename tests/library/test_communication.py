from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

import federations
from federations import Config
from fedjax_inv import aggregators, communication, rounds
from fedjax_inv.types import Algorithm, Cohort, Exchange, Model, Reply, Tree, Visit


def traffic(algorithm: Algorithm, variables: object) -> tuple[communication.Traffic, ...]:
    federation = federations.federation()
    state = jax.eval_shape(
        lambda: rounds.init(algorithm, variables, federation, jax.random.key(0), history=3)
    )
    return communication.traffic(algorithm, state, federation)


# 36 inputs, 5 and 4 hidden units, 3 classes, 4 bytes a number. No biases before the norms, which
# have 2 parameters and 2 statistics for each unit.
NORMED = 4 * (36 * 5 + 4 * 5 + 5 * 4 + 4 * 4 + (4 + 1) * 3)
NORMED_HEAD = 4 * (5 * 4 + 2 * 4 + (4 + 1) * 3)
NORMED_PARAMS, NORMS = NORMED - 4 * 2 * (5 + 4), 4 * 4 * (5 + 4)


@pytest.mark.parametrize(
    ("name", "model", "down", "up"),
    [
        ("fedavg", federations.normed, NORMED, NORMED),
        # The control variate, of the parameters only, goes down and up with the network.
        ("scaffold", federations.normed, NORMED + NORMED_PARAMS, NORMED + NORMED_PARAMS),
        # The control variate of the head alone.
        ("fedpvr", federations.normed, NORMED + NORMED_HEAD, NORMED + NORMED_HEAD),
        # The curvature, a number, goes up with the network.
        ("qfedavg", federations.normed, NORMED, NORMED + 4),
        # Norms stay, but their mean, which serves a client never seen, goes up.
        ("fedbn", federations.normed, NORMED - NORMS, NORMED),
    ],
)
def test_traffic_counts_every_array(
    name: str, model: Callable[[], Model], down: int, up: int
) -> None:
    more = {"step_size": 0.1} if name == "qfedavg" else {}
    algorithm = federations.build(name, Config(model, federations.epochs, more))
    variables = jax.eval_shape(lambda: federations.initial(model(), jax.random.key(0)))
    variables = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), variables)
    assert traffic(algorithm, variables) == (communication.Traffic(down, up),)


def test_each_exchange_and_each_type_counts() -> None:
    def first(visit: Visit) -> Reply:
        upload = {"a": jnp.zeros((2, 3)), "b": visit.message > 0}
        return Reply({"count": visit.own["count"] + 1}, upload, {"loss": jnp.float32(0)})

    def second(visit: Visit) -> Reply:
        """Use every field of a visit."""
        total = visit.shard.size + visit.shard.who + visit.round + visit.delay
        total += jax.random.bits(visit.key).astype(jnp.int32) + visit.own["count"]
        total += visit.undelayed_message.sum()
        return Reply(visit.own, total.astype(jnp.int16), {})

    def update(server: Tree, aggregated: Tree, cohort: Cohort) -> Tree:
        return server

    exchanges = (
        Exchange(lambda server: server["codes"], first, aggregators.total(), update),
        Exchange(
            lambda server: (),
            second,
            aggregators.total(),
            update,
            broadcast_undelayed=lambda server: server["codes"][:3],
        ),
    )
    algorithm = Algorithm(
        lambda setup: setup.variables,
        lambda server, who: {"count": who},
        exchanges,
        lambda server, own, x: x,
    )
    expected = (communication.Traffic(10, 2 * 3 * 4 + 10), communication.Traffic(3, 2))
    assert traffic(algorithm, {"codes": jnp.zeros(10, jnp.uint8)}) == expected
