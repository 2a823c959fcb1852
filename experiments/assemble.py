"""From all flags to an experiment: its grid, network and data, and each cell ready to compile."""

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_inv import devices, freezing, platforms, rounds, weight_averages
from fedjax_inv.checks import UsageError
from fedjax_inv.data import federation
from fedjax_inv.data.dataset import Dataset
from fedjax_inv.data.federation import Split, Splits
from fedjax_inv.fit import LOCAL, LocalTraining, plan
from fedjax_inv.inputs import group_names
from fedjax_inv.models import Scaling
from fedjax_inv.plan import Plan
from fedjax_inv.types import Algorithm, Array, Examples, Federation, Model, Tree, Variables, Work

from . import build, frozen, grid, machine, scaling
from . import data as data_flags
from .build import Task
from .config import Config, Data, Environment, Partition
from .errors import flag_error, in_flags
from .frozen import FrozenBody
from .grid import Cell

# (shapes of the network's variables, seeds) -> the initial networks of runs, by seed
Start = Callable[[Variables, Sequence[int]], Mapping[int, Variables]]


class Assembled(NamedTuple):
    """An experiment: the grid, the network, and the data with their splits among clients."""

    config: Config
    loaded: Dataset  # as it was read, before environments
    dataset: Dataset  # of the first seed, with its environments
    model: Model
    cells: list[Cell]
    # Of all draws in a row, then copies with wrong labels; on the host if there are several devices
    data: Examples
    source: np.ndarray  # [L] the row of its draw that each row of `data` is, or is a copy of
    splits: Mapping[str | None, Mapping[int, Split]]  # by held-out domain
    variables: Mapping[int, Variables] | None  # initial networks, by seed; None: random ones
    task: Task
    scalers: dict[tuple[str | None, int, str], Any]  # as `_scaler` has made them
    frozen: FrozenBody | None  # whose outputs are `data`, if `model` is the head alone

    @property
    def seen(self) -> Dataset:
        """The data set of the first seed as the whole network sees it."""
        return self.frozen.dataset if self.frozen else self.dataset

    def plan(self, cell: Cell) -> Plan:
        """A cell, ready to be compiled and trained: what the flags ask of `fit`."""
        config, is_labelled = self.config, self.config.evaluation.watch_classes
        splits = Splits(
            self.data,
            self.splits[cell.held_out],
            variables=self.variables,
            scaling=self._scaling_of(cell),
            source=self.source,
            num_classes=len(self.dataset.classes) if is_labelled else 0,
        )
        return plan(
            factory(config, cell, self.task),
            self.model,
            lambda seeds: splits,
            rounds=config.training.rounds,
            grid=cell.runs,
            schedule=build.Schedule(config),
            # All methods of a table are scored on the same examples.
            evaluations=build.evaluations(config, self.task.score, by_client=self.is_personal),
            devices=machine.devices(config),
            loss=self.task.loss,
            **build.local_training(config),
        )

    @property
    def is_personal(self) -> bool:
        """Whether a method serves each client with a network of its own."""
        first = {cell.algorithm: cell for cell in self.cells}.values()
        return any(
            algorithm(self.config, cell, self.model, self.task, cell.runs[0].hyper).personal
            for cell in first
        )

    def as_seen(self, held_out: str | None, seed: int) -> tuple[Dataset, Split]:
        """(the data set with the labels that clients have, the split as rows of it).

        seed: one of the first draw.
        """
        dataset, split = self.dataset, self.splits[held_out][seed]
        if not self.config.partition.wrong_labels:
            return dataset, split
        order, y = np.asarray(split.train.order), np.asarray(self.data.y)
        labels = dataset.y.copy()
        labels[self.source[order]] = y[order]
        seen = split.replaced(lambda each: each._replace(order=self.source[order]))
        return dataset._replace(y=labels), seen

    def scaling(self, held_out: str | None) -> Mapping[int, Scaling] | None:
        """The shift and scale of the network's inputs, by seed; None if it has none."""
        if not build.is_scaled(self.config, self.dataset):
            return None
        return {seed: self._scaling(held_out, seed) for seed in self.splits[held_out]}

    def _scaling_of(self, cell: Cell) -> Mapping[tuple[int, str], Scaling] | None:
        """The same by seed and domain left out, for a cell."""
        if not build.is_scaled(self.config, self.dataset):
            return None
        keys = dict.fromkeys((run.seed, run.left_out) for run in cell.runs)
        return {key: self._scaling(cell.held_out, *key) for key in keys}

    def scaling_record(self, held_out: str | None) -> dict[str, Any] | None:
        """The same as values of JSON, with the names of the features; None if there is none."""
        of_seed = self.scaling(held_out)
        if of_seed is None:
            return None
        by_seed = {str(seed): scaling.record(self.dataset, of) for seed, of in of_seed.items()}
        count = len(next(iter(of_seed.values())).scale)
        return {"features": scaling.feature_names(self.dataset, count), "seeds": by_seed}

    def scale_warning(self) -> str:
        """A line about features of very different scales; "" with --standardise or no vectors."""
        dataset = self.dataset
        is_vector = dataset.render is None and not dataset.words and np.ndim(dataset.x) == 2
        if self.config.network.standardise or self.frozen or not is_vector:
            return ""
        held_out, of_seed = next(iter(self.splits.items()))
        return scaling.warning(dataset, self._scaler(held_out, next(iter(of_seed))))

    def _scaling(self, held_out: str | None, seed: int, left_out: str = "") -> Scaling:
        scaler = self._scaler(held_out, seed, left_out)
        return scaling.of_scaler(self.dataset, scaler, self.config.network.standardise)

    def _scaler(self, held_out: str | None, seed: int, left_out: str = "") -> Any:
        """The scaler that has seen the training examples of a run."""
        key = held_out, seed, left_out
        if key not in self.scalers:
            x, split = jax.tree.map(np.asarray, self.data.x), self.splits[held_out][seed]
            split = federation.without(split, left_out)
            self.scalers[key] = scaling.of_clients(self.dataset, x, split)
        return self.scalers[key]

    def streams(self, cell: Cell) -> bool:
        """Whether a cell's examples stay on the host, but for those that the next rounds need."""
        num_clients = len(next(iter(self.splits[cell.held_out].values())).domain)
        number = 1 if build.facts(self.config, cell.algorithm).pooled else num_clients
        return machine.devices(self.config).streams(number, num_bytes(self.data))

    def check_fit(self) -> None:
        """Raises UsageError if an algorithm's settings do not fit the network."""
        for cell in {cell.label: cell for cell in self.cells}.values():
            _check_start(self, cell)


