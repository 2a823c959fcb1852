"""Experiments: binaries in the root, and the rooms of modules that they share."""

import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType

from .flags import standins


def _interrupt(number: int, frame: FrameType | None) -> None:
    del frame
    os.write(2, b"\ninterrupted\n")
    os._exit(128 + number)


def before_imports(argv: Sequence[str]) -> None:
    """What a command does before its imports, which take seconds. argv: its command line."""
    if standins.serve(argv):
        standins.install()
    # Other programs that import this package handle interrupts themselves.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)


if sys.argv[:1] == ["-m"]:  # python -m experiments.NAME
    before_imports(sys.argv)
