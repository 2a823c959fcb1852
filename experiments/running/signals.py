"""Ctrl-C and SIGTERM: a wish to stop at the end of a segment."""

import signal
from types import FrameType

from tqdm import tqdm


class Stopped(Exception):
    """A run stopped on demand, with a checkpoint written."""


class Stop:
    """While entered, SIGINT and SIGTERM ask for a stop at the end of the segment.

    A second SIGINT interrupts at once.
    """

    signal = 0  # which one came, 0 if none did

    def __enter__(self) -> "Stop":
        self._before = {s: signal.signal(s, self._ask) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self.signal:
            raise KeyboardInterrupt
        self.signal = number
        tqdm.write("stopping at the end of this segment; press Ctrl-C again to stop at once")
