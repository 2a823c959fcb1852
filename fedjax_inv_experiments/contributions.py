"""Clients' contributions in the pre-training phase of an exit strategy: a table and a picture.

fedjax-inv contributions --runs=runs/slow,runs/rotated --out=contributions.png

The runs may be unfinished: table and picture show the newest checkpoint of each.
"""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedjax_inv_experiments.flags import command
from fedjax_inv_experiments.flags.flag import check_picture, flag
from fedjax_inv_experiments.flags.outside import Named
from fedjax_inv_experiments.reporting import figures, finished, phases
from fedjax_inv_experiments.reporting.phases import Phase
from fedjax_inv_experiments.reporting.tables import table as written

NOTE = (
    "C_i: mean over the rounds of the phase in which an upload of the client arrived. C_i is 0 at "
    "L: the smoothness above which this mean is negative, its range over seeds. With a `share` who "
    "stays also depends on the sum over those rounds."
)

_COLORS = 10  # of lines that differ; with more clients only those that leave have a colour


@dataclasses.dataclass(frozen=True)
class Options(Named):
    """The flags of this binary."""

    runs: tuple[str, ...] = finished.runs_flag("Folders of runs of --algorithm=exit_strategy.")
    out: str = flag("contributions.png", "The picture, a .png file; a .pdf goes beside it.")
    data_dir: str = finished.data_dir_flag()


def table(phase: Phase) -> str:
    """The table of a phase, with a line per client."""
    outcome = phase.outcome
    length = outcome.contributions.shape[-2]
    measured = np.isfinite(outcome.contributions).sum(-2)  # [R, C]

    def mean_of(run: int) -> Callable[[int], str]:
        means = outcome.mean[run]  # NaN: never measured
        return lambda client: "" if np.isnan(means[client]) else f"{means[client]:.1e}"

    columns: list[tuple[str, Callable[[int], object]]] = [
        ("client", lambda client: client),
        ("domain", lambda client: phase.domains[client]),
        ("aberrant", lambda client: phase.aberrant[client]),
        ("measured", lambda client: f"{phases.in_range(measured[:, client])} of {length}"),
        *((f"C_i, seed {seed}", mean_of(run)) for run, seed in enumerate(phase.seeds)),
        ("C_i is 0 at L", lambda client: phases.in_range(phase.critical[:, client])),
        ("stays", lambda client: f"{outcome.stays[:, client].sum()}/{len(phase.seeds)}"),
    ]
    return written(range(outcome.mean.shape[-1]), columns)


def smoothness(phase: Phase) -> str:
    """The smoothness L of the server, by seed."""
    values = zip(phase.seeds, phase.outcome.smoothness, strict=True)
    return "L: " + ", ".join(f"{value:.3g} (seed {seed})" for seed, value in values)


def draw(path: Path, phases: Sequence[Phase]) -> None:
    """Draws C_i by round: a panel per phase, a line per client and seed, a cross at its exit."""
    figure = Figure(figsize=(6.5, 0.4 + 3.8 * len(phases)), layout="constrained")
    axes = figure.subplots(len(phases), 1, squeeze=False)[:, 0]
    for axis, phase in zip(axes, phases, strict=True):
        _draw(axis, phase)
    figures.save(figure, path)


def _draw(axis: Axes, phase: Phase) -> None:
    outcome, number = phase.outcome, len(phase.seeds)
    rounds = 1 + np.arange(outcome.contributions.shape[-2])
    leaving = np.flatnonzero(outcome.exits.any(0))
    is_few = outcome.mean.shape[-1] <= _COLORS
    named = np.arange(outcome.mean.shape[-1]) if is_few else leaving
    color = {int(client): f"C{index % _COLORS}" for index, client in enumerate(named)}
    for run, client in np.ndindex(outcome.mean.shape):
        values = outcome.contributions[run, :, client]
        at = np.isfinite(values)
        if not at.any():
            continue
        exits = outcome.exits[run, client]
        marker = (
            "." if at.sum() < 0.5 * np.isfinite(outcome.contributions[run]).any(1).sum() else ""
        )
        style: dict[str, Any] = {"lw": 0.7, "color": "0.6", "alpha": 0.6, "zorder": 1}
        if exits:
            style = {"lw": 1, "color": color[client], "zorder": 2}
        elif is_few:
            style |= {"color": color[client]}
        axis.plot(rounds[at], values[at], marker=marker, **style)
        if exits:
            axis.plot(rounds[at][-1], values[at][-1], "x", ms=7, color=color[client], zorder=3)
    for client in named[:_COLORS]:
        text = ", ".join(filter(None, [phase.domains[client], phase.aberrant[client]]))
        count = outcome.exits[:, client].sum()
        of_seeds = f" in {count} of {number} seeds" if number > 1 else ""
        does = f"leaves{of_seeds}" if count else "stays"
        label = f"client {client} ({text}) {does}"
        axis.plot([], [], color=color[client], label=figures.literal(label))
    if len(named) > _COLORS:
        axis.plot([], [], " ", label=f"and {len(named) - _COLORS} others")
    if not is_few:
        axis.plot([], [], color="0.6", lw=0.7, label="a client that stays")
    axis.axhline(0, color="black", lw=0.6, ls=":")
    axis.set(title=figures.wrapped(phase.title, 6), xlabel="round", ylabel="contribution C_i")
    figures.whole_numbers(axis)
    axis.legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(0, -0.18))


def run(options: Options) -> str:
    """Draws the picture, and returns the tables and the path of the picture.

    Raises UsageError for an option out of its range.
    """
    finished.check_runs(options.runs)
    out = check_picture("out", options.out)
    found = [
        phase
        for name in options.runs
        for phase in phases.find(Path(name), options.data_dir, options.outside)
    ]
    out.parent.mkdir(parents=True, exist_ok=True)
    draw(out, found)
    texts = [f"{phase.title}\n\n{table(phase)}\n\n{smoothness(phase)}" for phase in found]
    return "\n" + "\n\n".join([*texts, f"{NOTE}\nPicture: {out}."])


BINARY = command.of(run, Options, __doc__)

if __name__ == "__main__":
    command.main(BINARY)
