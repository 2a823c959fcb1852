"""The tables and figures of FL Games (Gupta et al. 2022), the paper's numbers beside ours.

python -m experiments.fl_games_tables --study=methods --data=colored_mnist

A study is a list of runs, each a line of flags for `sweep` with all seeds in one program; any other
flag given here goes to all of them (--seeds=0 --rounds=50 for a first look). What is finished is
kept, so a study may be interrupted, and shares its runs with the other studies of its folder.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
from absl import flags
from matplotlib.axes import Axes
from tabulate import tabulate

from experiments import build, config, devices, launch, registry, report, sweep
from experiments.fl_games_paper import NUMBERS, Numbers
from experiments.loop import Log
from fedjax_inv.algorithms.fl_games import MEMORY_MIXES
from fedjax_inv.data import environments

DATA = (
    *("colored_digits", "colored_mnist", "colored_fashion"),
    *("spurious_cifar10", "colored_dsprites"),
)


class Row(NamedTuple):
    """A line of a table."""

    label: str  # also the folder of its run
    flags: tuple[str, ...]


class Done(NamedTuple):
    """A row that has been run."""

    label: str
    settings: config.Config
    # Of its selected hyperparameters, one per seed; none if all diverged.
    runs: list[dict[str, Any]]
    logs: list[list[dict[str, Any]]]  # of those runs, the lines of metrics.jsonl

    @property
    def goes_on(self) -> bool:
        """Whether it was trained on after the stop."""
        return self.settings.after_stop == "continue"


def game(data: str, kind: str, play: str, *methods: str) -> Row:
    """A variant of the game: kind F or V, play sequential or parallel, methods: SMOOTH, FAST."""
    name = "+".join(methods)
    joined = "".join(f",games_{'_'.join(methods).lower()}" for _ in methods[:1])
    flag = f"--preset={data}_{kind.lower()},games_{play}{joined}"
    return Row("-".join(part for part in (kind, play, name) if part), (flag,))


def methods(data: str) -> list[Row]:
    """Table 1 and Table 4, and the curves of Figures 2b, 2c and 11 to 16."""
    rows = [
        Row(name, (f"--preset={data}_f,games_{name.lower()}",))
        for name in ("FedSGD", "FedAvg", "FedBN", "FedProx")
    ]
    for kind, smooth in (("F", ("SMOOTH",)), ("V", ("SMOOTH", "FAST"))):
        for play in ("sequential", "parallel"):
            rows += [game(data, kind, play), game(data, kind, play, *smooth)]
    return rows


def mixes(data: str) -> list[Row]:
    """The three scales of SMOOTH; the first is what SMOOTH alone means."""
    rows = []
    for play in ("sequential", "parallel"):
        label, preset = smooth = game(data, "F", play, "SMOOTH")
        rows += [game(data, "F", play), smooth]
        for mix in MEMORY_MIXES[1:]:
            rows.append(Row(f"{label}-{mix}", (*preset, f"--set=memory_mix={mix}")))
    return rows


def classes(data: str) -> list[Row]:
    """Tables 2 and 3: two, five and ten classes. The paper's training accuracy at the stop is above
    75% with five and ten, so the threshold is ours. Raises ValueError for data of two classes."""
    if data not in DATA[:3]:
        raise ValueError(f"--data={data}: has two classes; must be one of {', '.join(DATA[:3])}")
    return [
        Row(f"{label}-{count}-classes", (*preset, f"--num_classes={count}", *thresholds))
        for label, preset in (game(data, "F", play) for play in ("sequential", "parallel"))
        for count, *thresholds in ((2,), (5, "--stop_below=0.8,0.7"), (10, "--stop_below=0.8,0.7"))
    ]


def clients(data: str) -> list[Row]:
    """Figures 1b, 2a and 8 to 10: two to ten clients; for ten, IRM Games stops at 0.75."""

    def varied(name: str) -> tuple[str, str]:
        flips = ",".join(f"{flip:.6g}" for flip in environments.FLIPS[name])
        return f"--flips={flips}", f"--stop_below={'0.75,0.6' if name == '10' else '0.6,0.75'}"

    return [
        Row(f"{label}-{name}-clients", (*preset, *varied(name)))
        for label, preset in (
            game(data, "F", play, *smooth)
            for smooth in ((), ("SMOOTH",))
            for play in ("sequential", "parallel")
        )
        for name in environments.FLIPS
    ]


def steps(data: str) -> list[Row]:
    """Figures 17 to 20: from one local step to an exact best response, one pass (Section F.5)."""
    label, preset = game(data, "F", "parallel")
    some = [Row(f"{label}-{n}-steps", (*preset, f"--local_steps={n}")) for n in (1, 10, 30)]
    return [*some, Row(f"{label}-all-steps", (*preset, "--local_steps=0", "--local_epochs=1"))]


STUDIES: dict[str, Callable[[str], list[Row]]] = {
    study.__name__: study for study in (methods, mixes, classes, clients, steps)
}


def select(rows: Sequence[Row], labels: Sequence[str]) -> list[Row]:
    """The rows of these labels, all where there are none; raises ValueError for an unknown one."""
    for label in labels:
        registry.check_known("rows", label, [row.label for row in rows])
    return [row for row in rows if not labels or row.label in labels]


def checked(row: Row, folder: Path, overrides: Sequence[str]) -> config.Config:
    """The settings of a row; raises ValueError where the flags do not fit it."""
    place = folder / row.label
    try:
        settings = config.from_arguments(
            [*row.flags, *overrides, f"--run_dir={place}", "--resume"], nonfinite="mark"
        )
        several = settings.held_out == "all" or "," in settings.held_out
        if several or len(build.cells(settings, [None])) > 1:
            raise ValueError("the flags ask for several cells; for those there is sweep")
        if settings.num_processes > 1:
            raise ValueError(f"--num_processes={settings.num_processes}: must be 1")
        if settings.algorithm == ("fl_games",) and not settings.stop_below:
            raise ValueError("--stop_below=: must name a threshold for the games")
        if not settings.watch_examples:
            raise ValueError("--watch_examples=0: must be above 0")
    except ValueError as error:
        raise ValueError(f"{row.label}: {error}") from None
    return settings


def run(label: str, settings: config.Config) -> Done:
    """Runs a row, or reads what it left when it was run before."""
    sweep.sweep(settings)
    place = Path(settings.run_dir)
    (result,) = json.loads((place / "result.json").read_text())["cells"]
    chosen = report.choose(label, result)
    if chosen is None:
        return Done(label, settings, [], [])
    cell = build.Cell(**result["cell"])
    lines = Log.read(place / cell.name / "metrics.jsonl")
    logs = [[line for line in lines if line["run"] == index] for index in chosen.indices]
    return Done(label, settings, chosen.runs, logs)


CAPTION = (
    "Mean ± standard deviation over seeds. Games: at the stop, over seeds that stopped, training "
    "accuracy on all examples. Baselines: at the end, training accuracy on --watch_examples."
)


def table(data: str, done: Sequence[Done]) -> str:
    """Accuracy and rounds at the stop by the first threshold, or at the end where there is none."""
    rows = []
    for one in done:
        paper = NUMBERS.get((one.label, data), Numbers())
        if not one.runs:
            rows.append([one.label, "diverged", *[""] * 6, *paper])
            continue
        if one.settings.stop_below:
            stops = [run["stops"][0] for run in one.runs]
            told = [stop for stop in stops if stop["round"]]
            train = [stop["train_accuracy"] for stop in told]
            when = f"{len(told)}/{len(stops)} below {stops[0]['threshold']:g}"
        else:
            told = [run["last"] for run in one.runs]
            train = [log[-1]["train_by_round"][-1] for log in one.logs]
            when = "at the end"
        last = report.percent([run["last"]["test_accuracy"] for run in one.runs])
        rows.append(
            [
                one.label,
                when,
                report.spread([each["round"] for each in told])
                if told
                else f"> {one.settings.rounds}",
                report.percent(train) if told else "",
                report.percent([each["test_accuracy"] for each in told]) if told else "",
                report.percent([each["worst_accuracy"] for each in told]) if told else "",
                last if one.goes_on or not told else "",  # else some stand at their stop
                report.percent([run["selected"]["test_accuracy"] for run in one.runs]),
                *paper,
            ]
        )
    rows.append(["optimal", "", "", "75", "75", "75", "", "", "75", "75", ""])
    headers = [
        *(
            data,
            "stopped",
            "rounds",
            "train, %",
            "test, %",
            "worst domain, %",
            "test at the last, %",
        ),
        *("test at the best validation, %", "paper: train", "paper: test", "paper: rounds"),
    ]
    return tabulate(rows, headers, tablefmt="github", disable_numparse=True)


def draw_oscillation(path: Path, data: str, done: Sequence[Done]) -> str:
    """The accuracies of the first seed in every round, with the stop; returns where they are."""
    games = [one for one in done if one.runs and one.settings.stop_below]
    if not games:
        return "No figure: no game is left."
    columns = min(2, len(games))
    lines = -(-len(games) // columns)
    figure, axes = plt.subplots(
        lines,
        columns,
        figsize=(5.6 * columns, 2.3 * lines + 0.6),
        squeeze=False,
        sharex=True,
        sharey=True,
        layout="constrained",
    )
    for one, axis in zip(games, axes.flat, strict=False):
        _curves(axis, one)
        threshold = 100 * one.settings.stop_below[0]
        axis.set_title(f"{one.label}, stop below {threshold:g}%", fontsize=10)
    for unused in axes.flat[len(games) :]:
        unused.set_visible(False)
    for axis in axes[-1]:
        axis.set_xlabel("round")
    for axis in axes[:, 0]:
        axis.set_ylabel("accuracy, %")
    handles, names = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=len(names), frameon=False)
    figure.suptitle(f"{data}, seed {games[0].runs[0]['seed']}")
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return f"Figure: {path}."


def _curves(axis: Axes, one: Done) -> None:
    curves = {
        kind: [value for line in one.logs[0] for value in line[f"{kind}_by_round"]]
        for kind in ("train", "test")
    }
    stop, stops = one.runs[0]["stops"][0], [each["round"] for each in one.runs[0]["stops"]]
    length = len(curves["train"]) if one.goes_on or not all(stops) else max(stops)
    for kind, color in (("train", "C0"), ("test", "C1")):
        accuracy = 100 * np.array(curves[kind][:length])
        name = "training clients" if kind == "train" else "test client"
        axis.plot(np.arange(1, length + 1), accuracy, color, lw=1, label=name)
    axis.axhline(100 * stop["threshold"], color="0.6", lw=0.8, ls=":", label="threshold")
    axis.axvline(stop["round"] or np.nan, color="C3", lw=1, ls="--", label="the stop")
    axis.set_ylim(0, 100)


def draw_scaling(path: Path, data: str, done: Sequence[Done], what: str) -> str:
    """Rounds and test accuracy at the stop against what varies; returns where they are."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    series: dict[str, list[tuple[str, list[dict[str, Any]]]]] = {}
    for one in done:
        if not one.runs:
            continue
        name, value, _ = one.label.rsplit("-", 2)
        met = [run["stops"][0] for run in one.runs if run["stops"][0]["round"]]
        series.setdefault(name, []).append((value, met))
    for name, points in series.items():
        names = [value for value, _ in points]
        for axis, key, scale in ((left, "round", 1), (right, "test_accuracy", 100)):
            values = [[scale * stop[key] for stop in met] or [np.nan] for _, met in points]
            means = [np.mean(each) for each in values]
            stds = [np.std(each, ddof=len(each) > 1) for each in values]
            axis.errorbar(names, means, stds, label=name, capsize=3)
    left.set(xlabel=what, ylabel="rounds to the stop")
    right.set(xlabel=what, ylabel="test accuracy at the stop, %", ylim=(0, 100))
    handles, names = left.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=len(names), frameon=False)
    figure.suptitle(data)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return f"Figure: {path}."


