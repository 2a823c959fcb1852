"""Settings of the whole test run; they must come before JAX starts its backend."""

import os

import jax
from hypothesis import settings

# Four devices on any machine, for the tests that shard the clients.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])
jax.config.update("jax_num_cpu_devices", 4)
# A test must compile what it tests, not load what an earlier version left behind.
jax.config.update("jax_enable_compilation_cache", False)

settings.register_profile("tests", deadline=None, max_examples=20, database=None)
settings.load_profile("tests")
