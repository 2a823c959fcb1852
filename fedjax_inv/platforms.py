"""The platform that a program is traced for, where that decides how it is written."""

import contextlib
import contextvars
from collections.abc import Iterator

import jax

_asked: contextvars.ContextVar[str] = contextvars.ContextVar("platform", default="")


def on_cpu() -> bool:
    """Whether what is traced now will run on a CPU: a core does one thing after the other, and the
    turns of a loop cost nothing."""
    return _platform() == "cpu"


def on_tpu() -> bool:
    """Whether what is traced now will run on a TPU, whose compiler makes of a grouped convolution
    one with an axis more."""
    return _platform() == "tpu"


def _platform() -> str:
    return _asked.get() or jax.default_backend()


@contextlib.contextmanager
def traced_for(platform: str) -> Iterator[None]:
    """While entered, programs are written for "cpu", "gpu" or "tpu", to be compiled for a machine
    that is not there; by default they are for the one that is."""
    token = _asked.set(platform)
    try:
        yield
    finally:
        _asked.reset(token)
