"""Tables in Markdown, whatever the names in them."""

from collections.abc import Sequence
from typing import Any

import tabulate as tabulated


def tabulate(
    rows: Sequence[Sequence[Any]], headers: Sequence[str], *, tablefmt: str = "github", **style: Any
) -> str:
    """The table of `tabulate`, in which a bar of a name is no border of a cell."""
    escaped = [[_escaped(cell) for cell in row] for row in rows]
    return tabulated.tabulate(escaped, list(map(_escaped, headers)), tablefmt=tablefmt, **style)


def _escaped(cell: Any) -> Any:
    return cell.replace("|", "\\|") if isinstance(cell, str) else cell
