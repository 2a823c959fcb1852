"""Networks: the factories' formulas, halves that can be cut anywhere, draws, one's own networks."""

from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.errors import FlaxError

import federations
from federations import assert_close, assert_equal
from fedjax_inv import models, objectives
from fedjax_inv.checks import UsageError
from fedjax_inv.types import Array, Halves, Model, Tree, Variables

KEY = jax.random.key(0)

NORMED = federations.normed()


def images(shape: tuple[int, ...], number: int = 2) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (number, *shape), np.uint8)


def randomised(model: Model, x: Tree) -> Variables:
    """Variables of no symmetry, and with biases, which start at zero."""
    rng = np.random.default_rng(0)
    params, stats = jax.eval_shape(model.init, KEY, x)
    return Variables(
        jax.tree.map(lambda a: 0.3 * rng.normal(size=a.shape).astype(np.float32), params),
        jax.tree.map(lambda a: 0.5 + rng.random(a.shape, np.float32), stats),
    )


@partial(jax.jit, static_argnums=(0, 4))
def applied(
    model: Model, variables: Variables, x: Tree, mask: Array, train: bool, key: Array | None = None
) -> tuple[Array, Halves]:
    return models.apply(model, variables, x, mask, train, key)


@partial(jax.jit, static_argnums=0)
def predicted(model: Model, variables: Variables, x: Tree) -> Array:
    return models.predict(model, variables, x)


def test_an_mlp_is_its_formula() -> None:
    model, x = models.mlp(3, widths=(5, 4)), images((6, 6, 1))
    variables = randomised(model, x)
    body, head = variables.params
    hidden = np.float64(x).reshape(2, -1) / 255
    for layer in (body["blocks_0"], body["blocks_1"]):
        dense = layer["Dense_0"]
        hidden = np.maximum(hidden @ dense["kernel"] + dense["bias"], 0)
    expected = hidden @ head["blocks_0"]["Dense_0"]["kernel"] + head["blocks_0"]["Dense_0"]["bias"]
    assert_close(predicted(model, variables, x), expected, atol=1e-4)


@pytest.mark.parametrize("train", [True, False])
def test_a_normed_mlp_is_its_formula(train: bool) -> None:
    """Dense without a bias, batch normalisation over the real examples, then the activation."""
    model = models.mlp(3, widths=(5, 4), activation="elu", norm="batch")
    x, mask = images((6, 6, 1), 6), np.array([True, True, False, True, True, False])
    variables = randomised(model, x)
    (body, head), stats = jax.tree.map(np.float64, variables)
    hidden = np.float64(x).reshape(6, -1)[mask] / 255
    for i in range(2):
        layer, running = body[f"blocks_{i}"], stats.body[f"blocks_{i}"]["BatchNorm_0"]
        assert set(layer["Dense_0"]) == {"kernel"}
        hidden = hidden @ layer["Dense_0"]["kernel"]
        mean, var = (hidden.mean(0), hidden.var(0)) if train else (running["mean"], running["var"])
        norm = layer["BatchNorm_0"]
        hidden = (hidden - mean) / np.sqrt(var + 1e-5) * norm["scale"] + norm["bias"]
        hidden = np.where(hidden > 0, hidden, np.expm1(hidden))
    dense = head["blocks_0"]["Dense_0"]
    logits, _ = applied(model, variables, x, mask, train)
    assert_close(logits[mask], hidden @ dense["kernel"] + dense["bias"], rtol=1e-3, atol=1e-3)


