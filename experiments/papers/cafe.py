"""The tables and figures of CAFE (arXiv 2503.09116), and whom it serves.

python -m experiments.papers.cafe --study=groups --data=fashion_mnist

Studies: methods (Tables I to IV, Fig. 5 and 6, one column of them), frequency (Table II: how often
half of the clients upload), imbalance (classes with long tails), groups (FedAvg and CAFE: clients
that upload always and rarely, classes with many and few examples), ablation (Fig. 6: parts of CAFE
switched off), drift (ways to make a direction of a matrix). Any flag of `sweep` given here goes to
all rows: other columns are --alpha=0.5 --run_dir=ELSEWHERE (Table I), --sampling_rate=0.3 (Table
III) and --local_epochs=10 (Table IV), other strengths of Feature Calibration --study=drift
--rows=CAFE --set=alpha=0.0,0.2,1.0. The server's momentum, for a learning rate of 0.001 alone, is
--server_momentum=0.9 --learning_rate=0.001.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from experiments.experiment.config import Config
from experiments.papers import study
from experiments.papers.study import Cells, Done, Row, Study
from experiments.parts import participation
from experiments.reporting import figures, report
from fedjax_inv.checks import UsageError


class Setting(NamedTuple):
    """A data set with its network."""

    preset: str
    prototypes: str = "1.0"  # FedProto's penalty
    rates: tuple[float, ...] = (0.0003, 0.001, 0.003, 0.01)  # from which all methods choose


SETTINGS = {
    "fashion_mnist": Setting("fashion_mnist_cafe"),
    "fashion_mnist_lenet": Setting("fashion_mnist_cafe_lenet"),
    "cifar10": Setting("cifar10_cafe", "0.1"),
    "cifar10_lenet": Setting("cifar10_cafe_lenet", "0.1"),
    "cifar100": Setting("cifar100_cafe"),
    "digits": Setting("digits_cafe", rates=(0.003, 0.01, 0.03, 0.1)),
}


def methods(data: str) -> list[Row]:
    """Five methods, each with a choice of the same four learning rates; a hyperparameter of a
    method's own has the value of its paper, or of CAFE's open choices the library's."""
    chosen = SETTINGS[data]
    settings = {
        "FedAvg": (),
        "FedProx": ("--set=proximal=0.01",),
        "MOON": ("--set=penalty=1.0", "--set=temperature=0.5"),
        "FedProto": (f"--set=penalty={chosen.prototypes}",),
        "CAFE": (),
    }
    rates = f"--learning_rate={','.join(f'{rate:g}' for rate in chosen.rates)}"
    flags = (f"--preset=cafe_paper,{chosen.preset}", rates)
    return [
        Row(name, (*flags, f"--algorithm={name.lower()}", *own), name, _FREQUENCIES[0])
        for name, own in settings.items()
    ]


_FREQUENCIES = ("0.1", "0.5", "1")  # the first is the preset's
_IMBALANCES = ("1", "10", "50", "100")  # likewise


def _at(of: Row, frequency: str = _FREQUENCIES[0], imbalance: str = _IMBALANCES[0]) -> Row:
    """A row at another communication frequency or imbalance, under one name in all studies."""
    label, flags = of.label, of.flags
    if frequency != _FREQUENCIES[0]:
        label, flags = f"{label}-CF-{frequency}", (*flags, f"--frequency={frequency}")
    if imbalance != _IMBALANCES[0]:
        label, flags = f"{label}-IF-{imbalance}", (*flags, f"--imbalance={imbalance}")
    return of._replace(label=label, flags=flags)


def frequency(data: str) -> list[Row]:
    """Table II: half of the clients upload in a part of the rounds, the others in all."""
    return [_at(row, each)._replace(x=each) for row in methods(data) for each in _FREQUENCIES]


def imbalance(data: str) -> list[Row]:
    """Long tails, where the last class has so many times fewer examples than the first: FedAvg, and
    CAFE without and with Feature Calibration."""
    compared = [_named(methods(data), "FedAvg"), _named(ablation(data), "CAFE-without-FC")]
    compared.append(_named(methods(data), "CAFE"))
    return [
        _at(row, imbalance=each)._replace(x=each, series=row.label)
        for row in compared
        for each in _IMBALANCES
    ]


def groups(data: str) -> list[Row]:
    """FedAvg and CAFE at all frequencies, with a long tail of 10."""
    compared = [_named(methods(data), name) for name in _TOLD_BY_GROUP]
    return [_at(row, each, "10")._replace(x=each) for row in compared for each in _FREQUENCIES]


