"""Which evaluation a rule selects, by hand."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import runs
from fedjax_inv import inputs
from fedjax_inv.communication import Traffic
from fedjax_inv.evaluation import Scores
from fedjax_inv_experiments.assembly import grid
from fedjax_inv_experiments.folder import selection, summary
from fedjax_inv_experiments.folder.records import (
    CellRecord,
    Domain,
    Line,
    Result,
    RunRecord,
    RunResult,
)
from fedjax_inv_experiments.folder.selection import RULES
from fedjax_inv_experiments.report import tables


def line(round: int, accuracies: tuple[float, ...], test: float, examples: int = 400) -> Line:
    domains = {
        str(index): Domain(accuracy, None, examples, "validation")
        for index, accuracy in enumerate(accuracies)
    }
    domains["test"] = Domain(test, None, examples, "test")
    accuracy = float(np.mean(accuracies))
    domains["unseen"] = Domain(1 - accuracy, None, examples, "unseen_domain")
    return runs.line(round, accuracy, test_score=test, domains=domains)


LINES = [
    line(5, (0.5, 0.51), 0.5),
    line(10, (0.8, 0.9), 0.1),
    line(15, (0.74, 0.76), 0.6),
    line(20, (0.74, 0.82), 0.7),
    line(22, (0.76, 0.76), 0.4),
    line(25, (0.7, 0.7), 0.65),
]


@pytest.mark.parametrize(
    ("rule", "round"),
    [
        *[("validation", 10), ("agreement", 15), ("last_if_agreed", 25), ("last", 25)],
        *[("unseen_domain", 5), ("oracle", 20)],
    ],
)
def test_rules(rule: str, round: int) -> None:
    picked = RULES[rule].pick(LINES)
    assert picked is not None
    assert picked.round == round


@pytest.mark.parametrize("rule", ["validation", "oracle"])
def test_of_equally_good_evaluations_the_later_is_picked(rule: str) -> None:
    again = [line(30, (0.8, 0.9), 0.7), line(35, (0.8, 0.9), 0.7), line(40, (0.8, 0.8), 0.6)]
    picked = RULES[rule].pick([*LINES, *again])
    assert picked is not None
    assert picked.round == 35


def test_a_score_of_nan_is_the_lowest() -> None:
    lines = [line(5, (0.5, 0.5), 0.5), line(10, (np.nan, 0.9), np.nan)]
    for rule in ("validation", "unseen_domain", "oracle"):
        picked = RULES[rule].pick(lines)
        assert picked is not None
        assert picked.round == 5


def test_tables_show_the_round_in_which_a_run_ended() -> None:
    """Evaluations after it have the same numbers, and are of no later round."""
    lines = [line(5, (0.5, 0.6), 0.5)]
    lines += [line(round, (0.7, 0.7), 0.6) | {"ended": 8, "bytes": 23_456} for round in (10, 15)]
    picked = {name: rule.pick(lines) for name, rule in RULES.items()}
    cell = CellRecord("fl_games", {}, "test", [RunRecord(0, {})])
    result = Result(cell, [RunResult(0, {}, False, picked, lines[-1])])
    rows = tables.selected([tables.TableCell("fl_games", result)])
    table = tables.choices_table(rows)
    assert [*table["at round"]] == ["8"]
    assert [*table["MB sent in all"]] == ["0.023"]


def test_only_the_oracle_looks_at_the_test() -> None:
    lines = [each | {"left_out_score": each.round / 100} for each in LINES]
    others = [each | {"test_score": 0.0} for each in lines]
    for name, rule in RULES.items():
        if name != "oracle":
            ours, theirs = rule.pick(lines), rule.pick(others)
            assert ours is not None
            assert theirs is not None
            assert ours.round == theirs.round
            assert rule.score(ours) == rule.score(theirs)


NAN = float("nan")


@pytest.mark.parametrize(
    "log",
    [
        [(0.8, 0.9), (0.7, 0.8)],  # they never agree
        [(0.5, 0.5), (0.6, 0.6)],  # they never differ
        [(0.5, 0.5), (0.8, 0.9)],  # they agree only before they differ
        [(0.8,), (0.7,)],  # a single domain
        [(0.8, 0.9), (NAN, NAN), (NAN, 0.7)],
    ],
)
def test_without_agreement_nothing_is_picked(log: list[tuple[float, ...]]) -> None:
    lines = [line(5 * (index + 1), each, 0.5) for index, each in enumerate(log)]
    assert RULES["agreement"].pick(lines) is None
    assert RULES["last_if_agreed"].pick(lines) is None
    assert RULES["last"].pick(lines) is lines[-1]


def test_the_last_is_picked_though_it_differs_again() -> None:
    lines = [*LINES, line(30, (0.6, 0.9), 0.5)]
    assert RULES["last_if_agreed"].pick(lines) is lines[-1]
    assert RULES["agreement"].pick(lines) is LINES[2]


def test_leave_one_out_picks_the_best_mean_of_what_is_left_out() -> None:
    means = [0.5, 0.7, 0.6, 0.7, 0.2, NAN]
    lines = [each | {"left_out_score": mean} for each, mean in zip(LINES, means, strict=True)]
    assert RULES["leave_one_out"].pick(lines) is lines[3]  # of two equal ones the last
    assert RULES["leave_one_out"].pick(LINES) is None


def test_the_score_left_out_is_the_mean_over_runs_of_the_same_seed_and_setting() -> None:
    """Each run has its own test: that of all domains, or the domain that it trains without."""
    domains, settings = ("a", "b", "c"), [{"rate": 0.1}, {"rate": 0.2}]
    runs = [inputs.Run(seed, hyper) for hyper in settings for seed in (0, 5)]
    runs += [run._replace(left_out=name) for name in domains for run in runs[:4]]
    cell = grid.Cell("fedavg", {}, "d", tuple(runs))
    tests = np.random.default_rng(0).random(len(runs)).astype(np.float32)
    one = np.ones(len(runs), np.int32)

    def scores(values: np.ndarray) -> Scores:
        return Scores(values, values, np.ones(values.shape, np.int32))

    loss = tests.copy()
    loss[5] = NAN  # seed 5, rate 0.1, without a
    outcome: Any = SimpleNamespace(
        metrics={},
        watched={},
        broken=-one[:, None],
        attended=one[:, None, None],
        valid=scores(np.ones((len(runs), 8))),
        test=Scores(tests[:, None], loss[:, None], one[:, None]),
        stops=None,
        detailed=None,
        unseen={},
    )
    traffic = [Traffic(0, 0)]
    how: Any = {"done": 5, "seconds": 0.0, "drops": False}
    lines = summary.lines(cell, [*domains], outcome, traffic, **how)
    found = [line.left_out_score for line in lines]
    expected = [np.mean(tests[4 + at :: 4]) for at in range(4)]
    np.testing.assert_allclose(found[:1] + found[2:4], expected[:1] + expected[2:], rtol=1e-6)
    assert found[1] is not None
    assert np.isnan(found[1])
    assert found[4:] == [None] * 12
    assert lines[4].domains["a"].split == "test"
    assert lines[4].validation_score == 1.0
    results = summary.summarise(cell, lines)
    assert [(run.seed, run.hyper) for run in results] == [(run.seed, run.hyper) for run in runs[:4]]


def test_a_table_has_the_scores_of_each_method_by_each_rule() -> None:
    def result(*several: list[Line]) -> Result:
        made = [
            RunResult(seed, {}, False, {k: rule.pick(of) for k, rule in RULES.items()}, of[-1])
            for seed, of in enumerate(several)
        ]
        return Result(CellRecord("fedavg", {}, "test", [RunRecord(0, {})]), made)

    never = [line(5, (0.8, 0.95), 0.05), line(10, (0.7, 0.8), 0.3)]
    found = {
        column.heading: column.scores.mean().to_dict()
        for column in tables.by_rule(
            [
                tables.TableCell("one", result(LINES, LINES)),
                tables.TableCell("two", result(never, never)),
            ]
        )
        if column.scores.notna().any(axis=None)
    }
    assert found == {
        "validation": pytest.approx({"one": 0.1, "two": 0.05}),
        "agreement": pytest.approx({"one": 0.6, "two": NAN}, nan_ok=True),
        "last_if_agreed": pytest.approx({"one": 0.65, "two": NAN}, nan_ok=True),
        "last": pytest.approx({"one": 0.65, "two": 0.3}),
        "unseen_domain": pytest.approx({"one": 0.5, "two": 0.3}),
        "oracle (looks at the test)": pytest.approx({"one": 0.7, "two": 0.3}),
    }


def accuracies(each: Line) -> tuple[float, ...]:
    return tuple(d.score for d in each.domains.values() if d.split == "validation")


def domain(accuracy: float, examples: int) -> Domain:
    return Domain(accuracy, None, examples, "validation")


def test_domains_agree_as_often_as_chance_has_it() -> None:
    """The statistic is chi-square with one degree less than there are domains."""
    rng = np.random.default_rng(0)
    for num_domains, share in ((2, 0.683), (5, 0.594)):
        sizes = rng.integers(300, 900, num_domains)
        agree = [
            selection.differ_by_chance(
                [domain(rng.binomial(size, 0.7) / size, size) for size in sizes]
            )
            for _ in range(2000)
        ]
        assert abs(np.mean(agree) - share) < 0.04
    assert not selection.differ_by_chance([domain(0.5, 9)])
    assert not selection.differ_by_chance([domain(0.5, 9), domain(0.0, 0)])
    # All right everywhere.
    assert selection.differ_by_chance([domain(1.0, n) for n in (5, 9)])


def test_hyperparameters_are_compared_by_what_the_rule_selects() -> None:
    cell = CellRecord("fedipg", {}, "0.9", [RunRecord(0, {})])

    def run(rate: float, lines: list[Line], seed: int = 0, diverged: bool = False) -> RunResult:
        picked = {name: rule.pick(lines) for name, rule in RULES.items()}
        hyper = {"rate": rate}
        return RunResult(seed, hyper, diverged, picked, lines[-1])

    def chosen(rule: str, *several: RunResult) -> selection.Chosen | None:
        return selection.choose("fedipg", Result(cell, list(several)), rule)

    never = [line(5, (0.8, 0.95), 0.05)]
    both = run(0.1, LINES), run(0.2, never)
    expected = {"validation": (0.2, 5), "agreement": (0.1, 15), "oracle": (0.1, 20)}
    expected["last_if_agreed"] = (0.1, 25)
    for rule, (rate, round) in expected.items():
        picked = chosen(rule, *both)
        assert picked is not None
        assert picked.hyper == {"rate": rate}
        assert picked.selected[0].round == round
    # What agrees for one of two seeds goes before what never does, and tells the other as it ended.
    for some, agree in ((both[0], True), (both[1], False)):
        ended = run(some.hyper["rate"], never, seed=1)
        picked = chosen("agreement", some | {"last": LINES[-1]}, ended)
        assert (picked is not None) == agree
        if picked is not None:
            assert [each.round for each in picked.selected] == [15, 5]
    # Settings that agree for as many seeds are compared there, not by the ends of the others.
    low, high = (
        RULES["agreement"].pick([*LINES[:2], one])
        for one in (line(15, (0.6, 0.6), 0), line(15, (0.7, 0.7), 0))
    )
    assert low is not None
    assert high is not None
    ends = {0.1: (low, 0.95), 0.2: (high, 0.1)}
    several = []
    for rate, (one, end) in ends.items():
        several += [
            run(rate, LINES) | {"by_rule": {"agreement": one}},
            run(rate, [line(5, (end, end - 0.3), 0.05)], seed=1) | {"by_rule": {"agreement": None}},
        ]
    picked = chosen("agreement", *several)
    assert picked is not None
    assert picked.hyper == {"rate": 0.2}
    # Nothing agrees in any setting.
    for rule in ("agreement", "last_if_agreed"):
        assert chosen(rule, run(0.2, never)) is None
    # Why is told: a rule that found nothing is no divergence, nor the other way round.
    bad = run(0.2, never, diverged=True)
    for several, why in (
        ([run(0.2, never)], "none"),
        ([bad], "diverged"),
        ([bad, run(0.2, never, seed=1)], "diverged"),
        ([bad, run(0.1, never)], "none"),
    ):
        assert selection.why_none(Result(cell, several)) == why
    cells = [
        tables.TableCell(str(len(runs)), Result(cell, list(runs)), "agreement")
        for runs in (both, [run(0.2, never)])
    ]
    main = tables.main_table(cells)
    assert main is not None
    assert main.table["0.9"].tolist()[1] == "none"


def test_without_validation_examples_no_one_of_several_settings_is_chosen() -> None:
    cell = CellRecord("fedavg", {}, "0.9", [RunRecord(0, {})])
    lines = [line(5, (0.8,), 0.1, examples=0), line(10, (0.9,), 0.2, examples=0)]
    picked = {name: rule.pick(lines) for name, rule in RULES.items()}

    def chosen(rule: str, rates: tuple[float, ...]) -> selection.Chosen | None:
        several = [RunResult(0, {"rate": rate}, False, picked, lines[-1]) for rate in rates]
        return selection.choose("fedavg", Result(cell, several), rule)

    assert chosen("last", (0.1, 0.2)) is None
    assert chosen("last", (0.1,)) is not None
    assert chosen("oracle", (0.1, 0.2)) is not None
