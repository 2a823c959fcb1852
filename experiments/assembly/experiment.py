"""From values to an experiment: its network, its data, and its cells, each ready to be compiled."""

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_inv import freezing, inputs, objectives, rounds, unseen_norms
from fedjax_inv.algorithms import LISTED
from fedjax_inv.checks import UsageError
from fedjax_inv.data import federation, uses
from fedjax_inv.data.dataset import Dataset
from fedjax_inv.data.federation import Split, Splits
from fedjax_inv.fit import plan
from fedjax_inv.inputs import group_names
from fedjax_inv.plan import Plan
from fedjax_inv.types import Algorithm, Array, Examples, Federation, Model, Variables

from ..config import MODELS, Config
from ..errors import check_known, flag_error, in_flags
from . import aggregation, clients, factories, frozen, grid, machine, method, network, objective
from . import data as data_sets
from .frozen import FrozenBody
from .grid import Cell
from .objective import Objective
from .scalers import Scalers

# (shapes of the network's variables, seeds) -> the initial networks of runs, by seed
InitialNetworks = Callable[[Variables, Sequence[int]], Mapping[int, Variables]]


@dataclass(frozen=True, eq=False)
class Assembly:
    """An experiment: its cells, its network, and the data with their splits among clients."""

    config: Config
    loaded: Dataset  # as it was read, before environments
    dataset: Dataset  # of the first seed, with its environments
    model: Model
    cells: list[Cell]
    # Of all draws in a row, then copies with wrong labels; on the host if there are several devices
    data: Examples
    source: np.ndarray  # [L] the row of its draw that each row of `data` is, or is a copy of
    origin: np.ndarray  # [L] the file of each row of `data`, or its row in the source
    domain: np.ndarray  # [L] the domain of each row of `data`
    splits: clients.SplitsByDomain  # by held-out domain, by seed
    variables: Mapping[int, Variables] | None  # initial networks, by seed; None: random ones
    objective: Objective
    frozen: FrozenBody | None  # whose outputs are `data`, if `model` is the head alone

    @property
    def seen(self) -> Dataset:
        """The data set of the first seed as the whole network sees it."""
        return self.frozen.dataset if self.frozen else self.dataset

    def factory(self, cell: Cell) -> method.Factory:
        """The factory of a cell's algorithm, as `fit` takes it: (model, work, **hyper)."""
        return method.factory(self.config, cell.algorithm, cell.settings, self.objective)

    def plan(self, cell: Cell) -> Plan:
        """A cell, ready to be compiled and trained: what the flags ask of `fit`."""
        config, training = self.config, self.config.training
        splits = Splits(
            self.data,
            self.splits[cell.held_out],
            variables=self.variables,
            scaling=self.scalers.of_runs(cell.held_out, cell.runs) if self.is_scaled else None,
            source=self.source,
            num_classes=self._num_classes,
        )
        return plan(
            self.factory(cell),
            self.model,
            lambda seeds: splits,
            rounds=training.rounds,
            grid=cell.runs,
            schedule=method.Cohorts(config.participation),
            evaluations=objective.evaluations(
                config.evaluation,
                training.batch_size,
                self.objective.score,
                # All methods of a table are scored on the same examples.
                by_client=self.is_personal,
            ),
            devices=machine.devices(config.machine, config.network.precision),
            loss=self.objective.loss,
            **method.local_training(training),
        )

    @functools.cached_property
    def is_personal(self) -> bool:
        """Whether a method serves each client with a network of its own."""
        first = {cell.algorithm: cell for cell in self.cells}.values()
        training = self.config.training
        return any(
            method.of_any_size(
                self.factory(cell), training, self.model, cell.runs[0].hyper
            ).personal
            for cell in first
        )

    def served(self, held_out: str | None) -> str | None:
        """The rule by which clients' own networks serve the test (`inputs.own_rule`).

        None if no method of the command serves clients with their own.
        """
        splits = self.splits[held_out].values()
        return inputs.own_rule(splits, self._num_classes) if self.is_personal else None

    @property
    def _num_classes(self) -> int:
        """K, 0 if targets are no classes."""
        return len(self.dataset.classes) if self.objective.kind == "classes" else 0

    @property
    def is_scaled(self) -> bool:
        """Whether the network shifts and scales its inputs."""
        return network.is_scaled(self.config.network, self.dataset)

    @functools.cached_property
    def scalers(self) -> Scalers:
        """The shifts and scales of the network's inputs."""
        standardise = self.config.network.standardise
        return Scalers(self.dataset, self.data.x, self.splits, standardise)

    @property
    def scale_warning(self) -> str:
        """A line about features of very different scales, or "", as of a frozen body."""
        return "" if self.frozen else self.scalers.warning()

    def as_seen(self, held_out: str | None, seed: int) -> tuple[Dataset, Split]:
        """(the data set with the labels that clients have, the split as rows of it).

        seed: one of the first draw.
        """
        dataset = self.dataset
        split = self.splits[held_out][seed]
        if not self.config.partition.wrong_labels:
            return dataset, split
        order = np.asarray(split.train.order)
        labels = dataset.y.copy()
        labels[self.source[order]] = np.asarray(self.data.y)[order]
        seen = split.replaced(lambda shards: shards._replace(order=self.source[order]))
        return dataset._replace(y=labels), seen

    def uses(self, held_out: str | None) -> uses.Uses:
        """What the examples of the first seed are used for."""
        seen = self.as_seen(held_out, next(iter(self.splits[held_out])))
        is_small = not any(self.streams(cell) for cell in self.cells if cell.held_out == held_out)
        return uses.of_split(*seen, count_repeated=is_small)

    @property
    def leaves_one(self) -> bool:
        """Whether a run of --leave_one_out trains on a single domain."""
        left_out = [{run.left_out for run in cell.runs} - {""} for cell in self.cells]
        return any(0 < len(domains) < 3 for domains in left_out)

    @functools.cached_property
    def has_running_norms(self) -> bool:
        """Whether the network has running means and variances (BatchNorm)."""
        try:
            unseen_norms.running(_start(self).stats)
        except UsageError:
            return False
        return True

    def tests_unseen(self, cell: Cell) -> bool:
        """Whether an unseen domain is evaluated."""
        of_seed = self.splits[cell.held_out]
        is_selected = any("unseen_domain" in split.unseen for split in of_seed.values())
        # The report of finished runs has the data of the first seed alone.
        runs = [run for run in cell.runs if run.seed in of_seed]
        return is_selected or bool(np.any(inputs.tests_unseen(runs, of_seed)))

    def streams(self, cell: Cell) -> bool:
        """Whether a cell's examples stay on the host, but for those that the next rounds need."""
        number = len(next(iter(self.splits[cell.held_out].values())).domain)
        if method.facts(self.config, cell.algorithm).pooled:
            number = 1
        config = self.config
        devices = machine.devices(config.machine, config.network.precision)
        return devices.streams(number, clients.num_bytes(self.data))

    def check_fit(self) -> None:
        """Raises UsageError if an algorithm's settings do not fit the network."""
        for cell in {cell.label: cell for cell in self.cells}.values():
            _check_start(self, cell)


