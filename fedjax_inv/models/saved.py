"""Networks in .safetensors files, with names of our own."""

from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_inv import checks
from fedjax_inv.checks import UsageError
from fedjax_inv.types import Tree


def save(
    path: str | Path, tree: Tree, about: Mapping[str, str] | None = None
) -> dict[str, list[int]]:
    """Write a tree of arrays as a .safetensors file.

    Args:
      path: the file.
      tree: the arrays. Their names are those of `named`, such as "params/body/Dense_0/kernel".
      about: texts that describe the arrays, such as the task and the names of the outputs, for
        `about`.

    Returns:
      The shapes by name.

    Raises:
      UsageError: if the file cannot be written, for a leaf that is no array of numbers, and for a
        description that does not hold texts.
      ImportError: without `safetensors`.
    """
    path = _path(path)
    for name, leaf in named(tree).items():
        checks.array(name or "tree", leaf if hasattr(leaf, "dtype") else np.asarray(leaf))
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            raise UsageError(name, leaf, "must be an array of real numbers")
    if about is not None:
        checks.record("about", about, Mapping)
        for name, text in about.items():
            checks.record("about", name, str)
            checks.record(f"about[{name!r}]", text, str)
    try:
        from safetensors.numpy import save_file
    except ImportError as error:
        raise ImportError(f"{error}: pip install 'fedjax_inv[experiments]'") from error
    # Copies in C order: safetensors writes memory as it lies, and a view may have strides.
    arrays = {name: np.array(leaf, order="C") for name, leaf in named(tree).items()}
    file = path.expanduser()
    if file.is_dir() or not file.parent.is_dir():
        raise UsageError("path", path, "must be a file in a folder that exists")
    try:
        save_file(arrays, file, None if about is None else dict(about))
    except OSError as error:
        raise UsageError("path", path, f"cannot be written: {error.strerror}") from None
    return {name: list(array.shape) for name, array in arrays.items()}


def load(path: str | Path, like: Tree) -> Tree:
    """Load the tree that a file holds.

    Args:
      path: the file.
      like: a tree with the structure, shapes and dtypes of the result, such as the variables of the
        saved model, or `jax.eval_shape` of its `init`.

    Returns:
      The tree.

    Raises:
      UsageError: if the file is missing or damaged, if it lacks an array or has one more, or if an
        array has another shape or another kind of numbers.
      ImportError: without `safetensors`.
    """
    path = _path(path)
    for leaf in jax.tree.leaves(like):
        checks.array("like", leaf)
    arrays, needed = _read(path), named(like)
    for name, leaf in needed.items():
        if name not in arrays:
            more = _more([other for other in needed if other not in arrays])
            raise UsageError("path", path, f"lacks {name}{_of(leaf)}, which the network has{more}")
        if arrays[name].shape != leaf.shape:
            found = list(arrays[name].shape)
            raise UsageError("path", path, f"{name} is {found}, must be {list(leaf.shape)}")
        if _kind(arrays[name]) != _kind(leaf):
            text = f"{name} is of type {arrays[name].dtype}, must be {leaf.dtype}"
            raise UsageError("path", path, text)
    unknown = [name for name in arrays if name not in needed]
    if unknown:
        first, more = f"{unknown[0]}{_of(arrays[unknown[0]])}", _more(unknown)
        raise UsageError("path", path, f"holds {first}, which the network has not{more}")
    leaves = [jnp.asarray(arrays[name], leaf.dtype) for name, leaf in needed.items()]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def about(path: str | Path) -> dict[str, str]:
    """Return the description that `save` wrote into a file; {} if there is none.

    Args:
      path: the file. Those of the binary `export` say what the outputs mean, in JSON: "task"
        (classes, labels or values), "outputs" and "classes", the names of the outputs.

    Raises:
      UsageError: if the file is missing or damaged.
      ImportError: without `safetensors`.
    """
    path = _path(path)
    _read(path)  # the whole file, which may be damaged
    from safetensors import safe_open

    with safe_open(path.expanduser(), framework="numpy") as file:
        return file.metadata() or {}


def named(tree: Tree) -> dict[str, jax.Array]:
    """Return the leaves of a tree by their names, the paths in the tree.

    Raises:
      UsageError: if two leaves have one name, such as {"a/b": ...} beside {"a": {"b": ...}}.
    """
    leaves: dict[str, jax.Array] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if name in leaves:
            raise UsageError("tree", ..., f"has two leaves of the name {name}, must have one")
        leaves[name] = leaf
    return leaves


def _path(path: str | Path) -> Path:
    if not isinstance(path, str | Path) or not str(path):
        raise UsageError("path", path, "must be the path of a file")
    return Path(path)


def _read(path: Path) -> dict[str, np.ndarray]:
    try:
        from safetensors import SafetensorError
        from safetensors.numpy import load_file
    except ImportError as error:
        raise ImportError(f"{error}: pip install 'fedjax_inv[experiments]'") from error
    file = path.expanduser()
    if not file.is_file():
        raise UsageError("path", path, "must be a .safetensors file, there is none")
    try:
        return load_file(file)
    except (SafetensorError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UsageError("path", path, f"must be a whole .safetensors file: {reason}") from None


def _kind(leaf: np.ndarray | jax.Array) -> str:
    return "float" if jnp.issubdtype(leaf.dtype, jnp.floating) else np.dtype(leaf.dtype).kind


def _of(leaf: np.ndarray | jax.Array) -> str:
    return f" {list(leaf.shape)}"


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
