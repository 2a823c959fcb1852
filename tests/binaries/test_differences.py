"""Paired differences: intervals, p-values, Holm's correction, and what is best."""

import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from fedjax_inv_experiments.assembly.metrics import Measure
from fedjax_inv_experiments.report import differences
from fedjax_inv_experiments.report.differences import ScoreColumn

NAN = math.nan
RNG = np.random.default_rng(0)


def numbered(values: np.ndarray) -> dict[int, float]:
    return dict(enumerate(map(float, values)))


@pytest.mark.parametrize("count", [2, 3, 10])
def test_differences_are_those_of_the_paired_t_test(count: int) -> None:
    first, second, third = RNG.normal(size=(3, count))
    scores = {"a": numbered(first), "b": numbered(second), "c": numbered(third)}
    # Seeds with which one method has a score, and the other has none.
    scores["b"] |= {97: NAN}
    scores["a"] |= {97: 0.5}
    scores["c"] |= {97: NAN}
    found = differences.table([ScoreColumn("test", pd.DataFrame(scores))])
    pairs = ((second, first), (third, first), (third, second))
    assert [*zip(found.method, found.other, strict=True)] == [("b", "a"), ("c", "a"), ("c", "b")]
    for one, (left, right) in zip(found.itertuples(), pairs, strict=True):
        expected = stats.ttest_rel(left, right).confidence_interval(0.95)
        assert (one.column, one.seeds) == ("test", count)
        assert one.seeds_left_out == 1
        assert one.mean == pytest.approx((left - right).mean())
        assert (one.low, one.high) == pytest.approx((expected.low, expected.high))
        assert one.p == pytest.approx(stats.ttest_rel(left, right).pvalue)
    # Holm's correction is over the methods that are compared with the same one.
    expected = [*differences.holm(found.p[:2]), found.p[2]]
    assert found.p_holm.tolist() == pytest.approx(expected)
    # Another baseline: both others minus it.
    found = differences.table([ScoreColumn("test", pd.DataFrame(scores))], baseline="c")
    assert [*zip(found.method, found.other, strict=True)] == [("a", "c"), ("b", "c"), ("b", "a")]


def test_methods_with_other_test_examples_are_not_paired() -> None:
    scores = pd.DataFrame({"a": [0.1, 0.2], "b": [0.3, 0.35], "c": [0.2, 0.5]})
    column = ScoreColumn("test", scores, tests={"a": "angle 15", "b": "angle 15", "c": "angle 30"})
    found = differences.table([column])
    assert [*zip(found.method, found.other, strict=True)] == [("b", "a")]
    # The difference from c, whose mean is the best, would have an interval that contains 0.
    assert differences.best(column) == ({"c"}, set())
    assert differences.best(column._replace(tests={})) == ({"c"}, {"a", "b"})


@pytest.mark.parametrize(
    ("scores", "first", "as_good"),
    [
        ({"a": [0.5]}, "", ""),
        ({"a": [0.5], "b": [0.5], "c": [0.4]}, "ab", ""),
        # The seeds differ much, but within each the second one is better by about the same.
        ({"a": [0.1, 0.5, 0.9], "b": [0.2, 0.61, 1.0]}, "b", ""),
        # By exactly the same in all seeds: the interval has no width, and says nothing.
        ({"a": [0.1, 0.5, 0.9], "b": [0.2, 0.5, 0.91], "c": [-0.3, 0.1, 0.5]}, "b", "a"),
        ({"a": [0.1, 0.5, 0.9], "b": [0.2, 0.6, 1.0]}, "b", "a"),
        ({"a": [0.1, 0.2], "b": [0.9, NAN]}, "", ""),  # nothing to be compared with
        ({"a": [0.1, 0.2], "b": [0.9, NAN], "c": [0.0, 0.101]}, "a", ""),
    ],
)
def test_the_best_and_those_as_good(
    scores: dict[str, list[float]], first: str, as_good: str
) -> None:
    column = ScoreColumn("test", pd.DataFrame(scores))
    expected = {*first}, {*as_good}
    assert differences.best(column) == expected
    errors = ScoreColumn("test", -column.scores, Measure("error", higher_is_better=False))
    assert differences.best(errors) == expected


def test_p_values_are_those_of_the_paired_t_test() -> None:
    one, two = RNG.normal(size=(2, 5))
    assert differences.p_value(one - two) == pytest.approx(stats.ttest_rel(one, two).pvalue)
    # Equal differences are no evidence.
    assert differences.p_value([0.0, 0.0, 0.0]) == 1
    assert np.isnan(differences.p_value([0.5, 0.5]))
    # One of 360 images in each of three seeds, as float32 has the shares.
    right = np.array([[217, 222, 233], [216, 221, 232]])
    one, two = (right / 360).astype(np.float32).astype(float)
    assert len({*(one - two)}) > 1
    assert np.isnan(differences.p_value(one - two))


def test_corrected_p_values_reject_what_holms_procedure_rejects() -> None:
    for level in (0.01, 0.05, 0.3):
        for _ in range(20):
            values = RNG.uniform(size=7) ** 4
            rejected = set()
            for rank, index in enumerate(np.argsort(values)):  # the procedure, step by step
                if values[index] > level / (len(values) - rank):
                    break
                rejected.add(index)
            corrected = differences.holm(values)
            assert {i for i, p in enumerate(corrected) if p <= level} == rejected
            assert all(p <= q <= 1 for p, q in zip(values, corrected, strict=True))
    found = differences.holm([0.03, NAN, 0.01])  # NaN does not count
    assert found == pytest.approx([0.03, NAN, 0.02], nan_ok=True)


def test_a_word_needs_a_clear_difference() -> None:
    reference = dict(enumerate([0.5, 0.6, 0.7, 0.4]))
    scores = {
        "up": {seed: of + 0.1 + 0.001 * seed for seed, of in reference.items()},
        "down": {seed: of - 0.1 - 0.0005 * seed for seed, of in reference.items()},
        "noise": {0: 0.9, 1: 0.2, 2: 0.8, 3: 0.3},
        "one": {0: 0.9},
        "none": {},
    }
    found = {name: differences.paired(of, reference) for name, of in scores.items()}
    corrected = dict(zip(found, differences.holm([one.p for one in found.values()]), strict=True))
    words = {name: differences.word(one, corrected[name]) for name, one in found.items()}
    none = differences.NONE
    assert words == {"up": "better", "down": "worse", "noise": none, "one": "", "none": ""}
    up = found["up"]
    expected = stats.ttest_1samp([0.1, 0.101, 0.102, 0.103], 0)
    assert (up.seeds, up.mean) == (4, pytest.approx(0.1015))
    assert (up.low, up.high) == pytest.approx(tuple(expected.confidence_interval(0.95)))
    assert up.p == pytest.approx(expected.pvalue)
    assert corrected["up"] == pytest.approx(2 * expected.pvalue)  # the second smallest of three
    assert found["one"][:2] == (1, pytest.approx(0.4))
