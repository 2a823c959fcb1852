"""Algorithms around algorithms, and the network that each of them serves."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest

import federations
from federations import Config, assert_equal
from fedjax_inv import algorithms, devices, missing, rounds, wrapping
from fedjax_inv.algorithms import exit_strategy, fedavg, fedbn
from fedjax_inv.types import Algorithm, Array, Cohort, Setup, Tree

CONFIG = federations.TABLE["fedavg"][0]
FEDERATION = federations.federation()


class Counting(NamedTuple):
    """A server that counts rounds beside the one that it wraps."""

    wrapped: Tree
    count: Array


def counting(algorithm: Algorithm) -> Algorithm:
    first, *others = map(wrapping.lift, algorithm.exchanges)

    def update(server: Counting, aggregated: Tree, cohort: Cohort) -> Counting:
        server = first.update(server, aggregated, cohort)
        return server._replace(count=server.count + 1)

    def init_server(setup: Setup) -> Counting:
        return Counting(algorithm.init_server(setup), jnp.int32(0))

    return wrapping.around(algorithm, init_server, (first._replace(update=update), *others))


def run(algorithm: Algorithm, config: Config = CONFIG) -> rounds.State:
    @jax.jit
    def whole() -> rounds.State:
        variables = federations.initial(config.model(), jax.random.key(0))
        state = rounds.init(algorithm, variables, FEDERATION, jax.random.key(1), history=3)
        schedule = federations.schedule()
        return rounds.run(algorithm, state, schedule, FEDERATION, axis=devices.vmapped())[0]

    return whole()


@pytest.mark.slow
def test_a_wrapped_algorithm_is_what_it_was_and_the_rest_is_the_wrappers() -> None:
    alone = federations.build("fedavg", CONFIG)
    both = counting(counting(alone))
    got, expected = run(both), run(alone)
    *outer, innermost = wrapping.layers(got.server)
    assert_equal(innermost, expected.server)
    assert_equal([one.count for one in outer], [jnp.int32(5)] * 2)  # of six rounds one is empty
    assert both.network
    assert alone.network
    assert_equal(both.network(got.server), alone.network(expected.server))
    x = FEDERATION.data.x
    assert_equal(both.predict(got.server, (), x), alone.predict(expected.server, (), x))


def test_a_rule_for_missing_uploads_goes_around_any_wrapper() -> None:
    reused = missing.reuse(counting(federations.build("fedavg", CONFIG)))
    (_, counted, _) = wrapping.layers(run(reused).server)
    assert counted.count == 5


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
        network = fedbn.partition(network, fedbn.in_norm)[1]
    assert network == innermost.variables


def test_an_exit_strategy_is_found_within_other_wrappers() -> None:
    algorithm = exit_strategy.wrap(fedavg.fedavg(federations.mlp(), federations.steps(0.1)))
    server, _ = served(counting(missing.reuse(algorithm)), CONFIG)
    found = exit_strategy.server_in(server)
    assert isinstance(found, exit_strategy.Server)
    assert found is server.wrapped.wrapped
    assert exit_strategy.server_in(found) is found
    assert exit_strategy.server_in(found.wrapped) is None
