"""The guides of docs/ run as they stand: their snippets and commands, one after the other."""

import contextlib
import csv
import functools
import importlib
import json
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import chex
import numpy as np
import pytest
from absl import flags
from scipy.special import stdtrit

from fedjax_inv import fit, models, testing
from fedjax_inv.algorithms import scaffold, vrex
from fedjax_inv_experiments import __main__
from fedjax_inv_experiments.parts.selection import RULES
from runs import no_figures

ROOT = Path(__file__).parents[1]
PARTS = re.compile(
    r"^```python\n(?P<snippet>.*?)^```$|^(?:    )?(?P<command>fedjax-inv .*?[^\\])$", re.M | re.S
)


class Played(NamedTuple):
    """A page whose snippets and commands have run."""

    names: dict[str, Any]  # that the snippets define
    printed: dict[str, list[str]]  # by the commands, by their names
    folder: Path


def parts(text: str) -> Iterator[tuple[str, str]]:
    """The snippets and commands of a page in their order."""
    for match in PARTS.finditer(text):
        yield str(match.lastgroup), match[str(match.lastgroup)]


def printed_by(line: str) -> tuple[str, str]:
    """The name of a command, and what it prints."""
    commands = __main__.commands()
    name, arguments = __main__.chosen(
        shlex.split(line.replace("\\\n", " "), comments=True)[1:], commands
    )
    module = importlib.import_module(f"fedjax_inv_experiments.{commands[name].module}")
    values = flags.FlagValues()
    module.BINARY.define(values)
    text = module.BINARY.answer(["", *arguments], values)
    return name, text or module.BINARY.run(module.BINARY.read(["", *arguments], values))


@contextlib.contextmanager
def played(page: str, folder: Path, runs: Callable[[str], bool] = bool) -> Iterator[Played]:
    """Runs a page in a folder, where a snippet that begins with a file's name becomes that file.

    runs: which commands run.
    """
    found = Played({"__name__": "guide"}, {}, folder)
    with pytest.MonkeyPatch.context() as patch, no_figures():
        patch.chdir(folder)
        patch.syspath_prepend(folder)
        for kind, text in parts((ROOT / "docs" / page).read_text()):
            file = re.match(r"# (\w+\.py)\n", text)
            if file:
                (folder / file[1]).write_text(text)
            elif kind == "snippet":
                exec(compile(text, page, "exec"), found.names)
            elif runs(text):
                name, printed = printed_by(text)
                found.printed.setdefault(name, []).append(printed)
        yield found


def test_parts_are_found_in_their_order() -> None:
    text = (
        "a\n\n    fedjax-inv a \\\n        --b\n\n```python\nx = 1\n```\n\n```\nfedjax-inv c\n```\n"
    )
    assert list(parts(text)) == [
        ("command", "fedjax-inv a \\\n        --b"),
        ("snippet", "x = 1\n"),
        ("command", "fedjax-inv c"),
    ]


def test_a_page_shows_the_whole_example() -> None:
    text = (ROOT / "docs/write_an_algorithm.md").read_text()
    snippets = [part for kind, part in parts(text) if kind == "snippet"]
    assert (ROOT / "examples/own_algorithm.py").read_text() in snippets
    example = (ROOT / "examples/fednova.py").read_text()
    shown = next(part for part in snippets if "def fednova" in part)
    assert shown[shown.index("def fednova") :] in example


def test_the_intervals_of_a_page_are_those_of_students_t() -> None:
    text = (ROOT / "docs/reading_results.md").read_text()
    rows = re.findall(r"^\| (\d+) \| ([\d.]+) \|$", text, re.M)
    assert len(rows) == 4
    for number, half in rows:
        expected = stdtrit(int(number) - 1, 0.975) / int(number) ** 0.5
        assert float(half) == pytest.approx(expected, abs=0.05)


def test_a_page_explains_every_rule_of_selection() -> None:
    text = (ROOT / "docs/reading_results.md").read_text()
    assert set(re.findall(r"^\| `(\w+)` \| the (?:best|first|last) ", text, re.M)) == set(RULES)


