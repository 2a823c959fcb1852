from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from federations import assert_close
from fedjax_inv import devices
from fedjax_inv.types import Array, Tree

NAME = devices.CLIENTS


def fn(turn: tuple[Tree, Array]) -> tuple[Tree, Tree]:
    """Upload something for an absent slot (all zeros) too, which `add` must ignore."""
    slot, local_index = turn
    return {"square": slot["x"] ** 2}, (slot["x"] + 1, local_index, jnp.zeros((0, 2)))


def add(sums: Tree, uploads: Tree, turns: tuple[Tree, Array]) -> Tree:
    real = turns[0]["present"]
    return {
        "sum": sums["sum"] + (uploads["square"] * real[:, None]).sum(0),
        "any": sums["any"].at[turns[0]["position"]].max(real),
    }


def run(axis: devices.Axis, who: Array, present: Array, x: Array, num_clients: int) -> Tree:
    """Return (sums, results, the client of each slot by where it lies on its device)."""
    slots = {"x": x, "position": jnp.arange(len(x)), "present": present}
    mine = axis.assign(slots, who, present, num_clients)
    init = {"sum": jnp.zeros(2), "any": jnp.zeros(len(x), bool)}
    sums, (results, local_index, none) = axis.fold(fn, add, init, (mine.slots, mine.local_index))
    assert none.shape == (len(local_index), 0, 2)
    client = axis.local_clients(num_clients)[local_index]
    return sums, *mine.gather((results, client))


@pytest.mark.parametrize("num_slots", [1, 7])
@pytest.mark.parametrize("place", [None, devices.sharded, devices.owned])
def test_every_axis_is_a_loop_over_the_slots(
    num_slots: int, place: Callable[[str, devices.Axis], devices.Axis] | None
) -> None:
    """On four devices each computes its own slots; an absent one may be computed nowhere."""
    rng = np.random.default_rng(num_slots)
    num_clients = 9
    who = jnp.asarray(rng.permutation(num_clients)[:num_slots], jnp.int32)
    present = np.arange(num_slots) < max(1, num_slots - 1)
    x = rng.normal(size=(num_slots, 2)).astype(np.float32)
    inner = devices.chunked(3)
    axis = inner if place is None else place(NAME, inner)
    on_all = partial(run, axis, num_clients=num_clients)
    if place is not None:
        mesh = devices.mesh((1, 4), jax.devices())
        assert mesh is not None
        on_all = devices.over(mesh, on_all)
    sums, results, client = jax.jit(on_all)(who, present, x)
    assert_close(sums, {"sum": (x[present] ** 2).sum(0), "any": present})
    assert_close(results[present], (x + 1)[present])
    np.testing.assert_array_equal(client[present], who[present])


def test_chunks_of_one_are_not_vmapped() -> None:
    """A branch stays a branch; under vmap both sides would be computed and one selected."""

    def branching(x: Array) -> tuple[Tree, Array]:
        return (), jax.lax.cond(x > 0, jnp.sin, jnp.cos, x)

    def nothing(sums: Tree, uploads: Tree, slots: Tree) -> Tree:
        return sums

    for axis, branches in ((devices.chunked(1), True), (devices.chunked(2), False)):
        program = str(
            jax.make_jaxpr(lambda x, a=axis: a.fold(branching, nothing, (), x))(np.ones(4))
        )
        assert (" cond[" in program) == branches
