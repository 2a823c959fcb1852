"""From the groups of flags to the parts of an experiment, and from those to what is compiled."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.experiment import grid
from experiments.experiment.grid import Cell
from experiments.experiment.groups import (
    Clients,
    Config,
    Data,
    Environment,
    Network,
    Participation,
    Partition,
    Watching,
)
from experiments.flags.flag import MOST_INT, flags_of, in_flags, shown
from experiments.flags.names import factory, facts, hyperparameters, network, takes
from experiments.parts import devices, optimizers
from experiments.parts.environments.kind import Source
from experiments.running import initial
from fedjax_inv import checks, local, missing, models, platforms, program, schedules
from fedjax_inv.checks import UsageError
from fedjax_inv.data import augment, federation, sources
from fedjax_inv.data.dataset import Dataset
from fedjax_inv.data.federation import Split
from fedjax_inv.devices import Layout
from fedjax_inv.types import (
    Algorithm,
    Array,
    Cohort,
    Examples,
    Model,
    Tree,
    Variables,
    Work,
)

T = TypeVar("T")


Splits = Mapping[int, Split]  # by seed


def called(
    what: str,
    names: Mapping[str, str],
    kind: type[T],
    make: Callable[..., Any],
    *arguments: Any,
    **settings: Any,
) -> T:
    """What a factory makes, which may be anyone's. what: the flag that named it. names: of its
    arguments -> of their flags.

    Raises UsageError, in one line, if it takes other arguments, refuses them, or makes no `kind`.
    """
    try:
        inspect.signature(make).bind(*arguments, **settings)
    except TypeError as error:
        raise UsageError(f"{what}: takes other arguments ({error})") from None
    # What is not ours may refuse by any ValueError; of ours, others than UsageError are defects.
    refusal = ValueError if ":" in what else UsageError
    try:
        result = make(*arguments, **settings)
    except refusal as error:
        raise in_flags(error, what, names) from None
    if not isinstance(result, kind):
        raise UsageError(f"{what}: makes {type(result).__name__}, must make {kind.__name__}")
    return result


def source(data: Data) -> Dataset:
    """The data set as it is stored."""
    try:
        loaded = sources.load(
            data.dataset,
            data_dir=data.data_dir or None,
            image_size=data.image_size or None,
            num_images=data.num_images or None,
            vocabulary=data.vocabulary or None,
            text_length=data.text_length or None,
        )
    except UsageError as error:
        told = UsageError(str(error).removeprefix(f"name={data.dataset!r}: "))
        raise in_flags(told, f"--dataset={data.dataset}", _names(Data)) from None
    _check_names(data.dataset, loaded)
    return _strided(loaded, data.stride)


def _names(*records: Any) -> dict[str, str]:
    """Of records whose flags are arguments of the library's, by their own names."""
    return {field.name: field.name for record in records for field in flags_of(record)}


def _check_names(dataset: str, loaded: Dataset) -> None:
    """Raises UsageError for names that a flag, a line of a table or a file cannot hold."""
    for what, names in (("domain", loaded.domains), ("class", loaded.classes)):
        for name in names:
            if not name.isprintable():
                raise UsageError(
                    f"--dataset={dataset}: has the {what} {name!r}, must have names that can be "
                    "printed in a line"
                )
    words = {"none", "all", ""} & set(loaded.domains)
    if words and len(loaded.domains) > 1:
        raise UsageError(
            f"--dataset={dataset}: has the domain {min(words)!r}, which means something else to "
            "--held_out; must have another name"
        )


def _strided(data: Dataset, stride: int) -> Dataset:
    """Every so many pixels of images."""
    if stride == 1:
        return data
    if data.render is not None or np.ndim(data.x) != 4:
        raise UsageError(f"--stride={stride}: must be 1, as the data are no images")
    if stride >= min(data.x.shape[1:3]):
        height, width = data.x.shape[1:3]
        raise UsageError(f"--stride={stride}: must be below a side of the images, {height}x{width}")
    return data._replace(x=data.x[:, ::stride, ::stride])


