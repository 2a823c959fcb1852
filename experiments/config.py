"""Every flag of the binaries, in groups: one frozen record for each, checked.

Flags are flat for users, and in run folders; here `of` sorts them into groups and `flat` is its
inverse. Nothing here knows of command lines (`command_line`) or builds anything (`build`).
"""

import dataclasses
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from experiments import environments, registry
from experiments.environments.kind import Kind
from experiments.flag import (
    FRACTION,
    INSIDE,
    POSITIVE,
    SEED,
    Range,
    at_least,
    check,
    check_different,
    check_known,
    flag,
    flags_of,
    name_of,
    number_or,
    pair,
    shown,
)
from experiments.selection import RULES
from fedjax_inv import missing
from fedjax_inv.algorithms import LISTED
from fedjax_inv.checks import UsageError
from fedjax_inv.models import lowerings, resnet
from fedjax_inv.models.mlp import ACTIVATIONS, NORMS


def _is_probability(text: str) -> bool:
    try:
        return 0 <= float(text) <= 1
    except ValueError:
        return False


_PAPER = Range(lambda value: "=" in value, "algorithm=number")
_CHUNK = number_or("auto", "measure")


@dataclasses.dataclass(frozen=True)
class Method:
    """What is compared."""

    algorithm: tuple[str, ...] = flag(
        ("fedavg",), f"Algorithms: {', '.join(LISTED)}, or package.module:factory."
    )
    settings: tuple[str, ...] = flag(
        (),
        "A setting of the algorithm, name=value or (sweep) name=value,value; repeat the flag for "
        "several. --describe=ALGORITHM tells the names.",
        kind=str,
        name="set",
    )
    paper: tuple[str, ...] = flag(
        (), "Numbers to print beside ours: algorithm=number.", _PAPER, kind=str
    )


@dataclasses.dataclass(frozen=True)
class Data:
    """Which examples there are, and which of them only the test sees."""

    dataset: str = flag(
        "digits", "digits, a TFDS name, the path of an .npz or of a folder of images."
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
        "How domains are made of the data; auto: none for an .npz or a folder, else rotated.",
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
        "How clients share the training examples.",
        choices=("domain", "iid", "dirichlet"),
    )
    alpha: float = flag(0.5, "Concentration of --partition=dirichlet.", POSITIVE)
    clients: int = flag(0, "Training clients; 0: one per training domain.", at_least(0))


@dataclasses.dataclass(frozen=True)
class Clients:
    """What a client does in a round."""

    local_epochs: int = flag(1, "Passes over a client's examples per round.", at_least(1))
    local_steps: int = flag(0, "If above 0: steps per round instead of passes.", at_least(0))
    batch_size: int = flag(32, "Examples per step; 0: all of the client's.", at_least(0))
    optimizer: str = flag("sgd", "The clients' optimizer.", choices=registry.OPTIMIZERS)
    learning_rate: tuple[float, ...] = flag((0.1,), "Of the clients; sweep: several.", POSITIVE)
    momentum: float = flag(0.0, "Of the clients' sgd; it starts anew every round.", FRACTION)
    clip: float = flag(
        0.0,
        "The largest norm of a local step's gradient, which is scaled down; 0: any.",
        at_least(0),
    )
    weight_decay: float = flag(
        0.0, "Times the parameters: added to a local step's gradient (L2).", at_least(0)
    )


