"""BatchNorm against flax on the real examples alone, and against a loop in float64."""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from federations import assert_close, assert_equal
from fedjax_inv.models import BatchNorm
from fedjax_inv.types import Array, Tree

GARBAGE = [np.nan, np.inf, -np.inf, 1e30]
SHAPES = [(5, 3), (1, 1), (4, 2, 3, 2)]


class Case(NamedTuple):
    variables: Tree  # of no symmetry
    x: Array  # [B, ..., D], garbage where the mask is false
    mask: Array  # [B], some are true
    cotangent: Array  # [B, ..., D], zero where the mask is false


@st.composite
def cases(draw) -> Case:
    shape = draw(st.sampled_from(SHAPES))
    mask = np.array(draw(st.lists(st.booleans(), min_size=shape[0], max_size=shape[0])))
    mask[draw(st.integers(0, shape[0] - 1))] = True
    return case(shape, mask, draw(st.integers(0, 99)))


def case(shape: tuple[int, ...], mask: np.ndarray, seed: int = 0) -> Case:
    rng = np.random.default_rng(seed)
    x = rng.normal(1.0, 2.0, shape)
    x[~mask] = rng.choice(GARBAGE, x[~mask].shape)
    cotangent = rng.normal(size=shape)
    cotangent[~mask] = 0
    vectors = {
        "params": {"scale": rng.normal(size=shape[-1]), "bias": rng.normal(size=shape[-1])},
        "batch_stats": {"mean": rng.normal(size=shape[-1]), "var": 0.5 + rng.random(shape[-1])},
    }
    f32 = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), (vectors, x, cotangent))
    return Case(f32[0], f32[1], jnp.asarray(mask), f32[2])


def apply(variables: Tree, x: Array, mask: Array, train: bool, **arguments) -> tuple[Array, Tree]:
    norm = BatchNorm(**arguments)
    outputs, changed = norm.apply(variables, x, mask, train, mutable=["batch_stats"])
    return outputs, changed["batch_stats"]


@given(case=cases(), train=st.booleans(), epsilon=st.sampled_from([1e-5, 0.1]))
def test_is_flax_on_the_real_examples(case: Case, train: bool, epsilon: float) -> None:
    """Outputs, statistics, and the gradients of parameters and inputs."""
    variables, x, mask, cotangent = case

    def ours(params: Tree, x: Array) -> tuple[Array, tuple[Array, Tree]]:
        outputs, stats = apply({**variables, "params": params}, x, mask, train, epsilon=epsilon)
        return (outputs * cotangent).sum(), (outputs, stats)

    def flax(params: Tree, x: Array) -> tuple[Array, tuple[Array, Tree]]:
        norm = nn.BatchNorm(not train, momentum=0.9, epsilon=epsilon, use_fast_variance=False)
        given = {**variables, "params": params}
        outputs, changed = norm.apply(given, x, mutable=["batch_stats"])
        return (outputs * cotangent[mask]).sum(), (outputs, changed["batch_stats"])

    got, expected = (
        jax.grad(fn, (0, 1), has_aux=True)(variables["params"], x)
        for fn, x in ((ours, x), (flax, x[mask]))
    )
    (params, inputs), (outputs, stats) = got
    # A channel that hardly varies has large gradients that cancel.
    assert_close((params, inputs[mask]), expected[0], rtol=1e-3, atol=1e-3)
    assert_close((outputs[mask], stats), expected[1])
    assert_equal(inputs[~mask], jnp.zeros_like(inputs[~mask]))
    assert jnp.isfinite(outputs).all()
    if not train:
        assert_equal(stats, variables["batch_stats"])


