"""Federated training in one call: `fit` makes a `Plan`, which trains all its runs as one program.

    grid = {"seed": [0, 1], "learning_rate": [0.05, 0.1]}
    fitted = fit(fedavg.fedavg, model, clients, rounds=50, grid=grid)
    fitted.history["train_loss"]   # [R, E]: four runs, an evaluation after each round
    fitted.predict(x, run=2)       # outputs of the first seed with the second rate

Axis letters: R runs, T rounds, C clients, S slots of a cohort.
"""

import contextlib
import signal
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_inv import callbacks as acting
from fedjax_inv import checks, local, models, platforms, program, schedules
from fedjax_inv.ahead import Ahead
from fedjax_inv.callbacks import Callback
from fedjax_inv.checks import UsageError
from fedjax_inv.data import clients as of_clients
from fedjax_inv.data import stored
from fedjax_inv.data.dataset import Dataset
from fedjax_inv.data.federation import Splits
from fedjax_inv.devices import Devices, Layout
from fedjax_inv.fitted import Diverged, Fitted, NonfiniteWarning
from fedjax_inv.program import Experiment, Inputs, Outcome, Program, Run
from fedjax_inv.task import Task, check_settings, facts_of, task_of
from fedjax_inv.types import Algorithm, Array, Cohort, Examples, Model, Tree, Work

Factory = Callable[..., Algorithm]
Optimizer = Callable[..., optax.GradientTransformation]

# Arguments of `fit` about local training, whose values may differ between runs.
LOCAL = {"learning_rate": 0.1, "momentum": 0.0, "weight_decay": 0.0, "clip": 0.0}
_NONFINITE = ("mark", "drop", "stop")
_EVERYONE = schedules.attending()


class Evaluations(NamedTuple):
    """When runs are evaluated, by what, and when a run stops.

    The stop rule is that of `stopping`; with no threshold nothing stops.
    """

    every: int = 1  # how many rounds lie between evaluations, a segment; in 1..T
    start: bool = False  # whether there is one before the first round, too
    # What is measured beside the loss; None: that of `objectives.DEFAULTS` for the targets. Of a
    # function, a higher value is better.
    score: Any = None
    # An update that holds NaN or infinity: "mark" warns of the first, and it reaches the network;
    # "drop" leaves it out; "stop" raises `Diverged`.
    nonfinite: str = "mark"
    by_class: bool = False  # also class by class, and in the proportions of each client's classes
    watched: int = 0  # about how many examples of training and test are evaluated in every round
    warm_start: Callable[[np.ndarray], int] = lambda sizes: 0  # sizes [C] -> rounds before a stop
    thresholds: tuple[float, ...] = ()  # these five as in `program.Experiment`
    stop_above: bool = False
    stop_within: float | None = None
    stop_centred: bool = False
    end_at_stop: bool = False


