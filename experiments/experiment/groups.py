"""Every flag of the binaries, in groups: one frozen record for each.

`config` makes them of flat flags, `effects` knows which have none, `build` makes parts of them.
"""

import dataclasses
from pathlib import Path
from typing import Any

from experiments.flags import names as registry
from experiments.flags.flag import (
    FINITE,
    FRACTION,
    INSIDE,
    POSITIVE,
    PROBABILITY,
    SEED,
    Range,
    at_least,
    flag,
    flags_of,
    is_real,
    is_whole,
    number_or,
    pair,
)
from experiments.parts import environments, optimizers
from experiments.parts.environments.kind import Kind
from experiments.parts.selection import RULES
from fedjax_inv import missing, schedules
from fedjax_inv.algorithms import LISTED
from fedjax_inv.checks import UsageError
from fedjax_inv.models import lowerings, resnet
from fedjax_inv.models.mlp import ACTIVATIONS, NORMS


def _is_probability(text: str) -> bool:
    try:
        return 0 <= float(text) <= 1
    except ValueError:
        return False


_PAPER = Range(lambda value: is_real(value.partition("=")[2]), "algorithm=number")
_PART = Range(lambda value: 0 < value <= 1, "above 0 and at most 1")
_CHUNK = number_or("auto", "measure")

_OF_OPTAX = ", or another of optax that needs a learning rate only"
_SETTING = (
    "An argument of that optimizer, name=value, instead of optax's default; repeat the flag for "
    "several."
)
_DECAY = "Of an exponential schedule: what the rate is multiplied by in each round."
_FINAL_RATE = "Of a cosine schedule: the rate at its end, as a part of the learning rate."
_WARMUP = "Rounds in which the rate rises linearly, before the schedule begins."


def _is_delay(text: str) -> bool:
    if is_whole(text):
        return True
    kind, _, value = text.partition(":")
    try:
        return kind == "geometric" and 0 < float(value) <= 1
    except ValueError:
        return False


def _is_period(text: str) -> bool:
    client, colon, period = text.rpartition(":")
    return is_whole(period, 1) and (not colon or is_whole(client))


@dataclasses.dataclass(frozen=True)
class Method:
    """What is compared."""

    algorithm: tuple[str, ...] = flag(
        ("fedavg",), f"Algorithms: {', '.join(LISTED)}, or package.module:factory."
    )
    settings: tuple[str, ...] = flag(
        (),
        "A setting of the algorithm, name=value or (sweep) name=value,value; repeat the flag for "
        "several. --describe=ALGORITHM tells the names. A later value replaces that of a preset; "
        "--set=name= takes it back, and --set= all that stand before.",
        kind=str,
        name="set",
        repeats=True,
    )
    paper: tuple[str, ...] = flag(
        (), "Numbers to print beside ours: algorithm=number.", _PAPER, kind=str
    )


@dataclasses.dataclass(frozen=True)
class Data:
    """Which examples there are, and which of them only the test sees."""

    dataset: str = flag(
        "digits",
        "digits, dsprites, a TFDS name, or the path of an .npz, of a folder of images, of "
        "Tiny-ImageNet, of LEAF's FEMNIST (.json) or of Sentiment140 (.csv).",
    )
    data_dir: str = flag("", "The TFDS folder; default: $TFDS_DATA_DIR, or TFDS's own.")
    image_size: int = flag(
        0, "Side in pixels that a folder's images are scaled to; 0: as they are.", at_least(0)
    )
    stride: int = flag(
        1, "Every so many pixels of a row and of a column are kept (2: 14x14 MNIST).", at_least(1)
    )
    num_images: int = flag(
        0, "How many images of --dataset=dsprites are rendered; 0: 20,000.", at_least(0)
    )
    vocabulary: int = flag(
        0,
        "Words of a text that are told apart, the most frequent in training; 0: 10,000.",
        at_least(0),
    )
    text_length: int = flag(
        0, "Words that a text is cut off at, or filled up to; 0: 30.", at_least(0)
    )
    held_out: str = flag(
        "",
        "The domain that only the test sees; sweep: several with commas, or 'all', each in turn; "
        "'none': the official test split, or a random part. Default: the last domain, or none "
        "if there is only one.",
    )
    test_fraction: float = flag(
        0.2,
        "The part of the examples that is drawn for the test where the data have no test split, "
        "and no domain of theirs is held out.",
        INSIDE,
    )

    @property
    def stem(self) -> str:
        """The data set's name without folders and ending, for titles and names of folders."""
        return Path(self.dataset).stem


