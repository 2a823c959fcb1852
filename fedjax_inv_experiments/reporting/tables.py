"""Tables as text, from rows and a function for each column."""

import csv
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import tabulate as tabulated

Row = TypeVar("Row")
_STYLES = {"markdown": "github", "latex": "latex_booktabs"}  # tabulate's names
FORMS = (*_STYLES, "csv")


Columns = Mapping[str, Callable[[Row], object]] | Sequence[tuple[str, Callable[[Row], object]]]


def table(
    rows: Iterable[Row],
    columns: Columns[Row],
    *,
    form: str = "markdown",
    align: str = "left",
    omit_empty: bool = False,
) -> str:
    """A table in one of FORMS.

    columns: heading -> a function from a row to its cell, None for an empty cell. Pairs instead of
        a mapping allow equal headings.
    align: left, right or decimal, for all columns but the first; CSV ignores it.
    omit_empty: whether to leave out columns whose cells are all empty.
    """
    rows = list(rows)
    pairs = columns.items() if isinstance(columns, Mapping) else columns
    filled = [(heading, [_text(cell(row)) for row in rows]) for heading, cell in pairs]
    filled = [(heading, cells) for heading, cells in filled if any(cells) or not omit_empty]
    headings = [heading for heading, _ in filled]
    lines = [list(line) for line in zip(*(cells for _, cells in filled), strict=True)]
    if form == "csv":
        file = io.StringIO()
        csv.writer(file, lineterminator="\n").writerows([headings, *lines])
        return file.getvalue().rstrip("\n")
    if form == "markdown":  # an unescaped bar would end the cell
        headings, *lines = [[text.replace("|", "\\|") for text in x] for x in (headings, *lines)]
    alignments = ["left", *[align] * (len(headings) - 1)] if lines else None
    return tabulated.tabulate(
        lines, headings, tablefmt=_STYLES[form], disable_numparse=True, colalign=alignments
    )


def _text(cell: object) -> str:
    return "" if cell is None else str(cell)
