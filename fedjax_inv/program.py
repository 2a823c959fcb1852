"""Many runs of one experiment, seeds x hyperparameters x clients, as one compiled program.

    made = make(experiment)
    training = made.init(data, inputs)
    outcome = made.evaluate(data, inputs, training)                         # before the first round
    training, outcome = made.segment(data, inputs, training, cohorts)       # again and again

Nothing here knows of flags, files or the screen; axis letter R: runs.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from fedjax_inv import (
    checks,
    clients,
    communication,
    diagnostics,
    evaluation,
    objectives,
    rounds,
    shares,
    stopping,
)
from fedjax_inv.checks import UsageError
from fedjax_inv.data import federation as federations
from fedjax_inv.data.federation import Split
from fedjax_inv.shares import Common, Holdings, Layout
from fedjax_inv.types import (
    Algorithm,
    Array,
    Cohort,
    Examples,
    Federation,
    Loss,
    Model,
    Tree,
    Variables,
)

T = TypeVar("T", Holdings, Common)


class Run(NamedTuple):
    """One training run: what may differ within a program."""

    seed: int  # of network, minibatches and cohorts
    hyper: dict[str, float]


class Experiment(NamedTuple):
    """What all runs of a program have in common."""

    model: Model
    algorithm: Callable[[Mapping[str, Array]], Algorithm]  # hyperparameters of a run -> its own
    num_groups: int = 1  # of validation clients, whose scores are told together
    thresholds: tuple[float, ...] = ()  # K, of the stop rule (`stopping`) on the watched score
    stop_above: bool = False  # whether a threshold is met from it on, not below it
    end_at_stop: bool = False  # whether a run stays as it is once all thresholds are met
    drop_nonfinite: bool = False  # as in `rounds.step`
    history: int = 1  # broadcasts that are kept: one more than the longest delay
    watch_gradients: bool = False  # measure how clients' gradients agree at the algorithm's network
    pooled: bool = False  # training is on one client, validation on others
    # hyperparameter -> (round [], from 0) -> what it is multiplied by in that round
    schedules: Mapping[str, Callable[[Array], Array]] = {}
    loss: Loss = objectives.cross_entropy  # of evaluations
    score: Loss = objectives.accuracy


class Watched(NamedTuple):
    """The examples that are looked at after every round."""

    train: Holdings
    test: Common
    warm_start: Array  # [R] int32, rounds before a stop


class Detailed(NamedTuple):
    """The test examples, otherwise dealt."""

    by_class: Common  # "client" k holds class k
    shards: Holdings  # client c holds some in the proportions of its training classes


class Inputs(NamedTuple):
    """What differs between the R runs of a program."""

    hyper: dict[str, Array]  # each [R]
    seed: Array  # [R]
    train: Holdings
    valid: Holdings
    test: Common
    group: Array  # [R, C] int32, the group that each validation client counts for
    watched: Watched | None = None
    variables: Variables | None = None  # [R, ...] networks to start from; None: drawn by the seed
    detailed: Detailed | None = None


class Scores(NamedTuple):
    """How a state serves the training, the validation and the test examples."""

    train: evaluation.Scores  # each [1]: all clients pooled
    valid: evaluation.Scores  # each [groups]
    test: evaluation.Scores  # each [1]


class DetailedScores(NamedTuple):
    """How a state serves the test examples, dealt as in `Detailed`."""

    by_class: evaluation.Scores  # each [K]
    shards: evaluation.Scores  # each [C]


class Training(NamedTuple):
    """All that a run carries from segment to segment."""

    state: rounds.State
    stops: stopping.Stops  # of the thresholds, with `Scores`


class Outcome(NamedTuple):
    """What a segment of T rounds reports of each run."""

    metrics: dict[str, Array]  # each [R, T]: the mean over the clients, weighted by size
    attended: Array  # [R, T, exchanges] int32, clients that took part
    broken: Array  # [R, T] int32, the first client that produced a NaN or infinity, -1 if none did
    watched: dict[str, Array]  # train and test: score after every round [R, T]; or empty
    valid: evaluation.Scores  # each [R, groups]
    test: evaluation.Scores  # each [R, 1]
    stops: stopping.Stops
    gradients: diagnostics.Agreement | None = None  # each [R, C], the cosine [R]
    detailed: DetailedScores | None = None


class Program(NamedTuple):
    """The functions of an experiment, compiled once for all inputs of the same shapes."""

    init: Callable[[Examples, Inputs], Training]  # -> [R, ...]
    # jitted: (data, inputs, training [R], cohorts [R, T, S]) -> (training, outcome); the training
    # that is passed is donated
    segment: jax.stages.Wrapped
    # jitted: (data, inputs, training [R]) -> outcome, of no rounds: T is 0, without metrics
    evaluate: jax.stages.Wrapped
    # (data, inputs) -> bytes down and up of one client in each exchange of a round
    traffic: Callable[[Examples, Inputs], list[int]]
    # (inputs, training) -> training as it is on any number of devices, clients [R, C, ...]; of
    # shapes, shapes
    stored: Callable[[Inputs, Training], Training]
    placed: Callable[[Training], Training]  # what was stored, where the program wants it


def grid(seeds: Sequence[int], **hyper: Sequence[float]) -> list[Run]:
    """A run for every combination of the hyperparameters' values, and seed by seed of it."""
    combinations = itertools.product(*hyper.values())
    return [
        Run(seed, dict(zip(hyper, values, strict=True)))
        for values in combinations
        for seed in seeds
    ]


