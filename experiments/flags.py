"""The flags of an experiment, which train, show_data, paper and map share.

`config` turns them into a configuration. This file imports no package that takes seconds to import,
so that --help takes none.
"""

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags

FLAGS = flags.FLAGS
PRESETS = Path(__file__).parent / "presets"
_LIBRARY = importlib.util.find_spec("fedjax_inv")
assert _LIBRARY is not None
assert _LIBRARY.origin is not None
# An algorithm is a file of the library with a factory of its name.
SOURCES = Path(_LIBRARY.origin).parent / "algorithms"
ALGORITHMS = sorted(path.stem for path in SOURCES.glob("*.py") if path.stem != "__init__")


class _List(flags.ArgumentParser[Any]):
    """A comma-separated list of values, a tuple."""

    def __init__(self, item: flags.ArgumentParser[Any]) -> None:
        self._item = item
        self.syntactic_help = f"a comma-separated list, each {item.syntactic_help or 'a string'}"

    def parse(self, argument: Any) -> Any:
        items = argument.split(",") if isinstance(argument, str) else argument
        try:
            return tuple(self._item.parse(item) for item in items if item != "" or len(items) > 1)
        except ValueError as error:
            raise ValueError(f"{error}; must be {self.syntactic_help}") from None

    def flag_type(self) -> str:
        return f"comma-separated {self._item.flag_type()}s"


class _Commas(flags.ArgumentSerializer[Any]):
    def serialize(self, value: Any) -> str:
        return ",".join(map(str, value))


# Bounds of `DEFINE_float`.
_SHARE: dict[str, Any] = {"lower_bound": 0.0, "upper_bound": 1.0}
_BELOW_1: dict[str, Any] = {"lower_bound": 0.0, "upper_bound": 1 - 1e-6}
_INSIDE: dict[str, Any] = {"lower_bound": 1e-6, "upper_bound": 1 - 1e-6}
_PART: dict[str, Any] = {"lower_bound": 1e-38, "upper_bound": 1.0}

_TEXT: flags.ArgumentParser[Any] = flags.ArgumentParser()
_REAL = flags.FloatParser()
_POSITIVE = flags.FloatParser(lower_bound=1e-38)  # float32 distinguishes it from 0
_PROBABILITY = flags.FloatParser(**_SHARE)
_COUNT = flags.IntegerParser(lower_bound=1)


def _define_list(
    name: str, default: Sequence[Any], text: str, item: flags.ArgumentParser[Any] = _TEXT
) -> None:
    flags.DEFINE(_List(item), name, tuple(default), text, serializer=_Commas())


def _must(name: str, text: str, holds: Any) -> None:
    flags.register_validator(name, holds, f"must be {text}")


def _must_differ(*names: str) -> None:
    """Requires that no value stands twice in these lists."""
    for name in names:
        _must(name, "different values", lambda values: len({*values}) == len(values))


def must_be_number_or(name: str, *words: str, lowest: int = 0) -> None:
    """Requires one of the words or a whole number of at least `lowest`."""

    def holds(text: str) -> bool:
        return text in words or (text.isdecimal() and lowest <= int(text) < 2**31)

    _must(name, f"{', '.join(words)} or a whole number of at least {lowest}", holds)


def _must_be_settings(name: str) -> None:
    """Requires name=value of each entry, or name= and nothing, which take settings back."""
    _must(name, "name=value", lambda entries: all("=" in each or not each for each in entries))


def _section() -> tuple[str, ...]:
    """The names of the flags that were defined since the last call."""
    mine = [flag.name for flag in FLAGS.flags_by_module_dict()[__name__]]
    earlier = {name for section in _SECTIONS for name in section}
    _SECTIONS.append(tuple(name for name in mine if name not in earlier))
    return _SECTIONS[-1]


_SECTIONS: list[tuple[str, ...]] = []

# The algorithms to compare, the loss of training and the score of evaluations.

