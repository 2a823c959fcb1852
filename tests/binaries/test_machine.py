"""The flags of the machine that set options of JAX and XLA."""

import jax
import pytest

from fedjax_inv.checks import UsageError
from fedjax_inv.task import facts_of
from fedjax_inv_experiments import config
from fedjax_inv_experiments.assembly import machine, method, objective

CLASSES = objective.make("auto", "auto", "classes")


def precision_of(algorithm: str, **flags: str) -> str:
    """The precision of an experiment with an algorithm."""
    chosen = config.of(**flags)
    needed = facts_of(method.factory(chosen, algorithm, {}, CLASSES)).precision
    return machine.devices(chosen.machine, chosen.network.precision).precision or needed


def test_products_have_the_precision_that_is_asked_for_or_else_needed() -> None:
    assert {name: precision_of(name) for name in ("fedavg", "fedipg", "fl_games")} == {
        "fedavg": "default",
        "fedipg": "highest",
        "fl_games": "highest",
    }
    assert precision_of("fedavg", precision="high") == "high"
    assert precision_of("fedipg", precision="default") == "default"


def test_an_address_that_cannot_be_used_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def taken(*arguments: object) -> None:
        raise RuntimeError("INTERNAL: address already in use\nand more")

    monkeypatch.setattr(jax.config, "update", lambda name, value: None)
    monkeypatch.setattr(jax.distributed, "initialize", taken)
    chosen = config.of(processes="localhost:80,1,2")
    with pytest.raises(UsageError, match="--processes") as error:
        machine.connect(chosen.machine)
    assert "\n" not in str(error.value)