def test_a_cnn_is_its_formula() -> None:
    """Convolution with padding 1, the second of stride 2, then ReLU, then GroupNorm."""
    model, x = models.cnn(3, widths=(8, 16)), images((7, 6, 2))
    variables = randomised(model, x)
    hidden = np.float64(x) / 255
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
    assert_close(predicted(model, variables, x), expected, rtol=1e-3, atol=1e-3)


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
        (lambda cut=2: normed(cut), 2, 3),
    ],
    ids=["mlp", "cnn", "normed"],
)
def test_the_cut_can_move(make, default: int, num_blocks: int) -> None:
    x, mask = images((6, 6, 1)), jnp.array([True, False])
    cuts = [make(cut) for cut in range(num_blocks)]
    variables = randomised(make(), x)
    has_stats = bool(jax.tree.leaves(variables.stats))
    split = [
        Variables(recut(variables.params, i), recut(variables.stats, i) if has_stats else ({}, {}))
        for i in range(num_blocks)
    ]

    @jax.jit
    def outputs() -> Tree:
        together, apart = [], []
        for model, (params, stats) in zip(cuts, split, strict=True):
            logits, new = models.apply(model, Variables(params, Halves(*stats)), x, mask, True)
            together.append((logits, jax.tree.leaves(new)))
            features, body = model.encode(params[0], stats[0], x, mask, True)
            logits, head = model.decode(params[1], stats[1], features, mask, True)
            apart.append((logits, jax.tree.leaves((body, head))))
        return together, apart

    together, apart = outputs()
    for model, halves, whole in zip(cuts, split, together, strict=True):
        fresh = jax.eval_shape(model.init, KEY, x)
        assert jax.tree.map(np.shape, fresh) == jax.tree.map(
            np.shape, Variables(halves.params, Halves(*halves.stats))
        )
        assert_close(whole, together[default], atol=1e-5)
    assert_equal(apart, together)
    assert jax.tree.map(np.shape, split[default].params) == jax.tree.map(np.shape, variables.params)


def test_eight_bit_images_are_scaled_and_others_are_not() -> None:
    model, x = federations.mlp(), images(federations.IMAGE)
    variables = randomised(model, x)
    logits = predicted(model, variables, x)
    assert_close(predicted(model, variables, np.float32(x) / 255), logits)
    assert jnp.abs(predicted(model, variables, np.float32(x)) - logits).max() > 1


def test_statistics_change_in_training_only_and_in_both_halves() -> None:
    x = images(federations.IMAGE)
    variables = randomised(NORMED, x)
    both, one = np.array([True, True]), np.array([True, False])
    assert_equal(applied(NORMED, variables, x, both, False)[1], variables.stats)
    _, changed = applied(NORMED, variables, x, both, True)
    for old, new in zip(jax.tree.leaves(variables.stats), jax.tree.leaves(changed), strict=True):
        assert jnp.abs(new - old).max() > 1e-3
    assert len(jax.tree.leaves(changed.body)) == len(jax.tree.leaves(changed.head)) == 2
    garbled = x.copy()
    garbled[1] = 0
    masked = [applied(NORMED, variables, images, one, True)[1] for images in (x, garbled)]
    assert_close(*masked)


def test_the_halves_start_from_keys_of_their_own() -> None:
    model = models.from_blocks([federations.Linear(36), federations.Linear(36)], 1)
    body, head = jax.jit(model.init)(KEY, images(federations.IMAGE)).params
    kernels: list[Tree] = [half["blocks_0"]["Dense_0"]["kernel"] for half in (body, head)]
    assert jnp.abs(kernels[0] - kernels[1]).max() > 0.01


class Dropping(nn.Module):
    """Leaves out half of the features, in training mode."""

    @nn.compact
    def __call__(self, x: Array, mask: Array, train: bool) -> Array:
        return nn.Dropout(0.5, deterministic=not train)(x)


DROPPING = models.from_blocks([Dropping(), Dropping()], 1)
EMPTY = Variables(Halves({}, {}), Halves({}, {}))


def test_dropout_draws_in_training_only_by_its_key() -> None:
    x, mask = jnp.ones((4, 32)), jnp.ones(4, bool)
    assert_equal(jax.eval_shape(DROPPING.init, KEY, x), EMPTY)
    for key in (None, KEY):
        assert_equal(applied(DROPPING, EMPTY, x, mask, False, key)[0], x)
    first, again, other = (
        applied(DROPPING, EMPTY, x, mask, True, jax.random.key(seed))[0] for seed in (1, 1, 2)
    )
    assert_equal(first, again)
    assert (first != other).any()


def test_the_halves_draw_independently_and_keep_the_expectation() -> None:
    x, mask = jnp.ones((128, 128)), jnp.ones(128, bool)
    outputs, _ = applied(DROPPING, EMPTY, x, mask, True, KEY)
    assert set(np.unique(outputs)) == {0, 4}  # what both halves keep, twice doubled
    # 5 standard deviations; the same draws in both halves would keep a half.
    kept = float((outputs > 0).mean())
    assert abs(kept - 0.25) < 5 * (0.25 * 0.75 / x.size) ** 0.5


