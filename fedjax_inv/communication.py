"""Communication: the bytes that a client downloads and uploads in each exchange, from shapes."""

import math
from typing import NamedTuple

import jax

from fedjax_inv import tree, types
from fedjax_inv.rounds import State
from fedjax_inv.types import Tree


class Traffic(NamedTuple):
    """The bytes that one client downloads and uploads in one exchange."""

    down: int
    up: int


def size(shapes: Tree) -> int:
    """Return the size in bytes of a tree of arrays or shapes."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))


def traffic(
    algorithm: types.Algorithm, state: State, federation: types.Federation
) -> tuple[Traffic, ...]:
    """Return what a client downloads and uploads in each exchange of a round, in their order.

    Only shapes are computed; the state and the federation may be shapes, too.
    """

    def shapes(state: State, federation: types.Federation) -> list[tuple[Tree, Tree]]:
        own = tree.take(state.clients, 0)
        start, size = federation.start[0], federation.size[0]
        shard = types.Shard(federation.data, federation.order, start, size, state.round)
        pairs = []
        for exchange in algorithm.exchanges:
            message = exchange.broadcast(state.server)
            undelayed = exchange.broadcast_undelayed(state.server)
            visit = types.Visit(message, own, shard, state.round, state.round, state.key, undelayed)
            reply = exchange.client(visit)
            own = reply.own
            pairs.append(((message, undelayed), reply.upload))
        return pairs

    return tuple(
        Traffic(size(down), size(up)) for down, up in jax.eval_shape(shapes, state, federation)
    )