_define_list(
    "algorithm", ["fedavg"], f"Algorithms: {', '.join(ALGORITHMS)}, or package.module:factory."
)
_must_differ("algorithm")
_must("algorithm", "one or several names", bool)
flags.DEFINE_multi_string(
    "set",
    [],
    "A setting of the algorithm, name=value, or for a grid name=value,value; repeat the flag for "
    "several. docs/algorithms.md and the docstrings of fedjax_inv.algorithms describe them. A "
    "later value replaces an earlier one; --set=name= takes it back.",
)
_must_be_settings("set")
_define_list("paper", [], "Numbers to print beside ours: algorithm=number.")
_must("paper", "algorithm=number", lambda entries: all(map(_names_number, entries)))
flags.DEFINE_string(
    "loss",
    "auto",
    "cross_entropy or focal for classes; binary_cross_entropy or focal for labels, of which "
    "several may be true; squared_error or huber for values; or package.module:function. auto: the "
    "first.",
)
flags.DEFINE_string(
    "score",
    "auto",
    "What selects rounds and hyperparameters: accuracy, balanced_accuracy, macro_f1 or worst_group "
    "(the lowest accuracy of a class in a domain) for classes; label_accuracy or exact_match for "
    "labels; absolute_error or squared_error for values; or package.module:name of a function "
    "(higher is better) or of a fedjax_inv.objectives.Score. auto: the first.",
)


def _names_number(entry: str) -> bool:
    name, _, number = entry.partition("=")
    return bool(name) and number.replace(".", "", 1).isdecimal()


METHOD = _section()

# The data set, and which of its domains only the test sees.

flags.DEFINE_string(
    "dataset",
    "digits",
    "digits, moved_digits (nine copies of each, moved by a pixel), dsprites, a TFDS name, or the "
    "path of an .npz, of a folder of images, of LEAF's FEMNIST (.json), of a table (.csv or "
    ".parquet) of features or of paths of images, or of a folder of x.npy, y.npy and others; or "
    "sentiment140: and the path of its .csv.",
)
_define_list("target_column", ["target"], "The columns of a table's targets.")
flags.DEFINE_string("domain_column", "domain", "The column of a table's domains, if there are any.")
flags.DEFINE_string("client_column", "client", "That of its clients, for --partition=user.")
flags.DEFINE_string("test_column", "test", "That of its test split: true/false or 1/0.")
flags.DEFINE_string(
    "group_column", "", "That of groups, such as patients, which no random split separates."
)
flags.DEFINE_string(
    "split_column",
    "",
    "That of splits of your own: train, val, test or 0, 1, 2; in place of --test_column. Default: "
    "a column called split, if there is one.",
)
flags.DEFINE_string(
    "image_column",
    "img_filename",
    "That of paths of images, which are then the examples; columns without a flag are not read.",
)
_define_list("ignored_columns", [], "Other columns of a table that are not features.")
flags.DEFINE_enum(
    "task",
    "auto",
    ["auto", "classes", "labels", "values"],
    "What a table's targets are; auto: one target is of classes if it holds texts, true/false, or "
    "whole numbers of which few differ, else of values; several are labels if they hold "
    "true/false, else values.",
)
flags.DEFINE_string("data_dir", "", "The TFDS folder; default: $TFDS_DATA_DIR, or TFDS's own.")
flags.DEFINE_integer("image_size", 0, "Side of images of files; 0: as they are.", lower_bound=0)
flags.DEFINE_integer("stride", 1, "Keep every n-th pixel (2: 14x14 MNIST).", lower_bound=1)
flags.DEFINE_integer("vocabulary", 0, "Most frequent words of a text; 0: 10,000.", lower_bound=0)
flags.DEFINE_integer("text_length", 0, "Words of a text, cut or padded; 0: 30.", lower_bound=0)
flags.DEFINE_integer(
    "max_examples", 0, "Examples drawn of larger data, always the same; 0: all.", lower_bound=0
)
flags.DEFINE_string(
    "held_out",
    "",
    "The domain that only the test sees; for a grid several with commas, or all, each in turn; "
    "none: the official test split, or a random part. Default: the last of several.",
)
_must("held_out", "different names", lambda names: len({*names.split(",")}) == names.count(",") + 1)
flags.DEFINE_string(
    "validate",
    "",
    "A domain that no client has, either, and by which --select=unseen_domain selects; next: after "
    "each domain of --held_out the one that follows it there, or of a single one that of the data.",
)
flags.DEFINE_float(
    "test_fraction", 0.2, "The random part for the test, without split or --held_out.", **_INSIDE
)
DATA = _section()