def inputs(
    runs: Sequence[Run],
    splits: Mapping[int, Split],
    *,
    pooled: bool = False,
    watch_examples: int = 0,
    warm_start: Callable[[np.ndarray], int] = lambda sizes: 0,
    variables: Mapping[int, Variables] | None = None,
    num_classes: int = 0,
) -> Inputs:
    """What R runs work on.

    splits: by seed, all of one data set and with one number of clients. pooled: training is on the
    pooled examples. watch_examples: about how many of all clients' training examples, and of the
    test's, are looked at after every round; 0: none, and there is no stop. warm_start: the sizes
    [C] of the training clients -> rounds before a stop. variables: by seed, networks to start from;
    by default they are drawn. num_classes: if above 0, K of the data, and evaluations tell the
    test's scores class by class and in each client's proportions. Raises ValueError for runs whose
    hyperparameters have other names, and for a seed without a split.
    """
    if not runs:
        raise UsageError("runs=[]: must hold at least one run")
    names = set(runs[0].hyper)
    for run in runs:
        if set(run.hyper) != names:
            raise UsageError(
                f"runs: set {sorted(run.hyper)} and {sorted(names)}, must set the same"
            )
        if run.seed not in splits:
            raise UsageError(f"splits: has none for seed {run.seed}")
    checks.integer("watch_examples", watch_examples, 0)
    # A split of each seed, then of each run: seeds are few and splits are large.
    seeds = list(dict.fromkeys(run.seed for run in runs))
    which = np.array([seeds.index(run.seed) for run in runs])
    stacked = federations.stack([splits[seed] for seed in seeds])

    def held(of_seeds: Sequence[Tree]) -> Holdings:
        # On the host, where nothing is compiled for it.
        return Holdings(*(jnp.asarray(np.asarray(leaf)[which]) for leaf in of_seeds))

    def common(of_seeds: Sequence[Tree]) -> Common:
        return Common(*held(of_seeds))

    train = held(stacked.train[1:])
    if pooled:
        singles = [federations.pooled(splits[seed].train)[1:] for seed in seeds]
        train = held([np.stack(leaves) for leaves in zip(*singles, strict=True)])
    test = common(stacked.test[1:])
    watched = None
    if watch_examples:
        rounds_before = [warm_start(np.asarray(sizes)) for sizes in train.size]
        watched = Watched(
            _first(train, watch_examples),
            _first(test, watch_examples),
            jnp.asarray(rounds_before, jnp.int32),
        )
    start = None
    if variables is not None:
        chosen = (variables[run.seed] for run in runs)
        start = jax.tree.map(lambda *leaves: jnp.asarray(np.stack(leaves)), *chosen)
    detailed = None
    if num_classes:
        dealt = [
            (
                federations.by_class(splits[seed].test, num_classes),
                federations.test_shards(splits[seed], num_classes, seed),
            )
            for seed in seeds
        ]
        by_class, of_clients = (_stacked(of) for of in zip(*dealt, strict=True))
        detailed = Detailed(common(by_class), held(of_clients))
    return Inputs(
        hyper={name: jnp.array([run.hyper[name] for run in runs], jnp.float32) for name in names},
        seed=jnp.array([run.seed for run in runs], jnp.int32),
        train=train,
        valid=held(stacked.valid[1:]),
        test=test,
        group=jnp.asarray(groups(stacked.domain)[which]),
        watched=watched,
        variables=start,
        detailed=detailed,
    )