def factory(config: Config, cell: Cell, task: Task) -> Callable[..., Algorithm]:
    """The factory of a cell's algorithm, as `fit` takes it: (model, work, **hyperparameters).

    It raises UsageError for a value out of range.
    """

    def made(model: Model, work: Work, **hyper: Any) -> Algorithm:
        arguments = {**cell.settings, **hyper}
        # Of classes the algorithm's own loss is that of the task.
        own, loss = task, arguments.pop("loss", None)
        if task.kind == "values" and loss is not None:  # of standardised targets
            own = task._replace(loss=loss, loss_of_means=loss)
        server_rate = arguments.pop("server_learning_rate", None)
        if server_rate is not None:
            arguments["server_optimizer"] = build.optimizer(config, "server_optimizer", server_rate)

        def of(model: Model) -> Algorithm:
            return build.algorithm(cell.algorithm, model, work, own, arguments)

        trained = config.network.train_only
        plain = freezing.train_only(of, model, trained) if trained else of(model)
        if config.training.average:
            first = config.training.average_from - 1
            plain = weight_averages.averaged(plain, decay=config.training.average, first=first)
        return build.with_rule(config, cell.algorithm, plain)

    made.FACTS = build.facts(config, cell.algorithm)  # type: ignore[attr-defined]
    return made


