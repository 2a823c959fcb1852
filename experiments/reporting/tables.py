"""Tables as text, from frames of pandas or from rows and a function for each column."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias, TypeVar

import pandas as pd
import tabulate as tabulated

Row = TypeVar("Row")
Part: TypeAlias = pd.DataFrame | str  # of a report: a table or a paragraph
_STYLES = {"markdown": "github", "latex": "latex_booktabs"}  # tabulate's names
FORMS = (*_STYLES,)

# Characters that no text has stand around a bold or italic text until the table is written.
_BOLD, _ITALIC = ("\ue000", "\ue001"), ("\ue002", "\ue003")
_MARKS = {
    "markdown": {_BOLD: ("**", "**"), _ITALIC: ("*", "*")},
    "latex": {_BOLD: (r"\textbf{", "}"), _ITALIC: (r"\textit{", "}")},
}

Columns = Mapping[str, Callable[[Row], object]] | Sequence[tuple[str, Callable[[Row], object]]]


def text(part: Part, form: str = "markdown", *, align: str = "left") -> str:
    """A table or a paragraph in one of FORMS.

    align: left, right or decimal, for all columns of a table but the first.
    """
    if isinstance(part, str):
        return part if form == "markdown" else _in_mathematics(_escaped(part))
    cells = part.map(lambda cell: "" if pd.isna(cell) else str(cell))
    if form == "markdown":  # an unescaped bar would end the cell
        cells = cells.map(lambda cell: _marked(cell, form).replace("|", "\\|"))
        cells.columns = [heading.replace("|", "\\|") for heading in cells.columns]
    alignments = ["left", *[align] * (len(cells.columns) - 1)] if len(cells) else None
    written = cells.to_markdown(
        index=False, tablefmt=_STYLES[form], disable_numparse=True, colalign=alignments
    )
    if form == "latex":
        # At the beginning of a row these would be arguments of the row before.
        written = re.sub(r"^( *)([\[*])", r"\1{}\2", written, flags=re.MULTILINE)
        return _in_mathematics(_marked(written, form))
    return written


def table(rows: Iterable[Row], columns: Columns[Row], *, align: str = "left") -> str:
    """A table in Markdown, of rows and a function from a row to its cell for each column.

    columns: heading -> function. Pairs instead of a mapping allow equal headings.
    align: as for `text`.
    """
    pairs = [*(columns.items() if isinstance(columns, Mapping) else columns)]
    cells = [[cell(row) for _, cell in pairs] for row in rows]
    frame = pd.DataFrame(cells, columns=[heading for heading, _ in pairs], dtype=object)
    return text(frame, align=align)


def bold(text: str) -> str:
    """A cell that a table in Markdown or LaTeX shows in bold."""
    return text.join(_BOLD)


def italic(text: str) -> str:
    """A cell that a table in Markdown or LaTeX shows in italics."""
    return text.join(_ITALIC)


def _escaped(text: str) -> str:
    return "".join(tabulated.LATEX_ESCAPE_RULES.get(character, character) for character in text)


def _marked(text: str, form: str) -> str:
    for characters, marks in _MARKS[form].items():
        for character, mark in zip(characters, marks, strict=True):
            text = text.replace(character, mark)
    return text


def _in_mathematics(text: str) -> str:
    """A text for LaTeX, whose older versions lack these characters."""
    return text.replace("±", r"$\pm$")
