"""The tables and figures of FedCFA (Jiang et al. 2025, arXiv 2412.18904).

python -m experiments.papers.fedcfa --study=methods --data=fashion_mnist

Studies: methods (Tables 1 to 3, I to III, and Fig. 5, on one partition), partitions (those tables'
columns, for FedAvg, FedMix and FedCFA), ablation (Table 4), hooks (Table 5), correlation
(Table IV), loss_grid (Fig. 6), simpson (Fig. 4). Any flag of `sweep` given here goes to all rows:
methods on another partition are --alpha=0.2 --run_dir=ELSEWHERE, Table 2 is --data=femnist or
sent140 with --dataset=PATH, and --data=cifar10_resnet with the PATH of Tiny-ImageNet. Fig. I is
partition.png in the folder of each row, Fig. III is drawn by experiments.factors.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from experiments.experiment import grid
from experiments.experiment.config import Config
from experiments.papers import study
from experiments.papers.study import Cells, Done, Row, Study
from experiments.parts import selection
from experiments.reporting import figures, report
from fedjax_inv.checks import UsageError


class Setting(NamedTuple):
    """A data set with its network."""

    preset: str
    factors: int  # at the hook
    hook: int  # where FedCFA's factors are: the layers, or stages, before them
    hooks: tuple[int, ...]  # to be compared
    rates: tuple[float, ...] = (0.003, 0.01, 0.03, 0.1)  # from which all methods choose
    rows: int = 16  # of averages, that a client sends


SETTINGS = {
    "fashion_mnist": Setting("fashion_mnist_dir60", 200, 1, (1, 2)),
    "fashion_mnist_cnn": Setting("fashion_mnist_dir60_cnn", 32, 2, (1, 2, 3)),
    "mnist": Setting("mnist_dir60", 200, 1, (1, 2)),
    "cifar10": Setting("cifar10_dir60", 32, 2, (1, 2, 3)),
    "cifar10_resnet": Setting("cifar10_dir60_resnet", 64, 2, (1, 2, 4)),
    "digits": Setting("digits_dir10", 64, 1, (1, 2), (0.01, 0.03, 0.1, 0.3)),
    "femnist": Setting("femnist_users", 64, 2, (1, 2)),
    # Rows of texts hold the weights of all words at each place.
    "sent140": Setting("sent140_users", 256, 1, (1,), rows=4),
}


def _preset(data: str) -> str:
    return f"--preset=fedcfa_paper,{SETTINGS[data].preset}"


def _top_k(data: str, eighths: int = 3) -> int:
    """How many factors are replaced; the paper's choice is 24 of 64."""
    return SETTINGS[data].factors * eighths // 8


def _fedcfa(data: str, *settings: str) -> tuple[str, ...]:
    """Flags of FedCFA with the paper's settings, but for those that are given."""
    chosen = SETTINGS[data]
    named = {"top_k": str(_top_k(data)), "positive_weight": "5.0", "negative_weight": "5.0"}
    named |= {"rows": str(chosen.rows)} if chosen.rows != 16 else {}
    named |= dict(setting.split("=") for setting in settings)
    return (
        *(_preset(data), "--algorithm=fedcfa", f"--cut={chosen.hook}"),
        *(f"--set={name}={value}" for name, value in named.items()),
    )


def _listed(values: Sequence[float]) -> str:
    return ",".join(f"{value:g}" for value in values)


def methods(data: str) -> list[Row]:
    """Seven methods, each with a choice of the same four learning rates. A hyperparameter of a
    method's own has its paper's value, as have FedCFA's."""
    rates = SETTINGS[data].rates
    four = f"--learning_rate={_listed(rates)}"
    # Without its momentum, SGD has to take larger steps to get as far.
    plain = ("--momentum=0", f"--learning_rate={_listed([5 * rate for rate in rates])}")
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


_IID = ("--partition=iid", "--alpha=0.5")  # the default, which has no effect
_PARTITIONS = {
    "Dir60(0.2)": ("--alpha=0.2",),
    "Dir60(0.6)": (),
    "IID60": _IID,
    "Dir100(0.2)": ("--alpha=0.2", "--clients=100", "--cohort=20"),
    "Dir100(0.6)": ("--clients=100", "--cohort=20"),
    "IID100": (*_IID, "--clients=100", "--cohort=20"),
}


