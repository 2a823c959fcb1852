"""The predictions of finished runs: outputs by domain and client, their scores and metrics."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from fedjax_inv import program
from fedjax_inv.checks import UsageError
from fedjax_inv.data.federation import parts_of
from fedjax_inv.types import Algorithm, Tree
from fedjax_inv_experiments.experiment import config
from fedjax_inv_experiments.experiment.assemble import Assembled
from fedjax_inv_experiments.parts import metrics
from fedjax_inv_experiments.parts.metrics import Predictions
from fedjax_inv_experiments.parts.objective import Task
from fedjax_inv_experiments.reporting import finished, report
from fedjax_inv_experiments.reporting.finished import OneRun, Runs
from fedjax_inv_experiments.running import divergence, summary

_BATCH = 256

# (a client's state, x [M, ...]) -> outputs [M, K]
Predict = Callable[[Tree, Tree], np.ndarray]


class Part(NamedTuple):
    """M examples of one domain, split and client."""

    domain: str
    split: str
    client: int  # -1: a new client
    rows: np.ndarray  # [M] in the data set
    x: Tree  # [M, ...] the network's inputs
    y: np.ndarray  # [M, ...] targets


class Predicted(NamedTuple):
    """The predictions of a run for all parts that have examples."""

    seed: int
    round: int
    parts: list[Part]
    outputs: list[np.ndarray]  # [M, K] of each part
    # (client, the outputs of its own network for all examples of new clients), of other data
    by_client: list[tuple[int, np.ndarray]]


class Scores(NamedTuple):
    """The scores of the predictions for M examples."""

    examples: int
    score: float
    loss: float  # mean


class DomainScores(msgspec.Struct, frozen=True, omit_defaults=True):
    """The scores of the predictions for the examples of a domain."""

    split: str
    examples: int
    score: float
    loss: float
    metrics: dict[str, float | None] = {}  # None: not defined


class ClientScores(msgspec.Struct, frozen=True, omit_defaults=True):
    """A client's scores on its own examples, or those of its own network on all examples."""

    client: int
    domain: str
    examples: int
    score: float
    loss: float
    metrics: dict[str, float | None] = {}


def own_parts(runs: Runs, seed: int) -> list[Part]:
    """The validation examples of each client, and the test examples, as in training."""
    assembled = runs.data
    splits = assembled.splits[runs.cell.held_out]
    split, names = splits[seed], program.group_names([*splits.values()])
    of_seeds = program.groups(np.stack([each.domain for each in splits.values()]))
    group = of_seeds[[*splits].index(seed)]
    data = jax.tree.map(np.asarray, assembled.data)

    def part(domain: str, kind: str, client: int, rows: np.ndarray) -> Part:
        x = jax.tree.map(lambda a: a[rows], data.x)
        return Part(domain, kind, client, assembled.source[rows], x, data.y[rows])

    (test,) = parts_of(split.test)
    clients = enumerate(parts_of(split.valid))
    parts = [part(names[group[who]], "validation", who, rows) for who, rows in clients]
    return [*parts, part(summary.test_name(runs.cell, names), "test", -1, test)]


