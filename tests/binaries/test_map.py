"""The map: equal terms for methods, its files, and rows added later."""

import csv
import dataclasses
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.figure import Figure

from fedjax_inv import algorithms
from fedjax_inv.checks import UsageError
from fedjax_inv.data import federation
from fedjax_inv.types import Examples
from fedjax_inv_experiments import command_line, config, run, sheet
from fedjax_inv_experiments import map as map_binary
from fedjax_inv_experiments.assembly import clients, experiment, grid, method
from fedjax_inv_experiments.report import differences
from fedjax_inv_experiments.report import figures as drawing
from fedjax_inv_experiments.studies import (
    map_cells,
    map_columns,
    map_figures,
    map_methods,
    map_table,
    study,
)
from fedjax_inv_experiments.studies.map_cells import MapCell
from runs import jobs, parsed, with_flags

RNG = np.random.default_rng(0)
NAN = float("nan")
STUDY = map_table.MAP.studies["map"]


def options(folder: Path, *words: str) -> study.StudyOptions:
    with parsed(f"--run_dir={folder}", *words, command=map_binary):
        return study.options(map_table.MAP, map_binary.own())


# equal terms


def rows(data: str) -> dict[str, config.Config]:
    return {
        row.label: command_line.of_arguments(["--nonfinite=mark", *row.flags])
        for row in STUDY.rows(data)
    }


@pytest.mark.parametrize("data", ["digits", "pacs"])
def test_all_methods_have_the_same_terms_and_as_many_settings(data: str) -> None:
    terms: dict[str, dict[str, Any]] = {}
    own = ("algorithm", "set", "learning_rate", "momentum", "batch_size")
    own += ("server_optimizer", "server_learning_rate", "server_epsilon", "cut", "pooled")
    for label, chosen in rows(data).items():
        name, column, _ = label.rsplit("-", 2)
        (cell,) = grid.cells(chosen, [None])
        whole = [run for run in cell.runs if not run.left_out]
        assert len(whole) == 9 * len(chosen.training.seeds), label
        assert len(chosen.training.seeds) >= 5
        same = {k: v for k, v in sheet.flat(chosen).items() if k not in own}
        assert terms.setdefault(column, same) == same, name
        assert chosen.evaluation.select == "validation"
        assert chosen.evaluation.nonfinite == "mark"
    assert len(terms) == len(map_table.columns_of(data))


def test_terms_follow_the_flags_of_all_rows(tmp_path: Path) -> None:
    words = ("--rounds=60", "--clients=20", "--columns=labels", "--rows=erm,feddg_ga")
    _, erm, adjusted = map_table.select("digits", options(tmp_path, *words))
    assert "--batch_size=640" in erm.flags
    assert "--set=num_rounds=60" in adjusted.flags
    # ERM takes as many examples as the clients of a round.
    _, erm, _ = map_table.select("digits", options(tmp_path, *words, "--cohort=5"))
    assert "--batch_size=160" in erm.flags


@pytest.mark.parametrize(
    ("more", "steps"),
    [
        ("", 50),
        ("--cohort=4", 20),
        ("--frequency=0.2", 30),
        ("--dropout=0.2", 40),
        ("--algorithm=erm", 5),
        # How many take part is known only afterwards.
        ("--algorithm=exit_strategy", NAN),
        ("--lossy=0:0.1", NAN),
        ("--dropout=0.2 --late=stale", NAN),
        ("--local_epochs=1 --local_steps=0", NAN),
    ],
)
def test_expected_steps_are_those_of_clients_that_take_part(more: str, steps: float) -> None:
    words = ["--preset=map_digits", "--local_steps=5", *more.split()]
    chosen = command_line.of_arguments(words)
    assert map_cells._steps(chosen) == pytest.approx(steps, nan_ok=True)


def test_all_listed_algorithms_that_fit_are_rows() -> None:
    there = {method.algorithm for method in map_methods.LISTED.values()}
    # FedBN needs layers that normalise. Ditto's global network is FedAvg's.
    assert set(algorithms.LISTED) - there == {"fedbn", "ditto"}


def test_clients_weigh_by_size_unless_a_method_has_weights_of_its_own() -> None:
    for name, row in map_methods.LISTED.items():
        chosen = command_line.of_arguments(row.flags(30, 32))
        (settings,) = method.settings(chosen.method).values()
        one = {key: value[0] for key, value in settings.items()}
        assert method.weighting(chosen, row.algorithm, one) in ("size", "own"), name


@pytest.mark.parametrize("name", map_columns.LISTED)
def test_one_number_sets_the_severity(name: str) -> None:
    shift = map_columns.LISTED[name]
    assert shift.at in shift.severities
    assert list(shift.severities) == sorted(set(shift.severities))
    if shift.domains == "own":
        assert "--held_out=sketch" in map_table.flags_of("pacs", shift, 1)
        return
    for severity in shift.severities:
        flags = map_table.flags_of("digits", shift, severity)
        experiment.make(command_line.of_arguments([*flags, "--seeds=0"]))


