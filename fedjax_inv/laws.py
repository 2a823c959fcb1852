"""The laws that every algorithm must obey: `check(factory)` checks them and returns a report.

A law is a function of a `Case`, which raises an AssertionError if the algorithm breaks it.

    from fedjax_inv import laws

    report = laws.check(my_factory, hyperparameters={"penalty": 0.1})
    report.raise_if_broken()

From the command line: python -m fedjax_inv.laws package.module:factory [name=value ...]
"""

import ast
import contextlib
import hashlib
import importlib
import inspect
import itertools
import operator
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from fedjax_inv import checks, devices, local, models, platforms, rounds, tree
from fedjax_inv.checks import UsageError
from fedjax_inv.data import federation as federations
from fedjax_inv.types import (
    Algorithm,
    Array,
    Batch,
    Cohort,
    Examples,
    Exchange,
    Federation,
    Model,
    Reply,
    Shard,
    Tree,
    Variables,
    Visit,
    Work,
)

Result = tuple[rounds.State, tuple[rounds.Report, ...]]

# A tiny federation, its schedule, a network and local training.

NUM_CLASSES = 3
IMAGE = (6, 6, 1)
SIZES = (4, 0, 1, 7, 5)
NUM_CLIENTS = len(SIZES)
NO_EXAMPLE, ONE_EXAMPLE, POISONED = 1, 2, 3  # clients
HISTORY = 3  # broadcasts kept, as the longest delay is two rounds
_FREE = 4  # examples that no client has
_HALF = 3  # rounds, after which a run is resumed


def federation(
    sizes: Sequence[int] = SIZES, *, seed: int = 0, data: Examples | None = None
) -> Federation:
    """Return clients of these sizes, by default with 8-bit images of three classes.

    The brightness of an image depends on its class. No client has the last four examples, nor the
    last 8 rows of the order.

    Args:
      sizes: examples of each client.
      seed: the seed of the draw.
      data: other examples, at least sum(sizes) + 4, of which the first are taken.

    Raises:
      UsageError: for fewer examples.
    """
    rng, number = np.random.default_rng(seed), sum(sizes) + _FREE
    if data is None:
        y = rng.integers(0, NUM_CLASSES, number)
        x = rng.integers(0, 120, (number, *IMAGE)) + 60 * y[:, None, None, None]
        data = federations.examples(x.astype(np.uint8), y.astype(np.int32))
    if min(len(leaf) for leaf in jax.tree.leaves(data)) < number:
        raise UsageError("data", ..., f"must hold at least {number} examples")
    data = jax.tree.map(lambda leaf: jnp.asarray(leaf)[:number], data)
    parts = np.split(rng.permutation(sum(sizes)), np.cumsum(sizes)[:-1])
    split = federations.of_parts(data, parts)
    return split._replace(order=jnp.concatenate([split.order, jnp.zeros(8, jnp.int32)]))


def in_floats(federation: Federation) -> Federation:
    """Return the federation with 8-bit inputs in floating point, which can hold a NaN."""

    def leaf(x: Array) -> Array:
        return x.astype(jnp.float32) / 255 if x.dtype == jnp.uint8 else x

    x = jax.tree.map(leaf, federation.data.x)
    return federation._replace(data=federation.data._replace(x=x))


def relaid(federation: Federation) -> Federation:
    """Return the same clients in floats, with their rows in another order of clients, amid garbage.

    The shapes are those of `federation`. Examples and rows of no client hold NaN, infinities and
    labels that are no class.
    """
    federation = in_floats(federation)
    number = len(jax.tree.leaves(federation.data)[0])
    free = number - _FREE + np.arange(_FREE)
    rng = np.random.default_rng(1)
    order = rng.choice(free, len(federation.order)).astype(np.int32)
    start = np.zeros(federation.num_clients, np.int32)
    parts, at = federations.parts_of(federation), 1
    for client in rng.permutation(federation.num_clients):
        start[client] = at
        order[at : at + len(parts[client])] = parts[client]
        at += len(parts[client]) + 1
    data = jax.tree.map(lambda leaf: _spoilt(leaf, free), federation.data)
    return Federation(data, jnp.asarray(order), jnp.asarray(start), federation.size)


def _spoilt(leaf: Array, rows: np.ndarray) -> Array:
    """Return examples with NaN, infinities and labels that are no class in some rows."""
    is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
    garbage = np.array([np.nan, np.inf, -np.inf, 1e30] if is_float else [0, 99, -7, 1])
    changed = np.array(leaf)
    changed[rows] = (
        np.resize(garbage, len(rows)).astype(leaf.dtype).reshape(-1, *[1] * (leaf.ndim - 1))
    )
    return jnp.asarray(changed)


def _of_clients(federation: Federation, who: np.ndarray) -> Federation:
    """Return the federation with garbage in the examples of all clients but some."""
    parts = federations.parts_of(federation)
    others = np.concatenate([[], *(parts[c] for c in {*range(NUM_CLIENTS)} - {*who.tolist()})])
    return federation._replace(
        data=jax.tree.map(lambda leaf: _spoilt(leaf, others.astype(int)), federation.data)
    )


