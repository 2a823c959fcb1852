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
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType, PartitionSpec
from jax.test_util import check_grads

from fedjax_inv import models
from fedjax_inv.algorithms import fedipg
from fedjax_inv.models import layers
from fedjax_inv.types import Array, Tree, Variables

OWN = ("im2col", "canonical", "winograd")  # what is not XLA's own; auto is one of them
Kernels = tuple[Array, ...]


@pytest.fixture(autouse=True)
def double_precision():
    with jax.enable_x64(True):
        yield


def noise(seed: int, *shape: int) -> Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


def convolve(conv: layers.Conv, inputs: Array, kernel: Array, strides: Any, padding: Any) -> Array:
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


def risk(conv: layers.Conv, x: Array, kernels: Kernels) -> Array:
    """Layers with lopsided strides and padding, nonlinear in the input and all kernels."""
    hidden = jnp.tanh(convolve(conv, x, kernels[0], (2, 1), ((1, 2), (0, 1))))
    hidden = jnp.tanh(convolve(conv, hidden, kernels[1], (1, 2), "SAME"))
    return jnp.sum(jnp.sin(convolve(conv, hidden, kernels[2], (1, 1), ((2, 1), (-1, 2)))) ** 2)


def network(*lead: int) -> tuple[Array, Kernels]:
    """An input and kernels of `risk`, with leading axes."""
    shapes = (3, 2, 2, 3), (2, 3, 3, 2), (3, 3, 2, 2)
    kernels = tuple(noise(1 + i, *lead, *shape) for i, shape in enumerate(shapes))
    return noise(0, *lead, 2, 6, 5, 2), kernels


def assert_agree(of: Callable[[layers.Conv], Tree]) -> None:
    """`of(lowering)` is what it is for lax; one compilation for all of them."""
    results = jax.jit(lambda: {name: of(layers.lowering(name)) for name in ("lax", *OWN)})()
    for name in OWN:
        chex.assert_trees_all_close(results[name], results["lax"], rtol=1e-9, atol=1e-9)


@st.composite
def geometries(draw: st.DrawFn) -> tuple[Any, ...]:
    rank = draw(st.integers(1, 2))
    strides = tuple(draw(st.integers(1, 3)) for _ in range(rank))
    window = tuple(draw(st.integers(1, 5)) for _ in range(rank))
    space = tuple(draw(st.integers(size, 8)) for size in window)
    pads = st.tuples(*[st.tuples(st.integers(-1, 3), st.integers(1, 3))] * rank)
    padding = draw(pads | st.sampled_from(("SAME", "VALID")))
    images, channels, features = (draw(st.integers(1, 3)) for _ in range(3))
    return (images, *space, channels), (*window, channels, features), strides, padding


@st.composite
def threes(draw: st.DrawFn) -> tuple[Any, ...]:
    """Geometries of 3x3 windows at stride 1: whole and broken tiles."""
    space = tuple(draw(st.integers(3, 13)) for _ in range(2))
    pads = st.tuples(*[st.tuples(st.integers(-1, 6), st.integers(1, 6))] * 2)
    padding = draw(pads | st.sampled_from(("SAME", "VALID")))
    return (2, *space, 3), (3, 3, 3, 2), (1, 1), padding


@given(geometries() | threes())
def test_values_and_both_gradients_of_any_geometry(geometry):
    inputs_shape, kernel_shape, strides, padding = geometry
    inputs, kernel = noise(0, *inputs_shape), noise(1, *kernel_shape)

    def of(conv: layers.Conv) -> Tree:
        out, pull = jax.vjp(lambda x, w: convolve(conv, x, w, strides, padding), inputs, kernel)
        return out, pull(noise(2, *out.shape))

    assert_agree(of)


def test_second_derivatives_in_every_order():
    x, kernels = network()
    direction = jax.tree.map(lambda leaf: jnp.cos(7 * leaf), kernels)

    def of(conv: layers.Conv) -> Tree:
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

    assert_agree(of)


@pytest.mark.parametrize("name", OWN)
def test_finite_differences(name):
    def f(x: Array, w: Kernels) -> Array:
        return risk(layers.lowering(name), 0.3 * x, w)

    check_grads(jax.jit(f), network(), order=2, modes=("fwd", "rev"), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("derivative", ["forward_over_reverse", "reverse_over_forward"])
def test_fedipg_gradient(derivative):
    x, kernels = network()

    def of(conv: layers.Conv) -> Tree:
        return fedipg.penalised_value_and_grad(
            lambda w: risk(conv, x, w), 0.1, derivative=derivative
        )(kernels)

    assert_agree(of)


@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0), (1, -1)])
def test_vmapped_inputs_and_kernels(axes):
    x, kernels = network(3)

    def lay(tree: Tree, axis: int | None) -> Tree:
        return jax.tree.map(lambda a: a[0] if axis is None else jnp.moveaxis(a, 0, axis), tree)

    x, kernels = lay(x, axes[0]), lay(kernels, axes[1])

    def of(conv: layers.Conv) -> Tree:
        def total(x: Array, w: Kernels) -> Array:
            return jax.vmap(partial(risk, conv), axes)(x, w).sum()

        # The derivative inside of vmap, and vmap inside of the derivative.
        inside = jax.vmap(jax.grad(partial(risk, conv), (0, 1)), axes)(x, kernels)
        return inside, jax.grad(total, (0, 1))(x, kernels)

    assert_agree(of)


