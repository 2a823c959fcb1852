"""The errors of binaries: one line on stderr, and an exit status."""

import contextlib
import errno
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from typing import NoReturn, TextIO

from fedjax_inv.checks import UsageError

from ..flags import extras

_showwarning = warnings.showwarning

LOST = 4  # the status of a process whose run has lost another process


class Diverged(Exception):
    """A client's loss or update became NaN or infinite."""


class Lost(Exception):
    """Another process of the run has ended."""


@contextlib.contextmanager
def in_one_line() -> Iterator[None]:
    """Ends the process with a line on stderr.

    The status is 2 for bad input, 3 for a diverged run, and LOST for one that has lost a process.

    A request that the operating system refuses, such as one that fills the disk, and a missing
    package of an extra count as bad input. Any other error is a defect, which needs its traceback.
    """
    try:
        yield
    except UsageError as error:
        _fail(str(error), 2)
    except OSError as error:
        if error.errno is None:  # not from the operating system
            raise
        if isinstance(error, BrokenPipeError):  # whoever reads the output has enough, as `head`
            os._exit(128 + signal.SIGPIPE)
        where = f"{error.filename}: " if error.filename else ""
        remedy = _REMEDIES.get(error.errno, "mend that and start again")
        _fail(f"{where}{error.strerror}; {remedy}, what was done until then is kept", 2)
    except ImportError as error:
        line = extras.missing(error)
        if line is None:
            raise
        _fail(line, 2)
    except Diverged as error:
        _fail(str(error), 3)
    except Lost as error:
        _fail(str(error), LOST)


# How work that ended early goes on.
CONTINUES = "run the same command (train and sweep: with --resume) to continue"
_REMEDIES = {
    errno.ENOSPC: f"make room on the disk, then {CONTINUES}",
    errno.EDQUOT: f"make room on the disk, then {CONTINUES}",
    errno.ENAMETOOLONG: "choose a shorter name",
}


def printable(text: str) -> str:
    """A text whose characters a terminal prints, and does not obey; names in files may hold any."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


def show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Prints a warning for users in one line, in place of `warnings.showwarning`."""
    text = " ".join(str(message).splitlines())
    if category is UserWarning:
        print(f"warning: {printable(text)}", file=sys.stderr)
    else:
        _showwarning(message, category, filename, lineno, file, line)


def _fail(message: str, status: int) -> NoReturn:
    line = printable(" ".join(message.splitlines()))
    print(f"error: {line}", file=sys.stderr)
    sys.exit(status)