def ablation(data: str) -> list[Row]:
    """Fig. 6: FedAvg, CAFE, and CAFE without its parts; without FC and HA, PC is what is left, a
    cosine classifier."""
    without = {"PC": "parameter_calibration", "FC": "feature_calibration", "HA": "history_average"}
    cafe = _named(methods(data), "CAFE")
    rows = [_named(methods(data), "FedAvg"), cafe]
    for names in (("PC",), ("FC",), ("HA",), ("FC", "HA")):
        off = tuple(f"--set={without[name]}=false" for name in names)
        label = f"CAFE-without-{'+'.join(names)}"
        rows.append(cafe._replace(label=label, flags=(*cafe.flags, *off), series=label))
    return rows


def drift(data: str) -> list[Row]:
    """What a direction is made of, which the paper leaves open; the first is CAFE's default."""
    cafe = _named(methods(data), "CAFE")
    others = ("row_mean", "classwise", "feature_ema")
    return [
        cafe,
        *(
            cafe._replace(
                label=f"CAFE-{mode}",
                flags=(*cafe.flags, f"--set=drift_mode={mode}"),
                series=f"CAFE-{mode}",
            )
            for mode in others
        ),
    ]


def _named(rows: Sequence[Row], label: str) -> Row:
    return next(row for row in rows if row.label == label)


def check(config: Config) -> None:
    """Raises UsageError for flags with which a row cannot be told."""
    study.check_one_cell(config)
    if not config.watching.watch_classes:
        raise UsageError("--watch_classes=false: must be true")


# The groups of clients and of classes, and what the figure of groups calls them.
_CLIENTS = {
    "frequent clients": "frequent clients: always upload",
    "sparse clients": "sparse clients: upload rarely",
}
_CLASSES = {
    "majority classes": "majority classes: most examples",
    "minority classes": "minority classes: fewest examples",
}
_TOLD_BY_GROUP = ("FedAvg", "CAFE")


def by_group(config: Config, line: dict[str, Any]) -> dict[str, float]:
    """The accuracy of an evaluation for each group of clients, on test examples in a client's
    proportions, and for each half of the classes where those have a tail; without empty groups."""
    clients = np.array(line["accuracy_by_client"], float)  # NaN where there is no test example
    rare = participation.is_sparse(config.participation, len(clients), line["seed"])
    parts = dict(zip(_CLIENTS, (clients[~rare], clients[rare]), strict=True))
    if config.partition.imbalance > 1:
        classes = np.array(line["accuracy_by_class"], float)  # those with most examples first
        parts |= dict(zip(_CLASSES, np.array_split(classes, 2), strict=True))
    return {name: float(np.nanmean(of)) for name, of in parts.items() if np.isfinite(of).any()}


def _groups_of(one: Done) -> dict[str, list[float]]:
    """By group, in percent, what is selected of each seed."""
    told = [by_group(one.config, run["selected"]) for run in one.only.runs]
    names = [name for name in (*_CLIENTS, *_CLASSES) if told and all(name in each for each in told)]
    return {name: [100 * each[name] for each in told] for name in names}


def where(config: Config) -> str:
    """The column of the paper's tables that a row is in, in words."""
    chosen = config.partition
    return (
        f"Dir {chosen.alpha:g}, CF {config.participation.frequency:g}, IF {chosen.imbalance:g}, "
        f"{config.participation.slots(chosen.clients)} of {chosen.clients} clients, "
        f"{config.clients.local_epochs} epochs"
    )


def tell(one: Done) -> Cells:
    """Accuracies where the row's rule selects, and the paper's numbers."""
    runs = one.only.runs
    if not runs:
        return {"setting": where(one.config), "test, %": "diverged"}
    picked = [run["selected"] for run in runs]
    choice = report.choose(one.row.label, one.only.result, one.config.watching.select)
    hyper = choice.hyper if choice else {}

    def percent(key: str) -> str:
        return report.percent([line[key] for line in picked])

    return {
        "setting": where(one.config),
        "selected": ", ".join(f"{name}={value:g}" for name, value in hyper.items()),
        "validation, %": percent("validation_accuracy"),
        "test, %": percent("test_accuracy"),
        "balanced, %": percent("balanced_accuracy"),
        "clients' tests, %": percent("client_accuracy"),
        **{f"{name}, %": report.spread(values) for name, values in _groups_of(one).items()},
        "test at the last, %": report.percent([run["last"]["test_accuracy"] for run in runs]),
        "MB sent": report.spread([run["last"]["bytes"] / 1e6 for run in runs]),
        **_paper_cells(one),
    }