def test_kinds_of_shift_share_a_program() -> None:
    """So the map compiles a method's program once for most of them."""
    known = []
    for name in ("labels", "tail", "noise"):
        row = map_table.row(
            "digits", "fedavg", map_methods.LISTED["fedavg"], name, map_columns.LISTED[name].at
        )
        ready = experiment.make(command_line.of_arguments(row.flags))
        (cell,) = ready.cells
        prepared = ready.plan(cell)
        known.append(run.depends_on(ready, cell, prepared))
    assert all(each == known[0] for each in known)
    # Another program: more groups of domains, or another flag of training.
    groups = dataclasses.replace(prepared.experiment, num_groups=16)
    assert run.depends_on(ready, cell, dataclasses.replace(prepared, experiment=groups)) != known[0]
    for changes in ({"momentum": 0.5}, {"widths": (8,)}, {"missing": "reuse"}):
        other = dataclasses.replace(ready, config=with_flags(ready.config, **changes))
        assert run.depends_on(other, cell, prepared) != known[0], changes


def test_few_examples_are_padded() -> None:
    x, y = RNG.normal(size=(1797, 3)).astype(np.float32), np.arange(1797) % 10
    padded = clients.padded(federation.examples(x, y))
    assert padded.x.shape == (2048, 3)
    np.testing.assert_array_equal(padded.x[:1797], x)
    np.testing.assert_array_equal(padded.y[:1797], y)
    assert not np.asarray(padded.x[1797:]).any()
    even = federation.examples(x[:1792], y[:1792])
    assert clients.padded(even) is even
    large = jax.eval_shape(lambda: Examples(jnp.zeros((9991, 100, 100)), jnp.zeros(9991, int)))
    assert clients.padded(large) is large


# files


SMALL = (
    *("--rounds=2", "--eval_every=1", "--checkpoint_every=2", "--seeds=0,1", "--widths=4"),
    *("--local_steps=1", "--columns=labels"),
)


def lines(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines()))


@pytest.mark.slow
def test_a_small_map_to_which_a_row_is_added(tmp_path: Path) -> None:
    text = study.run_all(map_table.MAP, options(tmp_path, *SMALL, "--rows=fedprox"))
    folder = tmp_path / "digits"
    first, second, constant = lines(folder / "map_some.csv")
    assert [each["method"] for each in (first, second)] == ["fedavg", "fedprox"]
    assert constant["method"] == "most frequent class"
    assert 5 < float(constant["test"]) < 20
    assert {first["shift"], second["shift"]} == {"labels"}
    assert (first["word"], second["word"]) == ("", differences.NONE)
    of_seeds = [np.array(each["tests"].split(), float) for each in (first, second)]
    difference = of_seeds[1] - of_seeds[0]
    assert float(second["difference"]) == pytest.approx(difference.mean(), abs=1e-3)
    assert float(first["oracle"]) >= float(first["test"]) - 1e-6
    assert float(first["steps"]) == 10 * float(first["at_round"])
    assert 0 <= float(first["worst_tenth"]) <= 100
    assert "| fedprox" in text
    assert f"label skew ({map_columns.LISTED['labels'].at:g})" in text
    for ending in (".md", ".tex", ".png", ".pdf", "_runs.csv"):
        assert (folder / f"map_some{ending}").stat().st_size > 100

    own = "fedjax_inv.algorithms.fedavg:fedavg"
    beside = shutil.copy(folder / "map_some.csv", tmp_path / "other.csv")
    words = (*SMALL, f"--rows=fedprox,{own}", f"--beside={beside}")
    with jobs() as begun:
        text = study.run_all(map_table.MAP, options(tmp_path, *words))
    assert [job.cell.algorithm for job in begun] == [own]  # the other rows are finished
    one, _, other, _ = lines(folder / "map_some.csv")
    assert (one["method"], other["method"]) == ("fedavg", own)
    assert one["tests"] == other["tests"]
    assert (float(other["difference"]), float(other["p"])) == (0, 1)
    assert "1 of 1 cells have the same word" in text


def test_the_best_methods_of_a_finished_map(tmp_path: Path) -> None:
    means = {"fedavg": "nan", "a": "1", "b": "-2", "c": "3", "d": "2", "e": "nan", "erm": "9"}
    text = "method,shift,severity,word,difference\n" + "".join(
        f"{name},labels,1,{'' if name == 'fedavg' else 'better'},{value}\n"
        for name, value in means.items()
    )
    (tmp_path / "map.csv").write_text(text)
    assert map_table.best_of(tmp_path / "map.csv") == ("fedavg", "c", "d", "a")
    with pytest.raises(UsageError, match="--study"):
        map_table.best_of(tmp_path / "none.csv")
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(UsageError, match="csv"):
        map_table.best_of(tmp_path / "other.csv")