def _stacked(of_seeds: Sequence[Federation]) -> list[np.ndarray]:
    """Their order, start and size, stacked; orders that are shorter end in zeros."""
    length = max(len(each.order) for each in of_seeds)
    orders = [np.pad(each.order, (0, length - len(each.order))) for each in of_seeds]
    return [np.stack(leaves) for leaves in (orders, *zip(*(f[2:] for f in of_seeds), strict=True))]


def _first(held: T, count: int) -> T:
    """About `count` of the examples of each run, from every client; they lie in random order."""
    size = np.asarray(held.size)
    share = np.minimum(1.0, count / np.maximum(size.sum(1, keepdims=True), 1))
    return held._replace(size=jnp.asarray(np.ceil(share * size), jnp.int32))


def groups(domain: np.ndarray) -> np.ndarray:
    """The validation groups of clients of `domain` [..., C]: their domains, numbered from 0; 0 for
    all where clients hold several domains (-1)."""
    if (domain < 0).any():
        return np.zeros_like(domain)
    return np.searchsorted(np.unique(domain), domain).astype(np.int32)


def group_names(split: Split) -> list[str]:
    """The names of the validation groups."""
    if (split.domain < 0).any():
        return ["clients"]
    return [split.domains[index] for index in np.unique(split.domain)]


def schedule_key(seed: int | Array) -> Array:
    """What draws who attends, of a run's seed."""
    return jax.random.fold_in(jax.random.key(seed), 2)


def cohorts(schedule: Callable[[Array], Cohort], inputs: Inputs) -> Cohort:
    """Who attends: [R, T, S]. schedule: a key -> [T, S]; each run has a key of its own."""
    return jax.jit(jax.vmap(lambda seed: schedule(schedule_key(seed))))(inputs.seed)


