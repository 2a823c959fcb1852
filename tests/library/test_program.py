"""Many runs as one program, from arrays and without a flag, as in a notebook."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from benchmarks import hlo
from federations import assert_close, assert_equal, plain
from fedjax_inv import (
    communication,
    devices,
    evaluation,
    local,
    models,
    one_run,
    program,
    rounds,
    schedules,
    tree,
)
from fedjax_inv import inputs as inputs_of_runs
from fedjax_inv.algorithms.fedavg import fedavg
from fedjax_inv.data import federation
from fedjax_inv.data.dataset import Dataset
from fedjax_inv.devices import Layout
from fedjax_inv.inputs import Inputs, Run, combinations, group_names, groups, of_runs
from fedjax_inv.one_run import Experiment
from fedjax_inv.types import Algorithm, Array, Cohort, Federation, Model, Tree

C, K, T = 4, 3, 2  # clients, classes, rounds of a segment
SEEDS = (3, 1, 8)
DOMAINS = ("north", "east", "south", "west")
# Five, which no chunk of two divides.
RUNS = combinations(SEEDS, learning_rate=(0.3, 0.1), momentum=(0.5,))[:5]
R = len(RUNS)


def linear(num_outputs: int) -> Model:
    """A linear map of four numbers."""

    def init(key: Array, x: Array) -> Tree:
        return {"w": jax.random.normal(key, (x.shape[1], num_outputs))}

    return models.from_function(init, lambda params, x: x @ params["w"])


MODEL = linear(K)


def algorithm(hyper: Any) -> Algorithm:
    optimizer = optax.sgd(hyper["learning_rate"], momentum=hyper["momentum"])
    return fedavg(MODEL, local.epochs(optimizer, batch_size=4))


def dataset() -> Dataset:
    """Three classes in noise, and four domains."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, K, 80).astype(np.int32)
    x = (np.eye(4)[y] + 0.7 * rng.normal(size=(80, 4))).astype(np.float32)
    domain = (np.arange(80) % 4).astype(np.int32)
    return Dataset(x, y, tuple("abc"), domain, tuple(DOMAINS), np.zeros(80, bool))


