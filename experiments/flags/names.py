"""Networks and algorithms by the names that flags take; an unknown name is a one-line error."""

import difflib
import importlib
import inspect
import sys
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

from flax import nnx

from fedjax_inv import algorithms, models
from fedjax_inv.checks import UsageError
from fedjax_inv.types import Algorithm, Facts, Model

from ..flags.flag import (
    LOST,
    check_known,
    flag_error,
    in_flags,
    is_lost,
    value_in,
)
from ..flags.outside import imported, is_factory, is_outside

T = TypeVar("T")

MODELS: dict[str, Callable[..., Model]] = {
    "mlp": models.mlp,
    "cnn": models.cnn,
    "leaf_cnn": models.leaf_cnn,
    "alexnet": models.alexnet,
    "lenet": models.lenet,
    "resnet18": models.resnet18,
    "resnet50": models.resnet50,
    "lstm": models.lstm,
}
# Networks that have no normalisation layers unless --norm asks for them.
WITHOUT_NORM = ("mlp", "alexnet", "leaf_cnn", "lenet", "lstm")


def signature(function: Callable[..., Any]) -> inspect.Signature:
    """The arguments of a function, or of a class; flax.nnx hides those of its modules."""
    if isinstance(function, type) and issubclass(function, nnx.Module):
        of_class = inspect.signature(function.__init__)
        return of_class.replace(parameters=[*of_class.parameters.values()][1:])
    return inspect.signature(function)


def takes(function: Callable[..., Any], name: str) -> bool:
    """Whether a function has an argument of that name."""
    return name in signature(function).parameters


def check_factory(flag: str, name: str, listed: Collection[str]) -> None:
    """Raises UsageError unless `name` is listed, or names a function "package.module:function"."""
    if not is_outside(name):
        module, _, function = name.rpartition(".")
        if is_factory(f"{module}:{function}") and function != "py":
            raise flag_error(flag, name, f"unknown; did you mean {module}:{function}?")
        check_known(flag, name, [*listed, "package.module:function"])
        return
    function = imported(flag, name)
    if isinstance(function, type) and flag in ("algorithm", "describe"):
        raise flag_error(flag, name, "must be a function that returns an Algorithm, not a class")
    try:
        inspect.signature(function)
    except (TypeError, ValueError):  # not callable, or without a signature
        raise flag_error(flag, name, "must be a function") from None


def called(
    flag: str,
    name: str,
    names: Mapping[str, str],
    kind: type[T],
    factory: Callable[..., Any],
    *arguments: Any,
    **settings: Any,
) -> T:
    """The result of a factory, which may come from outside of this repository.

    flag, name: the flag that names the factory, without dashes, and its value.
    names: the flag of each argument (`flag.in_flags`).
    kind: the type that the factory must return.

    Raises UsageError if the factory takes other arguments, refuses them, or returns another type.
    """
    try:
        inspect.signature(factory).bind(*arguments, **settings)
    except TypeError as error:
        raise flag_error(flag, name, f"takes other arguments ({error})") from None
    # A foreign function may raise any ValueError; ours refuse arguments by UsageError alone.
    refusal = ValueError if is_outside(name) else UsageError
    try:
        result = factory(*arguments, **settings)
    except refusal as error:
        raise in_flags(error, f"--{flag}={name}", names) from None
    if not isinstance(result, kind):
        text = f"returns {type(result).__name__}, must return {kind.__name__}"
        raise flag_error(flag, name, text)
    return result


def network_of(factory: Callable[..., Any]) -> Callable[..., Any]:
    """The factory of a Model, from one that may return a flax.nnx module instead.

    If that one takes rngs, each seed draws its own initial network; otherwise the values of the
    module are the initial network.
    """
    draws = takes(factory, "rngs")

    def made(*arguments: Any, **settings: Any) -> Any:
        def build(rngs: nnx.Rngs) -> Any:
            return factory(*arguments, **settings, **({"rngs": rngs} if draws else {}))

        first = build(nnx.Rngs(0))
        if not isinstance(first, nnx.Module):
            return first
        return models.from_nnx(build if draws else first)

    own = signature(factory)
    others = [p for p in own.parameters.values() if p.name != "rngs"]
    vars(made)["__signature__"] = own.replace(parameters=others)
    return made


