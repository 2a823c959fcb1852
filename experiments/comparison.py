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

from .metrics import ACCURACY, Measure

# Characters that no text has stand around a bold or italic text until `tables` writes it.
BOLD, ITALIC = "\ue000{}\ue001", "\ue002{}\ue003"
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
    for (one, two), column in itertools.product(itertools.combinations(names, 2), columns):
        if {one, two} <= {*column.scores}:
            of_seeds = column.scores[two] - column.scores[one]
            values = of_seeds[np.isfinite(of_seeds)]
            if len(values) > 1:
                counts = len(values), len(of_seeds) - len(values)
                rows.append((two, one, column.heading, *counts, *interval(values.to_numpy())))
    return pd.DataFrame(rows, columns=[*_FIELDS])


def best(column: Column) -> dict[str, str]:
    """How a column of two or more methods with a score of each seed marks them: method -> "{}".

    Bold: the best mean. Italics: the 95% interval of the difference from it contains 0, or has no
    width and says nothing.
    """
    scores = column.scores.astype(float) * (1 if column.measure.higher_is_better else -1)
    scores = scores.loc[:, np.isfinite(scores).all()]
    if len(scores.columns) < 2:
        return {}
    means = scores.mean()
    first = means.index[means == means.max()]
    marks = dict.fromkeys(first, BOLD)
    for name in scores.columns.difference(first) if len(scores) > 1 else ():
        _, low, high = interval((scores[first[0]] - scores[name]).to_numpy())
        if low <= 0 or high - low < _NO_WIDTH:
            marks[name] = ITALIC
    return marks


BEST = (
    "Bold: the best mean of a column. Italics: the difference from it, seed by seed, has a 95% "
    "interval that contains 0. Only methods with a number for each seed are compared."
)


def comparing(
    columns: Sequence[Column], found: pd.DataFrame, measure: Measure = ACCURACY
) -> list[pd.DataFrame | str]:
    """What stands below a table: what its marks say, and the differences from its first method.

    columns: those of the table. found: the differences.
    """
    parts: list[pd.DataFrame | str] = [BEST] if any(map(best, columns)) else []
    if found.empty:
        return parts
    first = found["other"].iloc[0]
    found = found[found["other"] == first]
    style = "+z.1f" if measure.is_share else "+z.3g"

    def cell(one: pd.Series) -> str:
        mean, low, high = (f"{measure.factor * one[x]:{style}}" for x in ("mean", "low", "high"))
        return f"{mean} [{low}, {high}], n={one['seeds']}"

    cells = found.assign(text=found.apply(cell, axis=1))
    table = cells.pivot_table("text", "method", "column", aggfunc="last", sort=False)
    table = table[[*dict.fromkeys(found["column"])]]
    left_out = found.groupby("method")["seeds_left_out"].max()
    if left_out.any():
        table["seeds left out"] = left_out.astype(str).where(left_out > 0, "")
    table.insert(0, f"difference from {first}", table.index)
    points = ", of shares in percentage points" if measure.is_share else ""
    about = (
        f"Differences from the method in the heading{points}, seed by seed: the mean over n seeds "
        "and its 95% interval by Student's t, not corrected for the number of comparisons. A seed "
        "in which a method has no number, such as a diverged run, is left out."
    )
    return [*parts, table, about]
