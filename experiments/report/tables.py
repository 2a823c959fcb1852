"""The tables of finished cells: what compares methods, what was selected, and all settings.

Every table is a pivot of the evaluations that rules select, as runs.csv has them.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pandas as pd

from fedjax_inv.data.federation import UNSEEN
from fedjax_inv.fitted import SERVED

from ..assembly.data import KNOWN, NEVER_SEEN
from ..assembly.metrics import ACCURACY, Measure
from ..folder import divergence, files, run_folder, selection
from ..folder.records import Line, Result
from ..folder.selection import Chosen, choose, held_out_of
from . import differences, forms
from .differences import ScoreColumn, Tests
from .forms import Part, known, spread, text_of

_RARE = (*UNSEEN, "unseen_name", "left_out")  # columns of few tables
# Seed -> as in `records.Sweep`
Constant: TypeAlias = Mapping[str, tuple[float, Sequence[float]]]
CONSTANT = "most frequent class"
ONE = " (one class)"
ABOUT_BEST = (
    "Bold: the best mean of a column. Italics: the difference from it, seed by seed, has a 95% "
    "interval that contains 0. Only methods with a number for each seed are compared."
)
ABOUT_ONE = (
    "One class: with each seed the accuracy is the part of a class in the test, as that of a "
    "network that always predicts this class."
)
# The columns of further rules of selection, where they are not called by the rule's name.
RULE_HEADINGS = {
    "validation": "training domains",
    "leave_one_out": "leave one out",
    "unseen_domain": "unseen domain",
    "last_if_agreed": "last if agreed",
    "oracle": "oracle (looks at the test)",
}


class TableCell(NamedTuple):
    """A finished cell: the runs of a method with one held-out domain."""

    label: str  # of the method
    result: Result
    rule: str = "validation"  # of selection
    folder: Path = Path()  # with its log
    constant: Constant = MappingProxyType({})  # without classes empty
    tests: Tests = ()
    name: str = ""  # how papers call the method; "" for its label

    @property
    def held_out(self) -> str:
        """The held-out domain, or the name of the test split."""
        return held_out_of(self.result)

    @property
    def chosen(self) -> Chosen | None:
        """The runs with the selected hyperparameters, if there are any."""
        return choose(self.label, self.result, self.rule)


class Main(NamedTuple):
    """A table that compares methods."""

    table: pd.DataFrame
    # The scores that are compared, also those of seeds that survive.
    columns: Sequence[ScoreColumn] = ()
    latex: Sequence[pd.DataFrame] = ()  # for papers: the first that fits is written
    about: str = ""  # what the numbers of a paper's table are


def names_of(cells: Iterable[TableCell]) -> dict[str, str]:
    """The names of methods, by their labels."""
    return {cell.label: cell.name or cell.label for cell in cells}


def score_on(domain: Any) -> float:
    """The score on a domain, a `records.Domain`; NaN without examples."""
    return domain.score if domain.examples else math.nan


def _numbers(line: Line | None) -> dict[str, Any]:
    """The numbers of an evaluation that tables show."""
    fields = {"round": "played", "validation": "validation_score", "test": "test_score"}
    fields |= {"worst": "worst_score", "bytes": "bytes", "left_out": "left_out_score"}
    unseen: dict[str, Any] = {kind: line and selection.score_on(line, kind) for kind in UNSEEN}
    kinds = {domain.split: name for name, domain in line.domains.items()} if line else {}
    unseen["unseen_name"] = kinds.get("unseen_domain")
    numbers = {name: line and getattr(line, field) for name, field in fields.items()} | unseen
    if line and not selection.is_validated(line):
        numbers["validation"] = None
    return numbers


def _of_seeds(one: Chosen) -> list[dict[str, Any]]:
    """For each seed its selected and its last evaluation, and its stops."""
    cell = {"method": one.label, "held out": one.held_out, "setting": one.setting, "why": None}
    rows = [cell | {"seed": seed} for seed in one.left_out]
    for run in one.runs:
        line = run.choice
        last = run.last
        ends = {"last": last.test_score, "sent": last.bytes, "dropped": last.dropped}
        scores = {
            f"on {name}{' (unseen)' * (domain.split == 'unseen_domain')}": score_on(domain)
            for name, domain in line.domains.items()
        }
        rows.append(cell | {"seed": run.seed, "stops": run.stops} | _numbers(line) | ends | scores)
    return rows


def selected(
    cells: Iterable[TableCell], rule: str = "", *, surviving: bool = False
) -> pd.DataFrame:
    """A row for each seed of each cell, for `scores` and tables.

    A cell in which nothing is chosen has one row without numbers, which says why.

    rule: of selection; "" for that of each cell. surviving: as in `choose`.
    """
    rows = []
    for cell in cells:
        why = selection.why_none(cell.result)
        one = choose(cell.label, cell.result, rule or cell.rule, surviving=surviving)
        none = {"method": cell.label, "held out": cell.held_out, "setting": why, "why": why}
        of_seeds = _of_seeds(one) if one else [none | {"stops": None}]
        rows += [row | {"diverged": divergence.count(cell.result.runs)} for row in of_seeds]
    return pd.DataFrame(rows)


def _summary(
    rows: pd.DataFrame, keys: Sequence[str], columns: Mapping[str, tuple[str, str]], of: Measure
) -> pd.DataFrame:
    """A row for each group of equal keys.

    columns: heading -> (a column of rows, what of it is shown: one of the kinds below). An asterisk
        in a heading stands for the unit of the score. One of `_RARE` is left out if no row has it.
    """
    columns = {k: v for k, v in columns.items() if v[0] not in _RARE or rows[v[0]].notna().any()}
    kinds: dict[str, Any] = {
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
        head.replace("*", of.unit): (name, kinds[kind]) for head, (name, kind) in columns.items()
    }
    return rows.groupby([*keys], sort=False, dropna=False).agg(**shown).reset_index()


def _by_domain(rows: pd.DataFrame, name: str) -> pd.DataFrame:
    """A number of each method and seed, with a column for each held-out domain."""
    chosen = rows[rows["why"].isna()].set_index(["method", "seed", "held out"])
    return chosen[name].unstack().reindex(columns=rows["held out"].unique())


def scores(
    rows: pd.DataFrame, measure: Measure = ACCURACY, tests: Mapping[str, Tests] | None = None
) -> list[ScoreColumn]:
    """The scores by which the main table compares methods, with a column for each.

    They are the test scores on each held-out domain, their mean and the worst of them, the mean on
    clients never seen and on the test of known domains, and that of the test at the last round.
    With a single held-out domain, its mean is left out, and the worst domain is the worst of all
    domains, those for validation, too.

    rows: of `selected`. tests: as in `ScoreColumn`.
    """
    test = _by_domain(rows, "test")
    columns = [(name, test[name]) for name in test]  # of which one may be called mean
    if len(columns) > 1:
        worst = test.min if measure.higher_is_better else test.max
        columns.append(("mean", test.mean(axis=1, skipna=False)))
        columns.append(("worst", worst(axis=1, skipna=False)))
    else:
        columns.append(("worst domain", _by_domain(rows, "worst").iloc[:, 0]))
    for heading, kind in ((NEVER_SEEN, "unseen_clients"), (KNOWN, "known_domains")):
        if rows[kind].notna().any():
            columns.append((heading, _by_domain(rows, kind).mean(axis=1, skipna=False)))
    columns.append(("at the last round", _by_domain(rows, "last").mean(axis=1, skipna=False)))
    labels = rows["method"].unique()
    return [
        ScoreColumn(heading, values.unstack("method").reindex(columns=labels), measure, tests or {})
        for heading, values in columns
    ]


def is_constant(constant: Constant, scores: Iterable[tuple[int, float]]) -> bool:
    """Whether the score of each seed is the accuracy of always answering one class."""
    found = [np.isclose(of, constant.get(str(seed), (0, []))[1], atol=1e-6) for seed, of in scores]
    return bool(found) and all(each.any() for each in found)


def marks(column: ScoreColumn) -> dict[str, str]:
    """How a column marks the best method and those close to it: method -> such as "{}"."""
    found = differences.best(column)
    return dict.fromkeys(found.best, forms.BOLD) | dict.fromkeys(found.close, forms.ITALIC)


def marked(column: ScoreColumn) -> dict[str, str]:
    """Mean and standard deviation of each method, marked for the best; "" without a score."""
    pattern = marks(column)
    form = known(text_of(column.measure))
    return {label: pattern.get(label, "{}").format(form(of)) for label, of in column.scores.items()}


def table(
    heading: str, labels: Iterable[str], columns: Sequence[tuple[str, Mapping[str, str]]]
) -> pd.DataFrame:
    """A table with a row for each label; cells that a column lacks are empty.

    columns: (heading, cells by label) of each, as several may have the same heading.
    """
    lines = [[label, *(cells.get(label, "") for _, cells in columns)] for label in labels]
    return pd.DataFrame(lines, columns=[heading, *(each for each, _ in columns)])


def main_table(
    cells: Sequence[TableCell],
    *,
    rules: Sequence[str] = (),
    numbers: Mapping[str, Mapping[str, str]] | None = None,
) -> Main | None:
    """The test scores at the selected evaluations, a row for each method; None if there are none.

    The columns are each held-out domain, their mean and the worst one, each further rule, and the
    mean at the last round, which a paper's table leaves out. What is best in a column of scores is
    marked (`marks`), and so are methods that are as good as an answer that is always the same,
    which has a last row.

    rules: of selection; the first is that of the cells.
    numbers: of a paper: heading -> label -> text. "paper: NAME" stands beside our column NAME, and
        others stand last.
    """
    rows = selected(cells)
    measure = cells[0].result.score
    numbers = numbers or {}
    if rows["why"].notna().all():
        return None
    domains = [*rows["held out"].unique()]
    further = [
        column._replace(heading=f"mean by {rule}" if len(domains) > 1 else rule_heading(rule))
        for rule, column in zip(rules[1:], by_rule(cells, rules[1:]), strict=True)
    ]

    def with_rules(columns: list[ScoreColumn]) -> list[ScoreColumn]:
        if len(domains) == 1 and further:
            columns[0] = columns[0]._replace(heading=rule_heading(rules[0]))
        return [*columns[:-1], *further, columns[-1]]

    columns = [(each.heading, marked(each)) for each in with_rules(scores(rows, measure))]
    for rule, (_, texts) in zip(rules[1:], columns[-1 - len(further) : -1], strict=True):
        for label in texts:
            texts[label] = _of_rule(texts[label], [x for x in cells if x.label == label], rule)
    of_domain = dict(zip(domains, [texts for _, texts in columns], strict=False))
    for cell in cells:
        if (chosen := cell.chosen) is None:
            of_domain[cell.held_out][cell.label] = selection.why_none(cell.result)
        elif is_constant(cell.constant, seed_scores(chosen).items()):
            of_domain[cell.held_out][cell.label] += ONE
    constants = _constants(cells)
    for name, text in constants.items():
        of_domain[name][CONSTANT] = text
    if len(domains) == 1:
        del columns[1]  # the worst of all domains stands in the table by domain
    labels = [*rows["method"].unique(), *([CONSTANT] if constants else [])]
    shown = table(f"held-out {measure.heading()}", labels, _beside(columns, numbers))
    scored = columns[: -1 - len(further)]
    narrow = [each for each in scored if each[0] in ("mean", "worst")]
    latex = [
        _for_paper(labels, _beside(each, numbers), names_of(cells))
        for each in (columns[:-1], scored, narrow)
        if each
    ]
    tests = {cell.label: cell.tests for cell in cells}
    compared = with_rules(scores(selected(cells, surviving=True), measure, tests))
    num_seeds = rows["seed"].nunique()
    over = f", mean ± standard deviation over {num_seeds} seeds" if num_seeds > 1 else ""
    return Main(shown, compared, latex, f"Held-out {measure.heading()}{over}.")


def _for_paper(
    labels: Sequence[str], columns: Sequence["_Shown"], names: Mapping[str, str]
) -> pd.DataFrame:
    """A table for a paper: short headings, names in place of labels, and no empty row."""
    short = {RULE_HEADINGS["oracle"]: "oracle"}
    shown = [(short.get(heading, heading), texts) for heading, texts in columns]
    there = [label for label in labels if any(texts.get(label) for _, texts in columns)]
    frame = table("method", there, shown)
    frame["method"] = [names.get(label, label) for label in there]
    return frame


_PAPER = "paper: "  # before the name of a column of ours
_Shown: TypeAlias = tuple[str, Mapping[str, str]]  # a heading, and cells by label


def _beside(columns: Sequence[_Shown], numbers: Mapping[str, Mapping[str, str]]) -> list[_Shown]:
    """The columns, with a paper's numbers beside those of the same name, and others last."""
    there = [heading for heading, _ in columns]
    shown = []
    for heading, texts in columns:
        shown.append((heading, texts))
        beside = f"{_PAPER}{heading}"
        shown += [(beside, numbers[beside])] if beside in numbers else []
    return shown + [
        (heading, texts)
        for heading, texts in numbers.items()
        if heading.removeprefix(_PAPER) not in there
    ]


