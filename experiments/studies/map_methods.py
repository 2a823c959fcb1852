"""The rows of the map: methods, and the settings among which each chooses.

Every method chooses among nine settings. A method without a hyperparameter of its own has nine
learning rates; a method with one has three of these rates, and three values of its own.
"""

from collections.abc import Sequence
from typing import NamedTuple

from ..errors import check_known, flag_error

# A server that adapts; its rate is that of the first look under the colour.
_ADAM = ("--server_optimizer=adam", "--server_learning_rate=0.01", "--server_epsilon=1e-8")
# A large penalty acts after a warm-up.
_LARGE = ("--set=scale_loss=true", "--set=warmup_rounds={WARMUP}", *_ADAM)
# Clients weigh by size, as FedAvg's do, in methods whose papers weigh them equally.
_BY_SIZE = ("--set=weighting=size",)
_LATE = ("--set=warmup_rounds={WARMUP}",)
RATES = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.7, 1.0)
FEW_RATES = (0.05, 0.2, 0.7)


class MapMethod(NamedTuple):
    """A row of the map."""

    algorithm: str
    hyper: str = ""  # the method's own hyperparameter
    values: tuple[float, ...] = ()
    settings: tuple[str, ...] = ()  # further flags
    momentum: float = 0.0  # of local steps; the learning rates are 1 - momentum times the others'

    def flags(self, rounds: int, pooled_batch: int) -> tuple[str, ...]:
        """The flags of its row.

        rounds: of the experiment.
        pooled_batch: the examples that all clients together take in a step.
        """
        factor = 1 - self.momentum  # steps of gradients that stay the same are then as long
        rates = ",".join(f"{factor * rate:g}" for rate in (FEW_RATES if self.hyper else RATES))
        flags = [f"--algorithm={self.algorithm}", f"--learning_rate={rates}"]
        flags += [f"--momentum={self.momentum:g}"] if self.momentum else []
        flags += [f"--set={self.hyper}={','.join(map(repr, self.values))}"] if self.hyper else []
        numbers = {"ROUNDS": rounds, "WARMUP": rounds // 3, "POOLED": pooled_batch}
        return (*flags, *(setting.format(**numbers) for setting in self.settings))


FEDAVG = "fedavg"  # the method with which the others are compared

LISTED: dict[str, MapMethod] = {
    FEDAVG: MapMethod("fedavg"),
    # As many steps a round as one client, on as many examples as all clients together.
    "erm": MapMethod("erm", settings=("--batch_size={POOLED}",)),
    "fedavg-momentum": MapMethod("fedavg", momentum=0.9),
    "fedavg-adam": MapMethod("fedavg", settings=_ADAM),
    "fedprox": MapMethod("fedprox", "proximal", (0.01, 0.1, 1.0)),
    "scaffold": MapMethod("scaffold", settings=_BY_SIZE),
    "fedpvr": MapMethod("fedpvr", settings=_BY_SIZE),
    "fednova": MapMethod("fednova"),
    "feddyn": MapMethod("feddyn", "alpha", (0.01, 0.1, 1.0), _BY_SIZE),
    "qfedavg": MapMethod("qfedavg", "q", (0.1, 0.5, 2.0)),
    "afl": MapMethod("afl", "step_size", (0.01, 0.1, 1.0)),
    "vrex": MapMethod("vrex", "beta", (0.1, 1.0, 10.0)),
    "vrex-large": MapMethod("vrex", "beta", (10.0, 30.0, 100.0), _LARGE),
    "fedgma": MapMethod("fedgma", "agreement", (0.2, 0.4, 0.8)),
    "fedomg": MapMethod("fedomg", "kappa", (0.2, 0.5, 1.0)),
    "feddg_ga": MapMethod(
        "feddg_ga", "step_size", (0.05, 0.1, 0.2), ("--set=num_rounds={ROUNDS}",)
    ),
    "fedsam": MapMethod("fedsam", "rho", (0.02, 0.1, 0.5)),
    "fedsr": MapMethod("fedsr", "l2r", (0.01, 0.1, 1.0), _BY_SIZE),
    "fedmix": MapMethod("fedmix", "ratio", (0.05, 0.1, 0.2)),
    "moon": MapMethod("moon", "penalty", (0.1, 1.0, 5.0), ("--set=projection=0",)),
    "fedproto": MapMethod("fedproto", "penalty", (0.1, 1.0, 10.0)),
    "fedcfa": MapMethod("fedcfa", "positive_weight", (0.5, 1.0, 5.0)),
    "fedcfa-magnitude": MapMethod(
        "fedcfa", "positive_weight", (0.5, 1.0, 5.0), ("--set=scores=magnitude",)
    ),
    "cafe": MapMethod("cafe", "alpha", (0.0, 0.2, 0.5), momentum=0.9),  # it needs momentum
    "fediir": MapMethod("fediir", "penalty", (0.001, 0.01, 0.1), _BY_SIZE),
    "fedipg": MapMethod("fedipg", "penalty", (0.001, 0.01, 0.1)),
    "fedipg-large": MapMethod(
        "fedipg", "penalty", (1.0, 100.0, 10000.0), ("--set=penalty_on=classifier", *_LARGE)
    ),
    # With the length that a round has (step_size=none) all clients leave at most rates.
    "exit_strategy": MapMethod(
        "exit_strategy", "step_size", (0.01, 0.1, 1.0), ("--set=pretraining_rounds=10",)
    ),
    # They use the domains inside of clients, or of all pooled examples.
    "irm-pooled": MapMethod(
        "irm", "penalty", (1.0, 100.0, 10000.0), (*_LARGE, "--pooled", "--batch_size={POOLED}")
    ),
    "irm": MapMethod("irm", "penalty", (0.1, 1.0, 10.0), _LATE),
    "vrex_domains": MapMethod("vrex_domains", "penalty", (1.0, 10.0, 100.0), _LATE),
    "group_dro": MapMethod("group_dro", "step_size", (0.01, 0.1, 1.0)),
    "coral": MapMethod("coral", "penalty", (0.1, 1.0, 10.0)),
    "mmd": MapMethod("mmd", "penalty", (0.01, 0.1, 1.0)),
    "fish": MapMethod("fish", "meta_rate", (0.2, 0.5, 1.0)),
    "fishr": MapMethod("fishr", "penalty", (10.0, 100.0, 1000.0)),
    "fl_games": MapMethod("fl_games", settings=("--cut=0",)),  # each player trains a whole network
}


def of_names(names: Sequence[str], grid: str = "") -> dict[str, MapMethod]:
    """The methods of --rows by name, FedAvg first; all if there are no names, or for "all".

    A name with a colon is a factory of one's own, package.module:factory, with its defaults but for
    the hyperparameter of --grid, such as "mu=0.01,0.1,1".
    """
    hyper, _, values = grid.partition("=")
    try:
        own = hyper, tuple(map(float, values.split(","))) if grid else ()
    except ValueError:
        text = "must be a setting and its values, such as mu=0.01,0.1,1"
        raise flag_error("grid", grid, text) from None
    found = {FEDAVG: LISTED[FEDAVG]}
    for name in names or ["all"]:
        if name == "all":
            found |= LISTED
        elif ":" in name:
            found[name] = MapMethod(name, *own)
        else:
            check_known("rows", name, [*LISTED, "all", "package.module:factory"])
            found[name] = LISTED[name]
    return found
