"""What a later release of JAX, XLA or optax could break, each behind one function.

Where one of these tests fails after an upgrade, the function that it names is the place to mend.
"""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import xla_flags
from fedjax_inv import platforms
from fedjax_inv.models import lowerings
from fedjax_inv_experiments.assembly import method
from fedjax_inv_experiments.folder import progress


def test_xla_flags_known_without_an_abort() -> None:
    """XLA may drop a flag of the tests: `xla_flags.known` then leaves it out."""
    flag = xla_flags.QUICKEST[0]
    assert xla_flags.known(flag) == xla_flags.known(flag, "--xla_no_such_flag=1") == flag


def test_xlas_options_that_compile_quickest(monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA may drop one, and compiles nothing with an unknown one: they are left out."""
    monkeypatch.delenv("XLA_FLAGS", raising=False)  # which names a level for all tests
    options = platforms.quickest_to_compile()
    assert options["xla_backend_optimization_level"] == 0
    assert jax.jit(lambda x: x + 1, compiler_options=options)(1) == 2
    assert platforms._unless_chosen({**options, "xla_no_such_option": False}) == options


def test_without_jaxs_registries_convolutions_are_xlas(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """JAX may remove a registry of rules: `lowerings._register` then loses speed only."""
    monkeypatch.delattr("jax.interpreters.batching.primitive_batchers")
    with caplog.at_level(logging.WARNING, "fedjax_inv"):
        conv = lowerings._register()
    assert "canonical convolutions are XLA's own" in caplog.text
    geometry = lowerings._Geometry((1, 1), ((1, 1), (1, 1)), (1, 1), (1, 1), None)
    x, kernel = jnp.ones((2, 6, 6, 3)), jnp.ones((3, 3, 3, 4))
    expected = lowerings._canonical_impl(x, kernel, geometry=geometry)
    np.testing.assert_array_equal(conv(x, kernel, geometry=geometry), expected)


def compile_once() -> None:
    jax.jit(lambda x: x * 2 + 1)(jnp.ones(3)).block_until_ready()


def test_jaxs_event_of_a_compilation() -> None:
    """JAX may rename its event of a compilation: `progress.compilations` listens to it."""
    with progress.compilations() as ends:
        assert ends == []
        compile_once()
        assert len(ends) >= 1
        assert ends == sorted(ends)
    told = len(ends)
    compile_once()
    assert len(ends) == told


KNOWN = ["adagrad", "adam", "adamw", "lamb", "lion", "rmsprop", "sgd", "yogi"]


def test_optaxs_optimizers() -> None:
    """Optax may move its optimizers: `method.OPTIMIZERS` lists them."""
    assert set(KNOWN) < set(method.OPTIMIZERS)
    for name in method.OPTIMIZERS:
        optimizer = getattr(optax, name)(0.1)
        state = jax.eval_shape(optimizer.init, jnp.ones(2))
        updates, _ = jax.eval_shape(optimizer.update, jnp.ones(2), state, jnp.ones(2))
        assert updates.shape == (2,), name
