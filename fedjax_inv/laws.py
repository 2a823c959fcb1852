"""The laws that every algorithm must obey, a function each: `check(factory)` checks them.

    from fedjax_inv import laws

    laws.check(my_factory, hyperparameters={"penalty": 0.1})

From the command line: python -m fedjax_inv.laws package.module:factory
"""

import importlib
import inspect
import itertools
import operator
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from fedjax_inv import checks, devices, local, models, platforms, rounds, tree, types
from fedjax_inv.data import federation as federations
from fedjax_inv.task import facts_of
from fedjax_inv.types import Array, Tree

Result = tuple[rounds.State, tuple[rounds.Report, ...]]

# A tiny federation, its schedule, a network and local training.

NUM_CLASSES = 3
IMAGE = (6, 6, 1)
SIZES = (4, 0, 1, 7, 5)
NUM_CLIENTS = len(SIZES)
NUM_DOMAINS = 3
NO_EXAMPLE, ONE_EXAMPLE, POISONED = 1, 2, 3  # clients
HISTORY = 3  # broadcasts kept, as the longest delay is two rounds
_HALF = 3  # rounds, after which a run is resumed


def federation(
    sizes: Sequence[int] = SIZES, *, seed: int = 0, data: types.Examples | None = None
) -> types.Federation:
    """Return clients of these sizes, by default with 8-bit images, brighter for a higher class.

    Two examples of a client after the other are of one domain, apart from their classes, so that a
    client of four has two of two domains. No client has the last four examples, nor the last 8 rows
    of the order. Of other data the first sum(sizes) + 4 are taken.
    """
    rng = np.random.default_rng(seed)
    number = sum(sizes) + 4
    y = rng.integers(0, NUM_CLASSES, number)
    x = rng.integers(0, 120, (number, *IMAGE)) + 60 * y[:, None, None, None]
    parts = np.split(rng.permutation(sum(sizes)), np.cumsum(sizes)[:-1])
    if data is None:
        domain = np.zeros(number, np.int32)
        for rows in parts:
            domain[rows] = np.arange(len(rows)) // 2 % NUM_DOMAINS
        data = federations.examples(x.astype(np.uint8), y.astype(np.int32), domain)
    data = jax.tree.map(lambda leaf: jnp.asarray(leaf)[:number], data)
    split = federations.of_parts(data, parts)
    return split._replace(order=jnp.concatenate([split.order, jnp.zeros(8, jnp.int32)]))


def in_floats(federation: types.Federation) -> types.Federation:
    """Return the federation with 8-bit inputs in floating point, which can hold a NaN."""

    def leaf(x: Array) -> Array:
        return x.astype(jnp.float32) / 255 if x.dtype == jnp.uint8 else x

    x = jax.tree.map(leaf, federation.data.x)
    return federation._replace(data=federation.data._replace(x=x))


def relaid(federation: types.Federation, clients: Sequence[int] | None = None) -> types.Federation:
    """Return some clients (None: all) in floats, their rows in another order, amid garbage.

    The shapes are those of `federation`. All other examples and rows hold NaN, infinities and
    labels that are no class.
    """
    data = in_floats(federation).data
    parts = federations.parts_of(federation)
    clients = range(federation.num_clients) if clients is None else clients
    number = len(jax.tree.leaves(data)[0])
    free = np.setdiff1d(np.arange(number), [row for client in clients for row in parts[client]])

    def spoilt(leaf: Array) -> Array:
        is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
        garbage = np.array([np.nan, np.inf, -np.inf, 1e30] if is_float else [0, 99, -7, 1])
        changed = np.array(leaf)
        rows = np.resize(garbage, len(free)).astype(leaf.dtype)
        changed[free] = rows.reshape(-1, *[1] * (leaf.ndim - 1))
        return jnp.asarray(changed)

    rng, at = np.random.default_rng(1), 1
    order = rng.choice(free, len(federation.order)).astype(np.int32)
    start = np.zeros(federation.num_clients, np.int32)
    for client in rng.permutation(clients):
        start[client] = at
        order[at : at + len(parts[client])] = parts[client]
        at += len(parts[client]) + 1
    data = jax.tree.map(spoilt, data)
    return types.Federation(data, jnp.asarray(order), jnp.asarray(start), federation.size)


