"""The tables and figures of README and docs/results, which are files that studies wrote.

python -m tools.results
python -m tools.results --publish=runs/fedipg/colored_digits/colours.md

A page names a file of docs/results/tables/ in a comment, and another comment ends the block:

    <!-- table: docs/results/tables/fedipg_colored_digits_colours.md -->
    <!-- end -->

    <!-- figure: docs/results/tables/fedipg_colored_digits_colours_by_round.png By round -->
    <!-- end -->

Between the two this command writes the file's first table (`table 2:` names the second) or the
picture (`figure 480:` shows it 480 pixels wide) with the text behind its path, and how it came
about. It lists the files that are older than
the code on which they depend, by digests of that code, and every number and table of the pages that
is in no file.

--publish copies tables (.md, .csv) and pictures (.png) of a study's run folder to
docs/results/tables/ as PAPER_DATA_STUDY, each with a record: FILE.json. Pictures of `explain` need
a --name. A page shows them after its comments are written.
`tools/gallery.py` fills the pages' comments `<!-- gallery: FILE ... -->` from .csv files.
"""

import dataclasses
import hashlib
import html
import os
import re
import shlex
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from fedjax_inv.checks import UsageError
from fedjax_inv_experiments.flags import command
from fedjax_inv_experiments.flags.flag import flag, flag_error
from fedjax_inv_experiments.papers import LISTED, study
from fedjax_inv_experiments.reporting.comparison import BEST
from fedjax_inv_experiments.running import files, records, sources
from fedjax_inv_experiments.running.records import Origin

ROOT = Path(__file__).parents[1]
TABLES = Path("docs/results/tables")


@dataclasses.dataclass(frozen=True)
class Options:
    """The flags of this command."""

    publish: tuple[str, ...] = flag((), "Tables and pictures of a study's run folder.", kind=str)
    name: str = flag("", "The name of the published study; default: PAPER_DATA_STUDY.")


_BLOCK = re.compile(
    r"^(?P<indent> *)<!-- (?P<kind>table|figure)(?: (?P<number>\d+))?: (?P<file>\S+)"
    r"(?: (?P<text>[^\n]*))? -->\n(?P<shown>.*?)^ *<!-- end -->$",
    re.MULTILINE | re.DOTALL,
)
_TABLE = re.compile(r"^ *\|.*\|\n *\|[-:| ]+\|\n(?: *\|.*\|(?:\n|\Z))*", re.MULTILINE)
_PICTURE = re.compile(r"!\[[^\]]*\]\([^)]*\)")
_SPREAD = re.compile(r"(?<![\d.,])\d[\d,]*(?:\.\d+)? ± \d+(?:\.\d+)?")
_DECIMAL = re.compile(r"(?<![\w.,])[1-9]\d*\.\d(?!\w|\.\d)")


class Page(NamedTuple):
    """A page and the folder of the repository in which it lies."""

    path: Path
    text: str
    root: Path


def pages(root: Path = ROOT) -> list[Page]:
    """README, the map and the pages of docs/results."""
    results = sorted((root / "docs/results").glob("*.md"))
    paths = [root / "README.md", *(root / "docs").glob("map.md"), *results]
    return [Page(path, path.read_text(encoding="utf-8"), root) for path in paths]


def record_of(path: Path) -> Origin:
    """The record of a published file."""
    return records.read(path.with_name(f"{path.name}.json"), Origin, "publish it again")


def caption(record: Origin) -> str:
    """How a table or picture came about, in a sentence without the command."""
    seeds = [str(seed) for seed in record.seeds]
    parts = [
        record.note or "",
        f"version {record.versions['fedjax_inv']}" if not record.note else "",
        f"commit {record.commit[:7]}{'-dirty' * record.commit.endswith('-dirty')}"
        if record.commit
        else "",
        f"seed{'s' * (len(seeds) > 1)} {', '.join(seeds)}" if seeds else "",
        record.date or "",
        record.processor or "",
        f"{record.seconds:.0f} s of training" if record.seconds else "",
        f"the first {again.rounds} rounds are the same"
        f"{f' to {again.rounding:g}' if again.rounding else ''} with version {again.version}"
        if (again := record.repeated)
        else "",
    ]
    text = "; ".join(part for part in parts if part)
    return text[:1].upper() + text[1:]