# How domains are made of the data.

ENVIRONMENTS = {
    "rotated": "a domain for each of --angles and --odd_angles",
    "colored": "a colour that misleads in the test (Colored MNIST): --num_classes, --flips, "
    "--test_flip, --label_noise, --binarise",
    "patched": "a black corner that misleads in the test: the same flags but --binarise",
    "combinations": "a domain for each fixed rule from digit to colour: --stain",
    "stained": "colours that follow the label by another rule in the test: --stain, "
    "--training_domains, --domain_size",
    "simpson": "a colour that tells the digit in each client, but hardly over all clients: "
    "--shading, --paradox",
    "none": "the data's own domains",
}
flags.DEFINE_enum(
    "environment",
    "auto",
    ["auto", *ENVIRONMENTS],
    "; ".join(f"{name}: {text}" for name, text in ENVIRONMENTS.items())
    + ". auto: none for a file or a folder, else rotated.",
)
flags.DEFINE_string("data_seed", "each", "Seeds the environments; each: every seed draws its own.")
must_be_number_or("data_seed", "each")
_DEGREES = flags.FloatParser(lower_bound=-360, upper_bound=360)
_define_list("angles", [0, 15, 30, 45, 60, 75], "Degrees of the rotated domains.", _DEGREES)
_define_list(
    "odd_angles",
    [],
    "Degrees of further domains of a twentieth of the images each, which come first: with "
    "--partition=domain clients 0, 1 and so on hold one each, if there are at most 20 clients.",
    _DEGREES,
)


@flags.multi_flags_validator(["angles", "odd_angles"], "must all be different")
def _angles_differ(values: Mapping[str, Any]) -> bool:
    angles = (*values["odd_angles"], *values["angles"])
    return len({*angles}) == len(angles) > 0


flags.DEFINE_integer("num_classes", 2, "Classes of colored and patched, in groups.", lower_bound=2)
_define_list(
    "flips", [0.2, 0.1], "How often the cue disagrees with the label, by domain.", _PROBABILITY
)
flags.DEFINE_float("test_flip", 0.9, "The same in the test.", **_SHARE)
flags.DEFINE_float("label_noise", 0.25, "How often the label disagrees with the image.", **_SHARE)
flags.DEFINE_bool("binarise", True, "Whether colored makes every pixel that is not 0 white.")
flags.DEFINE_enum(
    "stain",
    "foreground",
    ["foreground", "background", "both"],
    "What is coloured: strokes, ground.",
)
flags.DEFINE_integer("training_domains", 5, "Training domains of stained images.", lower_bound=1)
flags.DEFINE_integer(
    "domain_size", 0, "Originals of each; 0: an equal share of all outside the test.", lower_bound=0
)
flags.DEFINE_enum(
    "shading", "paradox", ["paradox", "random"], "Colours of simpson: by client, or as in the test."
)
flags.DEFINE_float("paradox", 1.0, "The share of images with the client's colour.", **_SHARE)
ENVIRONMENT = _section()

# How clients share the training examples.

