"""The engine: state, one round, a run of rounds.

What is decided here, once, for all algorithms:
1. Randomness is folded from (key, round, exchange, client), never split by slot, so the client
   axis, the order of slots and empty slots cannot change a result.
2. Absent slots write nothing and weigh nothing; a client without examples is absent.
3. An exchange that nobody attends leaves the server and every client as they were.
4. A client whose upload, metrics or own state hold a NaN or an infinity is reported, and on
   demand treated as absent.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_inv import checks, tree
from fedjax_inv.aggregators import combine
from fedjax_inv.checks import UsageError
from fedjax_inv.clients import Axis
from fedjax_inv.types import (
    Algorithm,
    Array,
    Cohort,
    Exchange,
    Federation,
    Metrics,
    Setup,
    Shard,
    Slots,
    Tree,
    Variables,
    Visit,
)


class State(NamedTuple):
    """All that a run carries from round to round."""

    server: Tree
    clients: Tree  # [C, ...] what each client keeps
    heard: tuple[Tree, ...]  # per exchange the last H broadcasts [H, ...]; empty where H = 1
    round: Array  # [] int32
    key: Array  # the run's base key, never changed


class Report(NamedTuple):
    """What one exchange reports, slot by slot."""

    metrics: Metrics  # each [S]; arbitrary where not present
    present: Array  # [S] bool, took part and had examples
    finite: Array  # [S] bool, false = what it returned held a NaN or an infinity
    size: Array  # [S] int32, examples of the client


class _Kept(NamedTuple):
    """What is left of a client's turn once its upload is folded."""

    own: Tree
    metrics: Metrics
    present: Array
    finite: Array


def init(
    algorithm: Algorithm,
    variables: Variables,
    federation: Federation,
    key: Array,
    *,
    history: int = 1,
) -> State:
    """The state of a run of `algorithm` on `federation` before the first round.

    variables: a drawn network. history: how many broadcasts are kept for delayed clients, 1 + the
    longest delay. Raises ValueError for history below 1, and for rows that are none.
    """
    checks.integer("history", history)
    checks.federation(federation)
    sample = jax.tree.map(lambda leaf: leaf[:1], federation.data.x)
    server = algorithm.init_server(
        Setup(variables, federation.num_clients, sample, jax.random.fold_in(key, 0))
    )
    clients = jax.vmap(lambda who: algorithm.init_client(server, who))(
        jnp.arange(federation.num_clients, dtype=jnp.int32)
    )
    heard: tuple[Tree, ...] = tuple(() for _ in algorithm.exchanges)
    if history > 1:
        heard = tuple(
            jax.tree.map(lambda leaf: jnp.stack([leaf] * history), exchange.broadcast(server))
            for exchange in algorithm.exchanges
        )
    # Copies, so that a state can be donated although leaves of it started as one array.
    server, clients, heard = jax.tree.map(jnp.array, (server, clients, heard))
    return State(server, clients, heard, jnp.int32(0), jax.random.fold_in(key, 1))


def _history(heard: Tree) -> int:
    """H of what is kept of an exchange's broadcasts."""
    return next((leaf.shape[0] for leaf in jax.tree.leaves(heard)), 1)


def _slots(exchange: Exchange, state: State, cohort: Cohort, federation: Federation) -> Slots:
    """The cohort of an exchange, as clients and aggregators see it."""
    size = federation.size[cohort.who]
    attends = jax.vmap(
        lambda who: jnp.asarray(exchange.attends(state.server, who, state.round), bool)
    )(cohort.who)
    return Slots(
        position=jnp.arange(cohort.who.shape[0], dtype=jnp.int32),
        who=cohort.who,
        present=cohort.present & (size > 0) & attends,
        size=size,
        delay=cohort.delay,
    )


