"""Tables as text, from rows and a function for each column."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import tabulate as tabulated

Row = TypeVar("Row")
_STYLES = {"markdown": "github", "latex": "latex_booktabs"}  # tabulate's names
FORMS = (*_STYLES,)

# Characters that no text has stand around a bold or italic text until the table is written.
_BOLD, _ITALIC = ("\ue000", "\ue001"), ("\ue002", "\ue003")
_MARKS = {
    "markdown": {_BOLD: ("**", "**"), _ITALIC: ("*", "*")},
    "latex": {_BOLD: (r"\textbf{", "}"), _ITALIC: (r"\textit{", "}")},
}

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
    align: left, right or decimal, for all columns but the first.
    omit_empty: whether to leave out columns whose cells are all empty.
    """
    rows = list(rows)
    pairs = columns.items() if isinstance(columns, Mapping) else columns
    filled = [(heading, [_text(cell(row)) for row in rows]) for heading, cell in pairs]
    filled = [(heading, cells) for heading, cells in filled if any(cells) or not omit_empty]
    headings = [heading for heading, _ in filled]
    lines = [list(line) for line in zip(*(cells for _, cells in filled), strict=True)]
    if form == "markdown":  # an unescaped bar would end the cell
        lines = [[_marked(text, form).replace("|", "\\|") for text in line] for line in lines]
        headings = [heading.replace("|", "\\|") for heading in headings]
    alignments = ["left", *[align] * (len(headings) - 1)] if lines else None
    text = tabulated.tabulate(
        lines, headings, tablefmt=_STYLES[form], disable_numparse=True, colalign=alignments
    )
    if form == "latex":
        # At the beginning of a row these would be arguments of the row before.
        text = re.sub(r"^( *)([\[*])", r"\1{}\2", text, flags=re.MULTILINE)
        return _in_mathematics(_marked(text, form))
    return text


def bold(text: str) -> str:
    """A cell that a table in Markdown or LaTeX shows in bold."""
    return text.join(_BOLD)


def italic(text: str) -> str:
    """A cell that a table in Markdown or LaTeX shows in italics."""
    return text.join(_ITALIC)


def paragraph(text: str, form: str = "markdown") -> str:
    """A text between tables, in Markdown or LaTeX."""
    if form == "markdown":
        return text
    escaped = "".join(tabulated.LATEX_ESCAPE_RULES.get(character, character) for character in text)
    return _in_mathematics(escaped)


def _marked(text: str, form: str) -> str:
    for characters, marks in _MARKS[form].items():
        for character, mark in zip(characters, marks, strict=True):
            text = text.replace(character, mark)
    return text


def _in_mathematics(text: str) -> str:
    """A text for LaTeX, whose older versions lack these characters."""
    return text.replace("±", r"$\pm$")


def _text(cell: object) -> str:
    return "" if cell is None else str(cell)
