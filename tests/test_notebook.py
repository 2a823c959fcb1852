"""docs/notebooks/first_run.ipynb runs, in one namespace, and shows what it says."""

import json
from pathlib import Path
from typing import Any

import matplotlib
import pytest

PATH = Path(__file__).parents[1] / "docs/notebooks/first_run.ipynb"
CELLS = [cell for cell in json.loads(PATH.read_text())["cells"] if cell["cell_type"] == "code"]


def test_the_notebook_has_no_outputs_and_installs_first() -> None:
    assert not any(cell["outputs"] or cell["execution_count"] for cell in CELLS)
    assert "%pip install" in "".join(CELLS[0]["source"])


@pytest.mark.slow
def test_the_notebook_runs_and_shows_what_it_says() -> None:
    matplotlib.use("Agg")
    names: dict[str, Any] = {"__name__": "notebook"}
    for number, cell in enumerate(CELLS[1:]):
        exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)
    *at_clients, new = names["accuracy"]["FedAvg"]
    assert min(at_clients) > 65
    assert new < 40
    assert names["accuracy"]["FedIPG"][-1] > 50
