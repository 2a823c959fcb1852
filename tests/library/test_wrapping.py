"""The network that each algorithm serves, also within a wrapper."""

from typing import Any

import jax
import pytest

import federations
from federations import Config
from fedjax_inv import algorithms, late_uploads, rounds, wrapping
from fedjax_inv import tree as trees
from fedjax_inv.algorithms import exit_strategy, fedavg, fedbn
from fedjax_inv.types import Algorithm

CONFIG = federations.TABLE["fedavg"][0]
FEDERATION = federations.federation()


def served(algorithm: Algorithm, config: Config) -> Any:
    """Shapes of (the server, its network)."""
    assert algorithm.network
    network = algorithm.network

    def both() -> Any:
        variables = federations.initial(config.model(), jax.random.key(0))
        server = rounds.init(algorithm, variables, FEDERATION, jax.random.key(0)).server
        return server, network(server)

    return jax.eval_shape(both)


@pytest.mark.parametrize("name", algorithms.LISTED)
def test_an_algorithm_says_which_network_it_serves(name: str) -> None:
    config = federations.TABLE[name][0]
    algorithm = federations.build(name, config)
    if name == "fl_games":
        assert algorithm.network is None
        return
    server, network = served(algorithm, config)
    *_, innermost = wrapping.layers(server)
    if name == "fedbn":  # the server's variables lack those of normalisation layers
        network = trees.partition(network, fedbn.in_norm(network))[1]
    assert network == innermost.variables


def test_an_exit_strategy_is_found_within_another_wrapper() -> None:
    algorithm = exit_strategy.wrap(fedavg.fedavg(federations.mlp(), federations.steps(0.1)))
    server, _ = served(late_uploads.reuse(algorithm), CONFIG)
    found = exit_strategy.server_in(server)
    assert isinstance(found, exit_strategy.Server)
    assert found is server.wrapped
    assert exit_strategy.server_in(found) is found
    assert exit_strategy.server_in(found.wrapped) is None