def fit(
    algorithm: Factory,
    model: Model,
    clients: Any,
    *,
    rounds: int,
    grid: Mapping[str, Sequence[Any]] | None = None,
    optimizer: Optimizer = optax.sgd,
    batch_size: int | None = 32,
    epochs: int = 1,
    steps: int | None = None,
    test: tuple[Tree, Tree] | None = None,
    validation: float = 0.0,
    schedule: Callable[[Array, int, int], Cohort] = _EVERYONE,
    evaluations: Evaluations | int = 1,
    devices: Devices | int | None = None,
    callbacks: Sequence[Callback | Callable[[Fitted], object]] = (acting.Progress(),),
    **settings: Any,
) -> Fitted:
    """Train an algorithm on the examples of clients, for each seed and hyperparameter.

    All runs of the grid train in one program. After each segment of rounds they are evaluated, and
    the callbacks act. Ctrl-C ends the training after the current segment.

    Args:
      algorithm: a factory such as `fedavg.fedavg`, called as algorithm(model, work, **settings).
      model: the network. For classes it may have more outputs than there are classes.
      clients: a list of (x, y) for each client, each [n, ...]; or a `Dataset`, which brings its own
        test examples and of which each user is a client, or each domain; or a function of the seeds
        that returns `Splits`, such as `clients.of_dataset(dataset, partition=...)`. Targets that
        are integers are classes, booleans are labels, and numbers in floating point are values.
        Inputs of uint8 are scaled to [0, 1], as images are, but for arrays [n, D] of features.
      rounds: T, how many rounds to play.
      grid: the values of each hyperparameter of a run, in a list by its name: "seed" (which seeds
        the network, the minibatches, the cohorts and the draws of examples; by default [0]), and
        any of the settings that are numbers.
      optimizer: (learning_rate) -> the clients' optimizer, such as `optax.adam`; it is also passed
        momentum=, unless that is 0.
      batch_size: examples in a batch; None: all of the client's.
      epochs: passes over the client's examples in a round.
      steps: steps in a round, in place of passes.
      test: (x, y) that no client holds, for evaluations.
      validation: the part of each client's examples that is held out for evaluations.
      schedule: (random key, C, T) -> the cohorts of all rounds [T, S], such as
        `schedules.attending(cohort=10, dropout=0.1)`; each seed has its own key. By default all
        clients attend. An algorithm on the pooled examples of all clients (`erm`) uses none.
      evaluations: when and how runs are evaluated, or how many rounds lie between evaluations.
      devices: the devices that share the runs and their clients, or their number.
      callbacks: what acts after each evaluation (`callbacks`), or functions of the result so far;
        if one answers true, the training ends.
      **settings: the arguments of the algorithm; and those of local training: learning_rate (0.1),
        momentum (0), weight_decay (0; times the parameters, added to the gradient), clip (the
        largest norm of a gradient, 0 for any), and learning_rate_schedule, round from 0 -> the
        factor of the learning rate. A setting named `loss` is also the loss of evaluations.

    Returns:
      The runs, their history and their networks. The runs of a combination follow each other, one
      for each seed; of the combinations, the last hyperparameter varies first.

    Raises:
      UsageError: for a wrong argument, before anything is trained.
    """
    made = plan(
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
    )
    return made.train(callbacks)