def schedule() -> types.Cohort:
    """Return six rounds of five slots: other orders, dropouts, delays, a round without clients."""
    who = [[0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [2, 0, 4, 3, 1]]
    who += [[1, 2, 4, 3, 0], [3, 4, 0, 2, 1], [0, 2, 1, 4, 3]]
    present = [[1, 1, 1, 0, 1], [1, 1, 0, 1, 0], [0, 0, 0, 0, 0]]
    present += [[0, 1, 1, 1, 1], [1, 1, 1, 0, 1], [1, 1, 1, 1, 1]]
    delay = np.array([0, 1, 2, 1, 0])[np.array(who)]
    delay[4] = 2
    return types.Cohort(
        jnp.asarray(who, jnp.int32), jnp.asarray(present, bool), jnp.asarray(delay, jnp.int32)
    )


def cohort(who: Sequence[int] | np.ndarray, present: Sequence[bool] | None = None) -> types.Cohort:
    """Return one round's cohort without delays, by default with everyone present."""
    there = jnp.ones(len(who), bool) if present is None else jnp.asarray(present, bool)
    return types.Cohort(jnp.asarray(who, jnp.int32), there, jnp.zeros(len(who), jnp.int32))


def _rearranged(schedule: types.Cohort) -> types.Cohort:
    """Return a schedule on the host with the slots of each round in another order."""
    rng, (length, slots) = np.random.default_rng(2), schedule.who.shape
    order = rng.permuted(np.tile(np.arange(slots), (length, 1)), axis=1)
    return jax.tree.map(lambda leaf: np.take_along_axis(leaf, order, 1), schedule)


def epochs(learning_rate: float | Array, *, batch_size: int = 3) -> types.Work:
    """Return two epochs in small batches, of which most are not full."""
    work = local.epochs(optax.sgd(learning_rate), batch_size=batch_size, num_epochs=2, momentum=0.0)
    return work._replace(learning_rate=learning_rate)


class _RefilledShard(NamedTuple):
    """A `Shard` whose batches are filled up with another example of the client, if so asked."""

    data: types.Examples
    order: Array
    start: Array
    size: Array
    who: Array
    is_refilled: Array  # [] bool

    def rows(self, positions: Array, mask: Array) -> Array:
        """Return the rows of examples, where the mask is false that of the last real one."""
        rows = types.Shard(*self[:5]).rows(positions, mask)
        last = jnp.where(mask, jnp.arange(len(mask)), 0).max()
        return jnp.where(self.is_refilled & ~mask, rows[last], rows)


def _refilled(algorithm: types.Algorithm, is_refilled: Array) -> types.Algorithm:
    """Return the algorithm whose clients see such shards, in the steps and in `local.fold`."""

    def refilled(exchange: types.Exchange) -> types.Exchange:
        def client(visit: types.Visit) -> types.Reply:
            shard: Any = _RefilledShard(*visit.shard, is_refilled)
            return exchange.client(visit._replace(shard=shard))

        return exchange._replace(client=client)

    return algorithm._replace(exchanges=tuple(map(refilled, algorithm.exchanges)))


# Comparisons, whose errors name the leaf that differs most.


def plain(tree: Tree) -> Tree:
    """Return a tree on the host, with random keys as numbers."""

    def leaf(a: Array) -> np.ndarray:
        is_key = hasattr(a, "dtype") and jnp.issubdtype(a.dtype, jax.dtypes.prng_key)
        return np.array(jax.random.key_data(a) if is_key else a)

    return jax.tree.map(leaf, tree)


def assert_equal(first: Tree, second: Tree) -> None:
    """Assert that two trees are equal bit for bit, except that 0 equals -0 and NaN equals NaN."""
    assert_close(first, second, rtol=0, atol=0)


def assert_close(first: Tree, second: Tree, *, rtol: float = 1e-4, atol: float = 2e-5) -> None:
    """Assert that two trees are equal up to sums taken in another order.

    In float32 rounding is a hundredth of the default tolerances, a broken law 20 to 6,000 times
    them. If a difference is hardly above them, the configuration magnifies rounding: by division by
    a small number (an epsilon of Adam or of a norm), or over many steps at a large rate. Tame it.
    """
    first, second = plain(first), plain(second)
    chex.assert_trees_all_equal_structs(first, second)
    worst, message = 0.0, ""
    leaves = jax.tree_util.tree_leaves_with_path(first)
    for (path, a), b in zip(leaves, jax.tree.leaves(second), strict=True):
        name = jax.tree_util.keystr(path) or "the array"
        assert a.shape == b.shape or not (a.ndim and b.ndim), f"{name}: {a.shape} and {b.shape}"
        with np.errstate(invalid="ignore", over="ignore"):
            a, b = (each.astype(float) for each in np.broadcast_arrays(a, b))
            same = np.isclose(a, b, rtol, atol, equal_nan=True)
            apart = np.where(same, 0, np.nan_to_num(np.abs(a - b), nan=np.inf))
        if apart.max(initial=0) > worst:
            worst = apart.max()
            at = np.unravel_index(apart.argmax(), apart.shape)
            message = f"{name} differs by {worst:.3g}: {a[at]:.6g} and {b[at]:.6g}"
    assert not message, message


def assert_finite(tree: Tree) -> None:
    """Assert that no leaf of a tree holds a NaN or an infinity; the error names the first."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(plain(tree)):
        assert np.isfinite(leaf).all(), f"{jax.tree_util.keystr(path)} holds a NaN or an infinity"


def largest_difference(first: Tree, second: Tree) -> float:
    """Return the largest difference of two numbers at the same place of two trees."""
    pairs = zip(*(jax.tree.leaves(plain(each)) for each in (first, second)), strict=True)
    apart = (np.abs(a.astype(float) - b.astype(float)).max(initial=0) for a, b in pairs)
    return float(max(apart, default=0.0))


# An algorithm, and the runs that the laws compare.


class NotApplicable(Exception):
    """A law says nothing about this algorithm, or cannot be checked here; the message says why."""


class Lane(NamedTuple):
    """One of the runs that are vmapped, on the host."""

    state: rounds.State
    numbers: dict[str, Any]  # of the factory and the local optimizer
    cohort: types.Cohort  # of a round; of a run [T, S]
    is_refilled: Any  # [] bool, whether another real example fills up batches


class Case:
    """An algorithm with its settings, and its runs, each of which is played once.

    There are few programs: the start of two seeds; a round of several runs (lanes), three clients
    at a time; outputs; a run on devices.

    Args:
      factory: called as factory(model, work, **hyperparameters).
      hyperparameters: floats among them, and among the factory's defaults, are also traced and
        halved.
      model: the network; by default a small one for images [6, 6, 1] of three classes.
      work: learning rate -> local training; by default two epochs of SGD in batches of three, or
        of five if the method needs domains, so that a batch holds two examples of two domains.
      learning_rate: the learning rate, large enough that six rounds move the network.
      data: at least 21 examples, of which the first are taken; by default such images.
    """

    def __init__(
        self,
        factory: Callable[..., types.Algorithm],
        hyperparameters: Mapping[str, Any] | None = None,
        *,
        model: types.Model | None = None,
        work: Callable[[Any], types.Work] | None = None,
        learning_rate: float = 0.1,
        data: types.Examples | None = None,
    ) -> None:
        self.factory = factory
        self.model = model or models.mlp(NUM_CLASSES, widths=(8,))
        self.hyperparameters = dict(hyperparameters or {})
        needs_domains = facts_of(factory).needs_domains
        if needs_domains:
            self.hyperparameters.setdefault("num_domains", NUM_DOMAINS)
        self.work = work or partial(epochs, batch_size=5 if needs_domains else 3)
        self.bytes = federation(data=data)
        self.federation = in_floats(self.bytes)
        self.schedule: types.Cohort = plain(schedule())
        parameters = inspect.signature(factory).parameters.items()
        settings = {name: parameter.default for name, parameter in parameters}
        settings |= self.hyperparameters
        numbers = {name: value for name, value in settings.items() if type(value) is float}
        self.numbers = {"learning_rate": float(learning_rate), **numbers}
        self.options = platforms.quickest_to_compile()

    def build(self, numbers: Mapping[str, Any]) -> types.Algorithm:
        """Return the algorithm with some of its numbers replaced."""
        given = {**self.hyperparameters, **self.numbers, **numbers}
        work = self.work(given.pop("learning_rate"))
        return self.factory(self.model, work, **given)

    @cached_property
    def algorithm(self) -> types.Algorithm:
        algorithm = self.build({})
        kind = type(algorithm).__name__
        assert isinstance(algorithm, types.Algorithm), f"the factory returns {kind}"
        return algorithm

    def moved(self, before: Tree, after: Tree) -> float:
        """Return how far apart two servers are: the networks that serve all, if there are such."""
        network = self.algorithm.network
        if network is not None and not self.algorithm.personal:
            before, after = network(before), network(after)
        return largest_difference(before, after)

    def _started(self, key: Array) -> rounds.State:
        zeros = jax.tree.map(lambda leaf: jnp.zeros_like(leaf[:1]), self.bytes.data.x)
        variables = self.model.init(key, zeros)
        before: Any = jax.tree.flatten(variables)
        state = rounds.init(self.algorithm, variables, self.federation, key, history=HISTORY)
        after: Any = jax.tree.flatten(variables)
        same = after[1] == before[1] and all(map(operator.is_, after[0], before[0]))
        assert same, "init_server changes its variables in place"
        return state

    def trace(self) -> tuple[list[str], list[Array]]:
        """Return the lines and the constants of a program of the start and a round."""
        algorithm = self.algorithm  # built outside of the trace

        def traced(cohort: types.Cohort, federation: types.Federation) -> Result:
            state = self._started(jax.random.key(0))
            # New functions, of which no earlier trace is stored.
            exchanges = [e._replace(client=partial(e.client)) for e in algorithm.exchanges]
            fresh = algorithm._replace(exchanges=tuple(exchanges))
            return rounds.step(fresh, state, cohort, federation, axis=devices.chunked(1))

        program = jax.make_jaxpr(traced)(tree.take(self.schedule, 0), self.federation)
        # Without the addresses of functions, in every trace another one.
        return re.sub(r" at 0x[0-9a-f]+", "", str(program)).splitlines(), program.consts

    @cached_property
    def traced(self) -> tuple[list[str], list[Array]]:
        return self.trace()

    @cached_property
    def _drawn(self) -> rounds.State:
        assert self.traced  # or its error: without a round there is no run

        start = jax.vmap(lambda seed: self._started(jax.random.key(seed)))
        return jax.jit(start, compiler_options=self.options)(np.arange(2))

    @cached_property
    def starts(self) -> list[rounds.State]:
        """The states before the first round of two seeds, on the host."""
        return [tree.take(plain(self._drawn), seed) for seed in range(2)]

    def restored(self, saved: rounds.State) -> rounds.State:
        """Return a state with random keys from a `plain` one."""

        def leaf(saved: Any, like: Array) -> Array:
            is_key = jnp.issubdtype(like.dtype, jax.dtypes.prng_key)
            return jax.random.wrap_key_data(saved) if is_key else saved

        return jax.tree.map(leaf, saved, self._drawn)

    @cached_property
    def lanes(self) -> dict[str, Lane]:
        """The run as it is, and runs that must equal it, or must not."""
        numbers, (who, there, delay) = self.numbers, self.schedule
        one = Lane(self.starts[0], numbers, self.schedule, np.bool_(False))
        others: Any = np.where(there, who, (who + 1) % NUM_CLIENTS).astype(np.int32)
        other_delays: Any = np.where(there, delay, (delay + 1) % HISTORY).astype(np.int32)
        undelayed: Any = np.zeros_like(delay)
        return {
            "as it is": one,
            "in other slots": one._replace(cohort=_rearranged(self.schedule)),
            "with others absent": one._replace(cohort=types.Cohort(others, there, other_delays)),
            "with batches filled otherwise": one._replace(is_refilled=np.bool_(True)),
            "without delays": one._replace(cohort=types.Cohort(who, there, undelayed)),
            "with another seed": one._replace(state=self.starts[1]),
            **{
                f"with half the {name}": one._replace(numbers={**numbers, name: value / 2})
                for name, value in self.numbers.items()
                if value and np.isfinite(value)  # 0 has no half
            },
        }

    @cached_property
    def traced_with_numbers(self) -> Any:
        """A round of all lanes, traced with all numbers."""

        def one(lane: Lane, t: Array, federation: types.Federation) -> Result:
            algorithm = _refilled(self.build(lane.numbers), lane.is_refilled)
            state = self.restored(lane.state)
            cohort = tree.take(lane.cohort, t)
            axis = devices.chunked(3)
            return rounds.step(algorithm, state, cohort, federation, axis=axis, drop_nonfinite=True)

        traced = jax.jit(jax.vmap(one, (0, None, None)))
        return traced.trace(_stacked(self.lanes.values()), np.int32(0), self.federation)

    @cached_property
    def _program(self) -> Any:
        return self.traced_with_numbers.lower().compile(compiler_options=self.options)

    def run(self, lanes: Mapping[str, Lane], *, first: int = 0) -> dict[str, list[Result]]:
        """Return the states after the rounds from `first` on, and the reports, for each lane."""
        results, now = [], _stacked(lanes.values())
        for t in range(first, len(self.schedule.who)):
            results.append(plain(self._program(now, np.int32(t), self.federation)))
            now = now._replace(state=results[-1][0])
        return {name: [tree.take(each, i) for each in results] for i, name in enumerate(lanes)}

    def one_round(
        self, state: rounds.State, cohort: types.Cohort, federation: types.Federation | None = None
    ) -> Result:
        """Play one round from a state."""
        always = _stacked([plain(cohort)] * len(self.schedule.who))
        lane = self.lanes["as it is"]._replace(state=state, cohort=always)
        now = _stacked([lane] * len(self.lanes))
        return tree.take(plain(self._program(now, np.int32(0), federation or self.federation)), 0)

    @cached_property
    def runs(self) -> dict[str, list[Result]]:
        """All lanes' runs."""
        return self.run(self.lanes)

    @cached_property
    def stops(self) -> list[rounds.State]:
        """The states of the run as it is before each round and after the last."""
        return [self.starts[0], *(state for state, _ in self.runs["as it is"])]

    def seen(self, name: str) -> Tree:
        """Return what is seen of one of the runs."""
        return seen(self.lanes[name].cohort, self.runs[name])

    def turns(self, *clients: int) -> dict[int, rounds.State]:
        """Return for each exchange the latest state of the run, in a round that a client attends.

        That is a following round, or one of the first rounds if only those have the exchange. The
        client is the first possible one; exchanges that none of them attends are left out.
        """
        found: dict[int, rounds.State] = {}
        for who, state in itertools.product(clients, reversed(self.stops)):
            now = int(state.round)
            for round in (*range(now, now + 2 * NUM_CLIENTS), *range(now)):
                started: Any = np.int32(round)
                for index, exchange in enumerate(self.algorithm.exchanges):
                    if index not in found and _attends(exchange, state.server, who, round):
                        found[index] = state._replace(round=started)
        if not found:
            raise NotApplicable("no such client ever attends an exchange")
        return found


def _stacked(trees: Iterable[Any]) -> Any:
    return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)


