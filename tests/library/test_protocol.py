"""The laws that every algorithm must obey, and numbers of other types."""

import importlib
import pkgutil
from functools import lru_cache, partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import federations
import slow
from federations import NUM_CLIENTS, SHAPES, TABLE, assert_close
from fedjax_inv import algorithms, devices, laws, models, rounds, tree
from fedjax_inv.types import Algorithm, Array, Cohort, Tree

# They compile programs of their own.
FEW = ("devices_chunks_and_empty_slots_do_not_matter", "inputs_of_8_bits_are_those_in_floats")
CASES = [
    pytest.param(
        name, index, law, id=f"{name}-{index}-{law}", marks=[pytest.mark.slow] if index else []
    )
    for name in algorithms.LISTED
    for index in range(len(TABLE.get(name, ())))
    for law in laws.LAWS
    if law not in FEW or (name in SHAPES and not index)
]


@lru_cache(maxsize=1)  # the laws of a configuration come one after the other
def case_of(name: str, index: int) -> laws.Case:
    return federations.case(name, TABLE[name][index])


@pytest.mark.parametrize(("name", "index", "law"), CASES)
def test_every_algorithm_obeys(name: str, index: int, law: str) -> None:
    laws.LAWS[law](case_of(name, index))


def test_all_algorithms_are_in_the_table() -> None:
    """A file is listed if it has a factory of its own name, and all in the list are configured."""
    names = {module.name for module in pkgutil.iter_modules(algorithms.__path__)}
    modules = {name: importlib.import_module(f"{algorithms.__name__}.{name}") for name in names}
    assert set(algorithms.LISTED) == {name for name in names if hasattr(modules[name], name)}
    assert len(set(algorithms.LISTED)) == len(algorithms.LISTED)
    assert set(algorithms.LISTED) == {name for name, configs in TABLE.items() if configs}


@pytest.mark.parametrize("name", slow.after(1, ["scaffold", "fl_games", "afl", "feddyn"]))
def test_clients_without_examples_have_no_part_in_what_the_server_knows(name: str) -> None:
    """It knows something of all clients: variates, players, a mixture, the share that attends."""
    config = TABLE[name][0]
    algorithm = federations.build(name, config)
    data = federations.federation((4, 3, 2)).data
    present = jnp.array([[1, 1, 1], [1, 1, 1], [1, 0, 1], [0, 1, 1], [1, 1, 1]], bool)
    who = jnp.broadcast_to(jnp.arange(3), present.shape)
    schedule = Cohort(who, present, jnp.zeros_like(who))

    @partial(jax.jit, static_argnums=0)
    def after(sizes: tuple[int, ...]) -> tuple[Array, Array]:
        held = federations.in_floats(federations.federation(sizes, data=data))
        start = federations.initial(config.model(), jax.random.key(0))
        first = rounds.init(algorithm, start, held, jax.random.key(1))

        def outputs(state: rounds.State) -> Array:
            own = tree.take(state.clients, 0) if algorithm.personal else ()
            return algorithm.predict(state.server, own, held.data.x)

        last, _ = rounds.run(algorithm, first, schedule, held, axis=devices.vmapped())
        return outputs(first), outputs(last)

    (first, few), (_, more) = after((4, 3, 2)), after((4, 3, 2, 0, 0, 0))
    assert_close(more, few)
    assert np.abs(few - first).max() > 1e-3


def after_a_round(algorithm: Algorithm, variables: Tree) -> rounds.State:
    """The shapes and types of the state; nothing runs."""
    held, everyone = federations.federation(), federations.cohort(range(NUM_CLIENTS))

    def one() -> rounds.State:
        state = rounds.init(algorithm, variables, held, jax.random.key(1))
        return rounds.step(algorithm, state, everyone, held, axis=devices.vmapped())[0]

    return jax.eval_shape(one)


@pytest.mark.parametrize("name", slow.after(1, sorted(TABLE, key=lambda name: name != "fedproto")))
def test_a_network_of_float32_trains_where_other_numbers_have_64_bits(name: str) -> None:
    with jax.enable_x64(True):
        config = TABLE[name][-1]
        variables = federations.initial(config.model(), jax.random.key(0))
        state = after_a_round(federations.build(name, config), variables)
        leaves = jax.tree_util.tree_leaves_with_path(state)
        params = [leaf for path, leaf in leaves if ".params" in jax.tree_util.keystr(path)]
        assert {leaf.dtype.name for leaf in params} == {"float32"}


class Half(nn.Module):
    """A layer that computes in bfloat16; its parameters are float32."""

    width: int

    @nn.compact
    def __call__(self, x: Array, mask: Array, train: bool) -> Array:
        del mask, train
        return nn.Dense(self.width, dtype=jnp.bfloat16)(x.reshape(x.shape[0], -1))


@pytest.mark.parametrize("name", ["fedproto", "fedsr"])
def test_what_is_learned_of_features_of_bfloat16_is_float32(name: str) -> None:
    model = models.from_blocks([Half(4), Half(federations.NUM_CLASSES)], 1)
    algorithm = federations.build(name, federations.Config(lambda: model, federations.steps))
    state = after_a_round(algorithm, federations.initial(model, jax.random.key(0)))
    types = {leaf.dtype for leaf in jax.tree.leaves(state.server)}
    assert {kind.name for kind in types if jnp.issubdtype(kind, jnp.floating)} == {"float32"}