flags.DEFINE_enum(
    "partition",
    "domain",
    ["domain", "mixed", "iid", "dirichlet", "quantity", "shards", "user"],
    "mixed: domains, mixed by --mixing; dirichlet: each class in random proportions; quantity: "
    "random sizes; shards: pieces of the examples sorted by label; user: all examples of a user "
    "(in a table or an .npz: client) go to one client.",
)
flags.DEFINE_float("alpha", 0.5, "Concentration of dirichlet and quantity.", lower_bound=1e-38)
flags.DEFINE_integer("min_size", -1, "Fewest examples there; -1: as many as classes.", -1)
flags.DEFINE_integer("classes_per_client", 2, "Shards of a client, about a class each.", 1)
flags.DEFINE_float(
    "mixing",
    0.1,
    "The part of each domain that mixed shares among all clients; the rest goes to the clients of "
    "that domain. 0: as few domains in a client as possible; 1: all alike.",
    **_SHARE,
)
flags.DEFINE_integer(
    "clients", 0, "Training clients; 0: one per training domain, or per user.", lower_bound=0
)
flags.DEFINE_float(
    "held_out_clients",
    0.0,
    "The part of the clients, drawn, that never train: their examples are evaluated as the domain "
    "clients never seen, beside the test.",
    **_BELOW_1,
)
flags.DEFINE_string(
    "partition_seed", "each", "Seeds who holds what, for all --seeds; each: every seed its own."
)
must_be_number_or("partition_seed", "each")
flags.DEFINE_float(
    "imbalance",
    1.0,
    "Ratio of the first class's number of training examples to the last one's; the others lie on a "
    "curve between, and surplus examples are left out. 1: the data's own.",
    lower_bound=1,
)
flags.DEFINE_float(
    "wrong_labels",
    0.0,
    "The probability that a label of some clients is replaced by another class, drawn uniformly: "
    "in training and, as nobody knows it, in validation. Labels of the test stay right.",
    **_SHARE,
)
flags.DEFINE_float("wrong_clients", 0.5, "The part of clients that this concerns.", **_PART)
flags.DEFINE_bool("pooled", False, "Whether one client trains on the examples of all, as erm does.")
PARTITION = _section()

# The local training of clients, and the server's optimizer.

flags.DEFINE_integer("local_epochs", 1, "Passes over a client's examples per round.", lower_bound=1)
flags.DEFINE_integer("local_steps", 0, "If above 0: steps instead of passes.", lower_bound=0)
flags.DEFINE_integer("batch_size", 32, "Examples per step; 0: all of the client's.", lower_bound=0)
_OF_OPTAX = "or another of optax that needs a learning rate only"
flags.DEFINE_string(
    "optimizer",
    "sgd",
    f"The clients': sgd, adam, adamw, rmsprop, lion, {_OF_OPTAX}. It starts anew every round.",
)
flags.DEFINE_multi_string(
    "optimizer_set", [], "An argument of that optimizer, name=value; repeat the flag for several."
)
_must_be_settings("optimizer_set")
_define_list("learning_rate", [0.1], "The clients' learning rate; for a grid several.", _POSITIVE)
flags.DEFINE_enum(
    "schedule", "constant", ["constant", "cosine"], "How it changes; a cosine ends with --rounds."
)
flags.DEFINE_integer("warmup_rounds", 0, "Rounds in which it first rises.", lower_bound=0)
flags.DEFINE_float("momentum", 0.0, "Momentum of the clients' sgd.", **_BELOW_1)
flags.DEFINE_float("clip", 0.0, "Largest norm of a step's gradient; 0: any.", lower_bound=0)
flags.DEFINE_float("weight_decay", 0.0, "Times the parameters, in the gradient.", lower_bound=0)
flags.DEFINE_string(
    "server_optimizer",
    "sgd",
    "sgd: FedAvg, or with --server_momentum FedAvgM; adam: FedAdam; yogi: FedYogi, both with "
    f"b2=0.99; {_OF_OPTAX}.",
)
_define_list("server_learning_rate", [1.0], "The server's; for a grid several.", _POSITIVE)
_must_differ("learning_rate", "server_learning_rate")
flags.DEFINE_integer(
    "draws",
    0,
    "Settings of each method, drawn at random in place of a grid: its learning rate, that of an "
    "adaptive server, and its own hyperparameters, from the distributions in experiments/draws.py; "
    "what a flag sets stays (an empty --learning_rate= is drawn). 0: none are drawn.",
    lower_bound=0,
)