def _attends(exchange: types.Exchange, server: Tree, who: int, round: int) -> bool:
    client, now = (jnp.asarray(np.int32(each)) for each in (who, round))
    return bool(exchange.attends(server, client, now))


def seen(schedule: types.Cohort, results: Sequence[Result]) -> Tree:
    """Return the last state of a run, and its reports by client [C], zeros if absent.

    So it does not depend on the slots of the clients.
    """
    found = []
    for t, (_, reports) in enumerate(results):
        who, there, _ = tree.take(schedule, t)
        for metrics, present, finite, size, _ in reports:
            assert not present[~there].any(), "an empty slot is reported as present"
            assert finite[~there].all(), "an empty slot is reported as not finite"
            columns: dict[str, Any] = {"present": present, "finite": finite, "size": size}
            columns |= {name: np.where(present, metric, 0) for name, metric in metrics.items()}
            count = partial(np.bincount, who[there], minlength=NUM_CLIENTS)
            found.append({name: count(column[there]) for name, column in columns.items()})
    return {"state": results[-1][0], "reports": found}


# The laws. First those of traces, which compile next to nothing.


def a_round_can_be_traced(case: Case) -> None:
    """The factory returns an `Algorithm`, whose rounds are functions of arrays.

    No Python `if` depends on a value or on the round. The server and the clients' states keep
    their shapes and types; metrics are scalars. The first variables are not changed in place.
    """
    assert case.traced


