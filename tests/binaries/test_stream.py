"""--hold=stream: a run whose examples come from the host is that with all examples in memory."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from fedjax_inv import devices
from fedjax_inv.checks import UsageError
from fedjax_inv_experiments import config
from fedjax_inv_experiments.assembly import experiment
from runs import Ran, go_on, halved, metrics, ran, states

FLAGS: dict[str, Any] = dict(
    algorithm=("scaffold",),  # whose clients keep something
    angles=(0.0, 30.0),
    widths=(8,),
    rounds=4,
    eval_every=2,
    clients=7,
    cohort=3,
    partition="iid",
    batch_size=64,
    devices="1",
)


@pytest.fixture(scope="module")
def streamed(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    folder = tmp_path_factory.mktemp("stream") / "run"
    return ran(config.of(run_dir=str(folder), hold="stream", **FLAGS))


@pytest.mark.slow
def test_a_streamed_run_has_the_states_and_figures_of_one_in_memory(
    streamed: Ran, tmp_path: Path
) -> None:
    resident = ran(config.of(run_dir=str(tmp_path / "run"), **FLAGS))
    one, other = (jax.tree.leaves(states(each.folder, 4)["state"]) for each in (streamed, resident))
    for leaf, expected in zip(one, other, strict=True):
        np.testing.assert_allclose(leaf, expected, rtol=0, atol=1e-5)
    for found, line in zip(metrics(streamed.folder), metrics(resident.folder), strict=True):
        assert found.keys() == line.keys()
        assert found["test_score"] == pytest.approx(line["test_score"], abs=1e-6)


@pytest.mark.slow
def test_a_stopped_run_goes_on_bit_for_bit(streamed: Ran, tmp_path: Path) -> None:
    folder = halved(streamed.job, tmp_path / "run")
    go_on(streamed.job, folder)
    assert metrics(folder) == metrics(streamed.folder)
    one, other = (jax.tree.leaves(states(each, 4)) for each in (folder, streamed.folder))
    for leaf, expected in zip(one, other, strict=True):
        np.testing.assert_array_equal(leaf, expected)


def test_examples_that_do_not_fit_into_memory_are_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    def streams(**flags: Any) -> bool:
        assembled = experiment.make(config.of(**(FLAGS | flags)))
        return assembled.streams(assembled.cells[0])

    assert not streams()
    assert streams(hold="stream")
    # The digits take 122 kB; 0.7 of the memory may be taken.
    monkeypatch.setattr(devices, "memory", lambda: 150_000)
    assert streams()
    assert not streams(hold="all")
    for flags in ({"watch_examples": 9}, {"hold": "stream", "algorithm": ("erm",)}):
        with pytest.raises(UsageError):
            streams(**flags)


def test_several_processes_do_not_stream() -> None:
    for processes in (("localhost:1234", "0", "2"), ("auto",)):
        with pytest.raises(UsageError, match="--hold"):
            config.of(hold="stream", processes=processes, **FLAGS)
