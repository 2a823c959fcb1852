"""A program whose examples stay on the host, but for those that the next rounds need.

The cohorts of all rounds are known before the first one. So the rounds are played in parts: while
the devices compute a part, a thread reads the examples of the next part's cohorts and places them.
The states of all clients stay on the devices. An evaluation reads all of its examples, a part after
the other.

All parts have the same shapes, so nothing is compiled twice. Axis letters: R runs, each of N
shards; l rows of a run in a part.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_inv import devices, types
from fedjax_inv.checks import UsageError
from fedjax_inv.data.federation import rows_of
from fedjax_inv.data.stored import Stored
from fedjax_inv.devices import ClientShards, Layout
from fedjax_inv.evaluation import Scores
from fedjax_inv.inputs import Inputs
from fedjax_inv.one_run import Outcome, Played, Training
from fedjax_inv.program import Program
from fedjax_inv.types import Tree

PART_BYTES = 2**30  # of the examples of a part


class Streamed:
    """A program for examples that stay on the host, with the methods of a `Program`.

    `data` are not looked at, and `rounds` takes the cohorts that follow those of the rounds before.
    In the inputs nothing is watched, and the layout has `own=False`: each device holds the examples
    of a whole part, and two parts at once. `rounds` plays `every` rounds, and a part is a divisor
    of that many whose examples fit into `part_bytes`; one round may need more.
    """

    def __init__(
        self,
        program: Program,
        source: Stored,
        inputs: Inputs,
        cohorts: types.Cohort,
        *,
        every: int,
        part_bytes: int = PART_BYTES,
    ) -> None:
        """Stream the rows of a source; nothing is read yet."""
        if program.layout.own:
            raise UsageError("layout", ..., "must have own=False")
        if inputs.watched is not None:
            raise UsageError("inputs", ..., "must have no watched examples")
        self._program = program
        most = max(1, part_bytes // (source.row_bytes * len(inputs.seed)))  # rows of a run
        reader = _Reader(source, inputs, program.layout)
        self._training = _TrainingParts(reader, inputs, cohorts, every, most)
        self._evaluation = _EvaluationParts(reader, inputs, program.layout.client_devices, most)
        self._start = self._training.without_rows()

    def init(self, data: types.Examples, inputs: Inputs) -> Training:
        """Return the training before the first round."""
        return self._program.init(*self._start)

    def rounds(
        self, data: types.Examples, inputs: Inputs, training: Training, cohorts: types.Cohort
    ) -> tuple[Training, Played]:
        """Play the next rounds, part by part."""
        parts = self._training
        done = int(np.ravel(training.state.round)[0])
        reports = []
        for at in range(0, cohorts.who.shape[1], parts.length):
            part = parts.take(done + at)
            jax.block_until_ready(training)  # or parts would pile up on the devices
            now = _rounds(cohorts, at, parts.length)
            training, played = self._program.rounds(*part, training, now)
            parts.read_ahead(done + at + parts.length)
            reports.append(played)
        if len(reports) == 1:
            return training, reports[0]
        return training, jax.tree.map(lambda *leaves: np.concatenate(leaves, 1), *reports)

    def evaluate(self, data: types.Examples, inputs: Inputs, training: Training) -> Outcome:
        """Evaluate part by part, and return the outcome of no rounds."""
        parts = self._evaluation
        evaluate = self._program.evaluate
        if parts.count == 1:
            return evaluate(*parts.first, training)
        outcomes = (evaluate(*part, training) for part in parts.in_turn())
        return _together([jax.device_get(outcome) for outcome in outcomes])

    def segment(
        self, data: types.Examples, inputs: Inputs, training: Training, cohorts: types.Cohort
    ) -> tuple[Training, Outcome]:
        """Play rounds, then evaluate."""
        training, played = self.rounds(data, inputs, training, cohorts)
        outcome = self.evaluate(data, inputs, training)
        return training, outcome._replace(**played._asdict())

    def shapes(self, data: types.Examples, inputs: Inputs) -> Training:
        """Return the shapes of stored training."""
        return self._program.shapes(*self._start)

    def stored(self, inputs: Inputs, training: Training) -> Training:
        """Return training with the states of all clients, as `Program.stored` does."""
        return self._program.stored(inputs, training)

    def placed(self, training: Training) -> Training:
        """Return stored training as the program expects it."""
        return self._program.placed(training)

    def gathered(self, tree: Tree) -> Tree:
        """Return arrays [R, ...] of all devices on the host."""
        return self._program.gathered(tree)


def _rounds(cohorts: types.Cohort, first: int, count: int) -> types.Cohort:
    return jax.tree.map(lambda leaf: leaf[:, first : first + count], cohorts)


def _together(outcomes: list[Outcome]) -> Outcome:
    """Return the outcome of an evaluation from those of its parts, on the host."""

    def joined(first: Tree, *others: Tree) -> Tree:
        if not isinstance(first, Scores):
            return first
        scores = first, *others
        size = sum(each.size for each in scores)
        share = [each.size / np.maximum(size, 1) for each in scores]
        score, loss = (
            sum(map(np.multiply, share, values)).astype(np.float32)
            for values in zip(*((each.score, each.loss) for each in scores), strict=True)
        )
        if first.sums is None:
            return Scores(score, loss, size)
        sums = dataclasses.replace(first.sums, values=sum(each.sums.values for each in scores))
        return Scores(sums.score, loss, size, sums)

    return jax.tree.map(joined, *outcomes, is_leaf=lambda node: isinstance(node, Scores))


_HELD_OUT = ("valid", "test", "detailed", "unseen", "own_tests")  # fields of inputs


class _Shards(NamedTuple):
    """The shards of R runs on the host."""

    order: np.ndarray  # [R, L]
    start: np.ndarray  # [R, N]
    size: np.ndarray  # [R, N]


class _Rows:
    """The rows of a part, run by run.

    Attributes:
      numbers: [R, l] rows of the examples; those that are not filled are row 0.
      order: [R, l] where they lie in the part.
    """

    def __init__(self, num_runs: int, room: int) -> None:
        self.numbers = np.zeros((num_runs, room), np.int64)
        self.order: Any = np.arange(num_runs * room, dtype=np.int32).reshape(num_runs, room)
        self._filled = [0] * num_runs

    def add(self, run: int, order: np.ndarray, start: np.ndarray, size: np.ndarray) -> np.ndarray:
        """Add the rows of a run's shards, and return where these begin in `order` now."""
        rows = rows_of(order, start, size)
        at = self._filled[run]
        self._filled[run] = at + len(rows)
        self.numbers[run, at : at + len(rows)] = rows
        return at + np.cumsum(size) - size


