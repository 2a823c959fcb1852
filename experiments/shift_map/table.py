"""The study behind `fedjax-inv map`: its rows, its table, and its comparison with a second map."""

import dataclasses
import functools
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from fedjax_inv.checks import UsageError

from .. import report, tables
from ..experiment import command_line
from ..experiment.config import Config
from ..flags.flag import check_different, check_known, flag, flag_error
from ..parts import participation
from ..running import files, records
from ..running.records import Origin
from ..shift_map import figures, methods, verdicts
from ..shift_map.cells import Cell, cells_of, heading, place_of
from ..shift_map.columns import LISTED as SHIFTS
from ..shift_map.columns import Shift
from ..shift_map.methods import FEDAVG
from ..studies import study
from ..studies.study import Options, Row, RowResult, Study


class Data(NamedTuple):
    """A data set of the map."""

    preset: str
    held_out: str = ""  # the unseen domain of data that have domains of their own


DATA = {
    "digits": Data("map_digits"),
    "mnist": Data("map_mnist"),
    "fashion_mnist": Data("map_fashion_mnist"),
    "pacs": Data("map_pacs", "sketch"),
}
_BEST = 3  # methods beside FedAvg in the curves by severity


@dataclasses.dataclass(frozen=True)
class Own:
    """The flags of the map besides those of every study."""

    columns: tuple[str, ...] = flag(
        (), f"Kinds of shift; all if none: {', '.join(SHIFTS)}.", kind=str
    )
    grid: str = flag(
        "",
        "A hyperparameter of your own rows and its values, as mu=0.01,0.1,1. Such a row has three "
        "learning rates for each value; without --grid it has nine.",
    )
    beside: str = flag(
        "",
        "The map.csv of the same map with other --seeds; counts the cells that have the same word "
        "in both.",
    )


def columns_of(data: str, names: Sequence[str] = ()) -> dict[str, Shift]:
    """The kinds of shift that a data set can have, or those of --columns.

    Raises UsageError for unknown names.
    """
    has_domains = bool(DATA[data].held_out)
    known = {name: shift for name, shift in SHIFTS.items() if shift.fits(has_domains=has_domains)}
    for name in names:
        check_known("columns", name, SHIFTS)
        if name not in known:
            text = f"does not fit --data={data}; must be one of {', '.join(known)}"
            raise flag_error("columns", name, text)
    return {name: known[name] for name in names or known}


def flags_of(data: str, shift: Shift, severity: float) -> tuple[str, ...]:
    """The flags of a kind of shift in a data set."""
    chosen = DATA[data]
    unseen = ("--environment=none", f"--held_out={chosen.held_out}") if chosen.held_out else ()
    own = unseen if shift.has_unseen_domain else ()
    return (f"--preset={chosen.preset}", *shift.flags(severity), *own)


def row(
    data: str,
    name: str,
    method: methods.Method,
    column: str,
    severity: float,
    overrides: Sequence[str] = (),
) -> Row:
    """A method under a kind of shift. overrides: the flags of `sweep` that concern all rows."""
    own = method.flags(*_terms(DATA[data].preset, tuple(overrides)))
    label = f"{name}-{column}-{severity:g}"
    flags = flags_of(data, SHIFTS[column], severity)
    return Row(label, (*flags, *own), name, f"{column}={severity:g}")


@functools.cache
def _terms(preset: str, overrides: tuple[str, ...]) -> tuple[int, int]:
    """(the rounds, the examples that the clients of a round take in a step) of all rows.

    The latter is 0 if the data say how many clients there are.
    """
    base = _base(preset, overrides)
    clients = base.clients
    slots = participation.slots(base, clients) if clients else 0
    return base.rounds, base.batch_size * slots


@functools.cache
def _base(preset: str, overrides: tuple[str, ...]) -> Config:
    """The flags that all rows share."""
    return command_line.of_arguments(overrides, (f"--preset={preset}",), nonfinite="mark")


def _rows(
    data: str,
    severities: Callable[[Shift], Sequence[float]],
    found: Mapping[str, methods.Method],
    columns: Sequence[str] = (),
    overrides: Sequence[str] = (),
) -> list[Row]:
    # Neighbours differ in the method: two that compile at once must not compile the same program.
    return [
        row(data, name, method, column, severity, overrides)
        for column, shift in columns_of(data, columns).items()
        for severity in severities(shift)
        for name, method in found.items()
    ]


