"""A first look: five methods against three kinds of shift, on scikit-learn's digits.

fedjax-inv paper first_look

Kinds of shift: a colour that predicts the label better than the digit does, and misleads in the
test; an unseen angle; and clients with few labels each, of which half seldom upload. Methods:
FedAvg, FedIPG, FL Games, FedCFA and CAFE, with one network, one budget of rounds and local steps
and one draw of the data per seed for each kind. All serve the network of the last round; FL Games
under the misleading colour that of its stop. Any flag of `train` applies to all rows.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ..report import forms
from . import data_strips, study
from .row_runs import RowResult
from .rows import Row
from .study import Cells, Study


class LookShift(NamedTuple):
    """A kind of shift."""

    title: str
    preset: str
    chance: float  # the test accuracy of guessing, in percent
    methods: dict[str, tuple[str, ...]]  # the flags of each


# Programs this small take longer to compile than to run. One device needs the shortest program, and
# the methods' numbers are then nearly the same on every machine.
_QUICK = ("--devices=1", "--noeval_start", "--select=last")
# The same server for all methods but the game, which has none: each player trains its own network.
_ADAPTIVE = ("--server_optimizer=adam", "--server_learning_rate=0.01", "--server_epsilon=1e-8")
_STEP = ("--local_steps=1", "--learning_rate=1", *_ADAPTIVE)
_IPG = ("--algorithm=fedipg", "--set=penalty_on=classifier", "--set=scale_loss=true")
_CFA = ("--algorithm=fedcfa", "--cut=1")
_PLAIN = {
    "FedAvg": (),
    "FedIPG": ("--algorithm=fedipg", "--set=penalty=0.001"),
    "FL Games": ("--algorithm=fl_games",),
    "FedCFA": _CFA,
    "CAFE": ("--algorithm=cafe",),
}
SHIFTS = {
    "colour": LookShift(
        "misleading colour",
        "first_look_colour",
        50.0,
        {
            "FedAvg": _STEP,
            "FedIPG": (*_STEP, *_IPG, "--set=penalty=10000.0", "--set=warmup_rounds=150"),
            # Players train whole networks here. Under the other shifts they do better, by
            # validation on other draws, with the last layer over a random one.
            "FL Games": (
                "--algorithm=fl_games",
                "--cut=0",
                "--local_steps=1",
                "--optimizer=adam",
                "--learning_rate=0.01",
                "--watch_examples=1000",
                "--stop_below=0.6",
                "--after_stop=end",
            ),
            "FedCFA": (*_STEP, *_CFA),
            # Its drift directions need a momentum, which changes nothing in a single step.
            "CAFE": (*_STEP, "--algorithm=cafe", "--momentum=0.9"),
        },
    ),
    "angle": LookShift("unseen angle", "first_look_rotated", 10.0, _PLAIN),
    "labels": LookShift("label skew, rare uploads", "first_look_labels", 10.0, _PLAIN),
}


def rows(data: str) -> list[Row]:
    """A row for each kind of shift and method, on the only data set."""
    found = []
    for name, shift in SHIFTS.items():
        for method, own in shift.methods.items():
            flags = (f"--preset={shift.preset}", *_QUICK, *own)
            found.append(Row(f"{name}-{method.replace(' ', '-')}", flags, name, method))
    return found


def served(result: RowResult) -> list[study.Evaluation]:
    """The evaluation of what each seed serves: that of the stop, else that of its rule."""
    return [run.stop or run.choice for run in result.only.runs]


def _columns(result: RowResult) -> Cells:
    lines = served(result)
    select = result.config.evaluation.select
    rule: str = "last round" if select == "last" else select
    if result.config.evaluation.stop_below:
        stopped = sum(run.stop is not None for run in result.only.runs)
        rule = f"stop, {stopped} of {len(lines)}"
    return {
        "test, %": study.percent(lines, "test_score"),
        "worst domain, %": study.percent(lines, "worst_score"),
        "training domains, %": study.percent(lines, "validation_score"),
        "selected by": rule,
        "at round": forms.spread([line.round for line in lines], ".0f"),
        "MB sent": study.megabytes(result),
    }


def draw(path: Path, data: str, results: Sequence[RowResult]) -> str:
    """A strip of the data, and bars of the test accuracies below, for each kind of shift."""
    panels = []
    for name, shift in SHIFTS.items():
        shown = [result for result in results if result.row.series == name]
        bars = {one.row.x: study.percents(served(one)) for one in shown if one.is_complete}
        if bars:
            strip = data_strips.strip(shown[0].config)
            panels.append(data_strips.StripPanel(shift.title, strip, bars, shift.chance))
    was_run = {result.row.x for result in results}
    return data_strips.draw(path, panels, [name for name in _PLAIN if name in was_run])


PAPER = study.Paper(
    "first_look",
    ("digits",),
    {"shifts": Study(rows, _columns, figures={"": draw}, draws_rows=False)},
    caption=(
        "Mean ± standard deviation over seeds, each of which draws its own clients and test. "
        "Training domains: validation examples of the clients. Chance is 50% for the colour, where "
        "75% is optimal, and 10% otherwise."
    ),
    diverged=lambda result: {"test, %": study.why_none(result)},
)
