"""The commands that --help, README and docs show are commands: they pass all checks, uncomputed."""

import dataclasses
import importlib
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import pytest
from absl import flags

import fedjax_inv_experiments
from fedjax_inv import __version__
from fedjax_inv_experiments import __main__, papers, sweep, train
from fedjax_inv_experiments.experiment import command_line
from fedjax_inv_experiments.flags import command, errors
from fedjax_inv_experiments.papers import fl_games, study
from fedjax_inv_experiments.running import launch
from fedjax_inv_experiments.shift_map import table

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", *(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")))
COMMANDS = __main__.commands()
MODULES = [each.module for each in COMMANDS.values()]


def commands(text: str) -> list[tuple[str, Sequence[str]]]:
    """The modules of the binaries that are called in a text, and their arguments."""
    lines = re.sub(r"\\\n", " ", text).splitlines()
    found = (re.match(r" *(?:\.venv/bin/)?fedjax-inv ([a-z][^#]*)", line) for line in lines)
    words = (__main__.chosen(shlex.split(match[1]), COMMANDS) for match in found if match)
    return [(COMMANDS[name].module, arguments) for name, arguments in words]


def test_commands_are_found_where_they_stand() -> None:
    text = "Run\n\n    .venv/bin/fedjax-inv train --a=1 \\\n  --b=2  # so\n\nand not this."
    assert commands(text) == [("train", ["--a=1", "--b=2"])]
    assert commands("fedjax-inv paper fl_games") == [("papers.fl_games", [])]


def test_every_binary_is_a_command() -> None:
    others = {
        "sweep",
        "show_data",
        "evaluate",
        "export",
        "explain",
        "contributions",
        "factors",
        "map",
    }
    assert set(MODULES) == {"train", *others, *(f"papers.{name}" for name in papers.LISTED)}
    for name, each in COMMANDS.items():
        text = importlib.import_module(f"fedjax_inv_experiments.{each.module}").__doc__ or ""
        assert each.about == text.partition("\n")[0] != ""
        assert __main__.chosen([*name.split(" "), "--x"], COMMANDS) == (name, ["--x"])
    assert __main__.chosen(["show_data"], COMMANDS) == ("show-data", [])


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("trian --rounds=1", "trian: unknown command; did you mean train?"),
        ("paper fl-game", "paper fl-game: unknown command; did you mean paper fl_games?"),
        ("paper", "paper needs a name: cafe, fedcfa, "),
        ("zzz", "zzz: unknown command; must be one of contributions, "),
        ("--rounds=1", "--rounds=1: must stand after a command, such as fedjax-inv train --rounds"),
    ],
)
def test_an_unknown_command(words: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        __main__.chosen(words.split(" "), COMMANDS)
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith(f"error: {text}")
    assert err.count("\n") == 1


@pytest.mark.parametrize(("words", "status"), [((), 2), (("--help",), 0), (("-h", "train"), 0)])
def test_the_list_of_commands(
    words: Sequence[str], status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        __main__.chosen(words, COMMANDS)
    assert ended.value.code == status
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if line.startswith("  ")]) == len(COMMANDS)
    train = next(line for line in lines if line.startswith("  train "))
    assert train.endswith(
        " One experiment: one algorithm, one held-out domain, all seeds in one program."
    )


