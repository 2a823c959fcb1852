"""Algorithms around algorithms, such as a rule for missing uploads or an exit strategy.

The server of such an algorithm is a NamedTuple whose field `wrapped` is the server of the inner
algorithm; its other fields are the state of the outer algorithm.
"""

import operator
from collections.abc import Iterator
from typing import Protocol, runtime_checkable

from fedjax_inv import types
from fedjax_inv.types import Array, Tree


@runtime_checkable
class Wrapping(Protocol):
    """A server that wraps another one."""

    @property
    def wrapped(self) -> Tree:
        """The server of the inner algorithm."""


def layers(server: Tree) -> Iterator[Tree]:
    """Yield `server` and the servers wrapped in it, the outermost first."""
    yield server
    while isinstance(server, Wrapping):
        server = server.wrapped
        yield server


def lift(exchange: types.Exchange, field: str = "wrapped") -> types.Exchange:
    """Return an exchange on the inner server as an exchange on the outer one.

    It changes the `field` of the server that holds the inner one, and no other.
    """
    blank = exchange.blank
    inner = operator.attrgetter(field)

    def update(server: Tree, aggregated: Tree, cohort: types.Cohort) -> Tree:
        return server._replace(**{field: exchange.update(inner(server), aggregated, cohort)})

    return exchange._replace(
        broadcast=lambda server: exchange.broadcast(inner(server)),
        update=update,
        attends=lambda server, who, round: exchange.attends(inner(server), who, round),
        broadcast_undelayed=lambda server: exchange.broadcast_undelayed(inner(server)),
        blank=blank and (lambda server: blank(inner(server))),
    )


def around(
    algorithm: types.Algorithm, init_server: types.InitServer, exchanges: tuple[types.Exchange, ...]
) -> types.Algorithm:
    """Return an algorithm that serves clients as the inner one does.

    Its server before the first round is that of `init_server`, and its exchanges are on the
    wrapping server; see `lift`.
    """
    network = algorithm.network
    after = algorithm.after_round

    def init_client(server: Tree, who: Array) -> Tree:
        return algorithm.init_client(server.wrapped, who)

    def predict(server: Tree, own: Tree, x: Tree) -> Array:
        return algorithm.predict(server.wrapped, own, x)

    def network_of(server: Tree) -> types.Variables:
        assert network
        return network(server.wrapped)

    return types.Algorithm(
        init_server,
        init_client,
        exchanges,
        predict,
        algorithm.personal,
        network=network_of if network else None,
        own_outputs=algorithm.own_outputs,
        after_round=after
        and (lambda server, round: server._replace(wrapped=after(server.wrapped, round))),
    )