def shown(page: Page, block: re.Match[str]) -> str:
    """The text that a page must show in a block. Raises UsageError if the file is not there."""
    path = page.root / block["file"]
    if not path.is_file():
        raise UsageError(block["file"], ..., "is no file")
    record = record_of(path)
    if block["kind"] == "figure":
        link = os.path.relpath(path, page.path.parent)
        made_by = record.command.replace("\n", "; ")
        picture = _picture(link, block["text"] or "Figure", block["number"])
        lines = [picture, "", f"{caption(record)}: `{made_by}`"]
    else:
        lines = [*_table(path, int(block["number"] or 1)), "", f"{caption(record)}:", ""]
        lines += [f"    {line}" for line in record.command.split("\n")]
    return "\n".join(block["indent"] + line if line else "" for line in ["", *lines, "", ""])


def folded(words: Sequence[str]) -> str:
    """A command in lines of at most 100 characters, as far as its words allow."""
    lines = [words[0]]
    for word in words[1:]:
        if len(lines[-1]) + len(word) > 97:
            lines[-1] += " \\"
            lines.append(f"        {word}")
        else:
            lines[-1] += f" {word}"
    return "\n".join(lines)


def _picture(link: str, text: str, width: str | None) -> str:
    """A picture in Markdown, or in HTML, which alone knows a width in pixels."""
    if width is None:
        return f"![{text}]({link})"
    return f'<img src="{link}" alt="{html.escape(text)}" width="{width}">'


def _table(path: Path, number: int) -> list[str]:
    """The lines of a file's table, and the text behind it that explains its marks."""
    text = path.read_text(encoding="utf-8")
    tables = [*_TABLE.finditer(text)]
    if number > len(tables):
        raise UsageError(str(path), ..., f"has no table {number}")
    found = tables[number - 1]
    has_marks = text[found.end() :].lstrip().startswith(BEST)
    return [*found[0].rstrip("\n").split("\n"), *(["", BEST] if has_marks else [])]


def written(page: Page) -> str:
    """The text of a page with all blocks as their files have them."""

    def block_of(block: re.Match[str]) -> str:
        if "<!-- table" in block["shown"] or "<!-- figure" in block["shown"]:
            raise UsageError(block["file"], ..., "its block lacks the comment <!-- end -->")
        head, end = block[0].split("\n", 1)[0], f"{block['indent']}<!-- end -->"
        return f"{head}\n{shown(page, block)}{end}"

    return _BLOCK.sub(block_of, page.text)


def prose(text: str) -> str:
    """The text of a page without blocks, tables, code, comments and the addresses of links."""
    for pattern in (
        _BLOCK,
        re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL),
        re.compile(
            r"^ {4,}(?:fedjax-inv|make|\.venv|pip|python) .*(?:(?<=\\)\n.*)*$", re.MULTILINE
        ),
        re.compile(r"`[^`]*`"),
        re.compile(r"<!--.*?-->", re.DOTALL),
        re.compile(r"(?<=\])\([^)]*\)"),
        _TABLE,
    ):
        text = pattern.sub(" ", text)
    return text


def numbers(text: str) -> set[str]:
    """The numbers that repeat a table: with a spread, or with one decimal and at least 1."""
    text = re.sub(r"[*\s]+", " ", text)
    spreads = {re.sub(",", "", each) for each in _SPREAD.findall(text)}
    return spreads | {*_DECIMAL.findall(_SPREAD.sub(" ", text))}


