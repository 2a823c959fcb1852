"""Tables of finished cells."""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjax_inv_experiments.flags.flag import shown
from fedjax_inv_experiments.parts import selection
from fedjax_inv_experiments.parts.objective import ACCURACY, Measure
from fedjax_inv_experiments.parts.selection import RULES
from fedjax_inv_experiments.reporting import comparison
from fedjax_inv_experiments.reporting.comparison import Column, Scores
from fedjax_inv_experiments.reporting.tables import paragraph
from fedjax_inv_experiments.reporting.tables import table as written
from fedjax_inv_experiments.running import divergence, files
from fedjax_inv_experiments.running.records import Line, Result, RunResult

_Text = Callable[[str], str]  # from a method's name to a cell of a table


def explained(rule: str) -> str:
    """A rule of selection in words."""
    looks, scored = ("looked at", "test") if rule == "oracle" else ("never looked at", "validation")
    return (
        f"Model selection by {rule}. Each seed shows {RULES[rule].text}. The hyperparameters are "
        f"those with the best mean {scored} score of these evaluations. The held-out domain is "
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
    rule: str = "validation"
    left_out: tuple[int, ...] = ()  # the seeds that diverged, of a cell that `surviving` chose
    measure: Measure = ACCURACY  # how to read the scores

    @property
    def selected(self) -> list[Line]:
        """The selected evaluation of each seed."""
        return [run["selected"] for run in self.runs]

    @property
    def last(self) -> list[Line]:
        """The last evaluation of each seed."""
        return [run["last"] for run in self.runs]

    @property
    def setting(self) -> str:
        """The selected hyperparameters in words."""
        return ", ".join(f"{name}={shown(value)}" for name, value in self.hyper.items())

    @property
    def rank(self) -> tuple[int, float]:
        """What the rule compares settings by: seeds with an evaluation, and their mean score."""
        rule = selection.rules(self.measure)[self.rule]
        picked = [line for run in self.runs if (line := selection.picked(run, self.rule))]
        mean = float(np.mean([rule.score(line) for line in picked]))
        return len(picked), -np.inf if np.isnan(mean) else mean

    def over_seeds(self, value: Callable[[Any], float]) -> list[float]:
        """A value of each seed's selected evaluation."""
        return [value(line) for line in self.selected]

    def by_seed(self, value: Callable[[RunResult], float]) -> dict[int, float]:
        """A value of each run, by seed; NaN for those that diverged."""
        found = {run["seed"]: value(run) for run in self.runs}
        return found | dict.fromkeys(self.left_out, np.nan)


def choose(label: str, result: Any, rule: str = "validation") -> Chosen | None:
    """Selects a cell's hyperparameters, and an evaluation of each seed, by a rule of `selection`.

    Settings in which any seed diverged, or in which the rule picks no evaluation, are excluded; if
    all are, the result is None. Settings in which the rule picks evaluations for more seeds win.

    result: a `records.Result`, or a plain dict with the same entries.
    """
    whole = [each for each in divergence.settings(result["runs"]) if not each.num_diverged]
    return _best_setting(label, result, rule, whole)


def surviving(label: str, result: Any, rule: str) -> Chosen | None:
    """The cell as `choose` selects, or else the setting with the most seeds that did not diverge.

    The runs are those of these seeds. It serves the comparison of methods seed by seed.
    """
    one = choose(label, result, rule)
    return one or _best_setting(label, result, rule, divergence.settings(result["runs"]))


def _best_setting(
    label: str, result: Any, rule: str, settings: Iterable[divergence.Setting]
) -> Chosen | None:
    """The setting in which the rule picks evaluations for most seeds, and of these the best."""
    diverged, measure = divergence.count(result["runs"]), measure_of(result)
    best: Chosen | None = None
    for setting in settings:
        every = {index: result["runs"][index] for index in setting.indices}
        left_out = tuple(run["seed"] for run in every.values() if run["diverged"])
        of = {index: run for index, run in every.items() if not run["diverged"]}
        if all(selection.picked(run, rule) is None for run in of.values()):
            continue
        runs = [run | {"selected": selection.picked_or_last(run, rule)} for run in of.values()]
        held_out = held_out_of(result)
        one = Chosen(label, held_out, setting.hyper, runs, [*of], diverged, rule, left_out, measure)
        if best is None or one.rank > best.rank:
            best = one
    return best


def measure_of(result: Any) -> Measure:
    """How to read the scores of a result, a `records.Result` or a plain dict."""
    found = result.get("score", ACCURACY)
    return found if isinstance(found, Measure) else Measure(**found)


def held_out_of(result: Any) -> str:
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


def heading_of(measure: Measure, rest: str = "") -> str:
    """The heading of values of a score. rest: what follows its name."""
    better = "" if measure.higher_is_better else ", lower is better"
    return f"{measure.name}{rest}{measure.percent}{better}"


def tests(one: Chosen, lines: Sequence[Line]) -> str:
    """The mean and standard deviation of the test score, as text."""
    return text_of(one.measure)([line.test_score for line in lines])


def _measure(cells: Sequence[Chosen | Missing]) -> Measure:
    """How to read the scores of cells, of which something was chosen in one at least."""
    return next(one.measure for one in cells if isinstance(one, Chosen))


def scores(chosen: Sequence[Chosen], held_outs: Sequence[str]) -> list[Column]:
    """The scores by which the main table compares methods, with a column for each.

    They are the test scores on each held-out domain, their mean and the worst of them, and the
    mean at the last round. With a single held-out domain, the mean is left out, and the worst
    domain is the worst of all domains, those for validation, too.
    """
    measure = _measure(chosen) if chosen else ACCURACY
    worst = np.min if measure.higher_is_better else np.max
    by_label: dict[str, dict[str, Chosen]] = {}
    for one in chosen:
        by_label.setdefault(one.label, {})[one.held_out] = one

    def column(
        heading: str,
        value: Callable[[RunResult], float],
        join: Callable[[Sequence[float]], Any] = np.mean,
    ) -> Column:
        """A value of each run, joined over the held-out domains, where a method has all of them."""
        joined: dict[str, Scores] = {}
        for label, ones in by_label.items():
            each = [one.by_seed(value) for one in ones.values()]
            if len(each) == len(held_outs):
                shared = [seed for seed in each[0] if all(seed in other for other in each)]
                joined[label] = {seed: join([of[seed] for of in each]) for seed in shared}
        return Column(heading, joined, measure)

    def test(run: RunResult) -> float:
        return run["selected"]["test_score"]

    of_domains = [
        Column(
            held_out,
            {label: of[held_out].by_seed(test) for label, of in by_label.items() if held_out in of},
            measure,
        )
        for held_out in held_outs
    ]
    if len(held_outs) > 1:
        over = [column("mean", test), column("worst domain", test, worst)]
    else:
        over = [column("worst domain", lambda run: run["selected"]["worst_score"])]
    last = column("at the last round", lambda run: run["last"]["test_score"])
    return [*of_domains, *over, last]


def table(
    chosen: Sequence[Chosen],
    paper: Mapping[str, str],
    cells: Mapping[tuple[str, str], str] | None = None,
    diverged: Mapping[str, str] | None = None,
    form: str = "markdown",
) -> str:
    """The main table: the test scores at the selected evaluations, a row per algorithm.

    The columns are each held-out domain, their mean and the worst one, then the mean selected round
    and the mean score at the last round, and how many runs diverged. What is best in a column of
    scores is marked (`comparison.Best`).

    paper: algorithm -> its number in a paper.
    cells: (label, held-out domain) of each cell -> the text if nothing was chosen.
    diverged: label -> how many of its runs diverged; without it there is no such column.
    form: one of `tables.FORMS`.
    """
    cells = cells or {(one.label, one.held_out): "" for one in chosen}
    held_outs = list(dict.fromkeys(held_out for _, held_out in cells))
    labels = list(dict.fromkeys(label for label, _ in cells))
    *tests, last = map(_marked, scores(chosen, held_outs))
    if len(held_outs) == 1:
        del tests[1]  # the worst of all domains stands in the table by domain
    columns: list[tuple[str, _Text]] = [(f"held-out {heading_of(_measure(chosen))}", str)]
    for held_out, (_, text) in zip(held_outs, tests, strict=False):

        def or_why(label: str, held_out: str = held_out, text: _Text = text) -> str:
            return text(label) or cells.get((label, held_out), "")

        columns.append((held_out, or_why))
    columns += tests[len(held_outs) :]

    def at_round(label: str) -> str:
        ones = [one for one in chosen if one.label == label]
        if len(ones) < len(held_outs):
            return ""
        return spread(np.mean([one.over_seeds(lambda line: line["played"]) for one in ones], 0))

    columns += [("at round", at_round), last]
    if diverged:
        columns.append(("runs diverged", lambda label: diverged[label]))
    if paper:
        columns.append(("paper", lambda label: paper.get(label.split()[0], "")))
    return written(labels, columns, form=form)


def _marked(column: Column) -> tuple[str, _Text]:
    """A column of a table: mean and standard deviation of each method, marked for the best."""
    best = comparison.best(column)

    def text(label: str) -> str:
        if not column.scores.get(label):
            return ""
        return best.mark(label, text_of(column.measure)([*column.scores[label].values()]))

    return column.heading, text


def _if_chosen(text: Callable[[Chosen], str]) -> Callable[[Chosen | Missing], str]:
    """A column that is empty where nothing could be chosen."""
    return lambda one: text(one) if isinstance(one, Chosen) else ""


def _or_why(text: Callable[[Chosen], str]) -> Callable[[Chosen | Missing], str]:
    """A column that says why nothing could be chosen."""
    return lambda one: text(one) if isinstance(one, Chosen) else one.why


def domains_table(cells: Sequence[Chosen | Missing], form: str = "markdown") -> str:
    """The scores by domain at the selected evaluation: test if held out, else validation.

    cells: all of one held-out domain; in one of them at least, something was chosen.
    """
    held_out, measure = cells[0].held_out, _measure(cells)
    ones = [one for one in cells if isinstance(one, Chosen)]

    def column(heading: str, value: Callable[[Line], float], why: bool = True) -> Any:
        by_label = {}
        for one in ones:
            scores = one.by_seed(lambda run: value(run["selected"]))
            by_label[one.label] = {seed: of for seed, of in scores.items() if not math.isnan(of)}
        _, text = _marked(Column(heading, by_label, measure))
        or_why = _or_why(lambda one: text(one.label))
        return heading, or_why if why else lambda one: text(one.label)

    def of(name: str) -> Any:
        heading = f"{name} (held out)" if name == held_out else name
        return column(heading, lambda line: score_on(line["domains"][name]))

    columns = [
        (heading_of(measure, " by domain"), lambda one: one.label),
        *map(of, ones[0].selected[0].domains),
        column("worst domain", lambda line: line["worst_score"], why=False),
    ]
    return written(cells, columns, form=form)


def score_on(domain: Any) -> float:
    """The score on a domain, a `records.Domain` or a plain dict; NaN without examples."""
    return domain["score"] if domain["examples"] else math.nan


class _Stopped(NamedTuple):
    """The stops of a cell's seeds at a threshold; none if nothing could be chosen in the cell."""

    cell: Chosen | Missing
    threshold: float | None
    met: str  # the number of seeds that stopped, or why nothing could be chosen
    stops: list[Any]  # a `records.Stop` of each seed that stopped


def stops_table(cells: Sequence[Chosen | Missing], form: str = "markdown") -> str:
    """The evaluations at the stop, a row per cell and threshold, over the seeds that stopped."""
    measure = _measure(cells)
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
        of = {name: [score_on(stop.domains[name]) for stop in row.stops] for name in names}
        known = {name: [*itertools.filterfalse(math.isnan, each)] for name, each in of.items()}
        return ", ".join(f"{name} {shown(values)}" for name, values in known.items() if values)

    def over(
        value: Callable[[Any], float], text: Callable[[Sequence[float]], str]
    ) -> Callable[[_Stopped], str]:
        return lambda row: text([value(stop) for stop in row.stops]) if row.stops else ""

    last = _if_chosen(lambda one: tests(one, one.last))
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
        form=form,
    )


