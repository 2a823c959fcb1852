"""What a server does about uploads that are missing.

`skip` averages what arrived. `reuse` lets a client's last upload stand in for it, as of its
arrival: its size and delay are those that it came with. Who never arrived counts nothing.

A client is missed in every round whose exchange it would attend, be it absent, late or not sampled:
an empty slot names nobody. So with `reuse` a round averages over all clients that have ever arrived
(Gu et al. 2021, "Fast Federated Learning in the Presence of Arbitrary Device Unavailability", whose
updates it repeats like here). A round in which nothing arrives changes nothing, as with any rule.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_inv import aggregators, checks, tree
from fedjax_inv.checks import UsageError
from fedjax_inv.types import (
    Algorithm,
    Array,
    Cohort,
    Exchange,
    Reply,
    Setup,
    Slots,
    Tree,
    Visit,
)


class Memory(NamedTuple):
    """Everybody's last upload in an exchange."""

    upload: Tree  # [C, ...]; zeros of who never arrived
    size: Array  # [C] int32, examples of the client; 0 of who never arrived
    delay: Array  # [C] int32, as of arrival
    arrived: Array  # [C] bool


class Server(NamedTuple):
    """The server of the algorithm, and what it remembers."""

    wrapped: Tree
    memories: tuple[Tree, ...]  # per exchange a Memory; () where nothing can stand in


class _Sent(NamedTuple):
    upload: Tree
    round: Array  # []


def reuse(algorithm: Algorithm) -> Algorithm:
    """`algorithm` whose server lets a client's last upload stand in for a missing one.

    Keeps C uploads. Only those stand in that the exchange lets (`Exchange.blank`), of clients that
    would attend the round: who has left an exit strategy, which this goes around, is not reused.
    Raises ValueError where no exchange lets any.
    """
    if all(exchange.blank is None for exchange in algorithm.exchanges):
        raise UsageError(
            "algorithm: has no exchange whose uploads can stand in for later ones; must have one "
            "with `blank`, as fedavg, fedprox and fedipg do"
        )

    def init_server(setup: Setup) -> Server:
        wrapped, num_clients = algorithm.init_server(setup), setup.num_clients

        def memory(blank: Callable[[Tree], Tree] | None) -> Tree:
            if blank is None:
                return ()
            upload = jax.tree.map(
                lambda leaf: jnp.zeros((num_clients, *leaf.shape), leaf.dtype), blank(wrapped)
            )
            none = jnp.zeros(num_clients, jnp.int32)
            return Memory(upload, none, none, jnp.zeros(num_clients, bool))

        return Server(wrapped, tuple(memory(exchange.blank) for exchange in algorithm.exchanges))

    return Algorithm(
        init_server,
        lambda server, who: algorithm.init_client(server.wrapped, who),
        tuple(_reusing(exchange, index) for index, exchange in enumerate(algorithm.exchanges)),
        lambda server, own, x: algorithm.predict(server.wrapped, own, x),
        algorithm.personal,
    )


def _reusing(exchange: Exchange, index: int) -> Exchange:
    """The exchange numbered `index`, with a memory where its uploads can stand in."""
    reuses = exchange.blank is not None

    def client(visit: Visit) -> Reply:
        reply = exchange.client(visit)
        return reply._replace(upload=_Sent(reply.upload, visit.round)) if reuses else reply

    def recall(server: Server, sent: aggregators.Stack, cohort: Cohort) -> Server:
        old: Memory = server.memories[index]
        num_clients = old.arrived.shape[0]
        arrived = Memory(sent.values.upload, sent.size, cohort.delay, sent.present)
        memory = tree.put(old, jnp.where(sent.present, sent.who, num_clients), arrived)

        round = jnp.where(sent.present, sent.values.round, 0).max()
        everybody = jnp.arange(num_clients, dtype=jnp.int32)
        attends = jax.vmap(
            lambda who: jnp.asarray(exchange.attends(server.wrapped, who, round), bool)
        )(everybody)
        counts = memory.arrived & attends

        aggregator = aggregators.combine(exchange.aggregate)
        start = aggregator.init(tree.take(memory.upload, 0), num_clients)
        zeros = optax.tree.zeros_like(memory.upload)
        uploads = jax.vmap(optax.tree.where)(counts, memory.upload, zeros)
        slots = Slots(everybody, everybody, counts, memory.size, memory.delay)
        aggregated = aggregator.finish(aggregator.add(start, uploads, slots))
        cohort = Cohort(everybody, counts, memory.delay)
        wrapped = exchange.update(server.wrapped, aggregated, cohort)
        memories = (*server.memories[:index], memory, *server.memories[index + 1 :])
        return Server(wrapped, memories)

    def skip(server: Server, aggregated: Tree, cohort: Cohort) -> Server:
        return server._replace(wrapped=exchange.update(server.wrapped, aggregated, cohort))

    return Exchange(
        broadcast=lambda server: exchange.broadcast(server.wrapped),
        client=client,
        aggregate=aggregators.stacked() if reuses else exchange.aggregate,
        update=recall if reuses else skip,
        attends=lambda server, who, round: exchange.attends(server.wrapped, who, round),
        broadcast_undelayed=lambda server: exchange.broadcast_undelayed(server.wrapped),
    )


RULES: dict[str, Callable[[Algorithm], Algorithm]] = {
    "skip": lambda algorithm: algorithm,
    "reuse": reuse,
}


def with_rule(algorithm: Algorithm, rule: str) -> Algorithm:
    """`algorithm` under the rule of that name, "skip" or "reuse".

    Raises ValueError for another name, and as `reuse` does.
    """
    checks.one_of("missing", rule, RULES)
    return RULES[rule](algorithm)
