"""Code outside of this project, "package.module:function": who may name it, and the import.

An import runs the module. So a factory that a run folder names is refused unless the command names
it, too, and a module whose file lies in a run folder is never imported.
"""

import contextlib
import hashlib
import importlib
import os
import sys
import traceback
from collections.abc import Collection, Iterator, Mapping
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from fedjax_inv.checks import UsageError, one_line
from fedjax_inv_experiments.flags.flag import Range, flag, flag_error


class _Run(msgspec.Struct):
    """The part of config.json by which the folder of a run is known."""

    flags: msgspec.Raw
    cell: msgspec.Raw


class _Sweep(msgspec.Struct):
    """The part of result.json by which the folder of a sweep is known."""

    cells: msgspec.Raw


class Untrusted(NamedTuple):
    """A factory that a run folder names and the command does not."""

    flag: str  # that the folder sets to it, without dashes
    name: str

    @property
    def what(self) -> str:
        """The text that names it."""
        return f"--{self.flag}={self.name}, which is not this project's code"


def is_outside(name: str) -> bool:
    """Whether the name, as of an algorithm or a loss, is a function outside of this project."""
    return ":" in name


def is_factory(name: str) -> bool:
    """Whether the name has the form package.module:function."""
    path, _, attribute = name.partition(":")
    return all(part.isidentifier() for part in (*path.split("."), attribute))


def trust_flag() -> Any:
    """The flag --trust_code of all binaries that read run folders."""
    return flag(
        (),
        "Factories package.module:function outside of this project that may be imported where a "
        "run folder names them. An import runs the module. Those that the command's own "
        "flags name need no mention; a module inside of a run folder is never imported.",
        Range(is_factory, "package.module:function"),
        kind=str,
    )


def untrusted(
    named: Mapping[str, Collection[str]], trusted: Collection[str]
) -> dict[str, Untrusted]:
    """The factories among `named` that are not in `trusted`, by name. Imports nothing.

    named: by flag, the algorithms, networks, losses and scores that a run folder names.

    Raises UsageError for a name that is no factory's, or whose module lies in a run folder.
    """
    found = {}
    for flag_name, names in named.items():
        for name in filter(is_outside, names):
            _check_place(flag_name, name)
            if name not in trusted:
                found[name] = Untrusted(flag_name, name)
    return found


def remedy(found: Collection[str], trusted: Collection[str] = ()) -> str:
    """The text that says how to trust factories. trusted: those that the command names already."""
    what = "run it, if you trust it" if len(found) == 1 else "run them, if you trust them"
    every = ",".join(dict.fromkeys([*sorted(trusted), *found]))
    return f"add --trust_code={every} to import and {what}"


def imported(flag_name: str, name: str) -> Any:
    """The attribute that "package.module:attribute" names.

    Raises UsageError if there is none, or if the module lies in a run folder.
    """
    _check_place(flag_name, name)
    path, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(path), attribute)
    except (ImportError, AttributeError) as error:
        text = f"cannot be imported ({error})"
        if path.endswith(".py"):
            text += f"; did you mean {path.removesuffix('.py')}:{attribute}?"
        raise flag_error(flag_name, name, text) from None


@contextlib.contextmanager
def in_module(flag_name: str, name: str) -> Iterator[None]:
    """Makes an error in the module that a flag names a UsageError with the place and the message.

    Others stay as they are: they are defects of this project, which need their tracebacks.
    """
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        module = name.partition(":")[0]
        places = [
            f"{Path(frame.f_code.co_filename).name}:{line}"
            for frame, line in traceback.walk_tb(error.__traceback__)
            if is_outside(name) and frame.f_globals.get("__name__") == module
        ]
        if not places:
            raise
        raise flag_error(flag_name, name, f"{places[-1]}: {one_line(error)}") from None


def digest(name: str) -> str | None:
    """The SHA-256 of the file of a factory's module; None if it has no file. Imports nothing."""
    path = name.partition(":")[0]
    for spec in _specs(path):
        if spec.name == path and spec.origin and spec.has_location:
            # A loader also reads from zip archives.
            read = getattr(spec.loader, "get_data", None)
            try:
                data = read(spec.origin) if read else Path(spec.origin).read_bytes()
            except OSError:
                return None
            return hashlib.sha256(data).hexdigest()
    return None


def _check_place(flag_name: str, name: str) -> None:
    """Raises UsageError for a name that is no factory's, or whose module lies in a run folder."""
    if not is_factory(name):
        raise flag_error(flag_name, name, "must be package.module:function")
    for spec in _specs(name.partition(":")[0]):
        if spec.origin and spec.has_location:
            folder = run_folder(Path(spec.origin))
            if folder is not None:
                text = f"its file {spec.origin} lies in the run folder {folder}, from which no "
                raise flag_error(flag_name, name, f"{text}code is imported; must lie elsewhere")


def run_folder(file: Path) -> Path | None:
    """The folder of a run or a sweep in which a file lies, by its path or behind links, or None."""
    path = Path(os.path.abspath(file))
    # A link may lead into a run folder, and another one out of it.
    places = {part.resolve() / path.relative_to(part) for part in (path, *path.parents)}
    for place in places:
        for folder in place.parents:
            if _holds(folder / "config.json", _Run) or _holds(folder / "result.json", _Sweep):
                return folder
    return None


def _holds(path: Path, kind: type) -> bool:
    try:
        if not path.is_file():  # a pipe would be read forever
            return False
        msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, ValueError, RecursionError):
        return False
    return True


def _specs(path: str) -> Iterator[ModuleSpec]:
    """Where Python finds the parents of a module, and then the module. Imports nothing.

    `importlib.util.find_spec` would import the parents.
    """
    _add_current_folder()
    places: list[str] | None = None
    name = ""
    for part in path.split("."):
        name = f"{name}.{part}" if name else part
        try:
            spec = _spec(name, places)
        except KeyError:  # a namespace package, which asks for its parent, which is not imported
            spec = ModuleSpec(name, None, is_package=True)
        if spec is None:
            return
        yield spec
        if name in sys.modules:  # a package may have added folders
            inner = getattr(sys.modules[name], "__path__", None)
        elif spec.loader is None:  # a namespace package
            inner = [os.path.join(place, part) for place in places or sys.path]
        else:
            inner = spec.submodule_search_locations
        if inner is None:
            return
        places = [*inner]


def _add_current_folder() -> None:
    """Lets modules of the current folder be imported, after all others: none there replaces one.

    `python -m` does so, before all others, at its start; `python -P` asks for neither.
    """
    folder = os.getcwd()
    if not sys.flags.safe_path and folder not in sys.path:
        sys.path.append(folder)


def _spec(name: str, places: Any) -> ModuleSpec | None:
    """Where Python finds a module. places: the folders of its parent, None without a parent."""
    finders = (getattr(finder, "find_spec", None) for finder in sys.meta_path)
    specs = (find(name, places) for find in finders if find is not None)
    return next((spec for spec in specs if spec is not None), None)


def check_trusted(named: Mapping[str, Collection[str]], trusted: Collection[str]) -> None:
    """Raises UsageError for factories that a run folder names and the command does not.

    named, trusted: as in `untrusted`.
    """
    found = untrusted(named, trusted)
    if found:
        texts = " and ".join(each.what for each in found.values())
        raise UsageError(f"names {texts}; {remedy(found, trusted)}")
