"""Bytes on the wire, from shapes alone: what a client downloads and uploads in each exchange."""

import math
from typing import NamedTuple

import jax

from fedjax_inv import tree
from fedjax_inv.rounds import State
from fedjax_inv.types import Algorithm, Federation, Shard, Tree, Visit


class Traffic(NamedTuple):
    """Bytes of one client in one exchange."""

    down: int
    up: int


def size(shapes: Tree) -> int:
    """Bytes of a tree of arrays or shapes."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))


def traffic(algorithm: Algorithm, state: State, federation: Federation) -> tuple[Traffic, ...]:
    """Bytes per participating client of each exchange of a round; nothing is computed."""

    def shapes(state: State, federation: Federation) -> list[tuple[Tree, Tree]]:
        own = tree.take(state.clients, 0)
        start, size = federation.start[0], federation.size[0]
        shard = Shard(federation.data, federation.order, start, size, state.round)
        pairs = []
        for exchange in algorithm.exchanges:
            message, prompt = exchange.broadcast(state.server), exchange.prompt(state.server)
            visit = Visit(message, own, shard, state.round, state.round, state.key, prompt)
            reply = exchange.client(visit)
            own = reply.own
            pairs.append(((message, prompt), reply.upload))
        return pairs

    return tuple(
        Traffic(size(down), size(up)) for down, up in jax.eval_shape(shapes, state, federation)
    )
