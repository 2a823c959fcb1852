import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import slow
from federations import assert_close, assert_equal
from fedjax_inv import averaging, cse, models, objectives
from fedjax_inv.algorithms import fedipg
from fedjax_inv.cse import eliminate_common_subexpressions
from fedjax_inv.types import Array, Batch, Model, Tree


@pytest.fixture(autouse=True)
def warnings(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """The warnings of a test, which must have none unless it takes them away."""
    cse._warn.cache_clear()
    yield caplog
    assert not caplog.records


def products(fn: Callable[..., Tree], *arguments: Tree) -> int:
    """Products of matrices that a traced function does."""
    return len(re.findall(r"dot_general\[", str(jax.make_jaxpr(fn)(*arguments))))


def along_itself(fn: Callable[[Tree], Tree]) -> Callable[[Tree], Tree]:
    return lambda x: jax.jvp(fn, (x,), (x,))


MATRIX = jnp.asarray(np.random.default_rng(0).normal(size=(4, 4)), jnp.float32)


def of_many_kinds(x: dict[str, Array]) -> dict[str, Any]:
    """Functions of functions, loops, draws, constants, what has no operand and what fills lists."""
    a, b = x["a"], x["b"]
    key = jax.random.key(3)
    noise = [jax.random.normal(k, a.shape) for k in (key, key, jax.random.fold_in(key, 1))]
    turned = jax.lax.fori_loop(0, 3, lambda i, y: jnp.sin(y) @ MATRIX + i, a)
    halves = jnp.split(jnp.sort(a, axis=0), 2)
    chosen = jax.lax.cond(b > 0, lambda y: y @ y, lambda y: y - 1, a)
    sums = jax.vmap(lambda row: nn.relu(row @ MATRIX) + nn.relu(a[0] @ MATRIX))(a)
    soft = jax.nn.log_softmax(nn.elu(a)) + jax.jit(jax.nn.log_softmax)(jax.jit(nn.elu)(a))
    return {"noise": noise, "halves": halves, "rest": (turned, chosen, sums, soft, a, 2.0, key)}


@pytest.mark.parametrize(
    "fn", slow.after(1, [of_many_kinds, along_itself(lambda x: of_many_kinds(x)["rest"][:4])])
)
def test_what_is_shared_is_what_it_was(fn: Callable[[Tree], Tree]) -> None:
    x = {"a": MATRIX, "b": jnp.float32(0.5)}
    assert_equal(eliminate_common_subexpressions(fn)(x), fn(x))
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, -leaf, 2 * leaf]), x)
    assert_close(
        jax.jit(jax.vmap(eliminate_common_subexpressions(fn)))(stacked),
        jax.jit(jax.vmap(fn))(stacked),
    )


def test_two_products_of_the_same_arrays_are_one_and_have_the_gradient_of_both() -> None:
    def twice(x: Array) -> Array:
        other = jax.jit(jnp.matmul)(x, MATRIX)
        return jnp.sum((x @ MATRIX) * jnp.sin(other)) + jnp.sum(MATRIX @ x)

    assert (products(twice, MATRIX), products(eliminate_common_subexpressions(twice), MATRIX)) == (
        3,
        2,
    )
    # Of each product the one transpose along x.
    assert (
        products(jax.grad(twice), MATRIX)
        - products(jax.grad(eliminate_common_subexpressions(twice)), MATRIX)
        == 2
    )
    assert_close(
        jax.grad(eliminate_common_subexpressions(twice))(2 * MATRIX), jax.grad(twice)(2 * MATRIX)
    )


@jax.custom_jvp
def at_least_1(x: Array) -> Array:
    return jnp.maximum(x, 1)


at_least_1.defjvps(lambda along, value, x: jnp.where(x > 1, along, 0))


def test_a_relu_is_its_derivative_along_its_argument() -> None:
    relu = along_itself(nn.relu)
    x = jnp.array([-2.0, -0.0, 0.0, 3.0, jnp.inf, -jnp.inf])
    value, derivative = eliminate_common_subexpressions(relu)(x)
    assert_equal((value, derivative), relu(x))
    assert all(np.isnan(eliminate_common_subexpressions(relu)(jnp.array([jnp.nan])))), (
        "a NaN must not be lost"
    )

    def network(x: Array) -> Array:
        return jnp.sum(nn.relu(x @ MATRIX) @ MATRIX)

    # The second layer's two products, of the ReLU and of its derivative, are one.
    assert products(eliminate_common_subexpressions(along_itself(network)), MATRIX) == 2

    def others(x: Array) -> tuple[Array, ...]:
        """What looks like it."""
        return (
            jnp.maximum(x, 0),
            jnp.maximum(x, 1),
            at_least_1(x),
            1 / (0 * x + 0.0),
            1 / (0 * x + -0.0),
            jnp.where(x > 1, x, 0),
            jnp.where(x > 0, x, 1),
            jnp.where(x > 0, x * x, 0),
            jnp.where(x - 1 > 0, x, 0),
            jnp.where(x < 0, x, 0),
            nn.relu6(x),
            nn.leaky_relu(x),
        )

    for fn in (others, along_itself(others)):
        assert_equal(eliminate_common_subexpressions(fn)(x[:4] + 0.5), fn(x[:4] + 0.5))


def mean_risk(model: Model, stats: Tree, params: Tree) -> Array:
    batch = Batch(jnp.ones((6, 4)), jnp.arange(6) % 3, jnp.ones(6, bool))
    key = jax.random.key(0)
    return averaging.risk(model, objectives.cross_entropy, params, stats, batch, key)[0]


@pytest.mark.parametrize("depth", [1, 4])
def test_a_penalised_step_of_relu_layers_does_few_products_more_than_a_plain_one(
    depth: int,
) -> None:
    """The penalty costs nothing in the first two layers, of whose inputs the derivatives are the
    inputs; in each of the others, a product of the derivative, and its two transposes."""
    model = models.mlp(3, widths=(5,) * depth)
    params, stats = model.init(jax.random.key(0), jnp.ones((1, 4)))
    risk = partial(mean_risk, model, stats)
    fewest = products(jax.grad(risk), params)
    assert fewest == 3 * (depth + 1) - 1  # the data need no gradient
    penalised = fedipg.penalised_value_and_grad(risk, 0.1)
    assert products(penalised, params) - fewest == 3 * max(0, depth - 1)


def broken(*_: Any, **__: Any) -> Any:
    raise NotImplementedError("renamed\nin a later release")


RELU = along_itself(lambda x: jnp.sum(nn.relu(x @ MATRIX) @ MATRIX))


def test_what_cannot_be_read_runs_as_it_is_and_says_so_once(
    warnings: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = RELU(MATRIX)
    with monkeypatch.context() as patch:
        patch.setattr("fedjax_inv.cse.jax.make_jaxpr", broken)
        for _ in range(2):
            assert_equal(eliminate_common_subexpressions(RELU)(MATRIX), expected)
    (record,) = warnings.records
    assert "FedIPG is slower" in record.getMessage()
    assert "\n" not in record.getMessage()
    warnings.clear()
