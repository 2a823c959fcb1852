"""Every lowering is the convolution of jax.lax, in all derivatives, under all transformations."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec

import formulas
import slow
from fedjax_inv.models import lowerings
from fedjax_inv.types import Array, Tree

OWN = ("im2col", "canonical", "winograd")  # what is not XLA's own; auto is one of them
Kernels = tuple[Array, ...]


@pytest.fixture(autouse=True)
def double_precision():
    with jax.enable_x64(True):
        yield


def noise(seed: int, *shape: int) -> Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


def convolve(
    conv: lowerings.Conv, inputs: Array, kernel: Array, strides: Any, padding: Any
) -> Array:
    """The call that nn.Conv makes."""
    ones = (1,) * len(strides)
    space = "xyz"[: len(strides)]
    numbers = (f"N{space}C", f"{space}IO", f"N{space}C")
    return conv(
        inputs,
        kernel,
        strides,
        padding,
        lhs_dilation=ones,
        rhs_dilation=ones,
        dimension_numbers=lax.conv_dimension_numbers(inputs.shape, kernel.shape, numbers),
        feature_group_count=1,
        precision=None,
    )


def risk(conv: lowerings.Conv, x: Array, kernels: Kernels) -> Array:
    """Two layers, lopsided and 3x3 at stride 1, nonlinear in the input and both kernels."""
    hidden = jnp.tanh(convolve(conv, x, kernels[0], (2, 1), ((1, 2), (0, 1))))
    return jnp.sum(jnp.sin(convolve(conv, hidden, kernels[1], (1, 1), ((2, 1), (-1, 2)))) ** 2)


def network(*lead: int) -> tuple[Array, Kernels]:
    """An input and kernels of `risk`, with leading axes."""
    shapes = (3, 2, 2, 3), (3, 3, 3, 2)
    kernels = tuple(noise(1 + i, *lead, *shape) for i, shape in enumerate(shapes))
    return noise(0, *lead, 2, 6, 5, 2), kernels


def assert_agree(of: Callable[[lowerings.Conv], Tree], names: tuple[str, ...] = OWN) -> None:
    """`of(lowering)` is what it is for lax; one compilation for all of them."""
    results = jax.jit(lambda: {name: of(lowerings.lowering(name)) for name in ("lax", *names)})()
    for name in names:
        chex.assert_trees_all_close(results[name], results["lax"], rtol=1e-9, atol=1e-9)


# Inputs, kernel, strides, padding: windows of one and two axes, lopsided strides and padding,
# padding that crops, windows that leave inputs over; those 3x3 and 5x5 at stride 1 make tiles that
# are whole, broken, and mostly padding.
GEOMETRIES = [
    ((2, 7, 6, 3), (3, 2, 3, 2), (2, 1), ((1, 2), (-1, 3))),
    ((2, 8, 3), (4, 3, 2), (3,), ((2, 0),)),
    ((2, 9, 13, 3), (3, 3, 3, 2), (1, 1), "SAME"),
    ((1, 5, 4, 2), (5, 5, 2, 1), (1, 1), ((-1, 6), (3, -1))),
    ((3, 6, 8, 2), (1, 1, 2, 1), (3, 2), "VALID"),
    ((1, 4, 3, 2), (3, 3, 2, 1), (1, 1), ((-1, 6), (3, 1))),
    ((2, 8, 5, 3), (5, 5, 3, 2), (1, 1), "VALID"),
]


@pytest.mark.parametrize(
    ("inputs_shape", "kernel_shape", "strides", "padding"), slow.after(4, GEOMETRIES)
)
def test_values_and_both_gradients(inputs_shape, kernel_shape, strides, padding):
    inputs, kernel = noise(0, *inputs_shape), noise(1, *kernel_shape)

    def of(conv: lowerings.Conv) -> Tree:
        out, pull = jax.vjp(lambda x, w: convolve(conv, x, w, strides, padding), inputs, kernel)
        return out, pull(noise(2, *out.shape))

    assert_agree(of)


def test_second_derivatives_in_every_order():
    x, kernels = network()
    direction = jax.tree.map(lambda leaf: jnp.cos(7 * leaf), kernels)

    def of(conv: lowerings.Conv) -> Tree:
        def slope(x: Array, w: Kernels) -> Array:
            return jax.jvp(lambda w: risk(conv, x, w), (w,), (direction,))[1]

        return {
            "jvp of grad": jax.jvp(jax.grad(lambda w: risk(conv, x, w)), (kernels,), (direction,)),
            "grad of jvp": jax.grad(slope, (0, 1))(x, kernels),
            "jvp of jvp": jax.jvp(lambda w: slope(x, w), (kernels,), (direction,)),
            "grad of grad": jax.grad(lambda w: jnp.sum(jax.grad(risk, 1)(conv, x, w)[0] ** 2))(
                kernels
            ),
        }

    assert_agree(of, ("canonical",))  # the others' derivatives are those of jax.numpy


@pytest.mark.parametrize(
    ("of_inputs", "of_kernels"), slow.after(1, [(1, -1), (0, None), (None, 0), (0, 0)])
)
def test_vmapped_inputs_and_kernels(of_inputs, of_kernels):
    x, kernels = network(3)

    def lay(tree: Tree, axis: int | None) -> Tree:
        return jax.tree.map(lambda a: a[0] if axis is None else jnp.moveaxis(a, 0, axis), tree)

    axes = of_inputs, of_kernels
    x, kernels = lay(x, axes[0]), lay(kernels, axes[1])

    def of(conv: lowerings.Conv) -> Tree:
        def total(x: Array, w: Kernels) -> Array:
            return jax.vmap(partial(risk, conv), axes)(x, w).sum()

        # The derivative inside of vmap, and vmap inside of the derivative.
        inside = jax.vmap(jax.grad(partial(risk, conv), (0, 1)), axes)(x, kernels)
        return inside, jax.grad(total, (0, 1))(x, kernels)

    # Only canonical's batching is its own.
    assert_agree(of, OWN if axes == (0, 0) else ("canonical",))


def test_on_four_devices():
    mesh = jax.make_mesh((4,), ("clients",), axis_types=(AxisType.Auto,))
    split = PartitionSpec("clients")
    x, kernels = network(8)

    def gradients(conv: lowerings.Conv) -> Callable[..., Tree]:
        return jax.vmap(jax.grad(partial(risk, conv), 1))

    sharded = jax.shard_map(
        gradients(lowerings.lowering("canonical")),
        mesh=mesh,
        in_specs=(split, split),
        out_specs=split,
        check_vma=False,
    )
    both = jax.jit(lambda: (sharded(x, kernels), gradients(lax.conv_general_dilated)(x, kernels)))
    chex.assert_trees_all_close(*both(), rtol=1e-9, atol=1e-9)


def forward_over_reverse(f: Callable[[Tree], Array], v: Tree) -> Tree:
    return jax.jvp(jax.grad(f), (v,), (v,))[1]


def reverse_over_forward(f: Callable[[Tree], Array], v: Tree) -> Tree:
    return jax.grad(lambda w: jax.jvp(f, (w,), (v,))[1])(v)


CANONICAL = ("[b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f]", "1")  # layout and groups


def layouts(name: str, curvature: Callable[..., Tree]) -> set[tuple[str, str]]:
    """Layouts and groups of the convolutions in the curvature of two clients' risks."""
    x, kernels = network(2)
    f = partial(risk, lowerings.lowering(name))
    program = jax.jit(jax.vmap(lambda x, w: curvature(partial(f, x), w)))
    text = program.lower(x, kernels).as_text()
    return set(re.findall(r"dim_numbers = (.*?), window.*feature_group_count = (\d+)", text))


