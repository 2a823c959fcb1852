"""The flags of the experiment binaries: one record of them, checked."""

import dataclasses
import math
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from absl import flags

from experiments import registry
from fedjax_inv.algorithms import LISTED
from fedjax_inv.models import lowerings
from fedjax_inv.models.mlp import ACTIVATIONS, NORMS

PRESETS = Path(__file__).parent / "presets"


class _Range(NamedTuple):
    holds: Callable[[Any], bool]
    text: str


_ANY = _Range(lambda value: True, "")
_POSITIVE = _Range(lambda value: 0 < value < math.inf, "above 0")
_PROBABILITY = _Range(lambda value: 0 <= value <= 1, "between 0 and 1")
_FRACTION = _Range(lambda value: 0 <= value < 1, "at least 0 and below 1")
_INSIDE = _Range(lambda value: 0 < value < 1, "above 0 and below 1")
_SEED = _Range(lambda value: 0 <= value < 2**31, "at least 0 and below 2^31")
_CHUNK = _Range(lambda value: value == "auto" or value.isdecimal(), "auto or at least 0")
_WARM_START = _Range(
    lambda value: value in ("clients", "batches") or value.isdecimal(),
    "clients, batches or a number",
)
_PAPER = _Range(lambda value: "=" in value, "algorithm=number")


def _at_least(lowest: int) -> _Range:
    return _Range(lambda value: value >= lowest, f"at least {lowest}")