_BY_USER = {"Non-IID": (), "IID60": _IID, "Dir60(0.6)": ("--partition=dirichlet", "--alpha=0.6")}


def partitions(data: str) -> list[Row]:
    """Three methods on the paper's six partitions, or by user, at random and by label; one of those
    is that of `methods`, whose runs are the same. Raises UsageError for data that are too few."""
    if data == "digits":
        raise UsageError(f"--data={data}: has too few examples for 60 clients")
    compared = [row for row in methods(data) if row.label in ("FedAvg", "FedMix", "FedCFA")]
    rows = []
    for name, flags in (_BY_USER if data in ("femnist", "sent140") else _PARTITIONS).items():
        for row in compared:
            label = f"{row.label}-{grid.folder_name(name)}" if flags else row.label
            rows.append(Row(label, (*row.flags, *flags), row.label, name))
    return rows


# What is compared within a row, in one program: by the row's series, a column's name and the
# hyperparameters of its runs.
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
_FDC = {"without-FDC": "0.0", "with-FDC": "0.1"}


def ablation(data: str) -> list[Row]:
    """Table 4: each of the counterfactual losses on and off, with and without decorrelation.

    Each combination has a choice of learning rates, as a loss with a weight of 5 makes steps
    larger, too.
    """
    weights = ("positive_weight=0.0,5.0", "negative_weight=0.0,5.0")
    rates = f"--learning_rate={_listed(SETTINGS[data].rates)}"
    return [
        Row(
            f"ablation-{name}",
            (*_fedcfa(data, *weights, f"decorrelation_weight={weight}"), rates),
            "ablation",
        )
        for name, weight in _FDC.items()
    ]


def correlation(data: str) -> list[Row]:
    """Table IV: the weight of decorrelation, where the counterfactual losses train the head alone,
    as in the release, and where they train all."""
    weights = f"decorrelation_weight={','.join(_COLUMNS['correlation'])}"
    return [
        Row(f"correlation-{name}", _fedcfa(data, weights, f"detach={detach}"), "correlation")
        for name, detach in (("head", "true"), ("all", "false"))
    ]


def loss_grid(data: str) -> list[Row]:
    """Fig. 6: the weights of the counterfactual losses, with and without decorrelation."""
    weights = (f"positive_weight={_listed(_R)}", f"negative_weight={_listed(_R)}")
    return [
        Row(
            f"grid-{name}",
            (*_fedcfa(data, *weights, f"decorrelation_weight={weight}"), "--seeds=0"),
            "loss_grid",
        )
        for name, weight in _FDC.items()
    ]


def hooks(data: str) -> list[Row]:
    """Table 5: where the factors are, and how many of them are replaced. The paper's hook 0, the
    input, has as many factors as an image has channels, fewer than it replaces."""
    rows = []
    for hook in SETTINGS[data].hooks:
        for eighths in (1, 2, 3, 4):
            top_k = str(_top_k(data, eighths))
            # Of two flags, the last one counts.
            flags = (*_fedcfa(data, f"top_k={top_k}"), f"--cut={hook}")
            rows.append(Row(f"hook-{hook}-top_k-{top_k}", flags, f"hook {hook}", top_k))
    return rows


def simpson(data: str) -> list[Row]:
    """Fig. 4: from one network, trained on random colours, on clients whose colours mislead. What
    is told is the last round: validation is misled, too."""
    if data not in ("mnist", "digits"):
        raise UsageError(f"--data={data}: must be mnist or digits for this study")
    flags = (f"{_preset(data)},simpson_five", f"--cut={SETTINGS[data].hook}")
    pretraining = (
        *("--algorithm=erm", "--shading=random", "--local_steps=1", "--rounds=200"),
        *("--checkpoint_every=200", "--stop_above=0.95", "--after_stop=end"),
        "--watch_examples=2000",
    )
    first = Row("simpson-pretrained", (*flags, *pretraining))
    compared = {
        "FedAvg": (*flags, "--algorithm=fedavg"),
        "FedMix": (*flags, "--algorithm=fedmix"),
        "FedCFA": (*_fedcfa(data), *flags),
    }
    start = f"{first.folder}/erm-test"
    return [
        first,
        *(
            Row(f"simpson-{name}", own, name, "Simpson's paradox", start)
            for name, own in compared.items()
        ),
    ]