def schedule() -> Cohort:
    """Return six rounds of five slots: other orders, dropouts, delays, a round without clients."""
    who = [[0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [2, 0, 4, 3, 1]]
    who += [[1, 2, 4, 3, 0], [3, 4, 0, 2, 1], [0, 2, 1, 4, 3]]
    present = [[1, 1, 1, 0, 1], [1, 1, 0, 1, 0], [0, 0, 0, 0, 0]]
    present += [[0, 1, 1, 1, 1], [1, 1, 1, 0, 1], [1, 1, 1, 1, 1]]
    delay = np.array([0, 1, 2, 1, 0])[np.array(who)]
    delay[4] = 2
    return Cohort(
        jnp.asarray(who, jnp.int32), jnp.asarray(present, bool), jnp.asarray(delay, jnp.int32)
    )


def cohort(who: Sequence[int] | np.ndarray, present: Sequence[bool] | None = None) -> Cohort:
    """Return one round's cohort without delays, by default with everyone present."""
    there = jnp.ones(len(who), bool) if present is None else jnp.asarray(present, bool)
    return Cohort(jnp.asarray(who, jnp.int32), there, jnp.zeros(len(who), jnp.int32))


def _rearranged(schedule: Cohort, seed: int) -> Cohort:
    """Return a schedule on the host with the slots of each round in another order."""
    rng, (length, slots) = np.random.default_rng(seed), schedule.who.shape
    order = rng.permuted(np.tile(np.arange(slots), (length, 1)), axis=1)
    return jax.tree.map(lambda leaf: np.take_along_axis(leaf, order, 1), schedule)


def _with_empty_slots(schedule: Cohort) -> Cohort:
    """Return a schedule with two more slots, both empty: they name clients who may attend."""
    tail: Any = [np.tile(np.array(pair), (len(schedule.who), 1)) for pair in ([3, 0], [0, 0])]
    empty = Cohort(tail[0].astype(np.int32), tail[1].astype(bool), tail[1].astype(np.int32))
    both = jax.tree.map(lambda leaf, more: np.concatenate([leaf, more], 1), schedule, empty)
    return _rearranged(both, 3)


def _with_others_absent(schedule: Cohort) -> Cohort:
    """Return a schedule whose absent slots name other clients, with other delays."""
    who, present, delay = schedule
    others: Any = np.where(present, who, (who + 1) % NUM_CLIENTS).astype(np.int32)
    other_delays: Any = np.where(present, delay, (delay + 1) % HISTORY).astype(np.int32)
    return schedule._replace(who=others, delay=other_delays)


class NormedHidden(nn.Module):
    """Dense, batch normalisation, tanh."""

    width: int

    @nn.compact
    def __call__(self, x: Array, mask: Array, train: bool) -> Array:
        # Without a bias, which the norm would take away again.
        x = nn.Dense(self.width, use_bias=False)(x.reshape(x.shape[0], -1))
        # A large epsilon, so that rounding is not magnified.
        return jnp.tanh(models.BatchNorm(epsilon=0.1)(x, mask, train))


class NormedLinear(nn.Module):
    """Batch normalisation, then an affine map."""

    width: int

    @nn.compact
    def __call__(self, x: Array, mask: Array, train: bool) -> Array:
        return nn.Dense(self.width)(models.BatchNorm(epsilon=0.1)(x, mask, train))


def network() -> Model:
    """Return the smallest network with statistics in both halves."""
    return models.from_blocks([NormedHidden(4), NormedLinear(NUM_CLASSES)], 1)


def epochs(learning_rate: float | Array) -> Work:
    """Return two epochs in batches of three, of which most are not full."""
    work = local.epochs(optax.sgd(learning_rate), batch_size=3, num_epochs=2, momentum=0.0)
    return work._replace(learning_rate=learning_rate)


@contextlib.contextmanager
def _filled_otherwise(otherwise: Array) -> Iterator[None]:
    """Fill up the batches that are traced within with another real example of the client.

    These are all that `local.take_batch` makes: of the steps, and of `local.fold` and the like.

    Args:
      otherwise: [] bool; if false, batches are as they were.
    """
    take = local.take_batch

    def taken(shard: Shard, positions: Array, mask: Array) -> Batch:
        batch = take(shard, positions, mask)
        row = jnp.where(otherwise & ~mask, jnp.argmax(mask), jnp.arange(mask.shape[0]))
        x, y = jax.tree.map(lambda leaf: leaf[row], (batch.x, batch.y))
        return Batch(x, y, mask)

    local.take_batch = taken
    try:
        yield
    finally:
        local.take_batch = take


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

    In float32 the runs of this package's algorithms differ by rounding of 1e-9 to 4e-7 on the small
    federation of `check`, a hundredth of the default tolerances. A broken law (an ignored delay,
    another seed, a halved number) causes differences of 20 to 6,000 times the tolerances. If the
    difference is hardly above them, the configuration magnifies rounding: by division by a small
    number (an epsilon of Adam or of a norm), or over many steps at a large rate. Tame it.

    Raises:
      AssertionError: if they differ; it names the leaf that differs most, and by how much.
    """
    first, second = plain(first), plain(second)
    structures: list[Any] = [jax.tree.structure(each) for each in (first, second)]
    assert structures[0] == structures[1], f"the trees differ: {structures[0]} and {structures[1]}"
    worst, message = -1.0, ""
    leaves = jax.tree_util.tree_leaves_with_path(first)
    for (path, a), b in zip(leaves, jax.tree.leaves(second), strict=True):
        name = jax.tree_util.keystr(path) or "the array"
        if a.shape != b.shape and a.ndim and b.ndim:
            raise AssertionError(f"{name} has shapes {a.shape} and {b.shape}")
        with np.errstate(invalid="ignore", over="ignore"):
            a, b = (each.astype(float) for each in np.broadcast_arrays(a, b))
            same = np.isclose(a, b, rtol, atol, equal_nan=True)
            apart = np.where(same, 0, np.nan_to_num(np.abs(a - b), nan=np.inf))
        if not same.all() and apart.max() > worst:
            worst, at = apart.max(), np.unravel_index(apart.argmax(), apart.shape)
            message = (
                f"{name} differs by {worst:.3g} in {(~same).sum()} of {same.size} numbers: "
                f"{a[at]:.6g} and {b[at]:.6g}"
            )
    if message:
        allowed = f" (allowed: {atol:g} + {rtol:g} of the value)" if rtol or atol else ""
        raise AssertionError(message + allowed)


def assert_finite(tree: Tree) -> None:
    """Assert that no leaf of a tree holds a NaN or an infinity; the error names the first."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(plain(tree)):
        assert np.isfinite(leaf).all(), f"{jax.tree_util.keystr(path)} holds a NaN or an infinity"


def largest_difference(first: Tree, second: Tree) -> float:
    """Return the largest difference of two numbers at the same place of two trees."""
    apart = jax.tree.map(
        lambda a, b: np.abs(a.astype(float) - b.astype(float)).max(initial=0),
        plain(first),
        plain(second),
    )
    return max(map(float, jax.tree.leaves(apart)), default=0.0)


# A configuration of an algorithm.


class NotApplicable(Exception):
    """A law says nothing about this algorithm, or cannot be checked here; the message says why."""


class Lane(NamedTuple):
    """One of the runs that are vmapped."""

    state: rounds.State
    numbers: dict[str, Any]  # of the factory and the local optimizer
    cohort: Cohort  # of a round; of a run [T, S]
    filled_otherwise: Any  # [] bool, whether another real example fills up batches


class Trace(NamedTuple):
    """What a trace of the start and a round shows."""

    program: str
    uploads: tuple[Tree, ...]  # shapes, of each exchange
    changed: list[str]  # the arguments that were changed in place


class Case:
    """One configuration of an algorithm, its programs, and the results that the laws share.

    Compiling takes nearly all of the time, so there are few programs: the start of two seeds; a
    round of several runs (lanes), three clients at a time; outputs; a run on devices.

    Attributes:
      name: the factory's name.
      bytes: the clients and their examples; images have 8 bits.
      federation: the same in floating point.
      schedule: six rounds on the host.
      numbers: the learning rate and the factory's numbers, by name.
      defaults: the numbers that the factory has by default.
      options: of the compiler.
    """

    def __init__(
        self,
        factory: Callable[..., Algorithm],
        *,
        hyperparameters: Mapping[str, Any] | None = None,
        model: Model | None = None,
        work: Callable[[Any], Work] = epochs,
        learning_rate: float = 0.1,
        data: Examples | None = None,
    ) -> None:
        """Store a configuration.

        Args:
          factory: called as factory(model, work, **hyperparameters).
          hyperparameters: floats among them are also traced and halved. Those that are floats by
            default are also traced.
          model: the network; by default a small one with batch normalisation for images [6, 6, 1]
            of three classes.
          work: learning rate -> local training; by default two epochs of SGD in batches of three.
          learning_rate: the learning rate, large enough that six rounds move the network.
          data: at least 21 examples, of which the first are taken; by default images [6, 6, 1] of
            three classes.
        """
        self.hyperparameters = dict(hyperparameters or {})
        self._as_given = jax.tree.flatten(self.hyperparameters)
        self.factory, self.work = factory, work
        self.model = network() if model is None else model
        module, name = (getattr(factory, part, "") for part in ("__module__", "__qualname__"))
        self.name = f"{module}.{name}" if name else repr(factory)
        self.bytes = federation(data=data)
        self.federation = in_floats(self.bytes)
        self.schedule: Cohort = plain(schedule())
        given = {key: value for key, value in self.hyperparameters.items() if type(value) is float}
        self.numbers = {"learning_rate": float(learning_rate), **given}
        parameters = inspect.signature(factory).parameters.items()
        self.defaults = {k: each.default for k, each in parameters if type(each.default) is float}
        self.options = platforms.quickest_to_compile()

    def build(self, numbers: Mapping[str, Any]) -> Algorithm:
        """Return the algorithm with some of its numbers replaced."""
        work = self.work({**self.numbers, **numbers}["learning_rate"])
        given = {key: value for key, value in numbers.items() if key != "learning_rate"}
        return self.factory(self.model, work, **{**self.hyperparameters, **given})

    @cached_property
    def algorithm(self) -> Algorithm:
        """The algorithm."""
        algorithm = self.build({})
        checks.record("the result of the factory", algorithm, Algorithm)
        return algorithm

    def moved(self, before: Tree, after: Tree) -> float:
        """Return how far two servers' networks are apart.

        Without a single network that serves all clients: how far the servers are apart.
        """
        network = self.algorithm.network
        if network is not None and not self.algorithm.personal:
            before, after = network(before), network(after)
        return largest_difference(before, after)

    def _variables(self, key: Array) -> Variables:
        x = self.bytes.data.x
        return self.model.init(key, jax.tree.map(lambda leaf: jnp.zeros_like(leaf[:1]), x))

    def _started(self, variables: Variables, key: Array) -> rounds.State:
        return rounds.init(self.algorithm, variables, self.federation, key, history=HISTORY)

    def trace(self) -> Trace:
        """Trace the start and a round of a run, which compiles nothing."""
        key, changed = jax.random.key(0), []
        uploads: dict[int, Tree] = {}

        def watched(index: int, exchange: Exchange) -> Exchange:
            def client(visit: Visit) -> Reply:
                reply = exchange.client(visit)
                uploads[index] = jax.tree.map(jax.typeof, reply.upload)
                return reply

            return exchange._replace(client=client)

        def traced(variables: Variables, cohort: Cohort, federation: Federation) -> Result:
            was: list[Any] = [self._as_given, jax.tree.flatten(variables)]
            state = self._started(variables, key)
            was.append(jax.tree.flatten(state))
            exchanges = tuple(watched(*each) for each in enumerate(self.algorithm.exchanges))
            algorithm = self.algorithm._replace(exchanges=exchanges)
            result = rounds.step(algorithm, state, cohort, federation, axis=devices.chunked(1))
            # The arguments as the algorithm got them, whose containers it could change.
            names = ("hyperparameters", "variables", "state")
            given = (self.hyperparameters, variables, state)
            for name, now, (leaves, structure) in zip(names, given, was, strict=True):
                new: Any = jax.tree.flatten(now)
                if new[1] != structure or any(map(operator.is_not, leaves, new[0])):
                    changed.append(name)
            return result

        drawn = jax.eval_shape(self._variables, key)
        program = jax.make_jaxpr(traced)(drawn, tree.take(self.schedule, 0), self.federation)
        addresses = re.compile(r" at 0x[0-9a-f]+")  # of functions, in every trace another one
        text = "\n".join([addresses.sub("", str(program)), *map(_digest, _constants(program))])
        return Trace(text, tuple(uploads[index] for index in sorted(uploads)), changed)

    @cached_property
    def traced(self) -> Trace:
        """A trace of the start and a round."""
        return self.trace()

    # Lanes: runs that share a program.

    @cached_property
    def _drawn(self) -> rounds.State:
        assert self.traced  # or its error: without a round there is no run

        def start(seed: Array) -> rounds.State:
            key = jax.random.key(seed)
            return self._started(self._variables(key), key)

        return jax.jit(jax.vmap(start), compiler_options=self.options)(np.arange(2))

    @cached_property
    def start(self) -> rounds.State:
        """The state before the first round, on the host."""
        return tree.take(plain(self._drawn), 0)

    def restored(self, saved: rounds.State) -> rounds.State:
        """Return a state, or several stacked ones, on the device, from `plain` ones."""

        def leaf(saved: Any, like: Array) -> Array:
            is_key = jnp.issubdtype(like.dtype, jax.dtypes.prng_key)
            return jax.random.wrap_key_data(saved) if is_key else jnp.array(saved)

        return jax.tree.map(leaf, saved, self._drawn)

    @cached_property
    def lanes(self) -> dict[str, Lane]:
        """The run as it is, and runs that must equal it, or must not."""
        numbers = {**self.defaults, **self.numbers}
        one = Lane(self.start, numbers, self.schedule, np.bool_(False))
        undelayed: Any = np.zeros_like(self.schedule.delay)
        halves = {
            name: one._replace(numbers={**numbers, name: value / 2})
            for name, value in self.numbers.items()
            if value / 2 != value  # 0 has no half
        }
        return {
            "as it is": one,
            "other order": one._replace(cohort=_rearranged(self.schedule, 2)),
            "others absent": one._replace(cohort=_with_others_absent(self.schedule)),
            "filled otherwise": one._replace(filled_otherwise=np.bool_(True)),
            "undelayed": one._replace(cohort=self.schedule._replace(delay=undelayed)),
            "other seed": one._replace(state=tree.take(plain(self._drawn), 1)),
            **halves,
        }

    def _traced_lanes(self, build: Callable[[dict[str, Any]], Algorithm]) -> Any:
        def one(lane: Lane, federation: Federation) -> Result:
            algorithm, axis = build(lane.numbers), devices.chunked(3)
            with _filled_otherwise(lane.filled_otherwise):
                return rounds.step(
                    algorithm, lane.state, lane.cohort, federation, axis=axis, drop_nonfinite=True
                )

        lanes = self._stacked(self.lanes.values(), 0)
        return jax.jit(jax.vmap(one, (0, None))).trace(lanes, self.federation)

    @cached_property
    def traced_with_numbers(self) -> Any:
        """A round of all lanes, traced with all numbers, those by default, too."""
        return self._traced_lanes(self.build)

    @cached_property
    def program(self) -> Any:
        """A round of as many runs as there are lanes, compiled once."""
        try:
            traced = self.traced_with_numbers
        except Exception:  # another law tells it
            traced = self._traced_lanes(lambda numbers: self.algorithm)
        return traced.lower().compile(compiler_options=self.options)

    def _stacked(self, lanes: Iterable[Lane], round: int) -> Lane:
        """Return lanes on the device with their cohort of one round."""
        now = [lane._replace(cohort=tree.take(lane.cohort, round)) for lane in lanes]
        together = jax.tree.map(lambda *leaves: jnp.asarray(np.stack(leaves)), *now)
        return together._replace(state=self.restored(together.state))

    def run(
        self,
        lanes: Mapping[str, Lane],
        *,
        first: int = 0,
        federation: Federation | None = None,
    ) -> dict[str, list[Result]]:
        """Play the rounds from the round `first` on of as many runs as there are lanes."""
        results, state = [], None
        for t in range(first, len(self.schedule.who)):
            now = self._stacked(lanes.values(), t)
            now = now if state is None else now._replace(state=state)
            state, reports = self.program(now, federation or self.federation)
            results.append(plain((state, reports)))
        return {name: [tree.take(each, i) for each in results] for i, name in enumerate(lanes)}

    @cached_property
    def runs(self) -> dict[str, list[Result]]:
        """For each lane the state after each round, and the reports."""
        return self.run(self.lanes)

    @property
    def result(self) -> list[Result]:
        """The run as it is."""
        return self.runs["as it is"]

    @property
    def seen(self) -> Tree:
        """What is seen of the run as it is, with which other runs are compared."""
        return _seen(self.schedule, self.result)

    @cached_property
    def stops(self) -> list[rounds.State]:
        """The states of the run as it is before each round and after the last."""
        return [self.start, *(state for state, _ in self.result)]

    def one_round(
        self, state: rounds.State, cohort: Cohort, federation: Federation | None = None
    ) -> Result:
        """Play one round from a state on the host."""
        whole = jax.tree.map(lambda leaf: np.asarray(leaf)[None], cohort)
        lane = self.lanes["as it is"]._replace(state=state, cohort=whole)
        lanes = self._stacked([lane] * len(self.lanes), 0)
        return tree.take(plain(self.program(lanes, federation or self.federation)), 0)

    def attending(self, server: Tree, round: int) -> list[np.ndarray]:
        """Return of each exchange which clients attend it [C]."""
        everyone: Any = np.arange(NUM_CLIENTS, dtype=np.int32)
        now: Any = np.int32(round)
        return [
            np.array([bool(each.attends(server, who, now)) for who in everyone])
            for each in self.algorithm.exchanges
        ]

    def turns(self, *clients: int) -> dict[int, rounds.State]:
        """Return for each exchange the latest state of the run, in a round that a client attends.

        That is a following round, or one of the first rounds if only those have the exchange. The
        client is the first possible one; exchanges that none of them attends are left out.
        """
        found: dict[int, rounds.State] = {}
        for who, state in itertools.product(clients, reversed(self.stops)):
            now = int(state.round)
            for round in (*range(now, now + 2 * NUM_CLIENTS), *range(now)):
                for index, attends in enumerate(self.attending(state.server, round)):
                    if attends[who] and index not in found:
                        started: Any = np.int32(round)
                        found[index] = state._replace(round=started)
                if len(found) == len(self.algorithm.exchanges):
                    return found
        if not found:
            raise NotApplicable("no such client ever attends an exchange")
        return found

    @cached_property
    def outputs(self) -> list[np.ndarray]:
        """Outputs after the run: of all inputs together; of the first alone, then of the others.

        If there is a network for all, also those for a client never seen, and the network's.
        """
        algorithm, x = self.algorithm, self.federation.data.x

        def of(state: rounds.State) -> list[Array]:
            own, new = (), ()
            if algorithm.personal:
                own = tree.take(state.clients, 0)
                new = algorithm.init_client(state.server, jnp.int32(0))
            cuts = slice(1), slice(1, None)
            parts = (jax.tree.map(lambda leaf, cut=cut: leaf[cut], x) for cut in cuts)
            apart = [algorithm.predict(state.server, own, part) for part in parts]
            found = [algorithm.predict(state.server, own, x), jnp.concatenate(apart)]
            if algorithm.network is not None:
                found.append(algorithm.predict(state.server, new, x))
                found.append(models.predict(self.model, algorithm.network(state.server), x))
            return found

        return plain(jax.jit(of, compiler_options=self.options)(self.restored(self.stops[-1])))


def _constants(program: Any) -> Iterator[Any]:
    """Yield the arrays of a program and of the programs in it, which its text does not show."""
    yield from getattr(program, "consts", ())
    for equation in getattr(program, "eqns", ()):
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else [value]:
                yield from _constants(inner)


def _digest(constant: Any) -> str:
    array = np.ascontiguousarray(plain(constant))
    return f"constant {array.dtype} {array.shape} {hashlib.sha256(array.tobytes()).hexdigest()}"


# The laws. First those of traces, which compile next to nothing.


def the_factory_returns_an_algorithm(case: Case) -> None:
    """factory(model, work, ...) returns an `Algorithm`."""
    assert case.algorithm


def a_round_can_be_traced(case: Case) -> None:
    """A round is a function of arrays: no Python `if` depends on a value or on the round.

    The server and the clients' states keep their shapes and types; metrics are scalars.
    """
    assert case.traced


def no_argument_is_changed_in_place(case: Case) -> None:
    """No dict or list of an argument is changed: the caller still needs it."""
    assert not case.traced.changed, f"{', '.join(case.traced.changed)} changed in place"


def tracing_again_gives_the_same_program(case: Case) -> None:
    """No state hides in Python: no counter, no random generator outside of `visit.key`."""
    program, again = case.traced.program, case.trace().program
    for first, second in zip(program.splitlines(), again.splitlines(), strict=False):
        assert first == second, f"a second trace has {second.strip()!r} for {first.strip()!r}"
    assert again == program, "a second trace has another number of operations"


def numbers_may_be_traced(case: Case) -> None:
    """The learning rate and all float arguments may be tracers, so that runs share a program.

    So may those that are floats by default and are not given.
    """
    assert case.traced_with_numbers


def a_blank_upload_fits(case: Case) -> None:
    """`Exchange.blank`, if there is one, gives zeros of the shapes of an upload."""
    blanks = [each.blank for each in case.algorithm.exchanges]
    if not any(blanks):
        raise NotApplicable("no exchange has `blank`, so no upload may stand in for a missing one")
    for blank, upload in zip(blanks, case.traced.uploads, strict=True):
        if blank:
            zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), upload)
            found = plain(blank(case.start.server))
            assert_equal(found, zeros)
            types = ([leaf.dtype for leaf in jax.tree.leaves(each)] for each in (found, zeros))
            assert operator.eq(*types), "a blank upload has other types"


