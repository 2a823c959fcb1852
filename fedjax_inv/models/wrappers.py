"""Models around another model: with other inputs, or computed in another type."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_inv import types
from fedjax_inv.checks import UsageError
from fedjax_inv.types import Array, Tree


def unit_range(x: Array) -> Array:
    """Return 8-bit images scaled to [0, 1] float32, and any other array unchanged."""
    return x.astype(jnp.float32) / 255 if x.dtype == jnp.uint8 else x


def like_inputs(values: Array, x: Array) -> Array:
    """Return values in the floating type of the inputs, so that `computed_in` may go around."""
    return values.astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else values


def rendered(model: types.Model, render: Callable[[Tree], Tree]) -> types.Model:
    """Return the model that renders its inputs first: stored ones [B, ...] -> its own [B, ...]."""

    def encode(params: Tree, stats: Tree, x: Tree, *others: Any) -> tuple[Tree, Tree]:
        return model.encode(params, stats, render(x), *others)

    return types.Model(lambda key, x: model.init(key, render(x)), encode, model.decode)


def painted(model: types.Model, render: Callable[[Tree], Array]) -> types.Model:
    """Return the model on images that takes stored trees, which `render` turns into images.

    It takes a single array for images that are rendered already, such as averages of them, and does
    not render it again.
    """

    def preprocess(x: Tree, /) -> Tree:
        is_rendered = jax.tree_util.treedef_is_leaf(jax.tree.structure(x))
        return x if is_rendered else render(x)

    return rendered(model, preprocess)._replace(preprocess=preprocess)


def normalised(model: types.Model, mean: Sequence[float], std: Sequence[float]) -> types.Model:
    """Return the model with (x - mean) / std as inputs [B, ..., C].

    mean and std [C] are those of each channel, where 8-bit images have been scaled to [0, 1].
    """
    shift = np.asarray(mean, np.float32)
    scale = np.asarray(std, np.float32)

    def view(x: Array) -> Array:
        images = unit_range(x)
        if images.shape[-1:] != shift.shape:  # which would broadcast
            allowed = f"must hold {images.shape[-1]} numbers, one for each channel of the inputs"
            raise UsageError("mean", tuple(mean), allowed)
        return like_inputs((images - shift) / scale, images)

    return rendered(model, view)


def computed_in(model: types.Model, dtype: str) -> types.Model:
    """Return the model that computes in another floating type, in which matrix units are fast.

    The dtype is "bfloat16", "float16" or "float32". Parameters, statistics, the features at the cut
    and the outputs stay float32, and so do losses, gradients and optimizers. Normalisation layers
    compute their means in float32. Inputs are rounded first, so a model of `scaled` goes around
    this one.
    """

    def cast(tree: Tree, to: str) -> Tree:
        def leaf(value: Array) -> Array:
            return value.astype(to) if jnp.issubdtype(value.dtype, jnp.floating) else value

        return jax.tree.map(leaf, tree)

    def run(
        half: types.Apply, params: Tree, stats: Tree, x: Tree, *others: Any
    ) -> tuple[Tree, Tree]:
        x = cast(jax.tree.map(unit_range, x), dtype)
        return cast(half(cast(params, dtype), stats, x, *others), "float32")

    def encode(params: Tree, stats: Tree, x: Tree, *others: Any) -> tuple[Tree, Tree]:
        return run(model.encode, params, stats, model.preprocess(x), *others)

    return model._replace(encode=encode, decode=partial(run, model.decode))


def augmented(model: types.Model, augment: Callable[[Tree, Array], Tree]) -> types.Model:
    """Return the model that trains on augmented inputs, and is unchanged in evaluation mode.

    `augment` is (x [B, ...], key) -> augmented x, such as `data.augment.augment`; 8-bit images
    arrive scaled to [0, 1]. It must treat each example by itself, as batches are padded with
    arbitrary examples. Every step has a key of its own.
    """

    def encode(
        params: Tree, stats: Tree, x: Tree, mask: Array, train: bool, key: Array | None = None, /
    ) -> tuple[Tree, Tree]:
        if train:
            assert key is not None, "a model that augments trains with a key"
            augment_key, key = jax.random.split(key)
            x = augment(jax.tree.map(unit_range, model.preprocess(x)), augment_key)
        return model.encode(params, stats, x, mask, train, key)

    return model._replace(encode=encode)
