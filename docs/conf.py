"""Settings of the site's generator, Sphinx; `make docs` builds the site from the root.

The sources are the pages of the repository as they lie, so relative links work here as they do
between the files. The API reference is generated: a page for each module, and one for a package
whose `__init__` imports its public names.
"""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx

from fedjax_inv import __version__

project = "fedjax_inv"
author = "The fedjax_inv authors"
release = version = __version__
html_title = f"fedjax_inv {version}"

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
root_doc = "docs/index"
include_patterns = ["docs/**", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "BUILD_NOTES.md"]
exclude_patterns = ["docs/results/tables/*.md", "docs/templates"]
templates_path = [str(Path(__file__).parent / "templates")]

myst_heading_anchors = 4
myst_enable_extensions = ["dollarmath", "html_image"]
smartquotes_action = "D"  # dashes alone
# Notebooks are run anew at each build, because the code may have changed. They write nothing here.
nb_execution_mode = "force"
nb_execution_in_temp = True
nb_execution_raise_on_error = True
nb_execution_timeout = 300
nb_merge_streams = True

default_role = "py:obj"
suppress_warnings = ["ref.python"]  # a short name may be that of several objects
autosummary_ignore_module_all = False
autodoc_mock_imports = ["flwr"]  # not among the versions of requirements/
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
add_module_names = False
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
napoleon_numpy_docstring = False
viewcode_line_numbers = True

html_theme = "furo"
html_math_renderer = "mathml"  # which browsers draw by themselves, without a network
html_static_path = ["static"]
html_css_files = ["site.css"]
html_extra_path = ["extra"]  # the first page lies in docs/
html_domain_indices = html_copy_source = False
html_show_sphinx = html_show_copyright = False
html_theme_options = {"navigation_with_keys": True}

_SECTION = re.compile(r"(Args|Returns|Raises|Yields):$")
_ITEM = re.compile(r"( *)(?:-|\d+\.) ")
_MARKS = re.compile(
    r"^\0(?P<block>.*)$|`(?P<code>[^`]+)`"
    r"|^ +\*{1,2}\w+:|(?P<special>[*|\\]|_(?!\w)|(?<!\S)\w\.$)",
    re.MULTILINE,
)


def _as_rst(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Makes a docstring reStructuredText, before the extension for Google's sections reads it.

    Docstrings are plain text: only code marks, lists, sections and indented blocks have a meaning.
    """

    def escaped(found: re.Match[str]) -> str:
        if found["block"] is not None:
            return found["block"]
        if found["code"]:
            mark = "`" if re.fullmatch(r"[A-Za-z_][\w.]*", found["code"]) else "``"
            is_word = found.string[found.end() :][:1].isalnum()
            return f"{mark}{found['code']}{mark}" + "\\ " * is_word
        special = found["special"]
        return f"{special[:-1]}\\{special[-1]}" if special else found[0]

    lines[:] = _MARKS.sub(escaped, "\n".join(_with_blocks(lines))).split("\n")


def _with_blocks(lines: list[str]) -> Iterator[str]:
    """The lines with room around lists and blocks; the lines of a block begin with a zero."""
    in_block = in_section = False
    indent, last = -1, ""  # of the list
    for line in lines:
        in_section = in_section or bool(_SECTION.match(line))
        if line.strip():
            was, is_inside = in_block, line.startswith("    ") and (in_block or not last)
            in_block = not in_section and (line.startswith("|") or is_inside)
            if in_block != was:
                yield from ["", "::", ""] if in_block else [""]
        last = line
        if in_block:
            yield f"\0    {line}" if line else ""
            continue
        item = _ITEM.match(line)
        ends = bool(line.strip()) and len(line) - len(line.lstrip()) <= indent and not item
        if ends or (item and len(item[1]) != indent):
            yield ""
            indent = len(item[1]) if item else -1
        yield line


def _with_fields(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Shows the fields of a record as its source has them, with their shapes."""
    if what != "class" or not getattr(obj, "__annotations__", None):
        return
    source = textwrap.dedent(inspect.getsource(obj)).split("\n")
    (tree,) = ast.parse("\n".join(source)).body
    assert isinstance(tree, ast.ClassDef)
    ends = [each.end_lineno or 0 for each in tree.body if isinstance(each, ast.AnnAssign)]
    docstring = tree.body[0].end_lineno if ast.get_docstring(tree) else tree.lineno
    fields = [line for line in source[docstring : max(ends)] if not line.startswith("    _")]
    lines += ["", ".. code-block:: python", "", *fields, ""]


def _skip(app: Sphinx, what: str, name: str, obj: Any, skip: bool, options: Any) -> bool | None:
    """Leaves out the fields of records, which are shown with their class, and classes of JAX."""
    is_field = type(obj).__name__ in ("_tuplegetter", "member_descriptor")
    return True if is_field or getattr(obj, "__module__", "") == "jax.sharding" else None


def _tables_as_files(app: Sphinx, name: str, source: list[str]) -> None:
    """Links published tables as files, since they are no pages of the site."""
    source[0] = re.sub(r"\[([^]]+)\]\((\S*tables/\w+\.md)\)", r"{download}`\1 <\2>`", source[0])


def _formula(translator: Any, node: nodes.math) -> None:
    """Writes a formula in a line as MathML."""
    translator.body.append(convert(node.astext()))
    raise nodes.SkipNode


def _display(translator: Any, node: nodes.math_block) -> None:
    """Writes a formula of its own line as MathML."""
    translator.body.append(f'<div class="math">{convert(node.astext(), display="block")}</div>')
    raise nodes.SkipNode


def setup(app: Sphinx) -> None:
    """Connects the functions of this file."""
    app.add_html_math_renderer("mathml", (_formula, None), (_display, None))
    app.connect("source-read", _tables_as_files)
    app.connect("autodoc-process-docstring", _as_rst, priority=400)
    app.connect("autodoc-process-docstring", _with_fields, priority=600)
    app.connect("autodoc-skip-member", _skip)
