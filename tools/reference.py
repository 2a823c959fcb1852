"""The pages of the API reference, written from the source: public names, signatures and fields.

The site's generator asks this module (docs/conf.py), so a new module is on the site without a line
anywhere. A package whose `__init__` imports names has one page with these names; a package without
such imports has a page for each of its modules.
"""

import ast
import inspect
import re
import textwrap
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGE = "fedjax_inv"


class Page(NamedTuple):
    """A page of the reference."""

    module: str  # its full name
    summary: str  # the first line of its docstring
    names: tuple[tuple[str, str, str], ...]  # (directive, public name, value of an alias)
    pages: tuple["Page", ...] = ()  # of the modules of a package


def pages(package: str = PACKAGE) -> list[Page]:
    """The pages of a package's modules and packages, in alphabetical order."""
    folder = ROOT / package.replace(".", "/")
    inside = [path for path in folder.iterdir() if _is_public(path)]
    return [_page(f"{package}.{path.stem}", path) for path in sorted(inside)]


def _is_public(path: Path) -> bool:
    is_package = (path / "__init__.py").exists()
    return (is_package or path.suffix == ".py") and not path.name.startswith("_")


def _page(module: str, path: Path) -> Page:
    tree = _parsed(path)
    summary = (ast.get_docstring(tree) or "").partition("\n")[0]
    imported = [
        (node.module, alias.name)
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
        if alias.asname == alias.name
    ]
    below = pages(module) if path.is_dir() else []
    if not imported:
        return Page(module, summary, tuple(_own(path)), tuple(below))
    names = [
        each
        for source, name in imported
        for each in _own(ROOT / source.replace(".", "/"), constants=True)
        if each[1] == name
    ]
    modules = {f"{source}.{name}" for source, name in imported}
    return Page(module, summary, tuple(names), tuple(p for p in below if p.module in modules))


def _parsed(path: Path) -> ast.Module:
    return ast.parse(_file(path).read_text(encoding="utf-8"))


def _file(path: Path) -> Path:
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _own(path: Path, constants: bool = False) -> Iterator[tuple[str, str, str]]:
    """The public functions, classes and aliases that a module defines; constants if asked for."""
    for node in _parsed(path).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            is_class = isinstance(node, ast.ClassDef)
            yield "autoclass" if is_class else "autofunction", node.name, ""
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            name = target.id if isinstance(target, ast.Name) else "_"
            if not name.startswith("_") and (constants or not name.isupper()):
                yield "py:data", name, ast.unparse(node.value) if node.value else ""


def source_of(page: Page) -> str:
    """The reStructuredText of a page."""
    short = page.module.rpartition(".")[2]
    lines = [short, "=" * len(short), "", f".. automodule:: {page.module}", ""]
    lines += [f".. py:currentmodule:: {page.module}", ""]
    lines += contents(page.pages)
    for directive, name, value in page.names:
        lines += [f".. {directive}:: {name}"]
        lines += [f"   :value: {value}"] if value else []
        if directive == "autoclass":
            lines += ["   :members:", "   :special-members: __call__"]
        lines += [""]
    return "\n".join(lines)


def contents(listed: Sequence[Page]) -> list[str]:
    """The lines of a table of pages and what they are about; none without a page."""
    if not listed:
        return []
    lines = [".. list-table::", "   :header-rows: 1", "", "   * - module", "     - content"]
    for page in listed:
        short = page.module.rpartition(".")[2]
        summary = "\n".join(as_rst([page.summary]))
        lines += [f"   * - :doc:`{short} <{page.module}>`", f"     - {summary}"]
    lines += ["", ".. toctree::", "   :hidden:", ""]
    return [*lines, *(f"   {page.module}" for page in listed), ""]


def write(folder: Path) -> None:
    """Writes all pages of the reference and removes those of modules that are gone."""
    top = pages()
    texts = {"contents.txt": "\n".join(contents(top))}
    for page in [*top, *(below for each in top for below in each.pages)]:
        texts[f"{page.module}.rst"] = source_of(page)
    for path in [*folder.glob("*.rst"), *folder.glob("*.txt")]:
        if path.name not in texts:
            path.unlink()
    for name, text in texts.items():
        path = folder / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


# Docstrings. They are plain text with code marks, and sections in Google's style.

_SECTION = re.compile(r"(Args|Returns|Raises|Yields):$")
_CODE = re.compile(r"(`[^`]+`)")


def as_rst(lines: Iterable[str]) -> list[str]:
    """The reStructuredText of a docstring: nothing but code marks and sections has a meaning.

    Paragraphs that are indented and tables become blocks of code.
    """
    done: list[str] = []
    for is_block, part in _parts(lines):
        if not is_block:
            done += _prose(part)
            continue
        code = textwrap.dedent("\n".join(part)).rstrip().split("\n")
        done += ["", f".. code-block:: {_language(code)}", ""]
        done += [f"   {line}" if line else "" for line in code] + [""]
    return done