def tracing_again_gives_the_same_program(case: Case) -> None:
    """No state hides in Python: no counter, no random generator outside of `visit.key`."""
    (lines, constants), (again, others) = case.traced, case.trace()
    for first, second in zip(lines, again, strict=False):
        assert first == second, f"a second trace has {second.strip()!r} for {first.strip()!r}"
    assert len(lines) == len(again), "a second trace has another number of operations"
    assert_equal({"constants": others}, {"constants": constants})


def numbers_may_be_traced(case: Case) -> None:
    """The learning rate and all float arguments may be tracers, so that runs share a program."""
    assert case.traced_with_numbers


def a_run_moves_everything_and_stays_finite(case: Case) -> None:
    """Six rounds change the server's network and the clients' states, and all numbers are finite.

    Else no other law could be broken. Without a single network for all clients, some number of the
    server must change.
    """
    start, state = case.starts[0], case.stops[-1]
    moved = case.moved(start.server, state.server)
    assert moved > 1e-2, f"the server hardly moves, by {moved:.3g}"
    if jax.tree.leaves(start.clients):
        moved = largest_difference(start.clients, state.clients)
        assert moved > 1e-3, f"the clients' states hardly move, by {moved:.3g}"
    reports = [reports for _, reports in case.runs["as it is"]]
    assert_finite((state, [report.metrics for each in reports for report in each]))


