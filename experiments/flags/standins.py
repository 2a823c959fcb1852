"""Stand-ins for packages whose import takes seconds, for command lines that only ask for --help.

The text of --help comes from the definitions of flags and from docstrings. The modules that hold
them import JAX and others for their functions, of which --help calls none.
"""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

_PACKAGES = (
    *("chex", "flax", "jax", "jaxlib", "lime", "matplotlib", "optax", "orbax", "pandas"),
    *("PIL", "safetensors", "scipy", "sklearn"),
)
_HELP = {"help", "helpfull", "helpshort", "h", "?"}


def asks_for_help(argv: Sequence[str]) -> bool:
    """Whether a command line asks for --help."""
    words = (word.lstrip("-").partition("=")[0] for word in argv[1:] if word.startswith("-"))
    return any(word in _HELP for word in words)


def serve(argv: Sequence[str]) -> bool:
    """Whether stand-ins serve a command line: --describe, which may stand beside, needs more."""
    return asks_for_help(argv) and not any("describe" in word for word in argv)


def install() -> None:
    """Makes imports of the slow packages give stand-ins, in this whole process."""
    sys.meta_path.insert(0, _Finder())


class _StandIn(ModuleType):
    """A module, class, function or value of which nothing is used but its name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _StandIn(f"{self.__name__}.{name}")

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        # As a decorator it returns the function, whose docstring --help may need.
        is_decorator = len(arguments) == 1 and not named and hasattr(arguments[0], "__doc__")
        return arguments[0] if is_decorator and callable(arguments[0]) else self

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return ()

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def _same(self, *arguments: Any) -> Any:
        return self

    __getitem__ = __setitem__ = __or__ = __ror__ = __add__ = __mul__ = __truediv__ = __neg__ = _same
    __radd__ = __rmul__ = __rtruediv__ = __sub__ = __rsub__ = __pow__ = _same


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds stand-ins for the slow packages and all their modules."""

    def find_spec(
        self, fullname: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in _PACKAGES:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        del module
