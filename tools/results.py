"""Writes the tables and figures of README and docs/ from the files that studies wrote.

python -m tools.results
python -m tools.results --publish runs/fedipg/colored_digits/colours.md

A page names a file of docs/results/tables/ in a comment, and another comment ends the block:

    <!-- table: docs/results/tables/fedipg_colored_digits_colours.md penalty; test; worst domain -->
    <!-- end -->

    <!-- figure: docs/results/tables/fedipg_colored_digits_colours_by_round.png By round -->
    <!-- end -->

Between the two stand the file's first table (`table 2:` names the second), or the picture with its
caption. A table has its first column and those that the comment names, without ", %"; all if it
names none. --publish copies tables and pictures of a study's run folder to docs/results/tables/ as
PAPER_DATA_STUDY, with a record that says how they came about, PAPER_DATA_STUDY.json; a table or
picture of another command needs a --name. The test score of each seed, by each rule of selection,
goes from the study's runs.csv to scores.csv there: means and intervals can be computed from it.
"""

import argparse
import json
import os
import re
import shlex
import shutil
from pathlib import Path

import pandas as pd

ROOT = Path(__file__).parents[1]
TABLES = Path("docs/results/tables")
SCORES = TABLES / "scores.csv"

_BLOCK = re.compile(
    r"^(?P<indent> *)<!-- (?P<kind>table|figure)(?: (?P<number>\d+))?: (?P<file>\S+)"
    r"(?: (?P<words>[^\n]*))? -->\n(?P<shown>(?:(?!^ *<!-- )[^\n]*\n)*)^ *<!-- end -->$",
    re.MULTILINE,
)
_TABLE = re.compile(r"^ *\|.*\|\n *\|[-:| ]+\|\n(?: *\|.*\|(?:\n|\Z))*", re.MULTILINE)


def pages(root: Path = ROOT) -> list[Path]:
    """README and the pages of docs/."""
    folders = (root / "docs", root / "docs/results")
    return [root / "README.md", *(path for each in folders for path in sorted(each.glob("*.md")))]


def written(path: Path, root: Path = ROOT) -> str:
    """The text of a page with all blocks as their files have them."""

    def block(found: re.Match[str]) -> str:
        file = root / found["file"]
        if found["kind"] == "table":
            lines = _table(file, int(found["number"] or 1), found["words"] or "")
        else:
            lines = [f"![{found['words']}]({os.path.relpath(file, path.parent)})"]
        shown = "".join(f"{found['indent']}{line}".rstrip() + "\n" for line in ["", *lines, ""])
        head, end = found[0].split("\n", 1)[0], f"{found['indent']}<!-- end -->"
        return f"{head}\n{shown}{end}"

    return _BLOCK.sub(block, path.read_text(encoding="utf-8"))


def _table(file: Path, number: int, columns: str) -> list[str]:
    """The lines of a file's table, with its first column and the named ones."""
    found = [*_TABLE.finditer(file.read_text(encoding="utf-8"))][number - 1]
    rows = [line.strip().strip("|").split("|") for line in found[0].splitlines()]
    names = [cell.strip().removesuffix(", %") for cell in rows[0]]
    wanted = [names.index(name.strip()) for name in columns.split(";") if name.strip()]
    shown = [0, *wanted] if wanted else range(len(names))
    return ["|".join(["", *(row[place] for place in shown), ""]) for row in rows]


def record_of(file: Path) -> Path:
    """The record of a study's table or picture: the longest name with which the file's begins."""
    records = [each for each in file.parent.glob("*.json") if file.stem.startswith(each.stem)]
    return max(records, key=lambda each: len(each.stem))


def publish(path: Path, name: str = "", root: Path = ROOT) -> Path:
    """Copies a table or a picture of a run folder with its record; returns the new file.

    name: the name of its study among the published files; "" for PAPER_DATA_STUDY.
    """
    record = record_of(path)
    if not name:
        words = shlex.split(json.loads(record.read_text(encoding="utf-8"))["command"])
        paper = words[2] if words[1] == "paper" else words[1]
        name = f"{paper}_{path.parent.name}_{record.stem}"
    target = root / TABLES / f"{name}{path.stem.removeprefix(record.stem)}{path.suffix}"
    shutil.copyfile(path, target)
    shutil.copyfile(record, target.with_name(f"{name}.json"))
    runs = record.with_name(f"{record.stem}_runs.csv")
    if runs.exists():
        found = scores_of(pd.read_csv(runs, low_memory=False))
        found.insert(0, "table", name)
        if (root / SCORES).exists():
            others = pd.read_csv(root / SCORES)
            found = pd.concat([others[others["table"] != name], found])
        found.sort_values("table", kind="stable").to_csv(root / SCORES, index=False)
    return target


def scores_of(runs: pd.DataFrame) -> pd.DataFrame:
    """The test score of each seed of a table's rows, by the rules that select it.

    runs: a study's runs.csv, with a line for each evaluation and domain.
    """
    lines = runs[runs["selected_by"].notna()].drop_duplicates(
        ["method", "held_out", "run", "round"]
    )
    names = runs.columns[runs.columns.get_loc("seed") + 1 : runs.columns.get_loc("round")]
    varied = runs.groupby("method")[list(names)].nunique() > 1

    def setting(line: pd.Series) -> str:
        return ", ".join(f"{x}={line[x]:g}" for x in names if varied.loc[line["method"], x])

    lines = lines.assign(
        setting=lines.apply(setting, axis=1), by=lines["selected_by"].str.split()
    ).explode("by")
    lines["selects"] = lines["by"] == lines["rule"]
    lines["test_score"] = lines["test_score"].round(6)
    columns = ["method", "held_out", "by", "selects", "seed", "setting", "round", "test_score"]
    return (
        lines[columns]
        .rename(columns={"method": "row", "by": "rule", "test_score": "score"})
        .sort_values(["row", "held_out", "rule", "seed"], kind="stable")
    )


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
