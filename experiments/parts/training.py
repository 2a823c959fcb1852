"""The local training of clients."""

import functools
from typing import Any

import optax

from ..config import Config
from ..parts import optimizers


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
    warmup, end, is_cosine = chosen.warmup_rounds, chosen.rounds, chosen.schedule == "cosine"
    rest = optax.constant_schedule(1.0)
    if is_cosine:
        rest = optax.cosine_decay_schedule(1.0, end - warmup)
    if not warmup:
        return rest if is_cosine else None
    rising = optax.linear_schedule(1 / (warmup + 1), 1.0, warmup)
    return optax.join_schedules([rising, rest], [warmup])