def _parts(lines: Iterable[str]) -> Iterator[tuple[bool, list[str]]]:
    """Cuts a docstring into prose (False) and blocks (True)."""
    part: list[str] = []
    in_block = in_section = False
    last = ""
    for line in lines:
        in_section = in_section or bool(_SECTION.match(line))
        starts = line.startswith("|") or (line.startswith("    ") and (in_block or not last))
        if line.strip() and (starts and not in_section) != in_block:
            yield in_block, part
            part, in_block = [], not in_block
        part.append(line)
        last = line
    yield in_block, part


def _language(code: list[str]) -> str:
    try:
        ast.parse("\n".join(code))
    except SyntaxError:
        return "text"
    return "python"


_ITEM = re.compile(r"( *)(?:-|\d+\.) ")
_SPECIAL = re.compile(r"(^ +\*{1,2}\w+:)|([*|\\]|_(?!\w)|(?<![^\s])\w\.$)", re.MULTILINE)


def _escaped(found: re.Match[str]) -> str:
    return found[1] or f"{found[2][:-1]}\\{found[2][-1]}"


def _prose(lines: Iterable[str]) -> list[str]:
    # Code marks may go over the end of a line.
    pieces = _CODE.split("\n".join(_with_room_around_lists(lines)))
    for place, piece in enumerate(pieces):
        if place % 2 == 0:
            pieces[place] = _SPECIAL.sub(_escaped, piece)
        else:
            name = piece[1:-1]
            mark = "`" if re.fullmatch(r"[A-Za-z_][\w.]*", name) else "``"
            after = pieces[place + 1][:1]
            pieces[place] = f"{mark}{name}{mark}" + ("\\ " if after.isalnum() else "")
    return "".join(pieces).split("\n")


def _with_room_around_lists(lines: Iterable[str]) -> Iterator[str]:
    """The lines with an empty one before and after each list."""
    indent = -1  # of the list
    for line in lines:
        item = _ITEM.match(line)
        starts = item is not None and len(item[1]) != indent
        ends = bool(line.strip()) and len(line) - len(line.lstrip()) <= indent and not item
        if starts or ends:
            yield ""
            indent = len(item[1]) if item else -1
        yield line


# Signatures and fields, as the source has them.


class Field(NamedTuple):
    """A field of a record."""

    name: str
    kind: str  # its type, as in the source
    default: str  # "" without
    comment: str  # the text beside or above it


def fields(cls: type) -> list[Field]:
    """The annotated fields of a class, with the comments of the source."""
    source = textwrap.dedent(inspect.getsource(cls))
    (node,) = ast.parse(source).body
    assert isinstance(node, ast.ClassDef)
    tokens = tokenize.generate_tokens(iter(source.splitlines(keepends=True)).__next__)
    comments = {t.start[0]: t for t in tokens if t.type == tokenize.COMMENT}
    alone = {n for n, t in comments.items() if t.line.strip() == t.string}

    def text(lines: Iterable[int]) -> str:
        return " ".join(comments[n].string.lstrip("# ") for n in lines)

    found = []
    for each in node.body:
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            end = each.end_lineno or each.lineno
            first = each.lineno
            while first - 1 in alone:
                first -= 1
            beside = [n for n in range(each.lineno, end + 1) if n in comments]
            comment = text([*range(first, each.lineno), *beside])
            default = ast.unparse(each.value) if each.value else ""
            found.append(Field(each.target.id, ast.unparse(each.annotation), default, comment))
    return [field for field in found if not field.name.startswith("_")]


def fields_as_rst(cls: type) -> list[str]:
    """A list of a record's fields: name, type, shape."""
    lines = []
    for field in fields(cls):
        kind = field.kind.replace("\\", "\\\\")
        default = f" = {field.default}" if field.default else ""
        comment = "\n".join(_prose([field.comment]))
        lines.append(f"- ``{field.name}: {kind}{default}``" + (f" — {comment}" if comment else ""))
    return ["", *lines, ""] if lines else []


def signature(obj: Any) -> tuple[str, str] | None:
    """The arguments and the result of a function as its source has them; None without a source."""
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(obj)))
        (node,) = ast.parse(source).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    if isinstance(node, ast.ClassDef):
        own = [f for f in node.body if isinstance(f, ast.FunctionDef) and f.name == "__init__"]
        if not own:
            each = [f"{field.name}{'=...' * bool(field.default)}" for field in fields(obj)]
            return (f"({', '.join(each)})", "") if each else None
        node = own[0]
        node.returns = None
    if not isinstance(node, ast.FunctionDef):
        return None
    arguments = node.args
    for named in (arguments.posonlyargs, arguments.args):
        if named and named[0].arg in ("self", "cls"):
            del named[0]
    return f"({ast.unparse(arguments)})", ast.unparse(node.returns) if node.returns else ""
