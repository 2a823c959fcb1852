"""Settings that cannot act are said."""

from typing import Any

import pytest

from fedjax_inv_experiments import config
from fedjax_inv_experiments.assembly import experiment, idle

MIXED: dict[str, Any] = dict(partition="mixed", clients=3, angles=(0.0, 40.0, 80.0), widths=(4,))


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (dict(momentum=0.9, optimizer="adam"), ["--momentum=0.9"]),
        (dict(momentum=0.9), []),
        (dict(server_momentum=0.5, server_optimizer="adam"), ["--server_momentum=0.5"]),
        (dict(server_momentum=0.5), []),
        (dict(MIXED, algorithm=("coral", "vrex_domains"), batch_size=3), ["=coral"]),
        (dict(MIXED, algorithm=("coral", "vrex_domains"), batch_size=1), ["=coral", "=vrex_dom"]),
        (dict(MIXED, algorithm=("coral", "mmd", "fishr", "fish"), batch_size=4), []),
        (dict(MIXED, algorithm=("mmd", "fishr"), cut=0), ["=mmd"]),
    ],
)
def test_a_setting_that_cannot_act_is_named(flags: dict[str, Any], named: list[str]) -> None:
    found = idle.settings(experiment.make(config.of(**flags)))
    assert len(found) == len(named)
    for text, name in zip(found, named, strict=True):
        assert name in text