@flags.multi_flags_validator(
    ["learning_rate", "server_learning_rate", "draws"],
    "a learning rate is one or several numbers; with --draws one, or none if it is drawn",
)
def _rates_fit(values: Mapping[str, Any]) -> bool:
    lists = values["learning_rate"], values["server_learning_rate"]
    return all(len(each) <= 1 if values["draws"] else each for each in lists)


flags.DEFINE_float("server_momentum", 0.0, "Momentum of the server's sgd.", **_BELOW_1)
flags.DEFINE_float("server_epsilon", 1e-3, "eps of the server's adam and yogi.", lower_bound=1e-38)
flags.DEFINE_float(
    "average",
    0.0,
    "Serve and evaluate the mean of the server's networks, in which a network counts by this "
    "factor less with each later round; 1: all count alike (SWA); 0: the newest alone.",
    **_SHARE,
)
flags.DEFINE_integer("average_from", 1, "The first round whose network counts.", lower_bound=1)
TRAINING = _section()

# The network.

MODELS = ("mlp", "cnn", "leaf_cnn", "alexnet", "lenet", "resnet18", "resnet50", "lstm")
flags.DEFINE_string("model", "mlp", f"The network: {', '.join(MODELS)}, or package.module:factory.")
_define_list(
    "widths",
    [],
    "Widths of the hidden layers; default: the network's own; of the mlp on vectors of D numbers "
    "two layers of 4 D, at least 32 and at most 390.",
    _COUNT,
)
flags.DEFINE_enum("activation", "relu", ["relu", "elu"], "Activation of the mlp.")
flags.DEFINE_enum(
    "norm",
    "none",
    ["none", "batch", "group", "frozen"],
    "Normalisation layers; none: the network's own (of resnet18 and resnet50: batch).",
)
flags.DEFINE_integer("cut", -1, "Hidden layers before the cut; -1: all.", lower_bound=-1)
flags.DEFINE_string(
    "weights",
    "",
    "Weights of the resnet18 or resnet50: a .safetensors file in torchvision's or timm's names, "
    "trained on images normalised as ImageNet's.",
)
flags.DEFINE_string(
    "init_from",
    "",
    "A run folder (of a grid, one of its cells), or a checkpoint in it: training starts from the "
    "global network of its newest checkpoint. A seed starts from the run of the same seed, or from "
    "the first run if there is none. --weights then only says how images are normalised.",
)
_define_list(
    "train_only",
    [],
    "Names of the parameters to train, such as head, body/blocks_1 or */bias; all others stay as "
    "they start, and are not uploaded. Default: all are trained.",
)
flags.DEFINE_bool("augment", False, "Crop, flip and colour training images (RGB) at random.")
flags.DEFINE_bool(
    "standardise",
    False,
    "Whether features (of images: channels) are shifted and scaled to mean 0 and deviation 1, by "
    "the training clients' examples; the network keeps shift and scale. Constant features become "
    "0, and categories stay as they are.",
)
flags.DEFINE_enum(
    "dtype", "float32", ["float32", "bfloat16"], "Of the network's computation; sums are float32."
)
NETWORK = _section()

# The clients that take part in a round.

flags.DEFINE_integer("cohort", 0, "Clients drawn each round; 0: all.", lower_bound=0)
flags.DEFINE_integer(
    "buffer",
    0,
    "FedBuff: the server makes a new network of every so many updates, and clients do not wait: "
    "--cohort train at a time, those of --slow so many times as long. --set=weighting=age weighs "
    "updates by their age. 0: all wait for each other.",
    lower_bound=0,
)


