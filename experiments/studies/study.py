"""Tables of papers: each row is a run of `sweep`, with the paper's numbers beside ours.

Each paper is a file in studies/ with its studies; this file has the code that all papers share. Each
row has its own folder of runs, and finished runs stay there. So a study can be interrupted, and the
studies of a paper share runs.
"""

import contextlib
import csv
import dataclasses
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pandas as pd
from absl import flags

from fedjax_inv.checks import UsageError

from .. import comparison, report, selection, tables
from ..comparison import Column, Scores
from ..experiment import command_line, config, grid
from ..experiment.config import Config
from ..flags import command
from ..flags.command import Binary
from ..flags.flag import (
    check,
    check_different,
    check_known,
    flag,
    flag_error,
    flags_of,
)
from ..parts import machine
from ..running import divergence, files, launch, log, records
from ..running.ahead import DEPTH, Ahead
from ..running.launch import Launch, Shared
from ..running.records import Line, Result, RunResult
from ..studies import drawings
from ..tables import Part

_SEVERAL_CELLS = "the flags ask for several cells, by {}; for those there is sweep"


class _Stop(msgspec.Struct):
    round: int | None


class _StoppedRun(msgspec.Struct):
    seed: int
    stops: list[_Stop] = []


class _Stopped(msgspec.Struct):
    """The part of a `records.Result` that says where its runs stopped."""

    runs: list[_StoppedRun]


class _Cells(msgspec.Struct):
    """The part of a sweep's result.json that has its cells."""

    cells: list[Result]


class Row(NamedTuple):
    """A row of a table."""

    label: str
    flags: tuple[str, ...]  # of `sweep`
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
    def is_complete(self) -> bool:
        """Whether each cell has selected runs."""
        return all(cell.runs for cell in self.cells)


# (path of the picture, data set, rows) -> the line to print about the picture
Draw = Callable[[Path, str, Sequence[RowResult]], str]
Cells = dict[str, str]  # heading -> text, of a row of a table
ByHeading = dict[str, Scores]  # the scores of a row by seed, for columns of its table


def _no_scores(result: RowResult) -> ByHeading:
    return {}


def _nothing(result: RowResult, data: str = "") -> Cells:
    return {}


class Study(NamedTuple):
    """A table of a paper, and its figures."""

    rows: Callable[[str], list[Row]]  # of a data set
    columns: Callable[[RowResult], Cells] = _nothing  # our results
    numbers: Callable[[RowResult, str], Cells] = _nothing  # the paper's, on a data set
    figures: Mapping[str, Draw] = {}  # by what follows the study in the picture's name
    scores: Callable[[RowResult], ByHeading] = _no_scores  # if the rows compare methods
    draws_rows: bool = True  # whether each row draws its curves and its partition
    check: Callable[[Config], None] = lambda config: None  # raises UsageError for unfit flags
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
    overrides: tuple[str, ...]  # flags of `sweep`, for all rows
    own: Any = None  # the record of the paper's own flags


# (study, data set, options) -> the rows to run; raises UsageError for unknown --rows
Select = Callable[[Study, str, Options], list[Row]]


def by_label(study: Study, data: str, options: Options) -> list[Row]:
    """The rows with the labels of --rows, or all if there are no labels.

    Raises UsageError for an unknown label.
    """
    return labelled(study.rows(data), options.rows)


def labelled(rows: Sequence[Row], labels: Sequence[str]) -> list[Row]:
    """The rows with these labels, or all if there are no labels.

    Raises UsageError for an unknown label.
    """
    for label in labels:
        check_known("rows", label, [row.label for row in rows])
    return [row for row in rows if not labels or row.label in labels]


