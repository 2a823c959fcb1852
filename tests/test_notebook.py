"""docs/notebooks/first_run.ipynb runs, in one namespace, and shows what it says."""

import json
from pathlib import Path
from typing import Any

import matplotlib
import pytest

ROOT = Path(__file__).parents[1]
PATH = ROOT / "docs/notebooks/first_run.ipynb"
NOTEBOOK = json.loads(PATH.read_text())
CODE = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def is_skipped(cell: dict[str, Any]) -> bool:
    return "skip-execution" in cell["metadata"].get("tags", [])


def test_the_notebook_has_no_outputs_and_installs_first() -> None:
    assert not any(cell["outputs"] or cell["execution_count"] for cell in CODE)
    assert [is_skipped(cell) for cell in CODE] == [True] + [False] * (len(CODE) - 1)
    assert "%pip install" in "".join(CODE[0]["source"])
    assert not any(line[:1] == "%" for cell in CODE[1:] for line in cell["source"])
    assert len(PATH.read_bytes()) < 20_000
    assert len({cell["id"] for cell in NOTEBOOK["cells"]}) == len(NOTEBOOK["cells"])


@pytest.mark.slow
def test_the_notebook_runs_and_shows_what_it_says() -> None:
    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.close("all")
    names: dict[str, Any] = {"__name__": "notebook"}
    for number, cell in enumerate(CODE):
        if not is_skipped(cell):
            exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)
    assert len(pyplot.get_fignums()) == 3
    pyplot.close("all")
    *at_clients, new = names["accuracy"]["FedAvg"]
    assert min(at_clients) > 65
    assert new < 40
    *_, invariant = names["accuracy"]["FedIPG"]
    assert invariant > 50