def _finished(done: Sequence[Done]) -> list[Done]:
    return [one for one in done if one.only.runs]


def draw_by_round(path: Path, data: str, done: Sequence[Done]) -> str:
    """Fig. 5 and 6: test accuracy and test loss by round, means over seeds and their range; returns
    where they are."""
    told = _finished(done)
    if not told:
        return "No figure: every row diverged."

    def loss(line: dict[str, Any]) -> float:
        (test,) = (domain for domain in line["domains"].values() if domain["split"] == "test")
        return np.nan if test["loss"] is None else test["loss"]

    quantities: dict[str, Callable[[dict[str, Any]], float]] = {
        "test accuracy, %": lambda line: 100 * line["test_accuracy"],
        "test loss": loss,
    }
    figure = Figure(figsize=(10.0, 4.4), layout="constrained")
    for axis, (name, value) in zip(figure.subplots(1, 2), quantities.items(), strict=True):
        for index, one in enumerate(told):
            by_seed = np.array([[value(line) for line in lines] for lines in one.only.logs])
            rounds = [line["round"] for line in one.only.logs[0]]
            style = figures.style(index) | {"markevery": figures.spaced(len(rounds), index)}
            color, low, high = style["color"], by_seed.min(0), by_seed.max(0)
            axis.plot(rounds, by_seed.mean(0), **style, lw=1.4, label=one.row.label)
            axis.fill_between(rounds, low, high, color=color, alpha=0.12, lw=0)
        axis.set(xlabel="round", ylabel=name)
    figure.axes[1].set_yscale("log")
    figures.entitle(figure, f"{data}: mean over seeds, and from the worst of them to the best")
    figures.legend_of(figure, figure.axes)
    figures.save(figure, path)
    return f"Figure: {path}."


def draw_against(x_label: str) -> study.Draw:
    """A figure of accuracies against what varies, a line per method."""

    def draw(path: Path, data: str, done: Sequence[Done]) -> str:
        """Of the test and of each group that all rows have; returns where it is."""
        told = _finished(done)
        if not told:
            return "No figure: every row diverged."
        points: dict[str, dict[str, list[tuple[str, list[float]]]]] = {}
        for one in told:
            of_all = [100 * run["selected"]["test_accuracy"] for run in one.only.runs]
            for name, values in ({"test": of_all} | _groups_of(one)).items():
                series = points.setdefault(f"{name}, accuracy in percent", {})
                series.setdefault(one.row.series, []).append((one.row.x, values))
        study.draw_series(path, data, x_label, points)
        return f"Figure: {path}."

    return draw


def draw_groups(path: Path, data: str, done: Sequence[Done]) -> str:
    """A panel per group of clients and of classes: FedAvg and CAFE by communication frequency, mean
    and range over seeds; returns where it is."""
    told = [one for one in _finished(done) if one.row.series in _TOLD_BY_GROUP]
    if not told:
        return "No figure: every row diverged."
    of_rows = [(one, _groups_of(one)) for one in told]
    names = [name for name in (*_CLIENTS, *_CLASSES) if any(name in of for _, of in of_rows)]
    titles = _CLIENTS | _CLASSES
    places = [x for x in reversed(_FREQUENCIES) if any(one.row.x == x for one in told)]
    figure = Figure(figsize=(3.1 * len(names) + 0.6, 4.0), layout="constrained")
    panels = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
    for axis, name in zip(panels, names, strict=True):
        for number, series in enumerate(_TOLD_BY_GROUP):
            style = figures.style(number)
            values = {one.row.x: of[name] for one, of in of_rows if one.row.series == series}
            x = [index for index, place in enumerate(places) if place in values]
            mean, low, high = (
                [over(values[places[index]]) for index in x] for over in (np.mean, np.min, np.max)
            )
            axis.plot(x, mean, **style, lw=1.8, label=series)
            axis.fill_between(x, low, high, color=style["color"], alpha=0.18, lw=0)
        axis.set_xticks(range(len(places)), ["always" if x == "1" else x for x in places])
        axis.set_xlim(-0.25, len(places) - 0.75)
        axis.set_xlabel("how often sparse clients upload")
        axis.set_title(titles[name], fontsize=9)
        axis.grid(axis="y", color="0.92")
    panels[0].set_ylabel("test accuracy, %")
    figures.entitle(
        figure,
        f"{data}: whom it costs when {told[0].config.participation.sparse:.0%} of the clients "
        "upload more and more rarely\n"
        "mean over seeds, and from the worst of them to the best",
    )
    figures.legend_of(figure, figure.axes)
    figures.save(figure, path)
    return f"Figure: {path}."


