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

from fedjax_inv import checks, clients, tree
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
    clients: Tree  # [C, ...] what each client keeps; on a device, what those that it holds do
    broadcast_history: tuple[
        Tree, ...
    ]  # per exchange the last H broadcasts [H, ...]; empty where H = 1
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
    axis: Axis | None = None,
) -> State:
    """The state of a run of `algorithm` on `federation` before the first round.

    variables: a drawn network. history: how many broadcasts are kept for delayed clients, 1 + the
    longest delay. axis: as in `step`, by default of one device. Raises ValueError for history below
    1, and for rows that are none.
    """
    checks.integer("history", history)
    checks.federation(federation)
    # Nothing of it but its shape may matter: devices that share the examples hold different ones.
    sample = jax.tree.map(lambda leaf: jnp.zeros_like(leaf[:1]), federation.data.x)
    server = algorithm.init_server(
        Setup(variables, federation.num_clients, sample, jax.random.fold_in(key, 0))
    )
    held = (axis or clients.vmapped()).holds(federation.num_clients)
    own = jax.vmap(lambda who: algorithm.init_client(server, who))(held)
    broadcast_history: tuple[Tree, ...] = tuple(() for _ in algorithm.exchanges)
    if history > 1:
        broadcast_history = tuple(
            jax.tree.map(lambda leaf: jnp.stack([leaf] * history), exchange.broadcast(server))
            for exchange in algorithm.exchanges
        )
    # Copies, so that a state can be donated although leaves of it started as one array.
    server, own, broadcast_history = jax.tree.map(jnp.array, (server, own, broadcast_history))
    return State(server, own, broadcast_history, jnp.int32(0), jax.random.fold_in(key, 1))


def _history(broadcast_history: Tree) -> int:
    """H of what is kept of an exchange's broadcasts."""
    return next((leaf.shape[0] for leaf in jax.tree.leaves(broadcast_history)), 1)


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
    broadcast_history = state.broadcast_history[index]
    history = _history(broadcast_history)
    if history > 1:
        broadcast_history = tree.put(broadcast_history, state.round % history, message)
    # In the first rounds the first broadcast is the oldest.
    delay = jnp.clip(cohort.delay, 0, jnp.minimum(history - 1, state.round))
    slots = _slots(exchange, state, cohort._replace(delay=delay), federation)
    key = jax.random.fold_in(jax.random.fold_in(state.key, state.round), index)
    dealt = axis.deal(slots, slots.who, slots.present, federation.num_clients)

    def client(turn: tuple[Slots, Array]) -> tuple[tuple[Tree, Array], _Kept]:
        """One slot's turn: ((upload, whether it counts), what it leaves)."""
        slot, place = turn
        own = tree.take(state.clients, place)
        received = message
        if history > 1:
            received = tree.take(broadcast_history, (state.round - slot.delay) % history)
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
        return (upload, present), _Kept(reply.own, reply.metrics, present, finite)

    def add(accumulator: Tree, uploads: tuple[Tree, Array], turns: tuple[Slots, Array]) -> Tree:
        upload, present = uploads
        return aggregator.add(accumulator, upload, turns[0]._replace(present=present))

    turns = dealt.slots, dealt.place
    (upload, _), _ = jax.eval_shape(client, tree.take(turns, 0))
    start = aggregator.init(upload, slots.who.shape[0])
    accumulator, kept = axis.fold(client, add, start, turns)
    metrics, present, finite = dealt.whole((kept.metrics, kept.present, kept.finite))
    server = exchange.update(
        state.server,
        aggregator.finish(axis.total(accumulator)),
        Cohort(cohort.who, present, delay),
    )
    # A state is written where the client is held, and nowhere if it was absent.
    where, own, wrote = dealt.place, kept.own, kept.present
    if axis.is_alike:
        where, own, wrote = cohort.who, dealt.whole(kept.own), present
    num_held = axis.holds(federation.num_clients).shape[0]
    state = state._replace(
        server=optax.tree.where(present.any(), server, state.server),
        clients=tree.put(state.clients, jnp.where(wrote, where, num_held), own),
        broadcast_history=(
            *state.broadcast_history[:index],
            broadcast_history,
            *state.broadcast_history[index + 1 :],
        ),
    )
    return state, Report(metrics, present, finite | ~slots.present, slots.size)


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
    checks.schedule(whole, federation.num_clients, _history(state.broadcast_history))
    kept_for = {leaf.shape[0] for leaf in jax.tree.leaves(state.clients)}
    if kept_for - {axis.holds(federation.num_clients).shape[0]}:
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
    checks.schedule(schedule, federation.num_clients, _history(state.broadcast_history))

    def body(state: State, cohort: Cohort) -> tuple[State, tuple[Report, ...]]:
        return step(algorithm, state, cohort, federation, axis=axis, drop_nonfinite=drop_nonfinite)

    with jax.named_scope("rounds"):
        return jax.lax.scan(body, state, schedule)
