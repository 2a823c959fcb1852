"""The pages of docs/ and the site that `make docs` builds of them."""

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

import pytest

import fedjax_inv
from fedjax_inv import algorithms, fitting, types
from fedjax_inv.algorithms import fedipg
from tools import reference

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
TOP = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "BUILD_NOTES.md")]
PAGES = sorted(
    path
    for path in [*TOP, *DOCS.rglob("*.md"), *DOCS.rglob("*.ipynb")]
    if path.exists() and "tables" not in path.parts
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
    assert len(listed) == len(set(listed)) > 15
    pages = {path.with_suffix("") for path in PAGES} - {DOCS / "index"}
    assert pages <= set(listed)


def test_every_relative_link_has_a_target() -> None:
    assert not [link for path in PAGES for link in wrong_links(path, path.read_text())]


@pytest.mark.parametrize(
    ("text", "is_right"),
    [
        ("[a](map.md)", True),
        ("[a](../README.md) `[a](none.md)` [a](https://example.org)", True),
        ("[a](trust.md#run-folders-of-other-people)", True),
        ("[a](none.md)", False),
        ("[a](trust.md#none)", False),
        ('<img src="none.png" alt="a">', False),
    ],
)
def test_a_wrong_link_is_found(text: str, is_right: bool) -> None:
    assert (not wrong_links(DOCS / "trust.md", text)) == is_right


def test_every_picture_has_words() -> None:
    for path in PAGES:
        text = without_code(path.read_text())
        assert not re.findall(r"!\[\s*\]\([^)]*\)", text), path
        tags = re.findall(r"<img [^>]*>", text)
        assert all(re.search(r"alt=\\?\"\w", tag) for tag in tags), path
        if path.suffix == ".ipynb":
            cells = json.loads(path.read_text())["cells"]
            drawn = [each for each in cells if "plt.subplots(" in "".join(each["source"])]
            assert drawn
            assert all(each["metadata"]["mystnb"]["image"]["alt"] for each in drawn)


# The API reference.


def test_the_reference_has_every_public_module() -> None:
    pages = {page.module: page for page in reference.pages()}
    below = pages["fedjax_inv.algorithms"].pages
    assert {page.module.rpartition(".")[2] for page in below} == {*algorithms.LISTED}
    assert ("autofunction", "invariance", "") in {page.module: page for page in below}[
        "fedjax_inv.algorithms.fedipg"
    ].names
    every = [*pages.values(), *(page for each in pages.values() for page in each.pages)]
    assert not [page.module for page in every if not page.summary]
    assert not [page.module for page in every if not (page.names or page.pages)]
    modules = {f"fedjax_inv.{path.stem}" for path in (ROOT / "fedjax_inv").glob("[a-z]*.py")}
    assert modules < {*pages}
    names = [name for _, name, _ in pages["fedjax_inv.fitting"].names]
    assert names == ["fit", "Fitted", "History"]
    assert hasattr(fitting, names[1])
    assert ("py:data", "Tree", "Any") in pages["fedjax_inv.types"].names


@pytest.mark.slow
def test_pages_of_modules_that_are_gone_are_removed(tmp_path: Path) -> None:
    (tmp_path / "fedjax_inv.gone.rst").write_text("gone")
    reference.write(tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert "fedjax_inv.gone.rst" not in names
    assert {"contents.txt", "fedjax_inv.algorithms.fedipg.rst", "fedjax_inv.types.rst"} < names
    text = (tmp_path / "fedjax_inv.algorithms.rst").read_text()
    assert "   fedjax_inv.algorithms.fedipg\n" in text
    assert ".. automodule:: fedjax_inv.algorithms\n" in text


def test_a_docstring_has_no_other_marks_than_code() -> None:
    lines = """A `name`, `a b` and `Batch`es: w_ * |x| ends.

    w <- w + m * |A|

    x = f(1)
- one
  and more
- two
End.

Args:
  **settings: the * of all.

    not code
  w: w.""".splitlines()
    assert (
        "\n".join(reference.as_rst(lines)).strip()
        == """A `name`, ``a b`` and `Batch`\\ es: w\\_ \\* \\|x\\| ends.


.. code-block:: text

   w <- w + m * |A|

   x = f(1)


- one
  and more
- two

End.

Args:
  **settings: the \\* of all.

    not code
  w: w\\."""
    )


def test_shapes_stand_beside_fields() -> None:
    fields = {field.name: field for field in reference.fields(types.Model)}
    assert fields["mixable"].comment.startswith("Maps preprocessed inputs to inputs whose mean")
    assert fields["preprocess"].default == "as_stored"
    lines = reference.fields_as_rst(types.Federation)
    assert "- ``size: Array`` — [C] int32, examples of each client" in lines


def test_signatures_are_those_of_the_source() -> None:
    text, result = reference.signature(fedipg.half_masks) or ("", "")
    assert (text, result) == ("(mask: Array)", "tuple[Array, Array]")
    text, result = reference.signature(types.Federation) or ("", "")
    assert (text, result) == ("(data, order, start, size, who=...)", "")
    assert reference.signature(fedjax_inv.checks.UsageError) is not None
    assert reference.signature(len) is None


# The site.


class Html(HTMLParser):
    """What a page of the site loads, and to what it links."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path, self.loads, self.links = path, set[str](), set[str]()
        self.anchors, self.pictures = set[str](), list[dict[str, str | None]]()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Notes a tag."""
        values = dict(attrs)
        self.anchors |= {values.get("id") or "", (tag == "a" and values.get("name")) or ""}
        is_link = tag == "link" and values.get("rel") in ("canonical", "next", "prev")
        if tag == "a" or is_link:
            self.links.add(values.get("href") or "")
        else:
            self.loads |= {values.get(each) or "" for each in ("src", "href", "srcset", "data")}
        if tag == "img":
            self.pictures.append(values)


class Site(NamedTuple):
    """The built site."""

    folder: Path
    pages: dict[Path, Html]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    """The site, built as `make docs` does, where warnings are errors."""
    for package in ("sphinx", "myst_nb", "furo"):
        pytest.importorskip(package)
    folder = tmp_path_factory.mktemp("site")
    recipe = re.search(r"^docs:.*\n\t\$\(BIN\)/python (.*)$", (ROOT / "Makefile").read_text(), re.M)
    assert recipe is not None
    words = recipe[1].replace("build/doctrees", f"{folder}/trees").split()
    assert words[-1] == "build/docs"
    command = [sys.executable, *words[:-1], str(folder / "docs")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    paths = (folder / "docs").rglob("*.html")
    return Site(folder / "docs", {path.resolve(): Html(path.resolve()) for path in paths})


@pytest.mark.slow
def test_the_site_requests_nothing_of_another_host(site: Site) -> None:
    assert len(site.pages) > 80
    loads = {load for page in site.pages.values() for load in page.loads}
    assert not [load for load in loads if "//" in load]
    styles = [path.read_text() for path in site.folder.rglob("*.css")]
    assert len(styles) > 2
    assert not [
        each for style in styles for each in re.findall(r"(?:url\(|@import)[^;)]*//", style)
    ]


@pytest.mark.slow
def test_every_link_of_the_site_has_a_target(site: Site) -> None:
    wrong = []
    for path, page in site.pages.items():
        if path.relative_to(site.folder.resolve()).parts[0] == "_modules":
            continue  # the generator's pages of sources do not know where imported names stand
        for link in page.links | page.loads:
            file, _, anchor = unquote(link).partition("#")
            if re.match(r"[a-z]+:", link):
                continue
            target = (path.parent / file.partition("?")[0]).resolve() if file else path
            known = site.pages[target].anchors if target in site.pages else {""}
            if not target.exists() or anchor not in known | {""}:
                wrong.append(f"{path.relative_to(site.folder.resolve())}: {link}")
    assert not wrong


@pytest.mark.slow
def test_every_picture_of_the_site_has_words(site: Site) -> None:
    pictures = [(path.name, each) for path, page in site.pages.items() for each in page.pictures]
    assert len(pictures) > 10
    assert not [each for each in pictures if not re.search(r"\w \w", each[1].get("alt") or "")]


@pytest.mark.slow
def test_pages_are_not_empty_and_can_be_found(site: Site) -> None:
    for page in reference.pages():
        text = (site.folder / f"docs/reference/{page.module}.html").read_text()
        words = re.sub(r"(<[^>]*>|\W)+", " ", text)
        assert re.sub(r"\W+", " ", page.summary).strip() in words, page.module
    index = (site.folder / "searchindex.js").read_text()
    for page in PAGES:
        assert f'"{page.relative_to(ROOT).with_suffix("").as_posix()}"' in index
    assert '"fedjax_inv.fitting"' in index
