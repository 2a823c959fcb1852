"""Federations as files: the examples of each client follow each other in NumPy files.

A folder holds

- `x.npy` [M, ...], or `x/NAME.npy` for each array of a tree of inputs, and `y.npy` [M, ...];
- `clients.npy` [C, 2] int64: each client's first row and number of rows;
- `meta.json`: task, classes, domains, the domain of each client, digest, numbers of clients and
  examples, and complete, which is true;
- `test`, a folder of the same files, if the source has a test split.

`write` makes such a folder in one pass, and holds a piece of a client in memory. It notes how far
it came in `progress.json`, and goes on from there if it was interrupted. `opened` maps the files
into memory, `load` makes a data set of them.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from fedjax_inv import checks
from fedjax_inv.checks import UsageError
from fedjax_inv.data.dataset import TASKS, Dataset
from fedjax_inv.types import Tree

META, PROGRESS = "meta.json", "progress.json"
_SECONDS = 5.0  # at most so long between two notes of the progress, but for a large client
_KINDS = {"b": "labels", "f": "values", "i": "classes", "u": "classes"}


class Piece(NamedTuple):
    """Examples of a client that follow each other."""

    x: Tree  # [n, ...] an array, or a dict of arrays; networks scale uint8 to [0, 1]
    y: np.ndarray  # [n] integers, [n, K] bool, or [n] or [n, K] floating
    domain: str = "all"  # of the client, the same for all of its pieces
    ends: bool = True  # whether it is the last piece of its client


class Opened(NamedTuple):
    """The files of a folder, mapped into memory."""

    x: Tree  # [M, ...]
    y: np.ndarray  # [M, ...]
    clients: np.ndarray  # [C, 2] int64
    meta: dict[str, Any]


# called with the number of clients that are written
Report = Callable[[int], None]
# first client -> the pieces from that client on, in an order that never changes
Source = Callable[[int], Iterator[Piece]]


def is_folder(path: Path) -> bool:
    """Return whether a path is a folder of these files, finished or not."""
    return any(os.path.isfile(path / name) for name in (META, PROGRESS))


def write(
    folder: Path,
    source: Source,
    *,
    name: str,
    classes: Sequence[str] | None = None,
    report: Report = lambda clients: None,
) -> dict[str, Any]:
    """Write a federation, or what is left of it.

    Args:
      folder: a new folder, or one in which `write` was interrupted; a finished one stays as it is.
      source: the pieces of all clients.
      name: a text that names the source and how it is read; to continue, it must be the same.
      classes: names of the classes; by default 0, 1, ... up to the largest label.
      report: called with the number of clients that are written, after each of them.

    Returns:
      The content of meta.json.

    Raises:
      UsageError: if the folder holds anything else, and for pieces that do not fit each other.
      OSError: if a file cannot be written.
    """
    checks.record("folder", folder, Path)
    checks.function("source", source)
    checks.record("name", name, str)
    if classes is not None and not all(isinstance(each, str) for each in classes):
        raise UsageError("classes", classes, "must be names, which are strings")
    if classes is not None and len(set(classes)) < len(classes):
        raise UsageError("classes", classes, "must be different names")
    about = {"name": name, "classes": None if classes is None else [*classes]}
    if (folder / META).is_file():
        meta = _meta(folder)
        if {key: meta["source"].get(key) for key in about} != about:
            raise UsageError("folder", str(folder), "holds other data, must be another folder")
        return meta
    progress = _progress(folder, about)
    with _Writer(folder, progress, about) as writer:
        last = time.monotonic()
        for piece in source(writer.done):
            writer.add(piece)
            if piece.ends:
                report(writer.done)
                if time.monotonic() - last > _SECONDS:
                    writer.note()
                    last = time.monotonic()
        return writer.finish()


def _progress(folder: Path, about: dict[str, Any]) -> dict[str, Any] | None:
    """Return the progress of an interrupted writer; None in a new folder."""
    path = folder / PROGRESS
    if not path.is_file():
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UsageError("folder", str(folder), "must be empty, or new")
        return None
    progress = _json(path, "delete the folder to begin anew")
    if progress.get("source") != about:
        raise UsageError(
            "folder",
            str(folder),
            "holds a part of other data, must be another folder; or delete it to begin anew",
        )
    return progress


def _json(path: Path, remedy: str) -> dict[str, Any]:
    try:
        record = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        record = None
    if not isinstance(record, dict):
        raise UsageError(str(path), ..., f"is damaged; {remedy}")
    return record


class _Rows:
    """An .npy file to which rows are appended."""

    def __init__(self, path: Path, dtype: np.dtype[Any], shape: tuple[int, ...], rows: int) -> None:
        self._header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False}
        self._shape, self.dtype, self.path = shape, dtype, path
        self.bytes_of_row = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: BinaryIO = path.open("r+b" if rows else "w+b")
        self._write_header(0)
        self._file.flush()
        end = self._file.tell() + rows * self.bytes_of_row
        if path.stat().st_size < end:
            text = "is shorter than it was; delete the folder to begin anew"
            raise UsageError(str(path), ..., text)
        self._file.truncate(end)  # rows after the last note are written again
        self._file.seek(end)

    def _write_header(self, rows: int) -> None:
        # The header leaves room for every number of rows.
        self._file.seek(0)
        header = {**self._header, "shape": (rows, *self._shape)}
        np.lib.format.write_array_header_1_0(self._file, header)

    def add(self, rows: np.ndarray) -> bytes:
        """Append rows, and return their bytes."""
        content = np.ascontiguousarray(rows, self.dtype).tobytes()
        self._file.write(content)
        return content

    def flush(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())

    def finish(self, rows: int) -> None:
        self._write_header(rows)
        self.flush()

    def close(self) -> None:
        self._file.close()


class _Writer:
    """The files of a folder that is being written."""

    def __init__(
        self, folder: Path, progress: dict[str, Any] | None, about: dict[str, Any]
    ) -> None:
        self._folder, self._about = folder, about
        self._files: dict[str, _Rows] = {}
        progress = progress or {"clients": 0, "rows": 0, "digest": "", "labels": 0, "domains": []}
        self.done, self._rows = progress["clients"], progress["rows"]
        self._digest, self._labels = progress["digest"], progress["labels"]
        self._domains: dict[str, int] = {name: i for i, name in enumerate(progress["domains"])}
        # Of the client that is being written.
        self._first = self._rows
        self._domain: str | None = None
        self._sums: dict[str, Any] = {}
        for name, (dtype, shape) in progress.get("files", {}).items():
            self._open(name, np.dtype(dtype), tuple(shape))
        self._clients = self._open("clients.npy", np.dtype(np.int64), (2,), self.done)
        self._domain_of = self._open("domain.npy", np.dtype(np.int32), (), self.done)

    def __enter__(self) -> "_Writer":
        self.note()
        return self

    def __exit__(self, *error: object) -> None:
        for file in (*self._files.values(), self._clients, self._domain_of):
            file.close()

    def _open(
        self, name: str, dtype: np.dtype[Any], shape: tuple[int, ...], rows: int | None = None
    ) -> _Rows:
        file = _Rows(self._folder / name, dtype, shape, self._rows if rows is None else rows)
        if rows is None:
            self._files[name] = file
        return file

    def add(self, piece: Piece) -> None:
        """Append a piece of the current client."""
        where = f"client {self.done}"
        checks.record(f"{where}: domain", piece.domain, str)
        arrays = _arrays(piece, where)
        # Of a piece without examples the types say nothing.
        has_rows = len(arrays["y.npy"]) > 0
        if not has_rows:
            arrays = {name: np.zeros((0, *f._shape), f.dtype) for name, f in self._files.items()}
        if not self._files:
            for name, array in arrays.items():
                self._open(name, array.dtype, array.shape[1:])
        for name, array in arrays.items():
            file = self._files.get(name)
            if file is None or (array.dtype, array.shape[1:]) != (file.dtype, file._shape):
                needed = "no such array" if file is None else f"{file.dtype} {file._shape}"
                found = f"{name} of {array.dtype} {array.shape[1:]}"
                raise UsageError(where, ..., f"has {found}, the clients before have {needed}")
        if len(arrays) < len(self._files):
            raise UsageError(where, ..., f"lacks one of {', '.join(self._files)}")
        if self._domain not in (None, piece.domain):
            raise UsageError(where, ..., f"is of the domains {self._domain} and {piece.domain}")
        self._domain = piece.domain
        if has_rows:
            self._check_labels(arrays["y.npy"], where)
        for name, array in arrays.items():
            content = self._files[name].add(array)
            self._sums.setdefault(name, hashlib.sha256()).update(content)
        self._rows += len(piece.y)
        if piece.ends:
            self._end()

    def _check_labels(self, y: np.ndarray, where: str) -> None:
        classes = self._about["classes"]
        if not len(y):
            return
        if y.dtype.kind != "i":
            columns = y.shape[1] if y.ndim > 1 else 1
            if classes is not None and len(classes) != columns:
                allowed = f"has {columns} columns in y, must have {len(classes)}, one for each name"
                raise UsageError(where, ..., f"{allowed} in classes")
            return
        self._labels = max(self._labels, int(y.max()) + 1)
        if y.min() < 0 or (classes is not None and self._labels > len(classes)):
            allowed = "at least 0" if classes is None else f"in 0..{len(classes) - 1}"
            raise UsageError(where, ..., f"has the label {y.min()} or {y.max()}, must be {allowed}")

    def _end(self) -> None:
        """Finish the current client."""
        assert self._domain is not None
        number = self._domains.setdefault(self._domain, len(self._domains))
        self._clients.add(np.array([[self._first, self._rows - self._first]]))
        self._domain_of.add(np.array([number]))
        sums = [self._sums[name].hexdigest() for name in sorted(self._sums)]
        self._digest = _chained(self._digest, self._rows - self._first, self._domain, sums)
        self.done += 1
        self._first, self._domain, self._sums = self._rows, None, {}

    def note(self) -> None:
        """Note the progress, when everything before is on the disk."""
        for file in (*self._files.values(), self._clients, self._domain_of):
            file.flush()
        files = {name: (file.dtype.str, file._shape) for name, file in self._files.items()}
        progress = {
            "source": self._about,
            "clients": self.done,
            "rows": self._rows,
            "digest": self._digest,
            "labels": self._labels,
            "domains": [*self._domains],
            "files": files,
        }
        _write_json(self._folder / PROGRESS, progress)

    def finish(self) -> dict[str, Any]:
        """Write the headers and meta.json, and return its content."""
        if self._domain is not None:
            raise UsageError(f"client {self.done}", ..., "must end, its last piece does not")
        if not self._rows:
            raise UsageError("source", ..., "must hold at least one example")
        y = self._files["y.npy"]
        task = _KINDS[y.dtype.kind]
        names = self._about["classes"]
        if names is None:
            columns = y._shape[0] if y._shape else 1
            count = self._labels if task == "classes" else columns
            names = ["target"] if task == "values" and count == 1 else [*map(str, range(count))]
        for file in self._files.values():
            file.finish(self._rows)
        for file in (self._clients, self._domain_of):
            file.finish(self.done)
        meta = {
            "task": task,
            "classes": names,
            "domains": [*self._domains],
            "domain": np.load(self._domain_of.path).tolist(),
            "clients": self.done,
            "examples": self._rows,
            "digest": self._digest,
            "source": self._about,
            "complete": True,
        }
        _write_json(self._folder / META, meta)
        self._domain_of.path.unlink()
        (self._folder / PROGRESS).unlink()
        return meta


def _write_json(path: Path, record: dict[str, Any]) -> None:
    """Write a file under another name first, so that nobody ever finds half of it."""
    partial = path.with_name(f"{path.name}.part")
    with partial.open("w") as file:
        json.dump(record, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def _arrays(piece: Piece, where: str) -> dict[str, np.ndarray]:
    """Return the arrays of a piece by their files, in the types that a `Dataset` has."""
    checks.record("piece", piece, Piece)
    y = np.asarray(piece.y)
    named = {"x.npy": piece.x}
    if isinstance(piece.x, dict):
        for name in piece.x:
            if not isinstance(name, str) or not name or name in (".", "..") or "/" in name:
                raise UsageError(where, ..., f"has the input {name!r}, must be the name of a file")
        named = {f"x/{name}.npy": leaf for name, leaf in piece.x.items()}
    arrays = {name: np.asarray(leaf) for name, leaf in named.items()}
    for name, array in {**arrays, "y.npy": y}.items():
        if array.dtype.kind not in "biuf" or array.shape[:1] != y.shape[:1] or y.ndim == 0:
            found = f"{name} of {array.dtype} {array.shape}"
            raise UsageError(where, ..., f"has {found}, must be numbers [n, ...], as many as y")
    axes = {"i": (1,), "u": (1,), "b": (2,), "f": (1, 2)}[y.dtype.kind]
    if y.ndim not in axes:
        allowed = "integer classes [n], bool labels [n, K], or floating values [n] or [n, K]"
        raise UsageError(where, ..., f"has y of {y.dtype} {y.shape}, must be {allowed}")
    arrays = {
        name: array if array.dtype == np.uint8 else _stored(where, name, array)
        for name, array in arrays.items()
    }
    return {**arrays, "y.npy": _stored(where, "y.npy", y)}


def _stored(where: str, name: str, array: np.ndarray) -> np.ndarray:
    """Return numbers in the type in which they are stored: bool, int32 or float32."""
    kinds = {"i": np.int32, "u": np.int32, "f": np.float32, "b": np.bool_}
    with np.errstate(over="ignore"):
        stored: np.ndarray = array.astype(kinds[array.dtype.kind])
    if array.dtype.kind in "iu" and not np.array_equal(stored, array):
        raise UsageError(where, ..., f"has {name} of {array.dtype}, must fit into 32 bits")
    if array.dtype.kind == "f" and not np.isfinite(stored).all():
        raise UsageError(where, ..., f"has {name} of {array.dtype}, must be finite in 32 bits")
    return stored


def _chained(before: str, size: int, domain: str, sums: Sequence[str]) -> str:
    """Return the SHA-256 of all clients up to this one, from that of those before it."""
    return hashlib.sha256(" ".join([before, str(size), domain, *sums]).encode()).hexdigest()


def opened(folder: Path) -> Opened:
    """Map the files of a folder into memory.

    Args:
      folder: a folder that `write` has finished.

    Returns:
      Its arrays, of which nothing is read yet, and the content of meta.json.

    Raises:
      UsageError: names a file that is missing, damaged or truncated.
    """
    checks.record("folder", folder, Path)
    meta = _meta(folder)
    tree = folder / "x"
    if tree.is_dir():
        x: Tree = {
            path.stem: _mapped(path, meta["examples"]) for path in sorted(tree.glob("*.npy"))
        }
    else:
        x = _mapped(folder / "x.npy", meta["examples"])
    y = _mapped(folder / "y.npy", meta["examples"])
    clients = np.array(_mapped(folder / "clients.npy", meta["clients"]))
    ends = np.cumsum(clients[:, 1]) if clients.ndim == 2 else clients
    fits = clients.shape == (meta["clients"], 2) and len(meta["domain"]) == meta["clients"]
    if not (fits and (clients >= 0).all() and (clients.sum(1) == ends).all()) or (
        ends[-1] != meta["examples"]
    ):
        raise _damaged(folder / "clients.npy")
    return Opened(x, y, clients, meta)


def _meta(folder: Path) -> dict[str, Any]:
    path = folder / META
    if not path.is_file() and (folder / PROGRESS).is_file():
        text = "is not complete; run the command that writes it again, and it goes on"
        raise UsageError("folder", str(folder), text)
    if not path.is_file():
        raise UsageError("folder", str(folder), f"must hold {META}")
    meta = _json(path, "write the folder anew")
    kinds = {
        **{"task": str, "classes": list, "domains": list, "domain": list, "clients": int},
        **{"examples": int, "digest": str, "source": dict},
    }
    fits = all(isinstance(meta.get(name), kind) for name, kind in kinds.items())
    if not fits or meta["task"] not in TASKS or meta.get("complete") is not True:
        raise _damaged(path)
    return meta


def _mapped(path: Path, rows: int) -> np.ndarray:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise UsageError(str(path), ..., "must be a file, there is none") from None
    except (OSError, ValueError, EOFError, SyntaxError):
        raise _damaged(path) from None
    if array.shape[:1] != (rows,):
        raise _damaged(path)
    return array


def _damaged(path: Path) -> UsageError:
    return UsageError(str(path), ..., "is damaged or truncated; write the folder anew")


def load(folder: Path) -> Dataset:
    """Return a folder as a data set.

    Args:
      folder: a folder that `write` has finished.

    Returns:
      A data set whose users are the clients; those of the folder `test` are its test split. Without
      a test split the examples are mapped into memory; they are read once, for the checksum.

    Raises:
      UsageError: names a file that is missing, damaged or truncated, or a folder whose content is
        not as it was written.
    """
    parts = [opened(folder)]
    if is_folder(folder / "test"):
        parts.append(opened(folder / "test"))
    for part, place in zip(parts, (folder, folder / "test"), strict=False):
        _check_digest(part, place)
    if any(part.meta[key] != parts[0].meta[key] for part in parts for key in ("task", "classes")):
        raise UsageError("folder", str(folder / "test"), "must have the classes of the other data")
    names = [*dict.fromkeys(name for part in parts for name in part.meta["domains"])]
    domain = [
        np.array([names.index(name) for name in part.meta["domains"]], np.int32)[
            np.repeat(part.meta["domain"], part.clients[:, 1])
        ]
        for part in parts
    ]
    sizes = np.concatenate([part.clients[:, 1] for part in parts])

    def joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
        return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)

    x: Tree = [part.x for part in parts]
    if isinstance(x[0], dict):
        x = {name: joined([each[name] for each in x]) for name in x[0]}
    else:
        x = joined(x)
    return Dataset(
        x,
        joined([part.y for part in parts]),
        tuple(parts[0].meta["classes"]),
        np.concatenate(domain),
        tuple(names),
        np.repeat([index > 0 for index in range(len(parts))], [len(part.y) for part in parts]),
        user=np.repeat(np.arange(len(sizes)), sizes).astype(np.int32),
    )


def _check_digest(part: Opened, folder: Path) -> None:
    """Raise UsageError unless the examples are those that were written."""
    files = {"y.npy": part.y}
    if isinstance(part.x, dict):
        files |= {f"x/{name}.npy": leaf for name, leaf in part.x.items()}
    else:
        files["x.npy"] = part.x
    digest = ""
    for (first, size), domain in zip(part.clients, part.meta["domain"], strict=True):
        rows = slice(first, first + size)
        sums = [
            hashlib.sha256(np.ascontiguousarray(files[name][rows]).data).hexdigest()
            for name in sorted(files)
        ]
        digest = _chained(digest, int(size), part.meta["domains"][domain], sums)
    if digest != part.meta["digest"]:
        text = "holds other examples than were written, its digest differs; write it anew"
        raise UsageError("folder", str(folder), text)
