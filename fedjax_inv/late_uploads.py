"""Rules for uploads that are missing.

`skip` averages the uploads that arrived. `reuse` lets a client's last upload stand in for a missing
one, and `parameters` its last parameters: the server then steps along

    sum_i p_i (w_i^{t - tau_i} - w^t)

so that a plain server averages what clients last delivered (Hao et al. 2025, arXiv 2503.06158,
Section III-A), and a client that is late holds the others back. A stored upload keeps the size and
delay it arrived with. A client that never arrived has no weight.

A client is missing in every round whose exchange it would attend, if it is absent, late or not
sampled: the rule cannot tell these apart. So a round averages over all clients that have ever
arrived (`reuse`: Gu et al. 2021, "Fast Federated Learning in the Presence of Arbitrary Device
Unavailability", which repeats updates in the same way). A round in which nothing arrives changes
nothing, as with any rule.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_inv import aggregators, averaging, checks, tree, types, wrapping
from fedjax_inv.checks import UsageError
from fedjax_inv.types import Array, Tree


class Memory(NamedTuple):
    """The last upload of every client in one exchange."""

    upload: Tree  # [C, ...]; zeros for a client that never arrived
    size: Array  # [C] int32, examples of the client; 0 if it never arrived
    delay: Array  # [C] int32, at arrival
    arrived: Array  # [C] bool


class Server(NamedTuple):
    """The server of the wrapped algorithm, and the stored uploads."""

    wrapped: Tree
    memories: tuple[Tree, ...]  # for each exchange a Memory, or () if no upload can stand in


class _Sent(NamedTuple):
    upload: Tree  # as it is stored
    round: Array  # []


class _Stored(NamedTuple):
    """What a memory keeps of an upload. The messages are the broadcasts of the exchange."""

    of: Callable[[Tree, Tree], Tree]  # (upload, message that the client received) -> stored
    upload: Callable[[Tree, Tree], Tree]  # (stored, message of this round) -> upload
    check: Callable[[types.Exchange, Tree], None] = lambda exchange, server: None


def _moved(upload: averaging.Upload, sign: int, by: averaging.Message) -> averaging.Upload:
    """Return an upload whose change of the parameters is shifted by those of a message."""
    params = optax.tree.add_scale(upload.delta.params, sign, by.variables.params)
    return upload._replace(delta=upload.delta._replace(params=params))


_UPLOADS = _Stored(lambda upload, message: upload, lambda stored, message: stored)
_PARAMETERS = _Stored(
    lambda upload, message: _moved(upload, 1, message),
    lambda stored, message: _moved(stored, -1, message),
    functools.partial(averaging.check_upload, stats=True),
)


def reuse(algorithm: types.Algorithm) -> types.Algorithm:
    """Return `algorithm` with the rule that a client's last upload stands in for a missing one.

    Only uploads of exchanges with `Exchange.blank` stand in, and only those of clients that would
    attend the round: a client that has left an inner exit strategy is not reused.

    The server will also store C uploads.
    """
    return _standing_in(algorithm, _UPLOADS)


def parameters(algorithm: types.Algorithm) -> types.Algorithm:
    """Return `algorithm` with the rule that a client's last parameters stand in for missing ones.

    As `reuse`, but what is stored are the parameters that a client's training led to, and what the
    server averages is their difference from its own, so that its optimizer works on. If all clients
    arrive without delay, nothing changes.

    Uploads that stand in must be those of FedAvg, as those of its relatives without a side state.
    """
    return _standing_in(algorithm, _PARAMETERS)


def _standing_in(algorithm: types.Algorithm, kept: _Stored) -> types.Algorithm:
    if all(exchange.blank is None for exchange in algorithm.exchanges):
        text = "must have an exchange with `blank`, as fedavg, fedprox and fedipg have"
        raise UsageError("algorithm", ..., text)

    def init_server(setup: types.Setup) -> Server:
        wrapped = algorithm.init_server(setup)
        for exchange in algorithm.exchanges:
            if exchange.blank:
                kept.check(exchange, wrapped)
        memories = tuple(
            _empty(exchange.blank(wrapped), setup.num_clients) if exchange.blank else ()
            for exchange in algorithm.exchanges
        )
        return Server(wrapped, memories)

    exchanges = tuple(
        _reusing(exchange, index, kept) if exchange.blank else wrapping.lift(exchange)
        for index, exchange in enumerate(algorithm.exchanges)
    )
    return wrapping.around(algorithm, init_server, exchanges)


def _empty(blank: Tree, num_clients: int) -> Memory:
    """Return the memory before the first round, from an upload of zeros."""
    upload = jax.tree.map(lambda leaf: jnp.zeros((num_clients, *leaf.shape), leaf.dtype), blank)
    none = jnp.zeros(num_clients, jnp.int32)
    return Memory(upload, none, none, jnp.zeros(num_clients, bool))


def _reusing(exchange: types.Exchange, index: int, kept: _Stored) -> types.Exchange:
    """Return the exchange numbered `index`, with a memory."""
    lifted = wrapping.lift(exchange)

    def client(visit: types.Visit) -> types.Reply:
        reply = exchange.client(visit)
        stored = kept.of(reply.upload, visit.message)
        return reply._replace(upload=_Sent(stored, visit.round))

    def update(server: Server, sent: aggregators.Stack, cohort: types.Cohort) -> Server:
        old: Memory = server.memories[index]
        num_clients = old.arrived.shape[0]
        arrived = Memory(sent.values.upload, sent.size, cohort.delay, sent.present)
        memory = tree.put(old, jnp.where(sent.present, sent.who, num_clients), arrived)

        round = jnp.where(sent.present, sent.values.round, 0).max()
        everybody = jnp.arange(num_clients, dtype=jnp.int32)
        attends = jax.vmap(lambda who: jnp.asarray(lifted.attends(server, who, round), bool))(
            everybody
        )
        counts = memory.arrived & attends

        message = lifted.broadcast(server)
        uploads = jax.vmap(lambda stored: kept.upload(stored, message))(memory.upload)
        uploads = jax.vmap(optax.tree.where)(counts, uploads, optax.tree.zeros_like(uploads))
        aggregator = exchange.aggregate
        start = aggregator.init(tree.take(uploads, 0), num_clients)
        slots = types.Slots(everybody, everybody, counts, memory.size, memory.delay)
        aggregated = aggregator.finish(aggregator.add(start, uploads, slots))
        server = lifted.update(server, aggregated, types.Cohort(everybody, counts, memory.delay))
        memories = (*server.memories[:index], memory, *server.memories[index + 1 :])
        return server._replace(memories=memories)

    # Without a blank, so that a second `reuse` does not store these uploads again.
    return lifted._replace(
        client=client, aggregate=aggregators.stacked(), update=update, blank=None
    )


RULES: dict[str, Callable[[types.Algorithm], types.Algorithm]] = {
    "skip": lambda algorithm: algorithm,
    "reuse": reuse,
    "parameters": parameters,
}


def with_rule(algorithm: types.Algorithm, rule: str) -> types.Algorithm:
    """Return `algorithm` with a rule for missing uploads, one of `RULES`."""
    checks.one_of("rule", rule, RULES)
    return RULES[rule](algorithm)
