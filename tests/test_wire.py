import jax
import jax.numpy as jnp
import pytest

import federations
from federations import Config
from fedjax_inv import aggregators, rounds, wire
from fedjax_inv.types import Algorithm, Exchange, Model


def traffic(algorithm: Algorithm, variables: object) -> tuple[wire.Traffic, ...]:
    federation = federations.federation()
    state = rounds.init(algorithm, variables, jax.random.key(0), federations.NUM_CLIENTS)
    return wire.traffic(algorithm, state, federation)


def test_fedavg_sends_and_receives_the_network() -> None:
    # 36 inputs, 7 hidden units, 3 classes, 4 bytes a number.
    mlp = 4 * ((36 + 1) * 7 + (7 + 1) * 3)
    # No biases before the norms, which have 2 parameters and 2 statistics for each unit.
    normed = 4 * (36 * 5 + 4 * 5 + 5 * 4 + 4 * 4 + (4 + 1) * 3)
    assert sent_by_fedavg(federations.mlp()) == (wire.Traffic(mlp, mlp),)
    assert sent_by_fedavg(federations.normed()) == (wire.Traffic(normed, normed),)


def sent_by_fedavg(model: Model) -> tuple[wire.Traffic, ...]:
    algorithm = federations.build("fedavg", Config(lambda: model, federations.epochs))
    return traffic(algorithm, federations.initial(model, jax.random.key(0)))


def test_each_exchange_and_each_type_counts() -> None:
    first = Exchange(
        lambda server: server["codes"],
        lambda message, own, shard, key: (own, {"a": jnp.zeros((2, 3)), "b": message > 0}, {}),
        aggregators.total(),
        lambda server, aggregated, cohort: server,
    )
    second = Exchange(
        lambda server: (),
        lambda message, own, shard, key: (own, shard.mask.sum(dtype=jnp.int16), {}),
        aggregators.total(),
        lambda server, aggregated, cohort: server,
    )
    algorithm = Algorithm(
        lambda variables, key: variables,
        lambda server, who: who,
        (first, second),
        lambda server, own, x: x,
    )
    expected = (wire.Traffic(10, 2 * 3 * 4 + 10), wire.Traffic(0, 2))
    assert traffic(algorithm, {"codes": jnp.zeros(10, jnp.uint8)}) == expected


@pytest.mark.parametrize("shape", [(), (0,), (3, 5)])
def test_size_is_in_bytes(shape: tuple[int, ...]) -> None:
    array = jnp.zeros(shape, jnp.bfloat16)
    assert wire.size({"x": array, "y": array}) == 2 * array.nbytes