class Plan(NamedTuple):
    """R runs that are ready to be compiled and trained."""

    runs: tuple[Run, ...]  # their seeds, and the hyperparameters of the grid
    rounds: int  # T
    evaluations: Evaluations
    build: Callable[[Mapping[str, Any]], Algorithm]  # hyperparameters of a run -> its algorithm
    experiment: Experiment
    program: Program
    layout: Layout
    data: Examples
    inputs: Inputs
    cohorts: Cohort  # [R, T', S] on the host; T' is T, and more without clients to fill a segment
    groups: list[str]  # the names of the validation groups
    task: Task  # the loss and the score
    num_classes: int  # 0 if the loss takes targets that are no classes
    streams: bool  # whether the examples stay on the host, but for those of the next rounds
    columns: list[str]  # of the inputs, if they were frames of pandas
    sample: Examples  # the shapes of the examples [M, ...]
    is_placed: bool = False
    is_compiled: bool = False  # whether the program is known to be

    def check_validation(self, who: str) -> None:
        """Raise UsageError unless each run has an example for validation."""
        if not np.asarray(self.inputs.valid.size).any(1).all():
            raise UsageError("validation", ..., f"must leave examples for {who} to watch")

    def placed(self) -> "Plan":
        """Return the plan with its data and inputs on the devices, or read from the host."""
        if self.is_placed:
            return self
        if self.streams:
            made = program.streamed(
                self.program,
                stored.of_arrays(*self.data),
                self.inputs,
                self.cohorts,
                self.layout,
                every=self.evaluations.every,
            )
            # Its programs are compiled by its first calls, which read the examples, too.
            return self._replace(program=made, is_placed=True, is_compiled=True)
        data, inputs = self.data, self.inputs
        if self.layout.mesh is not None:
            data, inputs = self.layout.place(data, inputs)
        return self._replace(data=data, inputs=inputs, is_placed=True)

    def part(self, first: int) -> Cohort:
        """Return the cohorts of the segment that begins with a round, [R, every, S]."""
        end = first + self.evaluations.every
        part = jax.tree.map(lambda leaf: leaf[:, first:end], self.cohorts)
        if jax.config.values["jax_disable_jit"] or jax.config.values["jax_debug_nans"]:
            # Operations one by one cannot index a NumPy array by a loop's counter.
            part = jax.tree.map(jnp.asarray, part)
        return part

    def compile(self) -> "Plan":
        """Return the plan, placed, with its programs compiled, so that its first calls find it so.

        Nothing is computed.
        """
        plan = self.placed()
        if plan.streams:
            return plan
        made, data, inputs = plan.program, plan.data, plan.inputs
        compiled = made.init.lower(data, inputs).compile()

        def placed(shape: jax.ShapeDtypeStruct, sharding: Any) -> jax.ShapeDtypeStruct:
            if len(sharding.device_set) == 1:
                return shape  # as arrays on the only device, which are bound to no device
            return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)

        shapes = jax.eval_shape(made.init, data, inputs)
        states = jax.tree.map(placed, shapes, compiled.output_shardings)
        made.traffic(data, inputs)  # which it keeps
        made.evaluate.lower(data, inputs, states).compile()
        made.rounds.lower(data, inputs, states, plan.part(0)).compile()
        return plan._replace(is_compiled=True)

    def trace(self) -> None:
        """Trace the rounds and the evaluation, to find mistakes before anything is computed."""
        plan = self.placed()
        if plan.streams:
            return
        states = jax.eval_shape(plan.program.init, plan.data, plan.inputs)
        jax.eval_shape(plan.program.evaluate, plan.data, plan.inputs, states)
        jax.eval_shape(plan.program.rounds, plan.data, plan.inputs, states, plan.part(0))

    def train(self, callbacks: Sequence[Callback | Callable[[Fitted], object]] = ()) -> Fitted:
        """Train all runs, and return them.

        Args:
          callbacks: as in `fit`.

        Raises:
          Diverged: with `nonfinite="stop"`, at an update that is not finite.
        """
        plan = self.placed()
        fitted, called = Fitted(plan), acting.of(callbacks)
        with contextlib.ExitStack() as opened:
            for callback in called:
                opened.callback(callback.end, fitted)
                callback.begin(fitted)
            try:
                plan._train(fitted, called)
            except KeyboardInterrupt:
                if not fitted.round:
                    raise
                fitted.stopped = "interrupt"
        return fitted

    def _train(self, fitted: Fitted, callbacks: Sequence[Callback]) -> None:
        made, data, inputs = self.program, self.data, self.inputs
        with Ahead() as ahead:  # what comes next compiles while this computes
            if fitted.training is None:
                fitted.training = made.init(data, inputs)
                rest = data, inputs, fitted.training
                if not self.is_compiled:
                    first = self.part(0)
                    ahead.begin("rounds", lambda: made.rounds.lower(*rest, first).compile())
                if self.evaluations.start:
                    fitted.add(made.gathered(made.evaluate(*rest)), 0)
                    _act(callbacks, fitted)
                elif not self.is_compiled:
                    ahead.begin("evaluation", lambda: made.evaluate.lower(*rest).compile())
            while not (fitted.is_over or fitted.stopped):
                part = self.part(fitted.round)
                with _interrupted_at_end():
                    for name in ("rounds", "evaluation"):
                        ahead.take(name, lambda: None)
                    fitted.training, outcome = made.segment(data, inputs, fitted.training, part)
                    outcome = made.gathered(outcome)
                    self._look_for_nonfinite(outcome, fitted)
                    left = self.rounds - fitted.round
                    fitted.add(outcome, min(self.evaluations.every, left))
                _act(callbacks, fitted)

    def _look_for_nonfinite(self, outcome: Outcome, fitted: Fitted) -> None:
        """Warn of the first update that is not finite, or raise `Diverged`."""
        broken = np.asarray(outcome.broken)
        if fitted.is_broken or (broken < 0).all():
            return
        index, at = np.argwhere(broken >= 0)[0]
        error = Diverged(fitted.round + at + 1, int(broken[index, at]), index, self.runs[index])
        if self.evaluations.nonfinite == "stop":
            raise error
        fitted.is_broken = True
        warnings.warn(str(error), NonfiniteWarning, stacklevel=5)