def seed_scores(chosen: Chosen) -> dict[int, float]:
    """The selected test score of each seed."""
    return {run.seed: run.choice.test_score for run in chosen.runs}


def _of_rule(text: str, cells: Sequence[TableCell], rule: str) -> str:
    """The text of a method in the column of a rule: how many seeds it picks nothing for, or why.

    cells: of the method, one for each held-out domain.
    """
    count = 0
    for cell in cells:
        one = choose(cell.label, cell.result, rule)
        if one is None:
            return selection.why_none(cell.result)
        count += sum(selection.picked(run, rule) is None for run in one.runs)
    return f"{text} (none for {count})" if text and count else text


def _constants(cells: Sequence[TableCell]) -> dict[str, str]:
    """The accuracy of always answering the most frequent class, by held-out domain.

    A domain in which methods differ in it, as they train on other examples, is left out.
    """
    texts: dict[str, set[str]] = {}
    for cell in cells:
        values = [value for value, _ in cell.constant.values()]
        texts.setdefault(cell.held_out, set()).add(forms.percent(values) if values else "")
    return {name: min(of) for name, of in texts.items() if len(of) == 1 and min(of)}


def rule_heading(rule: str) -> str:
    """The heading of a column of what a rule selects."""
    return RULE_HEADINGS.get(rule, rule)