@flags.multi_flags_validator(["cohort", "clients"], "a cohort has at most all clients")
def _cohort_fits(values: Mapping[str, Any]) -> bool:
    return not values["clients"] or values["cohort"] <= values["clients"]


flags.DEFINE_float("sampling_rate", 1.0, "The part that is drawn, instead of --cohort.", **_PART)
_define_list(
    "slow",
    [],
    "Clients that need several rounds for an update, as client:rounds; the update is computed from "
    "the network of that many rounds ago.",
)
_define_list("lossy", [], "Clients whose updates arrive with a probability, as client:probability.")


def _by_client(entries: Sequence[str], parser: flags.ArgumentParser[Any]) -> bool:
    """Whether each entry is client:value, one for a client."""
    try:
        for entry in entries:
            parser.parse(entry.split(":")[1])
        clients = [int(entry.split(":")[0]) for entry in entries]
    except (ValueError, IndexError):
        return False
    return len({*clients}) == len(clients) and min(clients, default=0) >= 0


_must("slow", "client:rounds, once for a client", lambda entries: _by_client(entries, _COUNT))
_must("lossy", "client:probability, once", lambda entries: _by_client(entries, _PROBABILITY))
flags.DEFINE_float("dropout", 0.0, "How often a drawn client's update does not arrive.", **_BELOW_1)
flags.DEFINE_float("frequency", 1.0, "How often that of a --sparse client arrives.", **_PART)
flags.DEFINE_float("sparse", 0.5, "The part of clients, drawn, that this is for.", **_SHARE)
flags.DEFINE_enum(
    "late",
    "drop",
    ["drop", "stale"],
    "What happens to updates that do not arrive in their round: they are dropped; or, stale, they "
    "arrive when their client is next drawn and does not fail, within ten rounds.",
)


@flags.multi_flags_validator(["late", "slow", "buffer"], "--late=stale sets all delays")
def _delays_fit(values: Mapping[str, Any]) -> bool:
    return values["late"] == "drop" or not (values["slow"] or values["buffer"])


flags.DEFINE_enum(
    "missing", "skip", ["skip", "reuse"], "In place of an update: none, or the client's last one."
)
flags.DEFINE_bool("first_all", False, "Whether all clients take part once at the beginning.")
PARTICIPATION = _section()

# When a run is evaluated, when it stops, and which evaluation is selected.

flags.DEFINE_integer(
    "eval_every",
    5,
    "Rounds between evaluations; lowered to fit: at most --rounds, and a divisor of "
    "--checkpoint_every.",
    lower_bound=1,
)
flags.DEFINE_bool("eval_start", True, "Whether the untrained network is evaluated, as round 0.")
flags.DEFINE_integer(
    "watch_examples",
    0,
    "Training (of all clients) and test examples on which the score is measured in every round; 0: "
    "in no round.",
    lower_bound=0,
)
flags.DEFINE_bool(
    "watch_classes",
    False,
    "Whether evaluations report the test score of each class, that of test examples in the "
    "proportions of each client's classes, and the means of both.",
)
_define_list(
    "stop_below",
    [],
    "Thresholds: report the state in which the watched training score first fell below one of "
    "these numbers (of an accuracy: between 0 and 1).",
    _REAL,
)
_define_list(
    "stop_above",
    [],
    "The same where that score first reached one of these numbers, without --warm_start.",
    _REAL,
)
_must_differ("stop_below", "stop_above")


@flags.multi_flags_validator(
    ["stop_below", "stop_above", "watch_examples"],
    "only one of the stops can be set, and it needs --watch_examples above 0",
)
def _stop_fits(values: Mapping[str, Any]) -> bool:
    below, above = values["stop_below"], values["stop_above"]
    return not (below and above) and (values["watch_examples"] > 0 or not (below or above))


