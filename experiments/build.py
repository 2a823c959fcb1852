"""From flags to the parts of an experiment."""

import contextlib
import difflib
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from experiments.config import Config
from experiments.registry import (
    MODELS,
    OPTIMIZERS,
    SERVER_OPTIMIZERS,
    check_known,
    factory,
    facts,
    hyperparameters,
    imported,
)
from fedjax_inv import local, models, program, schedules
from fedjax_inv.data import environments, sources
from fedjax_inv.data.dataset import Dataset
from fedjax_inv.data.federation import Split
from fedjax_inv.program import Run
from fedjax_inv.types import Algorithm, Array, Cohort, Model, Work

T = TypeVar("T")


def _classes(data: Dataset, config: Config) -> Dataset:
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


_ENVIRONMENTS: dict[str, Callable[[Dataset, Config], Dataset]] = {
    "rotated": lambda data, config: environments.rotated(data, config.angles, config.data_seed),
    "colored": lambda data, config: environments.colored(
        _classes(data, config), binarise=config.binarise, **_flipped(config)
    ),
    "patched": lambda data, config: environments.patched(
        _classes(data, config), **_flipped(config)
    ),
    "none": lambda data, config: data,
}


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
        return folder_name(f"{self.label} {self.held_out or 'test'}")


def folder_name(name: str) -> str:
    """A name with which any file system can do."""
    return "".join(c if c.isalnum() or c in "=._-" else "-" for c in name)


def short_labels(cells: Sequence[Cell]) -> list[str]:
    """What tables call the cells: the algorithm, with the settings in which its cells differ."""
    labels = []
    for cell in cells:
        others = [other.settings for other in cells if other.algorithm == cell.algorithm]
        varied = {k: v for k, v in cell.settings.items() if any(o[k] != v for o in others)}
        labels.append(cell._replace(settings=varied).label)
    return labels


def called(
    what: str, kind: type[T], make: Callable[..., Any], *arguments: Any, **settings: Any
) -> T:
    """What a factory makes, which may be anyone's. what: the flag that named it.

    Raises ValueError, in one line, if it takes other arguments, refuses them, or makes no `kind`.
    """
    try:
        inspect.signature(make).bind(*arguments, **settings)
    except TypeError as error:
        raise ValueError(f"{what}: takes other arguments ({error})") from None
    try:
        result = make(*arguments, **settings)
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from None
    if not isinstance(result, kind):
        raise ValueError(f"{what}: makes {type(result).__name__}, must make {kind.__name__}")
    return result


def settings(config: Config) -> dict[str, dict[str, tuple[Any, ...]]]:
    """The --set flags of each algorithm: name -> values, in the type that its factory asks for.

    A name counts for every algorithm that knows it, and at least one must.
    """
    known = {name: hyperparameters(name) for name in config.algorithm}
    chosen: dict[str, dict[str, tuple[Any, ...]]] = {name: {} for name in config.algorithm}
    for entry in config.settings:
        name, equals, text = entry.partition("=")
        if not equals or not text:
            raise ValueError(f"--set={entry}: must be name=value, or name=value,value")
        if not any(name in kinds_of for kinds_of in known.values()):
            raise ValueError(f"--set={entry}: {_no_setting(name, known)}")
        for algorithm, kinds_of in known.items():
            if name in kinds_of:
                chosen[algorithm][name] = tuple(
                    _parse(entry, value, kinds_of[name]) for value in text.split(",")
                )
    return chosen


def _no_setting(name: str, known: Mapping[str, Mapping[str, tuple[type, ...]]]) -> str:
    """What is said of a setting that no algorithm has; those are left out that text cannot set."""
    every = itertools.chain.from_iterable(kinds_of.items() for kinds_of in known.values())
    names = sorted({each for each, kinds in every if set(kinds) - {type(None)}})
    if not names:
        return f"{', '.join(known)} takes no settings"
    near = difflib.get_close_matches(name, names, 1)
    hint = f"did you mean {near[0]}? All: " if near else "must be one of "
    return f"{', '.join(known)} has no {name}; {hint}{', '.join(names)}"


def _parse(entry: str, text: str, kinds: tuple[type, ...]) -> Any:
    """The value that `text` is, in the first of the types that it can be; its factory checks it."""
    if type(None) in kinds and text.lower() == "none":
        return None
    if bool in kinds and text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float, str):
        if kind in kinds:
            with contextlib.suppress(ValueError):
                return kind(text)
    if set(kinds) <= {type(None)}:
        raise ValueError(f"--set={entry}: can be set in Python only, as it takes no number or text")
    names = {type(None): "none", bool: "true or false", int: "a whole number", float: "a number"}
    raise ValueError(f"--set={entry}: must be {' or '.join(names[kind] for kind in kinds)}")


def cells(config: Config, held_out: Sequence[str | None]) -> list[Cell]:
    """The grid: a cell per algorithm, held-out domain and setting that is not a real number; in
    it a run per seed and real hyperparameters."""
    result = []
    for (algorithm, chosen), domain in itertools.product(settings(config).items(), held_out):
        numbers: dict[str, tuple[float, ...]] = {"learning_rate": config.learning_rate}
        if "server_optimizer" in inspect.signature(factory(algorithm)).parameters:
            numbers["server_learning_rate"] = config.server_learning_rate
        numbers |= {k: v for k, v in chosen.items() if all(isinstance(x, float) for x in v)}
        fixed = {k: v for k, v in chosen.items() if k not in numbers}
        runs = tuple(program.grid(config.seeds, **numbers))
        result += [Cell(algorithm, setting, domain, runs) for setting in _product(fixed)]
    return result