def differences_table(
    found: pd.DataFrame, columns: Sequence[ScoreColumn], baseline: str = ""
) -> list[Part]:
    """The differences from the baseline, by default the first method, and how to read them.

    A method with other test examples has empty cells, and a line that says why.

    found: by `differences.table` of the columns.
    """
    if not columns:
        return []
    measure = columns[0].measure
    labels = [*dict.fromkeys(label for column in columns for label in column.scores)]
    baseline = baseline or labels[0]
    found = found[found["other"] == baseline]
    unpaired = [
        label for label in labels if any(not each.is_paired(label, baseline) for each in columns)
    ]
    if found.empty and not unpaired:
        return []
    style = "+z.1f" if measure.is_share else "+z.3g"

    def cell(one: Any) -> str:
        mean, low, high = (measure.factor * value for value in (one.mean, one.low, one.high))
        star = "*" if one.p_holm < differences.LEVEL else ""
        return f"{mean:{style}}{star} [{low:{style}}, {high:{style}}], n={one.seeds}"

    by_column: dict[str, dict[str, str]] = {column.heading: {} for column in columns}
    left_out: dict[str, int] = {}
    for one in found.itertuples():
        by_column[one.column][one.method] = cell(one)
        left_out[one.method] = max(left_out.get(one.method, 0), one.seeds_left_out)
    shown = [(heading, cells) for heading, cells in by_column.items() if cells or unpaired]
    if any(left_out.values()):
        counts = {label: str(count) for label, count in left_out.items() if count}
        shown.append(("seeds left out", counts))
    rows = [label for label in labels if label in left_out or label in unpaired]
    points = ", of shares in percentage points" if measure.is_share else ""
    about = (
        f"Differences from the method in the heading{points}, seed by seed: the mean over n seeds "
        "and its 95% interval by Student's t. An asterisk: a paired t test with Holm's correction "
        "for the methods of a column has p < 0.05; intervals are not corrected. A seed in which a "
        "method has no number, such as a diverged run, is left out."
    )
    why = [_why_unpaired(columns[0], label, baseline) for label in unpaired]
    parts: list[Part] = [table(f"difference from {baseline}", rows, shown), about]
    return parts + (["\n".join(why)] if why else [])


