"""No import runs in a circle or back up, not even for type checkers."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("fedjax_inv", "fedjax_inv_experiments", "benchmarks", "tools")


# The rooms of fedjax_inv_experiments/: a module imports from its own room and earlier ones; the
# binaries lie in the root.
ROOMS = ("flags", "parts", "experiment", "running", "reporting", "papers", "shift_map", "binaries")


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
    assert {"fedjax_inv.types", "fedjax_inv_experiments.running.loop"} <= set(known)
    order({name: imported(ast.parse(path.read_text()), set(known)) for name, path in known.items()})


def test_a_circle_is_found() -> None:
    source = "import typing\nif typing.TYPE_CHECKING:\n    from fedjax_inv import rounds"
    graph = {"a": imported(ast.parse(source), {"fedjax_inv.rounds"}), "fedjax_inv.rounds": {"a"}}
    with pytest.raises(CycleError):
        order(graph)


def test_the_library_knows_nothing_of_the_binaries() -> None:
    known = modules()
    for name, path in known.items():
        if name.startswith("fedjax_inv."):
            others = imported(ast.parse(path.read_text()), set(known))
            assert not any(other.startswith("fedjax_inv_experiments") for other in others), name


def room_of(name: str) -> int | None:
    """The index of a module's room; None outside of fedjax_inv_experiments/."""
    package, _, rest = name.partition(".")
    if package != "fedjax_inv_experiments" or not rest:
        return None
    room, _, module = rest.partition(".")
    return ROOMS.index(room if module or room in ROOMS else "binaries")


def upwards(name: str, others: set[str]) -> set[str]:
    """The modules of later rooms among those that a module imports."""
    room = room_of(name)
    return set() if room is None else {o for o in others if (room_of(o) or 0) > room}


def test_no_import_runs_back_up() -> None:
    known = modules()
    found = {
        name: upwards(name, imported(ast.parse(path.read_text()), set(known)))
        for name, path in known.items()
    }
    assert not {name: others for name, others in found.items() if others}


def test_an_import_that_runs_back_up_is_found() -> None:
    later = {
        "fedjax_inv_experiments.flags.flag",
        "fedjax_inv_experiments.parts.data",
        "fedjax_inv_experiments.train",
        "fedjax_inv",
    }
    assert upwards("fedjax_inv_experiments.parts.method", later) == {"fedjax_inv_experiments.train"}
    assert upwards("fedjax_inv_experiments.flags.names", later) == later - {
        "fedjax_inv_experiments.flags.flag",
        "fedjax_inv",
    }
    assert upwards("fedjax_inv_experiments.train", later) == set()
    assert upwards("benchmarks.peers", later) == set()


def test_the_root_of_experiments_holds_binaries_alone() -> None:
    found = {path.stem: path.read_text() for path in (ROOT / "fedjax_inv_experiments").glob("*.py")}
    del found["__init__"], found["__main__"]  # the second starts the others
    assert not {name for name, text in found.items() if "\nBINARY = " not in text}
    folders = {path.name for path in (ROOT / "fedjax_inv_experiments").iterdir() if path.is_dir()}
    assert folders - {"__pycache__"} == {*ROOMS} - {"binaries"}
