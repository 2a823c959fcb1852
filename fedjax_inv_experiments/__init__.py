"""Experiments: binaries in the root, and the rooms of modules that they share."""

import os
import signal
import sys
from types import FrameType

from fedjax_inv_experiments.flags import standins


def _interrupt(number: int, frame: FrameType | None) -> None:
    del frame
    os.write(2, b"\ninterrupted\n")
    os._exit(128 + number)


# Both are done here, because the imports of `python -m experiments.NAME` take seconds.
_is_binary = sys.argv[:1] == ["-m"]
if _is_binary and standins.serve(sys.argv):
    standins.install()
# Other programs that import this package handle interrupts themselves.
if _is_binary and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _interrupt)
