"""A domain to select by, and clients that never train: in logs, tables and predictions."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from fedjax_inv.checks import UsageError
from fedjax_inv.data import federation
from fedjax_inv_experiments import config, finished, predictions
from fedjax_inv_experiments.assembly import data as data_flags
from fedjax_inv_experiments.assembly import experiment
from fedjax_inv_experiments.folder import log
from fedjax_inv_experiments.folder.records import Domain
from fedjax_inv_experiments.folder.selection import RULES
from fedjax_inv_experiments.folder.summary import NEVER_SEEN
from fedjax_inv_experiments.report import data_figures
from runs import line, no_figures, ran, train

DOMAINS = ("a", "c", "p", "s")


@pytest.mark.parametrize(
    ("held_out", "validate", "expected"),
    [
        ("all", "next", {"a": "c", "c": "p", "p": "s", "s": "a"}),
        ("p,a,c,s", "next", {"p": "a", "a": "c", "c": "s", "s": "p"}),
        ("s", "next", {"s": "a"}),
        ("p,a", "c", {"p": "c", "a": "c"}),
        ("none", "c", {None: "c"}),
        ("p,a", "", {"p": None, "a": None}),
    ],
)
def test_each_held_out_domain_has_one_to_select_by(
    held_out: str, validate: str, expected: dict[str | None, str | None]
) -> None:
    chosen = config.of(held_out=held_out, validate=validate)
    tests = data_flags.held_out(chosen.data, DOMAINS)
    assert data_flags.validated(chosen.data, DOMAINS, tests) == expected


@pytest.mark.parametrize(
    ("held_out", "validate", "domains"),
    [
        ("all", "c", DOMAINS),
        ("p", "x", DOMAINS),
        ("none", "next", DOMAINS),
        ("a", "c", ("a", "c")),
        ("none", "all", ("all",)),
    ],
)
def test_a_domain_that_cannot_be_selected_by(
    held_out: str, validate: str, domains: tuple[str, ...]
) -> None:
    chosen = config.of(held_out=held_out, validate=validate)
    with pytest.raises(UsageError, match="--validate"):
        data_flags.validated(chosen.data, domains, data_flags.held_out(chosen.data, domains))


SMALL: dict[str, Any] = {
    "angles": (0.0, 30.0, 60.0, 80.0),
    "held_out": "80,0",
    "validate": "next",
    "clients": 5,
    "held_out_clients": 0.2,
    "seeds": (0, 1),
}


def test_the_seed_of_the_partition_fixes_who_holds_what() -> None:
    def held(**flags: Any) -> list[list[list[int]]]:
        splits = experiment.make(config.of(**SMALL, data_seed="0", **flags)).splits["80"]
        of_seeds = [(*each[:3], each.unseen["unseen_clients"]) for each in splits.values()]
        return [[np.concatenate(federation.parts_of(x)).tolist() for x in of] for of in of_seeds]

    made = experiment.make(config.of(**SMALL))
    names = [data_figures.shown(made, of)[1].names[-3:] for of in ("80", "0")]
    assert names[0] == ["unseen domain: 0", NEVER_SEEN, "held out: 80"]
    assert names[1] == ["unseen domain: 80", NEVER_SEEN, "held out: 0"]
    one, two = held()
    assert one != two
    assert held(partition_seed="1") == [two, two]


def test_the_rule_looks_at_the_unseen_domain_alone() -> None:
    assert RULES["unseen_domain"].pick([line(1, 0.5)]) is None
    scores = (0.3, 0.6, 0.6, 0.2)
    lines = [
        line(
            at,
            0.1 * at,
            test_score=0.9 - 0.1 * at,
            domains={"0": Domain(of, 1, 4, "unseen_domain")},
        )
        for at, of in enumerate(scores, 1)
    ]
    assert RULES["unseen_domain"].pick(lines) is lines[2]  # of equal ones the last
    assert RULES["unseen_domain"].score(lines[2]) == 0.6


@pytest.mark.parametrize(
    "flags",
    [
        # Each client's own network, on examples in the proportions of its classes.
        {"algorithm": ("ditto",), "environment": "none", "held_out": "none"}
        | {"partition": "dirichlet", "alpha": 0.1, "clients": 5},
        {"norm": "batch", "unseen_norms": "batch", "validate": "40"},
        {"norm": "batch", "unseen_norms": "estimated"},
    ],
)
def test_an_evaluation_has_the_scores_of_the_training(flags: Any, tmp_path: Path) -> None:
    common = {"angles": (0.0, 40.0, 80.0), "rounds": 2, "eval_every": 2, "widths": (4,)}
    folder = ran(config.of(run_dir=str(tmp_path / "run"), **{**common, **flags})).folder
    runs = finished.open("run", folder, "last")
    of = predictions.predicted(runs, 0, predictions.own_parts(runs, 0))
    rows = predictions.rows(of, runs.data.objective, runs.data.dataset.classes)
    again = {row["name"]: row["score"] for row in rows if row["by"] == "domain"}
    logged = {name: domain.score for name, domain in runs.line(0).domains.items()}
    assert again == pytest.approx(logged, abs=1e-6)


@pytest.mark.slow
def test_what_nobody_trained_on_is_a_domain_of_its_own(tmp_path: Path) -> None:
    """The clients never seen get, of a personal algorithm, what a new client gets."""
    how: dict[str, Any] = {"algorithm": ("fedbn",), "norm": "batch", "widths": (4,)}
    how |= {"rounds": 3, "eval_every": 1, "select": "unseen_domain", "learning_rate": (0.5,)}
    chosen = config.of(run_dir=str(tmp_path / "grid"), **SMALL, **how)
    with no_figures():
        printed = train(chosen)
    assert NEVER_SEEN in printed
    table = (tmp_path / "grid" / "table.md").read_text()
    assert "unseen domain, %" in table
    frame = pd.read_csv(tmp_path / "grid" / "runs.csv")
    kinds = frame.groupby("held_out")["split"].unique().map(set)
    assert all({"unseen_domain", "unseen_clients"} < each for each in kinds)
    for held_out, by in (("80", "0"), ("0", "80")):
        runs = finished.open("run", tmp_path / "grid" / f"fedbn-{held_out}", "best")
        assert (runs.cell.validate, runs.cell.held_out) == (by, held_out)
        (index, other) = finished.chosen(runs)
        lines = log.read(runs.path)
        for run in (index, other):
            of_run = [x for x in lines if x.run == run and x.round]
            best = max(x.domains[by].score for x in of_run)
            selected = runs.line(run)
            assert selected.domains[by].score == best
            of = predictions.predicted(runs, run, predictions.own_parts(runs, run))
            rows = predictions.rows(of, runs.data.objective, runs.data.dataset.classes)
            again = {row["name"]: row for row in rows if row["by"] == "domain"}
            assert [*again] == [*selected.domains]
            for name, domain in selected.domains.items():
                assert (again[name]["split"], again[name]["examples"]) == (
                    domain.split,
                    domain.examples,
                )
                np.testing.assert_allclose(again[name]["score"], domain.score, atol=1e-6)
                np.testing.assert_allclose(again[name]["loss"], domain.loss, rtol=1e-4)
