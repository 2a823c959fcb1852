"""Which clients and rows a part of a run needs: parts of rounds, and parts of an evaluation.

All parts of a run have the same shapes, known ahead from the schedule. Axis letters: R runs, of
which the last is repeated until devices share them evenly; k_r x k_c devices that share runs x
clients; c clients and l rows of a run in a part; m rows on a device; N shards.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_inv import devices, evaluation
from fedjax_inv.data.federation import rows_of
from fedjax_inv.devices import ClientShards, CompactShards, Layout, SharedExamples
from fedjax_inv.types import Cohort


class Room(NamedTuple):
    """The shapes of the parts of a run."""

    clients: int  # c
    rows: int  # l
    on_device: int  # m


class Needed(NamedTuple):
    """The clients and rows of a part."""

    shards: CompactShards
    rows: np.ndarray  # [k_r k_c, m] of the examples; on one device [m]; those beyond are row 0
    num_clients: np.ndarray  # [R] how many of `shards.who` are clients


class Shards(NamedTuple):
    """The shards of R runs on the host."""

    order: np.ndarray  # [R, L]
    start: np.ndarray  # [R, N]
    size: np.ndarray  # [R, N]


def on_host(shards: ClientShards | CompactShards | SharedExamples, layout: Layout) -> Shards:
    """Return shards on the host, runs repeated and shared shards cut as the layout needs it."""
    if isinstance(shards, SharedExamples):
        shards = devices.cut(jax.tree.map(np.asarray, shards), layout.num_parts)
    return Shards(*(repeated(np.asarray(leaf), layout) for leaf in shards[:3]))


def repeated(leaf: np.ndarray, layout: Layout) -> np.ndarray:
    """Repeat the last of the runs [R, ...] until the devices share them evenly."""
    more = -len(leaf) % layout.run_devices
    return leaf if not more else np.concatenate([leaf, *[leaf[-1:]] * more])


def room(shards: Shards, parts: Iterator[Cohort], layout: Layout) -> Room:
    """Return the room that is enough for each of the parts.

    Args:
      shards: those of the clients.
      parts: the cohorts of each part on the host, [R, T, S].
      layout: the devices.
    """
    most = Room(1, 1, 1)
    for cohorts in parts:
        by_run = [_present(shards.size[run], cohorts, run) for run in range(len(shards.size))]
        held = [np.unique(who) for who in by_run]
        sizes = [shards.size[run] for run in range(len(held))]
        rows = max(int(sizes[run][who].sum()) for run, who in enumerate(held))
        clients = max(len(who) for who in held)
        on_device = max(
            sum(int(sizes[run][who].sum()) for run, who in block)
            for block in _blocks(shards, cohorts, layout)
        )
        most = Room(*map(max, most, (clients, rows, on_device)))
    return most


def _present(size: np.ndarray, cohorts: Cohort, run: int) -> np.ndarray:
    """Return the clients of a run that take part, with repetitions."""
    who = np.asarray(cohorts.who[run])
    who = who[np.asarray(cohorts.present[run])]
    return who[size[who] > 0]


def _blocks(
    shards: Shards, cohorts: Cohort, layout: Layout
) -> Iterator[list[tuple[int, np.ndarray]]]:
    """For each device, its runs and the clients in its slots."""
    num_runs, number = len(shards.size), layout.client_devices
    runs, slots = num_runs // layout.run_devices, np.shape(cohorts.who)[2]
    share = devices.clients_per_device(slots, number, layout.lanes) if number > 1 else slots
    for block in range(layout.run_devices):
        for device in range(number):
            mine = slice(device * share, (device + 1) * share)
            yield [
                (run, np.unique(_present(shards.size[run], _slots(cohorts, mine), run)))
                for run in range(block * runs, (block + 1) * runs)
            ]


def _slots(cohorts: Cohort, mine: slice) -> Cohort:
    return jax.tree.map(lambda leaf: np.asarray(leaf)[:, :, mine], cohorts)


def needed(shards: Shards, cohorts: Cohort, layout: Layout, room: Room) -> Needed:
    """Return the clients and rows of a part.

    Args:
      shards: those of the clients.
      cohorts: the cohorts of the part, [R, T, S]; the clients that are present have examples here.
      layout: the devices. With several, a client's rows are on those devices in whose slots it is.
      room: enough for the part.
    """
    num_runs, num_clients = shards.size.shape
    held = [np.unique(_present(shards.size[run], cohorts, run)) for run in range(num_runs)]
    who = np.full((num_runs, room.clients), num_clients, np.int32)
    start = np.zeros((num_runs, room.clients), np.int32)
    for run, clients in enumerate(held):
        size = shards.size[run][clients]
        who[run, : len(clients)], start[run, : len(clients)] = clients, np.cumsum(size) - size
    order = np.zeros((layout.client_devices, num_runs, room.rows), np.int32)
    rows = np.zeros((layout.run_devices * layout.client_devices, room.on_device), np.int64)
    for device, block in enumerate(_blocks(shards, cohorts, layout)):
        at = 0
        for run, clients in block:
            size, begin = shards.size[run][clients], shards.start[run][clients]
            mine = rows_of(shards.order[run], begin, size)
            place = rows_of(
                np.arange(room.rows), start[run][np.searchsorted(held[run], clients)], size
            )
            order[device % layout.client_devices, run, place] = at + np.arange(len(mine))
            rows[device, at : at + len(mine)] = mine
            at += len(mine)
    counts = np.array([len(clients) for clients in held])
    if layout.mesh is None:
        order, rows = order[0], rows[0]
    arrays: tuple[Any, ...] = (order, start, shards.size, who)
    return Needed(CompactShards(*arrays), rows, counts)


class Batches(NamedTuple):
    """The common batches of an evaluation on each device (`evaluation.add_part`)."""

    shards: Shards
    layout: Layout
    starts: list[list[np.ndarray]]  # [R][k_c] the first example of each batch, and the end
    ends: list[list[np.ndarray]]  # [R][k_c] the end of the examples of each of a device's shards
    at_once: int  # batches of a part
    batch_size: int

    @property
    def num_parts(self) -> int:
        """How many parts there are, at least one."""
        most = max(len(each) - 1 for of_run in self.starts for each in of_run)
        return max(1, -(-most // self.at_once))

    def part(self, number: int) -> tuple[np.ndarray, evaluation.Part]:
        """Return (rows as in `Needed`, the part with leaves [k_c, R], on one device [R])."""
        layout, (num_runs, _) = self.layout, self.shards.size.shape
        runs, room = num_runs // layout.run_devices, self.at_once * self.batch_size
        number_of = layout.run_devices * layout.client_devices
        rows = np.zeros((number_of, runs * room), np.int64)
        leaves = np.zeros((3, layout.client_devices, num_runs), np.int32)
        for run in range(num_runs):
            block, at = run // runs, run % runs * room
            for device in range(layout.client_devices):
                starts = self.starts[run][device]
                first, last = np.minimum(
                    np.array([number, number + 1]) * self.at_once, len(starts) - 1
                )
                begin, end = starts[first], starts[last]
                mine = self._rows(run, device, begin, end)
                rows[block * layout.client_devices + device, at : at + len(mine)] = mine
                leaves[:, device, run] = first, last, begin - at
        if layout.mesh is None:
            rows, leaves = rows[0], leaves[:, 0]
        return rows, evaluation.Part(*leaves)

    def _rows(self, run: int, device: int, begin: int, end: int) -> np.ndarray:
        """Return the rows of the examples begin..end - 1 of a device."""
        ends = self.ends[run][device]
        if begin == end:
            return np.zeros(0, np.int64)
        first, last = np.searchsorted(ends, [begin, end - 1], side="right")
        at = _first_of(self.shards.size.shape[1], device, self.layout)
        clients = np.arange(at + first, at + last + 1)
        size, start = (leaf[run][clients] for leaf in (self.shards.size, self.shards.start))
        rows = rows_of(self.shards.order[run], start, size)
        before = ends[first] - size[0]
        return rows[begin - before : end - before]


def _first_of(number: int, device: int, layout: Layout) -> int:
    return devices.first_client(device, number, layout.client_devices, layout.lanes)


def batches(shards: Shards, layout: Layout, batch_size: int, most_rows: int) -> Batches:
    """Return the common batches of an evaluation.

    Args:
      shards: N shards of each run.
      layout: the devices.
      batch_size: B.
      most_rows: about how many rows a device may hold.
    """
    num_runs, number = shards.size.shape
    k, lanes = layout.client_devices, layout.lanes
    share = devices.clients_per_device(number, k, lanes)
    in_lane = devices.lane_size(number, k, lanes)
    starts: list[list[np.ndarray]] = []
    ends: list[list[np.ndarray]] = []
    for run in range(num_runs):
        starts.append([])
        ends.append([])
        for device in range(k):
            first = _first_of(number, device, layout)
            end = np.cumsum(shards.size[run][first : first + share], dtype=np.int64)
            lane_ends = end[in_lane - 1 :: in_lane]
            if len(end) % in_lane:
                lane_ends = np.append(lane_ends, end[-1])
            lane_firsts = np.concatenate([[0], lane_ends[:-1]])[: len(lane_ends)]
            each = [
                np.arange(begin, stop, batch_size)
                for begin, stop in zip(lane_firsts, lane_ends, strict=True)
            ]
            last = lane_ends[-1:] if len(lane_ends) else np.zeros(1)
            starts[-1].append(np.concatenate([*each, last]).astype(np.int64))
            ends[-1].append(end)
    most = max(len(each) - 1 for of_run in starts for each in of_run)
    runs = num_runs // layout.run_devices
    at_once = max(1, min(most, most_rows // (batch_size * runs)))
    return Batches(shards, layout, starts, ends, at_once, batch_size)
