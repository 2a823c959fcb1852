"""Tables of papers: rows that are runs of `sweep`, collected, with the paper's numbers beside ours.

A paper is a file in papers/ with its rows, numbers and figures; here is what all of them share. A
row's runs lie in a folder of their own, and what is finished is kept, so a study may be interrupted
and shares its runs with the other studies of its paper.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from absl import flags
from matplotlib.figure import Figure

from experiments.experiment import command_line, config, grid
from experiments.experiment.command_line import Given
from experiments.experiment.config import Config
from experiments.flags.flag import check_different, check_known, name_of
from experiments.parts import machine
from experiments.reporting import figures, report, run_report
from experiments.reporting.tables import tabulate
from experiments.running import folder as folders
from experiments.running import launch, log, records
from fedjax_inv.checks import UsageError


class _Stop(msgspec.Struct):
    round: int | None


class _StoppedRun(msgspec.Struct):
    seed: int
    stops: list[_Stop] = []


class _Stopped(msgspec.Struct):
    """The part of a `records.Result` that says where its runs stopped."""

    runs: list[_StoppedRun]


class Row(NamedTuple):
    """A line of a table."""

    label: str
    flags: tuple[str, ...]  # of `sweep`
    series: str = ""  # the line of a figure that it is a point of
    x: str = ""  # its place on that line
    start: str = ""  # whose network it starts from: a row's folder, and in it that of its cell

    @property
    def folder(self) -> str:
        """Where its runs lie."""
        return grid.folder_name(self.label)


class Ran(NamedTuple):
    """A cell of a row: one algorithm and held-out domain."""

    held_out: str
    runs: list[Any]  # of the selected hyperparameters, one per seed; none: all diverged
    logs: list[list[Any]]  # of those runs, the lines of metrics.jsonl, from round 0 on
    result: dict[str, Any]  # of all its runs, as result.json has them


class Done(NamedTuple):
    """A row that has been run."""

    row: Row
    config: Config
    cells: list[Ran]

    @property
    def only(self) -> Ran:
        """The cell of a row that has one."""
        (cell,) = self.cells
        return cell


# (picture's path, data, rows) -> what to tell of the picture
Draw = Callable[[Path, str, Sequence[Done]], str]
Cells = dict[str, str]  # of a line of a table: heading -> text


class Study(NamedTuple):
    """A table of a paper."""

    rows: Callable[[str], list[Row]]  # of a data set
    figures: Mapping[str, Draw]  # by what their names end in


class Paper(NamedTuple):
    """What a file in papers/ says."""

    name: str
    data: tuple[str, ...]  # the data sets' names; the first is what is run by default
    studies: Mapping[str, Study]  # likewise
    tell: Callable[[Done], Cells]  # our numbers
    numbers: Callable[[str, str], Cells]  # the paper's, of a row's label and a data set
    caption: str
    last: Cells  # a last line for comparison
    check: Callable[[Config], None]  # raises UsageError for flags that do not fit its rows


class Options(NamedTuple):
    """The flags of a paper's binary."""

    study: str
    rows: tuple[str, ...]  # labels; all if there are none
    data: tuple[str, ...]
    folder: Path
    overrides: tuple[str, ...]  # flags of sweep for all rows


def select(rows: Sequence[Row], labels: Sequence[str]) -> list[Row]:
    """The rows of these labels, all where there are none; raises UsageError for an unknown one."""
    for label in labels:
        check_known("rows", label, [row.label for row in rows])
    return [row for row in rows if not labels or row.label in labels]


