"""The tables and figures of FedIPG (Hao et al. 2025, arXiv 2503.06158), and what they leave open.

python -m experiments.papers.fedipg --study=colours --data=colored_mnist

Studies: first_look (what invariance is for), colours (FedIPG where its penalty acts, beside FL
Games), regimes (where it acts: local work x penalty x its part x how it is estimated), domains
(Table II), penalties (Fig. 4: FedIPG by its penalty, 50 clients), combinations (Fig. 5: ten rules
from digit to colour, each held out), stains (Table III, Fig. 7: coloured strokes, grounds or both),
exit (Fig. 3: one of twenty clients is slow, lossy or rotated, and may leave). Any flag of `sweep`
given here goes to all rows; every seed draws its environments anew.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments import contributions
from experiments.experiment import config
from experiments.papers import study
from experiments.papers.study import Cells, Done, Row, Study
from experiments.parts import selection
from experiments.reporting import figures, report
from fedjax_inv.checks import UsageError

DATA = (
    *("colored_mnist", "colored_digits", "rotated_digits", "rotated_mnist", "pacs"),
    *("mnist", "digits", "cifar10"),
)
_COLORED = {"colored_mnist": "colored_mnist_14", "colored_digits": "colored_digits_small"}


def _colored(data: str) -> str:
    """The preset of coloured data; raises UsageError for other data."""
    if data not in _COLORED:
        raise UsageError(f"--data={data}: must be one of {', '.join(_COLORED)} for this study")
    return _COLORED[data]


def _adaptive(data: str, work: str, *more: str) -> tuple[str, ...]:
    """Flags of work with a server that adapts. work: epochs or full_batch."""
    small = ",adaptive_small" if data.endswith("_digits") else ""
    after = "".join(f",{preset}" for preset in more)
    of_data = "rotated_digits_small" if data == "rotated_digits" else _colored(data)
    return (f"--preset={of_data},adaptive_{work}{small}{after}",)


def _fedipg(data: str, work: str) -> tuple[str, ...]:
    """FedIPG where its penalty acts. The warm-up ends when the cue has been learned."""
    flags = _adaptive(data, work, "fedipg_acts")
    if data.endswith("_digits"):  # too few validation examples for the domains to differ
        return (*flags, "--set=warmup_rounds=60", "--set=penalty=10000.0", "--select=last")
    if work == "full_batch":  # the penalty that agreement chooses with epochs
        return (*flags, "--set=warmup_rounds=50", "--set=penalty=10000.0")
    return (*flags, "--set=warmup_rounds=20")


def _game(data: str, play: str) -> Row:
    """FL Games on the same data and network, told at the stop."""
    preset = f"--preset={data}_f,games_{play},{_colored(data)}"
    # A small network swings later, and faster at a higher rate.
    small = ("--learning_rate=0.01", "--warm_start=20") if data == "colored_digits" else ()
    return Row(f"F-{play}", (preset, *small))


def first_look(data: str) -> list[Row]:
    """Where invariance helps, and where it has nothing to help with."""
    if data == "rotated_digits":
        work = ("--preset=rotated_digits_small",)
        return [
            Row("FedAvg", work),
            Row("FedIPG", (*work, "--algorithm=fedipg", "--set=penalty=0.001,0.01")),
        ]
    return [
        Row("FedAvg", _adaptive(data, "full_batch")),
        Row("FedIPG", _fedipg(data, "full_batch")),
        _game(data, "parallel"),
    ]


def colours(data: str) -> list[Row]:
    """FedAvg, FedIPG with local epochs and with full batches, and FL Games."""
    return [
        Row("FedAvg-epochs", _adaptive(data, "epochs")),
        Row("FedIPG-epochs", _fedipg(data, "epochs")),
        Row("FedIPG-full-batch", _fedipg(data, "full_batch")),
        _game(data, "sequential"),
        _game(data, "parallel"),
    ]


_LOCAL = {
    "1": ("full_batch", "--local_steps=1"),
    "2": ("full_batch", "--local_steps=2"),
    "5": ("full_batch", "--local_steps=5"),
    "epoch": ("epochs", "--local_epochs=1"),
}
_TRIED = (0.0, 1.0, 1e2, 1e4, 1e5)  # penalties


def regimes(data: str) -> list[Row]:
    """Local work x penalty (in one run) x the part that it is on x how s^2 is estimated."""
    rows = []
    for part in ("classifier", "all"):
        for estimator in ("square", "halves"):
            for local, (work, flag) in _LOCAL.items():
                # A single step may be of any size, as the server's Adam scales it; several may not.
                flags = (
                    *_fedipg(data, work),
                    flag,
                    *(("--learning_rate=0.1", "--clip=1") if local in ("2", "5") else ()),
                    f"--set=penalty_on={part}",
                    f"--set=estimator={estimator}",
                    f"--set=penalty={','.join(map(str, _TRIED))}",
                    "--select=last",
                    *(["--held_out=75"] if data == "rotated_digits" else []),
                )
                series = f"{part}, {estimator}"
                rows.append(Row(f"{part}-{estimator}-{local}", flags, series, local))
    return rows


def domains(data: str) -> list[Row]:
    """Table II: each domain held out in turn, all methods on one grid of as many settings."""
    if data not in ("rotated_mnist", "pacs", "rotated_digits"):
        raise UsageError(f"--data={data}: must be rotated_mnist, pacs or rotated_digits")
    preset = (f"--preset={data}_domains",)
    # Four settings for FedAvg, too: rates, where the others have two and two penalties.
    rates = "0.1,0.2,0.35,0.5" if data == "rotated_digits" else "0.005,0.01,0.02,0.05"
    tuned = {
        "FedAvg": ("--algorithm=fedavg", f"--learning_rate={rates}"),
        "FedIIR": ("--algorithm=fediir", "--set=penalty=0.001,0.01"),
        "FedIPG": ("--algorithm=fedipg", "--set=penalty=0.001,0.01"),
        "FedIPG-large": (
            "--algorithm=fedipg",
            "--set=penalty=100.0,10000.0",
            "--set=penalty_on=classifier",
            "--set=scale_loss=true",
            "--set=warmup_rounds=10",
        ),
    }
    return [Row(name, (*preset, *flags)) for name, flags in tuned.items()]


_SWEPT = (0.0, 1e-4, 1e-3, 1e-2, 0.1, 1.0)  # Fig. 4's range, and what is beyond it


def penalties(data: str) -> list[Row]:
    """Fig. 4: FedIPG by its penalty with 50 clients, five a round, and by what it is on."""
    if data not in ("rotated_mnist", "pacs", "rotated_digits"):
        raise UsageError(f"--data={data}: must be rotated_mnist, pacs or rotated_digits")
    few = data == "rotated_digits"
    flags = (
        f"--preset={data}_domains",
        *(() if few else ("--clients=50", "--cohort=5")),
        "--algorithm=fedipg",
        f"--learning_rate={'0.2' if few else '0.05'}",
        f"--set=penalty={','.join(map(str, _SWEPT))}",
    )
    return [
        Row(f"penalty on {part}", (*flags, f"--set=penalty_on={part}"), part)
        for part in ("all", "classifier")
    ]


def combinations(data: str) -> list[Row]:
    """Fig. 5: each of ten rules from digit to colour held out, all methods on one grid."""
    if data not in ("mnist", "digits"):
        raise UsageError(f"--data={data}: must be mnist or digits for this study")
    preset = f"--preset=combinations_{data}"
    tuned = {
        "FedAvg": ("--algorithm=fedavg", "--learning_rate=0.01,0.02,0.05,0.1"),
        "FedIIR": ("--algorithm=fediir", "--set=penalty=0.001,0.01"),
        "FedIPG": ("--algorithm=fedipg", "--set=penalty=0.001,0.01"),
    }
    return [Row(name, (preset, *flags)) for name, flags in tuned.items()]


# Table III: what is coloured, clients, and examples of each. Embedded digits have fewer.
_STAINS = {
    "mnist": {"foreground": (5, 600), "background": (5, 2000), "both": (20, 2000)},
    "digits": {"foreground": (5, 100), "background": (5, 250), "both": (20, 70)},
}


def stains(data: str) -> list[Row]:
    """Table III: the colour goes with the label, and in the test with the opposite one."""
    if data not in _STAINS:
        raise UsageError(f"--data={data}: must be one of {', '.join(_STAINS)} for this study")
    rates = "--learning_rate=0.02,0.05,0.1,0.2"
    rows = []
    for stain, (num_clients, size) in _STAINS[data].items():
        preset = f"--preset=stained_{data}"
        of_stain = (
            f"--stain={stain}",
            f"--training_domains={num_clients}",
            f"--domain_size={size}",
        )
        methods = {
            "ERM": (preset, "--algorithm=erm", rates),
            "FedAvg": (preset, "--algorithm=fedavg", rates),
            "FedIPG": (preset, "--algorithm=fedipg", "--set=penalty=0.001,0.01"),
            # Where the penalty acts, and FedAvg with the same server.
            "FedAvg-adaptive": (f"{preset},stained_adaptive", rates),
            "FedIPG-adaptive": (
                f"{preset},stained_adaptive,fedipg_acts",
                "--learning_rate=0.05,0.1",
            ),
        }
        rows += [Row(f"{stain} {name}", (*flags, *of_stain)) for name, flags in methods.items()]
    return rows


# Fig. 3: how client 0 is aberrant, from little to much, and what a degree is called.
_ABERRANT = {
    "slow": (("2", "5", "10", "20", "40"), "rounds per update"),
    "lossy": (("0.8", "0.4", "0.2", "0.1", "0.05"), "probability of success"),
    "rotated": (("90", "105", "120", "150", "180"), "degrees, the others have 0 to 75"),
}
# The learning rate of the slow and lossy sweeps, and of the rotated one, whose clients differ more.
_RATES = {"mnist": (0.3, 0.2), "digits": (0.1, 0.1), "cifar10": (0.02, 0.02)}
_LOCAL_STEPS = {"mnist": 1, "digits": 1, "cifar10": 5}
# Rounds of pre-training, likewise: several updates of a slow client; the more of them, the further
# the outer ones of the regular angles are from the mean.
_PRETRAINING = {"mnist": (100, 40), "digits": (100, 60), "cifar10": (100, 100)}
_LOW_LOSS = {"mnist": 1.0, "digits": 1.2, "cifar10": 1.6}


def leaving(data: str) -> list[Row]:
    """Fig. 3: a client is aberrant by degrees: all train, it may leave, or it never came."""
    if data not in _RATES:
        raise UsageError(f"--data={data}: must be one of {', '.join(_RATES)} for this study")
    # It is never heard of; the others hold what they hold in all other rows.
    absent = "--lossy=0:0"
    rows = [Row("without", (*_at(data, "slow"), absent), "slow+lossy: without it")]
    kinds = ["slow", "lossy"]
    if data != "cifar10":
        kinds.append("rotated")
        flags = (*_at(data, "rotated", "180"), absent)
        rows.append(Row("without-rotated", flags, "rotated: without it"))
    for kind in kinds:
        exits = (
            "--algorithm=exit_strategy",
            f"--set=step_size={_rate(data, kind) * _LOCAL_STEPS[data]:g}",
            f"--set=pretraining_rounds={_PRETRAINING[data][kind == 'rotated']}",
        )
        methods = {
            "FedAvg": ("--algorithm=fedavg",),
            "FedAvg-exit": (*exits, "--set=wrapped=fedavg"),
            "FedIPG-exit": (*exits, "--set=wrapped=fedipg", "--set=penalty=0.01"),
        }
        for degree in _ABERRANT[kind][0]:
            flags = _at(data, kind, degree)
            rows += [
                Row(f"{kind}-{degree}-{name}", (*flags, *method), f"{kind}: {name}", degree)
                for name, method in methods.items()
            ]
    return rows


def _rate(data: str, kind: str) -> float:
    return _RATES[data][kind == "rotated"]


def _at(data: str, kind: str, degree: str = "") -> tuple[str, ...]:
    """Flags of a point of a sweep; without a degree, nothing is aberrant."""
    flags = (f"--preset=exit_{data}", f"--learning_rate={_rate(data, kind)}")
    if kind == "rotated":
        return (*flags, "--environment=rotated", "--partition=domain", f"--odd_angles={degree}")
    return (*flags, f"--{kind}=0:{degree}", "--first_all") if degree else flags


def _regular(one: Done) -> list[list[dict[str, float]]]:
    """By seed and evaluation: round, and accuracy and loss of the regular clients.

    They are those of validation, of the domains that no odd client has; as means over domains.
    """
    odd = {f"{angle:g}" for angle in config.flat(one.config)["odd_angles"]}

    def means(line: dict[str, Any]) -> dict[str, float]:
        held = [
            domain
            for name, domain in line["domains"].items()
            if domain["split"] == "validation" and name not in odd
        ]
        served = ("accuracy", "loss")
        return {"round": line["round"]} | {k: float(np.mean([d[k] for d in held])) for k in served}

    return [[means(line) for line in selection.trained(lines)] for lines in one.only.logs]


def _rounds_to(lines: Sequence[dict[str, float]], low: float) -> float:
    """The first evaluation at which the loss is low, NaN if it never is."""
    return next((line["round"] for line in lines if line["loss"] < low), np.nan)


def _aberrant(one: Done) -> Cells:
    """A row of Fig. 3: how the regular clients fare, and who has left."""
    low = _LOW_LOSS[one.config.data.stem]
    by_seed = _regular(one)
    reached = [_rounds_to(lines, low) for lines in by_seed]
    odd = [f"{angle:g}" for angle in config.flat(one.config)["odd_angles"]]
    last = [lines[-1] for lines in one.only.logs]
    return {
        "regular clients, %": report.percent([lines[-1]["accuracy"] for lines in by_seed]),
        "all training examples, %": report.percent([line["train_by_round"][-1] for line in last]),
        "client 0's angle, %": report.percent(
            [line["domains"][odd[0]]["accuracy"] for line in last]
        )
        if odd
        else "",
        f"rounds to loss {low}": "not reached"
        if np.isnan(reached).any()
        else report.spread(reached),
        "client 0 left": "",
        "others that left": "",
        **_left(one),
    }


def _kinds(row: Row) -> set[str]:
    """The sweeps that a row is in."""
    return set(row.series.partition(": ")[0].split("+"))


def _left(one: Done) -> Cells:
    """Who has left, by the newest checkpoint."""
    if one.config.method.algorithm != ("exit_strategy",):
        return {}
    (folder,) = (path.parent for path in Path(one.config.run.run_dir).glob("*/config.json"))
    (phase,) = contributions.find(folder)
    exits = phase.outcome.exits
    return {
        "client 0 left": f"{exits[:, 0].sum()} of {len(exits)} seeds",
        "others that left": f"{exits[:, 1:].sum() / len(exits):g} of {exits.shape[1] - 1}",
    }


def draw_aberrant(path: Path, data: str, done: Sequence[Done]) -> str:
    """Fig. 3: a picture for each kind of aberrant client; returns where they are."""
    told = [one for one in done if all(cell.runs for cell in one.cells)]
    low = _LOW_LOSS[data]
    places = []
    for kind, (degrees, x_label) in _ABERRANT.items():
        mine = [one for one in told if kind in _kinds(one.row)]
        if not mine:
            continue
        accuracy: dict[str, list[tuple[str, list[float]]]] = {}
        speed: dict[str, list[tuple[str, list[float]]]] = {}
        for one in mine:
            by_seed = _regular(one)
            name = one.row.series.partition(": ")[2]
            for degree in [one.row.x] if one.row.x else degrees:  # the benchmark has all
                accuracy.setdefault(name, []).append(
                    (degree, [100 * lines[-1]["accuracy"] for lines in by_seed])
                )
                speed.setdefault(name, []).append(
                    (degree, [_rounds_to(lines, low) for lines in by_seed])
                )
        place = path.with_name(f"{path.stem}_{kind}.png")
        quantities = {"accuracy of regular clients, %": accuracy, f"rounds to loss {low}": speed}
        study.draw_series(place, f"{data}: client 0 is {kind}", x_label, quantities)
        places.append(str(place))
    return f"Figures: {', '.join(places)}."


def tell(one: Done) -> Cells:
    """Test accuracy where the row's rule selects, at the stop of games, and at the last round."""
    if not all(cell.runs for cell in one.cells):
        return {"selected by": one.config.watching.select, "test, %": "none"}
    if _kinds(one.row) & set(_ABERRANT):
        return _aberrant(one)
    if len(one.cells) > 1:
        return _domains(one)
    if one.row.series and one.config.method.algorithm == ("fedipg",):
        return _by_penalty(one)
    runs = one.only.runs
    picked = [run["selected"] for run in runs]
    rule = one.config.watching.select
    if one.config.watching.stop_below:
        picked = [run["stops"][0] for run in runs if run["stops"][0]["round"]]
        rule = f"the stop, {len(picked)} of {len(runs)}"
    hyper = {name: value for name, value in runs[0]["hyper"].items() if name == "penalty"}
    return {
        "selected by": rule,
        "penalty": ", ".join(f"{value:g}" for value in hyper.values()),
        "at round": report.spread([each["round"] for each in picked]) if picked else "",
        "training domains, %": _percent(picked, "validation_accuracy"),
        "test, %": _percent(picked, "test_accuracy"),
        "worst domain, %": _percent(picked, "worst_accuracy"),
        "test at the last, %": _percent([run["last"] for run in runs], "test_accuracy"),
        "MB sent by then": report.spread(
            [_bytes(run, at) for run, at in zip(runs, picked, strict=False)]
        )
        if picked
        else "",
    }