class Paper(NamedTuple):
    """The studies of a paper."""

    name: str
    data: tuple[str, ...]  # names of data sets; by default a study takes the first that fits it
    studies: Mapping[str, Study]  # by name; the first is the default
    caption: str
    diverged: Callable[[RowResult], Cells] = _nothing  # the columns of a row that is not complete
    check: Callable[[Config], None] = lambda config: None  # raises UsageError for unfit flags
    optimum: Mapping[str, str] = {}  # the last row of the tables, "optimal"
    select: Select = by_label
    own: type[Any] | None = None  # the record of further flags
    words: tuple[str, ...] = ()  # of its command; by default "paper" and its name
    about_rows: str = "Which rows of the study, by their labels; all if none."
    # (folder and beginning of the files' names, study, data set, rows, options) -> the text to
    # print; by default `write_tables`
    write: Callable[[Path, Study, str, list[RowResult], Options], str] | None = None


def printed(paper: str) -> list[Number]:
    """The numbers of a paper, from numbers/PAPER.csv; [] for studies of no paper."""
    path = Path(__file__).parent / "numbers" / f"{paper}.csv"
    lines = path.read_text().splitlines() if path.exists() else []
    return [Number(**line) for line in csv.DictReader(x for x in lines if not x.startswith("#"))]


def binary(paper: Paper, about: str | None) -> Binary:
    """The binary of a paper, which takes the flags of `sweep`, too.

    about: the first paragraphs of --help, the docstring of the paper's file.
    """

    @dataclasses.dataclass(frozen=True)
    class Own:
        study: str = flag(next(iter(paper.studies)), "What to compare.", choices=paper.studies)
        rows: tuple[str, ...] = flag((), paper.about_rows, kind=str)
        data: tuple[str, ...] = flag(
            (),
            f"Data sets, each with a table; default: {paper.data[0]}, or the first that fits the "
            "study.",
            choices=paper.data,
            kind=str,
        )

    more = flags_of(paper.own) if paper.own else []

    def define(values: flags.FlagValues) -> None:
        command_line.define(values, nonfinite="mark")
        command.define([*flags_of(Own), *more], values)

    def read(argv: Sequence[str], values: flags.FlagValues) -> Options:
        command_line.parse(argv, values)
        own = Own(**{field.name: command.value_of(field, values) for field in flags_of(Own)})
        if values["algorithm"].present:
            text = "must be left out, as each row has its own; --rows selects rows"
            raise UsageError("--algorithm", ..., text)
        check_different("data", own.data, may_be_empty=not values["data"].present)
        check_different("rows", own.rows, may_be_empty=True)
        check(own)
        data = own.data or (_usual_data(paper, own.study),)
        of_paper = None
        if paper.own is not None:
            of_paper = paper.own(**{each.name: command.value_of(each, values) for each in more})
            check(of_paper)
        of_sweep = flags.FlagValues()
        command_line.define(of_sweep)
        given = [values[name] for name in of_sweep if values[name].present and name != "run_dir"]
        overrides = tuple(line for each in given for line in each.serialize().splitlines())
        folder = Path(os.path.expanduser(values.run_dir or f"runs/{paper.name}"))
        return Options(own.study, own.rows, data, folder, overrides, of_paper)

    def answer(argv: Sequence[str], values: flags.FlagValues) -> str | None:
        return command_line.answer(argv, about or "", values, refused=("algorithm",))

    return Binary(partial(run_all, paper), define, read, answer)


def configs(
    paper: Paper, rows: Sequence[Row], folder: Path, overrides: Sequence[str]
) -> list[Config]:
    """The flags of each row. Raises UsageError if overrides do not fit a row."""
    result = []
    for row in rows:
        places = {"run_dir": folder / row.folder}
        places |= {"init_from": folder / row.start} if row.start else {}
        try:
            chosen = command_line.of_arguments(
                [*overrides, *(f"--{k}={v}" for k, v in places.items()), "--resume"],
                row.flags,
                nonfinite="mark",
            )
            if chosen.num_processes > 1 or chosen.distributed:
                raise UsageError("--num_processes", ..., "must be 1, as studies are one process")
            if chosen.score not in ("auto", "accuracy"):
                raise flag_error("score", chosen.score, "must be accuracy")
            paper.check(chosen)
        except UsageError as error:
            raise _of_row(row, error) from None
        result.append(chosen)
    return result


