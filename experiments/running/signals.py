"""Ctrl-C and SIGTERM: a wish to stop at the end of a segment."""

import os
import signal
import sys
import threading
from types import FrameType

from tqdm import tqdm


class Stopped(Exception):
    """A run stopped on demand, with a checkpoint written."""


class Stop:
    """While entered, SIGINT and SIGTERM ask for a stop at the end of the segment.

    A second one ends the process at once, as a kill does, which run folders survive. A thread
    listens, as handlers have to wait until a computation comes back to Python.
    """

    signal = 0  # which one came, 0 if none did

    def __enter__(self) -> "Stop":
        self._heard, told = os.pipe()
        os.set_blocking(told, False)
        self._before = {s: signal.signal(s, _pass) for s in (signal.SIGINT, signal.SIGTERM)}
        self._told_before, self._told = signal.set_wakeup_fd(told), told
        threading.Thread(target=self._listen, daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        signal.set_wakeup_fd(self._told_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._told)  # which ends the thread

    def _listen(self) -> None:
        while number := os.read(self._heard, 1):
            self._ask(number[0])
        os.close(self._heard)

    def _ask(self, number: int) -> None:
        if self.signal:
            os.write(2, b"\nstopped at once; add --resume to continue from the last checkpoint\n")
            os._exit(128 + number)
        self.signal = number
        told = "stopping at the end of this segment; press Ctrl-C again to stop at once"
        tqdm.write(told, file=sys.stderr)


def _pass(number: int, frame: FrameType | None) -> None:
    del number, frame
