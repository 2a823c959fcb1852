"""What studies share: rows that run, our columns beside the paper's numbers, and the files.

A paper is a file of this folder with its studies. Each row has its own folder of runs, and finished
runs stay there. So a study can be interrupted, and the studies of a paper share runs.
"""

import importlib
import itertools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pandas as pd
from absl import flags

from .. import command_line, sheet
from ..assembly import machine
from ..config import Participation, Partition
from ..errors import check_known
from ..folder import divergence, files, records, selection
from ..report import forms, report, runs_csv, tables
from ..report.differences import ScoreColumn, Scores
from . import drawings, row_runs
from .row_runs import CellResult, RowResult, configs, overrides, run, with_labels
from .rows import Number, Row, RowsFile, read, read_numbers

_HERE = Path(__file__).parent
# (path of the picture, data set, rows) -> the line to print about the picture
Draw = Callable[[Path, str, Sequence[RowResult]], str]
Cells = dict[str, str]  # heading -> text, of a row of a table
Evaluation: TypeAlias = Any  # a `records.Line`, or at a stop a `records.StopRecord`
ByHeading = dict[str, Scores]  # the scores of a row by seed, for columns of its table


class Study(NamedTuple):
    """A table of a paper, and its figures."""

    rows: Callable[[str], Sequence[Row]]  # of a data set
    columns: Callable[[RowResult], Cells] = lambda result: {}  # our results
    numbers: Callable[[RowResult, str], Cells] = lambda result, data: {}  # the paper's
    figures: Mapping[str, Draw] = {}  # by what follows the study in the picture's name
    compared: Callable[[RowResult], ByHeading] = lambda result: {}  # if its rows are methods
    data: Sequence[str] = ()  # the data sets that it takes; () for those of the paper
    draws_rows: bool = True  # whether each row draws its curves and its partition
    caption: str = ""  # what its columns need besides the paper's caption
    file: RowsFile | None = None  # of its rows, for a table as of `compare`


class StudyOptions(NamedTuple):
    """The flags of a paper's binary."""

    study: str
    rows: tuple[str, ...]  # labels; () for all rows
    data: tuple[str, ...]
    folder: Path
    overrides: tuple[str, ...]  # flags of `train`, for all rows
    own: Any = None  # the record of the paper's own flags


class Paper(NamedTuple):
    """The studies of a paper."""

    name: str
    data: Sequence[str]  # names of data sets; a study's default is the first that it takes
    studies: Mapping[str, Study]  # by name; the first is the default
    caption: str
    diverged: Callable[[RowResult], Cells] = lambda result: {}  # of a row that is not complete
    optimum: Mapping[str, str] = {}  # the last row of the tables, "optimal"
    # (data set, options) -> the rows to run; by default those of --rows
    select: Callable[[str, StudyOptions], list[Row]] | None = None
    words: tuple[str, ...] = ()  # of its command; by default "paper" and its name
    # (folder and beginning of the files' names, rows, options) -> the text to print; by default
    # `write_tables`
    write: Callable[[Path, list[RowResult], StudyOptions], str] | None = None


def paper(name: str) -> Paper:
    """A paper: that of a module of this folder, or else of the files of rows with its name."""
    if (_HERE / f"{name}.py").exists():
        module: Any = importlib.import_module(f"{__package__}.{name}")
        paper: Paper = module.PAPER
        return paper
    files_of_rows = sorted(_HERE.glob(f"{name}_*.toml"))
    studies = {path.stem.removeprefix(f"{name}_"): of_file(path.stem) for path in files_of_rows}
    return Paper(name, (), studies, caption="")


def of_file(name: str) -> Study:
    """The study of a file of rows in this folder."""
    file = read(_HERE / f"{name}.toml")
    return Study(file.rows.__getitem__, data=tuple(file.rows), draws_rows=False, file=file)


def numbers_of(paper: str) -> list[Number]:
    """The numbers of a paper, from numbers/PAPER.csv."""
    return read_numbers(_HERE / "numbers" / f"{paper}.csv")


def options(paper: Paper, own: Any = None) -> StudyOptions:
    """The options of this process's command line. own: the paper's own flags."""
    found = flags.FLAGS
    chosen = found.study or next(iter(paper.studies))
    check_known("study", chosen, paper.studies)
    taken = paper.studies[chosen].data or paper.data
    for data in found.data:
        check_known("data", data, taken)
    folder = Path(os.path.expanduser(found.run_dir or f"runs/{paper.name}"))
    return StudyOptions(chosen, found.rows, found.data or (taken[0],), folder, overrides(), own)


def rows_of(paper: Paper, data: str, options: StudyOptions) -> list[Row]:
    """The rows of a study on a data set that the flags select."""
    if paper.select:
        return paper.select(data, options)
    return with_labels(paper.studies[options.study].rows(data), options.rows)


