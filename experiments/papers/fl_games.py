"""The tables and figures of FL Games (Gupta et al. 2022, arXiv 2205.11101).

python -m experiments.papers.fl_games --study=methods --data=colored_mnist

Studies: methods (Tables 1 and 4), mixes (the scales of SMOOTH), classes (Tables 2 and 3), clients
(Figures 1b, 2a, 8 to 10), steps (Figures 17 to 20). Any flag of `sweep` given here goes to all rows
(--seeds=0 --rounds=50 for a first look); every seed draws its environments anew.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes

from experiments.experiment.config import Config
from experiments.papers import study
from experiments.papers.study import Cells, Done, Row, Study
from experiments.reporting import figures, report
from fedjax_inv.algorithms.fl_games import MEMORY_MIXES
from fedjax_inv.checks import UsageError
from fedjax_inv.data import environments

DATA = (
    *("colored_mnist", "colored_digits", "colored_fashion"),
    *("spurious_cifar10", "colored_dsprites"),
)
_PLAYS = ("sequential", "parallel")


def game(data: str, kind: str, play: str, *methods: str) -> Row:
    """A variant of the game: kind F or V, play sequential or parallel, methods: SMOOTH, FAST."""
    name = "+".join(methods)
    joined = "".join(f",games_{'_'.join(methods).lower()}" for _ in methods[:1])
    flag = f"--preset={data}_{kind.lower()},games_{play}{joined}"
    return Row("-".join(part for part in (kind, play, name) if part), (flag,))


def _variant(of: Row, x: str, what: str, *more: str) -> Row:
    """A point of a game's line in a figure, where `what` varies."""
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


def mixes(data: str) -> list[Row]:
    """The three scales of SMOOTH; the first is what SMOOTH alone means."""
    rows = []
    for play in _PLAYS:
        smooth = game(data, "F", play, "SMOOTH")
        rows += [game(data, "F", play), smooth]
        for mix in MEMORY_MIXES[1:]:
            rows.append(Row(f"{smooth.label}-{mix}", (*smooth.flags, f"--set=memory_mix={mix}")))
    return rows


def classes(data: str) -> list[Row]:
    """Tables 2 and 3: two, five and ten classes. The paper's training accuracy at the stop is above
    75% with five and ten, so the threshold is ours. Raises UsageError for data of two classes."""
    of_ten = DATA[:3]
    if data not in of_ten:
        raise UsageError(f"--data={data}: has two classes; must be one of {', '.join(of_ten)}")
    return [
        _variant(game(data, "F", play), str(count), "classes", f"--num_classes={count}", *more)
        for play in _PLAYS
        for count, *more in ((2,), (5, "--stop_below=0.8,0.7"), (10, "--stop_below=0.8,0.7"))
    ]


def clients(data: str) -> list[Row]:
    """Figures 1b, 2a and 8 to 10: two to ten clients; for ten, IRM Games stops at 0.75."""

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


def check(config: Config) -> None:
    """Raises UsageError for flags with which a row cannot be told."""
    study.check_one_cell(config)
    if config.method.algorithm == ("fl_games",) and not config.watching.stop_below:
        raise UsageError("--stop_below=: must name a threshold for the games")
    if not config.watching.watch_examples:
        raise UsageError("--watch_examples=0: must be above 0")


def _goes_on(one: Done) -> bool:
    """Whether a row was trained on after the stop."""
    return one.config.watching.after_stop == "continue"