def _in_files(page: Page) -> set[str]:
    """The numbers in the files that a page shows, and those that papers print."""
    texts = [
        (page.root / block["file"]).read_text(encoding="utf-8")
        for block in _BLOCK.finditer(page.text)
        if block["file"].endswith(".md")
    ]
    printed = [each.value.replace("±", " ± ") for name in LISTED for each in study.printed(name)]
    found = numbers(" | ".join([*texts, *printed]))
    return found | {part for each in found for part in each.split(" ± ")}


def faults(page: Page) -> list[str]:
    """What is wrong with a page: old blocks, and tables, pictures and numbers in no file."""
    name = page.path.relative_to(page.root)
    try:
        is_old = written(page) != page.text
        known = _in_files(page)
    except (UsageError, OSError) as error:
        return [f"{name}: {error}"]
    outside = _BLOCK.sub("", page.text)
    is_result = "results" in name.parts  # README has other tables, too
    loose = [
        found[0].split("\n", 1)[0].strip()
        for found in _TABLE.finditer(outside)
        if is_result or numbers(found[0])
    ]
    return [
        *([f"{name}: a table or figure is not as its file; run make results"] if is_old else []),
        *([f"{name}: a block has no end"] if re.search("<!-- (table|figure|end)", outside) else []),
        *(f"{name}: a table is in no file: {head[:60]}" for head in loose),
        *(f"{name}: a figure has no record: {link}" for link in _PICTURE.findall(outside)),
        *(
            f"{name}: no table that it shows has {n}"
            for n in sorted(numbers(prose(page.text)) - known)
        ),
    ]


def published(root: Path = ROOT) -> list[Path]:
    """The files of docs/results/tables, without their records."""
    return sorted(path for path in (root / TABLES).iterdir() if path.suffix != ".json")


def faults_of_files(root: Path = ROOT) -> list[str]:
    """What is wrong with published files: no record, another digest, or on no page."""
    named = {block["file"] for page in pages(root) for block in _BLOCK.finditer(page.text)}
    for path in (root / "docs").glob("*.md"):
        named |= {*re.findall(r"<!-- gallery: (\S+)", path.read_text(encoding="utf-8"))}
    found = []
    for path in published(root):
        name = path.relative_to(root).as_posix()
        if not path.with_name(f"{path.name}.json").exists():
            found.append(f"{name}: has no record")
        elif record_of(path).sha256 != _digest(path):
            found.append(f"{name}: is not as it was published")
        if name not in named:
            found.append(f"{name}: no page shows it")
    return found


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def changed(record: Origin, root: Path = ROOT) -> list[str]:
    """The files on which a table depends that are not as they were.

    They are as they were when its first rounds were repeated last, if they were repeated.
    """
    code = record.repeated.code if record.repeated else record.code
    now = sources.of_files(root / name for name in code if (root / name).exists())
    return [name for name, digest in code.items() if now.get(name) != digest]


_OWN = (
    *("fedjax_inv/algorithms/", "fedjax_inv/data/"),
    *("explain.py", "papers/", "shift_map/", "experiment/presets/", "parts/environments/"),
)
_AGES = (
    "{} of {} tables and figures are of runs without a record of their code:",
    "{} of {} are older than their algorithms, data or study:",
    "{} of {} are older than other parts of the library, such as rounds, networks and devices:",
)


def age(record: Origin) -> tuple[int, str]:
    """Which sentence of the report lists a table, and why it is older than the code.

    The reason is "" for a table that is not older.
    """
    if not record.code:
        return 0, record.note or "no record of its code"
    files = changed(record)
    # The rest of the library changes more often than results do: most of its changes keep all bits.
    own = [n for n in files if n.removeprefix("fedjax_inv_experiments/").startswith(_OWN)]
    return (1 if own else 2), f"changed since: {', '.join(own or files)}" if files else ""