def _evaluations(one: Done) -> dict[str, list[dict[str, Any]]]:
    """By column of a row that was run, what is selected of each seed; nothing where all diverged.

    Of several learning rates each column has its own.
    """
    result = one.only.result
    told = {}
    for name, hyper in _COLUMNS[one.row.series].items():
        runs = [run for run in result["runs"] if hyper.items() <= run["hyper"].items()]
        if runs:
            chosen = report.choose(name, result | {"runs": runs}, one.config.watching.select)
            told[name] = [run["selected"] for run in chosen.runs] if chosen else []
    return told


def _percents(lines: Sequence[dict[str, Any]], key: str = "test_accuracy") -> list[float]:
    return [100 * line[key] for line in lines]


def _spread(values: Sequence[float]) -> str:
    return report.spread(values) if values else "diverged"


# What the paper's data sets are called here, and in which networks local files are read.
_PAPER_DATA = ("fashion_mnist", "cifar100", "cifar10", "tiny_imagenet")
_BY_NETWORK = {"leaf_cnn": "femnist", "lstm": "sent140"}


def paper_data(config: Config) -> str:
    """The paper's data set that a row is on, whatever a local copy is called; "" if none."""
    stem = config.data.stem.replace("-", "_")
    named = next((name for name in _PAPER_DATA if stem.startswith(name)), "")
    return _BY_NETWORK.get(config.model.model, named)


def partition_name(config: Config) -> str:
    """The partition as the paper calls it."""
    chosen = config.partition
    if chosen.partition == "dirichlet":
        return f"Dir{chosen.clients}({chosen.alpha:g})"
    return f"IID{chosen.clients}" if chosen.partition == "iid" else "Non-IID"


# The accuracy that counts as reached, where it is not the paper's Table III.
_OUR_TARGETS = {"fashion_mnist": 80.0, "mnist": 95.0, "cifar10": 50.0, "digits": 80.0}


def target(config: Config) -> float | None:
    """The test accuracy, in percent, that is to be reached; None where none is known."""
    if (paper_data(config), config.model.model) == ("cifar10", "resnet18"):
        return TARGETS.get(partition_name(config))
    return _OUR_TARGETS.get(config.data.stem)


def rounds_to(lines: Sequence[dict[str, Any]], percent: float) -> float:
    """The first evaluation at which the test accuracy is as high, NaN if it never is."""
    told = selection.trained(lines)
    reached = (line["round"] for line in told if 100 * line["test_accuracy"] >= percent)
    return next(reached, np.nan)


def _speed(one: Done) -> Cells:
    """Rounds to the target, or as in the paper the best accuracy of those that did not reach it."""
    percent = target(one.config)
    if percent is None:
        return {}
    rounds = [rounds_to(lines, percent) for lines in one.only.logs]
    text = report.spread(rounds)
    if np.isnan(rounds).any():
        told = map(selection.trained, one.only.logs)
        best = report.spread([max(_percents(lines)) for lines in told])
        text = f"> {one.config.run.rounds}, best {best}"
    return {f"rounds to {percent:g}%": text}


def tell(one: Done) -> Cells:
    """Test accuracy where the row's rule selects, and the paper's number."""
    runs = one.only.runs
    if not runs:
        return {"partition": partition_name(one.config), "test, %": "diverged"}
    if one.row.series == "loss_grid":
        return _told_grid(one)
    if one.row.series in _COLUMNS:
        told = _evaluations(one)
        cells = {f"{name}, %": _spread(_percents(lines)) for name, lines in told.items()}
        return cells | _paper_columns(one)
    picked = [run["selected"] for run in runs]
    others = [run["hyper"] for run in one.only.result["runs"]]
    varied = [
        f"{name}={value:g}"
        for name, value in runs[0]["hyper"].items()
        if any(other[name] != value for other in others)
    ]
    return {
        "partition": partition_name(one.config),
        **({"selected": ", ".join(varied)} if varied else {}),
        "validation, %": report.percent([line["validation_accuracy"] for line in picked]),
        "test, %": report.percent([line["test_accuracy"] for line in picked]),
        "test at the last, %": report.percent([run["last"]["test_accuracy"] for run in runs]),
        **_speed(one),
        "MB sent": report.spread([run["last"]["bytes"] / 1e6 for run in runs]),
        **_paper_cells(one),
    }


