"""The engine: state, one round, a run of rounds.

Four laws hold for all algorithms:
1. Randomness is folded from (key, round, exchange, client), never split by slot, so the client
   axis, the order of slots and empty slots cannot change a result.
2. Absent slots write nothing and weigh nothing; a client without examples is absent.
3. An exchange that nobody attends leaves the server and every client as they were.
4. A client whose upload, metrics or own state hold a NaN or an infinity is reported; with
   `drop_nonfinite` it counts as absent.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_inv import checks, devices, tree
from fedjax_inv.aggregators import combine
from fedjax_inv.checks import UsageError
from fedjax_inv.devices import Axis
from fedjax_inv.types import (
    Algorithm,
    Array,
    Cohort,
    Exchange,
    Federation,
    Metrics,
    Reply,
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
    clients: Tree  # [C, ...] the state of each client, or of each client on this device
    # for each exchange the last H broadcasts [H, ...]; empty if H = 1
    broadcast_history: tuple[Tree, ...]
    round: Array  # [] int32
    key: Array  # the run's base key, never changed


class Report(NamedTuple):
    """The report on one exchange, slot by slot."""

    metrics: Metrics  # each [S]; arbitrary where not present
    present: Array  # [S] bool, took part and had examples
    finite: Array  # [S] bool, false = its reply held a NaN or an infinity
    size: Array  # [S] int32, examples of the client


class _Result(NamedTuple):
    """The results of a client's turn beside its upload."""

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
    """Return the state of a run before the first round.

    Args:
      algorithm: the algorithm of the run.
      variables: a drawn network.
      federation: the federation of the run.
      key: the random key of the run.
      history: H, the number of broadcasts kept for delayed clients, 1 + the longest delay.
      axis: the axis of the run, as in `step`; by default one for a single device.

    Returns:
      The state, a copy: no leaf shares its memory with another or with `variables`.

    Raises:
      UsageError: if history is below 1, if so many broadcasts do not fit into memory, if a client's
        rows are not rows of the examples, or if a parameter is in half precision.
    """
    checks.record("algorithm", algorithm, Algorithm)
    checks.key("key", key)
    checks.integer("history", history)
    checks.federation(federation)
    axis = devices.vmapped() if axis is None else axis
    checks.record("axis", axis, Axis)
    _check_precision(variables)
    # Zeros, as only the shape may matter: devices that own their clients have different examples.
    sample = jax.tree.map(lambda leaf: jnp.zeros_like(leaf[:1]), federation.data.x)
    num_clients, server_key = federation.num_clients, jax.random.fold_in(key, 0)
    server = algorithm.init_server(
        Setup(variables, num_clients, sample, server_key, federation.size > 0)
    )
    for path, leaf in jax.tree_util.tree_leaves_with_path(server):
        if not hasattr(leaf, "dtype") and not isinstance(leaf, int | float | complex):
            place = jax.tree_util.keystr(path)
            text = f"holds a value of type {type(leaf).__name__}{place and f' at {place}'}"
            raise UsageError("the result of init_server", ..., f"{text}, must hold arrays")
    who = axis.local_clients(federation.num_clients)
    own = jax.vmap(lambda who: algorithm.init_client(server, who))(who)
    broadcast_history: tuple[Tree, ...] = tuple(() for _ in algorithm.exchanges)
    if history > 1:
        messages = [exchange.broadcast(server) for exchange in algorithm.exchanges]
        one = sum(leaf.nbytes for leaf in jax.tree.leaves(messages) if hasattr(leaf, "nbytes"))
        checks.memory("history", history, history * one)
        broadcast_history = tuple(
            jax.tree.map(lambda leaf: jnp.stack([leaf] * history), message) for message in messages
        )
    server, own, broadcast_history = jax.tree.map(_stored, (server, own, broadcast_history))
    return State(server, own, broadcast_history, jnp.int32(0), jax.random.fold_in(key, 1))


