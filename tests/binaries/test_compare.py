"""Rows of a file: what they mean, mistakes in them, their folders, and their table."""

import re
import tomllib
from pathlib import Path

import pandas as pd
import pytest

import runs
from fedjax_inv.checks import UsageError
from fedjax_inv_experiments import compare, paper, train
from fedjax_inv_experiments.studies import row_runs, rows
from fedjax_inv_experiments.studies.rows import Row
from runs import jobs, no_figures

TEXT = """
preset = "first_look_rotated"
select = ["validation", "leave_one_out", "oracle"]
baseline = "b, large"
[flags]
rounds = 7
pooled = false
set = { weighting = "uniform" }
[rows.a]
algorithm = "fedavg"
learning_rate = [0.1, 0.25]
[rows."b, large"]
algorithm = "fedipg"
rounds = 9
set = { penalty = [1.0, 100.0] }
"""


def written(folder: Path, text: str, name: str = "rows.toml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_rows_are_command_lines(tmp_path: Path) -> None:
    file = rows.read(written(tmp_path, TEXT))
    assert [row.label for row in file.rows[""]] == ["a", "b, large"]
    first, second = row_runs.configs(file.rows[""], tmp_path, ["--rounds=8", "--clip=2"])
    assert first.training.learning_rate == (0.1, 0.25)
    assert first.method.set == ("weighting=uniform",)
    assert second.method.set == ("weighting=uniform", "penalty=1.0,100.0")
    # The command line replaces the flags of all rows, but not those of a row.
    assert (first.training.rounds, second.training.rounds) == (8, 9)
    for one in (first, second):
        assert one.training.clip == 2
        assert one.evaluation.select == "validation"
        assert one.evaluation.leave_one_out


@pytest.mark.parametrize("word", ["--rounds=8", "--set=penalty=0.1", "--nopooled"])
def test_a_flag_that_no_row_takes_is_refused(tmp_path: Path, word: str) -> None:
    file = rows.read(written(tmp_path, f"{TEXT}pooled = true\n"))
    with pytest.raises(UsageError, match=word):
        row_runs.configs(file.rows[""][1:], tmp_path, [word])


def test_the_page_shows_a_file_of_rows(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/compare.md").read_text()
    (text,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "paper.csv").write_text("source,row,data,column,value\n")
    file = rows.read(written(tmp_path, text))
    assert len(file.rows[""]) == 3
    row_runs.configs(file.rows[""][:2], tmp_path)


def test_data_sets_add_flags_and_rows(tmp_path: Path) -> None:
    more = """
[data.one]
rows.a.rounds = 3
[data.two]
flags.rounds = 5
[data.two.rows.c]
algorithm = "fedprox"
"""
    file = rows.read(written(tmp_path, TEXT + more))
    one, two = (
        {row.label: chosen.training.rounds for row, chosen in zip(of, configs, strict=True)}
        for of in file.rows.values()
        for configs in [row_runs.configs(of, tmp_path)]
    )
    assert one == {"a": 3, "b, large": 9}
    assert two == {"a": 5, "b, large": 9, "c": 5}


@pytest.mark.parametrize(
    ("right", "wrong", "named"),
    [
        ("select", "slect", "slect"),
        ("rounds = 7", "ruonds = 7", r"\[flags\].*ruonds.*is it rounds"),
        ("rounds = 9", "ruonds = 9", 'row "b, large".*ruonds'),
        ("rounds = 9", 'rounds = "many"', 'row "b, large".*--rounds=many'),
        ("rounds = 9", "rounds = 2020-01-01", 'row "b, large".*rounds'),
        ("rounds = 9", "angles = [[0], [1]]", 'row "b, large".*angles'),
        ("[1.0, 100.0]", "[[1.0], [100.0]]", 'row "b, large".*penalty'),
        ("set = { penalty = [1.0, 100.0] }", 'set = "penalty=1"', 'row "b, large".*set'),
        ("{ penalty", "{ penal", 'row "b, large".*--set=penal'),
        ('"fedavg"', '"fedvag"', 'row "a".*fedvag'),
        ('rows."b, large"', "rows.a", "'rows', 'a'"),
        ('"oracle"', '"orcale"', "select.*orcale"),
        ('baseline = "b, large"', 'baseline = "b"', "baseline: b"),
        ('preset = "first_look_rotated"', 'preset = "rotated"', "preset=rotated"),
        ('preset = "first_look_rotated"', 'numbers = "none.csv"', "none.csv"),
        ("pooled = false", 'run_dir = "x"', "run_dir"),
        ("[rows.a]", "[rows.a", "rows.toml"),
        (TEXT, "preset = 'first_look_rotated'", "rows"),
    ],
)
def test_a_mistake_is_one_line_with_file_row_and_key(
    tmp_path: Path, right: str, wrong: str, named: str
) -> None:
    path = written(tmp_path, TEXT.replace(right, wrong))
    with pytest.raises(UsageError, match=named) as caught:
        row_runs.configs(rows.read(path).rows[""], tmp_path, (), path)
    assert "\n" not in str(caught.value)
    assert "rows.toml" in str(caught.value) or "none.csv" in str(caught.value)


def test_labels_are_names_of_folders_that_differ(tmp_path: Path) -> None:
    labels = ["a b", "a-b", "A+b", "..", "x/../y", "table.md", "long" * 100, "plain"]
    configs = row_runs.configs([Row(label, ()) for label in labels], tmp_path)
    places = [Path(one.output.run_dir) for one in configs]
    assert len({place.name.casefold() for place in places}) == len(labels)
    assert all(place.parent == tmp_path for place in places)
    assert all(re.fullmatch(r"[\w=-][\w=.-]{0,140}", place.name) for place in places)
    assert not {place.suffix for place in places} & {".md"}
    assert places[-1].name == "plain"


SMALL = """
select = ["validation", "last"]
numbers = "numbers.csv"
[flags]
dataset = "digits"
max_examples = 300
environment = "rotated"
angles = [0, 30, 60]
seeds = [0, 1]
rounds = 2
eval_every = 1
checkpoint_every = 2
widths = [4]
local_steps = 1
devices = "1"
[rows.fedavg]
algorithm = "fedavg"
learning_rate = [0.1, 0.3]
[rows.fedprox]
algorithm = "fedprox"
set = { proximal = [0.1, 1.0] }
[rows."Ours, iid"]
algorithm = "fedjax_inv.algorithms.fedavg:fedavg"
partition = "iid"
clients = 2
"""


def compared(path: Path, folder: Path, *words: str) -> str:
    return runs.run(compare, str(path), f"--run_dir={folder}", *words)


def first_table(folder: Path) -> pd.DataFrame:
    lines = (folder / "table.md").read_text().split("\n\n")[1].splitlines()
    cells = [[cell.strip(" *") for cell in line.strip("|").split("|")] for line in lines]
    return pd.DataFrame(cells[2:], columns=cells[0]).set_index(cells[0][0])


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of rows that have run."""
    folder = tmp_path_factory.mktemp("compared")
    (folder / "numbers.csv").write_text(
        "source,row,data,column,value\nTable 1,fedprox,digits,last,97.5±0.1\n"
    )
    with no_figures():
        compared(written(folder, SMALL), folder / "runs")
    return folder


def test_a_table_of_rows(done: Path) -> None:
    table = first_table(done / "runs")
    assert [*table.index] == ["fedavg", "fedprox", "Ours, iid", "most frequent class"]
    assert [*table] == ["training domains", "last", "paper: last", "at the last round"]
    assert table["paper: last"]["fedprox"] == "97.5±0.1"
    found = pd.read_csv(done / "runs/differences.csv")
    assert {*found["method"]} == {"fedprox", "Ours, iid"}  # another partition has the same test
    csv = pd.read_csv(done / "runs/runs.csv")
    assert [*csv["method"].unique()] == ["fedavg", "fedprox", "Ours, iid"]
    test = csv[(csv["split"] == "test") & csv["selected"]]
    for label, scores in test.groupby("method")["score"]:
        mean, deviation = 100 * scores.mean(), 100 * scores.std()
        assert table["training domains"][label] == f"{mean:.1f} ± {deviation:.1f}"
    # All rows have the same draws of the data.
    sizes = csv[csv["split"] == "test"].groupby("seed")["examples"].unique()
    assert all(len(each) == 1 for each in sizes)


@pytest.mark.slow
def test_the_same_rows_as_algorithms_of_train_have_the_same_scores(
    done: Path, tmp_path: Path
) -> None:
    flags = {**tomllib.loads(SMALL)["flags"], "learning_rate": [0.1, 0.3], "algorithm": "fedavg"}
    words = [
        f"--{name}={','.join(map(str, of)) if isinstance(of, list) else of}"
        for name, of in flags.items()
    ]
    with no_figures():
        runs.run(train, *words, f"--run_dir={tmp_path / 'x'}")
    ours, theirs = (
        pd.read_csv(path / "runs.csv", dtype={"domain": str}).query("method == 'fedavg'")
        for path in (done / "runs", tmp_path / "x")
    )
    columns = ["seed", "round", "learning_rate", "domain", "score", "selected"]
    assert ours[columns].to_numpy().tolist() == theirs[columns].to_numpy().tolist()


def test_rows_of_another_file_join_those_that_ran(done: Path, tmp_path: Path) -> None:
    """They come first, finished rows do not run again, and other test examples are not paired."""
    text = SMALL.replace("numbers = ", "# ").replace("[rows.fedavg]", '[rows."fed avg"]')
    text = text.partition("[rows.fedprox]")[0] + "angles = [0, 20, 60]\n"
    text += SMALL[SMALL.index("[rows.fedprox]") : SMALL.index('[rows."Ours')]
    with jobs() as begun, no_figures():
        printed = compared(written(tmp_path, text), done / "runs")
    assert [job.cell.algorithm for job in begun] == ["fedavg"]
    table = first_table(done / "runs")
    assert [*table.index][:4] == ["fed avg", "fedprox", "fedavg", "Ours, iid"]
    assert "--angles" in printed
    found = pd.read_csv(done / "runs/differences.csv")
    assert not {"fed avg"} & {*found["method"], *found["other"]}


def test_what_compare_refuses(done: Path, tmp_path: Path) -> None:
    path = written(tmp_path, SMALL.replace("numbers = ", "# "))
    with pytest.raises(UsageError, match="--algorithm"):
        compared(path, tmp_path / "runs", "--algorithm=fedavg")
    with pytest.raises(UsageError, match=r"rows\.toml"):
        runs.run(compare)
    with pytest.raises(UsageError, match="--rows"):
        compared(path, tmp_path / "runs", "--rows=other")
    # A mistake that only the data show is told before the first row runs.
    text = SMALL.replace("numbers = ", "# ") + 'held_out = "75"\n'
    with pytest.raises(UsageError, match=r'rows\.toml, row "Ours, iid".*--held_out=75'):
        compared(written(tmp_path, text), tmp_path / "runs")
    assert not (tmp_path / "runs").exists()
    # Nobody's files are overwritten.
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "table.md").write_text("mine")
    for folder in (tmp_path / "mine", done / "runs/fedavg"):
        with pytest.raises(UsageError, match="--run_dir"):
            compared(path, folder)


@pytest.mark.slow
def test_a_study_in_a_file_of_rows_has_the_files_of_a_study(tmp_path: Path) -> None:
    words = ("--study=domains", "--data=rotated_digits", "--rows=FedAvg,FedIIR", "--seeds=0")
    small = ("--rounds=1", "--checkpoint_every=1", "--angles=0,45", "--widths=4", "--devices=1")
    with no_figures():
        text = runs.run(paper, "fedipg", *words, *small, f"--run_dir={tmp_path}")
    table = (tmp_path / "rotated_digits/domains_some.md").read_text()
    assert table.split("\n\n")[1] in text
    heads = [cell.strip() for cell in table.split("\n\n")[1].splitlines()[0].split("|")]
    assert heads[2:-1] == ["0", "45", "mean", "worst", "mean by oracle", "at the last round"]
    names = {path.name for path in (tmp_path / "rotated_digits").iterdir() if path.is_file()}
    endings = (".json", ".md", ".tex", "_grid.md", "_runs.csv")
    assert names >= {f"domains_some{ending}" for ending in endings}