@dataclasses.dataclass(frozen=True)
class Server:
    """What the server makes of the clients' updates."""

    server_optimizer: str = flag(
        "sgd",
        "sgd: FedAvg, or with --server_momentum FedAvgM; adam: FedAdam; yogi: FedYogi.",
        choices=registry.SERVER_OPTIMIZERS,
    )
    server_learning_rate: tuple[float, ...] = flag(
        (1.0,), "Of the server; sweep: several.", POSITIVE
    )
    server_momentum: float = flag(0.0, "Of the server's sgd.", FRACTION)
    server_epsilon: float = flag(
        1e-3, "What the server's adam and yogi add to the root of the second moment.", POSITIVE
    )
    server_weight_decay: float = flag(
        0.0, "Times the parameters: added to the server's gradient (L2).", at_least(0)
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
    augment: bool = flag(
        False, "Whether training images (RGB) are cropped, flipped and coloured at random."
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
    slow: tuple[str, ...] = flag(
        (),
        "Clients that need several rounds for an update, as client:rounds; it then comes from the "
        "network of so many rounds ago.",
        pair(lambda value: value.isdecimal() and int(value) >= 1, "a number of rounds above 0"),
        kind=str,
    )
    lossy: tuple[str, ...] = flag(
        (),
        "Clients whose updates arrive with a probability, as client:probability.",
        pair(_is_probability, "a probability"),
        kind=str,
    )
    missing: str = flag(
        "skip",
        "What stands in for an update that does not arrive: nothing, or the client's last one.",
        choices=missing.RULES,
    )
    first_all: bool = flag(False, "Whether all clients take part once at the beginning.")


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
    stop_below: tuple[float, ...] = flag(
        (),
        "Thresholds: tell what there was when the watched training accuracy first fell below.",
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
        "Whether training goes on when all of --stop_below have been met, or ends with that state.",
        choices=("continue", "end"),
    )
    select: str = flag(
        "validation",
        "What is selected of a run, and between hyperparameters by the mean over seeds: "
        + "; ".join(f"{name}, {rule.text}" for name, rule in RULES.items())
        + ".",
        choices=RULES,
    )


@dataclasses.dataclass(frozen=True)
class Running:
    """How long, how often, where and on what."""

    rounds: int = flag(50, "Communication rounds.", at_least(1))
    seeds: tuple[int, ...] = flag(
        (0,), "Each seeds network, environments, partition, cohorts and minibatches.", SEED
    )
    run_dir: str = flag("", "Where results go; default: runs/ and the run's name.")
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
    coordinator_address: str = flag("", "host:port of process 0, where there are several.")
    num_processes: int = flag(
        1, "Processes, on one machine or many, whose devices share the clients.", at_least(1)
    )
    process_id: int = flag(0, "Which of the processes this is; 0 writes.", at_least(0))


@dataclasses.dataclass(frozen=True)
class Config:
    """All flags; made by `of`."""

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


def of(*, given: Collection[str] = (), may_be_idle: bool = False, **values: Any) -> Config:
    """The configuration of flags by their fields' names; what is left out has its default.

    given: those whose default was asked for in so many words. Raises UsageError, in one line, for a
    bad value, and unless may_be_idle for a flag that was set and has no effect (`idle`).
    """
    for name in values:
        if name not in FLAGS:
            raise TypeError(f"{name} is no flag")

    def record(kind: type[Any], **more: Any) -> Any:
        own = [field.name for field in flags_of(kind)]
        made = kind(**{name: values[name] for name in own if name in values}, **more)
        check(made)
        return made

    groups = {name: record(kind) for name, kind in GROUPS.items() if name != "environment"}
    asked = record(Environment)
    name = asked.environment
    if name == "auto":
        name = "none" if _is_own(groups["data"].dataset) else "rotated"
    records = tuple(record(kind) for kind in environments.LISTED[name].records)
    domains = dataclasses.replace(asked, name=name, records=records)
    config = Config(**groups, environment=domains)
    _check(config)
    _check_paper(config, "paper" in given)
    if not may_be_idle:
        for name, reason in idle(config, values, given).items():
            raise UsageError(f"--{name_of(FLAGS[name])}={shown(values[name])}: {reason}")
    return config


def flat(config: Config) -> dict[str, Any]:
    """The flags by their fields' names: what `of` takes."""
    groups = [getattr(config, group) for group in GROUPS]
    values = {
        field.name: getattr(record, field.name)
        for record in (*groups, *config.environment.records)
        for field in flags_of(record)
    }
    return {name: values.get(name, field.default) for name, field in FLAGS.items()}


def changed(config: Config, **values: Any) -> Config:
    """The configuration with other values of some flags."""
    return of(may_be_idle=True, **(flat(config) | values))


def to_record(config: Config) -> dict[str, Any]:
    """The flags as a run folder holds them; auto is told by what it stood for."""
    return flat(config) | {"environment": config.environment.name}


def from_record(record: Mapping[str, Any]) -> Config:
    """The configuration that a run folder holds; flags that came later have their defaults.

    Raises UsageError for a flag that is no more.
    """
    unknown = set(record) - set(FLAGS)
    if unknown:
        raise UsageError(f"was written by another version, with {', '.join(sorted(unknown))}")

    def value(name: str, told: Any) -> Any:
        kind = FLAGS[name].metadata["kind"]
        if isinstance(told, list):  # json knows no tuples
            return tuple(map(kind, told))
        return kind(told)

    return of(may_be_idle=True, **{name: value(name, told) for name, told in record.items()})


def idle(config: Config, values: Mapping[str, Any], given: Collection[str] = ()) -> dict[str, str]:
    """The flags of `values` that have no effect in this configuration, and why.

    Those at their default do not count, unless they are `given` and mean more than "off".
    """
    return {
        name: reason
        for name, reason in without_effect(config).items()
        if name in values
        and (values[name] != FLAGS[name].default or (name in given and _is_on(values[name])))
    }


def _is_on(value: Any) -> bool:
    return value not in (0, "", "0", "none", ()) or value is False


def _is_own(dataset: str) -> bool:
    """Whether a data set is a path: an .npz or a folder."""
    path = Path(dataset).expanduser()
    return path.suffix == ".npz" or (dataset not in ("digits", "dsprites") and path.is_dir())


class _Rule(NamedTuple):
    """Flags that have no effect."""

    flags: tuple[str, ...]
    reason: str


# What a network that takes the weights of a file has an argument for.
_ARGUMENT = {"weights": "image_size"}


def without_effect(config: Config) -> dict[str, str]:
    """The flags that have no effect, and why."""
    method, clients, model, run = config.method, config.clients, config.model, config.run
    environment = config.environment
    others = [kind.records for kind in environments.LISTED.values()]
    idle_records = {r for records in others for r in records} - set(environment.kind.records)
    of_environments = [field.name for record in idle_records for field in flags_of(record)]
    with_it = f"has no effect with --environment={environment.name}"
    rules = [_Rule(tuple(of_environments), with_it)]
    if not environment.is_drawn:
        rules.append(_Rule(("data_seed",), with_it))
    if config.partition.partition != "dirichlet":
        text = f"has no effect with --partition={config.partition.partition}"
        rules.append(_Rule(("alpha",), text))
    names = ",".join(method.algorithm)
    if all(registry.facts(name).pooled for name in method.algorithm):
        text = f"has no effect with --algorithm={names}, which trains on all examples at once"
        rules.append(_Rule(tuple(field.name for field in flags_of(Participation)), text))
    if clients.local_steps:
        text = f"has no effect beside --local_steps={clients.local_steps}"
        rules.append(_Rule(("local_epochs",), text))
    if not registry.takes(registry.OPTIMIZERS[clients.optimizer], "momentum"):
        text = f"has no effect with --optimizer={clients.optimizer}"
        rules.append(_Rule(("momentum",), text))
    server = config.server.server_optimizer
    if not any(
        registry.takes(registry.factory(name), "server_optimizer") for name in method.algorithm
    ):
        text = f"has no effect with --algorithm={names}, which has no such server"
        rules.append(_Rule(tuple(f.name for f in flags_of(Server)), text))
    else:
        make, text = (
            registry.SERVER_OPTIMIZERS[server],
            f"has no effect with --server_optimizer={server}",
        )
        for name in ("momentum", "epsilon"):
            if not registry.takes(make, name):
                rules.append(_Rule((f"server_{name}",), text))
    network = registry.network(model.model)
    for field in flags_of(Network):
        is_for_all = field.name in ("model", "augment")
        is_taken = registry.takes(network, _ARGUMENT.get(field.name, field.name))
        if not is_for_all and not is_taken:
            rules.append(_Rule((field.name,), f"--model={model.model} has no {field.name}"))
    if not config.watching.stop_below:
        rules.append(_Rule(("warm_start", "after_stop"), "has no effect without --stop_below"))
    if run.num_processes == 1:
        text = "has no effect without --num_processes above 1"
        rules.append(_Rule(("coordinator_address",), text))
    return {name: rule.reason for rule in rules for name in rule.flags}


def _check(config: Config) -> None:
    """Raises UsageError for flags that do not fit each other."""
    method, clients, watching, run = config.method, config.clients, config.watching, config.run
    check_different("algorithm", method.algorithm)
    check_different("learning_rate", clients.learning_rate)
    check_different("server_learning_rate", config.server.server_learning_rate)
    check_different("seeds", run.seeds)
    check_different("stop_below", watching.stop_below, may_be_empty=True)
    check_different("held_out", config.data.held_out.split(","))
    cohort, num_clients = config.participation.cohort, config.partition.clients
    if num_clients and cohort > num_clients:
        raise UsageError(f"--cohort={cohort}: must be at most --clients={num_clients}")
    if watching.eval_every > run.rounds:
        raise UsageError(
            f"--eval_every={watching.eval_every}: must be at most --rounds={run.rounds}"
        )
    if run.checkpoint_every % watching.eval_every:
        raise UsageError(
            f"--checkpoint_every={run.checkpoint_every}: must be a multiple of "
            f"--eval_every={watching.eval_every}"
        )
    if watching.stop_below and not watching.watch_examples:
        text = shown(watching.stop_below)
        raise UsageError(f"--stop_below={text}: needs --watch_examples above 0")
    registry.check_factory("model", config.model.model, registry.MODELS)
    for name in method.algorithm:
        registry.check_factory("algorithm", name, LISTED)
        is_bare = config.model.norm == "none" and config.model.model in registry.WITHOUT_NORM
        if registry.facts(name).needs_norm and is_bare:
            raise UsageError(f"--algorithm={name}: needs --norm=batch, to be what it is")
    _check_processes(run)


def _check_processes(run: Running) -> None:
    if run.process_id >= run.num_processes:
        raise UsageError(
            f"--process_id={run.process_id}: must be below --num_processes={run.num_processes}"
        )
    if run.num_processes == 1:
        return
    if not run.coordinator_address:
        raise UsageError("--coordinator_address=: must be host:port of process 0")
    for name in ("client_chunk", "run_chunk"):
        if not getattr(run, name).isdecimal():
            raise UsageError(
                f"--{name}={getattr(run, name)}: must be a number with --num_processes="
                f"{run.num_processes}, as processes may disagree"
            )


def _check_paper(config: Config, is_given: bool) -> None:
    """Raises UsageError for a number of an algorithm that is not run; a preset's may be of any."""
    for entry in config.method.paper:
        allowed = config.method.algorithm if is_given else (*config.method.algorithm, *LISTED)
        name = entry.partition("=")[0]
        if name not in allowed:
            check_known("paper", name, allowed)
