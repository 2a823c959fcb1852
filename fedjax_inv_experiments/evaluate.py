"""The scores of a finished run by domain, class and client, on its own data or on other data.

fedjax-inv evaluate --run=runs/fedipg-digits-75
fedjax-inv evaluate --run=runs/fedipg-digits-75 --dataset=new.npz --state=last
fedjax-inv evaluate --run=runs/fedipg-digits-75 --metrics=f1,auroc --predictions=p.csv

The run with the selected hyperparameters is evaluated, for each seed. On the run's own data each
client is scored on its validation examples, with its own network if the algorithm is personal; the
classes are scored on the test examples. Other data count as the examples of a new client, whatever
their domains and splits; with a personal algorithm each client's own network is evaluated on all of
them, too.
"""

import csv
import dataclasses
import importlib.util
import io
import os
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import msgspec
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedjax_inv.checks import UsageError
from fedjax_inv.data.dataset import Dataset
from fedjax_inv.types import Tree
from fedjax_inv_experiments.flags import command
from fedjax_inv_experiments.flags.flag import check_picture, check_place, flag, flag_error
from fedjax_inv_experiments.flags.outside import Named
from fedjax_inv_experiments.parts import data as data_flags
from fedjax_inv_experiments.parts import metrics
from fedjax_inv_experiments.parts.metrics import Predictions
from fedjax_inv_experiments.parts.objective import ACCURACY, Measure
from fedjax_inv_experiments.reporting import (
    figures,
    finished,
    predictions,
    report,
    run_figures,
)
from fedjax_inv_experiments.reporting.finished import Runs
from fedjax_inv_experiments.reporting.predictions import (
    ClientScores,
    DomainScores,
    Part,
    Predicted,
)
from fedjax_inv_experiments.reporting.tables import table
from fedjax_inv_experiments.running import files

_MOST_LINES = 20  # of clients in the table, and of classes in the table of confusions
_MOST_POINTS = 3000  # in the picture of values
_FORMS = (".csv", ".parquet")


@dataclasses.dataclass(frozen=True)
class Options(Named):
    """The flags of this binary."""

    run: str = finished.run_flag()
    state: str = finished.state_flag("best")
    dataset: str = flag(
        "", "Other data, as --dataset of train; default: the run's own, divided as in training."
    )
    out: str = flag(
        "",
        "The picture, a .png file; a .pdf and the numbers, .json, go beside it. Default: a file of "
        "the run's folder that is named after --state, --dataset and --metrics.",
    )
    data_dir: str = finished.data_dir_flag()
    metrics: tuple[str, ...] = metrics.metrics_flag("the predictions")
    predictions: str = flag(
        "",
        "A .csv or .parquet file for the predictions, a line for each run and example.",
    )


class RunScores(msgspec.Struct, frozen=True, omit_defaults=True):
    """The scores of a run."""

    seed: int
    round: int
    domains: dict[str, DomainScores]
    clients: list[ClientScores]
    # [K, K], of the examples that no client holds; none unless each output is of a class
    confusion: list[list[int]] = []
    # label -> accuracy, or value -> absolute error, of the examples that no client holds
    columns: dict[str, float] = {}


class Evaluated(msgspec.Struct, frozen=True, omit_defaults=True):
    """The content of the json file: the scores of the selected runs of a folder."""

    run: str
    state: str
    dataset: str
    classes: tuple[str, ...]
    hyper: dict[str, float]
    runs: list[RunScores]
    task: str = "classes"
    score: Measure = ACCURACY


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


def confusion(predicted: np.ndarray, y: np.ndarray, num_classes: int) -> np.ndarray:
    """[K, K] how many examples of each class (row) are predicted as each class (column)."""
    counts = np.zeros((num_classes, num_classes), int)
    np.add.at(counts, (y, predicted), 1)
    return counts


def run_scores(runs: Runs, of: Predicted, asked: Sequence[str] = ()) -> RunScores:
    """The scores of a run. asked: names of metrics."""
    task, dataset = runs.data.task, runs.data.dataset
    domains, clients = predictions.by_domain(of, task, asked)
    outputs, y = predictions.of_new_clients(of)
    if outputs.shape[1:] != (len(dataset.classes),):  # a loss of one's own may read more outputs
        return RunScores(of.seed, of.round, domains, clients)
    if task.kind == "classes":
        counts = confusion(outputs.argmax(1), y, len(dataset.classes))
        return RunScores(of.seed, of.round, domains, clients, counts.tolist())
    known = Predictions(task.kind, y, outputs)
    if task.kind == "values":
        scores = abs(known.predicted.astype(np.float64) - known.truth)
    else:
        scores = known.predicted == known.truth
    columns = dict(zip(dataset.classes, scores.mean(0).tolist(), strict=True))
    return RunScores(of.seed, of.round, domains, clients, columns=columns)