def tell(one: Done) -> Cells:
    """Accuracy and rounds at the stop by the first threshold, or at the end where there is none."""
    runs, logs = one.only.runs, one.only.logs
    if not runs:
        return {"stopped": "diverged"}
    if one.config.watching.stop_below:
        stops = [run["stops"][0] for run in runs]
        told = [stop for stop in stops if stop["round"]]
        train = [stop["train_accuracy"] for stop in told]
        when = f"{len(told)}/{len(stops)} below {stops[0]['threshold']:g}"
    else:
        told = [run["last"] for run in runs]
        train = [lines[-1]["train_by_round"][-1] for lines in logs]
        when = "at the end"
    last = report.percent([run["last"]["test_accuracy"] for run in runs])
    rounds = [each["round"] for each in told]
    return {
        "stopped": when,
        "rounds": report.spread(rounds) if told else f"> {one.config.run.rounds}",
        "train, %": report.percent(train) if told else "",
        "test, %": report.percent([each["test_accuracy"] for each in told]) if told else "",
        "worst domain, %": (
            report.percent([each["worst_accuracy"] for each in told]) if told else ""
        ),
        # Where runs end at their stops, some stand there.
        "test at the last, %": last if _goes_on(one) or not told else "",
        "test at the best validation, %": report.percent(
            [run["selected"]["test_accuracy"] for run in runs]
        ),
    }


def draw_oscillation(path: Path, data: str, done: Sequence[Done]) -> str:
    """The accuracies of the first seed in every round, with the stop; returns where they are."""
    games = [one for one in done if one.only.runs and one.config.watching.stop_below]
    if not games:
        return "No figure: no game is left."
    figure, axes = figures.panels(
        len(games), (5.6, 2.3), x_label="round", y_label="accuracy, %", columns=2
    )
    for one, axis in zip(games, axes, strict=True):
        _curves(axis, one)
        threshold = 100 * one.config.watching.stop_below[0]
        axis.set_title(f"{one.row.label}, stop below {threshold:g}%", fontsize=10)
    figures.entitle(figure, f"{data}, seed {games[0].only.runs[0]['seed']}")
    figures.legend_of(figure, axes)
    figures.save(figure, path)
    return f"Figure: {path}."


def _curves(axis: Axes, one: Done) -> None:
    run, lines = one.only.runs[0], one.only.logs[0]
    curves = {
        kind: [value for line in lines for value in line[f"{kind}_by_round"]]
        for kind in ("train", "test")
    }
    stop, stops = run["stops"][0], [each["round"] for each in run["stops"]]
    length = len(curves["train"]) if _goes_on(one) or not all(stops) else max(stops)
    for kind, color in (("train", "C0"), ("test", "C1")):
        accuracy = 100 * np.array(curves[kind][:length])
        name = "training clients" if kind == "train" else "test client"
        line = "-" if kind == "train" else "--"
        axis.plot(np.arange(1, length + 1), accuracy, line, color=color, lw=1, label=name)
    axis.axhline(100 * stop["threshold"], color="0.6", lw=0.8, ls=":", label="threshold")
    axis.axvline(stop["round"] or np.nan, color="C3", lw=1, ls="-.", label="the stop")
    axis.set_ylim(0, 100)


def draw_scaling(what: str, path: Path, data: str, done: Sequence[Done]) -> str:
    """Rounds and test accuracy at the stop against what varies; returns where they are."""

    def points(
        value: Callable[[dict[str, Any]], float],
    ) -> dict[str, list[tuple[str, list[float]]]]:
        series: dict[str, list[tuple[str, list[float]]]] = {}
        for one in done:
            met = [run["stops"][0] for run in one.only.runs if run["stops"][0]["round"]]
            series.setdefault(one.row.series, []).append((one.row.x, [value(s) for s in met]))
        return series

    quantities = {
        "rounds to the stop": points(lambda stop: stop["round"]),
        "test accuracy at the stop, %": points(lambda stop: 100 * stop["test_accuracy"]),
    }
    study.draw_series(path, data, what, quantities)
    return f"Figure: {path}."


_BY_ROUND: dict[str, study.Draw] = {"_by_round": draw_oscillation}


def _scaling(what: str) -> dict[str, study.Draw]:
    return {"": partial(draw_scaling, what)}