def _of_row(row: Row, error: UsageError) -> UsageError:
    return UsageError(row.label, ..., str(error))


def _usual_data(paper: Paper, study: str) -> str:
    """The first data set that a study takes."""
    for data in paper.data:
        with contextlib.suppress(UsageError):
            paper.studies[study].rows(data)
            return data
    raise ValueError(f"the study {study} takes none of {paper.data}")


def check_row(row: Row, chosen: Config) -> None:
    """Raises UsageError, before any compute, if a row does not fit its data or its folder."""
    try:
        launch.check(chosen, Path(chosen.run_dir), in_folders=True)
    except UsageError as error:
        raise _of_row(row, error) from None


def check_data(data: str, allowed: Collection[str]) -> None:
    """Raises UsageError if a study cannot be run on a data set."""
    if data not in allowed:
        allowed_names = ", ".join(allowed)
        raise UsageError(f"--data={data}", ..., f"must be one of {allowed_names} for this study")


def check_one_cell(config: Config) -> None:
    """Raises UsageError if the flags give a row several cells."""
    if config.held_out == "all" or "," in config.held_out:
        raise UsageError(_SEVERAL_CELLS.format("--held_out"))
    check_one_method(config)


def check_one_method(config: Config) -> None:
    """Raises UsageError if the flags give a row several cells for a held-out domain."""
    if len(grid.cells(config, [None])) > 1:
        raise UsageError(_SEVERAL_CELLS.format("--algorithm or --set"))


def check_one_setting(chosen: Config) -> None:
    """Raises UsageError if the runs of a row differ in more than their seeds."""
    check_one_cell(chosen)
    check_one_value(chosen)


def check_one_value(chosen: Config, *may_differ: str) -> None:
    """Raises UsageError if the runs of a row have several values of another real number.

    may_differ: the numbers of which there may be several.
    """
    cell = grid.cells(chosen, [None])[0]
    for name in cell.runs[0].hyper:
        values = sorted({run.hyper[name] for run in cell.runs})
        if name not in may_differ and len(values) > 1:
            flag = name if name in config.FLAGS else f"set={name}"
            raise flag_error(flag, values, "must be one value in this study")


def _check_start(row: Row, before: Sequence[str], folder: Path) -> None:
    """Raises UsageError if the row of the initial network is neither finished nor before this.

    before: the folders of the earlier rows.
    """
    first = row.start.partition("/")[0]
    if first and first not in before and not (folder / row.start / "result.json").exists():
        raise UsageError(
            f"--rows={row.label}",
            ...,
            f"starts from the network of {first}, which is not finished; must stand beside that",
        )


def _check_reached(row: Row, folder: Path) -> None:
    """Raises UsageError if the row that provides the initial network did not reach its stop."""
    if not row.start:
        return
    runs = records.read(folder / row.start / "result.json", _Stopped).runs
    missed = [run.seed for run in runs if any(not stop.round for stop in run.stops)]
    if missed:
        raise UsageError(
            row.label,
            ...,
            f"starts from the network of {row.start}, which has not reached its "
            f"--stop_above with seeds {missed}; must have more --rounds",
        )


def prepare(label: str, chosen: Config, ahead: Ahead, shared: Shared) -> Launch:
    """The launch of a row, whose first program begins to compile."""
    ready = launch.prepared(
        chosen, Path(chosen.run_dir), in_folders=True, shared=shared, label=label
    )
    ready.compile_ahead(ahead)
    return ready


