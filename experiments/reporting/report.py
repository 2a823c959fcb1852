"""Tables of finished cells."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from ..flags.flag import shown
from ..parts import selection
from ..parts.objective import ACCURACY, Measure
from ..parts.selection import RULES
from ..reporting import comparison, tables
from ..reporting.comparison import Column
from ..reporting.tables import Part
from ..running import divergence, files
from ..running.records import Line, Result, RunResult


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
    rule: str = "validation"
    left_out: tuple[int, ...] = ()  # the seeds that diverged, of a cell that `surviving` chose
    measure: Measure = ACCURACY  # how to read the scores

    @property
    def selected(self) -> list[Line]:
        """The selected evaluation of each seed."""
        return [run["selected"] for run in self.runs]

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
    runs, held_out, measure = result["runs"], held_out_of(result), result.get("score", ACCURACY)
    found = []
    for setting in settings:
        left_out = tuple(runs[at]["seed"] for at in setting.indices if runs[at]["diverged"])
        of = {at: runs[at] for at in setting.indices if not runs[at]["diverged"]}
        if any(selection.picked(run, rule) for run in of.values()):
            own = [run | {"selected": selection.picked_or_last(run, rule)} for run in of.values()]
            chosen = label, held_out, setting.hyper, own, [*of], rule, left_out, measure
            found.append(Chosen(*chosen))
    return max(found, key=lambda one: one.rank, default=None)


def held_out_of(result: Any) -> str:
    """The held-out domain, or the name of the test split in the evaluations of a result."""
    if result["cell"]["held_out"] is not None:
        return result["cell"]["held_out"]
    domains = result["runs"][0]["last"]["domains"]
    return next(name for name, domain in domains.items() if domain["split"] == "test")


def why_none(result: Any) -> str:
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


def metric_text(values: pd.Series) -> str:
    """A metric over the seeds in which it is defined, as text; "" if there are none."""
    known = values.dropna()
    return spread([*known], ".4g") if len(known) else ""


def text_of(measure: Measure) -> Callable[[Sequence[float]], str]:
    """A function from values of a score to their mean and standard deviation, as text."""
    return percent if measure.is_share else lambda values: spread(values, ".4g")


def heading_of(measure: Measure, rest: str = "") -> str:
    """The heading of values of a score. rest: what follows its name."""
    better = "" if measure.higher_is_better else ", lower is better"
    return f"{measure.name}{rest}{measure.percent}{better}"


def score_on(domain: Any) -> float:
    """The score on a domain, a `records.Domain`; NaN without examples."""
    return domain["score"] if domain["examples"] else math.nan


# The numbers of an evaluation that tables show, and their fields.
_NUMBERS = {
    "round": "played",
    "validation": "validation_score",
    "test": "test_score",
    "worst": "worst_score",
    "bytes": "bytes",
}


def _of_line(line: Line | None) -> dict[str, Any]:
    return {name: line and getattr(line, field) for name, field in _NUMBERS.items()}


def _of_seeds(one: Chosen) -> list[dict[str, Any]]:
    """For each seed its selected and its last evaluation, and its stops."""
    cell = {"algorithm": one.label, "held out": one.held_out, "setting": one.setting, "why": None}
    rows = [cell | {"seed": seed} for seed in one.left_out]
    for run in one.runs:
        line, last = run["selected"], run.last
        ends = {"last": last.test_score, "sent": last.bytes, "dropped": last.dropped}
        scores = {f"on {name}": score_on(domain) for name, domain in line.domains.items()}
        of_run = {"seed": run.seed, "stops": run.stops}
        rows.append(cell | of_run | _of_line(line) | ends | scores)
    return rows


def selected(
    results: Iterable[tuple[str, Result]],
    rule: str = "validation",
    pick: Callable[[str, Result, str], Chosen | None] = choose,
) -> pd.DataFrame:
    """A row for each seed of each cell, for `scores` and tables.

    A cell in which nothing is chosen has one row without numbers, which says why.

    results: (label, result) of each cell. pick: `choose` or `surviving`.
    """
    rows = []
    for label, result in results:
        why, one = why_none(result), pick(label, result, rule)
        none = {"algorithm": label, "held out": held_out_of(result), "setting": why, "why": why}
        of_seeds = _of_seeds(one) if one else [none | {"stops": None}]
        rows += [row | {"diverged": divergence.count(result.runs)} for row in of_seeds]
    return pd.DataFrame(rows)


_Text = Callable[[pd.Series], str]


def _known(text: Callable[[Sequence[float]], str]) -> _Text:
    """A text of the numbers that are known; "" if none is."""
    return lambda values: text([*values.dropna()]) if values.notna().any() else ""


def _listed(values: pd.Series) -> str:
    return ", ".join(f"{value:.0f}" for value in values.dropna())


_ROUNDS = "round", _known(spread)
_MEGABYTES = _known(lambda values: f"{np.mean(values) / 1e6:.1f}")


def _grouped(
    rows: pd.DataFrame, keys: Sequence[str], columns: Mapping[str, tuple[str, Any]]
) -> pd.DataFrame:
    """A row for each group of equal keys. columns: heading -> (a column of rows, its text)."""
    return rows.groupby([*keys], sort=False, dropna=False).agg(**columns).reset_index()


def _by_domain(rows: pd.DataFrame, name: str) -> pd.DataFrame:
    """A number of each algorithm and seed, with a column for each held-out domain."""
    known = rows[rows["why"].isna()].set_index(["algorithm", "seed", "held out"])
    return known[name].unstack().reindex(columns=rows["held out"].unique())


def scores(rows: pd.DataFrame, measure: Measure = ACCURACY) -> list[Column]:
    """The scores by which the main table compares methods, with a column for each.

    They are the test scores on each held-out domain, their mean and the worst of them, and the
    mean at the last round. With a single held-out domain, the mean is left out, and the worst
    domain is the worst of all domains, those for validation, too.
    """

    def column(heading: str, values: pd.Series) -> Column:
        of_labels = values.unstack("algorithm").reindex(columns=rows["algorithm"].unique())
        return Column(heading, of_labels, measure)

    test = _by_domain(rows, "test")
    columns = [column(name, test[name]) for name in test]
    if len(test.columns) > 1:
        worst = test.min if measure.higher_is_better else test.max
        columns.append(column("mean", test.mean(axis=1, skipna=False)))
        columns.append(column("worst domain", worst(axis=1, skipna=False)))
    else:
        columns.append(column("worst domain", _by_domain(rows, "worst").iloc[:, 0]))
    last = _by_domain(rows, "last").mean(axis=1, skipna=False)
    return [*columns, column("at the last round", last)]


def _marked(column: Column) -> dict[str, str]:
    """Mean and standard deviation of each method, marked for the best; "" without a score."""
    best, text = comparison.best(column), _known(text_of(column.measure))
    return {label: best.mark(label, text(of)) for label, of in column.scores.items()}


def _of_columns(
    heading: str, labels: Iterable[str], columns: Sequence[tuple[str, Mapping[str, str]]]
) -> pd.DataFrame:
    """A table with a row for each label. columns: pairs, as several may have the same heading."""
    lines = [[label, *(of.get(label, "") for _, of in columns)] for label in labels]
    return pd.DataFrame(lines, columns=[heading, *(each for each, _ in columns)])


def table(
    rows: pd.DataFrame,
    paper: Mapping[str, str],
    diverged: Mapping[str, str] | None = None,
    measure: Measure = ACCURACY,
) -> pd.DataFrame:
    """The main table: the test scores at the selected evaluations, a row per algorithm.

    The columns are each held-out domain, their mean and the worst one, then the mean selected round
    and the mean score at the last round, and how many runs diverged. What is best in a column of
    scores is marked (`comparison.Best`).

    rows: of `selected`.
    paper: algorithm -> its number in a paper.
    diverged: label -> how many of its runs diverged; without it there is no such column.
    """
    labels, num_domains = rows["algorithm"].unique(), rows["held out"].nunique()
    *columns, last = [(each.heading, _marked(each)) for each in scores(rows, measure)]
    of_domains = dict(columns[:num_domains])
    for cell in rows.dropna(subset="why").to_dict("records"):
        of_domains[cell["held out"]][cell["algorithm"]] = cell["why"]
    if num_domains == 1:
        del columns[1]  # the worst of all domains stands in the table by domain
    rounds = _by_domain(rows, "round").mean(axis=1, skipna=False).groupby("algorithm")
    columns += [("at round", rounds.agg(_known(spread)).to_dict()), last]
    if diverged:
        columns.append(("runs diverged", {**diverged}))
    if paper:
        columns.append(("paper", {label: paper.get(label.split()[0], "") for label in labels}))
    return _of_columns(f"held-out {heading_of(measure)}", labels, columns)


def domains_table(rows: pd.DataFrame, measure: Measure = ACCURACY) -> pd.DataFrame:
    """The scores by domain at the selected evaluation: test if held out, else validation.

    rows: of `selected`, all of one held-out domain; in one of them at least, something was chosen.
    """
    held_out, why = rows["held out"][0], rows.dropna(subset="why").set_index("algorithm")["why"]
    known = rows[rows["why"].isna()].set_index(["seed", "algorithm"])
    columns = []
    for name in known.columns[known.columns.str.startswith("on ")]:
        domain = name.removeprefix("on ")
        texts = _marked(Column(domain, known[name].unstack(), measure)) | why.to_dict()
        columns.append((f"{domain} (held out)" if domain == held_out else domain, texts))
    columns.append(("worst domain", _marked(Column("", known["worst"].unstack(), measure))))
    return _of_columns(heading_of(measure, " by domain"), rows["algorithm"].unique(), columns)


def stops_table(rows: pd.DataFrame, measure: Measure = ACCURACY) -> pd.DataFrame:
    """The evaluations at the stop, a row per cell and threshold, over the seeds that stopped."""
    rows = rows.explode("stops").rename(columns={"algorithm": "at the stop"})
    for name in ("threshold", "round", "train_score", "worst_score", "domains"):
        rows[name] = [None if pd.isna(stop) else stop[name] for stop in rows["stops"]]
    rows["threshold"] = rows["threshold"].map("{:g}".format, na_action="ignore")
    text, unit = text_of(measure), measure.unit

    def stopped(rounds: pd.Series) -> str:
        return f"{rounds.notna().sum()}/{len(rounds)}"

    def domains(stops: pd.Series) -> str:
        each = [{name: score_on(of[name]) for name in of} for of in stops.dropna()]
        scores = pd.DataFrame(each).items()
        return ", ".join(f"{name} {_known(text)(of)}" for name, of in scores if of.notna().any())

    columns = {
        "stopped": ("round", stopped),
        "round": _ROUNDS,
        f"training{unit}": ("train_score", _known(text)),
        f"by domain{unit}": ("domains", domains),
        f"worst domain{unit}": ("worst_score", _known(text)),
        f"held out at the last round{unit}": ("last", _known(text)),
        "why": ("why", "first"),
    }
    table = _grouped(rows, ["at the stop", "held out", "threshold"], columns)
    why = table.pop("why")
    return table.assign(stopped=table["stopped"].mask(why.notna(), why))


def choices_table(rows: pd.DataFrame, measure: Measure = ACCURACY) -> pd.DataFrame:
    """The selected hyperparameters and rounds, their validation score, and their cost."""
    unit, text = measure.unit, _known(text_of(measure))
    columns = {
        "selected": ("setting", "first"),
        "at round": ("round", _listed),
        f"validation{unit}": ("validation", text),
        f"held out{unit}": ("test", text),
        f"held out at the last round{unit}": ("last", text),
        "MB sent in all": ("sent", _MEGABYTES),
        "runs diverged": ("diverged", "first"),
    }
    if rows["dropped"].notna().any():
        rows = rows.assign(dropped=rows["dropped"].fillna(0).where(rows["why"].isna()))
        columns["rounds with a client dropped"] = ("dropped", _listed)
    return _grouped(rows, ["algorithm", "held out"], columns)


def winners_table(chosen: Sequence[Chosen]) -> pd.DataFrame:
    """The best method and setting for each held-out domain, compared as settings are."""
    best: dict[str, Chosen] = {}
    for one in chosen:
        if one.held_out not in best or one.rank > best[one.held_out].rank:
            best[one.held_out] = one
    measure = chosen[0].measure
    unit, text = measure.unit, _known(text_of(measure))
    columns = {
        "setting": ("setting", "first"),
        "at round": _ROUNDS,
        f"validation{unit}": ("validation", text),
        f"held out{unit}": ("test", text),
    }
    names = {"held out": "best over methods, held out", "algorithm": "method"}
    rows = pd.DataFrame([row for one in best.values() for row in _of_seeds(one)])
    return _grouped(rows.rename(columns=names), [*names.values()], columns)


def settings_table(results: Sequence[tuple[str, Result, str]]) -> pd.DataFrame:
    """A row for each setting: whether it is selected, its diverged runs, and the others' scores.

    results: (label, result, rule of selection) of each cell.
    """
    rows = []
    for label, result, rule in results:
        one = choose(label, result, rule)
        for number, setting in enumerate(divergence.settings(result.runs)):
            is_selected = "yes" if one is not None and one.indices == setting.indices else ""
            cell = {"algorithm": label, "held out": held_out_of(result), "number": number}
            cell |= {"setting": setting.text, "selected": is_selected}
            for run in (result.runs[index] for index in setting.indices):
                picked = None if run.diverged else selection.picked_or_last(run, rule)
                rows.append(cell | {"diverged": run.diverged} | _of_line(picked))
    measure = results[0][1].score
    # The scores are of the seeds that did not diverge.
    others = " of the others" if any(row["diverged"] for row in rows) else ""
    end = f"{others}{measure.unit}"
    text = _known(text_of(measure))

    def or_diverged(values: pd.Series) -> str:
        return text(values) or "diverged"

    columns = {
        "runs diverged": ("diverged", lambda of: f"{of.sum()} of {len(of)}"),
        "at round": _ROUNDS,
        f"validation{end}": ("validation", or_diverged),
        f"held out{end}": ("test", or_diverged),
        f"worst domain{end}": ("worst", or_diverged),
        "MB sent by then": ("bytes", _MEGABYTES),
    }
    keys = ["algorithm", "held out", "number", "setting", "selected"]
    return _grouped(pd.DataFrame(rows), keys, columns).drop(columns="number")


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


def write_forms(path: Path, parts: Sequence[Part], title: str = "") -> None:
    """Writes parts as Markdown and as LaTeX. path: without the ending of a file's name."""
    markdown = [f"# {title}", *parts] if title else parts
    latex = [title, *parts] if title else parts
    head = r"% needs \usepackage{booktabs}"
    for ending, texts in (
        (".md", [tables.text(part) for part in markdown]),
        (".tex", [head, *(tables.text(part, "latex") for part in latex)]),
    ):
        files.write(path.with_name(path.name + ending), "\n\n".join(texts) + "\n")


