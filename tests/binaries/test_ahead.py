"""Work ahead: values from threads, their errors, and programs that compile before they run."""

import functools
import threading
from pathlib import Path
from typing import Any

import pytest

import runs
from fedjax_inv.ahead import Ahead
from fedjax_inv.checks import UsageError
from fedjax_inv.fit import Plan
from fedjax_inv_experiments import config
from fedjax_inv_experiments.assembly import experiment
from fedjax_inv_experiments.config import Config
from fedjax_inv_experiments.folder import progress
from runs import metrics, no_figures

run = functools.partial(runs.train, in_folders=True)


def tiny(folder: Path, **changes: object) -> Config:
    flags = dict(
        algorithm=("fedavg", "fedprox"),
        widths=(3,),
        local_steps=1,
        batch_size=8,
        rounds=2,
        eval_every=1,
        run_dir=str(folder),
    )
    return config.of(**(flags | changes))


def test_a_value_comes_from_a_thread_and_an_error_from_the_caller() -> None:
    made: list[str] = []
    has_begun = threading.Event()

    def make() -> str:
        made.append(threading.current_thread().name)
        has_begun.set()
        if made.count("MainThread") == 0 and len(made) == 2:
            raise UsageError("in a thread")
        return "value"

    with Ahead() as ahead:
        for expected in (["ahead"], ["ahead", "ahead", "MainThread"]):
            has_begun.clear()
            ahead.begin("a", make)
            ahead.begin("a", make)  # has begun already
            assert has_begun.wait(60)
            assert ahead.take("a", make) == "value"
            assert [name.partition("_")[0] for name in made] == expected
        assert ahead.take("a", lambda: "another") == "another"  # is taken only once
        ahead.begin("b", functools.partial(int, "no number"))
        with pytest.raises(ValueError, match="no number"):
            ahead.take("b", functools.partial(int, "no number"))


def test_what_waits_for_a_thread_is_made_at_once_and_an_error_waits_for_none() -> None:
    go_on = threading.Event()

    def interrupted() -> None:
        with Ahead() as ahead:
            for key in range(3):  # more than there are threads
                ahead.begin(key, go_on.wait)
            assert ahead.take(2, lambda: "here") == "here"
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    go_on.set()


def test_setting_up_compiles_next_to_nothing(tmp_path: Path) -> None:
    chosen = tiny(tmp_path, seeds=(0, 1, 2, 3), rounds=7, widths=(5,), held_out="60")
    with progress.compilations() as ends:
        assembled = experiment.make(chosen)
        for cell in assembled.cells:
            assembled.plan(cell)
    # The examples and their labels are placed, and the cohorts are drawn.
    assert len(ends) <= 2 + len(assembled.cells)


@pytest.mark.slow
def test_programs_compile_ahead_and_give_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second cell compiles nothing itself, and is as in a launch where nothing is ahead."""
    compiled: dict[str, bool] = {}
    ahead: list[str] = []
    train, compile_ahead = Plan.train, Plan.compile

    def listening(plan: Plan, callbacks: Any) -> object:
        with progress.compilations() as ends:
            fitted = train(plan, callbacks)
        compiled["fedprox" if compiled else "fedavg"] = bool(ends)
        return fitted

    def recorded(plan: Plan) -> Plan:
        ahead.append("fedprox")
        return compile_ahead(plan)

    monkeypatch.setattr(Plan, "train", listening)
    monkeypatch.setattr(Plan, "compile", recorded)
    with no_figures():
        run(tiny(tmp_path / "both"), tmp_path / "both")
        assert ahead == ["fedprox"]
        assert compiled == {"fedavg": True, "fedprox": False}
        run(tiny(tmp_path / "alone", algorithm=("fedprox",)), tmp_path / "alone")
        assert ahead == ["fedprox"]
    assert metrics(tmp_path / "both" / "fedprox-75") == metrics(tmp_path / "alone" / "fedprox-75")
