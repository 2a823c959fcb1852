"""The optimizers of clients and server, which are optax's."""

import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np
import optax

from fedjax_inv.types import Array

from ..errors import check_known, flag_error, near
from ..factories import parsed

# lbfgs needs values of the loss, noisy_sgd draws the same noise for all clients, and
# optimistic_adam is deprecated.
_WITHOUT = ("lbfgs", "noisy_sgd", "optimistic_adam")


def _is_optimizer(name: str, make: Any) -> bool:
    if name.startswith(("_", "scale_by_")) or name in _WITHOUT or not inspect.isfunction(make):
        return False
    parameters = [*inspect.signature(make).parameters.values()]
    is_of_a_rate = bool(parameters) and parameters[0].name == "learning_rate"
    return is_of_a_rate and all(p.default is not p.empty for p in parameters[1:])


# Those of optax that need only a learning rate and a gradient.
NAMES = sorted(name for name, make in vars(optax).items() if _is_optimizer(name, make))


# Arguments with their own flag: flag that names the optimizer -> optimizer -> argument -> flag.
_FLAGS: Mapping[str, Mapping[str, Mapping[str, str]]] = {
    "optimizer": {"sgd": {"momentum": "momentum"}},
    "server_optimizer": {
        "sgd": {"momentum": "server_momentum"},
        "adam": {"eps": "server_epsilon"},
        "yogi": {"eps": "server_epsilon"},
    },
}
# Defaults from Reddi et al. 2021, Section 5, that differ from optax's.
_DEFAULTS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "server_optimizer": {"adam": {"b2": 0.99}, "yogi": {"b2": 0.99}},
}


def arguments(group: Any, flag: str) -> dict[str, Any]:
    """The optimizer's arguments besides the learning rate, from a group of flags.

    flag: the flag that names the optimizer, "optimizer" or "server_optimizer".

    Raises UsageError for an unknown optimizer, argument or value.
    """
    name = getattr(group, flag)
    check_known(flag, name, NAMES)
    own = _FLAGS[flag].get(name, {})
    kinds = {
        p.name: (float, type(None)) if p.default is None else (type(p.default),)
        for p in inspect.signature(getattr(optax, name)).parameters.values()
        if p.default is not p.empty and not ("mask" in p.name or "dtype" in p.name)
    }
    chosen = dict(_DEFAULTS.get(flag, {}).get(name, {}))
    chosen |= {argument: getattr(group, other) or None for argument, other in own.items()}
    setting = f"{flag}_set"
    for entry in getattr(group, f"{flag}_set", ()):
        argument, equals, text = entry.partition("=")
        if not equals or not text:
            raise flag_error(setting, entry, "must be name=value")
        if argument in own:
            raise flag_error(setting, entry, f"must be set by --{own[argument]}")
        if argument not in kinds:
            known = sorted({*kinds} - {*own})
            raise flag_error(setting, entry, f"{name} has no {argument}; {near(argument, known)}")
        value = parsed(setting, entry, text, kinds[argument])
        if not np.isfinite(value or 0):
            raise flag_error(setting, entry, "must be finite")
        chosen[argument] = value
    return chosen


def make(group: Any, flag: str, learning_rate: float | Array) -> optax.GradientTransformation:
    """The optimizer that a group of flags names. group, flag, errors: as in `arguments`."""
    return getattr(optax, getattr(group, flag))(learning_rate, **arguments(group, flag))