def _why_unpaired(column: ScoreColumn, label: str, baseline: str) -> str:
    """A line about a method with other test examples than the baseline."""
    one, other = (dict(column.tests[name]) for name in (label, baseline))
    flags = [f"--{name}" for name in {**other, **one} if one.get(name) != other.get(name)]
    return f"{label} is not compared with {baseline}: the test differs by {', '.join(flags)}."


def domains_table(rows: pd.DataFrame, measure: Measure = ACCURACY) -> pd.DataFrame:
    """The scores by domain at the selected evaluation: test if held out, else validation.

    rows: of `selected`, all of one held-out domain; in one of them at least, something was chosen.
    """
    held_out = rows["held out"][0]
    why = rows.dropna(subset="why").set_index("method")["why"]
    chosen = rows[rows["why"].isna()].set_index(["seed", "method"])
    columns = []
    for name in chosen.columns[chosen.columns.str.startswith("on ")]:
        domain = name.removeprefix("on ")
        texts = marked(ScoreColumn(domain, chosen[name].unstack(), measure)) | why.to_dict()
        columns.append((f"{domain} (held out)" if domain == held_out else domain, texts))
    columns.append(("worst domain", marked(ScoreColumn("", chosen["worst"].unstack(), measure))))
    return table(measure.heading(" by domain"), rows["method"].unique(), columns)