def _told_grid(one: Done) -> Cells:
    """The corners of the grid and its best cell; all of it is in the figure."""
    told = _evaluations(one)
    means = {name: float(np.mean(_percents(lines))) for name, lines in told.items() if lines}
    best = max(means, key=means.__getitem__)
    corners = {f"{name}, %": f"{means.get(name, np.nan):.1f}" for name in ("0.1/0.1", "10/10")}
    return {
        "positive/negative": best,
        "the best of the grid, %": f"{means[best]:.1f}",
        "5/5, %": f"{means.get('5/5', np.nan):.1f}",
        **corners,
        "diverged": f"{len(told) - len(means)} of {len(told)}",
    }


def _finished(done: Sequence[Done]) -> list[Done]:
    return [one for one in done if one.only.runs]


def _save(figure: Figure, path: Path) -> str:
    figures.save(figure, path)
    return f"Figure: {path}."


def draw_by_round(path: Path, data: str, done: Sequence[Done]) -> str:
    """Test accuracy by round, means over seeds and their range: a panel per partition, a line per
    method; returns where it is."""
    told = [one for one in _finished(done) if one.row.series]
    panels = list(dict.fromkeys(one.row.x for one in told))
    if not panels:
        return "No figure: every row diverged."
    size = (max(4.4, 7.0 / len(panels)), 3.4)
    figure, axes = figures.panels(len(panels), size, x_label="round", y_label="test accuracy, %")
    series = list(dict.fromkeys(one.row.series for one in told))
    for axis, panel in zip(axes, panels, strict=True):
        for one in told:
            if one.row.x != panel:
                continue
            by_seed = np.array([_percents(log) for log in one.only.logs])
            rounds = [line["round"] for line in one.only.logs[0]]
            number = series.index(one.row.series)
            style = figures.style(number) | {"markevery": figures.spaced(len(rounds), number)}
            color, low, high = style["color"], by_seed.min(0), by_seed.max(0)
            axis.plot(rounds, by_seed.mean(0), **style, lw=1.4, label=one.row.series)
            axis.fill_between(rounds, low, high, color=color, alpha=0.12, lw=0)
        axis.set_title(panel or partition_name(told[0].config), fontsize=10)
        figures.whole_numbers(axis)
    figures.entitle(figure, f"{data}: mean over seeds, and from the worst of them to the best")
    figures.legend_of(figure, axes)
    return _save(figure, path)


def draw_by_seed(path: Path, data: str, done: Sequence[Done]) -> str:
    """Fig. 5: accuracy where it is selected, a dot per seed beside mean and standard deviation;
    returns where it is."""
    told = _finished(done)
    partitions_told = list(dict.fromkeys(one.row.x for one in told))
    names = list(dict.fromkeys(one.row.series for one in told))
    if not names:
        return "No figure: every row diverged."
    several = len(partitions_told) > 1
    ticks = partitions_told if several else names
    figure = Figure(figsize=(max(6.0, 1.3 * len(ticks)), 3.8), layout="constrained")
    axis = figure.subplots()
    for one in told:
        index = names.index(one.row.series)
        place = float(index)
        if several:
            shift = (index - (len(names) - 1) / 2) / (len(names) + 1)
            place = partitions_told.index(one.row.x) + shift
        tests = _percents([run["selected"] for run in one.only.runs])
        std = np.std(tests, ddof=len(tests) > 1)
        style, label = figures.style(index), one.row.series
        color, marker = style["color"], style["marker"]
        axis.errorbar(place, np.mean(tests), std, **style, capsize=4, label=label)
        axis.plot([place + 0.08] * len(tests), tests, marker, color=color, ms=2, alpha=0.6)
    axis.set_xticks(range(len(ticks)), ticks)
    axis.set_ylabel("test accuracy, %")
    figures.entitle(figure, f"{data}: a dot per seed, mean and standard deviation")
    if several:
        figures.legend_of(figure, [axis])
    return _save(figure, path)