def domains(
    loaded: Dataset, data: Data, environment: Environment, seed: int, clients: int = 0
) -> Dataset:
    """The data set with its environments, drawn with a seed. clients: asked for, 0: any number."""
    about = Source(data.dataset, data.test_fraction, seed, clients)
    try:
        return environment.kind.make(loaded, about, *environment.records)
    except UsageError as error:
        names = {**_names(*environment.kind.records), "clients": "clients"}
        raise in_flags(error, f"--environment={environment.name}", names) from None


def arguments(chosen: Network, data: Dataset) -> dict[str, Any]:
    """What a network's factory is called with, for a data set: num_classes, by its place, and those
    of the flags that it has arguments for."""
    make = network(chosen.model)
    told: dict[str, Any] = {
        "activation": chosen.activation,
        "conv": chosen.conv,
        "widths": chosen.widths or None,
        "cut": None if chosen.cut < 0 else chosen.cut,
        "norm": None if chosen.norm == "none" else chosen.norm,
    }
    if takes(make, "image_size"):
        told["image_size"] = _stem(data)
    if takes(make, "vocabulary") != bool(data.words):
        what = "not for texts, which the data are" if data.words else "for texts, the data are none"
        raise UsageError(f"--model={chosen.model}: is {what}")
    told["vocabulary"] = len(data.words)
    told = {k: v for k, v in told.items() if v is not None and takes(make, k)}
    return {"num_classes": len(data.classes), **told}


def model(chosen: Network, data: Dataset) -> Model:
    """The network, for a data set."""
    told = arguments(chosen, data)
    num_classes = told.pop("num_classes")
    what = f"--model={chosen.model}"
    made = called(what, _names(Network), Model, network(chosen.model), num_classes, **told)
    if chosen.dtype != "float32":
        made = models.computed_in(made, chosen.dtype)
    if chosen.weights:
        try:
            made = models.weights.pretrained(made, chosen.weights)
        except UsageError as error:
            raise in_flags(error, what, {"path": "weights"}) from None
        made = models.normalised(made, models.weights.IMAGENET_MEAN, models.weights.IMAGENET_STD)
    if chosen.augment:
        made = models.augmented(made, augment.augment)
    if data.render:
        made = models.painted(made, data.render)
    return made


def _stem(data: Dataset) -> int:
    """The size of images that a network's first layers are for, that is nearest to the data's."""
    shape = jax.eval_shape(data.render or (lambda x: x), _sample(data)).shape
    side = shape[1] if len(shape) == 4 else 32
    return min((32, 64, 224), key=lambda size: abs(math.log(size / side)))


def _sample(data: Dataset) -> Tree:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((1, *leaf.shape[1:]), leaf.dtype), data.x)


def _shapes(chosen: Network, made: Model, data: Dataset) -> Variables:
    """Shapes of what a network is made of.

    Raises UsageError where it does not take the data, or its weights do not fit it.
    """
    try:
        sample, key = _sample(data), jax.eval_shape(lambda: jax.random.key(0))
        variables = jax.eval_shape(made.init, key, sample)
        mask = jax.ShapeDtypeStruct((1,), bool)
        jax.eval_shape(
            lambda v, x, m, k: models.apply(made, v, x, m, True, k), variables, sample, mask, key
        )
    except UsageError as error:
        raise in_flags(error, f"--model={chosen.model}", {"path": "weights"}) from None
    return variables


class Sizes(NamedTuple):
    """What local training is written for; close data share a program."""

    capacity: int = 1  # the most examples that a client has, rounded up
    num_batches: int | None = None  # of a pass, where that is told and is the same for all


