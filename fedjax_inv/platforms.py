"""The platform that a program is traced for, on which its operations may depend."""

import contextlib
import contextvars
from collections.abc import Iterator

import jax

from fedjax_inv.checks import UsageError

_platform: contextvars.ContextVar[str] = contextvars.ContextVar("platform", default="")


def on_cpu() -> bool:
    """Return whether programs are traced for a CPU.

    On a CPU, a core executes one operation after the other, and the turns of a loop cost nothing.
    """
    return _current() == "cpu"


def on_tpu() -> bool:
    """Return whether programs are traced for a TPU.

    The TPU's compiler turns a grouped convolution into a convolution with one more axis.
    """
    return _current() == "tpu"


def _current() -> str:
    return _platform.get() or jax.default_backend()


@contextlib.contextmanager
def traced_for(platform: str) -> Iterator[None]:
    """Trace programs for another platform than this machine's while the context is open.

    Args:
      platform: "cpu", "gpu" or "tpu". The programs can then be compiled for a machine that is not
        here.

    Raises:
      UsageError: for another platform.
    """
    if platform not in ("cpu", "gpu", "tpu"):
        raise UsageError("platform", platform, "must be one of cpu, gpu, tpu")
    token = _platform.set(platform)
    try:
        yield
    finally:
        _platform.reset(token)
