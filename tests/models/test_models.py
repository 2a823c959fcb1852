"""Networks of two halves: statistics, draws, one's own networks, and what goes around them."""

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
from formulas import images, randomised

KEY = jax.random.key(0)

NORMED = federations.normed()


@partial(jax.jit, static_argnums=(0, 4))
def applied(
    model: Model, variables: Variables, x: Tree, mask: Array, train: bool, key: Array | None = None
) -> tuple[Array, Halves]:
    return models.apply(model, variables, x, mask, train, key)


@partial(jax.jit, static_argnums=0)
def predicted(model: Model, variables: Variables, x: Tree) -> Array:
    return models.predict(model, variables, x)


def test_eight_bit_images_are_scaled_and_others_are_not() -> None:
    model, x = federations.mlp(), images(2, *federations.IMAGE)
    variables = randomised(model, x)
    logits = predicted(model, variables, x)
    assert_close(predicted(model, variables, np.float32(x) / 255), logits)
    assert jnp.abs(predicted(model, variables, np.float32(x)) - logits).max() > 1


def test_statistics_change_in_training_only_and_in_both_halves() -> None:
    x = images(2, *federations.IMAGE)
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
    body, head = jax.jit(model.init)(KEY, images(2, *federations.IMAGE)).params
    kernels: list[Tree] = [half["blocks_0"]["Dense_0"]["kernel"] for half in (body, head)]
    assert jnp.abs(kernels[0] - kernels[1]).max() > 0.01


class Dropping(nn.Module):
    """Leaves out half of the features, in training mode."""

    @nn.compact
    def __call__(self, x: Array, mask: Array, train: bool) -> Array:
        return nn.Dropout(0.5, deterministic=not train)(x)


DROPPING = models.from_blocks([Dropping(), Dropping()], 1)
EMPTY = Variables(Halves({}, {}), Halves({}, {}))


def test_dropout_draws_in_training_only_by_its_key_and_in_both_halves() -> None:
    x, mask = jnp.ones((128, 128)), jnp.ones(128, bool)
    assert_equal(jax.eval_shape(DROPPING.init, KEY, x), EMPTY)
    assert_equal(applied(DROPPING, EMPTY, x, mask, False, KEY)[0], x)
    first, again, other = (
        applied(DROPPING, EMPTY, x, mask, True, jax.random.key(seed))[0] for seed in (1, 1, 2)
    )
    assert_equal(first, again)
    assert (first != other).any()
    assert set(np.unique(first)) == {0, 4}  # what both halves keep, twice doubled
    # 5 standard deviations; the same draws in both halves would keep a half.
    kept = float((first > 0).mean())
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


class Ordinary(nn.Module):
    """A flax network as they are written elsewhere."""

    @nn.compact
    def __call__(self, x: Array, train: bool = False) -> Array:
        x = nn.relu(nn.Dense(8)(x.reshape(x.shape[0], -1)))
        return nn.Dense(2)(nn.Dropout(0.5, deterministic=not train)(x))


def test_any_flax_module_is_a_network() -> None:
    """With an empty body, and the module's own parameters in the head."""
    module, x, mask = Ordinary(), images(2, 6, 6, 1), np.ones(2, bool)
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
    x = {"image": images(2, 5), "offset": np.ones(2, np.float32)}
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
    stored = images(2, 4, 5, 3) if eight_bits else images(2, 4, 5, 3) / np.float32(255)
    mean, std = (0.5, 0.25, -1.0), (2.0, 0.5, 4.0)
    model = models.normalised(seen, mean, std)
    expected = (np.float64(images(2, 4, 5, 3)) / 255 - mean) / std
    assert_close(models.predict(model, EMPTY, stored), expected)


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
    x = images(2, 4, 4, 1)
    model = models.computed_in(wrap(plain), "bfloat16")
    variables = jax.eval_shape(model.init, KEY, x[:1])
    jax.eval_shape(lambda v: model.encode(v.params.body, v.stats.body, x, True, False), variables)
    assert seen == [jnp.bfloat16]


def test_wrappers_go_around_painted_images() -> None:
    """And pass the step's key on, of which an augmentation takes a part."""

    def render(x: Tree) -> Array:
        return x["grey"] * x["hue"][:, None]

    def augment(x: Array, key: Array) -> Array:
        return x * jax.random.uniform(key)

    x, mask = {"grey": images(2, 32), "hue": np.array([1, 0], np.uint8)}, np.ones(2, bool)
    painted = models.painted(DROPPING, render)
    assert_equal(jax.eval_shape(painted.init, KEY, x), EMPTY)
    around = models.computed_in(painted, "float32")
    expected = applied(DROPPING, EMPTY, render(x), mask, True, KEY)
    assert_close(applied(around, EMPTY, x, mask, True, KEY), expected)

    around = models.augmented(painted, augment)
    body, head = jax.random.split(KEY)
    own, rest = jax.random.split(body)
    seen = augment(render(x) / 255, own)
    features, _ = DROPPING.encode({}, {}, seen, mask, True, rest)
    expected = DROPPING.decode({}, {}, features, mask, True, head)[0]
    assert_close(applied(around, EMPTY, x, mask, True, KEY)[0], expected)
    plain = applied(DROPPING, EMPTY, render(x), mask, False)
    assert_close(applied(around, EMPTY, x, mask, False), plain)
