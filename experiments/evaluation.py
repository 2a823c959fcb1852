"""Scores of finished runs by domain, class and client, their pictures, and exported networks."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from sklearn.metrics import ConfusionMatrixDisplay, PredictionErrorDisplay, confusion_matrix

from fedjax_inv.checks import UsageError
from fedjax_inv.data import sources

from . import export, extraction, finished, predictions
from .assembly import data as data_sets
from .assembly import metrics
from .assembly.metrics import ACCURACY, Measure
from .errors import check_picture, check_place, flag_error
from .finished import Runs
from .folder import files
from .predictions import Predicted
from .report import figures, forms

_MOST = 20  # clients in the table, classes in the table of confusions, and bars in a picture
_MOST_POINTS = 3000  # in the picture of values


class Options(NamedTuple):
    """The flags of this command."""

    run: str
    state: str = "best"
    dataset: str = ""
    out: str = ""
    metrics: tuple[str, ...] = ()
    predictions: str = ""
    export: str = ""
    outside: tuple[str, ...] = ()  # the code of one's own that the command names


class Evaluated(NamedTuple):
    """The scores of the selected runs of a folder."""

    kind: str  # of the targets
    classes: tuple[str, ...]  # K names
    score: Measure
    # A row for each seed and each domain, class (label, value) and client: `by` and `name`
    scores: pd.DataFrame
    # [K, K] how many examples of each class (row) are predicted as each class (column), of those
    # that no client holds, all seeds together; None unless each output is of a class
    confusion: np.ndarray | None


def evaluate(runs: Runs, options: Options) -> tuple[list[int], list[Predicted], list[str]]:
    """(the selected runs that have the state, their predictions, why others are left out)."""
    old = runs.data.dataset
    metrics.check(options.metrics, runs.data.objective.kind)
    if options.dataset:
        asked = data_sets.like(runs.config.data, options.dataset)
        extraction.check_alike(runs.config.data.dataset, options.dataset)
        read = data_sets.load(asked, like=old)
        new = predictions.new_parts(f"--dataset={options.dataset}", read, runs.data.seen)
        if body := runs.data.frozen:
            new = [part._replace(x=body.outputs(part.x)) for part in new]
    which = finished.chosen(runs)
    algorithm = runs.algorithm(which[0])  # the same for all of them: they differ in their seed
    found: dict[int, Predicted] = {}
    lacking = []
    for index in which:
        one = runs.run(index, options.state)
        parts = new if options.dataset else predictions.own_parts(runs, one.run.seed)
        try:
            of = predictions.predicted(one, algorithm, parts, is_new=bool(options.dataset))
        except UsageError as error:
            lacking.append(error)
            continue
        found[index] = of
        width = of.outputs.shape[1]
        for name in ("metrics", "predictions"):
            if getattr(options, name) and width != len(old.classes):
                text = f"needs an output for each of {len(old.classes)} targets, there are {width}"
                raise flag_error(name, getattr(options, name), text)
    if not found:
        raise lacking[0]
    return [*found], [*found.values()], [f"Not evaluated: {error}." for error in lacking]


def scored(runs: Runs, found: Sequence[Predicted], asked: Sequence[str] = ()) -> Evaluated:
    """The scores of predictions. asked: names of metrics."""
    task, classes = runs.data.objective, runs.data.dataset.classes
    rows = [row for of in found for row in predictions.rows(of, task, classes, asked)]
    outputs, y = map(np.concatenate, zip(*(of.of_test() for of in found), strict=True))
    matrix = None
    if task.kind == "classes" and outputs.shape[1] == len(classes):
        matrix = confusion_matrix(y, outputs.argmax(1), labels=range(len(classes)))
    return Evaluated(task.kind, classes, task.measure, pd.DataFrame(rows), matrix)


def printed(of: Evaluated) -> str:
    """The scores as tables: means and standard deviations over the seeds."""
    column, of_column = predictions.COLUMNS[of.kind]
    there = set(of.scores["by"])
    parts = [_table(of, "domain", of.score, "domain", "split")]
    if len(of.classes) > 1 and column in there:
        parts.append(_table(of, column, of_column, column))
    if "client" in there:
        parts.append(_table(of, "client", of.score, "client, the worst first", "domain"))
    if of.confusion is not None and len(of.classes) <= _MOST:
        counts = pd.DataFrame(of.confusion, columns=[*of.classes])
        counts.insert(0, "is, taken for", of.classes)
        parts.append(counts)
    return forms.printed(parts)


def _table(of: Evaluated, by: str, measure: Measure, heading: str, about: str = "") -> pd.DataFrame:
    """The scores by one column of the frame. about: another column that is shown."""
    rows = of.scores[of.scores["by"] == by]
    score = {measure.heading(): ("score", forms.known(forms.text_of(measure)))}
    columns: dict[str, Any] = score
    if about:  # each seed may deal another domain to a client
        columns = {about: (about, lambda each: " or ".join(each.unique()))}
        columns["examples"] = "examples", forms.known(lambda each: f"{np.mean(each):g}")
        columns |= score
        columns["loss"] = "loss", forms.known(lambda each: f"{np.mean(each):.3f}")
        form = forms.known(lambda each: forms.spread(each, ".4g"))
        asked = rows.columns[list(rows.columns).index("loss") + 1 :]
        columns |= {name: (name, form) for name in asked}
    table = rows.groupby("name", sort=False).agg(**columns)
    if by == "client":
        means = rows.groupby("name", sort=False)["score"].mean()
        worst = means.sort_values(ascending=measure.higher_is_better, kind="stable")
        table = table.loc[worst.index]
        heading += f" ({_MOST} of {len(table)})" if len(table) > _MOST else ""
        table = table[:_MOST]
    return table.rename_axis(heading).reset_index()


def draw(path: Path, of: Evaluated, title: str, found: Sequence[Predicted] = ()) -> None:
    """Draws the confusions, or predictions of values, and the scores by domain, class and client.

    Many bars are one line, the worst first.

    found: the predictions, for values.
    """
    kinds = [by for by in ("domain", "class", "client") if by in set(of.scores["by"])]
    has_left = of.confusion is not None or (of.kind == "values" and len(found) > 0)
    figure = figures.new(12 if has_left else 6, 2.6 * len(kinds) + 0.6)
    grid = figure.add_gridspec(len(kinds), 2 if has_left else 1)
    for row, by in enumerate(kinds):
        measure = ACCURACY if by == "class" else of.score
        axis = figure.add_subplot(grid[row, -1])
        mine = of.scores[of.scores["by"] == by]
        scores = measure.factor * mine.pivot(index="name", columns="seed", values="score")
        scores = scores.loc[mine["name"].unique()]
        axis.set(xlabel=by, ylabel=measure.heading())
        if len(scores) > _MOST:
            means = sorted(scores.mean(axis=1).dropna(), key=measure.rank)
            axis.plot(np.arange(len(means)), means)
            axis.set_xlabel(f"{len(means)} by score, the worst first: {by}")
        else:
            at = np.arange(len(scores))
            axis.bar(at, scores.mean(axis=1), color="0.8")
            axis.plot(at, scores.to_numpy(), "o", ms=3, color="C0")
            figures.name_x(axis, [*scores.index], 5.2)
        if measure.is_share:
            axis.set_ylim(0, 102)
    if of.confusion is not None:
        _draw_confusion(figure.add_subplot(grid[:, 0]), of.confusion, of.classes)
    elif has_left:
        _draw_values(figure.add_subplot(grid[:, 0]), found[0], of.classes[0])
    marks = "\nbar or line: mean over seeds, dot: a seed"
    figures.entitle(figure, title + marks * (of.scores["seed"].nunique() > 1))
    figures.save(figure, path)


def _draw_values(axis: Axes, of: Predicted, name: str) -> None:
    """Draws the predictions of the first value for examples that no client holds."""
    outputs, y = of.of_test()
    pairs = y.reshape(len(y), -1)[:, 0], outputs[:, 0]
    how = {"kind": "actual_vs_predicted", "subsample": _MOST_POINTS, "random_state": 0, "ax": axis}
    PredictionErrorDisplay.from_predictions(*pairs, **how)
    title = f"seed {of.seed}, examples of no client"
    axis.set(xlabel="prediction", ylabel=figures.literal(name), title=title)


def _draw_confusion(axis: Axes, counts: np.ndarray, classes: Sequence[str]) -> None:
    share = 100 * counts / np.maximum(counts.sum(1, keepdims=True), 1)
    is_small, shown = len(counts) <= _MOST, ConfusionMatrixDisplay(share)
    how = {"include_values": is_small, "colorbar": not is_small, "values_format": ".0f"}
    shown.plot(ax=axis, cmap="Blues", **how)
    figures.name_x(axis, classes, 4.0)
    figures.name_y(axis, classes, 4.0)
    axis.set(xlabel="taken for", ylabel="is", title="% of the class, all seeds")


def _predictions_path(options: Options, runs: Runs) -> Path:
    """The path of --predictions."""
    path = Path(os.path.expanduser(options.predictions))
    if path.suffix != ".csv":
        raise flag_error("predictions", options.predictions, "must end in .csv")
    check_place("predictions", path)
    for dataset in filter(None, (runs.config.data.dataset, options.dataset)):
        if path.resolve() == sources.path_of(dataset).resolve():
            text = f"must be another file than --dataset={dataset}"
            raise flag_error("predictions", options.predictions, text)
    return path


def run(options: Options) -> str:
    """Writes the picture, the numbers and what else is asked for; returns the text to print."""
    if not options.run:
        raise UsageError("--run=", ..., "must be the folder of a finished run")
    runs = finished.open("run", Path(options.run), named=options.outside)
    parts = ["evaluation", options.state]
    parts += [Path(options.dataset).stem] if options.dataset else []
    parts += [re.sub(r"[^\w.]", "_", metric) for metric in options.metrics]
    out = check_picture("out", options.out or str(runs.path / f"{'-'.join(parts)}.png"))
    to = _predictions_path(options, runs) if options.predictions else None
    folder = Path(os.path.expanduser(options.export)) if options.export else None
    if folder:
        check_place("export", folder, is_folder=True)
    which, found, lacking = evaluate(runs, options)
    of = scored(runs, found, options.metrics)
    rounds = ", ".join(dict.fromkeys(str(each.round) for each in found))
    held_out = runs.cell.held_out or "test split"
    title = f"{runs.cell.label}, held out: {held_out}, after round {rounds}"
    title += f"; on {options.dataset}" if options.dataset else ""
    out.parent.mkdir(parents=True, exist_ok=True)
    draw(out, of, title, found)
    numbers = out.with_suffix(".csv")
    files.write(numbers, of.scores.to_csv(index=False))
    where = f"Picture: {out}. Numbers: {numbers}."
    if to:
        to.parent.mkdir(parents=True, exist_ok=True)
        files.write(to, predictions.frame(found, of.kind, of.classes).to_csv(index=False))
        where += f" Predictions: {to}."
    if folder:
        written = [export.export(runs.run(index, options.state), folder) for index in which]
        where += f" Networks: {', '.join(map(str, written))}."
    return "\n".join([f"\n{title}\n\n{printed(of)}\n", *lacking, where])
