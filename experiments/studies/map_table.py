"""The study behind `fedjax-inv map`: its rows, its table, and its comparison with a second map."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from fedjax_inv.checks import UsageError

from .. import command_line
from ..assembly import factories, method
from ..errors import check_known, flag_error
from ..folder import files
from ..report import differences, forms, runs_csv, tables
from . import map_figures, map_methods, study
from .map_cells import MapCell, cells_of, heading, place_of
from .map_columns import LISTED as SHIFTS
from .map_columns import Shift
from .map_methods import FEDAVG
from .row_runs import RowResult
from .rows import Row
from .study import Study, StudyOptions

# Data set -> the unseen domain of data that have domains of their own.
DATA = {"digits": "", "mnist": "", "fashion_mnist": "", "pacs": "sketch"}
_BEST = 3  # methods beside FedAvg in the curves by severity


class MapFlags(NamedTuple):
    """The flags of the map besides those of every study."""

    columns: tuple[str, ...] = ()
    grid: str = ""
    beside: str = ""


def columns_of(data: str, names: Sequence[str] = ()) -> dict[str, Shift]:
    """The kinds of shift that a data set can have, or those of --columns."""
    has_domains = bool(DATA[data])
    known = {name: shift for name, shift in SHIFTS.items() if shift.fits(has_domains=has_domains)}
    for name in names:
        check_known("columns", name, known)
    return {name: known[name] for name in names or known}


def flags_of(data: str, shift: Shift, severity: float) -> tuple[str, ...]:
    """The flags of a kind of shift in a data set."""
    is_own = DATA[data] and shift.is_unseen
    own = ("--environment=none", f"--held_out={DATA[data]}") if is_own else ()
    # Fewer validation examples could not tell the two domains apart.
    copies = ("--dataset=moved_digits",) if data == "digits" and shift.preset else ()
    rules = ("--leave_one_out",) if shift.by_rule else ()
    return (f"--preset=map_{data}{shift.preset}", *shift.flags(severity), *own, *copies, *rules)


def row(
    data: str,
    name: str,
    method: map_methods.MapMethod,
    column: str,
    severity: float,
    overrides: Sequence[str] = (),
) -> Row:
    """A method under a kind of shift. overrides: the flags of `train` that concern all rows."""
    label = f"{name}-{column}-{severity:g}"
    flags = flags_of(data, SHIFTS[column], severity)
    own = method.flags(*_terms((*flags, *overrides)))
    return Row(label, (*flags, *own), name, f"{column}={severity:g}")


@cache
def _terms(words: tuple[str, ...]) -> tuple[int, int]:
    """(the rounds, the examples that the clients of a round take in a step) of a column's rows.

    The latter is 0 if the data say how many clients there are.
    """
    base = command_line.of_arguments(words)
    count = base.partition.clients
    slots = method.slots(base.participation, count) if count else 0
    return base.training.rounds, base.training.batch_size * slots


def _rows(
    data: str,
    study: str,
    found: Mapping[str, map_methods.MapMethod] = map_methods.LISTED,
    columns: Sequence[str] = (),
    overrides: Sequence[str] = (),
) -> list[Row]:
    """The rows of the study: at one severity for the map, at all for the curves."""
    # Neighbours differ in the method: two that compile at once must not compile the same program.
    return [
        row(data, name, method, column, severity, overrides)
        for column, shift in columns_of(data, columns).items()
        for severity in ((shift.at,) if study == "map" else shift.severities)
        for name, method in found.items()
        if (shift.by_rule if "--pooled" in method.settings else shift.mixes(severity))
        or not factories.facts(method.algorithm).needs_domains
    ]


def select(data: str, options: StudyOptions) -> list[Row]:
    """The rows of --rows and --columns."""
    names = options.rows
    if options.study == "severity" and not names:
        names = best_of(options.folder / data / "map.csv")
    found = map_methods.of_names(names, options.own.grid)
    return _rows(data, options.study, found, options.own.columns, options.overrides)


def write(path: Path, rows: list[RowResult], options: StudyOptions) -> str:
    """Writes the map as csv, Markdown and LaTeX, and returns the text to print."""
    cells = cells_of(rows)
    # Before the new file, which may replace it.
    more = [_agreement(cells, Path(options.own.beside))] if options.own.beside else []
    of_rules = (of for rule, of in by_rule(rows).items() if rule)
    every = [*cells, *itertools.chain(*of_rules)]
    tests = [" ".join(f"{each:.6g}" for each in cell.tests) for cell in every]
    frame = pd.DataFrame(every).assign(tests=tests)
    text = frame.to_csv(index=False, float_format="%.6g", na_rep="nan", lineterminator="\n")
    files.write(path.with_suffix(".csv"), text)
    finished = study.cells_of(rows)
    runs_csv.write(path.with_name(f"{path.name}_runs.csv"), finished)
    return tables.write(path, finished, tables.Main(table(cells)), caption=CAPTION, more=more)


def by_rule(rows: Sequence[RowResult]) -> dict[str, list[MapCell]]:
    """The cells by each rule, where rules that compare training domains choose, too."""
    shown = [row for row in rows if SHIFTS[row.row.x.partition("=")[0]].by_rule]
    return {rule: cells_of(shown, rule) for rule in map_figures.RULES} if shown else {}


def table(cells: Sequence[MapCell]) -> pd.DataFrame:
    """The test accuracies, a row per method and a column per kind of shift."""
    methods = [*dict.fromkeys(cell.method for cell in cells)]
    columns: dict[str, dict[str, str]] = {}
    for cell in cells:
        texts = columns.setdefault(heading(place_of(cell)), dict.fromkeys(methods, "not run"))
        texts[cell.method] = _text(cell)
    return tables.table("test accuracy, %", methods, [*columns.items()])


def _text(cell: MapCell) -> str:
    if np.isnan(cell.test):
        return "diverged"
    text = forms.spread(cell.tests)
    if cell.word in (differences.BETTER, differences.WORSE):
        text += f", {cell.word}"
    return text + tables.ONE * cell.is_constant


def read_cells(path: Path) -> pd.DataFrame:
    """A map's csv file."""
    try:
        frame = pd.read_csv(path).astype({"difference": float, "severity": float})
        frame = frame.drop_duplicates(["method", "shift", "severity"])  # --select's rule is first
        return frame.astype({"method": str, "shift": str, "word": object})
    except (OSError, KeyError, ValueError):
        raise UsageError(str(path), ..., "must be the csv file of a map") from None


