"""The configuration of an experiment: typed values in groups, each with its flag.

A function takes the group that it needs, so a reader sees what it depends on. On command lines, in
presets and in config.json the values are flat: `--rounds=5` is `config.training.rounds`.

This file imports no package that takes seconds to import, so that --help takes none.
"""

import functools
import importlib.util
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from absl import flags

from . import sheet
from .sheet import flag

_LIBRARY = importlib.util.find_spec("fedjax_inv")
assert _LIBRARY is not None
assert _LIBRARY.origin is not None
# An algorithm is a file of the library with a factory of its name.
SOURCES = Path(_LIBRARY.origin).parent / "algorithms"
ALGORITHMS = sorted(path.stem for path in SOURCES.glob("*.py") if path.stem != "__init__")
# Networks whose weights are published; the names are those of `models.BODIES`.
PUBLISHED = (
    "resnet18",
    "resnet50",
    "efficientnet_lite0",
    "vit_s16",
    "vit_b16",
    "vit_b32",
    "vit_l16",
    "dinov2_s14",
    "dinov2_b14",
    "dinov2_l14",
    "dinov2_s14_reg",
    "dinov2_b14_reg",
    "dinov2_l14_reg",
    "clip_b32",
    "clip_b16",
    "clip_l14",
    "laion_clip_b32",
    "laion_clip_b16",
    "laion_clip_h14",
)
HEADS = ("linear", "cosine", "adapter")  # on features, such as those of `fedjax-inv features`
MODELS = ("mlp", *HEADS, "cnn", "leaf_cnn", "alexnet", "lenet", "lstm", *PUBLISHED)
ENVIRONMENTS = {
    "rotated": "a domain for each of --angles and --odd_angles",
    "colored": "a colour that misleads in the test (Colored MNIST): --num_classes, --flips, "
    "--label_noise, --binarise",
    "patched": "a black corner that misleads in the test: the same flags but --binarise",
    "combinations": "a domain for each fixed rule from digit to colour: --stain",
    "stained": "colours that follow the label by another rule in the test: --stain, "
    "--training_domains, --domain_size, --agreements, --joint_colors",
    "simpson": "a colour that tells the digit in each client, but hardly over all clients: "
    "--shading, --hues, --paradox",
    "none": "the data's own domains",
}
AGGREGATES = {
    "mean": "the method's weighted mean",
    "median": "of each coordinate",
    "trimmed_mean": "without a share of the extremes of each coordinate (trimmed_mean:0.2)",
    "geometric_median": "RFA",
    "krum": "the update closest to others, for so many wrong clients (krum:1)",
    "multi_krum": "the mean of so many of them (multi_krum:1:3)",
    "clipped_mean": "of updates of at most this norm (clipped_mean:1)",
}
METRICS = {
    "balanced_accuracy": "the mean of the accuracies on each class",
    "f1": "the mean F1 of the classes that occur or are predicted, or of the labels",
    "auroc": "the area under the ROC curve, the mean over classes against the rest, or over labels",
    "average_precision": "the same of average precision",
    "calibration_error": "the expected calibration error in 15 bins",
    "brier": "the squared error of probabilities, the sum over classes or the mean over labels",
    "mae": "the mean absolute error",
    "rmse": "the root of the mean squared error",
    "r2": "the coefficient of determination, the mean over values that vary",
}
_OF_OPTAX = "or another of optax that needs a learning rate only"


def _explained(texts: Mapping[str, str], between: str) -> str:
    return "; ".join(f"{name}{between}{text}" for name, text in texts.items())


def _names_number(entry: str) -> bool:
    name, _, number = entry.partition("=")
    return bool(name) and number.replace(".", "", 1).isdecimal()


def _by_client(parse: Callable[[str], float], least: float, most: float) -> Callable[[Any], bool]:
    """Whether each entry is client:value, one for a client."""

    def holds(entries: Sequence[str]) -> bool:
        try:
            pairs = [entry.split(":") for entry in entries]
            clients = [int(client) for client, *_ in pairs]
            values = [parse(pair[1]) for pair in pairs]
        except (ValueError, IndexError):
            return False
        in_range = all(least <= value <= most for value in values)
        return in_range and len({*clients}) == len(clients) and min(clients, default=0) >= 0

    return holds


def _is_rare(text: str) -> bool:
    name, _, share = text.rpartition(":")
    try:
        return not text or (bool(name) and 0 < float(share) < 1)
    except ValueError:
        return False


def _are_chunks(texts: Sequence[str]) -> bool:
    are_known = all(text == "auto" or (text.isdecimal() and int(text) < 2**31) for text in texts)
    return are_known and len(texts) in (1, 2)


def _are_processes(texts: Sequence[str]) -> bool:
    if not texts or texts == ("auto",):
        return True
    address, *numbers = texts
    host, _, port = address.rpartition(":")
    has_address = bool(host) and port.isdecimal() and 0 < int(port) < 2**16
    if len(numbers) != 2 or not all(number.isdecimal() for number in numbers):
        return False
    return has_address and int(numbers[0]) < int(numbers[1]) < 2**31


