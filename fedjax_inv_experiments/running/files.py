"""The only functions in this package that write files; they follow no link below a run folder.

A run folder may come from somebody else, and a link in it would lead a write to a file elsewhere.
- A file is written under a new name and then renamed. So it appears as a whole or not at all, and
  it replaces a link instead of following it; the file that the link named stays as it is.
- A file that is changed in place, and a folder, must not be a link. UsageError names the link.

The folder that the user names may be a link, and so may the folders above it. Links that another
process puts there while a binary writes are not found in every case.
"""

import contextlib
import errno
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import msgspec

from fedjax_inv.checks import UsageError
from fedjax_inv_experiments.parts import machine


def check_no_link(path: Path, below: Path) -> None:
    """Raises UsageError if `path`, or a folder between it and `below`, is a link.

    below: the folder that the user named, which may be a link itself; `path` lies in it.
    """
    place = below
    for name in path.relative_to(below).parts:
        place /= name
        if os.path.islink(place):  # false for impossible names
            raise _is_link(place)


def check_no_links_in(folder: Path) -> None:
    """Raises UsageError if a folder is a link, or if one lies in it at any depth."""
    check_no_link(folder, folder.parent)
    for place, folders, names in os.walk(folder):
        for name in (*folders, *names):
            check_no_link(Path(place, name), Path(place))


def check_readable(folder: Path) -> None:
    """Raises UsageError if anything in a folder but files and folders, such as a pipe, lies there.

    A pipe would be read forever.
    """
    for place, _, names in os.walk(folder):
        for path in (Path(place, name) for name in names):
            if path.exists() and not (path.is_file() or path.is_dir()):
                raise UsageError(str(path), ..., "is no file; delete it")


def _is_link(path: Path) -> UsageError:
    text = f"is a link to {os.readlink(path)}, which is not followed; delete the link"
    return UsageError(str(path), ..., text)


def make_folder(folder: Path, below: Path | None = None) -> None:
    """Makes a folder and those above it, unless they exist.

    below: the folder that the user named, if it is not `folder` itself. Raises UsageError for a
    link below it.
    """
    if below is not None:
        check_no_link(folder, below)
    folder.mkdir(parents=True, exist_ok=True)


def remove_folder(folder: Path) -> None:
    """Removes a folder if it exists. Raises UsageError for a link."""
    check_no_link(folder, folder.parent)
    shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A new file that replaces `path` at the end of the `with` block; after an error it is removed.

    The folder of `path` must exist.
    """
    temporary = path.with_name(f".{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb", opener=_without_links) as file:
            yield file
            flush(file)
        os.replace(temporary, path)
    except OSError as error:
        if error.errno is None or error.filename not in (None, str(temporary)):
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        temporary.unlink(missing_ok=True)


def write(path: Path, text: str) -> None:
    """Writes a file as a whole or not at all; only the leading process writes."""
    if machine.leads():
        with replacing(path) as file:
            file.write(text.encode())


def remove(path: Path) -> None:
    """Removes a file, or a link, if it exists; only the leading process does."""
    if machine.leads():
        path.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Writes a json file as a whole or not at all; only the leading process writes."""
    text = json.dumps(value, default=msgspec.to_builtins)
    try:
        text = msgspec.json.format(text, indent=1)  # json takes four times as long to indent
    except msgspec.DecodeError:  # of a NaN, which json alone knows
        text = json.dumps(value, default=msgspec.to_builtins, indent=1)
    write(path, text + "\n")


def opened(path: Path, mode: str) -> IO[Any]:
    """A file that is changed in place. Raises UsageError for a link, and for what is no file."""
    if path.exists() and not path.is_file() and not path.is_symlink():  # a pipe would wait forever
        raise UsageError(str(path), ..., "is no file; delete it")
    try:
        return open(path, mode, opener=_without_links)
    except OSError as error:
        if error.errno == errno.ELOOP and path.is_symlink():
            raise _is_link(path) from None
        raise


def unnamed(folder: Path, like: Path | None) -> IO[bytes]:
    """A new file in a folder, without a name; it is gone when it is closed or its process dies.

    like: a file whose content it has; None: it is empty.
    """
    path = folder / f".{secrets.token_hex(8)}.tmp"
    file = opened(path, "x+b")
    path.unlink()
    if like is not None:
        with opened(like, "rb") as source:
            shutil.copyfileobj(source, file)
        file.flush()
    return file


def _without_links(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def flush(file: IO[Any]) -> None:
    """Waits until a file is on the disk, where it survives a crash of the machine."""
    file.flush()
    os.fsync(file.fileno())
