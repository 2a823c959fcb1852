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

from experiments import build, config, launch, report, sweep
from experiments.fl_games_paper import NUMBERS, Numbers
from experiments.loop import Log
from fedjax_inv.algorithms.fl_games import MEMORY_MIXES
from fedjax_inv.data import environments

FLAGS = flags.FLAGS

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
    runs: list[dict[str, Any]]  # of its selected hyperparameters, one per seed
    logs: list[list[dict[str, Any]]]  # of those runs, the lines of metrics.jsonl
    folder: Path


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
    """The three scales of SMOOTH."""
    rows = [game(data, "F", "parallel")]
    for mix in MEMORY_MIXES:
        label, preset = game(data, "F", "parallel", "SMOOTH")
        rows.append(Row(f"{label}-{mix}", (*preset, f"--set=memory_mix={mix}")))
    return rows


def classes(data: str) -> list[Row]:
    """Tables 2 and 3: two, five and ten classes."""
    return [
        Row(
            f"{label}-{count}-classes", (*preset, f"--num_classes={count}", "--stop_below=0.75,0.6")
        )
        for label, preset in (game(data, "F", play) for play in ("sequential", "parallel"))
        for count in (2, 5, 10)
    ]


def clients(data: str) -> list[Row]:
    """Figures 1b, 2a and 8 to 10: two to ten clients."""
    return [
        Row(
            f"{label}-{name}-clients",
            (
                *preset,
                f"--flips={','.join(f'{flip:.6g}' for flip in flips)}",
                "--stop_below=0.75,0.6",
            ),
        )
        for label, preset in (
            game(data, "F", play, *smooth)
            for smooth in ((), ("SMOOTH",))
            for play in ("sequential", "parallel")
        )
        for name, flips in environments.FLIPS.items()
    ]


def steps(data: str) -> list[Row]:
    """Figures 17 to 20: from one local step to an exact best response, one pass (Section F.5)."""
    label, preset = game(data, "F", "parallel")
    some = [Row(f"{label}-{n}-steps", (*preset, f"--local_steps={n}")) for n in (1, 10, 30)]
    return [*some, Row(f"{label}-all-steps", (*preset, "--local_steps=0", "--local_epochs=1"))]


STUDIES: dict[str, Callable[[str], list[Row]]] = {
    study.__name__: study for study in (methods, mixes, classes, clients, steps)
}


def run(row: Row, folder: Path, overrides: Sequence[str]) -> Done:
    """Runs a row, or reads what it left when it was run before."""
    place = folder / row.label
    arguments = [*row.flags, *overrides, f"--run_dir={place}", "--resume"]
    sweep.sweep(config.of(arguments, nonfinite="mark"))
    (result,) = json.loads((place / "result.json").read_text())["cells"]
    chosen = report.choose(row.label, result)
    if chosen is None:
        return Done(row.label, [], [], place)
    (metrics,) = place.glob("*/metrics.jsonl")
    lines = Log.read(metrics)
    logs = [[line for line in lines if line["run"] == index] for index in chosen.indices]
    return Done(row.label, chosen.runs, logs, place)


