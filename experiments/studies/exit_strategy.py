"""The study of the exit strategy of FedIPG (Hao et al. 2025, arXiv 2503.06158, Section IV).

fedjax-inv paper fedipg --study=exit --data=mnist

Fig. 3: one of twenty clients, client 0, is slow, lossy or rotated in several degrees. The server
averages the deltas that arrive, or as in the paper the last parameters of all clients. In each row
client 0 trains like the others, or may leave by Eq. 13 or by how far it lies behind. Figures show
its effect, and what each client contributes in pre-training.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from fedjax_inv.algorithms import exit_strategy
from fedjax_inv.algorithms.exit_strategy import Outcome

from .. import finished
from ..folder import selection
from ..folder.records import Line
from ..report import figures, forms
from . import drawings, study
from .row_runs import CellResult, RowResult
from .rows import Row
from .study import Cells

# Fig. 3: the way in which client 0 is aberrant -> degrees, the weakest first, and their name.
_ABERRANT = {
    "slow": (("2", "5", "20", "40"), "rounds per update"),
    "lossy": (("0.05",), "probability of success"),
    "rotated": (("90", "135", "180"), "degrees, the others have 0 to 75"),
}
# Learning rates of the slow and lossy sweeps, and of the rotated one, whose clients differ more.
_RATES = {"mnist": (0.3, 0.2), "digits": (0.1, 0.1), "cifar10": (0.02, 0.02)}
DATA = tuple(_RATES)
_LOCAL_STEPS = {"mnist": 1, "digits": 1, "cifar10": 5}
# Rounds of pre-training in the same order: enough for an update of the slowest client. With more
# rounds, the outermost regular angles drift further from the mean.
_PRETRAINING = {"mnist": (50, 40), "digits": (100, 60), "cifar10": (100, 100)}
_LOW_LOSS = {"mnist": 1.0, "digits": 1.2, "cifar10": 1.6}
# What the server averages -> the rule of late uploads, and whether contributions are displaced.
# Displacement is of parameters; where nobody is late, both rules and both averages are equal.
_AVERAGED = {"deltas": ("skip", "false"), "parameters": ("parameters", "false,true")}


def leaving(data: str) -> list[Row]:
    """Fig. 3: one client is aberrant in several degrees; it trains, may leave, or is absent."""
    # Its uploads never arrive; the other clients have the same examples as in all rows.
    absent = "--lossy=0:0"
    fedipg = ("--algorithm=fedipg", "--set=penalty=0.01")
    rows = [
        Row("without", (*_at(data, "slow"), absent), "slow+lossy: without it"),
        Row("without by FedIPG", (*_at(data, "slow"), absent, *fedipg)),
        Row("normal", (*_at(data, "slow"), *_exits(data, "slow", "deltas"))),
    ]
    for kind in ("slow", "lossy"):
        for degree in _ABERRANT[kind][0]:
            rows += [
                Row(
                    f"{kind} {degree} by {averaged}",
                    (*_at(data, kind, degree), *_exits(data, kind, averaged)),
                    f"{kind}: {averaged}",
                    degree,
                )
                for averaged in _AVERAGED
            ]
    if data == "cifar10":
        return rows
    absent_rotated = (*_at(data, "rotated", "180"), absent)
    rows.append(Row("without rotated", absent_rotated, "rotated: without it"))
    for degree in _ABERRANT["rotated"][0]:
        flags = (*_at(data, "rotated", degree), *_exits(data, "rotated", "deltas"))
        rows.append(Row(f"rotated {degree}", flags, "rotated: all", degree))
    return rows


def _exits(data: str, kind: str, averaged: str) -> tuple[str, ...]:
    """Flags of FedAvg, with which everybody stays, and of the rules of exit."""
    missing, displaced = _AVERAGED[averaged]
    return (
        "--algorithm=fedavg,exit_strategy",
        f"--missing={missing}",
        f"--set=displaced={displaced}",
        f"--set=step_size={_rate(data, kind) * _LOCAL_STEPS[data]:g}",
        f"--set=pretraining_rounds={_PRETRAINING[data][kind == 'rotated']}",
    )


def _rate(data: str, kind: str) -> float:
    return _RATES[data][kind == "rotated"]


def _at(data: str, kind: str, degree: str = "") -> tuple[str, ...]:
    """Flags of a point of a sweep; without a degree, no client is aberrant."""
    flags = (f"--preset=exit_{data}", f"--learning_rate={_rate(data, kind)}")
    if kind == "rotated":
        return (*flags, "--environment=rotated", "--partition=domain", f"--odd_angles={degree}")
    return (*flags, f"--{kind}=0:{degree}", "--first_all") if degree else flags


def _low_loss(row: Row) -> float:
    """The low loss on the data of the study, whatever --dataset is."""
    preset = next(word for word in row.flags if word.startswith("--preset=")).partition("=")[2]
    return _LOW_LOSS[preset.removeprefix("exit_")]


def _odd_angles(result: RowResult) -> list[str]:
    return [f"{angle:g}" for angle in result.config.environment.odd_angles]


def _regular(result: RowResult, cell: CellResult) -> list[list[dict[str, float]]]:
    """Round, mean accuracy and mean loss over the regular domains, by seed and evaluation.

    These are the validation domains whose angle is not among --odd_angles. Without such an angle
    client 0 shares its domain with the others, so that its examples are among them.
    """
    odd = _odd_angles(result)

    def means(line: Line) -> dict[str, float]:
        regular = [
            domain
            for name, domain in line.domains.items()
            if domain.split == "validation" and domain.examples and name not in odd
        ]
        scores = [domain.score for domain in regular]
        losses = [np.nan if domain.loss is None else domain.loss for domain in regular]
        means = {"score": float(np.mean(scores)), "loss": float(np.mean(losses))}
        return {"round": line.round, **means}

    return [[means(line) for line in selection.trained(lines)] for lines in cell.logs]


def _rounds_to(lines: Sequence[dict[str, float]], low: float) -> float:
    """The round of the first evaluation with a loss below `low`, NaN if there is none."""
    return next((line["round"] for line in lines if line["loss"] < low), np.nan)


def exit_columns(result: RowResult) -> Cells:
    """The accuracy and speed of the others' clients with client 0, and who leaves by each rule."""
    low = _low_loss(result.row)
    everybody = result.cells[0]
    by_seed = _regular(result, everybody)
    reached = [_rounds_to(lines, low) for lines in by_seed]
    last = [lines[-1] for lines in everybody.logs]
    odd = [line.domains[angle] for line in last for angle in _odd_angles(result)[:1]]
    train = [line.train_by_round[-1] for line in last if line.train_by_round]
    speed = "not reached" if np.isnan(reached).any() else forms.spread(reached)
    cells = {
        "accuracy, %": forms.percent([lines[-1]["score"] for lines in by_seed]),
        "training examples watched, %": forms.percent(train),
        "client 0's angle, %": study.percent(odd, "score"),
        f"rounds to loss {low}": speed,
    }
    for rule, cell in _rules(result):
        found = phase(result, cell)
        ratios = found.mean[:, 0] / np.nanmedian(found.mean[:, 1:], axis=1)
        exits = found.exits
        others = exits[:, 1:].sum() / len(exits)
        after = [lines[-1]["score"] for lines in _regular(result, cell)]
        cells |= {
            f"{rule}: client 0 / median": forms.spread([*ratios]),
            f"{rule}: client 0 leaves": f"{exits[:, 0].sum()} of {len(exits)} seeds",
            f"{rule}: others that leave": f"{others:g} of {exits.shape[1] - 1}",
            f"{rule}: accuracy, %": forms.percent(after),
        }
    return cells


