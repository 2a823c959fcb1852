"""The scores of a finished run by domain, class and client, on its own data or on other data.

fedjax-inv evaluate --run=runs/fedipg-digits-75
fedjax-inv evaluate --run=runs/fedipg-digits-75 --dataset=new.npz --state=last

The run with the selected hyperparameters is evaluated, for each seed. On the run's own data each
client is scored on its validation examples, with its own network if the algorithm is personal; the
classes are scored on the test examples. Other data count as the examples of a new client, whatever
their domains and splits; with a personal algorithm each client's own network is evaluated on all of
them, too.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from matplotlib.figure import Figure

from fedjax_inv import program
from fedjax_inv.checks import UsageError
from fedjax_inv.data.dataset import Dataset
from fedjax_inv.data.federation import parts_of
from fedjax_inv.types import Algorithm, Tree
from fedjax_inv_experiments.experiment import config
from fedjax_inv_experiments.flags import command, outside
from fedjax_inv_experiments.flags.flag import check_picture, flag
from fedjax_inv_experiments.parts import data as data_flags
from fedjax_inv_experiments.reporting import figures, finished, report, run_figures
from fedjax_inv_experiments.reporting.finished import OneRun, Runs
from fedjax_inv_experiments.reporting.tables import table
from fedjax_inv_experiments.running import divergence, files, summary

_BATCH = 256
_MOST_LINES = 20  # of clients in the table, and of classes in the table of confusions

# (a client's state, x [M, ...]) -> outputs [M, K]
Predict = Callable[[Tree, Tree], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Options:
    """The flags of this binary."""

    run: str = finished.run_flag()
    state: str = finished.state_flag("best")
    dataset: str = flag(
        "", "Other data, as --dataset of train; default: the run's own, divided as in training."
    )
    out: str = flag("", "The picture, a .png file; the numbers go beside it, as .json.")
    data_dir: str = finished.data_dir_flag()
    trust_code: tuple[str, ...] = outside.trust_flag()


class Part(NamedTuple):
    """M examples of one domain, split and client."""

    domain: str
    split: str
    client: int  # -1: a new client
    x: Tree  # [M, ...] the network's inputs
    y: np.ndarray  # [M] int


class Scores(NamedTuple):
    """The scores of the predictions for M examples."""

    examples: int
    accuracy: float
    loss: float  # mean cross-entropy in nats


class DomainScores(msgspec.Struct, frozen=True):
    """The scores of the predictions for the examples of a domain."""

    split: str
    examples: int
    accuracy: float
    loss: float


class ClientScores(msgspec.Struct, frozen=True):
    """A client's scores on its own examples, or those of its own network on all examples."""

    client: int
    domain: str
    examples: int
    accuracy: float
    loss: float


class RunScores(msgspec.Struct, frozen=True):
    """The scores of a run."""

    seed: int
    round: int
    domains: dict[str, DomainScores]
    clients: list[ClientScores]
    confusion: list[list[int]]  # [K, K], of the examples that no client holds


class Evaluated(msgspec.Struct, frozen=True):
    """The content of the json file: the scores of the selected runs of a folder."""

    run: str
    state: str
    dataset: str
    classes: tuple[str, ...]
    hyper: dict[str, float]
    runs: list[RunScores]


