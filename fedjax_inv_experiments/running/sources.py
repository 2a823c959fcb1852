"""Digests of the code files on which results depend.

A digest leaves out what changes no number of a run that ends: docstrings, empty lines, lines that
are comments, and statements that only raise an error, as `if value < 0: raise ...` does, or
`checks.integer(...)`.
"""

import ast
import contextlib
import functools
import hashlib
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from fedjax_inv.algorithms import LISTED
from fedjax_inv_experiments.experiment.config import Config
from fedjax_inv_experiments.parts import environments

ROOT = Path(__file__).parents[2]  # of both packages
_PARSING = threading.Lock()
# What trains, draws and evaluates in every run, with what these import.
_SHARED = (
    *(f"fedjax_inv.program.{name}" for name in ("compiled", "host_inputs", "one_run")),
    *("fedjax_inv.missing", "fedjax_inv.schedules", "fedjax_inv.data.wrong_labels"),
    *(f"fedjax_inv_experiments.experiment.{name}" for name in ("assemble", "scaling")),
    *(
        f"fedjax_inv_experiments.parts.{name}"
        for name in (
            *("method", "network", "objective", "optimizers", "participation", "partition"),
            *("selection", "server", "training", "watching"),
        )
    ),
)
# What only streamed runs use, whose numbers are those of other runs.
_STREAMING = {f"fedjax_inv.program.{name}" for name in ("kept", "parts", "streams")}


def of_run(config: Config) -> dict[str, str]:
    """The digests of the library's files that train and split the data, by their paths.

    These are the algorithms, the environment, what all runs share, and what these import. Readers
    of data sets are left out, because a start records the digest of all examples. What streams
    examples is left out unless --hold=stream: --hold=auto may choose it, as it changes no number.
    """
    algorithms = [
        f"fedjax_inv.algorithms.{name}" if name in LISTED else name.partition(":")[0]
        for name in config.method.algorithm
    ]
    # An algorithm from elsewhere is no file of this project.
    own = [name for name in algorithms if path_of(name).exists()]
    records = environments.LISTED[config.environment.name].records
    modules = [*own, *_SHARED, *(record.__module__ for record in records)]
    return of_modules(modules, streams=config.run.hold == "stream")


def of_modules(names: Iterable[str], *, streams: bool = False) -> dict[str, str]:
    """The digests of modules and of what they import from the library, by their files' paths.

    streams: whether they include what streams examples.
    """
    found: set[str] = set() if streams else {*_STREAMING}
    todo = [*names]
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            todo += _read(path_of(name)).imported
    left_out = set() if streams else _STREAMING
    return of_files(path_of(name) for name in found - left_out)


def of_files(paths: Iterable[Path]) -> dict[str, str]:
    """The digests of files of this project, by their paths below its root."""
    return {path.relative_to(ROOT).as_posix(): digest(path) for path in sorted(paths)}


def digest(path: Path) -> str:
    """The first half of the SHA-256 of a file's lines that have an effect."""
    return _read(path).digest


class _Source(NamedTuple):
    digest: str
    imported: frozenset[str]  # the library's modules that it imports


@functools.cache
def _read(path: Path) -> _Source:
    text = path.read_text(encoding="utf-8")
    lines, found = text.splitlines(), set()
    if path.suffix == ".py":
        for node in _statements(_parsed(text)):
            for first, last in [*_docstring(node), *_only_raises(node)]:
                lines[first:last] = [""] * (last - first)
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                whole = {f"{node.module}.{alias.name}" for alias in node.names}
                found |= {each if path_of(each).exists() else node.module for each in whole}
    code = [line.rstrip() for line in lines if line.strip() and line.lstrip()[0] != "#"]
    sha = hashlib.sha256("\n".join(code).encode()).hexdigest()
    return _Source(sha[:32], frozenset(each for each in found if each.startswith("fedjax_inv.")))


def _parsed(text: str) -> ast.Module:
    """The code as a tree.

    Python 3.11 raises SystemError at times if another thread parses, as NumPy does to read a file
    of arrays (CPython gh-106905).
    """
    with _PARSING:
        for _ in range(1000):
            with contextlib.suppress(SystemError):
                return ast.parse(text)
        return ast.parse(text)


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """A node and the statements in it, at any depth."""
    yield node
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        inner = getattr(node, name, [])
        for each in inner if isinstance(inner, list) else []:  # of a lambda it is an expression
            yield from _statements(each)


def _docstring(node: ast.AST) -> list[tuple[int, int]]:
    """The lines of a node's docstring: the index of the first, and that behind the last."""
    if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return []
    first = node.body[0] if node.body else None
    if not (isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)):
        return []
    if first.lineno <= getattr(node, "lineno", 0):  # code stands in its line, too
        return []
    return [(first.lineno - 1, first.end_lineno or first.lineno)]


def _only_raises(node: ast.AST) -> list[tuple[int, int]]:
    """The lines of a statement that raises an error or else does nothing, as `_docstring`'s."""
    match node:
        case ast.If() | ast.For():
            head = node.test if isinstance(node, ast.If) else node.iter
            names = any(isinstance(each, ast.NamedExpr) for each in ast.walk(head))  # a value
            does = not names and _raises(node.body) and _raises(node.orelse)
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id="checks")))):
            does = True
        case _:
            does = isinstance(node, ast.Raise | ast.Pass)
    return (
        [(node.lineno - 1, node.end_lineno or node.lineno)]
        if does and isinstance(node, ast.stmt)
        else []
    )


def _raises(block: list[ast.stmt]) -> bool:
    """Whether statements end in an error, or each raises one or does nothing."""
    leaves = (ast.Return, ast.Break, ast.Continue, ast.Yield, ast.YieldFrom)
    if block and isinstance(block[-1], ast.Raise):
        return not any(isinstance(each, leaves) for node in block for each in ast.walk(node))
    return all(_only_raises(each) for each in block)


def path_of(name: str) -> Path:
    """The file of a module of this project."""
    place = ROOT.joinpath(*name.split("."))
    return place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
