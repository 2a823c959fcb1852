"""The flags of the machine that set options of JAX and XLA."""

import os

import jax
import pytest

from fedjax_inv.checks import UsageError
from fedjax_inv.inputs import Run
from fedjax_inv.task import facts_of
from fedjax_inv_experiments import assemble, build, config, machine
from fedjax_inv_experiments.grid import Cell


def precision_of(algorithm: str, **flags: str) -> str:
    """The precision of an experiment with an algorithm."""
    rates = {"learning_rate": 0.1, "server_learning_rate": 1.0}
    cell = Cell(algorithm, {}, None, (Run(0, rates),))
    chosen = config.of(**flags)
    task = build.task(chosen, "classes")
    needed = facts_of(assemble.factory(chosen, cell, task)).precision
    return machine.devices(chosen).precision or needed


def test_products_have_the_precision_that_is_asked_for_or_else_needed() -> None:
    assert {name: precision_of(name) for name in ("fedavg", "fedipg", "fl_games")} == {
        "fedavg": "default",
        "fedipg": "highest",
        "fl_games": "highest",
    }
    assert precision_of("fedavg", precision="high") == "high"
    assert precision_of("fedipg", precision="default") == "default"


def test_deterministic_operations_are_a_flag_of_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--one=1")
    machine.prepare(config.of())
    assert os.environ["XLA_FLAGS"] == "--one=1"
    machine.prepare(config.of(deterministic=True))
    assert os.environ["XLA_FLAGS"] == "--one=1 --xla_gpu_deterministic_ops=true"


def test_an_address_that_cannot_be_used_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def taken(*arguments: object) -> None:
        raise RuntimeError("INTERNAL: address already in use\nand more")

    monkeypatch.setattr(jax.config, "update", lambda name, value: None)
    monkeypatch.setattr(jax.distributed, "initialize", taken)
    chosen = config.of(coordinator_address="localhost:80", num_processes=2, process_id=1)
    with pytest.raises(UsageError, match="--coordinator_address") as error:
        machine.connect(chosen)
    assert "\n" not in str(error.value)