def _exchange(
    exchange: Exchange,
    index: int,
    state: State,
    cohort: Cohort,
    federation: Federation,
    axis: Axis,
    drop_nonfinite: bool,
) -> tuple[State, Report]:
    """One exchange of a round, the one numbered `index`: (the state after it, its report)."""
    aggregator = combine(exchange.aggregate)
    message, prompt = exchange.broadcast(state.server), exchange.prompt(state.server)
    heard = state.heard[index]
    history = _history(heard)
    if history > 1:
        heard = tree.put(heard, state.round % history, message)
    # In the first rounds the first broadcast is the oldest.
    delay = jnp.clip(cohort.delay, 0, jnp.minimum(history - 1, state.round))
    slots = _slots(exchange, state, cohort._replace(delay=delay), federation)
    key = jax.random.fold_in(jax.random.fold_in(state.key, state.round), index)

    def client(slot: Slots) -> tuple[tuple[Tree, Array], _Kept]:
        """One slot's turn: ((upload, whether it counts), what it leaves)."""
        own = tree.take(state.clients, slot.who)
        received = message
        if history > 1:
            received = tree.take(heard, (state.round - slot.delay) % history)
        # An absent client has no examples to work on, so under a scan it costs next to nothing.
        size = jnp.where(slot.present, slot.size, 0)
        shard = Shard(federation.data, federation.order, federation.start[slot.who], size, slot.who)
        client_key = jax.random.fold_in(key, slot.who)
        reply = exchange.client(
            Visit(received, own, shard, state.round, slot.delay, client_key, prompt)
        )
        finite = tree.all_finite(reply)
        present = slot.present & (finite | (not drop_nonfinite))
        upload = optax.tree.where(present, reply.upload, optax.tree.zeros_like(reply.upload))
        own = optax.tree.where(present, reply.own, own)
        return (upload, present), _Kept(own, reply.metrics, present, finite)

    def add(accumulator: Tree, uploads: tuple[Tree, Array], slots: Slots) -> Tree:
        upload, present = uploads
        return aggregator.add(accumulator, upload, slots._replace(present=present))

    (upload, _), _ = jax.eval_shape(client, tree.take(slots, 0))
    start = aggregator.init(upload, slots.who.shape[0])
    accumulator, kept = axis(client, add, start, slots)
    server = exchange.update(
        state.server,
        aggregator.finish(accumulator),
        Cohort(cohort.who, kept.present, delay),
    )
    index_of_own = jnp.where(kept.present, cohort.who, federation.num_clients)
    state = state._replace(
        server=optax.tree.where(kept.present.any(), server, state.server),
        clients=tree.put(state.clients, index_of_own, kept.own),
        heard=(*state.heard[:index], heard, *state.heard[index + 1 :]),
    )
    return state, Report(kept.metrics, kept.present, kept.finite | ~slots.present, slots.size)


def step(
    algorithm: Algorithm,
    state: State,
    cohort: Cohort,
    federation: Federation,
    *,
    axis: Axis,
    drop_nonfinite: bool = False,
) -> tuple[State, tuple[Report, ...]]:
    """One round, every exchange in turn: (the state after it, a report per exchange).

    cohort: [S] slots. axis: how they are laid over memory and devices. drop_nonfinite: whether a
    client that returns a NaN or an infinity is treated as absent. Raises ValueError for a cohort or
    a state that do not fit the federation.
    """
    whole = jax.tree.map(lambda leaf: leaf[None], cohort)
    checks.schedule(whole, federation.num_clients, _history(state.heard))
    kept_for = {leaf.shape[0] for leaf in jax.tree.leaves(state.clients)}
    if kept_for - {federation.num_clients}:
        raise UsageError(
            f"federation: has {federation.num_clients} clients, must have {kept_for.pop()}, those "
            "that the state is of"
        )
    reports = []
    for index, exchange in enumerate(algorithm.exchanges):
        state, report = _exchange(exchange, index, state, cohort, federation, axis, drop_nonfinite)
        reports.append(report)
    return state._replace(round=state.round + 1), tuple(reports)


def run(
    algorithm: Algorithm,
    state: State,
    schedule: Cohort,
    federation: Federation,
    *,
    axis: Axis,
    drop_nonfinite: bool = False,
) -> tuple[State, tuple[Report, ...]]:
    """`step` over a schedule (a cohort with a leading T), as one scan; reports with leading T.

    Raises ValueError for a schedule or a state that do not fit the federation.
    """
    checks.federation(federation)
    checks.schedule(schedule, federation.num_clients, _history(state.heard))

    def body(state: State, cohort: Cohort) -> tuple[State, tuple[Report, ...]]:
        return step(algorithm, state, cohort, federation, axis=axis, drop_nonfinite=drop_nonfinite)

    with jax.named_scope("rounds"):
        return jax.lax.scan(body, state, schedule)