def own_parts(runs: Runs, seed: int) -> list[Part]:
    """The validation examples of each client, and the test examples, as in training."""
    assembled = runs.data
    split = assembled.splits[runs.cell.held_out][seed]
    names = program.group_names(split)
    group = program.groups(split.domain)
    data = jax.tree.map(np.asarray, assembled.data)

    def part(domain: str, kind: str, client: int, rows: np.ndarray) -> Part:
        return Part(domain, kind, client, jax.tree.map(lambda a: a[rows], data.x), data.y[rows])

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
    here, there = np.shape(new.x)[1:], jnp.shape(seen)[1:]
    if here != there:
        text = f"has inputs {list(here)}, must have {list(there)}, as the run"
        raise UsageError(where, ..., text)
    # Classes are matched by name, or by number where the names are numbers.
    known = dict(zip(old.classes, range(len(old.classes)), strict=True))
    if not set(new.classes) <= set(known):
        known = {str(number): number for number in range(len(old.classes))}
    for name in new.classes:
        if name not in known:
            allowed = f"those of the run, {', '.join(old.classes)}, or their numbers from 0"
            raise UsageError(where, ..., f"has the class {name}, must have {allowed}")
    y = np.array([known[name] for name in new.classes])[new.y]
    groups = [(name, new.domain == index) for index, name in enumerate(new.domains)]
    return [Part(name, "new", -1, new.x[rows], y[rows]) for name, rows in groups if rows.any()]


