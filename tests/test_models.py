import jax
import jax.numpy as jnp
import numpy as np
import pytest

import federations
from federations import assert_close, assert_equal
from fedjax_inv import models
from fedjax_inv.types import Halves, Model, Tree, Variables

KEY = jax.random.key(0)


def images(shape: tuple[int, ...], seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).integers(0, 256, (2, *shape)), jnp.uint8)


@pytest.mark.parametrize("shape", [(8, 8, 1), (28, 28, 1), (32, 32, 3)])
@pytest.mark.parametrize("make", [models.mlp, models.cnn])
def test_logits_have_a_row_for_each_image(make, shape: tuple[int, ...]) -> None:
    model, x = make(10), images(shape)
    shapes = jax.eval_shape(lambda: models.predict(model, model.init(KEY, x), x))
    assert shapes.shape == (2, 10)
    assert shapes.dtype == jnp.float32


def test_an_mlp_is_its_formula() -> None:
    model, x = models.mlp(3, widths=(5, 4)), images((6, 6, 1))
    variables = randomised(model.init(KEY, x))
    body, head = variables.params
    hidden = np.asarray(x, np.float64).reshape(2, -1) / 255
    for layer in (body["blocks_0"], body["blocks_1"]):
        dense = layer["Dense_0"]
        hidden = np.maximum(hidden @ dense["kernel"] + dense["bias"], 0)
    expected = hidden @ head["blocks_0"]["Dense_0"]["kernel"] + head["blocks_0"]["Dense_0"]["bias"]
    assert_close(models.predict(model, variables, x), expected, atol=1e-4)


@pytest.mark.parametrize("train", [True, False])
def test_a_normed_mlp_is_its_formula(train: bool) -> None:
    """Dense without a bias, batch normalisation over the real examples, then the activation."""
    model = models.mlp(3, widths=(5, 4), activation="elu", norm="batch")
    x = jnp.asarray(np.random.default_rng(1).integers(0, 256, (6, 6, 6, 1)), jnp.uint8)
    mask = jnp.array([True, True, False, True, True, False])
    variables = randomised(model.init(KEY, x))
    (body, head), stats = jax.tree.map(np.float64, variables)
    hidden = np.asarray(x, np.float64).reshape(6, -1)[np.asarray(mask)] / 255
    for i in range(2):
        layer, running = body[f"blocks_{i}"], stats.body[f"blocks_{i}"]["BatchNorm_0"]
        assert set(layer["Dense_0"]) == {"kernel"}
        hidden = hidden @ layer["Dense_0"]["kernel"]
        mean, var = (hidden.mean(0), hidden.var(0)) if train else (running["mean"], running["var"])
        norm = layer["BatchNorm_0"]
        hidden = (hidden - mean) / np.sqrt(var + 1e-5) * norm["scale"] + norm["bias"]
        hidden = np.where(hidden > 0, hidden, np.expm1(hidden))
    dense = head["blocks_0"]["Dense_0"]
    logits, _ = models.apply(model, variables, x, mask, train)
    assert_close(logits[mask], hidden @ dense["kernel"] + dense["bias"], rtol=1e-3, atol=1e-3)


