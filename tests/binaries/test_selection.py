"""Which evaluation a rule selects, by hand."""

from typing import Any

import numpy as np
import pytest

from experiments.parts import selection
from experiments.parts.selection import RULES
from experiments.reporting import report


def line(round: int, accuracies: tuple[float, ...], test: float, examples: int = 400) -> Any:
    domains: dict[str, Any] = {
        str(index): {"accuracy": accuracy, "examples": examples, "split": "validation"}
        for index, accuracy in enumerate(accuracies)
    }
    domains["test"] = {"accuracy": test, "examples": examples, "split": "test"}
    return {
        "round": round,
        "domains": domains,
        "validation_accuracy": float(np.mean(accuracies)),
        "test_accuracy": test,
    }


LINES = [
    line(5, (0.5, 0.51), 0.5),
    line(10, (0.8, 0.9), 0.1),
    line(15, (0.74, 0.76), 0.6),
    line(20, (0.74, 0.82), 0.7),
    line(22, (0.76, 0.76), 0.4),
    line(25, (0.7, 0.7), 0.65),
]


@pytest.mark.parametrize(
    ("rule", "round"), [("validation", 10), ("agreement", 15), ("last", 25), ("oracle", 20)]
)
def test_rules(rule: str, round: int) -> None:
    picked = RULES[rule].pick(LINES)
    assert picked is not None
    assert picked["round"] == round


@pytest.mark.parametrize("rule", ["validation", "oracle"])
def test_of_equally_good_evaluations_the_later_is_picked(rule: str) -> None:
    again = [line(30, (0.8, 0.9), 0.7), line(35, (0.8, 0.9), 0.7), line(40, (0.8, 0.8), 0.6)]
    picked = RULES[rule].pick([*LINES, *again])
    assert picked is not None
    assert picked["round"] == 35


def test_only_the_oracle_looks_at_the_test() -> None:
    others = [line(each["round"], accuracies(each), 0.0) for each in LINES]
    for name, rule in RULES.items():
        if name != "oracle":
            ours, theirs = rule.pick(LINES), rule.pick(others)
            assert ours is not None
            assert theirs is not None
            assert ours["round"] == theirs["round"]
            assert rule.score(ours) == rule.score(theirs)


def accuracies(each: Any) -> tuple[float, ...]:
    domains = each["domains"].values()
    return tuple(d["accuracy"] for d in domains if d["split"] == "validation")


def test_domains_agree_as_often_as_chance_has_it() -> None:
    """The statistic is chi-square with one degree less than there are domains."""
    rng = np.random.default_rng(0)
    for num_domains, share in ((2, 0.683), (5, 0.594)):
        sizes = rng.integers(300, 900, num_domains)
        agree = [
            selection.differ_by_chance(
                [{"accuracy": rng.binomial(size, 0.7) / size, "examples": size} for size in sizes]
            )
            for _ in range(2000)
        ]
        assert abs(np.mean(agree) - share) < 0.04
    assert not selection.differ_by_chance([{"accuracy": 0.5, "examples": 9}])
    assert not selection.differ_by_chance(
        [{"accuracy": 0.5, "examples": 9}, {"accuracy": 0.0, "examples": 0}]
    )
    # All right everywhere.
    assert selection.differ_by_chance([{"accuracy": 1.0, "examples": n} for n in (5, 9)])


def test_hyperparameters_are_compared_by_what_the_rule_selects() -> None:
    def run(rate: float, lines: list[Any]) -> dict[str, Any]:
        picked = {name: rule.pick(lines) for name, rule in RULES.items()}
        return {
            "seed": 0,
            "hyper": {"rate": rate},
            "diverged": False,
            "selected": picked["validation"],
            "by_rule": picked,
            "last": lines[-1],
        }

    never = [line(5, (0.8, 0.95), 0.05)]
    result = {"cell": {"held_out": "0.9"}, "runs": [run(0.1, LINES), run(0.2, never)]}
    expected = {"validation": (0.2, 5), "agreement": (0.1, 15), "oracle": (0.1, 20)}
    for rule, (rate, round) in expected.items():
        chosen = report.choose("fedipg", result, rule)
        assert chosen is not None
        assert chosen.hyper == {"rate": rate}
        assert chosen.runs[0]["selected"]["round"] == round
    # What agrees for one of two seeds goes before what never does, and tells the other as it ended.
    for some, agree in ((result["runs"][0], True), (result["runs"][1], False)):
        ended = {**run(some["hyper"]["rate"], never), "seed": 1, "last": never[-1]}
        half = {**result, "runs": [some | {"last": LINES[-1]}, ended]}
        picked = report.choose("fedipg", half, "agreement")
        assert (picked is not None) == agree
        if picked is not None:
            assert [each["selected"]["round"] for each in picked.runs] == [15, 5]
    # Nothing agrees in any setting.
    assert report.choose("fedipg", result | {"runs": [run(0.2, never)]}, "agreement") is None
    # Why is told: a rule that found nothing is no divergence, nor the other way round.
    bad = run(0.2, never) | {"diverged": True}
    for runs, why in (
        ([run(0.2, never)], "none"),
        ([bad], "diverged"),
        ([bad, run(0.2, never) | {"seed": 1}], "diverged"),
        ([bad, run(0.1, never)], "none"),
    ):
        assert report._why_none(result | {"runs": runs}) == why
    both = report.choose("fedipg", result, "agreement")
    assert both is not None
    cells = {("fedipg", "0.9"): "none", ("fedavg", "0.9"): "none"}
    assert report.table([both], {}, cells).splitlines()[-1].split("|")[2].strip() == "none"
    # A folder of before the rules.
    (first, _) = result["runs"]
    del first["by_rule"]
    assert report.choose("fedipg", result | {"runs": [first]}) is not None
    assert report.choose("fedipg", result | {"runs": [first]}, "oracle") is None
