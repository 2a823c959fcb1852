"""Where a run comes from: versions, commit, date and data."""

import hashlib
import importlib.metadata
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax
import numpy as np

import fedjax_inv
from fedjax_inv.types import Tree

_ROOT = Path(__file__).parents[2]
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


def record(data: Tree) -> dict[str, Any]:
    """What is told of a start, as json holds it. data: all that is trained and tested on."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "versions": versions(),
        "data": fingerprint(data),
    }


def versions() -> dict[str, str]:
    """Of this package, of Python and of those that decide what is computed."""
    told = {"fedjax_inv": fedjax_inv.__version__, "python": platform.python_version()}
    return told | {name: importlib.metadata.version(name) for name in _PACKAGES}


def commit(root: Path = _ROOT) -> str | None:
    """The commit that is checked out, marked if files differ from it; None if there is none."""
    if not (root / ".git").exists():  # a repository further up is another's
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        done = subprocess.run(
            [*command, "--exclude=*"], capture_output=True, text=True, check=True, timeout=60
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def fingerprint(data: Tree) -> str:
    """SHA-256 of a tree of arrays: of their places, types, shapes and numbers."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(data):
        array = np.ascontiguousarray(leaf)
        digest.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape} ".encode())
        digest.update(array.data if array.size else b"")
    return digest.hexdigest()
