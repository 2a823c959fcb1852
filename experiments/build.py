"""From flags to what they name: network, task, algorithm, local training, cohorts, evaluations.

`assemble` puts these parts together. Each function raises UsageError for flags that do not fit.
"""

import contextlib
import functools
import inspect
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_inv import checks, freezing, keys, late_uploads, models, objectives, schedules
from fedjax_inv.algorithms import LISTED
from fedjax_inv.checks import UsageError, one_line
from fedjax_inv.data import augment, federation
from fedjax_inv.data.dataset import Dataset
from fedjax_inv.data.federation import Split
from fedjax_inv.inputs import schedule_key
from fedjax_inv.objectives import Score
from fedjax_inv.plan import Evaluations
from fedjax_inv.types import Algorithm, Array, Cohort, Facts, Loss, Model, Tree, Variables, Work

from . import factories, metrics
from .config import MODELS, Config, Training
from .errors import check_known, flag_error, in_flags, near
from .factories import is_outside
from .metrics import ACCURACY, Measure
from .selection import RULES

_STALE = 10  # rounds after which a client of --late=stale begins anew


def check_names(config: Config) -> None:
    """Checks the names of code, before any data are read."""
    factories.check_factory("model", config.network.model, MODELS)
    if config.method.loss != "auto":
        factories.check_factory("loss", config.method.loss, ["auto", *_LOSSES])
    if config.evaluation.score != "auto" and not is_outside(config.evaluation.score):
        check_known("score", config.evaluation.score, ["auto", *objectives.SCORES])
    for entry in config.output.paper:
        check_known("paper", entry.partition("=")[0], {*config.method.algorithm, *LISTED})
    for name in config.method.algorithm:
        check_algorithm(name)
        if factories.facts(name).needs_norm and not _has_norm(config):
            text = "needs --norm=batch, as the network has no normalisation layers"
            raise flag_error("algorithm", name, text)
    for flag in _OWN_FLAGS:
        optimizer_arguments(config.training, flag)


def check_algorithm(name: str) -> None:
    """Raises UsageError if there is no algorithm of this name."""
    factories.check_factory("algorithm", name, LISTED)


# The network.


def _has_norm(config: Config) -> bool:
    takes_norm = factories.takes(factories.network(config.network.model), "norm")
    is_asked = config.network.norm != "none" and takes_norm
    return is_asked or config.network.model not in factories.WITHOUT_NORM


def network_arguments(config: Config, data: Dataset) -> dict[str, Any]:
    """The arguments of a network's factory for a data set.

    They are num_classes, which is positional, and all flags that the factory has arguments for.
    """
    factory = factories.network(config.network.model)
    if factories.takes(factory, "vocabulary") != bool(data.words):
        are = "are texts; must be lstm" if data.words else "are no texts"
        raise flag_error("model", config.network.model, f"does not fit the data, which {are}")
    values = {
        "activation": config.network.activation,
        "widths": config.network.widths or _default_widths(config, data),
        "cut": None if config.network.cut < 0 else config.network.cut,
        "norm": None if config.network.norm == "none" else config.network.norm,
        "vocabulary": len(data.words),
        "logit_scale": config.network.logit_scale,
        "image_size": _image_size(data) if factories.takes(factory, "image_size") else None,
    }
    taken = {k: v for k, v in values.items() if v is not None and factories.takes(factory, k)}
    return {"num_classes": len(data.classes), **taken}


