"""The benchmark of a GPU, in its tiny form."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
# All of them but PyTorch, which is no dependency.
SECTIONS = (
    *("peaks", "rounds", "steps", "agreement", "precision", "clients", "seeds"),
    *("first_look", "table"),
)
# A section that has no time to start, before one that has.
CUT_OFF = """
from pathlib import Path
from benchmarks import gpu

options, found = gpu.Options(small=True), {{}}
for name, limit in (("steps", 0.05), ("peaks", 300.0)):
    found[name] = gpu.run(options, name, limit)
    gpu.written(Path({folder!r}), {{"version": "0"}}, found)
"""


def output(*words: str) -> str:
    """In a process of its own, as benchmarks import the commands by another name than tests."""
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_each_section_runs_in_small() -> None:
    printed = output(
        "-m", "benchmarks.gpu", "--small", "--child", f"--sections={','.join(SECTIONS)}"
    )
    rows: list[dict[str, Any]] = [json.loads(line) for line in printed.splitlines()]
    assert {row["section"] for row in rows} == {*SECTIONS}
    assert [row for row in rows if "failed" in row] == []
    (agreement,) = (row for row in rows if row["section"] == "agreement")
    assert agreement["within 1e-4"] == "yes"


@pytest.mark.slow
def test_a_section_that_is_cut_off_loses_no_other(tmp_path: Path) -> None:
    output("-c", CUT_OFF.format(folder=str(tmp_path)))
    found = json.loads((tmp_path / "gpu.json").read_text())["sections"]
    assert found["steps"]["ended"] != "done"
    assert found["steps"]["rows"] == []
    assert found["peaks"]["ended"] == "done"
    assert len(found["peaks"]["rows"]) == 5
    assert "## peaks: done" in (tmp_path / "gpu.md").read_text()
