"""Random search: the settings that --draws takes from each method's own distribution.

A draw follows from the method, the hyperparameter and the draw's number: all seeds share it, none
is run twice, and more draws begin with the fewer ones.
"""

import zlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from ..config import Training
from ..errors import flag_error
from . import factories

# Of learning rates: of sgd, and of other optimizers as DomainBed draws Adam's for small images
# (Gulrajani & Lopez-Paz 2021, "In Search of Lost Domain Generalization").
_SGD = (1e-2, 1.0)
_ADAM = (10**-4.5, 10**-2.5)

# Larger steps along these methods' penalties of gradients and risks diverge on digits.
_INVARIANT = ("fedipg", "irm", "vrex", "vrex_domains")
_SLOW = (1e-2, 0.3)

# Algorithm -> hyperparameter -> (low, high), between which its logarithm is uniform. Those of
# methods inside of clients are DomainBed's. FedIPG's and V-REx's end where SGD at the rates above
# still trains, the others' are about a decade around the values of their papers. Where a method has
# `warmup_rounds`, they are drawn, too, from 1 to half of all rounds; DomainBed draws those of IRM
# and V-REx.
RANGES: Mapping[str, Mapping[str, tuple[float, float]]] = {
    "afl": {"step_size": (0.01, 1.0)},
    "cafe": {"alpha": (0.05, 0.5)},
    "coral": {"penalty": (0.1, 10.0)},
    "ditto": {"proximal": (0.01, 1.0)},
    "exit_strategy": {"step_size": (0.01, 1.0)},
    "fedcfa": {"positive_weight": (0.5, 5.0), "negative_weight": (0.5, 5.0)},
    "feddg_ga": {"step_size": (0.02, 0.2)},
    "feddyn": {"alpha": (0.001, 0.1)},
    "fedgma": {"agreement": (0.2, 0.8)},
    "fediir": {"penalty": (0.001, 0.1)},
    "fedipg": {"penalty": (0.01, 10.0)},
    "fedmix": {"ratio": (0.05, 0.2)},
    "fedomg": {"kappa": (0.1, 1.0)},
    "fedproto": {"penalty": (0.1, 10.0)},
    "fedprox": {"proximal": (0.001, 1.0)},
    "fedsr": {"l2r": (0.001, 0.1), "cmi": (1e-4, 0.01)},
    "fish": {"meta_rate": (0.05, 0.5)},
    "fishr": {"penalty": (10.0, 1e4)},
    "fl_games": {"body_learning_rate": (1e-5, 1e-4)},
    "group_dro": {"step_size": (0.001, 0.1)},
    "irm": {"penalty": (0.1, 1e5)},
    "mmd": {"penalty": (0.1, 10.0)},
    "moon": {"penalty": (0.1, 10.0)},
    "qfedavg": {"q": (0.1, 5.0)},
    "vrex": {"beta": (0.1, 100.0)},
    "vrex_domains": {"penalty": (0.1, 1e5)},
}

# Algorithm -> settings of its draws: with a large penalty a step of the plain objective diverges.
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "fedipg": {"scale_loss": True},
    "vrex": {"scale_loss": True},
}


def hypers(
    count: int,
    training: Training,
    algorithm: str,
    given: Mapping[str, Sequence[Any]],
    settings: Collection[str],
) -> list[dict[str, Any]]:
    """The different ones of so many draws of an algorithm's hyperparameters.

    given: the values of numbers, which stay; those of a rate that is drawn are empty.
    settings: further names that stay, of settings that are no numbers.
    """
    for name, values in given.items():
        if len(values) > 1:
            text = f"draws settings, and {name} must be one value, not {len(values)}"
            raise flag_error("draws", count, text)
    optimizers = {
        "learning_rate": training.optimizer,
        "server_learning_rate": training.server_optimizer,
    }
    of_method = dict(RANGES.get(algorithm, {}))
    if "warmup_rounds" in factories.hyperparameters(algorithm):
        of_method["warmup_rounds"] = 1.0, max(2.0, training.rounds / 2)
    ranges = {k: v for k, v in of_method.items() if k not in (*given, *settings)}
    for name, values in given.items():
        if not values:
            of_sgd = _SLOW if name == "learning_rate" and algorithm in _INVARIANT else _SGD
            ranges[name] = of_sgd if optimizers[name] == "sgd" else _ADAM
    fixed = {name: values[0] for name, values in given.items() if values}
    drawn = []
    for number in range(count):
        own = {name: draw(algorithm, name, number, *ends) for name, ends in ranges.items()}
        drawn.append(fixed | own)
    return [dict(items) for items in dict.fromkeys(tuple(one.items()) for one in drawn)]


def draw(algorithm: str, name: str, number: int, low: float, high: float) -> float:
    """A hyperparameter of the draw with this number, of three digits."""
    seed = zlib.crc32(f"{algorithm} {name} {number}".encode())
    return float(f"{low * (high / low) ** np.random.default_rng(seed).random():.3g}")
