"""A program whose examples and clients' states stay on the host, but for those that are needed.

The rounds are played in parts. A part has the examples and states of the clients of its cohorts
alone (`parts`, `data.federation.compact`), and its results are those of the whole federation, bit
for bit. While a part is computed, a thread reads the next one and places it on the devices. So the
examples of two parts are in memory. The states of clients that attend both parts go from one to the
other on the devices; all states go into a file afterwards (`kept`). Evaluations read the examples
of all clients, a part after the other.

Of several processes each reads the examples and states for its own devices, and writes the states
of its own runs into a file of its own. The first process writes those of all runs: checkpoints name
the places in its file. The thread sends other processes nothing, because its messages would cross
those of the rounds.
"""

import math
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import PartitionSpec

from fedjax_inv import checks, devices, evaluation, rounds
from fedjax_inv.checks import UsageError
from fedjax_inv.communication import Traffic
from fedjax_inv.data.stored import Stored
from fedjax_inv.devices import ClientShards, CompactShards, Layout, SharedExamples
from fedjax_inv.program import compiled, parts
from fedjax_inv.program.compiled import Program
from fedjax_inv.program.host_inputs import Inputs
from fedjax_inv.program.kept import Kept, Places
from fedjax_inv.program.one_run import (
    DetailedScores,
    Experiment,
    OneRun,
    Outcome,
    Played,
    Training,
)
from fedjax_inv.program.parts import Needed, Room, Shards
from fedjax_inv.types import Array, Cohort, Examples, Tree

_ALIGNMENT = 64  # bytes; XLA shares host memory that begins at a multiple
_AT_ONCE = 16  # clients whose first states are computed at once
_MOST_CLIENTS = 256  # clients of a personal algorithm that are evaluated at once

# (shapes of one client's state) -> the file of states
OpenKept = Callable[[Tree], Kept]


class Plan(NamedTuple):
    """How the rounds of a run are cut into parts."""

    num_rounds: int  # of a part
    room: Room
    bytes: int  # of a part's examples and states on a device


def plan(
    source: Stored,
    inputs: Inputs,
    cohorts: Cohort,
    layout: Layout,
    *,
    every: int,
    most_bytes: int,
    state_bytes: int,
) -> Plan:
    """Return the longest parts that fit into memory.

    Args:
      source: the examples.
      inputs: the inputs of the runs.
      cohorts: those of all rounds, [R, T, S], on the host; T is a multiple of `every`.
      layout: the devices.
      every: the rounds between evaluations; a part has a divisor of that many.
      most_bytes: the memory for a part.
      state_bytes: the bytes of a client's state.

    Returns:
      The plan; a part of one round may need more than `most_bytes`.
    """
    shards = parts.on_host(inputs.train, layout)
    whole = _repeated(cohorts, layout)
    runs = layout.runs_per_device(len(shards.size)) + layout.gathers_runs * len(shards.size)
    found = Plan(0, Room(1, 1, 1), 0)
    for length in (n for n in range(every, 0, -1) if every % n == 0):
        total = whole.who.shape[1]
        cut = (_rounds(whole, first, length) for first in range(0, total, length))
        room = parts.room(shards, cut, layout)
        needed = room.on_device * source.row_bytes + runs * room.clients * state_bytes
        found = Plan(length, room, needed)
        if needed <= most_bytes:
            break
    return found


def _repeated(cohorts: Cohort, layout: Layout) -> Cohort:
    """Return cohorts on the host whose last run is repeated until devices share them evenly."""
    return jax.tree.map(lambda leaf: parts.repeated(np.asarray(leaf), layout), cohorts)


def _rounds(cohorts: Cohort, first: int, length: int) -> Cohort:
    return jax.tree.map(lambda leaf: np.asarray(leaf)[:, first : first + length], cohorts)


class _Before(NamedTuple):
    """The clients of the part before."""

    who: np.ndarray  # [R, c]
    num_clients: np.ndarray  # [R]


