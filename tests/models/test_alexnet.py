"""The small AlexNet: its formula, its size, its cut, its dropout."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from federations import assert_close, assert_equal
from fedjax_inv import models
from fedjax_inv.types import Array, Halves, Model, Tree, Variables

KEY = jax.random.key(0)
WIDTHS = (2, 3, 4, 3, 2, 5, 4)
POOLED = (True, True, False, False, True)


def tiny(**arguments) -> Model:
    return models.alexnet(3, widths=WIDTHS, **arguments)


def images(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, shape, np.uint8)


def randomised(model: Model, x: Tree) -> Variables:
    params, stats = jax.eval_shape(model.init, KEY, x)
    rng = np.random.default_rng(0)
    return Variables(
        jax.tree.map(lambda a: 0.4 * rng.normal(size=a.shape).astype(np.float32), params), stats
    )


def recut(params: Halves, cut: int) -> Halves:
    blocks = [half[f"blocks_{i}"] for half in params for i in range(len(half))]
    halves = blocks[:cut], blocks[cut:]
    return Halves(*({f"blocks_{i}": block for i, block in enumerate(half)} for half in halves))


def formula(layers: list[Tree], x: np.ndarray) -> np.ndarray:
    """In float64, on the variables of the layers in their order."""
    hidden = np.float64(x) / 255
    for layer, pooled in zip(layers, POOLED, strict=False):
        kernel, bias = (np.float64(layer["Conv_0"][name]) for name in ("kernel", "bias"))
        size, (height, width) = len(kernel), hidden.shape[1:3]
        sides = (size // 2, size // 2)
        padded = np.pad(hidden, [(0, 0), sides, sides, (0, 0)])
        out = np.zeros((*hidden.shape[:3], kernel.shape[-1]))
        for row, column in np.ndindex(height, width):
            window = padded[:, row : row + size, column : column + size]
            out[:, row, column] = np.einsum("bijc,ijcd->bd", window, kernel)
        hidden = np.maximum(out + bias, 0)
        if pooled:
            small = np.zeros((len(x), height // 2, width // 2, kernel.shape[-1]))
            for row, column in np.ndindex(small.shape[1:3]):
                window = hidden[:, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2]
                small[:, row, column] = window.max((1, 2))
            hidden = small
    hidden = hidden.reshape(len(x), -1)
    for number, layer in enumerate(layers[len(POOLED) :]):
        dense = layer["Dense_0"]
        hidden = hidden @ np.float64(dense["kernel"]) + dense["bias"]
        hidden = np.maximum(hidden, 0) if number < 2 else hidden
    return hidden


@pytest.mark.slow
def test_is_its_formula_at_every_cut() -> None:
    x, mask = images(3, 9, 17, 2), np.array([True, False, True])
    whole = tiny()
    variables = randomised(whole, x)
    blocks = recut(variables.params, 8).body
    expected = formula([blocks[f"blocks_{i}"] for i in range(8)], x)
    assert np.abs(expected[0] - expected[1]).max() > 1e-3
    cuts = [tiny(cut=cut) for cut in range(8)]
    for cut, model in enumerate(cuts):
        shapes = jax.tree.map(np.shape, jax.eval_shape(model.init, KEY, x).params)
        assert shapes == jax.tree.map(np.shape, recut(variables.params, cut))
    assert jax.eval_shape(whole.init, KEY, x) == jax.eval_shape(cuts[7].init, KEY, x)

    @jax.jit
    def outputs(variables: Variables, x: Array) -> list[Array]:
        return [
            models.apply(model, Variables(recut(variables.params, cut), variables.stats), *inputs)[
                0
            ]
            for cut, model in ((7, whole), (0, cuts[0]), (3, cuts[3]), (6, cuts[6]))
            for inputs in ((x, mask, False), (x, mask, True))  # no key: nothing drops
        ]

    for logits in outputs(variables, x):
        assert_close(logits, expected)


def test_has_as_many_parameters_as_it_says() -> None:
    params = jax.eval_shape(models.alexnet(10).init, KEY, images(1, 28, 28, 1)).params
    blocks = recut(params, 8).body
    counts = [sum(a.size for a in jax.tree.leaves(blocks[f"blocks_{i}"])) for i in range(8)]
    assert counts == [832, 76_896, 166_080, 221_312, 147_584, 295_168, 65_792, 2_570]
    for count in (*counts, sum(counts)):
        assert f"{count:,}" in (models.alexnet.__doc__ or "")


def test_dropout_before_both_dense_layers_in_training_only() -> None:
    """The first of them is in the body and the second in the head."""
    x, mask = images(2, 8, 8, 1), np.ones(2, bool)
    model, without = tiny(dropout=0.5, cut=6), tiny(cut=6)
    variables = randomised(model, x)
    (body, head), _ = variables

    @jax.jit
    def outputs() -> Tree:
        keys = jax.random.split(KEY, 20)
        features = jnp.ones((2, WIDTHS[5]))

        def drawn(key: Array) -> tuple[Array, Array]:
            encoded = model.encode(body, {}, x, mask, True, key)[0]
            return encoded, model.decode(head, {}, features, mask, True, key)[0]

        plain = [models.predict(network, variables, x) for network in (model, without)]
        return plain, jax.vmap(drawn)(keys), jax.vmap(drawn)(keys[:1])

    plain, drawn, again = outputs()
    assert_equal(*plain)
    for first, same in zip(drawn, again, strict=True):
        assert_close(same[0], first[0])
        assert len(np.unique(first, axis=0)) > 1