def clients_take_part_if_scheduled_with_examples_and_attending(case: Case) -> None:
    """Those clients that are scheduled, have examples and attend are reported as present."""
    attended = np.zeros(len(case.algorithm.exchanges), bool)
    for t, (_, reports) in enumerate(case.runs["as it is"]):
        who, present, _ = tree.take(case.schedule, t)
        for index, report in enumerate(reports):
            # By the server before the round: no first exchange decides who attends the second.
            exchange = case.algorithm.exchanges[index]
            attends = [_attends(exchange, case.stops[t].server, client, t) for client in who]
            expected = present & (who != NO_EXAMPLE) & attends
            attended[index] |= expected.any()
            found, must = (sorted(who[each].tolist()) for each in (report.present, expected))
            text = f"in exchange {index} of round {t} clients {found} take part, must be {must}"
            assert found == must, text
            assert (report.size == np.array(SIZES)[who]).all(), "sizes of clients are wrong"
    assert attended.all(), f"nobody attends exchange {attended.argmin()}"


def a_round_without_examples_changes_nothing(case: Case) -> None:
    """If all slots are empty, or no client has an example, server and clients stay as they are."""
    who = [4, 3, 1, 2, 0]
    # In rounds that such a client attends, if there are any, so that its lack is the reason.
    turns = case.turns(NO_EXAMPLE, *range(NUM_CLIENTS))
    for before, present in itertools.product(turns.values(), ([], [NO_EXAMPLE])):
        after, reports = case.one_round(before, cohort(who, [each in present for each in who]))
        for name in ("server", "clients"):
            assert_equal({name: getattr(after, name)}, {name: getattr(before, name)})
        assert_equal(after.round, before.round + 1)
        assert not any(report.present.any() for report in reports), "a client is reported"


