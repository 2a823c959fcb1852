"""Models made of another model: what its inputs are, and in which type it computes."""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_inv import checks
from fedjax_inv.checks import UsageError
from fedjax_inv.types import Apply, Array, Model, Tree


def unit_range(x: Array) -> Array:
    """8-bit images scaled to [0, 1] float32; anything else as it is."""
    return x.astype(jnp.float32) / 255 if x.dtype == jnp.uint8 else x


def rendered(model: Model, render: Callable[[Tree], Tree]) -> Model:
    """The model on stored inputs that `render` turns into the ones that it takes."""

    def encode(
        params: Tree, stats: Tree, x: Tree, mask: Array, train: bool, key: Array | None = None, /
    ) -> tuple[Tree, Tree]:
        return model.encode(params, stats, render(x), mask, train, key)

    return Model(lambda key, x: model.init(key, render(x)), encode, model.decode)


def painted(model: Model, render: Callable[[Tree], Array]) -> Model:
    """The model on stored trees, of which `render` makes the images that it takes, and on images.

    One array is taken for images that are rendered already, such as averages of them: `see` leaves
    it as it is.
    """

    def see(x: Tree, /) -> Tree:
        is_rendered = jax.tree_util.treedef_is_leaf(jax.tree.structure(x))
        return x if is_rendered else render(x)

    return rendered(model, see)._replace(see=see)


def normalised(model: Model, mean: Sequence[float], std: Sequence[float]) -> Model:
    """The model on inputs [B, ..., C] of which it sees (x - mean [C]) / std [C].

    mean, std: of each channel, where 8-bit images have been scaled to [0, 1]. Raises ValueError for
    an std that is not above 0 and for other lengths than the mean's.
    """
    finite = partial(checks.number, allowed="that is finite", is_allowed=lambda number: True)
    positive = partial(checks.number, allowed="above 0", is_allowed=lambda number: number > 0)
    checks.each("mean", mean, finite)
    checks.each("std", std, positive)
    if len(mean) != len(std):
        raise UsageError("std", tuple(std), f"must be as long as mean, {len(mean)}")
    shift, scale = np.asarray(mean, np.float32), np.asarray(std, np.float32)
    return rendered(model, lambda x: (unit_range(x) - shift) / scale)


def computed_in(model: Model, dtype: str) -> Model:
    """The model that computes in another floating type, "bfloat16" or "float16", as matrix units
    are fast in.

    Parameters, statistics, the features at the cut and the outputs are float32 as before, and so
    are losses, gradients and optimizers. Normalisation layers take their means in float32. Raises
    ValueError for another type.
    """
    checks.one_of("dtype", dtype, ("float32", "bfloat16", "float16"))

    def cast(tree: Tree, to: str) -> Tree:
        def leaf(value: Array) -> Array:
            return value.astype(to) if jnp.issubdtype(value.dtype, jnp.floating) else value

        return jax.tree.map(leaf, tree)

    def half(run: Apply) -> Apply:
        def apply(
            params: Tree,
            stats: Tree,
            x: Tree,
            mask: Array,
            train: bool,
            key: Array | None = None,
            /,
        ) -> tuple[Tree, Tree]:
            x = cast(jax.tree.map(unit_range, x), dtype)
            return cast(run(cast(params, dtype), stats, x, mask, train, key), "float32")

        return apply

    return model._replace(encode=half(model.encode), decode=half(model.decode))


def augmented(model: Model, augment: Callable[[Tree, Array], Tree]) -> Model:
    """The model that trains on augment(x, key) and is otherwise what it was.

    augment: of inputs x [B, ...], 8-bit images scaled to [0, 1], and a key, as `data.augment`'s; it
    must treat each example by itself, as batches are padded with arbitrary ones. The key is of the
    body's training mode, each step's own. Training without one raises ValueError.
    """

    def encode(
        params: Tree, stats: Tree, x: Tree, mask: Array, train: bool, key: Array | None = None, /
    ) -> tuple[Tree, Tree]:
        if not train:
            return model.encode(params, stats, x, mask, train, key)
        if key is None:
            raise UsageError("key", key, "must be given to train a model that augments")
        augment_key, key = jax.random.split(key)
        x = augment(jax.tree.map(unit_range, x), augment_key)
        return model.encode(params, stats, x, mask, train, key)

    return model._replace(encode=encode)
