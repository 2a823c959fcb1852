"""What studies share: rows that run, our columns beside the paper's numbers, and the files.

A paper is a file of this folder with its studies. Each row has its own folder of runs, and finished
runs stay there. So a study can be interrupted, and the studies of a paper share runs.
"""

import csv
import itertools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from absl import flags

from fedjax_inv.ahead import DEPTH, Ahead
from fedjax_inv.checks import UsageError

from .. import command_line, forms, grid, machine, report, runs_csv, selection, sheet, tables
from ..config import Config, Participation, Partition
from ..differences import Column, Scores
from ..errors import check_known
from ..running import divergence, files, launch, log, records
from ..running.records import Line, Result, RunResult, Sweep
from ..studies import drawings


class Row(NamedTuple):
    """A row of a table."""

    label: str
    flags: tuple[str, ...]  # of `train`
    series: str = ""  # the line in a figure on which the row is a point
    x: str = ""  # the x of that point
    start: str = ""  # the folder of its initial network: a row's folder / a cell's folder

    @property
    def folder(self) -> str:
        """The name of the folder with its runs."""
        return grid.folder_name(self.label)


class CellResult(NamedTuple):
    """The finished runs of a cell: one algorithm and held-out domain."""

    held_out: str
    runs: list[RunResult]  # with the selected hyperparameters, one per seed; [] if none
    logs: list[list[Line]]  # the lines of metrics.jsonl of each of these runs
    result: Result  # of all runs
    folder: Path = Path()
    constant: tables.Constant = MappingProxyType({})  # without classes empty


class RowResult(NamedTuple):
    """The finished runs of a row."""

    row: Row
    config: Config
    cells: list[CellResult]

    @property
    def only(self) -> CellResult:
        """The cell of a row with a single cell."""
        (cell,) = self.cells
        return cell

    @property
    def selected(self) -> list[Line]:
        """The selected evaluation of each seed, of a row with a single cell."""
        return [run["selected"] for run in self.only.runs]

    @property
    def last(self) -> list[Line]:
        """The last evaluation of each seed, of a row with a single cell."""
        return [run["last"] for run in self.only.runs]

    @property
    def is_complete(self) -> bool:
        """Whether each cell has selected runs."""
        return all(cell.runs for cell in self.cells)


# (path of the picture, data set, rows) -> the line to print about the picture
Draw = Callable[[Path, str, Sequence[RowResult]], str]
Cells = dict[str, str]  # heading -> text, of a row of a table
ByHeading = dict[str, Scores]  # the scores of a row by seed, for columns of its table


class Study(NamedTuple):
    """A table of a paper, and its figures."""

    rows: Callable[[str], list[Row]]  # of a data set
    columns: Callable[[RowResult], Cells] = lambda result: {}  # our results
    numbers: Callable[[RowResult, str], Cells] = lambda result, data: {}  # the paper's
    figures: Mapping[str, Draw] = {}  # by what follows the study in the picture's name
    scores: Callable[[RowResult], ByHeading] = lambda result: {}  # if the rows compare methods
    data: Sequence[str] = ()  # the data sets that it takes; () for those of the paper
    draws_rows: bool = True  # whether each row draws its curves and its partition
    caption: str = ""  # what its columns need besides the paper's caption


class Number(NamedTuple):
    """A number that a paper prints."""

    source: str  # its table or figure
    row: str
    data: str
    column: str
    value: str  # as printed


class Options(NamedTuple):
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
    select: Callable[[str, Options], list[Row]] | None = None
    words: tuple[str, ...] = ()  # of its command; by default "paper" and its name
    # (folder and beginning of the files' names, rows, options) -> the text to print; by default
    # `write_tables`
    write: Callable[[Path, list[RowResult], Options], str] | None = None


def numbers_of(paper: str) -> list[Number]:
    """The numbers of a paper, from numbers/PAPER.csv."""
    lines = (Path(__file__).parent / "numbers" / f"{paper}.csv").read_text().splitlines()
    return [Number(**line) for line in csv.DictReader(x for x in lines if not x.startswith("#"))]


def options(paper: Paper, own: Any = None) -> Options:
    """The options of this process's command line. own: the paper's own flags."""
    found = flags.FLAGS
    chosen = found.study or next(iter(paper.studies))
    check_known("study", chosen, paper.studies)
    if found["algorithm"].present:
        raise UsageError("--algorithm", ..., "must be left out, as --rows selects rows")
    taken = paper.studies[chosen].data or paper.data
    for data in found.data:
        check_known("data", data, taken)
    folder = Path(os.path.expanduser(found.run_dir or f"runs/{paper.name}"))
    overrides = tuple(word for word in command_line.given() if not word.startswith("--run_dir="))
    return Options(chosen, found.rows, found.data or (taken[0],), folder, overrides, own)