def make(
    config: Config, seeds: Sequence[int] | None = None, start: InitialNetworks | None = None
) -> Assembly:
    """The experiment that the flags describe; nothing is compiled.

    seeds: the seeds to split the data for; by default all of --seeds.
    start: reads the networks of --init_from; without it, runs start from random networks.

    Raises UsageError if the flags do not fit the data.
    """
    check_names(config)
    made = clients.draws(config, seeds or config.training.seeds)
    first = made.first
    scored = _objective(config, first)
    own_loss = factories.is_outside(config.method.loss)
    model = network.make(config.network, first, own_loss=own_loss)
    shapes = _shapes(config, model, first)
    variables = None
    if start and config.network.init_from:
        variables = start(shapes, [*made.of_seed])
    cells = _cells(config, first)
    _check_hyperparameters(config, cells, model, scored)

    if body := frozen.of(config, model, shapes, first):
        model, encoded = frozen.encoded(body, made.datasets)
        made = replace(made, datasets=encoded)
        first = made.first

    # The examples, and who holds which.
    facts = [method.facts(config, name) for name in config.method.algorithm]
    needs_domains = config.evaluation.leave_one_out or scored.score.is_worst
    needs_domains = needs_domains or any(known.needs_domains for known in facts)
    examples = clients.examples(config, [*made.datasets.values()], with_domains=needs_domains)
    if len(machine.devices_of(config.machine)) > 1:
        # Or the first device would hold all data besides its share.
        examples = clients.on_host(examples)
    deal = clients.deal(config, made, examples, {cell.held_out: cell.validate for cell in cells})
    for of_seed in deal.splits.values():
        for split in of_seed.values():
            number = len(split.domain)
            method.check_clients(config.participation, config.training.rounds, number)
            drawn = method.slots(config.participation, number)
            aggregation.check_clients(config.aggregation, drawn, number)
    setup = Assembly(
        config,
        made.loaded,
        first,
        model,
        cells,
        deal.data,
        deal.source,
        deal.origin,
        deal.domain,
        deal.splits,
        variables,
        scored,
        body,
    )
    _check_evaluations(setup)
    streamed = [cell for cell in cells if setup.streams(cell)]
    for cell in streamed:
        _check_stream(setup, cell)
    place = clients.on_host if streamed else clients.padded
    return replace(setup, data=place(setup.data))