def a_client_of_one_example_gives_no_nan(case: Case) -> None:
    """A round of a single client with a single example changes the server and gives no NaN."""
    who = [0, NO_EXAMPLE, ONE_EXAMPLE, 3, 4]
    some = cohort(who, [client in (NO_EXAMPLE, ONE_EXAMPLE) for client in who])
    for index, before in case.turns(ONE_EXAMPLE).items():
        state, reports = case.one_round(before, some)
        assert_equal(reports[index].present, np.array(who) == ONE_EXAMPLE)
        assert case.moved(before.server, state.server) > 0, "the server stays as it is"
        assert_finite(state)


def a_client_that_uploads_nan_is_reported_and_treated_as_absent(case: Case) -> None:
    """NaN in a client's examples reach its report and nobody else."""
    who = np.array([4, POISONED, 0, 2, 1], np.int32)
    data = case.federation.data
    if not all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in jax.tree.leaves(data.x)):
        raise NotApplicable("not all inputs are floating-point numbers, which can be NaN")
    rows = federations.parts_of(case.federation)[POISONED]
    x = jax.tree.map(lambda leaf: leaf.at[rows].set(np.nan), data.x)
    poisoned = case.federation._replace(data=data._replace(x=x))
    for index, before in case.turns(POISONED).items():
        got, reports = case.one_round(before, cohort(who), poisoned)
        expected, without = case.one_round(before, cohort(who, who != POISONED))
        assert_close(got, expected)
        assert_equal(reports[index].finite, who != POISONED)
        assert_equal([each.present for each in reports], [each.present for each in without])


def absent_clients_change_nothing(case: Case) -> None:
    """An absent client keeps its state, and the server never sees who is absent, nor its delay."""
    for t, (after, reports) in enumerate(case.runs["as it is"]):
        before = case.stops[t]
        took_part = {int(who) for each in reports for who in case.schedule.who[t][each.present]}
        absent: Any = sorted({*range(NUM_CLIENTS)} - took_part)
        assert_equal(tree.take(after.clients, absent), tree.take(before.clients, absent))
    assert_close(case.seen("with others absent"), case.seen("as it is"))


def what_fills_a_batch_does_not_matter(case: Case) -> None:
    """Only examples under a batch's mask count: others repeat an example to fill the batch."""
    assert_close(case.seen("with batches filled otherwise"), case.seen("as it is"))


def the_order_of_slots_does_not_matter(case: Case) -> None:
    """A round is the same, whichever slots its clients are in."""
    assert_close(case.seen("in other slots"), case.seen("as it is"))