def run(
    row: Row,
    chosen: Config,
    ahead: Ahead | None = None,
    write: launch.Report = report.write,
    shared: Shared | None = None,
    label: str = "",
) -> RowResult:
    """Runs a row, or reads its results if it is finished.

    ahead: the threads in which the row may have been prepared.
    shared: the programs of other rows.
    label: what lines of progress name the row; "": its label.
    """
    label = label or row.label
    if ahead is None:
        with Ahead() as own:
            return run(row, chosen, own, write, shared, label)
    shared = Shared() if shared is None else shared
    place = Path(chosen.run_dir)
    ahead.take(chosen.run_dir, partial(prepare, label, chosen, ahead, shared)).run(write, ahead)
    results = records.read(place / "result.json", _Cells).cells
    cells = [result.cell.restored() for result in results]
    names = grid.folder_names(cells)
    finished = []
    for cell, result in zip(cells, results, strict=True):
        picked = selection.choose(row.label, result, chosen.select)
        if picked is None:
            held_out = cell.held_out or "test"
            finished.append(CellResult(held_out, [], [], result, place / names[cell.name]))
            continue
        lines = log.read(place / names[cell.name], picked.runs[0].last.round)
        logs = [[line for line in lines if line.run == index] for index in picked.indices]
        finished.append(
            CellResult(picked.held_out, picked.runs, logs, result, place / names[cell.name])
        )
    return RowResult(row, chosen, finished)


def line(paper: Paper, study: Study, data: str, result: RowResult) -> Cells:
    """A line of a study's table: the row's label, our results and the paper's numbers."""
    columns = study.columns if result.is_complete else paper.diverged
    runs = [run for cell in result.cells for run in cell.result["runs"]]
    count = {"runs diverged": divergence.count(runs)} if _has_diverged(runs) else {}
    return {data: result.row.label, **columns(result), **count, **study.numbers(result, data)}


def _has_diverged(runs: Sequence[Any]) -> bool:
    return any(run["diverged"] for run in runs)


def is_of_paper(result: RowResult, looked_at: set[str]) -> bool:
    """Whether a row's clients are as its own flags say, so that a paper's number may stand there.

    looked_at: the flags of partition and participation that the caller looks at.
    """
    own = command_line.of_arguments([], result.row.flags)
    names = {*config.names_of("partition"), *config.names_of("participation")} - looked_at
    return own.only(names) == result.config.only(names)


def why_none(result: RowResult) -> str:
    """The text for a row that is not complete: diverged, or none."""
    texts = [selection.why_none(cell.result) for cell in result.cells if not cell.runs]
    return "diverged" if "diverged" in texts else "none"


def last_test(runs: Sequence[Any]) -> str:
    """The test accuracy at the last round; how many runs diverged, if any did."""
    if _has_diverged(runs):
        return f"diverged, {divergence.count(runs)}"
    return percent([run["last"] for run in runs], "test_score")


def table(paper: Paper, study: Study, data: str, results: Sequence[RowResult]) -> pd.DataFrame:
    """The table of a study, with a line per row; what is best in a column of scores is marked."""
    marks = {column.heading: comparison.best(column) for column in compared(study, results)}
    lines = [line(paper, study, data, result) for result in results]
    for each in lines:
        for heading, found in marks.items():
            if each.get(heading):
                each[heading] = found.get(each[data], "{}").format(each[heading])
    lines += [{data: "optimal", **paper.optimum}] if paper.optimum else []
    # A row that is not complete has few columns, in another order.
    complete = [each for each, of in zip(lines, results, strict=False) if of.is_complete]
    headings = dict.fromkeys(heading for line in [*complete, *lines] for heading in line)
    return pd.DataFrame([line for line in lines if line], columns=[*headings])