def _check_precision(variables: Variables) -> None:
    """Raise UsageError for half precision, in which numbers of examples and sums overflow."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(variables):
        dtype = getattr(leaf, "dtype", None)
        if dtype is not None and jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4:
            text = f"has {dtype} at {jax.tree_util.keystr(path)}, must have float32 or float64"
            advice = (
                "`models.computed_in` keeps parameters in float32 and computes in half precision"
            )
            raise UsageError("variables", ..., f"{text}; {advice}")


def _stored(leaf: Array) -> Array:
    """Return a leaf as rounds return it.

    It is a copy, so that a state can be donated although several leaves started as one array. Its
    type is not weak, as that of `jnp.full(3, 0.5)` is, or the second segment would compile again.
    """
    return jnp.array(leaf, dtype=jnp.asarray(leaf).dtype)


def _history(broadcast_history: Tree) -> int:
    """Return H, the number of broadcasts in the history of the exchanges."""
    return next((leaf.shape[0] for leaf in jax.tree.leaves(broadcast_history)), 1)


def _slots(exchange: Exchange, state: State, cohort: Cohort, federation: Federation) -> Slots:
    """Return the cohort of an exchange, as clients and aggregators see it."""
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
    """Play the exchange numbered `index` of a round; return (the state after it, its report)."""
    aggregator = combine(exchange.aggregate)
    message = exchange.broadcast(state.server)
    undelayed = exchange.broadcast_undelayed(state.server)
    broadcast_history = state.broadcast_history[index]
    history = _history(broadcast_history)
    if history > 1:
        broadcast_history = tree.put(broadcast_history, state.round % history, message)
    # In the first rounds the first broadcast is the oldest.
    delay = jnp.clip(cohort.delay, 0, jnp.minimum(history - 1, state.round))
    slots = _slots(exchange, state, cohort._replace(delay=delay), federation)
    key = jax.random.fold_in(jax.random.fold_in(state.key, state.round), index)
    mine = axis.assign(slots, slots.who, slots.present, federation.num_clients)

    def client(turn: tuple[Slots, Array]) -> tuple[tuple[Tree, Array], _Result]:
        """Play one slot's turn; return ((upload, whether it counts), the other results)."""
        slot, local_index = turn
        start = federation.start[slot.who]
        own = tree.take(state.clients, local_index)
        received = message
        if history > 1:
            received = tree.take(broadcast_history, (state.round - slot.delay) % history)
        # An absent client gets no examples, so under a scan it costs next to nothing.
        size = jnp.where(slot.present, slot.size, 0)
        shard = Shard(federation.data, federation.order, start, size, slot.who)
        client_key = jax.random.fold_in(key, slot.who)
        reply = exchange.client(
            Visit(received, own, shard, state.round, slot.delay, client_key, undelayed)
        )
        checks.record(f"the result of exchanges[{index}].client", reply, Reply)
        checks.record(f"the metrics of exchanges[{index}].client", reply.metrics, dict)
        for path, leaf in jax.tree_util.tree_leaves_with_path(reply):
            if not hasattr(leaf, "dtype") and not isinstance(leaf, int | float | complex):
                name, place = f"the result of exchanges[{index}].client", jax.tree_util.keystr(path)
                text = f"holds a value of type {type(leaf).__name__} at {place}, must hold arrays"
                raise UsageError(name, ..., text)
        finite = tree.all_finite(reply)
        present = slot.present & (finite | (not drop_nonfinite))
        upload = optax.tree.where(present, reply.upload, optax.tree.zeros_like(reply.upload))
        return (upload, present), _Result(reply.own, reply.metrics, present, finite)

    def add(sums: Tree, uploads: tuple[Tree, Array], turns: tuple[Slots, Array]) -> Tree:
        upload, present = uploads
        return aggregator.add(sums, upload, turns[0]._replace(present=present))

    turns = mine.slots, mine.local_index
    # Traced once for its shapes and for the fold; inlined, the program is the same.
    client = jax.jit(client, inline=True)
    shapes = jax.eval_shape(client, tree.take(turns, 0))
    kept = jax.eval_shape(lambda clients: tree.take(clients, 0), state.clients)
    checks.same_leaves(f"exchanges[{index}].client", shapes[1].own, kept, "as init_client does")
    for name, metric in shapes[1].metrics.items():
        if metric.shape:
            text = f"returns the metric {name!r} of shape {metric.shape}, must be a scalar"
            raise UsageError(f"exchanges[{index}].client", ..., text)
    start = aggregator.init(shapes[0][0], slots.who.shape[0])
    sums, result = axis.fold(client, add, start, turns)
    metrics, present, finite = mine.gather((result.metrics, result.present, result.finite))
    attending = Cohort(cohort.who, present, delay)
    server = exchange.update(state.server, aggregator.finish(sums), attending)
    checks.same_leaves(f"exchanges[{index}].update", server, state.server, "as init_server does")
    server = optax.tree.where(present.any(), server, state.server)
    # Each device writes the states of the clients that lie on it; an absent client writes nothing.
    where, own, wrote = mine.local_index, result.own, result.present
    if axis.replicated:
        where, own, wrote = slots.who, mine.gather(result.own), present
    num_local = axis.local_clients(federation.num_clients).shape[0]
    state = state._replace(
        server=server,
        clients=tree.put(state.clients, jnp.where(wrote, where, num_local), own),
        broadcast_history=(
            *state.broadcast_history[:index],
            broadcast_history,
            *state.broadcast_history[index + 1 :],
        ),
    )
    return state, Report(metrics, present, finite | ~slots.present, slots.size)


