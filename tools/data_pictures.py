"""The pictures of docs/environments.md: what clients and the test see, and who holds what.

python -m tools.data_pictures

The page names a picture in a comment, and another comment ends the block:

    <!-- data: rotated -->
    <!-- end -->

Between the two this command writes the picture's link, with a text for those who do not see it, and
the flags that make the data. It draws a picture into docs/pictures/data/ if it shows other data
than the one that is there. All data are scikit-learn's digits or made here; nothing is downloaded.
"""

import dataclasses
import hashlib
import inspect
import io
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from fedjax_inv.checks import UsageError
from fedjax_inv.data import partitions, sources
from fedjax_inv.data.dataset import Dataset
from fedjax_inv.data.federation import Split, parts_of
from fedjax_inv_experiments import show_data
from fedjax_inv_experiments.experiment import assemble, command_line
from fedjax_inv_experiments.flags import command
from fedjax_inv_experiments.papers import data_strips
from fedjax_inv_experiments.reporting import data_figures, figures
from fedjax_inv_experiments.running import files
from tools import results

ROOT = results.ROOT
PAGE = Path("docs/environments.md")
PICTURES = Path("docs/pictures/data")

_BLOCK = re.compile(
    r"^<!-- data: (?P<name>\S+) -->\n(?P<shown>.*?)^<!-- end -->$", re.MULTILINE | re.DOTALL
)
_DIGEST = figures.DIGEST
_IMAGES, _MOST_CLIENTS = 7, 3  # images of a line; lines of clients
_WIDTH, _DPI, _SIZE = 5.0, 160, 10  # inches; of letters in points: legible at 400 pixels
_CUES = {"color": "colour", "patched": "corner", "step": "colour", "stroke": "stroke"}


@dataclasses.dataclass(frozen=True)
class Options:
    """This command has no flags."""


class Seen(NamedTuple):
    """An environment, as a strip of images."""

    flags: tuple[str, ...]
    domain: str = ""  # how the name of a client's domain is written; "": not at all


class Held(NamedTuple):
    """A partition, as the counts of what each client holds, in two panels."""

    flags: tuple[str, ...]
    panels: tuple[tuple[str, ...], tuple[str, ...]]  # further flags
    by: str = "class"  # class, domain, user or label, which is right or wrong


_ANGLES = "--angles=0,15,30,45,60"
_TEN = "--clients=10"
_UPRIGHT = ("--environment=rotated", "--angles=0", "--held_out=none")
EVERY: Mapping[str, Seen | Held] = {
    "rotated": Seen(("--environment=rotated", "--held_out=75"), "{}°"),
    "odd_angles": Seen(
        ("--environment=rotated", "--odd_angles=180", "--held_out=75"), "{}°"
    ),
    "colored": Seen(("--environment=colored",)),
    "patched": Seen(("--dataset=moved_digits", "--environment=patched")),
    "stained": Seen(("--environment=stained", "--stain=foreground")),
    "stained_ground": Seen(("--environment=stained", "--stain=background")),
    "combinations": Seen(("--environment=combinations", "--held_out=9")),
    "simpson": Seen(("--environment=simpson", "--held_out=test")),
    "none": Seen(("--dataset=scanners.npz", "--held_out=C"), "scanner {}"),
    "iid": Held((*_UPRIGHT, "--partition=iid"), (("--clients=5",), (_TEN,))),
    "domain": Held(
        ("--environment=rotated", _ANGLES, "--held_out=none", "--partition=domain"),
        (("--clients=5",), (_TEN,)),
        "domain",
    ),
    "mixed": Held(
        ("--environment=rotated", _ANGLES, "--held_out=none", "--partition=mixed", _TEN),
        (("--mixing=0.5",), ("--mixing=0.1",)),
        "domain",
    ),
    "dirichlet": Held(
        (*_UPRIGHT, "--partition=dirichlet", _TEN), (("--alpha=1",), ("--alpha=0.1",))
    ),
    "shards": Held(
        (*_UPRIGHT, "--partition=shards", _TEN),
        (("--classes_per_client=4",), ("--classes_per_client=2",)),
    ),
    "quantity": Held(
        (*_UPRIGHT, "--partition=quantity", _TEN), (("--alpha=10",), ("--alpha=0.2",))
    ),
    "user": Held(
        ("--dataset=patients.csv", "--partition=user", "--held_out=none"),
        (("--clients=0",), ("--clients=4",)),
        "user",
    ),
    "imbalance": Held(
        (*_UPRIGHT, "--partition=iid", _TEN), (("--imbalance=5",), ("--imbalance=50",))
    ),
    "wrong_labels": Held(
        (*_UPRIGHT, "--partition=iid", _TEN), (("--wrong_labels=0.2",), ("--wrong_labels=0.8",)),
        "label",
    ),
}  # fmt: skip


