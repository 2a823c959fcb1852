"""The study of rules of selection: equal terms, and a column for each rule."""

from pathlib import Path
from typing import Any

from fedjax_inv_experiments import build, selection
from fedjax_inv_experiments.studies import selection as rules
from fedjax_inv_experiments.studies import study
from fedjax_inv_experiments.studies.study import CellResult, RowResult
from runs import others

ROWS = rules.rows("colored_mnist")
CONFIGS = study.configs(ROWS, Path("runs"))


def test_methods_have_the_same_data_network_budget_and_number_of_settings() -> None:
    own = {"run_dir", "algorithm", "set", "learning_rate", "pooled", "batch_size"}
    assert len({str(others(one, own)) for one in CONFIGS}) == 1
    for one in CONFIGS:
        (own_settings,) = build.settings(one).values()
        number = len(one.training.learning_rate)
        for values in own_settings.values():
            number *= len(values)
        assert number == 2
        # Two clients, or one with the examples of both.
        assert one.training.batch_size == (1000 if one.partition.pooled else 500)


def run_of(seed: int, penalty: float, scores: dict[str, float | None]) -> dict[str, Any]:
    """A run whose rules picked evaluations with these test scores."""

    def line(test: float) -> dict[str, float]:
        more = {"validation_score": penalty, "left_out_score": penalty, "round": 5}
        return more | {"test_score": test, "domains": {}}

    by_rule = {name: None if test is None else line(test) for name, test in scores.items()}
    last = line(0.2)
    hyper = {"penalty": penalty}
    return {"seed": seed, "hyper": hyper, "diverged": False, "by_rule": by_rule, "last": last}


def test_a_column_has_what_its_rule_selects() -> None:
    runs = [
        run_of(
            seed, penalty, {"validation": 0.1 * penalty, "oracle": 0.4, "last_if_agreed": agreed}
        )
        for penalty in (1.0, 2.0)
        for seed, agreed in ((0, 0.6), (1, None))
    ]
    result: Any = {"runs": runs, "cell": {"held_out": "0.9"}}
    row = RowResult(ROWS[0], CONFIGS[0], [CellResult("0.9", [], [], result)])
    cells = rules.PAPER.studies["rules"].columns(row)
    of = {name: cells[heading] for name, heading in rules.HEADINGS.items()}
    assert of["validation"].startswith("20.0")
    assert of["oracle"].startswith("40.0")
    assert of["last_if_agreed"] == "40.0 ± 28.3 (none for 1)"  # 60 and the last round's 20
    assert of["leave_one_out"] == of["unseen_domain"] == "none"
    assert set(selection.RULES) >= set(rules.HEADINGS)