def recalls(counts: np.ndarray) -> list[float | None]:
    """[K] the accuracy on each class, None without examples. counts: the confusions [K, K]."""
    return [
        right / total if total else None
        for right, total in zip(counts.diagonal(), counts.sum(1), strict=True)
    ]


def evaluate(runs: Runs, options: Options) -> tuple[Evaluated, list[Predicted], list[str]]:
    """The scores and the predictions of the selected runs of a folder, and why some are left out.

    Raises UsageError if no run has the state.
    """
    assembled, which = runs.data, predictions.chosen(runs)
    old = assembled.dataset
    metrics.check(options.metrics, assembled.task.kind)
    if options.dataset:
        asked = data_flags.like(runs.config.data, options.dataset, options.data_dir)
        where = f"--dataset={options.dataset}"
        new = new_parts(where, data_flags.load(asked, like=old), old)
    algorithm = runs.algorithm(which[0])  # the same for all of them: they differ in their seed
    found, lacking = [], []
    for index in which:
        one = runs.run(index, options.state)
        try:
            one.line()
        except UsageError as error:
            lacking.append(error)
            continue
        parts = new if options.dataset else predictions.own_parts(runs, one.run.seed)
        found.append(predictions.predicted(one, algorithm, parts, is_new=bool(options.dataset)))
        _check_width(options, found[-1], len(old.classes))
    if not found:
        raise lacking[0]
    scored = Evaluated(
        run=str(runs.path),
        state=options.state,
        dataset=options.dataset or runs.config.data.dataset,
        classes=old.classes,
        hyper=runs.cell.runs[which[0]].hyper,
        runs=[run_scores(runs, each, options.metrics) for each in found],
        task=assembled.task.kind,
        score=assembled.task.measure,
    )
    return scored, found, [f"Not evaluated: {error}." for error in lacking]


def _check_width(options: Options, of: Predicted, num_targets: int) -> None:
    """Raises UsageError for --metrics and --predictions unless each target has one output."""
    width = of.outputs[0].shape[1]
    for name in ("metrics", "predictions"):
        if getattr(options, name) and width != num_targets:
            text = f"needs one output for each of {num_targets} targets, the network has {width}"
            raise flag_error(name, getattr(options, name), text)


def columns(found: Sequence[Predicted], kind: str, classes: Sequence[str]) -> dict[str, list[Any]]:
    """The columns of the file of predictions, each with an entry per run and example.

    kind: of the targets. classes: their names.
    """
    rows: dict[str, list[Any]] = {}

    def add(name: str, values: Iterable[Any]) -> None:
        rows.setdefault(name, []).extend(values)

    for run in found:
        for part, outputs in zip(run.parts, run.outputs, strict=True):
            count, of = len(part.y), Predictions(kind, part.y, outputs)
            add("seed", [run.seed] * count)
            add("round", [run.round] * count)
            add("index", part.rows.tolist())
            add("domain", [part.domain] * count)
            add("split", [part.split] * count)
            add("client", [part.client if part.client >= 0 else None] * count)
            if kind == "classes":
                add("target", (classes[label] for label in part.y))
                add("prediction", (classes[label] for label in of.predicted))
            for k, name in enumerate(classes):
                ending = "" if len(classes) == 1 else f"_{name}"
                if kind != "classes":
                    add(f"target{ending}", of.truth[:, k].tolist())
                    add(f"prediction{ending}", of.predicted[:, k].tolist())
                if kind != "values":
                    add(f"probability_{name}", of.probabilities[:, k].tolist())
    return rows


def write_predictions(path: Path, rows: dict[str, list[Any]]) -> None:
    """Writes the columns of a table as .csv or .parquet."""
    if path.suffix == ".csv":
        file = io.StringIO()
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(rows)
        writer.writerows(zip(*rows.values(), strict=True))
        files.write(path, file.getvalue())
        return
    import pyarrow
    from pyarrow import parquet

    with files.replacing(path) as opened:
        parquet.write_table(pyarrow.table(rows), opened)


def _check_predictions(text: str, datasets: Iterable[str]) -> Path:
    """The path of --predictions.

    datasets: --dataset, of the run and of this command.

    Raises UsageError if it cannot be written, or if it would replace the data.
    """
    path = Path(os.path.expanduser(text))
    if path.suffix not in _FORMS:
        raise flag_error("predictions", text, f"must end in {' or '.join(_FORMS)}")
    if path.suffix == ".parquet" and importlib.util.find_spec("pyarrow") is None:
        raise flag_error(
            "predictions", text, "needs a package: pip install 'fedjax_inv[experiments]'"
        )
    check_place("predictions", path)
    for dataset in filter(None, datasets):
        if path.resolve() == Path(dataset).expanduser().resolve():
            allowed = f"must be another file than --dataset={dataset}"
            raise flag_error("predictions", text, allowed)
    return path


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