flags.DEFINE_string(
    "warm_start",
    "clients",
    "Rounds before a stop: a number, clients (one for each) or batches (one for each batch of the "
    "client with most examples).",
)
must_be_number_or("warm_start", "clients", "batches")
flags.DEFINE_enum(
    "after_stop", "continue", ["continue", "end"], "What follows when all thresholds have been met."
)
flags.DEFINE_bool("tensorboard", False, "Also write evaluations as events, by tensorboardX.")
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
_define_list(
    "metrics",
    [],
    "Metrics of the selected states' predictions, by domain and client: "
    + "; ".join(f"{name}, {text}" for name, text in METRICS.items())
    + ".",
    flags.EnumParser([*METRICS]),
)
flags.DEFINE_enum(
    "select",
    "validation",
    [
        *("validation", "leave_one_out", "agreement", "last_if_agreed", "last"),
        *("unseen_domain", "oracle"),
    ],
    "How an evaluation of each run is selected, and then hyperparameters by the mean over seeds: "
    "validation, the best score on the training domains; leave_one_out, the round with the best "
    "mean score on training domains, each measured by a run without it; agreement, the first at "
    "which the training domains, which had differed, differ no more than by chance; "
    "last_if_agreed, the last if there is one of these; last; unseen_domain, the best score on the "
    "domain of --validate; oracle, the best test score, for comparison only.",
)
flags.DEFINE_bool(
    "leave_one_out",
    False,
    "Whether each setting is also trained without each training domain in turn, as further runs of "
    "the same program, for the rule --select=leave_one_out, which sets this flag.",
)
WATCHING = _section()

# The length, seeds, folder and machine of a run.

flags.DEFINE_integer(
    "rounds", 50, "Communication rounds; with --resume a run may be given more.", lower_bound=1
)


@flags.multi_flags_validator(
    ["warmup_rounds", "rounds", "schedule"], "a warm-up ends before its cosine schedule"
)
def _warmup_fits(values: Mapping[str, Any]) -> bool:
    return values["schedule"] == "constant" or values["warmup_rounds"] < values["rounds"]


@flags.multi_flags_validator(["average_from", "rounds"], "an average begins within --rounds")
def _average_fits(values: Mapping[str, Any]) -> bool:
    return values["average_from"] <= values["rounds"]


_define_list(
    "seeds",
    [0],
    "Each number seeds one run: its network, environments (see --data_seed), partition (see "
    "--partition_seed), cohorts and minibatches.",
    flags.IntegerParser(lower_bound=0),
)
_must("seeds", "one or several numbers", bool)
_must_differ("seeds")
flags.DEFINE_string(
    "run_dir",
    "",
    "The folder of the results; default: runs/, the run's name, and the flags that differ from the "
    "defaults; of a study or map: runs/ and its name.",
)
flags.DEFINE_bool("resume", False, "Continue the run in --run_dir, bit for bit, or start it.")
flags.DEFINE_integer(
    "checkpoint_every", 0, "Rounds between checkpoints; 0: --eval_every.", lower_bound=0
)
flags.DEFINE_string(
    "keep_checkpoints", "1", "How many stay at the end of a run: the newest ones, or all."
)
must_be_number_or("keep_checkpoints", "all", lowest=1)
flags.DEFINE_enum(
    "nonfinite",
    "auto",
    ["auto", "stop", "drop", "mark"],
    "When a client's loss or update becomes NaN or infinite: stop the program; drop what the "
    "client sends in that round; or mark the run as diverged, never to be selected, and let the "
    "others go on. auto: stop, in a grid mark.",
)
for _name, _what in (("client_chunk", "clients of a run"), ("run_chunk", "runs")):
    flags.DEFINE_string(
        _name,
        "auto",
        f"How many {_what} train at once on a device, 0: all; auto: one on CPUs, else all.",
    )
    must_be_number_or(_name, "auto")
