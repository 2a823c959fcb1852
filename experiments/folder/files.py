"""Files that appear as a whole or not at all: written under another name, then renamed."""

import contextlib
import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import msgspec

from ..assembly import machine


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A new file that replaces `path` at the end of the `with` block; after an error it is removed.

    The folder of `path` must exist.
    """
    temporary = path.with_name(f".{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        if error.errno is None or error.filename not in (None, str(temporary)):
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        temporary.unlink(missing_ok=True)


def write(path: Path, text: str) -> None:
    """Writes a file; only the leading process writes."""
    if machine.leads():
        with replacing(path) as file:
            file.write(text.encode())


def remove(path: Path) -> None:
    """Removes a file if it exists; only the leading process does."""
    if machine.leads():
        path.unlink(missing_ok=True)


def remove_leftovers(folder: Path) -> None:
    """Removes the unfinished files of processes that were killed in a folder."""
    if machine.leads():
        for path in folder.glob(f".{'[0-9a-f]' * 16}.tmp"):
            path.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Writes a json file; only the leading process writes."""
    text = json.dumps(value, default=msgspec.to_builtins)
    try:
        text = msgspec.json.format(text, indent=1)  # json takes four times as long to indent
    except msgspec.DecodeError:  # of a NaN, which json alone knows
        text = json.dumps(value, default=msgspec.to_builtins, indent=1)
    write(path, text + "\n")
