"""The optimizers of clients and server: those of optax, by name, and schedules of their rates.

A rate is a hyperparameter times a factor of the round (`schedule`): so several train in one
program, and a restart goes on as if there had been none.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np
import optax

from experiments.flags.flag import check_known
from experiments.flags.names import no_setting, parsed
from fedjax_inv.checks import UsageError
from fedjax_inv.types import Array

SCHEDULES = ("constant", "cosine", "exponential")

# One asks for values of the loss; one draws noise, which would be the same for all clients; and one
# is deprecated.
_WITHOUT = ("lbfgs", "noisy_sgd", "optimistic_adam")


def _is_optimizer(name: str, make: Any) -> bool:
    if name.startswith(("_", "scale_by_")) or name in _WITHOUT or not inspect.isfunction(make):
        return False
    parameters = [*inspect.signature(make).parameters.values()]
    is_of_a_rate = bool(parameters) and parameters[0].name == "learning_rate"
    return is_of_a_rate and all(p.default is not p.empty for p in parameters[1:])


# Looked for by name as well, in case a later optax loads them only when they are asked for.
_WELL_KNOWN = ("adagrad", "adam", "adamw", "lamb", "lion", "rmsprop", "sgd", "yogi")


def names_in_optax() -> list[str]:
    """The optimizers of optax that need a learning rate and a gradient, and no more."""
    found = {name: getattr(optax, name, None) for name in _WELL_KNOWN} | vars(optax)
    return sorted(name for name, make in found.items() if _is_optimizer(name, make))


NAMES = names_in_optax()


# Arguments that are fields of a group themselves; by the field that names the optimizer.
_FIELDS: Mapping[str, Mapping[str, Mapping[str, str]]] = {
    "optimizer": {"sgd": {"momentum": "momentum"}},
    "server_optimizer": {
        "sgd": {"momentum": "server_momentum"},
        "adam": {"eps": "server_epsilon"},
        "yogi": {"eps": "server_epsilon"},
    },
}
# Other defaults than optax's: those of Reddi et al. 2021, Section 5.
_DEFAULTS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "server_optimizer": {"adam": {"b2": 0.99}, "yogi": {"b2": 0.99}},
}


def fields(field: str, name: str) -> Mapping[str, str]:
    """The arguments of the optimizer of that name that are fields of a group themselves."""
    return _FIELDS[field].get(name, {})


def arguments(group: Any, field: str) -> dict[str, Any]:
    """What an optimizer is made with beside a learning rate, as a group of flags says.

    field: that names it, "optimizer" or "server_optimizer". Raises UsageError for an unknown
    optimizer, and for an argument or a value that it does not take.
    """
    name = getattr(group, field)
    check_known(field, name, NAMES)
    own = fields(field, name)
    kinds = {
        p.name: (float, type(None)) if p.default is None else (type(p.default),)
        for p in inspect.signature(getattr(optax, name)).parameters.values()
        if p.default is not p.empty and not ("mask" in p.name or "dtype" in p.name)
    }
    chosen = dict(_DEFAULTS.get(field, {}).get(name, {}))
    chosen |= {argument: getattr(group, other) or None for argument, other in own.items()}
    for entry in getattr(group, f"{field}_settings"):
        argument, equals, text = entry.partition("=")
        told = f"--{field}_set={entry}"
        if not equals or not text:
            raise UsageError(f"{told}: must be name=value")
        if argument in own:
            raise UsageError(f"{told}: must be set by --{own[argument]}")
        if argument not in kinds:
            raise UsageError(f"{told}: {no_setting(name, argument, sorted({*kinds} - {*own}))}")
        value = parsed(f"{field}_set", entry, text, kinds[argument])
        if not np.isfinite(value or 0):
            raise UsageError(f"{told}: must be finite")
        chosen[argument] = value
    return chosen


def made(group: Any, field: str, rate: float | Array) -> optax.GradientTransformation:
    """The optimizer that a group of flags says; the others are as of `arguments`."""
    return getattr(optax, getattr(group, field))(rate, **arguments(group, field))


def schedule(
    kind: str, warmup_rounds: int, *, decay: float, final_rate: float, end: int
) -> optax.Schedule:
    """The factor of a learning rate in round t, from 0.

    In a warm-up of w rounds it is (t + 1) / (w + 1); after it, with s = t - w, 1 where it is
    constant, decay^s where it is exponential, and where it is cosine
    final_rate + (1 - final_rate) (1 + cos(pi min(s / (end - w), 1))) / 2.

    kind: one of SCHEDULES. end: of a cosine, the round after its last, above those of the warm-up.
    """
    rest = {
        "constant": lambda: optax.constant_schedule(1.0),
        "cosine": lambda: optax.cosine_decay_schedule(1.0, end - warmup_rounds, final_rate),
        "exponential": lambda: optax.exponential_decay(1.0, 1, decay),
    }[kind]()
    if not warmup_rounds:
        return rest
    rising = optax.linear_schedule(1 / (warmup_rounds + 1), 1.0, warmup_rounds)
    return optax.join_schedules([rising, rest], [warmup_rounds])
