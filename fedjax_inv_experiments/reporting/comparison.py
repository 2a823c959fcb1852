"""Comparisons of methods: the best of each column, and differences between methods by seed.

Two runs with the same seed have the same draw of the data. So the difference of two methods is
taken within each seed, and its interval leaves out how much the draws differ.
"""

import csv
import io
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from fedjax_inv_experiments.parts.objective import ACCURACY, Measure
from fedjax_inv_experiments.reporting.tables import bold, italic, table

_NO_WIDTH = 1e-9  # equal differences of scores differ by rounding

# seed -> score, NaN where the seed's run has none, as it diverged
Scores = Mapping[int, float]


class Column(NamedTuple):
    """The scores of methods, by the method's name."""

    heading: str
    scores: Mapping[str, Scores]
    measure: Measure = ACCURACY  # how to read the scores


class Difference(NamedTuple):
    """By how much a method exceeds another one, in the mean over seeds."""

    method: str
    other: str
    column: str
    seeds: int  # in which both have a score
    seeds_left_out: int  # in which both were run, but only one or none has a score
    mean: float
    low: float  # this and the next: the 95% interval
    high: float


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The mean of two or more values, and the ends of its 95% interval by Student's t."""
    from scipy.special import stdtrit  # the quantiles of t; scipy.stats takes a second to import

    mean = float(np.mean(values))
    half = stdtrit(len(values) - 1, 0.975) * np.std(values, ddof=1) / math.sqrt(len(values))
    return mean, float(mean - half), float(mean + half)


def difference(column: Column, method: str, other: str) -> Difference | None:
    """The difference of two methods in a column; None with fewer than two seeds of both."""
    one, two = (column.scores.get(name, {}) for name in (method, other))
    both = [one[seed] - two[seed] for seed in one if seed in two]
    values = [value for value in both if math.isfinite(value)]
    if len(values) < 2:
        return None
    left_out = len(both) - len(values)
    return Difference(method, other, column.heading, len(values), left_out, *interval(values))


def differences(columns: Sequence[Column]) -> list[Difference]:
    """The differences of every two methods; of each pair the later method minus the earlier one."""
    names = dict.fromkeys(name for column in columns for name in column.scores)
    pairs = itertools.combinations(names, 2)
    every = (difference(column, two, one) for one, two in pairs for column in columns)
    return [each for each in every if each is not None]


class Best(NamedTuple):
    """The methods that are best in a column."""

    first: frozenset[str] = frozenset()  # with the best mean
    # the 95% interval of the difference from it contains 0, or has no width and says nothing
    as_good: frozenset[str] = frozenset()

    def mark(self, method: str, text: str) -> str:
        """A method's cell of a table: bold if it is best, in italics if it may be as good."""
        return (
            bold(text) if method in self.first else italic(text) if method in self.as_good else text
        )


def best(column: Column) -> Best:
    """The best of two or more methods with a score of each seed."""
    means = {
        name: float(np.mean([*scores.values()]))
        for name, scores in column.scores.items()
        if scores and all(map(math.isfinite, scores.values()))
    }
    if len(means) < 2:
        return Best()
    ranks = {name: column.measure.rank(mean) for name, mean in means.items()}
    first = frozenset(name for name, rank in ranks.items() if rank == max(ranks.values()))
    one = next(name for name in means if name in first)
    others = (difference(column, one, name) for name in means)
    # The end of the interval at which the other method is best.
    end = "low" if column.measure.higher_is_better else "high"
    rank = column.measure.rank
    as_good = frozenset(
        each.other
        for each in others
        if each is not None and (rank(getattr(each, end)) <= 0 or each.high - each.low < _NO_WIDTH)
    )
    return Best(first, as_good - first)


BEST = (
    "Bold: the best mean of a column. Italics: the difference from it, seed by seed, has a 95% "
    "interval that contains 0. Only methods with a number for each seed are compared."
)


def differences_table(
    found: Sequence[Difference], form: str = "markdown", measure: Measure = ACCURACY
) -> str:
    """The differences of each method from the first one, a row for each method."""
    first = found[0].other
    rows: dict[str, dict[str, Difference]] = {}
    for each in found:
        if each.other == first:
            rows.setdefault(each.method, {})[each.column] = each
    headings = dict.fromkeys(each.column for each in found)

    def cell(row: Mapping[str, Difference], heading: str) -> str:
        if heading not in row:
            return ""
        each = row[heading]
        style = "+z.1f" if measure.is_share else "+z.3g"
        mean, low, high = (
            f"{measure.factor * value:{style}}" for value in (each.mean, each.low, each.high)
        )
        text = f"{mean} [{low}, {high}]"
        return f"{text}, n={each.seeds}"

    def left_out(row: Mapping[str, Difference]) -> str:
        most = max(each.seeds_left_out for each in row.values())
        return str(most) if most else ""

    def of_column(heading: str) -> tuple[str, Callable[[str], str]]:
        return heading, lambda method: cell(rows[method], heading)

    columns: list[tuple[str, Callable[[str], str]]] = [
        (f"difference from {first}", str),
        *map(of_column, headings),
        ("seeds left out", lambda method: left_out(rows[method])),
    ]
    return table(rows, columns, form=form, omit_empty=True)


def about_differences(measure: Measure = ACCURACY) -> str:
    """The text below `differences_table`."""
    points = ", of shares in percentage points" if measure.is_share else ""
    return (
        f"Differences from the method in the heading{points}, seed by seed: the mean over n seeds "
        "and its 95% interval by Student's t, not corrected for the number of comparisons. A seed "
        "in which a method has no number, such as a diverged run, is left out."
    )


def differences_csv(found: Sequence[Difference]) -> str:
    """The differences as the text of a csv file, a line for each pair of methods and column."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(Difference._fields)
    writer.writerows(found)
    return file.getvalue()
