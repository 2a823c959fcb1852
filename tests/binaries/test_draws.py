"""Settings that are drawn at random."""

import json

import numpy as np
import pytest

from fedjax_inv_experiments import config
from fedjax_inv_experiments.assembly import draws, factories, grid
from fedjax_inv_experiments.config import Config
from runs import with_flags


def drawn(chosen: Config) -> dict[str, list[dict[str, float]]]:
    """The settings of each algorithm, each of which all seeds have."""
    found = {}
    for cell in grid.cells(chosen, ["75"]):
        by_seed = {
            seed: [run.hyper for run in cell.runs if run.seed == seed]
            for seed in chosen.training.seeds
        }
        found[cell.algorithm] = by_seed[chosen.training.seeds[0]]
        assert all(hypers == found[cell.algorithm] for hypers in by_seed.values())
    return found


def test_seeds_share_draws_and_methods_have_their_own() -> None:
    names = ["fedprox", "fedavg", "vrex"]
    few, many = (
        drawn(config.of(algorithm=names, draws=count, seeds=seeds))
        for count, seeds in ((5, (0, 1)), (40, (7,)))
    )
    assert {name: hypers[:5] for name, hypers in many.items()} == few
    for name, hypers in many.items():
        assert len({*map(str, hypers)}) == len(hypers) == 40
        for of, (low, high) in draws.RANGES.get(name, {}).items():
            shares = np.log([hyper[of] / low for hyper in hypers]) / np.log(high / low)
            assert -0.01 < shares.min() < 0.15
            assert 0.85 < shares.max() < 1.01
    rates = [{hyper["learning_rate"] for hyper in hypers} for hypers in many.values()]
    assert len(set.union(*rates)) > 100  # of 120, but for equal ones by rounding


def test_what_a_flag_sets_stays() -> None:
    (hypers,) = drawn(config.of(algorithm=["fedprox"], draws=4, learning_rate=[0.1])).values()
    assert {hyper["learning_rate"] for hyper in hypers} == {0.1}
    assert len({hyper["proximal"] for hyper in hypers}) == 4
    (hypers,) = drawn(config.of(algorithm=["fedprox"], draws=4, set=["proximal=0.5"])).values()
    assert {hyper["proximal"] for hyper in hypers} == {0.5}
    assert len({hyper["learning_rate"] for hyper in hypers}) == 4
    assert {hyper["server_learning_rate"] for hyper in hypers} == {1.0}
    adaptive = config.of(draws=4, server_optimizer="adam", learning_rate=[1.0])
    (hypers,) = drawn(adaptive).values()
    assert len({hyper["server_learning_rate"] for hyper in hypers}) == 4
    # Nothing is left to draw: one setting.
    assert len(drawn(config.of(draws=4, learning_rate=[1.0]))["fedavg"]) == 1


def test_penalties_start_late_and_divide_the_objective() -> None:
    """A large penalty of the plain objective, from the first round on, diverges."""
    chosen = config.of(algorithm=["fedipg", "vrex"], draws=20, rounds=40)
    for cell in grid.cells(chosen, ["75"]):
        assert cell.settings["scale_loss"] is True
        warmups = [run.hyper["warmup_rounds"] for run in cell.runs]
        assert 1 <= min(warmups) < 5 < 10 < max(warmups) <= 20
    own = config.of(algorithm=["vrex"], draws=4, set=["scale_loss=false", "warmup_rounds=3"])
    (cell,) = grid.cells(own, ["75"])
    assert cell.settings["scale_loss"] is False
    assert {run.hyper["warmup_rounds"] for run in cell.runs} == {3.0}


def test_a_configuration_with_draws_is_kept() -> None:
    chosen = config.of(draws=4, environment="rotated")
    assert with_flags(chosen, rounds=7).training.learning_rate == ()
    record = json.loads(json.dumps(config.to_record(chosen)))
    assert config.from_record(record) == chosen
    (cell,) = grid.cells(chosen, ["75"])
    assert grid.of_record(cell.record()) == cell


@pytest.mark.parametrize("name", draws.RANGES)
def test_each_distribution_is_of_a_real_setting(name: str) -> None:
    kinds = factories.hyperparameters(name)
    assert all(float in kinds[each] for each in draws.RANGES[name])
