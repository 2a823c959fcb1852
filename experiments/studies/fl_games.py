"""The tables and figures of FL Games (Gupta et al. 2022, arXiv 2205.11101).

fedjax-inv paper fl_games --study=methods --data=colored_mnist

Studies: methods (Tables 1 and 4), classes (Tables 2 and 3), clients (Figures 1b, 2a, 8 to 10),
steps (Figures 17 to 20), masks (Figure 1a, of the first seed). Any flag of `train` applies to all
rows (--seeds=0 for a first look); --rounds gives the baselines more steps than the games. Every
seed draws its environments anew.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from fedjax_inv.data import environments

from ..folder.records import Line
from ..report import forms
from . import drawings, masks, study
from .row_runs import RowResult
from .rows import Row
from .study import Cells, Study

DATA = (
    "colored_mnist",
    "colored_digits",
    "colored_fashion",
    "spurious_cifar10",
    "colored_dsprites",
)
_PLAYS = ("sequential", "parallel")


def game(data: str, kind: str, play: str, *methods: str) -> Row:
    """A variant of the game: kind F or V, play sequential or parallel, methods SMOOTH and FAST."""
    name = "+".join(methods)
    joined = "".join(f",games_{'_'.join(methods).lower()}" for _ in methods[:1])
    flag = f"--preset={data}_{kind.lower()},games_{play}{joined}"
    return Row("-".join(part for part in (kind, play, name) if part), (flag,))


def _variant(of: Row, x: str, what: str, *more: str) -> Row:
    """A variant of a game: the point at x in the figure against `what`."""
    return Row(f"{of.label}-{x}-{what}", (*of.flags, *more), of.label, x)


def methods(data: str) -> list[Row]:
    """Table 1 and Table 4, and the curves of Figures 2b, 2c and 11 to 16."""
    rows = [
        Row(name, (f"--preset={data}_f,games_{name.lower()}",))
        for name in ("FedSGD", "FedAvg", "FedBN", "FedProx")
    ]
    for kind, smooth in (("F", ("SMOOTH",)), ("V", ("SMOOTH", "FAST"))):
        for play in _PLAYS:
            rows += [game(data, kind, play), game(data, kind, play, *smooth)]
    return rows


def classes(data: str) -> list[Row]:
    """Tables 2 and 3: two, five and ten classes.

    The threshold for five and ten classes is ours, since the paper's training accuracy at the stop
    is above 75%.
    """
    more = {2: (), 5: ("--stop_below=0.8,0.7",), 10: ("--stop_below=0.8,0.7",)}
    return [
        _variant(game(data, "F", play), str(count), "classes", f"--num_classes={count}", *flags)
        for play in _PLAYS
        for count, flags in more.items()
    ]


def clients(data: str) -> list[Row]:
    """Figures 1b, 2a and 8 to 10: two to ten clients; with ten, IRM Games' outputs stop at 0.75."""

    def varied(name: str) -> tuple[str, str]:
        flips = ",".join(f"{flip:.6g}" for flip in environments.FLIPS[name])
        return f"--flips={flips}", f"--stop_below={'0.75,0.6' if name == '10' else '0.6,0.75'}"

    return [
        _variant(game(data, "F", play, *smooth), name, "clients", *varied(name))
        for smooth in ((), ("SMOOTH",))
        for play in _PLAYS
        for name in environments.FLIPS
    ]


def steps(data: str) -> list[Row]:
    """Figures 17 to 20: from one local step to an exact best response, one pass (Section F.5)."""
    of = game(data, "F", "parallel")
    some = [_variant(of, str(n), "steps", f"--local_steps={n}") for n in (1, 10, 30)]
    return [*some, _variant(of, "all", "steps", "--local_steps=0", "--local_epochs=1")]


def masked(data: str) -> list[Row]:
    """Figure 1a: FedAvg, and a game that ends at its stop."""
    seed = "--seeds=0"
    fedavg = methods(data)[1]
    of_game = game(data, "F", "parallel")
    return [
        Row("FedAvg", (*fedavg.flags, seed)),
        Row("F-parallel-stopped", (*of_game.flags, "--after_stop=end", seed)),
    ]


def _ends(result: RowResult) -> dict[int, study.Evaluation]:
    """The evaluation at the stop of each seed that stopped, or at the end without a stop."""
    runs = result.only.runs
    if not result.config.evaluation.stop_below:
        return {run.seed: run.last for run in runs}
    return {run.seed: run.stop for run in runs if run.stop}


_SCORES = {"test, %": "test_score", "worst domain, %": "worst_score"}
_scores = study.scores_by_seed(_SCORES, _ends, has_last=False)


