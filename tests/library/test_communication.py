import jax
import jax.numpy as jnp
import pytest

import federations
from fedjax_inv import rounds

# 36 inputs, 5 and 4 hidden units, 3 classes, 4 bytes a number. No biases before the norms, which
# have 2 parameters and 2 statistics for each unit.
ALL = 4 * (36 * 5 + 4 * 5 + 5 * 4 + 4 * 4 + (4 + 1) * 3)
HEAD = 4 * (5 * 4 + 2 * 4 + (4 + 1) * 3)
PARAMS, NORMS = ALL - 4 * 2 * (5 + 4), 4 * 4 * (5 + 4)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("fedavg", [(ALL, ALL)]),
        # The control variate, of the parameters only, goes down and up with the network.
        ("scaffold", [(ALL + PARAMS, ALL + PARAMS)]),
        # The control variate of the head alone.
        ("fedpvr", [(ALL + HEAD, ALL + HEAD)]),
        # The curvature, a number, goes up with the network.
        ("qfedavg", [(ALL, ALL + 4)]),
        # Norms stay, but their mean, which serves a client never seen, goes up.
        ("fedbn", [(ALL - NORMS, ALL)]),
        # Gradients of the head go up, and with the network down.
        ("fediir", [(ALL, HEAD), (ALL + HEAD, ALL)]),
        # A weight for each client; then a message that is never delayed, and a truth value.
        ("feddg_ga", [(ALL + 4 * federations.NUM_CLIENTS, ALL + 4), (ALL, 4 + 4 + 1)]),
    ],
)
def test_traffic_counts_every_array(name: str, expected: list[tuple[int, int]]) -> None:
    more = {"qfedavg": {"step_size": 0.1}, "feddg_ga": {"num_rounds": 5}}.get(name, {})
    config = federations.Config(federations.normed, federations.full_batch, more)
    algorithm, federation = federations.build(name, config), federations.federation()
    variables = jax.eval_shape(lambda: federations.initial(config.model(), jax.random.key(0)))
    variables = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), variables)
    state = jax.eval_shape(
        lambda: rounds.init(algorithm, variables, federation, jax.random.key(0), history=3)
    )
    found = rounds.traffic(algorithm, state, federation)
    assert [(exchange.down, exchange.up) for exchange in found] == expected