def _seen(schedule: Cohort, results: Sequence[Result]) -> Tree:
    """Return the last state of a run, and its reports by client [C], zeros if absent.

    So it does not depend on the slots of the clients. Raises an AssertionError if a client is
    reported in a slot that the schedule leaves empty.
    """
    found = []
    for t, (_, reports) in enumerate(results):
        there = np.asarray(schedule.present[t])
        who = np.asarray(schedule.who[t])[there]
        for report in reports:
            assert not (report.present & ~there).any(), "an empty slot is reported as present"
            assert report.finite[~there].all(), "an empty slot is reported as not finite"
            seen = {name: np.where(report.present, m, 0) for name, m in report.metrics.items()}

            def by_client(values: np.ndarray, who: Any = who, there: Any = there) -> np.ndarray:
                return np.bincount(who, values[there].astype(float), NUM_CLIENTS)

            found.append(jax.tree.map(by_client, (seen, *report[1:])))
    return results[-1][0], found


def a_run_moves_everything_and_stays_finite(case: Case) -> None:
    """Six rounds change the server's network and the clients' states, and all numbers are finite.

    Else no other law could be broken. Without a single network for all clients, some number of the
    server must change.
    """
    start, state = case.start, case.stops[-1]
    assert case.moved(start.server, state.server) > 1e-2, "the server hardly moves"
    if jax.tree.leaves(start.clients):
        moved = largest_difference(start.clients, state.clients)
        assert moved > 1e-3, "the clients' states hardly move"
    assert_finite((state, [report.metrics for _, reports in case.result for report in reports]))


