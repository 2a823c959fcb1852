"""A `Model` from any flax.nnx module.

A module's arrays are taken out of it and put back for every call, so that it stays a pure function.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx, traverse_util

from fedjax_inv import types
from fedjax_inv.checks import UsageError
from fedjax_inv.models.blocks import ARGUMENTS, no_body, scaled
from fedjax_inv.types import Array, Tree


class _Cut(nnx.Module):
    """Stands in the place of the head, which is called once, and keeps what it gets."""

    def __init__(self, head: nnx.Module) -> None:
        self.parameters = tuple(inspect.signature(type(head).__call__).parameters)[2:]

    def __call__(self, features: Array, *others: Any, **named: Any) -> Array:
        given = {*named, *self.parameters[: len(others)]}
        if hasattr(self, "features") or not given <= {*ARGUMENTS}:
            text = f"must be called once, with one array and any of {', '.join(ARGUMENTS)}"
            raise UsageError("cut", ..., text)
        self.features = features
        return features


class _Half(NamedTuple):
    """A module without its arrays."""

    graph: Any
    params: Any  # the states that `nnx.merge` takes, with shapes
    stats: Any
    draws: Any  # keys and counters of random streams
    takes: tuple[str, ...]  # arguments of its call beside the inputs
    cut: str  # the name of the attribute that is the head, in the body; else ""


def _by_name(state: Any) -> dict[tuple[str, ...], Array]:
    return {tuple(map(str, path)): leaf.get_value() for path, leaf in nnx.to_flat_state(state)}


def _taken_apart(module: nnx.Module, cut: str = "") -> tuple[_Half, Tree, Tree]:
    """Return (the module without its arrays, parameters, statistics)."""
    graph, *states = nnx.split(module, nnx.Param, nnx.BatchStat, nnx.RngState)
    parameters = inspect.signature(type(module).__call__).parameters
    takes = tuple(name for name in ARGUMENTS if name in parameters)
    params, stats = (traverse_util.unflatten_dict(_by_name(state)) for state in states[:2])
    if stats and "mask" not in takes:
        text = "has batch statistics; its __call__ must take 'mask' ([B] bool) and pass it on to "
        raise UsageError("module", ..., f"{text}nnx.BatchNorm, or they would see the padding")
    of_all = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), states)
    return _Half(graph, of_all[0], of_all[1], of_all[2], takes, cut), params, stats


def _halves(module: nnx.Module, cut: int | str) -> tuple[nnx.Module | None, nnx.Module]:
    """Return (body, head); the body is None if the head is everything."""
    if cut == 0:
        return None, module
    if isinstance(cut, str):
        head = getattr(module, cut)
        body = nnx.clone(module)
        setattr(body, cut, _Cut(head))
    elif isinstance(module, nnx.Sequential) and 0 < cut < len(module.layers):
        layers = [*module.layers]
        body = nnx.Sequential(*layers[:cut])
        head = nnx.Sequential(*layers[cut:])
    else:
        text = "must be 0, the name of the head, or the body's number of an nnx.Sequential's layers"
        raise UsageError("cut", cut, text)
    if sum(len(_variables(half)) for half in (body, head)) > len(_variables(module)):
        raise UsageError("cut", cut, "must not part layers that share a variable")
    return body, head


def _variables(module: nnx.Module) -> list[Tree]:
    """Return the parameters and statistics, each once."""
    return jax.tree.leaves(nnx.state(module, nnx.Any(nnx.Param, nnx.BatchStat)))


def _put_together(half: _Half, params: Tree, stats: Tree, key: Array) -> nnx.Module:
    """Return the module; each random stream has a key of its own, and counts from 0."""

    def filled(state: Any, tree: Tree) -> Any:
        found = traverse_util.flatten_dict(tree)
        leaves = [jnp.asarray(found[name]) for name in _by_name(state)]
        return jax.tree.unflatten(jax.tree.structure(state), leaves)

    def stream(number: int, shape: jax.ShapeDtypeStruct) -> Array:
        if not jnp.issubdtype(shape.dtype, jax.dtypes.prng_key):
            return jnp.zeros(shape.shape, shape.dtype)
        own = jax.random.fold_in(key, number)
        return jax.random.split(own, shape.shape) if shape.shape else own

    shapes, structure = jax.tree.flatten(half.draws)
    streams = jax.tree.unflatten(structure, [stream(*each) for each in enumerate(shapes)])
    return nnx.merge(half.graph, filled(half.params, params), filled(half.stats, stats), streams)


def _apply(
    half: _Half,
    params: Tree,
    stats: Tree,
    x: Tree,
    mask: Array,
    train: bool,
    key: Array | None = None,
    /,
) -> tuple[Array, Tree]:
    module: Any = _put_together(half, params, stats, jax.random.key(0) if key is None else key)
    module.train() if train else module.eval()
    before = jax.tree.leaves(nnx.state(module, nnx.RngCount))
    outputs = module(x, **{name: ARGUMENTS[name](mask, train) for name in half.takes})
    if half.cut and vars(getattr(module, half.cut)).pop("features", None) is not outputs:
        raise UsageError("cut", half.cut, "must be the attribute whose outputs are the module's")
    after = jax.tree.leaves(nnx.state(module, nnx.RngCount))
    draws = any(new is not old for new, old in zip(after, before, strict=True))
    if draws and (key is None or not train):
        raise UsageError(
            "module", ..., "draws, which it must in training mode and with a key alone"
        )
    changed = _by_name(nnx.state(module, nnx.BatchStat))
    return outputs, traverse_util.unflatten_dict(changed) if train else stats


def from_nnx(
    module: nnx.Module | Callable[[nnx.Rngs], nnx.Module], *, cut: int | str = 0
) -> types.Model:
    """Return the model of any flax.nnx module.

    The module is called as module(x, **arguments), in the mode of `module.train()` or
    `module.eval()`. The arguments are those of `mask` ([B] bool, which examples are real), `train`,
    `training` (bool) and `deterministic` (its opposite) that its `__call__` takes. Averages over a
    batch must respect the mask, as batches are padded with arbitrary examples: `nnx.BatchNorm` does
    if it gets mask[:, None]. Random streams start anew in every call, from the step's key. Other
    variables than parameters, batch statistics and random streams are refused.

    Args:
      module: a function of random streams that builds the module, such as
        lambda rngs: Network(10, rngs=rngs). Or a module; then its own values are the initial
        network, whatever the key. It stays unchanged.
      cut: where the head begins: the name of the attribute that computes the module's outputs, or
        the number of layers of an `nnx.Sequential` that are the body. 0: the module is the head,
        and the body is empty.

    Returns:
      The model; its parameters are nested by the module's attributes.
    """
    build = None if isinstance(module, nnx.Module) else module
    known: Any = module if build is None else nnx.eval_shape(lambda: build(nnx.Rngs(0)))

    def variables_of(whole: nnx.Module) -> tuple[_Half | None, _Half, types.Variables]:
        body, head = _halves(whole, cut)
        of_body: tuple[_Half | None, Tree, Tree] = (None, {}, {})
        if body is not None:
            of_body = _taken_apart(body, cut if isinstance(cut, str) else "")
        of_head = _taken_apart(head)
        params, stats = (types.Halves(of_body[i], of_head[i]) for i in (1, 2))
        return of_body[0], of_head[0], types.Variables(params, stats)

    body, head, variables = variables_of(known)
    own = jax.device_get(variables) if build is None else None

    def init(key: Array, x: Tree) -> types.Variables:
        del x
        if build is None:
            return jax.tree.map(jnp.asarray, own)
        return variables_of(build(nnx.Rngs(key)))[2]

    encode = no_body if body is None else partial(_apply, body)
    return scaled(types.Model(init, encode, partial(_apply, head)))
