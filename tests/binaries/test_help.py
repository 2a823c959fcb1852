"""The commands that --help, README and docs show are commands: they pass all checks, uncomputed."""

import dataclasses
import importlib
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from absl import flags

import fedjax_inv_experiments
from fedjax_inv import __version__
from fedjax_inv_experiments import __main__, studies, train
from fedjax_inv_experiments.experiment import command_line
from fedjax_inv_experiments.flags import command, errors
from fedjax_inv_experiments.shift_map import table
from fedjax_inv_experiments.studies import fl_games, study

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


def test_every_binary_is_a_command() -> None:
    others = {
        "sweep",
        "show_data",
        "evaluate",
        "map",
    }
    assert set(MODULES) == {"train", *others, *(f"studies.{name}" for name in studies.LISTED)}
    for name, each in COMMANDS.items():
        text = importlib.import_module(f"fedjax_inv_experiments.{each.module}").__doc__ or ""
        assert each.about == text.partition("\n")[0] != ""
        assert __main__.chosen([*name.split(" "), "--x"], COMMANDS) == (name, ["--x"])
    assert __main__.chosen(["show_data"], COMMANDS) == ("show-data", [])


@pytest.mark.parametrize(
    ("words", "status"),
    [("", 2), ("--help", 0), ("paper --help", 0), ("paper", 2), ("trian", 2), ("--rounds=1", 2)],
)
def test_words_that_are_no_command(
    words: str, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        __main__.chosen(words.split(), COMMANDS)
    assert ended.value.code == status
    out, err = capsys.readouterr()
    assert bool(out) != bool(err)


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
    if name.startswith("studies.") or name == "map":
        module.BINARY.define(values)
        options = module.BINARY.read(["", *arguments], values)
        paper = table.PAPER if name == "map" else module.PAPER
        if name == "map":  # some of its commands need a finished map
            own = dataclasses.replace(options.own, beside="")
            rows = options.rows or (("fedprox",) if options.study == "severity" else ())
            options = options._replace(own=own, rows=rows)
        for data in options.data:
            rows = study.selected(paper, data, options)
            assert study.configs(rows, folder, options.overrides)
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
    assert "experiments.running.launch" in imported
    assert not {"jax._src", "flax.core", "optax._src"} & set(imported)
    values = flags.FlagValues()
    train.BINARY.define(values)
    text = train.BINARY.answer(["", "--help"], values)
    assert text is not None
    assert done.stdout == f"{text}\n"