def check_names(config: Config) -> None:
    """Checks the names of code, before any data are read."""
    loss = config.method.loss
    score = config.evaluation.score
    factories.check_factory("model", config.network.model, MODELS)
    if loss != "auto":
        factories.check_factory("loss", loss, ["auto", *objective.LOSSES])
    if score != "auto" and not factories.is_outside(score):
        check_known("score", score, ["auto", *objectives.SCORES])
    for entry in config.output.paper:
        check_known("paper", entry.partition("=")[0], {*config.method.algorithm, *LISTED})
    for name in config.method.algorithm:
        method.check_algorithm(name)
        if factories.facts(name).needs_norm and not network.has_norm(config.network):
            text = "needs --norm=batch, as the network has no normalisation layers"
            raise flag_error("algorithm", name, text)
    method.check_optimizers(config.training)


def _objective(config: Config, dataset: Dataset) -> Objective:
    """The loss and the score for the data's targets, which fit the algorithms."""
    if dataset.task == "classes" and len(np.unique(dataset.y)) < 2:
        text = f"has the class {dataset.classes[dataset.y[0]]!r} alone, must have two to tell apart"
        raise flag_error("dataset", config.data.dataset, text)
    names = config.method.loss, config.evaluation.score
    made = objective.make(*names, dataset.task, len(dataset.domains))
    method.check_fits(config.method, made)
    return made


def _shapes(config: Config, model: Model, dataset: Dataset) -> Variables:
    """The shapes of the network's variables; it fits the data."""
    names = config.method.algorithm
    are_own = factories.is_outside(config.method.loss) or all(map(factories.is_outside, names))
    return network.shapes(config.network, model, dataset, any_outputs=are_own)


def _cells(config: Config, dataset: Dataset) -> list[Cell]:
    """The grid's cells, for the domains of the data."""
    tests_unseen = dataset.known is not None and bool(dataset.test.any())
    held_out = data_sets.held_out(config.data, dataset.domains, tests_unseen=tests_unseen)
    validate = data_sets.validated(config.data, dataset.domains, held_out)
    left_out = {}
    if config.evaluation.leave_one_out:
        for domain, by in validate.items():
            left_out[domain] = data_sets.training_domains(dataset, domain, by)
    return grid.cells(config, held_out, validate, left_out)


def _check_hyperparameters(
    config: Config, cells: Sequence[Cell], model: Model, scored: Objective
) -> None:
    """Finds an impossible hyperparameter before any compute."""
    for cell in cells:
        factory = method.factory(config, cell.algorithm, cell.settings, scored)
        for hyper in {tuple(run.hyper.items()): run.hyper for run in cell.runs}.values():
            method.of_any_size(factory, config.training, model, hyper)