def test_a_cnn_is_its_formula() -> None:
    """Convolution with padding 1, the second of stride 2, then ReLU, then GroupNorm."""
    model, x = models.cnn(3, widths=(8, 16)), images((7, 6, 2))
    variables = randomised(model.init(KEY, x))
    hidden = np.asarray(x, np.float64) / 255
    for i, stride in enumerate((1, 2)):
        layer = jax.tree.map(np.float64, variables.params.body[f"blocks_{i}"])
        kernel = layer["Conv_0"]["kernel"]
        padded = np.pad(hidden, [(0, 0), (1, 1), (1, 1), (0, 0)])
        height, width = (-(-size // stride) for size in hidden.shape[1:3])
        out = np.zeros((2, height, width, kernel.shape[-1]))
        for row, column in np.ndindex(height, width):
            patch = padded[:, row * stride :, column * stride :][:, :3, :3]
            out[:, row, column] = np.einsum("bijc,ijcd->bd", patch, kernel)
        out = np.maximum(out + layer["Conv_0"]["bias"], 0)
        groups = out.reshape(*out.shape[:3], 8, -1)
        mean, var = (f(groups, axis=(1, 2, 4), keepdims=True) for f in (np.mean, np.var))
        normed = ((groups - mean) / np.sqrt(var + 1e-6)).reshape(out.shape)
        hidden = normed * layer["GroupNorm_0"]["scale"] + layer["GroupNorm_0"]["bias"]
    dense = variables.params.head["blocks_0"]["Dense_0"]
    expected = hidden.mean((1, 2)) @ dense["kernel"] + dense["bias"]
    assert_close(models.predict(model, variables, x), expected, rtol=1e-3, atol=1e-3)


def randomised(variables: Variables) -> Variables:
    """Biases too, which start at zero."""
    leaves, treedef = jax.tree.flatten(variables)
    rng = np.random.default_rng(0)
    return jax.tree.unflatten(
        treedef, [leaf + 0.3 * rng.normal(size=leaf.shape).astype(np.float32) for leaf in leaves]
    )


def recut(tree: Halves, cut: int) -> Halves:
    """The blocks of both halves, dealt to the halves of another cut."""
    blocks = [half[f"blocks_{i}"] for half in tree for i in range(len(half))]
    halves = blocks[:cut], blocks[cut:]
    return Halves(*({f"blocks_{i}": block for i, block in enumerate(half)} for half in halves))


def normed(cut: int) -> Model:
    blocks = [federations.NormedHidden(5), federations.NormedHidden(4), federations.NormedHidden(3)]
    return models.from_blocks(blocks, cut)


@pytest.mark.parametrize(
    ("make", "default", "num_blocks"),
    [
        (lambda cut=None: models.mlp(3, widths=(5, 4), cut=cut), 2, 3),
        (lambda cut=None: models.cnn(3, widths=(8, 16), cut=cut), 2, 3),
        (lambda cut=None: models.mlp(3, widths=(5, 4), norm="batch", cut=cut), 2, 3),
        (lambda cut=2: normed(cut), 2, 3),
    ],
    ids=["mlp", "cnn", "normed mlp", "normed"],
)
def test_the_cut_can_move(make, default: int, num_blocks: int) -> None:
    x, mask = images((6, 6, 1)), jnp.array([True, False])
    model = make()
    variables = randomised(model.init(KEY, x))
    assert len(jax.tree.leaves(variables.params.body)) > 0
    expected, expected_stats = models.apply(model, variables, x, mask, True)
    for cut in range(num_blocks):
        moved = make(cut)
        fresh = moved.init(KEY, x)
        split = (
            Variables(recut(variables.params, cut), recut(variables.stats, cut))
            if (variables.stats.body or variables.stats.head)
            else Variables(recut(variables.params, cut), variables.stats)
        )
        assert jax.tree.map(jnp.shape, fresh) == jax.tree.map(jnp.shape, split)
        logits, stats = models.apply(moved, split, x, mask, True)
        assert_close(logits, expected, atol=1e-5)
        assert_equal(jax.tree.leaves(stats), jax.tree.leaves(expected_stats))
        features, _ = moved.encode(split.params.body, split.stats.body, x, mask, True)
        again, _ = moved.decode(split.params.head, split.stats.head, features, mask, True)
        assert_equal(again, logits)
    assert jax.tree.map(jnp.shape, make(default).init(KEY, x)) == jax.tree.map(jnp.shape, variables)


def test_eight_bit_images_are_scaled_and_others_are_not() -> None:
    model, x = federations.mlp(), images(federations.IMAGE)
    variables = model.init(KEY, x)
    logits = models.predict(model, variables, x)
    assert_equal(models.predict(model, variables, x.astype(jnp.float32) / 255), logits)
    assert jnp.abs(models.predict(model, variables, x.astype(jnp.float32)) - logits).max() > 1


def test_statistics_change_in_training_only_and_in_both_halves() -> None:
    model, x = federations.normed(), images(federations.IMAGE)
    variables = randomised(model.init(KEY, x))
    mask = jnp.array([True, True])
    _, same = models.apply(model, variables, x, mask, False)
    assert_equal(same, variables.stats)
    _, changed = models.apply(model, variables, x, mask, True)
    for old, new in zip(jax.tree.leaves(variables.stats), jax.tree.leaves(changed), strict=True):
        assert jnp.abs(new - old).max() > 1e-3
    assert len(jax.tree.leaves(changed.body)) == len(jax.tree.leaves(changed.head)) == 2
    _, one = models.apply(model, variables, x, jnp.array([True, False]), True)
    garbage = x.at[1].set(0)
    assert_close(models.apply(model, variables, garbage, jnp.array([True, False]), True)[1], one)


def test_the_halves_start_from_keys_of_their_own() -> None:
    model = models.from_blocks([federations.Linear(36), federations.Linear(36)], 1)
    body, head = model.init(KEY, images(federations.IMAGE)).params
    kernels: list[Tree] = [half["blocks_0"]["Dense_0"]["kernel"] for half in (body, head)]
    assert jnp.abs(kernels[0] - kernels[1]).max() > 0.01


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: models.mlp(3, widths=(5, 0)), r"widths=\(5, 0\): each must be at least 1"),
        (lambda: models.mlp(3, norm="layer"), "norm='layer': must be one of none, batch"),
        (lambda: models.mlp(3, activation="tan"), "activation='tan': must be one of relu, elu"),
        (lambda: models.cnn(3, widths=(8, 12)), r"widths=\(8, 12\): .* multiple of 8"),
        (lambda: models.cnn(3, widths=(0,)), r"widths=\(0,\): .* multiple of 8"),
        (lambda: models.mlp(3, widths=(5, 4), cut=3), "cut=3: must be between 0 and 2"),
        (lambda: models.cnn(3, widths=(8,), cut=-1), "cut=-1: must be between 0 and 1"),
    ],
)
def test_impossible_networks_are_refused(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