@dataclasses.dataclass(frozen=True)
class Environment:
    """How domains are made of the data."""

    environment: str = flag(
        "auto",
        "How domains are made of the data; auto: none for a file or a folder, else rotated.",
        choices=("auto", *environments.LISTED),
    )
    data_seed: str = flag(
        "each",
        "Seeds which example goes to which environment, and what is drawn there; each: every seed "
        "draws its own.",
        number_or("each"),
    )
    name: str = "rotated"  # of the list: what auto stands for
    records: tuple[Any, ...] = ()  # the flags of that kind

    @property
    def kind(self) -> Kind:
        """What the list says of it."""
        return environments.LISTED[self.name]

    @property
    def is_drawn(self) -> bool:
        """Whether anything in it is drawn."""
        return self.name != "none"


@dataclasses.dataclass(frozen=True)
class Partition:
    """How clients share the training examples."""

    partition: str = flag(
        "domain",
        "How clients share the training examples; dirichlet: each class in shares that are drawn; "
        "quantity: all in sizes that are drawn; shards: pieces of them, sorted by label; user: "
        "each user's go to one client.",
        choices=("domain", "iid", "dirichlet", "quantity", "shards", "user"),
    )
    alpha: float = flag(
        0.5, "Concentration of --partition=dirichlet and --partition=quantity.", POSITIVE
    )
    min_size: int = flag(
        -1,
        "The fewest examples of a client of those two partitions; -1: as many as classes.",
        at_least(-1),
    )
    classes_per_client: int = flag(
        2,
        "How many shards of one size a client of --partition=shards gets; one holds a class, or "
        "the end of one and the beginning of the next.",
        at_least(1),
    )
    clients: int = flag(0, "Training clients; 0: one per training domain.", at_least(0))
    imbalance: float = flag(
        1.0,
        "How many times the training examples of the last class the first one has; the others lie "
        "on a curve between, and what is too much is left out. 1: the data's own.",
        Range(lambda value: 1 <= value < float("inf"), "at least 1"),
    )


@dataclasses.dataclass(frozen=True)
class Clients:
    """What a client does in a round."""

    local_epochs: int = flag(1, "Passes over a client's examples per round.", at_least(1))
    local_steps: int = flag(0, "If above 0: steps per round instead of passes.", at_least(0))
    batch_size: int = flag(32, "Examples per step; 0: all of the client's.", at_least(0))
    optimizer: str = flag(
        "sgd",
        f"The clients' optimizer: sgd, adam, adamw, rmsprop, lion{_OF_OPTAX}. It starts anew every "
        "round.",
    )
    optimizer_settings: tuple[str, ...] = flag(
        (), _SETTING, kind=str, name="optimizer_set", repeats=True
    )
    learning_rate: tuple[float, ...] = flag((0.1,), "Of the clients; sweep: several.", POSITIVE)
    schedule: str = flag(
        "constant",
        "How the clients' learning rate goes with the rounds.",
        choices=optimizers.SCHEDULES,
    )
    decay: float = flag(0.99, _DECAY, _PART)
    final_rate: float = flag(0.0, _FINAL_RATE, PROBABILITY)
    warmup_rounds: int = flag(0, _WARMUP, at_least(0))
    schedule_rounds: int = flag(
        0,
        "Rounds from the first to the end of a cosine schedule, the clients' or the server's; 0: "
        "--rounds, which then cannot grow.",
        at_least(0),
    )
    momentum: float = flag(0.0, "Of the clients' sgd.", FRACTION)
    clip: float = flag(
        0.0,
        "The largest norm of a local step's gradient, which is scaled down; 0: any.",
        FINITE,
    )
    weight_decay: float = flag(
        0.0, "Times the parameters: added to a local step's gradient (L2).", FINITE
    )