def test_vmapped_twice():
    x, kernels = network(2, 3)

    def of(conv: layers.Conv) -> Tree:
        clients = jax.vmap(jax.grad(partial(risk, conv), 1), (0, None))
        return jax.vmap(clients)(x, jax.tree.map(lambda w: w[:, 0], kernels))

    assert_agree(of)


def test_descent_in_a_scan():
    x, kernels = network()

    def of(conv: layers.Conv) -> Tree:
        def step(w: Kernels, _: None) -> tuple[Kernels, Array]:
            value, grads = jax.value_and_grad(partial(risk, conv, x))(w)
            return jax.tree.map(lambda w, g: w - 0.01 * g, w, grads), value

        def descend(w: Kernels) -> tuple[Kernels, Array]:
            return lax.scan(step, w, None, 3)

        # And a derivative through the loop.
        return descend(kernels), jax.grad(lambda w: descend(w)[1].sum())(kernels)

    assert_agree(of)


@pytest.mark.parametrize("kernel_axis", [None, 0])
def test_on_four_devices(kernel_axis):
    mesh = jax.make_mesh((4,), ("clients",), axis_types=(AxisType.Auto,))
    split, whole = PartitionSpec("clients"), PartitionSpec()
    x, kernels = network(8)
    if kernel_axis is None:
        kernels = jax.tree.map(lambda w: w[0], kernels)

    def gradients(conv: layers.Conv) -> Callable[..., Tree]:
        return jax.vmap(jax.grad(partial(risk, conv), 1), (0, kernel_axis))

    expected = jax.jit(gradients(lax.conv_general_dilated))(x, kernels)
    for name in OWN:
        sharded = jax.shard_map(
            gradients(layers.lowering(name)),
            mesh=mesh,
            in_specs=(split, whole if kernel_axis is None else split),
            out_specs=split,
            check_vma=False,
        )
        chex.assert_trees_all_close(jax.jit(sharded)(x, kernels), expected, rtol=1e-9, atol=1e-9)


def cnn_risk(name: str) -> tuple[Callable[[Variables], Array], Variables]:
    model = models.cnn(3, widths=(8, 16), conv=name)
    images = jnp.asarray(np.random.default_rng(0).integers(0, 256, (4, 6, 6, 1), np.uint8))
    variables = model.init(jax.random.key(0), images)
    return lambda v: jnp.sum(models.predict(model, v, images) ** 2), variables


def layouts(name: str, derivative: str) -> set[tuple[str, str]]:
    """Layouts and groups of the convolutions in FedIPG's steps of two clients under vmap."""
    f, variables = cnn_risk(name)

    def step(v: Variables, _: None) -> tuple[Variables, None]:
        _, grads = fedipg.penalised_value_and_grad(f, 0.1, derivative=derivative)(v)
        return jax.tree.map(lambda v, g: v - 0.1 * g, v, grads), None

    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), variables)
    program = jax.jit(lambda v: lax.scan(jax.vmap(step, (0, None)), v, None, 2)[0])
    text = program.lower(stacked).as_text()
    return set(re.findall(r"dim_numbers = (.*?), window.*feature_group_count = (\d+)", text))


@pytest.mark.parametrize("derivative", ["forward_over_reverse", "reverse_over_forward"])
def test_layouts_of_the_penalised_steps(derivative):
    canonical = ("[b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f]", "1")
    assert layouts("canonical", derivative) == {canonical}
    assert layouts("im2col", derivative) == set()
    assert layouts("winograd", derivative) == {canonical}  # the convolution at stride 2
    assert len(layouts("lax", derivative)) > 1


def test_auto_is_chosen_by_the_platform(monkeypatch):
    layouts_on = {}
    for platform in ("cpu", "gpu"):
        monkeypatch.setattr(jax, "default_backend", lambda platform=platform: platform)
        layouts_on[platform] = layouts("auto", "reverse_over_forward")
    assert layouts_on["cpu"] == layouts("canonical", "reverse_over_forward")
    assert layouts_on["gpu"] == layouts("im2col", "reverse_over_forward")


