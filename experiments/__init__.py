"""Experiments: binaries in the root, and the rooms of modules that they share."""

import os
import signal
import sys
from types import FrameType


def _interrupt(number: int, frame: FrameType | None) -> None:
    del frame
    os.write(2, b"\ninterrupted\n")
    os._exit(128 + number)


# Set here, because the imports of `python -m experiments.NAME` take seconds. Other programs that
# import this package handle interrupts themselves.
if sys.argv[:1] == ["-m"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _interrupt)