def make(
    experiment: Experiment,
    *,
    client_chunk: int = 1,
    run_chunk: int = 0,
    layout: Layout | None = None,
) -> Program:
    """The program of an experiment.

    client_chunk, run_chunk: how many clients of a device and how many runs train at once, 0: all.
    layout: the devices that share the clients, which want data and inputs as it deals them; one
    device by default. Raises ValueError for negative chunks.
    """
    checks.integer("client_chunk", client_chunk, 0)
    checks.integer("run_chunk", run_chunk, 0)

    axis = clients.chunked(client_chunk) if client_chunk else clients.vmapped()
    runs = (
        _Runs(experiment, layout.axis(axis), layout.num_parts)
        if layout
        else _Runs(experiment, axis)
    )

    def init(data: Examples, inputs: Inputs) -> Training:
        return _over_runs(lambda one: runs.start(data, one), run_chunk, inputs)

    def segment(
        data: Examples, inputs: Inputs, training: Training, cohorts: Cohort
    ) -> tuple[Training, Outcome]:
        return _over_runs(
            lambda *one: runs.advance(data, *one), run_chunk, inputs, training, cohorts
        )

    def evaluate(data: Examples, inputs: Inputs, training: Training) -> Outcome:
        return _over_runs(lambda *one: runs.look(data, *one), run_chunk, inputs, training)

    def traffic(data: Examples, inputs: Inputs) -> list[int]:
        """On one device, as on any other."""

        def first(data: Examples, inputs: Inputs) -> tuple[Examples, Inputs]:
            if layout and layout.own:
                data, inputs = shares.of_device(data, inputs)
            return data, jax.tree.map(lambda leaf: leaf[0], inputs)

        data, one = jax.eval_shape(first, data, inputs)
        hyper = {name: np.asarray(values)[0] for name, values in inputs.hyper.items()}
        alone = _Runs(experiment, clients.vmapped())
        return alone.traffic(data, one._replace(hyper=hyper))

    if layout is None:
        return Program(
            *(jax.jit(init), jax.jit(segment, donate_argnums=2), jax.jit(evaluate), traffic),
            stored=lambda inputs, training: training,
            placed=lambda training: training,
        )

    def stored(inputs: Inputs, training: Training) -> Training:
        held = layout.to_store(training.state.clients, inputs.train.size.shape[1])
        return training._replace(state=training.state._replace(clients=held))

    def placed(training: Training) -> Training:
        held = training.state.clients
        alone = layout.whole(training._replace(state=training.state._replace(clients=())))
        return alone._replace(state=alone.state._replace(clients=layout.of_stored(held)))

    whole: Any = PartitionSpec()
    states = Training(rounds.State(whole, layout.of_clients, whole, whole, whole), whole)
    return Program(
        jax.jit(layout.over(init, (), states)),
        jax.jit(layout.over(segment, (states, whole), (states, whole)), donate_argnums=2),
        jax.jit(layout.over(evaluate, (states,), whole)),
        traffic,
        stored,
        placed,
    )


