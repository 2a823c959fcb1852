"""The server's optimizer."""

import optax

from fedjax_inv.types import Array

from ..config import Config
from ..parts import optimizers


def optimizer(chosen: Config, learning_rate: float | Array) -> optax.GradientTransformation:
    """The server's optimizer."""
    return optimizers.make(chosen, "server_optimizer", learning_rate)
