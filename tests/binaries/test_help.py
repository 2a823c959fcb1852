"""The commands that --help, README and docs show are commands: they pass all checks, uncomputed."""

import importlib
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from absl import flags

from fedjax_inv_experiments import papers, sweep, train
from fedjax_inv_experiments.experiment import command_line
from fedjax_inv_experiments.papers import study
from fedjax_inv_experiments.running import launch

ROOT = Path(__file__).parents[2]
BINARIES = ("train", "sweep", "show_data", "evaluate", "export", "explain", "contributions")
PAGES = ("README.md", *(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")))
MODULES = [*BINARIES, "factors", *(f"papers.{name}" for name in papers.LISTED)]


def commands(text: str) -> list[tuple[str, list[str]]]:
    """The binaries that are called in a text, without experiments., and their arguments."""
    lines = re.sub(r"\\\n", " ", text).splitlines()
    found = (re.search(r"python -m experiments\.([\w.]+)( [^#]*)?", line) for line in lines)
    return [(match[1], shlex.split(match[2] or "")) for match in found if match]


def test_commands_are_found_where_they_stand() -> None:
    text = (
        "Run\n\n    .venv/bin/python -m experiments.train --a=1 \\\n  --b=2  # so\n\nand not this."
    )
    assert commands(text) == [("train", ["--a=1", "--b=2"])]


def check(name: str, arguments: list[str], folder: Path) -> None:
    """Reads a command as its binary does; a study's with all of its rows."""
    module, values = importlib.import_module(f"fedjax_inv_experiments.{name}"), flags.FlagValues()
    if name.startswith("papers."):
        module.BINARY.define(values)
        options = module.BINARY.read(["", *arguments], values)
        for data in options.data:
            rows = study.select(module.PAPER.studies[options.study].rows(data), options.rows)
            assert study.configs(module.PAPER, rows, folder, options.overrides)
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


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_parse(page: str, tmp_path: Path) -> None:
    blocks = [line for line in (ROOT / page).read_text().splitlines() if line.startswith("    ")]
    for name, arguments in commands("\n".join(blocks)):
        if name in MODULES:  # benchmarks read their own
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