def network(name: str) -> Callable[..., Model]:
    """A network's factory."""
    return network_of(imported("model", name)) if is_outside(name) else MODELS[name]


def factory(name: str) -> Callable[..., Algorithm]:
    """An algorithm's factory; a listed algorithm's factory has the name of its file."""
    if is_outside(name):
        return imported("algorithm", name)
    return getattr(_listed(name), name)


def _listed(name: str) -> types.ModuleType:
    """The module of a listed algorithm."""
    return importlib.import_module(f"{algorithms.__name__}.{name}")


def facts(name: str) -> Facts:
    """The constant FACTS of an algorithm's module, or the defaults without one.

    Raises UsageError if FACTS is something else.
    """
    if not is_outside(name):
        return getattr(_listed(name), "FACTS", Facts())
    module, _, _ = name.partition(":")
    imported("algorithm", name)
    found = getattr(sys.modules[module], "FACTS", Facts())
    if not isinstance(found, Facts):
        text = f"FACTS of its module is {type(found).__name__}, must be Facts"
        raise flag_error("algorithm", name, text)
    return found


def hyperparameters(name: str) -> dict[str, tuple[type, ...]]:
    """The keyword-only arguments of an algorithm's factory, each with the types that it takes.

    Only types that a text can have are listed: an argument that takes a function has none.
    """
    function = factory(name)
    try:
        hints = typing.get_type_hints(function)
    except (NameError, TypeError):  # hints for type checkers only, or not a plain function
        hints = {}
    return {
        p.name: _plain_types(hints.get(p.name, _usual(p.default)))
        for p in inspect.signature(function).parameters.values()
        if p.kind is p.KEYWORD_ONLY and p.name != "server_optimizer"  # it has its own flags
    }


def _usual(default: Any) -> Any:
    """The type of a setting without a hint; without a default it is any that a text can have."""
    return bool | int | float | str if default is inspect.Parameter.empty else type(default)


def _plain_types(hint: Any) -> tuple[type, ...]:
    """The types among None, bool, int, float and str that a type hint allows."""
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    parts = typing.get_args(hint) if is_union else (hint,)
    return tuple(kind for kind in (type(None), bool, int, float, str) if kind in parts)


def parsed(flag: str, entry: str, text: str, kinds: Collection[type]) -> Any:
    """The value of a text, in the first of `kinds` that fits; raises UsageError if none fits.

    flag, entry: the flag that contains the text, and its value, for the message.
    """
    if type(None) in kinds and text.lower() == "none":
        return None
    if bool in kinds and text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float, str):
        if kind in kinds:
            try:
                value = value_in(text, kind)
            except ValueError:
                continue
            if is_lost(value):
                raise flag_error(flag, entry, LOST)
            return value
    if set(kinds) <= {type(None)}:
        raise flag_error(flag, entry, "can be set in Python only, as it takes no number or text")
    names = {type(None): "none", bool: "true or false", int: "a whole number", float: "a number"}
    raise flag_error(flag, entry, f"must be {' or '.join(names[kind] for kind in kinds)}")


def unknown_setting(owners: Sequence[str], name: str, names: Collection[str]) -> str:
    """The message for a setting that no owner has. names: the settings of all of them."""
    no = "no " if len(owners) == 1 else ""
    if len(owners) > 2:
        who = f"none of {', '.join(owners)}"
    else:
        who = owners[0] if no else "neither {} nor {}".format(*owners)
    if not names:
        return f"{who} takes {no}settings"
    near = difflib.get_close_matches(name, names, 1)
    hint = f"did you mean {near[0]}? All: " if near else "must be one of "
    return f"{who} has {no}{name}; {hint}{', '.join(names)}"