def network(config: Config, data: Dataset) -> Model:
    """The network for a data set."""
    settings = network_arguments(config, data)
    factory, count = factories.network(config.network.model), settings.pop("num_classes")
    model = factories.called("model", config.network.model, {}, Model, factory, count, **settings)
    if config.network.head_from:
        try:
            model = models.from_vectors(model, config.network.head_from, data.classes)
        except UsageError as error:
            raise in_flags(error, "", {"file": "head_from"}) from None
    if config.network.dtype != "float32":
        model = models.computed_in(model, config.network.dtype)
    if is_scaled(config, data):
        if data.words or config.network.weights:
            text = "must be false, as texts and images of --weights have no scale of their own"
            raise flag_error("standardise", config.network.standardise, text)
        model = models.scaled(model)
    if config.network.weights:
        if config.network.model not in models.BODIES:
            text = f"must be left out: --model={config.network.model} has no published weights"
            raise flag_error("weights", config.network.weights, text)
        if not config.network.init_from:  # else the networks come from there
            try:
                model = models.weights.pretrained(model, config.network.weights)
            except UsageError as error:
                raise in_flags(
                    error, f"--model={config.network.model}", {"path": "weights"}
                ) from None
        body = models.BODIES[config.network.model]
        model = models.normalised(model, body.mean, body.std)
    if config.network.augment:
        shape = _shape(data)
        if len(shape) != 4 or shape[-1] != 3:
            text = f"must be false, as the examples are {list(shape[1:])} and no RGB images"
            raise flag_error("augment", True, text)
        model = models.augmented(model, augment.augment)
    if data.task == "values" and not is_outside(config.method.loss):
        model = models.in_units(model)
    return models.painted(model, data.render) if data.render else model


def is_scaled(config: Config, data: Dataset) -> bool:
    """Whether the network shifts and scales its inputs.

    It also does for categories, as those that do not occur in training are 0 (`scale` is 0).
    """
    return config.network.standardise or any(column.categories for column in data.columns)


def _default_widths(config: Config, data: Dataset) -> tuple[int, ...] | None:
    """The default widths of the mlp on vectors; None: the network's own."""
    if config.network.model != "mlp" or data.words or not jax.tree_util.all_leaves([data.x]):
        return None
    return models.widths_for(data.x.shape[1]) if np.ndim(data.x) == 2 else None


def sample(x: Tree) -> Tree:
    """The shapes of a batch of one example of x."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((1, *leaf.shape[1:]), leaf.dtype), x)


def _shape(data: Dataset) -> tuple[int, ...]:
    """The shape of a batch of one example, as the network sees it."""
    return jax.eval_shape(data.render or (lambda x: x), sample(data.x)).shape


def _image_size(data: Dataset) -> int:
    """The image size of a first layer (32, 64 or 224) that is nearest to the data's."""
    shape = _shape(data)
    side = shape[1] if len(shape) == 4 else 32
    return min((32, 64, 224), key=lambda size: abs(math.log(size / side)))


def network_shapes(config: Config, model: Model, data: Dataset) -> Variables:
    """The shapes of a network's variables, after a call on the data's shapes."""
    x, key = sample(data.x), jax.eval_shape(lambda: jax.random.key(0))
    mask = jax.ShapeDtypeStruct((1,), bool)
    with _calls(config, x):
        variables = jax.eval_shape(model.init, key, x)
        jax.eval_shape(
            lambda v, x, m, k: models.apply(model, v, x, m, True, k), variables, x, mask, key
        )
    if trained := config.network.train_only:
        try:
            freezing.check(variables.params, trained)
        except UsageError as error:
            raise in_flags(error, "", {"patterns": "train_only"}) from None
        if config.network.augment and freezing.is_frozen(variables.params, trained).body:
            text = f"must be false, as --train_only={','.join(trained)} trains no body"
            raise flag_error("augment", True, text)
    # A loss or an algorithm of one's own may need other outputs.
    are_own = is_outside(config.method.loss) or all(map(is_outside, config.method.algorithm))
    if is_outside(config.network.model) and not are_own:
        _check_outputs(config, model, variables, data)
    return variables


def _check_outputs(config: Config, model: Model, variables: Variables, data: Dataset) -> None:
    """Checks that a network has an output for each of the data's targets."""
    x = sample(data.x)
    with _calls(config, x):
        outputs = jax.eval_shape(functools.partial(models.predict, model), variables, x)
    count, shape = len(data.classes), getattr(outputs, "shape", None)
    if shape == (1, count) or (shape == (1,) and count == 1 and data.task != "classes"):
        return
    found = type(outputs).__name__ if shape is None else ["B", *shape[1:]]
    text = f"must return [B, {count}], one for each of the data's {data.task}, returns {found}"
    raise flag_error("model", config.network.model, text)


