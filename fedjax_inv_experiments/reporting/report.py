"""Tables of finished cells."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjax_inv_experiments.parts import selection
from fedjax_inv_experiments.parts.objective import ACCURACY, Measure
from fedjax_inv_experiments.parts.selection import RULES
from fedjax_inv_experiments.reporting.tables import table as written
from fedjax_inv_experiments.running import divergence, files
from fedjax_inv_experiments.running.records import Line, Result, RunResult


def explained(rule: str) -> str:
    """A rule of selection in words."""
    looks, scored = ("looked at", "test") if rule == "oracle" else ("never looked at", "validation")
    return (
        f"Model selection by {rule}: of each seed {RULES[rule].text}; of the hyperparameters those "
        f"with the best mean over seeds of the {scored} score there; the held-out domain is "
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
    measure: Measure = ACCURACY  # how to read the scores

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

    Settings in which any seed diverged, or in which the rule picks no evaluation, are excluded; if
    all are, the result is None. Settings in which the rule picks evaluations for more seeds win.

    result: a `records.Result`, or a plain dict with the same entries.
    """
    diverged, measure = divergence.count(result["runs"]), measure_of(result)
    best, best_rank = None, (0, -np.inf)
    score = selection.rules(measure)[rule].score
    for setting in divergence.settings(result["runs"]):
        runs = [result["runs"][index] for index in setting.indices]
        picked = [selection.picked(run, rule) for run in runs]
        count = sum(line is not None for line in picked)
        if count == 0 or setting.num_diverged:
            continue
        runs = [
            run | {"selected": run["last"] if line is None else line}
            for run, line in zip(runs, picked, strict=True)
        ]
        mean = float(np.mean([score(run["selected"]) for run in runs]))
        if (count, mean) > best_rank:
            held_out = _held_out(result)
            best = Chosen(label, held_out, setting.hyper, runs, setting.indices, diverged, measure)
            best_rank = (count, mean)
    return best


def measure_of(result: Any) -> Measure:
    """How to read the scores of a result, a `records.Result` or a plain dict."""
    found = result.get("score", ACCURACY)
    return found if isinstance(found, Measure) else Measure(**found)


def _held_out(result: Any) -> str:
    """The held-out domain, or the name of the test split in the evaluations of a result."""
    if result["cell"]["held_out"] is not None:
        return result["cell"]["held_out"]
    domains = result["runs"][0]["last"]["domains"]
    return next(name for name, domain in domains.items() if domain["split"] == "test")


class Missing(NamedTuple):
    """A cell in which nothing could be chosen."""

    label: str
    held_out: str
    why: str  # diverged, or none
    diverged: str  # how many runs of the cell diverged


def why_none(result: Result) -> str:
    """The table's text for a cell in which nothing could be chosen."""
    settings = divergence.settings(result["runs"])
    return "diverged" if all(setting.num_diverged for setting in settings) else "none"


def percent(values: Sequence[float]) -> str:
    """The mean and standard deviation over seeds, in percent, as text."""
    return spread([100 * value for value in values])


def spread(values: Sequence[float], form: str = ".1f") -> str:
    """The mean and standard deviation over seeds, as text."""
    mean = f"{np.mean(values):{form}}"
    return f"{mean} ± {np.std(values, ddof=1):{form}}" if len(values) > 1 else mean


def text_of(measure: Measure) -> Callable[[Sequence[float]], str]:
    """A function from values of a score to their mean and standard deviation, as text."""
    return percent if measure.is_share else lambda values: spread(values, ".4g")


def table(
    chosen: Sequence[Chosen],
    paper: Mapping[str, str],
    cells: Mapping[tuple[str, str], str] | None = None,
    diverged: Mapping[str, str] | None = None,
    measure: Measure = ACCURACY,
) -> str:
    """The main table: the test scores at the selected evaluations, a row per algorithm.

    The columns are each held-out domain, their mean and the worst one, then the mean selected round
    and the mean score at the last round, and how many runs diverged.

    paper: algorithm -> its number in a paper.
    cells: (label, held-out domain) of each cell -> the text if nothing was chosen.
    diverged: label -> how many of its runs diverged; without it there is no such column.
    measure: how to read the scores.
    """
    shown = text_of(measure)
    worst = np.min if measure.higher_is_better else np.max
    cells = cells or {(one.label, one.held_out): "" for one in chosen}
    held_outs = list(dict.fromkeys(held_out for _, held_out in cells))
    by_label = {
        label: {one.held_out: one for one in chosen if one.label == label} for label, _ in cells
    }

    def test_of(held_out: str) -> Callable[[str], str]:
        def text(label: str) -> str:
            one = by_label[label].get(held_out)
            return shown(test(one)) if one else cells.get((label, held_out), "")

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
        return [line.test_score for line in one.selected]

    columns: list[tuple[str, Callable[[str], str]]] = [
        (f"held-out {measure.heading}", lambda label: label),
        *((held_out, test_of(held_out)) for held_out in held_outs),
    ]
    if len(held_outs) > 1:
        columns.append(("mean", over_domains(test, np.mean, shown)))
        columns.append(("worst domain", over_domains(test, worst, shown)))
    columns += [
        (
            "at round",
            over_domains(lambda one: [line.round for line in one.selected], np.mean, spread),
        ),
        (
            "at the last round",
            over_domains(lambda one: [line.test_score for line in one.last], np.mean, shown),
        ),
    ]
    if diverged:
        columns.append(("runs diverged", lambda label: diverged[label]))
    if paper:
        columns.append(("paper", lambda label: paper.get(label.split()[0], "")))
    return written(by_label, columns)


