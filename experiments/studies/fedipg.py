"""The tables and figures of FedIPG (Hao et al. 2025, arXiv 2503.06158), and open questions.

fedjax-inv paper fedipg --study=colours --data=colored_mnist

Studies: colours (FedIPG where its penalty acts, beside FL Games), ends (the round that a rule
selects, for several rules and strengths of the colour), domains (Table II), penalties (Fig. 4:
FedIPG by its penalty, 50 clients), combinations (Fig. 5: ten rules from digit to colour, each held
out), stains (Table III, Fig. 7: coloured strokes, grounds or both), exit (Fig. 3: one of twenty
clients is slow, lossy or rotated, and may leave). Any flag of `train` applies to all rows; every
seed draws its environments anew.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..folder import selection
from ..folder.records import Line, RunResult
from ..folder.selection import RULES, Pick
from ..report import forms
from . import drawings, exit_strategy, study
from .row_runs import RowResult
from .rows import Row
from .study import Cells, Study

DATA = (
    "colored_mnist",
    "colored_digits",
    "rotated_digits",
    "rotated_mnist",
    "pacs",
    "vlcs",
    "mnist",
    "digits",
    "cifar10",
    "colored_moved_digits",
)
_COLORED = {"colored_mnist": "colored_mnist_14", "colored_digits": "colored_digits_small"}


def _adaptive(data: str, work: str, more: str = "") -> tuple[str, ...]:
    """Flags of an adaptive server with local epochs or full batches (`work`)."""
    small = ",adaptive_small" if data.endswith("_digits") else ""
    return (f"--preset={_COLORED[data]},adaptive_{work}{small}{more}",)


def _fedipg(data: str, work: str) -> tuple[str, ...]:
    """Flags of FedIPG where its penalty acts. The warm-up ends when the cue is learned."""
    flags = _adaptive(data, work, ",fedipg_acts")
    if data.endswith("_digits"):  # too few validation examples for the domains to differ
        return (*flags, "--set=warmup_rounds=60", "--set=penalty=10000.0", "--select=last")
    if work == "full_batch":  # the penalty that the rule chooses with epochs
        return (*flags, "--set=warmup_rounds=50", "--set=penalty=10000.0")
    return (*flags, "--set=warmup_rounds=20")


def _game(data: str, play: str) -> Row:
    """FL Games on the same data and network, but with its paper's ELU in place of ReLU."""
    preset = f"--preset={data}_f,games_{play},{_COLORED[data]}"
    # A small network begins to swing later; a higher learning rate makes it faster.
    small = ("--learning_rate=0.01", "--warm_start=20") if data == "colored_digits" else ()
    return Row(f"F-{play}", (preset, *small))


def colours(data: str) -> list[Row]:
    """FedAvg, FedIPG with local epochs and with full batches, and FL Games."""
    return [
        Row("FedAvg-epochs", _adaptive(data, "epochs")),
        Row("FedIPG-epochs", _fedipg(data, "epochs")),
        Row("FedIPG-full-batch", _fedipg(data, "full_batch")),
        _game(data, "sequential"),
        _game(data, "parallel"),
    ]


_DOMAINS = ("rotated_mnist", "pacs", "rotated_digits")
_SWEPT = (0.0, 1e-4, 1e-3, 1e-2, 0.1, 1.0)  # Fig. 4's range and beyond


def penalties(data: str) -> list[Row]:
    """Fig. 4: FedIPG by penalty and penalised part, with 50 clients, five a round."""
    own = ("--clients=50", "--cohort=5"), "--learning_rate=0.05"
    clients, rate = ((), "--learning_rate=0.2") if data == "rotated_digits" else own
    swept = f"--set=penalty={','.join(map(str, _SWEPT))}"
    flags = (f"--preset={data}_domains", *clients, "--algorithm=fedipg", rate, swept)
    return [
        Row(f"penalty on {part}", (*flags, f"--set=penalty_on={part}"), part)
        for part in ("all", "classifier")
    ]


# Table III: coloured part -> number of clients, and examples of each; fewer for digits.
_STAINS = {
    "mnist": {"foreground": (5, 600), "background": (5, 2000), "both": (20, 2000)},
    "digits": {"foreground": (5, 100), "background": (5, 250), "both": (20, 70)},
}


