"""The start and the end of a binary: its main function prints a text, errors in one line.

This file imports the standard library alone, as any other package may take seconds or be missing.
"""

import ctypes
import errno
import functools
import gc
import io
import logging
import os
import re
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn, TextIO

BAD_INPUT = 2
DIVERGED = 3
LOST = 4  # exit statuses
_SECONDS = 15  # for the other processes to end as well
_OTHER_ENDED = re.compile("Gloo|NCCL|heartbeat")  # in JAX's errors when another process has gone
# What a thread of JAX writes when another process has gone, and before it aborts for that.
_GONE = re.compile(b"coordination_service|preemption_sync|grpc_")
_ABORTS = b"distributed service detected fatal errors"
_ENDED = "another process has ended, and says why; --resume continues the run"
# How work that ended early goes on.
CONTINUES = "run the same command (of train with --resume) to continue"
# The extra of pyproject.toml that installs a package.
_EXTRAS = {"tensorboardX": "tensorboard", "tensorflow": "prepare", "dp_accounting": "privacy"}
_EXPERIMENTS = (
    "absl",
    "array_record",
    "lime",
    "matplotlib",
    "msgspec",
    "orbax",
    "pandas",
    "PIL",
    "pyarrow",
    "safetensors",
    "scipy",
    "sklearn",
    "tabulate",
    "tensorflow_datasets",
    "tqdm",
)
_showwarning = warnings.showwarning


class Divergence(Exception):
    """A client's loss or update became NaN or infinite."""


class _Output(io.FileIO):
    """An output whose reader may go, as `head` does, or that was closed: the work goes on."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            return len(data)


def binary(run: Callable[[list[str]], str]) -> Callable[[list[str]], None]:
    """The main function of a binary, for `app.run`. run: the words besides flags -> its text."""

    @functools.wraps(run)
    def main(argv: list[str]) -> None:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, _interrupt)
        try:
            with in_one_line():
                _prepare()
                print(printable(run(argv[1:])))
        except SystemExit as ended:
            if not isinstance(ended.code, int):
                raise
            if ended.code != LOST:
                _await_others()
            # Orbax's threads wait for minutes for a file that they cannot write, and others for a
            # program that nobody needs any more.
            sys.stdout.flush()
            os._exit(ended.code)

    return main


def keep_printing() -> None:
    """Lets no closed output, and no character that a terminal lacks, end the work."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        elif stream is getattr(sys, f"__{name}__"):
            setattr(sys, name, _stream(number, stream.encoding))


def _stream(number: int, encoding: str) -> TextIO:
    file = io.BufferedWriter(_Output(number, "w", closefd=False))
    return io.TextIOWrapper(file, encoding, errors="backslashreplace", line_buffering=True)


def expect_aborts() -> None:
    """Lets this process end in one line where JAX would abort it, as another one has gone.

    Call this before JAX connects the processes. What threads of JAX write to stderr goes through a
    pipe from now on, but for the trace of such an abort.
    """
    stderr = os.dup(2)
    reader, writer = os.pipe()
    os.dup2(writer, 2)
    sys.stderr = _stream(stderr, sys.stderr.encoding)
    # A thread that aborts calls sleep(SIGABRT) first: 6 seconds, in which the line is read.
    library = ctypes.CDLL(None)
    library.signal(signal.SIGABRT, library.sleep)

    def read() -> None:
        for line in open(reader, "rb"):  # noqa: SIM115
            if _ABORTS in line:
                os.write(stderr, f"error: {_ENDED}\n".encode())
                os._exit(LOST)
            if not _GONE.search(line):
                os.write(stderr, line)

    threading.Thread(target=read, daemon=True).start()


def _interrupt(number: int, frame: FrameType | None) -> None:
    del frame
    os.write(2, b"\ninterrupted\n")
    os._exit(128 + number)