def _act(callbacks: Sequence[Callback], fitted: Fitted) -> None:
    """Call the callbacks after an evaluation. An error gets the result so far as `fitted`."""
    for callback in callbacks:
        try:
            reason = callback.evaluated(fitted)
        except Exception as error:
            error.fitted = fitted  # type: ignore[attr-defined]
            raise
        if reason and not fitted.stopped:
            fitted.stopped = reason if isinstance(reason, str) else "callback"


@contextlib.contextmanager
def _interrupted_at_end() -> Iterator[None]:
    """Let Ctrl-C act at the end of the block, which therefore runs as a whole."""
    is_main = threading.current_thread() is threading.main_thread()  # it alone gets signals
    if not is_main or signal.getsignal(signal.SIGINT) is None:  # None: no handler of Python
        yield
        return
    pressed: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: pressed.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed and callable(before):
        before(signal.SIGINT, None)  # by default it raises KeyboardInterrupt


def plan(
    algorithm: Factory,
    model: Model,
    clients: Any,
    *,
    rounds: int,
    grid: Mapping[str, Sequence[Any]] | None = None,
    optimizer: Optimizer = optax.sgd,
    batch_size: int | None = 32,
    epochs: int = 1,
    steps: int | None = None,
    test: tuple[Tree, Tree] | None = None,
    validation: float = 0.0,
    schedule: Callable[[Array, int, int], Cohort] = _EVERYONE,
    evaluations: Evaluations | int = 1,
    devices: Devices | int | None = None,
    **settings: Any,
) -> Plan:
    """Return the plan of `fit`, which has the same arguments; nothing is compiled."""
    watched = evaluations if isinstance(evaluations, Evaluations) else Evaluations(evaluations)
    devices = devices if isinstance(devices, Devices) else Devices(devices)
    _check(model, rounds, watched, batch_size=batch_size, epochs=epochs, steps=steps)
    facts, factor = facts_of(algorithm), settings.pop("learning_rate_schedule", None)
    loss = settings.pop("loss", None)
    check_settings(algorithm, {**settings, **(grid or {})}, {"seed": 0, **LOCAL})
    runs, plain = _runs(settings, grid or {}, facts.infinite, is_scheduled=factor is not None)
    platforms.make_devices(devices.number or platforms.cores())

    seeds = list(dict.fromkeys(run.seed for run in runs))
    splits, columns = _splits(clients, seeds, test, validation)
    if isinstance(clients, Dataset) and clients.render is not None:
        model = models.painted(model, clients.render)
    task = task_of(algorithm, splits.data.y, loss, watched.score)
    network, num_classes = task.network(model, splits.data)
    inputs = program.inputs(
        runs,
        splits.of_seed,
        pooled=facts.pooled,
        watch_examples=watched.watched,
        warm_start=watched.warm_start,
        variables=splits.variables,
        scaling=splits.scaling,
        num_classes=splits.num_classes if watched.by_class else 0,
        source=splits.source,
    )
    sizes = np.asarray(inputs.train.size)
    training = LocalTraining(optimizer, batch_size, epochs, steps, local_sizes(batch_size, sizes))

    def build(hyper: Mapping[str, Any]) -> Algorithm:
        given = {**plain, **task.settings, **hyper}
        work = training.work({name: given.pop(name, LOCAL[name]) for name in LOCAL})
        return algorithm(model, work, **given)

    _check_values(build, runs)
    task.check_columns(build(runs[0].hyper), network, splits.data, sizes.shape[1])

    attend = _EVERYONE if facts.pooled else schedule
    cohorts = _cohorts(attend, inputs, rounds)
    groups = program.group_names([splits.of_seed[seed] for seed in seeds])
    experiment = Experiment(
        model,
        build,
        _rounded_up(len(groups), watched.thresholds),
        thresholds=watched.thresholds,
        stop_above=watched.stop_above,
        stop_within=watched.stop_within,
        stop_centred=watched.stop_centred,
        end_at_stop=watched.end_at_stop,
        drop_nonfinite=watched.nonfinite == "drop",
        history=_history(attend, cohorts),
        pooled=facts.pooled,
        schedules={} if factor is None else {"learning_rate": factor},
        loss=task.loss,
        score=task.score.function,
        precision=devices.precision or facts.precision,
        quick_to_compile=devices.quick_to_compile,
    )
    load = len(runs), cohorts.who.shape[2], sizes.shape[1], _num_bytes(splits.data)
    layout, streams = devices.layout(*load), devices.streams(*load[2:])
    at_once = 1 if platforms.on_cpu() else 0
    made = program.make(
        experiment,
        client_chunk=at_once if devices.client_chunk is None else devices.client_chunk,
        run_chunk=at_once if devices.run_chunk is None else devices.run_chunk,
        layout=layout,
    )
    return Plan(
        tuple(runs),
        rounds,
        watched,
        build,
        experiment,
        made,
        layout,
        splits.data,
        inputs,
        _filled(cohorts, watched.every),
        groups,
        task,
        num_classes,
        streams,
        columns,
        jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), splits.data),
    )