class _Runs(NamedTuple):
    """What the runs of an experiment do, each for one run: its inputs have no leading R."""

    experiment: Experiment
    axis: clients.Axis
    num_parts: int = 1  # in which `Common` holdings are

    def algorithm(self, inputs: Inputs, round: Array | None = None) -> Algorithm:
        """With the hyperparameters of a round; without one, with those that schedules multiply."""
        hyper = dict(inputs.hyper)
        if round is not None:
            for name, factor in self.experiment.schedules.items():
                hyper[name] = hyper[name] * factor(round)
        return self.experiment.algorithm(hyper)

    def state(self, data: Examples, inputs: Inputs) -> rounds.State:
        """Before the first round."""
        key = jax.random.key(inputs.seed)
        sample = jax.tree.map(lambda leaf: jnp.zeros_like(leaf[:1]), data.x)
        variables = inputs.variables
        if variables is None:
            variables = self.experiment.model.init(jax.random.fold_in(key, 0), sample)
        return rounds.init(
            self.algorithm(inputs),
            variables,
            Federation(data, *inputs.train),
            jax.random.fold_in(key, 1),
            history=self.experiment.history,
            axis=self.axis,
        )

    def start(self, data: Examples, inputs: Inputs) -> Training:
        state, thresholds = self.state(data, inputs), self.experiment.thresholds
        # Nothing is measured at stops that there are not.
        shapes = jax.eval_shape(self.scores, data, inputs, state, True) if thresholds else ()
        return Training(state, stopping.init(len(thresholds), shapes))

    def advance(
        self, data: Examples, inputs: Inputs, training: Training, cohorts: Cohort
    ) -> tuple[Training, Outcome]:
        """A segment of rounds, then an evaluation."""

        def one(training: Training, cohort: Cohort) -> tuple[Training, Tree]:
            state, stops = training
            if self.experiment.end_at_stop:
                cohort = cohort._replace(present=cohort.present & ~stopping.all_met(stops))
            state, reports = rounds.step(
                self.algorithm(inputs, state.round),
                state,
                cohort,
                Federation(data, *inputs.train),
                axis=self.axis,
                drop_nonfinite=self.experiment.drop_nonfinite,
            )
            training, watched = self.watch(data, inputs, Training(state, stops), cohort)
            return training, (reports, watched)

        with jax.named_scope("rounds"):
            training, (reports, watched) = jax.lax.scan(one, training, cohorts)
        return training, self.look(data, inputs, training)._replace(
            metrics=_mean_metrics(reports),
            attended=jnp.stack([report.present.sum(1) for report in reports], axis=-1),
            broken=jnp.stack([_first_broken(report, cohorts.who) for report in reports]).max(0),
            watched=watched,
        )

    def look(self, data: Examples, inputs: Inputs, training: Training) -> Outcome:
        """An evaluation, as the outcome of no rounds."""
        exchanges = len(self.algorithm(inputs).exchanges)
        outcome = Outcome(
            {},
            jnp.zeros((0, exchanges), jnp.int32),
            jnp.zeros(0, jnp.int32),
            {} if inputs.watched is None else {kind: jnp.zeros(0) for kind in ("train", "test")},
            *self.held_out(data, inputs, training.state, True),
            training.stops,
        )
        if inputs.detailed is not None:
            outcome = outcome._replace(detailed=self.detailed(data, inputs, training.state))
        if self.experiment.watch_gradients:
            outcome = outcome._replace(gradients=self.gradients(data, inputs, training.state))
        return outcome

    def detailed(self, data: Examples, inputs: Inputs, state: rounds.State) -> DetailedScores:
        assert inputs.detailed is not None
        by_class, shards = inputs.detailed
        return DetailedScores(
            self.joined(self.evaluate(data, inputs, state, by_class, False)),
            # Of a personal algorithm each client is served by what it keeps.
            self.evaluate(data, inputs, state, shards, not self.experiment.pooled),
        )

    def gradients(
        self, data: Examples, inputs: Inputs, state: rounds.State
    ) -> diagnostics.Agreement:
        """How the training clients' gradients lie at the server's network."""
        network = self.algorithm(inputs).network
        assert network, "watch_gradients needs an algorithm with a network"
        return diagnostics.agreement(
            self.experiment.model,
            network(state.server),
            Federation(data, *inputs.train),
            loss=self.experiment.loss,
            axis=self.axis,
        )

    def watch(
        self, data: Examples, inputs: Inputs, training: Training, cohort: Cohort
    ) -> tuple[Training, dict[str, Array]]:
        """The scores after a round, and the stops that they cause."""
        state, stops = training
        if inputs.watched is None:
            return training, {}
        train = self.evaluate(data, inputs, state, inputs.watched.train, True)
        test = self.joined(self.evaluate(data, inputs, state, inputs.watched.test, False))
        score = {"train": _pooled(train).score[0], "test": test.score[0]}
        if self.experiment.thresholds:
            # Neither a round that nobody is sent to nor a score of nothing stops.
            counts = cohort.present.any() & (train.size.sum() > 0)
            stops = stopping.update(
                stops,
                jnp.where(counts, score["train"], jnp.nan),
                thresholds=jnp.array(self.experiment.thresholds, jnp.float32),
                num_rounds=state.round,
                warm_start=inputs.watched.warm_start,
                measure=lambda needed: self.scores(data, inputs, state, needed),
                above=self.experiment.stop_above,
            )
        return Training(state, stops), score

    def scores(
        self, data: Examples, inputs: Inputs, state: rounds.State, needed: Array | bool
    ) -> Scores:
        train = self.evaluate(data, inputs, state, inputs.train, True, needed)
        return Scores(_pooled(train), *self.held_out(data, inputs, state, needed))

    def held_out(
        self, data: Examples, inputs: Inputs, state: rounds.State, needed: Array | bool
    ) -> tuple[evaluation.Scores, evaluation.Scores]:
        """Of the validation groups and of the test client."""
        seen = not self.experiment.pooled
        valid = self.evaluate(data, inputs, state, inputs.valid, seen, needed)
        test = self.joined(self.evaluate(data, inputs, state, inputs.test, False, needed))
        return evaluation.by_group(valid, inputs.group, self.experiment.num_groups), test

    def joined(self, scores: evaluation.Scores) -> evaluation.Scores:
        """Of `Common` holdings, whatever parts they are in."""
        if self.num_parts == 1:
            return scores
        number = scores.size.shape[0] // self.num_parts
        return evaluation.by_group(scores, jnp.tile(jnp.arange(number), self.num_parts), number)

    def evaluate(
        self,
        data: Examples,
        inputs: Inputs,
        state: rounds.State,
        held: Holdings | Common,
        seen: bool,
        needed: Array | bool = True,
    ) -> evaluation.Scores:
        algorithm = self.algorithm(inputs)
        return evaluation.evaluate(
            algorithm,
            state,
            Federation(data, *held),
            axis=self.axis,
            seen=seen,
            needed=needed,
            loss=self.experiment.loss,
            score=self.experiment.score,
        )

    def traffic(self, data: Examples, inputs: Inputs) -> list[int]:
        """Bytes down and up of one client in each exchange of a round."""
        state = jax.eval_shape(self.state, data, inputs)
        federation = Federation(data, *inputs.train)
        exchanges = communication.traffic(self.algorithm(inputs), state, federation)
        return [each.down + each.up for each in exchanges]


