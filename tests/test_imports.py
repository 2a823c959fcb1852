"""No import runs in a circle, not even for type checkers."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("fedjax_inv", "experiments", "benchmarks")


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def modules() -> dict[str, Path]:
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    return {name_of(path): path for path in files if "peers/" not in str(path)}


def imported(tree: ast.AST, known: set[str]) -> set[str]:
    """The known modules that a module imports, wherever in it."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.add(whole if whole in known else str(node.module))
    return found & known


def order(graph: dict[str, set[str]]) -> None:
    tuple(TopologicalSorter(graph).static_order())


def test_no_import_runs_in_a_circle() -> None:
    known = modules()
    assert {"fedjax_inv.types", "experiments.running.loop"} <= set(known)
    order({name: imported(ast.parse(path.read_text()), set(known)) for name, path in known.items()})


def test_a_circle_is_found() -> None:
    source = "import typing\nif typing.TYPE_CHECKING:\n    from fedjax_inv import rounds"
    graph = {"a": imported(ast.parse(source), {"fedjax_inv.rounds"}), "fedjax_inv.rounds": {"a"}}
    with pytest.raises(CycleError):
        order(graph)


def test_the_library_knows_nothing_of_the_binaries() -> None:
    known = modules()
    for name, path in known.items():
        if name.startswith("fedjax_inv"):
            others = imported(ast.parse(path.read_text()), set(known))
            assert not any(other.startswith("experiments") for other in others), name
