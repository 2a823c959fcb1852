"""The local training of clients."""

import dataclasses
import functools
from typing import Any

import optax

from ..flags.configuration import Config
from ..flags.flag import (
    FINITE,
    FRACTION,
    POSITIVE,
    at_least,
    check_different,
    flag,
)
from ..parts import optimizers


@dataclasses.dataclass(frozen=True)
class Clients:
    """The local training of clients."""

    local_epochs: int = flag(1, "Passes over a client's examples per round.", at_least(1))
    local_steps: int = flag(0, "If above 0: steps per round instead of passes.", at_least(0))
    batch_size: int = flag(32, "Examples per step; 0: all of the client's.", at_least(0))
    optimizer: str = flag(
        "sgd",
        f"The clients' optimizer: sgd, adam, adamw, rmsprop, lion{optimizers.OTHERS}. It starts "
        "anew every round.",
    )
    optimizer_settings: tuple[str, ...] = flag(
        (), optimizers.SETTING_HELP, kind=str, name="optimizer_set", repeats=True
    )
    learning_rate: tuple[float, ...] = flag(
        (0.1,), "The clients' learning rate; sweep: several.", POSITIVE
    )
    schedule: str = flag(
        "constant",
        "How the clients' learning rate changes over the rounds.",
        choices=("constant", "cosine"),
    )
    warmup_rounds: int = flag(
        0,
        "Rounds in which the learning rate rises linearly, before the schedule begins.",
        at_least(0),
    )
    schedule_rounds: int = flag(
        0,
        "Rounds from the first to the end of a cosine schedule; 0: --rounds, which is then fixed.",
        at_least(0),
    )
    momentum: float = flag(0.0, "Momentum of the clients' sgd.", FRACTION)
    clip: float = flag(
        0.0,
        "The largest norm of a local step's gradient, which is scaled down; 0: any.",
        FINITE,
    )
    weight_decay: float = flag(
        0.0, "Times the parameters: added to a local step's gradient (L2).", FINITE
    )


def check(chosen: Config) -> None:
    """Raises UsageError for a bad optimizer."""
    check_different("learning_rate", chosen.learning_rate)
    optimizers.arguments(chosen, "optimizer")


def steps(chosen: Config) -> dict[str, Any]:
    """The arguments of `fit` that say which steps a client takes in a round."""
    optimizer, own = getattr(optax, chosen.optimizer), optimizers.arguments(chosen, "optimizer")
    own.pop("momentum", None)  # is a value of local training
    return {
        "optimizer": functools.partial(optimizer, **own) if own else optimizer,
        "batch_size": chosen.batch_size or None,
        "epochs": chosen.local_epochs,
        "steps": chosen.local_steps or None,
    }


def values(chosen: Config) -> dict[str, float]:
    """The values of local training besides the learning rate."""
    momentum = chosen.momentum if chosen.optimizer == "sgd" else 0.0
    return {"momentum": momentum, "weight_decay": chosen.weight_decay, "clip": chosen.clip}


def arguments(chosen: Config) -> dict[str, Any]:
    """The arguments of `fit` about local training, besides the learning rate."""
    factor = schedule(chosen)
    more = {} if factor is None else {"learning_rate_schedule": factor}
    return steps(chosen) | values(chosen) | more


def schedule(chosen: Config) -> optax.Schedule | None:
    """The factor of the learning rate in round t = 0, 1, ...; None if it is always 1.

    In a warm-up of w rounds it is (t + 1) / (w + 1). After it, with s = t - w, that of a constant
    schedule is 1, and that of a cosine (1 + cos(pi min(s / (end - w), 1))) / 2.
    """
    warmup, end, is_cosine = chosen.warmup_rounds, chosen.schedule_end, chosen.schedule == "cosine"
    rest = optax.constant_schedule(1.0)
    if is_cosine:
        rest = optax.cosine_decay_schedule(1.0, end - warmup)
    if not warmup:
        return rest if is_cosine else None
    rising = optax.linear_schedule(1 / (warmup + 1), 1.0, warmup)
    return optax.join_schedules([rising, rest], [warmup])