def clients_take_part_if_scheduled_with_examples_and_attending(case: Case) -> None:
    """Those clients that are scheduled, have examples and attend are reported as present."""
    attended = np.zeros(len(case.algorithm.exchanges), bool)
    for t, (stop, (_, reports)) in enumerate(zip(case.stops, case.result, strict=False)):
        who, present, _ = tree.take(case.schedule, t)
        # By the server before the round: no first exchange decides who attends the second.
        attends = case.attending(stop.server, t)
        for index, report in enumerate(reports):
            expected = present & (who != NO_EXAMPLE) & attends[index][who]
            attended[index] |= expected.any()
            found, must = (sorted(who[each].tolist()) for each in (report.present, expected))
            text = f"in exchange {index} of round {t} clients {found} take part, must be {must}"
            assert found == must, text
            assert (report.size == np.array(SIZES)[who]).all(), "sizes of clients are wrong"
    assert attended.all(), f"nobody attends exchange {attended.argmin()}"


def _assert_identity(case: Case, present: Sequence[int], attending: Sequence[int]) -> None:
    """Assert that a round of some clients, one in which one of others attends, changes nothing."""
    who, turns = [4, 3, 1, 2, 0], case.turns(*attending)
    for before in turns.values():
        after, reports = case.one_round(before, cohort(who, [each in present for each in who]))
        assert_equal((after.server, after.clients), (before.server, before.clients))
        assert_equal(after.round, before.round + 1)
        for report in reports:
            assert not report.present.any(), "a client is reported as present"


