"""The tables and figures of FedCFA (Jiang et al. 2025, arXiv 2412.18904).

fedjax-inv paper fedcfa --study=methods --data=fashion_mnist

Studies: methods (Tables 1 to 3 and I to III, and Fig. 5, on one partition), partitions (the columns
of those tables for FedAvg, FedMix and FedCFA), ablation (Table 4), hooks (Table 5), correlation
(Table IV), loss_grid (Fig. 6), factors (Fig. III), simpson (Fig. 4). Any flag of `train` applies
to all rows: --alpha=0.2 --run_dir=ELSEWHERE is another partition. Table II is --data=femnist with
--dataset=PATH, or --data=sent140 with --dataset=sentiment140:PATH; Tiny-ImageNet is
--data=cifar10_resnet with the PATH of an .npz of it. Fig. I is partition.png in the folder of each
row.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from ..assembly import grid, method
from ..config import Config
from ..folder import selection
from ..folder.records import Line, Result
from ..report import forms
from . import drawings, factors, row_runs, study
from .row_runs import RowResult
from .rows import Row
from .study import Cells, Study


class CfaSetting(NamedTuple):
    """A data set with its network."""

    preset: str
    hook: int  # the number of layers, or stages, before FedCFA's factors
    hooks: dict[int, int]  # of the study `hooks`, with the number of their factors
    rates: tuple[float, ...] = (0.003, 0.01, 0.03, 0.1)  # learning rates of all methods
    rows: int = 16  # how many averages a client sends


SETTINGS = {
    "fashion_mnist": CfaSetting("fashion_mnist_dir60", 1, {1: 200, 2: 200}),
    "fashion_mnist_cnn": CfaSetting("fashion_mnist_dir60_cnn", 2, {1: 8, 2: 16, 3: 64}),
    "mnist": CfaSetting("mnist_dir60", 1, {1: 200, 2: 200}),
    "cifar10": CfaSetting("cifar10_dir60", 2, {1: 8, 2: 16, 3: 64}),
    # The paper replaces as many of hook 4's 256 factors as of 64.
    "cifar10_resnet": CfaSetting("cifar10_dir60_resnet", 2, {1: 64, 2: 64, 4: 64}),
    "digits": CfaSetting("digits_dir10", 1, {1: 64, 2: 64}, (0.01, 0.03, 0.1, 0.3)),
    "femnist": CfaSetting("femnist_users", 2, {1: 32, 2: 64}),
    # An average of texts has the weights of all words at each place, so clients send few.
    "sent140": CfaSetting("sent140_users", 1, {1: 50}, rows=4),
}


def _preset(data: str) -> str:
    return f"--preset=fedcfa_paper,{SETTINGS[data].preset}"


def _fedcfa(data: str, *settings: str) -> tuple[str, ...]:
    """Flags of FedCFA with the paper's settings; `settings` (name=value) replace some of them."""
    chosen = SETTINGS[data]
    named = {"positive_weight": "5.0", "negative_weight": "5.0"}
    named |= {"rows": str(chosen.rows)} if chosen.rows != 16 else {}
    named |= dict(setting.split("=") for setting in settings)
    return (
        _preset(data),
        "--algorithm=fedcfa",
        f"--cut={chosen.hook}",
        *(f"--set={name}={value}" for name, value in named.items()),
    )


def methods(data: str) -> list[Row]:
    """Seven methods, which choose among four learning rates.

    SCAFFOLD's rates are five times those of the others. A method's other hyperparameters are those
    of its paper. FedMix's ratio is 0.05 for all data; its paper has 0.1 for CIFAR-100.
    """
    rates = SETTINGS[data].rates
    four = f"--learning_rate={study.listed(rates)}"
    # SGD without momentum needs larger steps.
    plain = ("--momentum=0", f"--learning_rate={study.listed([5 * rate for rate in rates])}")
    tuned = {
        "FedAvg": ("--algorithm=fedavg", four),
        "FedProx": ("--algorithm=fedprox", four, "--set=proximal=0.01"),
        "SCAFFOLD": ("--algorithm=scaffold", *plain, "--set=weighting=size"),
        "FedPVR": ("--algorithm=fedpvr", four, "--set=weighting=size"),
        # One step size for all rates: with a small q it matters little.
        "q-FedAvg": ("--algorithm=qfedavg", four, "--set=q=0.001", f"--set=step_size={rates[2]:g}"),
        "FedMix": ("--algorithm=fedmix", four, "--set=ratio=0.05"),
    }
    return [
        *(Row(name, (_preset(data), *flags), name) for name, flags in tuned.items()),
        Row("FedCFA", (*_fedcfa(data, "decorrelation_weight=0.1"), four), "FedCFA"),
    ]


