"""The server's optimizer."""

import dataclasses

import optax

from fedjax_inv.types import Array
from fedjax_inv_experiments.flags.flag import (
    FINITE,
    FRACTION,
    POSITIVE,
    PROBABILITY,
    at_least,
    check_different,
    flag,
)
from fedjax_inv_experiments.parts import optimizers


@dataclasses.dataclass(frozen=True)
class Server:
    """How the server applies the clients' updates."""

    server_optimizer: str = flag(
        "sgd",
        "sgd: FedAvg, or with --server_momentum FedAvgM; adam: FedAdam; yogi: FedYogi, both with "
        f"b2=0.99{optimizers.OTHERS}.",
    )
    server_optimizer_settings: tuple[str, ...] = flag(
        (), optimizers.SETTING_HELP, kind=str, name="server_optimizer_set", repeats=True
    )
    server_learning_rate: tuple[float, ...] = flag(
        (1.0,), "The server's learning rate; sweep: several.", POSITIVE
    )
    server_schedule: str = flag(
        "constant",
        "How the server's learning rate changes over the rounds.",
        choices=optimizers.SCHEDULES,
    )
    server_decay: float = flag(0.99, optimizers.DECAY_HELP, optimizers.PART)
    server_final_rate: float = flag(0.0, optimizers.FINAL_RATE_HELP, PROBABILITY)
    server_warmup_rounds: int = flag(0, optimizers.WARMUP_HELP, at_least(0))
    server_momentum: float = flag(0.0, "Momentum of the server's sgd.", FRACTION)
    server_epsilon: float = flag(
        1e-3,
        "The constant that the server's adam and yogi add to the root of the second moment.",
        POSITIVE,
    )
    server_clip: float = flag(
        0.0,
        "The largest norm of the server's gradient, which is scaled down; 0: any.",
        FINITE,
    )
    server_weight_decay: float = flag(
        0.0, "Times the parameters: added to the server's gradient (L2).", FINITE
    )


def check(chosen: Server) -> None:
    """Raises UsageError for a bad optimizer."""
    check_different("server_learning_rate", chosen.server_learning_rate)
    optimizers.arguments(chosen, "server_optimizer")


def optimizer(chosen: Server, learning_rate: float | Array) -> optax.GradientTransformation:
    """The server's optimizer."""
    return optimizers.regularised(
        optimizers.make(chosen, "server_optimizer", learning_rate),
        chosen.server_weight_decay,
        chosen.server_clip,
    )


def schedule(chosen: Server, end: int) -> optax.Schedule | None:
    """The factor of the learning rate; None if it is constant. end: as in `optimizers.schedule`."""
    if chosen.server_schedule == "constant" and not chosen.server_warmup_rounds:
        return None
    return optimizers.schedule(
        chosen.server_schedule,
        chosen.server_warmup_rounds,
        decay=chosen.server_decay,
        final_rate=chosen.server_final_rate,
        end=end,
    )
