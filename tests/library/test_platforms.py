"""The precision of products, in the text of programs for devices that are not here."""

import re
from collections import Counter
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

from fedjax_inv import platforms
from fedjax_inv.ahead import Ahead
from fedjax_inv.models import lowerings
from fedjax_inv.types import Array


def precisions(fn: Callable[..., Array], platform: str, precision: str) -> Counter[str]:
    """Count the products and convolutions of fn(x, kernel) by their precision."""

    def traced(x: Array, kernel: Array) -> Array:
        with platforms.products_at(precision):
            return fn(x, kernel)

    x, kernel = (jnp.zeros(shape) for shape in ((2, 5, 5, 3), (3, 3, 3, 4)))
    compiler = "cuda" if platform == "gpu" else platform
    with platforms.traced_for(platform):
        lowered = jax.jit(traced).trace(x, kernel).lower(lowering_platforms=(compiler,))
    text = lowered.as_text()
    count = len(re.findall(r"stablehlo\.(?:dot_general|convolution)", text))
    # A convolution writes its precision as a list of attributes.
    said = re.findall(r"precision(?:_config)? = \[(?:#stablehlo<precision )?(\w+)", text)
    assert len(said) == count
    return Counter(said)


def curvature(conv: str) -> Callable[[Array, Array], Array]:
    """Second derivatives of a convolution's risk along the kernel, as in FedIPG."""

    def risk(x: Array, kernel: Array) -> Array:
        numbers = ("NHWC", "HWIO", "NHWC")
        out = lowerings.lowering(conv)(
            x, kernel, (1, 1), ((1, 1), (1, 1)), dimension_numbers=numbers
        )
        return jnp.sum(out**3)

    def product(x: Array, kernel: Array) -> Array:
        return jax.jvp(lambda k: jax.grad(risk, 1)(x, k), (kernel,), (kernel,))[1]

    return product


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
@pytest.mark.parametrize("conv", ["auto", "canonical"])
def test_products_and_their_derivatives_have_the_precision_of_the_context(
    platform: str, conv: str
) -> None:
    for precision in platforms.PRECISIONS:
        if (platform, precision) == ("gpu", "high"):
            continue  # the next test
        found = precisions(curvature(conv), platform, precision)
        assert set(found) == {precision.upper()}, found
        assert found.total() >= 3


def test_high_is_three_products_of_tf32_on_a_gpu() -> None:
    with platforms.traced_for("gpu"), platforms.products_at("high"):
        lowered = jax.jit(jnp.matmul).trace(jnp.ones((2, 3)), jnp.ones((3, 4)))
        text = lowered.lower(lowering_platforms=("cuda",)).as_text()
    assert "tf32" in text
    assert "num_primitive_operations = 3" in text


def test_a_cpu_knows_no_precision() -> None:
    assert set(precisions(curvature("canonical"), "cpu", "highest")) == {"DEFAULT"}


def test_what_is_traced_for_one_platform_is_not_reused_for_another() -> None:
    """Also in a thread that prepares a program ahead."""
    on_cpu = jax.jit(lambda: jnp.bool_(platforms.on_cpu()))
    with Ahead() as ahead:
        for platform in ("cpu", "gpu", "cpu"):
            with platforms.traced_for(platform):
                ahead.begin(platform, on_cpu)
                assert bool(on_cpu()) == (platform == "cpu")
            assert bool(ahead.take(platform, on_cpu)) == (platform == "cpu")
