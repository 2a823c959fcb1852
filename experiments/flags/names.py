"""Names that flags can take, and what they stand for; an unknown name is a one-line error."""

import contextlib
import difflib
import importlib
import inspect
import types
import typing
from collections.abc import Callable, Collection
from typing import Any

from experiments.flags.flag import check_known
from fedjax_inv import algorithms, models
from fedjax_inv.checks import UsageError
from fedjax_inv.types import Algorithm, Facts, Model

MODELS: dict[str, Callable[..., Model]] = {
    "mlp": models.mlp,
    "cnn": models.cnn,
    "leaf_cnn": models.leaf_cnn,
    "alexnet": models.alexnet,
    "lenet": models.lenet,
    "resnet18": models.resnet18,
    "lstm": models.lstm,
}
# Those without a layer that an algorithm of normalisation layers could treat, unless --norm asks.
WITHOUT_NORM = ("mlp", "alexnet", "leaf_cnn", "lenet", "lstm")


def takes(function: Callable[..., Any], name: str) -> bool:
    """Whether a function has an argument of that name."""
    return name in inspect.signature(function).parameters


def imported(flag: str, name: str) -> Any:
    """What "package.module:attribute" names; raises UsageError, in one line, if there is none."""
    path, _, attribute = name.partition(":")
    if not all(part.isidentifier() for part in (*path.split("."), attribute)):
        raise UsageError(f"--{flag}={name}: must be package.module:function")
    try:
        return getattr(importlib.import_module(path), attribute)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"--{flag}={name}: cannot be imported ({error})") from None


def check_factory(flag: str, name: str, listed: Collection[str]) -> None:
    """Raises UsageError unless `name` is listed, or a function "package.module:function"."""
    if ":" not in name:
        check_known(flag, name, [*listed, "package.module:function"])
        return
    made = imported(flag, name)
    try:
        inspect.signature(made)
    except (TypeError, ValueError):  # what cannot be called, and what does not tell how
        raise UsageError(f"--{flag}={name}: must be a function") from None


def network(name: str) -> Callable[..., Model]:
    """A network's factory."""
    return imported("model", name) if ":" in name else MODELS[name]


def _module(name: str) -> str:
    """The module of an algorithm, listed or not."""
    return name.partition(":")[0] if ":" in name else f"{algorithms.__name__}.{name}"


def factory(name: str) -> Callable[..., Algorithm]:
    """An algorithm's factory: of a listed one, the function that has the name of its file."""
    return imported("algorithm", name if ":" in name else f"{_module(name)}:{name}")


def facts(name: str) -> Facts:
    """What stands beside an algorithm's factory."""
    return getattr(importlib.import_module(_module(name)), "FACTS", Facts())


def hyperparameters(name: str) -> dict[str, tuple[type, ...]]:
    """The keyword-only arguments of an algorithm's factory, and which types of text each takes.

    A function takes none; it is set in Python.
    """
    function = factory(name)
    try:
        hints = typing.get_type_hints(function)
    except (NameError, TypeError):  # names for type checkers only, or no plain function
        hints = {}
    return {
        p.name: _plain_types(hints.get(p.name, type(p.default)))
        for p in inspect.signature(function).parameters.values()
        if p.kind is p.KEYWORD_ONLY and p.name != "server_optimizer"  # which has its own flags
    }


def _plain_types(hint: Any) -> tuple[type, ...]:
    """Those of None, bool, int, float and str that a type hint allows."""
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    parts = typing.get_args(hint) if is_union else (hint,)
    return tuple(kind for kind in (type(None), bool, int, float, str) if kind in parts)


def parsed(flag: str, entry: str, text: str, kinds: Collection[type]) -> Any:
    """The value that `text` is, in the first of the types that it can be; who takes it checks it.

    Raises UsageError, as of --flag=entry, where it can be none of them.
    """
    if type(None) in kinds and text.lower() == "none":
        return None
    if bool in kinds and text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float, str):
        if kind in kinds:
            with contextlib.suppress(ValueError):
                return kind(text)
    if set(kinds) <= {type(None)}:
        told = "can be set in Python only, as it takes no number or text"
        raise UsageError(f"--{flag}={entry}: {told}")
    names = {type(None): "none", bool: "true or false", int: "a whole number", float: "a number"}
    raise UsageError(f"--{flag}={entry}: must be {' or '.join(names[kind] for kind in kinds)}")


def no_setting(whose: str, name: str, names: Collection[str]) -> str:
    """What is said of a setting that there is not. names: those that there are."""
    if not names:
        return f"{whose} takes no settings"
    near = difflib.get_close_matches(name, names, 1)
    hint = f"did you mean {near[0]}? All: " if near else "must be one of "
    return f"{whose} has no {name}; {hint}{', '.join(names)}"
