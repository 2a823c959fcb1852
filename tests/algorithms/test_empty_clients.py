"""Clients without examples have no part in what the server knows of all clients."""

from functools import partial

import jax
import numpy as np
import pytest

import federations
import slow
from federations import Config, assert_close
from fedjax_inv import devices, rounds
from fedjax_inv.types import Halves


@pytest.mark.parametrize(
    "name", slow.after(2, ["scaffold", "feddyn", "fedpvr", "afl", "feddg_ga", "fedgma"])
)
def test_clients_without_examples_change_nothing(name: str) -> None:
    algorithm = federations.build(
        name, Config(federations.mlp, federations.full_batch), learning_rate=0.3
    )
    data = federations.federation((4, 3, 2)).data

    @partial(jax.jit, static_argnums=0)
    def after(sizes: tuple[int, ...]) -> Halves:
        held = federations.federation(sizes, data=data)
        start = federations.initial(federations.mlp(), jax.random.key(0))
        state = rounds.init(algorithm, start, held, jax.random.key(1))
        for attend in ([0, 1, 2], [0, 2], [1, 2], [0, 1, 2]):
            cohort = federations.cohort(attend)
            state, _ = rounds.step(algorithm, state, cohort, held, axis=devices.vmapped())
        return state.server.variables.params

    few, more = after((4, 3, 2)), after((4, 3, 2, 0, 0, 0))
    assert_close(more, few, rtol=1e-4, atol=1e-6)
    assert all(np.abs(leaf).max() > 1e-3 for leaf in jax.tree.leaves(few))