def algorithm(
    config: Config, cell: Cell, model: Model, task: Task, hyper: Mapping[str, float]
) -> Algorithm:
    """The algorithm of a run, whose local training fits clients of any size.

    Raises UsageError for a value out of range.
    """
    own = {k: v for k, v in hyper.items() if k not in LOCAL}
    values = build.local_values(config) | {k: v for k, v in hyper.items() if k in LOCAL}
    work = LocalTraining(**build.local_steps(config)).work(values)
    return factory(config, cell, task)(model, work, **own)


def assemble(
    config: Config, seeds: Sequence[int] | None = None, start: Start | None = None
) -> Assembled:
    """The experiment that the flags describe; nothing is compiled.

    seeds: the seeds to split the data for; by default all of --seeds.
    start: reads the networks of --init_from; without it, runs start from random networks.

    Raises UsageError if the flags do not fit the data.
    """
    build.check_names(config)
    loaded = data_flags.load(config.data)
    draw_of = {seed: data_flags.draw_seed(config, seed) for seed in seeds or config.training.seeds}
    _check_draws(config, loaded, len({*draw_of.values()}), len(draw_of))
    draws = {
        draw: _domains(config, loaded, draw)
        for draw in dict.fromkeys(draw_of.values())  # starting with that of the first seed
    }
    first = next(iter(draws.values()))
    if first.task == "classes" and len(np.unique(first.y)) < 2:
        text = f"has the class {first.classes[first.y[0]]!r} alone, must have two to tell apart"
        raise flag_error("dataset", config.data.dataset, text)
    task = build.task(config, first.task, len(first.domains))
    model = build.network(config, first)
    shapes = build.network_shapes(config, model, first)
    variables = start(shapes, [*draw_of]) if start and config.network.init_from else None
    held_out = data_flags.held_out(config, first.domains)
    validate = data_flags.validated(config, first.domains, held_out)
    left_out = {}
    if config.evaluation.leave_one_out:
        pairs = validate.items()
        left_out = {out: data_flags.training_domains(first, out, by) for out, by in pairs}
    cells = grid.cells(config, held_out, validate, left_out)
    for cell in cells:  # finds an impossible hyperparameter before any compute
        for hyper in {tuple(run.hyper.items()): run.hyper for run in cell.runs}.values():
            algorithm(config, cell, model, task, hyper)
    if body := frozen.of(config, model, shapes, first):
        model, draws = frozen.encoded(body, draws)
        first = next(iter(draws.values()))
    data = _examples(config, task, list(draws.values()))
    if len(machine.devices_of(config)) > 1:
        data = _on_host(data)  # or the first device would hold all data besides its share
    first_rows = {draw: index * len(first.y) for index, draw in enumerate(draws)}
    splits: Mapping[str | None, Mapping[int, Split]] = {
        domain: {
            seed: _split(config, draws[draw], data, (domain, by), seed, first_rows[draw])
            for seed, draw in draw_of.items()
        }
        for domain, by in validate.items()
    }
    source = np.tile(np.arange(len(first.y)), len(draws))
    if config.partition.wrong_labels:
        splits, copied = _with_wrong_labels(config, first, splits)
        data, source = next(iter(splits[cells[0].held_out].values())).train.data, source[copied]
    assembled = Assembled(
        config, loaded, first, model, cells, data, source, splits, variables, task, {}, body
    )
    _check_watching(assembled)
    if any([_check_stream(assembled, cell) for cell in cells]):
        return assembled._replace(data=_on_host(data))
    return assembled._replace(data=padded(data))


_SMALL_DRAW = 2**23  # bytes


def _domains(config: Config, loaded: Dataset, draw: int) -> Dataset:
    """The data set with a draw of its environments."""
    if config.data.is_path or num_bytes(loaded.x) > _SMALL_DRAW:
        return data_flags.domains(config, loaded, draw)
    return _kept_domains(config.data, config.environment, config.partition.clients, draw)