def predictor(algorithm: Algorithm, server: Tree) -> Predict:
    """The outputs of a server's networks, in batches that are compiled once."""
    outputs = jax.jit(algorithm.predict)

    def predict(own: Tree, x: Tree) -> np.ndarray:
        size = len(jax.tree.leaves(x)[0])
        rows = np.resize(np.arange(size), -(-size // _BATCH) * _BATCH).reshape(-1, _BATCH)
        parts = [outputs(server, own, jax.tree.map(lambda a, b=batch: a[b], x)) for batch in rows]
        found = np.concatenate(parts)[:size]
        # A network of one's own may return [M] for a single value.
        return found[:, None] if found.ndim == 1 else found

    return predict


def predicted(
    one: OneRun,
    algorithm: Algorithm,
    parts: Sequence[Part],
    *,
    is_new: bool = False,
) -> Predicted:
    """The predictions of a run.

    is_new: whether the parts are of other data, for which each client's own network predicts, too.
    """
    server, clients, _ = one.served()
    unseen = finished.unseen(algorithm, server)
    predict = predictor(algorithm, server)

    def own(client: int) -> Tree:
        """The state of a client."""
        if not algorithm.personal or client < 0:
            return unseen
        return jax.tree.map(lambda leaf: leaf[client], clients)

    parts = [part for part in parts if len(part.y)]
    outputs = [predict(own(part.client), part.x) for part in parts]
    by_client = []
    if algorithm.personal and is_new:
        for client in range(len(jax.tree.leaves(clients)[0])):
            out = np.concatenate([predict(own(client), part.x) for part in parts])
            by_client.append((client, out))
    return Predicted(one.run.seed, one.line().played, parts, outputs, by_client)


@functools.cache  # or every run would compile it anew
def scorer(task: Task) -> Callable[[np.ndarray, np.ndarray], Scores]:
    """A function from outputs [M, K] and targets [M, ...] to their scores, M above 0."""

    def of_one(outputs: Any, y: Any) -> tuple[Any, Any]:
        arguments = outputs[None], y[None], jnp.ones(1, bool)
        return task.score.function(*arguments), task.loss(*arguments)

    of_batch = jax.jit(jax.vmap(of_one))

    def scores(outputs: np.ndarray, y: np.ndarray) -> Scores:
        # In batches of one size, as each size would be compiled anew.
        rows = np.resize(np.arange(len(y)), -(-len(y) // _BATCH) * _BATCH).reshape(-1, _BATCH)
        each = [np.stack(of_batch(outputs[batch], y[batch])) for batch in rows]
        mean = np.concatenate(each, 1)[:, : len(y)].mean(1, dtype=np.float64)
        return Scores(len(y), float(mean[0]), float(mean[1]))

    return scores


def by_domain(
    of: Predicted, task: Task, asked: Collection[str] = ()
) -> tuple[dict[str, DomainScores], list[ClientScores]]:
    """The scores by domain, and by client. asked: names of metrics."""
    scores = scorer(task)

    def measured(outputs: np.ndarray, y: np.ndarray) -> tuple[Any, ...]:
        found = metrics.values(asked, Predictions(task.kind, y, outputs))
        return *scores(outputs, y), found

    domains, clients = {}, []
    for name, split in dict.fromkeys((part.domain, part.split) for part in of.parts):
        mine = [i for i, part in enumerate(of.parts) if (part.domain, part.split) == (name, split)]
        y = np.concatenate([of.parts[i].y for i in mine])
        outputs = np.concatenate([of.outputs[i] for i in mine])
        domains[name] = DomainScores(split, *measured(outputs, y))
    for part, outputs in zip(of.parts, of.outputs, strict=True):
        if part.client >= 0:
            clients.append(ClientScores(part.client, part.domain, *measured(outputs, part.y)))
    for client, outputs in of.by_client:
        _, y = of_new_clients(of)
        clients.append(ClientScores(client, "all", *measured(outputs, y)))
    return domains, clients


def of_new_clients(of: Predicted) -> tuple[np.ndarray, np.ndarray]:
    """The outputs and the targets of the examples that no client holds."""
    new = [i for i, part in enumerate(of.parts) if part.client < 0]
    return (
        np.concatenate([of.outputs[i] for i in new]),
        np.concatenate([of.parts[i].y for i in new]),
    )


def metric_text(name: str, entries: Iterable[DomainScores | ClientScores]) -> str:
    """A metric over the seeds in which it is defined, as text; "" if there are none."""
    values = [entry.metrics[name] for entry in entries]
    known = [value for value in values if value is not None]
    return report.spread(known, ".4g") if known else ""


def of_folder(folder: Path, assembled: Assembled) -> Runs:
    """The finished runs of a cell in its folder.

    assembled: the experiment, whose data are not read again if they are of all seeds.
    """
    chosen = assembled.config
    runs = finished.open("run_dir", folder, named=chosen.outside, data_dir=chosen.data.data_dir)
    # The rule of this command, which may differ from that in training.
    runs = dataclasses.replace(
        runs, config=config.changed(runs.config, select=chosen.watching.select)
    )
    if set(chosen.run.seeds) <= set(assembled.splits.get(runs.cell.held_out, ())):
        return dataclasses.replace(runs, known_data=assembled)
    return runs


def chosen(runs: Runs) -> list[int]:
    """The runs with the selected hyperparameters, one of each seed.

    Where --select finds none, they are selected by validation. Raises UsageError if every setting
    has a seed that diverged.
    """
    rule = runs.config.watching.select
    picked = report.choose("", runs.result, rule) or report.choose("", runs.result)
    if picked is None:
        text = f"{divergence.text(runs.result.runs)}; a setting with a diverged seed is not chosen"
        raise UsageError(runs.where, ..., text)
    return picked.indices