def report_old(root: Path = ROOT) -> str:
    """The files that are older than the code on which they depend, by their commands."""
    each = {path.name: record_of(path) for path in published(root)}
    ages = {name: age(record) for name, record in each.items()}
    texts = []
    for index, sentence in enumerate(_AGES):
        old = {name: why for name, (kind, why) in ages.items() if why and kind == index}
        lines = [sentence.format(len(old), len(each))]
        for text in dict.fromkeys(each[name].command for name in old):
            names = [name for name in old if each[name].command == text]
            lines += [
                "",
                *(f"{name}: {old[name]}" for name in names),
                textwrap.indent(text, "    "),
            ]
        texts += ["\n".join(lines)] if old else []
    return "\n\n".join(texts) or "No table or figure is older than the code."


def publish(path: Path, name: str, root: Path = ROOT) -> Path:
    """Copies a table or a picture of a run folder; returns the new file.

    Arguments and errors as those of `_target`.
    """
    target, record = _target(path, name, root)
    with files.replacing(target) as file:
        file.write(path.read_bytes())
    record = msgspec.structs.replace(record, sha256=_digest(target))
    files.write_json(target.with_name(f"{target.name}.json"), record)
    return target


def publish_all(paths: Sequence[Path], name: str, root: Path = ROOT) -> list[Path]:
    """Publishes several files as `publish` does; raises UsageError if two would be one file."""
    targets = [_target(path, name, root)[0] for path in paths]
    for index, target in enumerate(targets):
        if target in targets[:index]:
            first, path = paths[targets.index(target)], paths[index]
            text = f"would replace {first}, as both are published as {target.name}"
            raise flag_error("publish", path, text)
    return [publish(path, name, root) for path in paths]


def _target(path: Path, name: str, root: Path) -> tuple[Path, Origin]:
    """Where a table or a picture of a run folder is published, and its record.

    name: the study's name among the published files; "" for PAPER_DATA_STUDY.

    Raises UsageError for a file without its record or its study's beside it, and for a picture of
    no study without a name.
    """
    if path.suffix not in (".md", ".png", ".csv") or not path.is_file():
        raise flag_error(
            "publish", path, "must be a table (.md, .csv) or a picture (.png) of a study"
        )
    own = path.with_name(f"{path.name}.json")
    if own.exists():
        record, stem = records.read(own, Origin, "draw the picture again"), path.stem
        if not name:
            raise flag_error("name", name, "must be given for a picture of no study")
    else:
        record, stem = _of_study(path)
        words = shlex.split(record.command)
        paper = words[2] if words[1] == "paper" else words[1]
        name = name or f"{paper}_{path.parent.name}_{stem}"
    return root / TABLES / f"{name}{path.stem.removeprefix(stem)}{path.suffix}", record


def _of_study(path: Path) -> tuple[Origin, str]:
    """The record of the study that wrote a file, and the study's name."""
    beside = [each for each in path.parent.glob("*.json") if path.stem.startswith(each.stem)]
    beside = [each for each in beside if each.stem != "result"]
    if not beside:
        raise flag_error("publish", path, "must lie beside the record of its study, STUDY.json")
    of_study = max(beside, key=lambda each: len(each.stem))
    return records.read(of_study, Origin, "run the study again"), of_study.stem


def run(options: Options) -> str:
    """Publishes files, writes the blocks of all pages, and returns the report on all files."""
    new = publish_all([*map(Path, options.publish)], options.name)
    lines = [f"Published: {path.relative_to(ROOT)}." for path in new]
    for page in pages():
        text = written(page)
        if text != page.text:
            files.write(page.path, text)
            lines.append(f"Written: {page.path.relative_to(ROOT)}.")
    found: Sequence[str] = [fault for page in pages() for fault in faults(page)]
    return "\n".join([*lines, "", report_old(), "", *found, *faults_of_files()])


BINARY = command.of(run, Options, __doc__)

if __name__ == "__main__":
    command.main(BINARY)