@functools.lru_cache(maxsize=64)
def _kept_domains(data: Data, environment: Environment, clients: int, draw: int) -> Dataset:
    """The last draws of small data sets, which the next rows of a study use again."""
    config = Config(data, environment, Partition(clients=clients))
    return data_flags.domains(config, data_flags.load(data), draw)


def _on_host(data: Examples) -> Examples:
    """The examples as arrays of NumPy; mapped files stay mapped."""
    return jax.tree.map(
        lambda leaf: leaf if isinstance(leaf, np.ndarray) else np.asarray(leaf), data
    )


def _check_stream(assembled: Assembled, cell: Cell) -> bool:
    """Whether a cell's examples stay on the host.

    Raises UsageError if its algorithm or an evaluation needs all of them in one round.
    """
    config = assembled.config
    if not assembled.streams(cell):
        return False
    why = "with --hold=stream"
    if config.machine.hold == "auto":
        why = "as the data do not fit into memory and come from the host (--hold=stream)"
    if config.partition.pooled:
        raise flag_error("pooled", True, f"must be left out {why}")
    if build.facts(config, cell.algorithm).pooled:
        text = f"must be another {why}: it trains on all examples at once"
        raise flag_error("algorithm", cell.algorithm, text)
    if config.evaluation.watch_examples:
        raise flag_error(
            "watch_examples", config.evaluation.watch_examples, f"must be left out {why}"
        )
    return True


def _flag_of_model(chosen: Config, variables: Variables) -> str:
    """The flag to change where an algorithm refuses the network."""
    if (
        chosen.network.train_only
        and freezing.is_frozen(variables.params, chosen.network.train_only).head
    ):
        return "train_only"
    return "model" if chosen.network.cut < 0 else "cut"


def _check_start(assembled: Assembled, cell: Cell) -> None:
    """Raises UsageError if a run of a cell cannot start; nothing is computed."""
    config = assembled.config
    model, hyper = assembled.model, cell.runs[0].hyper
    built = algorithm(config, cell, model, assembled.task, hyper)
    of_seed = assembled.splits[cell.held_out].values()
    split, known = next(iter(of_seed)), build.facts(config, cell.algorithm)
    if known.needs_domains and not any(
        federation.mixes_domains(each, pooled=known.pooled) for each in of_seed
    ):
        text = "needs examples of several domains in a client; --partition=mixed deals such"
        raise flag_error("algorithm", cell.algorithm, text)
    number = 1 if known.pooled else len(split.domain)
    sizes = jax.ShapeDtypeStruct((number,), jnp.int32)
    key = jax.eval_shape(lambda: jax.random.key(0))
    variables = jax.eval_shape(model.init, key, build.sample(assembled.data.x))

    def init(variables: Variables, size: Array, key: Array) -> rounds.State:
        clients = Federation(assembled.data, jnp.zeros(1, jnp.int32), size, size)
        return rounds.init(built, variables, clients, key)

    try:
        # JAX warns of indices that are too large, before its error.
        with warnings.catch_warnings(action="ignore"):
            jax.eval_shape(init, variables, sizes, key)
    except UsageError as error:
        names = build.setting_flags(cell.algorithm)
        names["model"] = _flag_of_model(config, variables)
        raise in_flags(error, f"--algorithm={cell.algorithm}", names) from None
    except OverflowError as error:  # an index is too large
        text = f"needs arrays larger than int32 counts: {error}"
        raise flag_error("algorithm", cell.label, text) from None