STUDIES = {
    "methods": Study(methods, _BY_ROUND),
    "mixes": Study(mixes, _BY_ROUND),
    "classes": Study(classes, _scaling("classes")),
    "clients": Study(clients, _scaling("training clients")),
    "steps": Study(steps, _BY_ROUND | _scaling("local steps a round")),
}


# The numbers of the paper, mean ± standard deviation in percent. Its Tables 2 and 3 are shifted:
# their rows for two classes are those of Table 1's Fashion and CIFAR-10, so two classes are taken
# from Table 1 here.
_PAPER_DATA = ("colored_mnist", "colored_fashion", "spurious_cifar10", "colored_dsprites")


class Numbers(NamedTuple):
    """What the paper reports of one method on one data set."""

    train: str = ""
    test: str = ""
    rounds: str = ""  # to equilibrium


# Table 1: training and test accuracy on the first two and on the last two of _PAPER_DATA.
_TABLE_1_MNIST = """
FedSGD                    84.88±0.16  10.45±0.60  83.49±1.22  20.13±8.06
FedAvg                    84.45±2.69  12.52±4.34  86.23±0.63  13.33±2.07
FedBN                     99.75±0.11  47.16±3.76  99.79±0.17  41.24±1.87
FedProx                   99.56±0.38  29.31±0.89  99.87±0.12  29.41±0.36
F-sequential              55.76±2.03  66.56±1.58  75.13±1.38  68.40±1.83
F-sequential-SMOOTH       62.83±5.06  66.83±1.83  75.18±0.37  71.81±1.60
F-parallel                58.03±6.22  67.14±2.95  71.71±8.23  69.73±2.12
F-parallel-SMOOTH         61.07±1.71  67.21±2.98  72.81±4.51  71.36±4.19
V-sequential              56.40±0.03  63.78±1.58  69.90±4.56  69.90±1.31
V-sequential-SMOOTH+FAST  61.03±3.11  65.81±3.28  75.10±0.48  69.85±1.22
V-parallel                52.89±8.03  68.34±5.24  66.33±9.39  69.85±3.42
V-parallel-SMOOTH+FAST    63.11±3.02  65.73±1.53  71.89±5.58  69.41±5.49
"""
_TABLE_1_OTHERS = """
FedSGD                    84.79±0.17  12.57±0.55  99.15±1.10  24.12±2.00
FedAvg                    85.41±1.45  13.11±1.82  99.21±1.35  22.56±2.34
FedBN                     95.24±2.34  25.16±4.06  98.09±1.45  25.19±1.78
FedProx                   99.67±0.13  24.76±2.67  85.17±1.95  11.12±0.99
F-sequential              50.36±2.78  45.36±4.33  53.98±3.67  52.89±4.41
F-sequential-SMOOTH       64.02±2.08  45.54±1.04  52.87±3.30  61.45±7.11
F-parallel                55.06±2.04  52.07±1.60  52.88±2.78  56.50±6.23
F-parallel-SMOOTH         56.98±4.09  54.71±2.13  53.65±2.11  62.76±5.97
V-sequential              61.72±7.39  46.07±6.01  51.36±5.32  62.84±7.20
V-sequential-SMOOTH+FAST  50.37±4.97  50.94±3.28  51.55±3.20  68.23±4.56
V-parallel                50.41±3.31  50.43±3.04  53.56±4.91  65.87±6.84
V-parallel-SMOOTH+FAST    45.83±2.44  49.89±5.66  54.25±2.05  68.91±6.47
"""

# Table 4: rounds to equilibrium on all of _PAPER_DATA but the first.
_TABLE_4 = """
F-sequential               158.0 339.5 367.9
F-sequential-SMOOTH        113.2 304.0 257.0
F-parallel                 134.2 237.4 233.1
F-parallel-SMOOTH           58.4 217.6 210.4
V-sequential               454.8 557.6 628.6
V-sequential-SMOOTH+FAST   189.0 363.3 455.5
V-parallel                 367.3 498.7 520.9
V-parallel-SMOOTH+FAST     127.8 102.4 203.0
"""

