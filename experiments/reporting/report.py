"""Tables of finished cells."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.parts import selection
from experiments.parts.selection import RULES
from experiments.reporting.tables import table as written
from experiments.running import files
from experiments.running.records import Line, Result, RunResult


def explained(rule: str) -> str:
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
    hyper: dict[str, float]  # the selected values of hyperparameters with several values
    runs: list[RunResult]  # `selected`: what the rule picks, or the last evaluation
    indices: list[int]  # of the runs in the cell
    diverged: str  # how many runs of the cell diverged

    @property
    def selected(self) -> list[Line]:
        """The selected evaluation of each seed."""
        return [run["selected"] for run in self.runs]

    @property
    def last(self) -> list[Line]:
        """The last evaluation of each seed."""
        return [run["last"] for run in self.runs]

    def over_seeds(self, value: Callable[[Any], float]) -> list[float]:
        """A value of each seed's selected evaluation."""
        return [value(line) for line in self.selected]


def choose(label: str, result: Any, rule: str = "validation") -> Chosen | None:
    """Selects a cell's hyperparameters, and an evaluation of each seed, by a rule of `selection`.

    Settings in which a seed diverged, or in which the rule picks no evaluation, are excluded; if
    all are, the result is None. Settings in which the rule picks evaluations for more seeds win.

    result: a `records.Result`, or a plain dict with the same entries.
    """
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
        picked = [selection.picked(run, rule) for run in runs]
        count = sum(line is not None for line in picked)
        if count == 0 or any(run["diverged"] for run in runs):
            continue
        runs = [
            run | {"selected": run["last"] if line is None else line}
            for run, line in zip(runs, picked, strict=True)
        ]
        mean = float(np.mean([RULES[rule].score(run["selected"]) for run in runs]))
        if (count, mean) > best_rank:
            hyper = {k: v for k, v in runs[0]["hyper"].items() if k in varied}
            best = Chosen(label, _held_out(result), hyper, runs, indices, diverged)
            best_rank = (count, mean)
    return best


def _held_out(result: Any) -> str:
    """The held-out domain, or the name of the test split in the evaluations of a result."""
    if result["cell"]["held_out"] is not None:
        return result["cell"]["held_out"]
    domains = result["runs"][0]["last"]["domains"]
    return next(name for name, domain in domains.items() if domain["split"] == "test")


def _why_none(result: Result) -> str:
    """The table's text for a cell in which nothing could be chosen."""
    settings = {str(run.hyper) for run in result.runs}
    broken = {str(run.hyper) for run in result.runs if run.diverged}
    return "diverged" if settings == broken else "none"


def percent(values: Sequence[float]) -> str:
    """The mean and standard deviation over seeds, in percent, as text."""
    return spread([100 * value for value in values])


def spread(values: Sequence[float]) -> str:
    """The mean and standard deviation over seeds, as text."""
    mean = f"{np.mean(values):.1f}"
    return f"{mean} ± {np.std(values, ddof=1):.1f}" if len(values) > 1 else mean


def tests(lines: Sequence[Line]) -> str:
    """The mean and standard deviation of the test accuracy, as text."""
    return percent([line.test_accuracy for line in lines])


def table(
    chosen: Sequence[Chosen],
    paper: Mapping[str, str],
    cells: Mapping[tuple[str, str], str] | None = None,
) -> str:
    """The main table: the test accuracies at the selected evaluations, a row per algorithm.

    The columns are each held-out domain, their mean and the worst one, then the mean selected round
    and the mean accuracy at the last round.

    paper: algorithm -> its number in a paper.
    cells: (label, held-out domain) of each cell -> the text if nothing was chosen.
    """
    cells = cells or {(one.label, one.held_out): "" for one in chosen}
    held_outs = list(dict.fromkeys(held_out for _, held_out in cells))
    by_label = {
        label: {one.held_out: one for one in chosen if one.label == label} for label, _ in cells
    }

    def test_of(held_out: str) -> Callable[[str], str]:
        def text(label: str) -> str:
            one = by_label[label].get(held_out)
            return tests(one.selected) if one else cells.get((label, held_out), "")

        return text

    def over_domains(
        value: Callable[[Chosen], list[float]],
        join: Callable[..., Any],
        text: Callable[[Sequence[float]], str],
    ) -> Callable[[str], str]:
        """The column of a value per seed, joined over held-out domains; empty if a domain lacks it.

        join: reduces [domains, seeds] along the first axis.
        """

        def joined(label: str) -> str:
            ones = by_label[label].values()
            return (
                text(join([value(one) for one in ones], 0)) if len(ones) == len(held_outs) else ""
            )

        return joined

    def test(one: Chosen) -> list[float]:
        return [line.test_accuracy for line in one.selected]

    columns: list[tuple[str, Callable[[str], str]]] = [
        ("held-out accuracy, %", lambda label: label),
        *((held_out, test_of(held_out)) for held_out in held_outs),
    ]
    if len(held_outs) > 1:
        columns.append(("mean", over_domains(test, np.mean, percent)))
        columns.append(("worst domain", over_domains(test, np.min, percent)))
    columns += [
        (
            "at round",
            over_domains(lambda one: [line.round for line in one.selected], np.mean, spread),
        ),
        (
            "at the last round",
            over_domains(lambda one: [line.test_accuracy for line in one.last], np.mean, percent),
        ),
    ]
    if paper:
        columns.append(("paper", lambda label: paper.get(label.split()[0], "")))
    return written(by_label, columns)


