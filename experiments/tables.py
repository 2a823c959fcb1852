"""Tables of finished cells, in Markdown and LaTeX."""

import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
import tabulate

from fedjax_inv.data.federation import UNSEEN

from . import differences, selection
from .differences import Column
from .metrics import ACCURACY, Measure
from .running import divergence, files
from .running.records import Line, Result
from .running.summary import NEVER_SEEN
from .selection import Chosen, choose, held_out_of

Part: TypeAlias = pd.DataFrame | str  # of a report: a table or a paragraph

# Characters that no text has stand around a bold or italic text until a form writes it.
_BOLD, _ITALIC = "\ue000{}\ue001", "\ue002{}\ue003"
_MARKS = (*(_BOLD + _ITALIC).replace("{}", ""),)
_STYLES = {"markdown": "github", "latex": "latex_booktabs"}  # tabulate's names
_WRITTEN = {
    "markdown": dict(zip(_MARKS, ("**", "**", "*", "*"), strict=True)),
    # ±: older versions of LaTeX lack it
    "latex": dict(zip(_MARKS, (r"\textbf{", "}", r"\textit{", "}"), strict=True)) | {"±": r"$\pm$"},
}
_RARE = (*UNSEEN, "unseen_name", "left_out")  # columns of few tables
# Seed -> as in `records.Sweep`
Constant: TypeAlias = Mapping[str, tuple[float, Sequence[float]]]
Constants: TypeAlias = Mapping[str, Constant]  # by held-out domain
CONSTANT, ONE = "most frequent class", " (one class)"
ABOUT_BEST = (
    "Bold: the best mean of a column. Italics: the difference from it, seed by seed, has a 95% "
    "interval that contains 0. Only methods with a number for each seed are compared."
)
ABOUT_ONE = (
    "One class: with each seed the accuracy is the part of a class in the test, as that of a "
    "network that always predicts this class."
)


def text(part: Part, form: str = "markdown", *, align: str = "left") -> str:
    """A table or a paragraph in a form, markdown or latex.

    align: left, right or decimal, for all columns of a table but the first.
    """
    marks = _WRITTEN[form]
    if isinstance(part, str):
        if form == "markdown":
            return part
        part = "".join(tabulate.LATEX_ESCAPE_RULES.get(each, each) for each in part)
        return part.translate(str.maketrans(marks))
    cells = part.map(lambda cell: "" if pd.isna(cell) else str(cell))
    if form == "markdown":  # an unescaped bar would end the cell
        cells = cells.map(lambda cell: cell.translate(str.maketrans(marks | {"|": "\\|"})))
        cells.columns = [heading.replace("|", "\\|") for heading in cells.columns]
    alignments = ["left", *[align] * (len(cells.columns) - 1)] if len(cells) else None
    written = cells.to_markdown(
        index=False, tablefmt=_STYLES[form], disable_numparse=True, colalign=alignments
    )
    if form == "markdown":
        return written
    # At the beginning of a row these would be arguments of the row before.
    written = re.sub(r"^( *)([\[*])", r"\1{}\2", written, flags=re.MULTILINE)
    return written.translate(str.maketrans(marks))


def printed(parts: Sequence[Part]) -> str:
    """Parts as text for the screen."""
    return "\n\n".join(map(text, parts))


def write_forms(path: Path, parts: Sequence[Part], title: str = "") -> None:
    """Writes parts as Markdown, and the first table as LaTeX, in a float.

    Its caption has the title and the paragraphs between this table and the next.

    path: without the ending of a file's name.
    """
    written = "\n\n".join([*[f"# {title}"] * bool(title), *map(text, parts)]) + "\n"
    files.write(path.with_name(f"{path.name}.md"), written)
    first = next((at for at, part in enumerate(parts) if not isinstance(part, str)), None)
    if first is None:
        files.remove(path.with_name(f"{path.name}.tex"))
        return
    below = itertools.takewhile(lambda part: isinstance(part, str), parts[first + 1 :])
    caption = " ".join(text(part, "latex") for part in [*[f"{title}."] * bool(title), *below])
    lines = (
        *(r"% needs \usepackage{booktabs}", r"\begin{table}", r"\centering"),
        *(rf"\caption{{{caption}}}", text(parts[first], "latex"), r"\end{table}"),
    )
    files.write(path.with_name(f"{path.name}.tex"), "\n".join(lines) + "\n")


