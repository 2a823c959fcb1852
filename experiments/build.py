"""From names and flags to the parts of an experiment; an unknown name is a one-line error."""

from __future__ import annotations

import difflib
import importlib
import inspect
import itertools
import math
import pkgutil
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import optax

from fedjax_inv import algorithms, local, models
from fedjax_inv.data import environments, sources
from fedjax_inv.types import Algorithm, Array, Model, Tree, Work

if TYPE_CHECKING:
    from experiments.config import Config

MODELS: dict[str, Callable[..., Model]] = {"mlp": models.mlp, "cnn": models.cnn}

OPTIMIZERS: dict[str, Callable[..., optax.GradientTransformation]] = {
    "sgd": lambda rate, momentum: optax.sgd(rate, momentum or None),
    "adam": lambda rate, momentum: optax.adam(rate),
}

# The betas and the adaptivity 1e-3 of Reddi et al. 2021, Section 5.
SERVER_OPTIMIZERS: dict[str, Callable[..., optax.GradientTransformation]] = {
    "sgd": lambda rate, momentum: optax.sgd(rate, momentum or None),
    "adam": lambda rate, momentum: optax.adam(rate, b1=0.9, b2=0.99, eps=1e-3),
    "yogi": lambda rate, momentum: optax.yogi(rate, b1=0.9, b2=0.99, eps=1e-3),
}


def _classes(data: sources.Dataset, config: Config) -> sources.Dataset:
    """The data with --num_classes classes: two as FL Games groups them, else neighbours binned."""
    groups = environments.GROUPS.get(config.dataset) if config.num_classes == 2 else None
    return (
        environments.grouped(data, groups)
        if groups
        else environments.binned(data, config.num_classes)
    )


def _flipped(config: Config) -> dict[str, Any]:
    return {
        "flips": config.flips,
        "test_flip": config.test_flip,
        "label_noise": config.label_noise,
        "test_fraction": config.test_fraction,
        "seed": config.data_seed,
    }


ENVIRONMENTS: dict[str, Callable[[sources.Dataset, Config], sources.Dataset]] = {
    "rotated": lambda data, config: environments.rotated(data, config.angles, config.data_seed),
    "colored": lambda data, config: environments.colored(
        _classes(data, config), binarise=config.binarise, **_flipped(config)
    ),
    "patched": lambda data, config: environments.patched(
        _classes(data, config), **_flipped(config)
    ),
    "none": lambda data, config: data,
}

# Algorithms that train centrally, on a federation of one client that holds every example.
POOLED = ("erm",)

# Arguments of the factories that come from flags of their own, or from the data, or are functions.
_NOT_SETTINGS = ("server_optimizer", "num_players", "sample", "body_every", "is_local")


class Run(NamedTuple):
    """One training run: what may differ within a compiled program."""

    seed: int
    hyper: dict[str, float]


class Cell(NamedTuple):
    """Runs that share a compiled program: one algorithm, one held-out domain."""

    algorithm: str
    settings: dict[str, Any]  # hyperparameters that are not numbers, or whole ones
    held_out: str | None
    runs: tuple[Run, ...]

    @property
    def label(self) -> str:
        """The algorithm and all its settings."""
        return " ".join([self.algorithm, *(f"{k}={v}" for k, v in self.settings.items())])

    @property
    def name(self) -> str:
        """The label and the held-out domain, as a folder's name."""
        name = f"{self.label} {self.held_out or 'test'}"
        return "".join(c if c.isalnum() or c in "=._-" else "-" for c in name)


def short_labels(cells: Sequence[Cell]) -> list[str]:
    """What tables call the cells: the algorithm, with the settings in which its cells differ."""
    labels = []
    for cell in cells:
        others = [other.settings for other in cells if other.algorithm == cell.algorithm]
        varied = {k: v for k, v in cell.settings.items() if any(o[k] != v for o in others)}
        labels.append(cell._replace(settings=varied).label)
    return labels


def check_known(flag: str, value: str, allowed: Collection[str]) -> None:
    """Raises ValueError, with the nearest names, unless `value` is one of `allowed`."""
    if value not in allowed:
        near = difflib.get_close_matches(value, allowed, 3, 0.4)
        hint = f"did you mean {' or '.join(near)}? All: " if near else "must be one of "
        raise ValueError(f"--{flag}={value}: unknown; {hint}{', '.join(allowed)}")


def algorithm_names() -> list[str]:
    """The files of the package `algorithms`."""
    return sorted(module.name for module in pkgutil.iter_modules(algorithms.__path__))


def factory(name: str) -> Callable[..., Algorithm]:
    """The factory of an algorithm: the function that has the name of its file."""
    return getattr(importlib.import_module(f"{algorithms.__name__}.{name}"), name)


def hyperparameters(name: str) -> dict[str, Any]:
    """The keyword-only arguments of an algorithm's factory, with their defaults."""
    parameters = inspect.signature(factory(name)).parameters.values()
    return {
        p.name: p.default
        for p in parameters
        if p.kind is p.KEYWORD_ONLY and p.name not in _NOT_SETTINGS
    }