def domains_table(chosen: Sequence[Chosen]) -> str:
    """The accuracies by domain at the selected evaluation: test if held out, else validation."""
    held_out = chosen[0].held_out

    def of(name: str) -> Callable[[Chosen], str]:
        return lambda one: percent([line.domains[name].accuracy for line in one.selected])

    columns: list[tuple[str, Callable[[Chosen], str]]] = [
        ("accuracy by domain, %", lambda one: one.label),
        *(
            (f"{name} (held out)" if name == held_out else name, of(name))
            for name in chosen[0].selected[0].domains
        ),
        ("worst domain", lambda one: percent([line.worst_accuracy for line in one.selected])),
    ]
    return written(chosen, columns)


class _Stopped(NamedTuple):
    """The stops of a cell's seeds at a threshold."""

    chosen: Chosen
    threshold: float
    met: str  # the number of seeds that stopped
    stops: list[Any]  # a `records.Stop` of each seed that stopped


def stops_table(chosen: Sequence[Chosen]) -> str:
    """The evaluations at the stop, a row per cell and threshold, over the seeds that stopped."""
    rows = []
    for one in chosen:
        for stops in zip(*(run.stops or [] for run in one.runs), strict=True):
            met = [stop for stop in stops if stop.round is not None]
            rows.append(_Stopped(one, stops[0].threshold, f"{len(met)}/{len(stops)}", met))

    def domains(row: _Stopped) -> str:
        names = row.stops[0].domains if row.stops else ()
        of = {name: [stop.domains[name].accuracy for stop in row.stops] for name in names}
        return ", ".join(f"{name} {percent(values)}" for name, values in of.items())

    def over(
        value: Callable[[Any], float], text: Callable[[Sequence[float]], str]
    ) -> Callable[[_Stopped], str]:
        return lambda row: text([value(stop) for stop in row.stops]) if row.stops else ""

    return written(
        rows,
        {
            "at the stop": lambda row: row.chosen.label,
            "held out": lambda row: row.chosen.held_out,
            "threshold": lambda row: f"{row.threshold:g}",
            "stopped": lambda row: row.met,
            "round": over(lambda stop: stop.round, spread),
            "training, %": over(lambda stop: stop.train_accuracy, percent),
            "by domain, %": domains,
            "worst domain, %": over(lambda stop: stop.worst_accuracy, percent),
            "held out at the last round, %": lambda row: tests(row.chosen.last),
        },
    )


def choices_table(chosen: Sequence[Chosen]) -> str:
    """The selected hyperparameters and rounds, their validation accuracy, and their cost."""
    columns: dict[str, Callable[[Chosen], str]] = {
        "algorithm": lambda one: one.label,
        "held out": lambda one: one.held_out,
        "selected": lambda one: ", ".join(f"{k}={v:g}" for k, v in one.hyper.items()),
        "at round": lambda one: ", ".join(str(line.round) for line in one.selected),
        "validation, %": lambda one: percent([e.validation_accuracy for e in one.selected]),
        "held out, %": lambda one: tests(one.selected),
        "held out at the last round, %": lambda one: tests(one.last),
        "MB sent in all": lambda one: f"{np.mean([line.bytes for line in one.last]) / 1e6:.1f}",
        "runs diverged": lambda one: one.diverged,
    }
    if any(line.dropped is not None for one in chosen for line in one.last):
        columns["rounds with a client dropped"] = lambda one: ", ".join(
            str(line.dropped or 0) for line in one.last
        )
    return written(chosen, columns)


def write(
    folder: Path,
    results: Iterable[tuple[str, Result]],
    *,
    title: str,
    paper: Mapping[str, str],
    rule: str = "validation",
) -> str:
    """Writes table.md, and returns the table.

    results: (label, result) of each cell. rule: the rule of selection.
    """
    results = list(results)
    picked = [choose(label, result, rule) for label, result in results]
    ones = [one for one in picked if one is not None]
    missing = {(label, _held_out(result)): _why_none(result) for label, result in results}
    if not ones:
        text = "every run diverged: lower --learning_rate"
        if not all(run.diverged for _, result in results for run in result.runs):
            text = "a seed of every setting diverged: lower --learning_rate"
        if "none" in missing.values():
            text = f"nothing to select by {rule}: no seed of any setting has such an evaluation"
        files.write(folder / "table.md", text + "\n")
        return text
    test = table(ones, paper, missing)
    parts = [f"# {title}", test]
    if len({one.held_out for one in ones}) == 1:
        parts.append(domains_table(ones))
    if ones[0].runs[0].stops is not None:
        parts.append(stops_table(ones))
    parts += [explained(rule), choices_table(ones)]
    files.write(folder / "table.md", "\n\n".join(parts) + "\n")
    return test
