"""A cell of the grid as one compiled program: all its runs advance together, segment by segment."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments import build, devices
from experiments.config import Config
from fedjax_inv import clients, evaluation, rounds, schedules, wire
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
    group: Array  # [R, C] the group (domain) that each validation client counts for


class Chunks(NamedTuple):
    """How much of a cell's work is done at once."""

    clients: int
    runs: int


class Outcome(NamedTuple):
    """What a segment of L rounds reports of each run."""

    metrics: dict[str, Array]  # each [R, L]: the mean over the clients, weighted by size
    attended: Array  # [R, L, exchanges] int32, clients that took part
    broken: Array  # [R, L] int32, the first client that produced a NaN or infinity, -1 if none did
    valid: evaluation.Scores  # each [R, groups]
    test: evaluation.Scores  # each [R, 1]


class Program(NamedTuple):
    """The functions of a cell, compiled once for all cells of the same shapes."""

    init: Callable[[Examples, Inputs], rounds.State]  # -> states [R]
    # jitted: (data, inputs, states [R], schedule [R, L, S]) -> (states, outcome); the states are
    # donated
    segment: jax.stages.Wrapped
    # (data, inputs) -> bytes down and up of one client in each exchange of a round
    traffic: Callable[[Examples, Inputs], list[int]]


def inputs(cell: build.Cell, splits: federation.Split, seeds: tuple[int, ...]) -> Inputs:
    """What the runs of a cell work on. splits: stacked, one of each of `seeds`."""
    which = np.array([seeds.index(run.seed) for run in cell.runs])
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
    return Inputs(
        {
            name: jnp.array([run.hyper[name] for run in cell.runs], jnp.float32)
            for name in cell.runs[0].hyper
        },
        jnp.array([run.seed for run in cell.runs], jnp.int32),
        *jax.tree.map(
            lambda leaf: leaf[which],
            (
                train,
                Holdings(splits.valid.rows, splits.valid.mask),
                Holdings(splits.test.rows, splits.test.mask),
                jnp.asarray(groups(splits)),
            ),
        ),
    )


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
            together = cell.settings.get("body_every", 0) > 0
            drawn = schedules.turns(num_clients, num_rounds, together=together)
        elif 0 < config.cohort < num_clients:
            drawn = schedules.sampled(key, num_clients, config.cohort, num_rounds)
        else:
            drawn = schedules.everyone(num_clients, num_rounds)
        real = jnp.arange(num_rounds)[:, None] < config.rounds
        return drawn._replace(present=drawn.present & real)

    return jax.vmap(one)(data.seed)


def make(
    config: Config, cell: build.Cell, network: Model, num_groups: int, chunks: Chunks
) -> Program:
    """The program of a cell; it does not depend on the held-out domain."""
    mesh = devices.mesh(config)
    axis = clients.chunked(chunks.clients)
    if mesh is not None:
        axis = clients.sharded(mesh.axis_names[0], axis)

    def algorithm(data: Examples, inputs: Inputs) -> Algorithm:
        federation = {"num_players": inputs.train.rows.shape[0], "sample": sample(data)}
        return build.algorithm(config, cell, network, inputs.hyper, federation)

    def sample(data: Examples) -> Tree:
        return jax.tree.map(lambda leaf: leaf[:1], data.x)

    def over_runs(fn: Callable[..., Tree], *arguments: Tree) -> Tree:
        num_runs = jax.tree.leaves(arguments)[0].shape[0]
        if chunks.runs < num_runs:
            return jax.lax.map(lambda a: fn(*a), arguments, batch_size=chunks.runs)
        return jax.vmap(fn)(*arguments)

    def start(data: Examples, inputs: Inputs) -> rounds.State:
        key = jax.random.key(inputs.seed)
        variables = network.init(jax.random.fold_in(key, 0), sample(data))
        num_clients = inputs.train.rows.shape[0]
        return rounds.init(
            algorithm(data, inputs), variables, jax.random.fold_in(key, 1), num_clients
        )

    def advance(
        data: Examples, inputs: Inputs, state: rounds.State, cohorts: Cohort
    ) -> tuple[rounds.State, Outcome]:
        current = algorithm(data, inputs)
        state, reports = rounds.run(
            current,
            state,
            cohorts,
            Federation(data, *inputs.train),
            axis=axis,
            drop_nonfinite=config.nonfinite == "drop",
        )
        seen = cell.algorithm not in build.POOLED
        valid = evaluation.evaluate(current, state, Federation(data, *inputs.valid), seen=seen)
        test = evaluation.evaluate(current, state, Federation(data, *inputs.test), seen=False)
        outcome = Outcome(
            _mean_metrics(reports),
            jnp.stack([report.present.sum(1) for report in reports], axis=-1),
            jnp.stack([_first_broken(report, cohorts.who) for report in reports]).max(0),
            evaluation.by_group(valid, inputs.group, num_groups),
            test,
        )
        return state, outcome

    def init(data: Examples, inputs: Inputs) -> rounds.State:
        return over_runs(lambda one: start(data, one), inputs)

    def segment(
        data: Examples, inputs: Inputs, states: rounds.State, cohorts: Cohort
    ) -> tuple[rounds.State, Outcome]:
        return over_runs(lambda *one: advance(data, *one), inputs, states, cohorts)

    def traffic(data: Examples, inputs: Inputs) -> list[int]:
        first = jax.tree.map(lambda leaf: leaf[0], inputs)
        state = jax.eval_shape(start, data, first)
        federation = Federation(data, *first.train)
        exchanges = wire.traffic(algorithm(data, first), state, federation)
        return [each.down + each.up for each in exchanges]

    if mesh is not None:
        init, segment = clients.over(mesh, init), clients.over(mesh, segment)
    return Program(jax.jit(init), jax.jit(segment, donate_argnums=2), traffic)


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
