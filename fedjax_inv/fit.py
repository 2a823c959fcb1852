"""Federated training in one call: `fit` makes a `Plan`, which trains all its runs as one program.

    grid = {"seed": [0, 1], "learning_rate": [0.05, 0.1]}
    fitted = fit(fedavg.fedavg, model, clients, rounds=50, grid=grid)
    fitted.history["train_loss"]   # [R, E]: four runs, an evaluation after each round
    fitted.predict(x, run=2)       # outputs of the first seed with the second rate

*Clients* are one of three.
- A list of (x, y) for each client, each [n, ...]. `data.clients.by_client` makes it of x, y and the
  client of each example.
- A `Dataset`, which brings its own test examples. Each of its users is a client, or each domain.
- A function of the seeds that returns `data.federation.Splits`, such as
  `data.clients.of_dataset(dataset, partition=..., held_out=...)`.

Methods and scores that use the domains inside of clients get those of the `Dataset`; each client of
a list is one domain.

Targets that are integers are classes, booleans are labels, and numbers in floating point are
values. Inputs of uint8 are scaled to [0, 1], as images are, but for arrays [n, D] of features.

The *grid* has the values of each hyperparameter of a run, in a list by its name: "seed", which
seeds the network, the minibatches, the cohorts and the draws of examples (by default [0]), and any
of the settings that are numbers. A run is a combination of values. The runs of a combination follow
each other, one for each seed; of the combinations, the last hyperparameter varies first. Instead of
lists it may be the runs themselves (`inputs.Run`), such as random draws of settings, or runs that
leave out a domain of a `Dataset` and are tested by it.

*Settings* are the arguments of the algorithm, and those of local training: learning_rate (0.1),
momentum (0), weight_decay (0; times the parameters, added to the gradient), clip (the largest norm
of a gradient, 0 for any), and learning_rate_schedule, round from 0 -> the factor of the learning
rate. A setting named loss is also the loss of evaluations.

A network to start from is a model whose `init` returns it:
`model._replace(init=lambda key, x: variables)`.

Axis letters: R runs, T rounds, C clients, S slots of a cohort.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_inv import callbacks as acting
from fedjax_inv import checks, local, models, platforms, schedules, types, unseen_norms
from fedjax_inv.callbacks import Callback
from fedjax_inv.checks import UsageError
from fedjax_inv.data import clients as of_clients
from fedjax_inv.data.dataset import Dataset
from fedjax_inv.data.federation import Splits, mixes_domains
from fedjax_inv.devices import Devices
from fedjax_inv.fitted import Fitted
from fedjax_inv.inputs import (
    Inputs,
    Run,
    cohorts,
    combinations,
    group_names,
    of_runs,
    own_tests,
    tests_unseen,
)
from fedjax_inv.one_run import Experiment
from fedjax_inv.plan import Evaluations, Plan
from fedjax_inv.task import check_settings, facts_of, shapes_of_one, task_of
from fedjax_inv.types import Array, Tree

Factory = Callable[..., types.Algorithm]
Optimizer = Callable[..., optax.GradientTransformation]
Schedule = Callable[[Array, int, int], types.Cohort]

# Settings of local training, whose values may differ between runs.
LOCAL = {"learning_rate": 0.1, "momentum": 0.0, "weight_decay": 0.0, "clip": 0.0}
_MOST = 2**31 - 1
_EVERYONE = schedules.attending()
_STOPS = ("thresholds", "stop_above", "end_at_stop")


def plan(
    algorithm: Factory,
    model: types.Model,
    clients: Any,
    *,
    rounds: int,
    grid: Mapping[str, Sequence[Any]] | Sequence[Run] | None = None,
    optimizer: Optimizer = optax.sgd,
    batch_size: int | None = 32,
    epochs: int = 1,
    steps: int | None = None,
    test: tuple[Tree, Tree] | None = None,
    validation: float = 0.0,
    schedule: Schedule = _EVERYONE,
    evaluations: Evaluations | int = 1,
    devices: Devices | int | None = None,
    **settings: Any,
) -> Plan:
    """Return the plan of `fit`, which has the same arguments; nothing is compiled."""
    if not isinstance(evaluations, Evaluations):
        evaluations = Evaluations(evaluations)
    devices = devices if isinstance(devices, Devices) else Devices(devices)
    _check(model, rounds, grid, evaluations, devices, optimizer=optimizer, schedule=schedule)
    for name, number in {"batch_size": batch_size, "epochs": epochs, "steps": steps}.items():
        if number is not None:
            checks.integer(name, number, 1, _MOST)
    facts = facts_of(algorithm)
    factor = settings.pop("learning_rate_schedule", None)
    if factor is not None:
        checks.function("learning_rate_schedule", factor)
    loss, grid = settings.pop("loss", None), grid or {}
    check_settings(algorithm, {**settings, **_values(grid)}, {"seed": 0, **LOCAL})
    runs, fixed = _runs(settings, grid, facts.infinite, is_scheduled=factor is not None)

    splits = _splits(clients, _seeds(runs), test, validation)
    model = model if splits.render is None else models.painted(model, splits.render)
    if facts.needs_domains:
        fixed = {**fixed, "num_domains": _num_domains(splits, pooled=facts.pooled)}
    task = task_of(algorithm, splits.data.y, loss, evaluations.score)
    if not (facts.needs_domains or task.score.is_worst):
        splits = splits._replace(data=splits.data._replace(domain=None))
    num_classes = task.num_classes(model, splits.data)
    standardises = task.in_units(model, splits.data)
    how = {"pooled": facts.pooled, "standardises": standardises}
    inputs = _inputs(runs, splits, evaluations, num_classes, **how)
    sizes = np.asarray(inputs.train.size)
    training = LocalTraining(optimizer, batch_size, epochs, steps, local_sizes(batch_size, sizes))

    def build(hyper: Mapping[str, Any]) -> types.Algorithm:
        given = {**fixed, **task.settings, **hyper}
        targets = given.pop("targets", None)
        if targets is not None:
            given["loss"] = models.on_standard(given["loss"], targets)
        work = training.work({name: given.pop(name, LOCAL[name]) for name in LOCAL})
        return algorithm(model, work, **given)

    _check_values(build, runs)
    by_client, rule = evaluations.by_client, ""
    if by_client is None:
        by_client = build(runs[0].hyper).personal
    if by_client and not facts.pooled:
        number = splits.num_classes or num_classes
        own, rule = own_tests(runs, splits.of_seed, num_classes=number, source=splits.source)
        inputs = inputs._replace(own_tests=own)
    if evaluations.unseen_norms != "mean":
        first = jax.eval_shape(model.init, jax.random.key(0), shapes_of_one(splits.data.x))
        unseen_norms.running(first.stats)
        inputs = inputs._replace(unseen_test=tests_unseen(runs, splits.of_seed))
    attend = _EVERYONE if facts.pooled else schedule
    cohorts, history = _cohorts(attend, inputs, rounds)
    groups = group_names([splits.of_seed[seed] for seed in _seeds(runs)])
    stops = {name: getattr(evaluations, name) for name in _STOPS}
    experiment = Experiment(
        model,
        build,
        _rounded_up(len(groups), evaluations.thresholds),
        **stops,
        drop_nonfinite=evaluations.nonfinite == "drop",
        history=history,
        pooled=facts.pooled,
        schedules={} if factor is None else {"learning_rate": factor},
        loss=task.loss,
        score=task.score.of_domains(splits.data.domain),
        unseen_norms=evaluations.unseen_norms,
        precision=devices.precision or facts.precision,
        quick_to_compile=devices.quick_to_compile,
    )
    arrays = splits.data, inputs, cohorts
    more: dict[str, Any] = {"groups": groups, "num_classes": num_classes, "task": task}
    more["own_rule"] = rule
    return Plan.of(experiment, devices, runs, *arrays, evaluations=evaluations, **more)


def fit(
    algorithm: Factory,
    model: types.Model,
    clients: Any,
    *,
    rounds: int,
    grid: Mapping[str, Sequence[Any]] | Sequence[Run] | None = None,
    optimizer: Optimizer = optax.sgd,
    batch_size: int | None = 32,
    epochs: int = 1,
    steps: int | None = None,
    test: tuple[Tree, Tree] | None = None,
    validation: float = 0.0,
    schedule: Schedule = _EVERYONE,
    evaluations: Evaluations | int = 1,
    devices: Devices | int | None = None,
    callbacks: Sequence[Callback | Callable[[Fitted], object]] = (acting.Progress(),),
    **settings: Any,
) -> Fitted:
    """Train an algorithm on the examples of clients, for each seed and hyperparameter.

    After each segment of rounds the runs are evaluated, and the callbacks act. Ctrl-C ends the
    training after the current segment. The module describes clients, grid and settings.

    Args:
      algorithm: a factory such as `fedavg.fedavg`, called as algorithm(model, work, **settings).
      model: the network. For classes it may have more outputs than there are classes.
      clients: a list of (x, y) for each client, a `Dataset`, or a function of the seeds.
      rounds: T, how many rounds to play.
      grid: the values of each hyperparameter in a list, such as {"seed": [0, 1]}; or the runs.
      optimizer: (learning_rate) -> the clients' optimizer, such as `optax.adam`; it is also passed
        momentum=, unless that is 0.
      batch_size: examples in a batch; None: all of the client's.
      epochs: passes over the client's examples in a round.
      steps: steps in a round, in place of passes.
      test: (x, y) that no client holds, for evaluations.
      validation: the part of each client's examples that is held out for evaluations.
      schedule: (random key, C, T) -> the cohorts of all rounds [T, S], such as
        `schedules.attending(cohort=10, dropout=0.1)`; each seed has its own key. An algorithm on
        the pooled examples of all clients (`erm`) uses none.
      evaluations: when and how runs are evaluated, or how many rounds lie between evaluations.
      devices: the devices that share the runs and their clients, or their number; by default those
        of JAX that help. A CPU is one device, unless each core becomes one before JAX starts:
        `jax.config.update("jax_num_cpu_devices", 2)`.
      callbacks: what acts after each evaluation (`callbacks`), or functions of the result so far;
        if one answers True or a text, the training ends. The error of one has the result as
        `fitted`.
      **settings: settings of all runs, each one value.

    Returns:
      The runs, their history and their networks.

    Raises:
      UsageError: for a wrong argument, before anything is trained.
    """
    # Written out, not as **kwargs, so that type checkers and editors know the arguments.
    return plan(
        algorithm,
        model,
        clients,
        rounds=rounds,
        grid=grid,
        optimizer=optimizer,
        batch_size=batch_size,
        epochs=epochs,
        steps=steps,
        test=test,
        validation=validation,
        schedule=schedule,
        evaluations=evaluations,
        devices=devices,
        **settings,
    ).train(callbacks)


def _num_domains(splits: Splits, *, pooled: bool) -> int:
    """Return D for a method that needs the domains inside of clients."""
    if splits.data.domain is None:
        raise UsageError("clients", ..., "must have a domain of each example, as a Dataset has")
    if not any(mixes_domains(split, pooled=pooled) for split in splits.of_seed.values()):
        text = "needs examples of several domains in a client, such as those of partition=mixed"
        raise UsageError("algorithm", ..., text)
    return int(np.max(splits.data.domain)) + 1


def _seeds(runs: Sequence[Run]) -> list[int]:
    return list(dict.fromkeys(run.seed for run in runs))


def _inputs(
    runs: Sequence[Run], splits: Splits, evaluations: Evaluations, num_classes: int, **how: bool
) -> Inputs:
    return of_runs(
        runs,
        splits.of_seed,
        watch_examples=evaluations.watched,
        warm_start=evaluations.warm_start,
        variables=splits.variables,
        num_classes=(splits.num_classes or num_classes) if evaluations.by_class else 0,
        scaling=splits.scaling,
        source=splits.source,
        **how,
    )


def _check(
    model: Any,
    rounds: int,
    grid: Any,
    evaluations: Evaluations,
    devices: Devices,
    **functions: Callable[..., Any],
) -> None:
    if not isinstance(model, types.Model):
        text = f"is of type {type(model).__name__}, must be a Model, as models.from_flax(module) is"
        raise UsageError("model", ..., text)
    checks.integer("rounds", rounds, 1, _MOST)
    evaluations.check(rounds)
    devices.check()
    if not isinstance(grid, Mapping | None) and not _are_runs(grid):
        text = 'must be lists by their names, such as {"seed": [0, 1]}, or runs (`inputs.Run`)'
        raise UsageError("grid", ..., f"{text} with the same hyperparameters")
    for name, function in functions.items():
        checks.function(name, function)


def _are_runs(grid: Any) -> bool:
    is_list = isinstance(grid, Sequence) and all(isinstance(run, Run) for run in grid)
    return is_list and len({tuple(run.hyper) for run in grid}) == 1


def _values(grid: Mapping[str, Sequence[Any]] | Sequence[Run]) -> Mapping[str, Sequence[Any]]:
    """Return the values of each hyperparameter."""
    if isinstance(grid, Mapping):
        return grid
    names = grid[0].hyper
    values = {name: [*dict.fromkeys(run.hyper[name] for run in grid)] for name in names}
    return {"seed": [*dict.fromkeys(run.seed for run in grid)], **values}


def _runs(
    settings: Mapping[str, Any],
    grid: Mapping[str, Sequence[Any]] | Sequence[Run],
    infinite: Collection[str],
    *,
    is_scheduled: bool,
) -> tuple[list[Run], dict[str, Any]]:
    """Return the runs of the grid, and the settings that all of them share.

    `infinite` are the settings that may be NaN or infinite, which the algorithm checks.
    """
    fixed = dict(settings)
    values = {name: _numbers(name, each) for name, each in _values(grid).items()}
    if is_scheduled and "learning_rate" not in values:  # a factor is for a number of a run
        values["learning_rate"] = [fixed.pop("learning_rate", LOCAL["learning_rate"])]
    for name in fixed.keys() & values.keys():
        raise UsageError(name, ..., "must be given once, in the grid or beside it")
    seed = fixed.pop("seed", 0)
    if "seed" not in values:
        checks.integer("seed", seed, 0, _MOST, '; several stand in grid={"seed": [...]}')
    seeds = checks.integers("seed", values.pop("seed", [seed]), 0, _MOST).tolist()
    for name, each in [*values.items(), *((name, [value]) for name, value in fixed.items())]:
        for value in each:
            if name in LOCAL:
                checks.real(name, value, 0, 1.0 if name == "momentum" else np.inf)
            if name not in infinite and not checks.is_finite(value):
                raise UsageError(name, value, "must be a finite number")
    if isinstance(grid, Mapping):
        return combinations(seeds, **values), fixed
    first = {name: each[0] for name, each in values.items()}  # of a scheduled rate the only one
    return [run._replace(hyper={**first, **run.hyper}) for run in grid], fixed


def _numbers(name: str, values: Any) -> list[Any]:
    """Return the values of a hyperparameter in the grid."""
    try:
        found = np.asarray(values)
    except ValueError:  # lists of different lengths
        found = np.zeros(())
    is_list = found.ndim == 1 and found.dtype.kind in "iuf" and len(found) > 0
    if not is_list or len(np.unique(found)) < len(found):
        raise UsageError(f"grid[{name!r}]", values, "must be a list of different numbers")
    return found.tolist()


def _splits(clients: Any, seeds: Sequence[int], test: Any, validation: float) -> Splits:
    if callable(clients) or isinstance(clients, Dataset):
        if test is not None:
            raise UsageError("test", ..., "must be left out, as the clients bring their own")
        if isinstance(clients, Dataset):
            clients = of_clients.of_dataset(clients, validation=validation)
        elif validation:
            text = "must be left out, as the function of clients decides on it"
            raise UsageError("validation", validation, text)
        return clients(seeds)
    arrays = of_clients.of_arrays(clients)
    return Splits(
        *of_clients.splits_of_arrays(*arrays, test=test, validation=validation, seeds=seeds)
    )


def local_sizes(batch_size: int | None, sizes: np.ndarray) -> tuple[int, int | None]:
    """Return the sizes for which local training is compiled, from those of the clients [R, C].

    They are the most examples of a client, rounded up so that similar data share a program, or 1 if
    batches have another size than all of the client's (None); and the batches in a pass, if all
    clients have the same number and a loop of known length gains anything, else None.
    """
    if batch_size is None:
        return 8 * -(-int(sizes.max()) // 8), None
    batches = np.unique(-(-sizes[sizes > 0] // batch_size))
    return 1, int(batches[0]) if len(batches) == 1 and not platforms.on_cpu() else None


class LocalTraining(NamedTuple):
    """Local training, up to the values that may differ between runs."""

    optimizer: Optimizer
    batch_size: int | None
    epochs: int
    steps: int | None
    # As `local_sizes` returns them; these fit batches of any clients.
    sizes: tuple[int, int | None] = (1, None)

    def chain(self, values: Mapping[str, float | Array]) -> optax.GradientTransformation:
        """Return the optimizer after clipping, and after decay of the clipped gradient."""
        momentum = values["momentum"]
        decay = values["weight_decay"]
        clip = values["clip"]
        more = {} if checks.is_known_zero(momentum) else {"momentum": momentum}
        made = self.optimizer(values["learning_rate"], **more)
        checks.record("optimizer", made, optax.GradientTransformation)
        before = []
        if not checks.is_known_zero(clip):
            # In a grid 0 is traced; as infinity it clips nothing, too.
            most = clip if checks.is_concrete(clip) else jnp.where(clip > 0, clip, jnp.inf)
            before.append(optax.clip_by_global_norm(most))
        if not checks.is_known_zero(decay):
            before.append(optax.add_decayed_weights(decay))
        return optax.chain(*before, made) if before else made

    def work(self, values: Mapping[str, float | Array]) -> types.Work:
        """Return local training with a learning rate, a momentum, a decay and a largest norm."""
        chain = self.chain(values)
        is_plain = self.optimizer is optax.sgd
        # A method that needs the momentum knows it of plain SGD alone.
        is_plain &= checks.is_known_zero(values["weight_decay"])
        known = values["momentum"] if is_plain else None
        capacity, num_batches = self.sizes
        if self.batch_size is None:
            number = self.steps or self.epochs
            training = local.full_batch(chain, capacity=capacity, num_steps=number, momentum=known)
        elif self.steps:
            training = local.steps(
                chain, batch_size=self.batch_size, num_steps=self.steps, momentum=known
            )
        else:
            training = local.epochs(
                chain,
                batch_size=self.batch_size,
                num_epochs=self.epochs,
                num_batches=num_batches,
                momentum=known,
            )
        return training._replace(learning_rate=values["learning_rate"])


def _check_values(
    build: Callable[[Mapping[str, Any]], types.Algorithm], runs: Sequence[Run]
) -> None:
    """Raise UsageError for values that are out of range or that one program cannot hold."""
    for run in {tuple(run.hyper.values()): run for run in runs}.values():
        if not isinstance(build(run.hyper), types.Algorithm):
            raise UsageError("algorithm", ..., "must return an Algorithm")
    for name in runs[0].hyper:

        def traced(value: Array, name: str = name) -> None:
            build({**runs[0].hyper, name: value})

        try:
            jax.eval_shape(traced, jax.ShapeDtypeStruct((), np.float32))
        except (UsageError, TypeError):  # JAX's errors about unknown values are TypeErrors
            text = "must be one value, outside of the grid, as a program is compiled for each"
            raise UsageError(name, ..., text) from None


def _cohorts(schedule: Schedule, inputs: Inputs, rounds: int) -> tuple[types.Cohort, int]:
    """Return the cohorts of all runs [R, T, S], on the host, and how many broadcasts are kept.

    Raises UsageError if they do not fit the runs.
    """
    num_clients = inputs.train.size.shape[1]
    drawn = jax.device_get(cohorts(lambda key: schedule(key, num_clients, rounds), inputs))
    if (
        not isinstance(drawn, types.Cohort)
        or drawn.who.shape[1:2] != (rounds,)
        or drawn.who.ndim != 3
    ):
        raise UsageError("schedule", ..., f"must return cohorts [{rounds}, S] of all rounds")
    if getattr(schedule, "has_empty_slots", False):
        drawn = schedules.without_empty_slots(drawn)
    # Nobody has waited for longer than there are rounds.
    over: Any = np.arange(rounds)[:, None]
    drawn = drawn._replace(delay=np.minimum(drawn.delay, over))
    longest = int(np.max(drawn.delay, initial=0, where=drawn.present))
    history = min(max(1 + longest, getattr(schedule, "history", 1)), rounds)
    for run in range(len(drawn.who)):
        schedules.check(types.Cohort(*(leaf[run] for leaf in drawn)), num_clients, history)
    return drawn, history


def _rounded_up(num_groups: int, thresholds: Sequence[float]) -> int:
    """Return a multiple of 8, so that data with other domains share a compiled program.

    Stops hold the scores by group, and checkpoints hold the stops, so there the number stays.
    """
    return num_groups if thresholds else 8 * -(-num_groups // 8)