def a_round_without_clients_changes_nothing(case: Case) -> None:
    """If all slots are empty, the server and all clients stay as they are."""
    _assert_identity(case, [], range(NUM_CLIENTS))


def a_round_without_examples_changes_nothing(case: Case) -> None:
    """If no client of a round has an example, the server and all clients stay as they are."""
    # In a round that the client attends, so that its lack of examples is the reason.
    _assert_identity(case, [NO_EXAMPLE], [NO_EXAMPLE])


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
        for report, other in zip(reports, without, strict=True):
            assert_equal(report.present, other.present)


def absent_clients_change_nothing(case: Case) -> None:
    """An absent client keeps its state, and the server never sees who is absent, nor its delay."""
    for t, (before, (after, reports)) in enumerate(zip(case.stops, case.result, strict=False)):
        took_part = {int(who) for each in reports for who in case.schedule.who[t][each.present]}
        absent: Any = sorted({*range(NUM_CLIENTS)} - took_part)
        assert_equal(tree.take(after.clients, absent), tree.take(before.clients, absent))
    schedule = case.lanes["others absent"].cohort
    assert_close(_seen(schedule, case.runs["others absent"]), case.seen)


def what_fills_a_batch_does_not_matter(case: Case) -> None:
    """Only examples under a batch's mask count: others repeat an example to fill the batch."""
    assert_close(_seen(case.schedule, case.runs["filled otherwise"]), case.seen)


