"""Sources for `on_disk.write`: LEAF's json, folders of images, TFDS, and functions.

Each reader holds a few hundred examples, or those of one client, in memory, and can start at any
client. A damaged file is named by the error.
"""

import importlib
import itertools
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np

from fedjax_inv import checks
from fedjax_inv.checks import UsageError
from fedjax_inv.data import leaf, sources
from fedjax_inv.data.on_disk import Piece, Source

FOLDERS = ("client", "domain", "domain/client")
_ROWS = 256  # the examples of a piece
_CHARACTERS = 1 << 20  # that are read from a file at a time


class Plan(NamedTuple):
    """A source and what is known of it before it is read."""

    source: Source
    classes: tuple[str, ...] | None = None
    clients: int | None = None  # None: unknown


def leaf_json(files: Sequence[Path]) -> Plan:
    """Return LEAF's FEMNIST, a client for each user.

    Args:
      files: json files of LEAF, as `leaf.files` finds them, all of one split.

    Raises:
      UsageError: while it is read, for a file in another format, or that is cut short.
    """
    if not files:
        raise UsageError("files", files, "must be a list of paths, at least one")
    checks.each("files", files, lambda name, file: checks.record(name, file, Path))

    def source(first: int) -> Iterator[Piece]:
        records = ((file, *each) for file in files for each in users(file))
        for file, user, record in itertools.islice(records, first, None):
            yield Piece(*leaf.arrays(file, user, record))

    return Plan(source, leaf.CLASSES)


def users(file: Path) -> Iterator[tuple[str, Any]]:
    """Read the users of a json file of LEAF one after the other.

    Args:
      file: a json file with the object user_data, a record for each user.

    Yields:
      (name, record) of a user; the rest of the file is not in memory.

    Raises:
      UsageError: if the file is in another format, or cut short.
    """
    checks.record("file", file, Path)
    if not file.is_file():  # reading a pipe would wait for its writer
        raise UsageError("found", str(file), "must be a file")
    last = ""
    try:
        with file.open(encoding="utf-8") as opened:
            text = _Text(opened)
            text.skip("{")
            for key in text.object_keys():
                if key != "user_data":
                    text.value()
                    continue
                text.skip("{")
                for last in text.object_keys():
                    yield last, text.value()
    except (OSError, ValueError, RecursionError):
        where = f" after user {last!r}" if last else ""
        text_of_error = f"must be LEAF's json; it is damaged or cut short{where}"
        raise UsageError("found", str(file), text_of_error) from None
    if not last:
        raise UsageError("found", str(file), "must be LEAF's json, with users in user_data")


class _Text:
    """A json text that is read piece by piece."""

    def __init__(self, file: TextIO) -> None:
        self._file, self._text, self._decoder = file, "", json.JSONDecoder()

    def _more(self) -> bool:
        # As much again as is there, so that a long value is decoded a few times only.
        added = self._file.read(max(_CHARACTERS, len(self._text)))
        self._text += added
        return bool(added)

    def _next(self) -> str:
        """The next character that is no space."""
        while not (text := self._text.lstrip()):
            if not self._more():
                raise ValueError("the text ends")
        self._text = text
        return text[0]

    def skip(self, expected: str) -> None:
        if self._next() != expected:
            raise ValueError(f"{expected} is missing")
        self._text = self._text[1:]

    def object_keys(self) -> Iterator[str]:
        """The keys of an object; its values must be read in between."""
        if self._next() == "}":
            self.skip("}")
            return
        while True:
            key = self.value()
            if not isinstance(key, str):
                raise ValueError("a key is no text")
            self.skip(":")
            yield key
            if self._next() == "}":
                self.skip("}")
                return
            self.skip(",")

    def value(self) -> Any:
        """The next value."""
        self._next()
        while True:
            try:
                found, end = self._decoder.raw_decode(self._text)
                if end < len(self._text) or not self._more():  # a number could go on
                    self._text = self._text[end:]
                    return found
            except json.JSONDecodeError:
                if not self._more():
                    raise