def configs(
    paper: Paper, rows: Sequence[Row], folder: Path, overrides: Sequence[str]
) -> list[Config]:
    """The flags of the rows. Raises UsageError where they do not fit a row, and for an override
    that has no effect in any."""
    result = []
    without_effect: list[dict[str, str]] = []
    asked = _asked(overrides)
    for row in rows:
        places = {"run_dir": folder / row.folder}
        places |= {"init_from": folder / row.start} if row.start else {}
        try:
            chosen = command_line.of_arguments(
                [*overrides, *(f"--{k}={v}" for k, v in places.items()), "--resume"],
                row.flags,
                may_be_idle=True,
                nonfinite="mark",
            )
            if chosen.run.num_processes > 1:
                raise UsageError(f"--num_processes={chosen.run.num_processes}: must be 1")
            paper.check(chosen)
        except UsageError as error:
            raise UsageError(f"{row.label}: {error}") from None
        values = {name: value for name, value in config.flat(chosen).items() if name in asked}
        without_effect.append(config.idle(chosen, values, asked))
        result.append(chosen)
    for name in asked:
        if all(name in idle for idle in without_effect):
            flag = name_of(config.FLAGS[name])
            raise UsageError(f"--{flag}: {without_effect[0][name]}, in all rows")
    return result


def check(row: Row, chosen: Config) -> None:
    """Raises UsageError, without any compute, where a row does not fit its data or its folder."""
    try:
        launch.check(chosen, Path(chosen.run.run_dir), in_folders=True)
    except UsageError as error:
        raise UsageError(f"{row.label}: {error}") from None


def check_one_cell(config: Config) -> None:
    """Raises UsageError for flags with which a row has several cells."""
    several = config.data.held_out == "all" or "," in config.data.held_out
    if several or len(grid.cells(config, [None])) > 1:
        raise UsageError(
            "the flags ask for several cells, of --held_out, --algorithm or --set; for those there "
            "is sweep"
        )


def _check_start(row: Row, before: Sequence[str], folder: Path) -> None:
    """Raises UsageError where what a row starts from is neither finished nor before it."""
    first = row.start.partition("/")[0]
    if first and first not in before and not (folder / row.start / "result.json").exists():
        raise UsageError(
            f"--rows={row.label}: starts from the network of {first}, which is not finished; must "
            "stand beside that"
        )


def _check_reached(row: Row, folder: Path) -> None:
    """Raises UsageError where what a row starts from has not come as far as it was to."""
    if not row.start:
        return
    runs = records.read(folder / row.start / "result.json", _Stopped).runs
    missed = [run.seed for run in runs if any(not stop.round for stop in run.stops)]
    if missed:
        raise UsageError(
            f"{row.label}: starts from the network of {row.start}, which has not reached its "
            f"--stop_above with seeds {missed}; must have more --rounds"
        )


def _asked(overrides: Sequence[str]) -> Given:
    """The flags that are overridden."""
    values = flags.FlagValues()
    command_line.define(values)
    return command_line.parse(["", *overrides], values)


def run(row: Row, chosen: Config) -> Done:
    """Runs a row, or reads what it left when it was run before."""
    place = Path(chosen.run.run_dir)
    launch.run(chosen, place, in_folders=True, report=run_report.write)
    results = json.loads((place / "result.json").read_text())["cells"]
    cells = [grid.of_record(result["cell"]) for result in results]
    names = grid.folder_names(cells)
    ran = []
    for cell, result in zip(cells, results, strict=True):
        picked = report.choose(row.label, result, chosen.watching.select)
        if picked is None:
            ran.append(Ran(cell.held_out or "test", [], [], result))
            continue
        lines = log.read(place / names[cell.name], picked.runs[0]["last"]["round"])
        logs = [[line for line in lines if line["run"] == index] for index in picked.indices]
        ran.append(Ran(picked.held_out, picked.runs, logs, result))
    return Done(row, chosen, ran)


def table(paper: Paper, data: str, done: Sequence[Done]) -> str:
    """A line per row: what `tell` says, then the paper's numbers; empty where there are none."""
    lines = [
        {data: one.row.label, **paper.tell(one), **paper.numbers(one.row.label, data)}
        for one in done
    ]
    lines.append({data: "optimal", **paper.last} if paper.last else {})
    headings = dict.fromkeys(heading for line in lines for heading in line)
    rows = [[line.get(heading, "") for heading in headings] for line in lines if line]
    return tabulate(rows, list(headings), tablefmt="github", disable_numparse=True)