_IID = ("--partition=iid", "--alpha=0.5")  # alpha's default, which has no effect
_PARTITIONS = {
    "Dir60(0.2)": ("--alpha=0.2",),
    "Dir60(0.6)": (),
    "IID60": _IID,
    "Dir100(0.2)": ("--alpha=0.2", "--clients=100", "--cohort=20"),
    "Dir100(0.6)": ("--clients=100", "--cohort=20"),
    "IID100": (*_IID, "--clients=100", "--cohort=20"),
}


_COMPARED = ("FedAvg", "FedMix", "FedCFA")
_BY_USER = {"Non-IID": (), "IID60": _IID, "Dir60(0.6)": ("--partition=dirichlet", "--alpha=0.6")}


def partitions(data: str) -> list[Row]:
    """Three methods on the paper's six partitions, or on three of data with users.

    On one partition the runs are those of `methods`.
    """
    compared = row_runs.with_labels(methods(data), _COMPARED)
    rows = []
    for name, flags in (_BY_USER if data in ("femnist", "sent140") else _PARTITIONS).items():
        for row in compared:
            label = f"{row.label}-{grid.folder_name(name)}" if flags else row.label
            rows.append(Row(label, (*row.flags, *flags), row.label, name))
    return rows


# Some studies compare hyperparameters in the columns of a row, which is one program:
# study (the row's series) -> column -> hyperparameters of its runs.
_R = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0)
_COLUMNS: dict[str, dict[str, dict[str, float]]] = {
    "ablation": {
        "Cls.": {"positive_weight": 0.0, "negative_weight": 0.0},
        "Cls.+Pos.": {"positive_weight": 5.0, "negative_weight": 0.0},
        "Cls.+Neg.": {"positive_weight": 0.0, "negative_weight": 5.0},
        "Cls.+Pos.+Neg.": {"positive_weight": 5.0, "negative_weight": 5.0},
    },
    "correlation": {
        f"{weight:g}": {"decorrelation_weight": weight} for weight in (0.0, 0.001, 0.01, 0.1, 1.0)
    },
    "loss_grid": {
        f"{positive:g}/{negative:g}": {"positive_weight": positive, "negative_weight": negative}
        for negative in _R
        for positive in _R
    },
}


def _without_and_with_fdc(data: str, study: str, *settings: str, flag: str) -> list[Row]:
    """Two rows of a study with columns: FedCFA without decorrelation, and with it."""
    weights = {"without-FDC": "0.0", "with-FDC": "0.1"}
    rows = []
    for name, weight in weights.items():
        flags = (*_fedcfa(data, *settings, f"decorrelation_weight={weight}"), flag)
        rows.append(Row(f"{study.removeprefix('loss_')}-{name}", flags, study))
    return rows


def ablation(data: str) -> list[Row]:
    """Table 4: each of the counterfactual losses on and off, with and without decorrelation.

    Factors are ranked by the signed gradient, as in the release, or by its magnitude.

    Each combination chooses its learning rate, since a loss with a weight of 5 enlarges the steps.
    """
    weights = ("positive_weight=0.0,5.0", "negative_weight=0.0,5.0")
    rates = f"--learning_rate={study.listed(SETTINGS[data].rates)}"
    signed = _without_and_with_fdc(data, "ablation", *weights, flag=rates)
    return [*signed, *(_at_scores(row, "magnitude") for row in signed)]


def _at_scores(row: Row, scores: str) -> Row:
    """A row of FedCFA whose factors are ranked by other scores than the release's."""
    flags = (*row.flags, f"--set=scores={scores}")
    return row._replace(label=f"{row.label}-{scores}", flags=flags)


def loss_grid(data: str) -> list[Row]:
    """Fig. 6: the weights of the counterfactual losses, with and without decorrelation."""
    weights = (f"positive_weight={study.listed(_R)}", f"negative_weight={study.listed(_R)}")
    return _without_and_with_fdc(data, "loss_grid", *weights, flag="--seeds=0")


def correlation(data: str) -> list[Row]:
    """Table IV: the weight of decorrelation.

    The counterfactual losses train only the head, as in the authors' code, or the whole network.
    """
    weights = f"decorrelation_weight={','.join(_COLUMNS['correlation'])}"
    return [
        Row(f"correlation-{name}", _fedcfa(data, weights, f"detach={detach}"), "correlation")
        for name, detach in (("head", "true"), ("all", "false"))
    ]


