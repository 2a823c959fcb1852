"""docs/architecture.md names every room and package of the code, and only files that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/architecture.md").read_text()


def paths(text: str) -> set[str]:
    """The paths in code marks: all that have a slash or a file's ending, and no placeholder."""
    marked = re.findall(r"`([\w./*-]+)`", text)
    return {path for path in marked if "/" in path or path.endswith((".py", ".md"))}


def test_paths_are_found() -> None:
    assert paths("`a/b.py` and `c/`, not `d` nor `e = f/g`") == {"a/b.py", "c/"}


def test_every_path_exists() -> None:
    found = paths(PAGE)
    assert len(found) > 40
    assert not [path for path in sorted(found) if not (ROOT / path).exists()]


def test_every_room_and_package_is_named() -> None:
    for package in ("fedjax_inv_experiments", "fedjax_inv"):
        rooms = {path.parent for path in (ROOT / package).rglob("__init__.py")}
        top = {
            f"{room.relative_to(ROOT)}/" for room in rooms if len(room.parts) - len(ROOT.parts) <= 2
        }
        assert top <= paths(PAGE)
    modules = {f"fedjax_inv/{path.name}" for path in (ROOT / "fedjax_inv").glob("[a-z]*.py")}
    assert modules <= paths(PAGE)
