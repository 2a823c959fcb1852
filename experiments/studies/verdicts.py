"""Words for paired differences from a reference method: better, worse, or no difference shown."""

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import pandas as pd

from .. import comparison
from ..comparison import Scores

K = TypeVar("K", bound=Hashable)  # a cell

_EQUAL = 1e-6  # a smaller deviation is rounding: an example of a million is a larger difference
LEVEL = 0.05  # the chance of one wrong word, or more, in a whole map
BETTER, WORSE, NONE = "better", "worse", "no difference shown"


class Verdict(NamedTuple):
    """A method against the reference, by the seeds in which both have a score."""

    seeds: int
    mean: float = np.nan  # of the differences
    low: float = np.nan  # this and the next two: NaN for fewer than two seeds
    high: float = np.nan  # the 95% interval of the mean, by Student's t
    p: float = np.nan  # of the two-sided paired t test
    word: str = ""  # for fewer than two seeds there is none


def p_value(differences: Sequence[float]) -> float:
    """The p-value of the two-sided t test that the mean of two or more differences is 0.

    Equal differences give 1 if they are 0. Otherwise they give NaN, no verdict: scores on few test
    examples are often equal by chance. Differences are equal if they differ by rounding alone.
    """
    from scipy import stats  # takes a second to import

    mean, deviation = float(np.mean(differences)), float(np.std(differences, ddof=1))
    if deviation <= _EQUAL:
        return 1.0 if abs(mean) <= _EQUAL else np.nan
    return float(stats.ttest_1samp(differences, 0.0).pvalue)


def holm(p_values: Sequence[float]) -> list[float]:
    """The p-values of Holm (1979) corrected for their number; those that are NaN do not count."""
    values = pd.Series(p_values, dtype=float)
    known = values.dropna().sort_values()
    corrected = (known * np.arange(len(known), 0, -1)).cummax().clip(upper=1)
    return [*corrected.reindex(values.index)]


def compared(scores: Mapping[K, Scores], reference: Mapping[K, Scores]) -> dict[K, Verdict]:
    """The verdicts, with Holm's correction over all of them.

    scores: the scores of each cell by seed; higher is better.
    reference: those of the reference method in the same cell.
    """
    found = {cell: _against(of, reference.get(cell, {})) for cell, of in scores.items()}
    corrected = holm([verdict.p for verdict in found.values()])
    return {
        cell: verdict._replace(p=p, word=_word(verdict.mean, p) if verdict.seeds > 1 else "")
        for (cell, verdict), p in zip(found.items(), corrected, strict=True)
    }


def _against(scores: Scores, reference: Scores) -> Verdict:
    values = [*(pd.Series(scores, dtype=float) - pd.Series(reference, dtype=float)).dropna()]
    if len(values) < 2:
        return Verdict(len(values), *values)
    return Verdict(len(values), *comparison.interval(values), p_value(values))


def _word(mean: float, p: float) -> str:
    if not p < LEVEL:
        return NONE
    return BETTER if mean > 0 else WORSE
