"""A cell of the grid as one compiled program: all its runs advance together, segment by segment."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments import build, devices
from experiments.config import Config
from fedjax_inv import clients, evaluation, rounds, schedules, stopping, wire
from fedjax_inv.data import federation
from fedjax_inv.types import Algorithm, Array, Cohort, Examples, Federation, Model, Tree


class Holdings(NamedTuple):
    """A federation without its examples, which all runs share."""

    rows: Array  # [R, C, N]
    mask: Array  # [R, C, N]


class Inputs(NamedTuple):
    """What differs between the R runs of a cell."""

    hyper: dict[str, Array]  # each [R]
    seed: Array  # [R]
    train: Holdings
    valid: Holdings
    test: Holdings
    watched: Holdings  # the training examples whose accuracy is taken in every round
    watched_test: Holdings
    group: Array  # [R, C] the group (domain) that each validation client counts for


class Chunks(NamedTuple):
    """How much of a cell's work is done at once."""

    clients: int
    runs: int


class Scores(NamedTuple):
    """How a state serves the training, the validation and the test examples."""

    train: evaluation.Scores  # each [1]: all clients pooled
    valid: evaluation.Scores  # each [groups]
    test: evaluation.Scores  # each [1]


class Training(NamedTuple):
    """All that a run carries from segment to segment."""

    state: rounds.State
    stops: stopping.Stops  # of the thresholds of --stop_below, with `Scores`


class Outcome(NamedTuple):
    """What a segment of L rounds reports of each run."""

    metrics: dict[str, Array]  # each [R, L]: the mean over the clients, weighted by size
    attended: Array  # [R, L, exchanges] int32, clients that took part
    broken: Array  # [R, L] int32, the first client that produced a NaN or infinity, -1 if none did
    watched: dict[str, Array]  # train and test: accuracy after every round [R, L]; or empty
    valid: evaluation.Scores  # each [R, groups]
    test: evaluation.Scores  # each [R, 1]
    stops: stopping.Stops


class Program(NamedTuple):
    """The functions of a cell, compiled once for all cells of the same shapes."""

    init: Callable[[Examples, Inputs], Training]  # -> states [R]
    # jitted: (data, inputs, states [R], schedule [R, L, S]) -> (states, outcome); the states are
    # donated
    segment: jax.stages.Wrapped
    # (data, inputs) -> bytes down and up of one client in each exchange of a round
    traffic: Callable[[Examples, Inputs], list[int]]


def inputs(config: Config, cell: build.Cell, splits: federation.Split) -> Inputs:
    """What the runs of a cell work on. splits: stacked, one of each of --seeds."""
    which = np.array([config.seeds.index(run.seed) for run in cell.runs])
    if cell.algorithm in build.POOLED:
        singles = [
            federation.pooled(Federation(splits.train.data, rows, mask))
            for rows, mask in zip(splits.train.rows, splits.train.mask, strict=True)
        ]
        train = Holdings(
            jnp.stack([single.rows for single in singles]),
            jnp.stack([single.mask for single in singles]),
        )
    else:
        train = Holdings(splits.train.rows, splits.train.mask)
    test = Holdings(splits.test.rows, splits.test.mask)
    valid = Holdings(splits.valid.rows, splits.valid.mask)
    of_seeds = Inputs(
        hyper={},
        seed=jnp.array(config.seeds, jnp.int32),
        train=train,
        valid=valid,
        test=test,
        watched=_some(train, config.watch_examples),
        watched_test=_some(test, config.watch_examples),
        group=jnp.asarray(groups(splits)),
    )
    hyper = {
        name: jnp.array([run.hyper[name] for run in cell.runs], jnp.float32)
        for name in cell.runs[0].hyper
    }
    return jax.tree.map(lambda leaf: leaf[which], of_seeds)._replace(hyper=hyper)


def _some(held: Holdings, count: int) -> Holdings:
    """About `count` of the examples of each run, evenly from all over every client."""
    size = held.mask.sum(2, keepdims=True)  # [R, C, 1]; real rows come first
    share = jnp.minimum(1.0, count / size.sum(1, keepdims=True))
    keep = jnp.ceil(share * size).astype(jnp.int32)
    index = jnp.arange(max(1, int(keep.max())))
    positions = (index * (size / jnp.maximum(keep, 1))).astype(jnp.int32)
    positions = jnp.minimum(positions, held.rows.shape[2] - 1)
    return Holdings(jnp.take_along_axis(held.rows, positions, axis=2), index < keep)


def groups(splits: federation.Split) -> np.ndarray:
    """[seeds, C] the validation group of each client: its domain, numbered without the held-out
    one; 0 for all where clients hold several domains."""
    if (splits.domain < 0).any():
        return np.zeros_like(splits.domain)
    return np.searchsorted(np.unique(splits.domain), splits.domain)