def stops_table(rows: pd.DataFrame, measure: Measure = ACCURACY) -> pd.DataFrame:
    """The evaluations at the stop, a row per cell and threshold, over the seeds that stopped."""
    rows = rows.explode("stops").rename(columns={"method": "at the stop"})
    for name in ("threshold", "round", "train_score", "worst_score", "domains"):
        rows[name] = [None if pd.isna(stop) else stop[name] for stop in rows["stops"]]
    rows["threshold"] = rows["threshold"].map("{:g}".format, na_action="ignore")
    form = known(text_of(measure))
    keys = ["at the stop", "held out", "threshold"]

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
    shown = _summary(rows, keys, columns, measure)
    of_domains = rows.groupby(keys, sort=False, dropna=False)["domains"].agg(domains)
    shown.insert(6, f"by domain{measure.unit}", of_domains.to_numpy())
    why = shown.pop("why")
    return shown.assign(stopped=shown["stopped"].mask(why.notna(), why))


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
        f"{KNOWN}*": ("known_domains", "score"),
        "held out at the last round*": ("last", "score"),
        "MB sent in all": ("sent", "megabytes"),
        "runs diverged": ("diverged", "first"),
    }
    if rows["dropped"].notna().any():
        rows = rows.assign(dropped=rows["dropped"].fillna(0).where(rows["why"].isna()))
        columns["rounds with a client dropped"] = ("dropped", "list")
    return _summary(rows, ["method", "held out"], columns, measure)


def by_rule(
    cells: Sequence[TableCell], rules: Sequence[str] = tuple(selection.RULES)
) -> list[ScoreColumn]:
    """The test scores of each method, by seed, at what each rule of selection picks.

    Of several held-out domains they are means.
    """
    columns = []
    tests = {cell.label: cell.tests for cell in cells}
    for rule in rules:
        rows = selected(cells, rule)
        scores = pd.DataFrame()
        if rows["why"].isna().any():
            scores = _by_domain(rows, "test").mean(axis=1, skipna=False).unstack("method")
        scores = scores.reindex(columns=rows["method"].unique())
        heading = f"{rule} (looks at the test)" if rule == "oracle" else rule
        columns.append(ScoreColumn(heading, scores, cells[0].result.score, tests))
    return columns


def rules_table(cells: Sequence[TableCell]) -> pd.DataFrame:
    """The scores of `by_rule`, without rules that pick nothing in any cell."""
    why = {cell.label: selection.why_none(cell.result) for cell in cells}
    columns = [
        (column.heading, {label: text or why[label] for label, text in marked(column).items()})
        for column in by_rule(cells)
        if column.scores.notna().any(axis=None)
    ]
    counts = {cell.label: str(len(divergence.settings(cell.result.runs))) for cell in cells}
    columns.append(("number of settings", counts))
    heading = f"held-out {cells[0].result.score.heading()} by rule of selection"
    return table(heading, counts, columns)


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
    names = {"held out": "best over methods, held out", "method": "method"}
    rows = pd.DataFrame([row for one in best.values() for row in _of_seeds(one)])
    return _summary(rows.rename(columns=names), [*names.values()], columns, chosen[0].measure)


