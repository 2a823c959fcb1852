"""Comparisons of methods: the best of each column, and differences between methods by seed.

Two runs with the same seed have the same draw of the data. So the difference of two methods is
taken within each seed, and its interval leaves out how much the draws differ.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from ..parts.objective import ACCURACY, Measure
from ..reporting.tables import bold, italic

_NO_WIDTH = 1e-9  # equal differences of scores differ by rounding
_FIELDS = ("method", "other", "column", "seeds", "seeds_left_out", "mean", "low", "high")

# seed -> score, NaN where the seed's run has none, as it diverged
Scores = Mapping[int, float]


class Column(NamedTuple):
    """The scores of methods: a row for each seed, a column for each method, NaN without a score."""

    heading: str
    scores: pd.DataFrame
    measure: Measure = ACCURACY  # how to read the scores


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The mean of two or more values, and the ends of its 95% interval by Student's t."""
    from scipy import stats  # takes a second to import

    mean = float(np.mean(values))
    half = stats.t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / math.sqrt(len(values))
    return mean, float(mean - half), float(mean + half)


def differences(columns: Sequence[Column]) -> pd.DataFrame:
    """The differences of every two methods; of each pair the later method minus the earlier one.

    A row for each pair and column in which both have scores of two seeds: their number, that of the
    seeds in which only one or none has a score, the mean, and the ends of its 95% interval.
    """
    names = dict.fromkeys(name for column in columns for name in column.scores)
    rows = []
    for one, two in itertools.combinations(names, 2):
        for heading, scores, _ in columns:
            if one in scores and two in scores:
                of_seeds = scores[two] - scores[one]
                values = of_seeds[np.isfinite(of_seeds)]
                if len(values) > 1:
                    counts = len(values), len(of_seeds) - len(values)
                    rows.append((two, one, heading, *counts, *interval(values.to_numpy())))
    return pd.DataFrame(rows, columns=[*_FIELDS])


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
    scores = column.scores.astype(float)
    if not column.measure.higher_is_better:
        scores = -scores
    scores = scores.loc[:, np.isfinite(scores).all()]
    if len(scores.columns) < 2:
        return Best()
    means = scores.mean()
    first = means.index[means == means.max()]
    as_good = set()
    if len(scores) > 1:
        for name in scores.columns.difference(first):
            _, low, high = interval((scores[first[0]] - scores[name]).to_numpy())
            if low <= 0 or high - low < _NO_WIDTH:
                as_good.add(name)
    return Best(frozenset(first), frozenset(as_good))


BEST = (
    "Bold: the best mean of a column. Italics: the difference from it, seed by seed, has a 95% "
    "interval that contains 0. Only methods with a number for each seed are compared."
)


def differences_table(found: pd.DataFrame, measure: Measure = ACCURACY) -> pd.DataFrame:
    """The differences of each method from the first one, a row for each method."""
    first = found["other"].iloc[0]
    found = found[found["other"] == first]
    style = "+z.1f" if measure.is_share else "+z.3g"

    def text(one: pd.Series) -> str:
        mean, low, high = (f"{measure.factor * one[x]:{style}}" for x in ("mean", "low", "high"))
        return f"{mean} [{low}, {high}], n={one['seeds']}"

    cells = found.assign(text=found.apply(text, axis=1))
    table = cells.pivot_table("text", "method", "column", aggfunc="last", sort=False)
    table = table[[*dict.fromkeys(found["column"])]]
    left_out = found.groupby("method")["seeds_left_out"].max()
    if left_out.any():
        table["seeds left out"] = left_out.astype(str).where(left_out > 0, "")
    table.insert(0, f"difference from {first}", table.index)
    return table


def about_differences(measure: Measure = ACCURACY) -> str:
    """The text below `differences_table`."""
    points = ", of shares in percentage points" if measure.is_share else ""
    return (
        f"Differences from the method in the heading{points}, seed by seed: the mean over n seeds "
        "and its 95% interval by Student's t, not corrected for the number of comparisons. A seed "
        "in which a method has no number, such as a diverged run, is left out."
    )