def group_names(splits: federation.Split) -> list[str]:
    """The names of the validation groups."""
    if (splits.domain < 0).any():
        return ["clients"]
    return [splits.domains[index] for index in np.unique(splits.domain)]


def schedule(config: Config, cell: build.Cell, data: Inputs, num_rounds: int) -> Cohort:
    """Who attends: [R, T, S], T = num_rounds. Nobody does from round --rounds on."""
    num_clients = data.train.rows.shape[1]

    def one(seed: Array) -> Cohort:
        key = jax.random.fold_in(jax.random.key(seed), 2)
        if config.play == "sequential":
            together = cell.settings.get("learned", False)
            drawn = schedules.turns(num_clients, num_rounds, together=together)
        elif 0 < config.cohort < num_clients:
            drawn = schedules.sampled(key, num_clients, config.cohort, num_rounds)
        else:
            drawn = schedules.everyone(num_clients, num_rounds)
        real = jnp.arange(num_rounds)[:, None] < config.rounds
        return drawn._replace(present=drawn.present & real)

    return jax.vmap(one)(data.seed)


def warm_start(config: Config, cell: build.Cell, inputs: Inputs) -> int | Array:
    """The rounds before a stop; where the flag does not say, those of FL Games, Section D.2: one of
    each player, or with a learned representation one for each batch of the largest client."""
    if config.warm_start >= 0:
        return config.warm_start
    if not cell.settings.get("learned", False):
        return inputs.train.rows.shape[0]
    num_examples = inputs.train.mask.sum(1).max()
    return -(-num_examples // (config.batch_size or num_examples))


class _Runs(NamedTuple):
    """What the runs of a cell do, each for one run: its inputs have no leading R."""

    config: Config
    cell: build.Cell
    network: Model
    num_groups: int
    axis: clients.Axis

    def algorithm(self, data: Examples, inputs: Inputs) -> Algorithm:
        num_clients = inputs.train.rows.shape[0]
        return build.algorithm(
            self.config, self.cell, self.network, inputs.hyper, num_clients, _sample(data)
        )

    def start(self, data: Examples, inputs: Inputs) -> Training:
        key = jax.random.key(inputs.seed)
        variables = self.network.init(jax.random.fold_in(key, 0), _sample(data))
        state = rounds.init(
            self.algorithm(data, inputs),
            variables,
            jax.random.fold_in(key, 1),
            inputs.train.rows.shape[0],
        )
        shapes = jax.eval_shape(self.scores, data, inputs, state, True)
        return Training(state, stopping.init(len(self.config.stop_below), shapes))

    def advance(
        self, data: Examples, inputs: Inputs, training: Training, cohorts: Cohort
    ) -> tuple[Training, Outcome]:
        """A segment of rounds, then an evaluation."""

        def one(training: Training, cohort: Cohort) -> tuple[Training, Tree]:
            state, stops = training
            if self.config.after_stop == "end":
                cohort = cohort._replace(present=cohort.present & ~stopping.all_met(stops))
            state, reports = rounds.step(
                self.algorithm(data, inputs),
                state,
                cohort,
                Federation(data, *inputs.train),
                axis=self.axis,
                drop_nonfinite=self.config.nonfinite == "drop",
            )
            training, watched = self.watch(data, inputs, Training(state, stops))
            return training, (reports, watched)

        training, (reports, watched) = jax.lax.scan(one, training, cohorts)
        outcome = Outcome(
            _mean_metrics(reports),
            jnp.stack([report.present.sum(1) for report in reports], axis=-1),
            jnp.stack([_first_broken(report, cohorts.who) for report in reports]).max(0),
            watched,
            *self.held_out(data, inputs, training.state, True),
            training.stops,
        )
        return training, outcome

    def watch(
        self, data: Examples, inputs: Inputs, training: Training
    ) -> tuple[Training, dict[str, Array]]:
        """The accuracies after a round, and the stops that they cause."""
        config, (state, stops) = self.config, training
        if not config.watch_examples:
            return training, {}
        train = self.evaluate(data, inputs, state, inputs.watched, seen=True)
        test = self.evaluate(data, inputs, state, inputs.watched_test, seen=False)
        accuracy = {"train": _pooled(train).accuracy[0], "test": test.accuracy[0]}
        if config.stop_below:
            # Neither the rounds that fill up the last segment nor an accuracy of nothing stop.
            counts = (state.round <= config.rounds) & (train.size.sum() > 0)
            stops = stopping.update(
                stops,
                jnp.where(counts, accuracy["train"], jnp.nan),
                thresholds=jnp.array(config.stop_below, jnp.float32),
                num_rounds=state.round,
                warm_start=warm_start(config, self.cell, inputs),
                measure=lambda needed: self.scores(data, inputs, state, needed),
            )
        return Training(state, stops), accuracy

    def scores(
        self, data: Examples, inputs: Inputs, state: rounds.State, needed: Array | bool
    ) -> Scores:
        train = self.evaluate(data, inputs, state, inputs.train, True, needed)
        return Scores(_pooled(train), *self.held_out(data, inputs, state, needed))

    def held_out(
        self, data: Examples, inputs: Inputs, state: rounds.State, needed: Array | bool
    ) -> tuple[evaluation.Scores, evaluation.Scores]:
        """Of the validation groups and of the test client."""
        seen = self.cell.algorithm not in build.POOLED
        valid = self.evaluate(data, inputs, state, inputs.valid, seen, needed)
        test = self.evaluate(data, inputs, state, inputs.test, False, needed)
        return evaluation.by_group(valid, inputs.group, self.num_groups), test

    def evaluate(
        self,
        data: Examples,
        inputs: Inputs,
        state: rounds.State,
        held: Holdings,
        seen: bool,
        needed: Array | bool = True,
    ) -> evaluation.Scores:
        return evaluation.evaluate(
            self.algorithm(data, inputs), state, Federation(data, *held), seen=seen, needed=needed
        )

    def traffic(self, data: Examples, inputs: Inputs) -> list[int]:
        """Bytes down and up of one client in each exchange of a round."""
        state = jax.eval_shape(self.start, data, inputs).state
        federation = Federation(data, *inputs.train)
        exchanges = wire.traffic(self.algorithm(data, inputs), state, federation)
        return [each.down + each.up for each in exchanges]


def make(
    config: Config, cell: build.Cell, network: Model, num_groups: int, chunks: Chunks
) -> Program:
    """The program of a cell; it does not depend on the held-out domain."""
    mesh = devices.mesh(config)
    axis = clients.chunked(chunks.clients)
    if mesh is not None:
        axis = clients.sharded(mesh.axis_names[0], axis)
    runs = _Runs(config, cell, network, num_groups, axis)

    def init(data: Examples, inputs: Inputs) -> Training:
        return _over_runs(lambda one: runs.start(data, one), chunks.runs, inputs)

    def segment(
        data: Examples, inputs: Inputs, states: Training, cohorts: Cohort
    ) -> tuple[Training, Outcome]:
        return _over_runs(
            lambda *one: runs.advance(data, *one), chunks.runs, inputs, states, cohorts
        )

    def traffic(data: Examples, inputs: Inputs) -> list[int]:
        return runs.traffic(data, jax.tree.map(lambda leaf: leaf[0], inputs))

    if mesh is not None:
        init, segment = clients.over(mesh, init), clients.over(mesh, segment)
    return Program(jax.jit(init), jax.jit(segment, donate_argnums=2), traffic)


def _over_runs(fn: Callable[..., Tree], at_once: int, *arguments: Tree) -> Tree:
    """`fn` of each of R runs, `at_once` or nearly so many at a time; arguments [R, ...]."""
    num_runs = jax.tree.leaves(arguments)[0].shape[0]
    count = -(-num_runs // at_once)
    if count == 1:
        return jax.vmap(fn)(*arguments)
    size = -(-num_runs // count)

    # Not the batch_size of lax.map, which fails on arrays without elements.
    def chunked(array: Array) -> Array:
        whole = jnp.concatenate([array, array[: count * size - num_runs]])
        return whole.reshape(count, size, *array.shape[1:])

    results = jax.lax.map(lambda chunk: jax.vmap(fn)(*chunk), jax.tree.map(chunked, arguments))
    return jax.tree.map(lambda a: a.reshape(count * size, *a.shape[2:])[:num_runs], results)


def _sample(data: Examples) -> Tree:
    return jax.tree.map(lambda leaf: leaf[:1], data.x)


def _pooled(scores: evaluation.Scores) -> evaluation.Scores:
    return evaluation.by_group(scores, jnp.zeros_like(scores.size), 1)


def _first_broken(report: rounds.Report, who: Array) -> Array:
    """[L] the client of the first slot that is not finite, -1 where all are."""
    slot = jnp.argmin(report.finite, axis=1)
    client = jnp.take_along_axis(who, slot[:, None], axis=1)[:, 0]
    return jnp.where(report.finite.all(1), -1, client)


def _mean_metrics(reports: tuple[rounds.Report, ...]) -> dict[str, Array]:
    """Every metric's mean over the clients that took part, weighted by size; [L] each, NaN where
    nobody did.

    Of several exchanges, all but the last put their number before the name.
    """
    means = {}
    for index, report in enumerate(reports):
        weights = report.size * report.present
        prefix = "" if index == len(reports) - 1 else f"{index}."
        for name, values in report.metrics.items():
            total = (jnp.where(report.present, values, 0) * weights).sum(1)
            means[prefix + name] = total / weights.sum(1)
    return means
