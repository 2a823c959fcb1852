"""Networks in .safetensors files, with names of our own."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp

from fedjax_inv.checks import UsageError, one_line, regular
from fedjax_inv.types import Array, Tree


def save(path: str | Path, tree: Tree, about: Mapping[str, str] | None = None) -> None:
    """Write a tree of arrays as a .safetensors file.

    Their names are those of `named`, such as "params/body/Dense_0/kernel". The texts `about`
    describe the arrays, such as the task and the names of the outputs.
    """
    from safetensors import flax

    # As arrays of JAX: safetensors writes memory as it lies, and a view in NumPy has strides.
    arrays = {name: jnp.asarray(leaf) for name, leaf in named(tree).items()}
    content = flax.save(arrays, None if about is None else dict(about))
    Path(path).expanduser().write_bytes(content)


def load(path: str | Path, like: Tree) -> Tree:
    """Load the tree that a file holds, or raise UsageError if it holds no or another tree.

    `like` has the structure, shapes and dtypes of the result, such as the variables of the saved
    model, or `jax.eval_shape` of its `init`.
    """
    return placed(path, read(path), like, named(like))


def about(path: str | Path) -> dict[str, str]:
    """Return the description that `save` wrote into a file; {} if there is none.

    Those of `fedjax-inv evaluate --export` are "task" (classes, labels or values), "outputs" and
    "classes", the names of the outputs, each in JSON.
    """
    from safetensors import safe_open

    with _readable(path), safe_open(regular(path), framework="numpy") as file:
        return file.metadata() or {}


def named(tree: Tree) -> dict[str, Array]:
    """Return the leaves of a tree by their names, the paths in the tree."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def read(path: str | Path) -> dict[str, Array]:
    """Return the arrays of a .safetensors file by the file's names, or raise UsageError."""
    from safetensors import flax

    with _readable(path):
        return flax.load_file(regular(path))


@contextlib.contextmanager
def _readable(path: str | Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # of many types: of the system, for the header, for 8-bit floats
        text = f"must be a whole .safetensors file: {one_line(error)}"
        raise UsageError("path", path, text) from None


def placed(
    path: str | Path, arrays: Mapping[str, Array], like: Tree, places: Mapping[str, Array]
) -> Tree:
    """Return a tree of a file's arrays, which must be those of `like` in number, shape and kind.

    `places` are the leaves of `like`, in their order, by the file's names; only shapes and dtypes
    matter.
    """
    for name in {**places, **arrays}:
        found = _described(arrays.get(name))
        needed = _described(places.get(name))
        if found != needed:
            text = f"holds another network: {name} is {found}, must be {needed}"
            raise UsageError("path", path, text)
    leaves = [jnp.asarray(arrays[name], leaf.dtype) for name, leaf in places.items()]
    for name, leaf in zip(places, leaves, strict=True):
        if jnp.issubdtype(leaf.dtype, jnp.integer) and (leaf != arrays[name]).any():
            text = f"holds numbers in {name} that {leaf.dtype}, the network's type, has not"
            raise UsageError("path", path, text)
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _described(leaf: Array | None) -> str:
    if leaf is None:
        return "absent"
    kind = "floating" if jnp.issubdtype(leaf.dtype, jnp.floating) else "integer"
    return f"{kind} {list(leaf.shape)}"
