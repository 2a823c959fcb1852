"""Averages over rounds: an algorithm that serves the mean of its server's networks.

    average_t = sum_s decay^(t - s) w_s / sum_s decay^(t - s),   s from `first` to t

With decay 1 it is stochastic weight averaging (Izmailov et al. 2018, arXiv 1803.05407; on servers
Caldarola et al. 2022, arXiv 2203.11834), with less the exponential moving average, whose weights we
normalise, so that the network drawn at first has none. With decay 0, or up to round `first`, it is
the network itself. Training goes on from the network and never sees the average.

All floats of the server's state are averaged, so that whatever serves a client comes from the same
rounds: statistics (BatchNorm) too, which the papers compute anew by a pass over the examples.
Clients' own states are not (SWA's release starts a round later and leaves BatchNorm's statistics);
a personal algorithm serves a client with them and with the average.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_inv import checks, types, wrapping
from fedjax_inv.types import Array, Tree


class Server(NamedTuple):
    """The server of the wrapped algorithm twice: as it trains, and as it serves."""

    training: Tree
    wrapped: Tree  # the average, of what is no float the newest
    total: Array  # [] the sum of the weights of the networks, that of the newest is 1; 0 before


def moved(average: Tree, new: Tree, share: Array) -> Tree:
    """Return (1 - share) average + share new for the innermost server's floats, else new.

    With share 1, and for what stays the same, it is new bit for bit.
    """
    if isinstance(new, wrapping.Wrapping):
        outer: Any = new
        return outer._replace(wrapped=moved(average.wrapped, new.wrapped, share))

    def leaf(old: Array, now: Array) -> Array:
        if not jnp.issubdtype(now.dtype, jnp.inexact):
            return now
        return jnp.where(share == 1, now, old + (share * (now - old)).astype(now.dtype))

    return jax.tree.map(leaf, average, new)


def averaged(
    algorithm: types.Algorithm, *, decay: float | Array = 1.0, first: int | Array = 0
) -> types.Algorithm:
    """Return `algorithm`, serving with the average of the server's states after rounds.

    The server also keeps a copy of its state. A round that nobody attends does not count.

        def smooth(model, work):
            return weight_averages.averaged(fedavg.fedavg(model, work))

    Args:
      algorithm: any algorithm; `freezing.train_only` and `late_uploads.with_rule` may go around it.
      decay: how much the weight of a network shrinks each round, in [0, 1]; 1: the mean of all.
      first: the first round, from 0, whose result counts.
    """
    checks.real("decay", decay, 0, 1)
    inner = algorithm.after_round or (lambda server, round: server)

    def init_server(setup: types.Setup) -> Server:
        server = algorithm.init_server(setup)
        return Server(server, server, jnp.zeros(()))

    def after_round(server: Server, round: Array) -> Server:
        training = inner(server.training, round)
        total = jnp.where(round < first, 0.0, decay * server.total + 1)
        share = 1 / jnp.maximum(total, 1)  # before `first` the network itself
        return Server(training, moved(server.wrapped, training, share), total)

    exchanges = tuple(wrapping.lift(each, "training") for each in algorithm.exchanges)
    around = wrapping.around(algorithm, init_server, exchanges)
    return around._replace(after_round=after_round)
