"""The tables and figures of CAFE (arXiv 2503.09116), with accuracies by group of clients.

fedjax-inv paper cafe --study=groups --data=fashion_mnist

Studies: methods (one column of Tables I to IV, and Fig. 5 and 6), frequency (Table II: how often
half of the clients upload), groups (FedAvg and CAFE on clients that upload always or rarely, and on
classes with many or few examples), ablation (Fig. 6: CAFE without its parts). Any flag of `train`
applies to all rows. Other columns of the tables are --alpha=0.5 --run_dir=ELSEWHERE (Table I),
--sampling_rate=0.3 (Table III) and --local_epochs=10 (Table IV). Other strengths of Feature
Calibration are --study=ablation --rows=CAFE --set=alpha=0.0,0.2,1.0. The server has the momentum of
the paper's Eq. 16 to 19; without it (--server_momentum=0) rates are three times those here.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from ..assembly import method
from ..config import Config
from ..folder.records import Line
from ..report import forms
from . import drawings, row_runs, study
from .row_runs import RowResult
from .rows import Row
from .study import Cells, Study


class CafeSetting(NamedTuple):
    """A data set with its network."""

    preset: str
    prototypes: str = "1.0"  # FedProto's penalty
    rates: tuple[float, ...] = (0.0001, 0.0003, 0.001, 0.003)  # learning rates of all methods


SETTINGS = {
    "fashion_mnist": CafeSetting("fashion_mnist_cafe"),
    "fashion_mnist_lenet": CafeSetting("fashion_mnist_cafe_lenet"),
    "cifar10": CafeSetting("cifar10_cafe", "0.1"),
    "cifar10_lenet": CafeSetting("cifar10_cafe_lenet", "0.1"),
    "cifar100": CafeSetting("cifar100_cafe"),
    "digits": CafeSetting("digits_cafe", rates=(0.0003, 0.001, 0.003, 0.01, 0.03)),
}


def methods(data: str) -> list[Row]:
    """Five methods, which choose among the same learning rates.

    A method's other hyperparameters are those of its paper, or the library's defaults if CAFE's
    paper does not state them. MOON's penalty is 1 for all data; its paper has 5 for CIFAR-10.
    """
    chosen = SETTINGS[data]
    settings = {
        "FedAvg": (),
        "FedProx": ("--set=proximal=0.01",),
        "MOON": ("--set=penalty=1.0", "--set=temperature=0.5"),
        "FedProto": (f"--set=penalty={chosen.prototypes}",),
        "CAFE": (),
    }
    rates = f"--learning_rate={study.listed(chosen.rates)}"
    flags = (f"--preset=cafe_paper,{chosen.preset}", rates)
    return [
        Row(name, (*flags, f"--algorithm={name.lower()}", *own), name, _FREQUENCIES[0])
        for name, own in settings.items()
    ]


_COMPARED = ("FedAvg", "CAFE")  # in the studies of groups and of parts
_FREQUENCIES = ("0.1", "0.5", "1")  # the first is the preset's


def _at(of: Row, frequency: str) -> Row:
    """A row at a communication frequency, with one label in all studies."""
    if frequency == _FREQUENCIES[0]:
        return of._replace(x=frequency)
    label = f"{of.label}-CF-{frequency}"
    flags = (*of.flags, f"--frequency={frequency}")
    return of._replace(label=label, flags=flags, x=frequency)


def frequency(data: str) -> list[Row]:
    """Table II: half of the clients upload in a fraction of the rounds, the others in each."""
    return [_at(row, each) for row in methods(data) for each in _FREQUENCIES]


def groups(data: str) -> list[Row]:
    """FedAvg and CAFE at all frequencies, with a long tail of 10."""
    return [
        row._replace(label=f"{row.label}-IF-10", flags=(*row.flags, "--imbalance=10"))
        for row in frequency(data)
        if row.series in _COMPARED
    ]


def ablation(data: str) -> list[Row]:
    """Fig. 6: FedAvg, CAFE, and CAFE without its parts; both without the server's momentum, SM.

    Without FC and HA only PC remains, a cosine classifier. A server without momentum makes shorter
    steps, so the learning rates there are three times the others.
    """
    without = {"PC": "parameter_calibration", "FC": "feature_calibration", "HA": "history_average"}
    rows = row_runs.with_labels(methods(data), _COMPARED)
    cafe = rows[1]
    for names in (("PC",), ("FC",), ("HA",), ("FC", "HA")):
        off = tuple(f"--set={without[name]}=false" for name in names)
        label = f"CAFE-without-{'+'.join(names)}"
        rows.append(cafe._replace(label=label, flags=(*cafe.flags, *off), series=label))
    rates = study.listed([3 * rate for rate in SETTINGS[data].rates])
    for row in rows[:2]:
        label = f"{row.label}-without-SM"
        flags = (*row.flags, "--server_momentum=0", f"--learning_rate={rates}")
        rows.append(row._replace(label=label, flags=flags, series=label))
    return rows


# Frequent clients always upload and sparse ones rarely; majority classes have most examples.
_CLIENTS = ("frequent clients", "sparse clients")
_CLASSES = ("majority classes", "minority classes")


def by_group(config: Config, line: Line) -> dict[str, float]:
    """Accuracies of an evaluation, by group of clients or of classes. Empty groups are left out.

    Clients are tested in their proportions of classes. With a tail, the two halves of the classes
    are groups, too.
    """
    clients = np.array(line.score_by_client or [], float)  # NaN where there is no test example
    rare = method.is_sparse(len(clients), line.seed)
    parts = dict(zip(_CLIENTS, (clients[~rare], clients[rare]), strict=True))
    if config.partition.imbalance > 1:
        classes = np.array(line.score_by_class or [], float)  # in order of their examples
        parts |= dict(zip(_CLASSES, np.array_split(classes, 2), strict=True))
    return {name: float(np.nanmean(of)) for name, of in parts.items() if np.isfinite(of).any()}


def _groups_of(result: RowResult) -> dict[str, list[float]]:
    """Group -> the selected accuracy of each seed, in percent, for groups that all seeds have."""
    by_seed = [by_group(result.config, run.choice) for run in result.only.runs]
    groups = 100 * pd.DataFrame(by_seed).dropna(axis=1)
    return {name: [*of] for name, of in groups.items()}


def where(config: Config) -> str:
    """The federation of a row, which has a column in the paper's tables."""
    dealt = (
        f"Dir {config.partition.alpha:g}"
        if config.partition.partition == "dirichlet"
        else config.partition.partition
    )
    slots = method.slots(config.participation, config.partition.clients)
    return (
        f"{dealt}, CF {config.participation.frequency:g}, IF {config.partition.imbalance:g}, "
        f"{slots} of {config.partition.clients} clients, {config.training.local_epochs} epochs"
    )


