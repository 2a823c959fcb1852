"""The pages show tables and figures as their files have them."""

import json
import re
from pathlib import Path

from tools import results

RECORD = {
    "command": "fedjax-inv paper fedipg --study=colours --data=digits",
    "seeds": [0, 1, 2],
    "commit": "0123456789",
    "versions": {"fedjax_inv": "0.9.0"},
}
TABLE = "| a | test, % |\n|---|---|\n| x | **12.5 ± 1.0** |\n"


def test_every_page_is_as_the_files_have_it() -> None:
    texts = {path: path.read_text() for path in results.pages()}
    assert not [path for path, text in texts.items() if results.written(path) != text]
    shown = "\n".join(texts.values())
    records = [*(results.ROOT / results.TABLES).glob("*.json")]
    assert not [path for path in records if path.name.removesuffix(".json") not in shown]
    place = re.compile(r'["=\s]([~/]|[A-Z]:\\)')
    assert not [path for path in records if place.search(path.read_text())]


def test_a_page_shows_published_files(tmp_path: Path) -> None:
    run = tmp_path / "runs/digits"
    run.mkdir(parents=True)
    (tmp_path / results.TABLES).mkdir(parents=True)
    (run / "colours.md").write_text(f"{TABLE}\nMore.\n\n{TABLE.replace('12.5', '3.5')}\nBold: x.\n")
    (run / "colours_by_round.png").write_bytes(b"picture")
    (run / "colours.json").write_text(json.dumps(RECORD))
    table, figure = (
        results.publish(run / name, root=tmp_path).relative_to(tmp_path).as_posix()
        for name in ("colours.md", "colours_by_round.png")
    )
    assert table == "docs/results/tables/fedipg_digits_colours.md"
    page = tmp_path / "docs/results/page.md"
    head = f"# Title\n\n<!-- table: {table} -->\n", f"  <!-- figure: {figure} By round -->\n"
    page.write_text(f"{head[0]}<!-- end -->\n\n{head[1]}  <!-- end -->\n")
    came = f"Version 0.9.0, commit 0123456, seeds 0 to 2: `{RECORD['command']}`\n"
    picture = "![By round](tables/fedipg_digits_colours_by_round.png)\n"
    text = (
        f"{head[0]}\n{TABLE}\n{came}\n<!-- end -->\n\n{head[1]}\n  {picture}\n  {came}\n"
        "  <!-- end -->\n"
    )
    assert results.written(page, tmp_path) == text
    page.write_text(text.replace("table:", "table 2:"))
    assert "3.5 ± 1.0** |\n\nBold: x.\n\nVersion" in results.written(page, tmp_path)
