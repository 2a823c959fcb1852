"""The local training of clients."""

import dataclasses
from typing import NamedTuple

import numpy as np
import optax

from fedjax_inv import local, platforms
from fedjax_inv.types import Array, Work

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


class Sizes(NamedTuple):
    """The sizes for which local training is compiled; data of the same sizes share a program."""

    capacity: int = 1  # the most examples of a client, rounded up; 1 if batches have another size
    num_batches: int | None = None  # batches in a pass, if all clients have the same number


def sizes(chosen: Config, num_examples: np.ndarray) -> Sizes:
    """The sizes for clients with these numbers of examples [R, C]."""
    if not chosen.batch_size:
        return Sizes(8 * -(-int(num_examples.max()) // 8))
    if platforms.on_cpu():  # there a loop of known length gains nothing
        return Sizes()
    batches = np.unique(-(-num_examples[num_examples > 0] // chosen.batch_size))
    return Sizes(num_batches=int(batches[0]) if len(batches) == 1 else None)


def work(chosen: Config, learning_rate: float | Array, sizes: Sizes) -> Work:
    """The local training that the flags describe."""
    return _work(chosen, learning_rate, sizes)._replace(learning_rate=learning_rate)


def _work(chosen: Config, learning_rate: float | Array, sizes: Sizes) -> Work:
    optimizer = optimizers.regularised(
        optimizers.make(chosen, "optimizer", learning_rate), chosen.weight_decay, chosen.clip
    )
    is_plain = chosen.optimizer == "sgd" and not (chosen.optimizer_settings or chosen.weight_decay)
    momentum = chosen.momentum if is_plain else None
    size, num_steps = chosen.batch_size, chosen.local_steps
    if size == 0:
        num_steps = num_steps or chosen.local_epochs
        return local.full_batch(
            optimizer, capacity=sizes.capacity, num_steps=num_steps, momentum=momentum
        )
    if num_steps:
        return local.steps(optimizer, batch_size=size, num_steps=num_steps, momentum=momentum)
    return local.epochs(
        optimizer,
        batch_size=size,
        num_epochs=chosen.local_epochs,
        num_batches=sizes.num_batches,
        momentum=momentum,
    )


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