def _by_penalty(one: Done) -> Cells:
    """At the last round, for each penalty."""
    runs = one.only.result["runs"]
    return {
        f"test at the last, penalty {penalty:g}, %": _percent(
            [run["last"] for run in runs if run["hyper"]["penalty"] == penalty], "test_accuracy"
        )
        for penalty in dict.fromkeys(run["hyper"]["penalty"] for run in runs)
    }


def _percent(lines: Sequence[dict[str, Any]], key: str) -> str:
    return report.percent([line[key] for line in lines]) if lines else ""


def _bytes(run: dict[str, Any], at: dict[str, Any]) -> float:
    """Megabytes up to an evaluation; every round sends as many."""
    return run["last"]["bytes"] / run["last"]["round"] * at["round"] / 1e6


def _domains(one: Done) -> Cells:
    """Of each held-out domain, of all on average and of the worst."""
    tests = {
        cell.held_out: [run["selected"]["test_accuracy"] for run in cell.runs] for cell in one.cells
    }
    by_seed = np.array(list(tests.values()))
    if one.row.series:
        return _swept(one)
    oracle = [report.choose(one.row.label, cell.result, "oracle") for cell in one.cells]
    best = [chosen.over_seeds(lambda line: line["test_accuracy"]) for chosen in oracle if chosen]
    return {
        "selected by": one.config.watching.select,
        **{f"{domain}, %": report.percent(values) for domain, values in tests.items()},
        "mean, %": report.percent(by_seed.mean(0)),
        "worst, %": report.percent(by_seed.min(0)),
        "mean by oracle, %": report.percent(np.mean(best, 0)),
    }


