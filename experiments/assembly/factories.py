"""Algorithms and networks by the names that flags take, also code outside of this project.

An import of "package.module:function" runs the module, so only the command line may name it: a run
folder that was trained with such code names it in text, and the command that reads the folder names
it again.
"""

import hashlib
import importlib
import inspect
import os
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

import docstring_parser

import fedjax_inv
from fedjax_inv import algorithms, averaging, models
from fedjax_inv.checks import UsageError
from fedjax_inv.types import Algorithm, Facts, Model

from ..config import HEADS
from ..errors import check_known, flag_error, in_flags, shown

T = TypeVar("T")
# Networks that have no normalisation layers unless --norm asks for them.
WITHOUT_NORM = ("mlp", *HEADS, "alexnet", "leaf_cnn", "lenet", "lstm")
# What a text may be, by its type.
_WORDS = {type(None): "none", bool: "true/false", int: "whole number", float: "number", str: "text"}
_INDENTED: Any = {"initial_indent": "    ", "subsequent_indent": "    "}
_OUTSIDE = ("algorithm", "model", "loss", "score")  # the flags that may name code outside
# The packages of this library, and of Python and what is installed for it.
_LIBRARY = (Path(fedjax_inv.__file__).parent, Path(__file__).parents[1])
_INSTALLED = (*_LIBRARY, Path(sys.prefix), Path(sys.base_prefix))
_digests: dict[str, str] = {}  # of modules whose file has been read, by their names


def is_outside(name: str) -> bool:
    """Whether the name, as of an algorithm or a loss, is a function outside of this project."""
    return ":" in name


def imported(flag: str, name: str) -> Any:
    """The attribute that "package.module:attribute" names; raises UsageError if there is none."""
    path, _, attribute = name.partition(":")
    # As `python -m` does, but after all others: no module of the folder replaces one.
    if not sys.flags.safe_path and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(path)
        digests([name])
        return getattr(module, attribute)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        text = f"must be package.module:function; cannot be imported ({error})"
        raise flag_error(flag, name, text) from None


def check_named(recorded: Mapping[str, Any], named: Collection[str]) -> None:
    """Raises UsageError for code that a run folder names and the command does not.

    recorded: the flags in the folder. named: the names on the command line.
    """
    lacking = []
    for name in _OUTSIDE:
        value = recorded.get(name, ())
        texts = map(str, value if isinstance(value, list | tuple) else [value])
        own = [text for text in texts if is_outside(text)]
        if not set(own) <= set(named):
            lacking.append(f"--{name}={','.join(own)}")
    if lacking:
        text = " ".join(lacking)
        raise UsageError(f"was trained with {text}, code that this command must name; add {text}")


def digests(names: Collection[str]) -> dict[str, str]:
    """The SHA-256 of the files of one's own modules, as they were when they were imported.

    They are all loaded modules of the packages that the names begin with, and of the working
    folder without what is installed there; {} without a name.
    """
    packages = {name.partition(":")[0].partition(".")[0] for name in names}
    found: dict[str, str] = {}
    if not packages:
        return found
    for name, module in [*sys.modules.items()]:
        file = Path(getattr(module, "__file__", None) or os.devnull)
        is_named = name.partition(".")[0] in packages
        excluded = _LIBRARY if is_named else _INSTALLED
        is_own = is_named or file.is_relative_to(Path.cwd())
        if is_own and file.is_file() and not any(map(file.is_relative_to, excluded)):
            # A file that is edited later is not the code that runs.
            if name not in _digests:
                _digests[name] = hashlib.sha256(file.read_bytes()).hexdigest()
            found[name] = _digests[name]
    return found


def library() -> str:
    """The SHA-256 of this library's own sources."""
    sha = hashlib.sha256()
    for folder in _LIBRARY:
        for file in sorted(folder.rglob("*.py")):
            sha.update(str(file.relative_to(folder)).encode())
            sha.update(file.read_bytes())
    return sha.hexdigest()


def signature(function: Callable[..., Any]) -> inspect.Signature:
    """The arguments of a function, or of a class; flax.nnx hides those of its modules."""
    if isinstance(function, type):
        from flax import nnx  # a fifth of a second

        if issubclass(function, nnx.Module):
            of_class = inspect.signature(function.__init__)
            return of_class.replace(parameters=[*of_class.parameters.values()][1:])
    return inspect.signature(function)