@dataclass(frozen=True)
class Data:
    """The data set, and which of its domains only the test sees."""

    dataset: str = flag(
        "digits",
        "digits, moved_digits (nine copies of each, moved by a pixel), dsprites, a TFDS name, or "
        "the path of an .npz, of a folder of images, of LEAF's FEMNIST (.json), of a table (.csv "
        "or .parquet) of features or of paths of images, or of a folder of x.npy, y.npy and "
        "others; or sentiment140: and the path of its .csv.",
    )
    target_column: tuple[str, ...] = flag(("target",), "The columns of a table's targets.")
    domain_column: str = flag("domain", "The column of a table's domains, if there are any.")
    client_column: str = flag("client", "That of its clients, for --partition=user.")
    test_column: str = flag("test", "That of its test split: true/false or 1/0.")
    group_column: str = flag(
        "", "That of groups, such as patients, which no random split separates."
    )
    split_column: str = flag(
        "",
        "That of splits of your own: train, val, test or 0, 1, 2; in place of --test_column. With "
        "id_val or id_test, which are of domains that train, val and test are of unseen domains, "
        "as in WILDS. Default: a column called split, if there is one.",
    )
    image_column: str = flag(
        "img_filename",
        "That of paths of images, which are then the examples; columns without a flag are not "
        "read.",
    )
    ignored_columns: tuple[str, ...] = flag((), "Other columns of a table that are not features.")
    task: Literal["auto", "classes", "labels", "values"] = flag(
        "auto",
        "What a table's targets are; auto: one target is of classes if it holds texts, "
        "true/false, or whole numbers of which few differ, else of values; several are labels if "
        "they hold true/false, else values.",
    )
    image_size: int = flag(0, "Side of images of files; 0: as they are.", least=0)
    stride: int = flag(1, "Keep every n-th pixel (2: 14x14 MNIST).", least=1)
    vocabulary: int = flag(0, "Most frequent words of a text; 0: 10,000.", least=0)
    text_length: int = flag(0, "Words of a text, cut or padded; 0: 30.", least=0)
    max_examples: int = flag(0, "Examples drawn of larger data, always the same; 0: all.", least=0)
    held_out: str = flag(
        "",
        "The domain that only the test sees; for a grid several with commas, or all, each in "
        "turn; none: the official test split, or a random part. Default: the last of several, or "
        "none for a test split of unseen domains.",
        must=(
            "different names",
            lambda text: len({*text.split(",")}) == text.count(",") + 1,
        ),
    )
    validate: str = flag(
        "",
        "A domain that no client has, either, and by which --select=unseen_domain selects; next: "
        "after each domain of --held_out the one that follows it there, or of a single one that "
        "of the data.",
    )
    test_fraction: float = flag(
        0.2,
        "The random part for the test, without split or --held_out.",
        above=0.0,
        below=1.0,
    )

    @property
    def stem(self) -> str:
        """The data set's name without folders and suffix, for titles and names of run_folder."""
        return Path(self.dataset).stem

    @property
    def is_path(self) -> bool:
        """Whether the data set is a file or a folder."""
        path = Path(self.dataset).expanduser()
        is_name = self.dataset in ("digits", "moved_digits", "dsprites")
        return path.suffix in (".npz", ".json", ".csv", ".parquet") or (
            not is_name and os.path.isdir(path)
        )


@dataclass(frozen=True)
class Environment:
    """How domains are made of the data."""

    environment: Literal[
        "auto", "rotated", "colored", "patched", "combinations", "stained", "simpson", "none"
    ] = flag(
        "auto",
        f"{_explained(ENVIRONMENTS, ': ')}. auto: none for a file or a folder, else rotated.",
    )
    data_seed: str = flag(
        "each", "Seeds the environments; each: every seed draws its own.", words=("each",)
    )
    angles: tuple[float, ...] = flag(
        (0.0, 15.0, 30.0, 45.0, 60.0, 75.0),
        "Degrees of the rotated domains.",
        least=-360,
        most=360,
    )
    odd_angles: tuple[float, ...] = flag(
        (),
        "Degrees of further domains of a twentieth of the images each, which come first: with "
        "--partition=domain clients 0, 1 and so on hold one each, if there are at most 20 clients.",
        least=-360,
        most=360,
    )
    num_classes: int = flag(2, "Classes of colored and patched, in groups.", least=2)
    flips: tuple[float, ...] = flag(
        (0.2, 0.1),
        "How often the cue disagrees with the label, by domain; in the test 0.9.",
        least=0.0,
        most=1.0,
    )
    label_noise: float = flag(
        0.25, "How often the label disagrees with the image.", least=0.0, most=1.0
    )
    binarise: bool = flag(True, "Whether colored makes every pixel that is not 0 white.")
    stain: Literal["foreground", "background", "both"] = flag(
        "foreground", "What is coloured: strokes, ground."
    )
    training_domains: int = flag(5, "Training domains of stained images.", least=1)
    domain_size: int = flag(
        0, "Originals of each; 0: an equal share of all outside the test.", least=0
    )
    agreements: tuple[float, ...] = flag(
        (0.9, 0.98),
        "How often the colour of a stain fits the label, in the first and last training domain.",
        least=0.0,
        most=1.0,
        must=("two numbers", lambda agreements: len(agreements) == 2),
    )
    joint_colors: bool = flag(False, "Whether stained strokes and grounds fit it together.")
    shading: Literal["paradox", "random"] = flag(
        "paradox", "Colours of simpson: by client, or as in the test."
    )
    hues: bool = flag(False, "Whether they change from white by red to navy, not within a hue.")
    paradox: float = flag(1.0, "The share of images with the client's colour.", least=0.0, most=1.0)


