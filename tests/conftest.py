"""Settings of the whole test run; they must come before JAX starts its backend."""

import gc
import os

import xla_flags

# Compiling takes nearly all of the time, so compile quickly rather than well: a third of the time.
# `XLA_FLAGS= pytest` tests with XLA's defaults.
if "XLA_FLAGS" not in os.environ:
    os.environ["XLA_FLAGS"] = xla_flags.known(*xla_flags.QUICKEST)
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from collections.abc import Iterator

import jax
import pytest
from hypothesis import settings

gc.set_threshold(50_000)  # as in `start.binary`
# Four devices on any machine, for the tests that share runs and clients.
jax.config.update("jax_num_cpu_devices", 4)
# A test must compile what it tests, not load what an earlier version left behind.
jax.config.update("jax_enable_compilation_cache", False)

settings.register_profile("tests", deadline=None, max_examples=20, database=None)
settings.load_profile("tests")


@pytest.fixture(autouse=True, scope="session")
def two_cores() -> Iterator[None]:
    """`--devices=auto` takes two devices on any machine, as on most of the users'."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedjax_inv.platforms.cores", lambda: 2)
        yield