_SCORES = {
    "validation, %": "validation_score",
    "test, %": "test_score",
    "balanced, %": "balanced_score",
    "clients' tests, %": "client_score",
}


def _columns(result: RowResult) -> Cells:
    """Accuracies at the selected evaluations, and traffic."""
    return {
        "federation": where(result.config),
        "selected": study.varied(result),
        **study.texts(result.selected, _SCORES),
        **{f"{name}, %": forms.spread(values) for name, values in _groups_of(result).items()},
        "test at the last, %": study.percent(result.last, "test_score"),
        "MB sent": study.megabytes(result),
    }


NUMBERS = study.numbers_of("cafe")


def numbers(result: RowResult, data: str) -> Cells:
    """The paper's numbers of a method in this setting.

    They stand beside balanced classes. The paper calls its data "LT", perhaps for a long tail, but
    gives no imbalance.
    """
    config = result.config
    partition = config.partition
    frequency = config.participation.frequency
    slots = method.slots(config.participation, partition.clients)
    epochs = config.training.local_epochs
    federation = (partition.clients, slots, epochs, partition.imbalance)
    # The row's own flags are the paper's, but for its frequency and its alpha, which columns have.
    varied = {"alpha", "clients", "imbalance", "cohort", "sampling_rate", "frequency"}
    is_of_paper = federation == (100, 10, 5, 1) and study.is_of_paper(result, varied)
    if not result.is_complete or not is_of_paper:
        return {}
    columns = {
        "Table I": f"Dir {config.partition.alpha:g}" if frequency == 0.1 else "",
        "Table II": f"CF {frequency:g}" if config.partition.alpha == 0.1 else "",
    }
    at = (result.row.series, config.data.stem.replace("-", "_"))
    return {
        f"paper: {each.source}": each.value
        for each in NUMBERS
        if (each.row, each.data) == at and each.column == columns[each.source]
    }


