"""The pages of docs/: each is listed, and its links and pictures are there."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
TOP = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "BUILD_NOTES.md")]
PAGES = sorted(
    path
    for path in [*TOP, *DOCS.rglob("*.md"), *DOCS.rglob("*.ipynb")]
    if "tables" not in path.parts
)


def without_code(text: str) -> str:
    """The text of a page without blocks of code and code marks."""
    return re.sub(r"^```.*?^```$|`[^`\n]*`", "", text, flags=re.MULTILINE | re.DOTALL)


def headings(path: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site name them."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def wrong_links(path: Path, text: str) -> list[str]:
    """The relative links of a page without a target."""
    links = re.findall(r"\]\(([^)\s]+)\)|(?:src|href)=\\?\"([^\"\\]+)", without_code(text))
    wrong = []
    for link in (first or second for first, second in links):
        file, _, anchor = link.partition("#")
        target = path.parent / file if file else path
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        if not target.exists() or (anchor and anchor not in headings(target)):
            wrong.append(f"{path.relative_to(ROOT)}: {link}")
    return wrong


def test_every_page_is_in_the_contents() -> None:
    blocks = re.findall(r"```{toctree}\n(?::.*\n)*\n([^`]*)```", (DOCS / "index.md").read_text())
    entries = [re.sub(r".*<(.*)>", r"\1", line) for block in blocks for line in block.split("\n")]
    listed = [(DOCS / entry).resolve() for entry in entries if entry]
    assert {path.with_suffix("") for path in PAGES} - {DOCS / "index"} == set(listed)


def test_every_relative_link_has_a_target() -> None:
    assert not [link for path in PAGES for link in wrong_links(path, path.read_text())]


def test_every_picture_has_words() -> None:
    for path in PAGES:
        assert not re.findall(r"!\[\s*\]\([^)]*\)", without_code(path.read_text())), path
        for cell in json.loads(path.read_text())["cells"] if path.suffix == ".ipynb" else []:
            if "plt.subplots(" in "".join(cell["source"]):
                assert cell["metadata"]["mystnb"]["image"]["alt"]


def test_every_path_of_the_architecture_exists() -> None:
    marked = re.findall(r"`([\w./*-]+)`", (DOCS / "architecture.md").read_text())
    paths = {path for path in marked if "/" in path or path.endswith((".py", ".md"))}
    assert len(paths) > 20
    assert not [path for path in sorted(paths) if not (ROOT / path).exists()]


def test_formulas_have_no_command_that_mathml_lacks() -> None:
    converter = pytest.importorskip("latex2mathml.converter")
    for page in (ROOT / "docs").rglob("*.md"):
        text = without_code(page.read_text())
        for found in re.finditer(r"\$\$(.+?)\$\$|\$([^$\n]+?)\$", text, re.DOTALL):
            formula = found[1] or found[2]
            assert "\\" not in converter.convert(formula), (page.name, formula)


def test_no_command_is_a_paragraph_of_a_list() -> None:
    """Behind a list an indented line continues its last item, so text must stand between them."""
    for path in PAGES:
        text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
        item = re.search(r"^(?:- |\d+\. ).*\n(?: {2,}\S.*\n)*\n {4,}\S.*$", text, re.MULTILINE)
        assert not item, (path.name, item[0])