def _by_domain(one: Done, penalty: float) -> np.ndarray | None:
    """Test accuracies [held-out domains, seeds] at one penalty; None if a run diverged."""
    runs = [
        [run for run in cell.result["runs"] if run["hyper"]["penalty"] == penalty]
        for cell in one.cells
    ]
    if any(run["diverged"] for cell in runs for run in cell):
        return None
    return np.array([[run["selected"]["test_accuracy"] for run in cell] for cell in runs])


def _swept(one: Done) -> Cells:
    """The mean over held-out domains, for each penalty."""
    tests = {penalty: _by_domain(one, penalty) for penalty in _SWEPT}
    return {
        f"penalty {penalty:g}, %": "diverged" if test is None else report.percent(test.mean(0))
        for penalty, test in tests.items()
    }


def draw_swept(path: Path, data: str, done: Sequence[Done]) -> str:
    """Fig. 4: the mean over held-out domains, and the worst of them; returns where it is."""
    mean: dict[str, list[tuple[str, list[float]]]] = {}
    worst: dict[str, list[tuple[str, list[float]]]] = {}
    for one in done:
        for penalty in _SWEPT:
            tests = _by_domain(one, penalty)
            for quantity, over in ((mean, np.mean), (worst, np.min)):
                values = [] if tests is None else [float(v) for v in 100 * over(tests, axis=0)]
                quantity.setdefault(one.row.label, []).append((f"{penalty:g}", values))
    quantities = {"mean of held-out domains, %": mean, "worst held-out domain, %": worst}
    study.draw_series(path, f"{data}: FedIPG", "penalty", quantities)
    return f"Figure: {path}."