@dataclasses.dataclass(frozen=True)
class Server:
    """What the server makes of the clients' updates."""

    server_optimizer: str = flag(
        "sgd",
        "sgd: FedAvg, or with --server_momentum FedAvgM; adam: FedAdam; yogi: FedYogi, both with "
        f"b2=0.99{_OF_OPTAX}.",
    )
    server_optimizer_settings: tuple[str, ...] = flag(
        (), _SETTING, kind=str, name="server_optimizer_set", repeats=True
    )
    server_learning_rate: tuple[float, ...] = flag(
        (1.0,), "Of the server; sweep: several.", POSITIVE
    )
    server_schedule: str = flag(
        "constant",
        "How the server's learning rate goes with the rounds.",
        choices=optimizers.SCHEDULES,
    )
    server_decay: float = flag(0.99, _DECAY, _PART)
    server_final_rate: float = flag(0.0, _FINAL_RATE, PROBABILITY)
    server_warmup_rounds: int = flag(0, _WARMUP, at_least(0))
    server_momentum: float = flag(0.0, "Of the server's sgd.", FRACTION)
    server_epsilon: float = flag(
        1e-3, "What the server's adam and yogi add to the root of the second moment.", POSITIVE
    )
    server_clip: float = flag(
        0.0,
        "The largest norm of the server's gradient, which is scaled down; 0: any.",
        FINITE,
    )
    server_weight_decay: float = flag(
        0.0, "Times the parameters: added to the server's gradient (L2).", FINITE
    )


@dataclasses.dataclass(frozen=True)
class Network:
    """The network."""

    model: str = flag(
        "mlp", f"The network: {', '.join(registry.MODELS)}, or package.module:factory."
    )
    widths: tuple[int, ...] = flag(
        (), "Widths of the hidden layers; default: the network's own.", at_least(1), kind=int
    )
    activation: str = flag("relu", "Of the mlp.", choices=ACTIVATIONS)
    norm: str = flag(
        "none",
        "Normalisation layers; none: as the network has them by default (mlp: none, resnet18: "
        "batch).",
        choices=dict.fromkeys((*NORMS, *resnet.NORMS)),
    )
    cut: int = flag(
        -1, "Hidden layers before the cut; -1: all, the head is the classifier.", at_least(-1)
    )
    weights: str = flag(
        "",
        "Of the resnet18: a .safetensors or .npz file in torchvision's names, trained on images "
        "normalised as ImageNet's.",
    )
    init_from: str = flag(
        "",
        "A run folder (of a sweep, one of its cells), or a checkpoint in it: training starts from "
        "the global network of the newest one. A seed starts from the run of the same seed, or, "
        "where there is none, from the run's first. --weights then tells only how images are "
        "normalised.",
    )
    augment: bool = flag(
        False, "Whether training images (RGB) are cropped, flipped and coloured at random."
    )
    dtype: str = flag(
        "float32",
        "What the network computes in; parameters, losses and the server's sums are float32.",
        choices=("float32", "bfloat16"),
    )
    conv: str = flag(
        "auto",
        "How convolutions are computed; auto: what is fast on this platform.",
        choices=lowerings.LOWERINGS,
    )