def test_layouts_of_the_curvature():
    assert layouts("canonical", forward_over_reverse) == {CANONICAL}
    assert layouts("canonical", reverse_over_forward) == {CANONICAL}
    assert layouts("im2col", reverse_over_forward) == set()
    assert layouts("winograd", reverse_over_forward) == {CANONICAL}  # the convolution at stride 2


def test_auto_is_chosen_by_the_platform(monkeypatch):
    layouts_on = {}
    for platform in ("cpu", "gpu", "tpu"):
        monkeypatch.setattr(jax, "default_backend", lambda platform=platform: platform)
        layouts_on[platform] = layouts("auto", reverse_over_forward)
    assert layouts_on["cpu"] == {CANONICAL}
    assert layouts_on["gpu"] == set()
    assert layouts_on["tpu"] == layouts("lax", reverse_over_forward)


def num_products(name: str, kernel_shape: tuple[int, ...], dtype: Any) -> int:
    conv = lowerings.lowering(name)
    x, kernel = jnp.ones((1, 4, 4, kernel_shape[-2]), dtype), jnp.ones(kernel_shape, dtype)
    text = jax.jit(lambda: convolve(conv, x, kernel, (1, 1), "SAME")).lower().as_text()
    return text.count("dot_general")


@pytest.mark.parametrize(("window", "expected"), [((3, 3), 4), ((5, 5), 2), ((5, 3), 0)])
def test_auto_on_a_cpu_is_winograd_from_32_channels_on(window, expected):
    def found(name: str, *channels: int, dtype: Any = jnp.float32) -> int:
        return num_products(name, (*window, *channels), dtype)

    assert found("winograd", 31, 32) == found("auto", 32, 32) == expected
    assert found("auto", 31, 32) == found("auto", 32, 31) == 0
    assert found("winograd", 32, 32, dtype=jnp.bfloat16) == 0  # which would round the matrices


