"""Clients without examples have no part in what the server knows of all clients."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import federations
import slow
from federations import TABLE, assert_close
from fedjax_inv import devices, rounds
from fedjax_inv.algorithms import LISTED
from fedjax_inv.types import Array, Cohort

FIRST = [("scaffold", 0), ("fl_games", 0)]
CASES = [*FIRST, ("fl_games", 1), *((name, 0) for name in LISTED if (name, 0) not in FIRST)]


@pytest.mark.parametrize(("name", "index"), slow.after(len(FIRST), CASES))
def test_clients_without_examples_change_nothing(name: str, index: int) -> None:
    config = TABLE[name][index]
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
            own = jax.tree.map(lambda leaf: leaf[0], state.clients) if algorithm.personal else ()
            return algorithm.predict(state.server, own, held.data.x)

        last, _ = rounds.run(algorithm, first, schedule, held, axis=devices.vmapped())
        return outputs(first), outputs(last)

    (first, few), (_, more) = after((4, 3, 2)), after((4, 3, 2, 0, 0, 0))
    assert_close(more, few, rtol=1e-4, atol=1e-6)
    assert np.abs(few - first).max() > 1e-3