def test_what_would_be_wrong_in_silence_is_refused() -> None:
    """Dropout without a key, draws in evaluation, statistics with padding, other collections."""

    class Unmasked(nn.Module):
        @nn.compact
        def __call__(self, x: Array, train: bool = False) -> Array:
            return nn.BatchNorm(not train)(x)

    class Counting(nn.Module):
        @nn.compact
        def __call__(self, x: Array) -> Array:
            return x + self.variable("counts", "count", lambda: 0).value

    x, mask = jnp.ones((2, 3)), jnp.ones(2, bool)
    always = models.from_flax(nn.Dropout(0.5, deterministic=False))
    counting = models.from_flax(Counting())
    for call in (
        lambda: DROPPING.encode({}, {}, x, mask, True),
        lambda: DROPPING.decode({}, {}, x, mask, True),
        lambda: models.apply(always, EMPTY, x, mask, False, KEY),
        lambda: models.from_flax(Unmasked(), takes=("train",)).init(KEY, x),
        lambda: models.predict(counting, counting.init(KEY, x), x),
    ):
        with pytest.raises((UsageError, FlaxError)):
            jax.eval_shape(call)


def test_draws_under_transformations() -> None:
    """A loss that is quadratic in the parameters, so that its gradient is linear in them."""
    model = models.from_blocks([federations.Linear(4), Dropping(), federations.Linear(2)], 2)
    x, mask = np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32), np.ones(3, bool)
    params, stats = randomised(model, x)
    keys = jax.random.split(KEY, 3)
    # Only the body moves: the loss is quadratic in it.
    move = jax.tree.map(lambda a: 0.1 + 0 * a, params.body)

    def loss(body: Tree, key: Array) -> Array:
        variables = Variables(Halves(body, params.head), stats)
        return (models.apply(model, variables, x, mask, True, key)[0] ** 2).sum()

    def derivatives(key: Array) -> Tree:
        gradient = partial(jax.grad(loss), key=key)
        before, curvature = jax.jvp(gradient, (params.body,), (move,))
        after = gradient(jax.tree.map(jnp.add, params.body, move))
        difference = jax.tree.map(jnp.subtract, after, before)
        return before, difference, curvature

    before, difference, curvature = jax.jit(jax.vmap(derivatives))(keys)
    alone = jax.jit(jax.grad(loss))(params.body, keys[1])
    assert_close(jax.tree.map(lambda a: a[1], before), alone)
    assert_close(curvature, difference)
    kernels = before["blocks_0"]["Dense_0"]["kernel"]
    assert jnp.abs(kernels[0] - kernels[1]).max() > 1e-3


def test_rendered_inputs_reach_a_network_with_its_key() -> None:
    x, mask = {"halves": np.ones((4, 32), np.float32) / 2}, np.ones(4, bool)
    model = models.rendered(DROPPING, lambda x: 2 * x["halves"])
    expected = applied(DROPPING, EMPTY, np.ones((4, 32), np.float32), mask, True, KEY)
    assert_equal(applied(model, EMPTY, x, mask, True, KEY), expected)
    assert_equal(jax.eval_shape(model.init, KEY, x), EMPTY)


class Ordinary(nn.Module):
    """A flax network as they are written elsewhere."""

    @nn.compact
    def __call__(self, x: Array, train: bool = False) -> Array:
        x = nn.relu(nn.Dense(8)(x.reshape(x.shape[0], -1)))
        return nn.Dense(2)(nn.Dropout(0.5, deterministic=not train)(x))