def stains(data: str) -> list[Row]:
    """Table III: the colour follows the label, but in the test the opposite label."""
    rates = "--learning_rate=0.02,0.05,0.1,0.2"
    rows = []
    for stain, (num_clients, size) in _STAINS[data].items():
        preset = f"--preset=stained_{data}"
        acts = "stained_adaptive,fedipg_acts"
        sizes = f"--training_domains={num_clients}", f"--domain_size={size}"
        of_stain = (f"--stain={stain}", *sizes)
        methods = {
            "ERM": (preset, "--algorithm=erm", rates),
            "FedAvg": (preset, "--algorithm=fedavg", rates),
            "FedIPG": (preset, "--algorithm=fedipg", rates, "--set=penalty=0.001,0.01"),
            # Where the penalty acts, and FedAvg with the same server.
            "FedAvg-adaptive": (f"{preset},stained_adaptive", rates),
            "FedIPG-adaptive": (f"{preset},{acts}", "--learning_rate=0.05,0.1"),
        }
        rows += [Row(f"{stain} {name}", (*flags, *of_stain)) for name, flags in methods.items()]
    return rows


# The mean probability that the colour fits the label for the clients; 0.85 in Colored MNIST.
_STRENGTHS = ("0.5", "0.6", "0.7", "0.8", "0.9", "0.95", "0.99")
_MOVED = "colored_moved_digits"
_MOVED_FLAGS = (
    "--preset=first_look_colour,adaptive_full_batch,fedipg_acts",
    "--batch_size=1000",
    "--server_learning_rate=0.01",
    "--set=warmup_rounds=300",
    "--rounds=700",
    "--eval_every=10",
    "--checkpoint_every=350",
)


def ends(data: str) -> list[Row]:
    """FedIPG with two clients, with ten, with all pixels, and with a weaker and stronger colour."""
    flags = (
        *(_MOVED_FLAGS if data == _MOVED else _fedipg(data, "epochs")),
        "--set=penalty=10000.0",
        "--select=last",
    )
    rows = [Row("two-clients", flags), Row("ten-clients", (*flags, "--clients=10"))]
    if data != _MOVED:
        rows.append(Row("28x28", (*flags, "--stride=1")))
    for strength in _STRENGTHS:
        wrong = 1 - float(strength)
        step = min(0.05, wrong)
        flips = f"{wrong + step:.2f},{wrong - step:.2f}"
        rows.append(Row(f"strength-{strength}", (*flags, f"--flips={flips}")))
    return rows


_SCORES = {
    "training domains, %": "validation_score",
    "test, %": "test_score",
    "worst domain, %": "worst_score",
}


def _accuracies(result: RowResult) -> Cells:
    """Accuracies of the selected evaluations."""
    runs = result.only.runs
    pairs = _selected(result)
    picked = [at for _, at in pairs]
    rule: str = result.config.evaluation.select
    if result.config.evaluation.stop_below:
        rule = f"the stop, {len(picked)} of {len(runs)}"
    hyper = runs[0].hyper
    sent = [_megabytes(run, at) for run, at in pairs]
    return {
        "selected by": rule,
        "penalty": f"{hyper['penalty']:g}" if "penalty" in hyper else "",
        "at round": forms.spread([each.round for each in picked]) if picked else "",
        **study.texts(picked, _SCORES),
        "test at the last, %": study.percent([run.last for run in runs], "test_score"),
        "MB sent by then": forms.spread(sent) if sent else "",
    }


def _selected(result: RowResult) -> list[tuple[RunResult, study.Evaluation]]:
    """(run, its selected evaluation); of a game the stop, and only runs that stopped."""
    if not result.config.evaluation.stop_below:
        return [(run, run.choice) for run in result.only.runs]
    return [(run, run.stop) for run in result.only.runs if run.stop]


def _megabytes(run: RunResult, at: study.Evaluation) -> float:
    """Megabytes sent before an evaluation, or before a stop: a game's rounds send equally many."""
    if isinstance(at, Line):
        return at.bytes / 1e6
    last = run.last
    return float(last.bytes / last.played * at.round / 1e6)


_scores = study.scores_by_seed(
    _SCORES, lambda result: {run.seed: line for run, line in _selected(result)}
)


def _held(lines: Sequence[Line], times: int = 1) -> Line | None:
    """A rule: the evaluation at which the domains agree for so many evaluations in a row."""
    return _in_a_row(selection.after_difference(lines), selection.agrees, times)


def _in_a_row(lines: Sequence[Line], holds: Callable[[Line], bool], times: int = 1) -> Line | None:
    """The first line that is the last of so many in a row for which something holds."""
    count = 0
    for line in lines:
        count = count + 1 if holds(line) else 0
        if count == times:
            return line
    return None