_Part = tuple[types.Examples, Inputs]


class _Reader:
    """Reads the rows of parts in one thread, and places them on the devices."""

    def __init__(self, source: Stored, inputs: Inputs, layout: Layout) -> None:
        self._source = source
        self._layout = layout
        none: Any = ()
        others = inputs._replace(train=none, valid=none, test=none, detailed=None, unseen={})
        others = others._replace(own_tests={})
        # From the host, or a part would wait for the rounds on the devices that compute them.
        self._inputs = others if layout.mesh is None else jax.device_get(others)
        self._thread = ThreadPoolExecutor(1, "reads-examples")

    def begin(self, read: Callable[[int], _Part], at: int) -> Future[_Part]:
        """Begin to read a part in the thread."""
        return self._thread.submit(read, at)

    def placed(self, rows: np.ndarray, **shards: Tree) -> _Part:
        """Read rows and place them beside the inputs with these shards."""
        data = self._source.take(rows.reshape(-1))
        inputs = self._inputs._replace(**shards)
        if self._layout.mesh is None:
            return jax.device_put((data, inputs))
        return self._layout.place(data, inputs)


class _TrainingParts:
    """The parts of all rounds: the examples of the clients that attend.

    Attributes:
      length: the rounds of a part.
    """

    def __init__(
        self, reader: _Reader, inputs: Inputs, cohorts: types.Cohort, every: int, most: int
    ) -> None:
        """most: rows of a run in a part of several rounds."""
        self._reader = reader
        self._cohorts = cohorts
        self._shards = _Shards(*map(np.asarray, inputs.train[:3]))
        self._ahead: tuple[int, Future[_Part]] | None = None  # of the round that is named
        for self.length in (n for n in range(every, 0, -1) if every % n == 0):
            self._room = self._most_rows(self.length)
            if self._room <= most:
                break

    def _most_rows(self, length: int) -> int:
        """Return the most rows of a run in a part of so many rounds."""
        firsts = range(0, self._cohorts.who.shape[1], length)
        sizes = (
            size[self._present(run, first, length)].sum()
            for run, size in enumerate(self._shards.size)
            for first in firsts
        )
        return max(1, int(max(sizes)))

    def _present(self, run: int, first: int, length: int) -> np.ndarray:
        """Return the clients of a run that attend rounds."""
        of_run = _rounds(self._cohorts, first, length)
        return np.unique(np.asarray(of_run.who[run])[np.asarray(of_run.present[run])])

    def without_rows(self) -> _Part:
        """Return one example, and the clients without their rows."""
        order = np.zeros((len(self._shards.size), 1), np.int32)
        start = np.zeros_like(self._shards.start)
        return self._placed(np.zeros(1, int), order, start)

    def take(self, first: int) -> _Part:
        """Return the part that begins with a round, which is usually read already."""
        ahead, self._ahead = self._ahead, None
        if ahead is None or ahead[0] != first:
            return self._reader.begin(self._read, first).result()
        return ahead[1].result()

    def read_ahead(self, first: int) -> None:
        """Begin to read the part that begins with a round, if there is one."""
        if first < self._cohorts.who.shape[1]:
            self._ahead = first, self._reader.begin(self._read, first)

    def _read(self, first: int) -> _Part:
        rows = _Rows(len(self._shards.size), self._room)
        begin = np.zeros(self._shards.start.shape, np.int32)
        for run, (order, start, size) in enumerate(zip(*self._shards, strict=True)):
            who = self._present(run, first, self.length)
            begin[run, who] = rows.add(run, order, start[who], size[who])
        return self._placed(rows.numbers, rows.order, begin)

    def _placed(self, rows: np.ndarray, order: Any, start: Any) -> _Part:
        size: Any = self._shards.size
        return self._reader.placed(rows, train=ClientShards(order, start, size))