def _over_runs(fn: Callable[..., Tree], at_once: int, *arguments: Tree) -> Tree:
    """`fn` of each of R runs, `at_once` or nearly so many at a time; arguments [R, ...]."""
    num_runs = jax.tree.leaves(arguments)[0].shape[0]
    count = -(-num_runs // (at_once or num_runs))
    if count == 1:
        return jax.vmap(fn)(*arguments)
    if count == num_runs:
        return jax.lax.map(lambda one: fn(*one), arguments)
    size = -(-num_runs // count)

    # Not the batch_size of lax.map, which fails on arrays without elements.
    def chunked(array: Array) -> Array:
        whole = jnp.concatenate([array, array[: count * size - num_runs]])
        return whole.reshape(count, size, *array.shape[1:])

    results = jax.lax.map(lambda chunk: jax.vmap(fn)(*chunk), jax.tree.map(chunked, arguments))
    return jax.tree.map(lambda a: a.reshape(count * size, *a.shape[2:])[:num_runs], results)


def _pooled(scores: evaluation.Scores) -> evaluation.Scores:
    return evaluation.by_group(scores, jnp.zeros_like(scores.size), 1)


def _first_broken(report: rounds.Report, who: Array) -> Array:
    """[T] the client of the first slot that is not finite, -1 where all are."""
    slot = jnp.argmin(report.finite, axis=1)
    client = jnp.take_along_axis(who, slot[:, None], axis=1)[:, 0]
    return jnp.where(report.finite.all(1), -1, client)


def _mean_metrics(reports: tuple[rounds.Report, ...]) -> dict[str, Array]:
    """Every metric's mean over the clients that took part, weighted by size; [T] each, NaN where
    nobody did.

    Of several exchanges that report any, all but the last put their number before the name.
    """
    means = {}
    last = max((index for index, report in enumerate(reports) if report.metrics), default=0)
    for index, report in enumerate(reports):
        weights = report.size * report.present
        prefix = "" if index == last else f"{index}."
        for name, values in report.metrics.items():
            total = (jnp.where(report.present, values, 0) * weights).sum(1)
            means[prefix + name] = total / weights.sum(1)
    return means
