"""Code outside of this project, "package.module:function", that a command line names.

An import runs the module, so only the command line may name it: a run folder that was trained with
such code names it in text, and the command that reads the folder names it again.
"""

import dataclasses
import hashlib
import importlib
import os
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from fedjax_inv.checks import UsageError

from ..flags.flag import Range, flag, flag_error

FLAGS = ("algorithm", "model", "loss", "score")  # that may name such code


def is_outside(name: str) -> bool:
    """Whether the name, as of an algorithm or a loss, is a function outside of this project."""
    return ":" in name


def is_factory(name: str) -> bool:
    """Whether the name has the form package.module:function."""
    path, _, attribute = name.partition(":")
    return all(part.isidentifier() for part in (*path.split("."), attribute))


def _own(what: str) -> Any:
    text = f"The {what} of one's own with which the runs were trained, package.module:function."
    return flag((), text, Range(is_factory, "package.module:function"), kind=str)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Named:
    """The flags by which a command that reads runs names the code of their training."""

    algorithm: tuple[str, ...] = _own("algorithms")
    model: tuple[str, ...] = _own("networks")
    loss: tuple[str, ...] = _own("losses")
    score: tuple[str, ...] = _own("scores")

    @property
    def outside(self) -> tuple[str, ...]:
        """All of them."""
        return (*self.algorithm, *self.model, *self.loss, *self.score)


def check_named(recorded: Mapping[str, Any], named: Collection[str]) -> None:
    """Raises UsageError for code that a run folder names and the command does not.

    recorded: the flags in the folder. named: the names on the command line.
    """
    lacking = []
    for name in FLAGS:
        value = recorded.get(name, ())
        texts = value if isinstance(value, list | tuple) else [value]
        own = [text for text in map(str, texts) if is_outside(text)]
        if not set(own) <= set(named):
            lacking.append(f"--{name}={','.join(own)}")
    if lacking:
        text = " ".join(lacking)
        raise UsageError(f"was trained with {text}, code that this command must name; add {text}")


def imported(flag_name: str, name: str) -> Any:
    """The attribute that "package.module:attribute" names; raises UsageError if there is none."""
    path, _, attribute = name.partition(":")
    if not is_factory(name):
        raise flag_error(flag_name, name, "must be package.module:function")
    _add_current_folder()
    try:
        return getattr(importlib.import_module(path), attribute)
    except (ImportError, AttributeError) as error:
        text = f"cannot be imported ({error})"
        if path.endswith(".py"):
            text += f"; did you mean {path.removesuffix('.py')}:{attribute}?"
        raise flag_error(flag_name, name, text) from None


def _add_current_folder() -> None:
    """Lets modules of the current folder be imported, after all others: none there replaces one.

    `python -m` does so, before all others, at its start; `python -P` asks for neither.
    """
    folder = os.getcwd()
    if not sys.flags.safe_path and folder not in sys.path:
        sys.path.append(folder)


def digest(names: Collection[str]) -> str:
    """The SHA-256 of the files of the modules that hold these factories; "" without a factory."""
    if not names:
        return ""
    sha = hashlib.sha256()
    for path in sorted({name.partition(":")[0] for name in names}):
        file = getattr(importlib.import_module(path), "__file__", None)
        sha.update(path.encode())
        sha.update(Path(file).read_bytes() if file else b"")
    return sha.hexdigest()