class _EvaluationParts:
    """The parts of an evaluation.

    Attributes:
      count: how many there are.
    """

    def __init__(self, reader: _Reader, inputs: Inputs, blocks: int, most: int) -> None:
        """blocks: of shards, one for each device. most: rows of a run in a part."""
        self._reader = reader
        self._blocks = blocks
        held_out = [getattr(inputs, name) for name in _HELD_OUT]
        shards, self._structure = jax.tree.flatten(held_out, is_leaf=devices.is_shards)
        self._kinds = [type(each) for each in shards]
        self._shards = [_Shards(*map(np.asarray, each)) for each in shards]
        totals = [int(each.size.sum(1, dtype=np.int64).max()) for each in self._shards]
        self.count = max(1, -(-sum(totals) // most))
        # Each block may have a row more than its share.
        self._room = sum(total // self.count + blocks for total in totals)

    def in_turn(self) -> Iterator[_Part]:
        """Return all parts, each read while the one before is computed."""
        ahead = self._reader.begin(self._read, 0)
        for number in range(1, self.count + 1):
            part = ahead.result()
            if number < self.count:
                ahead = self._reader.begin(self._read, number)
            yield part

    @functools.cached_property
    def first(self) -> _Part:
        """The first part. It stays on the devices."""
        return self._reader.begin(self._read, 0).result()

    def _read(self, number: int) -> _Part:
        rows = _Rows(len(self._shards[0].size), self._room)
        held_out = []
        for kind, each in zip(self._kinds, self._shards, strict=True):
            skip, taken = _window(each.size, number, self.count, self._blocks)
            begin: Any = np.zeros(taken.shape, np.int32)
            for run, order in enumerate(each.order):
                begin[run] = rows.add(run, order, each.start[run] + skip[run], taken[run])
            held_out.append(kind(rows.order, begin, taken))
        shards = dict(zip(_HELD_OUT, jax.tree.unflatten(self._structure, held_out), strict=True))
        return self._reader.placed(rows.numbers, **shards)


def _window(size: np.ndarray, number: int, count: int, blocks: int) -> tuple[Any, Any]:
    """Return one of `count` parts of shards of sizes [R, N]: (rows to skip, rows to take), [R, N].

    A part has rows that follow each other in each block of shards. Devices evaluate a block each,
    so all of them have as much to do.
    """
    num_runs, num_shards = size.shape
    more = -num_shards % blocks
    padded = np.pad(size, ((0, 0), (0, more))).reshape(num_runs, blocks, -1)
    end = np.cumsum(padded, -1, dtype=np.int64)
    first, total = end - padded, end[..., -1:]
    begin, until = (
        np.clip(total * at // count - first, 0, padded).reshape(num_runs, -1)[:, :num_shards]
        for at in (number, number + 1)
    )
    return begin, (until - begin).astype(np.int32)
