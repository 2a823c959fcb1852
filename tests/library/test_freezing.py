"""Training of a part of the network: what is frozen never moves, travels or counts."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import federations
import slow
from federations import assert_same_bits
from fedjax_inv import devices, freezing, local, rounds
from fedjax_inv.algorithms import LISTED
from fedjax_inv.types import Algorithm, Model, Variables

KEY = jax.random.key(0)
FEDERATION = federations.federation()
NORMED = federations.small_normed()


def decaying() -> Any:
    """Local training whose decay and momentum would move any parameter."""
    optimizer = optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.1, momentum=0.9))
    return local.steps(optimizer, batch_size=3, num_steps=2)


def initial(model: Model) -> Variables:
    """Variables without zeros."""
    shapes = jax.eval_shape(partial(federations.initial, model), KEY)
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda a: jnp.asarray(0.5 + rng.random(a.shape, np.float32)), shapes)


def trained(algorithm: Algorithm, variables: Variables, num_rounds: int = 2) -> rounds.State:
    cohorts = jax.tree.map(lambda a: a[:num_rounds], federations.schedule())

    @jax.jit
    def run(variables: Variables) -> rounds.State:
        history = federations.HISTORY
        state = rounds.init(algorithm, variables, FEDERATION, KEY, history=history)
        return rounds.run(algorithm, state, cohorts, FEDERATION, axis=devices.chunked(2))[0]

    return run(variables)


def build(name: str, config: federations.Config, model: Model, **arguments: Any) -> Algorithm:
    replaced = config._replace(model=lambda: model, work=lambda rate: decaying())
    return federations.build(name, replaced, **arguments)


CONFIGS = {
    name: config
    for name in LISTED
    for config in federations.TABLE[name]
    if config.model is not federations.softmax_regression
}


@pytest.mark.parametrize(
    "name", slow.after(3, sorted(CONFIGS, key="fedavg scaffold fedipg".find)[::-1])
)
def test_what_is_frozen_keeps_its_bits(name: str) -> None:
    config = CONFIGS[name]
    model = config.model()
    variables = initial(model)
    make = partial(build, name, config)
    algorithm = freezing.train_only(make, model, ("head",))
    state = trained(algorithm, variables)
    assert_same_bits(state.server.frozen.params.body, variables.params.body)
    assert_same_bits(state.server.frozen.stats.body, variables.stats.body)
    if algorithm.network is None:
        return
    params, stats = algorithm.network(state.server)
    assert_same_bits((params.body, stats.body), (variables.params.body, variables.stats.body))
    before, after = jax.tree.leaves(variables.params.head), jax.tree.leaves(params.head)
    assert any((a != b).any() for a, b in zip(before, after, strict=False))