def _of_map(shift: Shift) -> Sequence[float]:
    return (shift.at,)


def _all(shift: Shift) -> Sequence[float]:
    return shift.severities


def select(chosen: Study, data: str, options: Options) -> list[Row]:
    """The rows of --rows and --columns.

    Raises UsageError for unknown ones.
    """
    columns, overrides = options.own.columns, options.overrides
    for word in overrides:
        if word.startswith(("--learning_rate=", "--set=")):
            text = "must be left out: each method selects one of nine settings of its own"
            raise UsageError(word.partition("=")[0], ..., text)
    # Before `_check`, whose errors name a cell.
    if any(word.startswith("--select=") and word != "--select=validation" for word in overrides):
        raise UsageError(
            next(word for word in overrides if word.startswith("--select=")),
            ...,
            "must be validation, the same for all",
        )
    check_different("columns", columns, may_be_empty=True)
    if options.own.beside:  # before any compute
        _check_beside(options.own.beside, data, overrides)
    is_map = chosen is STUDIES["map"]
    names = options.rows
    if not (is_map or names):
        names = best_of(options.folder / data / "map.csv")
    found = methods.of_names(tuple(names), options.own.grid)
    if any(word.startswith("--batch_size") for word in overrides) and "erm" in found:
        text = "must be left out: erm takes the batches of all clients together"
        raise UsageError("--batch_size", ..., text)
    if "erm" in found and not _terms(DATA[data].preset, tuple(overrides))[1]:
        text = "must be above 0: erm takes the batches of all clients together"
        raise flag_error("clients", 0, text)
    return _rows(data, _of_map if is_map else _all, found, columns, overrides)


def _check_beside(path: str, data: str, overrides: Sequence[str]) -> None:
    """Raises UsageError for another file than the map of the same data with other seeds."""
    try:
        read_cells(Path(path))
        record = _record_of(Path(path))
    except UsageError as error:
        raise flag_error("beside", path, error.allowed) from None
    if not record:
        return
    words = shlex.split(record.command)
    if f"--data={data}" not in words:
        raise flag_error("beside", path, f"must be a map of the same data, {data}")
    own = _base(DATA[data].preset, tuple(overrides)).run
    theirs = [word for word in words if word.startswith("--rounds=")]
    if _base(DATA[data].preset, tuple(theirs)).rounds != own.rounds:
        raise flag_error("beside", path, f"must be a map of as many rounds, {own.rounds}")
    if both := sorted({*record.seeds} & {*own.seeds}):
        text = f"must be a map of other seeds, both have {', '.join(map(str, both))}"
        raise flag_error("beside", path, text)


def _record_of(path: Path) -> Origin | None:
    """How the map of a csv file came about; None if no record lies there."""
    record = path.with_suffix(".json")
    return records.read(record, Origin) if record.exists() else None


def write(path: Path, chosen: Study, data: str, rows: list[RowResult], options: Options) -> str:
    """Writes the map as csv, Markdown and LaTeX, and returns the text to print."""
    cells = cells_of(rows)
    parts: list[tables.Part] = [table(cells)]
    if options.own.beside:  # before the new file, which may replace it
        parts.append(_agreement(cells, Path(options.own.beside)))
    files.write(path.with_suffix(".csv"), _csv(cells))
    tables.write_forms(path, [*parts, CAPTION])
    every = [
        report.Cell(each.row.label, each.config.select, cell.folder, cell.result)
        for each in rows
        for cell in each.cells
    ]
    report.write_runs(path.with_name(f"{path.name}_runs.csv"), every)
    return tables.printed(parts)


def _csv(cells: Sequence[Cell]) -> str:
    tests = [" ".join(f"{each:.6g}" for each in cell.tests) for cell in cells]
    frame = pd.DataFrame(cells).assign(tests=tests)
    return frame.to_csv(index=False, float_format="%.6g", na_rep="nan", lineterminator="\n")