def spread(values: Sequence[float], form: str = ".1f") -> str:
    """The mean and standard deviation over seeds, as text."""
    mean = f"{np.mean(values):{form}}"
    return f"{mean} ± {np.std(values, ddof=1):{form}}" if len(values) > 1 else mean


def percent(values: Sequence[float]) -> str:
    """The mean and standard deviation over seeds, in percent, as text."""
    return spread([100 * value for value in values])


def text_of(measure: Measure) -> Callable[[Sequence[float]], str]:
    """A function from values of a score to their mean and standard deviation, as text."""
    return percent if measure.is_share else lambda values: spread(values, ".4g")


def known(form: Callable[[Sequence[float]], str]) -> Callable[[pd.Series], str]:
    """A text of the numbers that are known; "" if none is."""
    return lambda values: form([*values.dropna()]) if values.notna().any() else ""


def write_differences(path: Path, found: pd.DataFrame) -> None:
    """Writes the differences between methods; removes an earlier report's if there are none."""
    if len(found):
        files.write(path, found.to_csv(index=False, lineterminator="\n"))
    else:
        files.remove(path)


def score_on(domain: Any) -> float:
    """The score on a domain, a `records.Domain`; NaN without examples."""
    return domain["score"] if domain["examples"] else math.nan


def _numbers(line: Line | None) -> dict[str, Any]:
    """The numbers of an evaluation that tables show."""
    fields = {"round": "played", "validation": "validation_score", "test": "test_score"}
    fields |= {"worst": "worst_score", "bytes": "bytes", "left_out": "left_out_score"}
    unseen: dict[str, Any] = {kind: line and selection.score_on(line, kind) for kind in UNSEEN}
    kinds = {domain.split: name for name, domain in line.domains.items()} if line else {}
    unseen["unseen_name"] = kinds.get("unseen_domain")
    return {name: line and getattr(line, field) for name, field in fields.items()} | unseen


def _of_seeds(one: Chosen) -> list[dict[str, Any]]:
    """For each seed its selected and its last evaluation, and its stops."""
    cell = {"algorithm": one.label, "held out": one.held_out, "setting": one.setting, "why": None}
    rows = [cell | {"seed": seed} for seed in one.left_out]
    for run in one.runs:
        line, last = run["selected"], run.last
        ends = {"last": last.test_score, "sent": last.bytes, "dropped": last.dropped}
        scores = {
            f"on {name}{' (unseen)' * (domain.split == 'unseen_domain')}": score_on(domain)
            for name, domain in line.domains.items()
        }
        rows.append(cell | {"seed": run.seed, "stops": run.stops} | _numbers(line) | ends | scores)
    return rows


def selected(
    results: Iterable[tuple[str, Result]], rule: str = "validation", *, surviving: bool = False
) -> pd.DataFrame:
    """A row for each seed of each cell, for `scores` and tables.

    A cell in which nothing is chosen has one row without numbers, which says why.

    results: (label, result) of each cell. surviving: as in `choose`.
    """
    rows = []
    for label, result in results:
        why, one = selection.why_none(result), choose(label, result, rule, surviving=surviving)
        none = {"algorithm": label, "held out": held_out_of(result), "setting": why, "why": why}
        of_seeds = _of_seeds(one) if one else [none | {"stops": None}]
        rows += [row | {"diverged": divergence.count(result.runs)} for row in of_seeds]
    return pd.DataFrame(rows)


def _summary(
    rows: pd.DataFrame, keys: Sequence[str], columns: Mapping[str, tuple[str, str]], of: Measure
) -> pd.DataFrame:
    """A row for each group of equal keys.

    columns: heading -> (a column of rows, what of it is shown: one of the forms below). An asterisk
        in a heading stands for the unit of the score. One of `_RARE` is left out if no row has it.
    """
    columns = {k: v for k, v in columns.items() if v[0] not in _RARE or rows[v[0]].notna().any()}
    forms: dict[str, Any] = {
        "score": known(text_of(of)),
        "or diverged": lambda values: known(text_of(of))(values) or "diverged",
        "mean": known(spread),
        "megabytes": known(
            lambda values: f"{(size := np.mean(values) / 1e6):.{3 - 2 * (size > 1)}f}"
        ),
        "list": lambda values: ", ".join(f"{value:.0f}" for value in values.dropna()),
        "count": lambda values: f"{values.notna().sum()}/{len(values)}",
        "true": lambda values: f"{values.sum()} of {len(values)}",
        "first": "first",
    }
    shown = {
        head.replace("*", of.unit): (name, forms[form]) for head, (name, form) in columns.items()
    }
    return rows.groupby([*keys], sort=False, dropna=False).agg(**shown).reset_index()