def choices_table(cells: Sequence[Chosen | Missing], form: str = "markdown") -> str:
    """The selected hyperparameters and rounds, their validation score, and their cost."""
    measure = _measure(cells)
    shown, unit = text_of(measure), measure.unit
    columns: dict[str, Callable[[Chosen | Missing], str]] = {
        "algorithm": lambda one: one.label,
        "held out": lambda one: one.held_out,
        "selected": _or_why(lambda one: one.setting),
        "at round": _if_chosen(lambda one: ", ".join(str(line.played) for line in one.selected)),
        f"validation{unit}": _if_chosen(
            lambda one: shown([line.validation_score for line in one.selected])
        ),
        f"held out{unit}": _if_chosen(lambda one: tests(one, one.selected)),
        f"held out at the last round{unit}": _if_chosen(lambda one: tests(one, one.last)),
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
    return written(cells, columns, form=form)


def winners(chosen: Sequence[Chosen]) -> list[Chosen]:
    """The best method and setting for each held-out domain, compared as settings are."""
    best: dict[str, Chosen] = {}
    for one in chosen:
        if one.held_out not in best or one.rank > best[one.held_out].rank:
            best[one.held_out] = one
    return list(best.values())


def winners_table(chosen: Sequence[Chosen], form: str = "markdown") -> str:
    """The best method and setting for each held-out domain, and their scores."""
    measure = chosen[0].measure
    shown, unit = text_of(measure), measure.unit
    columns: dict[str, Callable[[Chosen], str]] = {
        "best over methods, held out": lambda one: one.held_out,
        "method": lambda one: one.label,
        "setting": lambda one: one.setting,
        "at round": lambda one: spread(one.over_seeds(lambda line: line["played"])),
        f"validation{unit}": lambda one: shown(
            one.over_seeds(lambda line: line["validation_score"])
        ),
        f"held out{unit}": lambda one: shown(one.over_seeds(lambda line: line["test_score"])),
    }
    return written(winners(chosen), columns, form=form)


class _SettingRow(NamedTuple):
    """A setting of a cell."""

    label: str
    held_out: str
    setting: divergence.Setting
    is_selected: bool
    picked: list[Line]  # the evaluations of the seeds that did not diverge

    def mean(self, score: str, measure: Measure) -> str:
        """A score of the seeds that did not diverge."""
        values = [line[score] for line in self.picked]
        return text_of(measure)(values) if values else "diverged"


def settings_table(results: Sequence[tuple[str, Result, str]], form: str = "markdown") -> str:
    """A row for each setting: whether it is selected, its diverged runs, and the others' scores.

    results: (label, result, rule of selection) of each cell. form: one of `tables.FORMS`.
    """
    rows, measure = [], measure_of(results[0][1])
    for label, result, rule in results:
        one = choose(label, result, rule)
        for setting in divergence.settings(result.runs):
            runs = [result.runs[index] for index in setting.indices]
            picked = [selection.picked(run, rule) or run.last for run in runs if not run.diverged]
            is_selected = one is not None and one.indices == setting.indices
            rows.append(_SettingRow(label, held_out_of(result), setting, is_selected, picked))
    # The scores are of the seeds that did not diverge.
    others = " of the others" if any(row.setting.num_diverged for row in rows) else ""
    columns: dict[str, Callable[[_SettingRow], str]] = {
        "algorithm": lambda row: row.label,
        "held out": lambda row: row.held_out,
        "setting": lambda row: row.setting.text,
        "selected": lambda row: "yes" if row.is_selected else "",
        "runs diverged": lambda row: f"{row.setting.num_diverged} of {len(row.setting.indices)}",
        "at round": lambda row: spread([line.played for line in row.picked]) if row.picked else "",
        f"validation{others}{measure.unit}": lambda row: row.mean("validation_score", measure),
        f"held out{others}{measure.unit}": lambda row: row.mean("test_score", measure),
        f"worst domain{others}{measure.unit}": lambda row: row.mean("worst_score", measure),
        "MB sent by then": lambda row: (
            f"{np.mean([line.bytes for line in row.picked]) / 1e6:.1f}" if row.picked else ""
        ),
    }
    return written(rows, columns, form=form)


def _diverged(results: Sequence[tuple[str, Result]]) -> str:
    """The text about diverged runs; "" if there are none."""
    texts = [
        f"{label}, held out {held_out_of(result)}: {divergence.text(result.runs)}."
        for label, result in results
        if any(run.diverged for run in result.runs)
    ]
    if not texts:
        return ""
    rule = "A setting with a diverged seed is never selected."
    return "\n".join([*texts, f"{rule} Remedy: {divergence.REMEDY}."])


Part = Callable[[str], str]  # from one of `tables.FORMS` to a table or a paragraph


def text_part(text: str) -> Part:
    """A paragraph between tables."""
    return partial(paragraph, text)


def write_forms(path: Path, parts: Sequence[Part]) -> None:
    """Writes parts as Markdown and as LaTeX. path: without the ending of a file's name."""
    for form, ending, head in (
        ("markdown", ".md", []),
        ("latex", ".tex", [r"% needs \usepackage{booktabs}"]),
    ):
        text = "\n\n".join([*head, *(part(form) for part in parts)])
        files.write(path.with_name(path.name + ending), f"{text}\n")


def write_grid(path: Path, results: Sequence[tuple[str, Result, str]], title: str) -> None:
    """Writes the table of all settings; removes that of an earlier report if there is only one.

    results: as for `settings_table`. path: as for `write_forms`.
    """
    if sum(len(divergence.settings(result.runs)) for _, result, _ in results) > 1:
        write_forms(path, [text_part(title), partial(settings_table, results)])
    else:
        for ending in (".md", ".tex"):
            files.remove(path.with_name(path.name + ending))


def write_differences(path: Path, found: Sequence[comparison.Difference]) -> None:
    """Writes the differences between methods; removes an earlier report's if there are none."""
    if found:
        files.write(path, comparison.differences_csv(found))
    else:
        files.remove(path)


def differences_parts(
    found: Sequence[comparison.Difference], measure: Measure = ACCURACY
) -> list[Part]:
    """The table of the differences between methods, if there are any, and its explanation."""
    if not found:
        return []
    differences = partial(comparison.differences_table, found, measure=measure)
    return [differences, text_part(comparison.about_differences(measure))]


def write(
    folder: Path,
    results: Iterable[tuple[str, Result]],
    *,
    title: str,
    paper: Mapping[str, str],
    rule: str = "validation",
    more: Sequence[Part] = (),
) -> str:
    """Writes the tables, and returns those that compare methods and a text about diverged runs.

    The files are table.md and grid.md, both also as .tex, and differences.csv.

    results: (label, result) of each cell. rule: the rule of selection. more: further parts.
    """
    results = list(results)
    with_rule = [(label, result, rule) for label, result in results]
    cells: list[Chosen | Missing] = []
    for label, result in results:
        none = Missing(label, held_out_of(result), why_none(result), divergence.count(result.runs))
        cells.append(choose(label, result, rule) or none)
    ones = [one for one in cells if isinstance(one, Chosen)]
    missing = {(label, held_out_of(result)): why_none(result) for label, result in results}
    diverged = _diverged(results)
    about_diverged = [text_part(diverged)] if diverged else []
    write_grid(folder / "grid", with_rule, title)
    if not ones:
        text = "every run diverged"
        if not all(run.diverged for _, result in results for run in result.runs):
            text = "a seed of every setting diverged"
        if "none" in missing.values():
            who = "seed that did not diverge" if diverged else "seed"
            text = (
                f"{rule} picks no evaluation of any {who}; choose another rule, such as "
                "--select=validation; the table has the last round"
            )
        write_differences(folder / "differences.csv", [])
        by_setting = partial(settings_table, with_rule)
        parts: list[Part] = [text_part(text), *about_diverged, by_setting]
        write_forms(folder / "table", parts)
        return printed(parts)
    counts = {}
    if diverged:
        for label, _ in results:
            runs = [run for other, result in results if other == label for run in result.runs]
            counts[label] = divergence.count(runs)
    held_outs = list(dict.fromkeys(one.held_out for one in cells))
    comparing: list[Part] = [partial(table, ones, paper, missing, counts)]
    if any(comparison.best(column).first for column in scores(ones, held_outs)):
        comparing.append(text_part(comparison.BEST))
    compared = [surviving(*each) for each in with_rule]
    found = comparison.differences(scores([one for one in compared if one], held_outs))
    write_differences(folder / "differences.csv", found)
    comparing += differences_parts(found, _measure(cells))
    if len({one.label for one in ones}) > 1:
        comparing.append(partial(winners_table, ones))
    parts = [
        lambda form: paragraph(f"# {title}" if form == "markdown" else title, form),
        *comparing,
    ]
    if len(held_outs) == 1:
        parts.append(partial(domains_table, cells))
    if ones[0].runs[0].stops is not None:
        parts.append(partial(stops_table, cells))
    parts += [text_part(explained(rule)), partial(choices_table, cells), *about_diverged]
    write_forms(folder / "table", [*parts, *more])
    return printed([*comparing, *about_diverged, *more])


def printed(parts: Sequence[Part]) -> str:
    """Parts as text for the screen."""
    return "\n\n".join(part("markdown") for part in parts)