@dataclass(frozen=True)
class Partition:
    """How clients share the training examples."""

    partition: Literal["domain", "mixed", "iid", "dirichlet", "quantity", "shards", "user"] = flag(
        "domain",
        "mixed: domains, mixed by --mixing; dirichlet: each class in random proportions; quantity: "
        "random sizes; shards: pieces of the examples sorted by label; user: all examples of a "
        "user (in a table or an .npz: client) go to one client.",
    )
    alpha: float = flag(0.5, "Concentration of dirichlet and quantity.", above=0.0)
    min_size: int = flag(-1, "Fewest examples there; -1: as many as classes.", least=-1)
    classes_per_client: int = flag(2, "Shards of a client, about a class each.", least=1)
    mixing: float = flag(
        0.1,
        "The part of each domain that mixed shares among all clients; the rest goes to the clients "
        "of that domain. 0: as few domains in a client as possible; 1: all alike.",
        least=0.0,
        most=1.0,
    )
    clients: int = flag(0, "Training clients; 0: one per training domain, or per user.", least=0)
    validation: float = flag(
        0.1,
        "The part of each client's examples that does not train but selects, at least one example; "
        "refused for data with validation examples of the clients. 0: none, as of clients with one "
        "example.",
        least=0.0,
        below=1.0,
    )
    held_out_clients: float = flag(
        0.0,
        "The part of the clients, drawn, that never train: their examples are evaluated as the "
        "domain clients never seen, beside the test.",
        least=0.0,
        below=1.0,
    )
    partition_seed: str = flag(
        "each",
        "Seeds who holds what, for all --seeds; each: every seed its own.",
        words=("each",),
    )
    imbalance: float = flag(
        1.0,
        "Ratio of the first class's number of training examples to the last one's; the others lie "
        "on a curve between, and surplus examples are left out. 1: the data's own.",
        least=1.0,
    )
    rare_domain: str = flag(
        "",
        "A domain of which few clients have examples, as domain:share; its share of the training "
        "examples falls to that, and surplus examples are left out. With --partition=domain it is "
        "the share of the clients, too.",
        must=("domain:share with a share above 0 and below 1", _is_rare),
    )
    wrong_labels: float = flag(
        0.0,
        "The probability that a label of some clients is replaced by another class, drawn "
        "uniformly: in training and, as nobody knows it, in validation. Labels of the test stay "
        "right.",
        least=0.0,
        most=1.0,
    )
    wrong_clients: float = flag(0.5, "The part of clients that this concerns.", above=0.0, most=1.0)
    pooled: bool = flag(False, "Whether one client trains on the examples of all, as erm does.")


@dataclass(frozen=True)
class Network:
    """The network."""

    model: str = flag("mlp", f"The network: {', '.join(MODELS)}, or package.module:factory.")
    widths: tuple[int, ...] = flag(
        (),
        "Widths of the hidden layers; default, also of an empty --widths=: the network's own; of "
        "the mlp on vectors of D numbers two layers of 4 D, at least 32 and at most 390; of the "
        "adapter's bottleneck D/4. Without a hidden layer: --model=linear.",
        least=1,
    )
    activation: Literal["relu", "elu"] = flag("relu", "Activation of the mlp.")
    norm: Literal["none", "batch", "group", "frozen"] = flag(
        "none",
        "Normalisation layers; none: the network's own (of resnet18 and resnet50: batch).",
    )
    cut: int = flag(-1, "Hidden layers before the cut; -1: all.", least=-1)
    weights: str = flag(
        "",
        "Weights of a published network: a .safetensors file in torchvision's, timm's, DINOv2's, "
        "Hugging Face's or open_clip's names. Images are normalised as the network's were.",
    )
    head_from: str = flag(
        "",
        "An .npz with names [K], those of the classes, and vectors [K, P], such as embeddings of "
        "texts: the class vectors of cosine or adapter start there.",
    )
    logit_scale: float = flag(100.0, "The factor of the cosines of cosine and adapter.", above=0.0)
    init_from: str = flag(
        "",
        "A run folder (of a grid, one of its cells), or a checkpoint in it: training starts from "
        "the global network of its newest checkpoint. A seed starts from the run of the same seed, "
        "or from the first run if there is none. --weights then only says how images are "
        "normalised.",
    )
    train_only: tuple[str, ...] = flag(
        (),
        "Names of the parameters to train, such as head, body/blocks_1 or */bias; all others stay "
        "as they start, and are not uploaded. Default: all are trained.",
    )
    augment: bool = flag(False, "Crop, flip and colour training images (RGB) at random.")
    standardise: bool = flag(
        False,
        "Whether features (of images: channels) are shifted and scaled to mean 0 and deviation 1, "
        "by the training clients' examples; the network keeps shift and scale. Constant features "
        "become 0, and categories stay as they are.",
    )
    precision: Literal["auto", "default", "high", "highest", "bfloat16"] = flag(
        "auto",
        "Precision of float32 products and convolutions on GPUs and TPUs: default (TF32; on TPUs "
        "bfloat16), high (three products of TF32; on TPUs of bfloat16) or highest (float32; on "
        "TPUs six of bfloat16); auto: what the algorithm needs. CPUs always compute float32. "
        "bfloat16: the network computes in it, on all devices, and sums are float32.",
    )


