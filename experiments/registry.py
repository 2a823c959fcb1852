"""Names that flags can take, and what they stand for; an unknown name is a one-line error."""

import importlib
import inspect
import types
import typing
from collections.abc import Callable, Collection
from typing import Any

import optax

from experiments.flag import check_known
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

# (rate, momentum), or (rate) of those that have no momentum.
OPTIMIZERS: dict[str, Callable[..., optax.GradientTransformation]] = {
    "sgd": lambda rate, momentum: optax.sgd(rate, momentum or None),
    "adam": lambda rate: optax.adam(rate),
}

# (rate, momentum) or (rate, epsilon); the betas of Reddi et al. 2021, Section 5.
SERVER_OPTIMIZERS: dict[str, Callable[..., optax.GradientTransformation]] = {
    "sgd": lambda rate, momentum: optax.sgd(rate, momentum or None),
    "adam": lambda rate, epsilon: optax.adam(rate, b1=0.9, b2=0.99, eps=epsilon),
    "yogi": lambda rate, epsilon: optax.yogi(rate, b1=0.9, b2=0.99, eps=epsilon),
}


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