def write_grid(path: Path, results: Sequence[tuple[str, Result, str]], title: str) -> None:
    """Writes the table of all settings; removes that of an earlier report if there is only one.

    results: as for `settings_table`. path: as for `write_forms`.
    """
    if sum(len(divergence.settings(result.runs)) for _, result, _ in results) > 1:
        write_forms(path, [title, settings_table(results)])
    else:
        for ending in (".md", ".tex"):
            files.remove(path.with_name(path.name + ending))


def write_differences(path: Path, found: pd.DataFrame) -> None:
    """Writes the differences between methods; removes an earlier report's if there are none."""
    if len(found):
        files.write(path, found.to_csv(index=False, lineterminator="\n"))
    else:
        files.remove(path)


def comparing(
    columns: Sequence[Column], found: pd.DataFrame, measure: Measure = ACCURACY
) -> list[Part]:
    """What stands below a table: what its marks say, and the differences between its methods.

    columns: those of the table. found: the differences.
    """
    parts: list[Part] = []
    if any(comparison.best(column).first for column in columns):
        parts.append(comparison.BEST)
    if len(found):
        parts.append(comparison.differences_table(found, measure))
        parts.append(comparison.about_differences(measure))
    return parts


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
    measure = results[0][1].score
    with_rule = [(label, result, rule) for label, result in results]
    diverged = _diverged(results)
    about_diverged = [diverged] if diverged else []
    write_grid(folder / "grid", with_rule, title)
    ones = [one for label, result in results if (one := choose(label, result, rule))]
    if not ones:
        text = "every run diverged"
        if not all(run.diverged for _, result in results for run in result.runs):
            text = "a seed of every setting diverged"
        if any(why_none(result) == "none" for _, result in results):
            who = "seed that did not diverge" if diverged else "seed"
            text = (
                f"{rule} picks no evaluation of any {who}; choose another rule, such as "
                "--select=validation; the table has the last round"
            )
        files.remove(folder / "differences.csv")
        parts: list[Part] = [text, *about_diverged, settings_table(with_rule)]
        write_forms(folder / "table", parts)
        return printed(parts)
    counts = {}
    if diverged:
        for label, _ in results:
            runs = [run for other, result in results if other == label for run in result.runs]
            counts[label] = divergence.count(runs)
    rows = selected(results, rule)
    found = comparison.differences(scores(selected(results, rule, surviving), measure))
    write_differences(folder / "differences.csv", found)
    parts = [table(rows, paper, counts, measure), *comparing(scores(rows, measure), found, measure)]
    if len({one.label for one in ones}) > 1:
        parts.append(winners_table(ones))
    details: list[Part] = []
    if rows["held out"].nunique() == 1:
        details.append(domains_table(rows, measure))
    if ones[0].runs[0].stops is not None:
        details.append(stops_table(rows, measure))
    details += [explained(rule), choices_table(rows, measure)]
    write_forms(folder / "table", [*parts, *details, *about_diverged, *more], title)
    return printed([*parts, *about_diverged, *more])


def printed(parts: Sequence[Part]) -> str:
    """Parts as text for the screen."""
    return "\n\n".join(map(tables.text, parts))
