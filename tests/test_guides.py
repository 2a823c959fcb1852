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
from PIL import Image

from fedjax_inv import fit, laws, models
from fedjax_inv.algorithms import scaffold, vrex
from fedjax_inv.data import clients
from fedjax_inv.data.federation import parts_of
from fedjax_inv_experiments import __main__, command_line
from fedjax_inv_experiments.assembly import experiment
from runs import no_figures, parsed, run

ROOT = Path(__file__).parents[1]
PARTS = re.compile(
    r"^```python\n(?P<snippet>.*?)^```$|^(?:    )?(?P<command>fedjax-inv .*?[^\\])$", re.M | re.S
)


CELL = "{i},0{i},4,{i},5,{third},0,{c},{odd}"  # of Camelyon17


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
    _, name, *arguments = shlex.split(line.replace("\\\n", " "), comments=True)
    place, _ = __main__._COMMANDS[name]
    return name, run(importlib.import_module(f"fedjax_inv_experiments.{place}"), *arguments)


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


def test_a_page_shows_the_whole_example() -> None:
    text = (ROOT / "docs/write_an_algorithm.md").read_text()
    snippets = [part for kind, part in parts(text) if kind == "snippet"]
    assert (ROOT / "examples/own_algorithm.py").read_text() in snippets
    example = (ROOT / "examples/fednova.py").read_text()
    shown = next(part for part in snippets if "def fednova" in part)
    assert shown[shown.index("def fednova") :] in example


def score(found: Played, run: str, name: str, of: str = "validation") -> float:
    """A score of a run at the round that a rule selects."""
    result = json.loads((found.folder / "runs" / run / "result.json").read_text())
    return result["runs"][0]["by_rule"][of][name]


@pytest.mark.slow
def test_a_table_of_ones_own(tmp_path: Path) -> None:
    """It shows why invariance helps, and an exported network predicts without the library."""
    with played("own_table.md", tmp_path) as found:
        assert score(found, "fedavg", "validation_score") > 0.8
        assert score(found, "fedavg", "test_score") < 0.5
        assert score(found, "fedipg", "test_score", of="last") > 0.5
        # The same data in another form. Its patients are drawn into other batches.
        assert score(found, "npz", "test_score") < 0.5
    table, names = found.names["table"], found.names
    with (tmp_path / "predictions.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    rows = np.array([int(line["source"]) for line in lines])
    is_blue = table["ward"] == "blue"
    x = np.stack([table["age"], table["pressure"], is_blue, ~is_blue], 1)[rows].astype(np.float32)
    expected = [[float(line[f"probability_{name}"]) for name in ("no", "yes")] for line in lines]
    np.testing.assert_allclose(names["probabilities"](x), expected, atol=1e-5)


def test_images_in_a_table(tmp_path: Path) -> None:
    """The commands of the page read tables with WILDS's columns, and the images that they list."""
    birds, cells, traps, faces = (
        "waterbirds_v1.0",
        "camelyon17_v1.0",
        "iwildcam_v2.0",
        "celebA_v1.0",
    )
    names = "img_id,img_filename,y,split,place,place_filename"
    written = [
        (f"{birds}/metadata.csv", names, "{i},{i}.jpg,{half},{third},{odd},/no/{i}.jpg"),
        (f"{cells}/metadata.csv", ",patient,node,x_coord,y_coord,tumor,slide,center,split", CELL),
        (f"{traps}/metadata.csv", ",split,location_remapped,y,filename", "{i},{s},{c},{i},{i}.jpg"),
        (f"{faces}/list_attr_celeba.csv", "image_id,Blond_Hair,Male", "{i}.jpg,{sign},{odd}"),
        (f"{faces}/list_eval_partition.csv", "image_id,partition", "{i}.jpg,{third}"),
    ]
    places = (
        f"{birds}/{{i}}.jpg",
        f"{traps}/train/{{i}}.jpg",
        f"{faces}/img_align_celeba/{{i}}.jpg",
    )
    places += (
        f"{cells}/patches/patient_0{{i}}_node_4/patch_patient_0{{i}}_node_4_x_{{i}}_y_5.png",
    )
    splits = ("train", "val", "test", "id_val", "id_test")
    values = [
        {"i": i, "odd": i % 2, "third": i % 3, "half": i // 15, "sign": i % 4 // 2 * 2 - 1}
        | {"s": splits[i % 5], "c": i // 8 - 1}
        for i in range(10, 40)
    ]
    for place in places:
        for each in values:
            path = tmp_path / place.format(**each)
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (6, 5)).save(path)
    for place, head, row in written:
        (tmp_path / place).write_text("\n".join([head, *(row.format(**each) for each in values)]))
    found = []
    with played("own_images.md", tmp_path, runs=lambda line: False):
        for kind, line in parts((ROOT / "docs/own_images.md").read_text()):
            if kind == "command":
                with parsed(*shlex.split(line.replace("\\\n", " "))[2:], "--cohort=0"):
                    made = experiment.make(command_line.chosen())
                of_seed = next(iter(made.splits.values()))
                split = next(iter(of_seed.values()))
                sizes = [sorted(len(rows) for rows in parts_of(of)) for of in split[:3]]
                found.append((made.dataset.x.shape[1], len(made.dataset.classes), *sizes))
    assert found == [
        (64, 3, [5, 5], [5, 5], [10]),
        (32, 3, [3, 4], [3, 4], [8]),
        (112, 30, [1, 1, 2, 2], [1, 1, 2, 2], [6]),
        (64, 2, [5, 5], [5, 5], [10]),
    ]


@pytest.fixture(scope="module")
def algorithms(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Played]:
    folder = tmp_path_factory.mktemp("write_an_algorithm")
    with played("write_an_algorithm.md", folder, runs=lambda line: False) as found:
        yield found


@pytest.mark.slow
def test_the_tests_that_a_page_shows_pass(
    algorithms: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = functools.partial(laws.check, laws=list(laws.LAWS)[:2])
    monkeypatch.setattr(laws, "check", few)
    for name in ("test_vrex", "test_signs"):
        algorithms.names[name]()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("factory", "settings"), [(vrex.vrex, {"beta": 2.0}), (scaffold.scaffold, {})]
)
def test_algorithms_of_a_page_are_those_of_the_library(
    algorithms: Played, factory: Any, settings: dict[str, float]
) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(40, 3)).astype(np.float32), rng.integers(0, 2, 40)
    options: dict[str, Any] = {"rounds": 3, "callbacks": (), **settings}
    data = clients.by_client(x, y, np.arange(40) % 3)
    networks = [
        fit(factory, models.mlp(2, widths=(4,)), data, **options).network()
        for factory in (algorithms.names[factory.__name__], factory)
    ]
    chex.assert_trees_all_close(*networks, rtol=1e-5)