@functools.cache
def world() -> tuple[Any, dict[int, federation.Split]]:
    """Return the examples and a split of each seed: two domains train, two are held out."""
    whole = dataset()
    data = federation.examples(whole.x, whole.y)

    def partition(rows: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
        """Return the rows of a small and a large client of each domain."""
        of_domains = (rows[whole.domain[rows] == domain] for domain in range(2))
        return [part for mine in of_domains for part in np.split(rng.permutation(mine), [5])]

    how: dict[str, Any] = {"held_out": "south", "validate": "west", "validation": 0.3}
    splits = {seed: federation.split(whole, data, partition, seed=seed, **how) for seed in SEEDS}
    return data, splits


def schedule(key: Array) -> Cohort:
    """Return a schedule of two segments: three clients a round, some of which drop out."""
    drop = jax.random.fold_in(key, 0)
    return schedules.dropout(schedules.sampled(key, C, 3, 2 * T), drop, 0.2)


EXPERIMENT = Experiment(MODEL, algorithm, num_groups=2, thresholds=(2.0, -1.0))


@functools.cache
def inputs() -> Inputs:
    """Return inputs of which all examples are watched; the first threshold is met in round T."""
    return of_runs(
        RUNS,
        world()[1],
        watch_examples=1000,
        warm_start=lambda sizes: T + 0 * sizes.sum(),
        num_classes=K,
    )


@functools.cache
def cohorts() -> Cohort:
    """Return the cohorts of all runs and both segments."""
    return plain(inputs_of_runs.cohorts(schedule, inputs()))


def segment(index: int) -> Cohort:
    return jax.tree.map(lambda a: a[:, index * T : (index + 1) * T], cohorts())


def trained(compiled: program.Program, inputs: Inputs) -> list[Tree]:
    """Return the training and the outcome after each of two segments, on the host."""
    data, results = world()[0], []
    training = compiled.init(data, inputs)
    for index in range(2):
        training, outcome = compiled.segment(data, inputs, training, segment(index))
        results.append(plain((training, outcome)))
    return results


@functools.cache
def compiled() -> program.Program:
    return program.Program(EXPERIMENT)


@functools.cache
def result() -> list[Tree]:
    return trained(compiled(), inputs())


def federation_of(shards: devices.ClientShards, run: int) -> Federation:
    return Federation(world()[0], *(leaf[run] for leaf in shards))


def test_devices_that_share_runs_send_nothing() -> None:
    """Four devices have two, one, one and one of the five runs, and then the last one again."""
    layout = Layout(devices.mesh((4, 1), jax.devices()), num_runs=R)
    compiled = program.Program(EXPERIMENT, run_chunk=1, layout=layout)
    data, placed = layout.place(world()[0], inputs())
    training = compiled.init(data, placed)
    arguments = data, placed, training, segment(0)
    for lowered in (
        compiled.jitted.rounds.lower(*arguments),
        compiled.jitted.evaluate.lower(*arguments[:3]),
    ):
        assert hlo.collectives(hlo.Program(lowered.compile().as_text() or "")) == []
    training, outcome = compiled.segment(*arguments)
    assert_close(
        plain((compiled.stored(placed, training), compiled.gathered(outcome))), result()[0]
    )


def test_devices_that_share_clients_give_what_one_gives() -> None:
    """Two devices for the runs, two for the clients of each, with their own examples alone."""
    layout = Layout(devices.mesh((2, 2), jax.devices()), own=True, num_runs=R)
    compiled = program.Program(EXPERIMENT, layout=layout)
    data, placed = layout.place(world()[0], inputs())
    assert data.x.shape[1] < len(world()[0].x)
    arguments = data, placed, compiled.init(data, placed), segment(0)
    assert hlo.collectives(
        hlo.Program(compiled.jitted.rounds.lower(*arguments).compile().as_text() or "")
    )
    training, outcome = compiled.segment(*arguments)
    assert_close(
        plain((compiled.stored(placed, training), compiled.gathered(outcome))), result()[0]
    )


def test_a_grid_goes_seed_by_seed_through_every_combination() -> None:
    runs = combinations((5, 6), a=(1.0, 2.0), b=(3.0,))
    assert runs == [Run(seed, {"a": a, "b": 3.0}) for a in (1.0, 2.0) for seed in (5, 6)]
    assert combinations((5,)) == [Run(5, {})]


def test_every_run_is_what_it_is_alone() -> None:
    """`rounds.run` and `evaluation.evaluate`, with the run's own inputs, give the same."""
    data, splits = world()
    start = plain(compiled().init(data, inputs()))

    @jax.jit
    def alone(hyper: Tree, state: rounds.State, cohorts: Cohort, everybody: Tree) -> Tree:
        train, valid, test, unseen = everybody
        state, reports = rounds.run(algorithm(hyper), state, cohorts, train, axis=devices.vmapped())
        scores = [
            evaluation.evaluate(algorithm(hyper), state, examples, seen=seen)
            for examples, seen in ((train, True), (valid, True), (test, False), (unseen, False))
        ]
        return state, reports, scores

    for index, run in enumerate(RUNS):
        split = splits[run.seed]
        state, mine = tree.take(start.state, index), tree.take(cohorts(), index)
        state = state._replace(key=jax.random.wrap_key_data(state.key))
        everybody = *split[:3], split.unseen["unseen_domain"]
        state, (report,), scores = plain(alone(run.hyper, state, mine, everybody))
        training, outcome = tree.take(result()[-1], index)
        assert_close(training.state, state)
        # Means over the clients that took part, weighted by their examples.
        weights = (report.size * report.present)[T:]
        total = np.where(weights > 0, report.metrics["loss"][T:] * weights, 0).sum(1)
        expected = [t / w if w else np.nan for t, w in zip(total, weights.sum(1), strict=True)]
        np.testing.assert_allclose(outcome.metrics["loss"], expected, rtol=1e-4)
        assert_equal(outcome.attended[:, 0], report.present[T:].sum(1).astype(np.int32))
        train, valid, test, unseen = scores
        assert_close(outcome.test, test)
        assert_close(outcome.unseen, {"unseen_domain": unseen})
        for group in range(2):
            among = split.domain == group
            size = valid.size[among]
            assert outcome.valid.size[group] == size.sum()
            for of_group, each in zip(outcome.valid[:2], valid[:2], strict=True):
                mean = (each[among] * size).sum() / size.sum()
                np.testing.assert_allclose(of_group[group], mean, rtol=1e-4)
        mean = (train.score * train.size).sum() / train.size.sum()
        np.testing.assert_allclose(outcome.watched["train"][-1], mean, rtol=1e-4)
        np.testing.assert_allclose(outcome.watched["test"][-1], test.score[0], rtol=1e-4)
        y = np.asarray(data.y)
        logits = np.asarray(data.x) @ np.asarray(state.server.variables.params.head["w"])
        hits = logits.argmax(1) == y
        of_test = federation.parts_of(split.test)[0]
        classes = [of_test[y[of_test] == label] for label in range(K)]
        shards = federation.parts_of(federation.test_shards(split, K, run.seed))
        assert set(np.concatenate(shards)) <= set(of_test)
        for of_parts, parts in zip(outcome.detailed, (classes, shards), strict=True):
            assert of_parts.size.tolist() == [len(rows) for rows in parts]
            np.testing.assert_allclose(
                of_parts.score, [hits[rows].mean() for rows in parts], rtol=1e-5
            )


def halving(round: Array) -> Array:
    """Return the factor of a rate in a round."""
    return 0.5 ** round.astype(jnp.float32)


@pytest.mark.slow
def test_a_scheduled_rate_is_that_of_its_round() -> None:
    """The same as rounds run one by one, each with its rate as an input."""
    data, changed = world()[0], inputs()._replace(watched=None, detailed=None)
    bare = dataclasses.replace(EXPERIMENT, thresholds=())
    scheduled = program.Program(dataclasses.replace(bare, schedules={"learning_rate": halving}))
    whole = trained(scheduled, changed)[-1][0].state.server
    compiled = program.Program(bare)
    training = compiled.init(data, changed)
    for t in range(2 * T):
        rates = changed.hyper["learning_rate"] * 0.5**t
        at_t = changed._replace(hyper=changed.hyper | {"learning_rate": rates})
        cohort = jax.tree.map(lambda a, t=t: a[:, t : t + 1], cohorts())
        training, _ = compiled.segment(data, at_t, training, cohort)
    assert_equal(whole, plain(training.state.server))
    (moved,) = jax.tree.leaves(whole.variables.params)
    (constant,) = jax.tree.leaves(result()[-1][0].state.server.variables.params)
    assert not np.allclose(moved, constant, atol=1e-3)


def test_metrics_of_several_exchanges_have_their_index_except_for_the_last() -> None:
    present = jnp.array([[True, False, True], [False, False, False]])
    size = jnp.array([[1, 5, 3]] * 2)

    def report(**metrics: Array) -> rounds.Report:
        return rounds.Report(metrics, present, present, size, communication.Traffic(0, 0))

    values = jnp.array([[2.0, jnp.nan, 6.0]] * 2)
    expected = np.array([(1 * 2 + 3 * 6) / 4, np.nan], np.float32)
    reports = report(a=values), report(a=values, b=values), report(a=values), report()
    means = one_run._mean_metrics(reports)
    assert_equal(means, dict.fromkeys({"0.a", "1.a", "1.b", "a"}, expected))


@pytest.mark.slow
def test_in_chunks_and_ended_at_the_stop() -> None:
    """Two runs at a time, two clients at a time; a run stays as it was at its stop."""
    experiment = dataclasses.replace(EXPERIMENT, thresholds=(2.0,), end_at_stop=True)
    compiled = program.Program(experiment, client_chunk=2, run_chunk=2)
    (ended, at_stop), (after, later) = trained(compiled, inputs())
    # Until the stop, both programs give the same.
    training, expected = result()[0]
    assert_close(ended.state, training.state)
    only = jax.tree.map(lambda a: a[:, :1], expected.stops)
    assert_close(at_stop, expected._replace(stops=only))
    assert expected.attended.any()
    assert not later.attended.any()
    assert np.isnan(later.metrics["loss"]).all()
    assert_equal(after.state._replace(round=ended.state.round), ended.state)
    assert_equal(
        (later.valid, later.test, later.stops), (at_stop.valid, at_stop.test, at_stop.stops)
    )


def test_a_stop_has_the_scores_of_its_round() -> None:
    (_, at_stop), (_, after) = result()
    # The first threshold is met as soon as T rounds are played, the second never.
    assert_equal(at_stop.stops.round, np.tile(np.int32([T, 0]), (R, 1)))
    assert_equal(after.stops, at_stop.stops)
    met, unmet = (jax.tree.map(lambda a, i=i: a[:, i], at_stop.stops.scores) for i in range(2))
    assert_close((met.valid, met.test), (at_stop.valid, at_stop.test))
    assert_close(met.train.score[:, 0], at_stop.watched["train"][:, -1])
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(unmet))


