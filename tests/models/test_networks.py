"""The networks against their formulas in NumPy, at several cuts; their sizes."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import formulas
from federations import assert_close, assert_equal
from fedjax_inv import models
from fedjax_inv.checks import UsageError
from fedjax_inv.types import Array, Model, Tree, Variables
from formulas import images, randomised, recut

KEY = jax.random.key(0)
ALEXNET = partial(models.alexnet, 3, widths=(2, 3, 4, 3, 2, 5, 4))


def elu(x: np.ndarray) -> np.ndarray:
    return np.where(x > 0, x, np.expm1(x))


NETWORKS = {
    "mlp": (partial(models.mlp, 3, widths=(5, 4)), 1, {}),
    "normed mlp": (
        partial(models.mlp, 3, widths=(5, 4), activation="elu", norm="batch"),
        1,
        dict(activation=elu),
    ),
    "cnn": (partial(models.cnn, 3, widths=(8, 16)), 0, dict(strides=(1, 2))),
    "leaf_cnn": (partial(models.leaf_cnn, 3, widths=(3, 2, 5)), 1, dict(pools=(True, True))),
    "lenet": (partial(models.lenet, 3, widths=(3, 2, 5, 4)), 3, dict(pools=(True, True))),
    "normed lenet": (
        partial(models.lenet, 3, widths=(3, 2, 5, 4), norm="batch"),
        1,
        dict(pools=(True, True)),
    ),
    "alexnet": (ALEXNET, 6, dict(pools=(True, True, False, False, True))),
}


@pytest.mark.parametrize(("make", "cut", "formula"), NETWORKS.values(), ids=NETWORKS)
def test_is_its_formula_wherever_it_is_cut(
    make: Callable[..., Model], cut: int, formula: dict[str, Any]
) -> None:
    """In evaluation mode cut by default, and in training mode, on the real examples, at `cut`."""
    whole, x, mask = make(), images(4, 9, 8, 2), np.array([True, False, True, True])
    variables = randomised(whole, x)
    count = len(variables.params.body)
    cuts = [
        Variables(recut(variables.params, at), recut(variables.stats, at))
        for at in range(count + 1)
    ]
    for at, dealt in enumerate(cuts):
        fresh = jax.eval_shape(make(cut=at).init, KEY, x)
        assert jax.tree.map(np.shape, fresh.params) == jax.tree.map(np.shape, dealt.params)
        leaves = [jax.tree.map(np.shape, jax.tree.leaves(each.stats)) for each in (fresh, dealt)]
        assert leaves[0] == leaves[1]
    assert jax.eval_shape(make(cut=count).init, KEY, x) == jax.eval_shape(whole.init, KEY, x)

    @jax.jit
    def outputs(variables: Variables, moved: Variables) -> tuple[Array, Array]:
        trained, _ = models.apply(make(cut=cut), moved, x, mask, True)
        return models.predict(whole, variables, x), trained

    predicted, trained = outputs(variables, cuts[cut])
    expected = [
        formulas.network(variables, at / 255, train, **formula)
        for at, train in ((x, False), (x[mask], True))
    ]
    assert np.abs(expected[0][0] - expected[0][1]).max() > 1e-3
    assert_close((predicted, trained[mask]), tuple(expected), rtol=1e-3, atol=1e-3)


def sizes(model: Model, *image: int) -> list[int]:
    """Parameters of each block."""
    params = jax.eval_shape(model.init, KEY, images(1, *image)).params
    return [sum(a.size for a in jax.tree.leaves(block)) for block in formulas.blocks(params)]


def test_have_as_many_parameters_as_they_say() -> None:
    of_alexnet = sizes(models.alexnet(10), 28, 28, 1)
    assert of_alexnet == [832, 76_896, 166_080, 221_312, 147_584, 295_168, 65_792, 2_570]
    for count in (*of_alexnet, sum(of_alexnet)):
        assert f"{count:,}" in (models.alexnet.__doc__ or "")
    assert sizes(models.lenet(10), 28, 28, 1) == [832, 25_632, 803_328, 196_992, 73_920, 1_930]
    assert sum(sizes(models.leaf_cnn(62), 28, 28, 1)) == 6_603_710  # as in McMahan et al.


def test_dropout_before_both_dense_layers_of_alexnet_in_training_only() -> None:
    """The first of them is in the body and the second in the head."""
    x, mask = images(2, 8, 8, 1), np.ones(2, bool)
    model, without = ALEXNET(dropout=0.5, cut=6), ALEXNET(cut=6)
    variables = randomised(model, x)
    (body, head), _ = variables

    @jax.jit
    def outputs() -> Tree:
        keys = jax.random.split(KEY, 20)

        def drawn(key: Array) -> tuple[Array, Array]:
            encoded = model.encode(body, {}, x, mask, True, key)[0]
            return encoded, model.decode(head, {}, jnp.ones((2, 5)), mask, True, key)[0]

        plain = [models.predict(network, variables, x) for network in (model, without)]
        return plain, jax.vmap(drawn)(keys)

    plain, drawn = outputs()
    assert_equal(*plain)
    for draws in drawn:
        assert len(np.unique(draws, axis=0)) > 1


@pytest.mark.parametrize(
    ("model", "image"),
    [(models.lenet(3), (3, 9, 1)), (models.leaf_cnn(3), (9, 3, 1)), (models.cnn(3), (9, 9))],
)
def test_what_a_network_cannot_see_is_refused(model: Model, image: tuple[int, ...]) -> None:
    """Poolings would leave nothing of a small image."""
    with pytest.raises(UsageError):
        jax.eval_shape(model.init, KEY, images(2, *image))