# Data of one's own, which the tool makes.


def write_own(folder: Path) -> None:
    """Writes scanners.npz, digits of three scanners, and patients.csv, rows of twelve hospitals."""
    digits = sources.load("digits")
    scanner = np.arange(len(digits.y)) % 3
    dark, pale = 255 - digits.x, digits.x // 3 + 60
    x = np.choose(scanner[:, None, None, None], [digits.x, dark, pale])
    names = np.array(["A", "B", "C"])[scanner]
    np.savez(folder / "scanners.npz", x=x, y=digits.y, domain=names)
    rng = np.random.default_rng(0)
    sizes = (30 + 25 * np.arange(12)[::-1]).tolist()
    lines = [
        f"{rng.normal():.3f},{rng.integers(2)},H{hospital + 1:02}"
        for hospital, size in enumerate(sizes)
        for _ in range(size)
    ]
    text = "\n".join(["pulse,target,client", *lines, ""])
    (folder / "patients.csv").write_text(text, encoding="utf-8")


def _data(flags: Sequence[str], folder: Path) -> tuple[Dataset, Split, np.ndarray]:
    """(the data, their split, [M] which rows have wrong labels) of the first seed."""
    placed = [re.sub(r"^(--dataset=)(?=\w+\.(?:npz|csv)$)", rf"\1{folder}/", f) for f in flags]
    config = command_line.of_arguments([*placed, "--seeds=0"])
    assembled = assemble.assemble(config)
    (held_out,) = assembled.splits
    dataset, split = assembled.as_seen(held_out, 0)
    return dataset, split, np.asarray(dataset.y != assembled.dataset.y)


# Environments.


class Line(NamedTuple):
    """A line of a strip: who sees the images."""

    name: str
    rows: np.ndarray
    labels: list[str]
    right: float | None  # how often the guess from the cue alone is right, in percent


