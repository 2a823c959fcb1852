"""FedIPG's studies of the rules that end it and of its penalty, on logs made by hand."""

from typing import Any

import numpy as np
import pytest

import runs
from fedjax_inv_experiments import command_line, config
from fedjax_inv_experiments.folder.records import (
    CellRecord,
    Domain,
    Line,
    Result,
    RunResult,
    StopRecord,
)
from fedjax_inv_experiments.studies import fedipg, study
from fedjax_inv_experiments.studies.row_runs import CellResult, RowResult
from fedjax_inv_experiments.studies.rows import Row

# Accuracies of two domains of 400 examples; a difference of 0.0306 is by chance.
ACCURACIES = [
    *((0.5, 0.51), (0.8, 0.9), (0.75, 0.76), (0.74, 0.82), (0.74, 0.74), (0.73, 0.72)),
    *((0.7, 0.71), (0.7, 0.8), (0.72, 0.71), (0.75, 0.74), (0.6, 0.9)),
]


def line(index: int, losses: tuple[float, float] = (0.5, 0.8), **changes: Any) -> Line:
    pairs = zip(ACCURACIES[index], losses, strict=True)
    domains = {
        str(at): Domain(score, loss, 400, "validation") for at, (score, loss) in enumerate(pairs)
    }
    return runs.line(
        5 * (index + 1), float(np.mean(ACCURACIES[index])), test_score=0.01 * index, domains=domains
    )


LINES = [line(index, (0.55, 0.56) if index in (3, 5) else (0.5, 0.8)) for index in range(11)]
PICKED = {
    "agreement": 15,
    "agreement 2 times": 30,
    "agreement 3 times": 35,
    "agreement 5 times": None,
    "agreement of accuracies and risks": 30,
    "level after agreement": 50,
    "last agreement": 50,
    "last_if_agreed": 55,
    "last": 55,
}


@pytest.mark.parametrize(("rule", "round"), PICKED.items())
def test_rules(rule: str, round: int | None) -> None:
    picked = fedipg._ENDS[rule](LINES)
    assert (picked and picked.round) == round
    if rule != "last":
        assert fedipg._ENDS[rule](LINES[:2]) is None


def test_risks_agree_within_the_deviation_of_a_network_that_is_as_sure_as_right() -> None:
    """Its losses are -log(a) and -log(1 - a), with probabilities a and 1 - a."""
    for right in (0.6, 0.75, 0.9):
        losses, shares = -np.log([right, 1 - right]), np.array([right, 1 - right])
        variance = shares @ (losses - shares @ losses) ** 2
        apart = np.sqrt(2 * variance / 400)  # the deviation of the difference of two means
        for factor, agree in ((0.99, True), (1.01, False)):
            domains = {
                str(at): Domain(right, 0.5 + at * factor * apart, 400, "validation")
                for at in (0, 1)
            }
            assert fedipg._risks_agree(runs.line(5, right, domains=domains)) == agree
    lacking = {"0": Domain(0.7, None, 400, "validation"), "1": Domain(0.7, 0.5, 400, "validation")}
    assert not fedipg._risks_agree(runs.line(5, 0.7, domains=lacking))


def test_the_table_has_the_last_round_where_a_rule_picks_none() -> None:
    never = LINES[:2]
    cell = CellResult("0.9", [], [LINES, never], Result(CellRecord("fedipg", {}, "0.9", []), []))
    found = study.Study(fedipg.ends, fedipg._by_end).columns(
        RowResult(Row("x", ()), config.of(), [cell])
    )
    assert found["agreement, %"] == "1.5 ± 0.7 (round 12, none for 1)"
    assert found["last, %"] == "5.5 ± 6.4 (round 32)"
    assert found["oracle, %"] == found["last, %"]


def test_a_rule_that_picks_nothing_for_any_seed_has_no_accuracy() -> None:
    cell = CellResult("0.9", [], [LINES[:2]] * 2, Result(CellRecord("fedipg", {}, "0.9", []), []))
    found = fedipg._by_end(RowResult(Row("x", ()), config.of(), [cell]))
    assert found["agreement, %"] == found["agreement 2 times, %"] == "none"
    assert "none" not in found["last, %"]


@pytest.mark.parametrize("data", fedipg._DOMAINS)
def test_the_rates_of_fedavg_contain_those_of_the_others(data: str) -> None:
    rows = fedipg.PAPER.studies["domains"].rows(data)
    first, *others = (command_line.of_arguments([*row.flags, *row.own]) for row in rows)
    assert len(first.training.learning_rate) == 4
    for one in others:
        assert set(one.training.learning_rate) < set(first.training.learning_rate)


@pytest.mark.parametrize(("played", "sent"), [(20, 2.0), (40, 1.0), (100, 0.4)])
def test_a_game_sends_nothing_after_its_end(played: int, sent: float) -> None:
    """2 MB until the end of the run, which stopped in round 20."""
    run = RunResult(0, {}, False, {}, runs.line(100, ended=played, bytes=2_000_000))
    assert fedipg._megabytes(run, StopRecord(0.6, 20)) == pytest.approx(sent)


def test_each_penalty_has_the_mean_over_domains_of_what_the_rule_picked() -> None:
    """The results are as result.json holds them: no setting has been selected yet."""
    gone = fedipg._SWEPT[-1]

    def cell(held_out: str, at_last: float, picked: float) -> CellResult:
        last, best = (runs.line(10, 0.5, test_score=score) for score in (at_last, picked))
        results = [
            RunResult(seed, {"penalty": penalty}, penalty == gone and seed == 1, rules, last)
            for seed in (0, 1)
            for penalty in fedipg._SWEPT
            for rules in [{} if penalty == 0 else {"validation": best}]
        ]
        return CellResult(held_out, [], [], Result(CellRecord("fedipg", {}, held_out, []), results))

    row = RowResult(Row("x", ()), config.of(), [cell("0", 0.3, 0.8), cell("15", 0.5, 0.9)])
    found = fedipg._by_penalty(row)
    assert found.pop("penalty 0, %") == "40.0 ± 0.0"  # no evaluation was picked
    assert found.pop(f"penalty {gone:g}, %") == "diverged"
    assert set(found.values()) == {"85.0 ± 0.0"}
