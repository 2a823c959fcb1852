"""The states of clients in a file on the host, for runs whose devices have room for some alone.

A record holds the state of one client. A client's new state replaces its record, unless a
checkpoint refers to that; then it goes into another record. So a checkpoint holds the places of
the records alone, and no copy of them. Axis letters: R runs, n clients.
"""

import functools
import math
import os
import struct
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import IO, Any, NamedTuple

import jax
import numpy as np

from fedjax_inv import checks
from fedjax_inv.checks import UsageError
from fedjax_inv.types import Tree

_MAGIC = b"fedjax_inv states 1\n"
ID_BYTES = 16  # by which a file is known
_MOST_PARTS = 1000  # that one call of the system reads or writes; it takes 1024
_ENDING = struct.Struct("<III")  # of a record: CRC-32, run, client


class Places(NamedTuple):
    """Where the states of all clients lie in a file."""

    record: Any  # [R, C] int32, from 1; 0 for a client that has never attended
    file: Any  # [R, 16] uint8, the number by which the file is known, repeated

    @classmethod
    def shapes(cls, num_runs: int, num_clients: int) -> "Places":
        """Return the shapes for R runs of C clients."""
        return cls(
            jax.ShapeDtypeStruct((num_runs, num_clients), np.int32),
            jax.ShapeDtypeStruct((num_runs, ID_BYTES), np.uint8),
        )