def check_num_clients(state: State, federation: Federation, axis: Axis) -> None:
    """Check that a state has as many clients as a federation.

    Args:
      state: the state of a run.
      federation: the federation.
      axis: the axis of the run.

    Raises:
      UsageError: if the numbers differ. A state whose clients store nothing fits any federation.
    """
    num_states = {leaf.shape[0] for leaf in jax.tree.leaves(state.clients)}
    if num_states - {axis.local_clients(federation.num_clients).shape[0]}:
        here = federation.start.shape[0]
        text = f"has {here} clients, must have {num_states.pop()}, as the state has"
        raise UsageError("federation", ..., text)


def _check_types(
    algorithm: Algorithm, state: State, federation: Federation, axis: Axis, drop_nonfinite: bool
) -> None:
    checks.record("algorithm", algorithm, Algorithm)
    checks.record("state", state, State)
    checks.whole("state.round", state.round)
    checks.key("state.key", state.key)
    if len(state.broadcast_history) != len(algorithm.exchanges):
        found = f"is of an algorithm with {len(state.broadcast_history)} exchanges"
        raise UsageError("state", ..., f"{found}, must have {len(algorithm.exchanges)}")
    checks.record("federation", federation, Federation)
    checks.record("axis", axis, Axis)
    checks.boolean("drop_nonfinite", drop_nonfinite)


def step(
    algorithm: Algorithm,
    state: State,
    cohort: Cohort,
    federation: Federation,
    *,
    axis: Axis,
    drop_nonfinite: bool = False,
) -> tuple[State, tuple[Report, ...]]:
    """Play one round: every exchange in turn.

    Args:
      algorithm: the algorithm of the run.
      state: the state before the round.
      cohort: the S slots of the round.
      federation: the clients and their examples.
      axis: how the slots are laid over memory and devices.
      drop_nonfinite: whether a client that returns a NaN or an infinity is treated as absent.

    Returns:
      (the state after the round, a report for each exchange, each leaf [S]).

    Raises:
      UsageError: if the cohort or the state does not fit the federation, if a client returns no
        Reply, or if an exchange returns a server or own state of other shapes, or a metric that is
        no scalar.
    """
    _check_types(algorithm, state, federation, axis, drop_nonfinite)
    checks.cohort("cohort", cohort)
    if cohort.who.ndim != 1 or not cohort.who.shape == cohort.present.shape == cohort.delay.shape:
        who, present, delay = map(jnp.shape, cohort)
        text = f"who {who}, present {present} and delay {delay}: must all be [S]"
        raise UsageError("cohort", ..., f"{text}; rounds.run takes a schedule [T, S]")
    whole = jax.tree.map(lambda leaf: leaf[None], cohort)
    checks.schedule(whole, federation.num_clients, _history(state.broadcast_history))
    check_num_clients(state, federation, axis)
    state, cohort, federation = tree.on_device((state, cohort, federation))
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
    """Play the rounds of a schedule: `step` under one scan.

    Args:
      algorithm: the algorithm of the run.
      state: the state before the first of these rounds.
      schedule: the cohorts [T, S].
      federation: the clients and their examples.
      axis: how the slots are laid over memory and devices.
      drop_nonfinite: whether a client that returns a NaN or an infinity is treated as absent.

    Returns:
      (the state after the last round, a report for each exchange, each leaf [T, S]).

    Raises:
      UsageError: if the schedule or the state does not fit the federation, if a client returns no
        Reply, or if an exchange returns a server or own state of other shapes, or a metric that is
        no scalar.
    """
    _check_types(algorithm, state, federation, axis, drop_nonfinite)
    checks.federation(federation)
    checks.schedule(schedule, federation.num_clients, _history(state.broadcast_history))
    state, federation = tree.on_device((state, federation))

    def body(state: State, cohort: Cohort) -> tuple[State, tuple[Report, ...]]:
        return step(algorithm, state, cohort, federation, axis=axis, drop_nonfinite=drop_nonfinite)

    with jax.named_scope("rounds"):
        return jax.lax.scan(body, state, schedule)