def test_any_flax_module_is_a_network() -> None:
    """With an empty body, and the module's own parameters in the head."""
    module, x, mask = Ordinary(), images((6, 6, 1)), np.ones(2, bool)
    model = models.from_flax(module, takes=("train",))
    variables = randomised(model, x)
    assert variables.params.body == {}
    scaled = np.float32(x) / 255
    own = {"params": variables.params.head}
    shapes = jax.eval_shape(module.init, KEY, scaled)
    assert jax.tree.map(np.shape, own) == jax.tree.map(np.shape, shapes)
    assert_close(predicted(model, variables, x), module.apply(own, scaled))
    drawn = [applied(model, variables, x, mask, True, jax.random.key(seed))[0] for seed in (1, 2)]
    assert (drawn[0] != drawn[1]).any()
    # A module that is told nothing stays in the mode that is its default.
    silent = models.from_flax(module)
    assert_close(applied(silent, variables, x, mask, True)[0], predicted(model, variables, x))


class Told(nn.Module):
    """Returns what it is told."""

    @nn.compact
    def __call__(self, x: Array, **told: Any) -> dict[str, Any]:
        return {name: jnp.asarray(value) for name, value in told.items()}


@pytest.mark.parametrize("train", [True, False])
def test_a_module_is_told_what_it_takes(train: bool) -> None:
    x, mask = np.ones((2, 3)), np.array([True, False])
    everything = {"mask": mask, "train": train, "training": train, "deterministic": not train}
    for takes in (tuple(everything), ("deterministic",), ()):
        model = models.from_flax(Told(), takes=takes)
        told, _ = models.apply(model, EMPTY, x, mask, train)
        assert_equal(told, {name: everything[name] for name in takes})


def test_a_sequential_can_be_cut() -> None:
    module, x = nn.Sequential([nn.Dense(4), nn.relu, nn.Dense(2)]), np.ones((2, 3), np.float32)
    layers = randomised(models.from_flax(module), x).params.head
    first, last = layers["layers_0"], layers["layers_2"]
    cuts = [
        Halves({}, layers),
        Halves({"layers_0": first}, {"layers_1": last}),
        Halves({"layers_0": first}, {"layers_0": last}),
    ]
    for cut, params in enumerate(cuts):
        fresh = jax.eval_shape(models.from_flax(module, cut=cut).init, KEY, x).params
        assert jax.tree.map(np.shape, fresh) == jax.tree.map(np.shape, params)

    @jax.jit
    def outputs() -> list[Array]:
        return [
            models.predict(models.from_flax(module, cut=cut), Variables(params, EMPTY.stats), x)
            for cut, params in enumerate(cuts)
        ]

    expected = np.maximum(x @ first["kernel"] + first["bias"], 0) @ last["kernel"] + last["bias"]
    assert_close(outputs(), [expected] * 3)


def test_plain_functions_are_a_network() -> None:
    def init(key: Array, x: Tree) -> Tree:
        return {"slope": jax.random.normal(key, x["image"].shape[1:])}

    def apply(params: Tree, x: Tree) -> Array:
        return (params["slope"] * x["image"]).sum(1) + x["offset"]

    model = models.from_function(init, apply)
    x = {"image": images((5,)), "offset": np.ones(2, np.float32)}
    variables, mask = model.init(KEY, x), np.ones(2, bool)
    assert_equal(variables, Variables(Halves({}, init(KEY, x)), Halves({}, {})))
    expected = np.float64(x["image"]) / 255 @ np.float64(variables.params.head["slope"]) + 1
    for train, key in ((False, None), (True, None), (True, KEY)):
        outputs, stats = models.apply(model, variables, x, mask, train, key)
        assert_close(outputs, expected)
        assert_equal(stats, variables.stats)


@pytest.mark.parametrize("eight_bits", [True, False])
def test_normalised_channels(eight_bits: bool) -> None:
    seen = models.from_function(lambda key, x: {}, lambda params, x: x)
    stored = images((4, 5, 3)) if eight_bits else images((4, 5, 3)) / np.float32(255)
    mean, std = (0.5, 0.25, -1.0), (2.0, 0.5, 4.0)
    model = models.normalised(seen, mean, std)
    expected = (np.float64(images((4, 5, 3))) / 255 - mean) / std
    assert_close(models.predict(model, EMPTY, stored), expected)


