"""One run of an experiment: its start, its rounds and its evaluations.

Axis letter: G groups of validation clients. Nothing here has an axis R: `program` adds it.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_inv import (
    evaluation,
    models,
    objectives,
    platforms,
    rounds,
    stopping,
    types,
    unseen_norms,
)
from fedjax_inv.checks import UsageError
from fedjax_inv.communication import Traffic
from fedjax_inv.devices import Axis, ClientShards, SharedExamples
from fedjax_inv.inputs import Inputs
from fedjax_inv.types import Array, Tree

_BATCH, _BATCH_ON_CPU = 512, 64  # the examples of an evaluation's batch


@dataclasses.dataclass(frozen=True)
class Experiment:
    """The settings that all runs of a program have in common."""

    model: types.Model
    algorithm: Callable[[Mapping[str, Array]], types.Algorithm]  # from the hyperparameters of a run
    num_groups: int = 1  # G; scores of validation clients are pooled by group
    thresholds: tuple[float, ...] = ()  # K, of the stop rule (`stopping`), for the watched score
    stop_above: bool = False  # whether a score that reaches a threshold meets it, not one below
    end_at_stop: bool = False  # whether a run no longer changes once all thresholds are met
    drop_nonfinite: bool = False  # as in `rounds.step`
    history: int = 1  # H, how many broadcasts are kept: one more than the longest delay
    pooled: bool = False  # whether training is on one client, validation on others
    # hyperparameter -> (round [], from 0) -> the factor that it is multiplied by in that round
    schedules: Mapping[str, Callable[[Array], Array]] = dataclasses.field(default_factory=dict)
    loss: types.Loss = objectives.cross_entropy  # of evaluations
    score: types.Loss = objectives.accuracy
    precision: str = "default"  # of products on GPUs and TPUs, as in `platforms.products_at`
    unseen_norms: str = "mean"  # of `unseen_norms.RULES`
    # whether programs for CPUs compile in less time, to code that runs longer
    quick_to_compile: bool = False


class Scores(NamedTuple):
    """The scores of a state on the training, the validation, the test and other examples."""

    train: evaluation.Scores  # each [1]: all clients pooled
    valid: evaluation.Scores  # each [G]
    test: evaluation.Scores  # each [1]
    unseen: Mapping[str, evaluation.Scores]  # by the names of `Inputs.unseen`, each [1]


class DetailedScores(NamedTuple):
    """The scores of a state on the test examples, split as in `Detailed`."""

    by_class: evaluation.Scores  # each [K]
    shards: evaluation.Scores  # each [C]


class Training(NamedTuple):
    """All that a run carries from segment to segment."""

    state: rounds.State
    stops: stopping.Stops  # the stop of each threshold, with its `Scores`


class Played(NamedTuple):
    """The report on T rounds of a run."""

    metrics: dict[str, Array]  # each [T]: the mean over the clients, weighted by size
    attended: Array  # [T, exchanges] int32, clients that took part
    broken: Array  # [T] int32, the first client that produced a NaN or infinity, -1 if none did
    watched: dict[str, Array]  # train and test: score after every round [T]; or empty
    traffic: tuple[Traffic, ...]  # of a client in each exchange


class Outcome(NamedTuple):
    """The report on a segment of T rounds, and on the state after it.

    The shapes are those of one run; the outcome of a program has a leading R.
    """

    metrics: dict[str, Array]  # these four as in `Played`
    attended: Array
    broken: Array
    watched: dict[str, Array]
    valid: evaluation.Scores  # each [G]
    test: evaluation.Scores  # each [1]
    stops: stopping.Stops
    detailed: DetailedScores | None = None
    own_tests: Mapping[str, evaluation.Scores] = {}  # each [C], of `Inputs.own_tests`
    unseen: Mapping[str, evaluation.Scores] = {}  # by the names of `Inputs.unseen`, each [1]
    traffic: tuple[Traffic, ...] = ()  # as in `Played`; of no rounds 0


Shards = ClientShards | SharedExamples
Sets = list[tuple[Shards, bool]]  # each with whether its shards are those of the run's clients


def first_network(experiment: Experiment, inputs: Inputs, x: Tree) -> types.Variables:
    """Return the network before the first round; of x [M, ...] only the shapes matter."""
    variables = inputs.variables
    if variables is None:
        sample = jax.tree.map(lambda leaf: jnp.zeros((1, *leaf.shape[1:]), leaf.dtype), x)
        key = jax.random.fold_in(jax.random.key(inputs.seed), 0)
        variables = experiment.model.init(key, sample)
    if inputs.scaling is not None:
        variables = models.with_scaling(variables, inputs.scaling)
    if inputs.targets is not None:
        variables = models.with_targets(variables, inputs.targets)
    return variables


@dataclasses.dataclass(frozen=True)
class OneRun:
    """The functions of one run.

    Their arguments are `data`, which all runs share, and this run's `inputs`, `training` or `state`
    and cohorts [T, S] or cohort [S].
    """

    experiment: Experiment
    axis: Axis

    def algorithm(self, inputs: Inputs, round: Array | None = None) -> types.Algorithm:
        """Return the algorithm with the hyperparameters of a round; unscheduled without one."""
        hyper: dict[str, Any] = dict(inputs.hyper)
        if inputs.targets is not None:
            hyper["targets"] = inputs.targets
        if round is not None:
            for name, factor in self.experiment.schedules.items():
                hyper[name] = hyper[name] * factor(round)
        return self.experiment.algorithm(hyper)

    def state(self, data: types.Examples, inputs: Inputs) -> rounds.State:
        """Return the state before the first round."""
        return rounds.init(
            self.algorithm(inputs),
            first_network(self.experiment, inputs, data.x),
            types.Federation(data, *inputs.train),
            jax.random.fold_in(jax.random.key(inputs.seed), 1),
            history=self.experiment.history,
            axis=self.axis,
        )

    def start(self, data: types.Examples, inputs: Inputs) -> Training:
        """Return the training before the first round."""
        state = self.state(data, inputs)
        thresholds = self.experiment.thresholds
        # Without thresholds there is no stop to record.
        shapes = jax.eval_shape(self.scores, data, inputs, state, True) if thresholds else ()
        return Training(state, stopping.init(len(thresholds), shapes))

    def round(
        self, data: types.Examples, inputs: Inputs, state: rounds.State, cohort: types.Cohort
    ) -> tuple[rounds.State, tuple[rounds.Report, ...]]:
        """Play a round, and return (the state after it, its reports)."""
        return rounds.step(
            self.algorithm(inputs, state.round),
            state,
            cohort,
            types.Federation(data, *inputs.train),
            axis=self.axis,
            drop_nonfinite=self.experiment.drop_nonfinite,
        )

    def advance(
        self, data: types.Examples, inputs: Inputs, training: Training, cohorts: types.Cohort
    ) -> tuple[Training, Played]:
        """Play rounds; return (the training after them, the report on them)."""

        def one(training: Training, cohort: types.Cohort) -> tuple[Training, Tree]:
            state, stops = training
            if self.experiment.end_at_stop:
                cohort = cohort._replace(present=cohort.present & ~stopping.all_met(stops))
            state, reports = self.round(data, inputs, state, cohort)
            training, watched = self.watch(data, inputs, Training(state, stops), cohort)
            return training, (reports, watched)

        with jax.named_scope("rounds"):
            training, (reports, watched) = jax.lax.scan(one, training, cohorts)
        return training, Played(
            metrics=_mean_metrics(reports),
            attended=jnp.stack([report.present.sum(1) for report in reports], axis=-1),
            broken=_first([_first_broken(report, cohorts.who) for report in reports]),
            watched=watched,
            traffic=tuple(report.traffic for report in reports),
        )

    def assess(self, data: types.Examples, inputs: Inputs, training: Training) -> Outcome:
        """Evaluate, and return the outcome of no rounds (T = 0)."""
        sets = self.held_out(inputs)
        names = ["valid", "test", *inputs.unseen]
        for name, served in inputs.own_tests.items():
            sets[names.index(name)] = served.others, False
            sets.append((served.own, True))
        if inputs.detailed is not None:
            # A personal algorithm serves each client with the client's own state.
            by_class, shards = inputs.detailed
            sets += [(by_class, False), (shards, not self.experiment.pooled)]
        found = self.evaluate_each(data, inputs, training.state, sets)
        if inputs.unseen_test is not None:
            self.adapt(data, inputs, training.state, found)
        valid, test, *unseen = found[: len(names)]
        num_clients_sets = len(names) + len(inputs.own_tests)
        own_tests = dict(zip(inputs.own_tests, found[len(names) : num_clients_sets], strict=True))
        detailed = found[num_clients_sets:]
        exchanges = len(self.algorithm(inputs).exchanges)
        return Outcome(
            metrics={},
            attended=jnp.zeros((0, exchanges), jnp.int32),
            broken=jnp.zeros(0, jnp.int32),
            watched={kind: jnp.zeros(0) for kind in ("train", "test") if inputs.watched},
            traffic=(Traffic(0, 0),) * exchanges,
            valid=self.by_group(inputs, valid),
            test=test,
            stops=training.stops,
            detailed=DetailedScores(*detailed) if detailed else None,
            own_tests=own_tests,
            unseen=dict(zip(inputs.unseen, unseen, strict=True)),
        )

    def adapt(
        self,
        data: types.Examples,
        inputs: Inputs,
        state: rounds.State,
        found: list[evaluation.Scores],
    ) -> None:
        """Replace the scores of unseen domains by those with statistics of their own."""
        algorithm = self.algorithm(inputs)
        if algorithm.network is None or algorithm.own_outputs:
            text = "must be mean, as the algorithm has no single network"
            raise UsageError("evaluations.unseen_norms", self.experiment.unseen_norms, text)
        flags: dict[int, Any] = {1: inputs.unseen_test}
        flags |= {2 + i: True for i, name in enumerate(inputs.unseen) if name == "unseen_domain"}
        sets = self.held_out(inputs)
        for index, is_unseen in flags.items():
            shards = types.Federation(data, *sets[index][0])
            adapted = unseen_norms.evaluate(
                self.experiment.unseen_norms,
                self.experiment.model,
                algorithm.network(state.server),
                evaluation.here(evaluation.Set(shards, shared=True), self.axis, True),
                axis=self.axis,
                loss=self.experiment.loss,
                score=self.experiment.score,
            )
            found[index] = optax.tree.where(is_unseen, adapted, found[index])

    def watch(
        self, data: types.Examples, inputs: Inputs, training: Training, cohort: types.Cohort
    ) -> tuple[Training, dict[str, Array]]:
        """Return the training with the stops after a round, and the watched scores, each [].

        The training that is passed has the stops before the round. The scores are by "train" and
        "test"; there are none if nothing is watched.
        """
        state, stops = training
        if inputs.watched is None:
            return training, {}
        watched = inputs.watched
        sets: Sets = [(watched.train, True), (watched.test, False)]
        train, test = self.evaluate_each(data, inputs, state, sets)
        score = {"train": self.pooled(train).score[0], "test": test.score[0]}
        if self.experiment.thresholds:
            # Neither a round without a present slot nor a score of no examples stops a run.
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
        self, data: types.Examples, inputs: Inputs, state: rounds.State, needed: Array | bool
    ) -> Scores:
        """Return all scores of a state; they are arbitrary unless they are needed, [] bool."""
        sets: Sets = [(inputs.train, True), *self.held_out(inputs)]
        train, valid, test, *others = self.evaluate_each(data, inputs, state, sets, needed)
        unseen = dict(zip(inputs.unseen, others, strict=True))
        return Scores(self.pooled(train), self.by_group(inputs, valid), test, unseen)

    def held_out(self, inputs: Inputs) -> Sets:
        """Return the validation clients, the test client and the unseen, for `evaluate_each`."""
        unseen: Sets = [(each, False) for each in inputs.unseen.values()]
        return [(inputs.valid, not self.experiment.pooled), (inputs.test, False), *unseen]

    def by_group(self, inputs: Inputs, valid: evaluation.Scores) -> evaluation.Scores:
        """Return the scores of the validation groups [G] from those of the validation clients."""
        return evaluation.by_group(valid, inputs.group, self.experiment.num_groups)

    def pooled(self, scores: evaluation.Scores) -> evaluation.Scores:
        """Return the scores of all clients together, each [1]."""
        return evaluation.by_group(scores, jnp.zeros_like(scores.size), 1)

    def evaluate_each(
        self,
        data: types.Examples,
        inputs: Inputs,
        state: rounds.State,
        sets: Sets,
        needed: Array | bool = True,
    ) -> list[evaluation.Scores]:
        """Return the scores of a state on sets of shards, one for each shard of each set."""
        return evaluation.evaluate_each(
            self.algorithm(inputs),
            state,
            [
                evaluation.Set(
                    types.Federation(data, *shards), seen, isinstance(shards, SharedExamples)
                )
                for shards, seen in sets
            ],
            axis=self.axis,
            batch_size=_BATCH_ON_CPU if platforms.on_cpu() else _BATCH,
            needed=needed,
            loss=self.experiment.loss,
            score=self.experiment.score,
        )


def _first_broken(report: rounds.Report, who: Array) -> Array:
    """Return the client of the first slot that is not finite [T], -1 if all slots are finite."""
    slot = jnp.argmin(report.finite, axis=1)
    client = jnp.take_along_axis(who, slot[:, None], axis=1)[:, 0]
    return jnp.where(report.finite.all(1), -1, client)


def _first(clients: list[Array]) -> Array:
    """Return of several [T] the first that is not -1, in each round."""
    found = clients[-1]
    for each in reversed(clients[:-1]):
        found = jnp.where(each >= 0, each, found)
    return found


def _mean_metrics(reports: tuple[rounds.Report, ...]) -> dict[str, Array]:
    """Return each metric's mean over the clients that took part, weighted by size, [T].

    It is NaN in rounds in which nobody took part. If several exchanges report metrics, the index of
    the exchange precedes the names of all but the last of them.
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