def images(
    root: Path, *, folders: str = "client", image_size: int | None = None, channels: int = 0
) -> Plan:
    """Return a folder of images.

    Args:
      root: the folder.
      folders: what the folders in it are: "client" (client/class/file), "domain"
        (domain/class/file, each domain a client of its own), or "domain/client"
        (domain/client/class/file).
      image_size: the height and width in pixels to which images are resized; by default all must
        have the size of the first.
      channels: 1 for grey, 3 for RGB; 0: as the first image.

    Raises:
      UsageError: if there are no images; and while it is read, for one that cannot be decoded.
    """
    checks.record("root", root, Path)
    checks.one_of("folders", folders, FOLDERS)
    if image_size is not None:
        checks.integer("image_size", image_size, 1, meaning=" pixel")
    if channels not in (0, 1, 3):
        raise UsageError("channels", channels, "must be 0, 1 or 3")
    tops = [path for path in _folders(root)]
    clients = [(top.name, top) for top in tops]
    if folders == "domain/client":
        clients = [(top.name, client) for top in tops for client in _folders(top)]
    clients = [each for each in clients if any(map(_files, _folders(each[1])))]
    if not clients:
        needed = f"must hold images in folders {folders}/class, there are none"
        raise UsageError("root", str(root), needed)
    names = tuple(sorted({label.name for _, client in clients for label in _folders(client)}))
    number = {name: index for index, name in enumerate(names)}
    first = next(file for label in _folders(clients[0][1]) for file in _files(label))
    with sources.image(first) as image:
        size = image.size if image_size is None else (image_size, image_size)
        mode = {1: "L", 3: "RGB"}.get(channels, "L" if image.mode in ("1", "L") else "RGB")

    def pixels(file: Path) -> np.ndarray:
        with sources.image(file) as image:
            sources.check_mode(file, image.mode)
            if image_size is None and image.size != size:
                text = f"is of {image.size} pixels, the first image of {size}; set image_size"
                raise UsageError(str(file), ..., text)
            if channels == 0 and mode == "L" and image.mode not in ("1", "L"):
                text = "is in colour, the first image is grey; set channels"
                raise UsageError(str(file), ..., text)
            return sources.resized(image.convert(mode), size).reshape(*size[::-1], len(mode))

    def source(first: int) -> Iterator[Piece]:
        for domain, client in clients[first:]:
            files = [(number[label.name], f) for label in _folders(client) for f in _files(label)]
            for start in range(0, len(files), _ROWS):
                part = files[start : start + _ROWS]
                x = np.stack([pixels(file) for _, file in part])
                y = np.array([label for label, _ in part])
                name = "all" if folders == "client" else domain
                yield Piece(x, y, name, start + _ROWS >= len(files))

    return Plan(source, names, len(clients))


def _folders(path: Path) -> list[Path]:
    return [each for each in sources.visible(path) if each.is_dir()]


def _files(path: Path) -> list[Path]:
    return [each for each in sources.visible(path) if not each.is_dir()]


def tfds(name: str, user: str, *, data_dir: str | None = None, split: str = "train") -> Plan:
    """Return a data set of TFDS with a feature that says whose example it is.

    The users of all examples are read first, without their images.

    Args:
      name: a prepared data set with the features image and label.
      user: the feature that names the user: texts, integers or classes.
      data_dir: the folder of TFDS, as in `sources.load`.
      split: the split to read.

    Raises:
      UsageError: if there is no such data set, feature or split.
    """
    for argument, value in (("name", name), ("user", user), ("split", split)):
        checks.record(argument, value, str)
    decoded, without_images, classes = sources.tfds_rows(name, user, data_dir, split)
    of_rows = np.array([str(example[user]) for example in without_images])
    order = np.argsort(of_rows, kind="stable")
    starts = np.flatnonzero(np.append(True, of_rows[order][1:] != of_rows[order][:-1]))
    parts = np.split(order, starts[1:])

    def source(first: int) -> Iterator[Piece]:
        for rows in parts[first:]:
            for start in range(0, len(rows), _ROWS):
                part = [decoded[int(row)] for row in rows[start : start + _ROWS]]
                x = np.stack([example["image"] for example in part])
                y = np.array([example["label"] for example in part])
                yield Piece(x, y, ends=start + _ROWS >= len(rows))

    return Plan(source, classes, len(parts))


def function(name: str) -> Plan:
    """Return the clients that a function yields.

    Args:
      name: package.module:function. It is called with a number, and yields (x, y), or
        (x, y, name of the domain), of each client from this one on.

    Raises:
      UsageError: if there is no such function; and while it runs, for what it yields.
    """
    checks.record("name", name, str)
    module, _, attribute = name.partition(":")
    try:
        made = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError("name", name, f"cannot be imported: {error}") from None
    if not callable(made):
        raise UsageError("name", name, "must be a function")

    def source(first: int) -> Iterator[Piece]:
        for number, each in enumerate(made(first), first):
            if not isinstance(each, tuple) or len(each) not in (2, 3):
                text = f"must yield (x, y) or (x, y, domain), for client {number} it does not"
                raise UsageError("name", name, text)
            yield Piece(*each)

    return Plan(source)


def is_function(name: str) -> bool:
    """Return whether a name is that of a function, package.module:function."""
    module, colon, attribute = name.partition(":")
    is_name = attribute.isidentifier() and all(part.isidentifier() for part in module.split("."))
    return bool(colon) and is_name and not os.path.exists(name)