@dataclasses.dataclass(frozen=True)
class Participation:
    """Who takes part in a round."""

    cohort: int = flag(0, "Clients drawn each round; 0: all.", at_least(0))
    sampling_rate: float = flag(
        1.0, "The part of the clients that is drawn each round, instead of --cohort.", _PART
    )
    slow: tuple[str, ...] = flag(
        (),
        "Clients that need several rounds for an update, as client:rounds; it then comes from the "
        "network of so many rounds ago.",
        pair(lambda value: is_whole(value, 1), "a number of rounds above 0"),
        kind=str,
    )
    lossy: tuple[str, ...] = flag(
        (),
        "Clients whose updates arrive with a probability, as client:probability.",
        pair(_is_probability, "a probability"),
        kind=str,
    )
    dropout: float = flag(
        0.0,
        "With which probability the update of a client that is drawn does not arrive.",
        FRACTION,
    )
    delay: str = flag(
        "0",
        "How many rounds ago the network was sent that an update is computed from: a number; or "
        "geometric:p, each update's own, d with probability p (1 - p)^d, at most --longest_delay.",
        Range(_is_delay, "a number of rounds, or geometric:p with p above 0 and at most 1"),
    )
    upload_every: tuple[str, ...] = flag(
        (),
        "Clients take part in every so many rounds only, from the first on: a number for all, or "
        "client:rounds for some.",
        Range(_is_period, "a number of rounds above 0, or client:rounds"),
        kind=str,
    )
    frequency: float = flag(
        1.0, "With which probability an update of a --sparse client arrives in a round.", _PART
    )
    sparse: float = flag(
        0.5, "The part of the clients, drawn with the seed, that --frequency is for.", PROBABILITY
    )
    late: str = flag(
        "drop",
        "What becomes of updates that do not arrive in their round: they are dropped; or, stale, "
        "they arrive when their client is next drawn and does not fail.",
        choices=("drop", "stale"),
    )
    longest_delay: int = flag(
        10,
        "Rounds after which a client of --late=stale begins anew, and the most that "
        "--delay=geometric:p draws.",
        at_least(1),
    )
    missing: str = flag(
        "skip",
        "What stands in for an update that does not arrive: nothing, or the client's last one.",
        choices=missing.RULES,
    )
    first_all: bool = flag(False, "Whether all clients take part once at the beginning.")

    def slots(self, num_clients: int) -> int:
        """How many of the clients are drawn in a round; a single one, which may stand for all data,
        always is."""
        if self.cohort or self.sampling_rate == 1 or num_clients == 1:
            return min(self.cohort or num_clients, num_clients)
        try:
            return schedules.cohort_size(num_clients, self.sampling_rate)
        except UsageError as error:
            told = str(error).removeprefix(f"rate={self.sampling_rate}: ")
            told = told.replace("num_clients=", "--clients=")
            raise UsageError(f"--sampling_rate={self.sampling_rate}: {told}") from None


@dataclasses.dataclass(frozen=True)
class Watching:
    """When a run is looked at, and when it stops."""

    eval_every: int = flag(5, "Rounds between evaluations.", at_least(1))
    watch_examples: int = flag(
        0,
        "Training (of all clients) and test examples on which the accuracy is taken in every "
        "round; 0: in no round.",
        at_least(0),
    )
    watch_gradients: bool = flag(
        False,
        "Whether evaluations tell each training client's gradient norm and <grad R(w), w>, and the "
        "mean cosine between clients; drawn as gradients.png.",
    )
    watch_classes: bool = flag(
        False,
        "Whether evaluations tell the test accuracy of each class, that of test examples in the "
        "proportions of each client's classes, and the means of both.",
    )
    stop_below: tuple[float, ...] = flag(
        (),
        "Thresholds: tell what there was when the watched training accuracy first fell below.",
        INSIDE,
        kind=float,
    )
    stop_above: tuple[float, ...] = flag(
        (),
        "The same when it was first as high; instead of --stop_below, and without --warm_start.",
        INSIDE,
        kind=float,
    )
    warm_start: str = flag(
        "clients",
        "Rounds before a stop: a number, clients (one for each) or batches (one for each batch of "
        "the client with most examples).",
        number_or("clients", "batches"),
    )
    after_stop: str = flag(
        "continue",
        "Whether training goes on when all of --stop_below (or --stop_above) have been met, or "
        "ends with that state.",
        choices=("continue", "end"),
    )
    tensorboard: bool = flag(
        False,
        "Whether evaluations are also written as TensorBoard events, to tensorboard/ in the folder "
        "of a run; needs the package tensorboardX.",
    )
    select: str = flag(
        "validation",
        "What is selected of a run, and between hyperparameters by the mean over seeds: "
        + "; ".join(f"{name}, {rule.text}" for name, rule in RULES.items())
        + ".",
        choices=RULES,
    )

    @property
    def thresholds(self) -> tuple[float, ...]:
        """Of either kind of stop."""
        return self.stop_below or self.stop_above


