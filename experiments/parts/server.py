"""The server's optimizer."""

import dataclasses

import optax

from fedjax_inv.types import Array

from ..flags.configuration import Config
from ..flags.flag import (
    FRACTION,
    POSITIVE,
    check_different,
    flag,
)
from ..parts import optimizers


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
    server_momentum: float = flag(0.0, "Momentum of the server's sgd.", FRACTION)
    server_epsilon: float = flag(
        1e-3,
        "The constant that the server's adam and yogi add to the root of the second moment.",
        POSITIVE,
    )


def check(chosen: Config) -> None:
    """Raises UsageError for a bad optimizer."""
    check_different("server_learning_rate", chosen.server_learning_rate)
    optimizers.arguments(chosen, "server_optimizer")


def optimizer(chosen: Config, learning_rate: float | Array) -> optax.GradientTransformation:
    """The server's optimizer."""
    return optimizers.make(chosen, "server_optimizer", learning_rate)