@dataclass(frozen=True)
class Method:
    """The algorithms to compare, their settings and the loss."""

    algorithm: tuple[str, ...] = flag(
        ("fedavg",),
        f"Algorithms: {', '.join(ALGORITHMS)}, or package.module:factory.",
        differ=True,
        must=("one or several names", bool),
    )
    set: tuple[str, ...] = flag(
        (),
        "A setting of the algorithm, name=value, or for a grid name=value,value; repeat the flag "
        "for several. --help_algorithm=NAME of train lists them. A later value replaces an "
        "earlier one; --set=name= takes it back.",
        repeated=True,
    )
    draws: int = flag(
        0,
        "Settings of each method, drawn at random in place of a grid: its learning rate, that of "
        "an adaptive server, and its own hyperparameters, from the distributions in "
        "experiments/assembly/draws.py; what a flag sets stays (an empty --learning_rate= is "
        "drawn). 0: none are drawn.",
        least=0,
    )
    loss: str = flag(
        "auto",
        "cross_entropy or focal for classes; binary_cross_entropy or focal for labels, of which "
        "several may be true; squared_error or huber for values; or package.module:function. "
        "auto: the first.",
    )


@dataclass(frozen=True)
class Training:
    """The length of a run, the local training of clients, and the server's optimizer."""

    rounds: int = flag(50, "Communication rounds; with --resume a run may be given more.", least=1)
    seeds: tuple[int, ...] = flag(
        (0,),
        "Each number seeds one run: its network, environments (see --data_seed), partition (see "
        "--partition_seed), cohorts and minibatches.",
        least=0,
        differ=True,
        must=("one or several numbers", bool),
    )
    local_epochs: int = flag(1, "Passes over a client's examples per round.", least=1)
    local_steps: int = flag(0, "If above 0: steps instead of passes.", least=0)
    batch_size: int = flag(32, "Examples per step; 0: all of the client's.", least=0)
    optimizer: str = flag(
        "sgd",
        f"The clients': sgd, adam, adamw, rmsprop, lion, {_OF_OPTAX}. It starts anew every round.",
    )
    optimizer_set: tuple[str, ...] = flag(
        (),
        "An argument of that optimizer, name=value; repeat the flag for several.",
        repeated=True,
    )
    learning_rate: tuple[float, ...] = flag(
        (0.1,), "The clients' learning rate; for a grid several.", above=0.0, differ=True
    )
    schedule: Literal["constant", "cosine"] = flag(
        "constant", "How it changes; a cosine ends with --rounds."
    )
    warmup_rounds: int = flag(0, "Rounds in which it first rises.", least=0)
    momentum: float = flag(0.0, "Momentum of the clients' sgd.", least=0.0, below=1.0)
    clip: float = flag(0.0, "Largest norm of a step's gradient; 0: any.", least=0.0)
    weight_decay: float = flag(0.0, "Times the parameters, in the gradient.", least=0.0)
    server_optimizer: str = flag(
        "sgd",
        "sgd: FedAvg, or with --server_momentum FedAvgM; adam: FedAdam; yogi: FedYogi, both with "
        f"b2=0.99; {_OF_OPTAX}.",
    )
    server_learning_rate: tuple[float, ...] = flag(
        (1.0,), "The server's; for a grid several.", above=0.0, differ=True
    )
    server_momentum: float = flag(0.0, "Momentum of the server's sgd.", least=0.0, below=1.0)
    server_epsilon: float = flag(1e-3, "eps of the server's adam and yogi.", above=0.0)
    average: float = flag(
        0.0,
        "Serve and evaluate the mean of the server's networks, in which a network counts by this "
        "factor less with each later round; 1: all count alike (SWA); 0: the newest alone.",
        least=0.0,
        most=1.0,
    )
    average_from: int = flag(1, "The first round whose network counts.", least=1)