def the_order_of_slots_does_not_matter(case: Case) -> None:
    """A round is the same, whichever slots its clients are in."""
    schedule = case.lanes["other order"].cohort
    assert_close(_seen(schedule, case.runs["other order"]), case.seen)


def delays_matter(case: Case) -> None:
    """Delayed clients work on older messages, so that without delays the run is another one."""
    runs = (case.runs[name][-1][0].server for name in ("undelayed", "as it is"))
    assert largest_difference(*runs) > 1e-3, "the run without delays is the same"


def seeds_and_numbers_matter(case: Case) -> None:
    """Another seed, half the learning rate or half of any other float gives another run."""

    def seen(name: str) -> Tree:
        state = case.runs[name][-1][0]
        # The numbers of a personal algorithm may act on the clients alone.
        return (state.server, state.clients) if case.algorithm.personal else state.server

    assert case.traced_with_numbers  # or its error
    for name in ("other seed", *(name for name in case.numbers if name in case.runs)):
        moved = largest_difference(seen(name), seen("as it is"))
        what = name if name == "other seed" else f"half the {name}"
        assert moved > 1e-4, f"{what} gives the same run"


def other_rows_and_their_order_do_not_matter(case: Case) -> None:
    """A client sees its own examples alone: the others may lie elsewhere, or be NaN."""
    found = case.run(case.lanes, federation=relaid(case.bytes))
    assert_close(_seen(case.schedule, found["as it is"]), case.seen)