@contextlib.contextmanager
def _calls(config: Config, x: Tree) -> Iterator[None]:
    """Makes errors of a network that is called on x, which is shapes, errors of its flags."""
    try:
        yield
    except UsageError as error:
        names = {"path": "weights", "file": "head_from"}
        raise in_flags(error, f"--model={config.network.model}", names) from None
    except Exception as error:
        if not is_outside(config.network.model):
            raise
        shapes = ", ".join(map(checks.shown, jax.tree.leaves(x)))
        text = f"fails on inputs {shapes}: {one_line(error)}"
        raise flag_error("model", config.network.model, text) from None


# The loss of training and the score of evaluations.

# Loss -> the kinds of targets that it fits; the first loss of a kind is its default.
_LOSSES = {
    "cross_entropy": ("classes",),
    "binary_cross_entropy": ("labels",),
    "squared_error": ("values",),
    "focal": ("classes", "labels"),
    "huber": ("values",),
}


class Task(NamedTuple):
    """The kind of the data's targets, and the loss and the score for it."""

    kind: str  # classes, labels or values
    loss: Loss  # of evaluations, and of algorithms that take a loss
    # the same against means of targets [B, K]; None: there is none
    loss_of_means: Loss | None
    is_default: bool  # whether algorithms keep the loss that they have by default
    score: Score
    num_domains: int  # of the data, for algorithms that need it

    @property
    def measure(self) -> Measure:
        """How to read the score."""
        score = self.score
        found = Measure(score.name, score.higher_is_better, score.is_share, score.is_worst)
        return ACCURACY if found == ACCURACY else found


def _score(config: Config, kind: str) -> Score:
    name = config.evaluation.score
    if name == "auto":
        return objectives.DEFAULTS[kind][1]
    known = dict(objectives.SCORES)
    if is_outside(name):
        found = factories.imported("score", name)
        if not isinstance(found, Score) and not callable(found):
            raise flag_error("score", name, "must be a function or a Score")
        known[name] = found if isinstance(found, Score) else Score(name.partition(":")[2], found)
    _check_kind("score", name, {each: of.tasks for each, of in known.items()}, kind)
    return known[name]


def _check_kind(flag: str, name: str, kinds: Mapping[str, Sequence[str]], kind: str) -> None:
    """Checks that a loss or a score fits targets of a kind. kinds: those that each one fits."""
    if kind not in kinds[name]:
        fits = ", ".join(each for each, of in kinds.items() if kind in of)
        raise flag_error(flag, name, f"does not fit {kind}, which the data have; must be of {fits}")


def task(config: Config, kind: str, num_domains: int = 1) -> Task:
    """The task of data with this kind of targets, which fits the algorithms."""
    loss, name = objectives.DEFAULTS[kind][0], config.method.loss
    if name == "auto":
        name = next(each for each, kinds in _LOSSES.items() if kind in kinds)
    elif not is_outside(name):
        _check_kind("loss", name, _LOSSES, kind)
    if is_outside(name):
        loss = factories.imported("loss", name)
    elif name in ("focal", "huber"):
        loss = objectives.focal(2) if name == "focal" else objectives.huber(1)
    of_means = loss if kind != "classes" else None
    if name == "cross_entropy":
        of_means = objectives.soft_cross_entropy
    is_default = config.method.loss == "auto" and kind == "classes"
    found = Task(kind, loss, of_means, is_default, _score(config, kind), num_domains)
    for each in config.method.algorithm:
        facts = factories.facts(each)
        if facts.needs_classes and kind != "classes":
            raise flag_error("algorithm", each, f"needs data with classes, these have {kind}")
        if config.method.loss != "auto" and not factories.takes(factories.algorithm(each), "loss"):
            raise flag_error("algorithm", each, "has a loss of its own, must stand without --loss")
        if facts.means_of_targets and not (is_default or of_means):
            text = "needs a loss that takes means of classes, such as cross_entropy"
            raise flag_error("algorithm", each, text)
    return found