def settings_table(cells: Sequence[TableCell]) -> pd.DataFrame:
    """A row for each setting: whether it is selected, its diverged runs, and the others' scores."""
    rows = []
    for cell in cells:
        one = cell.chosen
        for number, setting in enumerate(divergence.settings(cell.result.runs)):
            is_selected = "yes" if one is not None and one.indices == setting.indices else ""
            row = {"method": cell.label, "held out": cell.held_out, "number": number}
            row |= {"setting": setting.text, "selected": is_selected}
            for run in (cell.result.runs[index] for index in setting.indices):
                picked = None if run.diverged else selection.picked_or_last(run, cell.rule)
                rows.append(row | {"diverged": run.diverged} | _numbers(picked))
    # The scores are of the seeds that did not diverge.
    end = " of the others*" if any(row["diverged"] for row in rows) else "*"
    columns = {
        "runs diverged": ("diverged", "true"),
        "at round": ("round", "mean"),
        f"validation{end}": ("validation", "or diverged"),
        f"domains left out{end}": ("left_out", "or diverged"),
        f"unseen domain{end}": ("unseen_domain", "or diverged"),
        f"held out{end}": ("test", "or diverged"),
        f"{KNOWN}{end}": ("known_domains", "or diverged"),
        f"worst domain{end}": ("worst", "or diverged"),
        "MB sent by then": ("bytes", "megabytes"),
    }
    keys = ["method", "held out", "number", "setting", "selected"]
    measure = cells[0].result.score
    return _summary(pd.DataFrame(rows), keys, columns, measure).drop(columns="number")


def _has_grid(cells: Iterable[TableCell]) -> bool:
    """Whether there are several settings."""
    return sum(len(divergence.settings(cell.result.runs)) for cell in cells) > 1


def _diverged(cells: Sequence[TableCell]) -> list[Part]:
    """The paragraph about diverged runs, if there are any."""
    texts = [
        f"{cell.label}, held out {cell.held_out}: {divergence.text(cell.result.runs)}."
        for cell in cells
        if any(run.diverged for run in cell.result.runs)
    ]
    rule = "A setting with a diverged seed is never selected."
    return ["\n".join([*texts, f"{rule} Remedy: {divergence.REMEDY}."])] if texts else []


def _why_nothing(cells: Sequence[TableCell]) -> str:
    """Why nothing was chosen in any cell."""
    runs = [run for cell in cells for run in cell.result.runs]
    if any(selection.why_none(cell.result) == "none" for cell in cells):
        who = "seed that did not diverge" if any(run.diverged for run in runs) else "seed"
        return (
            f"{cells[0].rule} picks no evaluation of any {who}; choose another rule, such as "
            "--select=validation; the table has the last round"
        )
    if all(run.diverged for run in runs):
        return "every run diverged"
    return "a seed of every setting diverged"


def write(
    path: Path,
    cells: Sequence[TableCell],
    main: Main | None = None,
    *,
    title: str = "",
    caption: str = "",
    baseline: str = "",
    more: Sequence[Part] = (),
) -> str:
    """Writes all tables of cells, and returns those that compare methods, to be printed.

    The files are PATH.md and PATH.tex, and beside them those of all settings (grid) and of the
    differences (differences.csv).

    path: ends in "table" in a run folder of its own; the files beside another name begin with it.
    main: of `main_table`, or of a study with columns of its own; None if nothing was selected.
    caption: a paragraph below the table.
    baseline: the method from which differences are shown; "" for the first.
    more: further parts.
    """
    grid, others = (beside(path, name) for name in ("grid", "differences"))
    if _has_grid(cells):
        forms.write_markdown(grid.with_suffix(".md"), [settings_table(cells)], title)
    else:
        files.remove(grid.with_suffix(".md"))
    diverged = _diverged(cells)
    if main is None:
        for name in (path.with_suffix(".tex"), others.with_suffix(".csv")):
            files.remove(name)
        why: list[Part] = [_why_nothing(cells), *diverged, settings_table(cells)]
        forms.write_markdown(path.with_suffix(".md"), why)
        return forms.printed(why)
    found = differences.table(main.columns, baseline)
    if len(found):
        files.write(others.with_suffix(".csv"), found.to_csv(index=False, lineterminator="\n"))
    else:
        files.remove(others.with_suffix(".csv"))
    about = [ABOUT_BEST] if any(map(marks, main.columns)) else []
    has_one = main.table.map(lambda cell: ONE in str(cell)).to_numpy().any()
    about += [ABOUT_ONE] if has_one else []
    notes = [caption or (f"{title}." if title else ""), main.about, *about]
    forms.write_latex(
        path.with_suffix(".tex"), main.latex or [main.table], " ".join(filter(None, notes))
    )
    parts: list[Part] = [
        main.table,
        *filter(None, [caption]),
        *about,
        *served(_rules(cells)),
        *_weights(cells),
        *_sources(cells),
    ]
    parts += differences_table(found, main.columns, baseline)
    # Games serve the state of their stop, which no rule of selection looks at.
    stops = [stop for cell in cells for run in cell.result.runs for stop in run.stops or ()]
    has_stops = any(stop.round is not None for stop in stops)
    if _has_grid(cells) and main.columns:
        parts.append(rules_table(cells))
    # Methods with other test examples than the first are not compared with it.
    alike = [one for cell in cells if cell.tests == cells[0].tests and (one := cell.chosen)]
    if len({one.label for one in alike}) > 1 and main.columns and not has_stops:
        parts.append(winners_table(alike))
    details = []
    if main.columns:
        parts += diverged
        details = _details(cells)
    forms.write_markdown(path.with_suffix(".md"), [*parts, *details, *more], title)
    return forms.printed([*parts, *more])