def with_labels(rows: Sequence[Row], labels: Sequence[str]) -> list[Row]:
    """The rows with these labels, or all if there are no labels."""
    for label in labels:
        check_known("rows", label, [row.label for row in rows])
    return [row for row in rows if not labels or row.label in labels]


def rows_of(paper: Paper, data: str, options: Options) -> list[Row]:
    """The rows of a study on a data set that the flags select."""
    if paper.select:
        return paper.select(data, options)
    return with_labels(paper.studies[options.study].rows(data), options.rows)


def configs(rows: Sequence[Row], folder: Path, overrides: Sequence[str] = ()) -> list[Config]:
    """The flags of each row, whose runs lie in `folder`."""
    result = []
    for row in rows:
        places = [f"--run_dir={folder / row.folder}", "--resume"]
        places += [f"--init_from={folder / row.start}"] if row.start else []
        try:
            words = ["--nonfinite=mark", *row.flags, *overrides, *places]
            result.append(command_line.of_arguments(words))
        except UsageError as error:
            raise UsageError(row.label, ..., str(error)) from None
    return result


def run(
    rows: Sequence[Row], configs: Sequence[Config], write: launch.Report = report.write
) -> list[RowResult]:
    """Runs the rows that are not finished; while one runs, the programs of the next ones compile.

    write: writes the tables and figures of a row.
    """
    machine.connect(configs[0])  # before rows are prepared in threads
    shared, results = launch.Programs(), []
    with Ahead() as ahead:

        def prepared(index: int) -> launch.Launch:
            label = f"{rows[index].label} ({index + 1} of {len(rows)})"
            place = Path(configs[index].output.run_dir)
            ready = launch.prepared(
                configs[index], place, in_folders=True, shared=shared, label=label
            )
            ready.compile_ahead(ahead)
            return ready

        for index, (row, chosen) in enumerate(zip(rows, configs, strict=True)):
            for later in range(index + 1, min(index + 1 + DEPTH, len(rows))):
                if not rows[later].start:  # the network of another row
                    ahead.begin(later, partial(prepared, later))
            ahead.take(index, partial(prepared, index)).run(write, ahead)
            results.append(result_of(row, chosen))
    return results


def result_of(row: Row, chosen: Config) -> RowResult:
    """The results of a row that has run."""
    place, cells = Path(chosen.output.run_dir), []
    sweep = records.read(place / "result.json", Sweep)
    names = grid.folder_names([result.cell.restored() for result in sweep.cells]).values()
    for result, name in zip(sweep.cells, names, strict=True):
        held_out = selection.held_out_of(result)
        constant = sweep.constants.get(held_out, {})
        cell = CellResult(held_out, [], [], result, place / name, constant)
        if picked := selection.choose(row.label, result, chosen.evaluation.select):
            lines = log.read(cell.folder, picked.runs[0].last.round)
            logs = [[line for line in lines if line.run == index] for index in picked.indices]
            cell = cell._replace(runs=picked.runs, logs=logs)
        cells.append(cell)
    return RowResult(row, chosen, cells)


def line(paper: Paper, study: Study, data: str, result: RowResult) -> Cells:
    """A line of a study's table: our results and the paper's numbers."""
    columns = study.columns if result.is_complete else paper.diverged
    runs = [run for cell in result.cells for run in cell.result["runs"]]
    has_diverged = any(run["diverged"] for run in runs)
    count = {"runs diverged": divergence.count(runs)} if has_diverged else {}
    return {**columns(result), **count, **study.numbers(result, data)}


def table(paper: Paper, study: Study, data: str, results: Sequence[RowResult]) -> tables.Main:
    """The table of a study, with a line per row; what is best in a column of scores is marked."""
    columns = scores_of(study, results)
    lines = {result.row.label: line(paper, study, data, result) for result in results}
    by_label = {result.row.label: result for result in results}
    for column, (label, texts) in itertools.product(columns, lines.items()):
        if texts.get(column.heading):
            text = tables.marks(column).get(label, "{}").format(texts[column.heading])
            cells, scores = by_label[label].cells, column.scores.get(label, {})
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