# figures


def cell(method: str, shift: str, severity: float, tests: tuple[float, ...], word: str) -> MapCell:
    test = float(np.mean(tests)) if tests else NAN
    difference = NAN if method == "fedavg" else test - 50
    return MapCell(method, shift, severity, "", 2, 2, test, tests, difference, word=word)


def test_figures_say_what_the_cells_say(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr(drawing, "save", lambda figure, *rest, **more: drawn.append(figure))
    shown = [
        cell("fedavg", "labels", 10, (49, 51), ""),
        cell("scaffold", "labels", 10, (60, 62), "better"),
        cell("fedprox", "labels", 10, (30, 32), "worse"),
        cell("fedavg", "noise", 0.8, (49, 51), ""),
        cell("scaffold", "noise", 0.8, (), differences.NONE),
    ]
    map_figures.heat_map(tmp_path / "map.png", "digits", shown)
    axis = drawn[0].axes[0]
    texts = {text.get_position(): text.get_text() for text in axis.texts}
    assert texts == {
        **{(0, 0): "50.0", (0, 1): "+11.0 ▲", (0, 2): "-19.0 ▼"},
        **{(1, 0): "50.0", (1, 1): "diverged", (1, 2): "not run"},
    }
    names = [label.get_text() for label in axis.get_yticklabels()]
    assert names == ["FedAvg", "SCAFFOLD", "FedProx"]
    values = axis.images[0].get_array()
    assert values[1, 0] == 11
    assert values.mask[0].all()  # FedAvg's row has no colour

    places = [("labels", 1), ("labels", 3), ("noise", 0.5)]
    shown = [
        cell(method, shift, severity, (level - severity, level - severity + 2), "")
        for method, level in (("fedavg", 50), ("fedprox", 60))
        for shift, severity in places
    ]
    map_figures.by_severity(tmp_path / "severity.png", "digits", shown)
    panels = drawn[1].axes
    assert [axis.get_title() for axis in panels] == ["label skew", "wrong labels"]
    names = [label.get_text() for label in panels[0].get_xticklabels()]
    assert names == ["1", "3"]
    first, second = panels[0].lines
    np.testing.assert_allclose(first.get_ydata(), [50, 48])
    np.testing.assert_allclose(second.get_ydata(), [60, 58])


def test_a_method_is_compared_with_fedavg_by_the_same_rule() -> None:
    by_select = {"labels": {0: 0.1, 1: 0.2}, "noise": {0: 0.3, 1: 0.4}}
    by_oracle = {
        ("fedavg", "labels"): {0: 0.5, 1: 0.7},
        ("fedprox", "labels"): {0: 0.6, 1: 0.7},
        ("fedavg", "noise"): {},
        ("fedprox", "noise"): {0: 0.6, 1: 0.7},
    }
    found, p_values = map_cells.compared(by_oracle, by_select)
    assert found["fedprox", "labels"].mean == pytest.approx(0.05)
    assert found["fedprox", "noise"].mean == pytest.approx(0.3)  # FedAvg has none by the rule
    assert np.isnan(found["fedavg", "labels"].mean)
    assert p_values["fedprox", "labels"] >= found["fedprox", "labels"].p


def test_rules_stand_side_by_side(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr(drawing, "save", lambda figure, *rest, **more: drawn.append(figure))
    constant = cell("most frequent class", "colour", 0.8, (30, 30), "")
    one = cell("fedavg", "colour", 0.8, (30, 30), "")._replace(is_constant=True)
    shown = {
        "": [one, cell("fedprox", "colour", 0.8, (20, 22), "worse"), constant],
        "last_if_agreed": [cell("fedprox", "colour", 0.8, (), "")],
        "oracle": [one, cell("fedprox", "colour", 0.8, (60, 62), "better")],
    }
    map_figures.rules(tmp_path / "rules.png", "digits", shown)
    axis = drawn[0].axes[0]
    texts = {text.get_position(): text.get_text() for text in axis.texts if text.get_text()}
    assert texts == {
        **{(0, 0): "30°", (0, 1): "21 ▼", (0, 2): "30"},
        **{(2, 1): "none", (3, 0): "30°", (3, 1): "61 ▲"},
    }
    names = [label.get_text().replace("\n", " ") for label in axis.get_xticklabels()]
    assert names == [*map_figures.RULES.values()]


def test_the_worst_tenth_of_the_clients() -> None:
    scores = [0.5, None, 0.1, *np.linspace(0.6, 1, 18)]
    assert map_cells.worst_tenth(scores) == pytest.approx((0.1 + 0.5) / 2)
    assert map_cells.worst_tenth([0.3, 0.2]) == 0.2
    assert np.isnan(map_cells.worst_tenth([None]))