# The algorithms and their settings.


def facts(config: Config, name: str) -> Facts:
    """The facts of an algorithm; with --pooled it trains on all examples at once."""
    found = factories.facts(name)
    return found._replace(pooled=found.pooled or config.partition.pooled)


def is_pooled(config: Config) -> bool:
    """Whether all algorithms train on all examples at once."""
    return all(facts(config, name).pooled for name in config.method.algorithm)


def settings(config: Config) -> dict[str, dict[str, tuple[Any, ...]]]:
    """The --set flags of each algorithm: name -> values, in the type of the factory's argument.

    A setting applies to every algorithm that has its name; at least one algorithm must have it.
    """
    known = {name: factories.hyperparameters(name) for name in config.method.algorithm}
    result: dict[str, dict[str, tuple[Any, ...]]] = {name: {} for name in config.method.algorithm}
    for entry in config.method.set:
        name, _, text = entry.partition("=")
        owners = [algorithm for algorithm, kinds in known.items() if name in kinds]
        if not owners:
            # A text cannot set an argument without types.
            every = itertools.chain.from_iterable(kinds.items() for kinds in known.values())
            others = sorted({each for each, kinds in every if {*kinds} - {type(None)}})
            have = near(name, others) if others else "there are no settings"
            raise flag_error("set", entry, f"{', '.join(known)} has no {name}; {have}")
        for algorithm in owners:
            kinds = known[algorithm][name]
            values = tuple(factories.parsed("set", entry, word, kinds) for word in text.split(","))
            may_be_infinite = name in factories.facts(algorithm).infinite
            if not (may_be_infinite or all(map(checks.is_finite, values))):
                raise flag_error("set", entry, "must be a finite number")
            if len({*values}) < len(values):
                raise flag_error("set", entry, "must be one or several different values")
            result[algorithm][name] = values
    return result


def setting_flags(name: str) -> dict[str, str]:
    """The flag of each argument of an algorithm's factory, for `errors.in_flags`."""
    return {argument: f"set={argument}" for argument in factories.hyperparameters(name)}


def algorithm(
    name: str, model: Model, work: Work, task: Task, arguments: Mapping[str, Any]
) -> Algorithm:
    """An algorithm. arguments: of its factory, by name."""
    factory, arguments = factories.algorithm(name), dict(arguments)
    if not task.is_default and factories.takes(factory, "loss"):
        means = factories.facts(name).means_of_targets
        arguments["loss"] = task.loss_of_means if means else task.loss
    if model.mixable is not None and factories.takes(factory, "mixable"):
        arguments["mixable"] = model.mixable
    if factories.facts(name).needs_domains:
        arguments["num_domains"] = task.num_domains
    flags = setting_flags(name)
    return factories.called("algorithm", name, flags, Algorithm, factory, model, work, **arguments)


# The optimizers of clients and server, which are optax's.

# lbfgs needs values of the loss, noisy_sgd draws the same noise for all clients, and
# optimistic_adam is deprecated.
_WITHOUT = ("lbfgs", "noisy_sgd", "optimistic_adam")


def _is_optimizer(name: str, make: Any) -> bool:
    if name.startswith(("_", "scale_by_")) or name in _WITHOUT or not inspect.isfunction(make):
        return False
    parameters = [*inspect.signature(make).parameters.values()]
    is_of_a_rate = bool(parameters) and parameters[0].name == "learning_rate"
    return is_of_a_rate and all(p.default is not p.empty for p in parameters[1:])


# Those of optax that need only a learning rate and a gradient.
OPTIMIZERS = sorted(name for name, make in vars(optax).items() if _is_optimizer(name, make))

# Arguments with their own flag: flag that names the optimizer -> optimizer -> argument -> flag.
_OWN_FLAGS: Mapping[str, Mapping[str, Mapping[str, str]]] = {
    "optimizer": {"sgd": {"momentum": "momentum"}},
    "server_optimizer": {
        "sgd": {"momentum": "server_momentum"},
        "adam": {"eps": "server_epsilon"},
        "yogi": {"eps": "server_epsilon"},
    },
}