@given(case=cases(), momentum=st.floats(0, 1), epsilon=st.floats(1e-3, 1))
def test_is_a_loop_over_real_examples(case: Case, momentum: float, epsilon: float) -> None:
    variables, x, mask, _ = case
    old, params = variables["batch_stats"], variables["params"]
    got, stats = apply(variables, x, mask, True, momentum=momentum, epsilon=epsilon)
    real = np.asarray(x, np.float64)[np.asarray(mask)]
    for channel in range(x.shape[-1]):
        values = [float(v) for example in real[..., channel] for v in np.ravel(example)]
        mean = sum(values) / len(values)
        var = sum((v - mean) ** 2 for v in values) / len(values)
        for name, new in (("mean", mean), ("var", var)):
            expected = momentum * float(old[name][channel]) + (1 - momentum) * new
            np.testing.assert_allclose(stats[name][channel], expected, rtol=1e-5, atol=1e-5)
        scale = float(params["scale"][channel]) / (var + epsilon) ** 0.5
        expected = [(v - mean) * scale + float(params["bias"][channel]) for v in values]
        np.testing.assert_allclose(
            np.ravel(got[mask][..., channel]), expected, rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("shape", SHAPES)
def test_a_batch_without_a_real_example_changes_nothing(shape: tuple[int, ...]) -> None:
    variables, x, mask, cotangent = case(shape, np.zeros(shape[0], bool))

    def masked(params: Tree) -> tuple[Array, tuple[Array, Tree]]:
        outputs, stats = apply({**variables, "params": params}, x, mask, True)
        return (outputs * cotangent).sum(), (outputs, stats)

    grads, (outputs, stats) = jax.grad(masked, has_aux=True)(variables["params"])
    assert_equal(stats, variables["batch_stats"])
    assert_equal(grads, jax.tree.map(jnp.zeros_like, grads))
    assert jnp.isfinite(outputs).all()


def test_statistics_start_from_zero_and_one_and_initialising_leaves_them() -> None:
    x, mask = 5 + jnp.arange(6.0).reshape(3, 2), jnp.ones(3, bool)
    for train in (False, True):
        variables = BatchNorm().init(jax.random.key(0), x, mask, train)
        zero, one = jnp.zeros(2), jnp.ones(2)
        assert_equal(
            variables,
            {
                "params": {"scale": one, "bias": zero},
                "batch_stats": {"mean": zero, "var": one},
            },
        )


def test_running_statistics_come_to_those_of_a_batch_that_repeats() -> None:
    variables, x, mask, _ = case((4, 3, 2), np.array([True, True, False, True]))
    expected, _ = apply(variables, x, mask, True)
    for _ in range(200):
        _, stats = apply(variables, x, mask, True)
        variables = {**variables, "batch_stats": stats}
    assert_close(apply(variables, x, mask, False)[0][mask], expected[mask], rtol=1e-3, atol=1e-3)


def test_the_variance_of_large_values_is_exact() -> None:
    """In float32, as a mean of squares less a squared mean, it would be off by several percent."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(3000.0, 1.0, (64, 3)), jnp.float32)
    variables = BatchNorm().init(jax.random.key(0), x, jnp.ones(64, bool), False)
    _, stats = apply(variables, x, jnp.ones(64, bool), True, momentum=0.0)
    np.testing.assert_allclose(stats["var"], np.asarray(x, np.float64).var(0), rtol=1e-3)


@pytest.mark.parametrize("shape", [(5, 3), (4, 3, 2)])
def test_curvature_in_both_orders(shape: tuple[int, ...]) -> None:
    """Forward over reverse = reverse over forward = differences of the gradient."""
    with jax.enable_x64(True):
        mask = np.arange(shape[0]) != 1
        variables, x, _, cotangent = jax.tree.map(
            lambda a: jnp.asarray(a, jnp.float64), case(shape, mask)
        )
        rng = np.random.default_rng(1)
        point = (variables["params"], jnp.where(jnp.isfinite(x), x, 0))
        direction = jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape)), point)

        def risk(at: Tree) -> Array:
            params, x = at
            # Garbage again, which no direction reaches.
            x = jnp.where(mask.reshape(-1, *(1,) * (x.ndim - 1)), x, jnp.nan)
            outputs, _ = apply({**variables, "params": params}, x, jnp.asarray(mask), True)
            return (jnp.sin(outputs) * cotangent).sum()

        def moved(step: float) -> Tree:
            return jax.tree.map(lambda a, b: a + step * b, point, direction)

        forward = jax.jvp(jax.grad(risk), (point,), (direction,))[1]
        reverse = jax.grad(lambda at: jax.jvp(risk, (at,), (direction,))[1])(point)
        step = 1e-5
        up, down = (jax.grad(risk)(moved(s)) for s in (step, -step))
        expected = jax.tree.map(lambda a, b: (a - b) / (2 * step), up, down)
        assert max(jnp.abs(leaf).max() for leaf in jax.tree.leaves(expected)) > 1e-2
        assert_close(forward, expected, rtol=1e-6, atol=1e-7)
        assert_close(reverse, forward, rtol=1e-10, atol=1e-12)