def _check_evaluations(setup: Assembly) -> None:
    """Raises UsageError if the flags ask for an evaluation or selection that is impossible."""
    config = setup.config
    first = setup.cells[0]
    groups = group_names([*setup.splits[first.held_out].values()])
    every = [split for of_seed in setup.splits.values() for split in of_seed.values()]
    objective.check(
        config.evaluation,
        setup.objective,
        len(groups),
        every,
        compares_settings=any(
            run.hyper != cell.runs[0].hyper for cell in setup.cells for run in cell.runs
        ),
    )
    if config.evaluation.watch_classes:
        objective.check_classes(setup.dataset.classes, np.asarray(setup.data.y), every)


def _check_stream(setup: Assembly, cell: Cell) -> None:
    """Raises UsageError if an algorithm or an evaluation needs all examples in one round."""
    config = setup.config
    why = "with --hold=stream"
    if config.machine.hold == "auto":
        why = "as the data do not fit into memory and come from the host (--hold=stream)"
    if config.partition.pooled:
        raise flag_error("pooled", True, f"must be left out {why}")
    if method.facts(config, cell.algorithm).pooled:
        text = f"must be another {why}: it trains on all examples at once"
        raise flag_error("algorithm", cell.algorithm, text)
    if watched := config.evaluation.watch_examples:
        raise flag_error("watch_examples", watched, f"must be left out {why}")


def _flag_of_model(config: Config, variables: Variables) -> str:
    """The flag to change where an algorithm refuses the network."""
    trained = config.network.train_only
    if trained and freezing.is_frozen(variables.params, trained).head:
        return "train_only"
    return "model" if config.network.cut < 0 else "cut"


def _start(setup: Assembly) -> Variables:
    """The shapes of the variables that are trained."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    variables: Variables = jax.eval_shape(setup.model.init, key, network.sample(setup.data.x))
    return variables


def _check_norms(setup: Assembly, cell: Cell, algorithm: Algorithm) -> None:
    """Raises UsageError unless --unseen_norms can act on a cell's network."""
    rule = setup.config.evaluation.unseen_norms
    text = ""
    if not setup.has_running_norms:
        text = "needs a network with running means and variances, as of --norm=batch"
    elif algorithm.network is None or algorithm.own_outputs:
        text = f"must be mean for --algorithm={cell.algorithm}, which has no single network"
    elif rule == "estimated" and setup.streams(cell):
        text = "must be mean or batch, as the data come from the host (--hold=stream)"
    elif not setup.tests_unseen(cell):
        text = "must be mean, as no unseen domain is evaluated"
    if text and rule != "mean":
        raise flag_error("unseen_norms", rule, text)


def _check_start(setup: Assembly, cell: Cell) -> None:
    """Raises UsageError if a run of a cell cannot start; nothing is computed."""
    config = setup.config
    model = setup.model
    factory = setup.factory(cell)
    algorithm = method.of_any_size(factory, config.training, model, cell.runs[0].hyper)
    of_seed = setup.splits[cell.held_out].values()
    known = method.facts(config, cell.algorithm)
    if known.needs_domains and not any(
        federation.mixes_domains(split, pooled=known.pooled) for split in of_seed
    ):
        text = "needs examples of several domains in a client; --partition=mixed deals such"
        raise flag_error("algorithm", cell.algorithm, text)
    number = 1 if known.pooled else len(next(iter(of_seed)).domain)
    sizes = jax.ShapeDtypeStruct((number,), jnp.int32)
    key = jax.eval_shape(lambda: jax.random.key(0))
    variables = _start(setup)
    _check_norms(setup, cell, algorithm)

    def init(variables: Variables, size: Array, key: Array) -> rounds.State:
        holders = Federation(setup.data, jnp.zeros(1, jnp.int32), size, size)
        return rounds.init(algorithm, variables, holders, key)

    try:
        # JAX warns of indices that are too large, before its error.
        with warnings.catch_warnings(action="ignore"):
            jax.eval_shape(init, variables, sizes, key)
    except UsageError as error:
        names = method.setting_flags(cell.algorithm)
        names["model"] = _flag_of_model(config, variables)
        raise in_flags(error, f"--algorithm={cell.algorithm}", names) from None
    except OverflowError as error:  # an index is too large
        text = f"needs arrays larger than int32 counts: {error}"
        raise flag_error("algorithm", cell.label, text) from None
