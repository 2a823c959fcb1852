"""Networks in files of their own: `save` writes what `load` reads, by names of our own."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_inv.checks import UsageError
from fedjax_inv.types import Tree


def save(path: str | Path, tree: Tree) -> dict[str, list[int]]:
    """Writes a tree of arrays as a .safetensors file, and returns the shapes by name.

    The names are those of `named`: of `Variables` "params/body/Dense_0/kernel", and so on. Raises
    ImportError without `safetensors`.
    """
    try:
        from safetensors.numpy import save_file
    except ImportError as error:
        raise ImportError(f"{error}: pip install 'fedjax_inv[experiments]'") from error
    # Copies, as a row of a larger array may not be laid out by itself.
    arrays = {name: np.array(leaf, order="C") for name, leaf in named(tree).items()}
    save_file(arrays, path)
    return {name: list(array.shape) for name, array in arrays.items()}


def load(path: str | Path, like: Tree) -> Tree:
    """The tree that a file holds, with the structure and the dtypes of `like`.

    like: of the same shapes, as the variables of the model that was saved, or `jax.eval_shape` of
    its `init`. Raises ValueError, in one line, if the file is missing or damaged, lacks an array,
    holds one more, or one of another shape; ImportError without `safetensors`.
    """
    path = Path(path)
    arrays, needed = _read(path), named(like)
    for name, leaf in needed.items():
        if name not in arrays:
            more = _more([other for other in needed if other not in arrays])
            raise UsageError("path", path, f"lacks {name}{_of(leaf)}, which the network has{more}")
        if arrays[name].shape != leaf.shape:
            found = list(arrays[name].shape)
            raise UsageError("path", path, f"{name} is {found}, must be {list(leaf.shape)}")
    unknown = [name for name in arrays if name not in needed]
    if unknown:
        first, more = f"{unknown[0]}{_of(arrays[unknown[0]])}", _more(unknown)
        raise UsageError("path", path, f"holds {first}, which the network has not{more}")
    leaves = [jnp.asarray(arrays[name], leaf.dtype) for name, leaf in needed.items()]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def named(tree: Tree) -> dict[str, jax.Array]:
    """The leaves of a tree by the names of the places that they have in it."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


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


def _of(leaf: np.ndarray | jax.Array) -> str:
    return f" {list(leaf.shape)}"


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
