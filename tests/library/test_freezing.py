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
from fedjax_inv.algorithms import LISTED, fedavg, fediir, fedipg, fedpvr, fl_games
from fedjax_inv.checks import UsageError
from fedjax_inv.types import Algorithm, Federation, Model, Variables

KEY = jax.random.key(0)
FEDERATION = federations.federation()
NORMED = federations.small_normed()


def decaying() -> Any:
    """Local training whose decay and momentum would move any parameter."""
    optimizer = optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.1, momentum=0.9))
    return local.steps(optimizer, batch_size=3, num_steps=2, momentum=0.9)


def initial(model: Model) -> Variables:
    """Variables without zeros."""
    shapes = jax.eval_shape(partial(federations.initial, model), KEY)
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda a: jnp.asarray(0.5 + rng.random(a.shape, np.float32)), shapes)


def trained(
    algorithm: Algorithm, variables: Variables, federation: Federation = FEDERATION
) -> rounds.State:
    """The state after two rounds."""
    cohorts = jax.tree.map(lambda a: a[:2], federations.schedule())

    @jax.jit
    def run(variables: Variables) -> rounds.State:
        history = federations.HISTORY
        state = rounds.init(algorithm, variables, federation, KEY, history=history)
        return rounds.run(algorithm, state, cohorts, federation, axis=devices.chunked(2))[0]

    return run(variables)


def build(name: str, config: federations.Config, model: Model, **arguments: Any) -> Algorithm:
    replaced = config._replace(model=lambda: model, work=lambda rate: decaying())
    return federations.build(name, replaced, **arguments)


# Those with statistics, where there are any; the body must not be empty.
PLAIN = (federations.softmax_regression, federations.normed_head, federations.mlp, federations.cnn)
CONFIGS = {
    name: min(federations.TABLE[name], key=lambda config: config.model in PLAIN) for name in LISTED
}


@pytest.mark.parametrize(
    "name", slow.after(1, sorted(CONFIGS, key=lambda name: name != "scaffold"))
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
    if algorithm.network is None or algorithm.personal:
        return
    params, stats = algorithm.network(state.server)
    assert_same_bits((params.body, stats.body), (variables.params.body, variables.stats.body))
    before, after = jax.tree.leaves(variables.params.head), jax.tree.leaves(params.head)
    assert any((a != b).any() for a, b in zip(before, after, strict=False))


@pytest.mark.parametrize(
    "of",
    [
        partial(fl_games.fl_games, learned=True),
        partial(fedipg.fedipg, penalty_on="classifier"),
        fediir.fediir,
        fedpvr.fedpvr,
    ],
)
def test_a_method_of_the_classifier_needs_one_that_is_trained(of: Any) -> None:
    model = federations.mlp()
    algorithm = freezing.train_only(lambda m: of(m, decaying()), model, ("body",))
    with pytest.raises(UsageError, match=r"^model: "):
        rounds.init(algorithm, initial(model), FEDERATION, KEY)


PATTERNS = ("*/bias", "head/blocks_0/Dense_0")


def test_patterns_choose_what_moves_and_what_is_uploaded() -> None:
    """In both halves, with momentum on the server."""
    before, optimizer = initial(NORMED), optax.sgd(1.0, momentum=0.5)

    def make(model: Model) -> Algorithm:
        return fedavg.fedavg(model, decaying(), server_optimizer=optimizer)

    algorithm = freezing.train_only(make, NORMED, PATTERNS)
    state = trained(algorithm, before)
    assert algorithm.network is not None
    after = algorithm.network(state.server)
    size = 0
    leaves = jax.tree_util.tree_leaves_with_path(before.params)
    for (place, old), new in zip(leaves, jax.tree.leaves(after.params), strict=True):
        name = jax.tree_util.keystr(place, simple=True, separator="/")
        is_trained = name.endswith("bias") or name.startswith("head/blocks_0/Dense_0/")
        assert bool((old != new).any()) == is_trained, name
        size += old.size * is_trained
    for old, new in zip(jax.tree.leaves(before.stats), jax.tree.leaves(after.stats), strict=True):
        assert (old != new).any()  # of halves that are trained in part
    stats = sum(leaf.size for leaf in jax.tree.leaves(before.stats))
    momentum = [leaf.size for leaf in jax.tree.leaves(state.server.wrapped.opt_state)]
    assert sum(momentum) in (size, size + stats)
    (traffic,) = rounds.traffic(algorithm, state, FEDERATION)
    whole = sum(leaf.size for leaf in jax.tree.leaves(before))
    assert (traffic.down, traffic.up) == (4 * whole, 4 * (size + stats))


@pytest.mark.parametrize("patterns", [("tail",), ("head", "*/sale"), ("body", "head")])
def test_patterns_that_choose_nothing_or_everything_are_refused(patterns: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match="patterns"):
        freezing.check(initial(NORMED).params, patterns)