@dataclass(frozen=True)
class Participation:
    """The clients that take part in a round, and which of their updates arrive."""

    cohort: int = flag(0, "Clients drawn each round; 0: all.", least=0)
    sampling_rate: float = flag(
        1.0, "The part that is drawn, instead of --cohort.", above=0.0, most=1.0
    )
    sampling: Literal["fixed", "poisson"] = flag(
        "fixed",
        "fixed: as many clients in each round; poisson: each client attends with probability "
        "--sampling_rate, whoever else does, as differential privacy supposes.",
    )
    first_all: bool = flag(False, "Whether all clients take part once at the beginning.")
    buffer: int = flag(
        0,
        "FedBuff: the server makes a new network of every so many updates, and clients do not "
        "wait: --cohort train at a time, those of --slow so many times as long. "
        "--set=weighting=age weighs updates by their age. 0: all wait for each other.",
        least=0,
    )
    slow: tuple[str, ...] = flag(
        (),
        "Clients that need several rounds for an update, as client:rounds; the update is computed "
        "from the network of that many rounds ago.",
        must=("client:rounds, once for a client", _by_client(int, 1, 2**31 - 1)),
    )
    lossy: tuple[str, ...] = flag(
        (),
        "Clients whose updates arrive with a probability, as client:probability.",
        must=("client:probability, once", _by_client(float, 0, 1)),
    )
    dropout: float = flag(
        0.0, "How often a drawn client's update does not arrive.", least=0.0, below=1.0
    )
    frequency: float = flag(
        1.0, "How often the updates of half of the clients, drawn, arrive.", above=0.0, most=1.0
    )
    late: Literal["drop", "stale"] = flag(
        "drop",
        "What happens to updates that do not arrive in their round: they are dropped; or, stale, "
        "they arrive when their client is next drawn and does not fail, within ten rounds.",
    )
    missing: Literal["skip", "reuse", "parameters"] = flag(
        "skip",
        "In place of an update that does not arrive: none; reuse, the client's last one; "
        "parameters, the step to the client's last parameters.",
    )


def _is_rule(text: str) -> bool:
    name, *numbers = text.split(":")
    try:
        return name in AGGREGATES and len([float(number) for number in numbers]) <= 2
    except ValueError:
        return False


def _is_attack(text: str) -> bool:
    name, *factor = text.split(":")
    try:
        is_length = all(0 < float(number) < math.inf for number in factor)
    except ValueError:
        return False
    known = text == "none" or name in ("sign_flip", "scaled_noise")
    return known and is_length and len(factor) <= 1


@dataclass(frozen=True)
class Aggregation:
    """How the server combines updates, and what protects the clients."""

    aggregate: str = flag(
        "mean",
        f"{_explained(AGGREGATES, ': ')}. For methods that send what FedAvg does.",
        must=(f"{', '.join(AGGREGATES)}, with numbers after a colon", _is_rule),
    )
    attack: str = flag(
        "none",
        "What --attackers send: sign_flip, their change in reverse, or scaled_noise, noise ten "
        "times as long as their change; sign_flip:5 and scaled_noise:5 are five times as long. "
        "Wrong labels are --wrong_labels.",
        must=("none, sign_flip or scaled_noise, with a number above 0 after a colon", _is_attack),
    )
    attackers: tuple[int, ...] = flag((), "Numbers of the clients that attack.", least=0)
    private_clip: float = flag(
        0.0,
        "Differential privacy of clients: the largest norm of a client's change, to whose sum the "
        "server adds noise by --noise_multiplier or --epsilon. 0: no privacy.",
        least=0.0,
    )
    noise_multiplier: float = flag(
        0.0, "The deviation of that noise, in units of --private_clip.", least=0.0
    )
    epsilon: float = flag(
        0.0,
        "The budget of a run, from which the noise follows (needs dp-accounting); 0: none is set.",
        least=0.0,
        most=1000.0,
    )
    delta: float = flag(1e-5, "The delta of --epsilon and of tables.", above=0.0, below=1.0)