def draw_by_round(path: Path, data: str, done: Sequence[Done]) -> str:
    """Test accuracy by round, a panel per held-out domain, and of a single one by megabytes sent,
    a line per seed; returns where they are."""
    held_out = [cell.held_out for cell in done[0].cells]
    panels = [(place, "round", 1.0) for place in range(len(held_out))]
    if len(panels) == 1:
        panels.append((0, "bytes", 1e-6))
    figure = Figure(figsize=(5.5 * len(panels), 4.4), layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axis, (place, key, scale) in zip(axes, panels, strict=True):
        for index, one in enumerate(done):
            cell = one.cells[place]
            for number, (run, lines) in enumerate(zip(cell.runs, cell.logs, strict=True)):
                x, y = _curve(lines, key)
                label = one.row.label if number == 0 else None
                # Where every round is told, curves may swing and cover all others.
                width, alpha = (0.5, 0.35) if len(y) > len(lines) else (1.2, 0.8)
                style = figures.style(index) | {"markevery": figures.spaced(len(y), index)}
                axis.plot(scale * x, 100 * y, **style, lw=width, alpha=alpha, label=label)
                at = _picked(one, run)
                if at is not None:
                    x_at = at["round"] if key == "round" else _bytes(run, at)
                    axis.plot(x_at, 100 * at["test_accuracy"], "o", color=f"C{index}", ms=7)
        axis.set_xlabel("round" if key == "round" else "MB sent in all")
        axis.set_title(figures.wrapped(f"held out: {held_out[place]}", 5), fontsize=10)
        if key == "bytes":
            axis.set_xscale("log")
    axes[0].set(ylabel="test accuracy, %", ylim=(0, 100))
    figures.entitle(figure, f"{data}: a line per seed, a large dot where its rule selects")
    figures.legend_of(figure, axes)
    figures.save(figure, path)
    return f"Figure: {path}."


def draw_stains(path: Path, data: str, done: Sequence[Done]) -> str:
    """Fig. 7: test accuracy by round, a panel per stain, mean and band of one standard deviation;
    returns where it is."""
    stained = list(dict.fromkeys(one.row.label.partition(" ")[0] for one in done))
    figure = Figure(figsize=(4.4 * len(stained), 3.8), layout="constrained")
    axes = figure.subplots(1, len(stained), sharey=True, squeeze=False)[0]
    for axis, stain in zip(axes, stained, strict=True):
        mine = [one for one in done if one.row.label.startswith(f"{stain} ") and one.only.logs]
        for number, one in enumerate(mine):
            rounds = [line["round"] for line in one.only.logs[0]]
            tests = 100 * np.array(
                [[line["test_accuracy"] for line in lines] for lines in one.only.logs]
            )
            mean, std = tests.mean(0), tests.std(0, ddof=len(tests) > 1)
            style = figures.style(number) | {"markevery": figures.spaced(len(rounds), number)}
            axis.plot(rounds, mean, **style, label=one.row.label.partition(" ")[2])
            axis.fill_between(rounds, mean - std, mean + std, color=style["color"], alpha=0.2)
        axis.set(xlabel="round", title=f"stained: {stain}")
    axes[0].set(ylabel="test accuracy, %", ylim=(0, 100))
    figures.entitle(figure, f"{data}: mean over seeds, bands of one standard deviation")
    figures.legend_of(figure, axes)
    figures.save(figure, path)
    return f"Figure: {path}."


def _curve(lines: Sequence[dict[str, Any]], key: str) -> tuple[np.ndarray, np.ndarray]:
    """Rounds or bytes, and test accuracy: of every round where it was watched, else evaluations."""
    if "test_by_round" not in lines[-1]:
        if key == "bytes":  # on a logarithmic axis, which has no 0
            lines = selection.trained(lines)
        return np.array([line[key] for line in lines]), np.array(
            [line["test_accuracy"] for line in lines]
        )
    test = np.concatenate([line["test_by_round"] for line in lines])
    rounds = np.arange(1, len(test) + 1)
    return rounds * (lines[-1][key] / lines[-1]["round"]), test


def _picked(one: Done, run: dict[str, Any]) -> dict[str, Any] | None:
    """The evaluation at which a run is told."""
    if one.config.watching.stop_below:
        stop = run["stops"][0]
        return stop if stop["round"] else None
    return run["selected"]


def draw_regimes(path: Path, data: str, done: Sequence[Done]) -> str:
    """Test accuracy at the last round, a map per part and estimate; returns where it is."""
    series = list(dict.fromkeys(one.row.series for one in done))
    figure = Figure(figsize=(3.4 * len(series) + 0.8, 3.4), layout="constrained")
    axes = figure.subplots(1, len(series), squeeze=False)[0]
    for axis, name in zip(axes, series, strict=True):
        rows = [one for one in done if one.row.series == name]
        means = np.full((len(rows), len(_TRIED)), np.nan)
        for i, one in enumerate(rows):
            for j, penalty in enumerate(_TRIED):
                runs = [r for r in one.only.result["runs"] if r["hyper"]["penalty"] == penalty]
                tests = [100 * r["last"]["test_accuracy"] for r in runs if not r["diverged"]]
                means[i, j] = np.mean(tests) if len(tests) == len(runs) else np.nan
                text = "div." if np.isnan(means[i, j]) else f"{means[i, j]:.0f}"
                axis.text(j, i, text, ha="center", va="center", fontsize=8)
        picture = axis.imshow(means, cmap="RdYlGn", vmin=10, vmax=75, aspect="auto")
        axis.set_xticks(range(len(_TRIED)), ["0", "1", "1e2", "1e4", "1e5"])
        axis.set_yticks(range(len(rows)), [one.row.x for one in rows])
        axis.set(title=name, xlabel="penalty", ylabel="local steps" if axis is axes[0] else "")
    figure.colorbar(picture, ax=list(axes), label="test accuracy, %")
    figures.entitle(figure, f"{data}: the held-out domain at the last round, mean over seeds")
    figures.save(figure, path)
    return f"Figure: {path}."


# Table III: test accuracy.
STAINED = {
    "foreground ERM": "55.78±2.61",
    "background ERM": "52.79±1.31",
    "both ERM": "66.46±4.07",
    "foreground FedAvg": "45.73±1.51",
    "background FedAvg": "49.71±1.23",
    "both FedAvg": "52.78±4.16",
    "foreground FedIPG": "63.99±1.48",
    "background FedIPG": "62.77±1.15",
    "both FedIPG": "62.08±4.24",
}

# Table II: held-out accuracy with 5 and with 50 clients.
NUMBERS = {
    ("FedAvg", "rotated_mnist"): ("94.32±0.09", "90.82±0.57"),
    ("FedIIR", "rotated_mnist"): ("95.33±0.14", "94.20±0.40"),
    ("FedIPG", "rotated_mnist"): ("96.40±0.20", "95.68±0.43"),
    ("FedAvg", "pacs"): ("81.33±0.01", "65.91±0.02"),
    ("FedIIR", "pacs"): ("81.23±0.01", "68.41±0.02"),
    ("FedIPG", "pacs"): ("81.75±0.01", "69.34±0.01"),
}


def numbers(label: str, data: str) -> Cells:
    """The paper's numbers of a row."""
    if data == "mnist" and label in STAINED:
        return {"paper: test": STAINED[label]}
    told = NUMBERS.get((label, data))
    return dict(zip(("paper: 5 clients", "paper: 50 clients"), told, strict=True)) if told else {}


PAPER = study.Paper(
    "fedipg",
    DATA,
    {
        "first_look": Study(first_look, {"_by_round": draw_by_round}),
        "colours": Study(colours, {"_by_round": draw_by_round}),
        "regimes": Study(regimes, {"": draw_regimes}),
        "domains": Study(domains, {}),
        "penalties": Study(penalties, {"": draw_swept}),
        "combinations": Study(combinations, {}),
        "stains": Study(stains, {"": draw_stains}),
        "exit": Study(leaving, {"": draw_aberrant}),
    },
    tell,
    numbers,
    caption=(
        "Mean ± standard deviation over seeds, each of which draws its own environments. Rules of "
        "selection: agreement, the first evaluation at which the training domains differ no more "
        "than by chance; validation, the best one on the training domains; games, at the stop. "
        "Exit: at the last round, regular clients by their validation examples."
    ),
    last={},
    check=lambda chosen: None,
)


if __name__ == "__main__":
    study.main(PAPER, __doc__)