def _by_domain(rows: pd.DataFrame, name: str) -> pd.DataFrame:
    """A number of each algorithm and seed, with a column for each held-out domain."""
    chosen = rows[rows["why"].isna()].set_index(["algorithm", "seed", "held out"])
    return chosen[name].unstack().reindex(columns=rows["held out"].unique())


def scores(rows: pd.DataFrame, measure: Measure = ACCURACY) -> list[Column]:
    """The scores by which the main table compares methods, with a column for each.

    They are the test scores on each held-out domain, their mean and the worst of them, the mean on
    clients never seen, and that of the test at the last round. With a single held-out domain, its
    mean is left out, and the worst domain is the worst of all domains, those for validation, too.
    """
    test = _by_domain(rows, "test")
    columns = [(name, test[name]) for name in test]  # of which one may be called mean
    if len(columns) > 1:
        worst = test.min if measure.higher_is_better else test.max
        columns.append(("mean", test.mean(axis=1, skipna=False)))
        columns.append(("worst domain", worst(axis=1, skipna=False)))
    else:
        columns.append(("worst domain", _by_domain(rows, "worst").iloc[:, 0]))
    if rows["unseen_clients"].notna().any():
        of_clients = _by_domain(rows, "unseen_clients").mean(axis=1, skipna=False)
        columns.append((NEVER_SEEN, of_clients))
    columns.append(("at the last round", _by_domain(rows, "last").mean(axis=1, skipna=False)))
    labels = rows["algorithm"].unique()
    return [
        Column(heading, values.unstack("algorithm").reindex(columns=labels), measure)
        for heading, values in columns
    ]


def is_constant(constant: Constant, scores: Iterable[tuple[int, float]]) -> bool:
    """Whether the score of each seed is the accuracy of always answering one class."""
    known = [(constant[str(seed)][1], of) for seed, of in scores if str(seed) in constant]
    return bool(known) and all(np.isclose(of, parts, atol=1e-6).any() for parts, of in known)


def has_one(table: pd.DataFrame) -> bool:
    """Whether a cell of a table has the mark of a network that answers one class."""
    return bool(table.map(lambda cell: ONE in str(cell)).to_numpy().any())


def _marked(column: Column) -> dict[str, str]:
    """Mean and standard deviation of each method, marked for the best; "" without a score."""
    pattern, form = marks(column), known(text_of(column.measure))
    return {label: pattern.get(label, "{}").format(form(of)) for label, of in column.scores.items()}


def marks(column: Column) -> dict[str, str]:
    """How a column marks the best method and those close to it: method -> such as "{}"."""
    found = differences.best(column)
    return dict.fromkeys(found.best, _BOLD) | dict.fromkeys(found.close, _ITALIC)


def differences_table(
    found: pd.DataFrame, measure: Measure = ACCURACY, baseline: str = ""
) -> list[Part]:
    """The differences from the baseline, by default the first method, and how to read them.

    found: by `differences.table`.
    """
    found = found[found["other"] == (baseline or found["other"].iloc[0])] if len(found) else found
    if found.empty:
        return []
    style = "+z.1f" if measure.is_share else "+z.3g"

    def cell(one: pd.Series) -> str:
        mean, low, high = (f"{measure.factor * one[x]:{style}}" for x in ("mean", "low", "high"))
        shown = "*" if one["p_holm"] < differences.LEVEL else ""
        return f"{mean}{shown} [{low}, {high}], n={one['seeds']}"

    cells = found.assign(text=found.apply(cell, axis=1))
    table = cells.pivot_table("text", "method", "column", aggfunc="last", sort=False)
    table = table[[*dict.fromkeys(found["column"])]]
    left_out = found.groupby("method")["seeds_left_out"].max()
    if left_out.any():
        table["seeds left out"] = left_out.astype(str).where(left_out > 0, "")
    table.insert(0, f"difference from {found['other'].iloc[0]}", table.index)
    points = ", of shares in percentage points" if measure.is_share else ""
    about = (
        f"Differences from the method in the heading{points}, seed by seed: the mean over n seeds "
        "and its 95% interval by Student's t. An asterisk: a paired t test with Holm's correction "
        "for the methods of a column has p < 0.05; intervals are not corrected. A seed in which a "
        "method has no number, such as a diverged run, is left out."
    )
    return [table, about]