# The points 0, 1, -1, 2, -2 are beyond the first bound, and 5x5 along both axes beyond the other.
@pytest.mark.parametrize(("size", "bound"), slow.after(1, [(5, 2e-6), (3, 1e-6)]))
def test_rounding_of_winograd(size, bound):
    x, kernel, out = noise(0, 1, 10, 10, 32), noise(1, size, size, 32, 32), noise(2, 1, 10, 10, 32)

    def rounded(name: str, dtype: Any) -> Tree:
        def conv(x: Array, w: Array) -> Array:
            return convolve(lowerings.lowering(name), x, w, (1, 1), "SAME")

        value, pull = jax.vjp(conv, x.astype(dtype), kernel.astype(dtype))
        return value, *pull(out.astype(dtype))

    got, exact = jax.jit(lambda: (rounded("winograd", jnp.float32), rounded("lax", jnp.float64)))()
    for a, b in zip(got, exact, strict=True):
        assert a.dtype == jnp.float32
        assert np.linalg.norm(a - b) / np.linalg.norm(b) < bound


@pytest.mark.parametrize(
    "arguments", [{"feature_group_count": 2}, {"kernel_dilation": 2}, {"input_dilation": 2}]
)
def test_what_only_lax_can_do_is_refused(arguments):
    """The other lowerings would leave it out in silence."""
    layer = nn.Conv(4, (3, 3), conv_general_dilated=lowerings.lowering("auto"), **arguments)
    with pytest.raises(ValueError, match="lax"):
        jax.eval_shape(layer.init, jax.random.key(0), jnp.ones((1, 4, 2, 2)))


@pytest.mark.parametrize(
    ("size", "stride", "padding"),
    slow.after(2, [(2, None, 0), (3, 2, 1), (3, None, 0), (2, 1, 1), (3, 4, 0)]),
)
def test_max_pool_is_a_loop_over_windows_with_its_gradient(size, stride, padding):
    x, step = np.asarray(noise(0, 2, 7, 8, 3)), stride or size  # nowhere a tie
    expected = formulas.pooled(x, size, step, padding)
    weights = np.asarray(noise(1, *expected.shape))

    @jax.jit
    def both(x: Array) -> tuple[Array, Array]:
        pooled, pull = jax.vjp(lambda x: lowerings.max_pool(x, size, stride, padding), x)
        return pooled, *pull(weights)

    slope = np.zeros(x.shape)
    for image, row, column, channel in np.ndindex(expected.shape):
        at = x[image, :, :, channel] == expected[image, row, column, channel]
        slope[image, :, :, channel][at] += weights[image, row, column, channel]
    chex.assert_trees_all_close(both(x), (expected, slope), rtol=1e-12)


def test_ties_share_the_gradient_of_max_pool():
    """Its sum is that of the windows, also where all is equal and where padding is near."""
    slope = jax.jit(jax.grad(lambda x: lowerings.max_pool(x, 3, 2, 1).sum()))(
        np.zeros((1, 5, 5, 1))
    )
    assert jnp.isfinite(slope).all()
    np.testing.assert_allclose(slope.sum(), 9)
