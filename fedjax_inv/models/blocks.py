"""A `Model` from a sequence of flax.linen blocks, from any flax.linen module, or from functions.

Every such model scales 8-bit images to [0, 1] first.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from flax.errors import InvalidRngError, ScopeParamShapeError

from fedjax_inv import checks
from fedjax_inv.checks import UsageError
from fedjax_inv.models.wrappers import rendered, unit_range
from fedjax_inv.types import Array, Halves, Model, Tree, Variables


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


def check_images(x: Array) -> None:
    """Check that x are images, else raise UsageError; flax would take three axes for one image."""
    checks.array("inputs", x)
    if x.ndim != 4:
        raise UsageError("inputs", x, "must be images [B, height, width, channels]")


def scaled(model: Model) -> Model:
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


def _of_halves(body: nn.Module, head: nn.Module, takes: Sequence[str]) -> Model:
    """Return the model of two modules, each called as half(x, **arguments of `takes`)."""

    def arguments(mask: Array, train: bool) -> dict[str, Any]:
        return {name: ARGUMENTS[name](mask, train) for name in takes}

    def init_half(half: nn.Module, key: Array, x: Tree, mask: Array) -> tuple[Tree, Tree]:
        variables = half.init(key, x, **arguments(mask, False))
        others = sorted(set(variables) - {"params", "batch_stats"})
        if others:
            raise UsageError("collections", others, "must be none but params and batch_stats")
        if "batch_stats" in variables and "mask" not in takes:
            raise UsageError(
                "takes", takes, "must hold 'mask', or batch_stats would see the padding"
            )
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
            variables, more = {"params": params, "batch_stats": stats}, arguments(mask, train)
            rngs = None if key is None else {"dropout": key}
            try:
                if not train:
                    return half.apply(variables, x, **more), stats
                outputs, changed = half.apply(
                    variables, x, rngs=rngs, mutable=["batch_stats"], **more
                )
            except ScopeParamShapeError as error:
                shapes = jax.tree.map(jnp.shape, x)
                raise UsageError(
                    "inputs", ..., f"have shape {shapes}, must fit the network's parameters"
                ) from error
            except InvalidRngError as error:
                if not train:
                    text = "draws when it is evaluated (train=False), must draw in training alone"
                    raise UsageError("module", ..., text) from error
                if key is not None:
                    raise  # it draws from a stream other than "dropout"
                raise UsageError(
                    "key", key, "must be given to train a module that draws"
                ) from error
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

    return scaled(Model(init, encode, decode))


def from_blocks(blocks: Sequence[nn.Module], cut: int) -> Model:
    """Return the model whose body is `blocks[:cut]` and whose head is the rest.

    Args:
      blocks: modules called as block(x [B, ...], mask [B] bool, train: bool). State that changes
        without a gradient lives in their collection "batch_stats", and random draws in training
        mode come from their stream "dropout". The last block's outputs are the model's; a
        classifier's are logits [B, K].
      cut: how many blocks are the body.

    Returns:
      The model.

    Raises:
      UsageError: unless the blocks are modules, and for a cut beyond the network. When the model
        trains without a key: if a block draws.
    """
    checks.record("blocks", blocks, Sequence)
    others = [block for block in blocks if not isinstance(block, nn.Module)]
    if others or not blocks:
        raise UsageError("blocks", others, "must be one or several flax.linen modules")
    checks.integer("cut", cut, 0, len(blocks) - 1)
    return _of_halves(_Blocks(blocks[:cut]), _Blocks(blocks[cut:]), ("mask", "train"))


def from_flax(module: nn.Module, *, takes: Sequence[str] = (), cut: int = 0) -> Model:
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

    Returns:
      The model.

    Raises:
      UsageError: for an argument that is not allowed, and if the module needs other arguments than
        `takes`, or does not take those. At initialisation: for "batch_stats" without a mask, and
        for collections other than it and "params".
    """
    if isinstance(module, nnx.Module):
        kind = type(module).__name__  # its text would be the whole module
        raise UsageError(
            "module",
            ...,
            f"{kind} is a flax.nnx module, which models.from_nnx takes; must be linen",
        )
    if not isinstance(module, nn.Module):
        raise UsageError("module", module, "must be a flax.linen module")
    checks.record("takes", takes, Sequence)
    if isinstance(takes, str | bytes) or any(name not in [*ARGUMENTS] for name in takes):
        raise UsageError("takes", takes, f"must be a sequence of some of {', '.join(ARGUMENTS)}")
    checks.integer("cut", cut, 0)
    if not isinstance(module, nn.Sequential):
        if cut != 0:
            raise UsageError("cut", cut, "must be 0, as module is no nn.Sequential")
        _check_call(module, takes)
        return _of_halves(_Identity(), module, takes)
    if takes:
        raise UsageError(
            "takes", takes, "must be empty for an nn.Sequential; from_blocks passes on all"
        )
    checks.integer("cut", cut, 0, len(module.layers) - 1)
    if cut == 0:
        return _of_halves(_Identity(), module, takes)
    halves = nn.Sequential(module.layers[:cut]), nn.Sequential(module.layers[cut:])
    return _of_halves(*halves, takes)


