"""The predictions of finished runs: outputs by domain and client, their scores and metrics."""

import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

from fedjax_inv import objectives
from fedjax_inv.checks import UsageError
from fedjax_inv.data import clients
from fedjax_inv.data.dataset import Dataset
from fedjax_inv.data.federation import parts_of
from fedjax_inv.inputs import group_names, groups
from fedjax_inv.types import Federation, Tree

from .assembly import metrics
from .assembly.metrics import ACCURACY, Measure, Predictions
from .assembly.objective import Objective
from .finished import Runs
from .folder import summary

_BATCH = 256
_TESTS = ("test", "known_domains")  # whose domains have a part each

# What a column of the targets is called, and the score of one, by the kind of targets.
COLUMNS = {
    "classes": ("class", ACCURACY),
    "labels": ("label", ACCURACY),
    "values": ("value", Measure("absolute error", higher_is_better=False, is_share=False)),
}


class Slice(NamedTuple):
    """M examples of one domain, split and client."""

    domain: str
    split: str
    client: int  # -1: a new client
    source: np.ndarray  # [M] as in a `Dataset`
    x: Tree  # [M, ...] the network's inputs
    y: np.ndarray  # [M, ...] targets
    number: np.ndarray | None = None  # [M] the number of each one's domain, if the score needs it
    unseen: bool = False  # whether they are a domain whose norms follow --unseen_norms


class RunPredictions(NamedTuple):
    """The predictions of a run for M examples."""

    seed: int
    round: int
    # [M] source (the file of each example, or its row in the source), domain, split, client (NA: a
    # new one)
    examples: pd.DataFrame
    y: np.ndarray  # [M, ...] targets
    number: np.ndarray  # [M] the number of each one's domain, 0 if the score does not need it
    outputs: np.ndarray  # [M, K]
    # (client, the outputs [M, K] of its own network), of other data
    by_client: Sequence[tuple[int, np.ndarray]] = ()
    # Whether clients count alike in the test, as each has examples in proportions of its own
    equally: bool = False

    def groups(self, *columns: str) -> Iterable[tuple[Any, np.ndarray]]:
        """(values, rows) of the examples with equal values in columns of `examples`."""
        rows: Mapping[Any, np.ndarray] = self.examples.groupby([*columns], sort=False).indices
        return rows.items()

    def of_test(self) -> tuple[np.ndarray, np.ndarray]:
        """The outputs and the targets of the test, or of other data."""
        is_test = self.examples["split"].isin(["test", "new"]).to_numpy()
        return self.outputs[is_test], self.y[is_test]


def own_parts(runs: Runs, index: int) -> list[Slice]:
    """The validation examples of each client, and those that no client has, as in training.

    A test of several domains has a part for each, and for each client whose own network serves.

    index: of a run.
    """
    assembled = runs.data
    seed = runs.cell.runs[index].seed
    splits = assembled.splits[runs.cell.held_out]
    split = splits[seed]
    inputs = runs.plan.inputs
    names = group_names([*splits.values()])
    of_seeds = groups(np.stack([each.domain for each in splits.values()]))
    group = of_seeds[[*splits].index(seed)]
    data = jax.tree.map(np.asarray, assembled.data)

    def part(domain: str, kind: str, client: int, rows: np.ndarray) -> Slice:
        x = jax.tree.map(lambda a: a[rows], data.x)
        number = None if data.domain is None else data.domain[rows]
        known = assembled.origin[rows], x, data.y[rows], number
        return Slice(domain, kind, client, *known, unseen=kind in adapted)

    adapted = set()  # the kinds whose norms follow --unseen_norms
    if inputs.unseen_test is not None:
        adapted = {"unseen_domain", *["test"] * bool(np.asarray(inputs.unseen_test)[index])}
    clients = enumerate(parts_of(split.valid))
    parts = [part(names[group[who]], "validation", who, rows) for who, rows in clients]
    others = [(summary.unseen_name(runs.cell, kind), kind, of) for kind, of in split.unseen.items()]
    others.append((summary.test_name(runs.cell, names), "test", split.test))
    for name, kind, federation in others:
        of_owners = [np.zeros(0, int), *parts_of(federation)]
        if own := inputs.own_tests.get(kind):
            of_owners = [
                rows
                for shards in (own.own, own.others)
                for rows in parts_of(Federation(data, *(np.asarray(a)[index] for a in shards)))
            ]
        rows = np.concatenate(of_owners)
        owner = np.repeat(np.arange(len(of_owners)), [len(each) for each in of_owners])
        domain = assembled.domain[rows] if kind in _TESTS else np.zeros(len(rows), int)
        numbers = np.unique(domain)
        for number in numbers:
            of_domain = name if len(numbers) == 1 else f"{name}, {split.domains[number]}"
            for who in np.unique(owner[domain == number]):
                its_own = (domain == number) & (owner == who)
                client = -1 if who == len(of_owners) - 1 else int(who)
                parts.append(part(of_domain, kind, client, rows[its_own]))
    return parts


