"""Paired differences between methods: intervals, p-values, Holm's correction, and words.

Two runs with the same seed have the same draw of the data. So the difference of two methods is
taken within each seed, and its interval leaves out how much the draws differ.
"""

import itertools
import math
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import pandas as pd

from ..assembly.metrics import ACCURACY, Measure

LEVEL = 0.05  # the chance of one wrong word, or more, among differences that are corrected together
BETTER = "better"
WORSE = "worse"
NONE = "no difference shown"
# Differences whose standard deviation is smaller differ by rounding alone: an example of a million
# is a larger difference.
_EQUAL = 1e-6
_NO_WIDTH = 1e-9  # of an interval

# The flags that test examples depend on, with their values.
Tests: TypeAlias = tuple[tuple[str, Hashable], ...]
# seed -> score, NaN where the seed's run has none, as it diverged
Scores = Mapping[int, float]


class ScoreColumn(NamedTuple):
    """The scores of methods: a row for each seed, a column for each method, NaN without a score."""

    heading: str
    scores: pd.DataFrame
    measure: Measure = ACCURACY  # how to read the scores
    tests: Mapping[str, Tests] = {}  # by method; methods with others are not paired

    def is_paired(self, method: str, other: str) -> bool:
        """Whether two methods have the same test examples for a seed."""
        return self.tests.get(method) == self.tests.get(other)


class Difference(NamedTuple):
    """A method's scores less those of another, over the seeds in which both have one."""

    seeds: int
    mean: float = math.nan  # NaN without a seed
    low: float = math.nan  # this and the next two: NaN for fewer than two seeds
    high: float = math.nan  # the 95% interval of the mean, by Student's t
    p: float = math.nan  # of the two-sided paired t test


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The mean of two or more values, and the ends of its 95% interval by Student's t."""
    from scipy import stats  # takes a second to import

    mean = float(np.mean(values))
    half = stats.t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / math.sqrt(len(values))
    return mean, float(mean - half), float(mean + half)


def p_value(values: Sequence[float]) -> float:
    """The p-value of the two-sided t test that the mean of two or more differences is 0.

    Equal differences give 1 if they are 0. Otherwise they give NaN, no evidence: scores on few test
    examples are often equal by chance. Differences are equal if they differ by rounding alone.
    """
    from scipy import stats  # takes a second to import

    mean = float(np.mean(values))
    deviation = float(np.std(values, ddof=1))
    if deviation <= _EQUAL:
        return 1.0 if abs(mean) <= _EQUAL else math.nan
    return float(stats.ttest_1samp(values, 0.0).pvalue)


def holm(p_values: Sequence[float]) -> list[float]:
    """The p-values of Holm (1979) corrected for their number; those that are NaN do not count."""
    values = pd.Series(p_values, dtype=float)
    known = values.dropna().sort_values()
    corrected = (known * np.arange(len(known), 0, -1)).cummax().clip(upper=1)
    return [*corrected.reindex(values.index)]


def paired(scores: Scores, others: Scores) -> Difference:
    """The difference of two methods' scores, seed by seed."""
    values = [*(pd.Series(scores, dtype=float) - pd.Series(others, dtype=float)).dropna()]
    if len(values) < 2:
        return Difference(len(values), *values)
    return Difference(len(values), *interval(values), p_value(values))


def word(difference: Difference, p: float) -> str:
    """What a difference of scores of which higher is better shows; "" for fewer than two seeds.

    p: its p-value, corrected.
    """
    if difference.seeds < 2:
        return ""
    if not p < LEVEL:
        return NONE
    return BETTER if difference.mean > 0 else WORSE


def table(columns: Sequence[ScoreColumn], baseline: str = "") -> pd.DataFrame:
    """The differences of every two methods; of each pair the later method minus the earlier one.

    A row for each pair and column in which both have scores of two seeds and the same test
    examples: the number of these seeds, that of the seeds in which only one or none has a score,
    the mean, the ends of its 95% interval, its p-value, and the p-value that Holm's method corrects
    for all methods that are compared with the same one in the same column.

    baseline: the method that counts as the earliest; "" for the first.
    """
    names = dict.fromkeys([baseline] if baseline else [])
    names |= dict.fromkeys(name for column in columns for name in column.scores)
    rows = []
    for (one, two), column in itertools.product(itertools.combinations(names, 2), columns):
        if {one, two} <= {*column.scores} and column.is_paired(one, two):
            scores = column.scores.replace([math.inf, -math.inf], math.nan)
            found = paired(scores[two], scores[one])
            if found.seeds > 1:
                counts = found.seeds, len(scores) - found.seeds
                rows.append((two, one, column.heading, *counts, *found[1:]))
    fields = ["method", "other", "column", "seeds", "seeds_left_out", *Difference._fields[1:]]
    frame = pd.DataFrame(rows, columns=fields)
    return frame.assign(p_holm=frame.groupby(["other", "column"])["p"].transform(holm))


class Best(NamedTuple):
    """The methods that a column marks."""

    best: frozenset[str] = frozenset()  # with the best mean
    # Their difference from the best has a 95% interval that contains 0, or one without a width,
    # which says nothing.
    close: frozenset[str] = frozenset()


def best(column: ScoreColumn) -> Best:
    """The best of two or more methods that have a score of each seed; none of fewer."""
    scores = column.scores.astype(float) * (1 if column.measure.higher_is_better else -1)
    scores = scores.loc[:, np.isfinite(scores).all()]
    if len(scores.columns) < 2:
        return Best()
    means = scores.mean()
    first = means.index[means == means.max()]
    close = []
    for name in scores.columns.difference(first) if len(scores) > 1 else ():
        if column.is_paired(first[0], name):
            _, low, high = interval((scores[first[0]] - scores[name]).to_numpy())
            if low <= 0 or high - low < _NO_WIDTH:
                close.append(name)
    return Best(frozenset(first), frozenset(close))
