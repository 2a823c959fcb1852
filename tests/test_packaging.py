"""What is installed and published: the files of the wheel, and the pages that name the version."""

import re
import subprocess
from pathlib import Path

import pytest

from fedjax_inv import __version__
from fedjax_inv_experiments.flags import extras

ROOT = Path(__file__).parents[1]
PACKAGES = ("fedjax_inv", "fedjax_inv_experiments")


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
    files = listed.stdout.split()
    assert {Path(file).suffix for file in files} >= {".py", ".flags", ".csv", ".typed"}
    assert not {*files} - found


def test_every_extra_of_a_missing_package_is_declared() -> None:
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    differ = {"absl-py": "absl", "orbax-checkpoint": "orbax", "pillow": "PIL"}
    differ |= {"scikit-learn": "sklearn", "tensorflow-datasets": "tensorflow_datasets"}
    declared = {
        differ.get(name, name): extra
        for extra in ("experiments", "tensorboard", "prepare")
        for line in project["optional-dependencies"][extra]
        for name in [re.split("[<>=]", line)[0]]
        if "[" not in name
    }
    assert declared == extras.EXTRAS


def test_the_version_is_that_of_the_pages() -> None:
    changes = (ROOT / "CHANGELOG.md").read_text()
    first = re.search(r"^## (\S+)", changes, re.MULTILINE)
    assert first is not None
    assert first[1] == __version__
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_requirements_name_no_index_and_have_digests() -> None:
    for name in ("build", "run", "docs", "dev", "libtpu"):
        text = (ROOT / "requirements" / f"{name}.txt").read_text()
        assert "://" not in text
        assert not [line for line in text.splitlines() if line.startswith("-")]
        entries = re.split(r"\n(?=\S)", text)
        assert all("==" in entry and "--hash=sha256:" in entry for entry in entries[2:])
    # `make docs` installs its versions over those of `make run`, and `make test` over both.
    run, docs, dev = (
        set(re.findall(r"^\S+==\S+", (ROOT / "requirements" / file).read_text(), re.MULTILINE))
        for file in ("run.txt", "docs.txt", "dev.txt")
    )
    assert len(run) > 30
    assert run < docs < dev


def test_requirements_have_all_that_is_declared() -> None:
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras_of = project["optional-dependencies"]
    run = [*project["dependencies"], *extras_of["experiments"]]
    docs, dev = run + extras_of["docs"], run + extras_of["tensorboard"] + extras_of["dev"]
    declared = {"run": run, "docs": docs, "dev": docs + dev, "lowest": dev}
    for name, lines in declared.items():
        text = (ROOT / "requirements" / f"{name}.txt").read_text()
        pinned = set(re.findall(r"^([\w-]+)==", text, re.MULTILINE))
        wanted = {re.split("[<>=[]", line)[0].lower().replace("_", "-") for line in lines}
        assert wanted - {"fedjax-inv"} <= pinned, "make requirements writes them anew"
