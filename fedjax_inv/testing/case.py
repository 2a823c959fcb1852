"""An algorithm in one configuration, its programs, and the results that the laws share."""

import hashlib
import inspect
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from fedjax_inv import checks, devices, platforms, rounds, tree
from fedjax_inv.testing import inputs
from fedjax_inv.testing.comparing import largest_difference, plain
from fedjax_inv.testing.inputs import HISTORY, NUM_CLIENTS
from fedjax_inv.types import (
    Algorithm,
    Array,
    Cohort,
    Examples,
    Exchange,
    Federation,
    Model,
    Reply,
    Tree,
    Variables,
    Visit,
    Work,
)

T = TypeVar("T")
Result = tuple[rounds.State, tuple[rounds.Report, ...]]
# By client, so that neither the devices nor the order of slots changes a bit.
ALONE = devices.chunked(1)._replace(replicated=False)
SEGMENT = 3  # rounds; the schedule has two of them


class NotApplicable(Exception):
    """A law says nothing about this algorithm, or cannot be checked here; the message says why."""


class NeverAttends(AssertionError):
    """A client attends an exchange in no round."""


class Lane(NamedTuple):
    """One of the runs that are vmapped."""

    state: rounds.State
    numbers: dict[str, float]  # of the factory and the local optimizer
    schedule: Cohort
    filled_otherwise: Any  # [] bool, whether another real example fills up batches


class Turn(NamedTuple):
    """The shapes of a client's turn in one exchange."""

    visit: Visit
    reply: Reply


class Trace(NamedTuple):
    """What one trace of a round shows."""

    program: str
    before: rounds.State  # shapes
    after: rounds.State
    turns: tuple[Turn, ...]  # of each exchange
    changed: str  # the argument that was changed in place; "" for none