def line(paper: Paper, study: Study, data: str, result: RowResult) -> Cells:
    """A line of a study's table: our results and the paper's numbers."""
    columns = study.columns if result.is_complete else paper.diverged
    runs = [run for cell in result.cells for run in cell.result.runs]
    has_diverged = any(run.diverged for run in runs)
    count = {"runs diverged": divergence.count(runs)} if has_diverged else {}
    return {**columns(result), **count, **study.numbers(result, data)}


def table(paper: Paper, study: Study, data: str, results: Sequence[RowResult]) -> tables.Main:
    """The table of a study, with a line per row; what is best in a column of scores is marked."""
    columns = columns_of(study, results)
    lines = {result.row.label: line(paper, study, data, result) for result in results}
    by_label = {result.row.label: result for result in results}
    for column, (label, texts) in itertools.product(columns, lines.items()):
        if texts.get(column.heading):
            text = tables.marks(column).get(label, "{}").format(texts[column.heading])
            cells = by_label[label].cells
            scores = column.scores.get(label, {})
            is_one = len(cells) == 1 and tables.is_constant(cells[0].constant, scores.items())
            texts[column.heading] = text + tables.ONE * is_one
    _add_constant(lines, results)
    lines |= {"optimal": dict(paper.optimum)} if paper.optimum else {}
    # A row that is not complete has few columns, in another order.
    complete = [lines[label] for label, result in by_label.items() if result.is_complete]
    headings = dict.fromkeys(name for texts in [*complete, *lines.values()] for name in texts)
    shown = [
        (name, {label: texts.get(name, "") for label, texts in lines.items()}) for name in headings
    ]
    compared = {column.heading for column in columns}
    of_paper = [each for each in shown if each[0] in compared or each[0].startswith("paper: ")]
    latex = [tables.table(data, lines, each) for each in (of_paper, shown) if each]
    return tables.Main(tables.table(data, lines, shown), columns, latex)


def _add_constant(lines: dict[str, Cells], results: Sequence[RowResult]) -> None:
    """Adds a line for the most frequent class, or where the rows differ in it a column."""
    texts = {}
    for result in results:
        of_cells = [[one for one, _ in cell.constant.values()] for cell in result.cells]
        text = forms.percent(np.mean(of_cells, axis=0)) if all(of_cells) else ""
        texts[result.row.label] = text
    headings = [name for cells in lines.values() for name in cells if name.startswith("test")]
    if headings and len({*texts.values()}) == 1:
        text = min(texts.values())
        lines |= {tables.CONSTANT: {headings[0]: text}} if text else {}
    elif any(texts.values()):
        for label, cells in lines.items():
            cells[f"{tables.CONSTANT}, %"] = texts[label]


def columns_of(study: Study, results: Sequence[RowResult]) -> list[ScoreColumn]:
    """The scores of the rows, by the headings of the table, if the rows of a study are compared.

    A row in which a seed of each setting diverged has the scores of the other seeds.
    """
    by_row: dict[str, ByHeading] = {}
    for result in results:
        cells = [_surviving(result, cell) for cell in result.cells]
        if all(cell.runs for cell in cells):
            seeds = {run.seed: np.nan for cell in cells for run in cell.result.runs}
            found = study.compared(result._replace(cells=cells))
            by_row[result.row.label] = {name: seeds | dict(of) for name, of in found.items()}
    headings = dict.fromkeys(heading for of in by_row.values() for heading in of)
    return [
        ScoreColumn(name, pd.DataFrame({row: of[name] for row, of in by_row.items() if name in of}))
        for name in headings
    ]


def _surviving(result: RowResult, cell: CellResult) -> CellResult:
    """A cell, with the runs that did not diverge if nothing was selected."""
    one = selection.choose(
        result.row.label, cell.result, result.config.evaluation.select, surviving=True
    )
    return cell if cell.runs or not one else cell._replace(runs=one.runs)


def scores_by_seed(
    headings: Mapping[str, str],
    served: Callable[[RowResult], Mapping[int, Any]] | None = None,
    *,
    has_last: bool = True,
) -> Callable[[RowResult], ByHeading]:
    """A function that gives the scores by which a study compares methods.

    headings: of the table -> the accuracy. served: the evaluation of each seed, by default the
    selected one. has_last: whether the test at the last round is compared, too.
    """

    def of_row(result: RowResult) -> ByHeading:
        selected = {run.seed: run.choice for run in result.only.runs}
        lines = (served(result) if served else selected).items()
        found: ByHeading = {
            name: {seed: getattr(line, key) for seed, line in lines}
            for name, key in headings.items()
        }
        if has_last:
            last = {run.seed: run.last.test_score for run in result.only.runs}
            found["test at the last, %"] = last
        return found

    return of_row