def _prepare() -> None:
    """Settings of this process."""
    import jax
    from absl import logging as absl_logging

    # Compiled programs are stored on the disk, so that a second start does not compile again.
    cache = os.environ.get("JAX_COMPILATION_CACHE_DIR", "~/.cache/fedjax_inv")
    jax.config.update("jax_compilation_cache_dir", os.path.expanduser(cache))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    # JAX_ENABLE_X64 would compute other numbers, which the run's flags would not tell.
    jax.config.update("jax_enable_x64", False)
    # Tracing makes many objects that stay. With Python's default of 700, a first look spends 3 of
    # its 70 seconds of processor time looking through them for cycles.
    gc.set_threshold(50_000)
    # Orbax logs every file and every failure; we report failures ourselves. The library warns.
    absl_logging.set_verbosity(absl_logging.FATAL)
    library = logging.getLogger("fedjax_inv")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("warning: %(message)s"))
    library.setLevel(logging.WARNING)
    library.handlers = [handler]
    library.propagate = False
    warnings.showwarning = _show_warning


@contextmanager
def in_one_line() -> Iterator[None]:
    """Ends the process with a line on stderr, with a status.

    A request that the operating system refuses, such as one that fills the disk, and a missing
    package of an extra count as bad input. Any other error is a defect, which needs its traceback.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None:  # not from the operating system
            raise
        where = f"{error.filename}: " if error.filename else ""
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = f"make room on the disk, then {CONTINUES}" if full else "mend that and start again"
        _fail(f"{where}{error.strerror}; {remedy}, what was done until then is kept", BAD_INPUT)
    except ImportError as error:
        _fail(missing(error) or _raised(error), BAD_INPUT)
    except Divergence as error:
        _fail(str(error), DIVERGED)
    except (ValueError, RuntimeError, AssertionError) as error:
        _end(error)


def _end(error: Exception) -> NoReturn:
    """Ends the process for an error of our own or of devices; raises others."""
    import jax

    from fedjax_inv.checks import UsageError

    if isinstance(error, UsageError):
        _fail(str(error), BAD_INPUT)
    platforms = jax.config.values["jax_platforms"]
    if platforms and not _has_devices():
        text = "has no device here; unset it, or install JAX for that platform"
        _fail(f"JAX_PLATFORMS={platforms}: {text}", BAD_INPUT)
    if jax.distributed.is_initialized() and _OTHER_ENDED.search(str(error)):
        _fail(_ENDED, LOST)
    raise error


def _raised(error: Exception) -> NoReturn:
    raise error


def _has_devices() -> bool:
    import jax

    try:
        return bool(jax.devices())
    except (RuntimeError, AssertionError):  # the second from JAX's second search for devices
        return False


def _await_others() -> None:
    """Waits until the other processes end as well, for seconds: one that runs on would never."""
    jax = sys.modules.get("jax")
    if jax is not None and jax.distributed.is_initialized():
        ending = threading.Thread(target=jax.distributed.shutdown, daemon=True)
        ending.start()
        ending.join(_SECONDS)


def missing(error: ImportError) -> str | None:
    """The line for a missing package of an extra; None for other failures, which are defects."""
    # The library adds the command to the error, whose cause names the package.
    cause = error.__cause__ if isinstance(error.__cause__, ImportError) else error
    package = (cause.name or "").partition(".")[0]
    extra = _EXTRAS.get(package, "experiments" if package in _EXPERIMENTS else "")
    if not isinstance(cause, ModuleNotFoundError) or not extra:
        return None
    return f"the package {package} is missing: pip install 'fedjax_inv[{extra}]'"


def printable(text: str) -> str:
    """A text whose characters a terminal prints, and does not obey; names in files may hold any."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Prints a warning for users in one line, in place of `warnings.showwarning`."""
    if category is UserWarning:
        print(f"warning: {printable(' '.join(str(message).splitlines()))}", file=sys.stderr)
    else:
        _showwarning(message, category, filename, lineno, file, line)


def _fail(message: str, status: int) -> NoReturn:
    print(f"error: {printable(' '.join(message.splitlines()))}", file=sys.stderr)
    sys.exit(status)