class Case:
    """One configuration of an algorithm.

    Compiling takes nearly all of the time, so there are few programs, each traced once: the start
    of two seeds; a round, one client after the other, on one and on several devices; a segment of
    three rounds of several runs, three clients at a time; predictions. Results stay for all laws,
    and so does an error: a second law that meets it gets the same object.

    Attributes:
      name: the factory's name.
      federation: the clients and their examples.
      schedule: six rounds on the host.
      numbers: the learning rate and the factory's numbers, by name.
      defaults: the numbers that the factory has by default, and that are not given.
      options: the compiler options of the programs of a round.
      is_exact: whether bits must be the same on every number of devices.
      num_devices: how many devices share the clients.
    """

    def __init__(
        self,
        factory: Callable[..., Algorithm],
        *,
        hyperparameters: Mapping[str, Any] | None = None,
        model: Model | None = None,
        work: Callable[[Any], Work] = inputs.epochs,
        learning_rate: float = 0.1,
        data: Examples | None = None,
        is_exact: bool = False,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """Store a configuration, in which the factory is called as factory(model, work, ...).

        Args:
          factory: the algorithm's.
          hyperparameters: further arguments of the factory.
          model: the network; by default `inputs.network()`.
          work: learning rate -> local training.
          learning_rate: the learning rate.
          data: the examples, as in `inputs.federation`.
          is_exact: whether bits must be the same on every number of devices.
          options: compiler options.

        Raises:
          UsageError: for arguments of other types.
        """
        checks.function("factory", factory)
        checks.function("work", work)
        checks.number("learning_rate", learning_rate, "above 0", lambda rate: rate > 0)
        if hyperparameters is not None:
            checks.record("hyperparameters", hyperparameters, Mapping)
        self.hyperparameters = {} if hyperparameters is None else dict(hyperparameters)
        self._as_given = jax.tree.flatten(self.hyperparameters)
        self.factory, self.work = factory, work
        self.model = inputs.network() if model is None else model
        checks.record("model", self.model, Model)
        module, name = (getattr(factory, part, "") for part in ("__module__", "__qualname__"))
        self.name = f"{module}.{name}" if name else repr(factory)
        self.bytes = inputs.federation(data=data)
        self.federation = inputs.in_floats(self.bytes)
        self.schedule: Cohort = plain(inputs.schedule())
        self.numbers = {
            "learning_rate": float(learning_rate),
            **{key: value for key, value in self.hyperparameters.items() if type(value) is float},
        }
        self.defaults = {
            name: each.default
            for name, each in inspect.signature(factory).parameters.items()
            if type(each.default) is float and name not in self.hyperparameters
        }
        here = len(jax.devices("cpu"))
        self.num_devices = max(number for number in (1, 2, 4) if number <= here)
        self.is_exact = is_exact
        self.options = {**platforms.one_thread(), **(options or {})}
        self._results: dict[str, Any] = {}

        # Compact, so that a law can leave clients out: `segment` has the whole federation.
        def step(state: rounds.State, cohort: Cohort, federation: Federation) -> Result:
            return self.round(state, cohort, federation, ALONE)

        def segment(federation: Federation, lanes: Lane) -> Result:
            def one(lane: Lane) -> Result:
                algorithm = self.build(lane.numbers)
                with inputs.filled_otherwise(lane.filled_otherwise):
                    return rounds.run(
                        algorithm, lane.state, lane.schedule, federation, axis=devices.chunked(3)
                    )

            return jax.vmap(one)(lanes)

        self.step = self.once(step, "a round", donate_argnums=0)
        self.segment = self.once(segment, "a segment")

    def once(
        self,
        fn: Callable[..., Any],
        what: str,
        options: Mapping[str, Any] | None = None,
        **arguments: Any,
    ) -> Callable[..., Any]:
        """Return a jitted function that raises an AssertionError if it is traced twice.

        Args:
          fn: the function.
          what: its name, for the error.
          options: further compiler options.
          **arguments: of `jax.jit`.
        """
        traces = []

        def counted(*inputs: Any) -> Any:
            traces.append(what)
            assert len(traces) == 1, (
                f"{what} is compiled twice, although the shapes of its arguments are the same"
            )
            return fn(*inputs)

        return jax.jit(counted, compiler_options={**self.options, **(options or {})}, **arguments)

    def kept(self, name: str, compute: Callable[[], T]) -> T:
        """Return the result of `compute`, or raise its error, which are computed once."""
        if name not in self._results:
            try:
                self._results[name] = compute(), None
            except Exception as error:
                self._results[name] = None, error
        result, raised = self._results[name]
        if raised is not None:
            raise raised
        return result

    def build(self, numbers: Mapping[str, Any]) -> Algorithm:
        """Return the algorithm with some of its numbers replaced."""
        work = self.work({**self.numbers, **numbers}["learning_rate"])
        given = {key: value for key, value in numbers.items() if key != "learning_rate"}
        return self.factory(self.model, work, **{**self.hyperparameters, **given})

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm."""

        def build() -> Algorithm:
            algorithm = self.build({})
            checks.record("the result of the factory", algorithm, Algorithm)
            return algorithm

        return self.kept("algorithm", build)

    def init(self, algorithm: Algorithm, variables: Variables, key: Array) -> rounds.State:
        """Return the state before the first round."""
        return rounds.init(algorithm, variables, self.federation, key, history=HISTORY)

    def variables(self, key: Array) -> Variables:
        """Return a drawn network."""
        x = jax.tree.map(lambda leaf: jnp.zeros_like(leaf[:1]), self.bytes.data.x)
        return self.model.init(key, x)

    def moved(self, before: Tree, after: Tree) -> float:
        """Return how far two servers' networks are apart.

        Without a single network that serves all clients: how far the servers are apart.
        """
        network = self.algorithm.network
        if network is not None and not self.algorithm.personal:
            before, after = network(before), network(after)
        return largest_difference(before, after)

    # Traces, which compile nothing.

    def trace(self, numbers: dict[str, float] | None = None) -> Trace:
        """Trace the start and a round of a run.

        Args:
          numbers: if given, the factory is called with these numbers, traced.
        """
        first, key = self.algorithm, jax.random.key(0)

        def start(variables: Variables) -> rounds.State:
            return self.init(first, variables, key)

        drawn = jax.eval_shape(self.variables, key)
        before = jax.eval_shape(start, drawn)
        changed = []
        turns: dict[int, Turn] = {}

        def watch(index: int, exchange: Exchange) -> Exchange:
            def client(visit: Visit) -> Reply:
                reply = exchange.client(visit)
                turns[index] = jax.tree.map(jax.typeof, Turn(visit, reply))
                return reply

            return exchange._replace(client=client)

        def traced(numbers: dict[str, Array] | None, *arguments: Any) -> Result:
            # The arguments as the algorithm gets them, whose containers it could change.
            names = ("hyperparameters", "variables", "state", "cohort", "federation")
            given = (self.hyperparameters, *arguments)
            # The factory may have been called before, and have changed its arguments then.
            was: list[Any] = [self._as_given, *(jax.tree.flatten(each) for each in arguments)]
            algorithm = first if numbers is None else self.build(numbers)
            variables, state, cohort, federation = arguments
            self.init(algorithm, variables, key)
            watched = tuple(watch(*each) for each in enumerate(algorithm.exchanges))
            algorithm = algorithm._replace(exchanges=watched)
            result = rounds.step(algorithm, state, cohort, federation, axis=devices.chunked(1))
            for name, (leaves, structure), each in zip(names, was, given, strict=True):
                now, structure_now = jax.tree.flatten(each)
                if structure_now != structure or any(map(operator.is_not, leaves, now)):
                    changed.append(name)
            return result

        program, (after, _) = jax.make_jaxpr(traced, return_shape=True)(
            numbers, drawn, before, tree.take(self.schedule, 0), self.federation
        )
        addresses = re.compile(r" at 0x[0-9a-f]+")  # of functions, in every trace another one
        text = "\n".join([addresses.sub("", str(program)), *map(_digest, _constants(program))])
        in_order = tuple(turns[index] for index in sorted(turns))
        return Trace(text, before, after, in_order, ", ".join(changed))

    @property
    def traced(self) -> Trace:
        """A trace of a round."""
        return self.kept("traced", self.trace)

    @property
    def traced_with_numbers(self) -> Trace:
        """A trace of a round whose numbers are traced, those by default, too."""

        def trace() -> Trace:
            assert self.traced  # or its error, which comes first
            return self.trace({**self.defaults, **self.numbers})

        return self.kept("traced with numbers", trace)

    # Runs.

    def round(
        self, state: rounds.State, cohort: Cohort, federation: Federation, axis: devices.Axis
    ) -> Result:
        """Play a round, in which a client that returns a NaN counts as absent."""
        return rounds.step(
            self.algorithm, state, cohort, federation, axis=axis, drop_nonfinite=True
        )

    def attending(self, server: Tree, round: Any) -> list[np.ndarray]:
        """Return of each exchange which clients attend it [C]."""

        def of_all(server: Tree, round: Array) -> list[Array]:
            def of(who: Array) -> list[Array]:
                exchanges = self.algorithm.exchanges
                return [jnp.bool_(each.attends(server, who, round)) for each in exchanges]

            return jax.vmap(of)(jnp.arange(NUM_CLIENTS, dtype=jnp.int32))

        compiled = self.kept("attending", lambda: jax.jit(of_all))
        return plain(compiled(server, np.int32(round)))

    @property
    def drawn(self) -> tuple[Variables, rounds.State]:
        """The networks and the states of two seeds before the first round, on the device."""

        def draw() -> tuple[Variables, rounds.State]:
            assert self.traced  # or its error: without a round there is no run

            def start(seed: Array) -> tuple[Variables, rounds.State]:
                variables = self.variables(jax.random.key(seed))
                return variables, self.init(self.algorithm, variables, jax.random.key(seed))

            return jax.jit(jax.vmap(start), compiler_options=self.options)(np.arange(2))

        return self.kept("drawn", draw)

    @property
    def starts(self) -> rounds.State:
        """The states of `drawn`, on the host."""
        return self.kept("starts", lambda: plain(self.drawn[1]))

    def restored(self, saved: rounds.State) -> rounds.State:
        """Return a state, or several stacked ones, in new buffers, from `plain` ones."""

        def leaf(saved: Any, like: Array) -> Array:
            is_key = jnp.issubdtype(like.dtype, jax.dtypes.prng_key)
            return jax.random.wrap_key_data(saved) if is_key else jnp.array(saved)

        return jax.tree.map(leaf, saved, self.drawn[1])

    @property
    def start(self) -> rounds.State:
        """The state before the first round."""
        return tree.take(self.starts, 0)

    @property
    def stops(self) -> list[rounds.State]:
        """The states before each round and after the last."""
        return [self.start, *(state for state, _ in self.steps)]

    @property
    def steps(self) -> list[Result]:
        """The results of the rounds played one by one: all others are compared with these."""
        return self.kept("steps", lambda: self.steps_from(self.start, 0))

    def steps_from(self, start: rounds.State, first: int) -> list[Result]:
        """Return the results of the rounds from the round `first` on."""
        state, results = self.restored(start), []
        for t in range(first, len(self.schedule.who)):
            cohort = tree.take(self.schedule, t)
            state, reports = self.step(state, cohort, inputs.compact(self.federation))
            results.append(plain((state, reports)))
        return results

    @property
    def result(self) -> Result:
        """The state after the last round, and the reports of all [T, S]."""
        reports = jax.tree.map(lambda *leaves: np.stack(leaves), *(each[1] for each in self.steps))
        return self.steps[-1][0], reports

    def one_step(
        self, state: rounds.State, cohort: Cohort, federation: Federation | None = None
    ) -> Result:
        """Play one round from a state on the host."""
        parts = inputs.compact(federation or self.federation)
        return plain(self.step(self.restored(state), plain(cohort), parts))

    def one_step_of(
        self,
        state: rounds.State,
        cohort: Cohort,
        who: Sequence[int],
        step: Callable[..., Result] | None = None,
    ) -> Result:
        """Play one round with the examples and states of some clients alone.

        Args:
          state: the state on the host, of all clients.
          cohort: the slots of the round.
          who: the clients that are on the device.
          step: the round, as `Case.step`, which is the default.

        Returns:
          The same as `one_step`, with the states of the other clients as they were.
        """
        numbers: Any = np.asarray(who, int)

        def taken(leaf: Any) -> Any:
            # What fills the room is arbitrary.
            return np.concatenate([leaf[numbers], leaf[: NUM_CLIENTS - len(numbers)][::-1]])

        some = self.restored(state._replace(clients=jax.tree.map(taken, state.clients)))
        part = inputs.compact(self.federation, who)
        after, reports = plain((step or self.step)(some, plain(cohort), part))

        def put(leaf: Any, new: Any) -> Any:
            changed = np.array(leaf)
            changed[numbers] = new[: len(numbers)]
            return changed

        clients = jax.tree.map(put, state.clients, after.clients)
        return after._replace(clients=clients), reports

    def steps_on(
        self,
        num_devices: int,
        schedule: Cohort,
        federation: Federation,
        options: Mapping[str, Any] | None = None,
    ) -> Result:
        """Return the last state and the reports of all rounds on devices.

        Args:
          num_devices: several own the clients; one has a program without a mesh.
          schedule: the rounds.
          federation: the clients and their examples.
          options: further compiler options.
        """
        state, room = self.restored(self.start), NUM_CLIENTS
        play: Callable[..., Result] = partial(self.round, axis=ALONE)
        if num_devices > 1:
            mesh = jax.make_mesh(
                (num_devices,),
                ("clients",),
                axis_types=(AxisType.Auto,),
                devices=jax.devices("cpu")[:num_devices],
            )
            axis = devices.owned("clients", ALONE)
            whole: Any = PartitionSpec()
            lies = rounds.State(whole, PartitionSpec("clients"), whole, whole, whole)
            play = devices.over(
                mesh, partial(self.round, axis=axis), (lies, whole, whole), (lies, whole)
            )
            room = num_devices * devices.clients_per_device(NUM_CLIENTS, num_devices)

            def padded(leaf: Array) -> Array:
                return jnp.concatenate([leaf, leaf[: room - NUM_CLIENTS]])

            state = state._replace(clients=jax.tree.map(padded, state.clients))
            # Where a round leaves it, or the second round would be compiled again.
            state = jax.device_put(state, jax.tree.map(partial(NamedSharding, mesh), lies))
        step = self.once(play, "a round on devices", options, donate_argnums=0)
        results = []
        for t in range(len(schedule.who)):
            state, reports = step(state, tree.take(schedule, t), federation)
            results.append(plain(reports))
        state = plain(state)
        states = jax.tree.map(lambda leaf: leaf[:NUM_CLIENTS], state.clients)
        together = jax.tree.map(lambda *leaves: np.stack(leaves), *results)
        return state._replace(clients=states), together

    @property
    def traceable_numbers(self) -> dict[str, float]:
        """The numbers, if they may be traced, else none."""
        try:
            return self.traced_with_numbers and self.numbers
        except Exception:
            return {}

    @property
    def lanes(self) -> dict[str, Lane]:
        """The run of `steps`, and runs that must equal it, or must not."""
        start, other = (tree.take(self.starts, seed) for seed in range(2))
        no_delay: Any = np.zeros_like(self.schedule.delay)
        undelayed = self.schedule._replace(delay=no_delay)
        numbers, no = self.traceable_numbers, np.bool_(False)
        as_it_is = Lane(start, numbers, self.schedule, no)
        halves = {
            name: as_it_is._replace(numbers={**numbers, name: value / 2})
            for name, value in numbers.items()
            if value / 2 != value
        }
        return {
            "as it is": as_it_is,
            "other order": as_it_is._replace(schedule=inputs.rearranged(self.schedule, 2)),
            "others absent": as_it_is._replace(schedule=inputs.with_others_absent(self.schedule)),
            "filled otherwise": as_it_is._replace(filled_otherwise=np.bool_(True)),
            "undelayed": as_it_is._replace(schedule=undelayed),
            "other seed": as_it_is._replace(state=other),
            **halves,
        }

    @property
    def results(self) -> dict[str, Result]:
        """The result of each lane."""
        return self.kept("results", lambda: self.run(list(self.lanes)))

    def run(
        self,
        names: Sequence[str],
        *,
        federation: Federation | None = None,
        carry: Callable[[rounds.State], rounds.State] = lambda state: state,
    ) -> dict[str, Result]:
        """Run all lanes in two segments.

        Args:
          names: all lanes, in any order.
          federation: the clients and their examples.
          carry: what happens to the states between the segments.

        Returns:
          The result of each lane.
        """
        lanes: Lane = jax.tree.map(
            lambda *leaves: np.stack(leaves), *(self.lanes[name] for name in names)
        )
        state, parts = self.restored(lanes.state), []
        for half in (slice(0, SEGMENT), slice(SEGMENT, None)):
            schedule = jax.tree.map(lambda leaf, half=half: leaf[:, half], lanes.schedule)
            now = lanes._replace(state=carry(state), schedule=schedule)
            state, reports = self.segment(federation or self.federation, now)
            parts.append(plain(reports))
        together = jax.tree.map(lambda *leaves: np.concatenate(leaves, 1), *parts)
        return {name: tree.take((plain(state), together), i) for i, name in enumerate(names)}

    def turn(self, exchange: int, who: int) -> rounds.State:
        """Return the latest state of the run, with a round in which a client attends an exchange.

        That is a following round, or one of the first rounds if only those have the exchange.
        """
        for state in reversed(self.stops):
            now = int(state.round)
            for round in (*range(now, now + 2 * NUM_CLIENTS), *range(now)):
                if self.attending(state.server, round)[exchange][who]:
                    started: Any = np.int32(round)
                    return state._replace(round=started)
        raise NeverAttends(f"client {who} never attends exchange {exchange}")


def _constants(program: Any) -> Iterator[Any]:
    """Yield the arrays of a program and of the programs in it, which its text does not show."""
    yield from getattr(program, "consts", ())
    for equation in getattr(program, "eqns", ()):
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else [value]:
                yield from _constants(inner)


def _digest(constant: Any) -> str:
    if jnp.issubdtype(constant.dtype, jax.dtypes.prng_key):
        constant = jax.random.key_data(constant)
    array = np.ascontiguousarray(constant)
    return f"constant {array.dtype} {array.shape} {hashlib.sha256(array.tobytes()).hexdigest()}"
