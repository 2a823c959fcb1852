"""Clients without examples have no part in what the server knows of all clients."""

from functools import partial

import jax
import numpy as np
import pytest

import federations
import slow
from federations import Config, assert_close
from fedjax_inv import devices, rounds
from fedjax_inv.types import Array

NAMES = ["scaffold", "fl_games", "feddyn", "fedpvr", "afl", "feddg_ga", "fedgma", "sequential"]


@pytest.mark.parametrize("name", slow.after(2, NAMES))
def test_clients_without_examples_change_nothing(name: str) -> None:
    chosen = Config(federations.mlp, federations.full_batch)
    if name in ("fl_games", "sequential"):
        play = "parallel" if name == "fl_games" else name
        settings = {"play": play, "memory": 1, "learned": True, "body_learning_rate": 0.02}
        chosen = chosen._replace(arguments=settings)
    name = "fl_games" if name == "sequential" else name
    algorithm = federations.build(name, chosen, learning_rate=0.3)
    data = federations.federation((4, 3, 2)).data

    @partial(jax.jit, static_argnums=0)
    def after(sizes: tuple[int, ...]) -> tuple[Array, Array]:
        held = federations.federation(sizes, data=data)
        start = federations.initial(federations.mlp(), jax.random.key(0))
        first = state = rounds.init(algorithm, start, held, jax.random.key(1))

        def outputs(state: rounds.State) -> Array:
            return algorithm.predict(state.server, (), data.x)

        for attend in ([0, 1, 2], [0, 1, 2], [0, 2], [1, 2], [0, 1, 2]):
            cohort = federations.cohort(attend)
            state, _ = rounds.step(algorithm, state, cohort, held, axis=devices.vmapped())
        return outputs(first), outputs(state)

    (first, few), (_, more) = after((4, 3, 2)), after((4, 3, 2, 0, 0, 0))
    assert_close(more, few, rtol=1e-4, atol=1e-6)
    assert np.abs(few - first).max() > 1e-3