def _if_chosen(text: Callable[[Chosen], str]) -> Callable[[Chosen | Missing], str]:
    """A column that is empty where nothing could be chosen."""
    return lambda one: text(one) if isinstance(one, Chosen) else ""


def _or_why(text: Callable[[Chosen], str]) -> Callable[[Chosen | Missing], str]:
    """A column that says why nothing could be chosen."""
    return lambda one: text(one) if isinstance(one, Chosen) else one.why


def domains_table(cells: Sequence[Chosen | Missing], measure: Measure = ACCURACY) -> str:
    """The scores by domain at the selected evaluation: test if held out, else validation.

    cells: all of one held-out domain; in one of them at least, something was chosen.
    """
    held_out, shown = cells[0].held_out, text_of(measure)
    first = next(one for one in cells if isinstance(one, Chosen))

    def of(name: str) -> Callable[[Chosen | Missing], str]:
        return _or_why(lambda one: shown([line.domains[name].score for line in one.selected]))

    columns: list[tuple[str, Callable[[Chosen | Missing], str]]] = [
        (f"{measure.name} by domain{measure.percent}", lambda one: one.label),
        *(
            (f"{name} (held out)" if name == held_out else name, of(name))
            for name in first.selected[0].domains
        ),
        (
            "worst domain",
            _if_chosen(lambda one: shown([line.worst_score for line in one.selected])),
        ),
    ]
    return written(cells, columns)


class _Stopped(NamedTuple):
    """The stops of a cell's seeds at a threshold; none if nothing could be chosen in the cell."""

    cell: Chosen | Missing
    threshold: float | None
    met: str  # the number of seeds that stopped, or why nothing could be chosen
    stops: list[Any]  # a `records.Stop` of each seed that stopped


def stops_table(cells: Sequence[Chosen | Missing], measure: Measure = ACCURACY) -> str:
    """The evaluations at the stop, a row per cell and threshold, over the seeds that stopped."""
    rows, shown, unit = [], text_of(measure), measure.unit
    for one in cells:
        if isinstance(one, Missing):
            rows.append(_Stopped(one, None, one.why, []))
            continue
        for stops in zip(*(run.stops or [] for run in one.runs), strict=True):
            met = [stop for stop in stops if stop.round is not None]
            rows.append(_Stopped(one, stops[0].threshold, f"{len(met)}/{len(stops)}", met))

    def domains(row: _Stopped) -> str:
        names = row.stops[0].domains if row.stops else ()
        of = {name: [stop.domains[name].score for stop in row.stops] for name in names}
        return ", ".join(f"{name} {shown(values)}" for name, values in of.items())

    def over(
        value: Callable[[Any], float], text: Callable[[Sequence[float]], str]
    ) -> Callable[[_Stopped], str]:
        return lambda row: text([value(stop) for stop in row.stops]) if row.stops else ""

    last = _if_chosen(lambda one: shown([line.test_score for line in one.last]))
    return written(
        rows,
        {
            "at the stop": lambda row: row.cell.label,
            "held out": lambda row: row.cell.held_out,
            "threshold": lambda row: "" if row.threshold is None else f"{row.threshold:g}",
            "stopped": lambda row: row.met,
            "round": over(lambda stop: stop.round, spread),
            f"training{unit}": over(lambda stop: stop.train_score, shown),
            f"by domain{unit}": domains,
            f"worst domain{unit}": over(lambda stop: stop.worst_score, shown),
            f"held out at the last round{unit}": lambda row: last(row.cell),
        },
    )


