"""The runs of rows: a configuration and a folder for each, and their results."""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from absl import flags

from fedjax_inv.ahead import DEPTH, Ahead
from fedjax_inv.checks import UsageError

from .. import command_line
from ..assembly import experiment, grid, machine, method
from ..config import NAMES, Config
from ..errors import check_known
from ..folder import files, log, records, run_folder, selection
from ..folder.records import Line, Result, RunResult, Sweep
from ..report import figures, report, run_figures, runs_csv, tables
from ..report.differences import Tests
from ..run import Launch, Programs, WriteReport, prepare, start_of
from .rows import Row, RowsFile

_RECORD = "row.json"  # in the folder of a row that has run
# Flags of data that say nothing of which examples are the test of a held-out domain.
_NOT_OF_TEST = ("held_out", "validate")


class CellResult(NamedTuple):
    """The finished runs of a cell: one algorithm and held-out domain."""

    held_out: str
    runs: list[RunResult]  # with the selected hyperparameters, one per seed; [] if none
    logs: list[list[Line]]  # the lines of metrics.jsonl of each of these runs
    result: Result  # of all runs
    folder: Path = Path()
    constant: tables.Constant = MappingProxyType({})  # without classes empty
    # In which algorithm and settings it differs from the other cells of its row
    setting: str = ""


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
        return [run.choice for run in self.only.runs]

    @property
    def last(self) -> list[Line]:
        """The last evaluation of each seed, of a row with a single cell."""
        return [run.last for run in self.only.runs]

    @property
    def is_complete(self) -> bool:
        """Whether each cell has selected runs."""
        return all(cell.runs for cell in self.cells)

    def tables(self, rule: str = "") -> list[tables.TableCell]:
        """Its cells for tables. rule: of selection; "" for its own."""
        return [
            tables.TableCell(
                " ".join(filter(None, [self.row.label, cell.setting])),
                cell.result,
                rule or self.config.evaluation.select,
                cell.folder,
                cell.constant,
                _tests(self.config),
            )
            for cell in self.cells
        ]


def _tests(config: Config) -> Tests:
    """The flags that decide which examples are the test of a held-out domain, for a seed."""
    values = dataclasses.asdict(config.data) | dataclasses.asdict(config.environment)
    values["environment"] = config.environment_name
    return tuple((name, value) for name, value in values.items() if name not in _NOT_OF_TEST)


def configs(
    rows: Sequence[Row], folder: Path, overrides: Sequence[str] = (), source: Path | None = None
) -> list[Config]:
    """The configuration of each row, whose runs lie in `folder`.

    source: the file of the rows, which errors name.
    """
    for word in overrides:
        flag = word.rpartition("=")[0] or word  # --rounds, or --set=penalty
        if flag.partition("=")[0][2:] not in NAMES:  # --nopooled
            flag = f"--{flag.removeprefix('--no')}"
        if all(any(own.startswith(f"{flag}=") for own in row.own) for row in rows):
            raise UsageError(word, ..., "must be left out, as each row has its own")
    names = _folders(folder, [row.label for row in rows])
    result = []
    for row in rows:
        places = [f"--run_dir={folder / names[row.label]}", "--resume"]
        places += [f"--init_from={folder / row.start}"] if row.start else []
        common = ["--nonfinite=mark", *row.flags, *overrides]
        with _naming(row, source):
            chosen = command_line.of_arguments([*common, *row.own, *places])
            for name in chosen.method.algorithm:
                method.check_algorithm(name)
            method.settings(chosen.method)
        result.append(chosen)
    return result


@contextlib.contextmanager
def _naming(row: Row, source: Path | None) -> Iterator[None]:
    """Names the row, and its file, in errors."""
    try:
        yield
    except UsageError as error:
        at = f'{source}, row "{row.label}"' if source else row.label
        raise UsageError(at, ..., str(error)) from None


def _check(rows: Sequence[Row], configs: Sequence[Config], source: Path) -> None:
    """Checks with the data of the first seed that each row can run, before any of them does."""
    for row, chosen in zip(rows, configs, strict=True):
        if not (Path(chosen.output.run_dir) / "result.json").exists():
            with _naming(row, source):
                experiment.make(chosen, chosen.training.seeds[:1], start_of(chosen))


def _folders(folder: Path, labels: Sequence[str]) -> dict[str, str]:
    """The name of the folder of each label; a checksum stands where two would clash."""
    known = {record.label: place.name for place, record in _earlier(folder)}
    return known | grid.names_of_folders(
        [label for label in labels if label not in known], taken=known.values()
    )


def _earlier(folder: Path) -> list[tuple[Path, records.RowRecord]]:
    """The folders of the rows that have run, in the order in which they did."""
    found = [
        (path.parent, records.read(path, records.RowRecord)) for path in folder.glob(f"*/{_RECORD}")
    ]
    return sorted(found, key=lambda pair: pair[1].number)


def joined(folder: Path, others: Sequence[str]) -> list[RowResult]:
    """The results of the rows that earlier commands ran in a folder, but for these labels."""
    results = []
    for place, record in _earlier(folder):
        if record.label not in others:
            cells = sorted(path.parent for path in place.glob("*/config.json"))
            results.append(result_of(Row(record.label, ()), run_folder.flags_of(cells[0]), place))
    return results


