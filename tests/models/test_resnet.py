"""ResNet-18: sizes that are known, cuts, norms, masks. test_weights.py has its formula."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import slow
from federations import assert_close, assert_equal
from fedjax_inv import models, platforms
from fedjax_inv.algorithms import fedipg
from fedjax_inv.models import FrozenBatchNorm, GroupNorm
from fedjax_inv.types import Array, Halves, Model, Tree, Variables

KEY = jax.random.key(0)
WIDTHS = (2, 4, 4, 6)
tiny = partial(models.resnet18, 3, widths=WIDTHS)


def noise(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def randomised(model: Model, x: Tree) -> Variables:
    """Variables of no symmetry; variances are above 0."""
    params, stats = jax.eval_shape(model.init, KEY, x)
    rng = np.random.default_rng(0)
    return Variables(
        jax.tree.map(lambda a: 0.5 * rng.normal(size=a.shape).astype(np.float32), params),
        jax.tree.map(lambda a: 0.5 + rng.random(a.shape, np.float32), stats),
    )


def num_parameters(model: Model, image: tuple[int, ...]) -> int:
    params = jax.eval_shape(model.init, KEY, np.zeros((1, *image), np.float32)).params
    return sum(leaf.size for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize(
    ("arguments", "number"),
    [
        (dict(num_classes=1000, image_size=224), 11_689_512),  # torchvision's
        (dict(num_classes=10), 11_173_962),  # of its form for CIFAR-10 with a 3x3 stem
        (dict(num_classes=1000, image_size=64, norm="group"), 11_689_512),
        # Scale and bias of 4,800 channels are no parameters.
        (dict(num_classes=1000, image_size=224, norm="frozen"), 11_689_512 - 2 * 4_800),
    ],
)
def test_as_many_parameters_as_elsewhere(arguments, number: int) -> None:
    assert num_parameters(models.resnet18(**arguments), (8, 8, 3)) == number


@pytest.mark.parametrize(
    ("image_size", "sides"),
    slow.after(1, [(224, (56, 56, 28, 14, 7)), (32, (32, 32, 16, 8, 4)), (64, (32, 32, 16, 8, 4))]),
)
def test_sides_after_the_first_layer_and_each_stage(image_size: int, sides: tuple) -> None:
    x = np.zeros((2, image_size, image_size, 3), np.uint8)
    channels = (WIDTHS[0], *WIDTHS)
    expected = [x.shape, *((2, side, side, d) for side, d in zip(sides, channels, strict=True))]
    expected.append((2, WIDTHS[-1]))
    for cut, shape in enumerate(expected):
        model = tiny(image_size=image_size, cut=cut, norm="group")

        def features(model: Model = model) -> Array:
            variables = model.init(KEY, x)
            mask = np.ones(2, bool)
            return model.encode(variables.params.body, variables.stats.body, x, mask, False)[0]

        assert jax.eval_shape(features).shape == shape


def test_resnet50_has_as_many_parameters_as_elsewhere() -> None:
    params = jax.eval_shape(models.resnet50(1000).init, KEY, np.zeros((1, 8, 8, 3))).params
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == 25_557_032  # torchvision's, timm's
    assert params.head["blocks_0"]["fc"]["kernel"].shape == (2048, 1000)


def by_module(tree: Halves) -> Tree:
    """{module: its variables} of both halves, without the numbers of the blocks."""
    return {k: v for half in tree for block in half.values() for k, v in block.items()}


@pytest.mark.slow
def test_the_cut_moves_nothing_but_the_halves() -> None:
    x, mask = noise(0, 3, 9, 8, 1), np.array([True, False, True])
    cuts = [tiny(cut=cut) for cut in range(7)]
    whole = randomised(cuts[-1], x)
    params, stats = (by_module(tree) for tree in whole)
    for model, default in ((cuts[6], tiny()), (cuts[0], None)):
        fresh = jax.eval_shape(model.init, KEY, x)
        assert jax.tree.map(np.shape, by_module(fresh.params)) == jax.tree.map(np.shape, params)
        assert jax.tree.map(np.shape, by_module(fresh.stats)) == jax.tree.map(np.shape, stats)
        if default is not None:
            assert fresh == jax.eval_shape(default.init, KEY, x)

    def dealt(shapes: Halves, values: Tree) -> Halves:
        return Halves(
            *(
                {block: {name: values[name] for name in of} for block, of in half.items()}
                for half in shapes
            )
        )

    @partial(jax.jit, static_argnums=0)
    def outputs(model: Model, variables: Variables) -> tuple[Array, Halves]:
        return models.apply(model, variables, x, mask, True)

    logits, changed = outputs(cuts[-1], whole)
    assert np.abs(logits[0] - logits[2]).max() > 1e-3
    for model in (cuts[0], cuts[3]):
        shapes = jax.eval_shape(model.init, KEY, x)
        variables = Variables(dealt(shapes.params, params), dealt(shapes.stats, stats))
        again, moved = outputs(model, variables)
        assert_close(again, logits)
        assert_close(by_module(moved), by_module(changed))


@pytest.mark.slow
@pytest.mark.parametrize("norm", slow.after(1, ["batch", "group", "frozen"]))
def test_padding_examples_never_act(norm: str) -> None:
    """Not on logits, statistics nor gradients: garbage in their place changes nothing."""
    model, mask = tiny(norm=norm, cut=2), np.array([True, False, True, False])
    x, weights = noise(0, 4, 7, 6, 1), noise(1, 4, 3)
    variables = randomised(model, x)

    @jax.jit
    def step(x: Array) -> tuple[Tree, Array, Halves]:
        def risk(params: Halves) -> tuple[Array, tuple[Array, Halves]]:
            outputs, stats = models.apply(model, Variables(params, variables.stats), x, mask, True)
            return jnp.where(mask[:, None], outputs * weights, 0).sum(), (outputs, stats)

        grads, (outputs, stats) = jax.grad(risk, has_aux=True)(variables.params)
        return grads, outputs[mask], stats

    garbled = x.copy()
    garbled[~mask] = 1e3
    first = step(x)
    assert_close(first, step(garbled))
    grads, _, stats = first
    assert np.abs(grads.body["blocks_0"]["conv1"]["kernel"]).max() > 1e-3
    if norm == "batch":
        for old, new in zip(*map(jax.tree.leaves, (variables.stats, stats)), strict=True):
            assert np.abs(new - old).max() > 1e-4
    else:
        assert_equal(stats, variables.stats)
        assert bool(jax.tree.leaves(stats)) == (norm == "frozen")


def test_a_frozen_norm_is_its_formula() -> None:
    x, mask = noise(0, 4, 2, 3), np.array([True, False, False, True])
    fresh = jax.jit(FrozenBatchNorm().init, static_argnums=3)(KEY, x, mask, True)
    zeros, ones = np.zeros(3, np.float32), np.ones(3, np.float32)
    stats = {"mean": zeros, "var": ones, "scale": ones, "bias": zeros}
    assert_equal(fresh, {"batch_stats": stats})
    stats = {name: 0.5 + np.abs(noise(1 + i, 3)) for i, name in enumerate(stats)}
    mean, var, scale, bias = map(np.float64, stats.values())
    for train in (True, False):
        outputs = FrozenBatchNorm().apply({"batch_stats": stats}, x, mask, train)
        assert_close(outputs, (x - mean) / np.sqrt(var + 1e-5) * scale + bias)


def test_a_frozen_norm_computes_in_the_type_of_its_inputs() -> None:
    """Or all layers behind it would compute in float32, whatever `computed_in` says."""
    x = jnp.ones((2, 3), jnp.bfloat16)
    stats = FrozenBatchNorm().init(KEY, x, x[:, 0] > 0, False)
    assert {leaf.dtype for leaf in jax.tree.leaves(stats)} == {jnp.dtype(jnp.float32)}
    assert not any(leaf.weak_type for leaf in jax.tree.leaves(stats))
    assert FrozenBatchNorm().apply(stats, x, x[:, 0] > 0, False).dtype == jnp.bfloat16


@pytest.mark.parametrize("groups", slow.after(1, [2, 1, 3]))
def test_a_group_norm_is_its_formula(groups: int) -> None:
    x, mask = noise(0, 3, 4, 5, 6), np.ones(3, bool)
    params = {"scale": noise(1, 6), "bias": noise(2, 6)}
    module = GroupNorm(groups)
    fresh = jax.jit(module.init, static_argnums=3)(KEY, x, mask, True)
    assert jax.tree.map(np.shape, fresh) == {"params": jax.tree.map(np.shape, params)}
    expected = np.zeros(x.shape)
    for example, group in np.ndindex(3, groups):
        channels = slice(group * 6 // groups, (group + 1) * 6 // groups)
        part = np.float64(x[example, ..., channels])
        expected[example, ..., channels] = (part - part.mean()) / np.sqrt(part.var() + 1e-5)
    got = module.apply({"params": params}, x, mask, True)
    assert_close(got, expected * params["scale"] + params["bias"])


@pytest.mark.slow
def test_a_penalised_step_of_more_clients_is_no_longer_a_program() -> None:
    """Compilers take seconds for each convolution: clients must share them, as layers do not."""
    model, x = tiny(norm="frozen"), np.zeros((2, 8, 8, 3), np.float32)

    def risk(params: Halves, stats: Halves, x: Array) -> Array:
        variables = Variables(params, stats)
        return models.apply(model, variables, x, np.ones(2, bool), True)[0].sum()

    def step(params: Halves, stats: Halves, x: Array) -> Tree:
        return fedipg.penalised_value_and_grad(lambda params: risk(params, stats, x), 0.1)(params)

    def convolutions(num_clients: int) -> int:
        arguments = *jax.eval_shape(model.init, KEY, x), x
        several = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((num_clients, *leaf.shape), leaf.dtype), arguments
        )
        with platforms.traced_for("tpu"):
            lowered = jax.jit(jax.vmap(step)).trace(*several).lower(lowering_platforms=("tpu",))
        return lowered.as_text().count("stablehlo.convolution")

    few, many = convolutions(2), convolutions(5)
    # 20 layers: FedAvg's step has 59, and a Hessian-vector product without shared terms 175.
    assert 59 < few == many <= 120