def sizes(clients: Clients, of_clients: np.ndarray) -> Sizes:
    """Of the numbers of examples [R, C] of the training clients."""
    capacity = 8 * -(-int(of_clients.max()) // 8)
    # On a CPU a loop of known length gains nothing.
    if platforms.on_cpu() or not clients.batch_size:
        return Sizes(capacity)
    batches = np.unique(-(-of_clients[of_clients > 0] // clients.batch_size))
    return Sizes(capacity, int(batches[0]) if len(batches) == 1 else None)


def work(clients: Clients, learning_rate: float | Array, sizes: Sizes) -> Work:
    """Local training."""
    made = optimizers.made(clients, "optimizer", learning_rate)
    optimizer = _regular(made, clients.weight_decay, clients.clip)
    momentum = clients.momentum if clients.optimizer == "sgd" else None
    size, num_steps = clients.batch_size, clients.local_steps
    if size == 0:
        num_steps = num_steps or clients.local_epochs
        return local.full_batch(
            optimizer, capacity=sizes.capacity, num_steps=num_steps, momentum=momentum
        )
    if num_steps:
        return local.steps(optimizer, batch_size=size, num_steps=num_steps, momentum=momentum)
    return local.epochs(
        optimizer,
        batch_size=size,
        num_epochs=clients.local_epochs,
        num_batches=sizes.num_batches,
        momentum=momentum,
    )


def _regular(
    optimizer: optax.GradientTransformation, weight_decay: float, clip: float
) -> optax.GradientTransformation:
    """The optimizer on a gradient that is clipped, and to which the decay is added after that."""
    before = [optax.clip_by_global_norm(clip)] if clip else []
    before += [optax.add_decayed_weights(weight_decay)] if weight_decay else []
    return optax.chain(*before, optimizer) if before else optimizer


def algorithm(
    config: Config, cell: Cell, model: Model, hyper: Mapping[str, float | Array], sizes: Sizes
) -> Algorithm:
    """The algorithm of a cell with the hyperparameters of one run, which may be tracers.

    Raises UsageError for a value out of range.
    """
    for name, value in cell.settings.items():
        if isinstance(value, int) and abs(value) >= MOST_INT:
            raise UsageError(f"--set={name}={value}: must be below 2^31")
    arguments = {**cell.settings, **hyper}
    local_work = work(config.clients, arguments.pop("learning_rate"), sizes)
    server_rate = arguments.pop("server_learning_rate", None)
    if server_rate is not None:
        server = config.server
        optimizer = optimizers.made(server, "server_optimizer", server_rate)
        arguments["server_optimizer"] = _regular(
            optimizer, server.server_weight_decay, server.server_clip
        )
    method = factory(cell.algorithm)
    if model.mixable is not None and takes(method, "mixable"):
        arguments["mixable"] = model.mixable
    flag = f"--algorithm={cell.algorithm}"
    names = {name: f"set={name}" for name in hyperparameters(cell.algorithm)}
    made = called(flag, names, Algorithm, method, model, local_work, **arguments)
    try:
        return missing.with_rule(made, config.participation.missing)
    except UsageError as error:
        raise UsageError(f"--missing={config.participation.missing}: {error}") from None


def schedules_of_rates(config: Config) -> dict[str, optax.Schedule]:
    """By the hyperparameter's name, for those learning rates that go with the rounds."""
    clients, server, end = config.clients, config.server, config.schedules_end
    of_clients = (clients.warmup_rounds, clients.decay, clients.final_rate)
    of_server = (server.server_warmup_rounds, server.server_decay, server.server_final_rate)
    return {
        name: optimizers.schedule(kind, warmup, decay=decay, final_rate=final_rate, end=end)
        for name, kind, (warmup, decay, final_rate) in (
            ("learning_rate", clients.schedule, of_clients),
            ("server_learning_rate", server.server_schedule, of_server),
        )
        if kind != "constant" or warmup
    }


def experiment(
    config: Config, cell: Cell, model: Model, num_groups: int, sizes: Sizes
) -> program.Experiment:
    """What the runs of a cell have in common."""
    return program.Experiment(
        model,
        lambda hyper: algorithm(config, cell, model, hyper, sizes),
        num_groups,
        thresholds=config.watching.thresholds,
        stop_above=bool(config.watching.stop_above),
        end_at_stop=config.watching.after_stop == "end",
        drop_nonfinite=config.run.nonfinite == "drop",
        history=history(config.participation),
        watch_gradients=config.watching.watch_gradients,
        pooled=facts(cell.algorithm).pooled,
        schedules={
            name: factor
            for name, factor in schedules_of_rates(config).items()
            if name in cell.runs[0].hyper
        },
    )


def warm_start(watching: Watching, batch_size: int, sizes: np.ndarray) -> int:
    """The rounds before a stop. sizes: [C], of the training clients."""
    if watching.stop_above:
        return 0
    if watching.warm_start == "clients":
        return len(sizes)
    if watching.warm_start == "batches":
        largest = int(sizes.max())
        return -(-largest // (batch_size or largest))
    return int(watching.warm_start)


def cohorts(config: Config, inputs: program.Inputs, num_rounds: int) -> Cohort:
    """Who attends: [R, T, S], T = num_rounds. Nobody does from round --rounds on."""
    num_clients = inputs.train.size.shape[1]
    chosen = config.participation
    slots = chosen.slots(num_clients)
    rounds_per_update = _of_clients(chosen.slow, num_clients, 1)
    several = num_clients > 1  # a single one may stand for all data
    drops = several and chosen.dropout > 0
    arrives = _of_clients(chosen.lossy, num_clients, 1.0) * (1 - chosen.dropout * drops)
    is_rare = several and chosen.frequency < 1
    upload_every = _upload_every(chosen.upload_every, num_clients) if several else np.ones(1, int)

    def schedule(key: Array) -> Cohort:
        if slots < num_clients:
            drawn = schedules.sampled(key, num_clients, slots, num_rounds)
        else:
            drawn = schedules.everyone(num_clients, num_rounds)
        if chosen.slow:
            drawn = schedules.slow(drawn, jnp.asarray(rounds_per_update))
        if (upload_every > 1).any():
            drawn = schedules.every(drawn, jnp.asarray(upload_every))
        if several:
            drawn = _delayed(drawn, key, chosen)
        fails = jnp.asarray(1 - arrives)
        if is_rare:
            rare = _upload_probabilities(key, num_clients, chosen.sparse, chosen.frequency)
            fails = 1 - jnp.asarray(arrives) * rare
        if chosen.lossy or drops or is_rare:
            draw_key = jax.random.fold_in(key, 1)
            if chosen.late == "stale":
                longest = chosen.longest_delay
                drawn = schedules.stale(drawn, draw_key, fails, num_clients, longest=longest)
            else:
                drawn = schedules.dropout(drawn, draw_key, fails)
        if chosen.first_all:
            drawn = schedules.first_all(drawn, num_clients)
        real = np.arange(num_rounds)[:, None] < config.run.rounds
        return drawn._replace(present=drawn.present & real)

    return program.cohorts(schedule, inputs)


def _upload_probabilities(key: Array, num_clients: int, sparse: float, frequency: float) -> Array:
    """[C]. key: of the schedule."""
    drawn_with = jax.random.fold_in(key, 2)
    return schedules.upload_probabilities(
        drawn_with, num_clients, sparse=sparse, frequency=frequency
    )


def is_sparse(participation: Participation, num_clients: int, seed: int) -> np.ndarray:
    """[C] bool, which clients of a run --frequency is for, or would be if it were below 1."""
    key = program.schedule_key(seed)
    return np.asarray(_upload_probabilities(key, num_clients, participation.sparse, 0.5)) < 1


def _of_clients(entries: Sequence[str], num_clients: int, default: float) -> np.ndarray:
    """[C] the values that are told of clients, as client:value, and the default of the others."""
    values = np.full(num_clients, default)
    for entry in entries:
        client, _, value = entry.partition(":")
        if num_clients > 1 and int(client) < num_clients:  # a single one may stand for all data
            values[int(client)] = float(value)  # in the default's type
    return values


def _upload_every(entries: Sequence[str], num_clients: int) -> np.ndarray:
    """[C] rounds from an upload of each client to its next."""
    of_all = [int(entry) for entry in entries if ":" not in entry]
    return _of_clients([e for e in entries if ":" in e], num_clients, max([1, *of_all]))


def _delayed(drawn: Cohort, key: Array, participation: Participation) -> Cohort:
    """As --delay says. key: of the schedule."""
    kind, _, value = participation.delay.rpartition(":")
    if kind:
        longest, draw_key = participation.longest_delay, jax.random.fold_in(key, 3)
        return schedules.randomly_delayed(drawn, draw_key, float(value), longest=longest)
    return schedules.delayed(drawn, int(value)) if int(value) else drawn


def history(participation: Participation) -> int:
    """How many broadcasts must be kept."""
    if participation.late == "stale" or ":" in participation.delay:
        return 1 + participation.longest_delay
    if int(participation.delay):
        return 1 + int(participation.delay)
    return max([1, *(int(entry.partition(":")[2]) for entry in participation.slow)])


class Prepared(NamedTuple):
    """A cell that is ready to be compiled."""

    experiment: program.Experiment  # what its runs have in common
    inputs: program.Inputs  # what they work on
    groups: list[str]  # names of the validation groups
    sizes: Sizes
    data: Examples
    layout: Layout | None = None  # of data and inputs, where several devices share the clients


class Assembled(NamedTuple):
    """An experiment by its flags: the grid, the network, and the data as they are dealt."""

    config: Config
    dataset: Dataset  # of the first seed, its environments drawn
    model: Model
    cells: list[Cell]
    # Those of all draws, one after the other: on the device, or on the host for several of them.
    data: Examples
    splits: Mapping[str | None, Splits]  # by held-out domain
    variables: Mapping[int, Variables] | None  # networks to start from, by seed; None: drawn

    def prepare(self, cell: Cell) -> Prepared:
        """What is to be compiled and run for a cell."""
        config, splits = self.config, self.splits[cell.held_out]
        watching = config.watching
        inputs = program.inputs(
            cell.runs,
            splits,
            pooled=facts(cell.algorithm).pooled,
            watch_examples=watching.watch_examples,
            warm_start=lambda sizes: warm_start(watching, config.clients.batch_size, sizes),
            variables=self.variables,
            num_classes=len(self.dataset.classes) if watching.watch_classes else 0,
        )
        groups = program.group_names(splits[cell.runs[0].seed])
        told = sizes(config.clients, np.asarray(inputs.train.size))
        made = experiment(config, cell, self.model, len(groups), told)
        return Prepared(made, inputs, groups, told, self.data)


def assemble(config: Config, seeds: Sequence[int] | None = None) -> Assembled:
    """The experiment of the flags; nothing is compiled.

    seeds: those that data are dealt to, by default all. Raises UsageError where the flags do not
    fit the data.
    """
    loaded = source(config.data)
    # By what they are drawn with: of the first seed first.
    draws: dict[int, Dataset] = {}
    of_seed = {seed: _draw(config.environment, seed) for seed in seeds or config.run.seeds}
    _check_draws(config, loaded, len({*of_seed.values()}))
    for draw in of_seed.values():
        if draw not in draws:
            draws[draw] = domains(
                loaded, config.data, config.environment, draw, config.partition.clients
            )
    first = next(iter(draws.values()))
    if len(first.classes) < 2:
        raise UsageError(
            f"--dataset={config.data.dataset}: has the class {first.classes[0]!r} alone, must have "
            "two or more to tell apart"
        )
    network = model(config.model, first)
    shapes = _shapes(config.model, network, first)
    start = initial.variables(config.model, shapes, [*of_seed]) if config.model.init_from else None
    cells = grid.cells(config, grid.held_out(config, first.domains))
    for cell in cells:  # an impossible hyperparameter shows here, at no cost
        for run in cell.runs:
            algorithm(config, cell, network, run.hyper, Sizes())
    _check_test_fraction(config, loaded, first, cells)
    data = _examples(list(draws.values()))
    if config.run.devices > 1 or config.run.num_processes > 1:
        data = jax.device_get(data)  # or the first device would hold all beside its own
    starts = {draw: index * len(first.y) for index, draw in enumerate(draws)}
    splits = {
        domain: {
            seed: _split(config, draws[draw], data, domain, seed, starts[draw])
            for seed, draw in of_seed.items()
        }
        for domain in dict.fromkeys(cell.held_out for cell in cells)
    }
    made = Assembled(config, first, network, cells, data, splits, start)
    _check_rule(made)
    if config.watching.watch_classes:
        _check_classes(made)
    if config.watching.watch_gradients:
        for cell in cells:
            _check_network(made, cell)
    return made


def _check_draws(config: Config, loaded: Dataset, count: int) -> None:
    """Raises UsageError where the data of so many draws do not fit into memory."""
    size = 2 * count * sum(leaf.nbytes for leaf in jax.tree.leaves(loaded.x))  # and on the device
    what = f" for {count} draws of the data, twice"
    if count > 1:
        where = f"--seeds={shown(config.run.seeds)}"
        checks.memory(where, ..., size, devices.memory(), what)


def _check_rule(made: Assembled) -> None:
    """Raises UsageError where training domains are to be compared, and there is one."""
    some = next(iter(made.splits[made.cells[0].held_out].values()))
    if made.config.watching.select == "agreement" and len(program.group_names(some)) < 2:
        raise UsageError(
            "--select=agreement: needs several training domains, each with clients of its own"
        )


def _check_classes(made: Assembled) -> None:
    """Raises UsageError where a client has a class that the test lacks."""
    y = np.asarray(made.data.y)
    for splits in made.splits.values():
        for split in splits.values():
            mine, tested = (
                np.unique(y[np.concatenate(federation.parts_of(held))])
                for held in (split.train, split.test)
            )
            lacking = np.setdiff1d(mine, tested)
            if len(lacking):
                name = made.dataset.classes[lacking[0]]
                raise UsageError(
                    f"--watch_classes=true: the test has no example of class {name}, must have one "
                    "of each class that clients have"
                )


def _check_network(made: Assembled, cell: Cell) -> None:
    """Raise UsageError unless a cell's algorithm has a single network."""
    if algorithm(made.config, cell, made.model, cell.runs[0].hyper, Sizes()).network is None:
        raise UsageError(
            f"--watch_gradients=true: --algorithm={cell.algorithm} has no single network to look at"
        )


def _draw(environment: Environment, seed: int) -> int:
    """What a seed's environments are drawn with; one for all if nothing is drawn."""
    if not environment.is_drawn:
        return 0
    return seed if environment.data_seed == "each" else int(environment.data_seed)


def _examples(draws: Sequence[Dataset]) -> Examples:
    if len(draws) == 1:
        return federation.examples(draws[0].x, draws[0].y)
    x = jax.tree.map(lambda *leaves: np.concatenate(leaves), *(each.x for each in draws))
    return federation.examples(x, np.concatenate([each.y for each in draws]))


def _split(
    config: Config, dataset: Dataset, data: Examples, domain: str | None, seed: int, start: int
) -> Split:
    num_clients = config.partition.clients or len(dataset.domains) - (domain is not None)
    if config.participation.cohort > num_clients:
        raise UsageError(
            f"--cohort={config.participation.cohort}: must be at most the {num_clients} clients"
        )
    for flag, entries in (
        ("slow", config.participation.slow),
        ("lossy", config.participation.lossy),
        ("upload_every", config.participation.upload_every),
    ):
        for entry in entries:
            if ":" in entry and int(entry.partition(":")[0]) >= num_clients:
                raise UsageError(f"--{flag}={entry}: must be of clients 0..{num_clients - 1}")
    needed = -(-num_clients // config.participation.slots(num_clients))
    if config.participation.first_all and needed > config.run.rounds:
        raise UsageError(f"--first_all=true: needs {needed} rounds, --rounds={config.run.rounds}")
    # A test must not be drawn as the environments were: it would be one of them. What is drawn with
    # a seed of its own stays as it was, so that older folders go on.
    environment, dealt = config.environment, config.partition
    is_redrawn = domain is None and environment.is_drawn and environment.data_seed == "each"
    try:
        return federation.split(
            dataset,
            data,
            federation.partitioner(
                dealt.partition,
                dataset,
                num_clients,
                alpha=dealt.alpha,
                min_size=None if dealt.min_size < 0 else dealt.min_size,
                shards_per_client=dealt.classes_per_client,
            ),
            held_out=domain,
            seed=seed + 2**31 if is_redrawn else seed,
            test_fraction=config.data.test_fraction,
            first_row=start,
            imbalance=dealt.imbalance,
        )
    except UsageError as error:
        flags = f"--partition={dealt.partition}"
        if dealt.imbalance != 1:
            flags += f" --imbalance={shown(dealt.imbalance)}"
        names = {"num_clients": "clients", "name": "partition", "held_out": "held_out"}
        names["shards_per_client"] = "classes_per_client"
        raise in_flags(error, flags, names | _names(Partition)) from None


def _check_test_fraction(
    config: Config, loaded: Dataset, first: Dataset, cells: Sequence[Cell]
) -> None:
    """Raises UsageError where --test_fraction was set and nothing is drawn for the test."""
    fraction = config.data.test_fraction
    drawn_before = config.environment.kind.draws_test and not loaded.test.any()
    drawn_at_split = any(cell.held_out is None for cell in cells) and not first.test.any()
    if fraction != Data.test_fraction and not (drawn_before or drawn_at_split):
        raise UsageError(
            f"--test_fraction={shown(fraction)}: has no effect, as the test is on the data's own "
            "test split or on a held-out domain"
        )