def scores_of(study: Study, results: Sequence[RowResult]) -> list[Column]:
    """The scores of the rows, by the headings of the table, if the rows of a study are compared.

    A row in which a seed of each setting diverged has the scores of the other seeds.
    """
    by_row: dict[str, ByHeading] = {}
    for result in results:
        cells = [_surviving(result, cell) for cell in result.cells]
        if all(cell.runs for cell in cells):
            seeds = {run.seed: np.nan for cell in cells for run in cell.result.runs}
            found = study.scores(result._replace(cells=cells))
            by_row[result.row.label] = {name: seeds | dict(of) for name, of in found.items()}
    headings = dict.fromkeys(heading for of in by_row.values() for heading in of)
    return [
        Column(name, pd.DataFrame({row: of[name] for row, of in by_row.items() if name in of}))
        for name in headings
    ]


def _surviving(result: RowResult, cell: CellResult) -> CellResult:
    """A cell, with the runs that did not diverge if nothing was selected."""
    one = selection.choose(
        result.row.label, cell.result, result.config.evaluation.select, surviving=True
    )
    return cell if cell.runs or not one else cell._replace(runs=one.runs)


def scores(
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
        selected = {run["seed"]: run["selected"] for run in result.only.runs}
        lines = (served(result) if served else selected).items()
        found = {name: {seed: line[key] for seed, line in lines} for name, key in headings.items()}
        last = {run["seed"]: run["last"]["test_score"] for run in result.only.runs}
        return found | ({"test at the last, %": last} if has_last else {})

    return of_row


def run_all(paper: Paper, options: Options) -> str:
    """Runs a study on each data set, writes its tables and figures, and returns the tables."""
    study = paper.studies[options.study]
    todo = {}
    for data in options.data:
        rows = rows_of(paper, data, options)
        todo[data] = rows, configs(rows, options.folder / data, options.overrides)
    machine.prepare(todo[options.data[0]][1][0])
    # The table of some rows or columns must not overwrite that of all.
    is_part = bool(options.rows or getattr(options.own, "columns", ()))
    name = f"{options.study}_some" if is_part else options.study
    texts = []
    for data, (rows, chosen) in todo.items():
        results = run(rows, chosen, report.write if study.draws_rows else report.write_table)
        path = options.folder / data / name
        if paper.write:
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


def cells_of(rows: Iterable[RowResult]) -> list[tables.Cell]:
    """The cells of rows, for tables."""
    return [
        tables.Cell(
            row.row.label, cell.result, row.config.evaluation.select, cell.folder, cell.constant
        )
        for row in rows
        for cell in row.cells
    ]


def _caption(paper: Paper, study: Study) -> str:
    return f"{paper.caption} {study.caption}".strip()


def _origin(
    paper: Paper, options: Options, data: str, results: Sequence[RowResult]
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


def percent(evaluations: Sequence[Any], accuracy: str) -> str:
    """The mean and standard deviation of an accuracy over evaluations; "" if there are none."""
    return forms.percent([each[accuracy] for each in evaluations]) if evaluations else ""


def texts(evaluations: Sequence[Any], headings: Mapping[str, str]) -> Cells:
    """Accuracies as by `percent`. headings: of the table -> the accuracy."""
    return {name: percent(evaluations, key) for name, key in headings.items()}


def varied(result: RowResult) -> str:
    """The selected values of the hyperparameters in which a row's runs differ."""
    names = divergence.varied([run["hyper"] for run in result.only.result["runs"]])
    hyper = result.only.runs[0]["hyper"]
    return ", ".join(f"{name}={hyper[name]:g}" for name in names)


def listed(values: Iterable[float]) -> str:
    """Numbers as the values of a flag."""
    return ",".join(f"{value:g}" for value in values)


def percents(evaluations: Iterable[Any]) -> list[float]:
    """The test accuracy of each evaluation, in percent."""
    return [100 * each["test_score"] for each in evaluations]


def megabytes(result: RowResult) -> str:
    """The megabytes that clients downloaded and uploaded in a run."""
    return forms.spread([line["bytes"] / 1e6 for line in result.last])


def curve(
    result: RowResult, value: Callable[[Any], float] = lambda line: 100 * line["test_score"]
) -> drawings.Line:
    """A value of each evaluation of a row's only cell, by default the test accuracy in percent."""
    logs = result.only.logs
    rounds = np.array([line["round"] for line in logs[0]])
    return drawings.Line(rounds, np.array([[value(line) for line in lines] for lines in logs]))


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