@dataclasses.dataclass(frozen=True)
class Running:
    """How long, how often, where and on what."""

    rounds: int = flag(
        50, "Communication rounds; with --resume a run may be given more of them.", at_least(1)
    )
    seeds: tuple[int, ...] = flag(
        (0,), "Each seeds network, environments, partition, cohorts and minibatches.", SEED
    )
    run_dir: str = flag(
        "", "Where results go; default: runs/, the run's name, and what differs from the defaults."
    )
    resume: bool = flag(False, "Continue what --run_dir holds, bit for bit.")
    checkpoint_every: int = flag(
        0, "Rounds between checkpoints, a multiple of eval_every; 0: eval_every.", at_least(0)
    )
    nonfinite: str = flag(
        "stop",
        "When a client's loss becomes NaN or infinite: stop the program; drop the client from that "
        "round; or mark the run as diverged, never to be selected, and let the others go on.",
        choices=("stop", "drop", "mark"),
    )
    client_chunk: str = flag(
        "auto",
        "Clients trained at once on a device; 0: all; auto: 1 on a CPU, else as many as fit; "
        "measure: the fastest by a stopwatch.",
        _CHUNK,
    )
    run_chunk: str = flag(
        "auto",
        "Runs (seeds x hyperparameters) at once; 0: all; auto: 1 on a CPU, else as many as fit; "
        "measure: the fastest by a stopwatch.",
        _CHUNK,
    )
    devices: int = flag(1, "Devices that share the clients; on a CPU, cores.", at_least(1))
    hold: str = flag(
        "auto",
        "What each of several devices holds: the examples and states of its own clients, which it "
        "alone trains; or of all, for less waiting where few attend; auto: own where all clients "
        "attend each round.",
        choices=("auto", "own", "all"),
    )
    coordinator_address: str = flag("", "host:port of process 0, where there are several.")
    num_processes: int = flag(
        1, "Processes, on one machine or many, whose devices share the clients.", at_least(1)
    )
    process_id: int = flag(0, "Which of the processes this is; 0 writes.", at_least(0))


@dataclasses.dataclass(frozen=True)
class Config:
    """All flags; made by `config.of`."""

    method: Method
    data: Data
    environment: Environment
    partition: Partition
    clients: Clients
    server: Server
    model: Network
    participation: Participation
    watching: Watching
    run: Running

    @property
    def title(self) -> str:
        """What pictures and tables call the data and how their domains are made."""
        made_of = f", {self.environment.name} domains" if self.environment.is_drawn else ""
        return f"{self.data.stem}{made_of}"

    @property
    def schedules_end(self) -> int:
        """The round in which schedules of learning rates come to their end; 0: they have none."""
        kinds = (self.clients.schedule, self.server.server_schedule)
        return (self.clients.schedule_rounds or self.run.rounds) if "cosine" in kinds else 0


GROUPS: dict[str, type[Any]] = {
    "method": Method,
    "data": Data,
    "environment": Environment,
    "partition": Partition,
    "clients": Clients,
    "server": Server,
    "model": Network,
    "participation": Participation,
    "watching": Watching,
    "run": Running,
}


def fields(group: str) -> list[dataclasses.Field[Any]]:
    """The flags of a group, those of all environments among them."""
    own = flags_of(GROUPS[group])
    if group != "environment":
        return own
    kinds = environments.LISTED.values()
    records = dict.fromkeys(record for kind in kinds for record in kind.records)
    return own + [field for record in records for field in flags_of(record)]


# By their fields' names.
FLAGS = {field.name: field for group in GROUPS for field in fields(group)}