def optimizer_arguments(training: Training, flag: str) -> dict[str, Any]:
    """The arguments of an optimizer besides the learning rate.

    flag: the flag that names the optimizer, "optimizer" or "server_optimizer".
    """
    name = getattr(training, flag)
    check_known(flag, name, OPTIMIZERS)
    own = _OWN_FLAGS[flag].get(name, {})
    found = {argument: getattr(training, other) or None for argument, other in own.items()}
    if flag == "server_optimizer":  # b2: Reddi et al. 2021, Section 5, not optax's default
        return found | ({"b2": 0.99} if name in ("adam", "yogi") else {})
    kinds = {
        p.name: (float, type(None)) if p.default is None else (type(p.default),)
        for p in inspect.signature(getattr(optax, name)).parameters.values()
        if not (p.default is p.empty or p.name in own or "mask" in p.name or "dtype" in p.name)
    }
    for entry in training.optimizer_set:
        argument, _, text = entry.partition("=")
        if argument not in kinds:
            text = f"{name} has no {argument} to be set here; {near(argument, kinds)}"
            raise flag_error("optimizer_set", entry, text)
        value = factories.parsed("optimizer_set", entry, text, kinds[argument])
        if not np.isfinite(value or 0):
            raise flag_error("optimizer_set", entry, "must be finite")
        found[argument] = value
    return found


def optimizer(config: Config, flag: str, rate: float | Array) -> optax.GradientTransformation:
    """The optimizer that a flag names, as in `optimizer_arguments`."""
    return getattr(optax, getattr(config.training, flag))(
        rate, **optimizer_arguments(config.training, flag)
    )


# The local training of clients: arguments of `fit`, besides the learning rate.


def local_steps(config: Config) -> dict[str, Any]:
    """Which steps a client takes in a round."""
    make, own = (
        getattr(optax, config.training.optimizer),
        optimizer_arguments(config.training, "optimizer"),
    )
    own.pop("momentum", None)  # is a value of local training
    return {
        "optimizer": functools.partial(make, **own) if own else make,
        "batch_size": config.training.batch_size or None,
        "epochs": config.training.local_epochs,
        "steps": config.training.local_steps or None,
    }


def local_values(config: Config) -> dict[str, float]:
    """The values of local training besides the learning rate."""
    momentum = config.training.momentum if config.training.optimizer == "sgd" else 0.0
    return {
        "momentum": momentum,
        "weight_decay": config.training.weight_decay,
        "clip": config.training.clip,
    }


def local_training(config: Config) -> dict[str, Any]:
    """Both, and the schedule of the learning rate."""
    factor = rate_schedule(config)
    more = {} if factor is None else {"learning_rate_schedule": factor}
    return local_steps(config) | local_values(config) | more


def rate_schedule(config: Config) -> optax.Schedule | None:
    """The factor of the learning rate in round t = 0, 1, ...; None if it is always 1.

    In a warm-up of w rounds it is (t + 1) / (w + 1). After it, with s = t - w, that of a constant
    schedule is 1, and that of a cosine (1 + cos(pi min(s / (rounds - w), 1))) / 2.
    """
    warmup, is_cosine = config.training.warmup_rounds, config.training.schedule == "cosine"
    rest = optax.constant_schedule(1.0)
    if is_cosine:
        rest = optax.cosine_decay_schedule(1.0, config.training.rounds - warmup)
    if not warmup:
        return rest if is_cosine else None
    rising = optax.linear_schedule(1 / (warmup + 1), 1.0, warmup)
    return optax.join_schedules([rising, rest], [warmup])


# The clients that take part in a round, and which of their updates arrive.


def slots(config: Config, num_clients: int) -> int:
    """The number of clients drawn in a round.

    A single client always takes part, as it may hold the pooled examples of all.
    """
    if config.participation.cohort or config.participation.sampling_rate == 1 or num_clients == 1:
        return min(config.participation.cohort or num_clients, num_clients)
    try:
        return schedules.cohort_size(num_clients, config.participation.sampling_rate)
    except UsageError as error:
        raise in_flags(error, "", {"rate": "sampling_rate", "num_clients": "clients"}) from None


