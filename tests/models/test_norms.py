"""BatchNorm against its formulas in float64, on the real examples alone."""

from functools import partial
from typing import Any, NamedTuple

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
SHAPES = [(5, 3), (4, 2, 3, 2)]


class Case(NamedTuple):
    variables: Tree  # of no symmetry
    x: np.ndarray  # [B, ..., D], garbage where the mask is false
    mask: np.ndarray  # [B]
    cotangent: np.ndarray  # [B, ..., D], zero where the mask is false


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
    f32 = jax.tree.map(np.float32, (vectors, x, cotangent))
    return Case(f32[0], f32[1], mask, f32[2])


def applied(norm: nn.Module, variables: Tree, *inputs: Array) -> tuple[Array, Tree]:
    outputs, changed = norm.apply(variables, *inputs, mutable=["batch_stats"])
    return outputs, changed["batch_stats"]


@partial(jax.jit, static_argnames="train")
def outputs_and_stats(
    case: Case, train: bool, momentum: float = 0.9, epsilon: float = 1e-5
) -> tuple[Array, Tree]:
    return applied(BatchNorm(momentum, epsilon), case.variables, case.x, case.mask, train)


@given(cases(), st.booleans(), st.floats(0, 1), st.floats(1e-3, 1))
def test_is_its_formulas_on_the_real_examples(
    case: Case, train: bool, momentum: float, epsilon: float
) -> None:
    got, moved = outputs_and_stats(case, train, momentum, epsilon)
    variables, x = jax.tree.map(np.float64, (case.variables, case.x[case.mask]))
    axes = tuple(range(x.ndim - 1))
    stats = variables["batch_stats"]
    now = {"mean": x.mean(axes), "var": x.var(axes)} if train else stats
    normed = (x - now["mean"]) / np.sqrt(now["var"] + epsilon)
    expected = normed * variables["params"]["scale"] + variables["params"]["bias"]
    assert_close(got[case.mask], expected, rtol=1e-3, atol=1e-3)
    assert jnp.isfinite(got).all()
    expected = {name: momentum * stats[name] + (1 - momentum) * now[name] for name in stats}
    assert_close(moved, expected, rtol=1e-3, atol=1e-3)
    if not train:
        assert_equal(moved, case.variables["batch_stats"])


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_derivatives_are_those_of_the_real_examples_alone(
    shape: tuple[int, ...], train: bool
) -> None:
    """The gradient and the curvature of flax's layer, which sees no others."""
    mask = np.arange(shape[0]) != 1
    at = case(shape, mask)
    point = at.variables["params"], at.x
    direction = jax.tree.map(lambda a: np.cos(np.where(np.isfinite(a), a, 0)), point)
    flax = nn.BatchNorm(not train, momentum=0.9, epsilon=1e-5, use_fast_variance=False)

    def derivatives(norm: Any, rows: Any, *told: Any) -> Tree:
        def risk(point: Tree) -> Array:
            variables = {**at.variables, "params": point[0]}
            outputs, _ = applied(norm, variables, point[1], *told)
            return (jnp.sin(outputs) * at.cotangent[rows]).sum()

        here = point[0], point[1][rows]
        along = direction[0], direction[1][rows]
        return jax.jvp(jax.grad(risk), (here,), (along,))

    found, expected = jax.jit(
        lambda: (derivatives(BatchNorm(), slice(None), mask, train), derivatives(flax, mask))
    )()
    for (params, x), (of_params, of_x) in zip(found, expected, strict=True):
        assert_close((params, x[mask]), (of_params, of_x), rtol=1e-3, atol=1e-4)
        assert_equal(x[~mask], np.zeros_like(x[~mask]))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_batch_without_a_real_example_changes_nothing(shape: tuple[int, ...]) -> None:
    nothing = case(shape, np.zeros(shape[0], bool))
    outputs, stats = outputs_and_stats(nothing, True)
    assert_equal(stats, nothing.variables["batch_stats"])
    assert jnp.isfinite(outputs).all()


@pytest.mark.parametrize("train", [True, False])
def test_statistics_start_from_zero_and_one_and_initialising_leaves_them(train: bool) -> None:
    x, mask = 5 + jnp.arange(6.0).reshape(3, 2), jnp.ones(3, bool)
    zero, one = jnp.zeros(2), jnp.ones(2)
    expected = {"params": {"scale": one, "bias": zero}, "batch_stats": {"mean": zero, "var": one}}
    assert_equal(dict(BatchNorm().init(jax.random.key(0), x, mask, train)), expected)


def test_the_variance_of_large_values_is_exact() -> None:
    """In float32, as a mean of squares less a squared mean, it would be off by several percent."""
    large = case(SHAPES[0], np.ones(5, bool))
    large = large._replace(x=large.x + np.float32(3000))
    _, stats = outputs_and_stats(large, True, 0.0)
    np.testing.assert_allclose(stats["var"], np.float64(large.x).var(0), rtol=1e-3)
