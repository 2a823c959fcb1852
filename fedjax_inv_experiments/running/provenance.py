"""The provenance of a run: versions, commit, date, and digests of its data."""

import hashlib
import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax
import numpy as np

import fedjax_inv
from fedjax_inv.types import Tree
from fedjax_inv_experiments.flags import errors, outside
from fedjax_inv_experiments.running.records import Module, Start

_ROOT = Path(__file__).parents[2]
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


def record(
    data: Tree,
    factories: Collection[str] = (),
    files: Mapping[str, str] | None = None,
) -> Start:
    """The record of a start at this moment.

    data: all examples. factories: those outside of this project, by name. files: the digests of
    this project's files on which the results depend.
    """
    date = datetime.now(UTC).isoformat(timespec="seconds")
    return Start(
        date,
        commit(),
        versions(),
        fingerprint(data),
        code(factories),
        dict(files or {}),
        processor(),
    )


def code(factories: Collection[str]) -> dict[str, Module]:
    """The modules of factories outside of this project, as they are now. Imports nothing."""
    found = {}
    installed = importlib.metadata.packages_distributions() if factories else {}
    for name in factories:
        module = name.partition(":")[0]
        owners = sorted({*installed.get(module.partition(".")[0], ())})
        versions = {owner: importlib.metadata.version(owner) for owner in owners}
        found[name] = Module(module, outside.digest(name), versions)
    return found


def report_changes(where: str, starts: Sequence[Start], now: Mapping[str, Module]) -> None:
    """Prints a line on stderr for each module that has another file than at a run's last start.

    where: the text that names the run. now: from `code`.
    """
    lines = {}
    for name, module in now.items():
        before = [start.code[name] for start in starts if name in start.code]
        if before and before[-1].sha256 != module.sha256:
            old, new = (each.sha256 or "none" for each in (before[-1], module))
            text = f"{module.module} has changed since the run: SHA-256 {old} then, {new} now"
            lines[module.module] = errors.printable(f"warning: {where}: {text}")
    for line in lines.values():
        print(line, file=sys.stderr)


def versions() -> dict[str, str]:
    """The versions of this package, of Python and of the packages that influence results."""
    own = {"fedjax_inv": fedjax_inv.__version__, "python": platform.python_version()}
    return own | {name: importlib.metadata.version(name) for name in _PACKAGES}


def processor() -> str:
    """The model and the number of cores of the processor, and the accelerators."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    entries = dict(line.partition(":")[::2] for line in lines)
    models = {name.strip(): value.strip() for name, value in entries.items()}
    model = models.get("model name", platform.processor() or platform.machine())
    cores = f"{model}, {os.cpu_count()} cores"
    devices = jax.devices()
    return cores if devices[0].platform == "cpu" else f"{devices[0].device_kind}; {cores}"


def commit(root: Path = _ROOT) -> str | None:
    """The checked-out commit, marked "-dirty" if files differ; None without a repository."""
    if not (root / ".git").exists():  # a repository in a parent folder is another project
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
    """The SHA-256 of a tree of arrays, with their paths, types, shapes and bits."""
    leaves = jax.tree_util.tree_leaves_with_path(data)
    return digest(_headed(jax.tree_util.keystr(path), leaf) for path, leaf in leaves)


def checksum(data: Tree) -> str:
    """The SHA-256 of a tree of arrays, which is the same for dicts and for records."""
    leaves = jax.tree_util.tree_leaves_with_path(data)
    named = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}
    return digest(_headed(name, named[name]) for name in sorted(named))


def _headed(name: str, leaf: Any) -> tuple[str, np.ndarray]:
    array = np.ascontiguousarray(leaf)
    return f"{name} {array.dtype} {array.shape} ", array


def digest(arrays: Iterable[tuple[str, Any]]) -> str:
    """The SHA-256 of (text, array) pairs, in order."""
    sha = hashlib.sha256()
    for text, array in arrays:
        sha.update(text.encode())
        sha.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return sha.hexdigest()
