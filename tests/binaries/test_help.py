"""The commands that --help, README and docs show are commands: they pass all checks, uncomputed."""

import importlib
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import runs
from fedjax_inv import __version__
from fedjax_inv.algorithms import LISTED
from fedjax_inv_experiments import __main__, command_line, config, paper, sheet, start, train
from fedjax_inv_experiments.assembly import factories
from fedjax_inv_experiments.studies import map_table, row_runs, study
from runs import parsed

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", *(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")))
COMMANDS = __main__._COMMANDS


def commands(text: str) -> list[tuple[str, Sequence[str]]]:
    """The commands of a text, and their arguments."""
    lines = re.sub(r"\\\n", " ", text).splitlines()
    found = (re.match(r" *(?:\.venv/bin/)?fedjax-inv ([a-z][^#]*)", line) for line in lines)
    words = (shlex.split(match[1]) for match in found if match)
    return [(name, arguments) for name, *arguments in words]


@pytest.mark.parametrize(
    ("words", "status"), [("", 2), ("--help", 0), ("trian", 2), ("--rounds=1", 2)]
)
def test_words_that_are_no_command(
    words: str, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["fedjax-inv", *words.split()])
    with pytest.raises(SystemExit) as ended:
        __main__.main()
    assert ended.value.code == status
    out, err = capsys.readouterr()
    assert bool(out) != bool(err)


def test_the_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["fedjax-inv", "--version"])
    __main__.main()
    assert capsys.readouterr().out == f"fedjax-inv {__version__}\n"


def test_an_extra_that_is_missing_later_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    later = ImportError("No module named 'PIL': pip install it")  # as the library raises it
    later.__cause__ = ModuleNotFoundError("No module named 'PIL'", name="PIL")
    with pytest.raises(SystemExit) as ended, start.in_one_line():
        raise later
    assert ended.value.code == 2
    assert "fedjax_inv[experiments]" in capsys.readouterr().err
    with pytest.raises(ImportError), start.in_one_line():
        raise ImportError("cannot import name", name="jax")


def check(name: str, arguments: Sequence[str], folder: Path) -> None:
    """Reads a command as its binary does; a study's with all of its rows."""
    assert name in COMMANDS
    command = importlib.import_module(f"fedjax_inv_experiments.{COMMANDS[name][0]}")
    with parsed(*arguments, command=command) as words:
        if name == "compare":  # of a file that the page shows
            assert words == ["rows.toml"]
            return
        if name not in ("paper", "map"):
            assert not words
            assert command_line.chosen()
            return
        of = map_table.MAP
        if name == "paper":
            assert words[0].replace("-", "_") in paper.PAPERS
            of = study.paper(words[0].replace("-", "_"))
        options = study.options(of, map_table.MapFlags() if name == "map" else None)
    if options.study == "severity":  # needs a finished map
        options = options._replace(rows=("fedprox",))
    for data in options.data:
        rows = study.rows_of(of, data, options)
        assert row_runs.configs(rows, folder, options.overrides)


@pytest.mark.parametrize("name", sorted({module for module, _ in COMMANDS.values()}))
def test_the_examples_of_help_parse(name: str, tmp_path: Path) -> None:
    text = importlib.import_module(f"fedjax_inv_experiments.{name}").__doc__ or ""
    examples = commands(text)
    assert {COMMANDS[command][0] for command, _ in examples} == {name}
    for command, arguments in examples:
        check(command, arguments, tmp_path)


# The map's commands have hundreds of cells, and each is checked.
_MAP = pytest.param("docs/map.md", marks=pytest.mark.slow)


@pytest.mark.parametrize("page", [_MAP if page == "docs/map.md" else page for page in PAGES])
def test_the_commands_of_a_page_parse(page: str, tmp_path: Path) -> None:
    blocks = [line for line in (ROOT / page).read_text().splitlines() if line.startswith("    ")]
    for name, arguments in commands("\n".join(blocks)):
        check(name, arguments, tmp_path)


@pytest.mark.parametrize("name", ["", *COMMANDS])
@pytest.mark.parametrize("output", ["| true", "> /dev/full", ">&-"])
def test_help_may_be_cut_off(name: str, output: str) -> None:
    command = shlex.join([sys.executable, "-m", "experiments", *name.split(), "--help"])
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command} {output}"], cwd=ROOT, capture_output=True
    )
    assert (done.returncode, done.stderr) == (0, b"")


# Of these flags those that a command takes.
SOME = {"rounds", "study", "rows", "data", "out", "weights"}
TAKEN = {
    "train": {"rounds", "weights"},
    "evaluate": {"out"},
    "features": {"out", "weights"},
    "show-data": {"out", "rounds", "weights"},
    "paper": {"rounds", "weights", "study", "rows", "data"},
    "compare": {"rounds", "weights", "rows", "data"},
    "map": {"rounds", "weights", "study", "rows", "data"},
}


@pytest.mark.parametrize("name", TAKEN)
def test_help_has_the_flags_that_are_taken_and_imports_no_jax(name: str) -> None:
    code = (
        "import sys; from experiments import __main__; sys.argv[0] = 'fedjax-inv'\n"
        "try: __main__.main()\nfinally: print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, name, "--help"], cwd=ROOT, capture_output=True, text=True
    )
    assert SOME & {*re.findall(r"^  --(\w+):", done.stdout, re.MULTILINE)} == TAKEN[name]
    places = [done.stdout.find(group.__doc__) for group in sheet.groups(config.Config).values()]
    assert [place for place in places if place >= 0] == sorted({*places} - {-1})
    assert not {"jax", "flax", "pandas", "matplotlib"} & set(done.stderr.split())


@pytest.mark.parametrize("name", LISTED)
def test_help_of_an_algorithm_has_all_of_its_settings(name: str) -> None:
    text = runs.run(train, f"--help_algorithm={name}")
    known = factories.hyperparameters(name)
    texts = [setting for setting, kinds in known.items() if {*kinds} - {type(None)}]
    for setting in texts:
        assert re.search(rf"^{setting} \(.+\n    \S", text, re.MULTILINE), setting


def test_a_row_of_a_study_may_have_what_a_flag_of_the_command_needs(tmp_path: Path) -> None:
    """--stop_below needs --watch_examples, which the preset of each row has."""
    of = importlib.import_module("fedjax_inv_experiments.studies.fl_games").PAPER
    words = ("--study=classes", "--data=colored_mnist", "--stop_below=0.5")
    chosen = runs.options(of, *words)
    rows = study.rows_of(of, "colored_mnist", chosen)
    configs = row_runs.configs(rows, tmp_path, chosen.overrides)
    assert {one.evaluation.stop_below for one in configs} == {(0.5,)}
