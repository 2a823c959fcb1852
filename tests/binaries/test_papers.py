"""The file of every paper."""

import importlib
import re
from pathlib import Path
from types import ModuleType

import pytest
from absl import flags

import slow
from fedjax_inv.checks import UsageError
from fedjax_inv_experiments import papers
from fedjax_inv_experiments.experiment import config, grid
from fedjax_inv_experiments.papers import cafe, fedcfa, fedipg, first_look, fl_games, study


def paper(name: str) -> study.Paper:
    return importlib.import_module(f"{papers.__name__}.{name}").PAPER


@pytest.mark.parametrize("name", [name for name in papers.LISTED if name != "first_look"])
def test_printed_numbers_stand_once_and_are_of_rows_and_data_of_the_paper(name: str) -> None:
    numbers = study.printed(name)
    assert len({each[:-1] for each in numbers}) == len(numbers) > 20
    assert all(text and text == text.strip() for each in numbers for text in each)
    assert [
        float(re.split("±|,", each.value.strip("()").removeprefix(">,"))[0]) for each in numbers
    ]


def test_every_file_is_listed() -> None:
    (folder,) = papers.__path__
    files = Path(folder).glob("*.py")
    assert {path.stem for path in files if "\nBINARY = " in path.read_text()} == set(papers.LISTED)


@pytest.mark.parametrize("name", slow.after(1, papers.LISTED))
def test_every_row_is_a_run_of_its_own(name: str, tmp_path: Path) -> None:
    chosen = paper(name)
    assert chosen.name == name
    counted = 0
    for data in chosen.data:
        for study_name, each in chosen.studies.items():
            try:
                rows = each.rows(data)
            except UsageError:  # not every study is of all data
                continue
            counted += 1
            assert len({row.label for row in rows}) == len(rows) > 1, study_name
            assert not any("," in row.label for row in rows)  # --rows takes several with commas
            assert len({row.folder.casefold() for row in rows}) == len(rows)
            configs = study.configs(chosen, rows, tmp_path, [])
            alike = {str(config.flat(c) | {"run_dir": ""}) for c in configs}
            assert len(alike) == len(rows)
            for one in configs:
                assert grid.cells(one, [None])
                assert one.environment.data_seed == "each"
                assert one.run.nonfinite == "mark"  # a run that diverges stops no other
    assert counted >= len(chosen.data)


@pytest.mark.parametrize(
    ("paper", "arguments", "message"),
    [
        (
            fedcfa,
            "--study=hooks --cut=1",
            "^hook-1-top_k-25: --cut: must be left out, as rows of this study differ in it; --rows",
        ),
        (fedcfa, "--study=hooks --rows=hook-2-top_k-25 --cut=1", "^hook-2-top_k-25: --cut: must"),
        (fl_games, "--study=classes --rows=F-parallel-5-classes --num_classes=10", "--num_classes"),
        (
            fedipg,
            "--study=stains --data=digits --stain=both",
            "^foreground ERM: --stain: must be left out",
        ),
        # The first point of the axis has no flag of its own.
        (cafe, "--study=frequency --rows=FedAvg --frequency=1", "^FedAvg: --frequency: must be"),
        (
            cafe,
            "--study=drift --set=drift_mode=row_mean",
            "^CAFE-row_mean: the flags make it the same as CAFE; leave out those in which rows",
        ),
        (
            fedcfa,
            "--study=simpson --data=digits --init_from=runs/other",
            "^--init_from: must be left out, as rows of this study start from the network of",
        ),
        (cafe, "--noresume", "^--noresume: must be left out, as a study goes on with its runs"),
        (
            first_look,
            "--environment=none",
            "^colour-FedAvg: --environment=none: must be colored in this row$",
        ),
        (
            fedipg,
            "--study=ends --set=penalty_on=all,classifier",
            "^two-clients: the flags ask for several cells",
        ),
        (
            fedipg,
            "--study=penalties --data=rotated_digits --learning_rate=0.1,0.2",
            "^penalty on all: --learning_rate=0.1,0.2: must be one value in this study$",
        ),
    ],
)
def test_rows_stay_what_they_stand_for(
    paper: ModuleType, arguments: str, message: str, tmp_path: Path
) -> None:
    values = flags.FlagValues()
    paper.BINARY.define(values)
    words = ["", *arguments.split(), f"--run_dir={tmp_path / 'runs'}"]
    with pytest.raises(UsageError, match=message):
        paper.BINARY.run(paper.BINARY.read(words, values))
    assert not (tmp_path / "runs").exists()


def test_flags_that_rows_do_not_stand_for_are_for_all_of_them() -> None:
    rows = cafe.methods("digits")
    for words in (["--frequency=0.5"], ["--learning_rate=0.1"], ["--set=penalty=0.5"]):
        study.check_overrides(cafe.PAPER.studies["methods"], "digits", rows, words)
    rows = fedcfa.methods("digits")
    study.check_overrides(fedcfa.PAPER.studies["methods"], "digits", rows, ["--cut=2"])
    with pytest.raises(UsageError, match=r"^SCAFFOLD: --momentum: must be left out"):
        study.check_overrides(fedcfa.PAPER.studies["methods"], "digits", rows, ["--momentum=0.5"])


@pytest.mark.parametrize("name", papers.LISTED)
def test_every_study_has_data_by_default(name: str) -> None:
    chosen = paper(name)
    for study_name, each in chosen.studies.items():
        values = flags.FlagValues()
        binary = importlib.import_module(f"{papers.__name__}.{name}").BINARY
        binary.define(values)
        (data,) = binary.read(["", f"--study={study_name}"], values).data
        assert each.rows(data)
        assert data == chosen.data[0] or name in ("fedipg", "fedcfa")


def test_help_leaves_out_the_algorithm_which_each_row_has() -> None:
    values = flags.FlagValues()
    cafe.BINARY.define(values)
    text = cafe.BINARY.answer(["", "--help"], values)
    assert "\n  --algorithm=" not in text
    assert "\n  --set=" in text