@pytest.mark.parametrize(("channels", "features"), [(32, 32), (31, 32), (32, 31)])
def test_auto_on_a_cpu_is_winograd_from_32_channels_on(channels, features):
    def products(name: str) -> int:
        conv = layers.lowering(name)
        x, kernel = noise(0, 1, 4, 4, channels), noise(1, 3, 3, channels, features)
        text = jax.jit(lambda: convolve(conv, x, kernel, (1, 1), "SAME")).lower().as_text()
        return text.count("dot_general")

    assert products("winograd") == 4
    assert products("auto") == (4 if channels == features == 32 else 0)


def test_rounding_of_winograd():
    x, kernel = noise(0, 2, 14, 14, 32), noise(1, 3, 3, 32, 32)
    out = noise(2, *x.shape)

    def rounded(name: str, dtype: Any) -> Tree:
        def conv(x: Array, w: Array) -> Array:
            return convolve(layers.lowering(name), x, w, (1, 1), "SAME")

        value, pull = jax.vjp(conv, x.astype(dtype), kernel.astype(dtype))
        return value, *pull(out.astype(dtype))

    def errors(name: str, dtype: Any) -> list[float]:
        pairs = zip(rounded(name, dtype), rounded("lax", jnp.float64), strict=True)
        return [float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b)) for a, b in pairs]

    assert max(errors("winograd", jnp.float32)) < 2e-6
    # Half precision is canonical.
    assert errors("winograd", jnp.bfloat16) == errors("canonical", jnp.bfloat16)


def test_cnn_is_the_same_network():
    results = {}
    for name in layers.LOWERINGS:
        f, variables = cnn_risk(name)
        results[name] = variables, jax.jit(jax.value_and_grad(f))(variables)
    for name in layers.LOWERINGS:
        chex.assert_trees_all_close(results[name], results["lax"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["auto", *OWN])
def test_in_flax(name):
    def layer(**arguments: Any) -> nn.Conv:
        return nn.Conv(3, (3,), 2, padding=1, dtype=jnp.bfloat16, precision="highest", **arguments)

    x = noise(0, 2, 3, 8, 2)  # two batch axes
    variables = layer().init(jax.random.key(0), x)
    own = layer(conv_general_dilated=layers.lowering(name))
    chex.assert_trees_all_close(own.apply(variables, x), layer().apply(variables, x), rtol=1e-2)
    text = jax.jit(jax.grad(lambda v: own.apply(v, x).sum())).lower(variables).as_text()
    assert "HIGHEST" in text
    assert "DEFAULT" not in text


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"feature_group_count": 2}, "feature_group_count=2: must be 1 unless conv is 'lax'"),
        ({"kernel_dilation": 2}, r"rhs_dilation=\(2, 2\): must be \(1, 1\) unless conv is 'lax'"),
        ({"input_dilation": 2}, r"lhs_dilation=\(2, 2\): must be \(1, 1\) unless conv is 'lax'"),
        ({"padding": "VALID"}, r"window \(3, 3\) must fit into \(4, 2\)"),
    ],
)
@pytest.mark.parametrize("name", ["auto", *OWN])
def test_what_only_lax_can_do_is_refused(name, arguments, error):
    layer = nn.Conv(4, (3, 3), conv_general_dilated=layers.lowering(name), **arguments)
    with pytest.raises(ValueError, match=error):
        layer.init(jax.random.key(0), jnp.ones((1, 4, 2, 2)))


@pytest.mark.parametrize("name", OWN)
def test_other_layouts_are_refused(name):
    x = jnp.ones((1, 2, 4, 4))
    with pytest.raises(ValueError, match="dimension_numbers=None: must be channels last"):
        layers.lowering(name)(x, jnp.ones((2, 2, 3, 3)), (1, 1), "SAME")


def test_unknown_lowering():
    message = "^conv='fft': must be one of auto, lax, im2col, canonical, winograd$"
    with pytest.raises(ValueError, match=message):
        layers.lowering("fft")
    with pytest.raises(ValueError, match=message):
        models.cnn(10, conv="fft")


@pytest.mark.parametrize("size", [1, 2, 3])
def test_max_pool_is_that_of_flax_with_its_gradient(size: int) -> None:
    x = jax.random.normal(jax.random.key(0), (2, 7, 8, 3))  # nowhere a tie

    def flax_pool(x: Array) -> Array:
        return nn.max_pool(x, (size, size), (size, size))

    def pool(x: Array) -> Array:
        return layers.max_pool(x, size)

    chex.assert_trees_all_close(pool(x), flax_pool(x))
    weights = jax.random.normal(jax.random.key(1), pool(x).shape)
    got, expected = (jax.grad(lambda x, p=p: (p(x) * weights).sum())(x) for p in (pool, flax_pool))
    chex.assert_trees_all_close(got, expected)
