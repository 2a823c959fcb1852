"""The predictions of finished runs: outputs by domain and client, their scores and metrics."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

from fedjax_inv import program
from fedjax_inv.checks import UsageError
from fedjax_inv.data.dataset import Dataset
from fedjax_inv.data.federation import parts_of
from fedjax_inv.types import Algorithm, Tree

from .. import selection
from ..experiment import config
from ..experiment.assemble import Assembled
from ..parts import metrics
from ..parts.metrics import Predictions
from ..parts.objective import ACCURACY, Measure, Task
from ..reporting import finished
from ..reporting.finished import OneRun, Runs
from ..running import divergence, summary

_BATCH = 256

# What a column of the targets is called, and the score of one, by the kind of targets.
COLUMNS = {
    "classes": ("class", ACCURACY),
    "labels": ("label", ACCURACY),
    "values": ("value", Measure("absolute error", higher_is_better=False, is_share=False)),
}


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


def new_parts(where: str, new: Dataset, old: Dataset) -> list[Part]:
    """The parts of other data, one for each domain.

    Raises UsageError for inputs of another shape, and for classes that the run does not know.
    """
    if old.words or new.words:
        raise UsageError(where, ..., "must not be text, whose words every run numbers anew")
    if new.render is not None:
        raise UsageError(where, ..., "must be stored as it is seen")
    sample = jax.tree.map(lambda leaf: leaf[:1], old.x)
    seen = jax.eval_shape(old.render, sample) if old.render else sample
    here, there = (jax.tree.map(lambda leaf: list(leaf.shape[1:]), x) for x in (new.x, seen))
    if here != there:
        raise UsageError(where, ..., f"has inputs {here}, must have {there}, as the run")
    y = _known_targets(where, new, old)
    groups = [(name, new.domain == index) for index, name in enumerate(new.domains)]

    def of_rows(rows: np.ndarray) -> Tree:
        return jax.tree.map(lambda leaf: leaf[rows], new.x)

    return [
        Part(name, "new", -1, np.flatnonzero(rows), of_rows(rows), y[rows])
        for name, rows in groups
        if rows.any()
    ]


def _known_targets(where: str, new: Dataset, old: Dataset) -> np.ndarray:
    """The targets of other data, with classes numbered as in the run's data."""
    if new.task != old.task:
        raise UsageError(where, ..., f"has {new.task}, must have {old.task}, as the run")
    if new.task != "classes":
        if new.classes != old.classes:
            names = (", ".join(each.classes) for each in (new, old))
            text = "has the columns {}, must have {}, as the run".format(*names)
            raise UsageError(where, ..., text)
        return new.y
    # Classes are matched by name; or by number, unless the run's names are numbers themselves.
    known = dict(zip(old.classes, range(len(old.classes)), strict=True))
    allowed = f"those of the run, {', '.join(old.classes)}"
    if not any(name.isdecimal() for name in old.classes):
        allowed += ", or their numbers from 0"
        if not set(new.classes) <= set(known):
            known = {str(number): number for number in range(len(old.classes))}
    for name in new.classes:
        if name not in known:
            raise UsageError(where, ..., f"has the class {name}, must have {allowed}")
    return np.array([known[name] for name in new.classes])[new.y]


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


def rows(
    of: Predicted, task: Task, classes: Sequence[str], asked: Collection[str] = ()
) -> list[dict[str, Any]]:
    """The scores of a run: by domain, by class (label, value) and by client, `by` and `name`.

    classes: their names. asked: names of metrics; one that is not defined is None.
    """
    scores = scorer(task)
    found: list[dict[str, Any]] = []

    def add(by: str, name: str, y: np.ndarray, outputs: np.ndarray, **about: str) -> None:
        measured = metrics.values(asked, Predictions(task.kind, y, outputs))
        found.append({"by": by, "name": name, **about, **scores(outputs, y)._asdict(), **measured})

    for name, split in dict.fromkeys((part.domain, part.split) for part in of.parts):
        mine = [i for i, part in enumerate(of.parts) if (part.domain, part.split) == (name, split)]
        y = np.concatenate([of.parts[i].y for i in mine])
        outputs = np.concatenate([of.outputs[i] for i in mine])
        add("domain", name, y, outputs, domain=name, split=split)
    outputs, y = of_new_clients(of)
    if outputs.shape[1:] == (len(classes),):  # a loss of one's own may read more outputs
        by, values = COLUMNS[task.kind][0], of_columns(task.kind, outputs, y).tolist()
        sizes = [len(y)] * len(classes)
        if task.kind == "classes":
            sizes = np.bincount(y, minlength=len(classes)).tolist()
        found += [
            {"by": by, "name": name, "examples": size, "score": value}
            for name, size, value in zip(classes, sizes, values, strict=True)
        ]
    for part, part_outputs in zip(of.parts, of.outputs, strict=True):
        if part.client >= 0:
            about = {"domain": part.domain, "split": part.split}
            add("client", str(part.client), part.y, part_outputs, **about)
    for client, own in of.by_client:
        add("client", str(client), y, own, domain="all", split="new")
    return [{"seed": of.seed, "round": of.round, **each} for each in found]