flags.DEFINE_string(
    "devices", "auto", "How many devices runs and clients share; auto: all that help and fit."
)
must_be_number_or("devices", "auto", lowest=1)
flags.DEFINE_enum(
    "hold",
    "auto",
    ["auto", "own", "all", "stream"],
    "Whose examples and states each device holds. own: those of its own clients, which it alone "
    "trains; all: those of all, for less waiting if few attend; stream: the states of all, and the "
    "examples that the next rounds need, while the others stay on the host, with one process; "
    "auto: stream if the examples do not fit into memory and there is one process, else own if "
    "several devices share the clients of a run and all attend each round, else all.",
)
flags.DEFINE_enum(
    "precision",
    "auto",
    ["auto", "default", "high", "highest"],
    "Precision of float32 products and convolutions on GPUs and TPUs: default (TF32; on TPUs "
    "bfloat16), high (three products of TF32; on TPUs of bfloat16) or highest (float32; on TPUs "
    "six of bfloat16); auto: what the algorithm needs. CPUs always compute float32.",
)
flags.DEFINE_enum(
    "compile", "full", ["full", "quick"], "quick: in less time, to code that runs longer."
)
flags.DEFINE_bool("deterministic", False, "On GPUs, only operations that give the same bits.")
flags.DEFINE_bool(
    "distributed", False, "Find the other processes of SLURM, a TPU pod, Open MPI or Kubernetes."
)
flags.DEFINE_string("coordinator_address", "", "host:port of process 0, if there are several.")
flags.DEFINE_integer("num_processes", 1, "Processes, on one machine or many.", lower_bound=1)
flags.DEFINE_integer("process_id", 0, "This process; process 0 writes.", lower_bound=0)


@flags.multi_flags_validator(
    ["num_processes", "process_id", "coordinator_address", "distributed"],
    "several processes need --coordinator_address=host:port and each another number below "
    "--num_processes, or --distributed alone",
)
def _processes_fit(values: Mapping[str, Any]) -> bool:
    several = values["num_processes"] > 1
    host, _, port = values["coordinator_address"].rpartition(":")
    has_address = bool(host) and port.isdecimal() and 0 < int(port) < 2**16
    fits = values["process_id"] < values["num_processes"] and (has_address or not several)
    return fits and not (several and values["distributed"])


@flags.multi_flags_validator(
    ["hold", "num_processes", "distributed"], "--hold=stream needs a single process"
)
def _stream_fits(values: Mapping[str, Any]) -> bool:
    return values["hold"] != "stream" or not (values["num_processes"] > 1 or values["distributed"])


RUNNING = _section()
NAMES = tuple(name for section in _SECTIONS for name in section)


def _fits(value: Any) -> bool:
    """Whether the numbers are 0, or neither 0 nor infinite in float32, and below 2^31 in int32."""
    numbers = [each for each in (value if isinstance(value, tuple) else [value]) if each]
    reals = [abs(each) for each in numbers if isinstance(each, float)]
    wholes = [abs(each) for each in numbers if isinstance(each, int)]
    fits = all(1e-38 <= each <= 1e38 for each in reals)
    return fits and max(wholes, default=0) < 2**31


for _name in NAMES:
    _must(_name, "a number that float32 or int32 holds", _fits)

# Flags of some of the binaries.

flags.DEFINE_string("study", "", "Of a paper or the map: what to compare; default: the first.")
_define_list(
    "rows",
    [],
    "Which rows of the study, by their labels; of the map methods by name, "
    "all, or package.module:factory, beside FedAvg; all if none.",
)
_define_list("data", [], "Data sets, each with a table; default: one of the study.")
_must_differ("rows", "data")
flags.DEFINE_string(
    "preset",
    "",
    "--preset=NAME,NAME is --flagfile=presets/NAME.flags of each; later flags win. "
    + ", ".join(sorted(path.stem for path in PRESETS.glob("*.flags")))
    + ".",
)
flags.DEFINE_string(
    "out",
    "",
    "The picture, a .png file; a .pdf goes beside it. Default: data.png; of evaluate a file of the "
    "run's folder.",
)
