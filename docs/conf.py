"""Settings of the site's generator, Sphinx; `make docs` builds the site from the root.

The sources are the pages of the repository as they lie, so relative links work here as they do
between the files.
"""

import re
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx

from fedjax_inv import __version__
from tools import reference

ROOT = Path(__file__).parents[1]

project = "fedjax_inv"
author = "The fedjax_inv authors"
release = version = __version__
html_title = f"fedjax_inv {version}"

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
root_doc = "docs/index"
include_patterns = ["docs/**", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "BUILD_NOTES.md"]
exclude_patterns = [
    "**/.*",
    ".*",
    "build",
    "dist",
    "runs",
    "fedjax_inv*",
    "experiments",
    "benchmarks",
    "examples",
    "requirements",
    "tests",
    "tools",
    "docs/results/tables/*.md",
]
nitpicky = True

myst_heading_anchors = 4
myst_enable_extensions = ["html_image"]
smartquotes_action = "D"  # dashes alone
# Notebooks are run anew at each build, because the code may have changed. They write nothing here.
nb_execution_mode = "force"
nb_execution_in_temp = True
nb_execution_raise_on_error = True
nb_execution_timeout = 300
nb_merge_streams = True

default_role = "py:obj"
autodoc_member_order = "bysource"
add_module_names = False
autodoc_class_signature = "mixed"
napoleon_numpy_docstring = False
python_maximum_signature_line_length = 88
viewcode_line_numbers = True

html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_extra_path = ["extra"]  # the first page lies in docs/
html_domain_indices = html_copy_source = False
html_show_sphinx = html_show_copyright = False
html_theme_options = {"navigation_with_keys": True}


def _first_page(app: Sphinx, docname: str, content: list[str]) -> None:
    """Puts README's first part, up to the list of pages, on the first page."""
    if docname == root_doc:
        readme = (ROOT / "README.md").read_text(encoding="utf-8").partition("\n")[2]
        part = readme.partition("\n## Where to go next\n")[0]
        part = re.sub(r'<img src="(.*?)" alt="(.*?)".*?>', r"![\2](\1)", part)  # of any width
        part = re.sub(r"""(\]\()(?!https?:|#)""", r"\1../", part)
        part = part.replace("../docs/", "").replace("[docs/", "[")
        content[0] = re.sub("<!-- The site shows .*-->", lambda _: part, content[0])


def _plain(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Makes a docstring reStructuredText, before the extension for Google's sections reads it."""
    lines[:] = reference.as_rst(lines)


def _with_fields(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    if what == "class" and isinstance(obj, type):
        lines.extend(reference.fields_as_rst(obj))


def _signature(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, arguments: Any, result: Any
) -> tuple[str, str] | None:
    return (
        reference.signature(obj) if what in ("function", "method", "class", "exception") else None
    )


def _skip(app: Sphinx, what: str, name: str, obj: Any, skip: bool, options: Any) -> bool | None:
    """Leaves out the fields of records, which stand in a list of their own."""
    return True if type(obj).__name__ in ("_tuplegetter", "member_descriptor") else None


def _keep_spreads(app: Sphinx, doctree: nodes.document) -> None:
    """Keeps a mean and its spread, such as 1.0 ± 0.1, on one line of a table's cell."""
    for cell in doctree.findall(nodes.entry):
        for text in list(cell.findall(nodes.Text)):
            if " ± " in text:
                text.parent.replace(
                    text, nodes.Text(text.replace(" ± ", "\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}"))
                )


def _name_fully(app: Sphinx, doctree: nodes.document) -> None:
    """Replaces each name of the code by the name of the object that it is in its module."""
    for node in doctree.findall(addnodes.pending_xref):
        if node.get("refdomain") == "py":
            node.attributes.pop("refspecific", None)  # it asks for any name that ends so
            found: Any = sys.modules.get(node.get("py:module") or "")
            for part in node["reftarget"].split("."):
                found = getattr(found, part, None)
            if (getattr(found, "__module__", None) or "").startswith("fedjax_inv."):
                node["reftarget"] = f"{found.__module__}.{found.__qualname__}"


def _find(app: Sphinx, env: Any, node: Any, contnode: nodes.Element) -> nodes.Element | None:
    """Links a name of the code if exactly one object has it; else it stays as it is."""
    if node.get("refdomain") != "py":
        return None
    objects = {
        name: entry
        for name, entry in env.domains["py"].objects.items()
        if not entry.aliased and name.endswith(f".{node['reftarget']}")
    }
    if len(objects) != 1:
        return contnode
    ((name, entry),) = objects.items()
    page = app.builder.get_relative_uri(node["refdoc"], entry.docname)
    uri = f"{page}#{entry.node_id}"
    return nodes.reference("", "", contnode, internal=True, refuri=uri, reftitle=name)


def _link_files(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Makes links to files of the repository links to pages that show these files."""
    for node in list(doctree.findall(addnodes.download_reference)):
        if node.get("filename"):
            path = _repository_path(app.env.relfn2path(node["reftarget"], docname)[1])
            uri = app.builder.get_relative_uri(docname, f"files/{path}")
            link = nodes.reference("", "", *node.children, internal=True, refuri=uri)
            node.replace_self(link)


def _repository_path(path: str | Path) -> str:
    return Path(path).resolve().relative_to(ROOT.resolve()).as_posix()


def _file_pages(app: Sphinx) -> Any:
    """The pages that show files of the repository to which a page links."""
    for name in app.env.dlfiles:
        path = Path(app.srcdir, name).resolve()
        shown = _repository_path(path)
        language = {".py": "python", ".sh": "bash", ".toml": "toml", ".yml": "yaml"}.get(
            path.suffix, "text"
        )
        code = app.builder.highlighter.highlight_block(path.read_text("utf-8"), language)
        yield (f"files/{shown}", {"title": shown, "body": f"<h1>{shown}</h1>\n{code}"}, "page.html")


def setup(app: Sphinx) -> None:
    """Connects the functions of this file."""
    app.connect("builder-inited", lambda app: reference.write(Path(__file__).parent / "reference"))
    app.connect("source-read", _first_page)
    app.connect("autodoc-process-docstring", _plain, priority=400)
    app.connect("autodoc-process-docstring", _with_fields, priority=600)
    app.connect("autodoc-process-signature", _signature)
    app.connect("autodoc-skip-member", _skip)
    app.connect("doctree-read", _name_fully)
    app.connect("doctree-read", _keep_spreads)
    app.connect("missing-reference", _find)
    app.connect("doctree-resolved", _link_files)
    app.connect("html-collect-pages", _file_pages)