@pytest.mark.parametrize(("cut", "factors"), [(1, (14, 14, 32)), (2, (7, 7, 64)), (None, (2048,))])
def test_the_cnn_of_leaf_has_its_size_and_factors(
    cut: int | None, factors: tuple[int, ...]
) -> None:
    model, x = models.leaf_cnn(62, cut=cut), images((28, 28, 1))
    params, stats = jax.eval_shape(model.init, KEY, x)
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == 6_603_710  # as in McMahan et al.
    mask = np.ones(2, bool)
    features, _ = jax.eval_shape(
        lambda p, s: model.encode(p, s, x, mask, False), params.body, stats.body
    )
    assert features.shape == (2, *factors)


def test_a_network_computes_in_sixteen_bits_and_keeps_all_else() -> None:
    model, shape = models.mlp(3, widths=(16,), norm="batch"), (6, 5, 5, 1)
    rounded = models.computed_in(model, "bfloat16")
    x = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    mask, labels = jnp.arange(6) < 5, jnp.array([0, 1, 2, 0, 1, 2])
    variables = model.init(jax.random.key(0), x[:1])
    assert_equal(rounded.init(jax.random.key(0), x[:1]), variables)

    @partial(jax.jit, static_argnums=0)
    def told(model: Model) -> tuple[Tree, ...]:
        def loss(params: Tree) -> tuple[Array, Tree]:
            kept = variables._replace(params=params)
            outputs, stats = models.apply(model, kept, x, mask, True)
            return objectives.cross_entropy(outputs, labels, mask), (outputs, stats)

        return jax.value_and_grad(loss, has_aux=True)(variables.params)

    got, exact = told(rounded), told(model)
    for ours, full in zip(jax.tree.leaves(got), jax.tree.leaves(exact), strict=True):
        assert ours.dtype == full.dtype
        scale = np.abs(full).max()
        np.testing.assert_allclose(ours, full, rtol=0, atol=0.12 * scale + 1e-6)
    # It is not the same network after all: eight bits of a mantissa round.
    assert not np.array_equal(got[0][1][0], exact[0][1][0])


@pytest.mark.parametrize(
    "wrap",
    [models.scaled, lambda model: models.normalised(model, (0.4,), (0.2,))],
    ids=["scaled", "normalised"],
)
def test_wrapped_inputs_are_computed_in_sixteen_bits(wrap: Callable[[Model], Model]) -> None:
    seen = []

    def body(params: Tree, stats: Tree, x: Array, *others: Any) -> tuple[Array, Tree]:
        seen.append(x.dtype)
        return jnp.tensordot(x.reshape(len(x), -1), jnp.ones(16, x.dtype), 1)[:, None], stats

    plain = models.mlp(3, widths=())._replace(encode=body)
    x = images((4, 4, 1))
    model = models.computed_in(wrap(plain), "bfloat16")
    variables = jax.eval_shape(model.init, KEY, x[:1])
    jax.eval_shape(lambda v: model.encode(v.params.body, v.stats.body, x, True, False), variables)
    assert seen == [jnp.bfloat16]


@pytest.mark.parametrize("wrap", ["computed", "augmented"])
def test_wrappers_go_around_painted_images(wrap: str) -> None:
    def render(x: Tree) -> Array:
        return x["grey"] * x["hue"][:, None, None, None]

    x = {"grey": images((4, 4, 1)), "hue": np.array([1, 0], np.uint8)}
    model, painted = models.mlp(3), models.painted(models.mlp(3), render)
    variables = model.init(KEY, render(x))
    if wrap == "computed":
        around = models.computed_in(painted, "float32")
    else:
        around = models.augmented(painted, lambda images, key: images)
    mask = np.ones(2, bool)
    got = applied(around, variables, x, mask, True, KEY)
    assert_close(got, applied(model, variables, render(x), mask, True, KEY))


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (models.mlp(3), (5,)),
        (models.lenet(3), (28, 28, 1)),
        (models.leaf_cnn(3), (28, 28, 1)),
        (models.alexnet(3), (64, 64, 3)),
    ],
)
def test_an_empty_batch_has_no_outputs(model: Model, shape: tuple[int, ...]) -> None:
    variables = jax.eval_shape(model.init, KEY, jnp.zeros((1, *shape)))
    none = jax.ShapeDtypeStruct((0, *shape), jnp.float32)
    found = jax.eval_shape(lambda v, x: models.predict(model, v, x), variables, none)
    assert found.shape == (0, 3)