def new_parts(where: str, new: Dataset, old: Dataset, *, adapts: bool = False) -> list[Slice]:
    """The parts of other data, one for each domain. adapts: whether norms follow --unseen_norms."""
    if old.words or new.words:
        raise UsageError(where, ..., "must not be text, whose words every run numbers anew")
    if new.render is not None:
        raise UsageError(where, ..., "must be stored as it is seen")
    x, seen = new.x, jax.tree.map(lambda leaf: leaf[:1], old.x)
    if old.render:  # to images in [0, 1]
        seen = jax.eval_shape(old.render, seen)
        x = x / np.float32(255) if new.x.dtype == np.uint8 else x
    if np.ndim(x) == seen.ndim == 4 and (x.shape[3], seen.shape[3]) == (1, 3):
        x = x.repeat(3, -1)  # images of files have one channel if all are grey
    here, there = (clients.form(each, clients.kind_of_inputs) for each in (x, seen))
    if here != there:
        raise UsageError(where, ..., f"has inputs of {here}, must have {there}, as the run")
    y = known_targets(where, new, old)
    parts = []
    source = np.arange(len(y)) if new.source is None else new.source
    for index, name in enumerate(new.domains):
        rows = np.flatnonzero(new.domain == index)
        known = source[rows], x[rows], y[rows], new.domain[rows]
        parts.append(Slice(name, "new", -1, *known, unseen=adapts))
    return parts


def known_targets(where: str, new: Dataset, old: Dataset) -> np.ndarray:
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
    return np.asarray(np.array([known[name] for name in new.classes])[new.y])