def _risks_agree(line: Line) -> bool:
    """Whether the losses of the domains differ no more than by chance, as the accuracies do.

    The variance of a loss is that of a network whose every prediction is as sure as the whole is
    right: a (1 - a) log(a / (1 - a))^2 at an accuracy of a.
    """
    domains = [each for each in line.domains.values() if each.split == "validation"]
    losses = [each.loss for each in domains if each.loss is not None]
    if len(losses) < len(domains):
        return False
    counts = np.array([each.examples for each in domains])
    right = np.average([each.score for each in domains], weights=counts)
    if not 0 < right < 1:
        return False
    variance = right * (1 - right) * np.log(right / (1 - right)) ** 2
    mean = np.average(losses, weights=counts)
    between = float(np.sum(counts * (np.array(losses) - mean) ** 2))
    return between <= float((len(domains) - 1) * variance)


def _both(lines: Sequence[Line]) -> Line | None:
    """A rule: the first evaluation at which accuracies and risks agree."""
    after = selection.after_difference(lines)
    return _in_a_row(after, lambda line: selection.agrees(line) and _risks_agree(line))


def _level(lines: Sequence[Line]) -> Line | None:
    """A rule: after agreement, the first evaluation at which validation no longer falls.

    It and the two before it are in the mean at least as good as the three before those.
    """
    first = _held(lines)
    after = selection.after_difference(lines)
    if first is None:
        return None
    scores = [line.validation_score for line in after]
    for at in range(max(after.index(first), 5), len(after)):
        if np.mean(scores[at - 2 : at + 1]) >= np.mean(scores[at - 5 : at - 2]):
            return after[at]
    return after[-1]


_ENDS: dict[str, Pick] = {
    "agreement": RULES["agreement"].pick,
    **{f"agreement {times} times": partial(_held, times=times) for times in (2, 3, 5)},
    "agreement of accuracies and risks": _both,
    "level after agreement": _level,
    "last agreement": lambda lines: _in_a_row(
        selection.after_difference(lines)[::-1], selection.agrees
    ),
    **{name: RULES[name].pick for name in ("last_if_agreed", "last", "validation", "oracle")},
}


def _by_end(result: RowResult) -> Cells:
    """Test accuracy and mean round by rule.

    If a rule picks none for some seeds, their last round counts; if for all, there is no accuracy.
    """
    cells = {}
    for name, pick in _ENDS.items():
        found = [pick(selection.candidates(lines)) for lines in result.only.logs]
        if not any(found):
            cells[f"{name}, %"] = "none"
            continue
        lines = [line or log[-1] for line, log in zip(found, result.only.logs, strict=True)]
        none = f", none for {found.count(None)}" if None in found else ""
        mean = np.mean([line.played for line in lines])
        cells[f"{name}, %"] = f"{study.percent(lines, 'test_score')} (round {mean:.0f}{none})"
    return cells


def _by_penalty(result: RowResult) -> Cells:
    """Test accuracy by penalty, the mean over held-out domains."""
    tests = {penalty: _of_domains(result, penalty) for penalty in _SWEPT}
    return {
        f"penalty {penalty:g}, %": "diverged" if test is None else forms.percent(test.mean(0))
        for penalty, test in tests.items()
    }


def _of_domains(result: RowResult, penalty: float) -> np.ndarray | None:
    """Test accuracies [held-out domains, seeds] at one penalty; None if a run diverged."""
    tests = []
    for cell in result.cells:
        runs = [run for run in cell.result.runs if run.hyper["penalty"] == penalty]
        if any(run.diverged for run in runs):
            return None
        lines = (selection.picked_or_last(run, result.config.evaluation.select) for run in runs)
        tests.append([line.test_score for line in lines])
    return np.array(tests)


def draw_penalties(path: Path, data: str, results: Sequence[RowResult]) -> str:
    """Fig. 4: mean and worst test accuracy over held-out domains, by penalty."""

    def values(result: RowResult, penalty: float, over: Callable[..., Any]) -> list[float]:
        tests = _of_domains(result, penalty)
        return [] if tests is None else [*(100 * over(tests, axis=0))]

    quantities: dict[str, Callable[..., Any]] = {
        "mean of held-out domains, %": np.mean,
        "worst held-out domain, %": np.min,
    }
    points = {
        quantity: {
            result.row.label: [(f"{at:g}", values(result, at, over)) for at in _SWEPT]
            for result in results
        }
        for quantity, over in quantities.items()
    }
    return drawings.against(path, f"{data}: FedIPG", "penalty", points)


def draw_by_round(path: Path, data: str, results: Sequence[RowResult]) -> str:
    """Test accuracy by round and by megabytes sent."""
    complete = [result for result in results if result.is_complete]
    panels = []
    for key, x_label, x_scale in (("round", "round", "linear"), ("bytes", "MB sent in all", "log")):
        lines = {result.row.label: _curves(result, key) for result in complete}
        panels.append(drawings.Panel(lines, "", x_label, "test accuracy, %", x_scale))
    title = f"{data}: a large dot where the rule of a seed selects"
    return drawings.lines(path, title, panels, (5.5, 4.4), percent=True)