def _check(model: Any, rounds: int, evaluations: Evaluations, **numbers: int | None) -> None:
    if not isinstance(model, Model):
        text = f"is of type {type(model).__name__}, must be a Model, as models.from_flax(module) is"
        raise UsageError("model", ..., text)
    checks.integer("rounds", rounds)
    checks.integer("evaluations", evaluations.every, 1, rounds, ", the rounds")
    checks.one_of("nonfinite", evaluations.nonfinite, _NONFINITE)
    for name, number in numbers.items():
        if number is not None:
            checks.integer(name, number, 1, 2**31 - 1)


def _runs(
    settings: Mapping[str, Any],
    grid: Mapping[str, Sequence[Any]],
    infinite: Collection[str],
    *,
    is_scheduled: bool,
) -> tuple[list[Run], dict[str, Any]]:
    """Return the runs of the grid, and the settings that all of them share.

    Args:
      settings: the settings with one value.
      grid: as in `fit`.
      infinite: the settings that may be NaN or infinite, which the algorithm checks.
      is_scheduled: whether the learning rate changes over the rounds.
    """
    values = {"seed": [0], **{name: np.asarray(each).tolist() for name, each in grid.items()}}
    if is_scheduled and "learning_rate" not in grid:  # a factor is for a number of a run
        settings = dict(settings)
        values["learning_rate"] = [settings.pop("learning_rate", LOCAL["learning_rate"])]
    for name, each in values.items():
        if name in settings:
            raise UsageError(name, ..., "must be given once, beside the grid or in it")
        if not isinstance(each, list) or not each or len(set(map(str, each))) < len(each):
            raise UsageError(f"grid[{name!r}]", each, "must be a list of different numbers")
    seeds = checks.integers("grid['seed']", values.pop("seed"), 0, 2**31 - 1).tolist()
    for name, each in [*values.items(), *((name, [each]) for name, each in settings.items())]:
        for value in each:
            if name in LOCAL:
                checks.real(name, value, 0, 1.0 if name == "momentum" else np.inf)
            if name not in infinite and not checks.is_finite(value):
                raise UsageError(name, value, "must be a finite number")
    return program.grid(seeds, **values), dict(settings)


def _splits(
    clients: Any, seeds: Sequence[int], test: Any, validation: float
) -> tuple[Splits, list[str]]:
    """Return the splits for the seeds, and the columns of the inputs if they are frames."""
    if callable(clients) or isinstance(clients, Dataset):
        if test is not None:
            raise UsageError("test", ..., "must be left out beside clients that bring their own")
        dealt = (
            clients if callable(clients) else of_clients.of_dataset(clients, validation=validation)
        )
        return dealt(seeds), []
    columns = of_clients.columns_of(clients)
    if test is not None:
        of_clients.check_columns("test", test[0], columns)
    x, y, parts = of_clients.of_arrays(clients)
    data, of_seed = of_clients.splits_of_arrays(
        x, y, parts, test=test, validation=validation, seeds=seeds
    )
    return Splits(data, of_seed), columns