def of_columns(kind: str, outputs: np.ndarray, y: np.ndarray) -> np.ndarray:
    """[K] the accuracy on each class or label, NaN without examples, or the error of each value."""
    of = Predictions(kind, y, outputs)
    if kind == "classes":
        right, total = of.truth[of.predicted == y].sum(0), of.truth.sum(0)
        return np.divide(right, total, out=np.full(len(total), np.nan), where=total > 0)
    if kind == "values":
        return abs(of.predicted.astype(np.float64) - of.truth).mean(0)
    return (of.predicted == of.truth).mean(0)


def of_new_clients(of: Predicted) -> tuple[np.ndarray, np.ndarray]:
    """The outputs and the targets of the examples that no client holds."""
    new = [i for i, part in enumerate(of.parts) if part.client < 0]
    return (
        np.concatenate([of.outputs[i] for i in new]),
        np.concatenate([of.parts[i].y for i in new]),
    )


def frame(found: Sequence[Predicted], kind: str, classes: Sequence[str]) -> pd.DataFrame:
    """The predictions, a row per run and example. kind: of the targets. classes: their names."""
    frames = []
    for run in found:
        for part, outputs in zip(run.parts, run.outputs, strict=True):
            of = Predictions(kind, part.y, outputs)
            columns: dict[str, Any] = {"seed": run.seed, "round": run.round, "index": part.rows}
            columns |= {"domain": part.domain, "split": part.split}
            client = part.client if part.client >= 0 else pd.NA
            columns["client"] = pd.array([client] * len(part.y), dtype="Int64")
            if kind == "classes":
                names = np.array(classes, object)
                columns |= {"target": names[part.y], "prediction": names[of.predicted]}
            for k, name in enumerate(classes):
                ending = "" if len(classes) == 1 else f"_{name}"
                if kind != "classes":
                    columns[f"target{ending}"] = of.truth[:, k]
                    columns[f"prediction{ending}"] = of.predicted[:, k]
                if kind != "values":
                    columns[f"probability_{name}"] = of.probabilities[:, k]
            frames.append(pd.DataFrame(columns))
    return pd.concat(frames)


def of_folder(folder: Path, assembled: Assembled) -> Runs:
    """The finished runs of a cell in its folder.

    assembled: the experiment, whose data are not read again if they are of all seeds.
    """
    chosen = assembled.config
    runs = finished.open("run_dir", folder, named=chosen.outside, data_dir=chosen.data_dir)
    # The rule of this command, which may differ from that in training.
    runs = dataclasses.replace(runs, config=config.changed(runs.config, select=chosen.select))
    if set(chosen.seeds) <= set(assembled.splits.get(runs.cell.held_out, ())):
        return dataclasses.replace(runs, known_data=assembled)
    return runs


def chosen(runs: Runs) -> list[int]:
    """The runs with the selected hyperparameters, one of each seed.

    Where --select finds none, they are selected by validation. Raises UsageError if every setting
    has a seed that diverged.
    """
    rule = runs.config.select
    picked = selection.choose("", runs.result, rule) or selection.choose("", runs.result)
    if picked is None:
        text = f"{divergence.text(runs.result.runs)}; a setting with a diverged seed is not chosen"
        raise UsageError(runs.where, ..., text)
    return picked.indices