@pytest.fixture(scope="module")
def own_table(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Played]:
    with played("own_table.md", tmp_path_factory.mktemp("own_table")) as found:
        yield found


def score(found: Played, run: str, name: str, of: str = "validation") -> float:
    """A score of a run at the round that a rule selects."""
    result = json.loads((found.folder / "runs" / run / "result.json").read_text())
    return result["runs"][0]["by_rule"][of][name]


@pytest.mark.slow
def test_a_table_shows_why_invariance_helps(own_table: Played) -> None:
    """As own_table.md says it of FedAvg."""
    assert score(own_table, "fedavg", "validation_score") > 0.8
    assert score(own_table, "fedavg", "test_score") < 0.5
    assert score(own_table, "fedipg", "test_score", of="last") > 0.5
    # The same data in another form. Its patients are drawn into other batches.
    assert score(own_table, "npz", "test_score") < 0.5


@pytest.mark.slow
def test_an_exported_network_predicts_without_the_library(own_table: Played) -> None:
    names = own_table.names
    table = names["table"]
    with (own_table.folder / "predictions.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    rows = np.array([int(line["index"]) for line in lines])
    is_blue = table["ward"] == "blue"
    x = np.stack([table["age"], table["pressure"], is_blue, ~is_blue], 1)[rows].astype(np.float32)
    expected = [[float(line[f"probability_{name}"]) for name in ("no", "yes")] for line in lines]
    np.testing.assert_allclose(names["probabilities"](x), expected, atol=1e-5)
    outputs = models.predict(names["model"], names["variables"], x)
    assert outputs.shape == (len(rows), 2)


@pytest.fixture(scope="module")
def own_loss(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Played]:
    with played("own_loss.md", tmp_path_factory.mktemp("own_loss")) as found:
        yield found


@pytest.mark.slow
def test_a_loss_of_ones_own_is_trained_and_scored(own_loss: Played) -> None:
    half, most = own_loss.names["below"]
    assert half == pytest.approx(0.5, abs=0.1)
    assert most == pytest.approx(0.9, abs=0.05)
    assert "quantile error" in own_loss.printed["train"][0]


@pytest.fixture(scope="module")
def algorithms(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Played]:
    folder = tmp_path_factory.mktemp("write_an_algorithm")
    with played("write_an_algorithm.md", folder, runs=lambda line: False) as found:
        yield found


# Behind batch normalisation some gradients are 0 but for rounding, and their signs are arbitrary.
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "signs": {"model": models.mlp(3, widths=(8,))},
    "remembering": {},
    "scaffold": {},
    "vrex": {},
    "averaged": {},
}


@pytest.mark.slow
def test_the_tests_that_a_page_shows_pass(
    algorithms: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = functools.partial(testing.check, laws=list(testing.LAWS)[:2], tell=None)
    monkeypatch.setattr(testing, "check", few)
    for name in ("test_vrex", "test_signs"):
        algorithms.names[name]()


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_the_algorithms_of_a_page_obey_the_laws(algorithms: Played, name: str) -> None:
    report = testing.check(algorithms.names[name], tell=None, **CONFIGURATIONS[name])
    report.raise_if_broken()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("factory", "settings"), [(vrex.vrex, {"beta": 2.0}), (scaffold.scaffold, {})]
)
def test_algorithms_of_a_page_are_those_of_the_library(
    algorithms: Played, factory: Any, settings: dict[str, float]
) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(40, 3)).astype(np.float32), rng.integers(0, 2, 40)
    options: dict[str, Any] = {"rounds": 3, "progress": False, **settings}
    data = x, y, np.arange(40) % 3
    networks = [
        fit(factory, models.mlp(2, widths=(4,)), *data, **options).network()
        for factory in (algorithms.names[factory.__name__], factory)
    ]
    chex.assert_trees_all_close(*networks, rtol=1e-5)
