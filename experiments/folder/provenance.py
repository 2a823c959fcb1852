"""The provenance of a run: version, commit, date, and digests of its data and of one's own code."""

import functools
import hashlib
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Collection, Iterable
from datetime import UTC, datetime
from pathlib import Path

import jax
import numpy as np

import fedjax_inv
from fedjax_inv.data.dataset import Dataset
from fedjax_inv.types import Tree

from ..assembly import factories
from ..config import Network
from .records import Provenance

_ROOT = Path(__file__).parents[2]
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
SEVERAL = "several"
_ONE = ("commit", "data", "processor", "library")  # one value of all starts of a run, or "several"


def record(data: Dataset, network: Network, networks: Tree = None) -> Provenance:
    """The record of a start at this moment, without code of one's own.

    data: the data set as it was read. network: its flags. networks: those of --init_from.
    """
    return Provenance(
        datetime.now(UTC).isoformat(timespec="seconds"),
        *_here(),
        of_data(data),
        weights=of_files(network.weights, network.head_from),
        networks="" if networks is None else fingerprint(networks),
        library=_library(),
        folder=os.getcwd(),
    )


_library = functools.cache(factories.library)


@functools.cache
def _here() -> tuple[str | None, dict[str, str], str]:
    return commit(), versions(), processor()


def merged(starts: Iterable[Provenance]) -> Provenance:
    """The record of several starts: "several" stands where they differ, and the date is the last.

    The versions of a package may be in some starts only.
    """
    each = [*starts]
    last = max(each, key=lambda start: start.date)
    values: dict[str, str] = {}
    for name, version in (pair for start in each for pair in start.versions.items()):
        values[name] = version if values.get(name, version) == version else SEVERAL
    return last | {
        "versions": values,
        **{name: _same([start[name] for start in each]) for name in _ONE},
        # A module may be imported late, so that not every start has seen it.
        "code": {name: sha for start in each for name, sha in start.code.items()},
    }


def changed_code(before: Provenance, now: Provenance) -> str:
    """The names of modules that two starts imported in different states; "" without any."""
    both = before.code.keys() & now.code.keys()
    return ", ".join(sorted(name for name in both if before.code[name] != now.code[name]))


def _same(values: Collection[str | None]) -> str | None:
    different = set(values)
    return SEVERAL if len(different) > 1 else different.pop()


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


def of_data(data: Dataset) -> str:
    """The digest of a data set: its arrays and all names."""
    names = (data.classes, data.domains, data.words, data.columns)
    splits = (data.test, data.user, data.original, data.valid, data.known)
    return fingerprint((data.x, data.y, data.domain, *splits), repr(names))


def of_files(*paths: str) -> str:
    """The SHA-256 of the files that flags name; "" without any."""
    sha = hashlib.sha256()
    files = [Path(path).expanduser() for path in paths]
    there = [path for name, path in zip(paths, files, strict=True) if name and path.is_file()]
    for path in there:
        with open(path, "rb") as file:
            sha.update(hashlib.file_digest(file, "sha256").digest())
    return sha.hexdigest() if there else ""


def fingerprint(tree: Tree, names: str = "") -> str:
    """The SHA-256 of a tree of arrays, with their paths, types, shapes and bits."""
    sha = hashlib.sha256(names.encode())
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        array = np.ascontiguousarray(leaf)
        sha.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape} ".encode())
        sha.update(array.reshape(-1).view(np.uint8).data)
    return sha.hexdigest()
