"""The engine: state, one round, a run of rounds.

Four laws hold for all algorithms:
1. Randomness is folded from (key, round, exchange, client), never split by slot, so the client
   axis, the order of slots and empty slots cannot change a result.
2. Absent slots write nothing and weigh nothing; a client without examples is absent.
3. An exchange that nobody attends leaves the server and every client as they were, unless the
   exchange says otherwise (`Exchange.unattended`).
4. A client whose reply holds a NaN or an infinity is reported; with `drop_nonfinite` it counts as
   absent.
"""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax

from fedjax_inv import checks, communication, devices, tree, types
from fedjax_inv.checks import UsageError
from fedjax_inv.devices import Axis
from fedjax_inv.types import Array, Tree


class State(NamedTuple):
    """All that a run carries from round to round."""

    server: Tree
    clients: Tree  # [C, ...] the state of each client, or of each client on this device
    # for each exchange the last H broadcasts [H, ...]; empty if H = 1
    broadcast_history: tuple[Tree, ...]
    round: Array  # [] int32
    key: Array  # the run's base key, never changed


class Report(NamedTuple):
    """The report on one exchange, slot by slot."""

    metrics: types.Metrics  # each [S]; arbitrary where not present
    present: Array  # [S] bool, took part and had examples
    finite: Array  # [S] bool, false = its reply held a NaN or an infinity
    size: Array  # [S] int32, examples of the client
    traffic: communication.Traffic  # of a client


class _Result(NamedTuple):
    """The results of a client's turn beside its upload."""

    own: Tree
    metrics: types.Metrics
    present: Array
    finite: Array


def init(
    algorithm: types.Algorithm,
    variables: types.Variables,
    federation: types.Federation,
    key: Array,
    *,
    history: int = 1,
    axis: Axis | None = None,
) -> State:
    """Return the state of a run before the first round, from a drawn network.

    `history` is H, the number of broadcasts kept for delayed clients, 1 + the longest delay. The
    axis is as in `step`, by default one for a single device. The state is a copy: no leaf shares
    its memory with another or with `variables`.
    """
    checks.federation(federation)
    for leaf in jax.tree.leaves(variables):
        if jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize < 4:
            text = "must be of float32 or float64; `models.computed_in` computes in half precision"
            raise UsageError("variables", leaf, text)
    axis = devices.vmapped() if axis is None else axis
    # Zeros, as only the shape may matter: devices that own their clients have different examples.
    sample = jax.tree.map(lambda leaf: jnp.zeros_like(leaf[:1]), federation.data.x)
    has_examples = federation.size > 0
    server_key = jax.random.fold_in(key, 0)
    mean_size = federation.size.sum() / jnp.maximum(has_examples.sum(), 1)
    setup = types.Setup(
        variables, federation.num_clients, sample, server_key, has_examples, mean_size
    )
    server = algorithm.init_server(setup)
    who = axis.local_clients(federation.num_clients)
    own = jax.vmap(lambda who: algorithm.init_client(server, who))(who)
    broadcast_history: tuple[Tree, ...] = tuple(() for _ in algorithm.exchanges)
    if history > 1:
        messages = tuple(exchange.broadcast(server) for exchange in algorithm.exchanges)
        broadcast_history = jax.tree.map(lambda leaf: jnp.stack([leaf] * history), messages)
    server, own, broadcast_history = jax.tree.map(_stored, (server, own, broadcast_history))
    return State(server, own, broadcast_history, jnp.int32(0), jax.random.fold_in(key, 1))


def _stored(leaf: Array) -> Array:
    """Return a copy, so that a state can be donated although leaves started as one array.

    Its type is not weak, as that of `jnp.full(3, 0.5)` is, or a second segment would compile again.
    """
    return jnp.array(leaf, dtype=jnp.asarray(leaf).dtype)


def _slots(
    exchange: types.Exchange, state: State, cohort: types.Cohort, federation: types.Federation
) -> types.Slots:
    """Return the cohort of an exchange, as clients and aggregators see it."""
    size = federation.size[cohort.who]
    attends = jax.vmap(
        lambda who: jnp.asarray(exchange.attends(state.server, who, state.round), bool)
    )(cohort.who)
    return types.Slots(
        position=jnp.arange(cohort.who.shape[0], dtype=jnp.int32),
        who=cohort.who,
        present=cohort.present & (size > 0) & attends,
        size=size,
        delay=cohort.delay,
    )


def _assert_same(found: Tree, before: Tree, text: str) -> None:
    """Assert that a state keeps its structure, its shapes and its types, which are those of JAX."""
    both = jax.eval_shape(lambda: (found, before))
    chex.assert_trees_all_equal_shapes_and_dtypes(*both, custom_message=text)