def delays_seeds_and_numbers_matter(case: Case) -> None:
    """A run without delays, of another seed or with half of a number is another one.

    Delayed clients work on older messages. The numbers are the learning rate and the floats, given
    or by default: a term that is always 0 here, whose weight does nothing, was not checked at all.
    """
    names = list(case.runs)
    for name in names[names.index("without delays") :]:
        first, second = (case.runs[each][-1][0] for each in (name, "as it is"))
        moved = largest_difference(first.server, second.server)
        # The numbers of a personal algorithm may act on the clients alone.
        if case.algorithm.personal and name != "without delays":
            moved = max(moved, largest_difference(first.clients, second.clients))
        text = f"the run {name} is the same (they differ by {moved:.3g})"
        if name.startswith("with half"):
            text += "; check it with hyperparameters with which it acts"
        assert moved > 1e-4, text


def runs_do_not_affect_each_other(case: Case) -> None:
    """Runs of other seeds and numbers share a program, and each is as if alone."""
    names = list(case.lanes)
    # Each run on the lane of another run, so that its changes are on another lane.
    turned = case.run({name: case.lanes[name] for name in names[1:] + names[:1]})
    for name, lane in case.lanes.items():
        assert_close(seen(lane.cohort, turned[name]), case.seen(name))


def stop_and_resume_is_bit_identical(case: Case) -> None:
    """All that a run carries is in its state: one that goes on from a checkpoint is the same."""
    stopped = {
        name: lane._replace(state=case.runs[name][_HALF - 1][0])
        for name, lane in case.lanes.items()
    }
    resumed = case.run(stopped, first=_HALF)
    assert_equal(resumed, {name: results[_HALF:] for name, results in case.runs.items()})


def outputs_are_of_one_example_and_of_the_network(case: Case) -> None:
    """`predict` gives an example the same outputs alone as among others, and they are finite.

    For a client that was never seen they are those of `models.predict` of `Algorithm.network`,
    unless there is none, or the algorithm says that it has `own_outputs`.
    """
    algorithm = case.algorithm
    x = case.federation.data.x
    network = None if algorithm.own_outputs else algorithm.network

    def of(saved: rounds.State) -> list[Array]:
        state, own, new = case.restored(saved), (), ()
        if algorithm.personal:
            own = tree.take(state.clients, 0)
            new = algorithm.init_client(state.server, jnp.int32(0))
        cuts = slice(1), slice(1, None)
        parts = (jax.tree.map(lambda leaf, cut=cut: leaf[cut], x) for cut in cuts)
        apart = [algorithm.predict(state.server, own, part) for part in parts]
        found = [algorithm.predict(state.server, own, x), jnp.concatenate(apart)]
        if network is not None:
            found.append(algorithm.predict(state.server, new, x))
            found.append(models.predict(case.model, network(state.server), x))
        return found

    together, apart, *pair = plain(jax.jit(of, compiler_options=case.options)(case.stops[-1]))
    assert_finite({"predict": together})
    assert_close({"predict": together}, {"predict": apart})
    if pair:
        assert_close({"a new client's predict": pair[0]}, {"a new client's predict": pair[1]})


def a_round_needs_the_examples_of_its_clients_alone(case: Case) -> None:
    """Examples of others need not be there or may be NaN, and rows may lie in any order."""
    state, results = case.starts[0], []
    for t in range(len(case.schedule.who)):
        now = tree.take(case.schedule, t)
        some = relaid(case.federation, now.who[now.present])
        state, reports = case.one_round(state, now, some)
        results.append((state, reports))
    assert_close(seen(case.schedule, results), case.seen("as it is"))


def devices_chunks_and_empty_slots_do_not_matter(case: Case) -> None:
    """A run on devices that own the clients is the same, also with empty slots.

    Each device has the states of its own clients alone, which it does not share evenly, and trains
    one client at a time.
    """
    number = min(4, len(jax.devices("cpu")))
    if number == 1:
        raise NotApplicable("there is one device; jax_num_cpu_devices=4 makes several of a CPU")
    mesh: Any = devices.mesh((1, number), jax.devices("cpu"))
    axis = devices.owned(devices.CLIENTS, devices.chunked(1))
    whole: Any = PartitionSpec()
    lies = rounds.State(whole, PartitionSpec(devices.CLIENTS), whole, whole, whole)
    run = partial(rounds.run, case.algorithm, axis=axis, drop_nonfinite=True)
    play = devices.over(mesh, run, (lies, whole, whole), (lies, whole))
    room = number * devices.clients_per_device(NUM_CLIENTS, number)
    start = case.starts[0]
    clients = jax.tree.map(lambda leaf: np.resize(leaf, (room, *leaf.shape[1:])), start.clients)
    # Two more slots, both empty, that name clients who may attend.
    empty = types.Cohort(*np.array([[3, 0], [0, 0], [0, 0]]))

    def longer(leaf: np.ndarray, more: np.ndarray) -> np.ndarray:
        return np.hstack([leaf, np.tile(more.astype(leaf.dtype), (len(leaf), 1))])

    slots = _rearranged(jax.tree.map(longer, case.schedule, empty))
    program = jax.jit(play, compiler_options=case.options)
    state, reports = plain(
        program(case.restored(start._replace(clients=clients)), slots, case.federation)
    )
    clients = jax.tree.map(lambda leaf: leaf[:NUM_CLIENTS], state.clients)
    state = state._replace(clients=clients)
    results = [(state, tree.take(reports, t)) for t in range(len(slots.who))]
    assert_close(seen(slots, results), case.seen("as it is"), rtol=1e-5, atol=1e-5)


