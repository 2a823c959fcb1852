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

from fedjax_inv import tree
from fedjax_inv.aggregators import combine
from fedjax_inv.clients import Axis
from fedjax_inv.types import (
    Algorithm,
    Array,
    Cohort,
    Exchange,
    Federation,
    Metrics,
    Shard,
    Slots,
    Tree,
    Variables,
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


class _Slot(NamedTuple):
    slots: Slots
    delay: Array


class _Kept(NamedTuple):
    own: Tree
    metrics: Metrics
    present: Array
    finite: Array
    size: Array


def init(
    algorithm: Algorithm, variables: Variables, key: Array, num_clients: int, *, history: int = 1
) -> State:
    """The state before the first round.

    history: how many broadcasts are kept for delayed clients, 1 + the longest delay.
    """
    if history < 1:
        raise ValueError(f"history={history}: must be at least 1")
    server = algorithm.init_server(variables, jax.random.fold_in(key, 0))
    clients = jax.vmap(lambda who: algorithm.init_client(server, who))(
        jnp.arange(num_clients, dtype=jnp.int32)
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


def _exchange(
    exchange: Exchange,
    index: int,
    state: State,
    cohort: Cohort,
    federation: Federation,
    axis: Axis,
    drop_nonfinite: bool,
) -> tuple[State, Report]:
    aggregator = combine(exchange.aggregate)
    message = exchange.broadcast(state.server)
    heard = state.heard[index]
    history = next((leaf.shape[0] for leaf in jax.tree.leaves(heard)), 1)
    if history > 1:
        heard = tree.put(heard, state.round % history, message)
    key = jax.random.fold_in(jax.random.fold_in(state.key, state.round), index)

    def client(slot: _Slot) -> tuple[tuple[Tree, Array], _Kept]:
        who = slot.slots.who
        own = tree.take(state.clients, who)
        # An absent client has no examples to work on, so under a scan it costs next to nothing.
        mask = federation.mask[who] & slot.slots.present
        shard = Shard(federation.data, federation.rows[who], mask, who)
        received = message
        if history > 1:
            delay = jnp.clip(slot.delay, 0, jnp.minimum(history - 1, state.round))
            received = tree.take(heard, (state.round - delay) % history)
        new_own, upload, metrics = exchange.client(
            received, own, shard, jax.random.fold_in(key, who)
        )
        finite = tree.all_finite((upload, metrics, new_own))
        present = slot.slots.present & (finite | (not drop_nonfinite))
        upload = tree.select(present, upload, jax.tree.map(jnp.zeros_like, upload))
        own = tree.select(present, new_own, own)
        return (upload, present), _Kept(own, metrics, present, finite, slot.slots.size)

    size = federation.mask.sum(1, dtype=jnp.int32)[cohort.who]
    present = cohort.present & (size > 0) & exchange.takes_place(state.round)
    num_slots = cohort.who.shape[0]
    slots = _Slot(
        Slots(jnp.arange(num_slots, dtype=jnp.int32), cohort.who, present, size), cohort.delay
    )
    (upload, _), _ = jax.eval_shape(client, jax.tree.map(lambda a: a[0], slots))

    def add(accumulator: Tree, uploads: tuple[Tree, Array], slots: _Slot) -> Tree:
        upload, present = uploads
        return aggregator.add(accumulator, upload, slots.slots._replace(present=present))

    accumulator, kept = axis(client, add, aggregator.init(upload, num_slots), slots)
    attended = jnp.any(kept.present)
    server = exchange.update(
        state.server, aggregator.finish(accumulator), cohort._replace(present=kept.present)
    )
    index_of_own = jnp.where(kept.present, cohort.who, federation.rows.shape[0])
    state = state._replace(
        server=tree.select(attended, server, state.server),
        clients=tree.put(state.clients, index_of_own, kept.own),
        heard=(*state.heard[:index], heard, *state.heard[index + 1 :]),
    )
    return state, Report(kept.metrics, kept.present, kept.finite | ~present, kept.size)


def step(
    algorithm: Algorithm,
    state: State,
    cohort: Cohort,
    federation: Federation,
    *,
    axis: Axis,
    drop_nonfinite: bool = False,
) -> tuple[State, tuple[Report, ...]]:
    """One round: every exchange in turn. Returns a report per exchange."""
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
    """`step` over a schedule (a cohort with a leading T), as one scan; reports with leading T."""

    def body(state: State, cohort: Cohort) -> tuple[State, tuple[Report, ...]]:
        return step(algorithm, state, cohort, federation, axis=axis, drop_nonfinite=drop_nonfinite)

    return jax.lax.scan(body, state, schedule)
