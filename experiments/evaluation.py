"""Scores of finished runs by domain, class and client, their pictures, and exported networks."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from sklearn.metrics import ConfusionMatrixDisplay, PredictionErrorDisplay, confusion_matrix

from fedjax_inv.checks import UsageError

from . import export, extraction, finished, outputs, predictions
from .assembly import data as data_sets
from .assembly import metrics
from .assembly.metrics import ACCURACY, Measure
from .errors import check_place, flag_error
from .finished import Runs
from .folder import files
from .outputs import OutputFile
from .predictions import RunPredictions, Slice
from .report import figures, forms, report, tables

_MOST = 20  # clients in the table, classes in the table of confusions, and bars in a picture
_MOST_DOMAINS = 6  # of other data, with columns in the table of cells
_MOST_POINTS = 3000  # in the picture of values


class EvaluationOptions(NamedTuple):
    """The flags of this command."""

    run: str
    state: str = "best"
    dataset: str = ""
    out: str = ""
    metrics: tuple[str, ...] = ()
    predictions: str = ""
    export: str = ""
    outside: tuple[str, ...] = ()  # the code of one's own that the command names


class CellScores(NamedTuple):
    """The scores of the selected runs of a cell."""

    kind: str  # of the targets
    classes: tuple[str, ...]  # K names
    measure: Measure
    # A row for each seed and each domain, class (label, value) and client: `by` and `name`
    rows: pd.DataFrame
    # [K, K] how many examples of each class (row) are predicted as each class (column), of those
    # that no client holds, all seeds together; None unless each output is of a class
    confusion: np.ndarray | None


def predict(runs: Runs, options: EvaluationOptions) -> tuple[dict[int, RunPredictions], list[str]]:
    """(the predictions of the selected runs that have the state, why others are left out)."""
    names = runs.data.dataset.classes
    metrics.check(options.metrics, runs.data.objective.kind)
    new = _new_parts(runs, options) if options.dataset else None
    found: dict[int, RunPredictions] = {}
    lacking = []
    for index in finished.chosen(runs):
        parts = predictions.own_parts(runs, index) if new is None else new
        try:
            run = predictions.predicted(runs, index, parts, is_new=new is not None)
        except UsageError as error:
            lacking.append(error)
            continue
        found[index] = run
        width = run.outputs.shape[1]
        for name in ("metrics", "predictions"):
            if getattr(options, name) and width != len(names):
                text = f"needs an output for each of {len(names)} targets, there are {width}"
                raise flag_error(name, getattr(options, name), text)
    if not found:
        raise lacking[0]
    return found, [f"Not evaluated: {error}." for error in lacking]


def _new_parts(runs: Runs, options: EvaluationOptions) -> list[Slice]:
    """The examples of --dataset, as the networks of runs take them."""
    asked = data_sets.like(runs.config.data, options.dataset)
    extraction.check_alike(runs.config.data.dataset, options.dataset)
    read = data_sets.load(asked, like=runs.data.dataset)
    adapts = runs.config.evaluation.unseen_norms != "mean"
    where = f"--dataset={options.dataset}"
    parts = predictions.new_parts(where, read, runs.data.seen, adapts=adapts)
    if body := runs.data.frozen:
        parts = [part._replace(x=body.outputs(part.x)) for part in parts]
    return parts


def held_out(runs: Runs) -> str:
    """The held-out domain of a cell in words."""
    return runs.cell.held_out or "test split"


def scored(runs: Runs, found: Sequence[RunPredictions], asked: Sequence[str] = ()) -> CellScores:
    """The scores of predictions. asked: names of metrics."""
    task = runs.data.objective
    classes = runs.data.dataset.classes
    rows = [row for run in found for row in predictions.rows(run, task, classes, asked)]
    outputs, y = map(np.concatenate, zip(*(run.of_test() for run in found), strict=True))
    matrix = None
    if task.kind == "classes" and outputs.shape[1] == len(classes):
        matrix = confusion_matrix(y, outputs.argmax(1), labels=range(len(classes)))
    return CellScores(task.kind, classes, task.measure, pd.DataFrame(rows), matrix)


def printed(scores: CellScores) -> str:
    """The scores as tables: means and standard deviations over the seeds."""
    column, of_column = predictions.COLUMNS[scores.kind]
    there = set(scores.rows["by"])
    parts = [_table(scores, "domain", scores.measure, "domain", "split")]
    if len(scores.classes) > 1 and column in there:
        parts.append(_table(scores, column, of_column, column))
    if "client" in there:
        heading = "client, the worst first"
        parts.append(_table(scores, "client", scores.measure, heading, "domain"))
    if scores.confusion is not None and len(scores.classes) <= _MOST:
        counts = pd.DataFrame(scores.confusion, columns=[*scores.classes])
        counts.insert(0, "is, taken for", scores.classes)
        parts.append(counts)
    return forms.printed(parts)


def _table(
    scores: CellScores, by: str, measure: Measure, heading: str, about: str = ""
) -> pd.DataFrame:
    """The scores by one column of the frame. about: another column that is shown."""
    rows = scores.rows[scores.rows["by"] == by]
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


def draw(path: Path, scores: CellScores, title: str, found: Sequence[RunPredictions] = ()) -> None:
    """Draws the confusions, or predictions of values, and the scores by domain, class and client.

    found: the predictions, for values.
    """
    kinds = [by for by in ("domain", "class", "client") if by in set(scores.rows["by"])]
    has_left = scores.confusion is not None or (scores.kind == "values" and len(found) > 0)
    figure = figures.new(12 if has_left else 6, 2.6 * len(kinds) + 0.6)
    grid = figure.add_gridspec(len(kinds), 2 if has_left else 1)
    for row, by in enumerate(kinds):
        measure = ACCURACY if by == "class" else scores.measure
        mine = scores.rows[scores.rows["by"] == by]
        _draw_scores(figure.add_subplot(grid[row, -1]), mine, "name", by, measure)
    if scores.confusion is not None:
        _draw_confusion(figure.add_subplot(grid[:, 0]), scores.confusion, scores.classes)
    elif has_left:
        _draw_values(figure.add_subplot(grid[:, 0]), found[0], scores.classes[0])
    _save(figure, path, title, scores.rows)


def _save(figure: Figure, path: Path, title: str, rows: pd.DataFrame) -> None:
    marks = "\nbar or line: mean over seeds, dot: a seed"
    figures.entitle(figure, title + marks * (rows["seed"].nunique() > 1))
    figures.save(figure, path, creator=outputs.mark("evaluate"))


def _draw_scores(axis: Axes, rows: pd.DataFrame, name: str, by: str, measure: Measure) -> None:
    """Draws a bar for each name, and a dot for each seed; many bars are one line, the worst first.

    name: the column of names. by: what they are.
    """
    scores = measure.factor * rows.pivot(index=name, columns="seed", values="score")
    scores = scores.loc[rows[name].unique()]
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


def _draw_values(axis: Axes, run: RunPredictions, name: str) -> None:
    """Draws the predictions of the first value for examples that no client holds."""
    outputs, y = run.of_test()
    pairs = y.reshape(len(y), -1)[:, 0], outputs[:, 0]
    how = {"kind": "actual_vs_predicted", "subsample": _MOST_POINTS, "random_state": 0, "ax": axis}
    PredictionErrorDisplay.from_predictions(*pairs, **how)
    title = f"seed {run.seed}, examples of no client"
    axis.set(xlabel="prediction", ylabel=figures.literal(name), title=title)


def _draw_confusion(axis: Axes, counts: np.ndarray, classes: Sequence[str]) -> None:
    share = 100 * counts / np.maximum(counts.sum(1, keepdims=True), 1)
    is_small = len(counts) <= _MOST
    shown = ConfusionMatrixDisplay(share)
    how = {"include_values": is_small, "colorbar": not is_small, "values_format": ".0f"}
    shown.plot(ax=axis, cmap="Blues", **how)
    figures.name_x(axis, classes, 4.0)
    figures.name_y(axis, classes, 4.0)
    axis.set(xlabel="taken for", ylabel="is", title="% of the class, all seeds")


class CellEvaluation(NamedTuple):
    """The evaluation of a cell."""

    about: dict[str, str]  # what tells it from the other cells of its folder
    title: str
    scores: CellScores
    found: list[RunPredictions]  # of each selected run
    served: str | None  # `Assembly.served`
    norms: list[str]  # a line on BatchNorm, if it acts

    @property
    def rounds(self) -> str:
        """The rounds after which the networks are evaluated."""
        return ", ".join(dict.fromkeys(str(run.round) for run in self.found))

    def frame(self, rows: pd.DataFrame) -> pd.DataFrame:
        """Rows about this cell, with the columns that tell it from others."""
        for at, (name, value) in enumerate(self.about.items()):
            rows.insert(at, name, value)
        return rows


_SPLITS = {
    "unseen_domain": "unseen domain",
    "unseen_clients": "clients never seen",
    "known_domains": "known domains",
}


def summary(evaluations: Sequence[CellEvaluation], options: EvaluationOptions) -> pd.DataFrame:
    """A row for each cell: its state and round, its scores by split, and metrics of the test.

    The score of a split is that of its domains together, as `Measure.over_domains` has it. Of other
    data each domain has a column, too, if there are few.
    """
    lines = []
    for each in evaluations:
        measure = each.scores.measure
        rows = each.scores.rows
        rows = rows[rows["by"] == "domain"]
        line = {"run": each.about["run"], "held out": each.about["held_out"]}
        line |= {"state": options.state, "round": each.rounds}
        text = forms.text_of(measure)
        new = rows[rows["split"] == "new"].groupby("domain", sort=False)
        if 1 < len(new) <= _MOST_DOMAINS:
            line |= {measure.heading(f", {name}"): text([*of["score"]]) for name, of in new}
        for split, of_split in rows.groupby("split", sort=False):
            of_seeds = of_split.groupby("seed", sort=False)
            name = _SPLITS.get(split, split)
            values = of_seeds["score"].agg(measure.over_domains)
            line[measure.heading(f", {name}")] = text([*values])
        tests = rows[rows["split"].isin(["test", "new"])].groupby("seed", sort=False)
        form = forms.known(lambda values: forms.spread(values, ".4g"))
        line |= {name: form(tests[name].mean()) for name in options.metrics}
        lines.append(line)
    return pd.DataFrame(lines)


def draw_cells(path: Path, rows: pd.DataFrame, title: str, measure: Measure) -> None:
    """Draws the score of each cell on the test or on other data."""
    is_test = (rows["by"] == "domain") & rows["split"].isin(["test", "new"])
    by_run = rows[is_test].groupby(["run", "seed"], sort=False)["score"]
    scores = by_run.agg(measure.over_domains).reset_index()
    figure = figures.new(6, 3.2)
    _draw_scores(figure.add_subplot(), scores, "run", "run", measure)
    _save(figure, path, title, scores)


class EvaluationFiles(NamedTuple):
    """The files that this command writes."""

    picture: Path
    numbers: Path
    predictions: Path | None
    networks: Path | None  # their folder


def _files(options: EvaluationOptions, folder: Path, cells: Sequence[Runs]) -> EvaluationFiles:
    """The files that this command will write; raises UsageError if one must not be written."""
    parts = ["evaluation", options.state]
    parts += [Path(options.dataset).stem] if options.dataset else []
    parts += [re.sub(r"[^\w.]", "_", metric) for metric in options.metrics]
    picture = outputs.of_picture("out", options.out or str(folder / f"{'-'.join(parts)}.png"))
    numbers = OutputFile(picture[0].flag, picture[0].path.with_suffix(".csv"))
    table = None
    networks = None
    every = [*picture, numbers]
    if options.predictions:
        table = outputs.of_table("predictions", options.predictions)
        every.append(table)
    if options.export:
        networks = Path(os.path.expanduser(options.export))
        check_place("export", networks, is_folder=True)
        for runs in cells:
            place = networks / runs.path.relative_to(folder)
            for index in finished.chosen(runs):
                paths = export.files_of(runs, index, place)
                every += [OutputFile(f"--export={options.export}", path) for path in paths]
    datasets = options.dataset, *(runs.config.data.dataset for runs in cells)
    outputs.check("evaluate", every, outputs.of_data(*datasets))
    return EvaluationFiles(picture[0].path, numbers.path, table.path if table else None, networks)


def run(options: EvaluationOptions) -> str:
    """Writes the picture, the numbers and what else is asked for; returns the text to print.

    The cells of a folder give one table.
    """
    if not options.run:
        raise UsageError("--run=", ..., "must be the folder of a finished run, or of several")
    folder = Path(os.path.expanduser(options.run))
    cells, errors = finished.open_cells("run", folder, options.state, named=options.outside)
    is_alone = cells[0].path == folder
    to = _files(options, folder, cells)
    lacking = [f"Not evaluated: {error}." for error in errors]
    evaluations = []
    written = []
    while cells:
        runs = cells.pop(0)  # so that data end with the last cell that needs them
        try:
            found, others = predict(runs, options)
        except UsageError as error:
            errors.append(error)
            lacking.append(f"Not evaluated: {error}.")
            continue
        lacking += others
        about = {}
        if not is_alone:
            name = str(runs.path.relative_to(folder))
            about = {"run": name, "algorithm": runs.cell.label, "held_out": held_out(runs)}
        scores = scored(runs, [*found.values()], options.metrics)
        title = f"{runs.cell.label}, held out: {held_out(runs)}"
        served = runs.data.served(runs.cell.held_out)
        rule = "" if options.dataset and served else served
        norms = report.unseen_norms(runs.data, is_new=bool(options.dataset))
        evaluations.append(CellEvaluation(about, title, scores, [*found.values()], rule, norms))
        if to.networks:
            place = to.networks / runs.path.relative_to(folder)
            written += [export.export(runs, index, place) for index in found]
    if not evaluations:
        raise errors[0]
    to.picture.parent.mkdir(parents=True, exist_ok=True)
    rows = pd.concat([each.frame(each.scores.rows) for each in evaluations])
    files.write(to.numbers, rows.to_csv(index=False))
    on = f"; on {options.dataset}" if options.dataset else ""
    if is_alone:
        (one,) = evaluations
        title = f"{one.title}, state {options.state}, after round {one.rounds}{on}"
        text = printed(one.scores)
        draw(to.picture, one.scores, title, one.found)
    else:
        title = f"{folder.name}{on}"
        text = forms.markdown(summary(evaluations, options))
        draw_cells(to.picture, rows, title, evaluations[0].scores.measure)
    text = f"\n{title}\n\n{text}\n"
    where = f"Picture: {to.picture}. Numbers: {to.numbers}."
    if to.predictions:
        to.predictions.parent.mkdir(parents=True, exist_ok=True)
        frames = [
            each.frame(predictions.frame(each.found, each.scores.kind, each.scores.classes))
            for each in evaluations
        ]
        files.write(to.predictions, pd.concat(frames).to_csv(index=False))
        where += f" Predictions: {to.predictions}."
    if written:
        where += f" Networks: {', '.join(map(str, written))}."
    networks = tables.served([(each.title, each.served) for each in evaluations])
    networks += dict.fromkeys(line for each in evaluations for line in each.norms)
    return "\n".join([text, *networks, *lacking, where])