def _rules(result: RowResult) -> Iterator[tuple[str, CellResult]]:
    """Each rule of exit of a row, with its runs."""
    for cell in result.cells:
        if cell.result.cell.algorithm == "exit_strategy":
            is_displaced = cell.result.cell.settings["displaced"]
            yield "displaced" if is_displaced else "Eq. 13", cell


def phase(result: RowResult, cell: CellResult) -> Outcome:
    """The pre-training of a rule of exit, with a leading axis of runs."""
    runs = finished.open("run_dir", cell.folder, "last", named=result.config.outside)
    server = exit_strategy.server_in(runs.fitted.stored().state.server)
    assert server is not None
    return exit_strategy.outcome(server)


def draw_contributions(path: Path, data: str, results: Sequence[RowResult]) -> str:
    """Draws what each client contributes in pre-training, by round, a panel per row and rule."""
    phases = {
        f"{result.row.label}, {rule}": phase(result, cell)
        for result in results
        if result.is_complete
        for rule, cell in _rules(result)
    }
    if not phases:
        return "No contributions: no client can leave."
    figure, axes = figures.panels(
        len(phases), (3.2, 2.4), x_label="round", y_label="contribution", columns=5
    )
    for axis, (label, outcome) in zip(axes, phases.items(), strict=True):
        for client, run in reversed([*np.ndindex(outcome.mean.T.shape)]):  # client 0 on top
            values = outcome.contributions[run, :, client]
            (at,) = np.isfinite(values).nonzero()
            color = "0.7" if client else "C3"
            axis.plot(1 + at, values[at], ".-", ms=2, lw=0.6, color=color)
            if outcome.exits[run, client]:
                axis.plot(1 + at[-1:], values[at[-1:]], "x", ms=7, color=color)
        axis.axhline(0, color="black", lw=0.6, ls=":")
        axis.set_title(figures.wrapped(label, 3.0, 9), fontsize=9)
    about = "red: client 0, grey: the others, a line per seed; a cross: the client leaves"
    return drawings.saved(figure, path, f"{data}\n{about}")


def draw_exit(path: Path, data: str, results: Sequence[RowResult]) -> str:
    """Fig. 3: a picture for each kind of aberrant client."""
    low = _LOW_LOSS[data]
    texts = []
    quantities: dict[str, Callable[[RowResult], list[float]]] = {
        "accuracy, %": lambda one: [100 * x[-1]["score"] for x in _regular(one, one.only)],
        f"rounds to loss {low}": lambda one: [
            _rounds_to(lines, low) for lines in _regular(one, one.only)
        ],
    }
    for kind, (degrees, x_label) in _ABERRANT.items():
        lines = []
        for result in results:
            kinds, _, name = result.row.series.partition(": ")
            if kind in kinds.split("+") and result.is_complete:
                named = [(name, result.cells[0])]
                named += [(f"{name}, exit by {rule}", cell) for rule, cell in _rules(result)]
                # A row without the aberrant client is drawn at all degrees.
                lines += [
                    result._replace(row=Row("", (), label, place), cells=[cell])
                    for label, cell in named
                    for place in ([result.row.x] if result.row.x else degrees)
                ]
        if lines:
            title = f"{data}: client 0 is {kind}"
            points = study.points(lines, quantities)
            place = path.with_name(f"{path.stem}_{kind}.png")
            texts.append(drawings.against(place, title, x_label, points))
    return "\n".join(texts) or drawings.NOTHING


FIGURES: dict[str, study.Draw] = {"": draw_exit, "_contributions": draw_contributions}
