"""What is installed and published: the wheel, the requirements, the version, the imports."""

import ast
import re
import subprocess
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from fedjax_inv import __version__

ROOT = Path(__file__).parents[1]
# The folders, and the packages as which they are installed.
PACKAGES = {"fedjax_inv": "fedjax_inv", "experiments": "fedjax_inv_experiments"}


def test_the_wheel_has_every_file_of_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("setuptools", minversion="77")
    from setuptools.dist import Distribution

    monkeypatch.chdir(ROOT)
    distribution = Distribution({"script_name": "setup.py"})
    distribution.parse_config_files(["pyproject.toml"])
    distribution.include_package_data = False  # it would write, and add what an earlier build found
    command = distribution.get_command_obj("build_py")
    command.ensure_finalized()
    outputs = command.get_outputs(include_bytecode=False)
    found = {str(Path(file).relative_to(command.build_lib)) for file in outputs}
    listed = subprocess.run(
        ["git", "ls-files", *PACKAGES], cwd=ROOT, capture_output=True, text=True, check=True
    )
    folders = (file.partition("/")[::2] for file in listed.stdout.split())
    assert not {f"{PACKAGES[folder]}/{file}" for folder, file in folders} - found
    assert not any(file.startswith("experiments/") for file in found)


def test_the_version_is_that_of_the_pages() -> None:
    first = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert first is not None
    assert first[1] == __version__
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_requirements_name_no_index_and_have_digests() -> None:
    pinned = {}
    for name in ("run", "docs", "dev"):
        text = (ROOT / "requirements" / f"{name}.txt").read_text()
        assert "://" not in text
        assert text.count("==") <= text.count("--hash=sha256:")
        pinned[name] = set(re.findall(r"^\S+==\S+", text, re.MULTILINE))
    # `make docs` installs its versions over those of `make run`, and `make test` over both.
    assert pinned["run"] < pinned["docs"] < pinned["dev"]


def test_no_import_runs_in_a_circle() -> None:
    files = [path.relative_to(ROOT) for name in PACKAGES for path in (ROOT / name).rglob("*.py")]
    names = {path: ".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in files}
    known = {*names.values()}
    imports: dict[str, set[str]] = {}
    for path, name in names.items():
        nodes = [*ast.walk(ast.parse((ROOT / path).read_text()))]
        found = {each.name for node in nodes if isinstance(node, ast.Import) for each in node.names}
        for node in nodes:
            for each in node.names if isinstance(node, ast.ImportFrom) else ():
                inside = path.parts[: len(path.parts) - node.level] if node.level else ()
                module = ".".join([*inside, *filter(None, [node.module])])
                whole = f"{module}.{each.name}"
                found.add(whole if whole in known else module)
        imports[name] = found & known
    assert {*TopologicalSorter(imports).static_order()} == known  # or it raises CycleError
    of_library = set().union(*(imports[name] for name in known if name.startswith("fedjax_inv.")))
    assert not {
        name for name in of_library if name.startswith(("experiments", "fedjax_inv_experiments"))
    }