def check_clients(config: Config, num_clients: int) -> None:
    """Checks flags against the number of clients."""
    if config.participation.cohort > num_clients:
        raise flag_error(
            "cohort", config.participation.cohort, f"must be at most the {num_clients} clients"
        )
    if config.participation.buffer > num_clients:
        raise flag_error(
            "buffer", config.participation.buffer, f"must be at most the {num_clients} clients"
        )
    for name, entries in (
        ("slow", config.participation.slow),
        ("lossy", config.participation.lossy),
    ):
        for entry in entries:
            if int(entry.partition(":")[0]) >= num_clients:
                raise flag_error(name, entry, f"must be of clients 0..{num_clients - 1}")
    if not _of_clients(config.participation.lossy, num_clients, 1.0).any():
        text = "lets no client's upload arrive; must be above 0 for one"
        raise flag_error("lossy", config.participation.lossy, text)
    if (
        config.participation.frequency < 1
        and num_clients > 1
        and round(config.participation.sparse * num_clients) == 0
    ):
        text = f"selects none of the {num_clients} clients, must be above {0.5 / num_clients:.3g}"
        raise flag_error("sparse", config.participation.sparse, text)
    needed = -(-num_clients // (config.participation.buffer or slots(config, num_clients)))
    if config.participation.first_all and needed > config.training.rounds:
        raise flag_error(
            "first_all", True, f"needs {needed} rounds, --rounds={config.training.rounds}"
        )


def with_rule(config: Config, name: str, algorithm: Algorithm) -> Algorithm:
    """The algorithm with the rule of --missing. name: the algorithm's."""
    try:
        return late_uploads.with_rule(algorithm, config.participation.missing)
    except UsageError as error:
        where = f"--missing={config.participation.missing} --algorithm={name}"
        raise in_flags(error, where, {"algorithm": ""}) from None


class Schedule:
    """(random key, number of clients, number of rounds) -> the cohorts [T, S], for `fit`."""

    def __init__(self, config: Config) -> None:
        self._config = config
        delays = [int(entry.partition(":")[2]) for entry in config.participation.slow]
        # How many broadcasts a run keeps, whatever is drawn.
        self.history = 1 + _STALE if config.participation.late == "stale" else max([1, *delays])

    def __call__(self, key: Array, num_clients: int, num_rounds: int) -> Cohort:
        config = self._config
        drawn, seconds = (
            slots(config, num_clients),
            _of_clients(config.participation.slow, num_clients, 1),
        )
        if config.participation.buffer:
            draw = schedules.buffered(config.participation.buffer, drawn, seconds)
            cohort = draw(key, num_clients, num_rounds)
            # `fit` reads it after this call, as it depends on the number of clients.
            self.history = 1 + schedules.oldest(config.participation.buffer, drawn, seconds)
        elif drawn < num_clients:
            cohort = schedules.sampled(key, num_clients, drawn, num_rounds)
        else:
            cohort = schedules.everyone(num_clients, num_rounds)
        if config.participation.slow and not config.participation.buffer:
            cohort = schedules.slow(cohort, jnp.asarray(seconds))
        arrives = _of_clients(config.participation.lossy, num_clients, 1.0) * (
            1 - config.participation.dropout
        )
        fails = jnp.asarray(1 - arrives)
        if config.participation.frequency < 1:
            often = _arrival(
                key, num_clients, config.participation.sparse, config.participation.frequency
            )
            fails = 1 - jnp.asarray(arrives) * often
        if (
            config.participation.lossy
            or config.participation.dropout
            or config.participation.frequency < 1
        ):
            draw_key = keys.stream(key, "dropout")
            if config.participation.late == "stale":
                cohort = schedules.stale(cohort, draw_key, fails, num_clients, longest=_STALE)
            else:
                cohort = schedules.dropout(cohort, draw_key, fails)
        return (
            schedules.first_all(cohort, num_clients) if config.participation.first_all else cohort
        )


def _arrival(key: Array, num_clients: int, sparse: float, frequency: float) -> Array:
    """The probability [C] that each client's upload arrives. key: the key of the schedule."""
    draw_key = keys.stream(key, "sparse")
    return schedules.upload_probabilities(draw_key, num_clients, sparse=sparse, frequency=frequency)


def is_sparse(config: Config, num_clients: int, seed: int) -> np.ndarray:
    """[C] bool: which clients of a run are sparse, so that --frequency applies to them."""
    key = schedule_key(seed)
    return np.asarray(_arrival(key, num_clients, config.participation.sparse, 0.5)) < 1


def _of_clients(entries: Sequence[str], num_clients: int, default: float) -> np.ndarray:
    """The values [C] of entries client:value, with a default for the other clients."""
    values = np.full(num_clients, default)
    for entry in entries:
        client, _, value = entry.partition(":")
        values[int(client)] = float(value)  # cast to the default's type
    return values


# The evaluations of a run, and the thresholds at which it stops.


def evaluations(config: Config, score: Score, *, by_client: bool) -> Evaluations:
    """When runs are evaluated and what stops them, as `fit` takes it."""
    return Evaluations(
        config.evaluation.eval_every,
        config.evaluation.eval_start,
        score,
        nonfinite=config.evaluation.nonfinite,
        by_class=config.evaluation.watch_classes,
        by_client=by_client,
        watched=config.evaluation.watch_examples,
        warm_start=lambda sizes: warm_start(config, sizes),
        thresholds=config.evaluation.thresholds,
        stop_above=bool(config.evaluation.stop_above),
        end_at_stop=config.evaluation.after_stop == "end",
    )


def warm_start(config: Config, sizes: np.ndarray) -> int:
    """The number of rounds before a stop. sizes [C]: the training clients' numbers of examples."""
    if config.evaluation.stop_above:
        return 0
    if config.evaluation.warm_start == "clients":
        return len(sizes)
    if config.evaluation.warm_start == "batches":
        largest = int(sizes.max())
        return -(-largest // (config.training.batch_size or largest))
    return int(config.evaluation.warm_start)


def check_evaluations(config: Config, task: Task, num_groups: int) -> None:
    """Checks flags against targets and score. num_groups: of validation, a domain or several."""
    metrics.check(config.evaluation.metrics, task.kind)
    if config.evaluation.watch_classes and task.kind != "classes":
        raise flag_error("watch_classes", True, f"needs data with classes, these have {task.kind}")
    if config.evaluation.select == "unseen_domain" and not config.data.validate:
        raise flag_error(
            "select", config.evaluation.select, "needs the domain, --validate=DOMAIN or =next"
        )
    if RULES[config.evaluation.select].compares_domains:
        if task.measure != ACCURACY:
            text = f"compares accuracies of classes, the score is the {task.score.name}"
            raise flag_error("select", config.evaluation.select, text)
        if num_groups < 2:
            text = "needs several training domains, each with clients of its own"
            raise flag_error("select", config.evaluation.select, text)
    for threshold in config.evaluation.thresholds if task.score.is_share else ():
        if not 0 < threshold < 1:
            name = "stop_below" if config.evaluation.stop_below else "stop_above"
            raise flag_error(name, threshold, "must be above 0 and below 1")


def check_classes(classes: Sequence[str], y: np.ndarray, splits: Iterable[Split]) -> None:
    """Checks for --watch_classes that the test has each class that a client has.

    classes: the names of the classes. y: the labels of the examples that the splits index.
    """
    for split in splits:
        of_clients, of_test = (
            np.unique(y[np.concatenate(federation.parts_of(shards))])
            for shards in (split.train, split.test)
        )
        lacking = np.setdiff1d(of_clients, of_test)
        if len(lacking):
            text = f"the test has no example of class {classes[lacking[0]]}, which clients have"
            raise flag_error("watch_classes", True, text)
