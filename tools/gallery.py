"""The gallery of algorithms: what docs/algorithms.md says of each one by the code and the map.

python -m tools.gallery

The page names a map's csv file and an algorithm in a comment, and another comment ends the block:

    <!-- gallery: docs/results/tables/map_digits.csv fedprox -->
    <!-- end -->

Between the two this command writes the formula (of the head of the algorithm's file), a setting to
start with and its command, the words of the map and pictures of its rows, which it draws into
docs/pictures/algorithms/. In the block `overview` it writes the table of all algorithms; family,
uploads and compute are the page's own words, and bytes are counted by `fedjax_inv.communication`.
In the block `record` it writes how the map came about.
"""

import dataclasses
import functools
import importlib
import inspect
import itertools
import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from fedjax_inv import algorithms, communication, rounds, tree
from fedjax_inv.checks import UsageError
from fedjax_inv.data import federation
from fedjax_inv_experiments.experiment import assemble, command_line
from fedjax_inv_experiments.flags import command
from fedjax_inv_experiments.parts import network
from fedjax_inv_experiments.parts.training import Clients, Sizes
from fedjax_inv_experiments.reporting import comparison, tables
from fedjax_inv_experiments.running import files
from fedjax_inv_experiments.running.records import Origin
from fedjax_inv_experiments.shift_map import methods, verdicts
from fedjax_inv_experiments.shift_map.columns import LISTED as SHIFTS
from fedjax_inv_experiments.shift_map.methods import FEDAVG, Method
from fedjax_inv_experiments.shift_map.table import DATA, read_cells
from tools import results
from tools.map_strip import PERCENT, POINTS, Point, strip

ROOT = results.ROOT
PAGE = Path("docs/algorithms.md")
PICTURES = Path("docs/pictures/algorithms")
OVERVIEW = "overview"
RECORD = "record"
LEFT_OUT = {  # algorithms that are no row of the map
    "fedbn": Method("fedbn", settings=("--norm=batch",)),
    "ditto": Method("ditto", "proximal"),
}
_PRESET = f"--preset={DATA['digits'].preset}"