def compared(study: Study, results: Sequence[RowResult]) -> list[Column]:
    """The scores of the rows, by the headings of the table, if the rows of a study are compared.

    A row in which a seed of each setting diverged has the scores of the other seeds.
    """
    by_row: dict[str, ByHeading] = {}
    for result in results:
        cells = [_surviving(result, cell) for cell in result.cells]
        if not all(cell.runs for cell in cells):
            continue
        seeds = {run.seed: np.nan for cell in cells for run in cell.result.runs}
        scores = study.scores(result._replace(cells=cells))
        by_row[result.row.label] = {name: seeds | dict(of) for name, of in scores.items()}
    headings = dict.fromkeys(heading for scores in by_row.values() for heading in scores)
    frames = {
        heading: {label: of[heading] for label, of in by_row.items() if heading in of}
        for heading in headings
    }
    return [Column(heading, pd.DataFrame(of)) for heading, of in frames.items()]


def _surviving(result: RowResult, cell: CellResult) -> CellResult:
    """A cell, with the runs that did not diverge if nothing was selected."""
    if cell.runs:
        return cell
    one = selection.choose(result.row.label, cell.result, result.config.select, surviving=True)
    return cell._replace(runs=one.runs) if one else cell


def scores(of_seeds: Mapping[int, Any], headings: Mapping[str, str]) -> ByHeading:
    """The accuracies of each seed's evaluation. headings: those of the table -> the accuracy."""
    return {
        heading: {seed: line[accuracy] for seed, line in of_seeds.items()}
        for heading, accuracy in headings.items()
    }


def selected_scores(result: RowResult, headings: Mapping[str, str]) -> ByHeading:
    """The accuracies of the selected evaluations of a row's only cell, as in `scores`."""
    return scores({run["seed"]: run["selected"] for run in result.only.runs}, headings)


def last_scores(result: RowResult) -> ByHeading:
    """The test accuracies at the last round of a row's only cell."""
    of_seeds = {run["seed"]: run["last"] for run in result.only.runs}
    return scores(of_seeds, {"test at the last, %": "test_score"})


def write_tables(path: Path, paper: Paper, study: Study, data: str, rows: list[RowResult]) -> str:
    """Writes the tables of a study and the evaluations of its runs; returns the text to print.

    path: the folder and the beginning of the files' names.
    """
    columns = compared(study, rows)
    found = comparison.differences(columns)
    parts: list[Part] = [table(paper, study, data, rows), *comparison.comparing(columns, found)]
    cells = [
        report.Cell(row.row.label, row.config.select, cell.folder, cell.result)
        for row in rows
        for cell in row.cells
    ]
    chosen = [selection.choose(cell.label, cell.result, cell.rule) for cell in cells]
    winners = [one for one in chosen if one]
    # Games serve by the state of their stop, which no rule of selection looks at.
    has_stops = any(row.config.thresholds for row in rows)
    if columns and len({one.label for one in winners}) > 1 and not has_stops:
        parts.append(tables.winners_table(winners))
    tables.write_forms(path, [*parts, _caption(paper, study)])
    report.write_runs(path.with_name(f"{path.name}_runs.csv"), cells)
    settings = [(cell.label, cell.result, cell.rule) for cell in cells]
    tables.write_grid(path.with_name(f"{path.name}_grid"), settings, f"{path.name}, {data}")
    tables.write_differences(path.with_name(f"{path.name}_differences.csv"), found)
    return tables.printed(parts)


def _caption(paper: Paper, study: Study) -> str:
    return f"{paper.caption} {study.caption}".strip()


def percent(evaluations: Sequence[Any], accuracy: str) -> str:
    """The mean and standard deviation of an accuracy over evaluations; "" if there are none."""
    return tables.percent([each[accuracy] for each in evaluations]) if evaluations else ""


def _test_accuracy(line: Mapping[str, Any]) -> float:
    return 100 * line["test_score"]


def curve(result: RowResult, value: Callable[[Any], float] = _test_accuracy) -> drawings.Line:
    """A value of each evaluation of a row's only cell, by default the test accuracy in percent."""
    logs = result.only.logs
    rounds = np.array([line["round"] for line in logs[0]])
    return drawings.Line(rounds, np.array([[value(line) for line in lines] for lines in logs]))


