"""Who contributes: the pre-training phase of runs of an exit strategy, as a table and a picture.

python -m experiments.contributions --runs=runs/slow,runs/rotated --out=contributions.png

The runs may be going on still: they are told as they are in their newest checkpoint.
"""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import flags
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.experiment.assemble import Assembled
from experiments.experiment.config import Config
from experiments.experiment.grid import Cell
from experiments.flags.flag import check_picture
from experiments.reporting import figures
from experiments.reporting import finished as trained
from experiments.reporting.tables import tabulate
from experiments.running import folder as folders
from experiments.running import launch
from experiments.running.checkpoints import Checkpoints
from fedjax_inv import program
from fedjax_inv.algorithms import exit_strategy
from fedjax_inv.algorithms.exit_strategy import Outcome
from fedjax_inv.checks import UsageError
from fedjax_inv.types import Tree

NOTE = (
    "C_i: mean over the rounds of the phase that heard of the client. 0 at L: the smoothness above "
    "which this mean is negative, its range over seeds. With a `share` who stays also depends on "
    "the sum over those rounds."
)


class Options(NamedTuple):
    """The flags of this binary."""

    runs: tuple[str, ...]
    out: str = "contributions.png"
    data_dir: str = ""


class Phase(NamedTuple):
    """The pre-training phase of R runs that differ in their seed, P rounds and C clients."""

    title: str
    seeds: tuple[int, ...]
    domains: tuple[str, ...]  # [C], what each client holds
    aberrant: tuple[str, ...]  # [C], what is so by the flags; empty where nothing is
    outcome: Outcome  # with leading R
    critical: np.ndarray  # [R, C] the smoothness at which the mean contribution is 0


def find(folder: Path, data_dir: str = "") -> list[Phase]:
    """The phases of a run folder, one for each of its hyperparameters.

    Raises UsageError if it is no folder of one algorithm, or not of an exit strategy, or has no
    checkpoint yet.
    """
    where = f"--runs={folder}"
    try:
        chosen, cell = folders.read(folder)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None
    except OSError:
        raise UsageError(
            f"{where}: must be the folder of a run; of a sweep, that of one algorithm"
        ) from None
    made = trained.assembled(trained.alone(chosen, data_dir), cell)
    done, server = _restore(where, folder, made, chosen, cell)
    told = exit_strategy.outcome(server)
    settings = [tuple(run.hyper.items()) for run in cell.runs]
    result = []
    for setting in dict.fromkeys(settings):
        which = [index for index, other in enumerate(settings) if other == setting]
        varied = [
            f"{name}={value:g}"
            for name, value in setting
            if any(run.hyper[name] != value for run in cell.runs)
        ]
        seeds = tuple(cell.runs[index].seed for index in which)
        result.append(
            Phase(
                _title(" ".join([folder.name, *varied]), done, told),
                seeds,
                _domains(made, cell, seeds),
                aberrant(chosen, told.mean.shape[-1]),
                Outcome(*(leaf[which] for leaf in told)),
                critical(server)[which],
            )
        )
    return result


def _restore(
    where: str, folder: Path, made: Assembled, chosen: Config, cell: Cell
) -> tuple[int, Any]:
    """(rounds done, the exit strategy's server of all runs) of the newest checkpoint."""
    ready = made.prepare(cell)
    like = jax.eval_shape(program.make(ready.experiment).init, made.data, ready.inputs)
    if _assessing(like.state.server) is None:
        raise UsageError(f"{where}: is of --algorithm={cell.algorithm}, must be of exit_strategy")
    states = folder / "checkpoints"
    done = 0
    if states.is_dir():
        with contextlib.closing(Checkpoints(states, chosen, cell, reads=True)) as checkpoints:
            done = checkpoints.latest()
            if done:
                server = _assessing(checkpoints.restore(done, like).state.server)
    if not done:
        raise UsageError(f"{where}: has no checkpoint yet; must have one")
    return done, server


def _assessing(server: Tree) -> Any:
    """The server of an exit strategy, within that of a rule for missing uploads; or None."""
    while not hasattr(server, "assessment"):
        if not hasattr(server, "wrapped"):
            return None
        server = server.wrapped
    return server


def critical(server: exit_strategy.Server) -> np.ndarray:
    """[R, C] the smoothness at which a client's mean contribution is 0; NaN if never measured."""
    linear, quadratic = (
        np.asarray(leaf).sum(-2) for leaf in (server.assessment.linear, server.assessment.quadratic)
    )
    return np.divide(linear, quadratic, out=np.full_like(linear, np.nan), where=quadratic > 0)


def aberrant(chosen: Config, num_clients: int) -> tuple[str, ...]:
    """What the flags say of each client."""
    told: list[list[str]] = [[] for _ in range(num_clients)]
    for entries, text in (
        (chosen.participation.slow, "{} rounds an update"),
        (chosen.participation.lossy, "arrives with p = {}"),
    ):
        for entry in entries:
            client, _, value = entry.partition(":")
            told[int(client)].append(text.format(value))
    return tuple(", ".join(each) for each in told)


def _domains(made: Assembled, cell: Cell, seeds: Sequence[int]) -> tuple[str, ...]:
    splits = [made.splits[cell.held_out][seed] for seed in seeds]
    held = np.stack([split.domain for split in splits], axis=1)  # [C, R]
    names = (*made.dataset.domains, "mixed")  # -1 is the last
    return tuple(" or ".join(dict.fromkeys(names[each] for each in line)) for line in held)