def local_sizes(batch_size: int | None, sizes: np.ndarray) -> tuple[int, int | None]:
    """Return the sizes for which local training is compiled.

    Args:
      batch_size: examples in a batch; None: all of the client's.
      sizes: [R, C], the examples of each client.

    Returns:
      (the most examples of a client, rounded up so that similar data share a program, or 1 if
      batches have another size; the batches in a pass, if all clients have the same number and a
      loop of known length gains anything, else None).
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
        momentum, decay, clip = values["momentum"], values["weight_decay"], values["clip"]
        more = {} if checks.is_known_zero(momentum) else {"momentum": momentum}
        made = self.optimizer(values["learning_rate"], **more)
        checks.record("optimizer", made, optax.GradientTransformation)
        before = [] if checks.is_known_zero(clip) else [optax.clip_by_global_norm(clip)]
        if not checks.is_known_zero(decay):
            before.append(optax.add_decayed_weights(decay))
        return optax.chain(*before, made) if before else made

    def work(self, values: Mapping[str, float | Array]) -> Work:
        """Return local training with a learning rate, a momentum, a decay and a largest norm."""
        chain, is_plain = self.chain(values), self.optimizer is optax.sgd
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
    build: Callable[[Mapping[str, Any]], Algorithm],
    runs: Sequence[Run],
) -> None:
    """Raise UsageError for values that are out of range or that one program cannot hold."""
    for run in {tuple(run.hyper.values()): run for run in runs}.values():
        if not isinstance(build(run.hyper), Algorithm):
            raise UsageError("algorithm", ..., "must return an Algorithm")
    for name in runs[0].hyper:

        def traced(value: Array, name: str = name) -> None:
            build({**runs[0].hyper, name: value})

        try:
            jax.eval_shape(traced, jax.ShapeDtypeStruct((), np.float32))
        except (UsageError, TypeError):  # JAX's errors about unknown values are TypeErrors
            text = "must be one value, outside of the grid, as a program is compiled for each"
            raise UsageError(name, ..., text) from None


def _cohorts(schedule: Callable[[Array, int, int], Cohort], inputs: Inputs, rounds: int) -> Cohort:
    """Return the cohorts of all runs [R, T, S], on the host.

    Raises UsageError if they do not fit the runs.
    """
    num_clients = inputs.train.size.shape[1]
    drawn = jax.device_get(program.cohorts(lambda key: schedule(key, num_clients, rounds), inputs))
    if not isinstance(drawn, Cohort) or drawn.who.shape[1:2] != (rounds,) or drawn.who.ndim != 3:
        raise UsageError("schedule", ..., f"must return cohorts [{rounds}, S] of all rounds")
    for run in range(len(drawn.who)):
        one = Cohort(*(leaf[run] for leaf in drawn))
        schedules.check(one, num_clients, _history(schedule, drawn))
    return drawn


def _history(schedule: Any, cohorts: Cohort) -> int:
    """Return how many broadcasts are kept: one more than the longest delay."""
    longest = int(np.max(cohorts.delay, initial=0, where=cohorts.present))
    return max(1 + longest, getattr(schedule, "history", 1))


def _filled(cohorts: Cohort, every: int) -> Cohort:
    """Return cohorts that fill whole segments; nobody attends the rounds that are added."""
    more = -cohorts.who.shape[1] % every
    added = jax.tree.map(lambda leaf: np.repeat(leaf[:, -1:], more, 1), cohorts)
    added = added._replace(present=np.zeros_like(added.present))
    return jax.tree.map(lambda *parts: np.concatenate(parts, 1), cohorts, added)


def _rounded_up(num_groups: int, thresholds: Sequence[float]) -> int:
    """Return a multiple of 8, so that data with other domains share a compiled program.

    Stops hold the scores by group, and checkpoints hold the stops, so there the number stays.
    """
    return num_groups if thresholds else 8 * -(-num_groups // 8)


def _num_bytes(tree: Tree) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