def _of_columns(
    heading: str, labels: Iterable[str], columns: Sequence[tuple[str, Mapping[str, str]]]
) -> pd.DataFrame:
    """A table with a row for each label. columns: pairs, as several may have the same heading."""
    lines = [[label, *(of.get(label, "") for _, of in columns)] for label in labels]
    return pd.DataFrame(lines, columns=[heading, *(each for each, _ in columns)])


def main_table(
    rows: pd.DataFrame,
    paper: Mapping[str, str],
    diverged: Mapping[str, str] | None = None,
    measure: Measure = ACCURACY,
    constants: Constants | None = None,
) -> pd.DataFrame:
    """The test scores at the selected evaluations, a row per algorithm.

    The columns are each held-out domain, their mean and the worst one, then the mean selected round
    and the mean score at the last round, and how many runs diverged. What is best in a column of
    scores is marked (`marks`).

    rows: of `selected`.
    paper: algorithm -> its number in a paper.
    diverged: label -> how many of its runs diverged; without it there is no such column.
    constants: adds a row, and marks methods that are as good as an answer that is always the same.
    """
    labels, num_domains = rows["algorithm"].unique(), rows["held out"].nunique()
    *columns, last = [(each.heading, _marked(each)) for each in scores(rows, measure)]
    of_domains = dict(columns[:num_domains])
    for cell in rows.dropna(subset="why").to_dict("records"):
        of_domains[cell["held out"]][cell["algorithm"]] = cell["why"]
    for name, of_seed in (constants or {}).items():
        for label, tests in _by_domain(rows, "test")[name].groupby("algorithm"):
            if is_constant(of_seed, tests.droplevel(0).items()):
                of_domains[name][label] += ONE
        of_domains[name][CONSTANT] = text_of(measure)([one for one, _ in of_seed.values()])
    labels = [*labels, CONSTANT] if constants else labels
    if num_domains == 1:
        del columns[1]  # the worst of all domains stands in the table by domain
    rounds = _by_domain(rows, "round").mean(axis=1, skipna=False).groupby("algorithm")
    columns += [("at round", rounds.agg(known(spread)).to_dict()), last]
    if diverged:
        columns.append(("runs diverged", {**diverged}))
    if paper:
        columns.append(("paper", {label: paper.get(label.split()[0], "") for label in labels}))
    return _of_columns(f"held-out {measure.heading()}", labels, columns)


def domains_table(rows: pd.DataFrame, measure: Measure = ACCURACY) -> pd.DataFrame:
    """The scores by domain at the selected evaluation: test if held out, else validation.

    rows: of `selected`, all of one held-out domain; in one of them at least, something was chosen.
    """
    held_out, why = rows["held out"][0], rows.dropna(subset="why").set_index("algorithm")["why"]
    chosen = rows[rows["why"].isna()].set_index(["seed", "algorithm"])
    columns = []
    for name in chosen.columns[chosen.columns.str.startswith("on ")]:
        domain = name.removeprefix("on ")
        texts = _marked(Column(domain, chosen[name].unstack(), measure)) | why.to_dict()
        columns.append((f"{domain} (held out)" if domain == held_out else domain, texts))
    columns.append(("worst domain", _marked(Column("", chosen["worst"].unstack(), measure))))
    return _of_columns(measure.heading(" by domain"), rows["algorithm"].unique(), columns)