def _flag(
    default: Any,
    text: str,
    allowed: _Range = _ANY,
    *,
    choices: Collection[str] = (),
    kind: type | None = None,
) -> Any:
    """A flag with its help text; a tuple is a comma-separated list of values of one `kind`."""
    if kind is None:
        kind = type(default[0] if isinstance(default, tuple) else default)
    metadata = {"help": text, "allowed": allowed, "choices": list(choices), "kind": kind}
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class Config:
    """Every flag of train and sweep. Raises ValueError, in one line, for a bad value."""

    algorithm: tuple[str, ...] = _flag(
        ("fedavg",), f"Algorithms: {', '.join(LISTED)}, or package.module:factory."
    )
    settings: tuple[str, ...] = _flag(
        (),
        "A hyperparameter, name=value or (sweep) name=value,value; repeat the flag for several. "
        "Names are the keyword arguments of the algorithm's factory.",
        kind=str,
    )
    dataset: str = _flag(
        "digits", "digits, a TFDS name, the path of an .npz or of a folder of images."
    )
    environment: str = _flag(
        "rotated", "How domains are made of the data set.", choices=registry.ENVIRONMENTS
    )
    angles: tuple[float, ...] = _flag(
        (0.0, 15.0, 30.0, 45.0, 60.0, 75.0), "Degrees of the rotated domains."
    )
    num_classes: int = _flag(
        2, "Classes that colored and patched environments make of the data's.", _at_least(2)
    )
    flips: tuple[float, ...] = _flag(
        (0.2, 0.1),
        "How often the colour (or patch) disagrees with the label, per training environment.",
        _PROBABILITY,
    )
    test_flip: float = _flag(0.9, "The same in the test environment.", _PROBABILITY)
    label_noise: float = _flag(0.25, "How often the label disagrees with the image.", _PROBABILITY)
    binarise: bool = _flag(True, "Whether colored makes every pixel that is not 0 white.")
    held_out: str = _flag(
        "",
        "The domain that only the test sees; sweep: several with commas, or 'all', each in turn; "
        "'none': the official test split, or a random fifth. Default: the last domain, or none "
        "if there is only one.",
    )
    test_fraction: float = _flag(
        0.2,
        "The part of the examples that is drawn for the test where the data have no test split, "
        "and no domain of theirs is held out.",
        _INSIDE,
    )
    partition: str = _flag(
        "domain",
        "How clients share the training examples.",
        choices=("domain", "iid", "dirichlet"),
    )
    alpha: float = _flag(0.5, "Concentration of --partition=dirichlet.", _POSITIVE)
    clients: int = _flag(0, "Training clients; 0: one per training domain.", _at_least(0))
    cohort: int = _flag(0, "Clients drawn each round; 0: all.", _at_least(0))
    rounds: int = _flag(50, "Communication rounds.", _at_least(1))
    local_epochs: int = _flag(1, "Passes over a client's examples per round.", _at_least(1))
    local_steps: int = _flag(0, "If above 0: steps per round instead of passes.", _at_least(0))
    batch_size: int = _flag(32, "Examples per step; 0: all of the client's.", _at_least(0))
    optimizer: str = _flag("sgd", "The clients' optimizer.", choices=registry.OPTIMIZERS)
    learning_rate: tuple[float, ...] = _flag((0.1,), "Of the clients; sweep: several.", _POSITIVE)
    momentum: float = _flag(0.0, "Of the clients' sgd; it starts anew every round.", _FRACTION)
    server_optimizer: str = _flag(
        "sgd",
        "sgd: FedAvg, or with --server_momentum FedAvgM; adam: FedAdam; yogi: FedYogi.",
        choices=registry.SERVER_OPTIMIZERS,
    )
    server_learning_rate: tuple[float, ...] = _flag(
        (1.0,), "Of the server; sweep: several.", _POSITIVE
    )
    server_momentum: float = _flag(0.0, "Of the server's sgd.", _FRACTION)
    model: str = _flag(
        "mlp", f"The network: {', '.join(registry.MODELS)}, or package.module:factory."
    )
    widths: tuple[int, ...] = _flag(
        (), "Widths of the hidden layers; default: the network's own.", _at_least(1), kind=int
    )
    activation: str = _flag("relu", "Of the mlp.", choices=ACTIVATIONS)
    norm: str = _flag("none", "In the mlp's hidden layers, before the activation.", choices=NORMS)
    cut: int = _flag(
        -1, "Hidden layers before the cut; -1: all, the head is the classifier.", _at_least(-1)
    )
    conv: str = _flag(
        "auto",
        "How convolutions are computed; auto: what is fast on this platform.",
        choices=lowerings.LOWERINGS,
    )
    seeds: tuple[int, ...] = _flag(
        (0,), "Each seeds network, partition, cohorts and minibatches of a run.", _SEED
    )
    data_seed: int = _flag(0, "Seeds which example goes to which environment.", _SEED)
    eval_every: int = _flag(5, "Rounds between evaluations.", _at_least(1))
    watch_examples: int = _flag(
        0,
        "Training (of all clients) and test examples on which the accuracy is taken in every "
        "round; 0: in no round.",
        _at_least(0),
    )
    stop_below: tuple[float, ...] = _flag(
        (),
        "Thresholds: tell what there was when the watched training accuracy first fell below.",
        _INSIDE,
        kind=float,
    )
    warm_start: str = _flag(
        "clients",
        "Rounds before a stop: a number, clients (one for each) or batches (one for each batch of "
        "the client with most examples).",
        _WARM_START,
    )
    after_stop: str = _flag(
        "continue",
        "Whether training goes on when all of --stop_below have been met, or ends with that state.",
        choices=("continue", "end"),
    )
    checkpoint_every: int = _flag(
        0, "Rounds between checkpoints, a multiple of eval_every; 0: eval_every.", _at_least(0)
    )
    nonfinite: str = _flag(
        "stop",
        "When a client's loss becomes NaN or infinite: stop the program; drop the client from that "
        "round; or mark the run as diverged, never to be selected, and let the others go on.",
        choices=("stop", "drop", "mark"),
    )
    client_chunk: str = _flag(
        "auto", "Clients trained at once on a device; 0: all; auto: measured.", _CHUNK
    )
    run_chunk: str = _flag(
        "auto", "Runs (seeds x hyperparameters) at once; 0: all; auto: as many as fit.", _CHUNK
    )
    devices: int = _flag(1, "Devices that share the clients; on a CPU, cores.", _at_least(1))
    coordinator_address: str = _flag("", "host:port of process 0, where there are several.")
    num_processes: int = _flag(
        1, "Processes, on one machine or many, whose devices share the clients.", _at_least(1)
    )
    process_id: int = _flag(0, "Which of the processes this is; 0 writes.", _at_least(0))
    image_size: int = _flag(
        0, "Side in pixels that a folder's images are scaled to; 0: as they are.", _at_least(0)
    )
    num_images: int = _flag(
        0, "How many images of --dataset=dsprites are rendered; 0: 20,000.", _at_least(0)
    )
    run_dir: str = _flag("", "Where results go; default: runs/ and the run's name.")
    data_dir: str = _flag("", "The TFDS folder; default: $TFDS_DATA_DIR, or TFDS's own.")
    resume: bool = _flag(False, "Continue what --run_dir holds, bit for bit.")
    paper: tuple[str, ...] = _flag(
        (), "Numbers to print beside ours: algorithm=number.", _PAPER, kind=str
    )

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            flag, allowed = _flag_name(field), field.metadata["allowed"]
            for item in value if isinstance(value, tuple) else (value,):
                if field.metadata["choices"]:
                    registry.check_known(flag, item, field.metadata["choices"])
                if not allowed.holds(item):
                    raise ValueError(f"--{flag}={item}: must be {allowed.text}")
        several = ("algorithm", "learning_rate", "server_learning_rate", "seeds", "stop_below")
        for name in several:
            values = getattr(self, name)
            if (len(values) == 0 and name != "stop_below") or len(set(values)) < len(values):
                text = ",".join(str(value) for value in values)
                raise ValueError(f"--{name}={text}: must be one or several different values")
        if self.clients:
            self._check_most("cohort", "clients")
        self._check_most("eval_every", "rounds")
        flipped = self.environment in ("colored", "patched") and self.partition == "domain"
        if flipped and self.clients > len(self.flips):
            text = ",".join(f"{flip:g}" for flip in self.flips)
            raise ValueError(
                f"--clients={self.clients}: must be at most one for each --flips={text}"
            )
        if self.stop_below and not self.watch_examples:
            text = ",".join(f"{value:g}" for value in self.stop_below)
            raise ValueError(f"--stop_below={text}: needs --watch_examples above 0")
        registry.check_factory("model", self.model, registry.MODELS)
        for name in self.algorithm:
            registry.check_factory("algorithm", name, LISTED)
            if (
                registry.facts(name).needs_norm
                and self.norm == "none"
                and self.model in registry.MODELS
            ):
                raise ValueError(f"--algorithm={name}: needs --norm=batch, to be what it is")
        if self.after_stop == "end" and not self.stop_below:
            raise ValueError("--after_stop=end: needs --stop_below")
        if self.process_id >= self.num_processes:
            raise ValueError(
                f"--process_id={self.process_id}: must be below --num_processes="
                f"{self.num_processes}"
            )
        if self.num_processes > 1:
            if not self.coordinator_address:
                raise ValueError("--coordinator_address=: must be host:port of process 0")
            for name in ("client_chunk", "run_chunk"):
                if getattr(self, name) == "auto":
                    raise ValueError(
                        f"--{name}=auto: must be a number with --num_processes="
                        f"{self.num_processes}, as processes that measure may disagree"
                    )
        if self.checkpoint_every % self.eval_every:
            raise ValueError(
                f"--checkpoint_every={self.checkpoint_every}: must be a multiple of "
                f"--eval_every={self.eval_every}"
            )

    def _check_most(self, name: str, limit: str) -> None:
        value, most = getattr(self, name), getattr(self, limit)
        if value > most:
            raise ValueError(f"--{name}={value}: must be at most --{limit}={most}")