_BLOCK = re.compile(
    r"^<!-- gallery: (?P<file>\S+) (?P<name>\S+) -->\n(?P<shown>.*?)^<!-- end -->$",
    re.MULTILINE | re.DOTALL,
)
_FAMILY = re.compile(r"^## (?P<family>.+)$", re.MULTILINE)
_SECTION = re.compile(r"^### (?P<title>.+)$", re.MULTILINE)
_SENDS = re.compile(r"^- \*\*Clients send\*\*: (.+)\.$", re.MULTILINE)
_COMPUTE = re.compile(r"^- \*\*Extra compute\*\*: (.+)\.$", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Options:
    """This command has no flags."""


Line = Mapping[str, str]  # a line of map.csv


class Section(NamedTuple):
    """What the page says of an algorithm outside of its block."""

    name: str
    title: str
    family: str
    sends: str
    compute: str


class Cost(NamedTuple):
    """The bytes of an algorithm, for the network of the map."""

    traffic: tuple[communication.Traffic, ...]  # of a client in each exchange of a round
    client: int  # that a client keeps
    server: int  # that the server keeps beside the network
    network: int  # of the network


# The page.


def sections(text: str) -> list[Section]:
    """The algorithms of the page. Raises UsageError for a section that lacks a part."""
    found = []
    for block in _BLOCK.finditer(text):
        if block["name"] in (OVERVIEW, RECORD):
            continue
        before = text[: block.start()]
        family, title = (
            [each[1] for each in pattern.finditer(before)][-1:] for pattern in (_FAMILY, _SECTION)
        )
        own = before[before.rfind("\n### ") :]
        sends, compute = _SENDS.search(own), _COMPUTE.search(own)
        if not (family and title and sends and compute):
            must = (
                "must have a family, a title, `Clients send` and `Extra compute` before its block"
            )
            raise UsageError(block["name"], ..., must)
        found.append(Section(block["name"], title[0], family[0], sends[1], compute[1]))
    return found


def written(text: str, root: Path = ROOT, *, has_overview: bool = True) -> str:
    """The text of the page with all blocks as the code and the map have them.

    has_overview: whether to write the table of all algorithms, which takes some seconds.
    """

    def block_of(block: re.Match[str]) -> str:
        if "<!-- gallery" in block["shown"]:
            raise UsageError(block["name"], ..., "its block lacks the comment <!-- end -->")
        if block["name"] == OVERVIEW:
            if not has_overview:
                return block[0]
            shown = overview(sections(text))
        elif block["name"] == RECORD:
            shown = _words_of(results.record_of(root / block["file"]))
        else:
            shown = section(block["name"], read_cells(root / block["file"]))
        return f"{block[0].split(chr(10), 1)[0]}\n\n{shown}\n\n<!-- end -->"

    return _BLOCK.sub(block_of, text)


def section(name: str, lines: Sequence[Line]) -> str:
    """The block of an algorithm. lines: of the map's csv file."""
    rows = rows_of(name)
    own = {row: [line for line in lines if line["method"] == row] for row in rows}
    parts = [formula(name), _start(rows, own)]
    if name in LEFT_OUT:
        return "\n\n".join([*parts, f"**Map**: {_why_left_out(name)}"])
    for row, of in own.items():
        if not of:
            parts.append(f"**Map**, row `{row}`: not in this map.")
            continue
        link = os.path.relpath(PICTURES / f"{row}.svg", PAGE.parent)
        parts += [f"![{_description(row, of)}]({link})", f"**Map**, row `{row}`: {words(row, of)}"]
    return "\n\n".join(parts)


def rows_of(name: str) -> dict[str, Method]:
    """The rows of the map with an algorithm, or the one that `LEFT_OUT` has for it."""
    rows = {row: of for row, of in methods.LISTED.items() if of.algorithm == name}
    return rows or {name: LEFT_OUT[name]}


def formula(name: str) -> str:
    """The indented lines of the head of an algorithm's file, as a block of code."""
    head = inspect.getdoc(_module(name)) or ""
    groups = [list(of) for is_code, of in itertools.groupby(head.split("\n"), _is_code) if is_code]
    text = "\n".join(line.strip("\n") for group in groups for line in group)
    return f"```text\n{inspect.cleandoc(text)}\n```"


def _is_code(line: str) -> bool:
    return line.startswith("    ")


def _module(name: str) -> Any:
    return importlib.import_module(f"{algorithms.__name__}.{name}")


def _why_left_out(name: str) -> str:
    if name == "ditto":
        return "left out, as its global network is FedAvg's."
    return "left out, as it needs a network with normalisation layers, which the map's lacks."


def _start(rows: Mapping[str, Method], own: Mapping[str, Sequence[Line]]) -> str:
    """A setting to start with, and its command, for each row of the map."""
    parts = []
    for row, method in rows.items():
        chosen, times = _most_frequent(own[row])
        text = f"**Start with** the defaults ({_default(method)})"
        if times:
            text = (
                f"**Start with** what validation chose in {times} of {len(own[row])} kinds of shift"
                f" (tried: {_grid(method)}; {_default(method)})"
            )
        named = f", in row `{row}`" if len(rows) > 1 else ""
        words = ["    .venv/bin/fedjax-inv", "train", *train_flags(method, chosen)]
        parts.append(f"{text}{named}:\n\n{results.folded(words)}")
    return "\n\n".join(parts)


def _grid(method: Method) -> str:
    """The values among which the map chose."""
    rates = methods.FEW_RATES if method.hyper else methods.RATES
    text = f"`learning_rate` {', '.join(f'{(1 - method.momentum) * rate:g}' for rate in rates)}"
    own = ", ".join(f"{value:g}" for value in method.values)
    return f"{text}; `{method.hyper}` {own}" if method.hyper else text


def _default(method: Method) -> str:
    """The defaults of a row's hyperparameters."""
    if not method.hyper:
        return f"default `learning_rate` {Clients.learning_rate[0]:g}"
    arguments = inspect.signature(getattr(_module(method.algorithm), method.algorithm)).parameters
    default = arguments[method.hyper].default
    text = "from the number of clients" if default is None else f"{default:g}"
    return f"default `{method.hyper}` {text}"


def _most_frequent(lines: Sequence[Line]) -> tuple[dict[str, str], int]:
    """(the setting that was chosen most often, how often); of equals the first one."""
    settings = Counter(line["setting"] for line in lines if line["setting"])
    if not settings:
        return {}, 0
    (text, times), *_ = settings.most_common(1)
    return dict(part.split("=") for part in text.split(", ")), times


def train_flags(method: Method, chosen: Mapping[str, str]) -> list[str]:
    """The flags of `train` for one setting of a row of the map; {}: the defaults."""
    rounds, batch, clients = _terms()
    grids = ("--learning_rate=", f"--set={method.hyper}=")
    flags = [f for f in method.flags(rounds, batch * clients) if not f.startswith(grids)]
    rate = [f"--learning_rate={chosen['learning_rate']}"] if "learning_rate" in chosen else []
    own = [f"--set={name}={value}" for name, value in chosen.items() if name != "learning_rate"]
    return [_PRESET, flags[0], *rate, *own, *flags[1:]]


@functools.cache
def _terms() -> tuple[int, int, int]:
    config = command_line.of_arguments([_PRESET])
    return config.run.rounds, config.clients.batch_size, config.partition.clients


# What the map says.


def points(row: str, lines: Sequence[Line], reference: Mapping[str, Line]) -> list[Point]:
    """The kinds of shift of a row. reference: the lines of FedAvg by kind of shift."""
    found = []
    for line in lines:
        name = SHIFTS[line["shift"]].title
        if row == FEDAVG:
            tests = [float(test) for test in line["tests"].split()]
            interval = comparison.interval(tests) if len(tests) > 1 else (math.nan,) * 3
            found.append(Point(name, *interval, float(line["worst_domain"])))
            continue
        worst = float(line["worst_domain"]) - float(reference[line["shift"]]["worst_domain"])
        value, low, high = (float(line[key]) for key in ("difference", "low", "high"))
        is_marked = line["word"] in (verdicts.BETTER, verdicts.WORSE)
        found.append(Point(name, value, low, high, worst, is_marked))
    return found


def picture(row: str, lines: Sequence[Line]) -> str:
    """The picture of a row of the map, the text of an SVG file. lines: of the whole map."""
    own = [line for line in lines if line["method"] == row]
    reference = {line["shift"]: line for line in lines if line["method"] == FEDAVG}
    if row == FEDAVG:
        return strip("FedAvg: test accuracy, %", points(row, own, reference), PERCENT)
    title = f"{row} minus FedAvg: points of test accuracy"
    return strip(title, points(row, own, reference), POINTS)


def _description(row: str, lines: Sequence[Line]) -> str:
    """The alternative text of a picture."""
    if row == FEDAVG:
        tests = [(SHIFTS[line["shift"]].title, float(line["test"])) for line in lines]
        each = [f"{name} {_or_diverged(test, f'{test:.1f}')}" for name, test in tests]
        return f"Test accuracy of FedAvg in percent by kind of shift: {', '.join(each)}"
    each = [f"{SHIFTS[line['shift']].title} {_signed(line['difference'])}" for line in lines]
    return f"Points of test accuracy of {row} minus FedAvg by kind of shift: {', '.join(each)}"


def _signed(number: str | float) -> str:
    return _or_diverged(float(number), f"{float(number):+z.1f}")


def _or_diverged(number: float, text: str) -> str:
    return text if math.isfinite(number) else "diverged"


def words(row: str, lines: Sequence[Line]) -> str:
    """What a row of the map says."""
    if row == FEDAVG:
        return "all others are compared with it."

    def names(keep: Any) -> str:
        return "; ".join(SHIFTS[line["shift"]].title for line in lines if keep(line)) or "none"

    known = [line for line in lines if math.isfinite(float(line["difference"]))]
    if not known:
        return "diverged."
    largest = max(known, key=lambda line: abs(float(line["difference"])))
    low, high = largest["low"], largest["high"]
    interval = ""
    if math.isfinite(float(low)) and math.isfinite(float(high)):  # not of a single seed
        interval = f" (95% interval {_signed(low)} to {_signed(high)})"
    return "\n".join(
        [
            f"better than FedAvg in: {names(lambda line: line['word'] == verdicts.BETTER)}.",
            f"Worse in: {names(lambda line: line['word'] == verdicts.WORSE)}.",
            f"Interval above 0 in: {names(lambda line: float(line['low']) > 0)}.",
            f"Interval below 0 in: {names(lambda line: float(line['high']) < 0)}.",
            f"Largest difference: {SHIFTS[largest['shift']].title}, "
            f"{_signed(largest['difference'])} points{interval}.",
        ]
    )


# The table of all algorithms.


def cost(method: Method) -> Cost:
    """The bytes of an algorithm with the network and the clients of the map, from shapes."""
    flags = train_flags(method, {})
    config = command_line.of_arguments([*flags, "--seeds=0"])
    assembled = assemble.assemble(config)
    cell = assembled.cells[0]
    clients = assembled.splits[cell.held_out][0].train
    if config.method.is_pooled:
        clients = federation.pooled(clients)
    hyper = cell.runs[0].hyper
    algorithm = assemble.algorithm(config, cell, assembled.model, assembled.task, hyper, Sizes())
    variables = network.shapes(config.model, assembled.model, assembled.dataset)

    def init(variables: Any, key: Any) -> rounds.State:
        return rounds.init(algorithm, variables, clients, key)

    state = jax.eval_shape(init, variables, jax.random.key(0))
    one = jax.eval_shape(lambda states: tree.take(states, 0), state.clients)
    of_network = communication.size(variables)
    return Cost(
        communication.traffic(algorithm, state, clients),
        communication.size(one),
        communication.size(state.server) - of_network,
        of_network,
    )


def line_of(section: Section) -> list[str]:
    """The line of an algorithm in the table of all."""
    found = cost(next(iter(rows_of(section.name).values())))

    def share(size: int) -> str:
        return f"{size / found.network:.2f}"

    traffic = " + ".join(f"{share(each.down)} / {share(each.up)}" for each in found.traffic)
    is_pooled = section.name == "erm"
    return [
        f"[{section.title}](#{section.title.lower().replace(' ', '-')})",
        section.family,
        section.sends,
        "none" if is_pooled else traffic,
        section.compute,
        f"{share(found.client)} / {share(found.server)}",
    ]


_HEADINGS = (
    "method",
    "family",
    "clients send",
    "down / up",
    "extra compute",
    "client / server keeps",
)


def overview(found: Sequence[Section]) -> str:
    """The table of all algorithms."""
    lines = [line_of(each) for each in found]
    columns: dict[str, Any] = {
        heading: lambda line, at=at: line[at] for at, heading in enumerate(_HEADINGS)
    }
    return tables.table(lines, columns)


def _words_of(record: Origin) -> str:
    """How the map came about."""
    return f"The map of this page: {results.caption(record)}:\n\n    {record.command}"


def pictures(lines: Sequence[Line]) -> Iterator[tuple[Path, str]]:
    """(path, text) of the pictures of all rows of a map."""
    there = {line["method"] for line in lines}
    for row in (row for row in methods.LISTED if row in there):
        yield PICTURES / f"{row}.svg", picture(row, lines)


def run(options: Options) -> str:
    """Writes the blocks of the page and the pictures."""
    del options
    path = ROOT / PAGE
    before = path.read_text(encoding="utf-8")
    text = written(before)
    changed = []
    for name in sorted({block["file"] for block in _BLOCK.finditer(text)}):
        for to, shown in pictures(read_cells(ROOT / name)):
            if not (ROOT / to).is_file() or (ROOT / to).read_text(encoding="utf-8") != shown:
                files.make_folder((ROOT / to).parent)
                files.write(ROOT / to, shown)
                changed.append(to)
    if text != before:
        files.write(path, text)
        changed.append(PAGE)
    return "\n".join(f"Written: {to}." for to in changed) or "The gallery is as the map has it."


BINARY = command.of(run, Options, __doc__)

if __name__ == "__main__":
    command.main(BINARY)
