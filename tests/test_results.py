"""README and docs/results show tables, figures and numbers as the files of studies have them."""

import json
import re
from pathlib import Path

import msgspec
import pytest
from absl import flags

from fedjax_inv.checks import UsageError
from fedjax_inv_experiments.running import records, sources
from fedjax_inv_experiments.running.records import Origin
from tools import results

RECORD = Origin(
    command="fedjax-inv paper fedipg --study=colours --data=digits",
    seeds=[0, 1],
    date="2026-11-22",
    commit="0123456789",
    versions={"fedjax_inv": "0.9.0"},
    processor="Any, 2 cores",
    seconds=12.3,
    code=sources.of_files([results.ROOT / "fedjax_inv/tree.py"]),
)
TABLE = "| a | test, % |\n|---|---|\n| x | **12.5 ± 1.0** |\n"
FILE = "docs/results/tables/fedipg_digits_colours.md"
PAGE = f"# Title\n\n<!-- table: {FILE} -->\n<!-- end -->\n\nIt has 12.5 ± 1.0, not `99.9`.\n"


def test_every_page_is_as_the_files_have_it() -> None:
    found = [fault for page in results.pages() for fault in results.faults(page)]
    assert not [*found, *results.faults_of_files()]


def test_records_name_no_place() -> None:
    texts = [path.read_text() for path in (results.ROOT / results.TABLES).glob("*.json")]
    assert len(texts) == len(results.published()) > 30
    assert not [text for text in texts if re.search(r'["=\s]([~/]|[A-Z]:\\)', text)]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository with a README, no other page, and a published table."""
    run = tmp_path / "runs/digits"
    run.mkdir(parents=True)
    (run / "colours.md").write_text(f"{TABLE}\nCaption.\n\n{TABLE.replace('12.5', '3.5')}")
    (run / "colours.json").write_bytes(msgspec.json.encode(RECORD))
    (tmp_path / results.TABLES).mkdir(parents=True)
    results.publish(run / "colours.md", "", tmp_path)
    page(tmp_path, PAGE)
    return tmp_path


def page(root: Path, text: str) -> results.Page:
    (root / "README.md").write_text(text)
    return results.pages(root)[0]


def test_a_block_has_the_table_and_how_it_came_about(root: Path) -> None:
    text = results.written(results.pages(root)[0])
    assert TABLE in text
    assert "Caption" not in text
    assert "3.5" not in text
    caption = (
        "Version 0.9.0; commit 0123456; seeds 0, 1; 2026-11-22; Any, 2 cores; 12 s of training"
    )
    assert f"\n{caption}:\n\n    {RECORD.command}\n" in text
    done = page(root, text)
    assert results.written(done) == text
    assert results.faults(done) == []
    second = page(root, PAGE.replace("table:", "table 2:"))
    assert "3.5 ± 1.0" in results.written(second)
    with pytest.raises(UsageError, match=r"has no table 3"):
        results.written(page(root, PAGE.replace("table:", "table 3:")))


def test_a_figure_links_from_its_page(root: Path) -> None:
    run = root / "runs/digits"
    (run / "colours_some.json").write_text("{}")  # of another study
    (run / "colours_by_round.png").write_bytes(b"picture")
    there = results.publish(run / "colours_by_round.png", "", root)
    assert there.name == "fedipg_digits_colours_by_round.png"
    (root / "docs/results/x.md").write_text(
        f"- a\n\n  <!-- figure: {results.TABLES}/{there.name} By round -->\n  <!-- end -->\n"
    )
    text = results.written(results.pages(root)[1])
    assert f"\n  ![By round](tables/{there.name})\n\n  Version 0.9.0; " in text
    assert not results.faults(results.pages(root)[1]._replace(text=text))
    small = page(
        root, f'<!-- figure 480: {results.TABLES}/{there.name} "By" round -->\n<!-- end -->\n'
    )
    picture = f'<img src="{results.TABLES}/{there.name}" alt="&quot;By&quot; round" width="480">'
    assert f"\n{picture}\n\nVersion 0.9.0; " in results.written(small)


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("**12.5 ± 1.0**", "12.6 ± 1.0", "a table or figure is not as its file"),
        ("seeds 0, 1", "seeds 0, 1, 2", "a table or figure is not as its file"),
        ("has 12.5 ± 1.0,", "has 12.5 ± 1.1,", "no table that it shows has 12.5 ± 1.1"),
        ("has 12.5 ± 1.0,", "has 13.5.", "no table that it shows has 13.5"),
        ("It has", f"{TABLE}\nIt has", "a table is in no file: | a | test, % |"),
        ("It has", "![a](b.png) It has", "a figure has no record: ![a](b.png)"),
        ("<!-- end -->", "", "a block has no end"),
        (FILE, "docs/results/tables/y.md", "docs/results/tables/y.md: is no file"),
    ],
)
def test_a_fault_of_a_page_is_found(root: Path, old: str, new: str, fault: str) -> None:
    text = results.written(results.pages(root)[0])
    assert text.count(old) == 1
    found = results.faults(page(root, text.replace(old, new)))
    assert found[0].startswith(f"README.md: {fault}")


def test_a_block_without_an_end_loses_no_text(root: Path) -> None:
    with pytest.raises(UsageError, match=r"lacks the comment <!-- end -->"):
        results.written(page(root, PAGE.replace("<!-- end -->", "") + PAGE))


def test_numbers_that_are_no_results_are_free(root: Path) -> None:
    text = results.written(results.pages(root)[0])
    free = "Rate 0.05, 14x14 pixels, 3 seeds, version 1.2.3, `7.5`, [a](b/7.5.md), 1,000.\n"
    assert not results.faults(page(root, text + free))
    names = "| file | content |\n|---|---|\n| `x.md` | the page |\n"
    assert not results.faults(page(root, text + names))


def test_a_fault_of_a_file_is_found(root: Path) -> None:
    assert not results.faults_of_files(root)
    path = root / FILE
    path.write_text(path.read_text().replace("12.5", "12.6"))
    assert results.faults_of_files(root) == [f"{FILE}: is not as it was published"]
    path.with_name(f"{path.name}.json").unlink()
    page(root, "# No block\n")
    assert results.faults_of_files(root) == [f"{FILE}: has no record", f"{FILE}: no page shows it"]


def test_a_table_is_older_than_changed_code() -> None:
    assert results.age(RECORD)[1] == ""
    (beneath,), gone = RECORD.code, "0" * 32
    for code, age in (
        ({beneath: gone}, (2, f"changed since: {beneath}")),
        ({**RECORD.code, "fedjax_inv/gone.py": gone}, (2, "changed since: fedjax_inv/gone.py")),
        (
            {beneath: gone, "fedjax_inv/algorithms/gone.py": gone},
            (1, "changed since: fedjax_inv/algorithms/gone.py"),
        ),
    ):
        assert results.age(msgspec.structs.replace(RECORD, code=code)) == age
    typed = msgspec.structs.replace(RECORD, code={}, note="Typed by hand")
    assert results.age(typed) == (0, "Typed by hand")
    assert results.caption(typed).startswith("Typed by hand; commit 0123456; ")


def test_old_tables_are_listed_by_command(root: Path) -> None:
    assert results.report_old(root) == "No table or figure is older than the code."
    path = root / f"{FILE}.json"
    record = json.loads(path.read_text())
    for gone, sentence in (
        ("fedjax_inv/gone.py", "older than other parts of the library, such as rounds, networks"),
        ("fedjax_inv/algorithms/gone.py", "older than their algorithms, data or study:"),
    ):
        record["code"] = {gone: "0" * 32}
        path.write_text(json.dumps(record))
        lines = results.report_old(root).splitlines()
        assert lines[0].startswith(f"1 of 1 are {sentence}")
        assert lines[2:] == [
            f"fedipg_digits_colours.md: changed since: {gone}",
            f"    {RECORD.command}",
        ]


def test_what_can_be_published(root: Path) -> None:
    run = root / "runs/digits"
    there = results.publish(run / "colours.md", "other", root)
    assert there == root / results.TABLES / "other.md"
    assert records.read(there.with_name("other.md.json"), Origin).code == RECORD.code
    (run / "colours.csv").write_text("a,b\n1,2\n")
    numbers = results.publish(run / "colours.csv", "", root).relative_to(root).as_posix()
    page(root, f"{PAGE}<!-- table: {there.relative_to(root).as_posix()} -->\n<!-- end -->\n")
    assert results.faults_of_files(root) == [f"{numbers}: no page shows it"]
    (root / "docs/algorithms.md").write_text(f"<!-- gallery: {numbers} fedavg -->\n<!-- end -->\n")
    assert not results.faults_of_files(root)
    (root / "runs/lone.md").write_text(TABLE)
    for path, text in (
        (run / "none.md", "must be a table"),
        (run / "colours.json", "must be a table"),
        (root / "runs/lone.md", "must lie beside the record of its study"),
    ):
        with pytest.raises(UsageError, match=rf"^--publish=.*: {text}"):
            results.publish(path, "", root)


def test_a_picture_with_a_record_of_its_own_needs_a_name(root: Path) -> None:
    picture = root / "runs/digits/colours_masks.png"
    picture.write_bytes(b"picture")
    record = msgspec.structs.replace(RECORD, command="fedjax-inv explain --runs=a")
    picture.with_name("colours_masks.png.json").write_bytes(msgspec.json.encode(record))
    with pytest.raises(UsageError, match=r"^--name=: must be given for a picture of no study"):
        results.publish(picture, "", root)
    there = results.publish(picture, "masks_of_a", root)
    assert there.relative_to(root) == results.TABLES / "masks_of_a.png"
    assert results.record_of(there).command == record.command


def test_two_files_are_not_published_as_one(root: Path) -> None:
    run = root / "runs/digits"
    for name in ("a.md", "b.md"):
        (run / name).write_text(TABLE)
        (run / name).with_suffix(".json").write_bytes(msgspec.json.encode(RECORD))
    before = results.published(root)
    with pytest.raises(UsageError, match=r"^--publish=\S+/b\.md: would replace \S+/a\.md, as both"):
        results.publish_all([run / "a.md", run / "b.md"], "x", root)
    assert results.published(root) == before
    names = [path.name for path in results.publish_all([run / "a.md", run / "b.md"], "", root)]
    assert names == ["fedipg_digits_a.md", "fedipg_digits_b.md"]


def test_a_long_command_is_folded() -> None:
    words = ["    fedjax-inv", "train", *(f"--flag_number={n:030}" for n in range(5))]
    lines = results.folded(words).split(" \\\n        ")
    assert len(lines) == 3
    assert max(map(len, results.folded(words).split("\n"))) <= 100
    assert " ".join(lines) == " ".join(words)
    assert results.folded(words[:2]) == "    fedjax-inv train"


def test_the_command_line() -> None:
    values = flags.FlagValues()
    results.BINARY.define(values)
    options = results.BINARY.read(["", "--publish=a.md,b.png", "--name=x"], values)
    assert options == results.Options(("a.md", "b.png"), "x")