def _rules(cells: Sequence[TableCell]) -> list[tuple[str, str | None]]:
    """The label of each cell, and the rule by which clients' own networks serve its test."""
    there = [cell for cell in cells if (cell.folder / "config.json").exists()]
    return [(cell.label, run_folder.record_of(cell.folder).served) for cell in there]


def served(rules: Sequence[tuple[str, str | None]]) -> list[str]:
    """A line that says which networks the test scores are of, if some methods are personal.

    rules: a label, and the rule by which clients' own networks serve the test (`Assembly.served`).
    """
    if not {rule for _, rule in rules} - {None}:
        return []
    labels: dict[str, dict[str, None]] = {}
    for label, rule in rules:
        labels.setdefault(SERVED[rule or ""], {})[label] = None
    if len(labels) == 1:
        return [f"The test score is that of {next(iter(labels))}."]
    texts = [f"{', '.join(names)}: {text}" for text, names in labels.items()]
    return [f"Test scores are of different examples. {'; '.join(texts)}."]


def _weights(cells: Sequence[TableCell]) -> list[Part]:
    """A line on how methods weigh clients of different sizes, if not all weigh them alike."""
    labels: dict[str, dict[str, None]] = {}
    for cell in cells:
        if (cell.folder / "config.json").exists():
            weighting = run_folder.record_of(cell.folder).weighting
            labels.setdefault(weighting, {})[cell.label] = None
    labels.pop("", None)
    if len(labels) < 2:
        return []
    words = {"size": "by their size", "uniform": "equally", "own": "by rules of their own"}
    texts = [f"{', '.join(names)} {words[weighting]}" for weighting, names in labels.items()]
    return [
        f"Clients hold different numbers of examples, and methods weigh them differently: "
        f"{'; '.join(texts)}. --set=weighting=size weighs by size where a method has it."
    ]


def _sources(cells: Sequence[TableCell]) -> list[Part]:
    """A line that names the cells of each state of this library's sources, if there are several."""
    of_state: dict[str, list[str]] = {}
    commits: dict[str, str] = {}
    for cell in cells:
        if (cell.folder / "config.json").exists():
            start = run_folder.record_of(cell.folder).start
            commit = f", commit {start.commit[:7] + start.commit[40:]}" if start.commit else ""
            sources = f"sources {str(start.library)[:8]}"
            of_state.setdefault(sources, []).append(f"{cell.label} on {cell.held_out}")
            commits.setdefault(sources, commit)  # of the same sources there may be several
    if len(of_state) < 2:
        return []
    texts = [f"{', '.join(labels)} ({name}{commits[name]})" for name, labels in of_state.items()]
    return [f"Not all runs are of one state of fedjax_inv: {'; '.join(texts)}."]


def _details(cells: Sequence[TableCell]) -> list[Part]:
    """What was selected, by which rule."""
    rows = selected(cells)
    measure = cells[0].result.score
    parts: list[Part] = []
    if rows["held out"].nunique() == 1 and rows["why"].isna().any():
        parts.append(domains_table(rows, measure))
    if rows["stops"].notna().any():
        parts.append(stops_table(rows, measure))
    parts += map(selection.explained, dict.fromkeys(cell.rule for cell in cells))
    return [*parts, choices_table(rows, measure)]


def beside(path: Path, name: str) -> Path:
    """The file beside a table, which begins with the table's name unless that is "table"."""
    return path.with_name(name if path.name == "table" else f"{path.name}_{name}")
