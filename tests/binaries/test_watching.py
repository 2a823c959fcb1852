"""The progress of a run: TensorBoard's events and stderr."""

import importlib.util
import io
import struct
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_inv.checks import UsageError
from fedjax_inv.inputs import combinations
from fedjax_inv_experiments import config
from fedjax_inv_experiments.assembly.grid import Cell
from fedjax_inv_experiments.folder import events, log
from fedjax_inv_experiments.folder.progress import ProgressLines
from fedjax_inv_experiments.folder.records import Domain, Line
from fedjax_inv_experiments.run import prepare
from runs import go_on, halved, line, ran

Scalars = list[tuple[str, int, float]]  # name, step, value


def scalars(folder: Path) -> Scalars:
    """What the event files of a folder say: records of a length, its sum, data and their sum."""
    from tensorboardX.proto.event_pb2 import Event

    told: Scalars = []
    for path in sorted(folder.iterdir()):
        file = io.BytesIO(path.read_bytes())
        while head := file.read(12):
            event = Event.FromString(file.read(struct.unpack("<Q", head[:8])[0]))
            file.read(4)
            told += [(value.tag, event.step, value.simple_value) for value in event.summary.value]
    return told


@pytest.mark.slow
def test_events_say_what_the_log_says_and_no_step_twice(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    chosen = config.of(
        angles=(0.0, 40.0),
        rounds=4,
        eval_every=2,
        widths=(4,),
        seeds=(0, 1),
        run_dir=str(tmp_path / "whole"),
        tensorboard=True,
    )
    whole = ran(chosen)
    # Stopped after a segment, and killed once it had told a second one.
    folder = halved(whole.job, tmp_path / "half")
    lines = SimpleNamespace(lines=log.read(folder), new=log.read(whole.folder)[-2:])
    late = events.Events(folder, whole.job.cell, cast(Any, lines), "accuracy")
    late.begin(cast(Any, None))
    late.evaluated(cast(Any, None))
    late.end(cast(Any, None))
    go_on(whole.job, folder)
    for place in (whole.folder, folder):
        lines = log.read(place)
        runs = sorted(each.name for each in (place / "tensorboard").iterdir())
        assert runs == ["seed=0", "seed=1"]
        for index, run in enumerate(runs):
            told = scalars(place / "tensorboard" / run)
            steps = {(name, step): value for name, step, value in told}
            assert len(steps) == len(told)
            mine = [each for each in lines if each.run == index]
            assert {step for _, step in steps} == {0, 2, 4}
            for one in mine:
                at = one.round
                assert ("training/loss", at) in steps or at == 0
                expected = {
                    "training/loss": one.train_loss,
                    "accuracy/test": one.test_score,
                    "accuracy/worst_domain": one.worst_score,
                    "megabytes_sent": one.bytes / 1e6,
                }
                for name, domain in one.domains.items():
                    expected[f"accuracy_by_domain/{name}"] = domain.score
                    expected[f"loss_by_domain/{name}"] = domain.loss
                for name, value in expected.items():
                    if value is not None:
                        assert steps[name, at] == pytest.approx(value, rel=1e-6)


def test_runs_are_called_by_what_differs() -> None:
    cell = Cell("fedavg", {}, None, tuple(combinations((0, 1), rate=(0.1, 0.3), penalty=(2.0,))))
    expected = [f"seed={seed} rate={rate}" for rate in (0.1, 0.3) for seed in (0, 1)]
    assert events.run_names(cell) == expected


def test_each_domain_has_its_own_tag() -> None:
    """TensorBoard allows few characters in a tag."""
    domains = {name: Domain(score, None, 4, "") for score, name in enumerate(["a_b", "a b", "a:b"])}
    found = dict(events.scalars(line(1, 0.5, domains=domains)))
    names = ("a_b", "a_b_", "a_b__")
    assert [found[f"accuracy_by_domain/{name}"] for name in names] == [0, 1, 2]


def test_events_leave_out_what_is_no_number() -> None:
    domains = {"empty": Domain(0.0, None, 0, "validation"), "diverged": Domain(np.nan, 2.0, 4, "")}
    line_of = line(1, np.nan, domains=domains, train_loss=np.inf)
    assert dict(events.scalars(line_of)) == {"loss_by_domain/diverged": 2.0, "megabytes_sent": 0.0}


def test_without_the_package_nothing_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "tensorboardX" else find(name)
    )
    chosen = config.of(tensorboard=True, run_dir=str(tmp_path / "run"))
    with pytest.raises(UsageError, match=r"^--tensorboard=true: "):
        prepare(chosen, tmp_path / "run", in_folders=False)
    assert not (tmp_path / "run").exists()


class Terminal(io.StringIO):
    """A stderr that may be a terminal."""

    def __init__(self, is_one: bool) -> None:
        super().__init__()
        self.is_one = is_one

    def isatty(self) -> bool:
        return self.is_one


@pytest.mark.parametrize("is_terminal", [False, True])
def test_progress(is_terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal(is_terminal)
    monkeypatch.setattr(sys, "stderr", screen)

    def lines(loss: float | None) -> list[Line]:
        of_both: dict[str, Any] = dict(train_loss=loss, test_score=0.25, seconds=1.5)
        return [line(1, accuracy, **of_both) for accuracy in (0.5, 0.7)]

    plan = SimpleNamespace(rounds=100, is_compiled=False)
    seen, fitted = SimpleNamespace(new=lines(None)), SimpleNamespace(round=0, is_over=False)
    fitted.plan = plan
    progress = ProgressLines("fedavg, held out 75", cast(Any, seen))
    progress.begin(fitted)
    jax.jit(lambda x: x * 3.25 + 17)(jnp.ones(3))
    progress.evaluated(cast(Any, fitted))
    for fitted.round in range(1, 101):
        seen.new = lines(2.0)
        progress.evaluated(cast(Any, fitted))
    progress.end(cast(Any, fitted))
    text = screen.getvalue()
    assert text.count("fedavg, held out 75: compiling\n") == 1
    assert text.count("fedavg, held out 75: compiled in ") == 1
    assert "round 0 of 100, valid 0.600, test 0.250, mean of 2 runs, 1.5 s\n" in text
    assert ("\r" in text) == is_terminal
    if is_terminal:
        assert "| 100/100 [" in text
        assert "| 1/100 [00:00<?" in text  # no estimate from the time of compiling
        assert "loss=2.000" in text
    else:
        told = [text.partition(": ")[2] for text in text.splitlines()]
        assert "round 5 of 100, valid 0.600, test 0.250, loss 2.000, mean of 2 runs, 1.5 s" in told
        assert len([each for each in told if each.startswith("round ")]) == 21