class _Part(NamedTuple):
    """A part of the rounds on the devices."""

    data: Examples
    inputs: Inputs  # with compact training shards
    who: np.ndarray  # [R, c] the clients that are there
    num_clients: np.ndarray  # [R]
    states: Tree  # [R, c, ...] of clients that were not in the part before; () if they keep nothing
    source: Array | None  # [R, c] int32, where a client was in the part before, -1 if it was not


class _Evaluated(NamedTuple):
    """Shards that are evaluated in parts."""

    shards: Shards
    is_shared: bool
    batches: parts.Batches | None  # None: for a personal algorithm, client by client
    chunks: tuple[tuple[int, int], ...] = ()  # its clients, the first and the one after the last
    slots: int = 1  # the most clients with examples in a chunk
    room: Room = Room(1, 1, 1)


class Stream:
    """The program of R runs, part by part.

    Attributes:
      program: the same functions as of a program with all examples on the devices. `segment` plays
        the rounds that follow those before; its cohorts must be theirs. What is `data` there is not
        looked at. The stored training has the `kept.Places` of the clients' states.
      plan: how the rounds are cut into parts.
      cohorts: those of all rounds.
      open_kept: opens the file of states; it must be set where clients keep any. Of several
        processes the first opens the file that checkpoints name; each of the others opens a file of
        its own, with what that one has now.
    """

    def __init__(
        self,
        experiment: Experiment,
        source: Stored,
        inputs: Inputs,
        cohorts: Cohort,
        plan: Plan,
        *,
        client_chunk: int = 1,
        run_chunk: int = 0,
        layout: Layout | None = None,
        most_bytes: int = 2**30,
        state_bytes: int = 0,
    ) -> None:
        """Compile nothing yet.

        Args:
          experiment: the settings of all runs; nothing is watched in it, and there is no stop.
          source: the examples.
          inputs: the inputs of the R runs.
          cohorts: those of all rounds, [R, T, S], on the host.
          plan: from `plan`.
          client_chunk: as in `make`.
          run_chunk: as in `make`.
          layout: as in `make`, with `streams`.
          most_bytes: the memory for a part of an evaluation, its examples and states.
          state_bytes: as in `plan`.

        Raises:
          UsageError: for an experiment that looks at all clients in a round.
        """
        layout = Layout(streams=True) if layout is None else layout
        if not layout.streams or layout.own:
            raise UsageError("layout", ..., "must have streams=True and own=False")
        if experiment.thresholds or inputs.watched is not None or experiment.pooled:
            text = "must watch nothing, have no stop, and not be pooled"
            raise UsageError("experiment", ..., text)
        checks.integer("most_bytes", most_bytes)
        self._experiment, self._source, self._layout, self.plan = experiment, source, layout, plan
        self._most_rows = max(1, most_bytes // source.row_bytes)
        self._most_bytes, self._state_bytes = most_bytes, state_bytes
        self._cohorts = _repeated(cohorts, layout)
        self.cohorts = cohorts
        self._train = parts.on_host(inputs.train, layout)
        num_runs = len(inputs.seed)
        self._num_runs = num_runs
        axis = layout.axis(devices.chunked(client_chunk) if client_chunk else devices.vmapped())
        self._run = OneRun(experiment, axis, layout.num_parts)
        self._algorithm = experiment.algorithm({k: v[0] for k, v in inputs.hyper.items()})
        nothing: Any = ()
        empty = jax.tree.map(
            lambda leaf: parts.repeated(np.asarray(leaf), layout),
            inputs._replace(train=nothing, valid=nothing, test=nothing, detailed=None),
        )
        self._inputs: Inputs = empty
        self._evaluated = {
            name: self._evaluation(shards)
            for name, shards in (
                ("valid", inputs.valid),
                ("test", inputs.test),
                *(() if inputs.detailed is None else inputs.detailed._asdict().items()),
            )
        }
        self.open_kept: OpenKept | None = None
        self._kept: Kept | None = None
        self._thread = ThreadPoolExecutor(1, "reads-parts")
        self._next: tuple[int, Future[_Part]] | None = None  # the round of a part that is read
        self._before: _Before | None = None
        self._writing: Future[None] | None = None
        self._resident: dict[str, Any] = {}
        self._leads = jax.process_index() == 0
        runs_here = layout.runs_here(len(self._train.size))
        self._runs_here: list[int] = runs_here.tolist()
        # Those whose states this process writes.
        self._runs_written = (
            range(num_runs) if self._leads else runs_here[runs_here < num_runs].tolist()
        )
        self._first_server: Tree = None
        self._state_shape: Tree = ()
        self._done = 0  # rounds
        make = compiled.over_runs_of(layout, run_chunk)
        self._compile(make)
        begin, play, evaluate = map(_as_compiled, (self._begin, self._played, self._evaluate))
        self.program = Program(
            begin,
            play,
            evaluate,
            self._traffic,
            self._stored,
            self._placed,
            lambda tree: jax.device_get(layout.gather_runs(tree)),
            self._shapes,
        )

    def compiled(self) -> jax.stages.Compiled:
        """Return the compiled rounds of the first part, whose examples are read for it."""
        part, cohorts = self._read(0, None), _rounds(self.cohorts, 0, self.plan.num_rounds)
        state = jax.eval_shape(self._init, part.data, part.inputs).state
        return self._play.lower(part.data, part.inputs, state, cohorts).compile()

    def close(self) -> None:
        """End the thread and close the file of states; `init` and `placed` begin anew."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._thread = ThreadPoolExecutor(1, "reads-parts")
        if self._kept is not None:
            self._kept.close()
        self._next = self._before = self._writing = self._kept = None
        self._resident = {}

    def saved(self, training: Training, served: Tree) -> None:
        """Note that a checkpoint holds stored training.

        Args:
          training: as the program stored it.
          served: the places of a selected state that checkpoints hold as well, or ().
        """
        if self._kept is not None and self._leads:
            self._kept.saved(training.state.clients, served or None)

    # What is compiled.

    def _compile(self, over_runs: Callable[..., Tree]) -> None:
        run, layout, experiment = self._run, self._layout, self._experiment
        whole: Any = PartitionSpec()
        runs: Any = layout.run_spec
        states: Any = layout.client_spec
        by_device: Any = layout.by_device
        state_specs = rounds.State(runs, states, runs, runs, runs)
        options = compiled.compiler_options(experiment, layout)

        def jitted(fn: Callable[..., Tree], others: Any, results: Any, **more: Any) -> Any:
            return jax.jit(layout.over(fn, others, results), compiler_options=options, **more)

        def init(data: Examples, inputs: Inputs) -> Training:
            return over_runs(lambda one: run.start(data, one), inputs)

        def play(data: Examples, inputs: Inputs, state: rounds.State, cohorts: Cohort) -> Tree:
            mine = layout.my_runs(cohorts, len(inputs.seed))
            return over_runs(lambda *one: run.play(data, *one), inputs, state, mine)

        def played(data: Examples, inputs: Inputs, reports: Tree, cohorts: Cohort) -> Played:
            mine = layout.my_runs(cohorts, len(inputs.seed))
            return over_runs(run.played, reports, mine)

        def local(tree: Tree) -> Tree:
            """Return what this device has of arrays [k_c, R, ...]."""
            return tree if layout.mesh is None else jax.tree.map(lambda leaf: leaf[0], tree)

        def apart(tree: Tree) -> Tree:
            return tree if layout.mesh is None else jax.tree.map(lambda leaf: leaf[None], tree)

        def add(
            data: Examples, inputs: Inputs, sums: Tree, server: Tree, size: Array, part: Tree
        ) -> Tree:
            def one(inputs: Inputs, *others: Tree) -> Tree:
                return run.add_part(data, inputs, *others)

            return apart(over_runs(one, inputs, local(sums), server, size, local(part)))

        def finish(data: Examples, inputs: Inputs, sums: Tree, sizes: Tree, stops: Tree) -> Outcome:
            def scores(sums: Tree, sizes: Tree) -> Tree:
                return {
                    name: evaluation.finish(sums[name], sizes[name], axis=run.axis) for name in sums
                }

            each = over_runs(scores, local(sums), sizes)
            return outcome(inputs, each, stops)

        def outcome(inputs: Inputs, scores: dict[str, Any], stops: Tree) -> Outcome:
            def one(inputs: Inputs, scores: dict[str, Any], stops: Tree) -> Outcome:
                held_out = run.grouped(inputs, scores["valid"], scores["test"])
                found = run.unplayed(inputs, held_out, stops)
                if "by_class" not in scores:
                    return found
                detailed = DetailedScores(run.joined(scores["by_class"]), scores["shards"])
                return found._replace(detailed=detailed)

            return over_runs(one, inputs, scores, stops)

        def known(data: Examples, inputs: Inputs, scores: dict[str, Any], stops: Tree) -> Outcome:
            return outcome(inputs, scores, stops)

        def score(seen: bool) -> Callable[..., Tree]:
            def scores(data: Examples, inputs: Inputs, state: rounds.State) -> Tree:
                def one(inputs: Inputs, state: rounds.State) -> evaluation.Scores:
                    return run.evaluate(data, inputs, state, inputs.train, seen)

                return over_runs(one, inputs, state)

            return scores

        def carried(states: Tree, before: Tree, source: Array) -> Tree:
            def leaf(new: Array, old: Array) -> Array:
                was = jax.vmap(lambda old, at: old[at])(old, jnp.maximum(source, 0))
                kept = source.reshape(*source.shape, *[1] * (new.ndim - 2)) >= 0
                return jnp.where(kept, was, new)

            return jax.tree.map(leaf, states, before)

        def first(server: Tree, hyper: Tree, who: Array) -> Tree:
            """Return the states of clients that have never attended, [R, n, ...]."""

            def one(server: Tree, hyper: Tree, who: Array) -> Tree:
                algorithm = experiment.algorithm(hyper)
                return jax.vmap(lambda who: algorithm.init_client(server, who))(who)

            return jax.vmap(one)(server, hyper, who)

        self._init = jitted(init, (), Training(state_specs, runs))
        self._play = jitted(play, (state_specs, whole), (state_specs, runs), donate_argnums=2)
        self._report = jitted(played, (runs, whole), runs)
        self._add = jitted(add, (by_device, runs, runs, by_device), by_device, donate_argnums=2)
        self._finish = jitted(finish, (by_device, runs, runs), runs)
        self._known = jitted(known, (runs, runs), runs)
        self._score = {seen: jitted(score(seen), (state_specs,), runs) for seen in (True, False)}
        self._carry = jax.jit(carried, donate_argnums=0)
        if layout.gathers_runs:
            self._everywhere = jax.jit(lambda tree: tree, out_shardings=layout.everywhere)
        self._first = jax.jit(first)

    # Parts of rounds.

    def _needed(self, first: int) -> Needed:
        cohorts = _rounds(self._cohorts, first, self.plan.num_rounds)
        return parts.needed(self._train, cohorts, self._layout, self.plan.room)

    def _read_rows(self, rows: np.ndarray, tree: Tree) -> Tree:
        """Read the rows of this process's devices and place them there beside a tree."""
        if self._layout.mesh is not None:
            rows = rows[self._layout.devices_here()]
        data = self._source.take(rows.reshape(-1))
        data = jax.tree.map(lambda leaf: leaf.reshape(*rows.shape, *leaf.shape[1:]), data)
        return self._layout.place_part(data, tree)

    def _read(self, first: int, before: _Before | None) -> _Part:
        """Read a part, and place it on the devices.

        Args:
          first: its first round.
          before: the clients of the part before it, as in `_Part`; None if there is none.
        """
        needed = self._needed(first)
        data, inputs = self._read_rows(needed.rows, self._inputs._replace(train=needed.shards))
        who = np.asarray(needed.shards.who)
        states: Tree = ()
        source = None
        if self._kept is not None:
            at = np.full(who.shape, -1, np.int32)
            if before is not None:
                for run, (old, count) in enumerate(zip(*before, strict=True)):
                    place = np.searchsorted(old[:count], who[run])
                    place = np.minimum(place, max(count - 1, 0))
                    at[run] = np.where(old[place] == who[run], place, -1) if count else -1
            states = self._states(who, needed.num_clients, at >= 0)
            source = self._layout.place_runs(jnp.asarray(at))
        return _Part(data, inputs, who, needed.num_clients, states, source)

    def _states(self, who: np.ndarray, counts: np.ndarray, is_known: np.ndarray) -> Tree:
        """Read the states of clients [R, c, ...] and place them on the devices.

        They are arbitrary where they are known, and of runs that this process does not train.
        """
        kept = self._kept
        assert kept is not None
        states = jax.tree.map(
            lambda leaf: _aligned((*who.shape, *leaf.shape), leaf.dtype), self._state_shape
        )
        never: list[tuple[int, np.ndarray]] = []
        for run in self._runs_here:
            there = np.flatnonzero(~is_known[run][: counts[run]])
            clients, of_run = who[run][there], min(run, self._num_runs - 1)
            known = kept.known(of_run, clients)
            row = jax.tree.map(lambda leaf, run=run: leaf[run], states)
            kept.read(of_run, clients[known], row, there[known])
            never.append((run, there[~known]))
        most = max(len(places) for _, places in never)
        for begin in range(0, most, _AT_ONCE):
            wanted = np.zeros((len(who), _AT_ONCE), np.int32)
            chunk = [(run, places[begin : begin + _AT_ONCE]) for run, places in never]
            for run, places in chunk:
                wanted[run, : len(places)] = who[run][places]
            new = jax.device_get(self._first(self._first_server, self._inputs.hyper, wanted))
            for run, places in chunk:
                for leaf, values in zip(*map(jax.tree.leaves, (states, new)), strict=True):
                    leaf[run, places] = values[run, : len(places)]
        return self._layout.place_clients(states)

    def _write(self, part: _Before, clients: Tree) -> None:
        """Write the states after a part.

        Args:
          part: its clients.
          clients: their states, those of all runs that this process writes.
        """
        states = jax.device_get(clients)
        for run in self._runs_written:
            count = part.num_clients[run]
            row = jax.tree.map(lambda leaf, run=run: leaf[run], states)
            assert self._kept is not None
            self._kept.write(run, part.who[run][:count], row)

    def _part(self, first: int) -> _Part:
        """Return the part that begins with a round, which is usually read already."""
        ahead, self._next = self._next, None
        if ahead is not None and ahead[0] == first:
            return ahead[1].result()
        return self._thread.submit(self._read, first, self._before).result()

    def _drained(self) -> None:
        """Wait until all states are written."""
        if self._writing is not None:
            self._writing.result()

    # The functions of `Program`.

    def _example_shapes(self) -> tuple[Examples, Inputs]:
        """Return the shapes of data and inputs of a part on one device."""
        room, num_runs = self.plan.room, len(self._train.size)
        data = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((room.on_device, *leaf.shape[1:]), leaf.dtype),
            self._source.shapes,
        )

        def shape(*axes: int) -> Any:
            return jax.ShapeDtypeStruct((num_runs, *axes), jnp.int32)

        num_clients = self._train.size.shape[1]
        shards = CompactShards(
            shape(room.rows), shape(room.clients), shape(num_clients), shape(room.clients)
        )
        return data, self._inputs._replace(train=shards)

    def _of_one(self) -> tuple[Examples, Inputs]:
        data, inputs = self._example_shapes()

        def leaf(each: Any) -> Any:
            if isinstance(each, jax.ShapeDtypeStruct):
                return jax.ShapeDtypeStruct(each.shape[1:], each.dtype)
            return each[0]

        return data, jax.tree.map(leaf, inputs)

    def _traffic(self, data: Examples, inputs: Inputs) -> list[Traffic]:
        alone = OneRun(self._experiment, devices.vmapped())
        return alone.traffic(*self._of_one())

    def _shapes(self, data: Examples, inputs: Inputs) -> Training:
        examples, one = self._of_one()
        alone = OneRun(self._experiment, devices.vmapped())
        training = jax.eval_shape(lambda x, i: alone.start(x, i), examples, one)

        def leaf(each: Any) -> Any:
            return jax.ShapeDtypeStruct((self._num_runs, *each.shape), each.dtype)

        found = jax.tree.map(leaf, training)
        clients: Tree = ()
        if jax.tree.leaves(found.state.clients):
            clients = Places.shapes(self._num_runs, self._train.size.shape[1])
        return found._replace(state=found.state._replace(clients=clients))

    def _open(self, training: Training) -> None:
        """Open the file of states, if clients keep any. training: as `_init` returns it."""
        self._state_shape = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape[2:], leaf.dtype), training.state.clients
        )
        if not jax.tree.leaves(self._state_shape):
            return
        self._first_server = jax.tree.map(
            lambda leaf: jnp.array(leaf, copy=True), self._all_runs(training.state.server)
        )
        if self.open_kept is None:
            raise UsageError("open_kept", None, "must be set, as clients keep states")
        self._kept = self.open_kept(self._state_shape)

    def _all_runs(self, tree: Tree) -> Tree:
        """Return arrays of runs, of which the last is repeated, on one device."""
        if self._layout.mesh is None:
            return tree
        return jax.tree.map(
            lambda leaf: parts.repeated(devices.on_host(leaf), self._layout),
            self._layout.gather_runs(tree),
        )

    def _begin(self, data: Examples, inputs: Inputs) -> Training:
        training = self._started(0)
        self._done = 0
        return training

    def _started(self, first: int) -> Training:
        """Read the part that begins with a round; return the training before the first round."""
        self._drop()
        part = self._thread.submit(self._read, first, None).result()
        training = self._init(part.data, part.inputs)
        self._open(training)
        self._next = first, _known(part)
        return training

    def _drop(self) -> None:
        """Forget what was read and written for another place in the run."""
        if self._next is not None:
            self._next[1].cancel()
        self._drained()
        if self._kept is not None:
            self._kept.close()
        self._next = self._before = self._writing = self._kept = None

    def _placed(self, training: Training) -> Training:
        self._done = int(np.asarray(training.state.round).reshape(-1)[0])
        if self._done >= self._cohorts.who.shape[1]:
            return training  # nothing is left to play
        begun = self._started(self._done)
        clients = begun.state.clients
        if self._kept is not None:
            self._kept.begin(training.state.clients)
            assert self._next is not None
            part = self._next[1].result()
            nowhere = np.zeros(part.who.shape, bool)
            clients = self._states(part.who, part.num_clients, nowhere)
        rest = self._layout.place_runs(training._replace(state=training.state._replace(clients=())))
        return rest._replace(state=rest.state._replace(clients=clients))

    def _stored(self, inputs: Inputs, training: Training) -> Training:
        self._drained()
        rest = self._layout.gather_runs(
            training._replace(state=training.state._replace(clients=()))
        )
        places: Tree = ()
        if self._kept is not None:
            places = self._places(self._kept)
        return rest._replace(state=rest.state._replace(clients=places))

    def _places(self, kept: Kept) -> Places:
        """Return the places in the file of the first process, when all is on the disk."""
        if self._leads:
            kept.flush()
            places = kept.places()
        else:
            shapes = Places.shapes(self._num_runs, self._train.size.shape[1])
            places = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
        return multihost_utils.broadcast_one_to_all(places)

    def _played(
        self, data: Examples, inputs: Inputs, training: Training, cohorts: Cohort
    ) -> tuple[Training, Played]:
        state, reports, length = training.state, [], self.plan.num_rounds
        end = self._done + cohorts.who.shape[1]
        for first in range(self._done, end, length):
            state, report = self._play_part(first, state)
            reports.append(report)
        self._done = end
        together = jax.tree.map(
            lambda *leaves: np.concatenate([devices.on_host(leaf) for leaf in leaves], 1), *reports
        )
        played = self._report((), self._inputs, together, cohorts)
        return training._replace(state=state), played

    def _play_part(self, first: int, state: rounds.State) -> tuple[rounds.State, Tree]:
        """Play a part, begin to read the next one, and begin to write its states."""
        part, before = self._part(first), state.clients
        if part.source is not None:
            # What was read is let go of before the rounds begin.
            clients = jax.block_until_ready(self._carry(part.states, before, part.source))
            state, part = state._replace(clients=clients), part._replace(states=())
        cohorts = _rounds(self.cohorts, first, self.plan.num_rounds)
        state, report = self._play(part.data, part.inputs, state, cohorts)
        self._before = _Before(part.who, part.num_clients)
        following = first + self.plan.num_rounds
        if following < self._cohorts.who.shape[1]:
            self._next = following, self._thread.submit(self._read, following, self._before)
        if self._kept is not None:
            self._drained()
            # The caller still holds the states before this part, which are written by now.
            jax.tree.map(lambda leaf: leaf.delete(), before)
            clients = state.clients
            if self._layout.gathers_runs:
                clients = self._everywhere(clients)
            self._writing = self._thread.submit(self._write, self._before, clients)
        return state, report

    def _evaluate(self, data: Examples, inputs: Inputs, training: Training) -> Outcome:
        if self._algorithm.personal:
            scores = {
                name: self._scores(name, each, training.state)
                for name, each in self._evaluated.items()
            }
            return self._known((), self._inputs, scores, training.stops)
        server = training.state.server
        sums = {name: self._sums(name, each, server) for name, each in self._evaluated.items()}
        sizes = {name: each.shards.size for name, each in self._evaluated.items()}
        return self._finish((), self._inputs, sums, sizes, training.stops)

    # Evaluations.

    def _evaluation(self, shards: ClientShards | SharedExamples) -> _Evaluated:
        found = parts.on_host(shards, self._layout)
        if not self._algorithm.personal:
            each = parts.batches(found, self._layout, self._run.batch_size, self._most_rows)
            return _Evaluated(found, False, each)
        is_shared = isinstance(shards, SharedExamples)
        # Clients that were never seen have no states on the host.
        of_client = 0 if is_shared else self._state_bytes
        most = found.size.max(0) * self._source.row_bytes + of_client * (found.size > 0).any(0)
        chunks, slots, first = [], 1, 0
        while first < len(most):
            total = np.cumsum(most[first:], dtype=np.int64) * len(found.size)
            fits = (total <= self._most_bytes) & (np.arange(len(total)) < _MOST_CLIENTS)
            last = first + max(1, int(fits.sum()))
            chunks.append((first, last))
            slots = max(slots, int((found.size[:, first:last] > 0).sum(1).max()))
            first = last
        cohorts = (_cohort_of(found, chunk, slots) for chunk in chunks)
        room = parts.room(found, cohorts, self._layout)
        return _Evaluated(found, is_shared, None, tuple(chunks), slots, room)

    def _in_turn(self, name: str, count: int, read: Callable[[int], Tree]) -> Iterator[Tree]:
        """The parts of an evaluation, each read while the one before is computed.

        If there is one alone, it stays on the devices.
        """
        if count == 1:
            if name not in self._resident:
                self._resident[name] = self._thread.submit(read, 0).result()
            yield self._resident[name]
            return
        ahead = self._thread.submit(read, 0)
        for number in range(count):
            found = ahead.result()
            if number + 1 < count:
                ahead = self._thread.submit(read, number + 1)
            yield found

    def _sums(self, name: str, each: _Evaluated, server: Tree) -> Tree:
        """Return the sums of `evaluation.add_part` over all parts."""
        batches = each.batches
        assert batches is not None
        shape = each.shards.size.shape
        if self._layout.mesh is not None:
            shape = self._layout.client_devices, *shape
        zeros = np.zeros(shape, np.float32)
        sums = self._layout.place_by_device((zeros, zeros.copy()))

        def read(number: int) -> tuple[Examples, evaluation.Part]:
            rows, part = batches.part(number)
            data, _ = self._read_rows(rows, ())
            return data, self._layout.place_by_device(part)

        for data, part in self._in_turn(name, batches.num_parts, read):
            sums = self._add(data, self._inputs, sums, server, each.shards.size, part)
        return sums

    def _scores(self, name: str, each: _Evaluated, state: rounds.State) -> evaluation.Scores:
        """Return the scores of a personal algorithm [R, N], client by client."""
        shards, shape = each.shards, each.shards.size.shape
        size: Any = shards.size
        score: Any = np.zeros(shape, np.float32)
        loss: Any = np.zeros(shape, np.float32)

        def read(number: int) -> tuple[Examples, Inputs, Needed]:
            cohorts = _cohort_of(shards, each.chunks[number], each.slots)
            needed = parts.needed(shards, cohorts, self._layout, each.room)
            data, inputs = self._read_rows(needed.rows, self._inputs._replace(train=needed.shards))
            return data, inputs, needed

        def states_of(needed: Needed) -> Tree:
            who = np.asarray(needed.shards.who)
            return self._states(who, needed.num_clients, np.zeros(who.shape, bool))

        keeps = self._kept is not None and not each.is_shared
        for data, inputs, needed in self._in_turn(name, len(each.chunks), read):
            states = self._thread.submit(states_of, needed).result() if keeps else ()
            now = state._replace(clients=states)
            found = self._score[not each.is_shared](data, inputs, now)
            who = np.asarray(needed.shards.who)
            scores, losses = devices.on_host(found.score), devices.on_host(found.loss)
            for run, count in enumerate(needed.num_clients):
                clients = who[run][:count]
                score[run, clients] = scores[run, :count]
                loss[run, clients] = losses[run, :count]
        return evaluation.Scores(score, loss, size)


def _cohort_of(shards: Shards, chunk: tuple[int, int], slots: int) -> Cohort:
    """Return a cohort of those consecutive clients that have examples, [R, 1, slots].

    Devices get rows by slots, but evaluate clients by their places in `Needed.shards`. The two are
    the same here, as no slot before a client's is empty and all parts have as many slots.
    """
    who: Any = np.zeros((len(shards.size), 1, slots), np.int32)
    present: Any = np.zeros(who.shape, bool)
    for run, size in enumerate(shards.size):
        clients = np.arange(*chunk)[size[slice(*chunk)] > 0]
        who[run, 0, : len(clients)], present[run, 0, : len(clients)] = clients, True
    return Cohort(who, present, np.zeros_like(who))


def _aligned(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Return zeros that a CPU device shares with the host; others it would copy."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    room = np.zeros(size + _ALIGNMENT, np.uint8)
    first = -room.ctypes.data % _ALIGNMENT
    return room[first : first + size].view(dtype).reshape(shape)


def _as_compiled(fn: Any) -> Any:
    """Return a function that stands for a compiled one."""
    return fn


def _known(value: Any) -> Future[Any]:
    """Return a future whose result is known."""
    future: Future[Any] = Future()
    future.set_result(value)
    return future