class Kept:
    """The states of the clients that have attended.

    Attributes:
      path: the file's path, for errors.
    """

    def __init__(
        self,
        file: IO[bytes],
        like: Tree,
        shape: tuple[int, int],
        *,
        reuses: int = 0,
        before: Sequence[Places] = (),
    ) -> None:
        """Open a file of states; an empty one is begun.

        Args:
          file: the file, opened for reading and writing ("r+b"), or for reading alone.
          like: the shapes of one client's state.
          shape: (R, C).
          reuses: after how many further calls of `saved` the records of a call may be written
            over; 0: never.
          before: the places in the checkpoints that are there, which must stay.

        Raises:
          UsageError: if the file is no file of such states.
        """
        self.path = str(file.name)
        self._file, self._like, self._shape = file, like, shape
        sizes = (math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(like))
        self._length = sum(sizes) + _ENDING.size
        self._begins = len(_MAGIC) + ID_BYTES + 8
        self._id = self._header()
        self._where = np.zeros(shape, np.int32)
        self._reuses = reuses
        self._saves: deque[list[np.ndarray]] = deque(maxlen=reuses + 1)
        self._recent: list[np.ndarray] = []
        self._saves.append([np.asarray(places.record) for places in before])
        self._served: list[np.ndarray] = []
        self._free: list[int] = []
        # A record that was written in part may be the last; of a file that was cut, `begin` tells.
        there = -(-max(0, self._size() - self._begins) // self._length)
        self._count = max([there, *(int(each.max(initial=0)) for each in self._saves[0])])
        self._pinned = np.zeros(self._count + 1, bool)
        self._sort()

    def _size(self) -> int:
        return os.fstat(self._file.fileno()).st_size

    def _header(self) -> bytes:
        """Return the number of the file, from its first bytes, which are written if it is empty."""
        length = struct.pack("<Q", self._length)
        if self._size() < self._begins and self._file.writable():
            self._pwrite([memoryview(_MAGIC + os.urandom(ID_BYTES) + length)], 0)
        head = os.pread(self._file.fileno(), self._begins, 0)
        if len(head) < self._begins or not head.startswith(_MAGIC) or not head.endswith(length):
            raise UsageError(self.path, ..., "holds no states of this run's clients")
        return head[len(_MAGIC) : -8]

    def _pwrite(self, parts: list[memoryview], at: int) -> None:
        try:
            _moved(functools.partial(os.pwritev, self._file.fileno()), parts, at)
        except OSError as error:
            raise OSError(error.errno, error.strerror, self.path) from None

    def known(self, run: int, who: np.ndarray) -> np.ndarray:
        """Return which of the clients have a state, [n] bool."""
        return self._where[run, who] > 0

    def read(self, run: int, who: np.ndarray, into: Tree, at: np.ndarray) -> None:
        """Read the states of clients that have one.

        Args:
          run: the number of the run.
          who: [n] the clients.
          into: arrays [m, ...] of NumPy that take the states.
          at: [n] the places in them.

        Raises:
          UsageError: for a record that is not there, or that is damaged.
        """
        for client, place in zip(np.asarray(who).tolist(), np.asarray(at).tolist(), strict=True):
            parts, ending = self._parts(into, place), bytearray(_ENDING.size)
            offset = self._begins + (int(self._where[run, client]) - 1) * self._length
            read = functools.partial(os.preadv, self._file.fileno())
            is_whole = _moved(read, [*parts, memoryview(ending)], offset)
            if not is_whole or bytes(ending) != _ending(parts, run, client):
                text = f"is damaged: the state of client {client} is not there"
                raise UsageError(self.path, ..., f"{text}; put a copy in its place")

    def write(self, run: int, who: np.ndarray, states: Tree) -> None:
        """Write the states of clients.

        Args:
          run: the number of the run.
          who: [n] the clients.
          states: arrays [m, ...] of NumPy whose first n entries are their states.

        Raises:
          OSError: if the disk is full.
        """
        for index, client in enumerate(np.asarray(who).tolist()):
            parts = self._parts(states, index)
            record = int(self._where[run, client])
            if record == 0 or self._pinned[record]:
                record = self._new()
            at = self._begins + (record - 1) * self._length
            self._pwrite([*parts, memoryview(_ending(parts, run, client))], at)
            self._where[run, client] = record

    @staticmethod
    def _parts(states: Tree, index: int) -> list[memoryview]:
        """Return the bytes of a state, leaf by leaf, that lie in arrays [m, ...] at an index."""
        rows = (leaf[index : index + 1] for leaf in jax.tree.leaves(states))
        return [memoryview(row.reshape(-1).view(np.uint8)) for row in rows if row.size]

    def _new(self) -> int:
        """Return a record that nothing refers to."""
        if self._free:
            return self._free.pop()
        self._count += 1
        if self._count >= len(self._pinned):
            more = max(1024, len(self._pinned))
            self._pinned = np.concatenate([self._pinned, np.zeros(more, bool)])
        return self._count

    def places(self) -> Places:
        """Return the places of all states, which stay as they are until `saved` is called."""
        record = self._where.copy()
        self._recent.append(record)
        self._pinned[record] = True
        return Places(record, np.tile(np.frombuffer(self._id, np.uint8), (self._shape[0], 1)))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def flush(self) -> None:
        """Wait until all states are on the disk."""
        os.fsync(self._file.fileno())

    def saved(self, places: Places, served: Places | None = None) -> None:
        """Note that a checkpoint refers to places.

        Args:
          places: those of all clients, from `places`.
          served: those of a selected state, which the following checkpoints refer to as well.
        """
        self._served = [] if served is None else [np.asarray(served.record)]
        if self._reuses:
            self._saves.append([np.asarray(places.record), *self._served])
            self._recent = []
            self._sort()

    def _sort(self) -> None:
        """Find the records that must stay, and those that are free."""
        self._pinned[:] = False
        for record in [*self._recent, *self._served, *(each for s in self._saves for each in s)]:
            self._pinned[record.reshape(-1)] = True
        if not self._reuses:
            self._pinned[: self._count + 1] = True
        used = self._pinned[: self._count + 1].copy()
        used[self._where.reshape(-1)] = True
        self._free = (np.flatnonzero(~used[1:]) + 1).tolist()

    def begin(self, places: Places) -> None:
        """Go on from a checkpoint.

        Args:
          places: those in the checkpoint.

        Raises:
          UsageError: if they are of another file, or if records are not there any more.
        """
        record = np.array(places.record, np.int32)
        checks.integers("places", record, 0, ndim=2)
        # Of a run without a selected state all places are 0.
        files = {row.tobytes() for row in np.asarray(places.file) if row.any()}
        if record.shape != self._shape or files - {self._id}:
            text = "is of another run than the checkpoint; put this one's in its place"
            raise UsageError(self.path, ..., text)
        end = self._begins + int(record.max(initial=0)) * self._length
        if self._size() < end:
            text = f"has {self._size()} bytes, must have {end} or more; put a copy in its place"
            raise UsageError(self.path, ..., text)
        self._where = record
        self._sort()


def _moved(move: Callable[[list[memoryview], int], int], parts: list[memoryview], at: int) -> bool:
    """Read or write parts that follow each other from an offset on; return whether all moved."""
    while parts:
        count = move(parts[:_MOST_PARTS], at)
        if count == 0:
            return False
        at += count
        while parts and count >= len(parts[0]):
            count -= len(parts[0])
            parts = parts[1:]
        if count:
            parts = [parts[0][count:], *parts[1:]]
    return True


def _ending(parts: Sequence[memoryview], run: int, client: int) -> bytes:
    """Return the end of a record with these bytes."""
    checksum = 0
    for part in parts:
        checksum = zlib.crc32(part, checksum)
    return _ENDING.pack(checksum, run, client)
