"""A `Model` from any flax.nnx module.

A module's arrays are taken out of it and put back for every call, so that it stays a pure function.
"""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx, traverse_util

from fedjax_inv.checks import UsageError
from fedjax_inv.models.blocks import ARGUMENTS, no_body, scaled
from fedjax_inv.types import Apply, Array, Halves, Model, Tree, Variables


class _Cut(nnx.Module):
    """Stands in the place of the head, and keeps what it gets.

    The head is called once, with the features and those of `ARGUMENTS` that it takes.
    """

    def __init__(self, name: str, head: nnx.Module) -> None:
        self.name = name
        self.parameters = tuple(inspect.signature(type(head).__call__).parameters)[2:]

    def __call__(self, features: Array, *others: Any, **named: Any) -> Array:
        given = {*named, *self.parameters[: len(others)]}
        if hasattr(self, "features") or not given <= {*ARGUMENTS}:
            allowed = "must be the attribute that is called once, with one array"
            raise UsageError("cut", self.name, f"{allowed} and any of {', '.join(ARGUMENTS)}")
        self.features = features
        return features

    def was_last(self, outputs: Array) -> bool:
        """Return whether outputs are the features that it got, and forget those."""
        is_last = getattr(self, "features", None) is outputs
        vars(self).pop("features", None)
        return is_last


class _Half(NamedTuple):
    """A module without its arrays."""

    graph: Any
    params: Any  # the states that `nnx.merge` takes, with shapes
    stats: Any
    draws: Any  # keys and counters of random streams
    takes: tuple[str, ...]  # arguments of its call beside the inputs
    cut: str  # the name of the attribute that is the head, in the body; else ""


def _by_name(state: Tree) -> dict[tuple[str, ...], Array]:
    def name(place: tuple) -> tuple[str, ...]:
        if isinstance(place[-1], jax.tree_util.GetAttrKey):  # the value of a variable
            place = place[:-1]
        return tuple(jax.tree_util.keystr((key,), simple=True) for key in place)

    return {name(place): leaf for place, leaf in jax.tree_util.tree_leaves_with_path(state)}


def _taken_apart(module: nnx.Module, cut: str) -> tuple[_Half, Tree, Tree]:
    """Return (the module without its arrays, parameters, statistics)."""
    kinds = (nnx.Param, nnx.BatchStat, nnx.RngState)
    graph, *states = nnx.split(module, *kinds, ...)
    params, stats, draws, others = states
    if jax.tree.leaves(others):
        names = ["/".join(name) for name in _by_name(others)]
        allowed = "must be none but of nnx.Param, nnx.BatchStat and nnx.RngState"
        raise UsageError("variables", ", ".join(names[:3]), allowed)
    parameters = inspect.signature(type(module).__call__).parameters
    takes = tuple(name for name in ARGUMENTS if name in parameters)
    if jax.tree.leaves(stats) and "mask" not in takes:
        text = "has batch statistics; its __call__ must take 'mask' ([B] bool) and pass it on to "
        raise UsageError("module", ..., f"{text}nnx.BatchNorm, or they would see the padding")
    half = _Half(graph, _shapes(params), _shapes(stats), _shapes(draws), takes, cut)
    of_params, of_stats = (traverse_util.unflatten_dict(_by_name(s)) for s in (params, stats))
    return half, of_params, of_stats


def _shapes(state: Tree) -> Tree:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)


def _halves(module: nnx.Module, cut: int | str) -> tuple[nnx.Module | None, nnx.Module]:
    """Return (body, head); the body is None if the head is everything."""
    if cut == 0:
        return None, module
    if isinstance(cut, str) and isinstance(getattr(module, cut, None), nnx.Module):
        head, body = getattr(module, cut), nnx.clone(module)
        setattr(body, cut, _Cut(cut, head))
    elif (
        isinstance(cut, int) and isinstance(module, nnx.Sequential) and 0 < cut < len(module.layers)
    ):
        layers = [*module.layers]
        body, head = nnx.Sequential(*layers[:cut]), nnx.Sequential(*layers[cut:])
    else:
        allowed = "must be 0, the name of an attribute that is an nnx.Module, or of an "
        raise UsageError("cut", cut, f"{allowed}nnx.Sequential the number of layers of the body")
    if sum(len(_variables(half)) for half in (body, head)) > len(_variables(module)):
        raise UsageError("cut", cut, "must not part layers that share a variable")
    return body, head


def _variables(module: nnx.Module) -> list[Tree]:
    """Return the parameters and statistics, each once."""
    return jax.tree.leaves(nnx.state(module, nnx.Any(nnx.Param, nnx.BatchStat)))