@dataclass(frozen=True)
class Evaluation:
    """When a run is evaluated and stops, and which evaluation is selected."""

    score: str = flag(
        "auto",
        "What selects rounds and hyperparameters: accuracy, balanced_accuracy, macro_f1 or "
        "worst_group (the lowest accuracy of a class in a domain) for classes; label_accuracy or "
        "exact_match for labels; absolute_error or squared_error for values; or "
        "package.module:name of a function (higher is better) or of a fedjax_inv.objectives.Score. "
        "auto: the first.",
    )
    eval_every: int = flag(
        5,
        "Rounds between evaluations; lowered to fit: at most --rounds, and a divisor of "
        "--checkpoint_every.",
        least=1,
    )
    eval_start: bool = flag(True, "Whether the untrained network is evaluated, as round 0.")
    watch_examples: int = flag(
        0,
        "Training (of all clients) and test examples on which the score is measured in every "
        "round; 0: in no round.",
        least=0,
    )
    watch_classes: bool = flag(
        False,
        "Whether evaluations report the test score of each class, that of test examples in the "
        "proportions of each client's classes, and the means of both.",
    )
    stop_below: tuple[float, ...] = flag(
        (),
        "Thresholds: report the state in which the watched training score first fell below one of "
        "these numbers (of an accuracy: between 0 and 1).",
        differ=True,
    )
    stop_above: tuple[float, ...] = flag(
        (),
        "The same where that score first reached one of these numbers, without --warm_start.",
        differ=True,
    )
    warm_start: str = flag(
        "clients",
        "Rounds before a stop: a number, clients (one for each) or batches (one for each batch of "
        "the client with most examples).",
        words=("clients", "batches"),
    )
    after_stop: Literal["continue", "end"] = flag(
        "continue", "What follows when all thresholds have been met."
    )
    metrics: tuple[str, ...] = flag(
        (),
        "Metrics of the selected states' predictions, by domain and client: "
        f"{_explained(METRICS, ', ')}.",
        choices=[*METRICS],
    )
    select: Literal[
        "validation",
        "leave_one_out",
        "agreement",
        "last_if_agreed",
        "last",
        "unseen_domain",
        "oracle",
    ] = flag(
        "validation",
        "How an evaluation of each run is selected, and then hyperparameters by the mean over "
        "seeds: validation, the best score on the training domains; leave_one_out, the round with "
        "the best mean score on training domains, each measured by a run without it; agreement, "
        "the first at which the training domains, which had differed, differ no more than by "
        "chance; last_if_agreed, the last if there is one of these; last; unseen_domain, the best "
        "score on the domain of --validate, or on rows for validation of domains that nobody "
        "trains; oracle, the best test score, for comparison only.",
    )
    leave_one_out: bool = flag(
        False,
        "Whether each setting is also trained without each training domain in turn, as further "
        "runs of the same program, for the rule --select=leave_one_out, which sets this flag.",
    )
    unseen_norms: Literal["mean", "batch", "estimated"] = flag(
        "mean",
        "The statistics of BatchNorm where an unseen domain is evaluated: the mean of the clients' "
        "running ones; of each batch; or estimated, of all the domain's inputs, without labels.",
    )
    nonfinite: Literal["auto", "stop", "drop", "mark"] = flag(
        "auto",
        "When a client's loss or update becomes NaN or infinite: stop the program; drop what the "
        "client sends in that round; or mark the run as diverged, never to be selected, and let "
        "the others go on. auto: stop, in a grid mark.",
    )

    @property
    def compares_domains(self) -> bool:
        """Whether the rule of selection compares training domains."""
        return self.select in ("agreement", "last_if_agreed")

    @property
    def thresholds(self) -> tuple[float, ...]:
        """The thresholds of --stop_below or --stop_above."""
        return self.stop_below or self.stop_above


@dataclass(frozen=True)
class Machine:
    """The devices and processes of a run."""

    devices: str = flag(
        "auto",
        "How many devices runs and clients share; auto: all that help and fit.",
        words=("auto",),
        least=1,
    )
    chunk: tuple[str, ...] = flag(
        ("auto", "auto"),
        "How many clients of a run, and of how many runs, train at once on a device, as 8,2; 0: "
        "all; auto: one on CPUs, else all.",
        must=("one or two of auto and whole numbers, as 8 or 8,2", _are_chunks),
    )
    hold: Literal["auto", "own", "all", "stream"] = flag(
        "auto",
        "Whose examples and states each device holds. own: those of its own clients, which it "
        "alone trains; all: those of all, for less waiting if few attend; stream: the states of "
        "all, and the examples that the next rounds need, while the others stay on the host, with "
        "one process; auto: stream if the examples do not fit into memory and there is one "
        "process, else own if several devices share the clients of a run and all attend each "
        "round, else all.",
    )
    compile: Literal["full", "quick"] = flag(
        "full", "quick: in less time, to code that runs longer."
    )
    processes: tuple[str, ...] = flag(
        (),
        "Several processes, on one machine or many: host:port of process 0, the number of this "
        "one and how many there are, as node1:1234,0,2; process 0 writes. auto: what SLURM, a TPU "
        "pod, Open MPI or Kubernetes says. Default: one process.",
        must=(
            "auto, or host:port,number,count with a number from 0 below the count",
            _are_processes,
        ),
    )

    @property
    def is_alone(self) -> bool:
        """Whether there is one process."""
        return not self.processes or self.processes[-1] == "1"


@dataclass(frozen=True)
class Output:
    """The run folder, and what is written there."""

    run_dir: str = flag(
        "",
        "The folder of the results; default: runs/, the run's name, and the flags that differ from "
        "the defaults; of a study or map: runs/ and its name.",
    )
    resume: bool = flag(False, "Continue the run in --run_dir, bit for bit, or start it.")
    checkpoint_every: int = flag(0, "Rounds between checkpoints; 0: --eval_every.", least=0)
    keep_checkpoints: str = flag(
        "1",
        "How many stay at the end of a run: the newest ones, or all.",
        words=("all",),
        least=1,
    )
    tensorboard: bool = flag(False, "Also write evaluations as events, by tensorboardX.")
    paper: tuple[str, ...] = flag(
        (),
        "Numbers to print beside ours: algorithm=number.",
        must=("algorithm=number", lambda entries: all(map(_names_number, entries))),
    )