def draw_by_round(path: Path, data: str, results: Sequence[RowResult]) -> str:
    """Fig. 5 and 6: test accuracy and test loss by round."""
    complete = [result for result in results if result.is_complete]

    def loss(line: Line) -> float:
        (test,) = (domain for domain in line.domains.values() if domain.split == "test")
        return np.nan if test.loss is None else test.loss

    accuracies = {result.row.label: study.curve(result) for result in complete}
    losses = {result.row.label: study.curve(result, loss) for result in complete}
    panels = [
        drawings.Panel(accuracies, "", "round", "test accuracy, %"),
        drawings.Panel(losses, "", "round", "test loss", y_scale="log"),
    ]
    return drawings.lines(path, data, panels, (5.0, 4.4))


def draw_frequency(path: Path, data: str, results: Sequence[RowResult]) -> str:
    """Draws accuracies of the test and of each group by communication frequency."""
    complete = [result for result in results if result.is_complete]
    quantities: dict[str, Callable[[RowResult], list[float]]] = {
        "test, %": lambda result: study.percents(result.selected)
    }
    for name in dict.fromkeys(name for result in complete for name in _groups_of(result)):
        quantities[f"{name}, %"] = partial(_of_group, name)
    points = study.points(complete, quantities)
    return drawings.against(path, data, "communication frequency", points)


def _of_group(name: str, result: RowResult) -> list[float]:
    return _groups_of(result).get(name, [])


_BY_ROUND: dict[str, study.Draw] = {"_by_round": draw_by_round}
_BY_FREQUENCY: dict[str, study.Draw] = {"": draw_frequency}

PAPER = study.Paper(
    "cafe",
    tuple(SETTINGS),
    {
        "methods": Study(methods, _columns, numbers, _BY_ROUND, study.scores_by_seed(_SCORES)),
        "frequency": Study(frequency, _columns, numbers, _BY_FREQUENCY),
        "groups": Study(groups, _columns, numbers, _BY_FREQUENCY),
        "ablation": Study(ablation, _columns, numbers, _BY_ROUND, study.scores_by_seed(_SCORES)),
    },
    caption=(
        "Mean ± standard deviation over seeds, each of which draws its own partition and its own "
        "half of the clients that upload rarely. Of each run the evaluation, and of each row the "
        "hyperparameters, that serve the clients' validation examples best, unless --select says "
        "otherwise. Dir: Dirichlet's alpha. CF: how often a sparse client's update arrives. IF: "
        "imbalance factor of the classes. Balanced: the mean over classes. Clients' tests: test "
        "examples in the proportions of each client's classes, the mean over clients; frequent and "
        "sparse: over those whose updates always and rarely arrive, or would. Majority and "
        "minority: the half of the classes with most examples, and the other. The paper's networks "
        "are larger."
    ),
    diverged=lambda one: {"federation": where(one.config), "test, %": study.why_none(one)},
)
