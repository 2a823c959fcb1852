"""The pages show tables and figures as their files have them."""

import json
import re
from pathlib import Path

import pandas as pd
import pytest

from tools import results

RECORD = {"command": "fedjax-inv paper fedipg --study=colours --data=digits"}
TABLE = "| a | test, % | last |\n|---|---|---|\n| x | **12.5 ± 1.0** | 3 |\n"


def test_every_page_is_as_the_files_have_it() -> None:
    texts = {path: path.read_text() for path in results.pages()}
    assert not [path for path, text in texts.items() if results.written(path) != text]
    files = [*(results.ROOT / results.TABLES).iterdir()]
    shown = "\n".join(texts.values())
    published = [path for path in files if path.suffix != ".json" and path.name != "scores.csv"]
    assert not [path for path in published if path.name not in shown]
    records = [path for path in files if path.suffix == ".json"]
    assert {results.record_of(path) for path in published} == set(records)
    place = re.compile(r'["=\s]([~/]|[A-Z]:\\)')
    assert not [path for path in records if place.search(path.read_text())]


def test_a_page_shows_published_files(tmp_path: Path) -> None:
    run = tmp_path / "runs/digits"
    run.mkdir(parents=True)
    (tmp_path / results.TABLES).mkdir(parents=True)
    (run / "colours.md").write_text(f"{TABLE}\nMore.\n\n{TABLE.replace('12.5', '3.5')}")
    (run / "colours_by_round.png").write_bytes(b"picture")
    (run / "colours.json").write_text(json.dumps(RECORD))
    table, figure = (
        results.publish(run / name, root=tmp_path).relative_to(tmp_path).as_posix()
        for name in ("colours.md", "colours_by_round.png")
    )
    assert table == "docs/results/tables/fedipg_digits_colours.md"
    assert results.record_of(tmp_path / figure).name == "fedipg_digits_colours.json"
    page = tmp_path / "docs/results/page.md"
    heads = f"<!-- table: {table} -->\n", f"  <!-- figure: {figure} By round -->\n"
    page.write_text(f"# Title\n\n{heads[0]}<!-- end -->\n\n{heads[1]}  <!-- end -->\n")
    picture = "  ![By round](tables/fedipg_digits_colours_by_round.png)\n"
    text = (
        f"# Title\n\n{heads[0]}\n{TABLE}\n<!-- end -->\n\n{heads[1]}\n{picture}\n  <!-- end -->\n"
    )
    assert results.written(page, tmp_path) == text
    page.write_text(text.replace("table:", "table 2:").replace(".md -->", ".md last; test -->"))
    assert "| a | last | test, % |\n|---|---|---|\n| x | 3 | **3.5 ±" in results.written(
        page, tmp_path
    )


SCORES = results.ROOT / results.SCORES


@pytest.mark.parametrize(
    "table", sorted({*pd.read_csv(SCORES)["table"]}) if SCORES.exists() else []
)
def test_means_and_deviations_of_a_table_come_from_the_scores_of_its_seeds(table: str) -> None:
    scores = pd.read_csv(SCORES)
    chosen = scores[(scores["table"] == table) & scores["selects"]]
    lines = (results.ROOT / results.TABLES / f"{table}.md").read_text().splitlines()
    for (row, _), of_cell in chosen.groupby(["row", "held_out"]):
        percent = 100 * of_cell["score"]
        text = f"{percent.mean():.1f}"
        if len(percent) > 1:
            text += f" ± {percent.std():.1f}"
        assert any(line.startswith(f"| {row} ") and text in line for line in lines), (row, text)


def test_the_scores_of_seeds_are_those_that_rules_select() -> None:
    lines = [
        # run, seed, learning_rate, round, selected_by, test_score
        (0, 7, 0.1, 2, "oracle", 0.6),
        (0, 7, 0.1, 4, "validation last", 0.5),
        (1, 7, 0.3, 4, None, 0.7),
    ]
    names = ["run", "seed", "learning_rate", "round", "selected_by", "test_score"]
    runs = pd.DataFrame(lines, columns=names).assign(method="A", held_out="x", rule="validation")
    found = results.scores_of(pd.concat([runs, runs]))  # a line for each domain
    assert [tuple(line) for line in found[["rule", "selects", "round", "score"]].to_numpy()] == [
        ("last", False, 4, 0.5),
        ("oracle", False, 2, 0.6),
        ("validation", True, 4, 0.5),
    ]
    assert {*found["setting"]} == {"learning_rate=0.1"}