def test_a_run_that_breaks_is_reported_and_leaves_the_others_alone() -> None:
    broken = 2
    rates = inputs().hyper["learning_rate"].at[broken].set(jnp.nan)
    changed = inputs()._replace(hyper={**inputs().hyper, "learning_rate": rates})
    got = trained(compiled(), changed)
    others = np.arange(R) != broken
    for one, expected in zip(got, result(), strict=True):
        assert_equal(*(jax.tree.map(lambda a: a[others], each) for each in (one, expected)))
    first = cohorts().who[broken, 0][np.argmax(cohorts().present[broken, 0])]
    assert got[0][1].broken[broken, 0] == first
    assert np.isnan(got[0][1].metrics["loss"][broken, 1])
    # It is dropped on demand only.
    assert np.isnan(got[0][0].state.server.variables.params.head["w"][broken]).all()


def test_traffic_is_that_of_a_run() -> None:
    data, splits = world()
    state = jax.tree.map(lambda leaf: leaf[0], compiled().init(data, inputs()).state)
    (exchange,) = rounds.traffic(algorithm(RUNS[0].hyper), state, splits[RUNS[0].seed].train)
    arguments = data, inputs(), jax.eval_shape(compiled().jitted.init, data, inputs()), segment(0)
    _, played = jax.eval_shape(compiled().jitted.rounds, *arguments)
    assert played.traffic == (exchange,)