def _put_together(half: _Half, params: Tree, stats: Tree, key: Array | None) -> nnx.Module:
    def filled(state: Tree, tree: Tree) -> Tree:
        found = traverse_util.flatten_dict(tree)
        leaves = [jnp.asarray(found[name]) for name in _by_name(state)]
        return jax.tree.unflatten(jax.tree.structure(state), leaves)

    # Each stream has a key of its own, and counts from 0 in every call.
    key = jax.random.key(0) if key is None else key
    shapes, structure = jax.tree.flatten(half.draws)
    draws = []
    for number, shape in enumerate(shapes):
        if jnp.issubdtype(shape.dtype, jax.dtypes.prng_key):
            own = jax.random.fold_in(key, number)
            draws.append(jax.random.split(own, shape.shape) if shape.shape else own)
        else:
            draws.append(jnp.zeros(shape.shape, shape.dtype))
    streams = jax.tree.unflatten(structure, draws)
    return nnx.merge(half.graph, filled(half.params, params), filled(half.stats, stats), streams)


def _apply_of(half: _Half) -> Apply:
    def apply(
        params: Tree, stats: Tree, x: Tree, mask: Array, train: bool, key: Array | None = None, /
    ) -> tuple[Array, Tree]:
        module: Any = _put_together(half, params, stats, key)
        module.train() if train else module.eval()
        before = jax.tree.leaves(nnx.state(module, nnx.RngCount))
        outputs = module(x, **{name: ARGUMENTS[name](mask, train) for name in half.takes})
        if half.cut and not getattr(module, half.cut).was_last(outputs):
            allowed = "must be the attribute whose outputs are the module's"
            raise UsageError("cut", half.cut, allowed)
        after = jax.tree.leaves(nnx.state(module, nnx.RngCount))
        draws = any(new is not old for new, old in zip(after, before, strict=True))
        if draws and not train:
            raise UsageError("module", ..., "draws in evaluation mode, must draw in training alone")
        if draws and key is None:
            raise UsageError("key", key, "must be given to train a module that draws")
        changed = _by_name(nnx.state(module, nnx.BatchStat))
        return outputs, traverse_util.unflatten_dict(changed) if train else stats

    return apply


def from_nnx(module: nnx.Module | Callable[[nnx.Rngs], nnx.Module], *, cut: int | str = 0) -> Model:
    """Return the model of any flax.nnx module.

    The module is called as module(x, **arguments), in the mode of `module.train()` or
    `module.eval()`. The arguments are those of `mask` ([B] bool, which examples are real), `train`,
    `training` (bool) and `deterministic` (its opposite) that its `__call__` takes. Averages over a
    batch must respect the mask, as batches are padded with arbitrary examples: `nnx.BatchNorm` does
    if it gets mask[:, None]. Random streams start anew in every call, from the step's key.

    Args:
      module: a function of random streams that builds the module, such as
        lambda rngs: Network(10, rngs=rngs). Or a module; then its own values are the initial
        network, whatever the key. It stays unchanged.
      cut: where the head begins: the name of the attribute that computes the module's outputs, or
        the number of layers of an `nnx.Sequential` that are the body. 0: the module is the head,
        and the body is empty.

    Returns:
      The model; its parameters are nested by the module's attributes.

    Raises:
      UsageError: for a function that returns no module, for a cut that is impossible, for batch
        statistics in a module that takes no mask, and for variables of other kinds than parameters,
        batch statistics and random streams. When the model is called: if the module draws without a
        key or in evaluation mode.
    """
    build = None if isinstance(module, nnx.Module) else module
    known = module if build is None else nnx.eval_shape(lambda: build(nnx.Rngs(0)))
    if not isinstance(known, nnx.Module):
        text = f"must be or return an nnx.Module, it returns {type(known).__name__}"
        raise UsageError("module", ..., text)

    def variables_of(whole: nnx.Module) -> tuple[_Half | None, _Half, Variables]:
        body, head = _halves(whole, cut)
        of_body: tuple[_Half | None, Tree, Tree] = (None, {}, {})
        if body is not None:
            of_body = _taken_apart(body, cut if isinstance(cut, str) else "")
        of_head = _taken_apart(head, "")
        params, stats = (Halves(of_body[i], of_head[i]) for i in (1, 2))
        return of_body[0], of_head[0], Variables(params, stats)

    body, head, variables = variables_of(known)
    own = jax.device_get(variables) if build is None else None

    def init(key: Array, x: Tree) -> Variables:
        del x
        if build is None:
            return jax.tree.map(jnp.asarray, own)
        return variables_of(build(nnx.Rngs(key)))[2]

    return scaled(Model(init, no_body if body is None else _apply_of(body), _apply_of(head)))