def batches(size: int, batch: int = _BATCH) -> np.ndarray:
    """The rows of batches of one size, as each size would be compiled anew; the last is filled."""
    return np.resize(np.arange(size), -(-size // batch) * batch).reshape(-1, batch)


def predicted(
    runs: Runs, index: int, parts: Sequence[Slice], *, is_new: bool = False
) -> RunPredictions:
    """The predictions of a run for all parts that have examples.

    is_new: whether the parts are of other data, for which each client's own network predicts, too.
    """
    line = runs.line(index)
    fitted = runs.fitted_to_images if is_new else runs.fitted

    def predict(x: Tree, client: int = -1, *, unseen: bool = False) -> np.ndarray:
        """The outputs [M, K] for x [M, ...] with the network of a client; -1: a new one."""
        known = None if client < 0 else client
        outputs = fitted.predict(x, index, client=known, unseen=unseen)
        # A network of one's own may return [M] for a single value.
        return np.asarray(outputs[:, None] if outputs.ndim == 1 else outputs)

    def concatenated(of_parts: Iterable[Slice]) -> Tree:
        return jax.tree.map(lambda *leaves: np.concatenate(leaves), *(part.x for part in of_parts))

    personal = fitted.algorithm(index).personal

    def network(part: Slice) -> tuple[int, bool, str]:
        return part.client if personal else -1, part.unseen, part.domain if part.unseen else ""

    parts = sorted((part for part in parts if len(part.y)), key=lambda part: part.unseen)
    outputs = [
        predict(concatenated(of_network), client, unseen=unseen)
        for (client, unseen, _), of_network in itertools.groupby(parts, network)
    ]
    by_client = []
    if is_new and personal:
        x = concatenated(parts)
        number = fitted.plan.inputs.train.size.shape[1]
        by_client = [(client, predict(x, client)) for client in range(number)]
    equally = runs.plan.own_rule == "proportions"
    about = line.seed, line.played, *joined(parts)
    return RunPredictions(*about, np.concatenate(outputs), by_client, equally)


def joined(parts: Sequence[Slice]) -> tuple[pd.DataFrame, np.ndarray, np.ndarray]:
    """What is known about the examples of all parts, their targets, the numbers of domains."""
    frames = []
    for part in parts:
        about = pd.DataFrame({"source": part.source}).assign(domain=part.domain, split=part.split)
        client = pd.NA if part.client < 0 else part.client
        frames.append(about.assign(client=pd.array([client] * len(about), dtype="Int64")))
    y = np.concatenate([part.y for part in parts])
    none = np.zeros(len(y), np.int32)
    numbers = [none[: len(part.y)] if part.number is None else part.number for part in parts]
    return pd.concat(frames, ignore_index=True), y, np.concatenate(numbers)


@functools.cache  # or every run would compile it anew
def scorer(task: Objective) -> Callable[[np.ndarray, np.ndarray], pd.DataFrame]:
    """A function from outputs [M, K] and targets [M, ...] to the score and the loss of each."""

    def of_one(outputs: Any, y: Any) -> tuple[Any, Any]:
        arguments = outputs[None], y[None], jnp.ones(1, bool)
        return task.score.of_domains()(*arguments), task.loss(*arguments)

    of_batch = jax.jit(jax.vmap(of_one))

    def scores(outputs: np.ndarray, y: np.ndarray) -> pd.DataFrame:
        each = [np.stack(of_batch(outputs[some], y[some])) for some in batches(len(y))]
        both = np.concatenate(each, 1)[:, : len(y)].astype(np.float64)
        return pd.DataFrame({"score": both[0], "loss": both[1]})

    return scores


@functools.cache
def counter(score: Any) -> Callable[..., float] | None:
    """A function from outputs [M, K], targets and domains [M] to a score; None: it is a mean."""
    if not isinstance(score, objectives.Counts):
        return None
    add = jax.jit(score.add)
    finish = score.finish

    def counted(*arrays: np.ndarray) -> float:
        which = batches(len(arrays[0]))
        real = np.arange(which.size).reshape(which.shape) < len(arrays[0])
        sums = []
        for some, mask in zip(which, real, strict=True):
            outputs, y, domain = (each[some] for each in arrays)
            sums.append(add(outputs, y, mask, domain))
        return float(finish(np.sum(sums, 0)))

    return counted


def rows(
    run: RunPredictions, task: Objective, classes: Sequence[str], asked: Collection[str] = ()
) -> list[dict[str, Any]]:
    """The scores of a run: by domain, by class (label, value) and by client, `by` and `name`.

    classes: their names. asked: names of metrics; one that is not defined is None.
    """
    scores = group_scores(run, run.outputs, task, asked)
    found = []
    for (domain, split), group in run.groups("domain", "split"):
        about = {"by": "domain", "name": domain, "domain": domain, "split": split}
        found.append(about | scores(group))
    found += _of_columns(run, task.kind, classes)
    for (client, domain, split), group in run.groups("client", "domain", "split"):
        about = {"by": "client", "name": str(client), "domain": domain, "split": split}
        found.append(about | scores(group))
    for number, outputs in run.by_client:
        about = {"by": "client", "name": str(number), "domain": "all", "split": "new"}
        of_client = group_scores(run, outputs, task, asked)
        found.append(about | of_client(np.arange(len(outputs))))
    return [{"seed": run.seed, "round": run.round, **row} for row in found]


def group_scores(
    run: RunPredictions, outputs: np.ndarray, task: Objective, asked: Collection[str]
) -> Callable[[np.ndarray], dict[str, Any]]:
    """A function from rows of a run's examples to their number, score, loss and metrics.

    outputs: [M, K] for all examples of the run.
    """
    score: Any = task.score.of_domains(run.number)
    of_examples = scorer(task)(outputs, run.y)
    of_counts = counter(score)

    def scores(group: np.ndarray) -> dict[str, Any]:
        of_group = of_examples.iloc[group]
        if run.equally and run.examples["split"].iloc[group[0]] == "test":
            of_group = of_group.groupby(run.examples["client"].iloc[group].to_numpy()).mean()
        found: dict[str, Any] = {"examples": len(group), **of_group.mean()}
        if of_counts:
            found["score"] = of_counts(outputs[group], run.y[group], run.number[group])
        return found | metrics.values(asked, Predictions(task.kind, run.y[group], outputs[group]))

    return scores


def _of_columns(run: RunPredictions, kind: str, classes: Sequence[str]) -> list[dict[str, Any]]:
    """The scores of a run's test by class, label or value, whose names are `classes`."""
    outputs, y = run.of_test()
    if outputs.shape[1:] != (len(classes),):  # a loss of one's own may read more outputs
        return []
    sizes = np.full(len(classes), len(y))
    if kind == "classes":
        sizes = np.bincount(y, minlength=len(classes))
    pairs = zip(sizes.tolist(), of_columns(kind, outputs, y).tolist(), strict=True)
    return [
        {"by": COLUMNS[kind][0], "name": name, "examples": size, "score": score}
        for name, (size, score) in zip(classes, pairs, strict=True)
    ]


def of_columns(kind: str, outputs: np.ndarray, y: np.ndarray) -> np.ndarray:
    """[K] the accuracy on each class or label, NaN without examples, or the error of each value."""
    of = Predictions(kind, y, outputs)
    if kind == "classes":
        right = of.truth[of.predicted == y].sum(0)
        total = of.truth.sum(0)
        out = np.full(len(total), np.nan)
        return np.asarray(np.divide(right, total, out=out, where=total > 0))
    if kind == "values":
        return np.asarray(abs(of.predicted.astype(np.float64) - of.truth).mean(0))
    return np.asarray((of.predicted == of.truth).mean(0))


def frame(found: Sequence[RunPredictions], kind: str, classes: Sequence[str]) -> pd.DataFrame:
    """The predictions, a row per run and example. kind: of the targets. classes: their names."""
    frames = []
    for run in found:
        of = Predictions(kind, run.y, run.outputs)
        columns: dict[str, Any] = {}
        probabilities = of.probabilities
        if kind == "classes":
            names = np.array(classes, object)
            columns |= {"target": names[run.y], "prediction": names[of.predicted]}
        for k, name in enumerate(classes):
            ending = "" if len(classes) == 1 else f"_{name}"
            if kind != "classes":
                columns[f"target{ending}"] = of.truth[:, k]
                columns[f"prediction{ending}"] = of.predicted[:, k]
            if kind != "values":
                columns[f"probability_{name}"] = probabilities[:, k]
        about = run.examples.copy()
        about.insert(0, "seed", run.seed)
        about.insert(1, "round", run.round)
        frames.append(pd.concat([about, pd.DataFrame(columns)], axis=1))
    return pd.concat(frames)