def _curves(result: RowResult, key: str) -> drawings.Curve:
    """The curves of a row against rounds or bytes, with a dot at what each seed serves."""
    x, y = zip(*(_curve(log, key) for log in result.only.logs), strict=True)
    dots = [
        (at.round if key == "round" else _megabytes(run, at), 100 * at.test_score)
        for run, at in _selected(result)
    ]
    return drawings.Curve(np.array(x), 100 * np.array(y), dots)


def _curve(lines: Sequence[Line], key: str) -> tuple[np.ndarray, np.ndarray]:
    """Rounds or megabytes, and test accuracy: of every round if watched, or of evaluations."""
    scale, last = 1e-6 if key == "bytes" else 1, lines[-1]
    if last.test_by_round is not None:
        test = np.concatenate([line.test_by_round or [] for line in lines])
        return np.arange(1, len(test) + 1) * (scale * getattr(last, key) / last.round), test
    if key == "bytes":  # a logarithmic axis has no 0
        lines = selection.trained(lines)
    test = np.array([line.test_score for line in lines])
    return np.array([scale * getattr(line, key) for line in lines]), test


def draw_stains(path: Path, data: str, results: Sequence[RowResult]) -> str:
    """Fig. 7: test accuracy by round, a panel per stain."""
    lines: dict[str, dict[str, drawings.Curve]] = {}
    for result in results:
        stain, _, method = result.row.label.partition(" ")
        if result.is_complete:
            lines.setdefault(stain, {})[method] = study.curve(result)
    panels = [
        drawings.Panel(of, f"stained: {stain}", "round", "test accuracy, %")
        for stain, of in lines.items()
    ]
    return drawings.lines(path, data, panels, (4.4, 3.8), percent=True)


NUMBERS = study.numbers_of("fedipg")


def numbers(result: RowResult, data: str) -> Cells:
    """The paper's numbers of a row."""
    at = (result.row.label, data)
    return {f"paper: {each.column}": each.value for each in NUMBERS if (each.row, each.data) == at}


_ABOUT_SELECTION = (
    "Rules of selection: agreement, the first evaluation at which the training domains differ no "
    "more than by chance; last_if_agreed, the last one, if there is one of agreement; validation, "
    "the best one on the training domains; games, at the stop."
)
_ABOUT_ENDS = (
    "Test accuracy by rule, with the mean round; a seed for which a rule picks none counts with "
    "its last round. Agreement: the first evaluation at which the training domains, which had "
    "differed, differ no more than by chance; 2, 3 and 5 times: the second, third and fifth such "
    "evaluation in a row; of accuracies and risks: their losses agree, too; level after agreement: "
    "from agreement on, the first at which the mean validation accuracy of three evaluations is at "
    "least that of the three before; last agreement: the last one that agrees; last_if_agreed: the "
    "last one, if any agrees; validation: the best one on the training domains; oracle: the best "
    "one in the test."
)
# Tables of what a rule selects, of a domain or of each held-out domain.
_selected_by = partial(Study, numbers=numbers, caption=_ABOUT_SELECTION)
PAPER = study.Paper(
    "fedipg",
    DATA,
    {
        "colours": _selected_by(
            colours,
            _accuracies,
            figures={"_by_round": draw_by_round},
            compared=_scores,
            data=tuple(_COLORED),
        ),
        "domains": study.of_file("fedipg_domains"),
        "penalties": Study(penalties, _by_penalty, numbers, {"": draw_penalties}, data=_DOMAINS),
        "combinations": study.of_file("fedipg_combinations"),
        "stains": _selected_by(stains, _accuracies, figures={"": draw_stains}, data=tuple(_STAINS)),
        "ends": Study(ends, _by_end, data=("colored_mnist", _MOVED), caption=_ABOUT_ENDS),
        "exit": Study(
            exit_strategy.leaving,
            exit_strategy.exit_columns,
            numbers,
            exit_strategy.FIGURES,
            data=exit_strategy.DATA,
            caption="At the last round, on the validation examples of all clients but client 0, "
            "if it is rotated. Client 0 / median: its mean contribution in pre-training, and that "
            "of the median client; it leaves below 0.",
        ),
    },
    caption="Mean ± standard deviation over seeds, each of which draws its own environments.",
    diverged=lambda one: {
        "selected by": one.config.evaluation.select,
        "test, %": study.why_none(one),
    },
)