def draw_series(
    path: Path,
    title: str,
    x_label: str,
    points: Mapping[str, Mapping[str, Sequence[tuple[str, Sequence[float]]]]],
) -> None:
    """Means and standard deviations against x: a panel per quantity, a line per series.

    points: quantity -> series -> (x, a value per seed) of each point.
    """
    figure = Figure(figsize=(5 * len(points), 3.6), layout="constrained")
    axes = figure.subplots(1, len(points), squeeze=False)[0]
    for axis, (quantity, series) in zip(axes, points.items(), strict=True):
        for number, (name, line) in enumerate(series.items()):
            style = figures.style(number)
            values = [list(each) or [np.nan] for _, each in line]
            stds = [np.std(each, ddof=len(each) > 1) for each in values]
            means = [np.mean(each) for each in values]
            places = [figures.literal(x) for x, _ in line]
            axis.errorbar(places, means, stds, label=name, capsize=3, **style)
        axis.set(xlabel=x_label, ylabel=quantity)
        if quantity.endswith("%"):
            axis.set_ylim(0, 100)
    lines = [line for series in points.values() for line in series.values()]
    num_seeds = max((len(values) for line in lines for _, values in line), default=0)
    figures.entitle(figure, f"{title}\n{figures.over_seeds(num_seeds)}")
    figures.legend_of(figure, axes)
    figures.save(figure, path)


def run_all(paper: Paper, options: Options) -> str:
    """Runs the study on each of the data and returns the tables; they and the figures are written.

    Raises UsageError, before any compute, for options that do not fit.
    """
    study = paper.studies[options.study]
    todo = {
        data: list(
            zip(rows, configs(paper, rows, options.folder / data, options.overrides), strict=True)
        )
        for data in options.data
        for rows in [select(study.rows(data), options.rows)]
    }
    machine.prepare(todo[options.data[0]][0][1].run)
    for data, pairs in todo.items():
        for index, (row, chosen) in enumerate(pairs):
            before = [earlier.folder for earlier, _ in pairs[:index]]
            _check_start(row, before, options.folder / data)
            check(row, chosen)
    # A part of a study does not overwrite the table of all of it.
    name = f"{options.study}_some" if options.rows else options.study
    texts = []
    for data in options.data:
        done = []
        for row, chosen in todo[data]:
            _check_reached(row, options.folder / data)
            done.append(run(row, chosen))
        text = table(paper, data, done)
        folder = options.folder / data
        folders.write(folder / f"{name}.md", f"{text}\n\n{paper.caption}\n")
        texts.append(text)
        for ending, draw in study.figures.items():
            texts.append(draw(folder / f"{name}{ending}.png", data, done))
    return "\n\n" + "\n\n".join([*texts, paper.caption])


def define(paper: Paper, values: flags.FlagValues = flags.FLAGS) -> None:
    """Defines the flags, those of sweep among them."""
    command_line.define(values, nonfinite="mark")
    flags.DEFINE_string(
        "study", next(iter(paper.studies)), f"What to compare: {', '.join(paper.studies)}.", values
    )
    flags.DEFINE_list("rows", [], "Which rows of the study, by their labels; all if none.", values)
    text = f"Data sets, each with a table: {', '.join(paper.data)}."
    flags.DEFINE_list("data", [paper.data[0]], text, values)


def options(paper: Paper, values: flags.FlagValues = flags.FLAGS) -> Options:
    """The parsed flags; those of sweep as they were given, but --run_dir, which is for all rows.

    Raises UsageError, in one line, for a study or data that there are not.
    """
    check_known("study", values.study, paper.studies)
    check_different("data", values.data)
    for data in values.data:
        check_known("data", data, paper.data)
    known = flags.FlagValues()
    command_line.define(known)
    chosen = [values[name] for name in known if values[name].present and name != "run_dir"]
    return Options(
        values.study,
        tuple(values.rows),
        tuple(values.data),
        Path(values.run_dir or f"runs/{paper.name}"),
        tuple(line for flag in chosen for line in flag.serialize().splitlines()),
    )


def main(paper: Paper, about: str) -> None:
    """The binary of a paper."""
    define(paper)
    launch.main(lambda asked: run_all(paper, asked), about, lambda given: options(paper))