def run_all(paper: Paper, options: StudyOptions) -> str:
    """Runs a study on each data set, writes its tables and figures, and returns the tables."""
    study = paper.studies[options.study]
    todo = {}
    for data in options.data:
        rows = rows_of(paper, data, options)
        source = study.file.path if study.file else None
        todo[data] = rows, configs(rows, options.folder / data, options.overrides, source)
    machine.prepare(todo[options.data[0]][1][0].machine)
    # The table of some rows or columns must not overwrite that of all.
    is_part = bool(options.rows or getattr(options.own, "columns", ()))
    name = f"{options.study}_some" if is_part else options.study
    texts = []
    for data, (rows, chosen) in todo.items():
        results = run(rows, chosen, report.write if study.draws_rows else report.write_table)
        path = options.folder / data / name
        if study.file:
            texts.append(row_runs.write(path, study.file, data, results))
        elif paper.write:
            texts.append(paper.write(path, results, options))
        else:
            texts.append(write_tables(path, paper, study, data, results))
        files.write_json(path.with_name(f"{name}.json"), _origin(paper, options, data, results))
        for ending, draw in study.figures.items():
            texts.append(draw(path.with_name(f"{name}{ending}.png"), data, results))
    return "\n\n" + "\n\n".join([text for text in texts if text])


def write_tables(path: Path, paper: Paper, study: Study, data: str, rows: list[RowResult]) -> str:
    """Writes the tables of a study and the evaluations of its runs; returns the text to print.

    path: the folder and the beginning of the files' names.
    """
    cells = cells_of(rows)
    runs_csv.write(path.with_name(f"{path.name}_runs.csv"), cells)
    main = table(paper, study, data, rows)
    return tables.write(path, cells, main, caption=_caption(paper, study))


def cells_of(rows: Iterable[RowResult]) -> list[tables.TableCell]:
    """The cells of rows, for tables."""
    return [cell for row in rows for cell in row.tables()]


def _caption(paper: Paper, study: Study) -> str:
    return f"{paper.caption} {study.caption}".strip()


def _origin(
    paper: Paper, options: StudyOptions, data: str, results: Sequence[RowResult]
) -> records.Origin:
    """The record of a table: the command without places, and the provenance of its runs."""
    own = options.own._asdict() if options.own else {}
    given = {"study": options.study, "data": data, "rows": options.rows} | own
    texts = {k: ",".join(v) if isinstance(v, tuple) else v for k, v in given.items()}
    words = [f"--{name}={text}" for name, text in texts.items() if text]
    command = paper.words or ("paper", paper.name)
    cells = [(cell.folder, cell.result) for row in results for cell in row.cells]
    return report.origin([*command, *words, *options.overrides], cells)


def is_of_paper(result: RowResult, looked_at: set[str]) -> bool:
    """Whether a row's clients are as its own flags say, so that a paper's number may stand there.

    looked_at: the flags of partition and participation that the caller looks at.
    """
    own = command_line.of_arguments(result.row.flags)
    names = {*sheet.names(Partition, Participation)} - looked_at
    flags_of = sheet.flat(own), sheet.flat(result.config)
    return all(flags_of[0][name] == flags_of[1][name] for name in names)


def why_none(result: RowResult) -> str:
    """The text for a row that is not complete: diverged, or none."""
    texts = [selection.why_none(cell.result) for cell in result.cells if not cell.runs]
    return "diverged" if "diverged" in texts else "none"


def percent(evaluations: Sequence[Evaluation], accuracy: str) -> str:
    """The mean and standard deviation of an accuracy over evaluations; "" if there are none."""
    return forms.percent([getattr(each, accuracy) for each in evaluations]) if evaluations else ""


def texts(evaluations: Sequence[Any], headings: Mapping[str, str]) -> Cells:
    """Accuracies as by `percent`. headings: of the table -> the accuracy."""
    return {name: percent(evaluations, key) for name, key in headings.items()}


def varied(result: RowResult) -> str:
    """The selected values of the hyperparameters in which a row's runs differ."""
    names = divergence.varied([run.hyper for run in result.only.result.runs])
    hyper = result.only.runs[0].hyper
    return ", ".join(f"{name}={hyper[name]:g}" for name in names)


def listed(values: Iterable[float]) -> str:
    """Numbers as the values of a flag."""
    return ",".join(f"{value:g}" for value in values)


def percents(evaluations: Iterable[Any]) -> list[float]:
    """The test accuracy of each evaluation, in percent."""
    return [100 * each.test_score for each in evaluations]


def megabytes(result: RowResult) -> str:
    """The megabytes that clients downloaded and uploaded in a run."""
    return forms.spread([line.bytes / 1e6 for line in result.last])


def curve(
    result: RowResult, value: Callable[[Any], float] = lambda line: 100 * line.test_score
) -> drawings.Curve:
    """A value of each evaluation of a row's only cell, by default the test accuracy in percent."""
    logs = result.only.logs
    rounds = np.array([line.round for line in logs[0]])
    return drawings.Curve(rounds, np.array([[value(line) for line in lines] for lines in logs]))


def points(
    results: Iterable[RowResult], quantities: Mapping[str, Callable[[RowResult], Sequence[float]]]
) -> drawings.Points:
    """The rows as points of a figure. quantities: title -> the value of each seed of a row."""
    found: dict[str, dict[str, list[tuple[str, Sequence[float]]]]] = {}
    for result in results:
        for quantity, values in quantities.items():
            series = found.setdefault(quantity, {}).setdefault(result.row.series, [])
            series.append((result.row.x, values(result)))
    return found