# Tables I (communication frequency 0.1) and II (Dirichlet 0.1), in percent as printed, on all three
# data sets. Where both have a column, MOON and FedProto on Fashion-MNIST differ. Tables III and IV
# are not in the text that we have.
_PAPER_DATA = ("fashion_mnist", "cifar10", "cifar100")
_COLUMNS_OF_TABLE_1 = (0.1, 0.5, 1.0)  # Dirichlet
_TABLE_1 = """
FedAvg    87.22 87.89 89.91  41.71 43.31 45.59  36.00 36.52 37.13
FedProx   88.51 88.94 90.47  48.53 51.57 56.66  36.71 37.36 38.22
MOON      88.36 90.40 91.35  62.96 64.66 67.95  37.95 38.83 39.93
FedProto  88.98 90.33 91.67  58.02 61.29 67.10  38.12 39.21 39.84
CAFE      89.44 90.88 91.70  67.29 68.72 71.35  40.30 40.98 41.55
"""
_COLUMNS_OF_TABLE_2 = (0.1, 0.5, 1.0)  # communication frequency
_TABLE_2 = """
FedAvg    87.22 87.92 89.14  41.71 43.11 43.57  36.00 37.96 38.55
FedProx   88.51 88.83 89.99  48.53 49.99 52.10  36.71 37.53 38.15
MOON      89.36 90.00 90.68  62.96 64.51 67.32  37.95 38.67 40.13
FedProto  89.41 90.36 90.51  58.02 60.66 64.45  38.12 38.99 39.22
CAFE      89.44 90.47 90.92  67.29 68.81 69.64  40.30 40.90 42.11
"""


def _parsed(table: str, columns: Sequence[float]) -> dict[tuple[str, str, float], str]:
    """(method, data set, column) -> the entry."""
    places = [(data, column) for data in _PAPER_DATA for column in columns]
    numbers: dict[tuple[str, str, float], str] = {}
    for line in table.strip().splitlines():
        method, *cells = line.split()
        numbers |= {(method, *at): cell for at, cell in zip(places, cells, strict=True)}
    return numbers


NUMBERS = {
    "Table I": _parsed(_TABLE_1, _COLUMNS_OF_TABLE_1),
    "Table II": _parsed(_TABLE_2, _COLUMNS_OF_TABLE_2),
}


def _paper_cells(one: Done) -> Cells:
    """The paper's numbers of a method; its tail of classes, "LT", is not told, and ours is none."""
    config, chosen = one.config, one.config.partition
    slots, frequency = config.participation.slots(chosen.clients), config.participation.frequency
    if (chosen.clients, slots, config.clients.local_epochs, chosen.imbalance) != (100, 10, 5, 1):
        return {}
    at = (one.row.series, config.data.stem.replace("-", "_"))
    told = {}
    if frequency == 0.1:
        told["Table I"] = NUMBERS["Table I"].get((*at, chosen.alpha))
    if chosen.alpha == 0.1:
        told["Table II"] = NUMBERS["Table II"].get((*at, frequency))
    return {f"paper: {table}": text for table, text in told.items() if text}


_BY_ROUND: dict[str, study.Draw] = {"_by_round": draw_by_round}

PAPER = study.Paper(
    "cafe",
    tuple(SETTINGS),
    {
        "methods": Study(methods, _BY_ROUND),
        "frequency": Study(
            frequency,
            {"": draw_against("communication frequency"), "_groups": draw_groups},
        ),
        "imbalance": Study(imbalance, {"": draw_against("imbalance factor")}),
        "groups": Study(groups, {"": draw_groups}),
        "ablation": Study(ablation, _BY_ROUND),
        "drift": Study(drift, _BY_ROUND),
    },
    tell,
    numbers=lambda label, data: {},  # they depend on the partition, so `tell` has them
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
    last={},
    check=check,
)


if __name__ == "__main__":
    study.main(PAPER, __doc__)