def _watched(line: Line, kind: str) -> list[float]:
    """The watched scores of the rounds before an evaluation. kind: train or test."""
    return getattr(line, f"{kind}_by_round") or []


def _columns(result: RowResult) -> Cells:
    """Accuracy and rounds at the stop by the first threshold, or at the end without a stop."""
    runs = result.only.runs
    logs = result.only.logs
    ends = [*_ends(result).values()]
    if result.config.evaluation.stop_below:
        train = [stop.train_score for stop in ends]
        thresholds = [run.stops[0].threshold for run in runs if run.stops]
        when = f"{len(ends)}/{len(runs)} below {thresholds[0]:g}"
    else:
        train = [_watched(lines[-1], "train")[-1] for lines in logs]
        when = "at the end"
    rounds = [each.round for each in ends]
    last = study.percent(result.last, "test_score")
    continues = result.config.evaluation.after_stop == "continue"
    select = result.config.evaluation.select
    rule = "the best validation" if select == "validation" else f"the round of {select}"
    return {
        "stopped": when,
        "rounds": forms.spread(rounds) if ends else f"> {result.config.training.rounds}",
        "train, %": forms.percent(train) if ends else "",
        **study.texts(ends, _SCORES),
        # A run that ends at its stop has no later round.
        "test at the last, %": last if continues or not ends else "",
        f"test at {rule}, %": study.percent(result.selected, "test_score"),
    }


NUMBERS = study.numbers_of("fl_games")


def numbers(result: RowResult, data: str) -> Cells:
    """The paper's numbers of a row; empty cells where it has none."""
    at = (result.row.label, data)
    of_row = {each.column: each.value for each in NUMBERS if (each.row, each.data) == at}
    return {f"paper: {name}": of_row.get(name, "") for name in ("train", "test", "rounds")}


def draw_oscillation(path: Path, data: str, results: Sequence[RowResult]) -> str:
    """Draws the accuracies of the first seed in every round, and its stop."""
    games = [one for one in results if one.is_complete and one.config.evaluation.stop_below]
    if not games:
        return "No figure: no game is left."
    title = f"{data}, seed {games[0].only.runs[0].seed}"
    panels = [_oscillation(game) for game in games]
    return drawings.lines(path, title, panels, (5.6, 2.3), columns=2, percent=True)


def _oscillation(result: RowResult) -> drawings.Panel:
    run = result.only.runs[0]
    log = result.only.logs[0]
    rounds = [stop.round or 0 for stop in run.stops or ()]
    continues = result.config.evaluation.after_stop == "continue"
    end = None if continues or not all(rounds) else max(rounds)
    lines = {}
    for kind, label in (("train", "training clients"), ("test", "test client")):
        curve = [100 * value for line in log for value in _watched(line, kind)][:end]
        lines[label] = drawings.Curve(np.arange(1, len(curve) + 1), np.array([curve]))
    threshold = 100 * result.config.evaluation.stop_below[0]
    stop = rounds[0] or np.nan
    title = f"{result.row.label}, stop below {threshold:g}%"
    levels = {"threshold": threshold}
    moments = {"the stop": stop}
    return drawings.Panel(lines, title, "round", "accuracy, %", levels=levels, moments=moments)


_AT_STOPS: dict[str, Callable[[RowResult], list[float]]] = {
    "rounds to the stop": lambda result: [end.round for end in _ends(result).values()],
    "test accuracy at the stop, %": lambda result: study.percents(_ends(result).values()),
}


def _scaling(what: str) -> dict[str, study.Draw]:
    """The figure of rounds and test accuracy at the stop against `what`."""
    return {
        "": lambda path, data, results: drawings.against(
            path, data, what, study.points(results, _AT_STOPS)
        )
    }


_BY_ROUND: dict[str, study.Draw] = {"_by_round": draw_oscillation}

PAPER = study.Paper(
    "fl_games",
    DATA,
    {
        "methods": Study(methods, _columns, numbers, _BY_ROUND, _scores),
        "classes": Study(classes, _columns, numbers, _scaling("classes"), data=DATA[:3]),
        "clients": Study(clients, _columns, numbers, _scaling("training clients")),
        "steps": Study(steps, _columns, numbers, _BY_ROUND | _scaling("local steps a round")),
        "masks": Study(masked, _columns, figures={"": masks.draw}),
    },
    caption=(
        "Mean ± standard deviation over seeds, each of which draws its own environments, unless "
        "--data_seed fixes them. Games: at the stop, over seeds that stopped, training accuracy on "
        "all examples. Baselines: at the end, training accuracy on --watch_examples."
    ),
    diverged=lambda result: {"stopped": study.why_none(result)},
    optimum=dict.fromkeys(
        ("train, %", "test, %", "worst domain, %", "paper: train", "paper: test"), "75"
    ),
)