def table(data: str, done: Sequence[Done]) -> str:
    """Accuracy and rounds at the stop by the first threshold, or at the end where there is none."""
    rows = []
    for one in done:
        paper = NUMBERS.get((one.label, data), Numbers())
        if not one.runs:
            rows.append([one.label, "diverged", *[""] * 6, *paper])
            continue
        stops = [run["stops"][0] for run in one.runs if "stops" in run]
        met = [stop for stop in stops if stop["round"]]
        if stops:
            told = met
            train = [stop["train_accuracy"] for stop in met]
            when = f"{len(met)}/{len(stops)} below {stops[0]['threshold']:g}"
        else:
            told = [run["last"] for run in one.runs]
            train = [log[-1]["train_by_round"][-1] for log in one.logs]
            when = "at the end"
        rows.append(
            [
                one.label,
                when,
                report.spread([each["round"] for each in told]) if told else "",
                report.percent(train) if told else "",
                report.percent([each["test_accuracy"] for each in told]) if told else "",
                report.percent([each["worst_accuracy"] for each in told]) if told else "",
                report.percent([run["last"]["test_accuracy"] for run in one.runs]),
                report.percent([run["selected"]["test_accuracy"] for run in one.runs]),
                *paper,
            ]
        )
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
    games = [one for one in done if one.logs and "stops" in one.runs[0]]
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
        axis.set_title(one.label, fontsize=10)
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
    rounds = np.arange(1, len(curves["train"]) + 1)
    axis.plot(rounds, 100 * np.array(curves["train"]), "C0", lw=1, label="training clients")
    axis.plot(rounds, 100 * np.array(curves["test"]), "C1", lw=1, label="test client")
    stop = one.runs[0]["stops"][0]
    below = f"training accuracy below {100 * stop['threshold']:g}%"
    axis.axhline(100 * stop["threshold"], color="0.6", lw=0.8, ls=":", label=below)
    axis.axvline(stop["round"] or np.nan, color="C3", lw=1, ls="--", label="the stop")
    axis.set_ylim(0, 100)


def draw_scaling(path: Path, data: str, done: Sequence[Done], what: str) -> str:
    """Rounds and test accuracy at the stop against what varies; returns where they are."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    series: dict[str, list[tuple[str, list[dict[str, Any]]]]] = {}
    for one in done:
        name, value, _ = one.label.rsplit("-", 2)
        met = [run["stops"][0] for run in one.runs if run["stops"][0]["round"]]
        series.setdefault(name, []).append((value, met))
    for name, points in series.items():
        names = [value for value, _ in points]
        for axis, key, scale in ((left, "round", 1), (right, "test_accuracy", 100)):
            values = [[scale * stop[key] for stop in met] or [np.nan] for _, met in points]
            means = [np.mean(each) for each in values]
            axis.errorbar(names, means, [np.std(each) for each in values], label=name, capsize=3)
    left.set(xlabel=what, ylabel="rounds to the stop")
    right.set(xlabel=what, ylabel="test accuracy at the stop, %", ylim=(0, 100))
    handles, names = left.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=len(names), frameon=False)
    figure.suptitle(data)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return f"Figure: {path}."


def main(settings: config.Config) -> str:
    """Runs --study on each of --data and returns the tables; they and the figures are written."""
    del settings  # checked; each row has its own
    for name in FLAGS.data:
        build.check_known("data", name, DATA)
    overrides = _given()
    texts = []
    for data in FLAGS.data:
        folder = Path(FLAGS.tables_dir) / data
        done = [run(row, folder, overrides) for row in STUDIES[FLAGS.study](data)]
        text = table(data, done)
        (folder / f"{FLAGS.study}.md").write_text(text + "\n")
        texts.append(text)
        if FLAGS.study in ("methods", "mixes", "steps"):
            texts.append(draw_oscillation(folder / f"{FLAGS.study}_by_round.png", data, done))
        if FLAGS.study in ("classes", "clients", "steps"):
            texts.append(draw_scaling(folder / f"{FLAGS.study}.png", data, done, FLAGS.study))
    return "\n\n" + "\n\n".join(texts)


def _given() -> list[str]:
    """The flags of `sweep` on the command line, as they were given."""
    known = flags.FlagValues()
    config.define(known)
    given = [FLAGS[name] for name in known if FLAGS[name].present]
    return [line for flag in given for line in flag.serialize().splitlines()]


if __name__ == "__main__":
    config.define(nonfinite="mark")
    flags.adopt_module_key_flags(config)  # for --help
    flags.DEFINE_enum("study", "methods", list(STUDIES), "What to compare.")
    flags.DEFINE_list("data", ["colored_mnist"], f"Data sets: {', '.join(DATA)}.")
    flags.DEFINE_string("tables_dir", "runs/fl_games", "Where runs, tables and figures go.")
    launch.main(main)
