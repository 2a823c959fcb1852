"""The flags of the experiment binaries, and the checked record made of them."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from absl import flags

from experiments import build

Number = TypeVar("Number", int, float)

PRESETS = Path(__file__).parent / "presets"


@dataclasses.dataclass(frozen=True)
class Config:
    """Every flag, in the type that it stands for."""

    algorithm: tuple[str, ...]
    settings: tuple[str, ...]  # the --set flags, "name=value,value"
    dataset: str
    environment: str
    angles: tuple[float, ...]
    held_out: str
    partition: str
    alpha: float
    clients: int
    cohort: int
    rounds: int
    local_epochs: int
    local_steps: int
    batch_size: int
    optimizer: str
    learning_rate: tuple[float, ...]
    momentum: float
    server_optimizer: str
    server_learning_rate: tuple[float, ...]
    server_momentum: float
    model: str
    widths: tuple[int, ...]
    cut: int
    seeds: tuple[int, ...]
    data_seed: int
    eval_every: int
    checkpoint_every: int
    nonfinite: str
    client_chunk: int
    run_chunk: int
    devices: int
    image_size: int
    run_dir: str
    data_dir: str
    resume: bool
    paper: tuple[str, ...]


def define(*, nonfinite: str) -> None:
    """Defines the flags of train and sweep. nonfinite: the default of --nonfinite."""
    listing = ", ".join
    flags.DEFINE_list("algorithm", ["fedavg"], f"Algorithms: {listing(build.algorithm_names())}.")
    flags.DEFINE_multi_string(
        "set",
        [],
        "A hyperparameter of the algorithm, name=value or (sweep) name=value,value,...; repeat the "
        "flag for several. Names are the keyword arguments of the algorithm's factory.",
    )
    flags.DEFINE_string(
        "dataset", "digits", "digits, a TFDS name, the path of an .npz or of a folder of images."
    )
    flags.DEFINE_enum(
        "environment", "rotated", list(build.ENVIRONMENTS), "How domains are made of the data set."
    )
    flags.DEFINE_list(
        "angles", ["0", "15", "30", "45", "60", "75"], "Degrees of the rotated domains."
    )
    flags.DEFINE_string(
        "held_out",
        "",
        "The domain that only the test sees; 'all' (sweep): each in turn; 'none': the official "
        "test split, or a random fifth. Default: the last domain, or none if there is only one.",
    )
    flags.DEFINE_enum(
        "partition", "domain", ["domain", "iid", "dirichlet"], "How clients share the examples."
    )
    flags.DEFINE_float("alpha", 0.5, "Concentration of --partition=dirichlet.")
    flags.DEFINE_integer("clients", 0, "Training clients; 0: one per training domain.")
    flags.DEFINE_integer("cohort", 0, "Clients drawn each round; 0: all.")
    flags.DEFINE_integer("rounds", 50, "Communication rounds.")
    flags.DEFINE_integer("local_epochs", 1, "Passes over a client's examples per round.")
    flags.DEFINE_integer("local_steps", 0, "Steps per round instead of passes, if above 0.")
    flags.DEFINE_integer("batch_size", 32, "Examples per step; 0: all of the client's at once.")
    flags.DEFINE_enum("optimizer", "sgd", list(build.OPTIMIZERS), "The clients' optimizer.")
    flags.DEFINE_list("learning_rate", ["0.1"], "Of the clients; sweep: several.")
    flags.DEFINE_float("momentum", 0.0, "Of the clients' sgd, reset every round.")
    flags.DEFINE_enum(
        "server_optimizer",
        "sgd",
        list(build.SERVER_OPTIMIZERS),
        "sgd: FedAvg (FedAvgM with --server_momentum), adam: FedAdam, yogi: FedYogi.",
    )
    flags.DEFINE_list("server_learning_rate", ["1.0"], "Of the server; sweep: several.")
    flags.DEFINE_float("server_momentum", 0.0, "Of the server's sgd.")
    flags.DEFINE_string("model", "mlp", f"The network: {listing(build.MODELS)}.")
    flags.DEFINE_list("widths", [], "Widths of the hidden layers; default: the network's own.")
    flags.DEFINE_integer("cut", -1, "Hidden layers before the cut; -1: all, so head = classifier.")
    flags.DEFINE_list("seeds", ["0"], "Each seeds network, partition, cohorts and minibatches.")
    flags.DEFINE_integer("data_seed", 0, "Seeds which example goes to which environment.")
    flags.DEFINE_integer("eval_every", 5, "Rounds between evaluations.")
    flags.DEFINE_integer("checkpoint_every", 0, "Rounds between checkpoints; 0: eval_every.")
    flags.DEFINE_enum(
        "nonfinite",
        nonfinite,
        ["stop", "drop", "mark"],
        "When a client's loss becomes NaN or infinite: stop the program, drop the client from that "
        "round, or mark the run as diverged, never to be selected, and let the others go on.",
    )
    flags.DEFINE_integer("client_chunk", 0, "Clients trained at once on a device; 0: all.")
    flags.DEFINE_integer("run_chunk", 0, "Seeds x hyperparameters trained at once; 0: all.")
    flags.DEFINE_integer("devices", 1, "Devices that share the clients.")
    flags.DEFINE_integer("image_size", 0, "Side in pixels for a folder's images; 0: as they are.")
    flags.DEFINE_string("run_dir", "", "Where results go; default: runs/ and the run's name.")
    flags.DEFINE_string("data_dir", "", "The TFDS folder; default: $TFDS_DATA_DIR or TFDS's own.")
    flags.DEFINE_bool("resume", False, "Continue what --run_dir holds, bit for bit.")
    flags.DEFINE_list("paper", [], "Numbers to print beside ours, as algorithm=number.")


def expand_presets(argv: Sequence[str]) -> list[str]:
    """Replaces --preset=NAME by the flag file of that name."""
    expanded = []
    for argument in argv:
        flag, _, name = argument.lstrip("-").partition("=")
        if argument.startswith("-") and flag == "preset":
            names = sorted(path.stem for path in PRESETS.glob("*.flags"))
            build.check_known("preset", name, names)
            expanded.append(f"--flagfile={PRESETS / name}.flags")
        else:
            expanded.append(argument)
    return expanded


def read() -> Config:
    """The parsed flags as a `Config`; raises ValueError, in one line, for a value out of range."""
    values = flags.FLAGS.flag_values_dict()
    config = Config(
        **{
            field.name: values[field.name]
            for field in dataclasses.fields(Config)
            if field.name not in _CONVERTED
        },
        algorithm=tuple(values["algorithm"]),
        settings=tuple(values["set"]),
        paper=tuple(values["paper"]),
        angles=_numbers("angles", values["angles"], float),
        learning_rate=_numbers("learning_rate", values["learning_rate"], float),
        server_learning_rate=_numbers(
            "server_learning_rate", values["server_learning_rate"], float
        ),
        widths=_numbers("widths", values["widths"], int),
        seeds=_numbers("seeds", values["seeds"], int),
    )
    check(config)
    return config


_CONVERTED = (
    "algorithm",
    "settings",
    "paper",
    "angles",
    "learning_rate",
    "server_learning_rate",
    "widths",
    "seeds",
)


def _numbers(
    name: str, values: Sequence[object], kind: Callable[[str], Number]
) -> tuple[Number, ...]:
    try:
        return tuple(kind(str(value)) for value in values)
    except ValueError:
        text = ",".join(str(value) for value in values)
        kind_name = "whole numbers" if kind is int else "numbers"
        raise ValueError(f"--{name}={text}: must be a list of {kind_name}") from None


_RANGES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("rounds eval_every local_epochs devices", lambda v: v >= 1, "at least 1"),
    (
        "clients cohort local_steps batch_size checkpoint_every client_chunk run_chunk image_size "
        "data_seed",
        lambda v: v >= 0,
        "at least 0",
    ),
    ("cut", lambda v: v >= -1, "at least -1"),
    ("widths", lambda v: v >= 1, "at least 1 each"),
    ("seeds", lambda v: 0 <= v < 2**31, "at least 0 and below 2^31 each"),
    ("alpha learning_rate server_learning_rate", lambda v: 0 < v < math.inf, "above 0"),
    ("momentum server_momentum", lambda v: 0 <= v < 1, "at least 0 and below 1"),
    ("paper", lambda v: "=" in v, "algorithm=number"),
)


def check(config: Config) -> None:
    """Raises ValueError, in one line, for the first flag whose value is out of range."""
    for name in config.algorithm:
        build.check_known("algorithm", name, build.algorithm_names())
    build.check_known("model", config.model, list(build.MODELS))
    for names, holds, allowed in _RANGES:
        for name in names.split():
            value = getattr(config, name)
            for item in value if isinstance(value, tuple) else (value,):
                if not holds(item):
                    raise ValueError(f"--{name}={item}: must be {allowed}")
    for name in ("algorithm", "learning_rate", "server_learning_rate", "seeds"):
        values = getattr(config, name)
        if len(values) == 0 or len(set(values)) < len(values):
            text = ",".join(str(value) for value in values)
            raise ValueError(f"--{name}={text}: must be one or several different values")
    if config.clients and config.cohort > config.clients:
        raise ValueError(f"--cohort={config.cohort}: must be at most --clients={config.clients}")
    if config.eval_every > config.rounds:
        raise ValueError(
            f"--eval_every={config.eval_every}: must be at most --rounds={config.rounds}"
        )
    if config.checkpoint_every % config.eval_every:
        raise ValueError(
            f"--checkpoint_every={config.checkpoint_every}: must be a multiple of "
            f"--eval_every={config.eval_every}"
        )