@dataclass(frozen=True)
class Config:
    """The values of all flags of an experiment, which do not change."""

    data: Data = Data()
    environment: Environment = Environment()
    partition: Partition = Partition()
    network: Network = Network()
    method: Method = Method()
    training: Training = Training()
    participation: Participation = Participation()
    aggregation: Aggregation = Aggregation()
    evaluation: Evaluation = Evaluation()
    machine: Machine = Machine()
    output: Output = Output()

    @property
    def environment_name(self) -> str:
        """The environment, also for --environment=auto."""
        if self.environment.environment != "auto":
            return self.environment.environment
        return "none" if self.data.is_path else "rotated"

    @property
    def is_drawn(self) -> bool:
        """Whether the domains depend on random draws."""
        return self.environment_name != "none"

    @property
    def title(self) -> str:
        """The name of the data and of their domains, for figures and tables."""
        domains = f", {self.environment_name} domains" if self.is_drawn else ""
        return f"{self.data.stem}{domains}"

    @property
    def is_grid(self) -> bool:
        """Whether there are several algorithms, held-out domains or values of a hyperparameter."""
        training = self.training
        lists = self.method.algorithm, training.learning_rate, training.server_learning_rate
        texts = (self.data.held_out, *self.method.set)
        return (
            max(self.method.draws, *map(len, lists)) > 1
            or self.data.held_out == "all"
            or any("," in text for text in texts)
        )

    @property
    def outside(self) -> tuple[str, ...]:
        """The algorithms, the network, the loss and the score from outside of this project."""
        return self.outside_of(*self.method.algorithm)

    def outside_of(self, *algorithms: str) -> tuple[str, ...]:
        """Those of them that runs of some algorithms have."""
        named = (*algorithms, self.network.model, self.method.loss, self.evaluation.score)
        return tuple(name for name in named if ":" in name)


NAMES = sheet.names(*sheet.groups(Config).values())


def _angles_differ(config: Config) -> bool:
    angles = (*config.environment.odd_angles, *config.environment.angles)
    return len({*angles}) == len(angles) > 0


def _rates_fit(config: Config) -> bool:
    rates = config.training.learning_rate, config.training.server_learning_rate
    return all(len(rate) <= 1 if config.method.draws else rate for rate in rates)


def _cohort_fits(config: Config) -> bool:
    clients = config.partition.clients
    return not clients or config.participation.cohort <= clients


def _delays_fit(config: Config) -> bool:
    clients = config.participation
    return clients.late == "drop" or not (clients.slow or clients.buffer)


def _sampling_fits(config: Config) -> bool:
    clients = config.participation
    is_plain = not (clients.cohort or clients.buffer or clients.slow or clients.late == "stale")
    return clients.sampling == "fixed" or is_plain


def _attack_fits(config: Config) -> bool:
    return (config.aggregation.attack == "none") == (not config.aggregation.attackers)


def _private_fits(config: Config) -> bool:
    private = config.aggregation
    if not private.private_clip:
        return not (private.epsilon or private.noise_multiplier)
    return not (private.epsilon and private.noise_multiplier) and private.aggregate == "mean"


def _private_clients_fit(config: Config) -> bool:
    clients = config.participation
    changed = clients.slow or clients.lossy or clients.buffer or clients.first_all
    is_plain = clients.missing == "skip" and clients.late == "drop"
    return not config.aggregation.private_clip or (is_plain and not changed)


def _epsilon_fits(config: Config) -> bool:
    clients = config.participation
    is_known = clients.sampling == "poisson" or (clients.sampling_rate == 1 and not clients.cohort)
    return not config.aggregation.epsilon or is_known


def _stop_fits(config: Config) -> bool:
    watched = config.evaluation
    is_single = not (watched.stop_below and watched.stop_above)
    return is_single and (watched.watch_examples > 0 or not watched.thresholds)


def _warmup_fits(config: Config) -> bool:
    training = config.training
    return training.schedule == "constant" or training.warmup_rounds < training.rounds


def _average_fits(config: Config) -> bool:
    return config.training.average_from <= config.training.rounds


def _stream_fits(config: Config) -> bool:
    return config.machine.hold != "stream" or config.machine.is_alone