def test_the_list_of_papers(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        __main__.chosen(["paper", "--help"], COMMANDS)
    assert ended.value.code == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert len(lines) == len(papers.LISTED)
    assert all(line.startswith("  paper ") for line in lines)


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        __main__.chosen(["--version"], COMMANDS)
    assert (ended.value.code, capsys.readouterr().out) == (0, f"fedjax-inv {__version__}\n")


def test_a_command_starts_its_binary(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    monkeypatch.setattr(fedjax_inv_experiments, "before_imports", lambda argv: None)
    monkeypatch.setattr(command, "main", lambda binary: started.append((binary, *sys.argv)))
    monkeypatch.setattr(sys, "argv", ["/bin/fedjax-inv", "paper", "fl-games", "--seeds=0"])
    __main__.main()
    assert started == [(fl_games.BINARY, "fedjax-inv paper fl_games", "--seeds=0")]


def test_a_missing_extra_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(name: str) -> NoReturn:
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)

    monkeypatch.setattr(fedjax_inv_experiments, "before_imports", lambda argv: None)
    monkeypatch.setattr(importlib, "import_module", missing)
    monkeypatch.setattr(sys, "argv", ["fedjax-inv", "train"])
    package = "absl.app"
    with pytest.raises(SystemExit) as ended:
        __main__.main()
    assert ended.value.code == 2
    line = "error: the package absl is missing: pip install 'fedjax_inv[experiments]'\n"
    assert capsys.readouterr() == ("", line)
    package = "fedjax_inv.nowhere"  # a defect
    monkeypatch.setattr(sys, "argv", ["fedjax-inv", "train"])
    with pytest.raises(ModuleNotFoundError):
        __main__.main()


def test_an_extra_that_is_missing_later_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    later = ImportError("No module named 'PIL': pip install it")  # as the library raises it
    later.__cause__ = ModuleNotFoundError("No module named 'PIL'", name="PIL")
    with pytest.raises(SystemExit) as ended, errors.in_one_line():
        raise later
    assert ended.value.code == 2
    assert "error: the package PIL is missing: pip install 'fedjax_inv[e" in capsys.readouterr().err
    with pytest.raises(ImportError, match="cannot import name"), errors.in_one_line():
        raise ImportError("cannot import name", name="jax")


def check(name: str, arguments: Sequence[str], folder: Path) -> None:
    """Reads a command as its binary does; a study's with all of its rows."""
    module, values = importlib.import_module(f"fedjax_inv_experiments.{name}"), flags.FlagValues()
    if name.startswith("papers.") or name == "map":
        module.BINARY.define(values)
        options = module.BINARY.read(["", *arguments], values)
        paper = table.PAPER if name == "map" else module.PAPER
        if name == "map":  # some of its commands need a finished map
            own = dataclasses.replace(options.own, beside="")
            rows = options.rows or (("fedprox",) if options.study == "severity" else ())
            options = options._replace(own=own, rows=rows)
        for data in options.data:
            rows = paper.select(paper.studies[options.study], data, options)
            assert study.configs(paper, rows, folder, options.overrides)
    elif name in ("train", "sweep"):
        command_line.of_arguments(arguments)
    else:
        module.BINARY.define(values)
        assert module.BINARY.read(["", *arguments], values)


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_help_parse(name: str, tmp_path: Path) -> None:
    examples = commands(importlib.import_module(f"fedjax_inv_experiments.{name}").__doc__ or "")
    assert {binary for binary, _ in examples} == {name}
    for _, arguments in examples:
        check(name, arguments, tmp_path)


# The map's commands have hundreds of cells, and each is checked.
_MAP = pytest.param("docs/map.md", marks=pytest.mark.slow)


@pytest.mark.parametrize("page", [_MAP if page == "docs/map.md" else page for page in PAGES])
def test_the_commands_of_a_page_parse(page: str, tmp_path: Path) -> None:
    blocks = [line for line in (ROOT / page).read_text().splitlines() if line.startswith("    ")]
    for name, arguments in commands("\n".join(blocks)):
        check(name, arguments, tmp_path)


@pytest.mark.parametrize("binary", [train, sweep])
def test_the_example_of_train_and_sweep_could_be_run(
    binary: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ((_, arguments),) = commands(binary.__doc__ or "")
    chosen = command_line.of_arguments(arguments)
    folder = binary.folder(chosen)
    launch.check(chosen, folder, in_folders=binary is sweep)
    assert not folder.exists()


def test_help_does_not_import_jax_and_says_the_same() -> None:
    code = (
        "import runpy, sys; sys.argv = ['-m', '--help']; import experiments; sys.argv[0] = ''\n"
        "try: runpy.run_module('experiments.train', run_name='__main__')\n"
        "finally: print(*sorted(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    imported = done.stderr.split()
    assert "fedjax_inv_experiments.running.launch" in imported
    assert not {"jax._src", "flax.core", "optax._src"} & set(imported)
    values = flags.FlagValues()
    train.BINARY.define(values)
    text = train.BINARY.answer(["", "--help"], values)
    assert text is not None
    assert done.stdout == f"{text}\n"