def settings(config: Config) -> dict[str, dict[str, tuple[Any, ...]]]:
    """The --set flags of each algorithm: name -> values, in the type of the factory's default.

    A name counts for every algorithm that knows it, and at least one must.
    """
    known = {name: hyperparameters(name) for name in config.algorithm}
    chosen: dict[str, dict[str, tuple[Any, ...]]] = {name: {} for name in config.algorithm}
    everything = sorted(set(itertools.chain.from_iterable(known.values())))
    for entry in config.settings:
        name, equals, text = entry.partition("=")
        if not equals or not text:
            raise ValueError(f"--set={entry}: must be name=value, or name=value,value")
        if not everything:
            raise ValueError(f"--set={entry}: {', '.join(config.algorithm)} takes no settings")
        if name not in everything:
            near = difflib.get_close_matches(name, everything, 1, 0.0)[0]
            raise ValueError(
                f"--set={entry}: {', '.join(config.algorithm)} has no {name}; nearest is {near}, "
                f"all are {', '.join(everything)}"
            )
        for algorithm, defaults in known.items():
            if name in defaults:
                chosen[algorithm][name] = tuple(
                    _parse(entry, value, defaults[name]) for value in text.split(",")
                )
    return chosen


def _parse(entry: str, text: str, default: Any) -> Any:
    kind = type(default)
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise ValueError(f"--set={entry}: must be true or false")
        return text.lower() == "true"
    try:
        value = kind(text)
    except ValueError:
        raise ValueError(f"--set={entry}: must be a {kind.__name__}") from None
    if kind is not str and not 0 <= value < math.inf:
        raise ValueError(f"--set={entry}: must be at least 0 and finite")
    return value


def cells(config: Config, held_out: Sequence[str | None]) -> list[Cell]:
    """The grid: a cell per algorithm, held-out domain and setting that is not a real number; in
    it a run per seed and real hyperparameters."""
    result = []
    for (algorithm, chosen), domain in itertools.product(settings(config).items(), held_out):
        numbers: dict[str, tuple[float, ...]] = {"learning_rate": config.learning_rate}
        if "server_optimizer" in inspect.signature(factory(algorithm)).parameters:
            numbers["server_learning_rate"] = config.server_learning_rate
        numbers |= {k: v for k, v in chosen.items() if isinstance(v[0], float)}
        fixed = {k: v for k, v in chosen.items() if k not in numbers}
        runs = tuple(Run(seed, hyper) for hyper in _product(numbers) for seed in config.seeds)
        result += [Cell(algorithm, setting, domain, runs) for setting in _product(fixed)]
    return result


def _product(options: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    return [
        dict(zip(options, values, strict=True)) for values in itertools.product(*options.values())
    ]


def dataset(config: Config) -> sources.Dataset:
    """The data set with its environments."""
    loaded = sources.load(
        config.dataset,
        data_dir=config.data_dir or None,
        image_size=config.image_size or None,
        count=config.num_images or None,
    )
    return ENVIRONMENTS[config.environment](loaded, config)


def held_out(config: Config, domains: Sequence[str]) -> list[str | None]:
    """What --held_out asks for: domains to hold out in turn, None for the test split."""
    if config.held_out == "none" or (not config.held_out and len(domains) == 1):
        return [None]
    if len(domains) == 1:
        raise ValueError(f"--held_out={config.held_out}: must be none, as there is one domain only")
    if config.held_out == "all":
        return list(domains)
    names = (config.held_out or domains[-1]).split(",")
    for name in names:
        check_known("held_out", name, [*domains, "all", "none"])
    return list(names)


def model(config: Config, data: sources.Dataset) -> Model:
    """The network of --model, --widths, --cut and --conv, for a data set."""
    arguments: dict[str, Any] = {"widths": config.widths} if config.widths else {}
    known = inspect.signature(MODELS[config.model]).parameters
    arguments |= {n: getattr(config, n) for n in ("activation", "conv", "norm") if n in known}
    if config.norm != "none" and "norm" not in known:
        raise ValueError(f"--norm={config.norm}: --model={config.model} has no norms; take mlp")
    try:
        network = MODELS[config.model](
            len(data.classes), cut=None if config.cut < 0 else config.cut, **arguments
        )
    except ValueError as error:
        raise ValueError(f"--model={config.model}: {error}") from None
    return models.rendered(network, data.render) if data.render else network


def work(config: Config, learning_rate: float | Array) -> Work:
    """Local training by the flags."""
    optimizer = OPTIMIZERS[config.optimizer](learning_rate, config.momentum)
    if config.batch_size == 0:
        return local.full_batch(optimizer, num_steps=config.local_steps or config.local_epochs)
    if config.local_steps:
        return local.steps(optimizer, batch_size=config.batch_size, num_steps=config.local_steps)
    return local.epochs(optimizer, batch_size=config.batch_size, num_epochs=config.local_epochs)


def algorithm(
    config: Config,
    cell: Cell,
    network: Model,
    hyper: Mapping[str, float | Array],
    num_players: int,
    sample: Tree,
) -> Algorithm:
    """The algorithm of a cell with the hyperparameters of one run, which may be tracers.

    num_players: the training clients. sample: a batch of inputs.
    """
    arguments = {**cell.settings, **hyper}
    local_work = work(config, arguments.pop("learning_rate"))
    asked = inspect.signature(factory(cell.algorithm)).parameters
    server_rate = arguments.pop("server_learning_rate", None)
    if "server_optimizer" in asked:
        arguments["server_optimizer"] = SERVER_OPTIMIZERS[config.server_optimizer](
            server_rate, config.server_momentum
        )
    # A cycle: the representation, then everyone at once or the players in turn.
    cycle = 1 + (num_players if config.play == "sequential" else 1)
    known = {"num_players": num_players, "sample": sample, "body_every": cycle}
    arguments |= {name: value for name, value in known.items() if name in asked}
    return factory(cell.algorithm)(network, local_work, **arguments)