# What values of several flags must be: (the flags, in words, whether they are).
_TOGETHER: Sequence[tuple[Sequence[str], str, Callable[[Config], bool]]] = (
    (("angles", "odd_angles"), "must all be different", _angles_differ),
    (
        ("learning_rate", "server_learning_rate", "draws"),
        "a learning rate is one or several numbers; with --draws one, or none if it is drawn",
        _rates_fit,
    ),
    (("cohort", "clients"), "a cohort has at most all clients", _cohort_fits),
    (("late", "slow", "buffer"), "--late=stale sets all delays", _delays_fit),
    (
        ("sampling", "cohort", "buffer", "slow", "late"),
        "--sampling=poisson draws who attends by --sampling_rate alone",
        _sampling_fits,
    ),
    (("attack", "attackers"), "an attack needs attackers, and attackers an attack", _attack_fits),
    (
        ("private_clip", "noise_multiplier", "epsilon", "aggregate"),
        "privacy needs --private_clip, not both --noise_multiplier and --epsilon, and "
        "--aggregate=mean",
        _private_fits,
    ),
    (
        ("private_clip", "missing", "late", "slow", "lossy", "buffer", "first_all"),
        "with --private_clip an update counts once, in its round: those are left out",
        _private_clients_fit,
    ),
    (
        ("epsilon", "sampling", "sampling_rate", "cohort"),
        "no epsilon is known for cohorts of a fixed size; it needs --sampling=poisson, or all "
        "clients in all rounds",
        _epsilon_fits,
    ),
    (
        ("stop_below", "stop_above", "watch_examples"),
        "only one of the stops can be set, and it needs --watch_examples above 0",
        _stop_fits,
    ),
    (
        ("warmup_rounds", "rounds", "schedule"),
        "a warm-up ends before its cosine schedule",
        _warmup_fits,
    ),
    (("average_from", "rounds"), "an average begins within --rounds", _average_fits),
    (("hold", "processes"), "--hold=stream needs a single process", _stream_fits),
)


def read(values: flags.FlagValues) -> Config:
    """The configuration of parsed flags; raises UsageError if they contradict each other."""
    given = sheet.filled(Config, {name: values[name].value for name in NAMES})
    for names, text, fit in _TOGETHER:
        if not fit(given):
            words = " ".join(f"--{name}={shown(values[name].value)}" for name in names)
            raise usage_error(flags.Error(f"{words}: {text}"))
    return _settled(given, values)


def shown(value: Any) -> str:
    """A value of a flag as on a command line."""
    return ",".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


def _settled(given: Config, values: flags.FlagValues) -> Config:
    """The configuration with what other flags decide."""
    training = replace(given.training, optimizer_set=_merged(given.training.optimizer_set))
    if given.method.draws:  # a rate that is not given is drawn
        if not values["learning_rate"].present:
            training = replace(training, learning_rate=())
        is_adaptive = training.server_optimizer != "sgd"
        if is_adaptive and not values["server_learning_rate"].present:
            training = replace(training, server_learning_rate=())
    evaluation = given.evaluation
    by_domain = evaluation.leave_one_out or evaluation.select == "leave_one_out"
    evaluation = replace(
        evaluation, eval_every=fitting(evaluation.eval_every, given), leave_one_out=by_domain
    )
    method = replace(given.method, set=_merged(given.method.set))
    settled = replace(given, method=method, training=training, evaluation=evaluation)
    if evaluation.nonfinite != "auto":
        return settled
    evaluation = replace(evaluation, nonfinite="mark" if settled.is_grid else "stop")
    return replace(settled, evaluation=evaluation)


def _merged(entries: Sequence[str]) -> tuple[str, ...]:
    """Entries name=value: the last one of each name, without those that take a value back."""
    by_name = {entry.partition("=")[0]: entry for entry in entries}
    return tuple(entry for entry in by_name.values() if not entry.endswith("="))


def fitting(eval_every: int, config: Config) -> int:
    """The largest number of rounds between evaluations, up to this one, that fits other flags."""
    fits = range(min(eval_every, config.training.rounds), 0, -1)
    return next(n for n in fits if config.output.checkpoint_every % n == 0)


@functools.cache
def defaults() -> Config:
    """The default of each flag."""
    return of()


def default_flags() -> flags.FlagValues:
    """The flags of an experiment with their defaults, apart from those of this process."""
    values = flags.FlagValues()
    sheet.define(Config, values)
    return values


def of(**flat: Any) -> Config:
    """The configuration with these values of flags, and defaults otherwise.

    Raises UsageError for a bad value, and TypeError for what is no flag.
    """
    values = default_flags()
    if unknown := {*flat} - {*NAMES}:
        raise TypeError(f"{min(unknown)} is no flag")
    try:
        for name, value in flat.items():
            values[name].parse(value)
        values.validate_all_flags()
    except flags.Error as error:
        raise usage_error(error) from None
    return read(values)


def to_record(config: Config) -> dict[str, Any]:
    """The flags as a run folder stores them; the environment is never "auto"."""
    return sheet.flat(config) | {"environment": config.environment_name}


def from_record(record: Mapping[str, Any]) -> Config:
    """The configuration that a run folder stores; missing flags have their defaults.

    Raises TypeError or ValueError for what is no flag, or a value of another type.
    """
    return of(**record)


def usage_error(error: flags.Error) -> Exception:
    """The error of a flag as one of this project."""
    from fedjax_inv.checks import UsageError  # with it JAX, for seconds

    return UsageError(str(error).removeprefix("flag ").replace("\n", "; "))