def lines_of(dataset: Dataset, split: Split, form: str) -> list[Line]:
    """Some clients and the test. form: how a domain is written, such as "{} degrees"."""
    clients, (test,) = parts_of(split.train), parts_of(split.test)
    cue = next(iter(show_data.cues(dataset).values()), None)
    all_rows = np.concatenate(clients)

    def name(who: str, domain: int) -> str:
        known = form.format(split.domains[domain]) if form and domain >= 0 else ""
        return f"{who}: {known}" if known else who

    def right(rows: np.ndarray, known: np.ndarray) -> float | None:
        if cue is None:
            return None
        guess = show_data.best_guess(cue, dataset.y, known)[cue[rows]]
        return 100 * float(np.mean(guess == dataset.y[rows]))

    shown = sorted({0, len(clients) // 2, len(clients) - 1})[:_MOST_CLIENTS]
    found = [
        (name(f"client {at + 1}", split.domain[at]), clients[at], right(clients[at], clients[at]))
        for at in shown
    ]
    found.append((name("test", split.test_domain[0]), test, right(test, all_rows)))
    lines = []
    for title, rows, score in found:
        some = _in_turn(dataset.y, rows)
        if len(dataset.classes) == 2:
            some = some[np.argsort(dataset.y[some], kind="stable")]
        lines.append(Line(title, some, [dataset.classes[y] for y in dataset.y[some]], score))
    return lines


def _in_turn(y: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """The first rows, with the classes taking turns."""
    turn = np.zeros(len(rows), int)
    for label in np.unique(y[rows]):
        turn[y[rows] == label] = np.arange((y[rows] == label).sum())
    return rows[np.lexsort((y[rows], turn))][:_IMAGES]


def _strip(dataset: Dataset, lines: Sequence[Line], title: str) -> Figure:
    drawn = show_data.cues(dataset)
    cue = next(iter(drawn), "")
    has_cue = bool(cue)
    left, right = (0.8, 1.0) if has_cue else (1.5, 0.1)
    image = (_WIDTH - left - right) / _IMAGES
    step = image + 0.19
    top = 0.62 if has_cue else 0.45
    figure = Figure(figsize=(_WIDTH, top + step * len(lines) + 0.1))
    axis = _blank(figure, title)
    height = figure.get_size_inches()[1]
    for at, line in enumerate(lines):
        y = height - top - step * at
        is_test = at == len(lines) - 1
        style: dict[str, Any] = dict(fontsize=_SIZE, va="center")
        axis.text(
            left - 0.1, y - 0.15 - image / 2, line.name, ha="right",
            weight="bold" if is_test else "normal", **style,
        )  # fmt: skip
        if is_test:
            axis.axhline(y + 0.03, color="0.6", lw=1, ls="--")
        pictures = data_strips.colours(data_figures.rendered(dataset, line.rows))
        for column, (picture, label) in enumerate(zip(pictures, line.labels, strict=True)):
            x = left + column * image
            place = (x, x + 0.93 * image, y - 0.16 - 0.93 * image, y - 0.16)
            axis.imshow(picture, extent=place, interpolation="nearest")
            if cue == "corner":
                _outline(axis, place, is_right=bool(drawn[cue][line.rows[column]]))
            axis.text(x + 0.46 * image, y - 0.08, label, ha="center", **style | {"fontsize": 8.5})
        if line.right is not None:
            number = f"{line.right:.0f}%"
            weight = "bold" if is_test else "normal"
            axis.text(
                _WIDTH - 0.45, y - 0.15 - image / 2, number, ha="right", weight=weight, **style
            )
    if has_cue:
        text = f"right by\n{_CUES.get(cue, cue)} alone"
        axis.text(_WIDTH - 0.1, height - 0.48, text, ha="right", va="center", fontsize=8.5)
    _fit(axis, figure)
    return figure


def _outline(axis: Axes, place: tuple[float, float, float, float], *, is_right: bool) -> None:
    """Draws the edge of the black corner, a quarter of the image, which has no edge of its own."""
    left, right, bottom, top = place
    middle = (left + right) / 2
    x = middle if is_right else left
    size = (middle - left, (top - bottom) / 2)
    axis.add_patch(Rectangle((x, top - size[1]), *size, fill=False, ec="#E69F00", lw=1.2))


def _described_strip(dataset: Dataset, lines: Sequence[Line]) -> str:
    cue = next(iter(show_data.cues(dataset)), "")
    texts = [
        line.name
        if line.right is None
        else f"{line.name}, where the guess from the {_CUES.get(cue, cue)} alone is right for "
        f"{line.right:.0f}% of the images"
        for line in lines
    ]
    return f"A line of images each of {'; '.join(texts)}"


# Partitions.


class Panel(NamedTuple):
    """The counts of what clients hold."""

    title: str
    counts: np.ndarray  # [C, K]
    names: Sequence[str]  # [K]


def panel_of(by: str, title: str, dataset: Dataset, split: Split, is_wrong: np.ndarray) -> Panel:
    """The counts of a partition by class, domain, user, or right and wrong labels."""
    rows = parts_of(split.train)
    if by == "class":
        names, counts = data_figures.target_counts(dataset, rows)
        return Panel(title, counts, names)
    if by == "domain":
        values, names = dataset.domain, split.domains
    elif by == "user":
        assert dataset.user is not None
        users, values = np.unique(dataset.user, return_inverse=True)
        names = [str(user + 1) for user in range(len(users))]
    else:
        values, names = is_wrong.astype(int), ("right", "wrong")
    return Panel(title, partitions.class_counts(values, rows, len(names)), names)


def _bubbles(by: str, panels: Sequence[Panel], title: str) -> Figure:
    clients = max(len(panel.counts) for panel in panels)
    top, bottom, left, gap = 0.58, 0.45, 0.62, 0.3
    figure = Figure(figsize=(_WIDTH, top + bottom + 0.21 * clients))
    height = figure.get_size_inches()[1]
    axis = _blank(figure, title)
    _fit(axis, figure)
    wide = (_WIDTH - left - gap - 0.1) / 2
    for at, panel in enumerate(panels):
        x = (left + at * (wide + gap)) / _WIDTH
        own = figure.add_axes((x, bottom / height, wide / _WIDTH, 1 - (top + bottom) / height))
        num_clients, num_values = panel.counts.shape
        each = min(72 * wide / num_values, 72 * 0.2)  # the largest diameter
        size = each**2 * panel.counts / max(p.counts.max() for p in panels)
        column, row = np.meshgrid(np.arange(num_values), np.arange(num_clients))
        own.scatter(column, row, s=size, color="#0072B2", lw=0, clip_on=False, zorder=3)
        own.set(xlim=(-0.6, num_values - 0.4), ylim=(clients - 0.4, -0.6))
        own.set_title(panel.title, fontsize=_SIZE, family="monospace")
        small = 8.5 if num_values <= 10 else 7.5
        own.set_xticks(range(num_values), panel.names, fontsize=small)
        own.set_yticks(range(num_clients), [str(c + 1) for c in range(num_clients)], fontsize=8.5)
        own.tick_params(length=0)
        own.grid(color="0.92")
        own.set_axisbelow(True)
        own.spines[["top", "right", "left", "bottom"]].set_color("0.7")
        if at == 0:
            own.set_ylabel("client", fontsize=_SIZE)
        what = {"domain": "angle", "user": "hospital"}.get(by, by)
        own.set_xlabel(what, fontsize=_SIZE, labelpad=1)
    return figure


def _described_counts(by: str, panels: Sequence[Panel]) -> str:
    texts = []
    for panel in panels:
        held = (panel.counts > 0).sum(1)
        sizes = panel.counts.sum(1)
        total, most = panel.counts.sum(0), {"class": "classes", "user": "users"}.get(by, f"{by}s")
        texts.append(
            f"with {panel.title}, {len(sizes)} clients hold {sizes.min()} to {sizes.max()} examples"
            f" of {held.min()} to {held.max()} {most} each, and the {most} have {total.min()} to"
            f" {total.max()} examples"
        )
    return f"Bubbles by client and {by}: {'; '.join(texts)}"


# Files.


def _blank(figure: Figure, title: str) -> Axes:
    """An axis over the whole figure in inches, with a title in its upper left corner."""
    axis = figure.add_axes((0, 0, 1, 1))
    axis.axis("off")
    height = figure.get_size_inches()[1]
    size = min(_SIZE, 72 * (_WIDTH - 0.2) / (0.62 * len(title)))
    axis.text(
        0.1, height - 0.16, title, va="center", fontsize=size, family="monospace", weight="bold"
    )
    return axis


def _fit(axis: Axes, figure: Figure) -> None:
    width, height = figure.get_size_inches()
    axis.set(xlim=(0, width), ylim=(0, height), aspect="auto")


class Picture(NamedTuple):
    """A picture, its text, and the digest of what it shows."""

    description: str
    digest: str
    draw: Callable[[], Figure]


def picture(name: str, folder: Path) -> Picture:
    """A picture of EVERY. folder: where `write_own` wrote."""
    item = EVERY[name]
    if isinstance(item, Seen):
        dataset, split, _ = _data(item.flags, folder)
        lines, title = lines_of(dataset, split, item.domain), _title(item)
        shown = [
            (line.name, line.rows.tolist(), line.labels, f"{line.right or 0:.1f}") for line in lines
        ]
        text = _described_strip(dataset, lines)
        return Picture(text, _digest(_strip, title, shown), lambda: _strip(dataset, lines, title))
    panels = [
        panel_of(item.by, " ".join(more), *_data([*item.flags, *more], folder))
        for more in item.panels
    ]
    title = _title(item)
    counted = [(panel.title, panel.counts.tolist(), list(panel.names)) for panel in panels]
    text = _described_counts(item.by, panels)
    return Picture(
        text, _digest(_bubbles, title, counted), lambda: _bubbles(item.by, panels, title)
    )


def _title(item: Seen | Held) -> str:
    """The flags that make the environment or the partition; others only prepare the data."""
    kept = ("--partition", "--clients", "--dataset") if isinstance(item, Held) else ("--",)
    return " ".join(flag for flag in item.flags if flag.startswith(kept))


def _digest(draw: Callable[..., Figure], *shown: Any) -> str:
    """The SHA-256 of what a picture shows and of the code that draws it."""
    code = [inspect.getsource(each) for each in (draw, _outline, _blank, _fit, _save)]
    return hashlib.sha256(repr((code, shown)).encode()).hexdigest()


def _save(figure: Figure, path: Path, digest: str) -> None:
    """Writes a figure as a PNG of at most 64 colours."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=_DPI)
    few = Image.open(file).convert("RGB").quantize(64, dither=Image.Dither.NONE)
    about = PngInfo()
    about.add_text(_DIGEST, digest)
    with files.replacing(path) as to:
        few.save(to, format="png", optimize=True, pnginfo=about)


def block(name: str, found: Picture) -> str:
    """The text between the comments of a picture."""
    item = EVERY[name]
    link = os.path.relpath(PICTURES / f"{name}.png", PAGE.parent)
    more = item.panels[1] if isinstance(item, Held) else ()
    words = ["    .venv/bin/fedjax-inv", "show-data", *item.flags, *more]
    return f"![{found.description}]({link})\n\n{results.folded(words)}"


def written(text: str, found: Mapping[str, Picture]) -> str:
    """The text of the page with all blocks as the data have them."""

    def block_of(each: re.Match[str]) -> str:
        name = each["name"]
        if "<!-- data" in each["shown"] or name not in found:
            must = "must be a picture, whose block ends with the comment <!-- end -->"
            raise UsageError(name, ..., must)
        return f"<!-- data: {name} -->\n\n{block(name, found[name])}\n\n<!-- end -->"

    return _BLOCK.sub(block_of, text)


def pictures() -> Iterator[tuple[str, Picture]]:
    """(name, picture) of all."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_own(folder)
        for each in EVERY:
            yield each, picture(each, folder)


def run(options: Options) -> str:
    """Writes the blocks of the page and the pictures."""
    del options
    changed, found = [], {}
    for name, each in pictures():
        found[name] = each
        path = ROOT / PICTURES / f"{name}.png"
        if figures.digest_in(path) != each.digest:
            files.make_folder(path.parent)
            _save(each.draw(), path, each.digest)
            changed.append(path.relative_to(ROOT))
    path = ROOT / PAGE
    before = path.read_text(encoding="utf-8")
    text = written(before, found)
    if text != before:
        files.write(path, text)
        changed.append(PAGE)
    return "\n".join(f"Written: {to}." for to in changed) or "The pictures are as the data have it."


BINARY = command.of(run, Options, __doc__)

if __name__ == "__main__":
    command.main(BINARY)