def draw_columns(x_label: str) -> study.Draw:
    """A figure with a line per row through what is compared within it."""

    def draw(path: Path, data: str, done: Sequence[Done]) -> str:
        """Test accuracy and the mean correlation of factors; returns where it is."""

        def points(
            values: Callable[[dict[str, Any]], float],
        ) -> dict[str, list[tuple[str, list[float]]]]:
            return {
                one.row.label: [
                    (name, [values(line) for line in lines])
                    for name, lines in _evaluations(one).items()
                ]
                for one in _finished(done)
            }

        quantities = {
            "test accuracy in percent": points(lambda line: 100 * line["test_accuracy"]),
            "mean |correlation| of factors": points(
                lambda line: line["train_metrics"]["correlation"]
            ),
        }
        title = f"{data}, {partition_name(done[0].config)}"
        study.draw_series(path, title, x_label, quantities)
        return f"Figure: {path}."

    return draw


def draw_hooks(path: Path, data: str, done: Sequence[Done]) -> str:
    """Table 5 as lines, one per hook; returns where it is."""
    series: dict[str, list[tuple[str, list[float]]]] = {}
    for one in done:
        tests = _percents([run["selected"] for run in one.only.runs])
        series.setdefault(one.row.series, []).append((one.row.x, tests))
    title = f"{data}, {partition_name(done[0].config)}"
    points = {"test accuracy in percent": series}
    study.draw_series(path, title, "factors replaced (top_k)", points)
    return f"Figure: {path}."


def draw_grid(path: Path, data: str, done: Sequence[Done]) -> str:
    """Fig. 6: a map per row; returns where it is."""
    maps: dict[str, np.ndarray] = {}
    for one in _finished(done):
        told = _evaluations(one)
        tests = [_percents(told.get(name, [])) for name in _COLUMNS["loss_grid"]]
        means = np.array([np.mean(each) if each else np.nan for each in tests])
        maps[one.row.label] = means.reshape(len(_R), len(_R))
    if not maps or np.isnan(list(maps.values())).all():
        return "No figure: every row diverged."
    low, high = np.nanmin(list(maps.values())), np.nanmax(list(maps.values()))
    figure = Figure(figsize=(4.4 * len(maps) + 0.8, 4.2), layout="constrained")
    axes = figure.subplots(1, len(maps), squeeze=False)[0]
    for axis, (name, values) in zip(axes, maps.items(), strict=True):
        picture = axis.imshow(values, cmap="viridis", vmin=low, vmax=high)
        for (i, j), value in np.ndenumerate(values):
            dark = value < (low + high) / 2
            text = "none" if np.isnan(value) else f"{value:.1f}"
            color = "white" if dark else "black"
            axis.text(j, i, text, ha="center", va="center", fontsize=7, color=color)
        axis.set_xticks(range(len(_R)), [f"{value:g}" for value in _R])
        axis.set_yticks(range(len(_R)), [f"{value:g}" for value in _R])
        axis.set(title=name, xlabel="weight of positives", ylabel="weight of negatives")
    figure.colorbar(picture, ax=list(axes), label="test accuracy, %")
    figures.entitle(figure, f"{data}, {partition_name(done[0].config)}")
    return _save(figure, path)