def stops_table(rows: pd.DataFrame, measure: Measure = ACCURACY) -> pd.DataFrame:
    """The evaluations at the stop, a row per cell and threshold, over the seeds that stopped."""
    rows = rows.explode("stops").rename(columns={"algorithm": "at the stop"})
    for name in ("threshold", "round", "train_score", "worst_score", "domains"):
        rows[name] = [None if pd.isna(stop) else stop[name] for stop in rows["stops"]]
    rows["threshold"] = rows["threshold"].map("{:g}".format, na_action="ignore")
    form, keys = known(text_of(measure)), ["at the stop", "held out", "threshold"]

    def domains(stops: pd.Series) -> str:
        each = [{name: score_on(of[name]) for name in of} for of in stops.dropna()]
        by_domain = pd.DataFrame(each).items()
        return ", ".join(f"{name} {form(of)}" for name, of in by_domain if of.notna().any())

    columns = {
        "stopped": ("round", "count"),
        "round": ("round", "mean"),
        "training*": ("train_score", "score"),
        "worst domain*": ("worst_score", "score"),
        "held out at the last round*": ("last", "score"),
        "why": ("why", "first"),
    }
    table = _summary(rows, keys, columns, measure)
    of_domains = rows.groupby(keys, sort=False, dropna=False)["domains"].agg(domains)
    table.insert(6, f"by domain{measure.unit}", of_domains.to_numpy())
    why = table.pop("why")
    return table.assign(stopped=table["stopped"].mask(why.notna(), why))


def choices_table(rows: pd.DataFrame, measure: Measure = ACCURACY) -> pd.DataFrame:
    """The selected hyperparameters and rounds, their validation score, and their cost."""
    columns = {
        "selected": ("setting", "first"),
        "at round": ("round", "list"),
        "validation*": ("validation", "score"),
        "domains left out*": ("left_out", "score"),
        "unseen domain": ("unseen_name", "first"),
        "unseen domain*": ("unseen_domain", "score"),
        "held out*": ("test", "score"),
        f"{NEVER_SEEN}*": ("unseen_clients", "score"),
        "held out at the last round*": ("last", "score"),
        "MB sent in all": ("sent", "megabytes"),
        "runs diverged": ("diverged", "first"),
    }
    if rows["dropped"].notna().any():
        rows = rows.assign(dropped=rows["dropped"].fillna(0).where(rows["why"].isna()))
        columns["rounds with a client dropped"] = ("dropped", "list")
    return _summary(rows, ["algorithm", "held out"], columns, measure)


def by_rule(results: Iterable[tuple[str, Result]]) -> list[Column]:
    """The test scores of each method, by seed, at what each rule of selection picks.

    Of several held-out domains they are means. A rule that picks nothing in any cell is left out.

    results: (label, result) of each cell.
    """
    results, columns = list(results), []
    for rule in selection.RULES:
        rows = selected(results, rule)
        if rows["why"].isna().any():
            scores = _by_domain(rows, "test").mean(axis=1, skipna=False).unstack("algorithm")
            heading = f"{rule} (looks at the test)" if rule == "oracle" else rule
            scores = scores.reindex(columns=rows["algorithm"].unique())
            columns.append(Column(heading, scores, results[0][1].score))
    return columns


def rules_table(results: Sequence[tuple[str, Result]]) -> pd.DataFrame:
    """The scores of `by_rule`, as means and standard deviations over seeds."""
    why = {label: selection.why_none(result) for label, result in results}
    columns = [
        (column.heading, {label: text or why[label] for label, text in _marked(column).items()})
        for column in by_rule(results)
    ]
    counts = {label: str(len(divergence.settings(of.runs))) for label, of in results}
    columns.append(("number of settings", counts))
    heading = f"held-out {results[0][1].score.heading()} by rule of selection"
    return _of_columns(heading, counts, columns)


def winners_table(chosen: Sequence[Chosen]) -> pd.DataFrame:
    """The best method and setting for each held-out domain, compared as settings are."""
    best: dict[str, Chosen] = {}
    for one in chosen:
        if one.held_out not in best or one.rank > best[one.held_out].rank:
            best[one.held_out] = one
    columns = {
        "setting": ("setting", "first"),
        "at round": ("round", "mean"),
        "validation*": ("validation", "score"),
        "domains left out*": ("left_out", "score"),
        "unseen domain*": ("unseen_domain", "score"),
        "held out*": ("test", "score"),
    }
    names = {"held out": "best over methods, held out", "algorithm": "method"}
    rows = pd.DataFrame([row for one in best.values() for row in _of_seeds(one)])
    return _summary(rows.rename(columns=names), [*names.values()], columns, chosen[0].measure)


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
                rows.append(cell | {"diverged": run.diverged} | _numbers(picked))
    # The scores are of the seeds that did not diverge.
    end = " of the others*" if any(row["diverged"] for row in rows) else "*"
    columns = {
        "runs diverged": ("diverged", "true"),
        "at round": ("round", "mean"),
        f"validation{end}": ("validation", "or diverged"),
        f"domains left out{end}": ("left_out", "or diverged"),
        f"unseen domain{end}": ("unseen_domain", "or diverged"),
        f"held out{end}": ("test", "or diverged"),
        f"worst domain{end}": ("worst", "or diverged"),
        "MB sent by then": ("bytes", "megabytes"),
    }
    keys = ["algorithm", "held out", "number", "setting", "selected"]
    return _summary(pd.DataFrame(rows), keys, columns, results[0][1].score).drop(columns="number")