def _agreement(cells: Sequence[MapCell], path: Path) -> str:
    """How many cells have the same word in another map."""
    key = ["method", "shift", "severity"]
    pairs = pd.DataFrame(cells).merge(read_cells(path), on=key, suffixes=("_one", "_two"))
    words = pairs[["word_one", "word_two"]].replace("", None).dropna()  # without one, no test
    same = words["word_one"] == words["word_two"]
    with_word = (words != differences.NONE).any(axis=1)
    contrary = sum({*pair} == {differences.BETTER, differences.WORSE} for pair in words.to_numpy())
    return (
        f"Beside another map: {same.sum()} of {len(words)} cells have the same word. Of the "
        f"{with_word.sum()} cells that are better or worse in one of them, {same[with_word].sum()} "
        f"are so in both, and {contrary} are better in one and worse in the other."
    )


def best_of(path: Path) -> tuple[str, ...]:
    """FedAvg and the methods with the highest mean difference from it, by the map's csv file."""
    if not path.exists():
        raise flag_error("study", "severity", "must come after --study=map, or with --rows")
    cells = read_cells(path)
    # Pooled training is no federated method, but the bound from outside.
    others = cells[~cells["method"].isin([FEDAVG, "erm", tables.CONSTANT])].groupby(
        "method", sort=False
    )
    means = others["difference"].agg(lambda values: values.mean(skipna=False))
    return (FEDAVG, *means.dropna().nlargest(_BEST).index)


def _draw(paint: Callable[..., str], path: Path, data: str, rows: Sequence[RowResult]) -> str:
    return paint(path, data, cells_of(rows))


def _draw_rules(path: Path, data: str, rows: Sequence[RowResult]) -> str:
    cells = by_rule(rows)
    return map_figures.rules(path, data, cells) if cells else ""


_FIGURES: dict[str, dict[str, study.Draw]] = {
    "map": {"": partial(_draw, map_figures.heat_map), "_rules": _draw_rules},
    "severity": {"": partial(_draw, map_figures.by_severity)},
}
STUDIES = {
    name: Study(partial(_rows, study=name), figures=of, draws_rows=False)
    for name, of in _FIGURES.items()
}
CAPTION = (
    "Mean ± standard deviation of the test accuracy over seeds, each of which draws its own data. "
    "Of each method, the validation examples of the clients select one of nine settings and a "
    "round. Better, worse: than FedAvg, by a paired t test over seeds with Holm's correction for "
    "all cells of the table (5%). Without a word, no difference is shown."
)
MAP = study.Paper(
    "map", tuple(DATA), STUDIES, caption=CAPTION, select=select, write=write, words=("map",)
)