# The x axis of the studies that have one.
_VARIES = {"classes": "classes", "clients": "training clients", "steps": "local steps a round"}


class Options(NamedTuple):
    """The flags of this binary."""

    study: str = "methods"
    rows: tuple[str, ...] = ()  # labels; all if there are none
    data: tuple[str, ...] = ("colored_mnist",)
    folder: Path = Path("runs/fl_games")
    overrides: tuple[str, ...] = ()  # flags of sweep for all rows


def main(options: Options) -> str:
    """Runs the study on each of the data and returns the tables; they and the figures are written.

    Raises ValueError, before any compute, for options that do not fit.
    """
    study, folder = options.study, options.folder
    rows = {
        data: {
            row.label: checked(row, folder / data, options.overrides)
            for row in select(STUDIES[study](data), options.rows)
        }
        for data in options.data
    }
    # A part of a study does not overwrite the table of all of it.
    name = f"{study}_some" if options.rows else study
    texts = []
    for data, settings in rows.items():
        devices.prepare(next(iter(settings.values())))
        done = [run(label, each) for label, each in settings.items()]
        text = table(data, done)
        (folder / data / f"{name}.md").write_text(f"{text}\n\n{CAPTION}\n")
        texts.append(text)
        if study in ("methods", "mixes", "steps"):
            texts.append(draw_oscillation(folder / data / f"{name}_by_round.png", data, done))
        if study in _VARIES:
            picture = folder / data / f"{name}.png"
            texts.append(draw_scaling(picture, data, done, _VARIES[study]))
    return "\n\n" + "\n\n".join([*texts, CAPTION])


def define(values: flags.FlagValues = flags.FLAGS) -> None:
    """Defines the flags, those of sweep among them."""
    default = Options()
    config.define(values, nonfinite="mark")
    flags.DEFINE_enum("study", default.study, list(STUDIES), "What to compare.", values)
    flags.DEFINE_list("rows", [], "Which rows of the study, by their labels; all if none.", values)
    flags.DEFINE_list("data", list(default.data), f"Data sets: {', '.join(DATA)}.", values)


def options(values: flags.FlagValues = flags.FLAGS) -> Options:
    """The parsed flags; those of sweep as they were given, but --run_dir, which is for all rows.

    Raises ValueError, in one line, for data that there are not.
    """
    for data in values.data:
        registry.check_known("data", data, DATA)
    known = flags.FlagValues()
    config.define(known)
    chosen = [values[name] for name in known if values[name].present and name != "run_dir"]
    return Options(
        values.study,
        tuple(values.rows),
        tuple(values.data),
        Path(values.run_dir) if values.run_dir else Options().folder,
        tuple(line for flag in chosen for line in flag.serialize().splitlines()),
    )


if __name__ == "__main__":
    define()
    flags.adopt_module_key_flags(config)  # for --help
    launch.main(main, options)
