"""Writes the tables and figures of README and docs/ from the files that studies wrote.

python -m tools.results
python -m tools.results --publish runs/fedipg/colored_digits/colours.md

A page names a file of docs/results/tables/ in a comment, and another comment ends the block:

    <!-- table: docs/results/tables/fedipg_colored_digits_colours.md -->
    <!-- end -->

    <!-- figure: docs/results/tables/fedipg_colored_digits_colours_by_round.png By round -->
    <!-- end -->

Between the two stand the file's first table (`table 2:` names the second) or the picture with its
caption, and a line that says how it came about, of the record beside the file, FILE.json. --publish
copies tables and pictures of a study's run folder with their records to docs/results/tables/ as
PAPER_DATA_STUDY; others need a --name.
"""

import argparse
import json
import os
import re
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TABLES = Path("docs/results/tables")

_BLOCK = re.compile(
    r"^(?P<indent> *)<!-- (?P<kind>table|figure)(?: (?P<number>\d+))?: (?P<file>\S+)"
    r"(?: (?P<caption>[^\n]*))? -->\n(?P<shown>(?:(?!^ *<!-- )[^\n]*\n)*)^ *<!-- end -->$",
    re.MULTILINE,
)
_TABLE = re.compile(r"^ *\|.*\|\n *\|[-:| ]+\|\n(?: *\|.*\|(?:\n|\Z))*", re.MULTILINE)
_MARKS = re.compile(r"\s*(Bold: .*)")  # says what bold and italics mean, behind a table


def pages(root: Path = ROOT) -> list[Path]:
    """README and the pages of docs/."""
    folders = (root / "docs", root / "docs/results")
    return [root / "README.md", *(path for each in folders for path in sorted(each.glob("*.md")))]


def written(path: Path, root: Path = ROOT) -> str:
    """The text of a page with all blocks as their files have them."""

    def block(found: re.Match[str]) -> str:
        file = root / found["file"]
        if found["kind"] == "table":
            lines = _table(file, int(found["number"] or 1))
        else:
            lines = [f"![{found['caption']}]({os.path.relpath(file, path.parent)})"]
        lines = ["", *lines, "", provenance(record_of(file)), ""]
        shown = "".join(f"{found['indent']}{line}".rstrip() + "\n" for line in lines)
        head, end = found[0].split("\n", 1)[0], f"{found['indent']}<!-- end -->"
        return f"{head}\n{shown}{end}"

    return _BLOCK.sub(block, path.read_text(encoding="utf-8"))


def _table(file: Path, number: int) -> list[str]:
    """The lines of a file's table, and what its marks mean."""
    text = file.read_text(encoding="utf-8")
    found = [*_TABLE.finditer(text)][number - 1]
    marks = _MARKS.match(text, found.end())
    return [*found[0].rstrip("\n").split("\n"), *(["", marks[1]] if marks else [])]


def record_of(file: Path) -> dict[str, Any]:
    """The record beside a published file."""
    return json.loads(file.with_name(f"{file.name}.json").read_text(encoding="utf-8"))


def provenance(record: dict[str, Any]) -> str:
    """How a table or a figure came about, in a line."""
    commit = record.get("commit") or ""
    parts = [
        record.get("note") or f"Version {record['versions']['fedjax_inv']}",
        f"commit {commit[:7]}{'-dirty' * commit.endswith('-dirty')}" if commit else "",
        _seeds(record.get("seeds", [])),
    ]
    commands = record["command"].split("\n")
    if not record.get("note"):
        commands = [f"`{line}`" for line in commands]
    return f"{', '.join(part for part in parts if part)}: {'; '.join(commands)}"


def _seeds(seeds: Sequence[int]) -> str:
    if len(seeds) < 2:
        return f"seed {seeds[0]}" if seeds else ""
    if [*seeds] == [*range(seeds[0], seeds[-1] + 1)]:
        return f"seeds {seeds[0]} to {seeds[-1]}"
    return f"seeds {', '.join(map(str, seeds))}"


def publish(path: Path, name: str = "", root: Path = ROOT) -> Path:
    """Copies a table or a picture of a run folder with its record; returns the new file.

    name: the name of its study among the published files; "" for PAPER_DATA_STUDY.
    """
    record, study = path.with_name(f"{path.name}.json"), path.stem
    if not record.exists():
        beside = [each for each in path.parent.glob("*.json") if path.stem.startswith(each.stem)]
        record = max(beside, key=lambda each: len(each.stem))
        study = record.stem
    if not name:
        words = shlex.split(json.loads(record.read_text(encoding="utf-8"))["command"])
        paper = words[2] if words[1] == "paper" else words[1]
        name = f"{paper}_{path.parent.name}_{study}"
    target = root / TABLES / f"{name}{path.stem.removeprefix(study)}{path.suffix}"
    shutil.copyfile(path, target)
    shutil.copyfile(record, target.with_name(f"{target.name}.json"))
    return target


def main() -> None:
    """Publishes files, and writes the blocks of all pages."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--publish", nargs="+", type=Path, default=[], metavar="FILE")
    parser.add_argument("--name", default="")
    options = parser.parse_args()
    for path in options.publish:
        print(f"Published: {publish(path, options.name).relative_to(ROOT)}")
    for path in pages():
        text = written(path)
        if text != path.read_text(encoding="utf-8"):
            path.write_text(text, encoding="utf-8")
            print(f"Written: {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
