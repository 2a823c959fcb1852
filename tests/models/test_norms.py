"""BatchNorm against its formulas in float64, on the real examples alone."""

from functools import partial
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


def apply(norm: nn.Module, variables: Tree, *inputs: Array) -> tuple[Array, Tree]:
    outputs, changed = norm.apply(variables, *inputs, mutable=["batch_stats"])
    return outputs, changed["batch_stats"]


@partial(jax.jit, static_argnames="train")
def differentiated(
    case: Case, train: bool, momentum: float = 0.9, epsilon: float = 1e-5
) -> tuple[Tree, Array, Tree]:
    """(gradients of parameters and x, outputs, stats)."""

    def product(params: Tree, x: Array) -> tuple[Array, tuple[Array, Tree]]:
        variables = {**case.variables, "params": params}
        outputs, stats = apply(BatchNorm(momentum, epsilon), variables, x, case.mask, train)
        return (outputs * case.cotangent).sum(), (outputs, stats)

    gradient = jax.grad(product, (0, 1), has_aux=True)
    grads, (outputs, stats) = gradient(case.variables["params"], case.x)
    return grads, outputs, stats


def formulas(
    case: Case, train: bool, momentum: float, epsilon: float
) -> tuple[Tree, np.ndarray, Tree]:
    """What `differentiated` is, of the real examples alone, in float64."""
    variables, x, cotangent = jax.tree.map(
        np.float64, (case.variables, case.x[case.mask], case.cotangent[case.mask])
    )
    params, stats = variables["params"], variables["batch_stats"]
    axes = tuple(range(x.ndim - 1))
    now = {"mean": x.mean(axes), "var": x.var(axes)} if train else stats
    deviation = np.sqrt(now["var"] + epsilon)
    normed = (x - now["mean"]) / deviation
    slope = cotangent * params["scale"]
    if train:  # the mean and the variance move with x
        slope = slope - slope.mean(axes) - normed * (slope * normed).mean(axes)
    of_params = {"scale": (cotangent * normed).sum(axes), "bias": cotangent.sum(axes)}
    moved = {name: momentum * stats[name] + (1 - momentum) * now[name] for name in stats}
    outputs = normed * params["scale"] + params["bias"]
    return (of_params, slope / deviation), outputs, moved


@given(cases(), st.booleans(), st.floats(0, 1), st.floats(1e-3, 1))
def test_is_its_formulas_on_the_real_examples(
    case: Case, train: bool, momentum: float, epsilon: float
) -> None:
    """Outputs, statistics, and the gradients of parameters and inputs."""
    (params, inputs), outputs, stats = differentiated(case, train, momentum, epsilon)
    mask = case.mask
    got = (params, inputs[mask]), outputs[mask], stats
    # A channel that hardly varies has large gradients that cancel.
    assert_close(got, formulas(case, train, momentum, epsilon), rtol=1e-3, atol=1e-3)
    assert_equal(inputs[~mask], jnp.zeros_like(inputs[~mask]))
    assert jnp.isfinite(outputs).all()
    if not train:
        assert_equal(stats, case.variables["batch_stats"])


@pytest.mark.parametrize("shape", SHAPES)
def test_a_batch_without_a_real_example_changes_nothing(shape: tuple[int, ...]) -> None:
    nothing = case(shape, np.zeros(shape[0], bool))
    grads, outputs, stats = differentiated(nothing, True)
    assert_equal(stats, nothing.variables["batch_stats"])
    assert_equal(grads, jax.tree.map(jnp.zeros_like, grads))
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
    _, _, stats = differentiated(large, True, 0.0)
    np.testing.assert_allclose(stats["var"], np.float64(large.x).var(0), rtol=1e-3)


def test_curvature_in_both_orders() -> None:
    """Forward over reverse = reverse over forward = differences of the gradient's formula."""
    shape = (4, 3, 2)
    mask = np.arange(shape[0]) != 1
    at = jax.tree.map(np.float64, case(shape, mask)._replace(mask=()))._replace(mask=mask)
    rng = np.random.default_rng(1)
    point = at.variables["params"], np.where(np.isfinite(at.x), at.x, 0)
    direction = jax.tree.map(lambda a: rng.normal(size=a.shape), point)

    def risk(point: Tree) -> Array:
        params, x = point
        # Garbage again, which no direction reaches.
        x = jnp.where(mask[:, None, None], x, jnp.nan)
        outputs, _ = apply(BatchNorm(), {**at.variables, "params": params}, x, mask, True)
        return (jnp.sin(outputs) * at.cotangent).sum()

    @jax.jit
    def both(point: Tree, direction: Tree) -> tuple[Tree, Tree]:
        forward = jax.jvp(jax.grad(risk), (point,), (direction,))[1]
        reverse = jax.grad(lambda at: jax.jvp(risk, (at,), (direction,))[1])(point)
        return forward, reverse

    def gradient(step: float) -> Tree:
        params, x = jax.tree.map(lambda a, b: a + step * b, point, direction)
        here = at._replace(variables={**at.variables, "params": params}, x=x)
        cosine = np.zeros(shape)
        cosine[mask] = np.cos(formulas(here, True, 0.9, 1e-5)[1])
        cotangent = at.cotangent * cosine
        return formulas(here._replace(cotangent=cotangent), True, 0.9, 1e-5)[0]

    step = 1e-5
    expected = jax.tree.map(lambda a, b: (a - b) / (2 * step), gradient(step), gradient(-step))
    assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(expected)) > 1e-2
    with jax.enable_x64(True):
        forward, reverse = both(point, direction)
    assert_close((forward[0], forward[1][mask]), expected, rtol=1e-6, atol=1e-7)
    assert_equal(forward[1][~mask], np.zeros_like(forward[1][~mask]))
    assert_close(reverse, forward, rtol=1e-10, atol=1e-12)