def _scores(entries: Iterable[DomainScores | ClientScores]) -> list[float]:
    return [entry.score for entry in entries]


def tables(of: Evaluated) -> str:
    """The scores as tables: means and standard deviations over the seeds."""
    shown = report.text_of(of.score)
    counted: dict[str, Callable[[Any], str]] = {
        "examples": lambda entries: f"{np.mean([e.examples for e in entries]):g}",
        report.heading_of(of.score): lambda entries: shown(_scores(entries)),
        "loss": lambda entries: f"{np.mean([e.loss for e in entries]):.3f}",
    }
    first = next(iter(of.runs[0].domains.values()))
    counted |= {name: partial(predictions.metric_text, name) for name in first.metrics}

    def of_domain(name: str) -> Callable[[tuple[str, list[DomainScores]]], str]:
        return lambda row: counted[name](row[1])

    by_domain = {"domain": lambda row: row[0], "split": lambda row: row[1][0].split}
    by_domain |= {name: of_domain(name) for name in counted}
    parts = [table(_domains(of).items(), by_domain)]
    counts = _confusion(of)
    if len(counts):
        by_class = zip(of.classes, _recalls(of), strict=True)
        known = {
            "class": lambda row: row[0],
            "accuracy, %": lambda row: (
                report.percent(found) if (found := [v for v in row[1] if v is not None]) else ""
            ),
        }
        parts.append(table(by_class, known))
    elif len(of.classes) > 1 and all(run.columns for run in of.runs):
        what, measure = "label", Measure()
        if of.task == "values":
            what, measure = "value", Measure("absolute error", is_share=False)
        shown_column = report.text_of(measure)
        by_column: dict[str, Callable[[str], str]] = {
            what: lambda name: name,
            measure.heading: lambda name: shown_column([run.columns[name] for run in of.runs]),
        }
        parts.append(table(of.classes, by_column))
    clients = sorted(_clients(of), key=lambda one: of.score.rank(float(np.mean(_scores(one)))))
    if clients:
        more = f" ({_MOST_LINES} of {len(clients)})" if len(clients) > _MOST_LINES else ""
        by_client = {
            f"client, the worst first{more}": lambda entries: entries[0].client,
            # Each seed may deal another domain to a client.
            "domain": lambda entries: " or ".join(dict.fromkeys(e.domain for e in entries)),
            **counted,
        }
        parts.append(table(clients[:_MOST_LINES], by_client))
    if 0 < len(counts) <= _MOST_LINES:
        numbers = [(name, lambda row, at=at: row[1][at]) for at, name in enumerate(of.classes)]
        rows = zip(of.classes, counts, strict=True)
        parts.append(table(rows, [("is, taken for", lambda row: row[0]), *numbers]))
    return "\n\n".join(parts)


def _confusion(of: Evaluated) -> np.ndarray:
    """[K, K] the confusions of all seeds together."""
    return np.sum([run.confusion for run in of.runs], 0)


def draw(path: Path, of: Evaluated, title: str, found: Sequence[Predicted] = ()) -> None:
    """Draws the confusions, or predictions of values, and the scores by domain, class and client.

    A bar is a mean, and a dot a seed. Many clients are drawn as one line through all of them, with
    a band. The title says so.

    found: the predictions, for values.
    """
    domains, clients, measure = _domains(of), _clients(of), of.score
    has_confusion = len(_confusion(of)) > 0
    is_accuracy = has_confusion and measure == ACCURACY
    by_class = np.array(_recalls(of), float).tolist() if is_accuracy else []
    groups = [
        ("domain", list(domains), [_scores(entries) for entries in domains.values()]),
        ("class", list(of.classes) if is_accuracy else [], by_class),
        (
            "client",
            [str(entries[0].client) for entries in clients],
            [_scores(entries) for entries in clients],
        ),
    ]
    groups = [group for group in groups if group[1]]
    has_line = len(clients) > run_figures.MOST_DOTS
    has_left = has_confusion or (of.task == "values" and found)
    width = 12 if has_left else 6
    figure = Figure(figsize=(width, 2.6 * len(groups) + 0.6), layout="constrained")
    grid = figure.add_gridspec(len(groups), 2 if has_left else 1)
    for row, (what, names, values) in enumerate(groups):
        axis = figure.add_subplot(grid[row, -1])
        if what == "client" and has_line:
            served = [{e.client: e.score for e in run.clients} for run in of.runs]
            of_seeds = [[run.get(int(name), np.nan) for name in names] for run in served]
            run_figures.draw_quantiles(axis, measure.factor * np.array(of_seeds), 0)
            first = "worst" if measure.higher_is_better else "best"
            what = f"clients, the {first} first, %"
        else:
            at = np.arange(len(names))
            factor = measure.factor
            means = [factor * np.mean([v for v in some if v == v] or [0]) for some in values]
            axis.bar(at, means, color="0.8")
            for x, some in zip(at, values, strict=True):
                axis.plot([x] * len(some), factor * np.array(some), "o", ms=3, color="C0")
            figures.name_x(axis, names, 5.2)
        axis.set(xlabel=what, ylabel=report.heading_of(measure))
        if measure.is_share:
            axis.set_ylim(0, 102)
    if has_confusion:
        _draw_confusion(figure, figure.add_subplot(grid[:, 0]), of)
    elif of.task == "values" and found:
        _draw_values(figure.add_subplot(grid[:, 0]), found[0], of.classes[0])
    told = _marks(len(of.runs), has_line, len(_confusion(of)))
    figures.entitle(figure, "\n".join([title, *told]))
    figures.save(figure, path)