def megabytes(result: RowResult) -> str:
    """The megabytes that clients downloaded and uploaded in a run."""
    return tables.spread([run["last"]["bytes"] / 1e6 for run in result.only.runs])


def _origin(
    paper: Paper, options: Options, data: str, results: Sequence[RowResult]
) -> records.Origin:
    """The record of a table: the command without places, and the provenance of its runs."""
    command = paper.words or ("paper", paper.name)
    words = [*command, f"--study={options.study}", f"--data={data}"]
    words += [f"--rows={','.join(options.rows)}"] if options.rows else []
    for field in flags_of(paper.own) if paper.own else []:
        value = getattr(options.own, field.name)
        text = ",".join(value) if isinstance(value, tuple) else value
        words += [f"--{field.name}={text}"] if text else []
    cells = [(cell.folder, cell.result) for row in results for cell in row.cells]
    return report.origin([*words, *options.overrides], cells)


def run_all(paper: Paper, options: Options) -> str:
    """Runs a study on each data set, writes its tables and figures, and returns the tables.

    Raises UsageError, before any compute, for options that do not fit.
    """
    study = paper.studies[options.study]
    todo = {
        data: list(
            zip(rows, configs(paper, rows, options.folder / data, options.overrides), strict=True)
        )
        for data in options.data
        for rows in [paper.select(study, data, options)]
    }
    machine.prepare(todo[options.data[0]][0][1])
    for data, pairs in todo.items():
        for index, (row, chosen) in enumerate(pairs):
            before = [earlier.folder for earlier, _ in pairs[:index]]
            _check_start(row, before, options.folder / data)
            try:
                study.check(chosen)
            except UsageError as error:
                raise _of_row(row, error) from None
            check_row(row, chosen)
    # The table of some rows or columns must not overwrite that of all.
    is_part = bool(options.rows or getattr(options.own, "columns", ()))
    name = f"{options.study}_some" if is_part else options.study
    every = [(row, chosen) for data in options.data for row, chosen in todo[data]]
    labels = {
        chosen.run_dir: f"{row.label} ({index} of {len(every)})"
        for index, (row, chosen) in enumerate(every, 1)
    }
    texts: list[Callable[[], str]] = []
    drawn: list[Callable[[], Any]] = []
    with Ahead() as ahead, Ahead(1) as drawer:

        def draw_ahead(draw: Callable[[], Any]) -> Callable[[], Any]:
            """Draws in a thread, while the next rows run; the result waits for it."""
            drawer.begin(draw, draw)
            return partial(drawer.take, draw, draw)

        def write(*finished: Any) -> str:
            if study.draws_rows:
                drawn.append(draw_ahead(partial(report.draw, *finished)))
            return report.write_table(*finished)

        done = 0
        shared = Shared()
        for data in options.data:
            results = []
            for row, chosen in todo[data]:
                done += 1
                for _, following in every[done : done + DEPTH]:
                    # A row that starts from another row's network must wait for it.
                    if not following.init_from:
                        place = following.run_dir
                        ahead.begin(
                            place, partial(prepare, labels[place], following, ahead, shared)
                        )
                _check_reached(row, options.folder / data)
                label = labels[chosen.run_dir]
                results.append(run(row, chosen, ahead, write, shared, label))
            folder = options.folder / data
            record = _origin(paper, options, data, results)
            if paper.write is None:
                text = write_tables(folder / name, paper, study, data, results)
            else:
                text = paper.write(folder / name, study, data, results, options)
            texts.append(partial(str, text))
            files.write_json(folder / f"{name}.json", record)
            for ending, draw in study.figures.items():
                path = folder / f"{name}{ending}.png"
                texts.append(draw_ahead(partial(draw, path, data, results)))
        for wait in drawn:
            wait()
        lines = [text() for text in texts]
    return "\n\n" + "\n\n".join([line for line in [*lines, _caption(paper, study)] if line])