def _title(name: str, done: int, told: Outcome) -> str:
    length = told.contributions.shape[-2]
    return f"{name}, {f'{done} of ' if done < length else ''}{length} rounds of pre-training"


def table(phase: Phase) -> str:
    """A line per client."""
    told = phase.outcome
    measured = np.isfinite(told.contributions).sum(-2)  # [R, C]
    length = told.contributions.shape[-2]
    headers = [
        "client",
        "domain",
        "aberrant",
        "measured",
        *(f"C_i, seed {seed}" for seed in phase.seeds),
        "0 at L",
        "stays",
    ]
    rows = [
        [
            client,
            phase.domains[client],
            phase.aberrant[client],
            f"{_range(measured[:, client])} of {length}",
            *(f"{value:.1e}" for value in told.mean[:, client]),
            _range(phase.critical[:, client]),
            f"{told.stays[:, client].sum()}/{len(phase.seeds)}",
        ]
        for client in range(told.mean.shape[-1])
    ]
    return tabulate(rows, headers, tablefmt="github", disable_numparse=True)


def _range(values: np.ndarray) -> str:
    known = values[np.isfinite(values)]
    if not known.size:
        return ""
    low, high = (f"{value:.3g}" for value in (known.min(), known.max()))
    return low if low == high else f"{low} to {high}"


def smoothness(phase: Phase) -> str:
    """What the server took for L, by seed."""
    values = zip(phase.seeds, phase.outcome.smoothness, strict=True)
    return "L: " + ", ".join(f"{value:.3g} (seed {seed})" for seed, value in values)


def draw(path: Path, phases: Sequence[Phase]) -> None:
    """C_i by round: a panel per phase, a line per client and seed, a cross where it leaves."""
    figure = Figure(figsize=(6.5, 0.4 + 3.8 * len(phases)), layout="constrained")
    axes = figure.subplots(len(phases), 1, squeeze=False)[:, 0]
    for axis, phase in zip(axes, phases, strict=True):
        _draw(axis, phase)
    figures.save(figure, path)


def _draw(axis: Axes, phase: Phase) -> None:
    told, number = phase.outcome, len(phase.seeds)
    rounds = 1 + np.arange(told.contributions.shape[-2])
    leaving = np.flatnonzero(told.exits.any(0))
    color = {int(client): f"C{index % 10}" for index, client in enumerate(leaving)}
    for run, client in np.ndindex(told.mean.shape):
        values = told.contributions[run, :, client]
        at = np.isfinite(values)
        if not at.any():
            continue
        exits = told.exits[run, client]
        marker = "." if at.sum() < 0.5 * np.isfinite(told.contributions[run]).any(1).sum() else ""
        style: dict[str, Any] = {"lw": 0.7, "color": "0.6", "alpha": 0.6, "zorder": 1}
        if exits:
            style = {"lw": 1, "color": color[client], "zorder": 2}
        axis.plot(rounds[at], values[at], marker=marker, **style)
        if exits:
            axis.plot(rounds[at][-1], values[at][-1], "x", ms=7, color=color[client], zorder=3)
    for client in leaving[:10]:
        text = ", ".join(filter(None, [phase.domains[client], phase.aberrant[client]]))
        count = told.exits[:, client].sum()
        label = f"client {client} ({text}) leaves in {count} of {number} seeds"
        axis.plot([], [], color=color[client], label=figures.literal(label))
    if len(leaving) > 10:
        axis.plot([], [], " ", label=f"and {len(leaving) - 10} others")
    axis.plot([], [], color="0.6", lw=0.7, label="a client that stays")
    axis.axhline(0, color="black", lw=0.6, ls=":")
    axis.set(title=figures.wrapped(phase.title, 6), xlabel="round", ylabel="contribution C_i")
    axis.legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(0, -0.18))


def run(options: Options) -> str:
    """Draws the picture, and returns the tables and where the picture is.

    Raises UsageError for an option out of its range.
    """
    if not options.runs:
        raise UsageError("--runs=: must be one or several folders")
    out = check_picture("out", options.out)
    phases = [phase for name in options.runs for phase in find(Path(name), options.data_dir)]
    out.parent.mkdir(parents=True, exist_ok=True)
    draw(out, phases)
    texts = [f"{phase.title}\n\n{table(phase)}\n\n{smoothness(phase)}" for phase in phases]
    return "\n" + "\n\n".join([*texts, f"{NOTE}\nPicture: {out}."])


def define(values: flags.FlagValues = flags.FLAGS) -> None:
    """Defines the flags."""
    flags.DEFINE_list("runs", [], "Folders of runs of --algorithm=exit_strategy.", values)
    for name, text in (
        ("out", "The picture, a .png file."),
        ("data_dir", "The TFDS folder; default: $TFDS_DATA_DIR, or TFDS's own."),
    ):
        flags.DEFINE_string(name, Options._field_defaults[name], text, values)


def options(values: flags.FlagValues = flags.FLAGS) -> Options:
    """The parsed flags."""
    parsed = values.flag_values_dict()
    given = {name: parsed[name] for name in Options._fields}
    return Options(**(given | {"runs": tuple(parsed["runs"])}))


if __name__ == "__main__":
    define()
    launch.main(run, __doc__, lambda given: options())
