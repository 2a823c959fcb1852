"""The file of every paper."""

import json
import re
import shlex
from pathlib import Path

import pytest

import slow
from fedjax_inv_experiments import map as map_binary
from fedjax_inv_experiments import paper as paper_binary
from fedjax_inv_experiments import studies
from fedjax_inv_experiments.assembly import grid
from fedjax_inv_experiments.paper import PAPERS
from fedjax_inv_experiments.studies import map_table, row_runs, study
from fedjax_inv_experiments.studies.rows import Row
from runs import options, others, parsed

RECORDS = sorted((Path(__file__).parents[2] / "docs/results/tables").glob("*.json"))


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in PAPERS
        if name not in ("first_look", "frozen", "private_robust", "selection")
    ],
)
def test_printed_numbers_stand_once_and_are_of_rows_and_data_of_the_paper(name: str) -> None:
    numbers = study.numbers_of(name)
    assert len({each[:-1] for each in numbers}) == len(numbers) > 20
    assert all(text and text == text.strip() for each in numbers for text in each)
    for each in numbers:
        assert float(re.split("±|,", each.value.strip("()").removeprefix(">,"))[0]) >= 0


def test_every_file_is_listed() -> None:
    (folder,) = studies.__path__
    modules = {path.stem for path in Path(folder).glob("*.py") if "\nPAPER = " in path.read_text()}
    assert modules <= {*PAPERS}
    for path in Path(folder).glob("*.toml"):
        name = next(name for name in PAPERS if path.stem.startswith(f"{name}_"))
        assert path.stem.removeprefix(f"{name}_") in study.paper(name).studies


@pytest.mark.parametrize("name", slow.after(1, reversed(PAPERS)))
def test_every_row_is_a_run_of_its_own(name: str, tmp_path: Path) -> None:
    chosen = study.paper(name)
    assert chosen.name == name
    for study_name, each in chosen.studies.items():
        for data in each.data or chosen.data:
            rows = each.rows(data)
            assert len({row.label for row in rows}) == len(rows) > 1, study_name
            assert not any("," in row.label for row in rows)  # --rows takes several with commas
            assert len({row.folder.casefold() for row in rows}) == len(rows)
            configs = row_runs.configs(rows, tmp_path)
            alike = {str(vars(c) | {"run_dir": ""}) for c in configs}
            assert len(alike) == len(rows)
            for one in configs:
                assert grid.cells(one, [None])
                assert one.environment.data_seed == "each"
                assert one.evaluation.nonfinite == "mark"  # a run that diverges stops no other


# A method's own flags; all others are the same for the methods that a study compares.
OWN = {"algorithm", "set", "learning_rate", "momentum", "cut", "run_dir"}


@pytest.mark.parametrize(
    ("name", "study_name"),
    [("cafe", "methods"), ("fedcfa", "methods"), ("fedipg", "domains"), ("fedipg", "combinations")],
)
def test_methods_have_as_many_settings_in_the_same_federation(
    name: str, study_name: str, tmp_path: Path
) -> None:
    chosen = study.paper(name)
    each = chosen.studies[study_name]
    for data in each.data or chosen.data:
        configs = row_runs.configs(each.rows(data), tmp_path)
        assert len({str(others(one, OWN)) for one in configs}) == 1
        counts = set()
        for one in configs:
            (cell,) = grid.cells(one, [None])
            counts.add(len(cell.runs) / len(one.training.seeds))
        assert len(counts) == 1
        assert counts.pop() >= 4


def test_a_study_takes_the_first_of_its_data_by_default() -> None:
    assert options(study.paper("fedipg"), "--study=domains").data == ("rotated_mnist",)
    assert options(study.paper("fedipg")).data == ("colored_mnist",)


def test_rows_are_chosen_by_their_labels() -> None:
    rows = [Row(label, ()) for label in "abc"]
    assert row_runs.with_labels(rows, []) == rows
    assert row_runs.with_labels(rows, ["c", "a"]) == [rows[0], rows[2]]  # in the order of the study
    with pytest.raises(ValueError, match="--rows"):
        row_runs.with_labels(rows, ["A"])


def test_rules_of_selection_are_compared_on_equal_terms() -> None:
    rows = study.paper("selection").studies["rules"].rows("colored_mnist")
    configs = row_runs.configs(rows, Path("runs"))
    own = {"run_dir", "algorithm", "set", "learning_rate", "pooled", "batch_size"}
    assert len({str(others(one, own)) for one in configs}) == 1
    for one in configs:
        (cell,) = grid.cells(one, [None])
        assert len(cell.runs) == 2 * len(one.training.seeds)
        # Two clients, or one with the examples of both.
        assert one.training.batch_size == (1000 if one.partition.pooled else 500)


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_the_command_of_a_published_table_has_known_flags_and_rows(
    path: Path, tmp_path: Path
) -> None:
    _, word, *words = shlex.split(json.loads(path.read_text())["command"])
    chosen = map_table.MAP if word == "map" else study.paper(words.pop(0))
    with parsed(*words, command=map_binary if word == "map" else paper_binary):
        own = map_binary.own() if word == "map" else None
        given = study.options(chosen, own)
    for data in given.data:
        rows = study.rows_of(chosen, data, given)
        assert row_runs.configs(rows, tmp_path, given.overrides)