def _marks(num_seeds: int, has_line: bool, num_classes: int) -> list[str]:
    """What the marks of a picture mean, in at most one line. num_classes: of the matrix, or 0."""
    parts = []
    if num_seeds > 1:
        parts.append(f"bar: mean over {num_seeds} seeds, dot: a seed")
        parts += ["line and band: mean and standard deviation"] if has_line else []
    if num_classes:
        what = "numbers: examples" if num_classes <= _MOST_LINES else "matrix: examples"
        parts.append(f"{what}{', all seeds' * (num_seeds > 1)}")
    return ["; ".join(parts)] if parts else []


def _draw_values(axis: Axes, of: Predicted, name: str) -> None:
    """Draws the predictions of the first value for examples that no client holds."""
    outputs, y = predictions.of_new_clients(of)
    some = slice(None, None, -(-len(y) // _MOST_POINTS))
    truth, predicted = y.reshape(len(y), -1)[some, 0], outputs[some, 0]
    axis.plot(truth, predicted, "o", ms=3, alpha=0.5)
    ends = [min(truth.min(), predicted.min()), max(truth.max(), predicted.max())]
    axis.plot(ends, ends, color="0.6", lw=0.8)
    title = f"seed {of.seed}, examples of no client"
    axis.set(xlabel=figures.literal(name), ylabel="prediction", title=title)


def _draw_confusion(figure: Figure, axis: Axes, of: Evaluated) -> None:
    counts = _confusion(of)
    share = 100 * counts / np.maximum(counts.sum(1, keepdims=True), 1)
    picture = axis.imshow(share, cmap="Blues", vmin=0, vmax=100)
    figure.colorbar(picture, ax=axis, label="of the class, %", shrink=0.8)
    figures.name_x(axis, of.classes, 4.0)
    figures.name_y(axis, of.classes, 4.0)
    axis.set(xlabel="taken for", ylabel="is")
    if len(counts) <= _MOST_LINES:
        for is_, as_ in np.argwhere(counts):
            color = "white" if share[is_, as_] > 60 else "black"
            axis.text(as_, is_, str(counts[is_, as_]), ha="center", va="center", size=8, c=color)


def _name(options: Options) -> str:
    """The name of the files by default: another one for each choice of what they hold."""
    parts = ["evaluation", options.state]
    parts += [Path(options.dataset).stem] if options.dataset else []
    parts += [re.sub(r"[^\w.]", "_", metric) for metric in options.metrics]
    return "-".join(parts)


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
        named=options.outside,
        data_dir=options.data_dir,
    )
    out = check_picture("out", options.out or str(runs.path / f"{_name(options)}.png"))
    table_path = None
    if options.predictions:
        datasets = (runs.config.data.dataset, options.dataset)
        table_path = _check_predictions(options.predictions, datasets)
    scored, found, lacking = evaluate(runs, options)
    every = [str(each.round) for each in scored.runs]
    rounds = ", ".join(every if len(set(every)) > 1 else every[:1])
    held_out = runs.cell.held_out or "test split"
    title = f"{runs.cell.label}, held out: {held_out}, after round {rounds}"
    title += f"; on {options.dataset}" if options.dataset else ""
    out.parent.mkdir(parents=True, exist_ok=True)
    draw(out, scored, title, found)
    files.write_json(out.with_suffix(".json"), scored)
    where = f"Picture: {out}. Numbers: {out.with_suffix('.json')}."
    if table_path is not None:
        table_path.parent.mkdir(parents=True, exist_ok=True)
        write_predictions(table_path, columns(found, scored.task, scored.classes))
        where += f" Predictions: {table_path}."
    return "\n".join([f"\n{title}\n\n{tables(scored)}\n", *lacking, where])


BINARY = command.of(run, Options, __doc__)

if __name__ == "__main__":
    command.main(BINARY)
