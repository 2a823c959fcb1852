"""The gallery of algorithms is what the code and the map have, and has every algorithm."""

import importlib
import re
from xml.etree import ElementTree

import numpy as np
import pytest
from scipy import stats

from fedjax_inv import algorithms
from fedjax_inv.checks import UsageError
from fedjax_inv_experiments.experiment import command_line
from fedjax_inv_experiments.experiment.command_line import PRESETS
from fedjax_inv_experiments.shift_map import methods
from fedjax_inv_experiments.shift_map.table import read_cells
from tools import gallery, results
from tools.map_strip import PERCENT, POINTS, Point, strip

TEXT = (gallery.ROOT / gallery.PAGE).read_text(encoding="utf-8")
FILE = gallery.ROOT / "docs/results/tables/map_digits.csv"
MAP = read_cells(FILE)
SVG = "{http://www.w3.org/2000/svg}"


def test_the_page_is_what_the_tool_writes() -> None:
    assert gallery.written(TEXT, has_overview=False) == TEXT


@pytest.mark.slow
def test_the_table_of_all_is_what_the_tool_writes() -> None:
    assert gallery.written(TEXT) == TEXT


def test_the_table_of_all_has_the_bytes_of_the_library() -> None:
    found = {section.name: section for section in gallery.sections(TEXT)}
    for name in ("scaffold", "vrex"):
        line = gallery.line_of(found[name])
        assert [re.sub(" +", " ", row) for row in TEXT.split("\n")].count(
            f"| {' | '.join(line)} |"
        ) == 1
    assert "| Drift of local steps" in TEXT
    scaffold = gallery.cost(methods.LISTED["scaffold"])
    ((down, up),) = scaffold.traffic
    assert (down, up, scaffold.client) == (2 * scaffold.network, 2 * scaffold.network, down // 2)


def test_the_pictures_are_what_the_tool_draws() -> None:
    shown = {path: text for path, text in gallery.pictures(MAP)}
    there = {*(gallery.ROOT / gallery.PICTURES).iterdir()}
    assert there == {gallery.ROOT / path for path in shown}
    assert all((gallery.ROOT / path).read_text() == text for path, text in shown.items())
    assert sum(path.stat().st_size for path in there) < 1e6


def test_every_algorithm_has_a_section_with_each_part() -> None:
    names = [section.name for section in gallery.sections(TEXT)]
    assert sorted(names) == sorted(algorithms.LISTED)
    parts = re.split(r"^### ", TEXT, flags=re.MULTILINE)[1:]
    assert len(parts) == len(names)
    published = {line["method"] for line in MAP}
    for name, part in zip(names, parts, strict=True):
        text, _, block = part.partition("<!-- gallery: ")
        _, paper, idea, *_ = text.split("\n\n")
        assert re.search(r'"[A-Z].{20,}"|^Training on', paper, re.DOTALL), name
        assert len(re.findall(r"[.:](?=\s|$)", idea)) >= 2, name
        _, _, functions = text.partition("- **Functions**:")
        module = importlib.import_module(f"fedjax_inv.algorithms.{name}")
        found = re.findall(r"`(\w+)\.(\w+)`", functions)
        assert all(owner == name and hasattr(module, function) for owner, function in found)
        assert bool(found) != (name in ("fedavg", "erm", "fedpvr", "ditto"))
        assert f"```text\n{gallery.formula(name)[8:20]}" in block
        rows = [row for row, method in methods.LISTED.items() if method.algorithm == name]
        drawn = [row for row in rows if row in published]
        assert len(re.findall(r"^!\[.{40,}\]\(pictures/\S+\.svg\)$", block, re.M)) == len(drawn)
        assert len(re.findall(r"^\*\*Map\*\*", block, re.M)) == max(1, len(rows))
        assert bool(rows) != ("left out, as" in block)


def test_the_commands_and_presets_exist() -> None:
    whole = TEXT.replace(" \\\n", " ")
    commands = re.findall(r"^    \.venv/bin/fedjax-inv train (.*)$", whole, re.MULTILINE)
    assert len(commands) == len(methods.LISTED) + len(gallery.LEFT_OUT)
    for command in commands:
        config = command_line.of_arguments(command.split())
        assert len(config.method.algorithm) == len(config.clients.learning_rate) == 1
    named = {name for text in re.findall(r"--preset=([\w,]+)", TEXT) for name in text.split(",")}
    assert len(named) > 5
    assert not [name for name in named if not (PRESETS / f"{name}.flags").exists()]


def test_the_words_follow_the_map() -> None:
    line = dict(method="x", difference="-3", low="-4", high="-1", word="worse", setting="a=1")
    above = line | dict(shift="labels", difference="2", low="1", high="3", word="better")
    text = gallery.words("x", [line | dict(shift="noise"), above])
    assert "better than FedAvg in: label skew.\nWorse in: wrong labels.\n" in text
    assert "Interval above 0 in: label skew.\nInterval below 0 in: wrong labels.\n" in text
    assert text.endswith(
        "Largest difference: wrong labels, -3.0 points (95% interval -4.0 to -1.0)."
    )
    nothing = line | dict(shift="noise", low="-4", high="1", word="no difference shown")
    assert gallery.words("x", [nothing]).count(": none.") == 4
    assert gallery.words("x", [nothing | dict(difference="nan")]) == "diverged."
    assert "row `fedprox`: not in this map." in gallery.section("fedprox", [])
    assert gallery._most_frequent([line, line, above | {"setting": "a=2"}]) == ({"a": "1"}, 2)


def test_a_row_that_diverged_has_no_number() -> None:
    nan = dict(shift="noise", test="nan", difference="nan", low="nan", high="nan", word="")
    one_seed = nan | dict(shift="labels", test="9", difference="2")
    for row in ("x", "fedavg"):
        assert "wrong labels diverged, label skew " in gallery._description(row, [nan, one_seed])
    text = gallery.words("x", [nan, one_seed])
    assert text.endswith("Largest difference: label skew, +2.0 points.")


def test_the_worst_domain_is_less_that_of_fedavg() -> None:
    own = [line for line in MAP if line["method"] == "afl"]
    reference = {line["shift"]: line for line in MAP if line["method"] == "fedavg"}
    for line, point in zip(own, gallery.points("afl", own, reference), strict=True):
        worst = float(line["worst_domain"]) - float(reference[line["shift"]]["worst_domain"])
        np.testing.assert_allclose((point.worst, point.value), (worst, float(line["difference"])))
    of_fedavg = gallery.points("fedavg", [reference["labels"]], reference)[0]
    tests = np.array(reference["labels"]["tests"].split(), float)
    half = stats.t.ppf(0.975, len(tests) - 1) * stats.sem(tests)
    np.testing.assert_allclose(of_fedavg[1:4], tests.mean() + half * np.array([0, -1, 1]))


def test_a_strip_has_marks_at_the_values_and_arrows_beyond() -> None:
    points = [
        Point("a<b", 5.0, 0.0, 10.0, -10.0),
        Point("far", -30.0, -50.0, -25.0, 99.0, is_marked=True),
        Point("none", np.nan, np.nan, np.nan, np.nan),
    ]
    root = ElementTree.fromstring(strip("t & u", points, POINTS))
    marks = [*root.iter(f"{SVG}circle")][1:]  # the first one is in the legend
    assert [float(mark.get("cx", "")) for mark in marks] == [POINTS.x(5)]
    bars = [line for line in root.iter(f"{SVG}line") if line.get("class") == "test"][1:]
    (bar,) = bars
    assert (float(bar.get("x1", "")), float(bar.get("x2", ""))) == (POINTS.x(0), POINTS.x(10))
    paths = [(path.get("class"), path.get("d", "")) for path in root.iter(f"{SVG}path")][1:]
    starts = [(kind, float(d[1:].split(" ")[0])) for kind, d in paths]
    ends = [("test", POINTS.x(-20)), ("worst", POINTS.x(20))]
    assert starts == [("worst", POINTS.x(-10) - 4.5), *ends]
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert {"a<b", "far", "none", "+5.0", "\u221230.0"} <= {*texts}
    assert PERCENT.x(50) == (PERCENT.x(0) + PERCENT.x(100)) / 2


def test_a_section_that_lacks_a_part_is_refused() -> None:
    for part in ("- **Clients send**: the update.\n", "- **Extra compute**: none.\n"):
        with pytest.raises(UsageError, match=r"^fedavg: must have a family, a title"):
            gallery.sections(TEXT.replace(part, "", 1))
    cut = TEXT.replace("<!-- end -->", "", 2)
    with pytest.raises(UsageError, match=r"its block lacks the comment"):
        gallery.written(cut, has_overview=False)


def test_the_map_is_published() -> None:
    assert results.record_of(FILE).command.startswith("fedjax-inv map --study=map --data=digits")
