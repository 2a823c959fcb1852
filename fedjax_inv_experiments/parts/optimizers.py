"""The optimizers of clients and server, which are optax's, and schedules of learning rates.

A learning rate is a hyperparameter times a factor that depends on the round (`schedule`). So
several values train in one program, and a restart continues with the right factor.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np
import optax

from fedjax_inv.types import Array
from fedjax_inv_experiments.flags.flag import (
    ANY,
    FINITE,
    FRACTION,
    INSIDE,
    POSITIVE,
    Range,
    at_least,
    check_known,
    flag_error,
)
from fedjax_inv_experiments.flags.names import parsed, unknown_setting

# Help texts that the flags of clients and server share.
OTHERS = ", or another of optax that needs a learning rate only"
SETTING_HELP = (
    "An argument of that optimizer, name=value, instead of optax's default; repeat the flag for "
    "several."
)
PART = Range(lambda value: 0 < value <= 1, "above 0 and at most 1")

# lbfgs needs values of the loss, noisy_sgd draws the same noise for all clients, and
# optimistic_adam is deprecated.
_WITHOUT = ("lbfgs", "noisy_sgd", "optimistic_adam")


def _is_optimizer(name: str, make: Any) -> bool:
    if name.startswith(("_", "scale_by_")) or name in _WITHOUT or not inspect.isfunction(make):
        return False
    parameters = [*inspect.signature(make).parameters.values()]
    is_of_a_rate = bool(parameters) and parameters[0].name == "learning_rate"
    return is_of_a_rate and all(p.default is not p.empty for p in parameters[1:])


# Looked up by name, too, because a later optax may load them only on request.
_WELL_KNOWN = ("adagrad", "adam", "adamw", "lamb", "lion", "rmsprop", "sgd", "yogi")


def names_in_optax() -> list[str]:
    """The optimizers of optax that need only a learning rate and a gradient."""
    found = {name: getattr(optax, name, None) for name in _WELL_KNOWN} | vars(optax)
    return sorted(name for name, make in found.items() if _is_optimizer(name, make))


NAMES = names_in_optax()


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


# The values that numbers of optimizers may have, by the argument.
_RANGES: Mapping[str, Range] = {
    **dict.fromkeys(("b1", "b2", "b3", "beta", "rho", "momentum"), FRACTION),
    **dict.fromkeys(("decay", "eta_minus"), INSIDE),
    **dict.fromkeys(("eps", "min_norm", "min_step_size", "max_step_size"), POSITIVE),
    **dict.fromkeys(("trust_coefficient", "clipping_threshold"), POSITIVE),
    **dict.fromkeys(("eps_root", "weight_decay", "weight_decay_rate", "alpha"), FINITE),
    **dict.fromkeys(("initial_accumulator_value", "initial_scale"), FINITE),
    **dict.fromkeys(("min_dim_size_to_factor", "decay_offset"), at_least(0)),
    "decay_rate": PART,
    "eta_plus": Range(lambda value: 1 < value < float("inf"), "above 1"),
    "threshold": Range(lambda value: 4 <= value < float("inf"), "at least 4"),
}
# Where an argument of that name means something else.
_OTHER_RANGES: Mapping[str, Mapping[str, Range]] = {
    "lars": {"eps": FINITE},
    "optimistic_adam_v2": {"beta": FINITE},
    "optimistic_gradient_descent": {"beta": FINITE},
}


def range_of(name: str, argument: str) -> Range:
    """The values that a number of an optimizer may have. name: of the optimizer."""
    return _OTHER_RANGES.get(name, {}).get(argument, _RANGES.get(argument, ANY))


def flags_of_arguments(flag: str, name: str) -> Mapping[str, str]:
    """The flag of each optimizer argument that has its own flag.

    flag: "optimizer" or "server_optimizer". name: its value.
    """
    return _FLAGS[flag].get(name, {})


def arguments(group: Any, flag: str) -> dict[str, Any]:
    """The optimizer's arguments besides the learning rate, from a group of flags.

    flag: the flag that names the optimizer, "optimizer" or "server_optimizer".

    Raises UsageError for an unknown optimizer, argument or value.
    """
    name = getattr(group, flag)
    check_known(flag, name, NAMES)
    own = flags_of_arguments(flag, name)
    kinds = {
        p.name: (float, type(None)) if p.default is None else (type(p.default),)
        for p in inspect.signature(getattr(optax, name)).parameters.values()
        if p.default is not p.empty and not ("mask" in p.name or "dtype" in p.name)
    }
    chosen = dict(_DEFAULTS.get(flag, {}).get(name, {}))
    chosen |= {argument: getattr(group, other) or None for argument, other in own.items()}
    setting = f"{flag}_set"
    for entry in getattr(group, f"{flag}_settings"):
        argument, equals, text = entry.partition("=")
        if not equals or not text:
            raise flag_error(setting, entry, "must be name=value")
        if argument in own:
            raise flag_error(setting, entry, f"must be set by --{own[argument]}")
        if argument not in kinds:
            known = sorted({*kinds} - {*own})
            raise flag_error(setting, entry, unknown_setting([name], argument, known))
        value = parsed(setting, entry, text, kinds[argument])
        if not np.isfinite(value or 0):
            raise flag_error(setting, entry, "must be finite")
        allowed = range_of(name, argument)
        if value is not None and not allowed.holds(value):
            raise flag_error(setting, entry, f"must be {allowed.text}")
        chosen[argument] = value
    return chosen


def make(group: Any, flag: str, learning_rate: float | Array) -> optax.GradientTransformation:
    """The optimizer that a group of flags names. group, flag, errors: as in `arguments`."""
    return getattr(optax, getattr(group, flag))(learning_rate, **arguments(group, flag))


def regularised(
    optimizer: optax.GradientTransformation, weight_decay: float, clip: float
) -> optax.GradientTransformation:
    """The optimizer after clipping and weight decay, which is added to the clipped gradient."""
    before = [optax.clip_by_global_norm(clip)] if clip else []
    before += [optax.add_decayed_weights(weight_decay)] if weight_decay else []
    return optax.chain(*before, optimizer) if before else optimizer