def runs_do_not_affect_each_other(case: Case) -> None:
    """Runs of other seeds and numbers share a program, and each is as if alone."""
    names = list(case.lanes)
    # Each run on the lane of another run, so that its changes are on another lane.
    turned = case.run({name: case.lanes[name] for name in names[1:] + names[:1]})
    for name, lane in case.lanes.items():
        assert_close(*(_seen(lane.cohort, each[name]) for each in (turned, case.runs)))


def stop_and_resume_is_bit_identical(case: Case) -> None:
    """All that a run carries is in its state: one that goes on from a checkpoint is the same."""
    stopped = {
        name: lane._replace(state=case.runs[name][_HALF - 1][0])
        for name, lane in case.lanes.items()
    }
    resumed = case.run(stopped, first=_HALF)
    assert_equal(resumed, {name: results[_HALF:] for name, results in case.runs.items()})


def each_output_is_of_one_example(case: Case) -> None:
    """`predict` gives an example the same outputs alone as among others, and they are finite."""
    together, apart, *_ = case.outputs
    assert_finite(together)
    assert_close(together, apart)


def the_network_gives_the_outputs_for_a_new_client(case: Case) -> None:
    """`models.predict` of `Algorithm.network` equals `predict` for a client that was never seen."""
    if case.algorithm.network is None or case.algorithm.own_outputs:
        raise NotApplicable("it has no network, or says that it has `own_outputs`")
    assert_close(*case.outputs[2:])


def clients_outside_of_the_cohorts_need_not_be_there(case: Case) -> None:
    """A round needs the examples of the clients alone that its cohort names."""
    state, results = case.start, []
    for t in range(len(case.schedule.who)):
        cohort = tree.take(case.schedule, t)
        federation = _of_clients(case.federation, cohort.who[cohort.present])
        state, reports = case.one_round(state, cohort, federation)
        results.append((state, reports))
    assert_close(_seen(case.schedule, results), case.seen)


def devices_chunks_and_empty_slots_do_not_matter(case: Case) -> None:
    """A run on devices that own the clients is the same, also with empty slots and 8-bit inputs.

    Each device has the states of its own clients alone, which it does not share evenly, and trains
    one client at a time.
    """
    number = max(count for count in (1, 2, 4) if count <= len(jax.devices("cpu")))
    if number == 1:
        raise NotApplicable("there is one device; jax_num_cpu_devices=4 makes several of a CPU")
    mesh: Any = devices.mesh((1, number), jax.devices("cpu"))
    axis = devices.owned(devices.CLIENTS, devices.chunked(1))
    whole: Any = PartitionSpec()
    lies = rounds.State(whole, PartitionSpec(devices.CLIENTS), whole, whole, whole)
    run = partial(rounds.run, case.algorithm, axis=axis, drop_nonfinite=True)
    play = devices.over(mesh, run, (lies, whole, whole), (lies, whole))
    room = number * devices.clients_per_device(NUM_CLIENTS, number)

    def padded(leaf: Any) -> Any:
        return np.resize(leaf, (room, *leaf.shape[1:]))

    start = case.start._replace(clients=jax.tree.map(padded, case.start.clients))
    slots = _with_empty_slots(case.schedule)
    program = jax.jit(play, compiler_options=case.options)
    state, reports = plain(program(case.restored(start), slots, case.bytes))
    clients = jax.tree.map(lambda leaf: leaf[:NUM_CLIENTS], state.clients)
    state = state._replace(clients=clients)
    results = [(state, tree.take(reports, t)) for t in range(len(slots.who))]
    assert_close(_seen(slots, results), case.seen, rtol=1e-5, atol=1e-5)