def _product(options: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    return [
        dict(zip(options, values, strict=True)) for values in itertools.product(*options.values())
    ]


def dataset(config: Config) -> Dataset:
    """The data set with its environments."""
    try:
        loaded = sources.load(
            config.dataset,
            data_dir=config.data_dir or None,
            image_size=config.image_size or None,
            num_images=config.num_images or None,
        )
    except ValueError as error:
        told = str(error).removeprefix(f"name={config.dataset!r}: ")
        raise ValueError(f"--dataset={config.dataset}: {told}") from None
    try:
        return _ENVIRONMENTS[config.environment](loaded, config)
    except ValueError as error:
        raise ValueError(f"--environment={config.environment}: {error}") from None


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


def model(config: Config, data: Dataset) -> Model:
    """The network of --model, --widths, --cut and --conv, for a data set.

    One "package.module:factory" is called as factory(num_classes), with those of these flags that
    it has arguments for.
    """
    make = imported("model", config.model) if ":" in config.model else MODELS[config.model]
    known = inspect.signature(make).parameters
    arguments: dict[str, Any] = {
        name: getattr(config, name) for name in ("activation", "conv") if name in known
    }
    chosen = {
        "widths": config.widths or None,
        "cut": None if config.cut < 0 else config.cut,
        "norm": None if config.norm == "none" else config.norm,
    }
    for name, value in chosen.items():
        if value is not None and name not in known:
            raise ValueError(f"--{name}={value}: --model={config.model} has no {name}")
        if value is not None:
            arguments[name] = value
    network = called(f"--model={config.model}", Model, make, len(data.classes), **arguments)
    return models.rendered(network, data.render) if data.render else network


def work(config: Config, learning_rate: float | Array, capacity: int) -> Work:
    """Local training by the flags. capacity: the most examples that a client has."""
    optimizer = OPTIMIZERS[config.optimizer](learning_rate, config.momentum)
    if config.batch_size == 0:
        num_steps = config.local_steps or config.local_epochs
        return local.full_batch(optimizer, capacity=capacity, num_steps=num_steps)
    if config.local_steps:
        return local.steps(optimizer, batch_size=config.batch_size, num_steps=config.local_steps)
    return local.epochs(optimizer, batch_size=config.batch_size, num_epochs=config.local_epochs)


def algorithm(
    config: Config,
    cell: Cell,
    network: Model,
    hyper: Mapping[str, float | Array],
    capacity: int,
) -> Algorithm:
    """The algorithm of a cell with the hyperparameters of one run, which may be tracers.

    capacity: the most examples that a client has. Raises ValueError for a value out of range.
    """
    arguments = {**cell.settings, **hyper}
    local_work = work(config, arguments.pop("learning_rate"), capacity)
    server_rate = arguments.pop("server_learning_rate", None)
    if server_rate is not None:
        arguments["server_optimizer"] = SERVER_OPTIMIZERS[config.server_optimizer](
            server_rate, config.server_momentum
        )
    flag = f"--algorithm={cell.algorithm}"
    return called(flag, Algorithm, factory(cell.algorithm), network, local_work, **arguments)


def experiment(
    config: Config, cell: Cell, network: Model, num_groups: int, capacity: int
) -> program.Experiment:
    """What the runs of a cell have in common."""
    return program.Experiment(
        network,
        lambda hyper: algorithm(config, cell, network, hyper, capacity),
        num_groups,
        thresholds=config.stop_below,
        end_at_stop=config.after_stop == "end",
        drop_nonfinite=config.nonfinite == "drop",
        pooled=facts(cell.algorithm).pooled,
    )


def inputs(config: Config, cell: Cell, splits: Mapping[int, Split]) -> program.Inputs:
    """What the runs of a cell work on. splits: by seed."""
    return program.inputs(
        cell.runs,
        splits,
        pooled=facts(cell.algorithm).pooled,
        watch_examples=config.watch_examples,
        warm_start=lambda sizes: warm_start(config, sizes),
    )


def warm_start(config: Config, sizes: np.ndarray) -> int:
    """The rounds before a stop. sizes: [C], of the training clients."""
    if config.warm_start == "clients":
        return len(sizes)
    if config.warm_start == "batches":
        largest = int(sizes.max())
        return -(-largest // (config.batch_size or largest))
    return int(config.warm_start)


def capacity(inputs: program.Inputs) -> int:
    """The most examples that a client has, rounded up: nearly equal data share a program."""
    return 8 * -(-int(inputs.train.size.max()) // 8)


def cohorts(config: Config, inputs: program.Inputs, num_rounds: int) -> Cohort:
    """Who attends: [R, T, S], T = num_rounds. Nobody does from round --rounds on."""
    num_clients = inputs.train.size.shape[1]

    def schedule(key: Array) -> Cohort:
        if 0 < config.cohort < num_clients:
            drawn = schedules.sampled(key, num_clients, config.cohort, num_rounds)
        else:
            drawn = schedules.everyone(num_clients, num_rounds)
        real = np.arange(num_rounds)[:, None] < config.rounds
        return drawn._replace(present=drawn.present & real)

    return program.cohorts(schedule, inputs)