def test_watched_examples_are_the_first_of_every_client() -> None:
    splits, count = world()[1], 7
    watched = of_runs(RUNS, splits, watch_examples=count).watched
    for index, run in enumerate(RUNS):
        split = splits[run.seed]
        for watched_part, whole in ((watched.train, split.train), (watched.test, split.test)):
            total = int(whole.size.sum())
            parts = federation.parts_of(federation_of(watched_part, index))
            for part, mine in zip(parts, federation.parts_of(whole), strict=True):
                np.testing.assert_array_equal(part, mine[: len(part)])
                share = min(1, count / total) * len(mine)
                assert share - 1e-4 <= len(part) < share + 1
    assert of_runs(RUNS, splits).watched is None


def test_groups_are_domains_or_everybody() -> None:
    _, splits = world()
    split = splits[SEEDS[0]]
    assert group_names([split]) == ["north", "east"]
    # Of several splits, the groups of all together.
    few = split._replace(domain=np.array([2, 2]), domains=("a", "b", "north", "c", "east"))
    more = few._replace(domain=np.array([4, 2]))
    assert group_names([few]) == ["north"]
    assert group_names([few, more]) == ["north", "east"]
    assert group_names([few, few._replace(domain=np.array([-1, 2]))]) == ["clients"]
    np.testing.assert_array_equal(groups(np.array([[4, 2], [2, 4]])), [[1, 0], [0, 1]])
    np.testing.assert_array_equal(groups(np.array([[4, 2], [-1, 4]])), np.zeros((2, 2)))
    assert group_names([split._replace(domain=np.array([0, -1]))]) == ["clients"]
