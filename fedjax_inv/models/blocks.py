"""A `Model` from a sequence of flax.linen blocks, from any flax.linen module, or from functions.

Every such model scales 8-bit images to [0, 1] first.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_inv import types
from fedjax_inv.checks import UsageError
from fedjax_inv.models.wrappers import rendered, unit_range
from fedjax_inv.types import Array, Tree


class _Blocks(nn.Module):
    blocks: Sequence[nn.Module]

    @nn.compact
    def __call__(self, x: Array, mask: Array, train: bool) -> Array:
        for block in self.blocks:
            x = block(x, mask, train)
        return x


class _Identity(nn.Module):
    @nn.compact
    def __call__(self, x: Tree, **unused: Any) -> Tree:
        return x


def scaled(model: types.Model) -> types.Model:
    """Return the model with 8-bit images scaled to [0, 1] before it."""
    return rendered(model, lambda x: jax.tree.map(unit_range, x))


def _all_real(x: Tree) -> Array:
    return jnp.ones(jax.tree.leaves(x)[0].shape[0], bool)


# Arguments that a module may take beside its inputs, as functions of (mask [B], train).
ARGUMENTS: dict[str, Callable[[Array, bool], Any]] = {
    "mask": lambda mask, train: mask,
    "train": lambda mask, train: train,
    "training": lambda mask, train: train,
    "deterministic": lambda mask, train: not train,
}


def _of_halves(body: nn.Module, head: nn.Module, takes: Sequence[str]) -> types.Model:
    """Return the model of two modules, each called as half(x, **arguments of `takes`)."""

    def arguments(mask: Array, train: bool) -> dict[str, Any]:
        return {name: ARGUMENTS[name](mask, train) for name in takes}

    def init_half(half: nn.Module, key: Array, x: Tree, mask: Array) -> tuple[Tree, Tree]:
        variables = half.init(key, x, **arguments(mask, False))
        if "batch_stats" in variables and "mask" not in takes:
            text = "must hold 'mask', or batch_stats would see the padding"
            raise UsageError("takes", takes, text)
        return variables.get("params", {}), variables.get("batch_stats", {})

    def apply_half(
        half: nn.Module,
        params: Tree,
        stats: Tree,
        x: Tree,
        mask: Array,
        train: bool,
        key: Array | None = None,
        /,
    ) -> tuple[Tree, Tree]:
        variables = {"params": params, "batch_stats": stats}
        more = arguments(mask, train)
        if not train:
            return half.apply(variables, x, **more), stats
        rngs = None if key is None else {"dropout": key}
        outputs, changed = half.apply(variables, x, rngs=rngs, mutable=["batch_stats"], **more)
        return outputs, changed.get("batch_stats", {})

    encode = partial(apply_half, body)
    decode = partial(apply_half, head)

    def init(key: Array, x: Tree) -> types.Variables:
        body_key, head_key = jax.random.split(key)
        mask = _all_real(x)
        body_params, body_stats = init_half(body, body_key, x, mask)
        features, _ = encode(body_params, body_stats, x, mask, False)
        head_params, head_stats = init_half(head, head_key, features, mask)
        return types.Variables(
            types.Halves(body_params, head_params), types.Halves(body_stats, head_stats)
        )

    return scaled(types.Model(init, encode, decode))


def from_blocks(blocks: Sequence[nn.Module], cut: int) -> types.Model:
    """Return the model whose body is `blocks[:cut]` and whose head is the rest.

    Args:
      blocks: modules called as block(x [B, ...], mask [B] bool, train: bool). State that changes
        without a gradient lives in their collection "batch_stats", and random draws in training
        mode come from their stream "dropout". The last block's outputs are the model's; a
        classifier's are logits [B, K].
      cut: how many blocks are the body.
    """
    _check_cut(cut, len(blocks))
    return _of_halves(_Blocks(blocks[:cut]), _Blocks(blocks[cut:]), ("mask", "train"))


def _check_cut(cut: int, count: int) -> None:
    if not 0 <= cut < count:
        raise UsageError("cut", cut, f"must be an integer in 0..{count - 1}")


def from_flax(module: nn.Module, *, takes: Sequence[str] = (), cut: int = 0) -> types.Model:
    """Return the model of any flax.linen module.

    The body is empty and the module is the head, with the parameters of `module.init`. Dropout from
    the stream "dropout" works in training mode.

    Args:
      module: a module called as module(x, **arguments). Averages over a batch must respect the
        mask, as batches are padded with arbitrary examples: `models.BatchNorm` does, and
        `flax.linen.BatchNorm` does if it gets the mask.
      takes: the names of its arguments, among "mask" ([B] bool, which examples are real), "train",
        "training" (bool) and "deterministic" (its opposite).
      cut: how many layers of an `nn.Sequential` are the body; 0 for other modules. An
        `nn.Sequential` passes on x alone, so `takes` must be empty for it.
    """
    _check_cut(cut, len(module.layers) if isinstance(module, nn.Sequential) else 1)
    if cut == 0:
        return _of_halves(_Identity(), module, takes)
    halves = nn.Sequential(module.layers[:cut]), nn.Sequential(module.layers[cut:])
    return _of_halves(*halves, takes)


def from_function(
    init: Callable[[Array, Tree], Tree], apply: Callable[[Tree, Tree], Array]
) -> types.Model:
    """Return the model of plain functions, init(key, x [B, ...]) -> params and apply(params, x).

    The body is empty and the function is the head; there are no statistics and no draws. It must
    treat each example by itself, as batches are padded with arbitrary examples.
    """

    def decode(params: Tree, stats: Tree, x: Tree, *others: Any) -> tuple[Tree, Tree]:
        return apply(params, x), stats

    def init_halves(key: Array, x: Tree) -> types.Variables:
        return types.Variables(types.Halves({}, init(key, x)), types.Halves({}, {}))

    return scaled(types.Model(init_halves, no_body, decode))


def no_body(params: Tree, stats: Tree, x: Tree, *others: Any) -> tuple[Tree, Tree]:
    """Return the inputs: the body of a model that is all head."""
    return x, stats


def apply(
    model: types.Model,
    variables: types.Variables,
    x: Tree,
    mask: Array,
    train: bool,
    key: Array | None = None,
) -> tuple[Array, types.Halves]:
    """Return (outputs [B, ...], statistics) of the whole network on inputs x [B, ...].

    mask [B] bool says which inputs are real. In training mode each half gets a random key of its
    own from `key`.
    """
    body_key, head_key = (None, None) if key is None else jax.random.split(key)
    params, stats = variables
    features, body = model.encode(params.body, stats.body, x, mask, train, body_key)
    outputs, head = model.decode(params.head, stats.head, features, mask, train, head_key)
    return outputs, types.Halves(body, head)


def predict(model: types.Model, variables: types.Variables, x: Tree) -> Array:
    """Return the outputs [B, ...] of the network in evaluation mode; logits [B, K] of classifiers.

    x: inputs [B, ...], all of them real; B may be 0.
    """
    if jax.tree.leaves(x)[0].shape[0] == 0:  # layers that flatten or cut up images need an example
        one = jax.tree.map(lambda leaf: jnp.zeros((1, *leaf.shape[1:]), leaf.dtype), x)
        return predict(model, variables, one)[:0]
    return apply(model, variables, x, _all_real(x), False)[0]
