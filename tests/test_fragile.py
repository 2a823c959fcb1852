"""What a later release of JAX, XLA or optax could break, each behind one function.

Where one of these tests fails after an upgrade, the function that it names is the place to mend.
"""

import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import xla_flags
from fedjax_inv import platforms
from fedjax_inv.models import lowerings
from fedjax_inv_experiments import build, machine
from fedjax_inv_experiments.running import progress


def test_xla_flags_known_without_an_abort() -> None:
    """XLA may drop a flag of the tests: `xla_flags.known` then leaves it out."""
    flag = xla_flags.QUICKEST[0]
    assert xla_flags.known(flag) == xla_flags.known(flag, "--xla_no_such_flag=1") == flag


def test_xlas_flag_for_deterministic_gpus() -> None:
    """XLA may rename it, and would abort every process with --deterministic: `machine.prepare`."""
    flag = f"{machine._DETERMINISTIC}=true"
    assert xla_flags.known(flag) == flag


def test_xlas_options_that_compile_quickest(monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA may drop one, and compiles nothing with an unknown one: they are left out."""
    monkeypatch.delenv("XLA_FLAGS", raising=False)  # which names a level for all tests
    options = platforms.quickest_to_compile()
    assert options["xla_backend_optimization_level"] == 0
    assert jax.jit(lambda x: x + 1, compiler_options=options)(1) == 2
    assert platforms._unless_chosen({**options, "xla_no_such_option": False}) == options


X = jnp.asarray(np.random.default_rng(0).normal(size=(2, 6, 6, 3)), jnp.float32)
KERNEL = jnp.asarray(np.random.default_rng(1).normal(size=(3, 3, 3, 4)), jnp.float32)
GEOMETRY = lowerings._Geometry((1, 1), ((1, 1), (1, 1)), (1, 1), (1, 1), None)


def hessian_product(conv: Callable[..., Any]) -> jax.Array:
    """Second derivatives of a convolution, under vmap, by each rule of a primitive."""

    def loss(kernel: jax.Array) -> jax.Array:
        return jnp.sum(conv(X, kernel, geometry=GEOMETRY) ** 3)

    def product(kernel: jax.Array) -> jax.Array:
        return jax.jvp(jax.grad(loss), (kernel,), (kernel,))[1]

    return jax.jit(jax.vmap(product))(jnp.stack([KERNEL, 2 * KERNEL]))


def test_jaxs_registries_of_primitives() -> None:
    """JAX may move its registries of rules for primitives: `lowerings._register` uses them."""
    conv = lowerings._register()
    assert "canonical_conv" in str(jax.make_jaxpr(lambda x: conv(x, KERNEL, geometry=GEOMETRY))(X))
    expected = hessian_product(lowerings._canonical_impl)
    np.testing.assert_allclose(hessian_product(conv), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    "name", ["mlir.register_lowering", "ad.defbilinear", "batching.primitive_batchers"]
)
def test_without_jaxs_registries_convolutions_are_xlas(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """JAX may remove a registry of rules: `lowerings._register` then loses speed only."""
    monkeypatch.delattr(f"jax.interpreters.{name}")
    with caplog.at_level(logging.WARNING, "fedjax_inv"):
        conv = lowerings._register()
    assert "canonical convolutions are XLA's own" in caplog.text
    expected = lowerings._canonical_impl(X, KERNEL, geometry=GEOMETRY)
    np.testing.assert_array_equal(conv(X, KERNEL, geometry=GEOMETRY), expected)


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
    """Optax may move its optimizers: `build.OPTIMIZERS` lists them."""
    assert set(KNOWN) < set(build.OPTIMIZERS)
    for name in build.OPTIMIZERS:
        optimizer = getattr(optax, name)(0.1)
        state = optimizer.init(jnp.ones(2))
        updates, _ = optimizer.update(jnp.ones(2), state, jnp.ones(2))
        assert updates.shape == (2,), name