# Tables 1 and I, as printed, "FedPRV" being FedPVR: percent by partition.
_COLUMNS_OF_TABLE_1 = tuple(_PARTITIONS)
_TABLE_1 = {
    "cifar100": """
FedAvg    40.70±0.24 42.85±0.26 44.37±0.40 38.17±0.32 40.19±0.26 42.19±0.52
FedProx   40.39±0.23 42.51±0.34 44.21±0.64 38.27±0.46 39.90±0.42 42.24±0.98
SCAFFOLD  29.36±0.39 33.30±0.48 37.96±0.26 23.25±0.54 29.98±0.19 32.77±0.25
FedPVR    38.35±1.11 42.91±0.49 45.91±0.05 30.65±0.74 36.58±0.14 39.96±0.30
q-FedAvg  40.34±0.60 42.61±0.63 44.43±0.28 38.15±0.48 40.20±0.10 42.04±0.65
FedMix    42.51±0.28 44.16±0.26 45.65±0.31 39.78±0.07 41.43±0.84 43.63±0.64
FedCFA    46.96±1.04 49.32±0.20 48.31±0.53 46.71±0.59 49.18±0.75 47.86±1.22
""",
    "cifar10": """
FedAvg    65.88±0.32 73.95±0.16 75.43±0.51 62.87±0.12 70.99±0.70 72.82±0.35
FedProx   72.23±0.44 77.68±0.03 76.93±0.28 70.36±0.75 75.47±0.53 73.36±0.47
SCAFFOLD  33.05±5.57 54.58±3.95 75.96±0.57 34.69±2.16 56.17±1.91 71.84±0.77
FedPVR    59.42±2.26 71.52±0.21 77.42±0.04 55.43±1.74 67.11±0.76 76.16±0.37
q-FedAvg  71.71±1.05 77.96±0.19 76.92±0.09 70.04±1.55 75.47±0.52 73.68±0.33
FedMix    74.61±0.74 78.64±0.53 77.90±0.17 73.91±0.79 77.11±0.31 73.93±0.06
FedCFA    75.89±1.00 82.43±0.08 83.36±0.51 75.76±0.15 81.73±0.12 81.68±0.89
""",
    "fashion_mnist": """
FedAvg    91.52±0.04 92.16±0.12 92.37±0.12 91.63±0.28 92.19±0.09 92.02±0.13
FedProx   91.39±0.10 92.42±0.07 92.38±0.10 91.57±0.05 92.20±0.13 92.06±0.30
SCAFFOLD  87.65±0.13 90.07±0.19 91.81±0.14 87.81±0.10 90.00±0.02 91.09±0.05
FedPVR    89.57±0.05 91.42±0.12 92.60±0.28 89.01±0.17 91.12±0.05 92.27±0.08
q-FedAvg  91.43±0.15 92.27±0.14 92.26±0.14 91.53±0.04 92.19±0.18 91.99±0.11
FedMix    91.76±0.13 92.51±0.04 92.84±0.13 91.88±0.13 92.54±0.11 92.30±0.11
FedCFA    91.75±0.05 92.86±0.31 92.86±0.07 91.90±0.05 92.90±0.23 92.32±0.22
""",
}

# Table II, likewise; IID is IID60.
_COLUMNS_OF_TABLE_2 = (
    *(("tiny_imagenet", partition) for partition in ("Dir60(0.2)", "Dir60(0.6)", "IID60")),
    *((data, partition) for data in ("femnist", "sent140") for partition in ("Non-IID", "IID60")),
)
_TABLE_2 = """
FedAvg    27.39±0.13 30.90±0.29 33.01±0.57 81.31±0.94 84.82±0.14 68.10±0.48 78.90±0.09
FedProx   27.34±0.05 30.78±0.16 32.93±0.52 81.63±0.08 85.00±0.13 68.10±0.44 78.97±0.25
q-FedAvg  26.89±0.07 30.70±0.13 32.75±0.55 81.90±0.58 84.69±0.01 68.04±0.71 78.90±0.09
FedMix    28.01±0.19 32.43±0.13 32.45±0.78 82.31±0.21 85.29±0.06 67.97±0.39 78.66±0.11
FedCFA    30.70±0.68 32.86±0.77 33.57±1.09 83.19±0.54 85.19±0.17 69.26±0.37 78.98±0.00
"""

# Table III, CIFAR-10: (rounds, accuracy then), or (>, the best accuracy within 1000 rounds).
TARGETS = dict(zip(_COLUMNS_OF_TABLE_1, (75.5, 80.0, 78.4, 73.6, 80.0, 75.6), strict=True))
_TABLE_3 = """
FedAvg    (>,66.22)   (>,73.76)   (>,74.99)   (>,62.95)   (>,71.14)   (>,72.42)
FedProx   (>,74.03)   (>,78.84)   (>,77.16)   (>,72.37)   (>,76.15)   (>,73.46)
SCAFFOLD  (>,32.77)   (>,64.26)   (693,78.46) (>,38.34)   (>,64.75)   (800,75.68)
q-FedAvg  (>,72.23)   (>,78.52)   (>,77.04)   (>,72.03)   (>,76.05)   (>,73.56)
FedMix    (610,75.69) (>,79.86)   (>,77.79)   (>,72.25)   (>,77.92)   (>,74.00)
FedCFA    (375,75.58) (468,80.01) (453,78.41) (427,73.61) (449,80.03) (408,75.67)
"""