def takes(function: Callable[..., Any], name: str) -> bool:
    """Whether a function has an argument of that name."""
    return name in signature(function).parameters


def check_factory(flag: str, name: str, listed: Collection[str]) -> None:
    """Raises UsageError unless `name` is listed, or names a function "package.module:function"."""
    if not is_outside(name):
        check_known(flag, name, [*listed, "package.module:function"])
        return
    function = imported(flag, name)
    if not callable(function) or (isinstance(function, type) and flag == "algorithm"):
        raise flag_error(flag, name, "must be a function")


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
    names: the flag of each argument (`errors.in_flags`).
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


def network(name: str) -> Callable[..., Model]:
    """A network's factory."""
    if is_outside(name):
        return _of_model(imported("model", name))
    return models.BODIES[name].make if name in models.BODIES else getattr(models, name)


def _of_model(factory: Callable[..., Any]) -> Callable[..., Any]:
    """The factory of a Model, from one that may return a flax.nnx module instead.

    If that one takes rngs, each seed draws its own initial network; otherwise the values of the
    module are the initial network.
    """
    from flax import nnx

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


def algorithm(name: str) -> Callable[..., Algorithm]:
    """An algorithm's factory; a listed algorithm's factory has the name of its file."""
    found: Callable[..., Algorithm] = (
        imported("algorithm", name) if is_outside(name) else getattr(_module(name), name)
    )
    return found


def _module(name: str) -> types.ModuleType:
    if is_outside(name):
        imported("algorithm", name)
        return sys.modules[name.partition(":")[0]]
    return importlib.import_module(f"{algorithms.__name__}.{name}")


def facts(name: str) -> Facts:
    """The constant FACTS of an algorithm's module, or the defaults without one."""
    found = getattr(_module(name), "FACTS", Facts())
    if not isinstance(found, Facts):
        text = f"FACTS of its module is {type(found).__name__}, must be Facts"
        raise flag_error("algorithm", name, text)
    return found


def hyperparameters(name: str) -> dict[str, tuple[type, ...]]:
    """The keyword-only arguments of an algorithm's factory, each with the types that it takes.

    Only types that a text can have are listed: an argument that takes a function has none.
    """
    function = algorithm(name)
    try:
        hints = typing.get_type_hints(function)
    except (NameError, TypeError):  # hints for type checkers only, or not a plain function
        hints = {}
    return {
        p.name: _plain_types(hints.get(p.name, _usual(p.default)))
        for p in inspect.signature(function).parameters.values()
        # The optimizer has its own flags, and the data have the domains.
        if p.kind is p.KEYWORD_ONLY and p.name not in ("server_optimizer", "num_domains")
    }


def settings_text(name: str) -> str:
    """What --set takes of an algorithm: each setting with its types, its default and its meaning.

    Arguments that its docstring leaves out are those of `averaging`, or of one's own.
    """
    function = algorithm(name)
    documented: dict[str, str] = {}
    for of_arguments in (averaging.averaging, function):
        parsed_text = docstring_parser.parse(of_arguments.__doc__ or "")
        documented |= {each.arg_name: each.description or "" for each in parsed_text.params}
    lines = [f"Settings of {name}, as --set=name=value:", ""]
    for setting, kinds in hyperparameters(name).items():
        if not {*kinds} - {type(None)}:
            continue  # a function, which no text can name
        types_text = " or ".join(_WORDS[kind] for kind in kinds)
        default = signature(function).parameters[setting].default
        is_given = default is not inspect.Parameter.empty
        lines.append(f"{setting} ({types_text}){f', default {shown(default)}' * is_given}")
        lines += textwrap.wrap(documented.get(setting, ""), 78, **_INDENTED)
    return "\n".join(lines)


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
                value = kind(text)
            except ValueError:
                continue
            is_lost = isinstance(value, float) and 0 < abs(value) < 1e-38
            if is_lost or (isinstance(value, int) and abs(value) >= 2**31):
                raise flag_error(flag, entry, "must be a number that float32 or int32 holds")
            return value
    names = {type(None): "none", bool: "true or false", int: "a whole number", float: "a number"}
    allowed = " or ".join(names[kind] for kind in kinds if kind in names)
    raise flag_error(flag, entry, f"must be {allowed}" if allowed else "can be set in Python only")