Law = Callable[[Case], None]
# All laws, by name and in this order: an error in one explains those of later ones.
LAWS: Mapping[str, Law] = MappingProxyType(
    {
        name: law
        for name, law in list(globals().items())
        if inspect.isfunction(law) and [*inspect.signature(law).parameters] == ["case"]
    }
)


class Outcome(NamedTuple):
    """What the check of one law found."""

    law: str
    result: str  # "held", "broken", "not applicable" or "not checked"
    why: str = ""  # one line; "" if the law held
    seconds: float = 0.0

    def __str__(self) -> str:
        why = f": {self.why}" if self.why else ""
        return f"{self.result:<14} {self.seconds:5.1f} s  {_words(self.law)}{why}"


class Report(NamedTuple):
    """What the check of an algorithm found; as text a table with a line for each law."""

    name: str
    outcomes: tuple[Outcome, ...]

    @property
    def broken(self) -> tuple[Outcome, ...]:
        """The laws that are broken."""
        return tuple(outcome for outcome in self.outcomes if outcome.result == "broken")

    def __str__(self) -> str:
        results = [outcome.result for outcome in self.outcomes]
        counts = ", ".join(f"{results.count(each)} {each}" for each in dict.fromkeys(results))
        seconds = sum(outcome.seconds for outcome in self.outcomes)
        return "\n".join([*map(str, self.outcomes), f"{self.name}: {counts} in {seconds:.0f} s"])

    def raise_if_broken(self) -> None:
        """Raise an AssertionError that names each broken law and why, a line each."""
        lines = [f"{_words(outcome.law)}: {outcome.why}" for outcome in self.broken]
        if lines:
            raise AssertionError(
                "\n".join([f"{self.name} breaks {len(lines)} of the laws", *lines])
            )


def check(
    factory: Callable[..., Algorithm],
    *,
    laws: Iterable[str] = tuple(LAWS),
    tell: Callable[[str], None] | None = print,
    **configuration: Any,
) -> Report:
    """Check the laws of the protocol for an algorithm, called as factory(model, work, ...).

    All runs are on the CPU, with five clients of 0 to 7 examples, two of which are always or often
    absent, and six rounds. Nearly all of the time is that of compiling.

    Args:
      factory: the algorithm's.
      laws: the names of the laws to check; by default all of `LAWS`.
      tell: called with a line for each law as soon as it is checked; None for no lines.
      **configuration: hyperparameters, model, work, learning_rate and data, as in `Case`.

    Returns:
      The report. A law whose check meets the error of an earlier law is not checked.

    Raises:
      UsageError: for an unknown law, or too few examples.
    """
    outcomes: list[Outcome] = []
    with jax.default_device(jax.devices("cpu")[0]), platforms.traced_for("cpu"):
        case = Case(factory, **configuration)
        for name in laws:
            checks.one_of("laws", name, LAWS)
            outcomes.append(_outcome(case, name, outcomes))
            if tell:
                tell(str(outcomes[-1]))
    report = Report(case.name, tuple(outcomes))
    if tell:
        tell(str(report).splitlines()[-1])
    return report


def _outcome(case: Case, name: str, earlier: Sequence[Outcome]) -> Outcome:
    start = time.perf_counter()
    result, why = "held", ""
    try:
        LAWS[name](case)
    except NotApplicable as reason:
        result, why = "not applicable", str(reason)
    except Exception as error:
        result, why = "broken", _line(error)
        cause = next((each for each in earlier if (each.result, each.why) == (result, why)), None)
        if cause:
            result, why = "not checked", f"as {_words(cause.law)} is broken"
    return Outcome(name, result, why, time.perf_counter() - start)


def _words(law: str) -> str:
    return law.replace("_", " ")


def _line(error: Exception) -> str:
    """Return an error in one line, with the last place outside of this package and JAX."""
    if isinstance(error, AssertionError) and str(error).strip():
        return str(error).strip().splitlines()[0]
    own = Path(__file__).parent
    places = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if own not in Path(frame.filename).parents and "site-packages" not in frame.filename
    ]
    place = f" ({Path(places[-1].filename).name}:{places[-1].lineno})" if places else ""
    return f"{type(error).__name__}: {checks.one_line(error)}{place}"


def main(arguments: Sequence[str]) -> int:
    """Check the factory that the first argument names; the others are its hyperparameters."""
    place, *pairs = arguments
    module, _, name = place.partition(":")
    hyperparameters = {}
    for pair in pairs:
        key, _, text = pair.partition("=")
        try:
            hyperparameters[key] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            hyperparameters[key] = text
    factory = getattr(importlib.import_module(module), name)
    return 1 if check(factory, hyperparameters=hyperparameters).broken else 0


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 4)  # on any machine, for the law of devices
    sys.exit(main(sys.argv[1:]))