def num_bytes(shapes: Tree) -> int:
    """The bytes of arrays with these shapes."""
    return sum(
        int(np.prod(leaf.shape, dtype=object)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(shapes)
    )


def _with_wrong_labels(
    config: Config, dataset: Dataset, splits: Mapping[str | None, Mapping[int, Split]]
) -> tuple[Mapping[str | None, Mapping[int, Split]], np.ndarray]:
    """(the splits with wrong labels at some clients, the source of each row of their data)."""
    places = [(domain, seed) for domain, of_seed in splits.items() for seed in of_seed]
    made = data_flags.with_wrong_labels(
        config,
        dataset,
        [splits[domain][seed] for domain, seed in places],
        [seed for _, seed in places],
    )
    found: dict[str | None, dict[int, Split]] = {domain: {} for domain in splits}
    for (domain, seed), split in zip(places, made.splits, strict=True):
        found[domain][seed] = split
    return found, made.source


_SMALL = 2**26  # bytes


def padded(data: Examples) -> Examples:
    """The examples, with zeros after them if they take little memory.

    Their number then has three significant bits, so that similar data share a compiled program.
    """
    count = len(data.y)
    step = 1 << max(count.bit_length() - 3, 0)
    more = -count % step
    if more == 0 or num_bytes(data) > _SMALL:
        return data

    def pad(leaf: Array) -> Array:
        zeros = np.zeros((more, *leaf.shape[1:]), leaf.dtype)
        whole = np.concatenate([np.asarray(leaf), zeros])
        return whole if isinstance(leaf, np.ndarray) else jax.device_put(whole)

    return jax.tree.map(pad, data)


def _check_draws(config: Config, loaded: Dataset, count: int, seeds: int) -> None:
    """Raises UsageError if so many draws of the data do not fit into memory.

    seeds: the number of seeds, of which each has its own copies with wrong labels.
    """
    wrong = config.partition.wrong_labels * seeds
    bytes_of_draw = sum(leaf.nbytes for leaf in jax.tree.leaves(loaded.x))
    size = int(2 * (count + wrong) * bytes_of_draw)  # and on the device
    what = f" for {count} draws of the data{' and copies with wrong labels' * bool(wrong)}, twice"
    if count > 1 or wrong:
        try:
            platforms.check_memory("seeds", config.training.seeds, size, devices.memory(), what)
        except UsageError as error:
            raise in_flags(error, "", {"seeds": "seeds"}) from None


def _examples(config: Config, task: Task, draws: Sequence[Dataset]) -> Examples:
    needed = config.evaluation.leave_one_out or task.score.is_worst
    needed |= any(build.facts(config, name).needs_domains for name in config.method.algorithm)
    each = [(draw.x, draw.y, draw.domain if needed else None) for draw in draws]
    arrays = each[0]
    if len(draws) > 1:
        arrays = jax.tree.map(lambda *leaves: np.concatenate(leaves), *each)
    is_large = config.machine.hold == "auto" and devices.too_large(num_bytes(arrays))
    if config.machine.hold == "stream" or is_large:
        return federation.examples_on_host(*arrays)
    return federation.examples(*arrays)


def _split(
    config: Config,
    dataset: Dataset,
    data: Examples,
    held_out: tuple[str | None, str | None],
    seed: int,
    first_row: int,
) -> Split:
    """The split of a run's seed. held_out: the domains of the test and of --validate."""
    domain, validate = held_out
    if config.partition.partition_seed != "each":
        seed = int(config.partition.partition_seed)
    # Environments and splits begin with one permutation each. With the same seed it is the same, so
    # that the test that is drawn, or the clients, would be the environments.
    by_domain = config.partition.partition in ("domain", "mixed", "user")
    is_redrawn = config.is_drawn and (domain is None or not by_domain)
    split = data_flags.split(
        config,
        dataset,
        data,
        held_out=domain,
        validate=validate,
        seed=seed + 2**31 if is_redrawn else seed,
        first_row=first_row,
    )
    build.check_clients(config, len(split.domain))
    return split


def _check_watching(assembled: Assembled) -> None:
    """Raises UsageError if the flags ask for an evaluation or selection that is impossible."""
    config, cells = assembled.config, assembled.cells
    of_first = [*assembled.splits[cells[0].held_out].values()]
    build.check_evaluations(config, assembled.task, len(group_names(of_first)))
    if config.evaluation.watch_classes:
        splits = [split for of_seed in assembled.splits.values() for split in of_seed.values()]
        build.check_classes(assembled.dataset.classes, np.asarray(assembled.data.y), splits)
