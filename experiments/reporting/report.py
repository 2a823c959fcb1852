"""Tables of finished cells."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.parts import selection
from experiments.parts.selection import RULES
from experiments.reporting.tables import tabulate


def told(rule: str) -> str:
    """A rule of selection in words."""
    looks, scored = ("looked at", "test") if rule == "oracle" else ("never looked at", "validation")
    return (
        f"Model selection by {rule}: of each seed {RULES[rule].text}; of the hyperparameters those "
        f"with the best mean over seeds of the {scored} accuracy there; the held-out domain is "
        f"{looks}."
    )


class Chosen(NamedTuple):
    """The runs of a cell with the selected hyperparameters, one per seed."""

    label: str
    held_out: str
    hyper: dict[str, float]  # those that were chosen from several values
    runs: list[dict[str, Any]]
    indices: list[int]  # of those runs in the cell
    diverged: str  # how many of the cell's runs did

    def over_seeds(self, value: Callable[[dict[str, Any]], float]) -> list[float]:
        """value(selected evaluation) of each seed."""
        return [value(run["selected"]) for run in self.runs]


def choose(label: str, result: dict[str, Any], rule: str = "validation") -> Chosen | None:
    """Selects a cell's hyperparameters, and an evaluation of each seed, by a rule of `selection`.

    A setting in which the rule finds something for more seeds goes first. One of which a seed
    diverged, or with nothing to select for any, does not count; None if all do not.
    """
    held_out = _held_out(result)
    by_hyper: dict[str, list[int]] = {}
    for index, run in enumerate(result["runs"]):
        by_hyper.setdefault(str(run["hyper"]), []).append(index)
    varied = {
        name
        for run in result["runs"]
        for name, value in run["hyper"].items()
        if value != result["runs"][0]["hyper"][name]
    }
    num_diverged = sum(run["diverged"] for run in result["runs"])
    diverged = f"{num_diverged} of {len(result['runs'])}"
    best, best_rank = None, (0, -1.0)
    for indices in by_hyper.values():
        runs = [result["runs"][index] for index in indices]
        runs = [run | {"selected": selection.picked(run, rule)} for run in runs]
        count = sum(run["selected"] is not None for run in runs)
        if count == 0 or any(run["diverged"] for run in runs):
            continue
        # A seed with nothing to select is told as it ended.
        runs = [run | {"selected": run["selected"] or run["last"]} for run in runs]
        mean = float(np.mean([RULES[rule].score(run["selected"]) for run in runs]))
        if (count, mean) > best_rank:
            hyper = {k: v for k, v in runs[0]["hyper"].items() if k in varied}
            best = Chosen(label, held_out, hyper, runs, indices, diverged)
            best_rank = (count, mean)
    return best


def _held_out(result: dict[str, Any]) -> str:
    """The held-out domain, or what the evaluations of a result call the test split."""
    if result["cell"]["held_out"] is not None:
        return result["cell"]["held_out"]
    domains = result["runs"][0]["last"]["domains"]
    return next(name for name, domain in domains.items() if domain["split"] == "test")


def _why_none(result: dict[str, Any]) -> str:
    """What is told of a cell of which nothing could be chosen."""
    settings = {str(run["hyper"]) for run in result["runs"]}
    broken = {str(run["hyper"]) for run in result["runs"] if run["diverged"]}
    return "diverged" if settings == broken else "none"


def percent(values: Sequence[float]) -> str:
    """Mean and standard deviation over seeds, in percent."""
    return spread([100 * value for value in values])


def spread(values: Sequence[float]) -> str:
    """Mean and standard deviation over seeds."""
    mean = f"{np.mean(values):.1f}"
    return f"{mean} ± {np.std(values, ddof=1):.1f}" if len(values) > 1 else mean


def table(
    chosen: Sequence[Chosen],
    paper: dict[str, str],
    cells: Mapping[tuple[str, str], str] | None = None,
) -> str:
    """Test accuracy per held-out domain, its mean and the worst domain, a row per algorithm.

    Of all held-out domains, the mean round that is selected, and of the accuracy at the last round.
    cells: the label and the held-out domain of all, and what is told of one without a choice.
    """
    cells = cells or {(one.label, one.held_out): "" for one in chosen}
    held_outs = list(dict.fromkeys(held_out for _, held_out in cells))
    rows = []
    for label in dict.fromkeys(label for label, _ in cells):
        mine = {one.held_out: one for one in chosen if one.label == label}
        test = {h: one.over_seeds(lambda e: e["test_accuracy"]) for h, one in mine.items()}
        row = [
            label,
            *(percent(test[h]) if h in test else cells.get((label, h), "") for h in held_outs),
        ]
        complete = len(test) == len(held_outs)
        if len(held_outs) > 1:
            by_seed = np.array(list(test.values()))
            row += [percent(by_seed.mean(0)), percent(by_seed.min(0))] if complete else ["", ""]
        row += _in_time(list(mine.values())) if complete else ["", ""]
        rows.append([*row, paper.get(label.split()[0], "")] if paper else row)
    summary = ["mean", "worst domain"] if len(held_outs) > 1 else []
    summary += ["at round", "at the last round"]
    headers = ["held-out accuracy, %", *held_outs, *summary, *(["paper"] if paper else [])]
    return tabulate(rows, headers, tablefmt="github", disable_numparse=True)


def _in_time(chosen: Sequence[Chosen]) -> list[str]:
    """The selected round and the test accuracy at the last one, each a mean over held-out domains
    first."""
    rounds = [one.over_seeds(lambda e: e["round"]) for one in chosen]
    last = [[run["last"]["test_accuracy"] for run in one.runs] for one in chosen]
    return [spread(np.mean(rounds, 0)), percent(np.mean(last, 0))]


def domains_table(chosen: Sequence[Chosen]) -> str:
    """Accuracy per domain at the selected evaluation: validation, and test where held out."""
    rows = []
    names = list(chosen[0].runs[0]["selected"]["domains"])
    for one in chosen:
        scores = [
            [run["selected"]["domains"][name]["accuracy"] for run in one.runs] for name in names
        ]
        worst = one.over_seeds(lambda e: e["worst_accuracy"])
        rows.append([one.label, *map(percent, scores), percent(worst)])
    headers = [
        "accuracy by domain, %",
        *(f"{name} (held out)" if name == chosen[0].held_out else name for name in names),
        "worst domain",
    ]
    return tabulate(rows, headers, tablefmt="github", disable_numparse=True)


def stops_table(chosen: Sequence[Chosen]) -> str:
    """Per threshold of a stop what there was at the stop, over the seeds that stopped."""
    rows = []
    for one in chosen:
        last = percent([run["last"]["test_accuracy"] for run in one.runs])
        for index, first in enumerate(one.runs[0]["stops"]):
            stops = [run["stops"][index] for run in one.runs]
            met = [stop for stop in stops if stop["round"]]
            row = [one.label, one.held_out, f"{first['threshold']:g}", f"{len(met)}/{len(stops)}"]
            if met:
                domains = [
                    f"{name} {percent([stop['domains'][name]['accuracy'] for stop in met])}"
                    for name in met[0]["domains"]
                ]
                row += [
                    spread([stop["round"] for stop in met]),
                    percent([stop["train_accuracy"] for stop in met]),
                    ", ".join(domains),
                    percent([stop["worst_accuracy"] for stop in met]),
                ]
            else:
                row += ["", "", "", ""]
            rows.append([*row, last])
    headers = [
        *("at the stop", "held out", "threshold", "stopped", "round", "training, %"),
        *("by domain, %", "worst domain, %", "held out at the last round, %"),
    ]
    return tabulate(rows, headers, tablefmt="github", disable_numparse=True)


def choices_table(chosen: Sequence[Chosen]) -> str:
    """What was selected, by which validation accuracy, and at which cost."""
    drops = any("dropped" in run["last"] for one in chosen for run in one.runs)
    rows = [
        [
            one.label,
            one.held_out,
            ", ".join(f"{name}={value:g}" for name, value in one.hyper.items()),
            ", ".join(str(run["selected"]["round"]) for run in one.runs),
            percent(one.over_seeds(lambda e: e["validation_accuracy"])),
            percent(one.over_seeds(lambda e: e["test_accuracy"])),
            percent([run["last"]["test_accuracy"] for run in one.runs]),
            f"{np.mean([run['last']['bytes'] for run in one.runs]) / 1e6:.1f}",
            one.diverged,
            *([_dropped(one)] if drops else []),
        ]
        for one in chosen
    ]
    headers = [
        *("algorithm", "held out", "selected", "at round", "validation, %", "held out, %"),
        *("held out at the last round, %", "MB sent in all", "runs diverged"),
        *(["rounds with a client dropped"] if drops else []),
    ]
    return tabulate(rows, headers, tablefmt="github", disable_numparse=True)


def _dropped(one: Chosen) -> str:
    return ", ".join(str(run["last"].get("dropped", 0)) for run in one.runs)


def write(
    folder: Path,
    results: Iterable[tuple[str, dict[str, Any]]],
    *,
    title: str,
    paper: dict[str, str],
    rule: str = "validation",
) -> str:
    """Writes table.md, and returns the table.

    results: (label, result) of each cell. rule: of selection.
    """
    results = list(results)
    picked = [choose(label, result, rule) for label, result in results]
    ones = [one for one in picked if one is not None]
    missing = {(label, _held_out(result)): _why_none(result) for label, result in results}
    if not ones:
        text = "every run diverged: lower --learning_rate"
        if not all(run["diverged"] for _, result in results for run in result["runs"]):
            text = "a seed of every setting diverged: lower --learning_rate"
        if "none" in missing.values():
            text = f"nothing to select by {rule}: no seed of any setting has such an evaluation"
        (folder / "table.md").write_text(text + "\n")
        return text
    test = table(ones, paper, missing)
    parts = [f"# {title}", test]
    if len({one.held_out for one in ones}) == 1:
        parts.append(domains_table(ones))
    if "stops" in ones[0].runs[0]:
        parts.append(stops_table(ones))
    parts += [told(rule), choices_table(ones)]
    (folder / "table.md").write_text("\n\n".join(parts) + "\n")
    return test