def _exchange(
    exchange: types.Exchange,
    index: int,
    state: State,
    cohort: types.Cohort,
    federation: types.Federation,
    axis: Axis,
    drop_nonfinite: bool,
) -> tuple[State, Report]:
    """Play the exchange numbered `index` of a round; return (the state after it, its report)."""
    message = exchange.broadcast(state.server)
    broadcasts = state.broadcast_history[index]
    history = next((len(leaf) for leaf in jax.tree.leaves(broadcasts)), 1)
    if history > 1:
        broadcasts = tree.put(broadcasts, state.round % history, message)
    undelayed = exchange.broadcast_undelayed(state.server)
    # In the first rounds the first broadcast is the oldest.
    delay = jnp.clip(cohort.delay, 0, jnp.minimum(history - 1, state.round))
    slots = _slots(exchange, state, cohort._replace(delay=delay), federation)
    key = jax.random.fold_in(jax.random.fold_in(state.key, state.round), index)
    mine = axis.assign(slots, slots.who, slots.present, federation.num_clients)

    def client(turn: tuple[types.Slots, Array]) -> tuple[tuple[Tree, Array], _Result]:
        """Play one slot's turn; return ((upload, whether it counts), the other results)."""
        slot, local_index = turn
        own = tree.take(state.clients, local_index)
        # An absent client gets no examples, so under a scan it costs next to nothing.
        start = federation.start[slot.who]
        size = jnp.where(slot.present, slot.size, 0)
        shard = types.Shard(federation.data, federation.order, start, size, slot.who)
        received = message
        if history > 1:
            received = tree.take(broadcasts, (state.round - slot.delay) % history)
        client_key = jax.random.fold_in(key, slot.who)
        reply = exchange.client(
            types.Visit(received, own, shard, state.round, slot.delay, client_key, undelayed)
        )
        _assert_same(reply.own, own, f"exchanges[{index}].client returns another own state")
        finite = tree.all_finite(reply)
        present = slot.present & (finite | (not drop_nonfinite))
        upload = optax.tree.where(present, reply.upload, optax.tree.zeros_like(reply.upload))
        return (upload, present), _Result(reply.own, reply.metrics, present, finite)

    def add(sums: Tree, uploads: tuple[Tree, Array], turns: tuple[types.Slots, Array]) -> Tree:
        upload, present = uploads
        return exchange.aggregate.add(sums, upload, turns[0]._replace(present=present))

    turns = mine.slots, mine.local_index
    # Traced once for its shapes and for the fold; inlined, the program is the same.
    client = jax.jit(client, inline=True)
    (upload, _), shapes = jax.eval_shape(client, tree.take(turns, 0))
    down = communication.size((message, undelayed))
    up = communication.size(upload)
    chex.assert_trees_all_equal_shapes(shapes.metrics, dict.fromkeys(shapes.metrics, state.round))
    start = exchange.aggregate.init(upload, slots.who.shape[0])
    sums, result = axis.fold(client, add, start, turns)
    metrics, present, finite = mine.gather((result.metrics, result.present, result.finite))
    aggregated = exchange.aggregate.finish(sums)
    attending = types.Cohort(cohort.who, present, delay)
    server = exchange.update(state.server, aggregated, attending)
    _assert_same(server, state.server, f"exchanges[{index}].update returns another server")
    # Each device writes the states of the clients that lie on it; an absent client writes nothing.
    where = mine.local_index
    own = result.own
    wrote = result.present
    if axis.replicated:
        where = slots.who
        own = mine.gather(result.own)
        wrote = present
    # An index beyond all clients, where nothing is written.
    nowhere = axis.local_clients(federation.num_clients).shape[0]
    histories = list(state.broadcast_history)
    histories[index] = broadcasts
    state = state._replace(
        server=optax.tree.where(present.any() | exchange.unattended, server, state.server),
        clients=tree.put(state.clients, jnp.where(wrote, where, nowhere), own),
        broadcast_history=tuple(histories),
    )
    traffic = communication.Traffic(down, up)
    return state, Report(metrics, present, finite | ~slots.present, slots.size, traffic)


def step(
    algorithm: types.Algorithm,
    state: State,
    cohort: types.Cohort,
    federation: types.Federation,
    *,
    axis: Axis,
    drop_nonfinite: bool = False,
) -> tuple[State, tuple[Report, ...]]:
    """Play one round of S slots: every exchange in turn.

    `axis` says how the slots are laid over memory and devices, and `drop_nonfinite` whether a
    client that returns a NaN or an infinity is treated as absent. It returns (the state after the
    round, a report for each exchange, each leaf [S]).
    """
    chex.assert_rank(list(cohort), 1)
    chex.assert_equal_shape(list(cohort))
    chex.assert_tree_shape_prefix(state.clients, axis.local_clients(federation.num_clients).shape)
    state, cohort, federation = tree.on_device((state, cohort, federation))
    reports = []
    for index, exchange in enumerate(algorithm.exchanges):
        state, report = _exchange(exchange, index, state, cohort, federation, axis, drop_nonfinite)
        reports.append(report)
    if algorithm.after_round:
        attended = jnp.stack([report.present for report in reports]).any()
        after = algorithm.after_round(state.server, state.round)
        state = state._replace(server=optax.tree.where(attended, after, state.server))
    return state._replace(round=state.round + 1), tuple(reports)


def run(
    algorithm: types.Algorithm,
    state: State,
    schedule: types.Cohort,
    federation: types.Federation,
    *,
    axis: Axis,
    drop_nonfinite: bool = False,
) -> tuple[State, tuple[Report, ...]]:
    """Play the rounds of a schedule, cohorts [T, S]: `step` under one scan.

    The other arguments are those of `step`. It returns (the state after the last round, a report
    for each exchange, each leaf [T, S]).
    """
    state, federation = tree.on_device((state, federation))

    def body(state: State, cohort: types.Cohort) -> tuple[State, tuple[Report, ...]]:
        return step(algorithm, state, cohort, federation, axis=axis, drop_nonfinite=drop_nonfinite)

    with jax.named_scope("rounds"):
        return jax.lax.scan(body, state, schedule)


def traffic(
    algorithm: types.Algorithm, state: State, federation: types.Federation
) -> tuple[communication.Traffic, ...]:
    """Return the bytes that a client downloads and uploads in each exchange of a round.

    Only shapes are computed; the state and the federation may be shapes, too.
    """

    def reports(state: State, federation: types.Federation) -> tuple[Report, ...]:
        one = jnp.zeros(1, jnp.int32)
        cohort = types.Cohort(one, one == 0, one)
        return step(algorithm, state, cohort, federation, axis=devices.vmapped())[1]

    return tuple(report.traffic for report in jax.eval_shape(reports, state, federation))