def run(
    rows: Sequence[Row], configs: Sequence[Config], write: WriteReport = report.write
) -> list[RowResult]:
    """Runs the rows that are not finished; while one runs, the programs of the next ones compile.

    write: writes the tables and figures of a row.
    """
    machine.connect(configs[0].machine)  # before rows are prepared in threads
    shared = Programs()
    results = []
    with Ahead() as ahead:

        def prepared(index: int) -> Launch:
            label = f"{rows[index].label} ({index + 1} of {len(rows)})"
            place = Path(configs[index].output.run_dir)
            ready = prepare(configs[index], place, in_folders=True, shared=shared, label=label)
            ready.compile_ahead(ahead)
            return ready

        for index, (row, chosen) in enumerate(zip(rows, configs, strict=True)):
            for later in range(index + 1, min(index + 1 + DEPTH, len(rows))):
                if not rows[later].start:  # the network of another row
                    ahead.begin(later, partial(prepared, later))
            ahead.take(index, partial(prepared, index)).run(write, ahead)
            place = Path(chosen.output.run_dir)
            if not (place / _RECORD).exists():
                number = 1 + max([0, *(record.number for _, record in _earlier(place.parent))])
                files.write_json(place / _RECORD, records.RowRecord(row.label, number))
            results.append(result_of(row, chosen, place))
    return results


def result_of(row: Row, chosen: Config, place: Path) -> RowResult:
    """The results of a row that has run. place: its folder."""
    cells = []
    sweep = records.read(place / "result.json", Sweep)
    of_grid = [result.cell.restored() for result in sweep.cells]
    names = grid.folder_names(of_grid).values()
    settings = grid.settings_of(of_grid)
    for result, name, setting in zip(sweep.cells, names, settings, strict=True):
        held_out = selection.held_out_of(result)
        constant = sweep.constants.get(held_out, {})
        cell = CellResult(held_out, [], [], result, place / name, constant, setting)
        if picked := selection.choose(row.label, result, chosen.evaluation.select):
            lines = log.read(cell.folder, picked.runs[0].last.round)
            logs = [[line for line in lines if line.run == index] for index in picked.indices]
            cell = cell._replace(runs=picked.runs, logs=logs)
        cells.append(cell)
    return RowResult(row, chosen, cells)


def overrides() -> tuple[str, ...]:
    """The flags of this process's command line, which are for all rows."""
    if flags.FLAGS["algorithm"].present:
        raise UsageError("--algorithm", ..., "must be left out, as each row has its own")
    return tuple(word for word in command_line.given() if not word.startswith("--run_dir="))


def with_labels(rows: Sequence[Row], labels: Sequence[str]) -> list[Row]:
    """The rows with these labels, or all if there are no labels."""
    for label in labels:
        check_known("rows", label, [row.label for row in rows])
    return [row for row in rows if not labels or row.label in labels]


def compare(file: RowsFile, folder: Path, data: Sequence[str], labels: Sequence[str]) -> str:
    """Runs rows of a file in a folder, and returns their tables with rows that ran there before.

    data: which of the file's data sets; () for the first. labels: of the rows; () for all.
    """
    for name in data:
        check_known("data", name, [*file.rows])
    todo = {}
    for name in data or [*file.rows][:1]:
        place = folder / name
        rows = with_labels(file.rows[name], labels)
        run_folder.check_rows(place)
        todo[name] = rows, configs(rows, place, overrides(), file.path)
    machine.prepare(next(iter(todo.values()))[1][0].machine)
    for rows, chosen in todo.values():
        _check(rows, chosen, file.path)
    texts = []
    for name, (rows, chosen) in todo.items():
        results = {result.row.label: result for result in run(rows, chosen, report.write_table)}
        earlier = joined(folder / name, [*results])
        results |= {result.row.label: result for result in earlier}
        order = [row.label for row in file.rows[name] if row.label in results]
        shown = [results[label] for label in dict.fromkeys([*order, *results])]
        if machine.leads():
            texts.append(write(folder / name / "table", file, name, shown))
    return "\n\n".join(["", *texts])


def write(path: Path, file: RowsFile, data: str, results: Sequence[RowResult]) -> str:
    """Writes the tables and figures of rows of a file, and returns the text to print.

    path: as of `tables.write`.
    """
    rule = results[0].config.evaluation.select
    rules = [rule, *(other for other in file.select if other != rule)]
    cells = [cell for result in results for cell in result.tables(rule)]
    numbers = file.numbers_of(data or results[0].config.data.stem)
    main = tables.main_table(cells, rules=rules, numbers=numbers)
    title = " ".join(filter(None, [file.path.stem, data]))
    text = tables.write(
        path, cells, main, title=title, caption=file.caption, baseline=file.baseline
    )
    runs_csv.write(tables.beside(path, "runs.csv"), cells)
    picture = path.with_suffix(".png")
    if path.name == "table":
        picture = path.with_name("methods.png")
        run_figures.write(path.parent, cells, title)
    figures.draw(
        picture,
        run_figures.methods,
        tables.by_rule(cells, rules),
        title,
        tables.names_of(cells),
        dpi=200,
    )
    return f"{text}\n\nTable: {path.with_suffix('.md')}. Figure: {picture}."