def table(cells: Sequence[Cell]) -> pd.DataFrame:
    """The test accuracies, a row per method and a column per kind of shift."""
    rows = [(cell.method, heading(place_of(cell)), _text(cell)) for cell in cells]
    frame = pd.DataFrame(rows, columns=["test accuracy, %", "place", "text"])
    texts = frame.pivot(index="test accuracy, %", columns="place", values="text")
    return texts.reindex(frame.iloc[:, 0].unique(), columns=frame["place"].unique()).reset_index()


def _text(cell: Cell) -> str:
    if np.isnan(cell.test):
        return "diverged"
    text = tables.spread(cell.tests)
    if cell.word in (verdicts.BETTER, verdicts.WORSE):
        text += f", {cell.word}"
    return text


def read_cells(path: Path) -> pd.DataFrame:
    """A map's csv file. Raises UsageError if it is not one."""
    try:
        frame = pd.read_csv(path).astype({"difference": float, "severity": float})
    except (OSError, KeyError, ValueError):
        frame = pd.DataFrame()
    if frame.empty or not {"method", "shift", "word"} <= {*frame}:
        raise UsageError(str(path), ..., "must be the csv file of a map")
    return frame


def _agreement(cells: Sequence[Cell], path: Path) -> str:
    """How many cells have the same word in another map."""
    key = ["method", "shift", "severity"]
    pairs = pd.DataFrame(cells).merge(read_cells(path), on=key, suffixes=("_one", "_two"))
    words = pairs[["word_one", "word_two"]].replace("", None).dropna()  # without one, no test
    same = words["word_one"] == words["word_two"]
    with_word = (words != verdicts.NONE).any(axis=1)
    contrary = sum({*pair} == {verdicts.BETTER, verdicts.WORSE} for pair in words.to_numpy())
    record = _record_of(path)
    seeds = f" (seeds {', '.join(map(str, record.seeds))})" if record else ""
    return (
        f"Beside another map{seeds}: {same.sum()} of {len(words)} cells have the same word. Of the "
        f"{with_word.sum()} cells that are better or worse in one of them, {same[with_word].sum()} "
        f"are so in both, and {contrary} are better in one and worse in the other."
    )


def best_of(path: Path) -> tuple[str, ...]:
    """FedAvg and the methods with the highest mean difference from it, by the map's csv file.

    Raises UsageError if there is no map yet.
    """
    if not path.exists():
        raise flag_error("study", "severity", "must come after --study=map, or with --rows")
    cells = read_cells(path)
    # Pooled training is no federated method, but the bound from outside.
    others = cells[~cells["method"].isin([FEDAVG, "erm"])].groupby("method", sort=False)
    means = others["difference"].agg(lambda values: values.mean(skipna=False))
    return (FEDAVG, *means.dropna().nlargest(_BEST).index)


def _draw_map(path: Path, data: str, results: Sequence[RowResult]) -> str:
    return figures.heat_map(path, data, cells_of(results))


def _draw_severity(path: Path, data: str, results: Sequence[RowResult]) -> str:
    return figures.by_severity(path, data, cells_of(results))


STUDIES: Mapping[str, Study] = {
    "map": Study(
        lambda data: _rows(data, _of_map, methods.LISTED), figures={"": _draw_map}, draws_rows=False
    ),
    "severity": Study(
        lambda data: _rows(data, _all, methods.LISTED),
        figures={"": _draw_severity},
        draws_rows=False,
    ),
}


def _check(config: Config) -> None:
    """Raises UsageError for flags that give a row several cells or another rule of selection."""
    study.check_one_cell(config)
    if config.select != "validation":
        raise flag_error("select", config.select, "must be validation, the same for all")
    if not config.watch_classes:
        raise flag_error("watch_classes", False, "must be true")


CAPTION = (
    "Mean ± standard deviation of the test accuracy over seeds, each of which draws its own data. "
    "Of each method, the validation examples of the clients select one of nine settings and a "
    "round. Better, worse: than FedAvg, by a paired t test over seeds with Holm's correction for "
    "all cells of the table (5%). Without a word, no difference is shown."
)
PAPER = study.Paper(
    "map",
    tuple(DATA),
    STUDIES,
    caption=CAPTION,
    check=_check,
    about_rows="Methods by name, all, or package.module:factory, beside FedAvg; all if none.",
    select=select,
    own=Own,
    write=write,
    words=("map",),
)