def choices_table(cells: Sequence[Chosen | Missing], measure: Measure = ACCURACY) -> str:
    """The selected hyperparameters and rounds, their validation score, and their cost."""
    shown, unit = text_of(measure), measure.unit
    columns: dict[str, Callable[[Chosen | Missing], str]] = {
        "algorithm": lambda one: one.label,
        "held out": lambda one: one.held_out,
        "selected": _or_why(lambda one: ", ".join(f"{k}={v:g}" for k, v in one.hyper.items())),
        "at round": _if_chosen(lambda one: ", ".join(str(line.round) for line in one.selected)),
        f"validation{unit}": _if_chosen(
            lambda one: shown([line.validation_score for line in one.selected])
        ),
        f"held out{unit}": _if_chosen(
            lambda one: shown([line.test_score for line in one.selected])
        ),
        f"held out at the last round{unit}": _if_chosen(
            lambda one: shown([line.test_score for line in one.last])
        ),
        "MB sent in all": _if_chosen(
            lambda one: f"{np.mean([line.bytes for line in one.last]) / 1e6:.1f}"
        ),
        "runs diverged": lambda one: one.diverged,
    }
    ones = [one for one in cells if isinstance(one, Chosen)]
    if any(line.dropped is not None for one in ones for line in one.last):
        columns["rounds with a client dropped"] = _if_chosen(
            lambda one: ", ".join(str(line.dropped or 0) for line in one.last)
        )
    return written(cells, columns)


class _SettingRow(NamedTuple):
    """A setting of a cell."""

    label: str
    held_out: str
    setting: divergence.Setting
    picked: list[Line]  # the evaluations of the seeds that did not diverge

    def mean(self, score: str, measure: Measure) -> str:
        """A score of the seeds that did not diverge."""
        values = [line[score] for line in self.picked]
        return text_of(measure)(values) if values else "diverged"


def settings_table(results: Sequence[tuple[str, Result]], rule: str, form: str = "markdown") -> str:
    """How many runs of each setting diverged, and the scores of the others.

    results: (label, result) of each cell. rule: the rule of selection. form: one of `tables.FORMS`.
    """
    rows, measure = [], measure_of(results[0][1])
    for label, result in results:
        for setting in divergence.settings(result.runs):
            runs = [result.runs[index] for index in setting.indices]
            picked = [selection.picked(run, rule) or run.last for run in runs if not run.diverged]
            rows.append(_SettingRow(label, _held_out(result), setting, picked))
    columns: dict[str, Callable[[_SettingRow], str]] = {
        "algorithm": lambda row: row.label,
        "held out": lambda row: row.held_out,
        "setting": lambda row: row.setting.text,
        "runs diverged": lambda row: f"{row.setting.num_diverged} of {len(row.setting.indices)}",
        f"validation of the others{measure.unit}": lambda row: row.mean(
            "validation_score", measure
        ),
        f"held out of the others{measure.unit}": lambda row: row.mean("test_score", measure),
    }
    return written(rows, columns, form=form)


def _diverged(results: Sequence[tuple[str, Result]]) -> str:
    """The text about diverged runs; "" if there are none."""
    texts = [
        f"{label}, held out {_held_out(result)}: {divergence.text(result.runs)}."
        for label, result in results
        if any(run.diverged for run in result.runs)
    ]
    if not texts:
        return ""
    rule = "A setting with a diverged seed is never selected."
    return "\n".join([*texts, f"{rule} Remedy: {divergence.REMEDY}."])


def write(
    folder: Path,
    results: Iterable[tuple[str, Result]],
    *,
    title: str,
    paper: Mapping[str, str],
    rule: str = "validation",
    more: str = "",
) -> str:
    """Writes table.md, and returns its first table and a text about diverged runs.

    results: (label, result) of each cell. rule: the rule of selection. more: a last table.
    """
    results = list(results)
    cells: list[Chosen | Missing] = []
    for label, result in results:
        none = Missing(label, _held_out(result), why_none(result), divergence.count(result.runs))
        cells.append(choose(label, result, rule) or none)
    ones = [one for one in cells if isinstance(one, Chosen)]
    missing = {(label, _held_out(result)): why_none(result) for label, result in results}
    diverged = _diverged(results)
    by_setting = settings_table(results, rule)
    if not ones:
        text = "every run diverged"
        if not all(run.diverged for _, result in results for run in result.runs):
            text = "a seed of every setting diverged"
        if "none" in missing.values():
            text = f"nothing to select by {rule}: no seed of any setting has such an evaluation"
        text = "\n\n".join([text, diverged, by_setting]) if diverged else text
        files.write(folder / "table.md", text + "\n")
        return text
    counts = {}
    if diverged:
        for label, _ in results:
            runs = [run for other, result in results if other == label for run in result.runs]
            counts[label] = divergence.count(runs)
    measure = measure_of(results[0][1])
    test = table(ones, paper, missing, counts, measure)
    parts = [f"# {title}", test]
    if len({one.held_out for one in cells}) == 1:
        parts.append(domains_table(cells, measure))
    if ones[0].runs[0].stops is not None:
        parts.append(stops_table(cells, measure))
    parts += [explained(rule), choices_table(cells, measure)]
    if diverged:
        parts += [diverged, by_setting]
    parts += [more] if more else []
    files.write(folder / "table.md", "\n\n".join(parts) + "\n")
    return f"{test}\n\n{diverged}" if diverged else test