def predictor(algorithm: Algorithm, server: Tree) -> Predict:
    """The outputs of a server's networks, in batches that are compiled once."""
    outputs = jax.jit(algorithm.predict)

    def predict(own: Tree, x: Tree) -> np.ndarray:
        size = len(jax.tree.leaves(x)[0])
        rows = np.resize(np.arange(size), -(-size // _BATCH) * _BATCH).reshape(-1, _BATCH)
        parts = [outputs(server, own, jax.tree.map(lambda a, b=batch: a[b], x)) for batch in rows]
        return np.concatenate(parts)[:size]

    return predict


def scores(outputs: np.ndarray, y: np.ndarray) -> Scores:
    """The scores of logits [M, K] for labels [M], M above 0."""
    logits = outputs.astype(np.float64)
    highest = logits.max(1, keepdims=True)
    total = highest[:, 0] + np.log(np.exp(logits - highest).sum(1))
    loss = (total - logits[np.arange(len(y)), y]).mean()
    return Scores(len(y), float((outputs.argmax(1) == y).mean()), float(loss))


def confusion(predicted: np.ndarray, y: np.ndarray, num_classes: int) -> np.ndarray:
    """[K, K] how many examples of each class (row) are predicted as each class (column)."""
    counts = np.zeros((num_classes, num_classes), int)
    np.add.at(counts, (y, predicted), 1)
    return counts


def run_scores(one: OneRun, algorithm: Algorithm, parts: Sequence[Part]) -> RunScores:
    """The scores of a run."""
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
    domains, by_client = {}, []
    for name, split in dict.fromkeys((part.domain, part.split) for part in parts):
        mine = [i for i, part in enumerate(parts) if (part.domain, part.split) == (name, split)]
        y = np.concatenate([parts[i].y for i in mine])
        of_domain = scores(np.concatenate([outputs[i] for i in mine]), y)
        domains[name] = DomainScores(split, *of_domain)
    unknown = [i for i, part in enumerate(parts) if part.client < 0]
    y = np.concatenate([parts[i].y for i in unknown])
    for part, out in zip(parts, outputs, strict=True):
        if part.client >= 0:
            by_client.append(ClientScores(part.client, part.domain, *scores(out, part.y)))
    if algorithm.personal and not by_client:
        for client in range(len(jax.tree.leaves(clients)[0])):
            out = np.concatenate([predict(own(client), parts[i].x) for i in unknown])
            by_client.append(ClientScores(client, "all", *scores(out, y)))
    predicted = np.concatenate([outputs[i] for i in unknown]).argmax(1)
    counts = confusion(predicted, y, len(one.runs.data.dataset.classes))
    return RunScores(one.run.seed, one.line().round, domains, by_client, counts.tolist())


def recalls(counts: np.ndarray) -> list[float | None]:
    """[K] the accuracy on each class, None without examples. counts: the confusions [K, K]."""
    return [
        right / total if total else None
        for right, total in zip(counts.diagonal(), counts.sum(1), strict=True)
    ]


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


def evaluate(runs: Runs, options: Options) -> Evaluated:
    """The scores of the selected runs of a folder."""
    assembled, which = runs.data, chosen(runs)
    if not options.dataset:
        runs.check_data()
    else:
        asked = dataclasses.replace(  # preprocessed as the run's own data are
            config.of().data,
            dataset=options.dataset,
            data_dir=options.data_dir,
            image_size=runs.config.data.image_size,
            stride=runs.config.data.stride,
        )
        new = new_parts(f"--dataset={options.dataset}", data_flags.load(asked), assembled.dataset)
    algorithm = runs.algorithm(which[0])  # the same for all of them: they differ in their seed
    scored = []
    for index in which:
        one = runs.run(index, options.state)
        parts = new if options.dataset else own_parts(runs, one.run.seed)
        scored.append(run_scores(one, algorithm, parts))
    return Evaluated(
        run=str(runs.path),
        state=options.state,
        dataset=options.dataset or runs.config.data.dataset,
        classes=assembled.dataset.classes,
        hyper=runs.cell.runs[which[0]].hyper,
        runs=scored,
    )


def _domains(of: Evaluated) -> dict[str, list[DomainScores]]:
    """The scores by domain, each of all runs that have the domain."""
    names = dict.fromkeys(name for run in of.runs for name in run.domains)
    return {name: [run.domains[name] for run in of.runs if name in run.domains] for name in names}


def _clients(of: Evaluated) -> list[list[ClientScores]]:
    """The scores by client, each of all runs that have the client."""
    each = [scores for run in of.runs for scores in run.clients]
    numbers = dict.fromkeys(scores.client for scores in each)
    return [[scores for scores in each if scores.client == number] for number in numbers]


def _recalls(of: Evaluated) -> list[list[float | None]]:
    """The accuracies by class, each with a value per run."""
    by_run = [recalls(np.array(run.confusion)) for run in of.runs]
    return [list(values) for values in zip(*by_run, strict=True)]


def _accuracies(entries: Iterable[DomainScores | ClientScores]) -> list[float]:
    return [entry.accuracy for entry in entries]


def tables(of: Evaluated) -> str:
    """The scores as tables: means and standard deviations over the seeds."""
    counted = {
        "examples": lambda entries: f"{np.mean([e.examples for e in entries]):g}",
        "accuracy, %": lambda entries: report.percent(_accuracies(entries)),
        "loss": lambda entries: f"{np.mean([e.loss for e in entries]):.3f}",
    }

    def of_domain(name: str) -> Callable[[tuple[str, list[DomainScores]]], str]:
        return lambda row: counted[name](row[1])

    by_domain = {"domain": lambda row: row[0], "split": lambda row: row[1][0].split}
    by_domain |= {name: of_domain(name) for name in counted}
    parts = [table(_domains(of).items(), by_domain)]
    by_class = zip(of.classes, _recalls(of), strict=True)
    known = {
        "class": lambda row: row[0],
        "accuracy, %": lambda row: report.percent([v for v in row[1] if v is not None] or [np.nan]),
    }
    parts.append(table(by_class, known))
    clients = sorted(_clients(of), key=lambda entries: np.mean(_accuracies(entries)))
    if clients:
        more = f" ({_MOST_LINES} of {len(clients)})" if len(clients) > _MOST_LINES else ""
        by_client = {
            f"client, the worst first{more}": lambda entries: entries[0].client,
            "domain": lambda entries: entries[0].domain,
            **counted,
        }
        parts.append(table(clients[:_MOST_LINES], by_client))
    counts = _confusion(of)
    if len(counts) <= _MOST_LINES:
        numbers = [(name, lambda row, at=at: row[1][at]) for at, name in enumerate(of.classes)]
        rows = zip(of.classes, counts, strict=True)
        parts.append(table(rows, [("is, taken for", lambda row: row[0]), *numbers]))
    return "\n\n".join(parts)


def _confusion(of: Evaluated) -> np.ndarray:
    """[K, K] the confusions of all seeds together."""
    return np.sum([run.confusion for run in of.runs], 0)


def draw(path: Path, of: Evaluated, title: str) -> None:
    """Draws the confusions, and the accuracies by domain, class and client.

    A bar is a mean, and a dot a seed. Many clients are drawn as one line through all of them.
    """
    domains, clients = _domains(of), _clients(of)
    by_class = np.array(_recalls(of), float)
    groups = [
        ("domain", list(domains), [_accuracies(entries) for entries in domains.values()]),
        ("class", list(of.classes), by_class.tolist()),
        (
            "client",
            [str(entries[0].client) for entries in clients],
            [_accuracies(entries) for entries in clients],
        ),
    ]
    groups = [group for group in groups if group[1]]
    figure = Figure(figsize=(12, 2.6 * len(groups) + 0.6), layout="constrained")
    grid = figure.add_gridspec(len(groups), 2)
    for row, (what, names, values) in enumerate(groups):
        axis = figure.add_subplot(grid[row, 1])
        if what == "client" and len(names) > run_figures.MOST_DOTS:
            served = [{e.client: e.accuracy for e in run.clients} for run in of.runs]
            of_seeds = [[run.get(int(name), np.nan) for name in names] for run in served]
            run_figures.draw_quantiles(axis, 100 * np.array(of_seeds), 0)
            what = "clients, the worst first, %"
        else:
            at = np.arange(len(names))
            means = [100 * np.mean([v for v in some if v == v] or [0]) for some in values]
            axis.bar(at, means, color="0.8")
            for x, some in zip(at, values, strict=True):
                axis.plot([x] * len(some), 100 * np.array(some), "o", ms=3, color="C0")
            figures.name_x(axis, names, 5.2)
        axis.set(ylim=(0, 102), xlabel=what, ylabel="accuracy, %")
    counts = _confusion(of)
    share = 100 * counts / np.maximum(counts.sum(1, keepdims=True), 1)
    axis = figure.add_subplot(grid[:, 0])
    picture = axis.imshow(share, cmap="Blues", vmin=0, vmax=100)
    figure.colorbar(picture, ax=axis, label="of the class, %", shrink=0.8)
    figures.name_x(axis, of.classes, 4.0)
    figures.name_y(axis, of.classes, 4.0)
    axis.set(xlabel="taken for", ylabel="is")
    if len(counts) <= _MOST_LINES:
        for is_, as_ in np.argwhere(counts):
            color = "white" if share[is_, as_] > 60 else "black"
            axis.text(as_, is_, str(counts[is_, as_]), ha="center", va="center", size=8, c=color)
    if len(of.runs) > 1:
        title += f"\nmeans over {len(of.runs)} seeds, with a dot or a band for how they differ"
    figures.entitle(figure, title)
    figures.save(figure, path)


def run(options: Options) -> str:
    """Writes the picture and the json, and returns the tables and the paths.

    Raises UsageError for a folder without a finished run, for a run without the state, and for
    other data that do not fit the run.
    """
    if not options.run:
        raise UsageError("--run=", ..., "must be the folder of a finished run")
    runs = finished.open(
        "run",
        Path(options.run),
        trusted=options.trust_code,
        data_dir=options.data_dir,
        dataset=options.dataset,
    )
    name = f"evaluation-{options.state}"
    name += f"-{Path(options.dataset).stem}.png" if options.dataset else ".png"
    out = check_picture("out", options.out or str(runs.path / name))
    scored = evaluate(runs, options)
    rounds = ", ".join(str(each.round) for each in scored.runs)
    held_out = runs.cell.held_out or "test split"
    title = f"{runs.cell.label}, held out: {held_out}, after round {rounds}"
    title += f"; on {options.dataset}" if options.dataset else ""
    files.make_folder(out.parent)
    draw(out, scored, title)
    files.write_json(out.with_suffix(".json"), scored)
    where = f"Picture: {out}. Numbers: {out.with_suffix('.json')}."
    return f"\n{title}\n\n{tables(scored)}\n\n{where}"


BINARY = command.of(run, Options, __doc__)

if __name__ == "__main__":
    command.main(BINARY)