def _check_call(module: nn.Module, takes: Sequence[str]) -> None:
    """Raise UsageError unless a module can be called as module(x, **arguments of `takes`)."""
    name = f"{type(module).__name__}.__call__"
    if not callable(module):
        raise UsageError("module", ..., f"must have a method {name}")
    _, *others = inspect.signature(module.__call__).parameters.values()
    for other in others:
        is_open = other.kind in (other.VAR_POSITIONAL, other.VAR_KEYWORD)
        if is_open or other.default is not other.empty or other.name in takes:
            continue
        if other.name in ARGUMENTS:
            raise UsageError("takes", takes, f"must hold {other.name!r}, which {name} needs")
        allowed = f"must need its inputs and some of {', '.join(ARGUMENTS)} alone"
        raise UsageError("module", ..., f"{name} needs {other.name!r}, {allowed}")
    if not any(other.kind is other.VAR_KEYWORD for other in others):
        unknown = [each for each in takes if each not in [other.name for other in others]]
        if unknown:
            text = f"must not hold {unknown[0]!r}, which {name} does not take"
            raise UsageError("takes", takes, text)


def from_function(
    init: Callable[[Array, Tree], Tree], apply: Callable[[Tree, Tree], Array]
) -> Model:
    """Return the model of plain functions.

    The body is empty and the function is the head; there are no statistics and no draws.

    Args:
      init: (key, x [B, ...]) -> params.
      apply: (params, x) -> outputs. It must treat each example by itself, as batches are padded
        with arbitrary examples.

    Returns:
      The model.

    Raises:
      UsageError: for arguments that are not functions.
    """
    for name, function in (("init", init), ("apply", apply)):
        if not callable(function):
            raise UsageError(name, function, "must be a function")

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

    return scaled(Model(init_halves, encode, decode))


def _check_inputs(x: Tree) -> None:
    leaves = jax.tree.leaves(x)
    if not leaves:
        raise UsageError("x", x, "must be an array or a tree of arrays")
    for leaf in leaves:
        checks.array("x", leaf)
        if leaf.ndim == 0:
            raise UsageError("x", leaf, "must be [B, ...]")


def apply(
    model: Model, variables: Variables, x: Tree, mask: Array, train: bool, key: Array | None = None
) -> tuple[Array, Halves]:
    """Apply the whole network.

    Args:
      model: the network.
      variables: its parameters and statistics.
      x: inputs [B, ...].
      mask: [B] bool, which inputs are real.
      train: whether in training mode.
      key: the random key of training mode; each half gets a key of its own.

    Returns:
      (outputs [B, ...], statistics).

    Raises:
      UsageError: if the network draws and there is no key, and for arguments of other types.
    """
    checks.record("model", model, Model)
    checks.record("variables", variables, Variables)
    _check_inputs(x)
    checks.array("mask", mask)
    checks.boolean("train", train)
    if key is not None:
        checks.key("key", key)
    body_key, head_key = (None, None) if key is None else jax.random.split(key)
    params, stats = variables
    features, body = model.encode(params.body, stats.body, x, mask, train, body_key)
    outputs, head = model.decode(params.head, stats.head, features, mask, train, head_key)
    return outputs, Halves(body, head)


def predict(model: Model, variables: Variables, x: Tree) -> Array:
    """Return the outputs of the network in evaluation mode.

    Args:
      model: the network.
      variables: its parameters and statistics.
      x: inputs [B, ...], all of them real; B may be 0.

    Returns:
      Outputs [B, ...]; logits [B, K] for classifiers.

    Raises:
      UsageError: for arguments of other types.
    """
    _check_inputs(x)
    if jax.tree.leaves(x)[0].shape[0] == 0:  # layers that flatten or cut up images need an example
        one = jax.tree.map(lambda leaf: jnp.zeros((1, *leaf.shape[1:]), leaf.dtype), x)
        return predict(model, variables, one)[:0]
    return apply(model, variables, x, _all_real(x), False)[0]
