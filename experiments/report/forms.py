"""Parts of a report as text, in Markdown and in LaTeX, and numbers over seeds as text."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pandas as pd
import tabulate

from ..assembly.metrics import Measure
from ..folder import files

Part: TypeAlias = pd.DataFrame | str  # of a report: a table or a paragraph

# Characters that no text has stand around a bold or italic text until a form writes it.
BOLD = "\ue000{}\ue001"
ITALIC = "\ue002{}\ue003"
_MARKS = "".join([BOLD, ITALIC]).replace("{}", "")
_MARKDOWN = str.maketrans({"|": "\\|", **dict(zip(_MARKS, ("**", "**", "*", "*"), strict=True))})
_LATEX = str.maketrans(
    {
        **tabulate.LATEX_ESCAPE_RULES,
        "±": r"$\pm$",  # older versions of LaTeX lack it
        **dict(zip(_MARKS, (r"\textbf{", "}", r"\textit{", "}"), strict=True)),
    }
)
# A column of a paper, and the width of its text, in points: those of LaTeX's article.
_COLUMN = 229.0
_PAGE = 468.0
_SIZES = {"small": 9, "footnotesize": 8, "scriptsize": 7}  # points
# The widths of characters of Computer Modern, about, as parts of the font size.
_NARROW = 0.33
_WIDE = 0.85
_USUAL = 0.5
_CAPITAL = 0.72
_BOLD = 1.15
_BETWEEN = 3  # points on both sides of a column


def markdown(part: Part, *, align: str = "left") -> str:
    """A table or a paragraph in Markdown.

    align: left, right or decimal, for all columns of a table but the first.
    """
    if isinstance(part, str):
        return part
    cells = part.map(lambda cell: _text(cell).translate(_MARKDOWN))
    cells.columns = [heading.replace("|", "\\|") for heading in cells.columns]
    alignments = ["left", *[align] * (len(cells.columns) - 1)] if len(cells) else None
    text: str = cells.to_markdown(
        index=False, tablefmt="github", disable_numparse=True, colalign=alignments
    )
    return text


def printed(parts: Sequence[Part]) -> str:
    """Parts as text for the screen."""
    return "\n\n".join(map(markdown, parts))


def write_markdown(path: Path, parts: Sequence[Part], title: str = "") -> None:
    """Writes parts as Markdown."""
    head = [f"# {title}"] if title else []
    files.write(path, "\n\n".join([*head, *map(markdown, parts)]) + "\n")


def _text(cell: object) -> str:
    return "" if pd.isna(cell) else str(cell)


def latex(text: str) -> str:
    """A text in LaTeX, with its special characters escaped."""
    return text.translate(_LATEX)


def write_latex(path: Path, tables: Sequence[pd.DataFrame], caption: str) -> None:
    r"""Writes a table as a float of LaTeX for a paper, with the package booktabs.

    It is the first of the tables that fits into a column, or else into the width of a page
    (`table*`), in a font of at least 7 points; of the last one, the columns that fit.

    path: also gives the \label.
    """
    table, width, size = _fitting(tables)
    kind = "table" if width == _COLUMN else "table*"
    name = path.parent.name if path.stem == "table" else f"{path.parent.name}-{path.stem}"
    label = re.sub("[^a-z0-9]+", "-", name.lower()).strip("-")
    lines = [
        r"% needs \usepackage{booktabs}",
        rf"\begin{{{kind}}}[t]",
        r"\centering",
        rf"\caption{{{latex(caption)}}}",
        rf"\label{{tab:{label}}}",
        rf"\{size}\setlength{{\tabcolsep}}{{{_BETWEEN}pt}}",
        _tabular(table),
        rf"\end{{{kind}}}",
    ]
    files.write(path, "\n".join(lines) + "\n")


def _fitting(tables: Sequence[pd.DataFrame]) -> tuple[pd.DataFrame, float, str]:
    """The first table that fits somewhere, or what fits of the last; its width; its font."""
    places = [(_COLUMN, "small"), (_COLUMN, "footnotesize")]
    places += [(_PAGE, size) for size in _SIZES]
    last = tables[-1]
    cut = [last.iloc[:, :count] for count in range(len(last.columns) - 1, 1, -1)]
    for table in [*tables, *cut]:
        for width, size in places:
            if _width(table, size) <= width:
                return table, width, size
    return last.iloc[:, :2], _PAGE, "scriptsize"


def _width(table: pd.DataFrame, size: str) -> float:
    """The width of a table in points, about."""
    widths = [
        max(map(_characters, [heading, *map(_text, table.iloc[:, at])]))
        for at, heading in enumerate(table.columns)
    ]
    return sum(_SIZES[size] * width + 2 * _BETWEEN for width in widths)


def _characters(text: str) -> float:
    """The width of a text as a multiple of the font size, about."""
    width = 0.0
    for character in text:
        if character in " .,:;!'|()[]fijlrtI-":
            width += _NARROW
        elif character in "mwMW%±":
            width += _WIDE
        elif character not in _MARKS:
            width += _CAPITAL if character.isupper() else _USUAL
    return width * (_BOLD if _MARKS[0] in text else 1)


def _tabular(table: pd.DataFrame) -> str:
    rows = [[*table.columns], *table.map(_text).to_numpy().tolist()]
    lines = [" & ".join(latex(cell) for cell in row) + r" \\" for row in rows]
    # At the beginning of a row these would be arguments of the row before.
    lines = [re.sub(r"^([\[*])", r"{}\1", line) for line in lines]
    columns = "l" + "c" * (len(table.columns) - 1)
    return "\n".join(
        [
            rf"\begin{{tabular}}{{@{{}}{columns}@{{}}}}",
            r"\toprule",
            lines[0],
            r"\midrule",
            *lines[1:],
            r"\bottomrule",
            r"\end{tabular}",
        ]
    )


def spread(values: Sequence[float], form: str = ".1f") -> str:
    """The mean and standard deviation over seeds, as text."""
    mean = f"{np.mean(values):{form}}"
    return f"{mean} ± {np.std(values, ddof=1):{form}}" if len(values) > 1 else mean


def percent(values: Sequence[float]) -> str:
    """The mean and standard deviation over seeds, in percent, as text."""
    return spread([100 * value for value in values])


def text_of(measure: Measure) -> Callable[[Sequence[float]], str]:
    """A function from values of a score to their mean and standard deviation, as text."""
    return percent if measure.is_share else lambda values: spread(values, ".4g")


def known(form: Callable[[Sequence[float]], str]) -> Callable[[pd.Series], str]:
    """A text of the numbers that are known; "" if none is."""
    return lambda values: form([*values.dropna()]) if values.notna().any() else ""