def inputs_of_8_bits_are_those_in_floats(case: Case) -> None:
    """A run on 8-bit images is the run on the same images as floats in [0, 1]."""
    if not any(leaf.dtype == jnp.uint8 for leaf in jax.tree.leaves(case.bytes.data.x)):
        raise NotApplicable("the inputs are not of 8 bits")
    run = partial(rounds.run, case.algorithm, axis=devices.chunked(1), drop_nonfinite=True)
    program = jax.jit(run, compiler_options=case.options)
    state, reports = plain(program(case.restored(case.starts[0]), case.schedule, case.bytes))
    results = [(state, tree.take(reports, t)) for t in range(len(case.schedule.who))]
    try:
        assert_close(seen(case.schedule, results), case.seen("as it is"), rtol=1e-3, atol=1e-4)
    except AssertionError as error:
        text = "uint8 inputs train otherwise than the same in [0, 1]: batch.x is as it is stored, "
        text += "models.unit_range(model.preprocess(batch.x)) is in floats"
        raise AssertionError(f"{text}; {error}") from None


# All laws, by name and in this order: an error in one explains those of later ones.
LAWS: Mapping[str, Callable[[Case], None]] = {
    name: law
    for name, law in list(globals().items())
    if inspect.isfunction(law) and [*inspect.signature(law).parameters] == ["case"]
}


def check(
    factory: Callable[..., types.Algorithm],
    hyperparameters: Mapping[str, Any] | None = None,
    *,
    laws: Iterable[str] = tuple(LAWS),
    **settings: Any,
) -> None:
    """Check the laws of the protocol for an algorithm, and print a line for each.

    All runs are on the CPU, with five clients of 0 to 7 examples, two of which are always or often
    absent, and six rounds. Nearly all of the time is that of compiling.

    Args:
      factory: the algorithm's, called as factory(model, work, ...).
      hyperparameters: as in `Case`.
      laws: the names of the laws to check; by default all of `LAWS`.
      **settings: model, work, learning_rate and data, as in `Case`.

    Raises:
      AssertionError: that names each broken law and why, a line each.
    """
    broken: dict[str, str] = {}  # why -> the law's words
    with jax.default_device(jax.devices("cpu")[0]), platforms.traced_for("cpu"):
        case = Case(factory, hyperparameters, **settings)
        for name in laws:
            words, result = name.replace("_", " "), "held"
            try:
                LAWS[name](case)
            except NotApplicable as reason:
                result = f"not applicable: {reason}"
            except Exception as error:
                why = _line(error)
                cause = broken.get(why)
                result = f"not checked, as {cause} is broken" if cause else f"broken, {why}"
                broken.setdefault(why, words)
            print(f"{words}: {result}", flush=True)
    if broken:
        lines = [f"{words}: {why}" for why, words in broken.items()]
        raise AssertionError("\n".join([f"{len(lines)} of the laws are broken", *lines]))


def _line(error: Exception) -> str:
    """Return an error in one line, with the last place outside of this package and JAX."""
    text = checks.one_line(error)
    own = str(Path(__file__).parent)
    if isinstance(error, AssertionError):
        return text
    frames = reversed(traceback.extract_tb(error.__traceback__))
    outside = (
        f for f in frames if not f.filename.startswith(own) and "site-packages" not in f.filename
    )
    place = next((f" ({Path(f.filename).name}:{f.lineno})" for f in outside), "")
    return f"{type(error).__name__}: {text}{place}"


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 4)  # on any machine, for the law of devices
    module, _, name = sys.argv[1].partition(":")
    try:
        check(getattr(importlib.import_module(module), name))
    except AssertionError as error:
        sys.exit(f"\n{error}")