# Tables 2 and 3: training and test accuracy with 5 and 10 classes, on the first two of _PAPER_DATA.
_TABLE_2_3 = """
F-sequential-5-classes     79.39±0.91 69.90±3.16  77.28±1.54 69.35±0.66
F-sequential-10-classes    82.27±0.76 69.22±3.11  80.02±0.38 71.22±3.00
F-parallel-5-classes       78.61±2.86 68.42±2.54  77.61±1.51 70.83±0.96
F-parallel-10-classes      82.17±1.21 69.29±3.17  80.12±0.78 70.39±2.28
"""

# Figures 8 and 9 (b): training and test accuracy by the number of clients, on Fashion and CIFAR-10.
_FIGURES_8_9 = """
F-sequential-2-clients          59.85±7.80 65.99±2.44  50.37±3.07 48.70±4.12
F-sequential-3-clients          53.76±5.46 67.22±0.93  48.61±1.40 59.31±12.45
F-sequential-5-clients          57.64±2.57 67.75±0.52  56.70±6.25 45.27±0.42
F-sequential-5_uneven-clients   56.48±2.10 67.17±0.84  62.62±6.84 47.27±3.81
F-sequential-10-clients         57.40±1.67 68.94±1.35  52.40±1.44 50.97±0.92
F-parallel-2-clients            58.29±4.31 69.38±3.61  57.13±4.82 50.50±2.70
F-parallel-3-clients            61.10±1.68 69.88±2.82  55.15±2.99 53.97±1.06
F-parallel-5-clients            60.00±5.78 68.57±2.86  54.72±1.07 51.91±0.50
F-parallel-5_uneven-clients     66.82±2.55 66.95±2.41  54.77±2.39 53.40±1.83
F-parallel-10-clients           63.86±3.60 70.71±2.99  52.67±1.11 53.50±0.84
"""


def _pairs(table: str, data: tuple[str, ...]) -> dict[tuple[str, str], Numbers]:
    numbers = {}
    for line in table.strip().splitlines():
        method, *cells = line.split()
        for index, name in enumerate(data):
            numbers[method, name] = Numbers(*cells[2 * index : 2 * index + 2])
    return numbers


def _all() -> dict[tuple[str, str], Numbers]:
    numbers = _pairs(_TABLE_1_MNIST, _PAPER_DATA[:2]) | _pairs(_TABLE_1_OTHERS, _PAPER_DATA[2:])
    for line in _TABLE_4.strip().splitlines():
        method, *cells = line.split()
        for name, rounds in zip(_PAPER_DATA[1:], cells, strict=True):
            numbers[method, name] = numbers[method, name]._replace(rounds=rounds)
    for play in ("F-sequential", "F-parallel"):
        for name in _PAPER_DATA[:2]:
            numbers[f"{play}-2-classes", name] = numbers[play, name]
    return numbers | _pairs(_TABLE_2_3, _PAPER_DATA[:2]) | _pairs(_FIGURES_8_9, _PAPER_DATA[1:3])


# (a row's label, data set) -> the paper's numbers.
NUMBERS = _all()


def numbers(label: str, data: str) -> Cells:
    """The paper's numbers of a row."""
    told = NUMBERS.get((label, data), Numbers())
    return {f"paper: {name}": value for name, value in told._asdict().items()}


PAPER = study.Paper(
    "fl_games",
    DATA,
    STUDIES,
    tell,
    numbers,
    caption=(
        "Mean ± standard deviation over seeds, each of which draws its own environments, unless "
        "--data_seed fixes them. Games: at the stop, over seeds that stopped, training accuracy on "
        "all examples. Baselines: at the end, training accuracy on --watch_examples."
    ),
    last={
        **dict.fromkeys(("train, %", "test, %", "worst domain, %"), "75"),
        **dict.fromkeys(("paper: train", "paper: test"), "75"),
    },
    check=check,
)


if __name__ == "__main__":
    study.main(PAPER, __doc__)