def _num_settings(results: Iterable[tuple[str, Result]]) -> int:
    return sum(len(divergence.settings(result.runs)) for _, result in results)


def write_grid(path: Path, results: Sequence[tuple[str, Result, str]], title: str) -> None:
    """Writes the table of all settings; removes that of an earlier report if there is only one.

    results: as for `settings_table`. path: as for `write_forms`.
    """
    if _num_settings((label, result) for label, result, _ in results) > 1:
        write_forms(path, [settings_table(results)], title)
    else:
        for ending in (".md", ".tex"):
            files.remove(path.with_name(path.name + ending))


def _diverged(results: Sequence[tuple[str, Result]]) -> list[Part]:
    """The paragraph about diverged runs, if there are any."""
    texts = [
        f"{label}, held out {held_out_of(result)}: {divergence.text(result.runs)}."
        for label, result in results
        if any(run.diverged for run in result.runs)
    ]
    rule = "A setting with a diverged seed is never selected."
    return ["\n".join([*texts, f"{rule} Remedy: {divergence.REMEDY}."])] if texts else []


def _why_nothing(results: Sequence[tuple[str, Result]], rule: str) -> str:
    """Why nothing was chosen in any cell."""
    runs = [run for _, result in results for run in result.runs]
    if any(selection.why_none(result) == "none" for _, result in results):
        who = "seed that did not diverge" if any(run.diverged for run in runs) else "seed"
        return (
            f"{rule} picks no evaluation of any {who}; choose another rule, such as "
            "--select=validation; the table has the last round"
        )
    if all(run.diverged for run in runs):
        return "every run diverged"
    return "a seed of every setting diverged"


def write(
    folder: Path,
    results: Iterable[tuple[str, Result]],
    *,
    title: str,
    paper: Mapping[str, str],
    rule: str = "validation",
    more: Sequence[Part] = (),
    constants: Constants | None = None,
) -> str:
    """Writes the tables, and returns those that compare methods and a text about diverged runs.

    The files are table.md and grid.md, both also as .tex, and differences.csv.

    results: (label, result) of each cell. rule: the rule of selection. more: further parts.
    constants: as for `main_table`.
    """
    results = list(results)
    measure, diverged = results[0][1].score, _diverged(results)
    with_rule = [(label, result, rule) for label, result in results]
    write_grid(folder / "grid", with_rule, title)
    ones = [one for label, result in results if (one := choose(label, result, rule))]
    if not ones:
        files.remove(folder / "differences.csv")
        why: list[Part] = [_why_nothing(results, rule), *diverged, settings_table(with_rule)]
        write_forms(folder / "table", why)
        return printed(why)
    counts = {}
    for label, _ in results if diverged else ():
        runs = [run for name, result in results if name == label for run in result.runs]
        counts[label] = divergence.count(runs)
    rows = selected(results, rule)
    found = differences.table(scores(selected(results, rule, surviving=True), measure))
    write_differences(folder / "differences.csv", found)
    main = main_table(rows, paper, counts, measure, constants)
    parts: list[Part] = [main, ABOUT_ONE] if has_one(main) else [main]
    parts += [ABOUT_BEST] if any(map(marks, scores(rows, measure))) else []
    parts += differences_table(found, measure)
    if _num_settings(results) > 1:
        parts.append(rules_table(results))
    if len({one.label for one in ones}) > 1:
        parts.append(winners_table(ones))
    details: list[Part] = []
    if rows["held out"].nunique() == 1:
        details.append(domains_table(rows, measure))
    if ones[0].runs[0].stops is not None:
        details.append(stops_table(rows, measure))
    details += [selection.explained(rule), choices_table(rows, measure)]
    write_forms(folder / "table", [*parts, *details, *diverged, *more], title)
    return printed([*parts, *diverged, *more])