def _flag_name(field: Any) -> str:
    return "set" if field.name == "settings" else field.name


def define(values: flags.FlagValues = flags.FLAGS, **defaults: Any) -> None:
    """Defines the flags, with other defaults for some."""
    for field in dataclasses.fields(Config):
        name, text = _flag_name(field), field.metadata["help"]
        default, kind = defaults.get(field.name, field.default), field.metadata["kind"]
        if field.metadata["choices"]:
            text += f" One of: {', '.join(field.metadata['choices'])}."
        if name == "set":
            flags.DEFINE_multi_string(name, [], text, values)
        elif isinstance(default, tuple):
            texts = [f"{v:g}" if kind is float else str(v) for v in default]
            flags.DEFINE_list(name, texts, text, values)
        elif kind is bool:
            flags.DEFINE_bool(name, default, text, values)
        elif kind is int:
            flags.DEFINE_integer(name, default, text, flag_values=values)
        elif kind is float:
            flags.DEFINE_float(name, default, text, flag_values=values)
        else:
            flags.DEFINE_string(name, default, text, values)


def read(values: flags.FlagValues = flags.FLAGS) -> Config:
    """The parsed flags as a `Config`; raises ValueError, in one line, for a bad value."""
    parsed = values.flag_values_dict()
    settings: dict[str, Any] = {}
    for field in dataclasses.fields(Config):
        value = parsed[_flag_name(field)]
        settings[field.name] = _items(field, value) if isinstance(value, list) else value
    return Config(**settings)


def from_arguments(arguments: Sequence[str], **defaults: Any) -> Config:
    """The `Config` of flags as a command line has them; raises ValueError, in one line."""
    values = flags.FlagValues()
    define(values, **defaults)
    parse(["", *arguments], values)
    return read(values)


def _items(field: Any, texts: list[str]) -> tuple[Any, ...]:
    kind = field.metadata["kind"]
    try:
        return tuple(kind(text) for text in texts)
    except ValueError:
        name = "whole numbers" if kind is int else "numbers"
        raise ValueError(f"--{field.name}={','.join(texts)}: must be {name}") from None


def parse(argv: Sequence[str], values: flags.FlagValues = flags.FLAGS) -> None:
    """Sets flags as a command line has them, after its first word.

    Raises ValueError, in one line, for what is no flag.
    """
    try:
        _, *others = values(_with_presets(argv))
    except flags.Error as error:
        raise ValueError(str(error)) from None
    if others:
        raise ValueError(f"{others[0]}: not a flag; flags are --name=value")


def _with_presets(argv: Sequence[str]) -> list[str]:
    """Replaces --preset=NAME,NAME by the flag files of those names; later ones win."""
    known = sorted(path.stem for path in PRESETS.glob("*.flags"))
    expanded = []
    for argument in argv:
        flag, _, names = argument.lstrip("-").partition("=")
        if argument.startswith("-") and flag == "preset":
            for name in names.split(","):
                registry.check_known("preset", name, known)
                expanded.append(f"--flagfile={PRESETS / name}.flags")
        else:
            expanded.append(argument)
    return expanded
