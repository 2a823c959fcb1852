"""A `Model` from a sequence of flax.linen blocks, from any flax.linen module, from functions.

Whatever it is made of, a model scales 8-bit images to [0, 1] before it sees them.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.errors import InvalidRngError

from fedjax_inv import checks
from fedjax_inv.checks import UsageError
from fedjax_inv.types import Apply, Array, Halves, Model, Tree, Variables


class _Blocks(nn.Module):
    blocks: Sequence[nn.Module]

    @nn.compact
    def __call__(self, x: Array, mask: Array, train: bool) -> Array:
        for block in self.blocks:
            x = block(x, mask, train)
        return x


class _Identity(nn.Module):
    @nn.compact
    def __call__(self, x: Tree, **given: Any) -> Tree:
        return x


def unit_range(x: Array) -> Array:
    """8-bit images scaled to [0, 1] float32; anything else as it is."""
    return x.astype(jnp.float32) / 255 if x.dtype == jnp.uint8 else x


def check_images(x: Array) -> None:
    """Raises ValueError unless x is a batch of images; flax would take three axes for one image."""
    if x.ndim != 4:
        raise UsageError(f"inputs: are {x.shape}, must be images [B, height, width, channels]")


def _scaled(model: Model) -> Model:
    return rendered(model, lambda x: jax.tree.map(unit_range, x))


def _all_real(x: Tree) -> Array:
    return jnp.ones(jax.tree.leaves(x)[0].shape[0], bool)


# What a module may take beside its inputs, of (mask [B], train).
_ARGUMENTS: dict[str, Callable[[Array, bool], Any]] = {
    "mask": lambda mask, train: mask,
    "train": lambda mask, train: train,
    "training": lambda mask, train: train,
    "deterministic": lambda mask, train: not train,
}


def _of_halves(body: nn.Module, head: nn.Module, takes: Sequence[str]) -> Model:
    """The model of two modules, each called as half(x, **what it takes of `_ARGUMENTS`)."""

    def arguments(mask: Array, train: bool) -> dict[str, Any]:
        return {name: _ARGUMENTS[name](mask, train) for name in takes}

    def init_half(half: nn.Module, key: Array, x: Tree, mask: Array) -> tuple[Tree, Tree]:
        variables = half.init(key, x, **arguments(mask, False))
        others = sorted(set(variables) - {"params", "batch_stats"})
        if others:
            raise UsageError(f"collections={others}: must be none but params and batch_stats")
        if "batch_stats" in variables and "mask" not in takes:
            raise UsageError(f"{takes=}: must hold 'mask', or batch_stats would see the padding")
        return variables.get("params", {}), variables.get("batch_stats", {})

    def apply_of(half: nn.Module) -> Callable[..., tuple[Tree, Tree]]:
        def apply_half(
            params: Tree,
            stats: Tree,
            x: Tree,
            mask: Array,
            train: bool,
            key: Array | None = None,
            /,
        ) -> tuple[Tree, Tree]:
            variables, given = {"params": params, "batch_stats": stats}, arguments(mask, train)
            if not train:
                return half.apply(variables, x, **given), stats
            rngs = None if key is None else {"dropout": key}
            try:
                outputs, changed = half.apply(
                    variables, x, rngs=rngs, mutable=["batch_stats"], **given
                )
            except InvalidRngError as error:
                if key is not None:
                    raise  # it draws from a stream other than "dropout"
                raise UsageError(f"{key=}: must be given to train a module that draws") from error
            return outputs, changed.get("batch_stats", {})

        return apply_half

    encode, decode = apply_of(body), apply_of(head)

    def init(key: Array, x: Tree) -> Variables:
        body_key, head_key = jax.random.split(key)
        mask = _all_real(x)
        body_params, body_stats = init_half(body, body_key, x, mask)
        features, _ = encode(body_params, body_stats, x, mask, False)
        head_params, head_stats = init_half(head, head_key, features, mask)
        return Variables(Halves(body_params, head_params), Halves(body_stats, head_stats))

    return _scaled(Model(init, encode, decode))


def from_blocks(blocks: Sequence[nn.Module], cut: int) -> Model:
    """The model whose body is `blocks[:cut]` and whose head is the rest.

    Each block is called as block(x [B, ...], mask [B] bool, train: bool); what it changes without
    a gradient lives in its collection "batch_stats", and what it draws in training mode comes from
    its stream "dropout". The last one's outputs are the model's; a classifier's are logits [B, K].

    Raises ValueError for blocks that are none, and for a cut off the network; when the model trains
    without a key, for blocks that draw.
    """
    others = [block for block in blocks if not isinstance(block, nn.Module)]
    if others or not blocks:
        raise UsageError(f"blocks={others}: must be one or several flax.linen modules")
    checks.integer("cut", cut, 0, len(blocks) - 1)
    return _of_halves(_Blocks(blocks[:cut]), _Blocks(blocks[cut:]), ("mask", "train"))


def from_flax(module: nn.Module, *, takes: Sequence[str] = (), cut: int = 0) -> Model:
    """The model of any flax.linen module that is called as module(x, **what it takes).

    The body is empty and all is head; its parameters are those of `module.init`. Dropout of the
    stream "dropout" works in training mode. Raises ValueError for an argument that is not allowed;
    at initialisation for "batch_stats" without a mask and for collections beyond it and "params".

    takes: names among "mask" ([B] bool, which examples are real), "train", "training" (bool) and
    "deterministic" (the contrary). Whatever is averaged over a batch must be so under the mask, as
    batches are padded with arbitrary examples: `models.BatchNorm` is, and `flax.linen.BatchNorm` if
    its own mask is given. cut: how many layers of an `nn.Sequential` are the body; it passes on
    nothing but x, so takes must be empty.
    """
    if not isinstance(module, nn.Module):
        raise UsageError(f"{module=}: must be a flax.linen module")
    if isinstance(takes, str) or not set(takes) <= set(_ARGUMENTS):
        raise UsageError(f"{takes=}: must be a sequence of some of {', '.join(_ARGUMENTS)}")
    if not isinstance(module, nn.Sequential):
        if cut != 0:
            raise UsageError(f"{cut=}: must be 0, as module is no nn.Sequential")
        return _of_halves(_Identity(), module, takes)
    if takes:
        raise UsageError(f"{takes=}: must be empty for an nn.Sequential; from_blocks passes on all")
    checks.integer("cut", cut, 0, len(module.layers) - 1)
    if cut == 0:
        return _of_halves(_Identity(), module, takes)
    halves = nn.Sequential(module.layers[:cut]), nn.Sequential(module.layers[cut:])
    return _of_halves(*halves, takes)


def from_function(
    init: Callable[[Array, Tree], Tree], apply: Callable[[Tree, Tree], Array]
) -> Model:
    """The model of plain functions: init(key, x [B, ...]) -> params, apply(params, x) -> outputs.

    The body is empty and all is head. Neither statistics nor draws, and `apply` must treat each
    example by itself: batches are padded with arbitrary ones. Raises ValueError for what is not a
    function.
    """
    for name, function in (("init", init), ("apply", apply)):
        if not callable(function):
            raise UsageError(f"{name}={function!r}: must be a function")

    def encode(
        params: Tree, stats: Tree, x: Tree, mask: Array, train: bool, key: Array | None = None, /
    ) -> tuple[Tree, Tree]:
        del params, mask, train, key
        return x, stats

    def decode(
        params: Tree, stats: Tree, x: Tree, mask: Array, train: bool, key: Array | None = None, /
    ) -> tuple[Tree, Tree]:
        del mask, train, key
        return apply(params, x), stats

    def init_halves(key: Array, x: Tree) -> Variables:
        return Variables(Halves({}, init(key, x)), Halves({}, {}))

    return _scaled(Model(init_halves, encode, decode))


def rendered(model: Model, render: Callable[[Tree], Tree]) -> Model:
    """The model on stored inputs that `render` turns into the ones that it takes."""

    def encode(
        params: Tree, stats: Tree, x: Tree, mask: Array, train: bool, key: Array | None = None, /
    ) -> tuple[Tree, Tree]:
        return model.encode(params, stats, render(x), mask, train, key)

    return Model(lambda key, x: model.init(key, render(x)), encode, model.decode)


def painted(model: Model, render: Callable[[Tree], Array]) -> Model:
    """The model on stored trees, which `render` turns into images, and on images.

    A single array counts as rendered images, such as averages of them: `preprocess` returns it
    unchanged.
    """

    def preprocess(x: Tree, /) -> Tree:
        is_rendered = jax.tree_util.treedef_is_leaf(jax.tree.structure(x))
        return x if is_rendered else render(x)

    return rendered(model, preprocess)._replace(preprocess=preprocess)


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
        raise UsageError(f"std={tuple(std)}: must be as long as mean, {len(mean)}")
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
            raise UsageError(f"{key=}: must be given to train a model that augments")
        augment_key, key = jax.random.split(key)
        x = augment(jax.tree.map(unit_range, x), augment_key)
        return model.encode(params, stats, x, mask, train, key)

    return model._replace(encode=encode)


def apply(
    model: Model, variables: Variables, x: Tree, mask: Array, train: bool, key: Array | None = None
) -> tuple[Array, Halves]:
    """The whole network: (outputs [B, ...], stats) of x [B, ...] under mask [B].

    key: what is drawn in training mode, by each half from a key of its own. Raises ValueError if
    the network draws and there is none.
    """
    body_key, head_key = (None, None) if key is None else jax.random.split(key)
    params, stats = variables
    features, body = model.encode(params.body, stats.body, x, mask, train, body_key)
    outputs, head = model.decode(params.head, stats.head, features, mask, train, head_key)
    return outputs, Halves(body, head)


def predict(model: Model, variables: Variables, x: Tree) -> Array:
    """Outputs [B, ...] of x [B, ...] in evaluation mode; a classifier's are logits [B, K]."""
    return apply(model, variables, x, _all_real(x), False)[0]