def _parsed(table: str, columns: Sequence[Any]) -> dict[tuple[str, Any], str]:
    """(method, column) -> the entry."""
    numbers: dict[tuple[str, Any], str] = {}
    for line in table.strip().splitlines():
        method, *cells = line.split()
        numbers |= {(method, column): cell for column, cell in zip(columns, cells, strict=True)}
    return numbers


def _all() -> dict[tuple[str, str, str], str]:
    numbers: dict[tuple[str, str, str], str] = {}
    for data, table in _TABLE_1.items():
        told = _parsed(table, _COLUMNS_OF_TABLE_1)
        numbers |= {(method, data, partition): cell for (method, partition), cell in told.items()}
    told = _parsed(_TABLE_2, _COLUMNS_OF_TABLE_2)
    return numbers | {(method, *column): cell for (method, column), cell in told.items()}


# (method, data set, partition) -> accuracy; (method, partition) -> rounds to TARGETS, on CIFAR-10.
NUMBERS = _all()
ROUNDS = _parsed(_TABLE_3, _COLUMNS_OF_TABLE_1)

# CIFAR-10 again. Table 4 and Table IV, on Dir60(0.6): by the columns above. Table 4 looks like runs
# without decorrelation, Table IV is with it.
ABLATION = {
    "Cls.": "78.17",
    "Cls.+Pos.": "78.86",
    "Cls.+Neg.": "78.87",
    "Cls.+Pos.+Neg.": "80.01",
}
CORRELATION = {"0.001": "81.44", "0.01": "81.49", "0.1": "82.85", "1": "80.67"}
# Table 5: (hook, top_k, partition), on ResNet-18.
HOOKS = {
    (hook, top_k, partition): number
    for hook, top_k, numbers in (
        ("hook 1", "24", ("77.87", "75.96")),
        ("hook 2", "24", ("80.01", "80.03")),
        ("hook 4", "24", ("75.31", "73.54")),
        ("hook 2", "8", ("78.53", "76.51")),
        ("hook 2", "16", ("79.62", "78.57")),
        ("hook 2", "32", ("78.57", "79.01")),
    )
    for partition, number in zip(("Dir60(0.6)", "Dir100(0.6)"), numbers, strict=True)
}


def _paper_cells(one: Done) -> Cells:
    """The paper's numbers of a method, or of a hook."""
    data, where, method = paper_data(one.config), partition_name(one.config), one.row.series
    cells = {"paper, %": NUMBERS.get((method, data, where), "")}
    if data == "cifar10":
        cells["paper: rounds, %"] = ROUNDS.get((method, where), "")
        cells["paper, %"] += HOOKS.get((method, one.row.x, where), "")
    return {name: text for name, text in cells.items() if text}


def _paper_columns(one: Done) -> Cells:
    """The paper's numbers of what is compared within a row."""
    if (paper_data(one.config), partition_name(one.config)) != ("cifar10", "Dir60(0.6)"):
        return {}
    told = {"ablation-without-FDC": ABLATION, "correlation-head": CORRELATION}
    return {f"paper: {name}": text for name, text in told.get(one.row.label, {}).items()}


PAPER = study.Paper(
    "fedcfa",
    tuple(SETTINGS),
    {
        "methods": Study(methods, {"_by_round": draw_by_round, "_by_seed": draw_by_seed}),
        "partitions": Study(partitions, {"_by_round": draw_by_round, "_by_seed": draw_by_seed}),
        "ablation": Study(ablation, {"": draw_columns("losses")}),
        "hooks": Study(hooks, {"": draw_hooks}),
        "correlation": Study(correlation, {"": draw_columns("weight of decorrelation")}),
        "loss_grid": Study(loss_grid, {"": draw_grid}),
        "simpson": Study(simpson, {"_by_round": draw_by_round}),
    },
    tell,
    numbers=lambda label, data: {},  # they depend on the partition, so `tell` has them
    caption=(
        "Mean ± standard deviation over seeds, each of which draws its own partition. Of each run "
        "the evaluation, and of each row the hyperparameters, that serve the clients' validation "
        "examples best, unless --select says otherwise; the paper's numbers are of its last round. "
        "FDC: decorrelation with weight 0.1. The paper's networks are larger: ResNet-18 on images."
    ),
    last={},
    check=study.check_one_cell,
)


if __name__ == "__main__":
    study.main(PAPER, __doc__)