def hooks(data: str) -> list[Row]:
    """Table 5: the layer of the factors, and how many are replaced.

    The paper's hook 0, the input, is left out: an image has fewer channels than are replaced.
    """
    rows = []
    for hook, num_factors in SETTINGS[data].hooks.items():
        for eighths in (1, 2, 3, 4):
            top_k = str(num_factors * eighths // 8)
            # Of two flags --cut the last one counts.
            flags = (*_fedcfa(data, f"top_k={top_k}"), f"--cut={hook}")
            rows.append(Row(f"hook-{hook}-top_k-{top_k}", flags, f"hook {hook}", top_k))
    return rows


def clients_factors(data: str) -> list[Row]:
    """Fig. III: the factors on which three methods train, behind FedCFA's layer, of one seed."""
    flags = (f"--cut={SETTINGS[data].hook}", "--seeds=0")
    compared = row_runs.with_labels(methods(data), _COMPARED)
    return [Row(f"factors-{row.label}", (*row.flags, *flags)) for row in compared]


def simpson(data: str) -> list[Row]:
    """Fig. 4: clients with misleading colours, from one network trained on random colours.

    The preset selects the last round, because the colours mislead validation, too. The paper's
    colours are those of --hues.
    """
    flags = (f"{_preset(data)},simpson_five", f"--cut={SETTINGS[data].hook}")
    pretraining = (
        "--algorithm=erm",
        "--shading=random",
        "--local_steps=1",
        "--rounds=200",
        "--checkpoint_every=200",
        "--stop_above=0.95",
        "--after_stop=end",
        "--watch_examples=2000",
    )
    first = Row("simpson-pretrained", (*flags, *pretraining))
    positives = ("positive_weight=0.5", "negative_weight=0.0")
    compared = {
        "FedAvg": (*flags, "--algorithm=fedavg"),
        "FedMix": (*flags, "--algorithm=fedmix"),
        "FedCFA": (*_fedcfa(data), *flags),
        "FedCFA-positives-0.5": (*_fedcfa(data, *positives), *flags),
    }
    without = (*_fedcfa(data, *positives, "decorrelation_weight=0.0"), *flags)
    compared["FedCFA-positives-0.5-without-FDC"] = without
    start = f"{first.folder}/erm-test"
    by_magnitude = ("FedCFA", "FedCFA-positives-0.5")
    compared |= {
        f"{name}-magnitude": (*compared[name], "--set=scores=magnitude") for name in by_magnitude
    }
    rows = [
        Row(f"simpson-{name}", own, name, "Simpson's paradox", start)
        for name, own in compared.items()
    ]
    return [first, *rows]


def _evaluations(result: RowResult) -> dict[str, list[Line]]:
    """Column of _COLUMNS -> the selected evaluation of each seed; [] where nothing was selected.

    Each column has its own choice of learning rate.
    """
    selected = {}
    for name, of_column in _by_column(result).items():
        chosen = selection.choose(name, of_column, result.config.evaluation.select)
        selected[name] = [run.choice for run in chosen.runs] if chosen else []
    return selected


def _by_column(result: RowResult) -> dict[str, Result]:
    """The part of a row's result that belongs to each column of _COLUMNS that was run."""
    of_row = result.only.result
    found = {}
    for name, hyper in _COLUMNS[result.row.series].items():
        if runs := [run for run in of_row.runs if hyper.items() <= run.hyper.items()]:
            found[name] = msgspec.structs.replace(of_row, runs=runs)
    return found


# The paper's data sets by our names, and the data sets of local files by their network.
_PAPER_DATA = ("fashion_mnist", "cifar100", "cifar10", "tiny_imagenet")
_BY_NETWORK = {"leaf_cnn": "femnist", "lstm": "sent140"}


def paper_data(config: Config) -> str:
    """The paper's data set of a row, whatever a local copy is called; "" if there is none."""
    stem = config.data.stem.replace("-", "_")
    named = next((name for name in _PAPER_DATA if stem.startswith(name)), "")
    return _BY_NETWORK.get(config.network.model, named)


def partition_name(config: Config) -> str:
    """The paper's name of the partition."""
    if config.partition.partition == "dirichlet":
        return f"Dir{config.partition.clients}({config.partition.alpha:g})"
    return f"IID{config.partition.clients}" if config.partition.partition == "iid" else "Non-IID"


NUMBERS = study.numbers_of("fedcfa")
# Partition -> the target accuracy in percent, from the paper's Table III on CIFAR-10.
TARGETS = {each.column: float(each.value) for each in NUMBERS if each.row == "target"}
# Data set -> our own target accuracy in percent.
_OUR_TARGETS = {"fashion_mnist": 80.0, "mnist": 95.0, "cifar10": 50.0, "digits": 80.0}


def target(config: Config) -> float | None:
    """The target for the test accuracy, in percent; None if there is none."""
    if (paper_data(config), config.network.model) == ("cifar10", "resnet18"):
        return TARGETS.get(partition_name(config))
    return _OUR_TARGETS.get(config.data.stem)


def rounds_to(lines: Sequence[Line], percent: float) -> float:
    """The round of the first evaluation with at least this test accuracy, NaN if there is none."""
    lines = selection.trained(lines)
    reached = (line.round for line in lines if 100 * line.test_score >= percent)
    return next(reached, np.nan)


def _speed(result: RowResult) -> Cells:
    """Rounds to the target or, as in the paper, the best accuracy if it was not reached."""
    percent = target(result.config)
    if percent is None:
        return {}
    rounds = [rounds_to(lines, percent) for lines in result.only.logs]
    text = forms.spread(rounds)
    if np.isnan(rounds).any():
        trained = map(selection.trained, result.only.logs)
        best = forms.spread([max(study.percents(lines)) for lines in trained])
        text = f"> {result.config.training.rounds}, best {best}"
    return {f"rounds to {percent:g}%": text}


_SCORES = {"validation, %": "validation_score", "test, %": "test_score"}


def _selected(result: RowResult) -> Cells:
    """Test accuracy at the selected evaluations, speed and traffic."""
    varied = study.varied(result)
    return {
        "partition": partition_name(result.config),
        **({"selected": varied} if varied else {}),
        **study.texts(result.selected, _SCORES),
        "test at the last, %": study.percent(result.last, "test_score"),
        **_speed(result),
        "MB sent": study.megabytes(result),
    }


_ROUNDS = (1, 2, 3, 5, 10, 20)  # in which Simpson's paradox shows


def _in_rounds(result: RowResult) -> Cells:
    """Test accuracies after some rounds and the last; of the network before, at its end alone."""
    by_round = [{line.round: line for line in lines} for lines in result.only.logs]
    cells = {}
    for number in _ROUNDS:
        if number <= result.config.training.rounds:
            at = [lines[number] for lines in by_round if number in lines and result.row.start]
            cells[f"test in round {number}, %"] = study.percent(at, "test_score")
    cells["test at the last, %"] = study.percent(result.last, "test_score")
    return cells | {"rounds": forms.spread([max(lines) for lines in by_round])}


def _compared(result: RowResult) -> Cells:
    """Test accuracy in each column of _COLUMNS."""
    of_columns = _by_column(result)
    return {
        f"{name}, %": study.percent(lines, "test_score") or selection.why_none(of_columns[name])
        for name, lines in _evaluations(result).items()
    }


def _grid(result: RowResult) -> Cells:
    """The cell with the best test accuracy, the middle and two corners; the figure shows all."""
    means = _means(result)
    count = len(_by_column(result))
    best = max(means, key=means.__getitem__)
    return {
        "positive/negative": best,
        "the best test of the experiment, %": f"{means[best]:.1f}",
        **{f"{name}, %": f"{means.get(name, np.nan):.1f}" for name in ("5/5", "0.1/0.1", "10/10")},
        "without a selection": f"{count - len(means)} of {count}",
    }


def _means(result: RowResult) -> dict[str, float]:
    """The mean test accuracy of each column of _COLUMNS in which something was selected."""
    selected = _evaluations(result).items()
    return {name: float(np.mean(study.percents(lines))) for name, lines in selected if lines}


def numbers(result: RowResult, data: str) -> Cells:
    """The paper's numbers of a method or hook on this partition, or of columns within a row."""
    clients = {"partition", "alpha", "clients", "cohort", "sampling_rate"}
    fifth = (
        5 * method.slots(result.config.participation, result.config.partition.clients)
        == result.config.partition.clients
    )
    if not (result.is_complete and fifth and study.is_of_paper(result, clients)):
        return {}
    of_data = paper_data(result.config), partition_name(result.config)
    names = (result.row.series, result.row.label)
    mine = [each for each in NUMBERS if each.data == of_data[0] and each.row in names]
    if result.config.network.model != "resnet18":  # the label of a hook says nothing of the network
        mine = [each for each in mine if each.source != "Table 5"]
    if result.row.series in _COLUMNS:
        columns = mine if of_data[1] == "Dir60(0.6)" else []
        return {f"paper: {each.column}": each.value for each in columns}
    return {
        "paper: rounds, %" if each.source == "Table III" else "paper, %": each.value
        for each in mine
        if each.column == of_data[1]
    }


def draw_by_round(path: Path, data: str, results: Sequence[RowResult]) -> str:
    """Test accuracy by round, a panel per partition and a line per method."""
    panels: dict[str, dict[str, drawings.Curve]] = {}
    for result in results:
        if result.row.series and result.is_complete:
            title = result.row.x or partition_name(result.config)
            panels.setdefault(title, {})[result.row.series] = study.curve(result)
    shown = [drawings.Panel(of, title, "round", "test accuracy, %") for title, of in panels.items()]
    return drawings.lines(path, data, shown, (5.0, 3.4), columns=3)


def draw_by_seed(path: Path, data: str, results: Sequence[RowResult]) -> str:
    """Fig. 5: the selected test accuracy of each seed by method, a panel per partition."""
    points: dict[str, dict[str, list[tuple[str, list[float]]]]] = {}
    for result in results:
        if result.is_complete:
            place = f"{result.row.x or partition_name(result.config)}, test accuracy in percent"
            line = points.setdefault(place, {}).setdefault("", [])
            line.append((result.row.series, study.percents(result.selected)))
    return drawings.against(path, data, "", points, is_joined=False)


def _title(data: str, results: Sequence[RowResult]) -> str:
    return f"{data}, {partition_name(results[0].config)}"


_QUANTITIES: dict[str, Callable[[Line], float]] = {
    "test accuracy in percent": lambda line: 100 * line.test_score,
    "mean |correlation| of factors": lambda line: (
        (line.train_metrics or {})["correlation"] or np.nan
    ),
}


def _draw_columns(x_label: str, path: Path, data: str, results: Sequence[RowResult]) -> str:
    """Draws test accuracy and the factors' mean correlation by column, a line per row."""
    columns = {one.row.label: _evaluations(one) for one in results if one.is_complete}
    points = {
        quantity: {
            label: [(name, [*map(value, lines)]) for name, lines in of.items()]
            for label, of in columns.items()
        }
        for quantity, value in _QUANTITIES.items()
    }
    return drawings.against(path, _title(data, results), x_label, points)


def draw_hooks(path: Path, data: str, results: Sequence[RowResult]) -> str:
    """Table 5 as lines, one per hook."""
    points = study.points(results, {"test, %": lambda one: study.percents(one.selected)})
    return drawings.against(path, _title(data, results), "factors replaced (top_k)", points)


def draw_grid(path: Path, data: str, results: Sequence[RowResult]) -> str:
    """Fig. 6: a map per row, with the positive weight along x and the negative along y."""
    maps = {}
    for result in results:
        if result.is_complete:
            means = _means(result)
            tests = [means.get(name, np.nan) for name in _COLUMNS["loss_grid"]]
            maps[result.row.label] = np.reshape(tests, (len(_R), len(_R)))
    labels = ("weight of positives", "weight of negatives")
    return drawings.maps(path, _title(data, results), maps, [f"{r:g}" for r in _R], labels)


_CURVES: dict[str, study.Draw] = {"_by_round": draw_by_round, "_by_seed": draw_by_seed}

PAPER = study.Paper(
    "fedcfa",
    tuple(SETTINGS),
    {
        # Another network has its factors behind another layer.
        "methods": Study(methods, _selected, numbers, _CURVES, study.scores_by_seed(_SCORES)),
        "partitions": Study(
            partitions,
            _selected,
            numbers,
            _CURVES,
            data=[name for name in SETTINGS if name != "digits"],  # too few for 60 clients
        ),
        "ablation": Study(ablation, _compared, numbers, {"": partial(_draw_columns, "losses")}),
        "hooks": Study(hooks, _selected, numbers, {"": draw_hooks}),
        "correlation": Study(
            correlation, _compared, numbers, {"": partial(_draw_columns, "weight of decorrelation")}
        ),
        "loss_grid": Study(loss_grid, _grid, numbers, {"": draw_grid}),
        # An average of texts is no text.
        "factors": Study(
            clients_factors,
            _selected,
            figures={"": factors.draw},
            data=[name for name in SETTINGS if name != "sent140"],
        ),
        "simpson": Study(
            simpson, _in_rounds, numbers, {"_by_round": draw_by_round}, data=("mnist", "digits")
        ),
    },
    caption=(
        "Mean ± standard deviation over seeds, each of which draws its own partition. Of each run "
        "the evaluation, and of each row the hyperparameters, that serve the clients' validation "
        "examples best, unless --select says otherwise; the paper's numbers are of its last round. "
        "FDC: decorrelation with weight 0.1. The paper's networks are larger: ResNet-18 on images."
    ),
    diverged=lambda one: {"partition": partition_name(one.config), "test, %": study.why_none(one)},
)
